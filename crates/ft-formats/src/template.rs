//! Chat templates: from messages to the text on which the model was trained.
//!
//! A template is an untrusted program. Its interpreter (`jinja`) has no access to files, network or environment, and
//! limits work, nesting and output. It runs in its own process (`pool`, `wire`) with limits on memory and time. Its input
//! and output are those of transformers 5.

mod kwargs;
pub mod named;
mod pool;
mod wire;

#[cfg(test)]
mod tests;

// For the fuzz targets.
#[doc(hidden)]
pub use wire::answers_again;
pub use wire::serve;

use crate::index::stays_inside;
use crate::jinja::{self, Fail, FailKind};
use crate::{Tokenizer, json_kind, read_json_object};
use ft_base::{Error, Result, files, paths};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// Largest template text, bytes; real ones have at most some tens of thousands.
const TEMPLATE_LIMIT: usize = 1 << 20;

/// A parsed chat template with the special tokens of its tokenizer.
pub struct ChatTemplate {
    default: TemplateProgram,
    /// A template of its own for conversations with tools.
    tools: Option<TemplateProgram>,
    /// Special tokens and given variables by name.
    tokens: Map<String, Value>,
    /// Names of the special tokens.
    token_names: Vec<String>,
    /// The variables that the user gives.
    kwargs: Map<String, Value>,
    place: String,
    /// The user's own file: it may be rendered here if no process can be started, and this says so.
    trusted: Option<TrustedFile>,
}

struct TrustedFile {
    warn: fn(&str),
    warned: Once,
}

struct TemplateProgram {
    parsed: jinja::Template,
    source: String,
    /// No other program of this process has it.
    id: u64,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// Byte ranges of `text` that `{% generation %}` blocks printed, in the order of the text. Empty too where a
    /// block prints into a macro whose text is changed afterwards.
    pub generation: Vec<Range<usize>>,
}

/// A conversation and what is wanted of it: its first messages, and whether a generation prompt follows.
#[derive(Debug, Clone)]
pub struct RenderJob<'a> {
    /// The conversation: objects with `role` and `content`.
    pub messages: &'a [Value],
    /// The tools that the template may list.
    pub tools: Option<&'a Value>,
    /// The renderings: the first n messages, and whether a generation prompt follows.
    pub renderings: Vec<(usize, bool)>,
}

type RenderResult = std::result::Result<RenderedChat, Fail>;

impl ChatTemplate {
    /// The template of a model directory: `chat_template.jinja`, else `chat_template.json`, else
    /// `chat_template` in `tokenizer_config.json`. `None` when there is none.
    ///
    /// # Errors
    /// A file that cannot be read or is a link out of its directory, or a template with a syntax error or an unsupported feature.
    pub fn from_dir(dir: &Path, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let file = dir.join("chat_template.jinja");
        if file.exists() {
            stays_inside(&file)?;
            let mut out = Self::from_file(&file, tokenizer)?;
            let more = dir.join("additional_chat_templates");
            let extra = more.join("tool_use.jinja");
            if extra.exists() {
                stays_inside(&more)?;
                stays_inside(&extra)?;
                out.tools = Some(TemplateProgram::new(
                    &files::read_text(&extra)?,
                    &extra.display().to_string(),
                )?);
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
    ///
    /// # Errors
    /// No such file; a syntax error; a feature that the interpreter does not support.
    pub fn from_file(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        if !path.exists() {
            return Err(paths::missing("file", path));
        }
        Self::from_text(&files::read_text(path)?, &path.display().to_string(), tokenizer)
    }

    /// A template text; `place` is named in errors.
    ///
    /// # Errors
    /// A syntax error; a feature that the interpreter does not support.
    pub fn from_text(text: &str, place: &str, tokenizer: &Tokenizer) -> Result<Self> {
        Self::with_tokens(text, place, tokens(tokenizer))
    }

    /// For a file that the user chose: if no process can be started, it is rendered in this one, with one call of
    /// `warn`.
    pub fn trusted(mut self, warn: fn(&str)) -> Self {
        self.trusted = Some(TrustedFile {
            warn,
            warned: Once::new(),
        });
        self
    }

    /// No process could be started. `None`: the template is rendered in this one. Errors: it may not be.
    fn without_process<T>(&self, why: Error) -> Option<Result<T>> {
        let Some(trusted) = &self.trusted else {
            return Some(Err(why.hint(
                "chat templates of models run in a separate process; to avoid it, give `ChatTemplate::from_file` \
                 a file that you trust",
            )));
        };
        trusted.warned.call_once(|| {
            (trusted.warn)(&format!(
                "{} is rendered in this process, without limits on memory and time: {}",
                self.place,
                why.to_string().lines().collect::<Vec<_>>().join("; ")
            ));
        });
        None
    }

    /// A template text with special tokens (`bos_token`, ...) by name, without a tokenizer.
    ///
    /// # Errors
    /// As for `from_text`.
    pub fn with_tokens(text: &str, place: &str, tokens: Map<String, Value>) -> Result<Self> {
        Ok(Self {
            default: TemplateProgram::new(text, place)?,
            tools: None,
            token_names: tokens.keys().cloned().collect(),
            tokens,
            kwargs: Map::new(),
            place: place.to_string(),
            trusted: None,
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
                return Err(Error::format("`chat_template` has a wrong value")
                    .at_path(path)
                    .found(json_kind(other))
                    .expected("a template, or a list of named templates"));
            }
        };
        let find = |name: &str| named.iter().find(|(n, _)| n == name).map(|(_, t)| *t);
        let Some(default) = find("default").or(if named.len() == 1 { Some(named[0].1) } else { None }) else {
            let names: Vec<&str> = named.iter().map(|(n, _)| n.as_str()).collect();
            return Err(Error::format("`chat_template` has no template named `default`")
                .at_path(path)
                .found(if names.is_empty() {
                    "none".into()
                } else {
                    names.join(", ")
                })
                .hint("save the template you want in a file and give its path to `ChatTemplate::from_file`"));
        };
        let mut out = Self::from_text(default, &place, tokenizer)?;
        if let Some(text) = find("tool_use") {
            out.tools = Some(TemplateProgram::new(text, &place)?);
        }
        Ok(out)
    }

    /// The template text, as written.
    pub fn source(&self) -> &str {
        &self.default.source
    }

    /// A text that contains everything on which rendered texts depend. `None`: they depend on the clock too.
    pub fn identity(&self) -> Option<String> {
        let programs = [Some(&self.default), self.tools.as_ref()];
        let sources: Vec<&str> = programs.into_iter().flatten().map(|p| p.source.as_str()).collect();
        let timed = sources.iter().any(|source| source.contains("strftime_now"));
        let tokens = Value::Object(self.tokens.clone());
        (!timed).then(|| format!("{tokens} {sources:?}"))
    }

    /// The text of a conversation. `messages` are objects with `role` and `content` (and what else the template looks
    /// at); `tools` is a list of JSON schemas.
    ///
    /// # Errors
    /// The template refuses the conversation, is wrong, or runs into a limit.
    pub fn render(&self, messages: &[Value], tools: Option<&Value>, add_generation_prompt: bool) -> Result<String> {
        Ok(self.render_marked(messages, tools, add_generation_prompt)?.text)
    }

    /// True if the template for such a conversation has `{% generation %}` blocks.
    pub fn marks_generation(&self, tools: Option<&Value>) -> bool {
        self.program(tools).parsed.marks_generation()
    }

    /// As `render`, with the ranges of the `{% generation %}` blocks.
    ///
    /// # Errors
    /// As for `render`.
    pub fn render_marked(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat> {
        let job = RenderJob {
            messages,
            tools,
            renderings: vec![(messages.len(), add_generation_prompt)],
        };
        let mut answers = self.answers(&[job])?;
        match answers.pop().and_then(|mut of_job| of_job.pop()) {
            Some(answer) => answer.map_err(|fail| explain(&fail, &self.place)),
            None => Err(Error::new("the process that renders chat templates did not answer").at(&self.place)),
        }
    }

    /// The texts of many conversations at once; `None` where `render` has the error.
    pub fn render_many(&self, jobs: &[RenderJob]) -> Vec<Vec<Option<RenderedChat>>> {
        // A process that ended while it worked on several: which one it was shows when they are rendered one by one.
        let answers = self.answers(jobs).unwrap_or_default();
        answers
            .into_iter()
            .map(|of_job| of_job.into_iter().map(RenderResult::ok).collect())
            .collect()
    }

    /// Ends the processes that render, until they are needed again.
    pub fn rest(&self) {
        pool::rest();
    }

    /// Answers to each job, to each of its renderings. Errors: the process could not be started, or ended.
    fn answers(&self, jobs: &[RenderJob]) -> Result<Vec<Vec<RenderResult>>> {
        match pool::answers(self, jobs) {
            None => Ok(jobs
                .iter()
                .map(|job| self.program(job.tools).answer(&self.tokens, job))
                .collect()),
            Some(answers) => answers.map_err(|e| e.or_at(&self.place)),
        }
    }

    fn program(&self, tools: Option<&Value>) -> &TemplateProgram {
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

impl TemplateProgram {
    fn new(source: &str, place: &str) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if source.len() > TEMPLATE_LIMIT {
            return Err(Error::format("chat template is too large")
                .at(place)
                .found(format!("{} bytes", source.len()))
                .expected(format!("at most {TEMPLATE_LIMIT}")));
        }
        let parsed = jinja::Template::parse(source).map_err(|fail| {
            let what = match fail.kind {
                FailKind::Unsupported => format!("chat template needs {}, which ft does not support", fail.text),
                _ => "chat template is not valid".to_string(),
            };
            let error = Error::format(what).at(format!("{place}{}", line_of(&fail)));
            let error = match fail.kind {
                FailKind::Unsupported => error,
                _ => error.cause(&fail),
            };
            error.hint("correct the template, or give `ChatTemplate::from_file` a file with another one")
        })?;
        Ok(Self {
            parsed,
            source: source.to_string(),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    fn answer(&self, variables: &Map<String, Value>, job: &RenderJob) -> Vec<RenderResult> {
        answer(&self.parsed, variables, job.messages, job.tools, &job.renderings)
    }
}

/// The inputs and outputs of a template for the beginnings of a conversation.
fn answer(
    template: &jinja::Template,
    given: &Map<String, Value>,
    messages: &[Value],
    tools: Option<&Value>,
    renderings: &[(usize, bool)],
) -> Vec<RenderResult> {
    // The first variable of a name counts.
    let mut variables: Vec<(&str, &Value)> = given.iter().map(|(name, value)| (&**name, value)).collect();
    variables.push(("tools", tools.unwrap_or(&Value::Null)));
    variables.push(("documents", &Value::Null));
    let messages: Cow<[Value]> = if messages.iter().any(has_reasoning) {
        messages.iter().map(with_reasoning).collect()
    } else {
        messages.into()
    };
    let texts = template.render(&variables, &messages, renderings);
    let rendered = |(text, generation)| RenderedChat { text, generation };
    texts.into_iter().map(|text| text.map(rendered)).collect()
}

/// Special tokens under the names that templates use.
fn tokens(tokenizer: &Tokenizer) -> Map<String, Value> {
    tokenizer
        .named_tokens()
        .map(|(role, text)| (role.to_string(), Value::String(text.to_string())))
        .collect()
}

const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

fn has_reasoning(message: &Value) -> bool {
    REASONING
        .iter()
        .any(|name| message.get(*name).is_some_and(|v| !v.is_null()))
}

/// A message's reasoning goes by three names; the template may look for any of them.
fn with_reasoning(message: &Value) -> Value {
    let Some(map) = message.as_object() else {
        return message.clone();
    };
    let Some(reasoning) = REASONING
        .iter()
        .find_map(|n| map.get(*n).filter(|v| !v.is_null()))
        .cloned()
    else {
        return message.clone();
    };
    let mut out = Map::new();
    out.insert("thinking".into(), reasoning.clone());
    out.extend(map.iter().map(|(k, v)| (k.clone(), v.clone())));
    out.insert("reasoning_content".into(), reasoning);
    Value::Object(out)
}

fn line_of(fail: &Fail) -> String {
    fail.line.map(|l| format!(":{l}")).unwrap_or_default()
}

/// A failed rendering in words.
fn explain(fail: &Fail, place: &str) -> Error {
    let at = format!("{place}{}", line_of(fail));
    match fail.kind {
        FailKind::Limit => Error::format(format!("chat template was stopped: {}", fail.text))
            .at(at)
            .hint("the template has a very long or endless loop: use another one with `ChatTemplate::from_file`"),
        FailKind::Raised => Error::format(format!("chat template refuses this conversation: {}", fail.text))
            .at(at)
            .hint(
                "check the roles and their order in this row, or use another template with `ChatTemplate::from_file`",
            ),
        FailKind::Unsupported => {
            Error::unsupported(format!("chat template needs {}, which ft does not support", fail.text))
                .at(at)
                .hint("docs/templates.md lists what is supported; use another template with `ChatTemplate::from_file`")
        }
        FailKind::Syntax | FailKind::Failed => {
            let error = Error::format("chat template failed").at(at).cause(&fail.text);
            if fail.text.contains("no attribute 'content'") {
                error.hint("`content` is missing or null in a message, and this template reads it: write a text, which may be empty")
            } else {
                error
            }
        }
    }
}
