//! `curves.svg`: the curves of a run as one picture, for a browser. Follows its dark or light mode; has no script.

use super::{Curve, Curves};
use crate::base::{Result, files};
use std::fmt::Write;
use std::path::Path;

/// Name of the file in a run directory.
pub const CURVES: &str = "curves.svg";

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 190.0;
/// Space around the axes of a panel: left, right, top, bottom.
const MARGIN: [f64; 4] = [64.0, 14.0, 30.0, 26.0];
const COLUMNS: usize = 2;
/// Points of a curve in the picture.
const POINTS: usize = 600;

/// Points of a curve in memory while a run draws it.
const MOST: usize = 4000;

/// The content of a panel: title, metrics that are drawn smoothed over their values, metrics as dots.
struct ChartPanel {
    title: &'static str,
    lines: &'static [&'static str],
    dots: &'static [&'static str],
    smooth: bool,
}

const PANELS: [ChartPanel; 10] = [
    ChartPanel {
        title: "loss",
        lines: &["loss"],
        dots: &["eval_loss"],
        smooth: true,
    },
    ChartPanel {
        title: "learning rate",
        lines: &["learning_rate"],
        dots: &[],
        smooth: false,
    },
    ChartPanel {
        title: "gradient norm",
        lines: &["grad_norm"],
        dots: &[],
        smooth: true,
    },
    ChartPanel {
        title: "peak memory (GiB)",
        lines: &["peak_memory_bytes"],
        dots: &[],
        smooth: false,
    },
    ChartPanel {
        title: "tokens per second",
        lines: &["tokens_per_second"],
        dots: &[],
        smooth: true,
    },
    ChartPanel {
        title: "exact answers",
        lines: &[],
        dots: &["eval_accuracy"],
        smooth: false,
    },
    ChartPanel {
        title: "reward",
        lines: &["reward"],
        dots: &["eval_reward"],
        smooth: true,
    },
    ChartPanel {
        title: "KL divergence",
        lines: &["kl"],
        dots: &["eval_kl"],
        smooth: true,
    },
    ChartPanel {
        title: "reward margin",
        lines: &["rewards/margins"],
        dots: &["eval_rewards/margins"],
        smooth: true,
    },
    ChartPanel {
        title: "reward accuracy",
        lines: &["rewards/accuracies"],
        dots: &["eval_rewards/accuracies"],
        smooth: true,
    },
];

const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600}.a{stroke:#999}.g{stroke:#ddd}\
.r{fill:none;stroke:#9db8dd}.l{fill:none;stroke:#1f5fae;stroke-width:1.6}.d{fill:#b3470f}.p{stroke:#b3470f;\
stroke-dasharray:5 3}.s{stroke:#ccc;stroke-dasharray:2 3}.b{fill:#fff}\
@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.a{stroke:#888}.g{stroke:#3a3a3a}.r{stroke:#3c5579}\
.l{stroke:#7db3ff}.d{fill:#ff9b5e}.p{stroke:#ff9b5e}.s{stroke:#4a4a4a}.b{fill:#161616}}";

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn label(y: f64) -> String {
    match y.abs() {
        0.0 => "0".into(),
        a if !(1e-3..1e5).contains(&a) => format!("{y:.1e}"),
        a if a >= 100.0 => format!("{y:.0}"),
        _ => format!("{y:.3}"),
    }
}

/// The axes of a panel: from numbers to places.
struct Axes {
    steps: (f64, f64),
    values: (f64, f64),
}

impl Axes {
    fn x(&self, step: f64) -> f64 {
        let part = (step - self.steps.0) / (self.steps.1 - self.steps.0).max(1.0);
        MARGIN[0] + part * (WIDTH - MARGIN[0] - MARGIN[1])
    }

    fn y(&self, value: f64) -> f64 {
        let part = (value - self.values.0) / (self.values.1 - self.values.0);
        HEIGHT - MARGIN[3] - part * (HEIGHT - MARGIN[2] - MARGIN[3])
    }

    fn line(&self, class: &str, curve: &Curve) -> String {
        let at = |(step, y): &(u64, f64)| format!("{:.1},{:.1}", self.x(*step as f64), self.y(*y));
        let points: Vec<String> = curve.thinned(POINTS).points.iter().map(at).collect();
        format!("<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "))
    }
}

fn panel(panel: &ChartPanel, curves: &Curves, planned: Option<u64>) -> Option<String> {
    let memory = panel.lines == ["peak_memory_bytes"];
    let scaled = |name: &&str| {
        let curve = curves.get(name)?;
        let unit = if memory { (1u64 << 30) as f64 } else { 1.0 };
        Some(Curve {
            points: curve.points.iter().map(|(x, y)| (*x, y / unit)).collect(),
        })
    };
    let lines: Vec<Curve> = panel.lines.iter().filter_map(scaled).collect();
    let dots: Vec<Curve> = panel.dots.iter().filter_map(scaled).collect();
    let planned = planned
        .filter(|_| memory)
        .map(|bytes| bytes as f64 / (1u64 << 30) as f64);
    let points = || lines.iter().chain(&dots).flat_map(|c| &c.points);
    points().next()?;
    let values = || points().map(|p| p.1).chain(planned);
    let (low, high) = (
        values().fold(f64::INFINITY, f64::min),
        values().fold(f64::NEG_INFINITY, f64::max),
    );
    let low = if memory { 0.0 } else { low };
    let space = if high > low {
        0.05 * (high - low)
    } else {
        high.abs().max(1e-9) * 0.5
    };
    let axes = Axes {
        steps: (0.0, curves.steps as f64),
        // No room below 0 for what is never negative.
        values: (
            if low >= 0.0 {
                (low - space).max(0.0)
            } else {
                low - space
            },
            high + space,
        ),
    };
    let mut out = String::new();
    let _ = write!(
        out,
        "<text class=\"t\" x=\"{}\" y=\"18\">{}</text>",
        MARGIN[0],
        escaped(panel.title)
    );
    for part in [0.0, 0.5, 1.0] {
        let value = axes.values.0 + part * (axes.values.1 - axes.values.0);
        let (y, right) = (axes.y(value), WIDTH - MARGIN[1]);
        let _ = write!(
            out,
            "<line class=\"g\" x1=\"{}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text x=\"{}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            MARGIN[0],
            MARGIN[0] - 6.0,
            y + 4.0,
            label(value)
        );
        let step = (part * curves.steps as f64).round();
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{step}</text>",
            axes.x(step),
            HEIGHT - 8.0
        );
    }
    // Many switches would hide the curve.
    if curves.switches.len() <= 60 {
        for (step, block) in curves.switches.iter().skip(1) {
            let x = axes.x(*step as f64);
            let (top, bottom) = (MARGIN[2], HEIGHT - MARGIN[3]);
            let _ = write!(
                out,
                "<line class=\"s\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"><title>step {step}: {}</title>\
                 </line>",
                escaped(block)
            );
        }
    }
    if let Some(planned) = planned {
        let y = axes.y(planned);
        let _ = write!(
            out,
            "<line class=\"p\" x1=\"{}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"><title>forecast {planned:.2} GiB</title></line>",
            MARGIN[0],
            WIDTH - MARGIN[1]
        );
    }
    for curve in &lines {
        if panel.smooth && curve.points.len() > 4 {
            out.push_str(&axes.line("r", curve));
            out.push_str(&axes.line("l", &curve.smoothed()));
        } else {
            out.push_str(&axes.line("l", curve));
        }
    }
    for (step, value) in dots.iter().flat_map(|curve| &curve.points) {
        let _ = write!(
            out,
            "<circle class=\"d\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>step {step}: {value:.4}</title></circle>",
            axes.x(*step as f64),
            axes.y(*value)
        );
    }
    Some(out)
}

/// The picture of a run: one panel for each metric that it has. `planned`: forecast of the peak memory in bytes.
pub fn svg(name: &str, curves: &Curves, planned: Option<u64>) -> String {
    let panels: Vec<String> = PANELS.iter().filter_map(|p| panel(p, curves, planned)).collect();
    let rows = panels.len().div_ceil(COLUMNS);
    let (width, height) = (WIDTH * COLUMNS as f64, HEIGHT * rows as f64 + 30.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\"><title>{0}</title>\
         <style>{STYLE}</style><rect class=\"b\" width=\"100%\" height=\"100%\"/><text class=\"t\" x=\"12\" \
         y=\"20\">{0}</text>",
        escaped(name)
    );
    for (i, panel) in panels.iter().enumerate() {
        let (x, y) = ((i % COLUMNS) as f64 * WIDTH, (i / COLUMNS) as f64 * HEIGHT + 30.0);
        let _ = write!(out, "<g transform=\"translate({x},{y})\">{panel}</g>");
    }
    out.push_str("</svg>\n");
    out
}

/// Writes `curves.svg` of a run.
///
/// Errors: a file cannot be read or written.
pub fn write(run: &Path, planned: Option<u64>) -> Result<()> {
    let curves = Curves::read(run, MOST)?;
    files::write_atomic(
        &run.join(CURVES),
        svg(&run.display().to_string(), &curves, planned).as_bytes(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_becomes_a_picture_without_foreign_markup() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a<b");
        std::fs::create_dir(&run).unwrap();
        let mut text = String::from("{\"step\":0,\"eval_loss\":3.0}\n");
        for step in 1..=2000 {
            let block = if step < 1000 { "x&y" } else { "z" };
            let _ = writeln!(
                text,
                "{{\"step\":{step},\"loss\":{},\"learning_rate\":0.001,\"peak_memory_bytes\":1073741824,\
                 \"active_block\":\"{block}\"}}",
                1.0 / step as f64
            );
        }
        std::fs::write(run.join("metrics.jsonl"), text).unwrap();
        write(&run, Some(2 << 30)).unwrap();
        let picture = std::fs::read_to_string(run.join(CURVES)).unwrap();
        assert!(picture.len() < 60_000, "{} bytes", picture.len());
        assert!(picture.contains("a&lt;b") && !picture.contains("a<b"));
        for shown in [
            "loss",
            "learning rate",
            "peak memory",
            "forecast 2.00 GiB",
            "step 1000: z",
            "step 0: 3.0000",
        ] {
            assert!(picture.contains(shown), "{shown}");
        }
        assert!(!picture.contains("KL") && !picture.contains("NaN") && !picture.contains("inf"));
        assert_eq!(picture.matches("<g ").count(), 3);
    }
}
