//! Adapters.

use super::*;
use crate::peft::targets::{is_regex, layers_in_pattern};

section! {
    /// Adapters. Names and meaning as in PEFT.
    pub struct LoraKeys in "tune.lora", when TuneKeys::method = ["lora"] {
        /// Type of the adapter.
        peft_type: PeftType = "lora", "the most common, and every loader supports it";
        /// Rank.
        r: usize = 16, "a common choice", in between(1, 1 << 20);
        /// Scale: the output of the adapter is multiplied by `lora_alpha / r`.
        lora_alpha: f64 = 32, "twice the rank, a common choice", in POSITIVE;
        /// Dropout before the adapter.
        lora_dropout: f64 = 0.0, "one pass over the data rarely overfits", in BELOW_ONE;
        /// `all-linear`, names or name endings of modules, or one regular expression over whole module paths.
        target_modules: Vec<String> = "all-linear", "adapters on every linear layer come closest to full fine-tuning";
        /// Targets without an adapter: names or name endings, or one regular expression.
        exclude_modules: Vec<String> = [], "every target gets an adapter";
        /// Parameters with the matrices of all experts that get adapters, as in PEFT: names or name endings, such as
        /// `mlp.experts.gate_up_proj`. Then `target_modules = []` means no others.
        target_parameters: Vec<String> = [], "experts are frozen", when Self::peft_type = ["lora"];
        /// Rank of these adapters: `each` expert has `r`; `active`: `r` divided by the experts of a token; `all`: `r` divided
        /// by the number of experts.
        expert_rank: ExpertRank = "each", "as in PEFT", when Self::peft_type = ["lora"];
        /// Only these layers get adapters, counted from 0; empty is every layer.
        layers_to_transform: Vec<usize> = [], "every layer";
        /// Ranks of single modules, each as `name=rank`; names as in PEFT, the first match applies.
        rank_pattern: Vec<String> = [], "one rank for all";
        /// `lora_alpha` of single modules, each as `name=alpha`.
        alpha_pattern: Vec<String> = [], "one scale for all";
        /// Modules that are fully trained together with the adapters and saved with them, for example `lm_head`. As in PEFT
        /// an item is the end of a path: `norm` also names `input_layernorm`, `model.norm` only the last norm.
        modules_to_save: Vec<String> = [], "only adapters train";
        /// Ids of tokens, for example new tokens. Their embedding rows are trained together with the adapters; the
        /// other rows are frozen. An untied head trains the same rows; PEFT does so only if `lm_head` is named too.
        trainable_token_indices: Vec<usize> = [], "only adapters train", when Self::peft_type = ["lora", "adalora"];
        /// Initialization of the adapters.
        init_lora_weights: LoraInit = "default", "as in PEFT: A uniform, B zero";
        /// Number of training rows for the initializations `eva` and `lora_ga`, in order.
        init_samples: usize = 64, "enough for the main directions", in from(1);
        /// Power iterations of a fast randomized SVD for `pissa`; 0 is the SVD with an error below 1e-6. PEFT: `pissa_niter_N`.
        pissa_niter: usize = 0, "exact", in between(0, 1000);
        /// Iterations of `loftq`: with more than one, the weights minus the adapter are requantized in each iteration.
        loftq_iter: usize = 1, "as in PEFT", in between(1, 1000);
        /// Scale by `lora_alpha / sqrt(r)`.
        use_rslora: bool = false, "as in PEFT";
        /// Weight-decomposed adapters (DoRA): magnitude and direction of each row are trained separately.
        use_dora: bool = false, "as in PEFT";
        /// Ratio of the learning rate of B to that of A (LoRA+). Vectors of `modules_to_save` have that of B.
        loraplus_lr_ratio: f64 = 1.0, "A and B have the same learning rate", in POSITIVE;
        /// `ia3`: targets whose input is scaled instead of their output.
        feedforward_modules: Vec<String> = ["down_proj"], "as in PEFT for these models",
            when Self::peft_type = ["ia3"];
        /// `oft`: size of the rotated blocks. If it does not divide the input features of a target, the nearest size that does is used.
        oft_block_size: usize = 32, "as in PEFT", in from(2), when Self::peft_type = ["oft"];
        /// `oft`: rotations by five terms of a series instead of an inverse.
        use_cayley_neumann: bool = true, "as in PEFT: faster, nearly orthogonal", when Self::peft_type = ["oft"];
        /// `lokr`: size of the first factor.
        decompose_factor: i64 = -1, "as in PEFT: as square as possible", in between(-1, 1 << 20),
            when Self::peft_type = ["lokr"];
        /// `lokr`: the first factor may be a low-rank product too.
        decompose_both: bool = false, "as in PEFT", when Self::peft_type = ["lokr"];
        /// `vera`: initial value of the vector between the shared matrices.
        d_initial: f64 = 0.1, "as in PEFT", in POSITIVE, when Self::peft_type = ["vera"];
        /// For initializations that change the base weights (`corda`, `pissa`, `olora`, `lora_ga`): save the adapter as
        /// trained, and the changed base weights as `final/base/`.
        save_residual: bool = false, "a plain LoRA works with the original weights in every tool";
        /// With such initializations the adapter is saved as a plain LoRA of twice the rank. A number compresses it to
        /// that rank; the error is reported.
        save_rank: usize = 0, "no loss", in between(0, 1 << 20);
        /// Start from this PEFT adapter: directory, run, or hub id (`org/name`, `org/name@revision`); its config gives type, rank,
        /// targets and flags; the dropout is that of this table.
        adapter: Option<String> = "", "a new adapter";
        with corda: CordaKeys;
        with eva: EvaKeys;
        with adalora: AdaloraKeys;
    }
}

section! {
    /// CorDA: adapters are initialized from the covariance of the inputs of each linear layer.
    pub struct CordaKeys in "tune.lora.corda", when TuneKeys::method = ["lora"] {
        /// `kpm`: train the components that matter least for `data` (rows of the knowledge to preserve); `ipm`: those
        /// that matter most for `data` (rows of the task).
        method: CordaMethod = "ipm", "as in PEFT: it needs only the rows of the task";
        /// Calibration rows, in the formats of `data.train`: for `kpm` questions about the knowledge to preserve, for
        /// `ipm` rows of the task.
        data: Vec<String> = [], "the training rows", resume FREE;
        /// Number of calibration rows, in order.
        samples: usize = 256, "as in the paper", in from(1);
        /// Numerics: `peft` divides the inputs of each row by their largest value, and damps and inverts in f32, as
        /// PEFT does.
        compatible: CordaArithmetic = "ft", "all tokens have the same weight";
        /// Different ranks per module with the same total (CorDA++): higher if the inputs are less evenly distributed
        /// over the directions.
        adaptive_rank: bool = false, "one rank for all";
    }
}

section! {
    /// EVA: adapters are initialized from the main directions of the inputs.
    pub struct EvaKeys in "tune.lora.eva" {
        /// Different ranks per module with the same total: at most `rho` times `r`; higher for modules whose directions
        /// explain more variance; 1 keeps every rank.
        rho: f64 = 2.0, "as in PEFT", in ONE_OR_MORE, when TuneKeys::method = ["lora"];
    }
}

section! {
    /// AdaLoRA: every adapter starts with rank `r`; during training the least important singular values of the whole
    /// model are set to zero.
    pub struct AdaloraKeys in "tune.lora.adalora", when LoraKeys::peft_type = ["adalora"] {
        /// Mean rank of the linear layers at the end; `r` is PEFT's `init_r`. `0`: two thirds of `r`, or the ranks of a given
        /// `tune.lora.adapter`.
        target_r: usize = 0, "two thirds of `r`, as PEFT's 8 of 12",
            in between(0, 1 << 20);
        /// Number of steps before ranks are reduced.
        tinit: usize = 0, "as in PEFT", in from(0);
        /// Number of last steps, in which the ranks stay fixed.
        tfinal: usize = 0, "as in PEFT", in from(0);
        /// Steps between two allocations of ranks.
        deltaT: usize = 1, "as in PEFT", in from(1);
        /// Smoothing of the importance of each element.
        beta1: f64 = 0.85, "as in PEFT", in INSIDE_ONE;
        /// Smoothing of the uncertainty of that importance.
        beta2: f64 = 0.85, "as in PEFT", in INSIDE_ONE;
        /// Weight of the distance of A·Aᵀ and Bᵀ·B from the identity; it is part of the gradients, not of the reported
        /// loss.
        orth_reg_weight: f64 = 0.5, "as in PEFT", in POSITIVE_OR_ZERO;
    }
}

/// Parses `name=value` of a pattern key.
fn entry<T>(text: &str, value: impl Fn(&str) -> Option<T>) -> Option<(String, T)> {
    let (name, number) = text.rsplit_once('=')?;
    let name = name.trim();
    (!name.is_empty()).then_some(())?;
    Some((name.to_string(), value(number.trim())?))
}

fn rank(text: &str) -> Option<(String, usize)> {
    entry(text, |r| r.parse().ok().filter(|r| (1..=1 << 20).contains(r)))
}

fn alpha(text: &str) -> Option<(String, f64)> {
    entry(text, |a| a.parse().ok().filter(|a: &f64| a.is_finite() && *a > 0.0))
}

impl LoraKeys {
    fn targets_all(&self) -> bool {
        self.target_modules.iter().any(|t| t == "all-linear")
    }

    /// True if the initialization changes the base weights.
    fn changes_base(&self) -> bool {
        use LoraInit::*;
        matches!(self.init_lora_weights, Pissa | Olora | Corda | LoraGa)
    }
}

impl From<LoraKeys> for LoraConfig {
    fn from(keys: LoraKeys) -> Self {
        Self {
            only_parameters: keys.target_modules.is_empty(),
            target_modules: if keys.targets_all() {
                Vec::new()
            } else {
                keys.target_modules
            },
            rank_pattern: keys.rank_pattern.iter().filter_map(|t| rank(t)).collect(),
            alpha_pattern: keys.alpha_pattern.iter().filter_map(|t| alpha(t)).collect(),
            peft_type: keys.peft_type,
            r: keys.r,
            lora_alpha: keys.lora_alpha,
            lora_dropout: keys.lora_dropout,
            exclude_modules: keys.exclude_modules,
            target_parameters: keys.target_parameters,
            expert_rank: keys.expert_rank,
            layers_to_transform: keys.layers_to_transform,
            modules_to_save: keys.modules_to_save,
            trainable_token_indices: keys.trainable_token_indices,
            init_lora_weights: keys.init_lora_weights,
            init_samples: keys.init_samples,
            pissa_niter: keys.pissa_niter,
            loftq_iter: keys.loftq_iter,
            use_rslora: keys.use_rslora,
            use_dora: keys.use_dora,
            loraplus_lr_ratio: keys.loraplus_lr_ratio,
            feedforward_modules: keys.feedforward_modules,
            oft_block_size: keys.oft_block_size,
            use_cayley_neumann: keys.use_cayley_neumann,
            decompose_factor: keys.decompose_factor,
            decompose_both: keys.decompose_both,
            d_initial: keys.d_initial,
            save_residual: keys.save_residual,
            save_rank: keys.save_rank,
            adapter: keys.adapter,
            corda: CordaConfig {
                method: keys.corda.method,
                data: keys.corda.data,
                samples: keys.corda.samples,
                compatible: keys.corda.compatible,
                adaptive_rank: keys.corda.adaptive_rank,
            },
            eva: EvaConfig { rho: keys.eva.rho },
            adalora: AdaloraConfig {
                target_r: keys.adalora.target_r,
                tinit: keys.adalora.tinit,
                tfinal: keys.adalora.tfinal,
                delta_t: keys.adalora.deltaT,
                beta1: keys.adalora.beta1,
                beta2: keys.adalora.beta2,
                orth_reg_weight: keys.adalora.orth_reg_weight,
            },
        }
    }
}

/// Contradictions.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let lora = &s.tune.lora;
    let (init, init_name) = (lora.init_lora_weights, lora.init_lora_weights.name());
    let plain = lora.peft_type == PeftType::Lora;
    let corrects = s.tune.corrects_by_adapters();
    if corrects && !matches!(init, LoraInit::Default | LoraInit::Gaussian) {
        faults.add(
            &[LoraKeys::init_lora_weights, BlockKeys::correction, TuneKeys::method],
            Error::usage(format!(
                "`tune.lora.init_lora_weights = \"{init_name}\"` changes the base, which the blocks train"
            ))
            .hint("use `default` or `gaussian` with `tune.block.correction = \"lora\"`"),
        );
    }
    let all = lora.targets_all();
    let none = lora.target_modules.is_empty() && lora.target_parameters.is_empty();
    if none || (all && lora.target_modules.len() > 1) {
        faults.add(
            &[LoraKeys::target_modules],
            Error::usage(if all {
                "`all-linear` and module names contradict each other in `tune.lora.target_modules`"
            } else {
                "`tune.lora.target_modules` is empty"
            })
            .expected("`all-linear`, or names of modules"),
        );
    }
    let by_expression = matches!(lora.target_modules.as_slice(), [one] if is_regex(one));
    if by_expression && !lora.layers_to_transform.is_empty() && lora.adapter.is_none() {
        faults.add(
            &[LoraKeys::layers_to_transform, LoraKeys::target_modules],
            Error::usage(
                "`tune.lora.layers_to_transform` does not apply to a regular expression in `tune.lora.target_modules`",
            )
            .found(format!("{:?}", lora.target_modules))
            .hint(layers_in_pattern(&lora.layers_to_transform)),
        );
    }
    if corrects && !lora.target_parameters.is_empty() {
        faults.add(
            &[BlockKeys::correction, LoraKeys::target_parameters],
            Error::usage("`tune.block.correction = \"lora\"` has no adapters on the parameters of experts")
                .hint("remove `tune.lora.target_parameters`"),
        );
    }
    let ranks = lora.rank_pattern.iter().filter(|t| rank(t).is_none());
    let ranks = ranks.map(|t| (LoraKeys::rank_pattern, t, "a rank of at least 1"));
    let alphas = lora.alpha_pattern.iter().filter(|t| alpha(t).is_none());
    let alphas = alphas.map(|t| (LoraKeys::alpha_pattern, t, "a number above 0"));
    for (path, text, wanted) in ranks.chain(alphas) {
        faults.add(
            &[path],
            Error::usage(format!("`{path}` has an item that is not `name=value`"))
                .found(format!("{text:?}"))
                .expected(format!("the name of a module or its ending, `=`, and {wanted}")),
        );
    }
    if plain && init == LoraInit::Corda && lora.corda.method == CordaMethod::Kpm && lora.corda.data.is_empty() {
        faults.add(
            &[CordaKeys::method, CordaKeys::data],
            Error::usage("`tune.lora.corda.method = \"kpm\"` needs example rows of the knowledge to preserve")
                .hint("set `tune.lora.corda.data` to questions that the model must still answer"),
        );
    }
    let frozen = s.memory.frozen_weights;
    if plain
        && init == LoraInit::Loftq
        && matches!(frozen, Auto::Of(WeightStorage::F32 | WeightStorage::Bf16))
        && s.memory.overrides.is_empty()
    {
        faults.add(
            &[LoraKeys::init_lora_weights, Memory::frozen_weights],
            Error::usage("`tune.lora.init_lora_weights = \"loftq\"` needs quantized weights")
                .found(Memory::frozen_weights.is(frozen.name()))
                .hint("set `memory.frozen_weights` to `nf4`, `int4` or `int8`"),
        );
    }
    if plain && lora.use_dora && lora.changes_base() {
        faults.add(
            &[LoraKeys::use_dora, LoraKeys::init_lora_weights],
            Error::usage(format!(
                "`tune.lora.use_dora` and `tune.lora.init_lora_weights = \"{init_name}\"` contradict each other"
            ))
            .hint("DoRA needs unchanged base weights: use `default`, `gaussian` or `eva`"),
        );
    }
    let more = !lora.modules_to_save.is_empty() || !lora.trainable_token_indices.is_empty();
    if corrects && (!plain || lora.use_dora || more) {
        faults.add(
            &[
                BlockKeys::correction,
                LoraKeys::peft_type,
                LoraKeys::use_dora,
                LoraKeys::modules_to_save,
                LoraKeys::trainable_token_indices,
            ],
            Error::usage("`tune.block.correction = \"lora\"` supports only plain LoRA").hint(
                "remove `peft_type`, `use_dora`, `modules_to_save` and `trainable_token_indices` from `[tune.lora]`",
            ),
        );
    }
    if plain && init == LoraInit::Pissa && lora.lora_dropout > 0.0 {
        faults.add(
            &[LoraKeys::lora_dropout, LoraKeys::init_lora_weights],
            Error::usage(
                "`tune.lora.lora_dropout` and `tune.lora.init_lora_weights = \"pissa\"` contradict each other",
            )
            .hint("PiSSA trains the principal components of the weights: set `tune.lora.lora_dropout = 0.0`"),
        );
    }
    if lora.save_residual && lora.save_rank > 0 {
        faults.add(
            &[LoraKeys::save_residual, LoraKeys::save_rank],
            Error::usage("`tune.lora.save_residual` and `tune.lora.save_rank` contradict each other")
                .hint("the residual form does not change the rank: remove one of the keys"),
        );
    }
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    use PeftType::*;
    let lora = &s.tune.lora;
    let (kind, init) = (lora.peft_type, lora.init_lora_weights);
    let stays = [LoraKeys::adapter, LoraKeys::lora_dropout, LoraKeys::loraplus_lr_ratio].contains(&key);
    if let Some(adapter) = &lora.adapter
        && key.is_in(LoraKeys::TABLE.0)
        && !stays
    {
        return Some(format!("tune.lora.adapter = {adapter:?}"));
    }
    // The types that use the key; none: all of them.
    let types: &[PeftType] = match key {
        LoraKeys::r => &[Lora, Adalora, Vera, Loha, Lokr],
        LoraKeys::lora_alpha => &[Lora, Adalora, Loha, Lokr],
        LoraKeys::lora_dropout => &[Lora, Adalora, Vera],
        LoraKeys::rank_pattern | LoraKeys::alpha_pattern => &[Lora, Loha, Lokr],
        LoraKeys::init_lora_weights
        | LoraKeys::use_rslora
        | LoraKeys::use_dora
        | LoraKeys::expert_rank
        | LoraKeys::loraplus_lr_ratio
        | LoraKeys::save_residual
        | LoraKeys::save_rank
        | LoraKeys::pissa_niter
        | LoraKeys::loftq_iter
        | LoraKeys::init_samples
        | CordaKeys::method
        | CordaKeys::data
        | CordaKeys::samples
        | CordaKeys::compatible
        | CordaKeys::adaptive_rank
        | EvaKeys::rho => &[Lora],
        _ => return None,
    };
    if !types.contains(&kind) {
        return Some(LoraKeys::peft_type.is(kind.name()));
    }
    let used = match key {
        LoraKeys::save_residual | LoraKeys::save_rank => lora.changes_base(),
        CordaKeys::method | CordaKeys::data | CordaKeys::samples | CordaKeys::compatible | CordaKeys::adaptive_rank => {
            init == LoraInit::Corda
        }
        LoraKeys::expert_rank if lora.target_parameters.is_empty() => {
            return Some("tune.lora.target_parameters = []".to_string());
        }
        LoraKeys::pissa_niter => init == LoraInit::Pissa,
        EvaKeys::rho => init == LoraInit::Eva,
        LoraKeys::loftq_iter => init == LoraInit::Loftq,
        LoraKeys::init_samples => matches!(init, LoraInit::Eva | LoraInit::LoraGa),
        _ => true,
    };
    (!used).then(|| LoraKeys::init_lora_weights.is(init.name()))
}
