//! What a run says of a step whose loss or gradient is not finite: its rows, and the state from which the run can go on.

use crate::base::{Error, ErrorKind, Result};
use crate::engine::window::rounds;
use crate::engine::{Engine, GradientStorage};
use crate::setup::sources::{RowSet, sources};
use crate::train::ended::FailedStep;
use crate::train::running::TrainingRun;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The most rows that the error names.
const SHOWN: usize = 8;
/// The most rows that `events.jsonl` names.
const LISTED: usize = 256;

impl TrainingRun<'_> {
    /// The event of a step that failed, and its error. If a number in its pass is not finite, both name the rows.
    pub(super) fn described(&self, engine: &Engine, step: u64, e: Error, place: FailedStep) -> (Value, Error) {
        let mut event = json!({"step": step, "reason": e.what()});
        let FailedStep::InThePass { of_all_ranks } = place else {
            return (event, e);
        };
        if e.kind() != ErrorKind::NonFinite {
            return (event, e);
        }
        let mut named = format!("step {step}");
        if let Some(micro) = engine.failed.index(step) {
            event["micro_batch"] = (micro + 1).into();
            named += &format!(", micro-batch {}", micro + 1);
        }
        // Without the names of its rows the error is still the one to report.
        let rows = self.suspects(engine, step, of_all_ranks).unwrap_or_default();
        if !rows.is_empty() {
            event["rows"] = json!(rows[..rows.len().min(LISTED)]);
            event["row_count"] = rows.len().into();
            named += &format!(": {}", listed(&rows));
        }
        let hint = [e.hint_text().map(str::to_string), self.left(engine, step)];
        let hint: Vec<String> = hint.into_iter().flatten().collect();
        let e = e.within(named);
        (event, if hint.is_empty() { e } else { e.hint(hint.join("; ")) })
    }

    /// The rows of the micro-batch that failed. If it is not known, those of the whole step; after an error of one rank, those
    /// of this rank.
    fn suspects(&self, engine: &Engine, step: u64, of_all_ranks: bool) -> Result<Vec<String>> {
        let all = self.batches.rows(step - 1, &sources(self.recipe, RowSet::Train)?)?;
        let filled: Vec<usize> = (0..all.len()).filter(|micro| !all[*micro].is_empty()).collect();
        let micro_batches = match engine.failed.index(step) {
            Some(micro) => vec![micro],
            None if self.ranks.several() && !of_all_ranks => {
                let own = rounds(&filled, &engine.team());
                own.iter()
                    .filter(|round| round.counts)
                    .map(|round| round.micro)
                    .collect()
            }
            None => filled,
        };
        // A row may have several pieces.
        let mut seen = BTreeSet::new();
        let rows = micro_batches.into_iter().filter_map(|micro| all.get(micro)).flatten();
        Ok(rows
            .map(|row| row.to_string())
            .filter(|row| seen.insert(row.clone()))
            .collect())
    }

    /// The state from which a run can go on after the error of `step`.
    fn left(&self, engine: &Engine, step: u64) -> Option<String> {
        let saved = match self.pace.saved {
            _ if step == 1 => return None,
            0 => "no state is saved".to_string(),
            saved if saved + 1 == step => return Some(format!("the state after step {saved} is saved")),
            saved => format!("the last saved state is that after step {saved}"),
        };
        let applied = engine.strategy.gradients != GradientStorage::Keep && engine.optimizer.has_updated(step);
        let at_once = applied || self.schedule.corrects_at_once();
        // With `save_steps = 0` the state before the step is not saved for any other reason either.
        Some(if at_once && self.recipe.train.save_steps > 0 {
            format!("{saved}, because this run applies gradients as soon as they are computed")
        } else {
            saved
        })
    }
}

/// The first rows and the number of the others.
fn listed(rows: &[String]) -> String {
    let shown = rows[..rows.len().min(SHOWN)].join(", ");
    match rows.len() - rows.len().min(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_are_counted() {
        let rows: Vec<String> = (1..=10).map(|n| format!("a.jsonl:{n}")).collect();
        assert_eq!(listed(&rows[..2]), "a.jsonl:1, a.jsonl:2");
        assert!(listed(&rows[..8]).ends_with(", a.jsonl:8"));
        assert!(listed(&rows).ends_with(", a.jsonl:8 and 2 more"));
    }
}
