//! What a browser sends to `ft dash`, and files of a run that its page and `ft watch` show.

use super::{dir, put, said};
use ft::commands::push::{PushRequest, prepare};
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

/// The parts of a line of a table: a bar with a backslash before it is text.
fn cells(line: &str) -> usize {
    let (mut bars, mut is_escaped) = (0, false);
    for c in line.chars() {
        bars += usize::from(c == '|' && !is_escaped);
        is_escaped = c == '\\' && !is_escaped;
    }
    bars - 1
}

/// The lines of a text outside of its blocks of code, with the heads of these blocks. A carriage return ends a line too.
fn outside(text: &str) -> Vec<&str> {
    let (mut fence, mut found) = (None, Vec::new());
    for line in text.split(['\n', '\r']) {
        let start = line.trim_start_matches(' ');
        let length = start.len() - start.trim_start_matches('`').len();
        match fence {
            Some(open) => {
                if length >= open && start.trim_start_matches('`').trim().is_empty() {
                    fence = None;
                }
                continue;
            }
            None if length >= 3 => fence = Some(length),
            None => {}
        }
        found.push(line);
    }
    assert_eq!(fence, None);
    found
}

/// Config of an adapter, and settings, events, metrics and recipe of the run that made it, with a byte 0 between them: nothing in them
/// makes a line of the model card, or a key of its head.
pub fn card(bytes: &[u8]) {
    const FILES: [&str; 5] = [
        "final/adapter_config.json",
        "resolved.toml",
        "events.jsonl",
        "metrics.jsonl",
        "recipe.toml",
    ];
    const KEYS: [&str; 7] = [
        "base_model",
        "base_model_relation",
        "library_name",
        "pipeline_tag",
        "license",
        "datasets",
        "tags",
    ];
    let mut parts = bytes.splitn(FILES.len(), |byte| *byte == 0);
    for name in FILES {
        put(&format!("pushed/{name}"), parts.next().unwrap_or_default());
    }
    let from = dir().join("pushed");
    let request = PushRequest {
        from: &from.join("final"),
        id: "me/adapter",
        license: Some("mit"),
        keep_readme: false,
    };
    let Some(files) = said(prepare(&request)) else { return };
    let card = files.card.unwrap();
    let (head, body) = card.strip_prefix("---\n").unwrap().split_once("\n---\n").unwrap();
    for line in head.split(['\n', '\r']) {
        let is_word = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./".contains(&b));
        let is_good = match (line.strip_prefix("- "), line.split_once(':')) {
            (Some(item), _) => is_word(item),
            (_, Some((key, value))) => KEYS.contains(&key) && is_word(value.trim_start()),
            _ => false,
        };
        assert!(is_good, "{line:?}\n{card}");
    }
    for line in outside(body) {
        let is_own = match line.chars().next() {
            None => true,
            Some('#') => [
                "# adapter",
                "## Training",
                "## Data",
                "## Results",
                "## How it was made",
                "## License",
            ]
            .contains(&line),
            Some('|') => cells(line) == 2,
            Some('`') => {
                line.starts_with("```") || line.starts_with("`<secret>` is in") || line.starts_with("`mit`, as stated")
            }
            _ => ["An adapter", "Measured by", "No run directory", "The adapter works"]
                .iter()
                .any(|start| line.starts_with(start)),
        };
        assert!(is_own && !line.contains(|c: char| c.is_control()), "{line:?}\n{card}");
    }
}
