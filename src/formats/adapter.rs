//! PEFT adapter directories: `adapter_config.json` and the names in `adapter_model.safetensors`.
//!
//! A key that ft does not understand is refused by name when it could change what the adapter computes;
//! it is never dropped. Keys with an empty value (null, false, empty list) change nothing and pass.

use crate::base::{Error, Result, files};
use crate::formats::{header, json_kind, read_json_object};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub const CONFIG: &str = "adapter_config.json";
pub const WEIGHTS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

/// Which modules carry an adapter.
#[derive(Debug, Clone, PartialEq)]
pub enum Targets {
    /// Every linear layer except the output layer.
    AllLinear,
    /// Module names, or ends of module paths.
    List(Vec<String>),
    /// A regular expression over whole module paths.
    Pattern(String),
}

/// What an adapter computes, typed.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    pub r: usize,
    pub lora_alpha: f64,
    pub lora_dropout: f64,
    pub target_modules: Targets,
    pub exclude_modules: Option<Targets>,
    pub use_rslora: bool,
    /// Always false in a loaded config: DoRA is refused.
    pub use_dora: bool,
    pub rank_pattern: BTreeMap<String, usize>,
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Modules stored whole beside the adapter.
    pub modules_to_save: Vec<String>,
    pub layers_to_transform: Option<Vec<usize>>,
    pub layers_pattern: Vec<String>,
    pub base_model_name_or_path: Option<String>,
    pub revision: Option<String>,
    pub task_type: Option<String>,
    /// `true`, `false` or a name; how A and B were filled before training.
    pub init_lora_weights: Value,
    pub peft_version: Option<String>,
}

impl Default for AdapterConfig {
    /// The defaults of PEFT.
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: Targets::List(vec!["q_proj".into(), "v_proj".into()]),
            exclude_modules: None,
            use_rslora: false,
            use_dora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            modules_to_save: Vec::new(),
            layers_to_transform: None,
            layers_pattern: Vec::new(),
            base_model_name_or_path: None,
            revision: None,
            task_type: Some("CAUSAL_LM".into()),
            init_lora_weights: Value::Bool(true),
            peft_version: None,
        }
    }
}

/// Keys that say nothing about the mathematics of a trained adapter.
const HARMLESS: [&str; 14] = [
    "auto_mapping",
    "inference_mode",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
    "peft_type",
    "bias",
    "parent_library",
    "library_name",
];

/// Keys that a typed field holds.
const TYPED: [&str; 17] = [
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "init_lora_weights",
    "peft_version",
    "use_dora",
];

/// Why a known feature is refused.
const REFUSED: [(&str, &str); 9] = [
    ("use_dora", "DoRA scales the whole weight"),
    ("fan_in_fan_out", "weights stored transposed"),
    ("lora_bias", "a bias on B"),
    (
        "trainable_token_indices",
        "rows of the embedding trained beside the adapter",
    ),
    ("target_parameters", "adapters on bare parameters"),
    ("layer_replication", "layers used twice"),
    ("alora_invocation_tokens", "an adapter that starts inside the sequence"),
    ("use_qalora", "pooled inputs"),
    ("megatron_config", "parallel layers"),
];

struct Reader<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
}

impl Reader<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        Error::new(format!("`{key}` has a wrong value"))
            .at_path(self.path)
            .found(self.map.get(key).map_or("nothing".into(), json_kind))
            .expected(expected)
    }

    fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v
                .as_f64()
                .filter(|x| x.is_finite())
                .ok_or_else(|| self.wrong(key, "a finite number")),
        }
    }

    fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => Ok(Some(v.as_str().ok_or_else(|| self.wrong(key, "a string"))?.to_string())),
        }
    }

    /// A list of strings, or one string.
    fn texts(&self, key: &str) -> Result<Vec<String>> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::String(s)) => Ok(vec![s.clone()]),
            Some(Value::Array(list)) => list
                .iter()
                .map(|v| {
                    v.as_str()
                        .map(str::to_string)
                        .ok_or_else(|| self.wrong(key, "a list of strings"))
                })
                .collect(),
            Some(_) => Err(self.wrong(key, "a list of strings")),
        }
    }

    fn targets(&self, key: &str) -> Result<Option<Targets>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) if s == "all-linear" => Ok(Some(Targets::AllLinear)),
            Some(Value::String(s)) => Ok(Some(Targets::Pattern(s.clone()))),
            Some(_) => {
                let mut list = self.texts(key)?;
                list.sort();
                list.dedup();
                Ok(Some(Targets::List(list)))
            }
        }
    }

    fn rank(&self, key: &str, value: &Value) -> Result<usize> {
        match value.as_u64() {
            Some(n) if (1..=1 << 20).contains(&n) => Ok(n as usize),
            _ => Err(self.wrong(key, "a whole number of at least 1")),
        }
    }

    fn table<T>(&self, key: &str, read: impl Fn(&Value) -> Result<T>) -> Result<BTreeMap<String, T>> {
        match self.get(key) {
            None => Ok(BTreeMap::new()),
            Some(Value::Object(map)) => map.iter().map(|(k, v)| Ok((k.clone(), read(v)?))).collect(),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }
}

/// Whether a value says "not used".
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(v) => v.is_empty(),
        Value::Object(m) => m.is_empty(),
        Value::String(s) => s.is_empty(),
        _ => false,
    }
}

impl AdapterConfig {
    /// Reads `adapter_config.json` of an adapter directory and looks that its weights are safetensors.
    ///
    /// Errors: missing files, a pickle, wrong values, and every feature that ft does not compute, by name.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG);
        if !path.exists() {
            let error = Error::new(format!("adapter directory has no `{CONFIG}`")).at_path(dir);
            return Err(if dir.join("config.json").exists() {
                error.hint("this is a model directory: give it as the model, not as the adapter")
            } else if dir.join("adapters.safetensors").exists() {
                error.hint("this looks like an mlx-lm adapter: convert it to PEFT format first")
            } else {
                error.hint("give the directory that PEFT (or ft) saved the adapter in")
            });
        }
        let config = Self::from_map(&read_json_object(&path)?, &path)?;
        if !dir.join(WEIGHTS).exists() {
            let pickle = dir.join("adapter_model.bin");
            return Err(if pickle.exists() {
                header::pickle(&pickle).hint(
                    "convert it on a machine you trust: load the adapter with PEFT and call \
                     `save_pretrained(DIR, safe_serialization=True)`",
                )
            } else {
                Error::new(format!("adapter directory has no `{WEIGHTS}`")).at_path(dir)
            });
        }
        Ok(config)
    }

    /// Checks the object of an `adapter_config.json`; `path` is named in errors.
    pub fn from_map(map: &Map<String, Value>, path: &Path) -> Result<Self> {
        let c = Reader { map, path };
        let refuse = |key: &str, why: &str| {
            Error::new(format!("adapter uses `{key}`, which ft does not support ({why})"))
                .at_path(path)
                .found(map.get(key).map_or("nothing".into(), json_kind))
        };
        match c.text("peft_type")?.as_deref() {
            Some("LORA") => {}
            Some(_) => return Err(refuse("peft_type", "only LoRA adapters are supported").expected("\"LORA\"")),
            None => return Err(c.wrong("peft_type", "\"LORA\"")),
        }
        if let Some(bias) = c.text("bias")?.filter(|b| b != "none") {
            return Err(refuse("bias", &format!("biases trained beside the adapter: {bias}")).expected("\"none\""));
        }
        for (key, value) in map {
            if is_empty(value) || HARMLESS.contains(&key.as_str()) {
                continue;
            }
            if let Some((_, why)) = REFUSED.iter().find(|(k, _)| k == key) {
                return Err(refuse(key, why));
            }
            if !TYPED.contains(&key.as_str()) {
                return Err(refuse(
                    key,
                    "ft does not know this key, so it cannot know what the adapter computes",
                ));
            }
        }
        let init = c.get("init_lora_weights").cloned().unwrap_or(Value::Bool(true));
        if let Some(name) = init.as_str()
            && ["pissa", "olora", "corda", "loftq", "lora_ga"]
                .iter()
                .any(|p| name.to_lowercase().starts_with(p))
        {
            return Err(refuse(
                "init_lora_weights",
                "it changes the base weights that the adapter belongs to",
            )
            .hint(
                "save it as plain LoRA with PEFT: `save_pretrained(DIR, path_initial_model_for_weight_conversion=...)`",
            ));
        }
        let d = Self::default();
        let r = match c.get("r") {
            None => d.r,
            Some(v) => c.rank("r", v)?,
        };
        let dropout = c.number("lora_dropout", 0.0)?;
        if !(0.0..1.0).contains(&dropout) {
            return Err(c.wrong("lora_dropout", "a number from 0 up to 1"));
        }
        let layers = match c.get("layers_to_transform") {
            None => None,
            Some(v) => {
                let wrong = || c.wrong("layers_to_transform", "a layer number or a list of them");
                let one = |v: &Value| v.as_u64().map(|n| n as usize).ok_or_else(wrong);
                Some(match v {
                    Value::Array(list) => list.iter().map(one).collect::<Result<_>>()?,
                    single => vec![one(single)?],
                })
            }
        };
        let finite = |v: &Value| {
            v.as_f64()
                .filter(|x| x.is_finite())
                .ok_or_else(|| c.wrong("alpha_pattern", "an object of numbers"))
        };
        Ok(Self {
            r,
            lora_alpha: c.number("lora_alpha", d.lora_alpha)?,
            lora_dropout: dropout,
            target_modules: c.targets("target_modules")?.unwrap_or(d.target_modules),
            exclude_modules: c.targets("exclude_modules")?,
            use_rslora: c.flag("use_rslora")?,
            use_dora: c.flag("use_dora")?,
            rank_pattern: c.table("rank_pattern", |v| c.rank("rank_pattern", v))?,
            alpha_pattern: c.table("alpha_pattern", finite)?,
            modules_to_save: c.texts("modules_to_save")?,
            layers_to_transform: layers,
            layers_pattern: c.texts("layers_pattern")?,
            base_model_name_or_path: c.text("base_model_name_or_path")?,
            revision: c.text("revision")?,
            task_type: c.text("task_type")?,
            init_lora_weights: init,
            peft_version: c.text("peft_version")?,
        })
    }

    /// The factor on `B·A·x` for a module of rank `r`.
    pub fn scale(&self, alpha: f64, r: usize) -> f64 {
        if self.use_rslora {
            alpha / (r as f64).sqrt()
        } else {
            alpha / r as f64
        }
    }

    /// All keys that PEFT writes, in its order.
    pub fn to_json(&self) -> Value {
        let targets = |t: &Targets| match t {
            Targets::AllLinear => json!("all-linear"),
            Targets::List(list) => json!(list),
            Targets::Pattern(p) => json!(p),
        };
        let list = |v: &[String]| if v.is_empty() { Value::Null } else { json!(v) };
        let alphas: Map<String, Value> = self.alpha_pattern.iter().map(|(k, v)| (k.clone(), whole(*v))).collect();
        json!({
            "alora_invocation_tokens": null,
            "alpha_pattern": alphas,
            "arrow_config": null,
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model_name_or_path,
            "bias": "none",
            "corda_config": null,
            "ensure_weight_tying": false,
            "eva_config": null,
            "exclude_modules": self.exclude_modules.as_ref().map(targets),
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": self.init_lora_weights,
            "layer_replication": null,
            "layers_pattern": list(&self.layers_pattern),
            "layers_to_transform": self.layers_to_transform,
            "loftq_config": {},
            "lora_alpha": whole(self.lora_alpha),
            "lora_bias": false,
            "lora_dropout": self.lora_dropout,
            "megatron_config": null,
            "megatron_core": "megatron.core",
            "modules_to_save": list(&self.modules_to_save),
            "peft_type": "LORA",
            "peft_version": self.peft_version.as_deref().unwrap_or("0.18.0"),
            "qalora_group_size": 16,
            "r": self.r,
            "rank_pattern": self.rank_pattern,
            "revision": self.revision,
            "target_modules": targets(&self.target_modules),
            "target_parameters": null,
            "task_type": self.task_type,
            "trainable_token_indices": null,
            "use_dora": self.use_dora,
            "use_qalora": false,
            "use_rslora": self.use_rslora,
        })
    }

    /// Writes `adapter_config.json` into a directory.
    pub fn save(&self, dir: &Path) -> Result<PathBuf> {
        let path = dir.join(CONFIG);
        let text = serde_json::to_string_pretty(&self.to_json())
            .map_err(|e| Error::new("cannot write the adapter config").at_path(&path).cause(e))?;
        files::write_atomic(&path, format!("{text}\n").as_bytes())?;
        Ok(path)
    }
}

/// `16.0` as `16`, as PEFT writes it.
fn whole(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 9e15 {
        json!(x as i64)
    } else {
        json!(x)
    }
}

/// The tensor name of a factor: `base_model.model.<module>.lora_A.weight`; `side` is `"A"` or `"B"`.
pub fn lora_key(module: &str, side: &str) -> String {
    format!("{PREFIX}{module}.lora_{side}.weight")
}

/// What a tensor of an adapter file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdapterKey {
    /// A, shape (r, in).
    A(String),
    /// B, shape (out, r).
    B(String),
    /// A whole parameter of a module in `modules_to_save`, by its name in the model.
    Whole(String),
}

/// Reads a tensor name back; `None` for a name that no plain LoRA adapter has.
pub fn parse_key(name: &str) -> Option<AdapterKey> {
    let rest = name.strip_prefix(PREFIX)?;
    for (infix, make) in [
        ("lora_A", AdapterKey::A as fn(String) -> AdapterKey),
        ("lora_B", AdapterKey::B),
    ] {
        // Files written by hand sometimes keep the adapter name "default".
        for end in [format!(".{infix}.weight"), format!(".{infix}.default.weight")] {
            if let Some(module) = rest.strip_suffix(&end) {
                return (!module.is_empty()).then(|| make(module.to_string()));
            }
        }
    }
    if rest.contains(".lora_") {
        return None;
    }
    Some(AdapterKey::Whole(rest.replace(".modules_to_save.default.", ".")))
}

#[cfg(test)]
mod tests;
