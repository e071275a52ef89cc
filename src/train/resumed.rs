//! Compares a run with the checkpoint from which it goes on: what must be equal, and what changed. Uses values and hashes only.

use crate::base::{Error, Result, secrets, units};
use crate::checkpoint::LoadedState;
use crate::optim::Schedule;
use crate::peft::targets;
use crate::recipe::table::{self, OnResume, PathContent};
use crate::recipe::{self, LoraKeys, ScheduleConfig};
use crate::report::visible;
use crate::train::side_inputs;
use crate::train::state::{RANDOM, RunFingerprint, fingerprint};

/// A key with another value.
struct ChangedKey<'a> {
    key: &'a str,
    was: String,
    now: &'a str,
    /// It has no effect in one of the two recipes: another key has changed too.
    follows: bool,
}

/// The keys with another value, except those without effect in both recipes. A key that the version of the checkpoint did not have
/// had the effect of its default; if that depends on model, rows or memory, it is not compared.
fn changed_keys<'a>(old: &RunFingerprint, new: &'a RunFingerprint) -> Vec<ChangedKey<'a>> {
    let value_of = |key: &str| old.recipe.get(key).cloned().or_else(|| recipe::default_value(key));
    let (idle_before, idle_now) = (recipe::without_effect(&old.recipe), recipe::without_effect(&new.recipe));
    let changed = new.recipe.iter().filter_map(|(key, now)| {
        let was = value_of(key).filter(|was| was != now)?;
        let (before, after) = (idle_before.contains(&**key), idle_now.contains(&**key));
        (!before || !after).then_some(ChangedKey {
            key,
            was,
            now,
            follows: before || after,
        })
    });
    changed.collect()
}

/// Errors: the last step of the run is before the checkpoint.
pub fn check_length(checkpoint: &LoadedState, total_steps: u64) -> Result<()> {
    if checkpoint.step <= total_steps {
        return Ok(());
    }
    Err(Error::usage("the run would end before the checkpoint from which it goes on")
        .at_path(&checkpoint.path)
        .found(format!("step {}", checkpoint.step))
        .expected(format!("at most {}", units::counted(total_steps as usize, "step")))
        .hint(
            match fingerprint(checkpoint).total_steps {
                Some(before) => format!(
                    "the run had {}: if they came from an argument, such as `train.max_steps={before}`, give it again; or raise \
                     `train.max_steps` or `train.num_epochs`; or write the model of this checkpoint with `ft export`",
                    units::counted(before as usize, "step")
                ),
                None => "raise `train.max_steps` or `train.num_epochs`; or write the model of this checkpoint with `ft export`, or \
                         give an earlier checkpoint to `--resume`"
                    .to_string(),
            },
        ))
}

/// What changed since the checkpoint, of the things that may: one line. `None` if nothing did.
pub fn allowed_changes(checkpoint: &LoadedState, new: &RunFingerprint) -> Option<String> {
    let old = fingerprint(checkpoint);
    let changed = changed_keys(&old, new);
    let lines: Vec<String> = changed
        .iter()
        .map(|ChangedKey { key, was, now, .. }| match masked(was, now) {
            // In a line of the terminal and of `events.jsonl`.
            Some((was, now)) => format!("{key} {} -> {}", visible(&was), visible(&now)),
            None => format!("{key}: a secret in it differs"),
        })
        .collect();
    let step = checkpoint.step;
    (!lines.is_empty()).then(|| format!("changed since checkpoint-{step}: {}", lines.join(", ")))
}

/// Two values without secrets. `None`: they differ in a secret only.
fn masked(was: &str, now: &str) -> Option<(String, String)> {
    let (was, now) = (secrets::mask(was), secrets::mask(now));
    (was != now).then_some((was, now))
}

/// Number of steps whose rates are compared.
const COMPARED: u64 = 100_000;

/// A warning if the steps up to the checkpoint had other learning rates than a run of the new length has.
pub fn other_rates(checkpoint: &LoadedState, total_steps: u64, config: &ScheduleConfig) -> Option<String> {
    let before = fingerprint(checkpoint)
        .total_steps
        .filter(|before| *before != total_steps)?;
    let (old, new) = (Schedule::new(config, before), Schedule::new(config, total_steps));
    let mut steps = (1..=checkpoint.step.min(COMPARED)).chain([checkpoint.step]);
    let differs = steps.any(|step| old.multiplier(step) != new.multiplier(step));
    differs.then(|| {
        format!(
            "the run has {total_steps} steps now, and had {before} when checkpoint-{} was written: the steps before it had the learning \
             rates of the shorter or longer schedule, so the result is not that of a run with {total_steps} steps from the beginning",
            checkpoint.step
        )
    })
}

/// Errors: any change that would make the resumed run a different run, as a table old -> new.
pub fn check_same(old: &RunFingerprint, new: &RunFingerprint) -> Result<()> {
    let same_base = old.base == new.base || (!new.sampled.is_empty() && old.base == new.sampled);
    let same_data = old.data == new.data || (!new.data_before.is_empty() && old.data == new.data_before);
    let may_change = |key: &str, was: &str, now: &str| match table::find(key).map(|key| key.on_resume) {
        None | Some(OnResume::Nothing) => key == LoraKeys::modules_to_save.0 && are_renamed(was, now),
        Some(OnResume::Value) => true,
        Some(OnResume::Path(content)) => match content {
            PathContent::BaseModel => same_base && new.base != RANDOM,
            PathContent::TrainingRows => same_data,
            PathContent::Sources => same_data && recipe::without_paths(was) == recipe::without_paths(now),
            PathContent::EvaluationRows => old.eval_data == new.eval_data,
            PathContent::Teacher => true,
        },
    };
    let (mut differences, mut following) = (Vec::new(), Vec::new());
    for ChangedKey { key, was, now, follows } in changed_keys(old, new) {
        if !may_change(key, &was, now) && !side_inputs::is_same(&old.side_inputs, &new.side_inputs, key) {
            let of_key = match masked(&was, now) {
                Some((was, now)) => format!("{key}: {was} -> {now}"),
                None => {
                    format!("{key}: a secret in it differs; give the value that `resolved.toml` of the run has")
                }
            };
            let list = if follows { &mut following } else { &mut differences };
            list.push(of_key);
        }
    }
    for (what, was, now, same) in [
        ("training rows", &old.data, &new.data, same_data),
        (
            "evaluation rows",
            &old.eval_data,
            &new.eval_data,
            old.eval_data == new.eval_data,
        ),
        ("base model", &old.base, &new.base, same_base),
    ] {
        if !same {
            differences.push(format!("{what}: hash {} -> {}", short(was), short(now)));
        }
    }
    for (key, was, now) in side_inputs::differences(&old.side_inputs, &new.side_inputs) {
        differences.push(format!("content of {key}: hash {} -> {}", short(was), short(now)));
    }
    // The user may never have written these, so they are named only if nothing else explains them.
    if differences.is_empty() {
        differences = following;
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::new("the settings or inputs differ from the saved run")
        .found(format!(
            "{}:\n      {}",
            units::counted(differences.len(), "difference"),
            differences.join("\n      ")
        ))
        .hint("undo these changes to resume, or start a new run in another `train.output_dir`"))
}

/// True if two lists of modules have longer or shorter names for the same paths. `trained_names` compares what they train.
fn are_renamed(was: &str, now: &str) -> bool {
    let names = |list: &str| serde_json::from_str::<Vec<String>>(list).unwrap_or_default();
    let (was, now) = (names(was), names(now));
    let is_in = |name: &String, list: &[String]| {
        list.iter()
            .any(|other| targets::ends(name, other) || targets::ends(other, name))
    };
    !now.is_empty() && was.iter().all(|name| is_in(name, &now)) && now.iter().all(|name| is_in(name, &was))
}

/// A warning if another program, processor or device goes on with `checkpoint`.
pub fn other_bits(checkpoint: &LoadedState, new: &RunFingerprint) -> Option<String> {
    let old = fingerprint(checkpoint);
    let changed: Vec<String> = new
        .made_by
        .iter()
        .filter_map(|(what, now)| {
            let was = old.made_by.get(what).filter(|was| *was != now)?;
            Some(format!("{what}: {} -> {}", named(was), named(now)))
        })
        .collect();
    (!changed.is_empty()).then(|| {
        format!(
            "checkpoint-{} was written by another program or on another machine ({}): the last bits of the numbers may differ \
             from those of a run that was not stopped",
            checkpoint.step,
            changed.join(", ")
        )
    })
}

/// A warning if a reward program has changed since the checkpoint.
pub fn other_program(checkpoint: &LoadedState, new: &RunFingerprint) -> Option<String> {
    side_inputs::other_program(&fingerprint(checkpoint).side_inputs, &new.side_inputs, checkpoint.step)
}

/// The start of a hash, any other text as it is.
fn named(fact: &str) -> &str {
    let is_hash = fact.len() == 64 && fact.chars().all(|c| c.is_ascii_hexdigit());
    if is_hash { &fact[..12] } else { fact }
}

fn short(hash: &str) -> &str {
    // The prefix before the last colon is the kind of hash.
    let digits = hash.rsplit_once(':').map_or(hash, |(_, digits)| digits);
    digits.get(..12).unwrap_or(digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row R6.
    #[test]
    fn only_harmless_changes_are_let_through() {
        let fingerprint = |pairs: &[(&str, &str)], data: &str| RunFingerprint {
            recipe: pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
            data: data.into(),
            ..RunFingerprint::default()
        };
        let old = fingerprint(&[("train.seed", "1"), ("train.save_steps", "5")], "aa");
        assert!(
            check_same(
                &old,
                &fingerprint(&[("train.seed", "1"), ("train.save_steps", "9")], "aa")
            )
            .is_ok()
        );
        let e = check_same(&old, &fingerprint(&[("train.seed", "2")], "bb"))
            .unwrap_err()
            .to_string();
        assert!(e.contains("train.seed: 1 -> 2") && e.contains("training rows"), "{e}");
    }

    /// Row R6.
    #[test]
    fn a_key_that_an_old_checkpoint_lacks_had_its_default() {
        let fingerprint = |pairs: &[(&str, &str)]| RunFingerprint {
            recipe: pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
            ..RunFingerprint::default()
        };
        let old = fingerprint(&[("train.seed", "1")]);
        let with = |value| fingerprint(&[("train.seed", "1"), ("train.neftune_noise_alpha", value)]);
        check_same(&old, &with("0.0")).unwrap();
        let e = check_same(&old, &with("5.0")).unwrap_err().to_string();
        assert!(e.contains("train.neftune_noise_alpha: 0.0 -> 5.0"), "{e}");
    }

    /// An earlier version of ft named other modules with the same text.
    #[test]
    fn modules_that_train_may_have_longer_names() {
        let with = |modules: &str| {
            let recipe = [("tune.lora.modules_to_save", modules), ("tune.method", "\"lora\"")];
            RunFingerprint {
                recipe: recipe.map(|(k, v)| (k.to_string(), v.to_string())).into(),
                ..RunFingerprint::default()
            }
        };
        let same = |was: &str, now: &str| check_same(&with(was), &with(now)).is_ok();
        assert!(same("[\"norm\"]", "[\"model.norm\"]"));
        assert!(same(
            "[\"norm\", \"lm_head\"]",
            "[\"lm_head\", \"language_model.norm\"]"
        ));
        for now in ["[]", "[\"lm_head\"]", "[\"model.norm\", \"lm_head\"]", "[\"q_norm\"]"] {
            assert!(!same("[\"norm\"]", now), "{now}");
        }
        assert!(!same("[]", "[\"norm\"]"));
    }

    #[test]
    fn a_key_without_effect_may_change() {
        let with = |method: &str, rank: &str, every: &str| {
            let pairs = [
                ("model.path", "\"m\""),
                ("data.train", "[\"t\"]"),
                ("tune.method", method),
                ("tune.lora.r", rank),
                ("tune.block.switch_every", every),
            ];
            RunFingerprint {
                recipe: pairs.map(|(k, v)| (k.to_string(), v.to_string())).into(),
                ..RunFingerprint::default()
            }
        };
        let (block, lora) = ("\"block\"", "\"lora\"");
        check_same(&with(block, "8", "5"), &with(block, "16", "5")).unwrap();
        check_same(&with(lora, "8", "5"), &with(lora, "8", "7")).unwrap();
        let e = check_same(&with(lora, "8", "5"), &with(lora, "16", "5")).unwrap_err();
        assert!(
            e.to_string().contains("1 difference:\n      tune.lora.r: 8 -> 16"),
            "{e}"
        );
        // The keys that follow from another one are not named.
        let e = check_same(&with(block, "8", "5"), &with(lora, "16", "\"auto\"")).unwrap_err();
        let wanted = "1 difference:\n      tune.method: \"block\" -> \"lora\"";
        assert!(e.to_string().contains(wanted), "{e}");
        assert!(!e.to_string().contains("switch_every"), "{e}");
    }

    /// Row R6.
    #[test]
    fn sources_may_move_and_keep_their_weights() {
        let fingerprint = |sources: &str, data: &str| RunFingerprint {
            recipe: [("data.sources".to_string(), sources.to_string())].into(),
            data: data.into(),
            ..RunFingerprint::default()
        };
        let source = |path: &str, weight: &str| format!("[{{ path = [\"{path}\"], weight = {weight} }}]");
        let old = fingerprint(&source("a.jsonl", "2.0"), "aa");
        check_same(&old, &fingerprint(&source("moved/a.jsonl", "2.0"), "aa")).unwrap();
        check_same(
            &old,
            &fingerprint("[{ path = [\"org/name\"], split = \"train\", weight = 2.0 }]", "aa"),
        )
        .unwrap();
        let weight = check_same(&old, &fingerprint(&source("a.jsonl", "3.0"), "aa")).unwrap_err();
        assert!(weight.to_string().contains("data.sources"), "{weight}");
        let rows = check_same(&old, &fingerprint(&source("moved/a.jsonl", "2.0"), "bb")).unwrap_err();
        assert!(rows.to_string().contains("2 differences"), "{rows}");
    }

    #[test]
    fn a_secret_that_differs_is_named_and_not_shown() {
        let with = |key: &str, seed: &str| RunFingerprint {
            recipe: [(
                "rlhf.rewards".to_string(),
                format!("[\"program:judge --api-key {key} {seed}\"]"),
            )]
            .into(),
            ..RunFingerprint::default()
        };
        let refused = |now: &RunFingerprint| check_same(&with("planted1", "7"), now).unwrap_err().to_string();
        let e = refused(&with("planted2", "7"));
        let wanted = "rlhf.rewards: a secret in it differs; give the value that `resolved.toml` of the run has";
        assert!(e.contains(wanted) && !e.contains("planted"), "{e}");
        let e = refused(&with("planted2", "8"));
        let wanted = "--api-key <secret> 7\"] -> [\"program:judge --api-key <secret> 8\"]";
        assert!(e.contains(wanted) && !e.contains("planted"), "{e}");
    }

    #[test]
    fn what_was_moved_is_known_by_its_hash() {
        let fingerprint = |path: &str, base: &str, sampled: &str| RunFingerprint {
            recipe: [("model.path".to_string(), path.to_string())].into(),
            base: base.into(),
            sampled: sampled.into(),
            ..RunFingerprint::default()
        };
        let old = fingerprint("a", "blake3-exact:11", "");
        check_same(&old, &fingerprint("b", "blake3-exact:11", "blake3:7")).unwrap();
        let e = check_same(&old, &fingerprint("b", "blake3-exact:12", "blake3:7"))
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("model.path") && e.contains("base model: hash 11 -> 12"),
            "{e}"
        );
        // A checkpoint with only the hash of a part of the weights.
        check_same(
            &fingerprint("a", "blake3:7", ""),
            &fingerprint("b", "blake3-exact:12", "blake3:7"),
        )
        .unwrap();
        assert!(
            check_same(
                &fingerprint("a", "blake3:8", ""),
                &fingerprint("a", "blake3-exact:12", "blake3:7")
            )
            .is_err()
        );
        // For random weights the path identifies the shape.
        assert!(check_same(&fingerprint("a", RANDOM, ""), &fingerprint("b", RANDOM, "")).is_err());
    }
}
