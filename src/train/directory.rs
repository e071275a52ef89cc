//! The run directory: opens it, writes its description files, removes leftovers.

use crate::base::lock::{self, RunLock};
use crate::base::{Error, Result, files, staging};
use crate::checkpoint::{self, LoadedState};
use crate::data::{ScreenCounts, summary};
use crate::formats::StoredDtype;
use crate::hf;
use crate::ops::CpuBackend;
use crate::plan::Plan;
use crate::recipe::{self, Method, Recipe};
use crate::report::{self, Reporter};
use crate::setup::rows::RecipeRows;
use crate::setup::{ModelDir, ModelFiles};
use crate::source::Placement;
use crate::train::checkpoint_size::CheckpointSize;
use crate::train::owner::{self, DirectoryState, OwnedFiles, RecordedFinal, TakenCheckpoint};
use crate::train::starts;
use crate::train::{Resume, TrainOptions};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A run directory that this process owns. If it is dropped before `begin`, the run is refused: a new directory has no trace of it
/// then, and another one goes on from the same checkpoint as before.
pub struct RunDirectory {
    path: PathBuf,
    lock: Option<RunLock>,
    /// The user was warned that the lock was removed.
    lock_reported: bool,
    manifest: OwnedFiles,
    /// The directory held no run.
    new: bool,
    /// This process created the directory.
    made: bool,
    /// This process wrote the manifest.
    written: bool,
    begun: bool,
    /// What the manifest had before: the checkpoint of another run from which the run goes on.
    from_before: Option<TakenCheckpoint>,
    /// Checkpoints that rotation does not remove and that were already reported.
    kept: BTreeSet<PathBuf>,
    /// The checkpoint from which the run goes on, if it is that of another run.
    pub taken: Option<PathBuf>,
    /// Messages for the user: removed files, and files that were not touched.
    pub notes: Vec<String>,
}

/// What `--resume` means in this directory: a run that began with the checkpoint of another one, and does not have it yet, goes on
/// from there. Changes nothing.
///
/// Errors: as `DirectoryState::of`; that checkpoint does not exist any more.
pub fn resume_of(run_dir: &Path, resume: &Resume) -> Result<Resume> {
    let is_own = match resume {
        Resume::No => false,
        Resume::Newest => true,
        Resume::From(from) => is_within(from, run_dir) && is_within(run_dir, from),
    };
    if !is_own {
        return Ok(resume.clone());
    }
    let DirectoryState::Run(manifest) = DirectoryState::of(run_dir)? else {
        return Ok(resume.clone());
    };
    match manifest.awaited(run_dir)? {
        None => Ok(resume.clone()),
        Some(from) if is_checkpoint(&from.path) => Ok(Resume::From(from.path.clone())),
        Some(from) => Err(Error::not_found("the checkpoint from which the run goes on does not exist any more")
            .at_path(&from.path)
            .hint(
                "give the place where it is now: `--resume DIR`; or start the run from the beginning with `--overwrite`",
            )),
    }
}

/// Checks if a run can start, resume or overwrite here. Changes nothing, so an early refusal leaves no trace.
///
/// Errors: the directory does not hold a run; it holds a run, and neither `--resume` nor `--overwrite` is given; there
/// is no checkpoint to resume from.
pub fn check(run_dir: &Path, options: &TrainOptions) -> Result<()> {
    let kind = DirectoryState::of(run_dir)?;
    owner::refuse_links(run_dir)?;
    match (&kind, &options.resume) {
        (DirectoryState::Other(names), _) => {
            let shown: Vec<&str> = names.iter().take(5).map(String::as_str).collect();
            let more = match names.len().saturating_sub(shown.len()) {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            Err(
                Error::usage("the output directory holds files that are not a run of ft")
                    .at_path(run_dir)
                    .found(format!("{}{more}", shown.join(", ")))
                    .hint("set `train.output_dir` to a new or empty directory"),
            )
        }
        (DirectoryState::New, Resume::Newest) => {
            // A relative path is of the current directory.
            let place = std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_path_buf());
            Err(Error::new("the directory has no run to resume")
                .at_path(&place)
                .hint("if the run was started in another directory, go there; a new run starts without `--resume`"))
        }
        (DirectoryState::Run(manifest), Resume::Newest) => resumable(run_dir, manifest).map(drop),
        (_, Resume::From(from)) => {
            if checkpoint::list(from).is_ok_and(|l| l.is_empty()) && !is_checkpoint(from) {
                return Err(Error::new("there is no checkpoint to resume from")
                    .at_path(from)
                    .hint(
                        "give a run directory that has checkpoints, or a `checkpoint-<step>` directory; a finished run without \
                         checkpoints (`train.save_steps`) cannot go on: start a new one from its `final/`",
                    ));
            }
            if let DirectoryState::Run(manifest) = &kind
                && !is_within(from, run_dir)
                && has_results(run_dir, manifest)?
            {
                return Err(Error::usage("the output directory holds another run")
                    .at_path(run_dir)
                    .found(format!("a run that would go on from {}", from.display()))
                    .hint(
                        "set `train.output_dir` to a new directory; or continue the run that is there with `--resume`",
                    ));
            }
            Ok(())
        }
        (DirectoryState::Run(manifest), Resume::No) if !options.overwrite => {
            let error = Error::usage("the output directory holds an earlier run").at_path(run_dir);
            Err(error.hint(match resumable(run_dir, manifest) {
                Ok(true) => {
                    "continue it with `--resume`, replace it with `--overwrite`, or set another \
                             `train.output_dir`"
                }
                Ok(false) => {
                    "it has no checkpoint yet: start it again with `--resume` or `--overwrite`, or set another \
                     `train.output_dir`"
                }
                Err(_) => "the run is finished: replace it with `--overwrite`, or set another `train.output_dir`",
            }))
        }
        (DirectoryState::New | DirectoryState::Run(_), Resume::No) => Ok(()),
    }
}

/// True if `from` is the directory of the run, or a checkpoint in it.
pub fn is_within(from: &Path, run_dir: &Path) -> bool {
    match (from.canonicalize(), run_dir.canonicalize()) {
        (Ok(from), Ok(run_dir)) => from.starts_with(run_dir),
        _ => false,
    }
}

/// True if the run has written something that another run would remove or mix with its own. What it has before the checkpoint from
/// which it goes on was copied.
fn has_results(run_dir: &Path, manifest: &OwnedFiles) -> Result<bool> {
    let own = !checkpoint::list(run_dir)?.is_empty() && manifest.awaited(run_dir)?.is_none();
    Ok(own || run_dir.join(owner::FINAL).exists())
}

fn is_checkpoint(from: &Path) -> bool {
    from.join("manifest.json").exists()
}

/// True if the run has a checkpoint to resume from. A run that stopped before its first checkpoint starts again.
///
/// Errors: a finished run without checkpoints.
fn resumable(run_dir: &Path, manifest: &OwnedFiles) -> Result<bool> {
    let any = !checkpoint::list(run_dir)?.is_empty() || manifest.awaited(run_dir)?.is_some();
    if !any && run_dir.join(owner::FINAL).exists() {
        return Err(Error::new("the run is finished and has no checkpoint to resume from")
            .at_path(run_dir)
            .hint("its result is in `final/`; `--overwrite` starts it again, or set another `train.output_dir`"));
    }
    Ok(any)
}

/// Bytes in the directory that count as free for the run: all that `--overwrite` removes, and the checkpoints of a resumed run, which
/// removes them as it saves.
pub fn freed(run_dir: &Path, options: &TrainOptions) -> u64 {
    match DirectoryState::of(run_dir) {
        Ok(DirectoryState::Run(manifest)) if options.overwrite => manifest.bytes(run_dir),
        Ok(DirectoryState::Run(_)) => owner::bytes_of_checkpoints(run_dir),
        _ => 0,
    }
}

/// Opens the directory for a new, resumed or overwritten run. Returns it with the checkpoint to resume from, if there
/// is one. `same` can reject the checkpoint.
///
/// Errors: as `check`; another run is in progress; a damaged checkpoint. In these cases only leftovers of killed
/// processes of this run were removed.
pub fn open(
    run_dir: &Path,
    options: &TrainOptions,
    same: &dyn Fn(&LoadedState) -> Result<()>,
) -> Result<(RunDirectory, Option<LoadedState>)> {
    let made = run_dir.symlink_metadata().is_err();
    let new = DirectoryState::of(run_dir)? == DirectoryState::New;
    files::create_dir_all(run_dir)?;
    let mut out = RunDirectory {
        path: run_dir.to_path_buf(),
        lock: None,
        lock_reported: false,
        manifest: OwnedFiles::default(),
        new,
        made,
        written: false,
        begun: false,
        from_before: None,
        kept: BTreeSet::new(),
        taken: None,
        notes: Vec::new(),
    };
    let last = lock::last_process(run_dir);
    out.lock = Some(RunLock::acquire(run_dir)?);
    // Another process may have created a run in the meantime.
    check(run_dir, options)?;
    if let DirectoryState::Run(manifest) = DirectoryState::of(run_dir)? {
        out.manifest = manifest;
    }
    // Without a manifest too: a process may have been killed before it wrote the first one.
    let cleaned = out.manifest.clean(run_dir, last)?;
    let torn = owner::remove_torn_manifests(run_dir)?;
    out.note(
        "removed incomplete files of a stopped run",
        &[cleaned.removed, torn].concat(),
    );
    out.note("restored the name of", &cleaned.restored);
    out.note(
        "not changed, because ft cannot verify that it created this",
        &cleaned.left,
    );
    let resumed = match options.resume.directory(run_dir) {
        None => None,
        Some(from) if is_checkpoint(from) => Some(checkpoint::load(from)?),
        Some(from) if options.allow_older => {
            let (newest, damaged) = checkpoint::latest_whole(from)?;
            out.notes
                .extend(damaged.iter().map(|e| format!("a damaged checkpoint is not used: {e}")));
            newest
        }
        Some(from) => checkpoint::latest(from)?,
    };
    let mut from = None;
    if let Some(checkpoint) = &resumed {
        same(checkpoint).map_err(|e| e.or_at(checkpoint.path.display()))?;
        if !is_within(&checkpoint.path, run_dir) {
            out.taken = Some(checkpoint.path.clone());
            from = Some(TakenCheckpoint::new(&checkpoint.path, checkpoint.step));
        }
        // Checkpoints that were added for another one do not belong to this run.
        let awaited = out.manifest.awaited(run_dir)?;
        let is_other = from.is_some() && awaited.is_some_and(|awaited| from.as_ref() != Some(awaited));
        let last = if is_other { 0 } else { checkpoint.step };
        let aside = checkpoint::set_aside_later(run_dir, last)?;
        let what = if is_other {
            "checkpoints from another run were set aside"
        } else {
            "later checkpoints were set aside"
        };
        out.note(what, &aside);
    } else if options.resume != Resume::No {
        out.notes
            .push("the run has no checkpoint yet: it starts from the beginning".into());
    } else if options.overwrite {
        // First: if this process is killed meanwhile, the temporary names of what it removes have its id, and no `--resume` goes on
        // from where the removed run does.
        out.manifest.set_from(None);
        out.manifest.join(run_dir)?;
        out.written = true;
        let (removed, left) = out.manifest.remove(run_dir)?;
        let paths = |names: Vec<String>| names.into_iter().map(PathBuf::from).collect::<Vec<_>>();
        out.note("removed from the earlier run", &paths(removed));
        out.note(
            "not removed, because it contains files that ft did not write",
            &paths(left),
        );
    }
    // Now, not in `begin`: after a kill in a new directory `--resume` goes on from there too.
    out.from_before = out.manifest.set_from(from);
    out.written = true;
    out.manifest.join(run_dir)?;
    Ok((out, resumed))
}

impl RunDirectory {
    /// The directory for a rank that writes nothing into it.
    pub fn of_other_rank(run_dir: &Path) -> Self {
        Self {
            path: run_dir.to_path_buf(),
            lock: None,
            lock_reported: false,
            manifest: OwnedFiles::default(),
            new: false,
            made: false,
            written: false,
            begun: true,
            from_before: None,
            kept: BTreeSet::new(),
            taken: None,
            notes: Vec::new(),
        }
    }

    fn note(&mut self, what: &str, paths: &[PathBuf]) {
        let names: Vec<String> = paths
            .iter()
            .map(|p| {
                p.file_name()
                    .map(|n| n.to_string_lossy().into_owned())
                    .unwrap_or_default()
            })
            .collect();
        if !names.is_empty() {
            self.notes.push(format!("{what}: {}", names.join(", ")));
        }
    }

    /// Marks the run as started: the directory is kept.
    pub fn begin(&mut self) {
        self.begun = true;
    }

    /// The checkpoint of another run is in the directory: the run goes on from it there.
    pub fn brought(&mut self) -> Result<()> {
        self.manifest.brought(&self.path)
    }

    /// Warns once if another program has removed the lock, which is written again.
    ///
    /// Errors: the directory was moved or removed; another process has locked it; for a long time it could not be reached.
    pub fn check(&mut self, reporter: &mut Reporter) -> Result<()> {
        let Some(lock) = &mut self.lock else { return Ok(()) };
        if lock.check()? && !self.lock_reported {
            self.lock_reported = true;
            reporter.warn("`run.lock` was removed by another program; it is written again");
        }
        Ok(())
    }

    /// Marks the lock as in use: some disks lose their old files.
    pub fn touch(&self) {
        if let Some(lock) = &self.lock {
            lock.touch();
        }
    }

    /// Warns once about each checkpoint that rotation does not remove.
    pub fn keeps(&mut self, kept: &[PathBuf], reporter: &mut Reporter) {
        for path in kept {
            if self.kept.insert(path.clone()) {
                reporter.warn(&format!(
                    "{} is not removed by `train.save_total_limit`: it contains files that ft did not write",
                    path.display()
                ));
            }
        }
    }

    /// Returns the path to which the existing `final/` is moved when a new one is written.
    pub fn aside(&self) -> Result<PathBuf> {
        staging::left_name(&self.path.join(owner::FINAL))
    }

    /// Registers the new `final/`, directly after it got its name; `before` is the path from `aside`.
    pub fn record_final(&mut self, before: &Path) -> Result<RecordedFinal> {
        self.manifest.record_final(&self.path, before)
    }

    /// Registers the hashes of the new `final/`; `before` as for `record_final`. Returns messages for the user, and warnings.
    pub fn complete_final(&mut self, recorded: RecordedFinal, before: &Path) -> Result<(Vec<String>, Vec<String>)> {
        let cleanup = self.manifest.complete_final(&self.path, recorded)?;
        let mut said = Vec::new();
        if cleanup.stays {
            said.push(format!(
                "the previous `final/` was changed by another program: it was moved to {}",
                before.display()
            ));
        }
        let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let removed = cleanup.removed.iter();
        said.extend(removed.map(|path| format!("removed {}: its files are those of `final/`", name(path))));
        let errors = cleanup.errors.iter();
        Ok((
            said,
            errors
                .map(|e| format!("a previous `final/` is not removed: {e}"))
                .collect(),
        ))
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if self.begun {
            return;
        }
        if !self.new {
            let before = self.from_before.take();
            if self.written && self.manifest.set_from(before.clone()) != before {
                let _ = self.manifest.join(&self.path);
            }
            return;
        }
        // A refused run leaves no trace in a new directory.
        if self.written {
            let _ = files::remove_file(&self.path.join(owner::MANIFEST));
        }
        if let Some(lock) = self.lock.take() {
            let _ = lock.abandon();
        }
        if self.made {
            let _ = files::remove_empty_dir(&self.path);
        }
    }
}

/// Writes recipe, plan and environment of the run.
pub fn describe(run_dir: &Path, loaded: &recipe::LoadedRecipe, plan: &Plan) -> Result<()> {
    files::write_atomic(&run_dir.join("recipe.toml"), loaded.text.as_bytes())?;
    files::write_atomic(&run_dir.join("resolved.toml"), loaded.resolved.as_bytes())?;
    files::write_atomic(&run_dir.join("plan.json"), format!("{:#}\n", plan.json()).as_bytes())?;
    report::write_environment(run_dir, CpuBackend::current().name())
}

/// Writes the list of dropped training rows, one object a line; no file if nothing is screened.
fn list_dropped(run_dir: &Path, screened: Option<&ScreenCounts>) -> Result<()> {
    let Some(screened) = screened else { return Ok(()) };
    let text: String = screened.dropped.iter().map(|d| format!("{}\n", d.json())).collect();
    files::write_atomic(&run_dir.join(owner::DROPPED), text.as_bytes())
}

/// Rows in `rows.jsonl`, and the most tokens of a row there.
const SHOWN_ROWS: usize = 20;
const SHOWN_TOKENS: usize = 4096;

/// Writes the list of dropped training rows, and the first training rows as the model reads them, one object a line, with the
/// trained tokens marked: for a reader who has no tokenizer.
pub fn list_rows(run_dir: &Path, rows: &RecipeRows, model: &ModelDir) -> Result<()> {
    list_dropped(run_dir, rows.screened.as_ref())?;
    let (mut text, train) = (String::new(), &rows.train);
    if let Some(questions) = &rows.questions {
        for prompt in questions.train.iter().take(SHOWN_ROWS) {
            let shown = &prompt.ids[..prompt.ids.len().min(SHOWN_TOKENS)];
            let row = json!({
                "file": &*prompt.place.file, "number": prompt.place.number, "tokens": prompt.ids.len(), "trained": 0,
                "parts": [[model.tokenizer.decode(shown, false)?, false]], "answer": prompt.answer,
            });
            text.push_str(&format!("{row}\n"));
        }
    } else if !model.is_shape() {
        for index in 0..train.examples.len().min(SHOWN_ROWS) {
            let row = summary::marked(train, &model.tokenizer, index, SHOWN_TOKENS)?;
            text.push_str(&format!("{row}\n"));
        }
    }
    files::write_atomic(&run_dir.join(owner::ROWS), text.as_bytes())
}

/// Bytes that a run writes: checkpoints (one more than the limit), each of this size, and `final/`.
pub fn space_needed(recipe: &Recipe, model: &ModelFiles, checkpoint: &CheckpointSize, place: Placement) -> u64 {
    let best = u64::from(recipe.train.load_best_model_at_end);
    let kept = if recipe.train.save_steps + best as usize > 0 {
        recipe.train.save_total_limit as u64 + 1 + best
    } else {
        1
    };
    let all: usize = model.spec.params().iter().map(|p| p.elements()).sum();
    let stored = recipe.model.dtype.bytes();
    let other_parts = |dense: StoredDtype| hf::bytes_of_other_parts(&model.dir, dense);
    let out = match recipe.tune.method {
        // Random weights of a shape are not exported.
        _ if recipe.model.path.is_shape() => 0,
        // A first product that is subtracted doubles the rank; it is not known yet.
        Method::Lora if starts::requantizes_base(recipe) => {
            2 * checkpoint.weights + all as u64 * 4 + other_parts(StoredDtype::F32)
        }
        Method::Lora => 2 * checkpoint.weights,
        _ => all as u64 * stored + other_parts(hf::stored(recipe.model.dtype)),
    };
    // Scratch files: trained parameters, and random weights.
    let scratch = match (place, recipe.tune.method) {
        (Placement::Disk { .. }, method) if method != Method::Lora => checkpoint.weights,
        _ => 0,
    };
    let drawn = match (place, recipe.model.init) {
        (Placement::Disk { .. }, recipe::ModelInit::Random) => all as u64 * stored,
        _ => 0,
    };
    kept * checkpoint.total() + out + scratch + drawn
}

#[cfg(test)]
mod tests;
