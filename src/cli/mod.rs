//! The command line: arguments in, exit code out; one file per subcommand. Only this module reads flags and environment
//! variables and prints results. Uses no tensors.
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 ok, 1 the run or an input failed,
//! 2 usage or recipe error, 70 a bug in ft, 128 + N stopped by signal N with the state saved (130 for Ctrl-C, 143 for
//! SIGTERM, 129 for SIGHUP), 131 stopped by a second Ctrl-C.

mod adapter;
mod bench;
mod codes;
mod completions;
mod convert;
mod dash;
mod data;
mod distill;
mod doctor;
mod eval;
mod explain;
mod export;
mod generate;
mod help;
mod import;
mod init;
mod launch;
mod merge;
mod models;
mod out;
mod plan;
mod push;
mod quantize;
mod recipe_args;
mod recipes;
mod runs;
mod spawn;
mod train;
mod tune_lr;
mod watch;

pub use codes::{CODES, ErrorCode};
// For the fuzz targets.
#[doc(hidden)]
pub use launch::place_in;
pub use out::{out, out_raw, out_text};
pub use recipes::SHIPPED;

use crate::base::paths::shell_word;
use crate::base::{Error, Result, allocator, cache, is_caught, signal, threads};
use crate::ops::CpuBackend;
use crate::recipe;
use crate::report::{self, OutputStyle};
use crate::train::ranks::RunRanks;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::Path;

const EXAMPLES: &str = "Examples:
  ft recipes copy quickstart --with-data  a recipe with its model and rows
  ft train quickstart.toml train.max_steps=20";

const MORE: &str = "Results go to standard output, everything else to standard error.

Exit codes: 0 ok, 1 the run or an input failed, 2 usage or recipe error, 70 a bug in ft, 130/143 stopped by a signal with
the state saved, 131 stopped by a second Ctrl-C (unsaved state is lost)

Environment: NO_COLOR, FT_NO_PROGRESS (no progress lines), HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE";

/// Fine-tune large language models with little memory, one layer at a time
#[derive(Debug, Parser)]
#[command(name = "ft", version, max_term_width = 110, arg_required_else_help = true)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{MORE}"))]
pub struct Cli {
    /// Number of compute threads [default: all cores]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Print only errors, warnings and results
    #[arg(short, long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(train::Args),
    Launch(spawn::Args),
    Init(init::Args),
    Import(import::Args),
    Plan(plan::Args),
    Data(data::Args),
    Eval(eval::Args),
    Generate(generate::Args),
    Merge(merge::Args),
    Export(export::Args),
    Push(push::Args),
    Quantize(quantize::Args),
    Convert(convert::Args),
    Distill(distill::Args),
    Adapter(adapter::Args),
    Doctor(doctor::Args),
    Models(models::Args),
    Recipes(recipes::Args),
    Runs(runs::Args),
    Dash(dash::Args),
    Watch(watch::Args),
    Bench(bench::Args),
    TuneLr(tune_lr::Args),
    Explain(explain::Args),
    Completions(completions::Args),
}

/// The definition of the command line.
fn definition() -> clap::Command {
    help::with_paragraphs(Cli::command())
}

/// The command of these arguments.
fn parse(arguments: &[OsString]) -> std::result::Result<Cli, clap::Error> {
    let matches = definition().try_get_matches_from(arguments)?;
    Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut definition()))
}

/// Runs the program. `arguments` starts with the program's name. Returns the exit code.
pub fn start(arguments: impl Iterator<Item = OsString>) -> i32 {
    let arguments = train::separate_resume(arguments);
    if let Some(code) = completions::answer(definition, &arguments) {
        return code;
    }
    let as_json = arguments.iter().any(|argument| argument == "--json");
    let cli = match parse(&arguments) {
        Ok(cli) => cli,
        Err(e) => {
            let code = e.exit_code();
            if let Some(error) = recipe_args::explain(&e, &arguments) {
                report::start(style_of_terminal());
                show_error(&error, as_json);
                return error.exit_code();
            }
            show_refused(&with_visible_text(e, &arguments), as_json);
            return code;
        }
    };
    let trains = matches!(cli.command, Command::Train(_));
    let launched = if trains { launch::launched() } else { Ok(None) };
    report::start(OutputStyle {
        quiet: cli.quiet,
        // Rank 0 speaks for all.
        silent: matches!(launched, Ok(Some(place)) if place.rank > 0),
        ..style_of_terminal()
    });
    let launched = match launched {
        Ok(launched) => launched,
        Err(error) => {
            show_error(&error, as_json);
            return error.exit_code();
        }
    };
    if trains
        && launched.is_none()
        && let Some(warning) = launch::warning_of_task()
    {
        report::warn(&warning);
    }
    std::panic::set_hook(Box::new(|info| {
        if is_caught() {
            return;
        }
        let text = format!(
            "bug in ft {}: {info}\nhint: report this bug with this message, the command and the output of `ft doctor`\n\
             code: FT901, see `ft explain FT901`",
            env!("CARGO_PKG_VERSION")
        );
        if !launch::say_bug(&text) {
            report::bug(&text);
        }
    }));
    let ended = std::panic::catch_unwind(|| run(cli, launched));
    if let Some(why) = crate::ops::graph::take_refusal() {
        report::warn(&format!(
            "the driver refused CUDA graphs, without which decoding and small layers are slower: {why}"
        ));
    }
    let code = match ended {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            show_error(&error, as_json);
            error.exit_code()
        }
        Err(_) => 70,
    };
    report::clear();
    code
}

/// `FT_CACHE_DIR`, or `ft` in the user's cache directory; an empty value disables the cache.
fn cache_directory() -> Option<std::path::PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(std::path::PathBuf::from);
    let own = set("FT_CACHE_DIR");
    let default = || {
        let absolute = |path: std::path::PathBuf| path.is_absolute().then_some(path);
        let users = set("XDG_CACHE_HOME").and_then(absolute);
        Some(
            users
                .or_else(|| Some(set("HOME").and_then(absolute)?.join(".cache")))?
                .join("ft"),
        )
    };
    match own {
        Some(own) => Some(own).filter(|p| !p.as_os_str().is_empty()),
        None => default(),
    }
}

fn run(cli: Cli, launched: Option<launch::JobPlace>) -> Result<i32> {
    signal::install()?;
    allocator::retain_freed();
    if let Some(directory) = cache_directory() {
        cache::set_directory(directory);
    }
    let (ranks, own_threads) = launch::join(launched)?;
    // An error of one rank ends all of them, also one before the training.
    let ended = run_command(cli, &ranks, own_threads);
    launch::finish(&ranks, ended)
}

fn run_command(cli: Cli, ranks: &RunRanks, own_threads: Option<usize>) -> Result<i32> {
    if computes(&cli.command) {
        threads::start(cli.threads.map(usize::from).or(own_threads).unwrap_or(0))?;
    }
    // For tests and measurements: amx, amx-emulated, avx512-bf16, avx512, avx2 or portable.
    if let Ok(path) = std::env::var("FT_CPU") {
        CpuBackend::force(&path)?;
    }
    match cli.command {
        Command::Train(args) => train::run(args, ranks),
        Command::Launch(args) => {
            let mut own = Vec::new();
            if let Some(n) = cli.threads {
                own.extend(["--threads".into(), n.to_string().into()]);
            }
            own.extend(cli.quiet.then(|| "--quiet".into()));
            spawn::run(args, &own)
        }
        Command::Init(args) => init::run(args),
        Command::Import(args) => import::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Data(args) => data::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Merge(args) => merge::run(args),
        Command::Export(args) => export::run(args),
        Command::Push(args) => push::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Distill(args) => distill::run(args),
        Command::Adapter(args) => adapter::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Models(args) => models::run(args),
        Command::Recipes(args) => recipes::run(args),
        Command::Runs(args) => runs::run(args),
        Command::Dash(args) => dash::run(args),
        Command::Watch(args) => watch::run(args),
        Command::Bench(args) => bench::run(args),
        Command::TuneLr(args) => tune_lr::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Completions(args) => completions::run(args),
    }
}

/// False for commands that need no compute threads.
fn computes(command: &Command) -> bool {
    !matches!(
        command,
        Command::Launch(_)
            | Command::Init(_)
            | Command::Models(_)
            | Command::Recipes(_)
            | Command::Runs(_)
            | Command::Dash(_)
            | Command::Watch(_)
            | Command::Explain(_)
            | Command::Completions(_)
    )
}

fn show_error(error: &Error, as_json: bool) {
    let code = codes::of(error);
    let text = recipe::in_program_terms(&error.to_string());
    report::error(&format!("{text}\n{}", see(code.code)));
    if as_json {
        show_json(code, &text);
    }
}

/// The same refusal of the arguments as they are shown: the shell may have put a file name with escape codes there.
fn with_visible_text(refused: clap::Error, arguments: &[OsString]) -> clap::Error {
    let visible = |argument: &OsString| OsString::from(report::visible(&argument.to_string_lossy()));
    let shown: Vec<OsString> = arguments.iter().map(visible).collect();
    match parse(&shown) {
        Err(again) if again.kind() == refused.kind() => again,
        _ => refused,
    }
}

/// Shows arguments that clap refuses, or the help that they ask for.
fn show_refused(refused: &clap::Error, as_json: bool) {
    if !refused.use_stderr() {
        let _ = refused.print();
        return;
    }
    let text = refused.render();
    let text = if style_of_terminal().color {
        report::visible_but_colors(&text.ansi().to_string())
    } else {
        report::visible(&text.to_string())
    };
    let _ = write!(std::io::stderr(), "{text}");
    let code = codes::of_arguments(refused);
    let _ = writeln!(std::io::stderr(), "{}", see(code.code));
    if as_json {
        show_json(code, refused.render().to_string().trim_end());
    }
}

fn see(code: &str) -> String {
    format!("code: {code}, see `ft explain {code}`")
}

/// With `--json` the last line of an error is for a program.
fn show_json(code: &ErrorCode, text: &str) {
    let line = serde_json::json!({"code": code.code, "title": code.title, "error": text}).to_string();
    let mut stderr = std::io::stderr();
    // JSON escapes only some of the control characters.
    let line = if stderr.is_terminal() {
        report::visible(&line)
    } else {
        line
    };
    let _ = writeln!(stderr, "{line}");
}

/// Prints a line for the user; not with `--quiet`.
fn note(line: &str) {
    report::note(line);
}

/// Prints commands that use the new directory.
fn next(dir: &Path, commands: &[&str]) {
    let dir = shell_word(&dir.display().to_string());
    note("next:");
    for command in commands {
        let rest = match *command {
            "generate" => format!("generate --model {dir} --chat"),
            "eval" => format!("eval --model {dir} --data FILE"),
            "quantize" => format!("quantize --model {dir} --to nf4 --out DIR"),
            "merge" => format!("merge --adapter {dir} --out DIR"),
            other => format!("{other} {dir}"),
        };
        note(&format!("  ft {rest}"));
    }
}

/// The style of the output. Information never depends on color.
fn style_of_terminal() -> OutputStyle {
    let set = |name: &str| std::env::var_os(name).is_some_and(|v| !v.is_empty());
    let terminal = std::io::stderr().is_terminal();
    let dumb = std::env::var("TERM").is_ok_and(|t| t == "dumb");
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .iter()
        .find_map(|n| std::env::var(n).ok().filter(|v| !v.is_empty()))
        .unwrap_or_default()
        .to_lowercase();
    OutputStyle {
        bar: terminal && !dumb && !set("FT_NO_PROGRESS"),
        color: terminal && !dumb && !set("NO_COLOR"),
        unicode: locale.contains("utf-8") || locale.contains("utf8"),
        no_progress: set("FT_NO_PROGRESS"),
        quiet: false,
        silent: false,
    }
}

/// Reads `--template-kwarg NAME=VALUE`: values as in a recipe.
fn template_kwargs(given: &[String]) -> Result<serde_json::Map<String, serde_json::Value>> {
    let values: Vec<String> = given
        .iter()
        .map(|text| format!("data.template_kwargs.{text}"))
        .collect();
    let least = "[model]\npath = \"-\"\n[data]\ntrain = [\"-\"]\n";
    Ok(recipe::parse(least, "the command line", &values)?
        .recipe
        .data
        .template_kwargs)
}

/// Parses `--dtype`.
fn parse_dtype(text: &str) -> std::result::Result<crate::recipe::Dtype, String> {
    crate::recipe::Dtype::parse(text).ok_or_else(|| "expected f32, bf16 or f16".to_string())
}

/// Parses `DIR` or `DIR=WEIGHT`.
fn parse_weighted(text: &str) -> std::result::Result<(std::path::PathBuf, f32), String> {
    match text.rsplit_once('=') {
        Some((dir, weight)) => match weight.parse::<f32>() {
            Ok(w) if w.is_finite() && !dir.is_empty() => Ok((dir.into(), w)),
            // The name of a directory may contain `=`.
            _ if std::path::Path::new(text).is_dir() => Ok((text.into(), 1.0)),
            _ => Err("expected DIR, or DIR=WEIGHT with a number".to_string()),
        },
        None => Ok((text.into(), 1.0)),
    }
}

/// Parses `--budget`.
fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    crate::base::units::parse_bytes(text).map_err(|_| "expected a size such as 24GiB".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_are_sound() {
        definition().debug_assert();
    }

    #[test]
    fn every_subcommand_shows_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let call = format!("ft {}", command.get_name());
            assert!(help.contains(&call), "{}", command.get_name());
            assert!(command.get_about().is_some());
        }
    }

    /// A window of 80 columns would break a longer line in the middle of its command.
    #[test]
    fn examples_fit_80_columns() {
        fn checked(command: &clap::Command) -> usize {
            let texts = [command.get_after_help(), command.get_after_long_help()];
            let mut count = 0;
            for text in texts.into_iter().flatten().map(ToString::to_string) {
                for line in text.lines().filter(|line| line.starts_with("  ")) {
                    count += 1;
                    assert!(line.chars().count() <= 80, "{}: {line}", command.get_name());
                }
            }
            count + command.get_subcommands().map(checked).sum::<usize>()
        }
        assert!(checked(&definition()) > 80);
    }

    /// Tests that the short help fits one screen, without rare options.
    #[test]
    fn the_short_help_is_one_screen() {
        let mut command = definition().term_width(80);
        command.build();
        let short = command.render_help().to_string();
        // One line for each subcommand.
        assert!(short.lines().count() <= 44, "{short}");
        assert!(short.len() < command.render_long_help().to_string().len());
        for sub in command.get_subcommands_mut().filter(|sub| sub.get_name() != "help") {
            let (short, long) = (sub.render_help().to_string(), sub.render_long_help().to_string());
            assert!(short.lines().count() <= 34, "{short}");
            assert!(short.contains("Examples:"), "{short}");
            assert!(long.lines().count() >= short.lines().count(), "{long}");
        }
    }

    #[test]
    fn usage_errors_exit_2_and_help_exits_0() {
        let code = |args: &[&str]| match Cli::try_parse_from(args) {
            Ok(_) => -1,
            Err(e) => e.exit_code(),
        };
        assert_eq!(code(&["ft", "trian"]), 2);
        assert_eq!(code(&["ft", "train", "--recipe", "r", "--threads", "0"]), 2);
        assert_eq!(code(&["ft", "generate", "--model", "m"]), 2);
        assert_eq!(code(&["ft", "eval", "--model", "m", "--data", "d", "--dtype", "f8"]), 2);
        assert_eq!(code(&["ft", "plan", "--recipe", "r", "--budget", "much"]), 2);
        assert_eq!(code(&["ft", "--help"]), 0);
        assert_eq!(code(&["ft", "generate", "--model", "m", "--prompt", "-x"]), -1);
        assert_eq!(
            code(&[
                "ft",
                "--threads",
                "2",
                "merge",
                "--model",
                "m",
                "--adapter",
                "a",
                "--out",
                "o"
            ]),
            -1
        );
    }
}
