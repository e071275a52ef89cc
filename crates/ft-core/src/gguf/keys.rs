//! The keys of a GGUF file: sizes and options of the model, and its vocabulary.

use super::arch::{self, Arch, WindowLayout};
use crate::base::{Error, Result};
use crate::formats::config::Config;
use crate::formats::gguf::MetadataValue;
use crate::formats::tokenizer::{TextSplitting, Tokenizer, Vocabulary};
use crate::model::rope::Rope;
use crate::model::spec::Mixer;
use crate::model::{Spec, families};
use crate::ops::routing::Score;
use serde_json::{Map, Value as Json};

/// Keys in the order of the file.
pub(crate) type MetadataKeys = Vec<(String, MetadataValue)>;
/// Tensors of rope factors: their names and values `[R/2]`.
pub(crate) type RopeFactors = Vec<(&'static str, Vec<f32>)>;

/// Rope: keys, and the factors of the frequencies.
struct Ropes {
    keys: MetadataKeys,
    factors: RopeFactors,
}

/// The keys of the model, and tensors of rope factors.
pub(super) fn of_model(
    spec: &Spec,
    config: &Config,
    arch: &Arch,
    attention_scale: f32,
) -> Result<(MetadataKeys, RopeFactors)> {
    let mut keys = MetadataKeys::new();
    let mut put = |key: &str, value: MetadataValue| keys.push((format!("{}.{key}", arch.name), value));
    let number = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let positions = if spec.max_positions == usize::MAX {
        2048
    } else {
        spec.max_positions
    };
    put("block_count", number(spec.layers.len()));
    put("context_length", number(positions));
    put("embedding_length", number(spec.hidden));
    put("feed_forward_length", number(spec.intermediate));
    put("vocab_size", number(spec.vocab));
    put("attention.head_count", number(spec.heads));
    let latent = spec.layers.iter().find_map(|layer| match layer.mixer {
        Mixer::Latent(sizes) => Some(sizes),
        _ => None,
    });
    match latent {
        None => {
            put("attention.head_count_kv", number(spec.kv_heads));
            put("attention.key_length", number(spec.head_dim));
            put("attention.value_length", number(spec.head_dim));
        }
        // llama.cpp computes it with one key head, whose rows are the latent ones.
        Some(sizes) => {
            put("attention.head_count_kv", number(1));
            put("attention.key_length", number(sizes.kv_rank + sizes.rotary));
            put("attention.value_length", number(sizes.kv_rank));
            put("attention.key_length_mla", number(sizes.plain + sizes.rotary));
            put("attention.value_length_mla", number(sizes.value));
            put("attention.kv_lora_rank", number(sizes.kv_rank));
            if let Some(rank) = sizes.q_rank {
                put("attention.q_lora_rank", number(rank));
            }
        }
    }
    let epsilon = if spec.layer_norm.is_some() {
        "layer_norm_epsilon"
    } else {
        "layer_norm_rms_epsilon"
    };
    put(
        &format!("attention.{epsilon}"),
        MetadataValue::F32(spec.norm_eps as f32),
    );
    if arch.name.starts_with("granite") {
        put("attention.scale", attention_scale.into());
        put("embedding_scale", spec.embedding_scale.into());
        put("residual_scale", spec.residual_scale.into());
        put("logit_scale", (1.0 / spec.logit_scale).into());
    }
    if ["command-r", "cohere2"].contains(&arch.name) {
        put("logit_scale", spec.logit_scale.into());
    }
    if let Some(cap) = spec.attention_softcap {
        put("attn_logit_softcapping", cap.into());
    }
    if let Some(cap) = spec.logit_softcap {
        put("final_logit_softcapping", cap.into());
    }
    if arch.name == "stablelm" {
        put("use_parallel_residual", spec.parallel.into());
    }
    let window = spec.layers.iter().find_map(|layer| layer.window);
    match (arch.windows, window) {
        // Phi-3 with a window of 0 is read as a model without windows.
        (WindowLayout::Ignored, _) if arch.name == "phi3" => put("attention.sliding_window", number(0)),
        (WindowLayout::Ignored, _) | (_, None) => {}
        (windows, Some(window)) => {
            put("attention.sliding_window", number(window));
            let listed = || spec.layers.iter().map(|layer| layer.window.is_some()).collect();
            match (windows, arch::period(spec)) {
                (WindowLayout::Listed, _) => put("attention.sliding_window_pattern", MetadataValue::Bools(listed())),
                (WindowLayout::AnyPeriod, Some(period)) => put("attention.sliding_window_pattern", number(period)),
                _ => {}
            }
        }
    }
    if let Some(experts) = spec.layers.iter().find_map(|layer| layer.experts) {
        let router = &experts.router;
        put("expert_count", number(experts.count));
        put("expert_used_count", number(router.top_k));
        put("expert_feed_forward_length", number(experts.intermediate));
        put("leading_dense_block_count", number(arch::leading_dense(spec)));
        put("expert_weights_norm", router.renormalize.into());
        put("expert_weights_scale", router.scale.into());
        put(
            "expert_gating_func",
            number(if router.score == Score::Sigmoid { 2 } else { 1 }),
        );
        if let Some(groups) = router.groups {
            put("expert_group_count", number(groups.count));
            put("expert_group_used_count", number(groups.chosen));
        }
        if let Some(shared) = experts.shared {
            put("expert_shared_feed_forward_length", number(shared.intermediate));
            put(
                "expert_shared_count",
                number((shared.intermediate / experts.intermediate).max(1)),
            );
        }
    } else if arch.name == "deepseek2" {
        put("leading_dense_block_count", number(spec.layers.len()));
        put("expert_feed_forward_length", number(spec.intermediate));
        put("expert_shared_count", number(0));
    }
    let ropes = ropes(spec, config, arch)?;
    keys.extend(ropes.keys);
    Ok((keys, ropes.factors))
}

/// The base of the frequencies before a scaling, which llama.cpp applies itself.
fn base_of(rope: &Rope, place: &str) -> Result<f32> {
    let base = rope.theta as f32;
    if base.is_finite() && base > 1.0 {
        return Ok(base);
    }
    Err(
        Error::unsupported("the base of the rotary frequencies cannot be written as GGUF")
            .at(place)
            .found(rope.theta)
            .expected("a finite number above 1 (`rope_theta`)"),
    )
}

fn ropes(spec: &Spec, config: &Config, arch: &Arch) -> Result<Ropes> {
    let place = || config.path.display().to_string();
    let language = config.language_model();
    let config = language.as_ref().unwrap_or(config);
    let parameters = families::rope_of_config(config)?;
    let Some(rope) = spec.ropes.first() else {
        return Err(Error::internal("a model without rope").at(place()));
    };
    let mut keys = MetadataKeys::new();
    let mut put = |key: &str, value: MetadataValue| keys.push((format!("{}.rope.{key}", arch.name), value));
    let float = |map: &Map<String, Json>, key: &str| map.get(key).and_then(Json::as_f64);
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type"));
    let kind = kind.and_then(Json::as_str).unwrap_or("default").to_string();
    let rotary = 2 * rope.inv_freq.len();
    let base = base_of(rope, &place())?;
    put("dimension_count", MetadataValue::U32(rotary as u32));
    put("freq_base", MetadataValue::F32(base));
    if arch.name == "gemma3"
        && let Some(local) = spec.ropes.get(1)
    {
        put("freq_base_swa", MetadataValue::F32(base_of(local, &place())?));
    }
    let plain = |i: usize| 1.0 / base.powf((2 * i) as f32 / rotary as f32);
    let ratios = |inv: &[f32]| inv.iter().enumerate().map(|(i, f)| plain(i) / f).collect::<Vec<f32>>();
    let mut factors = Vec::new();
    let unsupported = |what: &str| {
        Error::unsupported(format!("llama.cpp cannot compute this rope: {what}"))
            .at(place())
            .found(&kind)
    };
    match (kind.as_str(), rope.yarn) {
        // Also of a family that has YaRN where the config has no rope parameters.
        (_, Some(yarn)) => {
            let factor = yarn.factor;
            let usual = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
            let all = float(&parameters, "mscale_all_dim").filter(|m| *m != 0.0);
            let latent = arch.name == "deepseek2" && all.is_some();
            if !latent && (f64::from(rope.attention_factor) - usual).abs() > 1e-4 {
                return Err(unsupported("an attention factor of its own"));
            }
            if !(1.0..=f64::from(u32::MAX)).contains(&yarn.original) {
                return Err(unsupported("no context length of the pretraining")
                    .found(yarn.original)
                    .expected("`original_max_position_embeddings` or `max_position_embeddings`"));
            }
            put("scaling.type", "yarn".into());
            put("scaling.factor", MetadataValue::F32(factor as f32));
            put(
                "scaling.original_context_length",
                MetadataValue::U32(yarn.original as u32),
            );
            put("scaling.yarn_beta_fast", MetadataValue::F32(yarn.beta_fast as f32));
            put("scaling.yarn_beta_slow", MetadataValue::F32(yarn.beta_slow as f32));
            if latent {
                put(
                    "scaling.yarn_log_multiplier",
                    MetadataValue::F32((0.1 * all.unwrap_or(1.0)) as f32),
                );
            }
        }
        ("default" | "mrope" | "dynamic", None) => {}
        ("linear", None) => {
            put("scaling.type", "linear".into());
            put(
                "scaling.factor",
                MetadataValue::F32(float(&parameters, "factor").unwrap_or(1.0) as f32),
            );
        }
        ("llama3", None) if arch.rope_factors => factors.push(("rope_freqs.weight", ratios(&rope.inv_freq))),
        ("longrope" | "su" | "yarn", None) if arch.name == "phi3" => {
            let Some(long) = &rope.long else {
                return Err(unsupported("no long factors"));
            };
            put(
                "scaling.original_context_length",
                MetadataValue::U32(long.beyond as u32),
            );
            put("scaling.attn_factor", MetadataValue::F32(rope.attention_factor));
            factors.push(("rope_factors_short.weight", ratios(&rope.inv_freq)));
            factors.push((
                "rope_factors_long.weight",
                ratios(long.inv_freq.as_deref().unwrap_or(&rope.inv_freq)),
            ));
        }
        _ => return Err(unsupported("this scaling")),
    }
    if arch.name == "phi3" && factors.is_empty() {
        put(
            "scaling.original_context_length",
            MetadataValue::U32(spec.max_positions.min(1 << 30) as u32),
        );
    }
    Ok(Ropes { keys, factors })
}

/// Names of pre-tokenizers in llama.cpp; it has more.
const PRE_TOKENIZERS: [&str; 40] = [
    "bailingmoe",
    "bloom",
    "chameleon",
    "chatglm-bpe",
    "codeshell",
    "command-r",
    "dbrx",
    "deepseek-coder",
    "deepseek-llm",
    "deepseek-r1-qwen",
    "deepseek-v3",
    "default",
    "exaone",
    "exaone4",
    "falcon",
    "falcon3",
    "gigachat",
    "glm4",
    "gpt-2",
    "gpt-4o",
    "granite-docling",
    "hunyuan",
    "hunyuan-dense",
    "jais",
    "kimi-k2",
    "llama-bpe",
    "llama3",
    "llama4",
    "mpt",
    "olmo",
    "poro-chat",
    "qwen2",
    "qwen35",
    "refact",
    "seed-coder",
    "smaug-bpe",
    "smollm",
    "stablelm2",
    "starcoder",
    "tekken",
];

/// The keys of the vocabulary. `pre_tokenizer`: its name in llama.cpp, if it is given.
pub(super) fn of_vocabulary(
    vocabulary: &Vocabulary,
    tokenizer: &Tokenizer,
    pre_tokenizer: Option<&str>,
    template: Option<&str>,
) -> Result<(MetadataKeys, Vec<String>)> {
    let mut keys = MetadataKeys::new();
    let mut warnings = Vec::new();
    let mut put = |key: &str, value: MetadataValue| keys.push((format!("tokenizer.{key}"), value));
    match &vocabulary.splitting {
        TextSplitting::ByteLevel {
            merges,
            pre_tokenizer: known,
            differs,
        } => {
            let name = pre_tokenizer.or(*known).ok_or_else(|| {
                Error::unsupported("llama.cpp has no pre-tokenizer that ft could choose for this model")
                    .expected("a name of `tokenizer.ggml.pre`")
                    .hint("give the name of the nearest one (`smollm`, `qwen2`, `llama-bpe`, ...) as the pre-tokenizer")
            })?;
            if let (Some(differs), None) = (differs, pre_tokenizer) {
                warnings.push(format!("the nearest pre-tokenizer of llama.cpp is `{name}`: {differs}"));
            }
            if let Some(given) = pre_tokenizer.filter(|given| !PRE_TOKENIZERS.contains(given)) {
                warnings.push(format!(
                    "ft does not know the pre-tokenizer `{given}`; llama.cpp cannot load the file if it does not know it either"
                ));
            }
            put("ggml.model", "gpt2".into());
            put("ggml.pre", name.into());
            put("ggml.merges", MetadataValue::Texts(merges.clone()));
        }
        TextSplitting::Sentences { scores, space_before } => {
            put("ggml.model", "llama".into());
            put("ggml.pre", pre_tokenizer.unwrap_or("default").into());
            put("ggml.scores", MetadataValue::F32s(scores.clone()));
            put("ggml.add_space_prefix", (*space_before).into());
        }
    }
    put("ggml.tokens", MetadataValue::Texts(vocabulary.tokens.clone()));
    put(
        "ggml.token_type",
        MetadataValue::I32s(vocabulary.kinds.iter().map(|k| *k as i32).collect()),
    );
    let unknown = tokenizer.named_tokens().find(|(role, _)| *role == "unk_token");
    let unknown = unknown.and_then(|(_, text)| tokenizer.token_to_id(text));
    // Answers end with any of the stop ids: the first is the end of text, the second the end of a turn.
    let turn = tokenizer
        .stop_ids()
        .iter()
        .copied()
        .find(|id| Some(*id) != tokenizer.eos_id());
    for (key, id) in [
        ("bos_token_id", tokenizer.bos_id()),
        ("eos_token_id", tokenizer.eos_id()),
        ("eot_token_id", turn),
        ("padding_token_id", tokenizer.pad_id()),
        ("unknown_token_id", unknown),
    ] {
        if let Some(id) = id.filter(|id| (*id as usize) < vocabulary.tokens.len()) {
            put(&format!("ggml.{key}"), MetadataValue::U32(id));
        }
    }
    put("ggml.add_bos_token", vocabulary.adds_bos.into());
    put("ggml.add_eos_token", vocabulary.adds_eos.into());
    if let Some(template) = template {
        put("chat_template", template.into());
    }
    Ok((keys, warnings))
}
