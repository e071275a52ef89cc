//! The padding token, whose row of the embedding gets no gradient from lookups.

use super::{Config, Error, Result, place};
use serde_json::Value;

/// `pad_token_id`, or transformers' default of the family. Negative ids count from the end of the table.
pub(super) fn token(config: &Config, model_type: &str) -> Result<Option<u32>> {
    let id = match (config.raw.get("pad_token_id"), model_type) {
        (Some(Value::Null), _) => return Ok(None),
        (Some(id), _) => id.as_i64().ok_or_else(|| {
            Error::format("`pad_token_id` is not an integer")
                .at(place(config, "pad_token_id"))
                .found(id)
        })?,
        (
            None,
            "cohere" | "cohere2" | "ernie4_5" | "ernie4_5_moe" | "gemma" | "gemma2" | "gemma3_text" | "gemma3n_text"
            | "gemma4_text" | "lfm2",
        ) => 0,
        (None, "hunyuan_v1_dense" | "hunyuan_v1_moe" | "vaultgemma") => 0,
        (None, "nanochat" | "olmo" | "olmo2" | "olmo3" | "olmoe" | "seed_oss") => 1,
        (None, "internlm3") => 2,
        (None, "helium") => 3,
        (None, "ministral3") => 11,
        (None, "phi3") => 32_000,
        (None, "flex_olmo") => 100_277,
        (None, "smollm3") => 128_004,
        (None, "glm" | "glm4") => 151_329,
        (None, _) => return Ok(None),
    };
    let rows = config.usize("vocab_size")? as i64;
    let id = if id < 0 { id.saturating_add(rows) } else { id };
    Ok((0..rows).contains(&id).then_some(id as u32))
}
