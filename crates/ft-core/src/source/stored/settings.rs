//! `quantization_config` of `config.json`: the settings that ft reads, and those that it refuses by name.

use super::other::ToolLayout;
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use serde_json::{Map, Value, json};

/// The formats of compressed-tensors that ft reads.
const COMPRESSED: [&str; 4] = ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"];
/// The values of `quant_method` that ft reads.
const METHODS: &str = "ft, bitsandbytes, fp8, gptq, awq, compressed-tensors or modelopt";

/// The settings of the files of a model.
pub(super) struct QuantizationSettings<'a>(Option<&'a Map<String, Value>>);

impl<'a> QuantizationSettings<'a> {
    pub(super) fn of(weights: &'a Weights) -> Self {
        Self(weights.quantization())
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0?.get(key).filter(|v| !v.is_null())
    }

    fn method(&self) -> &str {
        self.get("quant_method").and_then(Value::as_str).unwrap_or_default()
    }

    fn missing(&self, base: &str, key: &str, expected: &str) -> Error {
        let found = self.get(key).map_or("nothing".to_string(), Value::to_string);
        Error::format(format!("`quantization_config` does not describe the weight `{base}`"))
            .at(format!("config.json: quantization_config.{key}"))
            .found(found)
            .expected(expected)
            .hint("use the `config.json` that belongs to these weights")
    }

    pub(super) fn qweight_tool(&self, base: &str) -> Result<ToolLayout> {
        match self.method() {
            "gptq" => Ok(ToolLayout::Gptq),
            "awq" => Ok(ToolLayout::Awq),
            _ => Err(self.missing(base, "quant_method", "gptq or awq")),
        }
    }

    /// Bits of GPTQ and AWQ. AWQ codes of other widths have an order that ft does not know.
    pub(super) fn bits(&self, base: &str) -> Result<u64> {
        let (known, expected): (&[u64], _) = match self.method() {
            "awq" => (&[4], "4"),
            _ => (&[2, 3, 4, 8], "2, 3, 4 or 8"),
        };
        let key = if self.get("bits").is_some() { "bits" } else { "w_bit" };
        let bits = self.get(key).and_then(Value::as_u64);
        bits.filter(|b| known.contains(b)).ok_or_else(|| {
            let key = if self.get(key).is_some() { key } else { "bits" };
            self.missing(base, key, expected)
        })
    }

    /// Columns of a group of GPTQ and AWQ; 0: one group.
    pub(super) fn group_size(&self, base: &str) -> Result<usize> {
        let size = self
            .get("group_size")
            .or(self.get("q_group_size"))
            .and_then(Value::as_i64);
        match size {
            Some(-1) => Ok(0),
            Some(n @ 1..=65536) => Ok(n as usize),
            _ => Err(self.missing(base, "group_size", "-1, 32, 64 or 128")),
        }
    }

    pub(super) fn is_ordered(&self) -> bool {
        self.get("desc_act").and_then(Value::as_bool).unwrap_or(false)
    }

    pub(super) fn is_gptq_v1(&self) -> bool {
        self.get("checkpoint_format").and_then(Value::as_str) != Some("gptq_v2")
    }

    /// Rows and columns of a block that shares a scale.
    pub(super) fn block(&self) -> Option<(usize, usize)> {
        let pair = |v: &Value| {
            let side = |i: usize| v.get(i).and_then(Value::as_u64).filter(|n| *n > 0).map(|n| n as usize);
            Some((side(0)?, side(1)?))
        };
        if let Some(block) = self.get("weight_block_size") {
            return pair(block);
        }
        let groups = self.get("config_groups")?.as_object()?;
        groups
            .values()
            .find_map(|g| pair(g.get("weights")?.get("block_structure")?))
    }
}

/// Checks that ft reads the weights of this `quantization_config`.
///
/// # Errors
/// The setting that is not supported, by name.
pub fn check(config: &Value, place: &str) -> Result<()> {
    let refuse = |key: &str, found: &Value, expected: &str| {
        let at = if key.is_empty() {
            String::new()
        } else {
            format!(".{key}")
        };
        Err(Error::unsupported(format!(
            "config option `quantization_config{at}` has a value that is not supported"
        ))
        .at(place)
        .found(found)
        .expected(expected)
        .hint("ft refuses what it cannot compute exactly: give the model's unquantized weights"))
    };
    let get = |key: &str| config.get(key).filter(|v| !v.is_null());
    let one_of = |key: &str, values: &[Value], expected: &str| match get(key) {
        Some(found) if !values.contains(found) => refuse(key, found, expected),
        _ => Ok(()),
    };
    let needs = |key: &str, values: &[Value], expected: &str| match get(key) {
        Some(found) if values.contains(found) => Ok(()),
        found => refuse(key, found.unwrap_or(&Value::Null), expected),
    };
    match get("quant_method").and_then(Value::as_str) {
        Some("ft") => Ok(()),
        Some("bitsandbytes") if get("load_in_8bit") == Some(&json!(true)) => Ok(()),
        Some("bitsandbytes") => {
            needs("load_in_4bit", &[json!(true)], "true, or `load_in_8bit`")?;
            needs("bnb_4bit_quant_type", &[json!("nf4"), json!("fp4")], "nf4 or fp4")
        }
        Some("fp8") => one_of("fmt", &[json!("e4m3")], "e4m3"),
        Some("gptq") => {
            needs("bits", &[2, 3, 4, 8].map(|b| json!(b)), "2, 3, 4 or 8")?;
            let formats = [json!("gptq"), json!("gptq_v2")];
            one_of("checkpoint_format", &formats, "gptq or gptq_v2")?;
            one_of("format", &formats, "gptq or gptq_v2")?;
            one_of("pack_dtype", &[json!("int32")], "int32")?;
            one_of("is_marlin_format", &[json!(false)], "false")?;
            one_of("dynamic", &[json!({})], "the same settings for all weights")
        }
        Some("awq") => {
            // Old files have `w_bit` only.
            one_of("w_bit", &[json!(4)], "4")?;
            if get("bits").is_some() || get("w_bit").is_none() {
                needs("bits", &[json!(4)], "4")?;
            }
            // With `zero_point: false` the stored `qzeros` count all the same.
            one_of("version", &[json!("gemm"), json!("GEMM")], "gemm")
        }
        Some("compressed-tensors") => {
            let formats = COMPRESSED.map(|f| json!(f));
            let expected = COMPRESSED.join(", ");
            let mixed = get("format") == Some(&json!("mixed-precision"));
            if !mixed {
                needs("format", &formats, &expected)?;
            }
            let groups = get("config_groups").and_then(Value::as_object);
            for (name, group) in groups.into_iter().flatten() {
                let place = |key: &str| format!("config_groups.{name}.{key}");
                if let Some(format) = group.get("format").filter(|f| !f.is_null() && !formats.contains(f)) {
                    return refuse(&place("format"), format, &expected);
                }
                let weights = group.get("weights").unwrap_or(&Value::Null);
                let bits = (
                    weights.get("type").and_then(Value::as_str),
                    weights.get("num_bits").and_then(Value::as_u64),
                );
                if !matches!(bits, (Some("int") | None, Some(4 | 8)) | (Some("float"), Some(8))) {
                    return refuse(
                        &place("weights"),
                        weights,
                        "integers of 4 or 8 bits, or floats of 8 bits",
                    );
                }
            }
            let sparse = get("sparsity_config")
                .and_then(|s| s.get("format"))
                .unwrap_or(&Value::Null);
            if ![Value::Null, json!("dense")].contains(sparse) {
                return refuse("sparsity_config.format", sparse, "dense");
            }
            match get("transform_config") {
                Some(found) if found.get("config_groups").is_none_or(|g| *g != json!({})) && *found != json!({}) => {
                    refuse("transform_config", found, "no transforms")
                }
                _ => Ok(()),
            }
        }
        Some("modelopt") => needs("quant_algo", &[json!("FP8")], "FP8"),
        Some("mxfp4") => Ok(()),
        _ => match get("quant_method") {
            Some(method) => refuse("quant_method", method, METHODS),
            None => refuse("", config, METHODS),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row F8.
    #[test]
    fn widths_that_cannot_be_read_are_refused_at_the_config() {
        let with = |method: &str, keys: Value| {
            let mut config = json!({"quant_method": method, "group_size": 32});
            config
                .as_object_mut()
                .unwrap()
                .extend(keys.as_object().unwrap().clone());
            config
        };
        let read = |config: &Value| QuantizationSettings(config.as_object()).bits("layer");
        for (method, keys, bits) in [
            ("awq", json!({"bits": 4}), 4),
            ("awq", json!({"w_bit": 4}), 4),
            ("awq", json!({"bits": null, "w_bit": 4}), 4),
            ("awq", json!({"bits": 4, "w_bit": 4}), 4),
            ("gptq", json!({"bits": 2}), 2),
            ("gptq", json!({"bits": 3}), 3),
            ("gptq", json!({"bits": 4}), 4),
            ("gptq", json!({"bits": 8}), 8),
        ] {
            let config = with(method, keys);
            check(&config, "config.json").unwrap();
            assert_eq!(read(&config).unwrap(), bits, "{config}");
        }
        for (method, keys, found) in [
            ("awq", json!({"w_bit": 8}), "8"),
            ("awq", json!({"w_bit": 3}), "3"),
            ("awq", json!({"w_bit": "4"}), "\"4\""),
            ("awq", json!({"bits": 8}), "8"),
            ("awq", json!({"bits": 4, "w_bit": 8}), "8"),
            ("awq", json!({}), "null"),
            ("gptq", json!({"bits": 5}), "5"),
            ("gptq", json!({"bits": 1}), "1"),
            ("gptq", json!({"w_bit": 4}), "null"),
        ] {
            let config = with(method, keys);
            let e = check(&config, "config.json").unwrap_err().to_string();
            assert!(
                e.contains(&format!("found {found}")) && e.contains("expected") && e.contains("hint"),
                "{config}: {e}"
            );
        }
        // Weights that were opened without that check are not unpacked with another width either.
        for keys in [json!({"w_bit": 8}), json!({"bits": 2}), json!({})] {
            let config = with("awq", keys);
            let e = read(&config).unwrap_err().to_string();
            assert!(e.contains("expected 4"), "{config}: {e}");
        }
    }
}
