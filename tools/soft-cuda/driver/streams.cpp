// Streams and events: queues, the order of execution, and the check that events order what shares memory.

#include "driver.h"
#include "faults.h"

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <unistd.h>

namespace soft {

namespace {

enum class Order { LATE, EARLY, RANDOM };

struct State {
    std::recursive_mutex mutex;
    std::vector<std::unique_ptr<Stream>> streams;
    std::set<Event*> events;
    /// The work that is complete for the thread that makes the calls.
    Clock host;
    Order order = Order::LATE;
    uint64_t random = 0;
    State();
};

/// Never destroyed: Rust's own destructors may come later.
State& state() {
    static State* only = new State;
    return *only;
}

State::State() {
    const char* text = std::getenv("SOFT_CUDA_ORDER");
    std::string wanted = text && *text ? text : "late";
    if (wanted == "early") {
        order = Order::EARLY;
    } else if (wanted.rfind("random:", 0) == 0) {
        order = Order::RANDOM;
        random = std::strtoull(wanted.c_str() + 7, nullptr, 10);
    } else if (wanted != "late") {
        std::fprintf(stderr, "soft-cuda: SOFT_CUDA_ORDER is `%s`; expected late, early or random:SEED\n", text);
        _exit(1);
    }
    // The default stream.
    streams.push_back(std::make_unique<Stream>());
    streams.back()->number = 0;
}

void print(const char* format, va_list list) {
    char thread[64] = "";
    pthread_getname_np(pthread_self(), thread, sizeof(thread));
    std::fprintf(stderr, "soft-cuda (thread %s): ", thread);
    std::vfprintf(stderr, format, list);
    std::fprintf(stderr, "\n");
}

void merge(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

bool reached(const Clock& clock, const Access& access) {
    if (!access.stream) return true;
    return access.stream->number < clock.size() && clock[access.stream->number] >= access.time;
}

void check_order(const Stream& stream, const Operation& operation, const Use& use) {
    auto check = [&](const Access& other) {
        if (other.stream == &stream || reached(stream.clock, other)) return;
        stop("`%s` on stream %u and `%s` on stream %u use the same %zu bytes %s, and no event orders them",
             other.name.c_str(), other.stream->number, operation.name.c_str(), stream.number, use.memory->size,
             use.memory->on_device ? "on the device" : "of page-locked host memory");
    };
    Memory& memory = *use.memory;
    check(memory.written);
    if (use.writes)
        for (const auto& [_, access] : memory.read) check(access);
    Access access{&stream, stream.queued, operation.name};
    if (use.writes) {
        memory.written = access;
        memory.read.clear();
    } else {
        memory.read[&stream] = access;
    }
}

double now() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

/// With SOFT_CUDA_TIMES=1: how often each operation ran and how long, printed at the end of the process.
struct Times {
    std::map<std::string, std::pair<uint64_t, double>> of;
    ~Times() {
        for (const auto& [name, sum] : of)
            std::fprintf(stderr, "soft-cuda: %10.1f ms %8llu x %s\n", sum.second,
                         static_cast<unsigned long long>(sum.first), name.c_str());
    }
};

void run_timed(const Operation& operation) {
    static const bool wanted = setting("SOFT_CUDA_TIMES", 0) == 1;
    static Times times;
    if (!wanted) return operation.run();
    double start = now();
    operation.run();
    auto& sum = times.of[operation.name];
    sum.first++;
    sum.second += now() - start;
}

void run_first(Stream& stream) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (operation.awaited) execute(*operation.awaited, operation.count);
    while (int state = operation.ready ? 1 - operation.ready() : 0) {
        if (state > 1) stop("the host waits for `%s`, which never ends: a rank has left", operation.name.c_str());
        usleep(1000);
    }
    for (const Use& use : operation.uses)
        if (!use.memory->live)
            stop("`%s` on stream %u runs while its memory (%zu bytes) is not allocated", operation.name.c_str(),
                 stream.number, use.memory->size);
    if (operation.run) run_timed(operation);
    stream.executed++;
}

bool can_run(const Stream& stream) {
    if (stream.queue.empty()) return false;
    const Operation& first = stream.queue.front();
    return (!first.awaited || first.awaited->executed >= first.count) && (!first.ready || first.ready() == 1);
}

/// Executes the first `count` operations as far as other processes are ready for them. False: not all of them.
bool execute_if_ready(Stream& stream, uint64_t count) {
    while (stream.executed < count) {
        const Operation& first = stream.queue.front();
        if (first.awaited && first.awaited->exchanges && !execute_if_ready(*first.awaited, first.count)) return false;
        if (first.ready && first.ready() != 1) return false;
        run_first(stream);
    }
    return true;
}

/// Executes what the order wants to have executed before anything waits for it.
void execute_some() {
    State& s = state();
    if (s.order == Order::EARLY) {
        bool ran = true;
        while (ran) {
            ran = false;
            for (auto& stream : s.streams)
                while (!stream->computes && can_run(*stream)) {
                    run_first(*stream);
                    ran = true;
                }
        }
    } else if (s.order == Order::RANDOM) {
        for (uint64_t steps = random_number() % 4; steps > 0; steps--) {
            Stream& stream = *s.streams[random_number() % s.streams.size()];
            if (can_run(stream)) run_first(stream);
        }
    }
}

}  // namespace

std::recursive_mutex& lock() { return state().mutex; }

void stop(const char* format, ...) {
    va_list list;
    va_start(list, format);
    print(format, list);
    va_end(list);
    std::fflush(nullptr);
    _exit(1);
}

int refuse(int code, const char* format, ...) {
    va_list list;
    va_start(list, format);
    print(format, list);
    va_end(list);
    return code;
}

uint64_t setting(const char* name, uint64_t usual) {
    const char* text = std::getenv(name);
    return text && *text ? std::strtoull(text, nullptr, 10) : usual;
}

uint64_t random_number() {
    uint64_t z = (state().random += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

Stream* stream_of(void* handle) {
    State& s = state();
    // 0, 1 and 2 are the default streams of the header.
    if (reinterpret_cast<uintptr_t>(handle) <= 2) return s.streams[0].get();
    for (auto& stream : s.streams)
        if (stream.get() == handle && !stream->destroyed) return stream.get();
    return nullptr;
}

std::vector<std::unique_ptr<Stream>>& streams() { return state().streams; }

void enqueue(Stream& stream, Operation operation) {
    if (stream.capture) return add_node(stream, std::move(operation));
    merge(stream.clock, state().host);
    if (stream.clock.size() <= stream.number) stream.clock.resize(stream.number + 1, 0);
    stream.clock[stream.number] = ++stream.queued;
    for (const Use& use : operation.uses) check_order(stream, operation, use);
    if (operation.ready) stream.exchanges = true;
    stream.queue.push_back(std::move(operation));
    execute_some();
}

std::shared_ptr<Record> record_on(Stream& stream) {
    auto record = std::make_shared<Record>();
    merge(stream.clock, state().host);
    record->stream = &stream;
    record->count = stream.queued + 1;
    record->clock = stream.clock;
    if (record->clock.size() <= stream.number) record->clock.resize(stream.number + 1, 0);
    record->clock[stream.number] = record->count;
    return record;
}

void wait_on(Stream& stream, const Record& record) {
    merge(stream.clock, record.clock);
    enqueue(stream, {"wait for an event", {}, {}, record.stream, record.count});
}

void execute(Stream& stream, uint64_t count) {
    while (stream.executed < count) run_first(stream);
}

void synchronize(Stream& stream) {
    execute(stream, stream.queued);
    merge(state().host, stream.clock);
}

void synchronize_all() {
    for (auto& stream : state().streams) synchronize(*stream);
}

int& failure() {
    static int code = SUCCESS;
    return code;
}

bool complete(const Access& access) { return reached(state().host, access); }

}  // namespace soft

using namespace soft;

extern "C" {

int cuStreamCreate(void** out, unsigned flags) {
    SOFT_CALL;
    constexpr unsigned NON_BLOCKING = 1;
    auto& all = streams();
    all.push_back(std::make_unique<Stream>());
    all.back()->number = static_cast<unsigned>(all.size() - 1);
    all.back()->blocking = (flags & NON_BLOCKING) == 0;
    *out = all.back().get();
    return SUCCESS;
}

int cuStreamDestroy_v2(void* handle) {
    SOFT_CALL;
    Stream* stream = stream_of(handle);
    if (!stream) return refuse(INVALID_HANDLE, "cuStreamDestroy: not a stream");
    if (stream->capture) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "cuStreamDestroy of a stream that is captured");
    // Its operations still run; the caller has not waited for them.
    execute(*stream, stream->queued);
    stream->destroyed = true;
    return SUCCESS;
}

int cuStreamSynchronize(void* handle) {
    SOFT_CALL;
    Stream* stream = stream_of(handle);
    if (!stream) return refuse(INVALID_HANDLE, "cuStreamSynchronize: not a stream");
    if (stream->capture) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "cuStreamSynchronize of a stream that is captured");
    if (int code = forbidden("cuStreamSynchronize")) return code;
    if (skipped("sync")) return SUCCESS;
    count("wait of the host", "cuStreamSynchronize", 0);
    synchronize(*stream);
    return failure();
}

int cuEventCreate(void** out, unsigned flags) {
    SOFT_CALL;
    constexpr unsigned DISABLE_TIMING = 2;
    Event* event = new Event{(flags & DISABLE_TIMING) == 0, nullptr, nullptr, {}};
    state().events.insert(event);
    *out = event;
    return SUCCESS;
}

int cuEventDestroy_v2(void* handle) {
    SOFT_CALL;
    Event* event = static_cast<Event*>(handle);
    if (state().events.erase(event) == 0) return refuse(INVALID_HANDLE, "cuEventDestroy: not an event");
    delete event;
    return SUCCESS;
}

int cuEventRecord(void* handle, void* stream_handle) {
    SOFT_CALL;
    Event* event = static_cast<Event*>(handle);
    Stream* stream = stream_of(stream_handle);
    if (!stream || !state().events.count(event)) return refuse(INVALID_HANDLE, "cuEventRecord: not an event or stream");
    if (int code = unusable(*stream, "cuEventRecord")) return code;
    if (skipped("record")) return SUCCESS;
    event->capture = stream->capture;
    if (stream->capture) {
        event->before = stream->capture->next[stream];
        return SUCCESS;
    }
    auto record = record_on(*stream);
    event->record = record;
    enqueue(*stream, {"record of an event", {}, [record] { record->when = now(); }});
    return SUCCESS;
}

int cuStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
    SOFT_CALL;
    Event* event = static_cast<Event*>(handle);
    Stream* stream = stream_of(stream_handle);
    if (!stream || !state().events.count(event))
        return refuse(INVALID_HANDLE, "cuStreamWaitEvent: not an event or stream");
    if (int code = unusable(*stream, "cuStreamWaitEvent")) return code;
    count(*stream, "wait of a stream", "cuStreamWaitEvent", 0);
    if (skipped("wait")) return SUCCESS;
    if (event->capture) {
        // The stream joins the capture of the event.
        Capture& capture = *event->capture;
        if (capture.invalid || !capture.graph) return refuse(CAPTURE_INVALIDATED, "cuStreamWaitEvent: the capture of the event is over");
        if (stream->capture && stream->capture != event->capture) {
            invalidate(capture, CAPTURE_MERGE, "cuStreamWaitEvent between two captures");
            return invalidate(*stream->capture, CAPTURE_MERGE, "cuStreamWaitEvent between two captures");
        }
        stream->capture = event->capture;
        Before& next = capture.next[stream];
        if (next.size() < event->before.size()) next.resize(event->before.size());
        for (size_t i = 0; i < event->before.size(); i++)
            if (event->before[i]) next[i] = true;
        return SUCCESS;
    }
    // An event that was never recorded is complete.
    if (!event->record) return SUCCESS;
    if (stream->capture) return invalidate(*stream->capture, CAPTURE_ISOLATION, "cuStreamWaitEvent for an event outside of the capture");
    wait_on(*stream, *event->record);
    return SUCCESS;
}

int cuEventSynchronize(void* handle) {
    SOFT_CALL;
    Event* event = static_cast<Event*>(handle);
    if (!state().events.count(event)) return refuse(INVALID_HANDLE, "cuEventSynchronize: not an event");
    if (event->capture) return invalidate(*event->capture, CAPTURED_EVENT, "cuEventSynchronize of an event of a capture");
    if (int code = forbidden("cuEventSynchronize")) return code;
    if (!event->record || skipped("sync")) return SUCCESS;
    count("wait of the host", "cuEventSynchronize", 0);
    execute(*event->record->stream, event->record->count);
    merge(state().host, event->record->clock);
    return failure();
}

int cuEventQuery(void* handle) {
    SOFT_CALL;
    Event* event = static_cast<Event*>(handle);
    if (!state().events.count(event)) return refuse(INVALID_HANDLE, "cuEventQuery: not an event");
    if (event->capture) return invalidate(*event->capture, CAPTURED_EVENT, "cuEventQuery of an event of a capture");
    if (int code = forbidden("cuEventQuery")) return code;
    if (!event->record) return SUCCESS;
    // A program that exchanges must not wait for the event: it asks until another process is ready.
    Stream& stream = *event->record->stream;
    if (event->record->when < 0 && !(stream.exchanges && execute_if_ready(stream, event->record->count))) return NOT_READY;
    merge(state().host, event->record->clock);
    return SUCCESS;
}

int cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
    SOFT_CALL;
    Event *start = static_cast<Event*>(from), *end = static_cast<Event*>(to);
    for (Event* event : {start, end}) {
        if (!state().events.count(event) || !event->timed || !event->record)
            return refuse(INVALID_HANDLE, "cuEventElapsedTime: an event without a time");
        if (event->record->when < 0) return NOT_READY;
    }
    *milliseconds = static_cast<float>(end->record->when - start->record->when);
    return SUCCESS;
}

}  // extern "C"
