//! The KV cache: keys and values of the tokens so far. A sequence owns the tokens that belong to it alone. Shared
//! tokens (a common prompt prefix) are in runs that several sequences read without a copy.
//!
//! On the CPU a run is pages of `PAGE` tokens, as f32, bf16 or int8. Attention always reads the stored values, so a
//! token gives the same result whether it was added together with its neighbors or after them. On a GPU a run is
//! one buffer in the type of the activations, and the runs of all rows are concatenated for every step.
//!
//! Layers with a sliding window store every token too; attention itself reads only the window.

use crate::base::{Error, Result};
use crate::model::{KvStore, Spec};
use crate::ops::paged::{self, Document, Form, KvDtype, PAGE, Page};
use crate::ops::{attention, update};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

fn form(spec: &Spec, stored: Option<KvDtype>) -> Form {
    Form {
        stored: stored.unwrap_or(KvDtype::F32),
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
    }
}

/// Bytes of the KV cache of one text of `tokens` tokens and of its attention, in the default storage type. `element`: on
/// a GPU the bytes of an activation.
pub fn cache_bytes(spec: &Spec, tokens: usize, element: Option<u64>) -> u64 {
    let layout = match element {
        Some(element) => Layout::of(spec, None, element as usize),
        None => Layout::of(spec, Some(form(spec, None)), 0),
    };
    layout.bytes(tokens) + layout.step_bytes(tokens)
}

/// The layout of the cache of a network.
#[derive(Debug, Clone)]
pub struct Layout {
    layers: usize,
    /// W
    width: usize,
    /// `None`: tensors on a GPU.
    form: Option<Form>,
    /// On a GPU: bytes of an element.
    element: usize,
}

impl Layout {
    /// `stored` defaults to f32; on a GPU the storage type is `activations`, the output type of the layers.
    ///
    /// # Errors
    /// A type that is not supported on this device.
    pub fn new(spec: &Spec, stored: Option<KvDtype>, device: &Device, activations: DType) -> Result<Self> {
        let form = match (device.is_cpu(), stored) {
            (true, stored) => Some(form(spec, stored)),
            (false, None) => None,
            (false, Some(_)) => {
                return Err(
                    Error::unsupported("on a GPU the KV cache always has the dtype of the activations")
                        .hint("leave out `Limits::kv_cache`"),
                );
            }
        };
        Ok(Self::of(spec, form, activations.size_in_bytes()))
    }

    fn of(spec: &Spec, form: Option<Form>, element: usize) -> Self {
        Self {
            layers: spec.layers.len(),
            width: spec.kv_width(),
            form,
            element,
        }
    }

    /// Returns the bytes of a run with a capacity of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> u64 {
        let layer = match &self.form {
            Some(form) => tokens.div_ceil(PAGE) as u64 * form.page_bytes(),
            None => (2 * self.element * tokens * self.width) as u64,
        };
        self.layers as u64 * layer
    }

    /// Returns the bytes that attention needs in addition to the runs for a text of `tokens` tokens, shared ones
    /// included: on a GPU the keys and values of one layer are concatenated.
    pub fn step_bytes(&self, tokens: usize) -> u64 {
        match &self.form {
            Some(_) => 0,
            None => (2 * self.element * tokens * self.width) as u64,
        }
    }

    fn run(&self, room: usize) -> Run {
        let layer = || match self.form {
            Some(_) => Layer::Pages(Vec::new()),
            None => Layer::Whole(Whole { room, kv: None, len: 0 }),
        };
        Run {
            layers: (0..self.layers).map(|_| layer()).collect(),
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
            Some(Layer::Whole(whole)) => whole.len,
            None => 0,
        }
    }
}

enum Layer {
    Pages(Vec<Page>),
    Whole(Whole),
}

impl Layer {
    fn truncate(&mut self, len: usize) {
        match self {
            Layer::Whole(whole) => whole.len = whole.len.min(len),
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

/// Keys and values `[room, W]`; the first `len` tokens are filled.
struct Whole {
    room: usize,
    kv: Option<(Tensor, Tensor)>,
    len: usize,
}

impl Whole {
    fn push(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let (tokens, width) = k.dims2()?;
        let need = self.len + tokens;
        if self.kv.is_none() || need > self.room {
            // Grows in units of a page: a chat can outgrow the capacity that its first turn requested.
            self.room = self.room.max(need.next_multiple_of(PAGE));
            let room = || update::zeros((self.room, width), k.dtype(), k.device());
            let new = (room()?, room()?);
            if let Some((k, v)) = self.views()?.filter(|_| self.len > 0) {
                new.0.slice_set(&k, 0, 0)?;
                new.1.slice_set(&v, 0, 0)?;
            }
            self.kv = Some(new);
        }
        if let Some((keys, values)) = &self.kv {
            keys.slice_set(k, 0, self.len)?;
            values.slice_set(v, 0, self.len)?;
        }
        self.len += tokens;
        Ok(())
    }

    fn views(&self) -> Result<Option<(Tensor, Tensor)>> {
        match &self.kv {
            Some((k, v)) => Ok(Some((k.narrow(0, 0, self.len)?, v.narrow(0, 0, self.len)?))),
            None => Ok(None),
        }
    }
}

/// The cached tokens of one text.
pub struct Sequence {
    /// The shared runs, from the first token on.
    shared: Vec<Arc<Run>>,
    own: Run,
    form: Option<Form>,
    /// Number of tokens, shared ones included.
    len: usize,
}

impl Sequence {
    /// Creates a sequence after the tokens of `shared` (`len` in all), with a capacity of `room` own tokens.
    pub fn new(layout: &Layout, shared: Vec<Arc<Run>>, len: usize, room: usize) -> Self {
        Self {
            shared,
            own: layout.run(room),
            form: layout.form,
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
            Layer::Whole(_) => Layer::Whole(Whole { room, kv: None, len: 0 }),
        };
        Self {
            shared: Vec::new(),
            own: Run {
                layers: self.own.layers.iter().map(layer).collect(),
            },
            form: self.form,
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
                if let Some(Layer::Whole(whole)) = sequence.own.layers.get_mut(layer) {
                    let new = |t: &Tensor| t.narrow(0, d[0], d[1] - d[0]);
                    whole.push(&new(k)?, &new(v)?)?;
                }
            }
            return Ok(());
        }
        let width = k.dims2()?.1;
        crate::ops::update::with_slice(k, |k| {
            crate::ops::update::with_slice(v, |v| {
                for (sequence, d) in rows {
                    if let (Some(form), Some(Layer::Pages(pages))) = (sequence.form, sequence.own.layers.get_mut(layer))
                    {
                        for t in d[0]..d[1] {
                            if pages.last().is_none_or(Page::is_full) {
                                pages.push(Page::new(form));
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

    fn whole(&self, layer: usize, q: &Tensor, spec: &attention::Spec) -> Result<(Tensor, Tensor)> {
        let (mut keys, mut values, mut offsets) = (Vec::new(), Vec::new(), vec![0]);
        for sequence in &self.sequences {
            let mut end = offsets[offsets.len() - 1];
            for run in sequence.runs() {
                if let Some(Layer::Whole(whole)) = run.layers.get(layer)
                    && let Some((k, v)) = whole.views()?
                {
                    keys.push(k);
                    values.push(v);
                    end += whole.len;
                }
            }
            offsets.push(end);
        }
        let (k, v) = (Tensor::cat(&keys, 0)?, Tensor::cat(&values, 0)?);
        attention::forward(q, &k, &v, spec, self.documents, &offsets)
    }
}

impl KvStore for Step<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        spec: &attention::Spec,
    ) -> Result<(Tensor, Tensor)> {
        let want = [
            self.documents.last().copied().unwrap_or(0),
            spec.kv_heads * spec.head_dim,
        ];
        for t in [k, v] {
            if t.dims() != want {
                return Err(Error::shape("keys or values of a decoding step have the wrong shape")
                    .found(format!("{:?}", t.dims()))
                    .expected(format!("{want:?}")));
            }
        }
        if self.sequences.iter().any(|s| layer >= s.own.layers.len()) {
            return Err(Error::shape("the KV cache does not have this layer").found(layer));
        }
        self.push(layer, k, v, spec)?;
        if !q.device().is_cpu() {
            return self.whole(layer, q, spec);
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
        let layout = |element| Layout {
            layers: 3,
            width: 8,
            form: None,
            element,
        };
        let (wide, narrow) = (layout(4), layout(2));
        assert_eq!((wide.bytes(10), narrow.bytes(10)), (3 * 2 * 4 * 80, 3 * 2 * 2 * 80));
        assert_eq!((wide.step_bytes(10), narrow.step_bytes(10)), (2 * 4 * 80, 2 * 2 * 80));
    }
}
