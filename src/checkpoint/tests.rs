//! Tests of checkpoints: atomic, verified, and replaced and rotated without loss of the last valid one.

use super::*;
use crate::base::Result;
use crate::formats::StoredDtype;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(super) const WEIGHTS: &str = "weights.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";

pub(super) fn plan(name: &str, shape: &[usize]) -> TensorPlan {
    TensorPlan {
        name: name.into(),
        dtype: StoredDtype::F32,
        shape: shape.to_vec(),
    }
}

/// Values that depend on step, file, tensor and position.
pub(super) fn values(step: u64, file: &str, plan: &TensorPlan) -> Vec<f32> {
    let n: usize = plan.shape.iter().product();
    let base = step as f32 + file.len() as f32 / 64.0 + plan.name.len() as f32 / 4096.0;
    (0..n).map(|i| base + i as f32 * 1e-7).collect()
}

pub(super) fn save_step(run: &Path, step: u64, plans: &[TensorPlan], state: &Value) -> Result<PathBuf> {
    let files = [
        CheckpointFile {
            name: WEIGHTS,
            tensors: plans,
        },
        CheckpointFile {
            name: OPTIMIZER,
            tensors: plans,
        },
    ];
    save(run, step, state, &files, &mut |file, plan, sink| {
        let all = values(step, file, plan);
        let (first, second) = all.split_at(all.len() / 2);
        sink(Values::F32(first))?;
        sink(Values::F32(second))
    })
}

fn plans() -> Vec<TensorPlan> {
    vec![
        plan("model.a.weight", &[7, 5]),
        plan("model.norm.weight", &[9]),
        plan("empty", &[0, 3]),
    ]
}

fn save_small(run: &Path, step: u64) -> PathBuf {
    save_step(run, step, &plans(), &json!({"step": step})).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    crate::base::files::list(dir)
        .unwrap()
        .iter()
        .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
        .collect()
}

fn flip(path: &Path, byte: usize, bit: u8) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[byte] ^= 1 << bit;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_state_comes_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let odd = [
        0.0f32,
        -0.0,
        f32::MIN_POSITIVE,
        1e-45,
        -f32::MAX,
        f32::EPSILON,
        0.1,
        1.0 + f32::EPSILON,
    ];
    // Doubles whose decimal form needs all 17 digits.
    let state = json!({"loss": [0.1 + 0.2, 9.999999974752427e-7, 5e-324, f64::MAX, -0.0, 1.7976931348623155e300],
        "tokens": u64::MAX, "offset": i64::MIN, "name": "\u{1f600}\n\u{0}", "none": null, "list": [[], {}]});
    let plans = [plan("odd", &[2, 4])];
    let files = [CheckpointFile {
        name: WEIGHTS,
        tensors: &plans,
    }];
    let path = save(dir.path(), 3, &state, &files, &mut |file, plan, sink| {
        assert_eq!((file, plan.name.as_str()), (WEIGHTS, "odd"));
        sink(Values::F32(&odd))
    })
    .unwrap();
    assert_eq!(path, dir.path().join("checkpoint-3"));
    assert_eq!(names(&path), ["manifest.json", "state.json", WEIGHTS]);
    let loaded = latest(dir.path()).unwrap().unwrap();
    assert_eq!((loaded.step, &loaded.path), (3, &path));
    assert_eq!(loaded.state, state);
    let bits = |v: &Value| {
        v["loss"]
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap().to_bits())
            .collect::<Vec<_>>()
    };
    assert_eq!(bits(&loaded.state), bits(&state));
    let weights = loaded.open(WEIGHTS).unwrap();
    assert_eq!(weights.info("odd").unwrap().shape, [2, 4]);
    let back: Vec<u32> = weights.read_f32("odd").unwrap().iter().map(|x| x.to_bits()).collect();
    assert_eq!(back, odd.map(f32::to_bits));
    let e = loaded.open(OPTIMIZER).unwrap_err().to_string();
    assert!(e.contains(OPTIMIZER) && e.contains(WEIGHTS), "{e}");
    assert!(loaded.open("../checkpoint-3/weights.safetensors").is_err());
}

/// Row C3.
#[test]
fn a_failed_save_leaves_the_old_state_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1);
    let plans = plans();
    let files = [CheckpointFile {
        name: WEIGHTS,
        tensors: &plans,
    }];
    type Fill = Box<dyn FnMut(&str, &TensorPlan, &mut TensorSink) -> Result<()>>;
    let faults: [(&str, Fill); 4] = [
        ("not finite", Box::new(|_, _, sink| sink(Values::F32(&[f32::NAN])))),
        (
            "not finite",
            Box::new(|_, _, sink| sink(Values::F32(&[0.0, f32::INFINITY]))),
        ),
        (
            "not written completely",
            Box::new(|_, _, sink| sink(Values::F32(&[1.0]))),
        ),
        (
            "the disk is on fire",
            Box::new(|_, _, _| Err(crate::base::Error::new("the disk is on fire"))),
        ),
    ];
    for (what, mut fill) in faults {
        for step in [1, 2] {
            let e = save(dir.path(), step, &json!({}), &files, &mut fill)
                .unwrap_err()
                .to_string();
            assert!(e.contains(what), "{e}");
            assert_eq!(names(dir.path()), ["checkpoint-1"]);
        }
    }
    assert_eq!(latest(dir.path()).unwrap().unwrap().state, json!({"step": 1}));
    for bad in ["manifest.json", "state.json", "a/b", "..", ""] {
        let files = [CheckpointFile {
            name: bad,
            tensors: &[],
        }];
        assert!(
            save(dir.path(), 2, &json!({}), &files, &mut |_, _, _| Ok(())).is_err(),
            "{bad}"
        );
    }
}

/// Row C8.
#[test]
fn every_flipped_bit_of_every_file_is_noticed_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_small(dir.path(), 8);
    let whole = verify(&path).unwrap();
    for name in [WEIGHTS, OPTIMIZER, STATE] {
        let file = path.join(name);
        for byte in 0..std::fs::metadata(&file).unwrap().len() as usize {
            flip(&file, byte, (byte % 8) as u8);
            let e = latest(dir.path()).unwrap_err().to_string();
            assert!(e.contains(name) && e.contains("damaged") && e.contains("hint: "), "{e}");
            flip(&file, byte, (byte % 8) as u8);
        }
    }
    let manifest = path.join("manifest.json");
    for byte in 0..std::fs::metadata(&manifest).unwrap().len() as usize {
        for bit in [byte as u8 % 8, 5] {
            flip(&manifest, byte, bit);
            match load(&path) {
                Err(e) => assert!(e.to_string().contains("checkpoint-8"), "{e}"),
                // White space between two fields may change without a change of meaning.
                Ok(_) => assert_eq!(verify(&path).unwrap(), whole),
            }
            flip(&manifest, byte, bit);
        }
    }
    load(&path).unwrap();
}

/// Row C8.
#[test]
fn damage_in_files_that_only_some_runs_have_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let plans = [plan("model.a.weight", &[7, 5])];
    let names = ["ranks.safetensors", "averages.safetensors", "stage.safetensors"];
    let files = names.map(|name| CheckpointFile { name, tensors: &plans });
    let path = save(dir.path(), 8, &json!({}), &files, &mut |file, plan, sink| {
        sink(Values::F32(&values(8, file, plan)))
    })
    .unwrap();
    let named = |name: &str, what: &str| {
        let e = latest(dir.path()).unwrap_err().to_string();
        assert!(
            e.contains(name) && e.contains(what) && e.contains("hint: "),
            "{name}: {e}"
        );
    };
    for name in names {
        let file = path.join(name);
        let right = std::fs::read(&file).unwrap();
        for byte in 0..right.len() {
            flip(&file, byte, (byte % 8) as u8);
            named(name, "damaged");
            flip(&file, byte, (byte % 8) as u8);
        }
        std::fs::write(&file, &right[..right.len() - 2]).unwrap();
        named(name, "damaged");
        std::fs::remove_file(&file).unwrap();
        named(name, "missing");
        std::fs::write(&file, right).unwrap();
    }
    latest(dir.path()).unwrap().unwrap();
}

#[test]
fn a_checkpoint_that_lacks_something_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_small(dir.path(), 4);
    let text = |r: Result<Option<LoadedState>>| r.unwrap_err().to_string();
    let aside = dir.path().join("aside");
    for name in [WEIGHTS, OPTIMIZER, STATE, "manifest.json"] {
        std::fs::rename(path.join(name), &aside).unwrap();
        let e = text(latest(dir.path()));
        assert!(
            e.contains(name) && e.contains("checkpoint-4") && e.contains("--resume DIR"),
            "{e}"
        );
        // A directory in its place.
        std::fs::create_dir(path.join(name)).unwrap();
        let e = text(latest(dir.path()));
        let kind = if name == "manifest.json" {
            "damaged"
        } else {
            "regular file"
        };
        assert!(e.contains(name) && e.contains(kind), "{e}");
        std::fs::remove_dir(path.join(name)).unwrap();
        std::fs::rename(&aside, path.join(name)).unwrap();
    }
    let file = std::fs::OpenOptions::new()
        .append(true)
        .open(path.join(WEIGHTS))
        .unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let e = text(latest(dir.path()));
    assert!(e.contains(WEIGHTS) && e.contains("bytes"), "{e}");
    // A file of another complete checkpoint is rejected.
    let other = save_small(dir.path(), 5);
    std::fs::copy(other.join(WEIGHTS), path.join(WEIGHTS)).unwrap();
    assert!(verify(&path).unwrap_err().to_string().contains(WEIGHTS));
    std::fs::rename(&other, dir.path().join("checkpoint-6")).unwrap();
    assert!(text(latest(dir.path())).contains("another step"));
    assert!(
        load(&dir.path().join("checkpoint-99"))
            .unwrap_err()
            .to_string()
            .contains("no checkpoint directory `")
    );
}

/// Row R8.
#[test]
fn another_layout_is_refused_with_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_small(dir.path(), 4);
    let text = r#"{"format": 2, "ft": "9.9.9", "step": 4, "parts": []}"#;
    std::fs::write(path.join("manifest.json"), text).unwrap();
    let e = latest(dir.path()).unwrap_err().to_string();
    assert!(e.contains("9.9.9") && e.contains(env!("CARGO_PKG_VERSION")), "{e}");
}

#[test]
fn a_manifest_cannot_point_outside() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_small(dir.path(), 4);
    std::fs::copy(path.join(WEIGHTS), dir.path().join("outside.safetensors")).unwrap();
    let manifest = manifest::CheckpointManifest::of(&path, 4, &["../outside.safetensors", STATE]).unwrap();
    manifest.write(&path).unwrap();
    let e = load(&path).unwrap_err().to_string();
    assert!(e.contains("../outside.safetensors"), "{e}");
}

#[test]
fn only_names_that_save_writes_are_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    for step in [100, 9, 20] {
        save_small(dir.path(), step);
    }
    for other in [
        "checkpoint-0007",
        "checkpoint-+5",
        "checkpoint-",
        "checkpoint-5.left",
        "checkpoint-5.tmp-12",
        "final",
    ] {
        std::fs::create_dir(dir.path().join(other)).unwrap();
    }
    std::fs::write(dir.path().join("checkpoint-500"), "a file").unwrap();
    let steps: Vec<u64> = list(dir.path()).unwrap().iter().map(|(s, _)| *s).collect();
    assert_eq!(steps, [9, 20, 100]);
    assert_eq!(latest(dir.path()).unwrap().unwrap().step, 100);
    assert!(latest(&dir.path().join("none")).unwrap().is_none());
}

/// Row C9.
#[test]
fn the_same_step_twice_replaces_the_state() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 5);
    let plans = [plan("other", &[3])];
    save_step(dir.path(), 5, &plans, &json!({"second": true})).unwrap();
    let loaded = latest(dir.path()).unwrap().unwrap();
    assert_eq!(loaded.state, json!({"second": true}));
    assert_eq!(loaded.open(WEIGHTS).unwrap().names().collect::<Vec<_>>(), ["other"]);
    assert_eq!(names(dir.path()), ["checkpoint-5"]);
    assert_eq!(names(&loaded.path).len(), 4);
    // A file of another program is not lost.
    std::fs::write(dir.path().join("checkpoint-5/notes.txt"), "x").unwrap();
    save_step(dir.path(), 5, &plans, &json!({"third": true})).unwrap();
    assert_eq!(latest(dir.path()).unwrap().unwrap().state, json!({"third": true}));
    assert_eq!(names(dir.path()), ["checkpoint-5", "checkpoint-5.left"]);
    assert!(dir.path().join("checkpoint-5.left/notes.txt").exists());
}

/// Row C2.
#[test]
fn a_save_cut_off_between_two_files_is_ignored_and_cleaned() {
    let dir = tempfile::tempdir().unwrap();
    let good = save_small(dir.path(), 5);
    // Every subset of the files that an interrupted save of step 6 can leave.
    for n in 0..=3 {
        let partial = dir.path().join("checkpoint-6.tmp-4242");
        std::fs::create_dir(&partial).unwrap();
        let marked = crate::base::staging::scratch(&partial);
        marked.unwrap();
        for name in [WEIGHTS, OPTIMIZER, STATE].iter().take(n) {
            std::fs::copy(good.join(name), partial.join(name)).unwrap();
        }
        std::fs::write(partial.join("manifest.json.tmp-4242"), "{").unwrap();
        assert_eq!(latest(dir.path()).unwrap().unwrap().step, 5);
        let by = |process| clean_leftovers(dir.path(), &BTreeSet::from([process]), &|_| false).unwrap();
        assert!(by(4243).removed.is_empty(), "another process has made it");
        assert_eq!(by(4242).removed, [partial]);
        assert_eq!(names(dir.path()), ["checkpoint-5"]);
    }
}

/// Row C5.
#[test]
fn rotation_keeps_the_newest_and_deletes_only_when_it_verifies() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2, 10] {
        save_small(dir.path(), step);
    }
    assert_eq!(
        rotate(dir.path(), 0, None).unwrap(),
        RotationReport::default(),
        "0 keeps all"
    );
    assert_eq!(rotate(dir.path(), 3, None).unwrap(), RotationReport::default());
    let newest = dir.path().join("checkpoint-10").join(WEIGHTS);
    flip(&newest, 100, 0);
    assert!(
        rotate(dir.path(), 1, None)
            .unwrap_err()
            .to_string()
            .contains("checkpoint-10")
    );
    assert_eq!(list(dir.path()).unwrap().len(), 3);
    flip(&newest, 100, 0);
    let deleted = rotate(dir.path(), 1, Some(2)).unwrap().deleted;
    assert_eq!(deleted, [dir.path().join("checkpoint-1")], "2 is the best one");
    let deleted = rotate(dir.path(), 1, Some(10)).unwrap().deleted;
    assert_eq!(deleted, [dir.path().join("checkpoint-2")]);
    assert_eq!(names(dir.path()), ["checkpoint-10"]);
    verify(&dir.path().join("checkpoint-10")).unwrap();
}

#[test]
fn only_what_a_manifest_names_is_ever_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path();
    // A directory without ft's files, one with an extra file, a link to a checkpoint, one without a manifest.
    std::fs::create_dir(run.join("checkpoint-1")).unwrap();
    std::fs::write(run.join("checkpoint-1/photo.jpg"), "x").unwrap();
    std::fs::write(save_small(run, 2).join("notes.txt"), "x").unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let real = save_small(elsewhere.path(), 3);
    std::os::unix::fs::symlink(&real, run.join("checkpoint-3")).unwrap();
    std::fs::remove_file(save_small(run, 4).join("manifest.json")).unwrap();
    // A file that is a link, and a damaged file: a checkpoint with the second is still ft's.
    let linked = save_small(run, 5);
    std::fs::remove_file(linked.join(OPTIMIZER)).unwrap();
    std::os::unix::fs::symlink(real.join(OPTIMIZER), linked.join(OPTIMIZER)).unwrap();
    flip(&save_small(run, 6).join(WEIGHTS), 100, 0);
    save_small(run, 7);
    let rotated = rotate(run, 1, None).unwrap();
    assert_eq!(rotated.deleted, [run.join("checkpoint-6")]);
    assert_eq!(rotated.kept.len(), 5);
    assert!(run.join("checkpoint-1/photo.jpg").exists() && run.join("checkpoint-2/notes.txt").exists());
    verify(&real).unwrap();
    assert!(run.join("checkpoint-3").is_symlink() && linked.join(OPTIMIZER).is_symlink());
    // Later directories: only checkpoints are renamed, and no link.
    save_small(run, 1000);
    std::fs::create_dir(run.join("checkpoint-2000")).unwrap();
    std::fs::write(run.join("checkpoint-2000/photo.jpg"), "x").unwrap();
    std::os::unix::fs::symlink(&real, run.join("checkpoint-3000")).unwrap();
    assert_eq!(set_aside_later(run, 7).unwrap(), [run.join("checkpoint-1000.left")]);
}

#[test]
fn later_checkpoints_step_aside_for_a_run_that_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        for step in [5, 6, 7] {
            save_small(dir.path(), step);
        }
        assert_eq!(set_aside_later(dir.path(), 5).unwrap().len(), 2);
        assert_eq!(latest(dir.path()).unwrap().unwrap().step, 5);
    }
    assert!(verify(&dir.path().join("checkpoint-7.left-2")).unwrap().step == 7);
    assert!(set_aside_later(dir.path(), 5).unwrap().is_empty());
}

/// Row C4.
#[test]
fn room_is_counted_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let small = plans();
    let one = space_needed(
        &[CheckpointFile {
            name: WEIGHTS,
            tensors: &small,
        }],
        1,
    );
    let written = std::fs::metadata(save_small(dir.path(), 1).join(WEIGHTS))
        .unwrap()
        .len();
    assert!(one >= written && one < written + (2 << 20));
    assert_eq!(
        space_needed(
            &[CheckpointFile {
                name: WEIGHTS,
                tensors: &small
            }],
            3
        ),
        3 * one
    );
    check_space(dir.path(), one).unwrap();
    let e = check_space(dir.path(), u64::MAX).unwrap_err().to_string();
    assert!(e.contains("free") && e.contains(&u64::MAX.to_string()), "{e}");
    let huge = [plan("huge", &[1 << 40, 1 << 20])];
    let files = [CheckpointFile {
        name: WEIGHTS,
        tensors: &huge,
    }];
    let e = save(dir.path(), 2, &json!({}), &files, &mut |_, _, _| {
        panic!("nothing should be asked for")
    })
    .unwrap_err();
    assert!(e.to_string().contains("not enough disk space"), "{e}");
    assert_eq!(names(dir.path()), ["checkpoint-1"]);
}

/// Row C4.
#[test]
fn checkpoints_that_cannot_be_linked_are_copied_only_if_the_disk_has_room() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let [from, to, other] = ["from", "to", "other"].map(|name| dir.path().join(name));
    for path in [&from, &to, &other] {
        std::fs::create_dir(path).unwrap();
    }
    let (first, second) = (save_small(&from, 2), save_small(&from, 3));
    // A file behind a symbolic link is copied, as one on another file system.
    let behind = |name: &str| {
        std::fs::rename(second.join(name), from.join(name)).unwrap();
        std::os::unix::fs::symlink(from.join(name), second.join(name)).unwrap();
    };
    behind(WEIGHTS);
    bring(&[&first, &second], &to).unwrap();
    assert_eq!(names(&to), ["checkpoint-2", "checkpoint-3"]);
    let links = |name: &str| to.join("checkpoint-3").join(name).symlink_metadata().unwrap().nlink();
    assert_eq!((links(WEIGHTS), links(OPTIMIZER)), (1, 2));
    for (step, path) in list(&to).unwrap() {
        assert_eq!(verify(&path).unwrap().step, step);
    }

    let entries = CheckpointManifest::read(&second).unwrap().files;
    let huge = u64::MAX / 4;
    let with_huge = |name: &str| {
        let mut entries = entries.clone();
        entries.iter_mut().find(|entry| entry.name == name).unwrap().size = huge;
        CheckpointManifest::new(3, entries).write(&second).unwrap();
    };
    with_huge(WEIGHTS);
    let e = bring(&[&first, &second], &other).unwrap_err();
    assert_eq!(e.what(), "not enough disk space");
    let e = e.to_string();
    assert!(e.contains(&format!("({huge} bytes)")) && e.contains(" free ("), "{e}");
    assert!(names(&other).is_empty(), "{:?}", names(&other));
    // What is linked needs no space.
    with_huge(OPTIMIZER);
    bring(&[&first, &second], &other).unwrap();

    // The second copy fails.
    with_huge(STATE);
    behind(OPTIMIZER);
    std::fs::remove_file(from.join(OPTIMIZER)).unwrap();
    std::fs::remove_dir_all(&other).unwrap();
    std::fs::create_dir(&other).unwrap();
    let e = bring(&[&first, &second], &other).unwrap_err().to_string();
    assert!(e.contains(OPTIMIZER), "{e}");
    assert!(names(&other).is_empty(), "{:?}", names(&other));
}

#[test]
fn any_finite_double_in_the_state_comes_back() {
    use crate::base::rng::{Rng, Stream};
    let dir = tempfile::tempdir().unwrap();
    let rng = Rng::new(11, Stream::Init, &[]);
    let doubles: Vec<f64> = (0..20_000)
        .map(|i| f64::from_bits(rng.bits(i)))
        .filter(|x| x.is_finite())
        .collect();
    save_step(dir.path(), 1, &[], &json!({"doubles": doubles})).unwrap();
    let loaded = latest(dir.path()).unwrap().unwrap();
    let back: Vec<f64> = serde_json::from_value(loaded.state["doubles"].clone()).unwrap();
    assert!(back.iter().zip(&doubles).all(|(a, b)| a.to_bits() == b.to_bits()) && back.len() == doubles.len());
}
