//! Everything on which the tokens of a dataset depend, as one hash.

use super::{FORMAT, TokenRequest};
use crate::dataset::DatasetSpec;
use crate::screen::Screen;
use ft_base::{Result, files};
use std::path::Path;

/// Version of the rules by which rows are read, screened and tokenized. Other rules are another key: the files of
/// earlier versions may have other rows and tokens.
pub(crate) const RULES: &str = "rules 5";

/// Bytes of all data files.
pub(super) fn bytes(spec: &DatasetSpec) -> Result<u64> {
    spec.files().map(|path| files::size(Path::new(path))).sum()
}

/// The name of the dataset in the cache; `None` if the tokenizer or the template does not say what it is.
///
/// A file is identified by its path, size and time of change: a hash of 100 GB of text would take minutes at each
/// start. An editor or a download that changes a file changes its time.
pub(super) fn of(request: &TokenRequest) -> Result<Option<String>> {
    let spec = request.spec;
    let template = match request.template {
        None => Some(String::new()),
        Some(template) => template.identity(),
    };
    let (Some(codec), Some(template)) = (request.codec.identity(), template) else {
        return Ok(None);
    };
    let mut hasher = blake3::Hasher::new();
    let mut text = |t: &str| {
        hasher.update(&(t.len() as u64).to_le_bytes());
        hasher.update(t.as_bytes());
    };
    text(FORMAT);
    text(RULES);
    text(&codec);
    text(&template);
    text(&spec.settings());
    text(&format!("{:?}", request.want));
    let screen = spec.screen.filter(|screen| screen.drops()).map(Screen::spec);
    text(&format!("{screen:?}"));
    if screen.is_some_and(|screen| screen.judges.is_some()) {
        // The rule by which votes are compared.
        text("votes 2");
    }
    let evaluation = screen
        .into_iter()
        .flat_map(|screen| screen.evaluation.iter().map(String::as_str));
    for path in spec.files().chain(evaluation) {
        text(&files::stamp(Path::new(path))?);
    }
    Ok(Some(hasher.finalize().to_hex()[..32].to_string()))
}
