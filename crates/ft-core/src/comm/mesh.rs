//! TCP connections between all ranks: how the ranks of a launcher without MPI find each other, and how their bytes travel.
//!
//! Rank 0 listens at a known address. Every other rank connects to it and says its number, the number of ranks, its host
//! and the port at which it listens itself; when all are there, rank 0 answers with the list. Then each rank connects to
//! the ranks between 0 and itself. Each message of this beginning is its length (4 bytes) and a text.

use crate::base::{Error, Result};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// First word of a rank; whatever else connects is another program.
const GREETING: &str = "ft-rank-1";
/// Longest text of a greeting.
const SHORT: usize = 1 << 10;
/// Longest list of the ranks.
const LONG: usize = 1 << 22;
/// How long one who has connected may take to say who it is.
const MANNERS: Duration = Duration::from_secs(5);
/// How long rank 0 answers ranks that come after it has found an error.
const SOON: Duration = Duration::from_secs(1);
/// Time between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(100);
/// Time between two looks at bytes under way.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// Where and how the ranks of a job find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// Number of this process.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Host of rank 0.
    pub host: String,
    /// Port at which rank 0 listens.
    pub port: u16,
    /// How long the ranks wait for each other.
    pub limit: Duration,
}

impl Rendezvous {
    fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// Why bytes did not arrive: the ranks that are missing at the time limit, or whose connection has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lost {
    Late(Vec<usize>),
    Gone(Vec<usize>),
}

/// The connections of one rank.
pub(super) struct Mesh {
    peers: Vec<Option<TcpStream>>,
    /// Host names by rank.
    pub(super) hosts: Vec<String>,
}

/// What a rank says of itself.
#[derive(Clone)]
struct Greeting {
    rank: usize,
    size: usize,
    port: u16,
    host: String,
}

impl Greeting {
    fn text(&self) -> String {
        format!("{GREETING} {} {} {} {}", self.rank, self.size, self.port, self.host)
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.splitn(5, ' ');
        if words.next() != Some(GREETING) {
            return None;
        }
        Some(Self {
            rank: words.next()?.parse().ok()?,
            size: words.next()?.parse().ok()?,
            port: words.next()?.parse().ok()?,
            host: words.next()?.to_string(),
        })
    }
}

impl Mesh {
    /// Connects to the other ranks. `own`: name of this machine.
    ///
    /// # Errors
    /// A rank that does not come in time; ranks that do not agree on their number.
    pub(super) fn open(rendezvous: &Rendezvous, own: &str) -> Result<Self> {
        let end = Instant::now() + rendezvous.limit;
        let mut peers: Vec<Option<TcpStream>> = (0..rendezvous.size).map(|_| None).collect();
        let hosts = if rendezvous.rank == 0 {
            receive_all(rendezvous, end, own, &mut peers)?
        } else {
            connect_all(rendezvous, end, own, &mut peers)?
        };
        for peer in peers.iter().flatten() {
            let set = peer.set_nodelay(true).and_then(|()| peer.set_nonblocking(true));
            set.map_err(|e| Error::io("cannot set up a connection between ranks").cause(e))?;
        }
        Ok(Self { peers, hosts })
    }

    /// Sends each list of `out` to its rank and fills each list of `into`. The lists between two ranks are in the same order
    /// on both; those of the own rank do not travel.
    pub(super) fn swap(
        &mut self,
        out: &[(usize, &[u8])],
        into: &mut [(usize, &mut [u8])],
        limit: Option<Duration>,
    ) -> std::result::Result<(), Lost> {
        let mut sends: Vec<VecDeque<&[u8]>> = self.peers.iter().map(|_| VecDeque::new()).collect();
        let mut receives: Vec<VecDeque<&mut [u8]>> = self.peers.iter().map(|_| VecDeque::new()).collect();
        for (rank, list) in out.iter().filter(|(_, list)| !list.is_empty()) {
            sends[*rank].push_back(list);
        }
        for (rank, list) in into.iter_mut().filter(|(_, list)| !list.is_empty()) {
            receives[*rank].push_back(list);
        }
        let (begun, mut pause) = (Instant::now(), SHORTEST);
        loop {
            let (mut missing, mut gone, mut moved) = (Vec::new(), Vec::new(), false);
            for (rank, peer) in self.peers.iter_mut().enumerate() {
                let Some(peer) = peer else { continue };
                let progress = write_some(peer, &mut sends[rank]).and_then(|wrote| {
                    let read = read_some(peer, &mut receives[rank])?;
                    Ok(wrote || read)
                });
                match progress {
                    Ok(some) => moved |= some,
                    Err(_) => gone.push(rank),
                }
                if !sends[rank].is_empty() || !receives[rank].is_empty() {
                    missing.push(rank);
                }
            }
            if !gone.is_empty() {
                return Err(Lost::Gone(gone));
            }
            if missing.is_empty() {
                return Ok(());
            }
            if limit.is_some_and(|limit| begun.elapsed() > limit) {
                return Err(Lost::Late(missing));
            }
            pause = if moved { SHORTEST } else { (2 * pause).min(LONGEST) };
            if !moved {
                std::thread::sleep(pause);
            }
        }
    }

    /// The same connections, to look at from another thread.
    pub(super) fn watched(&self) -> std::io::Result<Self> {
        let copy = |peer: &Option<TcpStream>| peer.as_ref().map(TcpStream::try_clone).transpose();
        Ok(Self {
            peers: self.peers.iter().map(copy).collect::<std::io::Result<_>>()?,
            hosts: self.hosts.clone(),
        })
    }

    /// The ranks whose connection has ended.
    pub(super) fn gone(&self) -> Vec<usize> {
        let ended = |peer: &Option<TcpStream>| {
            let Some(peer) = peer else { return false };
            match peer.peek(&mut [0]) {
                Ok(n) => n == 0,
                Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            }
        };
        let ranks = self.peers.iter().enumerate().filter(|(_, peer)| ended(peer));
        ranks.map(|(rank, _)| rank).collect()
    }
}

/// Writes what the connection takes now. True if it took something.
fn write_some(mut peer: &TcpStream, lists: &mut VecDeque<&[u8]>) -> std::io::Result<bool> {
    let mut moved = false;
    while let Some(list) = lists.front_mut() {
        match peer.write(list) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => {
                *list = &list[n..];
                moved = true;
                if list.is_empty() {
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
fn read_some(mut peer: &TcpStream, lists: &mut VecDeque<&mut [u8]>) -> std::io::Result<bool> {
    let mut moved = false;
    while let Some(list) = lists.front_mut() {
        match peer.read(list) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                *list = &mut std::mem::take(list)[n..];
                moved = true;
                if list.is_empty() {
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

/// Rank 0: waits for all others and sends them the list of addresses. Returns the host names.
fn receive_all(
    rendezvous: &Rendezvous,
    end: Instant,
    own: &str,
    peers: &mut [Option<TcpStream>],
) -> Result<Vec<String>> {
    let (size, place) = (rendezvous.size, rendezvous.place());
    let listener = listen(rendezvous)?;
    let mut lines: Vec<(String, String)> = vec![(String::new(), own.to_string()); size];
    while peers.iter().flatten().count() + 1 < size {
        let Some((stream, from, greeting)) = accept(&listener, end) else {
            let missing: Vec<String> = (1..size)
                .filter(|r| peers[*r].is_none())
                .map(|r| r.to_string())
                .collect();
            let noun = if missing.len() == 1 { "rank" } else { "ranks" };
            let error = Error::io("not all ranks have come to rank 0 in time")
                .at(&place)
                .found(format!(
                    "{noun} {} of {size} missing after {} s",
                    missing.join(", "),
                    rendezvous.limit.as_secs()
                ));
            return refuse(peers, None, error);
        };
        let rank = greeting.rank;
        let error = if greeting.size != size {
            Error::usage("the ranks do not agree on their number")
                .at(&place)
                .found(format!(
                    "rank {rank} (host {}) is one of {}, rank 0 (host {own}) one of {size}",
                    greeting.host, greeting.size
                ))
        } else if rank == 0 || rank >= size || peers[rank].is_some() {
            Error::usage("two processes have the number of one rank, or a number that is too large")
                .at(&place)
                .found(format!("rank {rank} of {size}, from host {}", greeting.host))
        } else {
            lines[rank] = (SocketAddr::new(from.ip(), greeting.port).to_string(), greeting.host);
            peers[rank] = Some(stream);
            continue;
        };
        let _ = say(&stream, &refusal(&error), end);
        return refuse(peers, Some(&listener), error);
    }
    let near = |(address, _): &&(String, String)| address.parse::<SocketAddr>().is_ok_and(|a| a.ip().is_loopback());
    let local = lines.iter().skip(1).filter(near).count();
    if local > 0 && local + 1 < size {
        let error =
            Error::usage("rank 0 has a loopback address for the ranks of its own machine, which the others cannot use")
                .at(&place)
                .hint("write the IP address of the machine of rank 0 as `MASTER_ADDR`");
        return refuse(peers, None, error);
    }
    let mut list = String::from("yes");
    for (address, host) in &lines {
        list.push_str(&format!("\n{address} {host}"));
    }
    for peer in peers.iter().flatten() {
        say(peer, &list, end).map_err(|e| Error::io("a rank has left before the beginning").at(&place).cause(e))?;
    }
    Ok(lines.into_iter().map(|(_, host)| host).collect())
}

fn refusal(error: &Error) -> String {
    format!("no\n{error}")
}

/// Sends the error to all ranks that have come, and to those that are about to come.
fn refuse<T>(peers: &[Option<TcpStream>], listener: Option<&TcpListener>, error: Error) -> Result<T> {
    let soon = Instant::now() + SOON;
    for peer in peers.iter().flatten() {
        let _ = say(peer, &refusal(&error), soon);
    }
    let Some(listener) = listener else { return Err(error) };
    // Rank 0 has no connection, and one has its answer already.
    let missing = peers.iter().filter(|peer| peer.is_none()).count().saturating_sub(2);
    for _ in 0..missing {
        let Some((late, ..)) = accept(listener, soon) else {
            break;
        };
        let _ = say(&late, &refusal(&error), soon);
    }
    Err(error)
}

/// Another rank: connects to rank 0, then to those below it, and waits for those above it. Returns the host names.
fn connect_all(
    rendezvous: &Rendezvous,
    end: Instant,
    own: &str,
    peers: &mut [Option<TcpStream>],
) -> Result<Vec<String>> {
    let (rank, place) = (rendezvous.rank, rendezvous.place());
    let lost = |e: std::io::Error| {
        Error::io("rank 0 does not answer")
            .at(&place)
            .cause(e)
            .found(format!("rank {rank} of {}", rendezvous.size))
    };
    let root = connect(rendezvous, end)?;
    let here = root.local_addr().map_err(lost)?.ip();
    let listener = TcpListener::bind((here, 0)).map_err(lost)?;
    let port = listener.local_addr().map_err(lost)?.port();
    let greeting = Greeting {
        rank,
        size: rendezvous.size,
        port,
        host: own.to_string(),
    };
    say(&root, &greeting.text(), end).map_err(lost)?;
    // Rank 0 waits for all others first, and says who is missing: it has the same limit.
    let list = hear(&root, LONG, end + MANNERS).map_err(lost)?;
    if let Some(why) = list.strip_prefix("no\n") {
        return Err(Error::usage("rank 0 refuses this rank")
            .at(&place)
            .found(format!("rank {rank} of {}", rendezvous.size))
            .cause(why));
    }
    let lines: Vec<(&str, &str)> = list.lines().skip(1).filter_map(|line| line.split_once(' ')).collect();
    if lines.len() != rendezvous.size {
        return Err(Error::format("what answers is not rank 0 of this job").at(&place));
    }
    peers[0] = Some(root);
    for (other, (address, host)) in lines.iter().enumerate().take(rank).skip(1) {
        let fault = |e: std::io::Error| {
            Error::io(format!("rank {rank} cannot reach rank {other} (host {host})"))
                .at(address)
                .cause(e)
        };
        let to: SocketAddr = address
            .parse()
            .map_err(|_| Error::format("rank 0 has sent no address").at(&place).found(address))?;
        let stream = TcpStream::connect_timeout(&to, left(end)).map_err(fault)?;
        say(&stream, &greeting.text(), end).map_err(fault)?;
        peers[other] = Some(stream);
    }
    while let Some(missing) = (rank + 1..rendezvous.size).find(|other| peers[*other].is_none()) {
        let Some((stream, _, found)) = accept(&listener, end + MANNERS) else {
            return Err(Error::io(format!("rank {missing} does not come to rank {rank}"))
                .found(format!("host {}", lines[missing].1)));
        };
        if found.size == rendezvous.size && found.rank > rank && found.rank < rendezvous.size {
            peers[found.rank] = Some(stream);
        }
    }
    Ok(lines.iter().map(|(_, host)| host.to_string()).collect())
}

/// Listens where the others look for rank 0; on a name of this machine only its own processes can connect.
fn listen(rendezvous: &Rendezvous) -> Result<TcpListener> {
    let fault = |e: std::io::Error| {
        Error::io("rank 0 cannot listen for the other ranks")
            .at(rendezvous.place())
            .cause(e)
    };
    let found = (rendezvous.host.as_str(), rendezvous.port).to_socket_addrs();
    let found: Vec<SocketAddr> = found.map_err(fault)?.collect();
    // Not from the resolved address: /etc/hosts often maps a machine's own name to a loopback address.
    let parsed = rendezvous.host.parse::<IpAddr>();
    if rendezvous.host == "localhost" || parsed.is_ok_and(|ip| ip.is_loopback()) {
        return TcpListener::bind(&found[..]).map_err(fault);
    }
    let any = if found.iter().all(SocketAddr::is_ipv6) {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    } else {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    };
    TcpListener::bind((any, rendezvous.port)).map_err(fault)
}

/// Connects to rank 0, which may start later than this rank.
fn connect(rendezvous: &Rendezvous, end: Instant) -> Result<TcpStream> {
    let place = rendezvous.place();
    loop {
        let attempt = || -> std::io::Result<TcpStream> {
            let mut last = ErrorKind::AddrNotAvailable.into();
            for address in (rendezvous.host.as_str(), rendezvous.port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, left(end)) {
                    Ok(stream) => return Ok(stream),
                    Err(e) => last = e,
                }
            }
            Err(last)
        };
        match attempt() {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() >= end => {
                return Err(Error::io(format!("rank {} cannot reach rank 0", rendezvous.rank))
                    .at(place)
                    .found(format!("no connection after {} s", rendezvous.limit.as_secs()))
                    .cause(e));
            }
            Err(_) => std::thread::sleep(AGAIN.min(left(end))),
        }
    }
}

/// The next rank that connects; `None` at the end of the time. Connections of other programs are closed.
fn accept(listener: &TcpListener, end: Instant) -> Option<(TcpStream, SocketAddr, Greeting)> {
    listener.set_nonblocking(true).ok()?;
    while Instant::now() < end {
        let Ok((stream, from)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        let soon = (Instant::now() + MANNERS).min(end);
        let greeting = stream.set_nonblocking(false).and_then(|()| hear(&stream, SHORT, soon));
        if let Some(greeting) = greeting.ok().and_then(|text| Greeting::read(&text)) {
            return Some((stream, from, greeting));
        }
    }
    None
}

/// The time until `end`; never zero, which the system takes for no limit.
fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}

fn say(mut to: &TcpStream, text: &str, end: Instant) -> std::io::Result<()> {
    to.set_write_timeout(Some(left(end)))?;
    let mut message = (text.len() as u32).to_le_bytes().to_vec();
    message.extend_from_slice(text.as_bytes());
    to.write_all(&message)
}

fn hear(mut from: &TcpStream, most: usize, end: Instant) -> std::io::Result<String> {
    let mut length = [0; 4];
    from.set_read_timeout(Some(left(end)))?;
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > most {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    from.set_read_timeout(Some(left(end)))?;
    from.read_exact(&mut text)?;
    String::from_utf8(text).map_err(|_| ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port that is free now.
    fn free_port() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    }

    fn rendezvous(rank: usize, size: usize, port: u16, seconds: u64) -> Rendezvous {
        Rendezvous {
            rank,
            size,
            host: "127.0.0.1".into(),
            port,
            limit: Duration::from_secs(seconds),
        }
    }

    /// Each rank on a thread, with its own idea of the number of ranks.
    fn meet(sizes: &[usize], seconds: u64) -> Vec<Result<Mesh>> {
        let port = free_port();
        std::thread::scope(|scope| {
            let open = |(rank, size): (usize, &usize)| {
                let rendezvous = rendezvous(rank, *size, port, seconds);
                scope.spawn(move || Mesh::open(&rendezvous, &format!("host-{rank}")))
            };
            let ranks: Vec<_> = sizes.iter().enumerate().map(open).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn lists_arrive_in_order_whatever_their_sizes() {
        let size = 4;
        let meshes: Vec<Mesh> = meet(&[size; 4], 20).into_iter().map(Result::unwrap).collect();
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
                    mesh.swap(&out, &mut views, Some(Duration::from_secs(20))).unwrap();
                    for (i, (found, want)) in into.iter().zip(&want).enumerate() {
                        assert!(others[i].0 == rank || found == want, "{i}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_is_gone_or_late_is_named() {
        let mut meshes: Vec<Mesh> = meet(&[3; 3], 20).into_iter().map(Result::unwrap).collect();
        let (mut byte, mut other) = ([0], [0]);
        let limit = Some(Duration::from_millis(50));
        let late = meshes[0].swap(&[], &mut [(1, &mut byte), (2, &mut other)], limit);
        assert_eq!(late, Err(Lost::Late(vec![1, 2])));
        assert!(meshes[0].gone().is_empty());
        drop(meshes.remove(2));
        assert_eq!(
            meshes[1].swap(&[], &mut [(2, &mut byte)], None),
            Err(Lost::Gone(vec![2]))
        );
        assert_eq!(meshes[0].gone(), [2]);
    }

    #[test]
    fn ranks_that_disagree_on_their_number_are_refused_on_both_sides() {
        let out = meet(&[3, 3, 2], 20);
        let texts: Vec<String> = out.into_iter().map(|mesh| mesh.err().unwrap().to_string()).collect();
        let want = "rank 2 (host host-2) is one of 2, rank 0 (host host-0) one of 3";
        assert!(texts.iter().all(|text| text.contains(want)), "{texts:#?}");
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_to_all() {
        let out = meet(&[3, 3], 1);
        let texts: Vec<String> = out.into_iter().map(|mesh| mesh.err().unwrap().to_string()).collect();
        assert!(
            texts.iter().all(|text| text.contains("rank 2 of 3 missing after 1 s")),
            "{texts:#?}"
        );
        let alone = Mesh::open(&rendezvous(1, 2, free_port(), 0), "here")
            .err()
            .unwrap()
            .to_string();
        assert!(
            alone.contains("rank 1 cannot reach rank 0") && alone.contains("127.0.0.1:"),
            "{alone}"
        );
    }

    #[test]
    fn another_program_on_the_port_is_refused() {
        let port = free_port();
        std::thread::scope(|scope| {
            let root = scope.spawn(move || Mesh::open(&rendezvous(0, 2, port, 20), "a"));
            let begun = Instant::now();
            let mut other = loop {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(stream) => break stream,
                    Err(_) => assert!(begun.elapsed() < Duration::from_secs(20)),
                }
            };
            other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            Mesh::open(&rendezvous(1, 2, port, 20), "b").unwrap();
            root.join().unwrap().unwrap();
        });
    }
}
