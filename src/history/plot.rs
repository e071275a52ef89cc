//! Curves in a terminal, with Braille characters: 2 × 4 dots in a character.

use super::Curve;

/// Rows of characters of a plot between other output.
pub const ROWS: usize = 12;
/// Dots of a Braille character by column and row: bits of its code point above U+2800.
const DOTS: [[u8; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];

/// Terminal color of the n-th curve.
pub fn color(n: usize) -> usize {
    31 + (n + 3) % 6
}

/// `2.31` or `1.2e-5`.
fn number(y: f64) -> String {
    if y == 0.0 || (1e-3..1e5).contains(&y.abs()) {
        format!("{y:.4}")
    } else {
        format!("{y:.2e}")
    }
}

/// Draws curves over each other in `width` columns and `rows` lines without the axis, one text for a line. All have the same axes; `colors` marks the
/// n-th curve in the n-th color. An empty result: there is no point.
pub fn plot(curves: &[&Curve], width: usize, rows: usize, colors: bool) -> Vec<String> {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let (Some(first), Some(last)) = (all().map(|p| p.0).min(), all().map(|p| p.0).max()) else {
        return Vec::new();
    };
    let low = all().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let high = all().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
    let labels = [number(high), number(low)];
    let margin = labels.iter().map(String::len).max().unwrap_or(0);
    let columns = width.saturating_sub(margin + 3).max(8);
    let (dots_x, dots_y) = (columns * 2, rows * 4);
    let place = |from: f64, to: f64, dots: usize, value: f64| {
        let part = if to > from { (value - from) / (to - from) } else { 0.5 };
        (part * (dots - 1) as f64).round() as usize
    };
    // Bits and the last curve of each character.
    let mut cells = vec![(0u8, 0usize); columns * rows];
    for (n, curve) in curves.iter().enumerate() {
        let mut before: Option<(usize, usize)> = None;
        for &(step, value) in &curve.points {
            let x = place(first as f64, last as f64, dots_x, step as f64);
            let y = dots_y - 1 - place(low, high, dots_y, value);
            let (x0, y0) = before.unwrap_or((x, y));
            // A line from the point before, dot by dot.
            let length = x.abs_diff(x0).max(y.abs_diff(y0));
            for i in 0..=length {
                let between = |a: usize, b: usize| {
                    let part = if length == 0 { 1.0 } else { i as f64 / length as f64 };
                    (a as f64 + part * (b as f64 - a as f64)).round() as usize
                };
                let (x, y) = (between(x0, x), between(y0, y));
                let cell = &mut cells[y / 4 * columns + x / 2];
                *cell = (cell.0 | DOTS[x % 2][y % 4], n);
            }
            before = Some((x, y));
        }
    }
    let mut lines = Vec::new();
    for (row, cells) in cells.chunks(columns).enumerate() {
        let label = match row {
            0 => &labels[0],
            r if r + 1 == rows => &labels[1],
            _ => "",
        };
        let mut line = format!("{label:>margin$} │");
        for (bits, curve) in cells {
            let dot = char::from_u32(0x2800 + u32::from(*bits)).unwrap_or(' ');
            match (colors, bits) {
                (_, 0) => line.push(' '),
                (true, _) => line.push_str(&format!("\x1b[{}m{dot}\x1b[0m", color(*curve))),
                (false, _) => line.push(dot),
            }
        }
        lines.push(line.trim_end().to_string());
    }
    lines.push(format!("{:>margin$} └{}", "", "─".repeat(columns)));
    let steps = format!("step {first}");
    lines.push(format!(
        "{:>margin$}  {steps}{last:>1$}",
        "",
        columns - steps.len().min(columns)
    ));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_rises_from_corner_to_corner() {
        let curve = Curve {
            points: (0..100).map(|x| (x, x as f64)).collect(),
        };
        let lines = plot(&[&curve], 60, ROWS, false);
        assert_eq!(lines.len(), ROWS + 2);
        assert!(
            lines[0].starts_with("99.0000 │") && lines[0].ends_with('⠁')
                || lines[0].ends_with('⠈')
                || lines[0].ends_with('⠉'),
            "{}",
            lines[0]
        );
        assert!(
            lines[ROWS - 1].contains('⣀') || lines[ROWS - 1].contains('⡠'),
            "{}",
            lines[ROWS - 1]
        );
        assert!(lines[ROWS + 1].contains("step 0") && lines[ROWS + 1].ends_with("99"));
        assert!(lines.iter().all(|line| line.chars().count() <= 60));
        // One value has a place too, and none has no plot.
        let one = Curve { points: vec![(3, 1.5)] };
        assert!(plot(&[&one], 40, ROWS, true).iter().any(|line| line.contains("\x1b[")));
        assert!(plot(&[&Curve::default()], 40, ROWS, false).is_empty());
    }
}
