//! Divides the neurons of each MLP among experts: neurons that are active on the same tokens share an expert.
//!
//! Balanced k-means on the directions of the neurons' activations, each times the norm of its column of down_proj. The router
//! starts as the ridge regression of the activation of each expert on the input of the MLP, by conjugate gradients, scaled down:
//! which experts are chosen does not depend on the scale, and their weights start nearly equal.
//!
//! Letters: T tokens, D hidden size, I neurons, W neurons of an expert, N experts.

use super::ConvertRequest;
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result, progress, signal};
use crate::commands::sensitivity::calibration;
use crate::model::{Context, Layer, Network, Observer};
use crate::ops::update;
use crate::recipe::Dtype;
use crate::setup::ModelDir;
use crate::setup::vocabulary::TextChanges;
use crate::source::{ResidentWeights, StoragePolicy};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

/// Rounds of k-means.
const ROUNDS: usize = 10;
/// Steps of the conjugate gradients, and the ridge relative to the mean square of an input times T.
const STEPS: usize = 24;
const RIDGE: f64 = 0.1;
/// Standard deviation of the logits of a new router on the rows.
const LOGITS: f64 = 0.05;

/// The experts of one layer.
#[derive(Debug, Clone)]
pub struct ExpertSplit {
    /// The neurons in the order of the experts, `[I]`.
    order: Vec<u32>,
    /// `[N, D]`
    pub router: Vec<f32>,
    /// Part of the activation on the rows that the chosen experts have.
    pub reached: f64,
}

impl ExpertSplit {
    /// The neurons of an expert, ascending.
    pub fn of(&self, expert: usize, experts: usize) -> &[u32] {
        let width = self.order.len() / experts;
        &self.order[expert * width..][..width]
    }
}

/// The inputs `[T, D]` and the neurons `[T, I]` of the MLP of a layer.
#[derive(Debug, Default)]
struct LayerNeurons {
    inputs: Vec<f32>,
    neurons: Vec<f32>,
}

/// Collects them.
struct Collector {
    layer: usize,
    seen: RefCell<LayerNeurons>,
}

impl Observer for Collector {
    fn input(&self, weight: &str, x: &Tensor) -> Result<()> {
        let mut seen = self.seen.borrow_mut();
        if weight == super::dense_name(self.layer, 0) {
            seen.inputs.extend(update::to_f32_vec(x)?);
        } else if weight == super::dense_name(self.layer, 2) {
            seen.neurons.extend(update::to_f32_vec(x)?);
        }
        Ok(())
    }
}

/// The experts of every layer.
///
/// Errors: invalid rows; too few tokens; the weights do not fit into memory.
pub fn split(request: &ConvertRequest, data: &Path, tokens: usize) -> Result<Vec<ExpertSplit>> {
    let model = ModelDir::open(&request.model.to_string_lossy(), "main", &TextChanges::default())?;
    let batches = calibration(&model, data, tokens)?;
    let total: usize = batches.iter().map(|b| b.len()).sum();
    if total < 2 * request.experts {
        return Err(Error::new("too few tokens to group the neurons into experts")
            .at_path(data)
            .found(total)
            .expected(format!("at least {}; thousands are better", 2 * request.experts)));
    }
    let policy = StoragePolicy::dense(Dtype::F32);
    let weights = model.weights()?;
    let source = ResidentWeights::load(model.spec.params(), &weights, |p| policy.of(p), &Device::Cpu)?;
    let network = Network::new(model.spec.clone(), Arc::new(source), Device::Cpu);
    let mut xs: Vec<Tensor> = Vec::new();
    for b in &batches {
        let ctx: Context = network.context(&b.positions, &b.documents, None)?;
        xs.push(network.embed(&b.ids, &ctx)?);
    }
    let phase = progress::phase("dividing neurons", network.layers(), "layers");
    let mut splits = Vec::new();
    for layer in 0..network.layers() {
        if let Some(s) = signal::received() {
            return Err(Error::signal(s, "stopped while dividing neurons"));
        }
        let collector = Collector {
            layer,
            seen: RefCell::default(),
        };
        let block = network.block(layer)?;
        for (x, b) in xs.iter_mut().zip(&batches) {
            let mut ctx: Context = network.context(&b.positions, &b.documents, None)?;
            ctx.observer = Some(&collector);
            *x = block.forward(x, &ctx)?;
        }
        drop(block);
        let name = super::dense_name(layer, 2);
        let down = update::to_f32_vec(&network.param(&name)?.tensor)?;
        splits.push(of_layer(
            request,
            layer,
            &collector.seen.into_inner(),
            &column_norms(&down, model.spec.intermediate),
        ));
        phase.add(1);
    }
    Ok(splits)
}

/// Norms of the columns of a matrix with `columns` columns.
fn column_norms(values: &[f32], columns: usize) -> Vec<f32> {
    let mut sums = vec![0f64; columns];
    for row in values.chunks_exact(columns) {
        sums.iter_mut()
            .zip(row)
            .for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
    }
    sums.into_iter().map(|sum| sum.sqrt() as f32).collect()
}

fn of_layer(request: &ConvertRequest, layer: usize, seen: &LayerNeurons, norms: &[f32]) -> ExpertSplit {
    let (neurons, experts) = (norms.len(), request.experts);
    let tokens = seen.neurons.len() / neurons;
    let hidden = seen.inputs.len() / tokens;
    // The part of the output that each neuron adds, `[I, T]`.
    let mut added = vec![0f32; neurons * tokens];
    added.par_chunks_mut(tokens).enumerate().for_each(|(i, row)| {
        for (t, x) in row.iter_mut().enumerate() {
            *x = seen.neurons[t * neurons + i].abs() * norms[i];
        }
    });
    let assigned = clusters(&added, tokens, experts, request.seed, layer);
    let mut order: Vec<u32> = (0..neurons as u32).collect();
    order.sort_by_key(|&i| (assigned[i as usize], i));
    // The activation of each expert, `[N, T]`.
    let mut activation = vec![0f32; experts * tokens];
    for (i, row) in added.chunks_exact(tokens).enumerate() {
        let to = &mut activation[assigned[i] * tokens..][..tokens];
        to.iter_mut().zip(row).for_each(|(to, x)| *to += x);
    }
    let mut router = vec![0f32; experts * hidden];
    // If a token has all experts, equal weights make their sum the MLP.
    if request.top_k < experts {
        let regress = |(row, wanted): (&mut [f32], &[f32])| ridge(&seen.inputs, hidden, wanted, row);
        router
            .par_chunks_mut(hidden)
            .zip(activation.par_chunks(tokens))
            .for_each(regress);
    }
    let mut logits = vec![0f32; tokens * experts];
    logits.par_chunks_mut(experts).enumerate().for_each(|(t, row)| {
        let h = &seen.inputs[t * hidden..][..hidden];
        for (z, r) in row.iter_mut().zip(router.chunks_exact(hidden)) {
            *z = h.iter().zip(r).map(|(h, r)| h * r).sum();
        }
    });
    let squares: f64 = logits.iter().map(|z| f64::from(*z).powi(2)).sum();
    let deviation = (squares / logits.len() as f64).sqrt();
    if deviation > 0.0 {
        let scale = (LOGITS / deviation) as f32;
        router.iter_mut().for_each(|r| *r *= scale);
    }
    ExpertSplit {
        order,
        router,
        reached: reached(&logits, &activation, request),
    }
}

/// The part of the activations `[N, T]` that the experts with the largest logits `[T, N]` have.
fn reached(logits: &[f32], activation: &[f32], request: &ConvertRequest) -> f64 {
    let tokens = activation.len() / request.experts;
    let (mut chosen, mut all) = (0f64, 0f64);
    for (t, row) in logits.chunks_exact(request.experts).enumerate() {
        let mut experts: Vec<usize> = (0..request.experts).collect();
        experts.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        for (place, e) in experts.into_iter().enumerate() {
            let x = f64::from(activation[e * tokens + t]);
            all += x;
            chosen += if place < request.top_k { x } else { 0.0 };
        }
    }
    if all > 0.0 { chosen / all } else { 1.0 }
}

/// The expert of each neuron: balanced k-means on the directions of the rows of `added` `[I, T]`.
fn clusters(added: &[f32], tokens: usize, experts: usize, seed: u64, layer: usize) -> Vec<usize> {
    let neurons = added.len() / tokens;
    let unit = |row: &[f32]| -> Vec<f32> {
        let norm = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let factor = if norm > 0.0 { 1.0 / norm } else { 0.0 } as f32;
        row.iter().map(|x| x * factor).collect()
    };
    let directions: Vec<Vec<f32>> = added.par_chunks(tokens).map(unit).collect();
    let first = Rng::new(seed, Stream::Init, &[layer as u64, 1]).permutation(neurons);
    let mut centers: Vec<Vec<f32>> = first.iter().take(experts).map(|&i| directions[i].clone()).collect();
    let mut assigned = vec![0; neurons];
    for _ in 0..ROUNDS {
        let near = |x: &Vec<f32>| -> Vec<f32> {
            let dot = |c: &Vec<f32>| x.iter().zip(c).map(|(x, c)| x * c).sum();
            centers.iter().map(dot).collect()
        };
        let similarity: Vec<Vec<f32>> = directions.par_iter().map(near).collect();
        let next = balanced(&similarity, experts);
        if next == assigned {
            break;
        }
        assigned = next;
        let mut sums = vec![vec![0f32; tokens]; experts];
        for (x, &e) in directions.iter().zip(&assigned) {
            sums[e].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
        centers = sums.iter().map(|sum| unit(sum)).collect();
    }
    assigned
}

/// Assigns each row of `similarity` `[I, N]` to an expert, the best pairs first; every expert gets the same number.
fn balanced(similarity: &[Vec<f32>], experts: usize) -> Vec<usize> {
    let mut pairs: Vec<(usize, usize)> = (0..similarity.len())
        .flat_map(|i| (0..experts).map(move |e| (i, e)))
        .collect();
    pairs.par_sort_by(|a, b| similarity[b.0][b.1].total_cmp(&similarity[a.0][a.1]).then(a.cmp(b)));
    let mut room = vec![similarity.len() / experts; experts];
    let mut assigned = vec![experts; similarity.len()];
    for (i, e) in pairs {
        if assigned[i] == experts && room[e] > 0 {
            assigned[i] = e;
            room[e] -= 1;
        }
    }
    assigned
}

/// Solves (HᵀH + λ) r = Hᵀ (y - mean y) approximately; `inputs` H `[T, D]`, `wanted` y `[T]`.
fn ridge(inputs: &[f32], hidden: usize, wanted: &[f32], r: &mut [f32]) {
    let mean = wanted.iter().map(|y| f64::from(*y)).sum::<f64>() / wanted.len() as f64;
    let centered: Vec<f64> = wanted.iter().map(|y| f64::from(*y) - mean).collect();
    let transposed = |y: &[f64]| -> Vec<f64> {
        let mut out = vec![0f64; hidden];
        for (h, y) in inputs.chunks_exact(hidden).zip(y) {
            out.iter_mut().zip(h).for_each(|(out, h)| *out += f64::from(*h) * y);
        }
        out
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let power = inputs.iter().map(|h| f64::from(*h).powi(2)).sum::<f64>() / hidden as f64;
    let lambda = RIDGE * power;
    let mut x = vec![0f64; hidden];
    let mut residual = transposed(&centered);
    let mut step = residual.clone();
    let mut size = dot(&residual, &residual);
    let start = size;
    for _ in 0..STEPS {
        if size <= start * 1e-10 {
            break;
        }
        let along = |h: &[f32]| h.iter().zip(&step).map(|(h, s)| f64::from(*h) * s).sum::<f64>();
        let y: Vec<f64> = inputs.chunks_exact(hidden).map(along).collect();
        let mut image = transposed(&y);
        image.iter_mut().zip(&step).for_each(|(i, s)| *i += lambda * s);
        let length = size / dot(&step, &image);
        x.iter_mut().zip(&step).for_each(|(x, s)| *x += length * s);
        residual.iter_mut().zip(&image).for_each(|(r, i)| *r -= length * i);
        let next = dot(&residual, &residual);
        step.iter_mut()
            .zip(&residual)
            .for_each(|(s, r)| *s = r + next / size * *s);
        size = next;
    }
    r.iter_mut().zip(x).for_each(|(r, x)| *r = x as f32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neurons_that_are_active_together_share_an_expert() {
        // Neuron i is active on the tokens t with t % 3 == i % 3.
        let (neurons, tokens) = (12, 30);
        let rng = Rng::new(1, Stream::Init, &[]);
        let added: Vec<f32> = (0..neurons * tokens)
            .map(|n| {
                let (i, t) = (n / tokens, n % tokens);
                let noise = rng.uniform(n as u64) * 0.1;
                if i % 3 == t % 3 { 1.0 + noise } else { noise }
            })
            .collect();
        let found = (0..20u64).map(|seed| clusters(&added, tokens, 3, seed, 0));
        let mut whole = 0;
        for assigned in found {
            for e in 0..3 {
                assert_eq!(assigned.iter().filter(|a| **a == e).count(), 4);
            }
            whole += usize::from((0..neurons).all(|i| assigned[i] == assigned[i % 3]));
        }
        // k-means may stop elsewhere from an unlucky start.
        assert!(whole >= 10, "{whole} of 20");
    }

    #[test]
    fn the_ridge_regression_solves_its_equations() {
        let (tokens, hidden) = (40, 5);
        let rng = Rng::new(2, Stream::Init, &[]);
        let h: Vec<f32> = (0..(tokens * hidden) as u64).map(|i| rng.normal(i)).collect();
        let y: Vec<f32> = (0..tokens as u64).map(|i| rng.normal(1000 + i)).collect();
        let mut r = vec![0f32; hidden];
        ridge(&h, hidden, &y, &mut r);
        let mean = y.iter().sum::<f32>() / tokens as f32;
        let power = h.iter().map(|h| h * h).sum::<f32>() / hidden as f32;
        for d in 0..hidden {
            let column = |t: usize| h[t * hidden + d];
            let fitted = |t: usize| (0..hidden).map(|k| h[t * hidden + k] * r[k]).sum::<f32>();
            let left: f32 = (0..tokens).map(|t| column(t) * fitted(t)).sum::<f32>() + RIDGE as f32 * power * r[d];
            let right: f32 = (0..tokens).map(|t| column(t) * (y[t] - mean)).sum();
            assert!((left - right).abs() < 1e-3 * right.abs().max(1.0), "{left} and {right}");
        }
    }
}
