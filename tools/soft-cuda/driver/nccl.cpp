// NCCL between processes of this machine. Ranks share a folder, whose name is the id: each has a file there that it keeps locked
// while it lives, and each message is a file. An exchange is one operation in the queue of its stream. It sends what
// is in the memory when it comes to the front of the queue, and ends when all that it receives is there; if a rank has left
// before that, it never ends, as on a real device, and the communicator has an error.
//
// NCCL waits without a limit for a rank that does not come, in ncclCommInitRank and in the ncclGroupEnd of the first exchange of two
// ranks; so do these.

#include "driver.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace soft;

extern "C" {
int cuCtxGetCurrent(void**);
}

namespace {

enum Code : int {
    NCCL_SUCCESS = 0, UNHANDLED = 1, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7
};

struct UniqueId {
    char text[128];
};

struct Communicator {
    std::string folder;
    int rank, size;
    /// The locked file of this rank.
    int file;
    int error = NCCL_SUCCESS;
    bool aborted = false;
    /// Messages so far, by rank.
    std::vector<uint64_t> sent, received;
    /// The ranks with which there was an exchange.
    std::set<int> connected;
};

/// A send or receive of a group.
struct Transfer {
    bool sends;
    uint64_t address;
    size_t count;
    int type, peer;
    uint64_t number = 0;
    std::shared_ptr<Memory> memory;
};

struct Header {
    uint64_t count;
    int32_t type, padding;
};

thread_local int depth = 0;
/// The transfers of the group that this thread has begun. One communicator and one stream.
thread_local std::vector<Transfer> group;
thread_local Communicator* group_comm = nullptr;
thread_local Stream* group_stream = nullptr;
std::string last_error;

/// Never destroyed: handles may be used until the process ends.
std::set<Communicator*>& all() {
    static auto* only = new std::set<Communicator*>;
    return *only;
}

int fail(int code, const std::string& why) {
    last_error = why;
    return refuse(code, "NCCL: %s", why.c_str());
}

size_t bytes_of(int type) {
    switch (type) {
        case 0: case 1: return 1;
        case 2: case 3: case 7: return 4;
        case 4: case 5: case 8: return 8;
        case 6: case 9: return 2;
        default: return 0;
    }
}

std::string rank_file(const std::string& folder, int rank) { return folder + "/rank-" + std::to_string(rank); }

std::string message_file(const std::string& folder, int from, int to, uint64_t number) {
    return folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
}

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

void wait_for(const std::string& path) {
    while (!exists(path)) usleep(1000);
}

/// `SOFT_NCCL_END`: the call in which this process is killed (`init`, `group`), or which fails (`refuse`).
bool ends_in(const char* call) {
    const char* wanted = std::getenv("SOFT_NCCL_END");
    return wanted && std::strcmp(wanted, call) == 0;
}

/// Writes a file atomically: no process sees a part of it.
void publish(const std::string& path, const std::string& bytes) {
    std::string part = path + ".part";
    FILE* file = std::fopen(part.c_str(), "w");
    if (!file || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || std::fclose(file) != 0 ||
        std::rename(part.c_str(), path.c_str()) != 0)
        stop("NCCL: cannot write %s: %s", path.c_str(), std::strerror(errno));
}

std::string contents(const std::string& path) {
    std::string bytes;
    FILE* file = std::fopen(path.c_str(), "r");
    if (!file) stop("NCCL: cannot read %s: %s", path.c_str(), std::strerror(errno));
    char piece[1 << 16];
    for (size_t n; (n = std::fread(piece, 1, sizeof piece, file)) > 0;) bytes.append(piece, n);
    std::fclose(file);
    return bytes;
}

/// True if the process of a rank has ended, or has left the communicator: no process has a lock on its file.
bool has_left(const Communicator& comm, int rank) {
    int file = open(rank_file(comm.folder, rank).c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return true;
    bool free = flock(file, LOCK_SH | LOCK_NB) == 0;
    close(file);
    return free;
}

/// The file of this rank: the number of ranks and the GPU.
bool enter(Communicator& comm, const std::string& text) {
    std::string path = rank_file(comm.folder, comm.rank), part = path + ".part";
    comm.file = open(part.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (comm.file < 0 || flock(comm.file, LOCK_EX) != 0) return false;
    if (write(comm.file, text.data(), text.size()) != static_cast<ssize_t>(text.size())) return false;
    // A second process with this number finds the file of the first.
    return link(part.c_str(), path.c_str()) == 0 && unlink(part.c_str()) == 0;
}

void leave(Communicator& comm) {
    if (comm.file < 0) return;
    close(comm.file);
    comm.file = -1;
    // The last one removes the folder.
    for (int rank = 0; rank < comm.size; rank++)
        if (rank != comm.rank && exists(rank_file(comm.folder, rank)) && !has_left(comm, rank)) return;
    if (DIR* folder = opendir(comm.folder.c_str())) {
        while (dirent* entry = readdir(folder))
            if (entry->d_name[0] != '.') unlink((comm.folder + "/" + entry->d_name).c_str());
        closedir(folder);
    }
    rmdir(comm.folder.c_str());
}

/// The state of one exchange.
struct Exchange {
    Communicator* comm;
    std::vector<Transfer> transfers;
    bool posted = false;

    void post() {
        posted = true;
        for (const Transfer& t : transfers) {
            if (!t.sends) continue;
            if (!t.memory->live) stop("NCCL: an exchange runs while the memory that it sends is not allocated");
            Header header{t.count, t.type, 0};
            std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
            bytes.append(reinterpret_cast<const char*>(t.address), t.count * bytes_of(t.type));
            publish(message_file(comm->folder, comm->rank, t.peer, t.number), bytes);
        }
    }

    std::string message(const Transfer& t) const { return message_file(comm->folder, t.peer, comm->rank, t.number); }

    int ready() {
        if (comm->aborted) return 1;
        if (comm->error) return -1;
        if (!posted) post();
        for (const Transfer& t : transfers) {
            if (t.sends || exists(message(t))) continue;
            // GPUs that write into each other's memory do not see the end of a process.
            static const bool silent = setting("SOFT_NCCL_SILENT", 0) != 0;
            if (!silent && has_left(*comm, t.peer) && !exists(message(t))) {
                comm->error = REMOTE;
                last_error = "rank " + std::to_string(t.peer) + " has left during an exchange";
            }
            return comm->error ? -1 : 0;
        }
        return 1;
    }

    void run() {
        if (comm->aborted) return;
        for (const Transfer& t : transfers) {
            if (t.sends) continue;
            std::string bytes = contents(message(t));
            unlink(message(t).c_str());
            Header header;
            std::memcpy(&header, bytes.data(), sizeof header);
            if (header.count != t.count || header.type != t.type)
                stop("NCCL: rank %d sends %llu elements of type %d as message %llu, and rank %d receives %zu of type %d", t.peer,
                     static_cast<unsigned long long>(header.count), header.type, static_cast<unsigned long long>(t.number),
                     comm->rank, t.count, t.type);
            std::memcpy(reinterpret_cast<void*>(t.address), bytes.data() + sizeof header, t.count * bytes_of(t.type));
        }
    }
};

int add(bool sends, const void* address, size_t count, int type, int peer, void* handle, void* stream_handle) {
    const char* call = sends ? "ncclSend" : "ncclRecv";
    auto* comm = static_cast<Communicator*>(handle);
    if (!all().count(comm)) return fail(INVALID_ARGUMENT, std::string(call) + ": not a communicator");
    if (comm->error) return fail(comm->error, last_error);
    if (peer < 0 || peer >= comm->size) return fail(INVALID_ARGUMENT, std::string(call) + ": rank " + std::to_string(peer) + " does not exist");
    if (peer == comm->rank) return fail(INVALID_USAGE, std::string(call) + ": to the own rank is not implemented");
    if (bytes_of(type) == 0 || count == 0) return fail(INVALID_ARGUMENT, std::string(call) + ": no elements, or an unknown type");
    if (depth == 0) return fail(INVALID_USAGE, std::string(call) + " outside of a group is not implemented");
    Stream* stream = stream_of(stream_handle);
    if (!stream) return fail(INVALID_ARGUMENT, std::string(call) + ": not a stream");
    if (unusable(*stream, call)) return fail(INVALID_USAGE, std::string(call) + ": the stream is captured");
    if ((group_comm && group_comm != comm) || (group_stream && group_stream != stream))
        return fail(INVALID_USAGE, "a group with several communicators or streams is not implemented");
    void* context = nullptr;
    cuCtxGetCurrent(&context);
    if (!context) return fail(UNHANDLED, std::string(call) + ": this thread has no context");
    auto memory = device_memory(reinterpret_cast<uint64_t>(address), count * bytes_of(type), *stream);
    if (!memory || reinterpret_cast<uint64_t>(address) % bytes_of(type) != 0)
        stop("%s: %zu elements are outside of every allocation, freed, or not aligned", call, count);
    group_comm = comm;
    group_stream = stream;
    group.push_back({sends, reinterpret_cast<uint64_t>(address), count, type, peer, 0, memory});
    return NCCL_SUCCESS;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
    *version = 22803;
    return NCCL_SUCCESS;
}

int ncclGetUniqueId(UniqueId* id) {
    SOFT_CALL;
    const char* base = std::getenv("TMPDIR");
    std::string name = std::string(base && *base ? base : "/tmp") + "/soft-nccl-XXXXXX";
    if (name.size() >= sizeof id->text) return fail(SYSTEM, "the name of the temporary folder is too long");
    if (!mkdtemp(name.data())) return fail(SYSTEM, "cannot make " + name);
    std::memset(id->text, 0, sizeof id->text);
    std::memcpy(id->text, name.data(), name.size());
    return NCCL_SUCCESS;
}

int ncclCommInitRank(void** out, int size, UniqueId id, int rank) {
    std::string folder(id.text, strnlen(id.text, sizeof id.text));
    void* context = nullptr;
    cuCtxGetCurrent(&context);
    if (!context) return fail(UNHANDLED, "ncclCommInitRank: this thread has no context");
    if (size < 1 || rank < 0 || rank >= size || !exists(folder)) return fail(INVALID_ARGUMENT, "ncclCommInitRank: a wrong rank or id");
    if (ends_in("init")) raise(SIGKILL);
    if (ends_in("refuse")) return fail(SYSTEM, "ncclCommInitRank: no network");
    auto* comm = new Communicator{folder, rank, size, -1, NCCL_SUCCESS, false, {}, {}, {}};
    comm->sent.resize(static_cast<size_t>(size));
    comm->received.resize(static_cast<size_t>(size));
    if (!enter(*comm, std::to_string(size) + " " + std::to_string(used_device())))
        return fail(INVALID_USAGE, "ncclCommInitRank: rank " + std::to_string(rank) + " is there already");
    std::string own = contents(rank_file(folder, rank));
    for (int other = 0; other < size; other++) {
        std::string path = rank_file(folder, other);
        wait_for(path);
        std::string found = contents(path);
        if (other != rank && found.substr(0, found.find(' ')) != std::to_string(size))
            stop("NCCL: rank %d has another number of ranks than rank %d: %s and %d", other, rank, found.c_str(), size);
        if (other != rank && found == own)
            return fail(INVALID_USAGE, "Duplicate GPU detected : rank " + std::to_string(std::min(rank, other)) + " and rank " + std::to_string(std::max(rank, other)));
    }
    SOFT_CALL;
    all().insert(comm);
    *out = comm;
    const char* blocking = std::getenv("NCCL_COMM_BLOCKING");
    return blocking && std::strcmp(blocking, "0") == 0 ? IN_PROGRESS : NCCL_SUCCESS;
}

int ncclCommDestroy(void* handle) {
    SOFT_CALL;
    auto* comm = static_cast<Communicator*>(handle);
    if (all().erase(comm) == 0) return fail(INVALID_ARGUMENT, "ncclCommDestroy: not a communicator");
    for (auto& stream : streams())
        for (const Operation& operation : stream->queue)
            if (operation.ready) stop("NCCL: a communicator is destroyed while an exchange is queued");
    leave(*comm);
    return NCCL_SUCCESS;
}

int ncclCommAbort(void* handle) {
    SOFT_CALL;
    auto* comm = static_cast<Communicator*>(handle);
    if (all().erase(comm) == 0) return fail(INVALID_ARGUMENT, "ncclCommAbort: not a communicator");
    comm->aborted = true;
    leave(*comm);
    return NCCL_SUCCESS;
}

int ncclCommGetAsyncError(void* handle, int* error) {
    SOFT_CALL;
    auto* comm = static_cast<Communicator*>(handle);
    if (!all().count(comm)) return fail(INVALID_ARGUMENT, "ncclCommGetAsyncError: not a communicator");
    *error = comm->error;
    return NCCL_SUCCESS;
}

const char* ncclGetErrorString(int code) {
    switch (code) {
        case NCCL_SUCCESS: return "no error";
        case UNHANDLED: return "unhandled cuda error";
        case SYSTEM: return "unhandled system error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case REMOTE: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}

const char* ncclGetLastError(void*) { return last_error.c_str(); }

int ncclGroupStart() {
    depth++;
    return NCCL_SUCCESS;
}

int ncclGroupEnd() {
    if (depth == 0) return fail(INVALID_USAGE, "ncclGroupEnd without a start");
    if (--depth > 0 || group.empty()) return NCCL_SUCCESS;
    if (ends_in("group")) raise(SIGKILL);
    std::set<int> peers;
    for (const Transfer& t : group)
        if (group_comm->connected.insert(t.peer).second) peers.insert(t.peer);
    auto door = [](int from, int to) { return group_comm->folder + "/door-" + std::to_string(from) + "-" + std::to_string(to); };
    for (int peer : peers) publish(door(group_comm->rank, peer), "");
    for (int peer : peers) wait_for(door(peer, group_comm->rank));
    SOFT_CALL;
    auto exchange = std::make_shared<Exchange>(Exchange{group_comm, std::move(group)});
    Stream* stream = group_stream;
    group.clear();
    group_comm = nullptr;
    group_stream = nullptr;
    Operation operation{"an exchange of NCCL", {}, {}};
    for (Transfer& t : exchange->transfers) {
        auto& counts = t.sends ? exchange->comm->sent : exchange->comm->received;
        t.number = counts[static_cast<size_t>(t.peer)]++;
        operation.uses.push_back({t.memory, !t.sends});
        uint64_t end = t.address + t.count * bytes_of(t.type);
        for (const Transfer& other : exchange->transfers)
            if (&other != &t && !(t.sends && other.sends) && t.address < other.address + other.count * bytes_of(other.type) &&
                other.address < end)
                stop("NCCL: two transfers of a group overlap, and one of them receives");
        if (t.sends) count(*stream, "exchange (bytes)", "sent", t.count * bytes_of(t.type));
    }
    operation.ready = [exchange] { return exchange->ready(); };
    operation.run = [exchange] { exchange->run(); };
    enqueue(*stream, std::move(operation));
    return NCCL_SUCCESS;
}

int ncclSend(const void* address, size_t count, int type, int peer, void* comm, void* stream) {
    SOFT_CALL;
    return add(true, address, count, type, peer, comm, stream);
}

int ncclRecv(void* address, size_t count, int type, int peer, void* comm, void* stream) {
    SOFT_CALL;
    return add(false, address, count, type, peer, comm, stream);
}

}  // extern "C"
