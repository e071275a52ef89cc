//! Multimodal models: the config of their language model. Images are no input of ft, and a text has the same positions
//! as in a model without images.

use super::{Config, Result};
use crate::base::Error;
use serde_json::{Map, Value, json};

/// The types of the language model in multimodal models of this type.
fn inner_types(model_type: &str) -> &'static [&'static str] {
    match model_type {
        "gemma3" => &["gemma3_text"],
        "gemma3n" => &["gemma3n_text"],
        "gemma4" => &["gemma4_text"],
        "mistral3" => &["mistral", "ministral3"],
        "qwen2_5_vl" => &["qwen2_5_vl_text"],
        "qwen3_5" => &["qwen3_5_text"],
        "qwen3_5_moe" => &["qwen3_5_moe_text"],
        "qwen3_vl" => &["qwen3_vl_text"],
        "qwen3_vl_moe" => &["qwen3_vl_moe_text"],
        _ => &[],
    }
}

/// The config of the language model of a multimodal model; `None` for other types.
///
/// # Errors
/// A language model that is not supported inside this type.
pub(super) fn language_model(config: &Config, model_type: &str) -> Result<Option<Config>> {
    let types = inner_types(model_type);
    let Some(first) = types.first() else { return Ok(None) };
    let Some(mut text) = config.language_model() else {
        return Err(Error::format("a multimodal model needs `text_config`").at(config.path.display()));
    };
    let inner = text.opt_str("model_type")?.unwrap_or(first).to_string();
    // Some files repeat the type of the whole model.
    let inner = if inner == model_type {
        (*first).to_string()
    } else {
        inner
    };
    if !types.contains(&inner.as_str()) {
        return Err(
            Error::unsupported(format!("a `{inner}` inside `{model_type}` is not supported"))
                .at(format!("{}: text_config", config.path.display()))
                .expected(types.join(" or ")),
        );
    }
    for (key, value) in defaults(&inner) {
        text.raw.entry(key).or_insert(value);
    }
    text.raw.insert("model_type".into(), inner.into());
    Ok(Some(text))
}

/// The values that files leave out, because they are the defaults of transformers.
fn defaults(inner: &str) -> Map<String, Value> {
    let value = match inner {
        "gemma3_text" => json!({
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}),
        "gemma3n_text" => json!({
            "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768}),
        "gemma4_text" => json!({
            "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}),
        "mistral" => json!({
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072}),
        "ministral3" => json!({
            "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144}),
        "qwen2_5_vl_text" => json!({
            "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80}),
        "qwen3_5_text" => json!({
            "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768}),
        "qwen3_5_moe_text" => json!({
            "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768}),
        "qwen3_vl_moe_text" => json!({
            "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
            "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128_000}),
        "qwen3_vl_text" => json!({
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128_000,
            "rope_theta": 500_000.0}),
        _ => json!({}),
    };
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
