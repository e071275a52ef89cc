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
        "has to be written for these stages",
        "What an answer is worth, one text each: `exact` (the known answer), `numeric` (its last number is that of the known answer), `regex:PATTERN`, `json` or `json:SCHEMA-FILE`, `length:TOKENS` (falls from 0 to -1 between so many tokens and `max_completion_length`), `model:DIRECTORY` (a reward model), `program:COMMAND` (a local program; see docs/rlhf.md).",
    ),
    rl(
        "reward_weights",
        Kind::Numbers,
        "[]",
        "all rewards count the same",
        "A factor for each reward; empty is 1 for all.",
    ),
    rl(
        "answer_column",
        Kind::Text,
        "\"answer\"",
        "the name most data sets of this kind use",
        "The field with the known answer; rows without it have their last assistant message or completion as answer.",
    ),
    rl(
        "reward_timeout",
        Kind::Number(POSITIVE),
        "30.0",
        "a row that takes longer hangs",
        "Seconds a reward program has for one row.",
    ),
    rl(
        "reward_restarts",
        from(0),
        "3",
        "survives a rare crash, and shows a lasting one",
        "How often a reward program that died or hung is started again, over the whole run.",
    ),
    rl(
        "num_generations",
        MANY,
        "8",
        "as in TRL",
        "Answers to each prompt: the group of GRPO. PPO takes as many, each for itself.",
    ),
    rl(
        "max_completion_length",
        from(1),
        "256",
        "long enough for an answer with its reasons",
        "Longest answer in tokens; prompt and answer together fit in `data.max_length`.",
    ),
    rl(
        "temperature",
        Kind::Number(POSITIVE),
        "1.0",
        "the policy as it is",
        "Divides the logits, in the rollout and in the loss.",
    ),
    rl(
        "top_k",
        from(0),
        "0",
        "off: the loss knows nothing of it",
        "The rollout draws from the k most likely tokens; 0 is off.",
    ),
    rl(
        "top_p",
        Kind::Number(RATIO),
        "1.0",
        "off: the loss knows nothing of it",
        "The rollout draws from the most likely tokens that reach p; 1 is off.",
    ),
    rl(
        "num_iterations",
        MANY,
        "1",
        "on-policy as far as can be",
        "Times that the answers of a rollout are learned from.",
    ),
    rl(
        "num_mini_batches",
        MANY,
        "1",
        "on-policy as far as can be",
        "Optimizer steps that one time through the answers takes; a rollout has `batch_size × gradient_accumulation_steps × num_mini_batches` answers.",
    ),
    rl(
        "rollout_weights",
        Kind::Name(RolloutWeights::NAMES),
        "\"exact\"",
        "nothing to correct for",
        "Storage of the weights that sample; the weights that train stay as they are.",
    ),
    rl(
        "rollout_correction",
        Kind::Name(RolloutCorrection::NAMES),
        "\"sequence_mask\"",
        "as in TRL",
        "Importance weights between the exact weights and coded `rollout_weights`: a ratio for each token or for the whole answer, cut off at the bounds or 0 outside of them.",
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
        "enough to read along",
        "Rollouts between two that leave samples in `samples.jsonl`; 0 is never.",
    ),
    rl(
        "samples",
        from(1),
        "4",
        "a few are read, many are not",
        "Answers that such a rollout leaves.",
    ),
    grpo(
        "loss_type",
        Kind::Name(GrpoLoss::NAMES),
        "\"dapo\"",
        "as in TRL: no answer counts less for being long",
        "`grpo`: mean over the tokens of an answer, then over answers; `dapo`: over all tokens of the rollout; `bnpo`: over those of the window; `dr_grpo`: divided by the longest answer allowed; `rloo`: one ratio and one loss for the whole answer, advantages against the other answers of the group, KL in the reward.",
    ),
    grpo(
        "importance_sampling_level",
        Kind::Name(ImportanceLevel::NAMES),
        "\"token\"",
        "as in TRL",
        "Whose probability ratio is clipped: each token's, or that of the whole answer, to the power of 1 / its length (GSPO).",
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
        "Upper bound of the ratio where clipping leaves it open (negative advantages); 0 is none.",
    ),
    grpo(
        "beta",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "as in TRL: no reference model, no memory for it",
        "Factor of the KL divergence from the start of the run (k3 estimator in the loss; in the reward, log-ratio, with `rloo`).",
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
        "Answers that did not end by themselves are not learned from.",
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
        "KL divergence per answer in nats that `kl_coef` is led to; 0 keeps it fixed.",
    ),
    ppo(
        "kl_horizon",
        Kind::Number(POSITIVE),
        "10000.0",
        "as in Ziegler et al. 2019",
        "Answers over which `kl_coef` is led to its target.",
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
        "A value counts as moved by this much at most.",
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
        "Taken from the reward of answers that did not end by themselves.",
    ),
];
