//! Aligns the tokens of two tokenizers by the bytes of their text, and finds the ids that stand for the same text.

use crate::ops::distill::aligned::SharedIds;
use std::collections::HashMap;
use std::ops::Range;

/// For each id of a vocabulary: the bytes of its text; empty for special tokens (`Tokenizer::token_bytes`).
pub type TokenBytes = Vec<Vec<u8>>;

/// The texts of the tokens of both models.
#[derive(Debug, Clone, Copy)]
pub struct Vocabularies<'a> {
    /// Of the student.
    pub student: &'a TokenBytes,
    /// Of the teacher.
    pub teacher: &'a TokenBytes,
}

/// Groups the tokens of an answer, as two tokenizers have it, to the smallest spans that end at the same byte. The
/// special tokens that end both answers are a span too. Returns ranges of both lists.
///
/// The texts are compared: spans end where they differ. White space at the beginning may differ, because some tokenizers
/// put a space before a text.
pub fn align(student: &[u32], teacher: &[u32], bytes: Vocabularies<'_>) -> Vec<(Range<usize>, Range<usize>)> {
    let own = AnswerText::new(student, bytes.student);
    let theirs = AnswerText::new(teacher, bytes.teacher);
    let (mut a, mut b) = (own.blank(), theirs.blank());
    if a == b {
        (a, b) = (0, 0);
    }
    let same = own.text[a..]
        .iter()
        .zip(&theirs.text[b..])
        .take_while(|(x, y)| x == y)
        .count();
    let (mut out, mut from, mut at) = (Vec::new(), (0, 0), (0, 0));
    while at.0 < own.ends.len() && at.1 < theirs.ends.len() {
        let ends = (own.ends[at.0].saturating_sub(a), theirs.ends[at.1].saturating_sub(b));
        if ends.0.max(ends.1) > same {
            break;
        }
        at.0 += usize::from(ends.0 <= ends.1);
        at.1 += usize::from(ends.1 <= ends.0);
        if ends.0 == ends.1 && ends.0 > 0 {
            out.push((from.0..at.0, from.1..at.1));
            from = at;
        }
    }
    let whole = same + a == own.text.len() && same + b == theirs.text.len();
    if whole && own.ends.len() < student.len() && theirs.ends.len() < teacher.len() {
        // A token without text before the end belongs to it.
        let next = (from.0..own.ends.len() + 1, from.1..theirs.ends.len() + 1);
        out.push(next);
    }
    out
}

/// The text of an answer.
struct AnswerText {
    text: Vec<u8>,
    /// For each token before the special tokens at the end: where its text ends.
    ends: Vec<usize>,
}

impl AnswerText {
    fn new(ids: &[u32], bytes: &TokenBytes) -> Self {
        let of = |id: &u32| bytes.get(*id as usize).map_or(&[][..], Vec::as_slice);
        let count = ids.iter().rposition(|id| !of(id).is_empty()).map_or(0, |i| i + 1);
        let mut out = Self {
            text: Vec::new(),
            ends: Vec::new(),
        };
        for id in &ids[..count] {
            out.text.extend_from_slice(of(id));
            out.ends.push(out.text.len());
        }
        out
    }

    /// Length of the white space at the beginning.
    fn blank(&self) -> usize {
        self.text.iter().take_while(|b| b.is_ascii_whitespace()).count()
    }
}

/// The ids of both vocabularies with the same bytes; `ends`: special tokens with the same meaning, such as those that end
/// an answer. Each id is in one pair at most.
pub fn shared(student: &TokenBytes, teacher: &TokenBytes, ends: &[(u32, u32)]) -> SharedIds {
    let mut own: HashMap<&[u8], u32> = HashMap::new();
    for (id, bytes) in student.iter().enumerate().filter(|(_, b)| !b.is_empty()) {
        // A single byte may be a token twice, as itself and as a fallback: the later one is the ordinary token.
        own.insert(bytes, id as u32);
    }
    let mut pairs: Vec<(u32, u32)> = Vec::new();
    let (mut known, mut others) = (std::collections::HashSet::new(), std::collections::HashSet::new());
    for &(s, t) in ends {
        if known.insert(s) && others.insert(t) {
            pairs.push((s, t));
        } else if !pairs.contains(&(s, t)) {
            known.insert(s);
            others.insert(t);
        }
    }
    for (t, bytes) in teacher.iter().enumerate().rev() {
        let Some(s) = own.get(bytes.as_slice()).copied().filter(|_| !bytes.is_empty()) else {
            continue;
        };
        if !known.contains(&s) && others.insert(t as u32) {
            known.insert(s);
            pairs.push((s, t as u32));
        }
    }
    pairs.sort_unstable();
    SharedIds { pairs }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vocabulary of these tokens; a token in angle brackets is special.
    fn vocabulary(tokens: &[&str]) -> TokenBytes {
        let bytes = |t: &&str| {
            if t.starts_with('<') {
                Vec::new()
            } else {
                t.as_bytes().to_vec()
            }
        };
        tokens.iter().map(bytes).collect()
    }

    /// All tokens in order.
    fn aligned(student: &[&str], teacher: &[&str]) -> Vec<(Range<usize>, Range<usize>)> {
        let ids = |n: usize| (0..n as u32).collect::<Vec<_>>();
        let bytes = Vocabularies {
            student: &vocabulary(student),
            teacher: &vocabulary(teacher),
        };
        align(&ids(student.len()), &ids(teacher.len()), bytes)
    }

    #[test]
    fn spans_end_where_both_tokenizers_have_a_boundary() {
        assert_eq!(
            aligned(&["Hu", "gging", " Face"], &["Hug", "ging", " Face"]),
            [(0..2, 0..2), (2..3, 2..3)]
        );
        assert_eq!(
            aligned(&["ab", "c", "d"], &["a", "b", "cd"]),
            [(0..1, 0..2), (1..3, 2..3)]
        );
        // The end of the answer; several special tokens.
        assert_eq!(
            aligned(&["ab", "<end>"], &["a", "b", "<eot>", "<x>"]),
            [(0..1, 0..2), (1..2, 2..3)]
        );
        assert_eq!(aligned(&["ab", "<end>"], &["ab"]), [(0..1, 0..1)]);
        // Parts of a character.
        let bytes = Vocabularies {
            student: &vec![vec![0xc3], vec![0xa9], b"x".to_vec()],
            teacher: &vec!["é".as_bytes().to_vec(), b"x".to_vec()],
        };
        assert_eq!(align(&[0, 1, 2], &[0, 1], bytes), [(0..2, 0..1), (2..3, 1..2)]);
        // A space before the text.
        assert_eq!(
            aligned(&["ab", " c", "<e>"], &[" ab", " c", "<f>"]),
            [(0..1, 0..1), (1..2, 1..2), (2..3, 2..3)]
        );
        assert_eq!(aligned(&["ab"], &[" ", "ab"]), [(0..1, 0..2)]);
    }

    #[test]
    fn other_texts_are_not_aligned() {
        assert_eq!(aligned(&["ab", "cd", "ef"], &["ab", "cx", "ef"]), [(0..1, 0..1)]);
        assert!(aligned(&["x", "<e>"], &["y", "<e>"]).is_empty());
        assert!(aligned(&[], &["y"]).is_empty());
        // An answer that was cut has no end.
        assert_eq!(aligned(&["ab", "<e>"], &["ab", "c", "<e>"]), [(0..1, 0..1)]);
    }

    #[test]
    fn ids_with_the_same_text_are_shared() {
        let (own, other) = (
            vocabulary(&["a", "b", " c", "<end>", "a"]),
            vocabulary(&["<eot>", " c", "a", "d", "a"]),
        );
        let pairs = shared(&own, &other, &[(3, 0), (3, 0)]).pairs;
        assert_eq!(pairs, [(2, 1), (3, 0), (4, 4)]);
    }
}
