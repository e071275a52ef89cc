//! The numbers of a run for other tools: TensorBoard event files, CSV, JSON lines with the names of Weights & Biases. Files are
//! read line by line.

use super::{each_own_line, tfevents};
use crate::base::files::AtomicFile;
use crate::base::{Error, Result, files, units};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// A form of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportFormat {
    /// `events.out.tfevents.*`.
    TensorBoard,
    /// A table with the columns `step` and `timestamp`.
    Csv,
    /// A row for each step with `_step`, `_timestamp` and `_runtime`, and the settings.
    Wandb,
}

/// The name in other tools, as the integrations of transformers write it: `eval_loss` is `eval/loss`, `loss` is `train/loss`.
fn tag(name: &str) -> String {
    match name.strip_prefix("eval_") {
        Some(rest) => format!("eval/{rest}"),
        None => format!("train/{name}"),
    }
}

/// The numbers of a line: its step, its time, and the others by their tags.
struct LineNumbers {
    step: u64,
    time: Option<f64>,
    values: Vec<(String, f64)>,
}

impl LineNumbers {
    /// `None`: the line has no step.
    fn of(line: &Map<String, Value>) -> Option<Self> {
        let values = line
            .iter()
            .filter(|(name, _)| !["step", "time"].contains(&name.as_str()));
        let values = values.filter_map(|(name, value)| Some((tag(name), value.as_f64()?)));
        Some(Self {
            step: line.get("step")?.as_u64()?,
            time: line.get("time").and_then(Value::as_f64),
            values: values.collect(),
        })
    }

    /// The record of TensorBoard. `began`: the time of a line without one.
    fn scalars(&self, began: f64) -> Vec<u8> {
        tfevents::scalars(self.time.unwrap_or(began), self.step, &self.values)
    }
}

fn each(run: &Path, mut f: impl FnMut(LineNumbers) -> Result<()>) -> Result<()> {
    let path = run.join("metrics.jsonl");
    if !path.exists() {
        return Ok(());
    }
    each_own_line(&path, |line, _| match serde_json::from_slice(line) {
        Ok(Value::Object(line)) => LineNumbers::of(&line).map_or(Ok(()), &mut f),
        _ => Ok(()),
    })
}

/// The name of an event file. `second`: Unix time; TensorBoard reads files in the order of their names.
fn event_file(second: u64) -> String {
    format!("{EVENT_FILE}{second:010}.ft")
}

const EVENT_FILE: &str = "events.out.tfevents.";

/// The time in the name of an event file of ft.
fn second(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(EVENT_FILE)?.strip_suffix(".ft")?;
    digits
        .bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| digits.parse().ok())?
}

/// True for the name of an event file of ft.
pub fn is_event_file(name: &str) -> bool {
    second(name).is_some()
}

/// The record of a line of `metrics.jsonl` for an event file; empty if the line has no step.
pub fn event(line: &Map<String, Value>) -> Vec<u8> {
    LineNumbers::of(line).map_or_else(Vec::new, |n| n.scalars(0.0))
}

/// The event files of ft in a directory, with the times in their names.
fn event_files(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut all = Vec::new();
    for path in files::list(run)? {
        let named = path.file_name().and_then(|name| second(name.to_str()?));
        if let Some(time) = named.filter(|_| path.symlink_metadata().is_ok_and(|m| m.is_file())) {
            all.push((time, path));
        }
    }
    Ok(all)
}

/// Writes the event file of a run that starts or is resumed, with the numbers that `metrics.jsonl` has. `now`: Unix seconds. Returns
/// its path; records can be appended. Those before it should be emptied then, with `empty_event_files`.
///
/// The name is a later one, and the file begins with a start of the run: a TensorBoard that shows the run goes on with this
/// file, and drops what it has. It opens the file that it read before by its name once more, so that one stays, without numbers.
///
/// Errors: a file cannot be read or written; there is no new file then.
pub fn new_event_file(run: &Path, now: f64) -> Result<PathBuf> {
    let last = event_files(run)?.into_iter().map(|(time, _)| time).max();
    let path = run.join(event_file(last.map_or(0, |last| last + 1).max(now as u64)));
    let mut file = AtomicFile::create(&path)?;
    file.write(&tfevents::header(now))?;
    file.write(&tfevents::start(now))?;
    each(run, |n| file.write(&n.scalars(now)))?;
    let written = file.commit();
    if written.is_err() {
        // The caller tries again, with another name.
        let _ = files::remove_file(&path);
    }
    written.map(|()| path)
}

/// Removes all numbers from the event files of a run, but not from `newest`. `now`: Unix seconds.
///
/// Errors: that of the first file that cannot be replaced; the others are empty all the same.
pub fn empty_event_files(run: &Path, newest: &Path, now: f64) -> Result<()> {
    let header = tfevents::header(now);
    let mut emptied = Ok(());
    for (_, path) in event_files(run)? {
        if path.file_name() == newest.file_name() {
            continue;
        }
        let result = match files::size(&path) {
            Ok(size) if size <= header.len() as u64 => Ok(()),
            Ok(_) => files::write_atomic(&path, &header),
            Err(e) => Err(e),
        };
        emptied = emptied.and(result);
    }
    emptied
}

/// Writes the numbers of a run to `out`, a directory, and returns the files. `began`: Unix seconds of the start, the time of lines
/// without one. `settings`: recipe keys with their values.
///
/// Errors: a file cannot be read or written.
pub fn export(
    run: &Path,
    form: ExportFormat,
    began: f64,
    settings: &BTreeMap<String, String>,
    out: &Path,
) -> Result<Vec<PathBuf>> {
    files::create_dir_all(out)?;
    let name = match form {
        ExportFormat::TensorBoard => event_file(began as u64),
        ExportFormat::Csv => "metrics.csv".into(),
        ExportFormat::Wandb => "history.jsonl".into(),
    };
    let path = out.join(name);
    let mut file = AtomicFile::create(&path)?;
    let mut written = vec![path];
    match form {
        ExportFormat::TensorBoard => {
            file.write(&tfevents::header(began))?;
            each(run, |n| file.write(&n.scalars(began)))?;
        }
        ExportFormat::Csv => {
            let mut names = BTreeSet::new();
            each(run, |n| {
                names.extend(n.values.into_iter().map(|(name, _)| name));
                Ok(())
            })?;
            let columns: Vec<String> = ["step", "timestamp"]
                .map(String::from)
                .into_iter()
                .chain(names.iter().map(|n| quoted(n)))
                .collect();
            file.write(format!("{}\n", columns.join(",")).as_bytes())?;
            each(run, |n| {
                let seconds = n.time.unwrap_or(began).clamp(0.0, 1e11);
                let time = units::utc(UNIX_EPOCH + Duration::from_secs_f64(seconds));
                let mut cells = vec![n.step.to_string(), time.trim_end_matches(" UTC").replace(' ', "T")];
                let cell = |name: &String| {
                    n.values
                        .iter()
                        .find(|(own, _)| own == name)
                        .map(|(_, value)| value.to_string())
                };
                cells.extend(names.iter().map(|name| cell(name).unwrap_or_default()));
                file.write(format!("{}\n", cells.join(",")).as_bytes())
            })?;
        }
        ExportFormat::Wandb => {
            each(run, |n| {
                let time = n.time.unwrap_or(began);
                let mut row = Map::new();
                row.insert("_step".into(), json!(n.step));
                row.insert("_timestamp".into(), json!(time));
                row.insert("_runtime".into(), json!((time - began).max(0.0)));
                row.extend(n.values.into_iter().map(|(name, value)| (name, json!(value))));
                file.write(format!("{}\n", Value::Object(row)).as_bytes())
            })?;
            let config = out.join("config.json");
            if config.exists() && !out.join("history.jsonl").exists() {
                return Err(
                    Error::usage("the directory has a file of this name that is not of an export")
                        .at_path(&config)
                        .hint("give another directory: `--out DIR`"),
                );
            }
            // With its rows beside it.
            file.commit()?;
            files::write_atomic(&config, format!("{:#}\n", json!(settings)).as_bytes())?;
            written.push(config);
            return Ok(written);
        }
    }
    file.commit()?;
    Ok(written)
}

/// A cell of a table.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_cell_with_a_mark_of_the_table_is_quoted() {
        assert_eq!(quoted("a b"), "a b");
        for (text, wanted) in [
            ("a,b", "\"a,b\""),
            ("a\"b", "\"a\"\"b\""),
            ("a\nb", "\"a\nb\""),
            ("a\rb", "\"a\rb\""),
        ] {
            assert_eq!(quoted(text), wanted);
        }
    }

    #[test]
    fn each_form_has_all_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = "{\"step\":0,\"eval_loss\":3.5,\"time\":10.5}\n\
                       {\"step\":1,\"loss\":2.25,\"active_block\":\"a\",\"rewards/margins\":0.5,\"time\":11.5}\n\
                       {\"step\":2,\"loss\":null,\"learning_rate\":0.1}\n{\"step\":3,\"lo";
        fs::write(dir.path().join("metrics.jsonl"), metrics).unwrap();
        let settings = [("train.stage".to_string(), "\"sft\"".to_string())].into();
        let write = |form, name: &str| {
            let out = dir.path().join(name);
            export(dir.path(), form, 10.0, &settings, &out).unwrap()
        };
        let board = fs::read(&write(ExportFormat::TensorBoard, "a")[0]).unwrap();
        let events = tfevents::tests::read(&board);
        assert_eq!(events.len(), 4);
        assert_eq!(events[1], (10.5, 0, vec![("eval/loss".to_string(), 3.5)]));
        let values = vec![
            ("train/loss".to_string(), 2.25),
            ("train/rewards/margins".to_string(), 0.5),
        ];
        assert_eq!(events[2], (11.5, 1, values));
        assert_eq!((events[3].0, events[3].2[0].1), (10.0, 0.1));
        let table = fs::read_to_string(&write(ExportFormat::Csv, "b")[0]).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[0],
            "step,timestamp,eval/loss,train/learning_rate,train/loss,train/rewards/margins"
        );
        assert_eq!(lines[2], "1,1970-01-01T00:00:11,,,2.25,0.5");
        assert_eq!(lines.len(), 4);
        let files = write(ExportFormat::Wandb, "c");
        let rows = fs::read_to_string(&files[0]).unwrap();
        let row: Value = serde_json::from_str(rows.lines().nth(1).unwrap()).unwrap();
        let expected = json!({
            "_step": 1, "_timestamp": 11.5, "_runtime": 1.5, "train/loss": 2.25, "train/rewards/margins": 0.5,
        });
        assert_eq!(row, expected);
        assert!(fs::read_to_string(&files[1]).unwrap().contains("train.stage"));
    }
}
