//! Compares the sizes in `config.json` with the names and shapes of the weights beside it, before the sizes are used: a
//! config of a few bytes can request any amount of memory, but the shapes of weights are bound by the file size.

use super::{Config, Weights};
use ft_base::{Error, Result};
use std::path::Path;

/// Compares a config with the weights in `dir`. A directory without weights, or with weights that cannot be opened,
/// passes: the code that reads the weights reports it.
///
/// Errors: a size that differs from that of the weights.
pub(super) fn check(config: &Config, dir: &Path) -> Result<()> {
    match Weights::open(dir) {
        Ok(weights) => compare(config.language_model().as_ref().unwrap_or(config), &weights),
        Err(_) => Ok(()),
    }
}

fn compare(config: &Config, weights: &Weights) -> Result<()> {
    // The code that reads a key refuses values that are not sizes.
    let number = |key: &str| config.opt_usize(key).ok().flatten();
    let wrong = |key: &str, found: usize, expected: String| {
        Error::format(format!("`{key}` does not fit the weights"))
            .at_path(&config.path)
            .found(found)
            .expected(expected)
            .hint("use the `config.json` that belongs to these weights, or initialize new weights")
    };
    let layers = weights.names().filter_map(|name| {
        let (layer, _) = name.strip_prefix("model.layers.")?.split_once('.')?;
        layer.parse::<usize>().ok()
    });
    let layers = layers.max().map_or(0, |last| last.saturating_add(1));
    if let Some(n) = number("num_hidden_layers").filter(|n| layers > 0 && *n > layers) {
        return Err(wrong("num_hidden_layers", n, format!("at most {layers}")));
    }
    let experts = weights.names().filter_map(|name| {
        let (_, expert) = name.split_once(".experts.")?;
        expert.split('.').next()?.parse::<usize>().ok()
    });
    let experts = experts.max().map_or(0, |last| last.saturating_add(1));
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if let Some(n) = number(key).filter(|n| experts > 0 && *n > experts) {
            return Err(wrong(key, n, format!("at most {experts}")));
        }
    }
    // A quantized matrix has another shape in the file.
    let shape = |name: &str| {
        let info = weights.info(name).filter(|i| i.dtype.is_weight())?;
        Some((info.name.clone(), info.shape.clone()))
    };
    let in_first = |below: &str| shape(&format!("model.layers.0.{below}.weight"));
    let matrix = |found: Option<(String, Vec<usize>)>| match found {
        Some((name, shape)) if shape.len() == 2 => Some((name, shape[0], shape[1])),
        _ => None,
    };
    let same = |key: &str, is: Option<usize>, name: &str, size: usize| match is.filter(|n| *n != size) {
        Some(n) => Err(wrong(key, n, format!("{size}, the size of `{name}`"))),
        None => Ok(()),
    };
    if let Some((name, rows, columns)) = matrix(shape("model.embed_tokens.weight")) {
        same("vocab_size", number("vocab_size"), &name, rows)?;
        same("hidden_size", number("hidden_size"), &name, columns)?;
    }
    for part in ["mlp.gate_proj", "mlp.up_proj", "mlp.c_fc"] {
        if let Some((name, rows, _)) = matrix(in_first(part)) {
            same("intermediate_size", number("intermediate_size"), &name, rows)?;
        }
    }
    // Gate and up in one matrix.
    for (part, key) in [
        ("mlp.gate_up_proj", "intermediate_size"),
        ("shared_mlp.input_linear", "shared_intermediate_size"),
    ] {
        if let Some((name, rows, _)) = matrix(in_first(part)) {
            same(key, number(key), &name, rows / 2)?;
        }
    }
    // In Gemma 4 the layers with full attention have sizes of their own.
    let sized = ["per_layer_config", "global_head_dim"]
        .iter()
        .any(|key| config.get(key).is_some());
    let first_kind = config.get("layer_types").and_then(|types| types.get(0)?.as_str());
    if sized && first_kind == Some("full_attention") {
        return Ok(());
    }
    if in_first("self_attn.kv_b_proj").is_some() {
        return latent(config, &|part| matrix(in_first(part)));
    }
    // The norm of q is over one head, or over all heads together.
    let query_rows = matrix(in_first("self_attn.q_proj")).map(|(_, rows, _)| rows);
    let query_norm = in_first("self_attn.q_norm").and_then(|(n, s)| Some((n, *s.last()?)));
    if let Some((name, size)) = query_norm.filter(|(_, size)| query_rows != Some(*size)) {
        same("head_dim", number("head_dim"), &name, size)?;
    }
    // Number of heads times head size; without an explicit head size, the family defines it.
    let (heads, key_heads) = (number("num_attention_heads"), number("num_key_value_heads"));
    let wide = |heads: Option<usize>| heads?.checked_mul(number("head_dim")?).or(Some(usize::MAX));
    // Queries with an output gate have twice the rows.
    let model_type = config.model_type().unwrap_or_default();
    let gated = ["qwen3_5", "qwen3_next"]
        .iter()
        .any(|family| model_type.starts_with(family));
    let queries = heads.map(|heads| if gated { heads.saturating_mul(2) } else { heads });
    for (key, heads, part) in [
        ("num_attention_heads", queries, "self_attn.q_proj"),
        ("num_key_value_heads", key_heads.or(heads), "self_attn.k_proj"),
    ] {
        let (Some((name, rows, _)), Some(heads)) = (matrix(in_first(part)), heads) else {
            continue;
        };
        if wide(Some(heads)).is_some_and(|n| n != rows) || heads > rows {
            let found = match number("head_dim") {
                Some(size) => format!("{heads} heads of {size} (`head_dim`)"),
                None => format!("{heads} heads"),
            };
            return Err(Error::format(format!("`{key}` and `head_dim` do not fit the weights"))
                .at_path(&config.path)
                .found(found)
                .expected(format!("a product of {rows}, the rows of `{name}`"))
                .hint("use the `config.json` that belongs to these weights"));
        }
    }
    Ok(())
}

/// A matrix of the first layer by its name: its whole name, rows and columns.
type MatrixOf<'a> = &'a dyn Fn(&str) -> Option<(String, usize, usize)>;

/// Latent attention: the ranks, and the number of heads times the sizes of their parts.
fn latent(config: &Config, of: MatrixOf) -> Result<()> {
    let number = |key: &str| config.opt_usize(key).ok().flatten();
    let wrong = |keys: &str, found: usize, expected: usize, name: &str| {
        Err(Error::format(format!("{keys} do not fit the weights"))
            .at_path(&config.path)
            .found(found)
            .expected(format!("{expected}, a size of `{name}`"))
            .hint("use the `config.json` that belongs to these weights"))
    };
    let (heads, plain) = (number("num_attention_heads"), number("qk_nope_head_dim"));
    let (rotary, value) = (number("qk_rope_head_dim"), number("v_head_dim"));
    let (kv_rank, q_rank) = (number("kv_lora_rank"), number("q_lora_rank"));
    let times = |a: Option<usize>, b: Option<usize>| Some(a?.saturating_mul(b?));
    let plus = |a: Option<usize>, b: Option<usize>| Some(a?.saturating_add(b?));
    let (keys, queries) = ("`num_attention_heads` and the sizes of the heads", plus(plain, rotary));
    let rows = [
        ("self_attn.q_proj", keys, times(heads, queries)),
        ("self_attn.q_b_proj", keys, times(heads, queries)),
        ("self_attn.q_a_proj", "`q_lora_rank` and the weights", q_rank),
        ("self_attn.kv_b_proj", keys, times(heads, plus(plain, value))),
        (
            "self_attn.kv_a_proj_with_mqa",
            "`kv_lora_rank` and `qk_rope_head_dim`",
            plus(kv_rank, rotary),
        ),
    ];
    for (part, keys, is) in rows {
        if let (Some((name, rows, _)), Some(n)) = (of(part), is)
            && n != rows
        {
            return wrong(keys, n, rows, &name);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// The tiny model with one value of its config changed; `null` removes it.
    fn with(key: &str, value: &str) -> Result<Config> {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny");
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(tiny.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let mut config = Config::load(&tiny).unwrap().raw;
        config.insert(key.into(), serde_json::from_str::<Value>(value).unwrap());
        std::fs::write(dir.path().join("config.json"), Value::Object(config).to_string()).unwrap();
        Config::load(dir.path())
    }

    /// Row F9.
    #[test]
    fn sizes_that_are_not_those_of_the_weights_are_refused() {
        for (key, value, expected) in [
            ("num_hidden_layers", "1000000000", "at most 4"),
            ("num_hidden_layers", "5", "at most 4"),
            ("vocab_size", "4294967296", "896"),
            ("hidden_size", "64", "128"),
            ("intermediate_size", "385", "384"),
            ("head_dim", "4294967296", "32"),
            ("num_attention_heads", "4294967295", "product of 128"),
            ("num_attention_heads", "8", "product of 128"),
            ("num_key_value_heads", "4", "product of 64"),
        ] {
            let e = with(key, value).unwrap_err().to_string();
            assert!(
                e.contains(key) && e.contains(expected) && e.contains("config.json"),
                "{e}"
            );
        }
        for (key, value) in [("head_dim", "32"), ("num_hidden_layers", "4"), ("vocab_size", "896.0")] {
            with(key, value).unwrap();
        }
        // A value that is not a size is refused where it is read.
        let config = with("hidden_size", "-1").unwrap();
        assert!(config.usize("hidden_size").is_err());
    }

    /// A golden model with one number of its config changed.
    fn golden_with(family: &str, key: &str, value: usize) -> Result<Config> {
        let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/families");
        let from = families.join(family);
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let mut config = Config::load(&from).unwrap().raw;
        config.insert(key.into(), value.into());
        std::fs::write(dir.path().join("config.json"), Value::Object(config).to_string()).unwrap();
        Config::load(dir.path())
    }

    #[test]
    fn more_experts_than_the_weights_have_are_refused() {
        for (family, key) in [("qwen3_moe", "num_experts"), ("gpt_oss", "num_local_experts")] {
            let e = golden_with(family, key, 6).unwrap_err().to_string();
            assert!(e.contains(key) && e.contains("at most 5"), "{e}");
        }
    }

    #[test]
    fn a_matrix_of_gate_and_up_has_twice_the_size_of_the_config() {
        for (family, key) in [
            ("phi3", "intermediate_size"),
            ("granitemoehybrid", "shared_intermediate_size"),
            ("granitemoeshared", "shared_intermediate_size"),
        ] {
            let e = golden_with(family, key, 1 << 20).unwrap_err().to_string();
            assert!(e.contains(&format!("`{key}`")) && e.contains("1048576"), "{e}");
        }
        // Granite 4 without experts does not use it.
        golden_with("granitemoehybrid", "intermediate_size", 1 << 20).unwrap();
    }

    #[test]
    fn a_config_without_weights_is_not_compared() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), r#"{"num_hidden_layers": 9}"#).unwrap();
        Config::load(dir.path()).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), "damaged").unwrap();
        Config::load(dir.path()).unwrap();
    }
}
