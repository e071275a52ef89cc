//! Rows in memory that replace or follow the stored rows of a matrix: new tokens of an embedding.

use super::{TensorInfo, Weights};
use crate::dtype::StoredDtype;
use ft_base::{Error, Result};
use half::{bf16, f16};

/// Bytes in memory in place of bytes of a tensor.
#[derive(Debug)]
pub(super) struct Patch {
    /// First byte of the tensor that they replace.
    at: u64,
    bytes: Vec<u8>,
    /// Bytes of the tensor in its file.
    stored: u64,
}

impl Weights {
    /// Reads rows `first..` of matrix `name` from `values` instead of the file, rounded to the stored number format. Rows
    /// after the last stored one make the matrix longer. Call it once for a matrix, before `alias`.
    ///
    /// # Errors
    /// No such matrix, or not a weight format; rows that do not follow the stored ones, or are not whole.
    pub fn with_rows(&mut self, name: &str, first: usize, values: &[f32]) -> Result<()> {
        let info = self.must(name)?;
        self.readable(info)?;
        let wrong = |found: String| {
            Error::shape(format!("rows do not fit the matrix `{name}`"))
                .at_path(&self.paths[info.file])
                .found(found)
                .expected(format!("whole rows that begin at most at the end of {:?}", info.shape))
        };
        let [rows, width] = info.shape[..] else {
            return Err(wrong(format!("a tensor of shape {:?}", info.shape)));
        };
        if first > rows || width == 0 || !values.len().is_multiple_of(width) {
            return Err(wrong(format!("{} values from row {first} on", values.len())));
        }
        let each = |f: &dyn Fn(f32) -> Vec<u8>| values.iter().flat_map(|v| f(*v)).collect::<Vec<u8>>();
        let bytes = match info.dtype {
            StoredDtype::Bf16 => each(&|v| bf16::from_f32(v).to_le_bytes().to_vec()),
            StoredDtype::F16 => each(&|v| f16::from_f32(v).to_le_bytes().to_vec()),
            StoredDtype::F64 => each(&|v| f64::from(v).to_le_bytes().to_vec()),
            _ => each(&|v| v.to_le_bytes().to_vec()),
        };
        let patch = Patch {
            at: (first * width * info.dtype.size()) as u64,
            bytes,
            stored: info.bytes,
        };
        let rows = rows.max(first + values.len() / width);
        if let Some(info) = self.tensors.get_mut(name) {
            info.shape[0] = rows;
            info.bytes = info.bytes.max(patch.at + patch.bytes.len() as u64);
            // In a multimodal checkpoint it is not `name`.
            self.patches.insert(info.name.clone(), patch);
        }
        Ok(())
    }

    /// A read of `count` bytes that begins at byte `at` of the tensor: how many of them are in the file.
    pub(super) fn stored_part(&self, info: &TensorInfo, at: u64, count: usize) -> usize {
        match self.patches.get(&info.name) {
            Some(patch) => patch.stored.saturating_sub(at).min(count as u64) as usize,
            None => count,
        }
    }

    /// `out`: the bytes of the tensor that were read, from its byte `at`. Replaces those that have a patch in memory.
    pub(super) fn patch(&self, info: &TensorInfo, at: u64, out: &mut [u8]) {
        let Some(patch) = self.patches.get(&info.name) else {
            return;
        };
        let begin = at.max(patch.at);
        let end = (at + out.len() as u64).min(patch.at + patch.bytes.len() as u64);
        if begin < end {
            let from = &patch.bytes[(begin - patch.at) as usize..(end - patch.at) as usize];
            out[(begin - at) as usize..(end - at) as usize].copy_from_slice(from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::LANGUAGE_MODEL;
    use crate::writer::{self, TensorPlan, Values};

    #[test]
    fn rows_replace_and_follow_the_stored_ones() {
        for dtype in [StoredDtype::F32, StoredDtype::Bf16, StoredDtype::F16, StoredDtype::F64] {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("m.safetensors");
            let plan = [TensorPlan {
                name: "e".into(),
                dtype,
                shape: vec![4, 3],
            }];
            let stored: Vec<f32> = (0..12u8).map(f32::from).collect();
            writer::write_file(&file, &plan, &[], |_, sink| sink(Values::F32(&stored))).unwrap();
            for first in 2..=4 {
                let mut weights = Weights::open_file(&file).unwrap();
                let new: Vec<f32> = (0..9u8).map(|i| 100.0 + f32::from(i)).collect();
                weights.with_rows("e", first, &new).unwrap();
                weights.alias("head", "e");
                let mut wanted = stored.clone();
                wanted.resize(wanted.len().max(first * 3 + 9), 0.0);
                wanted[first * 3..][..9].copy_from_slice(&new);
                for name in ["e", "head"] {
                    weights.require(name, &[wanted.len() / 3, 3]).unwrap();
                    assert_eq!(weights.read_f32(name).unwrap(), wanted, "{dtype} {first}");
                    for (at, count) in [(0, 1), (3, 7), (5, wanted.len() - 5), (wanted.len() - 1, 1)] {
                        let mut out = vec![0.0; count];
                        weights.read_f32_at(name, at, &mut out).unwrap();
                        assert_eq!(out, wanted[at..at + count], "{dtype} {first} {at}");
                    }
                }
            }
            let mut weights = Weights::open_file(&file).unwrap();
            assert!(weights.with_rows("e", 5, &[0.0; 3]).is_err());
            assert!(weights.with_rows("e", 4, &[0.0; 2]).is_err());
            assert!(weights.with_rows("no", 0, &[0.0; 3]).is_err());
        }
    }

    /// Its stored name is another one than that of a text-only checkpoint.
    #[test]
    fn rows_are_added_to_the_embedding_of_a_multimodal_checkpoint() {
        for [prefix, head] in LANGUAGE_MODEL {
            let dir = tempfile::tempdir().unwrap();
            let plan = |name: String| TensorPlan {
                name,
                dtype: StoredDtype::F32,
                shape: vec![4, 3],
            };
            let plans = [
                plan(format!("{prefix}embed_tokens.weight")),
                plan(format!("{head}weight")),
            ];
            let stored: Vec<f32> = (0..12u8).map(f32::from).collect();
            let file = dir.path().join("model.safetensors");
            writer::write_file(&file, &plans, &[], |_, sink| sink(Values::F32(&stored))).unwrap();
            for name in ["model.embed_tokens.weight", "lm_head.weight"] {
                let mut weights = Weights::open(dir.path()).unwrap();
                weights.with_rows(name, 3, &[100.0; 6]).unwrap();
                let wanted = [&stored[..9], &[100.0; 6]].concat();
                assert_eq!(weights.read_f32(name).unwrap(), wanted, "{prefix} {name}");
            }
        }
    }
}
