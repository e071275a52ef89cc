//! The support matrix: families, well-known checkpoints, options, and what an unsupported type would need.
//! docs/models.md shows it.

use super::refused::REFUSED;
use super::{Config, Error};

/// A supported family.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// `model_type` of the config.
    pub model_type: &'static str,
    /// Checkpoints of this type.
    pub checkpoints: &'static str,
    /// The differences from Llama, and the options of the config.
    pub options: &'static str,
}

const fn family(model_type: &'static str, checkpoints: &'static str, options: &'static str) -> Family {
    Family {
        model_type,
        checkpoints,
        options,
    }
}

/// The supported families, in alphabetic order.
pub const FAMILIES: [Family; 77] = [
    family(
        "arcee",
        "arcee-ai/AFM-4.5B, AFM-4.5B-Base",
        "an MLP without a gate, optional biases",
    ),
    family(
        "cohere",
        "CohereLabs/c4ai-command-r-v01, c4ai-command-r-plus, aya-23-8B, -35B",
        "LayerNorms, attention and MLP in parallel, norms on q and k (R+), scaled logits",
    ),
    family(
        "cohere2",
        "CohereLabs/c4ai-command-r7b-12-2024, c4ai-command-a-03-2025",
        "as cohere; sliding windows, full attention without positions",
    ),
    family(
        "cwm",
        "facebook/cwm",
        "sliding windows in three of four layers, rope llama3",
    ),
    family(
        "deepseek_v2",
        "deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-Coder-V2-Lite-Instruct",
        "latent attention; dense MLP in the first layers, experts in the others; softmax scores, groups, shared experts",
    ),
    family(
        "deepseek_v3",
        "deepseek-ai/DeepSeek-V3, DeepSeek-R1, moonshotai/Moonlight-16B-A3B",
        "as deepseek_v2, with sigmoid scores and their correction",
    ),
    family(
        "dots1",
        "rednote-hilab/dots.llm1.base, dots.llm1.inst",
        "norms on q and k; dense MLP in the first layers, experts in the others; sigmoid scores with a correction, shared experts",
    ),
    family(
        "ernie4_5",
        "baidu/ERNIE-4.5-0.3B-PT",
        "interleaved RoPE (pairs of adjacent elements); optional biases",
    ),
    family(
        "ernie4_5_moe",
        "baidu/ERNIE-4.5-21B-A3B-PT, -300B-A47B-PT",
        "as ernie4_5, with a dense MLP in the first layers, experts in the others, a correction of the scores, shared experts; `use_bias` is not supported",
    ),
    family(
        "exaone4",
        "LGAI-EXAONE/EXAONE-4.0-1.2B, -32B",
        "norms after attention and MLP, norms on q and k, sliding windows, full attention without positions",
    ),
    family(
        "flex_olmo",
        "allenai/FlexOlmo-7x7B-1T",
        "as olmo2, with experts in every layer",
    ),
    family(
        "gemma",
        "google/gemma-2b, gemma-7b, codegemma",
        "Gemma norms, scaled embedding, GELU",
    ),
    family(
        "gemma2",
        "google/gemma-2-2b-it, -9b-it, -27b-it",
        "norms before and after attention and MLP, soft caps, sliding windows",
    ),
    family(
        "gemma3",
        "google/gemma-3-4b-it, -12b-it, -27b-it, medgemma",
        "the language model (`gemma3_text`); vision tensors are kept",
    ),
    family(
        "gemma3_text",
        "google/gemma-3-270m, gemma-3-1b-it",
        "as gemma2 without soft caps of the scores; norms on q and k, two ropes",
    ),
    family(
        "gemma3n",
        "google/gemma-3n-E2B-it, -E4B-it",
        "the language model (`gemma3n_text`); vision and audio tensors are kept",
    ),
    family(
        "gemma3n_text",
        "the language model of gemma3n",
        "several streams per token (AltUp), Laurel, sparse gates, shared keys and values, per-layer embeddings",
    ),
    family(
        "gemma4",
        "google/gemma-4-E2B-it, -E4B-it, -31B-it",
        "the language model (`gemma4_text`); vision and audio tensors are kept",
    ),
    family(
        "gemma4_text",
        "the language model of gemma4, without experts",
        "layers of two sizes, norms of v, shared keys and values, per-layer embeddings",
    ),
    family(
        "glm",
        "zai-org/glm-4-9b-hf, glm-4-9b-chat-hf",
        "as glm4 with norms before attention and MLP only",
    ),
    family(
        "glm4",
        "zai-org/GLM-4-9B-0414, -32B-0414",
        "interleaved RoPE (pairs of adjacent elements) on half of each head; norms before and after attention and MLP",
    ),
    family(
        "glm4_moe",
        "zai-org/GLM-4.5-Air, GLM-4.5, GLM-4.6",
        "dense MLP in the first layers, experts in the others; sigmoid scores with a correction, groups, shared experts",
    ),
    family(
        "glm4_moe_lite",
        "zai-org/GLM-4.7-Flash",
        "as deepseek_v3; the layers with experts are listed",
    ),
    family(
        "gpt_oss",
        "openai/gpt-oss-20b, gpt-oss-120b",
        "experts with biases and clamped activations, attention sinks, sliding windows; MXFP4 or bf16 files",
    ),
    family(
        "granite",
        "ibm-granite/granite-3.3-2b-instruct, -8b-instruct",
        "scaled embedding, attention scores, residual stream and logits",
    ),
    family(
        "granite_swa",
        "ibm-granite/granite-swash-2b",
        "as granite, with sliding windows, attention sinks and a rope base for each layer",
    ),
    family(
        "granitemoe",
        "ibm-granite/granite-3.1-1b-a400m-instruct, -3b-a800m-instruct",
        "as granite, with experts in every layer",
    ),
    family(
        "granitemoehybrid",
        "ibm-granite/granite-4.0-350m, -1b, -micro",
        "as granite, gate and up in one matrix; not with experts or state-space layers (-h- checkpoints)",
    ),
    family(
        "granitemoeshared",
        "ibm-research/moe-7b-1b-active-shared-experts",
        "as granitemoe, with a shared expert",
    ),
    family(
        "helium",
        "kyutai/helium-1-2b",
        "interleaved RoPE (pairs of adjacent elements); biases on q, k and v",
    ),
    family(
        "hunyuan_v1_dense",
        "tencent/Hunyuan-0.5B-Instruct to -7B-Instruct",
        "norms on the rotated heads of q and k",
    ),
    family(
        "hunyuan_v1_moe",
        "tencent/Hunyuan-A13B-Instruct",
        "as hunyuan_v1_dense, with experts and a shared expert; all layers have the same number of experts",
    ),
    family(
        "hyperclovax",
        "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",
        "as granite, with norms after attention and MLP; `residual_multiplier` is not supported",
    ),
    family(
        "internlm3",
        "internlm/internlm3-8b-instruct, with a `tokenizer.json`",
        "Llama under another name; rope dynamic",
    ),
    family(
        "iquestcoder",
        "IQuestLab/IQuest-Coder-V1-40B-Instruct",
        "Llama under another name",
    ),
    family(
        "jais2",
        "inceptionai/Jais-2-8B-Chat",
        "LayerNorms, biases, an MLP without a gate",
    ),
    family(
        "kimi_k2",
        "moonshotai/Kimi-K2-Instruct, Kimi-K2-Base, with a `tokenizer.json`",
        "as deepseek_v3; transformers 5.23 has the type inside kimi_k25 only",
    ),
    family(
        "lfm2",
        "LiquidAI/LFM2-350M, -700M, -1.2B, -2.6B",
        "gated short convolutions between layers with attention, norms on q and k",
    ),
    family(
        "llama",
        "Llama 1 to 3.3, SmolLM2, TinyLlama, Yi, DeepSeek-R1-Distill-Llama",
        "optional biases; rope linear, dynamic, yarn, llama3, longrope",
    ),
    family(
        "mellum",
        "JetBrains/Mellum2-12B-A2.5B-Base",
        "as qwen3_moe, with sliding windows and a rope for each kind of attention",
    ),
    family(
        "minicpm3",
        "openbmb/MiniCPM3-4B",
        "latent attention, scaled embedding, residual stream and logits, rope longrope",
    ),
    family(
        "minimax_m2",
        "MiniMaxAI/MiniMax-M2",
        "norms of q and k over all heads, RoPE on half of each head, experts with sigmoid scores and a correction",
    ),
    family(
        "ministral",
        "mistralai/Ministral-8B-Instruct-2410",
        "as mistral, with windows in some layers",
    ),
    family(
        "ministral3",
        "the language model of mistralai/Ministral-3-3B to -14B",
        "queries scaled by position, rope yarn",
    ),
    family(
        "mistral",
        "Mistral 7B, Mistral Nemo, Mistral Small 24B (2501)",
        "sliding windows",
    ),
    family(
        "mistral3",
        "mistralai/Mistral-Small-3.1-24B, -3.2-24B, Ministral-3",
        "the language model (`mistral` or `ministral3`); vision tensors are kept",
    ),
    family(
        "mixtral",
        "mistralai/Mixtral-8x7B-v0.1, -8x22B-v0.1",
        "experts in every layer, optional sliding windows",
    ),
    family(
        "nanochat",
        "karpathy/nanochat-d32, nanochat-students/base-d20",
        "norms without weights, also after the embedding and on the rotated heads; an MLP without a gate",
    ),
    family(
        "nemotron",
        "nvidia/Minitron-4B-Base, -8B-Base, Nemotron-4-340B",
        "LayerNorms with 1 + w, an MLP without a gate, RoPE on half of each head",
    ),
    family(
        "olmo",
        "allenai/OLMo-1B-hf, -7B-hf",
        "LayerNorms without parameters; `clip_qkv` is not supported",
    ),
    family(
        "olmo2",
        "allenai/OLMo-2-0425-1B, -1124-7B, -0325-32B",
        "norms after attention and MLP, norms of q and k over all heads",
    ),
    family(
        "olmo3",
        "allenai/Olmo-3-1025-7B, Olmo-3-32B",
        "as olmo2, with sliding windows and rope yarn in the other layers",
    ),
    family(
        "olmoe",
        "allenai/OLMoE-1B-7B-0125",
        "experts in every layer, norms of q and k over all heads; `clip_qkv` is not supported",
    ),
    family(
        "phi3",
        "microsoft/Phi-3-mini, Phi-3.5-mini-instruct, Phi-4, Phi-4-mini-instruct",
        "fused projections, RoPE on a part of each head, sliding windows, rope longrope",
    ),
    family(
        "qwen2",
        "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
        "biases on q, k and v; sliding windows",
    ),
    family(
        "qwen2_5_vl",
        "Qwen/Qwen2.5-VL-3B-Instruct to -72B-Instruct",
        "the language model, for text; vision tensors are kept",
    ),
    family("qwen2_5_vl_text", "the language model of qwen2_5_vl", "as qwen2; mrope"),
    family(
        "qwen2_moe",
        "Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        "experts, and a shared expert whose output is scaled by a gate",
    ),
    family(
        "qwen3",
        "Qwen/Qwen3-0.6B to Qwen3-32B, Qwen3-4B-Instruct-2507",
        "norms on q and k; sliding windows",
    ),
    family(
        "qwen3_5",
        "Qwen/Qwen3.5-0.8B, -2B, -4B, -9B, -27B",
        "the language model (`qwen3_5_text`); vision and `mtp` tensors are kept",
    ),
    family(
        "qwen3_5_moe",
        "Qwen/Qwen3.5-35B-A3B, -122B-A10B, -397B-A17B",
        "the language model (`qwen3_5_moe_text`); vision and `mtp` tensors are kept",
    ),
    family(
        "qwen3_5_moe_text",
        "the language model of qwen3_5_moe",
        "as qwen3_5_text, with experts and a shared expert",
    ),
    family(
        "qwen3_5_text",
        "the language model of qwen3_5",
        "Gated DeltaNet in three of four layers, gated attention, RoPE on a part of each head, Gemma norms",
    ),
    family(
        "qwen3_moe",
        "Qwen/Qwen3-30B-A3B, -235B-A22B, Qwen3-Coder-30B-A3B",
        "as qwen3, with experts in all or some layers",
    ),
    family(
        "qwen3_moe_smile",
        "none: converted from qwen3_moe; transformers does not have it",
        "as qwen3_moe, with routers of two levels",
    ),
    family(
        "qwen3_next",
        "Qwen/Qwen3-Next-80B-A3B-Instruct, -Thinking",
        "as qwen3_5_text, with fused projections; experts and a shared expert",
    ),
    family(
        "qwen3_vl",
        "Qwen/Qwen3-VL-2B-Instruct to -32B-Instruct",
        "the language model, for text; vision tensors are kept",
    ),
    family(
        "qwen3_vl_moe",
        "Qwen/Qwen3-VL-30B-A3B-Instruct, -235B-A22B-Instruct",
        "the language model, for text; vision tensors are kept",
    ),
    family(
        "qwen3_vl_moe_text",
        "the language model of qwen3_vl_moe",
        "as qwen3_moe; mrope",
    ),
    family("qwen3_vl_text", "the language model of qwen3_vl", "as qwen3; mrope"),
    family(
        "seed_oss",
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "biases on q, k and v; its dropout is not applied",
    ),
    family("smollm3", "HuggingFaceTB/SmolLM3-3B", "layers without positions"),
    family(
        "solar_open",
        "upstage/Solar-Open-100B",
        "as glm4_moe, with experts in every layer and RoPE on whole heads",
    ),
    family(
        "stablelm",
        "stabilityai/stablelm-3b-4e1t, stablelm-2-1_6b, stablelm-zephyr-3b",
        "LayerNorms, attention and MLP optionally in parallel, RoPE on a quarter of each head; `qk_layernorm` (12B) is not supported",
    ),
    family(
        "starcoder2",
        "bigcode/starcoder2-3b, -7b, -15b",
        "LayerNorms, an MLP without a gate, biases, sliding windows; its dropout is not applied",
    ),
    family(
        "vaultgemma",
        "google/vaultgemma-1b",
        "as gemma2 without norms after attention and MLP",
    ),
    family("youtu", "tencent/Youtu-LLM-2B", "latent attention"),
];

/// Supported values of `model_type`.
pub const NAMES: [&str; FAMILIES.len()] = {
    let mut names = [""; FAMILIES.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = FAMILIES[i].model_type;
        i += 1;
    }
    names
};

/// Families whose heads may be rotated in part.
pub(super) const PARTIAL_ROTATION: [&str; 16] = [
    "deepseek_v2",
    "deepseek_v3",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "minicpm3",
    "minimax_m2",
    "nemotron",
    "phi3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "stablelm",
    "youtu",
];

/// The error for an unsupported type: the missing parts, or the nearest supported name.
pub(super) fn unsupported(config: &Config, model_type: &str) -> Error {
    let e = Error::unsupported(format!("model type `{model_type}` is not supported"))
        .at(config.path.display())
        .expected(format!("one of {}", NAMES.join(", ")));
    if let Some((needs, _)) = REFUSED.iter().find(|(_, types)| types.contains(&model_type)) {
        return e.hint(format!("it would need {needs}"));
    }
    let near = |name: &&&str| strsim::jaro_winkler(name, model_type);
    let close = NAMES.iter().max_by(|a, b| near(a).total_cmp(&near(b)));
    let inner = config
        .get("text_config")
        .and_then(|t| t.get("model_type"))
        .and_then(|t| t.as_str());
    match (inner, close) {
        (Some(inner), _) if NAMES.contains(&inner) => e.hint(format!(
            "this is a multimodal model; its language model is a `{inner}`: give a text-only checkpoint of that type"
        )),
        (Some(_), _) => e.hint("this is a multimodal model whose language model ft does not have"),
        (None, Some(name)) if near(&name) > 0.75 => e.hint(format!(
            "`{name}` has a similar name, but other layers: ft does not substitute it"
        )),
        _ => e,
    }
}

/// The support matrix as Markdown: the supported families, then the others.
pub fn table() -> String {
    let mut out = String::from("| `model_type` | checkpoints | what is special |\n|---|---|---|\n");
    for f in FAMILIES {
        out += &format!("| `{}` | {} | {} |\n", f.model_type, f.checkpoints, f.options);
    }
    out += "\nNot supported, and what would be needed:\n\n| needs | `model_type` |\n|---|---|\n";
    for (needs, types) in REFUSED {
        out += &format!("| {needs} | `{}` |\n", types.join("`, `"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_type_is_listed_twice() {
        let mut all: Vec<&str> = NAMES.to_vec();
        assert!(all.is_sorted());
        all.extend(REFUSED.iter().flat_map(|(_, types)| types.iter()));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
