//! Lists the files of a model repository that are needed, and checks that all of them exist.

use crate::HubSettings;
use crate::download::Repository;
use crate::errors::{RequestedObject, not_cached};
use ft_base::{Error, Result};
use ft_formats::index;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Small optional files.
const OPTIONAL: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
];

pub(crate) fn resolve(settings: &HubSettings, id: &str, revision: &str) -> Result<PathBuf> {
    let wanted = RequestedObject {
        kind: "model",
        id,
        revision,
        file: None,
    };
    let repository = Repository::open(settings, "models", wanted)?;
    let config = match repository.optional("config.json")? {
        Some(path) => path,
        None => match repository.optional("adapter_config.json")? {
            Some(path) => {
                // The template of the adapter's training; before the weights, as an adapter with weights counts as whole.
                repository.optional("chat_template.jinja")?;
                repository.required("adapter_model.safetensors")?;
                return directory(&path);
            }
            None => return Err(absent(&repository, "config.json", wanted, settings)),
        },
    };
    texts(&repository)?;
    let directory = directory(&config)?;
    weights(&repository, &directory, wanted, settings)?;
    Ok(directory)
}

/// Gets the optional files, as far as they exist.
fn texts(repository: &Repository<'_>) -> Result<()> {
    for file in OPTIONAL {
        repository.optional(file)?;
    }
    Ok(())
}

/// Gets the config, and with `text` tokenizer and template too.
pub(crate) fn resolve_small(settings: &HubSettings, id: &str, revision: &str, text: bool) -> Result<PathBuf> {
    let wanted = RequestedObject {
        kind: "model",
        id,
        revision,
        file: None,
    };
    let repository = Repository::open(settings, "models", wanted)?;
    let Some(config) = repository.optional("config.json")? else {
        return Err(absent(&repository, "config.json", wanted, settings));
    };
    if text {
        texts(&repository)?;
    }
    directory(&config)
}

fn directory(file: &Path) -> Result<PathBuf> {
    file.parent()
        .map(Path::to_path_buf)
        .ok_or_else(|| Error::internal("a downloaded file has no directory").at_path(file))
}

fn weights(
    repository: &Repository<'_>,
    directory: &Path,
    wanted: RequestedObject,
    settings: &HubSettings,
) -> Result<()> {
    if repository.optional(index::SINGLE)?.is_some() {
        return Ok(());
    }
    let Some(path) = repository.optional(index::INDEX)? else {
        return Err(absent(repository, index::SINGLE, wanted, settings));
    };
    let map = index::read_map(directory, &path)?;
    let shards: BTreeSet<&String> = map.values().collect();
    for shard in shards {
        let got = repository.required(shard)?;
        if got.parent() != Some(directory) {
            return Err(Error::network("the model changed on the hub during the download")
                .at_path(&got)
                .expected(format!("a file in {}", directory.display()))
                .hint("run the same command again"));
        }
    }
    Ok(())
}

/// The error for a repository that cannot be used as a model.
fn absent(repository: &Repository<'_>, file: &str, wanted: RequestedObject, settings: &HubSettings) -> Error {
    if repository.is_offline() {
        let file = Some(file);
        return not_cached(RequestedObject { file, ..wanted }, settings);
    }
    let names = repository.names().unwrap_or_default();
    let has = |end: &str| names.iter().find(|n| n.ends_with(end));
    let error = Error::not_found(format!("the model `{}` has no `{file}`", wanted.id)).at(format!(
        "{}/{}, revision {}",
        settings.public_endpoint(),
        wanted.id,
        wanted.revision
    ));
    if let Some(pickle) = has(".bin").or(has(".pth")).or(has(".pt")) {
        return error
            .found(format!("`{pickle}`, a PyTorch pickle"))
            .expected("safetensors: loading a pickle can run code, so ft never reads one")
            .hint("look for a revision with safetensors (often `refs/pr/...`), or convert it on a machine you trust");
    }
    if let Some(gguf) = has(".gguf") {
        return error
            .found(format!("`{gguf}`"))
            .hint("this repository contains GGUF files: give the id of the original model");
    }
    error.expected("a model in Hugging Face format with safetensors")
}
