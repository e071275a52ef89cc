//! The typed recipe. Field names are the recipe's keys; a field is an `Option` only if "unset" has a meaning.

use ft_base::named;

pub use crate::distill::hidden::HiddenLoss;
pub use crate::ops::Dtype;
pub use crate::optim::config::{
    BlockConfig, BlockOrder, Correction, CorrectionScope, MaskShape, Master, OptimizerConfig, OptimizerName, Partition,
    ScheduleConfig, ScheduleName, StateDtype,
};
pub use crate::peft::config::{
    AdaloraConfig, CordaArithmetic, CordaConfig, CordaMethod, EvaConfig, LoraConfig, LoraInit, PeftType,
};
pub use crate::rlhf::advantage::{KlEstimator, ScaleRewards};
pub use crate::rlhf::correction::RolloutCorrection;
pub use crate::rlhf::grpo::{GrpoLoss, ImportanceLevel};
pub use crate::rlhf::preference::config::{FDivergence, JudgedLoss, PairLoss};
use crate::source::policy::StorageRules;
pub use crate::source::policy::WeightStorage;
pub use ft_base::Named;
pub use ft_data::{Render, RowFormat, TrainOn};

named!(
    /// Source of the initial weights.
    ModelInit {
        /// The weights in the model directory.
        Pretrained = "pretrained",
        /// Drawn from a normal distribution with the config's `initializer_range`.
        Random = "random",
    }
);
named!(
    /// Storage of frozen projections; `Auto` is the planner's choice.
    FrozenWeights { Auto = "auto", F32 = "f32", Bf16 = "bf16", Int8 = "int8", Int4 = "int4", Nf4 = "nf4" }
);
named!(Tier { Auto = "auto", Device = "device", Host = "host", Disk = "disk" });
named!(PackedWeights { Auto = "auto", None = "none", Forward = "forward", Both = "both" });
named!(Activations { Auto = "auto", Keep = "keep", Recompute = "recompute", Host = "host" });
named!(Method { Full = "full", Block = "block", Lora = "lora", Freeze = "freeze" });
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

named!(RolloutWeights { Exact = "exact", Int8 = "int8", Int4 = "int4" });

named!(
    /// Placement of a teacher's weights.
    TeacherTier { Device = "device", Host = "host", Disk = "disk" }
);

#[derive(Debug, Clone)]
pub struct Recipe {
    pub model: Model,
    pub memory: Memory,
    pub data: Data,
    pub tune: Tune,
    pub optimizer: OptimizerConfig,
    pub schedule: ScheduleConfig,
    pub preference: Preference,
    pub distill: Distill,
    pub train: Train,
    pub rl: RlConfig,
    pub open: Open,
}

/// `auto` keys whose value depends on rows and model (`setup::defaults`). Until it is resolved, the field of the key
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
    pub overrides: Vec<(String, WeightStorage)>,
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

impl Memory {
    /// The storage of frozen projections. `frozen_weights = "auto"` that is not resolved means dense.
    pub fn storage_rules(&self) -> StorageRules {
        StorageRules {
            frozen: WeightStorage::parse(self.frozen_weights.name()),
            overrides: self.overrides.clone(),
            group_size: self.group_size,
            double_quantization: self.double_quantization,
        }
    }
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
    pub block: BlockConfig,
    pub lora: LoraConfig,
    pub freeze: Freeze,
}

#[derive(Debug, Clone)]
pub struct Freeze {
    /// The number of last layers that train.
    pub trainable_layers: usize,
    /// Prefixes of the names of other parameters that train.
    pub trainable: Vec<String>,
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
pub struct RlConfig {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A Rust user who writes `LoraConfig::default()` gets what a recipe without these keys gets.
    #[test]
    fn defaults_of_the_library_are_those_of_a_recipe() {
        let recipe = crate::recipe::parse("[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n", "r.toml", &[])
            .unwrap()
            .recipe;
        let same = |a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| assert_eq!(format!("{a:?}"), format!("{b:?}"));
        same(&recipe.tune.lora, &LoraConfig::default());
        same(&recipe.tune.block, &BlockConfig::default());
        same(&recipe.schedule, &ScheduleConfig::default());
        same(
            &recipe.memory.storage_rules(),
            &crate::source::policy::StorageRules::default(),
        );
        // The recipe's rate is `auto`.
        let optimizer = OptimizerConfig {
            learning_rate: recipe.optimizer.learning_rate,
            ..OptimizerConfig::default()
        };
        same(&recipe.optimizer, &optimizer);
    }
}
