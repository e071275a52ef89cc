//! Evaluates answers: log-probabilities of given answers, and answers that the model generates.

use super::report::{EvaluateReport, NumberDisplay};
use super::{
    EvaluateRequest, EvaluatedModel, files, held_out_places, is_held_out, none_left, open, pair_batches, read, rows_of,
    stop_if_asked, totals,
};
use crate::base::{Error, Result, progress};
use crate::data::prompts::{Prompt, PromptLimits, PromptSpec, Prompts};
use crate::data::{Dataset, Encoder, Example, IGNORE};
use crate::model::Network;
use crate::recipe::{Recipe, Stage, TrainOn};
use crate::setup::ModelDir;
use crate::setup::rewards::checks;
use crate::setup::rows;
use crate::setup::sources::sources;
use crate::sft::CausalLm;
use crate::train::samples;
use serde_json::Value;

/// For each document of the rows: the log-probability of its answer, and the number of its tokens.
fn log_probs(network: &Network, set: &Dataset) -> Result<Vec<(f64, usize)>> {
    let mut out = Vec::new();
    let phase = progress::phase("log-probabilities of answers", 2 * set.examples.len(), "answers");
    for batch in pair_batches(set) {
        stop_if_asked()?;
        let batch = batch?;
        phase.add(batch.documents.len().saturating_sub(1) as u64);
        let ctx = network.context(&batch.positions, &batch.documents, None)?;
        let h = network.hidden_states(&batch.ids, &ctx)?;
        let found = network.head()?.log_probs(&h, &batch.targets)?;
        for ends in batch.documents.windows(2) {
            let answer = (ends[0]..ends[1]).filter(|n| batch.targets[*n] != IGNORE);
            let (mut sum, mut tokens) = (0.0, 0);
            for n in answer {
                sum += f64::from(found[n]);
                tokens += 1;
            }
            if !sum.is_finite() {
                return Err(Error::new("a log-probability is not finite")
                    .found(sum)
                    .hint("check the weights, or use `--dtype f32`"));
            }
            out.push((sum, tokens));
        }
    }
    Ok(out)
}

fn part(of: &[f64]) -> f64 {
    of.iter().filter(|x| **x > 0.0).count() as f64 / of.len().max(1) as f64
}

fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len().max(1) as f64
}

/// The difference between chosen and rejected of each pair.
fn margins(found: &[(f64, usize)], of: impl Fn(&(f64, usize)) -> f64) -> Vec<f64> {
    found.chunks_exact(2).map(|pair| of(&pair[0]) - of(&pair[1])).collect()
}

/// Evaluates pairs: which answer is more likely, and with a reference the change in likelihood.
pub fn pairs(opened: &EvaluatedModel, recipe: &Recipe, request: &EvaluateRequest) -> Result<EvaluateReport> {
    let set = read(opened, recipe, request, Stage::Dpo)?;
    let first = |row| Ok(set.parts(row)?.into_iter().next());
    let chosen: Vec<Option<Example>> = (0..set.examples.len()).map(first).collect::<Result<_>>()?;
    let chosen = Dataset::from_examples(chosen.into_iter().flatten().collect());
    let objective = CausalLm::new(opened.model_dir.spec.vocab);
    let batches = crate::data::order::eval_batches(&chosen, super::BATCH_TOKENS);
    let count = chosen.examples.len();
    let totals = totals(&opened.network, &objective, batches, count, &files(recipe, request))?;
    let found = log_probs(&opened.network, &set)?;
    let whole = margins(&found, |(sum, _)| *sum);
    let tokenwise = margins(&found, |(sum, n)| sum / (*n).max(1) as f64);
    let mut report = EvaluateReport::of_loss("pairs", set.examples.len(), totals);
    let more_likely = "pairs whose chosen answer is more likely than the rejected one";
    report.add("accuracy", part(&whole), NumberDisplay::Part, more_likely);
    report.add(
        "margin",
        mean(&whole),
        NumberDisplay::Number,
        "log p(chosen) - log p(rejected), on average",
    );
    let by_token = "the same with log-probabilities per token, independent of length";
    report.add("accuracy_per_token", part(&tokenwise), NumberDisplay::Part, by_token);
    let Some(reference) = reference(opened, request)? else {
        return Ok(report);
    };
    let before = margins(&log_probs(&reference.network, &set)?, |(sum, _)| *sum);
    let beta = recipe.preference.beta;
    let rewards: Vec<f64> = whole
        .iter()
        .zip(before)
        .map(|(now, then)| beta * (now - then))
        .collect();
    let implicit = "pairs whose chosen answer has the higher implicit reward, beta * log(p / p_reference)";
    report.add("reward_accuracy", part(&rewards), NumberDisplay::Part, implicit);
    let by = "mean difference of the implicit rewards, chosen - rejected";
    report.add("reward_margin", mean(&rewards), NumberDisplay::Number, by);
    report.add("beta", beta, NumberDisplay::Number, "`rlhf.beta`");
    Ok(report)
}

/// The reference model for pairs: the given one, else the base of the adapter.
fn reference(opened: &EvaluatedModel, request: &EvaluateRequest) -> Result<Option<EvaluatedModel>> {
    match request.reference {
        Some(name) => {
            let reference = open(name, None, request)?;
            if reference.model_dir.spec.vocab != opened.model_dir.spec.vocab {
                return Err(Error::new("the reference has another vocabulary")
                    .at(name)
                    .found(reference.model_dir.spec.vocab)
                    .expected(opened.model_dir.spec.vocab));
            }
            Ok(Some(reference))
        }
        None if opened.adapter => open(&opened.named.model, None, request).map(Some),
        None => Ok(None),
    }
}

/// Evaluates KTO rows: how likely the desirable and the undesirable answers are.
pub fn judged(opened: &EvaluatedModel, recipe: &Recipe, request: &EvaluateRequest) -> Result<EvaluateReport> {
    let set = read(opened, recipe, request, Stage::Kto)?;
    let objective = CausalLm::new(opened.model_dir.spec.vocab);
    let is_good: Vec<bool> = set.preferences.iter().map(|p| p.label).collect();
    let of = |good: bool| -> Result<Vec<Example>> {
        let rows = (0..set.examples.len()).filter(|row| is_good[*row] == good);
        let firsts: Vec<Option<Example>> = rows
            .map(|row| Ok(set.parts(row)?.into_iter().next()))
            .collect::<Result<_>>()?;
        Ok(firsts.into_iter().flatten().collect())
    };
    let (good, bad) = (of(true)?, of(false)?);
    let loss = |examples: Vec<_>| {
        let rows = Dataset::from_examples(examples);
        let batches: Vec<_> = crate::data::order::eval_batches(&rows, super::BATCH_TOKENS).collect();
        let count = rows.examples.len();
        totals(
            &opened.network,
            &objective,
            batches.into_iter(),
            count,
            &files(recipe, request),
        )
    };
    let (desirable, undesirable) = (good.len(), bad.len());
    let first = if desirable > 0 { good.clone() } else { bad.clone() };
    let mut report = EvaluateReport::of_loss("judged", set.examples.len(), loss(first)?);
    if desirable > 0 {
        let what = "log-probability per token of desirable answers";
        report.add("desirable_logp", -loss(good)?.loss(), NumberDisplay::Number, what);
    }
    if undesirable > 0 {
        let what = "log-probability per token of undesirable answers";
        report.add("undesirable_logp", -loss(bad)?.loss(), NumberDisplay::Number, what);
    }
    Ok(report)
}

/// Evaluates prompts with known answers: greedy decoding, scored as by the rewards `exact` (a known answer may also have the form
/// that the chat template gives it) and `numeric`.
pub fn prompts(opened: &EvaluatedModel, recipe: &Recipe, request: &EvaluateRequest) -> Result<EvaluateReport> {
    let EvaluatedModel { model_dir, network, .. } = opened;
    let encoder = Encoder {
        codec: &model_dir.tokenizer,
        template: model_dir.template(),
        train_on: TrainOn::Assistant,
        max_length: recipe.data.max_length,
        embedding_rows: model_dir.spec.vocab,
    };
    let window = recipe.data.max_length.min(model_dir.spec.generated_positions());
    let context = model_dir.spec.generated_positions();
    let AnswerLengths { longest, room } = AnswerLengths::new(request.max_new_tokens, window, context);
    let column = &recipe.rl.answer_column;
    let sources = sources(recipe, rows_of(recipe, request))?;
    let held_out = is_held_out(request)?;
    let (places, screen) = if held_out {
        (
            Some(held_out_places(opened, request, Stage::Grpo)?),
            rows::screen(recipe)?,
        )
    } else {
        (None, None)
    };
    let limits = PromptLimits {
        window,
        // Training kept these prompts with this room.
        answer: if held_out {
            room.min(recipe.rl.max_completion_length)
        } else {
            room
        },
        long: recipe.data.long,
    };
    let no_limits = PromptLimits {
        window: usize::MAX,
        answer: 0,
        long: limits.long,
    };
    let all = Prompts::load(&PromptSpec {
        sources: &sources,
        render: recipe.data.render,
        encoder: &encoder,
        answer: column,
        // A prompt that is not held out may be too long.
        limits: if held_out { no_limits } else { limits },
        screen: screen.as_ref(),
    })?;
    let mut known = all.rows;
    if let Some(places) = places {
        let mut origins = all.origins.iter();
        known.retain(|_| origins.next().is_some_and(|origin| places.contains(origin)));
        let admitted: Vec<bool> = known.iter().map(|prompt| limits.admit(prompt)).collect::<Result<_>>()?;
        let mut admitted = admitted.into_iter();
        known.retain(|_| admitted.next() == Some(true));
        if known.is_empty() {
            return Err(none_left(recipe, request));
        }
    }
    known.retain(|p| p.answer.is_some());
    if known.is_empty() {
        return Err(Error::new("no row has a known answer")
            .at(files(recipe, request).join(", "))
            .expected(format!("a field `{column}`"))
            .hint("name the field with `rlhf.answer_column=NAME`"));
    }
    let ids: Vec<Vec<u32>> = known.iter().map(|p| p.ids.clone()).collect();
    let answers = samples::greedy(model_dir, network, &ids, longest)?;
    let (mut exact, mut numeric) = (Vec::new(), Vec::new());
    for (given, prompt) in answers.iter().zip(&known) {
        if let Some(wanted) = &prompt.answer {
            exact.push(f64::from(is_exact(model_dir, &encoder, prompt, wanted, &given.text)?));
            numeric.push(checks::numeric(&given.text, wanted));
        }
    }
    numeric.retain(|x| !x.is_nan());
    let cut: Vec<f64> = answers.iter().map(|given| f64::from(!given.finished)).collect();
    let mut report = EvaluateReport::of_answers(known.len());
    let what = "answers (greedy decoding) that equal the known answer";
    report.add("accuracy", mean(&exact), NumberDisplay::Part, what);
    if !numeric.is_empty() {
        let what = "answers whose last number equals that of the known answer";
        report.add("numeric_accuracy", mean(&numeric), NumberDisplay::Part, what);
    }
    let what = "answers that were cut at `--max-new-tokens` or at the context length";
    report.add("truncated", mean(&cut), NumberDisplay::Part, what);
    Ok(report)
}

/// Lengths of answers to prompts, in tokens.
#[derive(Debug, PartialEq, Eq)]
struct AnswerLengths {
    /// Where an answer is cut; the context length of the model may cut it earlier.
    longest: usize,
    /// What a prompt must leave for its answer: not more than half of the window, so that short windows have prompts too.
    room: usize,
}

impl AnswerLengths {
    fn new(asked: usize, window: usize, context: usize) -> Self {
        Self {
            longest: asked.min(context).max(1),
            room: asked.min(window / 2).max(1),
        }
    }
}

/// True if an answer equals a known answer, or what the chat template makes of one (an empty thought before it, for example).
fn is_exact(model_dir: &ModelDir, encoder: &Encoder, prompt: &Prompt, wanted: &Value, given: &str) -> Result<bool> {
    if checks::exact(given, wanted) > 0.0 {
        return Ok(true);
    }
    for text in checks::known(wanted) {
        if let Some(question) = encoder.question(&prompt.answered(&text))?
            && samples::is_right(model_dir, &question, given)?
        {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_may_be_longer_than_half_of_the_window() {
        let of = |longest, room| AnswerLengths { longest, room };
        assert_eq!(AnswerLengths::new(256, 100, 2048), of(256, 50));
        assert_eq!(AnswerLengths::new(256, 4096, 4096), of(256, 256));
        // The context of the model bounds them.
        assert_eq!(AnswerLengths::new(5000, 1024, 1024), of(1024, 512));
    }
}
