//! A checkpoint that all ranks of a job write: each its part of the tensors, into files of its own in one directory that
//! all of them see.
//!
//! ```text
//! run_dir/checkpoint-<step>/
//!   weights-00002-of-00004.safetensors ...   from rank 1: pieces of the tensors (`formats::weights::piece_name`)
//!   state.json, files that are not divided   from rank 0
//!   manifest.json                            from rank 0, when all ranks have written; it lists the files of all
//! ```

use super::manifest::{self, CheckpointManifest, ManifestEntry};
use super::save::{check_names, write_state};
use super::{CheckpointFile, STATE, TensorPlan, TensorSink, check_space, is_ours, keep, space_needed};
use crate::base::staging::{self, Staging};
use crate::base::{Error, Result, files};
use crate::comm::{Collective, Patience};
use crate::formats::weights::piece_name;
use crate::formats::writer;
use serde_json::Value;
use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A file whose tensors the ranks divide.
#[derive(Debug, Clone)]
pub struct DividedFile<'a> {
    /// The whole tensors, and the name of the file that would have them.
    pub whole: CheckpointFile<'a>,
    /// The elements of each tensor that this rank writes. Those of all ranks are the whole tensor, without overlap.
    pub own: Vec<Range<usize>>,
}

/// The name of the part of `file` that rank `rank` of `size` writes.
fn name_of_part(file: &str, rank: usize, size: usize) -> String {
    let (stem, extension) = file.rsplit_once('.').unwrap_or((file, ""));
    format!("{stem}-{:05}-of-{size:05}.{extension}", rank + 1)
}

/// The parts of `file` among the files of a checkpoint, in the order of the ranks; `None`: not all of them are there.
pub(super) fn parts_of(file: &str, files: &[String]) -> Option<Vec<String>> {
    // The name of the first part says how many there are.
    let first = name_of_part(file, 0, 0);
    let (before, after) = first.rsplit_once("00000")?;
    let sizes = files
        .iter()
        .filter_map(|name| name.strip_prefix(before)?.strip_suffix(after)?.parse::<usize>().ok());
    let parts_of = |size: usize| -> Vec<String> { (0..size).map(|rank| name_of_part(file, rank, size)).collect() };
    sizes
        .filter(|size| (1..=files.len()).contains(size))
        .map(parts_of)
        .find(|parts| parts.iter().all(|part| files.contains(part)))
}

/// As `save`, by all ranks of a job: rank 0 writes `state`, the tensors of `whole`, and its part of `divided`, each other
/// rank its part of `divided`. `fill` passes the whole of a tensor of `whole`, and the own elements of one of `divided`. All
/// ranks call it; on others than rank 0 only `divided` is used.
///
/// Errors: as `save`, on the rank that has failed; the other ranks get its error. This rank does not see the directory of
/// rank 0. No partial file stays.
pub fn save_parts(
    comm: &dyn Collective,
    run_dir: &Path,
    step: u64,
    state: &Value,
    whole: &[CheckpointFile],
    divided: &[DividedFile],
    fill: &mut dyn FnMut(&str, &TensorPlan, &mut TensorSink) -> Result<()>,
) -> Result<PathBuf> {
    let (rank, size) = (comm.world().rank, comm.world().size);
    let target = run_dir.join(keep::name_of(step));
    let (staging, directory) = share(comm, || {
        let all: Vec<CheckpointFile> = whole.iter().copied().chain(divided.iter().map(|d| d.whole)).collect();
        check_names(all.iter().map(|file| file.name).chain([STATE]))?;
        let headers: usize = all
            .iter()
            .flat_map(|f| f.tensors)
            .map(|t| size * (t.name.len() + 160))
            .sum();
        check_space(run_dir, space_needed(&all, 1).saturating_add(headers as u64))?;
        Staging::beside(&target)
    })?;
    let mut write = || {
        is_seen(&directory)?;
        let mut entries = Vec::new();
        for file in divided {
            let name = name_of_part(file.whole.name, rank, size);
            write_part(&directory.join(&name), file, rank, fill)?;
            entries.push(manifest::entry(&directory, &name)?);
        }
        if staging.is_some() {
            for file in whole {
                let path = directory.join(file.name);
                writer::write_file(&path, file.tensors, &[], |plan, sink| fill(file.name, plan, sink))?;
                entries.push(manifest::entry(&directory, file.name)?);
            }
            write_state(&directory.join(STATE), state)?;
            entries.push(manifest::entry(&directory, STATE)?);
        }
        Ok(entries)
    };
    let own = write();
    let entries = agree(comm, own)?;
    let Some(staging) = staging else { return Ok(target) };
    for entry in &entries {
        let path = staging.path().join(&entry.name);
        let found = files::size(&path)?;
        if found != entry.size {
            return Err(Error::io("rank 0 does not see a file as the rank that wrote it")
                .at_path(&path)
                .found(format!("{found} bytes"))
                .expected(format!("{} bytes", entry.size))
                .hint(SHARED));
        }
    }
    CheckpointManifest::new(step, entries).write(staging.path())?;
    staging.commit_over(&is_ours)
}

const SHARED: &str =
    "set `train.output_dir` to a directory that all ranks share, or `distributed.checkpoint = \"one\"`";

/// Checks that all ranks see a directory that rank 0 makes beside the checkpoint of `step`, and leaves nothing. All ranks
/// call it.
///
/// Errors: this rank does not see it; another rank has failed; the directory cannot be made.
pub fn check_shared(comm: &dyn Collective, run_dir: &Path, step: u64) -> Result<()> {
    let (_staging, directory) = share(comm, || Staging::beside(&run_dir.join(keep::name_of(step))))?;
    agree(comm, is_seen(&directory).map(|()| Vec::new())).map(drop)
}

/// The directory that rank 0 makes, and its path on all ranks.
fn share(comm: &dyn Collective, make: impl FnOnce() -> Result<Staging>) -> Result<(Option<Staging>, PathBuf)> {
    let staging = comm.world().is_root().then(make).transpose()?;
    let own = match &staging {
        Some(staging) => std::path::absolute(staging.path())
            .map_err(|e| Error::io("cannot find the directory").at_path(staging.path()).cause(e))?
            .into_os_string()
            .into_vec(),
        None => Vec::new(),
    };
    // Rank 0 may have done other work before.
    let patience = if staging.is_some() {
        Patience::Step
    } else {
        Patience::Long
    };
    let path = comm.all_gather_bytes(own, patience)?.swap_remove(0);
    Ok((staging, OsString::from_vec(path).into()))
}

/// Errors: rank 0 has not made this directory where this rank looks.
fn is_seen(directory: &Path) -> Result<()> {
    if staging::is_marked(directory) {
        return Ok(());
    }
    Err(
        Error::not_found("this rank does not see the directory of a checkpoint in parts")
            .at_path(directory)
            .expected("a file system that all ranks share: rank 0 has made this directory")
            .hint(SHARED),
    )
}

/// Writes the elements of this rank of the tensors of a file. Rank 0 writes tensors without elements too.
fn write_part(
    path: &Path,
    file: &DividedFile,
    rank: usize,
    fill: &mut dyn FnMut(&str, &TensorPlan, &mut TensorSink) -> Result<()>,
) -> Result<()> {
    let mut pieces = Vec::new();
    let mut wholes = Vec::new();
    for (tensor, own) in file.whole.tensors.iter().zip(&file.own) {
        let is_of_root = rank == 0 && tensor.shape.contains(&0);
        if own.is_empty() && !is_of_root {
            continue;
        }
        wholes.push(tensor);
        pieces.push(TensorPlan {
            name: piece_name(&tensor.name, own.start),
            dtype: tensor.dtype,
            shape: vec![own.len()],
        });
    }
    let mut next = wholes.into_iter();
    let written = writer::write_file(path, &pieces, &[], |piece, sink| {
        let whole = next
            .next()
            .ok_or_else(|| Error::internal("a tensor is missing").at(&piece.name))?;
        fill(file.whole.name, whole, sink)
    });
    written.map(drop)
}

/// The files that all ranks wrote. Every rank calls it with its own files or its error.
///
/// Errors: `own`; that of another rank.
fn agree(comm: &dyn Collective, own: Result<Vec<ManifestEntry>>) -> Result<Vec<ManifestEntry>> {
    let fault = || Error::internal("the files of a rank are not a list");
    let text = match &own {
        Ok(entries) => serde_json::to_vec(entries).map_err(|e| fault().cause(e))?,
        Err(_) => Vec::new(),
    };
    // A rank that has failed waits here too: its caller ends the job, and the others must not be at work then.
    let all = comm.all_gather_bytes(text, Patience::Long);
    own?;
    let all = all?;
    if all.iter().any(Vec::is_empty) {
        // The rank that has failed says why in place of this call.
        comm.all_gather_bytes(Vec::new(), Patience::Step)?;
        return Err(Error::internal("a rank has failed and does not say why"));
    }
    let mut entries = Vec::new();
    for text in all {
        let of_rank: Vec<ManifestEntry> = serde_json::from_slice(&text).map_err(|e| fault().cause(e))?;
        entries.extend(of_rank);
    }
    Ok(entries)
}
