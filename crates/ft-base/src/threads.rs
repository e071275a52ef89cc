//! The compute threads of a process: rayon's global pool, of which the main thread is one.

use crate::{Error, Result};
use rayon::ThreadPoolBuilder;

/// Starts `count` compute threads (0: one for each processor, or `RAYON_NUM_THREADS`). The calling thread is one of them: a
/// parallel loop that it starts costs no switch to another thread and back. A step of a small model has hundreds of such loops.
///
/// A program may call it once, before any parallel loop, from a thread that lives as long as the program: with a `count` of 1 loops of
/// other threads wait until this one runs a loop too (see `background`). Without it all compute threads are rayon's own.
///
/// # Errors
/// The pool exists already, or the system refuses a thread.
pub fn start(count: usize) -> Result<()> {
    ThreadPoolBuilder::new()
        .num_threads(count)
        .use_current_thread()
        .build_global()
        .map_err(|e| {
            Error::new("cannot start the compute threads")
                .cause(e)
                .hint("pass a smaller number with --threads, or raise the limit of processes (`ulimit -u`)")
        })
}

/// Runs the work of a background thread. If the main thread is the only compute thread, it may wait for this work and
/// would never run the parallel loops in it: then they run on this thread itself.
pub fn background<R>(work: impl FnOnce() -> R) -> R {
    let alone = rayon::current_thread_index().is_none() && rayon::current_num_threads() == 1;
    // From now on loops of this thread run on it alone.
    let _own = alone.then(|| ThreadPoolBuilder::new().num_threads(1).use_current_thread().build());
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    /// This test has the process's pool for itself: no other test of this crate starts a parallel loop.
    #[test]
    fn a_background_thread_works_while_the_only_compute_thread_waits_for_it() {
        start(1).unwrap();
        assert_eq!(rayon::current_thread_index(), Some(0));
        let sum = || background(|| (0..1000u64).into_par_iter().sum::<u64>());
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || send.send((sum(), sum())));
        let waited = receive.recv_timeout(std::time::Duration::from_secs(60));
        assert_eq!(waited.unwrap(), (499_500, 499_500));
        assert!(
            start(1)
                .unwrap_err()
                .to_string()
                .contains("cannot start the compute threads")
        );
    }
}
