//! The KV cache: keys and values of the tokens so far. A sequence owns the tokens that belong to it alone. Shared
//! tokens (a common prompt prefix) are in runs that several sequences read without a copy.
//!
//! On the CPU a run is pages of `PAGE` tokens, as f32, bf16 or int8. Attention always reads the stored values, so a
//! token gives the same result whether it was added together with its neighbors or after them. Tokens of prompts are read in blocks, with
//! the products of training; a token of an answer reads the pages in place. On a GPU a run is blocks
//! (`device_cache`), which attention reads in place; only a step of whole new texts reads the new keys and values as they
//! are, if the cache stores the same numbers.
//!
//! Layers with a sliding window store every token too; attention itself reads only the window.
//!
//! A layer with latent attention keeps on the CPU one row for each token, which is key and value of one head: pages have it twice,
//! as keys in columns and as values in rows. Sums over latent rows have another order than those over the keys and values of all heads,
//! so a cache with `CacheLayout::expanded` keeps these.
//!
//! A layer with Gated DeltaNet or a short convolution has a state in the place of keys and values: that after the last token of the
//! run. A sequence that continues a run begins with a copy of it. A state cannot go back to an earlier token.

use super::{decode::PassKind, device_cache::DeviceLayer, device_cache::device_form};
use crate::base::{Error, Result};
use crate::model::spec::{KeySource, LayerSpec, Mixer};
use crate::model::{KvStore, RecurrentState, Spec};
use crate::model::{delta_net, short_conv};
use crate::ops::kv_block::{self, KvBlock, KvDocument, KvPart, KvStep};
use crate::ops::paged::{self, KvDtype, PAGE, Page, PageForm, PagedDocument};
use crate::ops::{CpuBackend, attention, graph, update};
use candle_core::{DType, Device, Tensor, TensorId};
use std::sync::Arc;

/// Bytes of the KV cache of one text of `tokens` tokens and of its attention, in the default storage type. `element`: on
/// a GPU the bytes of an activation.
pub fn cache_bytes(spec: &Spec, tokens: usize, element: Option<u64>) -> u64 {
    let dtype = |element| if element == 2 { DType::BF16 } else { DType::F32 };
    let layout = CacheLayout::of(spec, None, element.map(dtype), true);
    layout.bytes(tokens) + layout.step_bytes(tokens)
}

/// Bytes of the work of a decoding step of `tokens` new tokens over latent rows on the CPU, beyond that of a pass without a
/// cache: queries and outputs over the rows, and the projection with its adapter.
pub fn latent_work(spec: &Spec, tokens: usize) -> u64 {
    let layer = |of: &LayerSpec| match of.mixer {
        Mixer::Latent(sizes) => {
            let rows = 2 * tokens * spec.heads * (sizes.kv_rank + sizes.rotary);
            4 * (rows + 3 * spec.heads * (sizes.plain + sizes.value) * sizes.kv_rank) as u64
        }
        _ => 0,
    };
    spec.layers.iter().map(layer).max().unwrap_or(0)
}

/// Bytes of attention while prompts are read on the CPU, `new` tokens in a pass, of texts of up to `longest` tokens, `tokens` in
/// all: input and residual, queries and output, new keys and values, and the keys and values that are copied out of their pages.
pub fn reading_work(spec: &Spec, longest: usize, tokens: usize, new: usize) -> u64 {
    let layer = |l: usize| {
        let (heads, kv_heads, e) = match spec.layers[l].mixer {
            Mixer::DeltaNet(_) | Mixer::ShortConv { .. } => return 0,
            Mixer::Latent(sizes) => (spec.heads, 1, sizes.kv_rank + sizes.rotary),
            _ => (spec.heads, spec.kv_heads_of(l), spec.head_dim_of(l)),
        };
        let passed = 2 * new * (spec.row() + (heads + kv_heads) * e);
        4 * passed as u64 + paged::block_bytes(kv_heads, e, longest, tokens)
    };
    (0..spec.layers.len()).map(layer).max().unwrap_or(0)
}

/// The content of the cache for one layer.
#[derive(Debug, Clone, Copy)]
enum LayerLayout {
    /// Keys and values, in pages on the CPU or blocks on a GPU.
    Keys(PageForm),
    /// The layer reads the keys and values of another layer.
    Nothing,
    /// The state of a layer with Gated DeltaNet or a short convolution, of this many bytes.
    State(u64),
}

impl LayerLayout {
    fn bytes(&self, tokens: usize, on_gpu: bool) -> u64 {
        match self {
            Self::Keys(form) if on_gpu => KvBlock::bytes(*form, tokens),
            Self::Keys(form) => tokens.div_ceil(PAGE) as u64 * form.page_bytes(),
            Self::Nothing => 0,
            Self::State(bytes) => *bytes,
        }
    }

    /// The layer of an empty run.
    fn layer(&self, room: usize, on_gpu: bool) -> KvLayer {
        match self {
            Self::Keys(form) if on_gpu => KvLayer::Device(DeviceLayer::new(*form, room)),
            Self::Keys(form) => KvLayer::Pages(*form, Vec::new()),
            Self::Nothing => KvLayer::Nothing,
            Self::State(_) => KvLayer::State(None),
        }
    }
}

/// The layout of the cache of a network.
#[derive(Debug, Clone)]
pub(crate) struct CacheLayout {
    layers: Vec<LayerLayout>,
    /// H
    heads: usize,
    on_gpu: bool,
}

impl CacheLayout {
    /// `stored` defaults to f32; on a GPU to `activations`, the output type of the layers.
    pub(crate) fn new(spec: &Spec, stored: Option<KvDtype>, device: &Device, activations: DType) -> Self {
        Self::of(spec, stored, (!device.is_cpu()).then_some(activations), true)
    }

    /// As `new`, with the keys and values of all heads in the place of latent rows.
    pub(crate) fn expanded(spec: &Spec, stored: Option<KvDtype>, device: &Device, activations: DType) -> Self {
        Self::of(spec, stored, (!device.is_cpu()).then_some(activations), false)
    }

    fn of(spec: &Spec, stored: Option<KvDtype>, on_gpu: Option<DType>, latent_rows: bool) -> Self {
        let layer = |(l, of): (usize, &LayerSpec)| match (of.mixer, of.keys) {
            (Mixer::DeltaNet(sizes), _) => LayerLayout::State(delta_net::state_bytes(&sizes)),
            (Mixer::ShortConv { kernel, .. }, _) => LayerLayout::State(short_conv::state_bytes(kernel, spec.hidden)),
            (_, KeySource::Layer(_)) => LayerLayout::Nothing,
            (mixer, _) => {
                let heads = match mixer {
                    // One head has the form of a latent row: see `DecodeStep::latent_rows`.
                    Mixer::Latent(sizes) if latent_rows && on_gpu.is_none() && spec.heads > 1 => {
                        (1, sizes.kv_rank + sizes.rotary)
                    }
                    _ => (spec.kv_heads_of(l), spec.head_dim_of(l)),
                };
                LayerLayout::Keys(match on_gpu {
                    None => PageForm {
                        stored: stored.unwrap_or(KvDtype::F32),
                        kv_heads: heads.0,
                        head_dim: heads.1,
                    },
                    Some(activations) => device_form(heads, stored, activations),
                })
            }
        };
        Self {
            layers: spec.layers.iter().enumerate().map(layer).collect(),
            heads: spec.heads,
            on_gpu: on_gpu.is_some(),
        }
    }

    /// Returns the bytes of a run with a capacity of `tokens` tokens.
    pub(crate) fn bytes(&self, tokens: usize) -> u64 {
        self.layers.iter().map(|layer| layer.bytes(tokens, self.on_gpu)).sum()
    }

    /// Returns the bytes that attention needs in addition to the runs for a new token of a text of `tokens` tokens, shared
    /// ones included.
    pub(crate) fn step_bytes(&self, tokens: usize) -> u64 {
        let layer = |of: &LayerLayout| match of {
            LayerLayout::Keys(form) if self.on_gpu => kv_block::step_bytes(self.heads, form.head_dim, tokens),
            _ => 0,
        };
        self.layers.iter().map(layer).max().unwrap_or(0)
    }

    fn run(&self, room: usize) -> TokenRun {
        TokenRun {
            layers: self.layers.iter().map(|layer| layer.layer(room, self.on_gpu)).collect(),
            len: 0,
        }
    }
}

/// Consecutive tokens, with the keys and values or the state of every layer.
pub(crate) struct TokenRun {
    layers: Vec<KvLayer>,
    /// Number of tokens.
    len: usize,
}

impl TokenRun {
    /// The blocks on a GPU, of every layer.
    fn parts(&self) -> Vec<KvPart<'_>> {
        let layers: Vec<Vec<(usize, &KvBlock)>> = self
            .layers
            .iter()
            .map(|layer| match layer {
                KvLayer::Device(layer) => layer.parts().collect(),
                KvLayer::Pages(..) | KvLayer::Nothing | KvLayer::State(_) => Vec::new(),
            })
            .collect();
        let longest = layers.iter().max_by_key(|layer| layer.len());
        let tokens = longest.into_iter().flatten().map(|part| part.0);
        tokens
            .enumerate()
            .map(|(i, tokens)| KvPart {
                tokens,
                layers: layers.iter().map(|layer| layer.get(i).map(|part| part.1)).collect(),
            })
            .collect()
    }
}

enum KvLayer {
    Pages(PageForm, Vec<Page>),
    Device(DeviceLayer),
    /// The layer reads the keys and values of another layer.
    Nothing,
    /// The state after the last token of the run.
    State(Option<RecurrentState>),
}

impl KvLayer {
    fn truncate(&mut self, len: usize) {
        match self {
            KvLayer::Device(layer) => layer.truncate(len),
            KvLayer::Nothing | KvLayer::State(_) => {}
            KvLayer::Pages(_, pages) => {
                let mut left = len;
                for page in pages.iter_mut() {
                    page.truncate(left);
                    left -= page.len();
                }
                pages.retain(|page| !page.is_empty());
            }
        }
    }
}

/// The cached tokens of one text.
pub(crate) struct CachedSequence {
    /// The shared runs, from the first token on.
    shared: Vec<Arc<TokenRun>>,
    own: TokenRun,
    /// Number of tokens, shared ones included.
    len: usize,
}

impl CachedSequence {
    /// Creates a sequence after the tokens of `shared` (`len` in all), with a capacity of `room` own tokens.
    pub(crate) fn new(layout: &CacheLayout, shared: Vec<Arc<TokenRun>>, len: usize, room: usize) -> Self {
        let mut own = layout.run(room);
        if let Some(last) = shared.last() {
            for (layer, before) in own.layers.iter_mut().zip(&last.layers) {
                if let (KvLayer::State(state), KvLayer::State(before)) = (layer, before) {
                    state.clone_from(before);
                }
            }
        }
        Self { shared, own, len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// True if `truncate` can remove the tokens from index `len` on.
    pub(crate) fn can_truncate(&self, len: usize) -> bool {
        len >= self.len || !self.own.layers.iter().any(|layer| matches!(layer, KvLayer::State(_)))
    }

    /// Removes all tokens from index `len` on, but never shared ones.
    pub(crate) fn truncate(&mut self, len: usize) {
        let shared = self.len - self.own.len;
        let own = len.saturating_sub(shared).min(self.own.len);
        self.own.layers.iter_mut().for_each(|layer| layer.truncate(own));
        self.own.len = own;
        self.len = shared + own;
    }

    /// Returns an empty sequence of the same layout.
    pub(crate) fn empty(&self, room: usize) -> Self {
        let layer = |layer: &KvLayer| match layer {
            KvLayer::Pages(form, _) => KvLayer::Pages(*form, Vec::new()),
            KvLayer::Device(layer) => KvLayer::Device(layer.empty(room)),
            KvLayer::Nothing => KvLayer::Nothing,
            KvLayer::State(_) => KvLayer::State(None),
        };
        Self {
            shared: Vec::new(),
            own: TokenRun {
                layers: self.own.layers.iter().map(layer).collect(),
                len: 0,
            },
            len: 0,
        }
    }

    /// Returns all runs, for sequences that continue this text.
    pub(crate) fn freeze(self) -> Vec<Arc<TokenRun>> {
        let mut runs = self.shared;
        runs.push(Arc::new(self.own));
        runs
    }

    fn runs(&self) -> impl Iterator<Item = &TokenRun> {
        self.shared.iter().map(|r| &**r).chain([&self.own])
    }
}

/// One pass of new tokens through the layers.
pub(crate) struct DecodeStep<'a> {
    sequences: Vec<&'a mut CachedSequence>,
    /// Offsets of the sequences in the new tokens, `[sequences + 1]`.
    documents: &'a [usize],
    /// On a GPU.
    on_gpu: Option<KvStep>,
    /// The tables of the step before are written over, and no address or size has changed.
    same_tables: bool,
    /// New states are written over the old ones.
    states_in_place: bool,
    /// No sequence has tokens of an earlier step.
    fresh: bool,
    pass: PassKind,
}

/// The tables of a step on a GPU.
pub(crate) enum StepTables {
    /// For this step.
    New,
    /// For this step and later ones; those of the step before, if there was one.
    Staying(Option<Box<KvStep>>),
}

impl<'a> DecodeStep<'a> {
    pub(crate) fn new(
        mut sequences: Vec<&'a mut CachedSequence>,
        documents: &'a [usize],
        pass: PassKind,
        device: &Device,
        tables: StepTables,
    ) -> Result<Self> {
        if documents.len() != sequences.len() + 1 {
            return Err(
                Error::shape("a decoding step and its KV cache have different numbers of rows")
                    .found(documents.len().saturating_sub(1))
                    .expected(sequences.len()),
            );
        }
        let fresh = sequences.iter().all(|s| s.len == 0);
        let (on_gpu, same_tables) = if device.is_cpu() {
            (None, false)
        } else {
            let (step, same) = Self::reserve(&mut sequences, documents, device, tables)?;
            (Some(step), same)
        };
        Ok(Self {
            sequences,
            documents,
            on_gpu,
            same_tables,
            states_in_place: false,
            fresh,
            pass,
        })
    }

    /// True if what was captured in the step before can be launched for this one.
    pub(crate) fn has_same_tables(&self) -> bool {
        self.same_tables
    }

    /// The tensors of the states of all layers of the first `rows` sequences (padding follows them). Those of an answer belong to
    /// its text alone after a step.
    pub(crate) fn states_now(&self, rows: usize) -> Vec<TensorId> {
        let layers = self.sequences.iter().take(rows).flat_map(|s| &s.own.layers);
        let states = layers.filter_map(|layer| match layer {
            KvLayer::State(Some(state)) => Some([Some(&state.inputs), state.state.as_ref()]),
            _ => None,
        });
        states.flatten().flatten().map(Tensor::id).collect()
    }

    /// From now on new states are written over the old ones, which keep their addresses.
    pub(crate) fn keep_states_in_place(&mut self, in_place: bool) {
        self.states_in_place = in_place;
    }

    /// Makes room for the new tokens on a GPU. Returns the tables, and whether they are the same memory as before.
    fn reserve(
        sequences: &mut [&mut CachedSequence],
        documents: &[usize],
        device: &Device,
        tables: StepTables,
    ) -> Result<(KvStep, bool)> {
        for (sequence, d) in sequences.iter_mut().zip(documents.windows(2)) {
            for layer in &mut sequence.own.layers {
                if let KvLayer::Device(layer) = layer {
                    layer.reserve(d[1] - d[0], device)?;
                }
            }
        }
        let texts: Vec<KvDocument> = sequences
            .iter()
            .zip(documents.windows(2))
            .map(|(sequence, d)| KvDocument {
                queries: d[0]..d[1],
                parts: sequence.runs().flat_map(TokenRun::parts).collect(),
            })
            .collect();
        match tables {
            StepTables::New => Ok((KvStep::new(&texts, device)?, false)),
            StepTables::Staying(None) => Ok((KvStep::staying(&texts, device)?, false)),
            StepTables::Staying(Some(mut step)) => {
                let same = step.renew(&texts)?;
                Ok((*step, same))
            }
        }
    }

    /// Adds the new tokens to the lengths, after all layers have processed them. Returns the tables, without the memory of the
    /// texts.
    pub(crate) fn finish(mut self) -> Option<KvStep> {
        if let Some(step) = &mut self.on_gpu {
            step.release_blocks();
        }
        for (sequence, d) in self.sequences.into_iter().zip(self.documents.windows(2)) {
            sequence.len += d[1] - d[0];
            sequence.own.len += d[1] - d[0];
        }
        self.on_gpu
    }

    /// True for prompts whose stored keys and values are operands of products as they are. The sums of `Portable` have an order
    /// that depends on the sizes of a product.
    fn reads_in_blocks(&self, layer: usize) -> bool {
        let exact = |s: &&mut CachedSequence| match &s.own.layers[layer] {
            KvLayer::Pages(form, _) => form.stored != KvDtype::Int8,
            _ => false,
        };
        self.pass == PassKind::Prompt
            && CpuBackend::current() != CpuBackend::Portable
            && self.sequences.iter().all(exact)
    }

    fn push(&mut self, layer: usize, k: &Tensor, v: &Tensor, spec: &attention::AttentionSpec) -> Result<()> {
        let rows = self.sequences.iter_mut().zip(self.documents.windows(2));
        let width = k.dims2()?.1;
        update::with_slice(k, |k| {
            update::with_slice(v, |v| {
                for (sequence, d) in rows {
                    if let Some(KvLayer::Pages(form, pages)) = sequence.own.layers.get_mut(layer) {
                        for t in d[0]..d[1] {
                            if pages.last().is_none_or(Page::is_full) {
                                pages.push(Page::new(*form));
                            }
                            if let Some(page) = pages.last_mut() {
                                page.push(&k[t * width..][..width], &v[t * width..][..width], spec);
                            }
                        }
                    }
                }
            })
        })?
    }
}

impl KvStore for DecodeStep<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        new: Option<(&Tensor, &Tensor)>,
        spec: &attention::AttentionSpec,
    ) -> Result<(Tensor, Tensor)> {
        let want = [
            self.documents.last().copied().unwrap_or(0),
            spec.kv_heads * spec.head_dim,
        ];
        for t in new.into_iter().flat_map(|(k, v)| [k, v]) {
            if t.dims() != want {
                return Err(Error::shape("keys or values of a decoding step have the wrong shape")
                    .found(format!("{:?}", t.dims()))
                    .expected(format!("{want:?}")));
            }
        }
        if self.sequences.iter().any(|s| layer >= s.own.layers.len()) {
            return Err(Error::shape("the KV cache does not have this layer").found(layer));
        }
        if let Some(step) = &self.on_gpu {
            if let Some((k, v)) = new {
                step.put(layer, k, v)?;
                // The cache reads back what it was given, unless it rounds.
                let same = |s: &&mut CachedSequence| match &s.own.layers[layer] {
                    KvLayer::Device(layer) => match layer.stored() {
                        KvDtype::F32 => k.dtype() == DType::F32,
                        KvDtype::Bf16 => matches!(k.dtype(), DType::BF16 | DType::F16),
                        KvDtype::Int8 => false,
                    },
                    KvLayer::Pages(..) | KvLayer::Nothing | KvLayer::State(_) => false,
                };
                if self.fresh && self.sequences.iter().all(same) {
                    return attention::forward(q, k, v, spec, self.documents, self.documents);
                }
            }
            return step.attend(layer, q, spec);
        }
        if let Some((k, v)) = new {
            self.push(layer, k, v, spec)?;
        }
        let rows = self.sequences.iter().zip(self.documents.windows(2));
        let documents: Vec<PagedDocument> = rows
            .map(|(sequence, d)| PagedDocument {
                queries: d[0]..d[1],
                pages: sequence
                    .runs()
                    .filter_map(|run| match run.layers.get(layer) {
                        Some(KvLayer::Pages(_, pages)) => Some(pages),
                        _ => None,
                    })
                    .flatten()
                    .collect(),
            })
            .collect();
        if self.reads_in_blocks(layer) {
            paged::attend_in_blocks(q, &documents, spec)
        } else {
            paged::attend(q, &documents, spec)
        }
    }

    fn latent_rows(&self, layer: usize) -> bool {
        let of_one_head = |s: &&mut CachedSequence| {
            let own = s.own.layers.get(layer);
            matches!(own, Some(KvLayer::Pages(form, _)) if form.kv_heads == 1)
        };
        self.sequences.iter().all(of_one_head)
    }

    fn states(&mut self, layer: usize) -> Result<Vec<Option<RecurrentState>>> {
        let state = |s: &&mut CachedSequence| match s.own.layers.get(layer) {
            Some(KvLayer::State(state)) => Ok(state.clone()),
            _ => Err(Error::shape("the cache has no state of this layer").found(layer)),
        };
        self.sequences.iter().map(state).collect()
    }

    fn set_states(&mut self, layer: usize, states: Vec<RecurrentState>) -> Result<()> {
        for (sequence, state) in self.sequences.iter_mut().zip(states) {
            match sequence.own.layers.get_mut(layer) {
                Some(KvLayer::State(Some(own))) if self.states_in_place => {
                    graph::overwrite(&own.inputs, &state.inputs)?;
                    if let (Some(own), Some(state)) = (&own.state, &state.state) {
                        graph::overwrite(own, state)?;
                    }
                }
                // A row of padding has no earlier tokens.
                Some(KvLayer::State(None)) if self.states_in_place => {}
                Some(KvLayer::State(own)) => *own = Some(state),
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_gpu_a_run_is_as_wide_as_its_elements_and_a_step_has_partial_results() {
        let layout = |stored| {
            let layer = LayerLayout::Keys(PageForm {
                stored,
                kv_heads: 2,
                head_dim: 4,
            });
            CacheLayout {
                layers: vec![layer; 3],
                heads: 6,
                on_gpu: true,
            }
        };
        let (wide, narrow) = (layout(KvDtype::F32), layout(KvDtype::Bf16));
        let int8 = layout(KvDtype::Int8);
        assert_eq!((wide.bytes(10), narrow.bytes(10)), (3 * 2 * 4 * 80, 3 * 2 * 2 * 80));
        // A byte for each number, and a scale for each head.
        assert_eq!(int8.bytes(10), 3 * 2 * (80 + 10 * 2 * 4));
        // o and lse of each head, of room for eight pieces and for 16: there are two and ten.
        assert_eq!((wide.step_bytes(10), int8.step_bytes(10)), (8 * 6 * 20, 8 * 6 * 20));
        assert_eq!(narrow.step_bytes(2200), 16 * 6 * 20);
    }

    #[test]
    fn a_state_has_one_size_and_a_layer_with_the_keys_of_another_has_none() {
        let form = PageForm {
            stored: KvDtype::F32,
            kv_heads: 2,
            head_dim: 4,
        };
        let keys = LayerLayout::Keys(form);
        let layout = |layers: &[LayerLayout]| CacheLayout {
            layers: layers.to_vec(),
            heads: 6,
            on_gpu: false,
        };
        let all = layout(&[keys, LayerLayout::Nothing, LayerLayout::State(100), keys]);
        for tokens in [1, 10, 1000] {
            assert_eq!(all.bytes(tokens), layout(&[keys, keys]).bytes(tokens) + 100);
        }
    }
}
