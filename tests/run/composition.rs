//! The combinations of values: docs/composition.md is made by the checks and the planner of the program, for every
//! combination. CI checks an eighth of them against the page; `FT_BLESS=1` makes the page anew, and an ignored test checks
//! all. A sample in which every two values meet trains one step.

mod boxes;
mod levels;
mod page;

use crate::bench::{Bench, copy_all, goldens, said};
use boxes::{Combination, products};
use candle_core::Device;
use ft::base::{Error, Result};
use ft::plan::gpu_time::GPUS;
use ft::plan::{PlanDevice, RunPlan};
use ft::recipe::{self, DeviceRef};
use ft::setup::ModelDir;
use ft::setup::adapters::AdapterValues;
use ft::setup::defaults::ResumedValues;
use ft::setup::rows::RecipeRows;
use ft::train::{learning, stage};
use levels::{ADAPTERS, ALL, Axis, BLOCKS, REGULARIZATION};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The verdict of the program on a combination before it loads weights.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Works,
    /// It works, but a setting has no effect.
    NoEffect(Vec<String>),
    Refused(Vec<String>),
}

type Verdicts = BTreeMap<Combination, Verdict>;

/// A test directory with small models, teachers and rows.
fn directory() -> Bench {
    let bench = Bench::new();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    copy_all(&tiny, &bench.path("same"));
    copy_all(&goldens().join("training/models/qwen3"), &bench.path("other"));
    copy_all(&goldens().join("tokenizers/small"), &bench.path("other"));
    let world = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/world");
    for (from, to) in [("eval", "rows"), ("preference-eval", "pairs"), ("sums-eval", "sums")] {
        let text = fs::read_to_string(world.join(format!("{from}.jsonl"))).unwrap();
        let few: Vec<&str> = text.lines().take(4).collect();
        // The small tokenizer has no capital letters.
        fs::write(bench.path(&format!("{to}.jsonl")), few.join("\n").to_lowercase()).unwrap();
    }
    fs::write(
        bench.path("text.jsonl"),
        "{\"text\": \"two plus three is five\"}\n".repeat(4),
    )
    .unwrap();
    let path = |name: &str| bench.path(name).display().to_string();
    let text = format!(
        "[model]\npath = \"{}\"\ndevice = \"cpu\"\n[data]\ntrain = \"{}\"\nmax_length = 128\n\
         [optimizer]\nlearning_rate = 1e-3\n[schedule]\nname = \"constant\"\nwarmup_ratio = 0.0\n\
         [train]\nmax_steps = 1\nbatch_size = 2\ngradient_accumulation_steps = 1\nsave_steps = 0\n",
        path("same"),
        path("rows.jsonl")
    );
    fs::write(bench.path("r.toml"), text).unwrap();
    let done = |arguments: &[&str]| {
        let out = bench.ft(arguments);
        assert!(out.status.success(), "{arguments:?}\n{}", said(&out));
    };
    done(&["quantize", "--model", "same", "--to", "nf4", "--out", "quantized"]);
    done(&[
        "distill",
        "cache",
        "--recipe",
        "r.toml",
        "--out",
        "stored",
        "train.stage=distill",
        &format!("distill.teacher={}", path("same")),
        "distill.top_k=8",
    ]);
    bench
}

/// The settings of a combination.
fn settings(bench: &Bench, axes: &[Axis], combination: &[usize]) -> Vec<String> {
    let dir = bench.dir.path().display().to_string();
    let chosen = axes.iter().zip(combination).flat_map(|((_, levels), i)| levels[*i].1);
    chosen.map(|setting| setting.replace("DIR", &dir)).collect()
}

/// Checks and plans combinations as `ft train` does before it loads weights. Models and rows are read once.
struct Checker<'a> {
    bench: &'a Bench,
    text: String,
    models: HashMap<String, Rc<ModelDir>>,
    rows: HashMap<String, Rc<RecipeRows>>,
    /// The check of a stage depends on model, rows and teacher.
    stages: HashMap<String, Option<String>>,
}

impl<'a> Checker<'a> {
    fn new(bench: &'a Bench) -> Self {
        Self {
            bench,
            text: fs::read_to_string(bench.path("r.toml")).unwrap(),
            models: HashMap::new(),
            rows: HashMap::new(),
            stages: HashMap::new(),
        }
    }

    fn verdict(&mut self, axes: &[Axis], combination: &[usize]) -> Verdict {
        match self.check(&settings(self.bench, axes, combination)) {
            Ok(without_effect) if without_effect.is_empty() => Verdict::Works,
            Ok(without_effect) => Verdict::NoEffect(without_effect),
            Err(error) => {
                let what = error.what().split("\n\nerror: ");
                // Several errors of a recipe are below one heading.
                let several = error.what().contains("\n\nerror: ");
                let one = |text: &str| text.lines().next().unwrap_or_default().to_string();
                let mut texts: Vec<String> = what.skip(several as usize).map(one).collect();
                texts.sort();
                Verdict::Refused(texts)
            }
        }
    }

    /// The warnings about settings without effect.
    fn check(&mut self, settings: &[String]) -> Result<Vec<String>> {
        let loaded = recipe::parse(&self.text, "r.toml", settings)?;
        let recipe = &loaded.recipe;
        let of = |names: &[&str]| {
            let used = settings.iter().filter(|s| names.iter().any(|name| s.starts_with(name)));
            used.cloned().collect::<Vec<_>>().join(" ")
        };
        let model = match self.models.get(&of(&["model.path"])) {
            Some(model) => model.clone(),
            None => {
                let model = Rc::new(ModelDir::of_recipe(recipe)?);
                self.models.insert(of(&["model.path"]), model.clone());
                model
            }
        };
        let key = of(&["model.path", "train.", "data.", "distill.", "rlhf."]);
        let rows = match self.rows.get(&key) {
            Some(rows) => rows.clone(),
            None => {
                let rows = Rc::new(RecipeRows::read(recipe, &model)?);
                self.rows.insert(key.clone(), rows.clone());
                rows
            }
        };
        let device = match recipe.model.device {
            DeviceRef::Cpu => PlanDevice::of(&Device::Cpu)?,
            _ => PlanDevice::like(&GPUS[0]),
        };
        let stored = model.stored(recipe.model.init)?;
        let before = ResumedValues::default();
        let plan = RunPlan::new(
            recipe,
            &model.spec,
            Some(&rows),
            &stored,
            &before,
            &device,
            AdapterValues::Shapes,
        )?;
        let steps = plan.stream.as_ref().map_or(0, |stream| stream.steps());
        learning::check(&plan.recipe, &plan.active_schedule, steps)?;
        if let Some(refused) = plan.memory.refused {
            return Err(refused.error);
        }
        let found = self.stages.entry(key).or_insert_with(|| {
            stage::check(&plan.recipe, &model, &rows.train)
                .err()
                .map(|e| e.what().into())
        });
        if let Some(what) = found {
            return Err(Error::new(what.clone()));
        }
        let texts = loaded.warnings.iter().filter(|w| w.contains("has no effect"));
        let mut texts: Vec<String> = texts
            .map(|w| w.split(" (").next().unwrap_or_default().to_string())
            .collect();
        texts.sort();
        Ok(texts)
    }
}

/// Every combination of the values.
fn combinations(axes: &[Axis]) -> Vec<Combination> {
    axes.iter().fold(vec![Vec::new()], |all, (_, levels)| {
        let longer = |c: &Combination| (0..levels.len()).map(|i| [&c[..], &[i]].concat()).collect::<Vec<_>>();
        all.iter().flat_map(longer).collect()
    })
}

/// The verdicts of the program for these combinations, on all cores.
fn verdicts(bench: &Bench, axes: &[Axis], all: &[Combination]) -> Verdicts {
    let next = AtomicUsize::new(0);
    let work = || {
        let (mut checker, mut out) = (Checker::new(bench), Vec::new());
        while let Some(c) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            out.push((c.clone(), checker.verdict(axes, c)));
        }
        out
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    })
}

/// The chosen values of an axis as text.
fn names((_, levels): &Axis, chosen: &BTreeSet<usize>) -> String {
    let list = |keep: &dyn Fn(usize) -> bool| {
        let kept = (0..levels.len()).filter(|i| keep(*i));
        kept.map(|i| levels[i].0).collect::<Vec<_>>().join("; ")
    };
    match levels.len() - chosen.len() {
        0 => "all".into(),
        left if left < chosen.len() => format!("all but {}", list(&|i| !chosen.contains(&i))),
        _ => list(&|i| chosen.contains(&i)),
    }
}

/// Groups combinations by the texts of their verdict.
fn by_text(found: &Verdicts, texts: impl Fn(&Verdict) -> &[String]) -> BTreeMap<String, BTreeSet<Combination>> {
    let mut out: BTreeMap<String, BTreeSet<Combination>> = BTreeMap::new();
    for (combination, verdict) in found {
        for text in texts(verdict) {
            out.entry(text.clone()).or_default().insert(combination.clone());
        }
    }
    out
}

fn refusals(verdict: &Verdict) -> &[String] {
    match verdict {
        Verdict::Refused(texts) => texts,
        _ => &[],
    }
}

fn without_effect(verdict: &Verdict) -> &[String] {
    match verdict {
        Verdict::NoEffect(texts) => texts,
        _ => &[],
    }
}

/// A table with one row for each product of values that has the same text.
fn table(axes: &[Axis], head: &str, groups: &BTreeMap<String, BTreeSet<Combination>>) -> String {
    let titles: Vec<&str> = axes.iter().map(|(name, _)| *name).collect();
    let mut out = format!(
        "| {head} | {} |\n|{}\n",
        titles.join(" | "),
        "---|".repeat(axes.len() + 1)
    );
    for (text, set) in groups {
        for product in products(set, axes.len()) {
            let cells = axes.iter().zip(&product).map(|(axis, chosen)| names(axis, chosen));
            let cells: Vec<String> = cells.collect();
            writeln!(out, "| {} | {} |", text.replace('|', "\\|"), cells.join(" | ")).unwrap();
        }
    }
    out
}

/// The tables of one set of axes.
fn section(title: &str, axes: &[Axis], found: &Verdicts) -> String {
    let mut out = format!("## {title}\n\n| axis | values |\n|---|---|\n");
    for (name, levels) in axes {
        let values: Vec<&str> = levels.iter().map(|(name, _)| *name).collect();
        writeln!(out, "| {name} | {} |", values.join("; ")).unwrap();
    }
    let (refused, idle) = (by_text(found, refusals), by_text(found, without_effect));
    let works = found.values().filter(|v| !matches!(v, Verdict::Refused(_))).count();
    writeln!(out, "\n{works} of {} combinations work.", found.len()).unwrap();
    for (head, groups) in [("refused", refused), ("works; a setting has no effect", idle)] {
        if !groups.is_empty() {
            write!(out, "\n{}", table(axes, head, &groups)).unwrap();
        }
    }
    out
}

/// For each method and each value of the other axes: does the value add refusals?
fn matrix(found: &Verdicts) -> String {
    let others: Vec<(usize, usize)> = [2, 3, 4]
        .into_iter()
        .flat_map(|axis| (0..ALL[axis].1.len()).map(move |i| (axis, i)))
        .collect();
    let heads: Vec<&str> = others.iter().map(|(axis, i)| ALL[*axis].1[*i].0).collect();
    let mut out = format!(
        "| method | {} |\n|{}\n",
        heads.join(" | "),
        "---|".repeat(heads.len() + 1)
    );
    for (method, (name, _)) in ALL[0].1.iter().enumerate() {
        let cell = |(axis, i): &(usize, usize)| {
            let these = found.iter().filter(|(c, _)| c[0] == method && c[*axis] == *i);
            let (works, refused): (Vec<_>, Vec<_>) = these.partition(|(_, v)| refusals(v).is_empty());
            let with_another = |c: &Combination| {
                (0..ALL[*axis].1.len()).any(|other| {
                    let mut c = c.clone();
                    c[*axis] = other;
                    refusals(&found[&c]).is_empty()
                })
            };
            match (works.is_empty(), refused.iter().any(|(c, _)| with_another(c))) {
                (true, _) => "no",
                (false, true) => "partly",
                (false, false) => "yes",
            }
        };
        let cells: Vec<&str> = others.iter().map(cell).collect();
        writeln!(out, "| {name} | {} |", cells.join(" | ")).unwrap();
    }
    out
}

const INTRODUCTION: &str = "# What combines with what

This page shows which values of method, stage, storage of frozen weights, tier and device work together. A test makes this page: it checks and
plans every combination as `ft train` does before it loads weights (`assets/tiny`; for CUDA it plans for a simulated H100),
and it trains one step of a sample in which every pair of values occurs, on the CPU. A combination that is in no table below works.

Not in these tables: optimizers, their states and schedules, because they see only names, shapes and numbers; the losses of `dpo`
and `kto`; families ([models.md](models.md)). On a CPU the tier `host` is the same as `device`.

\"bf16 in an f32 model\" is `model.dtype = \"f32\"` with `memory.frozen_weights = \"bf16\"`. \"Quantized files\" is a model directory whose
projections are NF4. Block training dequantizes such projections at the start ([quantization.md](quantization.md)), so the corrections by SGD
work with them, but not with weights that `memory.frozen_weights` quantizes.
";

/// Every section of the page: its title and its axes.
const SECTIONS: [(&str, &[Axis]); 4] = [
    ("Everything", &ALL),
    ("Block training", &BLOCKS),
    ("Adapters", &ADAPTERS),
    ("Noise on embeddings and label smoothing", &REGULARIZATION),
];

/// The whole page, from the verdicts of its sections.
fn written(found: &[Verdicts]) -> String {
    let mut out = format!(
        "{INTRODUCTION}\n\"no\": no combination works. \"partly\": some combinations work; others are refused, and would work with another value of the same axis (storage, tier or device).\n\n{}",
        matrix(&found[0])
    );
    for ((title, axes), found) in SECTIONS.iter().zip(found) {
        write!(out, "\n{}", section(title, axes, found)).unwrap();
    }
    out
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/composition.md")
}

/// A number without regularity, always the same for a combination.
fn scrambled(c: &Combination) -> u64 {
    c.iter().fold(7u64, |h, v| {
        (h ^ *v as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
    })
}

/// Compares the page with the program for the combinations that `keep` chooses.
fn compare(keep: impl Fn(&Combination) -> bool) {
    let (bench, page) = (directory(), fs::read_to_string(file()).unwrap());
    let stated: Vec<Verdicts> = SECTIONS
        .iter()
        .map(|(title, axes)| page::stated(&page, title, axes))
        .collect();
    // Also the order of rows and the counts: the page is exactly what a program writes.
    assert!(
        written(&stated) == page,
        "docs/composition.md is stale: run `FT_BLESS=1 cargo test`"
    );
    let mut compared = 0;
    for ((title, axes), stated) in SECTIONS.iter().zip(&stated) {
        let chosen: Vec<Combination> = stated.keys().filter(|c| keep(c)).cloned().collect();
        for (c, now) in verdicts(&bench, axes, &chosen) {
            compared += 1;
            assert!(
                stated[&c] == now,
                "docs/composition.md is stale (`FT_BLESS=1 cargo test` makes it anew): {title}, {:?}:\n{:?} there\n{now:?} now",
                settings(&bench, axes, &c),
                stated[&c],
            );
        }
    }
    println!("{compared} combinations");
    assert!(compared > 1000);
}

#[test]
fn the_page_of_what_composes_is_up_to_date() {
    if std::env::var_os("FT_BLESS").is_some() {
        let bench = directory();
        let found = SECTIONS.map(|(_, axes)| verdicts(&bench, axes, &combinations(axes)));
        fs::write(file(), written(&found)).unwrap();
    }
    compare(|c| scrambled(c).is_multiple_of(8));
}

/// All of them: about a minute of processor time.
#[test]
#[ignore = "by hand; CI compares an eighth"]
fn every_combination_is_as_the_page_says() {
    compare(|_| true);
}

/// Combinations of this list in which every two values that occur together in it meet.
fn covering(mut all: Vec<Combination>) -> Vec<Combination> {
    // A fixed order without regularity.
    all.sort_by_key(scrambled);
    let pairs = |c: &Combination| {
        let values: Vec<(usize, usize)> = c.iter().copied().enumerate().collect();
        let later = |i: usize| values[i + 1..].to_vec();
        let of = |(i, a): (usize, &(usize, usize))| later(i).into_iter().map(|b| (*a, b)).collect::<Vec<_>>();
        values.iter().enumerate().flat_map(of).collect::<Vec<_>>()
    };
    let mut left: BTreeSet<_> = all.iter().flat_map(pairs).collect();
    let mut out = Vec::new();
    // First those that add the most pairs.
    for least in (1..=all.first().map_or(0, |c| c.len() * c.len() / 2)).rev() {
        for c in &all {
            if pairs(c).iter().filter(|pair| left.contains(pair)).count() >= least {
                left.retain(|pair| !pairs(c).contains(pair));
                out.push(c.clone());
            }
        }
    }
    out
}

/// Trains one step; the error output if the run was refused.
fn trained(bench: &Bench, combination: &[usize], number: usize) -> std::result::Result<(), String> {
    let run = format!("train.output_dir=runs/{number}");
    let own = settings(bench, &ALL, combination);
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let arguments = [&["train", "--recipe", "r.toml", &run][..], &own].concat();
    let out = bench
        .command(&arguments)
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap();
    let dir = bench.path(&format!("runs/{number}"));
    let steps = bench.steps(&format!("runs/{number}"));
    let final_dir = dir.join("final").is_dir();
    let _ = fs::remove_dir_all(dir);
    if !out.status.success() {
        return Err(said(&out));
    }
    let loss = steps.first().and_then(|step| step["loss"].as_f64());
    match (steps.len(), loss, final_dir) {
        (1, Some(loss), true) if loss.is_finite() => Ok(()),
        found => Err(format!("the run has not one step and a result: {found:?}")),
    }
}

#[test]
fn every_two_values_train_one_step_together() {
    let bench = directory();
    // The verdicts of the page; the program's own verdicts are compared with it above.
    let found = page::stated(&fs::read_to_string(file()).unwrap(), SECTIONS[0].0, &ALL);
    let on_cpu = |works: bool| {
        let these = found
            .iter()
            .filter(|(c, v)| c[4] == 0 && matches!(v, Verdict::Refused(_)) != works);
        these.map(|(c, _)| c.clone()).collect::<Vec<_>>()
    };
    let working = on_cpu(true);
    // Of what is refused, every reason with every method.
    let mut reasons = BTreeMap::new();
    for c in on_cpu(false) {
        reasons.entry((refusals(&found[&c]), c[0])).or_insert(c);
    }
    let sample: Vec<Combination> = covering(working).into_iter().chain(reasons.into_values()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut wrong = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(c) = sample.get(number) else { return wrong };
            let name = ALL
                .iter()
                .zip(c)
                .map(|((_, levels), i)| levels[*i].0)
                .collect::<Vec<_>>()
                .join(" | ");
            match (refusals(&found[c]), trained(&bench, c, number)) {
                ([], Ok(())) => {}
                ([], Err(text)) => wrong.push(format!("{name}: works in the table\n{text}")),
                (_, Ok(())) => wrong.push(format!("{name}: refused in the table, and trains")),
                (texts, Err(said)) => {
                    let missing = texts.iter().filter(|text| !said.contains(*text));
                    wrong.extend(missing.map(|text| format!("{name}: not refused for {text}\n{said}")));
                }
            }
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let wrong: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    println!("{} runs", sample.len());
    assert!(
        wrong.is_empty(),
        "{} of {} runs:\n{}",
        wrong.len(),
        sample.len(),
        wrong.join("\n")
    );
}
