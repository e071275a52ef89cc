//! What the ranks write in parts is the state that rank 0 collects from all of them: every element once, with the same bits.

use super::divided::MomentValues;
use super::outer::OuterConfig;
use super::ranks_tests::{Case, FULL, batches, engine};
use super::{ActiveSet, Ema, EmaConfig, Engine};
use crate::base::Result;
use crate::comm::Collective;
use crate::comm::threads;
use crate::ops::Dtype;
use crate::optim::config::StateDtype;
use crate::quant::Format;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bits of tensors by name; of each those from an element on.
type Tensors = BTreeMap<String, (usize, Vec<u64>)>;

fn bits(values: &MomentValues) -> Vec<u64> {
    match values {
        MomentValues::U8(codes) => codes.iter().map(|code| u64::from(*code)).collect(),
        MomentValues::F32(values) => values.iter().map(|x| u64::from(x.to_bits())).collect(),
    }
}

/// The whole state on rank 0 (of the weights `names`), as a checkpoint in one has it.
fn whole(engine: &Engine, names: &[String]) -> Result<Tensors> {
    let mut out = Tensors::new();
    for name in names {
        let (_, found) = out.entry(name.clone()).or_default();
        engine.exact(name, &mut |values| {
            found.extend(bits(&MomentValues::F32(values)));
            Ok(())
        })?;
    }
    for moment in engine.saved_moments() {
        let (_, found) = out.entry(format!("{}#{}", moment.name, moment.part)).or_default();
        engine.moment(&moment, &mut |values| {
            found.extend(bits(&values));
            Ok(())
        })?;
        assert_eq!(found.len(), moment.elements);
    }
    for (name, _) in engine.ema.iter().flat_map(Ema::saved) {
        let (_, found) = out.entry(format!("average {name}")).or_default();
        engine.average_values(name, &mut |values| {
            found.extend(bits(&MomentValues::F32(values)));
            Ok(())
        })?;
    }
    Ok(out)
}

/// The part of this rank.
fn own(engine: &Engine, names: &[String]) -> Result<Tensors> {
    let state = engine.own_state();
    let mut out = Tensors::new();
    for name in names {
        let mut found = Vec::new();
        state.exact(name, &mut |values| {
            found.extend(bits(&MomentValues::F32(values)));
            Ok(())
        })?;
        let range = state.elements(name)?;
        assert_eq!(found.len(), range.len(), "{name}");
        out.insert(name.clone(), (range.start, found));
    }
    for moment in engine.saved_moments() {
        let mut found = Vec::new();
        state.moment(&moment, &mut |values| {
            found.extend(bits(&values));
            Ok(())
        })?;
        let range = state.elements_of_moment(&moment)?;
        assert_eq!(found.len(), range.len(), "{}#{}", moment.name, moment.part);
        out.insert(format!("{}#{}", moment.name, moment.part), (range.start, found));
    }
    for (name, _) in engine.ema.iter().flat_map(Ema::saved) {
        let mut found = Vec::new();
        state.average(name, &mut |values| {
            found.extend(bits(&values));
            Ok(())
        })?;
        out.insert(format!("average {name}"), (state.elements(name)?.start, found));
    }
    Ok(out)
}

/// How a case trains beside its settings.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// Two steps with all parameters of the case.
    Plain,
    /// As `Plain`, with averages.
    Averaged,
    /// Two blocks, one after the other: the first one is inactive at the end.
    Blocks,
    /// Each rank alone, with an average at the end.
    Apart,
}

fn train(case: Case, way: Way, comm: Arc<dyn Collective>) -> Result<(Option<Tensors>, Tensors)> {
    let (mut engine, active) = engine(case, comm);
    let mut names: Vec<String> = active.names().map(str::to_string).collect();
    match way {
        Way::Plain => {}
        Way::Averaged => engine.ema = Some(Ema::new(EmaConfig { decay: 0.9, ramp: true })),
        Way::Blocks => {
            // Weights that were never trained too.
            names = engine.store.params().iter().map(|p| p.name.to_string()).collect();
        }
        Way::Apart => {
            engine.neftune_noise_alpha = 0.0;
            engine.train_apart(OuterConfig {
                every: 2,
                last: 2,
                learning_rate: 0.7,
                momentum: 0.9,
                nesterov: true,
                proximal: 0.0,
            });
        }
    }
    for step in 1..=2 {
        let block = match (way, step) {
            (Way::Blocks, step) => {
                let part = if step == 1 { "layers.0." } else { "layers.3." };
                let own = names
                    .iter()
                    .filter(|name| name.contains(part) || name.contains("embed"));
                ActiveSet::new(own.cloned())
            }
            _ => active.clone(),
        };
        if way == Way::Blocks {
            engine.switch(&block, |name| name.contains("embed"))?;
        }
        engine.step(step, &batches(5, step as u32), &block, 1e-3)?;
    }
    Ok((engine.by_root(|| whole(&engine, &names))?, own(&engine, &names)?))
}

#[test]
fn the_parts_of_all_ranks_are_the_state() {
    let bf16 = Case {
        dtype: Dtype::Bf16,
        ..FULL
    };
    let int8 = Case {
        state: StateDtype::Int8,
        ..bf16
    };
    let masked = Case {
        part: "layers.0.mlp",
        masked: true,
        ..FULL
    };
    let sharded = Case { sharded: true, ..bf16 };
    let nf4 = Case {
        format: Some(Format::Nf4 { double: true }),
        ..bf16
    };
    let sharded_nf4 = Case { sharded: true, ..nf4 };
    let in_node = Case { in_node: true, ..bf16 };
    let small = Case {
        part: "layers.1.",
        ..bf16
    };
    let here = ["here"; 3];
    let machines = ["a", "a", "b", "b"];
    let cases: [(&str, Case, Way, &[&str]); 10] = [
        ("f32", FULL, Way::Plain, &here[..2]),
        ("bf16 with masters", bf16, Way::Averaged, &here),
        ("8-bit moments", int8, Way::Plain, &here),
        ("masks", masked, Way::Averaged, &here),
        ("sharded", sharded, Way::Averaged, &here),
        ("sharded blocks", sharded, Way::Blocks, &here),
        ("blocks over nf4", nf4, Way::Blocks, &here),
        ("sharded blocks over nf4", sharded_nf4, Way::Blocks, &here[..2]),
        ("sharded in each machine", in_node, Way::Blocks, &machines),
        ("apart", small, Way::Apart, &here),
    ];
    for (what, case, way, hosts) in cases {
        let mut found = threads::run_on(hosts, |comm| train(case, way, comm).unwrap());
        let want = found[0].0.take().unwrap();
        let mut writers = vec![0; hosts.len()];
        for (name, (_, want)) in &want {
            let mut joined: Vec<Option<u64>> = vec![None; want.len()];
            for (rank, (_, own)) in found.iter().enumerate() {
                let (first, values) = &own[name];
                writers[rank] += values.len();
                for (to, value) in joined[*first..].iter_mut().zip(values) {
                    assert!(to.replace(*value).is_none(), "{what}: {name} is written twice");
                }
            }
            let same = joined.iter().zip(want).all(|(a, b)| *a == Some(*b));
            assert!(same, "{what}: {name}");
        }
        assert!(found.iter().all(|(_, own)| own.len() == want.len()), "{what}");
        assert!(writers.iter().all(|n| *n > 0), "{what}: {writers:?}");
    }
}

/// Parts begin inside a matrix, and pieces are longer than the part of a small one.
#[test]
fn large_matrices_are_cut() {
    let found = threads::run(2, |comm| train(FULL, Way::Plain, comm).unwrap().1);
    let cut = |name: &&String| found.iter().all(|own| !own[*name].1.is_empty());
    assert!(found[0].keys().filter(cut).count() > 3);
}
