//! Requests to the stand-in hubs.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;

/// A request; its path is without the query.
pub struct Request {
    pub method: String,
    pub path: String,
    /// By names in lower case.
    pub headers: BTreeMap<String, String>,
    pub reader: BufReader<TcpStream>,
}

impl Request {
    /// Reads the head of a request.
    pub fn read(stream: &TcpStream) -> Option<Self> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_string(), words.next()?.to_string());
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((key, value)) = line.trim().split_once(':') else {
                break;
            };
            headers.insert(key.to_lowercase(), value.trim().to_string());
        }
        let path = target.split('?').next()?.to_string();
        Some(Self {
            method,
            path,
            headers,
            reader,
        })
    }

    /// Reads the body, which has the announced length.
    pub fn body(&mut self) -> Option<Vec<u8>> {
        let length = self.headers.get("content-length").map_or(0, |n| n.parse().unwrap());
        let mut body = vec![0; length];
        self.reader.read_exact(&mut body).ok()?;
        Some(body)
    }
}
