//! What a start needs beside the model for a while, for the planner.
//!
//! Letters: I input features, O output features, R rank, K = min(O, I), D hidden size.

use crate::peft::adapter::Cost;
use crate::peft::targets::layer_of;
use crate::recipe::{Lora, LoraInit, PeftType};
use std::collections::{BTreeMap, BTreeSet};

/// Linears of a layer that are decomposed side by side: each holds a few matrices of its weight's size in f64.
pub const AT_ONCE: usize = 4;

/// Tokens of a batch of calibration rows: the sums of so many are f32 before they are added up in f64.
pub const TOKENS: usize = 4096;

/// Bytes at the worst moment of the start: hidden states of `tokens` calibration tokens of width `hidden` (D), one layer's
/// covariances, what is decomposed at one time, and what is kept until the last layer is done. 0 for starts that
/// need none of it.
pub fn bytes(lora: &Lora, hidden: usize, tokens: u64, adapters: &BTreeMap<String, Cost>) -> u64 {
    if lora.peft_type != PeftType::Lora || lora.adapter.is_some() {
        return 0;
    }
    let init = lora.init_lora_weights;
    let mut layers: BTreeMap<Option<usize>, Vec<Linear>> = BTreeMap::new();
    for (module, cost) in adapters {
        if let Some(linear) = Linear::of(module, cost) {
            layers.entry(layer_of(module)).or_default().push(linear);
        }
    }
    let looks = matches!(init, LoraInit::Corda | LoraInit::Eva);
    let states = if looks { 4 * tokens * hidden as u64 } else { 0 };
    let kept: u64 = layers.values().flatten().map(|l| l.kept(lora)).sum();
    let worst = layers.values().map(|linears| {
        let inputs: BTreeSet<(u8, u64)> = linears.iter().map(|l| (l.input, l.i)).collect();
        let covariances: u64 = match looks {
            true => inputs.iter().map(|(_, i)| 8 * i * i).sum(),
            false => 0,
        };
        // While one is added to: the sums of a batch, as a tensor and as numbers.
        let sums = inputs
            .iter()
            .map(|(_, i)| 8 * i * i)
            .max()
            .filter(|_| looks)
            .unwrap_or(0);
        let at_once = linears
            .chunks(AT_ONCE)
            .map(|some| some.iter().map(|l| l.work(init, lora)).sum());
        covariances + at_once.max().unwrap_or(0).max(sums)
    });
    states + kept + worst.max().unwrap_or(0)
}

struct Linear {
    i: u64,
    o: u64,
    r: u64,
    /// Which of a layer's different inputs it reads.
    input: u8,
}

impl Linear {
    fn of(module: &str, cost: &Cost) -> Option<Self> {
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
                _ if ends(&["gate_proj", "up_proj", "gate_up_proj"]) => 2,
                _ => 3,
            },
        })
    }

    /// Decomposed: copies of W, of what is made of it, and its two factors, in f64.
    fn work(&self, init: LoraInit, lora: &Lora) -> u64 {
        let (w, c, factors) = (self.o * self.i, self.i * self.i, (self.o + self.i) * self.o.min(self.i));
        match init {
            LoraInit::Default | LoraInit::Gaussian => 0,
            // W, W·C and its copy; C, damped, and its factor.
            LoraInit::Corda => 4 * w + 8 * (3 * w + factors + 3 * c),
            LoraInit::Eva => 8 * 3 * c,
            LoraInit::Pissa if lora.pissa_niter > 0 => 4 * w + 8 * (w + 4 * (self.o + self.i) * (self.r + 8)),
            LoraInit::Pissa | LoraInit::Olora | LoraInit::LoraGa => 4 * w + 8 * (2 * w + factors),
            // W, Q and their difference.
            LoraInit::Loftq => 4 * w + 8 * (4 * w + factors),
        }
    }

    /// Found for this linear and not placed yet.
    fn kept(&self, lora: &Lora) -> u64 {
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
