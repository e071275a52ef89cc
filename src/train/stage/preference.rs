//! Stages `reward`, `dpo`, `orpo`, `simpo`, `kto`: rows of preferences, with the reference's log-probabilities.
//!
//! The reference is the model before the first step: the initial weights; with LoRA the base (a new adapter adds
//! nothing) or the adapter that the run starts from. So no second model is in memory: one pass over the rows before the
//! first step computes one number for each answer, and checkpoints store these numbers.

use super::{BatchSource, Stage, StageContext, rows_of};
use crate::base::{Error, Result, progress, signal};
use crate::comm::Patience;
use crate::data::order::BatchStream;
use crate::data::{Batch, Dataset, RowPosition, Source};
use crate::engine::{Engine, window};
use crate::formats::tokenizer::Tokenizer;
use crate::recipe::{self, Recipe, Train};
use crate::report;
use crate::rlhf::preference::losses::DpoSettings;
use crate::rlhf::preference::unpaired::KtoSettings;
use crate::rlhf::preference::{PairwiseLoss, PreferenceAlgorithm, PreferenceObjective, RewardObjective, columns};

fn algorithm(recipe: &Recipe) -> PreferenceAlgorithm {
    let p = &recipe.preference;
    let pairs = |loss, ld_alpha| PreferenceAlgorithm::Pairs { loss, ld_alpha };
    match recipe.train.stage {
        recipe::Stage::Orpo => pairs(PairwiseLoss::Orpo { beta: p.beta }, 1.0),
        recipe::Stage::Simpo => pairs(
            PairwiseLoss::Simpo {
                beta: p.beta,
                gamma: p.simpo_gamma,
                nll: p.cpo_alpha,
                label_smoothing: p.label_smoothing,
            },
            1.0,
        ),
        recipe::Stage::Kto => PreferenceAlgorithm::Judged(KtoSettings {
            loss: p.loss_type.judged(),
            beta: p.beta,
            desirable_weight: p.desirable_weight,
            undesirable_weight: p.undesirable_weight,
        }),
        _ => pairs(
            PairwiseLoss::Dpo(DpoSettings {
                losses: vec![(p.loss_type.pair(), 1.0)],
                beta: p.beta,
                label_smoothing: p.label_smoothing,
                f_divergence: p.f_divergence_type,
                f_alpha: p.f_alpha_divergence_coef,
                discopop_tau: p.discopop_tau,
            }),
            p.ld_alpha,
        ),
    }
}

/// The padding id in a reward model's config: the tokenizer's own, else EOS, as in TRL.
pub fn pad_id(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.pad_id().or(tokenizer.eos_id())
}

pub(super) fn open<'a>(setting: StageContext<'a>) -> Result<Stage<'a>> {
    let recipe = setting.recipe;
    let mut batches = PreferenceSource {
        stream: setting.stream,
        sets: [Some(setting.train), setting.eval],
        units: recipe.train.batch_size,
        algorithm: None,
        reference: Default::default(),
    };
    if recipe.train.stage == recipe::Stage::Reward {
        let spec = setting.spec;
        if spec.multimodal {
            let reason = "a reward model from a multimodal model is not supported: ft writes text-only classifiers";
            return Err(Error::unsupported(reason)
                .at(Train::stage)
                .found(format!("a multimodal model with the text model `{}`", spec.model_type))
                .hint("train the reward model from another family; it may judge answers of this one"));
        }
        if !spec.has_classifier() {
            report::warn(&format!(
                "transformers has no sequence classifier for `{}`: ft reads the reward model, transformers only with a class \
                 derived from `GenericForSequenceClassification`",
                spec.model_type
            ));
        }
        let reward = RewardObjective::new(
            spec.hidden,
            f64::from(spec.initializer_range),
            pad_id(&setting.model.tokenizer),
            recipe.preference.center_rewards_coefficient,
            recipe.train.seed,
            setting.device,
        )?;
        return Ok(Stage {
            batches: Box::new(batches),
            objective: Box::new(reward),
        });
    }
    let algorithm = algorithm(recipe);
    batches.algorithm = algorithm.has_reference().then(|| algorithm.clone());
    Ok(Stage {
        batches: Box::new(batches),
        objective: Box::new(PreferenceObjective::new(algorithm)),
    })
}

struct PreferenceSource<'a> {
    stream: BatchStream<'a>,
    /// The training set and the evaluation set.
    sets: [Option<&'a Dataset>; 2],
    /// Rows per batch of the evaluation.
    units: usize,
    /// The loss, if it needs the reference; it defines how the log-probabilities of an answer are summed.
    algorithm: Option<PreferenceAlgorithm>,
    /// For each set: the reference's log-probability of each document, row by row.
    reference: [Vec<f32>; 2],
}

/// Builds the batch of these rows of a set; `reference`: log-probabilities of the set's documents.
pub fn batch(set: &Dataset, rows: &[usize], reference: Option<&[f32]>) -> Result<Batch> {
    let mut batch = set.batch(rows)?;
    let (mut prompts, mut margins, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    let mut references = Vec::new();
    for &row in rows {
        let p = set.preferences.get(row);
        let p = p.ok_or_else(|| Error::new("a preference row is incomplete").found(row))?;
        // All rows of a set have the same number of documents.
        let documents = set.documents(row).len();
        for document in 0..documents {
            prompts.push(p.prompt as f32);
            margins.push(p.margin);
            labels.push(match document {
                0 => f32::from(u8::from(p.label)),
                _ => -1.0,
            });
            if let Some(reference) = reference {
                let found = reference.get(row * documents + document);
                references.push(*found.ok_or_else(|| Error::new("a row has no reference log-probability").found(row))?);
            }
        }
    }
    let columns = &mut batch.columns.documents;
    columns.insert(columns::PROMPT, prompts);
    columns.insert(columns::MARGIN, margins);
    columns.insert(columns::LABEL, labels);
    if reference.is_some() {
        columns.insert(columns::REFERENCE, references);
    }
    Ok(batch)
}

impl PreferenceSource<'_> {
    /// Puts the log-probabilities of the groups of all ranks in the order of the rows. `own`: those of this rank's groups.
    fn of_all_ranks(&self, set: &Dataset, own: Vec<f32>, engine: &Engine) -> Result<Vec<f32>> {
        let size = engine.comm().world().size;
        if size == 1 {
            return Ok(own);
        }
        let bytes = own.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = engine.comm().all_gather_bytes(bytes, Patience::Long)?;
        let numbers = |bytes: &Vec<u8>| {
            let numbers = bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            numbers.collect::<Vec<_>>()
        };
        let mut all: Vec<_> = all.iter().map(|bytes| numbers(bytes).into_iter()).collect();
        let mut out = Vec::new();
        for (index, rows) in self.groups(set).iter().enumerate() {
            let documents = rows.iter().map(|row| set.documents(*row).len()).sum();
            out.extend(all[index % size].by_ref().take(documents));
        }
        Ok(out)
    }

    fn groups(&self, set: &Dataset) -> Vec<Vec<usize>> {
        let rows: Vec<usize> = (0..set.examples.len()).collect();
        rows.chunks(self.units.max(1)).map(<[usize]>::to_vec).collect()
    }

    /// Identifies the rows of the numbers in a checkpoint.
    fn key(&self) -> String {
        let prints = self.sets.map(|set| set.map_or("", |s| s.fingerprint.as_str()));
        format!("reference logps of {} and {}", prints[0], prints[1])
    }
}

impl BatchSource for PreferenceSource<'_> {
    fn epoch_after(&self, steps: u64) -> f64 {
        self.stream.epoch_after(steps)
    }

    /// Errors: a signal; a log-probability that is not finite.
    fn prepare(&mut self, engine: &Engine) -> Result<()> {
        let Some(algorithm) = &self.algorithm else {
            return Ok(());
        };
        let network = &engine.network;
        let mut found: [Vec<f32>; 2] = Default::default();
        let rows = self.sets.iter().flatten().map(|set| set.examples.len()).sum();
        let phase = progress::phase("computing the reference log-probabilities", rows, "rows");
        let world = engine.comm().world();
        for (set, found) in self.sets.iter().zip(&mut found) {
            let Some(set) = set else { continue };
            // Each rank computes every W-th group of rows.
            let groups = self.groups(set);
            let all: Vec<usize> = (0..groups.len()).collect();
            // If layers are collected, all ranks compute the same number of groups.
            let together = engine.store.sharded().is_some();
            let rounds = window::rounds(&all, world).into_iter();
            for round in rounds.filter(|round| together || round.counts) {
                let rows = &groups[round.micro];
                if let Some(s) = signal::received().filter(|_| !together) {
                    return Err(Error::signal(
                        s,
                        "stopped during the forward passes of the reference; nothing was trained yet",
                    ));
                }
                let batch = batch(set, rows, None)?;
                let ctx = network.context(&batch.positions, &batch.documents, None)?;
                let h = network.hidden_states(&batch.ids, &ctx)?;
                let log_probs = network.head()?.log_probs(&h, &batch.targets)?;
                if round.counts {
                    found.extend(algorithm.logps(&batch, &log_probs)?.iter().map(|x| *x as f32));
                }
                phase.add(rows.len() as u64);
            }
            *found = self.of_all_ranks(set, std::mem::take(found), engine)?;
            if let Some(at) = found.iter().position(|x| !x.is_finite()) {
                return Err(Error::new("a log-probability of the reference is not finite")
                    .found(format!("{} in document {}", found[at], at + 1))
                    .hint("check the model's weights, or set `model.dtype = \"f32\"`"));
            }
        }
        self.reference = found;
        Ok(())
    }

    fn window(&mut self, step: u64, _: &Engine) -> Result<Vec<Batch>> {
        let Some(train) = self.sets[0] else {
            return Err(Error::new("there are no rows to train on"));
        };
        let reference = self.algorithm.is_some().then_some(self.reference[0].as_slice());
        let micro_batches = self.stream.window_indices(step);
        micro_batches
            .map(|index| batch(train, &self.stream.rows(index), reference))
            .collect()
    }

    fn rows(&self, step: u64, sources: &[Source]) -> Result<Vec<Vec<RowPosition>>> {
        match self.sets[0] {
            Some(train) => rows_of(train, &self.stream, step, sources),
            None => Ok(Vec::new()),
        }
    }

    fn eval(&self) -> Result<Vec<Batch>> {
        let Some(eval) = self.sets[1] else {
            return Ok(Vec::new());
        };
        let reference = self.algorithm.is_some().then_some(self.reference[1].as_slice());
        let groups = self.groups(eval).into_iter();
        groups.map(|rows| batch(eval, &rows, reference)).collect()
    }

    /// A line of text, then for each set the number of documents and their log-probabilities, little-endian.
    fn state(&self, _: u64) -> Result<Option<Vec<u8>>> {
        if self.algorithm.is_none() {
            return Ok(None);
        }
        let mut bytes = format!("{}\n", self.key()).into_bytes();
        for numbers in &self.reference {
            bytes.extend((numbers.len() as u64).to_le_bytes());
            bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
        }
        Ok(Some(bytes))
    }

    /// Errors: the state belongs to other rows, or is truncated.
    fn restore(&mut self, state: &[u8]) -> Result<()> {
        let foreign = || {
            Error::new("the reference's log-probabilities in the checkpoint belong to other rows")
                .hint("start a new run in another `train.output_dir`")
        };
        let key = format!("{}\n", self.key());
        let mut rest = state.strip_prefix(key.as_bytes()).ok_or_else(foreign)?;
        for (set, numbers) in self.sets.iter().zip(&mut self.reference) {
            let (count, after) = rest.split_first_chunk::<8>().ok_or_else(foreign)?;
            let count = u64::from_le_bytes(*count) as usize;
            let wanted: usize = set.map_or(0, |s| (0..s.examples.len()).map(|r| s.documents(r).len()).sum());
            if count != wanted || after.len() < 4 * count {
                return Err(foreign());
            }
            let (mine, others) = after.split_at(4 * count);
            *numbers = mine
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            rest = others;
        }
        if rest.is_empty() { Ok(()) } else { Err(foreign()) }
    }
}
