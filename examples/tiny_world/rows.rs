//! Rows of the files: plain text for pre-training; chat rows and sums for RL, both with held-out rows.

use crate::wordings;
use crate::world::{Dice, Item, World, arithmetic, reverse};
use std::collections::BTreeSet;

/// Random streams of this file.
const PRETRAIN: u64 = 1;
const SPLIT: u64 = 2;
const CHAT: u64 = 3;

/// Number of rows of each group in the chat files.
const TRAIN_ARITHMETIC: usize = 400;
const TRAIN_REVERSE: usize = 100;
const EVAL_FACTS: usize = 60;
const EVAL_WORDS: usize = 60;
const EVAL_ARITHMETIC: usize = 60;
const EVAL_REVERSE: usize = 20;

/// The text of pre-training row `index`: a few lines, each a statement or a question with its answer.
pub fn pretrain(world: &World, seed: u64, index: u64) -> String {
    let dice = &mut Dice::new(seed, &[PRETRAIN, index]);
    let lines = match dice.below(8) {
        // All facts about one person or town.
        0 => {
            let mut about = dice.pick(&world.facts).clone();
            dice.shuffle(&mut about);
            about.iter().map(|item| wordings::say(dice, item)).collect::<Vec<_>>()
        }
        n => {
            let count = if n == 1 { 1 } else { 2 + dice.below(7) };
            (0..count)
                .map(|_| {
                    let item = any(world, dice);
                    wordings::say(dice, &item)
                })
                .collect()
        }
    };
    lines.join("\n")
}

fn any(world: &World, dice: &mut Dice) -> Item {
    match dice.below(20) {
        0..=5 => {
            let about = dice.pick(&world.facts);
            dice.pick(about).clone()
        }
        6..=8 => dice.pick(&world.words).clone(),
        9 => reverse(dice),
        _ => arithmetic(dice),
    }
}

/// A question and its exact answer.
pub struct Chat {
    pub question: String,
    pub answer: String,
}

/// Arithmetic only, for RL: every item of the chat rows in every wording, training and held out.
pub fn sums(world: &World, seed: u64) -> (Vec<Chat>, Vec<Chat>) {
    let asked = |items: Vec<Item>| {
        let sums = items
            .into_iter()
            .filter(|i| i.answer.bytes().all(|b| b.is_ascii_digit()));
        sums.flat_map(|item| {
            let chat = |question| Chat {
                question,
                answer: item.answer.clone(),
            };
            wordings::chat(&item).into_iter().map(chat).collect::<Vec<_>>()
        })
        .filter(|row| row.question.bytes().any(|b| b.is_ascii_digit()))
        .collect()
    };
    let (train, held_out) = items(world, seed);
    (asked(train), asked(held_out))
}

/// Chat rows for training, and held-out rows. No item (fact, word task, pair of numbers) is in both.
pub fn chat(world: &World, seed: u64) -> (Vec<Chat>, Vec<Chat>) {
    let (train, held_out) = items(world, seed);
    let dice = &mut Dice::new(seed, &[CHAT]);
    // There are few facts and words, so they appear in every wording; other items appear once.
    let mut rows = Vec::new();
    for item in &train {
        let mut asked = wordings::chat(item);
        if !item.b.is_empty() || item.a.contains(' ') {
            dice.shuffle(&mut asked);
            asked.truncate(1);
        }
        rows.extend(asked.into_iter().map(|question| Chat {
            question,
            answer: item.answer.clone(),
        }));
    }
    dice.shuffle(&mut rows);
    let mut eval: Vec<Chat> = held_out
        .iter()
        .map(|item| Chat {
            question: dice.pick(&wordings::chat(item)).clone(),
            answer: item.answer.clone(),
        })
        .collect();
    dice.shuffle(&mut eval);
    (rows, eval)
}

/// The items for training and the held-out items.
fn items(world: &World, seed: u64) -> (Vec<Item>, Vec<Item>) {
    let dice = &mut Dice::new(seed, &[SPLIT]);
    let (mut train, mut held_out) = (Vec::new(), Vec::new());
    let facts: Vec<Item> = world.facts.iter().flatten().cloned().collect();
    split(dice, facts, EVAL_FACTS, &mut train, &mut held_out);
    split(dice, world.words.clone(), EVAL_WORDS, &mut train, &mut held_out);
    let sums = distinct(dice, TRAIN_ARITHMETIC + EVAL_ARITHMETIC, arithmetic);
    split(dice, sums, EVAL_ARITHMETIC, &mut train, &mut held_out);
    let reversed = distinct(dice, TRAIN_REVERSE + EVAL_REVERSE, reverse);
    split(dice, reversed, EVAL_REVERSE, &mut train, &mut held_out);
    (train, held_out)
}

/// Moves `eval` random items to `held_out` and the rest to `train`.
fn split(dice: &mut Dice, mut items: Vec<Item>, eval: usize, train: &mut Vec<Item>, held_out: &mut Vec<Item>) {
    dice.shuffle(&mut items);
    train.extend(items.split_off(eval.min(items.len())));
    held_out.extend(items);
}

/// `count` different items in a fixed order.
fn distinct(dice: &mut Dice, count: usize, make: fn(&mut Dice) -> Item) -> Vec<Item> {
    let mut seen = BTreeSet::new();
    while seen.len() < count {
        seen.insert(make(dice));
    }
    seen.into_iter().collect()
}
