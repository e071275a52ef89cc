// Faults on purpose, for mutate.py: a call is left out at one place of the program, arguments of a kernel change places,
// an operand of a product is transposed. The tests must see each of them.
//
// SOFT_CUDA_SITES=FILE: appends a line for each place of a call ("wait", "record", ...: the return addresses in the
// program), and for each kernel (its name, and kind and size of its parameters).
// SOFT_CUDA_FAULT: `skip KIND PROGRAM OFFSET`, `skip-kernel NAME`, `swap NAME I J`, `blocks NAME` (one block fewer) or
// `flip a|b PROGRAM OFFSET`. OFFSET is a return address in PROGRAM, relative to its start.

#include "faults.h"

#include "driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <sstream>
#include <unistd.h>

namespace soft {

namespace {

struct Fault {
    std::string kind, what, program;
    uint64_t offset = 0;
    int first = 0, second = 0;
};

struct State {
    std::string program;
    uint64_t start = 0, end = 0;
    int sites = -1;
    bool wanted = false;
    Fault fault;
    std::set<std::string> seen;
};

int find_program(dl_phdr_info* info, size_t, void* data) {
    // The program itself comes first.
    State& state = *static_cast<State*>(data);
    state.start = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& part = info->dlpi_phdr[i];
        if (part.p_type == PT_LOAD) state.end = std::max<uint64_t>(state.end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
    }
    return 1;
}

State read_state() {
    State state;
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
    std::string program(path, length > 0 ? static_cast<size_t>(length) : 0);
    state.program = program.substr(program.rfind('/') + 1);
    dl_iterate_phdr(find_program, &state);
    if (const char* file = std::getenv("SOFT_CUDA_SITES")) state.sites = open(file, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (const char* text = std::getenv("SOFT_CUDA_FAULT")) {
        state.wanted = true;
        std::istringstream words(text);
        Fault& fault = state.fault;
        words >> fault.kind >> fault.what;
        if (fault.kind == "skip" || fault.kind == "flip") words >> fault.program >> std::hex >> fault.offset;
        if (fault.kind == "swap") words >> fault.first >> fault.second;
        if (words.fail()) stop("SOFT_CUDA_FAULT is `%s`: see faults.cpp", text);
    }
    return state;
}

State& state() {
    static State* only = new State(read_state());
    return *only;
}

void write_line(const std::string& line) {
    State& s = state();
    if (!s.seen.insert(line).second) return;
    std::string text = line + "\n";
    if (write(s.sites, text.data(), text.size()) < 0) stop("SOFT_CUDA_SITES: the file cannot be written");
}

/// Return addresses in the program, the innermost first.
std::vector<uint64_t> callers() {
    void* frames[48];
    int count = backtrace(frames, 48);
    std::vector<uint64_t> inside;
    for (int i = 0; i < count; i++) {
        auto address = reinterpret_cast<uint64_t>(frames[i]);
        if (address >= state().start && address < state().end) inside.push_back(address - state().start);
    }
    return inside;
}

bool is_here(const char* fault, const char* kind) {
    const State& s = state();
    if (!s.wanted || s.fault.kind != fault || s.fault.what != kind || s.fault.program != s.program) return false;
    for (uint64_t caller : callers())
        if (caller == s.fault.offset) return true;
    return false;
}

}  // namespace

bool skipped(const char* kind) {
    State& s = state();
    if (s.sites >= 0) {
        std::ostringstream line;
        line << kind << ' ' << s.program << std::hex;
        for (uint64_t caller : callers()) line << ' ' << caller;
        write_line(line.str());
    }
    return is_here("skip", kind);
}

bool flipped(const char* operand) { return is_here("flip", operand); }

bool skipped_kernel(const Kernel& kernel) {
    State& s = state();
    if (s.sites >= 0) {
        std::ostringstream line;
        line << "kernel " << kernel.name;
        for (size_t i = 0; i < kernel.count; i++) line << ' ' << kernel.parameters[i].kind << ':' << kernel.parameters[i].size;
        write_line(line.str());
    }
    return s.wanted && s.fault.kind == "skip-kernel" && s.fault.what == kernel.name;
}

void change_launch(const Kernel& kernel, std::vector<void*>& values, unsigned& blocks) {
    const State& s = state();
    if (!s.wanted || s.fault.what != kernel.name) return;
    if (s.fault.kind == "swap")
        std::swap(values.at(static_cast<size_t>(s.fault.first)), values.at(static_cast<size_t>(s.fault.second)));
    if (s.fault.kind == "blocks" && blocks > 1) blocks--;
}

}  // namespace soft
