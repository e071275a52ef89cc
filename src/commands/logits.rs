//! Measures the effect of merging: the largest difference between the logits of the base with its adapters and the
//! logits of the merged weights as they are stored. For a reward model it compares scores. Holds one layer's weights at
//! a time.

use crate::base::rng::{Rng, Stream};
use crate::base::{Result, progress};
use crate::formats::config::Config;
use crate::formats::weights::Weights;
use crate::hf::{self, WeightedAdapter};
use crate::model::{Adapters, Network, Spec, families};
use crate::ops::{linear, update};
use crate::setup::vocabulary::NewRows;
use crate::source::{Group, GroupWeights, ParamInfo, StreamedMatrix, WeightSource};
use candle_core::{Device, Tensor};
use std::path::Path;
use std::sync::Arc;

/// Number of random token ids that are compared; random ids work for any model.
const TOKENS: usize = 48;

/// Reads a group as f32 each time it is fetched, and merges `folded` into it. Other adapters run beside it.
struct MergingSource {
    weights: Weights,
    params: Vec<ParamInfo>,
    folded: Vec<WeightedAdapter>,
}

impl MergingSource {
    /// The parameters for which `of` is true.
    fn read(&self, of: impl Fn(&ParamInfo) -> bool) -> Result<Arc<GroupWeights>> {
        let mut out = GroupWeights::default();
        for p in self.params.iter().filter(|p| of(p)) {
            let values = hf::merged(&self.weights, p, &self.folded)?;
            let tensor = Tensor::from_vec(values, p.shape.as_slice(), &Device::Cpu)?;
            out.insert(p.name.clone(), tensor);
        }
        Ok(Arc::new(out))
    }
}

impl WeightSource for MergingSource {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        self.read(|p| p.group == group)
    }

    fn fetch_dense(&self, layer: usize) -> Result<Arc<GroupWeights>> {
        self.read(|p| p.group == Group::Layer(layer) && p.expert().is_none())
    }

    fn fetch_expert(&self, layer: usize, expert: usize) -> Result<Arc<GroupWeights>> {
        self.read(|p| p.group == Group::Layer(layer) && p.expert() == Some(expert))
    }

    fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    fn resident_bytes(&self) -> u64 {
        0
    }

    fn in_memory(&self, _: &str) -> Option<Tensor> {
        None
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        let table = self.fetch(self.param(name)?.group)?.get(name)?.1;
        Ok((table, ids.to_vec()))
    }

    fn streamed(&self, _: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        None
    }
}

/// Logits of the random ids, `[TOKENS · V]`; with a score head `[1, D]` their scores, `[TOKENS]`. `untied`: an adapter unties the
/// model in `dir`, whose head is its embedding, also if a file has another one.
fn logits(
    (dir, untied): (&Path, bool),
    spec: &Spec,
    adapters: Adapters,
    folded: Vec<WeightedAdapter>,
    score: Option<&Tensor>,
    new: Option<&NewRows>,
) -> Result<Vec<f32>> {
    let mut weights = Weights::open(dir)?;
    if let Some(new) = new {
        new.place(&mut weights, spec.tied || untied)?;
    }
    if untied {
        weights = hf::untied_weights(weights)?;
    }
    let source = MergingSource {
        weights,
        params: spec.params(),
        folded,
    };
    let mut network = Network::new(spec.clone(), Arc::new(source), Device::Cpu);
    let _phase = progress::phase("comparing answers", 1, "");
    network.adapters = adapters;
    let rng = Rng::new(0, Stream::Sampling, &[1]);
    let ids: Vec<u32> = (0..TOKENS as u64)
        .map(|i| rng.below(i, spec.vocab as u64) as u32)
        .collect();
    let positions: Vec<u32> = (0..TOKENS as u32).collect();
    let documents = [0, TOKENS];
    let ctx = network.context(&positions, &documents, None)?;
    let hidden = network.hidden_states(&ids, &ctx)?;
    if let Some(score) = score {
        return update::to_f32_vec(&linear::forward(&hidden, score, None)?);
    }
    let head = network.head()?;
    let raw = update::to_f32_vec(&head.logits(&hidden)?)?;
    Ok(match head.softcap {
        Some(cap) => raw.into_iter().map(|x| cap * (x / cap).tanh()).collect(),
        None => raw,
    })
}

/// On random ids; for a reward model the same with scores.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitDifference {
    /// Between a logit before and after the merge.
    pub largest_change: f32,
    pub largest_logit: f32,
}

/// Compares the logits (or scores). A single adapter of weight 1
/// (without full modules or rows) runs beside the base as in training; other sums are merged in f32.
/// `new`: rows of new tokens, which the files of the base do not have. `untied`: an adapter has separate embedding and head matrices for a tied model.
pub fn difference(
    base: &Path,
    adapters: Vec<WeightedAdapter>,
    merged: &Path,
    untied: bool,
    new: Option<&NewRows>,
) -> Result<LogitDifference> {
    let mut spec = families::read(&Config::load(base)?)?;
    spec.tied &= !untied;
    spec.vocab = new.map_or(spec.vocab, |new| new.vocab);
    let of_files = |dir: &Path| -> Result<Option<Tensor>> {
        let weights = Weights::open(dir)?;
        if !hf::has_score(&spec, &weights, dir)? {
            return Ok(None);
        }
        let values = weights.read_f32(hf::SCORE)?;
        Ok(Some(Tensor::from_vec(values, (1, spec.hidden), &Device::Cpu)?))
    };
    let own = adapters.iter().find_map(|a| a.adapter.score.clone());
    let score = own.map_or_else(|| of_files(base), |own| Ok(Some(own)))?;
    let stored = of_files(merged)?;
    // The model has no output projection.
    spec.tied |= score.is_some();
    let beside = match adapters.as_slice() {
        [one] if one.weight == 1.0 && one.adapter.whole.is_empty() && one.adapter.rows.is_empty() => logits(
            (base, untied),
            &spec,
            one.adapter.adapters.clone(),
            Vec::new(),
            score.as_ref(),
            new,
        )?,
        _ => logits((base, untied), &spec, Adapters::new(), adapters, score.as_ref(), new)?,
    };
    // Here the head is the one that the merge wrote.
    let merged = (merged, false);
    let after = logits(merged, &spec, Adapters::new(), Vec::new(), stored.as_ref(), None)?;
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0f32, |m, x| m.max(x.abs()));
    Ok(LogitDifference {
        largest_change: largest(&mut beside.iter().zip(&after).map(|(a, b)| a - b)),
        largest_logit: largest(&mut beside.into_iter()),
    })
}
