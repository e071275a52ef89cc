// Fibers: many stacks, one at a time. On x86-64 Linux the switch is a few instructions, elsewhere it is ucontext.
// Every switch is reported to the address sanitizer.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#if defined(__x86_64__) && defined(__linux__) && !defined(EMULATE_UCONTEXT)
#define EMULATE_ASSEMBLY 1
#else
#define EMULATE_ASSEMBLY 0
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define EMULATE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATE_ASAN 1
#endif
#endif
#ifdef EMULATE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if EMULATE_ASSEMBLY
extern "C" void emulate_switch_stack(void** save, void* load);
// Saves what a call must keep, changes the stack, restores it from there.
asm(R"(
.text
.type emulate_switch_stack, @function
emulate_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulate_switch_stack, .-emulate_switch_stack
)");
#endif

namespace emulate {

struct Fiber {
#if EMULATE_ASSEMBLY
    void* top = nullptr;
#else
    ucontext_t context;
#endif
    char* stack = nullptr;
    size_t size = 0;
    void* fake = nullptr;
};

/// The fiber that runs the grid, and the one that was left last.
inline Fiber host;
inline Fiber* left = &host;

inline void switched(Fiber* self) {
#ifdef EMULATE_ASAN
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(self ? self->fake : nullptr, &bottom, &size);
    if (left == &host) {
        host.stack = static_cast<char*>(const_cast<void*>(bottom));
        host.size = size;
    }
#else
    (void)self;
#endif
}

inline void switch_to(Fiber& from, Fiber& to, bool last) {
#ifdef EMULATE_ASAN
    __sanitizer_start_switch_fiber(last ? nullptr : &from.fake, to.stack, to.size);
#else
    (void)last;
#endif
    left = &from;
#if EMULATE_ASSEMBLY
    emulate_switch_stack(&from.top, to.top);
#else
    swapcontext(&from.context, &to.context);
#endif
    switched(&from);
}

/// Prepares a fiber to start in `entry`, which must never return.
inline void prepare(Fiber& fiber, void (*entry)()) {
    if (!fiber.stack) {
        // All threads of a block use the ends of their stacks in turn. An odd number of pages for each stack, and ends at different
        // lines of a page, keep them in different sets of the caches and of the TLB.
        static unsigned made = 0;
        constexpr size_t PAGE = 4096, LINE = 64;
        size_t unused = made++ * 23 % (PAGE / LINE) * LINE, whole = 127 * PAGE;
        void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            std::perror("a stack of a thread");
            std::exit(1);
        }
        fiber.stack = static_cast<char*>(memory);
        fiber.size = whole - unused;
    }
    fiber.fake = nullptr;
#ifdef EMULATE_ASAN
    __asan_unpoison_memory_region(fiber.stack, fiber.size);
#endif
#if EMULATE_ASSEMBLY
    // Six saved registers, the address to return to, and the place of a caller that is not there.
    void** top = reinterpret_cast<void**>(fiber.stack + fiber.size);
    std::memset(top - 8, 0, 8 * sizeof(void*));
    top[-2] = reinterpret_cast<void*>(entry);
    fiber.top = top - 8;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = fiber.size;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#endif
}

}  // namespace emulate
