//! Writes `adapter_config.json` in PEFT's form.

use super::{AdapterConfig, AdapterKind, RankAllocation, Targets};
use serde_json::{Map, Value, json};

/// The PEFT version whose format is written.
const PEFT: &str = "0.18.0";

/// Writes `16.0` as `16`, as PEFT does.
fn whole(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 9e15 {
        json!(x as i64)
    } else {
        json!(x)
    }
}

fn targets(t: &Targets) -> Value {
    match t {
        Targets::AllLinear => json!("all-linear"),
        Targets::List(list) => json!(list),
        Targets::Pattern(p) => json!(p),
    }
}

fn list(v: &[String]) -> Value {
    if v.is_empty() { Value::Null } else { json!(v) }
}

fn object<T>(entries: &[(String, T)], value: impl Fn(&T) -> Value) -> Value {
    Value::Object(entries.iter().map(|(k, v)| (k.clone(), value(v))).collect())
}

impl AdapterConfig {
    /// The name of a module, or of something below it, in the model that PEFT loads.
    pub fn name_in_file(&self, name: &str) -> String {
        self.names.in_peft(name)
    }

    /// All keys that a loader needs, in alphabetical order as PEFT writes them.
    pub fn to_json(&self) -> Value {
        let mut out = self.common();
        let own = match &self.kind {
            AdapterKind::Lora => self.lora(),
            AdapterKind::Ia3 { feedforward } => json!({
                "fan_in_fan_out": false,
                "feedforward_modules": targets(feedforward),
                "init_ia3_weights": true,
                "peft_type": "IA3",
            }),
            AdapterKind::Vera { d_initial } => json!({
                "bias": "none",
                "d_initial": d_initial,
                "fan_in_fan_out": false,
                "init_weights": true,
                "layers_pattern": list(&self.layers_pattern),
                "layers_to_transform": self.layers_to_transform,
                "peft_type": "VERA",
                "projection_prng_key": 0,
                "r": self.r,
                "save_projection": true,
                "vera_dropout": self.lora_dropout,
            }),
            AdapterKind::Loha => self.lycoris("LOHA", json!({})),
            AdapterKind::Lokr { factor, both } => self.lycoris(
                "LOKR",
                json!({
                    "decompose_both": both,
                    "decompose_factor": factor,
                    "rank_dropout_scale": false,
                }),
            ),
            AdapterKind::Oft { block, blocks, neumann } => json!({
                "bias": "none",
                "block_share": false,
                "coft": false,
                "eps": 6e-5,
                "fan_in_fan_out": false,
                "init_weights": true,
                "layers_pattern": list(&self.layers_pattern),
                "layers_to_transform": self.layers_to_transform,
                "module_dropout": 0.0,
                "num_cayley_neumann_terms": neumann.unwrap_or(5),
                "oft_block_size": block,
                "peft_type": "OFT",
                "r": blocks,
                "use_cayley_neumann": neumann.is_some(),
            }),
            AdapterKind::Adalora(allocation) => self.adalora(allocation),
        };
        if let Value::Object(own) = own {
            out.extend(own);
        }
        if matches!(self.kind, AdapterKind::Vera { .. }) && self.exclude_modules.is_none() {
            // A key that the VeRA of PEFT does not have.
            out.remove("exclude_modules");
        }
        out.sort_keys();
        Value::Object(out)
    }

    fn common(&self) -> Map<String, Value> {
        let pairs = [
            ("auto_mapping", Value::Null),
            ("base_model_name_or_path", json!(self.base_model_name_or_path)),
            ("exclude_modules", json!(self.exclude_modules.as_ref().map(targets))),
            ("inference_mode", json!(true)),
            ("modules_to_save", list(&self.modules_to_save)),
            ("peft_version", json!(self.peft_version.as_deref().unwrap_or(PEFT))),
            ("revision", json!(self.revision)),
            ("target_modules", targets(&self.target_modules)),
            ("task_type", json!(self.task_type)),
        ];
        pairs.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
    }

    fn lora(&self) -> Value {
        json!({
            "alora_invocation_tokens": null,
            "alpha_pattern": object(&self.alpha_pattern, |a| whole(*a)),
            "arrow_config": null,
            "bias": "none",
            "corda_config": null,
            "ensure_weight_tying": self.ensure_weight_tying,
            "eva_config": null,
            "fan_in_fan_out": false,
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
            "peft_type": "LORA",
            "qalora_group_size": 16,
            "r": self.r,
            "rank_pattern": object(&self.rank_pattern, |r| json!(r)),
            "target_parameters": list(&self.target_parameters),
            "trainable_token_indices": self.rows(),
            "use_dora": self.use_dora,
            "use_qalora": false,
            "use_rslora": self.use_rslora,
        })
    }

    fn rows(&self) -> Value {
        match self.token_rows.as_slice() {
            [] => Value::Null,
            [(module, ids)] if module == "embed_tokens" => json!(ids),
            all => Value::Object(all.iter().map(|(m, ids)| (m.clone(), json!(ids))).collect()),
        }
    }

    fn adalora(&self, allocation: &RankAllocation) -> Value {
        let mut out = self.lora();
        let mut own = allocation.json(&|module| self.name_in_file(module));
        own["init_r"] = json!(self.r);
        own["peft_type"] = json!("ADALORA");
        if let (Value::Object(out), Value::Object(own)) = (&mut out, own) {
            out.extend(own);
        }
        out
    }

    fn lycoris(&self, name: &str, more: Value) -> Value {
        let mut out = json!({
            "alpha": whole(self.lora_alpha),
            "alpha_pattern": object(&self.alpha_pattern, |a| whole(*a)),
            "init_weights": true,
            "layers_pattern": list(&self.layers_pattern),
            "layers_to_transform": self.layers_to_transform,
            "module_dropout": 0.0,
            "peft_type": name,
            "r": self.r,
            "rank_dropout": 0.0,
            "rank_pattern": object(&self.rank_pattern, |r| json!(r)),
            "use_effective_conv2d": false,
        });
        if let (Value::Object(out), Value::Object(more)) = (&mut out, more) {
            out.extend(more);
        }
        out
    }
}
