//! A confined second process of the same program that handles untrusted input: limited memory and time, no new files.
//! The program calls `set_program` once; a library or a test that does not call it has no worker.
//!
//! Limits: address space, CPU time, stack, no new files, no core dump, no new privileges; on Linux also a seccomp
//! filter, if the kernel supports it.

mod hidden;
mod start;

pub use hidden::hide_secrets;
#[cfg(target_os = "linux")]
pub use start::end_with_parent;
pub use start::start_reduced;

use crate::{Error, Result, secrets};
use std::ffi::OsString;
use std::fmt;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// First argument of a worker process.
pub const ARGUMENT: &str = "internal-worker";
/// Address space, bytes.
const MEMORY: u64 = 1 << 30;
const STACK: u64 = 8 << 20;
/// CPU time for one task, seconds.
const SECONDS: u64 = 20;
/// Longest time without an answer of a busy worker.
pub const SILENCE: Duration = Duration::from_secs(60);

/// Command that starts a worker.
#[derive(Debug)]
pub struct WorkerCommand {
    /// The executable.
    pub path: PathBuf,
    /// The complete environment of a worker.
    pub variables: Vec<(OsString, OsString)>,
    /// A worker that is silent for this time is killed: `SILENCE`, or less in a test.
    pub silence: Duration,
}

static PROGRAM: OnceLock<WorkerCommand> = OnceLock::new();

/// Sets the command; the program calls this once, before the first worker starts.
pub fn set_program(program: WorkerCommand) {
    let _ = PROGRAM.set(program);
}

/// The program that `set_program` named.
pub fn program() -> Option<&'static WorkerCommand> {
    PROGRAM.get()
}

/// False in a library or a test that never called `set_program`.
pub fn is_available() -> bool {
    PROGRAM.get().is_some()
}

/// Reason why a worker gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerEnd {
    /// It exceeded its memory limit.
    Memory,
    /// Its stack overflowed.
    Stack,
    /// It exceeded its CPU time.
    Time,
    /// It did not answer in time.
    Silence,
    /// It was ended by this signal.
    Signal(i32),
    /// It ended with this exit code.
    Exit(i32),
}

impl fmt::Display for WorkerEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => write!(f, "used more than {} MiB", MEMORY >> 20),
            Self::Stack => write!(f, "overflowed the stack"),
            Self::Time => write!(f, "used more than {SECONDS} s of processor time"),
            Self::Silence => write!(f, "did not answer for {} s", SILENCE.as_secs()),
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
            Self::Exit(code) => write!(f, "ended with code {code}"),
        }
    }
}

/// A running worker. Dropping it ends the process.
pub struct Worker {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    silence: Duration,
}

impl Worker {
    /// Starts a worker process with its limits.
    ///
    /// # Errors
    /// No program is set, or the process does not start.
    pub fn start() -> Result<Self> {
        match PROGRAM.get() {
            Some(program) => Self::of(program),
            None => Err(Error::not_found("the program for a sandboxed process does not exist")),
        }
    }

    fn of(program: &WorkerCommand) -> Result<Self> {
        let failed = || {
            let path = program.path.display();
            Error::new(format!("cannot start a process with limits from {path}"))
        };
        let mut child = Command::new(&program.path)
            .arg(ARGUMENT)
            .env_clear()
            .envs(program.variables.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in the terminal goes to this process only, which then closes the input of the worker.
            .process_group(0)
            .spawn()
            .map_err(|e| failed().cause(e))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Self {
                child,
                input,
                output,
                silence: program.silence,
            }),
            _ => Err(failed()),
        }
    }

    /// Sends bytes to the worker.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn send(&mut self, bytes: &[u8]) -> std::result::Result<(), WorkerEnd> {
        self.input
            .write_all(bytes)
            .and_then(|()| self.input.flush())
            .map_err(|_| self.end())
    }

    /// Fills `bytes`.
    ///
    /// # Errors
    /// The worker has ended, or gave no answer in time.
    pub fn receive(&mut self, mut bytes: &mut [u8]) -> std::result::Result<(), WorkerEnd> {
        while !bytes.is_empty() {
            if !self.wait() {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return Err(WorkerEnd::Silence);
            }
            match self.output.read(bytes) {
                Ok(0) => return Err(self.end()),
                Ok(n) => bytes = &mut bytes[n..],
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(self.end()),
            }
        }
        Ok(())
    }

    /// Returns true when there is data to read, or the worker has ended.
    fn wait(&self) -> bool {
        let start = Instant::now();
        loop {
            let left = self.silence.saturating_sub(start.elapsed());
            let mut poll = libc::pollfd {
                fd: self.output.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            let millis = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
            // SAFETY: one valid pollfd, whose descriptor is open as long as `self`.
            match unsafe { libc::poll(&mut poll, 1, millis) } {
                0 => return false,
                n if n > 0 => return true,
                // Interrupted by a signal: wait for the rest of the time.
                _ if left.is_zero() => return false,
                _ => {}
            }
        }
    }

    /// Ends the process and returns the reason why it gave no answer.
    fn end(&mut self) -> WorkerEnd {
        // It has closed its output, so it is dead or about to exit.
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if start.elapsed() < Duration::from_secs(2) => std::thread::sleep(Duration::from_millis(2)),
                _ => break None,
            }
        };
        let mut said = Vec::new();
        if let (Some(_), Some(stderr)) = (status, self.child.stderr.take()) {
            let _ = stderr.take(4096).read_to_end(&mut said);
        }
        let said = String::from_utf8_lossy(&said);
        let Some(status) = status else {
            let _ = self.child.kill();
            let _ = self.child.wait();
            return WorkerEnd::Silence;
        };
        match (status.signal(), status.code()) {
            (Some(libc::SIGXCPU), _) => WorkerEnd::Time,
            _ if said.contains("overflowed its stack") => WorkerEnd::Stack,
            _ if said.contains("memory allocation") => WorkerEnd::Memory,
            (Some(libc::SIGSEGV | libc::SIGBUS), _) => WorkerEnd::Stack,
            (Some(signal), _) => WorkerEnd::Signal(signal),
            (None, code) => WorkerEnd::Exit(code.unwrap_or(-1)),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({})", self.child.id())
    }
}

/// Sets a resource limit, or keeps a lower one that is already set.
fn limit(what: Resource, soft: u64, hard: u64) -> std::io::Result<()> {
    let mut value = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes one `rlimit`.
    if unsafe { libc::getrlimit(what, &mut value) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    value.rlim_max = value.rlim_max.min(hard as libc::rlim_t);
    value.rlim_cur = value.rlim_max.min(soft as libc::rlim_t);
    // SAFETY: reads one `rlimit`.
    match unsafe { libc::setrlimit(what, &value) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
type Resource = libc::c_int;

/// Drops all privileges that a worker does not need, permanently.
///
/// # Errors
/// A limit cannot be set. A seccomp filter that cannot be set is not an error.
pub fn confine() -> std::io::Result<()> {
    limit(libc::RLIMIT_AS, MEMORY, MEMORY)?;
    limit(libc::RLIMIT_STACK, STACK, STACK)?;
    limit(libc::RLIMIT_CORE, 0, 0)?;
    limit(libc::RLIMIT_FSIZE, 0, 0)?;
    limit(libc::RLIMIT_NOFILE, 3, 3)?;
    #[cfg(target_os = "linux")]
    super::syscalls::filter();
    Ok(())
}

/// Rights of another program that ft starts.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessRights {
    /// False: it can open no sockets and not look into other processes (Linux on x86-64 and aarch64).
    pub network: bool,
    /// Most bytes of its own memory (`RLIMIT_DATA`); `None` is no limit.
    pub memory: Option<u64>,
}

/// Reduces what `command` and its children may do: a process group of its own, no core dumps, no new privileges without
/// network, not the secret of the job; without network also no variable with a secret (`secrets::is_variable`).
pub fn reduce(command: &mut Command, rights: ProcessRights) {
    command.process_group(0);
    // With it a program could pretend to be a rank.
    command.env_remove(secrets::JOB);
    if !rights.network {
        let own = std::env::vars_os();
        let set = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_os_string(), value?.to_os_string())));
        let secret: Vec<OsString> = own
            .chain(set)
            .filter(|(name, value)| secrets::is_variable(&name.to_string_lossy(), &value.to_string_lossy()))
            .map(|(name, _)| name)
            .collect();
        for name in &secret {
            command.env_remove(name);
        }
    }
    #[cfg(target_os = "linux")]
    let filter = if rights.network {
        Vec::new()
    } else {
        super::syscalls::without_network()
    };
    let before = move || {
        limit(libc::RLIMIT_CORE, 0, 0)?;
        if let Some(bytes) = rights.memory {
            limit(libc::RLIMIT_DATA, bytes, bytes)?;
        }
        #[cfg(target_os = "linux")]
        if !filter.is_empty() {
            super::syscalls::apply(&filter);
        }
        Ok(())
    };
    // SAFETY: between fork and exec it only makes system calls; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(before) };
}

/// True if `reduce` can take the network away on this system.
pub fn can_take_network() -> bool {
    #[cfg(target_os = "linux")]
    {
        let known = !super::syscalls::without_network().is_empty();
        // SAFETY: only asks for the mode; touches no memory.
        known && unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) } >= 0
    }
    #[cfg(not(target_os = "linux"))]
    {
        false
    }
}

/// Sets the CPU time limit for the next task.
pub fn limit_time() {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one `timespec`.
    let used = match unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) } {
        0 => u64::try_from(time.tv_sec).unwrap_or(0),
        _ => return,
    };
    let _ = limit(libc::RLIMIT_CPU, used + SECONDS + 1, u64::MAX);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;

    /// A file with this shell script.
    pub(super) fn script_file(lines: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker");
        std::fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        (dir, path)
    }

    /// A worker that runs this shell script.
    fn script(lines: &str) -> (tempfile::TempDir, Worker) {
        let (dir, path) = script_file(lines);
        let command = WorkerCommand {
            path,
            variables: vec![("GIVEN".into(), "yes".into())],
            silence: SILENCE,
        };
        let worker = Worker::of(&command).unwrap();
        (dir, worker)
    }

    #[test]
    fn the_end_of_a_worker_is_told_in_words() {
        let end = |lines: &str| {
            let (_dir, mut worker) = script(lines);
            worker.receive(&mut [0]).unwrap_err()
        };
        assert_eq!(end("kill -XCPU $$"), WorkerEnd::Time);
        assert_eq!(
            end("echo memory allocation of 9 bytes failed >&2; kill -ABRT $$"),
            WorkerEnd::Memory
        );
        assert_eq!(
            end("echo thread main has overflowed its stack >&2; kill -ABRT $$"),
            WorkerEnd::Stack
        );
        assert_eq!(end("kill -SEGV $$"), WorkerEnd::Stack);
        assert_eq!(end("kill -KILL $$"), WorkerEnd::Signal(9));
        assert_eq!(end("exit 3"), WorkerEnd::Exit(3));
        assert_eq!(WorkerEnd::Memory.to_string(), "used more than 1024 MiB");
    }

    #[test]
    fn a_worker_that_is_silent_for_too_long_is_killed() {
        let (_dir, mut worker) = script("echo begun; exec sleep 600");
        let mut begun = [0u8; 6];
        worker.receive(&mut begun).unwrap();
        assert_eq!(&begun, b"begun\n");
        assert!(worker.child.try_wait().unwrap().is_none());
        worker.silence = Duration::from_millis(200);
        let start = Instant::now();
        assert_eq!(worker.receive(&mut [0]), Err(WorkerEnd::Silence));
        let waited = start.elapsed();
        assert!(
            waited >= worker.silence / 2 && waited < Duration::from_secs(30),
            "{waited:?}"
        );
        let ended = worker.child.try_wait().unwrap().unwrap();
        assert_eq!(ended.signal(), Some(libc::SIGKILL));
    }

    /// Variables for a program, and whether it gets them without network.
    const PLANTED: [(&str, &str, bool); 12] = [
        ("FT_TEST_TOKEN", "x", false),
        ("OPENAI_API_KEY_2", "x", false),
        ("PGPASSWORD", "x", false),
        ("SSH_AUTH_SOCK", "agent.sock", false),
        ("DBUS_SESSION_BUS_ADDRESS", "unix:path=bus.sock", false),
        ("DOCKER_HOST", "unix://docker.sock", false),
        ("DATABASE_URL", "postgres://me:pw@db/x", false),
        ("HTTPS_PROXY", "http://me:pw@proxy:3128", false),
        ("HTTP_PROXY", "http://proxy:3128", true),
        ("TOKENIZERS_PARALLELISM", "false", true),
        ("XAUTHORITY", "cookies", true),
        ("KEYBOARD", "us", true),
    ];

    #[test]
    #[ignore = "runs only as the child of the test below"]
    fn tries_sockets() {
        use std::net::{TcpStream, UdpSocket};
        let denied = |e: Option<std::io::Error>| e.is_some_and(|e| e.raw_os_error() == Some(libc::EPERM));
        #[cfg(target_os = "linux")]
        let others = crate::syscalls::tests::all_are_refused();
        #[cfg(not(target_os = "linux"))]
        let others = false;
        println!(
            "{} {} {} {} {} {} {:?}",
            denied(TcpStream::connect("127.0.0.1:9").err()),
            denied(UdpSocket::bind("[::1]:0").err()),
            denied(std::os::unix::net::UnixDatagram::unbound().err()),
            others,
            std::os::unix::net::UnixStream::pair().is_ok(),
            std::env::var("FT_TEST_TOKEN").is_ok(),
            std::panic::catch_unwind(|| {
                let mut big: Vec<u8> = Vec::new();
                big.try_reserve_exact(1 << 30).is_ok()
            })
            .ok(),
        );
        let names = PLANTED.iter().map(|(name, ..)| *name).chain([secrets::JOB]);
        let seen = names.filter(|name| std::env::var(name).is_ok());
        println!("variables: {}.", seen.collect::<Vec<_>>().join(" "));
    }

    /// Row W8.
    #[test]
    fn a_program_without_rights_opens_no_socket_sees_no_secret_and_has_a_limit() {
        let said = |rights: ProcessRights| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["worker::tests::tries_sockets", "--exact", "--ignored", "--nocapture"]);
            command.envs(PLANTED.iter().map(|(name, value, _)| (*name, *value)));
            command.env(secrets::JOB, "x");
            reduce(&mut command, rights);
            let out = command.output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            String::from_utf8(out.stdout).unwrap()
        };
        let none = ProcessRights {
            network: false,
            memory: Some(256 << 20),
        };
        let all = ProcessRights {
            network: true,
            memory: None,
        };
        assert!(can_take_network(), "this system has no seccomp filters");
        assert!(
            said(none).contains("true true true true true false Some(false)"),
            "{}",
            said(none)
        );
        assert!(
            said(all).contains("false false false false true true Some(true)"),
            "{}",
            said(all)
        );
        let variables = |without_network: bool| {
            let seen = PLANTED.iter().filter(|(.., stays)| *stays || !without_network);
            format!(
                "variables: {}.",
                seen.map(|(name, ..)| *name).collect::<Vec<_>>().join(" ")
            )
        };
        assert!(said(none).contains(&variables(true)), "{}", said(none));
        assert!(said(all).contains(&variables(false)), "{}", said(all));
    }

    /// Row W8. ft ends a reward program by its group. Without a group of its own its children would stay, and Ctrl-C in the
    /// terminal would reach it before ft.
    #[test]
    fn a_program_and_its_children_are_one_group_and_end_together() {
        let (_dir, path) = script_file("sleep 600 & echo $!; wait");
        for network in [false, true] {
            let mut command = Command::new(&path);
            command.stdout(Stdio::piped());
            reduce(&mut command, ProcessRights { network, memory: None });
            let mut started = command.spawn().unwrap();
            let mut output = BufReader::new(started.stdout.take().unwrap());
            let mut line = String::new();
            output.read_line(&mut line).unwrap();
            let (id, grandchild) = (started.id() as i32, line.trim().parse::<i32>().unwrap());
            // SAFETY: only return numbers.
            let groups = unsafe { [libc::getpgid(0), libc::getpgid(id), libc::getpgid(grandchild)] };
            // SAFETY: signals to the processes that were started above; touches no memory.
            let ended = unsafe { libc::kill(-id, libc::SIGKILL) };
            if ended != 0 {
                let _ = started.kill();
                // SAFETY: as above.
                unsafe { libc::kill(grandchild, libc::SIGKILL) };
            }
            started.wait().unwrap();
            assert!(
                ended == 0 && groups[0] != id && groups[1..] == [id, id],
                "{groups:?} of {id}, {grandchild}"
            );
            // Both have the pipe: it ends when both have.
            assert_eq!(output.read_line(&mut line).unwrap(), 0);
        }
    }

    /// Row W4.
    #[test]
    fn a_worker_has_its_own_group_and_no_environment_but_what_is_given() {
        let (_dir, mut worker) = script("read line; echo \"$line $GIVEN ${HOME:-none}\"; read line");
        worker.send(b"hello\n").unwrap();
        let mut said = [0u8; 15];
        worker.receive(&mut said).unwrap();
        assert_eq!(&said, b"hello yes none\n");
        // SAFETY: only returns a number.
        let group = unsafe { libc::getpgid(worker.child.id() as i32) };
        assert_eq!(group, worker.child.id() as i32);
    }
}
