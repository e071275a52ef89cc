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
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
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
    Access written;
    std::map<const Stream*, Access> read;
};

struct Use {
    std::shared_ptr<Memory> memory;
    bool writes;
};

struct Operation {
    std::string name;
    std::vector<Use> uses;
    std::function<void()> run;
    /// For a wait: the operations of that stream that must be complete.
    Stream* awaited = nullptr;
    uint64_t count = 0;
};

struct Stream {
    unsigned number;
    bool computes = false;  // had a kernel
    bool destroyed = false;
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
};

/// One lock for all calls.
std::recursive_mutex& lock();

/// Prints a message, ends the process: the program broke a rule that a real driver does not check.
[[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 1, 2)));
/// Prints a message, returns the code: what a real driver refuses.
int refuse(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
uint64_t setting(const char* name, uint64_t usual);
uint64_t random_number();

// streams.cpp
Stream* stream_of(void* handle);
/// Checks the uses of an operation against those of other streams, and puts it into the queue.
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

// counts.cpp
/// Counts a call for SOFT_CUDA_COUNT. The size is in blocks, floating-point operations or bytes.
void count(const char* kind, const std::string& name, uint64_t size);

// memory.cpp
/// The allocation that contains these bytes, or null; the order is that of the calls.
std::shared_ptr<Memory> device_memory(uint64_t address, size_t size);
constexpr unsigned char POISON = 0xff;

}  // namespace soft

/// Begins a call: takes the lock.
#define SOFT_CALL std::lock_guard<std::recursive_mutex> soft_guard(soft::lock())
