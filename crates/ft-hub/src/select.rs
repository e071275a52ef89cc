//! Selects the data files of a configuration and a split by their names, in a repository or in a folder.

use crate::{DATA_KINDS, data_kind, is_inside};
use ft_base::{Error, Result};
use std::collections::BTreeSet;

/// The rows of a dataset that are wanted.
#[derive(Debug, Clone, Copy)]
pub struct DatasetPart<'a> {
    /// The configuration; `None`: the only one.
    pub config: Option<&'a str>,
    /// Splits, the first one that exists is taken. `train`, and an empty name, also stand for files of which none has
    /// the name of a split.
    pub splits: &'a [&'a str],
}

impl DatasetPart<'_> {
    /// The train split of the only configuration.
    pub const TRAIN: DatasetPart<'static> = DatasetPart {
        config: None,
        splits: &["train"],
    };
}

/// Names of folders that are not names of a configuration.
const PLAIN_FOLDERS: [&str; 4] = ["data", "default", "dataset", "datasets"];

/// The usual name of the split that a word means.
fn usual(word: &str) -> Option<&'static str> {
    match word {
        "train" | "training" => Some("train"),
        "test" | "testing" => Some("test"),
        "validation" | "valid" | "val" | "dev" | "eval" => Some("validation"),
        _ => None,
    }
}

/// The properties of a file that follow from its path.
#[derive(Debug)]
struct ListedFile<'a> {
    name: &'a str,
    kind: &'static str,
    config: String,
    /// The name of the split as it is written (`train_sft`), and the usual name of it.
    split: Option<(String, &'static str)>,
}

impl<'a> ListedFile<'a> {
    fn new(name: &'a str) -> Option<Self> {
        let kind = data_kind(name).filter(|_| is_inside(name) && !is_about_the_data(name))?;
        let lower = name.to_lowercase();
        let mut folders: Vec<&str> = lower.split('/').collect();
        let base = folders.pop().unwrap_or_default();
        let stem = stem(base);
        let words = |text: &str| {
            let word = text.split(['-', '_', '.']).find_map(usual);
            word.map(|usual| usual.to_string())
        };
        let in_stem = words(stem).and_then(|word| {
            let first = stem.split(['-', '_', '.']).next().and_then(usual);
            // `train_sft` is a split of its own; in `alpaca-train` only the end is one.
            let written = first.map_or(word.clone(), |_| stem.to_string());
            Some((written, usual(&word)?))
        });
        let split = in_stem.or_else(|| {
            let at = folders.iter().rposition(|folder| words(folder).is_some())?;
            let folder = folders.remove(at);
            Some((folder.to_string(), usual(&words(folder)?)?))
        });
        folders.retain(|folder| !PLAIN_FOLDERS.contains(folder));
        Some(Self {
            name,
            kind,
            config: folders.join("/"),
            split,
        })
    }
}

/// The name of a file without kind, number of the part and hash: `train-00000-of-00002-ab12.parquet` is `train`.
fn stem(base: &str) -> &str {
    let mut stem = base;
    for end in [".gz", ".zst"].into_iter().chain(DATA_KINDS) {
        stem = stem.strip_suffix(end).unwrap_or(stem).trim_end_matches('.');
    }
    if let Some((before, _)) = stem.split_once("-of-") {
        stem = before;
    }
    stem.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-')
}

/// True for files that describe the dataset, or that Hugging Face datasets derived from it.
pub fn is_about_the_data(name: &str) -> bool {
    let base = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let cards = [
        "dataset_infos.json",
        "dataset_info.json",
        "dataset_dict.json",
        "state.json",
        "config.json",
    ];
    let texts = ["readme", "license", "requirements"];
    let is_text = is_text(data_kind(name).unwrap_or("txt"));
    cards.contains(&base.as_str())
        || base.starts_with('.')
        || is_text && texts.iter().any(|text| base.starts_with(text))
        // Results of `map` and `filter` in the cache of Hugging Face datasets.
        || base.starts_with("cache-") && base.ends_with(".arrow")
        || name.split('/').any(|folder| folder.starts_with('.'))
}

/// What files of several kinds mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeveralKinds {
    /// The kind of most files has the rows, as in Hugging Face datasets.
    MostFiles,
    /// An error, unless the files of one kind are copies of the others.
    Refused,
}

/// The files of a part of a dataset, sorted; `names` are paths inside of it.
///
/// # Errors
/// No data files; several configurations and none is named; no such configuration or split; a name that fits several
/// splits; files of several kinds that are refused.
pub fn select(names: &[String], part: &DatasetPart, kinds: SeveralKinds) -> Result<Vec<String>> {
    let mut files: Vec<ListedFile> = names.iter().filter_map(|name| ListedFile::new(name)).collect();
    if files.is_empty() {
        return Err(Error::not_found("there are no data files").found(format!("no {} file", DATA_KINDS.join(", "))));
    }
    of_config(&mut files, part.config)?;
    let files = of_kind(of_split(files, part.splits)?, kinds)?;
    let mut out: Vec<String> = files.iter().map(|file| file.name.to_string()).collect();
    out.sort();
    Ok(out)
}

/// True for kinds whose files are often notes beside the rows.
fn is_text(kind: &str) -> bool {
    matches!(kind, "txt" | "md")
}

/// The files of one kind. Texts beside files with columns are notes.
fn of_kind(mut files: Vec<ListedFile>, kinds: SeveralKinds) -> Result<Vec<ListedFile>> {
    if files.iter().any(|file| !is_text(file.kind)) {
        files.retain(|file| !is_text(file.kind));
    }
    let number = |files: &[ListedFile], kind: &str| files.iter().filter(|file| file.kind == kind).count();
    let there = || DATA_KINDS.into_iter().filter(|kind| number(&files, kind) > 0);
    let Some(most_structure) = there().next() else {
        return Ok(files);
    };
    let place = |file: &ListedFile| {
        let (folder, base) = file.name.rsplit_once('/').unwrap_or(("", file.name));
        (folder.to_string(), stem(&base.to_lowercase()).to_string())
    };
    let of_best: BTreeSet<_> = files.iter().filter(|f| f.kind == most_structure).map(place).collect();
    let kind = if files.iter().all(|file| of_best.contains(&place(file))) {
        // Copies of the same rows.
        most_structure
    } else if kinds == SeveralKinds::MostFiles {
        // The first of the best: the one with the most structure.
        there()
            .rev()
            .max_by_key(|kind| number(&files, kind))
            .unwrap_or(most_structure)
    } else {
        let counts: Vec<String> = there()
            .map(|kind| format!("{} .{kind}", number(&files, kind)))
            .collect();
        return Err(Error::usage("the data files are of several kinds")
            .found(counts.join(", "))
            .expected("files of one kind")
            .hint(format!(
                "name the files: `FOLDER/*.{most_structure}`; a list can name several patterns"
            )));
    };
    files.retain(|file| file.kind == kind);
    Ok(files)
}

fn listed(names: BTreeSet<&str>) -> String {
    let mut names: Vec<&str> = names.into_iter().collect();
    let more = names.len().saturating_sub(12);
    names.truncate(12);
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

fn of_config(files: &mut Vec<ListedFile>, wanted: Option<&str>) -> Result<()> {
    let configs: BTreeSet<String> = files.iter().map(|file| file.config.clone()).collect();
    let named = || {
        configs
            .iter()
            .map(String::as_str)
            .filter(|c| !c.is_empty())
            .collect::<BTreeSet<_>>()
    };
    let Some(wanted) = wanted else {
        // Files outside of the folders of configurations are the default.
        if configs.len() > 1 && configs.contains("") {
            files.retain(|file| file.config.is_empty());
        } else if configs.len() > 1 {
            let first = configs.iter().next().cloned().unwrap_or_default();
            return Err(Error::not_found("the dataset has several configurations")
                .found(listed(named()))
                .expected("one of them")
                .hint(format!("name it: `DatasetPart::config = \"{first}\"`")));
        }
        return Ok(());
    };
    let lower = wanted.to_lowercase();
    let fits = |file: &ListedFile| {
        file.config == lower
            || file.config.split('/').any(|folder| folder == lower)
            || file.config.is_empty() && lower == "default"
            || file.config.is_empty()
                && stem(file.name.rsplit('/').next().unwrap_or_default())
                    .split(['-', '_', '.'])
                    .any(|w| w.eq_ignore_ascii_case(wanted))
    };
    if !files.iter().any(fits) {
        return Err(Error::not_found(format!("the dataset has no configuration `{wanted}`"))
            .found(match named() {
                names if names.is_empty() => "no folders of configurations".to_string(),
                names => listed(names),
            })
            .hint(match named().first() {
                Some(first) => format!("name one of these: `DatasetPart::config = \"{first}\"`"),
                None => "leave out `DatasetPart::config`".to_string(),
            }));
    }
    files.retain(fits);
    Ok(())
}

fn of_split<'a>(files: Vec<ListedFile<'a>>, wanted: &[&str]) -> Result<Vec<ListedFile<'a>>> {
    for split in wanted {
        let written = |file: &&ListedFile| {
            file.split
                .as_ref()
                .is_some_and(|(written, _)| written.eq_ignore_ascii_case(split))
        };
        if files.iter().any(|file| written(&file)) {
            return Ok(files.into_iter().filter(|file| written(&file)).collect());
        }
        let usual = usual(&split.to_lowercase());
        let fits = |file: &&ListedFile| usual.is_some() && file.split.as_ref().map(|(_, usual)| *usual) == usual;
        let names: BTreeSet<&str> = files
            .iter()
            .filter(fits)
            .filter_map(|file| Some(file.split.as_ref()?.0.as_str()))
            .collect();
        if names.len() > 1 {
            let first = names.first().copied().unwrap_or_default();
            return Err(
                Error::not_found(format!("several splits of the dataset are named like `{split}`"))
                    .found(listed(names.clone()))
                    .expected("one of them")
                    .hint(format!("name it: `DatasetPart::split = \"{first}\"`")),
            );
        }
        if !names.is_empty() {
            return Ok(files.into_iter().filter(|file| fits(&file)).collect());
        }
        if ["train", ""].contains(split) && files.iter().all(|file| file.split.is_none()) {
            return Ok(files);
        }
    }
    let names: BTreeSet<&str> = files
        .iter()
        .map(|file| file.split.as_ref().map_or("(none)", |(written, _)| written))
        .collect();
    let error = Error::not_found(format!("the dataset has no split `{}`", wanted.join("` or `")));
    let first = names
        .iter()
        .find(|name| **name != "(none)")
        .map(|name| name.to_string());
    let error = error.found(listed(names));
    Err(match first {
        Some(first) => error.hint(format!("name one of these: `DatasetPart::split = \"{first}\"`")),
        None => error.hint("use `DatasetPart::split = \"train\"`: the files have no names of splits"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str], config: Option<&str>, splits: &[&str]) -> Result<Vec<String>> {
        let names: Vec<String> = names.iter().map(|n| n.to_string()).collect();
        select(&names, &DatasetPart { config, splits }, SeveralKinds::Refused)
    }

    fn train(names: &[&str]) -> Vec<String> {
        of(names, None, &["train"]).unwrap()
    }

    fn refused(names: &[&str], config: Option<&str>, splits: &[&str], parts: &[&str]) {
        let e = of(names, config, splits).unwrap_err().to_string();
        parts
            .iter()
            .for_each(|part| assert!(e.contains(part), "no {part:?} in: {e}"));
    }

    #[test]
    fn folders_of_hugging_face_datasets_have_splits() {
        let names = [
            "dataset_dict.json",
            "test/data-00000-of-00001.arrow",
            "train/data-00000-of-00002.arrow",
            "train/data-00001-of-00002.arrow",
            "train/dataset_info.json",
            "train/state.json",
        ];
        assert_eq!(train(&names), names[2..4]);
        assert_eq!(of(&names, None, &["test"]).unwrap(), names[1..2]);
        let cached = [
            "cache-0123.arrow",
            "dataset_info.json",
            "rows-test.arrow",
            "rows-train-00000-of-00001.arrow",
        ];
        assert_eq!(train(&cached), cached[3..]);
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
        assert_eq!(train(&["train.csv", "notes.md"]), ["train.csv"]);
        assert_eq!(
            train(&["requirements_qa.jsonl", "requirements.txt"]),
            ["requirements_qa.jsonl"]
        );
        assert_eq!(
            train(&["train.jsonl.gz", "LICENSE.txt", ".github/x.json"]),
            ["train.jsonl.gz"]
        );
        assert_eq!(
            train(&["squad-train-v1.1.json", "squad-dev-v1.1.json"]),
            ["squad-train-v1.1.json"]
        );
        assert_eq!(
            train(&["train/0001.parquet", "train/0000.parquet", "test/0000.parquet"]).len(),
            2
        );
        refused(
            &["test.jsonl"],
            None,
            &["train"],
            &["no split `train`", "test", "`DatasetPart::split = \"test\"`"],
        );
        refused(&["../train.jsonl", "a.bin"], None, &["train"], &["no data files"]);
    }

    #[test]
    fn files_of_several_kinds_are_copies_or_refused() {
        let copies = ["a-00000-of-00001.parquet", "a.jsonl", "b.parquet", "b.jsonl"];
        assert_eq!(train(&copies), [copies[0], copies[2]]);
        let mixed = ["labels.json", "part0.csv", "part1.csv.gz", "part2.csv"];
        refused(
            &mixed,
            None,
            &["train"],
            &["of several kinds", "1 .json, 3 .csv", "`FOLDER/*.json`"],
        );
        let names: Vec<String> = mixed.iter().map(|n| n.to_string()).collect();
        let hub = |names: &[String]| select(names, &DatasetPart::TRAIN, SeveralKinds::MostFiles).unwrap();
        assert_eq!(hub(&names), mixed[1..]);
        assert_eq!(hub(&names[..2]), mixed[..1]);
    }

    #[test]
    fn one_of_several_configurations_must_be_named() {
        let gsm8k = [
            "main/train-00000-of-00001.parquet",
            "main/test-00000-of-00001.parquet",
            "socratic/train-00000-of-00001.parquet",
            "socratic/test-00000-of-00001.parquet",
        ];
        let parts = [
            "several configurations",
            "main, socratic",
            "`DatasetPart::config = \"main\"`",
        ];
        refused(&gsm8k, None, &["train"], &parts);
        assert_eq!(of(&gsm8k, Some("main"), &["train"]).unwrap(), [gsm8k[0]]);
        assert_eq!(
            of(&gsm8k, Some("socratic"), &["validation", "test"]).unwrap(),
            [gsm8k[3]]
        );
        refused(
            &gsm8k,
            Some("maim"),
            &["train"],
            &["no configuration `maim`", "main, socratic"],
        );
        assert_eq!(
            train(&["data/train.parquet", "extra/train.parquet"]),
            ["data/train.parquet"]
        );
        assert_eq!(
            of(&["en_train.json", "de_train.json"], Some("de"), &["train"]).unwrap(),
            ["de_train.json"]
        );
    }

    #[test]
    fn one_of_several_train_splits_must_be_named() {
        let ultra = [
            "data/train_prefs-00000-of-00001-ab.parquet",
            "data/train_sft-00000-of-00001-cd.parquet",
            "data/test_prefs-00000-of-00001-ef.parquet",
        ];
        let parts = [
            "several splits",
            "train_prefs, train_sft",
            "`DatasetPart::split = \"train_prefs\"`",
        ];
        refused(&ultra, None, &["train"], &parts);
        assert_eq!(of(&ultra, None, &["train_sft"]).unwrap(), [ultra[1]]);
        assert_eq!(of(&ultra, None, &["validation", "test", "train"]).unwrap(), [ultra[2]]);
    }
}
