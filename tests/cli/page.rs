//! `ft dash` as a reader sees it, in a browser: a run that is over, one that goes on, and those of `damaged.rs`. `.ci/run` runs
//! it where there is a Chromium (`cargo test --release --test cli -- --ignored in_a_browser`).

use super::browser::Browser;
use super::dash::Dash;
use super::{ft, text};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TABS: [&str; 6] = ["overview", "curves", "samples", "data", "memory", "events"];
/// Expressions that are true if a tab shows the two runs.
const SHOWN: [&str; 6] = [
    "[...document.querySelectorAll('#panel th')].some((th) => th.textContent === 'Trained parameters')",
    "document.querySelectorAll('#panel figure path.line').length >= 4",
    "[...document.querySelectorAll('#panel h3')].some((h) => h.textContent === 'After step 8')",
    "document.querySelectorAll('#panel pre mark').length > 3",
    "document.querySelectorAll('#panel .bar i').length > 4",
    "[...document.querySelectorAll('#panel .tag')].some((tag) => tag.textContent === 'switch')",
];
/// Text that would be markup.
const MARKUP: &str = "<img src=x onerror=alert(1)>";

/// A run that goes on until it is dropped.
struct Going(Child);

impl Going {
    /// As Ctrl-C does.
    fn stop(&mut self) {
        let id = self.0.id().to_string();
        Command::new("kill").args(["-INT", &id]).status().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The recipe of the quickstart with a few rows; `runs/done` is over, and the one that is returned goes on as `runs/<img ...>`.
fn runs(dir: &Path) -> Going {
    let copied = ft(dir, &["recipes", "copy", "quickstart", "--with-data"]);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    let rows = std::fs::read_to_string(dir.join("assets/world/train.jsonl")).unwrap();
    let few: String = rows.lines().take(8).map(|line| format!("{line}\n")).collect();
    std::fs::write(dir.join("few.jsonl"), few).unwrap();
    let prompts = format!("train.sample_prompts=[\"{MARKUP}\"]");
    let arguments = |more: &[&str]| -> Vec<String> {
        let shared = [
            "train",
            "quickstart.toml",
            "data.train=few.jsonl",
            "data.eval=few.jsonl",
            "train.predict_with_generate=false",
            "train.logging_steps=1",
            &prompts,
        ];
        shared.iter().chain(more).map(|word| word.to_string()).collect()
    };
    let command = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ft"));
        command.args(arguments(more)).current_dir(dir).stdout(Stdio::null());
        command
    };
    let done = [
        "train.max_steps=8",
        "train.save_steps=4",
        "tune.block.switch_every=3",
        "train.output_dir=runs/done",
    ];
    let over = command(&done).stderr(Stdio::piped()).output().unwrap();
    assert!(over.status.success(), "{}", text(&over.stderr));
    let name = format!("runs/{MARKUP}");
    let live = [
        "train.max_steps=100000",
        "train.save_steps=0",
        "tune.method=lora",
        // Steps that a reader can count.
        "train.gradient_accumulation_steps=4",
        &format!("train.output_dir={name}"),
    ];
    let going = Going(command(&live).stderr(Stdio::null()).spawn().unwrap());
    let metrics = dir.join(name).join("metrics.jsonl");
    let end = Instant::now() + Duration::from_secs(60);
    while std::fs::read_to_string(&metrics).map_or(0, |lines| lines.lines().count()) < 3 {
        assert!(Instant::now() < end, "no step");
        std::thread::sleep(Duration::from_millis(50));
    }
    going
}

/// A cell of the table in the overview: the row by its name, the column by that of the run.
fn cell(row: &str, run: &str) -> String {
    format!(
        "[...[...document.querySelectorAll('#panel table')][0].rows].find((r) => r.cells[0].textContent === {row:?}).cells[\
         [...document.querySelectorAll('#panel thead th')].findIndex((th) => th.textContent === {run:?})].textContent"
    )
}

/// Faults that were found, each with the tab and the width. The test prints all of them at its end.
#[derive(Default)]
struct Faults(Vec<String>);

impl Faults {
    fn add(&mut self, what: &str, found: &Value) {
        let found = found.as_array().unwrap().iter();
        self.0.extend(found.map(|fault| format!("{what}: {fault}")));
    }
}

fn focus(browser: &mut Browser) -> Value {
    browser.run("ftTest.focus()")
}

/// Every tab, light and dark, wide and narrow.
fn all_looks(browser: &mut Browser, faults: &mut Faults) {
    for (width, scheme) in [(1200, "light"), (1200, "dark"), (360, "dark"), (360, "light")] {
        browser.size(width, 900);
        browser.prefer(scheme);
        browser.until(if scheme == "dark" {
            "ftTest.light() < 0.05"
        } else {
            "ftTest.light() > 0.9"
        });
        for (tab, shown) in TABS.into_iter().zip(SHOWN) {
            let what = format!("{tab}, {scheme}, {width} pixels");
            browser.run(&format!("document.getElementById('tab-{tab}').click()"));
            browser.until(shown);
            // Also what is folded.
            browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })");
            assert!(
                browser.run("ftTest.texts()").as_u64().unwrap() > 20,
                "{what}: few texts"
            );
            faults.add(&what, &browser.run("ftTest.pale()"));
            faults.add(&what, &browser.run("ftTest.wide()"));
            faults.add(&what, &json!(browser.faults()));
            assert_eq!(browser.run("document.querySelectorAll('img').length"), 0, "{what}");
        }
    }
    // The reader's choice is stronger than the system's.
    browser.run(
        "(() => { const t = document.getElementById('theme'); t.value = 'dark'; t.dispatchEvent(new Event('change')); })()",
    );
    assert!(browser.run("ftTest.light()").as_f64().unwrap() < 0.05);
}

/// Everything that can be used is reached by Tab and can be seen then; arrow keys do what they do elsewhere.
fn keyboard(browser: &mut Browser, faults: &mut Faults) {
    let selected = "document.querySelector('[role=tab][aria-selected=true]').id";
    browser.press("Tab");
    assert_eq!(focus(browser), json!({"what": "skip", "seen": true}));
    for _ in 0..60 {
        if focus(browser)["what"] == "tab-overview" {
            break;
        }
        browser.press("Tab");
    }
    for (key, tab) in [
        ("ArrowLeft", "tab-events"),
        ("Home", "tab-overview"),
        ("End", "tab-events"),
        ("ArrowRight", "tab-overview"),
        ("ArrowRight", "tab-curves"),
    ] {
        browser.press(key);
        assert_eq!(browser.run(selected), tab, "{key}");
        assert_eq!(focus(browser), json!({"what": tab, "seen": true}), "{key}");
    }
    browser.until("document.querySelector('#panel figure path.line')");
    browser.run("document.querySelector('.chart svg').focus()");
    let at = "document.querySelector('.chart .at').textContent";
    assert_eq!(browser.run(at), "last");
    for (key, step) in [
        // The evaluation before the first step.
        ("Home", "step 0"),
        ("ArrowRight", "step 1"),
        ("ArrowRight", "step 2"),
        ("ArrowLeft", "step 1"),
    ] {
        browser.press(key);
        assert_eq!(browser.run(at), step, "{key}");
    }
    let label = browser.run("document.querySelector('.chart svg').getAttribute('aria-label')");
    assert!(label.as_str().unwrap().starts_with("Loss, step 1: "), "{label}");
    // A run is taken out and put back by the space bar.
    browser.run("document.getElementById('run-0').focus()");
    for left in [1, 2] {
        browser.press(" ");
        browser.until(&format!(
            "document.querySelectorAll('#panel .chart .legend')[0].querySelectorAll('.swatch').length === {left}"
        ));
        assert_eq!(focus(browser)["what"], "run-0");
    }
    for tab in TABS {
        browser.run(&format!("document.getElementById('tab-{tab}').focus()"));
        browser.run(&format!("document.getElementById('tab-{tab}').click()"));
        browser.run("document.querySelector('.skip').focus()");
        for _ in 0..80 {
            browser.press("Tab");
            let at = focus(browser);
            if at.is_null() {
                break;
            }
            if at["seen"] != true {
                faults.add(&format!("{tab}: the focus cannot be seen"), &json!([at["what"]]));
            }
        }
        let unreached = browser.run("ftTest.unreached()");
        faults.add(&format!("{tab}: not reached by Tab"), &unreached);
    }
}

#[test]
#[ignore = "needs Chromium: .ci/run"]
fn the_page_works_in_a_browser() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut going = runs(dir);
    let mut dash = Dash::start(dir);
    let mut browser = Browser::start(dir);
    browser.size(1200, 900);
    browser.prefer("light");
    browser.open(&dash.url());
    browser.until("document.getElementById('state').textContent === 'live'");
    browser.run(include_str!("page.js"));

    // A run that goes on changes the page, which is not loaded again.
    let steps = |browser: &mut Browser| {
        let seen = browser.run(&format!("parseInt({})", cell("Progress", MARKUP)));
        seen.as_u64().unwrap()
    };
    let first = steps(&mut browser);
    browser.until(&format!("parseInt({}) > {}", cell("Progress", MARKUP), first + 2));
    assert_eq!(browser.run(&cell("State", MARKUP)), "running");
    assert_eq!(browser.run(&cell("State", "done")), "done");
    browser.run("document.getElementById('tab-curves').click()");
    let line = "[...document.querySelectorAll('#panel figure')].find((f) => f.querySelector('h3').textContent === 'Loss')\
                .querySelectorAll('path.line')[0].getAttribute('d')";
    browser.until(line);
    browser.run(&format!("window.ftBefore = {line}"));
    browser.until(&format!("{line} !== ftBefore && {line}.length > 100"));
    // Then its end.
    browser.run("document.getElementById('tab-overview').click()");
    going.stop();
    browser.until(&format!("{} === 'stopped'", cell("State", MARKUP)));

    let mut faults = Faults::default();
    keyboard(&mut browser, &mut faults);
    all_looks(&mut browser, &mut faults);
    for url in std::mem::take(&mut browser.asked) {
        assert!(url.starts_with(&dash.url()) || url == "data:,", "{url}");
    }
    dash.stop();
    browser.until("document.getElementById('state').textContent.startsWith('not connected')");
    // The browser says that the server is gone.
    browser.faults();

    // The copy is a file that asks for nothing.
    let copied = ft(dir, &["dash", "--out", "page"]);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    browser.asked.clear();
    let file = format!("file://{}", dir.join("page/index.html").display());
    browser.open(&file);
    browser.until("document.getElementById('state')?.textContent.startsWith('a copy, as of ')");
    browser.run(include_str!("page.js"));
    for (tab, shown) in TABS.into_iter().zip(SHOWN) {
        browser.run(&format!("document.getElementById('tab-{tab}').click()"));
        browser.until(shown);
    }
    faults.add("the copy", &json!(browser.faults()));
    assert!(faults.0.is_empty(), "{:#?}", faults.0);
    let asked = std::mem::take(&mut browser.asked);
    assert!(asked.iter().all(|url| *url == file || url == "data:,"), "{asked:?}");
    super::damaged::odd_runs_are_shown(&mut browser);
}
