//! Simulates the memory of loading weights one by one before the run, and of requantization between two blocks.

use super::Inputs;
use super::ledger::{Allocation, Kind, Ledger};
use super::model::Model;
use crate::engine::Active;
use crate::quant::Storage;
use crate::source::ParamInfo;
use crate::source::Placement;

/// The kind of memory of the staging buffer: on the host.
fn staging_kind(inputs: &Inputs) -> Kind {
    if inputs.on_gpu { Kind::OnHost } else { Kind::Scratch }
}

/// Loads every weight of the model. A weight that is quantized exists twice for a short time: as read, and quantized.
pub(super) fn load(l: &mut Ledger, model: &Model, inputs: &Inputs) {
    l.moment("loading");
    let mut held = Vec::new();
    let (first, last) = match model.outside() {
        [first, last @ ..] => (Some(first), last),
        [] => (None, &[][..]),
    };
    first.into_iter().for_each(|p| held.extend(load_one(l, p, inputs)));
    for run in model.runs(&Active::new([])) {
        // Memory grows with each layer, so the last of equal layers is the worst.
        let before = l.sizes();
        for p in model.layer(run.first) {
            held.extend(load_one(l, &p, inputs));
        }
        if run.count > 1 {
            held.extend(l.alloc_again(&before, run.count as u64 - 2));
            for p in model.layer(run.first) {
                held.extend(load_one(l, &p, inputs));
            }
        }
    }
    last.iter().for_each(|p| held.extend(load_one(l, p, inputs)));
    l.free_all(held);
}

fn load_one(l: &mut Ledger, p: &ParamInfo, inputs: &Inputs) -> Option<Allocation> {
    let storage = inputs.strategy.storage.of(p);
    let numbers = match storage {
        Storage::Quantized(..) => inputs.file_bytes * p.elements() as u64,
        Storage::Dense(_) => 0,
    };
    let numbers = l.alloc(staging_kind(inputs), numbers);
    let held = match inputs.strategy.placement {
        Placement::Device => Some(l.alloc(Kind::Weights, storage.bytes(&p.shape))),
        Placement::Host => Some(l.alloc(Kind::OnHost, storage.bytes(&p.shape))),
        // The quantized data is written to a separate file before any weight is held.
        Placement::Disk { .. } => {
            if storage.is_quantized() {
                l.touch(staging_kind(inputs), storage.bytes(&p.shape));
            }
            None
        }
    };
    l.free(numbers);
    held
}

/// Deactivates a trained block: requantizes its quantized weights one by one; their exact values stay beside the
/// quantized data. The caller holds `weights::held` and the exact values of other blocks. `stored`: bytes per value in
/// the model's type; `low`: bytes of the low part of the fp32 master.
pub(super) fn turn(l: &mut Ledger, model: &Model, inputs: &Inputs, active: &Active, (stored, low): (u64, u64)) {
    let quantized = |p: &ParamInfo| active.contains(&p.name) && inputs.strategy.storage.of(p).is_quantized();
    let (mut elements, mut any) = (0, false);
    model.each(active, |p, count| {
        if active.contains(&p.name) {
            elements += count * p.elements() as u64;
            any |= quantized(p);
        }
    });
    if !any {
        return;
    }
    l.moment("the requantization of a block");
    let mut held = vec![l.alloc(staging_kind(inputs), low * elements)];
    for run in model.runs(active) {
        let layer: Vec<ParamInfo> = model.layer(run.first).filter(quantized).collect();
        let before = l.sizes();
        for p in &layer {
            held.extend(turn_one(l, p, inputs, (stored, low)));
        }
        if run.count > 1 {
            held.extend(l.alloc_again(&before, run.count as u64 - 2));
            for p in &layer {
                held.extend(turn_one(l, p, inputs, (stored, low)));
            }
        }
    }
    l.free_all(held);
}

fn turn_one(l: &mut Ledger, p: &ParamInfo, inputs: &Inputs, (stored, low): (u64, u64)) -> Vec<Allocation> {
    let (storage, n) = (inputs.strategy.storage.of(p), p.elements() as u64);
    let mut held = Vec::new();
    if inputs.on_gpu {
        held.push(l.alloc(Kind::OnHost, stored * n));
    }
    let exact = l.alloc(staging_kind(inputs), 4 * n);
    // The low half is copied to join it with the high one.
    l.touch(staging_kind(inputs), low * n);
    let codes = l.alloc(Kind::Weights, storage.bytes(&p.shape));
    l.free(exact);
    match inputs.strategy.placement {
        Placement::Device | Placement::Host => held.push(codes),
        Placement::Disk { .. } => l.free(codes),
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{inputs, recipe};
    use crate::source::{Group, StoragePolicy, Sublayer};
    use std::sync::Arc;

    /// Two int8 matrices of a layer with an f32 scale per row, and a norm that stays bf16.
    fn params() -> Vec<ParamInfo> {
        let param = |name: &str, shape: &[usize]| {
            let name: Arc<str> = format!("model.layers.0.{name}").into();
            ParamInfo {
                group: Group::Layer(0),
                sublayer: if shape.len() == 2 {
                    Sublayer::Mlp
                } else {
                    Sublayer::Attention
                },
                name,
                shape: shape.to_vec(),
            }
        };
        vec![
            param("mlp.up_proj.weight", &[256, 64]),
            param("mlp.down_proj.weight", &[64, 128]),
            param("input_layernorm.weight", &[64]),
        ]
    }

    const CODES: [u64; 2] = [256 * (64 + 4), 64 * (128 + 4)];
    const NUMBERS: [u64; 2] = [256 * 64, 64 * 128];
    const NORM: u64 = 2 * 64;

    fn all() -> Active {
        Active::new(params().iter().map(|p| p.name.to_string()))
    }

    fn peak(quantized: bool, place: Placement, walk: impl Fn(&mut Ledger, &Model, &Inputs)) -> u64 {
        let recipe = recipe("[memory]\nfrozen_weights = \"int8\"");
        let mut inputs = inputs(all(), crate::engine::Gradients::Keep);
        inputs.strategy.placement = place;
        if quantized {
            inputs.strategy.storage =
                StoragePolicy::new(&recipe.memory.storage_rules(), recipe.model.dtype, &params(), |_| false).unwrap();
        }
        let mut ledger = Ledger::new(false);
        let mut spec = crate::plan::tests::spec();
        spec.layers.truncate(1);
        let model = Model::of(&spec, params(), &inputs.strategy.storage, &inputs.adapters);
        walk(&mut ledger, &model, &inputs);
        let peak = ledger.peak;
        // All simulated memory was freed.
        let more = ledger.alloc(Kind::Data, 1 << 40);
        assert_eq!(ledger.peak, 1 << 40);
        ledger.free(more);
        peak
    }

    #[test]
    fn numbers_of_a_weight_are_here_beside_its_codes_while_it_is_loaded() {
        assert_eq!(
            peak(false, Placement::Device, load),
            2 * (NUMBERS[0] + NUMBERS[1]) + NORM,
            "dense weights are read where they stay"
        );
        let first = 2 * NUMBERS[0] + CODES[0];
        let second = CODES[0] + 2 * NUMBERS[1] + CODES[1];
        assert_eq!(peak(true, Placement::Device, load), first.max(second));
        // Through a file: one weight at a time.
        assert_eq!(peak(true, Placement::Disk { head_rows: None }, load), first);
        assert_eq!(peak(false, Placement::Disk { head_rows: None }, load), 0);
    }

    #[test]
    fn a_block_that_leaves_is_coded_one_weight_after_another() {
        // bf16 with the low two bytes of the master.
        let walk = |l: &mut Ledger, model: &Model, inputs: &Inputs| turn(l, model, inputs, &all(), (2, 2));
        assert_eq!(peak(false, Placement::Device, walk), 0);
        let low = 2 * (NUMBERS[0] + NUMBERS[1] + NORM / 2);
        let first = 4 * NUMBERS[0] + (2 * NUMBERS[0]).max(CODES[0]);
        let second = CODES[0] + 4 * NUMBERS[1] + (2 * NUMBERS[1]).max(CODES[1]);
        assert_eq!(peak(true, Placement::Device, walk), low + first.max(second));
        assert_eq!(peak(true, Placement::Disk { head_rows: None }, walk), low + first);
    }
}
