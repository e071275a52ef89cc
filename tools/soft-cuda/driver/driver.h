// The state of the software driver: memory, streams, events. See README.md for the model.
//
// Two orders exist side by side. In the order of the calls, an operation is put into the queue of its stream; its
// arguments are checked there, as a real driver does. In the order of execution, operations run one after another, as
// late as SOFT_CUDA_ORDER permits.
#pragma once

#include "../kernel.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

/// The codes of CUresult that are used here.
enum Code : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

namespace soft {

/// How many operations of each stream are complete, by its number.
using Clock = std::vector<uint64_t>;

struct Stream;

/// An operation that used memory.
struct Access {
    const Stream* stream = nullptr;
    uint64_t time = 0;
    std::string name;
};

/// An allocation on the device, or page-locked host memory.
struct Memory {
    uint64_t address;
    size_t size;
    bool on_device;
    bool freed = false;  // in the order of the calls
    bool live = false;   // in the order of execution
    bool lost = false;   // freed by a fault before what is queued for it (faults.cpp)
    Access written;
    std::map<const Stream*, Access> read;
};

struct Use {
    std::shared_ptr<Memory> memory;
    bool writes;
};

/// The kinds of CUgraphNodeType that are used here.
enum NodeKind : int { KERNEL_NODE = 0, COPY_NODE = 1, MEMSET_NODE = 2, ALLOCATION_NODE = 10, FREE_NODE = 11 };

struct Operation {
    std::string name;
    std::vector<Use> uses;
    std::function<void()> run;
    /// For a wait: the operations of that stream that must be complete.
    Stream* awaited = nullptr;
    uint64_t count = 0;
    NodeKind kind = KERNEL_NODE;
    /// For an exchange with other processes: 1 if it can run now, 0 if not yet, -1 if it never can.
    std::function<int()> ready = {};
};

/// Nodes of a graph that come before something.
using Before = std::vector<bool>;

/// An operation of a graph.
struct Node {
    Operation operation;
    Before before;
};

/// The operations that a capture has recorded. Its memory has addresses of its own until the last launch has run.
struct Graph {
    struct Block {
        uint64_t address;
        size_t size, freed_by;
    };
    std::deque<Node> nodes;
    /// Allocated in the graph and not freed in it.
    std::map<uint64_t, std::shared_ptr<Memory>> memory;
    std::vector<Block> blocks, free;
    /// Bytes of its allocations, in the order of the capture.
    size_t used = 0, most_used = 0;
    /// The nodes that use an allocation.
    std::map<const Memory*, std::vector<std::pair<size_t, bool>>> users;
    bool instantiated = false;
    ~Graph();
};

/// One or more streams that are captured.
struct Capture {
    Stream* origin;
    unsigned long thread;
    int mode;
    bool invalid = false;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    /// For each stream, what comes before its next operation; null: the stream has been joined.
    std::map<Stream*, Before> next;
};

struct Stream {
    unsigned number;
    bool computes = false;  // had a kernel
    bool destroyed = false;
    bool blocking = false;  // waits for the default stream
    bool exchanges = false;  // had an exchange with other processes
    std::shared_ptr<Capture> capture;
    uint64_t queued = 0, executed = 0;
    Clock clock;
    std::deque<Operation> queue;
};

/// A point in a stream. `when` is set by its execution.
struct Record {
    Stream* stream;
    uint64_t count;
    Clock clock;
    double when = -1;
};

struct Event {
    bool timed;
    std::shared_ptr<Record> record;
    /// If it was recorded in a capture last.
    std::shared_ptr<Capture> capture;
    Before before;
};

/// One lock for all calls.
std::recursive_mutex& lock();

/// Prints a message, ends the process: the program broke a rule that a real driver does not check.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));
/// Prints a message, returns the code: what a real driver refuses.
int refuse(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
uint64_t setting(const char* name, uint64_t usual);
/// Dynamic shared memory that a block may have with the attribute, in bytes.
size_t largest_shared();
uint64_t random_number();

// streams.cpp
Stream* stream_of(void* handle);
std::vector<std::unique_ptr<Stream>>& streams();
/// Checks the uses of an operation against those of other streams, and puts it into the queue, or into the graph that is
/// captured.
void enqueue(Stream& stream, Operation operation);
/// Executes the first `count` operations of a stream and all that they wait for.
void execute(Stream& stream, uint64_t count);
/// Executes all operations of a stream; later calls come after them.
void synchronize(Stream& stream);
void synchronize_all();
/// The error of a kernel that failed (SOFT_CUDA_FAIL): every later synchronization returns it.
int& failure();
/// True if the order of the calls and the events says that an earlier access comes before the next call.
bool complete(const Access& access);

/// A point in the stream after all that is queued.
std::shared_ptr<Record> record_on(Stream& stream);
/// Operations that are queued from now on come after that point.
void wait_on(Stream& stream, const Record& record);

// graphs.cpp
/// The code of a call that uses this stream in an invalid capture, or that a captured stream would have to wait for.
int unusable(Stream& stream, const char* call);
/// The code of a call that is not permitted during a capture of this thread.
int forbidden(const char* call);
/// The capture is invalid; returns the code.
int invalidate(Capture& capture, int code, const char* why);
/// Adds an operation to the graph of a stream that is captured.
void add_node(Stream& stream, Operation operation);

// device.cpp
/// The GPU whose context this process has.
int used_device();

// counts.cpp
/// Counts a call for SOFT_CUDA_COUNT. The size is in blocks, floating-point operations or bytes.
void count(const char* kind, const std::string& name, uint64_t size);
/// The same, apart for what is captured.
void count(const Stream& stream, const char* kind, const std::string& name, uint64_t size);

// memory.cpp
/// The allocation that contains these bytes, or null; the order is that of the calls. Memory of a graph is known only to
/// the streams that capture it.
std::shared_ptr<Memory> device_memory(uint64_t address, size_t size, const Stream& stream);
/// Memory of a graph for this stream, and its end in the order of the capture (null: not an allocation of the graph).
std::shared_ptr<Memory> allocate_in_graph(Capture& capture, Stream& stream, size_t size);
std::shared_ptr<Memory> free_in_graph(Capture& capture, uint64_t address);
/// Memory of the device for the launch of a graph that needs this much. False: there is not enough.
bool reserve_for_graphs(size_t size);
constexpr unsigned char POISON = 0xff;

}  // namespace soft

/// Begins a call: takes the lock.
#define SOFT_CALL std::lock_guard<std::recursive_mutex> soft_guard(soft::lock())
