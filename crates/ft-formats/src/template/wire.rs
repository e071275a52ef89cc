//! The messages between a process that renders and the process that asks it.
//!
//! A request is a length (8 bytes, little-endian) and JSON. The answer to each job is a length and the answers to its
//! renderings: a byte 0, the text, its ranges; or a byte 1 and a failure. Numbers are little-endian, texts come after
//! their length. The asking side believes none of it.

use super::{RenderResult, RenderedChat, answer};
use crate::jinja::{self, Fail, FailKind};
use ft_base::worker;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Most programs that a process keeps.
const PROGRAMS: usize = 64;
/// Answers are handed over when they are this many bytes, or this old.
const FLUSH_BYTES: usize = 1 << 16;
const FLUSH_AFTER: Duration = Duration::from_secs(1);

/// The template to use: by its number, with its text when the process has not seen it.
#[derive(Serialize)]
pub(super) struct RenderRequest<'a> {
    pub program: u64,
    pub source: Option<&'a str>,
    pub variables: &'a Map<String, Value>,
    pub jobs: Vec<JobText<'a>>,
}

#[derive(Serialize)]
pub(super) struct JobText<'a> {
    pub messages: &'a [Value],
    pub tools: Option<&'a Value>,
    pub renderings: &'a [(usize, bool)],
}

#[derive(Deserialize)]
struct OwnRequest {
    program: u64,
    source: Option<String>,
    variables: Map<String, Value>,
    jobs: Vec<OwnJob>,
}

#[derive(Deserialize)]
struct OwnJob {
    messages: Vec<Value>,
    tools: Option<Value>,
    renderings: Vec<(usize, bool)>,
}

/// The whole life of a process that renders: confines itself, then answers requests from standard input until it
/// closes. Returns the exit code.
pub fn serve() -> i32 {
    // The time zone is read from a file, which is out of reach later.
    let warm = jinja::Template::parse("{{ strftime_now('%H') }}").map(|t| t.render(&[], &[], &[(0, false)]));
    drop(warm);
    if worker::confine().is_err() {
        return 3;
    }
    let mut programs: HashMap<u64, jinja::Template> = HashMap::new();
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    loop {
        let mut length = [0u8; 8];
        // The end of the input is the end of the work.
        if input.read_exact(&mut length).is_err() {
            return 0;
        }
        let mut text = Vec::new();
        let length = u64::from_le_bytes(length);
        match input.by_ref().take(length).read_to_end(&mut text) {
            Ok(n) if n as u64 == length => {}
            _ => return 3,
        }
        worker::limit_time();
        let Ok(request) = serde_json::from_slice::<OwnRequest>(&text) else {
            return 3;
        };
        drop(text);
        if let Some(source) = &request.source {
            if programs.len() >= PROGRAMS {
                programs.clear();
            }
            let Ok(parsed) = jinja::Template::parse(source) else {
                return 3;
            };
            programs.insert(request.program, parsed);
        }
        let Some(program) = programs.get(&request.program) else {
            return 3;
        };
        let (mut out, mut since) = (Vec::new(), Instant::now());
        for job in request.jobs {
            let answers = answer(
                program,
                &request.variables,
                &job.messages,
                job.tools.as_ref(),
                &job.renderings,
            );
            put_job(&mut out, &answers);
            if out.len() > FLUSH_BYTES || since.elapsed() > FLUSH_AFTER {
                if output.write_all(&out).and_then(|()| output.flush()).is_err() {
                    return 0;
                }
                out.clear();
                since = Instant::now();
                worker::limit_time();
            }
        }
        if output.write_all(&out).and_then(|()| output.flush()).is_err() {
            return 0;
        }
    }
}

const KINDS: [FailKind; 5] = [
    FailKind::Syntax,
    FailKind::Failed,
    FailKind::Raised,
    FailKind::Unsupported,
    FailKind::Limit,
];

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

pub(super) fn put_job(out: &mut Vec<u8>, answers: &[RenderResult]) {
    let at = out.len();
    out.extend([0u8; 8]);
    for answer in answers {
        match answer {
            Ok(rendered) => {
                out.push(0);
                put_text(out, &rendered.text);
                out.extend((rendered.generation.len() as u64).to_le_bytes());
                for range in &rendered.generation {
                    out.extend((range.start as u64).to_le_bytes());
                    out.extend((range.end as u64).to_le_bytes());
                }
            }
            Err(fail) => {
                let kind = KINDS.iter().position(|k| *k == fail.kind).unwrap_or(1);
                out.extend([1, kind as u8]);
                out.extend(fail.line.map_or(0, |l| u64::from(l) + 1).to_le_bytes());
                put_text(out, &fail.text);
            }
        }
    }
    let length = (out.len() - at - 8) as u64;
    out[at..at + 8].copy_from_slice(&length.to_le_bytes());
}

/// For the fuzzer: the answers to `count` renderings in these bytes, written again.
pub fn answers_again(bytes: &[u8], count: usize) -> Option<Vec<u8>> {
    let answers = JobReader(bytes).job(count)?;
    let mut out = Vec::new();
    put_job(&mut out, &answers);
    Some(out.split_off(8))
}

/// Reads what `put_job` wrote; `None`: it is something else.
pub(super) struct JobReader<'a>(pub &'a [u8]);

impl JobReader<'_> {
    fn bytes(&mut self, n: usize) -> Option<&[u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn number(&mut self) -> Option<u64> {
        let bytes = self.bytes(8)?.try_into().ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.number()?).ok()?;
        String::from_utf8(self.bytes(length)?.to_vec()).ok()
    }

    /// The answers to `count` renderings, and nothing behind them.
    pub(super) fn job(mut self, count: usize) -> Option<Vec<RenderResult>> {
        let mut out = Vec::with_capacity(count);
        for _ in 0..count {
            out.push(match self.bytes(1)?[0] {
                0 => {
                    let text = self.text()?;
                    let ranges = self.number()?;
                    let mut generation: Vec<Range<usize>> = Vec::new();
                    for _ in 0..ranges {
                        let start = usize::try_from(self.number()?).ok()?;
                        let end = usize::try_from(self.number()?).ok()?;
                        text.get(start..end)?;
                        generation.push(start..end);
                    }
                    Ok(RenderedChat { text, generation })
                }
                1 => {
                    let kind = *KINDS.get(usize::from(self.bytes(1)?[0]))?;
                    let line = self.number()?;
                    let text = self.text()?;
                    Err(Fail {
                        kind,
                        text,
                        line: line.checked_sub(1).and_then(|l| u32::try_from(l).ok()),
                    })
                }
                _ => return None,
            });
        }
        self.0.is_empty().then_some(out)
    }
}
