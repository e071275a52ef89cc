//! A reward model in the form of transformers: sequence classification with one label.

use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::model::Spec;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Name of the score head in a model directory: `[1, D]`, no bias.
pub const SCORE: &str = "score.weight";

/// Changes the config of a causal language model to its sequence classifier with one output. `pad_id`: trailing tokens
/// with this id are padding; the score is read at the last token before them.
pub fn as_classifier(config: &mut Map<String, Value>, pad_id: Option<u32>) {
    if let Some(Value::Array(names)) = config.get_mut("architectures") {
        for name in names.iter_mut() {
            if let Some(family) = name.as_str().and_then(|n| n.strip_suffix("ForCausalLM")) {
                // transformers uses other names for these text models here.
                let family = match family {
                    "Gemma3" => "Gemma3Text",
                    "Qwen3_5" => "Qwen3_5Text",
                    _ => family,
                };
                *name = json!(format!("{family}ForSequenceClassification"));
            }
        }
    }
    config.insert("id2label".into(), json!({"0": "LABEL_0"}));
    config.insert("label2id".into(), json!({"LABEL_0": 0}));
    if let Some(pad) = pad_id {
        config.insert("pad_token_id".into(), json!(pad));
    }
}

/// True if the model in `dir` has a score head instead of the output projection.
///
/// # Errors
/// It has several scores.
pub fn has_score(spec: &Spec, weights: &Weights, dir: &Path) -> Result<bool> {
    let width = spec.hidden;
    match weights.info(SCORE) {
        Some(info) if info.shape == [1, width] => Ok(true),
        Some(info) => Err(Error::new("the reward model must have exactly one score")
            .at_path(dir)
            .found(format!("{SCORE} {:?}", info.shape))
            .expected(format!("[1, {width}]"))),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_of_a_classifier_has_one_label_and_a_padding_id() {
        let mut config = json!({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 9, "pad_token_id": null});
        let config = config.as_object_mut().unwrap();
        as_classifier(config, Some(3));
        assert_eq!(
            json!(config),
            json!({
                "architectures": ["Qwen3ForSequenceClassification"],
                "vocab_size": 9,
                "pad_token_id": 3,
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
            })
        );
    }
}
