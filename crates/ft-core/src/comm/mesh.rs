//! TCP connections between all ranks of a launcher without MPI, after they have met: how their bytes travel, and how a rank that is
//! gone or hangs is found.
//!
//! Before each list goes the byte `LIST`. Between two lists a rank that computes or works alone sends the byte
//! `HEARTBEAT` from time to time, for ranks that wait for it without a limit.

use super::meeting::{Rendezvous, meet};
use super::wire::{POLL, WaitLimit};
use crate::base::{Error, Result, sockets};
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Time between two looks at bytes in flight.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

const LIST: u8 = 1;
const HEARTBEAT: u8 = 2;
/// Heartbeats that are read at once.
const HEARTBEATS: usize = 64;

/// Why bytes did not arrive: the ranks that are missing at the time limit, that send no heartbeat, or whose connection
/// has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LostRanks {
    Late(Vec<usize>),
    Silent(Vec<usize>),
    Gone(Vec<usize>),
}

/// The connections of one rank.
pub(super) struct Mesh {
    peers: Vec<Option<TcpStream>>,
    /// Host names by rank.
    pub(super) hosts: Vec<String>,
    /// When the last byte of each rank has come.
    seen: Vec<Instant>,
    /// When this rank has sent the last heartbeat.
    sent: Instant,
}

/// A list in flight. `begun`: its first byte, `LIST`, has left or come.
struct Sending<'a> {
    begun: bool,
    rest: &'a [u8],
}

struct Receiving<'a> {
    begun: bool,
    rest: &'a mut [u8],
}

impl Mesh {
    /// Connects to the other ranks. `own`: name of this machine.
    ///
    /// # Errors
    /// A rank that does not connect in time; ranks that do not agree on their number.
    pub(super) fn open(rendezvous: &Rendezvous, own: &str) -> Result<Self> {
        let (peers, hosts) = meet(rendezvous, own)?;
        for peer in peers.iter().flatten() {
            let set = sockets::keep_alive(peer).and_then(|()| peer.set_nodelay(true));
            let set = set.and_then(|()| peer.set_nonblocking(true));
            set.map_err(|e| Error::io("cannot set up a connection between ranks").cause(e))?;
        }
        let seen = vec![Instant::now(); peers.len()];
        Ok(Self {
            peers,
            hosts,
            seen,
            sent: Instant::now(),
        })
    }

    /// Sends each list of `out` to its rank and fills each list of `into`. The lists between two ranks are in the same order
    /// on both; those of the own rank do not travel.
    pub(super) fn swap(
        &mut self,
        out: &[(usize, &[u8])],
        into: &mut [(usize, &mut [u8])],
        wait: &WaitLimit,
    ) -> std::result::Result<(), LostRanks> {
        let mut sends: Vec<VecDeque<Sending>> = self.peers.iter().map(|_| VecDeque::new()).collect();
        let mut receives: Vec<VecDeque<Receiving>> = self.peers.iter().map(|_| VecDeque::new()).collect();
        for (rank, list) in out.iter().filter(|(_, list)| !list.is_empty()) {
            let (begun, rest) = (false, *list);
            sends[*rank].push_back(Sending { begun, rest });
        }
        for (rank, list) in into.iter_mut().filter(|(_, list)| !list.is_empty()) {
            let (begun, rest) = (false, &mut list[..]);
            receives[*rank].push_back(Receiving { begun, rest });
        }
        let (begun, mut pause) = (Instant::now(), SHORTEST);
        let mut looked = begun;
        loop {
            let (mut missing, mut gone, mut moved) = (Vec::new(), Vec::new(), false);
            for (rank, peer) in self.peers.iter().enumerate() {
                let Some(peer) = peer else { continue };
                let progress = write_some(peer, &mut sends[rank]).and_then(|wrote| {
                    let read = read_some(peer, &mut receives[rank])?;
                    Ok(wrote || read)
                });
                match progress {
                    Ok(false) => {}
                    Ok(true) => {
                        moved = true;
                        self.seen[rank] = Instant::now();
                    }
                    Err(_) => gone.push(rank),
                }
                if !sends[rank].is_empty() || !receives[rank].is_empty() {
                    missing.push(rank);
                }
            }
            if !gone.is_empty() {
                return Err(LostRanks::Gone(gone));
            }
            if missing.is_empty() {
                return Ok(());
            }
            // Also ranks from which nothing more is needed now: the first one that is gone must be named, not one that ends because of it.
            if !wait.last && looked.elapsed() > POLL {
                looked = Instant::now();
                // Their next bytes are those of a later list.
                let done = (0..receives.len()).filter(|rank| receives[*rank].is_empty());
                self.take_heartbeats(done);
                let gone = self.those(|peer| match peer.peek(&mut [0]) {
                    Ok(read) => read == 0,
                    Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
                });
                if !gone.is_empty() {
                    return Err(LostRanks::Gone(gone));
                }
            }
            match wait.limit {
                Some(limit) if begun.elapsed() > limit => return Err(LostRanks::Late(missing)),
                Some(_) => {}
                None => {
                    missing.retain(|rank| self.seen[*rank].max(begun).elapsed() > wait.silence);
                    if !missing.is_empty() {
                        return Err(LostRanks::Silent(missing));
                    }
                }
            }
            pause = if moved { SHORTEST } else { (2 * pause).min(LONGEST) };
            if !moved {
                std::thread::sleep(pause);
            }
        }
    }

    /// While this rank computes or works alone: sends a heartbeat if it is time, and takes those of the others.
    pub(super) fn exchange_heartbeats(&mut self, every: Duration) {
        self.take_heartbeats(0..self.peers.len());
        if self.sent.elapsed() < every {
            return;
        }
        self.sent = Instant::now();
        for mut peer in self.peers.iter().flatten() {
            // A process that hangs takes none at some time, and a connection that has ended is found by the next look.
            let _ = peer.write(&[HEARTBEAT]);
        }
    }

    /// Takes the heartbeats of these ranks, from which no list is in flight.
    fn take_heartbeats(&mut self, ranks: impl Iterator<Item = usize>) {
        for rank in ranks {
            if self.peers[rank].as_ref().is_some_and(take_heartbeats) {
                self.seen[rank] = Instant::now();
            }
        }
    }

    /// The same connections, to look at from another thread.
    pub(super) fn watched(&self) -> std::io::Result<Self> {
        let copy = |peer: &Option<TcpStream>| peer.as_ref().map(TcpStream::try_clone).transpose();
        Ok(Self {
            peers: self.peers.iter().map(copy).collect::<std::io::Result<_>>()?,
            hosts: self.hosts.clone(),
            seen: self.seen.clone(),
            sent: self.sent,
        })
    }

    /// The ranks whose connection has ended, also if bytes of them were not read yet.
    pub(super) fn gone(&self) -> Vec<usize> {
        self.those(sockets::has_ended)
    }

    /// The ranks whose next list begins with `byte`; nothing is read.
    pub(super) fn about_to_say(&self, byte: u8) -> Vec<usize> {
        self.those(|peer| {
            let mut next = [0; HEARTBEATS];
            let come = peer.peek(&mut next).unwrap_or(0);
            let mut list = next[..come].iter().skip_while(|next| **next == HEARTBEAT);
            (list.next(), list.next()) == (Some(&LIST), Some(&byte))
        })
    }

    fn those(&self, hold: impl Fn(&TcpStream) -> bool) -> Vec<usize> {
        let ranks = self.peers.iter().enumerate();
        let ranks = ranks.filter(|(_, peer)| peer.as_ref().is_some_and(&hold));
        ranks.map(|(rank, _)| rank).collect()
    }
}

/// Writes what the connection takes now. True if it took something.
fn write_some(mut peer: &TcpStream, lists: &mut VecDeque<Sending>) -> std::io::Result<bool> {
    let mut moved = false;
    while let Some(list) = lists.front_mut() {
        let before = usize::from(!list.begun);
        // One packet for a short list.
        match peer.write_vectored(&[IoSlice::new(&[LIST][..before]), IoSlice::new(list.rest)]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => {
                list.rest = &list.rest[n - before..];
                list.begun = true;
                moved = true;
                if list.rest.is_empty() {
                    lists.pop_front();
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(moved)
}

/// Reads what the connection has now. True if it had something.
fn read_some(mut peer: &TcpStream, lists: &mut VecDeque<Receiving>) -> std::io::Result<bool> {
    let mut moved = false;
    while let Some(list) = lists.front_mut() {
        let mut first = [0];
        let into = if list.begun { &mut *list.rest } else { &mut first[..] };
        match peer.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                moved = true;
                match (list.begun, first) {
                    (true, _) => list.rest = &mut std::mem::take(&mut list.rest)[n..],
                    (false, [LIST]) => list.begun = true,
                    (false, [HEARTBEAT]) => {}
                    (false, _) => return Err(ErrorKind::InvalidData.into()),
                }
                if list.rest.is_empty() {
                    lists.pop_front();
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(moved)
}

/// Reads the heartbeats that have come before the next list. True if there were some.
fn take_heartbeats(mut peer: &TcpStream) -> bool {
    let mut found = false;
    loop {
        let mut next = [0; HEARTBEATS];
        let come = peer.peek(&mut next).unwrap_or(0);
        let heartbeats = next[..come].iter().take_while(|byte| **byte == HEARTBEAT).count();
        if heartbeats == 0 || peer.read(&mut next[..heartbeats]).is_err() {
            return found;
        }
        found = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::meeting::tests::{free_port, rendezvous};

    fn within(limit: Duration) -> WaitLimit {
        WaitLimit {
            limit: Some(limit),
            silence: limit,
            last: false,
            name: String::new(),
            own: None,
            say: |_| {},
        }
    }

    /// As long as the other ranks send heartbeats.
    fn patient(silence: Duration) -> WaitLimit {
        WaitLimit {
            limit: None,
            ..within(silence)
        }
    }

    /// Each rank on a thread.
    fn connected(size: usize) -> Vec<Mesh> {
        let port = free_port();
        std::thread::scope(|scope| {
            let open = |rank: usize| {
                let rendezvous = rendezvous(rank, size, port, 20);
                scope.spawn(move || Mesh::open(&rendezvous, &format!("host-{rank}")).unwrap())
            };
            let ranks: Vec<_> = (0..size).map(open).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn lists_arrive_in_order_whatever_their_sizes() {
        let size = 4;
        let meshes = connected(size);
        assert_eq!(meshes[2].hosts, ["host-0", "host-1", "host-2", "host-3"]);
        // More than the buffers of a connection hold, so all ranks have to read while they write.
        let list = |from: usize, to: usize, number: usize| -> Vec<u8> {
            let length = [3, 0, 3 << 20][number] + 7 * from + to;
            (0..length).map(|i| (i * 31 + 97 * from + to + number) as u8).collect()
        };
        std::thread::scope(|scope| {
            for (rank, mut mesh) in meshes.into_iter().enumerate() {
                scope.spawn(move || {
                    let others: Vec<(usize, usize)> = (0..size).flat_map(|r| [(r, 0), (r, 1), (r, 2)]).collect();
                    let out: Vec<Vec<u8>> = others.iter().map(|(to, n)| list(rank, *to, *n)).collect();
                    let want: Vec<Vec<u8>> = others.iter().map(|(from, n)| list(*from, rank, *n)).collect();
                    let mut into: Vec<Vec<u8>> = want.iter().map(|list| vec![0; list.len()]).collect();
                    let travels = |(i, _): &(usize, _)| others[*i].0 != rank;
                    let out: Vec<(usize, &[u8])> = out
                        .iter()
                        .enumerate()
                        .filter(|(i, _)| others[*i].0 != rank)
                        .map(|(i, list)| (others[i].0, &list[..]))
                        .collect();
                    let mut views: Vec<(usize, &mut [u8])> = into
                        .iter_mut()
                        .enumerate()
                        .filter(travels)
                        .map(|(i, list)| (others[i].0, &mut list[..]))
                        .collect();
                    let last = WaitLimit {
                        last: true,
                        ..within(Duration::from_secs(20))
                    };
                    // A heartbeat may come before a list.
                    mesh.exchange_heartbeats(Duration::ZERO);
                    mesh.swap(&out, &mut views, &last).unwrap();
                    for (i, (found, want)) in into.iter().zip(&want).enumerate() {
                        assert!(others[i].0 == rank || found == want, "{i}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_is_gone_or_late_is_named() {
        let mut meshes = connected(3);
        let (mut byte, mut other) = ([0], [0]);
        let limit = within(Duration::from_millis(50));
        let late = meshes[0].swap(&[], &mut [(1, &mut byte), (2, &mut other)], &limit);
        assert_eq!(late, Err(LostRanks::Late(vec![1, 2])));
        assert!(meshes[0].gone().is_empty());
        drop(meshes.remove(2));
        assert_eq!(
            meshes[1].swap(&[], &mut [(2, &mut byte)], &patient(Duration::MAX)),
            Err(LostRanks::Gone(vec![2]))
        );
        assert_eq!(meshes[0].gone(), [2]);
        // The first one that is gone is named, also if bytes of another one are missing.
        let of_other = meshes[0].swap(&[], &mut [(1, &mut byte)], &patient(Duration::MAX));
        assert_eq!(of_other, Err(LostRanks::Gone(vec![2])));
        let limit = WaitLimit { last: true, ..limit };
        let at_the_end = meshes[0].swap(&[], &mut [(1, &mut byte)], &limit);
        assert_eq!(at_the_end, Err(LostRanks::Late(vec![1])));
    }

    #[test]
    fn a_byte_in_flight_is_seen_and_stays() {
        let mut meshes = connected(2);
        let limit = within(Duration::from_secs(20));
        meshes[1].exchange_heartbeats(Duration::ZERO);
        meshes[1].swap(&[(0, &[7, 8])], &mut [], &limit).unwrap();
        let begun = Instant::now();
        // Another thread may look too.
        let watched = meshes[0].watched().unwrap();
        while watched.about_to_say(7).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        assert!(meshes[0].about_to_say(8).is_empty());
        // An end is seen although the bytes before it were not read.
        drop(meshes.remove(1));
        while meshes[0].gone().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        let mut bytes = [0; 2];
        meshes[0].swap(&[], &mut [(1, &mut bytes)], &limit).unwrap();
        assert_eq!(bytes, [7, 8]);
    }

    /// Rank 1 works alone for longer than rank 0 waits for a heartbeat, rank 2 hangs.
    #[test]
    fn a_rank_that_sends_no_heartbeat_is_named() {
        let mut meshes = connected(3);
        let silence = Duration::from_millis(1500);
        let (mut byte, mut other) = ([0], [0]);
        std::thread::scope(|scope| {
            let [first, second, third] = &mut meshes[..] else {
                panic!("three ranks")
            };
            let works = scope.spawn(move || {
                let begun = Instant::now();
                while begun.elapsed() < 3 * silence {
                    second.exchange_heartbeats(silence / 8);
                    std::thread::sleep(Duration::from_millis(5));
                }
                second.swap(&[(0, &[7])], &mut [], &within(silence))
            });
            let begun = Instant::now();
            assert_eq!(first.swap(&[], &mut [(1, &mut byte)], &patient(silence)), Ok(()));
            assert!(begun.elapsed() > 2 * silence && byte == [7]);
            assert_eq!(works.join().unwrap(), Ok(()));
            let lost = first.swap(&[], &mut [(2, &mut other)], &patient(silence));
            assert_eq!(lost, Err(LostRanks::Silent(vec![2])));
            // Its heartbeats are taken while nothing is awaited.
            third.exchange_heartbeats(Duration::ZERO);
            let begun = Instant::now();
            let before = first.seen[2];
            while first.seen[2] == before {
                first.exchange_heartbeats(Duration::MAX);
                assert!(begun.elapsed() < Duration::from_secs(20));
            }
        });
    }
}
