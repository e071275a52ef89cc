//! One run as JSON for the page: everything that its tabs show. Files of a run may come from somebody else, so a file that is
//! damaged or too large is left out, and nothing is taken as markup.

use crate::base::{Result, files};
use crate::history::{RunRecord, each_line};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

/// Most points of a curve that are in memory, also while the curve is read.
const POINTS: usize = 3000;
/// The newest events and samples that the page has.
const EVENTS: usize = 500;
const SAMPLES: usize = 200;
const ROWS: usize = 50;
const MOST_COMMANDS: usize = 20;
/// Larger descriptions are not those of a run.
const MOST_BYTES: u64 = 8 << 20;

fn text(run: &Path, name: &str) -> Option<String> {
    let path = run.join(name);
    let small = files::size(&path).is_ok_and(|size| size <= MOST_BYTES);
    small.then(|| files::read_text(&path).ok()).flatten()
}

fn object(run: &Path, name: &str) -> Value {
    let text = text(run, name);
    text.and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or(Value::Null)
}

/// The last `most` lines that are JSON.
pub fn last_lines(run: &Path, name: &str, most: usize) -> Vec<Value> {
    let mut lines = VecDeque::new();
    // Without the file there are none.
    let _ = each_line(&run.join(name), |line| {
        if let Ok(value) = serde_json::from_slice::<Value>(line) {
            if lines.len() == most {
                lines.pop_front();
            }
            lines.push_back(value);
        }
        Ok(())
    });
    lines.into()
}

/// Keys with value and origin: `train.batch_size`, `8`, `recipe`.
fn settings(resolved: &str) -> Vec<[String; 3]> {
    let (mut table, mut all) = (String::new(), Vec::new());
    for line in resolved.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            table = format!("{name}.");
        } else if let Some((key, rest)) = line.split_once(" = ").filter(|(key, _)| !key.starts_with('#')) {
            let (value, origin) = rest.rsplit_once("  # ").unwrap_or((rest, ""));
            all.push([format!("{table}{key}"), value.to_string(), origin.to_string()]);
        }
    }
    all
}

/// The commands that started and resumed the run, as they were given; for a run that does not say them, the command that starts
/// the same run.
fn command(run: &Path, settings: &[[String; 3]]) -> Value {
    let mut given: Vec<String> = Vec::new();
    // Without the file there are none.
    let _ = each_line(&run.join("events.jsonl"), |line| {
        let event: Value = serde_json::from_slice(line).unwrap_or_default();
        let command = event["command"]
            .as_str()
            .filter(|command| !given.iter().any(|g| g == command));
        given.extend(command.filter(|_| given.len() < MOST_COMMANDS).map(str::to_string));
        Ok(())
    });
    if !given.is_empty() {
        return json!({"lines": given, "given": true});
    }
    let arguments = settings.iter().filter(|[_, _, origin]| origin == "argument");
    let arguments: String = arguments.map(|[key, value, _]| format!(" {key}={value}")).collect();
    let line = format!("ft train --recipe {}{arguments}", run.join("recipe.toml").display());
    json!({"lines": [line], "given": false})
}

/// A run in the list: its name and what it is, without its numbers.
///
/// Errors: it is no run.
pub fn entry(id: usize, run: &Path) -> Result<Value> {
    let record = RunRecord::read_at_most(run, 0)?;
    Ok(json!({
        "id": id, "name": run.display().to_string(), "state": record.state, "stage": record.setting("train.stage"),
        "method": record.setting("tune.method"), "model": record.setting("model.path"),
        "steps": record.total_steps, "began": record.began,
    }))
}

/// All of a run. `metrics_bytes` and `events_bytes` are the places from which a reader follows the files.
///
/// Errors: it is no run; a file cannot be read.
pub fn view(id: usize, run: &Path) -> Result<Value> {
    let events_bytes = files::size(&run.join("events.jsonl")).unwrap_or(0);
    let samples_bytes = files::size(&run.join("samples.jsonl")).unwrap_or(0);
    let record = RunRecord::read_at_most(run, POINTS)?;
    let settings = settings(&text(run, "resolved.toml").unwrap_or_default());
    let mut events = last_lines(run, "events.jsonl", EVENTS);
    let command = command(run, &settings);
    events.iter_mut().for_each(shorten);
    let curves: BTreeMap<&str, Value> = (record.curves.names())
        .filter_map(|name| {
            let points = &record.curves.get(name)?.points;
            Some((name, json!(points)))
        })
        .collect();
    let mut samples = BTreeMap::new();
    for (n, line) in last_lines(run, "samples.jsonl", SAMPLES).into_iter().enumerate() {
        // An answer that was given again after a resume replaces the earlier one.
        let again =
            (!line["when"].is_null()).then(|| [&line["step"], &line["when"], &line["prompt"]].map(Value::to_string));
        let key = again.map_or(format!("{n:09}"), |key| key.join(" "));
        samples.insert(key, (n, line));
    }
    let mut samples: Vec<(usize, Value)> = samples.into_values().collect();
    samples.sort_by_key(|(n, _)| *n);
    Ok(json!({
        "id": id, "name": run.display().to_string(), "state": record.state,
        "stage": record.setting("train.stage"), "method": record.setting("tune.method"),
        "model": record.setting("model.path"), "steps": record.curves.steps, "total_steps": record.total_steps,
        "began": record.began, "ended": record.ended, "planned_bytes": record.planned_bytes,
        "checkpoints": record.checkpoints, "warnings": record.warnings, "settings": settings, "command": command,
        "recipe": text(run, "recipe.toml"), "plan": object(run, "plan.json"),
        "environment": object(run, "environment.json"), "curves": curves, "switches": record.curves.switches,
        "events": events, "samples": samples.into_iter().map(|(_, line)| line).collect::<Vec<_>>(),
        "rows": first_lines(run, "rows.jsonl"), "metrics_bytes": record.curves.bytes,
        "events_bytes": events_bytes, "samples_bytes": samples_bytes,
    }))
}

fn first_lines(run: &Path, name: &str) -> Vec<Value> {
    let text = text(run, name).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    lines.take(ROWS).collect()
}

/// Lists of numbers for each layer are long, and the page does not draw them.
fn shorten(event: &mut Value) {
    for (_, value) in event.as_object_mut().into_iter().flatten() {
        if value.to_string().len() > 2000 {
            *value = json!("(long)");
        }
    }
}

/// JSON that can stand inside of a `script` element.
pub fn inside_markup(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_view_has_what_the_files_say_and_no_markup() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        let resolved = "[model]\npath = \"</script>\"  # recipe\n[train]\nbatch_size = 4  # default: x\n\
                        max_steps = 9  # argument\n# none = 1  # no effect\n";
        fs::write(run.join("resolved.toml"), resolved).unwrap();
        fs::write(
            run.join("events.jsonl"),
            "{\"event\":\"start\",\"steps\":9,\"time\":1.0}\n",
        )
        .unwrap();
        let metrics = "{\"step\":1,\"loss\":2.5,\"time\":3.0}\n{\"step\":2,\"lo";
        fs::write(run.join("metrics.jsonl"), metrics).unwrap();
        let sample = |step: u64, when: &str, text: &str| {
            format!("{{\"step\":{step},\"when\":\"{when}\",\"prompt\":\"p\",\"completion\":\"{text}\"}}\n")
        };
        let samples = [
            sample(0, "before", "a"),
            sample(9, "after", "b"),
            sample(9, "after", "c"),
        ]
        .concat();
        fs::write(run.join("samples.jsonl"), samples).unwrap();
        fs::write(run.join("plan.json"), "{damaged").unwrap();
        let seen = view(3, run).unwrap();
        assert_eq!(seen["settings"][1], json!(["train.batch_size", "4", "default: x"]));
        assert_eq!(seen["settings"].as_array().unwrap().len(), 3);
        let line = seen["command"]["lines"][0].as_str().unwrap();
        assert!(line.ends_with("recipe.toml train.max_steps=9"), "{line}");
        assert_eq!(seen["curves"]["loss"], json!([[1, 2.5]]));
        assert_eq!(seen["metrics_bytes"], json!(metrics.find('\n').unwrap() + 1));
        let texts: Vec<&str> = seen["samples"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|s| s["completion"].as_str())
            .collect();
        assert_eq!(texts, ["a", "c"]);
        assert!(seen["plan"].is_null() && !inside_markup(&seen).contains('<'));
        assert_eq!(entry(3, run).unwrap()["steps"], 9);
        let started = "{\"event\":\"start\",\"steps\":9,\"command\":\"ft train a.toml\",\"time\":1.0}\n";
        fs::write(run.join("events.jsonl"), started).unwrap();
        assert_eq!(
            view(3, run).unwrap()["command"],
            json!({"lines": ["ft train a.toml"], "given": true})
        );
    }
}
