//! The page of `ft dash` with runs that no training wrote: damaged lines, numbers at the end of their range, many lines, and
//! names that would be markup. The test in `page.rs` calls it.

use super::browser::Browser;
use super::dash::Dash;
use super::{ft, text};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// Text that would be markup.
const MARKUP: &str = "<img src=x onerror=alert(1)>";
const SCRIPT: &str = "</script><script>alert(2)</script>";
const TABS: [&str; 6] = ["overview", "curves", "samples", "data", "memory", "events"];

/// Three lines have a loss: steps 1, 8 and 9.
const DAMAGED: &[u8] = b"{\"step\":1,\"loss\":4.0,\"grad_norm\":null}
{\"step\":2,\"loss\":NaN}
{\"step\":2,\"loss\":-Infinity}
{\"step\":2,\"loss\":1e999}
{\"step\":2,\"loss\":null,\"grad_norm\":2.0}
{\"step\":3,\"loss\":\"9.0\"}
{\"step\":4,\"loss\":[9.0]}
{\"step\":-5,\"loss\":9.0}
{\"step\":5.5,\"loss\":9.0}
{\"step\":\"6\",\"loss\":9.0}
{\"loss\":9.0}
[1,2]
null
7

\xff\xfe{\"step\":6,\"loss\":9.0}
{\"step\":7,\"lo{\"step\":7,\"loss\":9.0}
{\"step\":8,\"loss\":2.0,\"grad_norm\":1.0,\"active_block\":{\"a\":1}}
{\"step\":9,\"loss\":3.0}
{\"step\":10,\"loss\":9";

/// The charts of the tab: title, the points of their curves in pixels, the value in the legend, the labels of the axes.
const CHARTS: &str = "[...document.querySelectorAll('#panel figure')].map((f) => ({
    title: f.querySelector('h3').textContent,
    lines: [...f.querySelectorAll('path.line')].map((p) =>
        p.getAttribute('d').split(/[ML]/).slice(1).map((point) => point.split(' ').map(Number))),
    value: f.querySelector('.legend b').textContent,
    labels: [...f.querySelectorAll('svg text')].map((t) => t.textContent),
}))";

fn lines(count: usize, line: impl Fn(usize) -> Value) -> Vec<u8> {
    let all: String = (1..=count).map(|step| format!("{}\n", line(step))).collect();
    all.into_bytes()
}

fn write_run(dir: &Path, name: &str, metrics: &[u8]) {
    let run = dir.join("runs").join(name);
    std::fs::create_dir_all(&run).unwrap();
    std::fs::write(run.join("resolved.toml"), "[model]\npath = \"m\"  # recipe\n").unwrap();
    // No calendar has this time.
    let start = json!({"event": "start", "steps": 10_000, "time": 1e300});
    let other = json!({"event": MARKUP, "message": SCRIPT, "time": 2.0});
    std::fs::write(run.join("events.jsonl"), format!("{start}\n{other}\n")).unwrap();
    std::fs::write(run.join("metrics.jsonl"), metrics).unwrap();
}

fn click(browser: &mut Browser, tab: &str) {
    browser.run(&format!("document.getElementById('tab-{tab}').click()"));
}

/// Sets an element as a reader does.
fn set(browser: &mut Browser, element: &str, value: &str, event: &str) {
    browser.run(&format!(
        "(() => {{ const e = document.querySelector({element:?}); e.value = {value:?}; \
         e.dispatchEvent(new Event({event:?})); }})()"
    ));
}

/// Opens a copy of the page for one run, reads all its tabs and ends on its curves, without smoothing.
fn open_copy(browser: &mut Browser, dir: &Path, number: usize, name: &str) {
    let out = format!("page-{number}");
    let copied = ft(dir, &["dash", &format!("runs/{name}"), "--out", &out]);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    let url = format!("file://{}", dir.join(out).join("index.html").display());
    browser.asked.clear();
    browser.open(&url);
    browser.until(&format!(
        "location.href.startsWith({url:?}) && document.getElementById('state').textContent.startsWith('a copy, as of ')"
    ));
    for tab in TABS {
        click(browser, tab);
        let said = browser.run("document.getElementById('panel').textContent");
        let said = said.as_str().unwrap();
        assert!(said.len() > 20, "{name}, {tab}: {said}");
        for wrong in ["NaN", "Infinity", "undefined"] {
            assert!(!said.contains(wrong), "{name}, {tab}: {said}");
        }
        // The data of the copy and the three scripts of the page.
        let elements = browser.run("[document.querySelectorAll('img').length, document.scripts.length]");
        assert_eq!(elements, json!([0, 4]), "{name}, {tab}");
        assert_eq!(browser.faults(), Vec::<String>::new(), "{name}, {tab}");
    }
    let asked = std::mem::take(&mut browser.asked);
    assert!(asked.iter().all(|at| *at == url || at == "data:,"), "{asked:?}");
    click(browser, "curves");
    set(browser, "#smooth", "0", "input");
}

struct Chart {
    /// The points of the first curve in pixels: from the left, from the top. Empty: no curve is drawn.
    line: Vec<[f64; 2]>,
    value: String,
    labels: Vec<String>,
}

/// The only chart with this title.
fn chart(browser: &mut Browser, title: &str) -> Chart {
    let all = browser.run(CHARTS);
    let named: Vec<&Value> = all.as_array().unwrap().iter().filter(|c| c["title"] == title).collect();
    let [chart] = named[..] else { panic!("{title}: {all}") };
    let texts = |value: &Value| serde_json::from_value::<Vec<String>>(value.clone()).unwrap();
    // A point that is no number is not sent as one.
    let lines: Vec<Vec<[f64; 2]>> =
        serde_json::from_value(chart["lines"].clone()).unwrap_or_else(|e| panic!("{title}: {e}: {chart}"));
    Chart {
        line: lines.into_iter().next().unwrap_or_default(),
        value: chart["value"].as_str().unwrap().to_string(),
        labels: texts(&chart["labels"]),
    }
}

/// Tests that two places in pixels are the same; the page writes one decimal.
fn same(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.11
}

fn damaged_lines(browser: &mut Browser) {
    let loss = chart(browser, "Loss");
    let [[x1, y1], [x8, y8], [x9, y9]] = loss.line[..] else {
        panic!("{:?}", loss.line)
    };
    assert!(same(x8 - x1, 7.0 * (x9 - x1) / 8.0), "{:?}", loss.line);
    // Of 4, 2 and 3 the largest is at the top.
    assert!(y1 < y9 && same(y9, (y1 + y8) / 2.0), "{:?}", loss.line);
    assert_eq!(loss.value, "3.0000");
    assert!(
        ["2", "3", "4"].iter().all(|y| loss.labels.contains(&y.to_string())),
        "{:?}",
        loss.labels
    );
    let norm = chart(browser, "Gradient norm");
    assert_eq!((norm.line.len(), &*norm.value), (2, "1.0000"));
}

fn extreme_numbers(browser: &mut Browser) {
    let loss = chart(browser, "Loss");
    let ys: Vec<f64> = loss.line.iter().map(|[_, y]| *y).collect();
    let [a, b, c, d, e, f] = ys[..] else { panic!("{ys:?}") };
    assert!(same(a, c) && same(b, d) && same(e, f), "{ys:?}");
    assert!(a < b && same(e, (a + b) / 2.0), "{ys:?}");
    assert_eq!(loss.value, "0");
    for label in ["1e+300", "0", "-1e+300"] {
        assert!(loss.labels.iter().any(|l| l == label), "{label}: {:?}", loss.labels);
    }
    // The curve ends at the edge, but the values are those of the file.
    browser.run("document.querySelector('.chart svg').focus()");
    for (key, value) in [
        ("Home", "1.00e+308"),
        ("ArrowRight", "-1.00e+308"),
        ("ArrowRight", "1.80e+308"),
    ] {
        browser.press(key);
        assert_eq!(chart(browser, "Loss").value, value, "{key}");
    }
    let memory = chart(browser, "Peak memory");
    assert_eq!((memory.line.len(), &*memory.value), (6, "-5 B"));
    assert_eq!(memory.labels[0], "0 B");
    let speed = chart(browser, "Tokens per second");
    assert_eq!((speed.line.len(), &*speed.value), (6, "1.00e+308"));
    for axis in ["tokens", "time", "step"] {
        set(browser, "#panel .controls select", axis, "change");
        let line = chart(browser, "Loss").line;
        assert_eq!(line.len(), 6, "{axis}");
        // The largest number of tokens is at the right, the smallest at the left.
        let [largest, smallest, zero] = [0, 1, 5].map(|at| line[at][0]);
        assert!(axis != "tokens" || (smallest < zero && zero < largest), "{line:?}");
        assert_eq!(browser.faults(), Vec::<String>::new(), "{axis}");
    }
    // A logarithmic axis has none of these values.
    browser.run("document.querySelector('#panel .controls input[type=checkbox]').click()");
    let none = chart(browser, "Loss");
    assert_eq!((none.line.len(), &*none.value, none.labels.len()), (0, "–", 0));
    assert_eq!(chart(browser, "Tokens per second").line.len(), 6);
    click(browser, "events");
    let first = "document.querySelector('#panel tbody tr').cells[0].textContent";
    assert_eq!(browser.run(first), "–");
}

fn many_lines(browser: &mut Browser) {
    let loss = chart(browser, "Loss");
    let points = &loss.line;
    assert!((600..=1200).contains(&points.len()), "{}", points.len());
    let [first, .., last] = points[..] else { unreachable!() };
    let rising = points.windows(2).all(|pair| pair[0][0] <= pair[1][0]);
    assert!(rising && last[0] - first[0] > 300.0, "{first:?} {last:?}");
    // The single peak is still there, and in its place.
    let top = points.iter().min_by(|a, b| a[1].total_cmp(&b[1])).unwrap();
    let near = points.iter().filter(|p| p[1] < top[1] + 50.0).count();
    let place = (top[0] - first[0]) / (last[0] - first[0]);
    assert!(near == 1 && (place - 0.7).abs() < 0.005, "{near} {place}");
    click(browser, "overview");
    let cells = browser.run("[...document.querySelectorAll('#panel td')].map((td) => td.textContent)");
    assert!(
        cells.as_array().unwrap().contains(&json!("10,000 of 10,000 steps")),
        "{cells}"
    );
}

fn names_like_markup(browser: &mut Browser) {
    for title in ["Loss", MARKUP, SCRIPT, "__proto__", "constructor"] {
        assert_eq!(chart(browser, title).line.len(), 4, "{title}");
    }
    // The active block of the first step.
    browser.run("document.querySelector('.chart svg').focus()");
    browser.press("Home");
    let block = "document.querySelector('.chart .legend li:last-child').textContent";
    assert_eq!(browser.run(block), MARKUP);
    let label = browser.run("document.querySelector('#runs label').title");
    assert_eq!(label, format!("runs/{MARKUP}"));
    click(browser, "overview");
    assert_eq!(
        browser.run("document.querySelectorAll('#panel thead th')[1].textContent"),
        MARKUP
    );
    click(browser, "events");
    let texts =
        "[...[...document.querySelectorAll('#panel tbody tr')].at(-1).cells].slice(1).map((c) => c.textContent)";
    assert_eq!(browser.run(texts), json!([MARKUP, SCRIPT]));
}

/// Lines that arrive while the page is open.
fn new_lines(browser: &mut Browser) {
    let dir = tempfile::tempdir().unwrap();
    write_run(
        dir.path(),
        "live",
        &lines(2, |step| json!({"step": step, "loss": 4 - step})),
    );
    let mut dash = Dash::start(dir.path());
    browser.open(&dash.url());
    browser.until("document.getElementById('state').textContent === 'live'");
    click(browser, "curves");
    set(browser, "#smooth", "0", "input");
    assert_eq!(chart(browser, "Loss").line.len(), 2);
    let path = dir.path().join("runs/live/metrics.jsonl");
    let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
    let name = json!(MARKUP);
    let more = format!(
        "{{\"step\":-1,\"loss\":9.0}}\n{{\"step\":3,\"loss\":NaN}}\n{{\"step\":3.5,\"loss\":9.0}}\n\
         {{\"step\":3,\"loss\":null}}\n[3]\nnull\n\n{{\"step\":4,\"lo\n{{\"step\":4,\"loss\":1e308}}\n\
         {{\"step\":5,\"loss\":-1e308,{name}:1.5}}\n"
    );
    file.write_all(more.as_bytes()).unwrap();
    browser.until("document.querySelector('#panel .chart .legend b').textContent === '-1.00e+308'");
    let loss = chart(browser, "Loss");
    let ys: Vec<f64> = loss.line.iter().map(|[_, y]| *y).collect();
    let [a, b, c, d] = ys[..] else { panic!("{ys:?}") };
    assert!(same(a, b) && c < a && a < d, "{ys:?}");
    assert_eq!(chart(browser, MARKUP).value, "1.5000");
    assert_eq!(browser.run("document.querySelectorAll('img').length"), 0);
    assert_eq!(browser.faults(), Vec::<String>::new());
    dash.stop();
}

/// Every such run has its curves and its texts in the page, and no script fails.
pub(super) fn odd_runs_are_shown(browser: &mut Browser) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let losses = [1e308, -1e308, f64::MAX, f64::MIN, 5e-324, 0.0];
    let extreme = lines(losses.len(), |step| {
        let y = losses[step - 1];
        json!({"step": step, "loss": y, "grad_norm": y.abs(), "peak_memory_bytes": -5, "tokens_per_second": 1e308,
            "time": y, "trained_tokens": y})
    });
    let long = lines(
        10_000,
        |step| json!({"step": step, "loss": if step == 7003 { 9.0 } else { 2.0 + (step % 7) as f64 / 10.0 }}),
    );
    let named = lines(4, |step| {
        json!({"step": step, "loss": 3.0 / step as f64, MARKUP: step, SCRIPT: step, "__proto__": step,
            "constructor": step, "active_block": if step < 3 { MARKUP } else { "b" }})
    });
    type Check = fn(&mut Browser);
    let runs: [(&str, &[u8], Check); 4] = [
        ("damaged", DAMAGED, damaged_lines),
        ("extreme", &extreme, extreme_numbers),
        ("long", &long, many_lines),
        (MARKUP, &named, names_like_markup),
    ];
    browser.size(1200, 900);
    for (number, (name, metrics, check)) in runs.into_iter().enumerate() {
        write_run(dir, name, metrics);
        open_copy(browser, dir, number, name);
        check(browser);
        assert_eq!(browser.faults(), Vec::<String>::new(), "{name}");
    }
    new_lines(browser);
}
