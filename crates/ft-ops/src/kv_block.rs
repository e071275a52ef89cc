//! The KV cache of a layer on a GPU: blocks of tokens in f32, bf16 or int8 (a scale for each head of a token, absmax / 127),
//! and the steps that add tokens to them and attend to them in place. A block can belong to several documents: a common
//! prompt is stored once, and is read once for all queries of a step that fit into a tile. On the CPU a KV cache has
//! pages (`paged`), with the same values.
//!
//! Letters: N new tokens, K heads of E elements, W = K·E.

use crate::attention::AttentionSpec;
use crate::paged::{KvDtype, PageForm};
use candle_core::{DType, Device, Tensor};
use ft_base::{Error, Result};
use std::ops::Range;

/// Smallest number of keys for which attention is split over blocks of threads.
pub(crate) const SPLIT: usize = 256;

/// The size of a list that stays, for `n` entries: more by at most an eighth, or 8.
pub(crate) fn rounded(n: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 16).max(8))
}

/// Room for the keys and values of some tokens of one layer.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct KvBlock {
    pub(crate) form: PageForm,
    /// f32, bf16 or (signed bytes) u8, `[room, W]`.
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    /// int8: f32 `[room, K]` of keys and of values.
    pub(crate) scales: Option<(Tensor, Tensor)>,
}

impl KvBlock {
    /// Room for `room` tokens.
    ///
    /// # Errors
    /// `device` is not a GPU; no memory.
    pub fn new(form: PageForm, room: usize, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let gpu = super::cuda::Gpu::on(device)?;
            let (width, dtype) = (form.kv_heads * form.head_dim, dtype(form.stored));
            let scales = || gpu.empty((room, form.kv_heads), DType::F32);
            return Ok(Self {
                form,
                keys: gpu.empty((room, width), dtype)?,
                values: gpu.empty((room, width), dtype)?,
                scales: match form.stored {
                    KvDtype::Int8 => Some((scales()?, scales()?)),
                    KvDtype::F32 | KvDtype::Bf16 => None,
                },
            });
        }
        let _ = (form, room, device);
        gpu_only()
    }

    /// The number of tokens for which there is room.
    pub fn room(&self) -> usize {
        self.keys.dims()[0]
    }

    /// Bytes of the keys and values of `tokens` tokens.
    pub fn bytes(form: PageForm, tokens: usize) -> u64 {
        let scale = if form.stored == KvDtype::Int8 { 4 } else { 0 };
        let head = form.head_dim * dtype(form.stored).size_in_bytes() + scale;
        (2 * tokens * form.kv_heads * head) as u64
    }
}

fn dtype(stored: KvDtype) -> DType {
    match stored {
        KvDtype::F32 => DType::F32,
        KvDtype::Bf16 => DType::BF16,
        KvDtype::Int8 => DType::U8,
    }
}

/// The first `tokens` tokens of a block, of every layer.
pub struct KvPart<'a> {
    /// The number of tokens.
    pub tokens: usize,
    /// The block of each layer; `None` for a layer that has none.
    pub layers: Vec<Option<&'a KvBlock>>,
}

/// New tokens of a document, and all parts of the document with the new tokens as the last ones.
pub struct KvDocument<'a> {
    /// The rows of the new tokens in the batch.
    pub queries: Range<usize>,
    /// In order.
    pub parts: Vec<KvPart<'a>>,
}

impl KvDocument<'_> {
    pub(crate) fn tokens(&self) -> usize {
        self.parts.iter().map(|part| part.tokens).sum()
    }
}

/// Bytes that the attention of one new token on `tokens` tokens needs besides the blocks: partial results. Tables that stay have
/// room for more pieces.
pub fn step_bytes(heads: usize, head_dim: usize, tokens: usize) -> u64 {
    let pieces = rounded(tokens.div_ceil(SPLIT) + 1);
    (4 * pieces * heads * (head_dim + 1)) as u64
}

/// A pass of new tokens through the layers: where the tokens of its documents are stored. The table is on the GPU, for
/// all layers.
pub struct KvStep {
    #[cfg(feature = "cuda")]
    tables: super::cuda::kv_block::Tables,
}

impl KvStep {
    /// For the documents of a step.
    ///
    /// # Errors
    /// Queries that are not consecutive, more queries than tokens, more tokens than a block has; not a GPU.
    pub fn new(documents: &[KvDocument], device: &Device) -> Result<Self> {
        Self::with(documents, device, false)
    }

    /// As `new`, for steps that are captured (`graph`): the tables stay, and `renew` writes those of the next step.
    ///
    /// # Errors
    /// As `new`.
    pub fn staying(documents: &[KvDocument], device: &Device) -> Result<Self> {
        Self::with(documents, device, true)
    }

    fn with(documents: &[KvDocument], device: &Device, stay: bool) -> Result<Self> {
        check(documents)?;
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let tables = super::cuda::kv_block::Tables::new(documents, device, stay)?;
            return Ok(Self { tables });
        }
        let _ = (device, stay);
        gpu_only()
    }

    /// Goes on with the documents of another step. True if what was captured with the last one can be launched for this one:
    /// no address and no grid has changed.
    ///
    /// # Errors
    /// As `new`.
    pub fn renew(&mut self, documents: &[KvDocument]) -> Result<bool> {
        check(documents)?;
        #[cfg(feature = "cuda")]
        return self.tables.renew(documents);
        #[cfg(not(feature = "cuda"))]
        gpu_only()
    }

    /// Lets go of the memory of the blocks, until `renew`.
    pub fn release_blocks(&mut self) {
        #[cfg(feature = "cuda")]
        self.tables.release_blocks();
    }

    /// Stores keys and values `[N, W]` of the new tokens of a layer, f32 or bf16.
    ///
    /// # Errors
    /// Shapes or types that do not fit, a layer without a block.
    pub fn put(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.tables.put(layer, k, v);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (layer, k, v);
            gpu_only()
        }
    }

    /// Causal attention of the queries `[N, H·E]` on the tokens of their documents in a layer: o and lse.
    ///
    /// # Errors
    /// As `put`.
    pub fn attend(&self, layer: usize, q: &Tensor, spec: &AttentionSpec) -> Result<(Tensor, Tensor)> {
        spec.check()?;
        #[cfg(feature = "cuda")]
        return super::cuda::attention_cached::attend(&self.tables, layer, q, spec);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (layer, q);
            gpu_only()
        }
    }
}

fn check(documents: &[KvDocument]) -> Result<()> {
    let mut at = 0;
    for d in documents {
        let blocks = || {
            d.parts
                .iter()
                .flat_map(|p| p.layers.iter().flatten().map(|block| (p.tokens, block)))
        };
        let fits = blocks().all(|(tokens, block)| tokens <= block.room());
        if d.queries.start != at || d.queries.end < at || d.queries.len() > d.tokens() || !fits {
            return Err(Error::shape("new tokens do not match the KV cache")
                .found(format!("tokens {:?} of a text of {}", d.queries, d.tokens()))
                .expected(format!("tokens from {at} on, for which the blocks have room")));
        }
        at = d.queries.end;
    }
    Ok(())
}

fn gpu_only<T>() -> Result<T> {
    Err(Error::unsupported("this form of the KV cache exists on a GPU only"))
}
