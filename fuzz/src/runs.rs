//! Files of a run directory as `ft runs` and `ft dash` read them, and what is written of them for other tools.

use super::{dir, events, put, said};
use ft::history;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// A run of which one file has these bytes.
fn run_with(name: &str, bytes: &[u8]) {
    for (file, good) in [
        ("resolved.toml", "[train]\nmax_steps = 2\n"),
        ("events.jsonl", "{\"event\":\"start\",\"steps\":2,\"time\":1.0}\n"),
        (
            "metrics.jsonl",
            "{\"step\":1,\"loss\":2.0}\n{\"step\":2,\"loss\":1.0}\n",
        ),
        ("plan.json", "{}"),
    ] {
        put(&format!("run/{file}"), good.as_bytes());
    }
    let path = put(&format!("run/{name}"), bytes);
    let dir = path.parent().unwrap();
    let without = said(history::RunRecord::read_at_most(dir, 0));
    let Some(run) = said(history::RunRecord::read(dir)) else {
        // The metrics are not read without curves, and a line of them is never an error.
        assert!(without.is_none());
        return;
    };
    for name in run.curves.names() {
        let Some(curve) = run.curves.get(name) else { continue };
        curve.recent(3);
        let steps = |curve: &history::Curve| curve.points.iter().map(|(step, _)| *step).collect::<Vec<_>>();
        assert_eq!(steps(&curve.smoothed()), steps(curve));
        let thin = curve.thinned(7).points;
        assert!(thin.len() <= 7 && thin.iter().all(|point| curve.points.contains(point)));
    }
    // All but the curves is the same.
    let all = |mut run: history::RunRecord| {
        run.curves = history::Curves::default();
        format!("{run:?}")
    };
    assert_eq!(all(without.unwrap()), all(run));
}

/// The name of a metric in other tools.
fn tag(name: &str) -> String {
    match name.strip_prefix("eval_") {
        Some(rest) => format!("eval/{rest}"),
        None => format!("train/{name}"),
    }
}

/// A line of metrics as an event of TensorBoard.
fn numbers(line: &[u8]) -> Option<events::Event> {
    let line: Value = serde_json::from_slice(line).ok()?;
    let step = line.get("step")?.as_u64()?;
    let others = line
        .as_object()?
        .iter()
        .filter(|(name, _)| *name != "step" && *name != "time");
    let values = others.filter_map(|(name, value)| Some((tag(name), value.as_f64()? as f32)));
    Some((
        line.get("time").and_then(Value::as_f64).unwrap_or(10.0),
        step,
        values.collect(),
    ))
}

/// The cells of a table with commas, as RFC 4180 says; a lone carriage return also ends a line, as in most readers.
fn table(text: &str) -> Vec<Vec<String>> {
    let mut rows = vec![vec![String::new()]];
    let mut quoted = false;
    let mut left = text.chars().peekable();
    while let Some(c) = left.next() {
        let row = rows.last_mut().unwrap();
        match c {
            '"' if quoted && left.next_if_eq(&'"').is_some() => row.last_mut().unwrap().push('"'),
            '"' => quoted = !quoted,
            ',' if !quoted => row.push(String::new()),
            '\n' | '\r' if !quoted => rows.push(vec![String::new()]),
            c => row.last_mut().unwrap().push(c),
        }
    }
    rows.pop();
    rows
}

/// What the table of these metrics must have. The times are those of `found`: their form is another matter.
fn numbers_as_table(bytes: &[u8], found: &[Vec<String>]) -> Vec<Vec<String>> {
    type Line = (u64, BTreeMap<String, f64>);
    let line = |line: &[u8]| -> Option<Line> {
        let line: Map<String, Value> = serde_json::from_slice(line).ok()?;
        let others = line.iter().filter(|(name, _)| *name != "step" && *name != "time");
        let values = others.filter_map(|(name, value)| Some((tag(name), value.as_f64()?)));
        Some((line.get("step")?.as_u64()?, values.collect()))
    };
    let lines: Vec<Line> = bytes.split(|b| *b == b'\n').filter_map(line).collect();
    let names: BTreeSet<&String> = lines.iter().flat_map(|(_, values)| values.keys()).collect();
    let head = ["step", "timestamp"].map(String::from).into_iter();
    let mut rows = vec![head.chain(names.iter().map(|name| name.to_string())).collect()];
    for (at, (step, values)) in lines.iter().enumerate() {
        let time = found
            .get(at + 1)
            .and_then(|row| row.get(1))
            .cloned()
            .unwrap_or_default();
        let cell = |name: &&String| values.get(*name).map(f64::to_string).unwrap_or_default();
        rows.push(
            [step.to_string(), time]
                .into_iter()
                .chain(names.iter().map(cell))
                .collect(),
        );
    }
    rows
}

/// Also what is written of them for other tools.
pub(super) fn metrics(bytes: &[u8]) {
    run_with("metrics.jsonl", bytes);
    let write = |form| {
        said(history::export(
            &dir().join("run"),
            form,
            10.0,
            &BTreeMap::new(),
            &dir().join("out"),
        ))
    };
    if let Some(files) = write(history::ExportFormat::TensorBoard) {
        let written = events::read(&fs::read(&files[0]).unwrap());
        let wanted: Vec<events::Event> = bytes.split(|b| *b == b'\n').filter_map(numbers).collect();
        assert_eq!(format!("{written:?}"), format!("{wanted:?}"));
    }
    if let Some(files) = write(history::ExportFormat::Csv) {
        let found = table(&fs::read_to_string(&files[0]).unwrap());
        assert_eq!(found, numbers_as_table(bytes, &found));
    }
    if let Some(files) = write(history::ExportFormat::Wandb) {
        let text = fs::read_to_string(&files[0]).unwrap();
        assert!(text.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    }
}

pub(super) fn event_lines(bytes: &[u8]) {
    run_with("events.jsonl", bytes);
}

pub(super) fn resolved(bytes: &[u8]) {
    run_with("resolved.toml", bytes);
}
