//! Adapters that save the embedding or the head of a tied model as a whole. As in PEFT 0.21, the saved one is then a
//! separate matrix and the other one is unchanged: the model is untied. With `ensure_weight_tying` it stays tied.

use super::load_adapter::SEQUENCE_CLASSIFIER;
use crate::base::{Error, Result};
use crate::formats::adapter::AdapterConfig;
use crate::formats::weights::Weights;
use crate::model::{Spec, spec};
use crate::peft::targets;
use std::path::Path;

/// True if this config unties embedding and head.
pub(super) fn config_unties(config: &AdapterConfig, spec: &Spec) -> bool {
    let tables = [spec::EMBEDDING, spec::LM_HEAD].map(|t| t.trim_end_matches(".weight"));
    let saves = |m: &String| tables.iter().any(|table| targets::ends(table, m));
    let generates = config.task_type.as_deref() != Some(SEQUENCE_CLASSIFIER);
    spec.tied && generates && !config.ensure_weight_tying && config.modules_to_save.iter().any(saves)
}

/// True if the adapter in `dir` unties embedding and head of this model. Load it then into a network with `spec.tied =
/// false`, with `untied_weights`.
///
/// # Errors
/// Trained token rows together with a whole matrix, which PEFT refuses too.
pub fn unties(dir: &Path, spec: &Spec) -> Result<bool> {
    let config = AdapterConfig::load(dir)?;
    let unties = config_unties(&config, spec);
    if unties && !config.token_rows.is_empty() {
        return Err(Error::unsupported(
            "`trainable_token_indices` and `modules_to_save` of the adapter both change the embedding or head of a tied model",
        )
        .at_path(dir)
        .expected("only one of them"));
    }
    Ok(unties)
}

/// Weights of a tied model whose head is read as a separate matrix.
///
/// # Errors
/// The model has no embedding.
pub fn untied_weights(mut weights: Weights) -> Result<Weights> {
    if weights.alias(spec::LM_HEAD, spec::EMBEDDING) {
        Ok(weights)
    } else {
        Err(Error::not_found("the model has no embedding").at(spec::EMBEDDING))
    }
}
