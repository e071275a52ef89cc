//! Parse, run, exit code: all of it is in `ft::cli`.

fn main() {
    std::process::exit(ft::cli::start(std::env::args_os()));
}
