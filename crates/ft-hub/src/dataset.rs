//! Selects the files of a dataset repository that contain the wanted rows.

use crate::HubSettings;
use crate::download::Repository;
use crate::errors::RequestedObject;
use crate::select::{self, DatasetPart};
use ft_base::Result;
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
    let names = match (repository.names(), repository.snapshot()) {
        (Some(names), _) => names,
        (None, Some(snapshot)) => cached(&snapshot),
        (None, None) => Vec::new(),
    };
    let place = || format!("{}/datasets/{id}, revision {revision}", settings.public_endpoint());
    let chosen = select::select(&names, part).map_err(|e| e.or_at(place()))?;
    chosen.iter().map(|f| repository.required(f)).collect()
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
