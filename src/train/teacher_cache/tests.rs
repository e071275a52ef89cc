//! Tests of stored outputs: damage in any byte is found or changes nothing, and the same command repairs it.

use super::*;

/// Trained tokens of a shard.
const TOKENS: usize = 5;

fn facts(teacher: &str) -> CacheKey {
    let mut facts = CacheKey {
        key: String::new(),
        common: 9,
        k: 2,
        temperature: 0.9,
        data: "some rows".into(),
        teacher: String::new(),
    };
    facts.name_teacher(teacher.into());
    facts
}

fn store_shard(dir: &Path, index: usize) {
    let first = 10 * index as u32;
    let document = |i: u32| Example {
        ids: vec![first + i, 2, 3, 4],
        trained: vec![false, true, true, i > 0],
    };
    let top = TopK {
        k: 2,
        ids: (0..2 * TOKENS as u32).map(|i| (i + first) % 9).collect(),
        log_probs: (0..2 * TOKENS).map(|i| -1.5 - i as f32 / 8.0).collect(),
        rest: (0..TOKENS).map(|i| -1.0 - i as f32 / 4.0).collect(),
    };
    let documents = [document(0), document(1)];
    write_shard(&shard_path(dir, index), &documents, &top, &facts("one")).unwrap();
}

/// Two shards and `cache.json`.
fn store(dir: &Path) {
    (0..2).for_each(|index| store_shard(dir, index));
    let manifest = CacheManifest {
        facts: facts("one"),
        shards: 2,
        documents: 4,
        tokens: 2 * TOKENS,
    };
    manifest.write(dir).unwrap();
}

/// All that a run can read: key, number of ids, documents, ids, and the bits of the probabilities.
type Outputs = (String, usize, Vec<Hash>, Vec<u32>, Vec<u32>);

fn outputs(dir: &Path) -> Result<Outputs> {
    let manifest = CacheManifest::read(&dir.join(MANIFEST))?;
    assert_eq!(
        (manifest.facts.temperature, manifest.facts.data.as_str()),
        (0.9, "some rows")
    );
    assert_eq!(manifest.facts.teacher, "one");
    let stored = TeacherCache::read(dir, manifest)?;
    let mut places: Vec<(Hash, (usize, usize, usize))> = stored.places.into_iter().collect();
    places.sort_unstable();
    let mut top: TopK = TopK {
        k: stored.k,
        ..TopK::default()
    };
    for (_, (shard, first, count)) in &places {
        stored.shards[*shard].read(*first, *count, &mut top)?;
    }
    let bits = top.log_probs.iter().chain(&top.rest).map(|x| x.to_bits()).collect();
    let documents = places.into_iter().map(|(hash, _)| hash).collect();
    Ok((stored.key, stored.common, documents, top.ids, bits))
}

/// Row C8.
#[test]
fn a_flipped_bit_in_any_byte_is_an_error_or_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let whole = outputs(dir.path()).unwrap();
    assert_eq!((whole.2.len(), whole.3.len()), (4, 4 * TOKENS));
    for path in files::list(dir.path()).unwrap() {
        let right = std::fs::read(&path).unwrap();
        let mut refused = 0;
        for at in 0..right.len() {
            let mut bytes = right.clone();
            bytes[at] ^= 1u8 << (at % 8);
            std::fs::write(&path, bytes).unwrap();
            match outputs(dir.path()) {
                Ok(found) => assert!(found == whole, "{} byte {at}", path.display()),
                Err(e) => {
                    let text = e.to_string();
                    assert!(text.contains(&dir.path().display().to_string()), "byte {at}: {text}");
                    refused += 1;
                }
            }
        }
        // Not refused: the name under which the hash is stored, and digits that an f32 does not have.
        assert!(
            refused + 20 > right.len(),
            "{}: {refused} of {}",
            path.display(),
            right.len()
        );
        std::fs::write(&path, right).unwrap();
    }
    assert!(outputs(dir.path()).unwrap() == whole);
}

/// Row C8.
#[test]
fn a_changed_value_in_the_manifest_is_named() {
    let dir = tempfile::tempdir().unwrap();
    store(dir.path());
    let path = dir.path().join(MANIFEST);
    let right = std::fs::read_to_string(&path).unwrap();
    let value: Value = serde_json::from_str(&right).unwrap();
    for key in [
        "key",
        "common",
        "k",
        "temperature",
        "data",
        "teacher",
        "shards",
        "documents",
        "tokens",
    ] {
        let mut changed = value.clone();
        changed[key] = match &value[key] {
            Value::String(text) => json!(format!("{text}0")),
            // One less: a shard, a document or a token would be lost in silence.
            number => json!(number.as_f64().map(|x| (x - 1.0) as i64)),
        };
        for text in [changed.to_string(), right.replace(&format!("\"{key}\""), "\"other\"")] {
            std::fs::write(&path, text).unwrap();
            let read = CacheManifest::read(&path).and_then(|manifest| TeacherCache::read(dir.path(), manifest));
            let e = read.err().unwrap().to_string();
            assert!(
                e.contains(MANIFEST) && e.contains("damaged") && e.contains(REPAIR),
                "{key}: {e}"
            );
        }
    }
}

/// Row C8.
#[test]
fn only_damaged_files_of_the_same_outputs_are_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let (shard, manifest) = (shard_path(dir.path(), 1), dir.path().join(MANIFEST));
    let cut = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() - 2]).unwrap();
    };
    let refused = |teacher: &str| check_place(dir.path(), &facts(teacher)).err().map(|e| e.to_string());
    let found = || CacheShard::if_whole(&shard, &facts("one").key, 2).unwrap().is_some();
    store(dir.path());
    assert!(refused("one").is_none() && found());
    // A cut file, or a cut list: another file shows whose they are.
    for path in [&shard, &manifest] {
        store(dir.path());
        cut(path);
        assert!(outputs(dir.path()).is_err());
        assert!(refused("one").is_none(), "{}", path.display());
        assert_eq!(found(), path != &shard);
        assert!(refused("two").is_some());
    }
    // Nothing shows whose this file is.
    std::fs::remove_file(&manifest).unwrap();
    std::fs::remove_file(shard_path(dir.path(), 0)).unwrap();
    cut(&shard);
    let e = refused("one").unwrap();
    assert!(
        e.contains("rows-00001.safetensors") && e.contains("new directory"),
        "{e}"
    );
    // Whole outputs of another teacher are kept.
    store(dir.path());
    let e = refused("two").unwrap();
    assert!(e.contains("another teacher"), "{e}");
    assert!(CacheShard::if_whole(&shard, &facts("two").key, 2).is_err());
}

fn names(dir: &Path) -> Vec<String> {
    let name = |p: &PathBuf| p.file_name().unwrap().to_string_lossy().into_owned();
    files::list(dir).unwrap().iter().map(name).collect()
}

/// Row C1.
#[test]
fn what_a_killed_process_left_is_removed_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let torn = [
        "cache.json.tmp-77",
        "rows-00000.safetensors.tmp-77",
        "rows-00007.safetensors.tmp-77-3",
    ];
    let leave = || {
        torn.iter()
            .for_each(|name| std::fs::write(d.join(name), "half").unwrap());
        // Killed before the marker was complete.
        std::fs::create_dir_all(d.join("teacher")).unwrap();
        std::fs::write(d.join("teacher/.ft-temporary.tmp-77"), "Temp").unwrap();
    };
    store(d);
    let (whole, stored) = (outputs(d).unwrap(), names(d));
    leave();
    check_place(d, &facts("one")).unwrap();
    assert_eq!(names(d), stored);
    assert!(outputs(d).unwrap() == whole);
    // A file of another name, or of another kind, is refused, and nothing is removed.
    leave();
    for name in [
        "rows-1.safetensors.tmp-77",
        "notes.txt.tmp-77",
        "rows-00000.safetensors.tmp-x",
    ] {
        std::fs::write(d.join(name), "x").unwrap();
        let e = check_place(d, &facts("one")).unwrap_err().to_string();
        assert!(e.contains("other files") && e.contains(name), "{e}");
        std::fs::remove_file(d.join(name)).unwrap();
    }
    let (folder, link) = ("rows-00003.safetensors.tmp-78", "rows-00004.safetensors.tmp-78");
    std::fs::create_dir(d.join(folder)).unwrap();
    let e = check_place(d, &facts("one")).unwrap_err().to_string();
    assert!(e.contains("other files") && e.contains(folder), "{e}");
    std::fs::remove_dir(d.join(folder)).unwrap();
    std::os::unix::fs::symlink("rows-00000.safetensors", d.join(link)).unwrap();
    let e = check_place(d, &facts("one")).unwrap_err().to_string();
    assert!(e.contains("other files") && e.contains(link), "{e}");
    std::fs::remove_file(d.join(link)).unwrap();
    assert!(check_place(d, &facts("two")).is_err());
    assert!(torn.iter().all(|name| d.join(name).exists()) && d.join("teacher").exists());
}

/// Row C10.
#[test]
fn a_second_process_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let held = CacheLock::acquire(&out).unwrap();
    store(&out);
    let before = names(&out);
    let e = CacheLock::acquire(&out).err().unwrap().to_string();
    assert!(
        e.contains("another `ft distill cache`") && e.contains("process ") && e.contains("--out"),
        "{e}"
    );
    assert_eq!(names(&out), before);
    check_place(&out, &facts("one")).unwrap();
    drop(held);
    assert_eq!(
        names(&out),
        ["cache.json", "rows-00000.safetensors", "rows-00001.safetensors"]
    );
    // The lock of a killed process.
    std::fs::write(out.join("run.lock"), "process 7 since 2026-01-01 00:00:00 UTC\n").unwrap();
    let held = CacheLock::acquire(&out).unwrap();
    check_place(&out, &facts("one")).unwrap();
    drop(held);
    // A directory of something else gets no lock.
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("notes.txt"), "x").unwrap();
    let e = CacheLock::acquire(&other).err().unwrap().to_string();
    assert!(e.contains("other files") && names(&other) == ["notes.txt"], "{e}");
}
