//! Finds the model for a name: a model directory, a hub id, an adapter with its base, a run, or a checkpoint.

use crate::base::staging::ScratchDirectory;
use crate::base::{Error, Result, paths};
use crate::formats::adapter::AdapterConfig;
use crate::formats::index::stays_inside;
use crate::recipe::ModelRef;
use crate::report;
use crate::setup::locate::{NamedKind, locate};
use crate::train::from_checkpoint::{self, RecipePaths};
use crate::train::verify;
use std::path::{Path, PathBuf};

/// A base model with or without an adapter.
pub struct ModelAndAdapter {
    /// A directory, a hub id or a shape.
    pub model: String,
    pub adapter: Option<PathBuf>,
    /// The chat template of the adapter's training.
    pub template: Option<PathBuf>,
    /// The directories that were used, if they differ from the given names.
    pub notes: Vec<String>,
    /// Directories written from checkpoints; they are removed on drop.
    _scratch: Vec<ScratchDirectory>,
}

/// Finds the model and the adapter for these names.
///
/// Errors: as `locate`; two adapters; the base of an adapter is not available.
pub fn find(model: &str, adapter: Option<&Path>) -> Result<ModelAndAdapter> {
    let mut out = ModelAndAdapter {
        model: model.to_string(),
        adapter: None,
        template: None,
        notes: Vec::new(),
        _scratch: Vec::new(),
    };
    if ModelRef::new(model).is_shape() {
        out.adapter = adapter.map(Path::to_path_buf);
        return Ok(out);
    }
    match out.written(locate(model)?, model)? {
        NamedKind::Adapter(dir) => {
            if let Some(other) = adapter {
                return Err(Error::usage("the model is an adapter, and a second adapter is given")
                    .found(format!("{} and {}", dir.display(), other.display()))
                    .hint("give the base model with `--model`; `ft merge` combines several adapters"));
            }
            out.model = base_of(&dir)?;
            out.note(
                model,
                &format!("the adapter {} on its base {}", dir.display(), out.model),
            );
            out.adapter = Some(dir);
        }
        NamedKind::Model(dir) | NamedKind::Checkpoint(dir) => out.model = dir.display().to_string(),
    }
    if let Some(named) = adapter {
        out.adapter = Some(out.adapter_of(named)?);
    }
    let template = out.adapter.as_ref().map(|dir| dir.join("chat_template.jinja"));
    out.template = template.filter(|t| t.is_file());
    out.template.iter().try_for_each(|file| stays_inside(file))?;
    Ok(out)
}

/// The directories that `directories` found.
pub struct NamedDirectories {
    pub model: PathBuf,
    pub adapters: Vec<PathBuf>,
    /// The notes, and directories that are removed on drop.
    pub found: ModelAndAdapter,
}

/// Finds directories for a program that works on files: a full model (`None`: the base of the first adapter), and
/// adapters. Accepts runs, checkpoints and hub ids too.
///
/// Errors: as `find`; `model` is an adapter.
pub fn directories(model: Option<&Path>, adapters: &[PathBuf]) -> Result<NamedDirectories> {
    let mut out = ModelAndAdapter {
        model: String::new(),
        adapter: None,
        template: None,
        notes: Vec::new(),
        _scratch: Vec::new(),
    };
    let adapters = adapters.iter().map(|a| out.adapter_of(a)).collect::<Result<Vec<_>>>()?;
    let name = match (model, adapters.first()) {
        (Some(model), _) => model.to_string_lossy().into_owned(),
        (None, Some(adapter)) => {
            let base = base_of(adapter)?;
            out.note(&adapter.display().to_string(), &format!("on its base {base}"));
            base
        }
        (None, None) => return Err(Error::usage("no model is given").expected("`--model MODEL`")),
    };
    match out.written(locate(&name)?, &name)? {
        NamedKind::Model(dir) | NamedKind::Checkpoint(dir) => Ok(NamedDirectories {
            model: dir,
            adapters,
            found: out,
        }),
        NamedKind::Adapter(dir) => Err(Error::new("this is an adapter, not a complete model")
            .at_path(&dir)
            .hint(format!(
                "make a complete model of it: `ft merge --adapter {} --out DIR`",
                dir.display()
            ))),
    }
}

impl ModelAndAdapter {
    fn note(&mut self, written: &str, taken: &str) {
        self.notes.push(format!("{written}: {taken}"));
    }

    /// Writes a checkpoint to a temporary directory, equal to `final/` at that step.
    fn written(&mut self, place: NamedKind, name: &str) -> Result<NamedKind> {
        let NamedKind::Checkpoint(dir) = place else {
            return Ok(place);
        };
        let scratch = ScratchDirectory::beside(&dir)?;
        // Below it: what is marked as temporary is no result.
        let written = scratch.path().join("model");
        let report = from_checkpoint::write(&dir, &written, RecipePaths::OfCheckpoint)
            .map_err(|e| verify::or_removed(e, &dir))?;
        self.note(name, &format!("the state after step {}", report.step));
        self.notes.extend(report.notes);
        self._scratch.push(scratch);
        Ok(if report.adapter {
            NamedKind::Adapter(written)
        } else {
            NamedKind::Model(written)
        })
    }

    fn adapter_of(&mut self, name: &Path) -> Result<PathBuf> {
        let text = name.to_string_lossy();
        match self.written(locate(&text)?, &text)? {
            NamedKind::Adapter(dir) => Ok(dir),
            NamedKind::Model(dir) | NamedKind::Checkpoint(dir) => {
                Err(Error::new("this is a complete model, not an adapter")
                    .at_path(&dir)
                    .hint("give it with `--model`, without `--adapter`; a complete model needs no merge"))
            }
        }
    }
}

/// The base model of an adapter. Errors: the config has none, or it is not available.
fn base_of(dir: &Path) -> Result<String> {
    let config = AdapterConfig::load(dir)?;
    let inside = dir.join("base");
    if inside.join("config.json").is_file() {
        return Ok(inside.display().to_string());
    }
    let Some(base) = config.base_model_name_or_path.filter(|b| !b.is_empty()) else {
        return Err(Error::new("the adapter does not name its base model")
            .at_path(dir)
            .hint(format!("give it: `--model BASE --adapter {}`", dir.display())));
    };
    let named = ModelRef::new(&base);
    match &named {
        ModelRef::Dir(dir) if dir.is_dir() => Ok(base),
        ModelRef::Hub(id) if named.with_revision().is_none() => {
            // Before the request: the user did not type this id, and a download can be long.
            report::note(&format!(
                "{}: the base model that the adapter names, {id}, is loaded from the hub or its local cache",
                dir.display()
            ));
            let revision = config.revision.filter(|r| !r.is_empty() && r != "main");
            Ok(revision.map_or(id.clone(), |r| format!("{id}@{r}")))
        }
        _ => Err(paths::missing("directory", Path::new(&base))
            .after("the base model of the adapter is needed")
            .hint(format!("give it: `--model BASE --adapter {}`", dir.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_of_an_adapter() {
        let dir = tempfile::tempdir().unwrap();
        let e = base_of(dir.path()).unwrap_err().to_string();
        assert!(e.contains("adapter_config.json"), "{e}");
    }
}
