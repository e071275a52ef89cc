//! The modules that a directory of bitsandbytes keeps unquantized (`llm_int8_skip_modules`): transformers replaces every other linear
//! by a quantized one, and then looks for quantized tensors.
//!
//! transformers 5.23 takes an entry as a regular expression that matches the full name of a module, or the start of it up to a point,
//! or as the end of the full name. Earlier versions 5 do not look for the point; transformers 4 takes an entry as the full name, or
//! as a part of it that a point follows. The entries here mean the same in all of them.

use super::ParamInfo;
use crate::formats::adapter::wrapped;
use crate::formats::weights::Weights;
use crate::source::Group;
use crate::source::policy::is_projection;
use std::collections::BTreeSet;

/// The output projection.
const HEAD: &str = "lm_head.weight";

/// The modules of a model, all of whose projections are quantized, that stay as they are: the output projection, other linears
/// that are no projection of a layer, and the parts of the files outside the language model. `None`: an entry for one of them would
/// take a quantized module too.
pub fn kept_modules(weights: &Weights, params: &[ParamInfo]) -> Option<Vec<String>> {
    let modules = |of: &dyn Fn(&ParamInfo) -> bool| -> Vec<String> {
        let own = params.iter().filter(|p| of(p));
        own.flat_map(|p| names_of(weights, &p.name)).collect()
    };
    let quantized = modules(&is_projection);
    let mut kept = names_of(weights, HEAD);
    kept.extend(modules(&|p| is_linear(p) && !is_projection(p)));
    let language: Vec<String> = params.iter().map(|p| weights.stored_name(&p.name)).collect();
    let others: Vec<&str> = weights.other_parts().iter().map(|info| info.name.as_str()).collect();
    with_parts(kept, &others, &language, &quantized)
}

/// Adds the parts of the tensors `others` to the modules `kept`. `None`: an entry would take one of the `quantized` modules.
fn with_parts(
    mut kept: Vec<String>,
    others: &[&str],
    language: &[String],
    quantized: &[String],
) -> Option<Vec<String>> {
    let takes_quantized = |entry: &str| quantized.iter().any(|module| takes(entry, module));
    let mut parts: BTreeSet<&str> = BTreeSet::new();
    for name in others {
        if parts.iter().any(|part| is_below(name, part)) {
            continue;
        }
        match part_of(name, language, quantized) {
            Some(part) => {
                parts.insert(part);
            }
            // A linear that no entry names alone; of other tensors transformers replaces nothing.
            None if name.strip_suffix(".weight").is_some_and(takes_quantized) => return None,
            None => {}
        }
    }
    for part in parts {
        kept.push(part.to_string());
        // transformers 5 has a part there that files have at the top.
        if !part.starts_with("model.") {
            kept.push(format!("model.{part}"));
        }
    }
    let mut seen = BTreeSet::new();
    kept.retain(|entry| seen.insert(entry.clone()));
    (!kept.iter().any(|entry| takes_quantized(entry))).then_some(kept)
}

/// The names that a module of the language model can have in transformers: that of a text-only model, that of these files, and
/// that of a multimodal model.
fn names_of(weights: &Weights, parameter: &str) -> Vec<String> {
    let module = |name: &str| name.strip_suffix(".weight").unwrap_or(name).to_string();
    let stored = weights.stored_name(parameter);
    let mut names = vec![module(parameter)];
    if stored != parameter || !weights.other_parts().is_empty() {
        names.extend([module(&stored), module(&wrapped(parameter))]);
    }
    names
}

/// True for the matrix of a linear. Tables, of which only rows are read, are none.
fn is_linear(p: &ParamInfo) -> bool {
    let matrix = p.shape.len() == 2 && !p.is_vector() && p.name.ends_with(".weight");
    matrix && !matches!(p.group, Group::Embedding | Group::Table)
}

/// The shortest prefix of a tensor outside the language model that has no tensor of it, and that takes no quantized module.
fn part_of<'a>(name: &'a str, language: &[String], quantized: &[String]) -> Option<&'a str> {
    let mut prefixes = name.match_indices('.').map(|(at, _)| &name[..at]);
    prefixes.find(|prefix| {
        !language.iter().any(|own| is_below(own, prefix)) && !quantized.iter().any(|module| takes(prefix, module))
    })
}

fn is_below(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('.'))
}

/// True if an entry takes this module in one of the versions of transformers. A point is any character in a regular expression.
fn takes(entry: &str, module: &str) -> bool {
    let start = module.as_bytes().get(..entry.len());
    let same = |(e, m): (u8, &u8)| e == b'.' || e == *m;
    start.is_some_and(|start| entry.bytes().zip(start).all(same))
        || module.ends_with(entry)
        || module.contains(&format!("{entry}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_takes_what_one_of_the_versions_takes() {
        let module = "model.language_model.layers.1.self_attn.q_proj";
        for entry in [
            "model",
            "model.language.model.layers.1",
            "proj",
            "self_attn",
            "language_model",
            module,
        ] {
            assert!(takes(entry, module), "{entry}");
        }
        for entry in [
            "lm_head",
            "visual",
            "model.visual",
            "model.vision",
            "self",
            "layers.11",
            "model.language_model.layers.1.self_attn.q_proj_norm",
        ] {
            assert!(!takes(entry, module), "{entry}");
        }
    }

    #[test]
    fn a_part_is_named_by_its_shortest_prefix_that_takes_nothing_else() {
        let own = |names: &[&str]| -> Vec<String> { names.iter().map(|n| n.to_string()).collect() };
        let language = own(&["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]);
        let quantized = own(&["model.layers.0.mlp.up_proj"]);
        for (name, part) in [
            ("visual.blocks.0.proj.weight", Some("visual")),
            ("model.visual.blocks.0.proj.weight", Some("model.visual")),
            ("model.layers.1.eh_proj.weight", Some("model.layers.1")),
            // Its first word alone is the end of a quantized module.
            ("up_proj.inner.weight", Some("up_proj.inner")),
            ("buffer", None),
        ] {
            assert_eq!(part_of(name, &language, &quantized), part, "{name}");
        }
    }

    /// Without an entry transformers would replace the linear, with it one that is quantized would stay.
    #[test]
    fn a_module_that_no_entry_names_alone_is_not_left_out() {
        let own = |names: &[&str]| -> Vec<String> { names.iter().map(|n| n.to_string()).collect() };
        let language = own(&["model.layers.0.mlp.gate_proj.weight", "model.norm.weight"]);
        let quantized = own(&["model.layers.0.mlp.gate_proj"]);
        let with = |kept: &[&str], others: &[&str]| with_parts(own(kept), others, &language, &quantized);
        let kept = with(&["lm_head", "lm_head"], &["mtp.fc.weight", "mtp.norm.weight", "buffer"]);
        assert_eq!(kept, Some(own(&["lm_head", "mtp", "model.mtp"])));
        // The start of a quantized module, before 5.23.
        assert_eq!(with(&["model.layers.0.mlp.gate"], &[]), None);
        // The end of one.
        assert_eq!(with(&[], &["gate_proj.weight"]), None);
        assert_eq!(with(&[], &["gate_proj.bias"]), Some(Vec::new()));
    }
}
