//! `ft export`: writes a model directory or an adapter directory from a checkpoint, a run or a model.

use crate::base::staging::{ScratchDirectory, Staging};
use crate::base::{Error, Result, files};
use crate::commands::merge;
use crate::formats::index::stays_inside;
use crate::formats::read_json_to_rewrite;
use crate::recipe::{DeviceRef, Dtype, ModelRef};
use crate::setup;
use crate::setup::locate::{self, NamedKind};
use crate::train::from_checkpoint::{self, RecipePaths};
use crate::train::verify;
use candle_core::Device;
use std::path::{Path, PathBuf};

/// The result of an export.
#[derive(Debug, Clone, PartialEq)]
pub struct ExportReport {
    pub out: PathBuf,
    pub adapter: bool,
    /// The step, if the source is a checkpoint.
    pub step: Option<u64>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Writes `out` from a checkpoint, a run directory (its `final/`, else its newest checkpoint), a model directory, a hub
/// id or an adapter directory. `dtype` applies to full models only. `base`: of a checkpoint, where its base model is now.
///
/// Errors: `out` is not empty; there is nothing to export; a file of `final/` is not as the run wrote it; the base model is not the
/// one of the run.
pub fn export(from: &str, out: &Path, dtype: Option<Dtype>, base: Option<&str>) -> Result<ExportReport> {
    merge::refuse_existing(out)?;
    let found = locate::locate(from)?;
    if base.is_some() && !matches!(found, NamedKind::Checkpoint(_)) {
        return Err(Error::usage("only a checkpoint needs a base model")
            .at("--base")
            .found(from)
            .hint("give a `checkpoint-<step>` directory, or leave `--base` out"));
    }
    let base = base.map(ModelRef::new);
    let paths = base.as_ref().map_or(RecipePaths::OfCheckpoint, RecipePaths::Base);
    let mut report = match &found {
        NamedKind::Checkpoint(dir) => {
            // In another type only the converted model gets the name of the output.
            let scratch = dtype.map(|_| ScratchDirectory::beside(out)).transpose()?;
            let whole = scratch.as_ref().map(|scratch| scratch.path().join("model"));
            let written = from_checkpoint::write_or(dir, out, whole.as_deref(), paths);
            let written = written.map_err(|e| verify::or_removed(e, dir))?;
            if let Some(whole) = whole.filter(|_| !written.adapter) {
                merge::merge(&whole, &[], out, dtype)?;
            }
            ExportReport {
                out: out.to_path_buf(),
                adapter: written.adapter,
                step: Some(written.step),
                notes: written.notes,
            }
        }
        NamedKind::Adapter(dir) => {
            verify::check_result(dir)?;
            copied(dir, out)?
        }
        NamedKind::Model(dir) => {
            let written = merge::merge(dir, &[], out, dtype)?;
            return Ok(ExportReport {
                out: written.out,
                adapter: false,
                step: None,
                notes: Vec::new(),
            });
        }
    };
    if dtype.is_some() && report.adapter {
        let note = "an adapter keeps the dtype in which it was trained: `--dtype` has no effect";
        report.notes.push(note.into());
    }
    Ok(report)
}

/// Refuses a link out of its directory, which would bring files of another place into a copy or an upload, and a link to a
/// directory, which can contain itself.
pub fn refuse_link_out(path: &Path) -> Result<()> {
    stays_inside(path)?;
    if path.is_symlink() && path.is_dir() {
        return Err(Error::format("the directory is a link")
            .at_path(path)
            .hint("copy it to this place"));
    }
    Ok(())
}

/// Copies an adapter directory with its `base/`, if it has one.
fn copied(dir: &Path, out: &Path) -> Result<ExportReport> {
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let from = whole(dir);
    if out
        .ancestors()
        .any(|above| above.exists() && whole(above).starts_with(&from))
    {
        return Err(Error::usage("the copy of a directory cannot lie inside it")
            .at_path(out)
            .found(format!("a path below {}", dir.display()))
            .hint("give a directory beside it"));
    }
    let staging = Staging::create(out)?;
    let mut folders = vec![(dir.to_path_buf(), staging.path().to_path_buf())];
    while let Some((from, to)) = folders.pop() {
        files::create_dir_all(&to)?;
        for path in files::list(&from)? {
            let Some(name) = path.file_name() else { continue };
            refuse_link_out(&path)?;
            if path.is_dir() {
                folders.push((path.clone(), to.join(name)))
            } else {
                files::copy_atomic(&path, &to.join(name))?
            }
        }
    }
    name_own_base(staging.path(), out)?;
    staging.commit_new()?;
    Ok(ExportReport {
        out: out.to_path_buf(),
        adapter: true,
        step: None,
        notes: Vec::new(),
    })
}

/// Lets the config of an adapter with a `base/` of its own name the one in `out`: another tool would load that of the run, which
/// may be replaced later.
fn name_own_base(copy: &Path, out: &Path) -> Result<()> {
    let path = copy.join("adapter_config.json");
    if !copy.join("base").is_dir() || !path.is_file() {
        return Ok(());
    }
    let mut config = read_json_to_rewrite(&path)?;
    config.insert(
        "base_model_name_or_path".into(),
        format!("{}/base", out.display()).into(),
    );
    files::write_atomic(&path, format!("{:#}\n", serde_json::Value::Object(config)).as_bytes())
}

/// Opens the device of `--device`, for commands that do not train.
pub fn device(name: Option<&str>) -> Result<Device> {
    setup::device(&name.map_or(DeviceRef::Auto, DeviceRef::new))
}
