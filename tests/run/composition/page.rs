//! docs/composition.md read back: the verdict of every combination.

use super::boxes::Combination;
use super::levels::Axis;
use super::{Verdict, Verdicts, combinations};
use std::collections::BTreeSet;

/// Stands for `\|` while a row is cut into cells.
const BAR: &str = "\u{1}";

/// The verdicts that a section of the page states. A combination that is in no table works.
pub fn stated(page: &str, title: &str, axes: &[Axis]) -> Verdicts {
    let mut found: Verdicts = combinations(axes).into_iter().map(|c| (c, Verdict::Works)).collect();
    let heading = format!("\n## {title}\n");
    let section = page.split_once(&heading).map_or("", |(_, after)| after);
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut refused = None;
    for line in section.lines() {
        let line = line.replace("\\|", BAR);
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        match (cells[0], refused) {
            ("refused", _) => refused = Some(true),
            ("works; a setting has no effect", _) => refused = Some(false),
            (text, Some(refused)) if cells.len() == axes.len() + 1 && !text.starts_with("---") => {
                let chosen = axes.iter().zip(&cells[1..]).map(|(axis, cell)| values(axis, cell));
                for combination in product(chosen) {
                    add(found.get_mut(&combination), refused, text.replace(BAR, "|"));
                }
            }
            _ => {}
        }
    }
    found
}

/// The values that a cell names: `all`, `all but a; b` or `a; b`. A name that the axis does not have is left out.
fn values((_, levels): &Axis, cell: &str) -> BTreeSet<usize> {
    let named = |names: &str| -> BTreeSet<usize> {
        let names = names.split("; ");
        names
            .filter_map(|name| levels.iter().position(|(n, _)| *n == name))
            .collect()
    };
    match (cell, cell.strip_prefix("all but ")) {
        ("all", _) => (0..levels.len()).collect(),
        (_, Some(names)) => &(0..levels.len()).collect() - &named(names),
        _ => named(cell),
    }
}

fn product(chosen: impl Iterator<Item = BTreeSet<usize>>) -> Vec<Combination> {
    chosen.fold(vec![Vec::new()], |all, values| {
        let longer = |c: &Combination| values.iter().map(|i| [&c[..], &[*i]].concat()).collect::<Vec<_>>();
        all.iter().flat_map(longer).collect()
    })
}

fn add(verdict: Option<&mut Verdict>, refused: bool, text: String) {
    let Some(verdict) = verdict else { return };
    match (&mut *verdict, refused) {
        (Verdict::Refused(texts), true) | (Verdict::NoEffect(texts), false) => texts.push(text),
        (_, true) => *verdict = Verdict::Refused(vec![text]),
        (_, false) => *verdict = Verdict::NoEffect(vec![text]),
    }
}
