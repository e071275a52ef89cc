//! Hashes of what rewards read beside the answers: reward models, schemas, the files of programs. A resumed run compares
//! them.

use super::model::RewardModel;
use super::{program, split};
use crate::base::Result;
use crate::data::content;
use crate::recipe::RlSection;
use std::path::Path;

/// The rewards of a recipe, known by their content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewardContents {
    /// Hash of all rewards, with the content of models and schemas in place of their paths, and the commands of programs without
    /// folders.
    pub rewards: String,
    /// Hash of the files of the programs; `None`: none is known.
    pub programs: Option<String>,
}

/// `None`: no reward reads a file.
///
/// Errors: a file that cannot be read; a directory without a reward model; a quote that is not closed.
pub fn contents(rlhf: &RlSection) -> Result<Option<RewardContents>> {
    let (mut rewards, mut programs) = (Vec::new(), Vec::new());
    let mut reads = false;
    for text in &rlhf.rewards {
        let (name, argument) = split(text);
        let known = match (name, argument) {
            ("json", Some(file)) => Some(content::hash(Path::new(file))?),
            ("model", Some(dir)) => Some(RewardModel::content(dir)?),
            ("program", Some(command)) => {
                let words = program::words(command)?;
                // A program may be executable and not readable.
                let file = program::own_file(&words).and_then(|at| content::hash(Path::new(&words[at])).ok());
                let names = without_folders(&words);
                reads |= file.is_some() || names != words;
                programs.extend(file);
                rewards.push(format!("{name}:{names:?}"));
                continue;
            }
            _ => None,
        };
        reads |= known.is_some();
        rewards.push(known.map_or(text.clone(), |known| format!("{name}:{known}")));
    }
    Ok(reads.then(|| RewardContents {
        rewards: content::of_texts(&rewards),
        programs: (!programs.is_empty()).then(|| content::of_texts(&programs)),
    }))
}

/// The words of a command, without the folders of those that are paths by their form, whether the files exist or not: the program may
/// write some of them. Other words with `/` are addresses, fractions or the text of a script.
fn without_folders(words: &[String]) -> Vec<String> {
    let is_path = |word: &str| {
        ["/", "./", "../", "~/"].iter().any(|start| word.starts_with(start)) && !word.contains(char::is_whitespace)
    };
    let name = |word: &String| match word.rsplit_once('/') {
        Some((_, name)) if is_path(word) => name.to_string(),
        _ => word.clone(),
    };
    words.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{reward_model, section};
    use super::*;
    use std::fs;

    fn of(rewards: &[String]) -> Option<RewardContents> {
        contents(&section(rewards)).unwrap()
    }

    #[test]
    fn rewards_without_files_have_no_content() {
        let texts = ["exact", "json", "regex:a", "length:5", "program:no-such-program x"];
        assert_eq!(of(&texts.map(String::from)), None);
    }

    #[test]
    fn a_schema_is_known_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let of_file = |name: &str, text: &str, other: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            of(&[format!("json:{}", path.display()), other.to_string()]).unwrap()
        };
        let found = of_file("a.json", "{}", "exact");
        assert_eq!(found.programs, None);
        assert_eq!(found, of_file("b.json", "{}", "exact"));
        assert_ne!(found, of_file("a.json", "true", "exact"));
        // The other rewards count too: with an equal hash only paths have changed.
        assert_ne!(found, of_file("a.json", "{}", "numeric"));
    }

    #[test]
    fn a_program_is_known_by_its_file_its_name_and_its_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let of_script = |folder: &str, text: &str, arguments: &str| {
            let path = dir.path().join(folder).join("score.py");
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            of(&[format!("program:python3 -u {} {arguments}", path.display())]).unwrap()
        };
        let found = of_script("a", "print(1)", "--best 3");
        assert_eq!(found, of_script("b", "print(1)", "--best 3"));
        let changed = of_script("a", "print(2)", "--best 3");
        assert_eq!(found.rewards, changed.rewards);
        assert_ne!(found.programs, changed.programs);
        assert_ne!(found.rewards, of_script("a", "print(1)", "--best 4").rewards);
        for [one, other] in [
            ["w=1/2", "w=9/2"],
            ["http://a/v1", "http://b/v1"],
            ["a/model", "b/model"],
        ] {
            let of = |argument| of_script("a", "print(1)", argument).rewards;
            assert_ne!(of(one), of(other), "{one}");
        }
    }

    #[test]
    fn the_script_is_found_behind_usual_launchers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("score.py");
        fs::write(&path, "print(1)").unwrap();
        let at = |before: &str| {
            let words: Vec<String> = format!("{before} {} data.json", path.display())
                .split_whitespace()
                .map(String::from)
                .collect();
            program::own_file(&words).map(|at| words[at].clone())
        };
        let script = Some(path.display().to_string());
        for found in [
            "",
            "python3.12",
            "/usr/bin/env python3",
            "env A=1 B=2 python3 -u",
            "python3 -W ignore",
            "python3 -Wignore",
            "bash -ue",
            "perl -Imodule",
            "uv run",
        ] {
            assert_eq!(at(found), script, "{found}");
        }
        for none in [
            "python3 -m",
            "python3 -uc",
            "judge",
            "sh -c",
            "bash -lc",
            "perl -ne",
            "node -e",
        ] {
            assert_eq!(at(none), None, "{none}");
        }
    }

    /// Row R6.
    #[test]
    fn a_reward_model_is_known_by_weights_score_and_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let of_model = |name: &str, change: &str| {
            let path = dir.path().join(name);
            reward_model(&path, &|name, values| {
                if name.contains(change) {
                    values[3] += 0.25;
                }
            });
            path
        };
        let hash = |path: &Path| of(&[format!("model:{}", path.display())]).unwrap().rewards;
        let first = of_model("a", "nothing");
        let found = hash(&first);
        assert_eq!(found, hash(&of_model("b", "nothing")));
        assert_ne!(found, hash(&of_model("c", "layers.1.mlp.down_proj")));
        assert_ne!(found, hash(&of_model("d", "score")));
        fs::write(first.join("chat_template.jinja"), "{{ messages }}").unwrap();
        assert_ne!(found, hash(&first));
    }
}
