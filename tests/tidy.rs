//! Rules of the code base as tests: modules, file sizes, forbidden words.
//! This file defines the order of the modules; a module may import only those below it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

#[path = "tidy/book.rs"]
mod book;
#[path = "tidy/book_runs.rs"]
mod book_runs;
#[path = "tidy/features.rs"]
mod features;
#[path = "tidy/kernels.rs"]
mod kernels;
#[path = "tidy/supply.rs"]
mod supply;
#[path = "tidy/texts.rs"]
mod texts;

/// From the top down: the program (`src`), then the library (`crates/ft-core/src`). The two `lib.rs` declare the same modules.
const ROOMS: [&str; 24] = [
    "cli",
    "commands",
    "train",
    "plan",
    "setup",
    "checkpoint",
    "recipe",
    "look",
    "report",
    "history",
    "gguf",
    "hf",
    "generate",
    "engine",
    "rlhf",
    "distill",
    "sft",
    "optim",
    "model",
    "source",
    "quant",
    "peft",
    "comm",
    "trace",
];

/// The folders of the rooms.
const FOLDERS: [&str; 2] = ["src/", "crates/ft-core/src/"];

/// The crates in `crates/`, each with the crates that it may use.
const CRATES: [(&str, &[&str]); 7] = [
    ("ft-base", &[]),
    ("ft-core", &["ft-base", "ft-data", "ft-formats", "ft-ops"]),
    ("ft-data", &["ft-base", "ft-formats"]),
    ("ft-formats", &["ft-base"]),
    ("ft-hub", &["ft-base", "ft-formats"]),
    ("ft-kernels", &[]),
    ("ft-ops", &["ft-base", "ft-kernels"]),
];

const MOST_LINES: usize = 600;

struct Source {
    /// Relative to the repository, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// The module of `src/module/file.rs`; none for `lib.rs` and `main.rs`.
    fn room(&self) -> Option<&str> {
        let path = FOLDERS.iter().find_map(|f| self.path.strip_prefix(f))?;
        let (room, _) = path.split_once('/')?;
        Some(room)
    }

    /// Files that this one declares only for tests: `#[cfg(test)] mod name;`.
    fn test_files(&self) -> Vec<String> {
        let folder = match self.path.rsplit_once('/') {
            Some((folder, "mod.rs" | "lib.rs" | "main.rs")) => folder.to_string(),
            _ => self.path.trim_end_matches(".rs").to_string(),
        };
        let text = plain(&self.text);
        let declared = text.split("#[cfg(test)]").skip(1).filter_map(|rest| {
            let item = rest.split_once(';')?.0.trim();
            let name = item
                .rsplit_once("mod ")
                .map(|(before, name)| (before.trim(), name.trim()))?;
            let plain_name = name.1.chars().all(|c| c.is_alphanumeric() || c == '_');
            (plain_name && (name.0.is_empty() || name.0.starts_with("pub"))).then(|| name.1.to_string())
        });
        declared
            .flat_map(|name| [format!("{folder}/{name}.rs"), format!("{folder}/{name}/")])
            .collect()
    }

    /// Lines of product code with their numbers: no comments, no string contents, nothing under `#[cfg(test)]`.
    fn product(&self) -> Vec<(usize, String)> {
        without_tests(&plain(&self.text))
    }
}

/// Blanks comments, strings and character literals; keeps line breaks.
fn plain(text: &str) -> String {
    scan(text).0
}

/// String literals of product code, each with the number of its first line. Line breaks after a backslash are removed.
fn literals(text: &str) -> Vec<(usize, String)> {
    let (plain, strings) = scan(text);
    let product: BTreeSet<usize> = without_tests(&plain).into_iter().map(|(number, _)| number).collect();
    strings
        .into_iter()
        .filter(|(number, _)| product.contains(number))
        .collect()
}

/// The text without comments, strings and character literals, and the strings with the numbers of their lines.
fn scan(text: &str) -> (String, Vec<(usize, String)>) {
    let mut strings = Vec::new();
    let bytes: Vec<char> = text.chars().collect();
    let at = |i: usize| bytes.get(i).copied().unwrap_or('\0');
    let mut out = String::with_capacity(text.len());
    let mut i = 0;
    while i < bytes.len() {
        let blank_to = |end: usize, out: &mut String| {
            out.extend(bytes[i..end.min(bytes.len())].iter().filter(|c| **c == '\n'));
            end
        };
        let mut string = |from: usize, to: usize, out: &str| {
            let literal: String = bytes[from..to.min(bytes.len())].iter().collect();
            let joined = literal.split("\\\n").map(str::trim_start).collect();
            strings.push((out.matches('\n').count() + 1, joined));
        };
        let word_before = i > 0 && (at(i - 1).is_alphanumeric() || at(i - 1) == '_');
        if at(i) == '/' && at(i + 1) == '/' {
            let end = (i..bytes.len()).find(|&j| at(j) == '\n').unwrap_or(bytes.len());
            i = blank_to(end, &mut out);
        } else if at(i) == '/' && at(i + 1) == '*' {
            let (mut depth, mut j) = (1, i + 2);
            while depth > 0 && j < bytes.len() {
                match (at(j), at(j + 1)) {
                    ('/', '*') => (depth, j) = (depth + 1, j + 2),
                    ('*', '/') => (depth, j) = (depth - 1, j + 2),
                    _ => j += 1,
                }
            }
            i = blank_to(j, &mut out);
        } else if at(i) == 'r' && !word_before && (at(i + 1) == '"' || (at(i + 1) == '#' && "#\"".contains(at(i + 2))))
        {
            let hashes = (i + 1..bytes.len()).take_while(|&j| at(j) == '#').count();
            let mut j = i + 2 + hashes;
            while j < bytes.len() && !(at(j) == '"' && (1..=hashes).all(|h| at(j + h) == '#')) {
                j += 1;
            }
            string(i + 2 + hashes, j, &out);
            i = blank_to(j + 1 + hashes, &mut out);
            out.push_str("\"\"");
        } else if at(i) == '"' {
            let mut j = i + 1;
            while j < bytes.len() && at(j) != '"' {
                j += if at(j) == '\\' { 2 } else { 1 };
            }
            string(i + 1, j, &out);
            i = blank_to(j + 1, &mut out);
            out.push_str("\"\"");
        } else if at(i) == '\'' && (at(i + 2) == '\'' || at(i + 1) == '\\') {
            // A character literal; otherwise `'` starts a lifetime.
            let mut j = i + if at(i + 1) == '\\' { 3 } else { 2 };
            while j < bytes.len() && at(j) != '\'' {
                j += 1;
            }
            i = blank_to(j + 1, &mut out);
            out.push_str("' '");
        } else {
            out.push(at(i));
            i += 1;
        }
    }
    (out, strings)
}

/// Removes every item after `#[cfg(test)]` or `#[cfg(all(test, ...))]`: up to its `;`, or to the end of its braces.
fn without_tests(plain: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    let (mut skipping, mut depth, mut opened) = (false, 0usize, false);
    for (number, line) in plain.lines().enumerate() {
        let mut rest = line;
        // With or without a condition on the operating system.
        let mark = ["#[cfg(test)]", "#[cfg(all(test, "]
            .into_iter()
            .find(|m| line.contains(m));
        if !skipping && let Some((_, behind)) = mark.and_then(|mark| line.split_once(mark)) {
            (skipping, depth, opened) = (true, 0, false);
            rest = behind;
        }
        if !skipping {
            out.push((number + 1, line.to_string()));
            continue;
        }
        for c in rest.chars() {
            match c {
                '{' => (depth, opened) = (depth + 1, true),
                '}' => depth = depth.saturating_sub(1),
                ';' if depth == 0 => opened = true,
                _ => continue,
            }
            if opened && depth == 0 {
                skipping = false;
                break;
            }
        }
    }
    out
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files_below(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(&path, ending, found);
        } else if path.extension().is_some_and(|e| e == ending) {
            found.push(path);
        }
    }
}

fn load(folders: &[&str], ending: &str) -> Vec<Source> {
    let mut paths = Vec::new();
    for folder in folders {
        files_below(&root().join(folder), ending, &mut paths);
    }
    paths.sort();
    paths
        .into_iter()
        .map(|p| Source {
            text: fs::read_to_string(&p).unwrap(),
            path: p.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/"),
        })
        .collect()
}

/// The CUDA kernels, and their emulator for tests.
fn cuda() -> Vec<Source> {
    let sources: Vec<Source> = ["cu", "cuh", "cpp", "h"]
        .into_iter()
        .flat_map(|ending| load(&["crates/ft-kernels"], ending))
        .collect();
    assert!(sources.len() > 10, "no kernels found");
    sources
}

fn rust(folders: &[&str]) -> Vec<Source> {
    let sources = load(folders, "rs");
    assert!(sources.len() > 3, "no sources found below {folders:?}");
    sources
}

/// Sources of the product, without files that are compiled only for tests.
fn product() -> Vec<Source> {
    let sources = rust(&["src", "crates"]);
    let tests: Vec<String> = sources.iter().flat_map(Source::test_files).collect();
    let is_test = |s: &Source| {
        tests
            .iter()
            .any(|t| s.path == *t || (t.ends_with('/') && s.path.starts_with(t)))
    };
    // `oracle` helps the tests of several crates; build scripts are no product.
    let is_helper = |s: &Source| s.path.ends_with("ft-ops/src/oracle.rs") || s.path.starts_with("crates/ft-kernels/");
    sources.into_iter().filter(|s| !is_test(s) && !is_helper(s)).collect()
}

fn assert_none(faults: &[String], rule: &str) {
    assert!(faults.is_empty(), "{rule}:\n  {}", faults.join("\n  "));
}

/// True if `line` has `word` as a whole word.
fn has_word(line: &str, word: &str) -> bool {
    let touches = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word)
        .any(|(at, _)| !touches(line[..at].chars().next_back()) && !touches(line[at + word.len()..].chars().next()))
}

/// Modules of this crate in a text: `crate::module` and `use crate::{module, ...}`.
fn rooms_named(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, prefix) in text.match_indices("crate::") {
        let rest = &text[at + prefix.len()..];
        match rest.strip_prefix('{') {
            None => names.extend(
                rest.split(|c: char| !c.is_alphanumeric() && c != '_')
                    .next()
                    .map(String::from),
            ),
            Some(group) => {
                let (mut depth, mut first, mut name) = (0, true, String::new());
                for c in group.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => {
                            names.insert(std::mem::take(&mut name));
                            first = true;
                        }
                        c if first && depth == 0 && (c.is_alphanumeric() || c == '_') => name.push(c),
                        c if c.is_whitespace() => {}
                        _ => first = false,
                    }
                }
                names.insert(name);
            }
        }
    }
    names
}

#[test]
fn the_tools_of_this_file_work() {
    let text = "a // unwrap()\n\"panic!\" b '\"' c<'x> r#\"todo!\"# /* x\n y */ d\n#[cfg(test)]\nmod t {\n f() }\ne\n\
                #[cfg(all(test, unix))]\nmod u;\nf";
    let lines = without_tests(&plain(text));
    let words: Vec<&str> = lines.iter().flat_map(|(_, l)| l.split_whitespace()).collect();
    assert_eq!(words, ["a", "\"\"", "b", "'", "'", "c<'x>", "\"\"", "d", "e", "f"]);
    assert_eq!(lines.last().unwrap().0, 10);
    assert_eq!(literals(text), [(2, "panic!".to_string()), (2, "todo!".to_string())]);
    let named = rooms_named("use crate::{base::{Error, Result}, ops::rope,\n model}; crate::data::Row");
    assert_eq!(named.into_iter().collect::<Vec<_>>(), ["base", "data", "model", "ops"]);
    let module = Source {
        path: "src/a/mod.rs".into(),
        text: "mod b;\n#[cfg(test)]\nmod c;\n#[cfg(test)]\nmod tests { use x; }".into(),
    };
    assert_eq!(module.test_files(), ["src/a/c.rs", "src/a/c/"]);
    assert!(has_word("  print!(\"\")", "print!") && !has_word("eprint!()", "print!"));
}

#[test]
fn the_rooms_are_those_of_lib() {
    let lib = FOLDERS.map(|f| fs::read_to_string(root().join(f).join("lib.rs")).unwrap());
    let lib = plain(&lib.concat());
    let declared: BTreeSet<&str> = lib
        .lines()
        .filter_map(|l| l.trim().strip_prefix("pub mod "))
        .filter_map(|l| l.split(';').next())
        .collect();
    assert_eq!(declared, BTreeSet::from(ROOMS));
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    for name in ROOMS.into_iter().chain(CRATES.map(|(name, _)| name)) {
        assert!(
            map.contains(&format!("`{name}`")),
            "ARCHITECTURE.md does not describe `{name}`"
        );
    }
}

#[test]
fn crates_use_only_what_is_below_them() {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let used: BTreeSet<&str> = manifest
            .lines()
            .filter(|l| l.starts_with("ft-"))
            .filter_map(|l| l.split(['.', ' ', '=']).next())
            .collect();
        let allowed = CRATES
            .iter()
            .find(|(c, _)| *c == name)
            .map(|(_, a)| BTreeSet::from_iter(a.iter().copied()));
        assert_eq!(Some(used), allowed, "what {name} uses");
        found.insert(name);
    }
    assert_eq!(found.len(), CRATES.len());
}

/// Imports follow a total order, so there is no cycle.
#[test]
fn imports_point_downward() {
    let mut faults = Vec::new();
    for source in rust(&FOLDERS) {
        let Some(room) = source.room() else { continue };
        let Some(level) = ROOMS.iter().position(|r| *r == room) else {
            faults.push(format!("{}: room `{room}` is not in the list", source.path));
            continue;
        };
        // Unit tests count too: they are compiled with the module.
        for other in rooms_named(&plain(&source.text)) {
            if let Some(at) = ROOMS.iter().position(|r| *r == other)
                && at < level
            {
                faults.push(format!(
                    "{}: `{room}` uses `{other}`, which stands above it",
                    source.path
                ));
            }
        }
    }
    assert_none(&faults, "an import points upward");
}

#[test]
fn files_are_small() {
    let mut faults = Vec::new();
    for source in rust(&["src", "tests", "benches", "crates"]).into_iter().chain(cuda()) {
        let lines = source.text.lines().count();
        if lines > MOST_LINES {
            faults.push(format!("{}: {lines} lines", source.path));
        }
    }
    assert_none(&faults, "a file has more than 600 lines");
}

/// A public type of the library has a name of its own, so that `use` needs no `as`. (Other types are `pub(crate)`: the lint
/// `unreachable_pub`.)
#[test]
fn no_two_public_types_have_the_same_name() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in product().iter().filter(|s| s.path.starts_with("crates/")) {
        for (line, text) in source.product() {
            let kinds = ["pub struct ", "pub enum ", "pub trait ", "pub type "];
            let Some(rest) = kinds.iter().find_map(|kind| text.trim_start().strip_prefix(kind)) else {
                continue;
            };
            let name = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            places.entry(name).or_default().push(format!("{}:{line}", source.path));
        }
    }
    assert!(places.len() > 100, "only {} public types were found", places.len());
    let several = places.iter().filter(|(_, at)| at.len() > 1);
    let faults: Vec<String> = several.map(|(name, at)| format!("{name}: {}", at.join(", "))).collect();
    assert_none(&faults, "public types with the same name");
}

#[test]
fn every_file_says_what_it_is() {
    let rust = rust(&["src", "tests", "benches", "crates"]);
    let silent = |s: &&Source, start| !s.text.starts_with(start);
    let mut faults: Vec<String> = rust
        .iter()
        .filter(|s| silent(s, "//!"))
        .map(|s| s.path.clone())
        .collect();
    let cuda = cuda();
    // Replacements of CUDA headers need no description.
    let ours = cuda.iter().filter(|s| !s.path.contains("/include/"));
    faults.extend(ours.filter(|s| silent(s, "// ")).map(|s| s.path.clone()));
    assert_none(
        &faults,
        "a file does not say at its start what it is (`//!`, in CUDA `// `)",
    );
}

#[test]
fn nothing_is_left_for_later_and_no_machine_is_named() {
    let mut sources = rust(&["src", "tests", "benches", "examples", "crates"]);
    sources.extend(cuda());
    for (folder, ending) in [
        ("recipes", "toml"),
        ("docs", "md"),
        ("tests", "py"),
        ("assets", "md"),
        ("crates", "md"),
    ] {
        sources.extend(load(&[folder], ending));
    }
    for name in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        ".ci/run",
    ] {
        sources.push(Source {
            path: name.into(),
            text: fs::read_to_string(root().join(name)).unwrap(),
        });
    }
    // Built from parts, so that this file does not contain the words.
    let later = ["TO\u{44}O", "FIX\u{4d}E", "XX\u{58}"];
    let machine = [
        "/ro\u{6f}t/",
        "/ho\u{6d}e/",
        "/Use\u{72}s/",
        "/wo\u{72}k/",
        "C:\\\\Us\u{65}rs",
    ];
    let mut faults = Vec::new();
    for source in &sources {
        for (number, line) in source.text.lines().enumerate() {
            for word in later {
                if has_word(line, word) {
                    faults.push(format!("{}:{}: `{word}`", source.path, number + 1));
                }
            }
            for path in machine {
                if line.contains(path) {
                    faults.push(format!("{}:{}: `{path}`", source.path, number + 1));
                }
            }
        }
    }
    assert_none(&faults, "work left for later, or a path of some machine");
}
