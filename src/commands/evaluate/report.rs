//! The result of an evaluation, as text and as JSON.

use crate::engine::Totals;
use serde_json::{Value, json};

/// How a number is displayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberDisplay {
    /// 0 to 1, displayed in percent.
    Part,
    Number,
}

#[derive(Debug, Clone, PartialEq)]
struct Metric {
    name: &'static str,
    value: f64,
    measure: NumberDisplay,
    /// A description of the measured value.
    what: &'static str,
}

#[derive(Debug, Clone, PartialEq)]
pub struct EvaluateReport {
    /// `rows`, `pairs`, `judged`, `prompts` or `reward`.
    pub kind: &'static str,
    pub rows: usize,
    pub totals: Option<Totals>,
    more: Vec<Metric>,
    /// The model that was used, if it differs from the given name.
    pub notes: Vec<String>,
}

impl EvaluateReport {
    fn new(kind: &'static str, rows: usize, totals: Option<Totals>) -> Self {
        Self {
            kind,
            rows,
            totals,
            more: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// A report with the loss of a language model.
    pub(super) fn of_loss(kind: &'static str, rows: usize, totals: Totals) -> Self {
        Self::new(kind, rows, Some(totals))
    }

    /// A report of a reward model.
    pub(super) fn of_scores(rows: usize, totals: Totals) -> Self {
        Self::new("reward", rows, Some(totals))
    }

    pub(super) fn of_answers(rows: usize) -> Self {
        Self::new("prompts", rows, None)
    }

    pub(super) fn add(&mut self, name: &'static str, value: f64, measure: NumberDisplay, what: &'static str) {
        self.more.push(Metric {
            name,
            value,
            measure,
            what,
        });
    }

    /// Returns a number by its name in the JSON object.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.json()[name].as_f64()
    }

    fn scores(&self) -> bool {
        self.kind == "reward"
    }

    pub fn json(&self) -> Value {
        let mut out = json!({"kind": self.kind, "rows": self.rows});
        if let Some(totals) = &self.totals {
            let loss = totals.loss();
            out["loss"] = json!(loss);
            if self.scores() {
                out["tokens"] = json!(totals.tokens);
            } else {
                out["perplexity"] = json!(loss.exp());
                out["tokens"] = json!(totals.trained);
                out["token_accuracy"] = json!(totals.correct as f64 / totals.trained as f64);
            }
        }
        for found in &self.more {
            out[found.name] = json!(found.value);
        }
        out
    }

    pub fn text(&self) -> String {
        let mut lines: Vec<(&str, String)> = Vec::new();
        if let Some(totals) = &self.totals {
            let loss = totals.loss();
            lines.push(("loss", format!("{loss:.4}")));
            if !self.scores() {
                let part = 100.0 * totals.correct as f64 / totals.trained.max(1) as f64;
                lines.push(("perplexity", format!("{:.3}", loss.exp())));
                lines.push(("tokens", format!("{} trained, in {} rows", totals.trained, self.rows)));
                lines.push((
                    "token_accuracy",
                    format!("{part:.1} % of them are the most likely token"),
                ));
            }
        }
        for f in &self.more {
            let value = match f.measure {
                NumberDisplay::Part => format!("{:.1} %", 100.0 * f.value),
                NumberDisplay::Number => format!("{:.4}", f.value),
            };
            lines.push((f.name, format!("{value}  {}", f.what)));
        }
        if self.totals.is_none() || self.scores() || self.kind == "pairs" {
            let what = if self.kind == "prompts" { "prompts" } else { "pairs" };
            lines.push(("rows", format!("{} {what}", self.rows)));
        }
        let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let lines: Vec<String> = lines
            .iter()
            .map(|(name, text)| format!("{name:<width$}  {text}"))
            .collect();
        lines.join("\n")
    }
}
