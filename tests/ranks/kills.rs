//! Kills of one random rank at random moments, with a save after every step. No checkpoint is damaged, and none that was complete
//! is lost.

use crate::bench::{Bench, said};
use crate::faults::LONG;
use crate::job::{self, ranks_of, signal, wait};
use crate::parts::PARTS;
use std::fs;
use std::time::{Duration, Instant};

/// Numbers of a simple generator: the moments and ranks of a seed are the same everywhere.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % most
    }
}

/// The steps of the complete checkpoints of the run.
fn saved(bench: &Bench) -> Vec<u64> {
    let names = fs::read_dir(bench.path("out")).into_iter().flatten().flatten();
    let complete = names.filter(|entry| entry.path().join("manifest.json").exists());
    let mut steps: Vec<u64> = complete
        .filter_map(|e| e.file_name().to_str()?.strip_prefix("checkpoint-")?.parse().ok())
        .collect();
    steps.sort_unstable();
    steps
}

/// True if a save was under way when the job ended.
fn was_cut_off(bench: &Bench) -> bool {
    let names = fs::read_dir(bench.path("out")).into_iter().flatten().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .any(|name| name.starts_with("checkpoint-") && name.contains(".tmp-"))
}

/// Starts the run again and again on 2 to 4 ranks, and kills one of them. Returns the saves that were cut off.
fn kills(count: u64, seed: u64, form: &str) -> usize {
    let bench = Bench::new();
    let mut draws = Draws(seed);
    let (mut before, mut cut_off) = (0, 0);
    for kill in 0..count {
        let size = 2 + draws.below(3) as usize;
        let resume = if kill > 0 { &["--resume"][..] } else { &[] };
        let arguments = [
            &LONG[..],
            &["train.save_steps=1", "train.save_total_limit=3", form],
            resume,
        ]
        .concat();
        let job = job::start(&bench, &vec![arguments; size]);
        let begun = Instant::now();
        while saved(&bench).last().is_none_or(|step| *step <= before) {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "{form}, kill {kill}: no new checkpoint"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(draws.below(60_000)));
        let ranks = ranks_of(&job);
        assert_eq!(ranks.len(), size, "{form}, kill {kill}");
        signal(ranks[draws.below(size as u64) as usize], "-KILL");
        let out = wait(job);
        assert!(!out.status.success());
        cut_off += usize::from(was_cut_off(&bench));
        let steps = saved(&bench);
        let newest = *steps.last().unwrap();
        assert!(
            newest > before,
            "{form}, kill {kill}: checkpoint {before} is lost, there are {steps:?}"
        );
        before = newest;
        let out = bench.ft(&["runs", "verify", "out"]);
        assert!(out.status.success(), "{form}, kill {kill}: {}", said(&out));
    }
    // The next number of ranks goes on from there, to the end.
    let end = format!("train.max_steps={}", before + 2);
    job::train(
        &bench,
        3,
        &[&LONG[..], &[&end, "train.save_steps=0", form, "--resume"]].concat(),
    );
    assert!(bench.path("out/final").exists());
    cut_off
}

#[test]
fn kills_of_a_random_rank_lose_no_checkpoint() {
    for (seed, form) in [(1, "distributed.checkpoint=one"), (2, PARTS)] {
        kills(4, seed, form);
    }
}

/// `FT_TEST_KILLS`: kills of each form of a checkpoint.
#[test]
#[ignore = "by hand: minutes"]
fn a_hundred_kills_of_a_random_rank_lose_no_checkpoint() {
    let count = std::env::var("FT_TEST_KILLS").map_or(50, |n| n.parse().unwrap());
    for (seed, form) in [(3, "distributed.checkpoint=one"), (4, PARTS)] {
        let cut_off = kills(count, seed, form);
        println!("{form}: {count} kills, {cut_off} saves cut off");
        assert!(cut_off > 0, "{form}: no save was cut off");
    }
}
