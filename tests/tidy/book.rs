//! The pages of `docs/` as a book: every page is in its contents, every link leads to something, the README is short.

use super::{assert_none, root};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Pages of `docs/`, and those of the root.
fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for folder in ["", "docs"] {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        pages.extend(paths.filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    pages.sort();
    pages
}

/// Lines outside of code blocks, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut inside = false;
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| {
            let fence = line.trim_start().starts_with("```");
            inside ^= fence;
            !inside && !fence
        })
        .map(|(number, line)| (number + 1, line))
        .collect()
}

/// Targets of the links of a line. Code in a line has none.
fn targets(line: &str) -> Vec<String> {
    let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
    let starts = plain.match_indices("](").map(|(at, _)| at + 2);
    starts
        .filter_map(|from| Some(plain[from..].split_once(')')?.0.to_string()))
        .collect()
}

/// The anchors of a page, as GitHub and mdBook make them from headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).into_iter().filter_map(|(_, line)| line.strip_prefix('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

#[test]
fn every_link_leads_to_something() {
    assert_eq!(targets("[a](b.md#c), `[x](y)` ![d](e.png)"), ["b.md#c", "e.png"]);
    assert!(anchors("# A `b`, c: (D)\n```\n# no\n```").contains("a-b-c-d"));
    let mut faults = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let folder = page.parent().unwrap();
        for (number, line) in prose(&text) {
            for target in targets(line) {
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
                let file = if path.is_empty() {
                    page.clone()
                } else {
                    folder.join(path)
                };
                let leads = file.exists() && {
                    let other = fs::read_to_string(&file).unwrap_or_default();
                    anchor.is_empty() || anchors(&other).contains(anchor)
                };
                if !leads {
                    faults.push(format!(
                        "{}:{number}: {target}",
                        page.strip_prefix(root()).unwrap().display()
                    ));
                }
            }
        }
    }
    assert_none(&faults, "a link leads nowhere");
}

#[test]
fn every_page_is_in_the_book() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<String> = summary.lines().flat_map(targets).collect();
    let own = pages().into_iter().filter(|p| p.parent() == Some(Path::new(&docs)));
    let names: BTreeSet<String> = own
        .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    let names: BTreeSet<String> = names.into_iter().filter(|n| n != "SUMMARY.md").collect();
    assert_eq!(listed, names);
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(
        readme.lines().count() < 100,
        "README.md has {} lines",
        readme.lines().count()
    );
}
