//! Stages `pretrain` and `sft`: rows of files, mean cross-entropy.

use super::{BatchSource, Stage, StageContext, places, rows_of};
use crate::base::{Error, Result};
use crate::data::order::{BatchStream, eval_batches};
use crate::data::{Batch, Dataset, DatasetSpec, RowPosition, RowStream, Source};
use crate::engine::Engine;
use crate::setup::rows;
use crate::setup::sources::{RowSet, sources};
use crate::sft::CausalLm;

/// The rows of a run: all of them in an order, or read during the run.
enum RowSupply<'a> {
    Set(BatchStream<'a>),
    Stream(Box<RowStream<'a>>),
}

struct SftSource<'a> {
    rows: RowSupply<'a>,
    train: &'a Dataset,
    eval: Option<&'a Dataset>,
    /// Tokens per batch of the evaluation.
    eval_tokens: usize,
    /// With packing: the tokens for which a micro-batch has space.
    capacity: Option<usize>,
    /// Tokens, and space for tokens, since the last report.
    used: (usize, usize),
}

pub(super) fn open<'a>(setting: StageContext<'a>) -> Result<Stage<'a>> {
    let (recipe, model) = (setting.recipe, setting.model);
    let rows = if recipe.data.streaming {
        let sources = sources(recipe, RowSet::Train)?;
        let screen = rows::screen(recipe)?;
        let spec = DatasetSpec {
            screen: screen.as_ref(),
            ..rows::spec(&sources, &recipe.data, recipe.train.stage, model.spec.vocab)
        };
        let (order, window) = (setting.stream.spec(), recipe.data.shuffle_window);
        let stream = RowStream::new(&spec, &model.tokenizer, model.template(), order, window)?;
        RowSupply::Stream(Box::new(stream))
    } else {
        RowSupply::Set(setting.stream)
    };
    Ok(Stage {
        objective: Box::new(
            CausalLm::new(setting.spec.vocab).with_label_smoothing(recipe.train.label_smoothing_factor),
        ),
        batches: Box::new(SftSource {
            rows,
            train: setting.train,
            eval: setting.eval,
            eval_tokens: recipe.train.batch_size * recipe.data.max_length,
            capacity: recipe
                .data
                .packing
                .then_some(recipe.data.packing_length * recipe.train.batch_size),
            used: (0, 0),
        }),
    })
}

impl BatchSource for SftSource<'_> {
    fn epoch_after(&self, steps: u64) -> f64 {
        match &self.rows {
            RowSupply::Set(stream) => stream.epoch_after(steps),
            RowSupply::Stream(stream) => stream.epoch() as f64,
        }
    }

    fn window(&mut self, step: u64, _: &Engine) -> Result<Vec<Batch>> {
        let window = match &mut self.rows {
            RowSupply::Set(stream) => stream.window(step)?,
            RowSupply::Stream(stream) => stream.step(step)?,
        };
        if let Some(capacity) = self.capacity {
            self.used.0 += window.iter().map(Batch::len).sum::<usize>();
            self.used.1 += capacity * window.len();
        }
        Ok(window)
    }

    fn rows(&self, step: u64, sources: &[Source]) -> Result<Vec<Vec<RowPosition>>> {
        match &self.rows {
            RowSupply::Set(stream) => rows_of(self.train, stream, step, sources),
            RowSupply::Stream(stream) => {
                let used = stream.used(step).unwrap_or_default().iter();
                Ok(used.map(|rows| places(rows, sources)).collect())
            }
        }
    }

    fn eval(&self) -> Result<Vec<Batch>> {
        let batches = self.eval.map(|eval| eval_batches(eval, self.eval_tokens).collect());
        batches.unwrap_or(Ok(Vec::new()))
    }

    fn state(&self, steps: u64) -> Result<Option<Vec<u8>>> {
        match &self.rows {
            RowSupply::Set(_) => Ok(None),
            RowSupply::Stream(stream) => stream.state(steps).map(Some),
        }
    }

    fn restore(&mut self, state: &[u8]) -> Result<()> {
        match &mut self.rows {
            RowSupply::Set(_) => Err(
                Error::new("the checkpoint has a position in rows that are read during the run")
                    .hint("set `data.streaming` as in the run that wrote it"),
            ),
            RowSupply::Stream(stream) => stream.restore(state),
        }
    }

    fn metrics(&mut self) -> Vec<(&'static str, f64)> {
        let mut out = Vec::new();
        let (tokens, space) = std::mem::take(&mut self.used);
        if space > 0 {
            out.push(("packing_fill", tokens as f64 / space as f64));
        }
        if let RowSupply::Stream(stream) = &mut self.rows {
            let counts = stream.take_counts();
            out.push(("truncated_rows", counts.truncated_rows as f64));
            out.push(("dropped_rows", counts.dropped_rows as f64));
        }
        out
    }
}
