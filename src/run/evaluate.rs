//! `ft eval`: loss and perplexity on a data file, exact matches where rows have an answer; of a reward model how often the
//! chosen side of a pair scores higher.

use super::setup::{Described, device};
use super::stage::preference;
use crate::base::{Error, Result, progress, signal};
use crate::data::order::eval_batches;
use crate::data::preference::{Want, load};
use crate::data::{Batch, Dataset, dataset};
use crate::engine::{self, Totals};
use crate::model::{Network, Objective};
use crate::recipe::{Dtype, RowFormat, TrainOn};
use crate::report;
use crate::rlhf::preference::Reward;
use crate::sft::CausalLm;
use serde_json::{Value, json};
use std::path::Path;

/// Tokens evaluated together, and pairs.
const BATCH_TOKENS: usize = 2048;
const BATCH_PAIRS: usize = 8;

#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Rows; for a reward model pairs.
    pub rows: usize,
    pub totals: Totals,
    /// Part of the rows with an answer that greedy decoding answers exactly; of the pairs whose chosen side scores
    /// higher.
    pub accuracy: Option<f64>,
    /// Of a reward model: by how much the chosen side scores higher, and the mean score.
    pub margin_and_score: Option<(f64, f64)>,
}

impl Report {
    pub fn json(&self) -> Value {
        let loss = self.totals.loss();
        let mut out = match self.margin_and_score {
            Some((margin, score)) => json!({
                "loss": loss,
                "margin": margin,
                "mean_reward": score,
                "tokens": self.totals.tokens,
                "rows": self.rows,
            }),
            None => json!({
                "loss": loss,
                "perplexity": loss.exp(),
                "tokens": self.totals.trained,
                "rows": self.rows,
                "token_accuracy": self.totals.correct as f64 / self.totals.trained as f64,
            }),
        };
        if let Some(accuracy) = self.accuracy {
            out["accuracy"] = json!(accuracy);
        }
        out
    }

    pub fn text(&self) -> String {
        let (loss, rows) = (self.totals.loss(), self.rows);
        let percent = self.accuracy.map(|accuracy| 100.0 * accuracy);
        if let Some((margin, score)) = self.margin_and_score {
            return format!(
                "loss        {loss:.4}\naccuracy    {:.1} % of {rows} pairs\nmargin      {margin:.4}\nscore       \
                 {score:.4} on average",
                percent.unwrap_or_default()
            );
        }
        let mut out = format!(
            "loss        {loss:.4}\nperplexity  {:.3}\ntokens      {} trained, in {rows} rows",
            loss.exp(),
            self.totals.trained,
        );
        if let Some(percent) = percent {
            out += &format!("\naccuracy    {percent:.1} % exact answers");
        }
        out
    }
}

/// `model` is a directory or hub id. Rows are taken whole, as in training; what is longer than the model's positions is told.
///
/// Errors: what is wrong with the model, the adapter or a row.
pub fn evaluate(model: &str, adapter: Option<&Path>, data: &Path, dtype: Option<Dtype>) -> Result<Report> {
    let described = Described::open(model, "main", None)?;
    let (network, score) = described.infer_scored(adapter, dtype, &device("auto")?)?;
    let files = [data.display().to_string()];
    let spec = dataset::Spec {
        files: &files,
        format: RowFormat::Auto,
        max_length: usize::MAX,
        train_on: TrainOn::Assistant,
        embedding_rows: described.spec.vocab,
    };
    if let Some(score) = score {
        let pad = match adapter {
            // As in its training.
            Some(_) => preference::pad_id(&described.tokenizer),
            None => described.config.opt_usize0("pad_token_id")?.map(|id| id as u32),
        };
        let reward = Reward::with_head(score, pad, 0.0)?;
        let pairs = load(&spec, Want::WholePairs, &described.tokenizer, described.template())?;
        let rows: Vec<usize> = (0..pairs.examples.len()).collect();
        let batches = rows
            .chunks(BATCH_PAIRS)
            .map(|rows| preference::batch(&pairs, rows, None));
        let totals = totals(&network, &reward, batches, 2 * rows.len(), data)?;
        let means = reward.metrics();
        let mean = |name| {
            means
                .iter()
                .find(|(n, _)| *n == name)
                .map_or(f64::NAN, |(_, mean)| *mean)
        };
        return Ok(Report {
            rows: rows.len(),
            accuracy: Some(mean("accuracy")),
            margin_and_score: Some((mean("margin"), mean("mean_reward"))),
            totals,
        });
    }
    let rows = Dataset::load(&spec, &described.tokenizer, described.template())?;
    if let Some(line) = super::rows::beyond(rows.stats.longest, described.spec.max_positions) {
        report::warn(&line);
    }
    let objective = CausalLm::new(described.spec.vocab);
    let batches = eval_batches(&rows, BATCH_TOKENS).map(Ok);
    let totals = totals(&network, &objective, batches, rows.examples.len(), data)?;
    let questions = rows.questions(&spec, &described.tokenizer, described.template(), usize::MAX)?;
    let accuracy = match questions.is_empty() {
        true => None,
        false => Some(super::samples::exact_matches(&described, &network, &questions)?),
    };
    Ok(Report {
        rows: rows.examples.len(),
        totals,
        accuracy,
        margin_and_score: None,
    })
}

/// Errors: a signal; a loss that is not finite.
fn totals(
    network: &Network,
    objective: &dyn Objective,
    batches: impl Iterator<Item = Result<Batch>>,
    rows: usize,
    data: &Path,
) -> Result<Totals> {
    let mut totals = Totals::default();
    let phase = progress::phase("evaluating", rows, "rows");
    for batch in batches {
        if let Some(s) = signal::received() {
            return Err(Error::signal(s, "stopped while evaluating"));
        }
        let batch = batch?;
        totals.add(engine::evaluate(network, objective, &batch)?);
        phase.add(batch.documents.len().saturating_sub(1) as u64);
    }
    if totals.weight == 0 {
        return Err(Error::new("there is nothing to evaluate: no row has a trained token")
            .at_path(data)
            .hint("see with `ft data` which tokens are trained; a `max_length` that cuts every answer off does this"));
    }
    match totals.loss().is_finite() {
        true => Ok(totals),
        false => Err(Error::new("the loss is not finite")
            .at_path(data)
            .found(totals.loss_sum)
            .hint("check the weights, or use `--dtype f32`")),
    }
}
