//! Tests of the preference and RL stages of LLaMA-Factory and Axolotl.

use super::*;

#[test]
fn preferences_of_llama_factory_are_trained_without_dropout() {
    const LORA: &str = "model_name_or_path: org/base\nfinetuning_type: lora\nlora_dropout: 0.1\ndataset: rows.json\n";
    for (stage, dropout) in [
        ("stage: sft", "0.1"),
        ("stage: rm", "0.1"),
        ("stage: dpo", "0.0"),
        ("stage: dpo\npref_loss: ipo", "0.0"),
        ("stage: dpo\npref_loss: simpo", "0.0"),
        ("stage: kto", "0.0"),
    ] {
        let found = keys(&format!("{LORA}{stage}\n"), "lf.yaml");
        has(&found, &[&format!("lora_dropout = {dropout}")]);
        leaves(&found, &[]);
    }
    const ROWS: &str = "base_model: org/base\nadapter: lora\nmicro_batch_size: 2\nlora_dropout: 0.1\ndatasets:\n  - path: rows.jsonl\n";
    for (stage, dropout) in [
        ("", "0.1"),
        ("rl: dpo\n", "0.0"),
        ("rl: kto\n", "0.0"),
        ("rl: orpo\n", "0.0"),
    ] {
        let found = keys(&format!("{ROWS}{stage}"), "axolotl.yml");
        has(&found, &[&format!("lora_dropout = {dropout}")]);
    }
    // Without dropout there is nothing to say.
    let none = LORA.replace("0.1", "0.0");
    let found = keys(&format!("{none}stage: dpo\n"), "lf.yaml");
    has(&found, &["lora_dropout = 0.0"]);
    assert!(!found.1.text.contains("turns dropout off"), "{}", found.1.text);
}

#[test]
fn losses_of_llama_factory_that_are_other_ones_in_ft_are_told() {
    let found = |more: &str| {
        let head = "model_name_or_path: org/base\nstage: dpo\nfinetuning_type: lora\ndataset: rows.json\n";
        keys(&format!("{head}{more}"), "lf.yaml")
    };
    for loss in ["", "pref_loss: sigmoid\n"] {
        let smoothed = found(&format!("dpo_label_smoothing: 0.1\n{loss}"));
        leaves(&smoothed, &["dpo_label_smoothing"]);
        let why = &smoothed.1.left[0].1;
        assert!(why.contains("conservative DPO") && why.contains("\"robust\""), "{why}");
        assert!(!smoothed.1.text.contains("label_smoothing ="), "{}", smoothed.1.text);
        leaves(&found(&format!("dpo_label_smoothing: 0.0\n{loss}")), &[]);
    }
    let robust = found("pref_loss: robust\ndpo_label_smoothing: 0.1\n");
    has(&robust, &["loss_type = \"robust\"", "label_smoothing = 0.1"]);
    leaves(&robust, &[]);
    let orpo = found("pref_loss: orpo\n");
    has(&orpo, &["stage = \"orpo\""]);
    leaves(&orpo, &["pref_loss"]);
    assert!(orpo.1.left[0].1.contains("over the prompts too"), "{:?}", orpo.1.left);
}

#[test]
fn the_beta_of_axolotl_is_that_of_the_stage() {
    // It has no rewards.
    let found = |more: &str| {
        let head = "base_model: org/base\ndatasets:\n  - path: rows.jsonl\n";
        lines(&format!("{head}{more}"), "axolotl.yml")
    };
    let has_beta = |found: &(Vec<String>, ImportedRecipe), table: &str, beta: &str| {
        assert!(
            found.1.text.contains(&format!("[{table}]\nbeta = {beta} ")),
            "{}",
            found.1.text
        );
        assert_eq!(found.1.text.matches("\nbeta = ").count(), 1, "{}", found.1.text);
        leaves(found, &[]);
    };
    has_beta(&found("rl: grpo\nrl_beta: 0.04\n"), "rlhf.grpo", "0.04");
    has_beta(&found("rl: grpo\nrl_beta: 0.0\n"), "rlhf.grpo", "0.0");
    // The table goes first.
    has_beta(
        &found("rl: grpo\nrl_beta: 0.0\ntrl:\n  beta: 0.01\n"),
        "rlhf.grpo",
        "0.01",
    );
    has_beta(&found("rl: dpo\nrl_beta: 0.2\n"), "rlhf", "0.2");
    has_beta(&found("rl: dpo\nrl_beta: 0.2\ntrl:\n  beta: 0.3\n"), "rlhf", "0.3");
}
