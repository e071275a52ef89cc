//! A JSON schema that describes the shape of an answer. Reading a schema refuses unknown keywords: nothing in a schema
//! is ignored.
//!
//! Supported: `type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `minProperties`,
//! `maxProperties`, `items`, `minItems`, `maxItems`, `uniqueItems`, `minLength`, `maxLength`, `pattern`, `minimum`,
//! `maximum`, `exclusiveMinimum`, `exclusiveMaximum`, `multipleOf`, `allOf`, `anyOf`, `oneOf`, `not`, and `$ref` into
//! `$defs` or `definitions` of the same file. Annotations (`title`, `description`, ...) do not affect validity.

use crate::base::{Error, Result};
use fancy_regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::collections::BTreeMap;

const NOTES: [&str; 10] = [
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
];
const TYPES: [&str; 7] = ["null", "boolean", "object", "array", "number", "string", "integer"];
/// Largest depth of nested schemas.
const DEPTH: usize = 64;
/// Largest work for one answer. References can double the work at each level, so the depth alone is no bound.
const WORK: usize = 1 << 26;
/// The work of one check. Comparing two values costs at least 1 for each part of them.
const CHECK: usize = 1 << 4;
/// The work of a search, and of one that needs more steps than `QUICK`.
const SEARCH: usize = 1 << 8;
const LONG_SEARCH: usize = 1 << 18;
/// Steps of a search back that cost no more than the search.
const QUICK: usize = 1 << 10;

/// A schema that was parsed and checked.
#[derive(Debug)]
pub struct Schema {
    root: Value,
    patterns: BTreeMap<String, Pattern>,
}

/// A regular expression, also with a small limit of steps: few searches need more.
#[derive(Debug)]
struct Pattern {
    quick: Regex,
    whole: Regex,
}

impl Pattern {
    fn new(text: &str) -> std::result::Result<Self, fancy_regex::Error> {
        Ok(Self {
            quick: RegexBuilder::new(text).backtrack_limit(QUICK).build()?,
            whole: Regex::new(text)?,
        })
    }

    /// A pattern that exceeds the step limit of the regular expression ends the check: not accepted.
    fn is_in(&self, text: &str, left: &Cell<usize>) -> bool {
        if !take(left, SEARCH.saturating_add(text.len().saturating_mul(4))) {
            return false;
        }
        self.quick.is_match(text).unwrap_or_else(|_| {
            let found = take(left, LONG_SEARCH).then(|| self.whole.is_match(text));
            found.is_some_and(|found| found.unwrap_or_else(|_| take(left, WORK)))
        })
    }
}

impl Schema {
    /// Errors: an unknown keyword, a keyword with a value of the wrong type, a reference without target or in a cycle.
    pub fn new(root: Value) -> Result<Self> {
        let mut schema = Self {
            root,
            patterns: BTreeMap::new(),
        };
        let root = schema.root.clone();
        schema.read(&root, "#", 0)?;
        for name in ["$defs", "definitions"] {
            for (key, value) in root.get(name).and_then(Value::as_object).into_iter().flatten() {
                schema.read(value, &format!("#/{name}/{key}"), 0)?;
            }
        }
        Ok(schema)
    }

    fn read(&mut self, schema: &Value, at: &str, depth: usize) -> Result<()> {
        let fault = |what: String| Error::new(what).at(at);
        if depth > DEPTH {
            return Err(fault("the schema is nested too deeply".into()));
        }
        let fields = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(fields) => fields,
            _ => return Err(fault("a schema must be an object, `true` or `false`".into())),
        };
        for (key, value) in fields {
            let wrong = |expected: &str| {
                Error::new(format!("`{key}` of the schema has the wrong type"))
                    .at(at)
                    .found(value.to_string())
                    .expected(expected)
            };
            let below = |name: &str| format!("{at}/{name}");
            match key.as_str() {
                name if NOTES.contains(&name) => {}
                "const" => {}
                "enum" => drop(value.as_array().ok_or_else(|| wrong("a list"))?),
                "type" => {
                    let known = |v: &Value| v.as_str().is_some_and(|t| TYPES.contains(&t));
                    if !known(value) && !value.as_array().is_some_and(|l| l.iter().all(known)) {
                        return Err(wrong(&format!("one of {}, or a list of them", TYPES.join(", "))));
                    }
                }
                "required" => {
                    let names = value.as_array().filter(|l| l.iter().all(Value::is_string));
                    names.ok_or_else(|| wrong("a list of strings"))?;
                }
                "properties" => {
                    for (name, value) in value.as_object().ok_or_else(|| wrong("an object"))? {
                        self.read(value, &below(&format!("properties/{name}")), depth + 1)?;
                    }
                }
                "additionalProperties" | "items" | "not" => self.read(value, &below(key), depth + 1)?,
                "allOf" | "anyOf" | "oneOf" => {
                    for value in value.as_array().ok_or_else(|| wrong("a list of schemas"))? {
                        self.read(value, &below(key), depth + 1)?;
                    }
                }
                "uniqueItems" => drop(value.as_bool().ok_or_else(|| wrong("`true` or `false`"))?),
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                    value.as_u64().ok_or_else(|| wrong("a whole number"))?;
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                    value.as_f64().ok_or_else(|| wrong("a number"))?;
                }
                "multipleOf" => {
                    value
                        .as_f64()
                        .filter(|x| *x > 0.0)
                        .ok_or_else(|| wrong("a number above 0"))?;
                }
                "pattern" => {
                    let text = value.as_str().ok_or_else(|| wrong("a regular expression"))?;
                    let pattern = Pattern::new(text).map_err(|e| wrong("a regular expression").hint(e.to_string()))?;
                    self.patterns.insert(text.to_string(), pattern);
                }
                "$ref" => {
                    let name = value.as_str().ok_or_else(|| wrong("a string"))?;
                    if self.target(name, 0).is_none() {
                        return Err(wrong("`#/$defs/NAME` of this file, without a cycle"));
                    }
                }
                other => {
                    return Err(fault(format!("the schema keyword `{other}` is not supported"))
                        .hint("docs/rlhf.md lists the keywords; check the rest with a `program:` reward"));
                }
            }
        }
        Ok(())
    }

    /// Resolves a reference, also through references to references.
    fn target(&self, name: &str, hops: usize) -> Option<&Value> {
        let found = match name {
            "#" => &self.root,
            _ => self.root.pointer(name.strip_prefix('#')?)?,
        };
        match found.get("$ref").and_then(Value::as_str) {
            Some(next) if hops < DEPTH => self.target(next, hops + 1).map(|_| found),
            Some(_) => None,
            None => Some(found),
        }
    }

    /// True if the answer is valid. An answer that is nested too deeply or needs too much work is not accepted.
    pub fn accepts(&self, value: &Value) -> bool {
        let left = Cell::new(WORK);
        self.valid(&self.root, value, 0, &left) && left.get() > 0
    }

    fn valid(&self, schema: &Value, value: &Value, depth: usize, left: &Cell<usize>) -> bool {
        // A deeper value is not accepted. This also bounds recursive schemas.
        if depth > 4 * DEPTH || !take(left, CHECK) {
            return false;
        }
        match schema {
            Value::Bool(b) => *b,
            Value::Object(fields) => fields
                .iter()
                .all(|(k, rule)| self.holds(fields, k, rule, value, depth + 1, left)),
            _ => false,
        }
    }

    fn holds(
        &self,
        fields: &Map<String, Value>,
        key: &str,
        rule: &Value,
        value: &Value,
        depth: usize,
        left: &Cell<usize>,
    ) -> bool {
        if NOTES.contains(&key) {
            return true;
        }
        if !take(left, own_work(rule)) {
            return false;
        }
        let each = |list: &Value, check: &dyn Fn(&Value) -> bool| {
            let schemas = list.as_array().map(Vec::as_slice).unwrap_or_default();
            schemas.iter().filter(|s| check(s)).count()
        };
        let valid = |schema: &Value| self.valid(schema, value, depth, left);
        let length = |n: usize| n as u64;
        let bound = |n: Option<usize>, holds: &dyn Fn(u64, u64) -> bool| match (n, rule.as_u64()) {
            (Some(n), Some(limit)) => holds(length(n), limit),
            _ => true,
        };
        let number = |holds: &dyn Fn(f64, f64) -> bool| match (value.as_f64(), rule.as_f64()) {
            (Some(x), Some(limit)) => holds(x, limit),
            _ => true,
        };
        let chars = || {
            value
                .as_str()
                .filter(|s| take(left, s.len() / 16))
                .map(|s| s.chars().count())
        };
        let items = value.as_array();
        let object = value.as_object();
        match key {
            "type" => match rule {
                Value::Array(any) => any.iter().any(|t| is(value, t.as_str().unwrap_or_default())),
                one => is(value, one.as_str().unwrap_or_default()),
            },
            "const" => equal(rule, value, left),
            "enum" => each(rule, &|v| equal(v, value, left)) > 0,
            "required" => object.is_none_or(|o| each(rule, &|n| !n.as_str().is_some_and(|n| o.contains_key(n))) == 0),
            "properties" => object.is_none_or(|o| {
                let rules = rule.as_object().into_iter().flatten();
                rules
                    .into_iter()
                    .all(|(n, s)| o.get(n).is_none_or(|v| self.valid(s, v, depth, left)))
            }),
            "additionalProperties" => object.is_none_or(|o| {
                let named = fields.get("properties").and_then(Value::as_object);
                let other = |n: &String| named.is_none_or(|named| !named.contains_key(n));
                take(left, o.len())
                    && o.iter()
                        .filter(|(n, _)| other(n))
                        .all(|(_, v)| self.valid(rule, v, depth, left))
            }),
            "items" => items.is_none_or(|l| l.iter().all(|v| self.valid(rule, v, depth, left))),
            "uniqueItems" if rule == &Value::Bool(true) => {
                let is_new = |l: &[Value], i: usize| !l[..i].iter().any(|v| equal(v, &l[i], left));
                items.is_none_or(|l| (1..l.len()).all(|i| take(left, CHECK * i) && is_new(l, i)))
            }
            "minLength" => bound(chars(), &|n, limit| n >= limit),
            "maxLength" => bound(chars(), &|n, limit| n <= limit),
            "minItems" => bound(items.map(Vec::len), &|n, limit| n >= limit),
            "maxItems" => bound(items.map(Vec::len), &|n, limit| n <= limit),
            "minProperties" => bound(object.map(Map::len), &|n, limit| n >= limit),
            "maxProperties" => bound(object.map(Map::len), &|n, limit| n <= limit),
            "minimum" => number(&|x, limit| x >= limit),
            "maximum" => number(&|x, limit| x <= limit),
            "exclusiveMinimum" => number(&|x, limit| x > limit),
            "exclusiveMaximum" => number(&|x, limit| x < limit),
            "multipleOf" => number(&|x, by| ((x / by).round() - x / by).abs() < 1e-9),
            "pattern" => value.as_str().is_none_or(|text| {
                let pattern = rule.as_str().and_then(|r| self.patterns.get(r));
                pattern.is_some_and(|pattern| pattern.is_in(text, left))
            }),
            "allOf" => each(rule, &|s| !valid(s)) == 0,
            "anyOf" => each(rule, &valid) > 0,
            "oneOf" => each(rule, &valid) == 1,
            "not" => !valid(rule),
            "$ref" => {
                let target = rule.as_str().and_then(|name| self.target(name, 0));
                target.is_some_and(valid)
            }
            _ => true,
        }
    }
}

/// The work of looking at the value of a keyword, without the values in it.
fn own_work(rule: &Value) -> usize {
    match rule {
        Value::String(text) => text.len() / 16,
        Value::Array(list) => list.len(),
        Value::Object(fields) => fields.len(),
        _ => 0,
    }
}

/// Takes `n` from the work that is left. False if there is not enough.
fn take(left: &Cell<usize>, n: usize) -> bool {
    left.set(left.get().saturating_sub(n));
    left.get() > 0
}

fn is(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
        _ => false,
    }
}

/// True if two values are equal as JSON: 1 and 1.0 are the same number.
fn equal(a: &Value, b: &Value, left: &Cell<usize>) -> bool {
    if !take(left, 1) {
        return false;
    }
    match (a, b) {
        (Value::String(a), Value::String(b)) => a.len() == b.len() && take(left, a.len() / 256) && a == b,
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b, left)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(k, v)| b.get(k).is_some_and(|w| equal(v, w, left)))
        }
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(schema: Value, good: &[Value], bad: &[Value]) {
        let schema = Schema::new(schema).unwrap();
        for value in good {
            assert!(schema.accepts(value), "{value}");
        }
        for value in bad {
            assert!(!schema.accepts(value), "{value}");
        }
    }

    #[test]
    fn shapes_of_answers() {
        check(
            json!({
                "title": "an answer",
                "type": "object",
                "properties": {
                    "answer": {"type": "integer", "minimum": 0, "exclusiveMaximum": 100},
                    "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 1, "uniqueItems": true},
                    "unit": {"enum": ["m", "s", null]},
                },
                "required": ["answer"],
                "additionalProperties": false,
                "$defs": {"step": {"type": "string", "pattern": "^[a-z ]+$", "maxLength": 9}},
            }),
            &[
                json!({"answer": 3}),
                json!({"answer": 3.0, "steps": ["add them"], "unit": null}),
            ],
            &[
                json!({}),
                json!([]),
                json!({"answer": 100}),
                json!({"answer": -1}),
                json!({"answer": 3.5}),
                json!({"answer": 3, "more": 1}),
                json!({"answer": 3, "steps": []}),
                json!({"answer": 3, "steps": ["a", "a"]}),
                json!({"answer": 3, "steps": ["Add"]}),
                json!({"answer": 3, "steps": ["abcdefghij"]}),
                json!({"answer": 3, "unit": "km"}),
            ],
        );
        check(
            json!({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "not": {"const": 9}}),
            &[json!(2), json!(3), json!(4.0)],
            &[json!(6), json!(1), json!(9)],
        );
        check(
            json!({"anyOf": [{"type": ["string", "null"]}, {"minItems": 2}], "allOf": [true]}),
            &[json!("x"), json!(null), json!([1, 2]), json!(7)],
            &[json!([1])],
        );
        check(
            json!({"properties": {"next": {"$ref": "#"}, "n": {"type": "number"}}, "required": ["n"]}),
            &[json!({"n": 1, "next": {"n": 2}})],
            &[json!({"n": 1, "next": {"n": "2"}}), json!({"n": 1, "next": {}})],
        );
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for (bad, says) in [
            (json!({"patternProperties": {}}), "patternProperties"),
            (json!({"properties": {"a": {"if": true}}}), "#/properties/a"),
            (json!({"type": "text"}), "`type`"),
            (json!({"pattern": "("}), "regular expression"),
            (json!({"$ref": "#/$defs/gone"}), "$ref"),
            (json!({"$defs": {"a": {"$ref": "#/$defs/a"}}}), "cycle"),
            (json!({"minimum": "3"}), "`minimum`"),
            (json!(3), "a schema must be an object"),
        ] {
            let e = Schema::new(bad).unwrap_err().to_string();
            assert!(e.contains(says), "{e}");
        }
    }

    /// A schema or an answer that would take exponential or quadratic time is refused or not accepted, in bounded time.
    #[test]
    fn every_check_ends() {
        let start = std::time::Instant::now();
        let nested = |n: usize, wrap: &dyn Fn(Value) -> Value| (0..n).fold(json!(1), |inner, _| wrap(inner));
        for bad in [
            nested(
                100,
                &|inner| json!({"not": if inner.is_object() { inner } else { json!({}) }}),
            ),
            json!({"$ref": "#"}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            json!({"$ref": "https://example.com/schema.json"}),
            json!({"$ref": "file:///etc/hostname"}),
            json!({"pattern": "((a{1,1000}){1,1000}){1,1000}"}),
        ] {
            assert!(Schema::new(bad.clone()).is_err(), "{bad}");
        }
        check(
            json!({"items": {"$ref": "#"}}),
            &[],
            &[nested(1000, &|inner| json!([inner]))],
        );
        check(json!({"allOf": [{"$ref": "#"}]}), &[], &[json!(1)]);
        // Each level refers to the next one twice: 2^40 checks, and `not` must not turn the end of the checks into yes.
        let mut levels = Map::new();
        for i in 0..40 {
            let next = json!({"$ref": format!("#/$defs/{}", i + 1)});
            levels.insert(i.to_string(), json!({"allOf": [next, next]}));
        }
        levels.insert("40".into(), json!({"type": "integer"}));
        let all = json!({"$ref": "#/$defs/0", "$defs": levels});
        check(all.clone(), &[], &[json!(1)]);
        check(
            json!({"not": {"$ref": "#/$defs/0"}, "$defs": all["$defs"]}),
            &[],
            &[json!(1)],
        );
        let many = |n: usize| Value::Array((0..n).map(Value::from).collect());
        check(json!({"uniqueItems": true}), &[many(2000)], &[many(100_000)]);
        let slow = json!(format!("{}!", "a".repeat(60)));
        check(
            json!({"items": {"not": {"pattern": "^(a|a?)+\\1$"}}}),
            &[],
            &[json!(vec![slow; 1000])],
        );
        assert!(start.elapsed().as_secs() < 60);
    }

    /// The work inside of one check counts too: searches that succeed, comparisons, lengths of texts.
    #[test]
    fn work_that_a_check_repeats_is_bounded() {
        let (start, long) = (std::time::Instant::now(), "a".repeat(1 << 16));
        let mut levels = Map::new();
        for i in 0..17 {
            let next = json!({"$ref": format!("#/$defs/{}", i + 1)});
            levels.insert(i.to_string(), json!({"allOf": [next, next]}));
        }
        // 2^17 times the same rule for the same text: a few checks would be accepted.
        let often = |rule: Value| {
            let mut levels = levels.clone();
            levels.insert("17".into(), rule);
            json!({"$ref": "#/$defs/0", "$defs": levels})
        };
        let words: Vec<String> = (0..1000).map(|i| format!("word {i}")).collect();
        let with_long: Vec<&String> = words.iter().chain([&long]).collect();
        for rule in [
            json!({"pattern": "^a+$"}),
            json!({"maxLength": 1 << 20}),
            json!({"const": long}),
            json!({"enum": with_long}),
        ] {
            check(rule.clone(), &[json!(long)], &[]);
            check(often(rule), &[], &[json!(long)]);
        }
        check(often(json!({"not": {"enum": words}})), &[], &[json!("none")]);
        // A search that needs many steps and ends below their limit.
        let (back, text) = (json!({"pattern": "^(a|a?)+\\1$|!"}), format!("{}!", "a".repeat(11)));
        check(back.clone(), &[json!(text)], &[]);
        check(json!({"items": back}), &[], &[json!(vec![text; 10_000])]);
        // Ordinary lists stay valid.
        let list: Vec<&String> = words.iter().cycle().take(10_000).collect();
        check(
            json!({"items": {"enum": words, "pattern": "^word (?!x)", "maxLength": 9}}),
            &[json!(list)],
            &[],
        );
        assert!(start.elapsed().as_secs() < 60);
    }
}
