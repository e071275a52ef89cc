//! The rows of a recipe: read for a run, or shown to a person.

use super::prompts::{self, Questions};
use super::setup::Described;
use super::stage::preference;
use crate::base::Result;
use crate::data::order::{Length, StreamSpec};
use crate::data::{self, Dataset, dataset, describe};
use crate::hub;
use crate::recipe::Recipe;

/// Tokenized rows of a recipe.
pub struct Rows {
    pub train: Dataset,
    pub eval: Option<Dataset>,
    /// Of a stage that trains by reward.
    pub questions: Option<Questions>,
}

impl Rows {
    pub fn read(recipe: &Recipe, model: &Described) -> Result<Self> {
        if prompts::reinforces(recipe) {
            let (train, eval, questions) = prompts::read(recipe, model)?;
            let questions = Some(questions);
            return Ok(Self { train, eval, questions });
        }
        let read = |named: &[String]| read(recipe, named, model);
        if model.is_shape() && recipe.data.train.is_empty() {
            let (rows, length) = (random_rows(recipe), recipe.data.max_length);
            let train = Dataset::random(rows, length, model.spec.vocab, recipe.train.seed);
            return Ok(Self {
                train,
                eval: None,
                questions: None,
            });
        }
        let train = read(&recipe.data.train)?;
        let (train, eval) = if !recipe.data.eval.is_empty() {
            (train, Some(read(&recipe.data.eval)?))
        } else if recipe.data.eval_fraction > 0.0 {
            let (train, eval) = train.split(recipe.data.eval_fraction, recipe.train.seed)?;
            (train, Some(eval))
        } else {
            (train, None)
        };
        let completed = |set| preference::completed(set, recipe);
        Ok(Self {
            train: completed(train)?,
            eval: eval.map(completed).transpose()?,
            questions: None,
        })
    }
}

/// The rows of these files in the recipe's format.
pub fn read(recipe: &Recipe, named: &[String], model: &Described) -> Result<Dataset> {
    let files = local(named)?;
    let spec = spec(recipe, &files, model);
    match preference::want(recipe.train.stage) {
        Some(want) => data::preference::load(&spec, want, &model.tokenizer, model.template()),
        None => Dataset::load(&spec, &model.tokenizer, model.template()),
    }
}

/// What a user should know of the rows before the run.
pub fn warnings(train: &Dataset, recipe: &Recipe, positions: usize) -> Vec<String> {
    let mut all = train.stats.warnings(recipe.data.max_length);
    let longest = train.stats.longest;
    // A preference example is several documents.
    if train.preferences.is_empty()
        && let Some(line) = beyond(longest, positions)
    {
        all.push(format!("{line}; lower `data.max_length` to cut rows"));
    }
    all
}

/// Training and evaluation take rows whole: what to say of the longest one.
pub fn beyond(longest: usize, positions: usize) -> Option<String> {
    (longest > positions).then(|| {
        format!(
            "the longest row has {longest} tokens, the model {positions} positions (`max_position_embeddings`): rows are taken \
             whole, and what lies beyond is new to the model"
        )
    })
}

/// Rows of random ids for a shape: every step has its own, up to a bound.
fn random_rows(recipe: &Recipe) -> usize {
    let steps = recipe.train.max_steps.clamp(1, 256) as usize;
    let window = recipe.train.batch_size * recipe.train.gradient_accumulation_steps;
    (steps * window).min(1 << 16)
}

/// Files as they are; hub data sets as the files of their cache.
pub fn local(named: &[String]) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for name in named {
        let found = hub::resolve_dataset_file(name, "main", true)?;
        files.extend(found.into_iter().map(|f| f.display().to_string()));
    }
    Ok(files)
}

fn spec<'a>(recipe: &Recipe, files: &'a [String], model: &Described) -> dataset::Spec<'a> {
    dataset::Spec::new(files, &recipe.data, recipe.train.stage, model.spec.vocab)
}

/// What `ft data` shows: `rows` rendered rows with the trained tokens marked, and the counts.
pub fn describe(recipe: &Recipe, rows: usize, colour: bool) -> Result<String> {
    let model = Described::open(
        &recipe.model.path,
        &recipe.model.revision,
        recipe.data.chat_template.as_deref(),
    )?;
    let Rows {
        train: dataset,
        questions,
        ..
    } = Rows::read(recipe, &model)?;
    if let Some(questions) = questions {
        return prompts::describe(&questions, &model, rows);
    }
    describe::describe(
        &dataset,
        &spec(recipe, &local(&recipe.data.train)?, &model),
        &model.tokenizer,
        rows,
        colour,
    )
}

/// How the recipe walks through its `rows` rows.
pub fn stream(recipe: &Recipe, rows: usize) -> StreamSpec {
    StreamSpec {
        batch_size: recipe.train.batch_size,
        accumulation: recipe.train.gradient_accumulation_steps,
        packing: recipe.data.packing,
        max_length: recipe.data.packing_length,
        shuffle: recipe.data.shuffle,
        seed: recipe.train.seed,
        length: match prompts::reinforces(recipe) {
            true => Length::Steps(prompts::steps(recipe, rows)),
            false => Length::new(recipe.train.max_steps, recipe.train.num_epochs),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    #[test]
    fn rows_beyond_the_positions_are_told() {
        let recipe = recipe::parse("[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n", "r.toml", &[]).unwrap();
        let rows = Dataset::random(2, 20, 50, 1);
        assert!(warnings(&rows, &recipe.recipe, 20).is_empty());
        let told = warnings(&rows, &recipe.recipe, 19);
        assert!(
            told.len() == 1 && told[0].contains("20 tokens, the model 19"),
            "{told:?}"
        );
    }
}
