//! Tokenizes preference rows.

use super::PreferencePart;
use super::rows::{Judgment, Sides, understand};
use crate::Long;
use crate::batch::Example;
use crate::codec::{ChatRender, RenderJob};
use crate::dataset::RowOrigin;
use crate::encode::Encoder;
use crate::faults::TrialState;
use crate::layout::ColumnLayout;
use crate::prepare::{self, CachedRenderings};
use crate::read::Row;
use ft_base::{Error, Result};
use serde_json::Value;
use std::sync::Arc;

/// Messages that are rendered, and whether a generation prompt follows.
type Talk = (Vec<Value>, bool);

/// A tokenized row.
pub(super) struct TokenizedRow {
    /// Chosen and rejected, or the judged answer; none of a row that is left out (`Judgment::Forked`).
    pub sides: Vec<Side>,
    pub margin: Option<f32>,
    pub label: bool,
}

pub(super) struct Side {
    pub example: Example,
    /// Number of prompt tokens: the same in both answers of a pair, unless each is judged alone.
    pub prompt: usize,
    /// Tokens removed by truncation at `max_length`.
    pub cut: usize,
}

pub(super) struct PairEncoder<'a> {
    pub encoder: Encoder<'a>,
    pub want: PreferencePart,
    pub long: Long,
}

impl Judgment {
    /// The conversation of each answer, then that of the prompt alone, if it has messages.
    fn talks(&self) -> Vec<Talk> {
        match self {
            Self::Pair { sides, .. } => sides.talks(),
            Self::Judged { sides, .. } => sides.talks(),
            Self::Forked => Vec::new(),
        }
    }

    fn tools(&self) -> Option<&Value> {
        match self {
            Self::Pair {
                sides: Sides::Chat { tools, .. },
                ..
            } => tools.as_ref(),
            Self::Judged {
                sides: Sides::Chat { tools, .. },
                ..
            } => tools.as_ref(),
            _ => None,
        }
    }
}

impl<const N: usize> Sides<N> {
    fn talks(&self) -> Vec<Talk> {
        let Self::Chat {
            prompt, completions, ..
        } = self
        else {
            return Vec::new();
        };
        let whole = |answer: &Vec<Value>| (prompt.iter().chain(answer).cloned().collect(), false);
        let mut out: Vec<Talk> = completions.iter().map(whole).collect();
        if !prompt.is_empty() {
            out.push((prompt.clone(), true));
        }
        out
    }
}

impl PairEncoder<'_> {
    /// The rows of a group, whose renderings are asked for at once. `None`: the row was not tried, because none before
    /// it was good and time is up.
    pub(super) fn encode_group(
        &self,
        group: &[(Row, Arc<ColumnLayout>, RowOrigin)],
        tried: &TrialState,
    ) -> Vec<Option<Result<TokenizedRow>>> {
        if !tried.go_on() {
            return group.iter().map(|_| None).collect();
        }
        let rows: Vec<Result<Judgment>> = group.iter().map(|(row, layout, _)| understand(row, layout)).collect();
        let talks: Vec<Vec<Talk>> = rows
            .iter()
            .map(|row| row.as_ref().map(Judgment::talks).unwrap_or_default())
            .collect();
        let mut jobs = Vec::new();
        for (row, talks) in rows.iter().zip(&talks) {
            let tools = row.as_ref().ok().and_then(Judgment::tools);
            jobs.extend(talks.iter().map(|(messages, prompt)| {
                Some(RenderJob {
                    messages,
                    tools,
                    renderings: vec![(messages.len(), *prompt)],
                })
            }));
        }
        let template = self.encoder.template;
        let prepared = template.map(|t| prepare::of_jobs(t, jobs)).unwrap_or_default();
        let mut rest = &prepared[..];
        let mut out = Vec::with_capacity(group.len());
        for (((row, layout, _), judgment), talks) in group.iter().zip(&rows).zip(&talks) {
            let (own, others) = rest.split_at(talks.len().min(rest.len()));
            rest = others;
            if !tried.go_on() {
                out.push(None);
                continue;
            }
            let unit = match judgment {
                Ok(judgment) => self.unit(row, judgment, talks, own),
                // An error cannot be copied: it is made once more.
                Err(_) => understand(row, layout).and_then(|judgment| self.unit(row, &judgment, &[], &[])),
            };
            let unit = unit.map_err(|e| e.or_at(&row.place));
            tried.note(&unit);
            out.push(Some(unit));
        }
        out
    }

    /// Errors: what is wrong with the row, with its place.
    fn unit(
        &self,
        row: &Row,
        judgment: &Judgment,
        talks: &[Talk],
        prepared: &[CachedRenderings],
    ) -> Result<TokenizedRow> {
        let (whole, prompts, margin, label) = match judgment {
            Judgment::Forked => {
                return Ok(TokenizedRow {
                    sides: Vec::new(),
                    margin: None,
                    label: false,
                });
            }
            Judgment::Pair { sides, margin } => {
                let (whole, mut prompts) = self.tokens(sides, talks, prepared).map_err(|e| e.within(&row.place))?;
                if self.want != PreferencePart::Judged {
                    prompts = [prompts[0].min(prompts[1]); 2];
                }
                if whole[0] == whole[1] {
                    return Err(
                        Error::format("`chosen` and `rejected` have the same tokens after encoding")
                            .at(&row.place)
                            .expected("two different answers to one prompt")
                            .hint("remove the row; or look at the encoded rows, and set another template with `ChatTemplate::from_file`"),
                    );
                }
                (whole.to_vec(), prompts.to_vec(), *margin, true)
            }
            Judgment::Judged { .. } if self.want != PreferencePart::Judged => {
                return Err(Error::unsupported("this stage trains on pairs of answers")
                    .at(&row.place)
                    .found("a row with `completion` and `label`")
                    .expected("prompt, chosen, rejected")
                    .hint("rows with one labeled answer are for `PreferencePart::Judged`"));
            }
            Judgment::Judged { sides, label } => {
                let (whole, prompts) = self.tokens(sides, talks, prepared).map_err(|e| e.within(&row.place))?;
                (whole.to_vec(), prompts.to_vec(), None, *label)
            }
        };
        let most = self.encoder.max_length;
        let prompt = prompts.iter().copied().max().unwrap_or(0);
        // Such a row is left out if it must be complete, or if long rows are: it is longer than `max_length` in any case.
        let is_long = whole.iter().any(|ids| ids.len() > most);
        let is_left_out = self.want == PreferencePart::WholePairs || (self.long == Long::Drop && is_long);
        if prompt >= most && !is_left_out {
            return Err(
                Error::format("the prompt is so long that no tokens are left for an answer")
                    .at(&row.place)
                    .found(format!("a prompt of {prompt} tokens, a maximum of {most} for the row"))
                    .expected(format!("at most {} tokens", most - 1))
                    .hint("raise `data::DatasetSpec::max_length`, set `Long::Drop`, or remove the row"),
            );
        }
        let sides = whole
            .into_iter()
            .zip(prompts)
            .enumerate()
            .map(|(side, (mut ids, prompt))| {
                let cut = ids.len().saturating_sub(most);
                ids.truncate(most);
                let first = match self.want {
                    PreferencePart::PairsAndPrompts if side == 0 => 1,
                    _ => prompt.max(1),
                };
                let trained = (0..ids.len()).map(|t| t >= first).collect();
                Side {
                    example: Example { ids, trained },
                    prompt,
                    cut,
                }
            });
        Ok(TokenizedRow {
            sides: sides.collect(),
            margin,
            label,
        })
    }

    /// The tokens of prompt and answer for each answer, and how many of each are the prompt.
    fn tokens<const N: usize>(
        &self,
        sides: &Sides<N>,
        talks: &[Talk],
        prepared: &[CachedRenderings],
    ) -> Result<([Vec<u32>; N], [usize; N])> {
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
            Sides::Chat { tools, .. } => {
                let rendered = |at: usize| -> Result<Vec<u32>> {
                    let Some((messages, prompt)) = talks.get(at) else {
                        return Ok(Vec::new());
                    };
                    let known = prepared.get(at).map(|p| p as &dyn ChatRender);
                    let encoder = Encoder {
                        template: known.or(encoder.template),
                        ..*encoder
                    };
                    encoder.rendered(messages, tools.as_ref(), *prompt)
                };
                for (at, ids) in whole.iter_mut().enumerate() {
                    *ids = rendered(at)?;
                }
                rendered(N)?
            }
        };
        whole.iter().try_for_each(|ids| encoder.check(ids))?;
        let shared = |ids: &Vec<u32>| alone.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let prompts = whole.each_ref().map(shared);
        Ok((whole, prompts))
    }
}
