//! The texts below the options of a help page: the window decides where their lines end, not the source.

use clap::Command;

/// A text with each paragraph in one line. Lines that begin with a space, such as examples, stay as they are.
fn joined(text: &str) -> String {
    let mut out = String::new();
    let mut plain = false;
    for line in text.lines() {
        let own = line.is_empty() || line.starts_with(' ');
        if !out.is_empty() {
            out.push(if plain && !own { ' ' } else { '\n' });
        }
        out.push_str(line);
        plain = !own;
    }
    out
}

/// The definition of a command with such texts, also in its subcommands.
pub fn with_paragraphs(command: Command) -> Command {
    let short = command.get_after_help().map(|text| joined(&text.to_string()));
    let long = command.get_after_long_help().map(|text| joined(&text.to_string()));
    let command = match short {
        Some(text) => command.after_help(text),
        None => command,
    };
    let command = match long {
        Some(text) => command.after_long_help(text),
        None => command,
    };
    command.mut_subcommands(with_paragraphs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_joined_and_examples_are_not() {
        let text = "Examples:\n  ft a  one\n  ft b\n\nSome text that\ngoes on.\n\nMore:\n  x";
        assert_eq!(
            joined(text),
            "Examples:\n  ft a  one\n  ft b\n\nSome text that goes on.\n\nMore:\n  x"
        );
    }

    #[test]
    fn a_narrow_window_has_no_short_lines_in_a_paragraph() {
        let mut command = super::super::definition().term_width(60);
        command.build();
        let export = command.find_subcommand_mut("export").unwrap();
        let help = export.render_help().to_string();
        let (_, text) = help.split_once("\nA checkpoint is exported").unwrap();
        let lines: Vec<&str> = text.trim_end().lines().collect();
        assert!(lines.len() > 3);
        for pair in lines[1..].windows(2) {
            let next = pair[1].split(' ').next().unwrap();
            assert!(pair[0].len() + 1 + next.len() > 60, "{help}");
        }
    }
}
