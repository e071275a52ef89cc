//! The typed recipe: sections of the table, and settings of the library that `lower` makes of sections.

pub use super::table::{
    adapters::*, distill::*, distributed::*, model::*, preference::*, quality::*, rl::*, sources::*, train::*, tune::*,
};
pub use crate::distill::hidden::HiddenLoss;
pub use crate::engine::LossScaleConfig;
pub use crate::model::RouterLosses;
pub use crate::ops::Dtype;
pub use crate::optim::config::{
    BlockConfig, BlockOrder, Correction, CorrectionScope, MaskShape, Master, OptimizerConfig, OptimizerName, Partition,
    ScheduleConfig, ScheduleName, StateDtype,
};
pub use crate::peft::config::{
    AdaloraConfig, CordaArithmetic, CordaConfig, CordaMethod, EvaConfig, ExpertRank, LoraConfig, LoraInit, PeftType,
};
pub use crate::rlhf::advantage::{KlEstimator, ScaleRewards};
pub use crate::rlhf::correction::RolloutCorrection;
pub use crate::rlhf::grpo::{GrpoLoss, ImportanceLevel};
pub use crate::rlhf::preference::config::{FDivergence, JudgedLoss, PairLoss};
pub use crate::source::policy::WeightStorage;
pub use ft_base::NamedEnum;
pub use ft_data::{ChatRole, ColumnRole, Long, Render, RowFormat, TextUnit, TrainOn};

#[derive(Debug, Clone)]
pub struct Recipe {
    pub model: Model,
    pub memory: Memory,
    pub data: Data,
    pub tune: Tune,
    pub optimizer: OptimizerConfig,
    pub schedule: ScheduleConfig,
    pub preference: PreferenceSection,
    pub distill: DistillSection,
    pub train: Train,
    pub rl: RlSection,
    pub distributed: DistributedSection,
    pub open: OpenKeys,
}

/// `auto` keys whose value depends on rows and model (`setup::defaults`). Until it is resolved, the field of the key
/// holds a value for runs of unknown size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenKeys {
    pub num_epochs: bool,
    pub learning_rate: bool,
    pub gradient_accumulation_steps: bool,
    pub packing_length: bool,
    /// Of a run that only makes some steps to measure them: `train.max_steps` of the whole run. The keys are chosen for that
    /// run, so the measured steps are its steps.
    pub whole_steps: Option<i64>,
}

impl Recipe {
    /// `train.max_steps` of the run for which `auto` keys are chosen.
    pub fn whole_steps(&self) -> i64 {
        self.open.whole_steps.unwrap_or(self.train.max_steps)
    }
}

#[derive(Debug, Clone)]
pub struct Tune {
    pub method: Method,
    pub block: BlockConfig,
    pub lora: LoraConfig,
    pub freeze: Freeze,
    pub new_tokens: NewTokens,
    pub train_router: bool,
    /// Rows of embedding and head that train in every step, without adapters (`setup::vocabulary`).
    pub rows: Vec<u32>,
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
        same(&recipe.data.quality.screen(Vec::new()), &ft_data::ScreenSpec::default());
        same(&recipe.train.scale_config(), &LossScaleConfig::default());
        same(&recipe.train.router_losses(), &RouterLosses::default());
        // The recipe's rate is `auto`.
        let optimizer = OptimizerConfig {
            learning_rate: recipe.optimizer.learning_rate,
            ..OptimizerConfig::default()
        };
        same(&recipe.optimizer, &optimizer);
    }
}
