//! What a run of one process says when it is aborted, because the system refuses memory or for another reason: where it goes on, and
//! what to set. The ranks of a job have other messages, with the name of the rank.

use crate::base::Result;
use crate::base::aborted::{self, AbortMessage, ResumeMessage};
use crate::checkpoint;
use crate::train::directory::is_within;
use crate::train::{Resume, TrainOptions};
use std::path::Path;

/// Prepares the message, before anything large is allocated.
///
/// Errors: the system refuses a handler.
pub fn prepare(run_dir: &Path, options: &TrainOptions) -> Result<()> {
    // Steps that are only measured have no state.
    if options.ranks.several() || options.dry_run || options.only_steps {
        return Ok(());
    }
    // From a checkpoint of another run a later `--resume` goes on only when this directory says so.
    let is_own = match &options.resume {
        Resume::No => false,
        Resume::Newest => true,
        Resume::From(from) => is_within(from, run_dir),
    };
    // It is verified later; `aborted::keep` says then from which one the run really goes on.
    let newest = checkpoint::list(run_dir).ok().and_then(|mut all| all.pop());
    if let Some((step, _)) = newest.filter(|_| is_own) {
        aborted::keep(step);
    }
    aborted::say_if_aborted(AbortMessage {
        out_of_memory: [
            "error: out of memory: the system refused ".into(),
            " bytes; ".into(),
        ],
        other: "error: this process was aborted; ".into(),
        kept: Some(ResumeMessage {
            unchanged: "the run has not begun\n".into(),
            nothing: "no state was saved: `--resume` starts the run again\n".into(),
            until: ["`--resume` continues from checkpoint-".into(), "\n".into()],
        }),
        hint: "hint: add `memory.budget=SIZE` to the command, with the memory that is free for this process; or start a new run with a \
               smaller `train.batch_size`\n"
            .into(),
    })
}
