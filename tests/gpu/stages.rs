//! Stages beside SFT, and adapters and starts that tests/gpu/train.rs does not resume: the losses on a GPU are those on the CPU.

use crate::support::gpu;
use crate::train::{close, number, train};
use tempfile::TempDir;

const LORA: &str = "tune.method=lora";
const PAIRS: &str = "data.train=assets/world/preference-train.jsonl";
const SUMS: &str = "data.train=assets/world/sums-train.jsonl";
/// Rewards that a few random letters get, for answers of a few tokens.
const REWARDS: [&str; 4] = [
    SUMS,
    "rlhf.rewards=[\"regex:[aeiou]\", \"length:4\"]",
    "rlhf.max_completion_length=6",
    "train.batch_size=4",
];

/// Loss and gradient norm of three steps in f32, and the `also` of the stage.
fn compare(name: &str, settings: &[&str], also: &[&str]) {
    let dir = TempDir::new().unwrap();
    let settings = [&["model.dtype=f32", "train.max_steps=3"], settings].concat();
    let [here, there] = ["cpu", "cuda:0"].map(|device| train(device, &settings, &dir.path().join(device)));
    assert_eq!((here.len(), there.len()), (3, 3), "{name}");
    for (a, b) in here.iter().zip(&there) {
        for (key, tolerance) in [("loss", 1e-4), ("grad_norm", 1e-3)] {
            // The loss of GRPO is about 0 where the policy is that of the answers.
            if key == "loss" && number(a, key).abs() < 1e-6 {
                assert!(number(b, key).abs() < 1e-5, "{name}: {a} {b}");
                continue;
            }
            let what = format!("{name}, step {}: {key}", a["step"]);
            close(number(a, key), number(b, key), tolerance, &what);
        }
        for key in also {
            close(
                number(a, key),
                number(b, key),
                1e-3,
                &format!("{name}, step {}: {key}", a["step"]),
            );
        }
    }
}

#[test]
fn preferences_lose_what_they_lose_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    for stage in ["dpo", "kto", "orpo", "simpo", "reward"] {
        let stage_key = format!("train.stage={stage}");
        compare(stage, &[&stage_key, PAIRS, LORA, "train.batch_size=2"], &[]);
    }
}

/// The GPU draws the tokens of the CPU, also from weights in 8 bits, which follow the trained ones.
#[test]
fn rollouts_and_rewards_are_those_of_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    let grpo = [
        "train.stage=grpo",
        "rlhf.num_generations=2",
        "tune.method=full",
        "rlhf.rollout_weights=int8",
    ];
    compare("grpo", &[&REWARDS[..], &grpo].concat(), &["reward"]);
    let ppo = ["train.stage=ppo", "rlhf.num_generations=1", LORA];
    compare("ppo", &[&REWARDS[..], &ppo].concat(), &["reward"]);
}

#[test]
fn other_adapters_lose_what_they_lose_on_the_cpu() {
    let Some(_gpu) = gpu() else { return };
    for (name, more) in [
        ("loha", &["tune.lora.peft_type=loha"][..]),
        ("lokr", &["tune.lora.peft_type=lokr"]),
        (
            "corda",
            &["tune.lora.init_lora_weights=corda", "tune.lora.init_samples=2"],
        ),
        // With fewer trained tokens than directions, rounding chooses the last ones: with 4 rows two paths of the CPU differ by 5 %.
        ("eva", &["tune.lora.init_lora_weights=eva", "tune.lora.init_samples=8"]),
        ("olora", &["tune.lora.init_lora_weights=olora"]),
        (
            "dora with dropout",
            &["tune.lora.use_dora=true", "tune.lora.lora_dropout=0.1"],
        ),
        (
            "oft with exact inverses",
            &[
                "tune.lora.peft_type=oft",
                "tune.lora.oft_block_size=8",
                "tune.lora.use_cayley_neumann=false",
            ],
        ),
    ] {
        compare(name, &[&[LORA, "optimizer.learning_rate=1e-3"], more].concat(), &[]);
    }
}
