//! Null fields in messages and tools of columnar files. All structs of a column have the same fields there, so a call without
//! an argument that another call has gets it as null, and templates would print it. TRL removes these fields too. In other
//! files the author wrote the null, and it stays.

use serde_json::{Map, Value};

/// Removes null fields inside messages and tools. A message keeps its own: the reader of messages names them in its errors.
pub(super) fn remove(fields: &mut Map<String, Value>) {
    for (name, value) in fields.iter_mut() {
        match value {
            tools if name == "tools" => clean(tools),
            Value::Array(list) => list.iter_mut().for_each(clean_turn),
            one => clean_turn(one),
        }
    }
}

fn clean_turn(turn: &mut Value) {
    let is_turn = turn.get("role").is_some() || turn.get("from").is_some();
    if let (true, Value::Object(fields)) = (is_turn, turn) {
        fields.values_mut().for_each(clean);
    }
}

fn clean(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(clean),
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(clean);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use crate::layout::{RenderRules, RowPurpose};
    use crate::mapping::{MappedRow, Mapper, Mapping};
    use crate::testing::{Words, row};
    use crate::{Render, RowFormat};
    use serde_json::{Value, json};

    /// The columns of a row of this file as they are read.
    fn read(file: &str, columns: &Value) -> Value {
        let mut row = row(columns.clone());
        row.place.file = file.into();
        let rules = RenderRules {
            render: Render::Auto,
            template: None,
            codec: &Words::chatml(),
            answer: "answer",
        };
        let mapper = Mapper::new(&Mapping::default(), &row, RowFormat::Auto, RowPurpose::Learn, &rules).unwrap();
        match mapper.apply(row).unwrap() {
            MappedRow::Row(row) => Value::Object(row.fields),
            MappedRow::Skipped(why) => panic!("{why}"),
        }
    }

    /// Calls and tools of rows that have different arguments; `null`: the columns have them as null.
    fn columns(null: bool) -> Value {
        let with = |mut value: Value, name: &str| {
            if null {
                value[name] = Value::Null;
            }
            value
        };
        let call = |arguments: Value| json!([{"function": {"name": "f", "arguments": arguments}}]);
        let properties = with(json!({"city": {"type": "string"}}), "query");
        json!({
            "messages": [
                {"role": "user", "content": "q", "tool_calls": null},
                {"role": "assistant", "content": null, "tool_calls": call(with(json!({"city": "Bern"}), "query"))},
            ],
            "tools": [with(json!({"function": {"name": "f", "parameters": {"properties": properties}}}), "type")],
            "chosen": {"from": "gpt", "value": "a", "meta": with(json!({"n": 1}), "m")},
            "reward_model": {"ground_truth": null, "styles": [{"rule": null}]},
        })
    }

    #[test]
    fn null_fields_of_calls_and_tools_are_those_of_the_column_in_columnar_files_only() {
        for file in ["a.parquet", "b/A.ARROW", "c.feather"] {
            assert_eq!(read(file, &columns(true)), columns(false), "{file}");
        }
        for file in ["a.jsonl", "a.json", "parquet"] {
            assert_eq!(read(file, &columns(true)), columns(true), "{file}");
        }
    }
}
