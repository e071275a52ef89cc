//! Answers of the current model: to show to the user, and to count exact matches.

use crate::base::{Error, Result, progress};
use crate::data::Dataset;
use crate::data::encode::{Question, plain_prompt};
use crate::engine::Engine;
use crate::generate::{GenerateSettings, Request, generate, rollout};
use crate::model::Network;
use crate::recipe::{Recipe, Render};
use crate::setup::ModelDir;
use crate::setup::row_sizes::SAMPLE_TOKENS;
use crate::setup::rows;
use crate::setup::sources::{self, RowSet};
use serde_json::{Value, json};

/// Rows per decoding batch.
const ROWS: usize = 64;
/// Added to the limit of the tokens of an answer.
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
            _ => plain_prompt(&model.tokenizer, prompt)?,
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
    let prompts = questions.iter().map(|q| &q.prompt);
    begin_answer(&engine.network, prompts, &settings(model, longest_right(&questions)))
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

/// A greedy answer.
pub struct GreedyAnswer {
    pub text: String,
    /// False: it was cut at the longest answer, or at the context length of the model.
    pub finished: bool,
}

/// Greedy answers to these prompts, each of at most `longest` tokens. Errors: a signal.
pub fn greedy(model: &ModelDir, network: &Network, prompts: &[Vec<u32>], longest: usize) -> Result<Vec<GreedyAnswer>> {
    let mut out = Vec::with_capacity(prompts.len());
    for chunk in prompts.chunks(ROWS) {
        let numbered = chunk.iter().zip(0..);
        let requests: Vec<Request> = numbered
            .map(|(prompt, number)| Request {
                prompt: prompt.clone(),
                number,
            })
            .collect();
        for mut answer in rollout(network, &requests, &settings(model, longest))? {
            if answer.finished {
                // The stop id.
                answer.ids.pop();
            }
            out.push(GreedyAnswer {
                text: model.tokenizer.decode(&answer.ids, true)?,
                finished: answer.finished,
            });
        }
    }
    Ok(out)
}

/// Tokens of the longest right answer to these questions: of the one in the row, or of the same text in tokens of one byte.
fn longest_right(questions: &[Question]) -> usize {
    let longest = questions.iter().map(|q| q.expected.len().max(q.answer.len())).max();
    longest.unwrap_or(0) + SPARE_TOKENS
}

/// The end of the reasoning of a model, and its begin.
const THOUGHT: [&str; 2] = ["</think>", "<think>"];

/// True if a generated text is the answer of the row, or what the chat template makes of it (`expected`), without white space at
/// both ends. If the row has no reasoning, the answer may have some before it.
fn is_answer(generated: &str, answer: &str, expected: &str) -> bool {
    let [end, begin] = THOUGHT;
    let (generated, answer, expected) = (generated.trim(), answer.trim(), expected.trim());
    if generated == answer || generated == expected {
        return true;
    }
    let is_blank = |thought: &str| thought.trim().trim_start_matches(begin).trim().is_empty();
    let row_reasons = expected.split_once(end).is_some_and(|(thought, _)| !is_blank(thought));
    !row_reasons && generated.split_once(end).is_some_and(|(_, said)| said.trim() == answer)
}

/// True if the text of generated tokens, without the stop id, is a right answer.
pub fn is_right(model: &ModelDir, question: &Question, generated: &str) -> Result<bool> {
    let stops = model.tokenizer.stop_ids();
    let expected = match question.expected.split_last() {
        Some((last, rest)) if stops.contains(last) => rest,
        _ => &question.expected[..],
    };
    let expected = model.tokenizer.decode(expected, true)?;
    Ok(is_answer(generated, &question.answer, &expected))
}

/// Fraction of `questions` that greedy decoding answers exactly. `None`: there are none.
pub fn exact_matches(model: &ModelDir, network: &Network, questions: &[Question]) -> Result<Option<f64>> {
    if questions.is_empty() {
        return Ok(None);
    }
    let mut right = 0;
    let phase = progress::phase("answering", questions.len(), "questions");
    for chunk in questions.chunks(ROWS) {
        let prompts: Vec<Vec<u32>> = chunk.iter().map(|q| q.prompt.clone()).collect();
        let answers = greedy(model, network, &prompts, longest_right(chunk))?;
        for (question, answer) in chunk.iter().zip(answers) {
            right += usize::from(is_right(model, question, &answer.text)?);
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
            expected: vec![2],
        };
        let mut questions: Vec<Question> = [3, 8, 7, 9].map(question).into();
        let warning = skip_long(&mut questions, 8).unwrap();
        assert!(warning.starts_with("2 of 4 prompts are longer"), "{warning}");
        assert_eq!(questions, [question(3), question(7)]);
        assert_eq!(skip_long(&mut questions, 8), None);
    }

    #[test]
    fn an_answer_is_right_as_the_chat_template_writes_it() {
        let empty = "<think>\n\n</think>\n\n5";
        for (generated, expected, right) in [
            (" 5\n", "5", true),
            (empty, empty, true),
            ("5", empty, true),
            (empty, "5", true),
            // The generation prompt opened the thought.
            ("3 and 2\n</think>\n\n5", "5", true),
            ("<think>\n3 and 2\n</think>\n\n5", empty, true),
            ("final5", "final5", true),
            ("<think>\n\n</think>\n\n6", empty, false),
            ("so 5", empty, false),
            // The reasoning of the row is part of its answer.
            (empty, "<think>\n3 and 2\n</think>\n\n5", false),
        ] {
            assert_eq!(is_answer(generated, "5", expected), right, "{generated} {expected}");
        }
    }

    #[test]
    fn the_longest_answer_has_room_for_what_a_template_adds() {
        let question = |answer: &str, expected: usize| Question {
            prompt: vec![1],
            answer: answer.into(),
            expected: vec![2; expected],
        };
        assert_eq!(
            longest_right(&[question("5", 9), question("five", 3)]),
            9 + SPARE_TOKENS
        );
        // The same text in more tokens.
        assert_eq!(longest_right(&[question("five and six", 3)]), 12 + SPARE_TOKENS);
        assert_eq!(longest_right(&[]), SPARE_TOKENS);
    }
}
