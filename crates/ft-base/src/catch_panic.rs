//! Catches panics of libraries on malformed input; such a panic is not a bug of ft.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Returns the result of `f`, or `None` if it panics.
pub fn catch_panic<T>(f: impl FnOnce() -> T) -> Option<T> {
    let before = EXPECTED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    EXPECTED.set(before);
    result.ok()
}

/// True inside `catch_panic`: the panic hook must stay silent.
pub fn is_caught() -> bool {
    EXPECTED.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught_and_expected_inside_only() {
        assert_eq!(catch_panic(is_caught), Some(true));
        let empty: Vec<u8> = Vec::new();
        assert_eq!(catch_panic(|| empty[0]), None);
        assert!(!is_caught());
    }
}
