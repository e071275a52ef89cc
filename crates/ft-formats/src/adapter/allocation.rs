//! The rank allocation in an AdaLoRA config: PEFT needs all of it to load the adapter.

use super::read::ConfigReader;
use ft_base::Result;
use serde_json::{Map, Value, json};

/// The schedule of the ranks, and the kept singular values.
#[derive(Debug, Clone, PartialEq)]
pub struct RankAllocation {
    /// Mean rank at the end.
    pub target_r: usize,
    /// Steps before the first pruning.
    pub tinit: usize,
    /// Steps after the last pruning.
    pub tfinal: usize,
    /// Steps between two prunings.
    pub delta_t: usize,
    /// Decay of the average of the sensitivity.
    pub beta1: f64,
    /// Decay of the average of the uncertainty.
    pub beta2: f64,
    /// Weight of the orthogonality term in the loss.
    pub orth_reg_weight: f64,
    /// Steps of the training run.
    pub total_step: usize,
    /// By module: the kept ones among the initial singular values. Empty: all. The tensors contain only the kept ones.
    pub kept: Vec<(String, Vec<bool>)>,
}

impl Default for RankAllocation {
    /// The defaults of PEFT, which needs a number of steps even for loading.
    fn default() -> Self {
        Self {
            target_r: 8,
            tinit: 0,
            tfinal: 0,
            delta_t: 1,
            beta1: 0.85,
            beta2: 0.85,
            orth_reg_weight: 0.5,
            total_step: 1,
            kept: Vec::new(),
        }
    }
}

impl RankAllocation {
    pub(super) fn read(c: &ConfigReader) -> Result<Self> {
        let d = Self::default();
        let whole = |key: &str, default: usize| match c.get(key) {
            None => Ok(default),
            Some(v) => v
                .as_u64()
                .map(|n| n as usize)
                .ok_or_else(|| c.wrong(key, "a whole number")),
        };
        let wrong = || c.wrong("rank_pattern", "an object of lists of true and false");
        let flags = |v: &Value| -> Result<Vec<bool>> {
            let list = v.as_array().ok_or_else(wrong)?.iter();
            list.map(|x| x.as_bool().ok_or_else(wrong)).collect()
        };
        let kept = c.table("rank_pattern", flags)?.into_iter();
        Ok(Self {
            target_r: c.rank_or("target_r", d.target_r)?,
            tinit: whole("tinit", d.tinit)?,
            tfinal: whole("tfinal", d.tfinal)?,
            delta_t: c.rank_or("deltaT", d.delta_t)?,
            beta1: c.number("beta1", d.beta1)?,
            beta2: c.number("beta2", d.beta2)?,
            orth_reg_weight: c.number("orth_reg_weight", d.orth_reg_weight)?,
            total_step: whole("total_step", d.total_step)?,
            kept: kept.map(|(name, flags)| (module_of(&name), flags)).collect(),
        })
    }

    /// The keys of AdaLoRA in `adapter_config.json`. `named` returns the name that a module has in the file.
    pub(super) fn json(&self, named: &dyn Fn(&str) -> String) -> Value {
        let kept: Map<String, Value> = self
            .kept
            .iter()
            .map(|(m, f)| (format!("{}.lora_E", named(m)), json!(f)))
            .collect();
        json!({
            "beta1": self.beta1,
            "beta2": self.beta2,
            "deltaT": self.delta_t,
            "orth_reg_weight": self.orth_reg_weight,
            "rank_pattern": if kept.is_empty() { Value::Null } else { Value::Object(kept) },
            "target_r": self.target_r,
            "tfinal": self.tfinal,
            "tinit": self.tinit,
            "total_step": self.total_step,
        })
    }

    /// Flags of the kept singular values of this module; `None`: all are kept.
    pub fn kept_of(&self, module: &str) -> Option<&[bool]> {
        self.kept
            .iter()
            .find(|(m, _)| m == module)
            .map(|(_, flags)| flags.as_slice())
    }
}

/// The module of `model.layers.0.self_attn.q_proj.lora_E`, with or without the adapter's name as a suffix.
fn module_of(key: &str) -> String {
    let key = key.strip_suffix(".default").unwrap_or(key);
    key.strip_suffix(".lora_E").unwrap_or(key).to_string()
}
