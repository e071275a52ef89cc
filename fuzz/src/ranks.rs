//! What one rank of a job says to another one.

use super::said;
use candle_core::Device;
use ft::base::Result;
use ft::base::means::NamedSum;
use ft::comm::{self, Collective, Patience, PendingNumbers, RankFault, Shard, SingleRank, WholeList, World};
use ft::engine::window::{self, MicroReport};
use ft::ops::step_stats::StepSums;
use ft::recipe::RankWeights;
use ft::train::ranks::RunRanks;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Rank 0 of two. Rank 1 says the same bytes each time.
struct Pair {
    world: World,
    other: Vec<u8>,
    /// What rank 0 said last.
    own: Mutex<Vec<u8>>,
}

impl Pair {
    fn new(other: &[u8]) -> Self {
        Self {
            world: World {
                rank: 0,
                size: 2,
                host: "a".into(),
            },
            other: other.to_vec(),
            own: Mutex::default(),
        }
    }
}

impl Collective for Pair {
    fn world(&self) -> &World {
        &self.world
    }

    fn all_gather_bytes(&self, own: Vec<u8>, _: Patience) -> Result<Vec<Vec<u8>>> {
        self.own.lock().unwrap().clone_from(&own);
        Ok(vec![own, self.other.clone()])
    }

    fn all_to_all(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> PendingNumbers {
        SingleRank::default().all_to_all(key, parts, lengths)
    }

    fn all_gather(&self, key: u64, own: Vec<f32>, lengths: Vec<usize>) -> PendingNumbers {
        SingleRank::default().all_gather(key, own, lengths)
    }

    fn gather_shards(&self, key: u64, shards: Vec<Shard>, to: Vec<usize>) -> PendingNumbers<WholeList> {
        SingleRank::default().gather_shards(key, shards, to)
    }

    fn use_device(&self, _: &Device) -> Result<()> {
        Ok(())
    }

    fn own_devices(&self) -> bool {
        false
    }

    fn fail(&self, code: i32, text: String) -> Vec<RankFault> {
        SingleRank::default().fail(code, text)
    }

    fn close(&self) {}

    fn set_timeout(&self, _: Duration) {}

    fn sent(&self) -> u64 {
        0
    }
}

fn sum(micro: u64) -> MicroReport {
    MicroReport {
        micro,
        sums: StepSums {
            loss: 1.5,
            correct: 2.0,
            squares: 0.25,
        },
        means: vec![NamedSum {
            name: "kl".into(),
            sum: 0.1,
            count: 3.0,
        }],
        routers: vec![1.0],
    }
}

/// The sums of the micro-batches of another rank, which are the same if they are sent again; and what ranks compare before a run.
pub fn sums(bytes: &[u8]) {
    if let Some(all) = said(window::all(&Pair::new(bytes), vec![sum(1), sum(4)])) {
        assert!(all.len() >= 2 && all.is_sorted_by_key(|report| report.micro));
        let sender = Pair::new(b"");
        window::all(&sender, all.clone()).unwrap();
        let sent = sender.own.lock().unwrap().clone();
        let again = window::all(&Pair::new(&sent), Vec::new()).unwrap();
        // A loss may be no number.
        assert_eq!(format!("{again:?}"), format!("{all:?}"));
    }
    let pair = Arc::new(Pair::new(bytes));
    assert_eq!(comm::hosts(&*pair).unwrap().len(), 2);
    let ranks = RunRanks(pair.clone());
    let most = ranks.most(3, Patience::Step).unwrap();
    assert!(most >= 3 && (most == 3 || bytes.len() == 8));
    if let Some(state) = said(ranks.process(RankWeights::ShardedInNode)) {
        assert!(state.ranks == 2 && state.machines > 0);
    }
    let facts = [
        ("a".to_string(), "b".to_string()),
        ("seed".to_string(), "1".to_string()),
    ];
    if said(ranks.same(&facts)).is_some() {
        let heard: Vec<(String, String)> = serde_json::from_slice(bytes).unwrap();
        assert_eq!(heard, facts);
    }
    let own = pair.own.lock().unwrap().clone();
    let echo = RunRanks(Arc::new(Pair::new(&own)));
    echo.same(&facts).unwrap();
}
