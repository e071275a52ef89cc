//! `'%s' % values` and the filter `format`.

use super::args::Args;
use super::fail::{Fail, JinjaResult, NODE, charge, charge_text, check_text};
use super::format::{FormatSpec, ascii, float_digits, int_digits};
use super::print::quote;
use super::text::padded;
use super::unicode::is_printable;
use super::value::Value;

/// The text of `percent` for a value that is no text or number.
fn shown(value: &Value, repr: bool) -> JinjaResult<String> {
    match value {
        Value::Str(s) | Value::Markup(s) if !repr => {
            charge_text(s.len())?;
            Ok(s.to_string())
        }
        Value::Str(s) => {
            let mut out = String::new();
            quote(&mut out, s)?;
            Ok(out)
        }
        Value::Undefined(_) if !repr => Ok(String::new()),
        Value::Namespace(_) | Value::Object(_) | Value::Iter(_) => {
            Err(Fail::unsupported(format!("`%` with a {}", value.type_name())))
        }
        _ => super::print::simple_repr(value),
    }
}

/// `format % args`.
pub(super) fn percent(format: &str, args: &Value) -> JinjaResult<Value> {
    charge(format.len())?;
    let values: Vec<Value> = match args {
        Value::Tuple(seq) | Value::Group(seq) => {
            charge(seq.items.len().saturating_mul(16))?;
            seq.items.clone()
        }
        one => vec![one.clone()],
    };
    let mut values = values.into_iter();
    let mut used_names = false;
    let mut out = String::new();
    let mut chars = format.char_indices().peekable();
    while let Some((_, c)) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut named = None;
        if chars.next_if(|(_, c)| *c == '(').is_some() {
            let start = chars.peek().map_or(format.len(), |(i, _)| *i);
            let mut depth = 1;
            let end = loop {
                let Some((i, c)) = chars.next() else {
                    return Err(Fail::failed("incomplete format key"));
                };
                match c {
                    '(' => depth += 1,
                    ')' => depth -= 1,
                    _ => {}
                }
                if depth == 0 {
                    break i;
                }
            };
            let key = &format[start..end];
            let Value::Dict(dict) = args else {
                return Err(Fail::failed("format requires a mapping"));
            };
            used_names = true;
            let found = dict.get_str(key).cloned();
            named = Some(found.ok_or_else(|| Fail::failed(format!("KeyError: '{key}'")))?);
        }
        let mut spec = FormatSpec::plain();
        let (mut left, mut zero) = (false, false);
        while let Some((_, flag)) = chars.next_if(|(_, c)| "-+ #0".contains(*c)) {
            match flag {
                '-' => left = true,
                '0' => zero = true,
                '#' => spec.alternate = true,
                '+' => spec.sign = '+',
                _ if spec.sign == '-' => spec.sign = ' ',
                _ => {}
            }
        }
        let mut next = || {
            values
                .next()
                .ok_or_else(|| Fail::failed("not enough arguments for format string"))
        };
        let mut number =
            |chars: &mut std::iter::Peekable<std::str::CharIndices>, left: &mut bool| -> JinjaResult<Option<usize>> {
                if chars.next_if(|(_, c)| *c == '*').is_some() {
                    let n = next()?.as_int().ok_or_else(|| Fail::failed("* wants int"))?;
                    *left |= n < 0;
                    return Ok(Some(usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX)));
                }
                let mut digits = String::new();
                while let Some((_, c)) = chars.next_if(|(_, c)| c.is_ascii_digit()) {
                    digits.push(c);
                }
                if digits.is_empty() {
                    return Ok(None);
                }
                digits.parse().map(Some).map_err(|_| Fail::failed("width too big"))
            };
        spec.width = number(&mut chars, &mut left)?.unwrap_or(0);
        if chars.next_if(|(_, c)| *c == '.').is_some() {
            let mut ignored = false;
            spec.precision = Some(number(&mut chars, &mut ignored)?.unwrap_or(0));
        }
        while chars.next_if(|(_, c)| "hlL".contains(*c)).is_some() {}
        let Some((_, kind)) = chars.next() else {
            return Err(Fail::failed("incomplete format"));
        };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => next()?,
        };
        spec.align = Some(match (left, zero) {
            (true, _) => '<',
            (false, true) if !"src%a".contains(kind) => {
                spec.fill = '0';
                '='
            }
            _ => '>',
        });
        charge(4 * NODE)?;
        let piece = conversion(&spec, kind, &value)?;
        out.push_str(&piece);
        check_text(&out)?;
    }
    let all_used = values.next().is_none();
    // A value that is a mapping in Python (it has elements by index) need not be used.
    let is_mapping = matches!(
        args,
        Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_)
    );
    if !all_used && !used_names && !is_mapping {
        return Err(Fail::failed("not all arguments converted during string formatting"));
    }
    charge_text(out.len())?;
    Ok(Value::str(out))
}

fn conversion(spec: &FormatSpec, kind: char, value: &Value) -> JinjaResult<String> {
    match kind {
        's' | 'r' | 'a' => {
            let mut text = shown(value, kind != 's')?;
            if kind == 'a' {
                text = ascii(&text);
            }
            let text: String = match spec.precision {
                Some(most) => text.chars().take(most).collect(),
                None => text,
            };
            spec.aligned("", &text, '>')
        }
        'c' => match (value, value.as_int()) {
            (Value::Str(s), _) if s.chars().count() == 1 => spec.aligned("", s, '>'),
            (_, Some(n)) => {
                let c = u32::try_from(n).ok().and_then(char::from_u32);
                let c = c.ok_or_else(|| Fail::failed("%c arg not in range(0x110000)"))?;
                spec.aligned("", &c.to_string(), '>')
            }
            _ => Err(Fail::failed("%c requires int or char")),
        },
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            value.defined()?;
            let n = match (value, value.as_int()) {
                (_, Some(n)) => n,
                (Value::Float(x), _) if "diu".contains(kind) => match super::value::whole(x.trunc()) {
                    Some(n) => n,
                    None => return Err(Fail::unsupported("an integer of more than 127 bits")),
                },
                _ => {
                    return Err(Fail::failed(format!(
                        "%{kind} format: a real number is required, not {}",
                        value.type_name()
                    )));
                }
            };
            let (mut digits, prefix) = int_digits(n, if "iu".contains(kind) { 'd' } else { kind }, spec.alternate);
            if let Some(least) = spec.precision {
                digits = padded(&digits, least.saturating_sub(digits.len()), 0, '0')?;
            }
            spec.number(n < 0, prefix, digits, 3)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            value.defined()?;
            let Some(x) = value.as_float() else {
                return Err(Fail::failed(format!("must be real number, not {}", value.type_name())));
            };
            let digits = float_digits(x, kind, spec.precision, spec.alternate)?;
            spec.number(x.is_sign_negative() && !x.is_nan(), "", digits, 3)
        }
        c if is_printable(c) => Err(Fail::failed(format!("unsupported format character '{c}'"))),
        _ => Err(Fail::failed("unsupported format character")),
    }
}

/// The filter `format`: named values as a mapping, others as a tuple.
pub(super) fn filter(value: &str, args: &Args) -> JinjaResult<Value> {
    match (args.positional.is_empty(), args.named.is_empty()) {
        (false, false) => Err(Fail::failed(
            "can't handle positional and keyword arguments at the same time",
        )),
        (_, false) => {
            let pairs = args.named.iter().map(|(k, v)| (Value::Str(k.clone()), v.clone()));
            let dict = super::value::Dict::new(pairs.collect::<Vec<_>>())?;
            percent(value, &Value::Dict(std::rc::Rc::new(dict)))
        }
        _ => percent(value, &Value::tuple(args.positional.clone())?),
    }
}
