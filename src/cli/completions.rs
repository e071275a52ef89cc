//! `ft completions`: a script for a shell, which asks this program what can stand at the cursor. The answers know the
//! recipes and runs of the folder, the keys of a recipe and their values.
//!
//! The script calls ft with `FT_COMPLETE=SHELL` and the words of the line after `--`.

use super::out::out_raw;
use super::recipes::SHIPPED;
use crate::base::{Error, Result};
use crate::history;
use crate::recipe::ValueKind;
use crate::recipe::table::{self, RecipeKey};
use clap::ValueEnum;
use clap_complete::CompletionCandidate as Candidate;
use clap_complete::engine::{ArgValueCompleter, PathCompleter, ValueCompleter};
use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The variable with the shell's name, set by the script.
const VARIABLE: &str = "FT_COMPLETE";

/// Bash splits words at `=` and `:`. The function joins them again, and returns what follows the last of them. Names of files are
/// not the user's words: a shell would run what a name has in backticks, so each answer is quoted.
const BASH: &str = r#"_ft() {
    # No word is expanded as a pattern; the option is set back at the end.
    local -
    set -o noglob
    COMPREPLY=()
    # In a quoted word the answers would need other quotes: bash itself completes names of files there.
    if [[ ${COMP_WORDS[COMP_CWORD]} == *[\"\'\\]* ]]; then return; fi
    local IFS=$'\013' line=$COMP_LINE words=() word piece n
    for ((n = 0; n <= COMP_CWORD; n++)); do
        word=${COMP_WORDS[n]} piece=$word
        # Up to the cursor only.
        if ((n == COMP_CWORD)) && [[ $word != [=:]* ]]; then piece=$2; fi
        if ((n > 0)) && [[ $line != [[:space:]]* && -n $line ]]; then
            words[${#words[@]}-1]+=$piece
        else
            words+=("$piece")
        fi
        line=${line#"${line%%[![:space:]]*}"}
        line=${line#"$word"}
    done
    local last=$((${#words[@]} - 1)) cursor=${words[-1]}
    COMPREPLY=($(FT_COMPLETE=bash _CLAP_IFS="$IFS" _CLAP_COMPLETE_INDEX=$last ft -- "${words[@]}" 2> /dev/null))
    COMPREPLY=("${COMPREPLY[@]#"${cursor%"$2"}"}")
    for n in "${!COMPREPLY[@]}"; do
        # The shell replaces a tilde only without quotes.
        piece=${COMPREPLY[n]} word=
        if [[ $piece == '~/'* ]]; then word='~/' piece=${piece:2}; fi
        if [[ -n $piece ]]; then printf -v "COMPREPLY[$n]" '%s%q' "$word" "$piece"; fi
    done
    if [[ ${COMPREPLY-} == *[=/] ]]; then compopt -o nospace; fi
}
complete -o bashdefault -o nosort -F _ft ft
"#;

/// Print a script that completes commands, recipes, keys and runs in a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft completions bash > ~/.local/share/bash-completion/completions/ft
  source <(ft completions zsh)                       in ~/.zshrc, after compinit
  ft completions fish > ~/.config/fish/completions/ft.fish

Then `ft train my.toml train.st<TAB>` completes keys, `train.stage=<TAB>` their values, `ft runs show <TAB>` runs.
`ft` must be in the PATH; the script stays valid when ft is replaced.")]
pub struct Args {
    /// The shell (bash: 4.4 or newer)
    shell: Shell,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl Shell {
    fn script(self) -> &'static dyn EnvCompleter {
        match self {
            Shell::Bash => &Bash,
            Shell::Zsh => &Zsh,
            Shell::Fish => &Fish,
        }
    }
}

pub fn run(args: Args) -> Result<i32> {
    let mut text = Vec::new();
    match args.shell {
        Shell::Bash => text.extend(BASH.as_bytes()),
        shell => {
            let written = shell.script().write_registration(VARIABLE, "ft", "ft", "ft", &mut text);
            written.map_err(|e| Error::internal("the script cannot be made").cause(e))?;
        }
    }
    out_raw(&String::from_utf8_lossy(&text))?;
    Ok(0)
}

/// Answers the script of a shell; `None`: no script asks. Returns the exit code.
pub fn answer(command: impl FnOnce() -> clap::Command, arguments: &[OsString]) -> Option<i32> {
    let name = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty())?;
    let Ok(shell) = Shell::from_str(&name, false) else {
        return Some(2);
    };
    let words = arguments.iter().skip_while(|word| *word != "--").skip(1);
    let words: Vec<OsString> = words.cloned().collect();
    if words.is_empty() {
        return Some(2);
    }
    let mut command = command();
    command.build();
    let here = std::env::current_dir().ok();
    let mut text = Vec::new();
    let written = shell
        .script()
        .write_complete(&mut command, words, here.as_deref(), &mut text);
    let shown = written.and_then(|()| std::io::stdout().write_all(&text));
    Some(i32::from(shown.is_err()))
}

/// The path of a recipe.
pub fn recipe() -> ArgValueCompleter {
    ArgValueCompleter::new(recipes)
}

/// `RECIPE` or `key=value`.
pub fn recipe_or_key() -> ArgValueCompleter {
    ArgValueCompleter::new(|typed: &OsStr| {
        let Some(text) = typed.to_str() else {
            return recipes(typed);
        };
        match text.split_once('=') {
            Some((key, value)) => values(key, value),
            None if text.is_empty() && !has_recipe() => recipes(typed),
            None if has_recipe() => keys(text),
            None => recipes(typed).into_iter().chain(keys(text)).collect(),
        }
    })
}

/// The name of a shipped recipe.
pub fn shipped() -> ArgValueCompleter {
    ArgValueCompleter::new(|typed: &OsStr| starting(SHIPPED.iter().map(|(name, _)| *name), typed))
}

/// A run directory.
pub fn run_directory() -> ArgValueCompleter {
    ArgValueCompleter::new(|typed: &OsStr| runs(typed, ""))
}

/// A model: the result of a run, or a directory.
pub fn model() -> ArgValueCompleter {
    ArgValueCompleter::new(|typed: &OsStr| runs(typed, "final"))
}

/// A code of `ft explain`.
pub fn code() -> ArgValueCompleter {
    ArgValueCompleter::new(|typed: &OsStr| starting(super::codes::CODES.iter().map(|c| c.code), typed))
}

fn starting<'a>(names: impl Iterator<Item = &'a str>, typed: &OsStr) -> Vec<Candidate> {
    let typed = typed.to_string_lossy();
    names
        .filter(|name| name.starts_with(&*typed))
        .map(Candidate::new)
        .collect()
}

fn recipes(typed: &OsStr) -> Vec<Candidate> {
    let is_recipe = |path: &Path| path.extension().is_some_and(|end| end == "toml");
    path_candidates(&PathCompleter::file().filter(is_recipe), typed)
}

/// Names without control characters: the scripts of the shells separate the answers by such characters.
fn path_candidates(completer: &PathCompleter, typed: &OsStr) -> Vec<Candidate> {
    let mut found = completer.complete(typed);
    found.retain(|candidate| !candidate.get_value().to_string_lossy().contains(char::is_control));
    found
}

/// True if a word before the cursor is a recipe. The last word is the one at the cursor.
fn has_recipe() -> bool {
    let words: Vec<String> = std::env::args_os()
        .skip_while(|word| word != "--")
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let before = words.split_last().map_or(&[][..], |(_, before)| before);
    before.iter().any(|word| word.ends_with(".toml"))
}

/// The keys that begin with `typed`, each with its description.
fn keys(typed: &str) -> Vec<Candidate> {
    let found = table::keys().filter(|key| key.path.0.starts_with(typed));
    let candidate =
        |key: &RecipeKey| Candidate::new(format!("{}=", key.path)).help(Some(first_sentence(key.doc).into()));
    found.map(candidate).collect()
}

fn first_sentence(text: &'static str) -> &'static str {
    text.split_once(". ")
        .map_or(text, |(first, _)| first)
        .trim_end_matches('.')
}

/// The values of a key that begin with `typed`: names, or paths for a text.
fn values(key: &str, typed: &str) -> Vec<Candidate> {
    let Some(row) = table::find(key) else {
        return Vec::new();
    };
    let names: Vec<&str> = match row.kind {
        ValueKind::Name(names) => names.to_vec(),
        ValueKind::Flag => vec!["true", "false"],
        ValueKind::Text | ValueKind::Texts => {
            let found = path_candidates(&PathCompleter::any(), OsStr::new(typed)).into_iter();
            return found.map(|path| path.add_prefix(format!("{key}="))).collect();
        }
        _ => Vec::new(),
    };
    let auto = row.accepts_auto() && !names.contains(&"auto");
    let all = names.into_iter().chain(auto.then_some("auto"));
    let found = starting(all, OsStr::new(typed)).into_iter();
    found.map(|name| name.add_prefix(format!("{key}="))).collect()
}

/// The runs below `runs`, or `inner` in each of them where it exists; and directories.
fn runs(typed: &OsStr, inner: &str) -> Vec<Candidate> {
    let found = history::find(&[PathBuf::from("runs")]).unwrap_or_default();
    let inside: Vec<PathBuf> = found.iter().map(|run| run.join(inner)).collect();
    let present = inside.iter().filter(|path| path.is_dir());
    let names: Vec<String> = present
        .map(|path| path.to_string_lossy().trim_end_matches('/').to_string())
        .filter(|name| !name.contains(char::is_control))
        .collect();
    let known = starting(names.iter().map(String::as_str), typed);
    if known.is_empty() {
        path_candidates(&PathCompleter::dir(), typed)
    } else {
        known
    }
}
