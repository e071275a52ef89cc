//! The keys of `rlhf` for the RL stages.

use super::*;

named!(RolloutWeights { Exact = "exact", Int8 = "int8", Int4 = "int4" });

section! {
    /// The keys of `rlhf` for the stages `grpo` and `ppo`.
    pub struct RlSection in "rlhf", when Train::stage = ["grpo", "ppo"] {
        /// Rewards of an answer, one string each: `exact` (equal to the known answer), `numeric` (the last number
        /// equals that of the known answer), `regex:PATTERN`, `json` or `json:SCHEMA-FILE`, `length:TOKENS` (falls from
        /// 0 to -1 between this number of tokens and `max_completion_length`), `model:DIRECTORY` (a reward model),
        /// `program:COMMAND` (a local program; see docs/rlhf.md).
        rewards: Vec<String> = [], "required for these stages";
        /// A factor for each reward; empty is 1 for all.
        reward_weights: Vec<f64> = [], "all rewards have the same weight";
        /// The column with the known answer; rows without it use their last assistant message or completion.
        answer_column: String = "answer", "the usual name in such datasets";
        /// Time limit of a reward program for one row, in seconds.
        reward_timeout: f64 = 30.0, "a program that takes longer probably hangs", in POSITIVE;
        /// How many times in a row a reward program that crashed or hung is restarted. When it scores a batch of answers
        /// (a rollout, or a part of an evaluation) without a restart, the count begins again at 0.
        reward_restarts: usize = 3, "tolerates a rare crash, and reports a persistent one", in from(0);
        /// A reward program may use the network, also that of this machine (`localhost`), and gets all variables of the
        /// environment but `FT_JOB`. Without it, Linux (x86-64, aarch64) refuses it new sockets, also local ones, and variables
        /// that hold secrets, such as `HF_TOKEN`, are removed.
        reward_network: bool = false, "a program that only computes needs none", resume FREE;
        /// Most memory that a reward program may allocate.
        reward_memory: Option<u64> = "auto", "the free memory of this machine when the program starts", resume FREE;
        /// Answers to each prompt: the group of GRPO. PPO generates as many, without groups.
        num_generations: usize = 8, "as in TRL's GRPO; its RLOO has 2", in MANY;
        /// Longest answer in tokens; prompt and answer together fit in `data.max_length`.
        max_completion_length: usize = 256, "enough for an answer with its reasoning", in from(1);
        /// Divides the logits, in the rollout and in the loss.
        temperature: f64 = 1.0, "the distribution of the policy", in POSITIVE;
        /// The rollout samples from the k most likely tokens; 0 is off.
        top_k: usize = 0, "off: the loss does not account for it", in from(0);
        /// The rollout samples from the most likely tokens with total probability p; 1 is off.
        top_p: f64 = 1.0, "off: the loss does not account for it", in RATIO;
        /// Number of passes over the answers of a rollout.
        num_iterations: usize = 1, "as on-policy as possible", in MANY;
        /// Optimizer steps in one pass over the answers; a rollout has `batch_size × gradient_accumulation_steps ×
        /// num_mini_batches` answers.
        num_mini_batches: usize = 1, "as on-policy as possible", in MANY;
        /// Storage of the weights for sampling; the storage of the trained weights does not change.
        rollout_weights: RolloutWeights = "exact", "no difference to correct";
        /// Importance sampling between the exact weights and quantized `rollout_weights`: one ratio per token or per
        /// answer; outside the bounds it is truncated or set to 0.
        rollout_correction: RolloutCorrection = "sequence_mask", "as in TRL";
        /// Upper bound of these ratios.
        rollout_clip_max: f64 = 3.0, "as in TRL", in POSITIVE;
        /// Lower bound of these ratios; 0 is none.
        rollout_clip_min: f64 = 0.0, "as in TRL", in POSITIVE_OR_ZERO;
        /// Number of rollouts between two that write samples to `samples.jsonl`; 0 is never.
        sample_steps: usize = 10, "enough to follow the run", in from(0);
        /// Number of answers that such a rollout writes.
        samples: usize = 4, "few enough to read", in from(1);
        with grpo: GrpoSection;
        with ppo: PpoSection;
    }
}

section! {
    /// The loss of GRPO and its variants. Names and meaning as in TRL.
    pub struct GrpoSection in "rlhf.grpo", when Train::stage = ["grpo"] {
        /// `grpo`: mean over the tokens of an answer, then over answers; `dapo`: over all tokens of the rollout;
        /// `bnpo`: over all tokens of the optimizer step; `dr_grpo`: divided by the longest answer allowed; `rloo`: one
        /// ratio and one loss for the whole answer, advantages relative to the other answers of the group, KL in the
        /// reward.
        loss_type: GrpoLoss = "dapo", "as in TRL: the tokens of long answers do not count less";
        /// The probability ratio that is clipped: that of each token, or that of the whole answer to the power of 1 /
        /// its length (GSPO).
        importance_sampling_level: ImportanceLevel = "token", "as in TRL";
        /// Advantages are divided by the standard deviation of the rewards of their group, of the whole rollout, or
        /// not.
        scale_rewards: ScaleRewards = "group", "as in TRL";
        /// Probability ratios are clipped at 1 - epsilon, and at 1 + epsilon_high.
        epsilon: f64 = 0.2, "as in TRL", in POSITIVE;
        /// Upper distance of the clipping; 0 is `epsilon`.
        epsilon_high: f64 = 0.0, "symmetric", in POSITIVE_OR_ZERO;
        /// Upper bound of the ratio for negative advantages, which clipping does not bound; 0 is none.
        delta: f64 = 0.0, "as in TRL: off", in POSITIVE_OR_ZERO;
        /// Factor of the KL divergence from the initial policy (k3 estimator in the loss; with `rloo` the log-ratio in
        /// the reward).
        beta: f64 = 0.0, "as in TRL's GRPO: no reference model, no memory for it; its RLOO has 0.05", in POSITIVE_OR_ZERO;
        /// The KL term is weighted with the probability ratio too.
        use_bias_correction_kl: bool = true, "as in TRL";
        /// Truncated answers (without an end token) are masked out of the loss; they still count in the mean and the
        /// standard deviation of their group.
        mask_truncated_completions: bool = false, "as in TRL";
        /// With `rloo`: advantages of a rollout get mean 0 and standard deviation 1.
        normalize_advantages: bool = false, "as in TRL";
    }
}

section! {
    /// The loss of PPO. Names and meaning as in the last version of TRL that had PPO.
    pub struct PpoSection in "rlhf.ppo", when Train::stage = ["ppo"] {
        /// Factor of the KL penalty in the reward of each token; 0 needs no reference model.
        kl_coef: f64 = 0.05, "as in TRL", in POSITIVE_OR_ZERO;
        /// How the KL divergence is estimated at a token: `k1` the log-ratio, `k3` never negative.
        kl_estimator: KlEstimator = "k1", "as in TRL";
        /// Target of the KL divergence per answer, in nats; `kl_coef` is adapted to reach it; 0 keeps `kl_coef` fixed.
        kl_target: f64 = 0.0, "a fixed factor", in POSITIVE_OR_ZERO;
        /// Number of answers over which `kl_coef` is adapted.
        kl_horizon: f64 = 10000.0, "as in Ziegler et al. 2019", in POSITIVE;
        /// Discount from one token to the next.
        gamma: f64 = 1.0, "as in TRL", in PART;
        /// Lambda of the generalized advantage estimation.
        lam: f64 = 0.95, "as in TRL", in PART;
        /// Probability ratios are clipped to 1 ± this.
        cliprange: f64 = 0.2, "as in TRL", in POSITIVE;
        /// Values are clipped to ± this around the old value.
        cliprange_value: f64 = 0.2, "as in TRL", in POSITIVE;
        /// Factor of the value loss.
        vf_coef: f64 = 0.1, "as in TRL", in POSITIVE_OR_ZERO;
        /// Rewards of a rollout get standard deviation 1.
        whiten_rewards: bool = false, "as in TRL";
        /// Subtracted from the reward of truncated answers (without an end token).
        missing_eos_penalty: f64 = 0.0, "off", in POSITIVE_OR_ZERO;
    }
}

/// Contradictions.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let (train, rl) = (&s.train, &s.rl);
    if !train.stage.is_rl() {
        return;
    }
    let stage = train.stage.name();
    if rl.rewards.is_empty() {
        faults.add(
            &[RlSection::rewards],
            Error::usage("`rlhf.rewards` is missing: the stage needs at least one reward")
                .hint("write `rewards = [\"numeric\"]` below `[rlhf]`, or the argument `rlhf.rewards=numeric`"),
        );
    }
    let (rewards, weights) = (rl.rewards.len(), rl.reward_weights.len());
    if weights > 0 && weights != rewards {
        faults.add(
            &[RlSection::reward_weights, RlSection::rewards],
            Error::usage("`rlhf.reward_weights` and `rlhf.rewards` have different lengths")
                .found(format!("{weights} weights"))
                .expected(format!("{rewards}, one for each reward")),
        );
    }
    // 0 is `auto`: gradient accumulation is chosen so that the groups are complete.
    let answers = train.batch_size * rl.num_mini_batches * train.gradient_accumulation_steps;
    let group = rl.num_generations.max(1);
    if answers % group != 0 {
        faults.add(
            &[
                RlSection::num_generations,
                Train::batch_size,
                Train::gradient_accumulation_steps,
                RlSection::num_mini_batches,
            ],
            Error::usage("the number of answers of a rollout is not a multiple of `rlhf.num_generations`")
                .found(format!(
                    "{answers} answers (batch_size × gradient_accumulation_steps × num_mini_batches)"
                ))
                .expected(format!("a multiple of {group}")),
        );
    }
    if train.stage == Stage::Grpo && group < 2 {
        faults.add(
            &[RlSection::num_generations, Train::stage],
            Error::usage("`train.stage = \"grpo\"` compares the answers of a group")
                .found("`rlhf.num_generations = 1`")
                .expected("at least 2"),
        );
    }
    let (max, min) = (rl.rollout_clip_max, rl.rollout_clip_min);
    if min >= max {
        faults.add(
            &[RlSection::rollout_clip_min, RlSection::rollout_clip_max],
            Error::usage("`rlhf.rollout_clip_min` is not below `rlhf.rollout_clip_max`")
                .found(format!("{min} and {max}")),
        );
    }
    if s.data.packing && faults.is_written(Data::packing) {
        faults.add(
            &[Data::packing, Train::stage],
            Error::usage(format!("`data.packing` has no effect with `train.stage = \"{stage}\"`"))
                .hint("remove it: `train.batch_size` answers are always concatenated in one sequence"),
        );
    }
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    let rl = &s.rl;
    let rloo = rl.grpo.loss_type == GrpoLoss::Rloo;
    match key {
        RlSection::rollout_correction | RlSection::rollout_clip_max | RlSection::rollout_clip_min
            if rl.rollout_weights == RolloutWeights::Exact =>
        {
            Some(RlSection::rollout_weights.is("exact"))
        }
        RlSection::rollout_clip_max | RlSection::rollout_clip_min
            if rl.rollout_correction == RolloutCorrection::None =>
        {
            Some(RlSection::rollout_correction.is("none"))
        }
        GrpoSection::normalize_advantages if !rloo => Some(GrpoSection::loss_type.is(rl.grpo.loss_type.name())),
        GrpoSection::importance_sampling_level | GrpoSection::scale_rewards | GrpoSection::use_bias_correction_kl
            if rloo =>
        {
            Some(GrpoSection::loss_type.is("rloo"))
        }
        GrpoSection::use_bias_correction_kl if rl.grpo.beta == 0.0 => Some("rlhf.grpo.beta = 0".into()),
        PpoSection::kl_target | PpoSection::kl_horizon | PpoSection::kl_estimator if rl.ppo.kl_coef == 0.0 => {
            Some("rlhf.ppo.kl_coef = 0".into())
        }
        PpoSection::kl_horizon if rl.ppo.kl_target == 0.0 => Some("rlhf.ppo.kl_target = 0".into()),
        Data::train_on | Data::packing | Data::packing_length | Train::predict_with_generate
            if s.train.stage.is_rl() =>
        {
            Some(Train::stage.is(s.train.stage.name()))
        }
        _ => None,
    }
}
