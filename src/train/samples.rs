//! Answers of the current model: to show to the user, and to count exact matches.

use crate::base::{Error, Result, progress};
use crate::data::Dataset;
use crate::data::encode::Question;
use crate::engine::Engine;
use crate::generate::{GenerateSettings, generate};
use crate::model::Network;
use crate::recipe::{Recipe, Render};
use crate::setup::ModelDir;
use crate::setup::row_sizes::SAMPLE_TOKENS;
use crate::setup::rows;
use crate::setup::sources::{self, RowSet};
use serde_json::{Value, json};

/// Rows per decoding batch.
const ROWS: usize = 64;
/// Added to the bytes of the longest answer, a limit of its tokens that cuts no correct answer: a token has at least one byte.
const SPARE_TOKENS: usize = 4;

fn settings(model: &ModelDir, max_new_tokens: usize) -> GenerateSettings {
    GenerateSettings {
        max_new_tokens,
        stop_ids: model.tokenizer.stop_ids().to_vec(),
        ..GenerateSettings::default()
    }
}

/// A prompt of the recipe, the answer of the current model, and the answer in the rows for evaluation.
pub struct SampledAnswer {
    pub prompt: String,
    pub answer: String,
    pub reference: Option<String>,
}

/// Rows for evaluation in which the answers to sample prompts are looked up.
const LOOKED_UP: usize = 2000;

/// `train.sample_prompts`, with the chat template if the model has one and `data.render` allows it.
fn encoded(recipe: &Recipe, model: &ModelDir) -> Result<Vec<Vec<u32>>> {
    let mut encoded = Vec::new();
    for prompt in &recipe.train.sample_prompts {
        encoded.push(match &model.template {
            Some(template) if recipe.data.render != Render::Plain => {
                let system = recipe.data.system_prompt.as_ref();
                let system = system.map(|text| json!({"role": "system", "content": text}));
                let asked = json!({"role": "user", "content": prompt});
                let messages: Vec<Value> = system.into_iter().chain([asked]).collect();
                model
                    .tokenizer
                    .encode(&template.render(&messages, None, true)?, false)?
            }
            _ => model.tokenizer.encode(prompt, true)?,
        });
    }
    Ok(encoded)
}

/// Greedy answers to `train.sample_prompts`.
pub fn answers(
    recipe: &Recipe,
    model: &ModelDir,
    engine: &Engine,
    rows: Option<&Dataset>,
) -> Result<Vec<SampledAnswer>> {
    let prompts = &recipe.train.sample_prompts;
    let encoded = encoded(recipe, model)?;
    let ids = generate(
        &engine.network,
        &encoded,
        &settings(model, SAMPLE_TOKENS),
        &mut |_, _| Ok(()),
    )?;
    let texts = ids
        .iter()
        .map(|ids| model.tokenizer.decode(ids, true))
        .collect::<Result<Vec<_>>>()?;
    let questions = match rows.filter(|_| !prompts.is_empty()) {
        // An answer that cannot be looked up is not shown: the rows were read before.
        Some(rows) => questions(recipe, model, rows, LOOKED_UP).unwrap_or_default(),
        None => Vec::new(),
    };
    let reference = |ids: &Vec<u32>| questions.iter().find(|q| q.prompt == *ids).map(|q| q.answer.clone());
    let all = prompts.iter().zip(texts).zip(&encoded);
    Ok(all
        .map(|((prompt, answer), ids)| SampledAnswer {
            prompt: prompt.clone(),
            answer,
            reference: reference(ids),
        })
        .collect())
}

const NO_QUESTIONS: &str = "`train.predict_with_generate` has no effect: the rows for evaluation have no prompts with \
                            answers, so there is no `eval_accuracy`";

/// Exact answers to the rows for evaluation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AnswerAccuracy {
    /// Fraction of the questions; `None`: there is no question.
    pub exact: Option<f64>,
    /// Rows that it does not contain.
    pub warning: Option<String>,
}

/// Fraction of the rows with an answer that greedy decoding answers exactly (ignoring white space at both ends).
pub fn accuracy(recipe: &Recipe, model: &ModelDir, engine: &Engine, rows: &Dataset) -> Result<AnswerAccuracy> {
    let mut questions = questions(recipe, model, rows, usize::MAX)?;
    let skipped = skip_long(&mut questions, model.spec.generated_positions());
    let exact = exact_matches(model, &engine.network, &questions)?;
    Ok(AnswerAccuracy {
        exact,
        warning: skipped.or_else(|| exact.is_none().then(|| NO_QUESTIONS.to_string())),
    })
}

/// One after the pass over the prompt, one after a step of decoding.
const TOKENS_OF_A_BEGUN_ANSWER: usize = 2;

/// Begins a greedy answer to the longest of these prompts, with a KV cache for a whole answer. Returns the tokens of the prompt;
/// `None`: there is no prompt.
pub fn begin_answer<'p>(
    network: &Network,
    prompts: impl Iterator<Item = &'p Vec<u32>>,
    settings: &GenerateSettings,
) -> Result<Option<usize>> {
    let Some(longest) = prompts.max_by_key(|prompt| prompt.len()) else {
        return Ok(None);
    };
    let mut tokens = 0;
    let begun = generate(network, std::slice::from_ref(longest), settings, &mut |_, _| {
        tokens += 1;
        // Ends the answer; the error is discarded below.
        if tokens < TOKENS_OF_A_BEGUN_ANSWER {
            Ok(())
        } else {
            Err(Error::new("enough tokens"))
        }
    });
    if tokens < TOKENS_OF_A_BEGUN_ANSWER {
        begun?;
    }
    Ok(Some(longest.len()))
}

/// As `begin_answer`, to the prompts of `answers`.
pub fn begin_sample(recipe: &Recipe, model: &ModelDir, engine: &Engine) -> Result<Option<usize>> {
    let prompts = encoded(recipe, model)?;
    begin_answer(&engine.network, prompts.iter(), &settings(model, SAMPLE_TOKENS))
}

/// As `begin_answer`, to the questions of `accuracy`.
pub fn begin_question(recipe: &Recipe, model: &ModelDir, engine: &Engine, rows: &Dataset) -> Result<Option<usize>> {
    let mut questions = questions(recipe, model, rows, usize::MAX)?;
    skip_long(&mut questions, model.spec.generated_positions());
    let longest = questions.iter().map(|q| q.answer.len()).max().unwrap_or(0);
    let prompts = questions.iter().map(|q| &q.prompt);
    begin_answer(&engine.network, prompts, &settings(model, longest + SPARE_TOKENS))
}

/// Removes the questions that leave no room for an answer in a context of `most` tokens. Returns a warning if there are any.
pub fn skip_long(questions: &mut Vec<Question>, most: usize) -> Option<String> {
    let all = questions.len();
    questions.retain(|q| q.prompt.len() < most);
    let skipped = all - questions.len();
    (skipped > 0).then(|| {
        format!(
            "{skipped} of {all} prompts are longer than the context length of the model ({most}): they are skipped and do not \
             count in the accuracy"
        )
    })
}

/// The first questions of the rows for evaluation.
fn questions(recipe: &Recipe, model: &ModelDir, rows: &Dataset, most: usize) -> Result<Vec<Question>> {
    // Held-out rows come from the training files.
    let set = if recipe.data.eval.is_empty() {
        RowSet::Train
    } else {
        RowSet::Eval
    };
    let sources = sources::sources(recipe, set)?;
    let spec = rows::spec(&sources, &recipe.data, recipe.train.stage, model.spec.vocab);
    rows.questions(&spec, &model.tokenizer, model.template(), most)
}

/// Greedy answers to these prompts, each of at most `longest` tokens. Errors: a signal.
pub fn greedy(model: &ModelDir, network: &Network, prompts: &[Vec<u32>], longest: usize) -> Result<Vec<String>> {
    let mut texts = Vec::with_capacity(prompts.len());
    for chunk in prompts.chunks(ROWS) {
        let ids = generate(network, chunk, &settings(model, longest), &mut |_, _| Ok(()))?;
        for ids in ids {
            texts.push(model.tokenizer.decode(&ids, true)?);
        }
    }
    Ok(texts)
}

/// Fraction of `questions` that greedy decoding answers exactly. `None`: there are none.
pub fn exact_matches(model: &ModelDir, network: &Network, questions: &[Question]) -> Result<Option<f64>> {
    if questions.is_empty() {
        return Ok(None);
    }
    let mut right = 0;
    let phase = progress::phase("answering", questions.len(), "questions");
    for chunk in questions.chunks(ROWS) {
        let longest = chunk.iter().map(|q| q.answer.len()).max().unwrap_or(0);
        let prompts: Vec<Vec<u32>> = chunk.iter().map(|q| q.prompt.clone()).collect();
        let ids = generate(
            network,
            &prompts,
            &settings(model, longest + SPARE_TOKENS),
            &mut |_, _| Ok(()),
        )?;
        for (question, ids) in chunk.iter().zip(ids) {
            right += usize::from(model.tokenizer.decode(&ids, true)?.trim() == question.answer.trim());
        }
        phase.add(chunk.len() as u64);
    }
    Ok(Some(right as f64 / questions.len() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_fills_the_context_is_skipped_with_a_warning() {
        let question = |tokens: usize| Question {
            prompt: vec![1; tokens],
            answer: "a".into(),
        };
        let mut questions: Vec<Question> = [3, 8, 7, 9].map(question).into();
        let warning = skip_long(&mut questions, 8).unwrap();
        assert!(warning.starts_with("2 of 4 prompts are longer"), "{warning}");
        assert_eq!(questions, [question(3), question(7)]);
        assert_eq!(skip_long(&mut questions, 8), None);
    }
}
