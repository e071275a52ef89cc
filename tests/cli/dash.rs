//! `ft dash`: the page over HTTP, what it refuses, its live lines, and its copy as a file.

use super::{ft, text};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A run with text that would be markup in a page.
fn run(dir: &Path) -> PathBuf {
    let run = dir.join("runs/<img src=x onerror=alert(1)>");
    std::fs::create_dir_all(&run).unwrap();
    let write = |name: &str, text: String| std::fs::write(run.join(name), text).unwrap();
    write(
        "resolved.toml",
        "[model]\npath = \"</script><script>alert(1)</script>\"  # recipe\n".into(),
    );
    let start = json!({"event": "start", "steps": 9, "time": 1.5, "command": "ft train '<b>'"});
    let warning = json!({"event": "warning", "message": "<svg onload=alert(1)>", "time": 2.0});
    write("events.jsonl", format!("{start}\n{warning}\n"));
    let sample = json!({"step": 0, "when": "before", "prompt": "<i>", "completion": "<!--<script>"});
    write("samples.jsonl", format!("{sample}\n"));
    write("metrics.jsonl", "{\"step\":1,\"loss\":2.5,\"time\":3.0}\n".into());
    run
}

pub(super) struct Dash {
    child: Child,
    port: u16,
    /// `/` and the token and `/`.
    base: String,
}

impl Dash {
    pub(super) fn start(dir: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ft"))
            .arg("dash")
            .current_dir(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut url)
            .unwrap();
        let rest = url.trim().strip_prefix("http://127.0.0.1:").unwrap();
        let (port, path) = rest.split_once('/').unwrap();
        Self {
            child,
            port: port.parse().unwrap(),
            base: format!("/{path}"),
        }
    }

    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}{}", self.port, self.base)
    }

    pub(super) fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn send(&self, head: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    /// Status, headers and body.
    fn ask(&self, head: &str) -> (u16, String, String) {
        let mut all = String::new();
        self.send(head).read_to_string(&mut all).unwrap();
        let (head, body) = all.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_lowercase(), body.to_string())
    }

    /// A path of the page, with the token.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.base)
    }

    pub(super) fn get(&self, path: &str) -> (u16, String, String) {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", self.port))
    }

    pub(super) fn json(&self, path: &str) -> Value {
        let (status, _, body) = self.get(&self.path(path));
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }
}

impl Drop for Dash {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Rows W1, W2, W3.
#[test]
fn the_page_is_for_this_machine_and_its_token_only() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path());
    let dash = Dash::start(dir.path());
    assert_eq!(dash.base.len(), 66, "a token of 256 bits");
    let (status, head, body) = dash.get(&dash.base);
    assert!(status == 200 && body.contains("<title>ft runs</title>"), "{status}");
    for header in [
        "content-security-policy: default-src 'none'; script-src 'self'",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
        "cache-control: no-store",
    ] {
        assert!(head.contains(header), "{head}");
    }
    assert!(!head.contains("access-control-allow-origin"));
    for part in ["style.css", "charts.js", "tabs.js", "page.js", "runs.json"] {
        assert_eq!(dash.get(&format!("{}{part}", dash.base)).0, 200, "{part}");
    }
    // Without the token, or with a part of it, there is nothing.
    let token = dash.base.trim_matches('/');
    for path in [
        "/",
        "/runs.json",
        "/x/runs.json",
        &format!("/{}/runs.json", &token[1..]),
        &format!("/{token}"),
    ] {
        let (status, _, body) = dash.get(path);
        assert!(status == 404 || path.ends_with(token), "{path}");
        assert!(!body.contains("loss"), "{path}");
    }
    // No path leads to a file.
    for path in [
        "../../../../etc/passwd",
        "run/../../resolved.toml",
        "run/%2e%2e%2fresolved.toml",
        "run/0",
        "run/7.json",
        "run/-1.json",
        "resolved.toml",
    ] {
        assert_eq!(dash.get(&format!("{}{path}", dash.base)).0, 404, "{path}");
    }
    let head = |method: &str, host: &str| format!("{method} {} HTTP/1.1\r\nHost: {host}\r\n\r\n", dash.base);
    let here = format!("localhost:{}", dash.port);
    assert_eq!(dash.ask(&head("GET", &here)).0, 200);
    for host in [
        "evil.example",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1.evil.example:80",
        "",
    ] {
        assert_eq!(dash.ask(&head("GET", host)).0, 403, "{host}");
    }
    for method in ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"] {
        assert_eq!(dash.ask(&head(method, &here)).0, 405, "{method}");
    }
    assert_eq!(dash.ask("nonsense\r\n\r\n").0, 400);
}

#[test]
fn the_page_follows_a_run_also_where_lines_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let run = run(dir.path());
    let dash = Dash::start(dir.path());
    let listed = dash.json("runs.json");
    assert_eq!(listed["runs"][0]["steps"], 9);
    let seen = dash.json("run/0.json");
    assert_eq!(seen["curves"]["loss"], json!([[1, 2.5]]));
    assert_eq!(seen["command"]["lines"], json!(["ft train '<b>'"]));
    let place = |seen: &Value| {
        let [m, e, s] = ["metrics_bytes", "events_bytes", "samples_bytes"].map(|k| seen[k].to_string());
        format!(
            "GET {}live?runs=0:{m}:{e}:{s} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n",
            dash.base, dash.port
        )
    };
    let message = |reader: &mut BufReader<TcpStream>| -> Value {
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            assert!(reader.read_line(&mut line).unwrap() > 0, "the connection ended");
        }
        serde_json::from_str(&line[6..]).unwrap()
    };
    let mut live = BufReader::new(dash.send(&place(&seen)));
    let path = run.join("metrics.jsonl");
    let first = std::fs::read_to_string(&path).unwrap();
    let add = |text: &str| {
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    };
    add("{\"step\":2,\"loss\":2.0}\n{\"step\":3,\"lo");
    assert_eq!(
        message(&mut live),
        json!({"run": 0, "lines": [{"step": 2, "loss": 2.0}]})
    );
    add("ss\":1.5}\n");
    assert_eq!(
        message(&mut live),
        json!({"run": 0, "lines": [{"step": 3, "loss": 1.5}]})
    );
    // A resumed run cuts lines and writes others, longer than before.
    let cut = format!("{first}{{\"step\":2,\"loss\":2.0,\"more\":{}}}\n", "1".repeat(40));
    std::fs::write(&path, cut).unwrap();
    assert_eq!(message(&mut live), json!({"run": 0, "changed": true}));
    let seen = dash.json("run/0.json");
    assert_eq!(seen["curves"]["loss"], json!([[1, 2.5], [2, 2.0]]));
    // A new event: the page loads the run again.
    let mut live = BufReader::new(dash.send(&place(&seen)));
    let stop = "{\"event\":\"stop\",\"step\":2,\"reason\":\"done\",\"time\":4.0}\n";
    let mut events = std::fs::OpenOptions::new()
        .append(true)
        .open(run.join("events.jsonl"))
        .unwrap();
    events.write_all(stop.as_bytes()).unwrap();
    assert_eq!(message(&mut live), json!({"run": 0, "changed": true}));
    assert_eq!(dash.json("run/0.json")["state"], "done");
}

#[test]
fn a_copy_of_the_page_is_one_file_without_markup_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path());
    let out = ft(dir.path(), &["dash", "--out", "page"]);
    assert_eq!(text(&out.stdout), "page/index.html\n", "{}", text(&out.stderr));
    let page = std::fs::read_to_string(dir.path().join("page/index.html")).unwrap();
    assert!(
        !page.contains("src=\"") && !page.contains("href=\"style"),
        "it loads something"
    );
    for markup in ["<script>alert", "<img src=x", "<svg onload", "<!--<script>", "<b>'"] {
        assert!(!page.contains(markup), "{markup}");
    }
    let (_, data) = page.split_once("id=\"data\">").unwrap();
    let (data, _) = data.split_once("</script>").unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["runs"][0]["warnings"], json!(["<svg onload=alert(1)>"]));
    assert_eq!(data["runs"][0]["samples"][0]["completion"], "<!--<script>");
    let none = ft(dir.path(), &["dash", "nowhere"]);
    assert!(none.status.code() == Some(2) && text(&none.stderr).contains("there is no such directory"));
    let exported = ft(
        dir.path(),
        &["runs", "export", "runs", "--to", "tensorboard", "--out", "logs"],
    );
    let file = text(&exported.stdout);
    assert!(
        file.starts_with("logs/<img src=x onerror=alert(1)>/events.out.tfevents.0000000001."),
        "{file}"
    );
    let records = std::fs::read(dir.path().join(file.trim())).unwrap();
    assert!(records.windows(10).any(|part| part == b"train/loss"));
    let watched = ft(dir.path(), &["watch"]);
    assert_eq!(watched.status.code(), Some(2));
    assert!(
        text(&watched.stderr).contains("needs a terminal"),
        "{}",
        text(&watched.stderr)
    );
}
