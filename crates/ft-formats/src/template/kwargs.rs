//! Variables that a user gives to a template, such as `enable_thinking`, as `chat_template_kwargs` of transformers.

use super::{ChatTemplate, TemplateProgram};
use crate::jinja::GLOBALS;
use ft_base::{Error, Result};
use serde_json::{Map, Value};

/// Variables that come from the conversation.
const TAKEN: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

impl ChatTemplate {
    /// Gives these variables to the template, in every rendering. They replace special tokens of the same name.
    ///
    /// # Errors
    /// A variable that comes from the conversation, such as `messages`.
    pub fn with_kwargs(mut self, kwargs: &Map<String, Value>) -> Result<Self> {
        if let Some(name) = kwargs.keys().find(|name| TAKEN.contains(&name.as_str())) {
            return Err(
                Error::argument(format!("`{name}` is a part of the conversation, not a variable to set"))
                    .at("ChatTemplate::with_kwargs")
                    .expected("a variable of the template, such as `enable_thinking`"),
            );
        }
        for (name, value) in kwargs {
            self.tokens.insert(name.clone(), value.clone());
        }
        self.kwargs.extend(kwargs.clone());
        Ok(self)
    }

    /// Names of given variables that the template never reads.
    pub fn unread_kwargs(&self) -> Vec<&str> {
        let given = self.kwargs.keys().map(String::as_str);
        given
            .filter(|name| !self.programs().any(|p| p.parsed.reads(name)))
            .collect()
    }

    /// True if saving the template without the given variables would lose one that it reads.
    pub fn has_kwargs(&self) -> bool {
        self.unread_kwargs().len() < self.kwargs.len()
    }

    /// The template text in which the given variables are defaults: other programs render as ft does.
    pub fn source_with_kwargs(&self) -> String {
        self.with_defaults(&self.default)
    }

    /// As `source_with_kwargs`, for the template of conversations with tools, if there is one of its own.
    pub fn tools_source_with_kwargs(&self) -> Option<String> {
        self.tools.as_ref().map(|program| self.with_defaults(program))
    }

    fn programs(&self) -> impl Iterator<Item = &TemplateProgram> {
        std::iter::once(&self.default).chain(&self.tools)
    }

    fn with_defaults(&self, program: &TemplateProgram) -> String {
        let mut out = String::new();
        for (name, value) in self.kwargs.iter().filter(|(name, _)| program.parsed.reads(name)) {
            let set = format!("{{%- set {name} = {} %}}", literal(value));
            // A special token is always defined, and so are functions and what every program passes.
            let is_always_defined = GLOBALS.contains(&name.as_str()) || name == "documents";
            out.push_str(&if is_always_defined || self.token_names.contains(name) {
                set
            } else {
                format!("{{%- if {name} is not defined %}}{set}{{%- endif %}}")
            });
        }
        if !out.is_empty() {
            // A line break after a block is not printed.
            out.push('\n');
        }
        out + &program.source
    }
}

/// A value as Jinja writes it: as JSON, except for null.
fn literal(value: &Value) -> String {
    let text = |name: &str| Value::from(name).to_string();
    match value {
        Value::Null => "none".into(),
        Value::Array(list) => format!("[{}]", list.iter().map(literal).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let entries = map
                .iter()
                .map(|(name, value)| format!("{}: {}", text(name), literal(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}
