//! Memory of the weights that are held at one time.

use super::Inputs;
use super::model::Model;
use crate::engine::Active;
use crate::model::Spec;
use crate::source::Placement;
use crate::source::{Group, ParamInfo, StoragePolicy};
use std::collections::BTreeMap;

/// Buffers of a source that streams layers: two layers, and two chunks of the head.
const SLOTS: u64 = 2;

/// Returns the rows per chunk if the output projection is held only in chunks.
pub(super) fn head_in_pieces(spec: &Spec, place: Placement, active: &Active) -> Option<usize> {
    match place {
        Placement::Disk { head_rows: Some(rows) } if !active.contains(spec.head_name()) => Some(rows),
        _ => None,
    }
}

/// True if rows of the embedding are read one by one.
pub(super) fn embedding_in_rows(spec: &Spec, place: Placement, active: &Active) -> bool {
    let name = crate::model::spec::EMBEDDING;
    match place {
        Placement::Host | Placement::Disk { .. } if !active.contains(name) => {
            !(spec.tied && place.travels().flatten().is_none())
        }
        _ => false,
    }
}

/// Bytes of the prepacked copies of frozen weights.
pub(super) fn copies(model: &Model, inputs: &Inputs, active: &Active) -> u64 {
    let Some(copies) = &inputs.strategy.packed_copies else {
        return 0;
    };
    model.sum(active, |p| {
        if active.contains(&p.name) {
            0
        } else {
            copies.bytes(p, &inputs.strategy.storage)
        }
    })
}

/// Bytes of the held weights, and of the double buffer for layers from the disk.
pub(super) fn held(model: &Model, storage: &StoragePolicy, stored: u64, place: Placement, active: &Active) -> u64 {
    let spec = model.spec;
    // Active parameters are not quantized.
    let bytes = |p: &ParamInfo| {
        if active.contains(&p.name) {
            stored * p.elements() as u64
        } else {
            storage.of(p).bytes(&p.shape)
        }
    };
    let Some(head_rows) = place.travels() else {
        return model.sum(active, bytes);
    };
    let always = |p: &ParamInfo| {
        if &*p.name == spec.head_name() {
            head_rows.is_none()
        } else {
            p.group == Group::Head
        }
    };
    let stays = |p: &ParamInfo| active.contains(&p.name) || always(p);
    let held = model.sum(active, |p| if stays(p) { bytes(p) } else { 0 });
    // A buffer has the size of the largest streamed layer; equal parameters of two layers share their buffer.
    let mut room: BTreeMap<String, u64> = BTreeMap::new();
    let mut travelling = 0;
    for run in model.runs(active) {
        let mut travels = false;
        for p in model.layer(run.first).filter(|p| !stays(p)) {
            let below = p.name.splitn(4, '.').nth(3).unwrap_or_default().to_string();
            let most = room.entry(below).or_default();
            *most = (*most).max(bytes(&p));
            travels = true;
        }
        travelling += if travels { run.count as u64 } else { 0 };
    }
    let places = SLOTS.min(travelling) * room.values().sum::<u64>();
    let pieces = match head_in_pieces(spec, place, active) {
        Some(rows) => {
            let rows = rows.min(spec.vocab);
            let count = SLOTS.min(spec.vocab.div_ceil(rows.max(1)) as u64);
            count * stored * (rows * spec.hidden) as u64
        }
        None => 0,
    };
    held + places + pieces
}
