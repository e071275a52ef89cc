//! Numbers in free text, as people write them: `-1,234.50`, `3/4`, `\frac{3}{4}`, `2\frac12`, `.5`, `1e3`.
//!
//! A comma between groups of exactly three digits is a thousands separator, also as LaTeX writes it (`{,}`, `,\!`, `\,`). A
//! number never ends with a point or a comma: those end sentences. It begins with a point only if no digit, letter, bracket or
//! point stands before it. A minus sign belongs to a number if it touches it and no digit, letter or bracket stands before it.

/// Returns the last number of `text`; a fraction is one number. `None`: there is no number.
pub fn last(text: &str) -> Option<f64> {
    // A number that overflows f64 counts as no number.
    all(text).pop().filter(|x| x.is_finite())
}

/// How many numbers `text` has.
pub fn count(text: &str) -> usize {
    all(text).len()
}

/// The numbers of `text` in order.
fn all(text: &str) -> Vec<f64> {
    let chars = plain_separators(text.chars().map(plain).collect());
    let (mut at, mut found) = (0, Vec::new());
    while at < chars.len() {
        match mixed(&chars, at)
            .or_else(|| fraction(&chars, at))
            .or_else(|| number(&chars, at))
        {
            Some((value, end)) => {
                found.push(value);
                at = end;
            }
            None => at += 1,
        }
    }
    found
}

/// True if two numbers are equal: integers exactly; other numbers, which an answer may round, up to a relative difference
/// of 1e-6.
pub fn same(a: f64, b: f64) -> bool {
    // Below 2^53 f64 has every integer.
    let is_integer = |x: f64| x.fract() == 0.0 && x.abs() < (1_u64 << 53) as f64;
    if is_integer(a) && is_integer(b) {
        return a == b;
    }
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs())
}

/// Normalizes other forms of the minus sign and of the slash.
fn plain(c: char) -> char {
    match c {
        '\u{2212}' | '\u{2013}' => '-',
        '\u{2044}' | '\u{2215}' => '/',
        c => c,
    }
}

/// Separators of thousands in LaTeX.
const SEPARATORS: [&str; 3] = ["{,}", ",\\!", "\\,"];

/// Writes separators of LaTeX between digits as commas.
fn plain_separators(chars: Vec<char>) -> Vec<char> {
    if !chars.contains(&'\\') && !chars.contains(&'{') {
        return chars;
    }
    let digit = |i: usize| chars.get(i).is_some_and(char::is_ascii_digit);
    let (mut at, mut out) = (0, Vec::with_capacity(chars.len()));
    while at < chars.len() {
        let is_here = |separator: &&&str| starts_with(&chars[at..], separator) && digit(at + separator.len());
        match SEPARATORS.iter().find(is_here).filter(|_| at > 0 && digit(at - 1)) {
            Some(separator) => {
                out.push(',');
                at += separator.len();
            }
            None => {
                out.push(chars[at]);
                at += 1;
            }
        }
    }
    out
}

/// `text` is ASCII.
fn starts_with(chars: &[char], text: &str) -> bool {
    chars.iter().copied().take(text.len()).eq(text.chars())
}

fn skip_spaces(chars: &[char], mut at: usize) -> usize {
    while chars.get(at) == Some(&' ') {
        at += 1;
    }
    at
}

/// Also skips the spaces of LaTeX.
fn skip_latex_spaces(chars: &[char], mut at: usize) -> usize {
    loop {
        at = skip_spaces(chars, at);
        match ["\\,", "\\!", "\\;", "\\:"]
            .iter()
            .find(|space| starts_with(&chars[at..], space))
        {
            Some(space) => at += space.len(),
            None => return at,
        }
    }
}

/// Parses an integer before a fraction of LaTeX, `2\frac{1}{2}`, at `at`; also returns its end.
fn mixed(chars: &[char], at: usize) -> Option<(f64, usize)> {
    let (whole, end) = number(chars, at)?;
    // An exponent or an index: `x^2\frac{1}{2}`.
    if at
        .checked_sub(1)
        .is_some_and(|before| ['^', '_'].contains(&chars[before]))
    {
        return None;
    }
    let (part, end) = latex_fraction(chars, skip_latex_spaces(chars, end))?;
    let is_mixed = whole.fract() == 0.0 && (0.0..1.0).contains(&part);
    // The sign of `-0` counts.
    is_mixed.then(|| (whole + part.copysign(whole), end))
}

/// Parses `\frac{a}{b}` or `\frac ab` at `at`; also returns its end.
fn latex_fraction(chars: &[char], at: usize) -> Option<(f64, usize)> {
    let is_here = |command: &&&str| starts_with(&chars[at.min(chars.len())..], command);
    let command = ["\\frac", "\\dfrac", "\\tfrac", "\\cfrac"].iter().find(is_here)?;
    let (over, end) = argument(chars, at + command.len())?;
    let (under, end) = argument(chars, end)?;
    let sign = if signed(chars, at) { -1.0 } else { 1.0 };
    (under != 0.0).then_some((sign * over / under, end))
}

/// Parses a number in braces, or one digit, as the argument of a command; also returns its end.
fn argument(chars: &[char], at: usize) -> Option<(f64, usize)> {
    let at = skip_spaces(chars, at);
    if chars.get(at) != Some(&'{') {
        let digit = chars.get(at)?.to_digit(10)?;
        return Some((f64::from(digit), at + 1));
    }
    let (value, end) = number(chars, skip_spaces(chars, at + 1))?;
    Some((value, expect(chars, skip_spaces(chars, end), '}')?))
}

/// Parses `a/b` or `\frac{a}{b}` at `at`; also returns its end.
fn fraction(chars: &[char], at: usize) -> Option<(f64, usize)> {
    if let Some(found) = latex_fraction(chars, at) {
        return Some(found);
    }
    let (over, end) = number(chars, at)?;
    let slash = expect(chars, skip_spaces(chars, end), '/')?;
    let (under, end) = number(chars, skip_spaces(chars, slash))?;
    (under != 0.0).then_some((over / under, end))
}

fn expect(chars: &[char], at: usize, c: char) -> Option<usize> {
    (chars.get(at) == Some(&c)).then_some(at + 1)
}

/// True if a minus sign is directly before `at` and belongs to the number.
fn signed(chars: &[char], at: usize) -> bool {
    let before = |n: usize| at.checked_sub(n).and_then(|i| chars.get(i));
    before(1) == Some(&'-') && !before(2).is_some_and(|c| c.is_alphanumeric() || [')', ']', '}'].contains(c))
}

/// Parses a number without a fraction at `at`; also returns its end.
fn number(chars: &[char], at: usize) -> Option<(f64, usize)> {
    let digit = |i: usize| chars.get(i).is_some_and(char::is_ascii_digit);
    let mut text = String::new();
    let mut i = at;
    if chars.get(i) == Some(&'-') || chars.get(i) == Some(&'+') {
        if chars[i] == '-' {
            if !signed(chars, i + 1) {
                return None;
            }
            text.push('-');
        }
        i += 1;
    }
    let start = i;
    let before = start.checked_sub(1).and_then(|i| chars.get(i));
    let may_begin_with_point = !before.is_some_and(|c| c.is_alphanumeric() || ['.', ')', ']'].contains(c));
    while digit(i) {
        text.push(chars[i]);
        i += 1;
    }
    let whole = i - start;
    // Groups of three digits, if no fourth digit follows.
    let is_zero = whole == 1 && chars[start] == '0';
    while !is_zero
        && (1..=3).contains(&whole)
        && chars.get(i) == Some(&',')
        && (1..=3).all(|k| digit(i + k))
        && !digit(i + 4)
    {
        text.extend(&chars[i + 1..i + 4]);
        i += 4;
    }
    if chars.get(i) == Some(&'.') && digit(i + 1) && (whole > 0 || may_begin_with_point) {
        if whole == 0 {
            text.push('0');
        }
        text.push('.');
        i += 1;
        while digit(i) {
            text.push(chars[i]);
            i += 1;
        }
    } else if whole == 0 {
        return None;
    }
    if let Some('e' | 'E') = chars.get(i) {
        let sign = usize::from(matches!(chars.get(i + 1), Some('-' | '+')));
        if digit(i + 1 + sign) {
            text.extend(&chars[i..i + 1 + sign]);
            i += 1 + sign;
            while digit(i) {
                text.push(chars[i]);
                i += 1;
            }
        }
    }
    text.parse::<f64>().ok().map(|x| (x, i))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_found_as_people_write_it() {
        for (text, want) in [
            ("13", 13.0),
            ("The answer is 13.", 13.0),
            ("8 - 6 = 2", 2.0),
            ("8-6", 6.0),
            ("it is -6, I think", -6.0),
            ("x = \u{2212}6", -6.0),
            ("1,234,567.5 dollars", 1234567.5),
            ("1,23", 23.0),
            ("1,2345", 2345.0),
            ("12345,678", 678.0),
            ("one of 1, 2, 3", 3.0),
            ("3/4", 0.75),
            ("-3 / 4", -0.75),
            (r"\boxed{\frac{3}{4}}", 0.75),
            (r"-\dfrac{1}{2}", -0.5),
            (".5", 0.5),
            ("1e3", 1000.0),
            ("2.5E-1", 0.25),
            ("3 eggs", 3.0),
            ("$18", 18.0),
            ("50%", 50.0),
            ("7/0", 0.0),
            ("The answer is...42", 42.0),
            ("No.5", 5.0),
            ("3.14.15", 15.0),
            ("(a).5", 5.0),
            ("it is -.5", -0.5),
            ("$.75", 0.75),
            (r"\tfrac{3}{4}", 0.75),
            (r"\cfrac{3}{4}", 0.75),
            (r"\frac34", 0.75),
            (r"\frac 3 4", 0.75),
            (r"\frac{ 3 }{ 4 }", 0.75),
            (r"\frac3{4}", 0.75),
            (r"\frac{-3}{4}", -0.75),
            (r"\frac{x}{4}", 4.0),
            (r"\fraction 7", 7.0),
            (r"1{,}234", 1234.0),
            (r"10,\!000", 10000.0),
            (r"10\,000.5", 10000.5),
            (r"5\,6", 6.0),
            (r"{,}234", 234.0),
            (r"2\frac{1}{2}", 2.5),
            (r"-2 \frac12", -2.5),
            (r"2\,\frac{1}{2}", 2.5),
            (r"x^2\frac{1}{2}", 0.5),
            (r"a_1 \frac{3}{4}", 0.75),
            (r"-0\frac12", -0.5),
            (r"2\frac{3}{2}", 1.5),
        ] {
            assert_eq!(last(text), Some(want), "{text}");
        }
        for none in ["", "none", "-", "e5x".trim_end_matches("5x"), "1".repeat(400).as_str()] {
            assert_eq!(last(none), None, "{none}");
        }
        assert!(same(1.0 / 3.0, 0.33333333) && !same(0.333, 1.0 / 3.0) && same(0.0, 0.0));
    }

    #[test]
    fn large_integers_are_equal_only_if_every_digit_is() {
        for (a, b) in [
            (1_000_000.0, 1_000_001.0),
            (123_456_789.0, 123_456_790.0),
            (-2e6, -2_000_001.0),
        ] {
            assert!(same(a, a) && !same(a, b) && !same(b, a), "{a} {b}");
        }
        // A fraction may be rounded.
        assert!(same(1234567.125, 1234567.13) && !same(1234567.125, 1234569.0));
    }

    #[test]
    fn numbers_are_counted() {
        for (text, want) in [
            ("none", 0),
            ("1,234.50", 1),
            ("3/4", 1),
            (r"-\frac{1}{2}", 1),
            (r"2\frac{1}{2}", 1),
            (r"1{,}234 and 5", 2),
            ("12:30", 2),
            ("1.000.000", 2),
            ("8 - 6 = 2", 3),
        ] {
            assert_eq!(count(text), want, "{text}");
        }
    }
}
