//! The server of the page: on 127.0.0.1 only, reads only, and answers nothing without the token.

use super::http::{self, HttpRequest, same};
use super::page::{CHARTS, INDEX, MOST_RUNS, PAGE, STYLE, TABS};
use super::tail::{Tail, TailChange};
use super::view;
use crate::base::sync::lock;
use crate::base::{Error, Result, files};
use crate::history;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Connections at a time; more are closed.
const MOST_CONNECTIONS: usize = 64;
/// Time between two looks at the files of a run in progress.
const TURN: Duration = Duration::from_millis(500);
/// Shortest time between two requests to a page to load the whole run again.
const LEAST_PAUSE: Duration = Duration::from_secs(10);
/// The end of a run is shown after this time, also if the run takes long to load.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A line without content finds out that the browser is gone.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const NO_REQUEST: &[u8] = b"not a request\n";

/// A page for the runs in some directories.
pub struct Server {
    listener: TcpListener,
    shared: Arc<ServerState>,
}

struct ServerState {
    places: Vec<PathBuf>,
    runs: Mutex<KnownRuns>,
    token: String,
    port: u16,
    connections: AtomicUsize,
}

/// A run keeps its number, its place here, as long as the server works.
#[derive(Default)]
struct KnownRuns {
    all: Vec<KnownRun>,
    ids: HashMap<PathBuf, usize>,
}

struct KnownRun {
    path: PathBuf,
    /// When a page was last asked to load the whole run again.
    asked: Option<Instant>,
    /// How long the last load of the whole run took.
    load: Duration,
}

impl KnownRuns {
    fn find(places: &[PathBuf]) -> Result<Self> {
        let mut runs = Self::default();
        for run in history::find(places)? {
            runs.id(&run);
        }
        Ok(runs)
    }

    fn id(&mut self, path: &Path) -> usize {
        if let Some(id) = self.ids.get(path) {
            return *id;
        }
        let id = self.all.len();
        self.all.push(KnownRun {
            path: path.to_path_buf(),
            asked: None,
            load: Duration::ZERO,
        });
        self.ids.insert(path.to_path_buf(), id);
        id
    }
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
        let runs = KnownRuns::find(places)?;
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
            return http::send(&mut stream, "400 Bad Request", TEXT, NO_REQUEST);
        };
        match self.response(&request) {
            Some((status, kind, body)) => http::send(&mut stream, status, kind, body.as_bytes()),
            None => self.live(stream, &request),
        }
    }

    /// Status, kind and body of a response. `None`: the lines that runs write, which have no end.
    fn response(&self, request: &HttpRequest) -> Option<(&'static str, &'static str, String)> {
        let plain = |status, text: &str| Some((status, TEXT, text.to_string()));
        // Another name would be a page of somebody else whose name leads to this machine.
        let hosts = ["127.0.0.1", "localhost"].map(|host| format!("{host}:{}", self.port));
        if !hosts.contains(&request.host) {
            return plain("403 Forbidden", "unknown host\n");
        }
        if request.method != "GET" {
            return plain("405 Method Not Allowed", "only GET\n");
        }
        let (given, rest) = request.path[1..].split_once('/').unwrap_or((&request.path[1..], ""));
        if !same(given, &self.token) {
            return plain("404 Not Found", "not found\n");
        }
        if rest == "live" {
            return None;
        }
        match self.body(rest) {
            Some(Ok((kind, body))) => Some(("200 OK", kind, body)),
            Some(Err(e)) => {
                let body = json!({"error": e.to_string()}).to_string();
                Some(("500 Internal Server Error", JSON, body))
            }
            None => plain("404 Not Found", "not found\n"),
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
                let begun = Instant::now();
                let view = view::view(id, &run).map(|view| (JSON, view.to_string()));
                if let Some(known) = self.runs().all.get_mut(id) {
                    known.load = begun.elapsed();
                }
                Some(view)
            }
        }
    }

    fn runs(&self) -> MutexGuard<'_, KnownRuns> {
        lock(&self.runs)
    }

    fn run(&self, id: usize) -> Option<PathBuf> {
        self.runs().all.get(id).map(|known| known.path.clone())
    }

    /// The time before which no page is asked to load the whole run again. A page then reads for at most about a twentieth of the
    /// time, however long the run is.
    fn quiet_until(&self, id: usize) -> Option<Instant> {
        let runs = self.runs();
        let known = runs.all.get(id)?;
        known
            .asked?
            .checked_add((20 * known.load).clamp(LEAST_PAUSE, LONGEST_PAUSE))
    }

    fn set_asked(&self, id: usize) {
        if let Some(known) = self.runs().all.get_mut(id) {
            known.asked = Some(Instant::now());
        }
    }

    /// All runs, also those that were started since. A run that was removed is not listed any more.
    fn list(&self) -> Result<Value> {
        let found = history::find(&self.places)?;
        let listed: BTreeMap<usize, PathBuf> = {
            let mut runs = self.runs();
            found.into_iter().map(|run| (runs.id(&run), run)).collect()
        };
        // Reads files, while other requests get their runs.
        let entries = listed.iter().map(|(id, run)| view::entry(*id, run));
        Ok(json!({"runs": entries.collect::<Vec<_>>(), "most": MOST_RUNS}))
    }

    /// The runs of a query.
    fn followed(&self, request: &HttpRequest) -> Vec<FollowedRun> {
        let asked = request.query.strip_prefix("runs=").unwrap_or("");
        let runs = asked.split(',').filter_map(|text| FollowedRun::new(text, self));
        runs.take(MOST_RUNS).collect()
    }

    /// Sends the lines that runs write, as server-sent events. The query names the runs with the bytes that the page has:
    /// `runs=ID:METRICS:EVENTS:SAMPLES,...`.
    fn live(&self, mut stream: TcpStream, request: &HttpRequest) {
        let mut followed = self.followed(request);
        let head = http::head("200 OK", "text/event-stream", None);
        let mut alive = stream.write_all(head.as_bytes()).is_ok();
        let mut said = Instant::now();
        while alive {
            for message in followed.iter_mut().filter_map(|run| run.message(self)) {
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

/// For the fuzzer: the response to a request that comes in pieces of at most `piece` bytes, from a server at port 8000 with the token
/// `token`. Of what has no end, the first turn.
#[doc(hidden)]
pub fn answer_of_bytes(places: &[PathBuf], mut request: &[u8], piece: usize) -> Result<Vec<u8>> {
    let state = ServerState {
        places: places.to_vec(),
        runs: Mutex::new(KnownRuns::find(places)?),
        token: "token".into(),
        port: 8000,
        connections: AtomicUsize::new(0),
    };
    let found = http::read_from(|to| {
        let most = to.len().min(piece);
        std::io::Read::read(&mut request, &mut to[..most]).ok()
    });
    let Some(request) = found else {
        return Ok(http::response("400 Bad Request", TEXT, NO_REQUEST));
    };
    Ok(match state.response(&request) {
        Some((status, kind, body)) => http::response(status, kind, body.as_bytes()),
        None => {
            let mut followed = state.followed(&request);
            let messages = followed.iter_mut().filter_map(|run| run.message(&state));
            messages
                .flat_map(|message| format!("data: {message}\n\n").into_bytes())
                .collect()
        }
    })
}

/// A run that a page follows.
struct FollowedRun {
    id: usize,
    run: PathBuf,
    metrics: Tail,
    /// Bytes of `events.jsonl` and `samples.jsonl`.
    others: [u64; 2],
    /// As it was when the page connected: pages that load the run do not make each other wait.
    quiet_until: Option<Instant>,
    /// The page was asked to load the run again, so it will connect again.
    over: bool,
}

impl FollowedRun {
    fn new(text: &str, shared: &ServerState) -> Option<Self> {
        let numbers = text.split(':').map(|n| n.parse().ok()).collect::<Option<Vec<u64>>>()?;
        let [id, metrics, events, samples] = numbers[..] else {
            return None;
        };
        let id = usize::try_from(id).ok()?;
        let run = shared.run(id)?;
        Some(Self {
            id,
            metrics: Tail::new(&run.join("metrics.jsonl"), metrics),
            run,
            others: [events, samples],
            quiet_until: shared.quiet_until(id),
            over: false,
        })
    }

    fn sizes(run: &Path) -> [u64; 2] {
        ["events.jsonl", "samples.jsonl"].map(|name| files::size(&run.join(name)).unwrap_or(0))
    }

    /// New lines of metrics, or the news that the run is to be loaded again.
    fn message(&mut self, shared: &ServerState) -> Option<Value> {
        if self.over {
            return None;
        }
        let waits = self.quiet_until.is_some_and(|end| Instant::now() < end);
        let again = !waits && Self::sizes(&self.run) != self.others;
        match self.metrics.read() {
            Ok(TailChange::Lines(lines)) if !again => {
                let lines: Vec<Value> = lines.iter().filter_map(|line| view::entry_of(line)).collect();
                (!lines.is_empty()).then(|| json!({"run": self.id, "lines": lines}))
            }
            // Lines that are gone do not wait: they are rare, and the page shows what is not there any more.
            _ => {
                self.over = true;
                if again {
                    shared.set_asked(self.id);
                }
                Some(json!({"run": self.id, "changed": true}))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn state(places: &[PathBuf]) -> ServerState {
        ServerState {
            places: places.to_vec(),
            runs: Mutex::default(),
            token: String::new(),
            port: 0,
            connections: AtomicUsize::new(0),
        }
    }

    fn small_run(run: &Path) {
        fs::create_dir(run).unwrap();
        fs::write(run.join("resolved.toml"), "").unwrap();
        fs::write(
            run.join("events.jsonl"),
            "{\"event\":\"start\",\"steps\":9,\"time\":1.0}\n",
        )
        .unwrap();
    }

    fn append(path: PathBuf, line: &str) {
        let old = fs::read_to_string(&path).unwrap_or_default();
        fs::write(path, old + line).unwrap();
    }

    #[test]
    fn runs_keep_their_numbers_and_are_listed_once() {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str| dir.path().join(name);
        small_run(&run("a"));
        small_run(&run("b"));
        // A run that is in two places.
        let state = state(&[dir.path().to_path_buf(), run("b"), dir.path().to_path_buf()]);
        let listed = || {
            let list = state.list().unwrap();
            let runs = list["runs"].as_array().unwrap().iter();
            let of = |shown: &Value| {
                let name = shown["name"].as_str().unwrap().rsplit('/').next().unwrap();
                (shown["id"].as_u64().unwrap(), name.to_string())
            };
            runs.map(of).collect::<Vec<_>>()
        };
        let as_listed = |id: u64, name: &str| (id, name.to_string());
        assert_eq!(listed(), [as_listed(0, "a"), as_listed(1, "b")]);
        fs::remove_dir_all(run("a")).unwrap();
        small_run(&run("c"));
        assert_eq!(listed(), [as_listed(1, "b"), as_listed(2, "c")]);
        small_run(&run("a"));
        assert_eq!(listed(), [as_listed(0, "a"), as_listed(1, "b"), as_listed(2, "c")]);
        assert_eq!(state.run(2), Some(run("c")));
        assert_eq!(state.run(3), None);
    }

    #[test]
    fn a_run_with_many_samples_is_loaded_again_at_most_once_in_a_pause() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a");
        small_run(&run);
        let shared = state(&[dir.path().to_path_buf()]);
        shared.list().unwrap();
        // As the page does it: it loads the run, then follows it.
        let follow = || {
            let (_, body) = shared.body("run/0.json").unwrap().unwrap();
            let seen: Value = serde_json::from_str(&body).unwrap();
            let bytes = ["metrics_bytes", "events_bytes", "samples_bytes"].map(|name| seen[name].to_string());
            FollowedRun::new(&format!("0:{}", bytes.join(":")), &shared).unwrap()
        };
        let changed = Some(json!({"run": 0, "changed": true}));
        let sample = || append(run.join("samples.jsonl"), "{\"step\":1}\n");
        let mut first = follow();
        assert_eq!(first.message(&shared), None);
        sample();
        assert_eq!(first.message(&shared), changed);
        let mut second = follow();
        sample();
        assert_eq!(second.message(&shared), None);
        // Numbers do not wait.
        append(run.join("metrics.jsonl"), "{\"step\":1,\"loss\":2.5}\n");
        let lines = json!({"run": 0, "lines": [{"step": 1, "loss": 2.5}]});
        assert_eq!(second.message(&shared), Some(lines));
        assert_eq!(second.message(&shared), None);
        // Lines that are gone do not wait either.
        fs::write(run.join("metrics.jsonl"), "").unwrap();
        assert_eq!(second.message(&shared), changed);
        // After the pause, which is longer for a run that takes long to load.
        let mut third = follow();
        sample();
        assert_eq!(third.message(&shared), None);
        shared.runs().all[0].asked = Instant::now().checked_sub(LEAST_PAUSE);
        shared.runs().all[0].load = Duration::from_secs(1);
        third.quiet_until = shared.quiet_until(0);
        assert_eq!(third.message(&shared), None);
        shared.runs().all[0].load = Duration::ZERO;
        third.quiet_until = shared.quiet_until(0);
        assert_eq!(third.message(&shared), changed);
        assert!(shared.quiet_until(0).unwrap() > Instant::now());
    }

    #[test]
    fn a_connection_gives_its_place_back_also_after_a_panic() {
        let shared = Arc::new(state(&[]));
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
