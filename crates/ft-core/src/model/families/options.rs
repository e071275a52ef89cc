//! Options of a config that change the mathematics and that only some families have.

use super::{Config, Result, Spec};
use crate::base::Error;
use serde_json::Value;

/// Dropout of the model's own layers. It is no part of the function that the model computes.
const DROPOUT: [&str; 7] = [
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "attn_pdrop",
    "residual_dropout",
    "embedding_dropout",
];

/// Warns of the dropout of a published config.
///
/// Errors: a dropout that is not a number.
pub(super) fn dropout_is_not_applied(config: &Config, spec: &mut Spec) -> Result<()> {
    for key in DROPOUT {
        let dropout = config.opt_f64(key)?.unwrap_or(0.0);
        if dropout != 0.0 {
            spec.warnings.push(format!(
                "{}: `{key}` {dropout} is not applied in training",
                config.path.display()
            ));
        }
    }
    Ok(())
}

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
        // Granite 4 refuses experts in a message of its own.
        "granitemoe" | "granitemoehybrid" | "granitemoeshared" => &[
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
        "stablelm" => &["use_parallel_residual"],
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
    let options: [(&str, Harmless); 18] = [
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
