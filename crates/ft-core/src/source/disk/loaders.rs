//! The loaders of the double buffers of the disk source: parts of layers, and pieces of the output projection.

use super::ReaderState;
use super::pool::{ItemLoader, SlotBuffers};
use crate::base::{Error, Result};
use crate::quant::Weight;
use crate::source::GroupWeights;
use crate::source::experts::LayerPart;
use std::sync::Arc;

/// Loads layers without experts, or experts: parameters that are not in memory are read into the buffers, in their order.
pub(super) struct PartLoader(pub Arc<ReaderState>);

impl ItemLoader for PartLoader {
    type Key = LayerPart;

    fn prepare(&self, part: LayerPart, buffers: &mut SlotBuffers) -> Result<()> {
        let in_memory = self.0.in_memory().clone();
        for (i, p) in self.0.part(part)?.enumerate() {
            let fits = buffers.get(&i).is_some_and(|t| t.dims() == p.shape);
            let needs = !in_memory.contains_key(&p.name) && !self.0.quantized.contains_key(&p.name);
            if !fits && needs {
                buffers.insert(i, self.0.zeros(&p.shape)?);
            }
        }
        Ok(())
    }

    /// Reads the weights of a part into `buffers`.
    fn fill(&self, part: LayerPart, buffers: &SlotBuffers) -> Result<GroupWeights> {
        let in_memory = self.0.in_memory().clone();
        let mut weights = GroupWeights::default();
        let mut read = 0;
        for (i, p) in self.0.part(part)?.enumerate() {
            let weight: Weight = match (in_memory.get(&p.name), self.0.quantized.get(&p.name), buffers.get(&i)) {
                (Some(tensor), ..) => tensor.clone().into(),
                // Quantized weights are read into new memory: they are never updated in place.
                (None, Some(format), _) => self.0.files.quantized(p, *format)?.into(),
                (None, None, Some(buffer)) => {
                    self.0.files.fill(&p.name, 0, buffer)?;
                    buffer.clone().into()
                }
                (None, None, None) => return Err(Error::new("no buffer is allocated for a weight").at(&*p.name)),
            };
            if !in_memory.contains_key(&p.name) {
                read += weight.bytes();
            }
            weights.insert(p.name.clone(), weight);
        }
        if matches!(part, LayerPart::Expert(..)) {
            self.0.expected.count(read);
        }
        Ok(weights)
    }
}

/// Loads rows of the head, starting at the row given by the key.
pub(super) struct HeadRows {
    pub shared: Arc<ReaderState>,
    pub name: Arc<str>,
    pub rows: usize,
}

impl ItemLoader for HeadRows {
    type Key = usize;

    fn prepare(&self, _: usize, buffers: &mut SlotBuffers) -> Result<()> {
        if buffers.is_empty() {
            let param = self.shared.param(&self.name)?;
            let shape = [self.rows.min(param.shape[0]), param.elements() / param.shape[0].max(1)];
            buffers.insert(0, self.shared.zeros(&shape)?);
        }
        Ok(())
    }

    fn fill(&self, first: usize, buffers: &SlotBuffers) -> Result<GroupWeights> {
        let all = self.shared.param(&self.name)?.shape[0];
        let mut weights = GroupWeights::default();
        for buffer in buffers.values() {
            let width = buffer.elem_count() / buffer.dims()[0].max(1);
            let count = buffer.dims()[0].min(all.saturating_sub(first));
            let rows = buffer.narrow(0, 0, count)?;
            self.shared.files.fill(&self.name, first * width, &rows)?;
            weights.insert(self.name.clone(), rows);
        }
        Ok(weights)
    }
}
