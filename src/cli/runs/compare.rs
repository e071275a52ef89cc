//! `ft runs diff` and `ft runs compare`: settings and results of several runs side by side.

use super::{as_json, chosen, results, short};
use crate::base::Result;
use crate::base::units::table_cell;
use crate::cli::out::{out, out_text};
use crate::history::RunRecord;
use crate::report;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Settings that are not the same in all runs: their values by key, one for each run.
fn different(runs: &[&RunRecord]) -> BTreeMap<String, Vec<String>> {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let value = |run: &&RunRecord, key: &str| run.settings.get(key).map_or("-", String::as_str).to_string();
    let row = |key: &&String| -> (String, Vec<String>) {
        (key.to_string(), runs.iter().map(|run| value(run, key)).collect())
    };
    let all = keys.iter().map(row).filter(|(key, _)| key != "train.output_dir");
    all.filter(|(_, values)| values.iter().any(|v| *v != values[0]))
        .collect()
}

/// As `different`, without the settings that no run chose and that some runs do not have because they have no effect there.
fn chosen_differences(runs: &[&RunRecord]) -> Result<BTreeMap<String, Vec<String>>> {
    let mut keys = BTreeSet::new();
    for run in runs {
        keys.extend(chosen(run)?.into_iter().map(|(key, _)| key));
    }
    let mut rows = different(runs);
    rows.retain(|key, values| keys.contains(key) || !values.iter().any(|value| value == "-"));
    Ok(rows)
}

pub(super) fn diff(a: &RunRecord, b: &RunRecord, json: bool) -> Result<()> {
    let rows = if json {
        different(&[a, b])
    } else {
        chosen_differences(&[a, b])?
    };
    if rows.is_empty() && !json {
        return out_text("the settings are the same");
    }
    for (key, values) in rows {
        if json {
            out(json!({"key": key, "values": values}))?;
        } else {
            out_text(format!("{key}: {} -> {}", values[0], values[1]))?;
        }
    }
    Ok(())
}

pub(super) fn compare(runs: &[RunRecord], json: bool) -> Result<()> {
    if json {
        return runs.iter().try_for_each(|run| out(as_json(run)));
    }
    let all: Vec<&RunRecord> = runs.iter().collect();
    let mut rows: Vec<(String, Vec<String>)> = vec![
        (
            "run".into(),
            runs.iter().map(|run| run.path.display().to_string()).collect(),
        ),
        ("state".into(), runs.iter().map(|run| run.state.clone()).collect()),
        (
            "steps".into(),
            runs.iter().map(|run| run.curves.steps.to_string()).collect(),
        ),
    ];
    rows.extend(chosen_differences(&all)?);
    let results: Vec<_> = runs.iter().map(results).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, ..) in results.iter().flatten() {
        if !names.contains(name) {
            names.push(name);
        }
    }
    for name in names {
        let of = |numbers: &Vec<(&str, Value, String)>| {
            let found = numbers.iter().find(|(n, ..)| *n == name);
            found.map_or("-".to_string(), |(_, _, text)| text.clone())
        };
        rows.push((short(name).to_string(), results.iter().map(of).collect()));
    }
    match report::result_width() {
        Some(width) => table_within(rows, width).iter().try_for_each(out_text),
        None => table(rows).iter().try_for_each(out),
    }
}

/// As `table`. If a line is longer than `width`, each value has a line of its own below its name, with its run.
fn table_within(rows: Vec<(String, Vec<String>)>, width: usize) -> Vec<String> {
    let lines = table(rows.clone());
    if lines.iter().all(|line| report::columns(line) <= width) {
        return lines;
    }
    let mut rows = rows.into_iter();
    let runs = rows.next().map_or(Vec::new(), |(_, runs)| runs);
    let mut lines = Vec::new();
    for (name, values) in rows {
        lines.push(table_cell(&name));
        let values = runs
            .iter()
            .zip(values)
            .map(|(run, value)| (format!("  {run}"), vec![value]));
        lines.extend(table(values.collect()));
    }
    lines
}

/// The lines of a table with columns of equal width. Every row has a name and as many values as the first.
pub(super) fn table(mut rows: Vec<(String, Vec<String>)>) -> Vec<String> {
    for (name, values) in &mut rows {
        *name = table_cell(name);
        values.iter_mut().for_each(|value| *value = table_cell(value));
    }
    let wide = |text: &String| text.chars().count();
    let first = rows.iter().map(|(name, _)| wide(name)).max().unwrap_or(0);
    let columns = rows.first().map_or(0, |(_, values)| values.len());
    let widths: Vec<usize> = (0..columns)
        .map(|i| rows.iter().map(|(_, v)| wide(&v[i])).max().unwrap_or(0))
        .collect();
    let line = |(name, values): &(String, Vec<String>)| {
        let cells: Vec<String> = values
            .iter()
            .zip(&widths)
            .map(|(value, width)| format!("{value:<width$}"))
            .collect();
        let line = format!("{name:<first$}  {}", cells.join("  "));
        line.trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_too_wide_has_a_line_for_each_value() {
        let row = |name: &str, values: [&str; 2]| (name.to_string(), values.map(str::to_string).to_vec());
        let rows = vec![row("run", ["runs/a", "runs/longer"]), row("steps", ["4", "8"])];
        assert_eq!(table_within(rows.clone(), 26).len(), 2);
        let lines = table_within(rows, 25);
        assert_eq!(lines, ["steps", "  runs/a       4", "  runs/longer  8"]);
    }

    #[test]
    fn a_comparison_leaves_out_defaults_that_the_other_run_does_not_have() {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str, resolved: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("resolved.toml"), resolved).unwrap();
            std::fs::write(path.join("events.jsonl"), "").unwrap();
            RunRecord::read(&path).unwrap()
        };
        let block = "[tune]\nmethod = \"block\"  # recipe\n[tune.block]\nswitch_every = 5  # recipe\norder = \"random\"  # default: x\n";
        let full = "[tune]\nmethod = \"full\"  # recipe\n[tune.block]\n# order = \"random\"  # no effect with x\n";
        let found = chosen_differences(&[&run("a", block), &run("b", full)]).unwrap();
        let keys: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(keys, ["tune.block.switch_every", "tune.method"]);
        assert_eq!(found["tune.block.switch_every"], ["5", "-"]);
    }
}
