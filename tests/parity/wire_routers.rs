//! The library calls of the tests of routers.

use crate::wire::{Document, batch, open, values};
use candle_core::Tensor;
use ft::base::Result;
use ft::data::Batch;
use ft::engine::{ActiveSet, GradientPass};
use ft::model::{GradSink, Param, RouterLosses, Routers};
use ft::ops::step_stats::StepStats;
use ft::sft::CausalLm;
use std::collections::BTreeMap;
use std::path::Path;

type Gradients = BTreeMap<String, Vec<f64>>;

/// Sums the gradients of all micro-batches.
#[derive(Default)]
struct Sum(Gradients);

impl GradSink for Sum {
    fn wants(&self, _name: &str) -> bool {
        true
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        let new = values(&gradient);
        let sum = self
            .0
            .entry(param.name.to_string())
            .or_insert_with(|| vec![0.0; new.len()]);
        sum.iter_mut().zip(new).for_each(|(sum, g)| *sum += g);
        Ok(())
    }
}

/// Loss, metrics of the routers and gradients of all parameters, with the losses of the routers, in a step with the documents
/// as a micro-batch `times` times.
pub fn router_losses_and_grads(
    dir: &Path,
    documents: &[Document],
    losses: RouterLosses,
    times: usize,
) -> (f64, BTreeMap<&'static str, f64>, Gradients) {
    let network = open(dir, None);
    let objective = CausalLm::new(network.spec.vocab);
    let batches: Vec<Batch> = (0..times).map(|_| batch(documents)).collect();
    let active = ActiveSet::new(network.spec.params().into_iter().map(|p| p.name.to_string()));
    let run = |saved_layers| {
        let (routers, mut sink) = (Routers::new(losses), Sum::default());
        let step_stats = StepStats::new(&network.device).unwrap();
        let pass = GradientPass {
            saved_layers,
            routers: Some(&routers),
            ..GradientPass::new(&network, &objective, &active, &step_stats)
        };
        let totals = pass.window(&batches, &mut sink).unwrap();
        let loss = totals.with(step_stats.read().unwrap()).loss();
        (loss, routers.metrics().into_iter().collect(), sink.0)
    };
    let found = run(0);
    assert!(found == run(network.layers()), "saved activations give the same bits");
    found
}
