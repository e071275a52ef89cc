//! The pages of `docs/` as a book: every page is in its contents, every link leads to something, the README is short.

use super::{assert_none, root};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use ft::cli::Cli;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Pages of `docs/`, and those of the root.
pub fn pages() -> Vec<PathBuf> {
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
    for line in summary.lines().filter(|line| line.contains("](")) {
        let (title, rest) = line.split_once("](").unwrap();
        let title = title.trim_start_matches("- ").trim_start_matches('[');
        let page = fs::read_to_string(docs.join(rest.trim_end_matches(')'))).unwrap();
        assert_eq!(page.lines().next(), Some(format!("# {title}").as_str()), "{line}");
    }
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(
        readme.lines().count() < 100,
        "README.md has {} lines",
        readme.lines().count()
    );
}

#[test]
fn the_page_of_commands_has_every_command() {
    let page = fs::read_to_string(root().join("docs/commands.md")).unwrap();
    let mut program = Cli::command();
    program.build();
    let shown = program.get_subcommands().filter(|c| !c.is_hide_set());
    let rows = shown.filter(|c| c.get_name() != "help").map(|command| {
        let about = command.get_about().unwrap();
        format!("| `ft {}` | {about} | `ft {} ", command.get_name(), command.get_name())
    });
    let rows: Vec<String> = rows.collect();
    assert!(rows.len() > 20);
    let missing: Vec<String> = rows.into_iter().filter(|row| !page.contains(row.as_str())).collect();
    assert_none(&missing, "docs/commands.md lacks a row that begins so");
}

/// The words of a command line: quotes keep spaces, a comment and what follows a pipe or a redirection are left out.
pub fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, '|' | '>' | ';' | '&') => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Commands with the numbers of their lines.
pub type Commands = Vec<(usize, String)>;

/// The commands of ft in a page: whole ones in blocks of code, and those named in the text.
pub fn commands(text: &str) -> (Commands, Commands) {
    let (mut whole, mut named) = (Vec::new(), Vec::new());
    let (mut inside, mut joined) = (false, String::new());
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        if line.trim_start().starts_with("```") {
            inside = !inside;
        } else if inside {
            joined.push_str(line.trim());
            if joined.ends_with('\\') {
                joined.pop();
                continue;
            }
            let line = std::mem::take(&mut joined);
            let line = line.strip_prefix("$ ").unwrap_or(&line).to_string();
            for part in line.split("&& ") {
                if part.starts_with("ft ") {
                    whole.push((number, part.to_string()));
                }
            }
        } else {
            let code = line.split('`').skip(1).step_by(2);
            named.extend(code.filter(|c| c.starts_with("ft ")).map(|c| (number, c.to_string())));
        }
    }
    (whole, named)
}

/// A command in a block of code must be complete. One in the text may leave arguments out, but not have unknown ones.
#[test]
fn every_command_of_the_book_is_one_of_ft() {
    assert_eq!(words("ft a 'b c' d=\"e\" # f"), ["ft", "a", "b c", "d=e"]);
    let parse = |line: &str| Cli::try_parse_from(words(line)).map_err(|e| e.kind());
    assert!(parse("ft train r.toml --resum").is_err() && parse("ft train r.toml --resume").is_ok());
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let (whole, named) = commands(&text);
        let incomplete = |kind: &ErrorKind| {
            [
                ErrorKind::MissingRequiredArgument,
                ErrorKind::MissingSubcommand,
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
            ]
            .contains(kind)
        };
        // `--to` alone: the value is left out as well.
        let short =
            |kind: &ErrorKind| incomplete(kind) || [ErrorKind::InvalidValue, ErrorKind::ValueValidation].contains(kind);
        count += whole.len() + named.len();
        let place = |number| format!("{}:{number}", page.strip_prefix(root()).unwrap().display());
        for (number, line) in whole {
            if let Err(kind) = parse(&line) {
                faults.push(format!("{}: `{line}`: {kind}", place(number)));
            }
        }
        for (number, line) in named {
            if let Err(kind) = parse(&line)
                && !short(&kind)
            {
                faults.push(format!("{}: `{line}`: {kind}", place(number)));
            }
        }
    }
    assert!(count > 100, "{count} commands");
    assert_none(&faults, "ft has no such command");
}
