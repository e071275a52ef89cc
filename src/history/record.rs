//! One run: its settings, its state, its numbers.

use super::{Curves, each_own_line, open_own, read_own_text};
use crate::base::lock::{self, LockState};
use crate::base::{Error, Result, files, secrets, units};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml_edit::{DocumentMut, Item, TableLike};

/// Keys with the ids of a model and of datasets.
const PLACES: [&str; 3] = ["model.path", "data.train", "data.sources"];
/// Most levels of tables and parts of keys in one line of `resolved.toml`.
const MOST_NESTED: usize = 64;
/// Most warnings that are read, and most characters of each.
const MOST_WARNINGS: usize = 1000;
const MOST_OF_A_WARNING: usize = 10_000;
/// Levels of directories below a given one that may have runs.
const LEVELS: usize = 3;
/// A run on another machine that wrote a line in this time is taken as in progress.
const FRESH: Duration = Duration::from_secs(600);

/// The content of the files of a run directory.
#[derive(Debug, Clone)]
pub struct RunRecord {
    pub path: PathBuf,
    /// Recipe keys and their values as TOML text, from `resolved.toml`. Secrets are masked: all that reads them shows or exports them.
    pub settings: BTreeMap<String, String>,
    /// Values of `PLACES`, of which only the user and the password of a URL are masked: the name of a model may look like a secret.
    places: BTreeMap<&'static str, String>,
    pub curves: Curves,
    /// Steps of the whole run, once it has started.
    pub total_steps: Option<u64>,
    /// `running`, `done`, `early stopping`, `stopped` (by a signal), `interrupted`, or the reason of its end; `unreadable: ` and
    /// the reason for a run that cannot be read; `running on HOST?` or `unknown (started on HOST)` for a run of another machine.
    pub state: String,
    /// Steps of the checkpoints.
    pub checkpoints: Vec<u64>,
    /// Unix seconds of the first and the last event.
    pub began: Option<f64>,
    pub ended: Option<f64>,
    /// Unix seconds of the last start or resume.
    pub resumed: Option<f64>,
    /// Forecast of the peak memory in bytes.
    pub planned_bytes: Option<u64>,
    pub warnings: Vec<String>,
}

/// True for a directory with the names of the files of a run. What they are is checked when the run is read: a damaged run is shown
/// as one. A run writes `events.jsonl` after the others.
fn is_run(path: &Path) -> bool {
    let has = |name: &str| path.join(name).symlink_metadata().is_ok();
    has("events.jsonl") && (has("resolved.toml") || has("run.json"))
}

/// The runs in these directories, by path: each is a run, or has runs in it (up to three levels). A directory below them that cannot
/// be listed is among the runs: it may be one, and its error comes when it is read.
///
/// Errors: one of these directories does not exist, or cannot be listed.
pub fn find(places: &[PathBuf]) -> Result<Vec<PathBuf>> {
    fn below(path: &Path, depth: usize, out: &mut Vec<PathBuf>) -> Result<()> {
        if is_run(path) {
            out.push(path.to_path_buf());
        } else if depth > 0 {
            let inner = match files::list(path) {
                Err(_) if depth < LEVELS => {
                    out.push(path.to_path_buf());
                    return Ok(());
                }
                listed => listed?,
            };
            let visible = |p: &&PathBuf| !p.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
            for path in inner.iter().filter(visible).filter(|p| p.is_dir() && !p.is_symlink()) {
                below(path, depth - 1, out)?;
            }
        }
        Ok(())
    }
    let mut out = Vec::new();
    for place in places {
        if !place.is_dir() {
            let hint = if place == Path::new("runs") {
                "there is no run here yet: `ft train` writes one in `runs`; or give another directory with runs"
            } else {
                "give a run directory, or a directory with runs; the default is `runs`"
            };
            return Err(Error::usage("there is no such directory").at_path(place).hint(hint));
        }
        below(place, LEVELS, &mut out)?;
    }
    let mut seen = BTreeSet::new();
    out.retain(|run| seen.insert(run.clone()));
    Ok(out)
}

/// Keys of a `resolved.toml` with their value, as TOML on one line, and its origin, in the order of the text: `train.batch_size`,
/// `8`, `recipe`.
///
/// Errors: the text is not TOML, or is nested too deep.
pub fn settings(resolved: &str) -> Result<Vec<[String; 3]>> {
    let damaged = || Error::new("the file is damaged");
    if nesting(resolved) > MOST_NESTED {
        return Err(damaged()
            .found("tables inside of tables, or keys with many parts")
            .expected(format!("at most {MOST_NESTED} levels")));
    }
    let table: DocumentMut = resolved.parse().map_err(|e| damaged().cause(e))?;
    let mut out = Vec::new();
    flatten(table.as_table(), "", 0, &mut out);
    Ok(out)
}

impl RunRecord {
    /// Reads a run directory. A run may be in progress: its last lines count if they are complete.
    ///
    /// Errors: it is no run; a file cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_at_most(path, usize::MAX)
    }

    /// As `read`, with curves of at most `most` points (`Curve::thinned`); 0: the metrics are not read, but can be opened.
    pub fn read_at_most(path: &Path, most: usize) -> Result<Self> {
        if !is_run(path) {
            if path.is_dir() {
                files::list(path)?;
            }
            return Err(Error::usage("this is not a run directory")
                .at_path(path)
                .expected("a directory that `ft train` wrote (`resolved.toml`, `events.jsonl`)")
                .hint("`ft runs` lists the runs in `runs`, `ft runs list DIR` those in another directory"));
        }
        let resolved = path.join("resolved.toml");
        let text = read_own_text(&resolved)?;
        let rows = settings(&text).map_err(|e| e.at_path(&resolved))?;
        let mut settings: BTreeMap<String, String> = rows.into_iter().map(|[key, value, _]| (key, value)).collect();
        let place = |key: &'static str| Some((key, secrets::mask_users(settings.get(key)?)));
        let places = PLACES.into_iter().filter_map(place).collect();
        settings.values_mut().for_each(|value| *value = secrets::mask(value));
        let events = Events::read(path)?;
        let plan: Option<Value> = read_own_text(&path.join("plan.json"))
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok());
        let mut checkpoints: Vec<u64> = files::list(path)?
            .iter()
            .filter_map(|p| p.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok())
            .collect();
        checkpoints.sort_unstable();
        let metrics = path.join("metrics.jsonl");
        let curves = match most {
            0 if metrics.exists() => open_own(&metrics).map(|_| Curves::default())?,
            0 => Curves::default(),
            _ => Curves::read(path, most)?,
        };
        Ok(Self {
            path: path.to_path_buf(),
            settings,
            places,
            curves,
            total_steps: events.steps,
            state: events.state(path),
            checkpoints,
            began: events.began,
            ended: events.ended,
            resumed: events.resumed,
            planned_bytes: plan.and_then(|plan| plan["peak_bytes"].as_u64()),
            warnings: events.warnings,
        })
    }

    /// A run that cannot be read: its path, and the reason as its state. In a list it does not hide the other runs.
    pub fn unreadable(path: &Path, e: &Error) -> Self {
        let line = e.line();
        let place = path.display().to_string();
        let short = line.strip_prefix(&place).unwrap_or(&line);
        let short = short.trim_start_matches(['/', ':', ' ']);
        let reason = units::table_cell(short);
        Self {
            path: path.to_path_buf(),
            settings: BTreeMap::new(),
            places: BTreeMap::new(),
            curves: Curves::default(),
            total_steps: None,
            state: format!("unreadable: {reason}"),
            checkpoints: Vec::new(),
            began: None,
            ended: None,
            resumed: None,
            planned_bytes: None,
            warnings: Vec::new(),
        }
    }

    /// True if the run is in progress, on this machine or, as it seems, on another one.
    pub fn is_running(&self) -> bool {
        self.state == "running" || self.state.starts_with(RUNNING_ON)
    }

    /// The value of one of `PLACES` as TOML text, for the ids in it.
    pub fn place(&self, key: &str) -> &str {
        self.places.get(key).map_or("", String::as_str)
    }

    /// A setting without quotes: `sft`.
    pub fn setting(&self, key: &str) -> &str {
        self.settings.get(key).map_or("", |value| value.trim_matches('"'))
    }
}

/// What `events.jsonl` says.
#[derive(Default)]
struct Events {
    any: bool,
    steps: Option<u64>,
    began: Option<f64>,
    ended: Option<f64>,
    resumed: Option<f64>,
    /// The last start, resume or stop.
    last: Value,
    warnings: Vec<String>,
}

impl Events {
    fn read(run: &Path) -> Result<Self> {
        let mut all = Self::default();
        let mut left_out = 0;
        each_own_line(&run.join("events.jsonl"), |line, _| {
            let Ok(event) = serde_json::from_slice::<Value>(line) else {
                return Ok(());
            };
            let time = event["time"].as_f64();
            if !all.any {
                (all.any, all.began) = (true, time);
            }
            all.ended = time;
            all.steps = event["steps"].as_u64().or(all.steps);
            if event["event"] == "start" || event["event"] == "resume" {
                all.resumed = time;
            }
            if ["start", "resume", "stop"].iter().any(|kind| event["event"] == *kind) {
                all.last = event;
            } else if event["event"] == "warning"
                && let Some(message) = event["message"].as_str()
            {
                if all.warnings.len() < MOST_WARNINGS {
                    // Before it is cut: a part of a secret could remain.
                    let message = secrets::mask(message);
                    all.warnings.push(message.chars().take(MOST_OF_A_WARNING).collect());
                } else {
                    left_out += 1;
                }
            }
            Ok(())
        })?;
        if left_out > 0 {
            all.warnings
                .push(format!("{left_out} more warnings are in `events.jsonl`"));
        }
        Ok(all)
    }

    fn state(&self, run: &Path) -> String {
        if self.last["event"] == "stop" {
            return match self.last["reason"].as_str() {
                Some("signal") | None => "stopped".to_string(),
                Some(reason) => secrets::mask(reason),
            };
        }
        match lock::state(run) {
            LockState::Held => "running".to_string(),
            LockState::Free => "interrupted".to_string(),
            LockState::Elsewhere(host) if is_fresh(run) => format!("{RUNNING_ON}{host}?"),
            LockState::Elsewhere(host) => format!("unknown (started on {host})"),
        }
    }
}

/// The state of a run on another machine that still writes lines, up to the name of the machine.
const RUNNING_ON: &str = "running on ";

/// True if a run has written a line a short time ago.
fn is_fresh(run: &Path) -> bool {
    let changed = |name: &str| run.join(name).symlink_metadata().and_then(|found| found.modified());
    // An error of `elapsed` is a time in the future: the clock of a file server may be ahead.
    let is_new = |name| changed(name).is_ok_and(|at| at.elapsed().unwrap_or_default() <= FRESH);
    ["metrics.jsonl", "events.jsonl"].into_iter().any(is_new)
}

/// The deepest place of a TOML text: brackets that are open there, and dots of their keys. The parser and everything that works
/// on its result call themselves for each level, and a stack has an end.
fn nesting(text: &str) -> usize {
    let bytes = text.as_bytes();
    // The dots since the last comma or line, for each open bracket.
    let (mut levels, mut deepest, mut at) = (vec![0usize], 0, 0);
    let mut sum = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' | b'\'' => {
                at = after_text(bytes, at);
                continue;
            }
            b'#' => {
                at += bytes[at..].iter().position(|b| *b == b'\n').unwrap_or(bytes.len() - at);
                continue;
            }
            b'{' | b'[' => {
                levels.push(0);
                sum += 1;
            }
            b'}' | b']' if levels.len() > 1 => sum -= 1 + levels.pop().unwrap_or(0),
            b'.' => {
                sum += 1;
                if let Some(dots) = levels.last_mut() {
                    *dots += 1;
                }
            }
            b',' | b'\n' => sum -= levels.last_mut().map_or(0, std::mem::take),
            _ => {}
        }
        deepest = deepest.max(sum);
        at += 1;
    }
    deepest
}

/// The place behind the quoted text that begins at `at`.
fn after_text(bytes: &[u8], at: usize) -> usize {
    let quote = bytes[at];
    let long = bytes[at..].starts_with(&[quote; 3]);
    let end = vec![quote; if long { 3 } else { 1 }];
    let mut at = at + end.len();
    while at < bytes.len() {
        if bytes[at..].starts_with(&end) {
            return at + end.len();
        }
        // A line break ends a short text: it is damaged.
        if !long && bytes[at] == b'\n' {
            return at;
        }
        at += if quote == b'"' && bytes[at] == b'\\' { 2 } else { 1 };
    }
    bytes.len()
}

fn flatten(table: &dyn TableLike, prefix: &str, depth: usize, out: &mut Vec<[String; 3]>) {
    for (name, item) in table.iter() {
        let key = format!("{prefix}{name}");
        match item {
            Item::Table(inner) if depth < 2 * MOST_NESTED => flatten(inner, &format!("{key}."), depth + 1, out),
            Item::Value(value) => {
                let origin = value
                    .decor()
                    .suffix()
                    .and_then(|text| text.as_str())
                    .unwrap_or_default();
                let origin = origin.trim().trim_start_matches('#').trim_start();
                out.push([key, on_one_line(value), origin.to_string()]);
            }
            Item::ArrayOfTables(_) => out.push([key, item.to_string().trim().to_string(), String::new()]),
            Item::Table(_) | Item::None => {}
        }
    }
}

/// A value as TOML. A text with line breaks has escapes, because readers show one line for each key.
fn on_one_line(value: &toml_edit::Value) -> String {
    let mut plain = value.clone();
    plain.decor_mut().clear();
    let text = plain.to_string();
    if !text.contains('\n') {
        return text.trim().to_string();
    }
    // The escapes of JSON are escapes of TOML too. Only DEL needs one more.
    let quoted = |text: &str| Value::from(text).to_string().replace('\u{7f}', "\\u007F");
    match value {
        toml_edit::Value::String(text) => quoted(text.value()),
        toml_edit::Value::Array(all) => {
            let all: Vec<String> = all.iter().map(on_one_line).collect();
            format!("[{}]", all.join(", "))
        }
        toml_edit::Value::InlineTable(table) => {
            let row = |(key, value): (&str, &toml_edit::Value)| format!("{} = {}", quoted(key), on_one_line(value));
            let rows: Vec<String> = table.iter().map(row).collect();
            format!("{{ {} }}", rows.join(", "))
        }
        _ => text.trim().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_run_says_its_settings_and_its_state() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a/b");
        fs::create_dir_all(run.join("checkpoint-10")).unwrap();
        fs::create_dir_all(run.join("checkpoint-5")).unwrap();
        let resolved = "[train]\nstage = \"sft\"  # recipe\nbatch_size = 4  # default: x\n[tune.lora]\nr = 8\n";
        fs::write(run.join("resolved.toml"), resolved).unwrap();
        let events = |more: &str| {
            let text = format!("{{\"event\":\"start\",\"steps\":20,\"time\":1.5}}\n{more}");
            fs::write(run.join("events.jsonl"), text).unwrap();
        };
        events("{\"event\":\"warning\",\"message\":\"m\",\"time\":2.5}\n{\"eve");
        let record = RunRecord::read(&run).unwrap();
        assert_eq!(record.setting("train.stage"), "sft");
        assert_eq!((record.setting("tune.lora.r"), record.setting("none")), ("8", ""));
        assert_eq!((record.total_steps, &*record.state), (Some(20), "interrupted"));
        assert_eq!(record.checkpoints, [5, 10]);
        assert_eq!((record.began, record.ended), (Some(1.5), Some(2.5)));
        assert_eq!(record.resumed, Some(1.5));
        assert_eq!(record.warnings, ["m"]);
        events("{\"event\":\"stop\",\"step\":20,\"reason\":\"done\",\"time\":9.0}\n");
        assert_eq!(RunRecord::read(&run).unwrap().state, "done");
        assert_eq!(find(&[dir.path().to_path_buf()]).unwrap(), std::slice::from_ref(&run));
        assert!(find(&[dir.path().join("none")]).is_err() && RunRecord::read(dir.path()).is_err());
    }

    #[test]
    fn a_run_that_is_named_twice_is_there_once() {
        let dir = tempfile::tempdir().unwrap();
        let runs = ["a", "b"].map(|name| dir.path().join(name));
        for run in &runs {
            fs::create_dir(run).unwrap();
            fs::write(run.join("resolved.toml"), "").unwrap();
            fs::write(run.join("events.jsonl"), "").unwrap();
        }
        let [a, b] = runs;
        assert_eq!(find(&[a.clone(), b.clone(), dir.path().into()]).unwrap(), [a, b]);
    }

    #[test]
    fn a_setting_is_its_whole_value_on_one_line() {
        let text = "[data]\na = \"x  # y\"  # recipe\nb = \"\"\"\n[c]\nd = 1  # argument\n\"\"\"  # default: a # b\n\
                    e = [\"\"\"\n1\n2\"\"\", 'z']\n[data.f]\ng = { h = 1.5 }\n# i = 2\n";
        let row = |all: [&str; 3]| all.map(String::from);
        let expected = [
            row(["data.a", "\"x  # y\"", "recipe"]),
            row(["data.b", r#""[c]\nd = 1  # argument\n""#, "default: a # b"]),
            row(["data.e", r#"["1\n2", 'z']"#, ""]),
            row(["data.f.g", "{ h = 1.5 }", ""]),
        ];
        assert_eq!(settings(text).unwrap(), expected);
    }

    #[test]
    fn an_id_is_not_masked_for_the_card_and_a_password_is() {
        let dir = tempfile::tempdir().unwrap();
        let resolved = "[model]\npath = \"sk-europarl-newstest2021-model\"\n[data]\ntrain = [\"a/b\", \"https://me:pw@host/x.jsonl\"]\n";
        fs::write(dir.path().join("resolved.toml"), resolved).unwrap();
        fs::write(dir.path().join("events.jsonl"), "").unwrap();
        let record = RunRecord::read(dir.path()).unwrap();
        assert_eq!(record.setting("model.path"), secrets::MASK);
        assert_eq!(record.place("model.path"), "\"sk-europarl-newstest2021-model\"");
        let train = "[\"a/b\", \"https://<secret>@host/x.jsonl\"]";
        assert_eq!((record.place("data.train"), record.place("data.sources")), (train, ""));
        assert_eq!(record.settings["data.train"], train);
    }

    #[test]
    fn a_run_of_another_machine_is_not_called_interrupted() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        fs::write(run.join("resolved.toml"), "").unwrap();
        fs::write(
            run.join("events.jsonl"),
            "{\"event\":\"start\",\"steps\":20,\"time\":1.5}\n",
        )
        .unwrap();
        fs::write(run.join("metrics.jsonl"), "").unwrap();
        let line = "process 1 since 2026-01-01 00:00:00 UTC on far.away (process namespace 7)\n";
        fs::write(run.join(lock::NAME), line).unwrap();
        let record = RunRecord::read(run).unwrap();
        assert_eq!((&*record.state, record.is_running()), ("running on far.away?", true));
        let age = |name: &str, seconds: u64| {
            let file = fs::OpenOptions::new().write(true).open(run.join(name)).unwrap();
            let then = std::time::SystemTime::now() - Duration::from_secs(seconds);
            file.set_modified(then).unwrap();
        };
        age("events.jsonl", 3600);
        age("metrics.jsonl", 300);
        assert!(RunRecord::read(run).unwrap().is_running());
        age("metrics.jsonl", 700);
        let record = RunRecord::read(run).unwrap();
        let expected = ("unknown (started on far.away)", false);
        assert_eq!((&*record.state, record.is_running()), expected);
        // A run that stopped has the state of its stop.
        let stop = "{\"event\":\"stop\",\"step\":20,\"reason\":\"done\",\"time\":9.0}\n";
        fs::write(run.join("events.jsonl"), stop).unwrap();
        assert_eq!(RunRecord::read(run).unwrap().state, "done");
    }

    #[test]
    fn deep_settings_are_refused_and_links_are_not_followed() {
        assert_eq!(
            nesting("[a.b]\nc = 1.5\nd.e = [[1.5, 2.5], { f = \"[[[.\" }]  # [[.\n"),
            4
        );
        assert_eq!(nesting("a = \"\"\"\n\"[[[[\\\"\"\"\"\nb = 'x\\'\nc = []"), 1);
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("events.jsonl", "");
        let key = vec!["a"; 60].join(".");
        for deep in [
            format!("{}=1{}", format!("{key} = {{").repeat(70), "}".repeat(70)),
            format!("a = {}", "[".repeat(100_000)),
            format!("{}a = 1", "a.".repeat(100_000)),
        ] {
            write("resolved.toml", &deep);
            let refused = RunRecord::read(dir.path()).unwrap_err().to_string();
            assert!(refused.contains("at most 64 levels"), "{refused}");
        }
        write("resolved.toml", &format!("{key} = 1\n"));
        assert_eq!(RunRecord::read(dir.path()).unwrap().settings[&key], "1");
        let warning = "{\"event\":\"warning\",\"message\":\"m\"}\n";
        write("events.jsonl", &warning.repeat(1005));
        let record = RunRecord::read(dir.path()).unwrap();
        assert_eq!(record.warnings[1000..], ["5 more warnings are in `events.jsonl`"]);
        write("other", "{\"event\":\"start\",\"steps\":3}\n");
        fs::remove_file(dir.path().join("events.jsonl")).unwrap();
        std::os::unix::fs::symlink("other", dir.path().join("events.jsonl")).unwrap();
        let refused = RunRecord::read(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("a symbolic link"), "{refused}");
    }
}
