//! Describes in words how the files of a dataset were read: format, used and unused columns, rendering.

use super::layout::{ColumnLayout, LISTS, Rendering, is_like_a_prompt};
use super::read::Row;
use crate::RowFormat;
use ft_base::units;
use serde_json::Value;
use std::collections::BTreeSet;

/// Description of how a file was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadingReport {
    /// The path of the file.
    pub file: String,
    /// The columns that were used, and how.
    pub layout: ColumnLayout,
    /// Columns that are not null in at least one row of the file.
    seen: BTreeSet<String>,
    /// The number of rows that are not used, with the reason.
    skipped: Vec<(String, usize)>,
    /// True if the texts of the first row are concatenated without white space between them.
    touching: bool,
    /// Columns with the votes of judges.
    judges: Vec<String>,
}

impl ReadingReport {
    pub(super) fn new(file: &str, layout: ColumnLayout, first: &Row) -> Self {
        let text = |name: &Option<String>| {
            let name = name.as_deref()?;
            first.fields.get(name).and_then(Value::as_str)
        };
        let touching = match (&layout.rendering, text(&layout.prompt), text(&layout.answer)) {
            (Rendering::Plain(_), Some(prompt), Some(answer)) => {
                let ends = |c: char| c.is_alphanumeric() || ".!?:;)\"'".contains(c);
                prompt.ends_with(ends) && answer.starts_with(char::is_alphanumeric)
            }
            _ => false,
        };
        Self {
            file: file.to_string(),
            layout,
            seen: BTreeSet::new(),
            skipped: Vec::new(),
            touching,
            judges: Vec::new(),
        }
    }

    /// The same, with columns that hold votes of judges.
    pub(super) fn set_judges(&mut self, columns: &[String]) {
        self.judges = columns.to_vec();
    }

    pub(super) fn see(&mut self, row: &Row) {
        let has = |name: &str| row.fields.get(name).is_some_and(|v| !v.is_null());
        let layout = &mut self.layout;
        if layout.format == RowFormat::Preference && layout.answer.is_none() && !has("chosen") && has("label") {
            // A judged answer among pairs.
            layout.answer = Some("completion".to_string());
        }
        for (name, value) in row.fields.iter().chain(&row.rest) {
            if !value.is_null() && !self.seen.contains(name) {
                self.seen.insert(name.clone());
            }
        }
    }

    pub(super) fn skip(&mut self, why: &str, rows: usize) {
        match self.skipped.iter_mut().find(|(known, _)| known == why) {
            Some((_, known)) => *known += rows,
            None => self.skipped.push((why.to_string(), rows)),
        }
    }

    /// Number of rows that are not used, with the reason.
    pub fn skipped(&self) -> &[(String, usize)] {
        &self.skipped
    }

    /// Columns that are not null in at least one row.
    pub(super) fn columns(&self) -> Vec<String> {
        self.seen.iter().cloned().collect()
    }

    /// A reading of the first row, with the columns and the skipped rows of the whole file.
    pub(super) fn with(mut self, columns: &[String], skipped: &[(String, usize)]) -> Self {
        self.seen = columns.iter().cloned().collect();
        self.skipped = skipped.to_vec();
        let has = |name: &str| self.seen.contains(name);
        if self.layout.format == RowFormat::Preference && has("label") && has("completion") {
            // As in `see`.
            self.layout.answer.get_or_insert_with(|| "completion".to_string());
        }
        self
    }

    /// Columns of the file that are not used.
    pub fn unused(&self) -> Vec<&str> {
        let used = &self.layout.used;
        let all = self.seen.iter().map(String::as_str);
        all.filter(|name| {
            let is_used = used.iter().any(|u| u == name) || self.judges.iter().any(|j| j == name);
            !self.layout.reads(name) && !is_used
        })
        .collect()
    }

    /// The column of the file that is read as `column`.
    fn shown<'a>(&'a self, column: &'a str) -> &'a str {
        let from = self.layout.from.iter().find(|(name, _)| name == column);
        from.map_or(column, |(_, path)| path)
    }

    /// Format, columns and rendering. `rest` describes what happens to unused columns.
    pub fn describe(&self, rest: &str) -> String {
        let mut parts: Vec<String> = Vec::new();
        for (role, columns) in self.layout.roles() {
            let there = columns.into_iter().filter(|c| self.seen.contains(*c));
            let there: Vec<&str> = there.map(|column| self.shown(column)).collect();
            match &there[..] {
                [] => {}
                [column] if *column == role => parts.push(role.to_string()),
                columns => parts.push(format!("{role} from {}", columns.join(" and "))),
            }
        }
        if self.layout.system_prompt.is_some() {
            parts.push("rows without a system message get `Mapping::system_prompt`".to_string());
        }
        let mut out = format!("{}: {}", self.layout.format.name(), parts.join(", "));
        if let Some(preset) = self.layout.preset {
            out = format!("{} ({preset}): {}", self.layout.format.name(), parts.join(", "));
        }
        if !self.judges.is_empty() {
            out += &format!("; votes from {}", self.judges.join(", "));
        }
        let unused = self.unused();
        if !unused.is_empty() {
            out += &format!("; {rest}: {}", unused.join(", "));
        }
        for (why, rows) in &self.skipped {
            out += &format!("; {} skipped: {why}", units::counted(*rows, "row"));
        }
        match self.layout.rendering {
            Rendering::Template => out += "; rendered with the chat template",
            Rendering::Plain(why) => out += &format!("; plain text ({why})"),
            Rendering::Text => {}
        }
        out
    }

    /// Warnings about columns that are probably not used as intended.
    pub fn warnings(&self) -> Vec<String> {
        let mut out = Vec::new();
        let lost: Vec<&str> = self
            .unused()
            .into_iter()
            .filter(|name| is_like_a_prompt(name) && !LISTS.contains(name))
            .collect();
        if !lost.is_empty() && self.layout.list.is_none() && self.layout.format != RowFormat::Text {
            out.push(format!(
                "{}: the columns {} are not used, and may belong to the prompt",
                self.file,
                lost.join(", ")
            ));
        }
        if self.touching {
            out.push(format!(
                "{}: there is no space or line break between prompt and answer of the first row",
                self.file
            ));
        }
        out
    }
}

/// Describes the files of a dataset, one line per group of files that are read alike. A line names its files if there
/// are several groups.
pub fn lines(readings: &[ReadingReport], rest: &str) -> Vec<String> {
    let mut groups: Vec<(String, Vec<&str>)> = Vec::new();
    for reading in readings {
        let text = reading.describe(rest);
        match groups.iter_mut().find(|(known, _)| *known == text) {
            Some((_, files)) => files.push(&reading.file),
            None => groups.push((text, vec![&reading.file])),
        }
    }
    match &groups[..] {
        [(text, _)] => vec![text.clone()],
        _ => groups
            .iter()
            .map(|(text, files)| format!("{text} ({})", files.join(", ")))
            .collect(),
    }
}
