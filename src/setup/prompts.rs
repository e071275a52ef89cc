//! The prompts of a recipe with an RL stage.

use crate::base::{Error, Result};
use crate::data::dataset::held_out;
use crate::data::encode::Encoder;
use crate::data::prompts::{Prompt, PromptLimits, PromptSpec, Prompts};
use crate::data::{Dataset, Example, Mixture, RowOrigin, Screen, mixture};
use crate::model::{Spec, tokens};
use crate::recipe::{LoraInit, Method, PeftType, Recipe, Stage, TrainOn};
use crate::setup::ModelDir;
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::rewards;
use crate::setup::rows;
use crate::setup::sources::{RowSet, sources};
use std::collections::BTreeSet;

/// Prompts for training, and held-out prompts (may be empty).
#[derive(Debug, Default)]
pub struct PromptSet {
    pub train: Vec<Prompt>,
    pub eval: Vec<Prompt>,
    /// How the training prompts of weighted sources are mixed.
    pub mixture: Option<Mixture>,
}

/// True if the recipe has an RL stage.
pub fn reinforces(recipe: &Recipe) -> bool {
    matches!(recipe.train.stage, Stage::Ppo | Stage::Grpo)
}

/// The source of the reference of the KL terms, which is the policy before its first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// There are no KL terms.
    None,
    /// The weights of the policy with its adapters disabled.
    WithoutAdapters,
    /// The weights of the policy with a copy of its first adapters.
    StartAdapters,
    /// A copy of the weights.
    Copy,
}

/// The reference of a run whose parameters train as in `schedule`.
pub fn reference(recipe: &Recipe, spec: &Spec, schedule: &ActiveSchedule) -> Reference {
    let wanted = match recipe.train.stage {
        Stage::Grpo => recipe.rl.grpo.beta > 0.0,
        Stage::Ppo => recipe.rl.ppo.kl_coef > 0.0,
        _ => false,
    };
    // A given adapter may have modules and rows that train in full.
    let changes_weights = || {
        let first = schedule.active(1);
        let rows = first.names().any(|name| name.ends_with(tokens::BELOW));
        rows || spec.params().iter().any(|p| first.contains(&p.name))
    };
    if !wanted {
        Reference::None
    } else if recipe.tune.method != Method::Lora || changes_weights() {
        Reference::Copy
    } else if starts_with_adapters(recipe) {
        Reference::StartAdapters
    } else {
        Reference::WithoutAdapters
    }
}

/// True if the adapters change the model before the first step: given ones, and those of LoftQ. Others are zero then, or
/// subtract their first product.
pub fn starts_with_adapters(recipe: &Recipe) -> bool {
    let lora = &recipe.tune.lora;
    let loftq = lora.peft_type == PeftType::Lora && lora.init_lora_weights == LoraInit::Loftq;
    recipe.tune.method == Method::Lora && (lora.adapter.is_some() || loftq)
}

/// True if only new adapters train, so the base weights stay unchanged. A given adapter may have modules and rows that
/// train in full.
pub fn base_is_frozen(recipe: &Recipe) -> bool {
    let lora = &recipe.tune.lora;
    let beside = [lora.modules_to_save.len(), lora.trainable_token_indices.len()];
    recipe.tune.method == Method::Lora && lora.adapter.is_none() && beside == [0, 0]
}

/// Number of answers in a rollout.
pub fn answers_of_rollout(recipe: &Recipe) -> usize {
    recipe.train.batch_size * recipe.train.gradient_accumulation_steps * recipe.rl.num_mini_batches
}

/// Number of optimizer steps per rollout.
pub fn steps_of_rollout(recipe: &Recipe) -> u64 {
    (recipe.rl.num_iterations * recipe.rl.num_mini_batches) as u64
}

/// Optimizer steps of a run over `prompts` prompts; in a run by epochs the last rollout is complete.
pub fn steps(recipe: &Recipe, prompts: usize) -> u64 {
    if let Ok(steps) = u64::try_from(recipe.train.max_steps) {
        return steps;
    }
    let answers = recipe.train.num_epochs * (prompts * recipe.rl.num_generations) as f64;
    let rollouts = (answers / answers_of_rollout(recipe) as f64 - 1e-6).ceil().max(1.0);
    rollouts as u64 * steps_of_rollout(recipe)
}

/// The prompts of a recipe, and datasets that replace them where only lengths and hashes count: each row is as long as
/// its prompt with the longest possible answer.
pub struct PromptRows {
    pub train: Dataset,
    pub eval: Option<Dataset>,
    pub questions: PromptSet,
}

/// The limits of prompts and answers of a model that decodes up to `positions` tokens.
fn limits(recipe: &Recipe, positions: usize) -> PromptLimits {
    PromptLimits {
        window: recipe.data.max_length.min(positions),
        answer: recipe.rl.max_completion_length,
        long: recipe.data.long,
    }
}

/// Errors: an invalid row; a prompt that leaves no room for its answer.
fn load(recipe: &Recipe, model: &ModelDir, set: RowSet, screen: Option<&Screen>) -> Result<Prompts> {
    let encoder = Encoder {
        codec: &model.tokenizer,
        template: model.template(),
        train_on: TrainOn::Assistant,
        max_length: recipe.data.max_length,
        embedding_rows: model.spec.vocab,
    };
    let sources = sources(recipe, set)?;
    let spec = PromptSpec {
        sources: &sources,
        render: recipe.data.render,
        encoder: &encoder,
        answer: &recipe.rl.answer_column,
        limits: limits(recipe, model.spec.generated_positions()),
        screen,
    };
    rows::with_cache(recipe, |cache| match cache {
        Some(cache) => Prompts::load_cached(&spec, cache),
        None => Prompts::load(&spec),
    })
}

/// The places of the training prompts that `read` holds out. Errors: as `read`.
pub fn held_out_places(recipe: &Recipe, model: &ModelDir, screen: Option<&Screen>) -> Result<BTreeSet<RowOrigin>> {
    let all = load(recipe, model, RowSet::Train, screen)?.origins;
    let is_eval = held_out(all.len(), recipe.data.eval_fraction, recipe.train.seed)?;
    let held_out = all.into_iter().zip(is_eval).filter(|(_, is_eval)| *is_eval);
    Ok(held_out.map(|(place, _)| place).collect())
}

/// Reads the prompts and checks the rewards.
///
/// Errors: an invalid row or reward; a prompt that leaves no room for its answer.
pub fn read(recipe: &Recipe, model: &ModelDir, screen: Option<&Screen>) -> Result<PromptRows> {
    let room = recipe.rl.max_completion_length;
    if !recipe.data.has_train() {
        return Err(Error::usage("training with rewards needs prompts").hint("set `data.train`"));
    }
    let train = load(recipe, model, RowSet::Train, screen)?;
    let (mut hash, mut eval_hash) = (train.fingerprint, None);
    let (readings, mut origins, dropped) = (train.readings, train.origins, train.dropped);
    let mut questions = PromptSet {
        train: train.rows,
        ..PromptSet::default()
    };
    if !recipe.data.eval.is_empty() {
        let eval = load(recipe, model, RowSet::Eval, None)?;
        (questions.eval, eval_hash) = (eval.rows, Some(eval.fingerprint));
    } else if recipe.data.eval_fraction > 0.0 {
        let is_eval = held_out(questions.train.len(), recipe.data.eval_fraction, recipe.train.seed)?;
        let mut kept = is_eval.iter();
        origins.retain(|_| kept.next() == Some(&false));
        for (prompt, is_eval) in std::mem::take(&mut questions.train).into_iter().zip(is_eval) {
            let part = if is_eval {
                &mut questions.eval
            } else {
                &mut questions.train
            };
            part.push(prompt);
        }
        // The split depends on the seed only, and a resumed run has the same seed.
        eval_hash = Some(hash.clone());
        hash = format!("{hash} less {}", questions.eval.len());
    }
    questions.mixture = Mixture::new(&train.shares, mixture::rows_of(&train.shares, &origins))?;
    rewards::check(&recipe.rl, &questions.train, &questions.eval)?;
    let stand_in = |prompts: &[Prompt], hash: String| {
        let mut dataset = Dataset::from_examples(prompts.iter().map(|p| example(p, room)).collect());
        dataset.fingerprint = hash;
        dataset.stats.tokens = prompts.iter().map(|p| p.ids.len() as u64).sum();
        dataset
    };
    let eval = eval_hash.map(|hash| stand_in(&questions.eval, hash));
    let mut train = stand_in(&questions.train, hash);
    train.readings = readings;
    // Counted as in rows for supervised training.
    train.stats.rows += dropped.0;
    (train.stats.dropped_rows, train.stats.long_rows) = (dropped.0, dropped.0);
    train.stats.long_tokens = dropped.1;
    Ok(PromptRows { train, eval, questions })
}

fn example(prompt: &Prompt, room: usize) -> Example {
    let mut ids = prompt.ids.clone();
    ids.resize(prompt.ids.len() + room, 0);
    Example {
        trained: (0..ids.len()).map(|t| t >= prompt.ids.len()).collect(),
        ids,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{families, shapes};
    use crate::recipe;
    use crate::setup::adapters::{self, AdapterValues};

    /// A Rust user who writes `Default::default()` gets what a recipe without these keys gets.
    #[test]
    fn defaults_of_the_library_are_those_of_a_recipe() {
        let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n";
        let recipe = recipe::parse(text, "r.toml", &[]).unwrap().recipe;
        assert_eq!(limits(&recipe, usize::MAX), PromptLimits::default());
    }

    #[test]
    fn only_a_run_that_changes_weights_needs_a_copy_of_them() {
        let of = |text: &str| {
            let text = format!(
                "[model]\npath = \"shape:small\"\n[data]\ntrain = \"y\"\n[train]\nstage = \"grpo\"\n[rlhf]\nrewards = [\"exact\"]\n\
                 [rlhf.grpo]\nbeta = 0.1\n[tune]\n{text}\n"
            );
            let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
            let spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
            let adapters = adapters::with(&recipe, &spec, AdapterValues::Shapes).unwrap();
            let schedule = ActiveSchedule::new(&recipe, &spec, &spec.params(), &adapters).unwrap();
            reference(&recipe, &spec, &schedule)
        };
        let lora = |keys: &str| of(&format!("method = \"lora\"\n[tune.lora]\n{keys}"));
        for keys in [
            "",
            "peft_type = \"vera\"",
            "init_lora_weights = \"pissa\"",
            "init_lora_weights = \"olora\"",
        ] {
            assert_eq!(lora(keys), Reference::WithoutAdapters, "{keys}");
        }
        assert_eq!(lora("init_lora_weights = \"loftq\""), Reference::StartAdapters);
        for keys in ["modules_to_save = [\"embed_tokens\"]", "trainable_token_indices = [1]"] {
            assert_eq!(lora(keys), Reference::Copy, "{keys}");
        }
        for method in ["full", "block", "freeze"] {
            assert_eq!(of(&format!("method = \"{method}\"")), Reference::Copy, "{method}");
        }
    }
}
