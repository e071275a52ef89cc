//! Tests from files to datasets: formats, hostile rows, counts, splits, questions, and the descriptions of rows.

use super::codec::ChatRender;
use super::dataset::{Dataset, DatasetSpec};
use super::describe::describe;
use super::layout::RowPurpose;
use super::rows::{Chat, Sample};
use super::testing::*;
use crate::{Long, Render, RowFormat, TrainOn};
use ft_base::Result;
use serde_json::{Value, json};

fn auto(value: Value) -> Result<Sample> {
    let row = row(value);
    understand(&row, RowFormat::Auto)
}

fn chat(value: Value) -> Vec<Value> {
    match auto(value).unwrap() {
        Sample::Chat(Chat { messages, .. }) => messages,
        other => panic!("not a chat: {other:?}"),
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The error contains the row's place and all `parts`.
fn refused(value: Value, parts: &[&str]) {
    let e = auto(value.clone()).expect_err(&value.to_string()).to_string();
    for part in parts.iter().chain(&["t.jsonl:3"]) {
        assert!(e.contains(part), "no {part:?} in: {e}");
    }
}

#[test]
fn formats_are_told_from_the_fields_of_the_first_row() {
    for (value, format) in [
        (json!({"messages": []}), RowFormat::Messages),
        (json!({"conversations": []}), RowFormat::Sharegpt),
        (json!({"prompt": "a", "completion": "b"}), RowFormat::PromptCompletion),
        (json!({"instruction": "a", "output": "b"}), RowFormat::Alpaca),
        (json!({"text": "a", "id": 1}), RowFormat::Text),
        (json!({"messages": null, "text": "a"}), RowFormat::Text),
    ] {
        assert_eq!(
            layout(&row(value), RowFormat::Auto, RowPurpose::Learn).unwrap().format,
            format
        );
    }
    refused(
        json!({"heading": "a", "body": "b"}),
        &[
            "fields heading, body",
            "instruction, output",
            "`Mapping::columns = { prompt = \"heading\", completion = \"body\" }`",
        ],
    );
    refused(json!({}), &["no fields"]);
    refused(
        json!({"prompt": "a", "chosen": "b", "rejected": "c"}),
        &["preference", "`sft`"],
    );
    assert!(understand(&row(json!({"prompt": "a"})), RowFormat::Prompt).is_err());
}

#[test]
fn alpaca_becomes_messages() {
    let value = json!({"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Be brief.",
        "history": [["Hi", "Hello"]]});
    let expected = [
        message("system", "Be brief."),
        message("user", "Hi"),
        message("assistant", "Hello"),
        message("user", "Add.\n1 and 2"),
        message("assistant", "3"),
    ];
    assert_eq!(chat(value), expected);
    let bare = json!({"instruction": "Add.", "input": "", "output": "3", "system": null, "history": ""});
    assert_eq!(chat(bare), [message("user", "Add."), message("assistant", "3")]);
    refused(
        json!({"instruction": "a", "output": 3}),
        &["field `output`", "a number: 3", "a string"],
    );
    refused(
        json!({"instruction": "a", "output": "b", "history": [["q"]]}),
        &["history", "pairs"],
    );
    let e = understand(&row(json!({"instruction": "a", "input": "b"})), RowFormat::Alpaca)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("`output` is missing") && e.contains("fields instruction, input"),
        "{e}"
    );
}

#[test]
fn sharegpt_becomes_messages() {
    let value = json!({"system": "S", "tools": "[{\"name\": \"clock\"}]", "conversations": [
        {"from": "human", "value": "time?"},
        {"from": "function_call", "value": "{\"name\": \"clock\", \"arguments\": {\"zone\": \"utc\"}}"},
        {"from": "observation", "value": "noon"},
        {"from": "gpt", "value": "Noon.", "weight": null},
    ]});
    let call = json!({"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "clock", "arguments": {"zone": "utc"}}}]});
    let expected = [
        message("system", "S"),
        message("user", "time?"),
        call,
        message("tool", "noon"),
        message("assistant", "Noon."),
    ];
    match auto(value).unwrap() {
        Sample::Chat(c) => {
            assert_eq!(c.messages, expected);
            // As LLaMA-Factory does: the call is wrapped too.
            let clock = json!([{"type": "function", "function": {"name": "clock"}}]);
            assert_eq!(c.tools, Some(clock));
        }
        other => panic!("{other:?}"),
    }
    // The hints for `messages` with such roles recommend this format.
    for list in ["conversations", "messages"] {
        let row = row(json!({list: [{"role": "human", "content": "a"}, {"role": "bot", "content": "b"}]}));
        match understand(&row, RowFormat::Sharegpt).unwrap() {
            Sample::Chat(c) => assert_eq!(c.messages, [message("user", "a"), message("assistant", "b")]),
            other => panic!("{other:?}"),
        }
    }
    let from = json!({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]});
    assert_eq!(chat(from), [message("user", "a"), message("assistant", "b")]);
    let roles = json!({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    assert_eq!(chat(roles), [message("user", "a"), message("assistant", "b")]);
    refused(
        json!({"conversations": [{"from": "alien", "value": "a"}]}),
        &["message 1", "alien", "human, gpt"],
    );
    refused(
        json!({"conversations": [{"from": "human", "value": null}]}),
        &["message 1", "`value`", "null"],
    );
    refused(json!({"conversations": [{"value": "a"}]}), &["message 1", "no `from`"]);
    refused(
        json!({"conversations": [{"from": "function_call", "value": "clock()"}]}),
        &["message 1", "clock()"],
    );
}

#[test]
fn messages_are_brought_to_one_form() {
    let value = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": null},
        {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": null}}}]},
        {"role": "tool", "content": "x", "tool_calls": null},
        {"role": "assistant", "content": "done"},
    ]});
    let expected = [
        message("user", "ab"),
        // As in transformers, null fields are dropped. A null inside a call stays: in this file its author wrote it.
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": null}}}]}),
        message("tool", "x"),
        message("assistant", "done"),
    ];
    assert_eq!(chat(value), expected);
    // csv has no lists: the same as JSON text.
    assert_eq!(
        chat(json!({"messages": "[{\"role\": \"user\", \"content\": \"a\"}]"})),
        [message("user", "a")]
    );
    let turn = |role: &str| format!("[{{\"role\": \"{role}\", \"content\": \"a\"}}]");
    assert_eq!(
        chat(json!({"prompt": turn("user"), "completion": turn("assistant")})),
        [message("user", "a"), message("assistant", "a")]
    );
}

#[test]
fn hostile_messages_are_refused_with_their_number() {
    let with = |m: Value| json!({"messages": [{"role": "user", "content": "a"}, m]});
    refused(
        with(json!({"role": "assistant", "content": null})),
        &["message 2", "null `content`", "tool_calls"],
    );
    refused(with(json!({"role": "assistant"})), &["message 2", "no `content`"]);
    refused(
        with(json!({"role": "user", "content": null, "tool_calls": [1]})),
        &["message 2", "role `user`"],
    );
    refused(
        with(json!({"role": "assistant", "content": 5})),
        &["message 2", "a number: 5"],
    );
    refused(
        with(json!({"role": "robot", "content": "x"})),
        &[
            "message 2",
            "unknown role",
            "`robot`",
            "`Mapping::roles = { \"robot\" = \"user\" }`",
        ],
    );
    refused(with(json!({"role": 1, "content": "x"})), &["message 2", "role"]);
    refused(
        with(json!({"speaker": "A", "say": "x"})),
        &[
            "message 2",
            "`Mapping::columns = { role = \"speaker\", content = \"say\" }`",
        ],
    );
    refused(
        with(json!({"from": "gpt", "value": "x"})),
        &["message 2", "no `role`", "`RowFormat::Sharegpt`"],
    );
    refused(with(json!("hello")), &["message 2", "a string"]);
    refused(
        with(json!({"role": "user", "content": [{"type": "image", "url": "x"}]})),
        &["message 2", "image"],
    );
    refused(
        with(json!({"role": "tool", "content": "x"})),
        &["message 2", "tool result without an earlier tool call"],
    );
    refused(
        with(json!({"role": "system", "content": "x"})),
        &["message 2", "system messages first"],
    );
    refused(json!({"messages": []}), &["empty"]);
    refused(
        json!({"messages": {"role": "user"}}),
        &["`messages`", "an object", "a list"],
    );
    refused(json!({"messages": "[{"}), &["`messages`", "not valid JSON"]);
    refused(json!({"prompt": "a", "completion": []}), &["`completion`", "is empty"]);
    refused(json!({"prompt": "a", "completion": 1}), &["`completion`", "a number"]);
    refused(json!({"text": ["a"]}), &["`text`", "a list"]);
}

fn spec(files: &Files, max_length: usize) -> DatasetSpec<'_> {
    DatasetSpec {
        sources: &files.sources,
        render: Render::Plain,
        max_length,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 100_000,
        screen: None,
    }
}

fn load(files: &Files, max_length: usize) -> Result<Dataset> {
    Dataset::load(
        &spec(files, max_length),
        &Words::chatml(),
        Some(&Jinja::new(QWEN) as &dyn ChatRender),
    )
}

const MIXED: [(&str, &str); 3] = [
    ("a.jsonl", "{\"text\": \"one two three\"}\n\n{\"text\": \"four\"}\n"),
    ("b.csv", "prompt,completion\nask me, I answer\n"),
    (
        "c.json",
        "[{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"ho\"}]}]",
    ),
];

#[test]
fn each_file_has_its_own_format_and_the_order_is_that_of_the_files() {
    let f = files(&MIXED);
    let data = load(&f, 100).unwrap();
    let lengths: Vec<usize> = data.lengths().iter().map(|n| *n as usize).collect();
    // system: im_start system \n You help . im_end \n; user: im_start user \n hi im_end \n; assistant the same.
    assert_eq!(lengths, [4, 2, 5, 20]);
    let places: Vec<_> = data.origins.iter().map(|o| (o.file, o.number, o.is_line)).collect();
    assert_eq!(places, [(0, 1, true), (0, 3, true), (1, 2, true), (2, 1, false)]);
    let s = &data.stats;
    assert_eq!(
        (s.rows, s.tokens, s.trained_tokens, s.longest, s.shortest),
        (4, 31, 3 + 1 + 3 + 2, 20, 2)
    );
    assert!(s.warnings(100).is_empty());
}

#[test]
fn the_same_rows_have_the_same_fingerprint_and_other_rows_another() {
    // The codec of these tests numbers words in order of use: one thread makes that deterministic.
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let of = |text: &str| one.install(|| load(&files(&[("a.jsonl", text)]), 100).unwrap().fingerprint);
    let a = of("{\"text\": \"one two\"}\n{\"text\": \"three\"}\n");
    assert_eq!(a, of("{\"text\": \"one two\"}\r\n\r\n{\"text\": \"three\", \"id\": 1}"));
    assert_ne!(a, of("{\"text\": \"one\"}\n{\"text\": \"two three\"}\n"));
    // The same ids with another mask are different data.
    let ids = |prompt: &str| {
        format!(
            "{{\"prompt\": \"one{prompt}\", \"completion\": \"{}\"}}",
            &" two three"[prompt.len()..]
        )
    };
    assert_ne!(of(&ids("")), of(&ids(" two")));
    assert_eq!(a.len(), 64);
}

/// Row D3.
#[test]
fn truncation_and_dropped_rows_are_counted() {
    let f = files(&[(
        "a.jsonl",
        "{\"prompt\": \"a b c d e f\", \"completion\": \" g\"}\n{\"prompt\": \"a\", \"completion\": \" b c d e f\"}\n\
         {\"prompt\": \"a\", \"completion\": \" b\"}\n{\"prompt\": \"\", \"completion\": \"\"}\n",
    )]);
    let data = load(&f, 4).unwrap();
    let s = &data.stats;
    assert_eq!((s.rows, s.truncated_rows, s.truncated_tokens), (4, 2, 4 + 3));
    assert_eq!(
        (s.dropped_rows, s.dropped_by_truncation, s.longest_written, s.longest),
        (2, 1, 8, 4)
    );
    assert_eq!(data.origins.iter().map(|o| o.number).collect::<Vec<_>>(), [2, 3]);
    let warnings = s.warnings(4).join("\n");
    assert!(
        warnings.contains("2 of 4 rows are longer than max_length = 4 and are truncated by 7 tokens"),
        "{warnings}"
    );
    assert!(warnings.contains("2 of 4 rows have no token to train"), "{warnings}");
}

/// Rows D2, D7.
#[test]
fn a_data_set_in_which_nothing_is_trained_is_refused_with_counts() {
    let long = files(&[("a.jsonl", "{\"prompt\": \"a b c d\", \"completion\": \" e\"}\n")]);
    let e = load(&long, 3).unwrap_err().to_string();
    assert!(
        e.contains("nothing in the data would be trained") && e.contains("1 rows, 1 without"),
        "{e}"
    );
    assert!(e.contains("longest row has 6 tokens"), "{e}");
    let unanswered = files(&[(
        "a.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n",
    )]);
    assert!(
        load(&unanswered, 99)
            .unwrap_err()
            .to_string()
            .contains("0 of them because of max_length")
    );
    for empty in ["", "\n\n", "\u{feff}"] {
        let e = load(&files(&[("a.jsonl", empty)]), 99).unwrap_err().to_string();
        assert!(e.contains("the data has no rows") && e.contains("a.jsonl"), "{e}");
    }
    assert_eq!(load(&long, 1).unwrap_err().exit_code(), 2);
}

/// Row D1.
#[test]
fn a_fault_in_a_late_row_names_that_row() {
    let mut text = "{\"text\": \"fine\"}\n".repeat(1500);
    text.push_str("{\"txt\": \"typo\"}\n");
    let e = load(&files(&[("a.jsonl", &text)]), 99).unwrap_err().to_string();
    assert!(
        e.contains("a.jsonl:1501") && e.contains("`text` is missing") && e.contains("fields txt"),
        "{e}"
    );
    // Errors of the template name the row too.
    let chats = files(&[(
        "a.json",
        "[{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": \"a\"}]}]",
    )]);
    let template = Jinja::new(MISTRAL);
    let e = Dataset::load(&spec(&chats, 99), &Words::chatml(), Some(&template))
        .unwrap_err()
        .to_string();
    assert!(e.contains("a.json:row 1") && e.contains("alternate"), "{e}");
    let chat = ft_formats::ChatTemplate::from_text("{{ raise_exception('no') }}", "my.jinja", &real()).unwrap();
    let e = Dataset::load(&spec(&chats, 99), &Words::chatml(), Some(&chat))
        .unwrap_err()
        .to_string();
    assert!(e.contains("a.json:row 1 (my.jinja:1)"), "{e}");
    let e = Dataset::load(&spec(&chats, 99), &Words::chatml(), None).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("a.json:row 1"), "{e}");
}

#[test]
fn tokenizing_side_by_side_keeps_the_order() {
    let text: String = (0..3000)
        .map(|i| format!("{{\"text\": \"{} end\"}}\n", "w ".repeat(i % 50)))
        .collect();
    let data = load(&files(&[("a.jsonl", &text)]), 1000).unwrap();
    assert_eq!(data.examples.len(), 3000);
    assert!(data.origins.iter().enumerate().all(|(i, o)| o.number == i as u64 + 1));
    let first: Vec<usize> = data.examples[..50].iter().map(|e| e.ids.len()).collect();
    assert!(
        data.examples
            .chunks(50)
            .all(|c| c.iter().map(|e| e.ids.len()).eq(first.iter().copied()))
    );
}

#[test]
fn a_split_is_decided_by_the_seed_and_loses_no_row() {
    let text: String = (0..100)
        .map(|i| format!("{{\"text\": \"row number {i}\"}}\n"))
        .collect();
    let f = files(&[("a.jsonl", &text)]);
    let numbers = |d: &Dataset| d.origins.iter().map(|o| o.number).collect::<Vec<_>>();
    let (train, eval) = load(&f, 99).unwrap().split(0.1, 7).unwrap();
    assert_eq!((train.examples.len(), eval.examples.len()), (90, 10));
    assert_eq!((train.stats.rows, eval.stats.rows), (90, 10));
    assert_eq!(train.stats.tokens + eval.stats.tokens, 100 * 4);
    assert!(numbers(&eval).is_sorted() && numbers(&train).is_sorted());
    let mut all = [numbers(&train), numbers(&eval)].concat();
    all.sort_unstable();
    assert_eq!(all, (1..=100).collect::<Vec<_>>());
    let again = load(&f, 99).unwrap().split(0.1, 7).unwrap();
    assert_eq!(
        (numbers(&again.1), numbers(&again.0)),
        (numbers(&eval), numbers(&train))
    );
    assert_ne!(numbers(&load(&f, 99).unwrap().split(0.1, 8).unwrap().1), numbers(&eval));
    let places = eval.origins.iter().copied().collect();
    let found = load(&f, 99).unwrap().at(&places).unwrap();
    assert_eq!((numbers(&found), found.stats), (numbers(&eval), eval.stats.clone()));
    assert_eq!(load(&f, 99).unwrap().split(0.0001, 7).unwrap().1.examples.len(), 1);
    assert!(load(&f, 99).unwrap().split(1.0, 7).is_err());
    let one = files(&[("a.jsonl", "{\"text\": \"a\"}")]);
    assert!(load(&one, 99).unwrap().split(0.5, 7).is_err());
}

#[test]
fn questions_are_the_prompts_and_answers_of_the_rows_kept() {
    let f = files(&MIXED);
    let codec = Words::chatml();
    let template = Jinja::new(QWEN);
    let data = Dataset::load(&spec(&f, 100), &codec, Some(&template)).unwrap();
    let ask = |data: &Dataset, limit| {
        let questions = data.questions(&spec(&f, 100), &codec, Some(&template), limit).unwrap();
        let show = |q: &super::Question| (codec.tokens(&q.prompt).concat(), q.answer.clone());
        questions.iter().map(show).collect::<Vec<_>>()
    };
    let prompt = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let expected = [
        ("ask me".to_string(), " I answer".to_string()),
        (prompt.to_string(), "ho".to_string()),
    ];
    assert_eq!(ask(&data, 10), expected);
    assert_eq!(ask(&data, 1), expected[..1]);
    assert!(ask(&data, 0).is_empty());
    // Only the rows of this part.
    let (train, eval) = data.split(0.5, 3).unwrap();
    assert_eq!(ask(&train, 10).len() + ask(&eval, 10).len(), 2);
    // Only the last answer of a conversation is a question; a tool call is not a text answer.
    let two = files(&[(
        "a.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \
        \"content\": \"b\"}, {\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", \"content\": \"d\"}]}",
    )]);
    let data = Dataset::load(&spec(&two, 100), &codec, Some(&template)).unwrap();
    let questions = data.questions(&spec(&two, 100), &codec, Some(&template), 5).unwrap();
    assert_eq!(questions.len(), 1);
    assert_eq!(questions[0].answer, "d");
    assert!(
        codec
            .tokens(&questions[0].prompt)
            .concat()
            .ends_with("b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")
    );
    // A first message has no question before it.
    let alone = files(&[(
        "a.jsonl",
        "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}",
    )]);
    let data = Dataset::load(&spec(&alone, 100), &codec, Some(&template)).unwrap();
    let questions = data.questions(&spec(&alone, 100), &codec, Some(&template), 5);
    assert!(questions.unwrap().is_empty());
}

#[test]
fn the_description_marks_what_is_trained_and_shows_the_counts() {
    let f = files(&[
        MIXED[1],
        (
            "d.jsonl",
            "{\"prompt\": \"\\u001b[31m red\", \"completion\": \" is a color that many people like\"}\n",
        ),
    ]);
    let codec = Words::chatml();
    let data = Dataset::load(&spec(&f, 8), &codec, None).unwrap();
    let text = describe(&data, &spec(&f, 8), &codec, 10, false).unwrap();
    assert!(
        text.contains("b.csv:2  5 tokens, 3 trained\nask me⟦ I answer<|im_end|>⟧\n"),
        "{text}"
    );
    assert!(
        text.contains("d.jsonl:1  8 tokens, 4 trained\n\\u{1b}[31m red⟦ is a color that⟧\n"),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'));
    for line in [
        "rows               2\n",
        "tokens             13\n",
        "trained tokens     7 (53.8 %)\n",
        "rows truncated     1\n",
    ] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    assert!(text.contains("  up to       8         2 ####"), "{text}");
    assert!(
        text.contains("warning: 1 of 2 rows are longer than max_length = 8"),
        "{text}"
    );
    let colored = describe(&data, &spec(&f, 8), &codec, 1, true).unwrap();
    assert!(colored.contains("\u{1b}[32m⟦ I answer<|im_end|>⟧\u{1b}[0m") && !colored.contains("d.jsonl"));
    // A row that could not be read as its format, which the counts of encoded rows do not have.
    let mut data = data;
    data.readings[0].skip("no answer", 1);
    let text = describe(&data, &spec(&f, 8), &codec, 0, false).unwrap();
    for line in [
        "rows               3\n",
        "rows used          2\n",
        "rows skipped       1\n",
    ] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
}
