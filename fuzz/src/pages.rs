//! What a browser sends to `ft dash`, and files of a run that its page and `ft watch` show.

use super::{dir, put, said};
use ft::look::{FrameStyle, WatchedRun, answer_of_bytes, write_folder};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::slice::from_ref;

const START: &str = "{\"event\":\"start\",\"steps\":2,\"time\":1.0}\n";
const METRICS: &str = "{\"step\":1,\"loss\":2.0}\n{\"step\":2,\"loss\":1.0}\n";

/// A run with these files.
fn run(name: &str, files: &[(&str, &str)]) -> PathBuf {
    for (file, text) in files {
        put(&format!("{name}/{file}"), text.as_bytes());
    }
    dir().join(name)
}

/// A request to `ft dash` in pieces of any size: as it is, then as a path of a request that may see the page.
pub fn dash(bytes: &[u8]) {
    let Some((piece, request)) = bytes.split_first() else {
        return;
    };
    let place = run(
        "served",
        &[
            ("resolved.toml", "[train]\nmax_steps = 2\n"),
            ("events.jsonl", START),
            ("metrics.jsonl", METRICS),
        ],
    );
    let answered = |request: &[u8], piece: usize| said(answer_of_bytes(from_ref(&place), request, piece)).unwrap();
    let path = String::from_utf8_lossy(request);
    let path = path.split(['\r', '\n', ' ']).next().unwrap_or_default();
    let good = format!("GET /token/{path} HTTP/1.1\r\nHost: localhost:8000\r\n\r\n");
    for request in [request, good.as_bytes()] {
        let answer = answered(request, usize::from(*piece) + 1);
        // Of more bytes than a head may have, the pieces decide how many are read.
        if request.len() <= 8000 {
            assert_eq!(answer, answered(request, 1024));
        }
        let answer = String::from_utf8(answer).unwrap();
        if answer.starts_with("HTTP/1.1 200") || answer.starts_with("data: ") {
            let said = String::from_utf8_lossy(request);
            let is_own = said.contains("127.0.0.1:8000") || said.contains("localhost:8000");
            assert!(is_own && said.contains("/token"), "{said}");
        }
        if let Some((head, body)) = answer.split_once("\r\n\r\n")
            && head.contains("Content-Type: application/json")
        {
            assert!(serde_json::from_str::<Value>(body).is_ok(), "{body}");
        }
    }
}

/// Samples, rows, plan, environment, recipe, events and metrics of a run, with a byte 0 between them.
pub fn page(bytes: &[u8]) {
    const FILES: [&str; 7] = [
        "samples.jsonl",
        "rows.jsonl",
        "plan.json",
        "environment.json",
        "recipe.toml",
        "events.jsonl",
        "metrics.jsonl",
    ];
    let mut parts = bytes.splitn(FILES.len(), |byte| *byte == 0);
    for (n, file) in FILES.into_iter().enumerate() {
        let good = [START, METRICS].get(n.wrapping_sub(5)).copied().unwrap_or_default();
        put(&format!("shown/{file}"), parts.next().unwrap_or(good.as_bytes()));
    }
    let place = run("shown", &[("resolved.toml", "[train]\nstage = \"sft\"  # recipe\n")]);
    if let Some(page) = said(write_folder(from_ref(&place), &dir().join("shown_page"))) {
        const DATA: &str = "<script type=\"application/json\" id=\"data\">";
        let page = fs::read_to_string(page).unwrap();
        let (_, data) = page.split_once(DATA).unwrap();
        let (data, rest) = data.split_at(data.find('<').unwrap());
        assert!(rest.starts_with("</script>"));
        // The data is nested deeper than the files, and serde_json reads 128 levels.
        let nested = bytes.iter().filter(|byte| b"[{".contains(byte)).count();
        assert!(nested > 100 || serde_json::from_str::<Value>(data).is_ok(), "{data}");
    }
    if let Some(mut watched) = said(WatchedRun::open(&place)) {
        for unicode in [true, false] {
            let look = FrameStyle {
                width: 80,
                height: 24,
                color: false,
                unicode,
            };
            for line in watched.frame(look) {
                assert!(!line.chars().any(char::is_control), "{line:?}");
            }
            watched.turn(false);
            watched.toggle_raw();
            watched.refresh();
        }
    }
}
