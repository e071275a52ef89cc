//! The parameters of a model: their names and shapes, layer by layer.

use super::{AltUpSpec, ExpertsSpec, KeySource, Mixer, PerLayerSpec, QkNorm, Spec};
use crate::formats::adapter::EXPERT_PARAMETERS;
use crate::peft::ExpertSite;
use crate::peft::targets::Site;
use crate::source::{Group, ParamInfo, Sublayer};

/// Name of the token embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the final norm of most families (`ModuleNames::final_norm`).
pub const FINAL_NORM: &str = "model.norm.weight";
/// As `FINAL_NORM`, of its bias.
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
/// Name of the norm of the low-rank queries of latent attention.
pub const LATENT_QUERY_NORM: &str = "self_attn.q_a_layernorm";
/// Name of the norm of the latent rows.
pub const LATENT_NORM: &str = "self_attn.kv_a_layernorm";
/// Epsilon of the norms inside of latent attention: a constant of its models, not that of their config.
const LATENT_EPS: f64 = 1e-6;
/// Names of the linears and of the norm of Laurel in a layer.
pub const LAUREL: [&str; 3] = ["laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm"];
/// Names of AltUp in a layer: its router, the norm before it, the coefficients of predictions and of corrections, and the
/// factor of what the per-layer part reads.
pub const ALTUP: [&str; 5] = [
    "altup.modality_router",
    "altup.router_norm",
    "altup.prediction_coefs",
    "altup.correction_coefs",
    "altup.correct_output_scale",
];
/// Names of the projections of the embedding to the other streams, `{name}.0.weight` for stream 1, `[D, D]`.
pub const STREAMS_IN: &str = "model.altup_projections";
/// As `STREAMS_IN`, of the projections of the other streams after the layers.
pub const STREAMS_OUT: &str = "model.altup_unembed_projections";
/// Name of the sinks of a layer, `[H]`.
pub const ATTENTION_SINKS: &str = "self_attn.sinks";
/// Name of the weight of a short convolution, `[D, 1, K]`.
pub const SHORT_CONV: &str = "conv.conv.weight";
/// Name of its bias, `[D]`.
pub const SHORT_CONV_BIAS: &str = "conv.conv.bias";
/// Name of the factor of a layer. It is never trained.
pub const LAYER_SCALAR: &str = "layer_scalar";

/// Last part of the name of the correction of a router's scores. It is never trained.
pub const ROUTER_CORRECTION: &str = "e_score_correction_bias";

/// True if the parameter of this name is never trained.
pub fn is_constant(name: &str) -> bool {
    let last = name.rsplit('.').next();
    last == Some(LAYER_SCALAR) || last == Some(ROUTER_CORRECTION)
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
    /// Its epsilon, if it is not that of the model.
    pub eps: Option<f64>,
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
    /// Name of the output projection (LM head).
    pub fn head_name(&self) -> &'static str {
        if self.tied { EMBEDDING } else { LM_HEAD }
    }

    /// The linears of layer `layer`.
    pub fn linears(&self, layer: usize) -> Vec<LinearSpec> {
        let (d, i) = (self.hidden, self.intermediate_of(layer));
        let (q, kv) = (self.query_width(layer), self.kv_width(layer));
        let q_out = if self.output_gate { 2 * q } else { q };
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
        let plain = linear(Sublayer::Attention, false);
        let mut linears = match self.layers[layer].mixer {
            Mixer::DeltaNet(sizes) => {
                let (channels, value, heads) = (sizes.channels(), sizes.value_width(), sizes.value_heads);
                let mut own = if sizes.by_key_head {
                    vec![
                        plain("linear_attn.in_proj_qkvz", d, channels + value),
                        plain("linear_attn.in_proj_ba", d, 2 * heads),
                    ]
                } else {
                    vec![
                        plain("linear_attn.in_proj_qkv", d, channels),
                        plain("linear_attn.in_proj_z", d, value),
                        plain("linear_attn.in_proj_b", d, heads),
                        plain("linear_attn.in_proj_a", d, heads),
                    ]
                };
                own.push(plain("linear_attn.out_proj", value, d));
                own
            }
            Mixer::Latent(sizes) => {
                let low = o;
                let wide = self.heads * (sizes.plain + sizes.rotary);
                let mut own = match sizes.q_rank {
                    None => vec![plain("self_attn.q_proj", d, wide)],
                    Some(rank) => vec![low("self_attn.q_a_proj", d, rank)],
                };
                own.push(low("self_attn.kv_a_proj_with_mqa", d, sizes.kv_rank + sizes.rotary));
                own.extend(sizes.q_rank.map(|rank| plain("self_attn.q_b_proj", rank, wide)));
                let kv = self.heads * (sizes.plain + sizes.value);
                own.push(plain("self_attn.kv_b_proj", sizes.kv_rank, kv));
                own.push(o("self_attn.o_proj", self.heads * sizes.value, d));
                own
            }
            Mixer::Attention => {
                let mut own = vec![
                    qkv("self_attn.q_proj", d, q_out),
                    qkv("self_attn.k_proj", d, kv),
                    qkv("self_attn.v_proj", d, kv),
                ];
                own.truncate(match self.layers[layer].keys {
                    KeySource::Own => 3,
                    KeySource::KeysOnly => 2,
                    KeySource::Layer(_) => 1,
                });
                if self.fused_qkv {
                    own = vec![qkv("self_attn.qkv_proj", d, q + 2 * kv)];
                }
                own.push(o(self.modules.o_proj, q, d));
                own
            }
            Mixer::ShortConv { bias, .. } => {
                let own = linear(Sublayer::Attention, bias);
                vec![own("conv.in_proj", d, 3 * d), own("conv.out_proj", d, d)]
            }
        };
        let experts = self.layers[layer].experts;
        match self.plain_mlp {
            // Of a mixture of experts only the shared expert: the others are not places of adapters of their own.
            _ if experts.is_some() => {
                if let Some(shared) = experts.and_then(|e| e.shared) {
                    let [gate, up, down] = shared.names;
                    let width = shared.intermediate;
                    if shared.is_fused() {
                        linears.push(mlp(gate, d, 2 * width));
                    } else {
                        linears.extend([mlp(gate, d, width), mlp(up, d, width)]);
                    }
                    linears.push(mlp(down, width, d));
                }
            }
            Some([up, down]) => linears.extend([mlp(up, d, i), mlp(down, i, d)]),
            None => match (self.fused_gate_up, self.modules.mlp) {
                (Some([gate_up, down]), _) => linears.extend([mlp(gate_up, d, 2 * i), mlp(down, i, d)]),
                (None, [gate, up, down]) => linears.extend([mlp(gate, d, i), mlp(up, d, i), mlp(down, i, d)]),
            },
        }
        if let Some(rank) = self.laurel {
            linears.extend([plain(LAUREL[0], d, rank), plain(LAUREL[1], rank, d)]);
        }
        if let Some(PerLayerSpec { width, .. }) = self.per_layer {
            let plain = linear(Sublayer::Mlp, false);
            linears.extend([plain(PER_LAYER[0], d, width), plain(PER_LAYER[1], width, d)]);
        }
        linears
    }

    /// The linears of AltUp in a layer: small matrices that are never quantized, as routers.
    pub fn altup_linears(&self) -> Vec<LinearSpec> {
        let Some(AltUpSpec { count, .. }) = self.streams else {
            return Vec::new();
        };
        let parts = [
            (ALTUP[0], self.hidden, count),
            (ALTUP[2], count, count * count),
            (ALTUP[3], count, count),
        ];
        let linear = |(name, input, output)| LinearSpec {
            name,
            input,
            output,
            bias: false,
            sublayer: Sublayer::Router,
        };
        parts.map(linear).to_vec()
    }

    /// The linears outside of the layers that can have adapters: those of the streams and of the per-layer inputs.
    pub fn linears_outside(&self) -> Vec<Site> {
        let (d, others) = (self.hidden, self.streams.map_or(0, |s| s.count - 1));
        let streams = |name| (0..others).map(move |i| (format!("{name}.{i}"), d));
        let wide = self.per_layer.map(|p| self.layers.len() * p.width);
        let projection = wide.map(|wide| (PER_LAYER_PROJECTION.trim_end_matches(".weight").to_string(), wide));
        let all = projection
            .into_iter()
            .chain(streams(STREAMS_IN))
            .chain(streams(STREAMS_OUT));
        let site = |(module, output)| Site {
            module,
            input: d,
            output,
        };
        all.map(site).collect()
    }

    fn norm(&self, name: &'static str, size: usize, sublayer: Sublayer) -> NormSpec {
        NormSpec {
            name,
            size,
            heads: None,
            weight: !self.plain_norms && self.layer_norm.is_none_or(|params| params.weight),
            bias: self.layer_norm.is_some_and(|params| params.bias),
            eps: None,
            sublayer,
        }
    }

    /// The final norm.
    pub fn final_norm(&self) -> NormSpec {
        self.norm(self.modules.final_norm, self.hidden, Sublayer::Other)
    }

    /// The norms of layer `layer`.
    pub fn norms(&self, layer: usize) -> Vec<NormSpec> {
        let norm = |name, size, sublayer| self.norm(name, size, sublayer);
        let (d, attention, mlp) = (self.hidden, Sublayer::Attention, Sublayer::Mlp);
        let mut norms = Vec::new();
        let mixer = self.layers[layer].mixer;
        if let Mixer::DeltaNet(sizes) = mixer {
            norms.push(norm("linear_attn.norm", sizes.value_dim, attention));
        }
        if let Mixer::Latent(sizes) = mixer {
            let inner = |name, size| NormSpec {
                eps: Some(LATENT_EPS),
                ..norm(name, size, attention)
            };
            norms.extend(sizes.q_rank.map(|rank| inner(LATENT_QUERY_NORM, rank)));
            norms.push(inner(LATENT_NORM, sizes.kv_rank));
        }
        if let Some(QkNorm {
            names: [q, k],
            whole,
            own_weights,
            ..
        }) = self.qk_norm.filter(|_| mixer == Mixer::Attention)
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
        if self.laurel.is_some() {
            norms.push(norm(LAUREL[2], d, attention));
        }
        if self.streams.is_some() {
            norms.push(norm(ALTUP[1], d, mlp));
        }
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
        if let Mixer::DeltaNet(sizes) = self.layers[layer].mixer {
            let others = [
                ("conv1d.weight", vec![sizes.channels(), 1, sizes.kernel]),
                ("dt_bias", vec![sizes.value_heads]),
                ("A_log", vec![sizes.value_heads]),
            ];
            for (name, shape) in others {
                let name = format!("model.layers.{layer}.linear_attn.{name}");
                all.push(param(name, shape, group, Sublayer::Attention));
            }
        }
        if let Mixer::ShortConv { kernel, bias } = self.layers[layer].mixer {
            let name = format!("model.layers.{layer}.{SHORT_CONV}");
            all.push(param(name, vec![self.hidden, 1, kernel], group, Sublayer::Attention));
            if bias {
                let name = format!("model.layers.{layer}.{SHORT_CONV_BIAS}");
                all.push(param(name, vec![self.hidden], group, Sublayer::Attention));
            }
        }
        if let Some(experts) = &self.layers[layer].experts {
            all.extend(self.expert_params(layer, experts));
        }
        for norm in self.norms(layer) {
            for (name, shape) in norm.params(&format!("model.layers.{layer}.{}", norm.name)) {
                all.push(param(name, shape, group, norm.sublayer));
            }
        }
        for linear in self.altup_linears() {
            let name = format!("model.layers.{layer}.{}.weight", linear.name);
            all.push(param(name, vec![linear.output, linear.input], group, linear.sublayer));
        }
        if self.streams.is_some() {
            let name = format!("model.layers.{layer}.{}", ALTUP[4]);
            all.push(param(name, vec![self.hidden], group, Sublayer::Mlp));
        }
        if self.has_sinks(layer) {
            let name = format!("model.layers.{layer}.{ATTENTION_SINKS}");
            all.push(param(name, vec![self.heads], group, Sublayer::Attention));
        }
        if self.layer_scalar {
            let name = format!("model.layers.{layer}.{LAYER_SCALAR}");
            all.push(param(name, vec![1], group, Sublayer::Other));
        }
        all
    }

    /// The router and the experts of a layer.
    fn expert_params(&self, layer: usize, experts: &ExpertsSpec) -> Vec<ParamInfo> {
        let (d, i) = (self.hidden, experts.intermediate);
        let of_layer = |name: String, shape: Vec<usize>, sublayer| {
            param(
                format!("model.layers.{layer}.{name}"),
                shape,
                Group::Layer(layer),
                sublayer,
            )
        };
        let mut all = vec![of_layer(
            experts.router_name(),
            vec![experts.router.outputs(experts.count), d],
            Sublayer::Router,
        )];
        let count = experts.count;
        if experts.bias {
            let name = format!("{}.bias", experts.names.router);
            all.push(of_layer(name, vec![count], Sublayer::Router));
        }
        if experts.correction {
            let mut shape = vec![experts.count];
            if experts.names.correction_row {
                shape.insert(0, 1);
            }
            all.push(of_layer(experts.correction_name(), shape, Sublayer::Router));
        }
        if let Some(gate) = experts.shared.and_then(|s| s.gate) {
            all.push(of_layer(format!("{gate}.weight"), vec![1, d], Sublayer::Router));
        }
        for expert in 0..experts.count {
            for (projection, shape) in [vec![i, d], vec![i, d], vec![d, i]].into_iter().enumerate() {
                let (name, outputs) = (experts.linear_name(expert, projection), shape[0]);
                all.push(of_layer(format!("{name}.weight"), shape, Sublayer::Mlp));
                if experts.bias {
                    all.push(of_layer(format!("{name}.bias"), vec![outputs], Sublayer::Mlp));
                }
            }
        }
        all
    }

    /// Elements of the routed experts of layer `layer` with which one token is multiplied.
    pub fn routed_elements(&self, layer: usize) -> usize {
        let experts = self.layers[layer].experts;
        experts.map_or(0, |e| e.router.top_k * 3 * e.intermediate * self.hidden)
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
        for i in 1..self.streams.map_or(1, |s| s.count) {
            for name in [STREAMS_IN, STREAMS_OUT] {
                let shape = [self.hidden, self.hidden];
                all.push(other(&format!("{name}.{}.weight", i - 1), &shape, Group::Head));
            }
        }
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

    /// The parameters of layer `layer` that have the matrices of all experts.
    pub fn expert_sites_of(&self, layer: usize) -> Vec<ExpertSite> {
        let Some(experts) = &self.layers[layer].experts else {
            return Vec::new();
        };
        let (d, i) = (self.hidden, experts.intermediate);
        let site = |(name, projections, input, output): (&str, std::ops::Range<usize>, usize, usize)| ExpertSite {
            site: Site {
                module: format!("model.layers.{layer}.{}.{name}", experts.names.module),
                input,
                output,
            },
            experts: experts.count,
            alternate: experts.names.alternate && projections.len() > 1,
            projections,
        };
        let [gate_up, down] = EXPERT_PARAMETERS;
        [(gate_up, 0..2, d, 2 * i), (down, 2..3, i, d)].map(site).into()
    }

    /// The parameters with the matrices of all experts of a layer, in order, that can have adapters.
    pub fn expert_sites(&self) -> Vec<ExpertSite> {
        (0..self.layers.len()).flat_map(|l| self.expert_sites_of(l)).collect()
    }

    /// For each of `expert_sites` its path, and the linears of experts that are joined in it.
    pub fn expert_linears(&self) -> Vec<(String, Vec<String>)> {
        let mut all = Vec::new();
        for (layer, experts) in self
            .layers
            .iter()
            .enumerate()
            .filter_map(|(l, of)| Some((l, of.experts?)))
        {
            for site in self.expert_sites_of(layer) {
                let each = |e| site.projections.clone().map(move |p| (e, p));
                let linears = (0..site.experts).flat_map(each);
                let name = |(e, p)| format!("model.layers.{layer}.{}", experts.linear_name(e, p));
                all.push((site.site.module.clone(), linears.map(name).collect()));
            }
        }
        all
    }

    /// The linears that can have adapters: those of the decoder layers in order, those of AltUp, and those outside of the
    /// layers. In a model with experts only those of attention: PEFT takes the names of all other linears for those of the
    /// experts.
    pub fn sites(&self) -> Vec<Site> {
        let has_experts = self.layers.iter().any(|layer| layer.experts.is_some());
        let linears = |l| {
            let all = self.linears(l).into_iter();
            all.filter(|linear| !has_experts || linear.sublayer == Sublayer::Attention)
        };
        let site = |l: usize, linear: LinearSpec| Site {
            module: format!("model.layers.{l}.{}", linear.name),
            input: linear.input,
            output: linear.output,
        };
        let layers = 0..self.layers.len();
        let altup = layers
            .clone()
            .flat_map(|l| self.altup_linears().into_iter().map(move |linear| (l, linear)));
        let inside = layers.flat_map(|l| linears(l).map(move |linear| (l, linear)));
        let inside = inside.chain(altup).map(|(l, linear)| site(l, linear));
        inside.chain(self.linears_outside()).collect()
    }
}
