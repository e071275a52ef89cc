//! The device of each rank: on a machine with several GPUs each rank has its own.

use crate::base::units::counted;
use crate::base::{Error, Result};
use crate::comm::Patience;
use crate::ops::device;
use crate::recipe::{DeviceRef, Model};
use crate::setup;
use crate::train::ranks::RunRanks;
use candle_core::Device;
use serde_json::{Value, json};

/// The device of this rank.
pub struct OwnDevice {
    pub device: Device,
    /// Ranks of this machine that use this GPU, with this one.
    pub sharing: usize,
    /// The property that must be the same on all ranks: the model of the GPU, or the CPU.
    pub kind: String,
}

impl OwnDevice {
    /// That ranks share the GPU, for the header of a run.
    pub fn shared(&self) -> Option<String> {
        let text = "ranks of this machine share one; `model.device = \"auto\"` gives each its own";
        (self.sharing > 1).then(|| format!("{} {text}", self.sharing))
    }
}

/// The data of a rank about its machine.
#[derive(Debug, Clone, PartialEq)]
struct RankGpus {
    host: String,
    /// Identifiers of the GPUs that it sees, by ordinal.
    gpus: Vec<String>,
}

impl RunRanks {
    /// Opens the device. `auto`: a GPU of its own for each rank, if the machines have GPUs. `cuda:0`: the same GPU
    /// for all ranks that see it as this one.
    ///
    /// Errors: more ranks than GPUs on a machine; GPUs on some ranks only; as `setup::device`.
    pub fn device(&self, asked: &DeviceRef) -> Result<OwnDevice> {
        if !self.several() {
            return own(setup::device(asked)?, 1);
        }
        let (device, sharing) = self.opened(asked)?;
        self.0.use_device(&device)?;
        own(device, sharing)
    }

    /// The device, and the ranks of this machine that use it.
    fn opened(&self, asked: &DeviceRef) -> Result<(Device, usize)> {
        if *asked == DeviceRef::Cpu {
            return Ok((setup::device(asked)?, 1));
        }
        // Where the driver does not answer, there are none; `auto` says why.
        let world = self.0.world();
        let gpus = device::identities().unwrap_or_default();
        let said = json!({ "host": world.host, "gpus": gpus }).to_string();
        let all = self.0.all_gather_bytes(said.into_bytes(), Patience::Long)?;
        let all: Vec<RankGpus> = all.iter().map(|bytes| seen(bytes)).collect();
        let taken: Vec<Option<usize>> = if *asked == DeviceRef::Auto {
            assign(&all)?
        } else {
            let ordinal = asked.ordinal();
            all.iter()
                .map(|rank| ordinal.filter(|n| *n < rank.gpus.len()))
                .collect()
        };
        let gpu = |rank: usize| Some((&all[rank].host, all[rank].gpus.get(taken[rank]?)?));
        if self.0.own_devices() {
            let gpus: Vec<_> = (0..all.len()).map(gpu).collect();
            one_each(&gpus)?;
        }
        let sharing = (0..all.len()).filter(|rank| gpu(*rank) == gpu(world.rank)).count();
        let own = taken[world.rank].map(|n| DeviceRef::Gpu(Some(n)));
        let opened = setup::device(own.as_ref().unwrap_or(asked))?;
        if opened.is_cpu() {
            return Ok((opened, 1));
        }
        // The contexts of all ranks are there before one of them asks for free memory.
        self.0.all_gather_bytes(Vec::new(), Patience::Long)?;
        Ok((opened, sharing))
    }
}

/// Errors: two ranks have one GPU. Each is that of a host and its identifier.
fn one_each(gpus: &[Option<(&String, &String)>]) -> Result<()> {
    for (rank, gpu) in gpus.iter().enumerate() {
        let Some((host, _)) = gpu else { continue };
        if let Some(other) = gpus[..rank].iter().position(|other| other == gpu) {
            return Err(Error::usage("each rank needs a GPU of its own without MPI")
                .at("model.device")
                .found(format!(
                    "rank {other} and rank {rank} on host {host} would use the same one"
                ))
                .hint("set `model.device = \"auto\"`, or start fewer ranks there"));
        }
    }
    Ok(())
}

fn own(device: Device, sharing: usize) -> Result<OwnDevice> {
    let kind = device::name(&device)?.unwrap_or_else(|| "cpu".into());
    Ok(OwnDevice { device, sharing, kind })
}

fn seen(bytes: &[u8]) -> RankGpus {
    let said: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    RankGpus {
        host: text(&said["host"]),
        gpus: said["gpus"]
            .as_array()
            .map_or(Vec::new(), |all| all.iter().map(text).collect()),
    }
}

/// The ordinal of the GPU of each rank; `None` for all if there are none.
fn assign(all: &[RankGpus]) -> Result<Vec<Option<usize>>> {
    let Some(without) = all.iter().position(|rank| rank.gpus.is_empty()) else {
        return assign_own(all);
    };
    match all.iter().position(|rank| !rank.gpus.is_empty()) {
        None => Ok(vec![None; all.len()]),
        Some(with) => Err(Error::usage("some ranks have a GPU and others have none")
            .at(Model::device)
            .found(format!(
                "rank {with} (host {}) has one, rank {without} (host {}) has none",
                all[with].host, all[without].host
            ))
            .hint("set `model.device = \"cpu\"`, or start ranks on machines with GPUs only")),
    }
}

fn assign_own(all: &[RankGpus]) -> Result<Vec<Option<usize>>> {
    let mut taken = vec![None; all.len()];
    // A scheduler may show each rank other GPUs: those that see the fewest choose first.
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|rank| (all[*rank].gpus.len(), *rank));
    for rank in order {
        let RankGpus { host, gpus } = &all[rank];
        let others: Vec<&String> = (0..all.len())
            .filter(|other| all[*other].host == *host)
            .filter_map(|other| all[other].gpus.get(taken[other]?))
            .collect();
        taken[rank] = gpus.iter().position(|gpu| !others.contains(&gpu));
        if taken[rank].is_none() {
            let ranks = counted(all.iter().filter(|other| other.host == *host).count(), "rank");
            let (n, less) = (counted(others.len(), "GPU"), counted(others.len(), "rank"));
            return Err(Error::usage("there are more ranks than GPUs on a machine")
                .at(Model::device)
                .found(format!("{ranks} and {n} on host {host}"))
                .expected("a GPU for each rank")
                .hint(format!(
                    "start {less} there, or set `model.device = \"cuda:0\"`: all ranks of a machine share this GPU"
                )));
        }
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen_by(all: &[(&str, &[&str])]) -> Vec<RankGpus> {
        let one = |(host, gpus): &(&str, &[&str])| RankGpus {
            host: host.to_string(),
            gpus: gpus.iter().map(|gpu| gpu.to_string()).collect(),
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn each_rank_of_a_machine_has_its_own_gpu() {
        let assigned = |all: &[(&str, &[&str])]| assign(&seen_by(all)).unwrap();
        let two: &[&str] = &["a", "b"];
        assert_eq!(
            assigned(&[("x", two), ("y", two), ("x", two), ("y", two)]),
            [Some(0), Some(0), Some(1), Some(1)]
        );
        // A scheduler shows each rank its own, under the same number.
        assert_eq!(assigned(&[("x", &["a"]), ("x", &["b"])]), [Some(0), Some(0)]);
        assert_eq!(assigned(&[("x", two), ("x", &["a"])]), [Some(1), Some(0)]);
        assert_eq!(assigned(&[("x", &[]), ("x", &[])]), [None, None]);
    }

    #[test]
    fn ranks_that_would_share_a_gpu_are_named() {
        let (x, y, a, b) = ("x".to_string(), "y".to_string(), "a".to_string(), "b".to_string());
        one_each(&[Some((&x, &a)), Some((&y, &a)), Some((&x, &b)), None, None]).unwrap();
        let same = one_each(&[Some((&x, &a)), Some((&y, &b)), Some((&y, &b))]).unwrap_err();
        assert!(
            same.to_string()
                .contains("rank 1 and rank 2 on host y would use the same one"),
            "{same}"
        );
    }

    #[test]
    fn what_has_no_gpu_is_named() {
        let text = |all: &[(&str, &[&str])]| assign(&seen_by(all)).unwrap_err().to_string();
        let more = text(&[("x", &["a", "b"]), ("x", &["a", "b"]), ("x", &["a", "b"])]);
        assert!(
            more.contains("3 ranks and 2 GPUs on host x") && more.contains("start 2 ranks there"),
            "{more}"
        );
        let some = text(&[("x", &["a"]), ("y", &[])]);
        assert!(
            some.contains("rank 0 (host x) has one, rank 1 (host y) has none"),
            "{some}"
        );
    }
}
