//! The parameters that a method trains at each step.

use crate::base::{Error, Result};
use crate::engine::ActiveSet;
use crate::engine::active::{CorrectedParams, group_of};
use crate::hf::AdapterSet;
use crate::model::Spec;
use crate::model::spec::is_constant;
use crate::optim::{BlockSchedule, Optimizer, UpdateMasks};
use crate::recipe::{self, Correction, CorrectionScope, Method, Recipe, TuneKeys};
use crate::setup::{ActivePeriod, InactiveElements};
use crate::source::{Group, ParamInfo, StoragePolicy};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Number of block switches that are examined to find the blocks that ever train.
const SWITCHES: usize = 10_000;

/// Full, freeze and LoRA train one fixed set; the block method changes the set on a schedule.
pub enum ActiveSchedule {
    Static(ActiveSet),
    Blocks(Box<Blocks>),
}

/// The block schedule, and the correction of inactive blocks (BREAD).
pub struct Blocks {
    schedule: BlockSchedule,
    correction: Correction,
    scope: CorrectionScope,
    scale: f64,
    /// Names of the matrices of `correction = "lora"`.
    adapters: Vec<String>,
    /// Names and elements of the parameters of each block.
    sizes: Vec<Vec<(Arc<str>, u64)>>,
}

/// Names of the matrices of adapters, without rows that train beside them.
fn matrices(adapter_set: &AdapterSet) -> Vec<String> {
    let rows: BTreeSet<String> = adapter_set.trained_rows().collect();
    adapter_set.trained().filter(|name| !rows.contains(name)).collect()
}

/// Turns per block that the planner examines one by one. After that many turns each block, if it becomes active again,
/// finds that all others were trained before.
const ROUNDS: u64 = 4;
/// Number of similar sets that are planned if each of them has every parameter of the model.
const LARGE_SETS: usize = 8;

impl ActiveSchedule {
    pub fn new(recipe: &Recipe, spec: &Spec, params: &[ParamInfo], adapter_set: &AdapterSet) -> Result<Self> {
        let tune = &recipe.tune;
        recipe.train.router_losses().check(spec)?;
        let routers: BTreeSet<String> = spec.router_names().collect();
        let freezes_routers = !tune.train_router && tune.method != Method::Lora;
        if freezes_routers && routers.is_empty() {
            return Err(Error::usage("the model has no routers to freeze")
                .at(TuneKeys::train_router)
                .found("`false`, and a model without experts")
                .hint("remove `tune.train_router`"));
        }
        let frozen_router = |name: &str| freezes_routers && routers.contains(name);
        let trainable = params
            .iter()
            .filter(|p| !is_constant(&p.name) && !frozen_router(&p.name));
        let params = &trainable.cloned().collect::<Vec<_>>()[..];
        Ok(match tune.method {
            Method::Full => Self::Static(ActiveSet::new(params.iter().map(|p| p.name.to_string()))),
            Method::Freeze => {
                let layers = frozen(recipe, spec, params)?;
                let rows = adapter_set.trained_rows();
                Self::Static(ActiveSet::new(layers.names().map(str::to_string).chain(rows)))
            }
            Method::Lora => Self::Static(ActiveSet::new(adapter_set.trained())),
            Method::Block => {
                let mut schedule = BlockSchedule::new(&tune.block, params, spec.tied, recipe.train.seed)?;
                schedule.always.extend(adapter_set.trained_rows());
                let recipe::BlockConfig {
                    correction,
                    correction_scope: scope,
                    correction_scale: scale,
                    ..
                } = tune.block;
                let by_name: HashMap<&str, &ParamInfo> = params.iter().map(|p| (&*p.name, p)).collect();
                let found = |name: &String| {
                    by_name
                        .get(name.as_str())
                        .map(|p| (p.name.clone(), p.elements() as u64))
                };
                let sizes = schedule
                    .blocks
                    .iter()
                    .map(|b| b.params.iter().filter_map(found).collect());
                Self::Blocks(Box::new(Blocks {
                    sizes: sizes.collect(),
                    schedule,
                    correction,
                    scope,
                    scale,
                    adapters: matrices(adapter_set),
                }))
            }
        })
    }

    /// The schedule of the same run with these adapters: their start values decide which modules have one. `method`: that
    /// of the run.
    pub fn with_adapters(mut self, method: Method, adapter_set: &AdapterSet) -> Self {
        match &mut self {
            Self::Static(active) if method == Method::Lora => *active = ActiveSet::new(adapter_set.trained()),
            Self::Static(_) => {}
            Self::Blocks(b) => b.adapters = matrices(adapter_set),
        }
        self
    }

    /// Adds these parameters of the objective, which train in every step.
    pub fn with_objective_params(mut self, names: impl Iterator<Item = String>) -> Self {
        match &mut self {
            Self::Static(active) => *active = ActiveSet::new(active.names().map(str::to_string).chain(names)),
            Self::Blocks(b) => b.schedule.always.extend(names),
        }
        self
    }

    /// The active parameters at optimizer step `step`, counted from 1.
    pub fn active(&self, step: u64) -> ActiveSet {
        match self {
            Self::Static(active) => active.clone(),
            Self::Blocks(b) => b.set(&b.schedule.active(step), b.schedule.masks(step)),
        }
    }

    /// Returns a test that is true for parameters that train in every step of the run.
    pub fn always_trains(&self) -> Box<dyn Fn(&str) -> bool + '_> {
        match self {
            Self::Static(active) => Box::new(|name| active.contains(name)),
            Self::Blocks(b) => {
                let s = &b.schedule;
                let mut sets = s.possible();
                sets.iter_mut().for_each(|set| set.sort_unstable());
                sets.dedup();
                // A fixed block, or a mask over every parameter.
                let only = (sets.len() == 1 || s.is_masked()).then(|| b.set(&sets[0], None));
                Box::new(move |name| s.always.contains(name) || only.as_ref().is_some_and(|o| o.contains(name)))
            }
        }
    }

    /// The storage of the weights in the first step: that of `storage`, but what trains then is dense.
    pub fn start_storage(&self, storage: &StoragePolicy) -> StoragePolicy {
        let (first, mut start) = (self.active(1), storage.clone());
        for name in storage.quantized().keys().filter(|name| first.contains(name)) {
            start.set(name.clone(), None);
        }
        start
    }

    /// Every set that is active within `steps` steps, with the elements trained before it, for the planner.
    pub fn turns(&self, steps: u64, storage: &StoragePolicy) -> Arc<[ActivePeriod]> {
        match self {
            Self::Static(active) => [ActivePeriod::alone(active.clone())].into(),
            Self::Blocks(b) => b.turns(steps, storage),
        }
    }

    pub fn label(&self, step: u64) -> Option<String> {
        match self {
            Self::Static(_) => None,
            Self::Blocks(b) => Some(b.schedule.label(step)),
        }
    }

    /// Number of blocks that are active within `steps` steps, and number of all blocks; `None` if one set trains in all
    /// steps. A step counts only if `learns` is true for it.
    pub fn blocks_trained(&self, steps: u64, learns: impl Fn(u64) -> bool) -> Option<(usize, usize)> {
        let Self::Blocks(b) = self else { return None };
        let s = &b.schedule;
        if s.is_fixed() {
            return None;
        }
        let mut seen = BTreeSet::new();
        let mut first = 1;
        // Random orders may omit a block for a long time, so the search has a limit.
        for _ in 0..SWITCHES {
            if first > steps || seen.len() == s.blocks.len() {
                break;
            }
            let last = steps.min(first.saturating_add(s.switch_every - 1));
            // A step with rate 0 is followed by one above 0, so the first and the last step of a turn are enough.
            if learns(first) || learns(last) {
                seen.extend(s.active(first));
            }
            first = first.saturating_add(s.switch_every);
        }
        Some((seen.len(), s.blocks.len()))
    }

    /// True if a block that was inactive becomes active at `step`. Its optimizer state starts empty.
    pub fn switches_at(&self, step: u64) -> bool {
        matches!(self, Self::Blocks(b) if b.schedule.switches_at(step))
    }

    /// True if the optimizer state survives the switch at `step`. Adapters start again, as in BREAD's reference code.
    pub fn survives_switch(&self, name: &str, step: u64) -> bool {
        match self {
            Self::Static(_) => true,
            Self::Blocks(b) => b.schedule.survives(name, step),
        }
    }

    /// True if inactive weights change before a step is complete.
    pub fn corrects_at_once(&self) -> bool {
        matches!(self, Self::Blocks(b) if matches!(b.correction, Correction::Sgd | Correction::Signsgd))
    }

    /// Factor of the learning rate in addition to the schedule.
    pub fn warmup(&self, step: u64) -> f64 {
        match self {
            Self::Static(_) => 1.0,
            Self::Blocks(b) => b.schedule.warmup(step),
        }
    }

    /// All parameters that steps 1 to `step` have trained: the content of a checkpoint.
    pub fn trained_until(&self, step: u64) -> BTreeSet<String> {
        match self {
            Self::Static(active) => active.names().map(str::to_string).collect(),
            Self::Blocks(b) => {
                // Counts blocks: with a correction each set has the names of the whole model.
                let mut seen = BTreeSet::new();
                let mut blocks = BTreeSet::new();
                let mut lowest: Option<Vec<usize>> = None;
                let mut at = 1;
                while at <= step && seen.len() < b.schedule.blocks.len() {
                    let set = b.schedule.active(at);
                    if !set.iter().all(|block| seen.contains(block)) {
                        let corrected = b.corrected(&set);
                        blocks.extend((0..b.schedule.blocks.len()).filter(|block| corrected(*block)));
                        blocks.extend(&set);
                        if lowest.as_ref().is_none_or(|l| set.iter().min() < l.iter().min()) {
                            lowest = Some(set.clone());
                        }
                        seen.extend(set);
                    }
                    at = at.saturating_add(b.schedule.switch_every);
                }
                let mut names: BTreeSet<String> = b.schedule.always.clone();
                names.extend(
                    blocks
                        .iter()
                        .flat_map(|block| &b.schedule.blocks[*block].params)
                        .cloned(),
                );
                // With adapters as correction, the lowest set trains the most adapters.
                if let (Correction::Lora, Some(set)) = (b.correction, lowest) {
                    names.extend(b.set(&set, None).names().map(str::to_string));
                }
                names
            }
        }
    }
}

/// The optimizer of a run, with separate learning rates for some parameters.
pub fn optimizer(recipe: &Recipe, spec: &Spec, adapter_set: &AdapterSet) -> Optimizer {
    let mut optimizer = Optimizer::new(recipe.optimizer.clone()).with_seed(recipe.train.seed);
    let block = &recipe.tune.block;
    if recipe.tune.method == Method::Block && block.correction == recipe::Correction::Lora {
        optimizer.set_rate(".lora_A.weight", block.correction_scale);
        optimizer.set_rate(".lora_B.weight", block.correction_scale);
    }
    // LoRA+ (Hayou et al. 2024, arXiv 2402.12354): B has a higher rate than A. PEFT groups all vectors with B.
    let ratio = recipe.tune.lora.loraplus_lr_ratio;
    if recipe.tune.method == Method::Lora && ratio != 1.0 {
        optimizer.set_rate(".lora_B.weight", ratio);
        optimizer.set_rate(".lora_magnitude_vector", ratio);
        let params = spec.params();
        let vectors = params.iter().filter(|p| p.shape.len() == 1);
        for vector in vectors.filter(|p| adapter_set.whole.iter().any(|name| *name == *p.name)) {
            optimizer.set_rate(&vector.name, ratio);
        }
    }
    optimizer
}

impl Blocks {
    fn turns(&self, steps: u64, storage: &StoragePolicy) -> Arc<[ActivePeriod]> {
        let s = &self.schedule;
        // All turns are alike.
        if let Some(masks) = s.masks(1) {
            return [ActivePeriod::alone(self.set(&[0], Some(masks)))].into();
        }
        let count = steps.div_ceil(s.switch_every.max(1)).max(1);
        let long = count > ROUNDS * s.blocks.len() as u64;
        let sets = if long { s.possible() } else { s.turns(count) };
        let inactive: Vec<InactiveElements> = self
            .sizes
            .iter()
            .map(|block| inactive_storage(block, storage))
            .collect();
        // Blocks trained so far. A long run assumes that every block was trained before each turn.
        let mut trained = vec![false; s.blocks.len()];
        if long {
            sets.iter().flatten().for_each(|b| trained[*b] = true);
        }
        let mut turns: BTreeMap<Vec<usize>, (InactiveElements, bool)> = BTreeMap::new();
        let end = sets.len() - 1;
        for (i, set) in sets.into_iter().enumerate() {
            let corrected = self.corrected(&set);
            let found = (0..trained.len()).filter(|b| trained[*b] && !set.contains(b) && !corrected(*b));
            let found = found.fold(InactiveElements::default(), |sum, b| InactiveElements {
                dense: sum.dense + inactive[b].dense,
                quantized: sum.quantized + inactive[b].quantized,
            });
            (0..trained.len())
                .filter(|b| corrected(*b))
                .chain(set.iter().copied())
                .for_each(|b| trained[b] = true);
            // If a set occurs twice, the later turn has more trained blocks.
            let deactivates = long || i < end;
            let kept = turns.entry(set).or_insert((found, deactivates));
            *kept = (found, kept.1 || deactivates);
        }
        let alone = turns.len() == 1;
        let turns: Vec<ActiveBlocks> = turns
            .into_iter()
            .map(|(set, (inactive, deactivates))| (set, inactive, deactivates && !alone))
            .collect();
        let turns = self.fewer(turns, storage).into_iter();
        turns
            .map(|(set, inactive, deactivates)| ActivePeriod {
                active: self.set(&set, None),
                inactive,
                deactivates,
            })
            .collect()
    }

    /// With a correction each set has every parameter of the model: a few sets represent all similar ones.
    fn fewer(&self, turns: Vec<ActiveBlocks>, storage: &StoragePolicy) -> Vec<ActiveBlocks> {
        if self.correction == Correction::None {
            return turns;
        }
        let mut alike: BTreeMap<(u64, Vec<InactiveElements>), Vec<ActiveBlocks>> = BTreeMap::new();
        for turn in turns {
            let names = turn.0.iter().flat_map(|b| &self.schedule.blocks[*b].params);
            let shape = ActiveSet::new(names.cloned()).shape();
            let storages = turn
                .0
                .iter()
                .map(|b| inactive_storage(&self.sizes[*b], storage))
                .collect();
            alike.entry((shape, storages)).or_default().push(turn);
        }
        let mut out = Vec::new();
        for all in alike.into_values() {
            // At equal distances, with the lowest and the highest set.
            let count = all.len().min(LARGE_SETS);
            let at = |i: usize| i * (all.len() - 1) / (count - 1).max(1);
            out.extend((0..count).map(|i| all[at(i)].clone()));
        }
        out
    }

    /// Returns a test that is true for a block that is corrected while the blocks in `active` are active.
    fn corrected(&self, active: &[usize]) -> impl Fn(usize) -> bool + use<> {
        let at_once = matches!(self.correction, Correction::Sgd | Correction::Signsgd);
        let partial = self.scope == CorrectionScope::Partial;
        let (first, active) = (active.iter().min().copied().unwrap_or(0), active.to_vec());
        // Blocks are in model order: those after the first active block are above it.
        move |block| at_once && !active.contains(&block) && (!partial || block > first)
    }

    /// The trained and the corrected parameters while these blocks are active.
    fn set(&self, active: &[usize], masks: Option<UpdateMasks>) -> ActiveSet {
        let s = &self.schedule;
        let names: BTreeSet<String> = active
            .iter()
            .flat_map(|b| &s.blocks[*b].params)
            .chain(&s.always)
            .cloned()
            .collect();
        let first = active.iter().min().copied().unwrap_or(0);
        let partial = self.scope == CorrectionScope::Partial;
        match self.correction {
            Correction::None => ActiveSet::new(names).masked(masks),
            Correction::Sgd | Correction::Signsgd => {
                let is_corrected = self.corrected(active);
                let others = s.blocks.iter().enumerate().filter(|(i, _)| is_corrected(*i));
                let others = others.flat_map(|(_, b)| b.params.iter());
                let corrected = CorrectedParams {
                    names: others.filter(|n| !names.contains(*n)).cloned().collect(),
                    scale: self.scale,
                    sign: self.correction == Correction::Signsgd,
                };
                ActiveSet::new(names).with_corrections(Some(corrected))
            }
            Correction::Lora => {
                let lowest = s.blocks[first].params.iter().map(|n| group_of(n)).min();
                let inside = |n: &&String| !partial || lowest.is_none_or(|l| group_of(n) >= l);
                let adapters = self.adapters.iter().filter(inside).cloned();
                ActiveSet::new(names.into_iter().chain(adapters))
            }
        }
    }
}

/// Blocks that are active together, the elements deactivated before them, and whether another set follows.
type ActiveBlocks = (Vec<usize>, InactiveElements, bool);

/// Elements of a block when it is inactive, by storage: dense or quantized.
fn inactive_storage(block: &[(Arc<str>, u64)], storage: &StoragePolicy) -> InactiveElements {
    let quantized = |name: &Arc<str>| storage.quantized().contains_key(name);
    let sum = |wanted: bool| {
        block
            .iter()
            .filter(|(n, _)| quantized(n) == wanted)
            .map(|(_, n)| n)
            .sum()
    };
    InactiveElements {
        dense: sum(false),
        quantized: sum(true),
    }
}

fn frozen(recipe: &Recipe, spec: &Spec, params: &[ParamInfo]) -> Result<ActiveSet> {
    let freeze = &recipe.tune.freeze;
    let layers = spec.layers.len();
    if freeze.trainable_layers > layers {
        return Err(
            Error::usage("`tune.freeze.trainable_layers` is larger than the number of layers of the model")
                .found(freeze.trainable_layers)
                .expected(format!("at most {layers}")),
        );
    }
    for prefix in &freeze.trainable {
        if !params.iter().any(|p| p.name.starts_with(prefix.as_str())) {
            return Err(
                Error::usage(format!("`{prefix}` in `tune.freeze.trainable` matches no parameter"))
                    .hint("write the start of a parameter name, for example `lm_head.` or `model.layers.0.`"),
            );
        }
    }
    let first = layers - freeze.trainable_layers;
    let chosen: Vec<String> = params
        .iter()
        .filter(|p| {
            matches!(p.group, Group::Layer(l) if l >= first)
                || freeze
                    .trainable
                    .iter()
                    .any(|prefix| p.name.starts_with(prefix.as_str()))
        })
        .map(|p| p.name.to_string())
        .collect();
    if chosen.is_empty() && recipe.tune.rows.is_empty() {
        return Err(Error::usage("method `freeze` trains nothing")
            .hint("set `tune.freeze.trainable_layers` or name parameters in `tune.freeze.trainable`"));
    }
    Ok(ActiveSet::new(chosen))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{families, shapes};
    use crate::optim::Update;
    use crate::recipe::Dtype;
    use crate::setup::adapters;
    use candle_core::{DType, Device, Tensor};

    /// For each turn of a run: lowest layer, deactivated elements, and whether another set follows.
    fn turns(more: &str, steps: u64) -> Vec<(usize, u64, bool)> {
        let text = format!("[model]\npath = \"shape:small\"\n[tune]\nmethod = \"block\"\n[tune.block]\n{more}");
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        let spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
        let adapter_set = adapters::of(&recipe, &spec).unwrap();
        let schedule = ActiveSchedule::new(&recipe, &spec, &spec.params(), &adapter_set).unwrap();
        let turns = schedule.turns(steps, &StoragePolicy::dense(Dtype::Bf16));
        let found = turns
            .iter()
            .map(|t| (t.active.lowest_layer(99), t.inactive.dense, t.deactivates));
        found.collect()
    }

    #[test]
    fn a_short_run_retires_what_it_has_trained() {
        let spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
        let layers = spec.layers.len();
        let of_layer = spec.params().into_iter().filter(|p| p.group == Group::Layer(0));
        let one: u64 = of_layer.map(|p| p.elements() as u64).sum();
        let up = "order = \"ascending\"\nswitch_every = 1\n";
        assert_eq!(turns(up, 1), [(0, 0, false)]);
        assert_eq!(turns(up, 3), [(0, 0, true), (1, one, true), (2, 2 * one, false)]);
        // A block that becomes active again finds the others trained.
        let again = turns(up, layers as u64 + 1);
        assert_eq!(again[0], (0, (layers as u64 - 1) * one, true));
        assert_eq!(again[1], (1, one, true));
        // In a long run each block finds all others trained.
        for steps in [5 * layers as u64, u64::MAX] {
            for more in [up, "switch_every = 1\n", "order = \"descending\"\nswitch_every = 1\n"] {
                let all = turns(more, steps);
                assert_eq!(all.len(), layers);
                assert!(
                    all.iter().all(|t| (t.1, t.2) == ((layers as u64 - 1) * one, true)),
                    "{more} {all:?}"
                );
            }
        }
        // One fixed block, and masks over all parameters, deactivate nothing.
        assert_eq!(
            turns("order = \"fixed\"\nstart_block = 1\nswitch_every = 1\n", 50),
            [(1, 0, false)]
        );
        assert_eq!(turns("partition = \"ratio\"\nswitch_every = 1\n", 50), [(0, 0, false)]);
        // A corrected block is not counted as inactive.
        let corrected = turns(&format!("{up}correction = \"sgd\"\n"), 50);
        assert!(
            corrected.len() <= LARGE_SETS && corrected.iter().all(|t| t.1 == 0),
            "{corrected:?}"
        );
    }

    /// Rates of one step of SGD without momentum, with gradients of one.
    #[test]
    fn loraplus_trains_b_and_vectors_faster() {
        let text = "[model]\npath = \"shape:small\"\n[tune]\nmethod = \"lora\"\n[tune.lora]\nloraplus_lr_ratio = 8.0\n\
                    modules_to_save = [\"norm\", \"embed_tokens\"]\n[optimizer]\nname = \"sgd\"\nmomentum = 0.0\nweight_decay = 0.0\n";
        let recipe = recipe::parse(text, "r.toml", &[]).unwrap().recipe;
        let spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
        let adapter_set = adapters::of(&recipe, &spec).unwrap();
        let mut optimizer = optimizer(&recipe, &spec, &adapter_set);
        optimizer.begin(1);
        let mut moved = |name: &str, dims: &[usize]| {
            let weight = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
            let gradient = Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
            let update = Update {
                name,
                weight: &weight,
                gradient: &gradient,
                subset: None,
            };
            optimizer.update_all(&[update], 0.5, 1.0).unwrap();
            -weight.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0]
        };
        let layer = "model.layers.0.";
        assert_eq!(moved(&format!("{layer}self_attn.q_proj.lora_A.weight"), &[4, 4]), 0.5);
        assert_eq!(moved(&format!("{layer}self_attn.q_proj.lora_B.weight"), &[4, 4]), 4.0);
        assert_eq!(
            moved(&format!("{layer}self_attn.q_proj.lora_magnitude_vector"), &[4]),
            4.0
        );
        assert_eq!(moved("model.norm.weight", &[4]), 4.0);
        assert_eq!(moved(&format!("{layer}input_layernorm.weight"), &[4]), 4.0);
        assert_eq!(moved("model.embed_tokens.weight", &[4, 4]), 0.5);
    }

    #[test]
    fn a_random_order_is_drawn_as_the_run_draws_it() {
        let text = "[model]\npath = \"shape:small\"\n[tune]\nmethod = \"block\"\nblock.switch_every = 3\n";
        let recipe = recipe::parse(text, "r.toml", &[]).unwrap().recipe;
        let spec = families::read(&shapes::config("shape:small").unwrap().unwrap()).unwrap();
        let adapter_set = adapters::of(&recipe, &spec).unwrap();
        let schedule = ActiveSchedule::new(&recipe, &spec, &spec.params(), &adapter_set).unwrap();
        let ActiveSchedule::Blocks(b) = &schedule else {
            panic!("blocks")
        };
        let count = 3 * spec.layers.len() as u64 + 1;
        let want: Vec<Vec<usize>> = (0..count).map(|turn| b.schedule.active(3 * turn + 1)).collect();
        assert_eq!(b.schedule.turns(count), want);
        let few = schedule.turns(4, &StoragePolicy::dense(Dtype::Bf16));
        let mut lowest: Vec<usize> = few.iter().map(|t| t.active.lowest_layer(99)).collect();
        let mut drawn = vec![want[0][0], want[1][0]];
        lowest.sort_unstable();
        drawn.sort_unstable();
        assert_eq!(lowest, drawn);
    }
}
