// Graphs: capture of streams, instances, launches. A launch puts the operations of the graph into the queue of its stream,
// in the order of the capture; what their order must be was checked then.

#include "driver.h"
#include "faults.h"

#include <pthread.h>

namespace soft {

namespace {

/// The modes of cuStreamBeginCapture.
enum Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

struct Instance {
    std::shared_ptr<Graph> graph;
    /// The end of the last launch.
    std::shared_ptr<Record> last;
};

struct State {
    std::map<void*, std::shared_ptr<Graph>> graphs;
    std::map<void*, std::unique_ptr<Instance>> instances;
};

State& state() {
    static State* only = new State;
    return *only;
}

unsigned long this_thread() { return static_cast<unsigned long>(pthread_self()); }

bool has_memory(const Graph& graph) { return !graph.blocks.empty(); }

}  // namespace

int invalidate(Capture& capture, int code, const char* why) {
    capture.invalid = true;
    return refuse(code, "%s: not permitted in a capture", why);
}

int unusable(Stream& stream, const char* call) {
    if (stream.capture && stream.capture->invalid) return refuse(CAPTURE_INVALIDATED, "%s: the capture is invalid", call);
    // The default stream waits for all streams that are not created as independent.
    if (stream.number == 0)
        for (auto& other : streams())
            if (other->capture && other->blocking) return invalidate(*other->capture, CAPTURE_IMPLICIT, call);
    return SUCCESS;
}

int forbidden(const char* call) {
    for (auto& stream : streams()) {
        if (!stream->capture || stream->capture->mode == RELAXED) continue;
        Capture& capture = *stream->capture;
        if (capture.mode == GLOBAL || capture.thread == this_thread()) return invalidate(capture, CAPTURE_UNSUPPORTED, call);
    }
    return SUCCESS;
}

void add_node(Stream& stream, Operation operation) {
    Capture& capture = *stream.capture;
    Graph& graph = *capture.graph;
    Before& before = capture.next[&stream];
    size_t number = graph.nodes.size();
    before.resize(number);
    for (const Use& use : operation.uses) {
        auto& users = graph.users[use.memory.get()];
        for (auto [other, writes] : users)
            if ((writes || use.writes) && other != number && !before[other])
                stop("`%s` and `%s` use the same %zu bytes in a capture, and no event orders them",
                     graph.nodes[other].operation.name.c_str(), operation.name.c_str(), use.memory->size);
        users.push_back({number, use.writes});
    }
    // Memory is live when its allocation has run.
    if (operation.kind == ALLOCATION_NODE) operation.uses.clear();
    graph.nodes.push_back({std::move(operation), before});
    before.push_back(true);
}

}  // namespace soft

using namespace soft;

extern "C" {

int cuStreamBeginCapture_v2(void* handle, int mode) {
    SOFT_CALL;
    Stream* stream = stream_of(handle);
    if (!stream) return refuse(INVALID_HANDLE, "cuStreamBeginCapture: not a stream");
    if (stream->number == 0) return refuse(CAPTURE_UNSUPPORTED, "cuStreamBeginCapture: the default stream cannot be captured");
    if (mode < GLOBAL || mode > RELAXED) return refuse(INVALID_VALUE, "cuStreamBeginCapture: mode %d", mode);
    if (stream->capture) return refuse(ILLEGAL_STATE, "cuStreamBeginCapture: the stream is captured");
    count("graph", "capture", 0);
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
    stream->capture->thread = this_thread();
    stream->capture->mode = mode;
    stream->capture->next[stream] = {};
    return SUCCESS;
}

int cuStreamEndCapture(void* handle, void** out) {
    SOFT_CALL;
    *out = nullptr;
    Stream* stream = stream_of(handle);
    if (!stream) return refuse(INVALID_HANDLE, "cuStreamEndCapture: not a stream");
    if (!stream->capture) return refuse(ILLEGAL_STATE, "cuStreamEndCapture: the stream is not captured");
    std::shared_ptr<Capture> capture = stream->capture;
    if (capture->origin != stream)
        return invalidate(*capture, CAPTURE_UNMATCHED, "cuStreamEndCapture of a stream that joined the capture");
    if (capture->mode != RELAXED && capture->thread != this_thread())
        return invalidate(*capture, CAPTURE_WRONG_THREAD, "cuStreamEndCapture in another thread");
    bool joined = true;
    size_t all = capture->graph->nodes.size();
    const Before& before = capture->next[stream];
    for (size_t i = 0; i < all; i++) joined = joined && i < before.size() && before[i];
    for (auto& [other, _] : capture->next) other->capture = nullptr;
    std::shared_ptr<Graph> graph = std::move(capture->graph);
    capture->graph = nullptr;
    if (capture->invalid) return refuse(CAPTURE_INVALIDATED, "cuStreamEndCapture: the capture is invalid");
    if (!joined) return refuse(CAPTURE_UNJOINED, "cuStreamEndCapture: the stream does not wait for the others of the capture");
    graph->users.clear();
    *out = graph.get();
    state().graphs[graph.get()] = graph;
    return SUCCESS;
}

int cuStreamIsCapturing(void* handle, int* status) {
    SOFT_CALL;
    Stream* stream = stream_of(handle);
    if (!stream) return refuse(INVALID_HANDLE, "cuStreamIsCapturing: not a stream");
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return SUCCESS;
}

int cuGraphDestroy(void* handle) {
    SOFT_CALL;
    if (state().graphs.erase(handle) == 0) return refuse(INVALID_VALUE, "cuGraphDestroy: not a graph");
    return SUCCESS;
}

int cuGraphGetNodes(void* handle, void** nodes, size_t* number) {
    SOFT_CALL;
    auto found = state().graphs.find(handle);
    if (found == state().graphs.end()) return refuse(INVALID_VALUE, "cuGraphGetNodes: not a graph");
    auto& all = found->second->nodes;
    if (!nodes) {
        *number = all.size();
        return SUCCESS;
    }
    for (size_t i = 0; i < *number; i++) nodes[i] = i < all.size() ? &all[i] : nullptr;
    *number = std::min(*number, all.size());
    return SUCCESS;
}

int cuGraphNodeGetType(void* node, int* kind) {
    SOFT_CALL;
    *kind = static_cast<Node*>(node)->operation.kind;
    return SUCCESS;
}

int cuGraphInstantiateWithFlags(void** out, void* handle, unsigned long long flags) {
    SOFT_CALL;
    auto found = state().graphs.find(handle);
    if (found == state().graphs.end()) return refuse(INVALID_VALUE, "cuGraphInstantiate: not a graph");
    if (flags > 1) return refuse(NOT_SUPPORTED, "cuGraphInstantiate: flags %llu are not implemented", flags);
    auto& graph = found->second;
    if (has_memory(*graph) && graph->instantiated)
        return refuse(NOT_SUPPORTED, "cuGraphInstantiate: a graph with memory can have one instance at a time");
    if (setting("SOFT_CUDA_REFUSE_GRAPHS", 0) == 1) return refuse(NOT_SUPPORTED, "cuGraphInstantiate: SOFT_CUDA_REFUSE_GRAPHS");
    graph->instantiated = true;
    auto instance = std::make_unique<Instance>();
    instance->graph = graph;
    *out = instance.get();
    count("graph", "instance (nodes)", graph->nodes.size());
    state().instances[instance.get()] = std::move(instance);
    return SUCCESS;
}

int cuGraphExecDestroy(void* handle) {
    SOFT_CALL;
    auto found = state().instances.find(handle);
    if (found == state().instances.end()) return refuse(INVALID_VALUE, "cuGraphExecDestroy: not an instance");
    // Queued operations still run: its operations keep the graph.
    found->second->graph->instantiated = false;
    state().instances.erase(found);
    return SUCCESS;
}

int cuGraphLaunch(void* handle, void* stream_handle) {
    SOFT_CALL;
    auto found = state().instances.find(handle);
    Stream* stream = stream_of(stream_handle);
    if (found == state().instances.end() || !stream) return refuse(INVALID_HANDLE, "cuGraphLaunch: not an instance or stream");
    if (int code = unusable(*stream, "cuGraphLaunch")) return code;
    if (stream->capture) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "cuGraphLaunch (a child graph is not implemented)");
    if (skipped("graph")) return SUCCESS;
    Instance& instance = *found->second;
    auto graph = instance.graph;
    if (!graph->memory.empty())
        return refuse(NOT_SUPPORTED, "cuGraphLaunch: memory that the graph does not free is not implemented");
    if (!reserve_for_graphs(graph->most_used)) return OUT_OF_MEMORY;
    count("graph", "launch (nodes)", graph->nodes.size());
    // Launches of an instance come one after the other, also on several streams.
    if (instance.last && instance.last->stream != stream) wait_on(*stream, *instance.last);
    for (const Node& node : graph->nodes) {
        Operation operation = node.operation;
        operation.run = [graph, run = node.operation.run] { run(); };
        if (node.operation.kind == KERNEL_NODE) stream->computes = true;
        enqueue(*stream, std::move(operation));
    }
    instance.last = record_on(*stream);
    enqueue(*stream, {"end of a graph", {}, {}});
    return SUCCESS;
}

int cuGraphUpload(void*, void*) { return SUCCESS; }

}  // extern "C"
