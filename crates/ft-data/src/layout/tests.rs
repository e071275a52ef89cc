//! Tests of column layouts: roles, refused rows, and the description of a file.

use super::*;
use crate::dataset::{Dataset, DatasetSpec};
use crate::prompts::{PromptContent, PromptLimits, PromptSpec, Prompts};
use crate::reading::lines;
use crate::rows::{self, Sample};
use crate::testing::{Files, Jinja, QWEN, Words, files, row};
use crate::{Long, TrainOn};
use serde_json::{Value, json};

const WIDE: PromptLimits = PromptLimits {
    window: 4096,
    answer: 1,
    long: Long::Auto,
};

/// Reads a row for training; `template`: the model has a chat template.
fn learned(value: Value, render: Render, template: bool) -> Result<(Sample, ColumnLayout)> {
    let jinja = Jinja::new(QWEN);
    let codec = Words::chatml();
    let rules = RenderRules {
        render,
        template: template.then_some(&jinja as &dyn ChatRender),
        codec: &codec,
        answer: "answer",
    };
    let row = row(value);
    let layout = ColumnLayout::find(&row, RowFormat::Auto, RowPurpose::Learn, &rules)?;
    Ok((rows::understand(&row, &layout)?, layout))
}

fn spec(files: &Files, render: Render) -> DatasetSpec<'_> {
    DatasetSpec {
        sources: &files.sources,
        render,
        max_length: 4096,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 1 << 20,
        screen: None,
    }
}

/// The lines that describe a dataset, without the folder of its files.
fn described(rows: &[(&str, &str)], format: RowFormat, render: Render, template: bool) -> Result<Vec<String>> {
    let f = files(rows).read_as(format);
    let jinja = Jinja::new(QWEN);
    let template = template.then_some(&jinja as &dyn ChatRender);
    let data = Dataset::load(&spec(&f, render), &Words::chatml(), template)?;
    let folder = std::path::Path::new(&f.paths[0])
        .parent()
        .unwrap()
        .display()
        .to_string()
        + "/";
    let lines = lines(&data.readings, "not used");
    Ok(lines.into_iter().map(|l| l.replace(&folder, "")).collect())
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

#[test]
fn common_names_are_read_as_prompt_and_answer() {
    for (value, prompt) in [
        (json!({"question": "q", "answer": "a"}), "q"),
        (
            json!({"problem": "q", "level": "5", "solution": "a", "answer": "42"}),
            "q",
        ),
        (json!({"query": "q", "response": "a", "type": "x"}), "q"),
        (json!({"input": "q", "output": "a"}), "q"),
        (json!({"id": "1", "question": "q", "response": "a"}), "q"),
        (json!({"question": "q", "context": "c", "answer": "a"}), "q\nc"),
        (
            json!({"instruction": "q", "context": "c", "response": "a", "category": "x"}),
            "q\nc",
        ),
        (json!({"instruction": "q", "input": "i", "output": "a"}), "q\ni"),
        (json!({"prompt": "q", "completion": "a"}), "q"),
        (json!({"prompt": "q", "response": "a"}), "q"),
        // Nothing is appended to a complete prompt.
        (json!({"prompt": "q", "context": "c", "completion": "a"}), "q"),
    ] {
        let (sample, _) = learned(value.clone(), Render::Auto, true).unwrap();
        let Sample::Chat(chat) = sample else { panic!("{value}") };
        assert_eq!(
            chat.messages,
            [message("user", prompt), message("assistant", "a")],
            "{value}"
        );
    }
    let value = json!({"system_prompt": "s", "question": "q", "response": "a"});
    let Sample::Chat(chat) = learned(value, Render::Auto, true).unwrap().0 else {
        panic!()
    };
    assert_eq!(chat.messages[0], message("system", "s"));
}

#[test]
fn rows_that_can_be_read_in_two_ways_are_refused() {
    for (value, parts) in [
        (
            json!({"question": "q", "answer": "a", "text": "t"}),
            &["two ways", "`RowFormat::Text`"][..],
        ),
        (
            json!({"question": "q", "problem": "p", "answer": "a", "solution": "s"}),
            &["cannot determine which column", "question, problem"],
        ),
        (
            json!({"instruction": "q", "answer": "a", "solution": "s"}),
            &["answer, solution"],
        ),
        (
            json!({"title": "t", "body": "b"}),
            &[
                "cannot determine the format",
                "{ prompt = \"title\", completion = \"body\" }",
            ],
        ),
        (
            json!({"version": "1", "data": [{"input": "q", "output": "a"}]}),
            &["elements of `data`", "`jq .data FILE > rows.json`"],
        ),
        (
            json!({"prompt": null, "completion": "a"}),
            &["fields prompt (null), completion"],
        ),
        (
            json!({"body": "b", "n": 1}),
            &["`Mapping::columns = { text = \"body\" }`"],
        ),
        (
            json!({"prompt": "q", "chosen": "a", "rejected": "b"}),
            &["format `preference`", "`dpo`"],
        ),
        (
            json!({"question": "q", "chosen": "a", "rejected": "b"}),
            &["format `preference`", "`dpo`"],
        ),
    ] {
        let e = learned(value.clone(), Render::Auto, true).unwrap_err().to_string();
        assert!(
            parts.iter().all(|p| e.contains(p)) && e.contains("t.jsonl:3"),
            "{value}: {e}"
        );
    }
    // An explicit format is used, or its error names the expected columns.
    let f = |row: &str, format| described(&[("a.jsonl", row)], format, Render::Auto, true);
    let both = r#"{"question": "q", "answer": "a", "text": "t"}"#;
    assert_eq!(
        f(both, RowFormat::Text).unwrap(),
        ["text: text; not used: answer, question"]
    );
    assert_eq!(
        f(both, RowFormat::PromptCompletion).unwrap(),
        [
            "prompt-completion: prompt from question, completion from answer; not used: text; rendered with the chat template"
        ]
    );
    let e = f(r#"{"ask": "q", "say": "a"}"#, RowFormat::PromptCompletion)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("a prompt (prompt, instruction, question") && e.contains("Mapping::columns"),
        "{e}"
    );
}

#[test]
fn answers_that_are_marked_as_bad_are_not_learned() {
    for label in [json!(false), json!("False"), json!(0)] {
        for value in [
            json!({"prompt": "p", "completion": "c", "label": label}),
            json!({"instruction": "p", "output": "c", "kto_tag": label}),
            json!({"messages": [message("user", "a"), message("assistant", "b")], "label": label}),
        ] {
            let e = learned(value, Render::Auto, true).unwrap_err().to_string();
            assert!(
                e.contains("marks this answer as bad") && e.contains("PreferencePart::Judged"),
                "{e}"
            );
        }
    }
    assert!(
        learned(
            json!({"prompt": "p", "completion": "c", "label": true}),
            Render::Auto,
            true
        )
        .is_ok()
    );
    assert!(learned(json!({"text": "t", "label": 0}), Render::Auto, true).is_ok());
}

#[test]
fn the_rendering_follows_the_template_the_key_and_the_rows() {
    let pair = || json!({"prompt": "p", "completion": "c"});
    let rendering = |value, render, template| learned(value, render, template).map(|(_, l)| l.rendering);
    assert_eq!(rendering(pair(), Render::Auto, true).unwrap(), Rendering::Template);
    assert!(matches!(
        rendering(pair(), Render::Auto, false).unwrap(),
        Rendering::Plain(_)
    ));
    assert!(matches!(
        rendering(pair(), Render::Plain, true).unwrap(),
        Rendering::Plain(_)
    ));
    assert_eq!(rendering(pair(), Render::Chat, true).unwrap(), Rendering::Template);
    let e = rendering(pair(), Render::Chat, false).unwrap_err();
    assert!(
        e.exit_code() == 2 && e.to_string().contains("needs a chat template"),
        "{e}"
    );
    for (prompt, completion) in [
        ("<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n", "c"),
        ("p", "c<|im_end|>"),
    ] {
        let value = json!({"prompt": prompt, "completion": completion});
        let got = rendering(value, Render::Auto, true).unwrap();
        assert_eq!(
            got,
            Rendering::Plain("the rows already contain the tokens of a chat template")
        );
    }
    assert_eq!(
        rendering(json!({"text": "t"}), Render::Chat, true).unwrap(),
        Rendering::Text
    );
    // A system text needs a template, and is never dropped.
    let value = json!({"prompt": "p", "completion": "c", "system": "s"});
    let Sample::Chat(chat) = learned(value.clone(), Render::Auto, true).unwrap().0 else {
        panic!()
    };
    assert_eq!(chat.messages[0], message("system", "s"));
    assert_eq!(chat.first_trained, 2);
    for (render, template) in [(Render::Auto, false), (Render::Plain, true)] {
        let e = learned(value.clone(), render, template).unwrap_err().to_string();
        assert!(e.contains("cannot contain `system`") && e.contains("hint:"), "{e}");
    }
}

#[test]
fn text_that_a_template_without_special_tokens_wrote_is_not_rendered_again() {
    const LLAMA2: &str = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{% endif %}{% endfor %}";
    let jinja = Jinja::new(LLAMA2);
    let codec = Words::chatml();
    let rules = RenderRules {
        render: Render::Auto,
        template: Some(&jinja),
        codec: &codec,
        answer: "",
    };
    let find = |value| ColumnLayout::find(&row(value), RowFormat::Auto, RowPurpose::Learn, &rules).unwrap();
    assert!(find(json!({"prompt": "hi", "completion": "ho"})).renders());
    assert!(!find(json!({"prompt": "[INST] hi [/INST]", "completion": " ho"})).renders());
}

#[test]
fn a_system_column_joins_a_conversation_once() {
    let chat = |system: &str, first: Value| json!({"system": system, "messages": [first, message("user", "u"), message("assistant", "a")]});
    let of = |value| match learned(value, Render::Auto, true)?.0 {
        Sample::Chat(chat) => Ok(chat.messages),
        other => panic!("{other:?}"),
    };
    let bare = json!({"system": "s", "messages": [message("user", "u"), message("assistant", "a")]});
    assert_eq!(of(bare).unwrap()[0], message("system", "s"));
    assert_eq!(of(chat("s", message("system", "s"))).unwrap().len(), 3);
    let e: Error = of(chat("s", message("system", "t"))).unwrap_err();
    assert!(e.to_string().contains("two system messages"), "{e}");
}

#[test]
fn each_row_has_its_system_message_in_either_column() {
    let jinja = Jinja::new(QWEN);
    let codec = Words::chatml();
    let rules = |render| RenderRules {
        render,
        template: Some(&jinja),
        codec: &codec,
        answer: "answer",
    };
    let read = |render, value: Value| {
        let first = row(json!({"question": "q", "answer": "a", "system": null, "system_prompt": null}));
        let layout = ColumnLayout::find(&first, RowFormat::Auto, RowPurpose::Learn, &rules(render))?;
        let layout = ColumnLayout {
            system_prompt: Some("of the recipe".into()),
            ..layout
        };
        rows::understand(&row(value), &layout)
    };
    let with = |systems: Value| {
        let mut row = systems;
        (row["question"], row["answer"]) = (json!("q"), json!("a"));
        row
    };
    for (systems, expected) in [
        (json!({"system_prompt": "s"}), "s"),
        (json!({"system": "s", "system_prompt": null}), "s"),
        (json!({"system": "", "system_prompt": "s"}), "s"),
        (json!({"system": "s", "system_prompt": "s"}), "s"),
        (json!({"system": "s", "system_prompt": ["t"]}), "s"),
        (json!({"system": {"v": 1}, "system_prompt": "s"}), "s"),
        (json!({}), "of the recipe"),
    ] {
        let Sample::Chat(chat) = read(Render::Auto, with(systems.clone())).unwrap() else {
            panic!("{systems}")
        };
        assert_eq!(chat.messages[0], message("system", expected), "{systems}");
        assert_eq!(chat.messages.len(), 3, "{systems}");
    }
    let e = read(Render::Auto, with(json!({"system": "s", "system_prompt": "t"}))).unwrap_err();
    let e = e.to_string();
    assert!(
        e.contains("two system messages") && e.contains("`system`: s, `system_prompt`: t"),
        "{e}"
    );
    let e = read(Render::Auto, with(json!({"system": "", "system_prompt": 7}))).unwrap_err();
    let e = e.to_string();
    assert!(
        e.contains("`system_prompt` has the wrong type") && e.contains("hint: make it a text"),
        "{e}"
    );
    let e = read(Render::Plain, with(json!({"system_prompt": "t"}))).unwrap_err();
    assert!(e.to_string().contains("cannot contain `system_prompt`"), "{e}");
    let both = "{\"question\": \"q\", \"answer\": \"a\", \"system\": \"s\"}\n\
                {\"question\": \"q\", \"answer\": \"b\", \"system_prompt\": \"t\"}\n";
    let lines = described(&[("a.jsonl", both)], RowFormat::Auto, Render::Auto, true).unwrap();
    assert!(
        lines[0].contains("system from system and system_prompt"),
        "{}",
        lines[0]
    );
}

#[test]
fn files_are_described_with_every_column() {
    let a = (
        "a.jsonl",
        "{\"instruction\": \"q\", \"output\": \"a\", \"id\": 1}\n{\"instruction\": \"q\", \"input\": \"i\", \"output\": \"a\", \"source\": null}\n",
    );
    let b = ("b.jsonl", r#"{"text": "t", "url": "u"}"#);
    let alpaca =
        "alpaca: prompt from instruction and input, answer from output; not used: id; rendered with the chat template";
    assert_eq!(described(&[a], RowFormat::Auto, Render::Auto, true).unwrap(), [alpaca]);
    assert_eq!(
        described(&[a, b], RowFormat::Auto, Render::Auto, true).unwrap(),
        [
            format!("{alpaca} (a.jsonl)"),
            "text: text; not used: url (b.jsonl)".into()
        ]
    );
    let c = ("c.csv", "prompt,completion\nhello,there\n");
    assert_eq!(
        described(&[c, ("d.csv", c.1)], RowFormat::Auto, Render::Auto, false).unwrap(),
        ["prompt-completion: prompt, completion; plain text (the model has no chat template)"]
    );
    let m = (
        "m.jsonl",
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "prompt": "q"}"#,
    );
    assert_eq!(
        described(&[m], RowFormat::Auto, Render::Auto, true).unwrap(),
        ["messages: messages; not used: prompt; rendered with the chat template"]
    );
}

#[test]
fn what_may_not_be_meant_is_warned_about() {
    let warnings = |text: &str| {
        let f = files(&[("a.jsonl", text)]);
        let data = Dataset::load(&spec(&f, Render::Auto), &Words::chatml(), None).unwrap();
        data.readings[0].warnings().join("\n")
    };
    assert!(warnings(r#"{"prompt": "p ", "completion": "c", "context": "x"}"#).contains("context are not used"));
    assert!(warnings(r#"{"prompt": "p", "completion": "c"}"#).contains("no space or line break"));
    assert_eq!(warnings(r#"{"prompt": "p", "completion": " c", "prompt_id": "7"}"#), "");
}

/// Row D1.
#[test]
fn all_bad_rows_are_counted() {
    let mut text = "{\"text\": \"fine\"}\n".repeat(600);
    text.push_str("{\"text\": \"cut \\ud83d\"}\n[1]\n{\"txt\": 1}\nnot json\n");
    let f = files(&[("a.jsonl", &text)]);
    let load = || Dataset::load(&spec(&f, Render::Auto), &Words::chatml(), None);
    let e = load().unwrap_err().to_string();
    assert!(e.starts_with("4 of 604 rows cannot be used"), "{e}");
    for part in ["a.jsonl:601:", "a.jsonl:602", "a.jsonl:603", "a.jsonl:604:"] {
        assert!(e.contains(part), "no {part} in {e}");
    }
    assert!(e.contains("hint: escapes from \\ud800"), "{e}");
}

#[test]
fn prompts_to_answer_come_from_every_common_column() {
    let load = |text: &str, render, template: bool| {
        let f = files(&[("a.jsonl", text)]);
        let jinja = Jinja::new(QWEN);
        let codec = Words::chatml();
        let encoder = spec(&f, render).encoder(&codec, template.then_some(&jinja as &dyn ChatRender));
        let prompts = Prompts::load(&PromptSpec {
            sources: &f.sources,
            render,
            encoder: &encoder,
            answer: "answer",
            limits: WIDE,
            screen: None,
        })?;
        let line = lines(&prompts.readings, "not used").remove(0);
        let text = codec.decode(&prompts.rows[0].ids)?;
        Ok::<_, Error>((prompts.rows.into_iter().next().unwrap(), line, text))
    };
    let (prompt, line, text) = load(r#"{"question": "q", "answer": "4", "level": 1}"#, Render::Auto, true).unwrap();
    assert_eq!(prompt.answer, Some(json!("4")));
    assert!(matches!(prompt.said, PromptContent::Chat { .. }));
    assert_eq!(prompt.shown, json!("q"));
    assert!(
        text.ends_with("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"),
        "{text}"
    );
    assert_eq!(
        line,
        "prompt: prompt from question, answer; not used: level; rendered with the chat template"
    );

    let (prompt, line, _) = load(r#"{"problem": "q", "solution": "s"}"#, Render::Auto, true).unwrap();
    assert_eq!(prompt.answer, Some(json!("s")));
    assert!(
        line.starts_with("prompt-completion: prompt from problem, completion from solution"),
        "{line}"
    );

    let (prompt, _, text) = load(r#"{"prompt": "go on", "answer": 1}"#, Render::Plain, true).unwrap();
    assert_eq!(
        (prompt.said, text.as_str()),
        (PromptContent::Text("go on".into()), "go on")
    );
    let (prompt, _, _) = load(r#"{"query": "q"}"#, Render::Auto, true).unwrap();
    assert_eq!(prompt.answer, None);
    let e = load(r#"{"system": "s", "prompt": "q"}"#, Render::Plain, true)
        .unwrap_err()
        .to_string();
    assert!(e.contains("cannot contain `system`"), "{e}");
}
