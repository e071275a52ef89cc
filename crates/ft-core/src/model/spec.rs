//! The numbers that define a model: read once from `config.json`, used by layers, planner and export.

use super::rope::Rope;
use crate::ops::glu::Activation;
use crate::ops::rope::Pairing;
use crate::peft::targets::Site;
use crate::source::{Group, ParamInfo, Sublayer};
use std::collections::BTreeMap;

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
    /// The norms are LayerNorms; else RMSNorms.
    pub layer_norm: Option<LayerNormParams>,
    /// The norms around the two halves of a layer.
    pub norms: NormNames,
    /// Norms of the queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// gpt-oss: each head has a learned logit in the denominator of its softmax.
    pub attention_sinks: bool,
    /// Gemma 4: a norm without weights on each head of v.
    pub value_norm: bool,
    /// Gemma 4: each layer reads an input that depends on the token.
    pub per_layer: Option<PerLayerSpec>,
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
    /// Phi-3, GLM-4: one projection for gate and up.
    pub fused_gate_up: bool,
    /// An MLP without a gate: the names of its projections.
    pub plain_mlp: Option<[&'static str; 2]>,
    /// Both halves of a layer read the same normalized input, and both are added to the input.
    pub parallel: bool,
    /// The activation of the gate, or of an MLP without a gate.
    pub activation: Activation,
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
    /// Granite: factor of what a half of a layer adds to the residual stream.
    pub residual_scale: f32,
    /// Which elements of a head are rotated together.
    pub pairing: Pairing,
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
    /// The language model of a multimodal model: its files have other tensors too, and other names.
    pub multimodal: bool,
    /// Notes for the user, e.g. a key of the config that has no effect.
    pub warnings: Vec<String>,
}

/// The options in which layers of one model can differ.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LayerSpec {
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
}

/// The per-layer inputs: rows of a table, to which a projection of the embedding is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerSpec {
    /// Rows of the table.
    pub vocab: usize,
    /// P: width of the input of one layer.
    pub width: usize,
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
    /// GLM-4: as `SANDWICH`, under other names.
    pub const SANDWICH_GLM4: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: Some("post_self_attn_layernorm"),
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: Some("post_mlp_layernorm"),
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
    /// Hunyuan: on each head, after the rotation.
    pub const ROTATED: Self = Self {
        names: ["self_attn.query_layernorm", "self_attn.key_layernorm"],
        after_rope: true,
        ..Self::HEADS
    };
}

/// Name of the token embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the final norm.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Name of the bias of the final norm.
pub const FINAL_NORM_BIAS: &str = "model.norm.bias";
/// Name of the output projection of a model that is not tied.
pub const LM_HEAD: &str = "lm_head.weight";

/// Name of the table of the per-layer inputs, `[rows, L·P]`. It is never trained, and only rows of it are read.
pub const PER_LAYER_TABLE: &str = "model.embed_tokens_per_layer.weight";
/// Name of the projection of the embedding that is added to the rows of the table, `[L·P, D]`.
pub const PER_LAYER_PROJECTION: &str = "model.per_layer_model_projection.weight";
/// Name of the norm of that projection, `[P]`.
pub const PER_LAYER_NORM: &str = "model.per_layer_projection_norm.weight";
/// Names of the linears and of the norm of a layer that read its per-layer input.
pub const PER_LAYER: [&str; 3] = [
    "per_layer_input_gate",
    "per_layer_projection",
    "post_per_layer_input_norm",
];
/// Name of the sinks of a layer, `[H]`.
pub const ATTENTION_SINKS: &str = "self_attn.sinks";
/// Name of the factor of a layer. It is never trained.
pub const LAYER_SCALAR: &str = "layer_scalar";

/// True if the parameter of this name is never trained.
pub fn is_constant(name: &str) -> bool {
    name == PER_LAYER_TABLE || name.rsplit('.').next() == Some(LAYER_SCALAR)
}

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
    /// E: elements that are normalized together.
    pub size: usize,
    /// Heads with a weight of their own; `None`: one weight for all.
    pub heads: Option<usize>,
    /// True if it has a weight.
    pub weight: bool,
    /// True if it has a bias.
    pub bias: bool,
    /// The half of the layer.
    pub sublayer: Sublayer,
}

fn param(name: String, shape: Vec<usize>, group: Group, sublayer: Sublayer) -> ParamInfo {
    ParamInfo {
        name: name.into(),
        shape,
        group,
        sublayer,
    }
}

impl NormSpec {
    /// The names of its parameters below `name`, and their shapes.
    fn params(&self, name: &str) -> Vec<(String, Vec<usize>)> {
        let shape = match self.heads {
            None => vec![self.size],
            Some(heads) => vec![heads, self.size],
        };
        let parts = [(self.weight, "weight"), (self.bias, "bias")];
        let params = parts.map(|(has, part)| has.then(|| (format!("{name}.{part}"), shape.clone())));
        params.into_iter().flatten().collect()
    }
}

impl Spec {
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

    /// For each layer the first layer with the same parameters: same names, same shapes.
    pub fn alike(&self) -> Vec<usize> {
        let sizes = |layer: &LayerSpec| {
            let shared = matches!(layer.keys, KeySource::Layer(_));
            let keys_only = layer.keys == KeySource::KeysOnly;
            (layer.head_dim, layer.kv_heads, layer.intermediate, shared, keys_only)
        };
        let mut first = BTreeMap::new();
        let layers = self.layers.iter().enumerate();
        layers
            .map(|(l, layer)| *first.entry(sizes(layer)).or_insert(l))
            .collect()
    }

    /// True if ft can save a reward model: transformers has a sequence classifier of this family, for text only.
    pub fn has_classifier(&self) -> bool {
        let none = ["cohere", "cohere2", "granite", "ernie4_5", "gemma4_text"];
        !self.multimodal && !none.contains(&self.model_type.as_str())
    }

    /// Longest sequence in tokens that can be decoded. The cache holds rotated keys, so a sequence cannot become a long
    /// document of its rope while it grows.
    pub fn decoded_positions(&self) -> usize {
        let long = self.ropes.iter().filter_map(|rope| Some(rope.long.as_ref()?.beyond));
        long.min().unwrap_or(usize::MAX).min(self.max_positions)
    }

    /// Name of the output projection (LM head).
    pub fn head_name(&self) -> &'static str {
        if self.tied { EMBEDDING } else { LM_HEAD }
    }

    /// The linears of layer `layer`.
    pub fn linears(&self, layer: usize) -> Vec<LinearSpec> {
        let (d, i) = (self.hidden, self.intermediate_of(layer));
        let (q, kv) = (self.query_width(layer), self.kv_width(layer));
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
        let mut linears = if self.fused_qkv {
            vec![qkv("self_attn.qkv_proj", d, q + 2 * kv)]
        } else {
            let mut own = vec![
                qkv("self_attn.q_proj", d, q),
                qkv("self_attn.k_proj", d, kv),
                qkv("self_attn.v_proj", d, kv),
            ];
            own.truncate(match self.layers[layer].keys {
                KeySource::Own => 3,
                KeySource::KeysOnly => 2,
                KeySource::Layer(_) => 1,
            });
            own
        };
        linears.push(o("self_attn.o_proj", q, d));
        match self.plain_mlp {
            Some([up, down]) => linears.extend([mlp(up, d, i), mlp(down, i, d)]),
            None if self.fused_gate_up => {
                linears.extend([mlp("mlp.gate_up_proj", d, 2 * i), mlp("mlp.down_proj", i, d)]);
            }
            None => linears.extend([
                mlp("mlp.gate_proj", d, i),
                mlp("mlp.up_proj", d, i),
                mlp("mlp.down_proj", i, d),
            ]),
        }
        if let Some(PerLayerSpec { width, .. }) = self.per_layer {
            let plain = linear(Sublayer::Mlp, false);
            linears.extend([plain(PER_LAYER[0], d, width), plain(PER_LAYER[1], width, d)]);
        }
        linears
    }

    fn norm(&self, name: &'static str, size: usize, sublayer: Sublayer) -> NormSpec {
        NormSpec {
            name,
            size,
            heads: None,
            weight: self.layer_norm.is_none_or(|params| params.weight),
            bias: self.layer_norm.is_some_and(|params| params.bias),
            sublayer,
        }
    }

    /// The final norm.
    pub fn final_norm(&self) -> NormSpec {
        self.norm("model.norm", self.hidden, Sublayer::Other)
    }

    /// The norms of layer `layer`.
    pub fn norms(&self, layer: usize) -> Vec<NormSpec> {
        let norm = |name, size, sublayer| self.norm(name, size, sublayer);
        let (d, attention, mlp) = (self.hidden, Sublayer::Attention, Sublayer::Mlp);
        let mut norms = Vec::new();
        if let Some(QkNorm {
            names: [q, k],
            whole,
            own_weights,
            ..
        }) = self.qk_norm
        {
            let e = self.head_dim_of(layer);
            for (name, heads) in [(q, self.heads), (k, self.kv_heads_of(layer))] {
                if name == k && matches!(self.layers[layer].keys, KeySource::Layer(_)) {
                    continue;
                }
                norms.push(NormSpec {
                    heads: own_weights.then_some(heads),
                    ..norm(name, if whole { heads * e } else { e }, attention)
                });
            }
        }
        let names = &self.norms;
        norms.extend(
            [names.before_attention, names.after_attention]
                .into_iter()
                .flatten()
                .map(|n| norm(n, d, attention)),
        );
        norms.extend(
            [names.before_mlp, names.after_mlp]
                .into_iter()
                .flatten()
                .map(|n| norm(n, d, mlp)),
        );
        if self.per_layer.is_some() {
            norms.push(norm(PER_LAYER[2], d, mlp));
        }
        norms
    }

    /// Every parameter of layer `layer` under its Hugging Face name.
    pub fn layer_params(&self, layer: usize) -> Vec<ParamInfo> {
        let group = Group::Layer(layer);
        let mut all = Vec::new();
        for linear in self.linears(layer) {
            let name = format!("model.layers.{layer}.{}", linear.name);
            let shape = vec![linear.output, linear.input];
            all.push(param(format!("{name}.weight"), shape, group, linear.sublayer));
            if linear.bias {
                let shape = vec![linear.output];
                all.push(param(format!("{name}.bias"), shape, group, linear.sublayer));
            }
        }
        for norm in self.norms(layer) {
            for (name, shape) in norm.params(&format!("model.layers.{layer}.{}", norm.name)) {
                all.push(param(name, shape, group, norm.sublayer));
            }
        }
        if self.attention_sinks {
            let name = format!("model.layers.{layer}.{ATTENTION_SINKS}");
            all.push(param(name, vec![self.heads], group, Sublayer::Attention));
        }
        if self.layer_scalar {
            let name = format!("model.layers.{layer}.{LAYER_SCALAR}");
            all.push(param(name, vec![1], group, Sublayer::Other));
        }
        all
    }

    /// Every parameter under its Hugging Face name, from the embedding to the head.
    pub fn params(&self) -> Vec<ParamInfo> {
        let mut all = vec![self.embedding_param()];
        all.extend((0..self.layers.len()).flat_map(|l| self.layer_params(l)));
        all.extend(self.params_after());
        all
    }

    /// The token embedding.
    fn embedding_param(&self) -> ParamInfo {
        let shape = vec![self.vocab, self.hidden];
        param(EMBEDDING.into(), shape, Group::Embedding, Sublayer::Other)
    }

    /// The parameters that belong to no layer.
    pub fn params_outside(&self) -> Vec<ParamInfo> {
        let mut all = vec![self.embedding_param()];
        all.extend(self.params_after());
        all
    }

    /// The parameters after the layers.
    fn params_after(&self) -> Vec<ParamInfo> {
        let other = |name: &str, shape: &[usize], group| param(name.into(), shape.to_vec(), group, Sublayer::Other);
        let norm = self.final_norm();
        let params = norm.params(norm.name).into_iter();
        let mut all: Vec<ParamInfo> = params.map(|(name, shape)| other(&name, &shape, Group::Head)).collect();
        if let Some(PerLayerSpec { vocab, width }) = self.per_layer {
            let wide = self.layers.len() * width;
            all.push(other(PER_LAYER_PROJECTION, &[wide, self.hidden], Group::Head));
            all.push(other(PER_LAYER_NORM, &[width], Group::Head));
            all.push(other(PER_LAYER_TABLE, &[vocab, wide], Group::Table));
        }
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
                self.linears(l).into_iter().map(move |linear| Site {
                    module: format!("model.layers.{l}.{}", linear.name),
                    input: linear.input,
                    output: linear.output,
                })
            })
            .collect()
    }
}
