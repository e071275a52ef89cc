//! `ft data`: the rows of a recipe as the model reads them, and their counts.

use crate::base::Result;
use crate::base::units::counted;
use crate::data::describe;
use crate::data::describe::visible;
use crate::data::prompts::Prompt;
use crate::data::summary::{self, DataSummary};
use crate::data::{Dataset, DatasetStats, ScreenCounts};
use crate::recipe::Recipe;
use crate::report;
use crate::setup::ModelDir;
use crate::setup::prompts::PromptSet;
use crate::setup::rows::RecipeRows;
use crate::setup::rows::{formats, rendered_later, spec};
use crate::setup::sources::{RowSet, sources};
use serde_json::{Value, json};

/// Reads all rows. Errors: an invalid model directory or row.
pub fn counts(recipe: &Recipe) -> Result<Value> {
    let model = ModelDir::of_recipe(recipe)?;
    let (read, texts) = RecipeRows::with_texts(recipe, &model)?;
    let RecipeRows {
        train,
        eval,
        questions,
        screened,
    } = read;
    let (dropped, texts) = (screened.as_ref().map(screened_json), texts.json());
    if let Some(questions) = questions {
        let lengths = |prompts: &[Prompt]| prompts.iter().map(|p| p.ids.len()).sum::<usize>();
        return Ok(json!({
            "train": {
                "rows": questions.train.len(), "tokens": lengths(&questions.train), "long_rows": train.stats.long_rows,
            },
            "eval": {"rows": questions.eval.len(), "tokens": lengths(&questions.eval)},
            "max_length": recipe.data.max_length,
            "screened": dropped,
            "texts": texts,
        }));
    }
    Ok(json!({
        "train": of(&train)?,
        "eval": eval.as_ref().map(of).transpose()?,
        "max_length": recipe.data.max_length,
        "screened": dropped,
        "texts": texts,
    }))
}

/// Counts of dropped rows, and the agreement of the judges.
fn screened_json(screened: &ScreenCounts) -> Value {
    let [judges, evaluation, same, near] = screened.counts();
    let agreement = screened.agreement.as_ref().map(|a| {
        json!({
            "rows": a.voted, "share": a.share, "unanimous": a.unanimous, "krippendorff_alpha": a.alpha,
        })
    });
    json!({
        "rows": screened.rows, "judges": judges, "evaluation": evaluation, "exact_duplicates": same,
        "near_duplicates": near, "agreement": agreement,
    })
}

fn of(rows: &Dataset) -> Result<Value> {
    let DatasetStats {
        tokens,
        trained_tokens,
        truncated_rows,
        truncated_tokens,
        dropped_rows,
        split_rows,
        pieces,
        long_rows,
        longest,
        shortest,
        ..
    } = rows.stats;
    Ok(json!({
        "rows": rows.examples.len(), "tokens": tokens, "trained_tokens": trained_tokens,
        "truncated_rows": truncated_rows, "truncated_tokens": truncated_tokens, "dropped_rows": dropped_rows,
        "split_rows": split_rows, "pieces": pieces, "long_rows": long_rows,
        "longest": longest, "shortest": shortest,
        "sources": summary::summaries(rows)?.iter().map(DataSummary::json).collect::<Vec<_>>(),
    }))
}

/// The output of `ft data --stats`: a table of the sources and a histogram, for training and for evaluation.
pub fn statistics(recipe: &Recipe) -> Result<String> {
    let model = ModelDir::of_recipe(recipe)?;
    let (read, texts) = RecipeRows::with_texts(recipe, &model)?;
    let RecipeRows {
        train,
        eval,
        questions,
        screened,
    } = read;
    let mut out = String::new();
    if let Some(questions) = &questions {
        out += &describe_prompts(questions, &train.stats, &model, 0)?;
    }
    let sets = [("training", Some(&train)), ("evaluation", eval.as_ref())];
    for (name, rows) in sets.into_iter().filter(|_| questions.is_none()) {
        if let Some(rows) = rows {
            out += &format!(
                "{name} rows\n{}\n",
                visible(&summary::table_within(
                    &summary::summaries(rows)?,
                    report::result_width()
                ))
            );
        }
    }
    out += "texts\n";
    for line in texts.lines() {
        out += &format!("{}\n", visible(&line));
    }
    for line in screened.iter().flat_map(ScreenCounts::lines) {
        out += &format!("screen {}\n", visible(&line));
    }
    Ok(out)
}

/// Passes the first `rows` training rows to `each`, as JSON.
pub fn rows(recipe: &Recipe, rows: usize, each: &mut dyn FnMut(Value) -> Result<()>) -> Result<()> {
    let model = ModelDir::of_recipe(recipe)?;
    let read = RecipeRows::read(recipe, &model)?;
    if let Some(questions) = read.questions {
        for prompt in questions.train.iter().take(rows) {
            let place = if prompt.place.is_line { "line" } else { "row" };
            each(json!({
                "file": &*prompt.place.file, place: prompt.place.number, "ids": prompt.ids,
                "text": model.tokenizer.decode(&prompt.ids, false)?, "answer": prompt.answer,
            }))?;
        }
        return Ok(());
    }
    let sources = sources(recipe, RowSet::Train)?;
    let spec = spec(&sources, &recipe.data, recipe.train.stage, model.spec.vocab);
    for index in 0..read.train.examples.len().min(rows) {
        each(summary::row(&read.train, &spec, &model.tokenizer, index)?)?;
    }
    Ok(())
}

/// The output of `ft data`: `rows` rendered rows with the trained tokens marked, and the counts.
pub fn describe(recipe: &Recipe, rows: usize, color: bool) -> Result<String> {
    let model = ModelDir::of_recipe(recipe)?;
    let RecipeRows {
        train: dataset,
        eval,
        questions,
        screened,
    } = RecipeRows::read(recipe, &model)?;
    let mut out: String = formats(recipe, &dataset, eval.as_ref())
        .iter()
        .map(|line| format!("format {}\n", visible(line)))
        .collect();
    for warning in dataset.readings.iter().flat_map(|r| r.warnings()) {
        out += &format!("warning: {}\n", visible(&warning));
    }
    let has_template = model.template.is_some();
    if let Some(warning) = rendered_later(&dataset, eval.as_ref(), recipe, has_template) {
        out += &format!("warning: {warning}\n");
    }
    for line in screened.iter().flat_map(ScreenCounts::lines) {
        out += &format!("screen {}\n", visible(&line));
    }
    for warning in screened.iter().flat_map(ScreenCounts::warnings) {
        out += &format!("warning: {warning}\n");
    }
    out.push('\n');
    // Only rows have colors, and `describe_rows` escapes the text between them.
    Ok(visible(&out)
        + &match questions {
            Some(questions) => visible(&describe_prompts(&questions, &dataset.stats, &model, rows)?),
            None => describe_rows(recipe, &dataset, &model, rows, color)?,
        })
}

fn describe_rows(recipe: &Recipe, dataset: &Dataset, model: &ModelDir, rows: usize, color: bool) -> Result<String> {
    describe::describe(
        dataset,
        &spec(
            &sources(recipe, RowSet::Train)?,
            &recipe.data,
            recipe.train.stage,
            model.spec.vocab,
        ),
        &model.tokenizer,
        rows,
        color,
    )
}

/// The output of `ft data` for prompts: some prompts with their known answers, and the counts.
fn describe_prompts(questions: &PromptSet, stats: &DatasetStats, model: &ModelDir, rows: usize) -> Result<String> {
    let mut out = String::new();
    for prompt in questions.train.iter().take(rows) {
        let text = visible(&model.tokenizer.decode(&prompt.ids, false)?);
        let answer = prompt.answer.as_ref().map_or("none".to_string(), |a| a.to_string());
        out.push_str(&format!(
            "{}  {} tokens\n{text}\nanswer: {answer}\n\n",
            prompt.place,
            prompt.ids.len()
        ));
    }
    let longest = questions.train.iter().map(|p| p.ids.len()).max().unwrap_or(0);
    out.push_str(&format!(
        "{}, the longest of {longest} tokens; {} held out\n",
        counted(questions.train.len(), "prompt"),
        questions.eval.len()
    ));
    if stats.long_rows > 0 {
        out += &format!(
            "{} left out: no tokens are left for the answer (`data.max_length`, `data.long`)\n",
            counted(stats.long_rows, "prompt")
        );
    }
    Ok(out)
}
