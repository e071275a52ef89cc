//! The process groups of programs that ft started: where a signal ends ft at once, no `Drop` runs, and they are killed here.

use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};

/// More than the reward programs of a run. A group beyond it is killed only when it is dropped.
const MOST: usize = 64;

/// The groups of a process. A handler of a signal may take no lock.
struct ProcessGroups {
    /// `kill_all` has begun: the process ends.
    ending: AtomicBool,
    /// Ids of groups; 0: a free place.
    places: [AtomicI32; MOST],
}

static GROUPS: ProcessGroups = ProcessGroups::new();

impl ProcessGroups {
    const fn new() -> Self {
        Self {
            ending: AtomicBool::new(false),
            places: [const { AtomicI32::new(0) }; MOST],
        }
    }

    fn add(&'static self, id: i32) -> ChildGroup {
        let free = |place: &&AtomicI32| place.compare_exchange(0, id, SeqCst, SeqCst).is_ok();
        let place = self.places.iter().find(free);
        // Either `kill_all` reads the place after this, or its mark is read here.
        if self.ending.load(SeqCst) {
            kill(id);
        }
        ChildGroup { id, place }
    }

    fn kill_all(&self) {
        self.ending.store(true, SeqCst);
        self.places.iter().for_each(|place| kill(place.load(SeqCst)));
    }
}

/// The process group of another program, whose first process has the id of the group. Dropping it kills the group.
#[derive(Debug)]
pub struct ChildGroup {
    id: i32,
    place: Option<&'static AtomicI32>,
}

impl ChildGroup {
    /// The group of a child that was started with `process_group(0)`. Killed at once if a signal is ending this process.
    pub fn of(child: &Child) -> Self {
        GROUPS.add(i32::try_from(child.id()).unwrap_or(0))
    }

    /// True if the first process of the group has ended and was not waited for. Unlike `Child::try_wait` this does not free its
    /// id: the group can be killed after it.
    pub fn is_ended(&self) -> bool {
        let Ok(id) = libc::id_t::try_from(self.id) else {
            return false;
        };
        // SAFETY: all bits zero is a valid `siginfo_t`; the call writes one.
        unsafe {
            let mut found: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            libc::waitid(libc::P_PID, id, &mut found, options) == 0 && found.si_signo == libc::SIGCHLD
        }
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        kill(self.id);
        if let Some(place) = self.place {
            place.store(0, SeqCst);
        }
    }
}

/// Kills all groups, and from now on each new one. Only reads and sets numbers and sends signals, so a handler of a signal
/// may call it.
pub(super) fn kill_all() {
    GROUPS.kill_all();
}

fn kill(group: i32) {
    // 0 and 1 would mean this group and all processes.
    if group > 1 {
        // SAFETY: a signal to a process group that ft started; touches no memory.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// True within 20 s of the end of the first process of the group.
    fn ends(group: &ChildGroup) -> bool {
        let start = Instant::now();
        while !group.is_ended() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(2));
        }
        group.is_ended()
    }

    /// Row W8. A program may still be starting when ft begins to end.
    #[test]
    fn a_program_that_starts_while_a_signal_ends_ft_is_killed_too() {
        static OWN: ProcessGroups = ProcessGroups::new();
        let start = || {
            let mut command = Command::new("sleep");
            command.arg("600").process_group(0).spawn().unwrap()
        };
        let mut first = start();
        let group = OWN.add(i32::try_from(first.id()).unwrap());
        assert!(!group.is_ended());
        OWN.kill_all();
        let mut late = start();
        let late_group = OWN.add(i32::try_from(late.id()).unwrap());
        let ended = [ends(&group), ends(&late_group)];
        // This kills what is left after a failure.
        drop([group, late_group]);
        for child in [&mut first, &mut late] {
            child.wait().unwrap();
        }
        assert_eq!(ended, [true, true]);
    }

    /// Row W8. With a free id the kill could reach a group of another program.
    #[test]
    fn a_look_at_a_program_that_ended_does_not_free_its_id() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let group = ChildGroup::of(&child);
        assert!(!group.is_ended());
        // The end of its input ends it.
        drop(child.stdin.take());
        assert!(ends(&group));
        // SAFETY: only returns a number.
        let id = unsafe { libc::getpgid(group.id) };
        assert_eq!(id, group.id, "it has its id until it is waited for");
        drop(group);
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}
