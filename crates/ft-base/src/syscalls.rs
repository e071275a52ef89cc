//! Seccomp filters: for a process that only computes and uses two pipes, and for one without network.

/// Allowed: reads and writes of open files, memory, the clock, random bytes for hash tables, signals of this process, and exit.
/// One list for both processors; on aarch64 it was only read, never run (docs/platforms.md).
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_setrlimit,
    libc::SYS_prlimit64,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ALLOWED: &[libc::c_long] = &[];

/// The kernel's name of this processor (`AUDIT_ARCH_*`); calls with the numbers of another one are refused.
#[cfg(target_arch = "x86_64")]
const MACHINE: u32 = 0xc000_003e;
#[cfg(not(target_arch = "x86_64"))]
const MACHINE: u32 = 0xc000_00b7;

// Offsets of the two words of `seccomp_data` that the filter reads.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const ALLOW: u32 = 0x7fff_0000;
/// The call fails with `EPERM`.
const DENY: u32 = 0x0005_0000 | 1;

fn step(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// The first argument of a call (its low half: both machines are little-endian).
const FIRST_ARGUMENT: u32 = 16;
const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
/// Numbers of the x32 calls begin here.
const X32: u32 = 0x4000_0000;

/// A filter under which sockets are local (`AF_UNIX`) only. Empty: not for this processor.
pub(super) fn without_network() -> Vec<libc::sock_filter> {
    if ALLOWED.is_empty() {
        return Vec::new();
    }
    vec![
        step(LOAD, ARCHITECTURE, 0, 0),
        step(IF_EQUAL, MACHINE, 1, 0),
        step(RETURN, DENY, 0, 0),
        step(LOAD, NUMBER, 0, 0),
        step(IF_AT_LEAST, X32, 5, 0),
        // It opens sockets too.
        step(IF_EQUAL, libc::SYS_io_uring_setup as u32, 4, 0),
        step(IF_EQUAL, libc::SYS_socket as u32, 0, 2),
        step(LOAD, FIRST_ARGUMENT, 0, 0),
        step(IF_EQUAL, libc::AF_UNIX as u32, 0, 1),
        step(RETURN, ALLOW, 0, 0),
        step(RETURN, DENY, 0, 0),
    ]
}

/// Applies a filter of `without_network` to this process and its children, for good. Only makes system calls, so it may be
/// called between fork and exec. False: the kernel has no filters.
pub(super) fn apply(program: &[libc::sock_filter]) -> bool {
    let header = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program that `header` points at, which lives until the call returns.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const header, 0, 0) == 0
    }
}

/// From now on every system call that is not allowed fails. No effect if the kernel has no seccomp filters.
pub(super) fn filter() {
    // Jump offsets of a BPF program are one byte.
    let Ok(count) = u8::try_from(ALLOWED.len()) else { return };
    if count == 0 {
        return;
    }
    let mut program = vec![
        step(LOAD, ARCHITECTURE, 0, 0),
        step(IF_EQUAL, MACHINE, 1, 0),
        step(RETURN, DENY, 0, 0),
        step(LOAD, NUMBER, 0, 0),
    ];
    for (i, call) in ALLOWED.iter().enumerate() {
        program.push(step(IF_EQUAL, *call as u32, count - i as u8, 0));
    }
    program.push(step(RETURN, DENY, 0, 0));
    program.push(step(RETURN, ALLOW, 0, 0));
    let header = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the kernel copies the program that `header` points at, which lives until the call returns.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 {
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const header, 0, 0);
        }
    }
}
