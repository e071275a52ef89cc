//! Ownership of the files in a run directory: the manifest `run.json`, how to recognize a run without a manifest, and
//! the removal of a run. Uses names and contents of files only; independent of training.

use crate::base::staging::{self, CleanupReport};
use crate::base::{Error, Result, files, lock};
use crate::checkpoint;
use crate::history;
use crate::setup;
use crate::train::profile::TRACE;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

mod results;

pub use results::{FinalCheck, RecordedFinal};

pub const MANIFEST: &str = "run.json";
pub const FINAL: &str = "final";
/// Training rows that were dropped, and why.
pub const DROPPED: &str = "dropped_rows.jsonl";
/// The first training rows, as the model reads them.
pub const ROWS: &str = "rows.jsonl";
/// Number of processes that the manifest keeps.
const PROCESSES: usize = 256;

/// Scratch directories in a run directory.
const SCRATCH: [&str; 4] = [setup::TRAINED, setup::DRAWN, setup::DEQUANTIZED, setup::TEACHER];

/// Scratch directory of a rank other than 0, in the run directory.
pub fn of_rank(run_dir: &Path, rank: usize) -> PathBuf {
    run_dir.join(format!("{RANK}{rank}"))
}

const RANK: &str = "rank-";

fn is_of_rank(name: &str) -> bool {
    let digits = name.strip_prefix(RANK).unwrap_or_default();
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

/// Files of a run, except checkpoints and `final/`.
const FILES: [&str; 13] = [
    MANIFEST,
    setup::CODES,
    "recipe.toml",
    "resolved.toml",
    "plan.json",
    "environment.json",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    history::CURVES,
    DROPPED,
    ROWS,
    TRACE,
];

/// True for names that ft uses in a run directory, except those of checkpoints.
pub fn is_name(name: &str) -> bool {
    name == FINAL || FILES.contains(&name) || history::is_event_file(name)
}

/// The files that ft created in a run directory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OwnedFiles {
    /// Ids of processes that worked here, the latest last.
    processes: Vec<u32>,
    /// Files of `final/` at the time of writing.
    finals: BTreeMap<String, StoredFile>,
    /// Until the checkpoint of another run from which this one goes on is in its directory.
    from: Option<TakenCheckpoint>,
}

/// A checkpoint of another run from which a run goes on.
#[derive(Debug, Clone, PartialEq)]
pub struct TakenCheckpoint {
    /// An absolute path, if that is a text.
    pub path: PathBuf,
    step: u64,
}

impl TakenCheckpoint {
    pub fn new(path: &Path, step: u64) -> Self {
        let absolute = path.canonicalize().ok().filter(|absolute| absolute.to_str().is_some());
        Self {
            path: absolute.unwrap_or_else(|| path.to_path_buf()),
            step,
        }
    }

    fn read(value: &Value) -> Option<Self> {
        Some(Self {
            path: value["checkpoint"].as_str()?.into(),
            step: value["step"].as_u64()?,
        })
    }
}

/// A file as it was written.
#[derive(Debug, Clone, Default, PartialEq)]
struct StoredFile {
    size: u64,
    /// Modification time in nanoseconds.
    changed: i64,
    /// blake3; empty until it is computed. `None`: a run of an earlier version.
    hash: Option<String>,
}

/// The state of a directory before a run starts in it.
#[derive(Debug, PartialEq)]
pub enum DirectoryState {
    /// The directory is empty or does not exist (hidden entries do not count).
    New,
    /// A run of ft.
    Run(OwnedFiles),
    /// Another directory, with some of its entries.
    Other(Vec<String>),
}

impl DirectoryState {
    /// Inspects the directory and changes nothing.
    ///
    /// Errors: `run_dir` is a file or cannot be listed; a manifest of a later version.
    pub fn of(run_dir: &Path) -> Result<Self> {
        if run_dir.symlink_metadata().is_err() {
            return Ok(Self::New);
        }
        if !run_dir.is_dir() {
            return Err(Error::usage("the run directory is a file")
                .at_path(run_dir)
                .hint("set `train.output_dir` to another directory"));
        }
        let mut names = Vec::new();
        for path in files::list(run_dir)? {
            let name = name_of(&path);
            let free = name.starts_with('.')
                || name == "lost+found"
                || (name == lock::NAME && lock::is_lock(&path))
                || is_torn_manifest(&name, &path);
            if !free {
                names.push(name);
            }
        }
        if names.is_empty() {
            return Ok(Self::New);
        }
        if let Some(manifest) = OwnedFiles::read(run_dir)? {
            return Ok(Self::Run(manifest));
        }
        if is_run_without_manifest(run_dir) {
            Ok(Self::Run(OwnedFiles::default()))
        } else {
            Ok(Self::Other(names))
        }
    }
}

/// True for the temporary file of a manifest, by name and content: a process that is killed while it starts its first run
/// leaves nothing else.
fn is_torn_manifest(name: &str, path: &Path) -> bool {
    const START: &[u8] = b"{\n  \"format\": \"ft run 1\"";
    let process = name
        .strip_prefix(MANIFEST)
        .and_then(|n| n.strip_prefix(files::TEMPORARY));
    let is_small_file = path.symlink_metadata().is_ok_and(|m| m.is_file() && m.len() < 1 << 20);
    process.is_some_and(|id| id.chars().all(|c| c.is_ascii_digit() || c == '-'))
        && is_small_file
        && files::read(path).is_ok_and(|bytes| {
            // A loss of power leaves zeros.
            let end = bytes.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
            bytes.starts_with(START) || START.starts_with(&bytes[..end])
        })
}

/// Removes temporary files of manifests that killed processes left. Requires the lock of the run. Returns them.
pub fn remove_torn_manifests(run_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut torn = files::list(run_dir)?;
    torn.retain(|path| is_torn_manifest(&name_of(path), path));
    for path in &torn {
        files::remove_file(path)?;
    }
    Ok(torn)
}

/// True for a run without a valid manifest. Early versions wrote none, and a damaged one must not make a run unusable:
/// other files identify the run.
fn is_run_without_manifest(run_dir: &Path) -> bool {
    let object = |name: &str| -> Option<Map<String, Value>> {
        let path = run_dir.join(name);
        path.symlink_metadata().ok().filter(|m| m.is_file())?;
        serde_json::from_str(&files::read_text(&path).ok()?).ok()
    };
    let described = object("environment.json")
        .is_some_and(|e| ["version", "build", "cpu"].iter().all(|k| e.contains_key(*k)))
        && object("plan.json").is_some()
        && ["recipe.toml", "resolved.toml"]
            .iter()
            .all(|name| run_dir.join(name).is_file());
    described || checkpoint::list(run_dir).is_ok_and(|all| all.iter().any(|(_, path)| checkpoint::is_ours(path)))
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default()
}

impl OwnedFiles {
    /// Returns `None` if the manifest does not exist or is damaged.
    fn read(run_dir: &Path) -> Result<Option<Self>> {
        let path = run_dir.join(MANIFEST);
        if !path.symlink_metadata().is_ok_and(|m| m.is_file() && m.len() < 64 << 20) {
            return Ok(None);
        }
        let Ok(value) = serde_json::from_str::<Value>(&files::read_text(&path).unwrap_or_default()) else {
            return Ok(None);
        };
        match value["format"].as_str() {
            Some("ft run 1") => {}
            Some(other) if other.starts_with("ft run ") => {
                return Err(Error::new("the run directory was written by another version of ft")
                    .at_path(&path)
                    .found(format!("`{other}`"))
                    .expected("`ft run 1`")
                    .hint("use that version of ft, or set another `train.output_dir`"));
            }
            _ => return Ok(None),
        }
        let processes = value["processes"].as_array().into_iter().flatten();
        let finals = value[FINAL].as_object().into_iter().flatten();
        Ok(Some(Self {
            processes: processes.filter_map(|p| p.as_u64()?.try_into().ok()).collect(),
            finals: finals
                .filter_map(|(name, file)| {
                    let stored = StoredFile {
                        size: file[0].as_u64()?,
                        changed: file[1].as_i64()?,
                        hash: file[2].as_str().map(str::to_string),
                    };
                    Some((name.clone(), stored))
                })
                .collect(),
            from: TakenCheckpoint::read(&value["from"]),
        }))
    }

    fn write(&self, run_dir: &Path) -> Result<()> {
        let finals = self.finals.iter();
        let finals: Map<String, Value> = finals
            .map(|(name, file)| (name.clone(), json!([file.size, file.changed, file.hash])))
            .collect();
        let mut value = json!({
            "format": "ft run 1",
            "ft": env!("CARGO_PKG_VERSION"),
            "processes": self.processes,
            FINAL: finals,
        });
        if let Some(from) = &self.from {
            value["from"] = json!({"checkpoint": from.path.to_string_lossy(), "step": from.step});
        }
        files::write_atomic(&run_dir.join(MANIFEST), format!("{value:#}\n").as_bytes())
    }

    /// Registers this process in the manifest.
    pub fn join(&mut self, run_dir: &Path) -> Result<()> {
        let process = std::process::id();
        if self.processes.last() != Some(&process) {
            self.processes.push(process);
        }
        let surplus = self.processes.len().saturating_sub(PROCESSES);
        self.processes.drain(..surplus);
        self.write(run_dir)
    }

    /// Sets the checkpoint of another run from which this one goes on; `None`: it goes on from one of its own, or begins. Returns the
    /// one before.
    pub fn set_from(&mut self, from: Option<TakenCheckpoint>) -> Option<TakenCheckpoint> {
        std::mem::replace(&mut self.from, from)
    }

    /// The checkpoint from which the run goes on is in its directory.
    pub fn brought(&mut self, run_dir: &Path) -> Result<()> {
        self.from = None;
        self.write(run_dir)
    }

    /// The checkpoint of another run from which this one goes on, if it is not in the directory yet: a process ended before it was there.
    pub fn awaited(&self, run_dir: &Path) -> Result<Option<&TakenCheckpoint>> {
        let Some(from) = &self.from else { return Ok(None) };
        let is_here = checkpoint::list(run_dir)?.iter().any(|(step, _)| *step == from.step);
        Ok((!is_here).then_some(from))
    }

    /// Removes unfinished files of earlier processes. `last`: the process that held the lock before this one.
    pub fn clean(&self, run_dir: &Path, last: Option<u32>) -> Result<CleanupReport> {
        let processes: BTreeSet<u32> = self.processes.iter().copied().chain(last).collect();
        checkpoint::clean_leftovers(run_dir, &processes, &is_name)
    }

    /// Removes a run. Files that ft did not create, or that were changed, stay. Returns the removed names, and the
    /// names that stay although ft uses them.
    pub fn remove(&mut self, run_dir: &Path) -> Result<(Vec<String>, Vec<String>)> {
        let (mut removed, mut left) = (Vec::new(), Vec::new());
        for path in files::list(run_dir)? {
            let name = name_of(&path);
            let file = path.symlink_metadata().is_ok_and(|m| m.is_file());
            if name.starts_with("checkpoint-") {
                if checkpoint::remove(&path)? {
                    removed.push(name)
                } else {
                    left.push(name)
                }
            } else if name == FINAL && self.is_final(&path) {
                staging::remove_whole(&path)?;
                removed.push(name);
            } else if name == FINAL {
                left.push(format!("{name} (now {})", name_of(&staging::set_aside(&path, &path)?)));
            } else if (SCRATCH.contains(&name.as_str()) || is_of_rank(&name)) && staging::remove_scratch(&path)? {
                removed.push(name);
            } else if (FILES.contains(&name.as_str()) || history::is_event_file(&name)) && file && name != MANIFEST {
                files::remove_file(&path)?;
                removed.push(name);
            }
        }
        // A process was killed when the previous `final/` had a temporary name, before it was marked or when it was empty.
        for (_, path) in self.temporaries(run_dir)? {
            if (self.is_retired_final(&path) || staging::is_empty(&path)) && staging::remove_unused(&path)? {
                removed.push(name_of(&path));
            }
        }
        self.finals.clear();
        self.from = None;
        Ok((removed, left))
    }

    /// Bytes that `remove` would free.
    pub fn bytes(&self, run_dir: &Path) -> u64 {
        let result = Some(run_dir.join(FINAL)).filter(|out| self.is_final(out));
        result.map_or(0, |out| size(&out)) + bytes_of_checkpoints(run_dir)
    }
}

/// Bytes of the files in a directory.
fn size(dir: &Path) -> u64 {
    inside(dir).unwrap_or_default().values().map(|file| file.size).sum()
}

/// Bytes of all checkpoints in the directory of a run.
pub fn bytes_of_checkpoints(run_dir: &Path) -> u64 {
    let mut all = checkpoint::list(run_dir).unwrap_or_default();
    all.retain(|(_, dir)| checkpoint::is_ours(dir));
    all.iter().map(|(_, dir)| size(dir)).sum()
}

/// Errors: a name that ft uses in a run directory is a link. Writing to it would change files elsewhere.
pub fn refuse_links(run_dir: &Path) -> Result<()> {
    let names = FILES.iter().chain(&SCRATCH).chain([&FINAL, &lock::NAME]);
    match names.map(|n| run_dir.join(n)).find(|p| p.is_symlink()) {
        Some(link) => Err(Error::usage("a file of the run is a symbolic link")
            .at_path(&link)
            .hint("remove the link, or set another `train.output_dir`; the run directory itself may be a link")),
        None => Ok(()),
    }
}

/// Removes the scratch files of ranks other than 0, also of an earlier run with more ranks.
pub fn remove_scratch_of_ranks(run_dir: &Path) -> Result<()> {
    for path in files::list(run_dir)?.iter().filter(|path| is_of_rank(&name_of(path))) {
        staging::remove_scratch(path)?;
    }
    Ok(())
}

/// Removes the scratch files of a run.
pub fn remove_scratch(run_dir: &Path) -> Result<()> {
    remove_scratch_of_ranks(run_dir)?;
    for name in SCRATCH {
        staging::remove_scratch(&run_dir.join(name))?;
    }
    let codes = run_dir.join(setup::CODES);
    if codes.symlink_metadata().is_ok_and(|m| m.is_file()) {
        files::remove_file(&codes)
    } else {
        Ok(())
    }
}

/// Regular files below `dir` by relative path, without hashes. Other entries have size 0 and time -1, which no manifest
/// contains.
fn inside(dir: &Path) -> Result<BTreeMap<String, StoredFile>> {
    let mut out = BTreeMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(next) = open.pop() {
        for path in files::list(&next)? {
            let name = path.strip_prefix(dir).unwrap_or(&path).to_string_lossy().into_owned();
            match path.symlink_metadata() {
                Ok(m) if m.is_dir() => open.push(path),
                Ok(m) if m.is_file() => {
                    let changed = m.mtime().saturating_mul(1_000_000_000).saturating_add(m.mtime_nsec());
                    let stored = StoredFile {
                        size: m.len(),
                        changed,
                        hash: None,
                    };
                    out.insert(name, stored);
                }
                _ => {
                    let other = StoredFile {
                        changed: -1,
                        ..StoredFile::default()
                    };
                    out.insert(name, other);
                }
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(dir: &Path, files: &[&str]) {
        for name in files {
            let path = dir.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        }
    }

    fn names(dir: &Path) -> Vec<String> {
        files::list(dir).unwrap().iter().map(|p| name_of(p)).collect()
    }

    #[test]
    fn a_directory_is_a_run_by_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        assert_eq!(DirectoryState::of(&d.join("none")).unwrap(), DirectoryState::New);
        put(d, &[".gitkeep"]);
        std::fs::write(d.join("run.lock"), "process 7 since 2026-01-01 00:00:00 UTC\n").unwrap();
        assert_eq!(DirectoryState::of(d).unwrap(), DirectoryState::New);
        // Killed while the first manifest was written, at any byte; a file of another program with this name is not ours.
        let torn = d.join(format!("{MANIFEST}{}77", files::TEMPORARY));
        OwnedFiles::default().write(d).unwrap();
        let whole = std::fs::read(d.join(MANIFEST)).unwrap();
        std::fs::remove_file(d.join(MANIFEST)).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&torn, &whole[..cut]).unwrap();
            assert_eq!(DirectoryState::of(d).unwrap(), DirectoryState::New, "{cut}");
        }
        std::fs::write(&torn, "{\"mine\": 1}").unwrap();
        assert!(matches!(DirectoryState::of(d).unwrap(), DirectoryState::Other(_)));
        std::fs::remove_file(&torn).unwrap();
        // Names alone do not identify a run.
        put(
            d,
            &[
                "metrics.jsonl",
                "plan.json",
                "checkpoint-5/weights.safetensors",
                "final/a",
            ],
        );
        assert!(matches!(DirectoryState::of(d).unwrap(), DirectoryState::Other(names) if names.len() == 4));
        put(d, &["run.json"]);
        assert!(matches!(DirectoryState::of(d).unwrap(), DirectoryState::Other(_)));
        // A run of a version without manifests.
        put(d, &["recipe.toml", "resolved.toml"]);
        std::fs::write(d.join("plan.json"), "{}").unwrap();
        crate::report::write_environment(d, "avx2").unwrap();
        assert_eq!(
            DirectoryState::of(d).unwrap(),
            DirectoryState::Run(OwnedFiles::default())
        );
        let mut manifest = OwnedFiles::default();
        manifest.join(d).unwrap();
        assert_eq!(DirectoryState::of(d).unwrap(), DirectoryState::Run(manifest));
        std::fs::write(d.join("run.json"), r#"{"format": "ft run 2"}"#).unwrap();
        assert!(
            DirectoryState::of(d)
                .unwrap_err()
                .to_string()
                .contains("another version")
        );
        put(d, &["file"]);
        assert!(
            DirectoryState::of(&d.join("file"))
                .unwrap_err()
                .to_string()
                .contains("is a file")
        );
    }

    /// Row C1.
    #[test]
    fn a_run_knows_from_where_it_goes_on_until_that_checkpoint_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let (d, other) = (dir.path().join("run"), dir.path().join("other/checkpoint-2"));
        put(dir.path(), &["run/a", "other/checkpoint-2/a"]);
        let mut manifest = OwnedFiles::default();
        manifest.set_from(Some(TakenCheckpoint::new(&other, 2)));
        manifest.join(&d).unwrap();
        let mut next = OwnedFiles::read(&d).unwrap().unwrap();
        assert_eq!(next, manifest);
        let path = next.awaited(&d).unwrap().map(|from| from.path.clone());
        assert_eq!(path, Some(other.canonicalize().unwrap()));
        // The checkpoint of the best evaluation comes first.
        put(&d, &["checkpoint-1/a"]);
        assert!(next.awaited(&d).unwrap().is_some());
        put(&d, &["checkpoint-2/a"]);
        assert!(next.awaited(&d).unwrap().is_none());
        next.brought(&d).unwrap();
        assert_eq!(OwnedFiles::read(&d).unwrap().unwrap().from, None);
    }

    #[test]
    fn a_run_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let mut manifest = OwnedFiles::default();
        manifest.join(d).unwrap();
        checkpoint::save(d, 3, &json!({}), &[], &mut |_, _, _| Ok(())).unwrap();
        checkpoint::save(d, 4, &json!({}), &[], &mut |_, _, _| Ok(())).unwrap();
        put(
            d,
            &["metrics.jsonl", "final/config.json", "final/base/model.safetensors"],
        );
        manifest.exported(d, &d.join("final.left")).unwrap();
        put(
            d,
            &[
                "checkpoint-4/notes.txt",
                "checkpoint-notes/a",
                "photos.old-2023/a",
                "notes.tmp-1999",
                "trained/theirs",
                "thesis.tex",
            ],
        );
        staging::scratch(&d.join("teacher")).unwrap();
        assert!(manifest.bytes(d) > 0);
        let (removed, left) = manifest.remove(d).unwrap();
        assert_eq!(removed, ["checkpoint-3", "final", "metrics.jsonl", "teacher"]);
        assert_eq!(left, ["checkpoint-4", "checkpoint-notes"]);
        assert_eq!(
            names(d),
            [
                "checkpoint-4",
                "checkpoint-notes",
                "notes.tmp-1999",
                "photos.old-2023",
                "run.json",
                "thesis.tex",
                "trained"
            ]
        );
    }

    #[test]
    fn a_final_directory_that_was_changed_is_kept() {
        let add = |d: &Path| put(d, &["final/notes.txt"]);
        let change = |d: &Path| std::fs::write(d.join("final/config.json"), "another text").unwrap();
        let link = |d: &Path| std::os::unix::fs::symlink(d, d.join("final/link")).unwrap();
        for (n, edit) in [&add as &dyn Fn(&Path), &change, &link].into_iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            let d = dir.path();
            put(d, &["final/config.json"]);
            let mut manifest = OwnedFiles::default();
            assert!(!manifest.exported(d, &d.join("final.left")).unwrap().0);
            std::thread::sleep(std::time::Duration::from_millis(20));
            edit(d);
            let (removed, left) = manifest.remove(d).unwrap();
            assert!(
                removed.is_empty() && left == ["final (now final.left)"],
                "{n}: {removed:?} {left:?}"
            );
            // The same check when it is replaced.
            put(d, &["final/config.json"]);
            assert!(manifest.exported(d, &d.join("final.left")).unwrap().0);
            assert!(d.join("final.left").exists());
        }
    }

    /// Row C7.
    #[test]
    fn links_at_the_names_of_a_run_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        refuse_links(dir.path()).unwrap();
        for name in ["metrics.jsonl", "final", "trained", "run.lock"] {
            let link = dir.path().join(name);
            std::os::unix::fs::symlink("/nowhere", &link).unwrap();
            assert!(refuse_links(dir.path()).unwrap_err().to_string().contains(name));
            std::fs::remove_file(&link).unwrap();
        }
    }
}
