//! The first messages of ranks that meet: whatever connects may have sent them.

use std::io::{ErrorKind, Read};

/// First word of a rank; whatever else connects is another program.
const GREETING: &str = "ft-rank-3";
/// Longest text of a greeting.
pub(super) const SHORT: usize = 1 << 10;

/// The first message of a rank: the data about itself.
#[derive(Clone)]
pub(super) struct Greeting {
    pub rank: usize,
    pub size: usize,
    pub port: u16,
    pub job: String,
    pub host: String,
}

impl Greeting {
    pub(super) fn text(&self) -> String {
        let Self {
            rank,
            size,
            port,
            job,
            host,
        } = self;
        format!("{GREETING} {rank} {size} {port} {job} {host}")
    }

    pub(super) fn read(text: &str) -> Option<Self> {
        let mut words = text.splitn(6, ' ');
        if words.next() != Some(GREETING) {
            return None;
        }
        Some(Self {
            rank: words.next()?.parse().ok()?,
            size: words.next()?.parse().ok()?,
            port: words.next()?.parse().ok()?,
            job: words.next()?.to_string(),
            host: words.next()?.to_string(),
        })
    }
}

/// A text with its length before it.
pub(super) fn message(text: &str) -> Vec<u8> {
    let mut message = (text.len() as u32).to_le_bytes().to_vec();
    message.extend_from_slice(text.as_bytes());
    message
}

/// Reads what there is, and nothing after the greeting; `received`: what was read of it. The text, if it is complete.
pub(super) fn receive_greeting(
    from: &mut (impl Read + ?Sized),
    received: &mut Vec<u8>,
) -> std::io::Result<Option<String>> {
    loop {
        let whole = match received.first_chunk() {
            None => 4,
            Some(length) => 4 + u32::from_le_bytes(*length) as usize,
        };
        if whole > 4 + SHORT {
            return Err(ErrorKind::InvalidData.into());
        }
        if received.len() >= 4 && received.len() == whole {
            let text = String::from_utf8(received.split_off(4));
            return text.map(Some).map_err(|_| ErrorKind::InvalidData.into());
        }
        let mut piece = vec![0; whole - received.len()];
        match from.read(&mut piece) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => received.extend_from_slice(&piece[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(e) => return Err(e),
        }
    }
}

/// Address and host of each rank, in the list that rank 0 sends. `None`: it is not the list of so many ranks.
#[doc(hidden)]
pub fn ranks_in(list: &str, size: usize) -> Option<Vec<(&str, &str)>> {
    let lines: Vec<(&str, &str)> = list.lines().skip(1).filter_map(|line| line.split_once(' ')).collect();
    (lines.len() == size).then_some(lines)
}

/// For the fuzzer: reads a greeting, and writes it again.
#[doc(hidden)]
pub fn greeting_again(from: &mut dyn Read) -> Option<Vec<u8>> {
    let mut received = Vec::new();
    let text = loop {
        if let Some(text) = receive_greeting(from, &mut received).ok()? {
            break text;
        }
    };
    Some(message(&Greeting::read(&text)?.text()))
}
