//! Learning from preferences: pairs of a chosen and a rejected answer (`dpo`, `orpo`, `simpo`, `reward`), or answers
//! that were judged one by one (`kto`). Formulas, normalisation and names of metrics are those of TRL 1.16.
//!
//! Letters: N tokens of a batch, D hidden size, B units of a batch (pairs or judged answers).
//!
//! `losses` and `unpaired` are arithmetic on log-probabilities; `policy` brings it to hidden states; `reward` is the
//! objective of a reward model.

pub mod losses;
pub mod policy;
pub mod reward;
pub mod unpaired;

pub use losses::{Pairwise, Terms};
pub use policy::{Algorithm, Preferences};
pub use reward::Reward;

/// Columns of documents (`data::Columns`) that these objectives read.
pub mod columns {
    /// Tokens of the prompt, which the answer follows.
    pub const PROMPT: &str = "prompt_tokens";
    /// Log-probability of the answer under the reference.
    pub const REFERENCE: &str = "reference_logps";
    /// By how much the chosen side should win, at both documents of a pair.
    pub const MARGIN: &str = "margin";
    /// 1: a desirable answer, 0: an undesirable one, -1: a mismatched pair that only estimates the KL.
    pub const LABEL: &str = "label";
}
