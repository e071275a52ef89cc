//! Sizes of the micro-batches of a run, from the lengths of its rows, for a recipe and for changes of it.

use crate::base::Result;
use crate::data::RowMeasure;
use crate::data::order::{BatchOrder, BatchStream, LargestBatch, StreamSpec};
use crate::data::{Dataset, Mixture};
use crate::recipe::{Recipe, Stage};
use crate::setup::prompts;
use crate::setup::rows;
use std::cell::RefCell;
use std::sync::Arc;

/// An evaluation: forward passes over batches, or answers that are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EvaluationSize {
    /// Tokens of the largest batch, and of its longest document; 0: no batch.
    pub tokens: usize,
    pub longest: usize,
    /// Rows per batch of answers, and tokens of the longest prompt with its answer.
    pub answers: usize,
    pub answer: usize,
}

/// Largest number of tokens of an answer.
pub const SAMPLE_TOKENS: usize = 48;

/// Sizes of the micro-batches of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MicroBatchSizes {
    pub largest: LargestBatch,
    /// Micro-batches per step, or fewer if the run has no more.
    pub micro_batches: usize,
    /// Optimizer steps of the run.
    pub steps: u64,
    /// Bytes of the tokenized rows.
    pub data_bytes: u64,
}

/// Bytes of memory for a row of a token file: its length, and its place in the orders of two epochs.
const ROW_OF_FILE: u64 = 4 + 2 * 8;

/// Rows that an evaluation answers per batch (`samples`, `stage::rl`).
const ANSWERED: usize = 64;

/// Bytes of a token, about. The model may answer with as many tokens as the right answer has bytes (`samples`).
const BYTES: usize = 4;

/// The lengths of the rows of a run.
pub struct RowSizes {
    lengths: Arc<[u32]>,
    /// Lengths of the held-out rows.
    eval: Vec<u32>,
    /// The longest of these with an answer of the model.
    answered: usize,
    /// Whether the rows are in a token file.
    in_file: bool,
    /// Whether rows may be shuffled; grouped ones are not.
    shuffle: bool,
    mixture: Option<Arc<Mixture>>,
    /// Cache of results: the planner asks again for each strategy.
    found: RefCell<Vec<(StreamSpec, Option<MicroBatchSizes>)>>,
}

impl RowSizes {
    /// The row lengths for `recipe`: with on-policy distillation a row is as long as its longest possible answer.
    pub fn new(recipe: &Recipe, stream: &BatchStream, eval: Option<&Dataset>) -> Result<Self> {
        let answers = recipe.train.stage == Stage::Distill && recipe.distill.lmbda > 0.0;
        let lengths = if answers {
            let length = |row: &RowMeasure| {
                let answered = row.answer as usize + recipe.distill.max_new_tokens;
                row.length.max(answered.min(recipe.data.max_length) as u32)
            };
            stream.examples().measures()?.iter().map(length).collect()
        } else {
            stream.examples().lengths()
        };
        // Of rows that are read during the run only the first ones are known.
        let lengths: Arc<[u32]> = if recipe.data.streaming {
            lengths.iter().copied().chain([recipe.data.max_length as u32]).collect()
        } else {
            lengths
        };
        let answered = |row: &RowMeasure| row.length as usize + (BYTES - 1) * row.trained as usize;
        let answered = match eval {
            Some(eval) => eval.examples.measures()?.iter().map(answered).max().unwrap_or(0),
            None => 0,
        };
        let mut eval: Vec<u32> = eval.map_or(Vec::new(), |e| e.lengths().to_vec());
        eval.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Self {
            lengths,
            eval,
            answered,
            in_file: stream.examples().in_file(),
            shuffle: stream.spec().shuffle,
            mixture: stream.mixture(),
            found: RefCell::default(),
        })
    }

    pub fn count(&self) -> usize {
        self.lengths.len()
    }

    /// The sizes of an evaluation of `recipe`.
    pub fn evaluation(&self, recipe: &Recipe) -> EvaluationSize {
        let stage = recipe.train.stage;
        let lengths = self.eval.iter().map(|n| (*n as usize).min(recipe.data.max_length));
        let longest = lengths.clone().max().unwrap_or(0);
        // Batches are filled up to a number of tokens; batches of preferences up to a number of rows.
        let tokens = if stage.is_preference() {
            lengths.take(recipe.train.batch_size).sum()
        } else {
            let most = recipe.train.batch_size.saturating_mul(recipe.data.max_length);
            lengths.sum::<usize>().min(most.max(longest))
        };
        let reinforces = prompts::reinforces(recipe);
        let answers = if reinforces || recipe.train.predict_with_generate {
            self.eval.len().min(ANSWERED)
        } else {
            0
        };
        // A token of the prompt has at least one byte, so bytes bound the tokens.
        let prompts = &recipe.train.sample_prompts;
        let prompt = prompts.iter().map(|p| p.len() + SAMPLE_TOKENS).max().unwrap_or(0);
        EvaluationSize {
            tokens: if reinforces { 0 } else { tokens },
            longest: if reinforces { 0 } else { longest },
            answers: answers.max(prompts.len().min(ANSWERED)),
            answer: match answers {
                0 => prompt,
                _ if reinforces => longest.max(prompt),
                _ => self.answered.max(prompt),
            },
        }
    }

    /// The sizes for a recipe or a changed recipe. `None`: it cannot run with these rows.
    pub fn of(&self, recipe: &Recipe) -> Option<MicroBatchSizes> {
        let spec = rows::stream(recipe, self.lengths.len());
        let known = self
            .found
            .borrow()
            .iter()
            .find(|(s, _)| *s == spec)
            .map(|(_, sizes)| *sizes);
        if let Some(sizes) = known {
            return sizes;
        }
        let sizes = self.find(recipe, spec);
        self.found.borrow_mut().push((spec, sizes));
        sizes
    }

    fn find(&self, recipe: &Recipe, spec: StreamSpec) -> Option<MicroBatchSizes> {
        let most = recipe.data.max_length as u32;
        let lengths: Arc<[u32]> = if self.lengths.iter().all(|n| *n <= most) {
            self.lengths.clone()
        } else {
            self.lengths.iter().map(|n| (*n).min(most)).collect()
        };
        let data_bytes = if self.in_file {
            lengths.len() as u64 * ROW_OF_FILE
        } else {
            lengths.iter().map(|n| 5 * u64::from(*n) + 80).sum()
        };
        let answers = prompts::reinforces(recipe).then(|| largest_of_answers(&lengths, recipe));
        let shuffle = spec.shuffle && self.shuffle;
        let order = BatchOrder::mixed(lengths, StreamSpec { shuffle, ..spec }, self.mixture.clone()).ok()?;
        let steps = order.steps();
        let micro_batches = match answers {
            Some(_) => spec.accumulation as u64,
            None => order.micro_batches().clamp(1, spec.accumulation as u64),
        };
        Some(MicroBatchSizes {
            largest: answers.unwrap_or_else(|| order.largest()),
            micro_batches: micro_batches as usize,
            steps,
            data_bytes,
        })
    }
}

/// A micro-batch can contain any answers of a rollout. Worst case: those to the longest prompts, each with all its
/// answers.
fn largest_of_answers(lengths: &[u32], recipe: &Recipe) -> LargestBatch {
    let mut lengths: Vec<usize> = lengths.iter().map(|n| *n as usize).collect();
    lengths.sort_unstable_by(|a, b| b.cmp(a));
    let (rows, group) = (recipe.train.batch_size, recipe.rl.num_generations.max(1));
    let answers = lengths.iter().cycle().flat_map(|n| std::iter::repeat_n(*n, group));
    LargestBatch {
        tokens: answers.take(rows).sum(),
        longest: lengths.first().copied().unwrap_or(1),
        documents: rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Example;
    use crate::recipe;

    fn sizes(text: &str, lengths: &[usize], eval: &[usize]) -> (RowSizes, Recipe) {
        let text = format!("[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n{text}");
        let row = |n: &usize| Example {
            ids: vec![1; *n],
            trained: (0..*n).map(|t| t >= n / 2).collect(),
        };
        let set = |lengths: &[usize]| Dataset::from_examples(lengths.iter().map(row).collect());
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        let (train, eval) = (set(lengths), set(eval));
        let stream = BatchStream::new(&train, rows::stream(&recipe, lengths.len())).unwrap();
        (RowSizes::new(&recipe, &stream, Some(&eval)).unwrap(), recipe)
    }

    #[test]
    fn packed_rows_that_are_taken_again_count_each_time() {
        let text = "max_length = 100\npacking = true\n[train]\nbatch_size = 8\nmax_steps = 3\n";
        let (rows, mut recipe) = sizes(text, &[40, 60, 50, 30], &[]);
        // Two bins, of 100 and of 80 tokens: each four times.
        let found = rows.of(&recipe).unwrap();
        assert_eq!(
            (found.largest.tokens, found.largest.longest, found.steps),
            (4 * 180, 60, 3)
        );
        // A changed recipe uses the same rows, cut to its limits.
        recipe.data.max_length = 50;
        recipe.data.packing_length = 50;
        recipe.train.batch_size = 1;
        assert_eq!(rows.of(&recipe).unwrap().largest.tokens, 50);
        recipe.train.max_steps = 0;
        assert_eq!(rows.of(&recipe).unwrap().steps, 0);
    }

    #[test]
    fn answers_that_a_run_writes_count_at_their_full_length() {
        let text = "max_length = 64\npacking = false\n[train]\nstage = \"grpo\"\nbatch_size = 6\n[rlhf]\n\
                    rewards = [\"exact\"]\nnum_generations = 4\nmax_completion_length = 8\n";
        let (rows, recipe) = sizes(text, &[10, 30, 20], &[12; 100]);
        // Four answers to the longest prompt and two to the second longest.
        assert_eq!(rows.of(&recipe).unwrap().largest.tokens, 4 * 30 + 2 * 20);
        let evaluation = rows.evaluation(&recipe);
        assert_eq!(
            (evaluation.answers, evaluation.answer, evaluation.tokens),
            (ANSWERED, 12, 0)
        );
        let text = "max_length = 64\npacking = false\n[train]\nstage = \"distill\"\n[distill]\nteacher = \"t\"\n\
                    lmbda = 0.5\nmax_new_tokens = 20\n";
        let (rows, mut recipe) = sizes(text, &[40], &[]);
        recipe.train.batch_size = 1;
        // Half of the row is the prompt: 20 tokens. The student can generate 20 more.
        assert_eq!(rows.of(&recipe).unwrap().largest.longest, 40);
        let (rows, _) = sizes(&text.replace("20", "30"), &[40], &[]);
        assert_eq!(rows.of(&recipe).unwrap().largest.longest, 50);
    }

    #[test]
    fn a_batch_of_an_evaluation_is_filled_up_to_a_step_of_full_rows() {
        let text = "max_length = 100\npacking = false\n[train]\nbatch_size = 2\n";
        let (rows, recipe) = sizes(text, &[10, 10], &[30; 20]);
        let evaluation = rows.evaluation(&recipe);
        assert_eq!(
            (evaluation.tokens, evaluation.longest, evaluation.answers),
            (200, 30, 0)
        );
        let (rows, mut recipe) = sizes(text, &[10, 10], &[30; 2]);
        assert_eq!(rows.evaluation(&recipe).tokens, 60);
        // Half of each row is its answer.
        recipe.train.predict_with_generate = true;
        let answered = rows.evaluation(&recipe);
        assert_eq!((answered.answers, answered.answer), (2, 30 + (BYTES - 1) * 15));
        recipe.train.predict_with_generate = false;
        recipe.train.sample_prompts = vec!["12345678".into(); 100];
        let evaluation = rows.evaluation(&recipe);
        assert_eq!((evaluation.answers, evaluation.answer), (ANSWERED, 8 + SAMPLE_TOKENS));
    }
}
