//! Rows that are dropped before training, in runs of the program.

use crate::bench::{Bench, said};
use serde_json::Value;
use std::fs;

/// The rows of the bench twice, and its first question in an evaluation file.
#[test]
fn dropped_rows_are_shown_counted_and_listed() {
    let bench = Bench::new();
    let row = |i: usize| {
        let question = format!("Which of the numbers from one to {i} is the largest one that anybody would ever say?");
        format!("{{\"prompt\": \"{question}\", \"completion\": \"It is {i}.\"}}\n")
    };
    let rows: String = [1, 2, 3, 1, 4].map(row).concat();
    fs::write(bench.path("rows.jsonl"), rows).unwrap();
    let question = "{\"q\": \"the numbers from one to 3 is the largest one that anybody would ever say\"}\n";
    fs::write(bench.path("test.jsonl"), question).unwrap();
    let settings = [
        "data.train=rows.jsonl",
        "data.dedup=exact",
        "data.decontaminate=test.jsonl",
    ];
    let data = bench.ft(&[&["data", "--recipe", "r.toml", "--stats", "--json"], &settings[..]].concat());
    assert!(data.status.success(), "{}", said(&data));
    let counts: Value = serde_json::from_slice(&data.stdout).unwrap();
    assert_eq!(counts["train"]["rows"], 3);
    let screened = &counts["screened"];
    assert_eq!(
        (
            &screened["rows"],
            &screened["exact_duplicates"],
            &screened["evaluation"]
        ),
        (&5.into(), &1.into(), &1.into())
    );
    let run = [
        &[
            "train",
            "--recipe",
            "r.toml",
            "train.max_steps=2",
            "train.output_dir=run",
        ],
        &settings[..],
    ]
    .concat();
    let out = bench.ft(&run);
    assert!(out.status.success(), "{}", said(&out));
    assert!(
        said(&out).contains("dropped 1 of 5 rows: exact duplicates"),
        "{}",
        said(&out)
    );
    let listed = fs::read_to_string(bench.path("run/dropped_rows.jsonl")).unwrap();
    let listed: Vec<Value> = listed.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(
        (&listed[0]["row"], &listed[0]["reason"], &listed[0]["other"]),
        (&"rows.jsonl:3".into(), &"evaluation".into(), &"test.jsonl:1".into())
    );
    assert_eq!(
        (&listed[1]["row"], &listed[1]["other"]),
        (&"rows.jsonl:4".into(), &"rows.jsonl:1".into())
    );
    // The run owns the file.
    let again = bench.ft(&[&run[..], &["--overwrite"]].concat());
    assert!(again.status.success(), "{}", said(&again));
    // Nothing is left.
    fs::write(bench.path("left.jsonl"), row(3)).unwrap();
    let e = bench.ft(&[
        "data",
        "--recipe",
        "r.toml",
        "data.train=left.jsonl",
        "data.decontaminate=test.jsonl",
    ]);
    assert!(
        !e.status.success() && said(&e).contains("no row is left to train"),
        "{}",
        said(&e)
    );
}
