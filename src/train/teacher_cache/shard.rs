//! A file of the teacher's outputs: rows of top-k ids with their log-probabilities, found by a hash of the document.

use super::CacheKey;
use crate::base::{Error, ErrorKind, Result};
use crate::data::batch::Example;
use crate::formats::dtype::StoredDtype;
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::ops::distill::TopK;
use half::f16;
use std::path::{Path, PathBuf};

/// How to repair stored outputs.
pub(super) const REPAIR: &str = "`ft distill cache` with the same recipe and `--out` stores it again";

/// The error for a damaged file of stored outputs.
pub(super) fn damaged(path: &Path) -> Error {
    Error::format("a file of the teacher's outputs is damaged")
        .at_path(path)
        .hint(REPAIR)
}

/// True for an error of a file that can be stored again. A link is left to the user.
pub(super) fn is_damage(e: &Error, path: &Path) -> bool {
    e.kind() == ErrorKind::Format && !path.is_symlink()
}

/// Bytes of a document's entry in `documents`.
const ENTRY: usize = 20;

pub(super) type Hash = [u8; 16];

/// Hash of a document: its ids and its trained positions.
pub(super) fn hash(ids: &[u32], trained: impl Iterator<Item = bool>) -> Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"ft teacher row 1");
    for id in ids {
        hasher.update(&id.to_le_bytes());
    }
    let mask: Vec<u8> = trained.map(u8::from).collect();
    hasher.update(&mask);
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}

pub(super) fn hash_of(e: &Example) -> Hash {
    hash(&e.ids, e.trained.iter().copied())
}

pub(super) fn shard_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("rows-{index:05}.safetensors"))
}

pub(super) fn write_shard(path: &Path, documents: &[Example], top: &TopK, facts: &CacheKey) -> Result<()> {
    let (tokens, k) = (top.rest.len(), top.k);
    let plan = |name: &str, dtype, shape: Vec<usize>| TensorPlan {
        name: name.into(),
        dtype,
        shape,
    };
    let narrow = facts.common <= 1 << 16;
    let id_type = if narrow { StoredDtype::U16 } else { StoredDtype::U32 };
    let tensors = [
        plan("documents", StoredDtype::U8, vec![documents.len(), ENTRY]),
        plan("ids", id_type, vec![tokens, k]),
        plan("log_probs", StoredDtype::F16, vec![tokens, k]),
        plan("rest", StoredDtype::F32, vec![tokens]),
    ];
    let entry = |e: &Example| {
        let count = e.trained.iter().skip(1).filter(|t| **t).count() as u32;
        let mut bytes = hash_of(e).to_vec();
        bytes.extend(count.to_le_bytes());
        bytes
    };
    // Clamps to the range of f16; such a probability is practically 0.
    let short = |x: &f32| f16::from_f32(x.max(-60000.0)).to_le_bytes();
    // `rest` is -infinity if no probability is left, and a file may not hold it: clamps to the least f32.
    let left = |x: &f32| x.max(f32::MIN).to_le_bytes();
    let bytes: [Vec<u8>; 4] = [
        documents.iter().flat_map(entry).collect(),
        if narrow {
            top.ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect()
        } else {
            top.ids.iter().flat_map(|id| id.to_le_bytes()).collect()
        },
        top.log_probs.iter().flat_map(short).collect(),
        top.rest.iter().flat_map(left).collect(),
    ];
    let mut hasher = blake3::Hasher::new();
    for (tensor, bytes) in tensors.iter().zip(&bytes) {
        hasher.update(tensor_head(&tensor.name, tensor.dtype, &tensor.shape).as_bytes());
        hasher.update(bytes);
    }
    let metadata = [
        ("ft_key".to_string(), facts.key.clone()),
        (HASH.to_string(), hasher.finalize().to_hex().to_string()),
    ];
    let mut next = bytes.iter();
    writer::write_file(path, &tensors, &metadata, |_, sink| {
        sink(Values::Raw(next.next().map_or(&[], Vec::as_slice)))
    })?;
    Ok(())
}

/// The metadata key for the hash of all tensors.
const HASH: &str = "ft_hash";

fn tensor_head(name: &str, dtype: StoredDtype, shape: &[usize]) -> String {
    format!("{name} {} {shape:?}\n", dtype.name())
}

/// An open shard.
pub(super) struct CacheShard {
    weights: Weights,
    narrow: bool,
    k: usize,
    pub(super) tokens: usize,
}

impl CacheShard {
    /// Errors: outputs of another teacher, other rows or other settings; a damaged or incomplete file (`Format`).
    pub(super) fn open(path: &Path, key: &str, k: usize) -> Result<Self> {
        let weights = Weights::open_file(path).map_err(|e| if is_damage(&e, path) { e.hint(REPAIR) } else { e })?;
        if weights.metadata().get("ft_key").map(String::as_str) != Some(key) {
            return Err(
                Error::new("these outputs were stored with another teacher, other rows or other settings")
                    .at_path(path)
                    .hint("give `ft distill cache` a new `--out`"),
            );
        }
        let broken = || {
            let error = Error::format("a file of the teacher's outputs is not valid").at_path(path);
            if is_damage(&error, path) {
                error.hint(REPAIR)
            } else {
                error
            }
        };
        let shape = |name: &str| weights.info(name).cloned().ok_or_else(broken);
        let (documents, ids, rest) = (shape("documents")?, shape("ids")?, shape("rest")?);
        let tokens = rest.count();
        let narrow = ids.dtype == StoredDtype::U16;
        let right = documents.shape.last() == Some(&ENTRY)
            && documents.dtype == StoredDtype::U8
            && ids.shape == [tokens, k]
            && (narrow || ids.dtype == StoredDtype::U32);
        let log_probs = shape("log_probs")?;
        if !right || log_probs.shape != [tokens, k] || log_probs.dtype != StoredDtype::F16 {
            return Err(broken());
        }
        Ok(Self {
            weights,
            narrow,
            k,
            tokens,
        })
    }

    /// As `open`; `None`: the file is damaged.
    pub(super) fn if_whole(path: &Path, key: &str, k: usize) -> Result<Option<Self>> {
        match Self::open(path, key, k) {
            Ok(shard) => Ok((shard.is_whole() != Some(false) && shard.documents().is_ok()).then_some(shard)),
            Err(e) if is_damage(&e, path) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// True if the tensors match the stored hash. `None`: there is no hash, or a tensor is missing.
    pub(super) fn is_whole(&self) -> Option<bool> {
        let stored = self.weights.metadata().get(HASH)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0u8; 1 << 20];
        for name in ["documents", "ids", "log_probs", "rest"] {
            let info = self.weights.info(name)?;
            hasher.update(tensor_head(name, info.dtype, &info.shape).as_bytes());
            let total = info.bytes as usize;
            for first in (0..total).step_by(buffer.len()) {
                let piece = &mut buffer[..(total - first).min(1 << 20)];
                if self.weights.read_bytes_at(name, first, piece).is_err() {
                    return Some(false);
                }
                hasher.update(piece);
            }
        }
        Some(hasher.finalize().to_hex().as_str() == stored)
    }

    /// Sum over the tokens of the probability mass of the stored ids.
    pub(super) fn top_k_mass(&self) -> Result<f64> {
        let rest = self.weights.read_f32("rest")?;
        Ok(rest.iter().map(|r| 1.0 - (*r as f64).exp()).sum())
    }

    /// Hash, first token and number of trained tokens of every document.
    pub(super) fn documents(&self) -> Result<Vec<(Hash, usize, usize)>> {
        let bytes = self.weights.read_bytes("documents")?;
        let (mut out, mut first) = (Vec::new(), 0);
        for entry in bytes.chunks_exact(ENTRY) {
            let (mut hash, mut count) = ([0; 16], [0; 4]);
            hash.copy_from_slice(&entry[..16]);
            count.copy_from_slice(&entry[16..]);
            let count = u32::from_le_bytes(count) as usize;
            out.push((hash, first, count));
            first += count;
        }
        if first == self.tokens {
            Ok(out)
        } else {
            Err(Error::format("a file of the teacher's outputs is not valid")
                .found(format!("{first} tokens in its documents"))
                .expected(self.tokens)
                .hint(REPAIR))
        }
    }

    /// Adds the rows of `count` tokens from `first` on to `top`, each normalized to sum 1 again after the rounding.
    pub(super) fn read(&self, first: usize, count: usize, top: &mut TopK) -> Result<()> {
        let n = count * self.k;
        let size = if self.narrow { 2 } else { 4 };
        let mut bytes = vec![0u8; n * size];
        self.weights.read_bytes_at("ids", first * self.k * size, &mut bytes)?;
        if self.narrow {
            top.ids
                .extend(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]) as u32))
        } else {
            top.ids.extend(
                bytes
                    .chunks_exact(4)
                    .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            )
        }
        let mut log_probs = vec![0f32; n];
        self.weights.read_f32_at("log_probs", first * self.k, &mut log_probs)?;
        let mut rest = vec![0f32; count];
        self.weights.read_f32_at("rest", first, &mut rest)?;
        for (row, rest) in log_probs.chunks_mut(self.k.max(1)).zip(&mut rest) {
            let left = if *rest == f32::MIN { 0.0 } else { (*rest as f64).exp() };
            let sum: f64 = row.iter().map(|x| (*x as f64).exp()).sum::<f64>() + left;
            let shift = sum.ln() as f32;
            row.iter_mut().for_each(|x| *x -= shift);
            *rest = if *rest == f32::MIN {
                f32::NEG_INFINITY
            } else {
                *rest - shift
            };
        }
        top.log_probs.extend(log_probs);
        top.rest.extend(rest);
        Ok(())
    }
}
