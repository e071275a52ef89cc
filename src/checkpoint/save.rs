//! Saves a training state, and checks the disk space for it.

use super::keep::{is_ours, name_of};
use super::manifest::{self, CheckpointManifest};
use super::{STATE, TensorPlan, Values};
use crate::base::staging::Staging;
use crate::base::{Error, Result, files, units};
use crate::formats::writer;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The named tensors of one file.
#[derive(Debug, Clone, Copy)]
pub struct CheckpointFile<'a> {
    /// A plain file name, e.g. `weights.safetensors`.
    pub name: &'a str,
    pub tensors: &'a [TensorPlan],
}

/// Bytes for `state.json` and the manifest, at most.
const SMALL_FILES: u64 = 1 << 20;

/// Receives the values of one tensor, at once or in pieces.
pub type TensorSink<'a> = dyn FnMut(Values) -> Result<()> + 'a;

/// Writes `run_dir/checkpoint-<step>/`: syncs every file, writes the manifest last, then renames the directory. Calls
/// `fill` once for each tensor of each file, in order. An existing checkpoint of this step is replaced when the new one
/// is complete; another directory with that name becomes `checkpoint-<step>.left`.
///
/// Errors: not enough disk space (with bytes needed and free), a value that is not finite, a tensor that is not filled.
/// Then older checkpoints are unchanged and no partial file stays.
pub fn save(
    run_dir: &Path,
    step: u64,
    state: &Value,
    files: &[CheckpointFile],
    fill: &mut dyn FnMut(&str, &TensorPlan, &mut TensorSink) -> Result<()>,
) -> Result<PathBuf> {
    let names = check_names(files.iter().map(|f| f.name).chain([STATE]))?;
    check_space(run_dir, space_needed(files, 1))?;
    // A run directory that was removed or moved is not created again: the other files of the run are elsewhere.
    let staging = Staging::beside(&run_dir.join(name_of(step)))?;
    for file in files {
        let path = staging.path().join(file.name);
        writer::write_file(&path, file.tensors, &[], |plan, sink| fill(file.name, plan, sink))?;
    }
    write_state(&staging.path().join(STATE), state)?;
    CheckpointManifest::of(staging.path(), step, &names)?.write(staging.path())?;
    staging.commit_over(&is_ours)
}

/// Brings checkpoints of another run, which were verified, into `run_dir`, under the names of their steps and in this order. On the
/// same file system the files are links: a checkpoint is never changed. Others are copied when all of them have space.
///
/// Errors: a manifest that cannot be read; not enough disk space for the copies (with bytes needed and free); a file that cannot be
/// copied. Then none of the checkpoints is there. An error while they get their names may leave the first ones.
pub fn bring(all: &[&Path], run_dir: &Path) -> Result<()> {
    let mut begun = Vec::new();
    let mut needed = 0u64;
    for from in all {
        let manifest = CheckpointManifest::read(from)?;
        let staging = Staging::beside(&run_dir.join(name_of(manifest.step)))?;
        let mut unlinked = Vec::new();
        let sizes = manifest.files.iter().map(|file| (&*file.name, file.size));
        for (name, size) in sizes.chain([(manifest::MANIFEST, SMALL_FILES)]) {
            let file = from.join(name);
            if !staging.link(&file) {
                needed = needed.saturating_add(size);
                unlinked.push(file);
            }
        }
        begun.push((staging, unlinked));
    }
    if needed > 0 {
        check_space(run_dir, needed).map_err(|e| {
            e.hint(
                "a checkpoint is copied here from another disk: free some space, or set `train.output_dir` to a directory on the disk \
                 of the checkpoint",
            )
        })?;
    }
    for (staging, unlinked) in &begun {
        unlinked.iter().try_for_each(|file| staging.copy(file))?;
    }
    for (staging, _) in begun {
        staging.commit_over(&is_ours)?;
    }
    Ok(())
}

/// Errors: a name twice, or one that a file of a checkpoint cannot have.
pub(super) fn check_names<'a>(all: impl Iterator<Item = &'a str>) -> Result<Vec<&'a str>> {
    let names: Vec<&str> = all.collect();
    for (i, name) in names.iter().enumerate() {
        if !manifest::is_plain(name) || *name == manifest::MANIFEST || names[..i].contains(name) {
            return Err(Error::new("a checkpoint cannot contain this file, or contains it already").at(name));
        }
    }
    Ok(names)
}

/// Writes the state and checks that its numbers read back bit for bit: otherwise a resumed run would differ.
pub(super) fn write_state(path: &Path, state: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(state)
        .map_err(|e| Error::new("cannot write the training state").at_path(path).cause(e))?;
    match serde_json::from_str::<Value>(&text) {
        Ok(back) if back == *state => crate::base::files::write_atomic(path, format!("{text}\n").as_bytes()),
        _ => Err(Error::new("the stored training state differs from the training state in memory").at_path(path)),
    }
}

/// Disk space of `checkpoints` states with these files in bytes: tensors, headers, and a margin for `state.json` and
/// the manifest. A run that keeps N checkpoints needs space for N + 1: the oldest is deleted after the newest is
/// complete.
pub fn space_needed(files: &[CheckpointFile], checkpoints: u64) -> u64 {
    let one = files
        .iter()
        .flat_map(|f| f.tensors)
        .map(|t| t.bytes().unwrap_or(u64::MAX).saturating_add(t.name.len() as u64 + 128))
        .fold(SMALL_FILES, u64::saturating_add);
    one.saturating_mul(checkpoints)
}

/// Errors: the disk of `run_dir` has fewer than `bytes` free. If the free space is unknown, the check passes.
pub fn check_space(run_dir: &Path, bytes: u64) -> Result<()> {
    match files::free_space(run_dir) {
        Some(free) if free < bytes => Err(Error::io("not enough disk space")
            .at_path(run_dir)
            .found(format!("{} free ({free} bytes)", units::bytes(free)))
            .expected(format!("{} ({bytes} bytes)", units::bytes(bytes)))
            .hint("free some space, lower `train.save_total_limit`, or set `train.output_dir` to another disk")),
        _ => Ok(()),
    }
}
