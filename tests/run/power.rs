//! Kills, failing writes and losses of power at numbered file operations of a run: the first files, saves, block
//! switches, rotation, evaluations, the export, and resumes. The tests of `cargo test` take some of the operations of
//! some methods, and fewer of another method in turn; the ignored ones take all.

mod expected;
mod exports;
mod goes_on;
mod lost;
mod round;

use crate::bench::{Bench, files, said};
use crate::disk::{Fault, Loss, Operation, counted, on_disk, ran_on_disk, recorded};
use crate::same::{METHODS, assert_same, assert_same_final, assert_same_lines};
use crate::turn::{in_turn, turn};
use ft::base::rng::{Rng, Stream};
use round::{Cases, Round, Start};
use std::fs;
use std::process::Command;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;
/// The words of errors for these.
const NAMED: [&str; 4] = [
    "No space left",
    "Input/output error",
    "not enough disk space",
    "quota exceeded",
];

/// Calls `test` with the method of this turn, and with other distances of the operations in the next round of turns.
fn method_in_turn(least: usize, test: impl Fn(&str, usize) -> usize) {
    let all = all_methods();
    // With 1 all operations would be taken.
    let cases = test(in_turn(&all), least + turn() / all.len() % 7);
    let compiler = on_disk(&Bench::new(), &mut Command::new("true"), Fault::Count, 0).is_some();
    assert!(cases > 0 || !compiler, "no cases");
}

fn all_methods() -> Vec<&'static str> {
    METHODS.iter().map(|m| m.0).chain(["grpo"]).collect()
}

/// The methods of a test by hand; `FT_TEST_METHODS=lora,full` are others.
fn by_hand(methods: &[&'static str]) -> Vec<String> {
    match std::env::var("FT_TEST_METHODS") {
        Ok(names) => names.split(',').map(str::to_string).collect(),
        Err(_) => methods.iter().map(|name| name.to_string()).collect(),
    }
}

/// Kills at every `every`-th operation of a run, again at a drawn operation of its resume, then goes on to the end.
fn kills(method: &str, every: usize) -> usize {
    let Some(round) = Round::new(method) else { return 0 };
    let rng = Rng::new(every as u64, Stream::Sampling, &[]);
    kills_of(&round, 1 + rng.below(0, every as u64) as usize, every)
}

/// As `kills`, of any run, from the operation `first` on.
fn kills_of(round: &Round, first: usize, every: usize) -> usize {
    let name = &round.name;
    let rng = Rng::new(every as u64, Stream::Sampling, &[]);
    let (mut kills, mut cases) = (0, Cases::default());
    for at in (first..=round.operations).step_by(every) {
        round.prepare();
        // A resume has fewer operations.
        let again = 1 + rng.below(at as u64, 60) as usize;
        let fault = if (at / every).is_multiple_of(2) {
            Fault::Kill
        } else {
            Fault::Half
        };
        let what = format!("{name}: kills at {at} and {again}");
        for out in [round.first(Some((fault, at))), round.next(Some((fault, again)))] {
            let killed = std::os::unix::process::ExitStatusExt::signal(&out.status) == Some(9);
            assert!(killed || out.status.success(), "{what}\n{}", said(&out));
            kills += usize::from(killed);
        }
        cases.check(&what, || {
            round.finish("after the kills");
            assert_same(&round.bench, "whole", "run");
            assert_same_events(&round.bench, "whole", "run");
        });
    }
    cases.assert_none();
    println!("{name}: {kills} kills, {} operations", round.operations);
    kills
}

/// Asserts that every line of events is whole, and that the last process of `broken` reported each save and its end as `whole` did. The
/// lines of earlier processes stay.
fn assert_same_events(bench: &Bench, whole: &str, broken: &str) {
    let reported = |run: &str| {
        let all = bench.lines(&format!("{run}/events.jsonl"));
        let begins = |e: &serde_json::Value| e["event"] == "start" || e["event"] == "resume";
        let from = all.iter().rposition(begins).unwrap();
        let first = all[from]["step"].as_u64().unwrap_or(0);
        let later: Vec<_> = all[from + 1..]
            .iter()
            .filter(|e| e["event"] == "save" || e["event"] == "stop")
            .map(|e| (e["event"].to_string(), e["step"].as_u64(), e["reason"].to_string()))
            .collect();
        (first, later)
    };
    let ((_, mut a), (first, b)) = (reported(whole), reported(broken));
    a.retain(|(event, step, _)| event == "\"stop\"" || *step > Some(first));
    assert_eq!(a, b, "{broken}: events after step {first}");
}

/// Rows C1, C2, C5: kills at numbered operations, two in a row.
#[test]
fn kills_at_file_operations_lose_nothing() {
    let all: usize = ["block from the disk", "lora", "grpo"]
        .iter()
        .map(|m| kills(m, 20))
        .sum();
    assert!(all == 0 || all >= 50, "{all} kills");
    method_in_turn(45, kills);
}

#[test]
#[ignore = "by hand: minutes"]
fn kills_at_every_file_operation_lose_nothing() {
    println!(
        "{} kills",
        by_hand(&all_methods()).iter().map(|m| kills(m, 1)).sum::<usize>()
    );
}

/// Errors at every `every`-th operation, once or from there on: `expected` says what each path requires.
fn errors(method: &str, every: usize) -> usize {
    let Some(round) = Round::new(method) else { return 0 };
    let first = 1 + Rng::new(3, Stream::Sampling, &[]).below(0, every as u64) as usize;
    errors_of(&round, (first, 0), every)
}

/// As `errors`, of any run, from the operation `first` on, with the kind `n`.
fn errors_of(round: &Round, (first, mut n): (usize, usize), every: usize) -> usize {
    let name = &round.name;
    let (mut faults, mut failed, mut cases) = (0, 0, Cases::default());
    for at in (first..=round.operations).step_by(every) {
        let kinds = [
            Fault::Once(ENOSPC),
            Fault::From(EIO),
            Fault::Once(EIO),
            Fault::Once(EDQUOT),
            Fault::From(ENOSPC),
            Fault::From(EDQUOT),
        ];
        let kinds = if every == 1 { &kinds[..] } else { &kinds[n % 6..][..1] };
        n += 1;
        for fault in kinds {
            round.prepare();
            let is_full = matches!(fault, Fault::Once(ENOSPC | EDQUOT) | Fault::From(ENOSPC | EDQUOT));
            let saves = is_full.then(|| round.saves());
            let what = format!("{name}: {fault:?} at {at} of {}", round.operations);
            cases.check(&what.clone(), || {
                let (out, done) = round.failing(*fault, at);
                let text = said(&out);
                failed += usize::from(expected::assert_expected(&done, &out, saves) > 0);
                if out.status.success() {
                    // Only logs, caches and marks may fail, with an equal result.
                    assert_same_final(&round.bench, "whole", "run");
                } else {
                    assert!(NAMED.iter().any(|n| text.contains(n)), "{what}\n{text}");
                    round.finish(&what);
                    assert_same_final(&round.bench, "whole", "run");
                }
                // A log that failed once has all lines in the end, but for those of another run.
                if matches!(fault, Fault::Once(_)) && !text.contains("cannot be copied") {
                    assert_same_lines(&round.bench, "whole", "run");
                }
            });
            faults += 1;
        }
    }
    cases.assert_none();
    // The curves are drawn less often on a slow machine: the last numbers may have no operation.
    assert!(
        2 * failed > faults,
        "{name}: {failed} of {faults} faults met an operation"
    );
    println!("{name}: {faults} faults, {} operations", round.operations);
    faults
}

/// Row C7.
/// Rows C3, S8: an error at numbered operations.
#[test]
fn writes_that_fail_are_told_and_lose_nothing() {
    let all: usize = ["block", "lora"].iter().map(|m| errors(m, 15)).sum();
    assert!(all == 0 || all >= 20, "{all} faults");
    method_in_turn(45, errors);
}

#[test]
#[ignore = "by hand: minutes"]
fn every_write_that_fails_is_told_and_loses_nothing() {
    let names = ["block", "block from the disk", "lora", "full", "dpo", "grpo"];
    println!("{} faults", by_hand(&names).iter().map(|m| errors(m, 1)).sum::<usize>());
}

/// Row C3: lines that a full disk refuses are written later: at the next save, or at the end of the run.
#[test]
fn a_log_that_fails_once_has_all_lines_in_the_end() {
    let Some(round) = Round::new("lora") else { return };
    // Before the first save, and without any: the picture of the curves is drawn at saves, if there is time.
    let cases = [
        ("2", "run/metrics.jsonl", "\"eval_loss\""),
        ("2", "run/samples.jsonl", "\"before\""),
        ("0", "run/metrics.jsonl", "\"step\":5"),
        ("0", "run/events.jsonl", "\"stop\""),
    ];
    for (saves, path, line) in cases {
        round.clear();
        let saves = format!("train.save_steps={saves}");
        let start = |fault, at| {
            let mut command = round.command("run", &[&saves]);
            ran_on_disk(&round.bench, &mut command, fault, at).unwrap()
        };
        let is_line = |o: &Operation| o.what == 'w' && o.path == path && o.text().contains(line);
        let at = start(Fault::Record, 0).1.iter().position(is_line).unwrap();
        round.clear();
        let (out, done) = start(Fault::Once(ENOSPC), at + 1);
        let failed: Vec<_> = done.iter().filter(|o| o.failed).map(|o| (o.what, &*o.path)).collect();
        assert_eq!(failed, [('w', path)], "{line}");
        assert_eq!(expected::assert_expected(&done, &out, None), 1);
        assert!(
            said(&out).contains("is written again, with all lines"),
            "{}",
            said(&out)
        );
        assert_same(&round.bench, "whole", "run");
        assert_eq!(round.bench.lines("run/events.jsonl").last().unwrap()["event"], "stop");
    }
}

/// Row C3: the result of a run without checkpoints cannot be written. Its state is saved, and the resume writes the result.
#[test]
fn a_result_that_cannot_be_written_is_not_lost() {
    let Some(mut round) = Round::new("lora") else { return };
    round.settings.push("train.save_steps=0");
    let mut command = round.command("run", &[]);
    on_disk(&round.bench, &mut command, Fault::Record, 0).unwrap();
    assert!(command.output().unwrap().status.success());
    let all = recorded(&round.bench);
    // The rehearsal writes before the first step.
    let steps = all.iter().rposition(|o| o.path == "run/metrics.jsonl").unwrap();
    let writes = (1..)
        .zip(&all)
        .skip(steps)
        .filter(|(_, o)| o.what == 'w' && o.path.starts_with("run/final.tmp-"));
    for (at, _) in writes {
        round.clear();
        let out = round.first(Some((Fault::Once(ENOSPC), at)));
        let text = said(&out);
        assert_eq!(out.status.code(), Some(1), "{at}\n{text}");
        assert!(
            text.contains("No space left") && text.contains("`--resume` writes `final/`"),
            "{text}"
        );
        let events = round.bench.lines("run/events.jsonl");
        assert_eq!(events.last().unwrap()["event"], "stop");
        assert!(round.bench.path("run/checkpoint-5").exists() && !round.bench.path("run/final").exists());
        round.finish("after a failed export");
        assert_same(&round.bench, "whole", "run");
    }
}

/// The newest checkpoint that was saved durably in the first operations: renamed, then its directory synced.
fn acknowledged(done: &[Operation]) -> u64 {
    let (mut renamed, mut out) = (0, 0);
    for operation in done {
        if operation.failed {
            if operation.what == 's' && operation.path == "run" {
                // Its new names are lost.
                renamed = out;
            }
            continue;
        }
        if matches!(operation.what, 'r' | 'x')
            && let Some(step) = operation.other.strip_prefix("run/checkpoint-")
            && let Ok(step) = step.parse()
        {
            renamed = step;
        }
        if operation.what == 's' && operation.path == "run" {
            out = renamed;
        }
    }
    out
}

/// Loses the power after every `every`-th operation.
fn losses(method: &str, every: usize) -> usize {
    Round::new(method).map_or(0, |round| losses_of(&round, (every / 2, 0), every))
}

/// As `losses`, of any run, first after `first` operations and one more, with the kind `n`.
fn losses_of(round: &Round, (first, mut n): (usize, usize), every: usize) -> usize {
    let name = &round.name;
    if round.start != Start::New {
        round.prepare();
    }
    let mut disk = round.disk();
    let (ran, all) = round.failing(Fault::Record, 0);
    assert!(ran.status.success(), "{}", said(&ran));
    let (mut states, mut cases) = (0, Cases::default());
    for (done, operation) in all.iter().enumerate() {
        disk.apply(operation);
        if done % every != first % every {
            continue;
        }
        let kinds = [
            Loss::Strict,
            Loss::Zeros,
            Loss::Drawn(done as u64),
            Loss::Reordered(done as u64),
        ];
        let kinds = if every == 1 { &kinds[..] } else { &kinds[n % 4..][..1] };
        n += 1;
        for loss in kinds {
            round.clear();
            disk.leave(*loss, round.bench.dir.path());
            let what = format!("{name}: {loss:?} after {} ({operation})", done + 1);
            let unmarked = round.unmarked();
            let is_reordered = matches!(loss, Loss::Reordered(_));
            let named = |name: &str, text: &str| is_reordered && round::is_named(&unmarked, name, text);
            cases.check(&what, || {
                round.finish_but(&what, &named);
                assert_same(&round.bench, "whole", "run");
                let (resumed, saved) = (round.went_on_from(), acknowledged(&all[..=done]));
                assert!(
                    resumed >= saved,
                    "{what}: step {saved} was saved, resumed from {resumed}"
                );
            });
            states += 1;
        }
    }
    cases.assert_none();
    println!("{name}: {states} losses of power, {} operations", all.len());
    states
}

/// Row C6: the disk after a loss of power, with all that was not synced dropped, zeroed or drawn, and names in another order.
#[test]
fn a_loss_of_power_keeps_the_last_saved_state() {
    let all: usize = ["block from the disk", "lora"].iter().map(|m| losses(m, 12)).sum();
    assert!(all == 0 || all >= 25, "{all} states");
    method_in_turn(45, losses);
}

#[test]
#[ignore = "by hand: minutes"]
fn a_loss_of_power_at_any_operation_keeps_the_last_saved_state() {
    let names = [
        "block",
        "block from the disk",
        "block of codes from the disk",
        "lora",
        "corda",
        "dpo",
        "grpo",
    ];
    println!("{} states", by_hand(&names).iter().map(|m| losses(m, 1)).sum::<usize>());
}

/// Rows C3, C6: a sync fails, and the power is lost later.
#[test]
fn a_failed_sync_and_a_loss_of_power_keep_the_last_saved_state() {
    let all: usize = ["block from the disk", "lora"].iter().map(|m| lost::syncs(m, 19)).sum();
    assert!(all == 0 || all >= 4, "{all} states");
    method_in_turn(29, lost::syncs);
}

#[test]
#[ignore = "by hand: minutes"]
fn any_failed_sync_and_a_loss_of_power_keep_the_last_saved_state() {
    let names = ["block", "block from the disk", "lora", "dpo", "grpo"];
    let all = by_hand(&names);
    println!("{} states", all.iter().map(|m| lost::syncs(m, 1)).sum::<usize>());
}

/// Kills `ft export` at every `every`-th operation, or lets that fail: the directory is whole or not there, and a second export
/// writes it.
fn broken_exports(method: &str, every: usize) -> usize {
    let Some(round) = Round::new(method) else { return 0 };
    let bench = &round.bench;
    // The newest is there with every limit.
    let names = fs::read_dir(bench.path("whole")).unwrap();
    let steps = names.filter_map(|e| {
        e.unwrap()
            .file_name()
            .to_str()?
            .strip_prefix("checkpoint-")?
            .parse()
            .ok()
    });
    let newest: u64 = steps.max().unwrap();
    let checkpoint = &format!("whole/checkpoint-{newest}");
    let export = || bench.command(&["export", checkpoint, "--out", "out"]);
    // An adapter with a base of its own contains the name of its directory.
    let mut command = export();
    on_disk(bench, &mut command, Fault::Count, 0).unwrap();
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{}", said(&ran));
    let operations = counted(bench);
    let right = files(&bench.path("out"));
    let (mut faults, mut cases) = (0, Cases::default());
    let kinds = [Fault::Kill, Fault::Once(EIO), Fault::Once(ENOSPC), Fault::Once(EDQUOT)];
    for (n, at) in (1..=operations).step_by(every).enumerate() {
        // The first one of a few is a kill more often.
        let some = [kinds[[0, 1, 2, 0, 3][n % 5]]];
        for fault in if every == 1 { &kinds[..] } else { &some[..] } {
            let what = format!("{method}: {fault:?} at {at} of {operations}");
            cases.check(&what.clone(), || {
                let _ = fs::remove_dir_all(bench.path("out"));
                let (out, done) = ran_on_disk(bench, &mut export(), *fault, at).unwrap();
                let text = said(&out);
                if !matches!(fault, Fault::Kill) {
                    expected::assert_expected(&done, &out, None);
                    let named = NAMED.iter().any(|n| text.contains(n));
                    assert!(out.status.success() || named, "{what}\n{text}");
                }
                // It gets its name last, and the sync of that name may fail.
                let written = done.iter().any(|o| o.what == 'r' && o.other == "out" && !o.failed);
                assert_eq!(bench.path("out").exists(), written, "{what}\n{text}");
                if written {
                    assert!(files(&bench.path("out")) == right, "{what}: out is not whole\n{text}");
                    return;
                }
                let again = export().output().unwrap();
                assert!(again.status.success(), "{what}\n{}", said(&again));
                assert!(files(&bench.path("out")) == right, "after {what}");
            });
            faults += 1;
        }
    }
    cases.assert_none();
    println!("{method}: {faults} faults of an export, {operations} operations");
    faults
}

/// Row C14.
#[test]
fn a_broken_export_is_whole_or_not_there() {
    // An adapter with a base of its own takes many operations.
    let methods = [("block", 3), ("lora", 3), ("loftq", 17)];
    let all: usize = methods
        .iter()
        .map(|(method, every)| broken_exports(method, *every))
        .sum();
    assert!(all == 0 || all >= 10, "{all} faults");
    method_in_turn(15, broken_exports);
}

#[test]
#[ignore = "by hand: minutes"]
fn an_export_broken_at_every_operation_is_whole_or_not_there() {
    let all = by_hand(&all_methods());
    println!("{} faults", all.iter().map(|m| broken_exports(m, 1)).sum::<usize>());
}
