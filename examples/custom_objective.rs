//! An objective of your own: cross-entropy plus a penalty on large final hidden states (activation regularization,
//! Merity et al. 2017). Trains the last layer of a model for ten steps: `cargo run --release --example custom_objective`

use candle_core::{Device, Tensor};
use ft::base::Result;
use ft::data::{Batch, Example};
use ft::engine::{ActiveSet, Engine, StepStrategy};
use ft::hf;
use ft::model::{Head, LossGradients, Objective, ObjectiveNeeds};
use ft::ops::{Dtype, step_stats::StepStats};
use ft::optim::{Optimizer, OptimizerConfig};
use ft::sft::CausalLm;
use std::path::Path;

/// Loss: mean over the tokens of cross-entropy + `penalty` / 2 · |h|² / D. `h` `[N, D]`.
struct Regularized {
    cross_entropy: CausalLm,
    penalty: f64,
}

impl Objective for Regularized {
    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        stats: &StepStats,
    ) -> Result<LossGradients> {
        let mut gradients = self.cross_entropy.evaluate(h, head, batch, need, stats)?;
        if let Some(dh) = gradients.dh {
            let width = h.dim(1)? as f64;
            let own = (h * (self.penalty * need.scale / width))?;
            gradients.dh = Some((dh + own)?);
        }
        Ok(gradients)
    }
}

fn main() -> Result<()> {
    let opened = hf::open(Path::new("assets/tiny"), Dtype::F32, &Device::Cpu)?;
    let ids = opened
        .tokenizer
        .encode("Two plus three is five. Five minus two is three.", true)?;
    let trained = vec![true; ids.len()];
    let batch = Batch::from_examples(&[Example { ids, trained }]);

    let last = format!("model.layers.{}.", opened.model.network.layers() - 1);
    let names = opened.model.network.source.params().iter().map(|p| p.name.to_string());
    let active = ActiveSet::new(names.filter(|name| name.starts_with(&last)));
    let objective = Regularized {
        cross_entropy: CausalLm::new(opened.model.network.spec.vocab),
        penalty: 0.01,
    };
    let optimizer = Optimizer::new(OptimizerConfig::default());
    let strategy = StepStrategy::new(Dtype::F32);
    let mut engine = Engine::new(opened.model, Box::new(objective), optimizer, strategy, &active)?;
    for step in 1..=10 {
        let report = engine.step(step, std::slice::from_ref(&batch), &active, 1e-3)?;
        println!("step {step}: loss {:.4}", report.totals.loss());
    }
    Ok(())
}

#[cfg(test)]
#[test]
fn runs() {
    main().unwrap();
}
