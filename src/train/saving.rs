//! Saves the state of a run between two steps: by rank 0, or in parts by all ranks.

use crate::base::{Error, Result, aborted, progress};
use crate::checkpoint;
use crate::engine::Engine;
use crate::recipe;
use crate::train::running::TrainingRun;
use crate::train::state;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The least time from a save for which the disk had no room to the next try.
const RETRY: Duration = Duration::from_secs(60);
/// What the system says of a full disk and of a quota that is used up: ENOSPC and EDQUOT.
const FULL: [&str; 2] = if cfg!(target_os = "macos") {
    ["(os error 28)", "(os error 69)"]
} else {
    ["(os error 28)", "(os error 122)"]
};

/// A save for which the disk had no room.
#[derive(Debug, Clone, Copy)]
pub struct RefusedSave {
    end: Instant,
    time: Duration,
}

impl RefusedSave {
    /// The time until the next try: the tries take less than a tenth of the time of the run.
    fn pause(&self) -> Duration {
        RETRY.max(10 * self.time)
    }

    /// True if the next try is due.
    fn is_due(&self, now: Instant) -> bool {
        now.duration_since(self.end) >= self.pause()
    }
}

/// Why a state is saved between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveReason {
    /// The recipe says so.
    Due,
    /// The disk had no room for an earlier one.
    Again,
    /// As `Due`, after the last step: only `final/` follows.
    Last,
}

/// True if this error is the lack of space on a disk, which another user of the disk may end.
fn is_full(e: &Error) -> bool {
    let text = e.to_string();
    e.what() == "not enough disk space" || FULL.iter().any(|number| text.contains(number))
}

impl TrainingRun<'_> {
    /// Saves the state after `step`. All ranks call it.
    pub fn save(&mut self, engine: &Engine, step: u64) -> Result<()> {
        self.save_here(engine, step)?;
        self.ranks.meet()
    }

    /// True if a save for which the disk had no room should be tried again after this step.
    pub fn retries_save(&self) -> bool {
        self.pace.refused.is_some_and(|refused| refused.is_due(Instant::now()))
    }

    /// As `save`. On one rank a full disk is no error: returns what the system said, if the state is not saved.
    fn save_unless_full(&mut self, engine: &Engine, step: u64) -> Result<Option<String>> {
        let e = match self.save(engine, step) {
            Err(e) if !self.ranks.several() && is_full(&e) => e,
            saved => return saved.map(|()| None),
        };
        let e = recipe::in_program_terms(&e.to_string());
        if self.pace.saved != step {
            return Ok(Some(e));
        }
        // With no space some file systems do not remove files. The next save tries it again.
        self.reporter
            .warn(&format!("an older checkpoint could not be removed: {e}"));
        Ok(None)
    }

    /// As `save`, after a step. On one rank a full disk is a warning: the run goes on, and a later save contains this step too; after
    /// the last one `final/` is written.
    pub fn save_if_disk_has_room(&mut self, engine: &Engine, step: u64, reason: SaveReason) -> Result<()> {
        let begun = Instant::now();
        let Some(e) = self.save_unless_full(engine, step)? else {
            return Ok(());
        };
        let is_first = self.pace.refused.is_none();
        self.pace.refused = Some(RefusedSave {
            end: Instant::now(),
            time: begun.elapsed(),
        });
        let next = match reason {
            SaveReason::Last => "It was the last one, and `final/` is written next",
            // Tries between the saves that are due would give the same warning every minute.
            SaveReason::Again if !is_first => return Ok(()),
            SaveReason::Due | SaveReason::Again => "The run goes on, and tries again later",
        };
        self.reporter.warn(&format!(
            "the disk is full: the state after step {step} is not saved. {next}: {e}"
        ));
        Ok(())
    }

    /// Saves the state after `step` if its evaluation is the best one and the checkpoint will be needed. On one rank a full disk is a
    /// warning: the best evaluation before it, whose checkpoint stays, is again the one for `final/`.
    pub fn keep_best(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let best = self.best.step() == Some(step) && self.pace.saved != step;
        if !self.ranks.of_root(best)? {
            return Ok(());
        }
        if let Some(e) = self.save_unless_full(engine, step)? {
            let lost = self.best.lose(step);
            self.reporter.warn(&format!("the disk is full: {lost}: {e}"));
        }
        Ok(())
    }

    /// True if each rank writes a part of a checkpoint.
    pub(super) fn writes_parts(&self) -> bool {
        self.recipe.distributed.writes_parts(self.ranks.size())
    }

    /// As `save`, but rank 0 does not wait for the others at the end. All ranks call it, because each may have a part of the
    /// state.
    pub(super) fn save_here(&mut self, engine: &Engine, step: u64) -> Result<()> {
        if self.writes_parts() {
            if self.ranks.is_root() {
                self.write(engine, step)?;
            } else {
                self.write_state(engine, step)?;
                self.pace.saved = step;
            }
            // Rank 0 has given the checkpoint its name.
            return self.ranks.meet();
        }
        if engine.by_root(|| self.write(engine, step))?.is_none() {
            self.pace.saved = step;
        }
        Ok(())
    }

    /// Writes the state, or the part of it that this rank writes.
    fn write_state(&mut self, engine: &Engine, step: u64) -> Result<PathBuf> {
        state::save(
            self.run_dir,
            step,
            engine,
            self.schedule,
            (&self.fingerprint, self.best.saved(step)),
            self.batches.state(step)?,
            self.writes_parts().then_some(&*self.ranks.0),
        )
    }

    /// The work of rank 0.
    fn write(&mut self, engine: &Engine, step: u64) -> Result<()> {
        self.directory.check(&mut self.reporter)?;
        self.directory.touch();
        let begun = Instant::now();
        let _phase = progress::phase(format!("saving step {step}"), 0, "");
        // The log lines up to this step must be on the disk before the state is.
        self.reporter.sync();
        let path = match self.write_state(engine, step) {
            Ok(path) => path,
            // If the directory was removed in the meantime, that is the reason to report.
            Err(e) => return Err(self.directory.check(&mut self.reporter).err().unwrap_or(e)),
        };
        self.pace.saved = step;
        aborted::keep(step);
        self.best.set_saved(step);
        if self.pace.refused.take().is_some() {
            self.reporter.note(&format!(
                "the disk has room again: the state after step {step} is saved"
            ));
        }
        let rotated = checkpoint::rotate(self.run_dir, self.recipe.train.save_total_limit, self.best.step())?;
        self.directory.keeps(&rotated.kept, &mut self.reporter);
        self.draw(false);
        self.pace.save = Some(begun.elapsed());
        self.reporter
            .event("save", json!({"step": step, "checkpoint": path.display().to_string()}));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::files;

    #[test]
    fn only_the_lack_of_space_is_a_full_disk() {
        let of = |number| Error::io("cannot write the file").cause(std::io::Error::from_raw_os_error(number));
        let quota = if cfg!(target_os = "macos") { 69 } else { 122 };
        assert!(is_full(&of(28)) && is_full(&of(quota)));
        // An input/output error, a read-only file system, a limit on the size of a file.
        for number in [5, 30, 27] {
            assert!(!is_full(&of(number)), "{number}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(files::free_space(dir.path()).is_some());
        assert!(is_full(&checkpoint::check_space(dir.path(), u64::MAX).unwrap_err()));
    }

    #[test]
    fn a_refused_save_is_tried_again_after_a_minute_or_ten_times_its_duration() {
        let end = Instant::now();
        for (took, pause) in [(0, 60), (6, 60), (7, 70), (60, 600)] {
            let refused = RefusedSave {
                end,
                time: Duration::from_secs(took),
            };
            let due = end + Duration::from_secs(pause);
            assert!(
                !refused.is_due(end) && !refused.is_due(due - Duration::from_millis(1)),
                "{took} s"
            );
            assert!(
                refused.is_due(due) && refused.is_due(due + Duration::from_secs(3600)),
                "{took} s"
            );
        }
    }
}
