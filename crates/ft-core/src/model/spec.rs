//! The numbers that define a model: read once from `config.json`, used by layers, planner and export.

use super::rope::Rope;
use crate::ops::glu::Activation;
use crate::peft::targets::Site;
use crate::source::{Group, ParamInfo, Sublayer};

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
    /// Gemma: a norm multiplies by 1 + w.
    pub norm_plus_one: bool,
    /// Gemma: norms also after attention and after the MLP.
    pub sandwich_norms: bool,
    /// Norms on each query and key head.
    pub qk_norm: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// A bias on the output projection of the attention.
    pub o_bias: bool,
    /// Biases on the projections of the MLP.
    pub mlp_bias: bool,
    /// Phi-3: one projection for q, k, v and one for gate and up.
    pub fused_projections: bool,
    /// The activation of the gate.
    pub activation: Activation,
    /// Factor of the scores before the softmax.
    pub attention_scale: f32,
    /// Attention scores s become cap · tanh(s / cap).
    pub attention_softcap: Option<f32>,
    /// Logits z become cap · tanh(z / cap).
    pub logit_softcap: Option<f32>,
    /// Factor of the embedding's output.
    pub embedding_scale: f32,
    /// The output projection is the embedding.
    pub tied: bool,
    /// The options of each layer.
    pub layers: Vec<LayerSpec>,
    /// The rotary embeddings that layers refer to.
    pub ropes: Vec<Rope>,
    /// Longest sequence in tokens.
    pub max_positions: usize,
    /// Standard deviation of random weights.
    pub initializer_range: f32,
    /// Notes for the user, e.g. a key of the config that has no effect.
    pub warnings: Vec<String>,
}

/// The options in which layers of one model can differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// Sliding window in tokens; `None`: full causal attention.
    pub window: Option<usize>,
    /// Index into `Spec::ropes`.
    pub rope: usize,
}

/// Name of the token embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the final norm.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Name of the output projection of a model that is not tied.
pub const LM_HEAD: &str = "lm_head.weight";

impl Spec {
    /// H·E
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// K·E
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Name of the output projection (LM head).
    pub fn head_name(&self) -> &'static str {
        if self.tied { EMBEDDING } else { LM_HEAD }
    }

    /// The linears of one layer: name below the layer, input, output, bias, sublayer.
    pub fn linears(&self) -> Vec<(&'static str, usize, usize, bool, Sublayer)> {
        let (d, i, q, kv) = (self.hidden, self.intermediate, self.query_width(), self.kv_width());
        let attention: Vec<_> = if self.fused_projections {
            vec![("self_attn.qkv_proj", d, q + 2 * kv, self.qkv_bias)]
        } else {
            vec![
                ("self_attn.q_proj", d, q, self.qkv_bias),
                ("self_attn.k_proj", d, kv, self.qkv_bias),
                ("self_attn.v_proj", d, kv, self.qkv_bias),
            ]
        };
        let mlp: Vec<_> = if self.fused_projections {
            vec![("mlp.gate_up_proj", d, 2 * i, self.mlp_bias)]
        } else {
            vec![
                ("mlp.gate_proj", d, i, self.mlp_bias),
                ("mlp.up_proj", d, i, self.mlp_bias),
            ]
        };
        let o = ("self_attn.o_proj", q, d, self.o_bias);
        let down = ("mlp.down_proj", i, d, self.mlp_bias);
        let with = |sublayer: Sublayer| move |(n, a, b, c): (&'static str, usize, usize, bool)| (n, a, b, c, sublayer);
        attention
            .into_iter()
            .chain([o])
            .map(with(Sublayer::Attention))
            .chain(mlp.into_iter().chain([down]).map(with(Sublayer::Mlp)))
            .collect()
    }

    /// The norms of one layer: name below the layer, size, sublayer.
    pub fn norms(&self) -> Vec<(&'static str, usize, Sublayer)> {
        let d = self.hidden;
        let mut norms = Vec::new();
        if self.qk_norm {
            norms.push(("self_attn.q_norm", self.head_dim, Sublayer::Attention));
            norms.push(("self_attn.k_norm", self.head_dim, Sublayer::Attention));
        }
        norms.push(("input_layernorm", d, Sublayer::Attention));
        if self.sandwich_norms {
            norms.push(("post_attention_layernorm", d, Sublayer::Attention));
            norms.push(("pre_feedforward_layernorm", d, Sublayer::Mlp));
            norms.push(("post_feedforward_layernorm", d, Sublayer::Mlp));
        } else {
            norms.push(("post_attention_layernorm", d, Sublayer::Mlp));
        }
        norms
    }

    /// Every parameter under its Hugging Face name, from the embedding to the head.
    pub fn params(&self) -> Vec<ParamInfo> {
        let param = |name: String, shape: Vec<usize>, group, sublayer| ParamInfo {
            name: name.into(),
            shape,
            group,
            sublayer,
        };
        let mut all = vec![param(
            EMBEDDING.into(),
            vec![self.vocab, self.hidden],
            Group::Embedding,
            Sublayer::Other,
        )];
        for l in 0..self.layers.len() {
            let group = Group::Layer(l);
            for (name, input, output, bias, sublayer) in self.linears() {
                all.push(param(
                    format!("model.layers.{l}.{name}.weight"),
                    vec![output, input],
                    group,
                    sublayer,
                ));
                if bias {
                    all.push(param(
                        format!("model.layers.{l}.{name}.bias"),
                        vec![output],
                        group,
                        sublayer,
                    ));
                }
            }
            for (name, size, sublayer) in self.norms() {
                all.push(param(
                    format!("model.layers.{l}.{name}.weight"),
                    vec![size],
                    group,
                    sublayer,
                ));
            }
        }
        all.push(param(
            FINAL_NORM.into(),
            vec![self.hidden],
            Group::Head,
            Sublayer::Other,
        ));
        if !self.tied {
            all.push(param(
                LM_HEAD.into(),
                vec![self.vocab, self.hidden],
                Group::Head,
                Sublayer::Other,
            ));
        }
        all
    }

    /// Every linear of the decoder layers, in order: the possible places of adapters.
    pub fn sites(&self) -> Vec<Site> {
        (0..self.layers.len())
            .flat_map(|l| {
                self.linears().into_iter().map(move |(name, input, output, _, _)| Site {
                    module: format!("model.layers.{l}.{name}"),
                    input,
                    output,
                })
            })
            .collect()
    }
}
