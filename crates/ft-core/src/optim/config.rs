//! Settings of optimizers, schedules and block training, with their defaults.

use ft_base::named;

named!(
    /// The parameters of one block.
    Partition { Layer = "layer", Module = "module", Matrix = "matrix", Experts = "experts", Ratio = "ratio" }
);
named!(
    /// Order in which blocks become active. `Fixed` keeps the first block (BAdam's `switch_mode`).
    /// `Importance` draws blocks at random in proportion to their importance (LISA).
    BlockOrder {
        Random = "random",
        Ascending = "ascending",
        Descending = "descending",
        Fixed = "fixed",
        Importance = "importance",
    }
);
named!(
    /// The elements of a parameter that form a window of the `ratio` partition.
    MaskShape { Adjacent = "adjacent", Scattered = "scattered" }
);
impl MaskShape {
    /// True for `Scattered`.
    pub fn scattered(self) -> bool {
        self == Self::Scattered
    }
}
named!(
    /// BREAD: the update of inactive blocks.
    Correction { None = "none", Sgd = "sgd", Signsgd = "signsgd", Lora = "lora" }
);
named!(
    /// The layers that a correction reaches: all, or those above the active block.
    CorrectionScope { All = "all", Partial = "partial" }
);
named!(
    /// Update rules.
    OptimizerName { Adamw = "adamw", Sgd = "sgd", Lion = "lion", Adafactor = "adafactor" }
);
named!(
    /// Storage of moments.
    StateDtype { F32 = "f32", Int8 = "int8" }
);
named!(
    /// How a bf16 weight accumulates updates below its last bit.
    Master {
        /// Stores the low 16 bits of the fp32 master weight.
        F32 = "f32",
        /// Stochastic rounding: exact on average.
        Stochastic = "stochastic",
    }
);
named!(
    /// Shape of the learning rate over the steps.
    ScheduleName {
        Constant = "constant",
        Linear = "linear",
        Cosine = "cosine",
        CosineWithRestarts = "cosine_with_restarts",
        Polynomial = "polynomial",
        InverseSqrt = "inverse_sqrt",
        Wsd = "wsd",
    }
);

/// Block training: one block of parameters is active at a time (BAdam, LISA, BREAD).
#[derive(Debug, Clone)]
pub struct BlockConfig {
    /// The parameters of a block.
    pub partition: Partition,
    /// Consecutive layers in one block of the partition `layer`.
    pub layers_per_block: usize,
    /// Experts of a layer in one block of the partition `experts`.
    pub experts_per_block: usize,
    /// The order in which blocks become active.
    pub order: BlockOrder,
    /// First block for `BlockOrder::Fixed`.
    pub start_block: usize,
    /// Importance of blocks for `BlockOrder::Importance`, as `prefix of the block's name=number`; 1 for other blocks.
    pub importance: Vec<String>,
    /// Active fraction of each parameter with `Partition::Ratio`.
    pub update_ratio: f64,
    /// The elements of a window with `Partition::Ratio`.
    pub mask: MaskShape,
    /// Steps a block stays active; `None`: 50.
    pub switch_every: Option<usize>,
    /// The embedding is a block too.
    pub include_embedding: bool,
    /// The output projection is a block too, unless it is tied.
    pub include_lm_head: bool,
    /// Starts of the names of parameters that train in every step.
    pub always_active: Vec<String>,
    /// The update of inactive blocks.
    pub correction: Correction,
    /// The layers that the correction reaches.
    pub correction_scope: CorrectionScope,
    /// Learning rate of the correction relative to that of the block.
    pub correction_scale: f64,
    /// Steps after a switch in which the learning rate rises.
    pub warmup_after_switch: usize,
}

impl Default for BlockConfig {
    fn default() -> Self {
        Self {
            partition: Partition::Layer,
            layers_per_block: 1,
            experts_per_block: 8,
            order: BlockOrder::Random,
            start_block: 0,
            importance: Vec::new(),
            update_ratio: 0.1,
            mask: MaskShape::Adjacent,
            switch_every: None,
            include_embedding: false,
            include_lm_head: false,
            always_active: Vec::new(),
            correction: Correction::None,
            correction_scope: CorrectionScope::All,
            correction_scale: 1.0,
            warmup_after_switch: 0,
        }
    }
}

/// The update rule and its numbers; names as in PyTorch.
#[derive(Debug, Clone)]
pub struct OptimizerConfig {
    /// The update rule.
    pub name: OptimizerName,
    /// The learning rate before the schedule.
    pub learning_rate: f64,
    /// Decay of the first and of the second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// SGD only.
    pub momentum: f64,
    /// Storage of the moments.
    pub state: StateDtype,
    /// How bf16 weights keep small updates.
    pub master: Master,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: OptimizerName::Adamw,
            learning_rate: 1e-4,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            state: StateDtype::F32,
            master: Master::F32,
        }
    }
}

/// The learning rate over the steps; names as in transformers.
#[derive(Debug, Clone)]
pub struct ScheduleConfig {
    /// The shape of the curve.
    pub name: ScheduleName,
    /// Fraction of the steps in which the rate rises.
    pub warmup_ratio: f64,
    /// Replaces `warmup_ratio` if set.
    pub warmup_steps: Option<usize>,
    /// Fraction of the steps in the final decay (wsd).
    pub decay_ratio: f64,
    /// Lowest multiplier of the cosines and wsd; the multiplier at the end of the polynomial.
    pub min_lr_ratio: f64,
    /// Cosines in a run with restarts.
    pub num_cycles: usize,
    /// Exponent of the polynomial.
    pub power: f64,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self {
            name: ScheduleName::Cosine,
            warmup_ratio: 0.03,
            warmup_steps: None,
            decay_ratio: 0.1,
            min_lr_ratio: 0.0,
            num_cycles: 1,
            power: 1.0,
        }
    }
}
