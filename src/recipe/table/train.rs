//! The training run: optimizer, schedule, length and saving.

use super::*;
use crate::engine::EmaConfig;
use crate::ops::quantized::Products;

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

named!(ReportTo {
    None = "none",
    TensorBoard = "tensorboard",
});

impl Stage {
    /// True for stages that train on rows of `data.format = "preference"`.
    pub fn is_preference(self) -> bool {
        matches!(self, Self::Reward | Self::Dpo | Self::Orpo | Self::Simpo | Self::Kto)
    }

    /// True for stages that train on rewards of generated answers.
    pub fn is_rl(self) -> bool {
        matches!(self, Self::Ppo | Self::Grpo)
    }

    /// Value of `train.num_epochs = "auto"`.
    pub fn num_epochs(self) -> f64 {
        match self {
            Self::Sft | Self::Distill => 3.0,
            _ => 1.0,
        }
    }
}

section! {
    /// The update rule. Names and meaning as in PyTorch.
    pub struct OptimizerKeys in "optimizer" {
        /// The update rule. Adafactor stores row and column means of the squared gradient and no momentum; it uses
        /// `learning_rate` unchanged.
        name: OptimizerName = "adamw", "the usual choice for transformers";
        /// Highest learning rate. `auto` with AdamW: 2e-5 × 2048 / hidden size; three times that for `block`, ten times
        /// for adapters and for `model.init = "random"`, a hundred times for IA3 and VeRA; then times 0.5 for
        /// `reward`, 0.05 for other preference stages and for RL stages. Lion uses a fifth of it, SGD a thousand times as much.
        learning_rate: f64 = "auto", "by method, stage, optimizer and width: wide models need smaller steps",
            in POSITIVE_OR_ZERO;
        /// Decay of the two moments; Lion's authors use `[0.9, 0.99]`.
        betas: [f64; 2] = [0.9, 0.999], "as in PyTorch", in BELOW_ONE, when Self::name = ["adamw", "lion"];
        /// Added to the root of the second moment.
        eps: f64 = 1e-8, "as in PyTorch", in POSITIVE, when Self::name = ["adamw"];
        /// Weight decay, added to the gradient in SGD, decoupled in the others; never on norms, biases and other vectors (DoRA
        /// magnitudes, attention sinks).
        weight_decay: f64 = 0.0, "short runs need none", in POSITIVE_OR_ZERO;
        /// Momentum of SGD.
        momentum: f64 = 0.0, "as in PyTorch", in BELOW_ONE, when Self::name = ["sgd"];
        /// Storage of the moments; `int8`: dynamic 8-bit quantization in blocks of 256, a quarter of the memory; the
        /// moments of parameters with fewer than 4096 elements stay f32.
        state: StateDtype = "f32", "exact", when Self::name = ["adamw", "sgd", "lion"];
        /// Master weights of bf16 and f16 weights: `f32` keeps fp32 master weights (2 more bytes per element); `stochastic`
        /// keeps none and uses stochastic rounding (unbiased).
        master: Master = "f32", "exact", when Model::dtype = ["bf16", "f16"];
    }
}

section! {
    /// The learning rate over the steps, as in transformers.
    pub struct ScheduleKeys in "schedule" {
        /// Shape of the learning rate over the steps, after the warmup. `inverse_sqrt` falls with the root of the steps,
        /// and has no end.
        name: ScheduleName = "cosine", "the usual choice for fine-tuning";
        /// Fraction of the steps for warmup, rounded down. The first of these steps has rate 0, as in transformers.
        warmup_ratio: f64 = 0.03, "the first steps of AdamW are large without it", in PART,
            when Self::warmup_steps = ["auto"];
        /// Number of warmup steps, in place of `warmup_ratio`.
        warmup_steps: Option<usize> = "auto", "derived from `warmup_ratio`", in from(0);
        /// Fraction of the steps for the decay at the end of `wsd`.
        decay_ratio: f64 = 0.1, "a common choice", in PART, when Self::name = ["wsd"];
        /// Lowest multiplier of the learning rate; `polynomial` ends there.
        min_lr_ratio: f64 = 0.0, "as in transformers", in PART,
            when Self::name = ["cosine", "cosine_with_restarts", "polynomial", "wsd"];
        /// Number of cosines; each begins at the highest rate.
        num_cycles: usize = 1, "as in transformers", in MANY, when Self::name = ["cosine_with_restarts"];
        /// Exponent of the falling part.
        power: f64 = 1.0, "as in transformers: `linear`", in POSITIVE, when Self::name = ["polynomial"];
    }
}

section! {
    /// The run: stage, length, batch, saving.
    pub struct Train in "train" {
        /// The objective. `reward`, `dpo`, `orpo`, `simpo` and `kto` use preference rows.
        stage: Stage = "sft", "supervised fine-tuning";
        /// Passes over the data.
        num_epochs: f64 = "auto", "3 for `sft` and `distill`, as in TRL; 1 for the other stages", in POSITIVE, resume FREE;
        /// Number of optimizer steps; 0 saves the initial state in `final/`; -1 derives it from `num_epochs`.
        max_steps: i64 = -1, "derived from `num_epochs`", in from(-1), resume FREE;
        /// Sequences in one forward pass.
        batch_size: usize = 1, "least memory", in MANY;
        /// Forward passes in one optimizer step; the loss is divided by the trained tokens of all of them. With
        /// `max_steps` a step may cross the end of an epoch: it uses the last rows of one epoch and the first of the
        /// next. `epoch` in the metrics counts all of them, so it grows by more than 1 in a step that is larger than
        /// the data.
        gradient_accumulation_steps: usize = "auto",
            "by the number of rows: 8 rows per step, fewer if the run would have less than 75 steps, more in a long \
             run", in MANY;
        /// Global norm to which gradients are clipped; 0 is off.
        max_grad_norm: f64 = 1.0, "as in transformers", in POSITIVE_OR_ZERO;
        /// f16: the gradients of the first step are computed times this number, so that small ones do not become 0. A step
        /// with a gradient that is not finite is skipped and halves it.
        loss_scale: f64 = 65536.0, "as in PyTorch", in POSITIVE, when Model::dtype = ["f16"];
        /// f16: number of steps without such a gradient after which the loss scale is doubled.
        loss_scale_interval: usize = 2000, "as in PyTorch", in from(1), when Model::dtype = ["f16"];
        /// NEFTune: in training each embedding gets uniform noise of at most this number divided by the root of (tokens of
        /// its row × hidden size). 5, 10 and 15 are those of the paper. Evaluations and samples have no noise.
        neftune_noise_alpha: f64 = 0.0, "no noise, as in TRL", in POSITIVE_OR_ZERO;
        /// Label smoothing of `sft` and `pretrain`: this part of the target distribution is spread evenly over the
        /// vocabulary. As in transformers, `eval_loss` contains it, so evaluations have no `eval_perplexity` then; `ft eval` does
        /// not smooth.
        label_smoothing_factor: f64 = 0.0, "labels are taken as correct", in BELOW_ONE;
        /// Exponential moving average (EMA) of the trained weights, updated after each step: the part of it that an update
        /// keeps, 0.99 to 0.9999. Evaluations, samples and `final/` have the average; training goes on with the weights.
        /// With `block` a block gets its average as its value when its turn ends.
        ema_decay: f64 = 0.0, "`final/` has the weights of the last step", in BELOW_ONE;
        /// The decay of update t is at most t / (9 + t), so that the average of a short run is not that of its first steps.
        ema_ramp: bool = true, "as in diffusers";
        /// Mixtures of experts: factor of the balance loss, which keeps the load of the experts even. With more than one
        /// micro-batch in a step it is the mean of their balance losses, as in TRL. The reported loss is without it.
        router_aux_loss_coef: f64 = 0.0, "as in transformers, whose models add it only with `output_router_logits`",
            in POSITIVE_OR_ZERO;
        /// Mixtures of experts: factor of the z-loss, which keeps the logits of the routers small.
        router_z_loss_coef: f64 = 0.0, "no model of transformers adds it while it is fine-tuned", in POSITIVE_OR_ZERO;
        /// Seed of every random choice.
        seed: u64 = 42, "as in transformers", in from(0);
        /// Steps between two report lines.
        logging_steps: usize = 1, "every step is reported", in from(1), resume FREE;
        /// `tensorboard`: the numbers of `metrics.jsonl` are also written to an event file in the run directory, while the run
        /// goes on. `tensorboard --logdir runs` shows them.
        report_to: ReportTo = "none", "`metrics.jsonl` has all numbers", resume FREE;
        /// Steps between two evaluations; 0: only before and after.
        eval_steps: usize = 0, "evaluate before and after only", in from(0), resume FREE;
        /// The number of an evaluation that says which model is best: `eval_loss`, or another one of `metrics.jsonl`. Lower
        /// is better for losses, perplexities and divergences, higher for the others. The evaluation before the first step
        /// does not count.
        metric_for_best_model: Auto<String> = "auto", "`eval_loss`; `eval_reward` in `grpo` and `ppo`", resume FREE;
        /// `final/` is the model of the best evaluation. Its checkpoint is kept beside the newest ones.
        load_best_model_at_end: bool = false, "the schedule ends with the last step", resume FREE;
        /// Evaluations without a better value after which the run ends; 0: it has all its steps.
        early_stopping_patience: usize = 0, "the learning rate reaches its end", in from(0), resume FREE;
        /// A value is better for this purpose if it differs from the best one by more than this.
        early_stopping_threshold: f64 = 0.0, "as in transformers", in POSITIVE_OR_ZERO, resume FREE;
        /// Steps between two checkpoints; 0: no periodic checkpoints.
        save_steps: usize = 100, "little work is lost if the run is killed", in from(0), resume FREE;
        /// Number of checkpoints to keep; an old one is deleted only after the new one is verified.
        save_total_limit: usize = 2, "the newest and the one before it", in from(1), resume FREE;
        /// The run directory.
        output_dir: String = "runs/sft", "one folder for all runs", resume FREE;
        /// Prompts that the model answers before and after the run, to show the difference.
        sample_prompts: Vec<String> = [], "no samples by default", resume FREE;
        /// Evaluations also generate an answer to each row by greedy decoding and count exact matches.
        predict_with_generate: bool = false, "decoding takes longer than the loss", resume FREE;
    }
}

impl Train {
    /// How the trained weights are averaged; `None`: not at all.
    pub fn ema(&self) -> Option<EmaConfig> {
        (self.ema_decay > 0.0).then_some(EmaConfig {
            decay: self.ema_decay,
            ramp: self.ema_ramp,
        })
    }

    /// True if the loss of an evaluation is the mean cross-entropy of the tokens. In `distill` it is.
    pub fn has_perplexity(&self) -> bool {
        let of_tokens = matches!(self.stage, Stage::Sft | Stage::Pretrain | Stage::Distill);
        // Evaluations have smoothing too.
        of_tokens && self.label_smoothing_factor == 0.0
    }

    /// The factors of the losses of routers.
    pub fn router_losses(&self) -> RouterLosses {
        RouterLosses {
            balance: self.router_aux_loss_coef,
            z: self.router_z_loss_coef,
        }
    }

    /// The settings of the loss scale.
    pub fn scale_config(&self) -> LossScaleConfig {
        LossScaleConfig {
            initial: self.loss_scale,
            growth_interval: self.loss_scale_interval as u64,
        }
    }
}

impl From<OptimizerKeys> for OptimizerConfig {
    fn from(keys: OptimizerKeys) -> Self {
        Self {
            name: keys.name,
            learning_rate: keys.learning_rate,
            betas: keys.betas,
            eps: keys.eps,
            weight_decay: keys.weight_decay,
            momentum: keys.momentum,
            state: keys.state,
            master: keys.master,
        }
    }
}

impl From<ScheduleKeys> for ScheduleConfig {
    fn from(keys: ScheduleKeys) -> Self {
        Self {
            name: keys.name,
            warmup_ratio: keys.warmup_ratio,
            warmup_steps: keys.warmup_steps,
            decay_ratio: keys.decay_ratio,
            min_lr_ratio: keys.min_lr_ratio,
            num_cycles: keys.num_cycles,
            power: keys.power,
        }
    }
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    let (method, lora) = (s.tune.method, &s.tune.lora);
    match key {
        // Adapters are f32; modules that train in full are not.
        OptimizerKeys::master
            if method == Method::Lora && lora.adapter.is_none() && lora.modules_to_save.is_empty() =>
        {
            Some(TuneKeys::method.is("lora"))
        }
        Train::num_epochs if s.train.max_steps >= 0 => Some(format!("train.max_steps = {}", s.train.max_steps)),
        Train::load_best_model_at_end | Train::early_stopping_patience if s.train.eval_steps == 0 => {
            Some("train.eval_steps = 0".into())
        }
        Train::load_best_model_at_end | Train::early_stopping_patience if !s.data.evaluates() => {
            Some("data.eval = []".into())
        }
        Train::early_stopping_threshold if s.train.early_stopping_patience == 0 => {
            Some("train.early_stopping_patience = 0".into())
        }
        Train::metric_for_best_model if s.train.early_stopping_patience == 0 && !s.train.load_best_model_at_end => {
            Some("train.load_best_model_at_end = false".into())
        }
        Train::ema_ramp if s.train.ema_decay == 0.0 => Some("train.ema_decay = 0".into()),
        Train::predict_with_generate if !s.data.evaluates() => Some("data.eval = []".into()),
        _ => None,
    }
}

/// Stages that have no noise on embeddings or no label smoothing.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let stage = s.train.stage;
    if s.train.neftune_noise_alpha > 0.0 && stage.is_rl() {
        faults.add(
            &[Train::neftune_noise_alpha, Train::stage],
            Error::usage(format!("stage `{}` has no noise on embeddings", stage.name()))
                .found(format!("train.neftune_noise_alpha = {}", s.train.neftune_noise_alpha))
                .expected("0: its loss compares the policy with the one that generated the answers, without noise")
                .hint("remove `train.neftune_noise_alpha`"),
        );
    }
    let metric = s
        .train
        .metric_for_best_model
        .given()
        .map(|name| name.trim_start_matches("eval_"));
    let is_used = s.train.early_stopping_patience > 0 || s.train.load_best_model_at_end;
    if metric == Some("perplexity") && is_used && !s.train.has_perplexity() {
        faults.add(
            &[
                Train::metric_for_best_model,
                Train::stage,
                Train::label_smoothing_factor,
            ],
            Error::usage("the evaluations have no perplexity: their loss is not the cross-entropy of the tokens")
                .found("perplexity")
                .hint("use `eval_loss`: it has the same order"),
        );
    }
    if s.train.label_smoothing_factor > 0.0 && !matches!(stage, Stage::Sft | Stage::Pretrain) {
        let (why, hint) = match stage {
            Stage::Distill => (
                "the teacher's distribution takes the place of smoothed labels",
                "remove `train.label_smoothing_factor`; `distill.temperature` makes the teacher's distribution smoother",
            ),
            Stage::Dpo | Stage::Simpo => (
                "its labels are which answer is better",
                "use `rlhf.label_smoothing`, the fraction of wrong preferences",
            ),
            _ => (
                "its loss has no distribution of labels over the vocabulary",
                "remove `train.label_smoothing_factor`",
            ),
        };
        faults.add(
            &[Train::label_smoothing_factor, Train::stage],
            Error::usage(format!(
                "stage `{}` has no label smoothing of tokens: {why}",
                stage.name()
            ))
            .found(format!(
                "train.label_smoothing_factor = {}",
                s.train.label_smoothing_factor
            ))
            .expected("0, or stage `sft` or `pretrain`")
            .hint(hint),
        );
    }
}

/// Refuses settings that do not support f16.
pub(super) fn check_f16(s: &RecipeSections, faults: &mut KeyFaults) {
    if s.model.dtype != Dtype::F16 {
        return;
    }
    let mut refuse = |key: KeyPath, found: String, hint: &str| {
        faults.add(
            &[Model::dtype, key],
            Error::usage("`model.dtype = \"f16\"` is not possible here")
                .found(found)
                .hint(hint),
        );
    };
    if s.model.device == DeviceRef::Cpu {
        refuse(
            Model::device,
            "a run on the CPU, which has no operations in f16".into(),
            "use `bf16` (the same memory, no loss scaling) or `f32`",
        );
    }
    if s.memory.frozen_products != Products::Dequantized {
        refuse(
            Memory::frozen_products,
            format!("products in {}", s.memory.frozen_products.name()),
            "remove it, or use `model.dtype = \"bf16\"`",
        );
    }
    let block = &s.tune.block;
    if s.tune.method == Method::Block && block.correction != Correction::None {
        refuse(
            BlockKeys::correction,
            format!(
                "`tune.block.correction = \"{}\"`: a correction is applied as soon as it is computed, so a step that overflows \
                 cannot be skipped",
                block.correction.name()
            ),
            "use `model.dtype = \"bf16\"`",
        );
    }
    let coefficients = [
        (Train::router_aux_loss_coef, s.train.router_aux_loss_coef),
        (Train::router_z_loss_coef, s.train.router_z_loss_coef),
    ];
    for (key, value) in coefficients {
        if value != 0.0 {
            refuse(
                key,
                "a loss of routers, which has no loss scale".into(),
                "use `model.dtype = \"bf16\"`",
            );
        }
    }
}
