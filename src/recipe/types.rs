//! The typed recipe. Field names are the recipe's keys; a field is an `Option` only if "unset" has a meaning.

use ft_base::named;

pub use ft_base::Named;
pub use ft_data::{Render, RowFormat, TrainOn};

named!(
    /// Type of unquantized weights and of matrix products.
    Dtype { F32 = "f32", Bf16 = "bf16" }
);

impl Dtype {
    /// Bytes per number.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

named!(
    /// Source of the initial weights.
    ModelInit {
        /// The weights in the model directory.
        Pretrained = "pretrained",
        /// Drawn from a normal distribution with the config's `initializer_range`.
        Random = "random",
    }
);
named!(FrozenWeights { Auto = "auto", F32 = "f32", Bf16 = "bf16", Int8 = "int8", Int4 = "int4", Nf4 = "nf4" });
named!(
    /// Storage type of one weight.
    Storage { F32 = "f32", Bf16 = "bf16", Int8 = "int8", Int4 = "int4", Nf4 = "nf4" }
);
named!(Tier { Auto = "auto", Device = "device", Host = "host", Disk = "disk" });
named!(PackedWeights { Auto = "auto", None = "none", Forward = "forward", Both = "both" });
named!(Activations { Auto = "auto", Keep = "keep", Recompute = "recompute", Host = "host" });
named!(Method { Full = "full", Block = "block", Lora = "lora", Freeze = "freeze" });
named!(Partition { Layer = "layer", Module = "module", Matrix = "matrix", Ratio = "ratio" });
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
    pub fn scattered(self) -> bool {
        self == Self::Scattered
    }
}
named!(Correction { None = "none", Sgd = "sgd", Signsgd = "signsgd", Lora = "lora" });
named!(CorrectionScope { All = "all", Partial = "partial" });
named!(LoraInit {
    Default = "default",
    Gaussian = "gaussian",
    Corda = "corda",
    Pissa = "pissa",
    Olora = "olora",
    Eva = "eva",
    Loftq = "loftq",
    LoraGa = "lora_ga",
});
named!(
    /// The kind of adapter.
    PeftType {
        Lora = "lora",
        Adalora = "adalora",
        Ia3 = "ia3",
        Vera = "vera",
        Loha = "loha",
        Lokr = "lokr",
        Oft = "oft",
    }
);
named!(
    /// The components that CorDA trains: the least important for knowledge to preserve, or the most important for the
    /// task.
    CordaMethod { Kpm = "kpm", Ipm = "ipm" }
);
named!(
    /// The variant of CorDA's normalization and damping.
    CordaArithmetic { Ft = "ft", Peft = "peft" }
);
named!(OptimizerName { Adamw = "adamw", Sgd = "sgd", Lion = "lion", Adafactor = "adafactor" });
named!(StateDtype { F32 = "f32", Int8 = "int8" });
named!(
    /// How a bf16 weight accumulates updates below its last bit.
    Master {
        /// Stores the low 16 bits of the fp32 master weight.
        F32 = "f32",
        /// Stochastic rounding: exact on average.
        Stochastic = "stochastic",
    }
);
named!(ScheduleName { Constant = "constant", Linear = "linear", Cosine = "cosine", Wsd = "wsd" });
named!(Stage {
    Pretrain = "pretrain",
    Sft = "sft",
    Distill = "distill",
    Reward = "reward",
    Dpo = "dpo",
    Orpo = "orpo",
    Simpo = "simpo",
    Kto = "kto",
    Ppo = "ppo",
    Grpo = "grpo",
});
impl Stage {
    /// True for stages that train on rows of `data.format = "preference"`.
    pub fn is_preference(self) -> bool {
        matches!(self, Self::Reward | Self::Dpo | Self::Orpo | Self::Simpo | Self::Kto)
    }
}
named!(
    /// Losses of pairs with a reference (`dpo`), as in TRL's `loss_type`.
    PairLoss {
        Sigmoid = "sigmoid",
        Hinge = "hinge",
        Ipo = "ipo",
        ExoPair = "exo_pair",
        NcaPair = "nca_pair",
        Robust = "robust",
        BcoPair = "bco_pair",
        SppoHard = "sppo_hard",
        Aot = "aot",
        AotUnpaired = "aot_unpaired",
        ApoZero = "apo_zero",
        ApoDown = "apo_down",
        Discopop = "discopop",
        Sft = "sft",
        SigmoidNorm = "sigmoid_norm",
    }
);
named!(
    /// Losses of KTO rows (`kto`).
    JudgedLoss { Kto = "kto", ApoZeroUnpaired = "apo_zero_unpaired" }
);
named!(
    /// The divergence from the reference (f-DPO).
    FDivergence {
        ReverseKl = "reverse_kl",
        ForwardKl = "forward_kl",
        JsDivergence = "js_divergence",
        AlphaDivergence = "alpha_divergence",
    }
);

named!(RolloutWeights { Exact = "exact", Int8 = "int8", Int4 = "int4" });
named!(RolloutCorrection {
    None = "none",
    TokenTruncate = "token_truncate",
    TokenMask = "token_mask",
    SequenceTruncate = "sequence_truncate",
    SequenceMask = "sequence_mask",
});
named!(GrpoLoss { Grpo = "grpo", Dapo = "dapo", DrGrpo = "dr_grpo", Bnpo = "bnpo", Rloo = "rloo" });
named!(ImportanceLevel { Token = "token", Sequence = "sequence" });
named!(ScaleRewards { Group = "group", Batch = "batch", None = "none" });
named!(KlEstimator { K1 = "k1", K3 = "k3" });

named!(
    /// Placement of a teacher's weights.
    TeacherTier { Device = "device", Host = "host", Disk = "disk" }
);
named!(
    /// The distance between hidden states of student and teacher.
    HiddenLoss { Mse = "mse", Cosine = "cosine" }
);

#[derive(Debug, Clone)]
pub struct Recipe {
    pub model: Model,
    pub memory: Memory,
    pub data: Data,
    pub tune: Tune,
    pub optimizer: Optimizer,
    pub schedule: Schedule,
    pub preference: Preference,
    pub distill: Distill,
    pub train: Train,
    pub reinforce: Reinforce,
    pub open: Open,
}

/// `auto` keys whose value depends on rows and model (`run::defaults`). Until it is resolved, the field of the key
/// holds a value for runs of unknown size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Open {
    pub num_epochs: bool,
    pub learning_rate: bool,
    pub gradient_accumulation_steps: bool,
    pub packing_length: bool,
}

#[derive(Debug, Clone)]
pub struct Model {
    /// Hub id, local directory, or `shape:NAME`.
    pub path: String,
    pub revision: String,
    pub dtype: Dtype,
    /// `auto`, `cpu` or `cuda:N`.
    pub device: String,
    pub init: ModelInit,
}

#[derive(Debug, Clone)]
pub struct Memory {
    /// Bytes; `None` is `auto`.
    pub budget: Option<u64>,
    /// Bytes of host memory beside a GPU; `None` is `auto`.
    pub host_budget: Option<u64>,
    pub frozen_weights: FrozenWeights,
    /// Prefixes of parameter names, or names with `*`, with the storage type of the projections that they match.
    pub overrides: Vec<(String, Storage)>,
    /// Number of weights per scale; `None` is the default of the format.
    pub group_size: Option<usize>,
    /// NF4: quantize the scales too.
    pub double_quantization: bool,
    pub tier: Tier,
    /// Rows of the output projection per chunk, with `tier = "disk"`; 0 is the whole head, `None` is `auto`.
    pub head_chunk: Option<usize>,
    pub activations: Activations,
    /// Tokens per MLP chunk; 0 is all, `None` is `auto`.
    pub mlp_chunk: Option<usize>,
    pub packed_weights: PackedWeights,
}

#[derive(Debug, Clone)]
pub struct Data {
    pub train: Vec<String>,
    pub eval: Vec<String>,
    /// Fraction of the training rows that is held out if `eval` is empty, 0 to 1.
    pub eval_fraction: f64,
    pub format: RowFormat,
    pub render: Render,
    pub max_length: usize,
    pub packing: bool,
    /// Largest number of tokens of a packed row; at most `max_length`.
    pub packing_length: usize,
    pub train_on: TrainOn,
    pub shuffle: bool,
    /// `None` is `auto`, the model's own template; otherwise a path to a Jinja file.
    pub chat_template: Option<String>,
}

#[derive(Debug, Clone)]
pub struct Tune {
    pub method: Method,
    pub block: Block,
    pub lora: Lora,
    pub freeze: Freeze,
}

#[derive(Debug, Clone)]
pub struct Block {
    pub partition: Partition,
    pub layers_per_block: usize,
    pub order: BlockOrder,
    /// First block for `order = "fixed"`.
    pub start_block: usize,
    /// Importance of blocks for `order = "importance"`, as `prefix of the block's name=number`; 1 for other blocks.
    pub importance: Vec<String>,
    /// Active fraction of each parameter with `partition = "ratio"`.
    pub update_ratio: f64,
    pub mask: MaskShape,
    /// Steps a block stays active; `None` is `auto`: clamp(n / (B * D), 50, 100).
    pub switch_every: Option<usize>,
    pub include_embedding: bool,
    pub include_lm_head: bool,
    pub always_active: Vec<String>,
    pub correction: Correction,
    pub correction_scope: CorrectionScope,
    /// Learning rate of the correction relative to that of the block.
    pub correction_scale: f64,
    pub warmup_after_switch: usize,
}

#[derive(Debug, Clone)]
pub struct Lora {
    pub peft_type: PeftType,
    pub r: usize,
    pub lora_alpha: f64,
    pub lora_dropout: f64,
    /// Empty means `all-linear`; otherwise names, suffixes of names or regular expressions, as in PEFT.
    pub target_modules: Vec<String>,
    pub exclude_modules: Vec<String>,
    /// Empty means every layer.
    pub layers_to_transform: Vec<usize>,
    /// In the written order; the first match is used.
    pub rank_pattern: Vec<(String, usize)>,
    pub alpha_pattern: Vec<(String, f64)>,
    /// Modules that train in full beside the adapters.
    pub modules_to_save: Vec<String>,
    /// Rows of the embedding (and of an untied head) that train.
    pub trainable_token_indices: Vec<usize>,
    pub init_lora_weights: LoraInit,
    /// Number of training rows for `eva` and `lora_ga`.
    pub init_samples: usize,
    /// Power iterations of the fast SVD; 0 means the exact SVD.
    pub pissa_niter: usize,
    /// Alternating iterations of LoftQ.
    pub loftq_iter: usize,
    pub use_rslora: bool,
    pub use_dora: bool,
    pub loraplus_lr_ratio: f64,
    /// (IA)³: modules whose input is scaled.
    pub feedforward_modules: Vec<String>,
    pub oft_block_size: usize,
    pub use_cayley_neumann: bool,
    /// LoKr: -1 factorizes as square as possible.
    pub decompose_factor: i64,
    pub decompose_both: bool,
    /// VeRA: initial value of the small vector.
    pub d_initial: f64,
    /// Saves the adapter with its changed base weights.
    pub save_residual: bool,
    /// Rank of the saved plain LoRA; 0 means twice the trained rank, which is exact.
    pub save_rank: usize,
    /// Continue from this PEFT adapter directory; `None` starts a new adapter.
    pub adapter: Option<String>,
    pub corda: Corda,
    pub adalora: AdaloraRanks,
    pub eva: Eva,
}

#[derive(Debug, Clone)]
pub struct Eva {
    /// Largest factor by which a rank may grow; 1 keeps all ranks.
    pub rho: f64,
}

/// Rank allocation of AdaLoRA; names as in PEFT.
#[derive(Debug, Clone)]
pub struct AdaloraRanks {
    /// Mean final rank; 0 means two thirds of `r`, or no change for a given adapter.
    pub target_r: usize,
    pub tinit: usize,
    pub tfinal: usize,
    pub delta_t: usize,
    pub beta1: f64,
    pub beta2: f64,
    pub orth_reg_weight: f64,
}

#[derive(Debug, Clone)]
pub struct Corda {
    pub method: CordaMethod,
    /// Empty means the training rows.
    pub data: Vec<String>,
    pub samples: usize,
    pub compatible: CordaArithmetic,
    /// Chooses ranks by layer with the same total.
    pub adaptive_rank: bool,
}

#[derive(Debug, Clone)]
pub struct Freeze {
    /// The number of last layers that train.
    pub trainable_layers: usize,
    /// Prefixes of the names of other parameters that train.
    pub trainable: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct Optimizer {
    pub name: OptimizerName,
    pub learning_rate: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    /// SGD only.
    pub momentum: f64,
    pub state: StateDtype,
    pub master: Master,
}

#[derive(Debug, Clone)]
pub struct Schedule {
    pub name: ScheduleName,
    pub warmup_ratio: f64,
    /// Replaces `warmup_ratio` if set.
    pub warmup_steps: Option<usize>,
    /// Fraction of the steps in the final decay (wsd).
    pub decay_ratio: f64,
    /// Lowest multiplier of wsd.
    pub min_lr_ratio: f64,
}

/// The keys of `rlhf` for the preference stages; names as in TRL.
#[derive(Debug, Clone)]
pub struct Preference {
    /// Loss of the recipe's stage: a `PairLoss` or a `JudgedLoss`.
    pub loss_type: String,
    pub beta: f64,
    pub label_smoothing: f64,
    /// Weight of an answer's tokens beyond the length of the shorter answer; 1 disables it.
    pub ld_alpha: f64,
    pub f_divergence_type: FDivergence,
    pub f_alpha_divergence_coef: f64,
    pub discopop_tau: f64,
    pub simpo_gamma: f64,
    /// Weight of the cross-entropy of the chosen answers in `simpo`.
    pub cpo_alpha: f64,
    pub desirable_weight: f64,
    pub undesirable_weight: f64,
    pub center_rewards_coefficient: f64,
}

#[derive(Debug, Clone)]
pub struct Distill {
    /// Hub id or directory; `None` if only stored outputs are used.
    pub teacher: Option<String>,
    pub teacher_revision: String,
    pub teacher_weights: FrozenWeights,
    pub teacher_tier: TeacherTier,
    /// Stored outputs to use instead of the teacher.
    pub teacher_cache: Option<String>,
    /// Number of stored ids per token.
    pub top_k: usize,
    pub beta: f64,
    pub temperature: f64,
    /// Weight of the cross-entropy in the loss.
    pub alpha: f64,
    /// Fraction of the rows that the student answers itself.
    pub lmbda: f64,
    pub max_new_tokens: usize,
    pub rollout_temperature: f64,
    /// 0: hidden states are not compared.
    pub hidden_weight: f64,
    pub hidden_loss: HiddenLoss,
    /// (student, teacher); `None` is `auto`.
    pub layer_map: Option<Vec<(usize, usize)>>,
}

#[derive(Debug, Clone)]
pub struct Train {
    pub stage: Stage,
    pub num_epochs: f64,
    /// -1 means that `num_epochs` sets the length.
    pub max_steps: i64,
    pub batch_size: usize,
    pub gradient_accumulation_steps: usize,
    /// 0 disables clipping.
    pub max_grad_norm: f64,
    pub seed: u64,
    pub logging_steps: usize,
    pub eval_steps: usize,
    pub save_steps: usize,
    pub save_total_limit: usize,
    pub output_dir: String,
    /// Prompts answered before and after the run for comparison.
    pub sample_prompts: Vec<String>,
    /// Evaluations also answer the rows with greedy decoding and count exact matches.
    pub predict_with_generate: bool,
}

/// Settings of the RL stages.
#[derive(Debug, Clone)]
pub struct Reinforce {
    /// `name` or `name:argument`.
    pub rewards: Vec<String>,
    /// Empty means 1 for all.
    pub reward_weights: Vec<f64>,
    pub answer_column: String,
    /// Time limit for one row, in seconds.
    pub reward_timeout: f64,
    pub reward_restarts: usize,
    pub num_generations: usize,
    pub max_completion_length: usize,
    pub temperature: f64,
    /// 0 disables it.
    pub top_k: usize,
    /// 1 disables it.
    pub top_p: f64,
    pub num_iterations: usize,
    pub num_mini_batches: usize,
    pub rollout_weights: RolloutWeights,
    pub rollout_correction: RolloutCorrection,
    pub rollout_clip_max: f64,
    /// 0 means no lower bound.
    pub rollout_clip_min: f64,
    pub sample_steps: usize,
    pub samples: usize,
    pub grpo: Grpo,
    pub ppo: Ppo,
}

#[derive(Debug, Clone)]
pub struct Grpo {
    pub loss_type: GrpoLoss,
    pub importance_sampling_level: ImportanceLevel,
    pub scale_rewards: ScaleRewards,
    pub epsilon: f64,
    /// 0 means the value of `epsilon`.
    pub epsilon_high: f64,
    /// 0 means no bound.
    pub delta: f64,
    pub beta: f64,
    pub use_bias_correction_kl: bool,
    pub mask_truncated_completions: bool,
    pub normalize_advantages: bool,
}

#[derive(Debug, Clone)]
pub struct Ppo {
    pub kl_coef: f64,
    pub kl_estimator: KlEstimator,
    /// 0 keeps `kl_coef` fixed.
    pub kl_target: f64,
    pub kl_horizon: f64,
    pub gamma: f64,
    pub lam: f64,
    pub cliprange: f64,
    pub cliprange_value: f64,
    pub vf_coef: f64,
    pub whiten_rewards: bool,
    pub missing_eos_penalty: f64,
}
