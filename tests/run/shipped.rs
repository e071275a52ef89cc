//! The shipped recipes of the tiny world with pairs and rewards: they reach the results in docs/preference.md and
//! docs/rlhf.md.

use crate::bench::{Bench, number};
use serde_json::Value;

/// Runs a shipped recipe into `name`; returns its evaluations in order.
fn shipped(bench: &Bench, name: &str, more: &[&str]) -> Vec<Value> {
    bench.shipped(name, name, more);
    lines(bench, name)
        .into_iter()
        .filter(|l| l.as_object().unwrap().keys().any(|k| k.starts_with("eval_")))
        .collect()
}

fn lines(bench: &Bench, name: &str) -> Vec<Value> {
    bench.lines(&format!("{name}/metrics.jsonl"))
}

fn ends(evals: &[Value]) -> (&Value, &Value) {
    assert!(evals.len() > 1);
    (&evals[0], &evals[evals.len() - 1])
}

/// After training, correct answers are preferred on held-out pairs.
#[test]
fn dpo_learns_to_prefer() {
    let evals = shipped(&Bench::new(), "dpo-tiny", &[]);
    let (before, after) = ends(&evals);
    assert_eq!(number(before, "eval_rewards/accuracies"), 0.0);
    assert!((number(before, "eval_loss") - 2f64.ln()).abs() < 1e-6, "{before}");
    assert!(number(after, "eval_rewards/accuracies") > 0.85, "{after}");
    assert!(number(after, "eval_rewards/margins") > 0.5, "{after}");
}

#[test]
fn a_reward_model_learns_to_score() {
    let evals = shipped(&Bench::new(), "reward-tiny", &[]);
    let (before, after) = ends(&evals);
    assert!(number(before, "eval_accuracy") < 0.7, "{before}");
    // Measured: 68 %. Scoring is harder than preferring, see docs/preference.md.
    assert!(
        number(after, "eval_accuracy") > number(before, "eval_accuracy") + 0.1,
        "{before} {after}"
    );
    assert!(number(after, "eval_margin") > 0.4, "{after}");
}

/// Runs the common first stage of both pipelines; returns the setting that continues from it.
fn start(bench: &Bench) -> String {
    shipped(bench, "grpo-start-tiny", &[]);
    format!("model.path={}", bench.path("grpo-start-tiny/final").display())
}

/// SFT, then GRPO: greedy answers solve more held-out sums exactly.
#[test]
fn grpo_raises_exact_match() {
    let bench = Bench::new();
    let start = start(&bench);
    let evals = shipped(&bench, "grpo-tiny", &[&start, "train.max_steps=40"]);
    let (before, after) = ends(&evals);
    let (before, after) = (number(before, "eval_reward_exact"), number(after, "eval_reward_exact"));
    println!("exact match {before:.3} -> {after:.3}");
    assert!(after > before + 0.15, "{before} -> {after}");
}

/// SFT, a reward model, then PPO: the mean reward of held-out prompts rises, and the KL divergence stays bounded.
#[test]
fn ppo_raises_the_reward_and_holds_the_divergence() {
    let bench = Bench::new();
    let start = start(&bench);
    shipped(&bench, "reward-tiny", &[]);
    let rewards = format!("rlhf.rewards=[\"model:{}\"]", bench.path("reward-tiny/final").display());
    let evals = shipped(&bench, "ppo-tiny", &[&start, &rewards]);
    let (before, after) = ends(&evals);
    let (before, after) = (number(before, "eval_reward"), number(after, "eval_reward"));
    let kl: Vec<f64> = lines(&bench, "ppo-tiny")
        .iter()
        .filter_map(|l| l["kl"].as_f64())
        .collect();
    let most = kl.iter().copied().fold(0.0, f64::max);
    println!("reward {before:.3} -> {after:.3}, divergence at most {most:.2} nats an answer");
    assert!(after > before + 0.2, "{before} -> {after}");
    // The bound is the recipe's `kl_target`.
    assert!(most < 3.0, "{kl:?}");
}
