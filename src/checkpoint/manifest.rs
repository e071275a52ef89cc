//! `manifest.json`: the list of files of a checkpoint. It is written last, so a directory without it, or with other
//! contents, is not a checkpoint.

use crate::base::{Error, Result, files, progress};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::Path;

pub(super) const MANIFEST: &str = "manifest.json";

/// Format version that this build reads and writes.
const FORMAT: u64 = 1;

/// Size limit in bytes: a manifest has few entries, so a larger file is not a manifest.
const LIMIT: u64 = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointManifest {
    /// Version of the format.
    pub format: u64,
    /// Version of ft that wrote the manifest.
    pub ft: String,
    pub step: u64,
    pub files: Vec<ManifestEntry>,
    /// Hash of the fields above; detects a damaged manifest.
    seal: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestEntry {
    pub name: String,
    /// Bytes.
    pub size: u64,
    pub blake3: String,
}

impl CheckpointManifest {
    /// Lists files of `dir` with their current size and hash.
    pub(super) fn of(dir: &Path, step: u64, names: &[&str]) -> Result<Self> {
        let entries = names.iter().map(|name| entry(dir, name)).collect::<Result<_>>()?;
        Ok(Self::new(step, entries))
    }

    pub(super) fn new(step: u64, entries: Vec<ManifestEntry>) -> Self {
        let mut out = Self {
            format: FORMAT,
            ft: env!("CARGO_PKG_VERSION").to_string(),
            step,
            files: entries,
            seal: String::new(),
        };
        out.seal = out.sealed();
        out
    }

    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(MANIFEST);
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Error::new("cannot write the manifest").at_path(&path).cause(e))?;
        files::write_atomic(&path, format!("{text}\n").as_bytes())
    }

    /// Hash over every field with its length, so that no two manifests give the same input.
    fn sealed(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut text = |t: &str| {
            hasher.update(&(t.len() as u64).to_le_bytes());
            hasher.update(t.as_bytes());
        };
        text(&self.format.to_string());
        text(&self.ft);
        text(&self.step.to_string());
        for f in &self.files {
            text(&f.name);
            text(&f.size.to_string());
            text(&f.blake3);
        }
        hasher.finalize().to_hex().to_string()
    }

    pub(super) fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        if !path.exists() {
            return Err(Error::format("directory is not a complete checkpoint")
                .at_path(dir)
                .found(format!("no `{MANIFEST}`"))
                .hint(OTHER));
        }
        let damaged = || Error::new("checkpoint manifest is damaged").at_path(&path).hint(OTHER);
        let size = files::size(&path)?;
        if size > LIMIT {
            return Err(damaged().found(crate::base::units::bytes(size)));
        }
        let text = files::read_text(&path).map_err(|e| damaged().cause(e.what()))?;
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| damaged().cause(e))?;
        let manifest: Self = match serde_json::from_value(value.clone()) {
            Ok(m) => m,
            Err(e) => {
                return Err(match value.get("format").and_then(serde_json::Value::as_u64) {
                    Some(other) if other != FORMAT => other_version(&path, other, value.get("ft")),
                    _ => damaged().cause(e),
                });
            }
        };
        if manifest.seal != manifest.sealed() {
            return Err(damaged().found("contents that do not match the stored hash"));
        }
        if manifest.format != FORMAT {
            let ft = serde_json::Value::String(manifest.ft);
            return Err(other_version(&path, manifest.format, Some(&ft)));
        }
        match manifest.files.iter().find(|f| !is_plain(&f.name)) {
            Some(f) => Err(damaged()
                .found(format!("the file name {:?}", f.name))
                .expected("a plain file name")),
            None => Ok(manifest),
        }
    }
}

/// A file of `dir` with its current size and hash.
pub(super) fn entry(dir: &Path, name: &str) -> Result<ManifestEntry> {
    let (size, blake3) = hash(&dir.join(name))?;
    Ok(ManifestEntry {
        name: name.to_string(),
        size,
        blake3,
    })
}

/// The files in a valid manifest in `dir`; `None` if there is no valid manifest.
pub(super) fn files_of(dir: &Path) -> Option<Vec<String>> {
    let manifest = CheckpointManifest::read(dir).ok()?;
    Some(manifest.files.into_iter().map(|f| f.name).collect())
}

const OTHER: &str =
    "continue from the newest whole checkpoint with `--resume --allow-older`, or from one by name: `--resume DIR`";

fn other_version(path: &Path, format: u64, ft: Option<&serde_json::Value>) -> Error {
    let writer = ft.and_then(serde_json::Value::as_str).unwrap_or("unknown");
    Error::new("checkpoint was written by another version of ft")
        .at_path(path)
        .found(format!("layout {format}, written by ft {writer}"))
        .expected(format!(
            "layout {FORMAT}, as ft {} writes it",
            env!("CARGO_PKG_VERSION")
        ))
        .hint("resume with the version of ft that wrote it")
}

/// True for a plain file name, without a directory part.
pub(super) fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// Size in bytes and blake3 hash of a file.
pub fn hash(path: &Path) -> Result<(u64, String)> {
    let phase = progress::bytes(progress::about("checking", path), files::size(path)?);
    let mut file = phase.reader(files::open(path)?);
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0u8; 1 << 17];
    let mut size = 0;
    loop {
        let n = file
            .read(&mut buffer)
            .map_err(|e| Error::new("cannot read the file").at_path(path).cause(e))?;
        if n == 0 {
            return Ok((size, hasher.finalize().to_hex().to_string()));
        }
        hasher.update(&buffer[..n]);
        size += n as u64;
    }
}

/// Checks that every file in the manifest of `dir` has the listed size and hash.
///
/// Errors name the file: no manifest, a damaged manifest, another format version, a missing file, a different size,
/// different contents.
pub fn verify(dir: &Path) -> Result<CheckpointManifest> {
    let manifest = CheckpointManifest::read(dir)?;
    for entry in &manifest.files {
        let path = dir.join(&entry.name);
        if path.symlink_metadata().is_err() {
            return Err(Error::new("checkpoint file is missing").at_path(&path).hint(OTHER));
        }
        // A pipe, a directory, or a link to nothing.
        if !path.is_file() {
            return Err(Error::new("checkpoint file is damaged")
                .at_path(&path)
                .found("not a regular file")
                .hint(OTHER));
        }
        let size = files::size(&path)?;
        if size != entry.size {
            return Err(Error::new("checkpoint file is damaged")
                .at_path(&path)
                .found(format!("{size} bytes"))
                .expected(format!("{} bytes", entry.size))
                .hint(OTHER));
        }
        let (_, blake3) = hash(&path)?;
        if blake3 != entry.blake3 {
            return Err(Error::new("checkpoint file is damaged")
                .at_path(&path)
                .found(format!("contents with blake3 hash {blake3}"))
                .expected(&entry.blake3)
                .hint(OTHER));
        }
    }
    Ok(manifest)
}
