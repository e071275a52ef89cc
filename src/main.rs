//! Parse, run, exit code: all of it is in `ft::cli`.

#[global_allocator]
static HEAP: ft::base::heap::Heap = ft::base::heap::Heap;

fn main() {
    std::process::exit(ft::cli::start(std::env::args_os()));
}
