//! Tests of `writer`: written files, and all refused inconsistencies.

use super::*;
use crate::Weights;

fn plan(name: &str, dtype: StoredDtype, shape: &[usize]) -> TensorPlan {
    TensorPlan {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
    }
}

#[test]
fn the_safetensors_crate_reads_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let plans = [plan("x", StoredDtype::F32, &[2, 2]), plan("y", StoredDtype::Bf16, &[3])];
    let size = write_file(&path, &plans, &[], |t, put| {
        if t.name == "x" {
            put(Values::F32(&[1.0]))?;
            put(Values::F32(&[2.0, 3.0, 4.0]))
        } else {
            put(Values::F32(&[0.1, 0.2, 0.3]))
        }
    })
    .unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, size);
    let (length, meta) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(length % 8, 0);
    assert_eq!(meta.metadata().as_ref().unwrap()["format"], "pt");
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.tensor("x").unwrap().data()[..8], [0, 0, 128, 63, 0, 0, 0, 64]);
    assert_eq!(read.tensor("y").unwrap().shape(), [3]);
}

/// Row S1.
#[test]
fn a_number_that_is_not_finite_never_reaches_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let nan = bf16::NAN;
    for (values, dtype) in [
        (Values::F32(&[1.0, f32::NAN]), StoredDtype::F32),
        (Values::F32(&[1.0, f32::NEG_INFINITY]), StoredDtype::Bf16),
        (Values::Bf16(&[bf16::ONE, nan]), StoredDtype::F32),
        (Values::F16(&[f16::ONE, f16::INFINITY]), StoredDtype::F16),
        (Values::Raw(&[0, 0, 0xc0, 0x7f]), StoredDtype::Bf16),
    ] {
        let e = write_file(&path, &[plan("model.w", dtype, &[2])], &[], |_, put| put(values))
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("`model.w`") && e.contains("not finite") && e.contains("position 1"),
            "{e}"
        );
    }
    // Finite, but too large for the format of the file.
    let e = write_file(&path, &[plan("w", StoredDtype::F16, &[1])], &[], |_, put| {
        put(Values::F32(&[70000.0]))
    });
    assert!(e.unwrap_err().to_string().contains("F16 cannot represent"));
    let e = write_file(&path, &[plan("w", StoredDtype::Bf16, &[1])], &[], |_, put| {
        put(Values::F32(&[f32::MAX]))
    });
    assert!(e.unwrap_err().to_string().contains("BF16 cannot represent"));
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "something was left behind"
    );
}

#[test]
fn a_tensor_must_be_written_whole_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let p = [plan("w", StoredDtype::F32, &[3])];
    let short = write_file(&path, &p, &[], |_, put| put(Values::F32(&[1.0])))
        .unwrap_err()
        .to_string();
    assert!(
        short.contains("not written completely") && short.contains("4 bytes"),
        "{short}"
    );
    let long = write_file(&path, &p, &[], |_, put| put(Values::F32(&[1.0; 4])))
        .unwrap_err()
        .to_string();
    assert!(long.contains("more values") && long.contains("a.safetensors"), "{long}");
    let twice = [p[0].clone(), p[0].clone()];
    assert!(write_file(&path, &twice, &[], |_, put| put(Values::F32(&[1.0; 3]))).is_err());
    let failing = write_file(&path, &p, &[], |_, _| Err(Error::new("no numbers"))).unwrap_err();
    assert!(failing.to_string().contains("no numbers"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn models_are_split_above_the_shard_size() {
    let dir = tempfile::tempdir().unwrap();
    let plans: Vec<_> = ["c", "a", "big", "b"]
        .iter()
        .map(|n| plan(n, StoredDtype::F32, &[if *n == "big" { 40 } else { 10 }]))
        .collect();
    let fill = |t: &TensorPlan, put: &mut dyn FnMut(Values) -> Result<()>| {
        put(Values::F32(&vec![t.shape[0] as f32; t.shape[0]]))
    };
    let one = write_model(dir.path(), &plans, SHARD_BYTES, fill).unwrap();
    assert_eq!(one, [dir.path().join("model.safetensors")]);
    let dir = tempfile::tempdir().unwrap();
    let files = write_model(dir.path(), &plans, 80, fill).unwrap();
    let names: Vec<_> = files
        .iter()
        .map(|f| f.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(
        names,
        [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json"
        ]
    );
    let index: Value = serde_json::from_str(&std::fs::read_to_string(&files[3]).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 280);
    assert_eq!(index["weight_map"]["big"], "model-00002-of-00003.safetensors");
    let w = Weights::open(dir.path()).unwrap();
    assert_eq!(w.names().collect::<Vec<_>>(), ["a", "b", "big", "c"]);
    assert_eq!(w.read_f32("big").unwrap(), [40.0; 40]);
}
