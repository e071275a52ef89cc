//! Ranks that are threads of one process, for tests.

use super::group::{Wait, Wire};
use super::{Collective, Fault, Group, Patience, Pending, Shard, State, Whole, World};
use crate::base::Result;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

enum Message {
    Bytes(Vec<u8>),
    Floats(Vec<f32>),
}

/// The channels of one rank to and from every rank.
struct ThreadWire {
    rank: usize,
    to: Vec<Sender<Message>>,
    from: Vec<Receiver<Message>>,
}

impl ThreadWire {
    fn travels(&self, rank: usize, length: usize) -> bool {
        rank != self.rank && length > 0
    }

    fn receive(&self, rank: usize, wait: &Wait) -> Message {
        let found = match wait.limit {
            Some(limit) => self.from[rank].recv_timeout(limit).ok(),
            None => self.from[rank].recv().ok(),
        };
        found.unwrap_or_else(|| {
            (wait.late)(&[rank]);
            panic!("rank {rank} is missing")
        })
    }
}

impl Wire for ThreadWire {
    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &Wait) {
        for (rank, list) in out.iter().filter(|(rank, list)| self.travels(*rank, list.len())) {
            let _ = self.to[*rank].send(Message::Bytes(list.to_vec()));
        }
        for (rank, list) in into.iter_mut().filter(|(rank, list)| self.travels(*rank, list.len())) {
            match self.receive(*rank, wait) {
                Message::Bytes(found) => list.copy_from_slice(&found),
                Message::Floats(_) => panic!("numbers instead of bytes"),
            }
        }
    }

    fn floats(&mut self, out: &[(usize, &[f32])], into: &mut [(usize, &mut [f32])], wait: &Wait) {
        for (rank, list) in out.iter().filter(|(rank, list)| self.travels(*rank, list.len())) {
            let _ = self.to[*rank].send(Message::Floats(list.to_vec()));
        }
        for (rank, list) in into.iter_mut().filter(|(rank, list)| self.travels(*rank, list.len())) {
            match self.receive(*rank, wait) {
                Message::Floats(found) => list.copy_from_slice(&found),
                Message::Bytes(_) => panic!("bytes instead of numbers"),
            }
        }
    }

    fn abort(&mut self, code: i32) {
        panic!("the job was ended with code {code}");
    }
}

/// Runs `work` on `size` ranks; returns their results in order.
pub(crate) fn run<T: Send>(size: usize, work: impl Fn(Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    let mut to: Vec<Vec<Sender<Message>>> = (0..size).map(|_| Vec::new()).collect();
    let mut from: Vec<Vec<Receiver<Message>>> = (0..size).map(|_| Vec::new()).collect();
    for sender in to.iter_mut() {
        for receiver in from.iter_mut() {
            let (send, receive) = channel();
            sender.push(send);
            receiver.push(receive);
        }
    }
    let wires: Vec<ThreadWire> = to
        .into_iter()
        .zip(from)
        .enumerate()
        .map(|(rank, (to, from))| ThreadWire { rank, to, from })
        .collect();
    let work = &work;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = wires
            .into_iter()
            .map(|wire| {
                scope.spawn(move || {
                    let world = World {
                        rank: wire.rank,
                        size,
                        host: "here".into(),
                    };
                    let group = Group::start(move || Ok((wire, world)), |_| ()).unwrap();
                    let out = work(group.clone());
                    group.close();
                    out
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Ranks with a slow connection: the numbers that a rank sends leave one list after the other, at a rate.
pub(crate) struct Slowed {
    comm: Arc<dyn Collective>,
    bytes_per_second: f64,
    /// When the connection is free again.
    free: Mutex<Instant>,
}

impl Slowed {
    pub(crate) fn new(comm: Arc<dyn Collective>, bytes_per_second: f64) -> Self {
        Self {
            comm,
            bytes_per_second,
            free: Mutex::new(Instant::now()),
        }
    }

    /// `pending`, which ends when `numbers` f32 numbers have left.
    fn slow(&self, numbers: usize, pending: Pending) -> Pending {
        let takes = Duration::from_secs_f64(4.0 * numbers as f64 / self.bytes_per_second);
        let end = {
            let mut free = self.free.lock().unwrap();
            *free = (*free).max(Instant::now()) + takes;
            *free
        };
        let (reply, coming) = channel();
        std::thread::spawn(move || {
            let lists = pending.wait();
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
            let _ = reply.send(lists);
        });
        Pending(State::Coming(coming))
    }
}

impl Collective for Slowed {
    fn world(&self) -> &World {
        self.comm.world()
    }

    fn exchange(&self, key: u64, parts: Vec<Vec<f32>>, lengths: Vec<usize>) -> Pending {
        let all: usize = parts.iter().map(Vec::len).sum();
        let own = parts.get(self.world().rank).map_or(0, Vec::len);
        self.slow(all - own, self.comm.exchange(key, parts, lengths))
    }

    fn gather(&self, key: u64, own: Vec<f32>, lengths: Vec<usize>) -> Pending {
        let sent = own.len() * (self.world().size - 1);
        self.slow(sent, self.comm.gather(key, own, lengths))
    }

    fn collect(&self, key: u64, shards: Vec<Shard>, to: Option<usize>) -> Pending<Whole> {
        self.comm.collect(key, shards, to)
    }

    fn bytes(&self, own: Vec<u8>, patience: Patience) -> Result<Vec<Vec<u8>>> {
        self.comm.bytes(own, patience)
    }

    fn fail(&self, code: i32, text: String) -> Vec<Fault> {
        self.comm.fail(code, text)
    }

    fn close(&self) {
        self.comm.close();
    }

    fn set_timeout(&self, timeout: Duration) {
        self.comm.set_timeout(timeout);
    }
}
