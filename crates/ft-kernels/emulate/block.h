// A grid on one processor: the threads of a block are fibers, blocks run one after another. A thread that starts when another
// has just ended takes over its fiber.
//
// Between two operations at which threads meet (a barrier, a shuffle, an mma) a thread runs alone for as long as it
// can; which one is next comes from the seed. So what is read before it was written, or written while another still
// reads, shows as a wrong result for some seed:
//   seed % 3 == 0  warp after warp as far as it comes, in order      (a late warp shows)
//   seed % 3 == 1  the same in an order that is drawn anew at every barrier
//   seed % 3 == 2  any thread that can run
#pragma once

#include "fiber.h"
#include "types.h"

#include <cstdarg>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace emulate {

/// Shared memory that a block may have on every GPU from sm_80 on (sm_86 and sm_89 have the least).
constexpr size_t MOST_SHARED = 99 * 1024;
constexpr size_t GUARD = 256;

struct Random {
    uint64_t state;
    /// Streams of adjacent seeds must not be the same stream at another position: the seed goes through the mixer once.
    explicit Random(uint64_t seed) : state(seed) { state = next(); }
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    /// Below `n`.
    unsigned below(unsigned n) { return static_cast<unsigned>((next() >> 32) * n >> 32); }
    /// In [-1, 1).
    float uniform() { return static_cast<float>(next() >> 40) / static_cast<float>(1 << 23) - 1.0f; }
    /// Roughly normal.
    float normal() { return (uniform() + uniform() + uniform() + uniform()) * 0.866f; }
    template <class T>
    void shuffle(T* items, unsigned n) {
        for (unsigned i = n; i > 1; i--) std::swap(items[i - 1], items[below(i)]);
    }
};

/// A copy to shared memory that was asked for and has not landed.
struct Copy {
    void* to;
    unsigned bytes;
    unsigned char data[16];
};

struct Thread {
    std::unique_ptr<Fiber> fiber = std::make_unique<Fiber>();
    uint3 index;
    unsigned number = 0;
    bool started = false, ended = false;
    const char* waits = nullptr;  // for what, to be shown when nothing can run
    int line = 0;
    std::vector<Copy> copies;
    std::vector<size_t> groups;  // ends of the committed groups in `copies`
};

/// Lanes of a warp that wait for each other.
struct Meeting {
    unsigned wanted, arrived;
    const char* what;
    void (*combine)(void** lanes, unsigned mask);
    void* lanes[32];
};

inline Thread* current = nullptr;
inline dim3 grid_size, block_size;
inline uint3 block_index;

namespace block {
inline std::vector<std::unique_ptr<Thread>> threads;
inline unsigned count = 0, living = 0, at_barrier = 0;
inline std::vector<unsigned> living_lanes;  // of each warp
inline std::vector<std::vector<Meeting>> meetings;
inline const char* barrier_file = nullptr;
inline int barrier_line = 0;
inline int barrier_sum = 0, barrier_result = 0;
/// A bit for each thread that can run, at its rank.
inline std::vector<uint64_t> ready;
inline std::vector<unsigned> rank, thread_of_rank;
/// The number of threads, if the ranks are in their order; 0 otherwise.
inline unsigned in_order = 0;
inline Random random(0);
inline uint64_t seed = 0;
inline std::function<void()> body;
inline unsigned char* shared = nullptr;
inline size_t shared_size = 0;
}  // namespace block

/// Ends the process after a message; the software driver (tools/soft-cuda) puts its own in.
inline void (*leave)() = [] { std::exit(1); };

[[noreturn]] inline void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    std::fprintf(stderr, "emulator (seed %llu, block %u %u %u", static_cast<unsigned long long>(block::seed),
                 block_index.x, block_index.y, block_index.z);
    if (current) std::fprintf(stderr, ", thread %u", current->number);
    std::fprintf(stderr, "): ");
    std::vfprintf(stderr, format, list);
    std::fprintf(stderr, "\n");
    va_end(list);
    leave();
    std::abort();
}

namespace block {

inline void set_ready(unsigned thread) {
    unsigned r = rank[thread];
    ready[r / 64] |= 1ull << (r % 64);
    threads[thread]->waits = nullptr;
}

/// The order in which threads are asked whether they can run. Only called when none is marked.
inline void draw_ranks() {
    if (seed % 3 == 0 && in_order == count) return;
    in_order = seed % 3 == 0 ? count : 0;
    unsigned warps = (count + 31) / 32;
    std::vector<unsigned> warp(warps), lane(32);
    for (unsigned w = 0; w < warps; w++) warp[w] = w;
    if (seed % 3 != 0) random.shuffle(warp.data(), warps);
    unsigned next = 0;
    for (unsigned w = 0; w < warps; w++) {
        for (unsigned l = 0; l < 32; l++) lane[l] = l;
        if (seed % 3 != 0) random.shuffle(lane.data(), 32);
        for (unsigned l = 0; l < 32; l++) {
            unsigned thread = warp[w] * 32 + lane[l];
            if (thread < count) {
                rank[thread] = next;
                thread_of_rank[next++] = thread;
            }
        }
    }
}

inline int first_ready(unsigned from) {
    unsigned words = static_cast<unsigned>(ready.size());
    uint64_t masked = ready[from / 64] & (~0ull << (from % 64));
    for (unsigned i = 0, w = from / 64; i <= words; i++) {
        if (masked) return static_cast<int>(w * 64 + static_cast<unsigned>(__builtin_ctzll(masked)));
        w = (w + 1) % words;
        masked = ready[w];
    }
    return -1;
}

[[noreturn]] inline void stuck() {
    std::fprintf(stderr, "no thread of the block can run:\n");
    for (unsigned t = 0; t < count; t++) {
        if (threads[t]->waits && (t % 32 == 0 || threads[t]->waits != threads[t - 1]->waits || threads[t]->line != threads[t - 1]->line))
            std::fprintf(stderr, "  from thread %u: waits at %s:%d\n", t, threads[t]->waits, threads[t]->line);
    }
    fail("deadlock: %u of %u threads at a barrier, %u living", at_barrier, count, living);
}

/// Makes the next thread that can run the current one.
inline Thread* choose_next() {
    int r = first_ready(seed % 3 == 2 ? random.below(count) : 0);
    if (r < 0) stuck();
    ready[static_cast<unsigned>(r) / 64] &= ~(1ull << (static_cast<unsigned>(r) % 64));
    current = threads[thread_of_rank[static_cast<unsigned>(r)]].get();
    return current;
}

inline void start();

/// Leaves the thread that runs; comes back when it is chosen again. `from` is null in the host.
inline void run_next(Thread* from) {
    Thread* next = choose_next();
    if (next == from) return;
    if (!next->started) {
        next->started = true;
        prepare(*next->fiber, start);
    }
    switch_to(from ? *from->fiber : host, *next->fiber, false);
}

inline void open_barrier() {
    at_barrier = 0;
    barrier_file = nullptr;
    barrier_result = barrier_sum;
    barrier_sum = 0;
    draw_ranks();
    for (unsigned t = 0; t < count; t++)
        if (!threads[t]->ended) set_ready(t);
}

/// Whether a meeting waits for no lane any more (a lane may have ended).
inline bool is_complete(unsigned warp, const Meeting& meeting) {
    return (meeting.wanted & living_lanes[warp]) == meeting.arrived;
}

/// Completes meeting `i` of a warp.
inline void complete(unsigned warp, size_t i) {
    auto& open = meetings[warp];
    open[i].combine(open[i].lanes, open[i].arrived);
    for (unsigned lanes = open[i].arrived; lanes != 0; lanes &= lanes - 1)
        set_ready(warp * 32 + static_cast<unsigned>(__builtin_ctz(lanes)));
    open.erase(open.begin() + static_cast<long>(i));
}

/// What the thread that runs leaves behind when it ends.
inline void end_thread() {
    Thread* self = current;
    if (!self->copies.empty()) fail("a thread ends before its asynchronous copies have landed");
    self->ended = true;
    living--;
    unsigned warp = self->number / 32;
    living_lanes[warp] &= ~(1u << (self->number % 32));
    for (size_t i = 0; i < meetings[warp].size();) {
        if (is_complete(warp, meetings[warp][i])) {
            complete(warp, i);
        } else {
            i++;
        }
    }
    if (living > 0 && at_barrier == living) open_barrier();
}

/// Leaves a fiber whose thread has ended.
[[noreturn]] inline void go_to(Fiber& from, Fiber& to) {
    switch_to(from, to, true);
    std::abort();
}

/// What a fiber runs: a thread. If the next thread has not started, it runs on the same stack.
inline void start() {
    switched(nullptr);
    for (;;) {
        body();
        end_thread();
        Thread* ended = current;
        if (living == 0) {
            current = nullptr;
            go_to(*ended->fiber, host);
        }
        Thread* next = choose_next();
        if (next->started) go_to(*ended->fiber, *next->fiber);
        next->started = true;
        std::swap(ended->fiber, next->fiber);
    }
}

}  // namespace block

/// A barrier of the block; gives the sum of `value` over its threads.
inline int barrier(int value, const char* file, int line) {
    using namespace block;
    if (at_barrier == 0) {
        barrier_file = file;
        barrier_line = line;
    } else if (barrier_line != line || std::strcmp(barrier_file, file) != 0) {
        fail("threads of a block wait at different barriers: %s:%d and %s:%d", barrier_file, barrier_line, file, line);
    }
    barrier_sum += value;
    current->waits = file;
    current->line = line;
    at_barrier++;
    Thread* self = current;
    if (at_barrier == living) open_barrier();
    run_next(self);
    return barrier_result;
}

/// The lanes of `mask` meet; the last one runs `combine` on what all of them brought.
inline void meet(const char* what, unsigned mask, void* mine, void (*combine)(void**, unsigned)) {
    using namespace block;
    Thread* self = current;
    unsigned warp = self->number / 32, lane = self->number % 32;
    if (!(mask >> lane & 1)) fail("%s: the lane is not in its own mask %08x", what, mask);
    auto& open = meetings[warp];
    Meeting* meeting = nullptr;
    for (Meeting& m : open)
        if (m.wanted == mask) meeting = &m;
    if (!meeting) {
        open.push_back(Meeting{mask, 0, what, combine, {}});
        meeting = &open.back();
    }
    if (meeting->combine != combine)
        fail("lanes of a warp meet in different operations: %s and %s", meeting->what, what);
    meeting->arrived |= 1u << lane;
    meeting->lanes[lane] = mine;
    self->waits = what;
    self->line = 0;
    if (is_complete(warp, *meeting)) complete(warp, static_cast<size_t>(meeting - open.data()));
    run_next(self);
}

inline void run_block() {
    using namespace block;
    living = count;
    at_barrier = 0;
    barrier_sum = 0;
    unsigned warps = (count + 31) / 32;
    living_lanes.assign(warps, 0);
    meetings.assign(warps, {});
    ready.assign((count + 63) / 64, 0);
    rank.resize(count);
    thread_of_rank.resize(count);
    while (threads.size() < count) threads.push_back(std::make_unique<Thread>());
    draw_ranks();
    for (unsigned t = 0; t < count; t++) {
        Thread& thread = *threads[t];
        thread.number = t;
        thread.index = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
        thread.started = thread.ended = false;
        thread.copies.clear();
        thread.groups.clear();
        living_lanes[t / 32] |= 1u << (t % 32);
        set_ready(t);
    }
    run_next(nullptr);
}

/// Runs every block of a grid, in an order drawn from the seed (seed 0: as counted).
inline void run_grid(dim3 grid, dim3 threads, size_t shared, uint64_t seed, std::function<void()> body) {
    block::seed = seed;
    block::random = Random(seed);
    block::count = threads.x * threads.y * threads.z;
    block::body = std::move(body);
    grid_size = grid;
    block_size = threads;
    block_index = {0, 0, 0};
    if (block::count == 0 || block::count > 1024) fail("a block of %u threads", block::count);
    if (shared > MOST_SHARED) fail("%zu bytes of shared memory; an sm_86 has %zu", shared, MOST_SHARED);
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) fail("a grid of %u %u %u", grid.x, grid.y, grid.z);
    std::vector<unsigned> order(static_cast<size_t>(grid.x) * grid.y * grid.z);
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    if (seed != 0) block::random.shuffle(order.data(), static_cast<unsigned>(order.size()));
    for (unsigned i : order) {
        block_index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        // Guards before and after; the address sanitizer sees every step into them.
        size_t whole = (GUARD + shared + GUARD + 255) / 256 * 256;
        unsigned char* memory = static_cast<unsigned char*>(std::aligned_alloc(256, whole));
        std::memset(memory, 0xa5, whole);
        block::shared = memory + GUARD;
        block::shared_size = shared;
        std::memset(block::shared, 0xff, shared);
#ifdef EMULATE_ASAN
        __asan_poison_memory_region(memory, GUARD);
        __asan_poison_memory_region(block::shared + shared, whole - GUARD - shared);
#endif
        run_block();
#ifdef EMULATE_ASAN
        __asan_unpoison_memory_region(memory, whole);
#endif
        for (size_t b = 0; b < GUARD; b++)
            if (memory[b] != 0xa5 || memory[GUARD + shared + b] != 0xa5) fail("written outside shared memory");
        std::free(memory);
    }
}

/// `kernel<<<grid, threads, shared>>>(arguments...)`.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 threads, size_t shared, uint64_t seed, A... arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it is given");
    std::tuple<P...> all(static_cast<P>(arguments)...);
    run_grid(grid, threads, shared, seed, [&] { std::apply(kernel, all); });
}

}  // namespace emulate
