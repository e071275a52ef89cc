//! The sets of parameters that a run trains in turn, and the few of them that can have the highest memory peak.

use super::PlanInputs;
use super::model::PlanModel;
use crate::engine::ActiveSet;
use crate::setup::{ActivePeriod, ElementBytes, InactiveElements};
use crate::source::StoragePolicy;
use std::collections::BTreeMap;

/// Lowest layer and bytes of inactive masters of a turn.
type SetSize<'a> = (u64, u64, &'a ActivePeriod);
/// Shape of a set, storage and adapters of its layers, and whether another set follows.
type SetKey = (u64, Vec<u64>, bool);

/// Of sets that differ only in the index of their layer, returns those that can be the worst. A lower set saves more
/// layer inputs, a later one has more inactive masters. Memory is linear in both, so only corners of the hull matter.
pub(super) fn candidates<'a>(
    model: &PlanModel,
    inputs: &'a PlanInputs,
    element: ElementBytes,
) -> Vec<&'a ActivePeriod> {
    let layers = model.layers();
    let mut alike: BTreeMap<SetKey, Vec<SetSize>> = BTreeMap::new();
    for turn in inputs.turns.iter() {
        let kinds = turn.active.layers().map(|l| model.kind(l)).collect();
        let inactive = inputs.inactive_bytes(turn, element);
        let point = (turn.active.lowest_layer(layers) as u64, inactive, turn);
        let key = (turn.active.shape(), kinds, turn.deactivates);
        alike.entry(key).or_default().push(point);
    }
    // Layers below this one save no activations, so memory grows more slowly there.
    let bend = layers.saturating_sub(inputs.strategy.saved_layers) as u64;
    let mut out = Vec::new();
    for mut points in alike.into_values() {
        // Sorted by layer; of one layer only the turn with the most inactive bytes is needed.
        points.sort_by_key(|(layer, inactive, _)| (*layer, std::cmp::Reverse(*inactive)));
        let mut most = None;
        points.retain(|(_, inactive, _)| {
            let more = most.is_none_or(|m| *inactive > m);
            if more {
                most = Some(*inactive);
            }
            more
        });
        // Each side of the bend has its own hull: memory is linear only within a side, so a corner of one side need
        // not be a corner of the hull of all points.
        let split = points.partition_point(|(layer, ..)| *layer < bend);
        let (below, above) = points.split_at(split);
        out.extend(corners(below).into_iter().chain(corners(above)).map(|(.., turn)| turn));
    }
    out
}

/// The upper convex hull of points with rising layer and rising bytes: it contains the maximum of any linear sum.
fn corners<'a>(points: &[SetSize<'a>]) -> Vec<SetSize<'a>> {
    let mut hull: Vec<SetSize> = Vec::new();
    for &point in points {
        let rise = |a: &SetSize, b: &SetSize| (i128::from(b.0) - i128::from(a.0), i128::from(b.1) - i128::from(a.1));
        while let [.., a, b] = &hull[..] {
            let ((x1, y1), (x2, y2)) = (rise(a, b), rise(b, &point));
            // The slope must fall.
            if y1 * x2 > y2 * x1 {
                break;
            }
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

/// One turn for each of these sets, after all other sets were trained.
pub fn turns_of(model: &PlanModel, storage: &StoragePolicy, sets: Vec<ActiveSet>) -> Vec<ActivePeriod> {
    let inactive = |active: &ActiveSet| {
        let mut inactive = InactiveElements::default();
        let is_inactive = |name: &str| !active.wants(name) && sets.iter().any(|s| s.wants(name));
        for layer in 0..model.layers() {
            for p in model.layer(layer).filter(|p| is_inactive(&p.name)) {
                if storage.of(&p).is_quantized() {
                    inactive.quantized += p.elements() as u64
                } else {
                    inactive.dense += p.elements() as u64
                }
            }
        }
        let outside = model.outside().iter().filter(|p| is_inactive(&p.name));
        inactive.dense += outside.map(|p| p.elements() as u64).sum::<u64>();
        inactive
    };
    let turn = |active: &ActiveSet| ActivePeriod {
        active: active.clone(),
        inactive: inactive(active),
        deactivates: sets.len() > 1,
    };
    sets.iter().map(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ActiveSet;
    use crate::model::{families, shapes};
    use crate::plan::tests::inputs;
    use crate::recipe::Dtype;
    use crate::setup::InactiveElements;
    use crate::source::{Placement, StoragePolicy};

    fn layer(l: usize) -> ActiveSet {
        ActiveSet::new(["mlp.up_proj", "input_layernorm"].map(|p| format!("model.layers.{l}.{p}.weight")))
    }

    /// Layers in this order, each after those before it.
    fn chosen(order: &[usize], keep: usize, place: Placement, storage: StoragePolicy) -> Vec<usize> {
        let spec = families::read(&shapes::config("shape:qwen2.5-1.5b").unwrap().unwrap()).unwrap();
        let mut inputs = inputs(layer(0), crate::engine::GradientStorage::Keep);
        let turn = |(i, l): (usize, &usize)| ActivePeriod {
            inactive: InactiveElements {
                dense: 100 * i as u64,
                quantized: 0,
            },
            deactivates: true,
            ..ActivePeriod::alone(layer(*l))
        };
        inputs.turns = order.iter().enumerate().map(turn).collect();
        (
            inputs.strategy.saved_layers,
            inputs.strategy.placement,
            inputs.strategy.storage,
        ) = (keep, place, storage);
        let model = PlanModel::new(&spec, &inputs.strategy.storage, &inputs.adapters);
        let mut found: Vec<usize> = candidates(&model, &inputs, ElementBytes { stored: 2, master: 2 })
            .into_iter()
            .map(|t| t.active.lowest_layer(28))
            .collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn only_the_corners_of_what_is_possible_are_planned() {
        let bf16 = || StoragePolicy::dense(Dtype::Bf16);
        let up: Vec<usize> = (0..28).collect();
        let down: Vec<usize> = (0..28).rev().collect();
        // With descending order the lowest layer has the most inactive masters.
        assert_eq!(chosen(&down, 0, Placement::Device, bf16()), [0]);
        assert_eq!(chosen(&up, 0, Placement::Device, bf16()), [0, 27]);
        // Layers 20 and above save their activations.
        assert_eq!(chosen(&up, 8, Placement::Device, bf16()), [0, 19, 20, 27]);
        // With weights on the disk, inactive parameters need no memory.
        assert_eq!(chosen(&up, 8, Placement::Disk { head_rows: None }, bf16()), [0]);
        // A layer with another storage belongs to another group.
        let mut mixed = bf16();
        mixed.set(
            "model.layers.9.mlp.up_proj.weight".into(),
            Some(crate::quant::Format::Int8 { group: 0 }),
        );
        assert_eq!(chosen(&down, 0, Placement::Device, mixed), [0, 9]);
    }

    #[test]
    fn any_sum_is_largest_in_a_corner() {
        let turn = ActivePeriod::alone(layer(0));
        let inactive = [3, 9, 10, 40, 41, 55, 56, 57];
        let points: Vec<SetSize> = inactive
            .iter()
            .enumerate()
            .map(|(i, r)| (i as u64, *r, &turn))
            .collect();
        let hull = corners(&points);
        for factor in 0..60i64 {
            let best = |points: &[SetSize]| points.iter().map(|p| p.1 as i64 - factor * p.0 as i64).max();
            assert_eq!(best(&points), best(&hull), "{factor}");
        }
        assert!(hull.len() < points.len());
    }
}
