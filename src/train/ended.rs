//! How a run ends when a file cannot be written.

use crate::base::Error;
use crate::engine::Engine;
use crate::recipe;
use crate::train::running::Run;
use serde_json::json;

impl Run<'_> {
    /// Records why the run ends after `step`. Returns the error.
    pub fn ended(&mut self, step: u64, e: Error) -> Error {
        self.reporter.event("stop", json!({"step": step, "reason": e.what()}));
        self.reporter.finish();
        e
    }

    /// `final/` could not be written: saves the state after the last `step`, if no checkpoint has it, so that a resume
    /// writes `final/` without training. Returns the error with this hint.
    pub fn export_failed(&mut self, engine: &Engine, step: u64, e: Error) -> Error {
        // The state of several ranks is in parts, and the others do not know of the error.
        if self.ranks.several() {
            return self.ended(step, e);
        }
        let saved = if self.pace.saved == step {
            Ok(())
        } else {
            self.save_here(engine, step)
        };
        let e = match saved {
            Ok(()) => {
                let first = e.hint_text().map_or(String::new(), |hint| format!("{hint}; "));
                e.hint(format!(
                    "{first}the state after step {step} is saved: `--resume` writes `final/`"
                ))
            }
            Err(save) => {
                let save = recipe::in_program_terms(&save.to_string());
                self.reporter
                    .warn(&format!("the state after the last step could not be saved: {save}"));
                e
            }
        };
        self.ended(step, e)
    }
}
