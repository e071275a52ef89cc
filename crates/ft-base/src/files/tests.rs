//! Tests of file operations.

use super::*;

#[test]
fn a_dropped_file_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    let mut f = AtomicFile::create(&path).unwrap();
    f.write(b"half").unwrap();
    drop(f);
    assert!(list(dir.path()).unwrap().is_empty());
    write_atomic(&path, b"whole").unwrap();
    assert_eq!(read_text(&path).unwrap(), "whole");
    assert_eq!(list(dir.path()).unwrap().len(), 1);
    // A file cannot replace a directory.
    let taken = dir.path().join("taken");
    create_dir_all(&taken).unwrap();
    assert!(write_atomic(&taken, b"x").is_err());
    assert_eq!(list(dir.path()).unwrap().len(), 2);
    assert!(free_space(&dir.path().join("not/there")).unwrap() > 0);
}

#[test]
fn only_regular_files_are_opened_and_nothing_waits() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a valid C string for the whole call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&pipe, &link).unwrap();
    for path in [&pipe, &link] {
        for e in [open(path).err(), read(path).err(), read_text_or_stdin(path).err()] {
            assert!(e.unwrap().to_string().contains("a named pipe"));
        }
    }
    assert!(copy_atomic(&pipe, &dir.path().join("copy")).is_err() && AppendFile::open(&pipe).is_err());
    assert!(open(dir.path()).unwrap_err().to_string().contains("a directory"));
    assert!(
        open(Path::new("/dev/zero"))
            .unwrap_err()
            .to_string()
            .contains("a device")
    );
    // Lines are never appended through a link.
    let (target, log) = (dir.path().join("other.txt"), dir.path().join("metrics.jsonl"));
    write_atomic(&target, b"mine").unwrap();
    std::os::unix::fs::symlink(&target, &log).unwrap();
    assert!(AppendFile::open(&log).is_err());
    assert_eq!(read(&target).unwrap(), b"mine");
}

#[test]
fn a_temporary_name_that_is_taken_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    let process = std::process::id();
    let taken: Vec<PathBuf> = std::iter::once(format!("a.txt.tmp-{process}"))
        .chain((0..200).map(|n| format!("a.txt.tmp-{process}-{n}")))
        .map(|name| dir.path().join(name))
        .collect();
    taken.iter().for_each(|p| fs::write(p, "another's").unwrap());
    write_atomic(&path, b"whole").unwrap();
    assert_eq!(read_text(&path).unwrap(), "whole");
    assert!(taken.iter().all(|p| read_text(p).unwrap() == "another's"));
    let e = write_atomic(&dir.path().join("no/q.toml"), b"x")
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("no/q.toml") && !e.contains(".tmp-") && e.contains("mkdir -p"),
        "{e}"
    );
}
