//! Runs of `ft train` on several ranks, with a real MPI: the bits of one rank, resumed runs, and failures.

#[path = "../run/bench.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod bench;
#[path = "../run/disk.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod disk;
#[path = "../run/same.rs"]
mod same;

mod broken;
mod bytes;
mod experts;
mod faults;
mod hangs;
#[cfg(feature = "cuda")]
mod gpus;
mod host;
mod job;
mod kills;
mod machines;
mod memory;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "nccl")]
mod nccl_faults;
mod outer;
mod parts;
mod same_bits;
mod seconds;
mod sequence;
