//! Votes of several judges about a row: the share of votes for it, and the agreement over all rows (Krippendorff's alpha).
//!
//! A vote is a text, a truth value or a number; null and an empty text are no vote. A column may also hold a list of
//! votes, or an object with the scores of `chosen` and `rejected`. For a pair a vote names the better side: `chosen` or
//! `rejected`; true, 1 and positive numbers mean `chosen`; false, 0 and negative numbers mean `rejected`.

use crate::read::{Row, kind};
use crate::rows;
use ft_base::units::count;
use ft_base::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;

/// The columns with votes, and the required agreement.
#[derive(Debug, Clone, PartialEq)]
pub struct Judges {
    /// One column for each judge, or columns with lists of votes.
    pub columns: Vec<String>,
    /// Smallest share of votes for a row that is kept.
    pub min_agreement: f64,
}

/// The votes about a row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Votes {
    pub cast: Vec<String>,
    /// For a pair, the share of votes for `chosen`; for a judged answer, that of its label; for other rows, that of the
    /// most frequent vote. `None`: no votes.
    pub share: Option<f64>,
}

impl Judges {
    /// Errors: a column is missing, or a value is not a vote.
    pub(super) fn votes(&self, row: &Row) -> Result<Votes> {
        let has = |name: &str| row.fields.get(name).is_some_and(|v| !v.is_null());
        let pair = has("chosen") && has("rejected");
        let mut cast = Vec::new();
        for column in &self.columns {
            let Some(value) = row.fields.get(column) else {
                let names: Vec<&str> = row.fields.keys().map(String::as_str).collect();
                return Err(
                    Error::format(format!("the column `{column}` with a judge's vote is missing"))
                        .at(&row.place)
                        .found(format!("columns {}", names.join(", ")))
                        .expected("a vote, or null")
                        .hint("correct `Judges::columns`"),
                );
            };
            let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            for value in list {
                let vote = vote(value, pair).ok_or_else(|| {
                    Error::format(format!("`{column}` is not a valid vote"))
                        .at(&row.place)
                        .found(format!("{}: {}", kind(value), crate::read::clip(&value.to_string())))
                        .expected(if pair {
                            "`chosen`, `rejected` or `tie`; a truth value; a number; scores: {\"chosen\": 7, \"rejected\": 3}"
                        } else {
                            "a text, a number, a truth value, or a list of these"
                        })
                })?;
                if let Vote::Cast(vote) = vote {
                    cast.push(vote);
                }
            }
        }
        let label = row.fields.get("label").and_then(rows::label).filter(|_| !pair);
        let wanted = match label {
            _ if pair => Some("chosen".to_string()),
            // The votes of judged answers may be truth values in each of the forms of `label`.
            Some(label) if cast.iter().all(|v| rows::label(&Value::String(v.clone())).is_some()) => {
                cast.iter_mut().for_each(|v| {
                    *v = rows::label(&Value::String(v.clone())).unwrap_or_default().to_string();
                });
                Some(label.to_string())
            }
            _ => None,
        };
        let share = |wanted: &String| {
            let half = |v: &String| f64::from(u8::from(v == wanted)) + 0.5 * f64::from(u8::from(pair && v == "tie"));
            cast.iter().map(half).sum::<f64>() / cast.len() as f64
        };
        let share = match &wanted {
            _ if cast.is_empty() => None,
            Some(wanted) => Some(share(wanted)),
            None => cast.iter().map(share).reduce(f64::max),
        };
        Ok(Votes { cast, share })
    }
}

/// The value of a judge's column.
enum Vote {
    /// A vote as text.
    Cast(String),
    /// The judge did not vote.
    Missing,
}

/// The vote in `value`; `None`: the value is not valid.
fn vote(value: &Value, pair: bool) -> Option<Vote> {
    let side = |difference: f64| {
        let name = match difference {
            d if d > 0.0 => "chosen",
            d if d < 0.0 => "rejected",
            _ => "tie",
        };
        Some(Vote::Cast(name.to_string()))
    };
    match value {
        Value::Null => Some(Vote::Missing),
        Value::String(text) if text.trim().is_empty() => Some(Vote::Missing),
        Value::String(text) => {
            let text = text.trim().to_lowercase();
            match text.parse::<f64>() {
                Ok(number) if pair => vote(&Value::from(number), pair),
                Ok(number) => Some(Vote::Cast(number_text(number).unwrap_or(text))),
                _ if pair && !["chosen", "rejected", "tie"].contains(&text.as_str()) => match text.as_str() {
                    "true" => side(1.0),
                    "false" => side(-1.0),
                    _ => None,
                },
                _ => Some(Vote::Cast(text)),
            }
        }
        Value::Bool(yes) if pair => side(if *yes { 1.0 } else { -1.0 }),
        // 0 as a truth value means that `chosen` is not the better side.
        Value::Number(n) if pair => side(n.as_f64().map(|x| if x == 0.0 { -1.0 } else { x })?),
        Value::Number(n) => {
            let text = n.as_f64().and_then(number_text);
            Some(Vote::Cast(text.unwrap_or_else(|| value.to_string())))
        }
        Value::Bool(_) => Some(Vote::Cast(value.to_string())),
        Value::Object(scores) if pair => {
            let score = |name: &str| scores.get(name)?.as_f64();
            side(score("chosen")? - score("rejected")?)
        }
        Value::Object(_) | Value::Array(_) => None,
    }
}

/// One text for each number: a column with integers has `4`, one with fractions `4.0`. `None`: f64 does not have every
/// integer of this size.
fn number_text(number: f64) -> Option<String> {
    if number.abs() >= (1_u64 << 53) as f64 || number.is_nan() {
        None
    } else if number.fract() == 0.0 {
        Some((number as i64).to_string())
    } else {
        Some(number.to_string())
    }
}

/// Counts votes over all rows.
#[derive(Debug, Default)]
pub(super) struct VoteCounts {
    rows: usize,
    voted: usize,
    shares: f64,
    unanimous: usize,
    /// Pairs of votes about one row, each weighted with 1 / (votes of the row - 1).
    pairs: BTreeMap<(String, String), f64>,
}

/// Agreement of the judges.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Agreement {
    /// Rows with votes, and all rows.
    pub voted: usize,
    /// All rows.
    pub rows: usize,
    /// Mean share of votes for a row.
    pub share: f64,
    /// Rows on which all votes are equal.
    pub unanimous: usize,
    /// Krippendorff's alpha for categories: 1 is full agreement, 0 that of chance. `None`: no row has two votes, or all
    /// votes are equal.
    pub alpha: Option<f64>,
}

impl VoteCounts {
    pub(super) fn add(&mut self, votes: &Votes) {
        self.rows += 1;
        let Some(share) = votes.share else { return };
        self.voted += 1;
        self.shares += share;
        self.unanimous += usize::from(votes.cast.windows(2).all(|w| w[0] == w[1]));
        let weight = 1.0 / (votes.cast.len() as f64 - 1.0);
        for (i, a) in votes.cast.iter().enumerate() {
            for (_, b) in votes.cast.iter().enumerate().filter(|(j, _)| *j != i) {
                *self.pairs.entry((a.clone(), b.clone())).or_default() += weight;
            }
        }
    }

    pub(super) fn agreement(&self) -> Agreement {
        // Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability", nominal data.
        let mut totals: BTreeMap<&str, f64> = BTreeMap::new();
        for ((a, _), n) in &self.pairs {
            *totals.entry(a).or_default() += n;
        }
        let all: f64 = totals.values().sum();
        let observed: f64 = self.pairs.iter().filter(|((a, b), _)| a != b).map(|(_, n)| n).sum();
        let same: f64 = totals.values().map(|n| n * (n - 1.0)).sum();
        let expected = all * (all - 1.0) - same;
        Agreement {
            voted: self.voted,
            rows: self.rows,
            share: self.shares / self.voted.max(1) as f64,
            unanimous: self.unanimous,
            alpha: (expected > 0.0).then(|| 1.0 - (all - 1.0) * observed / expected),
        }
    }
}

impl Agreement {
    pub(super) fn text(&self) -> String {
        let alpha = self
            .alpha
            .map_or(String::new(), |a| format!(", Krippendorff's alpha {a:.3}"));
        format!(
            "judges: votes on {} of {} rows, {:.1} % of the votes agree with the row, {} rows unanimous{alpha}",
            count(self.voted as u64),
            count(self.rows as u64),
            100.0 * self.share,
            count(self.unanimous as u64),
        )
    }
}
