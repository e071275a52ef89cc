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

/// A linear of a layer.
#[derive(Debug, Clone, Copy)]
pub struct LinearSpec {
    /// The name below the layer.
    pub name: &'static str,
    /// I: input features.
    pub input: usize,
    /// O: output features.
    pub output: usize,
    /// True if it has a bias.
    pub bias: bool,
    /// The half of the layer.
    pub sublayer: Sublayer,
}

/// A norm of a layer.
#[derive(Debug, Clone, Copy)]
pub struct NormSpec {
    /// The name below the layer.
    pub name: &'static str,
    /// The number of elements.
    pub size: usize,
    /// The half of the layer.
    pub sublayer: Sublayer,
}

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

    /// The linears of one layer.
    pub fn linears(&self) -> Vec<LinearSpec> {
        let (d, i, q, kv) = (self.hidden, self.intermediate, self.query_width(), self.kv_width());
        let linear = |sublayer, bias| {
            move |name, input, output| LinearSpec {
                name,
                input,
                output,
                bias,
                sublayer,
            }
        };
        let qkv = linear(Sublayer::Attention, self.qkv_bias);
        let o = linear(Sublayer::Attention, self.o_bias);
        let mlp = linear(Sublayer::Mlp, self.mlp_bias);
        let mut linears = if self.fused_projections {
            vec![qkv("self_attn.qkv_proj", d, q + 2 * kv)]
        } else {
            vec![
                qkv("self_attn.q_proj", d, q),
                qkv("self_attn.k_proj", d, kv),
                qkv("self_attn.v_proj", d, kv),
            ]
        };
        linears.push(o("self_attn.o_proj", q, d));
        if self.fused_projections {
            linears.push(mlp("mlp.gate_up_proj", d, 2 * i));
        } else {
            linears.extend([mlp("mlp.gate_proj", d, i), mlp("mlp.up_proj", d, i)]);
        }
        linears.push(mlp("mlp.down_proj", i, d));
        linears
    }

    /// The norms of one layer.
    pub fn norms(&self) -> Vec<NormSpec> {
        let norm = |name, size, sublayer| NormSpec { name, size, sublayer };
        let (d, attention, mlp) = (self.hidden, Sublayer::Attention, Sublayer::Mlp);
        let mut norms = Vec::new();
        if self.qk_norm {
            norms.push(norm("self_attn.q_norm", self.head_dim, attention));
            norms.push(norm("self_attn.k_norm", self.head_dim, attention));
        }
        norms.push(norm("input_layernorm", d, attention));
        if self.sandwich_norms {
            norms.push(norm("post_attention_layernorm", d, attention));
            norms.push(norm("pre_feedforward_layernorm", d, mlp));
            norms.push(norm("post_feedforward_layernorm", d, mlp));
        } else {
            norms.push(norm("post_attention_layernorm", d, mlp));
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
            for linear in self.linears() {
                let name = format!("model.layers.{l}.{}", linear.name);
                let shape = vec![linear.output, linear.input];
                all.push(param(format!("{name}.weight"), shape, group, linear.sublayer));
                if linear.bias {
                    all.push(param(
                        format!("{name}.bias"),
                        vec![linear.output],
                        group,
                        linear.sublayer,
                    ));
                }
            }
            for norm in self.norms() {
                let name = format!("model.layers.{l}.{}.weight", norm.name);
                all.push(param(name, vec![norm.size], group, norm.sublayer));
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
                self.linears().into_iter().map(move |linear| Site {
                    module: format!("model.layers.{l}.{}", linear.name),
                    input: linear.input,
                    output: linear.output,
                })
            })
            .collect()
    }
}
