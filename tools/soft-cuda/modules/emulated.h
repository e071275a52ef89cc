// Makes a module of one file of ft's kernels: they run in the emulator of crates/ft-kernels. `build.sh` compiles this
// header twice with each file: first to list its kernels (SOFT_CUDA_LIST), then with a table made from that list.
#pragma once

#include "device.h"

#include "../kernel.h"

#include <tuple>

#ifdef SOFT_CUDA_LIST
#undef __global__
#define __global__ SOFT_CUDA_KERNEL
#undef __launch_bounds__
#define __launch_bounds__(...) SOFT_CUDA_BOUNDS(__VA_ARGS__, )
#endif

namespace soft {

template <class... P, size_t... I>
void call(void (*kernel)(P...), void* const* values, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<P>*>(values[I])...);
}

template <class... P>
void emulate_grid(const Kernel& kernel, const Launch& launch, void* const* values) {
    auto function = reinterpret_cast<void (*)(P...)>(kernel.function);
    const auto& [grid, block] = std::tie(launch.grid, launch.block);
    emulate::run_grid(dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), launch.shared, launch.seed,
                      [&] { call(function, values, std::index_sequence_for<P...>()); });
}

template <class... P>
Kernel emulated(const char* name, unsigned most_threads, void (*kernel)(P...)) {
    return {name,          Descriptions<P...>::list, sizeof...(P),
            most_threads,  emulate_grid<P...>,       reinterpret_cast<void (*)()>(kernel)};
}

}  // namespace soft
