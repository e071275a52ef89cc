//! Tests of imported optimizers and schedules.

use super::*;
use crate::recipe;

const LLAMA_FACTORY: &str = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: rows.jsonl\n";
const AXOLOTL: &str = "base_model: m\nadapter: lora\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\n";
const TRL: &str = "model_name_or_path: m\ndataset_name: rows.jsonl\ncompletion_only_loss: true\n";
const MLX: &str = "model: m\ntrain: true\nfine_tune_type: lora\ndata: rows\nnum_layers: -1\n";

/// The import of a file of these keys, whose recipe must be complete.
fn read(head: &str, more: &str) -> ImportedRecipe {
    let imported = import(&format!("{head}{more}"), "c.yaml", None).unwrap();
    let parsed = recipe::parse(&imported.text, "r.toml", &["data.train=rows.jsonl".into()]);
    assert!(
        parsed.is_ok(),
        "{}\n{:?}",
        imported.text,
        parsed.err().map(|e| e.to_string())
    );
    imported
}

/// The value of a key of the recipe, as TOML.
fn value(imported: &ImportedRecipe, table: &str, name: &str) -> Option<String> {
    let document: toml_edit::DocumentMut = imported.text.parse().unwrap();
    let value = document.get(table)?.get(name)?.as_value()?;
    let mut value = value.clone();
    value.decor_mut().clear();
    Some(value.to_string())
}

fn schedule(imported: &ImportedRecipe, name: &str) -> Option<String> {
    value(imported, "schedule", name)
}

/// Why a key is left.
fn why<'a>(imported: &'a ImportedRecipe, key: &str) -> Option<&'a str> {
    let left = imported.left.iter().find(|(name, _)| name == key);
    left.map(|(_, why)| why.as_str())
}

#[test]
fn only_adamw_and_lion_in_8_bits_have_a_counterpart() {
    for (name, own) in [
        ("adamw_8bit", "\"adamw\""),
        ("adamw_bnb_8bit", "\"adamw\""),
        ("adamw_torch_8bit", "\"adamw\""),
        ("ao_adamw_8bit", "\"adamw\""),
        ("paged_adamw_8bit", "\"adamw\""),
        ("AdamW8bit", "\"adamw\""),
        ("lion_8bit", "\"lion\""),
        ("paged_lion_8bit", "\"lion\""),
    ] {
        for (head, key) in [(LLAMA_FACTORY, "optim"), (AXOLOTL, "optimizer")] {
            let imported = read(head, &format!("{key}: {name}\n"));
            assert_eq!(value(&imported, "optimizer", "name").as_deref(), Some(own), "{name}");
            assert_eq!(
                value(&imported, "optimizer", "state").as_deref(),
                Some("\"int8\""),
                "{name}"
            );
            assert_eq!(why(&imported, key), None, "{name}");
        }
    }
    for (name, reason) in [
        ("galore_adamw", "`tune.method = \"block\"`"),
        ("galore_adamw_8bit", "`tune.method = \"block\"`"),
        ("galore_adamw_8bit_layerwise", "`tune.method = \"block\"`"),
        ("q_galore_adamw8bit", "`tune.method = \"block\"`"),
        ("apollo_adamw", "`tune.method = \"block\"`"),
        ("no_such_adamw_8bit", "is not a value of"),
    ] {
        let imported = read(TRL, &format!("optim: {name}\n"));
        assert_eq!(value(&imported, "optimizer", "name"), None, "{name}");
        assert_eq!(value(&imported, "optimizer", "state"), None, "{name}");
        assert!(
            why(&imported, "optim").is_some_and(|why| why.contains(reason)),
            "{:?}",
            imported.left
        );
    }
    // Plain Lion has 32 bits in transformers.
    let imported = read(TRL, "optim: lion_32bit\n");
    assert_eq!(value(&imported, "optimizer", "name").as_deref(), Some("\"lion\""));
    assert_eq!(value(&imported, "optimizer", "state"), None);
}

/// `get_scheduler("constant", num_warmup_steps=2)` of transformers gives 1.0 in each step.
#[test]
fn constant_has_no_warmup_in_transformers() {
    for (head, key) in [
        (LLAMA_FACTORY, "lr_scheduler_type"),
        (TRL, "lr_scheduler_type"),
        (AXOLOTL, "lr_scheduler"),
    ] {
        for warmup in [
            "",
            "warmup_ratio: 0.03\n",
            "warmup_steps: 20\n",
            "warmup_steps: 20\nwarmup_ratio: 0.1\n",
        ] {
            for text in [
                format!("{key}: constant\n{warmup}"),
                format!("{warmup}{key}: constant\n"),
            ] {
                let imported = read(head, &text);
                assert_eq!(schedule(&imported, "name").as_deref(), Some("\"constant\""), "{text}");
                assert_eq!(schedule(&imported, "warmup_ratio").as_deref(), Some("0.0"), "{text}");
                assert_eq!(schedule(&imported, "warmup_steps"), None, "{text}");
            }
        }
        let imported = read(head, &format!("{key}: constant_with_warmup\nwarmup_steps: 20\n"));
        assert_eq!(schedule(&imported, "name").as_deref(), Some("\"constant\""));
        assert_eq!(schedule(&imported, "warmup_steps").as_deref(), Some("20"));
        assert_eq!(schedule(&imported, "warmup_ratio"), None);
    }
}

#[test]
fn of_steps_and_ratio_of_a_warmup_the_one_that_the_tool_uses_is_taken() {
    type Warmup = (Option<String>, Option<String>);
    let by_steps = |n: &str| -> Warmup { (Some(n.to_string()), None) };
    let by_ratio: Warmup = (None, Some("0.1".to_string()));
    for (head, of_none) in [
        (LLAMA_FACTORY, by_ratio.clone()),
        (TRL, by_ratio),
        // Axolotl takes the steps, also 0 of them.
        (AXOLOTL, by_steps("0")),
    ] {
        for (steps, wanted) in [("20", by_steps("20")), ("0", of_none)] {
            let imported = read(
                head,
                &format!("warmup_ratio: 0.1\nwarmup_steps: {steps}\nlr_scheduler: linear\n"),
            );
            let found = (schedule(&imported, "warmup_steps"), schedule(&imported, "warmup_ratio"));
            assert_eq!(found, wanted, "{head}{steps}");
        }
    }
}

#[test]
fn arguments_of_schedules_are_read_with_the_key_of_each_tool() {
    for (head, key) in [(LLAMA_FACTORY, "lr_scheduler_type"), (AXOLOTL, "lr_scheduler")] {
        let restarts = "cosine_with_restarts\nlr_scheduler_kwargs:\n  num_cycles: 3\n";
        let imported = read(head, &format!("{key}: {restarts}"));
        assert_eq!(
            schedule(&imported, "num_cycles").as_deref(),
            Some("3"),
            "{}",
            imported.text
        );
        assert!(why(&imported, "lr_scheduler_kwargs.num_cycles").is_none());
        let stable = "warmup_stable_decay\nlr_scheduler_kwargs:\n  num_decay_steps: 20\n  min_lr_ratio: 0.1\n  \
                      warmup_type: linear\n  decay_type: 1-sqrt\n";
        let imported = read(head, &format!("max_steps: 300\n{key}: {stable}"));
        assert_eq!(schedule(&imported, "name").as_deref(), Some("\"wsd\""));
        assert_eq!(schedule(&imported, "min_lr_ratio").as_deref(), Some("0.1"));
        assert_eq!(
            schedule(&imported, "decay_ratio").as_deref(),
            Some("0.06666666666666667")
        );
        assert!(why(&imported, "lr_scheduler_kwargs.decay_type").is_some());
        assert!(why(&imported, "lr_scheduler_kwargs.warmup_type").is_none());
        let imported = read(head, &format!("{key}: {stable}"));
        assert_eq!(schedule(&imported, "decay_ratio"), None);
        let reason = why(&imported, "lr_scheduler_kwargs.num_decay_steps").unwrap();
        assert!(reason.contains("write `schedule.decay_ratio`"), "{reason}");
        // Other schedules have no such argument.
        let imported = read(
            head,
            &format!("{key}: cosine\nlr_scheduler_kwargs:\n  num_cycles: 0.5\n  min_lr_ratio: 0.1\n"),
        );
        assert!(schedule(&imported, "num_cycles").is_none() && schedule(&imported, "min_lr_ratio").is_none());
        assert!(why(&imported, "lr_scheduler_kwargs.num_cycles").is_some());
    }
}

#[test]
fn what_mlx_does_by_default_and_ft_does_not_is_told() {
    for (more, part) in [
        ("", "no bias correction"),
        ("optimizer: adam\n", "no bias correction"),
        ("optimizer: adamw\n", "no bias correction"),
        ("optimizer: adafactor\n", "`relative_step`"),
        (
            "optimizer: adafactor\noptimizer_config:\n  adafactor:\n    relative_step: false\n",
            "`scale_parameter`",
        ),
    ] {
        let imported = read(MLX, &format!("iters: 100\n{more}"));
        let reason = why(&imported, "optimizer").unwrap_or_default();
        assert!(reason.contains(part), "{more}: {:?}", imported.left);
    }
    for more in [
        "optimizer: adamw\noptimizer_config:\n  adamw:\n    bias_correction: true\n",
        "optimizer: adafactor\noptimizer_config:\n  adafactor:\n    relative_step: false\n    scale_parameter: false\n",
        "optimizer: sgd\n",
    ] {
        let imported = read(MLX, &format!("iters: 100\n{more}"));
        assert!(imported.left.is_empty(), "{more}: {:?}", imported.left);
    }
}

#[test]
fn a_decay_of_mlx_that_does_not_end_with_the_run_is_told() {
    let decay = |iters: &str, schedule: &str| {
        let text = format!("optimizer: sgd\n{iters}lr_schedule:\n  name: {schedule}\n");
        let imported = read(MLX, &text);
        why(&imported, "lr_schedule: arguments").map(str::to_string)
    };
    let shorter = decay(
        "iters: 100\n",
        "cosine_decay\n  warmup: 10\n  arguments: [1e-4, 50, 1e-6]",
    );
    assert!(
        shorter
            .as_deref()
            .is_some_and(|why| why.contains("50 steps") && why.contains("90 steps")),
        "{shorter:?}"
    );
    assert_eq!(
        decay(
            "iters: 100\n",
            "cosine_decay\n  warmup: 10\n  arguments: [1e-4, 90, 1e-6]"
        ),
        None
    );
    assert_eq!(decay("", "cosine_decay\n  arguments: [1e-4, 1000]"), None);
    assert!(decay("iters: 90\n", "linear_schedule\n  arguments: [1e-4, 0.0, 91]").is_some());
    assert_eq!(
        decay("iters: 90\n", "linear_schedule\n  arguments: [1e-4, 0.0, 90]"),
        None
    );
}

#[test]
fn masks_of_badam_and_the_rate_of_embeddings_have_answers() {
    let badam = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\nuse_badam: true\ndataset: rows.jsonl\n";
    let imported = read(badam, "badam_mode: ratio\nbadam_mask_mode: scatter\n");
    let document: toml_edit::DocumentMut = imported.text.parse().unwrap();
    assert_eq!(
        document["tune"]["block"]["mask"].as_str(),
        Some("scattered"),
        "{}",
        imported.text
    );
    assert_eq!(why(&imported, "badam_mask_mode"), None);
    let unsloth = "model_name: m\nrandom_state: 1\ndataset_text_field: text\n";
    let imported = read(unsloth, "embedding_learning_rate: 5e-6\n");
    let reason = why(&imported, "embedding_learning_rate").unwrap_or_default();
    assert!(reason.contains("one learning rate for all parameters"), "{reason}");
}
