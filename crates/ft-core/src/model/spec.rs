//! The numbers that define a model: read once from `config.json`, used by layers, planner and export.

mod experts;
mod params;

pub use experts::*;
pub use params::*;

use super::rope::Rope;
use crate::base::{Error, Result};
use crate::ops::altup::DEVICE_STREAMS;
use crate::ops::clamped_glu::ClampedGlu;
use crate::ops::delta_rule::DEVICE_KEY;
use crate::ops::glu::Activation;
use crate::ops::latent::LatentHeads;
use crate::ops::rope::RopePairing;
use crate::ops::short_conv::DEVICE_TAPS;
use candle_core::DType;
use half::{bf16, f16};
use std::collections::HashMap;
use std::mem::discriminant;

/// Options of the decoder block. Families differ only in these values.
#[derive(Debug, Clone)]
pub struct Spec {
    /// `model_type` of the config.
    pub model_type: String,
    /// V: vocabulary size.
    pub vocab: usize,
    /// D: hidden size.
    pub hidden: usize,
    /// I: intermediate size of the MLP.
    pub intermediate: usize,
    /// H: query heads.
    pub heads: usize,
    /// K: key/value heads.
    pub kv_heads: usize,
    /// E: elements of a head.
    pub head_dim: usize,
    /// Added to the mean square in a norm.
    pub norm_eps: f64,
    /// Gemma, Nemotron: a norm multiplies by 1 + w.
    pub norm_plus_one: bool,
    /// nanochat: RMSNorms without a weight, and one more between the embedding and the first layer.
    pub plain_norms: bool,
    /// The norms are LayerNorms; else RMSNorms.
    pub layer_norm: Option<LayerNormParams>,
    /// The norms around the two halves of a layer.
    pub norms: NormNames,
    /// Norms of the queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Qwen3.5: q_proj also computes, beside each query head, the gate of its output: o · sigmoid(gate).
    pub output_gate: bool,
    /// gpt-oss: each head has a learned logit in the denominator of its softmax.
    pub attention_sinks: bool,
    /// Gemma 4: a norm without weights on each head of v.
    pub value_norm: bool,
    /// Gemma 4: each layer reads an input that depends on the token.
    pub per_layer: Option<PerLayerSpec>,
    /// Gemma 3n: the hidden state of a token has several streams, of which a layer computes one.
    pub streams: Option<AltUpSpec>,
    /// Gemma 3n, Laurel: rank of a projection that is added beside the attention.
    pub laurel: Option<usize>,
    /// Gemma 4: the output of a layer is multiplied by a constant that the files have.
    pub layer_scalar: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// A bias on the output projection of the attention.
    pub o_bias: bool,
    /// Biases on the projections of the MLP.
    pub mlp_bias: bool,
    /// Phi-3: one projection for q, k and v.
    pub fused_qkv: bool,
    /// Phi-3, GLM-4, Granite 4: one projection for gate and up. Its name, and that of the projection down.
    pub fused_gate_up: Option<[&'static str; 2]>,
    /// An MLP without a gate: the names of its projections.
    pub plain_mlp: Option<[&'static str; 2]>,
    /// Names of modules that differ between families.
    pub modules: ModuleNames,
    /// Both halves of a layer read the same normalized input, and both are added to the input.
    pub parallel: bool,
    /// The activation of the gate, or of an MLP without a gate.
    pub activation: Activation,
    /// gpt-oss: limits of gate and up, in the place of the activation.
    pub clamped_glu: Option<ClampedGlu>,
    /// Factor of the scores before the softmax.
    pub attention_scale: f32,
    /// Attention scores s become cap · tanh(s / cap).
    pub attention_softcap: Option<f32>,
    /// Logits z become cap · tanh(z / cap).
    pub logit_softcap: Option<f32>,
    /// Factor of the logits, applied to the output of the final norm.
    pub logit_scale: f32,
    /// Factor of the embedding's output.
    pub embedding_scale: f32,
    /// transformers stores `embedding_scale` in the type of the embedding's weights, where it is rounded.
    pub embedding_scale_rounded: bool,
    /// Factor of the noise of NEFTune: `embedding_scale` where transformers applies that after its embedding module; else 1.
    pub noise_scale: f32,
    /// Granite: factor of what a half of a layer adds to the residual stream.
    pub residual_scale: f32,
    /// Which elements of a head are rotated together.
    pub pairing: RopePairing,
    /// The output projection is the embedding.
    pub tied: bool,
    /// The token whose row gets no gradient from lookups in the embedding and the per-layer table (`padding_idx` of
    /// `torch.nn.Embedding`).
    pub padding: Option<u32>,
    /// The options of each layer.
    pub layers: Vec<LayerSpec>,
    /// The rotary embeddings that layers refer to.
    pub ropes: Vec<Rope>,
    /// Longest sequence in tokens.
    pub max_positions: usize,
    /// Standard deviation of random weights.
    pub initializer_range: f32,
    /// The language model of a multimodal model: its files have other tensors too, and other names.
    pub multimodal: bool,
    /// Notes for the user, e.g. a key of the config that has no effect.
    pub warnings: Vec<String>,
}

/// The options in which layers of one model can differ.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LayerSpec {
    /// The half that mixes the tokens. The options of keys, windows and ropes are those of attention.
    pub mixer: Mixer,
    /// Sliding window in tokens; `None`: full causal attention.
    pub window: Option<usize>,
    /// Index into `Spec::ropes`.
    pub rope: usize,
    /// As `rope`, for the queries, if it is another one (Ministral 3).
    pub query_rope: Option<usize>,
    /// E of this layer, if it is not that of the model (Gemma 4: layers with full attention).
    pub head_dim: Option<usize>,
    /// K of this layer, if it is not that of the model.
    pub kv_heads: Option<usize>,
    /// I of this layer, if it is not that of the model.
    pub intermediate: Option<usize>,
    /// Where its keys and values come from.
    pub keys: KeySource,
    /// Gemma 3n: the part of the gate of the MLP that becomes 0; 0: none.
    pub sparsity: f32,
    /// A mixture of experts in the place of its MLP.
    pub experts: Option<ExpertsSpec>,
}

/// The half of a layer that mixes tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Softmax attention.
    #[default]
    Attention,
    /// Gated DeltaNet: linear attention with a recurrent state.
    DeltaNet(DeltaNetSpec),
    /// DeepSeek: softmax attention whose keys and values are made of low-rank rows.
    Latent(LatentSpec),
    /// LFM2: a gated convolution over the last tokens.
    ShortConv {
        /// K: tokens that the convolution sees.
        kernel: usize,
        /// True if the convolution and its projections have biases.
        bias: bool,
    },
}

impl Mixer {
    /// True for softmax attention over the keys of all earlier tokens, with heads of one size.
    pub fn has_keys(&self) -> bool {
        !matches!(self, Self::DeltaNet(_) | Self::ShortConv { .. })
    }
}

/// Sizes of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LatentSpec {
    /// Rank of the queries; `None`: one projection computes them.
    pub q_rank: Option<usize>,
    /// Rank of the keys and values: width of a latent row.
    pub kv_rank: usize,
    /// Elements of a query or key head that are not rotated.
    pub plain: usize,
    /// Rotated elements of a query or key head; all heads share those of the keys.
    pub rotary: usize,
    /// Elements of a value head.
    pub value: usize,
}

impl LatentSpec {
    /// Sizes of its heads for the operations.
    pub fn heads(&self, heads: usize, pairing: RopePairing) -> LatentHeads {
        LatentHeads {
            heads,
            plain: self.plain,
            rotary: self.rotary,
            value: self.value,
            pairing,
        }
    }
}

/// Sizes of Gated DeltaNet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeltaNetSpec {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v; each key head serves value_heads / key_heads of them.
    pub value_heads: usize,
    /// Elements of a head of q and k.
    pub key_dim: usize,
    /// Elements of a head of v.
    pub value_dim: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
    /// Qwen3-Next: two projections, `in_proj_qkvz` and `in_proj_ba`, whose rows are ordered by key head.
    pub by_key_head: bool,
}

impl DeltaNetSpec {
    /// Width of q, and of k.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of v, of the gate z, and of the output.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Width of q, k and v together: the channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }
}

/// The per-layer inputs: rows of a table, to which a projection of the embedding is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerSpec {
    /// Rows of the table.
    pub vocab: usize,
    /// P: width of the input of one layer.
    pub width: usize,
}

/// Alternating updates (`model/block/altup`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AltUpSpec {
    /// A: streams of the hidden state of a token, D elements each.
    pub count: usize,
    /// The stream that the layers compute.
    pub active: usize,
    /// Largest coefficient in training; `None`: no limit.
    pub clip: Option<f32>,
}

/// The origin of the keys and values of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum KeySource {
    /// Projections of its own.
    #[default]
    Own,
    /// Gemma 4: the values are the output of the projection of the keys.
    KeysOnly,
    /// Gemma 4: the keys and values of this earlier layer.
    Layer(usize),
}

/// The parameters of LayerNorms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNormParams {
    /// False: OLMo.
    pub weight: bool,
    /// A bias.
    pub bias: bool,
}

impl LayerNormParams {
    /// Weight and bias.
    pub const BOTH: Self = Self {
        weight: true,
        bias: true,
    };
}

/// Names of the norms of a layer; `None`: the family has no norm there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormNames {
    /// On the input of the attention.
    pub before_attention: Option<&'static str>,
    /// On the output of the attention.
    pub after_attention: Option<&'static str>,
    /// On the input of the MLP.
    pub before_mlp: Option<&'static str>,
    /// On the output of the MLP.
    pub after_mlp: Option<&'static str>,
}

impl NormNames {
    /// Llama: before each half.
    pub const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
    /// Cohere: one, on the input of both halves.
    pub const SHARED: Self = Self {
        before_mlp: None,
        ..Self::BEFORE
    };
    /// OLMo 2: after each half.
    pub const AFTER: Self = Self {
        before_attention: None,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: None,
        after_mlp: Some("post_feedforward_layernorm"),
    };
    /// Gemma 2: before and after each half.
    pub const SANDWICH: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: Some("post_attention_layernorm"),
        before_mlp: Some("pre_feedforward_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
    };
    /// LFM2: as `BEFORE`, under other names.
    pub const LFM2: Self = Self {
        before_attention: Some("operator_norm"),
        before_mlp: Some("ffn_norm"),
        ..Self::BEFORE
    };
    /// GLM-4: as `SANDWICH`, under other names.
    pub const SANDWICH_GLM4: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: Some("post_self_attn_layernorm"),
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: Some("post_mlp_layernorm"),
    };
}

/// Names of modules that differ between families; those of a layer are below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleNames {
    /// The output projection of the attention.
    pub o_proj: &'static str,
    /// gate, up and down of an MLP with a gate.
    pub mlp: [&'static str; 3],
    /// The final norm.
    pub final_norm: &'static str,
}

impl ModuleNames {
    /// Most families.
    pub const LLAMA: Self = Self {
        o_proj: "self_attn.o_proj",
        mlp: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        final_norm: "model.norm",
    };
    /// LFM2.
    pub const LFM2: Self = Self {
        o_proj: "self_attn.out_proj",
        mlp: ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"],
        final_norm: "model.embedding_norm",
    };
}

/// Norms of the queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QkNorm {
    /// The names of the norm of q and of the norm of k.
    pub names: [&'static str; 2],
    /// One norm over all heads; else one over each head.
    pub whole: bool,
    /// Each head has a weight of its own; else all heads have the same.
    pub own_weights: bool,
    /// After the rotation; else before it.
    pub after_rope: bool,
}

impl QkNorm {
    /// Qwen3, Gemma 3: on each head, before the rotation.
    pub const HEADS: Self = Self {
        names: ["self_attn.q_norm", "self_attn.k_norm"],
        whole: false,
        own_weights: false,
        after_rope: false,
    };
    /// Cohere: on each head with a weight of its own, before the rotation.
    pub const OWN_WEIGHTS: Self = Self {
        own_weights: true,
        ..Self::HEADS
    };
    /// OLMo 2: over all heads together, before the rotation.
    pub const WHOLE: Self = Self {
        whole: true,
        ..Self::HEADS
    };
    /// LFM2: as `HEADS`, under other names.
    pub const LFM2: Self = Self {
        names: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
        ..Self::HEADS
    };
    /// Hunyuan: on each head, after the rotation.
    pub const ROTATED: Self = Self {
        names: ["self_attn.query_layernorm", "self_attn.key_layernorm"],
        after_rope: true,
        ..Self::HEADS
    };
}

impl Spec {
    /// The factor of the output of an embedding whose weights have this type.
    pub fn embedding_factor(&self, dtype: DType) -> f32 {
        match dtype {
            DType::BF16 if self.embedding_scale_rounded => bf16::from_f32(self.embedding_scale).to_f32(),
            DType::F16 if self.embedding_scale_rounded => f16::from_f32(self.embedding_scale).to_f32(),
            _ => self.embedding_scale,
        }
    }

    /// Names of the weights of the routers.
    pub fn router_names(&self) -> impl Iterator<Item = String> + '_ {
        let experts = self
            .layers
            .iter()
            .enumerate()
            .filter_map(|(l, layer)| Some((l, layer.experts?)));
        experts.map(|(l, e)| format!("model.layers.{l}.{}", e.router_name()))
    }

    /// Checks that every layer can run on a device: a GPU, or the CPU.
    ///
    /// # Errors
    /// A layer whose operations, or whose sizes, have no kernels for a GPU.
    pub fn runs_on(&self, gpu: bool) -> Result<()> {
        for (layer, of) in self.layers.iter().enumerate().filter(|_| gpu) {
            if let Mixer::ShortConv { kernel, .. } = of.mixer
                && kernel > DEVICE_TAPS
            {
                return Err(
                    Error::unsupported("a short convolution of this size does not run on a GPU")
                        .at(format!("{}, layer {layer}", self.model_type))
                        .found(format!("{kernel} taps"))
                        .expected(format!("at most {DEVICE_TAPS} taps, or the CPU")),
                );
            }
            let Mixer::DeltaNet(sizes) = of.mixer else { continue };
            if sizes.key_dim > DEVICE_KEY || sizes.kernel > DEVICE_TAPS {
                return Err(
                    Error::unsupported("linear attention (Gated DeltaNet) of this size does not run on a GPU")
                        .at(format!("{}, layer {layer}", self.model_type))
                        .found(format!("keys of {} elements, {} taps", sizes.key_dim, sizes.kernel))
                        .expected(format!(
                            "at most {DEVICE_KEY} elements and {DEVICE_TAPS} taps, or the CPU"
                        )),
                );
            }
        }
        if let Some(streams) = self.streams.filter(|s| gpu && s.count > DEVICE_STREAMS) {
            return Err(
                Error::unsupported("alternating updates (AltUp) of this size do not run on a GPU")
                    .at(&self.model_type)
                    .found(format!("{} streams", streams.count))
                    .expected(format!("at most {DEVICE_STREAMS}, or the CPU")),
            );
        }
        Ok(())
    }

    /// Elements of a token between two layers: D, or A·D if it has several streams.
    pub fn row(&self) -> usize {
        self.hidden * self.streams.map_or(1, |s| s.count)
    }

    /// E of layer `layer`.
    pub fn head_dim_of(&self, layer: usize) -> usize {
        self.layers[layer].head_dim.unwrap_or(self.head_dim)
    }

    /// K of layer `layer`.
    pub fn kv_heads_of(&self, layer: usize) -> usize {
        self.layers[layer].kv_heads.unwrap_or(self.kv_heads)
    }

    /// I of layer `layer`.
    pub fn intermediate_of(&self, layer: usize) -> usize {
        self.layers[layer].intermediate.unwrap_or(self.intermediate)
    }

    /// H·E of layer `layer`.
    pub fn query_width(&self, layer: usize) -> usize {
        self.heads * self.head_dim_of(layer)
    }

    /// K·E of layer `layer`.
    pub fn kv_width(&self, layer: usize) -> usize {
        self.kv_heads_of(layer) * self.head_dim_of(layer)
    }

    /// True if a later layer reads the keys and values of layer `layer`.
    pub fn shares_keys(&self, layer: usize) -> bool {
        self.layers.iter().any(|l| l.keys == KeySource::Layer(layer))
    }

    /// True if layer `layer` has attention sinks.
    pub fn has_sinks(&self, layer: usize) -> bool {
        self.attention_sinks && self.layers[layer].mixer == Mixer::Attention
    }

    /// For each layer the first layer with the same parameters (same names, same shapes) and the same work memory.
    pub fn alike(&self) -> Vec<usize> {
        let parameters = |layer: &LayerSpec| {
            let sizes = (layer.head_dim, layer.kv_heads, layer.intermediate);
            let experts = layer
                .experts
                .map(|e| (e.count, e.intermediate, e.shared.map(|s| s.intermediate)));
            (
                layer.mixer,
                sizes,
                discriminant(&layer.keys),
                experts,
                layer.sparsity > 0.0,
            )
        };
        let mut first = HashMap::new();
        let layers = self.layers.iter().enumerate();
        layers
            .map(|(l, layer)| *first.entry(parameters(layer)).or_insert(l))
            .collect()
    }

    /// True if transformers has a sequence classifier of this family, for text only.
    pub fn has_classifier(&self) -> bool {
        let none = [
            "cohere",
            "cohere2",
            "cwm",
            "dots1",
            "granite",
            "granitemoe",
            "granitemoehybrid",
            "granitemoeshared",
            "ernie4_5",
            "ernie4_5_moe",
            "flex_olmo",
            "granite_swa",
            "gemma3n_text",
            "gemma4_text",
            "glm4_moe_lite",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "jais2",
            "lfm2",
            "mellum",
            "minimax_m2",
            "nanochat",
            "qwen3_5_moe_text",
            "qwen3_moe_smile",
            "solar_open",
            "vaultgemma",
            "youtu",
        ];
        !self.multimodal && !none.contains(&self.model_type.as_str())
    }

    /// Longest sequence in tokens that can be generated. The cache holds rotated keys, so a sequence cannot become a
    /// long document of its rope while it grows.
    pub fn generated_positions(&self) -> usize {
        let long = self.ropes.iter().filter_map(|rope| Some(rope.long.as_ref()?.beyond));
        long.min().unwrap_or(usize::MAX).min(self.max_positions)
    }
}
