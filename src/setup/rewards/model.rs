//! A reward model: a causal model whose output projection is one row, `score.weight`, applied to the last token. The
//! stage `reward` writes such directories, and so does `AutoModelForSequenceClassification` of transformers with one
//! label.

use super::RewardInput;
use crate::base::{Error, Result};
use crate::data::encode::Encoder;
use crate::data::{Batch, Example, content};
use crate::hf;
use crate::model::{Network, Spec};
use crate::recipe::{Dtype, ModelInit, TrainOn};
use crate::report;
use crate::rlhf::preference::reward::scores;
use crate::setup::ModelDir;
use crate::setup::vocabulary::TextChanges;
use crate::source::StoragePolicy;
use candle_core::{Device, Tensor};
use std::path::PathBuf;

/// A reward model, unquantized and held whole.
#[derive(Debug, Clone)]
pub struct RewardModelSpec {
    pub spec: Spec,
    pub storage: StoragePolicy,
    /// Tokens of answers that it reads together, unless one answer is longer.
    pub tokens: usize,
}

/// Tokens per batch.
const TOKENS: usize = 4096;

/// The files of a model that make ids of a conversation.
const TEXT: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
];

pub struct RewardModel {
    model_dir: ModelDir,
    network: Network,
    /// `[1, D]`
    score: Tensor,
    /// Padding id. Trailing padding is ignored, as in transformers.
    pad: Option<u32>,
    /// The user was warned of answers that are too long for it.
    warned: bool,
}

fn no_score(model_dir: &ModelDir) -> Error {
    Error::new("the directory does not contain a reward model")
        .at_path(&model_dir.dir)
        .found(format!("no tensor `{}`", hf::SCORE))
        .hint(
            "train one with `train.stage = \"reward\"` and give its `final/`; for a LoRA adapter, give the output \
               of `ft merge`",
        )
}

impl RewardModel {
    /// Reads the directory without loading the weights. Errors: it is not a reward model.
    pub fn describe(dir: &str) -> Result<ModelDir> {
        let mut model_dir = ModelDir::open(dir, "main", &TextChanges::default())?;
        if !model_dir.has_score(&*model_dir.weights()?)? {
            return Err(no_score(&model_dir));
        }
        // The model has no output projection.
        model_dir.spec.tied = true;
        Ok(model_dir)
    }

    /// Hash of everything on which its scores depend: weights, tokenizer, template, padding. Errors: as `describe`; weights
    /// that are not finite.
    pub fn content(dir: &str) -> Result<String> {
        let model_dir = Self::describe(dir)?;
        let weights = model_dir.weights()?;
        let mut texts = vec![
            "ft reward model 1".to_string(),
            hf::fingerprint_of(&model_dir.spec, &weights)?.exact,
            blake3::hash(&weights.read_bytes(hf::SCORE)?).to_hex().to_string(),
            format!("{:?}", model_dir.config.opt_usize0("pad_token_id")?),
        ];
        let names: Vec<&str> = TEXT
            .into_iter()
            .filter(|name| model_dir.dir.join(name).is_file())
            .collect();
        let files: Vec<PathBuf> = names.iter().map(|name| model_dir.dir.join(name)).collect();
        texts.extend(names.into_iter().map(String::from));
        texts.extend(content::hashes(&files)?);
        Ok(content::of_texts(&texts))
    }

    /// The memory for the plan. Errors: as `describe`.
    pub fn cost(dir: &str) -> Result<RewardModelSpec> {
        let model_dir = Self::describe(dir)?;
        let stored = model_dir.stored(ModelInit::Pretrained)?;
        let dtype = match stored.number_bytes {
            Some(2) => Dtype::Bf16,
            _ => Dtype::F32,
        };
        Ok(RewardModelSpec {
            spec: model_dir.files.spec,
            storage: StoragePolicy::dense(dtype),
            tokens: TOKENS,
        })
    }

    pub fn open(dir: &str, device: &Device) -> Result<Self> {
        let model_dir = Self::describe(dir)?;
        let (network, score) = model_dir.infer_scored(None, None, device)?;
        let score = score.ok_or_else(|| no_score(&model_dir))?;
        let pad = model_dir.config.opt_usize0("pad_token_id")?.map(|id| id as u32);
        Ok(Self {
            model_dir,
            network,
            score,
            pad,
            warned: false,
        })
    }

    /// The score at the last token of the conversation, or of prompt and answer. NaN if they have more tokens than the
    /// model has positions: the score of a part is not that of the answer.
    ///
    /// Errors: an answer that cannot be encoded; a score that is not finite.
    pub fn scores(&mut self, answers: &[RewardInput]) -> Result<Vec<f64>> {
        let encoder = Encoder {
            codec: &self.model_dir.tokenizer,
            template: self.model_dir.template(),
            train_on: TrainOn::All,
            max_length: self.model_dir.spec.max_positions,
            embedding_rows: self.model_dir.spec.vocab,
        };
        let (mut examples, mut scored) = (Vec::with_capacity(answers.len()), Vec::with_capacity(answers.len()));
        for (i, answer) in answers.iter().enumerate() {
            let sample = answer.prompt.answered(answer.text);
            let encoded = encoder.encode(&sample).map_err(|e| e.within(&answer.prompt.place))?;
            if encoded.cut == 0 {
                examples.push(encoded.example);
                scored.push(i);
            }
        }
        let mut found = Vec::with_capacity(scored.len());
        let mut rest = &examples[..];
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|e| {
                tokens += e.ids.len();
                tokens <= TOKENS
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            found.extend(self.run(now)?);
            rest = later;
        }
        if scored.len() < answers.len() && !std::mem::replace(&mut self.warned, true) {
            report::warn(&format!(
                "{} of {} answers are, with their prompts, longer than the context length of the reward model ({} tokens): \
                 they get no score from it; lower `rlhf.max_completion_length`",
                answers.len() - scored.len(),
                answers.len(),
                self.model_dir.spec.max_positions
            ));
        }
        let mut scores = vec![f64::NAN; answers.len()];
        for (i, score) in scored.into_iter().zip(found) {
            if !score.is_finite() {
                return Err(Error::new("the reward model gave a score that is not finite")
                    .at(&answers[i].prompt.place)
                    .found(score)
                    .expected("a finite number")
                    .hint(format!(
                        "check the weights in {}, or give another reward model",
                        self.model_dir.dir.display()
                    )));
            }
            scores[i] = score;
        }
        Ok(scores)
    }

    fn run(&self, examples: &[Example]) -> Result<Vec<f64>> {
        let batch = Batch::from_examples(examples);
        let ctx = self.network.context(&batch.positions, &batch.documents, None)?;
        let h = self.network.hidden_states(&batch.ids, &ctx)?;
        scores(&h, &batch, self.pad, &self.score)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{prompt, reward_model};
    use super::*;
    use crate::data::prompts::Prompt;
    use serde_json::Value;
    use std::fs;
    use std::path::Path;

    fn scores(dir: &Path, prompt: &Prompt, texts: &[&str]) -> Result<Vec<f64>> {
        let inputs: Vec<RewardInput> = texts
            .iter()
            .map(|text| RewardInput {
                prompt,
                text,
                tokens: 1,
                finished: true,
            })
            .collect();
        RewardModel::open(dir.to_str().unwrap(), &Device::Cpu)?.scores(&inputs)
    }

    #[test]
    fn an_answer_beyond_the_positions_of_a_reward_model_gets_no_score() {
        let dir = tempfile::tempdir().unwrap();
        reward_model(dir.path(), &|_, _| {});
        let (ask, long) = (prompt(1, Value::Null), "x ".repeat(40));
        let all = scores(dir.path(), &ask, &["yes", &long, "no"]).unwrap();
        assert!(all.iter().all(|x| x.is_finite()), "{all:?}");
        let short = scores(dir.path(), &ask, &["yes", "no"]).unwrap();

        let config = dir.path().join("config.json");
        let text = fs::read_to_string(&config).unwrap();
        let fewer = text.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 30");
        assert_ne!(text, fewer);
        fs::write(&config, fewer).unwrap();
        let found = scores(dir.path(), &ask, &["yes", &long, "no"]).unwrap();
        assert!(found[1].is_nan(), "{found:?}");
        assert_eq!([found[0], found[2]], short[..]);
    }

    #[test]
    fn a_score_that_is_not_finite_is_an_error_with_the_place_of_the_prompt() {
        let dir = tempfile::tempdir().unwrap();
        reward_model(dir.path(), &|name, values| {
            // The weights are finite, and the hidden states are not.
            if name == "model.norm.weight" {
                values.fill(f32::MAX);
            }
        });
        let e = scores(dir.path(), &prompt(7, Value::Null), &["yes"])
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("not finite") && e.contains("t.jsonl:7") && (e.contains("NaN") || e.contains("inf")),
            "{e}"
        );
    }
}
