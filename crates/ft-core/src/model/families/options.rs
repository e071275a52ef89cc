//! Options of a config that change the mathematics and that only some families have.

use super::{Config, Result, seed_oss, starcoder2};
use crate::base::Error;
use serde_json::Value;

/// Refuses options that change the computation and that no supported family uses.
pub(super) fn refuse_unsupported(config: &Config, model_type: &str, place: &str) -> Result<()> {
    let own: &[&str] = match model_type {
        "granite" | "granite_swa" | "hyperclovax" => &[
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
        ],
        "cohere" | "cohere2" => &["logit_scale"],
        "gemma4_text" => &["use_bidirectional_attention"],
        "deepseek_v2" | "deepseek_v3" | "dots1" | "glm4_moe" | "glm4_moe_lite" | "solar_open" => {
            &["n_routed_experts", "num_local_experts"]
        }
        "granitemoe" | "granitemoeshared" => &[
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "num_local_experts",
        ],
        "minicpm3" => &["scale_emb", "scale_depth"],
        "minimax_m2" | "mixtral" => &["num_local_experts"],
        "flex_olmo" | "gpt_oss" | "hunyuan_v1_moe" | "mellum" | "olmoe" | "qwen2_moe" | "qwen3_moe"
        | "qwen3_moe_smile" | "qwen3_next" | "qwen3_5_moe_text" | "qwen3_vl_moe_text" => {
            &["num_experts", "num_local_experts"]
        }
        "smollm3" => &["no_rope_layers"],
        "seed_oss" => &seed_oss::DROPOUT,
        "stablelm" => &["use_parallel_residual"],
        "starcoder2" => &starcoder2::DROPOUT,
        _ => &[],
    };
    let zero = |v: &Value| v.as_f64() == Some(0.0);
    let one = |v: &Value| v.as_f64() == Some(1.0);
    let off = |v: &Value| v == &Value::Bool(false);
    type Harmless<'a> = &'a dyn Fn(&Value) -> bool;
    let never: Harmless = &|_| false;
    if let Some(quantization) = config.get("quantization_config") {
        crate::source::stored::check_config(quantization, place)?;
    }
    let options: [(&str, Harmless); 25] = [
        ("attention_dropout", &zero),
        ("resid_pdrop", &zero),
        ("embd_pdrop", &zero),
        ("hidden_dropout", &zero),
        ("attn_pdrop", &zero),
        ("residual_dropout", &zero),
        ("embedding_dropout", &zero),
        ("num_experts", &zero),
        ("num_local_experts", &zero),
        ("n_routed_experts", &zero),
        ("use_bidirectional_attention", &off),
        ("is_encoder_decoder", &off),
        ("add_cross_attention", &off),
        ("logits_scaling", &one),
        ("logit_scale", &one),
        ("residual_multiplier", &one),
        ("embedding_multiplier", &one),
        ("attention_multiplier", never),
        ("scale_emb", &one),
        ("scale_depth", never),
        ("parallel_attn", &off),
        ("use_parallel_residual", &off),
        ("alibi", &off),
        ("clip_qkv", never),
        ("no_rope_layers", never),
    ];
    for (key, harmless) in options {
        match config.get(key) {
            None | Some(Value::Null) => {}
            Some(v) if own.contains(&key) || harmless(v) => {}
            Some(v) => {
                return Err(Error::unsupported(format!(
                    "config option `{key}` changes the model and is not supported"
                ))
                .at(place)
                .found(v)
                .hint("ft refuses what it cannot compute exactly"));
            }
        }
    }
    Ok(())
}
