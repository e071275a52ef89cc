//! Storage type of each parameter: it depends on the rules of the caller, and on the parameters that are trained.

use super::{Group, ParamInfo, Sublayer};
use crate::base::{Error, Result};
use crate::ops::Dtype;
use crate::ops::quantized::Products;
use crate::quant::{Format, StorageDtype};
use ft_base::named;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

named!(
    /// Storage type of one weight.
    WeightStorage { F32 = "f32", Bf16 = "bf16", Int8 = "int8", Int4 = "int4", Nf4 = "nf4" }
);

/// Which projections are stored quantized while they are frozen.
#[derive(Debug, Clone)]
pub struct StorageRules {
    /// Storage of all frozen projections; `None` is dense.
    pub frozen: Option<WeightStorage>,
    /// Prefixes of parameter names, or names with `*`, with the storage type of the projections that they match. The longest
    /// match is used.
    pub overrides: Vec<(String, WeightStorage)>,
    /// Number of weights per scale; `None` is the default of the format.
    pub group_size: Option<usize>,
    /// NF4: quantize the scales too.
    pub double_quantization: bool,
    /// How a GPU multiplies with projections that are stored as int8 with one scale per row.
    pub products: Products,
}

impl Default for StorageRules {
    fn default() -> Self {
        Self {
            frozen: None,
            overrides: Vec::new(),
            group_size: None,
            double_quantization: true,
            products: Products::Dequantized,
        }
    }
}

/// The storage of each parameter of a model. Only projections of decoder layers are ever quantized.
#[derive(Debug, Clone, PartialEq)]
pub struct StoragePolicy {
    dtype: Dtype,
    /// Shared between clones: the planner makes many.
    quantized: Arc<BTreeMap<Arc<str>, Format>>,
    /// Those of `quantized` that stay as the files have them.
    kept: Arc<BTreeSet<Arc<str>>>,
    products: Products,
}

impl StoragePolicy {
    /// All parameters dense, in `dtype`.
    pub fn dense(dtype: Dtype) -> Self {
        Self {
            dtype,
            quantized: Arc::default(),
            kept: Arc::default(),
            products: Products::Dequantized,
        }
    }

    /// Projections that are not `trained` get the storage type that `rules` sets for them.
    ///
    /// # Errors
    /// An override that matches no projection.
    pub fn new(
        rules: &StorageRules,
        dtype: Dtype,
        params: &[ParamInfo],
        trained: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        for (pattern, _) in &rules.overrides {
            if !params.iter().any(|p| is_projection(p) && fits(pattern, &p.name)) {
                return Err(Error::usage(format!(
                    "`{pattern}` in `StorageRules::overrides` matches no projection of the model"
                ))
                .expected("the start of a name such as `layers.0.self_attn.q_proj.weight`, or a name with `*`")
                .hint("only the projections of the layers can have a storage of their own"));
            }
        }
        let format = |wanted: Option<WeightStorage>| match wanted? {
            WeightStorage::Bf16 if dtype == Dtype::F32 => Some(Format::Bf16),
            WeightStorage::F32 | WeightStorage::Bf16 => None,
            WeightStorage::Int8 => Some(Format::Int8 {
                group: rules.group_size.unwrap_or(0),
            }),
            WeightStorage::Int4 => Some(Format::Int4 {
                group: rules.group_size.unwrap_or(64),
            }),
            WeightStorage::Nf4 => Some(Format::Nf4 {
                double: rules.double_quantization,
            }),
        };
        let quantized = params
            .iter()
            .filter(|p| is_projection(p) && !trained(&p.name))
            .filter_map(|p| {
                let fitting = rules.overrides.iter().filter(|(pattern, _)| fits(pattern, &p.name));
                let chosen = fitting.max_by_key(|(pattern, _)| (pattern.len(), pattern.as_str()));
                let wanted = chosen.map(|(_, wanted)| *wanted).or(rules.frozen);
                Some((p.name.clone(), format(wanted)?))
            })
            .collect();
        Ok(Self {
            dtype,
            quantized: Arc::new(quantized),
            kept: Arc::default(),
            products: rules.products,
        })
    }

    /// Data type of dense weights and of dequantized values.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// How a GPU multiplies with frozen projections that are stored as int8 with one scale per row.
    pub fn products(&self) -> Products {
        self.products
    }

    /// As `products`, for this parameter: 8-bit operands need a weight in that format.
    pub fn products_of(&self, name: &str) -> Products {
        match self.quantized.get(name) {
            Some(Format::Int8 { group: 0 }) => self.products,
            _ => Products::Dequantized,
        }
    }

    /// The storage of this parameter while it is frozen.
    pub fn of(&self, param: &ParamInfo) -> StorageDtype {
        match self.quantized.get(&param.name) {
            Some(format) => StorageDtype::Quantized(*format, self.dtype),
            None => StorageDtype::Dense(self.dtype),
        }
    }

    /// The quantized weights and their formats.
    pub fn quantized(&self) -> &BTreeMap<Arc<str>, Format> {
        &self.quantized
    }

    /// Sets or removes the format of one parameter, for a mixed-precision choice of bits per layer.
    pub fn set(&mut self, name: Arc<str>, format: Option<Format>) {
        let quantized = Arc::make_mut(&mut self.quantized);
        match format {
            Some(format) => quantized.insert(name, format),
            None => quantized.remove(&name),
        };
    }

    /// Keeps a parameter in the `format` of the files.
    pub fn keep(&mut self, name: Arc<str>, format: Format) {
        Arc::make_mut(&mut self.kept).insert(name.clone());
        self.set(name, Some(format));
    }

    /// True if this parameter stays in the `format` of the files.
    pub fn keeps(&self, name: &str, format: Format) -> bool {
        self.kept.contains(name) && self.quantized.get(name) == Some(&format)
    }

    /// True if at least one projection has products of 8-bit operands, or none are wanted.
    pub fn products_apply(&self) -> bool {
        let row = |format: &Format| matches!(format, Format::Int8 { group: 0 });
        self.products == Products::Dequantized || self.quantized.values().any(row)
    }

    /// Text for the plan: `bf16; 168 projections nf4`.
    pub fn describe(&self) -> String {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for format in self.quantized.values() {
            *counts.entry(format.to_string()).or_default() += 1;
        }
        let counts = counts.iter().map(|(format, n)| format!("; {n} projections {format}"));
        let products = match self.products {
            Products::Dequantized => String::new(),
            other => format!("; their products in {}", other.name()),
        };
        format!("{}{}{products}", self.dtype.name(), counts.collect::<String>())
    }

    /// Total bytes of all parameters.
    pub fn bytes(&self, params: &[ParamInfo]) -> u64 {
        params.iter().map(|p| self.of(p).bytes(&p.shape)).sum()
    }
}

/// True if this is the weight matrix of a linear in a decoder layer (the weight of a convolution has three dimensions).
pub fn is_projection(param: &ParamInfo) -> bool {
    let matrix = param.shape.len() == 2 && !param.is_vector();
    matches!(param.group, Group::Layer(_)) && matrix && param.sublayer != Sublayer::Router
}

/// True if `pattern` is a prefix of the name, with or without `model.`; with `*` it must match the whole name.
fn fits(pattern: &str, name: &str) -> bool {
    let short = name.strip_prefix("model.").unwrap_or(name);
    if pattern.contains('*') {
        glob(pattern, name) || glob(pattern, short)
    } else {
        name.starts_with(pattern) || short.starts_with(pattern)
    }
}

/// Matches a pattern in which `*` stands for any text.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(text) = text.strip_prefix(start) else {
        return false;
    };
    (0..=text.len()).any(|at| text.is_char_boundary(at) && glob(rest, &text[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Sublayer;

    fn param(name: &str, shape: &[usize], group: Group) -> ParamInfo {
        ParamInfo {
            name: name.into(),
            shape: shape.to_vec(),
            group,
            sublayer: Sublayer::Other,
        }
    }

    fn params() -> Vec<ParamInfo> {
        let mut all = vec![param("model.embed_tokens.weight", &[100, 64], Group::Embedding)];
        for l in 0..2 {
            let layer =
                |name: &str, shape: &[usize]| param(&format!("model.layers.{l}.{name}"), shape, Group::Layer(l));
            all.push(layer("self_attn.q_proj.weight", &[64, 64]));
            all.push(layer("self_attn.q_proj.bias", &[64]));
            all.push(layer("mlp.down_proj.weight", &[64, 128]));
        }
        all
    }

    fn rules(frozen: Option<WeightStorage>, overrides: &[(&str, WeightStorage)]) -> StorageRules {
        StorageRules {
            frozen,
            overrides: overrides.iter().map(|(p, w)| (p.to_string(), *w)).collect(),
            ..StorageRules::default()
        }
    }

    fn quantized(rules: &StorageRules, trained: &str) -> Vec<String> {
        let policy = StoragePolicy::new(rules, Dtype::Bf16, &params(), |n| n.contains(trained)).unwrap();
        policy.quantized().iter().map(|(n, f)| format!("{n} {f}")).collect()
    }

    #[test]
    fn projections_that_are_not_trained_are_coded() {
        let all = quantized(&rules(Some(WeightStorage::Nf4), &[]), "nothing");
        assert_eq!(all.len(), 4);
        assert!(all.iter().all(|n| n.ends_with("proj.weight nf4 (double quantization)")));
        assert_eq!(quantized(&rules(Some(WeightStorage::Nf4), &[]), "layers.1.").len(), 2);
        assert!(quantized(&rules(None, &[]), "nothing").is_empty());
    }

    #[test]
    fn the_longest_override_counts() {
        let overrides = [
            ("layers.0.", WeightStorage::Bf16),
            ("layers.0.mlp.", WeightStorage::Int8),
            ("*.q_proj.*", WeightStorage::Int4),
        ];
        let got = quantized(&rules(Some(WeightStorage::Nf4), &overrides), "nothing");
        let want = [
            "model.layers.0.mlp.down_proj.weight int8 (one scale per row)",
            "model.layers.0.self_attn.q_proj.weight int4 (groups of 64)",
            "model.layers.1.mlp.down_proj.weight nf4 (double quantization)",
            "model.layers.1.self_attn.q_proj.weight int4 (groups of 64)",
        ];
        assert_eq!(got, want);
    }

    #[test]
    fn an_override_without_a_projection_is_refused() {
        for pattern in ["layers.7.", "model.embed_tokens", "*.bias", "proj"] {
            let rules = rules(None, &[(pattern, WeightStorage::Int8)]);
            let e = StoragePolicy::new(&rules, Dtype::F32, &params(), |_| false).unwrap_err();
            assert!(e.to_string().contains(pattern), "{e}");
        }
    }

    #[test]
    fn bytes_are_counted_as_stored() {
        let params = params();
        let dense = StoragePolicy::dense(Dtype::Bf16).bytes(&params);
        assert_eq!(dense, 2 * (6400 + 2 * (4096 + 64 + 8192)));
        let policy =
            StoragePolicy::new(&rules(Some(WeightStorage::Int8), &[]), Dtype::Bf16, &params, |_| false).unwrap();
        assert_eq!(policy.bytes(&params), 2 * 6400 + 2 * (4096 + 8192 + 2 * 64 + 4 * 128));
    }
}
