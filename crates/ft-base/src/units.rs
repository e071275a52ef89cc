//! Parses and formats sizes, counts, durations, cells of tables and beginnings of texts for people.

use crate::{Error, Result};
use std::time::Duration;

const SUFFIXES: [(&str, f64); 9] = [
    ("kib", 1024.0),
    ("mib", 1024.0 * 1024.0),
    ("gib", 1024.0 * 1024.0 * 1024.0),
    ("tib", 1024.0 * 1024.0 * 1024.0 * 1024.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("b", 1.0),
];

/// Parses `24GiB`, `22.5 GB`, `1048576` to bytes.
///
/// # Errors
/// The text is not a size (`Usage`).
pub fn parse_bytes(text: &str) -> Result<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let bad = || {
        Error::usage(format!("`{text}` is not a size"))
            .expected("a number with a unit")
            .hint("write `24GiB` or `500MB`")
    };
    let (number, factor) = SUFFIXES
        .iter()
        .find_map(|(suffix, factor)| lower.strip_suffix(suffix).map(|n| (n.trim().to_string(), *factor)))
        .unwrap_or((lower.clone(), 1.0));
    let value: f64 = number.parse().map_err(|_| bad())?;
    if !value.is_finite() || value < 0.0 || value * factor > u64::MAX as f64 {
        return Err(bad());
    }
    Ok((value * factor) as u64)
}

/// Bytes with one decimal: `1.5 GiB`, `12.0 MiB`, `3.4 KiB`, `12 B`.
pub fn bytes(n: u64) -> String {
    let x = n as f64;
    match n {
        0..1024 => format!("{n} B"),
        1024..0x10_0000 => format!("{:.1} KiB", x / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", x / 1048576.0),
        _ => format!("{:.1} GiB", x / 1073741824.0),
    }
}

/// Most characters of a cell of a table.
const CELL: usize = 200;

/// A text as a cell of a table. It is cut after 200 characters, because a long one makes its whole column wide.
pub fn table_cell(text: &str) -> String {
    match text.char_indices().nth(CELL) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}

/// A learning rate: `2e-5`, `3.2e-4`, `6.67e-6`, `0`.
pub fn rate(x: f64) -> String {
    let text = format!("{x:.2e}");
    match text.split_once('e') {
        _ if x == 0.0 => "0".into(),
        Some((digits, exponent)) if digits.contains('.') => {
            format!("{}e{exponent}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text,
    }
}

/// A point in time as `2026-11-22 12:30:05 UTC`.
pub fn utc(time: std::time::SystemTime) -> String {
    let seconds = time.duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Periods of 400 years repeat; years start in March, so that the leap day is the last day of a year.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{of_month:02} {:02}:{:02}:{:02} UTC",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// `1 row`, `2 rows`, `1,234 rows`.
pub fn counted(n: usize, what: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{} {what}{plural}", count(n as u64))
}

/// `1_234_567` as `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// The first `most` characters of a text, and `...` if there are more. Control characters are replaced.
pub fn beginning(text: &str, most: usize) -> String {
    let shown = text.chars().take(most);
    let mut out: String = shown.map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(most).is_some() {
        out.push_str("...");
    }
    out
}

/// `1h 12m`, `3m 05s`, `4.2s`.
pub fn duration(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0..60 => format!("{:.1}s", d.as_secs_f64()),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        _ => format!("{}h {:02}m", s / 3600, s % 3600 / 60),
    }
}

/// As `duration`, without fractions: for a clock that is redrawn.
pub fn seconds(d: Duration) -> String {
    match d.as_secs() {
        s @ 0..60 => format!("{s}s"),
        _ => duration(d),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_short() {
        let shown = [0.0, 2e-5, 3.2e-4, 2e-5 / 3.0, 1.0, 12.5, 0.0009999].map(rate);
        assert_eq!(shown, ["0", "2e-5", "3.2e-4", "6.67e-6", "1e0", "1.25e1", "1e-3"]);
    }

    #[test]
    fn points_in_time_are_written_as_people_do() {
        let at = |s: u64| utc(std::time::UNIX_EPOCH + Duration::from_secs(s));
        // From `date -u -d @N`.
        assert_eq!(at(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(at(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(at(951_868_799), "2000-02-29 23:59:59 UTC");
        assert_eq!(at(1_709_251_199), "2024-02-29 23:59:59 UTC");
        assert_eq!(at(1_795_350_605), "2026-11-22 12:30:05 UTC");
        assert_eq!(at(4_102_444_800), "2100-01-01 00:00:00 UTC");
    }

    #[test]
    fn a_long_cell_is_cut_between_characters() {
        assert_eq!(table_cell(&"é".repeat(200)), "é".repeat(200));
        assert_eq!(table_cell(&"é".repeat(201)), format!("{}…", "é".repeat(200)));
    }

    #[test]
    fn the_beginning_of_a_text_has_no_control_characters() {
        assert_eq!(beginning("é\tb", 3), "é\u{fffd}b");
        assert_eq!(beginning("ééé\n", 3), "ééé...");
    }

    #[test]
    fn sizes_round_trip() {
        assert_eq!(parse_bytes("24GiB").unwrap(), 24 << 30);
        assert_eq!(parse_bytes(" 1.5 mb ").unwrap(), 1_500_000);
        assert_eq!(parse_bytes("4096").unwrap(), 4096);
        assert!(parse_bytes("lots").is_err());
        assert!(parse_bytes("-1GiB").is_err());
        assert_eq!(bytes(24 << 30), "24.0 GiB");
        assert_eq!(count(1234567), "1,234,567");
    }
}
