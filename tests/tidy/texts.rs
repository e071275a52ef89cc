//! The texts of the library name no recipe key, no flag and no subcommand: `recipe::terms` has them.

use super::{assert_none, has_word, literals, product};
use clap::CommandFactory;
use ft::cli::Cli;
use ft::recipe::table::{TABLES, keys};
use ft::recipe::terms::TERMS;

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
