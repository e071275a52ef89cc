//! What others say over a network or to a process: a hub, ranks, a launcher, a process that renders, a model that is rewarded.

use super::said;
use ft::formats::template::answers_again;
use ft::hub::{self, HubSettings, LocalFile, Upload, UploadContent};
use ft::setup::rewards;
use ft::{cli, comm};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};

/// Scheme, host and port of an address, found without the parser of ft.
fn server(address: &str) -> Option<(String, String, u16)> {
    let (scheme, rest) = address.split_once("://")?;
    let scheme = scheme.to_ascii_lowercase();
    let authority = rest.split(['/', '?', '#']).next()?;
    if authority.contains('@') {
        return None;
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().ok()),
        _ => (authority, None),
    };
    let usual = if scheme == "https" { 443 } else { 80 };
    Some((scheme, host.to_ascii_lowercase(), port.unwrap_or(usual)))
}

/// The address of a hub, a `Link` header and a chain of redirects, each a line; after a byte 0 the headers of a file.
pub fn hub_address(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (addresses, head) = text.split_once('\0').unwrap_or((text, ""));
    let mut lines = addresses.split('\n');
    let (endpoint, link) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let settings = HubSettings::from_lookup(|name| match name {
        "HF_ENDPOINT" => Some(endpoint.to_string()),
        "HF_TOKEN" => Some("hf_planted".into()),
        "FT_HUB_HTTP_TOKEN" => Some("1".into()),
        _ => None,
    });
    let own = server(&settings.endpoint);
    if let Some(next) = hub::paged(&settings, link) {
        assert_eq!(server(&next), own, "{next}");
    }
    let mut at = format!("{}/x", settings.endpoint);
    for to in lines.take(8) {
        let Some((next, with_token)) = hub::redirected(&settings, &at, to) else {
            break;
        };
        let there = server(&next);
        assert!(own.is_some() && there.is_some(), "{next}");
        assert_eq!(with_token, there == own, "{next}");
        let is_secure = |server: &Option<(String, String, u16)>| server.as_ref().is_some_and(|(s, ..)| s == "https");
        assert!(is_secure(&there) || !is_secure(&own), "{next}");
        at = next;
    }
    for redirected in [false, true] {
        if let Some((commit, hash, _)) = hub::described(head, redirected) {
            let is_name = |text: &str| text.len() >= 40 && text.bytes().all(|b| b.is_ascii_hexdigit());
            assert!(is_name(&commit) && is_name(&hash), "{commit} {hash}");
        }
    }
}

/// Answers of a hub to an upload of three files, each a line: to the new repository, the kinds of the files, the places for large
/// files, and so on. `!403 text` is an error.
pub fn upload(bytes: &[u8]) {
    const TOKEN: &str = "hf_planted";
    let settings = HubSettings {
        endpoint: "https://hub.example".into(),
        token: Some(TOKEN.into()),
        attempts: 1,
        ..HubSettings::default()
    };
    let file = |name: &str, content: &[u8]| LocalFile {
        name: name.into(),
        content: UploadContent::Bytes(content.to_vec()),
    };
    let files = [
        file("m.safetensors", b"0123456789"),
        file("README.md", b"card"),
        file("empty", b""),
    ];
    let upload = Upload {
        id: "me/model",
        revision: "main",
        message: "m",
        private: true,
        files: &files,
    };
    let (asked, result) = hub::uploaded(&settings, &upload, bytes).unwrap();
    let own = server(&settings.endpoint);
    for request in &asked {
        let there = server(&request.url);
        assert_eq!(
            there.as_ref().map(|(scheme, ..)| scheme.as_str()),
            Some("https"),
            "{request:?}"
        );
        assert!(!request.has_token || there == own, "{request:?}");
    }
    match result {
        Ok(report) => {
            assert_eq!(asked.iter().map(|request| request.sent).sum::<u64>(), report.sent);
            assert_eq!(report.commit.is_none(), report.kept == files.len());
            let is_hash = |commit: String| !commit.is_empty() && commit.bytes().all(|b| b.is_ascii_hexdigit());
            assert!(report.commit.is_none_or(is_hash));
        }
        Err(e) => {
            let e = e.to_string();
            assert!(
                !e.contains(TOKEN) && !e.chars().any(|c| c.is_control() && c != '\n'),
                "{e:?}"
            );
        }
    }
}

/// Variables of the environment, each a line `NAME=value`.
pub fn environment(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let all: BTreeMap<&str, &str> = text.split('\n').filter_map(|line| line.split_once('=')).collect();
    let value = |name: &str| all.get(name).map(|value| value.to_string());
    if let Some(Some(place)) = said(cli::place_in(&value)) {
        assert!(place.size > 1);
    }
    let settings = HubSettings::from_lookup(|name| match name {
        // No file is read.
        "HF_HUB_DISABLE_IMPLICIT_TOKEN" => Some("1".into()),
        name => value(name).filter(|value| !value.is_empty()),
    });
    assert!(!settings.endpoint.ends_with('/'));
    if let Some(token) = settings.token.as_deref().filter(|token| token.starts_with("hf_")) {
        assert!(!settings.scrub(&format!("Bearer {token}!")).contains(token));
        let is_elsewhere = all
            .iter()
            .any(|(name, value)| *name != "HF_TOKEN" && value.contains(token));
        assert!(is_elsewhere || !format!("{settings:?}").contains(token));
    }
}

/// Gives one byte at a time, with nothing between them.
struct Slow<'a> {
    rest: &'a [u8],
    waits: bool,
}

impl Read for Slow<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        self.waits = !self.waits;
        if self.waits {
            return Err(ErrorKind::WouldBlock.into());
        }
        let most = to.len().min(1);
        self.rest.read(&mut to[..most])
    }
}

/// What connects to a rank says; also as the text behind a right length, and as the list that rank 0 sends.
pub fn greeting(bytes: &[u8]) {
    let framed = [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
    for mut bytes in [bytes, &framed[..]] {
        let slow = comm::greeting_again(&mut Slow {
            rest: bytes,
            waits: false,
        });
        let again = comm::greeting_again(&mut bytes);
        assert_eq!(slow, again);
        if let Some(again) = again {
            assert_eq!(comm::greeting_again(&mut &again[..]).as_ref(), Some(&again));
        }
    }
    let list = String::from_utf8_lossy(bytes);
    for size in 0..4 {
        if let Some(ranks) = comm::ranks_in(&list, size) {
            assert_eq!(ranks.len(), size);
            assert!(ranks.iter().all(|(address, _)| !address.contains([' ', '\n'])));
        }
    }
}

/// Answers of the process that renders; the first byte is their number.
pub fn rendered(bytes: &[u8]) {
    let Some((count, answers)) = bytes.split_first() else {
        return;
    };
    let count = usize::from(count % 5);
    if let Some(again) = answers_again(answers, count) {
        assert_eq!(answers_again(&again, count).as_ref(), Some(&again));
    }
}

/// Nanoseconds that this thread has used.
fn used() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// The pattern of a `regex:` reward, the schema of a `json:` reward, a known answer and the answer of a model, with a byte 0 between
/// them.
pub fn reward(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut parts = text.split('\0');
    let mut next = || parts.next().unwrap_or_default();
    let (pattern, schema, known, answer) = (next(), next(), next(), next());
    let value = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
    // A single step of a pattern may read the whole text.
    let answer: String = answer.chars().take(1000).collect();
    let begun = used();
    let (scores, _) = rewards::scores_of_text(pattern, value(schema), &value(known), &answer);
    let seconds = used().saturating_sub(begun) as f64 / 1e9;
    assert!(seconds < 10.0, "{seconds} s");
    for (n, score) in scores.into_iter().enumerate() {
        assert!(
            score.is_none_or(|x| x == 0.0 || x == 1.0 || n == 1 && x.is_nan()),
            "{n} {score:?}"
        );
    }
    if let Some(words) = rewards::command_words(pattern) {
        let chars = |text: &str| text.chars().count();
        assert!(words.iter().map(|word| chars(word)).sum::<usize>() <= chars(pattern));
    }
}
