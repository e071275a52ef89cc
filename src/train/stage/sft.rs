//! Stages `pretrain` and `sft`: rows of files, mean cross-entropy.

use super::{BatchSource, Stage, StageContext};
use crate::base::Result;
use crate::data::order::{BatchStream, eval_batches};
use crate::data::{Batch, Dataset};
use crate::engine::Engine;
use crate::sft::CausalLm;

struct SftSource<'a> {
    stream: BatchStream<'a>,
    eval: Option<&'a Dataset>,
    /// Tokens per batch of the evaluation.
    eval_tokens: usize,
}

pub(super) fn open<'a>(setting: StageContext<'a>) -> Stage<'a> {
    let recipe = setting.recipe;
    Stage {
        objective: Box::new(CausalLm::new(setting.spec.vocab)),
        feed: Box::new(SftSource {
            stream: setting.stream,
            eval: setting.eval,
            eval_tokens: recipe.train.batch_size * recipe.data.max_length,
        }),
    }
}

impl BatchSource for SftSource<'_> {
    fn epoch_after(&self, steps: u64) -> f64 {
        self.stream.epoch_after(steps)
    }

    fn window(&mut self, step: u64, _: &Engine) -> Result<Vec<Batch>> {
        Ok(self.stream.window(step))
    }

    fn eval(&self) -> Result<Vec<Batch>> {
        let batches = self.eval.map(|eval| eval_batches(eval, self.eval_tokens).collect());
        Ok(batches.unwrap_or_default())
    }
}
