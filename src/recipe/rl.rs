//! The keys of `rlhf` for the RL stages: checks of combinations, and the typed table.

use super::check::Values;
use super::types::*;
use crate::base::Error;

/// Errors of the table, each with the keys involved.
pub fn faults(values: &Values) -> Vec<(&'static [&'static str], Error)> {
    let mut out: Vec<(&'static [&'static str], Error)> = Vec::new();
    let stage = values.text("train.stage");
    if !applies(values) {
        return out;
    }
    let whole = |path: &str| values.integer(path).unwrap_or(1).max(1);
    if values.list("rlhf.rewards").is_empty() {
        out.push((
            &["rlhf.rewards"],
            Error::usage("`rlhf.rewards` is missing: the stage needs at least one reward")
                .hint("write, for example, `[rlhf] rewards = [\"numeric\"]`"),
        ));
    }
    let (rewards, weights) = (values.list("rlhf.rewards"), values.numbers("rlhf.reward_weights"));
    if !weights.is_empty() && weights.len() != rewards.len() {
        out.push((
            &["rlhf.reward_weights", "rlhf.rewards"],
            Error::usage("`rlhf.reward_weights` and `rlhf.rewards` have different lengths")
                .found(format!("{} weights", weights.len()))
                .expected(format!("{}, one for each reward", rewards.len())),
        ));
    }
    let rest = whole("train.batch_size") * whole("rlhf.num_mini_batches");
    let answers = rest * whole("train.gradient_accumulation_steps");
    let group = whole("rlhf.num_generations");
    // With `auto`, gradient accumulation is chosen so that the groups are complete.
    if answers % group != 0 && !values.is_auto("train.gradient_accumulation_steps") {
        out.push((
            &[
                "rlhf.num_generations",
                "train.batch_size",
                "train.gradient_accumulation_steps",
                "rlhf.num_mini_batches",
            ],
            Error::usage("the number of answers of a rollout is not a multiple of `rlhf.num_generations`")
                .found(format!(
                    "{answers} answers (batch_size × gradient_accumulation_steps × num_mini_batches)"
                ))
                .expected(format!("a multiple of {group}")),
        ));
    }
    if stage == "grpo" && group < 2 {
        out.push((
            &["rlhf.num_generations", "train.stage"],
            Error::usage("`train.stage = \"grpo\"` compares the answers of a group")
                .found("`rlhf.num_generations = 1`")
                .expected("at least 2"),
        ));
    }
    let (max, min) = (
        values.number("rlhf.rollout_clip_max"),
        values.number("rlhf.rollout_clip_min"),
    );
    if min >= max {
        out.push((
            &["rlhf.rollout_clip_min", "rlhf.rollout_clip_max"],
            Error::usage("`rlhf.rollout_clip_min` is not below `rlhf.rollout_clip_max`")
                .found(format!("{min} and {max}")),
        ));
    }
    if values.flag("data.packing") && values.entry("data.packing").is_some_and(|e| e.written()) {
        out.push((
            &["data.packing", "train.stage"],
            Error::usage(format!(
                "`data.packing` has no meaning with `train.stage = \"{stage}\"`"
            ))
            .hint("remove it: `train.batch_size` answers are always concatenated in one sequence"),
        ));
    }
    out
}

/// True if the recipe has an RL stage.
pub fn applies(values: &Values) -> bool {
    ["grpo", "ppo"].contains(&values.text("train.stage"))
}

/// Returns the reason if a key of the table has no effect.
pub fn unused(values: &Values, path: &str) -> Option<String> {
    let text = |path: &str| format!("{path} = \"{}\"", values.text(path));
    let reinforced = applies(values);
    let rloo = values.text("rlhf.grpo.loss_type") == "rloo";
    match path {
        "rlhf.rollout_correction" | "rlhf.rollout_clip_max" | "rlhf.rollout_clip_min"
            if values.text("rlhf.rollout_weights") == "exact" =>
        {
            Some(text("rlhf.rollout_weights"))
        }
        "rlhf.rollout_clip_max" | "rlhf.rollout_clip_min" if values.text("rlhf.rollout_correction") == "none" => {
            Some(text("rlhf.rollout_correction"))
        }
        "rlhf.grpo.normalize_advantages" if !rloo => Some(text("rlhf.grpo.loss_type")),
        "rlhf.grpo.importance_sampling_level" | "rlhf.grpo.scale_rewards" | "rlhf.grpo.use_bias_correction_kl"
            if rloo =>
        {
            Some(text("rlhf.grpo.loss_type"))
        }
        "rlhf.grpo.use_bias_correction_kl" if values.number("rlhf.grpo.beta") == 0.0 => {
            Some("rlhf.grpo.beta = 0".into())
        }
        "rlhf.ppo.kl_horizon" if values.number("rlhf.ppo.kl_target") == 0.0 => Some("rlhf.ppo.kl_target = 0".into()),
        "data.train_on" | "data.packing" | "data.packing_length" | "train.predict_with_generate" if reinforced => {
            Some(text("train.stage"))
        }
        _ => None,
    }
}

pub fn build(values: &Values) -> RlConfig {
    let size = |path: &str| values.size(path).unwrap_or(0);
    let number = |path: &str| values.number(path);
    RlConfig {
        rewards: values.list("rlhf.rewards"),
        reward_weights: values.numbers("rlhf.reward_weights"),
        answer_column: values.text("rlhf.answer_column").to_string(),
        reward_timeout: number("rlhf.reward_timeout"),
        reward_restarts: size("rlhf.reward_restarts"),
        num_generations: size("rlhf.num_generations"),
        max_completion_length: size("rlhf.max_completion_length"),
        temperature: number("rlhf.temperature"),
        top_k: size("rlhf.top_k"),
        top_p: number("rlhf.top_p"),
        num_iterations: size("rlhf.num_iterations"),
        num_mini_batches: size("rlhf.num_mini_batches"),
        rollout_weights: values.name("rlhf.rollout_weights"),
        rollout_correction: values.name("rlhf.rollout_correction"),
        rollout_clip_max: number("rlhf.rollout_clip_max"),
        rollout_clip_min: number("rlhf.rollout_clip_min"),
        sample_steps: size("rlhf.sample_steps"),
        samples: size("rlhf.samples"),
        grpo: Grpo {
            loss_type: values.name("rlhf.grpo.loss_type"),
            importance_sampling_level: values.name("rlhf.grpo.importance_sampling_level"),
            scale_rewards: values.name("rlhf.grpo.scale_rewards"),
            epsilon: number("rlhf.grpo.epsilon"),
            epsilon_high: number("rlhf.grpo.epsilon_high"),
            delta: number("rlhf.grpo.delta"),
            beta: number("rlhf.grpo.beta"),
            use_bias_correction_kl: values.flag("rlhf.grpo.use_bias_correction_kl"),
            mask_truncated_completions: values.flag("rlhf.grpo.mask_truncated_completions"),
            normalize_advantages: values.flag("rlhf.grpo.normalize_advantages"),
        },
        ppo: Ppo {
            kl_coef: number("rlhf.ppo.kl_coef"),
            kl_estimator: values.name("rlhf.ppo.kl_estimator"),
            kl_target: number("rlhf.ppo.kl_target"),
            kl_horizon: number("rlhf.ppo.kl_horizon"),
            gamma: number("rlhf.ppo.gamma"),
            lam: number("rlhf.ppo.lam"),
            cliprange: number("rlhf.ppo.cliprange"),
            cliprange_value: number("rlhf.ppo.cliprange_value"),
            vf_coef: number("rlhf.ppo.vf_coef"),
            whiten_rewards: values.flag("rlhf.ppo.whiten_rewards"),
            missing_eos_penalty: number("rlhf.ppo.missing_eos_penalty"),
        },
    }
}
