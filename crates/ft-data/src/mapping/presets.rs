//! Well-known datasets whose columns have no usual names or forms. They are recognized by their columns and by the
//! types of their values, never by a file name.

use super::path::{ColumnPath, PathValue, TextTemplate};
use super::{Mapper, RenderRules, RowPurpose};
use crate::Render;
use crate::layout::{ANSWERS, LISTS, PROMPTS};
use crate::read::clip;
use ft_base::{Error, Result};
use serde_json::{Map, Value, json};

/// A change of the values of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowConversion {
    /// `chosen` and `rejected` are conversations in one text: `Human: ...`, `Assistant: ...`.
    Transcripts,
    /// `completions` with scores: the best and the worst one are compared.
    Ratings,
    /// The known answer is the part after `####`.
    AfterHashes,
}

/// Columns with the known answer of a prompt, if no column has the usual name.
const KNOWN_ANSWERS: [&str; 4] = [
    "reward_model.ground_truth",
    "ground_truth",
    "final_answer",
    "expected_answer",
];
const HUMAN: &str = "\n\nHuman:";
const ASSISTANT: &str = "\n\nAssistant:";
/// Scores of a completion, the more exact one first: the mean of the ratings, and the rating as a whole.
const SCORES: [&str; 2] = ["fine-grained_score", "overall_score"];

/// Sets the columns and changes for a well-known dataset with this first row.
pub(super) fn recognize(out: &mut Mapper, fields: &Map<String, Value>, purpose: RowPurpose, rules: &RenderRules) {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let lists = LISTS.into_iter().chain(fields.contains_key("data").then_some("data"));
    let mut lists = lists.filter(|name| fields.get(*name).and_then(alternating).is_some());
    if let Some(name) = lists.next() {
        // A list of plain strings under another name than that of a conversation is ambiguous.
        if name != "data" || fields.keys().all(|key| key == "data" || key == "id") {
            out.preset = Some(match fields.get(name).and_then(in_pairs) {
                Some(_) => "turns in pairs",
                None => "turns as a list of texts",
            });
            out.columns.push(("messages".into(), ColumnPath::new(name)));
            return;
        }
    }
    let texts_of_answers = ColumnPath::new("answers.text");
    if purpose != RowPurpose::Prefer
        && text("context").is_some()
        && text("question").is_some()
        && matches!(texts_of_answers.find(fields), PathValue::Value(Value::Array(_)))
    {
        out.preset = Some("SQuAD");
        out.template = TextTemplate::new("{context}\n\n{question}").ok();
        let name = match purpose {
            RowPurpose::Ask => rules.answer,
            _ => "completion",
        };
        out.columns.push((name.into(), ColumnPath::new("answers.text[0]")));
        return;
    }
    if purpose == RowPurpose::Prefer {
        let sides = [text("chosen"), text("rejected")];
        let whole = sides.iter().all(|side| side.is_some_and(is_transcript));
        // `Mapper` is created for each file, and a model without a template reads the texts as they are.
        if whole && rules.template.is_some() && rules.render != Render::Plain && text("prompt").is_none() {
            out.preset = Some("transcripts");
            out.convert = Some(RowConversion::Transcripts);
        }
        let rated = fields.get("completions").and_then(Value::as_array);
        let rated = rated.is_some_and(|list| list.iter().all(|c| c.get("response").is_some_and(Value::is_string)));
        if rated && text("instruction").is_some() && !fields.contains_key("chosen") {
            out.preset = Some("UltraFeedback");
            out.columns.push(("chosen".into(), ColumnPath::new("chosen")));
            out.columns.push(("rejected".into(), ColumnPath::new("rejected")));
            out.convert = Some(RowConversion::Ratings);
        }
        return;
    }
    if purpose == RowPurpose::Ask {
        if text(rules.answer).is_some_and(|answer| answer.contains("\n#### ")) {
            out.preset = Some("GSM8K");
            out.convert = Some(RowConversion::AfterHashes);
        } else if !rules.answer.is_empty() && !fields.contains_key(rules.answer) {
            let paths = KNOWN_ANSWERS.map(ColumnPath::new);
            let found = paths
                .into_iter()
                .find(|path| matches!(path.find(fields), PathValue::Value(_)));
            out.columns.extend(found.map(|path| (rules.answer.to_string(), path)));
        }
    }
    if out.columns.is_empty() {
        out.columns = in_other_case(fields, purpose);
    }
}

/// Usual names that are written with capitals, such as `Question` and `Answer`; none if a column has a usual name.
fn in_other_case(fields: &Map<String, Value>, purpose: RowPurpose) -> Vec<(String, ColumnPath)> {
    let pairs: &[&str] = match purpose {
        RowPurpose::Prefer => &["chosen", "rejected", "label", "margin"],
        _ => &["chosen", "rejected", "text"],
    };
    let usual = || {
        PROMPTS
            .into_iter()
            .chain(ANSWERS)
            .chain(LISTS)
            .chain(pairs.iter().copied())
    };
    if usual().any(|name| fields.contains_key(name)) {
        return Vec::new();
    }
    let written = |name: &str| {
        let mut found = fields.keys().filter(|key| key.eq_ignore_ascii_case(name));
        match (found.next(), found.next()) {
            // A name with such characters would be read as a path.
            (Some(key), None) => Some(key).filter(|key| !key.contains(['.', '['])),
            _ => None,
        }
    };
    let has_prompt = written("prompt").is_some();
    let beside = ["context", "system"].into_iter().filter(|_| !has_prompt);
    let names = usual().filter(|name| !(has_prompt && *name == "input")).chain(beside);
    let found = names.filter_map(|name| Some((name, written(name)?)));
    found
        .map(|(name, key)| (name.to_string(), ColumnPath::new(key)))
        .collect()
}

/// A list of texts as messages: user and assistant in turn. Also a list of objects with a question and its answer.
pub(super) fn alternating(value: &Value) -> Option<Value> {
    if let Some(turns) = in_pairs(value) {
        return Some(turns);
    }
    let texts: Option<Vec<&str>> = value.as_array()?.iter().map(Value::as_str).collect();
    let texts = texts.filter(|texts| !texts.is_empty())?;
    let turn = |(i, text): (usize, &&str)| {
        let role = ["user", "assistant"][i % 2];
        json!({"role": role, "content": text})
    };
    Some(Value::Array(texts.iter().enumerate().map(turn).collect()))
}

/// A list of `{"human": ..., "assistant": ...}` as messages.
fn in_pairs(value: &Value) -> Option<Value> {
    let list = value.as_array().filter(|list| !list.is_empty())?;
    let pair = |turn: &Value| {
        let text = |name: &str| turn.get(name).and_then(Value::as_str);
        let question = text("human").or(text("user"))?;
        let answer = text("assistant").or(text("bot"))?;
        let both = [("user", question), ("assistant", answer)];
        Some(both.map(|(role, content)| json!({"role": role, "content": content})))
    };
    let turns: Option<Vec<_>> = list.iter().map(pair).collect();
    Some(Value::Array(turns?.into_iter().flatten().collect()))
}

fn is_transcript(text: &str) -> bool {
    text.trim_start().starts_with(HUMAN.trim_start()) && text.contains(ASSISTANT)
}

/// The messages of a conversation in one text.
fn transcript(text: &str) -> Result<Value> {
    let text = format!("\n\n{}", text.trim_start());
    let mut turns = Vec::new();
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (role, after) = match (rest.strip_prefix(HUMAN), rest.strip_prefix(ASSISTANT)) {
            (Some(after), _) => ("user", after),
            (_, Some(after)) => ("assistant", after),
            _ => break,
        };
        let ends = [after.find(HUMAN), after.find(ASSISTANT)];
        let end = ends.into_iter().flatten().min().unwrap_or(after.len());
        turns.push(json!({"role": role, "content": after[..end].trim()}));
        rest = &after[end..];
    }
    match turns.last() {
        Some(turn) if turn["role"] == "assistant" => Ok(Value::Array(turns)),
        _ => Err(Error::format("the transcript does not end with an answer")
            .found(clip(&text))
            .expected("`Human:` and `Assistant:` in turn, `Assistant:` last")),
    }
}

impl RowConversion {
    /// Changes the row. Returns why a row is not used.
    pub(super) fn apply(&self, fields: &mut Map<String, Value>) -> Result<Option<&'static str>> {
        match self {
            Self::AfterHashes => Ok(None),
            Self::Transcripts => {
                for name in ["chosen", "rejected"] {
                    if let Some(Value::String(text)) = fields.get(name) {
                        let turns = transcript(text).map_err(|e| e.within(format!("`{name}`")))?;
                        fields.insert(name.to_string(), turns);
                    }
                }
                Ok(None)
            }
            Self::Ratings => {
                let list = fields.get("completions").and_then(Value::as_array);
                let score = |c: &Value| SCORES.iter().find_map(|name| c.get(*name).and_then(Value::as_f64));
                let mut scored: Vec<(f64, &str)> = list
                    .into_iter()
                    .flatten()
                    .filter_map(|c| Some((score(c)?, c.get("response")?.as_str()?)))
                    .collect();
                // A stable sort: among equals the first one is the best, and the last one the worst.
                scored.sort_by(|a, b| b.0.total_cmp(&a.0));
                let (Some(&(best, chosen)), Some(&(worst, rejected))) = (scored.first(), scored.last()) else {
                    return Ok(Some("no completion has a score"));
                };
                if best == worst || chosen == rejected {
                    return Ok(Some("all completions are rated equal"));
                }
                let (chosen, rejected) = (json!(chosen), json!(rejected));
                fields.insert("chosen".into(), chosen);
                fields.insert("rejected".into(), rejected);
                Ok(None)
            }
        }
    }
}
