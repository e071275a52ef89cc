//! Directories that appear whole, and leftovers of earlier processes.

use super::*;

fn make(target: &Path, text: &str) -> Staging {
    let staging = Staging::create(target).unwrap();
    files::write_atomic(&staging.path().join("a.txt"), text.as_bytes()).unwrap();
    staging
}

fn read(target: &Path) -> String {
    files::read_text(&target.join("a.txt")).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let name = |p: &PathBuf| p.file_name().unwrap().to_string_lossy().into_owned();
    files::list(dir).unwrap().iter().map(name).collect()
}

#[test]
fn a_directory_appears_whole_is_replaced_whole_or_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("deep/final");
    drop(make(&target, "lost"));
    let parent = target.parent().unwrap();
    assert!(names(parent).is_empty());
    make(&target, "one").commit().unwrap();
    assert_eq!(read(&target), "one");
    std::fs::write(target.join("stale.txt"), "x").unwrap();
    make(&target, "two").commit_over(&|_| true).unwrap();
    assert_eq!(read(&target), "two");
    assert_eq!(names(&target), ["a.txt"], "nothing of the old directory is mixed in");
    assert_eq!(names(parent), ["final"]);
    std::fs::write(dir.path().join("file"), "x").unwrap();
    assert!(Staging::create(&dir.path().join("file")).is_err());
    assert!(Staging::beside(&dir.path().join("gone/final")).is_err() && !dir.path().join("gone").exists());
}

#[test]
fn what_is_not_known_to_be_ours_is_kept_when_it_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("final");
    for text in ["mine", "also mine"] {
        std::fs::create_dir_all(&target).unwrap();
        std::fs::write(target.join("notes.txt"), text).unwrap();
        make(&target, text).commit().unwrap();
    }
    assert_eq!(names(dir.path()), ["final", "final.left", "final.left-2"]);
    assert_eq!(
        files::read_text(&dir.path().join("final.left/notes.txt")).unwrap(),
        "mine"
    );
    // A link is kept as a link: its target is not ft's even if it looks so.
    let (other, link) = (dir.path().join("other"), dir.path().join("link"));
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("b.txt"), "x").unwrap();
    std::os::unix::fs::symlink(&other, &link).unwrap();
    make(&link, "new").commit_over(&|_| true).unwrap();
    assert!(other.join("b.txt").exists() && dir.path().join("link.left").is_symlink());
}

/// Two commands with the same output: the later one does not take the name of the result of the first.
#[test]
fn a_new_directory_does_not_replace_one_that_appeared_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("m");
    let (first, second) = (make(&target, "first"), make(&target, "second"));
    assert_eq!(first.commit_new().unwrap(), target);
    let e = second.commit_new().unwrap_err().to_string();
    assert!(
        e.contains("another process has written to the output directory") && e.contains("m.left"),
        "{e}"
    );
    assert_eq!(
        (read(&target), read(&dir.path().join("m.left"))),
        ("first".into(), "second".into())
    );
    assert_eq!(names(dir.path()), ["m", "m.left"]);
    assert_eq!(names(&dir.path().join("m.left")), ["a.txt"]);
}

#[test]
fn a_directory_that_has_the_temporary_name_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("final");
    let process = std::process::id();
    let taken: Vec<PathBuf> = std::iter::once(format!("final.tmp-{process}"))
        .chain((0..200).map(|n| format!("final.tmp-{process}-{n}")))
        .map(|name| dir.path().join(name))
        .collect();
    for path in &taken {
        std::fs::create_dir(path).unwrap();
        std::fs::write(path.join("half.bin"), "x").unwrap();
    }
    make(&target, "one").commit().unwrap();
    drop(make(&target, "two"));
    assert_eq!(names(&target), ["a.txt"]);
    assert!(taken.iter().all(|p| names(p) == ["half.bin"]));
}

#[test]
fn cleaning_takes_what_is_proved_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let put = |name: &str, marked: bool| {
        std::fs::create_dir(d.join(name)).unwrap();
        std::fs::write(d.join(name).join("a.txt"), name).unwrap();
        if marked {
            mark(&d.join(name)).unwrap();
        }
    };
    put("final", false);
    put("checkpoint-6", false);
    // ft's: marked, or moved aside while the original name is free.
    for name in ["final.tmp-77", "checkpoint-5.tmp-77-12", "checkpoint-6.old-77"] {
        put(name, true);
    }
    put("checkpoint-5.old-77", false);
    std::fs::write(d.join("plan.json.tmp-77"), "x").unwrap();
    std::fs::create_dir(d.join("checkpoint-9.tmp-77")).unwrap();
    // Not ft's: no marker, another process, another name, a link.
    put("checkpoint-7.tmp-77", false);
    put("final.tmp-78", true);
    put("photos.old-77", true);
    put("notes.tmp-77", true);
    put("final.old-1999", false);
    std::fs::write(d.join("notes.txt.tmp-77"), "x").unwrap();
    std::os::unix::fs::symlink(d.join("final"), d.join("final.tmp-77-1")).unwrap();

    let processes = BTreeSet::from([77]);
    let owner = LeftoverOwner {
        processes: &processes,
        is_name: &|name| ["final", "plan.json"].contains(&name) || name.starts_with("checkpoint-"),
        is_ours: &|_| false,
    };
    let cleaned = clean(d, &owner).unwrap();
    let left = [
        "checkpoint-5",
        "checkpoint-6",
        "checkpoint-7.tmp-77",
        "final",
        "final.old-1999",
        "final.tmp-77-1",
        "final.tmp-78",
        "notes.tmp-77",
        "notes.txt.tmp-77",
        "photos.old-77",
    ];
    assert_eq!(names(d), left);
    assert_eq!((cleaned.removed.len(), cleaned.restored.len()), (5, 1));
    assert_eq!(cleaned.left, [d.join("checkpoint-7.tmp-77"), d.join("final.tmp-77-1")]);
    assert_eq!(read(&d.join("checkpoint-5")), "checkpoint-5.old-77");
    assert_eq!(clean(&d.join("not there"), &owner).unwrap(), CleanupReport::default());
    remove_whole(&d.join("final")).unwrap();
    assert!(!d.join("final").exists() && clean(d, &owner).unwrap().removed.is_empty());
}

#[test]
fn temporary_files_have_a_marked_directory_and_others_keep_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let trained = dir.path().join("trained");
    std::fs::create_dir(&trained).unwrap();
    std::fs::write(trained.join("theirs.txt"), "x").unwrap();
    assert!(!remove_scratch(&trained).unwrap());
    scratch(&trained).unwrap();
    std::fs::write(trained.join("ours.bin"), "x").unwrap();
    scratch(&trained).unwrap();
    assert!(trained.join("ours.bin").exists());
    assert!(remove_scratch(&trained).unwrap() && remove_scratch(&trained).unwrap());
    assert_eq!(names(&dir.path().join("trained.left")), ["theirs.txt"]);
}
