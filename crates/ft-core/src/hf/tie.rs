//! Adapters that save the embedding or the head of a tied model as a whole. As in PEFT 0.21, the saved one is then a
//! separate matrix and the other one is unchanged: the model is untied. With `ensure_weight_tying` it stays tied.

use super::load_adapter::SEQUENCE_CLASSIFIER;
use super::peft_model::{module_of, saves};
use crate::base::{Error, Result};
use crate::formats::adapter::AdapterConfig;
use crate::formats::weights::Weights;
use crate::model::{Spec, spec};
use std::path::Path;

/// True if this config unties embedding and head.
pub(super) fn config_unties(config: &AdapterConfig, spec: &Spec) -> bool {
    let tables = [spec::EMBEDDING, spec::LM_HEAD].map(module_of);
    let saves_table = |table| saves(spec.peft_names(), &config.modules_to_save, table);
    let generates = config.task_type.as_deref() != Some(SEQUENCE_CLASSIFIER);
    spec.tied && generates && !config.ensure_weight_tying && tables.into_iter().any(saves_table)
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
