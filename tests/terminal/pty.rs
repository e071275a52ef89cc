//! Runs a program in a pseudo-terminal and records its screen.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub struct Pty {
    master: File,
    child: Child,
    started: Instant,
    output: Arc<Mutex<Vec<Piece>>>,
    reader: Option<std::thread::JoinHandle<()>>,
    /// Start of the search for the next text.
    from: usize,
    widths: Vec<(Instant, u16)>,
    busy: Arc<Mutex<Duration>>,
    done: Arc<AtomicBool>,
    /// The terminal is closed as soon as its next output was read.
    closed: Arc<AtomicBool>,
}

struct Piece {
    at: Instant,
    bytes: Vec<u8>,
}

/// The complete output of a program.
pub struct Seen {
    pub code: i32,
    pieces: Vec<Piece>,
    started: Instant,
    ended: Instant,
    widths: Vec<(Instant, u16)>,
    busy: Duration,
}

fn window(width: u16) -> libc::winsize {
    libc::winsize {
        ws_row: 24,
        ws_col: width,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

impl Pty {
    pub fn start(dir: &Path, width: u16, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::program(env!("CARGO_BIN_EXE_ft"), dir, width, arguments, environment)
    }

    /// Starts a program other than ft.
    pub fn program(program: &str, dir: &Path, width: u16, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let (mut master, mut slave) = (0, 0);
        let size = window(width);
        // SAFETY: all pointers are valid or null for the call; both descriptors are new and owned below.
        let (master, slave) = unsafe {
            let rc = libc::openpty(
                &mut master,
                &mut slave,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                &size,
            );
            assert_eq!(rc, 0, "no pseudo-terminal");
            // The program must not hold the other end of its own terminal.
            assert_eq!(libc::fcntl(master, libc::F_SETFD, libc::FD_CLOEXEC), 0);
            (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave))
        };
        let stdio = || Stdio::from(slave.try_clone().unwrap());
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir(dir)
            .env("TERM", "xterm")
            .env("LC_ALL", "C.UTF-8")
            .env_remove("FT_NO_PROGRESS")
            .env_remove("NO_COLOR")
            .env("HF_HOME", dir.join("hf"))
            .envs(environment.iter().copied())
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio());
        // SAFETY: both calls are async-signal-safe; the terminal becomes that of the new session.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let started = Instant::now();
        let child = command.spawn().unwrap();
        drop((command, slave));
        let master = File::from(master);
        let output = Arc::new(Mutex::new(Vec::new()));
        let (mut from, to) = (master.try_clone().unwrap(), output.clone());
        let closed = Arc::new(AtomicBool::new(false));
        let closes = closed.clone();
        let reader = std::thread::spawn(move || {
            let mut buffer = [0u8; 4096];
            // When the last descriptor of the terminal is closed, read returns an error.
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                to.lock().unwrap().push(Piece {
                    at: Instant::now(),
                    bytes: buffer[..n].to_vec(),
                });
                if closes.load(Relaxed) {
                    break;
                }
            }
        });
        // Measures the wake-up delay of a thread: other programs may load this machine.
        let (busy, done) = (Arc::new(Mutex::new(Duration::ZERO)), Arc::new(AtomicBool::new(false)));
        let (late, end) = (busy.clone(), done.clone());
        std::thread::spawn(move || {
            while !end.load(Relaxed) {
                let (nap, begun) = (Duration::from_millis(50), Instant::now());
                std::thread::sleep(nap);
                let over = begun.elapsed().saturating_sub(nap);
                let mut late = late.lock().unwrap();
                *late = over.max(*late);
            }
        });
        Self {
            master,
            child,
            started,
            output,
            reader: Some(reader),
            from: 0,
            widths: vec![(started, width)],
            busy,
            done,
            closed,
        }
    }

    fn text(&self) -> String {
        let pieces = self.output.lock().unwrap();
        let bytes: Vec<u8> = pieces.iter().flat_map(|p| p.bytes.iter().copied()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until `text` appears after the last found text. Returns the time it took.
    pub fn wait_for(&mut self, text: &str, patience: Duration) -> Duration {
        let begun = Instant::now();
        loop {
            // The end of the program can be seen before its last output was read.
            let ended = self.child.try_wait().unwrap();
            let complete = ended.is_some() && self.reader.as_ref().is_none_or(|reader| reader.is_finished());
            let shown = self.text();
            let from = shown.floor_char_boundary(self.from);
            if let Some(at) = shown[from..].find(text) {
                self.from = from + at + text.len();
                return begun.elapsed();
            }
            assert!(
                begun.elapsed() < patience && !complete,
                "`{text}` was not shown ({ended:?}):\n{}",
                tail(&shown)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends Ctrl-C as a keyboard does.
    pub fn interrupt(&mut self) {
        self.master.write_all(b"\x03").unwrap();
    }

    /// Types these keys.
    pub fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    pub fn resize(&mut self, width: u16) {
        let size = window(width);
        // SAFETY: a valid descriptor, and a structure that outlives the call.
        let rc = unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &size) };
        assert_eq!(rc, 0);
        self.widths.push((Instant::now(), width));
    }

    /// Closes the window. Returns the exit code of the program.
    pub fn close(mut self) -> Option<i32> {
        self.done.store(true, Relaxed);
        self.closed.store(true, Relaxed);
        self.reader.take().unwrap().join().unwrap();
        // The last descriptor of this end.
        self.master = File::open("/dev/null").unwrap();
        self.child.wait().unwrap().code()
    }

    pub fn finish(&mut self, patience: Duration) -> Seen {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > patience {
                let _ = self.child.kill();
                panic!("still running:\n{}", tail(&self.text()));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let ended = Instant::now();
        self.done.store(true, Relaxed);
        self.reader.take().unwrap().join().unwrap();
        Seen {
            code: status.code().unwrap_or(-1),
            pieces: std::mem::take(&mut self.output.lock().unwrap()),
            started: self.started,
            ended,
            widths: self.widths.clone(),
            busy: *self.busy.lock().unwrap(),
        }
    }
}

/// The end of a long text.
fn tail(text: &str) -> &str {
    &text[text.floor_char_boundary(text.len().saturating_sub(3000))..]
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.done.store(true, Relaxed);
    }
}

impl Seen {
    pub fn raw(&self) -> String {
        let bytes: Vec<u8> = self.pieces.iter().flat_map(|p| p.bytes.iter().copied()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The lines in the window at the end.
    pub fn text(&self) -> String {
        self.play().0
    }

    /// As `text`, on one line.
    pub fn flat(&self) -> String {
        self.text().split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// The longest allowed time without output: 1.25 seconds, plus a margin for a busy machine.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(1250) + 4 * self.busy
    }

    /// Checks that no line was wider than the window, no pause was too long, and no progress line is left.
    pub fn check(&self, what: &str) {
        let (text, wide) = self.play();
        assert!(wide.is_empty(), "{what}: wider than the window: {wide:#?}\n{text}");
        let mut last = self.started;
        let mut longest = (Duration::ZERO, String::new());
        let ends = std::iter::once((self.ended, String::new()));
        let pieces = self.pieces.iter();
        for (at, shown) in pieces
            .map(|p| (p.at, String::from_utf8_lossy(&p.bytes).into_owned()))
            .chain(ends)
        {
            longest = (at.saturating_duration_since(last), shown).max(longest);
            last = at;
        }
        let patience = self.patience();
        assert!(
            longest.0 < patience,
            "{what}: silent for {:?} (allowed {patience:?}) before {:?}\n{text}",
            longest.0,
            longest.1
        );
        for mark in ["━", "micro-batch 1/", "ETA"] {
            assert!(!text.contains(mark), "{what}: rest of a progress line:\n{text}");
        }
    }

    /// Emulates the window of a terminal (with unlimited height); also returns the lines that exceeded its width.
    fn play(&self) -> (String, Vec<String>) {
        let (mut rows, mut row, mut column) = (vec![Vec::<char>::new()], 0usize, 0usize);
        let mut wide = Vec::new();
        let mut held = Vec::new();
        for piece in &self.pieces {
            // Output just before a change of the window may still have the old width.
            let settled = |(at, _): &&(Instant, u16)| *at == self.started || piece.at > *at + self.patience();
            let width = self.widths.iter().rfind(settled).map(|w| usize::from(w.1)).unwrap();
            held.extend(&piece.bytes);
            let text = match std::str::from_utf8(&held) {
                Ok(text) => text.to_string(),
                // A character that is split over two pieces.
                Err(e) if held.len() - e.valid_up_to() < 4 && e.error_len().is_none() => {
                    String::from_utf8_lossy(&held[..e.valid_up_to()]).into_owned()
                }
                Err(_) => String::from_utf8_lossy(&held).into_owned(),
            };
            held.drain(..text.len().min(held.len()));
            let mut chars = text.chars();
            while let Some(c) = chars.next() {
                match c {
                    '\r' => column = 0,
                    '\n' => {
                        row += 1;
                        if row == rows.len() {
                            rows.push(Vec::new());
                        }
                    }
                    '\x1b' => {
                        // ESC [ parameters letter
                        let (mut parameters, mut letter) = (String::new(), ' ');
                        for c in chars.by_ref().skip(1) {
                            if c.is_ascii_alphabetic() {
                                letter = c;
                                break;
                            }
                            parameters.push(c);
                        }
                        match letter {
                            'A' => row = row.saturating_sub(1),
                            'K' => rows[row].truncate(column),
                            'J' => {
                                rows[row].truncate(column);
                                rows.truncate(row + 1);
                            }
                            'm' => {}
                            other => wide.push(format!("unknown code {parameters}{other}")),
                        }
                    }
                    c => {
                        let line = &mut rows[row];
                        if column >= width {
                            let shown: String = line.iter().collect();
                            if wide.last() != Some(&shown) {
                                wide.push(shown);
                            }
                        }
                        line.resize(line.len().max(column + 1), ' ');
                        line[column] = c;
                        column += 1;
                    }
                }
            }
        }
        let lines = rows.iter().map(|r| r.iter().collect::<String>().trim_end().to_string());
        (lines.collect::<Vec<_>>().join("\n"), wide)
    }
}
