//! Finds the model for a name: a model directory, a hub id, an adapter with its base, a run, or a checkpoint.

use super::export::{self, Scratch};
use crate::base::{Error, Result, paths};
use crate::formats::adapter::AdapterConfig;
use crate::hub;
use crate::model::shapes;
use std::path::{Path, PathBuf};

/// The kind of directory at a name.
#[derive(Debug, Clone, PartialEq)]
pub enum NamedKind {
    Model(PathBuf),
    Adapter(PathBuf),
    Checkpoint(PathBuf),
}

/// Inspects a directory or downloads a hub id. For a run: its `final/`, else its newest checkpoint.
///
/// Errors: the directory does not exist or holds no model.
pub fn locate(name: &str) -> Result<NamedKind> {
    let dir = if Path::new(name).exists() {
        PathBuf::from(name)
    } else {
        hub::resolve_model(name, "main", true)?
    };
    if dir.is_file() {
        return Err(Error::new("the model is a file, not a directory")
            .at_path(&dir)
            .hint("give the directory that contains it"));
    }
    if dir.join("config.json").is_file() {
        return Ok(NamedKind::Model(dir));
    }
    if dir.join("adapter_config.json").is_file() {
        return Ok(NamedKind::Adapter(dir));
    }
    if export::is_checkpoint(&dir) {
        return Ok(NamedKind::Checkpoint(dir));
    }
    if export::is_run(&dir) {
        return match export::newest(&dir)? {
            Some(inner) => locate(&inner.to_string_lossy()),
            None => Err(Error::new("this run has neither `final/` nor a checkpoint yet")
                .at_path(&dir)
                .hint(format!(
                    "finish the run: `ft train {}/recipe.toml --resume`, or start it again",
                    dir.display()
                ))),
        };
    }
    let near = ["final", "model"].map(|inner| dir.join(inner));
    let error = Error::new("no model in this directory")
        .at_path(&dir)
        .expected("a model directory (`config.json`), an adapter directory, a run or a checkpoint");
    Err(match near.iter().find(|d| d.join("config.json").is_file()) {
        Some(near) => error.hint(format!("did you mean `{}`?", near.display())),
        None => error,
    })
}

/// A base model with or without an adapter.
pub struct Named {
    /// A directory, a hub id or a shape.
    pub model: String,
    pub adapter: Option<PathBuf>,
    /// The chat template of the adapter's training.
    pub template: Option<String>,
    /// The directories that were used, if they differ from the given names.
    pub notes: Vec<String>,
    /// Directories written from checkpoints; they are removed on drop.
    _scratch: Vec<Scratch>,
}

/// Finds the model and the adapter for these names.
///
/// Errors: as `locate`; two adapters; the base of an adapter is not available.
pub fn find(model: &str, adapter: Option<&Path>) -> Result<Named> {
    let mut out = Named {
        model: model.to_string(),
        adapter: None,
        template: None,
        notes: Vec::new(),
        _scratch: Vec::new(),
    };
    if model.starts_with(shapes::PREFIX) {
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
    out.template = template.filter(|t| t.is_file()).map(|t| t.display().to_string());
    Ok(out)
}

/// Finds directories for a program that works on files: a full model (`None`: the base of the first adapter), and
/// adapters. Accepts runs, checkpoints and hub ids too.
///
/// Errors: as `find`; `model` is an adapter.
pub fn directories(model: Option<&Path>, adapters: &[PathBuf]) -> Result<(PathBuf, Vec<PathBuf>, Named)> {
    let mut out = Named {
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
        NamedKind::Model(dir) | NamedKind::Checkpoint(dir) => Ok((dir, adapters, out)),
        NamedKind::Adapter(dir) => Err(Error::new("this is an adapter, not a complete model")
            .at_path(&dir)
            .hint(format!(
                "make a complete model of it: `ft merge --adapter {} --out DIR`",
                dir.display()
            ))),
    }
}

/// Finds the adapter directory for a recipe key: a directory, a run or a hub id.
///
/// Errors: the directory does not exist; it is a checkpoint, which is not an adapter directory yet.
pub fn adapter_directory(name: &str) -> Result<PathBuf> {
    match locate(name)? {
        NamedKind::Adapter(dir) => Ok(dir),
        NamedKind::Model(dir) => Err(Error::new("this is a complete model, not an adapter")
            .at_path(&dir)
            .hint("give it as `model.path`")),
        NamedKind::Checkpoint(dir) => Err(Error::new("this is a checkpoint, not an adapter directory")
            .at_path(&dir)
            .hint(format!(
                "export it as an adapter: `ft export {} --out DIR`",
                dir.display()
            ))),
    }
}

impl Named {
    fn note(&mut self, written: &str, taken: &str) {
        self.notes.push(format!("{written}: {taken}"));
    }

    /// Writes a checkpoint to a temporary directory, equal to `final/` at that step.
    fn written(&mut self, place: NamedKind, name: &str) -> Result<NamedKind> {
        let NamedKind::Checkpoint(dir) = place else {
            return Ok(place);
        };
        let scratch = Scratch::beside(&dir)?;
        let report = export::checkpoint(&dir, &scratch.0)?;
        self.note(name, &format!("the state after step {}", report.step.unwrap_or(0)));
        self.notes.extend(report.notes);
        let dir = scratch.0.clone();
        self._scratch.push(scratch);
        Ok(if report.adapter {
            NamedKind::Adapter(dir)
        } else {
            NamedKind::Model(dir)
        })
    }

    fn adapter_of(&mut self, name: &Path) -> Result<PathBuf> {
        let text = name.to_string_lossy();
        match self.written(locate(&text)?, &text)? {
            NamedKind::Adapter(dir) => Ok(dir),
            NamedKind::Model(dir) | NamedKind::Checkpoint(dir) => {
                Err(Error::new("this is a complete model, not an adapter")
                    .at_path(&dir)
                    .hint("give it as the model, without an adapter"))
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
    if Path::new(&base).is_dir() || (hub::is_id(&base) && !paths::is_meant(&base)) {
        return Ok(base);
    }
    Err(paths::missing("directory", Path::new(&base))
        .after("the base model of the adapter is needed")
        .hint(format!("give it: `--model BASE --adapter {}`", dir.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "{}").unwrap();
    }

    #[test]
    fn directories_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        let of = |p: &str| locate(at(p).to_str().unwrap());
        touch(&at("model/config.json"));
        touch(&at("adapter/adapter_config.json"));
        touch(&at("run/resolved.toml"));
        assert_eq!(of("model").unwrap(), NamedKind::Model(at("model")));
        assert_eq!(of("adapter").unwrap(), NamedKind::Adapter(at("adapter")));
        let e = of("run").unwrap_err().to_string();
        assert!(e.contains("neither `final/` nor a checkpoint"), "{e}");
        touch(&at("run/checkpoint-20/manifest.json"));
        touch(&at("run/checkpoint-20/state.json"));
        touch(&at("run/checkpoint-3/manifest.json"));
        touch(&at("run/checkpoint-3/state.json"));
        assert_eq!(of("run").unwrap(), NamedKind::Checkpoint(at("run/checkpoint-20")));
        assert_eq!(
            of("run/checkpoint-3").unwrap(),
            NamedKind::Checkpoint(at("run/checkpoint-3"))
        );
        touch(&at("run/final/config.json"));
        assert_eq!(of("run").unwrap(), NamedKind::Model(at("run/final")));
        touch(&at("other/final/config.json"));
        std::fs::create_dir(at("empty")).unwrap();
        let e = of("empty").unwrap_err().to_string();
        assert!(e.contains("no model in this directory"), "{e}");
        let e = of("modle").unwrap_err().to_string();
        assert!(e.contains("no directory `") && e.contains("did you mean"), "{e}");
    }

    #[test]
    fn the_base_of_an_adapter() {
        let dir = tempfile::tempdir().unwrap();
        let e = base_of(dir.path()).unwrap_err().to_string();
        assert!(e.contains("adapter_config.json"), "{e}");
    }
}
