//! Tests of templates with special turn formats: thoughts, tool answers inside a turn, different ends of inner turns,
//! `{% generation %}` blocks. The templates have the structure of well-known ones.

use super::{EncodedRow, Encoder};
use crate::codec::{ChatRender, TextCodec};
use crate::testing::*;
use crate::{RowFormat, TrainOn};
use ft_base::Result;
use ft_formats::ChatTemplate;
use serde_json::{Value, json};

/// The generation prompt contains an empty thought; turns after the last question contain their own.
const NO_THOUGHT: &str = r#"{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% if ns.last == -1 %}{{ raise_exception('no user') }}{% endif %}
{% for m in messages %}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{{ '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"#;

/// Tool answers are printed inside the turn that called them, before its text; the turn continues until a question.
const ONE_TURN: &str = r#"{% set ns = namespace(open=false, stop=false) %}
{% for m in messages %}
{% if m.role == 'user' %}{{ '<|turn|>user\n' + m.content + '<|turn_end|>\n' }}{% set ns.open = false %}
{% elif m.role == 'assistant' %}
{% if not ns.open %}{{ '<|turn|>model\n' }}{% endif %}
{% if m.reasoning_content %}{{ '<|thought|>' + m.reasoning_content + '<|thought_end|>' }}{% endif %}
{% for call in m.tool_calls or [] %}{{ '<|call|>' + call.function.name + '<|call_end|>' }}{% endfor %}
{% set ns.stop = false %}{% set ns.open = false %}
{% for k in range(loop.index0 + 1, messages | length) %}
{% if messages[k].role != 'tool' %}{% if not ns.stop and messages[k].role == 'assistant' %}{% set ns.open = true %}{% endif %}{% set ns.stop = true %}{% endif %}
{% if not ns.stop %}{{ '<|answer|>value:' + messages[k].content + '<|answer_end|>' }}{% endif %}
{% endfor %}
{{ m.content or '' }}
{%- if m.tool_calls and loop.last %}{{ '<|answer|>' }}
{%- elif not ns.open %}{{ '<|turn_end|>\n' }}
{%- endif %}
{% endif %}
{% endfor %}
{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<|turn|>model\n' }}{% endif %}"#;

/// Inner turns end with another token than the last one, and lose their thoughts.
const CHANNELS: &str = r#"{% for m in messages %}
{% if m.role == 'assistant' %}
{% if loop.last and not add_generation_prompt %}
{% if m.reasoning_content %}{{ '<|start|>assistant analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}
{{ '<|start|>assistant final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant final<|message|>' + m.content + '<|end|>' }}{% endif %}
{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"#;

const MARKED: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
     {% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}\
     {% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn words() -> Words {
    Words::new(
        &[
            "<|im_start|>",
            "<|im_end|>",
            "<|turn|>",
            "<|turn_end|>",
            "<|thought|>",
            "<|thought_end|>",
            "<|call|>",
            "<|call_end|>",
            "<|answer|>",
            "<|answer_end|>",
            "<|start|>",
            "<|message|>",
            "<|end|>",
            "<|return|>",
        ],
        None,
        Some("<|im_end|>"),
    )
}

fn encode(codec: &dyn TextCodec, template: &dyn ChatRender, train_on: TrainOn, value: Value) -> Result<EncodedRow> {
    let encoder = Encoder {
        codec,
        template: Some(template),
        train_on,
        max_length: 4096,
        embedding_rows: 1 << 20,
    };
    let format = match value.get("messages") {
        Some(_) => RowFormat::Messages,
        None => RowFormat::PromptCompletion,
    };
    encoder.encode(&understand(&row(value), format)?)
}

/// Runs of trained tokens as text.
fn runs(codec: &dyn TextCodec, encoded: &EncodedRow) -> Vec<String> {
    let e = &encoded.example;
    let mut out: Vec<Vec<u32>> = Vec::new();
    for t in 0..e.ids.len() {
        if e.trained[t] && (t == 0 || !e.trained[t - 1]) {
            out.push(Vec::new());
        }
        if e.trained[t] {
            out.last_mut().unwrap().push(e.ids[t]);
        }
    }
    out.iter().map(|run| codec.decode(run).unwrap()).collect()
}

fn trained(template: &'static str, codec: &Words, messages: Value) -> Vec<String> {
    let value = json!({"messages": messages});
    runs(
        codec,
        &encode(codec, &Jinja::new(template), TrainOn::Assistant, value).unwrap(),
    )
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn answer(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn thought(reasoning: &str, text: &str) -> Value {
    json!({"role": "assistant", "reasoning_content": reasoning, "content": text})
}

fn call(name: &str, text: Value) -> Value {
    json!({"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": {"name": name, "arguments": {"a": "b"}}}]})
}

fn tool(text: &str) -> Value {
    json!({"role": "tool", "content": text})
}

#[test]
fn a_thought_in_the_place_of_the_prompts_empty_one_is_trained() {
    let w = words();
    let got = trained(NO_THOUGHT, &w, json!([user("q"), thought("hm well", "yes")]));
    assert_eq!(got, ["hm well\n</think>\n\nyes<|im_end|>"]);
    // The empty thought is part of the prompt, so it is not trained.
    let got = trained(NO_THOUGHT, &w, json!([user("q"), answer("yes")]));
    assert_eq!(got, ["yes<|im_end|>"]);
    // An inner turn has no thought.
    let got = trained(
        NO_THOUGHT,
        &w,
        json!([user("q"), thought("hm", "yes"), user("r"), thought("so", "no")]),
    );
    assert_eq!(got, ["yes<|im_end|>", "so\n</think>\n\nno<|im_end|>"]);
    // Also after a tool answer.
    let steps = json!([user("q"), call("rain", json!("")), tool("sun"), thought("now", "dry")]);
    assert_eq!(
        trained(NO_THOUGHT, &w, steps),
        [
            "<tool_call>rain</tool_call><|im_end|>",
            "now\n</think>\n\ndry<|im_end|>"
        ]
    );
}

#[test]
fn an_assistant_that_speaks_first_is_trained_where_the_template_prints_it() {
    let w = words();
    let got = trained(NO_THOUGHT, &w, json!([answer("Hello you"), user("q"), answer("yes")]));
    assert_eq!(got, ["Hello you<|im_end|>", "yes<|im_end|>"]);
    let got = trained(CHANNELS, &w, json!([answer("Hello you"), user("q"), answer("yes")]));
    assert_eq!(got[0].trim_start_matches(" final<|message|>"), "Hello you<|end|>");
    // A conversation that the template refuses is an error.
    let alone = json!({"messages": [answer("Hello you")]});
    let e = encode(&w, &Jinja::new(NO_THOUGHT), TrainOn::Assistant, alone).unwrap_err();
    assert!(e.to_string().contains("no user"), "{e}");
}

#[test]
fn answers_of_tools_inside_a_turn_are_not_trained() {
    let w = words();
    let one = json!([user("q"), call("rain", Value::Null), tool("sun there"), answer("dry")]);
    assert_eq!(
        trained(ONE_TURN, &w, one),
        ["<|call|>rain<|call_end|>", "dry<|turn_end|>"]
    );
    // Tool answers before the text of the calling turn, several of them, and over several steps.
    let said = json!([
        user("q"),
        call("rain", json!("wait")),
        tool("sun there"),
        answer("dry"),
        user("r"),
        answer("ok")
    ]);
    assert_eq!(
        trained(ONE_TURN, &w, said),
        ["<|call|>rain<|call_end|>", "waitdry<|turn_end|>", "ok<|turn_end|>"]
    );
    let steps = json!([
        user("q"),
        call("rain", json!("")),
        tool("sun"),
        tool("sun"),
        thought("so", ""),
        call("clock", json!("")),
        tool("rain"),
        thought("now", "dry"),
        user("r"),
        answer("ok"),
    ]);
    assert_eq!(
        trained(ONE_TURN, &w, steps),
        [
            "<|call|>rain<|call_end|>",
            "<|thought|>so<|thought_end|><|call|>clock<|call_end|>",
            "<|thought|>now<|thought_end|>dry<|turn_end|>",
            "ok<|turn_end|>"
        ]
    );
    // The token that opens the answer belongs to the assistant if it is a stop id.
    let mut stops = words();
    stops.stops = vec![stops.id("<|answer|>")];
    let one = json!([user("q"), call("rain", json!("")), tool("sun there"), answer("dry")]);
    assert_eq!(
        trained(ONE_TURN, &stops, one),
        ["<|call|>rain<|call_end|><|answer|>", "dry<|turn_end|>"]
    );
}

#[test]
fn the_end_of_an_inner_turn_is_trained() {
    let w = words();
    let two = json!([user("q"), answer("yes"), user("r"), thought("hm", "no")]);
    assert_eq!(
        trained(CHANNELS, &w, two),
        [
            " final<|message|>yes<|end|>",
            " analysis<|message|>hm<|end|><|start|>assistant final<|message|>no<|return|>"
        ]
    );
    let thoughts = json!([user("q"), thought("hm", "yes"), user("r"), answer("no")]);
    assert_eq!(trained(CHANNELS, &w, thoughts)[0], " final<|message|>yes<|end|>");
}

#[test]
fn generation_blocks_decide() {
    let codec = real();
    let template = ChatTemplate::from_text(MARKED, "t.jinja", &codec).unwrap();
    let of = |train_on, value: Value| runs(&codec, &encode(&codec, &template, train_on, value).unwrap());
    let talk = || json!({"messages": [user("q"), answer("one"), user("r"), answer("two three")]});
    assert_eq!(of(TrainOn::Assistant, talk()), ["one<|im_end|>", "two three<|im_end|>"]);
    assert_eq!(of(TrainOn::Completion, talk()), ["two three<|im_end|>"]);
    assert_eq!(of(TrainOn::All, talk()).len(), 1);
    // Assistant turns of a prompt are not trained.
    let prompt = json!({"prompt": [user("q"), answer("one"), user("r")], "completion": [answer("two three")]});
    assert_eq!(of(TrainOn::Assistant, prompt), ["two three<|im_end|>"]);
    // Several steps in one answer.
    let steps = json!({"messages": [user("q"), call("rain", json!("")), tool("sun"), answer("dry")]});
    assert_eq!(
        of(TrainOn::Assistant, steps),
        ["<call>rain</call><|im_end|>", "dry<|im_end|>"]
    );

    // A block without the end of the turn is used unchanged, and the open turn is counted.
    let open = MARKED.replace(
        "{{ '<|im_end|>' }}{% endgeneration %}",
        "{% endgeneration %}{{ '<|im_end|>' }}",
    );
    let template = ChatTemplate::from_text(&open, "t.jinja", &codec).unwrap();
    let encoded = encode(&codec, &template, TrainOn::Assistant, talk()).unwrap();
    assert_eq!(runs(&codec, &encoded), ["one", "two three"]);
    assert_eq!(encoded.open_turns, 1);
}

#[test]
fn null_content_beside_a_call_is_not_printed() {
    let codec = real();
    for content in [
        "{{ m.content }}",
        "{{ m['content'] | trim }}",
        "{% if 'content' in m %}{{ m.content }}{% endif %}",
    ] {
        let source = format!(
            "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}{content}{{% for c in m.tool_calls or [] %}}{{{{ '<call>' + c.function.name }}}}{{% endfor %}}\
             {{{{ '<|im_end|>' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
        );
        let template = ChatTemplate::from_text(&source, "t.jinja", &codec).unwrap();
        let value = json!({"messages": [user("q"), call("rain", Value::Null), tool("sun"), answer("dry")]});
        let encoded = encode(&codec, &template, TrainOn::Assistant, value).unwrap();
        assert_eq!(
            runs(&codec, &encoded),
            ["<call>rain<|im_end|>", "dry<|im_end|>"],
            "{content}"
        );
    }
}

const HEADER: &str = "{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>' + m.role + '\n' }}";

#[test]
fn weights_hold_inside_generation_blocks_too() {
    let codec = real();
    let bad = |text: &str| json!({"role": "assistant", "content": text, "weight": 0});
    let talks = [
        (
            json!([user("q"), bad("BAD"), user("r"), answer("two")]),
            vec!["two<|im_end|>"],
        ),
        (
            json!([user("q"), answer("one"), user("r"), bad("BAD")]),
            vec!["one<|im_end|>"],
        ),
        (
            json!([
                user("q"),
                answer("one"),
                user("r"),
                bad("BAD"),
                user("s"),
                answer("two")
            ]),
            vec!["one<|im_end|>", "two<|im_end|>"],
        ),
        (json!([user("q"), bad("BAD")]), vec![]),
    ];
    // Also a block with the header of the turn, and one block for all messages.
    let with_header = MARKED
        .replace(
            "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}",
            HEADER,
        )
        .replace("{% else %}", "{% else %}{{ '<|im_start|>' + m.role + '\n' }}");
    assert!(with_header.contains(HEADER));
    for (source, header) in [(MARKED, ""), (with_header.as_str(), "<|im_start|>assistant\n")] {
        let template = ChatTemplate::from_text(source, "t.jinja", &codec).unwrap();
        let of = |train_on, messages: &Value| {
            runs(
                &codec,
                &encode(&codec, &template, train_on, json!({"messages": messages})).unwrap(),
            )
        };
        for (messages, expected) in &talks {
            let expected: Vec<String> = expected.iter().map(|run| format!("{header}{run}")).collect();
            assert_eq!(of(TrainOn::Assistant, messages), expected, "{messages}");
            assert!(!of(TrainOn::All, messages).concat().contains("BAD"), "{messages}");
        }
    }
    let around = MARKED
        .replace("{% generation %}", "")
        .replace("{% endgeneration %}", "");
    let around = format!("{{% generation %}}{around}{{% endgeneration %}}");
    let template = ChatTemplate::from_text(&around, "t.jinja", &codec).unwrap();
    let row = encode(&codec, &template, TrainOn::Assistant, json!({"messages": talks[2].0})).unwrap();
    let text = runs(&codec, &row).concat();
    assert!(
        text.contains("one") && text.contains("two") && !text.contains("BAD"),
        "{text}"
    );
}

#[test]
fn all_tokens_of_a_last_character_are_those_of_its_turn_or_block() {
    let codec = real();
    assert!(codec.encode("\u{1f980}", false).unwrap().len() > 1);
    let open = MARKED.replace(
        "{{ '<|im_end|>' }}{% endgeneration %}",
        "{% endgeneration %}{{ '<|im_end|>' }}",
    );
    let template = ChatTemplate::from_text(&open, "t.jinja", &codec).unwrap();
    let talk = json!({"messages": [user("q"), answer("one \u{1f980}")]});
    let row = encode(&codec, &template, TrainOn::Assistant, talk).unwrap();
    assert_eq!(runs(&codec, &row), ["one \u{1f980}"]);
    // The output of a tool inside a turn.
    let inside = ONE_TURN
        .replace(" + '<|answer_end|>'", "")
        .replace("<|turn_end|>", "<|im_end|>")
        .replace("<|turn|>", "<|im_start|>");
    let template = ChatTemplate::from_text(&inside, "t.jinja", &codec).unwrap();
    let steps = json!({"messages": [user("q"), call("rain", json!("wait")), tool("sun \u{1f980}"), answer("dry")]});
    let row = encode(&codec, &template, TrainOn::Assistant, steps).unwrap();
    assert_eq!(runs(&codec, &row), ["<|call|>rain<|call_end|>", "waitdry<|im_end|>"]);
}

/// A template that says how many messages there are, so no rendering of a part begins the text.
fn counted(content: &str) -> String {
    let marked = MARKED.replacen("{{ m.content }}", content, 1);
    assert_ne!(marked, MARKED);
    format!("{{{{ (messages | length) ~ ' messages\n' }}}}{marked}")
}

#[test]
fn only_turns_that_the_marks_do_not_tell_apart_are_looked_for() {
    let codec = real();
    let bad = json!({"role": "assistant", "content": "BAD", "weight": 0});
    let of = |source: &str, train_on, messages: Value| {
        let template = ChatTemplate::from_text(source, "t.jinja", &codec).unwrap();
        encode(&codec, &template, train_on, json!({"messages": messages})).map(|row| runs(&codec, &row))
    };
    // No probe can find a content that is printed twice, but each answer has its own block.
    let twice = counted("{{ m.content }} {{ m.content }}");
    let talk = json!([user("q"), answer("one"), user("r"), bad]);
    let found = of(&twice, TrainOn::Assistant, talk.clone()).unwrap();
    assert_eq!(found, ["one one<|im_end|>"]);
    let all = of(&twice, TrainOn::All, talk).unwrap().concat();
    assert!(all.contains("one one<|im_end|>") && !all.contains("BAD"), "{all}");
    // The block of an answer does not contain its text: with all tokens, only the excluded answer is looked for.
    let changed = counted("{{ m.content | upper if m.name == 'x' else m.content }}");
    let loud = json!({"role": "assistant", "name": "x", "content": "loud"});
    let talk = json!([user("q"), bad, user("r"), loud]);
    let all = of(&changed, TrainOn::All, talk.clone()).unwrap().concat();
    assert!(all.contains("LOUD<|im_end|>") && !all.contains("BAD"), "{all}");
    // The turn of the other one is needed to know which block is trained.
    let e = of(&changed, TrainOn::Assistant, talk).unwrap_err().to_string();
    assert!(e.contains("assistant message 4"), "{e}");
}

#[test]
fn what_a_tool_prints_inside_an_excluded_turn_is_trained_with_all() {
    let w = words();
    let mut excluded = call("rain", json!("wait"));
    excluded["weight"] = json!(0);
    let messages = json!([
        user("q"),
        excluded,
        tool("sun there"),
        thought("so", "dry"),
        user("r"),
        answer("ok")
    ]);
    let row = encode(&w, &Jinja::new(ONE_TURN), TrainOn::All, json!({"messages": messages}));
    let found = runs(&w, &row.unwrap()).concat();
    assert!(
        found.contains("sun there") && found.contains("dry<|turn_end|>"),
        "{found}"
    );
    // The turn goes on after what the tool printed.
    assert!(!found.contains("wait") && !found.contains("<|call|>"), "{found}");
}
