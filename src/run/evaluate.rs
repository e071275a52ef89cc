//! `ft eval`: loss and perplexity on a data file; exact matches where rows have an answer.

use super::setup::{Described, device};
use crate::base::{Error, Result, signal};
use crate::data::order::eval_batches;
use crate::data::{Dataset, dataset};
use crate::engine::{self, Totals};
use crate::recipe::{Dtype, RowFormat, TrainOn};
use crate::sft::CausalLm;
use serde_json::{Value, json};
use std::path::Path;

/// Tokens evaluated together.
const BATCH_TOKENS: usize = 2048;

#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    pub rows: usize,
    pub totals: Totals,
    /// Part of the rows with an answer that greedy decoding answers exactly.
    pub accuracy: Option<f64>,
}

impl Report {
    pub fn json(&self) -> Value {
        let mut out = json!({
            "loss": self.totals.loss(),
            "perplexity": self.totals.loss().exp(),
            "tokens": self.totals.trained,
            "rows": self.rows,
            "token_accuracy": self.totals.correct as f64 / self.totals.trained as f64,
        });
        if let Some(accuracy) = self.accuracy {
            out["accuracy"] = json!(accuracy);
        }
        out
    }

    pub fn text(&self) -> String {
        let loss = self.totals.loss();
        let mut out = format!(
            "loss        {loss:.4}\nperplexity  {:.3}\ntokens      {} trained, in {} rows",
            loss.exp(),
            self.totals.trained,
            self.rows
        );
        if let Some(accuracy) = self.accuracy {
            out += &format!("\naccuracy    {:.1} % exact answers", 100.0 * accuracy);
        }
        out
    }
}

/// `model` is a directory or hub id. Rows are cut at the model's own context length.
///
/// Errors: what is wrong with the model, the adapter or a row.
pub fn evaluate(model: &str, adapter: Option<&Path>, data: &Path, dtype: Option<Dtype>) -> Result<Report> {
    let described = Described::open(model, "main", None)?;
    let network = described.infer(adapter, dtype, &device("auto")?)?;
    let files = [data.display().to_string()];
    let spec = dataset::Spec {
        files: &files,
        format: RowFormat::Auto,
        max_length: described.spec.max_positions,
        train_on: TrainOn::Assistant,
        embedding_rows: described.spec.vocab,
    };
    let rows = Dataset::load(&spec, &described.tokenizer, described.template())?;
    let objective = CausalLm::new(described.spec.vocab);
    let mut totals = Totals::default();
    for batch in eval_batches(&rows, BATCH_TOKENS) {
        if let Some(s) = signal::received() {
            return Err(Error::signal(s, "stopped while evaluating"));
        }
        totals.add(engine::evaluate(&network, &objective, &batch)?);
    }
    if !totals.loss().is_finite() {
        return Err(Error::new("the loss is not finite")
            .at_path(data)
            .found(totals.loss_sum)
            .hint("check the weights, or use `--dtype f32`"));
    }
    let questions = rows.questions(&spec, &described.tokenizer, described.template(), usize::MAX)?;
    let accuracy = match questions.is_empty() {
        true => None,
        false => Some(super::samples::exact_matches(&described, &network, &questions)?),
    };
    Ok(Report {
        rows: rows.examples.len(),
        totals,
        accuracy,
    })
}
