//! `ft eval`: evaluates a model on rows. The measure depends on the kind of rows: loss of texts, log-probabilities of
//! chosen and rejected answers, exact answers to prompts. For a reward model: how often the chosen answer scores
//! higher.

mod answers;
mod report;

pub use report::{EvaluateReport, NumberDisplay};

use crate::base::{Error, Result, progress, signal};
use crate::commands::named::{self, ModelAndAdapter};
use crate::data::order::eval_batches;
use crate::data::peek::{self, RowKind};
use crate::data::{Batch, Dataset, RowOrigin};
use crate::engine::{self, Totals};
use crate::model::{Network, Objective};
use crate::recipe::{DeviceRef, Dtype, ModelInit, ModelRef, Recipe, Stage};
use crate::report as terminal;
use crate::rlhf::preference::RewardObjective;
use crate::setup::rows;
use crate::setup::sources::{RowSet, sources};
use crate::setup::vocabulary::TextChanges;
use crate::setup::{self, ModelDir};
use crate::sft::CausalLm;
use crate::train::samples;
use crate::train::stage::preference;
use candle_core::Tensor;
use std::collections::BTreeSet;
use std::path::Path;

/// Tokens per batch, and pairs per batch.
const BATCH_TOKENS: usize = 2048;
const BATCH_PAIRS: usize = 8;

/// The settings of an evaluation.
pub struct EvaluateRequest<'a> {
    /// A model directory, a hub id, a run, a checkpoint, or an adapter directory.
    pub model: &'a str,
    pub adapter: Option<&'a Path>,
    /// The reference model for pairs; `None`: the model without its adapter.
    pub reference: Option<&'a str>,
    /// Settings for reading the rows. `model.path` and `tune` are ignored.
    pub recipe: &'a Recipe,
    /// The recipe of the run, if `recipe` reads rows in another way: training held out rows by this one.
    pub run_recipe: Option<&'a Recipe>,
    /// Use all rows of `recipe.data.train` instead of the evaluation rows of the recipe.
    pub all_rows: bool,
    /// Apply `data.max_length`; otherwise rows are not cut.
    pub own_length: bool,
    pub device: &'a DeviceRef,
    pub dtype: Option<Dtype>,
    /// Longest answer to a prompt, in tokens.
    pub max_new_tokens: usize,
}

/// A loaded model.
struct EvaluatedModel {
    model_dir: ModelDir,
    network: Network,
    score: Option<Tensor>,
    adapter: bool,
    named: ModelAndAdapter,
}

fn open(model: &str, adapter: Option<&Path>, request: &EvaluateRequest) -> Result<EvaluatedModel> {
    let named = named::find(model, adapter)?;
    let model_dir = open_files(&named, request.recipe)?;
    let device = setup::device(request.device)?;
    let (network, score) = model_dir.infer_scored(named.adapter.as_deref(), request.dtype, &device)?;
    Ok(EvaluatedModel {
        model_dir,
        network,
        score,
        adapter: named.adapter.is_some(),
        named,
    })
}

/// Opens the files of a model with the chat template of the recipe.
fn open_files(named: &ModelAndAdapter, recipe: &Recipe) -> Result<ModelDir> {
    ModelDir::open(&named.model, &recipe.model.revision, &changes(named, recipe))
}

fn changes(named: &ModelAndAdapter, recipe: &Recipe) -> TextChanges {
    TextChanges {
        template: recipe.data.chat_template.given().cloned(),
        adapter_template: named.template.clone(),
        kwargs: recipe.data.template_kwargs.clone(),
        adapters: named.adapter.iter().cloned().collect(),
        ..TextChanges::default()
    }
}

/// Errors: an invalid model, adapter or row; a signal.
pub fn evaluate(request: &EvaluateRequest) -> Result<EvaluateReport> {
    let opened = open(request.model, request.adapter, request)?;
    let mut recipe = request.recipe.clone();
    if !request.own_length {
        recipe.data.max_length = usize::MAX;
    }
    let kind = match &opened.score {
        Some(_) => RowKind::Pairs,
        None => kind_of(&recipe, request)?,
    };
    if let Some(name) = request
        .reference
        .filter(|_| opened.score.is_some() || kind != RowKind::Pairs)
    {
        return Err(Error::usage("these rows need no reference model")
            .at("--reference")
            .found(name)
            .expected("pairs of chosen and rejected answers, and a model that is not a reward model")
            .hint("leave `--reference` out"));
    }
    let mut report = match (kind, &opened.score) {
        (_, Some(score)) => reward(&opened, score, &recipe, request)?,
        (RowKind::Text, None) => texts(&opened, &recipe, request)?,
        (RowKind::Prompts, None) => answers::prompts(&opened, &recipe, request)?,
        (RowKind::Pairs, None) => answers::pairs(&opened, &recipe, request)?,
        (RowKind::Judged, None) => answers::judged(&opened, &recipe, request)?,
    };
    report.notes = opened.named.notes.clone();
    Ok(report)
}

/// Returns the kind of rows that the recipe's stage uses. If rows are given, or for text stages: the kind of the first
/// row.
fn kind_of(recipe: &Recipe, request: &EvaluateRequest) -> Result<RowKind> {
    match recipe.train.stage {
        Stage::Grpo | Stage::Ppo if !request.all_rows => return Ok(RowKind::Prompts),
        Stage::Kto if !request.all_rows => return Ok(RowKind::Judged),
        stage if stage.is_preference() && !request.all_rows => return Ok(RowKind::Pairs),
        _ => {}
    }
    match sources(recipe, rows_of(recipe, request))?.first() {
        Some(source) => peek::kind(source, &recipe.rl.answer_column),
        None => Err(no_rows()),
    }
}

fn no_rows() -> Error {
    Error::usage("there are no rows to evaluate on")
        .hint("give `--data FILE`, or a recipe with `data.eval` or `data.eval_fraction`")
}

/// The rows to read, in full or in part.
fn rows_of(recipe: &Recipe, request: &EvaluateRequest) -> RowSet<'static> {
    if request.all_rows || recipe.data.eval.is_empty() {
        RowSet::Train
    } else {
        RowSet::Eval
    }
}

/// Names of the files, for messages.
fn files(recipe: &Recipe, request: &EvaluateRequest) -> Vec<String> {
    match rows_of(recipe, request) {
        RowSet::Eval => recipe.data.eval.clone(),
        _ => recipe.data.train_paths().cloned().collect(),
    }
}

/// Reads the rows in the form that this stage uses.
fn read(opened: &EvaluatedModel, recipe: &Recipe, request: &EvaluateRequest, stage: Stage) -> Result<Dataset> {
    let mut recipe = recipe.clone();
    recipe.train.stage = stage;
    let model_dir = &opened.model_dir;
    if !is_held_out(request)? {
        return rows::read(&recipe, rows_of(&recipe, request), model_dir);
    }
    let is_run = request.model == request.recipe.train.output_dir;
    if is_run && request.run_recipe.is_none() && request.own_length && stage == request.recipe.train.stage {
        return rows::held_out(&recipe, model_dir);
    }
    let rows = rows::read_at(&recipe, model_dir, &held_out_places(opened, request, stage)?)?;
    if rows.examples.is_empty() {
        return Err(none_left(&recipe, request));
    }
    Ok(rows)
}

/// The error if the settings of the evaluation leave out every row that training held out.
fn none_left(recipe: &Recipe, request: &EvaluateRequest) -> Error {
    Error::new("no held-out row is left")
        .at(files(recipe, request).join(", "))
        .expected("at least one of the rows that the run held out (`data.eval_fraction`)")
        .hint(
            "the settings of this evaluation (such as `--max-length`, or `data.long = \"drop\"`) leave out all of them",
        )
}

/// True if the rows are those that training held out. Errors: there are no rows.
fn is_held_out(request: &EvaluateRequest) -> Result<bool> {
    let data = &request.recipe.data;
    let held_out = !request.all_rows && data.eval.is_empty();
    if held_out && data.eval_fraction == 0.0 {
        return Err(no_rows());
    }
    Ok(held_out)
}

/// The places of the rows that training held out. The number of rows decides which ones these are, so rows are read,
/// and dropped, with the settings and the tokenizer of the run. The evaluation reads them as rows of `stage`.
fn held_out_places(opened: &EvaluatedModel, request: &EvaluateRequest, stage: Stage) -> Result<BTreeSet<RowOrigin>> {
    let recipe = request.run_recipe.unwrap_or(request.recipe);
    if !is_of_run(request.model, request.adapter, recipe) {
        match files_of_run(recipe) {
            Ok(model_dir) => return places(recipe, &model_dir, stage),
            Err(e) => terminal::warn(&format!(
                "the model of the run cannot be opened ({}), so the held-out rows are found with the tokenizer of {}: \
                 if it is another one and rows are dropped by their length, rows of the training may be evaluated",
                e.what(),
                request.model
            )),
        }
    }
    match request.run_recipe {
        None => places(recipe, &opened.model_dir, stage),
        Some(recipe) => places(recipe, &open_files(&opened.named, recipe)?, stage),
    }
}

/// The held-out places by a recipe. If its stage cannot read the rows, no run has trained on them: then they are read
/// as rows of `stage`.
fn places(recipe: &Recipe, model_dir: &ModelDir, stage: Stage) -> Result<BTreeSet<RowOrigin>> {
    let of_run = recipe.train.stage;
    let is_another = stage != of_run && !(stage.is_rl() && of_run.is_rl());
    match rows::held_out_places(recipe, model_dir) {
        Err(_) if is_another => {
            let mut recipe = recipe.clone();
            recipe.train.stage = stage;
            if stage.is_rl() {
                // The length for answers is that of another stage, and may leave no room for prompts.
                let room = (recipe.data.max_length / 2).max(1);
                recipe.rl.max_completion_length = recipe.rl.max_completion_length.min(room);
            }
            rows::held_out_places(&recipe, model_dir)
        }
        found => found,
    }
}

/// True if the model, or its adapter, is of the run of a recipe, so that it has the tokenizer of the run: in its
/// directory, or the model from which it starts.
fn is_of_run(model: &str, adapter: Option<&Path>, recipe: &Recipe) -> bool {
    let run_dir = Path::new(&recipe.train.output_dir);
    let in_run = |path: &Path| match (path.canonicalize(), run_dir.canonicalize()) {
        (Ok(path), Ok(run_dir)) => path.starts_with(run_dir),
        _ => false,
    };
    if let Some(adapter) = adapter {
        return in_run(adapter);
    }
    let base = &recipe.model;
    let has_own_tokens = recipe.data.adds_tokens() || recipe.tune.lora.adapter.is_some();
    // A hub id without a revision is opened at `main`.
    let is_base = ModelRef::new(model) == base.path && (base.path.is_local() || base.revision == "main");
    in_run(Path::new(model)) || is_base && !has_own_tokens
}

/// The tokenizer and the chat template of the run of a recipe: of its result, or of the model that it starts from.
fn files_of_run(recipe: &Recipe) -> Result<ModelDir> {
    let (base, result) = (&recipe.model, Path::new(&recipe.train.output_dir).join("final"));
    if result.is_dir() {
        let named = named::find(&result.to_string_lossy(), None)?;
        let (model, changes) = (ModelRef::new(&named.model), changes(&named, recipe));
        ModelDir::read_text(&model, &base.revision, ModelInit::Pretrained, &changes)
    } else {
        ModelDir::read_text(&base.path, &base.revision, base.init, &TextChanges::of_recipe(recipe)?)
    }
}

fn texts(opened: &EvaluatedModel, recipe: &Recipe, request: &EvaluateRequest) -> Result<EvaluateReport> {
    let EvaluatedModel { model_dir, network, .. } = opened;
    let stage = match recipe.train.stage {
        Stage::Pretrain => Stage::Pretrain,
        _ => Stage::Sft,
    };
    let rows = read(opened, recipe, request, stage)?;
    if let Some(line) = rows::beyond(rows.stats.longest, model_dir.spec.max_positions) {
        terminal::warn(&line);
    }
    let objective = CausalLm::new(model_dir.spec.vocab);
    let batches = eval_batches(&rows, BATCH_TOKENS);
    let count = rows.examples.len();
    let totals = totals(network, &objective, batches, count, &files(recipe, request))?;
    let sources = sources(recipe, rows_of(recipe, request))?;
    let spec = rows::spec(&sources, &recipe.data, stage, model_dir.spec.vocab);
    let mut questions = rows.questions(&spec, &model_dir.tokenizer, model_dir.template(), usize::MAX)?;
    if let Some(warning) = samples::skip_long(&mut questions, model_dir.spec.generated_positions()) {
        terminal::warn(&warning);
    }
    let mut report = EvaluateReport::of_loss("rows", rows.examples.len(), totals);
    if let Some(right) = samples::exact_matches(model_dir, network, &questions)? {
        report.add(
            "accuracy",
            right,
            NumberDisplay::Part,
            "exact matches with greedy decoding",
        );
    }
    Ok(report)
}

fn reward(
    opened: &EvaluatedModel,
    score: &Tensor,
    recipe: &Recipe,
    request: &EvaluateRequest,
) -> Result<EvaluateReport> {
    let model_dir = &opened.model_dir;
    let pad = if opened.adapter {
        preference::pad_id(&model_dir.tokenizer)
    } else {
        model_dir.config.opt_usize0("pad_token_id")?.map(|id| id as u32)
    };
    let reward = RewardObjective::with_head(score.clone(), pad, 0.0);
    let pairs = read(opened, recipe, request, Stage::Reward)?;
    let batches = pair_batches(&pairs);
    let count = 2 * pairs.examples.len();
    let totals = totals(&opened.network, &reward, batches, count, &files(recipe, request))?;
    let means = reward.metrics();
    let mean = |name| {
        means
            .iter()
            .find(|(n, _)| *n == name)
            .map_or(f64::NAN, |(_, mean)| *mean)
    };
    let mut report = EvaluateReport::of_scores(pairs.examples.len(), totals);
    let of_pairs = "pairs whose chosen answer scores higher";
    report.add("accuracy", mean("accuracy"), NumberDisplay::Part, of_pairs);
    report.add(
        "margin",
        mean("margin"),
        NumberDisplay::Number,
        "mean score difference, chosen - rejected",
    );
    report.add("mean_reward", mean("mean_reward"), NumberDisplay::Number, "mean score");
    Ok(report)
}

fn pair_batches(pairs: &Dataset) -> impl Iterator<Item = Result<Batch>> + '_ {
    let rows: Vec<usize> = (0..pairs.examples.len()).collect();
    let chunks: Vec<Vec<usize>> = rows.chunks(BATCH_PAIRS).map(<[usize]>::to_vec).collect();
    chunks.into_iter().map(|rows| preference::batch(pairs, &rows, None))
}

fn stop_if_asked() -> Result<()> {
    match signal::received() {
        Some(s) => Err(Error::signal(s, "stopped while evaluating")),
        None => Ok(()),
    }
}

/// Errors: a signal; a loss that is not finite.
fn totals(
    network: &Network,
    objective: &dyn Objective,
    batches: impl Iterator<Item = Result<Batch>>,
    rows: usize,
    files: &[String],
) -> Result<Totals> {
    let mut totals = Totals::default();
    let phase = progress::phase("evaluating", rows, "rows");
    for batch in batches {
        stop_if_asked()?;
        let batch = batch?;
        totals.add(engine::evaluate(network, objective, &batch)?);
        phase.add(batch.documents.len().saturating_sub(1) as u64);
    }
    if totals.weight == 0 {
        return Err(Error::new("there is nothing to evaluate: no row has a trained token")
            .at(files.join(", "))
            .hint("`ft data` shows which tokens are trained; a `max_length` that cuts every answer can cause this"));
    }
    if totals.loss().is_finite() {
        Ok(totals)
    } else {
        Err(Error::new("the loss is not finite")
            .at(files.join(", "))
            .found(totals.loss_sum)
            .hint("check the weights, or use `--dtype f32`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    fn recipe_with(model: &str, keys: &str) -> Recipe {
        let text = format!("[model]\npath = \"{model}\"\n{keys}");
        recipe::parse(&text, "r.toml", &[]).unwrap().recipe
    }

    #[test]
    fn rows_that_the_stage_of_the_recipe_cannot_read_are_held_out_as_the_evaluation_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rows.jsonl");
        let model_dir = ModelDir::open("shape:small", "main", &TextChanges::default()).unwrap();
        for (row, format, stage) in [
            (
                r#"{"prompt": "q#", "chosen": "a", "rejected": "b"}"#,
                "auto",
                Stage::Dpo,
            ),
            (
                r#"{"prompt": "q#", "completion": "a", "label": true}"#,
                "preference",
                Stage::Kto,
            ),
            (r#"{"prompt": "q#", "answer": "a"}"#, "prompt", Stage::Grpo),
        ] {
            let rows: String = (0..10).map(|i| row.replace('#', &i.to_string()) + "\n").collect();
            std::fs::write(&file, rows).unwrap();
            let keys = format!(
                "[data]\ntrain = \"{}\"\nformat = \"{format}\"\nmax_length = 64\ncache = false\neval_fraction = 0.4\n",
                file.display()
            );
            let recipe = recipe_with("shape:small", &keys);
            assert!(places(&recipe, &model_dir, recipe.train.stage).is_err(), "{format}");
            let found = places(&recipe, &model_dir, stage).unwrap();
            assert_eq!(found.len(), 4, "{format}");
        }
    }

    #[test]
    fn only_a_model_with_the_tokenizer_of_the_run_stands_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        for name in ["run/checkpoint-3", "run/final", "run2"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        let keys = format!("[data]\ntrain = \"t\"\n[train]\noutput_dir = \"{}\"\n", at("run"));
        let recipe = recipe_with("org/base", &keys);
        for (model, adapter, expected) in [
            (at("run"), None, true),
            (at("run/"), None, true),
            (at("run/checkpoint-3"), None, true),
            (at("run2"), None, false),
            (at("missing"), None, false),
            ("org/base".to_string(), None, true),
            ("org/other".to_string(), None, false),
            ("org/base".to_string(), Some(at("run/final")), true),
            ("org/base".to_string(), Some(at("run2")), false),
        ] {
            let found = is_of_run(&model, adapter.as_deref().map(Path::new), &recipe);
            assert_eq!(found, expected, "{model} {adapter:?}");
        }
        assert!(!is_of_run("org/base", None, &recipe_with("org/base@v1", &keys)));
        let mut longer = recipe;
        longer.data.new_special_tokens.push("<x>".to_string());
        assert!(!is_of_run("org/base", None, &longer));
    }
}
