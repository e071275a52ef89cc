//! The rows of a recipe: reads them for a run, or shows them to the user.

use crate::base::{Error, Result};
use crate::data::order::{BatchStream, RunLength, StreamSpec};
use crate::data::peek::RowKind;
use crate::data::preference::PreferencePart;
use crate::data::screen::stats::RowStats;
use crate::data::{
    self, Dataset, ReadingReport, RowOrigin, Screen, ScreenCounts, ScreenSpec, Source, TokenCache, dataset, reading,
};
use crate::formats::template::named;
use crate::recipe::{self, Alignment, Auto, JudgedLoss, Long, Recipe, Render, RowFormat, Stage, TrainOn};
use crate::report;
use crate::setup::ModelDir;
use crate::setup::prompts::{self, PromptSet};
use crate::setup::sources::{RowSet, sources};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Tokenized rows of a recipe.
pub struct RecipeRows {
    pub train: Dataset,
    pub eval: Option<Dataset>,
    /// Prompts of an RL stage.
    pub questions: Option<PromptSet>,
    /// The training rows that were dropped.
    pub screened: Option<ScreenCounts>,
}

impl RecipeRows {
    pub fn read(recipe: &Recipe, model: &ModelDir) -> Result<Self> {
        Self::screened(recipe, model, screen(recipe)?.as_ref())
    }

    /// Also counts the texts of the training rows. They are read a second time only if the tokens come from the cache.
    pub fn with_texts(recipe: &Recipe, model: &ModelDir) -> Result<(Self, RowStats)> {
        let screen = screen_of(recipe, |spec| Screen::with_texts(spec).map(Some))?;
        let rows = Self::screened(recipe, model, screen.as_ref())?;
        let texts = match screen.and_then(|screen| screen.texts()) {
            Some(texts) => texts,
            None => texts(recipe, model)?,
        };
        Ok((rows, texts))
    }

    fn screened(recipe: &Recipe, model: &ModelDir, screen: Option<&Screen>) -> Result<Self> {
        let screened = || screen.filter(|screen| screen.drops()).map(Screen::report);
        if prompts::reinforces(recipe) {
            let read = prompts::read(recipe, model, screen)?;
            return Ok(Self {
                train: read.train,
                eval: read.eval,
                questions: Some(read.questions),
                screened: screened(),
            });
        }
        if model.is_shape() && !recipe.data.has_train() {
            let (rows, length) = (random_rows(recipe), recipe.data.max_length);
            let train = Dataset::random(rows, length, model.spec.vocab, recipe.train.seed);
            return Ok(Self {
                train,
                eval: None,
                questions: None,
                screened: None,
            });
        }
        let train = if recipe.data.streaming {
            let sources = sources(recipe, RowSet::Train)?;
            let spec = dataset::DatasetSpec {
                screen,
                ..spec(&sources, &recipe.data, recipe.train.stage, model.spec.vocab)
            };
            Dataset::sample(&spec, &model.tokenizer, model.template(), recipe.data.shuffle_window)?
        } else {
            read_screened(recipe, RowSet::Train, model, screen)?
        };
        let (train, eval) = if !recipe.data.eval.is_empty() {
            (train, Some(read(recipe, RowSet::Eval, model)?))
        } else if recipe.data.eval_fraction > 0.0 {
            let (train, eval) = train.split(recipe.data.eval_fraction, recipe.train.seed)?;
            (train, Some(eval))
        } else {
            (train, None)
        };
        let few = if recipe.data.eval.is_empty() {
            "raise `data.eval_fraction`"
        } else {
            "add rows to `data.eval`"
        };
        Ok(Self {
            train: completed(train, recipe, None)?,
            eval: eval.map(|rows| completed(rows, recipe, Some(few))).transpose()?,
            questions: None,
            screened: screened(),
        })
    }
}

/// Reads these rows of a recipe.
pub fn read(recipe: &Recipe, rows: RowSet, model: &ModelDir) -> Result<Dataset> {
    read_screened(recipe, rows, model, None)
}

/// The training rows that a run of this recipe holds out for evaluation.
pub fn held_out(recipe: &Recipe, model: &ModelDir) -> Result<Dataset> {
    let rows = read_screened(recipe, RowSet::Train, model, screen(recipe)?.as_ref())?;
    Ok(rows.split(recipe.data.eval_fraction, recipe.train.seed)?.1)
}

/// The places of the training rows, or prompts, that a run of this recipe holds out for evaluation.
pub fn held_out_places(recipe: &Recipe, model: &ModelDir) -> Result<BTreeSet<RowOrigin>> {
    if prompts::reinforces(recipe) {
        return prompts::held_out_places(recipe, model, screen(recipe)?.as_ref());
    }
    Ok(held_out(recipe, model)?.all_origins()?.iter().copied().collect())
}

/// The training rows at these places.
pub fn read_at(recipe: &Recipe, model: &ModelDir, places: &BTreeSet<RowOrigin>) -> Result<Dataset> {
    read_screened(recipe, RowSet::Train, model, screen(recipe)?.as_ref())?.at(places)
}

/// As `read`, without the rows that the screen drops.
fn read_screened(recipe: &Recipe, rows: RowSet, model: &ModelDir, screen: Option<&Screen>) -> Result<Dataset> {
    let sources = sources(recipe, rows)?;
    let spec = spec(&sources, &recipe.data, recipe.train.stage, model.spec.vocab);
    let spec = dataset::DatasetSpec {
        screen,
        // The pieces of a row would begin at other texts for a teacher with another tokenizer.
        long: match recipe.distill.alignment {
            Alignment::None => spec.long,
            _ if spec.long == Long::Auto => Long::Truncate,
            _ => spec.long,
        },
        ..spec
    };
    load(recipe, &spec, model)
}

/// Directory of token files, beside the run directories: runs share it.
const TOKEN_CACHE: &str = ".ft-tokens";
/// Smallest data that is cached if the recipe does not decide it. Tokenizing takes seconds below this size.
const LEAST_CACHED: u64 = 16 << 20;

fn load(recipe: &Recipe, spec: &dataset::DatasetSpec, model: &ModelDir) -> Result<Dataset> {
    let (codec, template) = (&model.tokenizer, model.template());
    let loaded = with_cache(recipe, |cache| match (preference_form(recipe.train.stage), cache) {
        (Some(want), None) => data::preference::load(spec, want, codec, template),
        (None, None) => Dataset::load(spec, codec, template),
        (Some(want), Some(cache)) => data::preference::load_cached(spec, want, codec, template, cache),
        (None, Some(cache)) => Dataset::load_cached(spec, codec, template, cache),
    });
    loaded.map_err(|e| if template.is_none() { with_templates(e) } else { e })
}

/// Adds the names of ft's own templates to the hint of a model without one.
fn with_templates(error: Error) -> Error {
    if !error.hint_text().is_some_and(|hint| hint.contains("a Jinja file")) {
        return error;
    }
    let names: Vec<&str> = named::NAMED.iter().map(|t| t.name).collect();
    error.hint(format!(
        "set `data.chat_template` to a template of ft ({}) or to a Jinja file, or use prompt-completion or text rows",
        names.join(", ")
    ))
}

/// Calls `load` with the token cache of the recipe, or without one.
pub fn with_cache<T>(recipe: &Recipe, load: impl FnOnce(Option<&TokenCache>) -> Result<T>) -> Result<T> {
    let data = &recipe.data;
    if data.cache == Some(false) {
        return load(None);
    }
    let runs = Path::new(&recipe.train.output_dir).parent().unwrap_or(Path::new(""));
    let dir = match &data.cache_dir {
        Auto::Of(dir) if !dir.is_empty() => PathBuf::from(dir),
        _ => runs.join(TOKEN_CACHE),
    };
    load(Some(&TokenCache {
        dir: &dir,
        least_bytes: if data.cache == Some(true) { 0 } else { LEAST_CACHED },
        most_bytes: data.cache_limit,
        required: data.cache == Some(true),
        note: &report::note,
    }))
}

/// The screen that drops training rows; `None`: none are dropped. Errors: a file of `data.decontaminate` cannot be
/// read.
pub fn screen(recipe: &Recipe) -> Result<Option<Screen>> {
    screen_of(recipe, Screen::new)
}

fn screen_of(recipe: &Recipe, new: fn(ScreenSpec) -> Result<Option<Screen>>) -> Result<Option<Screen>> {
    let keys = &recipe.data.quality;
    let at = |e: crate::base::Error| {
        if keys.decontaminate.is_empty() {
            e
        } else {
            e.after("`data.decontaminate`")
        }
    };
    let sources = sources(recipe, RowSet::Files(&keys.decontaminate)).map_err(at)?;
    let files = sources.into_iter().flat_map(|source| source.files).collect();
    new(keys.screen(files)).map_err(at)
}

/// Lengths and languages of the texts of the training rows.
fn texts(recipe: &Recipe, model: &ModelDir) -> Result<RowStats> {
    let kind = match recipe.train.stage {
        stage if stage.is_preference() => RowKind::Pairs,
        _ if prompts::reinforces(recipe) => RowKind::Prompts,
        _ => RowKind::Text,
    };
    let sources = sources(recipe, RowSet::Train)?;
    let spec = spec(&sources, &recipe.data, recipe.train.stage, model.spec.vocab);
    RowStats::read(
        &spec,
        kind,
        &recipe.rl.answer_column,
        &model.tokenizer,
        model.template(),
    )
}

/// Formats, columns and rendering of the files: one line for all files that are read in the same way.
pub fn formats(recipe: &Recipe, train: &Dataset, eval: Option<&Dataset>) -> Vec<String> {
    // A reward program receives every column of a row.
    let sees_all = recipe.rl.rewards.iter().any(|r| r.trim_start().starts_with("program"));
    let rest = if prompts::reinforces(recipe) && sees_all {
        "for the reward program"
    } else {
        "not used"
    };
    let mut readings = train.readings.clone();
    for reading in eval.map_or(&[][..], |e| &e.readings) {
        if !readings.contains(reading) {
            readings.push(reading.clone());
        }
    }
    let lines = reading::lines(&readings, rest).into_iter();
    lines.map(|line| recipe::in_program_terms(&line)).collect()
}

/// The counts of the rows, for `events.jsonl`. Rows that are read during the run are counted in its metrics.
pub fn counts(recipe: &Recipe, train: &Dataset, stream: &BatchStream) -> Value {
    if recipe.data.streaming {
        return json!({"streaming": true, "shuffle_window": recipe.data.shuffle_window,
            "fingerprint": train.fingerprint});
    }
    let stats = &train.stats;
    let mut out = json!({
        "rows": stats.rows, "examples": train.examples.len(), "tokens": stats.tokens,
        "trained_tokens": stats.trained_tokens, "split_rows": stats.split_rows, "pieces": stats.pieces,
        "truncated_rows": stats.truncated_rows, "truncated_tokens": stats.truncated_tokens,
        "dropped_rows": stats.dropped_rows, "long_rows": stats.long_rows,
        "packing_fill": recipe.data.packing.then(|| stream.density()), "fingerprint": train.fingerprint,
    });
    // The answers to prompts do not exist yet.
    if recipe.train.stage.is_rl()
        && let Some(counts) = out.as_object_mut()
    {
        counts.remove("trained_tokens");
    }
    out
}

/// Returns a warning if the chat template rendered no training row, but will render other prompts: samples, evaluation
/// rows, later commands. `None`: there are no such prompts.
pub fn rendered_later(train: &Dataset, eval: Option<&Dataset>, recipe: &Recipe, has_template: bool) -> Option<String> {
    let plain = |r: &ReadingReport| !r.layout.renders();
    if !has_template || train.readings.is_empty() || !train.readings.iter().all(plain) {
        return None;
    }
    let texts = |r: &ReadingReport| r.layout.format == RowFormat::Text;
    let mut later = Vec::new();
    if !recipe.train.sample_prompts.is_empty() && recipe.data.render != Render::Plain {
        later.push("`train.sample_prompts`");
    }
    if eval.is_some_and(|e| e.readings.iter().any(|r| !plain(r))) {
        later.push("rows of `data.eval`");
    }
    // Rows of plain text are not prompts, so no warning.
    if recipe.train.stage != Stage::Pretrain && !train.readings.iter().all(texts) {
        later.push("`ft generate --chat` and `ft eval`");
    }
    if later.is_empty() {
        None
    } else {
        Some(format!(
            "no row is rendered with the chat template, but {} use it: their prompts differ from the training rows \
             (`data.render`; `ft generate --prompt` without `--chat` sends plain text)",
            later.join(", ")
        ))
    }
}

/// Warnings for the user about the rows, before the run.
pub fn warnings(
    train: &Dataset,
    eval: Option<&Dataset>,
    recipe: &Recipe,
    has_template: bool,
    positions: usize,
) -> Vec<String> {
    let mut all = train.stats.warnings(recipe.data.max_length);
    all.extend(train.readings.iter().flat_map(|r| r.warnings()));
    all.extend(rendered_later(train, eval, recipe, has_template));
    let longest = train.stats.longest;
    // A preference example has several documents.
    if train.preferences.is_empty()
        && let Some(line) = beyond(longest, positions)
    {
        all.push(format!("{line}; lower `data.max_length` to truncate rows"));
    }
    all
}

/// Training and evaluation do not cut these rows. Returns a warning if the longest one exceeds the context length of the model.
pub fn beyond(longest: usize, positions: usize) -> Option<String> {
    (longest > positions).then(|| {
        format!(
            "the longest row has {longest} tokens, the model {positions} positions (`max_position_embeddings`): rows \
             are not truncated, and the model was not trained on the positions beyond"
        )
    })
}

/// Number of rows of random ids for a shape: each step has its own rows, up to a limit.
fn random_rows(recipe: &Recipe) -> usize {
    let steps = recipe.train.max_steps.clamp(1, 256) as usize;
    let window = recipe.train.batch_size * recipe.train.gradient_accumulation_steps;
    (steps * window).min(1 << 16)
}

/// How `sources` are read in a stage. Pre-training takes texts as they are, unless asked, and trains every token of a row.
pub fn spec<'a>(
    sources: &'a [Source],
    data: &recipe::Data,
    stage: Stage,
    embedding_rows: usize,
) -> dataset::DatasetSpec<'a> {
    let pretrain = stage == Stage::Pretrain;
    dataset::DatasetSpec {
        sources,
        render: match data.render {
            Render::Auto if pretrain => Render::Plain,
            render => render,
        },
        max_length: data.max_length,
        long: match data.long {
            Long::Auto if pretrain => Long::Split,
            long => long,
        },
        overlap: data.overlap,
        train_on: if pretrain { TrainOn::All } else { data.train_on },
        embedding_rows,
        screen: None,
    }
}

/// The order, batching and packing of the `rows` rows of the recipe.
pub fn stream(recipe: &Recipe, rows: usize) -> StreamSpec {
    StreamSpec {
        batch_size: recipe.train.batch_size,
        accumulation: recipe.train.gradient_accumulation_steps,
        packing: recipe.data.packing,
        max_length: recipe.data.packing_length,
        shuffle: recipe.data.shuffle,
        seed: recipe.train.seed,
        length: if prompts::reinforces(recipe) {
            RunLength::Steps(prompts::steps(recipe, rows))
        } else {
            RunLength::new(recipe.train.max_steps, recipe.train.num_epochs)
        },
    }
}

/// The form of rows that a stage needs; `None`: it does not use preferences.
fn preference_form(stage: recipe::Stage) -> Option<PreferencePart> {
    match stage {
        recipe::Stage::Reward => Some(PreferencePart::WholePairs),
        recipe::Stage::Dpo | recipe::Stage::Simpo => Some(PreferencePart::Pairs),
        recipe::Stage::Orpo => Some(PreferencePart::PairsAndPrompts),
        recipe::Stage::Kto => Some(PreferencePart::Judged),
        _ => None,
    }
}

/// For KTO with its KL term: adds the mismatched pairs that estimate it. `few`: of rows for evaluation, what to do if there
/// are too few. Errors: too few rows.
fn completed(dataset: Dataset, recipe: &Recipe, few: Option<&str>) -> Result<Dataset> {
    if recipe.train.stage != recipe::Stage::Kto || recipe.preference.loss_type.judged() != JudgedLoss::Kto {
        return Ok(dataset);
    }
    let seed = recipe.data.shuffle.then_some(recipe.train.seed);
    let rows = dataset.examples.len();
    let completed = dataset.mismatched(recipe.train.batch_size, recipe.data.max_length, seed);
    completed.map_err(|e| match few.filter(|_| rows < 2) {
        Some(few) => e
            .at("the rows for evaluation")
            .hint(format!("{few}, or set `rlhf.loss_type = \"apo_zero_unpaired\"`")),
        None => e,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::DatasetSpec;
    use crate::recipe;

    /// A Rust user who writes `Default::default()` gets what a recipe without these keys gets.
    #[test]
    fn defaults_of_the_library_are_those_of_a_recipe() {
        let file = "assets/world/train.jsonl";
        let text = format!("[model]\npath = \"m\"\n[data]\ntrain = \"{file}\"\n");
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        assert_eq!(stream(&recipe, 1), StreamSpec::default());
        let of_recipe = spec(&[], &recipe.data, recipe.train.stage, usize::MAX);
        assert_eq!(format!("{of_recipe:?}"), format!("{:?}", DatasetSpec::default()));
        let of_recipe = sources(&recipe, RowSet::Train).unwrap();
        assert_eq!(of_recipe, [Source::new(vec![file.to_string()])]);
    }

    #[test]
    fn rows_beyond_the_positions_are_told() {
        let recipe = recipe::parse("[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n", "r.toml", &[]).unwrap();
        let rows = Dataset::random(2, 20, 50, 1);
        assert!(warnings(&rows, None, &recipe.recipe, true, 20).is_empty());
        let warned = warnings(&rows, None, &recipe.recipe, true, 19);
        assert!(
            warned.len() == 1 && warned[0].contains("20 tokens, the model 19"),
            "{warned:?}"
        );
    }
}
