//! The KV cache: keys and values of the tokens so far. A sequence owns the tokens that belong to it alone. Shared
//! tokens (a common prompt prefix) are in runs that several sequences read without a copy.
//!
//! On the CPU a run is pages of `PAGE` tokens, as f32, bf16 or int8. Attention always reads the stored values, so a
//! token gives the same result whether it was added together with its neighbors or after them. On a GPU see `device_cache`.
//!
//! Layers with a sliding window store every token too; attention itself reads only the window.

use super::device_cache::{DeviceForm, DeviceLayer, together};
use crate::base::{Error, Result};
use crate::model::spec::{KeySource, LayerSpec};
use crate::model::{KvStore, Spec};
use crate::ops::paged::{self, Document, Form, KvDtype, PAGE, Page};
use crate::ops::{attention, update};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// Bytes of the KV cache of one text of `tokens` tokens and of its attention, in the default storage type. `element`: on
/// a GPU the bytes of an activation.
pub fn cache_bytes(spec: &Spec, tokens: usize, element: Option<u64>) -> u64 {
    let dtype = |element| if element == 2 { DType::BF16 } else { DType::F32 };
    let layout = Layout::of(spec, None, element.map(dtype));
    layout.bytes(tokens) + layout.step_bytes(tokens)
}

/// The layout of the cache of one layer.
#[derive(Debug, Clone, Copy)]
struct LayerLayout {
    /// False if the layer reads the keys and values of another layer.
    stores: bool,
    /// W
    width: usize,
    /// Of the pages on the CPU.
    form: Form,
    /// On a GPU: the form there.
    device: Option<DeviceForm>,
}

impl LayerLayout {
    fn bytes(&self, tokens: usize) -> u64 {
        match self.device {
            _ if !self.stores => 0,
            None => tokens.div_ceil(PAGE) as u64 * self.form.page_bytes(),
            Some(form) => form.bytes(tokens, self.width),
        }
    }
}

/// The layout of the cache of a network.
#[derive(Debug, Clone)]
pub struct Layout {
    layers: Arc<[LayerLayout]>,
    /// On a GPU: the type of the activations.
    activations: Option<DType>,
}

impl Layout {
    /// `stored` defaults to f32; on a GPU to `activations`, the output type of the layers.
    pub fn new(spec: &Spec, stored: Option<KvDtype>, device: &Device, activations: DType) -> Self {
        Self::of(spec, stored, (!device.is_cpu()).then_some(activations))
    }

    fn of(spec: &Spec, stored: Option<KvDtype>, on_gpu: Option<DType>) -> Self {
        let layer = |(l, of): (usize, &LayerSpec)| {
            let heads = (spec.kv_heads_of(l), spec.head_dim_of(l));
            LayerLayout {
                stores: !matches!(of.keys, KeySource::Layer(_)),
                width: spec.kv_width(l),
                form: Form {
                    stored: stored.unwrap_or(KvDtype::F32),
                    kv_heads: heads.0,
                    head_dim: heads.1,
                },
                device: on_gpu.map(|activations| DeviceForm::new(heads, stored, activations)),
            }
        };
        Self {
            layers: spec.layers.iter().enumerate().map(layer).collect(),
            activations: on_gpu,
        }
    }

    /// Returns the bytes of a run with a capacity of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> u64 {
        self.layers.iter().map(|layer| layer.bytes(tokens)).sum()
    }

    /// Returns the bytes that attention needs in addition to the runs for a text of `tokens` tokens, shared ones
    /// included: on a GPU the keys and values of one layer are concatenated.
    pub fn step_bytes(&self, tokens: usize) -> u64 {
        let widest = self.layers.iter().map(|layer| layer.width).max().unwrap_or(0);
        self.activations
            .map_or(0, |activations| DeviceForm::Dense(activations).bytes(tokens, widest))
    }

    fn run(&self, room: usize) -> Run {
        let layer = |of: &LayerLayout| match of.device {
            None => Layer::Pages(Vec::new()),
            Some(form) => Layer::Device(form.layer(room)),
        };
        Run {
            layers: self.layers.iter().map(layer).collect(),
        }
    }
}

/// Consecutive tokens, with keys and values of every layer.
pub struct Run {
    layers: Vec<Layer>,
}

impl Run {
    /// Returns the number of tokens.
    fn len(&self) -> usize {
        match self.layers.first() {
            Some(Layer::Pages(pages)) => pages.iter().map(Page::len).sum(),
            Some(Layer::Device(layer)) => layer.len(),
            None => 0,
        }
    }
}

enum Layer {
    Pages(Vec<Page>),
    Device(DeviceLayer),
}

impl Layer {
    fn truncate(&mut self, len: usize) {
        match self {
            Layer::Device(layer) => layer.truncate(len),
            Layer::Pages(pages) => {
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
pub struct Sequence {
    /// The shared runs, from the first token on.
    shared: Vec<Arc<Run>>,
    own: Run,
    layers: Arc<[LayerLayout]>,
    /// Number of tokens, shared ones included.
    len: usize,
}

impl Sequence {
    /// Creates a sequence after the tokens of `shared` (`len` in all), with a capacity of `room` own tokens.
    pub fn new(layout: &Layout, shared: Vec<Arc<Run>>, len: usize, room: usize) -> Self {
        Self {
            shared,
            own: layout.run(room),
            layers: layout.layers.clone(),
            len,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Removes all tokens from index `len` on, but never shared ones.
    pub fn truncate(&mut self, len: usize) {
        let shared = self.len - self.own.len();
        let own = len.saturating_sub(shared);
        self.own.layers.iter_mut().for_each(|layer| layer.truncate(own));
        self.len = shared + self.own.len();
    }

    /// Returns an empty sequence of the same layout.
    pub fn empty(&self, room: usize) -> Self {
        let layer = |layer: &Layer| match layer {
            Layer::Pages(_) => Layer::Pages(Vec::new()),
            Layer::Device(layer) => Layer::Device(layer.empty(room)),
        };
        Self {
            shared: Vec::new(),
            own: Run {
                layers: self.own.layers.iter().map(layer).collect(),
            },
            layers: self.layers.clone(),
            len: 0,
        }
    }

    /// Returns all runs, for sequences that continue this text.
    pub fn freeze(self) -> Vec<Arc<Run>> {
        let mut runs = self.shared;
        runs.push(Arc::new(self.own));
        runs
    }

    fn runs(&self) -> impl Iterator<Item = &Run> {
        self.shared.iter().map(|r| &**r).chain([&self.own])
    }
}

/// One pass of new tokens through the layers.
pub struct Step<'a> {
    sequences: Vec<&'a mut Sequence>,
    /// Offsets of the sequences in the new tokens, `[sequences + 1]`.
    documents: &'a [usize],
}

impl<'a> Step<'a> {
    pub fn new(sequences: Vec<&'a mut Sequence>, documents: &'a [usize]) -> Result<Self> {
        if documents.len() != sequences.len() + 1 {
            return Err(
                Error::shape("a decoding step and its KV cache have different numbers of rows")
                    .found(documents.len().saturating_sub(1))
                    .expected(sequences.len()),
            );
        }
        Ok(Self { sequences, documents })
    }

    /// Adds the new tokens to the lengths, after all layers have processed them.
    pub fn finish(self) {
        for (sequence, d) in self.sequences.into_iter().zip(self.documents.windows(2)) {
            sequence.len += d[1] - d[0];
        }
    }

    fn push(&mut self, layer: usize, k: &Tensor, v: &Tensor, spec: &attention::Spec) -> Result<()> {
        let rows = self.sequences.iter_mut().zip(self.documents.windows(2));
        if !k.device().is_cpu() {
            for (sequence, d) in rows {
                if let Some(Layer::Device(layer)) = sequence.own.layers.get_mut(layer) {
                    let new = |t: &Tensor| t.narrow(0, d[0], d[1] - d[0]);
                    layer.push(&new(k)?, &new(v)?)?;
                }
            }
            return Ok(());
        }
        let width = k.dims2()?.1;
        update::with_slice(k, |k| {
            update::with_slice(v, |v| {
                for (sequence, d) in rows {
                    let of = sequence.layers.get(layer);
                    if let (Some(Layer::Pages(pages)), Some(of)) = (sequence.own.layers.get_mut(layer), of) {
                        for t in d[0]..d[1] {
                            if pages.last().is_none_or(Page::is_full) {
                                pages.push(Page::new(of.form));
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

    /// Attention on a GPU.
    fn on_device(&self, layer: usize, q: &Tensor, spec: &attention::Spec) -> Result<(Tensor, Tensor)> {
        let (mut layers, mut offsets) = (Vec::new(), vec![0]);
        for sequence in &self.sequences {
            let mut end = offsets[offsets.len() - 1];
            for run in sequence.runs() {
                if let Some(Layer::Device(layer)) = run.layers.get(layer) {
                    end += layer.len();
                    layers.push(layer);
                }
            }
            offsets.push(end);
        }
        let (k, v) = together(&layers, spec.kv_heads * spec.head_dim, q)?;
        attention::forward(q, &k, &v, spec, self.documents, &offsets)
    }
}

impl KvStore for Step<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        new: Option<(&Tensor, &Tensor)>,
        spec: &attention::Spec,
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
        if let Some((k, v)) = new {
            self.push(layer, k, v, spec)?;
        }
        if !q.device().is_cpu() {
            return self.on_device(layer, q, spec);
        }
        let rows = self.sequences.iter().zip(self.documents.windows(2));
        let documents: Vec<Document> = rows
            .map(|(sequence, d)| Document {
                queries: d[0]..d[1],
                pages: sequence
                    .runs()
                    .filter_map(|run| match run.layers.get(layer) {
                        Some(Layer::Pages(pages)) => Some(pages),
                        _ => None,
                    })
                    .flatten()
                    .collect(),
            })
            .collect();
        paged::attend(q, &documents, spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_gpu_a_run_is_as_wide_as_its_elements_and_a_step_puts_one_layer_together() {
        let layout = |form, activations| {
            let layer = LayerLayout {
                stores: true,
                width: 8,
                form: Form {
                    stored: KvDtype::F32,
                    kv_heads: 2,
                    head_dim: 4,
                },
                device: Some(form),
            };
            Layout {
                layers: [layer; 3].into(),
                activations: Some(activations),
            }
        };
        let wide = layout(DeviceForm::Dense(DType::F32), DType::F32);
        let narrow = layout(DeviceForm::Dense(DType::BF16), DType::BF16);
        let int8 = layout(DeviceForm::Int8(2, 4), DType::BF16);
        assert_eq!((wide.bytes(10), narrow.bytes(10)), (3 * 2 * 4 * 80, 3 * 2 * 2 * 80));
        assert_eq!((wide.step_bytes(10), narrow.step_bytes(10)), (2 * 4 * 80, 2 * 2 * 80));
        // A byte for each number, and a scale for each head.
        assert_eq!(int8.bytes(10), 3 * 2 * (80 + 10 * 2 * 4));
        assert_eq!(int8.step_bytes(10), narrow.step_bytes(10));
    }
}
