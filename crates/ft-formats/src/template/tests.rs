//! Tests of `template`: what is read and written, and every kind of lie that is refused.

use super::*;
use serde_json::json;

const GOLDEN: &str = include_str!("../testdata/templates.json");

fn tokenizer(config: Value) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    write_tokenizer(dir.path(), config);
    Tokenizer::load(dir.path()).unwrap()
}

fn write_tokenizer(dir: &Path, mut config: Value) {
    let tokenizer =
        json!({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"<s>": 0, "<end>": 1}, "unk_token": "<s>"}});
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    config["bos_token"] = json!("<s>");
    config["eos_token"] = json!({"content": "<end>"});
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}

fn template(text: &str) -> ChatTemplate {
    ChatTemplate::from_text(text, "t.jinja", &tokenizer(json!({}))).unwrap()
}

fn render(text: &str) -> Result<String> {
    template(text).render(&[json!({"role": "user", "content": "hi"})], None, false)
}

/// The refusal, which must come soon.
#[track_caller]
fn fails(text: &str) -> String {
    let t = template(text);
    let start = std::time::Instant::now();
    let e = t
        .render(&[json!({"role": "user", "content": "hi"})], None, false)
        .unwrap_err()
        .to_string();
    assert!(
        start.elapsed() < std::time::Duration::from_secs(15),
        "took {:?}: {e}",
        start.elapsed()
    );
    assert!(e.contains("t.jinja"), "{e}");
    e
}

#[test]
fn renders_what_python_renders() {
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    let mut count = 0;
    for case in golden["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let t = template(golden["templates"][name].as_str().unwrap());
        let messages = golden["chats"][case["chat"].as_str().unwrap()].as_array().unwrap();
        let tools = (case["tools"] == true).then_some(&golden["tools"]);
        let got = t.render(messages, tools, case["prompt"] == true);
        let place = format!(
            "{name} on {} (tools {}, prompt {})",
            case["chat"], case["tools"], case["prompt"]
        );
        match case["text"].as_str() {
            Some(text) => assert_eq!(got.unwrap(), text, "{place}"),
            None => {
                let message = case["error"].as_str().unwrap();
                let e = got.unwrap_err().to_string();
                assert!(e.contains(message) && e.contains("refuses"), "{place}: {e}");
            }
        }
        count += 1;
    }
    assert!(count > 60);
}

#[test]
fn the_place_of_the_template_follows_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let from = |config: Value| {
        write_tokenizer(dir.path(), config);
        let t = Tokenizer::load(dir.path()).unwrap();
        ChatTemplate::from_dir(dir.path(), &t)
    };
    let text = |t: ChatTemplate, tools: Option<&Value>| t.render(&[json!({"role": "user"})], tools, false).unwrap();
    assert!(from(json!({})).unwrap().is_none());
    assert!(from(json!({"chat_template": null})).unwrap().is_none());
    assert_eq!(
        text(
            from(json!({"chat_template": "one{{ eos_token }}"})).unwrap().unwrap(),
            None
        ),
        "one<end>"
    );
    let list =
        json!({"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]});
    assert_eq!(text(from(list.clone()).unwrap().unwrap(), None), "two");
    assert_eq!(text(from(list).unwrap().unwrap(), Some(&json!([{}]))), "tools");
    let e = from(json!({"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]})).unwrap_err();
    assert!(e.to_string().contains("a, b"), "{e}");
    assert!(
        from(json!({"chat_template": 5}))
            .unwrap_err()
            .to_string()
            .contains("found 5")
    );
    std::fs::write(dir.path().join("chat_template.jinja"), "file\n").unwrap();
    assert_eq!(
        text(from(json!({"chat_template": "one"})).unwrap().unwrap(), None),
        "file"
    );
}

#[test]
fn reasoning_is_found_under_each_name() {
    let t = template("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}");
    for name in ["reasoning", "thinking", "reasoning_content"] {
        assert_eq!(
            t.render(&[json!({"role": "assistant", name: "r"})], None, false)
                .unwrap(),
            "rr"
        );
    }
}

#[test]
fn a_template_that_loops_comes_to_an_end() {
    let nested = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    assert!(fails(nested).contains("too much work"));
    let slow = "{% for a in range(100000) %}{% set x = range(100000) | join %}{% endfor %}";
    assert!(fails(slow).contains("too much work"));
    assert!(fails("{% for a in range(1000000000) %}{% endfor %}").contains("too many elements"));
    let e = fails("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}");
    assert!(e.contains("recursion"), "{e}");
}

#[test]
fn a_template_that_prints_without_end_is_stopped() {
    let e = fails("{% set x = 'x' * 10000000 %}{% for a in range(100) %}{{ x }}{% endfor %}");
    assert!(e.contains("more than 64 MiB"), "{e}");
    assert!(fails("{{ 'x' * 1000000000 }}").contains("more than 64 MiB"));
    assert!(fails("{{ 'x' | indent(1000000000, true) }}").contains("more than 64 MiB"));
}

/// Row D8.
#[test]
fn nothing_outside_can_be_reached() {
    for text in [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends '/etc/passwd' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lookup('env', 'HOME') }}",
        "{{ open('/etc/passwd') }}",
    ] {
        fails(text);
    }
    assert_eq!(render("{{ env }}{{ HOME }}{{ config }}").unwrap(), "");
    fails("{{ self }}");
    fails("{{ self._TemplateReference__context }}");
}

#[test]
fn wrong_templates_say_where() {
    let t = tokenizer(json!({}));
    let e = ChatTemplate::from_text("a\n{% for x in %}", "d/t.jinja", &t)
        .unwrap_err()
        .to_string();
    assert!(e.contains("d/t.jinja:2") && e.contains("not valid"), "{e}");
    assert!(fails("a\n\n{{ nothing.at.all }}").contains("t.jinja:3"));
    assert!(fails("{{ nothing() }}").contains("nothing"));
    assert!(fails("{{ raise_exception('no ' ~ messages[0].role) }}").contains("refuses this conversation: no user"));
    let long = "x".repeat(TEMPLATE_LIMIT + 1);
    assert!(
        ChatTemplate::from_text(&long, "t", &t)
            .unwrap_err()
            .to_string()
            .contains("too large")
    );
    // Loading runs nothing.
    ChatTemplate::from_text("{{ raise_exception('ran') }}", "t", &t).unwrap();
}

#[test]
fn generation_tags_are_a_block_that_changes_no_text() {
    assert!(ChatTemplate::from_text("{%}", "t.jinja", &tokenizer(json!({}))).is_err());
    assert_eq!(render("{% generation %}\nx\n{%- endgeneration %}y").unwrap(), "xy");
}

#[test]
fn what_is_not_supported_is_said() {
    let e = fails("a\n{{ 'x' | pprint }}");
    assert!(
        e.contains("the filter `pprint`, which ft does not support") && e.contains("t.jinja:2"),
        "{e}"
    );
    let e = ChatTemplate::from_text(
        "{% autoescape true %}{% endautoescape %}",
        "t.jinja",
        &tokenizer(json!({})),
    )
    .unwrap_err()
    .to_string();
    assert!(e.contains("does not support") && e.contains("t.jinja:1"), "{e}");
}

#[test]
fn answers_cross_the_pipe_as_they_are() {
    let answers: Vec<RenderResult> = vec![
        Ok(RenderedChat {
            text: "héllo\0".into(),
            generation: vec![0..3, 3..3],
        }),
        Err(Fail {
            kind: FailKind::Unsupported,
            text: "ü".into(),
            line: Some(0),
        }),
        Err(Fail {
            kind: FailKind::Limit,
            text: String::new(),
            line: None,
        }),
    ];
    let mut bytes = Vec::new();
    wire::put_job(&mut bytes, &answers);
    let body = &bytes[8..];
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), body.len() as u64);
    let shown = |answers: &[RenderResult]| format!("{answers:?}");
    assert_eq!(shown(&wire::JobReader(body).job(3).unwrap()), shown(&answers));
    // Bytes that are cut short, too many, or false are no answer.
    for n in 0..body.len() {
        assert!(wire::JobReader(&body[..n]).job(3).is_none(), "{n}");
    }
    assert!(wire::JobReader(body).job(2).is_none());
    for i in 0..body.len() {
        let mut other = body.to_vec();
        other[i] ^= 0xff;
        let _ = wire::JobReader(&other).job(3);
    }
    let mut range = body.to_vec();
    range[24] = 2;
    assert!(
        wire::JobReader(&range).job(3).is_none(),
        "a range inside of a character"
    );
}

#[test]
fn generation_blocks_give_their_ranges() {
    let t = template(
        "{% for m in messages %}[{{ m.role }}]\n{% if m.role == 'assistant' %}{%- generation -%}\n  {{ m.content }}</s>\n\
         {%- endgeneration %}\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    );
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let chat = [
        turn("user", "héllo"),
        turn("assistant", "wörld"),
        turn("user", "x"),
        turn("assistant", ""),
    ];
    let got = t.render_marked(&chat, None, false).unwrap();
    let parts: Vec<&str> = got.generation.iter().map(|r| &got.text[r.clone()]).collect();
    assert_eq!(parts, ["wörld</s>", "</s>"]);
    assert!(t.marks_generation(None));
    assert_eq!(got.text, t.render(&chat, None, false).unwrap());
    let plain = template("{{ messages[0].content }}");
    assert!(!plain.marks_generation(None));
    assert!(plain.render_marked(&chat, None, false).unwrap().generation.is_empty());
}

#[test]
fn the_date_is_todays() {
    let year = render("{{ strftime_now('%Y') }}").unwrap();
    assert!(year.len() == 4 && year.as_str() >= "2024", "{year}");
    assert_eq!(
        render("{{ strftime_now('') }}{{ strftime_now('100%%') }}").unwrap(),
        "100%"
    );
}

#[test]
fn without_a_process_only_a_file_of_the_user_is_rendered_and_a_warning_says_so() {
    use std::sync::Mutex;
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let why = || Error::new("cannot start a process with limits").cause("no more processes");
    let of_model = template("x").without_process::<()>(why());
    let e = of_model.unwrap().unwrap_err().to_string();
    assert!(
        e.contains("cannot start") && e.contains("`ChatTemplate::from_file`"),
        "{e}"
    );
    let of_user = template("x").trusted(|line| SAID.lock().unwrap().push(line.to_string()));
    for _ in 0..3 {
        assert!(of_user.without_process::<()>(why()).is_none());
    }
    let said = SAID.lock().unwrap();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("t.jinja is rendered in this process") && said[0].contains("no more processes"),
        "{said:?}"
    );
}

#[test]
fn given_variables_reach_the_template_and_are_saved_with_it() {
    let text =
        "  {%- if enable_thinking is defined and not enable_thinking %}off{% endif %}{{ date }} {{ bos_token }}\n";
    let chat = [json!({"role": "user", "content": "hi"})];
    let kwargs =
        json!({"enable_thinking": false, "date": "a \"b\"\n\\ ü", "bos_token": "B", "l": [1, 0.5, "x"], "m": 3});
    let kwargs = kwargs.as_object().unwrap();
    let plain = template(text);
    assert_eq!(plain.render(&chat, None, false).unwrap(), " <s>");
    assert!(plain.source_with_kwargs() == text && !plain.has_kwargs());
    let given = template(text).with_kwargs(kwargs).unwrap();
    let wanted = "offa \"b\"\n\\ ü B";
    assert_eq!(given.render(&chat, None, false).unwrap(), wanted);
    assert_eq!(given.unread_kwargs(), ["l", "m"]);
    assert!(given.has_kwargs());
    // The saved text has them as defaults, and other values replace them.
    let saved = given.source_with_kwargs();
    assert!(!saved.contains("set l") && saved.ends_with(text), "{saved}");
    assert_eq!(template(&saved).render(&chat, None, false).unwrap(), wanted);
    let other = json!({"enable_thinking": true, "date": "d"});
    let other = template(&saved).with_kwargs(other.as_object().unwrap()).unwrap();
    assert_eq!(other.render(&chat, None, false).unwrap(), "d B");
    assert!(other.unread_kwargs().is_empty());
    // Names that are defined in every rendering.
    let text = "{{ documents }}{{ range }}";
    let named = json!({"documents": ["d"], "range": 3});
    let named = template(text).with_kwargs(named.as_object().unwrap()).unwrap();
    assert_eq!(named.render(&chat, None, false).unwrap(), "['d']3");
    let saved = named.source_with_kwargs();
    assert_eq!(
        template(&saved).render(&chat, None, false).unwrap(),
        "['d']3",
        "{saved}"
    );
    let error = template(text)
        .with_kwargs(json!({"messages": []}).as_object().unwrap())
        .unwrap_err();
    assert!(
        error.to_string().contains("`messages` is a part of the conversation"),
        "{error}"
    );
}

#[test]
fn both_templates_of_a_model_get_the_variables() {
    let config = json!({"chat_template": [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "T{{ a }}{{ b }}"}]});
    let dir = tempfile::tempdir().unwrap();
    write_tokenizer(dir.path(), config);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let kwargs = json!({"a": [true, {"k": null}], "b": 1.5e-9});
    let both = ChatTemplate::from_dir(dir.path(), &tokenizer).unwrap().unwrap();
    let both = both.with_kwargs(kwargs.as_object().unwrap()).unwrap();
    assert!(both.unread_kwargs().is_empty());
    let chat = [json!({"role": "user", "content": "hi"})];
    let tools = json!([{}]);
    assert_eq!(both.render(&chat, None, false).unwrap(), "[True, {'k': None}]");
    let saved = both.tools_source_with_kwargs().unwrap();
    let wanted = both.render(&chat, Some(&tools), false).unwrap();
    assert_eq!(wanted, "T[True, {'k': None}]1.5e-09");
    assert_eq!(template(&saved).render(&chat, None, false).unwrap(), wanted);
}

#[test]
fn templates_have_names() {
    for own in named::NAMED {
        let tokenizer = tokenizer(json!({}));
        let chat = [
            json!({"role": "user", "content": "2+2?"}),
            json!({"role": "assistant", "content": "4"}),
        ];
        let template = own.template(&tokenizer).unwrap();
        let text = template.render(&chat, None, false).unwrap();
        assert!(text.contains("2+2?") && text.contains('4'), "{}: {text:?}", own.name);
        let prompt = template.render(&chat[..1], None, true).unwrap();
        assert!(text.starts_with(&prompt), "{}: {prompt:?} {text:?}", own.name);
        // Without a marker in the vocabulary there is nothing to stop at.
        assert!(own.turn_end(&tokenizer).is_none() && own.missing(&tokenizer).len() == own.markers.len());
        assert_eq!(named::find(own.name).unwrap().name, own.name);
    }
    assert_eq!(named::find("Llama3_1").unwrap().name, "llama3.1");
    assert_eq!(named::find("qwen25").unwrap().name, "qwen2.5");
    assert!(named::find("./chatml").is_none() && named::find("chatml.jinja").is_none() && named::find("x").is_none());
}

/// `tests/parity/make_templates.py`: the texts of the real templates.
#[test]
fn templates_by_name_render_as_the_real_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/templates.json");
    let golden: Value = serde_json::from_str(&files::read_text(&path).unwrap()).unwrap();
    let tokenizer = tokenizer(json!({}));
    let cases = golden["named"].as_array().unwrap();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let template = named::find(name).unwrap().template(&tokenizer).unwrap();
        let template = template.with_kwargs(case["kwargs"].as_object().unwrap()).unwrap();
        let messages = golden["chats"][case["chat"].as_str().unwrap()].as_array().unwrap();
        let tools = (case["tools"] == true).then_some(&golden["tools"]);
        let got = template.render(messages, tools, case["prompt"] == true).unwrap();
        // The tokens of this tokenizer in place of those of the real ones.
        let wanted = case["text"].as_str().unwrap();
        let wanted = wanted.replace("<|begin_of_text|>", "<s>").replace("<bos>", "<s>");
        // Ends with the end of sequence.
        let wanted = match wanted.strip_suffix("<|im_end|>") {
            Some(text) if name == "phi3" => format!("{text}<end>"),
            _ => wanted,
        };
        assert_eq!(got, wanted, "{name} {}", case["chat"]);
    }
    assert!(cases.len() > 200);
}
