//! Selects the files of a dataset repository that contain the wanted rows.

use crate::HubSettings;
use crate::download::Repository;
use crate::errors::{RequestedObject, not_cached};
use crate::select::{self, DatasetPart, SeveralKinds};
use ft_base::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(crate) fn resolve(
    settings: &HubSettings,
    id: &str,
    file: Option<&str>,
    revision: &str,
    part: &DatasetPart,
) -> Result<Vec<PathBuf>> {
    let wanted = RequestedObject {
        kind: "dataset",
        id,
        revision,
        file: None,
    };
    let repository = Repository::open(settings, "datasets", wanted)?;
    if let Some(file) = file {
        return Ok(vec![repository.required(file)?]);
    }
    let listed = repository.names();
    let is_listed = listed.is_some();
    let names = match (listed, repository.snapshot()) {
        (Some(names), _) => names,
        (None, Some(snapshot)) => cached(&snapshot),
        (None, None) => Vec::new(),
    };
    let place = || format!("{}/datasets/{id}, revision {revision}", settings.public_endpoint());
    let chosen = select::select(&names, part, SeveralKinds::MostFiles).map_err(|e| e.or_at(place()))?;
    if let Some(missing) = missing_part(&chosen).filter(|_| !is_listed) {
        let file = Some(missing.as_str());
        return Err(not_cached(RequestedObject { file, ..wanted }, settings));
    }
    chosen.iter().map(|f| repository.required(f)).collect()
}

/// A file `NAME-00001-of-00003.KIND` that is missing beside others of the same name.
fn missing_part(names: &[String]) -> Option<String> {
    let mut parts: BTreeMap<(&str, &str), BTreeSet<usize>> = BTreeMap::new();
    for name in names {
        let Some((before, after)) = name.rsplit_once("-of-") else {
            continue;
        };
        if let Some((whole, number)) = before.rsplit_once('-')
            && let Ok(number) = number.parse()
        {
            parts.entry((whole, after)).or_default().insert(number);
        }
    }
    parts.into_iter().find_map(|((whole, after), numbers)| {
        let digits = after.split(|c: char| !c.is_ascii_digit()).next()?;
        let count: usize = digits.parse().ok()?;
        let missing = (0..count).find(|number| !numbers.contains(number))?;
        Some(format!("{whole}-{missing:0width$}-of-{after}", width = digits.len()))
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

    #[test]
    fn a_part_that_is_missing_is_named() {
        let missing = |names: &[&str]| missing_part(&names.iter().map(|n| n.to_string()).collect::<Vec<_>>());
        let whole = [
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "a.jsonl",
        ];
        assert_eq!(missing(&whole), None);
        assert_eq!(missing(&whole[..1]).unwrap(), whole[1]);
        assert_eq!(missing(&whole[1..]).unwrap(), whole[0]);
        assert_eq!(missing(&["best-of-3.jsonl", "x-of-.csv", "a-1-of-b.csv"]), None);
        let many = ["train-0-of-999999999999999999999.csv"];
        assert_eq!(missing(&many), None);
    }
}
