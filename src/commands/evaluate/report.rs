//! The result of an evaluation, as text and as JSON.

use crate::base::units::{count, counted};
use crate::engine::Totals;
use crate::report;
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

    /// Lines of at most `columns`, with a description beside each number, or below it if the terminal is too narrow.
    pub fn text(&self, columns: Option<usize>) -> String {
        // Name, number and description.
        let mut lines: Vec<(&str, String, String)> = Vec::new();
        if let Some(totals) = &self.totals {
            let loss = totals.loss();
            lines.push(("loss", format!("{loss:.4}"), String::new()));
            if !self.scores() {
                let part = 100.0 * totals.correct as f64 / totals.trained.max(1) as f64;
                lines.push(("perplexity", format!("{:.3}", loss.exp()), String::new()));
                let rows = counted(self.rows, "row");
                lines.push(("tokens", count(totals.trained), format!("trained, in {rows}")));
                let what = "of the trained tokens are the most likely token";
                lines.push(("token_accuracy", format!("{part:.1} %"), what.into()));
            }
        }
        for f in &self.more {
            let value = match f.measure {
                NumberDisplay::Part => format!("{:.1} %", 100.0 * f.value),
                NumberDisplay::Number => format!("{:.4}", f.value),
            };
            lines.push((f.name, value, f.what.into()));
        }
        if self.totals.is_none() || self.scores() || self.kind == "pairs" {
            let what = if self.kind == "prompts" { "prompt" } else { "pair" };
            lines.push(("rows", counted(self.rows, what), String::new()));
        }
        let width = lines.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
        let number = lines.iter().map(|(_, number, _)| number.len()).max().unwrap_or(0);
        let line = |(name, value, what): &(&str, String, String)| {
            report::with_note(format!("{name:<width$}  {value:<number$}  "), what, columns)
        };
        lines.iter().map(line).collect::<String>().trim_end().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_stay_in_their_column_in_a_narrow_terminal() {
        let totals = Totals {
            loss_sum: 10.0,
            weight: 5,
            trained: 12_345,
            correct: 1234,
            ..Totals::default()
        };
        let mut found = EvaluateReport::of_loss("pairs", 1, totals);
        let what = "pairs whose chosen answer has the higher implicit reward, beta * log(p / p_reference)";
        found.add("reward_accuracy", 0.5, NumberDisplay::Part, what);
        let text = found.text(Some(80));
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        let row = |name: &str, rest: &str| format!("{name:<15}  {rest}");
        for line in [
            row("loss", "2.0000\n"),
            row("tokens", "12,345  trained, in 1 row\n"),
            row("reward_accuracy", "50.0 %  pairs whose"),
            row("", "        reward, beta * log(p / p_reference)\n"),
            row("rows", "1 pair"),
        ] {
            assert!(text.contains(&line), "{line:?}\n{text}");
        }
        assert!(found.text(None).lines().any(|line| line.ends_with(what)));
    }
}
