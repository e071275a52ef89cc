//! Tests of the keys for stages beyond supervised fine-tuning, and of contradictions.

use super::tests::{LEAST, bad, good};
use super::{JudgedLoss, PairLoss, PreferenceLoss};

#[test]
fn training_by_reward_needs_rewards_and_whole_groups() {
    let reward = "rlhf.rewards=exact";
    let e = bad(LEAST, &["train.stage=grpo"]);
    assert!(e.contains("`rlhf.rewards` is missing"), "{e}");
    let eight = "train.gradient_accumulation_steps=8";
    let e = bad(LEAST, &["train.stage=grpo", reward, "rlhf.num_generations=5", eight]);
    assert!(e.contains("8 answers") && e.contains("a multiple of 5"), "{e}");
    // `auto` chooses a number that fits.
    good(LEAST, &["train.stage=grpo", reward, "rlhf.num_generations=5"]);
    let e = bad(LEAST, &["train.stage=grpo", reward, "rlhf.num_generations=1"]);
    assert!(e.contains("at least 2"), "{e}");
    let e = bad(LEAST, &["train.stage=ppo", reward, "rlhf.reward_weights=[1, 2]"]);
    assert!(e.contains("2 weights") && e.contains("1, one for each"), "{e}");
    let e = bad(
        LEAST,
        &[
            "train.stage=ppo",
            reward,
            "rlhf.rollout_weights=int8",
            "rlhf.rollout_clip_min=3",
        ],
    );
    assert!(e.contains("`rlhf.rollout_clip_min` is not below"), "{e}");
    let e = bad(LEAST, &["train.stage=ppo", reward, "data.packing=true"]);
    assert!(e.contains("`data.packing` has no effect"), "{e}");
    let l = good(LEAST, &["train.stage=ppo", reward, "rlhf.num_generations=2"]);
    assert!(!l.recipe.data.packing && l.warnings.is_empty(), "{:?}", l.warnings);
    let l = good(LEAST, &["rlhf.temperature=0.5", "rlhf.ppo.gamma=0.5"]);
    assert_eq!(l.warnings.len(), 2);
    assert!(l.warnings[0].contains("`rlhf.temperature` has no effect with `train.stage = \"sft\"`"));
    let l = good(
        LEAST,
        &["train.stage=grpo", reward, "rlhf.grpo.normalize_advantages=true"],
    );
    assert!(
        l.warnings[0].contains("`rlhf.grpo.loss_type = \"dapo\"`"),
        "{:?}",
        l.warnings
    );
    // Without a penalty nothing estimates or adapts it.
    let kl = [
        "train.stage=ppo",
        reward,
        "rlhf.num_generations=2",
        "rlhf.ppo.kl_target=3",
        "rlhf.ppo.kl_horizon=20",
        "rlhf.ppo.kl_estimator=k3",
    ];
    assert!(good(LEAST, &kl).warnings.is_empty());
    let l = good(LEAST, &[&kl[..], &["rlhf.ppo.kl_coef=0"]].concat());
    let reason = "has no effect with `rlhf.ppo.kl_coef = 0`";
    assert!(
        l.warnings.len() == 3 && l.warnings.iter().all(|line| line.contains(reason)),
        "{:?}",
        l.warnings
    );
}

#[test]
fn preference_keys_belong_to_their_stages() {
    let dpo = |arguments: &[&str]| {
        let all: Vec<&str> = ["train.stage=dpo"]
            .into_iter()
            .chain(arguments.iter().copied())
            .collect();
        (good(LEAST, &all).recipe, good(LEAST, &all).warnings)
    };
    let (recipe, warnings) = dpo(&[]);
    assert_eq!(recipe.preference.loss_type, PreferenceLoss::Pair(PairLoss::Sigmoid));
    assert!(!recipe.data.packing && warnings.is_empty());
    let (_, warnings) = dpo(&["rlhf.label_smoothing=0.1"]);
    assert!(
        warnings[0].contains("`rlhf.label_smoothing` has no effect"),
        "{warnings:?}"
    );
    assert!(dpo(&["rlhf.label_smoothing=0.1", "rlhf.loss_type=robust"]).1.is_empty());
    for (arguments, want) in [
        (vec!["train.stage=dpo", "rlhf.loss_type=kto"], "has no loss `kto`"),
        (
            vec!["train.stage=kto", "train.batch_size=2", "rlhf.loss_type=ipo"],
            "has no loss `ipo`",
        ),
        (vec!["train.stage=kto"], "at least two rows"),
        (vec!["train.stage=dpo", "rlhf.loss_type=exo_pair"], "above 0"),
        (
            vec!["train.stage=dpo", "rlhf.loss_type=robust", "rlhf.label_smoothing=0.5"],
            "below 0.5",
        ),
        (
            vec![
                "train.stage=dpo",
                "rlhf.loss_type=apo_zero",
                "rlhf.f_divergence_type=forward_kl",
            ],
            "no effect with `apo_zero`",
        ),
    ] {
        let e = bad(LEAST, &arguments);
        assert!(e.contains(want) && !e.contains("faults"), "{e}");
    }
    let best = [
        "data.eval=e.jsonl",
        "train.load_best_model_at_end=true",
        "train.metric_for_best_model=perplexity",
    ];
    for of in ["train.stage=dpo", "train.label_smoothing_factor=0.1"] {
        let e = bad(LEAST, &[&best[..], &[of]].concat());
        assert!(e.contains("the evaluations have no perplexity"), "{e}");
    }
    good(LEAST, &best);
    let kto = good(LEAST, &["train.stage=kto", "rlhf.loss_type=apo_zero_unpaired"]);
    assert_eq!(kto.recipe.preference.loss_type.judged(), JudgedLoss::ApoZeroUnpaired);
    let sft = good(LEAST, &["rlhf.beta=0.3"]);
    assert!(
        sft.warnings[0].contains("no effect with `train.stage = \"sft\"`"),
        "{:?}",
        sft.warnings
    );
}

#[test]
fn rows_are_split_cached_or_streamed_where_it_has_a_meaning() {
    let dpo = "train.stage=dpo";
    let e = bad(LEAST, &[dpo, "data.long=split"]);
    assert!(e.contains("`data.long = \"split\"` has no effect"), "{e}");
    good(LEAST, &[dpo, "data.long=drop"]);
    good(LEAST, &[dpo, "data.cache=true"]);
    good(LEAST, &["train.stage=grpo", "rlhf.rewards=exact", "data.cache=true"]);
    let e = bad(LEAST, &["data.overlap=64", "data.max_length=64"]);
    assert!(e.contains("at most 63"), "{e}");
    let l = good(LEAST, &["data.overlap=5", "data.long=truncate"]);
    assert!(
        l.warnings[0].contains("`data.overlap` has no effect"),
        "{:?}",
        l.warnings
    );
    let l = good(LEAST, &["data.shuffle_window=5"]);
    assert!(
        l.warnings[0].contains("`data.shuffle_window` has no effect"),
        "{:?}",
        l.warnings
    );
    let (streaming, steps) = ("data.streaming=true", "train.max_steps=9");
    let e = bad(LEAST, &[streaming]);
    assert!(e.contains("`data.streaming` needs `train.max_steps`"), "{e}");
    let e = bad(LEAST, &[streaming, steps, "data.eval_fraction=0.1"]);
    assert!(e.contains("name a file in `data.eval`"), "{e}");
    let e = bad(LEAST, &[streaming, steps, dpo]);
    assert!(e.contains("`data.streaming` has no effect"), "{e}");
    let e = bad(LEAST, &[streaming, steps, "data.cache=true"]);
    assert!(e.contains("contradict"), "{e}");
    good(LEAST, &[streaming, steps, "data.dedup=near"]);
    assert!(
        good(LEAST, &[streaming, steps, "data.shuffle_window=5"])
            .warnings
            .is_empty()
    );
}

#[test]
fn keys_of_hub_data_sets_and_texts_have_no_effect_on_other_files() {
    let keys = [
        "data.config=main",
        "data.split=test",
        "data.revision=v1",
        "data.text_unit=line",
    ];
    let with = |train: &str, keys: &[&str]| {
        let text = format!("[model]\npath = \"m\"\n[data]\ntrain = {train}\n");
        good(&text, keys).warnings
    };
    let warned = with("\"a.jsonl\"", &keys);
    assert_eq!(warned.len(), 4, "{warned:?}");
    let reason = "has no effect with `data.train = [\"a.jsonl\"]`";
    assert!(warned.iter().all(|line| line.contains(reason)), "{warned:?}");
    for train in ["\"org/name\"", "[\"a.jsonl\", \"folder\"]", "\"data/*.txt\""] {
        assert!(with(train, &keys).is_empty(), "{train}");
    }
    assert_eq!(with("\"a.txt.gz\"", &keys).len(), 3);
    let warned = with("\"a.jsonl\"", &["data.eval_split=test", "data.eval=b.parquet"]);
    assert!(
        warned.len() == 1 && warned[0].contains("`data.eval_split`"),
        "{warned:?}"
    );
}

/// Row R2.
#[test]
fn contradictions_name_both_keys() {
    let lora = "tune.method=lora";
    for (keys, arguments) in [
        (
            ["data.eval`", "data.eval_fraction`"],
            &["data.eval=[\"e\"]", "data.eval_fraction=0.1"][..],
        ),
        (["train.eval_steps`", "data.eval`"], &["train.eval_steps=5"]),
        (
            ["tune.method ", "tune.freeze.trainable_layers"],
            &["tune.method=freeze", "tune.freeze.trainable_layers=0"],
        ),
        (
            ["tune.lora.use_dora`", "tune.lora.init_lora_weights "],
            &[lora, "tune.lora.use_dora=true", "tune.lora.init_lora_weights=corda"],
        ),
        (
            ["tune.lora.save_residual`", "tune.lora.save_rank`"],
            &[
                lora,
                "tune.lora.init_lora_weights=pissa",
                "tune.lora.save_residual=true",
                "tune.lora.save_rank=4",
            ],
        ),
        (
            ["tune.lora.layers_to_transform`", "tune.lora.target_modules`"],
            &[
                lora,
                "tune.lora.layers_to_transform=[0, 1]",
                "tune.lora.target_modules=[\".*q_proj\"]",
            ],
        ),
        (
            ["data.packing`", "train.stage "],
            &["data.packing=true", "train.stage=grpo", "rlhf.rewards=[\"numeric\"]"],
        ),
        (
            ["data.streaming`", "data.eval_fraction`"],
            &["data.streaming=true", "train.max_steps=9", "data.eval_fraction=0.1"],
        ),
        (
            ["data.streaming ", "data.cache "],
            &["data.streaming=true", "train.max_steps=9", "data.cache=true"],
        ),
        (
            ["data.overlap`", "data.max_length`"],
            &["data.overlap=64", "data.max_length=64", "data.long=split"],
        ),
    ] {
        let e = bad(LEAST, arguments);
        for key in keys {
            assert!(e.contains(&format!("`{key}")), "{key}\n{e}");
        }
    }
    // With names the layers apply.
    let named = [
        "tune.lora.layers_to_transform=[0]",
        "tune.lora.target_modules=[\"q_proj\"]",
    ];
    good(LEAST, &[&[lora][..], &named].concat());
    // A fault that no setting can undo is named with its key.
    let e = bad(LEAST, &["tune.lora.target_modules=[\"all-linear\", \"q_proj\"]"]);
    assert!(
        e.contains("`tune.lora.target_modules`") && e.contains("contradict"),
        "{e}"
    );
    let e = bad(LEAST, &["tune.lora.target_modules=[]"]);
    assert!(e.contains("is empty"), "{e}");
    // Every weight is trained in its own type: codes of frozen weights have no effect.
    let full = good(LEAST, &["tune.method=full", "memory.frozen_weights=nf4"]);
    assert!(
        full.warnings.len() == 1
            && full.warnings[0].contains("`memory.frozen_weights`")
            && full.warnings[0].contains("`tune.method"),
        "{:?}",
        full.warnings
    );
    good("[model]\npath = \"shape:tiny\"\n", &[]);
}
