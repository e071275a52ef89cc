//! Signals that ask the program to stop. The first one is reported at once and lets a run save its state; a second
//! Ctrl-C ends the program at once.
//!
//! A thread waits for the signals, so the report does not depend on the current computation.

mod groups;

pub use groups::ChildGroup;

use super::files;
use crate::sync::lock;
use crate::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// Signals that ask to stop: Ctrl-C, `kill`, a closed terminal, and the warnings of batch systems before a time limit.
const SIGNALS: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU];

/// Exit code after a second Ctrl-C: unsaved work is lost.
pub const ABANDONED: i32 = 131;

/// Current reaction to a signal.
#[derive(Debug, Clone, PartialEq)]
pub enum SignalReaction {
    /// The program ends at once. `said`: why no work is lost, or which work is lost.
    Quit {
        /// The reason for the user.
        said: String,
    },
    /// The program stops by itself at the next consistent state.
    Stop(Stop),
}

/// The texts and the state of a stop that is under way.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stop {
    /// Reaction to the first signal: `stopping after this step`.
    pub what: String,
    /// Text after the progress: `; Ctrl-C again stops now and loses this step`.
    pub then: String,
    /// Work that a second Ctrl-C loses.
    pub lost: String,
    /// Set if the step is finished first; the inner value is the duration of a step, if known.
    pub finishes: Option<Option<Duration>>,
}

/// A message for the terminal.
#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// The program will stop by itself.
    Stopping(Stop),
    /// The last message before the program ends.
    Ending(String),
}

static RECEIVED: AtomicI32 = AtomicI32::new(0);
static INTERRUPTS: AtomicU32 = AtomicU32::new(0);
static CONDUCT: Mutex<Option<SignalReaction>> = Mutex::new(None);
static TELL: OnceLock<fn(Notice)> = OnceLock::new();
static INSTALLED: AtomicBool = AtomicBool::new(false);
static CHAT: AtomicBool = AtomicBool::new(false);
static ANSWERING: AtomicBool = AtomicBool::new(false);

/// Sets the function that shows notices; only the first call has an effect.
pub fn tell_with(tell: fn(Notice)) {
    let _ = TELL.set(tell);
}

/// Sets the reaction to signals from now on.
pub fn conduct(conduct: SignalReaction) {
    *lock(&CONDUCT) = Some(conduct);
}

/// From now on a signal ends the program at once, until the next call of `conduct`.
pub fn quit(said: impl Into<String>) {
    conduct(SignalReaction::Quit { said: said.into() });
}

/// Installs the handlers; later calls do nothing.
///
/// # Errors
/// The system refuses a handler or a thread.
pub fn install() -> Result<()> {
    if INSTALLED.swap(true, SeqCst) {
        return Ok(());
    }
    let fault = |e: std::io::Error| Error::io("cannot install a signal handler").cause(e);
    // A third Ctrl-C ends the process even if the thread below is blocked by a terminal that accepts no output.
    let third = || {
        if INTERRUPTS.fetch_add(1, SeqCst) >= 2 {
            groups::kill_all();
            signal_hook::low_level::exit(ABANDONED);
        }
    };
    // SAFETY: the handler does atomic operations, `kill` and `_exit`; all are async-signal-safe.
    unsafe { signal_hook::low_level::register(SIGINT, third) }.map_err(fault)?;
    // A write beyond the limit on the size of a file then fails with an error that names the file.
    // SAFETY: SIG_IGN is a valid action; no handler of this signal is replaced.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // `nohup` sets SIGHUP to be ignored; keep that.
    let wanted = SIGNALS.into_iter().filter(|s| *s != SIGHUP || !is_ignored(*s));
    let mut signals = Signals::new(wanted).map_err(fault)?;
    let wait = move || signals.forever().for_each(handle);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(wait)
        .map_err(fault)?;
    Ok(())
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: all bits zero is a valid `sigaction`; a null new action only asks for the old one.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut old) == 0 && old.sa_sigaction == libc::SIG_IGN
    }
}

fn handle(signal: i32) {
    let conduct = lock(&CONDUCT).clone();
    if CHAT.load(SeqCst) {
        // Ctrl-C during an answer stops the answer; any other signal ends the conversation.
        if ANSWERING.load(SeqCst) && signal == SIGINT && RECEIVED.swap(signal, SeqCst) == 0 {
            INTERRUPTS.store(0, SeqCst)
        } else {
            end(128 + signal, String::new())
        }
        return;
    }
    match conduct {
        None => end(128 + signal, "stopped".into()),
        Some(SignalReaction::Quit { said }) => end(128 + signal, said),
        Some(SignalReaction::Stop(stop)) => match RECEIVED.swap(signal, SeqCst) {
            0 => tell(Notice::Stopping(stop)),
            // Other signals may arrive twice: the sender wants the state to be saved.
            _ if signal != SIGINT => {}
            _ => end(ABANDONED, format!("stopped now: {}", stop.lost)),
        },
    }
}

fn tell(notice: Notice) {
    if let Some(tell) = TELL.get() {
        tell(notice);
    }
}

/// Ends the process without unwinding: removes half-written files, keeps complete ones, kills the programs that it started.
fn end(code: i32, said: String) {
    tell(Notice::Ending(said));
    abandon(code);
}

/// Ends the process at once, without unwinding and without the end of other threads.
pub fn abandon(code: i32) -> ! {
    // First the files: when its program is gone, another thread may end the process with an error.
    files::remove_unfinished();
    groups::kill_all();
    signal_hook::low_level::exit(code)
}

/// Installs the handlers for a conversation: Ctrl-C stops the current answer, or else ends the program.
///
/// # Errors
/// As `install`.
pub fn install_for_chat() -> Result<()> {
    CHAT.store(true, SeqCst);
    install()
}

/// Marks the begin or the end of an answer. At the end, clears the signal; returns true if one stopped the answer.
pub fn answering(begins: bool) -> bool {
    ANSWERING.store(begins, SeqCst);
    !begins && RECEIVED.swap(0, SeqCst) != 0
}

/// The signal that asked this run to stop, if any.
pub fn received() -> Option<i32> {
    match RECEIVED.load(SeqCst) {
        0 => None,
        s => Some(s),
    }
}
