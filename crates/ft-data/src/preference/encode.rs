//! Tokenizes preference rows.

use super::Want;
use super::rows::{Judgement, Sides, understand};
use crate::batch::Example;
use crate::encode::Encoder;
use crate::layout::Layout;
use crate::read::Row;
use ft_base::{Error, Result};

/// A tokenized row.
pub(super) struct Unit {
    /// Chosen and rejected, or the judged answer.
    pub sides: Vec<Side>,
    /// Number of prompt tokens, the same in all sides.
    pub prompt: usize,
    pub margin: Option<f32>,
    pub label: bool,
}

pub(super) struct Side {
    pub example: Example,
    /// Tokens removed by truncation at `max_length`.
    pub cut: usize,
}

pub(super) struct PairEncoder<'a> {
    pub encoder: Encoder<'a>,
    pub want: Want,
}

impl PairEncoder<'_> {
    /// Errors: the fault of the row, with its place.
    pub fn encode(&self, row: &Row, layout: &Layout) -> Result<Unit> {
        let (whole, prompt, margin, label) = match understand(row, layout)? {
            Judgement::Pair { sides, margin } => {
                let (whole, prompt) = self.tokens(&sides).map_err(|e| e.within(&row.place))?;
                if whole[0] == whole[1] {
                    return Err(Error::new("`chosen` and `rejected` become the same tokens")
                        .at(&row.place)
                        .expected("two different answers to one prompt")
                        .hint("remove the row, or check `data.chat_template`; `ft data` shows what it prints"));
                }
                (whole.to_vec(), prompt, margin, true)
            }
            Judgement::Judged { .. } if self.want != Want::Judged => {
                return Err(Error::new("this stage learns from pairs of answers")
                    .at(&row.place)
                    .found("a row with `completion` and `label`")
                    .expected("prompt, chosen, rejected")
                    .hint("rows with one judged answer are for `train.stage = \"kto\"`"));
            }
            Judgement::Judged { sides, label } => {
                let (whole, prompt) = self.tokens(&sides).map_err(|e| e.within(&row.place))?;
                (whole.to_vec(), prompt, None, label)
            }
        };
        let most = self.encoder.max_length;
        // A row that must be complete is dropped with its prompt: it is longer than `max_length` in any case.
        if prompt >= most && self.want != Want::WholePairs {
            return Err(Error::new("the prompt leaves no room for an answer")
                .at(&row.place)
                .found(format!("a prompt of {prompt} tokens, data.max_length = {most}"))
                .expected(format!("at most {} tokens", most - 1))
                .hint("raise `data.max_length`, or remove the row"));
        }
        let sides = whole.into_iter().enumerate().map(|(side, mut ids)| {
            let cut = ids.len().saturating_sub(most);
            ids.truncate(most);
            let first = match self.want {
                Want::PairsAndPrompts if side == 0 => 1,
                _ => prompt.max(1),
            };
            let trained = (0..ids.len()).map(|t| t >= first).collect();
            Side {
                example: Example { ids, trained },
                cut,
            }
        });
        Ok(Unit {
            sides: sides.collect(),
            prompt,
            margin,
            label,
        })
    }

    /// The tokens of prompt and answer, for each answer, and the number of prompt tokens.
    fn tokens<const N: usize>(&self, sides: &Sides<N>) -> Result<([Vec<u32>; N], usize)> {
        let encoder = &self.encoder;
        let mut whole = [const { Vec::new() }; N];
        let alone = match sides {
            Sides::Text { prompt, completions } => {
                let eos = encoder.codec.decode(&[encoder.eos()?])?;
                for (ids, completion) in whole.iter_mut().zip(completions) {
                    let end = if completion.ends_with(&eos) { "" } else { &eos };
                    *ids = encoder.codec.encode(&format!("{prompt}{completion}{end}"), true)?;
                }
                encoder.codec.encode(prompt, true)?
            }
            Sides::Chat {
                prompt,
                completions,
                tools,
            } => {
                let tools = tools.as_ref();
                for (ids, completion) in whole.iter_mut().zip(completions) {
                    let messages: Vec<_> = prompt.iter().chain(completion).cloned().collect();
                    *ids = encoder.rendered(&messages, tools, false)?;
                }
                match prompt.is_empty() {
                    true => Vec::new(),
                    false => encoder.rendered(prompt, tools, true)?,
                }
            }
        };
        let mut shared = alone.len();
        for ids in &whole {
            encoder.check(ids)?;
            shared = shared.min(alone.iter().zip(ids).take_while(|(a, b)| a == b).count());
        }
        Ok((whole, shared))
    }
}
