//! Tests of the operations with ranks that are threads.

use super::*;
use candle_core::{Device, Tensor};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The list that rank `from` has for rank `to`.
fn list(from: usize, to: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| (1000 * from + 100 * to + i) as f32).collect()
}

#[test]
fn lists_arrive_where_they_belong() {
    for size in 1..=4 {
        for n in [0, 1, QUANTUM - 1, QUANTUM + 1] {
            threads::run(size, |comm| {
                let rank = comm.world().rank;
                // Two in flight at the same time; the length depends on the receiver.
                let send = |key| {
                    let parts = (0..size).map(|to| list(rank, to, n + to)).collect();
                    comm.all_to_all(key, parts, vec![n + rank; size])
                };
                let (first, second) = (send(1), send(2));
                let gathered = comm.all_gather(3, list(rank, 9, n + rank), (0..size).map(|from| n + from).collect());
                for pending in [first, second] {
                    let want: Vec<Vec<f32>> = (0..size).map(|from| list(from, rank, n + rank)).collect();
                    assert!(pending.wait().unwrap() == want);
                }
                let want: Vec<Vec<f32>> = (0..size).map(|from| list(from, 9, n + from)).collect();
                assert!(gathered.wait().unwrap() == want);
                let said = comm.all_gather_bytes(vec![rank as u8; rank], Patience::Long).unwrap();
                assert_eq!(said, (0..size).map(|from| vec![from as u8; from]).collect::<Vec<_>>());
            });
        }
    }
}

#[test]
fn lists_in_parts_are_collected() {
    for size in 1..=4 {
        for n in [1, QUANTUM - 1, 5 * QUANTUM + 3] {
            threads::run(size, |comm| {
                let rank = comm.world().rank;
                let own = |name: &str| part_of(name, n, rank, size);
                let ranges = |name: &str| -> Vec<_> { (0..size).map(|rank| part_of(name, n, rank, size)).collect() };
                let floats: Vec<f32> = own("a.3").map(|i| i as f32).collect();
                let bytes: Vec<u8> = own("b").map(|i| i as u8).collect();
                let shards = || {
                    let tensor = Tensor::new(floats.as_slice(), &Device::Cpu).unwrap();
                    let codes = Tensor::new(bytes.as_slice(), &Device::Cpu).unwrap();
                    [(tensor, "a.3"), (codes, "b")]
                        .map(|(own, name)| Shard::one(own, &ranges(name)))
                        .to_vec()
                };
                let (all, one) = (
                    comm.gather_shards(1, shards(), (0..size).collect()),
                    comm.gather_shards(2, shards(), vec![size - 1]),
                );
                let check = |lists: Vec<WholeList>| {
                    let mut lists = lists.into_iter();
                    let floats = lists
                        .next()
                        .unwrap()
                        .into_tensor(&[n])
                        .unwrap()
                        .to_vec1::<f32>()
                        .unwrap();
                    assert!(floats.iter().enumerate().all(|(i, x)| *x == i as f32));
                    let bytes = lists.next().unwrap().into_bytes().unwrap();
                    assert!(bytes.len() == n && bytes.iter().enumerate().all(|(i, x)| *x == i as u8));
                };
                check(all.wait().unwrap());
                let one = one.wait().unwrap();
                if rank == size - 1 {
                    check(one);
                } else {
                    assert!(one.is_empty());
                }
            });
        }
    }
}

/// Two groups collect at the same time, each from its own ranks. A rank stores several parts, not in their order.
#[test]
fn groups_of_ranks_collect_lists_of_their_own() {
    threads::run(4, |comm| {
        let rank = comm.world().rank;
        let group: Vec<usize> = if rank < 2 { vec![0, 1] } else { vec![2, 3] };
        let (n, quarter) = (40, 10);
        let parts = |rank: usize| [1, 0].map(|i| (2 * i + rank % 2) * quarter..(2 * i + rank % 2 + 1) * quarter);
        let own = parts(rank).map(|range| {
            let values: Vec<f32> = range.map(|i| (100 * (rank / 2) + i) as f32).collect();
            Tensor::new(values, &Device::Cpu).unwrap()
        });
        let mut ranges = vec![Vec::new(); 4];
        for &of in &group {
            ranges[of] = parts(of).to_vec();
        }
        let shard = Shard {
            own: own.to_vec(),
            ranges,
        };
        // The second time only the last rank of the first group gets the list.
        let second = if rank < 2 { vec![1] } else { Vec::new() };
        let (all, one) = (
            comm.gather_shards(1, vec![shard.clone()], group),
            comm.gather_shards(2, vec![shard], second),
        );
        let want: Vec<f32> = (0..n).map(|i| (100 * (rank / 2) + i) as f32).collect();
        let read = |list: WholeList| list.into_tensor(&[n]).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(
            all.wait().unwrap().into_iter().map(read).collect::<Vec<_>>(),
            std::slice::from_ref(&want)
        );
        let one: Vec<_> = one.wait().unwrap().into_iter().map(read).collect();
        assert_eq!(one, if rank == 1 { vec![want] } else { Vec::new() });
    });
}

#[test]
fn a_part_without_a_place_is_sent_only() {
    let found = threads::run(3, |comm| {
        let rank = comm.world().rank;
        let own = vec![Tensor::new(vec![rank as f32; rank + 1], &Device::Cpu).unwrap()];
        let (mut ranges, mut first) = (Vec::new(), 0);
        for of in 0..3 {
            let length = if of == rank { 0 } else { of + 1 };
            ranges.push(vec![if of == rank { 0..0 } else { first..first + length }]);
            first += length;
        }
        let list = comm
            .gather_shards(1, vec![Shard { own, ranges }], vec![0, 1, 2])
            .wait()
            .unwrap();
        let list = list.into_iter().next().unwrap();
        let n = list.elements();
        list.into_tensor(&[n]).unwrap().to_vec1::<f32>().unwrap()
    });
    assert_eq!(
        found,
        [
            vec![1.0, 1.0, 2.0, 2.0, 2.0],
            vec![0.0, 2.0, 2.0, 2.0],
            vec![0.0, 1.0, 1.0]
        ]
    );
}

/// Returns to each rank what is sent to it, and notes the time limits.
struct Echo(Arc<Mutex<Vec<Option<Duration>>>>);

impl wire::Wire for Echo {
    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &wire::WaitLimit) {
        self.0.lock().unwrap().push(wait.limit);
        for (rank, list) in into {
            list.copy_from_slice(out[*rank].1);
        }
    }

    fn floats(&mut self, _: &[(usize, &[f32])], _: &mut [(usize, &mut [f32])], _: &wire::WaitLimit) {}

    fn abort(&mut self, _: i32) {}
}

/// A rank may hang between its header and its bytes.
#[test]
fn bytes_have_a_time_limit_when_all_ranks_are_here() {
    let limits = Arc::new(Mutex::new(Vec::new()));
    let wire = Echo(limits.clone());
    let world = World {
        rank: 1,
        size: 2,
        host: "here".into(),
    };
    let group = RankGroup::start(move || Ok((wire, world)), |_| ()).unwrap();
    group.set_timeout(Duration::from_secs(5));
    for (patience, header) in [(Patience::Long, None), (Patience::Step, Some(7))] {
        limits.lock().unwrap().clear();
        assert_eq!(group.all_gather_bytes(vec![3], patience).unwrap(), [[3], [3]]);
        let want = [header, Some(7)].map(|s| s.map(Duration::from_secs));
        assert_eq!(*limits.lock().unwrap(), want, "{patience:?}");
    }
}

#[test]
fn a_rank_that_fails_is_heard_by_all() {
    for size in 2..=4 {
        let begun = Instant::now();
        let found = threads::run(size, |comm| {
            let rank = comm.world().rank;
            comm.all_gather_bytes(Vec::new(), Patience::Long).unwrap();
            if rank == 1 {
                return comm.fail(3, "no space\nhint: free some".into());
            }
            let lists = vec![vec![0.0; 5]; size];
            let error = comm.all_to_all(7, lists, vec![5; size]).wait().unwrap_err().to_string();
            assert!(error.contains("rank 1 (host here): no space"), "{error}");
            assert!(
                comm.all_gather_bytes(Vec::new(), Patience::Long).is_err(),
                "after a failure nothing travels"
            );
            comm.fail(1, "what follows from it".into())
        });
        let want = vec![RankFault {
            rank: "rank 1 (host here)".into(),
            code: 3,
            text: "no space\nhint: free some".into(),
        }];
        assert!(found.iter().all(|faults| *faults == want), "{found:?}");
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn failures_of_several_ranks_are_one_list() {
    let found = threads::run(3, |comm| match comm.world().rank {
        0 => {
            assert!(comm.all_gather_bytes(Vec::new(), Patience::Long).is_err());
            comm.fail(1, "third".into())
        }
        rank => comm.fail(2, format!("error {rank}")),
    });
    let texts: Vec<&str> = found[0].iter().map(|f| f.text.as_str()).collect();
    assert_eq!(texts, ["error 1", "error 2"]);
    assert!(found.iter().all(|faults| *faults == found[0]));
}

#[test]
fn ranks_that_lose_step_get_an_error() {
    let other_kind = threads::run(3, |comm| match comm.world().rank {
        2 => comm
            .all_gather_bytes(Vec::new(), Patience::Long)
            .unwrap_err()
            .to_string(),
        _ => comm
            .all_gather(1, vec![1.0], vec![1; 3])
            .wait()
            .unwrap_err()
            .to_string(),
    });
    let other_key = threads::run(3, |comm| {
        let key = comm.world().rank as u64 / 2;
        comm.all_gather(key, vec![1.0], vec![1; 3])
            .wait()
            .unwrap_err()
            .to_string()
    });
    for error in other_kind.iter().chain(&other_key) {
        assert!(error.contains("lost step: rank 0 is at a gathering"), "{error}");
        assert!(error.contains("rank 2"), "{error}");
    }
}

#[test]
fn a_rank_that_is_late_ends_the_job() {
    let found = threads::run(2, |comm| {
        comm.all_gather_bytes(Vec::new(), Patience::Long).unwrap();
        if comm.world().rank == 1 {
            std::thread::sleep(Duration::from_millis(500));
            return String::new();
        }
        comm.set_timeout(Duration::from_millis(50));
        comm.all_gather(1, vec![1.0], vec![1; 2])
            .wait()
            .unwrap_err()
            .to_string()
    });
    assert!(found[0].contains("has ended"), "{}", found[0]);
}

/// What a rank said that waited too long.
static LATE: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[test]
fn a_rank_that_waits_too_long_names_the_setting() {
    let wait = wire::WaitLimit {
        limit: Some(Duration::from_secs(4)),
        silence: Duration::from_secs(4),
        last: false,
        name: "rank 0 (host here)".into(),
        own: None,
        say: |text: &str| LATE.lock().unwrap().push(text.into()),
    };
    wait.late(&[1]);
    assert_eq!(
        LATE.lock().unwrap()[..],
        [
            "rank 0 (host here) has waited 4 s for rank 1 (see `Collective::set_timeout`): the job ends; the newest checkpoint is valid"
        ]
    );
}

/// The messages, and how often the wire could look at the other ranks while there was nothing to do.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
static LOOKS: Mutex<usize> = Mutex::new(0);

/// The other rank never comes to an operation.
struct Lonely;

impl wire::Wire for Lonely {
    fn bytes(&mut self, _: &[(usize, &[u8])], _: &mut [(usize, &mut [u8])], wait: &wire::WaitLimit) {
        wait.late(&[1]);
    }

    fn floats(&mut self, _: &[(usize, &[f32])], _: &mut [(usize, &mut [f32])], _: &wire::WaitLimit) {}

    fn idle(&mut self, _: &wire::WaitLimit) {
        *LOOKS.lock().unwrap() += 1;
    }

    fn abort(&mut self, _: i32) {}
}

#[test]
fn a_failure_that_the_others_never_hear_of_is_said_first() {
    let world = World {
        rank: 0,
        size: 2,
        host: "here".into(),
    };
    let say = |text: &str| SAID.lock().unwrap().push(text.into());
    let group = RankGroup::start(move || Ok((Lonely, world)), say).unwrap();
    let begun = Instant::now();
    while *LOOKS.lock().unwrap() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "no look at the others");
        std::thread::sleep(Duration::from_millis(5));
    }
    group.fail(1, "no space left\nhint: a larger disk".into());
    let said = SAID.lock().unwrap().clone();
    assert_eq!(said[0], "[rank 0 (host here)] no space left\nhint: a larger disk");
    assert!(
        said[1].starts_with("rank 0 (host here) has waited 15 s for rank 1: "),
        "{said:?}"
    );
    // The end of a rank after a failure that all know is no news.
    let looks = *LOOKS.lock().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(*LOOKS.lock().unwrap(), looks);
    group.close();
}
