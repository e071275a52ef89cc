//! Keys of the preference stages.

use super::*;

/// Builds a key of the preference stages.
const fn preference(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    reason: &'static str,
    doc: &'static str,
    stages: &'static [&'static str],
) -> Key {
    when(key("rlhf", name, kind, default, reason, doc), "train.stage", stages)
}

/// The names of `rlhf.loss_type`; each stage accepts its own.
const LOSSES: &[&str] = &{
    let pairs = PairLoss::NAMES.len();
    let mut names = ["auto"; 1 + PairLoss::NAMES.len() + JudgedLoss::NAMES.len()];
    let mut i = 1;
    while i < names.len() {
        names[i] = if i <= pairs {
            PairLoss::NAMES[i - 1]
        } else {
            JudgedLoss::NAMES[i - 1 - pairs]
        };
        i += 1;
    }
    names
};

pub(super) static KEYS: &[Key] = &[
    preference(
        "loss_type",
        Kind::Name(LOSSES),
        "\"auto\"",
        "`sigmoid` for `dpo`, `kto` for `kto`",
        "The loss: for `dpo` any except the last two, for `kto` one of the last two.",
        &["dpo", "kto"],
    ),
    preference(
        "beta",
        Kind::Number(POSITIVE),
        "0.1",
        "as in TRL",
        "Strength of the constraint to the reference: a higher value keeps the policy closer. In `ipo` it is τ, in `simpo` the scale of the rewards, in `orpo` the weight of the odds.",
        &["dpo", "orpo", "simpo", "kto"],
    ),
    preference(
        "label_smoothing",
        Kind::Number(BELOW_ONE),
        "0.0",
        "labels are taken as correct",
        "Fraction of the labels that are wrong: for `robust`, `exo_pair`, `aot`, `aot_unpaired` and `simpo`.",
        &["dpo", "simpo"],
    ),
    preference(
        "ld_alpha",
        Kind::Number(PART),
        "1.0",
        "all tokens have the same weight",
        "Weight of an answer's tokens beyond the length of the shorter answer (LD-DPO).",
        &["dpo"],
    ),
    preference(
        "f_divergence_type",
        Kind::Name(FDivergence::NAMES),
        "\"reverse_kl\"",
        "the original DPO",
        "How the distance from the reference is measured (f-DPO).",
        &["dpo"],
    ),
    preference(
        "f_alpha_divergence_coef",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.5",
        "as in TRL",
        "α of `alpha_divergence`.",
        &["dpo"],
    ),
    preference(
        "discopop_tau",
        Kind::Number(POSITIVE),
        "0.05",
        "as in its paper",
        "Temperature of `discopop`.",
        &["dpo"],
    ),
    preference(
        "simpo_gamma",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.5",
        "as in TRL",
        "Target margin of the chosen answer over the rejected one.",
        &["simpo"],
    ),
    preference(
        "cpo_alpha",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "the original SimPO; TRL's CPO has 1.0",
        "Weight of the cross-entropy of the chosen answers.",
        &["simpo"],
    ),
    preference(
        "desirable_weight",
        Kind::Number(POSITIVE_OR_ZERO),
        "1.0",
        "as in TRL",
        "Weight of desirable answers: to balance unequal numbers of them.",
        &["kto"],
    ),
    preference(
        "undesirable_weight",
        Kind::Number(POSITIVE_OR_ZERO),
        "1.0",
        "as in TRL",
        "Weight of undesirable answers.",
        &["kto"],
    ),
    preference(
        "center_rewards_coefficient",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "off; 0.01 is a common choice",
        "Weight of the term that pulls the mean reward of a pair to zero.",
        &["reward"],
    ),
];
