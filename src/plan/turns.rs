//! Weights on their way, on paper: read one at a time before the run, and turned from codes to numbers and back
//! between two blocks.

use super::ledger::{Kind, Ledger};
use super::{Inputs, Place};
use crate::engine::Active;
use crate::quant::Storage;
use crate::source::ParamInfo;

/// What a weight is read into: on the host.
fn aside(inputs: &Inputs) -> Kind {
    match inputs.on_gpu {
        true => Kind::OnHost,
        false => Kind::Scratch,
    }
}

/// Every weight of the model comes in. A weight that becomes codes is here twice for a moment: its numbers, and the codes.
pub(super) fn load(l: &mut Ledger, params: &[ParamInfo], inputs: &Inputs) {
    l.moment("loading");
    let kind = match inputs.place {
        Place::Device => Kind::Weights,
        _ => Kind::OnHost,
    };
    let mut held = Vec::new();
    for p in params {
        let storage = inputs.storage.of(p);
        let numbers = match storage {
            Storage::Coded(..) => inputs.file_bytes * p.elements() as u64,
            Storage::Dense(_) => 0,
        };
        let numbers = l.hold(aside(inputs), numbers);
        match inputs.place {
            Place::Device | Place::Host => held.push(l.hold(kind, storage.bytes(&p.shape))),
            // The codes go to a file of their own before anything is held.
            Place::Disk { .. } if storage.is_coded() => l.touch(aside(inputs), storage.bytes(&p.shape)),
            Place::Disk { .. } => {}
        }
        l.drop(numbers);
    }
    l.drop_all(held);
}

/// A block that was trained goes, its weights that were codes before one by one: their exact values stay beside the codes. What
/// `weights::held` and the exact values of other blocks take is held by the caller. Bytes of a number of the model's
/// type, and of what a master knows beyond it.
pub(super) fn turn(l: &mut Ledger, params: &[ParamInfo], inputs: &Inputs, active: &Active, (stored, low): (u64, u64)) {
    l.moment("a block becomes codes again");
    let leaving = || params.iter().filter(|p| active.contains(&p.name));
    let elements: usize = leaving().map(ParamInfo::elements).sum();
    let mut held = vec![l.hold(aside(inputs), low * elements as u64)];
    for p in leaving() {
        let storage = inputs.storage.of(p);
        if !storage.is_coded() {
            continue;
        }
        let n = p.elements() as u64;
        if inputs.on_gpu {
            held.push(l.hold(Kind::OnHost, stored * n));
        }
        let exact = l.hold(aside(inputs), 4 * n);
        // The lower half is copied to join it with the upper one.
        l.touch(aside(inputs), low * n);
        let codes = l.hold(Kind::Weights, storage.bytes(&p.shape));
        l.drop(exact);
        match inputs.place {
            Place::Device | Place::Host => held.push(codes),
            Place::Disk { .. } => l.drop(codes),
        }
    }
    l.drop_all(held);
}
