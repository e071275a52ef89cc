//! Training on several ranks: processes that share the micro-batches of a step.

use super::*;
use crate::engine::{GradientExchange, OuterConfig};
use crate::model::{SequenceBy, SequenceConfig};
use std::time::Duration;

named!(
    /// Where the weights are.
    RankWeights {
        Auto = "auto",
        Replicated = "replicated",
        Sharded = "sharded",
        ShardedInNode = "sharded-in-node",
        Host = "host",
        ExpertParallel = "expert-parallel",
    }
);

named!(
    /// How attention reads the tokens of other ranks.
    RankSequence {
        Auto = "auto",
        Ulysses = "ulysses",
        Gather = "gather",
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
    /// Training on several ranks, which are processes (`ft launch -n 4 train ...`, or `mpirun`). On one rank these keys
    /// have no effect, except for `sum` on a GPU.
    pub struct DistributedSection in "distributed" {
        /// Where the weights are. `replicated`: all on every rank. `sharded`: each rank has a part of every matrix of the
        /// layers, and a layer is collected from all ranks before it is used. `expert-parallel`: each rank has some of the routed
        /// experts and all other weights, and the hidden states of the tokens travel to the experts. `sharded-in-node`: as `sharded`,
        /// but all ranks of a machine together have all weights, and a layer is collected from them. `host`: the ranks of a machine
        /// read frozen weights from the same files (`memory.tier = "disk"`), which are in its memory once.
        weights: RankWeights = "auto", "replicated if it fits or on GPUs, else sharded", resume FREE;
        /// How gradients are added. `ordered`: in the order of the micro-batches, which gives the result of one rank, bit for bit. On one GPU
        /// `auto` lets a product add to the sum, which is faster and rounds differently: write `ordered` there for the result of
        /// several GPUs, bit for bit. `window`: each rank adds its own ones first, so they travel once in a step; it has whole gradients then, and
        /// the last bits depend on the number of ranks.
        sum: RankSum = "auto", "ordered on several ranks", resume FREE;
        /// The type in which a gradient travels; it is added in f32. `bf16`: half the bytes, and the same bits on any number
        /// of ranks from 2 on.
        reduce: RankReduce = "f32", "bit-identical to one rank", resume FREE;
        /// Ranks that share the tokens of one micro-batch, for long contexts. They divide the number of ranks.
        sequence: usize = 1, "each micro-batch is computed by one rank", in from(1), resume FREE;
        /// How attention reads the tokens of other ranks. `ulysses`: each rank gets all tokens of a part of the heads. `gather`:
        /// each rank gets the keys and values of the tokens before its own ones.
        sequence_by: RankSequence = "auto", "ulysses if the heads can be divided, else gather", resume FREE;
        /// Seconds that a rank waits for the numbers of another one in a step before it ends the job; also for the end of one
        /// operation of the disk in a save or while weights are read, and for a heartbeat of a rank that works alone.
        timeout: usize = 600, "longer than a step", in between(1, 1_000_000), resume FREE;
        /// The form of a checkpoint. `one`: written by rank 0, the same files on any number of ranks. `parts`: each rank writes a part
        /// of the weights and of the optimizer states into files of its own, which needs a file system that all ranks share; on one
        /// rank as `one`. Both resume on any number of ranks.
        checkpoint: RankCheckpoint = "auto", "one", resume FREE;
        /// Steps that each rank trains alone before the weights of all ranks are averaged (DiLoCo); 0: gradients travel in each
        /// step. Checkpoints and evaluations are made after an average.
        sync_every: usize = 0, "the result of one rank", in from(0);
        /// Learning rate of the outer optimizer, SGD on the difference between the last average and the new one. 1 without
        /// momentum is the plain average (FedAvg).
        outer_learning_rate: f64 = 0.7, "as in the paper", in POSITIVE;
        /// Momentum of the outer optimizer.
        outer_momentum: f64 = 0.9, "as in the paper", in BELOW_ONE;
        /// Nesterov's form of the momentum.
        outer_nesterov: bool = true, "as in the paper";
        /// Factor mu of the proximal term mu/2 · |w - w at the last average|² in the loss of each rank (FedProx).
        proximal: f64 = 0.0, "no proximal term", in POSITIVE_OR_ZERO;
    }
}

impl DistributedSection {
    /// True if the ranks of a machine read the frozen weights from the same files.
    pub fn shares_files(&self) -> bool {
        self.weights == RankWeights::Host
    }

    /// How the ranks add gradients.
    pub fn exchange(&self) -> GradientExchange {
        GradientExchange {
            ordered: self.sum == RankSum::Ordered,
            bf16: self.reduce == RankReduce::Bf16,
            window: self.sum == RankSum::Window,
        }
    }

    /// How ranks that train alone are averaged in a run of `last` steps; `None`: no averages are computed.
    pub fn outer(&self, ranks: usize, last: u64) -> Option<OuterConfig> {
        (ranks > 1 && self.sync_every > 0).then_some(OuterConfig {
            every: self.sync_every as u64,
            last,
            learning_rate: self.outer_learning_rate,
            momentum: self.outer_momentum,
            nesterov: self.outer_nesterov,
            proximal: self.proximal,
        })
    }

    /// How `ranks` ranks share micro-batches.
    pub fn shared(&self, ranks: usize) -> SequenceConfig {
        SequenceConfig {
            ranks: if ranks > 1 { self.sequence } else { 1 },
            by: match self.sequence_by {
                RankSequence::Auto => SequenceBy::Auto,
                RankSequence::Ulysses => SequenceBy::Heads,
                RankSequence::Gather => SequenceBy::Keys,
            },
        }
    }

    /// True if each of `ranks` ranks writes a part of a checkpoint.
    pub fn writes_parts(&self, ranks: usize) -> bool {
        ranks > 1 && self.checkpoint == RankCheckpoint::Parts
    }

    /// `timeout` as a duration.
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout as u64)
    }
}

/// Contradictions of `sync_every`: what would differ between the ranks, or would need their gradients.
fn check_apart(s: &RecipeSections, faults: &mut KeyFaults) {
    type Keys = DistributedSection;
    let every = s.distributed.sync_every;
    let mut fault = |key: KeyPath, found: String, expected: String| {
        faults.add(
            &[Keys::sync_every, key],
            Error::usage(format!("`{}` and `{key}` contradict each other", Keys::sync_every))
                .found(found)
                .expected(expected),
        );
    };
    for (key, steps) in [
        (Train::save_steps, s.train.save_steps),
        (Train::eval_steps, s.train.eval_steps),
    ] {
        if !steps.is_multiple_of(every) {
            fault(
                key,
                steps.to_string(),
                format!("a multiple of {every}: the ranks have the same weights then"),
            );
        }
    }
    let d = &s.distributed;
    if matches!(
        d.weights,
        RankWeights::Sharded | RankWeights::ShardedInNode | RankWeights::Host | RankWeights::ExpertParallel
    ) {
        fault(
            Keys::weights,
            d.weights.name().into(),
            "`replicated`: each rank changes all of its weights".into(),
        );
    }
    if d.sequence > 1 {
        fault(
            Keys::sequence,
            d.sequence.to_string(),
            "1: ranks that share a micro-batch need the same weights".into(),
        );
    }
    if d.sum == RankSum::Window {
        fault(Keys::sum, d.sum.name().into(), "`auto`: no gradients travel".into());
    }
    if d.reduce == RankReduce::Bf16 {
        fault(
            Keys::reduce,
            d.reduce.name().into(),
            "`f32`: weights travel, not gradients".into(),
        );
    }
    if s.train.stage.is_rl() {
        fault(
            Train::stage,
            s.train.stage.name().into(),
            "a stage without rollouts: rank 0 makes them".into(),
        );
    }
    if s.train.stage == Stage::Distill && s.distill.lmbda > 0.0 {
        fault(
            DistillSection::lmbda,
            s.distill.lmbda.to_string(),
            "0: each rank would answer with weights of its own".into(),
        );
    }
    if s.model.dtype.needs_loss_scale() {
        fault(
            Model::dtype,
            s.model.dtype.name().into(),
            "`f32` or `bf16`: each rank would skip other steps".into(),
        );
    }
    let (tune, block) = (&s.tune, &s.tune.block);
    if tune.method == Method::Lora && tune.lora.peft_type == PeftType::Adalora {
        fault(
            LoraKeys::peft_type,
            "adalora".into(),
            "fixed ranks: those of AdaLoRA follow from all gradients".into(),
        );
    }
    if tune.method == Method::Block {
        if let Some(steps) = block.switch_every.filter(|steps| !steps.is_multiple_of(every)) {
            fault(
                BlockKeys::switch_every,
                steps.to_string(),
                format!("a multiple of {every}: a block ends with an average"),
            );
        }
        if matches!(block.correction, Correction::Sgd | Correction::Signsgd) {
            fault(
                BlockKeys::correction,
                block.correction.name().into(),
                "`none` or `lora`".into(),
            );
        }
        if block.partition == Partition::Ratio {
            fault(
                BlockKeys::partition,
                block.partition.name().into(),
                "a partition into whole parameters".into(),
            );
        }
    }
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    type Keys = DistributedSection;
    let outer = [
        Keys::outer_learning_rate,
        Keys::outer_momentum,
        Keys::outer_nesterov,
        Keys::proximal,
    ];
    if outer.contains(&key) && s.distributed.sync_every == 0 {
        return Some("distributed.sync_every = 0".into());
    }
    if key == Keys::sequence_by && s.distributed.sequence == 1 {
        return Some("distributed.sequence = 1".into());
    }
    (key == Keys::outer_nesterov && s.distributed.outer_momentum == 0.0)
        .then(|| "distributed.outer_momentum = 0".into())
}

/// Contradictions between keys.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    type Keys = DistributedSection;
    let d = &s.distributed;
    if d.sync_every > 0 {
        check_apart(s, faults);
    }
    if d.sequence > 1 && !matches!(s.train.stage, Stage::Sft | Stage::Pretrain) {
        faults.add(
            &[Keys::sequence, Train::stage],
            Error::usage(format!(
                "`{}` and `{}` contradict each other",
                Keys::sequence,
                Train::stage
            ))
            .found(s.train.stage.name())
            .expected("`sft` or `pretrain`: other losses read whole documents, which ranks share"),
        );
    }
    if d.weights == RankWeights::ExpertParallel && d.sequence > 1 {
        faults.add(
            &[Keys::weights, Keys::sequence],
            Error::usage(format!(
                "`{}` and `{}` contradict each other",
                Keys::weights,
                Keys::sequence
            ))
            .found(d.sequence.to_string())
            .expected("1: the experts of a rank compute whole micro-batches"),
        );
    }
}
