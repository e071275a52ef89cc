//! `distill`: rows of files, some of them answered by the student itself, and a teacher that says how likely every next
//! token is.

use super::{Feed, Setting, Stage};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::data::batch::Example;
use crate::data::order::{BatchStream, eval_batches};
use crate::data::{Batch, Dataset};
use crate::distill::hidden::{Distance, Hidden};
use crate::distill::{Distill, Teacher, Terms};
use crate::engine::Engine;
use crate::generate::{Request, Settings, rollout};
use crate::recipe::{HiddenLoss, Recipe};
use crate::run::teacher::{self, Named, Opened};
use crate::run::{setup, teacher_cache};

/// Errors: a teacher, or its stored outputs, that do not fit the student and its rows.
pub(super) fn check(recipe: &Recipe, model: &setup::Described, train: &Dataset) -> Result<()> {
    match &recipe.distill.teacher_cache {
        Some(dir) => teacher_cache::open(dir.as_ref(), recipe, model, train).map(drop),
        None => teacher::open(recipe, model)?.check_rows(train),
    }
}

pub(super) fn open<'a>(setting: Setting<'a>) -> Result<Stage<'a>> {
    let recipe = setting.recipe;
    let d = &recipe.distill;
    let terms = Terms {
        beta: d.beta as f32,
        temperature: d.temperature as f32,
        alpha: d.alpha as f32,
    };
    let (teacher, matched, fingerprint) = match &d.teacher_cache {
        Some(dir) => {
            let cache = teacher_cache::open(dir.as_ref(), recipe, setting.model, setting.train)?;
            let key = Named::only(cache.key());
            (Teacher::Stored(Box::new(cache)), None, key)
        }
        None => {
            let opened = teacher::open(recipe, setting.model)?;
            let matched = matched(recipe, setting.model, &opened, setting.device)?;
            let network = opened.load(recipe, &setting.run_dir.join(setup::TEACHER), setting.device)?;
            (Teacher::live(network), matched, opened.fingerprint()?)
        }
    };
    let students = (d.lmbda > 0.0).then(|| Students::new(recipe, setting.model));
    Ok(Stage {
        objective: Box::new(Distill::new(teacher, terms, matched, setting.spec.vocab)?),
        feed: Box::new(Rows {
            stream: setting.stream,
            examples: &setting.train.examples,
            eval: setting.eval,
            eval_tokens: recipe.train.batch_size * recipe.data.max_length,
            fingerprint,
            students,
            answered: Answered::default(),
        }),
    })
}

/// The pairs of hidden states that are compared, where they are.
fn matched(
    recipe: &Recipe,
    model: &setup::Described,
    teacher: &Opened,
    device: &candle_core::Device,
) -> Result<Option<Hidden>> {
    let d = &recipe.distill;
    if d.hidden_weight == 0.0 {
        return Ok(None);
    }
    let (student, other) = (&model.spec, &teacher.model.spec);
    let pairs = teacher::layer_map(recipe, student, other)?;
    let distance = match d.hidden_loss {
        HiddenLoss::Mse => Distance::Mse,
        HiddenLoss::Cosine => Distance::Cosine,
    };
    let sizes = (student.hidden, other.hidden);
    Hidden::new(&pairs, sizes, distance, d.hidden_weight, recipe.train.seed, device).map(Some)
}

struct Rows<'a> {
    stream: BatchStream<'a>,
    examples: &'a [Example],
    eval: Option<&'a Dataset>,
    /// Tokens of a batch of the evaluation.
    eval_tokens: usize,
    /// Of the teacher, or of its stored outputs: a resumed run has the same.
    fingerprint: Named,
    students: Option<Students>,
    answered: Answered,
}

/// Counts since they were last asked for.
#[derive(Default)]
struct Answered {
    rows: usize,
    tokens: usize,
    ended: usize,
}

/// How the student answers.
struct Students {
    part: f32,
    max_new_tokens: usize,
    temperature: f32,
    max_length: usize,
    max_positions: usize,
    stop_ids: Vec<u32>,
    seed: u64,
}

impl Students {
    fn new(recipe: &Recipe, model: &setup::Described) -> Self {
        let d = &recipe.distill;
        Self {
            part: d.lmbda as f32,
            max_new_tokens: d.max_new_tokens,
            temperature: d.rollout_temperature as f32,
            max_length: recipe.data.max_length,
            max_positions: model.spec.max_positions,
            stop_ids: model.tokenizer.stop_ids().to_vec(),
            seed: recipe.train.seed,
        }
    }

    /// The prompt of a row: what stands before its last answer. `None`: it has none, or no room for an answer.
    fn prompt<'e>(&self, row: &'e Example) -> Option<&'e [u32]> {
        let last = row.trained.iter().rposition(|t| *t)?;
        let first = row.trained[..last].iter().rposition(|t| !*t).map_or(0, |i| i + 1);
        let room = first < self.max_length.min(self.max_positions);
        (first > 0 && room).then(|| &row.ids[..first])
    }

    /// The rows of a step: `micro` of them in each micro-batch, some with answers of the student.
    fn answer(
        &self,
        step: u64,
        micro: &[Vec<&Example>],
        engine: &Engine,
        answered: &mut Answered,
    ) -> Result<Vec<Vec<Example>>> {
        let chance = Rng::new(self.seed, Stream::Sampling, &[0x6f6e_706f, step]);
        let mut rows: Vec<Vec<Example>> = micro.iter().map(|m| m.iter().map(|e| (*e).clone()).collect()).collect();
        let places = rows
            .iter()
            .enumerate()
            .flat_map(|(m, r)| (0..r.len()).map(move |i| (m, i)));
        let (mut requests, mut wanted) = (Vec::new(), Vec::new());
        for (index, (m, i)) in places.enumerate() {
            if chance.uniform(index as u64) < self.part
                && let Some(prompt) = self.prompt(&rows[m][i])
            {
                requests.push(Request {
                    prompt: prompt.to_vec(),
                    number: wanted.len() as u64,
                });
                wanted.push((m, i));
            }
        }
        if requests.is_empty() {
            return Ok(rows);
        }
        let settings = Settings {
            max_new_tokens: self.max_new_tokens,
            temperature: self.temperature,
            top_k: None,
            top_p: None,
            seed: chance.bits(u64::MAX),
            stop_ids: self.stop_ids.clone(),
            limits: crate::generate::Limits::default(),
        };
        let answers = rollout(&engine.network, &requests, &settings)?;
        for (((m, i), request), answer) in wanted.into_iter().zip(requests).zip(answers) {
            answered.rows += 1;
            answered.tokens += answer.ids.len();
            answered.ended += usize::from(answer.finished);
            let first = request.prompt.len();
            let mut ids = request.prompt;
            // The stop id that was drawn is part of the answer.
            ids.extend(answer.ids);
            ids.truncate(self.max_length);
            rows[m][i] = Example {
                trained: (0..ids.len()).map(|t| t >= first).collect(),
                ids,
            };
        }
        Ok(rows)
    }
}

impl Feed for Rows<'_> {
    fn epoch_after(&self, steps: u64) -> f64 {
        self.stream.epoch_after(steps)
    }

    fn window(&mut self, step: u64, engine: &Engine) -> Result<Vec<Batch>> {
        let Some(students) = &self.students else {
            return Ok(self.stream.window(step));
        };
        let rows = |index| {
            self.stream
                .rows(index)
                .into_iter()
                .map(|row| &self.examples[row])
                .collect()
        };
        let micro: Vec<Vec<&Example>> = self.stream.window_indices(step).map(rows).collect();
        let rows = students.answer(step, &micro, engine, &mut self.answered)?;
        Ok(rows.iter().map(Batch::from_examples).collect())
    }

    fn eval(&self) -> Result<Vec<Batch>> {
        let batches = self.eval.map(|eval| eval_batches(eval, self.eval_tokens).collect());
        Ok(batches.unwrap_or_default())
    }

    fn state(&self, _: u64) -> Result<Option<Vec<u8>>> {
        Ok(Some(self.fingerprint.now.as_bytes().to_vec()))
    }

    fn restore(&mut self, state: &[u8]) -> Result<()> {
        match std::str::from_utf8(state).is_ok_and(|name| self.fingerprint.is(name)) {
            true => Ok(()),
            false => Err(Error::new("the teacher is not the one that the run started with")
                .hint("give the same `distill.teacher` or `distill.teacher_cache`, or start a new run")),
        }
    }

    fn metrics(&mut self) -> Vec<(&'static str, f64)> {
        let Answered { rows, tokens, ended } = std::mem::take(&mut self.answered);
        if self.students.is_none() || rows == 0 {
            return Vec::new();
        }
        let of = |n: usize| n as f64 / rows as f64;
        vec![
            ("student_rows", rows as f64),
            ("student_tokens", of(tokens)),
            ("student_ended", of(ended)),
        ]
    }
}
