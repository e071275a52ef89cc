//! Programs that end when ft ends, also when it is killed.

use super::{ProcessRights, reduce};
use crate::signal::ChildGroup;
use crate::sync::lock;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Mutex, mpsc};

/// A program to start, and where the answer goes.
type StartJob = (Command, mpsc::Sender<std::io::Result<(Child, ChildGroup)>>);

/// Starts a program with reduced rights in a process group of its own. A signal that ends this process kills the group; if this
/// process is killed, the system kills the program (Linux), but not the children of the program.
///
/// # Errors
/// The program cannot be started.
pub fn start_reduced(mut command: Command, rights: ProcessRights) -> std::io::Result<(Child, ChildGroup)> {
    reduce(&mut command, rights);
    #[cfg(target_os = "linux")]
    end_with_parent(&mut command, libc::SIGKILL);
    let ended = || std::io::Error::other("the thread that starts programs has ended");
    let (answer, started) = mpsc::channel();
    starter()?.send((command, answer)).map_err(|_| ended())?;
    started.recv().map_err(|_| ended())?
}

/// The thread that starts programs. It lives as long as the process, because the system takes the end of the thread that started
/// a program as the end of the parent.
fn starter() -> std::io::Result<mpsc::Sender<StartJob>> {
    static STARTER: Mutex<Option<mpsc::Sender<StartJob>>> = Mutex::new(None);
    let mut starter = lock(&STARTER);
    if let Some(jobs) = starter.as_ref() {
        return Ok(jobs.clone());
    }
    let (jobs, to_start) = mpsc::channel::<StartJob>();
    let start = move || {
        for (mut command, answer) in to_start {
            // The group at once: a signal may end this process before the caller gets the answer.
            let _ = answer.send(command.spawn().map(|child| {
                let group = ChildGroup::of(&child);
                (child, group)
            }));
        }
    };
    std::thread::Builder::new().name("programs".into()).spawn(start)?;
    *starter = Some(jobs.clone());
    Ok(jobs)
}

/// The system sends the program this signal when the thread that started it ends.
#[cfg(target_os = "linux")]
pub fn end_with_parent(command: &mut Command, signal: i32) {
    let parent = std::process::id() as i32;
    // SAFETY: two system calls between fork and exec; they touch no memory.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong);
            // It may have ended before.
            if libc::getppid() != parent {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::script_file;
    use super::*;
    use std::path::PathBuf;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    #[test]
    #[ignore = "runs only as the child of the test below"]
    fn holds_a_program() {
        crate::signal::install().unwrap();
        let path = PathBuf::from(std::env::var("FT_TEST_PROGRAM").unwrap());
        // The program lives longer than the thread that asked for it.
        let started = || start_reduced(Command::new(&path), ProcessRights::default()).unwrap();
        let _held = std::thread::scope(|scope| scope.spawn(started).join().unwrap());
        std::thread::sleep(Duration::from_secs(600));
    }

    /// Row W8. At such an end no `Drop` runs. If ft is killed, the children of the program stay.
    #[test]
    fn a_program_ends_with_ft_also_if_a_signal_ends_it() {
        // The state is behind the name; what was not waited for yet is "Z".
        let lives = |id: i32| {
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            state.is_some_and(|state| !"ZX".contains(state))
        };
        for (signal, whole_group) in [(libc::SIGTERM, true), (libc::SIGKILL, false)] {
            let (dir, path) =
                script_file("cd \"${0%/*}\"; sleep 600 & echo $$ $! >ids.new; mv ids.new ids; exec sleep 600");
            let mut own = Command::new(std::env::current_exe().unwrap())
                .args([
                    "worker::start::tests::holds_a_program",
                    "--exact",
                    "--ignored",
                    "--nocapture",
                ])
                .env("FT_TEST_PROGRAM", &path)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let within = |seconds: u64, done: &dyn Fn() -> bool| {
                let start = Instant::now();
                while !done() && start.elapsed() < Duration::from_secs(seconds) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                done()
            };
            if !within(60, &|| dir.path().join("ids").exists()) {
                let _ = own.kill();
                own.wait().unwrap();
                panic!("the program did not start, or ended");
            }
            let ids = std::fs::read_to_string(dir.path().join("ids")).unwrap();
            let ids: Vec<i32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            std::thread::sleep(Duration::from_millis(100));
            let before = [lives(ids[0]), lives(ids[1])];
            // SAFETY: a signal to a child that was not waited for yet; touches no memory.
            unsafe { libc::kill(own.id() as i32, signal) };
            let ended = own.wait().unwrap();
            let program = within(10, &|| !lives(ids[0]));
            let child = !whole_group || within(10, &|| !lives(ids[1]));
            // SAFETY: a signal to the group of the program, if something of it is left; touches no memory.
            unsafe { libc::kill(-ids[0], libc::SIGKILL) };
            assert_eq!(before, [true, true], "{signal}");
            assert!(program && child, "{signal}: {program} {child}");
            let code = (signal == libc::SIGTERM).then_some(128 + signal);
            assert_eq!(ended.code(), code);
        }
    }
}
