//! The texts of the library name no recipe key, no flag and no subcommand: `recipe::terms` has them. No file has a marker
//! of a merge. Words are plain, in American spelling.

use super::book::pages;
use super::{Source, assert_none, has_word, literals, load, product, root, rust};
use clap::CommandFactory;
use ft::base::ErrorKind;
use ft::cli::{CODES, Cli};
use ft::recipe::table::{TABLES, keys};
use ft::recipe::terms::TERMS;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The string literals of product code with their places, of the program or of the library.
fn texts(of_program: bool) -> Vec<(String, String)> {
    let sources = product()
        .into_iter()
        .filter(|s| s.path.starts_with("src/") == of_program);
    let texts = sources.flat_map(|s| {
        let place = move |(line, text)| (format!("{}:{line}", s.path), text);
        literals(&s.text).into_iter().map(place).collect::<Vec<_>>()
    });
    texts.collect()
}

/// Recipe keys, flags and subcommands, as a text would name them.
fn names_of_the_program() -> Vec<String> {
    let tables = TABLES
        .iter()
        .map(|(table, _)| table.to_string())
        .filter(|t| t.contains('.'));
    let mut names: Vec<String> = keys().map(|k| k.path.0.to_string()).chain(tables).collect();
    for command in Cli::command().get_subcommands() {
        names.push(format!("ft {}", command.get_name()));
        let commands = std::iter::once(command).chain(command.get_subcommands());
        let flags = commands.flat_map(|c| c.get_arguments()).filter_map(|a| a.get_long());
        names.extend(flags.map(|flag| format!("--{flag}")));
    }
    names
}

/// Rust paths in a text: `Type::item`, `module::function`.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    words
        .map(|word| word.trim_matches(':'))
        .filter(|word| word.contains("::") && word.starts_with(char::is_alphabetic))
}

#[test]
fn the_library_names_no_key_and_no_flag() {
    let names = names_of_the_program();
    assert!(names.iter().any(|n| n == "--resume") && names.iter().any(|n| n == "tune.lora.r"));
    let mut faults = Vec::new();
    for (place, text) in texts(false) {
        let named = names.iter().filter(|name| has_word(&text, name));
        faults.extend(named.map(|name| format!("{place}: `{name}`")));
        let unknown = paths(&text).filter(|path| !TERMS.iter().any(|(name, _)| name == path));
        faults.extend(unknown.map(|path| format!("{place}: `{path}` is not in the table")));
    }
    assert_none(
        &faults,
        "a text of the library must name the setting as `recipe::terms` does",
    );
}

#[test]
fn each_term_is_in_the_library_alone() {
    let (library, program) = (texts(false), texts(true));
    let mut faults = Vec::new();
    for (name, _) in TERMS {
        if !library.iter().any(|(_, text)| has_word(text, name)) {
            faults.push(format!("`{name}` is in no text of the library"));
        }
        let own = program.iter().filter(|(place, _)| !place.contains("/recipe/terms.rs:"));
        faults.extend(
            own.filter(|(_, text)| has_word(text, name))
                .map(|(place, _)| format!("{place}: `{name}`")),
        );
    }
    assert_none(
        &faults,
        "a term of `recipe::terms` is unused, or is in a text of the program",
    );
}

/// A function of product code: the constructors of errors that it calls, and its literals.
struct Function {
    constructors: BTreeSet<String>,
    literals: Vec<String>,
}

/// The functions of a file. A closure belongs to the function around it.
fn functions(source: &Source) -> Vec<Function> {
    let lines = source.product();
    let starts: Vec<usize> = lines
        .iter()
        .filter(|(_, line)| has_word(line, "fn"))
        .map(|(n, _)| *n)
        .collect();
    let at = |number: usize| starts.partition_point(|start| *start <= number);
    let mut found: Vec<Function> = (0..=starts.len())
        .map(|_| Function {
            constructors: BTreeSet::new(),
            literals: Vec::new(),
        })
        .collect();
    for (number, line) in &lines {
        let named = line.split("Error::").skip(1).filter_map(|rest| rest.split_once('('));
        let classes = line.split("ErrorKind::").skip(1);
        let classes = classes.filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next());
        let own = &mut found[at(*number)].constructors;
        own.extend(named.map(|(name, _)| name.to_string()));
        own.extend(classes.map(str::to_string));
    }
    for (number, text) in literals(&source.text) {
        found[at(number)].literals.push(text);
    }
    found
}

/// The constructor of the errors of a class.
fn constructor(class: ErrorKind) -> &'static str {
    match class {
        ErrorKind::Failed => "new",
        ErrorKind::Usage => "usage",
        ErrorKind::Io => "io",
        ErrorKind::Format => "format",
        ErrorKind::Shape => "shape",
        ErrorKind::Argument => "argument",
        ErrorKind::NotFound => "not_found",
        ErrorKind::NonFinite => "non_finite",
        ErrorKind::OutOfMemory => "out_of_memory",
        ErrorKind::Network => "network",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Internal => "internal",
        ErrorKind::Signal(_) => "signal",
        other => panic!("a new class of errors: {other:?}"),
    }
}

/// A code is found by its class and a part of a message: a message that changes must not lose its code.
#[test]
fn each_code_is_of_an_error_that_is_made() {
    let sources = product().into_iter().filter(|s| s.path != "src/cli/codes.rs");
    let all: Vec<Function> = sources.flat_map(|s| functions(&s)).collect();
    let mut faults = Vec::new();
    for code in CODES {
        let made = constructor(code.class);
        let class = format!("{:?}", code.class);
        let makes = |f: &&Function| f.constructors.contains(made) || f.constructors.contains(&class);
        let of_class = || all.iter().filter(makes);
        let has = |part: &str| of_class().any(|f| f.literals.iter().any(|text| text.contains(part)));
        let lost = code.parts.iter().filter(|part| part.contains('{') || !has(part));
        faults.extend(lost.map(|part| format!("{}: {part:?}", code.code)));
        if of_class().next().is_none() {
            faults.push(format!("{}: {made}", code.code));
        }
    }
    assert_none(&faults, "no function of ft makes an error of this class with this part");
}

/// Every file of the repository: nothing below hidden folders (except `.ci`), and no build output.
fn files(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_string();
        let is_link = fs::symlink_metadata(&path).unwrap().is_symlink();
        match name.as_str() {
            "target" | "runs" => {}
            hidden if hidden.starts_with('.') && hidden != ".ci" && path.is_dir() => {}
            _ if is_link => {}
            _ if path.is_dir() => files(&path, found),
            _ => found.push(path),
        }
    }
}

#[test]
fn no_file_has_a_marker_of_a_merge() {
    let mut paths = Vec::new();
    files(root(), &mut paths);
    assert!(
        paths.iter().any(|path| path.ends_with("docs/lab-book.md"))
            && paths.iter().any(|path| path.ends_with(".ci/run"))
    );
    // A line of seven equals signs alone, or of seven `<` or `>` before a name.
    let is_marker = |line: &str| {
        line == "=".repeat(7)
            || ["<", ">", "|"]
                .iter()
                .any(|c| line.starts_with(&format!("{} ", c.repeat(7))))
    };
    let mut faults = Vec::new();
    for path in paths {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let marked = text.lines().enumerate().filter(|(_, line)| is_marker(line));
        faults.extend(marked.map(|(i, line)| format!("{}:{}: {line}", path.display(), i + 1)));
    }
    assert_none(&faults, "a merge was committed with its markers");
}

/// Words that are not the field's: readers whose second language is English look them up in vain.
#[test]
fn the_language_is_plain() {
    let refused = [
        "told",
        "tells",
        "whoever",
        "nobody",
        "rides",
        "riding",
        "aboard",
        "goes home",
        "at hand",
        "knows",
        "plays",
        "takes away",
        "remembers",
        "forgets",
        "wishes",
        "meets",
        "rests",
        "strangers",
    ];
    let mut faults = Vec::new();
    for source in rust(&["src", "crates"]) {
        // The list itself; the interpreter's texts are jinja2's; test data.
        if source.path.contains("/jinja/") || source.path.contains("/testdata/") {
            continue;
        }
        for (number, line) in source.text.lines().enumerate() {
            for word in refused.iter().filter(|word| has_word(line, word)) {
                faults.push(format!("{}:{}: `{word}`", source.path, number + 1));
            }
        }
    }
    // The lab book is a diary: its entries stay as they were written.
    for page in pages().iter().filter(|page| !page.ends_with("lab-book.md")) {
        for (number, line) in fs::read_to_string(page).unwrap().lines().enumerate() {
            for word in refused.iter().filter(|word| has_word(line, word)) {
                faults.push(format!("{}:{}: `{word}`", page.display(), number + 1));
            }
        }
    }
    // Of other files only the comments: their code has names of other projects, and texts that users may write.
    let endings = ["rs", "cu", "cuh", "h", "cpp", "py", "sh", "md"];
    let others = endings
        .iter()
        .flat_map(|ending| load(&["crates", "tools", "tests", "benches"], ending));
    for source in others.filter(|s| {
        ["/jinja/", "/testdata/", "/goldens/"]
            .iter()
            .all(|f| !s.path.contains(f))
    }) {
        for (number, comment) in comments(&source) {
            for word in refused.iter().filter(|word| has_word(comment, word)) {
                faults.push(format!("{}:{number}: `{word}`", source.path));
            }
        }
    }
    assert_none(&faults, "a word that is not plain technical English");
}

/// The comments of a file with the numbers of their lines: all lines of a page, and the docstrings of Python.
fn comments(source: &Source) -> Vec<(usize, &str)> {
    let ending = source.path.rsplit_once('.').map_or("", |(_, ending)| ending);
    let mark = match ending {
        "md" => "",
        "py" | "sh" => "#",
        _ => "//",
    };
    let mut in_docstring = false;
    let mut found = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let quotes = line.matches("\"\"\"").count();
        let comment = if ending == "py" && (in_docstring || quotes > 0) {
            Some(line)
        } else {
            line.split_once(mark).map(|(_, comment)| comment)
        };
        in_docstring ^= quotes % 2 == 1;
        found.extend(comment.map(|comment| (index + 1, comment)));
    }
    found
}

/// Parts of words in British spelling.
const BRITISH: [&str; 26] = [
    "analyse",
    "artefact",
    "behaviour",
    "cancelled",
    "cancelling",
    "catalogue",
    "centre",
    "colour",
    "favour",
    "flavour",
    "generalis",
    "honour",
    "initialis",
    "licence",
    "materialis",
    "maximis",
    "minimis",
    "modelling",
    "neighbour",
    "normalis",
    "optimis",
    "quantis",
    "recognis",
    "serialis",
    "summaris",
    "tokenis",
];

/// British spelling that stays: the file, the part of the word, the reason.
const STAYS: [(&str, &str, &str); 5] = [
    ("benches/corda.py", "colour", "a question of `assets/world`"),
    (
        "src/recipe/peers/keys.rs",
        "optimis",
        "a key that users of other tools write",
    ),
    (
        "src/recipe/peers/values.rs",
        "modelling",
        "a value that users of other tools write",
    ),
    ("src/recipe/suggest.rs", "optimis", "a table that a user writes"),
    (
        "tests/parity/make_tokenizers.py",
        "colour",
        "a text of the golden files",
    ),
];

#[test]
fn the_spelling_is_american() {
    let endings = ["rs", "cu", "cuh", "h", "cpp", "py", "sh", "js", "html", "css", "md"];
    let folders = ["src", "crates", "tests", "tools", "docs", "benches"];
    let sources = endings.iter().flat_map(|ending| load(&folders, ending));
    // The lab book stays as it was written; this file has the list; golden files come from other tools.
    let stays = ["docs/lab-book.md", "tests/tidy/texts.rs", "/goldens/"];
    let mut faults = Vec::new();
    let mut used = BTreeSet::new();
    for source in sources.filter(|s| stays.iter().all(|part| !s.path.contains(part))) {
        for (index, line) in source.text.lines().enumerate() {
            let line = line.to_lowercase();
            for part in BRITISH.iter().filter(|part| line.contains(**part)) {
                match STAYS
                    .iter()
                    .position(|(path, word, _)| source.path == *path && word == part)
                {
                    Some(entry) => {
                        used.insert(entry);
                    }
                    None => faults.push(format!("{}:{}: `{part}`", source.path, index + 1)),
                }
            }
        }
    }
    let unused = (0..STAYS.len()).filter(|entry| !used.contains(entry));
    faults.extend(unused.map(|entry| format!("{:?} is in no file", STAYS[entry])));
    assert_none(&faults, "a word in British spelling");
}
