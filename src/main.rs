//! Parses the arguments, runs, returns the exit code: all of it is in `ft::cli`.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ft::base::worker;
use std::path::PathBuf;

#[global_allocator]
static HEAP: ft::base::allocator::CachingAllocator = ft::base::allocator::CachingAllocator;

fn main() {
    // First of all, before there are threads or large allocations.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|first| first == worker::ARGUMENT)
    {
        std::process::exit(ft::formats::template::serve());
    }
    // SAFETY: the only thread; nothing has read a variable yet.
    unsafe { worker::hide_secrets() };
    worker::set_program(worker::WorkerCommand {
        path: own_path(),
        variables: ["TZ", "LD_LIBRARY_PATH"]
            .into_iter()
            .filter_map(|name| Some((name.into(), std::env::var_os(name)?)))
            .collect(),
        silence: worker::SILENCE,
    });
    std::process::exit(ft::cli::start(std::env::args_os()));
}

/// Path of this program; valid also after its file was replaced.
fn own_path() -> PathBuf {
    if cfg!(target_os = "linux") {
        "/proc/self/exe".into()
    } else {
        std::env::current_exe().unwrap_or_default()
    }
}
