//! Typed access to `config.json`; `model` interprets the keys.

use crate::{json_kind, nearest, read_json_object};
use ft_base::{Error, Result, paths};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Larger than any size in a real config; a larger value is a mistake or an attack.
const LARGEST: u64 = 1 << 32;

/// A model's `config.json`: all keys are kept, so that export can copy them.
///
/// The methods that read a key fail with `ErrorKind::Format` if the value has a wrong type or is out of its range, and,
/// without `opt_` in their name, if the key is missing.
#[derive(Debug, Clone)]
pub struct Config {
    /// All keys of the file.
    pub raw: Map<String, Value>,
    /// The file, for error messages.
    pub path: PathBuf,
}

/// `quantization_config` of a `config.json`. Of a multimodal model, that of the whole model counts, as in transformers; if it has
/// none, that of its language model (`text_config`).
pub fn quantization(config: &Map<String, Value>) -> Option<&Value> {
    let inner = config.get("text_config").and_then(Value::as_object);
    let mut found = [Some(config), inner]
        .into_iter()
        .flatten()
        .filter_map(|c| c.get("quantization_config"));
    found.find(|settings| !settings.is_null())
}

impl Config {
    /// Reads `config.json` of a model directory, and compares its sizes with the weights there.
    ///
    /// # Errors
    /// As for `read`; sizes that contradict the weights (`Format`).
    pub fn load(dir: &Path) -> Result<Self> {
        let config = Self::read(dir)?;
        super::fits::check(&config, dir)?;
        Ok(config)
    }

    /// Reads `config.json` alone: for a model that does not use the weights in `dir`.
    ///
    /// # Errors
    /// No directory or no `config.json` (`NotFound`); text that is not a JSON object (`Format`).
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        if !dir.exists() {
            return Err(paths::missing("directory", dir));
        }
        if !path.exists() {
            let hint = if dir.join("adapter_config.json").exists() {
                "this is an adapter: give its base as the model and this directory as the adapter"
            } else {
                "give a directory in Hugging Face format, or a hub id"
            };
            return Err(Error::not_found("model directory has no `config.json`")
                .at_path(dir)
                .hint(hint));
        }
        Ok(Self {
            raw: read_json_object(&path)?,
            path,
        })
    }

    /// A config from a value that is not a file (yet); `path` appears in errors.
    pub fn from_map(raw: Map<String, Value>, path: &Path) -> Self {
        Self {
            raw,
            path: path.to_path_buf(),
        }
    }

    /// Of a multimodal model: the keys of its language model (`text_config`), and those of the whole model that the
    /// language model lacks. Old files have all keys at the top.
    pub fn language_model(&self) -> Option<Config> {
        let inner = self.get("text_config").and_then(Value::as_object);
        if inner.is_none() && self.get("vision_config").is_none() {
            return None;
        }
        let mut raw = self.raw.clone();
        raw.retain(|key, _| !key.ends_with("_config") || key == "quantization_config");
        // The type of the whole model is not that of its language model.
        raw.remove("model_type");
        raw.extend(inner.cloned().unwrap_or_default());
        if let Some(found) = quantization(&self.raw) {
            raw.insert("quantization_config".into(), found.clone());
        }
        Some(Config {
            raw,
            path: self.path.clone(),
        })
    }

    /// `model_type`: the family of the model.
    ///
    /// # Errors
    /// The key is missing, or its value is not a text.
    pub fn model_type(&self) -> Result<&str> {
        self.str("model_type")
    }

    /// The value of a key; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.raw.get(key).filter(|v| !v.is_null())
    }

    fn missing(&self, key: &str) -> Error {
        let error = Error::format(format!("`{key}` is missing")).at_path(&self.path);
        match nearest(key, self.raw.keys().map(String::as_str)).first() {
            Some(near) => error.hint(format!("the nearest key there is `{near}`")),
            None => error,
        }
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = self.raw.get(key).map_or("nothing".into(), json_kind);
        Error::format(format!("`{key}` has a wrong value"))
            .at_path(&self.path)
            .found(found)
            .expected(expected)
    }

    /// A size of at least 1.
    ///
    /// # Errors
    /// The key is missing; as `opt_usize`.
    pub fn usize(&self, key: &str) -> Result<usize> {
        self.opt_usize(key)?.ok_or_else(|| self.missing(key))
    }

    /// A size of at least 1, if present.
    ///
    /// # Errors
    /// 0, negative, fractional and absurd values.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        match self.opt_usize0(key)? {
            Some(0) => Err(self.wrong(key, "a whole number of at least 1")),
            other => Ok(other),
        }
    }

    /// A size that may be 0, if present (a disabled window, a token id).
    ///
    /// # Errors
    /// The value is not a whole number.
    pub fn opt_usize0(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        // Some writers store whole numbers as `4096.0`.
        let whole = value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|x| x.fract() == 0.0 && *x >= 0.0 && *x < 9e15)
                .map(|x| x as u64)
        });
        match whole {
            Some(n) if n <= LARGEST => Ok(Some(n as usize)),
            _ => Err(self.wrong(key, "a whole number between 0 and 4294967296")),
        }
    }

    /// A required finite number.
    ///
    /// # Errors
    /// The key is missing; as `opt_f64`.
    pub fn f64(&self, key: &str) -> Result<f64> {
        self.opt_f64(key)?.ok_or_else(|| self.missing(key))
    }

    /// A finite number, if present.
    ///
    /// # Errors
    /// The value is not a finite number.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(self.wrong(key, "a finite number")),
        }
    }

    /// An optional flag.
    ///
    /// # Errors
    /// The value is not `true` or `false`.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A required text.
    ///
    /// # Errors
    /// The key is missing; as `opt_str`.
    pub fn str(&self, key: &str) -> Result<&str> {
        self.opt_str(key)?.ok_or_else(|| self.missing(key))
    }

    /// An optional text; `null` counts as absent.
    ///
    /// # Errors
    /// The value is not a text.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// A table, if present, as a separate config (`rope_scaling`, `rope_parameters`); errors name the inner key.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn opt_table(&self, key: &str) -> Result<Option<Config>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Config {
                raw: map.clone(),
                path: PathBuf::from(format!("{}: {key}", self.path.display())),
            })),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// One id or a list of ids (`eos_token_id`).
    ///
    /// # Errors
    /// The value is not an id or a list of ids.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let wrong = || self.wrong(key, "a token id or a list of token ids");
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(wrong);
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(id).collect(),
            Some(one) => Ok(vec![id(one)?]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        Config::load(dir.path()).unwrap()
    }

    #[test]
    fn values_are_typed_and_null_is_absent() {
        let c = config(
            r#"{"model_type":"qwen3","hidden_size":64,"rope_theta":1e6,"head_dim":null,"float_size":32.0,
                "tie_word_embeddings":true,"eos_token_id":[1,2],"bos_token_id":7,"rope_scaling":{"factor":0}}"#,
        );
        assert_eq!(c.model_type().unwrap(), "qwen3");
        assert_eq!(c.usize("hidden_size").unwrap(), 64);
        assert_eq!(c.usize("float_size").unwrap(), 32);
        assert_eq!(c.opt_usize("head_dim").unwrap(), None);
        assert_eq!(c.f64("rope_theta").unwrap(), 1e6);
        assert!(c.bool_or("tie_word_embeddings", false).unwrap());
        assert_eq!(c.token_ids("eos_token_id").unwrap(), [1, 2]);
        assert_eq!(c.token_ids("bos_token_id").unwrap(), [7]);
        let e = c
            .opt_table("rope_scaling")
            .unwrap()
            .unwrap()
            .usize("factor")
            .unwrap_err()
            .to_string();
        assert!(e.contains("config.json: rope_scaling") && e.contains("`factor`"), "{e}");
    }

    #[test]
    fn lies_name_file_key_found_and_expected() {
        let c = config(
            r#"{"num_attention_heads":0,"hidden_size":-64,"vocab_size":99999999999,"layers":1.5,"rope_theta":"NaN",
                "big":1e400,"flag":1,"eos_token_id":-1,"model_type":5,"hiden_act":"silu"}"#
                .replace("1e400", "\"Infinity\"")
                .as_str(),
        );
        for (error, key, found) in [
            (
                c.usize("num_attention_heads").unwrap_err(),
                "num_attention_heads",
                "found 0",
            ),
            (c.usize("hidden_size").unwrap_err(), "hidden_size", "found -64"),
            (c.usize("vocab_size").unwrap_err(), "vocab_size", "found 99999999999"),
            (c.usize("layers").unwrap_err(), "layers", "found 1.5"),
            (c.f64("rope_theta").unwrap_err(), "rope_theta", "a string \"NaN\""),
            (c.f64("big").unwrap_err(), "big", "Infinity"),
            (c.bool_or("flag", true).unwrap_err(), "flag", "found 1"),
            (c.token_ids("eos_token_id").unwrap_err(), "eos_token_id", "found -1"),
            (c.model_type().unwrap_err(), "model_type", "found 5"),
            (c.str("hidden_act").unwrap_err(), "hidden_act", "`hiden_act`"),
        ] {
            let text = error.to_string();
            assert!(
                text.contains("config.json") && text.contains(key) && text.contains(found),
                "{text}"
            );
        }
    }

    #[test]
    fn the_weights_and_the_config_have_the_same_settings_of_quantization() {
        let [whole, text] = ["fp8", "awq"].map(|method| format!(r#"{{"quant_method": "{method}"}}"#));
        for (top, inner, expected) in [
            (Some(&whole), Some(&text), Some("fp8")),
            (Some(&whole), None, Some("fp8")),
            (None, Some(&text), Some("awq")),
            (Some(&"null".to_string()), Some(&text), Some("awq")),
            (Some(&whole), Some(&"null".to_string()), Some("fp8")),
            (None, None, None),
        ] {
            let key = |value: Option<&String>| {
                value.map_or(String::new(), |value| format!(r#", "quantization_config": {value}"#))
            };
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("config.json");
            let json = format!(
                r#"{{"model_type": "gemma3", "text_config": {{"hidden_size": 8{}}}{}}}"#,
                key(inner),
                key(top)
            );
            std::fs::write(&file, &json).unwrap();
            let plan = crate::writer::TensorPlan {
                name: "a".into(),
                dtype: crate::StoredDtype::F32,
                shape: vec![1],
            };
            crate::writer::write_file(&dir.path().join("model.safetensors"), &[plan], &[], |_, put| {
                put(crate::writer::Values::F32(&[1.0]))
            })
            .unwrap();
            let weights = crate::Weights::open(dir.path()).unwrap();
            let of_weights = weights.quantization().map(|settings| &settings["quant_method"]);
            let language = Config::read(dir.path()).unwrap().language_model().unwrap();
            let of_config = language
                .get("quantization_config")
                .map(|settings| &settings["quant_method"]);
            assert_eq!(of_weights.and_then(Value::as_str), expected, "{json}");
            assert_eq!(of_config.and_then(Value::as_str), expected, "{json}");
        }
    }
}
