//! Tests of the readers with valid and broken files.

use super::{MAX_ROW_BYTES, TextUnit, read_rows};
use ft_base::Result;
use serde_json::{Value, json};

/// Rows and their places.
fn read(name: &str, bytes: &[u8]) -> Result<Vec<(Value, String)>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let folder = format!("{}/", dir.path().display());
    let mut out = Vec::new();
    read_rows(path.to_str().unwrap(), TextUnit::Auto, &mut |row| {
        let row = row?;
        out.push((Value::Object(row.fields), row.place.to_string().replace(&folder, "")));
        Ok(())
    })?;
    Ok(out)
}

fn rows(name: &str, bytes: &[u8]) -> Vec<Value> {
    read(name, bytes).unwrap().into_iter().map(|(row, _)| row).collect()
}

/// The error's text must contain all `parts`.
fn refused(name: &str, bytes: &[u8], parts: &[&str]) {
    let e = read(name, bytes).unwrap_err().to_string();
    for part in parts {
        assert!(e.contains(part), "no {part:?} in: {e}");
    }
}

#[test]
fn jsonl_with_bom_crlf_and_blank_lines_keeps_physical_line_numbers() {
    let bytes = b"\xef\xbb\xbf{\"text\": \"a\"}\r\n\r\n  \n{\"text\": \"b\"}\r\n{\"text\": \"c\"}";
    let found = read("t.jsonl", bytes).unwrap();
    let places: Vec<&str> = found.iter().map(|(_, p)| p.as_str()).collect();
    assert_eq!(places, ["t.jsonl:1", "t.jsonl:4", "t.jsonl:5"]);
    assert_eq!(found[1].0, json!({"text": "b"}));
    assert!(rows("t.jsonl", b"").is_empty());
    assert!(rows("t.jsonl", b"\xef\xbb\xbf\n\n").is_empty());
}

#[test]
fn a_broken_line_is_named_with_line_and_column() {
    let bytes = b"{\"text\": \"a\"}\n\n{\"text\": \"b\",, \"x\": 1}\n";
    refused(
        "t.jsonl",
        bytes,
        &["t.jsonl:3:14", "not valid JSON", "{\"text\": \"b\",,", "hint:"],
    );
    let long = format!("{{\"text\": \"{}\n", "x".repeat(500));
    let e = read("t.jsonl", long.as_bytes()).unwrap_err().to_string();
    assert!(e.contains("t.jsonl:1:") && e.contains("xxx...") && e.len() < 500, "{e}");
    refused(
        "t.jsonl",
        b"{\n  \"text\": \"a\"\n}\n",
        &["t.jsonl:1:", "one complete object per line"],
    );
    refused("t.jsonl", b"{\"text\": NaN}", &["t.jsonl:1:"]);
    refused("t.jsonl", b"{\"text\": \"\\ud800\"}", &["t.jsonl:1:"]);
    refused("t.jsonl", b"{\"a\": 1} {\"b\": 2}", &["t.jsonl:1:10"]);
    refused(
        "t.jsonl",
        format!("{}1{}", "[".repeat(5000), "]".repeat(5000)).as_bytes(),
        &["t.jsonl:1:", "recursion"],
    );
}

#[test]
fn a_row_that_is_not_an_object_is_named() {
    refused(
        "t.jsonl",
        b"{\"text\": \"a\"}\n[1, 2]\n",
        &["t.jsonl:2", "a list: [1,2]"],
    );
    refused("t.jsonl", b"\"text\"\n", &["t.jsonl:1", "a string"]);
    refused("t.json", b"[{\"text\": \"a\"}, 7]", &["t.json:row 2", "a number: 7"]);
}

/// Row D1.
#[test]
fn bytes_that_are_not_utf8_are_named_with_their_column() {
    refused(
        "t.jsonl",
        b"{\"text\": \"a\"}\n{\"text\": \"caf\xe9\"}\n",
        &["t.jsonl:2:14", "e9", "UTF-8"],
    );
    refused("t.jsonl", b"\xff\xfe{\0\"\0", &["t.jsonl:1:1", "UTF-16"]);
    refused("t.csv", b"text\ncaf\xe9\n", &["t.csv:2:4", "UTF-8"]);
}

#[test]
fn a_line_without_end_is_refused_before_it_is_parsed_and_a_long_one_is_read() {
    let mut bytes = b"{\"text\": \"".to_vec();
    bytes.resize(MAX_ROW_BYTES + 100, b'x');
    refused("t.jsonl", &bytes, &["t.jsonl:1", "too long", "hint:"]);
    bytes.truncate(10 << 20);
    bytes.extend(b"\"}\n{\"text\": \"next\"}\n");
    assert_eq!(rows("t.jsonl", &bytes).len(), 2);
}

#[test]
fn json_holds_an_array_or_lines() {
    let two = [json!({"text": "a"}), json!({"text": "b"})];
    assert_eq!(rows("t.json", b"[\n {\"text\": \"a\"},\n {\"text\": \"b\"}\n]\n"), two);
    assert_eq!(
        rows("t.json", b"\xef\xbb\xbf [{\"text\": \"a\"}, {\"text\": \"b\"}]"),
        two
    );
    assert_eq!(
        rows("t.json", b"\xef\xbb\xbf\n{\"text\": \"a\"}\n{\"text\": \"b\"}\n"),
        two
    );
    let places = read("t.json", b"\n{\"text\": \"a\"}\n").unwrap();
    assert_eq!(places[0].1, "t.json:2");
    assert!(rows("t.json", b" \n").is_empty());
    assert!(rows("t.json", b"[]").is_empty());
    refused(
        "t.json",
        b"[{\"text\": \"a\"},\n{\"text\" \"b\"}]",
        &["t.json:2:9", "after row 1", "array of objects"],
    );
    refused("t.json", b"[{\"text\": \"a\"}", &["t.json:1:", "EOF"]);
    refused("t.json", b"[{\"text\": \"a\"}] {}", &["t.json:1:", "trailing"]);
}

#[test]
fn an_error_of_the_caller_ends_the_reading() {
    for name in ["t.jsonl", "t.json"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let bytes: &[u8] = if name == "t.json" {
            b"[{}, {}, {}]"
        } else {
            b"{}\n{}\n{}\n"
        };
        ft_base::files::write_atomic(&path, bytes).unwrap();
        let mut seen = 0;
        let e = read_rows(path.to_str().unwrap(), TextUnit::Auto, &mut |_| {
            seen += 1;
            match seen {
                2 => Err(ft_base::Error::new("enough")),
                _ => Ok(()),
            }
        });
        assert_eq!((e.unwrap_err().what(), seen), ("enough", 2));
    }
}

#[test]
fn csv_has_a_header_quotes_and_line_numbers() {
    let bytes = b"\xef\xbb\xbfprompt,completion\r\n\"a, b\",\"say \"\"x\"\"\nand y\"\r\n\r\nc,\r\n";
    let found = read("t.csv", bytes).unwrap();
    assert_eq!(found[0].0, json!({"prompt": "a, b", "completion": "say \"x\"\nand y"}));
    assert_eq!(found[1].0, json!({"prompt": "c", "completion": null}));
    assert_eq!((found[0].1.as_str(), found[1].1.as_str()), ("t.csv:2", "t.csv:5"));
    assert_eq!(
        rows("t.tsv", b"text\tn\na, b\t1\n"),
        [json!({"text": "a, b", "n": "1"})]
    );
    assert!(rows("t.csv", b"").is_empty());
    // Spreadsheets write semicolons where the comma is the decimal mark.
    assert_eq!(
        rows("t.csv", b"\xef\xbb\xbf\"a,b\";c\r\n\"1;2\";3,5\r\n"),
        [json!({"a,b": "1;2", "c": "3,5"})]
    );
    assert_eq!(rows("t.csv", b"a\tb\n1\t2"), [json!({"a": "1", "b": "2"})]);
    // An empty cell has no value, as in pandas.
    assert_eq!(
        rows("t.csv", b"a,b\n,2\n\"\",\n"),
        [json!({"a": null, "b": "2"}), json!({"a": null, "b": null})]
    );
    assert_eq!(rows("t.csv", b"a,b;c\n1,2\n"), [json!({"a": "1", "b;c": "2"})]);
    refused(
        "t.csv",
        b"prompt,completion\na,b\nc\n",
        &["t.csv:3", "1 columns", "2 columns"],
    );
    refused("t.csv", b"a,a\n1,2\n", &["t.csv:1", "two columns are named `a`"]);
}

#[test]
fn other_files_are_refused_by_name() {
    refused(
        "t.bin",
        b"x",
        &[
            "t.bin",
            "extension .bin",
            "jsonl, ndjson, json, csv, tsv, parquet, arrow, feather, txt, md",
        ],
    );
    refused(
        "t.parquet.gz",
        b"x",
        &["extension .parquet", "a text file may be compressed"],
    );
    refused("t.jsonl.gz", b"x", &["t.jsonl.gz", "cannot read the file"]);
    refused("t.jsonl.zst", b"x", &["t.jsonl.zst", "cannot read the file"]);
    refused("t.parquet", b"x", &["t.parquet", "parquet"]);
    let dir = tempfile::tempdir().unwrap();
    let e = read_rows(dir.path().to_str().unwrap(), TextUnit::Auto, &mut |_| Ok(())).unwrap_err();
    assert!(e.to_string().contains("directory"), "{e}");
    let e = read_rows("not/there.jsonl", TextUnit::Auto, &mut |_| Ok(()))
        .unwrap_err()
        .to_string();
    assert!(e.contains("no file `") && e.contains("not/there.jsonl"), "{e}");
}

#[test]
fn compressed_files_are_read_to_their_end() {
    use std::io::Write;
    let text: String = (0..3000).map(|i| format!("{{\"text\": \"row {i}\"}}\n")).collect();
    let gzip = |text: &str| {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(text.as_bytes()).unwrap();
        out.finish().unwrap()
    };
    // Two parts, as `cat a.gz b.gz` makes.
    let parts = [gzip(&text), gzip("{\"text\": \"last\"}\n")].concat();
    let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
    let found = read("t.jsonl.gz", &parts).unwrap();
    assert_eq!((found.len(), found[3000].1.as_str()), (3001, "t.jsonl.gz:3001"));
    assert_eq!(rows("t.jsonl.zst", &zst).len(), 3000);
    assert_eq!(
        rows("T.TXT.GZ", &gzip("a\nb")),
        [json!({"text": "a"}), json!({"text": "b"})]
    );
    for (name, bytes) in [("t.jsonl.gz", &parts), ("t.jsonl.zst", &zst)] {
        refused(name, &bytes[..bytes.len() / 3], &[name, "cannot read the file"]);
    }
}

#[test]
fn a_text_file_has_lines_paragraphs_or_one_row() {
    let dir = tempfile::tempdir().unwrap();
    let text = "\u{feff}# One\r\ntwo\r\n\r\n \nthree\n\n\nfour\n";
    let read = |name: &str, unit| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut out = Vec::new();
        read_rows(path.to_str().unwrap(), unit, &mut |row| {
            let row = row?;
            out.push((row.fields["text"].as_str().unwrap().to_string(), row.place.number));
            Ok(())
        })
        .unwrap();
        out
    };
    let of = |rows: &[(&str, u64)]| rows.iter().map(|(t, n)| (t.to_string(), *n)).collect::<Vec<_>>();
    let lines = of(&[("# One", 1), ("two", 2), ("three", 5), ("four", 8)]);
    assert_eq!(read("a.txt", TextUnit::Auto), lines);
    assert_eq!(read("a.md", TextUnit::Line), lines);
    let paragraphs = of(&[("# One\r\ntwo", 1), ("three", 5), ("four", 8)]);
    assert_eq!(read("a.txt", TextUnit::Paragraph), paragraphs);
    let whole = of(&[(&text[3..], 1)]);
    assert_eq!(read("a.txt", TextUnit::File), whole);
    assert_eq!(read("a.md", TextUnit::Auto), whole);
    refused("t.txt", b"good\ncaf\xe9\n", &["t.txt:2:4", "UTF-8"]);
}

mod parquet_files {
    use super::*;
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use std::sync::Arc;

    const SCHEMA: &str = "message rows {
        optional group messages (LIST) { repeated group list { optional group element {
            optional binary role (UTF8); optional binary content (UTF8); } } }
        optional binary raw; optional int64 n; optional double x; }";

    /// Values, definition and repetition levels.
    type Column<'a> = (Vec<ByteArray>, &'a [i16], Option<&'a [i16]>);

    /// Two rows: a conversation with two messages (the second without content), and a row of nulls.
    fn file(raw: &[u8]) -> Vec<u8> {
        let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
        let mut bytes = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut bytes, schema, Arc::new(WriterProperties::builder().build())).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let text = |values: &[&[u8]]| values.iter().map(|v| ByteArray::from(v.to_vec())).collect::<Vec<_>>();
        let columns: [Column; 3] = [
            (text(&[b"user", b"assistant"]), &[4, 4, 0], Some(&[0, 1, 0])),
            (text(&["h\u{e9}".as_bytes()]), &[4, 3, 0], Some(&[0, 1, 0])),
            (text(&[raw]), &[1, 0], None),
        ];
        for (values, definition, repetition) in columns {
            let mut column = group.next_column().unwrap().unwrap();
            column
                .typed::<ByteArrayType>()
                .write_batch(&values, Some(definition), repetition)
                .unwrap();
            column.close().unwrap();
        }
        let mut column = group.next_column().unwrap().unwrap();
        column
            .typed::<Int64Type>()
            .write_batch(&[7], Some(&[1, 0]), None)
            .unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column
            .typed::<DoubleType>()
            .write_batch(&[0.5], Some(&[1, 0]), None)
            .unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        bytes
    }

    #[test]
    fn nested_lists_of_structs_become_json() {
        let found = read("t.parquet", &file(b"raw")).unwrap();
        let first = json!({
            "messages": [{"role": "user", "content": "h\u{e9}"}, {"role": "assistant", "content": null}],
            "raw": "raw", "n": 7, "x": 0.5,
        });
        assert_eq!(found[0], (first, "t.parquet:row 1".to_string()));
        assert_eq!(found[1].0, json!({"messages": null, "raw": null, "n": null, "x": null}));
        assert_eq!(found.len(), 2);
    }

    /// Files of pyarrow (goldens/parquet, make_parquet.py).
    #[test]
    fn files_of_pyarrow_are_read_as_pyarrow_reads_them() {
        let golden = |name: &str| ft_base::files::read(&crate::testing::goldens().join("parquet").join(name)).unwrap();
        let wanted: Vec<Value> = serde_json::from_slice(&golden("rows.json")).unwrap();
        assert_eq!(wanted.len(), 9);
        for name in ["plain.parquet", "snappy.parquet", "zstd.parquet"] {
            assert_eq!(rows(name, &golden(name)), wanted, "{name}");
        }
        // A value takes a thousandth of a byte.
        let masks = rows("masks.parquet", &golden("masks.parquet"));
        assert_eq!(masks.len(), 120);
        assert!(masks.iter().all(|row| row["mask"].as_array().unwrap().len() == 8192));
    }

    #[test]
    fn broken_files_and_binary_columns_are_refused_without_a_panic() {
        refused(
            "t.parquet",
            &file(b"\xff\xfe"),
            &["t.parquet:row 1", "column `raw`", "not UTF-8"],
        );
        let whole = file(b"raw");
        for cut in [0, 3, 8, whole.len() / 2, whole.len() - 1] {
            refused("t.parquet", &whole[..cut], &["t.parquet", "hint:"]);
        }
        // Every damaged byte results in rows or an error, never in a crash.
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            let _ = read("t.parquet", &damaged);
        }
    }
}
