//! Writing a training state, and whether there is room for it.

use super::keep::{is_ours, name_of};
use super::manifest::{self, Manifest};
use super::{STATE, TensorPlan, Values};
use crate::base::staging::Staging;
use crate::base::{Error, Result, files, units};
use crate::formats::writer;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// One file of named tensors.
#[derive(Debug, Clone, Copy)]
pub struct Files<'a> {
    /// A plain file name, e.g. `weights.safetensors`.
    pub name: &'a str,
    pub tensors: &'a [TensorPlan],
}

/// Takes the numbers of one tensor, whole or in pieces.
pub type Sink<'a> = dyn FnMut(Values) -> Result<()> + 'a;

/// Writes `run_dir/checkpoint-<step>/`: every file synced, the manifest last, then the final name. `fill` is
/// called once for each tensor of each file, in order. A checkpoint of this step that is there already is
/// replaced when the new one is complete; another directory of that name becomes `checkpoint-<step>.left`.
///
/// Errors: no room on the disk (bytes needed and free), a number that is not finite, a tensor that is not
/// filled; older checkpoints are untouched and nothing half written stays.
pub fn save(
    run_dir: &Path,
    step: u64,
    state: &Value,
    files: &[Files],
    fill: &mut dyn FnMut(&str, &TensorPlan, &mut Sink) -> Result<()>,
) -> Result<PathBuf> {
    let mut names: Vec<&str> = files.iter().map(|f| f.name).collect();
    names.push(STATE);
    for (i, name) in names.iter().enumerate() {
        if !manifest::is_plain(name) || *name == manifest::MANIFEST || names[..i].contains(name) {
            return Err(Error::new("a checkpoint cannot have such a file, or not twice").at(name));
        }
    }
    check_space(run_dir, space_needed(files, 1))?;
    // A run directory that is gone is not made again: the rest of the run is elsewhere.
    let staging = Staging::beside(&run_dir.join(name_of(step)))?;
    for file in files {
        let path = staging.path().join(file.name);
        writer::write_file(&path, file.tensors, &[], |plan, sink| fill(file.name, plan, sink))?;
    }
    write_state(&staging.path().join(STATE), state)?;
    Manifest::of(staging.path(), step, &names)?.write(staging.path())?;
    staging.commit_over(&is_ours)
}

/// Numbers in the state must come back bit for bit, or a resumed run is another run.
fn write_state(path: &Path, state: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(state)
        .map_err(|e| Error::new("cannot write the training state").at_path(path).cause(e))?;
    match serde_json::from_str::<Value>(&text) {
        Ok(back) if back == *state => crate::base::files::write_atomic(path, format!("{text}\n").as_bytes()),
        _ => Err(Error::new("training state does not read back as it was written").at_path(path)),
    }
}

/// Bytes that `checkpoints` states of these files take on the disk: tensors, headers, and some slack for
/// `state.json` and the manifest. A run that keeps N needs room for N + 1: the oldest goes after the newest is
/// complete.
pub fn space_needed(files: &[Files], checkpoints: u64) -> u64 {
    let one = files
        .iter()
        .flat_map(|f| f.tensors)
        .map(|t| t.bytes().unwrap_or(u64::MAX).saturating_add(t.name.len() as u64 + 128))
        .fold(1u64 << 20, u64::saturating_add);
    one.saturating_mul(checkpoints)
}

/// Errors: the disk of `run_dir` has fewer than `bytes` free. A disk that does not tell is not refused.
pub fn check_space(run_dir: &Path, bytes: u64) -> Result<()> {
    match files::free_space(run_dir) {
        Some(free) if free < bytes => Err(Error::new("not enough disk space")
            .at_path(run_dir)
            .found(format!("{} free ({free} bytes)", units::bytes(free)))
            .expected(format!("{} ({bytes} bytes)", units::bytes(bytes)))
            .hint("free some space, lower `train.save_total_limit`, or set `train.output_dir` to another disk")),
        _ => Ok(()),
    }
}
