//! Values for `auto` keys that depend on rows and model: epochs, learning rate, gradient accumulation, length of packed
//! sequences, steps per block. They are chosen once, before the first step; a resumed run keeps the values of its
//! start.
//! Input: the recipe, row lengths and shapes; no weights.

use crate::base::{Result, files};
use crate::checkpoint;
use crate::model::Spec;
use crate::optim;
use crate::recipe::table::KeyPath;
use crate::recipe::{
    self, ACCUMULATION, BlockKeys, BlockOrder, Data, LoadedRecipe, Method, ModelInit, OptimizerKeys, OptimizerName,
    PeftType, Recipe, Stage, Train,
};
use crate::setup::prompts;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A setting that the recipe leaves open.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// `memory.tier`
    pub key: KeyPath,
    pub value: String,
    pub why: String,
}

/// Rows per step, as in TRL.
const ROWS: f64 = 8.0;
/// Least number of steps of a run by epochs, about: TRL's defaults give this number for 200 rows.
const FEWEST_STEPS: f64 = 75.0;
/// A longer run than this takes more rows per step, as long as packed sequences are not full.
const ENOUGH_STEPS: f64 = 1000.0;

/// The start of a run: from the beginning, or from a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Resume {
    /// From the beginning.
    #[default]
    No,
    /// From the newest checkpoint of the run directory of the recipe.
    Newest,
    /// From this checkpoint directory, or from the newest checkpoint of this run directory.
    From(PathBuf),
}

impl Resume {
    /// The directory of the run or of the checkpoint; `None`: the run starts from the beginning. `run_dir`: the run
    /// directory of the recipe.
    pub fn directory<'a>(&'a self, run_dir: &'a Path) -> Option<&'a Path> {
        match self {
            Resume::No => None,
            Resume::Newest => Some(run_dir),
            Resume::From(dir) => Some(dir),
        }
    }
}

/// Values from `resolved.toml` of the run that is resumed.
#[derive(Debug, Default)]
pub struct ResumedValues {
    values: BTreeMap<String, String>,
    /// The file comes from a version without `auto` for these keys.
    older: bool,
    /// The run goes on from a checkpoint.
    goes_on: bool,
}

impl ResumedValues {
    /// Reads the values. There are none for a new run, or if the file does not exist.
    ///
    /// Errors: the file cannot be read.
    pub fn read(recipe: &Recipe, resume: &Resume) -> Result<Self> {
        let Some(run_dir) = run_of(recipe, resume) else {
            return Ok(Self::default());
        };
        let from = resume.directory(Path::new(&recipe.train.output_dir));
        let is_checkpoint = from.is_some_and(|from| from != run_dir);
        let goes_on = is_checkpoint || !checkpoint::list(run_dir)?.is_empty();
        let file = run_dir.join("resolved.toml");
        if !file.is_file() {
            return Ok(Self {
                goes_on,
                ..Self::default()
            });
        }
        let text = files::read_text(&file)?;
        Ok(Self {
            values: recipe::written(&text),
            older: !text.contains("packing_length"),
            goes_on,
        })
    }

    /// True if the run goes on from a checkpoint, false if it starts from the beginning.
    pub fn goes_on(&self) -> bool {
        self.goes_on
    }

    fn number(&self, key: KeyPath) -> Option<f64> {
        self.values.get(key.0)?.parse().ok()
    }
}

/// Returns the directory of the run that is resumed: the recipe's own, or that of the given run or checkpoint. `None`:
/// a new run.
pub fn run_of<'a>(recipe: &'a Recipe, resume: &'a Resume) -> Option<&'a Path> {
    let from = resume.directory(Path::new(&recipe.train.output_dir))?;
    if from.join("manifest.json").exists() {
        Some(from.parent().unwrap_or(from))
    } else {
        Some(from)
    }
}

/// Returns the recipe with all `auto` keys resolved, and the choices. `lengths`: tokens of each row; without them the
/// values for runs of unknown size stay.
pub fn resolve(recipe: &Recipe, spec: &Spec, lengths: Option<&[u32]>, before: &ResumedValues) -> (Recipe, Vec<Choice>) {
    let (mut resolved, open) = (recipe.clone(), recipe.open);
    let mut choices = Vec::new();
    let mut choose = |key: KeyPath, found: Option<f64>, now: f64, why: String| {
        let why = match found {
            Some(_) => AS_BEFORE.to_string(),
            None => why,
        };
        let value = found.unwrap_or(now);
        choices.push(Choice {
            key,
            value: recipe::number(key, value),
            why,
        });
        value
    };
    if open.learning_rate {
        let why = format!("{}, hidden size {}", recipe.tune.method.name(), spec.hidden);
        let key = OptimizerKeys::learning_rate;
        resolved.optimizer.learning_rate = choose(key, before.number(key), learning_rate(recipe, spec.hidden), why);
    }
    if open.num_epochs && recipe.train.max_steps < 0 {
        let key = Train::num_epochs;
        let why = format!("stage `{}`", recipe.train.stage.name());
        resolved.train.num_epochs = choose(key, before.number(key), recipe.train.num_epochs, why);
    }
    let key = Train::gradient_accumulation_steps;
    let Some(lengths) = lengths.filter(|l| !l.is_empty()) else {
        return (resolved, choices);
    };
    if prompts::reinforces(recipe) {
        if open.gradient_accumulation_steps {
            let why = "complete groups of answers".to_string();
            let now = whole_groups(recipe);
            resolved.train.gradient_accumulation_steps = choose(key, before.number(key), now as f64, why) as usize;
        }
        resolved.open = recipe::OpenKeys::default();
        return (resolved, choices);
    }
    let step = RowsPerStep::of(&resolved, lengths);
    if open.gradient_accumulation_steps {
        let found = before.number(key);
        resolved.train.gradient_accumulation_steps = choose(key, found, step.accumulation as f64, step.why()) as usize;
    }
    if open.packing_length && recipe.data.packing {
        let key = Data::packing_length;
        let full = before.older.then_some(recipe.data.max_length as f64);
        let found = before.number(key).or(full);
        let why = if step.length == recipe.data.max_length {
            "`data.max_length`".to_string()
        } else {
            step.why()
        };
        resolved.data.packing_length = choose(key, found, step.length as f64, why) as usize;
    }
    resolved.open = recipe::OpenKeys::default();
    (resolved, choices)
}

/// Chooses the steps per block if `tune.block.switch_every` is `auto`; `rows` is the number of training rows.
pub fn resolve_blocks(
    recipe: &mut Recipe,
    spec: &Spec,
    rows: usize,
    steps: u64,
    before: &ResumedValues,
) -> Option<Choice> {
    let block = &mut recipe.tune.block;
    if recipe.tune.method != Method::Block || block.switch_every.is_some() {
        return None;
    }
    let blocks = optim::partition(block, &spec.params(), spec.tied).len().max(1);
    let together = match block.order {
        BlockOrder::Importance => block.layers_per_block,
        _ => 1,
    };
    if before.older {
        // Checkpoints of that version store `auto` and use this formula.
        let batch = recipe.train.batch_size * recipe.train.gradient_accumulation_steps;
        block.switch_every = Some((rows * together / (batch * blocks).max(1)).clamp(50, 100));
        return None;
    }
    let key = BlockKeys::switch_every;
    let found = before.number(key);
    let every = match found {
        Some(every) => every as u64,
        None => turns(steps, blocks.div_ceil(together.max(1)) as u64),
    };
    // Ranks that train alone are averaged before another block begins.
    let apart = recipe.distributed.sync_every.max(1);
    let every = (every as usize).next_multiple_of(apart);
    block.switch_every = Some(every);
    Some(Choice {
        key,
        value: every.to_string(),
        why: match found {
            Some(_) => AS_BEFORE.to_string(),
            None => format!("{blocks} blocks in {steps} steps"),
        },
    })
}

/// Writes the choices into the recipe and into `resolved.toml`.
pub fn record(loaded: &LoadedRecipe, choices: &[Choice]) -> LoadedRecipe {
    let mut loaded = loaded.clone();
    choices.iter().for_each(|c| loaded.resolve(c.key, &c.value, &c.why));
    loaded
}

const AS_BEFORE: &str = "as in the first plan of the run";

/// Steps per block so that `turns` blocks fit into the run. More than 100 steps per block give no benefit.
fn turns(steps: u64, turns: u64) -> u64 {
    let up = steps.div_ceil(turns);
    let every = if up * (turns - 1) < steps { up } else { steps / turns };
    every.clamp(1, 100)
}

/// Gradient accumulation of an RL stage: a rollout must contain whole groups.
fn whole_groups(recipe: &Recipe) -> usize {
    let r = &recipe.rl;
    let answers = |steps: usize| recipe.train.batch_size * steps * r.num_mini_batches;
    let whole = |steps: &usize| answers(*steps) % r.num_generations.max(1) == 0;
    (ACCUMULATION..ACCUMULATION + r.num_generations.max(1))
        .find(whole)
        .unwrap_or(ACCUMULATION)
}

/// The recipe key documents the rule. The value is rounded to two digits, so the displayed number is exact.
fn learning_rate(recipe: &Recipe, hidden: usize) -> f64 {
    let stage = match recipe.train.stage {
        Stage::Sft | Stage::Pretrain | Stage::Distill => 1.0,
        Stage::Reward => 0.5,
        Stage::Dpo | Stage::Orpo | Stage::Simpo | Stage::Kto | Stage::Grpo | Stage::Ppo => 0.05,
    };
    let method = match (recipe.tune.method, recipe.tune.lora.peft_type) {
        (Method::Lora, PeftType::Ia3 | PeftType::Vera) => 100.0,
        (Method::Lora, _) => 10.0,
        _ if recipe.model.init == ModelInit::Random => 10.0,
        // Each block is updated in only a few of the steps.
        (Method::Block, _) => 3.0,
        _ => 1.0,
    };
    let rule = match recipe.optimizer.name {
        OptimizerName::Adamw | OptimizerName::Adafactor => 1.0,
        OptimizerName::Lion => 0.2,
        OptimizerName::Sgd => 1000.0,
    };
    let rate = 2e-5 * 2048.0 / hidden.max(1) as f64 * stage * method * rule;
    format!("{rate:.1e}").parse().unwrap_or(rate)
}

/// The number of rows per step, and how it is reached.
struct RowsPerStep {
    accumulation: usize,
    /// Largest number of tokens of a packed sequence.
    length: usize,
    /// Target number of rows per step.
    rows: f64,
    /// The reason for that number.
    goal: Goal,
}

enum Goal {
    /// The default: `ROWS`.
    Usual,
    FewestSteps,
    EnoughSteps,
    /// No step contains a row twice.
    OnePass,
    /// `max_steps` steps cover every row.
    AllRows,
}

impl RowsPerStep {
    fn of(recipe: &Recipe, lengths: &[u32]) -> Self {
        let (data, train) = (&recipe.data, &recipe.train);
        let n = lengths.len() as f64;
        let mean = (lengths.iter().map(|n| u64::from(*n)).sum::<u64>() as f64 / n).max(1.0);
        let batch = train.batch_size as f64;
        let own = recipe.open.gradient_accumulation_steps;
        let (rows, goal) = match u64::try_from(recipe.whole_steps()) {
            // The user set the size of a step. It is reduced only if it exceeds the number of rows.
            Ok(_) if !own => (n, Goal::OnePass),
            Ok(steps) => match n / steps.max(1) as f64 {
                rows if rows > ROWS => (rows, Goal::AllRows),
                _ => (ROWS, Goal::Usual),
            },
            Err(_) => {
                let seen = n * train.num_epochs;
                match (seen / FEWEST_STEPS, seen / ENOUGH_STEPS) {
                    (rows, _) if !own || rows < ROWS => (rows.max(1.0), Goal::FewestSteps),
                    (_, rows) if rows > ROWS => (rows, Goal::EnoughSteps),
                    _ => (ROWS, Goal::Usual),
                }
            }
        };
        let rows = rows.min(n);
        let tokens = rows * mean;
        let most = data.packing_length.min(data.max_length) as f64;
        let accumulation = match (own, data.packing) {
            (false, _) => train.gradient_accumulation_steps,
            (true, true) => (tokens / (batch * most)).round().clamp(1.0, ACCUMULATION as f64) as usize,
            (true, false) => (rows / batch).round().clamp(1.0, ACCUMULATION as f64) as usize,
        };
        let length = (tokens / (batch * accumulation as f64)).max(mean).ceil();
        Self {
            accumulation,
            length: length.clamp(2.0, most.max(2.0)) as usize,
            rows,
            goal,
        }
    }

    fn why(&self) -> String {
        let why = match self.goal {
            Goal::Usual => "the usual number".to_string(),
            Goal::FewestSteps => format!("{FEWEST_STEPS} steps or more"),
            Goal::EnoughSteps => format!("about {ENOUGH_STEPS} steps, or rows of full length"),
            Goal::OnePass => "no row is used twice in a step".to_string(),
            Goal::AllRows => "each row once in `train.max_steps` steps".to_string(),
        };
        format!("about {:.0} rows per step: {why}", self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(more: &str) -> Recipe {
        let text = format!("[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n{more}");
        recipe::parse(&text, "r.toml", &[]).unwrap().recipe
    }

    /// (accumulation, tokens of a packed sequence) for `n` rows of `tokens`.
    fn step(more: &str, n: usize, tokens: u32) -> (usize, usize) {
        let step = RowsPerStep::of(&recipe(more), &vec![tokens; n]);
        (step.accumulation, step.length)
    }

    #[test]
    fn a_step_follows_the_number_of_rows() {
        // 50 rows: 150 row passes in 75 steps of 2 rows; 200 rows: 8 per step; 1000 rows: 8 per step, as in TRL.
        assert_eq!(step("", 50, 20), (1, 40));
        assert_eq!(step("", 200, 20), (1, 160));
        assert_eq!(step("", 1000, 20), (1, 160));
        // Long runs fill their sequences: 30 rows of 500 tokens give 7.3 packed sequences.
        assert_eq!(step("", 10_000, 500), (7, 2048));
        assert_eq!(step("", 1_000_000, 500), (8, 2048));
        assert_eq!(step("", 1000, 500), (2, 2000));
        // Without packing.
        assert_eq!(step("packing = false", 50, 20).0, 2);
        assert_eq!(step("packing = false", 100_000, 20).0, 8);
        assert_eq!(step("packing = false\n[train]\nbatch_size = 4", 200, 20).0, 2);
        assert_eq!(step("packing = false\n[train]\nbatch_size = 64", 200, 20).0, 1);
        assert_eq!(step("", 1, 20), (1, 20));
        // With `max_steps`: all rows are used, and no row is twice in a step.
        assert_eq!(step("[train]\nmax_steps = 20", 200, 20), (1, 200));
        assert_eq!(step("[train]\nmax_steps = 400", 200, 20), (1, 160));
        assert_eq!(step("[train]\nmax_steps = 1", 4, 20), (1, 80));
        assert_eq!(step("[train]\nmax_steps = 0", 4, 20), (1, 80));
    }

    #[test]
    fn a_run_that_is_measured_has_the_steps_of_the_whole_run() {
        let measured = |whole: i64| {
            let mut recipe = recipe("[train]\nmax_steps = 21");
            recipe.open.whole_steps = Some(whole);
            let step = RowsPerStep::of(&recipe, &[200; 1000]);
            (step.accumulation, step.length)
        };
        assert_eq!(measured(-1), step("", 1000, 200));
        assert_eq!(measured(300), step("[train]\nmax_steps = 300", 1000, 200));
        assert_ne!(measured(-1), step("[train]\nmax_steps = 21", 1000, 200));
    }

    #[test]
    fn a_written_accumulation_keeps_full_rows_where_there_are_enough() {
        let written = "[train]\ngradient_accumulation_steps = 8\n";
        assert_eq!(step(written, 200, 20), (8, 20));
        assert_eq!(step(written, 100_000, 500), (8, 2048));
        let steps = "[train]\ngradient_accumulation_steps = 8\nmax_steps = 5\n";
        assert_eq!(step(steps, 100_000, 500), (8, 2048));
        assert_eq!(step(steps, 200, 20), (8, 500));
        // A length set in the recipe is kept.
        assert_eq!(step("packing_length = 512\nmax_length = 1024", 1000, 500).0, 8);
    }

    #[test]
    fn more_rows_never_make_fewer_steps() {
        for tokens in [10, 100, 700, 2048] {
            let mut last = 0.0;
            for n in (1..14).map(|i| 3usize.pow(i)) {
                let (accumulation, length) = step("", n, tokens);
                let fits = (length / tokens as usize).max(1);
                let steps = 3.0 * n as f64 / (accumulation * fits) as f64;
                assert!(steps >= last * 0.9, "{n} rows of {tokens}: {steps} after {last}");
                assert!(n < 25 || steps >= 70.0, "{n} rows of {tokens}: {steps}");
                last = steps;
            }
        }
    }

    #[test]
    fn the_rate_follows_method_stage_optimizer_and_width() {
        let rate = |more: &str, hidden| learning_rate(&recipe(more), hidden);
        assert_eq!(rate("", 2048), 6e-5);
        assert_eq!(
            rate("[tune]\nmethod = \"freeze\"\nfreeze.trainable_layers = 2", 2048),
            2e-5
        );
        assert_eq!(rate("[tune]\nmethod = \"full\"", 4096), 1e-5);
        assert_eq!(rate("[tune]\nmethod = \"lora\"", 2048), 2e-4);
        assert_eq!(rate("[tune]\nmethod = \"lora\"\nlora.peft_type = \"ia3\"", 2048), 2e-3);
        assert_eq!(rate("[train]\nstage = \"dpo\"", 2048), 3e-6);
        assert_eq!(rate("[train]\nstage = \"reward\"", 4096), 1.5e-5);
        assert_eq!(rate("[optimizer]\nname = \"lion\"", 2048), 1.2e-5);
        assert_eq!(rate("[optimizer]\nname = \"sgd\"", 2048), 6e-2);
        assert_eq!(rate("[tune]\nmethod = \"full\"", 896), 4.6e-5);
        assert!(rate("", 0).is_finite());
    }

    #[test]
    fn every_block_has_its_turn() {
        for (steps, blocks, every) in [
            (75, 4, 19),
            (75, 32, 2),
            (20, 32, 1),
            (1000, 4, 100),
            (300, 4, 75),
            (1, 1, 1),
        ] {
            assert_eq!(turns(steps, blocks), every, "{steps} steps, {blocks} blocks");
            assert!(steps < blocks || every * (blocks - 1) < steps);
        }
    }

    #[test]
    fn a_run_that_goes_on_keeps_its_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let mut r = recipe("");
        r.train.output_dir = dir.path().display().to_string();
        let file = dir.path().join("resolved.toml");
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            ResumedValues::read(&r, &Resume::Newest).unwrap()
        };
        let new = read(
            "[data]\npacking_length = 77\n[tune.block]\nswitch_every = 9\n[optimizer]\nlearning_rate = 3.3e-4\n\
             [train]\nnum_epochs = 2.0\ngradient_accumulation_steps = 5\n",
        );
        let shape = crate::setup::ModelFiles::of_config(&"shape:small".into(), "main", ModelInit::Pretrained);
        let spec = shape.unwrap().spec;
        let (mut resolved, choices) = resolve(&r, &spec, Some(&[20; 200]), &new);
        assert_eq!(resolved.data.packing_length, 77);
        assert_eq!(resolved.optimizer.learning_rate, 3.3e-4);
        let train = &resolved.train;
        assert_eq!((train.num_epochs, train.gradient_accumulation_steps), (2.0, 5));
        assert!(choices.len() == 4 && choices.iter().all(|c| c.why == AS_BEFORE));
        let choice = resolve_blocks(&mut resolved, &spec, 200, 75, &new).unwrap();
        assert_eq!(
            (choice.value.as_str(), resolved.tune.block.switch_every),
            ("9", Some(9))
        );

        // A file of an older version: full rows, and the old rule for blocks, which its checkpoints call `auto`.
        let old =
            read("[train]\nnum_epochs = 1.0\ngradient_accumulation_steps = 8\n[optimizer]\nlearning_rate = 1e-5\n");
        let (mut resolved, choices) = resolve(&r, &spec, Some(&[20; 200]), &old);
        assert_eq!(
            (resolved.data.packing_length, resolved.train.gradient_accumulation_steps),
            (2048, 8)
        );
        let shown: Vec<(&str, &str)> = choices.iter().map(|c| (c.key.0, c.value.as_str())).collect();
        assert!(shown.contains(&("optimizer.learning_rate", "1e-5")), "{shown:?}");
        assert!(resolve_blocks(&mut resolved, &spec, 200, 75, &old).is_none());
        assert_eq!(resolved.tune.block.switch_every, Some(50));
    }
}
