//! Generates the data of the quickstart, an invented world: chat rows, tokenizer and configuration of the tiny model,
//! and optionally the plain text for pre-training. The same seed gives the same bytes.
//!
//! `cargo run --release --example tiny_world -- --help` shows the options.

mod model_files;
mod pairs;
mod rows;
mod wordings;
mod world;

use clap::Parser;
use ft::base::{Result, files};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Plain-text rows for training the tokenizer, in addition to the chat rows.
const TOKENIZER_ROWS: u64 = 20_000;

/// Number of chat rows that become preference pairs.
const PAIRS: usize = 600;

#[derive(Parser)]
#[command(about = "Writes the data, the tokenizer and the configuration of the quickstart")]
struct Options {
    /// Where `world/` and `tiny/` are written.
    #[arg(long, default_value = "assets")]
    out: PathBuf,
    /// Writes the text to pre-train on to this file (not by default: it is large).
    #[arg(long)]
    pretrain: Option<PathBuf>,
    /// Rows of that text.
    #[arg(long, default_value_t = 60_000)]
    rows: u64,
    /// Another seed is another world.
    #[arg(long, default_value_t = 7)]
    seed: u64,
}

fn main() {
    if let Err(e) = write_all(&Options::parse()) {
        eprintln!("error: {e}");
        std::process::exit(e.exit_code());
    }
}

fn write_all(options: &Options) -> Result<()> {
    let world = world::World::new(options.seed);
    let (train, eval) = rows::chat(&world, options.seed);

    let data = options.out.join("world");
    files::create_dir_all(&data)?;
    write_chat(&data.join("train.jsonl"), &train)?;
    write_chat(&data.join("eval.jsonl"), &eval)?;
    let (sums, sums_held_out) = rows::sums(&world, options.seed);
    write_prompts(&data.join("sums-train.jsonl"), &sums)?;
    write_prompts(&data.join("sums-eval.jsonl"), &sums_held_out)?;

    let pairs = pairs::of(options.seed, &train[..PAIRS.min(train.len())], &train);
    write_pairs(&data.join("preference-train.jsonl"), &pairs)?;
    write_pairs(
        &data.join("preference-eval.jsonl"),
        &pairs::of(options.seed, &eval, &train),
    )?;

    // Includes questions, so that "Where" and "user" are words of the vocabulary.
    let mut texts: Vec<String> = (0..TOKENIZER_ROWS)
        .map(|i| rows::pretrain(&world, options.seed, i))
        .collect();
    texts.extend(
        train
            .iter()
            .map(|row| format!("user\n{}\nassistant\n{}", row.question, row.answer)),
    );
    let tiny = options.out.join("tiny");
    files::create_dir_all(&tiny)?;
    model_files::write(&tiny, &model_files::train_tokenizer(&texts)?)?;

    if let Some(path) = &options.pretrain {
        if let Some(dir) = path.parent() {
            files::create_dir_all(dir)?;
        }
        write_text(path, &world, options)?;
    }
    Ok(())
}

fn write_chat(path: &Path, rows: &[rows::Chat]) -> Result<()> {
    let mut out = String::new();
    for row in rows {
        let messages = json!({ "messages": [
            { "role": "user", "content": row.question },
            { "role": "assistant", "content": row.answer },
        ]});
        let _ = writeln!(out, "{messages}"); // writing to a String cannot fail
    }
    files::write_atomic(path, out.as_bytes())
}

/// Writes prompts with the answers that a reward compares with.
fn write_prompts(path: &Path, rows: &[rows::Chat]) -> Result<()> {
    let mut out = String::new();
    for row in rows {
        let prompt = json!({
            "prompt": [{ "role": "user", "content": row.question }],
            "answer": row.answer,
        });
        let _ = writeln!(out, "{prompt}"); // writing to a String cannot fail
    }
    files::write_atomic(path, out.as_bytes())
}

fn write_pairs(path: &Path, pairs: &[pairs::Pair]) -> Result<()> {
    let mut out = String::new();
    for pair in pairs {
        let said = |role: &str, content: &str| json!([{ "role": role, "content": content }]);
        let row = json!({
            "prompt": said("user", pair.question),
            "chosen": said("assistant", pair.chosen),
            "rejected": said("assistant", pair.rejected),
        });
        let _ = writeln!(out, "{row}"); // writing to a String cannot fail
    }
    files::write_atomic(path, out.as_bytes())
}

fn write_text(path: &Path, world: &world::World, options: &Options) -> Result<()> {
    let mut file = files::AtomicFile::create(path)?;
    for i in 0..options.rows {
        let row = json!({ "text": rows::pretrain(world, options.seed, i) });
        file.write(format!("{row}\n").as_bytes())?;
    }
    file.commit()
}
