//! A copy of a network for decoding with quantized projections, while the trained weights stay exact. It shares
//! everything else (embedding, norms, biases, adapters) with the original network. Its outputs differ from those of
//! the exact weights: `Answer::log_probs` are those of the copy, and a loss also computes those of the exact weights.

use super::decode::SampledModel;
use crate::base::{Result, progress};
use crate::model::Network;
use crate::ops::Dtype;
use crate::ops::{linear, update};
use crate::quant::{self, Format, Weight};
use crate::source::policy::is_projection;
use crate::source::{Group, GroupWeights, InMemoryWeights, ParamInfo, WeightSource};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// See the module.
pub struct QuantizedCopy {
    network: Network,
    /// The source of `network`.
    weights: Arc<InMemoryWeights>,
    head: Option<Weight>,
    formats: CopyFormats,
}

/// The quantization formats of the copy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CopyFormats {
    /// For the matrices of the decoder layers that are not already quantized.
    pub projections: Format,
    /// For the output projection; `None`: unchanged. If it is tied, the embedding stays exact.
    pub head: Option<Format>,
}

impl CopyFormats {
    /// Uses int8 (one scale per row), int4 (groups of 64) or nf4 for the projections; int8 for the head.
    pub fn of(projections: Format) -> Self {
        Self {
            projections,
            head: Some(Format::Int8 { group: 0 }),
        }
    }
}

impl QuantizedCopy {
    /// Quantizes the current weights.
    ///
    /// # Errors
    /// Weights that are not finite.
    pub fn new(of: &Network, formats: CopyFormats) -> Result<Self> {
        let weights = Arc::new(InMemoryWeights::over(of.source.clone()));
        let mut network = Network::new((*of.spec).clone(), weights.clone(), of.device.clone());
        network.spec = of.spec.clone();
        let mut copy = Self {
            network,
            weights,
            head: None,
            formats,
        };
        copy.refresh(of, &|_| true)?;
        Ok(copy)
    }

    /// Requantizes the parameters for which `changed` returns true, from the current weights of `of`, and takes its
    /// adapters.
    ///
    /// # Errors
    /// Weights that are not finite.
    pub fn refresh(&mut self, of: &Network, changed: &dyn Fn(&str) -> bool) -> Result<()> {
        self.network.adapters = of.adapters.clone();
        let params = of.source.params();
        // With a head that is streamed in pieces, the embedding is read row by row too.
        let streams = of.source.streamed(of.spec.head_name()).is_some();
        let stays_below = |p: &ParamInfo| {
            let head = &*p.name == of.spec.head_name();
            p.group == Group::Table
                || streams && (head || p.group == Group::Embedding && of.source.in_memory(&p.name).is_none())
        };
        if streams {
            self.head = None;
        }
        let mut kinds: Vec<Group> = params.iter().map(|p| p.group).collect();
        kinds.dedup();
        let phase = progress::phase("quantizing weights", kinds.len(), "layers");
        for group in kinds {
            phase.add(1);
            if group == Group::Table {
                continue;
            }
            let known = self.weights.fetch(group).ok();
            let own = || params.iter().filter(|p| p.group == group && !stays_below(p));
            let complete = known.as_ref().is_some_and(|k| k.iter().count() == own().count());
            if complete && !own().any(|p| changed(&p.name)) {
                continue;
            }
            let weights = of.source.fetch(group)?;
            let mut out = GroupWeights::default();
            for p in own() {
                let (name, weight) = weights.weight(&p.name)?;
                let old = known.as_ref().filter(|_| !changed(&p.name));
                let old = old.and_then(|group| group.weight(&p.name).ok());
                let stored = match (weight.dense(), old) {
                    (_, Some((_, old))) => old,
                    (Ok(tensor), _) if is_projection(p) => {
                        quantize(tensor, self.formats.projections).map_err(|e| e.or_at(&*p.name))?
                    }
                    // A tensor of the host that the source does not keep is copied: its buffer will be reused.
                    (Ok(tensor), _) if of.device.is_cpu() && of.source.in_memory(&p.name).is_none() => {
                        tensor.copy()?.into()
                    }
                    _ => weight,
                };
                out.insert(name, stored);
            }
            if let Some((_, tensor)) = out.get(of.spec.head_name()).ok()
                && let Some(format) = self.formats.head
                && (self.head.is_none() || changed(of.spec.head_name()))
            {
                self.head = Some(quantize(&tensor, format).map_err(|e| e.or_at(of.spec.head_name()))?);
            }
            self.weights.set(group, out);
        }
        Ok(())
    }

    /// Returns the bytes of the quantized weights: the memory of the copy in addition to the exact weights.
    pub fn bytes(&self) -> u64 {
        let quantized = |w: &Weight| if w.format().is_some() { w.bytes() } else { 0 };
        self.weights.sum(quantized) + self.head.as_ref().map_or(0, Weight::bytes)
    }

    /// True if products with a few rows may round them, for a weight of the copy.
    fn rounds_rows(&self) -> bool {
        self.head.as_ref().is_some_and(Weight::rounds_rows) || self.weights.any(Weight::rounds_rows)
    }
}

impl<'a> From<&'a QuantizedCopy> for SampledModel<'a> {
    fn from(copy: &'a QuantizedCopy) -> Self {
        Self {
            network: &copy.network,
            head: copy.head.as_ref(),
            many_rows: if copy.rounds_rows() {
                linear::many_rounded_rows()
            } else {
                linear::MANY_ROWS
            },
        }
    }
}

/// Quantizes on the host; the result is on the device of `tensor`.
fn quantize(tensor: &Tensor, format: Format) -> Result<Weight> {
    let (dims, host) = (tensor.dims2()?, tensor.to_device(&Device::Cpu)?);
    let quantized = match tensor.dtype() {
        // Products may round the rows for these (`with_rounded_rows`).
        DType::BF16 => update::with_bf16(&host, |v| quant::quantize(v, dims, format, Dtype::Bf16))?
            .map(quant::QMatrix::with_rounded_rows),
        _ => update::with_slice(&host, |v| quant::quantize(v, dims, format, Dtype::F32))?,
    };
    Weight::quantized_on(quantized?, tensor.device())
}
