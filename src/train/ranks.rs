//! The ranks of a training run: their agreements, and the work of rank 0 alone. On one rank every agreement is its own
//! answer. All ranks call the same methods in the same order.

use crate::base::{Error, Result, files, secrets, signal, worker};
use crate::comm::{Collective, Patience, SingleRank};
use crate::model::Spec;
use crate::ops::CpuBackend;
use crate::plan::{PlanDevice, ProcessState};
use crate::recipe::{DistributedSection, RankWeights, Recipe, Train};
use crate::source::sharded::Machines;
use crate::train::TrainOptions;
use crate::train::gpus::OwnDevice;
use crate::train::side_inputs::PROGRAMS;
use crate::train::state::RunFingerprint;
use serde_json::{Value, json};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The ranks of a run.
#[derive(Clone)]
pub struct RunRanks(pub Arc<dyn Collective>);

impl Default for RunRanks {
    fn default() -> Self {
        Self(Arc::new(SingleRank::default()))
    }
}

impl fmt::Debug for RunRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let world = self.0.world();
        write!(f, "rank {} of {}", world.rank, world.size)
    }
}

/// Something that must be the same on all ranks.
pub type SharedFact = (String, String);

/// Facts that a table of differences shows at most.
const SHOWN: usize = 8;

/// Rounds of a pass after which ranks that do not exchange numbers in it ask each other for signals.
const ROUNDS: usize = 8;

/// The facts that must be the same on all ranks: program, recipe, inputs and decisions.
pub fn agreed(
    fingerprint: &RunFingerprint,
    strategy: &str,
    device: &str,
    options: &TrainOptions,
) -> Result<Vec<SharedFact>> {
    let mut all = of_program()?;
    all.extend(
        fingerprint
            .recipe
            .iter()
            .map(|(key, value)| (key.clone(), value.clone())),
    );
    // Only rank 0 starts reward programs.
    let contents = fingerprint.side_inputs.iter().filter(|(key, _)| *key != PROGRAMS);
    all.extend(contents.map(|(key, hash)| (format!("content of {key}"), hash.clone())));
    let more = [
        ("training rows", fingerprint.data.clone()),
        ("evaluation rows", fingerprint.eval_data.clone()),
        ("base model", fingerprint.base.clone()),
        ("device", device.to_string()),
        ("memory plan", strategy.to_string()),
        ("options", format!("{:?} {}", options.resume, options.overwrite)),
    ];
    all.extend(more.map(|(key, value)| (key.to_string(), value)));
    Ok(all)
}

impl RunRanks {
    /// True for rank 0, which writes the files of the run.
    pub fn is_root(&self) -> bool {
        self.0.world().is_root()
    }

    /// True if there is more than one rank.
    pub fn several(&self) -> bool {
        self.size() > 1
    }

    pub fn size(&self) -> usize {
        self.0.world().size
    }

    /// The largest of the numbers of all ranks.
    pub fn most(&self, own: u64, patience: Patience) -> Result<u64> {
        let all = self.0.all_gather_bytes(own.to_le_bytes().to_vec(), patience)?;
        let number = |bytes: Vec<u8>| bytes.try_into().map_or(0, u64::from_le_bytes);
        Ok(all.into_iter().map(number).max().unwrap_or(own))
    }

    /// The bytes of rank 0; `own` of the other ranks is not used.
    pub fn from_root(&self, own: Vec<u8>) -> Result<Vec<u8>> {
        let own = if self.is_root() { own } else { Vec::new() };
        Ok(self.0.all_gather_bytes(own, self.for_root())?.swap_remove(0))
    }

    /// How long a rank waits at the end of work that rank 0 does alone. The others wait for rank 0 without a limit.
    /// Rank 0 waits with the limit of a step, because the others are already there.
    fn for_root(&self) -> Patience {
        if self.is_root() { Patience::Step } else { Patience::Long }
    }

    /// The value of rank 0.
    pub fn of_root(&self, own: bool) -> Result<bool> {
        Ok(self.from_root(vec![u8::from(own)])? == [1])
    }

    /// Tells the other ranks if the export of rank 0 has failed: they wait for that, and take part in the save that follows.
    /// Returns what rank 0 says; `own` of the other ranks is not used.
    pub fn export_failed_at_root(&self, own: bool) -> Result<bool> {
        self.of_root(own)
    }

    /// The path of rank 0.
    pub fn path(&self, own: Option<&Path>) -> Result<Option<PathBuf>> {
        let text = own.map_or(String::new(), |path| path.to_string_lossy().into_owned());
        let bytes = self.from_root(text.into_bytes())?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok((!text.is_empty()).then(|| text.into()))
    }

    /// Waits until all ranks are here; those that wait for rank 0 have no time limit.
    pub fn meet(&self) -> Result<()> {
        self.0.all_gather_bytes(Vec::new(), self.for_root()).map(drop)
    }

    /// Waits until all ranks are here, without a time limit: after work that may take some ranks much longer than others, such as
    /// reading a checkpoint or the weights of a model.
    pub fn meet_after_reading(&self) -> Result<()> {
        self.0.all_gather_bytes(Vec::new(), Patience::Long).map(drop)
    }

    /// The signal that one of the ranks received.
    pub fn signal(&self) -> Result<Option<i32>> {
        let own = signal::received().unwrap_or(0);
        let most = self.most(own.unsigned_abs().into(), Patience::Step)?;
        Ok((most > 0).then_some(most as i32))
    }

    /// Called before round `index` of a pass that has the same number of rounds on all ranks. True if one of them received a signal: all
    /// get this at the same call, and end the pass. `together`: the ranks exchange numbers in each round, so none may stop before the
    /// others. Else a rank with a signal asks at once and waits for the others, which ask every few rounds, and at the end with
    /// `unless_stopped`.
    pub fn stops_before(&self, index: usize, together: bool) -> Result<bool> {
        let own = signal::received().is_some();
        let asks = together || own || index > 0 && index.is_multiple_of(ROUNDS);
        // Ranks that do not meet take different times for their rounds. One that computes sends heartbeats.
        Ok(asks && self.most(own.into(), Patience::Long)? > 0)
    }

    /// A result of this rank, of work that only rank 0 did; `None` for all if a signal ended it. Errors: it failed for
    /// another reason.
    pub fn unless_root_stopped<T>(&self, own: Result<T>) -> Result<Option<T>> {
        self.unless_stopped(own, self.for_root())
    }

    /// A result of this rank; `None` for all if a signal ended it on one of them. Errors: it failed for another reason.
    pub fn unless_stopped<T>(&self, own: Result<T>, patience: Patience) -> Result<Option<T>> {
        let stopped = own.is_err() && signal::received().is_some();
        if let Err(e) = own {
            return if stopped {
                self.most(1, patience).map(|_| None)
            } else {
                Err(e)
            };
        }
        let stopped = self.most(0, patience)? > 0;
        own.map(|own| (!stopped).then_some(own))
    }

    /// The state of the processes for a plan that all ranks make alike: of the tightest one.
    ///
    /// Errors: `weights` needs the same number of ranks on every machine.
    pub fn process(&self, weights: RankWeights) -> Result<ProcessState> {
        let now = ProcessState::now();
        if !self.several() {
            return Ok(now);
        }
        let host = self.0.world().host.clone();
        let own = json!({
            "host": host,
            "available": now.available,
            "resident": now.resident,
            "threads": now.threads,
        });
        let all = self.0.all_gather_bytes(own.to_string().into_bytes(), Patience::Long)?;
        let all: Vec<Value> = all
            .iter()
            .map(|text| serde_json::from_slice(text).unwrap_or_default())
            .collect();
        let on_host = |host: &Value| all.iter().filter(|other| other["host"] == *host).count().max(1) as u64;
        let hosts: Vec<&str> = all
            .iter()
            .map(|rank| rank["host"].as_str().unwrap_or_default())
            .collect();
        let machines = match Machines::of_hosts(&hosts) {
            Err(e) if weights == RankWeights::ShardedInNode => {
                return Err(e.at(DistributedSection::weights).hint(
                    "start the same number of ranks on each machine, or set `distributed.weights = \"sharded\"`",
                ));
            }
            found => found.map_or(1, |machines| machines.count()),
        };
        // The ranks of a machine share its free memory.
        let shares = all
            .iter()
            .map(|rank| Some(rank["available"].as_u64()? / on_host(&rank["host"])));
        let available: Option<Vec<u64>> = shares.collect();
        let most = |key: &str| all.iter().filter_map(|rank| rank[key].as_u64()).max().unwrap_or(0);
        Ok(ProcessState {
            available: available.and_then(|all| all.into_iter().min()),
            resident: most("resident"),
            threads: most("threads") as usize,
            ranks: self.size(),
            machines,
        })
    }

    /// The device for a plan that all ranks make alike: the tightest one.
    pub fn plan_device(&self, device: &OwnDevice, weights: RankWeights) -> Result<PlanDevice> {
        let own = PlanDevice::of(&device.device)?;
        if !self.several() {
            return Ok(own);
        }
        let own = own.with_process(self.process(weights)?);
        let Some(free) = own.free() else { return Ok(own) };
        let taken = u64::MAX - free / device.sharing as u64;
        Ok(own.with_free(u64::MAX - self.most(taken, Patience::Long)?))
    }

    /// Compares what must be the same on all ranks.
    ///
    /// Errors: the differences, as all ranks see them.
    pub fn same(&self, facts: &[SharedFact]) -> Result<()> {
        if !self.several() {
            return Ok(());
        }
        let own = serde_json::to_vec(facts).map_err(|e| Error::internal("facts cannot be written").cause(e))?;
        let all = self.0.all_gather_bytes(own, Patience::Long)?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice::<Vec<SharedFact>>(bytes).unwrap_or_default();
        let all: Vec<Vec<SharedFact>> = all.iter().map(read).collect();
        let found = differences(&all);
        if found.is_empty() {
            return Ok(());
        }
        let more = match found.len().saturating_sub(SHOWN) {
            0 => String::new(),
            n => format!("\n      and {n} more"),
        };
        let shown: Vec<&str> = found.iter().take(SHOWN).map(String::as_str).collect();
        Err(Error::usage("the ranks do not run the same training")
            .found(format!("{}{more}", shown.join("\n      ")))
            .hint("start all ranks with the same program, recipe, model and data"))
    }
}

/// How the work is divided, for the header of a run; `None` for one rank.
pub fn header(recipe: &Recipe, size: usize) -> Option<String> {
    let window = recipe.train.gradient_accumulation_steps;
    let shared = recipe.distributed.shared(size).ranks;
    let rounds = window.div_ceil(size / shared);
    let idle = match rounds * size - window * shared {
        0 => String::new(),
        n => format!(", {n} idle in the last round"),
    };
    let each = if shared > 1 {
        format!("groups of {shared}, which share micro-batches; each group")
    } else {
        "each".into()
    };
    (size > 1).then(|| format!("{size}; {each} computes up to {rounds} of the {window} micro-batches of a step{idle}"))
}

/// Errors: `size` ranks cannot train with this recipe.
pub fn check(recipe: &Recipe, spec: &Spec, on_gpu: bool, size: usize) -> Result<()> {
    if size == 1 {
        return Ok(());
    }
    let shared = recipe.distributed.shared(size);
    if !size.is_multiple_of(shared.ranks) {
        return Err(
            Error::usage("the ranks cannot be divided into groups that share a micro-batch")
                .at(DistributedSection::sequence)
                .found(format!("{} with {size} ranks", shared.ranks))
                .expected(format!("a divisor of {size}")),
        );
    }
    shared.check(spec)?;
    let (window, groups) = (recipe.train.gradient_accumulation_steps, size / shared.ranks);
    if window < groups {
        let what = if shared.ranks > 1 { "groups of ranks" } else { "ranks" };
        return Err(
            Error::usage(format!("there are more {what} than micro-batches in a step"))
                .at(Train::gradient_accumulation_steps)
                .found(format!("{window} with {groups} {what}"))
                .expected(format!("at least {groups}"))
                .hint(format!(
                    "set `train.gradient_accumulation_steps = {groups}`, or start fewer ranks"
                )),
        );
    }
    if on_gpu && shared.ranks > 1 && !shared.by_heads(spec.heads) {
        return Err(
            Error::usage("on GPUs ranks share a micro-batch by heads of attention only")
                .at(DistributedSection::sequence_by)
                .found(format!("{} query heads, {} ranks that share them", spec.heads, shared.ranks))
                .expected("`ulysses`, and ranks that divide the query heads: the backward pass of attention on a GPU needs the queries of all keys")
                .hint("set another `distributed.sequence`, or `model.device = \"cpu\"`"),
        );
    }
    let weights = recipe.distributed.weights;
    if on_gpu && weights == RankWeights::ExpertParallel {
        return Err(Error::usage("divided experts are not supported on GPUs yet")
            .at(DistributedSection::weights)
            .found(weights.name())
            .expected("`replicated` or `sharded` on a GPU")
            .hint("set `distributed.weights = \"sharded\"`: each rank has a part of every layer in host memory"));
    }
    Ok(())
}

/// The facts about this program and processor.
pub fn of_program() -> Result<Vec<SharedFact>> {
    let mut hasher = blake3::Hasher::new();
    if let Some(program) = worker::program() {
        let fault = |e: std::io::Error| {
            Error::io("cannot read the program file")
                .at_path(&program.path)
                .cause(e)
        };
        // In pieces: the file is large.
        let mut piece = [0; 1 << 16];
        let mut file = files::open(&program.path)?;
        loop {
            let n = file.read(&mut piece).map_err(fault)?;
            if n == 0 {
                break;
            }
            hasher.update(&piece[..n]);
        }
    }
    let hash = hasher.finalize().to_hex().to_string();
    Ok(vec![
        ("version of ft".into(), env!("CARGO_PKG_VERSION").into()),
        ("the program file, by its hash".into(), hash),
        ("CPU instructions".into(), CpuBackend::current().name().into()),
    ])
}

/// One line for each rank and fact that differs from rank 0.
fn differences(all: &[Vec<SharedFact>]) -> Vec<String> {
    let Some((first, others)) = all.split_first() else {
        return Vec::new();
    };
    let mut out = Vec::new();
    for (rank, facts) in others.iter().enumerate() {
        if facts.len() != first.len() {
            out.push(format!(
                "rank {}: {} facts instead of {}",
                rank + 1,
                facts.len(),
                first.len()
            ));
        }
        for ((key, value), (_, want)) in facts.iter().zip(first).filter(|(a, b)| a != b) {
            let (value, want) = (short(&secrets::mask(value)), short(&secrets::mask(want)));
            out.push(if value == want && value.contains(secrets::MASK) {
                format!("rank {}: {key}: a secret in it differs", rank + 1)
            } else {
                format!("rank {}: {key}: {value} instead of {want}", rank + 1)
            });
        }
    }
    out
}

fn short(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_name_the_rank_and_both_values() {
        let facts = |seed: &str| vec![("train.seed".to_string(), seed.to_string()), ("a".into(), "b".into())];
        assert!(differences(&[facts("1"), facts("1")]).is_empty());
        assert_eq!(
            differences(&[facts("1"), facts("1"), facts("2")]),
            ["rank 2: train.seed: 2 instead of 1"]
        );
        assert_eq!(
            differences(&[facts("1"), facts("1")[..1].to_vec()]),
            ["rank 1: 1 facts instead of 2"]
        );
        let judged = |key: &str| vec![("rlhf.rewards".to_string(), format!("program:judge --api-key {key}"))];
        assert_eq!(
            differences(&[judged("one"), judged("two")]),
            ["rank 1: rlhf.rewards: a secret in it differs"]
        );
    }

    #[test]
    fn one_rank_agrees_with_itself() {
        let ranks = RunRanks::default();
        assert!(ranks.is_root() && !ranks.several());
        assert_eq!(
            (ranks.most(7, Patience::Step).unwrap(), ranks.of_root(true).unwrap()),
            (7, true)
        );
        assert_eq!(ranks.path(Some(Path::new("a/b"))).unwrap(), Some("a/b".into()));
        assert_eq!(ranks.path(None).unwrap(), None);
        ranks.same(&[("a".into(), "b".into())]).unwrap();
        assert_eq!(ranks.unless_root_stopped(Ok(3)).unwrap(), Some(3));
        assert!(ranks.unless_root_stopped::<()>(Err(Error::new("no"))).is_err());
        for (index, together) in [(0, false), (ROUNDS, false), (1, true)] {
            assert!(!ranks.stops_before(index, together).unwrap());
        }
    }
}
