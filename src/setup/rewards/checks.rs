//! Rewards that depend only on the text of an answer.

use super::numbers;
use super::schema::Schema;
use fancy_regex::Regex;
use serde_json::{Number, Value};

/// The known answers of a row as texts; each one is correct.
pub fn known(answer: &Value) -> Vec<String> {
    match answer {
        Value::String(text) => vec![text.clone()],
        Value::Array(list) => list.iter().flat_map(known).collect(),
        Value::Number(number) => number_texts(number),
        other => vec![other.to_string()],
    }
}

/// A column of integers is one of floats if a row has none: 13.0 is `13` too.
fn number_texts(number: &Number) -> Vec<String> {
    // Below 2^53 f64 has every integer.
    let is_whole = |x: &f64| x.fract() == 0.0 && x.abs() < (1_u64 << 53) as f64;
    match number.as_f64().filter(|x| number.is_f64() && is_whole(x)) {
        Some(x) => vec![(x as i64).to_string(), number.to_string()],
        None => vec![number.to_string()],
    }
}

/// 1 if the text is one of the known answers, ignoring white space at both ends.
pub fn exact(text: &str, answer: &Value) -> f64 {
    f64::from(known(answer).iter().any(|a| a.trim() == text.trim()))
}

/// 1 if the last number of the text is the last number of a known answer; NaN if no known answer has a number.
pub fn numeric(text: &str, answer: &Value) -> f64 {
    let wanted: Vec<f64> = known(answer).iter().filter_map(|a| numbers::last(a)).collect();
    if wanted.is_empty() {
        return f64::NAN;
    }
    let found = numbers::last(text);
    f64::from(found.is_some_and(|x| wanted.iter().any(|w| numbers::same(x, *w))))
}

/// True if `numeric` has a number to compare with.
pub fn has_number(answer: &Value) -> bool {
    known(answer).iter().any(|a| numbers::last(a).is_some())
}

/// True if a known answer consists of several numbers, of which `numeric` compares the last one: `12:30`. In a text with words,
/// or after `####` (GSM8K) or `\boxed`, the last one is the result.
pub fn has_several_numbers(answer: &Value) -> bool {
    let is_text = |a: &str| ["####", "\\boxed"].iter().any(|mark| a.contains(mark)) || has_words(a);
    known(answer).iter().any(|a| !is_text(a) && numbers::count(a) > 1)
}

/// True if a text has letters that are not the name of a LaTeX command.
fn has_words(text: &str) -> bool {
    let mut parts = text.split('\\');
    let before = parts.next().into_iter();
    let behind = parts.map(|part| part.trim_start_matches(|c: char| c.is_ascii_alphabetic()));
    before.chain(behind).any(|part| part.chars().any(char::is_alphabetic))
}

/// 1 if the text contains a match of the pattern. A search that exceeds the step limit counts as no match.
pub fn regex(text: &str, pattern: &Regex) -> f64 {
    f64::from(pattern.is_match(text).unwrap_or(false))
}

/// 1 if the whole text is JSON that is valid under the schema.
pub fn json(text: &str, schema: Option<&Schema>) -> f64 {
    let value: Option<Value> = serde_json::from_str(text.trim()).ok();
    f64::from(value.is_some_and(|v| schema.is_none_or(|s| s.accepts(&v))))
}

/// 0 up to `free` tokens, then a linear decrease to -1 at `longest` (Yu et al. 2025, arXiv 2503.14476, eq. 13).
pub fn length(tokens: usize, free: usize, longest: usize) -> f64 {
    let over = tokens.saturating_sub(free) as f64;
    -(over / longest.saturating_sub(free).max(1) as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn answers_are_compared_as_texts_or_as_numbers() {
        assert_eq!(exact(" 13\n", &json!("13")), 1.0);
        assert_eq!(exact("13", &json!(13)), 1.0);
        // A column of floats.
        assert_eq!(exact("13", &json!(13.0)), 1.0);
        assert_eq!(exact("13.0", &json!(13.0)), 1.0);
        assert_eq!(exact("-2", &json!([-2.0, 0.5])), 1.0);
        assert_eq!(exact("0.5", &json!([-2.0, 0.5])), 1.0);
        assert_eq!(known(&json!([2.5, 1u64 << 60])), ["2.5", "1152921504606846976"]);
        assert_eq!(exact("thirteen", &json!(["13", "thirteen"])), 1.0);
        assert_eq!(exact("13.", &json!("13")), 0.0);
        assert_eq!(numeric("3 + 10 = 13.", &json!("13")), 1.0);
        assert_eq!(numeric("1,300", &json!("so it is #### 1300")), 1.0);
        assert_eq!(numeric("0.75", &json!(["3/4"])), 1.0);
        assert_eq!(numeric("no idea", &json!("13")), 0.0);
        assert!(numeric("13", &json!("winter")).is_nan());
        assert_eq!(numeric("1000001", &json!("1000000")), 0.0);
        assert_eq!(numeric("1,000,000", &json!(1000000)), 1.0);
    }

    #[test]
    fn answers_that_are_not_one_number_are_found() {
        assert!(has_number(&json!(["winter", "13"])) && !has_number(&json!("winter")) && !has_number(&json!(null)));
        for (answer, several) in [
            (json!("12:30"), true),
            (json!("1.000.000"), true),
            (json!(["4", "2 + 2"]), true),
            (json!(["4", "four"]), false),
            (json!("3/4"), false),
            (json!(-1234.5), false),
            (json!("3 + 10 = 13\n#### 13"), false),
            (json!("3 + 10 is 13, so \\boxed{13}"), false),
            (json!("3 + 10 = \\boxed{13}"), false),
            (json!("2 \\cdot 3"), true),
            (json!("2 \\text{ or } 3"), false),
            (json!("2\\frac{1}{2}"), false),
        ] {
            assert_eq!(has_several_numbers(&answer), several, "{answer}");
        }
    }

    #[test]
    fn formats_are_checked() {
        let think = Regex::new(r"(?s)^<think>.*</think>\s*\d+$").unwrap();
        assert_eq!(regex("<think>a\nb</think> 13", &think), 1.0);
        assert_eq!(regex("13", &think), 0.0);
        // Too much backtracking: the search stops and counts as no match.
        let slow = Regex::new(r"(?=(a+)+b)\1").unwrap();
        assert_eq!(regex(&"a".repeat(64), &slow), 0.0);
        let schema = Schema::new(json!({"type": "object", "required": ["a"]})).unwrap();
        assert_eq!(json(" {\"a\": 1}\n", Some(&schema)), 1.0);
        assert_eq!(json("{\"b\": 1}", Some(&schema)), 0.0);
        assert_eq!(json("{\"b\": 1}", None), 1.0);
        assert_eq!(json("the answer is {}", None), 0.0);
    }

    #[test]
    fn long_answers_cost() {
        let at = |tokens| length(tokens, 80, 100);
        assert_eq!([at(10), at(80), at(90), at(100), at(120)], [0.0, 0.0, -0.5, -1.0, -1.0]);
        assert_eq!(length(5, 5, 5), 0.0);
    }
}
