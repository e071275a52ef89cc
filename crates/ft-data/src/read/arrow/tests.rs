//! Arrow files of pyarrow and of Hugging Face datasets, and damaged ones (goldens/arrow, make_arrow.py).

use crate::read::{TextUnit, read_rows};
use crate::testing::goldens;
use ft_base::{Result, files};
use serde_json::Value;
use std::path::Path;

fn read(path: &Path) -> Result<Vec<Value>> {
    let mut out = Vec::new();
    read_rows(path.to_str().unwrap(), TextUnit::Auto, &mut |row| {
        out.push(Value::Object(row?.fields));
        Ok(())
    })?;
    Ok(out)
}

fn golden(name: &str) -> Vec<u8> {
    files::read(&goldens().join("arrow").join(name)).unwrap()
}

/// Reads these bytes as a file.
fn of_bytes(bytes: &[u8]) -> Result<Vec<Value>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.arrow");
    std::fs::write(&path, bytes).unwrap();
    read(&path)
}

#[test]
fn all_types_are_read_as_pyarrow_reads_them() {
    let wanted: Vec<Value> = serde_json::from_slice(&golden("rows.json")).unwrap();
    for name in [
        "types.arrow",
        "types-zstd.arrow",
        "types-stream.arrow",
        "types-lz4.arrow",
        "types-deltas.arrow",
        "types.feather",
    ] {
        let found = read(&goldens().join("arrow").join(name)).unwrap();
        assert_eq!(found.len(), wanted.len(), "{name}");
        for (found, wanted) in found.iter().zip(&wanted) {
            assert_eq!(found, wanted, "{name}");
        }
    }
}

#[test]
fn a_cut_file_is_refused_at_every_length() {
    for name in [
        "types.arrow",
        "types-lz4.arrow",
        "saved/train/data-00000-of-00002.arrow",
    ] {
        let whole = golden(name);
        let rows = of_bytes(&whole).unwrap().len();
        assert!(rows > 0);
        for length in (0..whole.len()).step_by(37).chain([whole.len() - 1]) {
            let e = of_bytes(&whole[..length]).unwrap_err().to_string();
            assert!(
                e.contains("cannot read the Arrow data") && e.contains("t.arrow"),
                "{length}: {e}"
            );
        }
    }
}

/// Row F11.
#[test]
fn damaged_bits_give_rows_or_one_error() {
    let mut refused = 0;
    for name in ["types.arrow", "types-zstd.arrow", "types-lz4.arrow"] {
        let whole = golden(name);
        for at in (0..whole.len()).step_by(11) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            // A bit of a number is another number: Arrow files have no checksums.
            if let Err(e) = of_bytes(&bytes) {
                assert!(
                    e.to_string().contains("t.arrow") && e.to_string().contains("hint:"),
                    "{e}"
                );
                refused += 1;
            }
        }
    }
    assert!(refused > 100, "{refused}");
}

/// Row F11: fuzzing found a file of 1129 bytes that took 220 MB, because its lists name the same values again.
#[test]
fn a_column_with_more_values_than_bytes_is_refused() {
    // The first offsets of the lists of messages.
    let whole = golden("saved/train/data-00000-of-00002.arrow");
    let offsets: Vec<u8> = [0_i32, 2, 4, 6].iter().flat_map(|n| n.to_le_bytes()).collect();
    let places: Vec<usize> = (0..whole.len() - 16)
        .filter(|at| whole[*at..].starts_with(&offsets))
        .collect();
    assert!(!places.is_empty());
    assert!(of_bytes(&whole).is_ok());
    for at in places {
        for (index, wrong) in [(1, 7_i32), (2, 1), (3, i32::MAX), (3, -1)] {
            let mut bytes = whole.clone();
            bytes[at + 4 * index..][..4].copy_from_slice(&wrong.to_le_bytes());
            let e = of_bytes(&bytes).unwrap_err().to_string();
            assert!(e.contains("more values than it has bytes for"), "{index} {wrong}: {e}");
        }
    }
}

#[test]
fn other_files_are_refused_with_their_kind() {
    for (bytes, part) in [
        (&b"FEA1 and more"[..], "Feather version 1"),
        (b"ARROW1\0\0 and nothing else", "ends early"),
        (b"{\"text\": \"a row\"}\n", "ends early"),
        (b"", "ends early"),
        (b"\xff\xff\xff\xff\0\0\0\0", "no list of columns"),
        (b"\xff\xff\xff\xff\x08\0\0\0\0\0\0\0\0\0\0\0", "without a header"),
    ] {
        let e = of_bytes(bytes).unwrap_err().to_string();
        assert!(e.contains(part), "{e}");
    }
}
