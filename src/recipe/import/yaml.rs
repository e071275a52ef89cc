//! Reads the part of YAML that configurations of training tools use, and JSON: nested keys, lists, quoted and plain
//! values, comments, texts over several lines (`|`, `>`). Anchors and tags are errors that name the line.

use crate::base::{Error, Result, secrets};
use serde_json::Value;

/// The most lists and tables around a value: each one is a call inside another, and the stack of the program is limited. No
/// configuration has as many.
const LEVELS: usize = 64;

/// Characters of a line that an error shows.
const SHOWN: usize = 120;

/// A value; scalars are texts as written, without quotes.
#[derive(Debug, Clone, PartialEq)]
pub enum YamlNode {
    /// `null`, `~` or nothing.
    Nothing,
    Scalar(String),
    List(Vec<YamlNode>),
    Map(Vec<(String, YamlNode)>),
}

impl YamlNode {
    pub fn scalar(&self) -> Option<&str> {
        match self {
            Self::Scalar(text) => Some(text),
            _ => None,
        }
    }

    pub fn get(&self, name: &str) -> Option<&YamlNode> {
        match self {
            Self::Map(entries) => entries.iter().find(|(key, _)| key == name).map(|(_, node)| node),
            _ => None,
        }
    }

    /// True for values that turn an option off.
    pub fn is_off(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Scalar(text) => ["false", "no", "off", "none", ""].contains(&text.to_lowercase().as_str()),
            Self::List(list) => list.is_empty(),
            Self::Map(map) => map.is_empty(),
        }
    }

    /// True for a list of at least two values.
    pub fn is_several(&self) -> bool {
        matches!(self, Self::List(list) if list.len() > 1)
    }

    /// True for values that turn an option on.
    pub fn is_on(&self) -> bool {
        self.scalar()
            .is_some_and(|text| ["true", "yes", "on", "1"].contains(&text.to_lowercase().as_str()))
    }
}

impl From<&Value> for YamlNode {
    fn from(value: &Value) -> Self {
        match value {
            Value::Null => Self::Nothing,
            Value::String(text) => Self::Scalar(text.clone()),
            Value::Array(list) => Self::List(list.iter().map(Self::from).collect()),
            Value::Object(map) => Self::Map(map.iter().map(|(key, value)| (key.clone(), value.into())).collect()),
            other => Self::Scalar(other.to_string()),
        }
    }
}

/// A line with content.
struct YamlLine<'a> {
    number: usize,
    indent: usize,
    text: &'a str,
    /// The lines of a text that begins here.
    more: Vec<&'a str>,
}

/// Reads a file; JSON begins with `{`.
///
/// Errors: text that is neither; YAML that this reader does not know; more than `LEVELS` lists and tables in each other.
pub fn read(text: &str) -> Result<YamlNode> {
    if text.trim_start().starts_with('{') {
        let value: Value =
            serde_json::from_str(text).map_err(|e| Error::usage("the file is not valid JSON").cause(e))?;
        return Ok(YamlNode::from(&value));
    }
    let mut lines: Vec<YamlLine> = Vec::new();
    // The indentation of the key of a text over several lines.
    let mut open = None;
    for (index, line) in text.lines().enumerate() {
        let inner = line.trim_start();
        if let (Some(least), Some(last)) = (open, lines.last_mut())
            && (inner.is_empty() || line.len() - inner.len() > least)
        {
            last.more.push(line);
            continue;
        }
        let content = without_comment(line).trim_end();
        let text = content.trim_start();
        if text.is_empty() || text == "---" || text.starts_with('%') {
            continue;
        }
        let indent = content.len() - text.len();
        if content[..indent].contains('\t') {
            return Err(wrong(index + 1, "a tab before the text"));
        }
        // The key of an item of a list stands after its dashes.
        let mut key = text;
        while let Some(rest) = key.strip_prefix("- ") {
            key = rest.trim_start();
        }
        open = begins_text(text).then_some(indent + text.len() - key.len());
        lines.push(YamlLine {
            number: index + 1,
            indent,
            text,
            more: Vec::new(),
        });
    }
    let mut rest = lines.as_slice();
    let node = block(&mut rest, 0, 0)?;
    match rest.first() {
        Some(line) => Err(wrong(line.number, "less or more indentation than expected")),
        None => Ok(node),
    }
}

/// True for `key: |`, `key: >-` and the like.
fn begins_text(line: &str) -> bool {
    line.rsplit_once(": ").is_some_and(|(_, value)| is_mark(value))
}

fn is_mark(value: &str) -> bool {
    value.starts_with(['|', '>']) && value[1..].chars().all(|c| "+-".contains(c) || c.is_ascii_digit())
}

/// Lines without their common indentation and without empty ones at the end.
fn joined(lines: &[&str]) -> String {
    let indents = lines.iter().filter(|line| !line.trim().is_empty());
    let least = indents
        .map(|line| line.len() - line.trim_start().len())
        .min()
        .unwrap_or(0);
    let cut: Vec<&str> = lines.iter().map(|line| line.get(least..).unwrap_or_default()).collect();
    cut.join("\n").trim_end().to_string()
}

fn wrong(line: usize, what: &str) -> Error {
    Error::usage("the file has YAML that ft does not read")
        .at(format!("line {line}"))
        .found(clipped(&secrets::mask(what)))
}

fn clipped(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_string(),
    }
}

/// The number of lists and tables around what is inside one that has `depth` around it.
fn deeper(depth: usize, line: usize) -> Result<usize> {
    if depth < LEVELS {
        return Ok(depth + 1);
    }
    Err(Error::usage("the lists and tables in the file are nested too deep")
        .at(format!("line {line}"))
        .found(format!("more than {LEVELS} levels"))
        .expected(format!("at most {LEVELS}")))
}

/// True for the first line of an item of a list.
fn is_item(text: &str) -> bool {
    text == "-" || text.starts_with("- ")
}

/// Cuts a comment: `#` at the start or after a space, outside of quotes.
fn without_comment(line: &str) -> &str {
    let (mut quote, mut before) = (None, ' ');
    for (at, c) in line.char_indices() {
        match quote {
            Some(q) if c == q => quote = None,
            Some(_) => {}
            None if c == '#' && before.is_whitespace() => return &line[..at],
            None if (c == '"' || c == '\'') && !before.is_alphanumeric() => quote = Some(c),
            None => {}
        }
        before = c;
    }
    line
}

/// A map or a list whose lines have at least this indentation. `depth`: the lists and tables around it.
fn block(lines: &mut &[YamlLine], least: usize, depth: usize) -> Result<YamlNode> {
    let Some(first) = lines.first().filter(|line| line.indent >= least) else {
        return Ok(YamlNode::Nothing);
    };
    let indent = first.indent;
    if is_item(first.text) {
        return list(lines, indent, depth);
    }
    let inside = deeper(depth, first.number)?;
    let mut entries = Vec::new();
    while let Some((line, rest)) = lines.split_first().filter(|(line, _)| line.indent == indent) {
        let Some((key, value)) = pair(line.text) else {
            return Err(wrong(line.number, line.text));
        };
        *lines = rest;
        entries.push((key.to_string(), value_of(lines, line, value, indent, inside)?));
    }
    Ok(YamlNode::Map(entries))
}

fn list(lines: &mut &[YamlLine], indent: usize, depth: usize) -> Result<YamlNode> {
    let mut items = Vec::new();
    while let Some((line, rest)) = lines.split_first().filter(|(line, _)| line.indent == indent) {
        let Some(text) = line.text.strip_prefix('-') else { break };
        *lines = rest;
        items.push(item(lines, line, text, deeper(depth, line.number)?)?);
    }
    Ok(YamlNode::List(items))
}

/// Whether the next line is an item of a list; `None`: it begins in another column.
fn item_below(lines: &[YamlLine], column: usize) -> Option<bool> {
    let next = lines.first().filter(|next| next.indent == column)?;
    Some(is_item(next.text))
}

/// An item of a list: `text` is what follows the dash in its line, `lines` are those below it.
fn item(lines: &mut &[YamlLine], line: &YamlLine, text: &str, depth: usize) -> Result<YamlNode> {
    let inner = text.trim_start();
    // Where the rest of the line begins.
    let column = line.indent + line.text.len() - inner.len();
    if inner.is_empty() {
        return block(lines, column - text.len(), depth);
    }
    if is_item(inner) {
        // The other items of this list stand below its first one.
        let mut items = vec![item(lines, line, &inner[1..], deeper(depth, line.number)?)?];
        if item_below(lines, column) == Some(true)
            && let YamlNode::List(more) = list(lines, column, depth)?
        {
            items.extend(more);
        }
        return Ok(YamlNode::List(items));
    }
    let Some((key, value)) = pair(inner).filter(|_| !inner.starts_with(['"', '\'', '{', '['])) else {
        return scalar(line.number, inner, depth);
    };
    let inside = deeper(depth, line.number)?;
    let mut entries = vec![(key.to_string(), value_of(lines, line, value, column, inside)?)];
    // The other keys of this item stand below the first one.
    if item_below(lines, column) == Some(false)
        && let YamlNode::Map(more) = block(lines, column, depth)?
    {
        entries.extend(more);
    }
    Ok(YamlNode::Map(entries))
}

/// The value after `key:`, on this line or below it.
fn value_of(lines: &mut &[YamlLine], line: &YamlLine, value: &str, indent: usize, depth: usize) -> Result<YamlNode> {
    if is_mark(value) && !value.is_empty() {
        return Ok(YamlNode::Scalar(joined(&line.more)));
    }
    if !value.is_empty() {
        return scalar(line.number, value, depth);
    }
    // A list may have the indentation of its key.
    let listed = lines
        .first()
        .is_some_and(|next| next.indent == indent && is_item(next.text));
    if listed {
        list(lines, indent, depth)
    } else {
        block(lines, indent + 1, depth)
    }
}

fn pair(text: &str) -> Option<(&str, &str)> {
    let (key, value) = text.split_once(": ").or_else(|| Some((text.strip_suffix(':')?, "")))?;
    let key = key.trim().trim_matches(['"', '\'']);
    (!key.is_empty() && !key.contains(['{', '['])).then_some((key, value.trim()))
}

/// A value in one line. Each level of brackets is searched for commas once more: the limit of the levels keeps this short.
fn scalar(line: usize, text: &str, depth: usize) -> Result<YamlNode> {
    let text = text.trim();
    let inner = |open: char, close: char| text.strip_prefix(open).and_then(|t| t.strip_suffix(close));
    if let Some(list) = inner('[', ']') {
        let depth = deeper(depth, line)?;
        return Ok(YamlNode::List(
            split(list, line, depth)?
                .into_iter()
                .map(|item| scalar(line, item, depth))
                .collect::<Result<_>>()?,
        ));
    }
    if let Some(map) = inner('{', '}') {
        let depth = deeper(depth, line)?;
        let one = |item: &str| {
            let (key, value) = pair(item)
                .or_else(|| item.split_once(':'))
                .ok_or_else(|| wrong(line, item))?;
            Ok((
                key.trim().trim_matches(['"', '\'']).to_string(),
                scalar(line, value, depth)?,
            ))
        };
        return Ok(YamlNode::Map(
            split(map, line, depth)?.into_iter().map(one).collect::<Result<_>>()?,
        ));
    }
    if text.starts_with(['&', '*', '!', '|', '>', '[', '{']) && text.len() > 1 || ["|", ">"].contains(&text) {
        return Err(wrong(line, text));
    }
    for quote in ['"', '\''] {
        if let Some(quoted) = inner(quote, quote) {
            return Ok(YamlNode::Scalar(quoted.to_string()));
        }
    }
    Ok(match text {
        "" | "~" | "null" | "Null" | "NULL" => YamlNode::Nothing,
        text => YamlNode::Scalar(text.to_string()),
    })
}

/// Splits at commas outside of brackets and quotes. Errors: brackets that are too deep, before anything in them is read.
fn split(text: &str, line: usize, depth: usize) -> Result<Vec<&str>> {
    let (mut open, mut quote, mut start, mut out) = (0i32, None, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '{') => {
                deeper(depth + open.max(0) as usize, line)?;
                open += 1;
            }
            (None, ']' | '}') => open -= 1,
            (None, ',') if open == 0 => {
                out.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    out.push(&text[start..]);
    Ok(out.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn what_configurations_use() {
        let text = "# c\n---\na: 1\nb: \"x # y\" # z\nc:\n  - path: p\n    type: alpaca\n  - path: q\nd:\n- one\n- 'two'\n\
                    e: [1, \"b,c\", {k: v}]\nf: {r: 8, s: [1]}\ng:\n  h:\n    i: ~\nj:\nk: http://x/y\n";
        let node = read(text).unwrap();
        let s = |text: &str| YamlNode::Scalar(text.into());
        assert_eq!(node.get("a"), Some(&s("1")));
        assert_eq!(node.get("b"), Some(&s("x # y")));
        let first = YamlNode::Map(vec![("path".into(), s("p")), ("type".into(), s("alpaca"))]);
        let second = YamlNode::Map(vec![("path".into(), s("q"))]);
        assert_eq!(node.get("c"), Some(&YamlNode::List(vec![first, second])));
        assert_eq!(node.get("d"), Some(&YamlNode::List(vec![s("one"), s("two")])));
        let map = YamlNode::Map(vec![("k".into(), s("v"))]);
        assert_eq!(node.get("e"), Some(&YamlNode::List(vec![s("1"), s("b,c"), map])));
        assert_eq!(node.get("f").and_then(|f| f.get("r")), Some(&s("8")));
        assert_eq!(
            node.get("g").and_then(|g| g.get("h")).and_then(|h| h.get("i")),
            Some(&YamlNode::Nothing)
        );
        assert_eq!(node.get("j"), Some(&YamlNode::Nothing));
        assert_eq!(node.get("k"), Some(&s("http://x/y")));
        assert_eq!(
            read("{\"a\": [1, null]}").unwrap().get("a"),
            Some(&YamlNode::List(vec![s("1"), YamlNode::Nothing]))
        );
        for (bad, line) in [
            ("a: &x 1", "line 1"),
            ("a: 1\nb: !x t\n", "line 2"),
            ("a: 1\n   b: 2", "line 2"),
            ("a", "line 1"),
        ] {
            let e = read(bad).unwrap_err().to_string();
            assert!(e.contains(line), "{bad}: {e}");
        }
        assert!(read("{\"a\": ").is_err());
        let text =
            read("a: |\n  one # two\n\n    three: 3\n\nb: >-\n  c\nlist:\n  - d: |\n      e\n    f: 1\n").unwrap();
        assert_eq!(text.get("a"), Some(&s("one # two\n\n  three: 3")));
        assert_eq!(text.get("b"), Some(&s("c")));
        let item = YamlNode::Map(vec![("d".into(), s("e")), ("f".into(), s("1"))]);
        assert_eq!(text.get("list"), Some(&YamlNode::List(vec![item])));
    }

    #[test]
    fn lists_in_lists_may_begin_in_one_line() {
        let s = |text: &str| YamlNode::Scalar(text.into());
        let map = |entries: &[(&str, &str)]| {
            let entries = entries.iter().map(|&(key, value)| (key.to_string(), s(value)));
            YamlNode::Map(entries.collect())
        };
        let node = read("x:\n  - - a\n    - -5\n  - - c: |\n        t\n      d: 2\n    - e\n  - f\n").unwrap();
        let lists = vec![
            YamlNode::List(vec![s("a"), s("-5")]),
            YamlNode::List(vec![map(&[("c", "t"), ("d", "2")]), s("e")]),
            s("f"),
        ];
        assert_eq!(node.get("x"), Some(&YamlNode::List(lists)));
        assert_eq!(
            read("a:\n-\n  b: 1\n").unwrap().get("a"),
            Some(&YamlNode::List(vec![map(&[("b", "1")])]))
        );
    }

    /// Row F11: without a limit each of these texts overflows the stack, which ends the program.
    #[test]
    fn deep_nesting_is_an_error_in_time() {
        const DEEP: usize = 100_000;
        let started = Instant::now();
        let indented = |line: &str| -> String {
            let lines = (0..3000).map(|level| format!("{}{line}\n", " ".repeat(level)));
            lines.collect()
        };
        for (text, line) in [
            (format!("a: {}{}", "[".repeat(DEEP), "]".repeat(DEEP)), 1),
            (format!("b: 1\na: {}1{}", "{c: ".repeat(DEEP), "}".repeat(DEEP)), 2),
            (format!("a:\n  - {}{}", "[".repeat(DEEP), "]".repeat(DEEP)), 2),
            (format!("{}a", "- ".repeat(DEEP)), 1),
            (format!("{}a: 1", "- ".repeat(DEEP)), 1),
            (indented("a:"), LEVELS + 1),
            (indented("-"), LEVELS + 1),
        ] {
            let e = read(&text).unwrap_err().to_string();
            let place = format!("line {line}\n  found more than 64 levels, expected at most 64");
            assert!(e.contains("too deep") && e.contains(&place), "{e}");
        }
        // Brackets without an end, and JSON.
        let open = read(&format!("a: {}", "[".repeat(DEEP))).unwrap_err().to_string();
        assert!(open.contains("line 1") && open.len() < 400, "{open}");
        assert!(read(&"{\"a\": ".repeat(DEEP)).is_err());
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        // The last level that is read: the table around the lists is one too.
        let lists = |levels: usize| read(&format!("a: {}{}", "[".repeat(levels), "]".repeat(levels)));
        assert!(lists(LEVELS - 1).is_ok());
        assert!(lists(LEVELS).is_err());
    }
}
