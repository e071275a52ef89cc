//! Text to tokens, with the white space that `trim_blocks`, `lstrip_blocks` and the signs `-` and `+` take away.

use super::fail::{Fail, JinjaResult};
use super::unicode::is_space;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    Data(Arc<str>),
    PrintBegin,
    PrintEnd,
    BlockBegin,
    BlockEnd,
    Name(Arc<str>),
    Str(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
    End,
}

impl Token {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Data(_) => "text".into(),
            Self::PrintBegin => "{{".into(),
            Self::PrintEnd => "end of print statement".into(),
            Self::BlockBegin => "{%".into(),
            Self::BlockEnd => "end of statement block".into(),
            Self::Name(name) => format!("'{name}'"),
            Self::Str(_) => "a string".into(),
            Self::Int(_) | Self::Float(_) => "a number".into(),
            Self::Op(op) => format!("'{op}'"),
            Self::End => "end of template".into(),
        }
    }
}

/// Longest name, bytes: names are copied where they are used.
const LONGEST_NAME: usize = 4096;

/// Longest first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    /// The last text ended with a line break, or there was none yet.
    line_starts: bool,
    out: Vec<(Token, u32)>,
}

/// Tokens with their lines. The last one is `End`.
pub(super) fn tokens(source: &str) -> JinjaResult<Vec<(Token, u32)>> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        line_starts: true,
        out: Vec::new(),
    };
    lexer.root().map_err(|e| e.at(lexer.line))?;
    let line = lexer.line;
    lexer.out.push((Token::End, line));
    Ok(lexer.out)
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    /// Moves on over `bytes`, counting lines.
    fn take(&mut self, bytes: usize) -> &'a str {
        let taken = &self.source[self.at..self.at + bytes];
        self.line += taken.matches('\n').count() as u32;
        if bytes > 0 {
            self.line_starts = taken.ends_with('\n');
        }
        self.at += bytes;
        taken
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        let space = rest.len() - rest.trim_start_matches(is_space).len();
        if space > 0 {
            self.take(space);
        }
    }

    fn root(&mut self) -> JinjaResult<()> {
        loop {
            let rest = self.rest();
            let begin = rest
                .match_indices('{')
                .map(|(i, _)| i)
                .find(|&i| matches!(rest.as_bytes().get(i + 1), Some(b'{' | b'%' | b'#')));
            let Some(begin) = begin else {
                if !rest.is_empty() {
                    self.out.push((Token::Data(rest.into()), self.line));
                    self.take(rest.len());
                }
                return Ok(());
            };
            let kind = rest.as_bytes()[begin + 1];
            let sign = rest
                .as_bytes()
                .get(begin + 2)
                .copied()
                .filter(|c| matches!(c, b'-' | b'+'));
            let text = self.stripped(&rest[..begin], sign, kind != b'{');
            if !text.is_empty() {
                self.out.push((Token::Data(text.into()), self.line));
            }
            self.take(begin);
            let line = self.line;
            if kind == b'%'
                && let Some(length) = raw_begin(self.rest())
            {
                self.take(length);
                self.raw()?;
                continue;
            }
            self.take(2 + usize::from(sign.is_some()));
            match kind {
                b'#' => self.comment()?,
                b'%' => {
                    self.out.push((Token::BlockBegin, line));
                    self.inside(true)?;
                }
                _ => {
                    self.out.push((Token::PrintBegin, line));
                    self.inside(false)?;
                }
            }
        }
    }

    /// Text before a tag without the white space that the tag takes away.
    fn stripped(&self, text: &'a str, sign: Option<u8>, lstrip: bool) -> &'a str {
        if sign == Some(b'-') {
            return text.trim_end_matches(is_space);
        }
        if sign.is_none() && lstrip {
            let start = text.rfind('\n').map_or(0, |i| i + 1);
            if (start > 0 || self.line_starts) && text[start..].chars().all(is_space) {
                return &text[..start];
            }
        }
        text
    }

    /// Consumes the end of a block or comment and the white space that belongs to it.
    fn end(&mut self, tag: &str) -> bool {
        let rest = self.rest();
        if let Some(tail) = rest.strip_prefix('-').and_then(|r| r.strip_prefix(tag)) {
            let space = tail.len() - tail.trim_start_matches(is_space).len();
            self.take(1 + tag.len() + space);
        } else if tag != "}}" && rest.strip_prefix('+').is_some_and(|r| r.starts_with(tag)) {
            self.take(1 + tag.len());
        } else if let Some(tail) = rest.strip_prefix(tag) {
            let newline = tag != "}}" && tail.starts_with('\n');
            self.take(tag.len() + usize::from(newline));
        } else {
            return false;
        }
        true
    }

    fn comment(&mut self) -> JinjaResult<()> {
        // jinja2 ignores a comment that begins at the end of the file.
        if self.rest().is_empty() {
            return Ok(());
        }
        let Some(at) = self.rest().find("#}") else {
            return Err(Fail::syntax("Missing end of comment tag"));
        };
        let signed = at > 0 && matches!(self.rest().as_bytes()[at - 1], b'-' | b'+');
        self.take(at - usize::from(signed));
        self.end("#}");
        Ok(())
    }

    fn raw(&mut self) -> JinjaResult<()> {
        let rest = self.rest();
        // As for a comment.
        if rest.is_empty() {
            return Ok(());
        }
        for (at, _) in rest.match_indices("{%") {
            let tail = &rest[at + 2..];
            let sign = tail.bytes().next().filter(|c| matches!(c, b'-' | b'+'));
            let tail = &tail[usize::from(sign.is_some())..];
            let Some(tail) = tail.trim_start_matches(is_space).strip_prefix("endraw") else {
                continue;
            };
            let tail = tail.trim_start_matches(is_space);
            if !["%}", "-%}", "+%}"].iter().any(|end| tail.starts_with(end)) {
                continue;
            }
            let text = self.stripped(&rest[..at], sign, true);
            if !text.is_empty() {
                self.out.push((Token::Data(text.into()), self.line));
            }
            self.take(rest.len() - tail.len());
            self.end("%}");
            return Ok(());
        }
        Err(Fail::syntax("Missing end of raw directive"))
    }

    /// Tokens up to the end of the tag.
    fn inside(&mut self, block: bool) -> JinjaResult<()> {
        let (tag, end) = if block {
            ("%}", Token::BlockEnd)
        } else {
            ("}}", Token::PrintEnd)
        };
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            let line = self.line;
            if open.is_empty() && self.end(tag) {
                self.out.push((end, line));
                return Ok(());
            }
            let rest = self.rest();
            let Some(c) = rest.chars().next() else {
                // The parser says what is missing.
                return Ok(());
            };
            if is_space(c) {
                self.skip_space();
                continue;
            }
            let (token, length) = if c.is_ascii_digit() {
                number(rest, self.source[..self.at].ends_with('.'))?
            } else if c.is_alphanumeric() || c == '_' {
                let length = rest
                    .find(|c: char| !(c.is_alphanumeric() || c == '_'))
                    .unwrap_or(rest.len());
                if length > LONGEST_NAME {
                    return Err(Fail::limit("a name is too long"));
                }
                (Token::Name(rest[..length].into()), length)
            } else if c == '\'' || c == '"' {
                string(rest, c)?
            } else if let Some(op) = OPERATORS.into_iter().find(|op| rest.starts_with(op)) {
                match op {
                    "{" => open.push("}"),
                    "(" => open.push(")"),
                    "[" => open.push("]"),
                    "}" | ")" | "]" => match open.pop() {
                        None => return Err(Fail::syntax(format!("unexpected '{op}'"))),
                        Some(expected) if expected != op => {
                            return Err(Fail::syntax(format!("unexpected '{op}', expected '{expected}'")));
                        }
                        Some(_) => {}
                    },
                    _ => {}
                }
                (Token::Op(op), op.len())
            } else {
                return Err(Fail::syntax(format!("unexpected char {c:?}")));
            };
            self.out.push((token, line));
            self.take(length);
        }
    }
}

/// Length of `{% raw %}` if the text begins with it.
fn raw_begin(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("{%")?;
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest);
    let rest = rest.trim_start_matches(is_space).strip_prefix("raw")?;
    let rest = rest.trim_start_matches(is_space);
    let rest = match rest.strip_prefix("-%}") {
        Some(tail) => tail.trim_start_matches(is_space),
        None => rest.strip_prefix("%}")?,
    };
    Some(text.len() - rest.len())
}

/// Digits with single `_` between them.
fn digits(text: &str, base: u32) -> usize {
    let bytes = text.as_bytes();
    let is_digit = |i: usize| bytes.get(i).is_some_and(|b| (*b as char).is_digit(base));
    let mut i = 0;
    while is_digit(i) || (i > 0 && bytes.get(i) == Some(&b'_') && is_digit(i + 1)) {
        i += 1;
    }
    i
}

fn number(text: &str, after_dot: bool) -> JinjaResult<(Token, usize)> {
    let whole = digits(text, 10);
    // `a.0.1` are two indices, not a float.
    if !after_dot {
        let mut end = whole;
        let fraction = text[whole..].strip_prefix('.').map_or(0, |t| digits(t, 10));
        if fraction > 0 {
            end += 1 + fraction;
        }
        let exponent = text[end..].strip_prefix(['e', 'E']).and_then(|t| {
            let sign = usize::from(t.starts_with(['+', '-']));
            let n = digits(&t[sign..], 10);
            (n > 0).then_some(1 + sign + n)
        });
        end += exponent.unwrap_or(0);
        if end > whole {
            let value = text[..end]
                .replace('_', "")
                .parse()
                .map_err(|_| Fail::syntax("invalid number"))?;
            return Ok((Token::Float(value), end));
        }
    }
    let (base, prefix) = match text.as_bytes().get(1).map(u8::to_ascii_lowercase) {
        Some(b'x') if text.starts_with('0') => (16, 2),
        Some(b'o') if text.starts_with('0') => (8, 2),
        Some(b'b') if text.starts_with('0') => (2, 2),
        _ => (10, 0),
    };
    let body = &text[prefix..];
    // `0x_ff` may have a `_` after its prefix.
    let lead = usize::from(prefix > 0 && body.starts_with('_'));
    let length = prefix + lead + digits(&body[lead..], base);
    if prefix > 0 && length > prefix + lead {
        return integer(&text[prefix..length], base).map(|v| (v, length));
    }
    // A number that begins with 0 is 0 alone.
    let length = if text.starts_with('0') {
        text[..whole].len() - text[..whole].trim_start_matches(['0', '_']).len()
    } else {
        whole
    };
    integer(&text[..length], 10).map(|v| (v, length))
}

fn integer(text: &str, base: u32) -> JinjaResult<Token> {
    i128::from_str_radix(&text.replace('_', ""), base)
        .map(Token::Int)
        .map_err(|_| Fail::unsupported("an integer of more than 127 bits"))
}

fn string(text: &str, quote: char) -> JinjaResult<(Token, usize)> {
    let mut out = String::new();
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        if c == quote {
            return Ok((Token::Str(out), at + 1));
        }
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some((at, c)) = chars.next() else { break };
        match c {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(c),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\u{b}'),
            '0'..='7' => {
                let octal = |b: &u8| (b'0'..=b'7').contains(b);
                let n = text.as_bytes()[at..].iter().take(3).take_while(|b| octal(b)).count();
                out.push(character(&text[at..at + n], 8)?);
                chars.by_ref().take(n - 1).for_each(|_| {});
            }
            'x' | 'u' | 'U' => {
                let n = match c {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let code = text
                    .get(at + 1..at + 1 + n)
                    .filter(|t| t.bytes().all(|b| b.is_ascii_hexdigit()));
                let code = code.ok_or_else(|| Fail::syntax(format!("truncated \\{c} escape in a string")))?;
                out.push(character(code, 16)?);
                chars.by_ref().take(n).for_each(|_| {});
            }
            'N' => return Err(Fail::unsupported("\\N{name} in a string")),
            c if c.is_ascii() => out.extend(['\\', c]),
            // Python reads the escape of this character after an escaped backslash.
            c => match c as u32 {
                code @ ..0x100 => out.push_str(&format!("\\x{code:02x}")),
                code @ ..0x10000 => out.push_str(&format!("\\u{code:04x}")),
                code => out.push_str(&format!("\\U{code:08x}")),
            },
        }
    }
    Err(Fail::syntax("a string has no end"))
}

fn character(code: &str, base: u32) -> JinjaResult<char> {
    let code = u32::from_str_radix(code, base).map_err(|_| Fail::syntax("invalid escape in a string"))?;
    match char::from_u32(code) {
        Some(c) => Ok(c),
        None if code <= 0x10ffff => Err(Fail::unsupported("half of a surrogate pair in a string")),
        None => Err(Fail::syntax("illegal Unicode character in a string")),
    }
}
