// The interface between the driver and the modules of kernels. A module is a shared library that exports
// `soft_cuda_module`; its name is the one that the stand-in for nvcc wrote (PACKAGE/FILE).
#pragma once

#include <cstddef>
#include <cstdint>

namespace soft {

/// A parameter of a kernel, as the compiler sees it.
struct Parameter {
    enum Kind : uint32_t { VALUE, INPUT, OUTPUT };  // INPUT: a pointer to const, OUTPUT: another pointer
    size_t size;
    size_t align;  // of the elements, for pointers
    Kind kind;
};

struct Launch {
    unsigned grid[3];
    unsigned block[3];
    size_t shared;
    uint64_t seed;  // of the order of threads and blocks
};

struct Kernel {
    const char* name;
    const Parameter* parameters;
    size_t count;
    unsigned most_threads;  // __launch_bounds__, or 0
    void (*run)(const Kernel& kernel, const Launch& launch, void* const* values);
    void (*function)();
};

struct Module {
    const Kernel* kernels;
    size_t count;
};

template <class P>
struct Description {
    static constexpr Parameter value{sizeof(P), 1, Parameter::VALUE};
};
template <>
struct Description<void*> {
    static constexpr Parameter value{sizeof(void*), 1, Parameter::OUTPUT};
};
template <>
struct Description<const void*> {
    static constexpr Parameter value{sizeof(void*), 1, Parameter::INPUT};
};
template <class T>
struct Description<T*> {
    static constexpr Parameter value{sizeof(T*), alignof(T), Parameter::OUTPUT};
};
template <class T>
struct Description<const T*> {
    static constexpr Parameter value{sizeof(T*), alignof(T), Parameter::INPUT};
};

template <class... P>
struct Descriptions {
    static constexpr Parameter list[sizeof...(P) + 1] = {Description<P>::value..., {}};
};

}  // namespace soft
