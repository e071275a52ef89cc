//! The whole terminal for one view: the alternate screen, and keys without Enter. The terminal is as before after the view, after
//! a panic and after a signal.

use super::{columns, visible_but_colors};
use crate::base::sync::lock;
use crate::base::{Error, Result};
use std::io::{IsTerminal, Read, Write};
use std::sync::Mutex;

/// Settings of the terminal before the view.
static BEFORE: Mutex<Option<libc::termios>> = Mutex::new(None);

/// Shows the alternate screen without a cursor; the lines are not wrapped.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// The terminal of this process while a view fills it.
pub struct FullScreen {
    /// The text that the terminal shows.
    shown: String,
}

impl FullScreen {
    /// Errors: standard input or output is not a terminal.
    pub fn enter() -> Result<Self> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Err(Error::usage("this view needs a terminal for its input and output"));
        }
        let fault = || Error::io("cannot change the settings of the terminal").cause(std::io::Error::last_os_error());
        // SAFETY: all bits zero is a valid `termios`, and the call below fills it.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: a valid out pointer for the whole call.
        if unsafe { libc::tcgetattr(libc::STDIN_FILENO, &mut settings) } != 0 {
            return Err(fault());
        }
        *lock(&BEFORE) = Some(settings);
        // Ctrl-C stays a signal; Ctrl-Z would leave the terminal as it is.
        settings.c_lflag &= !(libc::ICANON | libc::ECHO);
        settings.c_cc[libc::VSUSP] = 0;
        (settings.c_cc[libc::VMIN], settings.c_cc[libc::VTIME]) = (0, 1);
        if !set(&settings) {
            return Err(fault());
        }
        write(ENTER);
        Ok(Self { shown: String::new() })
    }

    /// Columns and rows of the window.
    pub fn size(&self) -> (usize, usize) {
        super::screen::size_of(libc::STDOUT_FILENO).unwrap_or((80, 24))
    }

    /// Shows these lines from the top; lines that do not fit are cut. Control characters in them are escaped, except
    /// for color codes: the caller applies `visible` to every text of a file.
    pub fn draw(&mut self, lines: &[String]) {
        let (width, height) = self.size();
        let mut text = String::from("\x1b[H");
        for (row, line) in lines.iter().take(height).enumerate() {
            if row > 0 {
                text.push_str("\r\n");
            }
            let line = visible_but_colors(line);
            if columns(&line) <= width {
                text.push_str(&line);
            } else {
                text.extend(line.chars().take(width));
                text.push_str("\x1b[0m");
            }
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        if text != self.shown {
            write(&text);
            self.shown = text;
        }
    }

    /// The next byte of the keyboard; `None`: there was none for a tenth of a second.
    ///
    /// Errors: the terminal is gone.
    pub fn key(&mut self) -> Result<Option<u8>> {
        let mut byte = [0];
        let read = std::io::stdin().lock().read(&mut byte);
        match read {
            Ok(n) => Ok((n > 0).then_some(byte[0])),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => Ok(None),
            Err(e) => Err(Error::io("cannot read from the terminal").cause(e)),
        }
    }
}

impl Drop for FullScreen {
    fn drop(&mut self) {
        restore();
    }
}

fn set(settings: &libc::termios) -> bool {
    // SAFETY: a valid pointer for the whole call.
    unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, settings) == 0 }
}

fn write(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Gives the terminal back, if a view has it.
pub(super) fn restore() {
    let Ok(mut before) = BEFORE.try_lock() else { return };
    if let Some(settings) = before.take() {
        set(&settings);
        write(LEAVE);
    }
}
