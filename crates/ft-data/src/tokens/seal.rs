//! Lines of JSON with a hash of their text: the line is refused if any of its bytes has changed.

const BEFORE: &str = "{\"seal\":\"";
const BETWEEN: &str = "\",\"content\":";
const AFTER: &str = "}\n";

/// `json` and its hash, as one line of JSON.
pub(super) fn sealed(json: &str) -> String {
    format!("{BEFORE}{}{BETWEEN}{json}{AFTER}", hash(json.as_bytes()))
}

/// The JSON in a line that `sealed` made; `None`: the line is damaged, cut off, or of an older version.
pub(super) fn content(line: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(line).ok()?;
    let (seal, rest) = text.strip_prefix(BEFORE)?.split_once(BETWEEN)?;
    let json = rest.strip_suffix(AFTER)?;
    (seal == hash(json.as_bytes())).then_some(json)
}

/// The hash of a file or of a text of the cache.
pub(super) fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_string()
}
