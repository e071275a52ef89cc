//! `ft init`: a short recipe with comments, from four answers.

use crate::base::{Error, Result, files};
use crate::recipe;
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

/// Write a first recipe: four questions, or flags
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft init                                                         asks
  ft init --model Qwen/Qwen3-0.6B --data rows.jsonl --method lora

Without a terminal nothing is asked: --model and --data must be given.")]
pub struct Args {
    /// Hub id or directory of the model
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// File with the rows (jsonl, json, csv, parquet), or dataset of the hub
    #[arg(long, value_name = "FILE")]
    data: Option<String>,
    /// lora, qlora, block or full [default: lora]
    #[arg(long, value_name = "METHOD", value_parser = ["lora", "qlora", "block", "full"])]
    method: Option<String>,
    /// Directory of the run [default: runs/NAME, after the model]
    #[arg(long, value_name = "DIR")]
    output_dir: Option<String>,
    /// The new recipe
    #[arg(long, value_name = "FILE", default_value = "recipe.toml")]
    to: PathBuf,
}

/// Asks for a value; an empty answer is the default.
fn ask(question: &str, default: Option<&str>) -> Result<String> {
    let shown = default.map_or(String::new(), |d| format!(" [{d}]"));
    super::note(&format!("{question}{shown}"));
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line);
    read.map_err(|e| Error::io("cannot read the answer").cause(e))?;
    match (line.trim(), default) {
        ("", Some(default)) => Ok(default.into()),
        ("", None) => Err(Error::usage("no answer").at(question)),
        (answer, _) => Ok(answer.into()),
    }
}

pub fn run(args: Args) -> Result<i32> {
    if args.to.exists() {
        return Err(Error::usage("the file already exists")
            .at_path(&args.to)
            .hint("give another name with `--to FILE`"));
    }
    let person = std::io::stdin().is_terminal();
    let answer = |given: Option<String>, flag: &str, question: &str, default: Option<&str>| match (given, person) {
        (Some(given), _) => Ok(given),
        (None, true) => ask(question, default),
        (None, false) => default.map(str::to_string).ok_or_else(|| {
            Error::usage(format!("`{flag}` is missing"))
                .hint("without a terminal `ft init` asks nothing: give the flags")
        }),
    };
    let model = answer(args.model, "--model", "Model (hub id or directory)?", None)?;
    let data = answer(args.data, "--data", "Rows (file or dataset of the hub)?", None)?;
    let method = answer(
        args.method,
        "--method",
        "Method: lora, qlora, block or full?",
        Some("lora"),
    )?;
    let last = model.trim_end_matches('/').rsplit('/').next().unwrap_or("model");
    let name = last.split('@').next().unwrap_or(last).to_lowercase();
    let usual = format!("runs/{name}-{method}");
    let output = answer(args.output_dir, "--output-dir", "Directory of the run?", Some(&usual))?;
    let text = text(&model, &data, &method, &output)?;
    recipe::parse(&text, &args.to.to_string_lossy(), &[])?;
    files::write_output(&args.to, text.as_bytes())?;
    let to = args.to.display();
    super::note(&format!("next:\n  ft data {to}\n  ft plan {to}\n  ft train {to}"));
    super::out::out(to)?;
    Ok(0)
}

/// The recipe.
fn text(model: &str, data: &str, method: &str, output: &str) -> Result<String> {
    let (tune, why) = match method {
        "lora" => ("lora", "adapters on all projections: little memory, a small file"),
        "qlora" => ("lora", "adapters on all projections of a model in 4 bits"),
        "block" => (
            "block",
            "every weight, one block at a time: the result of full, with less memory",
        ),
        "full" => ("full", "every weight at once: the most memory"),
        other => {
            return Err(Error::usage("unknown method")
                .found(other)
                .expected("lora, qlora, block or full"));
        }
    };
    let quoted = |text: &str| format!("{text:?}");
    let memory = if method == "qlora" {
        "\n[memory]\nfrozen_weights = \"nf4\"      # 4 bits, as in bitsandbytes\n"
    } else {
        ""
    };
    let lora = if tune == "lora" {
        "\n[tune.lora]\nr = 16                      # rank: more can learn more, and takes more memory\nlora_alpha = 32             # the adapters are scaled by lora_alpha / r\n"
    } else {
        ""
    };
    Ok(format!(
        "# Made by `ft init`. All keys: `ft recipes schema` (docs/recipe.md); what is not written here has a default, which `ft plan` shows.\n\n\
         [model]\npath = {}\n{memory}\n[data]\ntrain = {}\n\
         eval_fraction = 0.02        # held out: evaluated before, during and after the run\n\
         max_length = 2048           # longer rows are cut; `ft data` shows how many\n\n\
         [tune]\nmethod = \"{tune}\"             # {why}\n{lora}\n\
         # [optimizer]\n# learning_rate = 1e-4      # chosen from the method and the model if it is not given\n\n\
         [train]\nnum_epochs = 1\neval_steps = 50\nsave_steps = 100            # a run that was stopped continues: `ft train RECIPE --resume`\n\
         output_dir = {}\n",
        quoted(model),
        quoted(data),
        quoted(output)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_gives_a_short_valid_recipe() {
        for method in ["lora", "qlora", "block", "full"] {
            let text = text("org/name", "rows.jsonl", method, "runs/x").unwrap();
            assert!(text.lines().count() < 40, "{method}");
            let loaded = recipe::parse(&text, "r.toml", &[]).unwrap();
            assert!(loaded.warnings.is_empty(), "{method}: {:?}", loaded.warnings);
        }
        assert!(text("a", "b", "other", "c").is_err());
    }
}
