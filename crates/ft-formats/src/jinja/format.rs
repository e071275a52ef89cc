//! `'{}'.format(values)`, and Python's formats of numbers and text.

use super::args::Args;
use super::fail::{Fail, JinjaResult, NODE, charge, charge_text, check_text};
use super::interp::Interp;
use super::print::{exponent, float_text};
use super::text::padded;
use super::value::Value;
use std::sync::Arc;

/// Most digits behind the point.
const DIGITS: usize = 1000;
/// Stands for the type that a format of a float does not have, in Python as well.
const NO_TYPE: char = '\0';

/// How one value is written: `[[fill]align][sign][#][0][width][grouping][.precision][type]`.
#[derive(Debug, Clone)]
pub(super) struct FormatSpec {
    pub fill: char,
    /// `<`, `>`, `^`, `=`; or what the value's type has.
    pub align: Option<char>,
    pub sign: char,
    pub alternate: bool,
    pub width: usize,
    grouping: Option<char>,
    pub precision: Option<usize>,
    kind: Option<char>,
}

fn grouped(digits: &str, by: char, every: usize) -> String {
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(every) {
            out.push(by);
        }
        out.push(c);
    }
    out
}

/// `%g` with P digits; `alternate` keeps the zeros at the end. `is_plain`: a format without a type, which has a digit
/// behind the point or an exponent.
fn general(x: f64, precision: usize, alternate: bool, is_plain: bool) -> String {
    let precision = precision.max(1);
    let text = format!("{x:.*e}", precision - 1);
    let (mantissa, e) = text.split_once('e').unwrap_or((&text, "0"));
    let e: i64 = e.parse().unwrap_or(0);
    let trim = |t: &str| {
        if t.contains('.') && !alternate {
            t.trim_end_matches('0').trim_end_matches('.').to_string()
        } else {
            t.to_string()
        }
    };
    if (-4..precision as i64 - i64::from(is_plain)).contains(&e) {
        let mut text = trim(&format!("{x:.*}", (precision as i64 - 1 - e).max(0) as usize));
        if is_plain && !text.contains('.') {
            text.push_str(".0");
        }
        text
    } else {
        exponent(&format!("{}e{e}", trim(mantissa)))
    }
}

/// Digits of a float without its sign. The kind `NO_TYPE` is for a precision alone.
pub(super) fn float_digits(x: f64, kind: char, precision: Option<usize>, alternate: bool) -> JinjaResult<String> {
    if precision.is_some_and(|p| p > DIGITS) {
        return Err(Fail::unsupported(format!("more than {DIGITS} digits behind the point")));
    }
    let x = x.abs();
    let digits = precision.unwrap_or(6);
    // Exact digits of large and small numbers take long.
    charge((digits + 20).saturating_mul(16))?;
    if !x.is_finite() {
        let text = if x.is_nan() { "nan" } else { "inf" };
        return Ok(match kind {
            'F' | 'E' | 'G' => text.to_uppercase(),
            '%' => format!("{text}%"),
            _ => text.into(),
        });
    }
    let mut out = match kind {
        'f' | 'F' => format!("{x:.digits$}"),
        'e' | 'E' => exponent(&format!("{x:.digits$e}")),
        'g' | 'G' => general(x, digits, alternate, false),
        NO_TYPE => general(x, digits, alternate, true),
        '%' => format!("{:.digits$}%", x * 100.0),
        _ => {
            return Err(Fail::failed(format!(
                "Unknown format code '{kind}' for object of type 'float'"
            )));
        }
    };
    if alternate && !out.contains('.') {
        return Err(Fail::unsupported("the flag `#` for this number"));
    }
    if kind.is_ascii_uppercase() {
        out = out.to_uppercase();
    }
    Ok(out)
}

pub(super) fn int_digits(n: i128, kind: char, alternate: bool) -> (String, &'static str) {
    let n = n.unsigned_abs();
    let (digits, prefix) = match kind {
        'x' => (format!("{n:x}"), "0x"),
        'X' => (format!("{n:X}"), "0X"),
        'o' => (format!("{n:o}"), "0o"),
        'b' => (format!("{n:b}"), "0b"),
        _ => (n.to_string(), ""),
    };
    (digits, if alternate { prefix } else { "" })
}

impl FormatSpec {
    pub(super) fn plain() -> Self {
        Self {
            fill: ' ',
            align: None,
            sign: '-',
            alternate: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: None,
        }
    }

    fn parse(text: &str) -> JinjaResult<Self> {
        let mut spec = Self::plain();
        let chars: Vec<char> = text.chars().collect();
        let at = |i: usize| chars.get(i).copied();
        let is_align = |c: Option<char>| c.filter(|c| "<>^=".contains(*c));
        let mut i = 0;
        if let Some(align) = is_align(at(1)) {
            (spec.fill, spec.align, i) = (chars[0], Some(align), 2);
        } else if let Some(align) = is_align(at(0)) {
            (spec.align, i) = (Some(align), 1);
        }
        if let Some(sign) = at(i).filter(|c| "+- ".contains(*c)) {
            (spec.sign, i) = (sign, i + 1);
        }
        if at(i) == Some('z') {
            return Err(Fail::unsupported("the format flag `z`"));
        }
        if at(i) == Some('#') {
            (spec.alternate, i) = (true, i + 1);
        }
        if at(i) == Some('0') {
            if spec.align.is_none() {
                (spec.fill, spec.align) = ('0', Some('='));
            }
            i += 1;
        }
        let number = |i: &mut usize| -> JinjaResult<Option<usize>> {
            let start = *i;
            while at(*i).is_some_and(|c| c.is_ascii_digit()) {
                *i += 1;
            }
            if start == *i {
                return Ok(None);
            }
            let digits: String = chars[start..*i].iter().collect();
            let too_many = |_| Fail::failed("Too many decimal digits in format string");
            digits.parse::<u32>().map(|n| Some(n as usize)).map_err(too_many)
        };
        spec.width = number(&mut i)?.unwrap_or(0);
        if let Some(by) = at(i).filter(|c| *c == ',' || *c == '_') {
            (spec.grouping, i) = (Some(by), i + 1);
        }
        if at(i) == Some('.') {
            i += 1;
            spec.precision = number(&mut i)?;
            if spec.precision.is_none() {
                return Err(Fail::failed("Format specifier missing precision"));
            }
        }
        spec.kind = at(i);
        if i + 1 < chars.len() {
            Err(Fail::failed(format!("Invalid format specifier '{text}'")))
        } else {
            Ok(spec)
        }
    }

    fn text(&self, text: &str) -> JinjaResult<String> {
        if !matches!(self.kind, None | Some('s')) {
            return Err(Fail::failed(format!(
                "Unknown format code '{}' for object of type 'str'",
                self.kind.unwrap_or(' ')
            )));
        }
        if self.sign != '-' || self.alternate || self.grouping.is_some() || self.align == Some('=') {
            return Err(Fail::failed("this format is not allowed for text"));
        }
        charge(text.len())?;
        let cut: String;
        let text = match self.precision {
            Some(most) => {
                cut = text.chars().take(most).collect();
                &cut
            }
            None => text,
        };
        self.aligned("", text, '<')
    }

    /// `digits` after `sign`, in the width.
    pub(super) fn aligned(&self, sign: &str, digits: &str, default: char) -> JinjaResult<String> {
        let length = sign.chars().count() + digits.chars().count();
        let pad = self.width.saturating_sub(length);
        match self.align.unwrap_or(default) {
            '=' => Ok([sign, &padded(digits, pad, 0, self.fill)?].concat()),
            '<' => padded(&[sign, digits].concat(), 0, pad, self.fill),
            '^' => padded(&[sign, digits].concat(), pad / 2, pad - pad / 2, self.fill),
            _ => padded(&[sign, digits].concat(), pad, 0, self.fill),
        }
    }

    pub(super) fn number(&self, is_negative: bool, prefix: &str, digits: String, every: usize) -> JinjaResult<String> {
        let sign = match (is_negative, self.sign) {
            (true, _) => "-",
            (false, '-') => "",
            (false, '+') => "+",
            _ => " ",
        };
        let digits = match self.grouping {
            None => digits,
            Some(_) if self.align == Some('=') && self.fill == '0' && self.width > 0 => {
                return Err(Fail::unsupported("zeros and grouping together"));
            }
            Some(by) => {
                let end = digits
                    .find(|c: char| !c.is_ascii_alphanumeric())
                    .unwrap_or(digits.len());
                format!("{}{}", grouped(&digits[..end], by, every), &digits[end..])
            }
        };
        self.aligned(&format!("{sign}{prefix}"), &digits, '>')
    }

    fn value(&self, value: &Value) -> JinjaResult<String> {
        match (value, value.as_int()) {
            (Value::Str(s), _) => self.text(s),
            (Value::Float(x), _) => self.float(*x),
            (_, Some(n)) => self.int(n),
            _ => Err(Fail::failed(format!(
                "unsupported format string passed to {}.__format__",
                value.type_name()
            ))),
        }
    }

    fn int(&self, n: i128) -> JinjaResult<String> {
        match self.kind {
            Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => self.float(n as f64),
            Some('c') => {
                let c = u32::try_from(n).ok().and_then(char::from_u32);
                let c = c.ok_or_else(|| Fail::failed("%c arg not in range(0x110000)"))?;
                self.aligned("", &c.to_string(), '<')
            }
            None | Some('d' | 'n' | 'x' | 'X' | 'o' | 'b') => {
                if self.precision.is_some() {
                    return Err(Fail::failed("Precision not allowed in integer format specifier"));
                }
                let kind = self.kind.unwrap_or('d');
                let every = if matches!(kind, 'd' | 'n') { 3 } else { 4 };
                if every == 4 && self.grouping == Some(',') {
                    return Err(Fail::failed(format!("Cannot specify ',' with '{kind}'.")));
                }
                let (digits, prefix) = int_digits(n, kind, self.alternate);
                self.number(n < 0, prefix, digits, every)
            }
            Some(kind) => Err(Fail::failed(format!(
                "Unknown format code '{kind}' for object of type 'int'"
            ))),
        }
    }

    fn float(&self, x: f64) -> JinjaResult<String> {
        let digits = match (self.kind.filter(|kind| *kind != NO_TYPE), self.precision) {
            (None, None) => float_text(x.abs()),
            (None, Some(_)) => float_digits(x, NO_TYPE, self.precision, self.alternate)?,
            (Some('n'), precision) => float_digits(x, 'g', precision, self.alternate)?,
            (Some(kind), precision) => float_digits(x, kind, precision, self.alternate)?,
        };
        if self.grouping.is_some() && !x.is_finite() {
            return Err(Fail::unsupported("grouping of what is no number"));
        }
        self.number(x.is_sign_negative() && !x.is_nan(), "", digits, 3)
    }
}

/// `ascii(value)` of a representation.
pub(super) fn ascii(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c as u32 {
            code if code < 0x80 => out.push(c),
            code @ ..0x100 => out.push_str(&format!("\\x{code:02x}")),
            code @ ..0x10000 => out.push_str(&format!("\\u{code:04x}")),
            code => out.push_str(&format!("\\U{code:08x}")),
        }
    }
    out
}

/// `'...'.format(...)`.
pub(super) fn braces(interp: &mut Interp, format: &str, args: &Args) -> JinjaResult<String> {
    let mut state = Braces {
        next: Some(0),
        explicit: false,
    };
    state.run(interp, format, args, 2)
}

struct Braces {
    /// The next field without a number; `None` once one had a number.
    next: Option<usize>,
    explicit: bool,
}

impl Braces {
    fn run(&mut self, interp: &mut Interp, format: &str, args: &Args, levels: usize) -> JinjaResult<String> {
        if levels == 0 {
            return Err(Fail::failed("Max string recursion exceeded"));
        }
        charge(format.len())?;
        let mut out = String::new();
        let mut rest = format;
        loop {
            let Some(at) = rest.find(['{', '}']) else {
                out.push_str(rest);
                check_text(&out)?;
                return Ok(out);
            };
            out.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(tail) = rest.strip_prefix(brace) {
                out.push_str(brace);
                rest = tail;
                continue;
            }
            if brace == "}" {
                return Err(Fail::failed("Single '}' encountered in format string"));
            }
            let mut depth = 1;
            let end = rest.char_indices().find(|(_, c)| {
                match c {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    _ => {}
                }
                depth == 0
            });
            let Some((end, _)) = end else {
                return Err(Fail::failed("expected '}' before end of string"));
            };
            let field = &rest[..end];
            rest = &rest[end + 1..];
            let piece = self.field(interp, field, args, levels)?;
            charge_text(out.len().saturating_add(piece.len()).min(piece.len() + 1))?;
            out.push_str(&piece);
            check_text(&out)?;
        }
    }

    fn field(&mut self, interp: &mut Interp, field: &str, args: &Args, levels: usize) -> JinjaResult<String> {
        charge(4 * NODE)?;
        // The name ends at the first `!` or `:` outside of brackets.
        let mut inside = false;
        let end = field.char_indices().find(|(_, c)| {
            match c {
                '[' => inside = true,
                ']' => inside = false,
                _ => {}
            }
            !inside && matches!(c, '!' | ':')
        });
        let (name, tail) = field.split_at(end.map_or(field.len(), |(i, _)| i));
        let (conversion, spec) = match tail.strip_prefix('!') {
            Some(tail) => {
                let mut chars = tail.chars();
                let conversion = chars
                    .next()
                    .ok_or_else(|| Fail::failed("unmatched '{' in format spec"))?;
                match chars.as_str() {
                    "" => (Some(conversion), ""),
                    more => match more.strip_prefix(':') {
                        Some(spec) => (Some(conversion), spec),
                        None => return Err(Fail::failed("expected ':' after conversion specifier")),
                    },
                }
            }
            None => (None, tail.strip_prefix(':').unwrap_or("")),
        };
        let value = self.lookup(interp, name, args)?;
        let value = match conversion {
            None => value,
            Some('s') => Value::Str(interp.text(&value)?),
            Some('r') => Value::str(interp.repr_text(&value)?),
            Some('a') => Value::str(ascii(&interp.repr_text(&value)?)),
            Some(c) => return Err(Fail::failed(format!("Unknown conversion specifier {c}"))),
        };
        let spec = if spec.contains(['{', '}']) {
            self.run(interp, spec, args, levels - 1)?
        } else {
            spec.to_string()
        };
        if spec.is_empty() {
            Ok(interp.text(&value)?.to_string())
        } else {
            FormatSpec::parse(&spec)?.value(&value)
        }
    }

    fn lookup(&mut self, interp: &mut Interp, name: &str, args: &Args) -> JinjaResult<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let mut value = if first.is_empty() || first.bytes().all(|b| b.is_ascii_digit()) {
            let at = match (first.is_empty(), self.next) {
                (true, Some(at)) if !self.explicit => {
                    self.next = Some(at + 1);
                    at
                }
                (false, _) if self.explicit || self.next == Some(0) => {
                    self.explicit = true;
                    first
                        .parse()
                        .map_err(|_| Fail::failed("Too many decimal digits in format string"))?
                }
                _ => {
                    return Err(Fail::failed(
                        "cannot switch between manual field specification and automatic field numbering",
                    ));
                }
            };
            let found = args.positional.get(at).cloned();
            found
                .ok_or_else(|| Fail::failed(format!("Replacement index {at} out of range for positional args tuple")))?
        } else {
            charge(args.named.len().saturating_mul(4))?;
            let found = args.named.iter().find(|(n, _)| **n == *first).map(|(_, v)| v.clone());
            found.ok_or_else(|| Fail::failed(format!("KeyError: '{first}'")))?
        };
        while !rest.is_empty() {
            if let Some(tail) = rest.strip_prefix('.') {
                let end = tail.find(['.', '[']).unwrap_or(tail.len());
                let name: Arc<str> = tail[..end].into();
                if name.is_empty() {
                    return Err(Fail::failed("Empty attribute in format string"));
                }
                value = interp.attribute(&value, &name)?;
                rest = &tail[end..];
            } else if let Some(tail) = rest.strip_prefix('[') {
                let Some((key, tail)) = tail.split_once(']') else {
                    return Err(Fail::failed("Missing ']' in format string"));
                };
                let key = match key.parse::<u32>() {
                    Ok(n) if key.bytes().all(|b| b.is_ascii_digit()) => Value::Int(n.into()),
                    _ if key.is_empty() => return Err(Fail::failed("Empty attribute in format string")),
                    _ => Value::str(key),
                };
                value = interp.item(&value, &key)?;
                rest = tail;
            } else {
                return Err(Fail::failed("Only '.' or '[' may follow ']' in format field specifier"));
            }
        }
        Ok(value)
    }
}
