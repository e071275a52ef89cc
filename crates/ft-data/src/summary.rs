//! Rows of a dataset as JSON, and statistics of its sources: rows, tokens, quantiles of lengths, a histogram.

use super::codec::TextCodec;
use super::dataset::{Dataset, DatasetSpec};
use super::examples::RowMeasure;
use super::mixture::source_of;
use super::source;
use ft_base::Result;
use ft_base::units::{count, table_cell};
use serde_json::{Value, json};
use std::ops::Range;

/// Lengths that are reported, as fractions of the rows.
const QUANTILES: [(&str, f64); 7] = [
    ("min", 0.0),
    ("p10", 0.1),
    ("p50", 0.5),
    ("p90", 0.9),
    ("p95", 0.95),
    ("p99", 0.99),
    ("max", 1.0),
];

/// One row: its place, ids, loss mask, ranges of trained tokens, and text. A pair has two `documents`.
///
/// # Errors
/// A token that cannot be decoded.
pub fn row(dataset: &Dataset, spec: &DatasetSpec, codec: &dyn TextCodec, index: usize) -> Result<Value> {
    let (example, origin) = (dataset.examples.get(index)?, dataset.origin(index)?);
    let mask: Vec<u8> = example.trained.iter().map(|&t| t.into()).collect();
    let mut out = json!({
        "file": source::file(spec.sources, origin.file),
        "ids": example.ids, "mask": mask, "spans": pairs(spans(&example.trained)), "text": codec.decode(&example.ids)?,
    });
    out[if origin.is_line { "line" } else { "row" }] = origin.number.into();
    let documents = dataset.documents(index);
    if documents.len() > 1 {
        out["documents"] = pairs(documents);
    }
    Ok(out)
}

/// A row as JSON for a reader without a tokenizer: `number` (of its line or row), `tokens`, `trained` tokens, and `parts`, a
/// list of texts and whether their tokens are trained. Tokens after the first `most` are left out of `parts`.
///
/// # Errors
/// A token that cannot be decoded.
pub fn marked(dataset: &Dataset, codec: &dyn TextCodec, index: usize, most: usize) -> Result<Value> {
    let (example, origin) = (dataset.examples.get(index)?, dataset.origin(index)?);
    let mut parts = Vec::new();
    let end = example.ids.len().min(most);
    let mut start = 0;
    while start < end {
        let trained = example.trained[start];
        let run = example.trained[start..end]
            .iter()
            .take_while(|t| **t == trained)
            .count();
        parts.push(json!([codec.decode(&example.ids[start..start + run])?, trained]));
        start += run;
    }
    Ok(json!({
        "number": origin.number, "tokens": example.ids.len(),
        "trained": example.trained.iter().filter(|t| **t).count(), "parts": parts,
    }))
}

fn pairs(ranges: Vec<Range<usize>>) -> Value {
    ranges
        .into_iter()
        .map(|range| json!([range.start, range.end]))
        .collect()
}

/// The ranges of trained tokens.
fn spans(trained: &[bool]) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for (at, _) in trained.iter().enumerate().filter(|(_, trained)| **trained) {
        match out.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => out.push(at..at + 1),
        }
    }
    out
}

/// Numbers of the rows of one source, or of all.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSummary {
    /// The name of the source.
    pub name: String,
    /// Rows in the files, with those that are not used.
    pub read: usize,
    /// Rows that are cut at the longest length.
    pub truncated: usize,
    /// Tokens that are targets.
    pub trained_tokens: u64,
    /// Lengths of the rows that are used, ascending.
    lengths: Vec<usize>,
}

impl DataSummary {
    fn new(name: &str, read: usize, truncated: usize) -> Self {
        Self {
            name: name.to_string(),
            read,
            truncated,
            trained_tokens: 0,
            lengths: Vec::new(),
        }
    }

    fn add(&mut self, row: &RowMeasure) {
        self.trained_tokens += u64::from(row.trained);
        self.lengths.push(row.length as usize);
    }

    /// Tokens of the rows that are used.
    pub fn tokens(&self) -> u64 {
        self.lengths.iter().sum::<usize>() as u64
    }

    /// The length that this fraction of the rows does not exceed.
    fn quantile(&self, fraction: f64) -> usize {
        let rank = (fraction * self.lengths.len() as f64).ceil() as usize;
        self.lengths.get(rank.saturating_sub(1)).copied().unwrap_or(0)
    }

    /// Upper limits, each twice the one before, with the numbers of rows.
    fn histogram(&self) -> Vec<(usize, usize)> {
        let limit = |length: &usize| (*length).max(1).next_power_of_two();
        let bins = self.lengths.chunk_by(|a, b| limit(a) == limit(b));
        bins.map(|bin| (limit(&bin[0]), bin.len())).collect()
    }

    fn share(&self) -> f64 {
        self.truncated as f64 / self.read.max(1) as f64
    }

    /// All numbers as JSON.
    pub fn json(&self) -> Value {
        let rows = self.lengths.len();
        let lengths: serde_json::Map<String, Value> = QUANTILES
            .iter()
            .map(|(name, fraction)| (name.to_string(), self.quantile(*fraction).into()))
            .collect();
        json!({
            "source": self.name, "rows": rows, "rows_read": self.read, "tokens": self.tokens(),
            "trained_tokens": self.trained_tokens, "mean_length": self.tokens() as f64 / rows.max(1) as f64,
            "length": lengths, "histogram": self.histogram(), "truncated_rows": self.truncated,
            "truncated_share": self.share(),
        })
    }
}

/// The numbers of each source, then of all rows if there are several sources.
///
/// # Errors
/// The token file cannot be read.
pub fn summaries(dataset: &Dataset) -> Result<Vec<DataSummary>> {
    let shares = dataset.shares.iter();
    let mut out: Vec<DataSummary> = shares.map(|s| DataSummary::new(&s.name, s.rows, s.truncated)).collect();
    if out.len() != 1 {
        let stats = &dataset.stats;
        out.push(DataSummary::new("all", stats.rows, stats.truncated_rows));
    }
    let last = out.len() - 1;
    let origins = dataset.all_origins()?;
    for (row, origin) in dataset.examples.measures()?.iter().zip(&*origins) {
        if last > 0 {
            out[source_of(&dataset.shares, *origin)].add(row);
        }
        out[last].add(row);
    }
    out.iter_mut().for_each(|summary| summary.lengths.sort_unstable());
    Ok(out)
}

/// The summaries as a table, and the histogram of the last one.
pub fn table(summaries: &[DataSummary]) -> String {
    table_within(summaries, None)
}

/// As `table`. If its lines are longer than `columns`, the quantiles of the lengths have a table of their own.
pub fn table_within(summaries: &[DataSummary], columns: Option<usize>) -> String {
    let mut heads = vec!["rows", "tokens", "trained", "mean"];
    let quantiles = heads.len()..heads.len() + QUANTILES.len();
    heads.extend(QUANTILES.map(|(name, _)| name));
    heads.push("cut");
    let mut lines = vec![(
        String::new(),
        heads.iter().map(|head| head.to_string()).collect::<Vec<_>>(),
    )];
    for summary in summaries {
        let rows = summary.lengths.len();
        let mut cells = vec![
            count(rows as u64),
            count(summary.tokens()),
            count(summary.trained_tokens),
            count((summary.tokens() as f64 / rows.max(1) as f64).round() as u64),
        ];
        cells.extend(QUANTILES.map(|(_, fraction)| count(summary.quantile(fraction) as u64)));
        cells.push(format!("{:.1} %", 100.0 * summary.share()));
        lines.push((table_cell(&summary.name), cells));
    }
    let first = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let width = |at: usize| lines.iter().map(|(_, cells)| cells[at].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let rows_of = |shown: &dyn Fn(usize) -> bool| {
        let mut out = String::new();
        for (name, cells) in &lines {
            let cells = cells.iter().zip(&widths).enumerate();
            let cells: Vec<String> = cells
                .filter(|(at, _)| shown(*at))
                .map(|(_, (cell, width))| format!("{cell:>width$}"))
                .collect();
            out += &format!("{name:<first$}  {}\n", cells.join("  "));
        }
        out
    };
    let whole = first + widths.iter().map(|width| width + 2).sum::<usize>();
    let mut out = if columns.is_none_or(|columns| whole <= columns) {
        rows_of(&|_| true)
    } else {
        let (counts, lengths) = (
            rows_of(&|at| !quantiles.contains(&at)),
            rows_of(&|at| quantiles.contains(&at)),
        );
        format!("{counts}\nlengths\n{lengths}")
    };
    if let Some(last) = summaries.last() {
        out.push('\n');
        out += &super::describe::histogram(last.lengths.iter().copied());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use crate::source::Source;
    use crate::testing::{Words, files};
    use crate::{ColumnRole, Long, Render, TrainOn};

    #[test]
    fn a_long_name_does_not_make_the_table_wide() {
        let table = table(&[DataSummary::new(&"é".repeat(70_000), 1, 0)]);
        let line = table.lines().nth(1).unwrap();
        assert!(line.starts_with(&format!("{}…     0", "é".repeat(200))), "{line}");
    }

    #[test]
    fn a_narrow_terminal_gets_the_lengths_in_a_table_of_their_own() {
        let mut summary = DataSummary::new("assets/world/train.jsonl", 300, 0);
        summary.lengths = vec![1000; 300];
        let summaries = [summary];
        let wide = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap();
        let whole = table(&summaries);
        assert!(wide(&whole) > 80 && table_within(&summaries, Some(wide(&whole))) == whole);
        let narrow = table_within(&summaries, Some(80));
        assert!(wide(&narrow) <= 80, "{narrow}");
        assert!(
            narrow.contains("    rows   tokens  trained   mean    cut\n"),
            "{narrow}"
        );
        let lengths = narrow.split("\nlengths\n").nth(1).unwrap();
        let lengths: Vec<Vec<&str>> = lengths.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lengths[0], ["min", "p10", "p50", "p90", "p95", "p99", "max"]);
        assert_eq!(lengths[1].len(), 8, "{narrow}");
    }

    #[test]
    fn the_mean_is_the_nearest_number() {
        let mut summary = DataSummary::new("a", 3, 0);
        summary.lengths = vec![1, 2, 2];
        let table = table(&[summary]);
        let cells: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells[..5], ["a", "3", "5", "0", "2"], "{table}");
    }

    #[test]
    fn sources_are_counted_apart_and_together() {
        let a = "{\"text\": \"one two three four five six\"}\n{\"text\": \"one\"}\n";
        let mut f = files(&[("a.jsonl", a), ("b.csv", "q,a\nask me,I answer\n")]);
        let second = Source {
            mapping: Mapping {
                columns: vec![(ColumnRole::Prompt, "q".into()), (ColumnRole::Completion, "a".into())],
                ..Mapping::default()
            },
            ..Source::new(f.paths.split_off(1))
        };
        f.sources = vec![Source::new(f.paths.clone()), second];
        let spec = DatasetSpec {
            sources: &f.sources,
            render: Render::Plain,
            max_length: 5,
            long: Long::Truncate,
            overlap: 1,
            train_on: TrainOn::Assistant,
            embedding_rows: 1000,
            screen: None,
        };
        let codec = Words::chatml();
        let data = Dataset::load(&spec, &codec, None).unwrap();
        let found = summaries(&data).unwrap();
        let numbers = |s: &DataSummary| (s.lengths.clone(), s.read, s.truncated);
        assert_eq!(numbers(&found[0]), (vec![2, 5], 2, 1));
        assert_eq!((found[1].lengths.len(), found[1].truncated), (1, 0));
        assert_eq!(
            (found[2].name.as_str(), found[2].read, found[2].truncated),
            ("all", 3, 1)
        );
        assert_eq!(found[0].json()["length"]["p50"], 2);
        assert_eq!(found[0].json()["truncated_share"], 0.5);
        assert_eq!(found[0].histogram(), [(2, 1), (8, 1)]);
        let table = table(&found);
        assert!(
            table.contains("50.0 %") && table.contains("p99") && table.contains("tokens per row"),
            "{table}"
        );
        let shown = row(&data, &spec, &codec, 2).unwrap();
        assert_eq!(
            (&shown["line"], &shown["spans"][0][1]),
            (&json!(2), &json!(shown["ids"].as_array().unwrap().len()))
        );
        assert_eq!(shown["mask"][0], 0);
        assert!(
            shown["file"].as_str().unwrap().ends_with("b.csv") && shown["text"].as_str().unwrap().contains("ask me")
        );
    }
}
