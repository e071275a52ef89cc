//! One run: its settings, its state, its numbers.

use super::Curves;
use crate::base::{Error, Result, files, lock};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml_edit::{DocumentMut, TableLike};

/// The content of the files of a run directory.
#[derive(Debug, Clone)]
pub struct RunRecord {
    pub path: PathBuf,
    /// Recipe keys and their values as TOML text, from `resolved.toml`.
    pub settings: BTreeMap<String, String>,
    pub curves: Curves,
    /// Steps of the whole run, once it has started.
    pub total_steps: Option<u64>,
    /// `running`, `done`, `early stopping`, `stopped` (by a signal), `interrupted`, or the reason of its end.
    pub state: String,
    /// Steps of the checkpoints.
    pub checkpoints: Vec<u64>,
    /// Unix seconds of the first and the last event.
    pub began: Option<f64>,
    pub ended: Option<f64>,
    /// Forecast of the peak memory in bytes.
    pub planned_bytes: Option<u64>,
    pub warnings: Vec<String>,
}

/// True for a directory with the files of a run.
fn is_run(path: &Path) -> bool {
    ["resolved.toml", "events.jsonl"]
        .iter()
        .all(|name| path.join(name).is_file())
}

/// The runs in these directories, by path: each is a run, or has runs in it (up to three levels).
///
/// Errors: a directory cannot be listed; there is no run.
pub fn find(places: &[PathBuf]) -> Result<Vec<PathBuf>> {
    fn below(path: &Path, depth: usize, out: &mut Vec<PathBuf>) -> Result<()> {
        if is_run(path) {
            out.push(path.to_path_buf());
        } else if depth > 0 {
            let inner = files::list(path)?;
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
            return Err(Error::usage("there is no such directory")
                .at_path(place)
                .hint("give a run directory, or a directory with runs; the default is `runs`"));
        }
        below(place, 3, &mut out)?;
    }
    out.dedup();
    Ok(out)
}

impl RunRecord {
    /// Reads a run directory. A run may be in progress: its last lines count if they are complete.
    ///
    /// Errors: it is no run; a file cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_at_most(path, usize::MAX)
    }

    /// As `read`, with curves of at most `most` points (`Curve::thinned`); 0: the metrics are not read.
    pub fn read_at_most(path: &Path, most: usize) -> Result<Self> {
        if !is_run(path) {
            return Err(Error::usage("this is not a run directory")
                .at_path(path)
                .expected("a directory that `ft train` wrote (`resolved.toml`, `events.jsonl`)")
                .hint("`ft runs` lists the runs in `runs`, `ft runs list DIR` those in another directory"));
        }
        let text = files::read_text(&path.join("resolved.toml"))?;
        let table: DocumentMut = text.parse().map_err(|e| {
            Error::new("the file is damaged")
                .at_path(&path.join("resolved.toml"))
                .cause(e)
        })?;
        let mut settings = BTreeMap::new();
        flatten(table.as_table(), "", &mut settings);
        let events: Vec<Value> = files::read(&path.join("events.jsonl"))?
            .split(|b| *b == b'\n')
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect();
        let plan = files::read(&path.join("plan.json")).ok();
        let plan: Option<Value> = plan.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let time = |event: &Value| event["time"].as_f64();
        let kind = |event: &&Value, kind: &str| event["event"] == kind;
        let warnings = events.iter().filter(|e| kind(e, "warning"));
        let mut checkpoints: Vec<u64> = files::list(path)?
            .iter()
            .filter_map(|p| p.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok())
            .collect();
        checkpoints.sort_unstable();
        Ok(Self {
            path: path.to_path_buf(),
            settings,
            curves: match most {
                0 => Curves::default(),
                _ => Curves::read(path, most)?,
            },
            total_steps: events.iter().rev().find_map(|e| e["steps"].as_u64()),
            state: state(path, &events),
            checkpoints,
            began: events.first().and_then(time),
            ended: events.last().and_then(time),
            planned_bytes: plan.and_then(|plan| plan["peak_bytes"].as_u64()),
            warnings: warnings
                .filter_map(|e| Some(e["message"].as_str()?.to_string()))
                .collect(),
        })
    }

    /// A setting without quotes: `sft`.
    pub fn setting(&self, key: &str) -> &str {
        self.settings.get(key).map_or("", |value| value.trim_matches('"'))
    }
}

fn state(path: &Path, events: &[Value]) -> String {
    let of_work = |e: &&Value| ["start", "resume", "stop"].iter().any(|kind| e["event"] == *kind);
    let last = events.iter().rev().find(of_work);
    if let Some(stop) = last.filter(|e| e["event"] == "stop") {
        return match stop["reason"].as_str() {
            Some("signal") | None => "stopped".to_string(),
            Some(reason) => reason.to_string(),
        };
    }
    if lock::is_held(path) { "running" } else { "interrupted" }.to_string()
}

fn flatten(table: &dyn TableLike, prefix: &str, out: &mut BTreeMap<String, String>) {
    for (name, item) in table.iter() {
        let key = format!("{prefix}{name}");
        match item.as_table() {
            Some(inner) => flatten(inner, &format!("{key}."), out),
            None => {
                out.insert(
                    key,
                    item.to_string()
                        .split("  #")
                        .next()
                        .unwrap_or_default()
                        .trim()
                        .to_string(),
                );
            }
        }
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
        assert_eq!(record.warnings, ["m"]);
        events("{\"event\":\"stop\",\"step\":20,\"reason\":\"done\",\"time\":9.0}\n");
        assert_eq!(RunRecord::read(&run).unwrap().state, "done");
        assert_eq!(find(&[dir.path().to_path_buf()]).unwrap(), std::slice::from_ref(&run));
        assert!(find(&[dir.path().join("none")]).is_err() && RunRecord::read(dir.path()).is_err());
    }
}
