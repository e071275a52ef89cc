//! Mutations that keep the structure of an input: of JSON (the whole input, one of its lines, or a part between zero bytes), and of the
//! header of a safetensors file, whose length is written again.

use serde_json::{Map, Value, json};
use std::ops::Range;

/// Longer parts are left to libFuzzer: reading them again for each mutation takes too long.
const LONGEST: usize = 64 << 10;

/// Numbers from a seed: libFuzzer wants the same mutation for the same seed.
pub struct Draw(pub u64);

impl Draw {
    /// Less than `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }

    fn word(&mut self, words: &[String]) -> String {
        match words.get(self.below(words.len())) {
            Some(word) => word.trim_matches('"').to_string(),
            None => "a".into(),
        }
    }

    /// A value that is not derived from another one.
    fn value(&mut self, words: &[String]) -> Value {
        match self.below(18) {
            0 => Value::Null,
            1 => json!(true),
            2 => json!(false),
            3 => json!(0),
            4 => json!(1),
            5 => json!(-1),
            6 => json!(0.5),
            7 => json!(1e300),
            8 => json!(u32::MAX),
            9 => json!(i64::MAX),
            10 => json!(u64::MAX),
            11 => json!(1u64 << self.below(64)),
            12 => json!([]),
            13 => json!({}),
            14 => json!(""),
            15 => json!([self.word(words)]),
            _ => json!(self.word(words)),
        }
    }
}

/// A mutation of `bytes`, of at most `most` bytes. `None`: there is no JSON in them, or the result would be longer.
pub fn mutated(bytes: &[u8], most: usize, seed: u32, words: &[String]) -> Option<Vec<u8>> {
    let mut draw = Draw(seed.into());
    let head = header(bytes);
    let range = match &head {
        Some(range) => range.clone(),
        None => part(bytes, &mut draw)?,
    };
    let text = bytes.get(range.clone()).filter(|text| text.len() <= LONGEST)?;
    let mut value: Value = serde_json::from_slice(text).ok()?;
    for _ in 0..1 + draw.below(3) {
        change(&mut value, &mut draw, words);
    }
    let mut new = serde_json::to_vec(&value).ok()?;
    if let Value::Object(map) = &value
        && draw.below(16) == 0
        && let Some((key, value)) = map.iter().next()
    {
        // A key that stands there twice.
        let first = format!("{{{}:{value},", json!(key));
        new.splice(..1, first.into_bytes());
    }
    let length = new.len() as u64;
    let mut out = bytes[..range.start].to_vec();
    out.append(&mut new);
    out.extend_from_slice(&bytes[range.end..]);
    if head.is_some() {
        out[..8].copy_from_slice(&length.to_le_bytes());
    }
    (out.len() <= most).then_some(out)
}

/// The header of a safetensors file.
fn header(bytes: &[u8]) -> Option<Range<usize>> {
    let length = u64::from_le_bytes(*bytes.first_chunk()?);
    let end = usize::try_from(length).ok()?.checked_add(8)?;
    (end <= bytes.len() && bytes.get(8) == Some(&b'{')).then_some(8..end)
}

/// The place of a value that begins at the start of a part, or behind bytes that choose something.
fn start(part: &[u8]) -> Option<usize> {
    part.iter().take(4).position(|byte| matches!(byte, b'{' | b'['))
}

/// The whole input if it is one value, else one of its lines or parts that begins as a value.
fn part(bytes: &[u8], draw: &mut Draw) -> Option<Range<usize>> {
    if start(bytes) == Some(0) && bytes.len() <= LONGEST && serde_json::from_slice::<Value>(bytes).is_ok() {
        return Some(0..bytes.len());
    }
    let mut parts = Vec::new();
    // Between zero bytes a value may have several lines.
    for ends in [&b"\0"[..], b"\n\0"] {
        let mut from = 0;
        for part in bytes.split(|b| ends.contains(b)) {
            parts.extend(start(part).map(|start| from + start..from + part.len()));
            from += part.len() + 1;
        }
    }
    let chosen = draw.below(parts.len());
    parts.into_iter().nth(chosen)
}

/// Some value inside of `value`, or itself.
fn inner<'a>(value: &'a mut Value, draw: &mut Draw) -> &'a mut Value {
    let length = match value {
        Value::Array(list) => list.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    };
    if length == 0 || draw.below(4) == 0 {
        return value;
    }
    let chosen = draw.below(length);
    match value {
        Value::Array(list) => inner(&mut list[chosen], draw),
        Value::Object(map) => inner(map.values_mut().nth(chosen).unwrap(), draw),
        other => other,
    }
}

fn change(value: &mut Value, draw: &mut Draw, words: &[String]) {
    let other = inner(value, draw).clone();
    let at = inner(value, draw);
    match (draw.below(10), at) {
        (0, at) => *at = draw.value(words),
        (1, at) => *at = other,
        (2, at) => {
            let old = at.take();
            *at = match draw.below(3) {
                0 => json!([old]),
                1 => json!({ draw.word(words): old }),
                _ => json!(old.to_string()),
            };
        }
        (_, Value::Object(map)) => change_object(map, other, draw, words),
        (_, Value::Array(list)) => change_list(list, other, draw, words),
        (_, Value::String(text)) => change_text(text, draw, words),
        (_, at @ Value::Number(_)) => *at = changed_number(at, draw),
        (_, at) => *at = draw.value(words),
    }
}

fn change_object(map: &mut Map<String, Value>, other: Value, draw: &mut Draw, words: &[String]) {
    let chosen = draw.below(map.len());
    let Some(key) = map.keys().nth(chosen).cloned() else {
        map.insert(draw.word(words), other);
        return;
    };
    match draw.below(6) {
        0 => drop(map.remove(&key)),
        1 => {
            let old = map.remove(&key).unwrap_or_default();
            map.insert(draw.word(words), old);
        }
        2 => drop(map.insert(draw.word(words), draw.value(words))),
        3 => drop(map.insert(draw.word(words), map[&key].clone())),
        4 => drop(map.insert(key, other)),
        _ => {
            for n in 0..draw.below(20) {
                map.insert(format!("{key}{n}"), map[&key].clone());
            }
        }
    }
}

fn change_list(list: &mut Vec<Value>, other: Value, draw: &mut Draw, words: &[String]) {
    let chosen = draw.below(list.len());
    let second = draw.below(list.len());
    match draw.below(6) {
        0 if !list.is_empty() => drop(list.remove(chosen)),
        1 if !list.is_empty() => list.swap(chosen, second),
        2 if !list.is_empty() => {
            let copies = vec![list[chosen].clone(); draw.below(40)];
            list.extend(copies);
        }
        3 => list.truncate(chosen),
        4 => list.push(draw.value(words)),
        _ => list.insert(chosen, other),
    }
}

fn change_text(text: &mut String, draw: &mut Draw, words: &[String]) {
    match draw.below(6) {
        0 => *text = draw.word(words),
        1 => text.push_str(&draw.word(words)),
        2 => *text = text.repeat(draw.below(5)),
        3 => {
            let kept = draw.below(text.chars().count());
            *text = text.chars().take(kept).collect();
        }
        4 => *text = text.chars().rev().collect(),
        _ => {
            let odd = ["\0", "\n", "\u{e9}", "\u{1f600}", "\u{feff}", "\\", "..", "/", "%", " "];
            let place = draw.below(text.chars().count() + 1);
            let at = text.char_indices().nth(place).map_or(text.len(), |(at, _)| at);
            text.insert_str(at, odd[draw.below(odd.len())]);
        }
    }
}

fn changed_number(number: &Value, draw: &mut Draw) -> Value {
    if let Some(n) = number.as_i64() {
        return match draw.below(7) {
            0 => json!(n.wrapping_add(1)),
            1 => json!(n.wrapping_sub(1)),
            2 => json!(n.wrapping_neg()),
            3 => json!(n.wrapping_mul(2)),
            4 => json!(n / 2),
            5 => json!(n as f64),
            _ => json!(n.wrapping_add(1 << draw.below(63))),
        };
    }
    let n = number.as_f64().unwrap_or(0.0);
    // A number that JSON does not have becomes null.
    match draw.below(5) {
        0 => json!(-n),
        1 => json!(n * 1e10),
        2 => json!(n / 1e10),
        3 => json!(n as i64),
        _ => json!(n + 1.0),
    }
}
