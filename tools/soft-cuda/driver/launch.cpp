// Modules, functions, launches. A module is a shared library beside the driver: `modules/PACKAGE/FILE.so`, or
// `modules/PACKAGE.so` for all files.

#include "driver.h"
#include "faults.h"

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>

namespace soft {

size_t largest_shared() {
    switch (setting("SOFT_CUDA_SM", 80)) {
        case 80: return 163 << 10;
        case 86:
        case 89: return 99 << 10;
        default: return 227 << 10;
    }
}

namespace {

constexpr size_t USUAL_SHARED = 48 << 10;

struct Function {
    std::string module;
    const Kernel* kernel;
    size_t most_shared = USUAL_SHARED;
};

struct Loaded {
    std::string name;
    std::map<std::string, Function> functions;
};

/// The kernel that runs, for messages.
std::string running;

struct sigaction before;

void on_fault(int signal, siginfo_t* info, void* context) {
    if (!running.empty()) stop("%s: the kernel accesses %p: no memory, or not aligned", running.c_str(), info->si_addr);
    if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
    std::signal(signal, SIG_DFL);
}

void catch_faults() {
    static bool done = false;
    if (done) return;
    done = true;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
}

/// The emulator prints its message, then comes here.
void leave() { stop("%s: the emulator stopped the kernel", running.c_str()); }

std::string folder() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(&leave), &info)) stop("the driver does not find its own file");
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/')) + "/modules/";
}

/// Modules stay loaded: their kernels keep no state.
Loaded* load(const std::string& name) {
    static std::map<std::string, std::unique_ptr<Loaded>> loaded;
    auto& found = loaded[name];
    if (found) return found.get();
    // All modules of candle are one file.
    std::string path = folder() + name + ".so";
    if (access(path.c_str(), F_OK) != 0) path = folder() + name.substr(0, name.find('/')) + ".so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        refuse(INVALID_IMAGE, "the module `%s` has no kernels for the software driver: %s", name.c_str(), dlerror());
        return nullptr;
    }
    using Entry = Module (*)(void (*)());
    auto entry = reinterpret_cast<Entry>(dlsym(library, "soft_cuda_module"));
    if (!entry) stop("%s exports no `soft_cuda_module`", path.c_str());
    Module module = entry(leave);
    found = std::make_unique<Loaded>();
    found->name = name;
    for (size_t i = 0; i < module.count; i++)
        found->functions[module.kernels[i].name] = {name, &module.kernels[i]};
    return found.get();
}

/// A file with the number of this process, below `TMPDIR`, says that it has begun.
void take_a_minute() {
    const char* base = std::getenv("TMPDIR");
    std::string name = std::string(base && *base ? base : "/tmp") + "/soft-slow-" + std::to_string(getpid());
    if (std::FILE* file = std::fopen(name.c_str(), "w")) std::fclose(file);
    // A signal ends a sleep early.
    for (unsigned left = 60; left > 0;) left = sleep(left);
}

}  // namespace

}  // namespace soft

using namespace soft;

extern "C" {

int cuModuleLoadData(void** out, const char* image) {
    SOFT_CALL;
    if (int code = forbidden("cuModuleLoadData")) return code;
    // A line that the stand-in for nvcc wrote.
    const char* mark = "soft-cuda module ";
    if (std::strncmp(image, mark, std::strlen(mark)) != 0)
        return refuse(INVALID_IMAGE, "cuModuleLoadData: not a module of the stand-in for nvcc (tools/fake-nvcc)");
    const char* name = image + std::strlen(mark);
    *out = load(std::string(name, std::strcspn(name, "\n")));
    return *out ? SUCCESS : INVALID_IMAGE;
}

int cuModuleLoad(void**, const char*) { return refuse(NOT_SUPPORTED, "cuModuleLoad is not implemented"); }

int cuModuleUnload(void*) { return SUCCESS; }

int cuModuleGetFunction(void** out, void* module, const char* name) {
    SOFT_CALL;
    auto& loaded = *static_cast<Loaded*>(module);
    auto found = loaded.functions.find(name);
    if (found == loaded.functions.end())
        return refuse(NOT_FOUND, "the module `%s` has no kernel `%s` (kernels of candle: tools/soft-cuda/modules/candle.cpp)",
                      loaded.name.c_str(), name);
    *out = &found->second;
    return SUCCESS;
}

int cuFuncSetAttribute(void* handle, int attribute, int value) {
    SOFT_CALL;
    constexpr int MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
    Function& function = *static_cast<Function*>(handle);
    if (attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return refuse(INVALID_VALUE, "cuFuncSetAttribute: attribute %d is not implemented", attribute);
    if (value < 0 || static_cast<size_t>(value) > largest_shared())
        return refuse(INVALID_VALUE, "`%s`: %d bytes of shared memory, the device has %zu", function.kernel->name, value,
                      largest_shared());
    function.most_shared = static_cast<size_t>(value);
    return SUCCESS;
}

int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void* stream_handle, void** given, void** extra) {
    SOFT_CALL;
    Function& function = *static_cast<Function*>(handle);
    const Kernel& kernel = *function.kernel;
    Stream* stream = stream_of(stream_handle);
    if (!stream) return refuse(INVALID_HANDLE, "`%s`: not a stream", kernel.name);
    if (int code = unusable(*stream, kernel.name)) return code;
    if (extra) return refuse(NOT_SUPPORTED, "`%s`: arguments in a buffer are not implemented", kernel.name);
    if (skipped_kernel(kernel)) return SUCCESS;
    std::vector<void*> values(given, given + kernel.count);
    change_launch(kernel, values, grid_x);
    Launch launch{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, setting("SOFT_CUDA_SEED", 0)};
    uint64_t threads = uint64_t(block_x) * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || grid_x > 0x7fffffffu || grid_y > 65535 || grid_z > 65535)
        return refuse(INVALID_VALUE, "`%s`: a grid of %u x %u x %u blocks", kernel.name, grid_x, grid_y, grid_z);
    if (threads == 0 || threads > 1024 || block_z > 64)
        return refuse(INVALID_VALUE, "`%s`: a block of %u x %u x %u threads", kernel.name, block_x, block_y, block_z);
    if (kernel.most_threads && threads > kernel.most_threads)
        return refuse(INVALID_VALUE, "`%s`: %llu threads, compiled for %u", kernel.name,
                      static_cast<unsigned long long>(threads), kernel.most_threads);
    if (shared > function.most_shared)
        return refuse(INVALID_VALUE, "`%s`: %u bytes of shared memory, permitted are %zu", kernel.name, shared,
                      function.most_shared);

    // The arguments have their values at the time of the call.
    auto arguments = std::make_shared<std::vector<std::vector<unsigned char>>>();
    Operation operation{function.module + "::" + kernel.name, {}, {}};
    for (size_t i = 0; i < kernel.count; i++) {
        const Parameter& parameter = kernel.parameters[i];
        auto value = static_cast<const unsigned char*>(values[i]);
        arguments->emplace_back(value, value + parameter.size);
        if (parameter.kind == Parameter::VALUE) continue;
        uint64_t address;
        std::memcpy(&address, value, sizeof(address));
        if (address == 0) continue;
        auto memory = device_memory(address, 1, *stream);
        if (!memory)
            stop("`%s`: argument %zu, %#llx, is not inside of an allocation (freed?)", kernel.name, i,
                 static_cast<unsigned long long>(address));
        if (address % parameter.align != 0)
            stop("`%s`: argument %zu, %#llx, is not aligned to %zu bytes", kernel.name, i,
                 static_cast<unsigned long long>(address), parameter.align);
        operation.uses.push_back({memory, parameter.kind == Parameter::OUTPUT});
    }
    const char* fails = std::getenv("SOFT_CUDA_FAIL");
    static std::atomic<long> launches{0};
    static const long lost = (long)setting("SOFT_CUDA_LOST", 0);
    if ((fails && std::strcmp(fails, kernel.name) == 0) || ++launches == lost) {
        operation.run = [] { failure() = ILLEGAL_ADDRESS; };
        enqueue(*stream, std::move(operation));
        return SUCCESS;
    }
    static const long slow = (long)setting("SOFT_CUDA_SLOW", 0);
    const bool waits = launches == slow;
    operation.run = [&kernel, launch, arguments, waits, name = operation.name] {
        if (waits) take_a_minute();
        std::vector<void*> places;
        for (auto& argument : *arguments) places.push_back(argument.data());
        running = name;
        kernel.run(kernel, launch, places.data());
        running.clear();
    };
    catch_faults();
    stream->computes = true;
    count(*stream, "launch (blocks)", operation.name, uint64_t(grid_x) * grid_y * grid_z);
    enqueue(*stream, std::move(operation));
    return SUCCESS;
}

}  // extern "C"
