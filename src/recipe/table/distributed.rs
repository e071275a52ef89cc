//! Training on several ranks: processes that share the micro-batches of a step.

use super::*;
use crate::engine::Exchange;
use std::time::Duration;

named!(
    /// Where the weights are.
    RankWeights {
        Auto = "auto",
        Replicated = "replicated",
        Sharded = "sharded",
        ShardedInNode = "sharded-in-node",
        Host = "host",
    }
);

named!(
    /// How the gradients of the ranks are added.
    RankSum {
        Auto = "auto",
        Ordered = "ordered",
        Window = "window",
    }
);

named!(
    /// The numbers of a gradient that travel.
    RankReduce {
        F32 = "f32",
        Bf16 = "bf16",
    }
);

named!(
    /// The form of a checkpoint.
    RankCheckpoint {
        Auto = "auto",
        One = "one",
        Parts = "parts",
    }
);

section! {
    /// Training on several ranks (`mpirun -n 4 ft train ...`). On one rank these keys have no effect.
    pub struct Distributed in "distributed" {
        /// Where the weights are. `replicated`: all on every rank. `sharded`: each rank has a part of every matrix of the
        /// layers, and a layer is collected from all ranks before it is used. Not available yet: `sharded-in-node`, `host`.
        weights: RankWeights = "auto", "replicated if it fits, else sharded";
        /// How gradients are added. `ordered`: in the order of the micro-batches, which gives the bits of one rank on a
        /// CPU. `window`: each rank adds its own ones first, so they travel once in a step; it has whole gradients then, and
        /// the last bits depend on the number of ranks.
        sum: RankSum = "auto", "ordered";
        /// The type in which a gradient travels; it is added in f32. `bf16`: half the bytes, and the same bits on any number
        /// of ranks from 2 on.
        reduce: RankReduce = "f32", "the bits of one rank";
        /// Ranks that share one micro-batch. Not available yet: more than 1.
        sequence: usize = 1, "each micro-batch is computed by one rank", in from(1);
        /// Seconds that a rank waits for the numbers of another one in a step before it ends the job.
        timeout: usize = 600, "longer than a step", in between(1, 1_000_000);
        /// The form of a checkpoint: `one`, written by rank 0, the same files on any number of ranks. Not available yet:
        /// `parts`.
        checkpoint: RankCheckpoint = "auto", "one";
    }
}

impl Distributed {
    /// How the ranks add gradients.
    pub fn exchange(&self) -> Exchange {
        Exchange {
            bf16: self.reduce == RankReduce::Bf16,
            window: self.sum == RankSum::Window,
        }
    }

    /// `timeout` as a duration.
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout as u64)
    }
}

/// Values that are not implemented yet.
pub(super) fn check(s: &Settings, faults: &mut Faults) {
    type Keys = Distributed;
    let d = &s.distributed;
    let mut refuse = |key: KeyPath, value: String, use_instead: &str| {
        faults.add(
            &[key],
            Error::usage(format!("`{key}` has a value that is not available yet"))
                .found(value)
                .expected(use_instead),
        );
    };
    if matches!(d.weights, RankWeights::ShardedInNode | RankWeights::Host) {
        refuse(Keys::weights, d.weights.name().into(), "`replicated` or `sharded`");
    }
    if d.sequence != 1 {
        refuse(Keys::sequence, d.sequence.to_string(), "1");
    }
    if d.checkpoint == RankCheckpoint::Parts {
        refuse(Keys::checkpoint, d.checkpoint.name().into(), "`one`");
    }
}
