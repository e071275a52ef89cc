//! The run directory: opened, described, cleaned.

use super::setup;
use super::train::Options;
use super::{starts, state};
use crate::base::{Error, Result, files};
use crate::checkpoint::{self, Loaded};
use crate::model::{Spec, shapes};
use crate::ops::CpuPath;
use crate::plan::{Place, Plan};
use crate::recipe::{self, Method, Recipe};
use crate::report;
use std::path::{Path, PathBuf};

/// New, resumed or refused: the checkpoint to go on from, if there is one.
pub fn open(run_dir: &Path, options: &Options) -> Result<Option<Loaded>> {
    checkpoint::clean_leftovers(run_dir)?;
    if let Some(from) = &options.resume {
        let from = from.as_deref().unwrap_or(run_dir);
        let is_checkpoint = from.join("manifest.json").exists();
        let loaded = if is_checkpoint {
            Some(checkpoint::load(from)?)
        } else {
            checkpoint::latest(from)?
        };
        return match loaded {
            Some(loaded) => Ok(Some(loaded)),
            None => Err(Error::new("there is no checkpoint to resume from")
                .at_path(from)
                .hint("start without `--resume`")),
        };
    }
    let old: Vec<PathBuf> = files::list(run_dir)?
        .into_iter()
        .filter(|p| p.file_name().is_some_and(|n| n != "run.lock"))
        .collect();
    if old.is_empty() {
        return Ok(None);
    }
    if !options.overwrite {
        return Err(Error::usage("the run directory holds an earlier run")
            .at_path(run_dir)
            .hint("go on with `--resume`, replace it with `--overwrite`, or set another `train.output_dir`"));
    }
    for path in old {
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        match path.is_dir() {
            // Only what ft itself writes is removed.
            true if OWN_DIRECTORIES.contains(&name.as_str()) || name.starts_with("checkpoint-") => {
                files::remove_dir_all(&path)?
            }
            false if OWN_FILES.contains(&name.as_str()) => files::remove_file(&path)?,
            _ => {}
        }
    }
    Ok(None)
}

const OWN_DIRECTORIES: [&str; 4] = ["final", setup::TRAINED, setup::DRAWN, setup::TEACHER];
const OWN_FILES: [&str; 8] = [
    setup::CODES,
    "recipe.toml",
    "resolved.toml",
    "plan.json",
    "environment.json",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
];

/// Recipe, plan and environment: what the run is.
pub fn describe(run_dir: &Path, loaded: &recipe::Loaded, plan: &Plan) -> Result<()> {
    files::write_atomic(&run_dir.join("recipe.toml"), loaded.text.as_bytes())?;
    files::write_atomic(&run_dir.join("resolved.toml"), loaded.resolved.as_bytes())?;
    files::write_atomic(&run_dir.join("plan.json"), format!("{:#}\n", plan.json()).as_bytes())?;
    report::write_environment(run_dir, CpuPath::current().name())
}

/// Removes what only the run itself needed.
pub fn clean(run_dir: &Path) -> Result<()> {
    for scratch in [setup::TRAINED, setup::DRAWN, setup::TEACHER].map(|name| run_dir.join(name)) {
        if scratch.is_dir() {
            files::remove_dir_all(&scratch)?;
        }
    }
    match run_dir.join(setup::CODES) {
        codes if codes.is_file() => files::remove_file(&codes),
        _ => Ok(()),
    }
}

/// Bytes of what a run writes: checkpoints (one more than are kept) and `final/`; `elements` are trained in all.
pub fn space_needed(recipe: &Recipe, spec: &Spec, elements: u64, place: Place) -> u64 {
    let kept = if recipe.train.save_steps > 0 {
        recipe.train.save_total_limit as u64 + 1
    } else {
        1
    };
    let all: usize = spec.params().iter().map(|p| p.elements()).sum();
    let stored = recipe.model.dtype.bytes();
    let out = match recipe.tune.method {
        // Its weights are not worth a file.
        _ if recipe.model.path.starts_with(shapes::PREFIX) => 0,
        // A start that is taken off doubles the rank.
        Method::Lora if starts::changes_base(recipe) => elements * 8 + all as u64 * 4,
        Method::Lora => elements * 8,
        _ => all as u64 * stored,
    };
    // What was trained, and weights that were drawn instead of read.
    let scratch = match (place, recipe.tune.method) {
        (Place::Device | Place::Host, _) | (_, Method::Lora) => 0,
        _ => 4 * elements,
    };
    let drawn = match (place, recipe.model.init) {
        (Place::Disk { .. }, recipe::ModelInit::Random) => all as u64 * stored,
        _ => 0,
    };
    kept * state::bytes(elements, elements) + out + scratch + drawn
}
