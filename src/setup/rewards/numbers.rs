//! Numbers in free text, as people write them: `-1,234.50`, `3/4`, `\frac{3}{4}`, `.5`, `1e3`.
//!
//! A comma between groups of exactly three digits is a thousands separator. A number never ends with a point or a
//! comma: those end sentences. A minus sign belongs to a number if it touches it and no digit, letter or bracket
//! stands before it.

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
    let chars: Vec<char> = text.chars().map(plain).collect();
    let (mut at, mut found) = (0, Vec::new());
    while at < chars.len() {
        match fraction(&chars, at).or_else(|| number(&chars, at)) {
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

/// Parses `a/b` or `\frac{a}{b}` at `at`; also returns its end.
fn fraction(chars: &[char], at: usize) -> Option<(f64, usize)> {
    let rest = &chars[at..];
    for command in ["\\frac{", "\\dfrac{"] {
        if rest.iter().copied().take(command.len()).eq(command.chars()) {
            let (over, end) = number(chars, at + command.len())?;
            let end = expect(chars, expect(chars, end, '}')?, '{')?;
            let (under, end) = number(chars, end)?;
            let end = expect(chars, end, '}')?;
            let sign = if signed(chars, at) { -1.0 } else { 1.0 };
            return (under != 0.0).then_some((sign * over / under, end));
        }
    }
    let (over, end) = number(chars, at)?;
    let mut slash = end;
    while chars.get(slash) == Some(&' ') {
        slash += 1;
    }
    let mut next = expect(chars, slash, '/')?;
    while chars.get(next) == Some(&' ') {
        next += 1;
    }
    let (under, end) = number(chars, next)?;
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
    while digit(i) {
        text.push(chars[i]);
        i += 1;
    }
    let whole = i - start;
    // Groups of three digits, if no fourth digit follows.
    while (1..=3).contains(&whole) && chars.get(i) == Some(&',') && (1..=3).all(|k| digit(i + k)) && !digit(i + 4) {
        text.extend(&chars[i + 1..i + 4]);
        i += 4;
    }
    if chars.get(i) == Some(&'.') && digit(i + 1) {
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
            ("12:30", 2),
            ("1.000.000", 2),
            ("8 - 6 = 2", 3),
        ] {
            assert_eq!(count(text), want, "{text}");
        }
    }
}
