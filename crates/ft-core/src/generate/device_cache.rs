//! The KV cache of a layer on a GPU: blocks in the type of the activations, bf16 or int8, in which attention reads it.

use crate::base::Result;
use crate::ops::kv_block::KvBlock;
use crate::ops::paged::{KvDtype, PAGE, PageForm};
use candle_core::{DType, Device};

/// How keys and values are stored. `stored` defaults to the type of the activations; f32 in a bf16 model would hold the
/// same numbers.
pub(crate) fn device_form(
    (kv_heads, head_dim): (usize, usize),
    stored: Option<KvDtype>,
    activations: DType,
) -> PageForm {
    let stored = match (stored, activations) {
        (Some(KvDtype::Int8), _) => KvDtype::Int8,
        // Numbers of 16 bits: f16 in an f16 model.
        (Some(KvDtype::Bf16), _) | (_, DType::BF16 | DType::F16) => KvDtype::Bf16,
        _ => KvDtype::F32,
    };
    PageForm {
        stored,
        kv_heads,
        head_dim,
    }
}

/// Keys and values of consecutive tokens of one layer.
pub(crate) struct DeviceLayer {
    form: PageForm,
    /// Tokens for which the first block has room.
    room: usize,
    /// All but the last one full.
    blocks: Vec<KvBlock>,
    len: usize,
}

impl DeviceLayer {
    /// An empty layer with a capacity of `room` tokens. It allocates with the first tokens.
    pub(crate) fn new(form: PageForm, room: usize) -> Self {
        Self {
            form,
            room,
            blocks: Vec::new(),
            len: 0,
        }
    }

    /// How its keys and values are stored.
    pub(crate) fn stored(&self) -> KvDtype {
        self.form.stored
    }

    /// An empty layer of the same form.
    pub(crate) fn empty(&self, room: usize) -> Self {
        Self::new(self.form, room)
    }

    /// Removes all tokens from index `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        let mut before = 0;
        self.blocks.retain(|block| {
            before += block.room();
            before - block.room() < len
        });
    }

    /// Adds `tokens` tokens, whose keys and values follow.
    pub(crate) fn reserve(&mut self, tokens: usize, device: &Device) -> Result<()> {
        self.len += tokens;
        let room: usize = self.blocks.iter().map(KvBlock::room).sum();
        if self.len > room {
            // A chat can outgrow the capacity that its first turn requested: then it gets pages.
            let need = (self.len - room).next_multiple_of(PAGE);
            let need = if self.blocks.is_empty() && self.room >= self.len {
                self.room
            } else {
                need
            };
            self.blocks.push(KvBlock::new(self.form, need, device)?);
        }
        Ok(())
    }

    /// The blocks, each with the number of its tokens.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (usize, &KvBlock)> {
        let mut left = self.len;
        self.blocks.iter().map(move |block| {
            let tokens = left.min(block.room());
            left -= tokens;
            (tokens, block)
        })
    }
}
