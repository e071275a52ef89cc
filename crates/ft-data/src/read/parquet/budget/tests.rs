//! What a value of a column counts for, by the schema that pyarrow writes.

use super::*;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::SchemaDescriptor;

fn demands(schema: &str, file_bytes: u64) -> Vec<Demand> {
    let schema = SchemaDescriptor::new(Arc::new(parse_message_type(schema).unwrap()));
    let budget = Budget::new(file_bytes);
    (0..schema.num_columns())
        .map(|n| Demand::new(Arc::clone(&budget), schema.get_column_root(n), &schema.column(n)))
        .collect()
}

#[test]
fn a_value_counts_for_the_structures_around_it() {
    let numbers = "optional group n (LIST) { repeated group list { optional int64 element; } }";
    let nested = "optional group n (LIST) { repeated group list { optional group element (LIST) { repeated group list { \
                  optional int64 element; } } } }";
    let turns = "optional group messages (LIST) { repeated group list { optional group element { optional binary role \
                 (UTF8); } } }";
    let old = "repeated group turns { optional int64 role; }";
    let long = format!("repeated group turns {{ optional int64 {}; }}", "n".repeat(1000));
    let of = |field: &str| demands(&format!("message m {{ {field} }}"), 0).remove(0).value;
    let number = GROWN * (FIELD + 2 * (8 + LEVELS));
    let text = GROWN * (FIELD + 2 * (32 + LEVELS));
    assert_eq!(of("optional int64 n;"), number);
    assert_eq!(of(numbers), number);
    assert_eq!(of(nested), number + LIST);
    assert_eq!(of(turns), text + NAMED_FIELD + 2 * 4);
    assert_eq!(of(old), number + NAMED_FIELD + 2 * 4);
    assert_eq!(of(&long), number + NAMED_FIELD + 2 * 1000);
}

/// Row F11. Found after a file of 376 bytes took 164 MiB: each of more columns could have taken as much.
#[test]
fn columns_count_together() {
    let columns: String = (0..20).map(|n| format!("repeated int32 n{n}; ")).collect();
    let mut few = demands(&format!("message m {{ {columns} }}"), 2000);
    let take = |demand: &mut Demand| {
        demand.longest = 1 << 14;
        demand.check()
    };
    let fit = few.iter_mut().map(take).take_while(Result::is_ok).count();
    // 3.0 MiB each, of 49.5 MiB.
    assert_eq!(fit, 16);
    let mut more = demands(&format!("message m {{ {columns} }}"), 200_000);
    assert!(more.iter_mut().all(|demand| take(demand).is_ok()));
    // The same row again takes nothing more.
    assert!(more.iter_mut().all(|demand| take(demand).is_ok()));
}

/// Ten rows of 131,072 tokens, nearly all of them padding: tokens, mask and labels.
#[test]
fn long_rows_of_padding_are_read() {
    let column =
        |name: &str| format!("optional group {name} (LIST) {{ repeated group list {{ optional int64 element; }} }} ");
    let schema = format!(
        "message m {{ {}{}{} }}",
        column("input_ids"),
        column("attention_mask"),
        column("labels")
    );
    for demand in &mut demands(&schema, 60_000) {
        demand.longest = 131_072;
        demand.check().unwrap();
    }
}
