//! Preference rows: what their fields mean.
//!
//! - A pair: `prompt`, `chosen`, `rejected`, as text or as lists of messages, optionally with `margin`. Without
//!   `prompt`, what both sides begin with is the prompt.
//! - A judged row: `prompt`, `completion`, `label` (true: desirable).

use super::super::chat;
use super::super::read::{Row, clip, kind};
use super::super::rows::{are_chats, is_chat, list, missing, names, string, tools, wrong};
use crate::base::{Error, Result};
use crate::recipe::RowFormat;
use serde_json::{Map, Value};

/// A prompt and what may follow it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Sides<const N: usize> {
    Text {
        prompt: String,
        completions: [String; N],
    },
    Chat {
        prompt: Vec<Value>,
        completions: [Vec<Value>; N],
        tools: Option<Value>,
    },
}

/// A row, understood.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Judgement {
    /// Chosen, then rejected.
    Pair {
        sides: Sides<2>,
        margin: Option<f32>,
    },
    Judged {
        sides: Sides<1>,
        label: bool,
    },
}

const SHAPE: &str = "prompt, chosen, rejected (text or messages; optional margin), or prompt, completion, label";

/// Errors, with the place of the row: a field is missing or has another type, both sides are equal.
pub(super) fn understand(row: &Row) -> Result<Judgement> {
    let has = |name: &str| row.fields.get(name).is_some_and(|v| !v.is_null());
    let judgement = if has("chosen") || has("rejected") {
        pair(&row.fields)
    } else if has("completion") || has("label") {
        judged(&row.fields)
    } else {
        Err(Error::new("this is not a preference row")
            .found(names(&row.fields))
            .expected(SHAPE)
            .hint("rename the fields; stages `sft` and `pretrain` learn from rows with one answer"))
    };
    judgement.map_err(|e| e.within(&row.place))
}

fn field<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<&'a Value> {
    match fields.get(name) {
        None | Some(Value::Null) => Err(missing(fields, name, RowFormat::Preference).expected(SHAPE)),
        Some(value) => Ok(value),
    }
}

fn messages(fields: &Map<String, Value>, name: &str) -> Result<Vec<Value>> {
    let list = list(fields, name, RowFormat::Preference)?;
    chat::messages(&list).map_err(|e| e.within(format!("`{name}`")))
}

fn pair(fields: &Map<String, Value>) -> Result<Judgement> {
    let (chosen, rejected) = (field(fields, "chosen")?, field(fields, "rejected")?);
    let prompt = fields.get("prompt").filter(|v| !v.is_null());
    let kinds = [Some(chosen), Some(rejected), prompt].map(|v| v.map(is_chat));
    if kinds[0] != kinds[1] || (kinds[2].is_some() && kinds[2] != kinds[0]) {
        let text = |v: Option<&Value>| v.map_or("nothing", kind);
        return Err(Error::new("`prompt`, `chosen` and `rejected` are of different kinds")
            .found(format!(
                "{}, {} and {}",
                text(prompt),
                text(Some(chosen)),
                text(Some(rejected))
            ))
            .expected("all text, or all lists of messages")
            .hint("where `chosen` and `rejected` hold the whole conversation, leave `prompt` out"));
    }
    if chosen == rejected {
        return Err(Error::new("`chosen` and `rejected` are equal")
            .found(clip(&chosen.to_string()))
            .expected("two different answers to one prompt")
            .hint("remove the row: nothing can be preferred in it"));
    }
    let sides = if kinds[0] == Some(true) {
        let (chosen, rejected) = (messages(fields, "chosen")?, messages(fields, "rejected")?);
        let (prompt, chosen, rejected) = match prompt {
            Some(_) => (messages(fields, "prompt")?, chosen, rejected),
            None => {
                let shared = shared(&chosen, &rejected);
                let (prompt, chosen) = chosen.split_at(shared);
                (prompt.to_vec(), chosen.to_vec(), rejected[shared..].to_vec())
            }
        };
        chats(prompt, [chosen, rejected], fields)?
    } else {
        let (chosen, rejected) = (string(chosen, "chosen")?, string(rejected, "rejected")?);
        let (prompt, chosen, rejected) = match prompt {
            Some(prompt) => (string(prompt, "prompt")?, chosen, rejected),
            None => {
                let at = shared_text(chosen, rejected);
                (&chosen[..at], &chosen[at..], &rejected[at..])
            }
        };
        Sides::Text {
            prompt: prompt.to_string(),
            completions: [chosen.to_string(), rejected.to_string()],
        }
    };
    let margin = match fields.get("margin") {
        None | Some(Value::Null) => None,
        Some(value) => {
            let number = match value {
                Value::String(s) => s.trim().parse::<f64>().ok().filter(|n| n.is_finite()),
                other => other.as_f64(),
            };
            Some(number.ok_or_else(|| wrong(value, "margin", "a number"))? as f32)
        }
    };
    Ok(Judgement::Pair { sides, margin })
}

fn judged(fields: &Map<String, Value>) -> Result<Judgement> {
    let (prompt, completion) = (field(fields, "prompt")?, field(fields, "completion")?);
    let label = field(fields, "label")?;
    let wanted = match label {
        Value::Bool(label) => Some(*label),
        Value::Number(n) if n.as_f64() == Some(1.0) => Some(true),
        Value::Number(n) if n.as_f64() == Some(0.0) => Some(false),
        Value::String(s) => match s.trim().to_ascii_lowercase().as_str() {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    };
    let label = wanted.ok_or_else(|| wrong(label, "label", "true (desirable) or false (undesirable)"))?;
    let sides = match are_chats(prompt, completion)? {
        true => chats(messages(fields, "prompt")?, [messages(fields, "completion")?], fields)?,
        false => Sides::Text {
            prompt: string(prompt, "prompt")?.to_string(),
            completions: [string(completion, "completion")?.to_string()],
        },
    };
    Ok(Judgement::Judged { sides, label })
}

fn chats<const N: usize>(
    prompt: Vec<Value>,
    completions: [Vec<Value>; N],
    fields: &Map<String, Value>,
) -> Result<Sides<N>> {
    for completion in &completions {
        let whole: Vec<Value> = prompt.iter().chain(completion).cloned().collect();
        chat::check_order(&whole)?;
    }
    Ok(Sides::Chat {
        prompt,
        completions,
        tools: tools(fields)?,
    })
}

/// Elements that both begin with. Where one begins with all of the other, the shorter one keeps its last.
fn shared<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let most = a.len().min(b.len());
    let equal = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    if equal == most { most.saturating_sub(1) } else { equal }
}

/// Bytes that both texts begin with; a space before the place where they part belongs to the sides.
fn shared_text(a: &str, b: &str) -> usize {
    let (x, y): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut at = shared(&x, &y);
    let parts = at < x.len().min(y.len()) && x[at] != y[at];
    if parts && at > 0 && x[at - 1] == ' ' {
        at -= 1;
    }
    x[..at].iter().map(|c| c.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::row;
    use serde_json::json;

    fn texts(value: Value) -> (String, [String; 2]) {
        match understand(&row(value)).unwrap() {
            Judgement::Pair {
                sides: Sides::Text { prompt, completions },
                ..
            } => (prompt, completions),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_implicit_prompt_is_what_both_sides_begin_with() {
        // As TRL's `extract_prompt`: the space before the parting place goes to the sides.
        for (chosen, rejected, prompt) in [
            ("The sky is blue.", "The sky is green.", "The sky is"),
            ("ab", "ac", "a"),
            ("ä b", "ä c", "ä"),
            ("x", "y", ""),
            ("long answer", "long", "lon"),
        ] {
            let (p, [c, r]) = texts(json!({"chosen": chosen, "rejected": rejected}));
            assert_eq!(p, prompt);
            assert_eq!((p.clone() + &c, p + &r), (chosen.to_string(), rejected.to_string()));
        }
        let turn = |role: &str, text: &str| json!({"role": role, "content": text});
        let value = json!({
            "chosen": [turn("user", "q"), turn("assistant", "good")],
            "rejected": [turn("user", "q"), turn("assistant", "bad")],
        });
        match understand(&row(value)).unwrap() {
            Judgement::Pair {
                sides: Sides::Chat {
                    prompt, completions, ..
                },
                margin: None,
            } => {
                assert_eq!(prompt, [turn("user", "q")]);
                assert_eq!(completions, [[turn("assistant", "good")], [turn("assistant", "bad")]]);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn margins_and_labels_are_read_in_every_spelling() {
        let pair = |margin: Value| json!({"prompt": "p", "chosen": "a", "rejected": "b", "margin": margin});
        for (value, want) in [(json!(0.5), Some(0.5)), (json!("2"), Some(2.0)), (Value::Null, None)] {
            match understand(&row(pair(value))).unwrap() {
                Judgement::Pair { margin, .. } => assert_eq!(margin, want),
                other => panic!("{other:?}"),
            }
        }
        for (value, want) in [
            (json!(true), true),
            (json!(0), false),
            (json!("False"), false),
            (json!(1.0), true),
        ] {
            match understand(&row(json!({"prompt": "p", "completion": "c", "label": value}))).unwrap() {
                Judgement::Judged { label, .. } => assert_eq!(label, want),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn bad_rows_are_refused_with_their_place() {
        let user = json!([{"role": "user", "content": "q"}]);
        for (value, what) in [
            (json!({"prompt": "p", "chosen": "a", "rejected": "a"}), "are equal"),
            (json!({"chosen": user, "rejected": user}), "are equal"),
            (json!({"prompt": "p", "chosen": "a"}), "`rejected` is missing"),
            (
                json!({"prompt": "p", "chosen": "a", "rejected": null}),
                "`rejected` is null",
            ),
            (json!({"prompt": "p", "chosen": 1, "rejected": "b"}), "wrong type"),
            (
                json!({"prompt": "p", "chosen": user, "rejected": user}),
                "different kinds",
            ),
            (
                json!({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}),
                "`margin`",
            ),
            (json!({"prompt": "p", "completion": "a", "label": "maybe"}), "`label`"),
            (json!({"prompt": "p", "completion": "a"}), "`label` is missing"),
            (json!({"prompt": "p", "text": "a"}), "not a preference row"),
            (
                json!({"chosen": [{"role": "x", "content": "q"}], "rejected": user}),
                "unknown role",
            ),
        ] {
            let error = understand(&row(value.clone())).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains("t.jsonl:3"), "{value}: {error}");
        }
    }
}
