//! Experts over ranks: each rank has some experts of every layer, and computes them on the rows of the tokens of all ranks. The rows
//! travel to the experts, their products travel back, and so do the gradients of both.
//!
//! The bits are those of one rank. The rows of each rank are computed by themselves, with the shapes that they have on one rank. A
//! token adds its experts in ascending order, and the experts of a rank follow each other: so the rank with the first expert
//! of a token can add those that follow there, from zero, and sends one row. The results of other experts are sent
//! row by row, and so is everything if the sum begins with the shared expert.
//!
//! The gradient of a trained expert is made where it is, from the micro-batch of each rank in their order.
//!
//! Three exchanges: the numbers of tokens, the tokens, the results. All ranks make them in the same order, also a rank that computes a
//! micro-batch only to keep step.
//!
//! Letters: W ranks, N tokens of this rank, T tokens that travel to one rank, D hidden size, n tokens of an expert.

mod traffic;

pub use traffic::expert_words;

use super::reader::Expert;
use super::{ExpertGradientNeeds, ExpertTokens, Experts, bias, zero_gradients};
use crate::base::{Error, Result};
use crate::model::block::DecoderBlock;
use crate::model::contracts::{Context, GradSink, Param};
use crate::ops::routing::{AssignmentLists, ExpertAssignment};
use crate::ops::update;
use crate::source::ExpertRanks;
use candle_core::{Device, Tensor};
use std::ops::Range;

/// Keys of the exchanges of layer 0; each layer has 8.
const KEY: u64 = 0xe7_0000;
/// Bit of a place: the results of this token are added where its experts are.
const ADDED: u32 = 1 << 31;

/// The tokens that this rank sends to one rank.
struct SentTokens {
    /// The tokens, ascending, `[T]`.
    tokens: Vec<u32>,
    /// True if the results of a token are added there, `[T]`.
    added: Vec<bool>,
    /// Number of tokens of each expert there.
    counts: Vec<usize>,
    /// For each token of each expert its place in `tokens`, with `ADDED`.
    places: Vec<u32>,
    /// The same tokens in the lists of the assignment.
    entries: Range<usize>,
}

impl SentTokens {
    /// Number of tokens whose results are added there.
    fn sums(&self) -> usize {
        self.added.iter().filter(|added| **added).count()
    }
}

/// The rows that this rank computes for one rank.
struct ReceivedRows {
    counts: Vec<usize>,
    places: Vec<u32>,
    weights: Vec<f32>,
    /// `[T, D]` each: h, and in the backward pass dy.
    rows: Vec<Vec<f32>>,
    /// The first of `places` that was not computed.
    next: usize,
    results: ReturnedRows,
}

/// The results that go back to one rank.
#[derive(Default)]
struct ReturnedRows {
    /// For each token with `ADDED` the row of its sum.
    row_of: Vec<Option<u32>>,
    /// The sums, in the order of the tokens.
    sums: Vec<f32>,
    /// All other rows, in the order of the experts.
    others: Vec<f32>,
    /// The gradients of the weights.
    d_weights: Vec<f32>,
}

impl ReturnedRows {
    fn new(places: &[u32], (tokens, d): (usize, usize)) -> Self {
        let mut row_of = vec![None; tokens];
        for place in places.iter().filter(|place| **place & ADDED != 0) {
            row_of[(place & !ADDED) as usize] = Some(0);
        }
        let mut rows = 0;
        for row in row_of.iter_mut().flatten() {
            *row = rows;
            rows += 1;
        }
        Self {
            row_of,
            sums: vec![0.0; rows as usize * d],
            ..Self::default()
        }
    }

    /// Adds the rows `[n, D]` of an expert.
    fn add(&mut self, places: &[u32], part: &Tensor, d: usize) -> Result<()> {
        update::with_slice(&part.contiguous()?, |rows| {
            for (place, row) in places.iter().zip(rows.chunks_exact(d)) {
                match self.row_of[(place & !ADDED) as usize] {
                    Some(at) => {
                        let sum = &mut self.sums[at as usize * d..][..d];
                        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                    }
                    None => self.others.extend_from_slice(row),
                }
            }
        })
    }
}

/// The rows of one expert for one rank.
struct ExpertRows {
    places: Vec<u32>,
    /// h, and in the backward pass dy: `[n, D]`.
    rows: Vec<Tensor>,
    /// f32 `[n]`
    weights: Tensor,
}

/// The experts of this rank, and the exchanged rows of one layer.
struct RankExchange<'a> {
    ranks: &'a ExpertRanks,
    /// The experts of this rank.
    own: Range<usize>,
    d: usize,
    key: u64,
    sent: Vec<SentTokens>,
    received: Vec<ReceivedRows>,
}

fn bits(number: usize) -> f32 {
    f32::from_bits(number as u32)
}

fn number(word: &f32) -> usize {
    word.to_bits() as usize
}

/// The tokens that go to each rank. `experts`: those of each rank; `adds`: the sum of a token begins with its experts.
fn sent(experts: &[Range<usize>], assignment: &ExpertAssignment, tokens: usize, adds: bool) -> Result<Vec<SentTokens>> {
    let AssignmentLists {
        starts, tokens: all, ..
    } = assignment.lists()?;
    // The tokens that have an expert on an earlier rank.
    let mut begun = vec![false; tokens];
    let mut out = Vec::new();
    for experts in experts {
        let entries = starts[experts.start]..starts[experts.end];
        let mut there = vec![false; tokens];
        all[entries.clone()].iter().for_each(|t| there[*t as usize] = true);
        let own: Vec<u32> = (0..tokens as u32).filter(|t| there[*t as usize]).collect();
        let added: Vec<bool> = own.iter().map(|token| adds && !begun[*token as usize]).collect();
        let mut place_of = vec![0u32; tokens];
        for ((place, token), added) in own.iter().enumerate().zip(&added) {
            place_of[*token as usize] = place as u32 | if *added { ADDED } else { 0 };
        }
        own.iter().for_each(|t| begun[*t as usize] = true);
        out.push(SentTokens {
            counts: starts[experts.start..=experts.end]
                .windows(2)
                .map(|w| w[1] - w[0])
                .collect(),
            places: all[entries.clone()].iter().map(|t| place_of[*t as usize]).collect(),
            tokens: own,
            added,
            entries,
        });
    }
    Ok(out)
}

impl<'a> RankExchange<'a> {
    /// Sends rows of `tensors` `[N, D]` to the ranks of their experts, and receives those of the own experts.
    fn start(
        ranks: &'a ExpertRanks,
        layer: usize,
        pass: u64,
        assignment: &ExpertAssignment,
        tensors: &[&Tensor],
        adds: bool,
    ) -> Result<Self> {
        let (n, d) = tensors[0].dims2()?;
        let AssignmentLists { starts, weights, .. } = assignment.lists()?;
        let experts = ranks.experts(starts.len() - 1);
        let key = KEY + 8 * layer as u64 + 4 * pass;
        let sent = sent(&experts, assignment, n, adds)?;
        let own = experts[ranks.world().rank].clone();
        let header = |sent: &SentTokens| {
            let counts = sent.counts.iter().copied().map(bits);
            std::iter::once(bits(sent.tokens.len())).chain(counts).collect()
        };
        let lengths = vec![1 + own.len(); sent.len()];
        let headers = ranks.all_to_all(key, sent.iter().map(header).collect(), lengths)?;
        let mut parts: Vec<Vec<f32>> = Vec::with_capacity(sent.len());
        for sent in &sent {
            let words = 2 * sent.places.len() + tensors.len() * sent.tokens.len() * d;
            let mut part = Vec::with_capacity(words);
            part.extend(sent.places.iter().map(|place| f32::from_bits(*place)));
            part.extend_from_slice(&weights[sent.entries.clone()]);
            parts.push(part);
        }
        for tensor in tensors {
            update::with_slice(&tensor.contiguous()?, |rows| {
                for (sent, part) in sent.iter().zip(&mut parts) {
                    let of = |token: &u32| &rows[*token as usize * d..][..d];
                    sent.tokens.iter().for_each(|token| part.extend_from_slice(of(token)));
                }
            })?;
        }
        let sizes = headers.iter().map(|header| {
            let counts: Vec<usize> = header[1..].iter().map(number).collect();
            (number(&header[0]), counts)
        });
        let sizes: Vec<(usize, Vec<usize>)> = sizes.collect();
        let length =
            |(tokens, counts): &(usize, Vec<usize>)| 2 * counts.iter().sum::<usize>() + tensors.len() * tokens * d;
        let lists = ranks.all_to_all(key + 1, parts, sizes.iter().map(length).collect())?;
        let received = sizes.into_iter().zip(lists);
        let received = received.map(|((tokens, counts), list)| {
            let (places, rest) = list.split_at(counts.iter().sum());
            let (weights, rest) = rest.split_at(places.len());
            let places: Vec<u32> = places.iter().map(|word| word.to_bits()).collect();
            let rows = (0..tensors.len()).map(|i| rest[i * tokens * d..][..tokens * d].to_vec());
            ReceivedRows {
                results: ReturnedRows::new(&places, (tokens, d)),
                counts,
                places,
                weights: weights.to_vec(),
                rows: rows.collect(),
                next: 0,
            }
        });
        let received = received.collect();
        Ok(Self {
            ranks,
            own,
            d,
            key,
            sent,
            received,
        })
    }

    /// The rows of expert `own.start + e` for rank `rank`; `None`: there are none.
    fn rows(&mut self, e: usize, rank: usize) -> Result<Option<ExpertRows>> {
        let (d, of) = (self.d, &mut self.received[rank]);
        let n = of.counts[e];
        if n == 0 {
            return Ok(None);
        }
        let entries = of.next..of.next + n;
        of.next += n;
        let places = of.places[entries.clone()].to_vec();
        let gather = |rows: &Vec<f32>| {
            let mut own = Vec::with_capacity(n * d);
            for place in places.iter().map(|place| (place & !ADDED) as usize) {
                own.extend_from_slice(&rows[place * d..][..d]);
            }
            Ok(Tensor::from_vec(own, (n, d), &Device::Cpu)?)
        };
        Ok(Some(ExpertRows {
            rows: of.rows.iter().map(gather).collect::<Result<_>>()?,
            weights: Tensor::from_vec(of.weights[entries].to_vec(), n, &Device::Cpu)?,
            places,
        }))
    }

    /// Sends the results back. Adds those of the own tokens to `to` `[N, D]`, and writes the gradients of their weights to
    /// `d_weights` `[N·K]`.
    fn finish(self, to: Option<&Tensor>, d_weights: Option<&Tensor>) -> Result<()> {
        let d = self.d;
        let part = |of: ReceivedRows| [of.results.d_weights, of.results.sums, of.results.others].concat();
        let parts = self.received.into_iter().map(part).collect();
        let numbers = |sent: &SentTokens| if d_weights.is_some() { sent.places.len() } else { 0 };
        let length = |sent: &SentTokens| {
            let others = sent.places.iter().filter(|place| **place & ADDED == 0).count();
            numbers(sent) + if to.is_some() { (sent.sums() + others) * d } else { 0 }
        };
        let lengths = self.sent.iter().map(length).collect();
        let lists = self.ranks.all_to_all(self.key + 2, parts, lengths)?;
        if let Some(d_weights) = d_weights {
            update::with_slice_mut(d_weights, |all| {
                for (sent, list) in self.sent.iter().zip(&lists) {
                    all[sent.entries.clone()].copy_from_slice(&list[..sent.places.len()]);
                }
            })?;
        }
        let Some(to) = to else { return Ok(()) };
        let mut rest: Vec<&[f32]> = self
            .sent
            .iter()
            .zip(&lists)
            .map(|(s, list)| &list[numbers(s)..])
            .collect();
        update::with_slice_mut(to, |to| {
            let mut add = |token: u32, rest: &mut &[f32]| {
                let (row, after) = rest.split_at(d);
                *rest = after;
                let sum = &mut to[token as usize * d..][..d];
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            };
            // The sums are those of the first experts of their tokens.
            for (sent, rest) in self.sent.iter().zip(&mut rest) {
                let tokens = sent.tokens.iter().zip(&sent.added).filter(|(_, added)| **added);
                tokens.for_each(|(token, _)| add(*token, rest));
            }
            for (sent, rest) in self.sent.iter().zip(&mut rest) {
                let others = sent.places.iter().filter(|place| **place & ADDED == 0);
                others.for_each(|place| add(sent.tokens[*place as usize], rest));
            }
        })
    }
}

impl Experts {
    /// The ranks among which the experts are divided.
    ///
    /// # Errors
    /// Adapters on experts.
    pub(super) fn ranks(&self) -> Result<Option<&ExpertRanks>> {
        let Some(ranks) = self.reader.source.expert_ranks() else {
            return Ok(None);
        };
        if !self.reader.adapters.is_empty() || (0..3).any(|projection| self.reader.joined.has(projection)) {
            return Err(Error::unsupported(
                "experts that are divided among ranks have no adapters",
            ));
        }
        Ok(Some(ranks))
    }

    /// Tells the sink of the matrices of an expert of another rank, in the order in which that takes their gradients.
    fn take_elsewhere(&self, layer: usize, e: usize, sink: &mut dyn GradSink) -> Result<()> {
        for projection in [2, 0, 1] {
            let name = format!("model.layers.{layer}.{}.weight", self.sizes.linear_name(e, projection));
            if sink.wants(&name) {
                let shape = self.reader.source.param(&name)?.shape.clone();
                sink.take_elsewhere(&name, shape)?;
            }
        }
        Ok(())
    }

    fn adds(&self) -> bool {
        self.sizes.shared.is_none()
    }

    /// Computes the own experts on the rows of each rank, in the order of the ranks.
    fn each(
        &self,
        travel: &mut RankExchange<'_>,
        mut compute: impl FnMut(&Expert, ExpertRows, &mut ReturnedRows) -> Result<()>,
    ) -> Result<()> {
        for (e, expert) in travel.own.clone().enumerate() {
            let mut here = None;
            for rank in 0..travel.received.len() {
                let Some(rows) = travel.rows(e, rank)? else { continue };
                if here.is_none() {
                    here = Some(self.reader.read(expert)?);
                }
                if let Some(expert) = &here {
                    compute(expert, rows, &mut travel.received[rank].results)?;
                }
            }
        }
        Ok(())
    }
}

/// The inputs of the backward pass of experts on several ranks.
pub(super) struct OverRanks<'a> {
    pub ranks: &'a ExpertRanks,
    pub assignment: &'a ExpertAssignment,
    /// The input of the forward pass, `[N, D]`.
    pub h: &'a Tensor,
    /// The gradient of the output, `[N, D]`.
    pub dy: &'a Tensor,
    /// The gradient of h is added to it, `[N, D]`.
    pub dh: Option<&'a Tensor>,
    /// Receives the gradients of the weights of all tokens, f32 `[N·K]`.
    pub d_weights: Option<&'a Tensor>,
}

impl DecoderBlock {
    /// Adds the routed experts of the rows of h `[N, D]` to y `[N, D]`.
    pub(super) fn forward_over_ranks(
        &self,
        experts: &Experts,
        ranks: &ExpertRanks,
        h: &Tensor,
        y: &Tensor,
        assignment: &ExpertAssignment,
        ctx: &Context,
    ) -> Result<()> {
        let mut travel = RankExchange::start(ranks, self.index, 0, assignment, &[h], experts.adds())?;
        let d = travel.d;
        experts.each(&mut travel, |expert, of, results| {
            let [rows] = &of.rows[..] else { return Err(lost()) };
            let weights = Some(&of.weights);
            let (part, _) = self.expert_forward(&expert.inputs, &expert.down, rows, weights, ctx, false)?;
            if let Some(b) = &expert.down_bias {
                bias::add(b, &part, &of.weights)?;
            }
            results.add(&of.places, &part, d)
        })?;
        travel.finish(Some(y), None)
    }

    /// The backward pass of `forward_over_ranks`.
    pub(super) fn backward_over_ranks(
        &self,
        experts: &Experts,
        of: OverRanks<'_>,
        needs: ExpertGradientNeeds<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        let OverRanks {
            ranks,
            assignment,
            h,
            dy,
            dh,
            d_weights,
        } = of;
        let reader = &experts.reader;
        let wanted = |e: usize, sink: &dyn GradSink| reader.wanted(e, sink);
        if dh.is_none() && d_weights.is_none() && !(0..experts.sizes.count).any(|e| wanted(e, sink)) {
            return Ok(());
        }
        let mut travel = RankExchange::start(ranks, self.index, 1, assignment, &[h, dy], experts.adds())?;
        let (d, size) = (travel.d, travel.received.len());
        for e in 0..experts.sizes.count {
            let trained = wanted(e, sink);
            if !travel.own.contains(&e) {
                if trained {
                    experts.take_elsewhere(self.index, e, sink)?;
                }
                continue;
            }
            let mut here = None;
            for rank in 0..size {
                // A rank that only keeps step gives no gradients.
                let counts = trained && rank < sink.contributors();
                let rows = travel.rows(e - travel.own.start, rank)?;
                if rows.is_none() && !counts {
                    continue;
                }
                let expert = match &mut here {
                    Some(expert) => expert,
                    here => here.insert(reader.read(e)?),
                };
                let Some(of) = rows else {
                    zero_gradients(expert, sink)?;
                    continue;
                };
                let sink: &mut dyn GradSink = if counts { &mut *sink } else { &mut NoGradients };
                let part = self.one_backward(expert, &of, needs, d_weights.is_some(), sink)?;
                let results = &mut travel.received[rank].results;
                results.d_weights.extend(part.1);
                if let Some(part) = part.0 {
                    results.add(&of.places, &part, d)?;
                }
            }
        }
        if dh.is_none() {
            travel.received.iter_mut().for_each(|of| of.results.sums.clear());
        }
        travel.finish(dh, d_weights)
    }

    /// The gradient of the rows of an expert, if it is needed, and those of their weights.
    fn one_backward(
        &self,
        expert: &Expert,
        of: &ExpertRows,
        needs: ExpertGradientNeeds<'_>,
        weighs: bool,
        sink: &mut dyn GradSink,
    ) -> Result<(Option<Tensor>, Vec<f32>)> {
        let [rows, dy] = &of.rows[..] else { return Err(lost()) };
        let zeros = || update::zeros(of.weights.shape(), of.weights.dtype(), &Device::Cpu);
        let own = weighs.then(zeros).transpose()?;
        let tokens = ExpertTokens {
            rows,
            weights: Some(&of.weights),
            d_weights: own.as_ref(),
            dy,
        };
        let part = self.expert_backward(&expert.inputs, &expert.down, tokens, None, needs, sink)?;
        if let Some(b) = &expert.down_bias {
            bias::backward(b, dy, &of.weights, own.as_ref(), sink)?;
        }
        Ok((part, own.map(|own| own.to_vec1()).transpose()?.unwrap_or_default()))
    }
}

/// Nothing is trained.
struct NoGradients;

impl GradSink for NoGradients {
    fn wants(&self, _: &str) -> bool {
        false
    }

    fn take(&mut self, _: &Param, _: Tensor) -> Result<()> {
        Ok(())
    }
}

fn lost() -> Error {
    Error::internal("rows of experts are missing")
}
