//! `ft generate`: generates text with a model, once or in a chat.

use super::out::{out, out_raw};
use crate::base::{Error, Result, signal};
use crate::commands::generate::{ChatWriter, GeneratedText, LoadSettings, SamplingSettings};
use crate::generate::KvDtype;
use crate::quant::Format;
use crate::recipe::Dtype;
use crate::report;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Continue a prompt, or chat
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft generate --model runs/sft/final --prompt \"The capital is\" --temperature 0
  ft generate --model runs/sft/final --chat --prompt \"What is 2 + 3?\"
  ft generate --model runs/lora --chat                 with the base of the run
  ft generate --model runs/lora/checkpoint-400 --chat
  ft generate --model base --adapter runs/lora/final --chat")]
pub struct Args {
    /// Model directory, adapter directory, run, checkpoint, or hub id
    #[arg(long, value_name = "MODEL", add = super::completions::model())]
    pub model: PathBuf,
    /// PEFT adapter directory, run, checkpoint, or hub id
    #[arg(long, value_name = "DIR", add = super::completions::model())]
    pub adapter: Option<PathBuf>,
    /// The text to continue; with --chat, the first message of the user
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "chat",
        allow_hyphen_values = true
    )]
    pub prompt: Option<String>,
    /// Use the model's chat template; without --prompt, read messages from standard input, one per line
    #[arg(long)]
    pub chat: bool,
    /// System prompt
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_new_tokens: u32,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "X", default_value_t = 0.8, value_parser = temperature)]
    pub temperature: f64,
    /// Sample from the K most likely tokens [default: all]
    #[arg(hide_short_help = true, long, value_name = "K", value_parser = top_k)]
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens with this total probability [default: all]
    #[arg(hide_short_help = true, long, value_name = "P", value_parser = top_p)]
    pub top_p: Option<f64>,
    /// Seed of the sampling
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// A Jinja file in place of the model's chat template, or the name of a format, as `data.chat_template`
    #[arg(long, value_name = "FILE", requires = "chat")]
    pub chat_template: Option<String>,
    /// A variable of the chat template, such as enable_thinking=false; may be repeated
    #[arg(hide_short_help = true, long, value_name = "NAME=VALUE", requires = "chat")]
    pub template_kwarg: Vec<String>,
    /// auto, cpu or cuda:0 [default: auto]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// f32 or bf16 [default: as the weights are stored]
    #[arg(hide_short_help = true, long, value_name = "TYPE", value_parser = super::parse_dtype)]
    pub dtype: Option<Dtype>,
    /// Quantize the weights of the layers and the head to int8 or int4 [default: no]
    #[arg(hide_short_help = true, long, value_name = "TYPE", value_parser = weights)]
    pub weights: Option<Format>,
    /// Type of the KV cache: f32, bf16 or int8 [default: f32; on a GPU the type of the activations]
    #[arg(hide_short_help = true, long, value_name = "TYPE", value_parser = kv_cache)]
    pub kv_cache: Option<KvDtype>,
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

fn kv_cache(text: &str) -> std::result::Result<KvDtype, String> {
    match text {
        "f32" => Ok(KvDtype::F32),
        "bf16" => Ok(KvDtype::Bf16),
        "int8" => Ok(KvDtype::Int8),
        _ => Err("expected f32, bf16 or int8".into()),
    }
}

fn weights(text: &str) -> std::result::Result<Format, String> {
    match text {
        "int8" => Ok(Format::Int8 { group: 0 }),
        "int4" => Ok(Format::Int4 { group: 64 }),
        _ => Err("expected int8 or int4".into()),
    }
}

pub fn run(args: Args) -> Result<i32> {
    let choice = SamplingSettings {
        max_new_tokens: args.max_new_tokens as usize,
        temperature: args.temperature as f32,
        top_k: args.top_k,
        top_p: args.top_p.map(|p| p as f32),
        seed: args.seed,
    };
    let holding = LoadSettings {
        device: args.device.clone(),
        dtype: args.dtype,
        weights: args.weights,
        kv_cache: args.kv_cache,
    };
    let model = args.model.to_string_lossy();
    let template = args.chat_template.as_deref();
    let kwargs = super::template_kwargs(&args.template_kwarg)?;
    let mut writer = ChatWriter::open(&model, args.adapter.as_deref(), template, kwargs, &holding, choice)?;
    writer.notes.iter().for_each(|line| super::note(line));
    if !args.chat {
        return end(&writer.complete(args.prompt.as_deref().unwrap_or_default(), &mut out_raw)?);
    }
    if let Some(system) = &args.system {
        writer.instruct(system);
    }
    if let Some(prompt) = &args.prompt {
        return end(&writer.reply(prompt, &mut out_raw)?);
    }
    signal::install_for_chat()?;
    chat(&mut writer)
}

fn end(written: &GeneratedText) -> Result<i32> {
    out("")?;
    report::aside(&written.speed());
    Ok(0)
}

/// The meaning of a line in a chat.
#[derive(Debug, PartialEq)]
enum ChatLine<'a> {
    Nothing,
    Exit,
    Help,
    Clear,
    Speed,
    Unknown(&'a str),
    Message(&'a str),
}

impl<'a> ChatLine<'a> {
    fn read(line: &'a str) -> Self {
        let word = line.trim();
        match word.to_ascii_lowercase().as_str() {
            "" => ChatLine::Nothing,
            "exit" | "quit" | "/exit" | "/quit" | "/bye" | "/q" => ChatLine::Exit,
            "/help" | "/?" => ChatLine::Help,
            "/clear" | "/new" | "/reset" => ChatLine::Clear,
            "/speed" => ChatLine::Speed,
            // A path, or a line that starts with two slashes, is not a command.
            _ if word.starts_with("//") => ChatLine::Message(&word[1..]),
            command if command.starts_with('/') && command[1..].chars().all(|c| c.is_ascii_alphabetic()) => {
                ChatLine::Unknown(word)
            }
            _ => ChatLine::Message(line),
        }
    }
}

const CHAT_HELP: &str = "One line is one message.
/clear   start a new conversation
/speed   turn the display of tokens per second on or off
/exit    exit (also `exit`, `quit`, Ctrl-D)
Ctrl-C stops an answer. If a message starts with a slash, write two slashes.";

/// Runs a chat. Each line is a turn, from a terminal or from a pipe; the end of the input ends the conversation.
fn chat(writer: &mut ChatWriter) -> Result<i32> {
    let person = std::io::stdin().is_terminal();
    if person {
        super::note("One line is one message. Ctrl-C stops an answer, `/help` shows commands, `/exit` exits.");
    }
    let mut lines = std::io::stdin().lines();
    let mut speed = false;
    loop {
        if person {
            report::ask("> ");
        }
        let Some(line) = lines.next() else { break };
        let line = line.map_err(|e| Error::new("cannot read standard input").cause(e))?;
        // Restarts the progress timer: the wait was for the user.
        report::clear();
        let message = match ChatLine::read(&line) {
            ChatLine::Nothing => continue,
            ChatLine::Exit => break,
            ChatLine::Help => {
                super::note(CHAT_HELP);
                continue;
            }
            ChatLine::Clear => {
                writer.forget();
                super::note("new conversation");
                continue;
            }
            ChatLine::Speed => {
                speed = !speed;
                super::note(if speed { "speed display on" } else { "speed display off" });
                continue;
            }
            ChatLine::Unknown(command) => {
                report::warn(&format!(
                    "unknown command `{command}`; `/help` lists the commands, `//` starts a message with a slash"
                ));
                continue;
            }
            ChatLine::Message(message) => message,
        };
        match writer.reply(message, &mut out_raw) {
            Ok(written) => {
                out("")?;
                if speed {
                    report::aside(&written.speed());
                }
                if written.stopped {
                    super::note("stopped");
                }
            }
            // The user at the terminal can continue with another message.
            Err(e) if person => super::show_error(&e, false),
            Err(e) => return Err(e),
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        for line in ["exit", " Quit ", "/exit", "/quit", "/bye"] {
            assert_eq!(ChatLine::read(line), ChatLine::Exit, "{line}");
        }
        assert_eq!(ChatLine::read("  "), ChatLine::Nothing);
        assert_eq!(ChatLine::read("/help"), ChatLine::Help);
        assert_eq!(ChatLine::read("/clear"), ChatLine::Clear);
        assert_eq!(ChatLine::read("/nothing"), ChatLine::Unknown("/nothing"));
        for message in ["exit the building", "/usr/bin is a directory", "quit?", " two "] {
            assert_eq!(ChatLine::read(message), ChatLine::Message(message));
        }
        assert_eq!(ChatLine::read("//help"), ChatLine::Message("/help"));
    }
}
