//! The KV cache of a layer on a GPU: one buffer in the type of the activations or in bf16, or blocks of int8. For a step
//! the keys and values of all rows are put together in the type of the activations.
//!
//! Letters: W = K·E, the width of keys; room: tokens for which there is memory.

use crate::base::Result;
use crate::ops::kv_block::KvBlock;
use crate::ops::paged::{KvDtype, PAGE};
use crate::ops::update;
use candle_core::{DType, Tensor};

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceForm {
    /// As tensors of this type.
    Dense(DType),
    /// As int8 with a scale for each head of a token: K and E.
    Int8(usize, usize),
}

impl DeviceForm {
    /// `stored` defaults to the type of the activations; f32 in a bf16 model would hold the same numbers.
    pub fn new((heads, head_dim): (usize, usize), stored: Option<KvDtype>, activations: DType) -> Self {
        match stored {
            Some(KvDtype::Int8) => Self::Int8(heads, head_dim),
            Some(KvDtype::Bf16) => Self::Dense(DType::BF16),
            Some(KvDtype::F32) | None => Self::Dense(activations),
        }
    }

    /// Bytes of the keys and values of `tokens` tokens of width `width`.
    pub fn bytes(self, tokens: usize, width: usize) -> u64 {
        match self {
            Self::Dense(dtype) => (2 * dtype.size_in_bytes() * tokens * width) as u64,
            Self::Int8(heads, head_dim) => 2 * KvBlock::bytes(tokens, heads, head_dim),
        }
    }

    /// An empty layer with a capacity of `room` tokens.
    pub fn layer(self, room: usize) -> DeviceLayer {
        DeviceLayer {
            form: self,
            room,
            kv: None,
            blocks: Vec::new(),
            len: 0,
        }
    }
}

/// Keys and values of consecutive tokens of one layer. It allocates with the first tokens.
pub struct DeviceLayer {
    form: DeviceForm,
    room: usize,
    /// Dense: `[room, W]`; the first `len` tokens are filled.
    kv: Option<(Tensor, Tensor)>,
    /// int8: keys and values, all but the last block full.
    blocks: Vec<(KvBlock, KvBlock)>,
    len: usize,
}

impl DeviceLayer {
    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// An empty layer of the same form.
    pub fn empty(&self, room: usize) -> Self {
        self.form.layer(room)
    }

    /// Removes all tokens from index `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        let mut before = 0;
        self.blocks.retain(|(keys, _)| {
            before += keys.room();
            before - keys.room() < len
        });
    }

    /// Adds tokens with keys and values `[tokens, W]`.
    pub fn push(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        match self.form {
            DeviceForm::Dense(dtype) => self.push_dense(&k.to_dtype(dtype)?, &v.to_dtype(dtype)?),
            DeviceForm::Int8(_, head_dim) => self.push_int8(k, v, head_dim),
        }
    }

    fn push_dense(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let (tokens, width) = k.dims2()?;
        let need = self.len + tokens;
        if self.kv.is_none() || need > self.room {
            // Grows in units of a page: a chat can outgrow the capacity that its first turn requested.
            self.room = self.room.max(need.next_multiple_of(PAGE));
            let room = || update::zeros((self.room, width), k.dtype(), k.device());
            let new = (room()?, room()?);
            if let Some((keys, values)) = self.kv.as_ref().filter(|_| self.len > 0) {
                new.0.slice_set(&keys.narrow(0, 0, self.len)?, 0, 0)?;
                new.1.slice_set(&values.narrow(0, 0, self.len)?, 0, 0)?;
            }
            self.kv = Some(new);
        }
        if let Some((keys, values)) = &self.kv {
            keys.slice_set(k, 0, self.len)?;
            values.slice_set(v, 0, self.len)?;
        }
        self.len = need;
        Ok(())
    }

    fn push_int8(&mut self, k: &Tensor, v: &Tensor, head_dim: usize) -> Result<()> {
        let tokens = k.dims2()?.0;
        let mut done = 0;
        while done < tokens {
            let full: usize = self.blocks.iter().map(|(keys, _)| keys.room()).sum();
            if self.len == full {
                // The first block has the requested capacity; a text that outgrows it gets pages.
                let room = if self.blocks.is_empty() {
                    self.room.max(1)
                } else {
                    (tokens - done).next_multiple_of(PAGE)
                };
                let block = || KvBlock::new(k, room, head_dim);
                self.blocks.push((block()?, block()?));
                continue;
            }
            if let Some((keys, values)) = self.blocks.last() {
                let first = keys.room() - (full - self.len);
                let count = (full - self.len).min(tokens - done);
                keys.put(first, &k.narrow(0, done, count)?)?;
                values.put(first, &v.narrow(0, done, count)?)?;
                self.len += count;
                done += count;
            }
        }
        Ok(())
    }

    /// Writes keys and values into the rows of `to` (`[tokens, W]` each) from `first` on.
    fn write(&self, to: &(Tensor, Tensor), first: usize) -> Result<()> {
        if let Some((keys, values)) = self.kv.as_ref().filter(|_| self.len > 0) {
            for (from, to) in [(keys, &to.0), (values, &to.1)] {
                to.slice_set(&from.narrow(0, 0, self.len)?.to_dtype(to.dtype())?, 0, first)?;
            }
        }
        let mut done = 0;
        for (keys, values) in &self.blocks {
            let count = keys.room().min(self.len - done);
            keys.get(&to.0.narrow(0, first + done, count)?)?;
            values.get(&to.1.narrow(0, first + done, count)?)?;
            done += count;
        }
        Ok(())
    }
}

/// Puts the keys and values of `layers` together, in order: `[tokens, W]` each, of the type and on the device of `like`.
pub fn together(layers: &[&DeviceLayer], width: usize, like: &Tensor) -> Result<(Tensor, Tensor)> {
    // The usual case: nothing is converted.
    let dense = |layer: &&DeviceLayer| layer.form == DeviceForm::Dense(like.dtype());
    if layers.iter().all(dense) {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for layer in layers {
            if let Some((k, v)) = layer.kv.as_ref().filter(|_| layer.len > 0) {
                keys.push(k.narrow(0, 0, layer.len)?);
                values.push(v.narrow(0, 0, layer.len)?);
            }
        }
        return Ok((Tensor::cat(&keys, 0)?, Tensor::cat(&values, 0)?));
    }
    let tokens = layers.iter().map(|layer| layer.len).sum::<usize>();
    let room = || update::zeros((tokens, width), like.dtype(), like.device());
    let all = (room()?, room()?);
    let mut first = 0;
    for layer in layers {
        layer.write(&all, first)?;
        first += layer.len;
    }
    Ok(all)
}
