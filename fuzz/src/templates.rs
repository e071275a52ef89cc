//! Chat templates of a model directory, and conversations of strangers in the templates that ft has.

use super::models::TOKENIZER;
use super::{good_tokenizer, put, said};
use ft::formats::template::named::{self, NAMED};
use ft::formats::template::{RenderJob, RenderedChat};
use ft::formats::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};
use std::fs;
use std::sync::OnceLock;

/// Messages of a conversation that are rendered: each beginning is a rendering of its own.
const MOST: usize = 4;

/// The text is the same each time, and for many conversations at once; the ranges in it are whole characters.
fn check(template: &ChatTemplate, messages: &[Value], tools: Option<&Value>, prompt: bool) -> Option<RenderedChat> {
    let first = template.render_marked(messages, tools, prompt);
    if let Ok(chat) = &first {
        for range in &chat.generation {
            assert!(range.start <= range.end, "{range:?}");
            // Also that it is in the text.
            assert!(chat.text.is_char_boundary(range.start), "{range:?}");
            assert!(chat.text.is_char_boundary(range.end), "{range:?}");
        }
    }
    template.marks_generation(tools);
    // A template that reads the clock has another text after a second.
    if template.identity().is_none() {
        return said(first);
    }
    let wanted = match &first {
        Ok(chat) => Ok(chat.text.clone()),
        Err(e) => Err(e.to_string()),
    };
    let again = template.render(messages, tools, prompt);
    assert_eq!(again.map_err(|e| e.to_string()), wanted);
    let first = first.ok()?;
    let mut renderings: Vec<(usize, bool)> = (1..messages.len()).map(|n| (n, false)).collect();
    renderings.push((messages.len(), prompt));
    let job = RenderJob {
        messages,
        tools,
        renderings: renderings.clone(),
    };
    let many = template.render_many(&[job.clone(), job]);
    assert!(many.len() == 2 && many[0] == many[1]);
    assert_eq!(many[0].len(), renderings.len());
    assert_eq!(many[0].last(), Some(&Some(first.clone())));
    for ((upto, prompt), found) in renderings.into_iter().zip(&many[0]) {
        let alone = said(template.render_marked(&messages[..upto], tools, prompt));
        // The limits depend on the length of the whole conversation.
        if let (Some(found), Some(alone)) = (found, &alone) {
            assert_eq!(found, alone, "the first {upto} messages");
        }
    }
    Some(first)
}

/// The files of a model directory that may have templates; an empty one is absent.
const FILES: [&str; 4] = [
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
];

/// The files of `FILES`, the variables of the user and a conversation, with zero bytes between them.
pub fn template_dir(bytes: &[u8]) {
    let mut parts = bytes.splitn(FILES.len() + 2, |byte| *byte == 0);
    let path = put("templates/tokenizer.json", TOKENIZER.as_bytes());
    let dir = path.parent().unwrap();
    for name in FILES {
        match parts.next().unwrap_or_default() {
            [] => drop(fs::remove_file(dir.join(name))),
            content => drop(put(&format!("templates/{name}"), content)),
        }
    }
    let mut json = || serde_json::from_slice::<Value>(parts.next().unwrap_or_default()).ok();
    let (kwargs, messages) = (json(), json());
    let Some(tokenizer) = said(Tokenizer::load(dir)) else {
        return;
    };
    let Some(Some(mut template)) = said(ChatTemplate::from_dir(dir, &tokenizer)) else {
        return;
    };
    if let Some(Value::Object(kwargs)) = kwargs {
        let Some(with) = said(template.with_kwargs(&kwargs)) else {
            return;
        };
        assert!(with.unread_kwargs().into_iter().all(|name| kwargs.contains_key(name)));
        template = with;
    }
    let template = template.trusted(|_| {});
    let messages = match messages {
        Some(Value::Array(list)) => list.into_iter().take(MOST).collect(),
        _ => vec![json!({"role": "user", "content": "Hi \u{e9}"})],
    };
    check(&template, &messages, None, true);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    if template.tools_source_with_kwargs().is_some() {
        check(&template, &messages, Some(&tools), false);
    }
}

fn plain(at: usize) -> &'static ChatTemplate {
    static ALL: OnceLock<Vec<ChatTemplate>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let read = |own: &named::NamedTemplate| own.template(good_tokenizer()).unwrap().trusted(|_| {});
        NAMED.iter().map(read).collect()
    });
    &all[at]
}

/// A conversation in a template that ft has. The first line is the name of the template; then JSON: a list of messages, or an object
/// with `messages`, `tools`, `prompt` and `kwargs`.
pub fn messages(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == b'\n');
    let name = String::from_utf8_lossy(parts.next().unwrap_or_default());
    let first = bytes.first().copied().map_or(0, usize::from);
    let own = named::find(&name).and_then(|own| NAMED.iter().position(|one| one.name == own.name));
    let at = own.unwrap_or(first % NAMED.len());
    let Ok(row) = serde_json::from_slice::<Value>(parts.next().unwrap_or_default()) else {
        return;
    };
    let list = row.get("messages").unwrap_or(&row).as_array();
    let Some(list) = list.map(|list| &list[..list.len().min(MOST)]) else {
        return;
    };
    let prompt = row.get("prompt").and_then(Value::as_bool).unwrap_or(true);
    let tools = row.get("tools");
    let Some(Value::Object(kwargs)) = row.get("kwargs") else {
        check(plain(at), list, tools, prompt);
        return;
    };
    with_kwargs(at, kwargs, list, tools, prompt);
}

/// The saved template has the variables as its defaults, and the same text.
fn with_kwargs(at: usize, kwargs: &Map<String, Value>, list: &[Value], tools: Option<&Value>, prompt: bool) {
    let template = NAMED[at].template(good_tokenizer()).unwrap().trusted(|_| {});
    let Some(template) = said(template.with_kwargs(kwargs)) else {
        return;
    };
    let wanted = check(&template, list, tools, prompt);
    let saved = template.source_with_kwargs();
    let Some(saved) = said(ChatTemplate::from_text(&saved, "saved", good_tokenizer())) else {
        return;
    };
    let found = said(saved.trusted(|_| {}).render_marked(list, tools, prompt));
    if let (Some(wanted), Some(found)) = (wanted, found) {
        assert_eq!(found, wanted);
    }
}
