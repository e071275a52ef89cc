//! Keeps the values of secret variables out of what the system shows of this process.

use crate::secrets;
use std::ffi::{CStr, CString, c_char};

#[cfg(target_os = "linux")]
unsafe extern "C" {
    /// The variables of this process: texts `NAME=VALUE`, then null.
    static mut environ: *mut *mut c_char;
}

/// Overwrites the values of secret variables, such as `HF_TOKEN`, in the memory in which this process got its environment: Linux shows
/// it in `/proc/<process>/environ` to all programs of the user, also to a reward program. This process and programs that it starts still
/// have the variables.
///
/// # Safety
/// No other thread runs, and nothing has kept a pointer to a variable.
pub unsafe fn hide_secrets() {
    #[cfg(target_os = "linux")]
    // SAFETY: `environ` is such a list, and only this thread uses it.
    unsafe {
        hide(environ)
    };
}

fn is_secret(name: &[u8], value: &[u8]) -> bool {
    secrets::is_variable(&String::from_utf8_lossy(name), &String::from_utf8_lossy(value))
}

/// Moves the secrets of a list like `environ` to new memory, and overwrites the old memory.
///
/// # Safety
/// `list` is null, or points to writable texts that end with a zero byte, and then null; nothing else uses them meanwhile.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
unsafe fn hide(mut list: *mut *mut c_char) {
    // SAFETY: all reads and writes are within the list and its texts. The copies are never freed, so they may stay in the list.
    unsafe {
        while !list.is_null() && !(*list).is_null() {
            let old = *list;
            let copy = CString::from(CStr::from_ptr(old));
            let text = copy.as_bytes();
            if let Some(equals) = text.iter().position(|byte| *byte == b'=')
                && is_secret(&text[..equals], &text[equals + 1..])
            {
                let value = text.len() - equals - 1;
                *list = copy.into_raw();
                old.add(equals + 1).write_bytes(0, value);
            }
            list = list.add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::script_file;
    use super::super::{ProcessRights, reduce};
    use super::*;
    use std::process::Command;

    /// Row W8. A variable can be there twice; then the program sees the first one only.
    #[test]
    fn secrets_move_to_other_memory_and_the_old_one_is_overwritten() {
        let texts = [
            "HF_TOKEN=abc",
            "HOME=/x",
            "HF_TOKEN=second",
            "OTHER_KEY=",
            "no equals sign",
            "A_SECRET=a=b",
        ];
        let old = texts.map(|text| CString::new(text).unwrap().into_raw());
        let mut list: Vec<*mut c_char> = old.into_iter().chain([std::ptr::null_mut()]).collect();
        // SAFETY: a list as the function expects it.
        unsafe { hide(list.as_mut_ptr()) };
        // SAFETY: the texts of this test, and copies of them, which are not freed.
        let text = |entry: *mut c_char| unsafe { CStr::from_ptr(entry) }.to_str().unwrap().to_string();
        assert_eq!(list.iter().take(6).map(|entry| text(*entry)).collect::<Vec<_>>(), texts);
        let shown = [
            "HF_TOKEN=",
            "HOME=/x",
            "HF_TOKEN=",
            "OTHER_KEY=",
            "no equals sign",
            "A_SECRET=",
        ];
        assert_eq!(old.map(text), shown);
        // SAFETY: the memory of "second", of which the first byte is read above.
        let rest = unsafe { std::slice::from_raw_parts(old[2].cast::<u8>(), texts[2].len()) };
        assert_eq!(rest, b"HF_TOKEN=\0\0\0\0\0\0");
    }

    #[cfg(target_os = "linux")]
    /// Row W8. Also for root, if the kernel has rules of Landlock for TCP (Linux 6.7).
    #[test]
    fn a_program_without_network_does_not_open_the_memory_of_ft() {
        let (_dir, path) = script_file("if true </proc/$PPID/mem; then echo open; else echo closed; fi");
        let mut command = Command::new(&path);
        reduce(&mut command, ProcessRights::default());
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let has_rules = crate::syscalls::landlock() >= crate::syscalls::LANDLOCK_TCP;
        assert!(
            said == "closed\n" || (!has_rules && said == "open\n"),
            "{said:?} {has_rules}"
        );
    }
}
