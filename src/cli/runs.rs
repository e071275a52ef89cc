//! `ft runs`: lists, shows, compares, plots and verifies runs from the files of their directories.

mod compare;

use super::completions;
use super::out::{exit_code_if_closed, out, out_colored, out_text};
use crate::base::units::{bytes, count, duration};
use crate::base::{Error, Result, files, secrets};
use crate::history::{self, Curve, RunRecord};
use crate::report;
use crate::train::verify::{self, CheckedDirectory};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Runs: list, show, diff, compare, plot, verify, export
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft runs                             the runs in `runs`
  ft runs show runs/sft               settings, numbers, warnings
  ft runs diff runs/a runs/b          settings that differ
  ft runs compare runs/*              settings that differ, and the results
  ft runs plot runs/a runs/b          their losses in the terminal
  ft runs plot runs/a --svg a.svg     all its curves for a browser
  ft runs verify runs/a               compare saved files with their hashes
  ft runs export runs/* --to tensorboard --out logs

A run writes `curves.svg` to its directory when it saves.")]
pub struct Args {
    #[command(subcommand)]
    action: Option<RunsAction>,
    /// Print JSON, one object per line
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum RunsAction {
    /// List the runs in directories [default: runs]
    List {
        /// Run directories, or directories with runs
        #[arg(add = completions::run_directory())]
        places: Vec<PathBuf>,
    },
    /// Show one run
    Show {
        /// A run directory
        #[arg(add = completions::run_directory())]
        run: PathBuf,
    },
    /// Show the settings of two runs that differ
    Diff {
        /// A run directory
        #[arg(add = completions::run_directory())]
        a: PathBuf,
        /// Another one
        #[arg(add = completions::run_directory())]
        b: PathBuf,
    },
    /// Compare settings and results of runs
    Compare {
        /// Run directories, or directories with runs
        #[arg(required = true, add = completions::run_directory())]
        places: Vec<PathBuf>,
    },
    /// Plot a metric of one or several runs
    Plot {
        /// Run directories, or directories with runs
        #[arg(required = true, add = completions::run_directory())]
        places: Vec<PathBuf>,
        /// The metric: a name in `metrics.jsonl`
        #[arg(long, default_value = "loss")]
        metric: String,
        /// Plot the values as they are, not smoothed
        #[arg(long)]
        raw: bool,
        /// Write all curves of one run as a picture, instead
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
    /// Compare every file of checkpoints and `final/` with the hash that the run stored
    Verify {
        /// Run directories, or directories with runs
        #[arg(required = true, add = completions::run_directory())]
        places: Vec<PathBuf>,
    },
    /// Write the numbers of runs for TensorBoard, trackio or Weights & Biases
    Export {
        /// Run directories, or directories with runs
        #[arg(required = true, add = completions::run_directory())]
        places: Vec<PathBuf>,
        /// The form: event files; a table with step and timestamp; rows with `_step` and `_timestamp`
        #[arg(long, value_enum)]
        to: ExportTarget,
        /// The directory; a folder for each run is made in it
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum ExportTarget {
    Tensorboard,
    Csv,
    Wandb,
}

/// Steps in the mean of a shown loss.
const RECENT: usize = 10;

pub fn run(args: Args) -> Result<i32> {
    let json = args.json;
    match args.action.unwrap_or(RunsAction::List { places: Vec::new() }) {
        RunsAction::List { places } => list(&places, json)?,
        RunsAction::Show { run } => show(&RunRecord::read(&run)?, json)?,
        RunsAction::Diff { a, b } => compare::diff(&RunRecord::read(&a)?, &RunRecord::read(&b)?, json)?,
        RunsAction::Compare { places } => compare::compare(&read(&places, usize::MAX)?, json)?,
        RunsAction::Plot {
            places,
            metric,
            raw,
            svg,
        } => plot(&read(&places, usize::MAX)?, &metric, raw, svg.as_deref(), json)?,
        RunsAction::Verify { places } => return verify(&places, json),
        RunsAction::Export { places, to, out } => export(&places, to, &out)?,
    }
    Ok(0)
}

/// Returns the exit code: 1 if anything is damaged or cannot be read.
fn verify(places: &[PathBuf], json: bool) -> Result<i32> {
    // A damaged run may not be recognized by its other files.
    let is_run = |place: &&PathBuf| place.join("run.json").is_file();
    let (named, others): (Vec<&PathBuf>, Vec<&PathBuf>) = places.iter().partition(is_run);
    let others: Vec<PathBuf> = others.into_iter().cloned().collect();
    let mut runs: Vec<PathBuf> = named.into_iter().cloned().collect();
    if !others.is_empty() {
        runs.extend(find(&others)?);
    }
    let mut all = Vec::new();
    for run in &runs {
        // A run that cannot be read does not hide the others: a row without a number of files.
        let unreadable = |e| {
            vec![CheckedDirectory {
                path: run.clone(),
                files: None,
                errors: vec![e],
            }]
        };
        all.extend(verify::verify(run).unwrap_or_else(unreadable));
    }
    let code = i32::from(all.iter().any(|checked| !checked.errors.is_empty()));
    exit_code_if_closed(code);
    for checked in all {
        let place = checked.path.display();
        if json {
            let errors: Vec<String> = checked.errors.iter().map(Error::line).collect();
            out(json!({"path": place.to_string(), "files": checked.files, "errors": errors}))?;
            continue;
        }
        match (checked.errors.is_empty(), checked.files) {
            (true, Some(files)) => out_text(format!("{place}: whole, {files} files"))?,
            (true, None) => out_text(format!("{place}: no hashes, written by an earlier version"))?,
            (false, Some(_)) => out_text(format!("{place}: damaged"))?,
            (false, None) => out_text(format!("{place}: cannot be read"))?,
        }
        (checked.errors.iter()).try_for_each(|e| out_text(format!("  {}", e.line())))?;
    }
    Ok(code)
}

/// The runs in these places, with curves of at most `most` points. A damaged run in a folder is left out with a warning.
///
/// Errors: there is no run; none can be read; one of `places` is a run that cannot be read.
fn read(places: &[PathBuf], most: usize) -> Result<Vec<RunRecord>> {
    let found = find(places)?;
    let mut runs = Vec::new();
    for path in &found {
        match RunRecord::read_at_most(path, most) {
            Ok(run) => runs.push(run),
            Err(e) if places.contains(path) => return Err(e),
            Err(e) => {
                let reason = RunRecord::unreadable(path, &e).state;
                report::warn(&format!("{} is left out, {reason}", path.display()));
            }
        }
    }
    if runs.is_empty() {
        return Err(Error::new("none of the runs in this directory can be read")
            .at(names(places))
            .found(format!("{} damaged runs", found.len()))
            .hint("`ft runs list DIR` shows the reason for each"));
    }
    Ok(runs)
}

fn names(places: &[PathBuf]) -> String {
    let names: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    names.join(", ")
}

/// Errors: there is no run.
fn find(places: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let found = history::find(places)?;
    if found.is_empty() {
        return Err(Error::usage("there is no run in this directory")
            .at(names(places))
            .hint("`ft train` writes a run to `train.output_dir`"));
    }
    Ok(found)
}

fn export(places: &[PathBuf], to: ExportTarget, folder: &Path) -> Result<()> {
    let form = match to {
        ExportTarget::Tensorboard => history::ExportFormat::TensorBoard,
        ExportTarget::Csv => history::ExportFormat::Csv,
        ExportTarget::Wandb => history::ExportFormat::Wandb,
    };
    let (mut names, mut written) = (BTreeSet::new(), Vec::new());
    for run in read(places, 0)? {
        // `runs/a` and `old/a` have the same last name.
        let last = run
            .path
            .file_name()
            .map_or("run".into(), |name| name.to_string_lossy().into_owned());
        let numbered = (2..).map(|n| format!("{last}-{n}"));
        let name = std::iter::once(last.clone())
            .chain(numbered)
            .find(|name| !names.contains(name));
        let name = name.unwrap_or(last);
        let out_dir = folder.join(&name);
        names.insert(name);
        written.extend(history::export(
            &run.path,
            form,
            run.began.unwrap_or(0.0),
            &run.settings,
            &out_dir,
        )?);
    }
    // At the end: the output may be closed.
    written.iter().try_for_each(|file| out(file.display()))
}

fn steps(run: &RunRecord) -> String {
    match run.total_steps {
        Some(total) => format!("{} of {} steps", count(run.curves.steps), count(total)),
        None => "no step yet".to_string(),
    }
}

/// The numbers of a run: their names in the JSON output, and as text.
fn results(run: &RunRecord) -> Vec<(&'static str, Value, String)> {
    let recent = |name: &str| run.curves.get(name).and_then(|c| c.recent(RECENT));
    let last = |name: &str| run.curves.get(name).and_then(Curve::last);
    let lowest = run.curves.get("eval_loss").and_then(Curve::lowest);
    let plain = |x: f64| format!("{x:.4}");
    let mut all = Vec::new();
    let mut add = |name, value: Option<f64>, text: &dyn Fn(f64) -> String| {
        if let Some(x) = value {
            all.push((name, json!(x), text(x)));
        }
    };
    add("loss", recent("loss"), &plain);
    add("eval_loss", last("eval_loss"), &plain);
    add("best_eval_loss", lowest, &plain);
    add("eval_accuracy", last("eval_accuracy"), &plain);
    add("reward", recent("reward"), &plain);
    add("eval_reward", last("eval_reward"), &plain);
    add("tokens_per_second", recent("tokens_per_second"), &|x| format!("{x:.0}"));
    let peak = run
        .curves
        .get("peak_memory_bytes")
        .and_then(|c| c.points.iter().map(|p| p.1).reduce(f64::max));
    add("peak_memory_bytes", peak, &|x| bytes(x as u64));
    // A run in progress, or one that was killed, has made steps since its last event.
    let ended = run.ended.into_iter().chain(last("time")).reduce(f64::max);
    let time = run.began.zip(ended).map(|(began, ended)| (ended - began).max(0.0));
    add("seconds", time, &|x| {
        duration(Duration::try_from_secs_f64(x).unwrap_or_default())
    });
    all
}

fn as_json(run: &RunRecord) -> Value {
    let numbers: serde_json::Map<_, _> = results(run)
        .into_iter()
        .map(|(name, x, _)| (name.to_string(), x))
        .collect();
    json!({
        "run": run.path.display().to_string(), "state": run.state, "steps": run.curves.steps,
        "total_steps": run.total_steps, "results": numbers, "checkpoints": run.checkpoints,
        "forecast_peak_bytes": run.planned_bytes, "settings": run.settings, "warnings": run.warnings,
    })
}

fn list(places: &[PathBuf], json: bool) -> Result<()> {
    let default = [PathBuf::from("runs")];
    for path in find(if places.is_empty() { &default } else { places })? {
        match (RunRecord::read(&path), json) {
            (Ok(run), true) => out(as_json(&run))?,
            (Ok(run), false) => list_one(&run)?,
            // A damaged run does not hide the others.
            (Err(e), true) => {
                let mut row = as_json(&RunRecord::unreadable(&path, &e));
                row["error"] = json!(e.line());
                out(row)?;
            }
            (Err(e), false) => {
                let run = RunRecord::unreadable(&path, &e);
                out_text(format!("{}  {}", path.display(), run.state))?;
            }
        }
    }
    Ok(())
}

fn list_one(run: &RunRecord) -> Result<()> {
    let what = [
        run.setting("train.stage"),
        run.setting("tune.method"),
        run.setting("model.path"),
    ]
    .join(" ");
    out_text(format!("{}  {}, {}", run.path.display(), run.state, steps(run)))?;
    let shown = [
        "loss",
        "eval_loss",
        "eval_accuracy",
        "eval_reward",
        "peak_memory_bytes",
        "seconds",
    ];
    let numbers = results(run);
    let numbers = numbers.iter().filter(|(name, ..)| shown.contains(name));
    let numbers: Vec<String> = numbers
        .map(|(name, _, text)| format!("{} {text}", short(name)))
        .collect();
    out_text(format!("    {what}"))?;
    if !numbers.is_empty() {
        out_text(format!("    {}", numbers.join("  ")))?;
    }
    Ok(())
}

/// The name of a number in a table.
fn short(name: &str) -> &str {
    match name {
        "peak_memory_bytes" => "peak",
        "seconds" => "time",
        "tokens_per_second" => "tokens/s",
        name => name,
    }
}

fn show(run: &RunRecord, json: bool) -> Result<()> {
    if json {
        return out(as_json(run));
    }
    out_text(format!("{}  {}, {}", run.path.display(), run.state, steps(run)))?;
    for (name, _, text) in results(run) {
        let forecast = run.planned_bytes.filter(|_| name == "peak_memory_bytes");
        let forecast = forecast.map_or(String::new(), |planned| format!(" (forecast {})", bytes(planned)));
        out_text(format!("  {:<18}{text}{forecast}", short(name)))?;
    }
    if !run.checkpoints.is_empty() {
        let all: Vec<String> = run.checkpoints.iter().map(u64::to_string).collect();
        out_text(format!("  {:<18}{}", "checkpoints", all.join(", ")))?;
    }
    let blocks: BTreeSet<&str> = run.curves.switches.iter().map(|(_, block)| block.as_str()).collect();
    if !blocks.is_empty() {
        let (turns, blocks) = (run.curves.switches.len(), blocks.len());
        out_text(format!(
            "  {:<18}{turns} times, {blocks} different ones",
            "active blocks"
        ))?;
    }
    for warning in &run.warnings {
        out_text(format!("  warning: {warning}"))?;
    }
    // The settings that the user chose; `ft runs show --json` has all settings.
    out_text("settings of the recipe:")?;
    for (key, value) in chosen(run)? {
        out_text(format!("  {key} = {value}"))?;
    }
    Ok(())
}

/// Keys that the recipe or the command line set.
fn chosen(run: &RunRecord) -> Result<Vec<(String, String)>> {
    let resolved = run.path.join("resolved.toml");
    let all = history::settings(&files::read_text(&resolved)?).map_err(|e| e.at_path(&resolved))?;
    let chosen = all
        .into_iter()
        .filter(|[_, _, from]| from == "recipe" || from == "argument");
    Ok(chosen.map(|[key, value, _]| (key, secrets::mask(&value))).collect())
}

fn plot(runs: &[RunRecord], metric: &str, raw: bool, svg: Option<&Path>, json: bool) -> Result<()> {
    if let Some(file) = svg {
        let [run] = runs else {
            return Err(Error::usage("`--svg` draws one run")
                .at("--svg")
                .found(format!("{} runs", runs.len()))
                .hint("give one run"));
        };
        let text = history::svg(&run.path.display().to_string(), &run.curves, run.planned_bytes);
        files::write_output(file, text.as_bytes())?;
        return out(file.display());
    }
    let found: Vec<(&RunRecord, &Curve)> = runs
        .iter()
        .filter_map(|run| Some((run, run.curves.get(metric)?)))
        .collect();
    if found.is_empty() {
        let names: BTreeSet<&str> = runs.iter().flat_map(|run| run.curves.names()).collect();
        let names: Vec<&str> = names.into_iter().collect();
        return Err(Error::usage("no run has this metric")
            .at("--metric")
            .found(metric)
            .expected(format!("one of {}", names.join(", "))));
    }
    if json {
        for (run, curve) in found {
            out(json!({"run": run.path.display().to_string(), "metric": metric, "points": curve.points}))?;
        }
        return Ok(());
    }
    // Single evaluations are not noise.
    let smooth = !raw && !metric.starts_with("eval_");
    let curves: Vec<Curve> = found
        .iter()
        .map(|(_, c)| if smooth { c.smoothed() } else { (*c).clone() })
        .collect();
    let colors = report::result_is_terminal() && report::style().color;
    let lines = history::plot(
        &curves.iter().collect::<Vec<_>>(),
        report::result_width().unwrap_or(80).min(120),
        history::ROWS,
        colors,
    );
    out(format!("{metric}{}", if smooth { ", smoothed" } else { "" }))?;
    lines.iter().try_for_each(out_colored)?;
    for (n, (run, curve)) in found.iter().enumerate() {
        let last = curve.recent(if smooth { RECENT } else { 1 }).unwrap_or(f64::NAN);
        let line = format!("  {}: {last:.4}", run.path.display());
        if colors {
            let (color, line) = (history::color(n), report::visible(&line));
            out_colored(format!("\x1b[{color}m{line}\x1b[0m"))?;
        } else {
            out(line)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_cells_are_clipped_and_impossible_times_are_zero() {
        let row = |name: &str, values: [&str; 2]| (name.to_string(), values.map(str::to_string).to_vec());
        let long = "é".repeat(70_000);
        let lines = compare::table(vec![row("a", ["1", "2"]), row(&long, [&long, "3"])]);
        assert_eq!(lines[0], format!("a{}  1{}  2", " ".repeat(200), " ".repeat(200)));
        let cell = format!("{}…", "é".repeat(200));
        assert_eq!(lines[1], format!("{cell}  {cell}  3"));

        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("resolved.toml"), "").unwrap();
        let events = "{\"event\":\"start\",\"time\":0}\n{\"event\":\"stop\",\"time\":1e300}\n";
        std::fs::write(dir.path().join("events.jsonl"), events).unwrap();
        let numbers = results(&RunRecord::read(dir.path()).unwrap());
        assert_eq!(numbers.last().unwrap().2, duration(Duration::ZERO));
    }

    #[test]
    fn the_time_goes_to_the_last_step_and_texts_with_lines_are_one_setting() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let text = "[data]\nprompt_template = \"\"\"\n{context}\n[train]\na = 1  # recipe\n\"\"\"  # argument\nshuffle = true  # default: x\n";
        write("resolved.toml", text);
        write("events.jsonl", "{\"event\":\"start\",\"time\":100}\n");
        write(
            "metrics.jsonl",
            "{\"step\":0,\"eval_loss\":1.0,\"time\":150}\n{\"step\":1,\"loss\":2.0,\"eval_loss\":3.0,\"time\":700}\n",
        );
        let run = RunRecord::read(dir.path()).unwrap();
        let numbers = results(&run);
        let of = |name: &str| numbers.iter().find(|(n, ..)| *n == name).unwrap().1.clone();
        assert_eq!((of("seconds"), of("best_eval_loss")), (json!(600.0), json!(3.0)));
        let value = r#""{context}\n[train]\na = 1  # recipe\n""#.to_string();
        assert_eq!(chosen(&run).unwrap(), [("data.prompt_template".to_string(), value)]);
    }
}
