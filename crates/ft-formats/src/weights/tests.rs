//! Tests of `weights`: valid files, and all refused inconsistencies.

use super::*;
use crate::writer::{TensorPlan, Values, write_file};
use serde_json::{Value, json};

fn plan(name: &str, dtype: StoredDtype, shape: &[usize]) -> TensorPlan {
    TensorPlan {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
    }
}

/// Writes a file with the named f32 tensors of two elements each.
fn shard(path: &Path, names: &[&str]) {
    let plans: Vec<_> = names.iter().map(|n| plan(n, StoredDtype::F32, &[2])).collect();
    write_file(path, &plans, &[], |_, put| put(Values::F32(&[1.0, -2.0]))).unwrap();
}

fn index(dir: &Path, map: Value) {
    let text = json!({"metadata": {"total_size": 0}, "weight_map": map}).to_string();
    std::fs::write(dir.join(index::INDEX), text).unwrap();
}

/// Writes two valid shards and their index.
fn sharded(dir: &Path) {
    shard(&dir.join("model-00001-of-00002.safetensors"), &["a", "b"]);
    shard(&dir.join("model-00002-of-00002.safetensors"), &["c"]);
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    index(dir, json!({"a": one, "b": one, "c": two}));
}

#[track_caller]
fn refuses(dir: &Path, words: &[&str]) {
    let e = Weights::open(dir).unwrap_err().to_string();
    for word in words {
        assert!(e.contains(word), "no `{word}` in: {e}");
    }
}

#[test]
fn numbers_of_every_format_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    // More than one piece of 4 MiB, and values that bf16 must round.
    let n = (PIECE / 4) * 2 + 3;
    let values: Vec<f32> = (0..n).map(|i| (i as f32 - 1e5) * 1.001).collect();
    let halves: Vec<f16> = values[..9].iter().map(|x| f16::from_f32(x / 3000.0)).collect();
    let plans = [
        plan("w32", StoredDtype::F32, &[n]),
        plan("w16", StoredDtype::Bf16, &[n]),
        plan("half", StoredDtype::F16, &[3, 3]),
        plan("w64", StoredDtype::F64, &[9]),
        plan("ids", StoredDtype::I64, &[1]),
        plan("none", StoredDtype::F32, &[0, 4]),
    ];
    write_file(&path, &plans, &[("k".into(), "v".into())], |t, put| {
        match t.name.as_str() {
            "half" => put(Values::F16(&halves)),
            "w64" => put(Values::F32(&values[..9])),
            "ids" => put(Values::Raw(&7i64.to_le_bytes())),
            "none" => put(Values::F32(&[])),
            _ => put(Values::F32(&values)),
        }
    })
    .unwrap();
    let w = Weights::open(dir.path()).unwrap();
    assert_eq!(
        w.names().collect::<Vec<_>>(),
        ["half", "ids", "none", "w16", "w32", "w64"]
    );
    assert_eq!(w.read_f32("w32").unwrap(), values);
    let rounded: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
    assert_eq!(w.read_bf16("w16").unwrap(), rounded);
    assert_eq!(w.read_bf16("w32").unwrap(), rounded);
    assert_eq!(
        w.read_f32("w16").unwrap(),
        rounded.iter().map(|x| x.to_f32()).collect::<Vec<_>>()
    );
    assert_eq!(
        w.read_f32("half").unwrap(),
        halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>()
    );
    assert_eq!(w.read_f32("w64").unwrap(), values[..9]);
    assert_eq!(w.read_bf16("w64").unwrap(), rounded[..9]);
    assert_eq!(w.read_bytes("ids").unwrap(), 7i64.to_le_bytes());
    assert!(w.read_f32("none").unwrap().is_empty());
    assert_eq!(
        (w.metadata()["format"].as_str(), w.metadata()["k"].as_str()),
        ("pt", "v")
    );
    assert_eq!(w.total_bytes(), (n * 6 + 18 + 72 + 8) as u64);
    assert!(w.read_f32("ids").unwrap_err().to_string().contains("`ids`"));
    // Ties go to even: 1 + 2^-8 is halfway between two bf16 numbers.
    assert_eq!(bf16::from_f32(1.0 + 1.0 / 256.0).to_f32(), 1.0);
    assert_eq!(bf16::from_f32(1.0 + 3.0 / 256.0).to_f32(), 1.015625);
}

#[test]
fn a_missing_or_misshapen_tensor_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path());
    shard(
        &dir.path().join("model.safetensors"),
        &["model.layers.0.q_proj.weight", "lm_head.weight"],
    );
    let w = Weights::open(dir.path()).unwrap();
    let e = w.require("model.layers.0.k_proj.weight", &[2]).unwrap_err().to_string();
    assert!(
        e.contains("`model.layers.0.k_proj.weight` is missing") && e.contains("nearest names: model.layers.0.q_proj"),
        "{e}"
    );
    let e = w.require("lm_head.weight", &[2, 1]).unwrap_err().to_string();
    assert!(e.contains("found [2], expected [2, 1]"), "{e}");
    w.require("lm_head.weight", &[2]).unwrap();
}

#[test]
fn shards_are_read_through_the_index() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path());
    let w = Weights::open(dir.path()).unwrap();
    assert_eq!(w.files().len(), 2);
    assert_eq!(w.read_f32("c").unwrap(), [1.0, -2.0]);
}

/// Row F5.
#[test]
fn missing_shard() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path());
    std::fs::remove_file(dir.path().join("model-00002-of-00002.safetensors")).unwrap();
    refuses(dir.path(), &["1 of 2 weight files are missing", "model-00002-of-00002"]);
}

/// Row F5.
#[test]
fn extra_shard_beside_the_index() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path());
    shard(&dir.path().join("model-00003-of-00002.safetensors"), &["d"]);
    refuses(dir.path(), &["not in the index", "model-00003-of-00002"]);
    std::fs::remove_file(dir.path().join("model-00003-of-00002.safetensors")).unwrap();
    shard(&dir.path().join("consolidated.safetensors"), &["d"]);
    Weights::open(dir.path()).unwrap();
}

/// Row F5.
#[test]
fn tensor_in_two_shards() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path());
    shard(&dir.path().join("model-00002-of-00002.safetensors"), &["c", "a"]);
    refuses(dir.path(), &["`a` is in two shards"]);
}

#[test]
fn index_and_shards_disagree() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path());
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    index(dir.path(), json!({"a": one, "b": one, "c": two, "d": two}));
    refuses(dir.path(), &["`d` is in the index but not in"]);
    index(dir.path(), json!({"a": one, "c": two}));
    refuses(dir.path(), &["`b` is not in the index"]);
    index(dir.path(), json!({"a": one, "b": two, "c": two}));
    refuses(dir.path(), &["`b` is not in the shard"]);
    index(dir.path(), json!({}));
    refuses(dir.path(), &["lists no tensor"]);
    std::fs::write(dir.path().join(index::INDEX), "{}").unwrap();
    refuses(dir.path(), &["no `weight_map`"]);
    index(dir.path(), json!({"a": 5}));
    refuses(dir.path(), &["`a`", "found 5"]);
}

/// Row F5.
#[test]
fn names_that_leave_the_directory() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    std::fs::create_dir(&dir).unwrap();
    shard(&root.path().join("x.safetensors"), &["a"]);
    std::fs::create_dir(dir.join("sub")).unwrap();
    shard(&dir.join("sub/x.safetensors"), &["a"]);
    let absolute = root.path().join("x.safetensors").display().to_string();
    for (name, why) in [
        ("../x.safetensors", "leaves the directory"),
        ("sub/../../x.safetensors", "leaves the directory"),
        (absolute.as_str(), "absolute"),
        ("..\\x.safetensors", "backslash"),
        ("https://example.org/x.safetensors", "URL"),
        ("C:x.safetensors", "URL or a drive"),
        ("sub/x.safetensors", "not a plain file name"),
        ("./x.safetensors", "not a plain file name"),
        ("..", "leaves the directory"),
        ("", "empty"),
        ("a\nb", "control characters"),
    ] {
        index(&dir, json!({"a": name}));
        refuses(&dir, &[why, "will not open", index::INDEX]);
    }
}

/// Row F5.
#[test]
fn a_link_out_of_the_directory() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("model");
    std::fs::create_dir(&dir).unwrap();
    shard(&root.path().join("x.safetensors"), &["a"]);
    std::os::unix::fs::symlink("../x.safetensors", dir.join("model.safetensors")).unwrap();
    refuses(&dir, &["link to a path outside", "x.safetensors"]);
    assert!(Weights::open_file(&dir.join("model.safetensors")).is_err());
    std::fs::rename(
        dir.join("model.safetensors"),
        dir.join("model-00001-of-00001.safetensors"),
    )
    .unwrap();
    index(&dir, json!({"a": "model-00001-of-00001.safetensors"}));
    refuses(&dir, &["link to a path outside"]);
}

#[test]
fn the_links_of_the_hub_cache_are_followed() {
    let root = tempfile::tempdir().unwrap();
    let repo = root.path().join("models--org--name");
    let snapshot = repo.join("snapshots/0123");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repo.join("blobs")).unwrap();
    shard(&repo.join("blobs/abc"), &["a"]);
    std::os::unix::fs::symlink("../../blobs/abc", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(Weights::open(&snapshot).unwrap().len(), 1);
    // A directory that is itself a link to the snapshot is accepted; other places in the cache are not.
    std::os::unix::fs::symlink(&snapshot, root.path().join("short")).unwrap();
    Weights::open(&root.path().join("short")).unwrap();
    shard(&root.path().join("elsewhere"), &["a"]);
    std::fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    std::os::unix::fs::symlink("../../../elsewhere", snapshot.join("model.safetensors")).unwrap();
    refuses(&snapshot, &["link to a path outside"]);
}

/// Row F7.
#[test]
fn pickles_are_named_and_never_opened() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.ckpt"] {
        // A directory of that name: any attempt to read it would fail with another error.
        std::fs::create_dir(dir.path().join(name)).unwrap();
        refuses(dir.path(), &[name, "pickle", "can run code", "safe_serialization"]);
        let e = Weights::open_file(&dir.path().join(name)).unwrap_err().to_string();
        assert!(e.contains("pickle"), "{e}");
        std::fs::remove_dir(dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("training_args.bin"), b"x").unwrap();
    refuses(dir.path(), &["contains no weights"]);
    index(dir.path(), json!({"a": "pytorch_model-00001-of-00001.bin"}));
    refuses(dir.path(), &["pickle"]);
    std::fs::create_dir(dir.path().join("pytorch_model-00001-of-00001.bin")).unwrap();
    refuses(dir.path(), &["pickle"]);
}

/// Row F10.
#[test]
fn git_lfs_pointers() {
    let dir = tempfile::tempdir().unwrap();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    std::fs::write(dir.path().join("model.safetensors"), pointer).unwrap();
    refuses(dir.path(), &["Git LFS pointer", "git lfs pull", "model.safetensors"]);
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join(index::INDEX), pointer).unwrap();
    refuses(dir.path(), &["Git LFS pointer", "index.json"]);
}

#[test]
fn directories_without_weights() {
    let dir = tempfile::tempdir().unwrap();
    refuses(&dir.path().join("none"), &["no directory `"]);
    refuses(dir.path(), &["contains no weights"]);
    std::fs::write(dir.path().join("m.gguf"), b"GGUF").unwrap();
    refuses(dir.path(), &["GGUF"]);
    std::fs::write(dir.path().join("adapter_config.json"), b"{}").unwrap();
    refuses(dir.path(), &["this is an adapter"]);
}

/// Row F3.
#[test]
fn a_file_that_shrinks_after_it_was_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    shard(&path, &["a", "b"]);
    let w = Weights::open(dir.path()).unwrap();
    let size = std::fs::metadata(&path).unwrap().len();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(size - 1)
        .unwrap();
    w.read_f32("a").unwrap();
    let e = w.read_f32("b").unwrap_err().to_string();
    assert!(e.contains("`b`") && e.contains("shorter"), "{e}");
}
