//! Runs of `ft train` on several ranks, with a real MPI: the bits of one rank, resumed runs, and failures.

#[path = "../run/bench.rs"]
mod bench;
#[path = "../run/same.rs"]
mod same;

mod faults;
mod job;
mod same_bits;
