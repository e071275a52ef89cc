//! The runs whose file operations are made to fail: how they begin, and how a user goes on after a fault.

use crate::bench::{Bench, files, said};
use crate::disk::{self, Disk, Fault, Operation, counted, on_disk, ran_on_disk};
use crate::same::METHODS;
use ft::base::staging;
use std::fs;
use std::io::Write;
use std::process::{Command, Output};

/// Five steps, three saves, two kept, with LoRA one; the methods of `same` and GRPO.
fn settings(method: &str) -> Vec<&'static str> {
    let grpo: &[&str] = &[
        "train.stage=grpo",
        "tune.method=lora",
        "tune.lora.r=4",
        "rlhf.rewards=[\"regex:[aeiou]\", \"length:4\"]",
        "rlhf.num_generations=4",
        "rlhf.max_completion_length=8",
        "rlhf.num_iterations=2",
    ];
    let own = METHODS.iter().find(|m| m.0 == method).map_or(grpo, |m| m.1);
    let base = ["train.max_steps=5", "train.save_steps=2", "train.save_total_limit=2"];
    // The last value of a key counts.
    let more: &[&str] = match method {
        "adalora" => &["train.max_steps=10"],
        "kto" => &["train.batch_size=2"],
        // Rotation leaves one checkpoint only; texts of SFT are generated too.
        "lora" => &[
            "train.save_total_limit=1",
            "train.sample_prompts=[\"Is it raining?\", \"Add 17 and 25.\"]",
        ],
        _ => &[],
    };
    [&base[..], own, more].concat()
}

/// How the run begins whose operations are made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// In a new directory.
    New,
    /// From an earlier checkpoint of a finished run, in its directory: later checkpoints are set aside, `final/` is replaced. There are
    /// leftovers of a killed process too.
    Back,
    /// From a checkpoint of another run. A second one, with the best evaluation so far, is brought too.
    Elsewhere,
    /// As `Elsewhere`, after a process that was killed when it had brought the second one alone: that is replaced.
    Again,
    /// In place of a finished run with other settings.
    Over,
}

/// The checkpoint from which `Back`, `Elsewhere` and `Again` go on, and that of the best evaluation before.
const FROM: u64 = 2;
const BEST: u64 = 1;

impl Start {
    fn settings(self) -> &'static [&'static str] {
        match self {
            Start::New => &[],
            Start::Back | Start::Over => &["train.save_total_limit=9"],
            // The evaluation after step 2 is worse than that after step 1, and those after it are better.
            Start::Elsewhere | Start::Again => &[
                "train.save_total_limit=9",
                "train.load_best_model_at_end=true",
                "optimizer.learning_rate=1",
                "schedule.name=constant",
            ],
        }
    }

    /// The flags of the command of the user.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Start::New => &[],
            Start::Back => &["--resume", "run/checkpoint-2"],
            Start::Elsewhere => &["--resume", "whole/checkpoint-2"],
            Start::Again => &["--resume"],
            Start::Over => &["--overwrite"],
        }
    }

    /// What ft says to a `--resume` after which the user gives the first command again.
    fn refusals(self) -> &'static [&'static str] {
        match self {
            Start::Over => &[
                "no run to resume",
                "differ from the saved run",
                "no checkpoint to resume from",
            ],
            _ => &["no run to resume"],
        }
    }

    /// The step after which the run goes on at least.
    pub fn least(self) -> u64 {
        match self {
            Start::New | Start::Over => 0,
            Start::Back | Start::Elsewhere | Start::Again => FROM,
        }
    }
}

pub struct Round {
    pub bench: Bench,
    /// The method and how the run begins, for messages.
    pub name: String,
    pub start: Start,
    /// False: the system refuses to swap two names.
    swaps: bool,
    pub settings: Vec<&'static str>,
    /// Number of file operations of an undisturbed run.
    pub operations: usize,
    /// The files of `whole`.
    whole: Vec<(String, Vec<u8>)>,
}

impl Round {
    /// The undisturbed run is in `whole`. `None` without a C compiler.
    pub fn new(method: &str) -> Option<Self> {
        let mut out = Self {
            bench: Bench::new(),
            name: method.to_string(),
            start: Start::New,
            swaps: true,
            settings: settings(method),
            operations: 0,
            whole: Vec::new(),
        };
        let mut command = out.command("whole", &[]);
        on_disk(&out.bench, &mut command, Fault::Count, 0)?;
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{}", said(&ran));
        out.operations = counted(&out.bench);
        Some(out)
    }

    /// As `new`, for a run that begins so. `whole` has all checkpoints of a new run, and `before` what is in `run` at first.
    pub fn with(method: &str, start: Start, swaps: bool) -> Option<Self> {
        disk::library()?;
        let mut out = Self {
            bench: Bench::new(),
            name: format!("{method}, {start:?}{}", if swaps { "" } else { " without swaps" }),
            start,
            swaps,
            settings: [&settings(method)[..], start.settings()].concat(),
            operations: 0,
            whole: Vec::new(),
        };
        out.must_run("whole", &[]);
        match start {
            Start::Over => out.must_run("before", &["train.seed=7"]),
            Start::Again => out.kill_between_checkpoints(),
            Start::New | Start::Back | Start::Elsewhere => {}
        }
        out.whole = files(&out.bench.path("whole"));
        out.prepare();
        let mut command = out.command("run", start.flags());
        on_disk(&out.bench, &mut command, Fault::Count, 0)?;
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{}: {}", out.name, said(&ran));
        out.operations = counted(&out.bench);
        if matches!(start, Start::Elsewhere | Start::Again) {
            let both = format!("checkpoint-{FROM}, and checkpoint-{BEST}, the best evaluation so far");
            assert!(said(&ran).contains(&both), "{}", said(&ran));
        }
        Some(out)
    }

    fn must_run(&self, run: &str, flags: &[&str]) {
        let ran = self.command(run, flags).output().unwrap();
        assert!(ran.status.success(), "{run}: {}", said(&ran));
    }

    /// Makes `before` for `Again`.
    fn kill_between_checkpoints(&self) {
        let start = |fault, at| {
            self.clear();
            let mut command = self.command("run", Start::Elsewhere.flags());
            ran_on_disk(&self.bench, &mut command, fault, at).unwrap().1
        };
        let at = taken_at(&start(Fault::Record, 0));
        start(Fault::Kill, at);
        let there = |step| self.bench.path(&format!("run/checkpoint-{step}")).exists();
        assert!(there(BEST) && !there(FROM), "not killed between the two");
        fs::rename(self.bench.path("run"), self.bench.path("before")).unwrap();
    }

    fn last_step(&self) -> u64 {
        let mut settings = self.settings.iter().rev();
        let steps = settings.find_map(|setting| setting.strip_prefix("train.max_steps="));
        steps.unwrap().parse().unwrap()
    }

    /// The steps of the saves that a full disk may refuse: from the first to the last.
    pub fn saves(&self) -> (u64, u64) {
        (self.start.least().max(1) + 1, self.last_step())
    }

    pub fn command(&self, run: &str, flags: &[&str]) -> Command {
        let out = format!("train.output_dir={run}");
        // Rotation removes checkpoints that were there before.
        let limit: &[&str] = if self.start != Start::New && run == "run" {
            &["train.save_total_limit=1"]
        } else {
            &[]
        };
        let words = [&["train", "--recipe", "r.toml", &out][..], &self.settings, limit, flags];
        let mut command = self.bench.command(&words.concat());
        if !self.swaps {
            disk::without_swaps(&mut command).unwrap();
        }
        command
    }

    fn go(&self, flags: &[&str], fault: Option<(Fault, usize)>) -> Output {
        let mut command = self.command("run", flags);
        if let Some((fault, at)) = fault {
            on_disk(&self.bench, &mut command, fault, at).unwrap();
        }
        command.output().unwrap()
    }

    /// The first command, with a fault.
    pub fn first(&self, fault: Option<(Fault, usize)>) -> Output {
        self.go(self.start.flags(), fault)
    }

    /// As `first`; the file operations too, also those that failed.
    pub fn failing(&self, fault: Fault, at: usize) -> (Output, Vec<Operation>) {
        let mut command = self.command("run", self.start.flags());
        ran_on_disk(&self.bench, &mut command, fault, at).unwrap()
    }

    /// What the user does after a fault, with another one: resumes `run`, or gives the first command again.
    pub fn next(&self, fault: Option<(Fault, usize)>) -> Output {
        if self.bench.path("run").exists() {
            let out = self.go(&["--resume"], fault);
            let text = said(&out);
            if !self.start.refusals().iter().any(|refusal| text.contains(refusal)) {
                return out;
            }
        }
        self.first(fault)
    }

    /// Resumes `run` without a fault to its end. Nothing incomplete stays.
    pub fn finish(&self, what: &str) {
        self.finish_but(what, &|_, _| false);
    }

    /// As `finish`; `may_stay`: the name of what is incomplete, and what ft said.
    pub fn finish_but(&self, what: &str, may_stay: &dyn Fn(&str, &str) -> bool) {
        let out = self.next(None);
        let text = said(&out);
        assert!(out.status.success(), "{what}\n{text}");
        let left = fs::read_dir(self.bench.path("run")).unwrap();
        for name in left.map(|e| e.unwrap().file_name().into_string().unwrap()) {
            let whole = !name.contains(".tmp-") && !name.contains(".old-");
            assert!(whole || may_stay(&name, &text), "{what}: {name} stays\n{text}");
        }
        let from = self.went_on_from();
        let least = self.start.least();
        assert!(from >= least, "{what}: resumed from {from}, not from {least}\n{text}");
        let is_same = self.whole.is_empty() || files(&self.bench.path("whole")) == self.whole;
        assert!(is_same, "{what}: the other run has changed");
    }

    /// Directories in `run` whose mark is lost, although names in them are not: they stay, and ft names them.
    pub fn unmarked(&self) -> Vec<String> {
        let entries = fs::read_dir(self.bench.path("run")).into_iter().flatten().flatten();
        let unmarked = entries.filter(|e| e.path().is_dir() && !staging::is_marked(&e.path()));
        unmarked.map(|e| e.file_name().into_string().unwrap()).collect()
    }

    /// The step after which the last process went on; 0: it began.
    pub fn went_on_from(&self) -> u64 {
        let events = self.bench.lines("run/events.jsonl");
        let begins = |e: &&serde_json::Value| e["event"] == "start" || e["event"] == "resume";
        let last = events.iter().rfind(begins);
        last.map_or(0, |e| e["step"].as_u64().unwrap_or(0))
    }

    /// The disk before the run: all is durable.
    pub fn disk(&self) -> Disk {
        let mut disk = Disk::new();
        if self.start != Start::New {
            disk.import(self.bench.dir.path(), &["whole", "run"]);
        }
        disk
    }

    /// Back to the state before the run.
    pub fn prepare(&self) {
        self.clear();
        let from = match self.start {
            Start::New | Start::Elsewhere => return,
            Start::Back => "whole",
            Start::Again | Start::Over => "before",
        };
        // With the times of the files, by which a run recognizes its `final/`.
        let (from, to) = (self.bench.path(from), self.bench.path("run"));
        let copied = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
        assert!(copied.success());
        if self.start == Start::Back {
            self.leave_rests();
        }
    }

    /// What a process leaves that was killed: a part of a checkpoint, and halves of lines.
    fn leave_rests(&self) {
        let manifest = fs::read_to_string(self.bench.path("run/run.json")).unwrap();
        let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
        let part = format!("run/checkpoint-4.tmp-{}", manifest["processes"][0]);
        let part = self.bench.path(&part);
        staging::scratch(&part).unwrap();
        fs::write(part.join("weights.safetensors"), "half").unwrap();
        for log in ["run/metrics.jsonl", "run/events.jsonl"] {
            let mut file = fs::OpenOptions::new().append(true).open(self.bench.path(log)).unwrap();
            file.write_all(b"{\"step\":").unwrap();
        }
    }

    /// Removes all but what the cases share.
    pub fn clear(&self) {
        for entry in fs::read_dir(self.bench.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !["model", "whole", "before"].contains(&name.as_str()) {
                fs::remove_dir_all(path).unwrap();
            }
        }
    }
}

/// The number of the operation that gives the checkpoint from which a run goes on its name in the directory of this run.
pub fn taken_at(all: &[Operation]) -> usize {
    let name = format!("run/checkpoint-{FROM}");
    let at = all.iter().position(|o| o.what == 'r' && o.other == name);
    at.expect("no checkpoint is brought") + 1
}

/// True if this directory is one of `unmarked`, and ft said that it stays.
pub fn is_named(unmarked: &[String], name: &str, text: &str) -> bool {
    let mut lines = text.lines().filter(|l| l.contains("cannot verify that it created"));
    unmarked.iter().any(|u| u == name) && lines.any(|line| line.contains(name))
}

/// All failures of the cases of a test, not the first alone.
#[derive(Default)]
pub struct Cases(Vec<String>);

impl Cases {
    pub fn check(&mut self, what: &str, case: impl FnOnce()) {
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(case)) {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            self.0.push(format!("{what}\n{text}"));
        }
    }

    pub fn assert_none(self) {
        assert!(self.0.is_empty(), "{} cases fail:\n{}", self.0.len(), self.0.join("\n"));
    }
}
