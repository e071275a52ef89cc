//! The keys of `rlhf` for the preference stages: checks of combinations, and the typed settings.

use super::check::Values;
use super::types::*;
use crate::base::Error;

/// Losses of the stages that have several; the first is the default of the stage.
fn losses(stage: Stage) -> Vec<&'static str> {
    match stage {
        Stage::Dpo => PairLoss::NAMES.to_vec(),
        Stage::Kto => JudgedLoss::NAMES.to_vec(),
        _ => Vec::new(),
    }
}

fn stage(values: &Values) -> Stage {
    values.name("train.stage")
}

/// The loss of the recipe's stage: the written one, or the default of the stage.
fn loss(values: &Values) -> &str {
    match (values.text("rlhf.loss_type"), losses(stage(values)).first()) {
        ("auto", Some(own)) => own,
        (written, _) => written,
    }
}

/// Losses that need the difference of two scores (f-DPO).
const OF_DIFFERENCES: [&str; 8] = [
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "robust",
    "discopop",
    "sft",
];

/// Errors of the table, each with the keys involved.
pub fn faults(values: &Values) -> Vec<(&'static [&'static str], Error)> {
    let mut out: Vec<(&'static [&'static str], Error)> = Vec::new();
    let stage = stage(values);
    if !stage.is_preference() {
        return out;
    }
    let (loss, known) = (loss(values), losses(stage));
    if !known.is_empty() && !known.contains(&loss) {
        out.push((
            &["rlhf.loss_type", "train.stage"],
            Error::usage(format!("stage `{}` has no loss `{loss}`", stage.name()))
                .expected(format!("one of {}", known.join(", "))),
        ));
    }
    let smoothing = values.number("rlhf.label_smoothing");
    if stage == Stage::Dpo && loss == "exo_pair" && smoothing == 0.0 {
        out.push((
            &["rlhf.loss_type", "rlhf.label_smoothing"],
            Error::usage("`exo_pair` needs `rlhf.label_smoothing` above 0").hint("its paper uses 1e-3"),
        ));
    }
    if stage == Stage::Dpo && loss == "robust" && smoothing >= 0.5 {
        out.push((
            &["rlhf.loss_type", "rlhf.label_smoothing"],
            Error::usage("`robust` needs `rlhf.label_smoothing` below 0.5")
                .found(smoothing)
                .hint("it is the fraction of wrong labels"),
        ));
    }
    let divergence = values.text("rlhf.f_divergence_type");
    if stage == Stage::Dpo && divergence != "reverse_kl" && !OF_DIFFERENCES.contains(&loss) {
        out.push((
            &["rlhf.loss_type", "rlhf.f_divergence_type"],
            Error::usage(format!(
                "`rlhf.f_divergence_type = \"{divergence}\"` has no meaning for `{loss}`"
            ))
            .expected(format!("one of {}", OF_DIFFERENCES.join(", "))),
        ));
    }
    if stage == Stage::Kto && loss == "kto" && values.integer("train.batch_size") == Some(1) {
        out.push((
            &["train.batch_size", "train.stage", "rlhf.loss_type"],
            Error::usage("KTO needs at least two rows in a micro-batch")
                .found("train.batch_size = 1")
                .expected("2 or more: the KL divergence from the reference is estimated with the answers of other rows")
                .hint("raise `train.batch_size`, or set `rlhf.loss_type = \"apo_zero_unpaired\"`"),
        ));
    }
    out
}

/// Returns the reason if a key has no effect in a preference stage.
pub fn unused(values: &Values, path: &str) -> Option<String> {
    let stage = stage(values);
    if !stage.is_preference() {
        return None;
    }
    let why = || Some(format!("train.stage = \"{}\"", stage.name()));
    let loss = loss(values);
    let of_loss = || Some(format!("rlhf.loss_type = \"{loss}\""));
    match path {
        "data.packing" | "data.packing_length" | "data.train_on" | "train.predict_with_generate" => why(),
        "rlhf.label_smoothing" if stage == Stage::Dpo => match loss {
            "robust" | "exo_pair" | "aot" | "aot_unpaired" => None,
            _ => of_loss(),
        },
        "rlhf.discopop_tau" if loss != "discopop" => of_loss(),
        "rlhf.f_alpha_divergence_coef" => match values.text("rlhf.f_divergence_type") {
            "alpha_divergence" => None,
            other => Some(format!("rlhf.f_divergence_type = \"{other}\"")),
        },
        _ => None,
    }
}

pub fn build(values: &Values) -> Preference {
    let number = |path: &str| values.number(path);
    Preference {
        loss_type: loss(values).to_string(),
        beta: number("rlhf.beta"),
        label_smoothing: number("rlhf.label_smoothing"),
        ld_alpha: number("rlhf.ld_alpha"),
        f_divergence_type: values.name("rlhf.f_divergence_type"),
        f_alpha_divergence_coef: number("rlhf.f_alpha_divergence_coef"),
        discopop_tau: number("rlhf.discopop_tau"),
        simpo_gamma: number("rlhf.simpo_gamma"),
        cpo_alpha: number("rlhf.cpo_alpha"),
        desirable_weight: number("rlhf.desirable_weight"),
        undesirable_weight: number("rlhf.undesirable_weight"),
        center_rewards_coefficient: number("rlhf.center_rewards_coefficient"),
    }
}
