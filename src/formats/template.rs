//! Chat templates: messages in, the text that the model was trained to see out.
//!
//! A template is a stranger's program. It runs in an interpreter without files, network, environment or
//! Python objects, with a limit on instructions, recursion, time and output, and only when a conversation
//! is rendered. What it sees and prints is what transformers 5 would show it.

use crate::base::{Error, Result, files};
use crate::formats::template_methods as methods;
use crate::formats::{Tokenizer, json_kind, read_json_object};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Largest template text, bytes; real ones have at most some tens of thousands.
const TEMPLATE_LIMIT: usize = 1 << 20;
/// Largest rendered conversation, bytes.
pub const OUTPUT_LIMIT: usize = 64 << 20;
/// Instructions of one rendering, and more for each message.
const FUEL: u64 = 3_000_000;
const FUEL_PER_MESSAGE: u64 = 20_000;
/// Nested blocks, macros and calls.
const RECURSION: usize = 200;
/// Time of one rendering; far above what a real template takes.
const TIME: Duration = Duration::from_millis(800);

const NAME: &str = "chat template";

/// A compiled chat template with the special tokens of its tokenizer.
pub struct ChatTemplate {
    default: Program,
    /// A template of its own for conversations with tools.
    tools: Option<Program>,
    tokens: Map<String, Value>,
    place: String,
}

struct Program {
    env: Environment<'static>,
    source: String,
    /// The source has `{% generation %}`.
    marks_generation: bool,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Byte ranges of `text` that `{% generation %}` blocks printed, in the order of the text.
    pub generation: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The template of a model directory: `chat_template.jinja`, else `chat_template.json`, else
    /// `chat_template` in `tokenizer_config.json`. `None` when there is none.
    pub fn from_dir(dir: &Path, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let file = dir.join("chat_template.jinja");
        if file.exists() {
            let mut out = Self::from_file(&file, tokenizer)?;
            let extra = dir.join("additional_chat_templates").join("tool_use.jinja");
            if extra.exists() {
                out.tools = Some(Program::new(&files::read_text(&extra)?, &extra.display().to_string())?);
            }
            return Ok(Some(out));
        }
        let json = dir.join("chat_template.json");
        if json.exists() {
            let map = read_json_object(&json)?;
            if let Some(value) = map.get("chat_template") {
                return Self::from_value(value, &json, tokenizer).map(Some);
            }
        }
        match tokenizer.config().get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(value) => Self::from_value(value, &dir.join("tokenizer_config.json"), tokenizer).map(Some),
        }
    }

    /// A template file named by the user.
    pub fn from_file(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let place = path.display().to_string();
        Ok(Self {
            default: Program::new(&files::read_text(path)?, &place)?,
            tools: None,
            tokens: tokens(tokenizer),
            place,
        })
    }

    /// A template text; `place` is named in errors.
    pub fn from_text(text: &str, place: &str, tokenizer: &Tokenizer) -> Result<Self> {
        Ok(Self {
            default: Program::new(text, place)?,
            tools: None,
            tokens: tokens(tokenizer),
            place: place.to_string(),
        })
    }

    /// A string, a list of `{name, template}`, or an object from name to template.
    fn from_value(value: &Value, path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let place = path.display().to_string();
        let named: Vec<(String, &str)> = match value {
            Value::String(text) => return Self::from_text(text, &place, tokenizer),
            Value::Object(map) => map.iter().filter_map(|(k, v)| Some((k.clone(), v.as_str()?))).collect(),
            Value::Array(list) => list
                .iter()
                .filter_map(|v| Some((v.get("name")?.as_str()?.to_string(), v.get("template")?.as_str()?)))
                .collect(),
            other => {
                return Err(Error::new("`chat_template` has a wrong value")
                    .at_path(path)
                    .found(json_kind(other))
                    .expected("a template, or a list of named templates"));
            }
        };
        let find = |name: &str| named.iter().find(|(n, _)| n == name).map(|(_, t)| *t);
        let Some(default) = find("default").or(if named.len() == 1 { Some(named[0].1) } else { None }) else {
            let names: Vec<&str> = named.iter().map(|(n, _)| n.as_str()).collect();
            return Err(Error::new("`chat_template` has no template named `default`")
                .at_path(path)
                .found(if names.is_empty() {
                    "none".into()
                } else {
                    names.join(", ")
                })
                .hint("save the template you want in a file and set `data.chat_template` to its path"));
        };
        let mut out = Self::from_text(default, &place, tokenizer)?;
        if let Some(text) = find("tool_use") {
            out.tools = Some(Program::new(text, &place)?);
        }
        Ok(out)
    }

    /// The template text, as written.
    pub fn source(&self) -> &str {
        &self.default.source
    }

    /// The text of a conversation. `messages` are objects with `role` and `content` (and what else the
    /// template looks at); `tools` is a list of JSON schemas.
    ///
    /// Errors: the template refuses the conversation, is wrong, or runs into a limit.
    pub fn render(&self, messages: &[Value], tools: Option<&Value>, add_generation_prompt: bool) -> Result<String> {
        Ok(self.render_marked(messages, tools, add_generation_prompt)?.text)
    }

    /// True if the template for such a conversation has `{% generation %}` blocks.
    pub fn marks_generation(&self, tools: Option<&Value>) -> bool {
        self.program(tools).marks_generation
    }

    /// As `render`, with the ranges of the `{% generation %}` blocks.
    pub fn render_marked(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Rendered> {
        let messages: Vec<Value> = messages.iter().map(with_reasoning).collect();
        let mut context = self.tokens.clone();
        context.insert("messages".into(), Value::Array(messages));
        context.insert("tools".into(), tools.cloned().unwrap_or(Value::Null));
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), Value::Bool(add_generation_prompt));
        self.program(tools).run(&Value::Object(context), &self.place)
    }

    fn program(&self, tools: Option<&Value>) -> &Program {
        match (&self.tools, tools) {
            (Some(program), Some(t)) if !t.is_null() => program,
            _ => &self.default,
        }
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChatTemplate({}, {} bytes)", self.place, self.default.source.len())
    }
}

impl Program {
    fn new(source: &str, place: &str) -> Result<Self> {
        if source.len() > TEMPLATE_LIMIT {
            return Err(Error::new("chat template is too large")
                .at(place)
                .found(format!("{} bytes", source.len()))
                .expected(format!("at most {TEMPLATE_LIMIT}")));
        }
        let wrong = |e: minijinja::Error| {
            let line = e.line().map(|l| format!(":{l}")).unwrap_or_default();
            Error::new("chat template is not valid")
                .at(format!("{place}{line}"))
                .cause(describe(&e))
                .hint("correct the template, or set `data.chat_template` to a file with another one")
        };
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(wrong)?;
        env.set_syntax(syntax);
        env.set_recursion_limit(RECURSION);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        methods::install(&mut env);
        let translated = without_generation_tags(source);
        let marks_generation = translated != source;
        env.add_template_owned(NAME, translated).map_err(wrong)?;
        Ok(Self {
            env,
            source: source.to_string(),
            marks_generation,
        })
    }

    fn run(&self, context: &Value, place: &str) -> Result<Rendered> {
        let failed = |e: minijinja::Error| explain(&e, place);
        let messages = context.get("messages").and_then(Value::as_array).map_or(0, Vec::len) as u64;
        let mut env = self.env.clone();
        env.set_fuel(Some(FUEL + FUEL_PER_MESSAGE * messages));
        let template = env.get_template(NAME).map_err(failed)?;
        let mut out = Capped(Vec::new());
        methods::start_marks();
        methods::start_clock(TIME);
        let result = template.render_captured_to(Serde(context), &mut out).map(|_| ());
        methods::stop_clock();
        result.map_err(failed)?;
        let text = String::from_utf8(out.0)
            .map_err(|_| Error::new("chat template printed text that is not UTF-8").at(place))?;
        let generation = methods::take_marks();
        Ok(Rendered { text, generation })
    }
}

/// Output that ends with an error at the limit.
struct Capped(Vec<u8>);

impl std::io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_LIMIT {
            return Err(std::io::Error::other(methods::TOO_MUCH));
        }
        self.0.extend_from_slice(bytes);
        methods::printed(self.0.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Special tokens under the names that templates use.
fn tokens(tokenizer: &Tokenizer) -> Map<String, Value> {
    tokenizer
        .named_tokens()
        .map(|(role, text)| (role.to_string(), Value::String(text.to_string())))
        .collect()
}

/// A message's reasoning goes by three names; the template may look for any of them.
fn with_reasoning(message: &Value) -> Value {
    let Some(map) = message.as_object() else {
        return message.clone();
    };
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(reasoning) = names.iter().find_map(|n| map.get(*n).filter(|v| !v.is_null())).cloned() else {
        return message.clone();
    };
    let mut out = Map::new();
    out.insert("thinking".into(), reasoning.clone());
    out.extend(map.iter().map(|(k, v)| (k.clone(), v.clone())));
    out.insert("reasoning_content".into(), reasoning);
    Value::Object(out)
}

/// `{% generation %}` marks what an assistant wrote. It becomes a `with` block whose first and last statements note how
/// much has been printed.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag[2..].find("%}").map(|end| end + 4) else {
            break;
        };
        let inner = tag[2..end - 2]
            .trim_start_matches(['-', '+'])
            .trim_end_matches(['-', '+']);
        let word = match inner.trim() {
            "generation" => Some("with ft_generation = ft_generation_start()"),
            "endgeneration" => Some("set ft_generation = ft_generation_end() %}{% endwith"),
            _ => None,
        };
        match word {
            Some(word) => out.push_str(&tag[..end].replace(inner.trim(), word)),
            None => out.push_str(&tag[..2]),
        }
        rest = if word.is_some() { &tag[end..] } else { &tag[2..] };
    }
    out.push_str(rest);
    out
}

fn describe(e: &minijinja::Error) -> String {
    match e.detail() {
        Some(detail) => format!("{}: {detail}", e.kind()),
        None => e.kind().to_string(),
    }
}

/// A failed rendering in words.
fn explain(e: &minijinja::Error, place: &str) -> Error {
    let line = e.line().map(|l| format!(":{l}")).unwrap_or_default();
    let at = format!("{place}{line}");
    let detail = e.detail().unwrap_or_default();
    let limit = "the template loops or was made to: use another one with `data.chat_template`";
    if e.kind() == ErrorKind::OutOfFuel || detail == methods::TOO_LONG {
        return Error::new("chat template did not come to an end").at(at).hint(limit);
    }
    let source = std::error::Error::source(e).map(|s| s.to_string()).unwrap_or_default();
    if source.contains(methods::TOO_MUCH) || detail == methods::TOO_MUCH {
        return Error::new(format!("chat template printed more than {} MiB", OUTPUT_LIMIT >> 20))
            .at(at)
            .hint(limit);
    }
    if let Some(message) = detail.strip_prefix(methods::REFUSED) {
        return Error::new(format!("chat template refuses this conversation: {message}"))
            .at(at)
            .hint("look at the roles and their order in this row, or use another template with `data.chat_template`");
    }
    Error::new("chat template failed").at(at).cause(describe(e))
}

#[cfg(test)]
mod tests;
