//! Pairs of a correct and a wrong answer: the wrong one answers another question with the same first words.

use crate::rows::Chat;
use crate::world::Dice;

/// Random stream of this file.
const PAIRS: u64 = 4;

/// A question with its answer and a wrong answer.
pub struct Pair<'a> {
    pub question: &'a str,
    pub chosen: &'a str,
    pub rejected: &'a str,
}

/// One pair for each of `rows`; wrong answers come from `pool`.
pub fn of<'a>(seed: u64, rows: &'a [Chat], pool: &'a [Chat]) -> Vec<Pair<'a>> {
    let dice = &mut Dice::new(seed, &[PAIRS, rows.len() as u64]);
    let pairs = rows.iter().filter_map(|row| {
        // The more first words two questions share, the more similar the wrong answer is to the correct one.
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
