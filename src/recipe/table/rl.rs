//! Keys of the RL stages.

use super::*;

const fn rl(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("rlhf", name, kind, default, reason, doc),
        "train.stage",
        &["grpo", "ppo"],
    )
}

const fn grpo(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("rlhf.grpo", name, kind, default, reason, doc),
        "train.stage",
        &["grpo"],
    )
}

const fn ppo(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("rlhf.ppo", name, kind, default, reason, doc),
        "train.stage",
        &["ppo"],
    )
}

pub(super) static KEYS: &[Key] = &[
    rl(
        "rewards",
        Kind::Texts,
        "[]",
        "required for these stages",
        "Rewards of an answer, one string each: `exact` (equal to the known answer), `numeric` (the last number equals that of the known answer), `regex:PATTERN`, `json` or `json:SCHEMA-FILE`, `length:TOKENS` (falls from 0 to -1 between this number of tokens and `max_completion_length`), `model:DIRECTORY` (a reward model), `program:COMMAND` (a local program; see docs/rlhf.md).",
    ),
    rl(
        "reward_weights",
        Kind::Numbers,
        "[]",
        "all rewards have the same weight",
        "A factor for each reward; empty is 1 for all.",
    ),
    rl(
        "answer_column",
        Kind::Text,
        "\"answer\"",
        "the usual name in such data sets",
        "The field with the known answer; rows without it use their last assistant message or completion.",
    ),
    rl(
        "reward_timeout",
        Kind::Number(POSITIVE),
        "30.0",
        "a program that takes longer probably hangs",
        "Time limit of a reward program for one row, in seconds.",
    ),
    rl(
        "reward_restarts",
        from(0),
        "3",
        "tolerates a rare crash, and reports a persistent one",
        "How many times a reward program that crashed or hung is restarted, over the whole run.",
    ),
    rl(
        "num_generations",
        MANY,
        "8",
        "as in TRL",
        "Answers to each prompt: the group of GRPO. PPO generates as many, without groups.",
    ),
    rl(
        "max_completion_length",
        from(1),
        "256",
        "enough for an answer with its reasoning",
        "Longest answer in tokens; prompt and answer together fit in `data.max_length`.",
    ),
    rl(
        "temperature",
        Kind::Number(POSITIVE),
        "1.0",
        "the distribution of the policy",
        "Divides the logits, in the rollout and in the loss.",
    ),
    rl(
        "top_k",
        from(0),
        "0",
        "off: the loss does not account for it",
        "The rollout samples from the k most likely tokens; 0 is off.",
    ),
    rl(
        "top_p",
        Kind::Number(RATIO),
        "1.0",
        "off: the loss does not account for it",
        "The rollout samples from the most likely tokens with total probability p; 1 is off.",
    ),
    rl(
        "num_iterations",
        MANY,
        "1",
        "as on-policy as possible",
        "Number of passes over the answers of a rollout.",
    ),
    rl(
        "num_mini_batches",
        MANY,
        "1",
        "as on-policy as possible",
        "Optimizer steps in one pass over the answers; a rollout has `batch_size × gradient_accumulation_steps × num_mini_batches` answers.",
    ),
    rl(
        "rollout_weights",
        Kind::Name(RolloutWeights::NAMES),
        "\"exact\"",
        "no difference to correct",
        "Storage of the weights for sampling; the storage of the trained weights does not change.",
    ),
    rl(
        "rollout_correction",
        Kind::Name(RolloutCorrection::NAMES),
        "\"sequence_mask\"",
        "as in TRL",
        "Importance sampling between the exact weights and quantized `rollout_weights`: one ratio per token or per answer; outside the bounds it is truncated or set to 0.",
    ),
    rl(
        "rollout_clip_max",
        Kind::Number(POSITIVE),
        "3.0",
        "as in TRL",
        "Upper bound of these ratios.",
    ),
    rl(
        "rollout_clip_min",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "as in TRL",
        "Lower bound of these ratios; 0 is none.",
    ),
    rl(
        "sample_steps",
        from(0),
        "10",
        "enough to follow the run",
        "Number of rollouts between two that write samples to `samples.jsonl`; 0 is never.",
    ),
    rl(
        "samples",
        from(1),
        "4",
        "few enough to read",
        "Number of answers that such a rollout writes.",
    ),
    grpo(
        "loss_type",
        Kind::Name(GrpoLoss::NAMES),
        "\"dapo\"",
        "as in TRL: the tokens of long answers do not count less",
        "`grpo`: mean over the tokens of an answer, then over answers; `dapo`: over all tokens of the rollout; `bnpo`: over all tokens of the optimizer step; `dr_grpo`: divided by the longest answer allowed; `rloo`: one ratio and one loss for the whole answer, advantages relative to the other answers of the group, KL in the reward.",
    ),
    grpo(
        "importance_sampling_level",
        Kind::Name(ImportanceLevel::NAMES),
        "\"token\"",
        "as in TRL",
        "The probability ratio that is clipped: that of each token, or that of the whole answer to the power of 1 / its length (GSPO).",
    ),
    grpo(
        "scale_rewards",
        Kind::Name(ScaleRewards::NAMES),
        "\"group\"",
        "as in TRL",
        "Advantages are divided by the standard deviation of the rewards of their group, of the whole rollout, or not.",
    ),
    grpo(
        "epsilon",
        Kind::Number(POSITIVE),
        "0.2",
        "as in TRL",
        "Probability ratios are clipped at 1 - epsilon, and at 1 + epsilon_high.",
    ),
    grpo(
        "epsilon_high",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "symmetric",
        "Upper distance of the clipping; 0 is `epsilon`.",
    ),
    grpo(
        "delta",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "as in TRL: off",
        "Upper bound of the ratio for negative advantages, which clipping does not bound; 0 is none.",
    ),
    grpo(
        "beta",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "as in TRL: no reference model, no memory for it",
        "Factor of the KL divergence from the initial policy (k3 estimator in the loss; with `rloo` the log-ratio in the reward).",
    ),
    grpo(
        "use_bias_correction_kl",
        Kind::Flag,
        "true",
        "as in TRL",
        "The KL term is weighted with the probability ratio too.",
    ),
    grpo(
        "mask_truncated_completions",
        Kind::Flag,
        "false",
        "as in TRL",
        "Truncated answers (without an end token) are masked out of the loss.",
    ),
    grpo(
        "normalize_advantages",
        Kind::Flag,
        "false",
        "as in TRL",
        "With `rloo`: advantages of a rollout get mean 0 and standard deviation 1.",
    ),
    ppo(
        "kl_coef",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.05",
        "as in TRL",
        "Factor of the KL penalty in the reward of each token; 0 needs no reference model.",
    ),
    ppo(
        "kl_estimator",
        Kind::Name(KlEstimator::NAMES),
        "\"k1\"",
        "as in TRL",
        "How the KL divergence is estimated at a token: `k1` the log-ratio, `k3` never negative.",
    ),
    ppo(
        "kl_target",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "a fixed factor",
        "Target of the KL divergence per answer, in nats; `kl_coef` is adapted to reach it; 0 keeps `kl_coef` fixed.",
    ),
    ppo(
        "kl_horizon",
        Kind::Number(POSITIVE),
        "10000.0",
        "as in Ziegler et al. 2019",
        "Number of answers over which `kl_coef` is adapted.",
    ),
    ppo(
        "gamma",
        Kind::Number(PART),
        "1.0",
        "as in TRL",
        "Discount from one token to the next.",
    ),
    ppo(
        "lam",
        Kind::Number(PART),
        "0.95",
        "as in TRL",
        "Lambda of the generalized advantage estimation.",
    ),
    ppo(
        "cliprange",
        Kind::Number(POSITIVE),
        "0.2",
        "as in TRL",
        "Probability ratios are clipped to 1 ± this.",
    ),
    ppo(
        "cliprange_value",
        Kind::Number(POSITIVE),
        "0.2",
        "as in TRL",
        "Values are clipped to ± this around the old value.",
    ),
    ppo(
        "vf_coef",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.1",
        "as in TRL",
        "Factor of the value loss.",
    ),
    ppo(
        "whiten_rewards",
        Kind::Flag,
        "false",
        "as in TRL",
        "Rewards of a rollout get standard deviation 1.",
    ),
    ppo(
        "missing_eos_penalty",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "off",
        "Subtracted from the reward of truncated answers (without an end token).",
    ),
];
