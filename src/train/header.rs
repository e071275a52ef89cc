//! The header of a training run: trained parameters, data, length of the run, and memory.
//! Uses the recipe, the data and the plan; does not use the engine.

use crate::base::units::{bytes, count, counted, rate};
use crate::data::Dataset;
use crate::data::describe::visible;
use crate::data::order::BatchStream;
use crate::model::Adapters;
use crate::optim::Schedule;
use crate::plan::Plan;
use crate::recipe::Recipe;
use crate::setup::ModelDir;
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::rows;
use crate::source::ParamInfo;
use crate::train::learning;

/// Number of elements that the run trains in total.
pub fn trained_elements(schedule: &ActiveSchedule, steps: u64, params: &[ParamInfo], adapters: &Adapters) -> u64 {
    let names = schedule.trained_until(steps.max(1));
    let weights: usize = params
        .iter()
        .filter(|p| names.contains(&*p.name))
        .map(|p| p.elements())
        .sum();
    let lora: usize = adapters.values().map(|a| a.elements()).sum();
    (weights + lora) as u64
}

/// A run before its first step.
#[derive(Clone, Copy)]
pub struct HeaderInput<'a> {
    pub recipe: &'a Recipe,
    pub model: &'a ModelDir,
    pub train: &'a Dataset,
    pub eval: Option<&'a Dataset>,
    pub stream: &'a BatchStream<'a>,
    pub plan: &'a Plan,
    pub schedule: &'a ActiveSchedule,
    /// Elements that train in the whole run.
    pub elements: u64,
}

/// The lines of the box before the first step, each with a name and a text.
pub fn header(run: &HeaderInput<'_>) -> Vec<(&'static str, String)> {
    let HeaderInput {
        recipe,
        model,
        train,
        eval,
        stream,
        plan,
        schedule,
        elements,
    } = *run;
    let params = &model.spec.params();
    let all: usize = params.iter().map(|p| p.elements()).sum();
    let share = 100.0 * elements as f64 / all as f64;
    let eval_rows = eval;
    let eval = eval.map_or(String::new(), |e| {
        format!(", {} held out", count(e.examples.len() as u64))
    });
    let steps = stream.steps();
    let warmup = match Schedule::new(&recipe.schedule, steps).warmup() {
        0 => String::new(),
        1 => ", 1 step of warmup".to_string(),
        n => format!(", {} steps of warmup", count(n)),
    };
    let turns = learning::blocks_trained(recipe, schedule, steps);
    let turns = turns.map_or(String::new(), |(turns, all)| format!(", {turns} of {all} blocks"));
    let packed = if recipe.data.packing {
        let fill = if recipe.data.streaming {
            String::new()
        } else {
            format!(" ({:.1} % filled)", 100.0 * stream.density())
        };
        format!(
            "packed sequences of up to {} tokens{fill}",
            count(recipe.data.packing_length as u64)
        )
    } else {
        "rows".to_string()
    };
    let seen = learning::seen(recipe, stream).map_or(String::new(), |seen| format!("; {seen}"));
    let formats = rows::formats(recipe, train, eval_rows);
    let mut lines = vec![
        (
            "model",
            format!(
                "{} ({}, {} parameters, {})",
                recipe.model.path,
                model.spec.model_type,
                count(all as u64),
                recipe.model.dtype.name()
            ),
        ),
        (
            "method",
            format!(
                "{}, trains {} parameters over the run ({share:.2} %){turns}",
                recipe.tune.method.name(),
                count(elements)
            ),
        ),
        (
            "data",
            if recipe.data.streaming {
                let window = count(recipe.data.shuffle_window as u64);
                format!("rows are read during the run, {window} at a time{eval}")
            } else if recipe.train.stage.is_rl() {
                format!(
                    "{}, {} tokens, answers of up to {} tokens{eval}",
                    counted(train.examples.len(), "prompt"),
                    count(train.stats.tokens),
                    count(recipe.rl.max_completion_length as u64)
                )
            } else {
                format!(
                    "{}, {} tokens, {} of them trained{eval}",
                    counted(train.examples.len(), "row"),
                    count(train.stats.tokens),
                    count(train.stats.trained_tokens)
                )
            },
        ),
    ];
    lines.extend(formats.into_iter().map(|line| ("format", visible(&line))));
    lines.extend([
        (
            "steps",
            format!(
                "{} of {} × {} {packed}{seen}",
                count(steps),
                recipe.train.batch_size,
                recipe.train.gradient_accumulation_steps,
            ),
        ),
        (
            "rate",
            format!(
                "{}{warmup}, {}",
                rate(recipe.optimizer.learning_rate),
                recipe.schedule.name.name()
            ),
        ),
        ("memory", format!("{} forecast peak", bytes(plan.peak_bytes))),
        ("output", recipe.train.output_dir.clone()),
    ]);
    lines
}
