//! SIGINT and SIGTERM: the first one asks the run to save and stop, a second SIGINT ends it at once.

use crate::base::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};

static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// Installs the handlers; call once at the start of a run that can save its state.
pub fn install() -> Result<()> {
    for signal in [SIGINT, SIGTERM] {
        let action = move || {
            if RECEIVED.swap(signal, SeqCst) != 0 && signal == SIGINT {
                signal_hook::low_level::exit(128 + signal);
            }
        };
        // The handler does one atomic swap and `_exit`: both are async-signal-safe.
        unsafe { signal_hook::low_level::register(signal, action) }
            .map_err(|e| Error::new("cannot install a signal handler").cause(e))?;
    }
    Ok(())
}

static ANSWERING: AtomicBool = AtomicBool::new(false);

/// For a conversation: while an answer is written SIGINT stops it (a second one the program), else it ends the program.
pub fn install_for_chat() -> Result<()> {
    let action = || {
        if !ANSWERING.load(SeqCst) || RECEIVED.swap(SIGINT, SeqCst) != 0 {
            signal_hook::low_level::exit(128 + SIGINT);
        }
    };
    // The handler does atomic operations and `_exit`: all are async-signal-safe.
    unsafe { signal_hook::low_level::register(SIGINT, action) }
        .map_err(|e| Error::new("cannot install a signal handler").cause(e))?;
    Ok(())
}

/// An answer begins, or it has ended: then what has stopped it is forgotten. True if something had.
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
