//! Prompts in the cache: a line of JSON for the whole set, and one for each prompt.

use super::{FileReading, TokenCache, TokenRequest, key};
use crate::dataset::RowOrigin;
use crate::layout::{RenderRules, RowPurpose};
use crate::prompts::{Prompt, PromptContent, PromptSpec, Prompts};
use crate::read::RowPosition;
use crate::screen::{Screen, ScreenCounts};
use crate::source;
use ft_base::{Error, Result, progress};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

/// The first line.
#[derive(Serialize, Deserialize)]
struct PromptsHeader {
    fingerprint: String,
    dropped: (usize, u64),
    readings: Vec<FileReading>,
    /// The rows that the screen dropped when this cache was written.
    screened: Option<ScreenCounts>,
}

/// A prompt; its place follows from its origin.
#[derive(Serialize, Deserialize)]
struct PromptLine {
    ids: Vec<u32>,
    said: PromptContent,
    shown: Value,
    answer: Option<Value>,
    columns: Map<String, Value>,
    origin: RowOrigin,
}

fn broken(e: serde_json::Error) -> Error {
    Error::internal("a line of cached prompts").cause(e)
}

impl TokenCache<'_> {
    /// As `Prompts::load`; prompts of large files are tokenized once. `None`: they are not cached.
    pub(crate) fn prompts(&self, spec: &PromptSpec) -> Result<Option<Prompts>> {
        let rows = spec.rows();
        if key::bytes(&rows)? < self.least_bytes {
            return Ok(None);
        }
        let request = TokenRequest {
            spec: &rows,
            codec: spec.encoder.codec,
            template: spec.encoder.template,
            want: None,
        };
        let Some(name) = key::of(&request)? else {
            return Ok(None);
        };
        let own = format!("prompts {:?} {:?}", spec.answer, spec.limits);
        let bytes = self.made(&[&name, &own], &|| bytes(spec))?;
        bytes.map(|bytes| read(&bytes, spec)).transpose()
    }
}

/// Tokenizes the prompts.
fn bytes(spec: &PromptSpec) -> Result<Vec<u8>> {
    let (prompts, readings) = spec.read()?;
    let readings = readings.into_iter().map(|(file, reading)| FileReading {
        file,
        columns: reading.columns(),
        skipped: reading.skipped().to_vec(),
    });
    let head = PromptsHeader {
        fingerprint: prompts.fingerprint,
        dropped: prompts.dropped,
        readings: readings.collect(),
        screened: spec.screen.filter(|screen| screen.drops()).map(Screen::report),
    };
    let mut out = serde_json::to_vec(&head).map_err(broken)?;
    for (prompt, origin) in prompts.rows.into_iter().zip(prompts.origins) {
        let line = PromptLine {
            ids: prompt.ids,
            said: prompt.said,
            shown: prompt.shown,
            answer: prompt.answer,
            columns: prompt.columns,
            origin,
        };
        out.push(b'\n');
        serde_json::to_writer(&mut out, &line).map_err(broken)?;
    }
    Ok(out)
}

fn read(bytes: &[u8], spec: &PromptSpec) -> Result<Prompts> {
    let mut lines = bytes.split(|b| *b == b'\n');
    let head: PromptsHeader = serde_json::from_slice(lines.next().unwrap_or_default()).map_err(broken)?;
    let lines: Vec<&[u8]> = lines.collect();
    let phase = progress::phase("reading cached prompts", lines.len(), "rows");
    let files: Vec<Arc<str>> = spec
        .sources
        .iter()
        .flat_map(|s| &s.files)
        .map(|f| f.as_str().into())
        .collect();
    let one = |line: &&[u8]| -> Result<(Prompt, RowOrigin)> {
        let line: PromptLine = serde_json::from_slice(line).map_err(broken)?;
        let file = files.get(line.origin.file as usize).cloned();
        let prompt = Prompt {
            ids: line.ids,
            said: line.said,
            shown: line.shown,
            answer: line.answer,
            columns: line.columns,
            place: RowPosition {
                file: file.ok_or_else(|| Error::internal("the file of a cached prompt"))?,
                number: line.origin.number,
                is_line: line.origin.is_line,
            },
        };
        phase.add(1);
        Ok((prompt, line.origin))
    };
    let (rows, origins) = lines
        .par_iter()
        .map(one)
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .unzip();
    let rules = RenderRules {
        answer: spec.answer,
        ..spec.rows().rules(spec.encoder)
    };
    let mut readings = Vec::new();
    for of_file in &head.readings {
        let reading = source::first_reading(spec.sources, of_file.file, RowPurpose::Ask, &rules)?;
        readings.extend(reading.map(|reading| reading.with(&of_file.columns, &of_file.skipped)));
    }
    if let (Some(screen), Some(screened)) = (spec.screen, head.screened) {
        readings
            .iter_mut()
            .for_each(|reading| reading.set_judges(screen.columns()));
        screen.restore(screened);
    }
    Ok(Prompts {
        rows,
        origins,
        shares: source::shares(spec.sources),
        readings,
        dropped: head.dropped,
        fingerprint: head.fingerprint,
    })
}
