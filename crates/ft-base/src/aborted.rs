//! What a process says when it is aborted: the system refuses memory, a panic within a panic, a damaged heap. Then nothing can be
//! allocated and nothing runs any more, so the texts are made in advance.

use crate::{Error, Result, allocator};
use signal_hook::consts::SIGABRT;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

/// What a process says on standard error when it is aborted, in place of a trace of the calls. Each text that ends the message has a
/// line break at its end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AbortMessage {
    /// Before and after the number of bytes that the system refused.
    pub out_of_memory: [String; 2],
    /// For another reason.
    pub other: String,
    /// Said then, for both reasons.
    pub kept: Option<ResumeMessage>,
    /// Said last, if memory was refused.
    pub hint: String,
}

/// What is left of the work: see `keep`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResumeMessage {
    /// Before the first call of `keep`.
    pub unchanged: String,
    /// After `keep(0)`.
    pub nothing: String,
    /// Before and after the last number of `keep`.
    pub until: [String; 2],
}

/// `keep` was not called.
const UNCHANGED: u64 = u64::MAX;

static MESSAGE: OnceLock<AbortMessage> = OnceLock::new();
static KEPT: AtomicU64 = AtomicU64::new(UNCHANGED);
static SAID: AtomicBool = AtomicBool::new(false);

/// Sets what the process says when it is aborted. Only the first call has an effect.
///
/// # Errors
/// The system refuses a handler.
pub fn say_if_aborted(message: AbortMessage) -> Result<()> {
    if MESSAGE.set(message).is_err() {
        return Ok(());
    }
    // SAFETY: `say` reads constants and numbers, and writes; it allocates nothing and takes no lock.
    unsafe { signal_hook::low_level::register(SIGABRT, say) }
        .map(drop)
        .map_err(|e| Error::io("cannot install a signal handler").cause(e))
}

/// From now on the work up to this number (of a step, for example) is kept if the process is aborted; 0: nothing.
pub fn keep(number: u64) {
    KEPT.store(number, SeqCst);
}

/// The process says why it ends, in a message of its own. False: this was called before, and everything is said.
pub fn begins_to_say() -> bool {
    !SAID.swap(true, SeqCst)
}

fn say() {
    let Some(message) = MESSAGE.get().filter(|_| begins_to_say()) else {
        return;
    };
    let refused = allocator::refused();
    let mut digits = [0; 20];
    if refused == 0 {
        write(message.other.as_bytes());
    } else {
        let [before, after] = &message.out_of_memory;
        write(before.as_bytes());
        write(decimal(refused as u64, &mut digits));
        write(after.as_bytes());
    }
    if let Some(kept) = &message.kept {
        match KEPT.load(SeqCst) {
            UNCHANGED => write(kept.unchanged.as_bytes()),
            0 => write(kept.nothing.as_bytes()),
            number => {
                let [before, after] = &kept.until;
                write(before.as_bytes());
                write(decimal(number, &mut digits));
                write(after.as_bytes());
            }
        }
    }
    if refused > 0 {
        write(message.hint.as_bytes());
    }
}

fn write(text: &[u8]) {
    // SAFETY: the memory of a slice for its length. What cannot be written is lost.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

/// The digits of a number.
fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut first = digits.len();
    loop {
        first -= 1;
        digits[first] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 || first == 0 {
            return &digits[first..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_digits() {
        for number in [0, 9, 10, 1 << 20, u64::MAX] {
            assert_eq!(decimal(number, &mut [0; 20]), number.to_string().as_bytes());
        }
    }
}
