//! The inputs of a forecast.

use super::gpu_time::{GPUS, GpuRates};
use super::{AdapterCosts, CODE, ProcessState};
use crate::engine::StepStrategy;
use crate::model::SequenceConfig;
use crate::recipe::{RankWeights, Recipe};
use crate::setup::ActivePeriod;
use crate::setup::rewards::RewardModelSpec;
use crate::setup::row_sizes::EvaluationSize;
use crate::setup::teacher::TeacherSpec;
use std::sync::Arc;

/// Memory of the reference of an RL stage.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReferenceMemory {
    /// Bytes of its own weights and adapters.
    pub held: u64,
    /// Bytes of the largest weight as it is read, until it is quantized.
    pub read: u64,
}

/// The inputs of a plan in addition to model and recipe.
#[derive(Debug, Clone)]
pub struct PlanInputs {
    /// Tokens of the largest micro-batch.
    pub batch_tokens: usize,
    /// N: tokens of a micro-batch on one rank: `batch_tokens`, divided if ranks share it.
    pub tokens: usize,
    /// Tokens of the longest document in it.
    pub longest: usize,
    /// Fewest documents in a micro-batch.
    pub documents: usize,
    /// Micro-batches of an optimizer step.
    pub micro_batches: usize,
    /// The evaluation between the steps.
    pub evaluation: EvaluationSize,
    pub strategy: StepStrategy,
    pub threads: usize,
    /// Bytes of an element of an activation: 4 on the CPU, as the weights on a GPU.
    pub element: u64,
    /// Tensors are on a GPU; the program, its rows and inactive masters are on the host.
    pub on_gpu: bool,
    /// The speed of this GPU.
    pub gpu_rates: &'static GpuRates,
    /// Every set of parameters that is active at one time, with the elements trained before it.
    pub turns: Arc<[ActivePeriod]>,
    /// Bytes per value when a weight is read for quantization; 0 if the files are quantized already.
    pub file_bytes: u64,
    /// Memory of the adapter on each linear, by module.
    pub adapters: AdapterCosts,
    /// Loaded beside the model.
    pub teacher: Option<TeacherSpec>,
    /// Reward models.
    pub judges: Arc<[RewardModelSpec]>,
    /// The reference of an RL stage, beside the weights of the policy.
    pub reference: ReferenceMemory,
    /// Number of answers that the rollout before the step generates at a time.
    pub rollout: usize,
    /// The tokenized rows.
    pub data_bytes: u64,
    /// Bytes that the program holds before the model is loaded, and `CODE`.
    pub process_bytes: u64,
    /// Ranks that share the micro-batches of a step.
    pub ranks: usize,
    /// Machines, if the ranks of each one divide all weights; 1: all ranks divide them, if any do.
    pub machines: usize,
    /// Ranks that share one micro-batch.
    pub sequence: SequenceConfig,
}

impl PlanInputs {
    /// The largest that the recipe allows: every row as long as `max_length`.
    pub fn of_recipe(
        recipe: &Recipe,
        turns: Arc<[ActivePeriod]>,
        adapters: AdapterCosts,
        strategy: StepStrategy,
        process: ProcessState,
    ) -> Self {
        let rows = recipe.train.batch_size;
        let sequence = recipe.distributed.shared(process.ranks);
        let batch_tokens = rows.saturating_mul(recipe.data.max_length);
        Self {
            batch_tokens,
            tokens: batch_tokens.div_ceil(sequence.ranks),
            longest: recipe.data.max_length,
            documents: rows,
            micro_batches: recipe.train.gradient_accumulation_steps,
            evaluation: EvaluationSize::default(),
            strategy,
            threads: process.threads,
            element: 4,
            on_gpu: false,
            gpu_rates: &GPUS[0],
            turns,
            file_bytes: recipe.model.dtype.bytes(),
            adapters,
            teacher: None,
            judges: Arc::default(),
            reference: ReferenceMemory::default(),
            rollout: 0,
            data_bytes: 0,
            process_bytes: process.resident + CODE,
            ranks: process.ranks,
            machines: match recipe.distributed.weights {
                RankWeights::ShardedInNode => process.machines,
                _ => 1,
            },
            sequence,
        }
    }

    /// Ranks that have all weights together, if they divide them.
    pub(crate) fn near(&self) -> usize {
        (self.ranks / self.machines.max(1)).max(1)
    }
}
