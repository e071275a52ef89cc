//! Preference learning: pairs of a chosen and a rejected answer (`dpo`, `orpo`, `simpo`, `reward`), or answers judged
//! one by one (`kto`). Formulas, normalization and names of metrics are those of TRL 1.16.
//!
//! Letters: N tokens of a batch, D hidden size, B units of a batch (pairs or judged answers).
//!
//! `losses` and `unpaired` compute on log-probabilities; `policy` connects them to hidden states; `reward` is the
//! objective of a reward model.

pub mod config;
pub mod losses;
pub mod policy;
pub mod reward;
pub mod unpaired;

pub use losses::{PairwiseLoss, PreferenceTerms};
pub use policy::{PreferenceAlgorithm, PreferenceObjective};
pub use reward::RewardObjective;

/// Document columns (`data::Columns`) that these objectives read.
pub mod columns {
    /// Number of prompt tokens; the answer follows them.
    pub const PROMPT: &str = "prompt_tokens";
    /// Log-probability of the answer with the reference model.
    pub const REFERENCE: &str = "reference_logps";
    /// Required reward margin of the chosen side, at both documents of a pair.
    pub const MARGIN: &str = "margin";
    /// 1: a desirable answer, 0: an undesirable one, -1: a mismatched pair that only estimates the KL.
    pub const LABEL: &str = "label";
}
