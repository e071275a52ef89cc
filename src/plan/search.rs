//! Enumerates the strategies for a step that a recipe allows, and chooses the fastest that fits.

use super::{AdapterCosts, Plan, PlanInputs, PlanModel, ReferenceMemory, layer_graphs};
use crate::base::{Error, Result};
use crate::engine::{GradientStorage, StepStrategy};
use crate::generate;
use crate::model::{Adapters, Spec};
use crate::ops::cross_entropy::PIECE;
use crate::ops::quantized::Products;
use crate::peft::{Adapter, AdapterCost};
use crate::plan::gpu_time::GpuRates;
use crate::plan::knee::FastStep;
use crate::plan::memory_plan::{MemoryLimits, ProcessState};
use crate::quant::Format;
use crate::recipe::{
    Activations, Auto, ChunkSize, Correction, Dtype, LoraInit, Memory, Method, PeftType, RankWeights, Recipe, Tier,
    WeightStorage,
};
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::prompts::{self, Reference};
use crate::setup::rewards::RewardModelSpec;
use crate::setup::row_sizes::RowSizes;
use crate::setup::teacher::TeacherSpec;
use crate::setup::{self, StoredWeights};
use crate::source::Placement;
use crate::source::StoragePolicy;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Tokens per MLP chunk, if all tokens together do not fit.
const MLP_TOKENS: [usize; 3] = [1024, 512, 256];

/// The inputs of a plan, beside the recipe.
#[derive(Clone, Copy)]
pub(super) struct PlanContext<'a> {
    pub spec: &'a Spec,
    pub adapters: &'a Adapters,
    pub schedule: &'a ActiveSchedule,
    /// `None`: every row has the largest length.
    pub rows: Option<&'a RowSizes>,
    pub stored: &'a StoredWeights,
    pub on_gpu: bool,
    pub gpu_rates: &'static GpuRates,
    /// Layers can run as CUDA graphs.
    pub graphs: bool,
    /// Loaded beside the model.
    pub teacher: Option<&'a TeacherSpec>,
    pub judges: &'a Arc<[RewardModelSpec]>,
    pub process: ProcessState,
}

/// Data that all plans of a recipe with one storage share, so the model is inspected once.
pub(super) struct PlanBase<'a> {
    model: PlanModel<'a>,
    /// Only the strategy is open.
    inputs: PlanInputs,
}

impl PlanBase<'_> {
    pub(super) fn inputs(&self, strategy: &StepStrategy) -> PlanInputs {
        PlanInputs {
            strategy: strategy.clone(),
            ..self.inputs.clone()
        }
    }

    /// The estimated time of a step.
    pub(super) fn seconds(&self, recipe: &Recipe, inputs: &PlanInputs) -> f64 {
        super::seconds_of(&self.model, recipe, inputs)
    }
}

/// The chosen strategy, which may or may not fit.
pub(super) struct PlannedStrategy {
    /// The inputs of the plan, with the strategy.
    pub inputs: PlanInputs,
    /// The lossy storage of frozen weights, if the recipe leaves the storage open and the lossless one does not fit.
    pub lossy: Option<WeightStorage>,
    pub plan: Plan,
    pub seconds: f64,
    pub fits: bool,
    /// The fastest strategy, if it takes memory that does not pay (see `knee`).
    pub fast: Option<FastStep>,
}

impl PlannedStrategy {
    /// True if `other` exceeds the limits by less.
    fn is_above(&self, other: &Plan, limits: MemoryLimits) -> bool {
        over(other, limits) < over(&self.plan, limits)
    }
}

/// Bytes by which a plan exceeds the limits of device and host, and its peak.
pub(super) fn over(plan: &Plan, limits: MemoryLimits) -> (u64, u64) {
    let above = |bytes: u64, most: Option<u64>| most.map_or(0, |most| bytes.saturating_sub(most));
    let host = above(plan.peak_host_bytes.unwrap_or(0), limits.host);
    (above(plan.peak_bytes, limits.most) + host, plan.peak_bytes)
}

/// True if the device peak is at most `goal` and the host peak at most `host`.
pub(super) fn fits(plan: &Plan, goal: Option<u64>, host: Option<u64>) -> bool {
    let below = |bytes: u64, most: Option<u64>| most.is_none_or(|most| bytes <= most);
    below(plan.peak_bytes, goal) && below(plan.peak_host_bytes.unwrap_or(0), host)
}

fn no_tier(recipe: &Recipe) -> Error {
    Error::new("no memory tier is possible for the weights")
        .at("memory.tier")
        .found(recipe.memory.tier.name())
        .hint("set `memory.tier` and `distributed.weights` to \"auto\"")
}

impl PlanContext<'_> {
    /// Returns the fastest lossless strategy within the goal; else the fastest that fits at all; else the same with
    /// quantized weights of ever fewer bits; else the smallest. Memory that does not pay is not taken (see `knee`).
    pub fn choose(&self, recipe: &Recipe, limits: MemoryLimits) -> Result<PlannedStrategy> {
        let mut smallest: Option<PlannedStrategy> = None;
        for lossy in self.storages(recipe) {
            let base = self.base(recipe, lossy)?;
            let mut goals = vec![limits.most];
            if lossy.is_none() && limits.goal != limits.most {
                goals.insert(0, limits.goal);
            }
            for goal in goals {
                let within = MemoryLimits { goal, ..limits };
                for &whole in self.whole_first(recipe) {
                    let found = self.fastest(recipe, &base, lossy, within, whole)?;
                    if found.fits {
                        return self.balanced(recipe, &base, found, within);
                    }
                    if smallest.as_ref().is_none_or(|old| old.is_above(&found.plan, limits)) {
                        smallest = Some(found);
                    }
                }
            }
        }
        smallest.ok_or_else(|| no_tier(recipe))
    }

    /// If it is open where the weights of several ranks are: first only whole weights on every rank, then all strategies.
    fn whole_first(&self, recipe: &Recipe) -> &'static [bool] {
        let weights = &recipe.distributed;
        let open =
            self.process.ranks > 1 && !self.on_gpu && weights.weights == RankWeights::Auto && weights.sync_every == 0;
        match recipe.memory.tier {
            Tier::Auto | Tier::Device if open => &[true, false],
            _ => &[false],
        }
    }

    /// Returns the fastest strategy within `limits.goal`. `whole`: with all weights on the device.
    fn fastest(
        &self,
        recipe: &Recipe,
        base: &PlanBase,
        lossy: Option<WeightStorage>,
        limits: MemoryLimits,
        whole: bool,
    ) -> Result<PlannedStrategy> {
        let range = self.saved_layers(recipe)?;
        let seconds = |inputs: &PlanInputs| base.seconds(recipe, inputs);
        let mut strategies: Vec<(f64, StepStrategy)> = Vec::new();
        let allowed = |strategy: &StepStrategy| !whole || strategy.placement == Placement::Device;
        for strategy in self.strategies(recipe, base)?.into_iter().filter(allowed) {
            let at_best = StepStrategy {
                saved_layers: if strategy.layer_graphs { 0 } else { *range.end() },
                ..strategy.clone()
            };
            strategies.push((seconds(&base.inputs(&at_best)), strategy));
        }
        // A stable sort: of equally fast strategies the first one is chosen.
        strategies.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut best: Option<PlannedStrategy> = None;
        for (at_best, strategy) in strategies {
            if best.as_ref().is_some_and(|b| b.fits && b.seconds <= at_best) {
                break;
            }
            let range = if strategy.layer_graphs { 0..=0 } else { range.clone() };
            let (strategy, plan, fits) = self.most_saved(recipe, base, strategy, limits, range);
            let inputs = base.inputs(&strategy);
            let seconds = seconds(&inputs);
            let better = best.as_ref().is_none_or(|b| match (fits, b.fits) {
                (true, true) => seconds < b.seconds,
                (false, false) => b.is_above(&plan, limits),
                (fits, _) => fits,
            });
            if better {
                best = Some(PlannedStrategy {
                    inputs,
                    lossy,
                    plan,
                    seconds,
                    fits,
                    fast: None,
                });
            }
        }
        best.ok_or_else(|| no_tier(recipe))
    }

    /// The numbers of layers with saved activations that the recipe allows.
    pub(super) fn saved_layers(&self, recipe: &Recipe) -> Result<RangeInclusive<usize>> {
        let layers = self.spec.layers.len();
        if recipe.memory.activations == Activations::Host && !self.on_gpu {
            return Err(Error::usage("`memory.activations = \"host\"` has no effect on a CPU")
                .at(Memory::activations)
                .found("a CPU run: host memory and device memory are the same")
                .hint("use `recompute`: it needs the least memory"));
        }
        Ok(match recipe.memory.activations {
            Activations::Keep => layers..=layers,
            Activations::Recompute | Activations::Host => 0..=0,
            Activations::Auto => 0..=layers,
        })
    }

    /// The strategy with the largest number of layers with saved activations within `limits.goal`; the start of `range`
    /// if none fits.
    fn most_saved(
        &self,
        recipe: &Recipe,
        base: &PlanBase,
        mut strategy: StepStrategy,
        limits: MemoryLimits,
        range: RangeInclusive<usize>,
    ) -> (StepStrategy, Plan, bool) {
        let mut plan = |saved_layers| {
            strategy.saved_layers = saved_layers;
            self.plan(recipe, base, &strategy)
        };
        let fits = |plan: &Plan| fits(plan, limits.goal, limits.host);
        let (mut low, mut high) = (*range.start(), range.end() + 1);
        let mut chosen = plan(low);
        let any_fits = fits(&chosen);
        // `low` fits, `high` does not.
        let mut middle = *range.end();
        while any_fits && high - low > 1 {
            let tried = plan(middle);
            if fits(&tried) {
                (low, chosen) = (middle, tried)
            } else {
                high = middle
            }
            middle = (low + high) / 2;
        }
        strategy.saved_layers = low;
        (strategy, chosen, any_fits)
    }

    /// Storage types for frozen weights, the lossless one first.
    fn storages(&self, recipe: &Recipe) -> Vec<Option<WeightStorage>> {
        let open = recipe.memory.frozen_weights == Auto::Auto
            && recipe.tune.method != Method::Full
            && (self.stored.codes.is_empty() || self.stored.is_dequantized(recipe.tune.method))
            && !corrects_all(recipe);
        if open && recipe.memory.frozen_products != Products::Dequantized {
            vec![Some(WeightStorage::Int8)]
        } else if open {
            vec![None, Some(WeightStorage::Int8), Some(WeightStorage::Nf4)]
        } else {
            vec![None]
        }
    }

    pub(super) fn policy(&self, recipe: &Recipe, lossy: Option<WeightStorage>) -> Result<StoragePolicy> {
        let mut wanted = recipe.memory.clone();
        wanted.frozen_weights = lossy.map_or(wanted.frozen_weights, Auto::Of);
        // Parameters that train only in some blocks are stored like frozen ones while they are inactive.
        let always = self.schedule.always_trains();
        let mut storage = StoragePolicy::new(&wanted.storage_rules(), recipe.model.dtype, &self.spec.params(), always)?;
        if corrects_all(recipe) && !storage.quantized().is_empty() {
            return Err(Error::usage(format!(
                "`tune.block.correction = \"{}\"` changes every weight a little in each step; quantized weights \
                     would lose every change smaller than the distance between two quantized values",
                recipe.tune.block.correction.name()
            ))
            .found(storage.describe())
            .hint("leave `memory.frozen_weights` at `auto`, or use another correction"));
        }
        let keeps = |name: &str| match recipe.tune.method {
            Method::Lora => true,
            Method::Freeze => !self.schedule.active(1).contains(name),
            Method::Full | Method::Block => false,
        };
        for (name, format) in &self.stored.codes {
            if keeps(name) {
                storage.keep(name.clone(), *format);
            }
        }
        if let (true, Some(format)) = (
            self.stored.is_dequantized(recipe.tune.method),
            self.stored.codes.values().next(),
        ) {
            let others = match recipe.tune.method {
                Method::Freeze => "the other weights stay quantized",
                _ => "`tune.method = \"lora\"` keeps them quantized",
            };
            setup::warn_once(&format!(
                "the weights of this model are quantized ({format}): `tune.method = \"{}\"` trains their \
                 dequantized values, from a copy in {} in the run directory; {others}",
                recipe.tune.method.name(),
                recipe.model.dtype.name()
            ));
        }
        if !storage.products_apply() {
            return Err(Error::unsupported("no projection has products of 8-bit operands")
                .at(Memory::frozen_products)
                .expected("frozen projections that are stored as int8 with one scale per row")
                .hint("set `memory.frozen_weights = \"int8\"`, or remove `memory.frozen_products`"));
        }
        self.check_start(recipe)?;
        Ok(storage)
    }

    /// Errors: quantized weights from which the new adapters cannot start.
    fn check_start(&self, recipe: &Recipe) -> Result<()> {
        let key = "`tune.lora.init_lora_weights";
        if starts(recipe, LoraInit::Loftq) && !self.stored.codes.is_empty() {
            return Err(
                Error::usage(format!("{key} = \"loftq\"` needs the weights before quantization"))
                    .found("quantized files")
                    .hint("give the model's unquantized weights, with `memory.frozen_weights = \"nf4\"`"),
            );
        }
        Ok(())
    }

    /// Errors: LoftQ, and no weight with an adapter is quantized.
    pub fn check_loftq(&self, recipe: &Recipe, storage: &StoragePolicy) -> Result<()> {
        let quantized = |module: &String| {
            let format = storage.quantized().get(format!("{module}.weight").as_str());
            format.is_some_and(|format| *format != Format::Bf16)
        };
        if starts(recipe, LoraInit::Loftq) && !self.adapters.keys().any(quantized) {
            return Err(
                Error::usage("`tune.lora.init_lora_weights = \"loftq\"` needs quantized weights")
                    .found(format!(
                        "`memory.frozen_weights = \"{}\"`",
                        recipe.memory.frozen_weights.name()
                    ))
                    .expected("quantized projections with adapters")
                    .hint("set `memory.frozen_weights` to `nf4`, `int4` or `int8`"),
            );
        }
        Ok(())
    }

    /// All strategies that the recipe allows, the simplest first; the number of saved layers is open.
    pub(super) fn strategies(&self, recipe: &Recipe, base: &PlanBase) -> Result<Vec<StepStrategy>> {
        let choose = |keep_fits| {
            let all_active = recipe.tune.method == Method::Full;
            let micro_batches = recipe.train.gradient_accumulation_steps;
            match GradientStorage::choose(micro_batches, recipe.train.max_grad_norm, all_active, keep_fits) {
                // A step with a loss scale can be skipped, so no gradient is applied before all are known to be finite.
                GradientStorage::Fused if recipe.model.dtype == Dtype::F16 && keep_fits => GradientStorage::Keep,
                GradientStorage::Fused if recipe.model.dtype == Dtype::F16 => GradientStorage::NormFirst,
                gradients => gradients,
            }
        };
        let mut gradients = vec![choose(true)];
        // AdaLoRA allocates ranks from the gradients of the whole step, so the engine always keeps them.
        let needed = self.adapters.values().any(|a| matches!(**a, Adapter::Adalora(_)));
        if choose(false) != choose(true) && !needed {
            gradients.push(choose(false));
        }
        let mlp: Vec<Option<usize>> = match recipe.memory.mlp_chunk {
            ChunkSize::Whole => vec![None],
            ChunkSize::Of(tokens) => vec![Some(tokens)],
            ChunkSize::Auto => {
                let smaller = MLP_TOKENS.into_iter().filter(|n| *n < base.inputs.tokens);
                std::iter::once(None).chain(smaller.map(Some)).collect()
            }
        };
        let mut all = Vec::new();
        for placement in self.placements(recipe)? {
            for &gradients in &gradients {
                all.extend(mlp.iter().map(|&mlp_tokens| StepStrategy {
                    gradients,
                    mlp_tokens,
                    placement,
                    ..base.inputs.strategy.clone()
                }));
                if placement == Placement::Device && self.has_layer_graphs(recipe, base) {
                    all.push(StepStrategy {
                        gradients,
                        mlp_tokens: mlp[0],
                        placement,
                        layer_graphs: true,
                        ..base.inputs.strategy.clone()
                    });
                }
            }
        }
        Ok(all)
    }

    /// True if all layers can run as CUDA graphs, which save no activations.
    fn has_layer_graphs(&self, recipe: &Recipe, base: &PlanBase) -> bool {
        self.graphs
            && recipe.memory.activations != Activations::Keep
            && base.inputs.sequence.ranks == 1
            && layer_graphs::apply(self.spec, self.adapters, &base.inputs.strategy.storage)
    }

    /// Where the weights may live, the fastest first.
    fn placements(&self, recipe: &Recipe) -> Result<Vec<Placement>> {
        let disk: Vec<Placement> = match recipe.memory.head_chunk {
            ChunkSize::Whole => vec![Placement::Disk { head_rows: None }],
            ChunkSize::Of(rows) => vec![Placement::Disk {
                head_rows: Some(rows.next_multiple_of(PIECE)),
            }],
            ChunkSize::Auto => [None, Some(PIECE)]
                .map(|head_rows| Placement::Disk { head_rows })
                .to_vec(),
        };
        let on_gpu = self.on_gpu;
        // Ranks that train alone have other weights.
        let divides = self.process.ranks > 1 && recipe.distributed.sync_every == 0;
        match (divides, recipe.distributed.weights) {
            (true, RankWeights::Sharded | RankWeights::ShardedInNode) => {
                return self.sharded(recipe).map(|placement| vec![placement]);
            }
            (true, RankWeights::ExpertParallel) => {
                return self.expert_parallel(recipe).map(|placement| vec![placement]);
            }
            (true, RankWeights::Host) => return self.shared_files(recipe).map(|()| disk),
            (true, RankWeights::Auto) if on_gpu => {}
            (true, RankWeights::Auto) if recipe.memory.tier == Tier::Device => {
                return Ok([Placement::Device]
                    .into_iter()
                    .chain(self.sharded(recipe).ok())
                    .collect());
            }
            (true, RankWeights::Auto) if recipe.memory.tier == Tier::Auto && !corrects_all(recipe) => {
                let in_memory = [Placement::Device].into_iter().chain(self.sharded(recipe).ok());
                return Ok(in_memory.chain(disk).collect());
            }
            _ => {}
        }
        match recipe.memory.tier {
            // On a CPU the host's memory is the device's.
            Tier::Device => Ok(vec![Placement::Device]),
            Tier::Host if !on_gpu => Ok(vec![Placement::Device]),
            // These corrections change every weight, but only trained parameters are written back to the disk.
            Tier::Auto if corrects_all(recipe) => Ok(vec![Placement::Device]),
            Tier::Host | Tier::Disk if corrects_all(recipe) => Err(Error::usage(format!(
                "`tune.block.correction = \"{}\"` changes every layer in each step, so with `memory.tier = \"{}\"` the whole \
                 model would be written back in each step",
                recipe.tune.block.correction.name(),
                recipe.memory.tier.name()
            ))
            .hint("use `memory.tier = \"device\"`, or another correction")),
            Tier::Host => Ok(vec![Placement::Host]),
            Tier::Auto if on_gpu => Ok([&[Placement::Device, Placement::Host], &disk[..]].concat()),
            Tier::Auto => Ok([&[Placement::Device], &disk[..]].concat()),
            Tier::Disk => Ok(disk),
        }
    }

    /// The shared data of all plans of `recipe` with one storage.
    pub fn base(&self, recipe: &Recipe, lossy: Option<WeightStorage>) -> Result<PlanBase<'_>> {
        let storage = self.policy(recipe, lossy)?;
        let costs = super::costs(self.adapters);
        Ok(PlanBase {
            model: PlanModel::new(self.spec, &storage, &costs),
            inputs: self.measured(recipe, storage, costs),
        })
    }

    pub fn plan(&self, recipe: &Recipe, base: &PlanBase, strategy: &StepStrategy) -> Plan {
        super::forecast_of(&base.model, recipe, &base.inputs(strategy))
    }

    /// The inputs of a plan: largest micro-batch of these rows, and active parameters of the run.
    fn measured(&self, recipe: &Recipe, storage: StoragePolicy, costs: AdapterCosts) -> PlanInputs {
        let sizes = self.rows.and_then(|rows| Some((rows, rows.of(recipe)?)));
        // Without rows the number of steps is known only if the recipe sets it.
        let given = u64::try_from(recipe.train.max_steps).ok();
        let steps = sizes.as_ref().map(|(_, sizes)| sizes.steps).or(given);
        let turns = self.schedule.turns(steps.unwrap_or(u64::MAX), &storage);
        let strategy = StepStrategy {
            storage,
            offload_inputs: recipe.memory.activations == Activations::Host,
            ..StepStrategy::new(recipe.model.dtype)
        };
        let mut inputs = PlanInputs::of_recipe(recipe, turns, costs, strategy, self.process);
        // Weights that stay as the files have them are not read as numbers.
        inputs.file_bytes = if self.stored.is_dequantized(recipe.tune.method) && recipe.tune.method != Method::Freeze {
            recipe.model.dtype.bytes()
        } else {
            self.stored.number_bytes.unwrap_or(inputs.file_bytes)
        };
        (inputs.on_gpu, inputs.gpu_rates) = (self.on_gpu, self.gpu_rates);
        inputs.reference = self.reference(recipe, &inputs);
        if prompts::reinforces(recipe) {
            // At most this many answers are generated at a time.
            inputs.rollout = prompts::answers_of_rollout(recipe).min(generate::GenerateLimits::default().rows);
        }
        if self.on_gpu && recipe.model.dtype.is_short() {
            inputs.element = 2;
        }
        inputs.teacher = self.teacher.cloned();
        inputs.judges = self.judges.clone();
        if let Some((rows, sizes)) = sizes {
            inputs.batch_tokens = sizes.largest.tokens;
            inputs.tokens = sizes.largest.tokens.div_ceil(inputs.sequence.ranks);
            inputs.longest = sizes.largest.longest;
            inputs.documents = sizes.largest.documents;
            inputs.micro_batches = sizes.micro_batches;
            inputs.evaluation = rows.evaluation(recipe);
            // The rows are loaded already: their memory is part of the process.
            inputs.data_bytes = sizes.data_bytes;
            inputs.process_bytes = inputs.process_bytes.saturating_sub(inputs.data_bytes);
        }
        inputs
    }

    /// The memory of the reference of an RL stage.
    fn reference(&self, recipe: &Recipe, inputs: &PlanInputs) -> ReferenceMemory {
        let reference = prompts::reference(recipe, self.spec, self.schedule);
        let mut memory = ReferenceMemory::default();
        if reference == Reference::Copy {
            let (storage, params) = (
                self.schedule.start_storage(&inputs.strategy.storage),
                self.spec.params(),
            );
            let quantized = params.iter().filter(|p| storage.of(p).is_quantized());
            let read = quantized.map(|p| inputs.file_bytes * p.elements() as u64).max();
            (memory.held, memory.read) = (storage.bytes(&params), read.unwrap_or(0));
        }
        let own_weights_or_adapters = matches!(reference, Reference::Copy | Reference::StartAdapters);
        if own_weights_or_adapters && prompts::starts_with_adapters(recipe) {
            let elements = |shape: &Vec<usize>| shape.iter().product::<usize>() as u64;
            let trained = |c: &AdapterCost| c.trained.iter().map(|(_, shape)| elements(shape)).sum::<u64>();
            memory.held += 4 * inputs.adapters.values().map(|c| c.fixed + trained(c)).sum::<u64>();
        }
        memory
    }

    /// The smallest peak of all strategies of this kind.
    pub fn least(
        &self,
        recipe: &Recipe,
        base: &PlanBase,
        allowed: impl Fn(&StepStrategy) -> bool,
    ) -> Result<Option<Plan>> {
        let saved_layers = match recipe.memory.activations {
            Activations::Keep => self.spec.layers.len(),
            _ => 0,
        };
        let plans = self.strategies(recipe, base)?.into_iter().filter(allowed).map(|s| {
            let strategy = StepStrategy { saved_layers, ..s };
            self.plan(recipe, base, &strategy)
        });
        Ok(plans.min_by_key(|plan| plan.peak_bytes))
    }
}

/// True if new adapters have this initialization.
fn starts(recipe: &Recipe, init: LoraInit) -> bool {
    let lora = &recipe.tune.lora;
    let fresh = lora.adapter.is_none() && lora.peft_type == PeftType::Lora;
    recipe.tune.method == Method::Lora && fresh && lora.init_lora_weights == init
}

/// True if a correction changes every weight.
pub(super) fn corrects_all(recipe: &Recipe) -> bool {
    let correction = recipe.tune.block.correction;
    recipe.tune.method == Method::Block && matches!(correction, Correction::Sgd | Correction::Signsgd)
}
