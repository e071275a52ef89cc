//! PEFT adapter directories: `adapter_config.json`, and the tensor names in `adapter_model.safetensors`.
//!
//! An unknown key that could change what the adapter computes is refused by name; it is never dropped. Keys with an
//! empty value (null, false, 0, empty list) have no effect and pass.

mod allocation;
mod keys;
mod read;
mod write;

pub use allocation::RankAllocation;
pub use keys::{
    AdapterKey, EXPERT_PARAMETERS, PREFIX, PeftNames, VERA, below, file_key, parse, unwrapped, wrapped, wrapper,
};

use crate::{header, json_kind, read_json_object};
use ft_base::{Error, Result, files, paths};
use read::{ConfigReader, is_empty};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The file with the settings of an adapter.
pub const CONFIG: &str = "adapter_config.json";
/// The file with the tensors of an adapter.
pub const WEIGHTS: &str = "adapter_model.safetensors";

/// The modules that have an adapter.
#[derive(Debug, Clone, PartialEq)]
pub enum Targets {
    /// Every linear layer except the output layer.
    AllLinear,
    /// Module names, or suffixes of module paths.
    List(Vec<String>),
    /// A regular expression over whole module paths.
    Pattern(String),
}

/// The kind of an adapter, with the settings that only this kind has.
#[derive(Debug, Clone, PartialEq)]
pub enum AdapterKind {
    /// Also DoRA and rsLoRA.
    Lora,
    /// IA3: one factor per input or output feature.
    Ia3 {
        /// Modules whose input is scaled instead of their output: ends of names, or one regular expression.
        feedforward: Targets,
    },
    /// VeRA: one random pair for all linears, trained diagonals.
    Vera {
        /// Initial value of the diagonal `d`.
        d_initial: f64,
    },
    /// LoHa: the elementwise product of two low-rank products.
    Loha,
    /// LoKr: a Kronecker product.
    Lokr {
        /// The wanted size of the small factor; -1: near the square root.
        factor: i64,
        /// True if both factors are low-rank products.
        both: bool,
    },
    /// OFT: a block-diagonal rotation of the input.
    Oft {
        /// Rows and columns of a block; 0: `blocks` is given instead.
        block: usize,
        /// Number of blocks; 0: `block` is given instead. PEFT has one of the two.
        blocks: usize,
        /// Number of terms of the Neumann series; `None`: the exact Cayley transform.
        neumann: Option<usize>,
    },
    /// AdaLoRA, with its schedule of ranks.
    Adalora(RankAllocation),
}

impl AdapterKind {
    /// True if the configs of this kind have `trainable_token_indices` and `ensure_weight_tying`: in PEFT these are keys
    /// of `LoraConfig`, from which only `AdaLoraConfig` is derived.
    pub fn has_rows(&self) -> bool {
        matches!(self, Self::Lora | Self::Adalora(_))
    }
}

/// The typed settings of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// The kind of adapter, with the settings that only this kind has.
    pub kind: AdapterKind,
    /// The rank.
    pub r: usize,
    /// `alpha` of LoHa and LoKr.
    pub lora_alpha: f64,
    /// Probability that an input element is dropped in training.
    pub lora_dropout: f64,
    /// The modules with an adapter.
    pub target_modules: Targets,
    /// Modules without an adapter, although `target_modules` matches them.
    pub exclude_modules: Option<Targets>,
    /// Parameters with the matrices of all experts of a layer that have an adapter: whole paths or their endings. LoRA only.
    pub target_parameters: Vec<String>,
    /// True if the scale is `lora_alpha / √r`, not `lora_alpha / r`.
    pub use_rslora: bool,
    /// True for DoRA: a LoRA with a trained magnitude per output feature.
    pub use_dora: bool,
    /// In file order: the first key that matches a module applies.
    pub rank_pattern: Vec<(String, usize)>,
    /// As `rank_pattern`, for `lora_alpha`.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Modules that are saved whole beside the adapter.
    pub modules_to_save: Vec<String>,
    /// True if the saved embedding of a tied model is also the head.
    pub ensure_weight_tying: bool,
    /// Trained rows of the embedding and of the head, by suffix of the matrix's module. LoRA and AdaLoRA only.
    pub token_rows: Vec<(String, Vec<u32>)>,
    /// Indices of the layers with adapters; `None`: all.
    pub layers_to_transform: Option<Vec<usize>>,
    /// Names of the list of layers in the module path, for `layers_to_transform`.
    pub layers_pattern: Vec<String>,
    /// The base model: a hub id or a path.
    pub base_model_name_or_path: Option<String>,
    /// The revision of the base model.
    pub revision: Option<String>,
    /// The names in the file are those of the model that PEFT loads. Not in the file.
    pub names: PeftNames,
    /// `CAUSAL_LM`, `SEQ_CLS` and similar.
    pub task_type: Option<String>,
    /// `true`, `false` or a name: the initialization of A and B.
    pub init_lora_weights: Value,
    /// The version of PEFT that wrote the file.
    pub peft_version: Option<String>,
}

impl Default for AdapterConfig {
    /// The defaults of PEFT.
    fn default() -> Self {
        Self {
            kind: AdapterKind::Lora,
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: Targets::List(vec!["q_proj".into(), "v_proj".into()]),
            exclude_modules: None,
            target_parameters: Vec::new(),
            use_rslora: false,
            use_dora: false,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            ensure_weight_tying: false,
            token_rows: Vec::new(),
            layers_to_transform: None,
            layers_pattern: Vec::new(),
            base_model_name_or_path: None,
            revision: None,
            names: PeftNames::default(),
            task_type: Some("CAUSAL_LM".into()),
            init_lora_weights: Value::Bool(true),
            peft_version: None,
        }
    }
}

/// Keys that do not change the mathematics of a trained adapter.
const HARMLESS: [&str; 13] = [
    "auto_mapping",
    "inference_mode",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
    "peft_type",
    "bias",
    "parent_library",
    "library_name",
];

/// Keys of all kinds that have a typed field.
const TYPED: [&str; 11] = [
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "ensure_weight_tying",
    "layers_to_transform",
    "layers_pattern",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "peft_version",
    "r",
];

/// Typed and harmless keys of one kind only.
fn own_keys(kind: &str) -> &'static [&'static str] {
    match kind {
        "LORA" => &[
            "lora_alpha",
            "lora_dropout",
            "use_rslora",
            "rank_pattern",
            "alpha_pattern",
            "init_lora_weights",
            "use_dora",
            "target_parameters",
            "trainable_token_indices",
        ],
        "IA3" => &["feedforward_modules", "init_ia3_weights"],
        "VERA" => &[
            "d_initial",
            "init_weights",
            "projection_prng_key",
            "save_projection",
            "vera_dropout",
        ],
        "LOHA" => &[
            "alpha",
            "alpha_pattern",
            "rank_pattern",
            "init_weights",
            "use_effective_conv2d",
        ],
        "LOKR" => &[
            "alpha",
            "alpha_pattern",
            "rank_pattern",
            "init_weights",
            "use_effective_conv2d",
            "decompose_both",
            "decompose_factor",
            "rank_dropout_scale",
        ],
        "OFT" => &[
            "oft_block_size",
            "use_cayley_neumann",
            "num_cayley_neumann_terms",
            "init_weights",
            "eps",
        ],
        "ADALORA" => &[
            "lora_alpha",
            "lora_dropout",
            "init_lora_weights",
            "target_r",
            "init_r",
            "tinit",
            "tfinal",
            "deltaT",
            "beta1",
            "beta2",
            "orth_reg_weight",
            "total_step",
            "rank_pattern",
            "trainable_token_indices",
        ],
        _ => &[],
    }
}

/// Reasons why a known feature is refused.
const REFUSED: [(&str, &str); 10] = [
    ("fan_in_fan_out", "weights stored transposed"),
    ("lora_bias", "a bias on B"),
    ("layer_replication", "repeated layers"),
    (
        "alora_invocation_tokens",
        "an adapter that is active only from a token of the sequence on",
    ),
    ("use_qalora", "pooled inputs"),
    ("megatron_config", "parallel layers"),
    ("coft", "rotations limited to a distance from their initial value"),
    ("block_share", "one rotation for all blocks"),
    ("rank_dropout", "dropout of full rows"),
    ("module_dropout", "dropout of full adapters"),
];

impl AdapterConfig {
    /// Reads `adapter_config.json` of an adapter directory and checks that its weights are safetensors.
    ///
    /// # Errors
    /// Missing files, a pickle, wrong values, and every feature that ft does not support, by name.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG);
        if !dir.exists() {
            return Err(paths::missing("directory", dir));
        }
        if !path.exists() {
            let error = Error::not_found(format!("adapter directory has no `{CONFIG}`")).at_path(dir);
            return Err(if dir.join("config.json").exists() {
                error.hint("this is a model directory: use it as the model, not as the adapter")
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
                Error::not_found(format!("adapter directory has no `{WEIGHTS}`")).at_path(dir)
            });
        }
        Ok(config)
    }

    /// Reads the object of an `adapter_config.json`; `path` appears in errors.
    ///
    /// # Errors
    /// A value of a wrong type (`Format`); an adapter kind or option that ft does not compute, by name (`Unsupported`).
    pub fn from_map(map: &Map<String, Value>, path: &Path) -> Result<Self> {
        let c = ConfigReader { map, path };
        let refuse = |key: &str, why: &str| {
            Error::unsupported(format!("adapter uses `{key}`, which ft does not support ({why})"))
                .at_path(path)
                .found(map.get(key).map_or("nothing".into(), json_kind))
        };
        let Some(peft_type) = c.text("peft_type")? else {
            if map.contains_key("fine_tune_type") {
                return Err(Error::unsupported("this is an adapter for mlx-lm")
                    .at_path(path)
                    .expected("an adapter of PEFT")
                    .hint("give the adapter from which it was exported"));
            }
            return Err(c.wrong("peft_type", "\"LORA\""));
        };
        let own = own_keys(&peft_type);
        if own.is_empty() {
            return Err(refuse("peft_type", "an adapter type that ft does not support")
                .expected("LORA, IA3, VERA, LOHA, LOKR, OFT or ADALORA"));
        }
        if let Some(bias) = c.text("bias")?.filter(|b| b != "none") {
            return Err(
                refuse("bias", &format!("biases trained together with the adapter: {bias}")).expected("\"none\""),
            );
        }
        for (key, value) in map {
            if is_empty(value) || HARMLESS.contains(&key.as_str()) {
                continue;
            }
            if let Some((_, why)) = REFUSED.iter().find(|(k, _)| k == key) {
                let error = refuse(key, why);
                return Err(if ["rank_dropout", "module_dropout"].contains(&key.as_str()) {
                    error.hint(
                        "it acts in training only: set it to 0.0 in a copy of the directory to evaluate or merge it",
                    )
                } else {
                    error
                });
            }
            if !TYPED.contains(&key.as_str()) && !own.contains(&key.as_str()) {
                return Err(refuse(key, "unknown key: it may change the output of the adapter"));
            }
        }
        let init = c.get("init_lora_weights").cloned().unwrap_or(Value::Bool(true));
        if let Some(name) = init.as_str()
            && ["pissa", "olora", "corda", "loftq", "lora_ga"]
                .iter()
                .any(|p| name.to_lowercase().starts_with(p))
        {
            return Err(Error::unsupported(
                "adapter uses `init_lora_weights` with a changed base model, which is not in the directory",
            )
            .at_path(path)
            .found(json_kind(&init))
            .hint(
                "save it as plain LoRA with PEFT in the program that trained it: `save_pretrained(DIR, \
                 path_initial_model_for_weight_conversion=...)`",
            ));
        }
        let kind = kind(&c, &peft_type)?;
        let d = Self::default();
        let (alpha_key, dropout_key) = match kind {
            AdapterKind::Loha | AdapterKind::Lokr { .. } => ("alpha", "rank_dropout"),
            AdapterKind::Vera { .. } => ("lora_alpha", "vera_dropout"),
            _ => ("lora_alpha", "lora_dropout"),
        };
        let r = match &kind {
            AdapterKind::Adalora(_) => c.rank_or("init_r", 12)?,
            AdapterKind::Vera { .. } => c.rank_or("r", 256)?,
            AdapterKind::Oft { .. } | AdapterKind::Ia3 { .. } => d.r,
            _ => c.rank_or("r", d.r)?,
        };
        let dropout = c.number(dropout_key, 0.0)?;
        if !(0.0..1.0).contains(&dropout) {
            return Err(c.wrong(dropout_key, "a number from 0 up to 1"));
        }
        if !is_empty(map.get("target_parameters").unwrap_or(&Value::Null)) {
            for key in ["use_dora", "lora_dropout"] {
                if map.get(key).is_some_and(|value| !is_empty(value)) {
                    return Err(refuse(
                        key,
                        "PEFT has it for linear layers only, not with `target_parameters`",
                    ));
                }
            }
        }
        let finite = |v: &Value| {
            v.as_f64()
                .filter(|x| x.is_finite())
                .ok_or_else(|| c.wrong("alpha_pattern", "an object of numbers"))
        };
        Ok(Self {
            r,
            lora_alpha: c.number(alpha_key, d.lora_alpha)?,
            lora_dropout: dropout,
            target_modules: c.targets("target_modules")?.unwrap_or(d.target_modules),
            exclude_modules: c.targets("exclude_modules")?,
            target_parameters: c.texts("target_parameters")?,
            use_rslora: c.flag("use_rslora")?,
            use_dora: c.flag("use_dora")?,
            rank_pattern: match kind {
                // For AdaLoRA it lists the kept singular values: part of the kind.
                AdapterKind::Adalora(_) => Vec::new(),
                _ => c.table("rank_pattern", |v| c.rank("rank_pattern", v))?,
            },
            alpha_pattern: c.table("alpha_pattern", finite)?,
            modules_to_save: c.texts("modules_to_save")?,
            ensure_weight_tying: c.flag("ensure_weight_tying")?,
            token_rows: c.token_rows("trainable_token_indices")?,
            layers_to_transform: c.layers("layers_to_transform")?,
            layers_pattern: c.texts("layers_pattern")?,
            base_model_name_or_path: c.text("base_model_name_or_path")?,
            revision: c.text("revision")?,
            names: PeftNames::default(),
            task_type: c.text("task_type")?,
            init_lora_weights: init,
            peft_version: c.text("peft_version")?,
            kind,
        })
    }

    /// The usual name of the kind.
    pub fn name(&self) -> &'static str {
        match self.kind {
            AdapterKind::Lora if self.use_dora => "DoRA",
            AdapterKind::Lora if self.use_rslora => "rsLoRA",
            AdapterKind::Lora => "LoRA",
            AdapterKind::Ia3 { .. } => "IA3",
            AdapterKind::Vera { .. } => "VeRA",
            AdapterKind::Loha => "LoHa",
            AdapterKind::Lokr { .. } => "LoKr",
            AdapterKind::Oft { .. } => "OFT",
            AdapterKind::Adalora(_) => "AdaLoRA",
        }
    }

    /// Writes `adapter_config.json` into a directory.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, dir: &Path) -> Result<PathBuf> {
        let path = dir.join(CONFIG);
        let text = serde_json::to_string_pretty(&self.to_json())
            .map_err(|e| Error::new("cannot write the adapter config").at_path(&path).cause(e))?;
        files::write_atomic(&path, format!("{text}\n").as_bytes())?;
        Ok(path)
    }
}

fn kind(c: &ConfigReader, peft_type: &str) -> Result<AdapterKind> {
    Ok(match peft_type {
        "IA3" => AdapterKind::Ia3 {
            feedforward: match c.get("feedforward_modules") {
                Some(Value::String(pattern)) => Targets::Pattern(pattern.clone()),
                _ => Targets::List(c.texts("feedforward_modules")?),
            },
        },
        "VERA" => {
            if !c.flag_or("save_projection", true)? {
                return Err(c.wrong("save_projection", "true").hint(
                    "save the adapter again with `save_projection=True`: without the projections in the file, \
                     they depend on the random numbers of another tool",
                ));
            }
            AdapterKind::Vera {
                d_initial: c.number("d_initial", 0.1)?,
            }
        }
        "LOHA" => AdapterKind::Loha,
        "LOKR" => AdapterKind::Lokr {
            factor: c.number("decompose_factor", -1.0)? as i64,
            both: c.flag("decompose_both")?,
        },
        "OFT" => {
            let neumann = c.flag_or("use_cayley_neumann", true)?;
            let terms = c.rank_or("num_cayley_neumann_terms", 5)?;
            if terms > 64 {
                return Err(c.wrong("num_cayley_neumann_terms", "a whole number from 1 to 64"));
            }
            // 0 if `r` is the number of blocks: the block size follows from the tensors.
            let block = c.number("oft_block_size", 0.0)?.max(0.0) as usize;
            let blocks = c.number("r", 0.0)?.max(0.0) as usize;
            AdapterKind::Oft {
                block,
                blocks: if block == 0 { blocks } else { 0 },
                neumann: neumann.then_some(terms),
            }
        }
        "ADALORA" => AdapterKind::Adalora(RankAllocation::read(c)?),
        _ => AdapterKind::Lora,
    })
}

#[cfg(test)]
mod tests;
