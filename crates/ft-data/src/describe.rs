//! A description of encoded rows: rows as the model sees them with marked trained tokens, counts, lengths.

use super::codec::TextCodec;
use super::dataset::{Dataset, DatasetSpec, DatasetStats};
use super::source;
use ft_base::Result;
use ft_base::units::count;
use std::fmt::Write;

/// Marks around the trained parts; with color they are also green.
const OPEN: &str = "⟦";
const CLOSE: &str = "⟧";
const GREEN: &str = "\x1b[32m";
const PLAIN: &str = "\x1b[0m";
/// Width of the longest bar, in columns.
const BAR: usize = 40;

/// Shows the first `rows` rows, then counts, truncations and a histogram of lengths.
///
/// # Errors
/// A token that cannot be decoded.
pub fn describe(
    dataset: &Dataset,
    spec: &DatasetSpec,
    codec: &dyn TextCodec,
    rows: usize,
    color: bool,
) -> Result<String> {
    let mut out = String::new();
    for (row, example) in dataset.examples.iter().enumerate().take(rows) {
        let (example, origin) = (example?, dataset.origin(row)?);
        let file = source::file(spec.sources, origin.file);
        let at = if origin.is_line { ":" } else { ":row " };
        let trained = example.trained.iter().filter(|&&t| t).count();
        let title = format!(
            "{}{at}{}  {} tokens, {} trained",
            visible(file),
            origin.number,
            count(example.ids.len() as u64),
            count(trained as u64),
        );
        let _ = writeln!(out, "--- {title}");
        for document in dataset.documents(row) {
            let text = marked(&example.ids[document.clone()], &example.trained[document], codec, color)?;
            let _ = writeln!(out, "{text}\n");
        }
    }
    if rows > 0 {
        let _ = writeln!(out, "{OPEN}trained{CLOSE} not trained\n");
    }
    let readings = dataset.readings.iter().flat_map(|reading| reading.skipped());
    let unusable = readings.map(|(_, rows)| rows).sum();
    out.push_str(&counts(&dataset.stats, unusable));
    out.push_str(&histogram(dataset.lengths().iter().map(|n| *n as usize)));
    for warning in dataset.stats.warnings(spec.max_length) {
        let _ = writeln!(out, "warning: {warning}");
    }
    Ok(out)
}

/// The row's text with marks around runs of trained tokens.
fn marked(ids: &[u32], trained: &[bool], codec: &dyn TextCodec, color: bool) -> Result<String> {
    let mut out = String::new();
    let mut start = 0;
    while start < ids.len() {
        let run = trained[start..].iter().take_while(|&&t| t == trained[start]).count();
        let text = visible(&codec.decode(&ids[start..start + run])?);
        match (trained[start], color) {
            (false, _) => out.push_str(&text),
            (true, false) => out.extend([OPEN, &text, CLOSE]),
            (true, true) => out.extend([GREEN, OPEN, &text, CLOSE, PLAIN]),
        }
        start += run;
    }
    Ok(out)
}

/// Escapes control characters, so that the data cannot control the terminal; keeps line breaks and tabs.
pub fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

/// `unusable`: rows that could not be read as their format, which are not in `stats`.
fn counts(stats: &DatasetStats, unusable: usize) -> String {
    let share = 100.0 * stats.trained_tokens as f64 / (stats.tokens as f64).max(1.0);
    let kept = stats.rows - stats.dropped_rows;
    let lines = [
        ("rows", count((stats.rows + unusable) as u64)),
        ("rows used", count(kept as u64)),
        ("tokens", count(stats.tokens)),
        (
            "trained tokens",
            format!("{} ({share:.1} %)", count(stats.trained_tokens)),
        ),
        (
            "shortest, longest",
            format!("{}, {}", count(stats.shortest as u64), count(stats.longest as u64)),
        ),
        ("rows split", count(stats.split_rows as u64)),
        ("pieces of them", count(stats.pieces as u64)),
        ("rows truncated", count(stats.truncated_rows as u64)),
        ("tokens truncated", count(stats.truncated_tokens)),
        ("rows skipped", count((stats.dropped_rows + unusable) as u64)),
    ];
    // Splitting is the exception: without it the lines are left out.
    let shown =
        |(name, _): &&(&str, String)| stats.split_rows > 0 || !name.ends_with(" split") && *name != "pieces of them";
    lines
        .iter()
        .filter(shown)
        .map(|(name, value)| format!("{name:<18} {value}\n"))
        .collect()
}

/// Histogram of row lengths; the upper limit doubles from bin to bin.
pub(super) fn histogram(lengths: impl Iterator<Item = usize>) -> String {
    let mut bins: Vec<usize> = Vec::new();
    for length in lengths {
        let bin = length.max(1).next_power_of_two().trailing_zeros() as usize;
        bins.resize(bins.len().max(bin + 1), 0);
        bins[bin] += 1;
    }
    let most = bins.iter().copied().max().unwrap_or(0).max(1);
    let mut out = String::from("tokens per row\n");
    let first = bins.iter().position(|&n| n > 0).unwrap_or(0);
    for (bin, &n) in bins.iter().enumerate().skip(first) {
        let bar = "#".repeat((n * BAR).div_ceil(most));
        let _ = writeln!(out, "  up to {:>7} {:>9} {bar}", count(1 << bin), count(n as u64));
    }
    out
}
