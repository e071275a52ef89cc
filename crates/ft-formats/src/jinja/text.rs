//! Functions on text that Python has and Rust has differently.

use super::fail::{Fail, JinjaResult, charge, charge_text};
use super::unicode::{is_alpha, is_line_end, is_space};
use std::collections::HashSet;

/// Work of one piece of a text that is split.
const PIECE: usize = 32;

/// `str.islower`: some letter has case, and none is upper or title case.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(|c| c.is_uppercase() || is_title(c))
}

pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(|c| c.is_lowercase() || is_title(c))
}

/// A letter of title case, such as `ǅ`.
fn is_title(c: char) -> bool {
    matches!(c, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ' | 'ᾈ'..='ᾏ' | 'ᾘ'..='ᾟ' | 'ᾨ'..='ᾯ' | 'ᾼ' | 'ῌ' | 'ῼ')
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || is_title(c)
}

/// The character as the first of a word. Errors: it becomes several.
fn titled(c: char, out: &mut String) -> JinjaResult<()> {
    match c {
        'Ǆ' | 'ǅ' | 'ǆ' => out.push('ǅ'),
        'Ǉ' | 'ǈ' | 'ǉ' => out.push('ǈ'),
        'Ǌ' | 'ǋ' | 'ǌ' => out.push('ǋ'),
        'Ǳ' | 'ǲ' | 'ǳ' => out.push('ǲ'),
        '\u{10d0}'..='\u{10ff}' => out.push(c),
        c if is_title(c) => out.push(c),
        c => {
            let upper = c.to_uppercase();
            if upper.len() > 1 {
                return Err(Fail::unsupported(format!("title case of `{c}`")));
            }
            out.extend(upper);
        }
    }
    Ok(())
}

pub(super) fn capitalized(text: &str) -> JinjaResult<String> {
    charge_text(text.len())?;
    let mut chars = text.chars();
    let mut out = String::with_capacity(text.len());
    if let Some(first) = chars.next() {
        titled(first, &mut out)?;
        out.push_str(&lowered_after(text, first.len_utf8()));
    }
    Ok(out)
}

/// The lower case of `text[from..]`, in its surroundings: a sigma at the end of a word is another letter.
fn lowered_after(text: &str, from: usize) -> String {
    if !text[from..].contains('Σ') {
        text[from..].to_lowercase()
    } else {
        let head = text[..from].to_lowercase().len();
        text.to_lowercase().split_off(head)
    }
}

/// `str.title`: a letter after a letter is lower case.
pub(super) fn title(text: &str) -> JinjaResult<String> {
    charge_text(text.len())?;
    charge(text.len().saturating_mul(20))?;
    if text.contains('Σ') {
        return Err(Fail::unsupported("title case of `Σ`"));
    }
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            titled(c, &mut out)?
        }
        inside = is_cased(c);
    }
    Ok(out)
}

/// The filter `title`: words begin after white space and after `-({[<`.
pub(super) fn title_words(text: &str) -> JinjaResult<String> {
    charge_text(text.len())?;
    charge(text.len().saturating_mul(30))?;
    let breaks = |c: char| is_space(c) || "-({[<".contains(c);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let in_word = !breaks(first);
        let end = rest.find(|c| breaks(c) == in_word).unwrap_or(rest.len());
        let (piece, tail) = rest.split_at(end);
        out.extend(first.to_uppercase());
        out.push_str(&piece[first.len_utf8()..].to_lowercase());
        rest = tail;
    }
    Ok(out)
}

pub(super) fn swap_case(text: &str) -> JinjaResult<String> {
    charge_text(text.len())?;
    if text.contains('Σ') || text.chars().any(is_title) {
        return Err(Fail::unsupported("`swapcase` of Σ or of a titlecase letter"));
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match (c.is_lowercase(), c.is_uppercase()) {
            (true, _) => out.extend(c.to_uppercase()),
            (_, true) => out.extend(c.to_lowercase()),
            _ => out.push(c),
        }
    }
    Ok(out)
}

/// `str.istitle`.
pub(super) fn is_title_case(text: &str) -> bool {
    let (mut inside, mut any) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() || is_title(c) {
            if inside {
                return false;
            }
            (inside, any) = (true, true);
        } else if c.is_lowercase() {
            if !inside {
                return false;
            }
            any = true;
        } else {
            inside = false;
        }
    }
    any
}

/// The answer for each character, if the text is not empty. Errors: outside of ASCII it is not known.
pub(super) fn all(text: &str, what: &str, wanted: fn(char) -> bool) -> JinjaResult<bool> {
    charge(text.len())?;
    if text.is_ascii() {
        return Ok(!text.is_empty() && text.chars().all(wanted));
    }
    // One character that is not wanted is enough; so is a letter that is no numeral (those of Chinese are both).
    let other = |c: char| ('\u{80}'..'\u{2e80}').contains(&c) && is_alpha(c);
    if text.chars().any(|c| c.is_ascii() && !wanted(c)) || (what != "isalnum" && text.chars().any(other)) {
        return Ok(false);
    }
    Err(Fail::unsupported(format!("`{what}` of letters outside of ASCII")))
}

pub(super) fn stripped<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> JinjaResult<&'a str> {
    charge(
        text.len()
            .saturating_mul(4)
            .saturating_add(chars.map_or(0, |c| c.len().saturating_mul(32))),
    )?;
    let set: Option<HashSet<char>> = chars.map(|chars| chars.chars().collect());
    let goes = |c: char| match &set {
        Some(set) => set.contains(&c),
        None => is_space(c),
    };
    let text = if start { text.trim_start_matches(goes) } else { text };
    Ok(if end { text.trim_end_matches(goes) } else { text })
}

/// `str.splitlines`.
pub(super) fn lines(text: &str, keep_ends: bool) -> JinjaResult<Vec<&str>> {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_line_end).unwrap_or(rest.len());
        let mut next = end + rest[end..].chars().next().map_or(0, char::len_utf8);
        if rest[end..].starts_with("\r\n") {
            next = end + 2;
        }
        charge(PIECE)?;
        out.push(&rest[..if keep_ends { next } else { end }]);
        rest = &rest[next..];
    }
    Ok(out)
}

/// `str.split` without a separator.
pub(super) fn words(text: &str, most: Option<usize>) -> JinjaResult<Vec<&str>> {
    let mut out = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if most.is_some_and(|most| out.len() == most) {
            out.push(rest);
            return Ok(out);
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        charge(PIECE)?;
        out.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    Ok(out)
}

/// `str.rsplit` without a separator.
pub(super) fn words_from_end(text: &str, most: usize) -> JinjaResult<Vec<&str>> {
    let mut out = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        if out.len() == most {
            out.push(rest);
            break;
        }
        let start = rest
            .char_indices()
            .rev()
            .find(|(_, c)| is_space(*c))
            .map_or(0, |(i, c)| i + c.len_utf8());
        charge(PIECE)?;
        out.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    out.reverse();
    Ok(out)
}

/// `str.replace` with a count, accounted for before it is made.
pub(super) fn replaced(text: &str, old: &str, new: &str, count: Option<usize>) -> JinjaResult<String> {
    charge(text.len().saturating_mul(2).saturating_add(old.len()))?;
    let most = count.unwrap_or(usize::MAX);
    if old.is_empty() {
        // Between all characters.
        let places = text.chars().count().saturating_add(1).min(most);
        charge_text(text.len().saturating_add(places.saturating_mul(new.len())))?;
        return Ok(text.replacen(old, new, most));
    }
    let found = match count {
        Some(most) => text.matches(old).take(most).count(),
        None => text.matches(old).count(),
    };
    charge_text((text.len() - found * old.len()).saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, most))
}

/// `text` with `left` and `right` times `fill` around it.
pub(super) fn padded(text: &str, left: usize, right: usize, fill: char) -> JinjaResult<String> {
    let more = left.saturating_add(right).saturating_mul(fill.len_utf8());
    charge_text(text.len().saturating_add(more))?;
    let mut out = String::with_capacity(text.len() + more);
    out.extend(std::iter::repeat_n(fill, left));
    out.push_str(text);
    out.extend(std::iter::repeat_n(fill, right));
    Ok(out)
}

/// `str.center`.
pub(super) fn centered(text: &str, width: usize, fill: char) -> JinjaResult<String> {
    charge(text.len())?;
    let length = text.chars().count();
    let pad = width.saturating_sub(length);
    let left = pad / 2 + (pad & width & 1);
    padded(text, left, pad - left, fill)
}
