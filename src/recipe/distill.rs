//! The keys of `[distill]`: checks of combinations, and the typed table.

use super::check::Values;
use super::types::*;
use crate::base::Error;
use std::path::Path;

fn distils(values: &Values) -> bool {
    values.text("train.stage") == "distill"
}

/// Errors of the table, each with the keys involved.
pub fn faults(values: &Values) -> Vec<(&'static [&'static str], Error)> {
    let mut out: Vec<(&'static [&'static str], Error)> = Vec::new();
    if !distils(values) {
        return out;
    }
    let stored = !values.text("distill.teacher_cache").is_empty();
    if values.text("distill.teacher").is_empty() && !stored {
        out.push((
            &["distill.teacher", "distill.teacher_cache", "train.stage"],
            Error::usage("`train.stage = \"distill\"` needs a teacher").hint(
                "set `distill.teacher` to a model, or `distill.teacher_cache` to a directory written by `ft distill cache`",
            ),
        ));
    }
    if values.number("distill.lmbda") > 0.0 {
        if stored {
            out.push((
                &["distill.lmbda", "distill.teacher_cache"],
                Error::usage("stored outputs of a teacher cannot score generated answers of the student")
                    .hint("set `distill.lmbda = 0`, or give `distill.teacher` without `distill.teacher_cache`"),
            ));
        }
        if values.flag("data.packing") {
            out.push((
                &["distill.lmbda", "data.packing"],
                Error::usage("`distill.lmbda` above 0 needs `data.packing = false`")
                    .found("the lengths of generated answers are not known in advance"),
            ));
        }
    }
    if values.number("distill.hidden_weight") > 0.0 && stored {
        out.push((
            &["distill.hidden_weight", "distill.teacher_cache"],
            Error::usage("stored outputs of a teacher have no hidden states")
                .hint("set `distill.hidden_weight = 0`, or give `distill.teacher` without `distill.teacher_cache`"),
        ));
    }
    out
}

/// Returns the reason if a key of the table has no effect.
pub fn unused(values: &Values, path: &str) -> Option<String> {
    let (cache, teacher) = (values.text("distill.teacher_cache"), values.text("distill.teacher"));
    match path {
        "distill.hidden_loss" | "distill.layer_map" if values.number("distill.hidden_weight") == 0.0 => {
            Some("distill.hidden_weight = 0".into())
        }
        "distill.max_new_tokens" | "distill.rollout_temperature" if values.number("distill.lmbda") == 0.0 => {
            Some("distill.lmbda = 0".into())
        }
        "distill.teacher_weights" | "distill.teacher_tier" if !cache.is_empty() => {
            Some(format!("distill.teacher_cache = {cache:?}"))
        }
        "distill.teacher_revision" if Path::new(teacher).is_dir() => Some(format!("distill.teacher = {teacher:?}")),
        _ => None,
    }
}

pub fn build(values: &Values) -> Distill {
    let set = |path: &str| Some(values.text(path).to_string()).filter(|t| !t.is_empty());
    let size = |path: &str| values.size(path).unwrap_or(1);
    Distill {
        teacher: set("distill.teacher"),
        teacher_revision: values.text("distill.teacher_revision").to_string(),
        teacher_weights: values.name("distill.teacher_weights"),
        teacher_tier: values.name("distill.teacher_tier"),
        teacher_cache: set("distill.teacher_cache"),
        top_k: size("distill.top_k"),
        beta: values.number("distill.beta"),
        temperature: values.number("distill.temperature"),
        alpha: values.number("distill.alpha"),
        lmbda: values.number("distill.lmbda"),
        max_new_tokens: size("distill.max_new_tokens"),
        rollout_temperature: values.number("distill.rollout_temperature"),
        hidden_weight: values.number("distill.hidden_weight"),
        hidden_loss: values.name("distill.hidden_loss"),
        layer_map: values.pairs("distill.layer_map"),
    }
}
