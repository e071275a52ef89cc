//! Memory and bytes of ranks that share the tokens of a micro-batch.

use super::{SequenceConfig, Tokens, common, share};
use crate::base::ledger::MemoryKind::LayerWork;
use crate::base::ledger::{Allocation, Ledger};
use crate::model::block::memory::LayerMemory;
use crate::model::spec::{Mixer, Spec};
use crate::ops::attention::{self, AttentionSpec as Heads};

/// The sizes of the attention of layer `index`. Fields that no size depends on (`scale`, `softcap`, `bf16`) have
/// placeholder values.
fn heads(spec: &Spec, index: usize) -> Heads {
    Heads {
        heads: spec.heads,
        kv_heads: spec.kv_heads_of(index),
        head_dim: spec.head_dim_of(index),
        scale: 1.0,
        softcap: None,
        window: spec.layers[index].window,
        bf16: false,
    }
}

/// Numbers that rank `index` sends around the attention of a layer: in the forward and in the backward pass.
fn sent(config: SequenceConfig, tokens: &Tokens, spec: &Heads, index: usize) -> [usize; 2] {
    let own = tokens.of(index);
    let others = (0..config.ranks).filter(|rank| *rank != index);
    if !config.by_heads(spec.heads) {
        let width = 2 * spec.kv_heads * spec.head_dim;
        let read = tokens.keys_of(index, spec);
        let keys = |rank| width * common(&own, &tokens.keys_of(rank, spec), 0).len();
        let gradients = |rank| width * common(&tokens.of(rank), &read, 0).len();
        let forward: usize = others.clone().map(keys).sum();
        return [forward, forward + others.map(gradients).sum::<usize>()];
    }
    let mine = share(spec, index, config.ranks);
    let (queries, e) = (mine.queries.len(), spec.head_dim);
    others.fold([0, 0], |[forward, backward], rank| {
        let keys = 2 * e * share(spec, rank, config.ranks).keys.len();
        let theirs = tokens.of(rank).len();
        [
            forward + own.len() * (queries * e + keys) + theirs * queries * (e + 1),
            backward + own.len() * (queries * (3 * e + 1) + keys) + theirs * (queries * e + 2 * e * mine.keys.len()),
        ]
    })
}

/// As `sent`, around a convolution over `taps` tokens.
fn sent_rows(config: SequenceConfig, tokens: &Tokens, taps: usize, width: usize, index: usize) -> [usize; 2] {
    let (own, read) = (tokens.of(index), tokens.inputs_of(index, taps));
    let others = (0..config.ranks).filter(|rank| *rank != index);
    let given = |rank| width * common(&own, &tokens.inputs_of(rank, taps), 0).len();
    let taken = |rank| width * common(&tokens.of(rank), &read, 0).len();
    let forward: usize = others.clone().map(given).sum();
    // The backward pass computes the convolution again, then its gradients from the same rows.
    [forward, 2 * forward + others.map(taken).sum::<usize>()]
}

/// Bytes that rank `rank` sends around the attention and the convolutions of all layers for a micro-batch with these document offsets. The backward
/// pass goes down to layer `lowest` and recomputes all but the `saved` uppermost layers.
pub fn sequence_bytes(
    spec: &Spec,
    config: SequenceConfig,
    documents: &[usize],
    lowest: usize,
    saved: usize,
    rank: usize,
) -> u64 {
    if config.ranks < 2 {
        return 0;
    }
    let tokens = Tokens::new(documents.last().copied().unwrap_or(0), config.ranks, documents);
    let of_layer = |index: usize| {
        let [forward, backward] = match spec.layers[index].mixer {
            Mixer::ShortConv { kernel, .. } => sent_rows(config, &tokens, kernel, spec.hidden, rank % config.ranks),
            _ => sent(config, &tokens, &heads(spec, index), rank % config.ranks),
        };
        let again = index >= lowest && index + saved < spec.layers.len();
        4 * (forward * (1 + usize::from(again)) + if index >= lowest { backward } else { 0 }) as u64
    };
    (0..spec.layers.len()).map(of_layer).sum()
}

impl LayerMemory<'_> {
    /// Counts the memory of the exchange around attention in the forward pass: the lists that this rank sends and
    /// receives, and the tensors that are made from them. q, k and v of the rank's own tokens are counted elsewhere.
    pub(in crate::model) fn attend(&self, l: &mut Ledger) {
        let (config, bytes) = (self.settings.sequence, self.lists());
        if config.ranks > 1 {
            // Keys and values of all tokens, or queries, keys and values of the rank's own heads: as received, and
            // joined. From a GPU they go through host memory.
            let beside = if self.settings.on_gpu {
                self.nq + self.lse
            } else {
                bytes[0]
            };
            l.touch(LayerWork, bytes[0] + beside);
        }
    }

    /// Counts the memory of the exchange before a convolution in the forward pass: the lists of rows that this rank
    /// sends and receives, and the joined rows of this rank and of earlier ones.
    pub(in crate::model) fn with_earlier(&self, l: &mut Ledger) {
        if self.settings.sequence.ranks > 1 {
            l.touch(LayerWork, 2 * self.nd);
        }
    }

    /// The same in the backward pass: the joined rows, and the gradients of their outputs and inputs.
    pub(in crate::model) fn with_earlier_backward(&self, l: &mut Ledger) {
        if self.settings.sequence.ranks > 1 {
            l.touch(LayerWork, 3 * self.nd);
        }
    }

    /// dq, dk and dv, as `Context::attend_backward` computes them.
    pub(in crate::model) fn attend_backward(&self, l: &mut Ledger) -> [Allocation; 3] {
        let config = self.settings.sequence;
        if config.ranks == 1 {
            return self.attention_gradients(l);
        }
        let spec = heads(self.settings.spec, self.index);
        let documents = self.settings.documents.max(1);
        let [_, bytes] = self.lists();
        if self.settings.on_gpu {
            // The exchanged tensors are in host memory. dk and dv of all tokens, and their partial sums in f32.
            let (share, tokens) = (share(&spec, 0, config.ranks), self.settings.tokens * config.ranks);
            let parts = attention::gpu_backward_parts(share.spec.heads, share.spec.kv_heads, tokens);
            let partial = if self.settings.element == 2 && parts > 1 {
                parts
            } else {
                0
            };
            let partial = 2 * 4 * partial * tokens * share.spec.kv_heads * spec.head_dim;
            l.touch(LayerWork, bytes + self.nq + self.key_bytes() + partial as u64);
            return [self.nq, self.nkv, self.nkv].map(|bytes| l.alloc(LayerWork, bytes));
        }
        let parts = if config.by_heads(spec.heads) {
            let share = share(&spec, 0, config.ranks);
            attention::backward_parts(share.spec.heads, share.spec.kv_heads, documents)
        } else {
            attention::backward_parts(spec.heads, spec.kv_heads, documents)
        };
        // Partial sums of dk and dv, and the sum of one of them.
        let keys = self.key_bytes();
        let sums = keys * parts as u64 + if parts > 1 { keys / 2 } else { 0 };
        l.touch(LayerWork, (2 * bytes).max(bytes + self.nq + sums));
        [self.nq, self.nkv, self.nkv].map(|bytes| l.alloc(LayerWork, bytes))
    }

    /// Bytes of keys and values that a rank has at the same time.
    fn key_bytes(&self) -> u64 {
        let (config, spec) = (self.settings.sequence, heads(self.settings.spec, self.index));
        if config.by_heads(spec.heads) {
            let share = share(&spec, 0, config.ranks);
            self.nkv / spec.kv_heads as u64 * 2 * (config.ranks * share.keys.len()) as u64
        } else {
            2 * self.nkv * config.ranks as u64
        }
    }

    /// Bytes of the lists of the forward and of the backward pass.
    fn lists(&self) -> [u64; 2] {
        let keys = self.key_bytes();
        if self.settings.sequence.by_heads(self.settings.spec.heads) {
            [self.nq + keys, 3 * self.nq + self.lse + keys]
        } else {
            [keys, keys]
        }
    }
}
