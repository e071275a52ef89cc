//! The server of the page: on 127.0.0.1 only, reads only, and answers nothing without the token.

use super::http::{self, HttpRequest, same};
use super::page::{CHARTS, INDEX, MOST_RUNS, PAGE, STYLE, TABS};
use super::tail::{Tail, TailChange};
use super::view;
use crate::base::{Error, Result, files};
use crate::history;
use serde_json::{Value, json};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Connections at a time; more are closed.
const MOST_CONNECTIONS: usize = 64;
/// Time between two looks at the files of a run in progress.
const TURN: Duration = Duration::from_millis(500);
/// A line without content finds out that the browser is gone.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

/// A page for the runs in some directories.
pub struct Server {
    listener: TcpListener,
    shared: Arc<ServerState>,
}

struct ServerState {
    places: Vec<PathBuf>,
    /// A run keeps its number as long as the server works.
    runs: Mutex<Vec<PathBuf>>,
    token: String,
    port: u16,
    connections: AtomicUsize,
}

/// 256 random bits in hexadecimal digits.
fn token() -> Result<String> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).map_err(|e| Error::new("the system gives no random numbers").cause(e))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

impl Server {
    /// Listens on a port of this machine; 0: any that is free.
    ///
    /// Errors: there is no run; the port is in use.
    pub fn open(places: &[PathBuf], port: u16) -> Result<Self> {
        let runs = history::find(places)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|e| {
            Error::io("cannot listen on this port of 127.0.0.1")
                .at(format!("--port {port}"))
                .hint("without `--port` ft takes one that is free")
                .cause(e)
        })?;
        let port = listener.local_addr().map_or(port, |address| address.port());
        let shared = ServerState {
            places: places.to_vec(),
            runs: Mutex::new(runs),
            token: token()?,
            port,
            connections: AtomicUsize::new(0),
        };
        Ok(Self {
            listener,
            shared: Arc::new(shared),
        })
    }

    /// The address of the page, with the token.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.shared.port, self.shared.token)
    }

    /// Answers requests, without an end.
    pub fn serve(&self) {
        for stream in self.listener.incoming().flatten() {
            let Some(place) = ConnectionPlace::take(&self.shared) else {
                continue;
            };
            let work = move || place.answer(stream);
            // Without a thread the connection is closed.
            let _ = std::thread::Builder::new().name("page".into()).spawn(work);
        }
    }
}

/// One of the connections at a time; it is free again also after a panic.
struct ConnectionPlace(Arc<ServerState>);

impl ConnectionPlace {
    /// `None`: all are in use.
    fn take(shared: &Arc<ServerState>) -> Option<Self> {
        let place = Self(shared.clone());
        (shared.connections.fetch_add(1, SeqCst) < MOST_CONNECTIONS).then_some(place)
    }

    fn answer(self, stream: TcpStream) {
        self.0.answer(stream);
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, SeqCst);
    }
}

impl ServerState {
    fn answer(&self, mut stream: TcpStream) {
        let Some(request) = http::read(&mut stream, http::PATIENCE) else {
            return http::send(&mut stream, "400 Bad Request", TEXT, b"not a request\n");
        };
        // Another name would be a page of somebody else whose name leads to this machine.
        let hosts = ["127.0.0.1", "localhost"].map(|host| format!("{host}:{}", self.port));
        if !hosts.contains(&request.host) {
            return http::send(&mut stream, "403 Forbidden", TEXT, b"unknown host\n");
        }
        if request.method != "GET" {
            return http::send(&mut stream, "405 Method Not Allowed", TEXT, b"only GET\n");
        }
        let (given, rest) = request.path[1..].split_once('/').unwrap_or((&request.path[1..], ""));
        if !same(given, &self.token) {
            return http::send(&mut stream, "404 Not Found", TEXT, b"not found\n");
        }
        if rest == "live" {
            return self.live(stream, &request);
        }
        match self.body(rest) {
            Some(Ok((kind, body))) => http::send(&mut stream, "200 OK", kind, body.as_bytes()),
            Some(Err(e)) => {
                let body = json!({"error": e.to_string()}).to_string();
                http::send(&mut stream, "500 Internal Server Error", JSON, body.as_bytes());
            }
            None => http::send(&mut stream, "404 Not Found", TEXT, b"not found\n"),
        }
    }

    /// Never opens a path from a request: only these fixed names and run numbers are served.
    fn body(&self, name: &str) -> Option<Result<(&'static str, String)>> {
        let fixed = |kind, text: &str| Some(Ok((kind, text.to_string())));
        match name {
            "" => fixed("text/html; charset=utf-8", INDEX),
            "style.css" => fixed("text/css; charset=utf-8", STYLE),
            "charts.js" => fixed("text/javascript; charset=utf-8", CHARTS),
            "tabs.js" => fixed("text/javascript; charset=utf-8", TABS),
            "page.js" => fixed("text/javascript; charset=utf-8", PAGE),
            "runs.json" => Some(self.list().map(|list| (JSON, list.to_string()))),
            _ => {
                let id: usize = name.strip_prefix("run/")?.strip_suffix(".json")?.parse().ok()?;
                let run = self.run(id)?;
                Some(view::view(id, &run).map(|view| (JSON, view.to_string())))
            }
        }
    }

    fn run(&self, id: usize) -> Option<PathBuf> {
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        runs.get(id).cloned()
    }

    /// All runs, also those that were started since.
    fn list(&self) -> Result<Value> {
        let found = history::find(&self.places)?;
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        for run in &found {
            if !runs.contains(run) {
                runs.push(run.clone());
            }
        }
        // A run that was removed is not listed any more.
        let entries = runs
            .iter()
            .enumerate()
            .filter(|(_, run)| found.contains(run))
            .map(|(id, run)| view::entry(id, run));
        Ok(json!({"runs": entries.collect::<Vec<_>>(), "most": MOST_RUNS}))
    }

    /// Sends the lines that runs write, as server-sent events. The query names the runs with the bytes that the page has:
    /// `runs=ID:METRICS:EVENTS:SAMPLES,...`.
    fn live(&self, mut stream: TcpStream, request: &HttpRequest) {
        let asked = request.query.strip_prefix("runs=").unwrap_or("");
        let mut followed: Vec<FollowedRun> = asked
            .split(',')
            .filter_map(|text| FollowedRun::new(text, |id| self.run(id)))
            .take(MOST_RUNS)
            .collect();
        let head = http::head("200 OK", "text/event-stream", None);
        let mut alive = stream.write_all(head.as_bytes()).is_ok();
        let mut said = Instant::now();
        while alive {
            for message in followed.iter_mut().filter_map(FollowedRun::message) {
                alive &= stream.write_all(format!("data: {message}\n\n").as_bytes()).is_ok();
                said = Instant::now();
            }
            if said.elapsed() > SIGN_OF_LIFE {
                alive &= stream.write_all(b":\n\n").is_ok();
                said = Instant::now();
            }
            if alive {
                std::thread::sleep(TURN);
            }
        }
    }
}

/// A run that a page follows.
struct FollowedRun {
    id: usize,
    run: PathBuf,
    metrics: Tail,
    /// Bytes of `events.jsonl` and `samples.jsonl`.
    others: [u64; 2],
    /// The page was asked to load the run again, so it will connect again.
    over: bool,
}

impl FollowedRun {
    fn new(text: &str, run: impl Fn(usize) -> Option<PathBuf>) -> Option<Self> {
        let numbers = text.split(':').map(|n| n.parse().ok()).collect::<Option<Vec<u64>>>()?;
        let [id, metrics, events, samples] = numbers[..] else {
            return None;
        };
        let id = usize::try_from(id).ok()?;
        let run = run(id)?;
        Some(Self {
            id,
            metrics: Tail::new(&run.join("metrics.jsonl"), metrics),
            run,
            others: [events, samples],
            over: false,
        })
    }

    fn sizes(run: &Path) -> [u64; 2] {
        ["events.jsonl", "samples.jsonl"].map(|name| files::size(&run.join(name)).unwrap_or(0))
    }

    /// New lines of metrics, or the news that the run is to be loaded again.
    fn message(&mut self) -> Option<Value> {
        if self.over {
            return None;
        }
        let again = Self::sizes(&self.run) != self.others;
        match self.metrics.read() {
            Ok(TailChange::Lines(lines)) if !again => {
                let lines: Vec<Value> = lines.iter().filter_map(|line| view::entry_of(line)).collect();
                (!lines.is_empty()).then(|| json!({"run": self.id, "lines": lines}))
            }
            _ => {
                self.over = true;
                Some(json!({"run": self.id, "changed": true}))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_gives_its_place_back_also_after_a_panic() {
        let shared = Arc::new(ServerState {
            places: Vec::new(),
            runs: Mutex::new(Vec::new()),
            token: String::new(),
            port: 0,
            connections: AtomicUsize::new(0),
        });
        let all: Vec<_> = (0..MOST_CONNECTIONS)
            .map(|_| ConnectionPlace::take(&shared).unwrap())
            .collect();
        assert!(ConnectionPlace::take(&shared).is_none());
        drop(all);
        let place = ConnectionPlace::take(&shared).unwrap();
        let work = move || {
            let kept = place;
            assert_eq!(kept.0.port, 1, "as a fault would");
        };
        assert!(std::thread::spawn(work).join().is_err());
        assert_eq!(shared.connections.load(SeqCst), 0);
    }
}
