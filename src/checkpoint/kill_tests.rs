//! Kills a real process at random moments while it saves; the checkpoints it leaves must always load.

use super::tests::{OPTIMIZER, WEIGHTS, plan, save_step, values};
use super::*;
use crate::base::rng::{Rng, Stream};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const RUN: &str = "FT_TEST_CHECKPOINT_RUN";
const KILLS: u64 = 30;

fn plans() -> Vec<TensorPlan> {
    (0..4).map(|i| plan(&format!("layer.{i}.weight"), &[64, 256])).collect()
}

/// The child: continues from the newest checkpoint, saves every step (every third step twice), keeps two.
#[test]
#[ignore = "runs only as the child of the test below"]
fn child_saves_until_it_is_killed() {
    let Some(run) = std::env::var_os(RUN).map(PathBuf::from) else {
        return;
    };
    let mut step = latest(&run).unwrap().map_or(0, |l| l.step);
    let parent = std::os::unix::process::parent_id();
    // Ends if the parent process is gone.
    while std::os::unix::process::parent_id() == parent {
        step += 1;
        for _ in 0..if step.is_multiple_of(3) { 2 } else { 1 } {
            save_step(&run, step, &plans(), &json!({"step": step})).unwrap();
        }
        rotate(&run, 2, None).unwrap();
    }
}

/// Row C1.
#[test]
fn a_process_killed_at_any_moment_leaves_a_state_that_loads() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path();
    let rng = Rng::new(7, Stream::Sampling, &[std::process::id() as u64]);
    let (mut before, mut cut_off) = (0, 0);
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "checkpoint::kill_tests::child_saves_until_it_is_killed",
                "--ignored",
                "--nocapture",
            ])
            .env(RUN, run)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The time starts when the child has saved a new checkpoint.
        let start = Instant::now();
        while list(run).unwrap().last().is_none_or(|(s, _)| *s <= before) {
            assert!(start.elapsed() < Duration::from_secs(60), "the child does not save");
            assert!(child.try_wait().unwrap().is_none(), "the child failed by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(rng.below(kill, 40_000)));
        child.kill().unwrap();
        child.wait().unwrap();

        let cleaned = clean_leftovers(run, &BTreeSet::from([child.id()]), &|_| false).unwrap();
        cut_off += u64::from(!cleaned.removed.is_empty() || !cleaned.restored.is_empty());
        let left = crate::base::files::list(run).unwrap();
        assert!(left.iter().all(|p| !p.to_string_lossy().contains(".tmp-")), "{left:?}");
        let loaded = latest(run).unwrap().expect("a complete state");
        assert!(loaded.step > before, "a finished save was lost");
        before = loaded.step;
        assert_eq!(loaded.state, json!({"step": loaded.step}));
        for file in [WEIGHTS, OPTIMIZER] {
            let weights = loaded.open(file).unwrap();
            for plan in plans() {
                assert!(
                    weights.read_f32(&plan.name).unwrap() == values(loaded.step, file, &plan),
                    "a mix of two states"
                );
            }
        }
        for (step, path) in list(run).unwrap() {
            assert_eq!(verify(&path).unwrap().step, step);
        }
    }
    assert!(cut_off > 0, "no save was cut off: the test proves nothing");
}
