//! Tests of checkpoints in parts, on ranks that are threads: whole tensors come back, and a failure of one rank leaves the
//! checkpoint before.

use super::parts::parts_of;
use super::tests::{OPTIMIZER, WEIGHTS, plan, values};
use super::*;
use crate::base::{Error, Result};
use crate::comm::{Collective, Patience, PendingNumbers, RankFault, Shard, WholeList, World};
use candle_core::Device;
use serde_json::json;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// The channels of one rank: bytes, or `None` from a rank that has failed.
struct Threads {
    world: World,
    to: Vec<Sender<Option<Vec<u8>>>>,
    from: Vec<Mutex<Receiver<Option<Vec<u8>>>>>,
}

impl Collective for Threads {
    fn world(&self) -> &World {
        &self.world
    }

    fn all_to_all(&self, _: u64, _: Vec<Vec<f32>>, _: Vec<usize>) -> PendingNumbers {
        unreachable!("no numbers travel")
    }

    fn all_gather(&self, _: u64, _: Vec<f32>, _: Vec<usize>) -> PendingNumbers {
        unreachable!("no numbers travel")
    }

    fn gather_shards(&self, _: u64, _: Vec<Shard>, _: Vec<usize>) -> PendingNumbers<WholeList> {
        unreachable!("no numbers travel")
    }

    fn all_gather_bytes(&self, own: Vec<u8>, _: Patience) -> Result<Vec<Vec<u8>>> {
        for to in &self.to {
            let _ = to.send(Some(own.clone()));
        }
        let found = self.from.iter().map(|from| {
            let message = from.lock().unwrap().recv_timeout(Duration::from_secs(30));
            message
                .expect("no rank hangs")
                .ok_or_else(|| Error::new("another rank has failed"))
        });
        found.collect()
    }

    fn use_device(&self, _: &Device) -> Result<()> {
        Ok(())
    }

    fn own_devices(&self) -> bool {
        false
    }

    fn fail(&self, _: i32, _: String) -> Vec<RankFault> {
        for to in &self.to {
            let _ = to.send(None);
        }
        Vec::new()
    }

    fn close(&self) {}

    fn set_timeout(&self, _: Duration) {}

    fn sent(&self) -> u64 {
        0
    }
}

/// Runs `work` on `size` ranks; a rank that fails says so.
fn run<T: Send>(size: usize, work: impl Fn(&dyn Collective) -> Result<T> + Sync) -> Vec<Result<T>> {
    let mut to: Vec<Vec<_>> = (0..size).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<_>> = (0..size).map(|_| Vec::new()).collect();
    for to in &mut to {
        for from in &mut from {
            let (sender, receiver) = channel();
            to.push(sender);
            from.push(Mutex::new(receiver));
        }
    }
    let ranks: Vec<Threads> = to
        .into_iter()
        .zip(from)
        .enumerate()
        .map(|(rank, (to, from))| Threads {
            world: World {
                rank,
                size,
                host: "here".into(),
            },
            to,
            from,
        })
        .collect();
    let work = &work;
    let one = |comm: &Threads| {
        let done = work(comm);
        if done.is_err() {
            comm.fail(1, String::new());
        }
        done
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|comm| scope.spawn(move || one(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn plans() -> Vec<TensorPlan> {
    vec![plan("a.weight", &[1000]), plan("a.norm", &[3]), plan("empty", &[0])]
}

/// Tensors are cut as the elements say; a small one belongs to the last rank.
fn own(plans: &[TensorPlan], rank: usize, size: usize) -> Vec<Range<usize>> {
    let cut = |plan: &TensorPlan| match plan.shape[0] {
        n if n < 10 => (if rank + 1 == size { 0 } else { n })..n,
        n => n * rank / size..n * (rank + 1) / size,
    };
    plans.iter().map(cut).collect()
}

/// Saves step `step` in parts. `broken`: this rank passes a number that is not finite.
fn save_on(comm: &dyn Collective, dir: &Path, step: u64, broken: Option<usize>) -> Result<PathBuf> {
    let (rank, size) = (comm.world().rank, comm.world().size);
    let plans = plans();
    let own = own(&plans, rank, size);
    let divided = [WEIGHTS, OPTIMIZER].map(|name| DividedFile {
        whole: CheckpointFile { name, tensors: &plans },
        own: own.clone(),
    });
    let small = [plan("scores", &[5])];
    let whole = [CheckpointFile {
        name: "ranks.safetensors",
        tensors: &small,
    }];
    let state = json!({"step": step});
    save_parts(comm, dir, step, &state, &whole, &divided, &mut |file, plan, sink| {
        let all = values(step, file, plan);
        let Some(index) = plans.iter().position(|p| p.name == plan.name) else {
            assert_eq!(rank, 0, "rank 0 writes what is not divided");
            return sink(Values::F32(&all));
        };
        if broken == Some(rank) {
            return sink(Values::F32(&vec![f32::NAN; own[index].len()]));
        }
        sink(Values::F32(&all[own[index].clone()]))
    })
}

fn names(dir: &Path) -> Vec<String> {
    let all = crate::base::files::list(dir).unwrap();
    all.iter()
        .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn the_parts_of_any_number_of_ranks_are_read_as_whole_tensors() {
    for size in 1..=4 {
        let dir = tempfile::tempdir().unwrap();
        let saved = run(size, |comm| save_on(comm, dir.path(), 7, None));
        assert!(
            saved
                .iter()
                .all(|path| *path.as_ref().unwrap() == dir.path().join("checkpoint-7"))
        );
        assert_eq!(names(dir.path()), ["checkpoint-7"]);
        let loaded = latest(dir.path()).unwrap().unwrap();
        assert_eq!(loaded.state, json!({"step": 7}));
        assert_eq!(names(&loaded.path).len(), 2 * size + 3);
        assert!(is_ours(&loaded.path));
        for file in [WEIGHTS, OPTIMIZER] {
            let weights = loaded.open(file).unwrap();
            assert_eq!(weights.names().collect::<Vec<_>>(), ["a.norm", "a.weight", "empty"]);
            for plan in plans() {
                assert_eq!(weights.info(&plan.name).unwrap().shape, plan.shape);
                assert_eq!(
                    weights.read_f32(&plan.name).unwrap(),
                    values(7, file, &plan),
                    "{size} ranks"
                );
            }
        }
        let scores = loaded.open("ranks.safetensors").unwrap().read_f32("scores").unwrap();
        assert_eq!(scores.len(), 5);
        assert!(loaded.open("averages.safetensors").is_err());
    }
}

#[test]
fn a_failure_of_one_rank_is_that_of_all_and_leaves_the_checkpoint_before() {
    let dir = tempfile::tempdir().unwrap();
    run(3, |comm| save_on(comm, dir.path(), 1, None))
        .into_iter()
        .for_each(|saved| drop(saved.unwrap()));
    for broken in 0..3 {
        let failed = run(3, |comm| save_on(comm, dir.path(), 2, Some(broken)));
        for (rank, result) in failed.iter().enumerate() {
            let text = result.as_ref().unwrap_err().to_string();
            let own = text.contains("not finite") && text.contains(&format!("0000{}-of-00003", rank + 1));
            assert!(own == (rank == broken), "rank {rank}: {text}");
        }
        assert_eq!(names(dir.path()), ["checkpoint-1"]);
        assert_eq!(latest(dir.path()).unwrap().unwrap().step, 1);
    }
    // Every part is in the manifest.
    let part = dir.path().join("checkpoint-1/weights-00003-of-00003.safetensors");
    std::fs::remove_file(&part).unwrap();
    let e = load(&dir.path().join("checkpoint-1")).unwrap_err().to_string();
    assert!(e.contains("is missing") && e.contains("weights-00003-of-00003"), "{e}");
}

/// Rank 1 is on another machine: it has not the directory of rank 0.
#[test]
fn a_rank_without_the_directory_of_rank_0_says_what_to_do() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    run(2, |comm| check_shared(comm, dir.path(), 1))
        .into_iter()
        .for_each(|seen| seen.unwrap());
    assert!(names(dir.path()).is_empty());
    let failed = run(2, |comm| {
        let moved = Moved {
            comm,
            place: other.path(),
        };
        check_shared(&moved, dir.path(), 1)
    });
    let text = failed[1].as_ref().unwrap_err().to_string();
    assert!(
        text.contains("does not see") && text.contains("distributed.checkpoint = \"one\""),
        "{text}"
    );
    assert!(failed[0].is_err() && names(dir.path()).is_empty());
}

/// Paths that rank 0 sends are below `place` on the others.
struct Moved<'a> {
    comm: &'a dyn Collective,
    place: &'a Path,
}

impl Collective for Moved<'_> {
    fn world(&self) -> &World {
        self.comm.world()
    }

    fn all_to_all(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> PendingNumbers {
        self.comm.all_to_all(key, parts, lengths)
    }

    fn all_gather(&self, key: u64, own: Vec<f32>, lengths: Vec<usize>) -> PendingNumbers {
        self.comm.all_gather(key, own, lengths)
    }

    fn gather_shards(&self, key: u64, shards: Vec<Shard>, to: Vec<usize>) -> PendingNumbers<WholeList> {
        self.comm.gather_shards(key, shards, to)
    }

    fn all_gather_bytes(&self, own: Vec<u8>, patience: Patience) -> Result<Vec<Vec<u8>>> {
        let mut all = self.comm.all_gather_bytes(own, patience)?;
        if !self.world().is_root() && all[0].starts_with(b"/") {
            all[0] = format!("{}/elsewhere", self.place.display()).into_bytes();
        }
        Ok(all)
    }

    fn use_device(&self, device: &Device) -> Result<()> {
        self.comm.use_device(device)
    }

    fn own_devices(&self) -> bool {
        self.comm.own_devices()
    }

    fn fail(&self, code: i32, text: String) -> Vec<RankFault> {
        self.comm.fail(code, text)
    }

    fn close(&self) {}

    fn set_timeout(&self, _: Duration) {}

    fn sent(&self) -> u64 {
        0
    }
}

#[test]
fn only_all_parts_of_a_file_are_the_file() {
    let of = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        parts_of("w.safetensors", &names).map(|parts| parts.len())
    };
    let [a, b] = ["w-00001-of-00002.safetensors", "w-00002-of-00002.safetensors"];
    assert_eq!(of(&["state.json", b, a]), Some(2));
    assert_eq!(of(&["w-00001-of-00001.safetensors"]), Some(1));
    for names in [
        &[a][..],
        &[b],
        &["w.safetensors"],
        &["v-00001-of-00001.safetensors"],
        &["w-00001-of-00000.safetensors"],
    ] {
        assert_eq!(of(names), None, "{names:?}");
    }
}
