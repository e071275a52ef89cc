//! The table of failures in `docs/distributed.md`: each row names tests that exist.

use crate::faults::found;
use std::fs;
use std::path::Path;

/// The tests that a row names: file, name, and whether the text after the link says that they run by hand.
fn tests_of(row: &str) -> Vec<(&str, &str, bool)> {
    let links = row.split("[`").skip(1).filter_map(|link| {
        let (name, rest) = link.split_once("`](../")?;
        let (file, after) = rest.split_once(')')?;
        Some((file, name, after.starts_with(" (by hand)")))
    });
    links.filter(|(file, ..)| file.starts_with("tests/")).collect()
}

#[test]
fn every_failure_of_ranks_has_a_test() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/distributed.md");
    let text = fs::read_to_string(docs).unwrap();
    let section = text.split_once("\n## Failures\n").unwrap().1;
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 15, "{}", rows.len());
    let mut wrong = Vec::new();
    for row in rows {
        let tests = tests_of(row.rsplit_once(" | ").unwrap().1);
        if !tests.iter().any(|(.., by_hand)| !by_hand) {
            wrong.push(format!("a row without a test: {row}"));
        }
        for (file, name, said) in tests {
            match found(file, name) {
                None => wrong.push(format!("{file} has no test `{name}`")),
                Some((by_hand, _)) if by_hand != said => wrong.push(format!("{file}::{name}: by hand: {by_hand}")),
                Some(_) => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
