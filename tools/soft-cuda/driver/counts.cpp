// With SOFT_CUDA_COUNT=FILE: what a process asked of the driver, written to FILE when the process ends. A line for
// each kind and name: how often, and the sum of its sizes (blocks of a launch, operations of a product, bytes).

#include "driver.h"

#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace soft {

namespace {

struct Sum {
    uint64_t calls = 0, size = 0;
};

struct Counts {
    std::map<std::pair<std::string, std::string>, Sum> of;
    pid_t process = getpid();
    ~Counts() {
        // A process that was forked has a copy of the counts.
        if (of.empty() || process != getpid()) return;
        std::FILE* file = std::fopen(std::getenv("SOFT_CUDA_COUNT"), "w");
        if (!file) return;
        for (const auto& [key, sum] : of)
            std::fprintf(file, "%s\t%s\t%llu\t%llu\n", key.first.c_str(), key.second.c_str(),
                         static_cast<unsigned long long>(sum.calls), static_cast<unsigned long long>(sum.size));
        std::fclose(file);
    }
};

}  // namespace

void count(const char* kind, const std::string& name, uint64_t size) {
    static const bool wanted = std::getenv("SOFT_CUDA_COUNT") != nullptr;
    if (!wanted) return;
    static Counts counts;
    Sum& sum = counts.of[{kind, name}];
    sum.calls++;
    sum.size += size;
}

void count(const Stream& stream, const char* kind, const std::string& name, uint64_t size) {
    count(stream.capture ? (std::string("captured: ") + kind).c_str() : kind, name, size);
}

}  // namespace soft
