//! The only writer of standard error: lines, and below them a progress line. Output of other code to standard output
//! goes through `above`, so that the two do not mix.
//!
//! A terminal has a line that is redrawn ten times per second; other outputs get a plain line every ten seconds. Errors
//! of standard error are ignored: a closed terminal does not end a run.

use super::fullscreen;
use super::layout::{ascii, clipped, columns, fit, visible, wrapped};
use crate::base::progress::{self, PhaseSnapshot, ProgressUnit};
use crate::base::signal::{self, Notice};
use crate::base::sync::lock;
use crate::base::units;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// The output style; `cli` derives it from flags, the environment and the type of standard error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutputStyle {
    /// Redraw the progress line in place.
    pub bar: bool,
    pub color: bool,
    /// Box and arrow characters outside of ASCII.
    pub unicode: bool,
    /// Only errors, warnings and results.
    pub quiet: bool,
    /// No progress at all, not even as plain lines.
    pub no_progress: bool,
    /// No output at all: another rank of the job prints it.
    pub silent: bool,
}

static STYLE: OnceLock<OutputStyle> = OnceLock::new();

/// Sets the style of the whole process and begins to show progress; only the first call counts.
pub fn start(style: OutputStyle) {
    if STYLE.set(style).is_err() {
        return;
    }
    signal::tell_with(tell);
    static TICKER: Once = Once::new();
    TICKER.call_once(|| {
        if !style.quiet && !style.no_progress && !style.silent {
            // If the thread cannot start, only the progress bar is missing.
            let _ = std::thread::Builder::new().name("progress".into()).spawn(tick);
        }
    });
}

/// The style of the process; plain text where none was set.
pub fn style() -> OutputStyle {
    STYLE.get().copied().unwrap_or_default()
}

/// Columns and rows of the terminal behind this descriptor; `None`: it is not a terminal.
pub(super) fn size_of(descriptor: i32) -> Option<(usize, usize)> {
    // SAFETY: an all-zero `winsize` is valid, and it outlives the call.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: a valid out pointer for the whole call.
    let known = unsafe { libc::ioctl(descriptor, libc::TIOCGWINSZ, &mut size) } == 0;
    (known && size.ws_col > 0).then_some((usize::from(size.ws_col), usize::from(size.ws_row)))
}

fn columns_of(descriptor: i32) -> Option<usize> {
    size_of(descriptor).map(|(columns, _)| columns)
}

/// Columns of standard error now; `None`: it is not a terminal, so line length is unlimited.
pub fn width() -> Option<usize> {
    columns_of(libc::STDERR_FILENO)
}

/// Columns of standard output now; `None`: it is not a terminal.
pub fn result_width() -> Option<usize> {
    columns_of(libc::STDOUT_FILENO)
}

/// True if standard output is a terminal.
pub fn result_is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

struct TerminalScreen {
    /// Columns of the current progress line; 0: there is none.
    drawn: usize,
    /// Time of the last visible output.
    last: Option<Instant>,
}

static SCREEN: Mutex<TerminalScreen> = Mutex::new(TerminalScreen { drawn: 0, last: None });

/// Time without output before a progress line is drawn: on a terminal, and in a log.
const SOON: Duration = Duration::from_millis(400);
const SELDOM: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(100);

fn screen() -> MutexGuard<'static, TerminalScreen> {
    lock(&SCREEN)
}

fn write(text: &str) {
    if style().silent {
        return;
    }
    let mut stderr = std::io::stderr();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

impl TerminalScreen {
    fn erase(&mut self) {
        if self.drawn == 0 {
            return;
        }
        // If the window became narrower, the terminal has wrapped the line.
        let rows = self.drawn.div_ceil(width().unwrap_or(usize::MAX).max(1));
        write(&format!("\r{}\x1b[J", "\x1b[A".repeat(rows.saturating_sub(1))));
        self.drawn = 0;
    }

    fn draw(&mut self, open: &[PhaseSnapshot]) {
        let room = width().unwrap_or(80).saturating_sub(1);
        let line = progress_line(open, room, style().unicode);
        let now = columns(&line);
        if self.drawn > room {
            self.erase();
        }
        write(&format!("\r{line}\x1b[K"));
        self.drawn = now.max(1);
    }

    /// Erases the progress line, runs `f`, and draws the line again.
    fn above<T>(&mut self, f: impl FnOnce() -> T) -> T {
        let drawn = self.drawn > 0;
        self.erase();
        let out = f();
        self.last = Some(Instant::now());
        let open = progress::now();
        if drawn && progress::current(&open).is_some() {
            self.draw(&open);
        }
        out
    }
}

/// Runs `f`, which writes to the terminal itself, above the progress line.
pub fn above<T>(f: impl FnOnce() -> T) -> T {
    screen().above(f)
}

/// Removes the progress line, for the end of the program or a question.
pub fn clear() {
    let mut screen = screen();
    screen.erase();
    screen.last = Some(Instant::now());
}

/// Prints a text as separate lines after a colored label. Control characters in `text` are escaped.
pub(super) fn put(label: Option<(&str, &str)>, text: &str) {
    let lines = lines(label, text, width());
    above(|| write(&lines));
}

fn lines(label: Option<(&str, &str)>, text: &str, width: Option<usize>) -> String {
    let OutputStyle { color, unicode, .. } = style();
    let text = visible(text);
    let text = if unicode { text } else { ascii(&text) };
    let whole = match label {
        Some((_, word)) => format!("{word} {text}"),
        None => text,
    };
    let mut out = match width {
        Some(width) => wrapped(&whole, width, 2, false).join("\n"),
        None => whole,
    };
    if let Some((code, word)) = label
        && color
    {
        let rest = out.split_off(word.len());
        out = format!("\x1b[{code}m{word}\x1b[0m{rest}");
    }
    out.push('\n');
    out
}

/// Prints a line even where another rank of the job speaks: the job ends.
pub fn final_line(line: &str) {
    let _ = std::io::stderr().write_all(format!("{}\n", visible(line)).as_bytes());
}

/// Prints a line for the user; not with `--quiet`.
pub fn note(line: &str) {
    if !style().quiet {
        put(None, line);
    }
}

/// As `note`, in a color.
pub(super) fn colored(code: &str, line: &str) {
    let OutputStyle { color, quiet, .. } = style();
    if quiet {
        return;
    }
    let text = lines(None, line, width());
    let text = if color {
        format!("\x1b[{code}m{}\x1b[0m\n", text.trim_end())
    } else {
        text
    };
    above(|| write(&text));
}

/// As `note`, for less important text.
pub fn aside(line: &str) {
    colored("2", line);
}

pub fn warn(line: &str) {
    put(Some(("33", "warning:")), line);
}

pub fn error(text: &str) {
    put(Some(("31", "error:")), text);
}

/// As `error`, for a panic: the panicking thread may hold the lock of the screen.
pub fn bug(text: &str) {
    fullscreen::restore();
    let text = lines(Some(("31", "error:")), text, width());
    match SCREEN.try_lock() {
        Ok(mut screen) => screen.above(|| write(&text)),
        Err(_) => write(&text),
    }
}

/// Prints a prompt that the user completes.
pub fn ask(text: &str) {
    above(|| write(text));
}

/// Prints the response to a signal. If the screen is locked, it waits for a short time only.
fn tell(notice: Notice) {
    let until = Instant::now() + Duration::from_millis(300);
    let mut screen = loop {
        match SCREEN.try_lock() {
            Ok(screen) => break Some(screen),
            Err(TryLockError::Poisoned(screen)) => break Some(screen.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            Err(TryLockError::WouldBlock) => break None,
        }
    };
    if matches!(notice, Notice::Ending(_)) {
        fullscreen::restore();
    }
    let text = match &notice {
        Notice::Stopping(stop) => {
            let open = progress::now();
            let details = details(&open, stop.finishes);
            format!("{}{details}{}", stop.what, stop.then)
        }
        Notice::Ending(said) => said.clone(),
    };
    // The terminal has printed `^C` at the cursor.
    let begin = if style().bar { "\r\x1b[K" } else { "" };
    let text = if !text.is_empty() {
        format!("{begin}{}", lines(None, &text, width()))
    } else if style().bar {
        // The shell prompt needs a new line.
        "\n".into()
    } else {
        String::new()
    };
    match (&mut screen, &notice) {
        (Some(screen), Notice::Stopping(_)) => screen.above(|| write(&text)),
        (Some(screen), Notice::Ending(_)) => {
            screen.erase();
            write(&text);
        }
        (None, _) => write(&text),
    }
    if let (Notice::Ending(_), Some(screen)) = (&notice, screen) {
        // Keeps the lock, so that nothing is written after this text.
        std::mem::forget(screen);
    }
}

/// ` (micro-batch 12 of 40, about 50 s)`
fn details(open: &[PhaseSnapshot], finishes: Option<Option<Duration>>) -> String {
    let parts = progress::current(open).map_or(&[][..], |(_, parts)| parts);
    let mut said: Vec<String> = Vec::new();
    // A position in the layers alone does not help the user.
    if let Some(first) = parts.first().filter(|first| first.label == "micro-batch") {
        said.push(format!(
            "{} {} of {}",
            first.label,
            (first.done + 1).min(first.total),
            first.total
        ));
    }
    if let Some(usual) = finishes
        && let Some(left) = time_left(parts, usual)
    {
        said.push(format!("about {}", units::duration(left)));
    }
    if said.is_empty() {
        String::new()
    } else {
        format!(" ({})", said.join(", "))
    }
}

/// Remaining time of a step: from the progress of its parts, else from earlier steps.
fn time_left(parts: &[PhaseSnapshot], usual: Option<Duration>) -> Option<Duration> {
    let (first, inner) = parts.split_first()?;
    let elapsed = first.started.elapsed();
    match progress::fraction(first, inner) {
        Some(f) if f > 0.05 => Some(elapsed.mul_f64((1.0 - f) / f)),
        _ => usual.map(|usual| usual.saturating_sub(elapsed)),
    }
}

fn tick() {
    loop {
        std::thread::sleep(TICK);
        let open = progress::now();
        let mut screen = screen();
        let silent = screen.last.get_or_insert_with(Instant::now).elapsed();
        if progress::current(&open).is_none() {
            screen.erase();
        } else if !style().bar {
            if silent >= SELDOM {
                let text = plain_line(&open);
                screen.above(|| write(&text));
            }
        } else if screen.drawn > 0 || silent >= SOON {
            screen.draw(&open);
        }
    }
}

/// `reading rows.jsonl: 12.0 of 57.0 MiB, 12 s`
fn plain_line(open: &[PhaseSnapshot]) -> String {
    let Some((head, parts)) = progress::current(open) else {
        return String::new();
    };
    let mut said = vec![amount(head, " of ")];
    said.extend(parts.iter().filter_map(part_of));
    said.push(units::duration(head.started.elapsed()));
    said.retain(|s| !s.is_empty());
    lines(None, &format!("{}: {}", head.label, said.join(", ")), width())
}

/// `12 of 40 batches`, `12.0 MiB of 1.0 GiB`
fn amount(seen: &PhaseSnapshot, of: &str) -> String {
    let number = |n| match seen.unit {
        ProgressUnit::Bytes => units::bytes(n),
        ProgressUnit::Count(_) => units::count(n),
    };
    let unit = match seen.unit {
        ProgressUnit::Count(unit) if !unit.is_empty() => format!(" {unit}"),
        _ => String::new(),
    };
    match (seen.done, seen.total) {
        (0, 0) => String::new(),
        (done, 0) => format!("{}{unit}", number(done)),
        (done, total) => format!("{}{of}{}{unit}", number(done.min(total)), number(total)),
    }
}

fn part_of(part: &PhaseSnapshot) -> Option<String> {
    match (part.note.is_empty(), part.total) {
        (false, _) => Some(part.note.clone()),
        // A single part is not worth showing.
        (true, 0 | 1) => None,
        (true, total) => Some(format!("{} {}/{total}", part.label, (part.done + 1).min(total))),
    }
}

/// One line of at most `room` columns.
fn progress_line(open: &[PhaseSnapshot], room: usize, unicode: bool) -> String {
    let Some((head, parts)) = progress::current(open) else {
        return String::new();
    };
    let elapsed = head.started.elapsed();
    let share = progress::fraction(head, parts);
    // The bar is dropped if the words need the space.
    let bar = match share {
        Some(share) => bar(share, (room / 5).clamp(6, 30), unicode),
        None => spinner(elapsed),
    };
    let mut said = vec![
        (bar, 0, 5),
        (around(open).unwrap_or_default(), 0, 7),
        (clipped(&ascii_if(&head.label, unicode), room / 2), 0, 0),
        (amount(head, "/"), 0, 1),
    ];
    for (depth, part) in parts.iter().enumerate() {
        said.push((part_of(part).unwrap_or_default(), 0, 2 + depth as u8));
    }
    said.push((head.note.clone(), 0, 6));
    said.push((units::seconds(elapsed), 0, 4));
    clipped(&visible(&fit(&said, room).join("  ")).replace(['\n', '\t'], " "), room)
}

/// The phase that contains the current one: `answering 64/200 questions`. Training itself is not shown.
fn around(open: &[PhaseSnapshot]) -> Option<String> {
    let mut phases = open.iter().rev().filter(|s| !s.part);
    let outer = phases.nth(1).filter(|s| s.unit != ProgressUnit::Count("steps"))?;
    Some(format!("{} {}", outer.label, amount(outer, "/")).trim_end().to_string())
}

fn ascii_if(text: &str, unicode: bool) -> String {
    if unicode { text.to_string() } else { ascii(text) }
}

fn bar(share: f64, width: usize, unicode: bool) -> String {
    let full = ((share * width as f64) as usize).min(width);
    let (done, tip, left) = if unicode { ("━", "╸", " ") } else { ("=", ">", " ") };
    let tip = if full < width { tip } else { "" };
    format!(
        "{}{tip}{}",
        done.repeat(full),
        left.repeat(width.saturating_sub(full + 1))
    )
}

fn spinner(elapsed: Duration) -> String {
    let at = elapsed.as_millis() / 100 % 4;
    ["|", "/", "-", "\\"][at as usize].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(label: &str, done: u64, total: u64, unit: ProgressUnit, part: bool) -> PhaseSnapshot {
        PhaseSnapshot {
            label: label.into(),
            unit,
            part,
            started: Instant::now() - Duration::from_secs(65),
            done,
            total,
            note: String::new(),
        }
    }

    fn training() -> Vec<PhaseSnapshot> {
        let mut head = seen("training", 7, 120, ProgressUnit::Count("steps"), false);
        head.note = "loss 2.5000  eta 1m 05s".into();
        let mut layer = seen("layers", 20, 72, ProgressUnit::Count(""), true);
        layer.note = "backward 30/36".into();
        vec![head, seen("micro-batch", 11, 40, ProgressUnit::Count(""), true), layer]
    }

    #[test]
    fn the_line_fits_every_width_and_says_what_matters() {
        for room in [24, 39, 59, 79, 119] {
            for unicode in [true, false] {
                let line = progress_line(&training(), room, unicode);
                assert!(columns(&line) <= room, "{room}: {line}");
                assert!(unicode || line.is_ascii(), "{line}");
                assert!(line.contains("training"), "{line}");
            }
        }
        let line = progress_line(&training(), 59, true);
        assert!(
            line.contains("7/120 steps  micro-batch 12/40  backward 30/36"),
            "{line}"
        );
        let line = progress_line(&training(), 119, false);
        assert!(line.contains("loss 2.5000  eta 1m 05s  1m 05s"), "{line}");
        let long = [seen(&"x".repeat(300), 5, 0, ProgressUnit::Bytes, false)];
        assert!(columns(&progress_line(&long, 59, true)) <= 59);
        let inner = [
            training().remove(0),
            seen("answering", 64, 200, ProgressUnit::Count("questions"), false),
            seen("generating", 3, 64, ProgressUnit::Count("answers"), false),
        ];
        let line = progress_line(&inner, 100, false);
        assert!(
            line.contains("answering 64/200 questions  generating  3/64 answers"),
            "{line}"
        );
        assert!(!line.contains("training"), "{line}");
        let evil = [seen("reading a\x1b[2Jb\n.jsonl", 5, 0, ProgressUnit::Bytes, false)];
        let line = progress_line(&evil, 79, true);
        assert!(!line.contains(['\x1b', '\n']), "{line:?}");
    }

    #[test]
    fn a_log_gets_plain_lines() {
        let reading = [seen(
            "reading rows.jsonl",
            12 << 20,
            57 << 20,
            ProgressUnit::Bytes,
            false,
        )];
        assert_eq!(
            plain_line(&reading),
            "reading rows.jsonl: 12.0 MiB of 57.0 MiB, 1m 05s\n"
        );
        let text = plain_line(&training());
        assert_eq!(
            text,
            "training: 7 of 120 steps, micro-batch 12/40, backward 30/36, 1m 05s\n"
        );
    }

    #[test]
    fn a_stop_says_where_it_is_and_how_long_it_takes() {
        let open = training();
        assert_eq!(details(&open, None), " (micro-batch 12 of 40)");
        let text = details(&open, Some(None));
        assert!(text.starts_with(" (micro-batch 12 of 40, about 2m "), "{text}");
        assert_eq!(details(&[], Some(Some(Duration::from_secs(3)))), "");
        let early = [
            seen("training", 0, 9, ProgressUnit::Count(""), false),
            seen("micro-batch", 0, 40, ProgressUnit::Count(""), true),
        ];
        let text = details(&early, Some(Some(Duration::from_secs(125))));
        assert!(
            text.contains("about 1m 00s") || text.contains("about 59.") || text.contains("about 60.0s"),
            "{text}"
        );
    }

    #[test]
    fn a_label_is_colored_and_the_text_is_harmless() {
        let text = lines(Some(("31", "error:")), "bad \x1b[2J model", Some(60));
        assert_eq!(text, "error: bad \\u{1b}[2J model\n");
    }
}
