//! Everything on which the tokens of a data set depend, as one hash.

use super::FORMAT;
use crate::dataset::Spec;
use crate::{ChatRender, TextCodec};
use ft_base::{Result, files};
use std::path::Path;

/// Bytes of all data files.
pub(super) fn bytes(spec: &Spec) -> Result<u64> {
    spec.files().map(|path| files::size(Path::new(path))).sum()
}

/// The name of the data set in the cache; `None` if the tokenizer or the template does not say what it is.
///
/// A file is identified by its path, size and time of change: a hash of 100 GB of text would take minutes at each
/// start. An editor or a download that changes a file changes its time.
pub(super) fn of(spec: &Spec, codec: &dyn TextCodec, template: Option<&dyn ChatRender>) -> Result<Option<String>> {
    let template = match template {
        None => Some(String::new()),
        Some(template) => template.identity(),
    };
    let (Some(codec), Some(template)) = (codec.identity(), template) else {
        return Ok(None);
    };
    let mut hasher = blake3::Hasher::new();
    let mut text = |t: &str| {
        hasher.update(&(t.len() as u64).to_le_bytes());
        hasher.update(t.as_bytes());
    };
    text(FORMAT);
    text(&codec);
    text(&template);
    text(&spec.settings());
    for path in spec.files() {
        text(&files::stamp(Path::new(path))?);
    }
    Ok(Some(hasher.finalize().to_hex()[..32].to_string()))
}
