//! The tensors of a GGUF file: their names, and from which parameters their rows come.

use super::arch::Arch;
use crate::model::Spec;
use crate::model::spec::{
    ATTENTION_SINKS, EMBEDDING, FINAL_NORM, FINAL_NORM_BIAS, LM_HEAD, LatentSpec, Mixer, ROUTER_CORRECTION,
};
use crate::ops::rope::RopePairing;
use crate::source::ParamInfo;

/// The order of the rows of a parameter in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RowOrder {
    /// Unchanged.
    Same,
    /// In each of these heads, row i of the first half is followed by row i of the second.
    Interleaved {
        /// Number of heads.
        heads: usize,
    },
    /// The rows of `kv_b_proj` that make keys, transposed: `[H, rank, plain]`.
    Keys(LatentSpec),
    /// The rows of `kv_b_proj` that make values: `[H, value, rank]`.
    Values(LatentSpec),
}

/// Rows of a tensor.
#[derive(Debug, Clone)]
pub(crate) struct TensorPart {
    /// The parameter with these rows.
    pub param: ParamInfo,
    /// Their order.
    pub order: RowOrder,
}

/// A tensor of the file.
#[derive(Debug, Clone)]
pub(crate) struct PlannedTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Where its rows come from, one after another.
    pub parts: Vec<TensorPart>,
    /// The values are factor · parameter + plus.
    pub factor: f32,
    /// See `factor`.
    pub plus: f32,
    /// Never quantized.
    pub exact: bool,
    /// Its layer.
    pub layer: Option<usize>,
}

/// Names of linears below a layer.
const LINEARS: [(&str, &str); 18] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.c_proj", "ffn_down"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    (ATTENTION_SINKS, "attn_sinks"),
];

/// The name in the file of the module `module` of layer `layer`, such as `blk.0.attn_q`.
pub(crate) fn module(spec: &Spec, arch: &Arch, layer: usize, module: &str) -> Option<String> {
    let norms = &spec.norms;
    let of_norms = [
        (norms.before_attention, "attn_norm"),
        (norms.after_attention, "post_attention_norm"),
        (norms.before_mlp, arch.mlp_norm),
        (norms.after_mlp, "post_ffw_norm"),
    ];
    let norm = of_norms
        .iter()
        .find(|(own, _)| *own == Some(module))
        .map(|(_, name)| *name);
    let qk = spec.qk_norm.and_then(|qk| {
        let at = qk.names.iter().position(|name| *name == module)?;
        Some(["attn_q_norm", "attn_k_norm"][at])
    });
    let linear = || LINEARS.iter().find(|(own, _)| *own == module).map(|(_, name)| *name);
    let experts = spec.layers[layer].experts.and_then(|experts| {
        let shared = experts.shared.as_ref();
        let at = shared.and_then(|s| s.names.iter().position(|name| *name == module));
        match at {
            Some(at) => Some(["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"][at]),
            None if shared.is_some_and(|s| s.gate == Some(module)) => Some("ffn_gate_inp_shexp"),
            None if experts.names.router == module => Some("ffn_gate_inp"),
            None => None,
        }
    });
    let name = norm.or(qk).or(experts).or_else(linear)?;
    Some(format!("blk.{layer}.{name}"))
}

/// The order of the rows of a linear's weight or bias.
pub(crate) fn order(spec: &Spec, arch: &Arch, module: &str) -> RowOrder {
    let heads = match module {
        "self_attn.q_proj" => spec.heads,
        "self_attn.k_proj" => spec.kv_heads,
        _ => return RowOrder::Same,
    };
    if arch.permuted && spec.pairing == RopePairing::Halves {
        RowOrder::Interleaved { heads }
    } else {
        RowOrder::Same
    }
}

/// All tensors, in the order of the layers. `Err`: a parameter without a name in the file.
pub(crate) fn tensors(spec: &Spec, arch: &Arch, query_factor: f32) -> Result<Vec<PlannedTensor>, String> {
    let mut all = Vec::new();
    let plain = |name: &str, param: &ParamInfo| PlannedTensor {
        name: name.into(),
        shape: param.shape.clone(),
        parts: vec![TensorPart {
            param: param.clone(),
            order: RowOrder::Same,
        }],
        factor: 1.0,
        plus: 0.0,
        exact: false,
        layer: None,
    };
    let shifted = if spec.norm_plus_one { 1.0 } else { 0.0 };
    for param in spec.params_outside() {
        let own = match &*param.name {
            EMBEDDING => {
                if arch.needs_head && spec.tied {
                    all.push(plain("output.weight", &param));
                }
                plain("token_embd.weight", &param)
            }
            LM_HEAD => plain("output.weight", &param),
            FINAL_NORM => PlannedTensor {
                plus: shifted,
                ..plain("output_norm.weight", &param)
            },
            FINAL_NORM_BIAS => plain("output_norm.bias", &param),
            other => return Err(other.into()),
        };
        all.push(own);
    }
    for layer in 0..spec.layers.len() {
        let prefix = format!("model.layers.{layer}.");
        let params = spec.layer_params(layer);
        for param in &params {
            let below = param.name.strip_prefix(&prefix).unwrap_or(&param.name);
            let of_expert = spec.layers[layer]
                .experts
                .is_some_and(|e| below.starts_with(&format!("{}.", e.names.experts)));
            if of_expert {
                continue;
            }
            if let (Mixer::Latent(sizes), "self_attn.kv_b_proj.weight") = (spec.layers[layer].mixer, below) {
                all.extend(latent(spec, layer, param, sizes));
                continue;
            }
            let (module_name, last) = match below {
                ATTENTION_SINKS => (below, "weight"),
                _ => below.rsplit_once('.').unwrap_or((below, "weight")),
            };
            if last == ROUTER_CORRECTION {
                let name = format!("blk.{layer}.exp_probs_b.bias");
                all.push(PlannedTensor {
                    layer: Some(layer),
                    ..plain(&name, param)
                });
                continue;
            }
            let name = module(spec, arch, layer, module_name).ok_or_else(|| param.name.to_string())?;
            let norm = name.ends_with("_norm");
            let queries = match spec.qk_norm {
                Some(_) => name.ends_with("attn_q_norm"),
                None => module_name == "self_attn.q_proj",
            };
            let plus = if norm && last == "weight" { shifted } else { 0.0 };
            let factor = if queries { query_factor } else { 1.0 };
            all.push(PlannedTensor {
                parts: vec![TensorPart {
                    param: param.clone(),
                    order: order(spec, arch, module_name),
                }],
                factor,
                plus: plus * factor,
                exact: norm || name.contains("ffn_gate_inp"),
                layer: Some(layer),
                ..plain(&format!("{name}.{last}"), param)
            });
        }
        all.extend(experts(spec, layer, &params));
    }
    Ok(all)
}

/// The matrices of all experts of a layer, `[E, ..]`, and their biases.
fn experts(spec: &Spec, layer: usize, params: &[ParamInfo]) -> Vec<PlannedTensor> {
    let Some(experts) = spec.layers[layer].experts else {
        return Vec::new();
    };
    let mut all = Vec::new();
    let names = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
    for (projection, name) in names.into_iter().enumerate() {
        for last in ["weight", "bias"] {
            let of = |expert| {
                let wanted = format!(
                    "model.layers.{layer}.{}.{last}",
                    experts.linear_name(expert, projection)
                );
                params.iter().find(|p| *p.name == *wanted).cloned()
            };
            let parts: Vec<ParamInfo> = (0..experts.count).filter_map(of).collect();
            let Some(first) = parts.first() else { continue };
            all.push(PlannedTensor {
                name: format!("blk.{layer}.{name}.{last}"),
                shape: [&[experts.count], first.shape.as_slice()].concat(),
                parts: parts
                    .into_iter()
                    .map(|param| TensorPart {
                        param,
                        order: RowOrder::Same,
                    })
                    .collect(),
                factor: 1.0,
                plus: 0.0,
                exact: last == "bias",
                layer: Some(layer),
            });
        }
    }
    all
}

/// The two tensors of `kv_b_proj`.
fn latent(spec: &Spec, layer: usize, param: &ParamInfo, sizes: LatentSpec) -> [PlannedTensor; 2] {
    let one = |name: &str, shape: [usize; 2], order| PlannedTensor {
        name: format!("blk.{layer}.{name}.weight"),
        shape: vec![spec.heads, shape[0], shape[1]],
        parts: vec![TensorPart {
            param: param.clone(),
            order,
        }],
        factor: 1.0,
        plus: 0.0,
        exact: false,
        layer: Some(layer),
    };
    [
        one("attn_k_b", [sizes.kv_rank, sizes.plain], RowOrder::Keys(sizes)),
        one("attn_v_b", [sizes.value, sizes.kv_rank], RowOrder::Values(sizes)),
    ]
}

impl RowOrder {
    /// The values of a parameter with rows of `columns` elements in this order.
    pub(crate) fn apply(self, values: Vec<f32>, columns: usize) -> Vec<f32> {
        let rows = values.len() / columns.max(1);
        let row = |r: usize| &values[r * columns..][..columns];
        match self {
            Self::Same => values,
            Self::Interleaved { heads } => {
                let size = rows / heads;
                let from = |r: usize| r / size * size + r % 2 * (size / 2) + r % size / 2;
                (0..rows).flat_map(|r| row(from(r)).iter().copied()).collect()
            }
            Self::Values(sizes) => {
                let size = sizes.plain + sizes.value;
                let value = |r: &usize| r % size >= sizes.plain;
                (0..rows).filter(value).flat_map(|r| row(r).iter().copied()).collect()
            }
            Self::Keys(sizes) => {
                let size = sizes.plain + sizes.value;
                let heads = (0..rows / size).flat_map(|h| (0..columns).map(move |c| (h, c)));
                let key = |(h, c)| (0..sizes.plain).map(move |k| (h * size + k, c));
                heads.flat_map(key).map(|(r, c)| row(r)[c]).collect()
            }
        }
    }
}
