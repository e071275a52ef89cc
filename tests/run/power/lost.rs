//! One sync fails, then the power is lost: what that sync had to write is never durable, whatever is synced later.

use super::round::{Cases, Round, is_named};
use super::{EIO, acknowledged, expected};
use crate::disk::{Fault, Loss};
use crate::same::{assert_same, assert_same_final};
use crate::turn::turn;

/// Lets every `every`-th sync of a run fail, then loses the power when the run has ended.
pub fn syncs(method: &str, every: usize) -> usize {
    Round::new(method).map_or(0, |round| syncs_of(&round, every))
}

/// As `syncs`, of any run.
pub fn syncs_of(round: &Round, every: usize) -> usize {
    let name = &round.name;
    round.prepare();
    let (_, all) = round.failing(Fault::Record, 0);
    let count = all.iter().filter(|o| o.what == 's').count();
    let (mut states, mut n, mut cases) = (0, 0, Cases::default());
    for at in (1 + turn() % every..=count).step_by(every) {
        let losses = [Loss::Strict, Loss::Drawn(at as u64), Loss::Zeros];
        let losses = if every == 1 { &losses[..] } else { &losses[n % 3..][..1] };
        n += 1;
        round.prepare();
        let mut disk = round.disk();
        let (out, done) = round.failing(Fault::Sync(EIO), at);
        let Some(lost) = done.iter().find(|o| o.failed) else {
            // The curves are drawn less often on a slow machine: there is no sync of this number.
            continue;
        };
        done.iter().for_each(|o| disk.apply(o));
        cases.check(&format!("{name}: sync {at} of {count}"), || {
            expected::assert_expected(&done, &out, None);
        });
        for loss in losses {
            round.clear();
            disk.leave(*loss, round.bench.dir.path());
            let what = format!("{name}: {loss:?} after sync {at} of {count} failed ({lost})");
            let unmarked = round.unmarked();
            // The mark is removed before the sync that fails.
            let is_drawn = matches!(loss, Loss::Drawn(_));
            let named = |name: &str, text: &str| is_drawn && is_named(&unmarked, name, text);
            cases.check(&what, || {
                round.finish_but(&what, &named);
                if expected::may_lose_lines(&done, &out) {
                    // The lines of that log are lost.
                    assert_same_final(&round.bench, "whole", "run");
                } else {
                    assert_same(&round.bench, "whole", "run");
                }
                let (resumed, saved) = (round.went_on_from(), acknowledged(&done));
                assert!(
                    resumed >= saved,
                    "{what}: step {saved} was saved, resumed from {resumed}"
                );
            });
            states += 1;
        }
    }
    cases.assert_none();
    println!("{name}: {states} losses of power after a failed sync, {count} syncs");
    states
}
