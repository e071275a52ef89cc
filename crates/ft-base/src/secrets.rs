//! Texts that look like secrets, masked before they are recorded, shown or published: values of options and keys with names such as
//! `--api-key` and `HF_TOKEN`, tokens of known services, the user name and password in a URL. Also the names of variables with secrets.
//! A secret that has neither such a name nor such a form is not found.

use std::ops::Range;

/// What is in the place of a secret.
pub const MASK: &str = "<secret>";
/// The variable with the text that only the ranks of one job have.
pub const JOB: &str = "FT_JOB";

/// Words of names whose values are secrets, also at the end of a longer word: `PGPASSWORD`.
const STRONG: &[&str] = &[
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "apikey",
    "accesskey",
    "privatekey",
    "authorization",
    "signature",
];
/// Words before `token` or `key` in names whose values are no secrets: `eos_token`, `prompt_key`.
const ORDINARY: &[&str] = &[
    "answer", "audio", "bos", "cache", "chosen", "cls", "column", "end", "eos", "first", "image", "json", "label",
    "last", "mask", "max", "message", "messages", "min", "new", "num", "pad", "per", "primary", "prompt", "public",
    "rejected", "row", "sep", "sort", "special", "start", "stop", "text", "total", "unk", "video",
];
/// Last words of names that say where a secret is: `--password-file`.
const PLACES: &[&str] = &["file", "path", "dir", "env", "name", "length"];

/// Beginnings of the tokens of services, the fewest characters after them, and which of these are not letters or digits. Real tokens
/// are longer; shorter words are often names of files and models.
const TOKENS: &[(&str, usize, &str)] = &[
    ("sk-", 20, "-_"),
    ("sk_", 20, "_"),
    ("hf_", 20, ""),
    ("api_org_", 20, ""),
    ("ghp_", 20, ""),
    ("gho_", 20, ""),
    ("ghu_", 20, ""),
    ("ghs_", 20, ""),
    ("ghr_", 20, ""),
    ("github_pat_", 20, "_"),
    ("glpat-", 20, "-_"),
    ("xoxb-", 20, "-"),
    ("xoxp-", 20, "-"),
    ("AKIA", 16, ""),
    ("AIza", 30, "-_"),
    ("eyJ", 16, "-_."),
];
/// Most backslashes before a quote: five levels of escapes.
const MOST_ESCAPES: usize = 31;

/// The text with `MASK` in the place of each secret. Quotes stay, so TOML is still TOML.
pub fn mask(text: &str) -> String {
    let mut found = known(text);
    found.extend(named(text));
    found.extend(after_schemes(text));
    replaced(text, found)
}

/// As `mask`, but only what has the form of a secret: a value is not masked because of the name before it.
pub fn mask_known(text: &str) -> String {
    replaced(text, known(text))
}

/// As `mask_known`, but only the user name and the password of a URL: for paths and ids, where a name may look like a token.
pub fn mask_users(text: &str) -> String {
    replaced(text, users(text))
}

/// The address without user name, password and query, and without a slash at its end.
pub fn bare_address(url: &str) -> String {
    let (scheme, rest) = url.split_at(url.find("://").map_or(0, |at| at + 3));
    let rest = user_end(rest, rest.rfind('@')).map_or(rest, |end| &rest[end + 1..]);
    let end = rest.find(['?', '#']).unwrap_or(rest.len());
    format!("{scheme}{}", rest[..end].trim_end_matches('/'))
}

/// True for a variable of the environment with a secret, or with which a program can act for the user: by its name
/// (`SERVICE_API_KEY_2`, `SSH_AUTH_SOCK`), or because its value is a token or has a URL with a password.
pub fn is_variable(name: &str, value: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let parts = name.split('_');
    let parts: Vec<String> = parts
        .map(|part| part.trim_end_matches(|c: char| c.is_ascii_digit()).to_ascii_lowercase())
        .collect();
    // `MAX_TOKENS` and `CACHE_KEY` are settings. `SERVICE_JSON_KEY` and `SERVICE_PRIMARY_KEY` are keys of services.
    let is_ordinary = |before: Option<&String>| {
        before.is_some_and(|word| ORDINARY.contains(&&**word) && !["json", "primary"].contains(&&**word))
    };
    let is_number = (1..10).contains(&value.len()) && value.bytes().all(|b| b.is_ascii_digit());
    let is_secret = |at: usize| {
        let before = at.checked_sub(1).map(|at| &parts[at]);
        let whole = ["auth", "jwt", "cookie", "pass"];
        let is = |word: &str| {
            let is_key = word == "key" || word.ends_with("token");
            whole.contains(&word) || is_key && !is_ordinary(before) || STRONG.iter().any(|strong| word.contains(strong))
        };
        let part = &*parts[at];
        // `MAX_INPUT_TOKENS=512` is a count.
        let is_count = part == "tokens" && is_number;
        !is_count && (is(part) || part.strip_suffix('s').is_some_and(is))
    };
    let connects = ["DOCKER_HOST", "TORCHELASTIC_RUN_ID", JOB].contains(&&*name) || name.starts_with("DBUS_");
    // `PWD` alone is a directory.
    let of_name = connects || name.ends_with("_PWD") || (0..parts.len()).any(is_secret);
    let last = value.rfind('@').unwrap_or(0);
    let mut addresses = value.match_indices("://").map(|(at, mark)| at + mark.len());
    let of_url = addresses.any(|begin| value.get(begin..last).is_some_and(|user| user.contains(':')));
    of_name || of_url || !users(value).is_empty() || known(value).contains(&(0..value.len()))
}

/// Secrets that are known by their form.
fn known(text: &str) -> Vec<Range<usize>> {
    let mut found = users(text);
    found.extend(tokens(text));
    found
}

/// User name and password of each URL.
fn users(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    // The end of the word and its last `@`: found once for all addresses in the word, so the time is linear in the length.
    let (mut word, mut last) = (0, None);
    for (at, mark) in text.match_indices("://") {
        let begin = at + mark.len();
        if begin > word {
            let rest = &text[begin..];
            let length = rest.find(|c: char| c.is_whitespace() || "\"'`<>".contains(c));
            word = begin + length.unwrap_or(rest.len());
            last = text[begin..word].rfind('@').map(|at| begin + at);
        }
        let last = last.and_then(|last: usize| last.checked_sub(begin));
        let user = user_end(&text[begin..word], last).map(|end| begin..begin + end);
        found.extend(user.filter(|user| !["", "git"].contains(&&text[user.clone()])));
    }
    found
}

/// The `@` after the user name and the password of an address without its scheme. `last`: its last `@`.
fn user_end(rest: &str, last: Option<usize>) -> Option<usize> {
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let port = authority.rsplit_once(':').map_or("", |(_, port)| port);
    let is_port = port.bytes().all(|b| b.is_ascii_digit()) || authority.starts_with('[');
    match authority.rfind('@') {
        // A password may have a slash, although it should not.
        None if !is_port => last,
        end => end,
    }
}

fn tokens(text: &str) -> Vec<Range<usize>> {
    let of_word = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let mut found = Vec::new();
    for &(start, least, others) in TOKENS {
        let inside = |c: char| c.is_ascii_alphanumeric() || others.contains(c);
        let mut from = 0;
        while let Some(at) = text[from..].find(start).map(|at| from + at) {
            from = at + start.len();
            // Part of a longer word, such as `task-`, or of a path.
            if text[..at].ends_with(of_word) {
                continue;
            }
            let rest = &text[from..];
            let length = rest.find(|c| !inside(c)).unwrap_or(rest.len());
            // A token does not begin within this one: the character before it is one of a word.
            from += length;
            let (token, after) = rest.split_at(length);
            let is_file = after
                .strip_prefix('.')
                .is_some_and(|end| end.starts_with(|c: char| c.is_ascii_alphanumeric()));
            let goes_on = is_file || after.starts_with(['-', '_', '/']);
            let is_random = token.bytes().any(|b| b.is_ascii_digit() || b.is_ascii_uppercase());
            if length >= least && is_random && !goes_on {
                found.push(at..from);
            }
        }
    }
    found
}

/// The words after `Bearer`, and after other schemes in a header.
fn after_schemes(text: &str) -> Vec<Range<usize>> {
    let lower = text.to_ascii_lowercase();
    let mut found = Vec::new();
    for (scheme, is_sure) in [
        ("bearer ", false),
        ("authorization: basic ", true),
        ("authorization: token ", true),
    ] {
        for (at, _) in lower.match_indices(scheme) {
            let rest = text[at + scheme.len()..].trim_start_matches(' ');
            let length = rest
                .find(|c: char| c.is_whitespace() || "\"'`\\<>".contains(c))
                .unwrap_or(rest.len());
            let is_token = length >= 8 && rest[..length].bytes().any(|b| b.is_ascii_digit());
            if length > 0 && (is_sure || is_token || length >= 24) {
                let begin = text.len() - rest.len();
                found.push(begin..begin + length);
            }
        }
    }
    found
}

/// How the value follows its name.
#[derive(Clone, Copy, PartialEq)]
enum Sign {
    Equals,
    Colon,
    /// The next word of a command.
    Blank,
}

/// Values after names: `--api-key X`, `token=X`, `"password": "X"`.
fn named(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let is_of_name = |b: &u8| b.is_ascii_alphanumeric() || b"_-.".contains(b);
    let mut ends = ValueEnds::new(text);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let length = bytes[at..]
            .iter()
            .position(|b| !is_of_name(b))
            .unwrap_or(bytes.len() - at);
        if length > 0 {
            found.extend(value_after(&mut ends, at, at + length));
        }
        at += length + 1;
    }
    found
}

/// The value after the name `begin..end`, if it is a secret.
fn value_after(ends: &mut ValueEnds<'_>, begin: usize, end: usize) -> Option<Range<usize>> {
    let text = ends.text;
    let name = &text[begin..end];
    let is_option = name.starts_with('-') && name.len() > 1;
    let is_query = text[..begin].ends_with(['?', '&']);
    // The quote that ends the name in JSON, or the word in a shell.
    let after = text[end..].trim_start_matches(['\\', '"', '\'']);
    let near = after.trim_start_matches([' ', '\t']);
    let (value, sign) = if let Some(value) = near.strip_prefix('=').filter(|value| !value.starts_with('=')) {
        (value, Sign::Equals)
    } else if let Some(value) = near.strip_prefix(':').filter(|value| !value.starts_with([':', '/'])) {
        (value, Sign::Colon)
    } else if is_option && after.starts_with([' ', '\t', ',']) {
        (near.trim_start_matches(','), Sign::Blank)
    } else {
        return None;
    };
    let is_user = ["-u", "-U", "--user", "--proxy-user"].contains(&name);
    let kind = name_kind(name);
    if kind.is_none() && !is_user {
        return None;
    }
    let start = text.len() - value.trim_start_matches([' ', '\t']).len();
    let (span, is_quoted) = ends.extent(start, is_query);
    let written = &text[span.clone()];
    let digit = ends.has_digit(&span);
    let is_secret = match kind {
        _ if is_user => {
            let is_number = |id: &str| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit());
            // The ids of a user and a group: `docker run -u 1000:1000`.
            let is_ids = |(user, group)| is_number(user) && is_number(group);
            let parts = written.split_once(':').filter(|parts| !is_ids(*parts));
            sign == Sign::Blank && parts.is_some() && !written.contains("://")
        }
        // Words such as `key=value` are in many texts.
        Some(NameKind::Single) if !is_option && !is_query => written.len() >= 8 && digit,
        // `token: none` in a sentence.
        _ if sign == Sign::Colon && !is_quoted => written.len() >= 6 && digit,
        Some(NameKind::Weak | NameKind::Single) => written.len() > 6 || !written.bytes().all(|b| b.is_ascii_digit()),
        Some(NameKind::Strong) | None => true,
    };
    let is_next = sign == Sign::Blank && written.starts_with("--");
    (is_secret && !is_next && !is_placeholder(written)).then_some(span)
}

enum NameKind {
    Strong,
    /// `token`, `key` or `auth` after another word, or `token` alone.
    Weak,
    /// `key` or `auth` alone.
    Single,
}

/// `None`: a name of something that is not secret.
fn name_kind(name: &str) -> Option<NameKind> {
    // Of `model.hf_token` the last part.
    let name = name.rsplit('.').next().unwrap_or(name);
    let (mut spread, mut before) = (String::new(), ' ');
    for c in name.chars() {
        // `apiKey` has two words.
        if c.is_ascii_uppercase() && before.is_ascii_lowercase() {
            spread.push('_');
        }
        spread.push(c.to_ascii_lowercase());
        before = c;
    }
    let words = spread.split(['_', '-']);
    let words = words.map(|word| word.trim_end_matches(|c: char| c.is_ascii_digit()));
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    let (last, rest) = words.split_last()?;
    let is_strong = |word: &&str| {
        let word = word.strip_suffix('s').unwrap_or(word);
        STRONG.iter().any(|strong| word.ends_with(strong))
    };
    if words.iter().any(is_strong) {
        return (!PLACES.contains(last)).then_some(NameKind::Strong);
    }
    let is_single = ["key", "auth", "sig"].contains(last);
    if !is_single && !last.ends_with("token") || rest.last().is_some_and(|word| ORDINARY.contains(word)) {
        return None;
    }
    Some(if is_single && rest.is_empty() {
        NameKind::Single
    } else {
        NameKind::Weak
    })
}

/// The next position with a property. The positions where a search begins only grow, so each part of a text is read once.
struct Next {
    from: usize,
    at: usize,
}

impl Next {
    const NONE: Self = Self { from: 1, at: 0 };

    fn find(&mut self, from: usize, search: impl FnOnce() -> usize) -> usize {
        if !(self.from..=self.at).contains(&from) {
            *self = Self { from, at: search() };
        }
        self.at
    }
}

/// Finds the ends of values. A text may come from somebody else, so the time must be linear in its length, also where each value
/// goes on to the end of the text: what was found for one value is used for the next ones.
struct ValueEnds<'a> {
    text: &'a str,
    digit: Next,
    line: Next,
    /// Ends of values without quotes, and of those in the query of a URL; without the punctuation before them.
    plain: [(Next, usize); 2],
}

impl<'a> ValueEnds<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            text,
            digit: Next::NONE,
            line: Next::NONE,
            plain: [(Next::NONE, 0), (Next::NONE, 0)],
        }
    }

    fn has_digit(&mut self, span: &Range<usize>) -> bool {
        let bytes = self.text.as_bytes();
        let search = || next(bytes, span.start, |b| b.is_ascii_digit());
        self.digit.find(span.start, search) < span.end
    }

    /// The value that begins at `start`, without its quotes, and whether it has quotes. `is_query`: it is in the query of a URL.
    fn extent(&mut self, start: usize, is_query: bool) -> (Range<usize>, bool) {
        let text = self.text;
        let Some(open) = quotes(&text[start..]) else {
            return (start..self.plain_end(start, is_query), false);
        };
        let begin = start + open.len();
        let line = if ["\"\"\"", "'''"].contains(&open) {
            text.len()
        } else {
            let search = || next(text.as_bytes(), begin, |b| b == b'\n');
            self.line.find(begin, search)
        };
        let inside = &text[begin..line];
        let mut end = 0;
        while let Some(at) = inside[end..].find(open) {
            end += at;
            // A quote within the value.
            match open {
                "'" if inside[end..].starts_with(r"'\''") => end += 4,
                "\"" if inside[..end].ends_with('\\') => end += 1,
                _ => return (begin..begin + end, true),
            }
        }
        (begin..line, true)
    }

    fn plain_end(&mut self, start: usize, is_query: bool) -> usize {
        let text = self.text;
        let (stop, end) = &mut self.plain[usize::from(is_query)];
        stop.find(start, || {
            let stop = plain_stop(text.as_bytes(), start, is_query);
            *end = text[..stop].trim_end_matches([',', ';', ')', ']', '}']).len();
            stop
        });
        start.max(*end)
    }
}

/// The first byte of this kind from `from` on, or the end.
fn next(bytes: &[u8], from: usize, is_wanted: impl Fn(u8) -> bool) -> usize {
    let at = bytes[from..].iter().position(|b| is_wanted(*b));
    at.map_or(bytes.len(), |at| from + at)
}

/// Where a value without quotes stops.
fn plain_stop(bytes: &[u8], start: usize, is_query: bool) -> usize {
    let mut at = start;
    while let Some(byte) = bytes.get(at) {
        if byte.is_ascii_whitespace() || is_query && b"&#".contains(byte) {
            break;
        }
        let (length, is_quote) = quote_length(&bytes[at..]);
        let after = bytes.get(at + length);
        // A quote within a word of a shell does not end it.
        if is_quote && after.is_none_or(|b| b.is_ascii_whitespace() || b",;)]}\"'`#".contains(b)) {
            break;
        }
        at += length.max(1);
    }
    at
}

/// The quotes with which the value begins.
fn quotes(value: &str) -> Option<&str> {
    let first = |n: usize| value.get(..n);
    if value.starts_with(r"'\''") {
        return first(4);
    }
    let slashes = value.len() - value.trim_start_matches('\\').len();
    let rest = &value[slashes..];
    if slashes > MOST_ESCAPES {
        return None;
    }
    if rest.starts_with("\"\"\"") || rest.starts_with("'''") {
        return first(slashes + 3);
    }
    rest.starts_with(['"', '\'', '`']).then(|| first(slashes + 1)).flatten()
}

/// The length of a quote with its escape, or of backslashes before something else; and whether it is a quote.
fn quote_length(bytes: &[u8]) -> (usize, bool) {
    if bytes.starts_with(br"'\''") {
        return (4, true);
    }
    let slashes = bytes.iter().take_while(|b| **b == b'\\').count();
    match bytes.get(slashes) {
        Some(b'"' | b'\'' | b'`') => (slashes + 1, true),
        _ => (slashes, false),
    }
}

/// True for what stands for a value: a word that is no secret, the name of a variable, `<your-key>`.
fn is_placeholder(value: &str) -> bool {
    let words = ["", "true", "false", "none", "null", "auto", "value", "yes", "no"];
    let is_variable = value.strip_prefix('$').is_some_and(|name| {
        name.len() > 1
            && name
                .bytes()
                .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b"_{}".contains(&b))
    });
    let is_named = value.len() <= 64
        && value.starts_with('<')
        && value.ends_with('>')
        && !value.bytes().any(|b| b.is_ascii_digit());
    is_variable || is_named || words.iter().any(|word| value.eq_ignore_ascii_case(word))
}

fn replaced(text: &str, mut found: Vec<Range<usize>>) -> String {
    found.sort_by_key(|span| (span.start, span.end));
    let (mut out, mut at) = (String::with_capacity(text.len()), 0);
    for span in found.into_iter().filter(|span| !span.is_empty()) {
        if span.start >= at {
            out.push_str(&text[at..span.start]);
            out.push_str(MASK);
        }
        at = at.max(span.end);
    }
    out.push_str(&text[at..]);
    out
}

#[cfg(test)]
mod tests;
