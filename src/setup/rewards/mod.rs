//! Rewards of answers: checks of the text, a reward model, a local program. Several rewards are summed with weights.

pub mod checks;
mod contents;
mod model;
mod numbers;
mod program;
mod schema;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use crate::base::units::{self, count};
use crate::base::worker::{self, ProcessRights};
use crate::base::{Error, Result, files, memory, secrets};
use crate::data::prompts::Prompt;
use crate::recipe::RlSection;
use candle_core::Device;
pub use contents::{RewardContents, contents};
use fancy_regex::Regex;
use model::RewardModel;
pub use model::RewardModelSpec;
use program::RewardProgram;
// For the fuzz targets.
#[doc(hidden)]
pub use program::score as score_of_line;
use schema::Schema;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// An answer to score.
pub struct RewardInput<'a> {
    pub prompt: &'a Prompt,
    /// The answer without special tokens.
    pub text: &'a str,
    /// Number of tokens with the stop token.
    pub tokens: usize,
    /// True if the answer ended with a stop token.
    pub finished: bool,
}

/// The kind of a reward, checked as far as possible without starting a program or loading a model.
enum RewardKind {
    Exact,
    Numeric,
    Regex(Regex),
    Json(Option<Schema>),
    Length { free: usize, longest: usize },
    Model(String),
    Program(String),
}

enum Judge {
    Text(RewardKind),
    Model(Box<RewardModel>),
    Program(RewardProgram),
}

/// One reward with its name in the metrics and its weight in the sum.
pub struct WeightedReward {
    pub name: String,
    pub weight: f64,
    judge: Judge,
}

pub struct Rewards(pub Vec<WeightedReward>);

const KNOWN: &str =
    "exact, numeric, regex:PATTERN, json, json:SCHEMA-FILE, length:TOKENS, model:DIRECTORY, program:COMMAND";

/// The name of a reward and its argument.
fn split(text: &str) -> (&str, Option<&str>) {
    match text.split_once(':') {
        Some((name, argument)) => (name.trim(), Some(argument.trim()).filter(|a| !a.is_empty())),
        None => (text.trim(), None),
    }
}

impl RewardKind {
    fn parse(text: &str, longest: usize) -> Result<Self> {
        let (name, argument) = split(text);
        let fault = |what: &str| {
            Error::usage(what)
                .at(RlSection::rewards)
                .found(format!("`{}`", secrets::mask(text)))
                .expected(KNOWN)
        };
        match (name, argument) {
            ("exact", None) => Ok(Self::Exact),
            ("numeric", None) => Ok(Self::Numeric),
            ("regex", Some(pattern)) => Regex::new(pattern).map(Self::Regex).map_err(|e| {
                fault("the pattern of a `regex:` reward is not valid")
                    .expected("a regular expression")
                    .cause(e)
            }),
            ("json", None) => Ok(Self::Json(None)),
            ("json", Some(file)) => {
                let text = files::read_text(Path::new(file))?;
                let value: Value = serde_json::from_str(&text).map_err(|e| {
                    Error::new("the file of a `json:` reward is not valid JSON")
                        .at(file)
                        .cause(e)
                })?;
                let schema = Schema::new(value).map_err(|e| e.within(file))?;
                Ok(Self::Json(Some(schema)))
            }
            ("length", Some(free)) => match free.parse() {
                Ok(free) if free < longest => Ok(Self::Length { free, longest }),
                _ => Err(fault(
                    "a `length:` reward needs a number of tokens below `rlhf.max_completion_length`",
                )),
            },
            ("model", Some(dir)) => Ok(Self::Model(dir.to_string())),
            ("program", Some(command)) => Ok(Self::Program(command.to_string())),
            ("exact" | "numeric", Some(_)) => Err(fault("this reward takes no argument")),
            ("regex" | "length" | "model" | "program", None) => Err(fault("this reward needs an argument")),
            _ => Err(fault("this reward does not exist")),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Numeric => "numeric",
            Self::Regex(_) => "regex",
            Self::Json(_) => "json",
            Self::Length { .. } => "length",
            Self::Model(_) => "model",
            Self::Program(_) => "program",
        }
    }

    fn needs_answer(&self) -> bool {
        matches!(self, Self::Exact | Self::Numeric)
    }

    /// The score of a reward that uses only the text.
    fn score(&self, answer: &RewardInput) -> f64 {
        let known = answer.prompt.answer.as_ref().unwrap_or(&Value::Null);
        match self {
            Self::Exact => checks::exact(answer.text, known),
            Self::Numeric => checks::numeric(answer.text, known),
            Self::Regex(pattern) => checks::regex(answer.text, pattern),
            Self::Json(schema) => checks::json(answer.text, schema.as_ref()),
            Self::Length { free, longest } => checks::length(answer.tokens, *free, *longest),
            Self::Model(_) | Self::Program(_) => f64::NAN,
        }
    }
}

/// For the fuzzer: the scores of a text by the rewards that use only the text, and whether the known answer has several numbers.
#[doc(hidden)]
pub fn scores_of_text(pattern: &str, schema: Value, known: &Value, text: &str) -> ([Option<f64>; 4], bool) {
    let regex = Regex::new(pattern).ok();
    let schema = Schema::new(schema).ok();
    let scores = [
        Some(checks::exact(text, known)),
        Some(checks::numeric(text, known)),
        regex.map(|pattern| checks::regex(text, &pattern)),
        schema.map(|schema| checks::json(text, Some(&schema))),
    ];
    (scores, checks::has_several_numbers(known))
}

/// For the fuzzer: the words of the command of a reward program.
#[doc(hidden)]
pub fn command_words(command: &str) -> Option<Vec<String>> {
    program::words(command).ok()
}

fn kinds(rlhf: &RlSection) -> Result<Vec<RewardKind>> {
    if rlhf.rewards.is_empty() {
        return Err(
            Error::usage("`rlhf.rewards` is missing: the run has no reward to maximize")
                .expected(KNOWN)
                .hint("write `rewards = [\"numeric\"]` below `[rlhf]`, or the argument `rlhf.rewards=numeric`"),
        );
    }
    if !rlhf.reward_weights.is_empty() && rlhf.reward_weights.len() != rlhf.rewards.len() {
        return Err(
            Error::usage("`rlhf.reward_weights` has another length than `rlhf.rewards`")
                .found(format!("{} weights", rlhf.reward_weights.len()))
                .expected(format!("{}, one for each reward", rlhf.rewards.len())),
        );
    }
    let kind = |text: &String| RewardKind::parse(text, rlhf.max_completion_length);
    rlhf.rewards.iter().map(kind).collect()
}

/// Checks the rewards of a recipe and the rows they score; starts no program, loads no model.
///
/// Errors: an unknown reward; an invalid pattern, schema or directory; a row without its answer; no training row with a number
/// for `numeric`.
pub fn check(rlhf: &RlSection, prompts: &[Prompt], eval: &[Prompt]) -> Result<()> {
    for kind in kinds(rlhf)? {
        if let RewardKind::Model(dir) = &kind {
            RewardModel::describe(dir)?;
        }
        let without = prompts
            .iter()
            .chain(eval)
            .find(|p| kind.needs_answer() && p.answer.is_none());
        if let Some(prompt) = without {
            return Err(Error::new(format!(
                "the reward `{}` needs the right answer of each row",
                kind.name()
            ))
            .at(&prompt.place)
            .found(format!(
                "fields {}",
                prompt.columns.keys().cloned().collect::<Vec<_>>().join(", ")
            ))
            .expected(format!("a field `{}` (`rlhf.answer_column`)", rlhf.answer_column)));
        }
        if let (RewardKind::Numeric, Some(first)) = (&kind, prompts.first())
            && !prompts
                .iter()
                .any(|p| p.answer.as_ref().is_some_and(checks::has_number))
        {
            return Err(Error::new("no known answer has a number for the reward `numeric`")
                .at(&first.place)
                .found(program::shown(
                    &first.answer.as_ref().map_or(String::new(), Value::to_string),
                ))
                .expected(format!(
                    "a number in the field `{}` (`rlhf.answer_column`)",
                    rlhf.answer_column
                ))
                .hint("use the reward `exact`, or name the field with the numbers: `rlhf.answer_column=NAME`"));
        }
    }
    Ok(())
}

/// What the user should know about the rewards of these prompts, which `check` accepts: answers that cannot be scored, or
/// perhaps not as intended.
///
/// Errors: as `check`.
pub fn warnings(rlhf: &RlSection, prompts: &[Prompt], eval: &[Prompt]) -> Result<Vec<String>> {
    let all = || prompts.iter().chain(eval);
    let mut out = Vec::new();
    for (kind, text) in kinds(rlhf)?.into_iter().zip(&rlhf.rewards) {
        match kind {
            RewardKind::Numeric => {
                let said = |is_meant: &dyn Fn(&Value) -> bool, what: &str| {
                    let is_meant = |p: &&Prompt| p.answer.as_ref().is_some_and(is_meant);
                    let first = all().find(is_meant)?;
                    let (some, of) = (all().filter(is_meant).count(), all().count());
                    let (some, of) = (count(some as u64), count(of as u64));
                    Some(format!(
                        "{some} of {of} known answers have {what} (for example {})",
                        first.place
                    ))
                };
                let none = "no number: the reward `numeric` does not score the answers to these prompts";
                let several =
                    "several numbers, as `12:30` and `1.000.000` have: the reward `numeric` compares only the last one";
                out.extend(said(&|answer: &Value| !checks::has_number(answer), none));
                out.extend(said(&checks::has_several_numbers, several));
            }
            RewardKind::Model(dir) => {
                let most = RewardModel::describe(&dir)?.spec.max_positions;
                let prompt = all().map(|p| p.ids.len()).max().unwrap_or(0);
                let longest = prompt.saturating_add(rlhf.max_completion_length);
                if longest > most {
                    out.push(format!(
                        "a prompt with its answer may have {} tokens, the reward `{text}` reads at most {} \
                         (`max_position_embeddings`): longer answers get no score; lower `rlhf.max_completion_length`",
                        count(longest as u64),
                        count(most as u64)
                    ));
                }
            }
            _ => {}
        }
    }
    Ok(out)
}

/// The memory of the reward models for the plan, from configs and headers. A model that is not available costs nothing:
/// loading it later reports the error.
///
/// Errors: rewards that do not exist.
pub fn costs(rlhf: &RlSection) -> Result<Vec<RewardModelSpec>> {
    let cost = |kind: RewardKind| match kind {
        RewardKind::Model(dir) => RewardModel::cost(&dir).ok(),
        _ => None,
    };
    Ok(kinds(rlhf)?.into_iter().filter_map(cost).collect())
}

/// The programs that `Rewards::open` starts, each by its command without secrets and its rights in words: a recipe may come from somebody
/// else.
///
/// Errors: rewards that do not exist.
pub fn programs(rlhf: &RlSection) -> Result<Vec<(String, String)>> {
    let network = match (rlhf.reward_network, worker::can_take_network()) {
        (true, _) => "with network and all variables of the environment",
        (false, true) => "without network, without variables that hold secrets",
        (false, false) => "with network (this system cannot refuse it), without variables that hold secrets",
    };
    let memory = rlhf.reward_memory.map_or(String::new(), |most| {
        format!(", with at most {} of memory", units::bytes(most))
    });
    let rights = format!("{network}{memory}; it can read and write your files");
    let command = |kind: RewardKind| match kind {
        RewardKind::Program(command) => Some((secrets::mask(&command), rights.clone())),
        _ => None,
    };
    Ok(kinds(rlhf)?.into_iter().filter_map(command).collect())
}

impl Rewards {
    /// Loads models and starts programs.
    pub fn open(rlhf: &RlSection, device: &Device) -> Result<Self> {
        let mut rewards: Vec<WeightedReward> = Vec::new();
        for (i, kind) in kinds(rlhf)?.into_iter().enumerate() {
            let base = kind.name();
            let same = rewards
                .iter()
                .filter(|r| r.name.trim_end_matches(char::is_numeric) == base);
            let name = match same.count() {
                0 => base.to_string(),
                n => format!("{base}{}", n + 1),
            };
            let judge = match kind {
                RewardKind::Model(dir) => Judge::Model(Box::new(RewardModel::open(&dir, device)?)),
                RewardKind::Program(command) => Judge::Program(RewardProgram::start(
                    &command,
                    Duration::from_secs_f64(rlhf.reward_timeout),
                    rlhf.reward_restarts,
                    ProcessRights {
                        network: rlhf.reward_network,
                        memory: rlhf.reward_memory.or_else(memory::available),
                    },
                )?),
                text => Judge::Text(text),
            };
            let weight = rlhf.reward_weights.get(i).copied().unwrap_or(1.0);
            rewards.push(WeightedReward { name, weight, judge });
        }
        Ok(Self(rewards))
    }

    /// Returns `[rewards][answers]`; NaN if a reward gives no score for an answer.
    ///
    /// Errors: a model gives a score that is not finite; those of a program.
    pub fn scores(&mut self, answers: &[RewardInput]) -> Result<Vec<Vec<f64>>> {
        let one = |reward: &mut WeightedReward| match &mut reward.judge {
            Judge::Text(kind) => Ok(answers.iter().map(|a| kind.score(a)).collect()),
            Judge::Model(model) => model.scores(answers),
            Judge::Program(program) => program.scores(&answers.iter().map(row).collect::<Vec<_>>()),
        };
        self.0.iter_mut().map(one).collect()
    }

    /// Returns `[answers]`: the weighted sum of the scores that are not NaN; NaN if there are none.
    pub fn total(&self, scores: &[Vec<f64>]) -> Vec<f64> {
        let answers = scores.first().map_or(0, Vec::len);
        let sum = |i: usize| {
            let known = self.0.iter().zip(scores).filter(|(_, s)| !s[i].is_nan());
            known.fold(f64::NAN, |sum, (r, s)| {
                let sum = if sum.is_nan() { 0.0 } else { sum };
                sum + r.weight * s[i]
            })
        };
        (0..answers).map(sum).collect()
    }
}

/// The JSON that a reward program receives: the row, the prompt and the answer.
fn row(answer: &RewardInput) -> Value {
    let mut row = answer.prompt.columns.clone();
    if let Some(known) = &answer.prompt.answer {
        row.entry("answer").or_insert_with(|| known.clone());
    }
    row.insert("prompt".into(), answer.prompt.shown.clone());
    row.insert("completion".into(), json!(answer.text));
    row.insert("completion_tokens".into(), json!(answer.tokens));
    row.insert("finished".into(), json!(answer.finished));
    Value::Object(row)
}
