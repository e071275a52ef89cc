//! `ft export --to mlx`: a model or an adapter for mlx-lm (Apple silicon).

use crate::base::staging::Staging;
use crate::base::{Error, Result};
use crate::commands::{export, merge, named};
use crate::hf;
use crate::recipe::Dtype;
use crate::setup::locate::{NamedKind, locate};
use std::path::{Path, PathBuf};

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    pub out: PathBuf,
    pub adapter: bool,
    /// The base model of an adapter: a directory or a hub id.
    pub base: Option<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Writes the directory `out` from a model, a run, a checkpoint, an adapter or a hub id. mlx-lm reads a model directory of
/// Hugging Face as it is; an adapter has other names and the transposed matrices.
///
/// Errors: `out` is not empty; there is nothing to export; an adapter that mlx-lm does not have; `dtype` for an adapter.
pub fn export(from: &str, out: &Path, dtype: Option<Dtype>) -> Result<Report> {
    merge::refuse_existing(out)?;
    let found = named::find(from, None)?;
    let Some(adapter) = &found.adapter else {
        let written = export::export(&found.model, out, dtype)?;
        return Ok(Report {
            out: written.out,
            adapter: false,
            base: None,
            notes: found.notes.iter().cloned().chain(written.notes).collect(),
        });
    };
    if dtype.is_some() {
        return Err(Error::usage("an adapter keeps the type in which it was trained").hint("remove `--dtype`"));
    }
    let base = match locate(&found.model)? {
        NamedKind::Model(dir) | NamedKind::Adapter(dir) | NamedKind::Checkpoint(dir) => dir,
    };
    let staging = Staging::create(out)?;
    hf::mlx_adapter(adapter, &base, staging.path())?;
    Ok(Report {
        out: staging.commit()?,
        adapter: true,
        base: Some(found.model.clone()),
        notes: found.notes.clone(),
    })
}
