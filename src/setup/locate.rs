//! Finds the kind of directory at a name: a model, an adapter, a run, or a checkpoint.

use crate::base::{Error, Result, files};
use crate::formats::config::Config;
use crate::recipe::ModelRef;
use crate::{checkpoint, hub};
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
    let dir = match ModelRef::new(name) {
        ModelRef::Hub(id) => hub::resolve_model(&id, "main", true)?,
        ModelRef::Dir(path) if path.exists() => path,
        ModelRef::Dir(_) | ModelRef::Shape(_) => hub::local_model(Path::new(name))?,
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
    if is_checkpoint(&dir) {
        return Ok(NamedKind::Checkpoint(dir));
    }
    if is_run(&dir) {
        return match newest(&dir)? {
            Some(inner) => locate(&inner.to_string_lossy()),
            None => Err(Error::new("this run has neither `final/` nor a checkpoint yet")
                .at_path(&dir)
                .hint(format!(
                    "finish the run: `ft train {}/recipe.toml --resume`, or start it again",
                    dir.display()
                ))),
        };
    }
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|end| end == "gguf");
    if let Some(file) = files::list(&dir).unwrap_or_default().iter().find(|path| is_gguf(path)) {
        return Err(Error::unsupported("ft writes GGUF files and does not read them")
            .at_path(file)
            .expected("a model directory (`config.json`), an adapter directory, a run or a checkpoint")
            .hint("give the model from which it was exported"));
    }
    let near = ["final", "model"].map(|inner| dir.join(inner));
    let runs: Vec<PathBuf> = files::list(&dir).unwrap_or_default();
    let runs: Vec<PathBuf> = runs.into_iter().filter(|inner| is_run(inner)).collect();
    let error = Error::new("no model in this directory")
        .at_path(&dir)
        .expected("a model directory (`config.json`), an adapter directory, a run or a checkpoint");
    Err(match near.iter().find(|d| d.join("config.json").is_file()) {
        Some(near) => error.hint(format!("did you mean `{}`?", near.display())),
        None if runs.len() > 1 => error.hint(format!(
            "it has {} runs: give one of them, such as `{}`",
            runs.len(),
            runs[0].display()
        )),
        None => match runs.first() {
            Some(run) => error.hint(format!("did you mean `{}`?", run.display())),
            None => error,
        },
    })
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

/// Reads the config of a model directory with `Config::load` or `Config::read`. The error for a run or a checkpoint
/// names the model in it, or the command that makes one.
pub fn model_config(dir: &Path, read: fn(&Path) -> Result<Config>) -> Result<Config> {
    read(dir).map_err(|error| {
        let (inner, shown) = (dir.join("final"), dir.display());
        if dir.join("config.json").exists() {
            error
        } else if inner.join("config.json").exists() {
            error.hint(format!("this is a run: did you mean `{}`?", inner.display()))
        } else if inner.join("adapter_config.json").exists() {
            error.hint(format!(
                "this is a run with an adapter as result: `ft merge --adapter {shown} --out DIR` makes a model of it"
            ))
        } else if is_checkpoint(dir) {
            error.hint(format!(
                "this is a checkpoint: `ft export {shown} --out DIR` makes a model directory of it"
            ))
        } else {
            error
        }
    })
}

/// Returns `final/` of a run directory, else its newest checkpoint.
pub fn newest(run_dir: &Path) -> Result<Option<PathBuf>> {
    let last = run_dir.join("final");
    if last.is_dir() {
        return Ok(Some(last));
    }
    Ok(checkpoint::list(run_dir)?.pop().map(|(_, path)| path))
}

/// True if the directory has files that only a run directory has.
pub fn is_run(dir: &Path) -> bool {
    ["resolved.toml", "events.jsonl", "plan.json"]
        .iter()
        .any(|f| dir.join(f).is_file())
        || dir.join("final").is_dir()
        || checkpoint::list(dir).is_ok_and(|all| !all.is_empty())
}

/// True if `dir` is a checkpoint as `save` writes it.
pub fn is_checkpoint(dir: &Path) -> bool {
    dir.join("manifest.json").is_file() && dir.join(checkpoint::STATE).is_file()
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
}
