//! Determines the kind of rows in a file from its first row, for commands that accept all kinds.

use super::read;
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

/// The kind of the rows in the file at `path`; `answer` is the column with known answers.
///
/// # Errors
/// The file cannot be read.
pub fn kind(path: &str, format: RowFormat, answer: &str) -> Result<RowKind> {
    let mut found = None;
    let enough = || Error::new("the first row is enough");
    let read = read::read_rows(path, &mut |row| {
        let row = row?;
        let has = |name: &str| row.fields.get(name).is_some_and(|v| !v.is_null());
        let sides = has("chosen") && has("rejected");
        let judged = matches!(row.fields.get("label"), Some(Value::Bool(_))) && has("completion");
        found = Some(match format {
            RowFormat::Prompt => RowKind::Prompts,
            RowFormat::Preference | RowFormat::Auto if judged => RowKind::Judged,
            RowFormat::Preference => RowKind::Pairs,
            RowFormat::Auto if sides => RowKind::Pairs,
            RowFormat::Auto if has("prompt") && has(answer) && !has("completion") => RowKind::Prompts,
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
            kind(file.to_str().unwrap(), format, "answer").unwrap()
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
        assert!(kind("/no/such/file.jsonl", Auto, "answer").is_err());
    }
}
