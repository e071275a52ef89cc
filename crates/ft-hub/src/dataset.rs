//! Selects the files of a data set repository that contain the training rows.

use crate::download::Repository;
use crate::errors::Wanted;
use crate::{DATA_KINDS, HubSettings, data_kind, is_inside};
use ft_base::{Error, Result};
use std::path::{Path, PathBuf};

pub(crate) fn resolve(settings: &HubSettings, id: &str, file: Option<&str>, revision: &str) -> Result<Vec<PathBuf>> {
    let wanted = Wanted {
        kind: "data set",
        id,
        revision,
        file: None,
    };
    let repository = Repository::open(settings, "datasets", wanted)?;
    if let Some(file) = file {
        return Ok(vec![repository.required(file)?]);
    }
    let names = match (repository.names(), repository.snapshot()) {
        (Some(names), _) => names,
        (None, Some(snapshot)) => cached(&snapshot),
        (None, None) => Vec::new(),
    };
    let chosen = train_files(&names);
    if chosen.is_empty() {
        let mut found: Vec<&str> = names
            .iter()
            .map(String::as_str)
            .filter(|n| data_kind(n).is_some())
            .collect();
        found.truncate(8);
        return Err(Error::not_found(format!(
            "the data set `{id}` has no file that is clearly its train split"
        ))
        .at(format!("{}/datasets/{id}, revision {revision}", settings.endpoint))
        .found(if found.is_empty() {
            format!("no {} file", DATA_KINDS.join(", "))
        } else {
            found.join(", ")
        })
        .hint(format!("name one file: `{id}:path/in/the/repository.jsonl`")));
    }
    chosen.iter().map(|f| repository.required(f)).collect()
}

/// The files of the train split: those named for it, or all data files if none is named for a split. If there are
/// several kinds, takes the one with the most structure; if there are several configurations, does not guess.
fn train_files(names: &[String]) -> Vec<String> {
    let data: Vec<&String> = names
        .iter()
        .filter(|n| data_kind(n).is_some() && is_inside(n) && !is_card(n))
        .collect();
    let train: Vec<&String> = data.iter().copied().filter(|n| split_of(n) == Some("train")).collect();
    let pool = if !train.is_empty() {
        train
    } else if data.iter().all(|n| split_of(n).is_none()) {
        data
    } else {
        return Vec::new();
    };
    for kind in DATA_KINDS {
        let same: Vec<&String> = pool.iter().copied().filter(|n| data_kind(n) == Some(kind)).collect();
        if same.is_empty() {
            continue;
        }
        let folders: std::collections::BTreeSet<_> = same.iter().map(|n| Path::new(n.as_str()).parent()).collect();
        if folders.len() > 1 {
            return Vec::new();
        }
        let mut out: Vec<String> = same.into_iter().cloned().collect();
        out.sort();
        return out;
    }
    Vec::new()
}

/// True for JSON files that describe the data set.
fn is_card(name: &str) -> bool {
    let base = name.rsplit('/').next().unwrap_or(name);
    ["dataset_infos.json", "dataset_info.json", "state.json", "config.json"].contains(&base) || base.starts_with('.')
}

/// The split in the name of a path.
fn split_of(name: &str) -> Option<&'static str> {
    let lower = name.to_lowercase();
    let mut words = lower.split(['/', '-', '_', '.']);
    words.find_map(|w| match w {
        "train" | "training" => Some("train"),
        "test" | "testing" => Some("test"),
        "validation" | "valid" | "val" | "dev" | "eval" => Some("validation"),
        _ => None,
    })
}

/// Data files of a cached snapshot, up to two folders deep, as paths in the repository.
fn cached(snapshot: &Path) -> Vec<String> {
    let mut out = Vec::new();
    let mut folders = vec![(snapshot.to_path_buf(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        for path in ft_base::files::list(&folder).unwrap_or_default() {
            if path.is_dir() && depth < 3 {
                folders.push((path, depth + 1));
            } else if let Ok(name) = path.strip_prefix(snapshot) {
                out.push(name.to_string_lossy().into_owned());
            }
        }
    }
    out.sort();
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(names: &[&str]) -> Vec<String> {
        train_files(&names.iter().map(|n| n.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn the_train_split_is_found_by_name() {
        assert_eq!(train(&["README.md", "train.jsonl", "test.jsonl"]), ["train.jsonl"]);
        assert_eq!(
            train(&[
                "data/train-00001-of-00002.parquet",
                "data/train-00000-of-00002.parquet",
                "data/test-0.parquet"
            ]),
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
        );
        assert_eq!(train(&["alpaca_data.json", "dataset_infos.json"]), ["alpaca_data.json"]);
        assert_eq!(train(&["train.csv", "train.parquet"]), ["train.parquet"]);
        assert_eq!(
            train(&["main/train-0.parquet", "socratic/train-0.parquet"]),
            Vec::<String>::new()
        );
        assert_eq!(train(&["test.jsonl"]), Vec::<String>::new());
        assert_eq!(train(&["../train.jsonl", "a.txt"]), Vec::<String>::new());
    }
}
