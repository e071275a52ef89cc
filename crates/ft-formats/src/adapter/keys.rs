//! Names of tensors in `adapter_model.safetensors`.

use super::AdapterKind;
use crate::weights::{LANGUAGE_MODEL, TEXT_ONLY};

/// The text that PEFT writes before the name of a module.
pub const PREFIX: &str = "base_model.model.";
/// The random pair that all linears of a VeRA adapter share.
pub const VERA: [&str; 2] = ["base_model.vera_A", "base_model.vera_B"];

/// The parameters with the matrices of all experts, in the order in which PEFT wraps their module for an adapter on each.
pub const EXPERT_PARAMETERS: [&str; 2] = ["gate_up_proj", "down_proj"];

/// The module in a file of the adapter on the parameter `path`. PEFT wraps the module once for each of its parameters that
/// `adapted` names; the first wrapper is the innermost.
pub fn wrapper(path: &str, adapted: &dyn Fn(&str) -> bool) -> String {
    let Some((module, own)) = path.rsplit_once('.') else {
        return path.to_string();
    };
    let later = EXPERT_PARAMETERS.iter().skip_while(|p| **p != own).skip(1);
    let outside = later.filter(|p| adapted(&format!("{module}.{p}"))).count();
    format!("{module}{}", ".base_layer".repeat(outside))
}

/// Tensor names below a module, for each kind of adapter.
pub fn below(kind: &AdapterKind, dora: bool) -> &'static [&'static str] {
    match kind {
        AdapterKind::Lora if dora => &["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"],
        AdapterKind::Lora => &["lora_A.weight", "lora_B.weight"],
        AdapterKind::Ia3 { .. } => &["ia3_l"],
        AdapterKind::Vera { .. } => &["vera_lambda_b", "vera_lambda_d"],
        AdapterKind::Loha => &["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"],
        AdapterKind::Lokr { .. } => &["lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"],
        AdapterKind::Oft { .. } => &["oft_R.weight"],
        AdapterKind::Adalora(_) => &["lora_A", "lora_B", "lora_E"],
    }
}

/// Substrings that occur only in names of adapter tensors.
const MARKS: [&str; 8] = [
    ".lora_",
    ".ia3_",
    ".vera_",
    ".hada_",
    ".lokr_",
    ".oft_",
    ".token_adapter.",
    ".trainable_tokens",
];

/// Meaning of a tensor name in an adapter file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdapterKey {
    /// A tensor of the adapter on a module: the module, and its name below it.
    Of(String, &'static str),
    /// Trained rows of the matrix of a module.
    Rows(String),
    /// A whole parameter of a module in `modules_to_save`, by its name in the model.
    Whole(String),
}

/// Prefixes in a multimodal and in a text-only model. The head is a module itself, so it has no dot.
const PREFIXES: [(&str, &str); 3] = [
    (LANGUAGE_MODEL[0][0], TEXT_ONLY[0]),
    (LANGUAGE_MODEL[1][0], TEXT_ONLY[0]),
    ("language_model.lm_head", "lm_head"),
];

/// The name in a multimodal model of a module, or of something below it, of its language model.
pub fn wrapped(name: &str) -> String {
    let (outer, inner) = PREFIXES[0];
    match name.strip_prefix(inner) {
        Some(rest) => format!("{outer}{rest}"),
        None => name.to_string(),
    }
}

/// The inverse of `wrapped`.
pub fn unwrapped(name: &str) -> String {
    let mut pairs = PREFIXES.iter();
    let found = pairs.find_map(|(outer, inner)| Some(format!("{inner}{}", name.strip_prefix(outer)?)));
    found.unwrap_or_else(|| name.to_string())
}

/// How names differ between the files of a base model and the model that PEFT loads from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeftNames {
    /// The base model is multimodal: PEFT loads all parts of it.
    pub multimodal: bool,
    /// Parts of a path that differ: as in the files, and as in transformers 5.
    pub parts: &'static [(&'static str, &'static str)],
}

impl PeftNames {
    /// The name of a module, or of something below it, in the model that PEFT loads.
    pub fn in_peft(&self, name: &str) -> String {
        let name = if self.multimodal {
            wrapped(name)
        } else {
            name.to_string()
        };
        let parts = self.parts.iter();
        parts.fold(name, |name, (file, peft)| replaced(&name, file, peft))
    }

    /// The inverse of `in_peft`. A name as in the files stays: adapters of older versions of transformers have those.
    pub fn in_files(&self, name: &str) -> String {
        let parts = self.parts.iter();
        let name = parts.fold(name.to_string(), |name, (file, peft)| {
            replaced(&replaced(&name, file, peft), peft, file)
        });
        if self.multimodal { unwrapped(&name) } else { name }
    }
}

/// `name` with these components of its path replaced.
fn replaced(name: &str, from: &str, to: &str) -> String {
    let path = format!(".{name}.").replacen(&format!(".{from}."), &format!(".{to}."), 1);
    let inner = path.strip_prefix('.').and_then(|path| path.strip_suffix('.'));
    inner.unwrap_or(name).to_string()
}

/// The name in the file for an adapter tensor such as `model.layers.0.self_attn.q_proj.lora_A.weight`.
pub fn file_key(part: &str) -> String {
    format!("{PREFIX}{part}")
}

/// Parses a tensor name; `None` for a name that does not belong to this kind of adapter.
pub fn parse(name: &str, kind: &AdapterKind, dora: bool) -> Option<AdapterKey> {
    let rest = name.strip_prefix(PREFIX)?;
    for below in below(kind, dora) {
        // Some hand-written files contain the adapter name "default".
        let by_hand = match below.strip_suffix(".weight") {
            Some(head) => format!(".{head}.default.weight"),
            None => format!(".{below}.default"),
        };
        for end in [format!(".{below}"), by_hand] {
            if let Some(module) = rest.strip_suffix(&end) {
                return (!module.is_empty()).then(|| AdapterKey::Of(module.to_string(), below));
            }
        }
    }
    for end in [
        ".token_adapter.trainable_tokens_delta",
        ".token_adapter.trainable_tokens_delta.default",
    ] {
        if let Some(module) = rest.strip_suffix(end).filter(|_| kind.has_rows()) {
            return Some(AdapterKey::Rows(module.to_string()));
        }
    }
    if MARKS.iter().any(|mark| rest.contains(mark)) {
        return None;
    }
    Some(AdapterKey::Whole(rest.replace(".modules_to_save.default.", ".")))
}
