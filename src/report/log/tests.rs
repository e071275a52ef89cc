//! Tests of the files of a run on a disk that fails: each line is written once, and none is torn.

use super::*;
use crate::report::tests::records;
use crate::report::{Reporter, StepMetrics};
use serde_json::json;
use std::fs;

fn steps(path: &Path) -> Vec<u64> {
    let text = files::read_text(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap())
        .collect()
}

fn step(log: &mut LogFile, step: u64) {
    log.line(&json!({"step": step}));
}

/// A result of an evaluation after a step.
fn evaluation(step: u64, loss: f64) -> Value {
    json!({"step": step, "eval_loss": loss})
}

/// The losses of all evaluations in the file.
fn losses(path: &Path) -> Vec<f64> {
    let found = evaluations(path.parent().unwrap()).into_iter();
    found.flat_map(|(_, numbers)| numbers).map(|(_, loss)| loss).collect()
}

/// The line of a step, for a disk that has space for a part of it only.
fn half_a_step(log: &mut LogFile, step: u64) {
    half(log, &json!({"step": step}));
}

fn half(log: &mut LogFile, line: &Value) {
    let line = line.to_string();
    let path = log.path.clone().unwrap();
    AppendFile::open(&path).unwrap().write(&line.as_bytes()[..4]).unwrap();
    log.waiting_bytes += line.len() as u64 + 1;
    log.waiting.push_back(format!("{line}\n").into_bytes());
    log.failed(
        Error::io("cannot append to the file").at_path(&path),
        false,
        Duration::ZERO,
    );
}

/// As if the last try was long ago.
fn wait(log: &mut LogFile) {
    let failing = log.failing.as_mut().unwrap();
    failing.last_try = failing.last_try.checked_sub(RETRY).unwrap();
}

#[test]
fn a_file_that_fails_once_has_all_lines_later() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let mut log = LogFile::open(&path);
    step(&mut log, 1);
    half_a_step(&mut log, 2);
    assert!(log.take_fault().unwrap().to_string().contains(METRICS));
    step(&mut log, 3);
    let before = files::read_text(&path).unwrap();
    assert_eq!(before, "{\"step\":1}\n{\"st", "not every line tries again");
    wait(&mut log);
    step(&mut log, 4);
    assert_eq!(steps(&path), [1, 2, 3, 4]);
    assert!(log.take_note().unwrap().contains("with all lines"));
    half_a_step(&mut log, 5);
    assert!(log.take_fault().is_some(), "another fault is reported too");
    log.sync();
    step(&mut log, 6);
    assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6], "a sync tries again at once");
    assert!(log.take_note().is_some() && log.take_fault().is_none());
}

#[test]
fn a_file_that_cannot_be_opened_has_all_lines_later() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("later").join(METRICS);
    let mut log = LogFile::open(&path);
    assert!(log.take_fault().is_some());
    step(&mut log, 1);
    log.sync();
    assert!(log.is_failing() && log.take_fault().is_none() && log.take_note().is_none());
    files::create_dir_all(path.parent().unwrap()).unwrap();
    log.sync();
    step(&mut log, 2);
    assert_eq!(steps(&path), [1, 2]);
    // A file that was removed or replaced meanwhile is not filled with zeros.
    half_a_step(&mut log, 3);
    files::remove_file(&path).unwrap();
    log.sync();
    assert_eq!(steps(&path), [3]);
}

#[test]
fn lines_of_a_failed_sync_are_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let mut log = LogFile::open(&path);
    step(&mut log, 1);
    log.sync();
    step(&mut log, 2);
    log.sync_failed(Error::io("cannot sync the file"));
    // What the system dropped.
    let kept = AppendFile::continue_at(&path, log.synced).unwrap();
    assert_eq!(kept.length().unwrap(), log.synced);
    step(&mut log, 3);
    assert_eq!(steps(&path), [1]);
    wait(&mut log);
    step(&mut log, 4);
    assert_eq!(steps(&path), [1, 2, 3, 4]);
    assert!(
        log.take_note().is_none(),
        "only a sync shows that the disk is good again"
    );
    log.sync();
    assert!(log.take_note().is_some() && !log.is_failing());
    assert_eq!(log.synced, files::size(&path).unwrap());
}

#[test]
fn the_newest_lines_of_a_long_fault_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let mut log = LogFile::open(&path);
    half_a_step(&mut log, 1);
    for step in 2..=6 {
        log.line(&json!({"step": step, "text": "a".repeat(1 << 20)}));
    }
    log.sync();
    assert_eq!(steps(&path), [4, 5, 6]);
    assert!(log.take_note().unwrap().contains("are missing"));
}

/// Makes the changes of a file fail, but not its reads: its name is a link now. `allow` ends it.
fn refuse(path: &Path) {
    fs::rename(path, path.with_extension("moved")).unwrap();
    std::os::unix::fs::symlink(path.with_extension("moved"), path).unwrap();
}

fn allow(path: &Path) {
    fs::rename(path.with_extension("moved"), path).unwrap();
}

/// Row C3.
#[test]
fn a_removal_after_a_failed_sync_leaves_no_line_twice_and_none_torn() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let mut log = LogFile::open(&path);
    step(&mut log, 1);
    log.line(&evaluation(1, 0.5));
    step(&mut log, 2);
    log.sync();
    step(&mut log, 3);
    log.sync_failed(Error::io("cannot sync the file"));
    half_a_step(&mut log, 4);
    let text = files::read_text(&path).unwrap();
    assert!(
        text.ends_with("{\"step\":3}\n{\"st"),
        "what waits is in the file: {text}"
    );
    log.drop_evaluation(1);
    assert_eq!(steps(&path), [1, 2, 3, 4]);
    assert!(log.take_removed() && losses(&path).is_empty());
    log.sync();
    assert!(log.take_note().unwrap().contains("with all lines"));
}

/// Row C3.
#[test]
fn lines_that_cannot_be_removed_go_before_the_next_line_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    for torn in [false, true] {
        let _ = fs::remove_file(&path);
        let mut log = LogFile::open(&path);
        step(&mut log, 1);
        log.line(&evaluation(1, 0.5));
        log.sync();
        if torn {
            half_a_step(&mut log, 2);
        }
        refuse(&path);
        log.drop_evaluation(1);
        assert!(log.take_fault().unwrap().to_string().contains(METRICS));
        log.line(&evaluation(1, 0.25));
        assert_eq!(losses(&path), [0.5], "nothing is written before");
        allow(&path);
        log.sync();
        let expected: &[u64] = if torn { &[1, 2, 1] } else { &[1, 1] };
        assert_eq!(steps(&path), expected);
        assert_eq!(losses(&path), [0.25]);
        assert!(log.take_removed() && log.take_note().unwrap().contains("with all lines"));
    }
}

/// Row C3.
#[test]
fn a_removal_that_fails_and_then_finds_nothing_keeps_the_lines() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let mut log = LogFile::open(&path);
    step(&mut log, 1);
    log.sync();
    step(&mut log, 2);
    log.sync_failed(Error::io("cannot sync the file"));
    half_a_step(&mut log, 3);
    refuse(&path);
    log.drop_evaluation(7);
    allow(&path);
    wait(&mut log);
    step(&mut log, 4);
    assert_eq!(steps(&path), [1, 2, 3, 4]);
    // Nothing to remove, and no fault.
    log.sync();
    assert!(log.take_removed(), "a try that failed may have removed lines");
    log.drop_evaluation(7);
    step(&mut log, 5);
    assert_eq!(steps(&path), [1, 2, 3, 4, 5]);
    assert!(!log.take_removed() && !log.is_failing());
}

/// Row C3.
#[test]
fn a_repeated_evaluation_is_written_once_if_its_lines_wait() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let mut log = LogFile::open(&path);
    step(&mut log, 1);
    log.sync();
    // The lines of a failed sync wait together.
    step(&mut log, 2);
    log.line(&evaluation(2, 0.5));
    log.sync_failed(Error::io("cannot sync the file"));
    half(&mut log, &json!({"step": 2, "eval_reward": 1.5}));
    refuse(&path);
    log.drop_evaluation(2);
    log.line(&evaluation(2, 0.25));
    allow(&path);
    log.sync();
    assert_eq!(steps(&path), [1, 2, 2]);
    assert_eq!(losses(&path), [0.25]);
    assert_eq!(log.waiting_bytes, 0);
}

/// Row C3.
#[test]
fn lines_that_can_never_be_removed_do_not_cost_the_others() {
    let dir = tempfile::tempdir().unwrap();
    // The name is too long for a temporary file beside it, so the file can be appended to, but not replaced.
    let path = dir.path().join("m".repeat(250));
    fs::write(&path, "{\"step\":1}\n{\"step\":9}\n{\"step\":2}\n{\"st").unwrap();
    let mut log = LogFile::open_without(&path, Removal::After(2));
    assert!(log.take_fault().is_some());
    step(&mut log, 3);
    assert!(files::read_text(&path).unwrap().ends_with("{\"st"));
    log.last_try();
    let text = files::read_text(&path).unwrap();
    assert!(text.ends_with("{\"step\":2}\n{\"st\n{\"step\":3}\n"), "{text}");
    assert!(log.take_note().unwrap().contains("could not be removed"));
    // The same before lines would be lost.
    fs::write(&path, "{\"step\":1}\n{\"step\":9}\n{\"step\":2}\n").unwrap();
    let mut log = LogFile::open_without(&path, Removal::After(2));
    for step in 3..=7 {
        log.line(&json!({"step": step, "text": "a".repeat(1 << 20)}));
    }
    let text = files::read_text(&path).unwrap().replace("\n\n", "\n");
    fs::write(&path, text).unwrap();
    assert_eq!(steps(&path), [1, 9, 2, 3, 4, 5, 6, 7]);
    assert!(!log.is_failing());
    // Lines of these steps may be those of the earlier run.
    assert!(log.keeps(2, &Value::Null) && !log.keeps(3, &Value::Null));
}

/// Row C3.
#[test]
fn a_line_after_a_torn_one_is_whole_also_if_those_between_were_too_many() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    fs::write(&path, "{\"step\":1}\n{\"st").unwrap();
    refuse(&path);
    let mut log = LogFile::open_without(&path, Removal::After(2));
    for step in 3..=8 {
        log.line(&json!({"step": step, "text": "a".repeat(1 << 20)}));
    }
    assert!(log.dropped > 0 && log.is_failing());
    allow(&path);
    log.sync();
    let text = files::read_text(&path).unwrap();
    let torn = "{\"step\":1}\n{\"st\n";
    assert!(text.starts_with(torn), "{}", &text[..60]);
    fs::write(&path, &text[torn.len()..]).unwrap();
    assert_eq!(steps(&path), [6, 7, 8]);
    let note = log.take_note().unwrap();
    assert!(
        note.contains("are missing") && note.contains("could not be removed"),
        "{note}"
    );
}

/// Row C3.
#[test]
fn an_evaluation_of_an_earlier_run_whose_lines_stay_is_not_one_of_this_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let lines: String = (1..=4).map(|step| format!("{}\n", evaluation(step, 0.5))).collect();
    fs::write(&path, lines).unwrap();
    refuse(&path);
    let mut reporter = Reporter::new(dir.path(), 9, 2);
    let has = |reporter: &Reporter| [1, 2, 3, 4].map(|step| reporter.has_evaluation(step, "eval_loss"));
    assert_eq!(has(&reporter), [true, true, false, false]);
    assert!(!reporter.has_evaluation(2, "eval_reward"));
    // Neither is one that is repeated, nor one whose removal was given up.
    reporter.drop_evaluation(2);
    assert_eq!(has(&reporter), [true, false, false, false]);
    assert!(reporter.metrics.give_up_removals());
    assert_eq!(has(&reporter), [true, false, false, false]);
    reporter.measured(2, &[("loss", 0.25)]);
    allow(&path);
    reporter.sync();
    let found = evaluations(dir.path());
    assert_eq!(found.len(), 4, "the old lines are there");
    assert_eq!(
        found[1],
        (2, vec![("eval_loss".to_string(), 0.25)]),
        "the later line counts"
    );
}

fn metrics(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        ..StepMetrics::default()
    }
}

/// The steps of the records in the event file.
fn recorded(dir: &Path) -> Vec<u64> {
    records(dir).into_iter().map(|(step, _)| step).collect()
}

/// Row C3.
#[test]
fn lines_of_an_earlier_run_that_stay_at_first_are_gone_later() {
    let dir = tempfile::tempdir().unwrap();
    let sample = |step: u64| json!({"step": step, "when": "during", "prompt": "a"});
    let paths = [METRICS, SAMPLES].map(|name| dir.path().join(name));
    for path in &paths {
        let lines: String = (1..=4).map(|step| format!("{}\n", sample(step))).collect();
        fs::write(path, lines + "{\"st").unwrap();
        refuse(path);
    }
    let mut reporter = Reporter::new(dir.path(), 9, 2);
    assert!(reporter.has_sample(2, "during", "a"));
    assert!(!reporter.has_sample(3, "during", "a"), "this line will be removed");
    reporter.step(&metrics(3), false);
    reporter.sample(&sample(3));
    paths.iter().for_each(|path| allow(path));
    reporter.sync();
    for path in &paths {
        assert_eq!(steps(path), [1, 2, 3]);
    }
}

/// Row C3.
#[test]
fn an_event_file_that_cannot_be_created_has_all_lines_later() {
    for by_sync in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("later");
        let mut reporter = Reporter::new(&run, 9, 0).with_event_file(true);
        let board = reporter.board.as_mut().unwrap();
        assert!(board.is_failing(), "there is no directory");
        assert!(board.take_fault().is_none(), "the fault was reported already");
        reporter.step(&metrics(1), false);
        files::create_dir_all(&run).unwrap();
        reporter.step(&metrics(2), false);
        assert!(files::list(&run).unwrap().is_empty(), "not every line tries again");
        if by_sync {
            reporter.sync();
            assert_eq!(recorded(&run), [1, 2]);
        } else {
            // It is not written while lines of the metrics wait.
            wait(reporter.board.as_mut().unwrap());
            reporter.step(&metrics(3), false);
            assert!(files::list(&run).unwrap().is_empty());
            wait(&mut reporter.metrics);
        }
        reporter.step(&metrics(4), false);
        reporter.step(&metrics(5), false);
        let expected: &[u64] = if by_sync { &[1, 2, 4, 5] } else { &[1, 2, 3, 4, 5] };
        assert_eq!(recorded(&run), expected);
        assert_eq!(steps(&run.join(METRICS)), expected);
        assert!(!reporter.board.as_ref().unwrap().is_failing());
    }
}

/// Row C3.
#[test]
fn an_event_file_has_no_evaluation_that_is_removed_late() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let mut reporter = Reporter::new(dir.path(), 9, 0).with_event_file(true);
    reporter.step(&metrics(1), false);
    reporter.measured(1, &[("kl", 0.25)]);
    assert_eq!(recorded(dir.path()), [1, 1]);
    refuse(&path);
    reporter.drop_evaluation(1);
    reporter.step(&metrics(2), false);
    assert_eq!(recorded(dir.path()), [1, 1, 2]);
    allow(&path);
    reporter.sync();
    assert_eq!(recorded(dir.path()), [1, 2]);
    reporter.measured(2, &[("kl", 0.5)]);
    assert_eq!(recorded(dir.path()), [1, 2, 2]);
    assert_eq!(steps(&path), [1, 2, 2]);
}

/// Row C3.
#[test]
fn an_event_file_is_kept_if_an_earlier_one_cannot_be_emptied() {
    let dir = tempfile::tempdir().unwrap();
    // The name is too long for a temporary file beside it, so the file cannot be replaced.
    let old = dir.path().join(format!("events.out.tfevents.{}1.ft", "0".repeat(230)));
    fs::write(&old, [7; 4096]).unwrap();
    let mut metrics = LogFile::open(&dir.path().join(METRICS));
    step(&mut metrics, 1);
    let mut board = LogFile::event_file(dir.path());
    board.create(&metrics, true);
    assert!(!board.is_failing() && board.take_fault().is_none());
    let note = board.take_warning().unwrap();
    assert!(note.contains("cannot be emptied"), "{note}");
    let new = board.path.clone().unwrap();
    let written = files::read(&new).unwrap();
    assert_eq!(history::read_events(&written).len(), 3);
    // Each further try finds the same new file.
    for _ in 0..2 {
        board.create(&metrics, true);
        assert!(board.take_warning().is_none());
        assert_eq!(files::list(dir.path()).unwrap().len(), 3);
        assert_eq!(files::size(&old).unwrap(), 4096);
    }
    let short = dir.path().join("events.out.tfevents.0000000001.ft");
    fs::rename(&old, &short).unwrap();
    board.create(&metrics, false);
    assert_eq!(files::size(&short).unwrap(), 4096, "not within the steps");
    board.create(&metrics, true);
    assert_eq!(history::read_events(&files::read(&short).unwrap()).len(), 1);
    assert!(files::read(&new).unwrap() == written && !board.has_old_numbers);
}

#[test]
fn a_try_that_takes_long_is_followed_by_a_longer_pause() {
    let now = Instant::now();
    for (took, pause) in [(0, 5), (500, 5), (1000, 10), (60_000, 600)] {
        let failing = Failing {
            last_try: now,
            time: Duration::from_millis(took),
            at_sync: false,
        };
        assert_eq!(failing.pause(), Duration::from_secs(pause), "{took} ms");
    }
    let dir = tempfile::tempdir().unwrap();
    let mut board = LogFile::event_file(&dir.path().join("later"));
    board.failed(Error::io("cannot write the file"), false, Duration::from_secs(60));
    wait(&mut board);
    assert!(!board.is_time());
    board.failed(Error::io("cannot write the file"), false, Duration::ZERO);
    assert!(!board.is_time());
    wait(&mut board);
    assert!(board.is_time());
}
