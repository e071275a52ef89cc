//! A reward model: a causal model whose output projection is one row, `score.weight`, applied to the last token. The
//! stage `reward` writes such directories, and so does `AutoModelForSequenceClassification` of transformers with one
//! label.

use super::RewardInput;
use crate::base::{Error, Result};
use crate::data::encode::Encoder;
use crate::data::{Batch, Example};
use crate::hf;
use crate::model::{Network, Spec};
use crate::recipe::{Dtype, ModelInit, TrainOn};
use crate::rlhf::preference::reward::scores;
use crate::setup::ModelDir;
use crate::setup::vocabulary::TextChanges;
use crate::source::StoragePolicy;
use candle_core::{Device, Tensor};

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

pub struct RewardModel {
    model_dir: ModelDir,
    network: Network,
    /// `[1, D]`
    score: Tensor,
    /// Padding id. Trailing padding is ignored, as in transformers.
    pad: Option<u32>,
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
        })
    }

    /// The score at the last token of the conversation, or of prompt and answer.
    pub fn scores(&self, answers: &[RewardInput]) -> Result<Vec<f64>> {
        let encoder = Encoder {
            codec: &self.model_dir.tokenizer,
            template: self.model_dir.template(),
            train_on: TrainOn::All,
            max_length: self.model_dir.spec.max_positions,
            embedding_rows: self.model_dir.spec.vocab,
        };
        let mut examples = Vec::with_capacity(answers.len());
        for answer in answers {
            let sample = answer.prompt.answered(answer.text);
            let encoded = encoder.encode(&sample).map_err(|e| e.within(&answer.prompt.place))?;
            examples.push(encoded.example);
        }
        let mut scores = Vec::with_capacity(answers.len());
        let mut rest = &examples[..];
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|e| {
                tokens += e.ids.len();
                tokens <= TOKENS
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            scores.extend(self.run(now)?);
            rest = later;
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
