//! End-to-end tests of preference rows: tokens as in TRL, truncation, refused rows, mismatched pairs.

use super::*;
use crate::codec::{RenderJob, RenderedChat};
use crate::testing::{Jinja, Words, files};
use crate::{BatchStream, IGNORE, RunLength, StreamSpec};
use crate::{Long, Render, Source, TrainOn};
use serde_json::Value;

const CHATML: &str = r#"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"#;

fn read(words: &Words, lines: &[&str], want: PreferencePart, max_length: usize) -> Result<Dataset> {
    read_long(words, lines, want, max_length, Long::Auto)
}

fn read_long(words: &Words, lines: &[&str], want: PreferencePart, max_length: usize, long: Long) -> Result<Dataset> {
    let files = files(&[("p.jsonl", &lines.join("\n"))]);
    let spec = DatasetSpec {
        sources: &files.sources,
        render: Render::Plain,
        max_length,
        long,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 1000,
        screen: None,
    };
    load(&spec, want, words, Some(&Jinja::new(CHATML)))
}

/// Documents of an example as text, with trained tokens in brackets.
fn shown(words: &Words, data: &Dataset, row: usize) -> Vec<String> {
    let parts = data.parts(row).unwrap().into_iter().map(|e| {
        let tokens = words.tokens(&e.ids);
        let marked = tokens
            .iter()
            .zip(&e.trained)
            .map(|(t, &trained)| if trained { format!("[{t}]") } else { t.clone() });
        marked.collect::<String>()
    });
    parts.collect()
}

#[test]
fn a_pair_becomes_two_documents_of_one_example() {
    let words = Words::chatml();
    let rows = [
        r#"{"prompt": "a b", "chosen": " c d", "rejected": " e"}"#,
        r#"{"chosen": [{"role":"user","content":"q"},{"role":"assistant","content":"yes"}], "rejected": [{"role":"user","content":"q"},{"role":"assistant","content":"no"}]}"#,
    ];
    let data = read(&words, &rows, PreferencePart::Pairs, 64).unwrap();
    assert_eq!(
        shown(&words, &data, 0),
        ["a b[ c][ d][<|im_end|>]", "a b[ e][<|im_end|>]"]
    );
    let head = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n";
    // As in TRL everything after the prompt is the answer, also the template's text after the end of the turn.
    assert_eq!(
        shown(&words, &data, 1),
        [
            format!("{head}[yes][<|im_end|>][\n]"),
            format!("{head}[no][<|im_end|>][\n]")
        ]
    );
    assert_eq!(
        data.preferences[0],
        PreferenceDocuments {
            first: 5,
            prompt: 2,
            margin: 0.0,
            label: true
        }
    );
    let batch = data.batch(&[1, 0]).unwrap();
    assert_eq!(batch.documents.len(), 5);
    assert_eq!(batch.targets.iter().filter(|&&t| t != IGNORE).count(), 3 + 3 + 3 + 2);
    let flat = data.flat().unwrap();
    assert_eq!((flat.examples.len(), flat.stats.tokens), (4, data.stats.tokens));

    let data = read(&words, &rows, PreferencePart::PairsAndPrompts, 64).unwrap();
    assert_eq!(
        shown(&words, &data, 0),
        ["a[ b][ c][ d][<|im_end|>]", "a b[ e][<|im_end|>]"]
    );
}

#[test]
fn the_prompt_ends_where_the_tokens_part_for_both_sides() {
    let words = Words::chatml();
    // "foo" + "bar" is one word: the prompt's last token is then another one.
    let rows = [r#"{"prompt": "a foo", "chosen": "bar", "rejected": " bar"}"#];
    let data = read(&words, &rows, PreferencePart::Pairs, 64).unwrap();
    assert_eq!(
        shown(&words, &data, 0),
        ["a[ foobar][<|im_end|>]", "a[ foo][ bar][<|im_end|>]"]
    );
    let rows = [r#"{"prompt": "a", "chosen": " b<|im_end|>", "rejected": " c"}"#];
    let data = read(&words, &rows, PreferencePart::Pairs, 64).unwrap();
    assert_eq!(shown(&words, &data, 0), ["a[ b][<|im_end|>]", "a[ c][<|im_end|>]"]);
}

#[test]
fn long_answers_are_cut_and_long_prompts_refused() {
    let words = Words::chatml();
    let rows = [
        r#"{"prompt": "a b", "chosen": " c d e f", "rejected": " g"}"#,
        r#"{"prompt": "a b", "chosen": " x y z", "rejected": " x y w"}"#,
    ];
    let data = read(&words, &rows, PreferencePart::Pairs, 4).unwrap();
    assert_eq!(shown(&words, &data, 0), ["a b[ c][ d]", "a b[ g][<|im_end|>]"]);
    // The sides of the second row are equal after truncation.
    let stats = &data.stats;
    assert_eq!((data.examples.len(), stats.rows, stats.dropped_rows), (1, 2, 1));
    assert_eq!((stats.truncated_rows, stats.longest_written), (2, 7));
    // A reward model reads the end of a text: rows that would be truncated are dropped.
    let e = read(&words, &rows[..1], PreferencePart::WholePairs, 4)
        .unwrap_err()
        .to_string();
    assert!(e.contains("nothing in the data") && e.contains("max_length"), "{e}");
    let long = r#"{"prompt": "a b c d e", "chosen": " f", "rejected": " g"}"#;
    let short = r#"{"prompt": "a", "chosen": " b", "rejected": " c"}"#;
    let data = read(&words, &[long, short], PreferencePart::WholePairs, 4).unwrap();
    assert_eq!((data.examples.len(), data.stats.dropped_by_truncation), (1, 1));
    let e = read(&words, &[rows[0], rows[0]], PreferencePart::Pairs, 2)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("no tokens are left for an answer") && e.contains(".jsonl:1") && e.contains("2 tokens"),
        "{e}"
    );
}

#[test]
fn a_row_whose_prompt_fills_the_length_is_left_out_with_the_long_rows() {
    use PreferencePart::{Judged, Pairs, PairsAndPrompts, WholePairs};
    let words = Words::chatml();
    let rows = [
        r#"{"prompt": "a b c d e", "chosen": " f", "rejected": " g"}"#,
        r#"{"prompt": "a", "chosen": " b", "rejected": " c"}"#,
    ];
    for want in [Pairs, PairsAndPrompts, Judged, WholePairs] {
        let data = read_long(&words, &rows, want, 4, Long::Drop).unwrap();
        let stats = &data.stats;
        let counts = (stats.rows, stats.dropped_rows, stats.long_rows, stats.long_tokens);
        assert_eq!(counts, (2, 1, 1, 14), "{want:?}");
        assert!(data.origins.iter().all(|origin| origin.number == 2), "{want:?}");
        let warnings = stats.warnings(4);
        assert!(
            warnings.len() == 1 && warnings[0].contains("1 of 2 rows are longer than max_length = 4"),
            "{warnings:?}"
        );
    }
    let e = read(&words, &rows, Judged, 4).unwrap_err().to_string();
    assert!(
        e.contains("no tokens are left for an answer") && e.contains("`Long::Drop`"),
        "{e}"
    );
}

#[test]
fn judged_answers_of_a_pair_are_rows_of_their_own() {
    let words = Words::chatml();
    // Only the chosen answer changes the last token of the prompt.
    let rows = [r#"{"prompt": "a foo", "chosen": "bar", "rejected": " bar"}"#];
    let data = read(&words, &rows, PreferencePart::Judged, 64).unwrap();
    assert_eq!([0, 1].map(|row| data.preferences[row].prompt), [1, 2]);
    assert_eq!(shown(&words, &data, 0), ["a[ foobar][<|im_end|>]"]);
    assert_eq!(shown(&words, &data, 1), ["a foo[ bar][<|im_end|>]"]);
    let paired = data.mismatched(2, 64, None).unwrap();
    assert_eq!(shown(&words, &paired, 0)[1], "a[ bar][<|im_end|>]");
    assert_eq!(shown(&words, &paired, 1)[1], "a foo[ foobar][<|im_end|>]");
    // Truncation makes the answers equal: each is still trained.
    let rows = [r#"{"prompt": "a b", "chosen": " x y z", "rejected": " x y w"}"#];
    let data = read(&words, &rows, PreferencePart::Judged, 4).unwrap();
    assert_eq!((data.examples.len(), data.stats.dropped_rows), (2, 0));
    assert_eq!(shown(&words, &data, 0), shown(&words, &data, 1));
    assert_eq!([0, 1].map(|row| data.preferences[row].label), [true, false]);
}

#[test]
fn a_set_of_one_row_has_no_mismatch() {
    let words = Words::chatml();
    let rows = [r#"{"prompt": "a", "completion": " b", "label": true}"#];
    let data = read(&words, &rows, PreferencePart::Judged, 64).unwrap();
    let e = data.mismatched(4, 64, None).unwrap_err().to_string();
    // The size of the micro-batches is right.
    assert!(
        e.contains("a set of 1") && e.contains("hint: add rows") && !e.contains("batch"),
        "{e}"
    );
}

#[test]
fn equal_sides_mixed_margins_and_foreign_rows_are_refused_with_their_line() {
    let words = Words::chatml();
    let good = r#"{"prompt": "a", "chosen": " b", "rejected": " c", "margin": 1}"#;
    for (row, want, what) in [
        (
            r#"{"prompt": "a", "chosen": " b", "rejected": " b", "margin": 1}"#,
            PreferencePart::Pairs,
            "are equal",
        ),
        (
            r#"{"prompt": "a", "chosen": " b", "rejected": " b<|im_end|>", "margin": 1}"#,
            PreferencePart::Pairs,
            "same tokens",
        ),
        (
            r#"{"prompt": "a", "chosen": " b", "rejected": " c"}"#,
            PreferencePart::WholePairs,
            "have a `margin`",
        ),
        (
            r#"{"prompt": "a", "completion": " b", "label": true}"#,
            PreferencePart::Pairs,
            "`PreferencePart::Judged`",
        ),
        (r#"{"messages": []}"#, PreferencePart::Pairs, "not a preference row"),
    ] {
        let e = read(&words, &[good, row], want, 64).unwrap_err().to_string();
        assert!(e.contains(what) && e.contains(".jsonl:2"), "{e}");
    }
}

#[test]
fn judged_rows_get_the_answer_of_the_next_row_as_mismatch() {
    let words = Words::chatml();
    let rows = [
        r#"{"prompt": "a", "completion": " b", "label": true}"#,
        r#"{"prompt": "c d", "completion": " e f", "label": false}"#,
        r#"{"prompt": "g", "chosen": " h", "rejected": " i"}"#,
    ];
    let data = read(&words, &rows, PreferencePart::Judged, 64).unwrap();
    // A pair becomes two judged answers; the rejected ones are placed after all others.
    let labels: Vec<bool> = data.preferences.iter().map(|p| p.label).collect();
    assert_eq!(labels, [true, false, true, false]);
    assert_eq!(shown(&words, &data, 3), ["g[ i][<|im_end|>]"]);

    let paired = data.clone().mismatched(2, 64, None).unwrap();
    assert_eq!(
        shown(&words, &paired, 0),
        ["a[ b][<|im_end|>]", "a[ e][ f][<|im_end|>]"]
    );
    assert_eq!(
        shown(&words, &paired, 1),
        ["c d[ e][ f][<|im_end|>]", "c d[ b][<|im_end|>]"]
    );
    let three = data.clone().mismatched(3, 64, None).unwrap();
    assert_eq!(shown(&words, &three, 0)[1], "a[ h][<|im_end|>]");
    // A single row in the last group uses the row before it.
    assert_eq!(shown(&words, &three, 3)[1], "g[ h][<|im_end|>]");
    // The mismatched pair is truncated too.
    assert_eq!(
        shown(&words, &data.clone().mismatched(2, 4, None).unwrap(), 1)[1],
        "c d[ b][<|im_end|>]"
    );
    assert_eq!(
        shown(&words, &data.clone().mismatched(2, 3, None).unwrap(), 1)[1],
        "c d[ b]"
    );
    let mixed = data.clone().mismatched(2, 64, Some(3)).unwrap();
    assert_eq!(
        mixed.fingerprint,
        data.clone().mismatched(2, 64, Some(3)).unwrap().fingerprint
    );
    assert_eq!(mixed.examples.len(), 4);
    // A micro-batch contains the rows of a group, in every epoch.
    let spec = StreamSpec {
        batch_size: 2,
        accumulation: 1,
        packing: false,
        max_length: 64,
        shuffle: true,
        seed: 3,
        length: RunLength::Epochs(8.0),
    };
    let stream = BatchStream::new(&mixed, spec).unwrap();
    assert!((0..16).all(|m| stream.rows(m) == [[0, 1], [2, 3]][m as usize % 2]));
    assert!(
        data.mismatched(1, 64, None)
            .unwrap_err()
            .to_string()
            .contains("at least two rows")
    );
}

#[test]
fn a_repeated_row_is_not_its_own_mismatch() {
    // Without repeats: the row before, and for the first one the last.
    for n in 2..6 {
        let rows: Vec<usize> = (10..10 + n).collect();
        assert!((0..n).all(|i| mismatch(&[3], &rows, i) == rows[(i + n - 1) % n]));
    }
    assert_eq!(mismatch(&[3, 5], &[7], 0), 5);
    assert_eq!([0, 1, 2].map(|i| mismatch(&[], &[4, 4, 7], i)), [7, 7, 4]);
    assert_eq!(mismatch(&[3, 5], &[5], 0), 3);
    assert_eq!(mismatch(&[3], &[5, 5], 0), 5);

    let words = Words::chatml();
    let row = |i: usize| format!("{{\"prompt\": \"p{i}\", \"completion\": \" a{i}\", \"label\": true}}\n");
    let files = files(&[("a.jsonl", &row(0)), ("b.jsonl", &[row(1), row(2), row(3)].concat())]);
    let source = |file: usize, weight: f64| Source {
        weight: Some(weight),
        ..Source::new(vec![files.paths[file].clone()])
    };
    let spec = DatasetSpec {
        sources: &[source(0, 3.0), source(1, 1.0)],
        render: Render::Plain,
        max_length: 64,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 1000,
        screen: None,
    };
    let data = load(&spec, PreferencePart::Judged, &words, Some(&Jinja::new(CHATML))).unwrap();
    // The rows of an epoch: 0, 0, 1, 0.
    let paired = data.mismatched(4, 64, None).unwrap();
    let seen: Vec<[String; 2]> = (0..4)
        .map(|row| shown(&words, &paired, row).try_into().unwrap())
        .collect();
    let answered = |prompt: &str, answer: &str| format!("{prompt}[ {answer}][<|im_end|>]");
    let first = [answered("p0", "a0"), answered("p0", "a1")];
    let other = [answered("p1", "a1"), answered("p1", "a0")];
    assert_eq!(seen, [first.clone(), first.clone(), other, first]);
}

#[test]
fn splits_keep_what_belongs_to_a_row() {
    let words = Words::chatml();
    let rows: Vec<String> = (0..10)
        .map(|i| format!(r#"{{"prompt": "p{i}", "chosen": " a", "rejected": " b c", "margin": {i}}}"#))
        .collect();
    let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
    let data = read(&words, &rows, PreferencePart::Pairs, 64).unwrap();
    let whole = data.fingerprint.clone();
    let (train, eval) = data.split(0.3, 5).unwrap();
    assert_eq!((train.preferences.len(), eval.preferences.len()), (7, 3));
    for set in [&train, &eval] {
        for (row, p) in set.preferences.iter().enumerate() {
            assert_eq!(set.origins[row].number as f32, p.margin + 1.0);
        }
    }
    // Two judged answers of a row are always in the same part.
    let judged = read(&words, &rows, PreferencePart::Judged, 64).unwrap();
    let (train, eval) = judged.split(0.7, 5).unwrap();
    assert_eq!((train.examples.len(), eval.examples.len()), (6, 14));
    assert_eq!((train.stats.rows, eval.stats.rows), (3, 7));
    assert!(eval.origins.iter().all(|o| !train.origins.contains(o)));
    assert_eq!(eval.preferences.iter().filter(|p| p.label).count(), 7);
    // Margins are part of the fingerprint.
    let other: Vec<String> = rows
        .iter()
        .map(|r| r.replace("\"margin\": 3", "\"margin\": 4"))
        .collect();
    let other: Vec<&str> = other.iter().map(String::as_str).collect();
    assert_ne!(
        read(&words, &other, PreferencePart::Pairs, 64).unwrap().fingerprint,
        whole
    );
}

/// Counts what it is asked: single renderings, requests for many, and the renderings of these.
struct Counting {
    inner: Jinja,
    asked: std::sync::Mutex<[usize; 3]>,
}

impl ChatRender for Counting {
    fn render(&self, messages: &[Value], tools: Option<&Value>, prompt: bool) -> Result<String> {
        self.asked.lock().unwrap()[0] += 1;
        self.inner.render(messages, tools, prompt)
    }

    fn render_many(&self, jobs: &[RenderJob]) -> Vec<Vec<Option<RenderedChat>>> {
        let mut asked = self.asked.lock().unwrap();
        asked[1] += 1;
        asked[2] += jobs.len();
        let text = |job: &RenderJob, (upto, prompt): &(usize, bool)| {
            let text = self.inner.render(&job.messages[..*upto], job.tools, *prompt).ok()?;
            let generation = Vec::new();
            Some(RenderedChat { text, generation })
        };
        let answers = |job: &RenderJob| job.renderings.iter().map(|rendering| text(job, rendering)).collect();
        jobs.iter().map(answers).collect()
    }
}

#[test]
fn the_renderings_of_64_rows_are_asked_for_at_once() {
    let words = Words::chatml();
    let row = |i: usize| {
        let say =
            |text: &str| format!(r#"[{{"role":"user","content":"q {i}"}},{{"role":"assistant","content":"{text}"}}]"#);
        format!(r#"{{"chosen": {}, "rejected": {}}}"#, say("yes"), say("no"))
    };
    let lines: Vec<String> = (0..200).map(row).collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let files = files(&[("p.jsonl", &lines.join("\n"))]);
    let spec = DatasetSpec {
        sources: &files.sources,
        render: Render::Plain,
        max_length: 64,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 1000,
        screen: None,
    };
    let template = Counting {
        inner: Jinja::new(CHATML),
        asked: Default::default(),
    };
    let data = load(&spec, PreferencePart::Pairs, &words, Some(&template)).unwrap();
    let plain = read(&words, &lines, PreferencePart::Pairs, 64).unwrap();
    assert_eq!(data.examples.in_memory(), plain.examples.in_memory());
    assert_eq!(data.preferences, plain.preferences);
    let [single, requests, renderings] = *template.asked.lock().unwrap();
    assert_eq!((requests, renderings), (4, 600));
    // Single requests are used to find the layout only.
    assert!(single <= 8, "{single}");
}

#[test]
fn pairs_that_differ_before_the_answer_are_left_out_and_counted() {
    let words = Words::chatml();
    let turn = |role: &str, text: &str| serde_json::json!({"role": role, "content": text});
    let talk = |question: &str, answer: &str| [turn("user", question), turn("assistant", answer)];
    let row =
        |question: &str| serde_json::json!({"chosen": talk("q", "yes"), "rejected": talk(question, "no")}).to_string();
    let (good, forked) = (row("q"), row("r"));
    let (good, forked) = (good.as_str(), forked.as_str());
    let read = |rows: &[&str]| read(&words, rows, PreferencePart::Pairs, 64);
    let data = read(&[good, forked, good]).unwrap();
    let lines: Vec<u64> = data.origins.iter().map(|origin| origin.number).collect();
    assert_eq!(lines, [1, 3]);
    let stats = &data.stats;
    assert_eq!((stats.rows, stats.dropped_rows, stats.forked_rows), (3, 1, 1));
    let warnings = stats.warnings(64);
    assert!(
        warnings.len() == 1 && warnings[0].contains("1 of 3 rows are skipped"),
        "{warnings:?}"
    );
    let e = read(&[forked]).unwrap_err().to_string();
    assert!(
        e.contains("nothing in the data would be trained") && e.contains("hint: make the messages"),
        "{e}"
    );
}
