//! Tests of the rows that are dropped: duplicates, rows of evaluation files, votes of judges.

use super::judges::Judges;
use super::waiting::WaitingRow;
use super::*;
use crate::dataset::RowOrigin;
use crate::layout::RowPurpose;
use crate::preference::{self, PreferencePart};
use crate::prompts::{PromptLimits, PromptSpec, Prompts};
use crate::testing::{Files, Words, files, layout, row};
use crate::{ChatRender, Dataset, DatasetSpec, Encoder, Long, Render, RowFormat, TrainOn};
use serde_json::json;
use std::sync::Arc;

fn screen(spec: ScreenSpec) -> Screen {
    Screen::new(spec).unwrap().unwrap()
}

fn dedup(dedup: Dedup) -> Screen {
    screen(ScreenSpec {
        dedup,
        ..ScreenSpec::default()
    })
}

fn spec<'a>(files: &'a Files, screen: Option<&'a Screen>) -> DatasetSpec<'a> {
    DatasetSpec {
        sources: &files.sources,
        render: Render::Plain,
        max_length: 1000,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 100_000,
        screen,
    }
}

fn lines(data: &Dataset) -> Vec<u64> {
    data.origins.iter().map(|o| o.number).collect()
}

fn load(files: &Files, screen: &Screen) -> Dataset {
    Dataset::load(&spec(files, Some(screen)), &Words::chatml(), None::<&dyn ChatRender>).unwrap()
}

/// A text of `n` words from a counter, so that two texts share words only if they share numbers.
fn text(first: usize, n: usize) -> String {
    (first..first + n)
        .map(|i| format!("word{i}"))
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn exact_duplicates_are_dropped_in_all_formats_and_across_files() {
    let f = files(&[
        (
            "a.jsonl",
            "{\"prompt\": \"q\", \"completion\": \"a\"}\n{\"prompt\": \"q\", \"completion\": \"b\"}\n\
             {\"prompt\": \"q\", \"completion\": \"a\", \"id\": 3}\n",
        ),
        (
            "b.jsonl",
            "{\"question\": \"q\", \"answer\": \"b\"}\n{\"question\": \"q\", \"answer\": \"c\"}\n",
        ),
    ]);
    let screen = dedup(Dedup::Exact);
    let data = load(&f, &screen);
    let kept: Vec<_> = data.origins.iter().map(|o| (o.file, o.number)).collect();
    assert_eq!(kept, [(0, 1), (0, 2), (1, 2)]);
    let report = screen.report();
    assert_eq!((report.rows, report.counts()), (5, [0, 0, 2, 0]));
    let line = report.lines().remove(0);
    assert!(line.starts_with("dropped 2 of 5 rows: exact duplicates"), "{line}");
    assert!(line.contains("a.jsonl:3 is ") && line.contains("a.jsonl:1"), "{line}");
    // The questions of the kept rows are read from the files without the screen.
    let all = data
        .questions(&spec(&f, Some(&screen)), &Words::chatml(), None, 10)
        .unwrap();
    assert_eq!(all.len(), 3);
}

#[test]
fn near_duplicates_are_dropped_above_the_threshold() {
    let words: Vec<String> = (0..100).map(|i| format!("w{i}")).collect();
    let mut other = words.clone();
    // One of 100 words changes 5 of 96 sequences: similarity 91 / 101 = 0.90.
    other[50] = "changed".into();
    let near = other.join(" ").to_uppercase();
    for i in [20, 35, 65, 80] {
        other[i] = format!("x{i}");
    }
    // 25 of 96: similarity 71 / 121 = 0.59.
    let far = other.join(" ");
    let rows: Vec<String> = [&words.join(" "), &near, &far, &words.join(",  ")]
        .iter()
        .map(|t| json!({ "text": t }).to_string() + "\n")
        .collect();
    let f = files(&[("a.jsonl", &rows.concat())]);
    let screen = dedup(Dedup::Near);
    assert_eq!(lines(&load(&f, &screen)), [1, 3]);
    let report = screen.report();
    assert_eq!(report.counts(), [0, 0, 0, 2]);
    let DropReason::Near(first, similarity) = &report.dropped[0].reason else {
        panic!()
    };
    assert!(first.number == 1 && (similarity - 0.90).abs() < 0.1, "{similarity}");
    // Exact duplicates only: the words are compared as written.
    assert_eq!(lines(&load(&f, &dedup(Dedup::Exact))), [1, 2, 3, 4]);
}

#[test]
fn near_duplicates_that_train_other_answers_are_kept() {
    let answer = |n: usize| (0..30).map(|i| format!("w{n}{i} ")).collect::<String>();
    let turn = |n: usize, weight: i32| json!({"role": "assistant", "content": answer(n), "weight": weight});
    let of = |first: i32, second: i32| {
        let question = json!({"role": "user", "content": "q"});
        let row = row(json!({"messages": [question, turn(1, first), question, turn(2, second)]}));
        let layout = layout(&row, RowFormat::Auto, RowPurpose::Learn).unwrap();
        Signature::of(&parts::of(&row, &layout))
    };
    let mut seen = Signatures::default();
    seen.push(&of(1, 0));
    assert!(seen.find(&of(1, 0), 0.8).is_some());
    assert!(seen.find(&of(0, 1), 0.8).is_none());
}

/// The estimate has the announced error, and the bands find the pairs.
#[test]
fn the_similarity_is_estimated() {
    let of = |text: &str| {
        let row = row(json!({ "text": text }));
        let layout = layout(&row, RowFormat::Auto, RowPurpose::Learn).unwrap();
        Signature::of(&parts::of(&row, &layout))
    };
    let (mut sum, mut found, n) = (0.0, 0, 50);
    for i in 0..n {
        // 400 and 400 sequences, 356 in common: 356 / 444 = 0.802.
        let (a, b) = (text(10_000 * i, 404), text(10_000 * i + 44, 404));
        let mut signatures = Signatures::default();
        signatures.push(&of(&a));
        if let Some((_, similarity)) = signatures.find(&of(&b), 0.0) {
            sum += similarity;
            found += 1;
        }
    }
    assert!(found >= n - 1, "{found}");
    assert!((sum / found as f64 - 0.802).abs() < 0.02, "{}", sum / found as f64);
}

#[test]
fn pairs_labels_and_prompts_are_compared_by_their_roles() {
    let (a, b) = (text(0, 30), text(100, 30));
    let pair = |chosen: &str, rejected: &str| {
        json!({"prompt": text(200, 9), "chosen": chosen, "rejected": rejected}).to_string() + "\n"
    };
    let f = files(&[("p.jsonl", &[pair(&a, &b), pair(&b, &a), pair(&a, &b)].concat())]);
    for kind in [Dedup::Exact, Dedup::Near] {
        let screen = dedup(kind);
        let spec = spec(&f, Some(&screen));
        let data = preference::load(&spec, PreferencePart::Pairs, &Words::chatml(), None).unwrap();
        assert_eq!(lines(&data), [1, 2], "swapped sides are another preference");
    }
    let judged = |label: bool| json!({"prompt": "q", "completion": a, "label": label}).to_string() + "\n";
    let f = files(&[("j.jsonl", &[judged(true), judged(false), judged(true)].concat())]);
    let screen = dedup(Dedup::Near);
    let data = preference::load(&spec(&f, Some(&screen)), PreferencePart::Judged, &Words::chatml(), None).unwrap();
    assert_eq!(lines(&data), [1, 2]);
    let ask = |prompt: &str| json!({"prompt": prompt, "answer": "4"}).to_string() + "\n";
    let f = files(&[("q.jsonl", &[ask("2+2?"), ask("3+1?"), ask("2+2?")].concat())]);
    let screen = dedup(Dedup::Exact);
    let codec = Words::chatml();
    let encoder: Encoder = spec(&f, None).encoder(&codec, None);
    let limits = PromptLimits {
        window: 100,
        answer: 1,
        long: Long::Auto,
    };
    let prompts = Prompts::load(&PromptSpec {
        sources: &f.sources,
        render: Render::Plain,
        encoder: &encoder,
        answer: "answer",
        limits,
        screen: Some(&screen),
    })
    .unwrap();
    let kept: Vec<u64> = prompts.rows.iter().map(|p| p.place.number).collect();
    assert_eq!(kept, [1, 2]);
}

#[test]
fn rows_of_the_evaluation_file_are_dropped() {
    let system = text(900, 20);
    let eval: String = (0..12)
        .map(|i| {
            let question = format!(
                "Read this carefully and then answer with one letter only please my friend: {}",
                text(50 * i, 13)
            );
            json!({"messages": [{"role": "system", "content": system}, {"role": "user", "content": question},
                                {"role": "assistant", "content": "B"}]})
            .to_string()
                + "\n"
        })
        .collect();
    let f = files(&[("eval.jsonl", &eval)]);
    let rows = [
        // 12 shared words, 13 shared words with other punctuation, the instruction alone, the system text alone.
        json!({"prompt": text(50, 12), "completion": "x"}),
        json!({"prompt": format!("So: {}!", text(50, 13).replace(' ', ", ").to_uppercase()), "completion": "x"}),
        json!({"prompt": "Read this carefully and then answer with one letter only please my friend: and more", "completion": "x"}),
        json!({"prompt": system, "completion": "x"}),
    ];
    let train: String = rows.iter().map(|r| r.to_string() + "\n").collect();
    let g = files(&[("train.jsonl", &train)]);
    let screen = screen(ScreenSpec {
        evaluation: f.paths.clone(),
        ..ScreenSpec::default()
    });
    assert_eq!(lines(&load(&g, &screen)), [1, 3, 4]);
    let report = screen.report();
    let DropReason::Evaluation { row, words } = &report.dropped[0].reason else {
        panic!()
    };
    assert_eq!(row.number, 2);
    assert_eq!(*words, text(50, 13));
    // The answers are too short.
    assert_eq!(report.evaluation_texts, (24, 12));
    assert!(
        report.warnings()[0].contains("12 of 24 texts"),
        "{:?}",
        report.warnings()
    );
}

#[test]
fn short_evaluation_texts_and_scripts_without_spaces() {
    let f = files(&[(
        "eval.csv",
        "question,answer\nHow many legs does a very old spider have?,8\n这是一个关于数学的中文问题,1\n",
    )]);
    let screen = screen(ScreenSpec {
        evaluation: f.paths.clone(),
        ..ScreenSpec::default()
    });
    let of = |text: &str| {
        let row = row(json!({ "text": text }));
        let layout = layout(&row, RowFormat::Auto, RowPurpose::Learn).unwrap();
        let origin = RowOrigin {
            file: 0,
            number: 1,
            is_line: true,
        };
        let waiting = [(row, WaitingRow(Arc::new(layout), origin))];
        screen.keep(&waiting).remove(0).unwrap()
    };
    assert!(!of("Question: how many legs does a very old spider have"));
    assert!(of("How many legs does a very young spider have?"));
    assert!(!of("问：这是一个关于数学的中文问题。"));
    assert!(of("这是另一个关于数学的中文"));
    let e = Screen::new(ScreenSpec {
        evaluation: vec!["no.jsonl".into()],
        ..ScreenSpec::default()
    });
    assert!(e.unwrap_err().to_string().contains("no.jsonl"));
}

fn voted(rows: &[Value], min_agreement: f64) -> (Vec<u64>, ScreenCounts) {
    let text: String = rows.iter().map(|r| r.to_string() + "\n").collect();
    let f = files(&[("p.jsonl", &text)]);
    let screen = screen(ScreenSpec {
        judges: Some(Judges {
            columns: vec!["j1".into(), "j2".into(), "j3".into()],
            min_agreement,
        }),
        ..ScreenSpec::default()
    });
    let data = preference::load(&spec(&f, Some(&screen)), PreferencePart::Pairs, &Words::chatml(), None).unwrap();
    assert!(data.readings[0].unused().is_empty());
    assert!(data.readings[0].describe("not used").contains("votes from j1, j2, j3"));
    (lines(&data), screen.report())
}

#[test]
fn pairs_on_which_judges_disagree_are_dropped() {
    let pair = |a: Value, b: Value, c: Value| json!({"prompt": "q", "chosen": "x", "rejected": "y", "j1": a, "j2": b, "j3": c});
    let rows = [
        pair(json!("chosen"), json!("chosen"), json!("chosen")),
        pair(json!(true), json!(1), json!("rejected")),
        // All agree, against the row.
        pair(json!("rejected"), json!(0), json!(false)),
        // Scores; a tie counts half; no vote.
        pair(json!({"chosen": 8, "rejected": 3}), json!("tie"), json!(null)),
    ];
    let (kept, report) = voted(&rows, 0.6);
    assert_eq!(kept, [1, 2, 4]);
    assert_eq!(report.counts(), [1, 0, 0, 0]);
    assert_eq!(report.dropped[0].reason, DropReason::Judges(0.0));
    let (kept, _) = voted(&rows, 0.7);
    assert_eq!(kept, [1, 4]);
    let agreement = report.agreement.unwrap();
    assert_eq!((agreement.rows, agreement.voted, agreement.unanimous), (4, 4, 2));
    assert!((agreement.share - (1.0 + 2.0 / 3.0 + 0.0 + 0.75) / 4.0).abs() < 1e-12);
}

#[test]
fn a_vote_is_the_same_number_in_a_column_of_fractions() {
    let judges = Judges {
        columns: vec!["a".into(), "b".into()],
        min_agreement: 0.5,
    };
    let votes = |row: Value| judges.votes(&crate::testing::row(row)).unwrap();
    let judged = |label: bool, a: &Value, b: &Value| {
        votes(json!({"prompt": "q", "completion": "x", "label": label, "a": a, "b": b})).share
    };
    for (a, b) in [
        (json!(1), json!(1)),
        (json!(1.0), json!(1.0)),
        (json!(1), json!(1.0)),
        (json!("1.0"), json!(true)),
    ] {
        assert_eq!(judged(false, &a, &b), Some(0.0), "{a} {b}");
        assert_eq!(judged(true, &a, &b), Some(1.0), "{a} {b}");
    }
    assert_eq!(judged(false, &json!(0.0), &json!("0")), Some(1.0));
    for (a, b, share) in [
        (json!(4), json!(4.0), 1.0),
        (json!(4), json!("4.0"), 1.0),
        (json!(-2.5), json!("-2.50"), 1.0),
        (json!(4), json!(4.5), 0.5),
        (json!("nan"), json!("NaN"), 1.0),
        (json!(9007199254740993_u64), json!(9007199254740992_u64), 0.5),
    ] {
        let found = votes(json!({"text": "x", "a": a, "b": b}));
        assert_eq!(found.share, Some(share), "{a} {b}: {:?}", found.cast);
    }
}

/// The example of Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability", section C: four observers, missing
/// values, nominal data: 0.743.
#[test]
fn alpha_is_that_of_the_published_example() {
    let units = [
        "111.", "2232", "3333", "3333", "2222", "1234", "4444", "1121", "2222", ".555", "..11", "..3.",
    ];
    let mut vote_counts = judges::VoteCounts::default();
    for unit in units {
        let cast: Vec<String> = unit.chars().filter(|c| *c != '.').map(|c| c.to_string()).collect();
        vote_counts.add(&judges::Votes { cast, share: Some(1.0) });
    }
    let alpha = vote_counts.agreement().alpha.unwrap();
    assert!((alpha - 0.743).abs() < 5e-4, "{alpha}");
}

#[test]
fn wrong_votes_are_reported_with_their_row() {
    let f = files(&[(
        "p.jsonl",
        "{\"prompt\": \"q\", \"chosen\": \"x\", \"rejected\": \"y\", \"a\": \"left\"}\n",
    )]);
    let of = |column: &str| {
        let screen = screen(ScreenSpec {
            judges: Some(Judges {
                columns: vec![column.into()],
                min_agreement: 0.5,
            }),
            ..ScreenSpec::default()
        });
        let e = preference::load(&spec(&f, Some(&screen)), PreferencePart::Pairs, &Words::chatml(), None);
        e.unwrap_err().to_string()
    };
    let e = of("a");
    assert!(
        e.contains("`a` is not a valid vote") && e.contains("p.jsonl:1") && e.contains("\"left\""),
        "{e}"
    );
    let e = of("b");
    assert!(e.contains("the column `b` with a judge's vote is missing"), "{e}");
}

/// The result does not depend on the number of threads, nor on how many rows wait together.
#[test]
fn the_result_is_deterministic() {
    let rows: String = (0..1500)
        .map(|i| json!({ "text": text(i / 3 * 7, 20) }).to_string() + "\n")
        .collect();
    let f = files(&[("a.jsonl", &rows)]);
    let of = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let screen = dedup(Dedup::Near);
            (lines(&load(&f, &screen)), screen.report().dropped)
        })
    };
    let (one, four) = (of(1), of(4));
    assert_eq!(one, four);
    assert_eq!(one.0.len(), 500);
}

#[test]
fn texts_are_counted_while_the_rows_are_tokenized() {
    let text: String = (0..700)
        .map(|i| format!("{{\"text\": \"the row {}\"}}\n", i % 350))
        .collect();
    let files = crate::testing::files(&[("a.jsonl", &text)]);
    for dedup in [Dedup::None, Dedup::Exact] {
        let screen = Screen::with_texts(ScreenSpec {
            dedup,
            ..ScreenSpec::default()
        });
        let (screen, codec) = (screen.unwrap(), crate::testing::real());
        let plain = crate::testing::short_rows(&files);
        let spec = crate::DatasetSpec {
            screen: Some(&screen),
            ..plain.clone()
        };
        assert!(screen.texts().is_none());
        let rows = crate::Dataset::load(&spec, &codec, None).unwrap();
        assert_eq!(rows.stats.rows, if dedup == Dedup::None { 700 } else { 350 });
        // Also those of dropped rows.
        let all = stats::RowStats::read(&plain, crate::peek::RowKind::Text, "", &codec, None).unwrap();
        assert_eq!(screen.texts(), Some(all));
    }
}

/// The indices of the rows that are kept.
fn kept(screen: &Screen, rows: &[Value]) -> Vec<usize> {
    let waiting = |(i, value): (usize, &Value)| {
        let row = row(value.clone());
        let layout = layout(&row, RowFormat::Auto, RowPurpose::Learn).unwrap();
        let origin = RowOrigin {
            file: 0,
            number: i as u64 + 1,
            is_line: true,
        };
        (row, WaitingRow(Arc::new(layout), origin))
    };
    let rows: Vec<_> = rows.iter().enumerate().map(waiting).collect();
    let decided = screen.keep(&rows).into_iter().enumerate();
    decided.filter_map(|(i, kept)| kept.unwrap().then_some(i)).collect()
}

#[test]
fn rows_that_differ_in_reasoning_calls_tools_or_history_are_no_duplicates() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let talk = |answer: Value| json!({"messages": [turn("user", "q"), answer]});
    let thought = |name: &str, text: &str| talk(json!({"role": "assistant", "content": "a", name: text}));
    let call = |arguments: Value| {
        let function = json!({"name": "search", "arguments": arguments});
        talk(json!({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}))
    };
    let with = |name: &str, value: Value| {
        let mut row = talk(turn("assistant", "a"));
        row[name] = value;
        row
    };
    let earlier = |answer: &str| json!({"instruction": "q", "output": "a", "history": [["x", answer]]});
    let parts = json!([{"type": "text", "text": "a"}]);
    let weighed = |first: Value, second: Value| {
        let turn = |content: &str, weight: Value| json!({"from": "gpt", "value": content, "weight": weight});
        json!({"conversations": [{"from": "human", "value": "q"}, turn("a", first), turn("b", second)]})
    };
    for (rows, expected) in [
        (
            vec![
                weighed(json!(1), json!(0)),
                weighed(json!(0), json!(1)),
                weighed(json!(1), Value::Null),
                weighed(json!(0.0), json!(true)),
                weighed(Value::Null, Value::Null),
            ],
            vec![0, 1, 2],
        ),
        (
            vec![
                talk(turn("assistant", "a")),
                thought("reasoning_content", "x"),
                thought("reasoning_content", "y"),
                thought("thinking", "x"),
                talk(turn("assistant", "a\nx")),
                talk(json!({"role": "assistant", "content": parts})),
            ],
            vec![0, 1, 2, 4],
        ),
        (
            vec![
                call(json!({"type": "news", "n": 1})),
                call(json!({"type": "images", "n": 1})),
                call(json!({"n": 1, "type": "news", "page": null})),
                call(json!("{\"type\": \"news\", \"n\": 1}")),
                call(json!({"from": "A"})),
                call(json!({"to": "A"})),
            ],
            vec![0, 1, 4, 5],
        ),
        (
            vec![
                with("tools", json!([{"name": "f"}])),
                with("tools", json!([{"name": "g"}])),
                with("tools", json!("[{\"name\": \"f\"}]")),
            ],
            vec![0, 1],
        ),
        (
            vec![
                earlier("y"),
                earlier("z"),
                json!({"messages": [turn("user", "x"), turn("assistant", "y"), turn("user", "q"), turn("assistant", "a")]}),
            ],
            vec![0, 1],
        ),
    ] {
        assert_eq!(kept(&dedup(Dedup::Exact), &rows), expected, "{rows:?}");
    }
    // Nearly equal rows, and words of an evaluation, are found in the reasoning too.
    let thoughts = [text(0, 60), text(100, 60), text(1, 60)].map(|text| thought("reasoning", &text));
    assert_eq!(kept(&dedup(Dedup::Near), &thoughts), [0, 1]);
    let eval = files(&[("eval.jsonl", &json!({"q": text(20, 13)}).to_string())]);
    let screen = screen(ScreenSpec {
        evaluation: eval.paths.clone(),
        ..ScreenSpec::default()
    });
    assert_eq!(kept(&screen, &thoughts), [1]);
}
