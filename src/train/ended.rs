//! How a run ends when a file cannot be written, or when a GPU fails.

use crate::base::paths::shell_word;
use crate::base::{Error, ErrorKind, Result};
use crate::engine::Engine;
use crate::recipe::{self, DeviceRef, LoadedRecipe};
use crate::train::program::{self, TrainOptions, TrainOutcome};
use crate::train::running::TrainingRun;
use crate::{checkpoint, ops};
use serde_json::json;
use std::path::Path;

/// Runs a recipe.
///
/// Errors: any invalid input (before the first step), a loss or gradient that is not finite, a full disk, a device that fails;
/// a signal after the state was saved (exit code 128 + signal).
pub fn train(loaded: &LoadedRecipe, options: &TrainOptions) -> Result<TrainOutcome> {
    program::train(loaded, options).map_err(|e| {
        if is_of_driver(&e) {
            let recipe = &loaded.recipe;
            device_failed(Path::new(&recipe.train.output_dir), &recipe.model.device, e)
        } else {
            e
        }
    })
}

/// The driver of a GPU, or one of its libraries, answered with an error that is not a lack of memory.
fn is_of_driver(e: &Error) -> bool {
    let text = e.to_string();
    e.kind() == ErrorKind::Failed
        && e.hint_text().is_none()
        && ["CUDA_ERROR_", "CUBLAS_STATUS_"].iter().any(|mark| text.contains(mark))
}

/// Such an error with the device and the checkpoint from which the run goes on.
fn device_failed(run_dir: &Path, device: &DeviceRef, e: Error) -> Error {
    // A driver that is gone does not answer.
    let gpus = ops::device::gpus().unwrap_or_default();
    let gpu = gpus.get(device.ordinal().unwrap_or(0));
    let place = gpu.map_or(device.to_string(), |gpu| format!("{device}, {}", gpu.name));
    let newest = checkpoint::list(run_dir).unwrap_or_default().pop();
    let next = match newest {
        Some((step, _)) => format!(
            "`ft train {} --resume` continues after step {step}",
            shell_word(&run_dir.join("recipe.toml").display().to_string())
        ),
        None => "no state was saved: start the run again with `--overwrite`".into(),
    };
    Error::new("the GPU failed").at(place).cause(e).hint(format!(
        "{next}; if it fails again, `nvidia-smi` and `dmesg` (lines with Xid) show the messages of the driver"
    ))
}

/// What a step had done when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedStep {
    /// Its micro-batches could not be made: no weight has changed.
    BeforeThePass,
    /// `of_all_ranks`: all ranks have the error, at the same place (`Engine::is_of_all_ranks`).
    InThePass { of_all_ranks: bool },
}

impl TrainingRun<'_> {
    /// Records why the run ends after `step`. Returns the error.
    pub fn ended(&mut self, step: u64, e: Error) -> Error {
        self.reporter.event("stop", json!({"step": step, "reason": e.what()}));
        self.reporter.finish();
        e
    }

    /// `final/` could not be written: saves the state after the last `step`, if no checkpoint has it, so that a resume
    /// writes `final/` without training. Returns the error with this hint. Of several ranks, rank 0 sends to the others that
    /// it failed: they wait for that, and take part in the save.
    pub fn export_failed(&mut self, engine: &Engine, step: u64, e: Error) -> Error {
        let can_save = !self.ranks.several() || self.ranks.is_root() && self.ranks.export_failed_at_root(true).is_ok();
        if !can_save {
            return self.ended(step, e);
        }
        self.ended_after(engine, step, e, "`--resume` writes `final/`")
    }

    /// An evaluation after `step`, or samples, could not be made: as `export_failed`. A resume makes up for them.
    pub fn evaluation_failed(&mut self, engine: &Engine, step: u64, e: Error) -> Error {
        if step == 0 {
            return e;
        }
        // Nothing can be read from a device that is gone.
        if is_of_driver(&e) {
            return self.ended(step, e);
        }
        // The state of several ranks is in parts, and the others do not know of the error.
        if self.ranks.several() {
            return self.ended(step, e);
        }
        self.ended_after(engine, step, e, "`--resume` goes on with the evaluation")
    }

    fn ended_after(&mut self, engine: &Engine, step: u64, e: Error, then: &str) -> Error {
        // Without its averages the engine may have them in the place of weights: they could not be exchanged.
        let is_exchanged = self.recipe.train.ema().is_some() && engine.ema.is_none();
        if is_exchanged {
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
                e.hint(format!("{first}the state after step {step} is saved: {then}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Row S6.
    #[test]
    fn only_errors_of_a_driver_are_those_of_the_device() {
        let of = |text: &str| -> Error { candle_core::Error::Msg(text.into()).into() };
        let lost = "DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal memory access was encountered\")";
        assert!(is_of_driver(&of(lost)));
        assert!(!is_of_driver(&of(
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")"
        )));
        assert!(!is_of_driver(&of("no")));
        // It says already what can be done.
        assert!(!is_of_driver(&of(lost).hint("install a newer driver")));
        let dir = tempfile::tempdir().unwrap();
        let said = device_failed(dir.path(), &DeviceRef::Gpu(Some(0)), of(lost)).to_string();
        assert!(
            said.starts_with("the GPU failed\n  --> cuda:0")
                && said.contains("ILLEGAL_ADDRESS")
                && said.contains("--overwrite"),
            "{said}"
        );
    }
}
