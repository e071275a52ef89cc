//! The sources of a recipe: which files are read, and how.

use crate::base::{Error, Result, files};
use crate::data::source::{Source, is_data_file};
use crate::hub::{self, DatasetPart};
use crate::recipe::{Auto, Data, Recipe, RowFormat, TextUnit};
use std::path::{Path, PathBuf};

/// Rows of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowSet<'a> {
    Train,
    Eval,
    /// Rows of these files, read like those of `data.train`.
    Files(&'a [String]),
}

/// Where the files of one source are.
struct SourcePlace<'a> {
    revision: &'a str,
    part: DatasetPart<'a>,
}

/// The splits for an evaluation if the recipe names none; the empty name stands for files without names of splits.
const EVAL_SPLITS: [&str; 3] = ["validation", "test", ""];

/// The splits to look for, the first one that exists.
fn splits(wanted: &Auto<String>) -> Vec<&str> {
    wanted
        .given()
        .map_or(EVAL_SPLITS.to_vec(), |split| vec![split.as_str()])
}

/// The sources of these rows, with their files. Hub datasets are downloaded.
///
/// Errors: a file, a configuration or a split that does not exist, a pattern or a folder without data files.
pub fn sources(recipe: &Recipe, rows: RowSet) -> Result<Vec<Source>> {
    let data = &recipe.data;
    let plain = |paths: &[String], limit: usize, splits: &[&str]| -> Result<Vec<Source>> {
        let place = SourcePlace {
            revision: &data.revision,
            part: DatasetPart {
                config: data.config.as_deref(),
                splits,
            },
        };
        let one = |path: &String| {
            Ok(Source {
                name: path.clone(),
                format: data.format,
                mapping: data.mapping(),
                text_unit: data.text_unit,
                ..Source::new(find(path, &place)?)
            })
        };
        let mut sources = paths.iter().map(one).collect::<Result<Vec<_>>>()?;
        limit_together(&mut sources, limit);
        Ok(sources)
    };
    if rows == RowSet::Eval {
        return plain(&data.eval, 0, &splits(&data.eval_split)).map_err(|e| {
            if e.what().contains("split") {
                e.hint("name the split in `data.eval_split`, or the file: `org/name:path/in/the/repository.jsonl`")
            } else {
                e
            }
        });
    }
    let of_data = splits(&data.split);
    if let RowSet::Files(paths) = rows {
        return plain(paths, 0, &of_data);
    }
    let mut out = plain(&data.train, data.limit, &of_data)?;
    let split_of_data = data.split.to_string();
    for keys in &data.sources {
        let split = [keys.split.as_deref().unwrap_or(&split_of_data)];
        let place = SourcePlace {
            revision: keys.revision.as_deref().unwrap_or(&data.revision),
            part: DatasetPart {
                config: keys.config.as_deref().or(data.config.as_deref()),
                splits: &split,
            },
        };
        let mut files = Vec::new();
        for path in &keys.path {
            files.extend(find(path, &place)?);
        }
        let limit = keys.limit.unwrap_or(data.limit);
        out.push(Source {
            name: keys.path.join(", "),
            format: match keys.format {
                RowFormat::Auto => data.format,
                format => format,
            },
            mapping: keys.mapping(data),
            text_unit: match keys.text_unit {
                TextUnit::Auto => data.text_unit,
                unit => unit,
            },
            limit: (limit > 0).then_some(limit),
            weight: keys.weight,
            ..Source::new(files)
        });
    }
    Ok(out)
}

/// `data.limit` counts the rows of all files of `data.train`.
fn limit_together(sources: &mut Vec<Source>, limit: usize) {
    if limit == 0 || sources.is_empty() {
        return;
    }
    let files = sources.iter().flat_map(|source| source.files.clone()).collect();
    let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
    let all = Source {
        name: names.join(", "),
        files,
        limit: Some(limit),
        ..sources[0].clone()
    };
    *sources = vec![all];
}

/// The files of a path: a file, a folder, a pattern, or a hub dataset.
fn find(path: &str, place: &SourcePlace) -> Result<Vec<String>> {
    let here = Path::new(path);
    let found = if here.is_dir() {
        folder(here, place)?
    } else if !here.exists() && path.contains(['*', '?', '[']) {
        pattern(path)?
    } else {
        hub::resolve_dataset_file(path, place.revision, &place.part, true)?
    };
    Ok(found.into_iter().map(|file| file.display().to_string()).collect())
}

/// The data files in a folder; if it has none, those in the folders below it.
fn folder(path: &Path, place: &SourcePlace) -> Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    inside(path, path, 0, &mut names)?;
    let top: Vec<String> = names.iter().filter(|name| !name.contains('/')).cloned().collect();
    let names = match place.part.config {
        None if top
            .iter()
            .any(|name| is_data_file(Path::new(name)) && !hub::is_about_the_data(name)) =>
        {
            top
        }
        _ => names,
    };
    let chosen = hub::select(&names, &place.part, hub::SeveralKinds::Refused).map_err(|e| e.or_at(path.display()))?;
    let chosen = chosen.into_iter().map(|name| path.join(name));
    Ok(chosen.filter(|file| is_current(file)).collect())
}

/// False for an Arrow file of an earlier `save_to_disk` into the same folder: `state.json` names those of the last one.
fn is_current(file: &Path) -> bool {
    let state = files::read_text(&file.with_file_name("state.json")).unwrap_or_default();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap_or_default();
    let name = file.file_name().map(|name| name.to_string_lossy());
    let is_named = |of: &serde_json::Value| of["filename"].as_str() == name.as_deref();
    let named = state["_data_files"].as_array();
    named.is_none_or(|named| file.extension().is_none_or(|kind| kind != "arrow") || named.iter().any(is_named))
}

/// Names of files, relative to `root`, down to three folders.
fn inside(root: &Path, path: &Path, depth: usize, out: &mut Vec<String>) -> Result<()> {
    for entry in files::list(path)? {
        if entry.is_dir() && depth < 3 {
            inside(root, &entry, depth + 1, out)?;
        } else if let Ok(name) = entry.strip_prefix(root) {
            out.push(name.to_string_lossy().replace('\\', "/"));
        }
    }
    Ok(())
}

/// The data files that a pattern such as `data/*.jsonl` matches, in the order of their names.
fn pattern(path: &str) -> Result<Vec<PathBuf>> {
    // As a shell does it: `*` leaves out hidden files.
    let options = glob::MatchOptions {
        require_literal_leading_dot: true,
        ..glob::MatchOptions::new()
    };
    let matches = glob::glob_with(path, options).map_err(|e| {
        Error::usage("the pattern is not valid")
            .at(path)
            .cause(e)
            .hint("`*` and `?` stand for characters of one name, `**` for folders, `[ab]` for one of these characters")
    })?;
    let mut found = Vec::new();
    let mut others = 0;
    for file in matches {
        let file = file.map_err(|e| Error::io("cannot read the folder").at(path).cause(e))?;
        if file.is_file() && is_data_file(&file) {
            found.push(file)
        } else {
            others += 1
        }
    }
    found.sort();
    if found.is_empty() {
        return Err(Error::not_found("no data file matches the pattern")
            .at(path)
            .found(match others {
                0 => "nothing".to_string(),
                n => format!("{n} folders or files of other kinds"),
            })
            .hint("check the folder and the file extension; the path is relative to the current directory"));
    }
    Ok(found)
}

impl Data {
    /// True if all training and evaluation files are on this machine.
    pub fn is_here(&self) -> bool {
        let mut paths = self.train_paths().chain(&self.eval);
        paths.all(|path| {
            let here = Path::new(path);
            here.exists() || path.contains(['*', '?', '[']) && pattern(path).is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_hugging_face_datasets_are_found() {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens/arrow");
        let of = |folder: &str, split: &str| {
            let path = goldens.join(folder);
            let text = format!("[model]\npath = \"m\"\n[data]\ntrain = {path:?}\nsplit = {split:?}\n");
            let recipe = crate::recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
            let files = sources(&recipe, RowSet::Train).unwrap().remove(0).files;
            let name = |file: &String| Path::new(file).strip_prefix(&path).unwrap().display().to_string();
            files.iter().map(name).collect::<Vec<_>>()
        };
        let shards = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"];
        assert_eq!(of("saved/train", "train"), shards);
        assert_eq!(of("saved", "train"), shards.map(|name| format!("train/{name}")));
        assert_eq!(of("saved", "test"), ["test/data-00000-of-00001.arrow"]);
        let cached = |folder: &str, split: &str| of(&format!("cached/{folder}"), split);
        assert_eq!(cached("org___rows/default/0.0.0/0123abcd", "test"), ["rows-test.arrow"]);
        assert_eq!(cached("org___rows", "train").len(), 2);
    }
}
