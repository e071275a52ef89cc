//! Tests of the configurations of TRL's trainers, and of those that Unsloth and the SimPO repository make of them.

use super::*;

/// The recipe of a configuration with these keys; it must be valid (with a reward, if the stage needs one).
fn trl(more: &str) -> (Vec<String>, ImportedRecipe) {
    let text = format!("{{\"model_name_or_path\": \"org/base\", \"dataset_name\": \"rows.jsonl\", {more}}}");
    let found = lines(&text, "trl.json");
    let online = ["stage = \"grpo\"", "stage = \"ppo\""];
    let rewards = online.iter().any(|stage| found.0.iter().any(|line| line == stage));
    let arguments: Vec<String> = rewards.then(|| "rlhf.rewards=exact".to_string()).into_iter().collect();
    let parsed = recipe::parse(&found.1.text, "r.toml", &arguments);
    assert!(
        parsed.is_ok(),
        "{}\n{}",
        found.1.text,
        parsed.err().map(|e| e.to_string()).unwrap_or_default()
    );
    found
}

/// The recipe does not have these keys.
fn lacks(found: &(Vec<String>, ImportedRecipe), keys: &[&str]) {
    for key in keys {
        let start = format!("{key} = ");
        assert!(
            !found.0.iter().any(|line| line.starts_with(&start)),
            "{key}\n{}",
            found.1.text
        );
    }
}

const TEACHER: &str = "\"teacher_model_name_or_path\": \"org/big\"";

#[test]
fn the_stage_of_trl_is_in_its_keys() {
    for (text, stage) in [
        ("\"beta\": 0.1, \"loss_type\": \"ipo\"", "dpo"),
        ("\"num_generations\": 4, \"max_completion_length\": 64", "grpo"),
        ("\"undesirable_weight\": 1.5", "kto"),
        ("\"center_rewards_coefficient\": 0.01", "reward"),
        (
            "\"teacher_model_name_or_path\": \"org/big\", \"temperature\": 0.9",
            "distill",
        ),
        ("\"cpo_alpha\": 0.0, \"loss_type\": \"simpo\"", "simpo"),
    ] {
        let text = format!("{{\"model_name_or_path\": \"org/base\", \"dataset_name\": \"rows.jsonl\", {text}}}");
        let found = import(&text, "trl.json", None).unwrap();
        assert!(found.text.contains(&format!("stage = \"{stage}\"")), "{}", found.text);
        assert!(found.left.is_empty(), "{stage}: {:?}", found.left);
    }
    let found = keys(
        "{\"model_name_or_path\": \"org/base\", \"dataset_name\": \"org/rows\", \"dataset_train_split\": \"train_sft\", \"dataset_test_split\": \
         \"test_sft\", \"eval_strategy\": \"steps\", \"eval_steps\": 20, \"metric_for_best_model\": \"loss\", \"load_best_model_at_end\": true,\
         \"lr_scheduler_type\": \"polynomial\", \"lr_scheduler_kwargs\": {\"lr_end\": 1e-7, \"power\": 2.0}, \"learning_rate\": 1e-5,\
         \"use_peft\": true, \"report_to\": [\"tensorboard\", \"wandb\"]}",
        "trl.json",
    );
    has(
        &found,
        &[
            "eval = \"org/rows\"",
            "split = \"train_sft\"",
            "eval_split = \"test_sft\"",
            "metric_for_best_model = \"eval_loss\"",
            "min_lr_ratio = 0.01",
            "power = 2.0",
            "lora_dropout = 0.05",
            "report_to = \"tensorboard\"",
        ],
    );
    leaves(&found, &["report_to: wandb", "assistant_only_loss"]);
}

#[test]
fn what_trl_and_unsloth_have_and_ft_has_not_is_listed_with_the_reason() {
    notes(
        "{\"model_name_or_path\": \"org/base\", \"dataset_name\": \"rows.jsonl\", \"use_peft\": true, \"completion_only_loss\": true,\
         \"push_to_hub\": true, \"report_to\": [\"tensorboard\", \"wandb\"], \"lr_scheduler_kwargs\": {\"last_epoch\": 3},\
         \"attn_implementation\": \"sdpa\", \"eval_steps\": 20, \"no_such_option\": 5}",
        "trl.json",
        &[
            ("push_to_hub", "a run uploads nothing"),
            ("report_to: wandb", "`tensorboard` writes an event file"),
            ("lr_scheduler_kwargs.last_epoch", "only the keys of `[schedule]`"),
            ("attn_implementation", "attention, loss and updates are always fused"),
            ("no_such_option", "ft has no such key"),
            ("eval_steps", "there are no rows to evaluate on"),
        ],
    );
    notes(
        "model_name: org/base\nmax_seq_length: 2048\nload_in_4bit: true\nuse_gradient_checkpointing: unsloth\n\
         train_on_responses_only: true\ndataset: rows.jsonl\nlora_r: 16\nuse_rslora: false\nfast_inference: true\ndisable_tqdm: true\n",
        "unsloth.yaml",
        &[
            ("fast_inference", "attention, loss and updates are always fused"),
            ("disable_tqdm", "progress goes to standard error"),
        ],
    );
}

#[test]
fn the_temperature_of_gkd_is_that_of_the_answers() {
    let found = trl(&format!(
        "{TEACHER}, \"temperature\": 0.7, \"lmbda\": 0.25, \"beta\": 0.0, \"max_new_tokens\": 64, \"packing\": true"
    ));
    has(
        &found,
        &[
            "stage = \"distill\"",
            "teacher = \"org/big\"",
            "rollout_temperature = 0.7",
            "lmbda = 0.25",
            "beta = 0.0",
            "max_new_tokens = 64",
            "learning_rate = 2e-5",
            "max_length = 1024",
            "train_on = \"completion\"",
            "packing = false",
        ],
    );
    lacks(&found, &["temperature"]);
    leaves(&found, &["packing"]);
    // GKD too if no key says which trainer it is.
    for (more, temperature) in [("", "0.9"), (", \"temperature\": 0.5", "0.5")] {
        let found = trl(&format!("{TEACHER}{more}"));
        has(
            &found,
            &["lmbda = 0.5", &format!("rollout_temperature = {temperature}")],
        );
        lacks(&found, &["temperature", "beta", "max_new_tokens"]);
        leaves(&found, &[]);
    }
}

#[test]
fn the_temperature_of_the_distillation_trainer_is_that_of_both() {
    let found = trl(&format!(
        "{TEACHER}, \"temperature\": 0.8, \"max_completion_length\": 2000, \"top_k\": 0, \"top_p\": 0.9, \"use_vllm\": true, \
         \"teacher_model_revision\": \"v2\""
    ));
    has(
        &found,
        &[
            "stage = \"distill\"",
            "teacher_revision = \"v2\"",
            "temperature = 0.8",
            "rollout_temperature = 0.8",
            "max_new_tokens = 2000",
            "lmbda = 1.0",
            "beta = 1.0",
            "learning_rate = 1e-6",
            // With room for the prompts.
            "max_length = 3024",
        ],
    );
    leaves(&found, &["top_p", "use_vllm"]);
    let found = trl(&format!("{TEACHER}, \"top_p\": 1.0"));
    has(&found, &["lmbda = 1.0", "max_new_tokens = 512"]);
    // `distill.top_k` is something else.
    lacks(
        &found,
        &["temperature", "rollout_temperature", "max_length", "top_k", "train_on"],
    );
    leaves(&found, &[]);
}

#[test]
fn rl_of_trl_has_its_defaults() {
    let grpo = trl("\"num_generations\": 4");
    has(
        &grpo,
        &["stage = \"grpo\"", "max_completion_length = 512", "num_generations = 4"],
    );
    lacks(&grpo, &["max_length", "loss_type", "beta"]);
    has(
        &trl("\"num_generations\": 4, \"max_completion_length\": 3000"),
        &["max_completion_length = 3000", "max_length = 4024"],
    );
    let prompts = trl("\"num_generations\": 4, \"max_prompt_length\": 512, \"max_completion_length\": 1024");
    has(&prompts, &["max_completion_length = 1024", "max_length = 1536"]);
    leaves(&prompts, &[]);
    let rloo = trl("\"normalize_advantages\": true");
    has(
        &rloo,
        &[
            "stage = \"grpo\"",
            "loss_type = \"rloo\"",
            "normalize_advantages = true",
            "num_generations = 2",
            "beta = 0.05",
            "max_completion_length = 512",
            "learning_rate = 1e-6",
        ],
    );
    let ppo = trl("\"kl_coef\": 0.1");
    has(
        &ppo,
        &[
            "stage = \"ppo\"",
            "kl_coef = 0.1",
            "num_iterations = 4",
            "num_generations = 1",
            "max_completion_length = 53",
            "temperature = 0.7",
            "learning_rate = 3e-6",
        ],
    );
    has(
        &trl("\"num_ppo_epochs\": 2, \"response_length\": 100, \"temperature\": 0.5"),
        &["num_iterations = 2", "max_completion_length = 100", "temperature = 0.5"],
    );
}

#[test]
fn sft_of_trl_cuts_long_rows_and_shuffles() {
    let sft = trl("\"completion_only_loss\": true, \"shuffle_dataset\": false, \"loss_type\": \"nll\"");
    has(&sft, &["long = \"truncate\"", "max_length = 1024", "num_epochs = 3"]);
    lacks(&sft, &["shuffle", "dtype", "loss_type"]);
    leaves(&sft, &[]);
    for (strategy, long) in [("bfd", "truncate"), ("bfd_split", "split")] {
        let found = trl(&format!(
            "\"completion_only_loss\": true, \"packing\": true, \"packing_strategy\": \"{strategy}\""
        ));
        has(&found, &["packing = true", &format!("long = \"{long}\"")]);
        leaves(&found, &[]);
    }
    for (keys, dtype) in [
        ("\"bf16\": false", "f32"),
        ("\"bf16\": false, \"fp16\": true", "f16"),
        ("\"bf16\": false, \"torch_dtype\": \"bfloat16\"", "bf16"),
    ] {
        has(&trl(keys), &[&format!("dtype = \"{dtype}\"")]);
    }
}

#[test]
fn preferences_of_trl_have_its_defaults() {
    let kto = trl("\"desirable_weight\": 1.5");
    has(&kto, &["stage = \"kto\"", "shuffle = false", "learning_rate = 1e-6"]);
    let kto = trl("\"desirable_weight\": 1.5, \"train_sampling_strategy\": \"random\"");
    has(&kto, &["shuffle = true"]);
    leaves(&kto, &[]);
    has(
        &trl("\"center_rewards_coefficient\": 0.01"),
        &["stage = \"reward\"", "num_epochs = 3", "learning_rate = 1e-4"],
    );
    // A list with one loss says the stage as its name does.
    has(
        &trl("\"loss_type\": [\"ipo\"]"),
        &["stage = \"dpo\"", "loss_type = \"ipo\"", "learning_rate = 1e-6"],
    );
}

#[test]
fn mixtures_of_losses_and_alpha_po_are_told() {
    for more in ["", "\"beta\": 0.1, "] {
        let found = trl(&format!(
            "{more}\"loss_type\": [\"sigmoid\", \"sft\"], \"loss_weights\": [1.0, 0.5]"
        ));
        has(&found, &["stage = \"dpo\""]);
        lacks(&found, &["loss_type"]);
        leaves(&found, &["loss_type", "loss_weights"]);
        assert!(
            found.1.left[0].1.contains("ft trains with one loss"),
            "{:?}",
            found.1.left
        );
    }
    let found = trl("\"loss_type\": \"simpo\", \"alpha\": 0.25");
    leaves(&found, &["alpha"]);
    assert!(found.1.left[0].1.contains("no AlphaPO"), "{:?}", found.1.left);
    leaves(&trl("\"loss_type\": \"simpo\", \"alpha\": 0.0"), &[]);
}

/// `disable_dropout` also holds for adapters.
#[test]
fn most_trainers_of_trl_have_no_dropout() {
    for (keys, dropout) in [
        ("\"beta\": 0.1", "0.0"),
        ("\"beta\": 0.1, \"lora_dropout\": 0.1", "0.0"),
        (
            "\"beta\": 0.1, \"lora_dropout\": 0.1, \"disable_dropout\": false",
            "0.1",
        ),
        ("\"beta\": 0.1, \"disable_dropout\": false", "0.05"),
        ("\"num_generations\": 4, \"lora_dropout\": 0.1", "0.1"),
        (
            "\"num_generations\": 4, \"lora_dropout\": 0.1, \"disable_dropout\": true",
            "0.0",
        ),
    ] {
        let found = trl(&format!("\"use_peft\": true, {keys}"));
        has(&found, &[&format!("lora_dropout = {dropout}")]);
        leaves(&found, &[]);
    }
}

#[test]
fn cpo_has_a_term_of_cross_entropy_unless_it_is_another_tools_simpo() {
    let found = trl("\"loss_type\": \"simpo\", \"simpo_gamma\": 1.0");
    has(&found, &["stage = \"simpo\"", "simpo_gamma = 1.0", "cpo_alpha = 1.0"]);
    leaves(&found, &[]);
    // The losses of CPO that are not SimPO's.
    for loss in ["", ", \"loss_type\": \"hinge\"", ", \"loss_type\": \"sigmoid\""] {
        let found = trl(&format!("\"cpo_alpha\": 0.5{loss}"));
        has(&found, &["cpo_alpha = 0.5"]);
        lacks(&found, &["loss_type"]);
        leaves(&found, &["loss_type"]);
    }
    let factory = keys(
        "model_name_or_path: org/base\nstage: dpo\nfinetuning_type: lora\npref_loss: simpo\ndataset: rows.json\n",
        "simpo.yaml",
    );
    has(&factory, &["stage = \"simpo\""]);
    lacks(&factory, &["cpo_alpha"]);
    let axolotl = keys(
        "base_model: org/base\nrl: simpo\nsimpo_gamma: 0.7\ndatasets:\n  - path: rows.jsonl\n",
        "simpo.yml",
    );
    has(&axolotl, &["stage = \"simpo\"", "simpo_gamma = 0.7", "cpo_alpha = 1.0"]);
}

#[test]
fn the_margin_of_the_simpo_repository_is_a_multiple_of_beta() {
    let found = trl("\"beta\": 2.5, \"gamma_beta_ratio\": 0.55, \"loss_type\": \"sigmoid\", \"sft_weight\": 0.25");
    has(
        &found,
        &[
            "stage = \"simpo\"",
            "beta = 2.5",
            "simpo_gamma = 1.375",
            "cpo_alpha = 0.25",
            "learning_rate = 5e-5",
            "max_length = 512",
        ],
    );
    leaves(&found, &[]);
    let found = trl("\"gamma_beta_ratio\": 0.3");
    has(&found, &["beta = 2.0", "simpo_gamma = 0.6", "cpo_alpha = 0.0"]);
    leaves(&found, &[]);
    let found = trl("\"gamma_beta_ratio\": 0.3, \"loss_type\": \"hinge\"");
    leaves(&found, &["loss_type"]);
}

#[test]
fn a_lowest_rate_becomes_a_part_of_the_highest_one() {
    const SFT: &str = "\"completion_only_loss\": true, \"lr_scheduler_type\": \"cosine\"";
    for name in ["min_lr", "lr_end"] {
        let found = trl(&format!("{SFT}, \"{name}\": 1e-6, \"learning_rate\": 1e-5"));
        has(&found, &["min_lr_ratio = 0.1", "learning_rate = 1e-5"]);
        leaves(&found, &[]);
        let found = trl(&format!("{SFT}, \"{name}\": 1e-6"));
        lacks(&found, &["min_lr_ratio"]);
        leaves(&found, &[name]);
        assert!(found.1.left[0].1.contains("no `learning_rate`"), "{:?}", found.1.left);
    }
    let found = trl(&format!("{SFT}, \"lr_scheduler_kwargs\": {{\"min_lr\": 1e-6}}"));
    leaves(&found, &["lr_scheduler_kwargs.min_lr"]);
}

#[test]
fn a_power_of_the_loss_scale_becomes_the_scale() {
    for text in [
        "{\"model_name_or_path\": \"m\", \"fp16\": true, \"initial_scale_power\": 12}",
        "{\"model_name_or_path\": \"m\", \"fp16\": {\"initial_scale_power\": 12}}",
    ] {
        has(&lines(text, "ds.json"), &["loss_scale = 4096.0"]);
    }
    let found = lines(
        "{\"model_name_or_path\": \"m\", \"initial_scale_power\": 1.5}",
        "ds.json",
    );
    lacks(&found, &["loss_scale"]);
    assert!(found.1.left[0].1.contains("2 to the power"), "{:?}", found.1.left);
}
