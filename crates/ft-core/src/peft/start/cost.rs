//! Temporary memory of an adapter init, for the planner.
//!
//! Letters: I input features, O output features, R rank, K = min(O, I), D hidden size.

use super::algebra::{eigen_bytes, svd_bytes};
use super::krylov;
use crate::peft::adapter::AdapterCost;
use crate::peft::config::{LoraConfig, LoraInit, PeftType};
use crate::peft::targets::layer_of;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Linears of a layer that are decomposed in parallel: each needs a few matrices of its weight's size in f64.
const AT_ONCE: usize = 4;

/// Groups the linears `[O, I]` of a layer that are decomposed in parallel, as consecutive ranges: at most `AT_ONCE`,
/// and together not larger than the largest one alone, so that the small ones need no extra memory.
pub fn together(linears: &[(usize, usize)]) -> Vec<Range<usize>> {
    let size = |&(o, i): &(usize, usize)| (3 * o * i + (o + i) * o.min(i) + 3 * i * i) as u64;
    let most = linears.iter().map(size).max().unwrap_or(0);
    let (mut out, mut first, mut sum) = (Vec::new(), 0, 0);
    for (n, linear) in linears.iter().enumerate() {
        if n > first && (n - first == AT_ONCE || sum + size(linear) > most) {
            out.push(first..n);
            (first, sum) = (n, 0);
        }
        sum += size(linear);
    }
    if first < linears.len() {
        out.push(first..linears.len());
    }
    out
}

/// Tokens of a batch of calibration rows: sums over one batch are f32, then accumulated in f64.
pub const TOKENS: usize = 4096;

/// Bytes that the products of a whole decomposition are packed into.
const PACKED: u64 = 4 << 20;

/// True if the initialization of the adapters decomposes weights or covariances.
pub fn decomposes(lora: &LoraConfig) -> bool {
    let plain = matches!(lora.init_lora_weights, LoraInit::Default | LoraInit::Gaussian);
    lora.peft_type == PeftType::Lora && lora.adapter.is_none() && !plain
}

/// Bytes for each thread into which the products of the start are packed; they stay until the run is over. Those of a few
/// vectors need less.
pub fn packed(lora: &LoraConfig, adapters: &BTreeMap<String, AdapterCost>) -> u64 {
    if !decomposes(lora) {
        return 0;
    }
    let linears = adapters
        .iter()
        .filter_map(|(module, cost)| LinearSizes::of(module, cost));
    match lora.init_lora_weights {
        LoraInit::Olora => 0,
        LoraInit::Eva => {
            let widest = linears.map(|l| (l.i as usize, l.directions(lora))).max();
            let few = widest.is_some_and(|(inputs, count)| krylov::pays(inputs, inputs, count));
            if few { PACKED / 4 } else { PACKED }
        }
        _ => PACKED,
    }
}

/// Bytes at the worst moment of the start: hidden states of `tokens` calibration tokens of width `hidden` (D), one layer's
/// covariances, what is decomposed at one time, and what is kept until the last layer is done. 0 for starts that need none
/// of it. The passes over these tokens are not in it.
pub fn bytes(lora: &LoraConfig, hidden: usize, tokens: u64, adapters: &BTreeMap<String, AdapterCost>) -> u64 {
    if !decomposes(lora) {
        return 0;
    }
    let init = lora.init_lora_weights;
    let mut layers: BTreeMap<Option<usize>, Vec<LinearSizes>> = BTreeMap::new();
    for (module, cost) in adapters {
        if let Some(linear) = LinearSizes::of(module, cost) {
            layers.entry(layer_of(module)).or_default().push(linear);
        }
    }
    if init == LoraInit::Eva {
        layers.values_mut().for_each(LinearSizes::by_input);
    }
    let looks = matches!(init, LoraInit::Corda | LoraInit::Eva);
    let states = if looks { 4 * tokens * hidden as u64 } else { 0 };
    let kept: u64 = layers.values().flatten().map(|l| l.kept(lora)).sum();
    let worst = layers.values().map(|linears| {
        let inputs: BTreeSet<(u8, u64)> = linears.iter().map(|l| (l.input, l.i)).collect();
        let covariances: u64 = if looks {
            inputs.iter().map(|(_, i)| 8 * i * i).sum()
        } else {
            0
        };
        // During accumulation: the sums of a batch, as a tensor and as numbers.
        let sums = inputs
            .iter()
            .map(|(_, i)| 8 * i * i)
            .max()
            .filter(|_| looks)
            .unwrap_or(0);
        let dims: Vec<(usize, usize)> = linears.iter().map(|l| (l.o as usize, l.i as usize)).collect();
        let groups = together(&dims).into_iter();
        let works = |g: Range<usize>| linears[g].iter().map(|l| l.work(init, lora)).collect::<Vec<u64>>();
        let at_once = groups.map(|g| match init {
            // A gradient is decomposed when it comes.
            LoraInit::LoraGa => works(g).into_iter().max().unwrap_or(0),
            _ => works(g).into_iter().sum(),
        });
        // LoftQ reads the weights of a layer first.
        let originals: u64 = match init {
            LoraInit::Loftq => linears.iter().map(|l| 8 * l.o * l.i).sum(),
            _ => 0,
        };
        covariances + originals + at_once.max().unwrap_or(0).max(sums)
    });
    states + kept + worst.max().unwrap_or(0)
}

struct LinearSizes {
    i: u64,
    o: u64,
    r: u64,
    /// Index of its input among the different inputs of the layer.
    input: u8,
}

impl LinearSizes {
    fn of(module: &str, cost: &AdapterCost) -> Option<Self> {
        let shape = |below: &str| cost.trained.iter().find(|(n, _)| n.ends_with(below)).map(|(_, s)| s);
        let (&[r, i], &[o, _]) = (shape(".lora_A.weight")?.as_slice(), shape(".lora_B.weight")?.as_slice()) else {
            return None;
        };
        let ends = |names: &[&str]| names.iter().any(|n| module.ends_with(n));
        Some(Self {
            i: i as u64,
            o: o as u64,
            r: r as u64,
            input: match module {
                _ if ends(&["q_proj", "k_proj", "v_proj", "qkv_proj"]) => 0,
                _ if ends(&["o_proj"]) => 1,
                _ if ends(&["gate_proj", "up_proj", "gate_up_proj", "input_linear", "c_fc"]) => 2,
                _ => 3,
            },
        })
    }

    /// EVA decomposes once for all linears with the same input, with the directions of the largest rank.
    fn by_input(linears: &mut Vec<Self>) {
        let mut found: Vec<Self> = Vec::new();
        for linear in linears.drain(..) {
            let known = found.iter_mut().find(|l| (l.input, l.i) == (linear.input, linear.i));
            // The inputs of other names may differ.
            match known.filter(|l| l.input != 3) {
                Some(known) => known.r = known.r.max(linear.r),
                None => found.push(linear),
            }
        }
        *linears = found;
    }

    /// Work of the decomposition: W and the matrix to decompose in f64, and the temporary memory of the algorithm.
    fn work(&self, init: LoraInit, lora: &LoraConfig) -> u64 {
        let (w, c) = (self.o * self.i, self.i * self.i);
        let (o, i, r) = (self.o as usize, self.i as usize, self.r as usize);
        // Of a large weight only the first `count` singular triplets are computed.
        let svd = |count: usize| {
            if krylov::pays(o, i, count) {
                krylov::bytes(o, i, count)
            } else {
                svd_bytes(o, i)
            }
        };
        match init {
            LoraInit::Default | LoraInit::Gaussian => 0,
            // W, W·C, C, damped.
            LoraInit::Corda if lora.corda.adaptive_rank => 8 * (2 * w + 2 * c) + svd_bytes(o, i),
            LoraInit::Corda => 8 * (2 * w + 2 * c) + svd(r),
            LoraInit::Eva => match self.directions(lora) {
                count if krylov::pays(i, i, count) => 8 * c + krylov::bytes(i, i, count),
                _ => 8 * c + eigen_bytes(i),
            },
            LoraInit::Pissa if lora.pissa_niter > 0 => {
                8 * (w + 4 * (self.o + self.i) * (self.r + 8)) + svd_bytes(r + 8, i)
            }
            LoraInit::Pissa => 8 * w + svd(r),
            LoraInit::Olora => 4 * w + 8 * (w + 4 * self.r * (self.o + self.i)),
            // The numbers of the gradient; the gradient itself is part of the pass.
            LoraInit::LoraGa => 4 * w + 8 * w + svd(2 * r),
            // Q, and the difference.
            LoraInit::Loftq => 4 * w + 8 * 2 * w + svd(r),
        }
    }

    /// Directions of the inputs that EVA looks for.
    fn directions(&self, lora: &LoraConfig) -> usize {
        (lora.eva.rho * self.r as f64) as usize
    }

    /// Results of this linear that are not written to the adapter yet.
    fn kept(&self, lora: &LoraConfig) -> u64 {
        match lora.init_lora_weights {
            LoraInit::Corda => {
                let candidates = if lora.corda.adaptive_rank { 2 * self.r } else { self.r };
                (8 * candidates + 4 * self.r) * (self.o + self.i)
            }
            LoraInit::Eva => (4.0 * self.r as f64 * lora.eva.rho) as u64 * self.i,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_costs_covariances_and_what_it_decomposes() {
        let part = |name: &str, shape: [usize; 2]| (format!("model.layers.0.mlp.{name}").into(), shape.to_vec());
        let cost = AdapterCost {
            trained: vec![
                part("up_proj.lora_A.weight", [2, 8]),
                part("up_proj.lora_B.weight", [12, 2]),
            ],
            ..AdapterCost::default()
        };
        let adapters = BTreeMap::from([("model.layers.0.mlp.up_proj".to_string(), cost)]);
        let with = |lora: LoraConfig| bytes(&lora, 8, 100, &adapters);
        let of = |init_lora_weights| {
            with(LoraConfig {
                init_lora_weights,
                ..LoraConfig::default()
            })
        };
        assert_eq!(of(LoraInit::Default), 0);
        let oft = LoraConfig {
            peft_type: PeftType::Oft,
            ..LoraConfig::default()
        };
        assert_eq!(with(oft), 0);
        // W is [12, 8]: 96 elements, C 64, factors (12 + 8) · 8.
        let svd = svd_bytes(12, 8);
        assert!(svd > 8 * 160, "the factors, and work");
        assert_eq!(of(LoraInit::Pissa), 8 * 96 + svd);
        let corda = 4 * 100 * 8 + 8 * 64 + 8 * (2 * 96 + 2 * 64) + svd + (8 * 2 + 4 * 2) * 20;
        assert_eq!(of(LoraInit::Corda), corda);
        assert_eq!(of(LoraInit::LoraGa), 12 * 96 + svd);
        // A linear with the same input and a smaller rank costs nothing more.
        let mut two = adapters.clone();
        let trained = vec![
            part("gate_proj.lora_A.weight", [1, 8]),
            part("gate_proj.lora_B.weight", [12, 1]),
        ];
        let cost = AdapterCost {
            trained,
            ..AdapterCost::default()
        };
        two.insert("model.layers.0.mlp.gate_proj".to_string(), cost);
        let eva = LoraConfig {
            init_lora_weights: LoraInit::Eva,
            ..LoraConfig::default()
        };
        assert_eq!(bytes(&eva, 8, 100, &two), bytes(&eva, 8, 100, &adapters));
        // Of 1024 x 384: measured 16.57 MiB; of 1024 x 1024 32.5 MiB, with the vectors once more.
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        assert!((mib(svd_bytes(1024, 384)) - 16.57).abs() < 0.1);
        assert!((mib(eigen_bytes(1024)) - 32.5).abs() < 0.1);
    }

    #[test]
    fn small_linears_share_what_the_largest_needs() {
        let (d, i) = (4096, 11008);
        let layer = [(d, d), (d, d), (d, d), (d, d), (i, d), (i, d), (d, i)];
        assert_eq!(together(&layer), [0..4, 4..6, 6..7]);
        assert_eq!(together(&[(d, d); 2]), [0..1, 1..2], "alike: one after the other");
        assert!(together(&[]).is_empty());
        let tiny: Vec<(usize, usize)> = [(4, 4); 9].into_iter().chain([(400, 400)]).collect();
        assert_eq!(together(&tiny), [0..4, 4..8, 8..9, 9..10]);
    }
}
