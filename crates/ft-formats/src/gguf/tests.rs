//! Tests of the reader and the writer of GGUF files, and of the number formats.

use super::*;
use std::path::Path;

/// Values like those of weights: a normal distribution.
fn weights(count: usize) -> Vec<f32> {
    let rng = ft_base::rng::Rng::new(7, ft_base::rng::Stream::Init, &[1]);
    (0..count as u64).map(|i| rng.normal(i) * 0.02).collect()
}

fn relative_error(block: BlockType, x: &[f32]) -> f64 {
    let mut bytes = Vec::new();
    block.encode(x, &mut bytes);
    assert_eq!(bytes.len() as u64, block.bytes(x.len()));
    let y = block.decode(&bytes);
    let sum = |f: &dyn Fn(f32, f32) -> f32| x.iter().zip(&y).map(|(x, y)| f64::from(f(*x, *y)).powi(2)).sum::<f64>();
    (sum(&|x, y| x - y) / sum(&|x, _| x)).sqrt()
}

/// The bytes and values of `testdata/make_gguf.py`: random bytes decoded, and values encoded, by the package `gguf`.
#[test]
fn blocks_are_those_of_the_reference() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("../testdata/gguf_blocks.json")).unwrap();
    let bytes = |value: &serde_json::Value| -> Vec<u8> {
        let text = value.as_str().unwrap();
        (0..text.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
            .collect()
    };
    let floats = |value: &serde_json::Value| -> Vec<f32> {
        let raw = bytes(value);
        raw.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    for block in [
        BlockType::Q8_0,
        BlockType::Q4_0,
        BlockType::Q4K,
        BlockType::Q6K,
        BlockType::Bf16,
        BlockType::F16,
    ] {
        let case = &golden["decoded"][block.to_string()];
        assert_eq!(block.decode(&bytes(&case["bytes"])), floats(&case["values"]), "{block}");
    }
    let values = floats(&golden["values"]);
    for block in [BlockType::Q8_0, BlockType::Q4_0, BlockType::Bf16, BlockType::F16] {
        let mut encoded = Vec::new();
        block.encode(&values, &mut encoded);
        assert_eq!(encoded, bytes(&golden["encoded"][block.to_string()]), "{block}");
    }
}

#[test]
fn errors_of_the_formats_are_of_their_size() {
    let x = weights(256 * 40);
    assert_eq!(relative_error(BlockType::F32, &x), 0.0);
    for (block, least, most) in [
        (BlockType::F16, 1e-5, 3e-4),
        (BlockType::Bf16, 1e-4, 3e-3),
        (BlockType::Q8_0, 1e-3, 1e-2),
        (BlockType::Q6K, 5e-3, 2e-2),
        (BlockType::Q4K, 2e-2, 8e-2),
        (BlockType::Q4_0, 5e-2, 2e-1),
    ] {
        let error = relative_error(block, &x);
        assert!(error > least && error < most, "{block}: {error}");
    }
    // Constant blocks, zeros and one large value.
    for x in [vec![0.0; 256], vec![-0.5; 256], vec![3.0; 256]] {
        for block in [BlockType::Q4K, BlockType::Q6K, BlockType::Q8_0] {
            let mut bytes = Vec::new();
            block.encode(&x, &mut bytes);
            let worst = block
                .decode(&bytes)
                .iter()
                .zip(&x)
                .map(|(y, x)| (y - x).abs())
                .fold(0.0, f32::max);
            assert!(worst <= 0.01 * x[0].abs(), "{block} {}: {worst}", x[0]);
        }
    }
}

fn example(path: &Path) -> Vec<(String, MetadataValue)> {
    let keys: Vec<(String, MetadataValue)> = vec![
        ("general.architecture".into(), "llama".into()),
        ("a".into(), MetadataValue::U32(7)),
        ("b".into(), MetadataValue::I32(-7)),
        ("c".into(), MetadataValue::F32(0.5)),
        ("d".into(), MetadataValue::Bool(true)),
        ("e".into(), MetadataValue::Texts(vec!["x".into(), "é".into()])),
        ("f".into(), MetadataValue::I32s(vec![1, -1])),
        ("g".into(), MetadataValue::U32s(vec![3])),
        ("h".into(), MetadataValue::F32s(vec![0.25])),
        ("i".into(), MetadataValue::Bools(vec![true, false])),
    ];
    let tensors = [("m", vec![2, 32], BlockType::Q8_0), ("n", vec![3], BlockType::F32)];
    let tensors = tensors.map(|(name, shape, block)| TensorEntry {
        name: name.into(),
        shape,
        block,
    });
    write(path, &keys, &tensors, |tensor, sink| {
        let mut bytes = Vec::new();
        tensor.block.encode(&weights(tensor.count()), &mut bytes);
        bytes.chunks(5).try_for_each(sink)
    })
    .unwrap();
    keys
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let keys = example(&path);
    let file = GgufReader::open(&path).unwrap();
    assert_eq!(file.keys.clone().into_iter().collect::<Vec<_>>().len(), keys.len());
    assert!(keys.iter().all(|(key, value)| file.keys[key] == *value));
    assert_eq!(file.tensors[0].shape, [2, 32]);
    assert_eq!(file.values("n").unwrap(), weights(3));
    assert!(
        file.values("m")
            .unwrap()
            .iter()
            .zip(weights(64))
            .all(|(a, b)| (a - b).abs() < 1e-3)
    );
    assert!(file.bytes("o").is_err());
}

/// Row F6.
/// Every prefix and every changed byte of the header gives an error or a file, never a panic or a large allocation.
#[test]
fn damaged_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    example(&path);
    let whole = std::fs::read(&path).unwrap();
    let bad = dir.path().join("bad.gguf");
    for cut in (0..whole.len() - 32).step_by(7) {
        std::fs::write(&bad, &whole[..cut]).unwrap();
        assert!(GgufReader::open(&bad).is_err(), "{cut}");
    }
    for at in 0..whole.len() - 160 {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x81;
        std::fs::write(&bad, &damaged).unwrap();
        let _ = GgufReader::open(&bad);
    }
}
