//! Text layout for a terminal: columns, wrapping, escaping of control characters.

use unicode_width::UnicodeWidthChar;

/// A narrower terminal is treated as one of this width.
pub const NARROWEST: usize = 24;

/// Number of columns of `text`; color codes have none.
pub fn columns(text: &str) -> usize {
    let mut rest = text;
    let mut n = 0;
    while let Some(c) = rest.chars().next() {
        if let Some(code) = color_code(rest) {
            rest = &rest[code..];
            continue;
        }
        n += c.width().unwrap_or(0);
        rest = &rest[c.len_utf8()..];
    }
    n
}

/// Length in bytes of the color code at the start of `text`: `ESC [ 0-9 ; m`.
fn color_code(text: &str) -> Option<usize> {
    let inner = text.strip_prefix("\x1b[")?;
    let end = inner.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    inner[end..].starts_with('m').then_some(end + 3)
}

/// Escapes control characters and characters that change the text direction, in the form `\u{1b}`, because a terminal
/// would execute them. Newlines and tabs stay.
pub fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    text.chars().for_each(|c| push_visible(&mut out, c));
    out
}

/// As `visible`, but color codes stay: for lines that ft colors, in which text of a file is escaped already.
pub fn visible_but_colors(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let taken = match color_code(rest) {
            Some(code) => {
                out.push_str(&rest[..code]);
                code
            }
            None => {
                push_visible(&mut out, c);
                c.len_utf8()
            }
        };
        rest = &rest[taken..];
    }
    out
}

fn push_visible(out: &mut String, c: char) {
    let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    match c {
        '\n' | '\t' => out.push(c),
        c if c.is_control() || turns => out.extend(c.escape_unicode()),
        c => out.push(c),
    }
}

/// Replaces the symbols that ft prints by ASCII; letters stay.
pub fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        out.push_str(match c {
            '×' => "x",
            '…' => "...",
            '—' | '–' => "-",
            '→' => "->",
            '≤' => "<=",
            '≥' => ">=",
            '·' => "*",
            '▼' => "v",
            '▲' => "^",
            '⟦' => "[[",
            '⟧' => "]]",
            '│' => "|",
            '┌' | '┐' | '└' | '┘' => "+",
            '\u{2500}'..='\u{257f}' => "-",
            '\u{2580}'..='\u{259f}' => "#",
            c => {
                out.push(c);
                continue;
            }
        });
    }
    out
}

/// Breaks text into lines of at most `width` columns: at spaces, and within a word only if `hard`. Continuation lines
/// have the indentation of their line plus `hang`.
pub fn wrapped(text: &str, width: usize, hang: usize, hard: bool) -> Vec<String> {
    let width = width.max(NARROWEST / 3);
    text.lines()
        .flat_map(|line| wrapped_line(line, width, hang, hard))
        .collect()
}

fn wrapped_line(line: &str, width: usize, hang: usize, hard: bool) -> Vec<String> {
    let line = line.trim_end();
    if columns(line) <= width {
        return vec![line.to_string()];
    }
    let own = line.len() - line.trim_start_matches(' ').len();
    let indent = " ".repeat((own + hang).min(width / 2));
    let mut out = Vec::new();
    let mut now = " ".repeat(own.min(width / 2));
    let mut empty = true;
    // Each word with the spaces before it: spaces within a line stay.
    let mut rest = line[own..].trim_end();
    while !rest.is_empty() {
        let spaces = rest.len() - rest.trim_start_matches(' ').len();
        let word_end = rest[spaces..].find(' ').map_or(rest.len(), |at| spaces + at);
        let (gap, mut word) = (&rest[..spaces], &rest[spaces..word_end]);
        rest = &rest[word_end..];
        if !empty && columns(&now) + gap.len() + columns(word) > width {
            out.push(std::mem::replace(&mut now, indent.clone()));
            empty = true;
        }
        if !empty {
            now.push_str(gap);
        }
        while hard && columns(&now) + columns(word) > width {
            let at = fitting(word, width - columns(&now));
            now.push_str(&word[..at]);
            word = &word[at..];
            out.push(std::mem::replace(&mut now, indent.clone()));
        }
        now.push_str(word);
        empty = false;
    }
    out.push(now);
    out
}

/// Length in bytes of the longest start of `text` that fits in `width` columns, at least one character.
fn fitting(text: &str, width: usize) -> usize {
    let mut used = 0;
    for (at, c) in text.char_indices() {
        used += c.width().unwrap_or(0);
        if used > width && at > 0 {
            return at;
        }
    }
    text.len()
}

/// A row with its note: in a separate column, or below it if the terminal is too narrow.
pub fn with_note(row: String, note: &str, width: Option<usize>) -> String {
    /// A narrower column is hard to read.
    const LEAST: usize = 22;
    let used = columns(&row);
    let fits = width.is_none_or(|all| used + columns(note) <= all);
    let all = width.unwrap_or(usize::MAX);
    let lines = match all.saturating_sub(used) {
        _ if fits => vec![format!("{row}{note}")],
        room if room >= LEAST => {
            let mut parts = wrapped(note, room, 0, false).into_iter();
            let first = format!("{row}{}", parts.next().unwrap_or_default());
            let indent = " ".repeat(used);
            std::iter::once(first)
                .chain(parts.map(|part| format!("{indent}{part}")))
                .collect()
        }
        _ => {
            let below = wrapped(note, all.saturating_sub(6), 0, false);
            std::iter::once(row)
                .chain(below.into_iter().map(|part| format!("      {part}")))
                .collect()
        }
    };
    let ended = |line: String| format!("{}\n", line.trim_end());
    lines.into_iter().map(ended).collect()
}

/// Cuts one line to at most `width` columns.
pub fn clipped(text: &str, width: usize) -> String {
    if columns(text) <= width {
        text.to_string()
    } else {
        text[..fitting(text, width)].to_string()
    }
}

/// Selects the parts that fit in `width` columns side by side. Each part has its text, its reserved columns, and a
/// rank: the highest rank is dropped first, rank 0 always stays.
pub fn fit(parts: &[(String, usize, u8)], width: usize) -> Vec<String> {
    let mut kept: Vec<&(String, usize, u8)> = parts.iter().filter(|p| !p.0.is_empty()).collect();
    let size = |p: &(String, usize, u8)| p.1.max(columns(&p.0)) + 2;
    while kept.iter().map(|p| size(p)).sum::<usize>() > width + 2 {
        let Some(last) = kept.iter().map(|p| p.2).max().filter(|rank| *rank > 0) else {
            break;
        };
        kept.retain(|p| p.2 != last);
    }
    kept.into_iter().map(|p| p.0.clone()).collect()
}

/// Puts names and values in a box of at most `width` columns; a narrow terminal gets the lines without the box.
pub fn boxed(lines: &[(&str, String)], unicode: bool, width: Option<usize>) -> Vec<String> {
    let names = lines.iter().map(|(n, _)| columns(n)).max().unwrap_or(0);
    let frame = match width {
        Some(width) if width < names + 30 => 0,
        _ => 4,
    };
    let room = width.map_or(usize::MAX, |w| w.max(NARROWEST).saturating_sub(names + 2 + frame));
    let mut rows = Vec::new();
    for (name, value) in lines {
        for (i, part) in wrapped(value, room.max(NARROWEST / 2), 0, true).into_iter().enumerate() {
            let name = if i == 0 { name } else { "" };
            rows.push(format!("{name:<names$}  {}", part.trim_start()).trim_end().to_string());
        }
    }
    if frame == 0 {
        return rows;
    }
    let inner = rows.iter().map(|r| columns(r)).max().unwrap_or(0);
    let [tl, tr, bl, br, h, v] = if unicode {
        ["┌", "┐", "└", "┘", "─", "│"]
    } else {
        ["+", "+", "+", "+", "-", "|"]
    };
    let mut out = vec![format!("{tl}{}{tr}", h.repeat(inner + 2))];
    let pad = |r: &String| " ".repeat(inner - columns(r));
    out.extend(rows.iter().map(|r| format!("{v} {r}{} {v}", pad(r))));
    out.push(format!("{bl}{}{br}", h.repeat(inner + 2)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row W6.
    #[test]
    fn nothing_from_a_file_acts_on_the_terminal() {
        let evil = "a\x1b]0;title\x07b\u{9b}2Jc\u{202e}d\r\n\te\x1b[31mf";
        let clean = visible(evil);
        assert!(!clean.contains(['\x1b', '\x07', '\u{9b}', '\u{202e}', '\r']), "{clean}");
        assert_eq!(
            visible_but_colors("\x1b[1;31mx\x1b[0m\x1b[2J"),
            "\x1b[1;31mx\x1b[0m\\u{1b}[2J"
        );
        assert_eq!(visible("ä 中\n"), "ä 中\n");
    }

    #[test]
    fn lines_break_at_spaces_and_hang() {
        let lines = wrapped("  found a very long list of words, expected another one", 30, 2, false);
        assert_eq!(
            lines,
            ["  found a very long list of", "    words, expected another", "    one"]
        );
        assert_eq!(wrapped("name    value  more", 40, 2, false), ["name    value  more"]);
        let path = format!("at {}", "x".repeat(40));
        assert_eq!(wrapped(&path, 30, 2, false).len(), 2, "a path is left whole");
        assert!(wrapped(&path, 30, 2, true).iter().all(|l| columns(l) <= 30));
        assert!(
            wrapped(&"中文".repeat(20), 30, 0, true)
                .iter()
                .all(|l| columns(l) <= 30)
        );
        assert_eq!(wrapped("a\n\nb", 30, 2, false), ["a", "", "b"]);
    }

    #[test]
    fn the_box_is_straight_at_every_width() {
        let lines = [
            (
                "model",
                "größe 中文 and a text of many words that does not fit on one line".to_string(),
            ),
            ("output", format!("runs/{}", "x".repeat(60))),
        ];
        for width in [20, 40, 60, 80, 200] {
            for unicode in [true, false] {
                let rows = boxed(&lines, unicode, Some(width));
                let widest = rows.iter().map(|r| columns(r)).max().unwrap();
                assert!(widest <= width.max(NARROWEST), "{width}: {rows:#?}");
                assert!(unicode || rows.concat().replace(['ö', 'ß', '中', '文'], "").is_ascii());
                if width >= 40 {
                    assert!(rows.iter().all(|r| columns(r) == widest), "{rows:#?}");
                }
            }
        }
        assert_eq!(
            boxed(&[("a", "b".into())], false, None),
            ["+------+", "| a  b |", "+------+"]
        );
    }

    #[test]
    fn the_least_important_parts_go_first() {
        let part = |text: &str, rank| (text.to_string(), 0, rank);
        let parts = [
            part("step 1/9", 0),
            part("loss 1.0", 0),
            part("grad 1.0", 2),
            part("eta 1s", 1),
        ];
        assert_eq!(fit(&parts, 80).len(), 4);
        assert_eq!(fit(&parts, 34), ["step 1/9", "loss 1.0", "eta 1s"]);
        assert_eq!(fit(&parts, 3), ["step 1/9", "loss 1.0"]);
    }

    #[test]
    fn symbols_have_an_ascii_form() {
        let text = ascii("8 × 40 … ⟦a⟧ ▼ ━╸ █ 中 ä");
        assert_eq!(text, "8 x 40 ... [[a]] v -- # 中 ä");
    }
}
