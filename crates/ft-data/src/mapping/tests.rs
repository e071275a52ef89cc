//! Tests of mapped columns, and of rows with the columns of well-known public datasets.

use super::*;
use crate::dataset::{Dataset, DatasetSpec};
use crate::preference::{self, PreferencePart};
use crate::prompts::{PromptLimits, PromptSpec, Prompts};
use crate::reading::lines;
use crate::source::Source;
use crate::testing::{Files, Jinja, QWEN, Words, files};
use crate::{ChatRender, Long, Render, TextCodec, TrainOn};

/// The line that describes the reading, and the first row as text: its trained tokens are in brackets. Documents of a
/// pair are joined with `|`; the known answer of a prompt follows `->`.
type Seen = Result<(String, String)>;

struct Case {
    files: Files,
    render: Render,
    template: bool,
}

fn case(rows: &[Value], mapping: Mapping) -> Case {
    let text: Vec<String> = rows.iter().map(Value::to_string).collect();
    let mut files = files(&[("t.jsonl", &text.join("\n"))]);
    files.sources[0].mapping = mapping;
    Case {
        files,
        render: Render::Auto,
        template: true,
    }
}

impl Case {
    fn spec(&self) -> DatasetSpec<'_> {
        DatasetSpec {
            sources: &self.files.sources,
            render: self.render,
            max_length: 4096,
            long: Long::Auto,
            overlap: 1,
            train_on: TrainOn::Assistant,
            embedding_rows: 1 << 20,
            screen: None,
        }
    }

    fn see(&self, purpose: RowPurpose) -> Seen {
        let codec = Words::chatml();
        let jinja = Jinja::new(QWEN);
        let template = self.template.then_some(&jinja as &dyn ChatRender);
        let spec = self.spec();
        let short = |text: String| {
            let text = text
                .replace("<|im_start|>", "<")
                .replace("<|im_end|>\n", ">")
                .replace("<|im_end|>", ">");
            text.replace("<system\nYou help.>", "").trim().to_string()
        };
        let data = match purpose {
            RowPurpose::Learn => Dataset::load(&spec, &codec, template)?,
            RowPurpose::Prefer => preference::load(&spec, PreferencePart::Pairs, &codec, template)?,
            RowPurpose::Ask => {
                let encoder = spec.encoder(&codec, template);
                let limits = PromptLimits {
                    window: 4096,
                    answer: 1,
                    long: Long::Auto,
                };
                let prompts = Prompts::load(&PromptSpec {
                    sources: spec.sources,
                    render: self.render,
                    encoder: &encoder,
                    answer: "answer",
                    limits,
                    screen: None,
                })?;
                let text = short(codec.decode(&prompts.rows[0].ids)?);
                let answer = prompts.rows[0].answer.clone().unwrap_or_default();
                return Ok((
                    lines(&prompts.readings, "not used").join("\n"),
                    format!("{text} -> {answer}"),
                ));
            }
        };
        let shown = data.parts(0)?.into_iter().map(|e| {
            let mut text = String::new();
            for run in e.trained.chunk_by(|a, b| a == b) {
                let at = run.as_ptr() as usize - e.trained.as_ptr() as usize;
                let part = codec.decode(&e.ids[at..at + run.len()]).unwrap();
                text += &if run[0] { format!("[{part}]") } else { part };
            }
            short(text)
        });
        let shown: Vec<String> = shown.collect();
        Ok((lines(&data.readings, "not used").join("\n"), shown.join(" | ")))
    }
}

fn see(row: Value, purpose: RowPurpose) -> Seen {
    case(&[row], Mapping::default()).see(purpose)
}

fn columns(columns: &[(ColumnRole, &str)]) -> Mapping {
    Mapping {
        columns: columns.iter().map(|(role, path)| (*role, path.to_string())).collect(),
        ..Mapping::default()
    }
}

/// A question and a trained answer as the template renders them.
fn chat(question: &str, answer: &str) -> String {
    format!("<user\n{question}><assistant\n[{answer}>]")
}

fn pair(question: &str, chosen: &str, rejected: &str) -> String {
    format!("{} | {}", chat(question, chosen), chat(question, rejected))
}

const RENDERED: &str = "; rendered with the chat template";

/// Seventeen sets for supervised training.
#[test]
fn well_known_sets_of_answers_are_read() {
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let from = |role: &str, text: &str| json!({"from": role, "value": text});
    for (set, row, line, text) in [
        (
            "GSM8K",
            json!({"question": "Two and two ?", "answer": "four #### 4"}),
            "prompt-completion: prompt from question, completion from answer",
            chat("Two and two ?", "four #### 4"),
        ),
        (
            "MATH",
            json!({"problem": "p", "level": "Level 1", "type": "Algebra", "solution": "s"}),
            "prompt-completion: prompt from problem, completion from solution; not used: level, type",
            chat("p", "s"),
        ),
        (
            "Dolly",
            json!({"instruction": "i", "context": "c", "response": "r", "category": "closed_qa"}),
            "alpaca: prompt from instruction and context, answer from response; not used: category",
            chat("i\nc", "r"),
        ),
        (
            "MetaMathQA",
            json!({"type": "GSM_Rephrased", "query": "q", "original_question": "o", "response": "r"}),
            "prompt-completion: prompt from query, completion from response; not used: original_question, type",
            chat("q", "r"),
        ),
        (
            "OpenOrca",
            json!({"id": "flan.1", "system_prompt": "be brief", "question": "q", "response": "r"}),
            "prompt-completion: system from system_prompt, prompt from question, completion from response; not used: id",
            format!("<system\nbe brief>{}", chat("q", "r")),
        ),
        (
            "Orca-Math",
            json!({"question": "q", "answer": "a"}),
            "prompt-completion: prompt from question, completion from answer",
            chat("q", "a"),
        ),
        (
            "sql-create-context",
            json!({"question": "q", "context": "CREATE TABLE t", "answer": "SELECT 1"}),
            "prompt-completion: prompt from question and context, completion from answer",
            chat("q\nCREATE TABLE t", "SELECT 1"),
        ),
        (
            "SQuAD",
            json!({"id": "1", "title": "t", "context": "c", "question": "q",
                "answers": {"text": ["a", "b"], "answer_start": [0, 0]}}),
            "prompt-completion (SQuAD): prompt from context and question, completion from answers.text[0]; \
             not used: id, title",
            chat("c\n\nq", "a"),
        ),
        (
            "LIMA",
            json!({"conversations": ["q", "a"], "source": "s"}),
            "messages (turns as a list of texts): messages from conversations; not used: source",
            chat("q", "a"),
        ),
        (
            "input and output",
            json!({"input": "q", "output": "a"}),
            "prompt-completion: prompt from input, completion from output",
            chat("q", "a"),
        ),
        (
            "Alpaca",
            json!({"instruction": "i", "input": "x", "output": "o", "text": "Below is i x o"}),
            "alpaca: prompt from instruction and input, answer from output; not used: text",
            chat("i\nx", "o"),
        ),
        (
            "UltraChat",
            json!({"prompt": "q", "prompt_id": "1", "messages": [turn("user", "q"), turn("assistant", "a")]}),
            "messages; not used: prompt, prompt_id",
            chat("q", "a"),
        ),
        (
            "UltraChat, first edition",
            json!({"id": "0", "data": ["q", "a"]}),
            "messages (turns as a list of texts): messages from data; not used: id",
            chat("q", "a"),
        ),
        (
            "ShareGPT",
            json!({"id": "1", "conversations": [from("human", "q"), from("gpt", "a")]}),
            "sharegpt: messages from conversations; not used: id",
            chat("q", "a"),
        ),
        (
            "SlimOrca",
            json!({"conversations": [
                {"from": "system", "value": "s", "weight": null},
                {"from": "human", "value": "q", "weight": 0.0},
                {"from": "gpt", "value": "a", "weight": 1.0},
            ]}),
            "sharegpt: messages from conversations",
            format!("<system\ns>{}", chat("q", "a")),
        ),
        (
            "NuminaMath",
            json!({"source": "s", "problem": "q", "solution": "a",
                "messages": [turn("user", "q"), turn("assistant", "a")]}),
            "messages; not used: problem, solution, source",
            chat("q", "a"),
        ),
        (
            "names in capitals",
            json!({"ID": 1, "Question": "q", "Context": "c", "Answer": "a"}),
            "prompt-completion: prompt from Question and Context, completion from Answer; not used: ID",
            chat("q\nc", "a"),
        ),
        (
            "names in capitals, with a column that a prompt does not read",
            json!({"Prompt": "q", "Context": "c", "Response": "a"}),
            "prompt-completion: prompt from Prompt, completion from Response; not used: Context",
            chat("q", "a"),
        ),
        (
            "Firefly",
            json!({"conversation_id": 1, "conversation": [{"human": "q", "assistant": "a"}]}),
            "messages (turns in pairs): messages from conversation; not used: conversation_id",
            chat("q", "a"),
        ),
        (
            "WikiText",
            json!({"text": "only words"}),
            "text",
            "only[ words>]".to_string(),
        ),
    ] {
        let (said, seen) = see(row, RowPurpose::Learn).unwrap_or_else(|e| panic!("{set}: {e}"));
        let said = said
            .trim_end_matches(RENDERED)
            .replace("messages: messages;", "messages;")
            .replace("text: text", "text");
        assert_eq!((said.as_str(), seen), (line, text), "{set}");
    }
}

/// Six sets of pairs.
#[test]
fn well_known_sets_of_pairs_are_read() {
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let talk = |text: &str| json!([turn("user", "q"), turn("assistant", text)]);
    for (set, row, line, text) in [
        (
            "orca_dpo_pairs",
            json!({"system": "", "question": "q", "chosen": "a", "rejected": "b"}),
            "preference: system, prompt from question, chosen, rejected",
            pair("q", "a", "b"),
        ),
        (
            "input, chosen, rejected",
            json!({"input": "q", "chosen": "a", "rejected": "b"}),
            "preference: prompt from input, chosen, rejected",
            pair("q", "a", "b"),
        ),
        (
            "UltraFeedback, binarized",
            json!({"prompt": "q", "prompt_id": "1", "chosen": talk("a"), "rejected": talk("b"),
                "messages": talk("a"), "score_chosen": 8.0, "score_rejected": 4.0}),
            "preference: prompt, chosen, rejected; not used: messages, prompt_id, score_chosen, score_rejected",
            pair("q", "a", "b"),
        ),
        (
            "UltraFeedback",
            json!({"source": "s", "instruction": "q", "models": ["m", "n", "o"], "completions": [
                {"model": "m", "response": "c", "overall_score": 10.0, "fine-grained_score": 2.5},
                {"model": "n", "response": "a", "overall_score": 8.0, "fine-grained_score": 4.75},
                {"model": "o", "response": "b", "overall_score": 3.0, "fine-grained_score": 1.5},
            ], "correct_answers": [], "incorrect_answers": []}),
            "preference (UltraFeedback): prompt from instruction, chosen from the best of completions, rejected from \
             the worst of completions; not used: correct_answers, incorrect_answers, models, source",
            pair("q", "a", "b"),
        ),
        (
            "HH",
            json!({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}),
            "preference (transcripts): chosen, rejected",
            pair("q", "a", "b"),
        ),
        (
            "a conversation and two answers",
            json!({"conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}),
            "preference: messages from conversations, chosen, rejected",
            pair("q", "a", "b"),
        ),
    ] {
        let (said, seen) = see(row, RowPurpose::Prefer).unwrap_or_else(|e| panic!("{set}: {e}"));
        assert_eq!((said.trim_end_matches(RENDERED), seen), (line, text), "{set}");
    }
    // Without a template the texts stay as they are.
    let row = json!({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"});
    let mut plain = case(&[row], Mapping::default());
    plain.template = false;
    assert!(
        plain
            .see(RowPurpose::Prefer)
            .unwrap()
            .0
            .contains("plain text (the answers contain the prompt)")
    );
}

/// Four sets of prompts.
#[test]
fn well_known_sets_of_prompts_are_read() {
    let asked = |answer: &str| format!("<user\nq><assistant -> \"{answer}\"");
    for (set, row, line, text) in [
        (
            "GSM8K",
            json!({"question": "q", "answer": "so\n#### 4"}),
            "prompt (GSM8K): prompt from question, answer",
            asked("4"),
        ),
        (
            "Big-Math",
            json!({"problem": "q", "answer": "4", "source": "s", "domain": ["d"], "llama8b_solve_rate": 0.5}),
            "prompt: prompt from problem, answer; not used: domain, llama8b_solve_rate, source",
            asked("4"),
        ),
        (
            "DAPO",
            json!({"data_source": "s", "prompt": [{"role": "user", "content": "q"}], "ability": "MATH",
                "reward_model": {"ground_truth": "4", "style": "rule"}, "extra_info": {"index": "1"}}),
            "prompt: prompt, answer from reward_model.ground_truth; not used: ability, data_source, extra_info",
            asked("4"),
        ),
        (
            "DeepMath",
            json!({"question": "q", "final_answer": "4", "difficulty": 1.0, "topic": "t", "r1_solution_1": "s"}),
            "prompt: prompt from question, answer from final_answer; not used: difficulty, r1_solution_1, topic",
            asked("4"),
        ),
    ] {
        let (said, seen) = see(row, RowPurpose::Ask).unwrap_or_else(|e| panic!("{set}: {e}"));
        assert_eq!((said.trim_end_matches(RENDERED), seen), (line, text), "{set}");
    }
}

#[test]
fn columns_are_read_under_any_name_and_others_stay_away() {
    use ColumnRole::{Chosen, Completion, Input, Prompt, Rejected, System, Text};
    let row = json!({"body": "q", "reply": 7, "prompt": "wrong", "answer": "wrong", "text": "wrong",
        "messages": "wrong", "meta": {"who": "s", "extra": ["x"]}, "a": "good", "b": "bad"});
    let see = |mapping: &[(ColumnRole, &str)], purpose| case(std::slice::from_ref(&row), columns(mapping)).see(purpose);
    let (line, text) = see(
        &[(Prompt, "body"), (Completion, "reply"), (System, "meta.who")],
        RowPurpose::Learn,
    )
    .unwrap();
    assert_eq!(text, format!("<system\ns>{}", chat("q", "7")));
    assert_eq!(
        line.trim_end_matches(RENDERED),
        "prompt-completion: system from meta.who, prompt from body, completion from reply; not used: a, answer, b, messages, text"
    );
    let row_with_two = json!({"prompt": "q", "completion": "a", "who": "s", "system_prompt": "wrong"});
    let of_two = case(&[row_with_two], columns(&[(System, "who")])).see(RowPurpose::Learn);
    assert_eq!(of_two.unwrap().1, format!("<system\ns>{}", chat("q", "a")));
    let with_input = [(Prompt, "body"), (Completion, "reply"), (Input, "meta.extra[0]")];
    assert_eq!(see(&with_input, RowPurpose::Learn).unwrap().1, chat("q\nx", "7"));
    let pairs = [(Prompt, "body"), (Chosen, "a"), (Rejected, "b")];
    assert_eq!(see(&pairs, RowPurpose::Prefer).unwrap().1, pair("q", "good", "bad"));
    assert!(
        see(&[(Text, "body")], RowPurpose::Learn)
            .unwrap()
            .0
            .starts_with("text: text from body; not used")
    );
}

#[test]
fn a_prompt_template_and_a_system_prompt_are_used() {
    let row = json!({"title": "T", "facts": {"list": ["one"]}, "prompt": "old", "reply": "a"});
    let mapping = Mapping {
        prompt_template: Some("{{{title}}} {facts.list[0]} ?".into()),
        system_prompt: Some("Be kind.".into()),
        ..columns(&[(ColumnRole::Completion, "reply")])
    };
    let (line, text) = case(std::slice::from_ref(&row), mapping.clone())
        .see(RowPurpose::Learn)
        .unwrap();
    assert_eq!(text, format!("<system\nBe kind.>{}", chat("{T} one ?", "a")));
    assert!(
        line.contains("prompt from title and facts.list[0]") && line.contains("get `Mapping::system_prompt`"),
        "{line}"
    );
    // A row's own system message stays.
    let own = json!({"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"}]});
    let system = Mapping {
        system_prompt: Some("Be kind.".into()),
        ..Mapping::default()
    };
    assert!(
        case(&[own], system.clone())
            .see(RowPurpose::Learn)
            .unwrap()
            .1
            .starts_with("<system\nown>")
    );
    // For prompts and pairs too.
    let asked = json!({"prompt": "q", "answer": "a"});
    assert!(
        case(&[asked], system.clone())
            .see(RowPurpose::Ask)
            .unwrap()
            .1
            .starts_with("<system\nBe kind.>")
    );
    let pairs = json!({"prompt": "q", "chosen": "a", "rejected": "b"});
    let (_, text) = case(&[pairs], system.clone()).see(RowPurpose::Prefer).unwrap();
    assert_eq!(text.matches("Be kind.").count(), 2);
    for row in [json!({"text": "x y"}), json!({"prompt": "q", "completion": "a"})] {
        let mut plain = case(&[row], system.clone());
        plain.template = false;
        let e = plain.see(RowPurpose::Learn).unwrap_err().to_string();
        assert!(e.contains("t.jsonl:1") && e.contains("needs conversations"), "{e}");
    }
    let twice = Mapping {
        prompt_template: mapping.prompt_template,
        ..columns(&[(ColumnRole::Prompt, "title")])
    };
    assert!(twice.check().unwrap_err().to_string().contains("contradict"));
}

#[test]
fn turns_have_any_keys_and_any_roles() {
    let turns = json!([{"speaker": "Customer", "say": "q"}, {"speaker": "Agent", "say": "a"}]);
    let mapping = Mapping {
        roles: vec![
            ("Customer".into(), ChatRole::User),
            ("Agent".into(), ChatRole::Assistant),
        ],
        ..columns(&[
            (ColumnRole::Messages, "dialog"),
            (ColumnRole::Role, "speaker"),
            (ColumnRole::Content, "say"),
        ])
    };
    for dialog in [turns.clone(), json!(turns.to_string())] {
        let row = json!({"dialog": dialog, "prompt": "no", "completion": "no"});
        assert_eq!(
            case(&[row], mapping.clone()).see(RowPurpose::Learn).unwrap().1,
            chat("q", "a")
        );
    }
    // Usual names of the same roles need no mapping.
    for [user, assistant] in [
        ["human", "gpt"],
        ["User", "Assistant"],
        ["user", "bot"],
        ["user", "model"],
    ] {
        let row = json!({"messages": [{"role": user, "content": "q"}, {"role": assistant, "content": "a"}]});
        assert_eq!(see(row, RowPurpose::Learn).unwrap().1, chat("q", "a"));
    }
}

#[test]
fn what_cannot_be_read_is_refused_with_a_hint() {
    use ColumnRole::{Answer, Completion, Prompt, Text};
    let row = json!({"Question": "q", "answers": {"text": ["a"]}, "n": null});
    for (mapping, purpose, parts) in [
        (
            vec![(Prompt, "question")],
            RowPurpose::Learn,
            vec!["t.jsonl:1", "no `question`", "did you mean `Question`?"],
        ),
        (
            vec![(Prompt, "Question"), (Completion, "answers")],
            RowPurpose::Learn,
            vec!["`answers` is not a text", "`answers.text` names"],
        ),
        (
            vec![(Prompt, "Question"), (Completion, "answers.text")],
            RowPurpose::Learn,
            vec!["`answers.text[0]` names"],
        ),
        (
            vec![(Prompt, "Question"), (Completion, "answers.txt[0]")],
            RowPurpose::Learn,
            vec!["no `answers.txt[0]`", "`answers`: {"],
        ),
        (
            vec![(Prompt, "Question"), (Answer, "answers.text[0]")],
            RowPurpose::Learn,
            vec![
                "`answer` of `Mapping::columns` has no use",
                "map the column `answers.text[0]` to `completion`",
            ],
        ),
        (
            vec![(Prompt, "Question"), (Text, "Question")],
            RowPurpose::Prefer,
            vec!["not a preference row"],
        ),
        (
            vec![
                (Prompt, "Question"),
                (Completion, "answers.text[0]"),
                (ColumnRole::Margin, "n"),
            ],
            RowPurpose::Learn,
            vec!["`margin = \"n\"` of `Mapping::columns` has no use in rows of format `prompt-completion`"],
        ),
    ] {
        let e = case(std::slice::from_ref(&row), columns(&mapping))
            .see(purpose)
            .unwrap_err();
        let e = e.to_string();
        parts
            .iter()
            .for_each(|part| assert!(e.contains(part), "no {part:?} in: {e}"));
    }
    let turns = json!([{"role": "user", "content": "<image> q"}, {"role": "assistant", "content": "a"}]);
    let shown = json!({"messages": turns, "images": [{"path": "x.png"}]});
    let e = case(std::slice::from_ref(&shown), Mapping::default())
        .see(RowPurpose::Learn)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("t.jsonl:1") && e.contains("images") && e.contains("{ messages = \"messages\" }"),
        "{e}"
    );
    let text = columns(&[(ColumnRole::Messages, "messages")]);
    assert!(case(&[shown], text).see(RowPurpose::Learn).is_ok());
    // Rows after the first one.
    let good = json!({"q": "q", "a": "a"});
    let e = case(
        &[good.clone(), json!({"q": "q"})],
        columns(&[(Prompt, "q"), (Completion, "a")]),
    );
    let e = e.see(RowPurpose::Learn).unwrap_err().to_string();
    assert!(e.contains("t.jsonl:2") && e.contains("the row has no `a`"), "{e}");
}

#[test]
fn rows_without_an_answer_are_skipped_and_counted() {
    let row = |texts: Value| json!({"context": "c", "question": "q", "answers": {"text": texts}});
    let (line, text) = case(&[row(json!([])), row(json!(["a"])), row(json!([]))], Mapping::default())
        .see(RowPurpose::Learn)
        .unwrap();
    assert_eq!(text, chat("c\n\nq", "a"));
    assert!(line.contains("; 2 rows skipped: no value in a list"), "{line}");
}

#[test]
fn a_limit_ends_the_reading_of_a_source() {
    let row = |i: usize| json!({"text": format!("row {i}")});
    let mut c = case(&(0..9).map(row).collect::<Vec<_>>(), Mapping::default());
    for (limit, rows) in [(4, 4), (9, 9), (100, 9)] {
        c.files.sources[0].limit = Some(limit);
        assert_eq!(
            Dataset::load(&c.spec(), &Words::chatml(), None).unwrap().stats.rows,
            rows
        );
    }
    // A limit that ends with a file: the next one is not opened.
    c.files.sources[0].limit = Some(9);
    c.files.sources[0].files.push("none.jsonl".into());
    assert_eq!(Dataset::load(&c.spec(), &Words::chatml(), None).unwrap().stats.rows, 9);
    c.files.sources[0].files.pop();
    let second = Source::new(c.files.paths.clone());
    c.files.sources[0].limit = Some(2);
    c.files.sources.push(second);
    let data = Dataset::load(&c.spec(), &Words::chatml(), None).unwrap();
    assert_eq!(
        (data.stats.rows, data.origins[2].file, data.origins[2].number),
        (11, 1, 1)
    );
}
