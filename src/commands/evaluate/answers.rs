//! Evaluates answers: log-probabilities of given answers, and answers that the model generates.

use super::report::{EvaluateReport, NumberDisplay};
use super::{EvaluateRequest, EvaluatedModel, files, open, pair_batches, read, rows_of, stop_if_asked, totals};
use crate::base::{Error, Result, progress};
use crate::data::prompts::{PromptLimits, PromptSpec, Prompts};
use crate::data::{Dataset, Encoder, Example, IGNORE};
use crate::model::Network;
use crate::recipe::{Recipe, Stage, TrainOn};
use crate::setup::rewards::checks;
use crate::setup::sources::sources;
use crate::sft::CausalLm;
use crate::train::samples;

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

/// Evaluates prompts with known answers: greedy decoding, scored as by the rewards `exact` and `numeric`.
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
    let longest = request.max_new_tokens.min(window / 2).max(1);
    let column = &recipe.rl.answer_column;
    let sources = sources(recipe, rows_of(recipe, request))?;
    let limits = PromptLimits {
        window,
        answer: longest,
        long: recipe.data.long,
    };
    let all = Prompts::load(&PromptSpec {
        sources: &sources,
        render: recipe.data.render,
        encoder: &encoder,
        answer: column,
        limits,
        screen: None,
    })?;
    let mut known = all.rows;
    if !request.all_rows && recipe.data.eval.is_empty() {
        if recipe.data.eval_fraction == 0.0 {
            return Err(super::no_rows());
        }
        let held = crate::data::dataset::held_out(known.len(), recipe.data.eval_fraction, recipe.train.seed)?;
        let mut held = held.into_iter();
        known.retain(|_| held.next() == Some(true));
    }
    known.retain(|p| p.answer.is_some());
    if known.is_empty() {
        return Err(Error::new("no row has a known answer")
            .at(files(recipe, request).join(", "))
            .expected(format!("a field `{column}`"))
            .hint("name the field with `rlhf.answer_column=NAME`"));
    }
    let ids: Vec<Vec<u32>> = known.iter().map(|p| p.ids.clone()).collect();
    let texts = samples::greedy(model_dir, network, &ids, longest)?;
    let judge = |of: fn(&str, &serde_json::Value) -> f64| -> Vec<f64> {
        let pairs = texts.iter().zip(&known);
        pairs
            .filter_map(|(text, p)| p.answer.as_ref().map(|a| of(text, a)))
            .collect()
    };
    let mut report = EvaluateReport::of_answers(known.len());
    let exact = "answers (greedy decoding) that equal the known answer";
    report.add("accuracy", mean(&judge(checks::exact)), NumberDisplay::Part, exact);
    let numeric: Vec<f64> = judge(checks::numeric).into_iter().filter(|x| !x.is_nan()).collect();
    if !numeric.is_empty() {
        let what = "answers whose last number equals that of the known answer";
        report.add("numeric_accuracy", mean(&numeric), NumberDisplay::Part, what);
    }
    Ok(report)
}
