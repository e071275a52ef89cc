//! `ft bench`: the first steps of a recipe, measured, and compared with an earlier measurement.

use crate::base::units::{bytes, count};
use crate::base::{Error, Result, files};
use crate::history::each_line;
use crate::recipe::{self, LoadedRecipe};
use crate::report::{Cpu, cpu, environment, warn};
use crate::train::{self, TrainOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Folder of the measurements and of the run that is measured, next to the run directory of the recipe.
const FOLDER: &str = ".ft-bench";
/// A step that is slower than the baseline by more than this part is reported as slower.
const NOISE: f64 = 0.05;

/// The recipe without everything that is no step: evaluations, samples, saves.
const STEPS_ONLY: [&str; 9] = [
    "train.save_steps=0",
    "train.eval_steps=0",
    "train.sample_prompts=[]",
    "train.predict_with_generate=false",
    "train.early_stopping_patience=0",
    "train.load_best_model_at_end=false",
    "data.eval=[]",
    "data.eval_fraction=0.0",
    "train.logging_steps=1000000",
];

/// A measurement of some steps.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchMeasurement {
    /// All values, as they are saved.
    pub json: Value,
}

/// Processor seconds of this process.
fn processor() -> f64 {
    let text = files::read_text(Path::new("/proc/self/stat")).unwrap_or_default();
    // The name of the program, in parentheses, may have spaces; fields 14 and 15 are ticks of 1/100 s.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: f64 = rest
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|n| n.parse::<f64>().ok())
        .sum();
    ticks / 100.0
}

/// Processes that want to run, averaged over a minute.
fn load() -> Option<f64> {
    let text = files::read_text(Path::new("/proc/loadavg")).ok()?;
    text.split(' ').next()?.parse().ok()
}

/// The file of a measurement by its name, or the path of one.
pub fn place(recipe: &LoadedRecipe, name: &str) -> PathBuf {
    if name.contains('/') || name.ends_with(".json") {
        return PathBuf::from(name);
    }
    folder(recipe).join(format!("{name}.json"))
}

/// The measurement that `--save NAME` wrote.
///
/// Errors: there is none with this name; the file is no measurement.
pub fn saved(recipe: &LoadedRecipe, name: &str) -> Result<BenchMeasurement> {
    let path = place(recipe, name);
    if path.exists() {
        return BenchMeasurement::read(&path);
    }
    let others = files::list(&folder(recipe)).unwrap_or_default();
    let others: Vec<String> = others
        .iter()
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .filter_map(|path| Some(format!("`{}`", path.file_stem()?.to_str()?)))
        .collect();
    let error = Error::not_found(format!("there is no measurement `{name}`")).at_path(&path);
    Err(if others.is_empty() {
        error.hint(format!("`ft bench RECIPE --save {name}` makes it"))
    } else {
        error.hint(format!("saved are {}", others.join(", ")))
    })
}

/// Errors: the file exists and is no measurement.
pub fn refuse_strangers(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    BenchMeasurement::read(path).map(drop).map_err(|_| {
        Error::usage("another file has the name of the measurement")
            .at_path(path)
            .hint("give another name with `--save`; a measurement is replaced, other files are not")
    })
}

/// Where the runs of a measurement are.
pub(super) fn folder(recipe: &LoadedRecipe) -> PathBuf {
    let run = Path::new(&recipe.recipe.train.output_dir);
    run.parent().unwrap_or(Path::new("")).join(FOLDER)
}

/// The overrides of a run that only makes `steps` steps in the directory `run`. Prints a warning for each of the user's
/// overrides that has no effect.
fn steps_only(overrides: &[String], steps: u64, run: &Path) -> Vec<String> {
    let mut own: Vec<String> = STEPS_ONLY.map(String::from).to_vec();
    own.push(format!("train.max_steps={steps}"));
    own.push(format!("train.output_dir={}", run.display()));
    let key = |text: &str| text.split('=').next().unwrap_or_default().trim().to_string();
    let (without, mut all): (Vec<String>, Vec<String>) = overrides
        .iter()
        .cloned()
        .partition(|given| own.iter().any(|own| key(own) == key(given)));
    for key in without.iter().map(|given| key(given)) {
        match key.as_str() {
            "train.max_steps" => warn("`train.max_steps` is not the number of steps here: `--steps` is"),
            // It says where the folder of the measurements is.
            "train.output_dir" => {}
            _ => warn(&format!("`{key}` has no effect here: the run only makes steps")),
        }
    }
    all.extend(own);
    all
}

/// The recipe of a run that only makes `steps` steps in the directory `run`. Its `auto` keys are chosen for the run of the recipe
/// as it is, `whole`: the length of a run changes the rows of its steps.
pub(super) fn first_steps(
    file: &Path,
    overrides: &[String],
    whole: &LoadedRecipe,
    steps: u64,
    run: &Path,
) -> Result<LoadedRecipe> {
    let mut loaded = recipe::load(file, &steps_only(overrides, steps, run))?;
    // Random rows of a shape are made for the steps.
    if loaded.recipe.data.has_train() {
        loaded.recipe.open.whole_steps = Some(whole.recipe.train.max_steps);
    }
    Ok(loaded)
}

/// Makes the first `steps` steps of a recipe, after one that is not counted, in a directory that is removed.
///
/// Errors: those of the run.
pub fn measure(file: &Path, overrides: &[String], steps: u64) -> Result<BenchMeasurement> {
    let whole = recipe::load(file, overrides)?;
    let run = folder(&whole).join(format!("run-{}", std::process::id()));
    let loaded = first_steps(file, overrides, &whole, steps + 1, &run)?;
    let options = TrainOptions {
        only_steps: true,
        ..TrainOptions::default()
    };
    let (load, before) = (load(), processor());
    let trained = train::train(&loaded, &options);
    let used = processor() - before;
    let numbers = trained.and_then(|outcome| Ok((numbers(&run)?, outcome.plan.peak_bytes)));
    let removed = files::remove_dir_all(&run);
    let (numbers, planned) = numbers?;
    removed?;
    let mut seconds = numbers.seconds.clone();
    seconds.sort_by(f64::total_cmp);
    let median = middle(&seconds).ok_or_else(|| Error::new("the run has too few steps to measure"))?;
    let mut rates = numbers.tokens_per_second;
    rates.sort_by(f64::total_cmp);
    let Cpu { name, cores, .. } = cpu();
    let threads = rayon::current_num_threads();
    Ok(BenchMeasurement {
        json: json!({
            "format": "ft bench 1", "recipe": file.display().to_string(), "overrides": overrides, "steps": seconds.len(),
            "seconds_median": median, "seconds_min": seconds[0], "seconds_max": seconds[seconds.len() - 1],
            "tokens_per_second": middle(&rates), "peak_memory_bytes": numbers.peak, "forecast_bytes": planned,
            "last_loss": numbers.loss, "processor_seconds": used, "threads": threads, "cpu": name, "cores": cores,
            "load_before": load, "seconds": numbers.wall,
            "busy": load.is_some_and(|load| load > 0.5), "version": environment()["version"],
            "device": loaded.recipe.model.device.to_string(),
        }),
    })
}

struct BenchNumbers {
    seconds: Vec<f64>,
    tokens_per_second: Vec<f64>,
    peak: f64,
    loss: Option<f64>,
    wall: f64,
}

/// The steps of a run after the first one. A step lasts from the line before it to its own.
fn numbers(run: &Path) -> Result<BenchNumbers> {
    let (mut times, mut rates, mut peak, mut loss) = (Vec::new(), Vec::new(), 0f64, None);
    each_line(&run.join("metrics.jsonl"), |line| {
        let Ok(line) = serde_json::from_slice::<Value>(line) else {
            return Ok(());
        };
        if let Some(time) = line["time"].as_f64().filter(|_| line["loss"].is_number()) {
            times.push(time);
            rates.extend(line["tokens_per_second"].as_f64());
            peak = peak.max(line["peak_memory_bytes"].as_f64().unwrap_or(0.0));
            loss = line["loss"].as_f64();
        }
        Ok(())
    })?;
    let seconds: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    Ok(BenchNumbers {
        wall: seconds.iter().sum(),
        seconds,
        tokens_per_second: rates.split_off(rates.len().min(1)),
        peak,
        loss,
    })
}

/// The middle of sorted numbers.
fn middle(sorted: &[f64]) -> Option<f64> {
    let n = sorted.len();
    let upper = sorted.get(n / 2)?;
    Some(if n % 2 == 1 {
        *upper
    } else {
        (sorted[n / 2 - 1] + upper) / 2.0
    })
}

impl BenchMeasurement {
    /// Errors: the file cannot be read, or is not a measurement.
    pub fn read(path: &Path) -> Result<Self> {
        let wrong = |e: Error| e.at_path(path).expected("a file that `ft bench --save` wrote");
        let json: Value = serde_json::from_slice(&files::read(path)?)
            .map_err(|e| wrong(Error::new("the measurement is damaged").cause(e)))?;
        if json["format"] != "ft bench 1" || !json["seconds_median"].is_number() {
            return Err(wrong(Error::new("this is not a measurement")));
        }
        Ok(Self { json })
    }

    /// Writes the measurement.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            files::create_dir_all(folder)?;
        }
        files::write_output(path, format!("{:#}\n", self.json).as_bytes())
    }

    fn number(&self, key: &str) -> f64 {
        self.json[key].as_f64().unwrap_or(f64::NAN)
    }

    /// Lines for the user, with the change from `baseline`.
    pub fn lines(&self, baseline: Option<&Self>) -> Vec<String> {
        let change = |key: &str| {
            let before = baseline.map(|b| b.number(key)).filter(|b| *b > 0.0);
            before.map_or(String::new(), |before| {
                format!("  ({:+.1} %)", 100.0 * (self.number(key) / before - 1.0))
            })
        };
        let seconds = |key: &str| format!("{:.4} s{}", self.number(key), change(key));
        let mut lines = vec![
            format!(
                "step       median {}, min {}",
                seconds("seconds_median"),
                seconds("seconds_min")
            ),
            format!(
                "tokens/s   {}{}",
                count(self.number("tokens_per_second") as u64),
                change("tokens_per_second")
            ),
            format!(
                "memory     peak {}{}, forecast {}",
                bytes(self.number("peak_memory_bytes") as u64),
                change("peak_memory_bytes"),
                bytes(self.number("forecast_bytes") as u64)
            ),
            format!(
                "processor  {:.1} s in all, {} threads on {}",
                self.number("processor_seconds"),
                self.json["threads"],
                self.json["cpu"].as_str().unwrap_or("-")
            ),
        ];
        let busy = |m: &Self| m.json["busy"] == true;
        if busy(self) {
            lines.push(format!(
                "warning: the machine was busy (load {:.1} before the run): compare the minimum, or measure again",
                self.number("load_before")
            ));
        }
        if let Some(before) = baseline {
            lines.extend(self.verdict(before));
        }
        lines
    }

    /// Faster or slower than the baseline, and why that may mean nothing.
    fn verdict(&self, before: &Self) -> Vec<String> {
        let differ = |key: &str| self.json[key] != before.json[key];
        let other = ["cpu", "threads", "recipe", "overrides", "device"]
            .into_iter()
            .filter(|key| differ(key));
        let mut lines: Vec<String> = other
            .map(|key| {
                format!(
                    "warning: {key} differs: now {}, in the baseline {}",
                    self.json[key], before.json[key]
                )
            })
            .collect();
        if before.json["busy"] == true {
            lines.push("warning: the machine was busy when the baseline was measured".into());
        }
        let change = self.number("seconds_min") / before.number("seconds_min") - 1.0;
        let word = match change {
            c if c > NOISE => "slower than",
            c if c < -NOISE => "faster than",
            _ => "as fast as",
        };
        lines.push(format!(
            "{word} the baseline by the fastest step ({:+.1} %; below {:.0} % is noise)",
            100.0 * change,
            100.0 * NOISE
        ));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measured_run_is_short_and_has_the_steps_of_the_recipe() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("r.toml");
        std::fs::write(&file, "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n").unwrap();
        let of = |overrides: &[String]| {
            let whole = recipe::load(&file, overrides).unwrap();
            let recipe = first_steps(&file, overrides, &whole, 21, &dir.path().join("run"));
            let recipe = recipe.unwrap().recipe;
            (recipe.train.max_steps, recipe.whole_steps())
        };
        assert_eq!(of(&[]), (21, -1));
        assert_eq!(of(&["train.max_steps=300".to_string()]), (21, 300));
    }

    #[test]
    fn steps_are_measured_between_lines_and_compared() {
        let dir = tempfile::tempdir().unwrap();
        let line = |step: u64, time: f64| {
            format!(
                "{{\"step\":{step},\"loss\":1.5,\"tokens_per_second\":{step}00,\"peak_memory_bytes\":{step},\"time\":{time}}}\n"
            )
        };
        let lines: String = [(1, 10.0), (2, 10.5), (3, 10.75), (4, 11.75)]
            .map(|(s, t)| line(s, t))
            .concat();
        std::fs::write(
            dir.path().join("metrics.jsonl"),
            lines + "{\"step\":4,\"eval_loss\":1,\"time\":12}\n",
        )
        .unwrap();
        let found = numbers(dir.path()).unwrap();
        assert_eq!(found.seconds, [0.5, 0.25, 1.0]);
        assert_eq!((found.peak, found.wall, found.tokens_per_second.len()), (4.0, 1.75, 3));
        assert_eq!(middle(&[0.25, 0.5, 1.0]), Some(0.5));
        assert_eq!(middle(&[1.0, 2.0]), Some(1.5));
        assert_eq!(middle(&[]), None);
        let made = |min: f64, busy: bool| BenchMeasurement {
            json: json!({
                "format": "ft bench 1", "seconds_median": 1.0, "seconds_min": min, "busy": busy, "cpu": "x", "threads": 2,
            }),
        };
        let last = |a: &BenchMeasurement, b: &BenchMeasurement| a.lines(Some(b)).pop().unwrap();
        assert!(last(&made(1.0, false), &made(0.5, false)).starts_with("slower than the baseline"));
        assert!(last(&made(0.5, false), &made(1.0, false)).contains("(-50.0 %"));
        assert!(last(&made(1.0, false), &made(1.01, false)).starts_with("as fast as"));
        assert!(made(1.0, true).lines(None).iter().any(|l| l.contains("was busy")));
        let path = dir.path().join("a/b.json");
        made(1.0, false).write(&path).unwrap();
        assert_eq!(BenchMeasurement::read(&path).unwrap(), made(1.0, false));
        std::fs::write(&path, "{}").unwrap();
        assert!(BenchMeasurement::read(&path).is_err());
        // A tick is 1/100 s.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while processor() == 0.0 {
            assert!(
                std::time::Instant::now() < end,
                "no processor time after a minute of work"
            );
        }
    }
}
