//! A disk with faults for the program under test: `disk/disk.c` is loaded into it, and counts, refuses or records the
//! operations that change files. From a record, the disk after a loss of power at each of its operations.

use crate::bench::Bench;
use ft::base::rng::{Rng, Stream};
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::SystemTime;

/// A library that was compiled, and the directory that has it.
pub type Library = OnceLock<Option<(tempfile::TempDir, PathBuf)>>;

/// Compiles the library once.
pub fn library() -> Option<&'static Path> {
    static BUILT: Library = OnceLock::new();
    compiled(&BUILT, "tests/run/disk/disk.c")
}

/// Compiles a library once. Without a C compiler the tests fail; with `FT_TEST_NO_CC=1` they are left out.
pub fn compiled(library: &'static Library, source: &str) -> Option<&'static Path> {
    let built = library.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let (source, out) = (
            Path::new(env!("CARGO_MANIFEST_DIR")).join(source),
            dir.path().join("built.so"),
        );
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let compiled = Command::new(&compiler)
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&out)
            .arg(&source)
            .args(["-ldl", "-lpthread"])
            .status();
        match compiled {
            Ok(status) => {
                assert!(status.success(), "{} does not compile", source.display());
                Some((dir, out))
            }
            Err(e) => {
                // A test that passes by doing nothing would not be seen.
                let left_out = std::env::var_os("FT_TEST_NO_CC").is_some();
                assert!(
                    left_out,
                    "no C compiler `{compiler}`: {e}; FT_TEST_NO_CC=1 leaves these tests out"
                );
                None
            }
        }
    });
    built.as_ref().map(|(_, path)| path.as_path())
}

/// The fault of the disk at operation `at` (from 1).
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// The process is killed before it.
    Kill,
    /// As `Kill`; of a write half is done.
    Half,
    /// It fails with this error number.
    Once(i32),
    /// It and all later ones fail.
    From(i32),
    /// Only syncs are counted, and this one fails.
    Sync(i32),
    /// It takes so many seconds.
    Stall(i32),
    /// Nothing: the operations are counted.
    Count,
    /// Nothing: the operations are recorded.
    Record,
}

/// `command` on such a disk below the directory of the bench. `None` without a C compiler.
pub fn on_disk(bench: &Bench, command: &mut Command, fault: Fault, at: usize) -> Option<()> {
    let (mode, errno) = match fault {
        Fault::Kill => ("kill", 0),
        Fault::Half => ("half", 0),
        Fault::Once(errno) => ("once", errno),
        Fault::From(errno) => ("from", errno),
        Fault::Sync(errno) => ("sync", errno),
        Fault::Stall(seconds) => ("stall", seconds),
        Fault::Count => ("count", 0),
        Fault::Record => ("record", 0),
    };
    command
        .env("LD_PRELOAD", library()?)
        .env("FT_DISK_ROOT", bench.dir.path().canonicalize().unwrap())
        .env("FT_DISK_MODE", mode)
        .env("FT_DISK_AT", at.to_string())
        .env("FT_DISK_ERRNO", errno.to_string());
    if matches!(fault, Fault::Count | Fault::Record) {
        command.env("FT_DISK_LOG", record_of(bench));
    }
    Some(())
}

/// As `on_disk`; runs the command and returns its record too, in which the operations that had to fail are marked.
pub fn ran_on_disk(bench: &Bench, command: &mut Command, fault: Fault, at: usize) -> Option<(Output, Vec<Operation>)> {
    on_disk(bench, command, fault, at)?;
    command.env("FT_DISK_LOG", record_of(bench));
    let out = command.output().unwrap();
    Some((out, recorded(bench)))
}

/// The system refuses to swap two names, as NFS and some FUSE file systems do. `None` without a C compiler.
pub fn without_swaps(command: &mut Command) -> Option<()> {
    command.env("LD_PRELOAD", library()?).env("FT_DISK_NO_SWAPS", "1");
    Some(())
}

/// The clock that the program sees: begins at this second since 1970 and jumps by days.
pub fn with_clock(command: &mut Command, seconds: i64) -> Option<()> {
    command
        .env("LD_PRELOAD", library()?)
        .env("FT_CLOCK", seconds.to_string());
    Some(())
}

/// The file appears if the program opens a socket.
pub fn report_sockets(command: &mut Command, file: &Path) -> Option<()> {
    command.env("LD_PRELOAD", library()?).env("FT_SOCKETS", file);
    Some(())
}

/// Outside of the disk's root, so that it is not recorded itself.
fn record_of(bench: &Bench) -> PathBuf {
    let dir = bench.dir.path().canonicalize().unwrap();
    dir.with_file_name(format!("{}.record", dir.file_name().unwrap().to_string_lossy()))
}

/// Takes the number of counted operations.
pub fn counted(bench: &Bench) -> usize {
    take(bench).len()
}

fn take(bench: &Bench) -> Vec<u8> {
    let bytes = fs::read(record_of(bench)).unwrap();
    fs::remove_file(record_of(bench)).unwrap();
    bytes
}

/// One operation that changed the disk, or had to fail; paths are relative to the root.
#[derive(Debug)]
pub struct Operation {
    pub what: char,
    /// It failed and changed nothing.
    pub failed: bool,
    pub path: String,
    /// The second name of a rename or an exchange; the target of a symbolic link; the first name of a hard link.
    pub other: String,
    pub offset: usize,
    bytes: Vec<u8>,
}

impl Operation {
    /// The text of a write.
    pub fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.bytes)
    }
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let failed = if self.failed { " (failed)" } else { "" };
        write!(f, "{} {} {}{failed}", self.what, self.path, self.other)
    }
}

/// Takes the record of a run.
pub fn recorded(bench: &Bench) -> Vec<Operation> {
    let all = take(bench);
    let root = bench.dir.path().canonicalize().unwrap();
    let root = format!("{}/", root.display());
    let mut rest = &all[..];
    let mut out = Vec::new();
    let bytes = |rest: &mut &[u8], n: usize| {
        let (first, later) = rest.split_at(n);
        *rest = later;
        first.to_vec()
    };
    let number = |rest: &mut &[u8], size: usize| {
        let mut eight = [0; 8];
        eight[..size].copy_from_slice(&bytes(rest, size));
        u64::from_le_bytes(eight) as usize
    };
    let text = |rest: &mut &[u8]| {
        let n = number(rest, 4);
        let path = String::from_utf8(bytes(rest, n)).unwrap();
        let path = if format!("{path}/") == root {
            String::new()
        } else {
            path
        };
        path.strip_prefix(&root).map(str::to_string).unwrap_or(path)
    };
    while !rest.is_empty() {
        let letter = char::from(bytes(&mut rest, 1)[0]);
        let (path, other) = (text(&mut rest), text(&mut rest));
        let offset = number(&mut rest, 8);
        let size = number(&mut rest, 8);
        out.push(Operation {
            what: letter.to_ascii_lowercase(),
            failed: letter.is_ascii_uppercase(),
            path,
            other,
            offset,
            bytes: bytes(&mut rest, size),
        });
    }
    out
}

#[derive(Debug, Clone, PartialEq)]
enum Entry {
    File(usize),
    Dir(usize),
    Link(String),
}

type Names = BTreeMap<String, Entry>;

/// A change of a directory that is not synced yet.
#[derive(Debug, Clone)]
enum Change {
    Put(String, Entry),
    Remove(String),
    Rename(String, String),
    Exchange(String, String),
}

fn change(names: &mut Names, change: &Change) {
    match change {
        Change::Put(name, entry) => drop(names.insert(name.clone(), entry.clone())),
        Change::Remove(name) => drop(names.remove(name)),
        Change::Rename(from, to) => {
            if let Some(entry) = names.remove(from) {
                names.insert(to.clone(), entry);
            }
        }
        Change::Exchange(a, b) => {
            let (first, second) = (names.remove(a), names.remove(b));
            names.extend(second.map(|e| (a.clone(), e)));
            names.extend(first.map(|e| (b.clone(), e)));
        }
    }
}

#[derive(Default)]
struct Dir {
    now: Names,
    synced: Names,
    pending: Vec<Change>,
}

#[derive(Default)]
struct File {
    now: Vec<u8>,
    synced: Vec<u8>,
    /// Written since the last sync.
    dirty: Vec<Range<usize>>,
    /// Written before a sync that failed: the system drops such data, and no later sync writes them.
    lost: Vec<Range<usize>>,
    /// The time of its last change, if that was before the record.
    changed: Option<SystemTime>,
}

impl File {
    /// The contents that can become durable.
    fn kept(&self) -> Vec<u8> {
        let mut kept = self.now.clone();
        for at in self.lost.iter().cloned().flatten() {
            kept[at] = self.synced.get(at).copied().unwrap_or(0);
        }
        kept
    }

    /// What begins at `from` and ends at `to` is written again, or cut off: it is not lost any more.
    fn renew(&mut self, from: usize, to: usize) {
        for ranges in [&mut self.dirty, &mut self.lost] {
            let parts = |r: &Range<usize>| [r.start..r.end.min(from), r.start.max(to)..r.end];
            *ranges = ranges.iter().flat_map(parts).filter(|r| !r.is_empty()).collect();
        }
    }
}

/// The data that survives a loss of power beside synced data.
#[derive(Debug, Clone, Copy)]
pub enum Loss {
    /// Nothing.
    Strict,
    /// All names and sizes, but no contents: files end in zeros, as ext4 and XFS have left them.
    Zeros,
    /// Of each directory its first changes, of each file its contents, zeros or what was synced; drawn.
    Drawn(u64),
    /// As `Drawn`, but of each directory any of its changes, so that a later rename is there and an earlier one is not.
    Reordered(u64),
}

/// A disk that records which contents and names are synced. A file's sync covers its contents, a directory's sync the names in it; nothing else
/// is promised, as in POSIX. What a failed sync had to write is never durable.
pub struct Disk {
    files: Vec<File>,
    dirs: Vec<Dir>,
}

impl Disk {
    pub fn new() -> Self {
        Self {
            files: Vec::new(),
            dirs: vec![Dir::default()],
        }
    }

    /// Takes what is at these names below `root`, as durable.
    pub fn import(&mut self, root: &Path, names: &[&str]) {
        for name in names {
            let path = root.join(name);
            if path.symlink_metadata().is_ok() {
                self.import_one(0, name.to_string(), &path);
            }
        }
    }

    fn import_one(&mut self, dir: usize, name: String, path: &Path) {
        let kind = path.symlink_metadata().unwrap();
        let entry = if kind.is_symlink() {
            Entry::Link(fs::read_link(path).unwrap().to_string_lossy().into_owned())
        } else if kind.is_file() {
            let bytes = fs::read(path).unwrap();
            self.files.push(File {
                now: bytes.clone(),
                synced: bytes,
                changed: Some(kind.modified().unwrap()),
                ..File::default()
            });
            Entry::File(self.files.len() - 1)
        } else {
            self.dirs.push(Dir::default());
            let id = self.dirs.len() - 1;
            for below in fs::read_dir(path).unwrap() {
                let below = below.unwrap();
                self.import_one(id, below.file_name().into_string().unwrap(), &below.path());
            }
            Entry::Dir(id)
        };
        let dir = &mut self.dirs[dir];
        dir.now.insert(name.clone(), entry.clone());
        dir.synced.insert(name, entry);
    }

    /// The directory of a path, and the last name.
    fn place<'a>(&self, path: &'a str) -> (usize, &'a str) {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut dir = 0;
        for part in parent.split('/').filter(|p| !p.is_empty()) {
            match self.dirs[dir].now.get(part) {
                Some(Entry::Dir(id)) => dir = *id,
                other => panic!("{path}: {part} is {other:?}"),
            }
        }
        (dir, name)
    }

    fn entry(&self, path: &str) -> Entry {
        let (dir, name) = self.place(path);
        if name.is_empty() {
            return Entry::Dir(0);
        }
        self.dirs[dir].now[name].clone()
    }

    fn names(&mut self, dir: usize, what: Change) {
        let dir = &mut self.dirs[dir];
        change(&mut dir.now, &what);
        dir.pending.push(what);
    }

    pub fn apply(&mut self, operation: &Operation) {
        let Operation { what, path, other, .. } = operation;
        if operation.failed {
            if *what == 's' {
                self.lose(path);
            }
            return;
        }
        match what {
            'w' | 't' => {
                let Entry::File(id) = self.entry(path) else {
                    panic!("{operation:?} of no file")
                };
                let (file, from) = (&mut self.files[id], operation.offset);
                file.changed = None;
                if *what == 't' {
                    file.renew(from, usize::MAX);
                    return file.now.resize(from, 0);
                }
                let end = from + operation.bytes.len();
                file.renew(from, end);
                file.dirty.push(from..end);
                file.now.resize(file.now.len().max(end), 0);
                file.now[from..end].copy_from_slice(&operation.bytes);
            }
            's' => match self.entry(path) {
                Entry::File(id) => {
                    let file = &mut self.files[id];
                    file.synced = file.kept();
                    file.dirty.clear();
                }
                Entry::Dir(id) => {
                    let dir = &mut self.dirs[id];
                    dir.pending.drain(..).for_each(|c| change(&mut dir.synced, &c));
                }
                Entry::Link(_) => panic!("sync of a link"),
            },
            'f' => {}
            'c' | 'm' | 'l' => {
                let (dir, name) = self.place(path);
                let entry = match what {
                    'c' => {
                        self.files.push(File::default());
                        Entry::File(self.files.len() - 1)
                    }
                    'm' => {
                        self.dirs.push(Dir::default());
                        Entry::Dir(self.dirs.len() - 1)
                    }
                    _ => Entry::Link(other.clone()),
                };
                self.names(dir, Change::Put(name.into(), entry));
            }
            // A second name of the same file: durable with its directory, and its contents with the file.
            'h' => {
                let entry @ Entry::File(_) = self.entry(other) else {
                    panic!("{operation:?} of no file")
                };
                let (dir, name) = self.place(path);
                self.names(dir, Change::Put(name.into(), entry));
            }
            'u' | 'd' => {
                let (dir, name) = self.place(path);
                self.names(dir, Change::Remove(name.into()));
            }
            'r' | 'x' => {
                let ((dir, from), (second, to)) = (self.place(path), self.place(other));
                assert_eq!(dir, second, "{operation:?} between directories is not simulated");
                let (from, to) = (from.into(), to.into());
                self.names(
                    dir,
                    if *what == 'r' {
                        Change::Rename(from, to)
                    } else {
                        Change::Exchange(from, to)
                    },
                );
            }
            other => panic!("operation {other}"),
        }
    }

    /// A sync of this path failed.
    fn lose(&mut self, path: &str) {
        match self.entry(path) {
            Entry::File(id) => {
                let file = &mut self.files[id];
                file.lost.append(&mut file.dirty);
            }
            Entry::Dir(id) => self.dirs[id].pending.clear(),
            Entry::Link(_) => panic!("sync of a link"),
        }
    }

    /// Writes what is left after a loss of power to `to`. Files that are there already stay as they are.
    pub fn leave(&self, loss: Loss, to: &Path) {
        let draws = match loss {
            Loss::Drawn(seed) | Loss::Reordered(seed) => Some(Rng::new(seed, Stream::Sampling, &[])),
            _ => None,
        };
        let mut draw = 0;
        let mut below = |n: u64| {
            draw += 1;
            draws.as_ref().map_or(0, |rng| rng.below(draw, n))
        };
        self.leave_dir(0, loss, to, &mut below);
    }

    fn leave_dir(&self, id: usize, loss: Loss, to: &Path, below: &mut impl FnMut(u64) -> u64) {
        let dir = &self.dirs[id];
        let names = match loss {
            Loss::Strict => dir.synced.clone(),
            Loss::Zeros => dir.now.clone(),
            Loss::Drawn(_) => {
                let mut names = dir.synced.clone();
                let first = below(dir.pending.len() as u64 + 1) as usize;
                dir.pending[..first].iter().for_each(|c| change(&mut names, c));
                names
            }
            Loss::Reordered(_) => {
                let mut names = dir.synced.clone();
                for one in dir.pending.iter().filter(|_| below(2) == 1) {
                    change(&mut names, one);
                }
                names
            }
        };
        fs::create_dir_all(to).unwrap();
        for (name, entry) in names {
            let path = to.join(name);
            if path.is_file() {
                continue;
            }
            match entry {
                Entry::Dir(id) => self.leave_dir(id, loss, &path, below),
                Entry::Link(target) => std::os::unix::fs::symlink(target, path).unwrap(),
                Entry::File(id) => {
                    let file = &self.files[id];
                    let (synced, kept) = (&file.synced, file.kept());
                    let mut zeros = synced.clone();
                    zeros.resize(kept.len(), 0);
                    let left = match loss {
                        Loss::Strict => synced,
                        Loss::Zeros => &zeros,
                        Loss::Drawn(_) | Loss::Reordered(_) => [synced, &zeros, &kept][below(3) as usize],
                    };
                    fs::write(&path, left).unwrap();
                    if let Some(changed) = file.changed {
                        let written = fs::File::options().write(true).open(&path).unwrap();
                        written.set_modified(changed).unwrap();
                    }
                }
            }
        }
    }
}
