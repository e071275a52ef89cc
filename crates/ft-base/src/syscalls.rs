//! Seccomp filters: for a process that only computes and uses two pipes, and for one without network, which Landlock keeps out of the
//! memory of others too.

/// Allowed: reads and writes of open files, memory, the clock, random bytes for hash tables, signals of this process, and exit.
/// One list for both processors; on aarch64 it ran by hand in a virtual machine (docs/platforms.md).
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

const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
/// Numbers of the x32 calls begin here.
const X32: u32 = 0x4000_0000;

/// Refused without network. Sockets of all kinds, also local ones: through those of other programs (Docker, D-Bus, the agent of SSH) it
/// could reach a network. `socketpair` is not among them: both ends are the program's own. Then what
/// reads or changes other processes of the user.
const WITHOUT_NETWORK: [libc::c_long; 7] = [
    libc::SYS_socket,
    // It opens sockets too.
    libc::SYS_io_uring_setup,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
];

/// A filter that refuses sockets and access to other processes. Empty: not for this processor.
pub(super) fn without_network() -> Vec<libc::sock_filter> {
    if ALLOWED.is_empty() {
        return Vec::new();
    }
    // Jump offsets of a BPF program are one byte.
    let count = WITHOUT_NETWORK.len() as u8;
    let mut program = vec![
        step(LOAD, ARCHITECTURE, 0, 0),
        step(IF_EQUAL, MACHINE, 1, 0),
        step(RETURN, DENY, 0, 0),
        step(LOAD, NUMBER, 0, 0),
        step(IF_AT_LEAST, X32, count + 1, 0),
    ];
    for (i, call) in WITHOUT_NETWORK.iter().enumerate() {
        program.push(step(IF_EQUAL, *call as u32, count - i as u8, 0));
    }
    program.push(step(RETURN, ALLOW, 0, 0));
    program.push(step(RETURN, DENY, 0, 0));
    program
}

/// The version of Landlock of this kernel, with which a process takes rights away from itself. 0: none.
pub(super) fn landlock() -> libc::c_long {
    const VERSION: u32 = 1;
    let (none, size) = (std::ptr::null::<u64>(), 0usize);
    // SAFETY: asks for the version only; reads no memory.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, size, VERSION) }.max(0)
}

/// The first version with rules for TCP (Linux 6.7). Rules for files alone refuse the renaming of files between directories.
pub(super) const LANDLOCK_TCP: libc::c_long = 4;

/// Binding and connecting TCP need a rule that allows it, and there is none. A process with rules may not open the memory of one without
/// them, `/proc/<process>/mem`, also as root; a filter cannot see which file is opened. No effect on older kernels.
fn keep_out_of_other_memory() {
    // Rights of files, rights of TCP.
    let rights: [u64; 2] = [0, 0b11];
    if landlock() < LANDLOCK_TCP {
        return;
    }
    // SAFETY: the kernel reads the two words of `rights`. The system closes the descriptor when the program starts.
    unsafe {
        let (create, restrict) = (libc::SYS_landlock_create_ruleset, libc::SYS_landlock_restrict_self);
        let rules = libc::syscall(create, rights.as_ptr(), size_of_val(&rights), 0u32);
        if rules >= 0 {
            libc::syscall(restrict, rules, 0u32);
        }
    }
}

/// Applies a filter of `without_network` to this process and its children, for good. Only makes system calls, so it may be
/// called between fork and exec. False: the kernel has no filters.
pub(super) fn apply(program: &[libc::sock_filter]) -> bool {
    let header = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: only sets a flag of this process.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return false;
    }
    keep_out_of_other_memory();
    // SAFETY: the kernel copies the program that `header` points at, which lives until the call returns.
    unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const header, 0, 0) == 0 }
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// True if the system refuses all calls of `WITHOUT_NETWORK` to this process. Their arguments are not valid, so none does anything.
    pub(crate) fn all_are_refused() -> bool {
        let refused = |call: libc::c_long| {
            // SAFETY: -1 is no size, no descriptor, no process and no address that the kernel accepts.
            let answer = unsafe { libc::syscall(call, -1i64, -1i64, -1i64, -1i64, -1i64, -1i64) };
            answer == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
        };
        WITHOUT_NETWORK.into_iter().all(refused)
    }

    /// What a filter answers to a call.
    fn answer(program: &[libc::sock_filter], machine: u32, number: u32) -> u32 {
        let (mut loaded, mut at) = (0, 0);
        loop {
            let step = &program[at];
            at += 1;
            let holds = match step.code {
                LOAD if step.k == NUMBER => {
                    loaded = number;
                    continue;
                }
                LOAD if step.k == ARCHITECTURE => {
                    loaded = machine;
                    continue;
                }
                RETURN => return step.k,
                IF_EQUAL => loaded == step.k,
                IF_AT_LEAST => loaded >= step.k,
                other => panic!("step {} has the code {other:#x}", at - 1),
            };
            at += usize::from(if holds { step.jt } else { step.jf });
        }
    }

    /// Row W8. The numbers are those of the tables of the kernel for x86-64 and aarch64.
    #[test]
    fn the_filter_refuses_sockets_and_access_to_other_processes() {
        let refused: [(&str, u32, u32); 7] = [
            ("socket", 41, 198),
            ("io_uring_setup", 425, 425),
            ("ptrace", 101, 117),
            ("process_vm_readv", 310, 270),
            ("process_vm_writev", 311, 271),
            ("pidfd_getfd", 438, 438),
            ("kcmp", 312, 272),
        ];
        let allowed: [(&str, u32, u32); 8] = [
            ("socketpair", 53, 199),
            ("connect", 42, 203),
            ("read", 0, 63),
            ("openat", 257, 56),
            ("clone", 56, 220),
            ("execve", 59, 221),
            ("prlimit64", 302, 261),
            ("pidfd_open", 434, 434),
        ];
        let number = |call: &(&str, u32, u32)| if cfg!(target_arch = "x86_64") { call.1 } else { call.2 };
        let program = without_network();
        for call in &refused {
            assert_eq!(answer(&program, MACHINE, number(call)), DENY, "{}", call.0);
        }
        for call in &allowed {
            assert_eq!(answer(&program, MACHINE, number(call)), ALLOW, "{}", call.0);
        }
        // Calls of a program for another processor, and those of x32.
        assert_eq!(answer(&program, MACHINE ^ 1, number(&allowed[0])), DENY);
        assert_eq!(answer(&program, MACHINE, X32 + number(&allowed[0])), DENY);
    }
}
