//! What a process says when it is aborted: the system refuses memory, a panic within a panic, a damaged heap. Then nothing can be
//! allocated and nothing runs any more, so the texts are made in advance.

use crate::{Error, Result, allocator};
use signal_hook::consts::SIGABRT;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Texts that end with a line break.
struct Texts {
    /// Before and after the number of bytes.
    out_of_memory: [String; 2],
    other: String,
}

static TEXTS: OnceLock<Texts> = OnceLock::new();
static SAID: AtomicBool = AtomicBool::new(false);

/// Sets what the process says on standard error when it is aborted, in place of a trace of the calls. `out_of_memory`: before and
/// after the number of bytes that the system refused. Only the first call has an effect.
///
/// # Errors
/// The system refuses a handler.
pub fn say_if_aborted(out_of_memory: [String; 2], other: String) -> Result<()> {
    if TEXTS.set(Texts { out_of_memory, other }).is_err() {
        return Ok(());
    }
    // SAFETY: `say` reads constants and a number of its thread, and writes; it allocates nothing and takes no lock.
    unsafe { signal_hook::low_level::register(SIGABRT, say) }
        .map(drop)
        .map_err(|e| Error::io("cannot install a signal handler").cause(e))
}

/// The process says why it ends, in words of its own. False: this was called before, and everything is said.
pub fn begins_to_say() -> bool {
    !SAID.swap(true, SeqCst)
}

fn say() {
    let Some(texts) = TEXTS.get().filter(|_| begins_to_say()) else {
        return;
    };
    match allocator::refused() {
        0 => write(texts.other.as_bytes()),
        bytes => {
            let [before, after] = &texts.out_of_memory;
            let mut digits = [0; 20];
            write(before.as_bytes());
            write(decimal(bytes, &mut digits));
            write(after.as_bytes());
        }
    }
}

fn write(text: &[u8]) {
    // SAFETY: the memory of a slice for its length. What cannot be written is lost.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

/// The digits of a number.
fn decimal(mut number: usize, digits: &mut [u8; 20]) -> &[u8] {
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
        for number in [0, 9, 10, 1 << 20, usize::MAX] {
            assert_eq!(decimal(number, &mut [0; 20]), number.to_string().as_bytes());
        }
    }
}
