//! Saves the state of a run between two steps: by rank 0, or in parts by all ranks.

use crate::base::{Result, progress};
use crate::checkpoint;
use crate::engine::Engine;
use crate::train::running::TrainingRun;
use crate::train::state;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

impl TrainingRun<'_> {
    /// Saves the state after `step`. All ranks call it.
    pub fn save(&mut self, engine: &Engine, step: u64) -> Result<()> {
        self.save_here(engine, step)?;
        self.ranks.meet()
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
            &self.fingerprint,
            self.batches.state(step)?,
            self.writes_parts().then_some(&*self.ranks.0),
        )
    }

    /// The work of rank 0.
    fn write(&mut self, engine: &Engine, step: u64) -> Result<()> {
        self.directory.check()?;
        let begun = Instant::now();
        let _phase = progress::phase(format!("saving step {step}"), 0, "");
        // The log lines up to this step must be on the disk before the state is.
        self.reporter.sync();
        let path = match self.write_state(engine, step) {
            Ok(path) => path,
            // If the directory was removed in the meantime, that is the reason to report.
            Err(e) => return Err(self.directory.check().err().unwrap_or(e)),
        };
        let rotated = checkpoint::rotate(self.run_dir, self.recipe.train.save_total_limit, self.best.step())?;
        self.directory.keeps(&rotated.kept, &mut self.reporter);
        self.draw(false);
        (self.pace.saved, self.pace.save) = (step, Some(begun.elapsed()));
        self.reporter
            .event("save", json!({"step": step, "checkpoint": path.display().to_string()}));
        Ok(())
    }
}
