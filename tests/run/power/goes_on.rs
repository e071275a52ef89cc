//! Kills, failing operations and losses of power in runs that go on: in the directory of a finished run, from a checkpoint of another run,
//! or in place of an earlier run; also where the system does not swap two names. The tests of `cargo test` take the operations between two
//! states, and of one of these runs in turn a few others; the ignored ones take all.

use super::round::{Round, Start, taken_at};
use super::{by_hand, errors_of, kills_of, losses_of, lost};
use crate::bench::{files, said};
use crate::disk::{Fault, Loss, Operation};
use crate::same::assert_same;
use crate::turn::{in_turn, turn};
use std::fs;

/// How the runs begin, and whether the system swaps names.
const STARTS: [(Start, bool); 6] = [
    (Start::Back, true),
    (Start::Elsewhere, true),
    (Start::Over, true),
    (Start::Again, true),
    (Start::Back, false),
    (Start::Again, false),
];

/// Kills the first command before this operation.
fn kill(round: &Round, at: usize) {
    round.prepare();
    let out = round.first(Some((Fault::Kill, at)));
    assert_eq!(
        out.status.code(),
        None,
        "{}: not killed at {at}\n{}",
        round.name,
        said(&out)
    );
}

/// Row C1: a run that goes on from a checkpoint of another one gets it after its model is loaded, and has its metrics before.
#[test]
fn a_run_that_was_killed_before_it_has_its_checkpoint_goes_on_from_where_that_is() {
    let Some(round) = Round::with("lora", Start::Elsewhere, true) else {
        return;
    };
    let path = |name: &str| round.bench.path(name);
    round.prepare();
    let mut disk = round.disk();
    let (_, all) = round.failing(Fault::Record, 0);
    let taken = taken_at(&all);
    let linked = all.iter().position(|o| o.what == 'h').expect("no file is linked") + 1;
    let is_record = |o: &Operation| o.what == 'r' && o.other == "run/run.json";
    let recorded = taken + all[taken..].iter().position(is_record).unwrap() + 1;
    // The second names of its files are durable before the checkpoint has its name.
    round.clear();
    all[..=taken].iter().for_each(|operation| disk.apply(operation));
    disk.leave(Loss::Strict, round.bench.dir.path());
    assert!(files(&path("run/checkpoint-2")) == files(&path("whole/checkpoint-2")));

    // Before the first checkpoint; the other run has moved.
    kill(&round, linked);
    assert!(path("run/metrics.jsonl").exists() && !path("run/checkpoint-1").exists());
    fs::rename(path("whole"), path("moved")).unwrap();
    let out = round.command("run", &["--resume"]).output().unwrap();
    let text = said(&out);
    assert!(
        !out.status.success() && text.contains("does not exist any more") && text.contains("--resume DIR"),
        "{text}"
    );
    assert!(text.contains("whole/checkpoint-2"), "{text}");
    let out = round
        .command("run", &["--resume", "moved/checkpoint-2"])
        .output()
        .unwrap();
    fs::rename(path("moved"), path("whole")).unwrap();
    assert!(said(&out).contains("resumed after step 2"), "{}", said(&out));
    assert_same(&round.bench, "whole", "run");

    // Between the two; the same command again is not refused as another run.
    kill(&round, taken);
    assert!(path("run/checkpoint-1").exists() && !path("run/checkpoint-2").exists());
    let out = round.first(None);
    assert!(said(&out).contains("resumed after step 2"), "{}", said(&out));
    assert_same(&round.bench, "whole", "run");

    // When both are there, the other run is not needed.
    kill(&round, recorded);
    let manifest = || fs::read_to_string(path("run/run.json")).unwrap();
    assert!(path("run/checkpoint-2").exists() && manifest().contains("\"from\""));
    fs::rename(path("whole"), path("moved")).unwrap();
    let out = round.command("run", &["--resume", "run"]).output().unwrap();
    fs::rename(path("moved"), path("whole")).unwrap();
    assert!(said(&out).contains("resumed after step 2"), "{}", said(&out));
    assert!(!manifest().contains("\"from\""), "{}", manifest());
    assert_same(&round.bench, "whole", "run");
}

/// Rows C1, C2, C6: where names cannot be swapped, what is replaced has another name for a moment.
#[test]
fn a_fault_between_the_two_renames_of_a_replacement_loses_nothing() {
    for (start, target) in [(Start::Back, "run/final"), (Start::Again, "run/checkpoint-1")] {
        let Some(round) = Round::with("lora", start, false) else {
            return;
        };
        round.prepare();
        let mut disk = round.disk();
        let (_, all) = round.failing(Fault::Record, 0);
        assert!(all.iter().all(|o| o.what != 'x'), "names were swapped");
        let renamed = |is: &dyn Fn(&Operation) -> bool| all.iter().position(|o| o.what == 'r' && is(o)).unwrap();
        let aside = renamed(&|o| o.path == target && o.other.contains(".old-"));
        let named = renamed(&|o| o.other == target);
        assert_eq!(named, aside + 2, "a rename and a sync, then the other rename");
        // Before the new one has its name, and before the previous one has another.
        for at in [named + 1, named + 3] {
            kill(&round, at);
            round.finish(&format!("{}: killed at {at}", round.name));
            assert_same(&round.bench, "whole", "run");
        }
        for (done, operation) in all.iter().enumerate().take(named + 2) {
            disk.apply(operation);
            if done < aside {
                continue;
            }
            // Each rename is lost or not; after its sync it is not.
            let is_sync = operation.what == 's';
            let loss = if is_sync {
                Loss::Strict
            } else {
                Loss::Reordered(done as u64)
            };
            round.clear();
            disk.leave(loss, round.bench.dir.path());
            round.finish(&format!("{}: {loss:?} after {operation}", round.name));
            assert_same(&round.bench, "whole", "run");
        }
    }
}

/// Rows C1, C3, C6: a few operations of one of the runs that go on, others in each turn.
#[test]
fn faults_in_a_run_that_goes_on_lose_nothing() {
    let (start, swaps) = in_turn(&STARTS);
    let Some(round) = Round::with("lora", start, swaps) else {
        return;
    };
    let every = |cases: usize| (round.operations / cases).max(2);
    // The next time that these runs have their turn, other operations are taken.
    let shift = turn() / STARTS.len() * 7;
    let first = |every: usize, more: usize| 1 + (shift + more) % every;
    let kills = kills_of(&round, first(every(6), 31), every(6));
    let errors = errors_of(&round, (first(every(8), 17), shift), every(8));
    let losses = losses_of(&round, (first(every(8), 5), shift), every(8));
    let syncs = lost::syncs_of(&round, 19);
    assert!(
        kills > 1 && errors > 2 && losses > 2 && syncs > 0,
        "{kills} {errors} {losses} {syncs}"
    );
}

/// All runs of the methods of a test by hand. The best evaluations that `Elsewhere` and `Again` need are those of LoRA.
fn all(swaps_only: bool, test: impl Fn(&Round) -> usize) -> usize {
    let mut cases = 0;
    for method in by_hand(&["lora"]) {
        for (start, swaps) in STARTS {
            let of_any_method = matches!(start, Start::Back | Start::Over);
            if (method == "lora" || of_any_method) && (swaps || !swaps_only) {
                cases += Round::with(&method, start, swaps).map_or(0, |round| test(&round));
            }
        }
    }
    cases
}

#[test]
#[ignore = "by hand: minutes"]
fn kills_at_every_operation_of_a_run_that_goes_on_lose_nothing() {
    println!("{} kills", all(false, |round| kills_of(round, 1, 1)));
}

#[test]
#[ignore = "by hand: an hour"]
fn every_write_that_fails_in_a_run_that_goes_on_loses_nothing() {
    println!("{} faults", all(true, |round| errors_of(round, (1, 0), 1)));
}

#[test]
#[ignore = "by hand: minutes"]
fn a_loss_of_power_at_any_operation_of_a_run_that_goes_on_loses_nothing() {
    println!("{} states", all(false, |round| losses_of(round, (0, 0), 1)));
}

#[test]
#[ignore = "by hand: minutes"]
fn any_failed_sync_and_a_loss_of_power_in_a_run_that_goes_on_lose_nothing() {
    println!("{} states", all(true, |round| lost::syncs_of(round, 1)));
}
