//! A PEFT adapter directory: `adapter_config.json`, `adapter_model.safetensors`, a short README.

use super::fingerprint::KEY;
use super::load_adapter::{alpha_of, rank_of};
use super::{TOKENIZER, copy_beside};
use crate::base::staging::Staging;
use crate::base::{Error, Result, files};
use crate::formats::StoredDtype;
use crate::formats::adapter::{AdapterConfig, WEIGHTS, lora_key};
use crate::formats::writer::{self, TensorPlan, Values};
use crate::model::Adapters;
use crate::ops::update;
use crate::peft::lora::scaling;
use std::path::{Path, PathBuf};

/// Writes the directory and returns its path: A `[R, I]` and B `[O, R]` in f32 under PEFT's names, and the
/// tokenizer files of `base_dir`. `adapters` are keyed by module (`model.layers.0.self_attn.q_proj`);
/// `base_fingerprint` is what `fingerprint` says of the base, kept in the metadata of the weights.
///
/// Errors: no adapter; one whose rank or scale is not what the config says (PEFT would compute something
/// else); a number that is not finite; a full disk. Then `out` is as before.
pub fn adapter(
    out: &Path,
    config: &AdapterConfig,
    adapters: &Adapters,
    base_dir: &Path,
    base_fingerprint: &str,
) -> Result<PathBuf> {
    if adapters.is_empty() {
        return Err(Error::new("there is no adapter to save").at_path(out));
    }
    let mut plans = Vec::new();
    for (module, lora) in adapters {
        let r = rank_of(config, module)?;
        let scale = scaling(alpha_of(config, module)?, r, config.use_rslora);
        if lora.a.dims().first() != Some(&r) || lora.b.dims().get(1) != Some(&r) || lora.scale != scale {
            return Err(Error::new("adapter is not what its config says")
                .at(module)
                .found(format!(
                    "A {:?}, B {:?}, scale {}",
                    lora.a.dims(),
                    lora.b.dims(),
                    lora.scale
                ))
                .expected(format!("rank {r}, scale {scale}")));
        }
        for (side, tensor) in [("A", &lora.a), ("B", &lora.b)] {
            let plan = TensorPlan {
                name: lora_key(module, side),
                dtype: StoredDtype::F32,
                shape: tensor.dims().to_vec(),
            };
            plans.push((plan, tensor));
        }
    }
    let staging = Staging::create(out)?;
    let dir = staging.path();
    let mut tensors = plans.iter().map(|(_, t)| *t);
    let list: Vec<TensorPlan> = plans.iter().map(|(p, _)| p.clone()).collect();
    let metadata = [(KEY.to_string(), base_fingerprint.to_string())];
    writer::write_file(&dir.join(WEIGHTS), &list, &metadata, |plan, sink| {
        match tensors.next() {
            Some(tensor) => sink(Values::F32(&update::to_f32_vec(tensor)?)),
            None => Err(Error::new("no such adapter tensor").at(&plan.name)),
        }
    })?;
    config.save(dir)?;
    copy_beside(base_dir, dir, &TOKENIZER)?;
    files::write_atomic(&dir.join("README.md"), readme(config, adapters.len()).as_bytes())?;
    staging.commit()
}

fn readme(c: &AdapterConfig, modules: usize) -> String {
    let base = c.base_model_name_or_path.as_deref().unwrap_or("");
    // Local paths say something about the machine and nothing to a reader elsewhere.
    let is_hub = base.split('/').count() == 2 && !base.starts_with(['.', '/', '~']) && !base.contains('\\');
    let (header, named) = if is_hub {
        (format!("base_model: {base}\n"), format!("`{base}`"))
    } else {
        (String::new(), "the base model it was trained on".to_string())
    };
    let scale = if c.use_rslora { ", rank-stabilised" } else { "" };
    format!(
        "---\n{header}library_name: peft\ntags:\n- lora\n---\n\n# LoRA adapter\n\n\
         Rank {}, alpha {}{scale}, on {modules} linear layers. Trained with ft {}.\n\n\
         ```python\n\
         from peft import PeftModel\n\
         from transformers import AutoModelForCausalLM\n\n\
         base = AutoModelForCausalLM.from_pretrained(\"{}\")\n\
         model = PeftModel.from_pretrained(base, \"path/to/this/directory\")\n\
         ```\n\n\
         It belongs to {named}; on other weights it means nothing.\n\
         `ft merge --model BASE --adapter THIS --out DIR` makes one model of both.\n",
        c.r,
        c.lora_alpha,
        env!("CARGO_PKG_VERSION"),
        if is_hub { base } else { "path/to/base" },
    )
}
