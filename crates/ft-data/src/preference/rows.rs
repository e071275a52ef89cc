//! Interprets the fields of preference rows.
//!
//! - A pair: `prompt`, `chosen`, `rejected`, as text or as lists of messages, optionally with `margin`. Without
//!   `prompt`, the common beginning of both sides is the prompt. Lists may be whole conversations beside a prompt: then
//!   they must contain the prompt.
//! - A judged row: `prompt`, `completion`, `label` (true: desirable).
//! - Texts become messages of a conversation if the file's layout requires it.

use super::super::chat;
use super::super::layout::{ColumnLayout, PROMPTS, is_like_a_prompt, is_turns, not_a_preference};
use super::super::read::{Row, clip, kind};
use super::super::rows::{
    self, answer_turns, is_same_turn, missing, string, tools, turns, with_system, without_system, wrong,
};
use crate::RowFormat;
use ft_base::{Error, Result};
use serde_json::{Map, Value};

/// A prompt and its possible answers.
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

/// An interpreted row.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Judgment {
    /// Chosen, then rejected.
    Pair {
        sides: Sides<2>,
        margin: Option<f32>,
    },
    Judged {
        sides: Sides<1>,
        label: bool,
    },
    /// A pair that is left out: its conversations differ before the answer, so texts of the user would be trained.
    Forked,
}

const SHAPE: &str = "prompt, chosen, rejected (text or messages; optional margin), or prompt, completion, label";

/// Errors, with the place of the row: a field is missing or has another type, both sides are equal.
pub(super) fn understand(row: &Row, layout: &ColumnLayout) -> Result<Judgment> {
    let has = |name: &str| row.fields.get(name).is_some_and(|v| !v.is_null());
    let answer = layout.answer.as_deref().unwrap_or("completion");
    let judgment = if has("chosen") || has("rejected") {
        pair(&row.fields, layout)
    } else if has(answer) || has("label") {
        judged(&row.fields, layout, answer)
    } else {
        Err(not_a_preference(&row.fields))
    };
    judgment.map_err(|e| e.within(&row.place))
}

fn field<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<&'a Value> {
    match fields.get(name) {
        None | Some(Value::Null) => Err(missing(fields, name, RowFormat::Preference).expected(SHAPE)),
        Some(value) => Ok(value),
    }
}

fn pair(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<Judgment> {
    const FORMAT: RowFormat = RowFormat::Preference;
    let (chosen, rejected) = (field(fields, "chosen")?, field(fields, "rejected")?);
    if is_turns(chosen) != is_turns(rejected) {
        return Err(Error::format("`chosen` and `rejected` have different types")
            .found(format!("{} and {}", kind(chosen), kind(rejected)))
            .expected("both text, or both lists of messages"));
    }
    if chosen == rejected {
        return Err(Error::format("`chosen` and `rejected` are equal")
            .found(clip(&chosen.to_string()))
            .expected("two different answers to one prompt")
            .hint("remove the row: it contains no preference"));
    }
    let before = before(fields, layout)?;
    let lists = is_turns(chosen);
    let sides = match before {
        PromptPart::Turns(prompt) => {
            let sides = [
                answer_turns(fields, "chosen", FORMAT)?,
                answer_turns(fields, "rejected", FORMAT)?,
            ];
            let (prompt, sides) = if lists { apart(prompt, sides)? } else { (prompt, sides) };
            let prompt = with_system(prompt, fields, layout)?.0;
            chats(prompt, sides, fields)?
        }
        PromptPart::Text(text) if layout.renders() || lists => {
            let sides = [
                answer_turns(fields, "chosen", FORMAT)?,
                answer_turns(fields, "rejected", FORMAT)?,
            ];
            let (prompt, sides) = if lists {
                let (prompt, sides) = around(&text, sides)?;
                if forks(&sides) {
                    return Ok(Judgment::Forked);
                }
                (prompt, sides)
            } else {
                (vec![chat::message("user", &text)], sides)
            };
            let prompt = with_system(prompt, fields, layout)?.0;
            chats(prompt, sides, fields)?
        }
        PromptPart::Text(prompt) => {
            without_system(fields, layout)?;
            Sides::Text {
                prompt,
                completions: [
                    string(chosen, "chosen")?.to_string(),
                    string(rejected, "rejected")?.to_string(),
                ],
            }
        }
        PromptPart::Implied if lists => {
            let sides = [turns(fields, "chosen", FORMAT)?, turns(fields, "rejected", FORMAT)?];
            let (prompt, sides) = implied(sides);
            if forks(&sides) {
                return Ok(Judgment::Forked);
            }
            if prompt.is_empty() {
                refuse_leftover(fields, layout)?;
            }
            let prompt = with_system(prompt, fields, layout)?.0;
            chats(prompt, sides, fields)?
        }
        PromptPart::Implied => {
            refuse_leftover(fields, layout)?;
            without_system(fields, layout)?;
            let (chosen, rejected) = (string(chosen, "chosen")?, string(rejected, "rejected")?);
            let at = shared_text(chosen, rejected);
            Sides::Text {
                prompt: chosen[..at].to_string(),
                completions: [chosen[at..].to_string(), rejected[at..].to_string()],
            }
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
    Ok(Judgment::Pair { sides, margin })
}

fn judged(fields: &Map<String, Value>, layout: &ColumnLayout, answer: &str) -> Result<Judgment> {
    let completion = field(fields, answer)?;
    let label = field(fields, "label")?;
    let label = rows::label(label).ok_or_else(|| wrong(label, "label", "true (desirable) or false (undesirable)"))?;
    let turns = |prompt: Vec<Value>| {
        let prompt = with_system(prompt, fields, layout)?.0;
        chats(prompt, [answer_turns(fields, answer, RowFormat::Preference)?], fields)
    };
    let sides = match before(fields, layout)? {
        PromptPart::Turns(prompt) => turns(prompt)?,
        PromptPart::Text(prompt) if layout.renders() => turns(vec![chat::message("user", &prompt)])?,
        PromptPart::Text(_) if is_turns(completion) => {
            return Err(Error::format(format!("the prompt and `{answer}` have different types"))
                .found(format!("a string and {}", kind(completion)))
                .expected("two strings or two lists of messages"));
        }
        PromptPart::Text(prompt) => {
            without_system(fields, layout)?;
            Sides::Text {
                prompt,
                completions: [string(completion, answer)?.to_string()],
            }
        }
        PromptPart::Implied => return Err(missing(fields, "prompt", RowFormat::Preference).expected(SHAPE)),
    };
    Ok(Judgment::Judged { sides, label })
}

/// The prompt part of a row.
enum PromptPart {
    Text(String),
    Turns(Vec<Value>),
    /// No column: the answers begin with the prompt.
    Implied,
}

fn before(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<PromptPart> {
    let name = match (&layout.prompt, &layout.list) {
        (Some(prompt), _) => prompt,
        (None, Some(list)) => list,
        (None, None) => return Ok(PromptPart::Implied),
    };
    let whole = |name| fields.get(name).is_some_and(is_turns);
    match fields.get(name.as_str()).filter(|v| !v.is_null()) {
        // Whole conversations need no prompt, even if other rows of the file have one.
        None if whole("chosen") && whole("rejected") => Ok(PromptPart::Implied),
        Some(value) if is_turns(value) => Ok(PromptPart::Turns(turns(fields, name, RowFormat::Preference)?)),
        _ if layout.prompt.is_none() => Err(missing(fields, name, RowFormat::Preference).expected(SHAPE)),
        _ => Ok(PromptPart::Text(rows::prompt_text(fields, layout)?)),
    }
}

/// Separates prompt and answers, if the sides begin with the whole prompt.
fn apart(prompt: Vec<Value>, sides: [Vec<Value>; 2]) -> Result<(Vec<Value>, [Vec<Value>; 2])> {
    let at = prompt.len();
    let begins = |side: &Vec<Value>| side.len() > at && prompt.iter().zip(side).all(|(x, y)| is_same_turn(x, y));
    if sides.iter().all(begins) {
        return Ok((prompt, sides.map(|side| side[at..].to_vec())));
    }
    let asks = |side: &Vec<Value>| side.first().is_some_and(|m| chat::role(m) != "assistant");
    if sides.iter().any(asks) {
        Err(not_of_the_prompt(&clip(&Value::Array(prompt).to_string()), &sides))
    } else {
        Ok((prompt, sides))
    }
}

/// As `apart`, for a text prompt: a side is the answer alone, or the whole conversation including the prompt.
fn around(prompt: &str, sides: [Vec<Value>; 2]) -> Result<(Vec<Value>, [Vec<Value>; 2])> {
    let first = |side: &Vec<Value>| side.first().map(|m| chat::role(m).to_string()).unwrap_or_default();
    if sides.iter().all(|side| first(side) == "assistant") {
        return Ok((vec![chat::message("user", prompt)], sides));
    }
    let whole = sides.clone();
    let (shared, sides) = implied(sides);
    let asked = |m: &Value| chat::role(m) == "user" && chat::content(m).trim() == prompt.trim();
    if shared.iter().any(asked) {
        Ok((shared, sides))
    } else {
        Err(not_of_the_prompt(&clip(prompt), &whole))
    }
}

fn not_of_the_prompt(prompt: &str, sides: &[Vec<Value>; 2]) -> Error {
    let first = sides[0].first().map_or(String::new(), |m| clip(&m.to_string()));
    Error::format("`chosen` and `rejected` are conversations that do not contain the prompt")
        .found(format!("the prompt {prompt}, and `chosen` begins with {first}"))
        .expected("answers to the prompt, or conversations that begin with it")
        .hint("remove the prompt column if the conversations are complete")
}

/// The common beginning of both sides, and the remainders.
fn implied(sides: [Vec<Value>; 2]) -> (Vec<Value>, [Vec<Value>; 2]) {
    let at = shared(&sides[0], &sides[1], is_same_turn);
    let prompt = sides[0][..at].to_vec();
    (prompt, sides.map(|side| side[at..].to_vec()))
}

/// True if the sides do not both continue with an answer after their common beginning.
fn forks(sides: &[Vec<Value>; 2]) -> bool {
    let answers = |side: &Vec<Value>| side.first().is_some_and(|m| chat::role(m) == "assistant");
    !sides.iter().all(answers)
}

/// Errors: there is no prompt, and a column that looks like one is not used.
fn refuse_leftover(fields: &Map<String, Value>, layout: &ColumnLayout) -> Result<()> {
    const WORDS: usize = 4;
    let is_left = |(name, value): &(&String, &Value)| {
        let text = value.as_str().unwrap_or_default();
        let about_an_answer = name.starts_with("chosen") || name.starts_with("rejected");
        !layout.reads(name)
            && !about_an_answer
            && match value {
                Value::String(_) if PROMPTS.contains(&name.as_str()) || is_like_a_prompt(name) => {
                    !text.trim().is_empty()
                }
                Value::String(_) => text.split_whitespace().count() >= WORDS,
                other => is_turns(other),
            }
    };
    match fields.iter().find(is_left) {
        None => Ok(()),
        Some((name, value)) => Err(Error::format(
            "the row has no recognized prompt column, but another column may be the prompt",
        )
        .found(format!(
            "`{name}`: {}",
            clip(value.as_str().unwrap_or(&value.to_string()))
        ))
        .expected(format!("the prompt in one of {}", PROMPTS.join(", ")))
        .hint(format!(
            "write `Mapping::columns = {{ prompt = \"{name}\" }}` if it is the prompt; remove it if the answers begin with \
             their prompt"
        ))),
    }
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

/// Length of the common prefix. If one side is a prefix of the other, the shorter one keeps its last element.
fn shared<T>(a: &[T], b: &[T], is_same: impl Fn(&T, &T) -> bool) -> usize {
    let most = a.len().min(b.len());
    let equal = a.iter().zip(b).take_while(|(x, y)| is_same(x, y)).count();
    if equal == most { most.saturating_sub(1) } else { equal }
}

/// Length of the common prefix in bytes; a space directly before the difference belongs to the sides.
fn shared_text(a: &str, b: &str) -> usize {
    let (x, y): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut at = shared(&x, &y, |a, b| a == b);
    let parts = at < x.len().min(y.len()) && x[at] != y[at];
    if parts && at > 0 && x[at - 1] == ' ' {
        at -= 1;
    }
    x[..at].iter().map(|c| c.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Render;
    use crate::layout::{RenderRules, RowPurpose};
    use crate::testing::{Jinja, QWEN, Words, layout, row};
    use serde_json::json;

    fn understand(row: &Row) -> Result<Judgment> {
        super::understand(row, &layout(row, RowFormat::Auto, RowPurpose::Prefer)?)
    }

    fn texts(value: Value) -> (String, [String; 2]) {
        match understand(&row(value)).unwrap() {
            Judgment::Pair {
                sides: Sides::Text { prompt, completions },
                ..
            } => (prompt, completions),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_implicit_prompt_is_what_both_sides_begin_with() {
        // As TRL's `extract_prompt`: the space before the difference belongs to the sides.
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
            Judgment::Pair {
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

    fn turn(role: &str, text: &str) -> Value {
        json!({"role": role, "content": text})
    }

    /// A conversation with one question and one answer.
    fn talk(question: &str, answer: &str) -> Value {
        json!([turn("user", question), turn("assistant", answer)])
    }

    /// The row's prompt and answers as messages, for a model with a chat template.
    fn messages(value: Value) -> (Vec<Value>, [Vec<Value>; 2]) {
        let jinja = Jinja::new(QWEN);
        let rules = RenderRules {
            render: Render::Auto,
            template: Some(&jinja),
            codec: &Words::chatml(),
            answer: "",
        };
        let row = row(value);
        let layout = ColumnLayout::find(&row, RowFormat::Auto, RowPurpose::Prefer, &rules).unwrap();
        match super::understand(&row, &layout).unwrap() {
            Judgment::Pair {
                sides: Sides::Chat {
                    prompt, completions, ..
                },
                ..
            } => (prompt, completions),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_prompt_of_any_common_name_is_taken() {
        let answers = || [vec![turn("assistant", "a")], vec![turn("assistant", "b")]];
        let asked = |value: Value, prompt: &[Value]| {
            assert_eq!(messages(value.clone()), (prompt.to_vec(), answers()), "{value}");
        };
        for name in ["prompt", "question", "instruction", "input", "query", "problem"] {
            asked(json!({name: "q", "chosen": "a", "rejected": "b"}), &[turn("user", "q")]);
        }
        asked(
            json!({"system": "s", "question": "q", "chosen": "a", "rejected": "b"}),
            &[turn("system", "s"), turn("user", "q")],
        );
        asked(
            json!({"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"}),
            &[turn("user", "q\ni")],
        );
        // Answers as messages after a text prompt, and vice versa.
        let one = |text: &str| json!([turn("assistant", text)]);
        asked(
            json!({"prompt": "q", "chosen": one("a"), "rejected": one("b")}),
            &[turn("user", "q")],
        );
        asked(
            json!({"prompt": [turn("user", "q")], "chosen": "a", "rejected": "b"}),
            &[turn("user", "q")],
        );
        let from = |name: &str, text: &str| json!({"from": name, "value": text});
        asked(
            json!({"conversations": [from("human", "q")], "chosen": from("gpt", "a"), "rejected": from("gpt", "b")}),
            &[turn("user", "q")],
        );
    }

    #[test]
    fn whole_conversations_part_where_they_differ() {
        let answers = || [vec![turn("assistant", "a")], vec![turn("assistant", "b")]];
        for prompt in [json!("q"), json!([turn("user", "q")]), Value::Null] {
            let value = json!({"prompt": prompt, "chosen": talk("q", "a"), "rejected": talk("q", "b"), "prompt_id": "x",
                "messages": talk("q", "a")});
            assert_eq!(messages(value), (vec![turn("user", "q")], answers()));
        }
        let long = |end: &str| {
            json!([
                turn("system", "s"),
                turn("user", "x"),
                turn("assistant", "y"),
                turn("user", "q"),
                turn("assistant", end)
            ])
        };
        for prompt in [json!("x"), json!("q"), Value::Null] {
            let (before, sides) = messages(json!({"prompt": prompt, "chosen": long("a"), "rejected": long("b")}));
            assert_eq!((before.len(), sides), (4, answers()));
        }
        // One conversation is a prefix of the other: the answer is the remaining part.
        let (before, sides) = messages(json!({
            "system": "s", "chosen": talk("q", "a"), "rejected": [turn("user", "q"), turn("assistant", "b"), turn("user", "z"), turn("assistant", "c")],
        }));
        assert_eq!(before, [turn("system", "s"), turn("user", "q")]);
        assert_eq!(sides[1].len(), 3);
    }

    #[test]
    fn turns_that_differ_only_in_metadata_are_the_shared_prompt() {
        let side = |field: &str, value: &str, answer: &str| {
            let of_gpt = json!({"from": "gpt", "value": answer, "model": answer});
            json!([{"from": "human", "value": "q", field: value}, of_gpt])
        };
        let pair = |field: &str| json!({"chosen": side(field, "1", "a"), "rejected": side(field, "2", "b")});
        for prompt in [json!([{"from": "human", "value": "q"}]), json!("q"), Value::Null] {
            let mut value = pair("id");
            value["prompt"] = prompt.clone();
            let (before, [a, b]) = messages(value);
            assert_eq!([&before, &a, &b].map(Vec::len), [1; 3], "{prompt}");
            assert_eq!([&before[0], &a[0], &b[0]].map(chat::content), ["q", "a", "b"]);
        }
        assert_eq!(understand(&row(pair("name"))).unwrap(), Judgment::Forked);
    }

    #[test]
    fn margins_and_labels_are_read_in_every_spelling() {
        let pair = |margin: Value| json!({"prompt": "p", "chosen": "a", "rejected": "b", "margin": margin});
        for (value, want) in [(json!(0.5), Some(0.5)), (json!("2"), Some(2.0)), (Value::Null, None)] {
            match understand(&row(pair(value))).unwrap() {
                Judgment::Pair { margin, .. } => assert_eq!(margin, want),
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
                Judgment::Judged { label, .. } => assert_eq!(label, want),
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
                json!({"prompt": "p", "chosen": user, "rejected": "b"}),
                "have different types",
            ),
            (
                json!({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}),
                "`margin`",
            ),
            (json!({"prompt": "p", "completion": "a", "label": "maybe"}), "`label`"),
            (json!({"prompt": "p", "completion": "a"}), "`label` is missing"),
            (
                json!({"prompt": "p", "chosen": talk("q", "a"), "rejected": talk("q", "b")}),
                "do not contain the prompt",
            ),
            (
                json!({"prompt": [turn("user", "p")], "chosen": talk("q", "a"), "rejected": talk("q", "b")}),
                "do not contain the prompt",
            ),
            (
                json!({"question": "q", "problem": "p", "chosen": "a", "rejected": "b"}),
                "cannot determine which column is the prompt",
            ),
            (
                json!({"post": "a post of four words", "chosen": "a", "rejected": "b"}),
                "may be the prompt",
            ),
            (
                json!({"user_text": "hi", "chosen": "a", "rejected": "b"}),
                "may be the prompt",
            ),
            (
                json!({"user_text": "hi", "chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")]}),
                "may be the prompt",
            ),
            (
                json!({"system": "s", "prompt": "p", "chosen": "a", "rejected": "b"}),
                "cannot contain `system`",
            ),
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

    #[test]
    fn a_pair_that_differs_before_the_answer_is_left_out() {
        let forked = |second: &str| {
            let first = [turn("user", "q"), turn("assistant", "a")];
            json!([first[0], first[1], turn("user", second), turn("assistant", "b")])
        };
        for value in [
            json!({"chosen": talk("q ", "a"), "rejected": talk("q", "b")}),
            json!({"chosen": [turn("user", "q")], "rejected": talk("q", "b")}),
            json!({"prompt": "q", "chosen": forked("x"), "rejected": forked("y")}),
        ] {
            assert_eq!(understand(&row(value.clone())).unwrap(), Judgment::Forked, "{value}");
        }
    }
}
