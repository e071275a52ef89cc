//! Tokens that are added to a tokenizer, and the tokenizer files that have them.

use super::{Tokenizer, content, optional};
use ft_base::{Error, Result, files};
use serde_json::{Map, Value, json};
use std::path::Path;
use tokenizers::AddedToken;

/// A token that is added to the vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    /// Its text.
    pub text: String,
    /// A control token: left out of decoded text, never normalized.
    pub special: bool,
}

impl Tokenizer {
    /// Adds tokens at the end of the vocabulary, as `add_tokens` of transformers. Returns the id of each; a text that is
    /// a token already keeps its id.
    ///
    /// # Errors
    /// The normalizer of the tokenizer fails on a text.
    pub fn add_tokens(&mut self, tokens: &[NewToken]) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(tokens.len());
        for token in tokens {
            if let Some(id) = self.inner.token_to_id(&token.text) {
                ids.push(id);
                continue;
            }
            let added = [AddedToken::from(token.text.clone(), token.special)];
            let failed = |e| {
                Error::new("cannot add a token to the tokenizer")
                    .found(&token.text)
                    .cause(e)
            };
            self.inner.add_tokens(added).map_err(failed)?;
            let id = self.inner.token_to_id(&token.text);
            let id = id.ok_or_else(|| Error::argument("the text of a new token is empty"))?;
            self.size = self.size.max(id as usize + 1);
            if token.special {
                self.special.insert(id);
            }
            self.added.push((id, token.clone()));
            ids.push(id);
        }
        Ok(ids)
    }

    /// Also stops generation at this id.
    pub fn add_stop(&mut self, id: u32) {
        if !self.stop.contains(&id) {
            self.stop.push(id);
        }
    }

    /// The end tokens that `generation_config.json` of a directory names.
    ///
    /// # Errors
    /// A file that is not valid.
    pub fn ends_of(dir: &Path) -> Result<Vec<u32>> {
        super::end_ids(dir, "generation_config.json")
    }

    /// The tokens of a tokenizer directory from id `first` on that are listed beside its vocabulary, in the order of
    /// their ids; none if it has no `tokenizer.json`.
    ///
    /// # Errors
    /// A file that is not JSON.
    pub fn listed_from(dir: &Path, first: usize) -> Result<Vec<(u32, NewToken)>> {
        let file = optional(dir, "tokenizer.json")?.unwrap_or_default();
        let config = optional(dir, "tokenizer_config.json")?.unwrap_or_default();
        let mut found: Vec<(u32, NewToken)> = Vec::new();
        let mut add = |id: Option<u64>, entry: &Value| {
            let id = id.and_then(|id| u32::try_from(id).ok());
            if let (Some(id), Some(text)) = (id, content(Some(entry)))
                && id as usize >= first
                && found.iter().all(|(known, _)| *known != id)
            {
                let special = entry.get("special").and_then(Value::as_bool).unwrap_or(false);
                found.push((id, NewToken { text, special }));
            }
        };
        for entry in file.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            add(entry.get("id").and_then(Value::as_u64), entry);
        }
        if let Some(Value::Object(listed)) = config.get("added_tokens_decoder") {
            listed.iter().for_each(|(id, entry)| add(id.parse().ok(), entry));
        }
        found.sort_by_key(|(id, _)| *id);
        Ok(found)
    }

    /// Names and contents of the files of `dir` that change by the added tokens.
    ///
    /// # Errors
    /// A file of `dir` that is not JSON.
    pub fn files_with_added(&self, dir: &Path) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let mut out = Vec::new();
        if self.added.is_empty() {
            return Ok(out);
        }
        let entry = |token: &NewToken| {
            json!({
                "content": token.text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": !token.special, "special": token.special,
            })
        };
        for name in ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"] {
            let Some(mut map) = optional(dir, name)? else { continue };
            match name {
                "tokenizer.json" => {
                    let list = map.entry("added_tokens").or_insert_with(|| json!([]));
                    if let Value::Array(list) = list {
                        list.retain(|old| !self.added.iter().any(|(id, _)| old["id"] == *id));
                        list.extend(self.added.iter().map(|(id, token)| {
                            let mut line = Map::new();
                            line.insert("id".into(), json!(id));
                            if let Value::Object(rest) = entry(token) {
                                line.extend(rest);
                            }
                            Value::Object(line)
                        }));
                    }
                }
                "tokenizer_config.json" => {
                    if let Some(Value::Object(listed)) = map.get_mut("added_tokens_decoder") {
                        let new = self.added.iter().map(|(id, token)| (id.to_string(), entry(token)));
                        listed.extend(new);
                    } else {
                        continue;
                    }
                }
                _ => map.extend(self.added.iter().map(|(id, token)| (token.text.clone(), json!(id)))),
            }
            let text = serde_json::to_string_pretty(&map).map_err(|e| {
                Error::new("cannot write a tokenizer file")
                    .at_path(&dir.join(name))
                    .cause(e)
            })?;
            out.push((name, format!("{text}\n").into_bytes()));
        }
        Ok(out)
    }
}

/// `tokenizer.json` without the added tokens from id `first` on. Errors: it is not JSON.
pub(super) fn without(path: &Path, first: usize) -> Result<Vec<u8>> {
    let mut map = crate::read_json_object(path)?;
    if let Some(Value::Array(list)) = map.get_mut("added_tokens") {
        list.retain(|entry| entry["id"].as_u64().is_some_and(|id| id < first as u64));
    }
    serde_json::to_vec(&map).map_err(|e| Error::format("`tokenizer.json` cannot be read").at_path(path).cause(e))
}

/// Writes files into an exported directory.
///
/// # Errors
/// A file that cannot be written.
pub fn write_files(dir: &Path, all: &[(&'static str, Vec<u8>)]) -> Result<()> {
    all.iter()
        .try_for_each(|(name, bytes)| files::write_atomic(&dir.join(name), bytes))
}
