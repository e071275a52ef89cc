// Memory: pools on the device, page-locked host memory, copies.
//
// The device is a range of addresses of this process. Each allocation lies between guards, and fresh, freed and guard
// bytes hold POISON (NaN in every float type).

#include "driver.h"
#include "faults.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

namespace soft {

namespace {

constexpr size_t GUARD = 256;
constexpr size_t UNIT = 512;
constexpr size_t SEGMENT = 2 << 20;
constexpr size_t ARENA = size_t(1) << 37;

struct Pool {
    size_t most = 0;  // 0: as much as there is
    size_t used = 0, most_used = 0, reserved = 0, most_reserved = 0;
    uint64_t threshold = 0;
};

/// A freed block, and its place in the order of its stream.
struct Freed {
    uint64_t address, time;
};

struct State {
    uint64_t arena = 0, next = 0;
    Pool first;
    Pool* pool = &first;
    /// Memory that is allocated in no order of a stream: it counts for the device only.
    Pool outside;
    /// Live allocations by address, in the order of the calls.
    std::map<uint64_t, std::shared_ptr<Memory>> device, host;
    std::map<uint64_t, Pool*> pool_of;
    std::set<uint64_t> registered;
    /// Freed blocks by stream and size. The next allocation of the stream takes the newest one at once.
    std::map<std::pair<const Stream*, size_t>, std::vector<Freed>> free;
    /// Blocks that a trim returned to the device, by size.
    std::map<size_t, std::vector<uint64_t>> returned;
    /// Bytes of the blocks in `free`.
    size_t idle = 0;
    /// Memory that graphs took from the device, until a trim.
    size_t graphs = 0, most_graphs = 0;
};

State& state() {
    static State* only = new State;
    return *only;
}

size_t total() { return setting("SOFT_CUDA_MEMORY_MIB", 8192) << 20; }

size_t reserved() {
    const State& s = state();
    return s.first.reserved + (s.pool == &s.first ? 0 : s.pool->reserved) + s.outside.used + s.graphs;
}

size_t block_size(size_t size) { return (GUARD + size + GUARD + UNIT - 1) / UNIT * UNIT; }

unsigned char* bytes(uint64_t address) { return reinterpret_cast<unsigned char*>(address); }

void poison(uint64_t address, size_t size) { std::memset(bytes(address), POISON, size); }

/// Host memory is live from now on, memory on the device when its allocation runs.
std::shared_ptr<Memory> memory_at(uint64_t address, size_t size, bool on_device) {
    auto memory = std::make_shared<Memory>();
    memory->address = address;
    memory->size = size;
    memory->on_device = on_device;
    memory->live = !on_device;
    return memory;
}

void check_guards(const Memory& memory, const char* freed_by) {
    uint64_t block = memory.address - GUARD, end = block + block_size(memory.size);
    auto check = [&](uint64_t from, uint64_t to) {
        for (uint64_t at = from; at < to; at++)
            if (*bytes(at) != POISON)
                stop("%s: the byte %lld of an allocation of %zu bytes was written; last writer `%s`", freed_by,
                     static_cast<long long>(at - memory.address), memory.size, memory.written.name.c_str());
    };
    check(block, memory.address);
    check(memory.address + memory.size, end);
}

/// The allocation of one of the maps that contains these bytes.
std::shared_ptr<Memory> containing(const std::map<uint64_t, std::shared_ptr<Memory>>& map, uint64_t address, size_t size) {
    auto after = map.upper_bound(address);
    if (after == map.begin()) return nullptr;
    const auto& memory = std::prev(after)->second;
    if (address + size > memory->address + memory->size) return nullptr;
    return memory;
}

bool overlaps(const std::map<uint64_t, std::shared_ptr<Memory>>& map, uint64_t address, size_t size) {
    auto after = map.lower_bound(address + size);
    if (after == map.begin()) return false;
    const auto& before = std::prev(after)->second;
    return before->address + before->size > address;
}

/// The address of a block that nothing uses, or 0.
uint64_t new_block(size_t block) {
    State& s = state();
    if (!s.arena) {
        void* arena = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena == MAP_FAILED) stop("no addresses for the memory of the device");
        // The lower half of the first unit: addresses are aligned to 256 bytes and not to more.
        s.arena = s.next = reinterpret_cast<uint64_t>(arena);
    }
    auto& returned = s.returned[block];
    uint64_t at;
    if (!returned.empty()) {
        at = returned.back();
        returned.pop_back();
    } else {
        at = s.next;
        s.next += block;
    }
    return s.next > s.arena + ARENA ? 0 : at;
}

/// Returns null without memory.
std::shared_ptr<Memory> allocate(size_t size, const Stream* stream) {
    State& s = state();
    // Without pools the program counts such memory as that of its tensors.
    Pool& pool = stream || setting("SOFT_CUDA_POOLS", 1) == 0 ? *s.pool : s.outside;
    size_t counted = (size + UNIT - 1) / UNIT * UNIT;
    size_t there = total() - std::min(total(), s.graphs);
    size_t limit = pool.most ? std::min(pool.most, there) : there;
    size_t block = block_size(size);
    auto& free = s.free[{stream, block}];
    // The worst case of a pool: freed memory serves allocations of the same size only, until it is trimmed.
    bool fragmented = setting("SOFT_CUDA_FRAGMENTED", 0) == 1 && free.empty();
    if (pool.used + counted + (fragmented ? s.idle : 0) > limit) return nullptr;
    uint64_t at;
    if (!free.empty()) {
        at = free.back().address;
        free.pop_back();
        s.idle -= block;
    } else {
        at = new_block(block);
        if (!at) return nullptr;
    }
    pool.used += counted;
    pool.most_used = std::max(pool.most_used, pool.used);
    pool.reserved = std::max(pool.reserved, (pool.used + SEGMENT - 1) / SEGMENT * SEGMENT);
    pool.most_reserved = std::max(pool.most_reserved, pool.reserved);
    auto memory = memory_at(at + GUARD, size, true);
    s.device[memory->address] = memory;
    s.pool_of[memory->address] = &pool;
    return memory;
}

/// Takes an allocation out of the books. Null if the address is not the start of one.
std::shared_ptr<Memory> forget(uint64_t address, const Stream* stream) {
    State& s = state();
    auto found = s.device.find(address);
    if (found == s.device.end()) return nullptr;
    auto memory = found->second;
    s.device.erase(found);
    memory->freed = true;
    s.pool_of[address]->used -= (memory->size + UNIT - 1) / UNIT * UNIT;
    s.pool_of.erase(address);
    size_t block = block_size(memory->size);
    s.free[{stream, block}].push_back({address - GUARD, stream ? stream->queued + 1 : 0});
    s.idle += block;
    return memory;
}

void begin(Memory& memory) {
    if (memory.lost) return;
    poison(memory.address - GUARD, block_size(memory.size));
    memory.live = true;
}

void end(Memory& memory, const char* name) {
    check_guards(memory, name);
    poison(memory.address, memory.size);
    memory.live = false;
}

/// Host memory of a copy: page-locked, pageable (null), or partly page-locked, which the driver refuses.
int host_memory(const void* p, size_t size, const char* name, std::shared_ptr<Memory>& found) {
    uint64_t address = reinterpret_cast<uint64_t>(p);
    found = containing(state().host, address, size);
    if (!found && overlaps(state().host, address, size))
        return refuse(INVALID_VALUE, "%s: only a part of the host memory is page-locked", name);
    return SUCCESS;
}

bool is_pending(const Memory& memory) {
    auto pending = [](const Access& a) { return a.stream && a.stream->executed < a.time; };
    if (pending(memory.written)) return true;
    return std::any_of(memory.read.begin(), memory.read.end(), [&](const auto& r) { return pending(r.second); });
}

int release_host(uint64_t address, bool registered, const char* name) {
    State& s = state();
    auto found = s.host.find(address);
    if (found == s.host.end() || (s.registered.count(address) == 1) != registered)
        return refuse(registered ? NOT_REGISTERED : INVALID_VALUE, "%s: not the start of page-locked memory", name);
    const Memory& memory = *found->second;
    auto check = [&](const Access& access) {
        if (!complete(access)) stop("%s: `%s` may still use the memory (%zu bytes)", name, access.name.c_str(), memory.size);
    };
    check(memory.written);
    for (const auto& [_, access] : memory.read) check(access);
    s.host.erase(found);
    s.registered.erase(address);
    return SUCCESS;
}

}  // namespace

std::shared_ptr<Memory> device_memory(uint64_t address, size_t size, const Stream& stream) {
    if (stream.capture)
        if (auto memory = containing(stream.capture->graph->memory, address, size)) return memory;
    return containing(state().device, address, size);
}

std::shared_ptr<Memory> allocate_in_graph(Capture& capture, Stream& stream, size_t size) {
    Graph& graph = *capture.graph;
    const Before& before = capture.next[&stream];
    size_t block = block_size(size);
    uint64_t at = 0;
    // A block whose free comes before; the newest one first.
    for (size_t i = graph.free.size(); i-- > 0 && !at;) {
        const Graph::Block& freed = graph.free[i];
        if (freed.size != block || freed.freed_by >= before.size() || !before[freed.freed_by]) continue;
        at = freed.address;
        graph.free.erase(graph.free.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!at) {
        at = new_block(block);
        if (!at) return nullptr;
        graph.blocks.push_back({at, block, 0});
    }
    graph.used += (size + UNIT - 1) / UNIT * UNIT;
    graph.most_used = std::max(graph.most_used, graph.used);
    auto memory = memory_at(at + GUARD, size, true);
    graph.memory[memory->address] = memory;
    return memory;
}

std::shared_ptr<Memory> free_in_graph(Capture& capture, uint64_t address) {
    Graph& graph = *capture.graph;
    auto found = graph.memory.find(address);
    if (found == graph.memory.end()) return nullptr;
    auto memory = found->second;
    graph.memory.erase(found);
    graph.used -= (memory->size + UNIT - 1) / UNIT * UNIT;
    graph.free.push_back({address - GUARD, block_size(memory->size), graph.nodes.size()});
    return memory;
}

Graph::~Graph() {
    for (const Block& block : blocks) state().returned[block.size].push_back(block.address);
}

bool reserve_for_graphs(size_t size) {
    State& s = state();
    // Graphs that do not run at the same time share their memory.
    size_t wanted = std::max(s.graphs, (size + SEGMENT - 1) / SEGMENT * SEGMENT);
    if (reserved() - s.graphs + wanted > total()) return false;
    s.graphs = wanted;
    s.most_graphs = std::max(s.most_graphs, wanted);
    return true;
}

}  // namespace soft

using namespace soft;

#define STREAM(name)                                                              \
    SOFT_CALL;                                                                    \
    Stream* stream = stream_of(stream_handle);                                    \
    if (!stream) return refuse(INVALID_HANDLE, "%s: not a stream", name);         \
    if (int code = unusable(*stream, name)) return code
#define ON_DEVICE(memory, address, size, name)                                    \
    auto memory = device_memory(address, size, *stream);                          \
    if (!memory)                                                                  \
        return refuse(INVALID_VALUE, "%s: %zu bytes at %#llx are not inside of an allocation (freed, or too short)", \
                      name, size_t(size), static_cast<unsigned long long>(address))

extern "C" {

int cuMemAllocAsync(uint64_t* out, size_t size, void* stream_handle) {
    STREAM("cuMemAllocAsync");
    // No bytes are a null address here, unlike in cuMemAlloc; candle relies on it for empty tensors.
    *out = 0;
    if (size == 0) return SUCCESS;
    auto memory = stream->capture ? allocate_in_graph(*stream->capture, *stream, size) : allocate(size, stream);
    if (!memory) return OUT_OF_MEMORY;
    count(*stream, "memory (bytes)", "allocation", size);
    *out = memory->address;
    // An allocation is a use, but the memory is not live before it runs.
    Operation operation{"allocation", {}, [memory] { begin(*memory); }};
    operation.kind = ALLOCATION_NODE;
    if (stream->capture) operation.uses.push_back({memory, true});
    enqueue(*stream, std::move(operation));
    if (!stream->capture) memory->written = {stream, stream->queued, "allocation"};
    return SUCCESS;
}

int cuMemFreeAsync(uint64_t address, void* stream_handle) {
    STREAM("cuMemFreeAsync");
    if (address == 0) return SUCCESS;
    auto memory = stream->capture ? free_in_graph(*stream->capture, address) : forget(address, stream);
    if (!memory)
        return refuse(INVALID_VALUE, "cuMemFreeAsync: not the start of an allocation%s, or freed before",
                      stream->capture ? " of this capture" : "");
    count(*stream, "memory (bytes)", "free", memory->size);
    if (!stream->capture && skipped("free")) {
        // The fault: it does not wait for what was queued before, which then finds no memory.
        memory->lost = true;
        end(*memory, "cuMemFreeAsync");
        return SUCCESS;
    }
    Operation operation{"free", {{memory, true}}, [memory] { end(*memory, "cuMemFreeAsync"); }};
    operation.kind = FREE_NODE;
    enqueue(*stream, std::move(operation));
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t* out, size_t size) {
    SOFT_CALL;
    if (int code = forbidden("cuMemAlloc")) return code;
    if (size == 0) return refuse(INVALID_VALUE, "cuMemAlloc: no bytes");
    auto memory = allocate(size, nullptr);
    if (!memory) return OUT_OF_MEMORY;
    begin(*memory);
    *out = memory->address;
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) {
    SOFT_CALL;
    if (int code = forbidden("cuMemFree")) return code;
    synchronize_all();
    auto memory = forget(address, nullptr);
    if (!memory) return refuse(INVALID_VALUE, "cuMemFree: not the start of an allocation, or freed before");
    end(*memory, "cuMemFree");
    return SUCCESS;
}

int cuMemHostAlloc(void** out, size_t size, unsigned) {
    SOFT_CALL;
    if (int code = forbidden("cuMemHostAlloc")) return code;
    if (size == 0) return refuse(INVALID_VALUE, "cuMemHostAlloc: no bytes");
    void* place = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    if (!place) return OUT_OF_MEMORY;
    std::memset(place, POISON, size);
    auto memory = memory_at(reinterpret_cast<uint64_t>(place), size, false);
    state().host[memory->address] = memory;
    *out = place;
    return SUCCESS;
}

int cuMemFreeHost(void* place) {
    SOFT_CALL;
    if (int code = forbidden("cuMemFreeHost")) return code;
    int code = release_host(reinterpret_cast<uint64_t>(place), false, "cuMemFreeHost");
    if (code == SUCCESS) std::free(place);
    return code;
}

int cuMemHostRegister_v2(void* place, size_t size, unsigned) {
    SOFT_CALL;
    if (int code = forbidden("cuMemHostRegister")) return code;
    uint64_t address = reinterpret_cast<uint64_t>(place);
    if (!place || size == 0) return refuse(INVALID_VALUE, "cuMemHostRegister: no bytes");
    if (overlaps(state().host, address, size))
        return refuse(ALREADY_REGISTERED, "cuMemHostRegister: a part of the memory is page-locked");
    if (setting("SOFT_CUDA_REFUSE_LOCK", 0) == 1) return OUT_OF_MEMORY;
    auto memory = memory_at(address, size, false);
    state().host[address] = memory;
    state().registered.insert(address);
    return SUCCESS;
}

int cuMemHostUnregister(void* place) {
    SOFT_CALL;
    if (int code = forbidden("cuMemHostUnregister")) return code;
    return release_host(reinterpret_cast<uint64_t>(place), true, "cuMemHostUnregister");
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t size, void* stream_handle) {
    STREAM("cuMemcpyHtoDAsync");
    if (size == 0 || skipped("copy")) return SUCCESS;
    ON_DEVICE(memory, to, size, "cuMemcpyHtoDAsync");
    std::shared_ptr<Memory> host;
    if (int code = host_memory(from, size, "cuMemcpyHtoDAsync", host)) return code;
    if (stream->capture && !host) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "a copy of pageable memory");
    count(*stream, "copy (bytes)", host ? "page-locked to the device" : "pageable to the device", size);
    if (host) {
        // Page-locked: read when the copy runs.
        Operation operation{"copy to the device", {{host, false}, {memory, true}}, [=] { std::memcpy(bytes(to), from, size); }};
        operation.kind = COPY_NODE;
        enqueue(*stream, std::move(operation));
        return SUCCESS;
    }
    // Pageable: the driver has its own copy when the call returns.
    auto first = static_cast<const unsigned char*>(from);
    auto copy = std::make_shared<std::vector<unsigned char>>(first, first + size);
    enqueue(*stream, {"copy to the device", {{memory, true}}, [=] { std::memcpy(bytes(to), copy->data(), size); }});
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream_handle) {
    STREAM("cuMemcpyDtoHAsync");
    if (size == 0 || skipped("copy")) return SUCCESS;
    ON_DEVICE(memory, from, size, "cuMemcpyDtoHAsync");
    std::shared_ptr<Memory> host;
    if (int code = host_memory(to, size, "cuMemcpyDtoHAsync", host)) return code;
    if (stream->capture && !host) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "a copy to pageable memory");
    auto copy = [=] { std::memcpy(to, bytes(from), size); };
    count(*stream, "copy (bytes)", host ? "to page-locked memory" : "to pageable memory", size);
    if (host) {
        // Memory that is read before the copy has run is poison, unless an earlier copy still needs it.
        if (!stream->capture && !is_pending(*host)) std::memset(to, POISON, size);
        Operation operation{"copy to the host", {{memory, false}, {host, true}}, copy};
        operation.kind = COPY_NODE;
        enqueue(*stream, std::move(operation));
        return SUCCESS;
    }
    // Pageable: the call returns after the copy.
    enqueue(*stream, {"copy to the host", {{memory, false}}, copy});
    count("wait of the host", "copy to pageable memory", 0);
    synchronize(*stream);
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void* stream_handle) {
    STREAM("cuMemcpyDtoDAsync");
    if (size == 0 || skipped("copy")) return SUCCESS;
    ON_DEVICE(target, to, size, "cuMemcpyDtoDAsync");
    ON_DEVICE(source, from, size, "cuMemcpyDtoDAsync");
    count(*stream, "copy (bytes)", "on the device", size);
    if (from < to + size && to < from + size) stop("cuMemcpyDtoDAsync: source and destination overlap");
    Operation operation{"copy on the device", {{source, false}, {target, true}},
                        [=] { std::memcpy(bytes(to), bytes(from), size); }};
    operation.kind = COPY_NODE;
    enqueue(*stream, std::move(operation));
    return SUCCESS;
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void* stream_handle) {
    STREAM("cuMemsetD8Async");
    if (size == 0 || skipped("memset")) return SUCCESS;
    ON_DEVICE(memory, to, size, "cuMemsetD8Async");
    count(*stream, "memory (bytes)", "memset", size);
    Operation operation{"memset", {{memory, true}}, [=] { std::memset(bytes(to), value, size); }};
    operation.kind = MEMSET_NODE;
    enqueue(*stream, std::move(operation));
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t* free, size_t* all) {
    SOFT_CALL;
    *all = total();
    *free = total() - std::min(total(), reserved());
    return SUCCESS;
}

int cuDeviceGetMemPool(void** pool, int) {
    SOFT_CALL;
    if (setting("SOFT_CUDA_POOLS", 1) == 0) return refuse(NOT_SUPPORTED, "cuDeviceGetMemPool: the device has no pools");
    *pool = state().pool;
    return SUCCESS;
}

int cuDeviceSetMemPool(int, void* pool) {
    SOFT_CALL;
    state().pool = static_cast<Pool*>(pool);
    return SUCCESS;
}

int cuMemPoolCreate(void** pool, const void* description) {
    SOFT_CALL;
    struct Description {
        int type, handles, location, device;
        void* security;
        size_t most;
    };
    auto wanted = static_cast<const Description*>(description);
    // 1: page-locked memory, and memory of a device.
    if (wanted->type != 1 || wanted->location != 1 || wanted->device < 0)
        return refuse(INVALID_VALUE, "cuMemPoolCreate: type %d, location %d, device %d", wanted->type, wanted->location,
                      wanted->device);
    Pool* made = new Pool;
    made->most = wanted->most;
    *pool = made;
    return SUCCESS;
}

int cuMemPoolTrimTo(void* handle, size_t) {
    SOFT_CALL;
    State& s = state();
    for (auto& [key, blocks] : s.free) {
        auto [stream, size] = key;
        std::vector<Freed> kept;
        for (const Freed& block : blocks) {
            // A block whose free has not run stays.
            if (stream && stream->executed < block.time) {
                kept.push_back(block);
                continue;
            }
            s.returned[size].push_back(block.address);
            s.idle -= size;
        }
        blocks = kept;
    }
    Pool& pool = *static_cast<Pool*>(handle);
    pool.reserved = (pool.used + SEGMENT - 1) / SEGMENT * SEGMENT;
    return SUCCESS;
}

int cuDeviceGetGraphMemAttribute(int, int attribute, void* value) {
    SOFT_CALL;
    uint64_t& out = *static_cast<uint64_t*>(value);
    switch (attribute) {
        case 2: out = state().graphs; return SUCCESS;
        case 3: out = state().most_graphs; return SUCCESS;
        default: return refuse(INVALID_VALUE, "cuDeviceGetGraphMemAttribute: attribute %d is not implemented", attribute);
    }
}

int cuDeviceGraphMemTrim(int) {
    SOFT_CALL;
    // Graphs that run keep theirs.
    for (const auto& stream : streams())
        if (stream->executed < stream->queued) return SUCCESS;
    state().graphs = 0;
    return SUCCESS;
}

int cuMemPoolGetAttribute(void* handle, int attribute, void* value) {
    SOFT_CALL;
    const Pool& pool = *static_cast<Pool*>(handle);
    uint64_t& out = *static_cast<uint64_t*>(value);
    switch (attribute) {
        case 4: out = pool.threshold; return SUCCESS;
        case 5: out = pool.reserved; return SUCCESS;
        case 6: out = pool.most_reserved; return SUCCESS;
        case 7: out = pool.used; return SUCCESS;
        case 8: out = pool.most_used; return SUCCESS;
        default: return refuse(INVALID_VALUE, "cuMemPoolGetAttribute: attribute %d is not implemented", attribute);
    }
}

int cuMemPoolSetAttribute(void* handle, int attribute, void* value) {
    SOFT_CALL;
    Pool& pool = *static_cast<Pool*>(handle);
    uint64_t given = *static_cast<uint64_t*>(value);
    switch (attribute) {
        case 4: pool.threshold = given; return SUCCESS;
        // Only 0 is permitted: it resets the mark.
        case 6: pool.most_reserved = pool.reserved; break;
        case 8: pool.most_used = pool.used; break;
        default: return refuse(INVALID_VALUE, "cuMemPoolSetAttribute: attribute %d is not implemented", attribute);
    }
    return given == 0 ? SUCCESS : refuse(INVALID_VALUE, "cuMemPoolSetAttribute: a mark can only be set to 0");
}

}  // extern "C"
