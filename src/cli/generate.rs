//! `ft generate`: text from a model, once or as a chat.

use super::out::{out, out_raw};
use crate::base::{Error, Result};
use crate::recipe::Dtype;
use crate::run::generate::{Choice, Writer};
use std::path::PathBuf;

/// Continue a prompt, or chat
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft generate --model runs/quickstart/final --prompt \"The capital is\" --temperature 0
  ft generate --model runs/quickstart/final --chat --prompt \"What is 2 + 3?\"
  ft generate --model base --adapter runs/lora/final --chat")]
pub struct Args {
    /// Model directory
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// PEFT adapter directory
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// The text to continue; with --chat, the first message of the user
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "chat",
        allow_hyphen_values = true
    )]
    pub prompt: Option<String>,
    /// Use the model's chat template; without --prompt, read messages from standard input, one a line
    #[arg(long)]
    pub chat: bool,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_new_tokens: usize,
    /// 0 is greedy
    #[arg(long, value_name = "X", default_value_t = 0.8, value_parser = temperature)]
    pub temperature: f64,
    /// Choose among the K most likely tokens only [default: all]
    #[arg(long, value_name = "K", value_parser = top_k)]
    pub top_k: Option<usize>,
    /// Choose among the most likely tokens that together have this probability [default: all]
    #[arg(long, value_name = "P", value_parser = top_p)]
    pub top_p: Option<f64>,
    /// Seed of the choice
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// f32 or bf16 [default: as the weights are stored]
    #[arg(long, value_name = "TYPE", value_parser = super::parse_dtype)]
    pub dtype: Option<Dtype>,
}

fn temperature(text: &str) -> std::result::Result<f64, String> {
    let x: f64 = text.parse().map_err(|_| "expected a number")?;
    (x.is_finite() && x >= 0.0)
        .then_some(x)
        .ok_or("expected 0 or more".into())
}

fn top_k(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|k| *k > 0).ok_or("expected 1 or more".into())
}

fn top_p(text: &str) -> std::result::Result<f64, String> {
    let x: f64 = text.parse().map_err(|_| "expected a number")?;
    (x > 0.0 && x <= 1.0)
        .then_some(x)
        .ok_or("expected a number above 0 and at most 1".into())
}

pub fn run(args: Args) -> Result<i32> {
    let choice = Choice {
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature as f32,
        top_k: args.top_k,
        top_p: args.top_p.map(|p| p as f32),
        seed: args.seed,
    };
    let mut writer = Writer::open(
        &args.model.to_string_lossy(),
        args.adapter.as_deref(),
        args.dtype,
        choice,
    )?;
    if !args.chat {
        writer.complete(args.prompt.as_deref().unwrap_or_default(), &mut out_raw)?;
        out("")?;
        return Ok(0);
    }
    if let Some(prompt) = &args.prompt {
        writer.reply(prompt, &mut out_raw)?;
        out("")?;
        return Ok(0);
    }
    for line in std::io::stdin().lines() {
        let line = line.map_err(|e| Error::new("cannot read standard input").cause(e))?;
        if !line.trim().is_empty() {
            writer.reply(&line, &mut out_raw)?;
            out("")?;
        }
    }
    Ok(0)
}
