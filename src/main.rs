//! Parse, run, exit code: all of it is in `ft::cli`.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[global_allocator]
static HEAP: ft::base::heap::Heap = ft::base::heap::Heap;

fn main() {
    std::process::exit(ft::cli::start(std::env::args_os()));
}
