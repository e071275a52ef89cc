//! How the ranks of a launcher without MPI find each other.
//!
//! Rank 0 listens at a known address. Every other rank connects to it and says its number, the number of ranks, the port at which
//! it listens itself, its job and its host; when all are there, rank 0 answers with the list. Then each rank connects to
//! the ranks between 0 and itself. Each message is its length (4 bytes) and a text.

use super::greeting::{Greeting, message, ranks_in, receive_greeting};
use crate::base::{Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Longest name of a job in a greeting.
const NAME: usize = 1 << 8;
/// Longest list of the ranks.
const LONG: usize = 1 << 22;
/// Time in which a new connection must send its greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections that have not sent a greeting yet.
const MAX_PENDING: usize = 1 << 10;
/// How long rank 0 answers ranks that come after it has found an error.
const LINGER_AFTER_ERROR: Duration = Duration::from_secs(1);
/// How long one attempt to connect may take: the address of a machine that is gone does not answer at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the connections between the other ranks may take, from the list on.
const MESH_TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

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
    /// A text that ranks of other jobs do not have. Empty: none.
    pub job: String,
    /// All ranks are on one machine, or it is not known.
    pub one_machine: bool,
    /// How long the ranks wait for each other.
    pub limit: Duration,
}

impl Rendezvous {
    fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// The job as a word of a greeting.
    fn word(&self) -> String {
        let plain = |c: char| if c.is_ascii_graphic() { c } else { '_' };
        match self.job.as_str() {
            "" => "-".into(),
            job => job.chars().map(plain).take(NAME).collect(),
        }
    }

    fn greeting(&self, port: u16, own: &str) -> Greeting {
        Greeting {
            rank: self.rank,
            size: self.size,
            port,
            job: self.word(),
            host: own.to_string(),
        }
    }

    /// False if the name of rank 0 is surely that of another machine.
    fn may_be_here(&self) -> bool {
        let found = (self.host.as_str(), 0).to_socket_addrs();
        found.map_or(true, |mut all| all.any(|address| TcpListener::bind(address).is_ok()))
    }
}

/// The connection to each other rank, and the host of each rank.
pub(super) type PeerConnections = (Vec<Option<TcpStream>>, Vec<String>);

/// Connects to the other ranks. `own`: name of this machine.
///
/// # Errors
/// A rank that does not connect in time; ranks that do not agree on their number.
pub(super) fn meet(rendezvous: &Rendezvous, own: &str) -> Result<PeerConnections> {
    let end = Instant::now() + rendezvous.limit;
    let mut peers: Vec<Option<TcpStream>> = (0..rendezvous.size).map(|_| None).collect();
    let hosts = if rendezvous.rank == 0 {
        receive_all(rendezvous, end, own, &mut peers)?
    } else {
        connect_all(rendezvous, end, own, &mut peers)?
    };
    Ok((peers, hosts))
}

/// Rank 0: waits for all others and sends them the list of addresses. Returns the host names.
fn receive_all(
    rendezvous: &Rendezvous,
    end: Instant,
    own: &str,
    peers: &mut [Option<TcpStream>],
) -> Result<Vec<String>> {
    let (size, place, job) = (rendezvous.size, rendezvous.place(), rendezvous.word());
    let mut acceptor = Acceptor::new(listen(rendezvous)?);
    let mut lines: Vec<(String, String)> = vec![(String::new(), own.to_string()); size];
    while peers.iter().flatten().count() + 1 < size {
        let Some((stream, from, greeting)) = acceptor.next(end) else {
            return refuse(peers, None, late(rendezvous, own, peers));
        };
        let rank = greeting.rank;
        if greeting.job != job {
            let error = Error::usage("rank 0 belongs to another job").at(&place).found(format!(
                "rank {rank} from host {}, which has the address of rank 0 on host {own}",
                greeting.host
            ));
            let _ = send_text(&stream, &refusal(&error), Instant::now() + LINGER_AFTER_ERROR);
            continue;
        }
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
        let _ = send_text(&stream, &refusal(&error), Instant::now() + LINGER_AFTER_ERROR);
        return refuse(peers, Some(&mut acceptor), error);
    }
    let addresses: Vec<&str> = lines.iter().skip(1).map(|(address, _)| address.as_str()).collect();
    if some_are_unreachable(&addresses) {
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
    let end = Instant::now() + MESH_TIMEOUT;
    for peer in peers.iter().flatten() {
        send_text(peer, &list, end)
            .map_err(|e| Error::io("a rank has left before the beginning").at(&place).cause(e))?;
    }
    Ok(lines.into_iter().map(|(_, host)| host).collect())
}

/// The error of ranks that have not connected.
fn late(rendezvous: &Rendezvous, own: &str, peers: &[Option<TcpStream>]) -> Error {
    let missing = (1..peers.len()).filter(|rank| peers[*rank].is_none());
    let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
    let noun = if missing.len() == 1 { "rank" } else { "ranks" };
    let elsewhere = if rendezvous.may_be_here() {
        ""
    } else {
        "; MASTER_ADDR is the address of another machine"
    };
    Error::io("not all ranks have connected to rank 0 in time")
        .at(rendezvous.place())
        .found(format!(
            "{noun} {} of {} missing after {} s; rank 0 is on host {own}{elsewhere}",
            missing.join(", "),
            rendezvous.size,
            rendezvous.limit.as_secs()
        ))
}

/// True if some ranks have an address that only the machine of rank 0 can use, and others are on other machines.
fn some_are_unreachable(addresses: &[&str]) -> bool {
    let near = |address: &&&str| address.parse::<SocketAddr>().is_ok_and(|a| a.ip().is_loopback());
    let local = addresses.iter().filter(near).count();
    local > 0 && local < addresses.len()
}

fn refusal(error: &Error) -> String {
    format!("no {}\n{error}", error.exit_code())
}

/// The error of a rank to which rank 0 said no. It ends with the exit code of rank 0.
fn refused(rendezvous: &Rendezvous, why: &str) -> Error {
    let (code, why) = why.split_once('\n').unwrap_or_default();
    let what = "rank 0 refuses this rank";
    let error = if code == "2" {
        Error::usage(what)
    } else {
        Error::io(what)
    };
    error
        .at(rendezvous.place())
        .found(format!("rank {} of {}", rendezvous.rank, rendezvous.size))
        .cause(why)
}

/// Sends the error to all ranks that have connected, and to those that are about to connect.
fn refuse<T>(peers: &[Option<TcpStream>], acceptor: Option<&mut Acceptor>, error: Error) -> Result<T> {
    let soon = Instant::now() + LINGER_AFTER_ERROR;
    for peer in peers.iter().flatten() {
        let _ = send_text(peer, &refusal(&error), soon);
    }
    let Some(acceptor) = acceptor else { return Err(error) };
    // Rank 0 has no connection, and one has its answer already.
    let missing = peers.iter().filter(|peer| peer.is_none()).count().saturating_sub(2);
    for _ in 0..missing {
        let Some((late, ..)) = acceptor.next(soon) else {
            break;
        };
        let _ = send_text(&late, &refusal(&error), soon);
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
    let greeting = rendezvous.greeting(listener.local_addr().map_err(lost)?.port(), own);
    let mut acceptor = Acceptor::new(listener);
    // Rank 0 waits for all others first, and says who is missing. It may have started later, so its time ends later.
    let end = Instant::now() + rendezvous.limit + GREETING_TIMEOUT;
    send_text(&root, &greeting.text(), end).map_err(lost)?;
    let list = receive_text(&root, LONG, end).map_err(lost)?;
    if let Some(why) = list.strip_prefix("no ") {
        return Err(refused(rendezvous, why));
    }
    let lines = ranks_in(&list, rendezvous.size)
        .ok_or_else(|| Error::format("the program at the address of rank 0 is not rank 0 of this job").at(&place))?;
    peers[0] = Some(root);
    let end = Instant::now() + MESH_TIMEOUT;
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
        send_text(&stream, &greeting.text(), end).map_err(fault)?;
        peers[other] = Some(stream);
    }
    while let Some(missing) = (rank + 1..rendezvous.size).find(|other| peers[*other].is_none()) {
        let Some((stream, _, found)) = acceptor.next(end) else {
            return Err(Error::io(format!("rank {missing} has not connected to rank {rank}"))
                .found(format!("host {}", lines[missing].1)));
        };
        let expected = found.job == greeting.job && found.size == rendezvous.size;
        if expected && found.rank > rank && found.rank < rendezvous.size {
            peers[found.rank] = Some(stream);
        }
    }
    Ok(lines.iter().map(|(_, host)| host.to_string()).collect())
}

/// Listens where the others look for rank 0; on a loopback address only processes of this machine can connect.
fn listen(rendezvous: &Rendezvous) -> Result<TcpListener> {
    let fault = |e: std::io::Error| {
        Error::io("rank 0 cannot listen for the other ranks")
            .at(rendezvous.place())
            .cause(e)
    };
    let found = (rendezvous.host.as_str(), rendezvous.port).to_socket_addrs();
    let found: Vec<SocketAddr> = found.map_err(fault)?.collect();
    // Not by the address alone: /etc/hosts often gives the own name of a machine a loopback address.
    let parsed = rendezvous.host.parse::<IpAddr>();
    let loopback = rendezvous.host == "localhost" || parsed.is_ok_and(|ip| ip.is_loopback());
    if loopback && rendezvous.one_machine {
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
                match TcpStream::connect_timeout(&address, left(end).min(CONNECT_TIMEOUT)) {
                    Ok(stream) if !is_own(&stream) => return Ok(stream),
                    Ok(_) => last = ErrorKind::ConnectionRefused.into(),
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
            Err(_) => std::thread::sleep(RETRY_PAUSE.min(left(end))),
        }
    }
}

/// True for a connection of a socket with itself: the system may choose the port of rank 0 for one that connects to it.
fn is_own(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(own), Ok(other)) if own == other)
}

/// A connection that has not sent its greeting yet.
struct PendingConnection {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    received: Vec<u8>,
}

/// Accepts connections; one that sends nothing does not delay the others.
struct Acceptor {
    listener: TcpListener,
    pending: Vec<PendingConnection>,
}

impl Acceptor {
    fn new(listener: TcpListener) -> Self {
        Self {
            listener,
            pending: Vec::new(),
        }
    }

    /// The next rank; `None` at the end of the time. Connections of other programs are closed.
    fn next(&mut self, end: Instant) -> Option<(TcpStream, SocketAddr, Greeting)> {
        self.listener.set_nonblocking(true).ok()?;
        while Instant::now() < end {
            while let Ok((stream, from)) = self.listener.accept() {
                if self.pending.len() == MAX_PENDING {
                    self.pending.remove(0);
                }
                if stream.set_nonblocking(true).is_ok() {
                    self.pending.push(PendingConnection {
                        stream,
                        from,
                        since: Instant::now(),
                        received: Vec::new(),
                    });
                }
            }
            let mut at = 0;
            while let Some(connection) = self.pending.get_mut(at) {
                match receive_greeting(&mut connection.stream, &mut connection.received) {
                    Ok(None) if connection.since.elapsed() < GREETING_TIMEOUT => at += 1,
                    Ok(None) | Err(_) => drop(self.pending.remove(at)),
                    Ok(Some(text)) => {
                        let PendingConnection { stream, from, .. } = self.pending.remove(at);
                        if let Some(greeting) = Greeting::read(&text)
                            && stream.set_nonblocking(false).is_ok()
                        {
                            return Some((stream, from, greeting));
                        }
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

/// The time until `end`; never zero, which the system takes for no limit.
fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}

fn send_text(mut to: &TcpStream, text: &str, end: Instant) -> std::io::Result<()> {
    to.set_write_timeout(Some(left(end)))?;
    to.write_all(&message(text))
}

fn receive_text(from: &TcpStream, most: usize, end: Instant) -> std::io::Result<String> {
    let mut length = [0; 4];
    fill(from, &mut length, end)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > most {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    fill(from, &mut text, end)?;
    String::from_utf8(text).map_err(|_| ErrorKind::InvalidData.into())
}

/// As `read_exact`, with a limit for the whole: the time limit of a socket counts for each read.
fn fill(mut from: &TcpStream, mut bytes: &mut [u8], end: Instant) -> std::io::Result<()> {
    while !bytes.is_empty() {
        if Instant::now() >= end {
            return Err(ErrorKind::TimedOut.into());
        }
        from.set_read_timeout(Some(left(end)))?;
        match from.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes = &mut bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
