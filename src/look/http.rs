//! The part of HTTP/1.1 that a local page needs: requests without a body, one response for each connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Longest head of a request in bytes.
const MOST: usize = 8192;
/// A client that takes nothing for this long is dropped, and one that has not sent its request.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A request.
#[derive(Debug, PartialEq)]
pub struct HttpRequest {
    pub method: String,
    /// Without the query.
    pub path: String,
    pub query: String,
    pub host: String,
}

/// Reads the head of a request. `None`: it is not one, or it is not complete after `patience`.
pub fn read(stream: &mut TcpStream, patience: Duration) -> Option<HttpRequest> {
    stream.set_write_timeout(Some(PATIENCE)).ok()?;
    // One limit for all of it: single bytes would keep a connection for hours.
    let deadline = Instant::now() + patience;
    read_from(|piece| {
        let left = deadline.saturating_duration_since(Instant::now());
        // An error for no time at all.
        stream.set_read_timeout(Some(left)).ok()?;
        stream.read(piece).ok()
    })
}

/// As `read`; `next` gives the next bytes. 0 bytes are the end.
pub fn read_from(mut next: impl FnMut(&mut [u8]) -> Option<usize>) -> Option<HttpRequest> {
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    let end = loop {
        let n = next(&mut piece).filter(|n| *n > 0)?;
        let from = head.len().saturating_sub(3);
        head.extend_from_slice(&piece[..n]);
        if let Some(at) = head[from..].windows(4).position(|w| w == b"\r\n\r\n") {
            break from + at;
        }
        if head.len() > MOST {
            return None;
        }
    };
    parse(std::str::from_utf8(&head[..end]).ok()?)
}

/// The request with this head, without the empty line at its end. `None`: it is not one.
pub fn parse(head: &str) -> Option<HttpRequest> {
    let mut lines = head.split("\r\n");
    let mut words = lines.next()?.split(' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    if words.next().is_some() || !version.starts_with("HTTP/1.") || !target.starts_with('/') {
        return None;
    }
    let (mut hosts, mut host) = (0, "");
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("host") {
            (hosts, host) = (hosts + 1, value.trim());
        }
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    (hosts == 1).then(|| HttpRequest {
        method: method.to_string(),
        path: path.to_string(),
        query: query.to_string(),
        host: host.to_string(),
    })
}

/// Only what this server sends: no scripts or styles in the page itself, nothing from elsewhere.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Status line and headers. `length`: of the body; `None`: it ends with the connection.
pub fn head(status: &str, kind: &str, length: Option<usize>) -> String {
    let length = length.map_or(String::new(), |n| format!("Content-Length: {n}\r\n"));
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{length}Connection: close\r\nCache-Control: no-store\r\n\
         Content-Security-Policy: {POLICY}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
         Cross-Origin-Resource-Policy: same-origin\r\n\r\n"
    )
}

/// A whole response.
pub fn response(status: &str, kind: &str, body: &[u8]) -> Vec<u8> {
    [head(status, kind, Some(body.len())).as_bytes(), body].concat()
}

/// Sends a response. A client that is gone is no error.
pub fn send(stream: &mut TcpStream, status: &str, kind: &str, body: &[u8]) {
    let _ = stream.write_all(&response(status, kind, body));
}

/// True for equal texts; the time depends on the lengths only.
pub fn same(a: &str, b: &str) -> bool {
    let differs = a.bytes().zip(b.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differs) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_in_single_bytes_has_a_limit_of_time() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let client = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            // Until the other side closes.
            while stream.write_all(b"G").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (mut stream, _) = listener.accept().unwrap();
        let began = Instant::now();
        assert_eq!(read(&mut stream, Duration::from_millis(200)), None);
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(150) && took < PATIENCE, "{took:?}");
        drop(stream);
        client.join().unwrap();
    }

    #[test]
    fn requests_are_read_or_refused() {
        let head = "GET /a/b?runs=1 HTTP/1.1\r\nHOST:  127.0.0.1:80 \r\nAccept: */*";
        let request = parse(head).unwrap();
        assert_eq!((&*request.method, &*request.path), ("GET", "/a/b"));
        assert_eq!((&*request.query, &*request.host), ("runs=1", "127.0.0.1:80"));
        for bad in [
            "GET / HTTP/1.1",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b",
            "GET  / HTTP/1.1\r\nHost: a",
            "GET http://a/ HTTP/1.1\r\nHost: a",
            "GET / SPDY/3\r\nHost: a",
            "GET",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert!(same("abc", "abc") && !same("abc", "abd") && !same("abc", "ab") && !same("", "a"));
    }
}
