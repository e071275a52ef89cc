//! `ft eval`: loss, accuracy and margins of a model on rows of any kind that training accepts.

use super::out::{out, out_text};
use super::recipe_args::RecipeArgs;
use crate::base::{Error, Result};
use crate::commands::evaluate::{EvaluateRequest, evaluate};
use crate::recipe::{self, Auto, DeviceRef, Dtype, Recipe, Render, RowFormat, TrainOn};
use std::path::PathBuf;

const LONG: &str = "Examples:
  ft eval --model runs/quickstart --data assets/world/eval.jsonl
  ft eval --model runs/lora/checkpoint-400 --data eval.jsonl --json
  ft eval --model runs/dpo --data pairs.jsonl  chosen and rejected answers
  ft eval --model base --adapter runs/reward/final --data pairs.jsonl
  ft eval --recipe my.toml                     run and rows of the recipe
  ft eval --model base --data rows.jsonl --format alpaca data.train_on=all

Metrics by the type of rows:
  texts     loss, perplexity (its exponential), token_accuracy (fraction of
            the trained tokens that were the most likely token); accuracy:
            fraction of the rows with an answer that greedy decoding answers
            exactly
  pairs     accuracy and margin: how often, and by how much, the chosen answer
            is more likely. With an adapter or --reference also
            reward_accuracy and reward_margin, of DPO's implicit reward. The
            loss is that of the chosen answers. With a reward model, its
            scores replace the likelihoods
  KTO rows  (completion, label; in --json: judged) desirable_logp and
            undesirable_logp: log-probability per token of the desirable and
            of the undesirable answers
  prompts   accuracy: exact answers of greedy decoding; numeric_accuracy: the
            last number is correct; truncated: answers that were cut at
            --max-new-tokens or at the context length of the model";

/// Measure a model on rows: loss, exact answers, or preferences
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft eval --model runs/quickstart --data assets/world/eval.jsonl
  ft eval --recipe my.toml  the run and the rows of the recipe

Meaning of the metrics: `ft eval --help`", after_long_help = LONG)]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Model directory, adapter directory, run, checkpoint, or hub id [default: the recipe's run]
    #[arg(long, value_name = "MODEL", add = super::completions::model())]
    pub model: Option<PathBuf>,
    /// PEFT adapter directory, run, checkpoint, or hub id
    #[arg(long, value_name = "DIR", add = super::completions::model())]
    pub adapter: Option<PathBuf>,
    /// Rows: a file or a hub dataset [default: the evaluation rows of the recipe]
    #[arg(long, value_name = "FILE")]
    pub data: Option<String>,
    /// Format of the rows, as `data.format` [default: detected from the first row]
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    pub format: Option<RowFormat>,
    /// Longest row in tokens, as `data.max_length` [default: that of the recipe, else no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_length: Option<u32>,
    /// Evaluated tokens, as `data.train_on`: assistant, completion or all
    #[arg(long, hide_short_help = true, value_name = "WHAT", value_parser = train_on)]
    pub train_on: Option<TrainOn>,
    /// How a prompt and an answer (plain texts) are joined, as `data.render`: auto, chat or plain
    #[arg(long, hide_short_help = true, value_name = "HOW", value_parser = render)]
    pub render: Option<Render>,
    /// A Jinja file in place of the model's chat template, or the name of a format, as `data.chat_template`
    #[arg(long, hide_short_help = true, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// A variable of the chat template, such as enable_thinking=false; may be repeated
    #[arg(long, hide_short_help = true, value_name = "NAME=VALUE")]
    pub template_kwarg: Vec<String>,
    /// Pairs: the reference model of implicit rewards [default: the model without its adapter]
    #[arg(long, hide_short_help = true, value_name = "MODEL")]
    pub reference: Option<String>,
    /// Prompts: longest answer in tokens [default: rlhf.max_completion_length of a recipe for RL, else 256]
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: Option<u32>,
    /// auto, cpu or cuda:0 [default: that of the recipe, else auto]
    #[arg(long, hide_short_help = true, value_name = "DEVICE")]
    pub device: Option<String>,
    /// f32 or bf16 [default: as the weights are stored]
    #[arg(long, hide_short_help = true, value_name = "TYPE", value_parser = super::parse_dtype)]
    pub dtype: Option<Dtype>,
    /// Print one JSON object: kind, rows, and the metrics by name
    #[arg(long)]
    pub json: bool,
}

fn format(text: &str) -> std::result::Result<RowFormat, String> {
    let names = RowFormat::NAMES;
    RowFormat::parse(text).ok_or_else(|| match recipe::suggest::value("data.format", text, names) {
        Some(hint) => format!("expected one of {}; {hint}", names.join(", ")),
        None => format!("expected one of {}", names.join(", ")),
    })
}

fn render(text: &str) -> std::result::Result<Render, String> {
    Render::parse(text).ok_or(format!("expected one of {}", Render::NAMES.join(", ")))
}

fn train_on(text: &str) -> std::result::Result<TrainOn, String> {
    TrainOn::parse(text).ok_or_else(|| "expected assistant, completion or all".to_string())
}

pub fn run(mut args: Args) -> Result<i32> {
    args.recipe.take_recipe()?;
    let length_given = |o: &String| o.starts_with("data.max_length");
    let own_length =
        args.recipe.recipe.is_some() || args.max_length.is_some() || args.recipe.overrides.iter().any(length_given);
    let mut recipe = match args.recipe.recipe {
        Some(_) => args.recipe.load_and_warn()?.recipe,
        None => {
            // Placeholders for required keys; the flags give the real values.
            let text = "[model]\npath = \"-\"\n[data]\ntrain = []\n";
            let mut values = args.recipe.overrides.clone();
            let data = args.data.clone().unwrap_or("-".into());
            values.insert(0, format!("data.train=[{}]", toml_text(&data)));
            recipe::parse(text, "the command line", &values)?.recipe
        }
    };
    let model = match (&args.model, &args.recipe.recipe) {
        (Some(model), _) => model.to_string_lossy().into_owned(),
        (None, Some(_)) => recipe.train.output_dir.clone(),
        (None, None) => {
            return Err(Error::usage("no model is given")
                .expected("`--model MODEL`, or `--recipe FILE` for the model of its run")
                .hint("`ft eval --model runs/NAME --data FILE`"));
        }
    };
    // Flags that change how rows are read do not change which rows the run of a recipe held out.
    let reads_otherwise = args.format.is_some()
        || args.max_length.is_some()
        || args.train_on.is_some()
        || args.render.is_some()
        || args.chat_template.is_some()
        || !args.template_kwarg.is_empty();
    let run_recipe = (args.recipe.recipe.is_some() && reads_otherwise).then(|| recipe.clone());
    if let Some(data) = &args.data {
        recipe.data.set_train(vec![data.clone()]);
    } else if args.recipe.recipe.is_none() {
        return Err(Error::usage("no rows are given")
            .expected("`--data FILE`, or `--recipe FILE` with `data.eval`")
            .hint(format!("`ft eval --model {model} --data FILE`")));
    }
    if let Some(format) = args.format {
        recipe.data.format = format;
    }
    if let Some(length) = args.max_length {
        recipe.data.max_length = length as usize;
    }
    if let Some(train_on) = args.train_on {
        recipe.data.train_on = train_on;
    }
    if let Some(render) = args.render {
        recipe.data.render = render;
    }
    if let Some(template) = &args.chat_template {
        recipe.data.chat_template = Auto::Of(template.clone());
    }
    recipe
        .data
        .template_kwargs
        .extend(super::template_kwargs(&args.template_kwarg)?);
    let device = args.device.as_deref().map(DeviceRef::new);
    let report = evaluate(&EvaluateRequest {
        model: &model,
        adapter: args.adapter.as_deref(),
        reference: args.reference.as_deref(),
        recipe: &recipe,
        run_recipe: run_recipe.as_ref(),
        all_rows: args.data.is_some(),
        own_length,
        device: device.as_ref().unwrap_or(&recipe.model.device),
        dtype: args.dtype,
        max_new_tokens: longest_answer(args.max_new_tokens, &recipe),
    })?;
    report.notes.iter().for_each(|line| super::note(line));
    if args.json {
        out(report.json())?
    } else {
        out_text(report.text(crate::report::result_width()))?
    }
    Ok(0)
}

/// The longest answer to a prompt in tokens: as given, else that of training.
fn longest_answer(given: Option<u32>, recipe: &Recipe) -> usize {
    const LONGEST: usize = 256;
    match given {
        Some(n) => n as usize,
        None if recipe.train.stage.is_rl() => recipe.rl.max_completion_length,
        None => LONGEST,
    }
}

/// Formats a text as TOML.
fn toml_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_as_long_as_in_the_training_of_a_recipe() {
        let of = |given, values: &[&str]| {
            let values: Vec<String> = values.iter().map(|value| (*value).to_string()).collect();
            let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n";
            longest_answer(given, &recipe::parse(text, "a recipe", &values).unwrap().recipe)
        };
        let rl = [
            "train.stage=grpo",
            "rlhf.rewards=numeric",
            "rlhf.max_completion_length=700",
        ];
        assert_eq!((of(None, &rl), of(Some(9), &rl)), (700, 9));
        assert_eq!((of(None, &[]), of(Some(9), &[])), (256, 9));
    }
}
