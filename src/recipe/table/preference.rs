//! The keys of `rlhf` for the preference stages.

use super::super::value::{ByKind, KeyValue};
use super::*;

/// The values of `rlhf.loss_type`; each stage accepts its own.
const LOSS: ValueKind = ValueKind::Name(&{
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
});

// `RlSection` has the other keys of this table.
section! {
    /// Preferences (stages `reward`, `dpo`, `orpo`, `simpo`, `kto`) and reinforcement (`grpo`, `ppo`). Names and
    /// meaning as in TRL.
    pub struct PreferenceSection in "rlhf" {
        /// The loss: for `dpo` any except the last two, for `kto` one of the last two.
        loss_type: PreferenceLoss = "auto", "`sigmoid` for `dpo`, `kto` for `kto`", when Train::stage = ["dpo", "kto"];
        /// Strength of the constraint to the reference: a higher value keeps the policy closer. In `ipo` it is τ, in
        /// `simpo` the scale of the rewards, in `orpo` the weight of the odds.
        beta: f64 = 0.1, "as in TRL", in POSITIVE, when Train::stage = ["dpo", "orpo", "simpo", "kto"];
        /// Fraction of the labels that are wrong: for `robust`, `exo_pair`, `aot`, `aot_unpaired` and `simpo`.
        label_smoothing: f64 = 0.0, "labels are taken as correct", in BELOW_ONE, when Train::stage = ["dpo", "simpo"];
        /// Weight of an answer's tokens beyond the length of the shorter answer (LD-DPO).
        ld_alpha: f64 = 1.0, "all tokens have the same weight", in PART, when Train::stage = ["dpo"];
        /// How the distance from the reference is measured (f-DPO).
        f_divergence_type: FDivergence = "reverse_kl", "the original DPO", when Train::stage = ["dpo"];
        /// α of `alpha_divergence`.
        f_alpha_divergence_coef: f64 = 0.5, "as in TRL", in POSITIVE_OR_ZERO, when Train::stage = ["dpo"];
        /// Temperature of `discopop`.
        discopop_tau: f64 = 0.05, "as in its paper", in POSITIVE, when Train::stage = ["dpo"];
        /// Target margin of the chosen answer over the rejected one.
        simpo_gamma: f64 = 0.5, "as in TRL", in POSITIVE_OR_ZERO, when Train::stage = ["simpo"];
        /// Weight of the cross-entropy of the chosen answers.
        cpo_alpha: f64 = 0.0, "the original SimPO; TRL's CPO has 1.0", in POSITIVE_OR_ZERO,
            when Train::stage = ["simpo"];
        /// Weight of desirable answers: to balance unequal numbers of them.
        desirable_weight: f64 = 1.0, "as in TRL", in POSITIVE_OR_ZERO, when Train::stage = ["kto"];
        /// Weight of undesirable answers.
        undesirable_weight: f64 = 1.0, "as in TRL", in POSITIVE_OR_ZERO, when Train::stage = ["kto"];
        /// Weight of the term that pulls the mean reward of a pair to zero.
        center_rewards_coefficient: f64 = 0.0, "off; 0.01 is a common choice", in POSITIVE_OR_ZERO,
            when Train::stage = ["reward"];
    }
}

/// The loss of a preference stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreferenceLoss {
    /// That of the stage; a recipe has it only for stages with one loss.
    Auto,
    /// Of `dpo`.
    Pair(PairLoss),
    /// Of `kto`.
    Judged(JudgedLoss),
}

impl PreferenceLoss {
    fn parse(text: &str) -> Self {
        let judged = || JudgedLoss::parse(text).map(Self::Judged);
        PairLoss::parse(text)
            .map(Self::Pair)
            .or_else(judged)
            .unwrap_or(Self::Auto)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Pair(loss) => loss.name(),
            Self::Judged(loss) => loss.name(),
        }
    }

    /// The loss of stage `dpo`.
    pub fn pair(self) -> PairLoss {
        match self {
            Self::Pair(loss) => loss,
            Self::Auto | Self::Judged(_) => PairLoss::Sigmoid,
        }
    }

    /// The loss of stage `kto`.
    pub fn judged(self) -> JudgedLoss {
        match self {
            Self::Judged(loss) => loss,
            Self::Auto | Self::Pair(_) => JudgedLoss::Kto,
        }
    }
}

impl KeyType<ByKind> for PreferenceLoss {
    const KIND: ValueKind = LOSS;
    fn read(value: &KeyValue) -> Self {
        match value {
            KeyValue::Text(text) => Self::parse(text),
            _ => Self::Auto,
        }
    }
}

/// Losses of the stages that have several.
fn losses(stage: Stage) -> &'static [&'static str] {
    match stage {
        Stage::Dpo => PairLoss::NAMES,
        Stage::Kto => JudgedLoss::NAMES,
        _ => &[],
    }
}

impl RecipeSections {
    /// The loss of the recipe's stage: the written one, or the default of the stage.
    pub fn preference_loss(&self) -> PreferenceLoss {
        match (self.preference.loss_type, self.train.stage) {
            (PreferenceLoss::Auto, Stage::Dpo) => PreferenceLoss::Pair(PairLoss::Sigmoid),
            (PreferenceLoss::Auto, Stage::Kto) => PreferenceLoss::Judged(JudgedLoss::Kto),
            (written, _) => written,
        }
    }
}

/// Losses that need the difference of two scores (f-DPO).
const OF_DIFFERENCES: [PairLoss; 8] = [
    PairLoss::Sigmoid,
    PairLoss::SigmoidNorm,
    PairLoss::Hinge,
    PairLoss::Ipo,
    PairLoss::ExoPair,
    PairLoss::Robust,
    PairLoss::Discopop,
    PairLoss::Sft,
];

fn of_differences(loss: PreferenceLoss) -> bool {
    OF_DIFFERENCES.map(PreferenceLoss::Pair).contains(&loss)
}

/// Losses that read `label_smoothing`.
const SMOOTHED: [PairLoss; 4] = [
    PairLoss::Robust,
    PairLoss::ExoPair,
    PairLoss::Aot,
    PairLoss::AotUnpaired,
];

/// Contradictions.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let stage = s.train.stage;
    if !stage.is_preference() {
        return;
    }
    let (loss, known) = (s.preference_loss(), losses(stage));
    if !known.is_empty() && !known.contains(&loss.name()) {
        faults.add(
            &[PreferenceSection::loss_type, Train::stage],
            Error::usage(format!("stage `{}` has no loss `{}`", stage.name(), loss.name()))
                .expected(format!("one of {}", known.join(", "))),
        );
    }
    let smoothing = s.preference.label_smoothing;
    if stage == Stage::Dpo && loss == PreferenceLoss::Pair(PairLoss::ExoPair) && smoothing == 0.0 {
        faults.add(
            &[PreferenceSection::loss_type, PreferenceSection::label_smoothing],
            Error::usage("`exo_pair` needs `rlhf.label_smoothing` above 0").hint("its paper uses 1e-3"),
        );
    }
    if stage == Stage::Dpo && loss == PreferenceLoss::Pair(PairLoss::Robust) && smoothing >= 0.5 {
        faults.add(
            &[PreferenceSection::loss_type, PreferenceSection::label_smoothing],
            Error::usage("`robust` needs `rlhf.label_smoothing` below 0.5")
                .found(smoothing)
                .hint("it is the fraction of wrong labels"),
        );
    }
    let divergence = s.preference.f_divergence_type;
    if stage == Stage::Dpo && divergence != FDivergence::ReverseKl && !of_differences(loss) {
        faults.add(
            &[PreferenceSection::loss_type, PreferenceSection::f_divergence_type],
            Error::usage(format!(
                "`{}` has no effect with `{}`",
                PreferenceSection::f_divergence_type.is(divergence.name()),
                loss.name()
            ))
            .expected(format!("one of {}", OF_DIFFERENCES.map(PairLoss::name).join(", "))),
        );
    }
    if stage == Stage::Kto && loss == PreferenceLoss::Judged(JudgedLoss::Kto) && s.train.batch_size == 1 {
        faults.add(
            &[Train::batch_size, Train::stage, PreferenceSection::loss_type],
            Error::usage("KTO needs at least two rows in a micro-batch")
                .found("train.batch_size = 1")
                .expected("2 or more: the KL divergence from the reference is estimated with the answers of other rows")
                .hint("raise `train.batch_size`, or set `rlhf.loss_type = \"apo_zero_unpaired\"`"),
        );
    }
}

/// The setting because of which a key has no effect in a preference stage.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    let stage = s.train.stage;
    if !stage.is_preference() {
        return None;
    }
    let loss = s.preference_loss();
    let divergence = s.preference.f_divergence_type;
    match key {
        Data::packing | Data::packing_length | Data::train_on | Train::predict_with_generate => {
            Some(Train::stage.is(stage.name()))
        }
        PreferenceSection::label_smoothing
            if stage == Stage::Dpo && !SMOOTHED.map(PreferenceLoss::Pair).contains(&loss) =>
        {
            Some(PreferenceSection::loss_type.is(loss.name()))
        }
        PreferenceSection::discopop_tau if loss != PreferenceLoss::Pair(PairLoss::Discopop) => {
            Some(PreferenceSection::loss_type.is(loss.name()))
        }
        PreferenceSection::f_alpha_divergence_coef if divergence != FDivergence::AlphaDivergence => {
            Some(PreferenceSection::f_divergence_type.is(divergence.name()))
        }
        _ => None,
    }
}
