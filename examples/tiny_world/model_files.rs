//! The files of the tiny model except its weights: tokenizer, chat template, configuration.

use ft::base::{Error, Result, files};
use serde_json::{Value, json};
use std::path::Path;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer};

/// Vocabulary size: rows of the embedding.
const VOCABULARY: usize = 896;
/// Ids 0, 1, 2.
const END_OF_TEXT: &str = "<|endoftext|>";
const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";

/// Splits text: words keep the space before them; each digit and each run of signs is separate.
const PIECES: &str = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// ChatML without a default system turn. No newline at the end: it would be part of the prompt.
const CHAT_TEMPLATE: &str = r"{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}";

/// Trains a byte-level BPE on `texts`.
pub fn train_tokenizer(texts: &[String]) -> Result<Tokenizer> {
    let failed = |e: tokenizers::Error| Error::new("the tokenizer cannot be trained").cause(e);
    let split = Split::new(
        SplitPattern::Regex(PIECES.into()),
        SplitDelimiterBehavior::Isolated,
        false,
    )
    .map_err(failed)?;
    let bytes = ByteLevel::new(false, false, false);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer
        .with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])))
        .with_decoder(Some(bytes));
    let special = [END_OF_TEXT, TURN_START, TURN_END].map(|t| AddedToken::from(t, true));
    let mut trainer: TrainerWrapper = BpeTrainer::builder()
        .vocab_size(VOCABULARY)
        .show_progress(false)
        .special_tokens(special.to_vec())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build()
        .into();
    tokenizer.train(&mut trainer, texts.iter()).map_err(failed)?;
    let size = tokenizer.get_vocab_size(true);
    if size != VOCABULARY {
        return Err(Error::new("the text is too small for the vocabulary")
            .found(size)
            .expected(VOCABULARY));
    }
    Ok(tokenizer)
}

/// Writes all files except the weights into `dir`.
pub fn write(dir: &Path, tokenizer: &Tokenizer) -> Result<()> {
    let text = tokenizer
        .to_string(true)
        .map_err(|e| Error::new("the tokenizer cannot be written").cause(e))?;
    files::write_atomic(&dir.join("tokenizer.json"), format!("{text}\n").as_bytes())?;
    files::write_atomic(&dir.join("chat_template.jinja"), CHAT_TEMPLATE.as_bytes())?;
    write_json(&dir.join("tokenizer_config.json"), &tokenizer_config())?;
    write_json(&dir.join("config.json"), &config())?;
    write_json(&dir.join("generation_config.json"), &generation_config())
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    files::write_atomic(path, format!("{value:#}\n").as_bytes())
}

fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": null,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": null,
        "clean_up_tokenization_spaces": false,
        "model_max_length": 512,
    })
}

fn generation_config() -> Value {
    json!({ "do_sample": false, "eos_token_id": [2, 0], "pad_token_id": 0, "max_new_tokens": 32 })
}

fn config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": null,
        "max_position_embeddings": 512,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "use_sliding_window": false,
        "sliding_window": null,
        "max_window_layers": 4,
        "tie_word_embeddings": true,
        "initializer_range": 0.05,
        "bos_token_id": null,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "use_cache": true,
    })
}
