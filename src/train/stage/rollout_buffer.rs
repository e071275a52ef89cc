//! The answers of one rollout with all inputs of the loss, and their serialization in a checkpoint.
//!
//! Letters: T tokens of an answer.

use crate::base::{Error, Result};
use crate::data::{Batch, Example};
use crate::rlhf::policy::{self, columns};

/// A prompt with an answer, and values for each token of the answer (`[T]`, empty if not used).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trajectory {
    /// Token ids of prompt and answer.
    pub ids: Vec<u32>,
    /// Number of prompt tokens.
    pub prompt: usize,
    pub old: Vec<f32>,
    pub reference: Vec<f32>,
    pub ratios: Vec<f32>,
    pub values: Vec<f32>,
    pub returns: Vec<f32>,
    /// `[T]` for PPO, `[1]` for GRPO.
    pub advantages: Vec<f32>,
    pub factor: f32,
    /// 0 if the answer is excluded from the loss, else 1.
    pub counts: f32,
}

impl Trajectory {
    /// T, the tokens of the answer.
    pub fn tokens(&self) -> usize {
        self.ids.len() - self.prompt
    }

    pub fn example(&self) -> Example {
        Example {
            ids: self.ids.clone(),
            trained: (0..self.ids.len()).map(|t| t >= self.prompt).collect(),
        }
    }

    fn parts(&self) -> [&Vec<f32>; 6] {
        [
            &self.old,
            &self.reference,
            &self.ratios,
            &self.values,
            &self.returns,
            &self.advantages,
        ]
    }
}

/// Concatenates these answers to a batch with their columns. `per_token`: advantages are a token column.
pub fn batch(kept: &[&Trajectory], per_token: bool) -> Batch {
    let examples: Vec<Example> = kept.iter().map(|k| k.example()).collect();
    let mut batch = Batch::from_examples(&examples);
    let ranges = policy::answers(&batch);
    let mut put = |name: &'static str, of: fn(&Trajectory) -> &Vec<f32>| {
        if kept.iter().all(|k| of(k).is_empty()) {
            return;
        }
        let mut column = vec![0f32; batch.ids.len()];
        for (kept, range) in kept.iter().zip(&ranges) {
            for (slot, value) in column[range.clone()].iter_mut().zip(of(kept)) {
                *slot = *value;
            }
        }
        batch.columns.tokens.insert(name, column);
    };
    put(columns::OLD, |k| &k.old);
    put(columns::REFERENCE, |k| &k.reference);
    put(columns::RATIOS, |k| &k.ratios);
    put(columns::VALUES, |k| &k.values);
    put(columns::RETURNS, |k| &k.returns);
    if per_token {
        put(columns::ADVANTAGES, |k| &k.advantages);
    } else {
        let first = |k: &&Trajectory| k.advantages.first().copied().unwrap_or(0.0);
        let documents = &mut batch.columns.documents;
        documents.insert(columns::ADVANTAGES, kept.iter().map(first).collect());
        documents.insert(columns::FACTOR, kept.iter().map(|k| k.factor).collect());
        documents.insert(columns::COUNTS, kept.iter().map(|k| k.counts).collect());
    }
    batch
}

/// The part of a rollout that a checkpoint stores.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RolloutBuffer {
    /// Number of the rollout in `kept`, if it is not finished.
    pub rollout: u64,
    pub kept: Vec<Trajectory>,
    /// KL coefficient of the next rollout.
    pub kl_coefficient: f64,
    /// Metrics of the rollout that are not in `metrics.jsonl` yet because its first step was abandoned.
    pub metrics: Vec<(String, f64)>,
    /// JSON lines of the rollout that are not in `samples.jsonl` yet, for the same reason.
    pub samples: Vec<String>,
}

const MAGIC: u32 = 0x33_50_52_66;
/// Format without samples.
const SECOND: u32 = 0x32_50_52_66;
/// Format without samples and metrics.
const FIRST: u32 = 0x31_50_52_66;

fn put_text(words: &mut Vec<u32>, text: &str) {
    words.push(text.chars().count() as u32);
    words.extend(text.chars().map(u32::from));
}

impl RolloutBuffer {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut words: Vec<u32> = vec![MAGIC];
        let mut long = |x: u64| words.extend([x as u32, (x >> 32) as u32]);
        long(self.rollout);
        long(self.kl_coefficient.to_bits());
        long(self.kept.len() as u64);
        for k in &self.kept {
            words.extend([
                k.prompt as u32,
                k.factor.to_bits(),
                k.counts.to_bits(),
                k.ids.len() as u32,
            ]);
            words.extend(&k.ids);
            for part in k.parts() {
                words.push(part.len() as u32);
                words.extend(part.iter().map(|x| x.to_bits()));
            }
        }
        words.push(self.metrics.len() as u32);
        for (name, value) in &self.metrics {
            put_text(&mut words, name);
            let bits = value.to_bits();
            words.extend([bits as u32, (bits >> 32) as u32]);
        }
        words.push(self.samples.len() as u32);
        self.samples.iter().for_each(|line| put_text(&mut words, line));
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// Checks what a step takes for granted. `tokens`: number of ids of the vocabulary. `per_token`: as for `batch`.
    ///
    /// Errors: an id that the vocabulary does not have; a list that has not a value for each token of its answer.
    pub fn check(&self, tokens: usize, per_token: bool) -> Result<()> {
        let invalid = |what: &str, found: usize, expected: String| {
            Error::format("the answers of a rollout in the checkpoint are not valid")
                .found(format!("{what} {found}"))
                .expected(expected)
        };
        for answer in &self.kept {
            if let Some(id) = answer.ids.iter().find(|id| **id as usize >= tokens) {
                return Err(invalid("the token", *id as usize, format!("a token below {tokens}")));
            }
            let [columns @ .., advantages] = answer.parts();
            let advantages = advantages.len();
            let has_advantages = if per_token {
                [0, answer.tokens()].contains(&advantages)
            } else {
                advantages <= 1
            };
            let wrong = columns
                .iter()
                .map(|column| column.len())
                .find(|n| ![0, answer.tokens()].contains(n));
            if let Some(n) = wrong.or((!has_advantages).then_some(advantages)) {
                let expected = if wrong.is_none() && !per_token {
                    "one advantage, or none".into()
                } else {
                    format!("one value for each of {} tokens, or none", answer.tokens())
                };
                return Err(invalid("a list with so many values:", n, expected));
            }
        }
        Ok(())
    }

    /// Errors: bytes that `to_bytes` did not write.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let words: Vec<u32> = bytes
            .chunks_exact(4)
            .map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]))
            .collect();
        let mut reader = Reader { words: &words };
        let broken = || Error::new("the answers of a rollout in the checkpoint are not valid");
        reader
            .read()
            .filter(|_| reader.words.is_empty() && bytes.len().is_multiple_of(4))
            .ok_or_else(broken)
    }
}

struct Reader<'a> {
    words: &'a [u32],
}

impl<'a> Reader<'a> {
    fn word(&mut self) -> Option<u32> {
        let (first, rest) = self.words.split_first()?;
        self.words = rest;
        Some(*first)
    }

    fn long(&mut self) -> Option<u64> {
        Some(u64::from(self.word()?) | u64::from(self.word()?) << 32)
    }

    fn list(&mut self) -> Option<&'a [u32]> {
        let n = self.word()? as usize;
        let (list, rest) = self.words.split_at_checked(n)?;
        self.words = rest;
        Some(list)
    }

    fn floats(&mut self) -> Option<Vec<f32>> {
        Some(self.list()?.iter().map(|w| f32::from_bits(*w)).collect())
    }

    fn text(&mut self) -> Option<String> {
        self.list()?.iter().map(|c| char::from_u32(*c)).collect()
    }

    fn read(&mut self) -> Option<RolloutBuffer> {
        let magic = self.word()?;
        if ![FIRST, SECOND, MAGIC].contains(&magic) {
            return None;
        }
        let (rollout, kl_coefficient, count) = (self.long()?, f64::from_bits(self.long()?), self.long()?);
        let mut kept = Vec::new();
        for _ in 0..count {
            let (prompt, factor, counts) = (self.word()? as usize, self.word()?, self.word()?);
            let ids = self.list()?.to_vec();
            if prompt > ids.len() {
                return None;
            }
            kept.push(Trajectory {
                ids,
                prompt,
                old: self.floats()?,
                reference: self.floats()?,
                ratios: self.floats()?,
                values: self.floats()?,
                returns: self.floats()?,
                advantages: self.floats()?,
                factor: f32::from_bits(factor),
                counts: f32::from_bits(counts),
            });
        }
        let mut metrics = Vec::new();
        for _ in 0..if magic == FIRST { 0 } else { self.word()? } {
            metrics.push((self.text()?, f64::from_bits(self.long()?)));
        }
        let mut samples = Vec::new();
        for _ in 0..if magic == MAGIC { self.word()? } else { 0 } {
            samples.push(self.text()?);
        }
        Some(RolloutBuffer {
            rollout,
            kept,
            kl_coefficient,
            metrics,
            samples,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::IGNORE;

    fn kept() -> Vec<Trajectory> {
        vec![
            Trajectory {
                ids: vec![1, 2, 3, 4],
                prompt: 2,
                old: vec![-0.5, f32::MIN_POSITIVE],
                values: vec![0.1, 0.2],
                advantages: vec![1.5, 2.5],
                factor: 0.75,
                counts: 1.0,
                ..Trajectory::default()
            },
            Trajectory {
                ids: vec![5, 6],
                prompt: 1,
                old: vec![-1.0],
                values: vec![0.3],
                advantages: vec![-1.0],
                ..Trajectory::default()
            },
        ]
    }

    #[test]
    fn columns_stand_where_their_targets_stand() {
        let kept = kept();
        let rows: Vec<&Trajectory> = kept.iter().collect();
        let b = batch(&rows, true);
        assert_eq!(b.targets, [IGNORE, 3, 4, IGNORE, 6, IGNORE]);
        assert_eq!(
            b.columns.tokens[columns::OLD],
            [0.0, -0.5, f32::MIN_POSITIVE, 0.0, -1.0, 0.0]
        );
        assert_eq!(b.columns.tokens[columns::ADVANTAGES], [0.0, 1.5, 2.5, 0.0, -1.0, 0.0]);
        assert!(!b.columns.tokens.contains_key(columns::REFERENCE) && b.columns.documents.is_empty());
        let b = batch(&rows, false);
        assert_eq!(b.columns.documents[columns::ADVANTAGES], [1.5, -1.0]);
        assert_eq!(b.columns.documents[columns::FACTOR], [0.75, 0.0]);
        assert!(!b.columns.tokens.contains_key(columns::ADVANTAGES));
    }

    #[test]
    fn tokens_without_a_word_and_lists_of_another_length_are_refused() {
        let buffer = |kept| RolloutBuffer {
            kept,
            ..RolloutBuffer::default()
        };
        let good = kept();
        buffer(good.clone()).check(7, true).unwrap();
        let e = buffer(good.clone()).check(6, true).unwrap_err().to_string();
        assert!(e.contains("token 6") && e.contains("below 6"), "{e}");
        // A value for each answer.
        let e = buffer(good.clone()).check(7, false).unwrap_err().to_string();
        assert!(e.contains("values: 2"), "{e}");
        let columns: [fn(&mut Trajectory) -> &mut Vec<f32>; 6] = [
            |k| &mut k.old,
            |k| &mut k.reference,
            |k| &mut k.ratios,
            |k| &mut k.values,
            |k| &mut k.returns,
            |k| &mut k.advantages,
        ];
        for column in columns {
            let mut changed = good.clone();
            column(&mut changed[1]).extend([0.0; 2]);
            assert!(buffer(changed).check(7, true).is_err());
        }
        let mut of_group = good;
        of_group.iter_mut().for_each(|k| k.advantages.truncate(1));
        buffer(of_group).check(7, false).unwrap();
    }

    #[test]
    fn bytes_come_back_and_broken_ones_do_not() {
        let rollout_buffer = RolloutBuffer {
            rollout: 1 << 40,
            kept: kept(),
            kl_coefficient: 0.1 + 0.2,
            metrics: vec![("reward_länge".into(), -0.1), ("kl".into(), f64::MIN_POSITIVE)],
            samples: vec![r#"{"completion": "süß"}"#.into(), String::new()],
        };
        let bytes = rollout_buffer.to_bytes();
        assert_eq!(RolloutBuffer::from_bytes(&bytes).unwrap(), rollout_buffer);
        for cut in 0..bytes.len() {
            assert!(RolloutBuffer::from_bytes(&bytes[..cut]).is_err(), "{cut}");
        }
        assert!(RolloutBuffer::from_bytes(&[&bytes[..], &[0; 4]].concat()).is_err());
    }
}
