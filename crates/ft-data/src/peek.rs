//! Determines the kind of rows in a file from its first row, for commands that accept all kinds.

use super::mapping::ColumnRole;
use super::read;
use super::source::Source;
use crate::RowFormat;
use ft_base::{Error, Result};
use serde_json::Value;

/// Kind of rows, by what can be measured on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// A text to predict: conversations, prompts with completions, plain text.
    Text,
    /// A chosen and a rejected answer.
    Pairs,
    /// One answer, and whether it is desirable.
    Judged,
    /// A prompt, and a known answer that need not match word for word.
    Prompts,
}

/// The kind of the rows of `source`; `answer` is the column with known answers.
///
/// # Errors
/// A file cannot be read; there is no file.
pub fn kind(source: &Source, answer: &str) -> Result<RowKind> {
    let path = source
        .files
        .first()
        .ok_or_else(|| Error::usage("there is no file with rows"))?;
    let format = source.format;
    let mapped = |role| source.mapping.columns.iter().any(|(known, _)| *known == role);
    let mut found = None;
    let enough = || Error::new("the first row is enough");
    let read = read::read_rows(path, source.text_unit, &mut |row| {
        let row = row?;
        let has = |role: ColumnRole| mapped(role) || row.fields.get(role.name()).is_some_and(|v| !v.is_null());
        use ColumnRole::{Answer, Chosen, Completion, Label, Prompt, Rejected};
        let sides = has(Chosen) && has(Rejected);
        let flag = mapped(Label) || matches!(row.fields.get("label"), Some(Value::Bool(_)));
        let judged = flag && has(Completion);
        let known = mapped(Answer) || row.fields.get(answer).is_some_and(|v| !v.is_null());
        found = Some(match format {
            RowFormat::Prompt => RowKind::Prompts,
            RowFormat::Preference | RowFormat::Auto if judged => RowKind::Judged,
            RowFormat::Preference => RowKind::Pairs,
            RowFormat::Auto if sides => RowKind::Pairs,
            RowFormat::Auto if has(Prompt) && known && !has(Completion) => RowKind::Prompts,
            _ => RowKind::Text,
        });
        Err(enough())
    });
    match (found, read) {
        (Some(kind), _) => Ok(kind),
        (None, Err(e)) => Err(e),
        // The reader of the whole file reports that there are no rows.
        (None, Ok(_)) => Ok(RowKind::Text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_row_tells_the_kind() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rows.jsonl");
        let of = |row: &str, format| {
            std::fs::write(&file, format!("{row}\n{row}\n")).unwrap();
            let source = Source {
                format,
                ..Source::new(vec![file.to_str().unwrap().to_string()])
            };
            kind(&source, "answer").unwrap()
        };
        use RowFormat::{Auto, Messages, Preference, Prompt};
        let messages = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
        assert_eq!(of(messages, Auto), RowKind::Text);
        assert_eq!(
            of(r#"{"prompt": "a", "completion": "b", "answer": "c"}"#, Auto),
            RowKind::Text
        );
        let pair = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#;
        assert_eq!((of(pair, Auto), of(pair, Preference)), (RowKind::Pairs, RowKind::Pairs));
        let judged = r#"{"prompt": "a", "completion": "b", "label": false}"#;
        assert_eq!(
            (of(judged, Auto), of(judged, Preference)),
            (RowKind::Judged, RowKind::Judged)
        );
        let prompt = r#"{"prompt": "2 + 3", "answer": "5"}"#;
        assert_eq!(
            (of(prompt, Auto), of(prompt, Prompt)),
            (RowKind::Prompts, RowKind::Prompts)
        );
        assert_eq!(of(messages, Messages), RowKind::Text);
        assert_eq!(of(messages, Prompt), RowKind::Prompts);
        assert!(kind(&Source::new(vec!["/no/such/file.jsonl".into()]), "answer").is_err());
    }
}
