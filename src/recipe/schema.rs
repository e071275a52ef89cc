//! The JSON schema of a recipe, for editors: made from the table of keys.

use super::table::{self, KeyRange, RecipeKey};
use super::value::ValueKind;
use serde_json::{Map, Value, json};

/// The schema, draft 2020-12, with type, range, default, reason and description of every key.
pub fn schema() -> Value {
    let mut root = object("A recipe of ft.");
    root.insert("$schema".into(), json!("https://json-schema.org/draft/2020-12/schema"));
    root.insert("title".into(), json!("ft recipe"));
    for (path, about) in table::TABLES {
        let properties: Map<String, Value> = table::keys()
            .filter(|key| key.table == *path)
            .map(|key| (key.name.to_string(), property(key)))
            .collect();
        let required: Vec<&str> = table::keys()
            // Rows can also come from `data.sources`.
            .filter(|key| key.table == *path && key.default.is_empty() && key.path != table::model::Data::train)
            .map(|key| key.name)
            .collect();
        let mut table = object(about);
        table.insert("properties".into(), Value::Object(properties));
        if !required.is_empty() {
            table.insert("required".into(), json!(required));
        }
        insert(&mut root, path, table);
    }
    Value::Object(root)
}

fn object(description: &str) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("type".into(), json!("object"));
    map.insert("description".into(), json!(description));
    map.insert("additionalProperties".into(), json!(false));
    map.insert("properties".into(), json!({}));
    map
}

/// Inserts a table at a dotted path; tables above it come first in `TABLES`, or are created.
fn insert(root: &mut Map<String, Value>, path: &str, table: Map<String, Value>) {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    let Some(Value::Object(properties)) = root.get_mut("properties") else {
        return;
    };
    if rest.is_empty() {
        properties.insert(first.into(), Value::Object(table));
        return;
    }
    let inner = properties.entry(first).or_insert_with(|| Value::Object(object("")));
    if let Value::Object(inner) = inner {
        insert(inner, rest, table);
    }
}

pub fn property(key: &RecipeKey) -> Value {
    let mut out = kind(key);
    let mut description = key.doc.to_string();
    if let Some((other, values)) = key.when {
        description.push_str(&format!(" Used with `{other}` = {}.", values.join(" or ")));
    }
    if !key.default.is_empty() {
        description.push_str(&format!("\n\nDefault: `{}` ({}).", key.default, key.reason));
        if let Ok(default) = format!("x = {}", key.default).parse::<toml_edit::DocumentMut>()
            && let Some(default) = default.get("x").and_then(as_json)
        {
            out.insert("default".into(), default);
        }
    }
    out.insert("description".into(), json!(description));
    Value::Object(out)
}

fn as_json(item: &toml_edit::Item) -> Option<Value> {
    fn value(v: &toml_edit::Value) -> Option<Value> {
        match v {
            toml_edit::Value::String(s) => Some(json!(s.value())),
            toml_edit::Value::Integer(n) => Some(json!(n.value())),
            toml_edit::Value::Float(x) => Some(json!(x.value())),
            toml_edit::Value::Boolean(b) => Some(json!(b.value())),
            toml_edit::Value::Array(list) => list.iter().map(value).collect::<Option<Vec<_>>>().map(Value::Array),
            toml_edit::Value::InlineTable(table) if table.is_empty() => Some(json!({})),
            _ => None,
        }
    }
    item.as_value().and_then(value)
}

fn kind(key: &RecipeKey) -> Map<String, Value> {
    let KeyRange { min, max, .. } = key.range;
    let out = match key.kind {
        ValueKind::Text => json!({"type": "string"}),
        ValueKind::Name(names) => json!({"enum": names}),
        ValueKind::Flag => json!({"type": "boolean"}),
        ValueKind::Integer if max.is_finite() => {
            json!({"type": "integer", "minimum": min as i64, "maximum": max as i64})
        }
        ValueKind::Integer => json!({"type": "integer", "minimum": min as i64}),
        ValueKind::Number => number(key.range),
        ValueKind::Pair => json!({"type": "array", "items": number(key.range), "minItems": 2, "maxItems": 2}),
        ValueKind::Texts => json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
        ValueKind::Integers => json!({"type": "array", "items": {"type": "integer", "minimum": 0}}),
        ValueKind::Numbers => json!({"type": "array", "items": {"type": "number"}}),
        ValueKind::Pairs => {
            let pair = json!({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2});
            json!({"type": "array", "items": pair})
        }
        ValueKind::Size => json!({"type": "string", "examples": ["auto", "24GiB"]}),
        ValueKind::Map(names) => json!({"type": "object", "additionalProperties": {"enum": names}}),
        ValueKind::Fields(names) => {
            let columns: Map<String, Value> = names
                .iter()
                .map(|n| (n.to_string(), json!({"type": "string"})))
                .collect();
            json!({"type": "object", "additionalProperties": false, "properties": columns})
        }
        ValueKind::Tables(keys) => {
            let properties: Map<String, Value> = keys.iter().map(|k| (k.name.to_string(), property(k))).collect();
            let required: Vec<&str> = keys.iter().filter(|k| k.default.is_empty()).map(|k| k.name).collect();
            let item = json!({"type": "object", "additionalProperties": false, "properties": properties, "required": required});
            json!({"type": "array", "items": item})
        }
        ValueKind::Free => json!({"type": "object", "additionalProperties": true}),
    };
    let out = match key.kind {
        ValueKind::Flag | ValueKind::Integer | ValueKind::Number | ValueKind::Pairs if key.accepts_auto() => {
            json!({"anyOf": [{"const": "auto"}, out]})
        }
        _ => out,
    };
    match out {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn number(range: KeyRange) -> Value {
    let mut out = json!({"type": "number"});
    out[if range.min_open { "exclusiveMinimum" } else { "minimum" }] = json!(range.min);
    if range.max.is_finite() {
        out[if range.max_open { "exclusiveMaximum" } else { "maximum" }] = json!(range.max);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find<'a>(schema: &'a Value, path: &str) -> &'a Value {
        path.split('.').fold(schema, |at, name| &at["properties"][name])
    }

    /// Every key is in it, with a description; its default is of the type that it accepts.
    #[test]
    fn every_key_is_in_the_schema() {
        let schema = schema();
        for key in table::keys() {
            let property = find(&schema, key.path.0);
            assert!(
                property["description"].as_str().is_some_and(|d| d.contains(key.doc)),
                "{}",
                key.path.0
            );
            let default = &property["default"];
            assert!(
                key.default.is_empty() || !default.is_null(),
                "{}: {property}",
                key.path.0
            );
            let alone = |kind: &Value, x: &Value| match kind["type"].as_str() {
                Some("string") => x.is_string(),
                Some("boolean") => x.is_boolean(),
                Some("integer") => x.as_i64().is_some_and(|n| n >= kind["minimum"].as_i64().unwrap_or(0)),
                Some("number") => x.is_number(),
                Some("array") => x.is_array(),
                Some("object") => x.is_object(),
                _ => kind["const"] == *x || kind["enum"].as_array().is_some_and(|names| names.contains(x)),
            };
            let fits = match property["anyOf"].as_array() {
                Some(kinds) => kinds.iter().any(|kind| alone(kind, default)),
                None => alone(property, default),
            };
            assert!(key.default.is_empty() || fits, "{}: {property}", key.path.0);
        }
        assert_eq!(find(&schema, "model")["required"], json!(["path"]));
        assert_eq!(find(&schema, "tune.lora")["additionalProperties"], json!(false));
    }
}
