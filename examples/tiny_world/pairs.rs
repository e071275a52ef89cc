//! Pairs of a right and a wrong answer: chat rows with the answer of another question that begins alike.

use crate::rows::Chat;
use crate::world::Dice;

/// What the numbers of a `Dice` are for.
const PAIRS: u64 = 4;

/// A question, its answer, and one that is wrong.
pub struct Pair<'a> {
    pub question: &'a str,
    pub chosen: &'a str,
    pub rejected: &'a str,
}

/// A pair of each of `rows`; wrong answers come from `pool`.
pub fn of<'a>(seed: u64, rows: &'a [Chat], pool: &'a [Chat]) -> Vec<Pair<'a>> {
    let dice = &mut Dice::new(seed, &[PAIRS, rows.len() as u64]);
    let pairs = rows.iter().filter_map(|row| {
        // The more words two questions share at their start, the nearer the wrong answer is to a right one.
        let wrong = (0..4).rev().find_map(|words| {
            let start = |q: &'a str| q.split(' ').take(words).collect::<Vec<_>>();
            let alike: Vec<&Chat> = pool
                .iter()
                .filter(|p| start(&p.question) == start(&row.question) && p.answer != row.answer)
                .collect();
            (!alike.is_empty()).then(|| *dice.pick(&alike))
        })?;
        Some(Pair {
            question: &row.question,
            chosen: &row.answer,
            rejected: &wrong.answer,
        })
    });
    pairs.collect()
}
