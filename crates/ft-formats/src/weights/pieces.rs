//! Tensors whose elements are in several files. Each file has a piece of a tensor as a flat tensor `NAME@FIRST`, where FIRST
//! is the index of its first element in the whole. The pieces of a name are read as one flat tensor `NAME`.

use super::{TensorInfo, Weights};
use crate::index;
use ft_base::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The elements of a tensor that one file has.
#[derive(Debug)]
pub(super) struct FilePiece {
    /// First byte in the whole tensor.
    at: u64,
    bytes: u64,
    /// Index into `Weights::files`.
    file: usize,
    /// First byte in that file.
    offset: u64,
}

/// Bytes of a read that follow each other in one file.
pub(super) struct FileRun {
    /// Index into `Weights::files`.
    pub(super) file: usize,
    /// First byte in that file.
    pub(super) offset: u64,
    pub(super) bytes: usize,
}

/// The name of a piece of the tensor `name` that begins at element `first`.
pub fn piece_name(name: &str, first: usize) -> String {
    format!("{name}@{first}")
}

impl Weights {
    /// Opens files in `dir` that have the pieces of tensors (`piece_name`); each tensor has its whole name and is flat.
    ///
    /// # Errors
    /// As for `open_file`; a tensor that is not a piece; pieces that overlap, leave elements out or differ in their number
    /// format (`Format`).
    pub fn open_pieces(dir: &Path, files: &[String]) -> Result<Self> {
        let paths: Vec<PathBuf> = files.iter().map(|name| dir.join(name)).collect();
        for path in &paths {
            index::stays_inside(path)?;
        }
        let mut out = Self::open_all(dir, paths)?;
        let mut pieces: BTreeMap<String, Vec<(usize, TensorInfo)>> = BTreeMap::new();
        for (stored, info) in std::mem::take(&mut out.tensors) {
            let parsed = stored
                .rsplit_once('@')
                .and_then(|(name, first)| Some((name.to_string(), first.parse().ok()?)));
            let (name, first) = parsed.ok_or_else(|| {
                Error::format(format!("tensor `{stored}` is not a piece of a tensor")).at_path(&out.paths[info.file])
            })?;
            pieces.entry(name).or_default().push((first, info));
        }
        for (name, of_name) in pieces {
            out.join(name, of_name)?;
        }
        Ok(out)
    }

    /// Adds the tensor that these pieces are, by their first elements.
    fn join(&mut self, name: String, mut pieces: Vec<(usize, TensorInfo)>) -> Result<()> {
        pieces.sort_by_key(|(first, info)| (*first, info.count()));
        let (mut next, mut bytes) = (0, 0);
        let mut joined = Vec::with_capacity(pieces.len());
        for (first, info) in &pieces {
            let wrong =
                |what: &str| Error::format(format!("{what} of tensor `{name}`")).at_path(&self.paths[info.file]);
            if info.dtype != pieces[0].1.dtype {
                return Err(wrong("a piece has another number format than the others")
                    .found(info.dtype)
                    .expected(pieces[0].1.dtype));
            }
            if *first != next {
                return Err(wrong("the pieces do not follow each other")
                    .found(format!("a piece from element {first} on"))
                    .expected(format!("one from element {next} on")));
            }
            joined.push(FilePiece {
                at: bytes,
                bytes: info.bytes,
                file: info.file,
                offset: info.offset,
            });
            next += info.count();
            bytes += info.bytes;
        }
        let Some((_, first)) = pieces.into_iter().next() else {
            return Ok(());
        };
        let info = TensorInfo {
            name: name.clone(),
            shape: vec![next],
            bytes,
            ..first
        };
        self.pieces.insert(name.clone(), joined);
        self.tensors.insert(name, info);
        Ok(())
    }

    /// A read of `count` bytes that begins at byte `at` of the tensor: where these bytes are, in order, if the tensor
    /// is in pieces.
    pub(super) fn runs(&self, info: &TensorInfo, at: u64, count: usize) -> Option<Vec<FileRun>> {
        let end = at + count as u64;
        let of = |piece: &FilePiece| {
            let (begin, end) = (at.max(piece.at), end.min(piece.at + piece.bytes));
            (begin < end).then(|| FileRun {
                file: piece.file,
                offset: piece.offset + (begin - piece.at),
                bytes: (end - begin) as usize,
            })
        };
        Some(self.pieces.get(&info.name)?.iter().filter_map(of).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::StoredDtype;
    use crate::writer::{TensorPlan, Values, write_file};

    /// Writes a file with pieces of tensors: name, first element, values.
    fn write(dir: &Path, file: &str, dtype: StoredDtype, pieces: &[(&str, usize, &[f32])]) -> String {
        let plan = |(name, first, values): &(&str, usize, &[f32])| TensorPlan {
            name: piece_name(name, *first),
            dtype,
            shape: vec![values.len()],
        };
        let plans: Vec<TensorPlan> = pieces.iter().map(plan).collect();
        write_file(&dir.join(file), &plans, &[], |plan, sink| {
            let found = pieces
                .iter()
                .find(|(name, first, _)| piece_name(name, *first) == plan.name);
            let values = found.unwrap().2;
            if dtype == StoredDtype::U8 {
                return sink(Values::Raw(&values.iter().map(|x| *x as u8).collect::<Vec<u8>>()));
            }
            sink(Values::F32(values))
        })
        .unwrap();
        file.to_string()
    }

    #[test]
    fn pieces_are_read_as_one_tensor() {
        for dtype in [StoredDtype::F32, StoredDtype::Bf16, StoredDtype::F64, StoredDtype::U8] {
            let dir = tempfile::tempdir().unwrap();
            let d = dir.path();
            let all: Vec<f32> = (0..100u8).map(f32::from).collect();
            // The order of the files is not that of the pieces, and a name may have an @.
            let files = [
                write(d, "1", dtype, &[("a@b#m", 40, &all[40..41]), ("one", 0, &all[..7])]),
                write(d, "2", dtype, &[("a@b#m", 41, &all[41..])]),
                write(d, "3", dtype, &[("a@b#m", 0, &all[..40])]),
            ];
            let weights = Weights::open_pieces(d, &files).unwrap().streamed();
            assert_eq!(weights.names().collect::<Vec<_>>(), ["a@b#m", "one"]);
            assert_eq!(weights.info("a@b#m").unwrap().shape, [100]);
            assert_eq!(weights.total_bytes(), (107 * dtype.size()) as u64);
            if dtype == StoredDtype::U8 {
                let bytes: Vec<u8> = (0..100).collect();
                assert_eq!(weights.read_bytes("a@b#m").unwrap(), bytes);
                let mut some = [0; 30];
                weights.read_bytes_at("a@b#m", 25, &mut some).unwrap();
                assert_eq!(some, bytes[25..55]);
                continue;
            }
            assert_eq!(weights.read_f32("a@b#m").unwrap(), all, "{dtype}");
            assert_eq!(weights.read_f32("one").unwrap(), all[..7], "{dtype}");
            for (first, count) in [(0, 100), (39, 3), (40, 1), (10, 5), (41, 59), (99, 1), (100, 0)] {
                let mut some = vec![f32::NAN; count];
                weights.read_f32_at("a@b#m", first, &mut some).unwrap();
                assert_eq!(some, all[first..first + count], "{dtype} {first}");
            }
            assert!(weights.read_f32_at("a@b#m", 99, &mut [0.0; 2]).is_err());
        }
    }

    #[test]
    fn pieces_that_do_not_make_a_whole_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let f32s = |file: &str, pieces: &[(&str, usize, &[f32])]| write(d, file, StoredDtype::F32, pieces);
        let begin = f32s("begin", &[("w", 0, &[1.0, 2.0])]);
        let gap = f32s("gap", &[("w", 3, &[4.0])]);
        let overlap = f32s("overlap", &[("w", 1, &[4.0])]);
        let bf16 = write(d, "bf16", StoredDtype::Bf16, &[("w", 2, &[4.0])]);
        let open = |files: &[&String]| {
            let files: Vec<String> = files.iter().map(|file| file.to_string()).collect();
            Weights::open_pieces(d, &files)
                .map(|w| w.len())
                .map_err(|e| e.to_string())
        };
        assert_eq!(open(&[&begin]), Ok(1));
        for (files, text) in [
            ([&begin, &gap], "from element 3 on, expected one from element 2"),
            ([&begin, &overlap], "from element 1 on, expected one from element 2"),
            ([&begin, &bf16], "another number format"),
            ([&gap, &gap], "two shards"),
        ] {
            let e = open(&files).unwrap_err();
            assert!(
                e.contains(text) && e.contains('w') && e.contains(files[1].as_str()),
                "{e}"
            );
        }
        let e = open(&[&overlap]).unwrap_err();
        assert!(e.contains("expected one from element 0"), "{e}");
        let whole = TensorPlan {
            name: "whole".into(),
            dtype: StoredDtype::F32,
            shape: vec![1],
        };
        write_file(&d.join("whole"), &[whole], &[], |_, sink| sink(Values::F32(&[1.0]))).unwrap();
        let e = open(&[&"whole".to_string()]).unwrap_err();
        assert!(e.contains("`whole` is not a piece"), "{e}");
    }
}
