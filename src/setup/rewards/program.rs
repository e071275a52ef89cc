//! A local program as a reward: it reads rows as JSON lines from standard input and writes one score per line.
//!
//! A score is a number, `null` (no score for this row), or an object with a number in `score`. The program starts once
//! and serves all requests. If it dies or hangs, it is restarted up to a limit in a row and receives the rows that it did not
//! answer. Its rights are reduced (`base::worker::ProcessRights`).

use crate::base::signal::{self, ChildGroup};
use crate::base::units::beginning;
use crate::base::worker::{self, ProcessRights};
use crate::base::{Error, Result, secrets};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest line read from the program, in bytes.
const LINE: u64 = 64 << 10;
/// Number of lines of its standard error in an error message.
const SHOWN: usize = 12;
/// Interval of the check for a signal.
const TICK: Duration = Duration::from_millis(50);

pub struct RewardProgram {
    words: Vec<String>,
    /// Time limit for one row.
    timeout: Duration,
    /// Most restarts in a row.
    most_restarts: usize,
    /// Number of restarts that are left; a call of `scores` without a restart gives all back.
    restarts: usize,
    rights: ProcessRights,
    running: Option<RunningProgram>,
}

struct RunningProgram {
    child: Child,
    /// `None` after its end.
    group: Option<ChildGroup>,
    rows: Sender<String>,
    lines: Receiver<String>,
    said: Arc<Mutex<VecDeque<String>>>,
    /// The thread that reads its standard error.
    listener: JoinHandle<()>,
    network: bool,
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        // Errors occur only if the program has ended already, so they are ignored.
        let _ = self.end();
    }
}

impl RewardProgram {
    /// Splits `command` into words with the quoting rules of a shell, without a shell. Errors: it cannot be started.
    pub fn start(command: &str, timeout: Duration, restarts: usize, rights: ProcessRights) -> Result<Self> {
        let mut program = Self {
            words: words(command)?,
            timeout,
            most_restarts: restarts,
            restarts,
            rights,
            running: None,
        };
        program.running = Some(program.spawn()?);
        Ok(program)
    }

    fn spawn(&self) -> Result<RunningProgram> {
        let Some((name, arguments)) = self.words.split_first() else {
            return Err(Error::usage("a `program:` reward has no program name").hint("`program:python3 score.py`"));
        };
        let mut command = Command::new(name);
        command.args(arguments);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Ctrl-C is sent only to ft, which then kills the program and its process group.
        let (mut child, group) = worker::start_reduced(command, self.rights).map_err(|e| {
            Error::new("the reward program cannot be started")
                .at(name)
                .found(e.to_string())
                .hint("give a program on the PATH, or an executable file")
        })?;
        let no_pipe = || Error::new("the pipe to the reward program cannot be opened");
        let mut stdin = child.stdin.take().ok_or_else(no_pipe)?;
        let stdout = child.stdout.take().ok_or_else(no_pipe)?;
        let stderr = child.stderr.take().ok_or_else(no_pipe)?;
        let (rows, to_write) = mpsc::channel::<String>();
        thread::spawn(move || {
            for row in to_write {
                // If the program has ended, the reader of its output reports it.
                if stdin.write_all(row.as_bytes()).and_then(|()| stdin.flush()).is_err() {
                    return;
                }
            }
        });
        let (to_read, lines) = mpsc::channel();
        thread::spawn(move || each_line(stdout, |line| to_read.send(line).is_ok()));
        let said = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&said);
        let listener = thread::spawn(move || {
            each_line(stderr, |line| match kept.lock() {
                Ok(mut kept) => {
                    kept.push_back(line);
                    if kept.len() > SHOWN {
                        kept.pop_front();
                    }
                    true
                }
                Err(_) => false,
            })
        });
        Ok(RunningProgram {
            listener,
            child,
            group: Some(group),
            rows,
            lines,
            said,
            network: self.rights.network,
        })
    }

    /// Returns one score for each row, NaN where the program gives none.
    ///
    /// Errors: a line that is not a score; a program that dies or hangs with no restart left; a signal.
    pub fn scores(&mut self, rows: &[Value]) -> Result<Vec<f64>> {
        let mut scores = Vec::with_capacity(rows.len());
        let mut is_restarted = false;
        while scores.len() < rows.len() {
            let mut running = match self.running.take() {
                Some(running) => running,
                None => self.spawn()?,
            };
            if let Ok(line) = running.lines.try_recv() {
                return Err(running.explain(
                    Error::new("the reward program writes more lines than it gets rows")
                        .found(shown(&line))
                        .expected("one line per row"),
                ));
            }
            for row in &rows[scores.len()..] {
                // Fails only if the program has ended; `read` reports that.
                let _ = running.rows.send(format!("{row}\n"));
            }
            match self.read(&mut running, rows, &mut scores)? {
                None => self.running = Some(running),
                Some(fault) if self.restarts == 0 => return Err(running.explain(fault)),
                Some(_) => {
                    self.restarts -= 1;
                    is_restarted = true;
                }
            }
        }
        // A rare crash does not end a long run. Without rows the program did nothing.
        if !is_restarted && !rows.is_empty() {
            self.restarts = self.most_restarts;
        }
        Ok(scores)
    }

    /// Reads scores until all rows have one. Returns the error of a program that died or hung.
    fn read(&self, running: &mut RunningProgram, rows: &[Value], scores: &mut Vec<f64>) -> Result<Option<Error>> {
        while scores.len() < rows.len() {
            let place = || {
                format!(
                    "row {} of {}: {}",
                    scores.len() + 1,
                    rows.len(),
                    shown(&rows[scores.len()].to_string())
                )
            };
            let asked = Instant::now();
            let line = loop {
                match running.lines.recv_timeout(TICK.min(self.timeout)) {
                    Ok(line) => break line,
                    Err(RecvTimeoutError::Disconnected) => {
                        return Ok(Some(
                            Error::new("the reward program ended before it wrote all scores")
                                .at(place())
                                .hint("run it alone, with this row as one line of JSON on its standard input"),
                        ));
                    }
                    Err(RecvTimeoutError::Timeout) if asked.elapsed() >= self.timeout => {
                        return Ok(Some(
                            Error::new("the reward program did not write a score in time")
                                .at(place())
                                .expected(format!("one within {:?}", self.timeout))
                                .hint("raise `rlhf.reward_timeout`; the program must flush its output after each line"),
                        ));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if let Some(s) = signal::received() {
                    return Err(Error::signal(s, "stopped while a reward program was running"));
                }
            };
            match score(&line) {
                Some(score) => scores.push(score),
                None => {
                    return Err(running.explain(
                        Error::new("the reward program wrote a line that is not a score")
                            .at(place())
                            .found(shown(&line))
                            .expected("a number, `null`, or {\"score\": number} on each line")
                            .hint("log messages of the program must go to its standard error"),
                    ));
                }
            }
        }
        Ok(None)
    }
}

impl RunningProgram {
    /// Kills the program and its child processes, before the wait frees the id of the group: another program may get it then.
    fn end(&mut self) -> std::io::Result<ExitStatus> {
        drop(self.group.take());
        let _ = self.child.kill();
        self.child.wait()
    }

    /// Ends the program. Adds its standard error and its exit status to the error.
    fn explain(&mut self, error: Error) -> Error {
        // Gives a program that is about to exit time to write its message.
        let mut by_itself = false;
        for tick in 0..20 {
            by_itself = self.group.as_ref().is_some_and(ChildGroup::is_ended);
            let enough = if by_itself {
                self.listener.is_finished()
            } else {
                tick == 2
            };
            if enough {
                break;
            }
            thread::sleep(TICK);
        }
        let status = self.end().ok().filter(|_| by_itself);
        let mut text = status.map_or("the program is still running".to_string(), |status| {
            format!("the program ended with {status}")
        });
        if let Ok(said) = self.said.lock() {
            for line in said.iter() {
                text.push_str(&format!("\n      {}", shown(line)));
            }
        }
        if !self.network
            && ["not permitted", "onnect", "resol", "etwork"]
                .iter()
                .any(|word| text.contains(word))
        {
            text.push_str("\n      (it has no network: `rlhf.reward_network = true` gives it one)");
        }
        // `found` may contain the wrong line already.
        error.cause(text)
    }
}

fn each_line(pipe: impl Read, mut give: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(pipe);
    loop {
        let mut line = Vec::new();
        match (&mut reader).take(LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let text = String::from_utf8_lossy(&line);
                if !give(text.trim_end_matches(['\n', '\r']).to_string()) {
                    return;
                }
            }
        }
    }
}

/// The score in a line, NaN for a row without one. `None`: the line is not a score.
pub fn score(line: &str) -> Option<f64> {
    let value: Value = serde_json::from_str(line.trim()).ok()?;
    let value = match &value {
        Value::Object(fields) => fields.get("score")?,
        other => other,
    };
    match value {
        Value::Null => Some(f64::NAN),
        other => other.as_f64().filter(|x| x.is_finite()),
    }
}

/// The beginning of a text for a message.
pub(super) fn shown(text: &str) -> String {
    beginning(text, 200)
}

/// Splits a command line into words at blanks. Single and double quotes group words, a backslash escapes the next
/// character. Errors: an unclosed quote.
pub(super) fn words(command: &str) -> Result<Vec<String>> {
    let (mut out, mut word, mut quote, mut chars) = (Vec::new(), None::<String>, None, command.chars());
    while let Some(c) = chars.next() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            ('\\', None | Some('"')) => word.get_or_insert_default().extend(chars.next()),
            (c, Some(_)) => word.get_or_insert_default().push(c),
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, None) if c.is_whitespace() => out.extend(word.take()),
            (c, None) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err(
            Error::usage("a quote in the command of a `program:` reward is not closed").found(secrets::mask(command)),
        );
    }
    out.extend(word);
    Ok(out)
}

/// Programs that run a script.
const INTERPRETERS: [&str; 16] = [
    "bash", "bun", "dash", "deno", "julia", "lua", "node", "perl", "php", "pypy", "python", "ruby", "Rscript", "sh",
    "uv", "zsh",
];

/// True for the option of an interpreter after which the text of a script comes, or a module: `-m`, `-uc`, `-lc`, `-e`.
fn begins_text(interpreter: &str, word: &str) -> bool {
    let Some(letters) = word.strip_prefix('-').filter(|letters| !letters.starts_with('-')) else {
        return false;
    };
    let only = |all: &str| letters.chars().all(|c| all.contains(c));
    match interpreter {
        "python" | "pypy" => letters.ends_with(['m', 'c']) && only("uBEIsSqOvbxmc"),
        "bash" | "dash" | "sh" | "zsh" => letters.ends_with('c') && only("abcefhiklmnprstuvx"),
        _ => ["e", "ne", "pe", "le", "lne", "r"].contains(&letters),
    }
}

/// The place of a program's own file in its command: the first word, or the script of an interpreter. Other arguments do
/// not count: the program may write to such files. `None`: it is found on the PATH, or is not a file.
pub(super) fn own_file(words: &[String]) -> Option<usize> {
    // `python3.12` is `python`.
    let name = |word: &str| {
        let name = Path::new(word).file_name()?.to_string_lossy().into_owned();
        Some(
            name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.')
                .to_string(),
        )
    };
    let is_file = |word: &String| Path::new(word).is_file();
    let is_env = name(words.first()?)? == "env";
    let settings = words.iter().skip(1).take_while(|word| word.contains('=')).count();
    let first = if is_env { 1 + settings } else { 0 };
    let program = words.get(first)?;
    let interpreter = name(program)?;
    if !INTERPRETERS.contains(&&*interpreter) {
        return (program.contains('/') && is_file(program)).then_some(first);
    }
    let arguments = words.iter().enumerate().skip(first + 1);
    let mut arguments = arguments.take_while(|(_, word)| !begins_text(&interpreter, word));
    arguments.find(|(_, word)| is_file(word)).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn program(script: &str, seconds: f64, restarts: usize) -> RewardProgram {
        let command = format!("sh -c '{script}'");
        RewardProgram::start(
            &command,
            Duration::from_secs_f64(seconds),
            restarts,
            ProcessRights::default(),
        )
        .unwrap()
    }

    fn rows(n: usize) -> Vec<Value> {
        (0..n).map(|i| json!({"completion": format!("answer {i}")})).collect()
    }

    fn fault(script: &str, restarts: usize) -> String {
        fault_within(0.5, script, restarts)
    }

    fn fault_within(seconds: f64, script: &str, restarts: usize) -> String {
        program(script, seconds, restarts)
            .scores(&rows(3))
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn scores_come_back_in_order_and_the_program_lives_on() {
        let mut p = program(r#"n=0; while read -r line; do n=$((n+1)); echo $n.5; done"#, 5.0, 0);
        assert_eq!(p.scores(&rows(3)).unwrap(), [1.5, 2.5, 3.5]);
        assert_eq!(p.scores(&rows(2)).unwrap(), [4.5, 5.5]);
        assert!(p.scores(&[]).unwrap().is_empty());
    }

    #[test]
    fn a_score_may_be_none_or_in_an_object() {
        let mut p = program(
            r#"read -r a; echo null; read -r a; echo "{\"score\": -2}"; read -r a; echo 1e-1"#,
            5.0,
            0,
        );
        let scores = p.scores(&rows(3)).unwrap();
        assert!(scores[0].is_nan() && scores[1..] == [-2.0, 0.1]);
    }

    #[test]
    fn many_long_rows_do_not_block_each_other() {
        let long: Vec<Value> = (0..300).map(|_| json!({"completion": "x".repeat(4000)})).collect();
        let mut p = program(r#"while read -r line; do echo ${#line}; done"#, 20.0, 0);
        assert!(p.scores(&long).unwrap().iter().all(|s| *s == 4017.0));
    }

    #[test]
    fn a_program_that_dies_is_started_again_a_bounded_number_of_times() {
        // The program answers one row and exits: three rows need two restarts.
        let script = r#"read -r line; echo 7; echo "out of luck" >&2; exit 3"#;
        assert_eq!(program(script, 5.0, 2).scores(&rows(3)).unwrap(), [7.0; 3]);
        let e = program(script, 5.0, 1).scores(&rows(3)).unwrap_err().to_string();
        assert!(
            e.contains("ended before") && e.contains("row 3 of 3") && e.contains("answer 2"),
            "{e}"
        );
        assert!(e.contains("out of luck") && e.contains('3'), "{e}");
    }

    #[test]
    fn a_call_without_a_restart_gives_all_restarts_back() {
        // The program answers four rows and exits: every second call of two rows needs a restart.
        let script = r#"for i in 1 2 3 4; do read -r line; echo 7; done; exit 3"#;
        let mut p = program(script, 20.0, 1);
        for call in 0..8 {
            assert_eq!(p.scores(&rows(2)).unwrap(), [7.0; 2], "{call}");
        }
        // The program answers the rows of one call: all calls but the first need a restart. No rows are no success.
        let mut p = program("read -r line; echo 7; exit 3", 20.0, 2);
        for call in 0..3 {
            assert_eq!(p.scores(&rows(1)).unwrap(), [7.0], "{call}");
            assert!(p.scores(&[]).unwrap().is_empty());
        }
        let e = p.scores(&rows(1)).unwrap_err().to_string();
        assert!(e.contains("ended before") && e.contains("row 1 of 1"), "{e}");
    }

    /// Row W8.
    #[test]
    fn the_group_of_a_program_that_ended_is_killed_before_its_id_is_free() {
        let mut p = program("exit 3", 5.0, 0);
        let mut running = p.running.take().unwrap();
        let started = Instant::now();
        while !running.group.as_ref().unwrap().is_ended() && started.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(5));
        }
        let e = running.explain(Error::new("no score")).to_string();
        assert!(e.contains("exit status: 3"), "{e}");
        assert!(running.group.is_none());
        let mut p = program("read -r line", 5.0, 0);
        let mut running = p.running.take().unwrap();
        let e = running.explain(Error::new("no score")).to_string();
        assert!(e.contains("still running") && running.group.is_none(), "{e}");
    }

    /// Row W4.
    #[test]
    fn a_program_that_hangs_is_an_error_in_time() {
        let started = Instant::now();
        let e = fault("echo thinking >&2; sleep 600", 1);
        assert!(
            e.contains("not write a score in time") && e.contains("row 1 of 3") && e.contains("thinking"),
            "{e}"
        );
        assert!(
            e.contains("rlhf.reward_timeout") && started.elapsed() < Duration::from_secs(20),
            "{e}"
        );
    }

    #[test]
    fn nonsense_is_shown() {
        for (script, says) in [
            ("echo good morning; sleep 5", "good morning"),
            ("echo NaN; sleep 5", "NaN"),
            ("echo 1e999; sleep 5", "1e999"),
            ("echo \"[1]\"; sleep 5", "[1]"),
            ("echo; sleep 5", "not a score"),
            ("yes x | head -c 200000 | tr -d \"\\n\"; sleep 5", "xxx"),
        ] {
            // It reads a row first: a line before that would be one too many.
            let e = fault_within(20.0, &format!("read -r line; {script}"), 3);
            assert!(
                e.contains("wrote a line that is not a score") && e.contains(says),
                "{e}"
            );
        }
        let mut p = program("while read -r line; do echo 1; echo 2; done", 5.0, 0);
        assert_eq!(p.scores(&rows(1)).unwrap(), [1.0]);
        // The second line may come after the next row.
        let e = (0..20).find_map(|_| {
            thread::sleep(Duration::from_millis(200));
            p.scores(&rows(1)).err()
        });
        let e = e.map(|e| e.to_string()).unwrap_or_default();
        assert!(e.contains("more lines than it gets rows"), "{e}");
    }

    #[test]
    fn the_own_file_of_a_program_is_its_script_or_itself() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["score.py", "judge", "log.txt"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let at = |command: &str| {
            let command = command.replace('@', &format!("{}/", dir.path().display()));
            own_file(&words(&command).unwrap())
        };
        assert_eq!(at("python3 -u @score.py @log.txt"), Some(2));
        assert_eq!(at("/usr/bin/python3.12 @score.py"), Some(1));
        assert_eq!(at("@judge @log.txt"), Some(0));
        let others = [
            "sh -c 'read -r line; echo 1' @log.txt",
            "python3 -m judge @log.txt",
            "python3",
            "judge @log.txt",
            "@missing",
            "",
        ];
        for command in others {
            assert_eq!(at(command), None, "{command}");
        }
    }

    #[test]
    fn a_program_that_is_not_there() {
        let e = RewardProgram::start("no-such-program-here --x", TICK, 0, ProcessRights::default())
            .err()
            .unwrap()
            .to_string();
        assert!(
            e.contains("cannot be started") && e.contains("no-such-program-here"),
            "{e}"
        );
        let starts = |text: &str| RewardProgram::start(text, TICK, 0, ProcessRights::default()).is_ok();
        assert!(!starts("") && !starts("a 'b"));
        assert_eq!(
            words(r#"a 'b c'  "d \" e" f\ g ''"#).unwrap(),
            ["a", "b c", "d \" e", "f g", ""]
        );
    }
}
