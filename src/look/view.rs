//! One run as JSON for the page: everything that its tabs show. Files of a run may come from somebody else, so a file that is
//! damaged, too large or a link is left out, and nothing is taken as markup.

use crate::base::paths::shell_word;
use crate::base::{Error, Result, files, secrets};
use crate::history::{self, RunRecord, each_own_line, read_own_text};
use crate::report::visible;
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
/// Most bytes of the lines of one file that the page has.
const MOST_BYTES: u64 = 32 << 20;

fn text(run: &Path, name: &str) -> Option<String> {
    read_own_text(&run.join(name)).ok()
}

fn object(run: &Path, name: &str) -> Value {
    let text = text(run, name);
    text.and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or(Value::Null)
}

/// A line that is a JSON object.
pub fn entry_of(line: &[u8]) -> Option<Value> {
    serde_json::from_slice(line).ok().filter(Value::is_object)
}

/// The last `most` lines that are JSON objects.
pub fn last_lines(run: &Path, name: &str, most: usize) -> Vec<Value> {
    let (mut lines, mut bytes) = (VecDeque::new(), 0);
    // Without the file there are none.
    let _ = each_own_line(&run.join(name), |line, length| {
        if let Some(value) = entry_of(line) {
            lines.push_back((length, value));
            bytes += length;
            while lines.len() > most || bytes > MOST_BYTES {
                bytes -= lines.pop_front().map_or(bytes, |(length, _)| length);
            }
        }
        Ok(())
    });
    lines.into_iter().map(|(_, value)| value).collect()
}

/// Keys with value and origin, without secrets. A damaged text has none.
fn settings(resolved: &str) -> Vec<[String; 3]> {
    let masked = |[key, value, origin]: [String; 3]| {
        // The key may tell that the value is a secret.
        let begin = format!("{key} = ");
        let line = secrets::mask(&format!("{begin}{value}"));
        let value = line
            .strip_prefix(&begin)
            .map_or_else(|| secrets::mask(&value), String::from);
        [key, value, secrets::mask(&origin)]
    };
    let all = history::settings(resolved).unwrap_or_default();
    all.into_iter().map(masked).collect()
}

/// The commands that started and resumed the run, as they were given; for a run that does not say them, the command that starts
/// the same run. `copied`: for each line, whether the page offers to copy it; one with characters that are not seen may be another
/// command than it looks, and one with a masked secret is another one.
fn command(run: &Path, settings: &[[String; 3]]) -> Value {
    let mut given: Vec<String> = Vec::new();
    // Without the file there are none.
    let _ = each_own_line(&run.join("events.jsonl"), |line, _| {
        let event = entry_of(line).unwrap_or_default();
        // Earlier versions recorded secrets too.
        let command = event["command"].as_str().map(secrets::mask);
        let command = command.filter(|command| !given.contains(command));
        given.extend(command.filter(|_| given.len() < MOST_COMMANDS));
        Ok(())
    });
    let is_given = !given.is_empty();
    if !is_given {
        let arguments = settings.iter().filter(|[_, _, origin]| origin == "argument");
        let arguments: String = arguments
            .map(|[key, value, _]| format!(" {}", shell_word(&format!("{key}={value}"))))
            .collect();
        let recipe = shell_word(&run.join("recipe.toml").display().to_string());
        given.push(format!("ft train --recipe {recipe}{arguments}"));
    }
    let shown: Vec<String> = given.iter().map(|line| escaped(line)).collect();
    let is_copied = |(line, shown): (&String, &String)| line == shown && !line.contains(secrets::MASK);
    let copied: Vec<bool> = given.iter().zip(&shown).map(is_copied).collect();
    json!({"lines": shown, "copied": copied, "given": is_given})
}

/// A command with escapes for what is not seen. A line break starts another command.
fn escaped(line: &str) -> String {
    let hidden = |c: char| {
        matches!(
            c,
            '\n' | '\t' | '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200d}' | '\u{2028}' | '\u{2029}'
        ) || matches!(c, '\u{2060}'..='\u{2064}' | '\u{feff}')
    };
    let mut out = String::new();
    for c in line.chars() {
        if hidden(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    visible(&out)
}

/// A run in the list: its name and what it is, without its numbers. One that cannot be read has its error.
pub fn entry(id: usize, run: &Path) -> Value {
    match RunRecord::read_at_most(run, 0) {
        Ok(record) => entry_of_record(id, run, &record),
        Err(e) => with_error(entry_of_record(id, run, &RunRecord::unreadable(run, &e)), &e),
    }
}

fn with_error(mut shown: Value, e: &Error) -> Value {
    shown["error"] = json!(e.line());
    shown
}

fn entry_of_record(id: usize, run: &Path, record: &RunRecord) -> Value {
    json!({
        "id": id, "name": run.display().to_string(), "state": record.state, "stage": record.setting("train.stage"),
        "method": record.setting("tune.method"), "model": record.setting("model.path"),
        "steps": record.total_steps, "began": record.began,
    })
}

/// All of a run. `metrics_bytes` and `events_bytes` are the places from which a reader follows the files.
///
/// Errors: it is no run; a file cannot be read.
pub fn view(id: usize, run: &Path) -> Result<Value> {
    let bytes = ["events.jsonl", "samples.jsonl"].map(|name| files::size(&run.join(name)).unwrap_or(0));
    let record = RunRecord::read_at_most(run, POINTS)?;
    Ok(view_of_record(id, run, &record, bytes))
}

/// As `view` for a run that cannot be read: its error, and what its other files say.
pub fn unreadable(id: usize, run: &Path, e: &Error) -> Value {
    with_error(view_of_record(id, run, &RunRecord::unreadable(run, e), [0; 2]), e)
}

fn view_of_record(id: usize, run: &Path, record: &RunRecord, [events_bytes, samples_bytes]: [u64; 2]) -> Value {
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
    json!({
        "id": id, "name": run.display().to_string(), "state": record.state,
        "stage": record.setting("train.stage"), "method": record.setting("tune.method"),
        "model": record.setting("model.path"), "steps": record.curves.steps, "total_steps": record.total_steps,
        "began": record.began, "ended": record.ended, "planned_bytes": record.planned_bytes,
        "checkpoints": record.checkpoints, "warnings": record.warnings, "settings": settings, "command": command,
        "recipe": text(run, "recipe.toml").map(|text| secrets::mask(&text)), "plan": object(run, "plan.json"),
        "environment": object(run, "environment.json"), "curves": curves, "switches": record.curves.switches,
        "events": events, "samples": samples.into_iter().map(|(_, line)| line).collect::<Vec<_>>(),
        "rows": first_lines(run, "rows.jsonl"), "metrics_bytes": record.curves.bytes,
        "events_bytes": events_bytes, "samples_bytes": samples_bytes,
    })
}

fn first_lines(run: &Path, name: &str) -> Vec<Value> {
    let text = text(run, name).unwrap_or_default();
    let lines = text.lines().filter_map(|line| entry_of(line.as_bytes()));
    lines.take(ROWS).collect()
}

/// Lists of numbers for each layer are long, and the page does not draw them. Secrets in other texts are masked.
fn shorten(event: &mut Value) {
    for (_, value) in event.as_object_mut().into_iter().flatten() {
        if value.to_string().len() > 2000 {
            *value = json!("(long)");
        } else if let Some(text) = value.as_str() {
            *value = json!(secrets::mask(text));
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
        let long = "[data]\nsystem_prompt = \"\"\"\na\n[b]\"\"\"  # recipe\nseed = 1  # default: x\n";
        let rows = [
            ["data.system_prompt", r#""a\n[b]""#, "recipe"],
            ["data.seed", "1", "default: x"],
        ];
        assert_eq!(settings(long), rows);
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
        assert_eq!(entry(3, run)["steps"], 9);
        let started = "{\"event\":\"start\",\"steps\":9,\"command\":\"ft train a.toml\",\"time\":1.0}\n";
        fs::write(run.join("events.jsonl"), started).unwrap();
        assert_eq!(
            view(3, run).unwrap()["command"],
            json!({"lines": ["ft train a.toml"], "copied": [true], "given": true})
        );
    }

    #[test]
    fn a_command_is_quoted_and_what_is_not_seen_is_not_copied() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a $(id)");
        fs::create_dir(&run).unwrap();
        let resolved = "[model]\npath = \"x'; `id`\"  # argument\n";
        fs::write(run.join("resolved.toml"), resolved).unwrap();
        fs::write(run.join("events.jsonl"), "").unwrap();
        let of = || view(0, &run).unwrap()["command"].clone();
        let recipe = run.join("recipe.toml").display().to_string();
        assert_eq!(
            of()["lines"][0],
            format!(r#"ft train --recipe '{recipe}' 'model.path="x'\''; `id`"'"#)
        );
        assert_eq!(of()["copied"], json!([true]));
        let start = |command: &str| json!({"event": "start", "command": command}).to_string();
        let lines = [
            start("ft a"),
            start("ft b\nid"),
            start("ft \u{202e}c"),
            start("ft\u{1b}"),
        ];
        fs::write(run.join("events.jsonl"), lines.join("\n")).unwrap();
        assert_eq!(
            of(),
            json!({
                "lines": ["ft a", "ft b\\u{a}id", "ft \\u{202e}c", "ft\\u{1b}"],
                "copied": [true, false, false, false], "given": true,
            })
        );
    }

    #[test]
    fn secrets_of_a_run_are_not_in_its_view() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        let rewards = "rewards = [\"program:sh judge.sh --api-key PLANTED1\"]";
        fs::write(
            run.join("recipe.toml"),
            format!("# token=PLANTED2\n[rlhf]\n{rewards}\n"),
        )
        .unwrap();
        fs::write(run.join("resolved.toml"), format!("[rlhf]\n{rewards}  # argument\n")).unwrap();
        let command = "ft train r.toml 'rlhf.rewards=[\"program:sh judge.sh --api-key PLANTED1\"]'";
        let events = [
            json!({"event": "start", "command": command}),
            json!({"event": "warning", "message": "https://me:PLANTED3@host does not answer"}),
            json!({"event": "stop", "reason": "--password PLANTED4 is wrong"}),
        ];
        fs::write(
            run.join("events.jsonl"),
            events.map(|event| event.to_string()).join("\n") + "\n",
        )
        .unwrap();
        let seen = view(0, run).unwrap();
        assert!(!seen.to_string().contains("PLANTED"), "{seen}");
        assert_eq!(seen["command"]["copied"], json!([false]));
        let line = seen["command"]["lines"][0].as_str().unwrap();
        assert!(line.ends_with("judge.sh --api-key <secret>\"]'"), "{line}");
        // Without a recorded command it is made of the settings.
        fs::write(run.join("events.jsonl"), "").unwrap();
        let seen = view(0, run).unwrap();
        assert!(!seen.to_string().contains("PLANTED"), "{seen}");
    }

    #[test]
    fn links_and_lines_that_are_no_objects_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs::create_dir(&run).unwrap();
        fs::write(dir.path().join("token"), "{\"secret\":1}\n").unwrap();
        for name in [
            "recipe.toml",
            "samples.jsonl",
            "rows.jsonl",
            "plan.json",
            "environment.json",
        ] {
            std::os::unix::fs::symlink("../token", run.join(name)).unwrap();
        }
        fs::write(run.join("resolved.toml"), "").unwrap();
        fs::write(run.join("events.jsonl"), "null\n3\n[1]\n{\"event\":\"start\"}\n").unwrap();
        // The run directory may be a link.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("run", &link).unwrap();
        let seen = view(0, &link).unwrap();
        assert_eq!(seen["events"], json!([{"event": "start"}]));
        assert!(!seen.to_string().contains("secret"), "{seen}");
        std::os::unix::fs::symlink("../token", run.join("metrics.jsonl")).unwrap();
        assert!(view(0, &link).unwrap_err().to_string().contains("a symbolic link"));
    }
}
