//! Ranks that are threads of one process, for tests.

use super::group::{Wait, Wire};
use super::{Collective, Group, World};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

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
