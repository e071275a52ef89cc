//! Initialization of new adapters that needs the model: its weights, the inputs of its linears on some rows, or its
//! first gradient. It works one layer at a time: covariances of only one layer exist at once.
//!
//! Letters: N tokens, I input features, O output features, R rank.

use crate::base::progress::{self, Phase};
use crate::base::{Error, Result, signal, units};
use crate::comm::Patience;
use crate::data::{Batch, Dataset};
use crate::engine::{self, ActiveSet};
use crate::formats::adapter::{AdapterConfig, Targets};
use crate::hf;
use crate::model::linear::Linear;
use crate::model::{GradSink, Network, Objective, Param};
use crate::ops::step_stats::StepStats;
use crate::ops::update;
use crate::peft::lora::scaling;
use crate::peft::start::{self, Component, Covariance, InitPair, algebra, cost};
use crate::peft::{self, Adapter, Dora, FrozenLinear, Lora};
use crate::recipe::{CordaArithmetic, LoraInit, Method, PeftType, Recipe};
use crate::setup::ModelDir;
use crate::setup::rows;
use crate::setup::sources::RowSet;
use crate::source::TrainableStore;
use crate::train::covariance::{self, ObservedBatch};
use crate::train::loftq;
use crate::train::ranks::RunRanks;
use crate::train::start_cache as cache;
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The inputs of an initialization beside the network.
pub struct AdapterInitContext<'a> {
    pub recipe: &'a Recipe,
    pub model: &'a ModelDir,
    pub objective: &'a dyn Objective,
    pub train: &'a Dataset,
    /// Fingerprint of the base weights.
    pub base: &'a str,
    /// The store of the base weights.
    pub store: &'a dyn TrainableStore,
    /// Directory where results are cached for later runs.
    pub cache: &'a Path,
    /// The ranks of the job, which all initialize the same adapters.
    pub ranks: &'a RunRanks,
    /// Receives progress messages.
    pub note: &'a mut dyn FnMut(&str),
}

/// True if the initialization changes the base weights, so a resumed run must repeat it.
pub fn requantizes_base(recipe: &Recipe) -> bool {
    let lora = &recipe.tune.lora;
    recipe.tune.method == Method::Lora
        && lora.peft_type == PeftType::Lora
        && lora.adapter.is_none()
        && lora.init_lora_weights == LoraInit::Loftq
}

/// Initializes the adapters of `network`; an adaptive method also changes ranks by module, and with them `adapter_set`.
///
/// Errors: a rank larger than a weight allows, rows that cannot be read, a signal.
pub fn fill(s: &mut AdapterInitContext, network: &mut Network, adapter_set: &mut hf::AdapterSet) -> Result<()> {
    let lora = &s.recipe.tune.lora;
    if lora.adapter.is_some() || adapter_set.config.is_none() {
        return Ok(());
    }
    if lora.peft_type == PeftType::Lora {
        match lora.init_lora_weights {
            LoraInit::Default | LoraInit::Gaussian => {}
            LoraInit::Loftq => loftq::fill(s, network)?,
            LoraInit::Pissa | LoraInit::Olora => from_weights(s, network)?,
            LoraInit::Eva => eva(s, network, adapter_set)?,
            LoraInit::Corda => corda(s, network, adapter_set)?,
            LoraInit::LoraGa => from_gradient(s, network)?,
        }
    }
    // DoRA's magnitudes are the norms of the weights with the pair.
    for layer in 0..network.linear_groups() {
        for (_, linear) in network.linears(layer)? {
            if let Some(Adapter::Dora(dora)) = linear.adapter.as_deref() {
                dora.begin(&linear)?;
            }
        }
    }
    Ok(())
}

/// One linear whose pair is to be initialized.
pub(super) struct InitTask {
    pub module: String,
    pub linear: Linear,
    adapter: Arc<Adapter>,
}

pub(super) fn tasks(network: &Network, layer: usize) -> Result<Vec<InitTask>> {
    let linears = network.linears(layer)?.into_iter();
    Ok(linears
        .filter_map(|(module, linear)| {
            let adapter = linear.adapter.clone()?;
            adapter.lora()?;
            Some(InitTask {
                module,
                linear,
                adapter,
            })
        })
        .collect())
}

impl InitTask {
    /// W in f64, `[O, I]`.
    fn weight(&self) -> Result<faer::Mat<f64>> {
        let (outputs, inputs) = self.linear.dims();
        Ok(algebra::matrix(&self.linear.rows(0, outputs)?, outputs, inputs))
    }

    pub fn lora(&self) -> Result<&Lora> {
        self.adapter
            .lora()
            .ok_or_else(|| Error::new("the initialization has no pair for an adapter").at(&self.module))
    }
}

/// Sets A and B, and the initial pair that is subtracted, if there is one.
pub(super) fn set(lora: &Lora, pair: &InitPair) -> Result<()> {
    peft::fill(&lora.a, &pair.a)?;
    peft::fill(&lora.b, &pair.b)?;
    if let Some((a, b)) = &lora.start {
        peft::fill(a, &pair.a)?;
        peft::fill(b, &pair.b)?;
    }
    Ok(())
}

/// Calls `f` for each job of a layer, some in parallel, and keeps the order; `task` returns the linear of a job.
pub(super) fn each<J: Sync, T: Send>(
    jobs: &[J],
    task: impl Fn(&J) -> &InitTask + Sync,
    f: impl Fn(&J) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let mut out = Vec::with_capacity(jobs.len());
    let dims: Vec<(usize, usize)> = jobs.iter().map(|j| task(j).linear.dims()).collect();
    for group in cost::together(&dims) {
        let some = &jobs[group];
        let one = |j: &J| f(j).map_err(|e| e.or_at(&task(j).module));
        let found: Vec<Result<T>> = some.par_iter().map(one).collect();
        for one in found {
            out.push(one?);
        }
    }
    Ok(out)
}

/// Reports progress and remaining time.
pub(super) struct InitProgress {
    name: &'static str,
    begun: Instant,
    layers: usize,
    phase: Phase,
    last: Cell<Option<Instant>>,
}

/// Least time between two progress messages; the progress line shows every layer.
const NOTES: Duration = Duration::from_secs(10);

impl InitProgress {
    pub fn new(name: &'static str, network: &Network) -> Self {
        Self {
            name,
            begun: Instant::now(),
            layers: network.linear_groups(),
            phase: progress::phase(
                format!("initializing adapters ({name})"),
                network.linear_groups(),
                "layers",
            ),
            last: Cell::new(None),
        }
    }

    /// Registers layer `done` as finished. Errors: a signal asks to stop.
    pub fn layer(&self, done: usize, note: &mut dyn FnMut(&str)) -> Result<()> {
        let left = self.begun.elapsed().as_secs_f64() / done as f64 * (self.layers - done) as f64;
        self.phase.set(done as u64);
        self.phase
            .note(format!("eta {}", units::duration(Duration::from_secs_f64(left))));
        if self.last.get().unwrap_or(self.begun).elapsed() >= NOTES {
            self.last.set(Some(Instant::now()));
            note(&format!(
                "{}: layer {done} of {}, about {left:.0} s left",
                self.name, self.layers
            ));
        }
        match signal::received() {
            Some(signal) => Err(Error::signal(
                signal,
                "stopped by a signal during the initialization of the adapters",
            )),
            None => Ok(()),
        }
    }
}

fn from_weights(s: &mut AdapterInitContext, network: &Network) -> Result<()> {
    let lora = &s.recipe.tune.lora;
    let (init, iterations, seed) = (lora.init_lora_weights, lora.pissa_niter, s.recipe.train.seed);
    let progress = InitProgress::new(init.name(), network);
    for layer in 0..network.linear_groups() {
        let tasks = tasks(network, layer)?;
        let pairs = each(
            &tasks,
            |task| task,
            |task| {
                let (w, own) = (task.weight()?, task.lora()?);
                match init {
                    LoraInit::Olora => start::olora(w.as_ref(), own.rank()),
                    _ => start::pissa(w.as_ref(), own.rank(), own.scale, iterations, seed, own.mask.site),
                }
            },
        )?;
        for (task, pair) in tasks.iter().zip(&pairs) {
            set(task.lora()?, pair)?;
        }
        progress.layer(layer + 1, s.note)?;
    }
    Ok(())
}

/// EVA result for one linear. Those with the same input share the directions of the first of them.
struct Directions {
    module: String,
    /// The first linear with the same input.
    first: usize,
    /// Of the first one: directions `[candidates, I]`, and the explained variance of each.
    rows: Vec<f32>,
    explained: Vec<f64>,
}

/// The number of directions to find at each linear with an input of its own, from the ranks and inputs of all: the most that
/// a linear with this input asks for, as in PEFT. 0: an earlier linear has the same input.
fn candidates(linears: &[(usize, &Covariance)], first_of: &[usize], rho: f64) -> Vec<usize> {
    let mut out = vec![0; linears.len()];
    for ((r, input), &first) in linears.iter().zip(first_of) {
        // Rounds half to even, as Python does.
        let own = (*r as f64 * rho).round_ties_even() as usize;
        out[first] = out[first].max(own.clamp(*r, input.size().max(*r)));
    }
    out
}

fn eva(s: &mut AdapterInitContext, network: &mut Network, adapter_set: &mut hf::AdapterSet) -> Result<()> {
    let lora = &s.recipe.tune.lora;
    let (samples, rho) = (lora.init_samples, lora.eva.rho);
    let batches = ObservedBatch::trained(&s.train.examples.head(samples)?);
    if batches.iter().all(|batch| batch.count() == 0) {
        return Err(
            Error::new("no token is trained in the rows that initialize the adapters (eva)")
                .found(format!("the first {} rows", samples.min(s.train.examples.len())))
                .hint("raise `tune.lora.init_samples`; `ft data --recipe R` shows which tokens are trained"),
        );
    }
    let progress = InitProgress::new("eva", network);
    let mut all: Vec<Directions> = Vec::new();
    let mut budget = 0;
    covariance::observe(network, &batches, CordaArithmetic::Ft, &mut |layer, seen| {
        let tasks = tasks(network, layer)?;
        let linear = |task: &InitTask| Ok((task.lora()?.rank(), seen.of(&task.module)?));
        let linears: Vec<(usize, &Covariance)> = tasks.iter().map(linear).collect::<Result<_>>()?;
        let same = |own: &Covariance| linears.iter().position(|(_, other)| std::ptr::eq(*other, own));
        let first_of: Vec<usize> = linears.iter().map(|(_, own)| same(own).unwrap_or(0)).collect();
        budget += linears.iter().map(|(r, _)| r).sum::<usize>();
        let counts = candidates(&linears, &first_of, rho);
        let jobs = counts.into_iter().enumerate().filter(|(_, count)| *count > 0);
        let jobs: Vec<(usize, usize, &InitTask)> = jobs.map(|(at, count)| (at, count, &tasks[at])).collect();
        let found = each(
            &jobs,
            |(_, _, task)| task,
            |(at, count, _)| start::eva(linears[*at].1, *count),
        )?;
        let mut of_first: BTreeMap<usize, _> = jobs.iter().map(|(at, ..)| *at).zip(found).collect();
        let begin = all.len();
        for (at, (task, first)) in tasks.iter().zip(first_of).enumerate() {
            let (rows, explained) = of_first.remove(&at).unwrap_or_default();
            all.push(Directions {
                module: task.module.clone(),
                first: begin + first,
                rows,
                explained,
            });
        }
        progress.layer(layer + 1, s.note)
    })?;
    let explained: Vec<Vec<f64>> = all.iter().map(|d| all[d.first].explained.clone()).collect();
    let first_of: Vec<usize> = all.iter().map(|d| d.first).collect();
    let ranks = start::eva_ranks(&explained, &first_of, budget);
    let modules = all.iter().map(|d| d.module.clone());
    resize(s.recipe, network, adapter_set, &modules.zip(ranks).collect())?;
    for d in &all {
        let Some(lora) = network.adapters.get(&d.module).and_then(|a| a.lora()) else {
            continue;
        };
        let pair = InitPair {
            a: all[d.first].rows[..lora.a.elem_count()].to_vec(),
            b: vec![0.0; lora.b.elem_count()],
        };
        set(lora, &pair)?;
    }
    Ok(())
}

fn corda(s: &mut AdapterInitContext, network: &mut Network, adapter_set: &mut hf::AdapterSet) -> Result<()> {
    let settings = &s.recipe.tune.lora.corda;
    let own;
    let rows = if settings.data.is_empty() {
        s.train
    } else {
        own = rows::read(s.recipe, RowSet::Files(&settings.data), s.model)?;
        &own
    };
    let key = cache::key(s.recipe, s.base, rows, network)?;
    // All ranks or none: weights that are divided are collected by all ranks together. Each reads its rows at its own speed.
    let cached = cache::read(s.cache, &key, network, s.note)?;
    let missing = s.ranks.most(u64::from(cached.is_none()), Patience::Long)?;
    if let Some(pairs) = cached.filter(|_| missing == 0) {
        (s.note)("corda: uses the components of an earlier run with the same model, rows and settings");
        return place(s.recipe, network, adapter_set, pairs);
    }
    let (method, arithmetic) = (settings.method, settings.compatible);
    let examples = &rows.examples.head(settings.samples)?;
    let batches = match arithmetic {
        CordaArithmetic::Ft => covariance::batches(examples),
        // PEFT normalizes each row separately.
        CordaArithmetic::Peft => examples.iter().map(|e| Batch::from_examples([e])).collect(),
    };
    let batches: Vec<_> = batches.into_iter().map(ObservedBatch::whole).collect();
    let tokens: usize = batches.iter().map(ObservedBatch::count).sum();
    let widest = network.spec.hidden.max(network.spec.intermediate);
    if tokens < widest {
        (s.note)(&format!(
            "corda: {tokens} tokens are too few for an estimate of {widest} directions; give more rows in \
             `tune.lora.corda.data`"
        ));
    }
    let mut found: BTreeMap<String, Component> = BTreeMap::new();
    let progress = InitProgress::new("corda", network);
    covariance::observe(network, &batches, arithmetic, &mut |layer, seen| {
        let tasks = tasks(network, layer)?;
        let components = each(
            &tasks,
            |task| task,
            |task| {
                let (outputs, inputs) = task.linear.dims();
                let r = task.lora()?.rank();
                let candidates = if settings.adaptive_rank {
                    (2 * r).min(outputs).min(inputs)
                } else {
                    r
                };
                let covariance: &Covariance = seen.of(&task.module)?;
                start::components(
                    task.weight()?.as_ref(),
                    covariance,
                    method,
                    candidates,
                    settings.adaptive_rank,
                )
            },
        )?;
        found.extend(tasks.into_iter().map(|t| t.module).zip(components));
        progress.layer(layer + 1, s.note)
    })?;

    let own_rank = |module: &str| {
        network
            .adapters
            .get(module)
            .and_then(|a| a.lora())
            .map_or(0, Lora::rank)
    };
    let ranks: Vec<usize> = if !settings.adaptive_rank {
        found.keys().map(|m| own_rank(m)).collect()
    } else {
        let budget = found.keys().map(|m| own_rank(m)).sum();
        let values: Vec<(Vec<f64>, f64)> = found.values().map(|c| (c.s.clone(), c.total)).collect();
        start::allocate(&values, method, budget)
    };
    let Some(config) = &adapter_set.config else {
        return Ok(());
    };
    let mut pairs = BTreeMap::new();
    let alphas = hf::ranks_and_alphas(config, found.keys())?;
    for (((module, component), r), (_, alpha)) in found.iter().zip(ranks).zip(alphas) {
        let scale = scaling(alpha, r, config.use_rslora);
        pairs.insert(module.clone(), (r, start::pair_of(component, method, r, scale)));
    }
    store(s, &key, network, &pairs)?;
    place(s.recipe, network, adapter_set, pairs)
}

/// Stores the pairs for other runs. Rank 0 writes them, and another rank only if it does not see the file of rank 0. If they
/// cannot be written, the next run computes them again.
fn store(
    s: &mut AdapterInitContext,
    key: &str,
    network: &Network,
    pairs: &BTreeMap<String, (usize, InitPair)>,
) -> Result<()> {
    let mut is_stored = false;
    if !s.ranks.is_root() {
        s.ranks.meet_after_reading()?;
        is_stored = cache::read(s.cache, key, network, s.note)?.is_some();
    }
    if !is_stored && let Err(e) = cache::write(s.cache, key, network, pairs) {
        let e = e.line();
        (s.note)(&format!("corda: the components cannot be stored for other runs: {e}"));
    }
    if s.ranks.is_root() {
        s.ranks.meet_after_reading()?;
    }
    Ok(())
}

/// Sets these pairs on the network; the config lists ranks that differ from `r`.
fn place(
    recipe: &Recipe,
    network: &mut Network,
    adapter_set: &mut hf::AdapterSet,
    pairs: BTreeMap<String, (usize, InitPair)>,
) -> Result<()> {
    let ranks = pairs.iter().map(|(m, (r, _))| (m.clone(), *r)).collect();
    resize(recipe, network, adapter_set, &ranks)?;
    for (module, (_, pair)) in &pairs {
        if let Some(lora) = network.adapters.get(module).and_then(|a| a.lora()) {
            set(lora, pair)?;
        }
    }
    Ok(())
}

/// Changes the ranks of adapters to those of an adaptive initialization, of this run or of the run that is resumed.
/// With EVA a linear can lose its adapter, and the others keep their scale, as in PEFT.
pub fn resize(
    recipe: &Recipe,
    network: &mut Network,
    adapter_set: &mut hf::AdapterSet,
    ranks: &BTreeMap<String, usize>,
) -> Result<()> {
    let Some(config) = &mut adapter_set.config else {
        return Ok(());
    };
    let lora = &recipe.tune.lora;
    let fresh = lora.peft_type == PeftType::Lora && lora.adapter.is_none();
    let eva = fresh && lora.init_lora_weights == LoraInit::Eva;
    let corda = fresh && lora.init_lora_weights == LoraInit::Corda && lora.corda.adaptive_rank;
    if !eva && !corda {
        return Ok(());
    }
    // Full names first: the first pattern that matches a module is used.
    let (mut pattern, mut alphas) = (Vec::new(), Vec::new());
    // In the config modules have the names of the file.
    let key = |config: &AdapterConfig, module: &str| config.name_in_file(module).replace('.', "\\.");
    let kept: Vec<(&String, usize)> = ranks.iter().map(|(m, r)| (m, *r)).filter(|(_, r)| *r > 0).collect();
    let old = hf::ranks_and_alphas(config, kept.iter().map(|(module, _)| module))?;
    for ((module, r), (before, alpha)) in kept.into_iter().zip(old) {
        if before != r {
            pattern.push((key(config, module), r));
            let alpha = alpha * r as f64 / before as f64;
            alphas.push((key(config, module), alpha));
        }
    }
    pattern.append(&mut config.rank_pattern);
    config.rank_pattern = pattern;
    if eva {
        alphas.append(&mut config.alpha_pattern);
        config.alpha_pattern = alphas;
        let all = network.adapters.len();
        network
            .adapters
            .retain(|module, _| ranks.get(module).is_some_and(|r| *r > 0));
        if network.adapters.len() < all {
            let modules = network.adapters.keys().map(|module| config.name_in_file(module));
            config.target_modules = Targets::List(modules.collect());
            config.exclude_modules = None;
            config.layers_to_transform = None;
        }
    }
    let alphas = hf::ranks_and_alphas(config, network.adapters.keys())?;
    for ((module, adapter), (_, alpha)) in network.adapters.iter_mut().zip(alphas) {
        let (Some(lora), Some(&r)) = (adapter.lora(), ranks.get(module)) else {
            continue;
        };
        if lora.rank() == r {
            continue;
        }
        let (inputs, outputs) = (lora.a.dim(1)?, lora.b.dim(0)?);
        let device = lora.a.device();
        let zeros = |dims: &[usize]| Ok::<_, Error>(peft::full(dims, 0.0)?.to_device(device)?);
        let pair = || Ok::<_, Error>((zeros(&[r, inputs])?, zeros(&[outputs, r])?));
        let scale = scaling(alpha, r, config.use_rslora);
        let mut other = Lora::new(module, pair()?, scale, lora.mask);
        other.start = match lora.start {
            Some(_) => Some(pair()?),
            None => None,
        };
        *adapter = Arc::new(match &**adapter {
            Adapter::Dora(dora) => Adapter::Dora(Dora::new(module, other, dora.magnitude.clone())),
            _ => Adapter::Lora(other),
        });
    }
    adapter_set.adapters = network.adapters.clone();
    Ok(())
}

/// Derives the ranks from the sizes of the flat tensors in a checkpoint.
pub fn ranks_of(network: &Network, elements: impl Fn(&str) -> Option<usize>) -> BTreeMap<String, usize> {
    let mut ranks = BTreeMap::new();
    for (module, adapter) in &network.adapters {
        if let Some(lora) = adapter.lora()
            && let Some(n) = elements(&lora.a_name)
            && let Ok(inputs) = lora.a.dim(1)
        {
            ranks.insert(module.clone(), n / inputs.max(1));
        }
    }
    ranks
}

/// Computes the pair from the gradient of each weight as soon as it exists, and keeps only the pair.
struct PairGradients<'a> {
    active: &'a ActiveSet,
    network: &'a Network,
}

impl GradSink for PairGradients<'_> {
    fn wants(&self, name: &str) -> bool {
        self.active.contains(name)
    }

    fn take(&mut self, param: &Param, gradient: Tensor) -> Result<()> {
        let module = param.name.trim_end_matches(".weight");
        let Some(lora) = self.network.adapters.get(module).and_then(|a| a.lora()) else {
            return Ok(());
        };
        let (outputs, inputs) = gradient.dims2()?;
        let values = update::to_f32_vec(&gradient.to_device(&Device::Cpu)?)?;
        let gradient = algebra::matrix(&values, outputs, inputs);
        let pair = start::lora_ga(gradient.as_ref(), lora.rank()).map_err(|e| e.or_at(module))?;
        set(lora, &pair)
    }
}

fn from_gradient(s: &mut AdapterInitContext, network: &Network) -> Result<()> {
    let rows = s.recipe.tune.lora.init_samples.min(s.train.examples.len());
    let batch = Batch::from_examples(s.train.examples.head(rows)?);
    (s.note)(&format!("lora_ga: the gradient of {rows} rows"));
    let active = ActiveSet::new(network.adapters.keys().map(|m| format!("{m}.weight")));
    let mut sink = PairGradients {
        active: &active,
        network,
    };
    let step_stats = StepStats::new(&network.device)?;
    let _phase = progress::phase("initializing adapters (lora_ga)", 1, "gradient");
    engine::GradientPass::new(network, s.objective, &active, &step_stats).window(&[batch], &mut sink)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linears_with_one_input_get_the_directions_of_the_largest_rank() {
        let (shared, own) = (Covariance::new(32), Covariance::new(24));
        // q, k and o with rank_pattern k = 10.
        let linears = [(4, &shared), (10, &shared), (4, &own)];
        assert_eq!(candidates(&linears, &[0, 0, 2], 2.0), [20, 0, 8]);
        // Never more than inputs.
        assert_eq!(candidates(&linears, &[0, 0, 2], 8.0), [32, 0, 24]);
    }
}
