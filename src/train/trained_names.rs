//! Compares the weights in a checkpoint with the parameters of the run that reads it, by name: no trained value is left out silently,
//! and no parameter begins silently with the value of the base model.

use crate::base::{Error, Result};
use crate::engine::ActiveSet;
use crate::hf::{self, AdapterSet};
use crate::model::Spec;
use crate::model::spec::is_constant;
use crate::recipe::LoraKeys;
use std::collections::{BTreeMap, BTreeSet};

/// Prefix of the parameters of an objective, such as the value head of PPO: a model or an adapter may have no place for them.
pub const OF_OBJECTIVE: &str = "objective.";

/// `saved`: the weights of a checkpoint after at least one step; `active`: what trains in that step in the run that goes on.
///
/// Errors: a parameter that trains now and did not before; one of a LoRA run that trained before and does not now.
pub fn check_resumed(saved: &BTreeMap<String, usize>, active: &ActiveSet, set: &AdapterSet, spec: &Spec) -> Result<()> {
    if set.config.is_some() {
        let known = starts(set);
        check_used(saved, set, spec, &|name| active.contains(name) || known.contains(name))?;
    }
    // A constant keeps its value, so older checkpoints without it are complete.
    let is_missing = |name: &&str| !saved.contains_key(*name) && !is_constant(name);
    let missing: BTreeSet<&str> = active.names().filter(is_missing).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let whole: BTreeSet<&str> = set.whole.iter().map(String::as_str).collect();
    let trained: Vec<&str> = saved
        .keys()
        .map(String::as_str)
        .filter(|name| whole.contains(name))
        .collect();
    let names = hf::naming(&trained, spec).filter(|names| !names.is_empty() && missing.is_subset(&whole));
    let hint = match names {
        Some(names) => format!(
            "an earlier version of ft took fewer modules: write `{} = {names:?}` to go on with those",
            LoraKeys::modules_to_save
        ),
        None => "undo the changes of the recipe; or write the model of this checkpoint with `ft export`, or start a new run in another \
                 `train.output_dir`"
            .to_string(),
    };
    let found = match missing.len() - 1 {
        0 => format!("`{first}`"),
        more => format!("`{first}` and {more} more"),
    };
    Err(Error::new("the checkpoint has no values of parameters that train now")
        .found(found)
        .hint(hint))
}

/// `saved`: the weights of a checkpoint whose model or adapter is written.
///
/// Errors: a trained value that would not be written.
pub fn check_exported(saved: &BTreeMap<String, usize>, set: &AdapterSet, spec: &Spec) -> Result<()> {
    let mut known: BTreeSet<String> = starts(set);
    known.extend(set.trained());
    if set.config.is_none() {
        known.extend(spec.params().iter().map(|p| p.name.to_string()));
    }
    check_used(saved, set, spec, &|name| {
        name.starts_with(OF_OBJECTIVE) || known.contains(name)
    })
}

/// Names of what adapters subtract, which a checkpoint has beside the trained parameters.
fn starts(set: &AdapterSet) -> BTreeSet<String> {
    let pairs = set.adapters.values().filter_map(|adapter| adapter.lora());
    let parts = pairs.flat_map(|lora| lora.start_parts());
    parts.map(|part| part.name.to_string()).collect()
}

fn check_used(
    saved: &BTreeMap<String, usize>,
    set: &AdapterSet,
    spec: &Spec,
    is_used: &dyn Fn(&str) -> bool,
) -> Result<()> {
    let Some(name) = saved.keys().find(|name| !is_used(name)) else {
        return Ok(());
    };
    let kind = set.config.as_ref().map(|config| &config.kind);
    let left_out = kind.and_then(|kind| hf::left_out_of_checkpoint(kind, spec, name));
    Err(left_out.unwrap_or_else(|| {
        Error::new("the checkpoint has values of a parameter that does not train now, so they would be lost")
            .found(name)
            .hint("use the recipe and the version of ft that wrote the checkpoint")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{self, Recipe};
    use crate::setup::{ModelFiles, adapters};
    use std::path::Path;

    fn recipe(model: &str, keys: &str) -> Recipe {
        let text = format!(
            "[model]\npath = {model:?}\n[data]\ntrain = \"t.jsonl\"\n[tune]\nmethod = \"lora\"\n[tune.lora]\n{keys}\n"
        );
        recipe::parse(&text, "r.toml", &[]).unwrap().recipe
    }

    fn small(keys: &str) -> (Spec, AdapterSet) {
        let recipe = recipe("shape:small", keys);
        let spec = ModelFiles::of_recipe(&recipe).unwrap().spec;
        let set = adapters::of(&recipe, &spec).unwrap();
        (spec, set)
    }

    /// A recipe of a model of golden files, and its shapes.
    fn family(name: &str, keys: &str) -> (Recipe, Spec) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens/families");
        let recipe = recipe(golden.join(name).to_str().unwrap(), keys);
        let spec = ModelFiles::of_recipe(&recipe).unwrap().spec;
        (recipe, spec)
    }

    /// The weights in a checkpoint of a run with these adapters.
    fn saved(set: &AdapterSet) -> BTreeMap<String, usize> {
        set.trained().chain(starts(set)).map(|name| (name, 1)).collect()
    }

    fn resumed(saved: &BTreeMap<String, usize>, set: &AdapterSet, spec: &Spec) -> Result<()> {
        check_resumed(saved, &ActiveSet::new(set.trained()), set, spec)
    }

    #[test]
    fn a_checkpoint_without_parameters_that_train_now_is_refused_with_the_names_that_train_the_same() {
        let (spec, norms) = small("modules_to_save = [\"norm\"]");
        let all = saved(&norms);
        resumed(&all, &norms, &spec).unwrap();
        // As an earlier version of ft read `norm`.
        let mut earlier = all.clone();
        earlier.retain(|name, _| !norms.whole.contains(name) || name == "model.norm.weight");
        let e = resumed(&earlier, &norms, &spec).unwrap_err();
        assert!(
            e.to_string().contains("`model.layers.0.input_layernorm.weight` and "),
            "{e}"
        );
        let hint = e.hint_text().unwrap();
        assert!(
            hint.contains("`tune.lora.modules_to_save = [\"model.norm\"]`"),
            "{hint}"
        );
        let (_, one) = small("modules_to_save = [\"model.norm\"]");
        resumed(&earlier, &one, &spec).unwrap();
        // What has trained must not stop to train.
        for e in [
            resumed(&all, &one, &spec).unwrap_err(),
            check_exported(&all, &one, &spec).unwrap_err(),
        ] {
            assert!(e.to_string().contains("model.layers.0.input_layernorm.weight"), "{e}");
        }
        // An adapter that is missing has nothing to do with these names.
        let mut fewer = all.clone();
        fewer.retain(|name, _| !name.contains("layers.0.self_attn.q_proj.lora_B"));
        let e = resumed(&fewer, &norms, &spec).unwrap_err();
        assert!(
            e.to_string().contains("layers.0.self_attn.q_proj.lora_B.weight`"),
            "{e}"
        );
        assert!(!e.hint_text().unwrap().contains("modules_to_save"), "{e}");
    }

    /// A router is a matrix and, in some families, a constant correction, which an earlier version did not save.
    #[test]
    fn names_for_a_router_are_short_and_a_missing_constant_is_no_difference() {
        let (recipe, spec) = family("qwen2_moe", "modules_to_save = [\"gate\"]");
        let set = adapters::of(&recipe, &spec).unwrap();
        let mut earlier = saved(&set);
        earlier.retain(|name, _| !name.contains("shared_expert_gate"));
        let e = resumed(&earlier, &set, &spec).unwrap_err();
        assert!(e.to_string().contains("mlp.shared_expert_gate.weight"), "{e}");
        assert!(e.hint_text().unwrap().contains("= [\"mlp.gate\"]`"), "{e}");

        let (recipe, spec) = family("ernie4_5_moe", "modules_to_save = [\"gate\"]");
        let set = adapters::of(&recipe, &spec).unwrap();
        let mut earlier = saved(&set);
        let all = earlier.len();
        earlier.retain(|name, _| !is_constant(name));
        assert!(earlier.len() < all);
        resumed(&earlier, &set, &spec).unwrap();
    }

    #[test]
    fn adapters_that_peft_leaves_out_are_not_dropped_from_a_checkpoint() {
        let (recipe, spec) = family("qwen3_next", "");
        let mut other = spec.clone();
        other.model_type = "another".into();
        let earlier = saved(&adapters::of(&recipe, &other).unwrap());
        let set = adapters::of(&recipe, &spec).unwrap();
        for e in [
            resumed(&earlier, &set, &spec).unwrap_err(),
            check_exported(&earlier, &set, &spec).unwrap_err(),
        ] {
            assert!(e.to_string().contains("PEFT would leave out"), "{e}");
            assert!(
                e.to_string().contains("model.layers.0.mlp.down_proj.lora_A.weight"),
                "{e}"
            );
            assert!(e.hint_text().unwrap().contains("the version that wrote"), "{e}");
        }
        let own = saved(&set);
        check_exported(&own, &set, &spec).unwrap();
        resumed(&own, &set, &spec).unwrap();
    }

    #[test]
    fn only_what_belongs_to_an_objective_is_left_out_of_an_export() {
        let (spec, set) = small("init_lora_weights = \"pissa\"");
        let mut own = saved(&set);
        assert!(own.keys().any(|name| name.ends_with(".start")));
        own.insert("objective.value.weight".into(), 1);
        check_exported(&own, &set, &spec).unwrap();
        own.insert("model.layers.0.other.weight".into(), 1);
        let e = check_exported(&own, &set, &spec).unwrap_err();
        assert!(e.to_string().contains("model.layers.0.other.weight"), "{e}");
        // Without adapters all weights of the model are written.
        let full = AdapterSet::default();
        let params = spec.params();
        let mut weights: BTreeMap<String, usize> = params.iter().map(|p| (p.name.to_string(), 1)).collect();
        check_exported(&weights, &full, &spec).unwrap();
        weights.insert("model.layers.0.other.weight".into(), 1);
        assert!(check_exported(&weights, &full, &spec).is_err());
    }

    #[test]
    fn single_experts_that_an_earlier_version_trained_are_read_and_exported() {
        let (recipe, spec) = family("mixtral", "modules_to_save = [\"w2\"]");
        let set = adapters::of(&recipe, &spec).unwrap();
        let refused = set.left_out.as_ref().unwrap().to_string();
        assert!(refused.contains("linear layers of single experts"), "{refused}");
        assert!(!set.whole.is_empty());
        let earlier = saved(&set);
        resumed(&earlier, &set, &spec).unwrap();
        check_exported(&earlier, &set, &spec).unwrap();
    }
}
