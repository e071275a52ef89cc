//! Ranks that share the tokens of one micro-batch. All that a layer does to one token needs no other rank; attention reads
//! tokens of all of them, and brings them together in one of two ways (`SequenceBy`). A short convolution reads the last tokens of
//! the ranks before.
//!
//! Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509; keys and values of all ranks as in Llama 3, arXiv 2407.21783,
//! section 3.3.2.
//!
//! Letters: P ranks that share a micro-batch, N its tokens, n those of one rank; H query heads, K key heads, E elements
//! of a head.

mod memory;

pub use memory::sequence_bytes;

use super::spec::{Mixer, Spec};
use crate::base::{Error, Result};
use crate::comm::Collective;
use crate::data::Batch;
use crate::ops::attention::{self, AttentionGradInputs, AttentionSpec as Heads, KEY_CHUNK};
use crate::ops::update;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// How attention reads the tokens of other ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SequenceBy {
    /// `Heads` if the heads can be divided, else `Keys`.
    #[default]
    Auto,
    /// Each rank gets all tokens of a part of the heads (Ulysses).
    Heads,
    /// Each rank gets the keys and values of all tokens before its own ones.
    Keys,
}

/// How many ranks share a micro-batch, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceConfig {
    /// P. It divides the number of ranks.
    pub ranks: usize,
    /// How attention reads the tokens of other ranks.
    pub by: SequenceBy,
}

impl Default for SequenceConfig {
    fn default() -> Self {
        Self {
            ranks: 1,
            by: SequenceBy::Auto,
        }
    }
}

impl SequenceConfig {
    /// True if attention with `heads` query heads exchanges heads.
    pub fn by_heads(&self, heads: usize) -> bool {
        self.by != SequenceBy::Keys && heads.is_multiple_of(self.ranks)
    }

    /// # Errors
    /// A model that cannot be computed in this way.
    pub fn check(&self, spec: &Spec) -> Result<()> {
        if self.ranks == 1 {
            return Ok(());
        }
        if spec
            .layers
            .iter()
            .any(|layer| matches!(layer.mixer, Mixer::DeltaNet(_)))
        {
            return Err(
                Error::unsupported("ranks cannot share the tokens of a model with Gated DeltaNet layers")
                    .found("a recurrent state from token to token")
                    .expected("attention or convolutions: a rank would wait for the state after the last token of the rank before it"),
            );
        }
        if self.by == SequenceBy::Heads && !spec.heads.is_multiple_of(self.ranks) {
            return Err(
                Error::argument("the query heads cannot be divided among the ranks that share a micro-batch")
                    .found(format!("{} heads, {} ranks", spec.heads, self.ranks))
                    .expected("a divisor of the heads, or `SequenceBy::Keys`"),
            );
        }
        Ok(())
    }
}

/// The heads of one rank while heads are divided.
struct HeadShare {
    /// Attention over these heads.
    spec: Heads,
    /// Query heads.
    queries: Vec<usize>,
    /// Key heads; one that serves query heads of several ranks is on each of them.
    keys: Vec<usize>,
}

/// The heads of rank `index` of `ranks`, which divides `spec.heads`.
fn share(spec: &Heads, index: usize, ranks: usize) -> HeadShare {
    let own = spec.heads / ranks;
    let group = spec.heads / spec.kv_heads.max(1);
    // In each run of this many consecutive query heads, all have the same key head.
    let together = gcd(own, group);
    let queries: Vec<usize> = (index * own..(index + 1) * own).collect();
    let keys: Vec<usize> = queries.iter().step_by(together).map(|head| head / group).collect();
    HeadShare {
        spec: Heads {
            heads: own,
            kv_heads: keys.len(),
            ..spec.clone()
        },
        queries,
        keys,
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The tokens that this rank has of a micro-batch, and its connection to the ranks with the others.
pub struct SequenceRanks<'a> {
    comm: &'a dyn Collective,
    config: SequenceConfig,
    /// First rank of those that share the micro-batch.
    first: usize,
    tokens: Tokens<'a>,
}

/// The tokens of each rank that shares a micro-batch.
struct Tokens<'a> {
    /// Offsets `[P + 1]`.
    cuts: Vec<usize>,
    /// Offsets of all documents.
    documents: &'a [usize],
}

impl<'a> Tokens<'a> {
    /// As equal as possible.
    fn new(tokens: usize, ranks: usize, documents: &'a [usize]) -> Self {
        Self {
            cuts: (0..=ranks)
                .map(|rank| (tokens as u128 * rank as u128 / ranks as u128) as usize)
                .collect(),
            documents,
        }
    }

    fn of(&self, rank: usize) -> Range<usize> {
        self.cuts[rank]..self.cuts[rank + 1]
    }

    /// Start of the document of the first token of a rank.
    fn document_of(&self, rank: usize) -> usize {
        let start = self.of(rank).start;
        let document = self.documents.iter().rev().find(|at| **at <= start);
        document.copied().unwrap_or(0)
    }

    /// The tokens that a convolution over `taps` tokens reads for those of rank `rank`.
    fn inputs_of(&self, rank: usize, taps: usize) -> Range<usize> {
        let own = self.of(rank);
        let first = (own.start + 1).saturating_sub(taps).max(self.document_of(rank));
        first.min(own.start)..own.end
    }

    /// The tokens whose keys rank `rank` reads.
    fn keys_of(&self, rank: usize, spec: &Heads) -> Range<usize> {
        let (own, document) = (self.of(rank), self.document_of(rank));
        // Of a window, from the first key of a chunk: attention makes the same sums then as for the whole document.
        let before = spec
            .window
            .map_or(0, |window| (own.start - document + 1).saturating_sub(window));
        document + before / KEY_CHUNK * KEY_CHUNK..own.end
    }
}

/// Numbers for or from each of the ranks that share a micro-batch.
type Lists = Vec<Vec<f32>>;

impl<'a> SequenceRanks<'a> {
    /// For a batch of all ranks that share it.
    ///
    /// # Errors
    /// Fewer tokens than ranks; a number of ranks that does not divide that of the job.
    pub fn new(comm: &'a dyn Collective, config: SequenceConfig, batch: &'a Batch) -> Result<Self> {
        let (world, tokens) = (comm.world(), batch.len());
        if config.ranks == 0 || !world.size.is_multiple_of(config.ranks) {
            return Err(
                Error::argument("the ranks cannot be divided into groups that share a micro-batch")
                    .found(format!("{} ranks in groups of {}", world.size, config.ranks)),
            );
        }
        if tokens < config.ranks {
            return Err(
                Error::argument("a micro-batch has fewer tokens than ranks that share it")
                    .found(format!("{tokens} tokens, {} ranks", config.ranks))
                    .hint("use larger micro-batches, or pack the rows"),
            );
        }
        Ok(Self {
            comm,
            config,
            first: world.rank / config.ranks * config.ranks,
            tokens: Tokens::new(tokens, config.ranks, &batch.documents),
        })
    }

    fn index(&self) -> usize {
        self.comm.world().rank - self.first
    }

    /// The error of an objective that needs more than the tokens of one rank.
    pub(crate) fn not_whole() -> Error {
        Error::unsupported("this objective reads whole documents, but ranks share them")
            .hint("give each micro-batch to one rank")
    }

    /// The tokens of this rank.
    pub fn own(&self) -> Range<usize> {
        self.tokens.of(self.index())
    }

    /// The part of the batch that this rank has; its documents are cut where its tokens begin and end.
    ///
    /// # Errors
    /// A batch with columns: an objective reads them by document.
    pub fn part(&self, batch: &Batch) -> Result<Batch> {
        if batch.columns != Default::default() {
            return Err(Self::not_whole());
        }
        let own = self.own();
        let mut documents: Vec<usize> = batch
            .documents
            .iter()
            .map(|at| (*at).clamp(own.start, own.end))
            .collect();
        documents.iter_mut().for_each(|at| *at -= own.start);
        documents.dedup();
        Ok(Batch {
            ids: batch.ids[own.clone()].to_vec(),
            positions: batch.positions[own.clone()].to_vec(),
            targets: batch.targets[own].to_vec(),
            documents,
            columns: Default::default(),
        })
    }

    /// `parts[i]` goes to rank i of those that share the micro-batch, and `lengths[i]` numbers come from it.
    fn exchange(&self, key: u64, parts: Lists, lengths: Vec<usize>) -> Result<Lists> {
        let size = self.comm.world().size;
        let (mut all, mut all_lengths) = (vec![Vec::new(); size], vec![0; size]);
        for (rank, (part, length)) in parts.into_iter().zip(lengths).enumerate() {
            all[self.first + rank] = part;
            all_lengths[self.first + rank] = length;
        }
        let mut found = self.comm.all_to_all(key, all, all_lengths).wait()?;
        found.truncate(self.first + self.config.ranks);
        Ok(found.split_off(self.first))
    }

    /// Attention of the queries of this rank `[n, H·E]`, with its keys and values `[n, K·E]`, over the tokens of all: o `[n,
    /// H·E]` and lse `[n, H]`.
    pub(super) fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, spec: &Heads) -> Result<(Tensor, Tensor)> {
        if !self.config.by_heads(spec.heads) {
            let (k, v) = self.keys_values(k, v, spec)?;
            let (queries, keys) = self.own_documents(spec);
            return attention::forward(q, &k, &v, spec, &queries, &keys);
        }
        let [queries, keys, values] = [ColumnsOf::Queries, ColumnsOf::Keys, ColumnsOf::Keys];
        let mut all = self.to_heads(FORWARD, &[(q, queries), (k, keys), (v, values)], spec)?;
        let share = share(spec, self.index(), self.config.ranks);
        let (v, k, q) = (all.pop(), all.pop(), all.pop());
        let (Some(q), Some(k), Some(v)) = (q, k, v) else {
            return Err(Error::internal("attention needs queries, keys and values"));
        };
        let (o, lse) = attention::forward(&q, &k, &v, &share.spec, self.tokens.documents, self.tokens.documents)?;
        drop((q, k, v));
        let mut own = self.to_tokens(FORWARD + 1, [(o, ColumnsOf::Queries), (lse, ColumnsOf::Sums)], spec)?;
        match (own.pop(), own.pop()) {
            (Some(lse), Some(o)) => Ok((o, lse)),
            _ => Err(Error::internal("attention has an output and its sums")),
        }
    }

    /// dq, dk and dv of the tokens of this rank, in the shapes of `forward`.
    pub(super) fn backward(
        &self,
        saved: AttentionGradInputs<&Tensor>,
        spec: &Heads,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let AttentionGradInputs { q, k, v, o, lse, dout } = saved;
        if !self.config.by_heads(spec.heads) {
            let (k, v) = self.keys_values(k, v, spec)?;
            let (queries, keys) = self.own_documents(spec);
            let saved = AttentionGradInputs { k: &k, v: &v, ..saved };
            let (dq, dk, dv) = attention::backward_after(saved, spec, &queries, &keys)?;
            drop((k, v));
            let (dk, dv) = self.key_gradients(dk, dv, spec)?;
            return Ok((dq, dk, dv));
        }
        let all = [
            (q, ColumnsOf::Queries),
            (k, ColumnsOf::Keys),
            (v, ColumnsOf::Keys),
            (o, ColumnsOf::Queries),
            (lse, ColumnsOf::Sums),
            (dout, ColumnsOf::Queries),
        ];
        let all = self.to_heads(BACKWARD, &all, spec)?;
        let [q, k, v, o, lse, dout] = &all[..] else {
            return Err(Error::internal("the backward pass of attention needs six tensors"));
        };
        let share = share(spec, self.index(), self.config.ranks);
        let saved = AttentionGradInputs { q, k, v, o, lse, dout };
        let (dq, dk, dv) = attention::backward(saved, &share.spec, self.tokens.documents)?;
        drop(all);
        let gradients = [(dq, ColumnsOf::Queries), (dk, ColumnsOf::Keys), (dv, ColumnsOf::Keys)];
        let mut own = self.to_tokens(BACKWARD + 1, gradients, spec)?;
        match (own.pop(), own.pop(), own.pop()) {
            (Some(dv), Some(dk), Some(dq)) => Ok((dq, dk, dv)),
            _ => Err(Error::internal("attention has three gradients")),
        }
    }

    /// From tensors of the own tokens with all heads to tensors of all tokens with the own heads.
    fn to_heads(&self, key: u64, tensors: &[(&Tensor, ColumnsOf)], spec: &Heads) -> Result<Vec<Tensor>> {
        let ranks = self.config.ranks;
        let shares: Vec<HeadShare> = (0..ranks).map(|rank| share(spec, rank, ranks)).collect();
        let mut parts: Lists = vec![Vec::new(); ranks];
        for (tensor, of) in tensors {
            let (heads, e) = of.sizes(spec);
            numbers(tensor, |values| {
                for (share, part) in shares.iter().zip(&mut parts) {
                    for row in values.chunks_exact(heads * e) {
                        for head in of.heads(share) {
                            part.extend_from_slice(&row[head * e..(head + 1) * e]);
                        }
                    }
                }
            })?;
        }
        let mine = &shares[self.index()];
        let width = |of: &ColumnsOf| of.heads(mine).len() * of.sizes(spec).1;
        let row: usize = tensors.iter().map(|(_, of)| width(of)).sum();
        let lengths = (0..ranks).map(|rank| self.tokens.of(rank).len() * row).collect();
        let lists = self.exchange(key, parts, lengths)?;
        let tokens = self.tokens.cuts[ranks];
        let mut all: Lists = tensors
            .iter()
            .map(|(_, of)| Vec::with_capacity(tokens * width(of)))
            .collect();
        // The tokens of the ranks follow each other.
        for (rank, list) in lists.into_iter().enumerate() {
            let mut rest = &list[..];
            for (values, (_, of)) in all.iter_mut().zip(tensors) {
                let (own, after) = rest.split_at(self.tokens.of(rank).len() * width(of));
                values.extend_from_slice(own);
                rest = after;
            }
        }
        let tensor = |(values, (own, of)): (Vec<f32>, &(&Tensor, ColumnsOf))| {
            matrix(values, (tokens, width(of)), &Kind::of(own))
        };
        all.into_iter().zip(tensors).map(tensor).collect()
    }

    /// From tensors of all tokens with the own heads to tensors of the own tokens with all heads. The parts of a key
    /// head on several ranks are added in the order of the ranks.
    fn to_tokens<const T: usize>(
        &self,
        key: u64,
        tensors: [(Tensor, ColumnsOf); T],
        spec: &Heads,
    ) -> Result<Vec<Tensor>> {
        let (ranks, own) = (self.config.ranks, self.own().len());
        let shares: Vec<HeadShare> = (0..ranks).map(|rank| share(spec, rank, ranks)).collect();
        let kinds: Vec<(ColumnsOf, Kind)> = tensors.iter().map(|(tensor, of)| (*of, Kind::of(tensor))).collect();
        let width = |of: &ColumnsOf, share: &HeadShare| of.heads(share).len() * of.sizes(spec).1;
        let mut parts: Lists = vec![Vec::new(); ranks];
        for (tensor, of) in tensors {
            let width = width(&of, &shares[self.index()]);
            numbers(&tensor, |values| {
                for (rank, part) in parts.iter_mut().enumerate() {
                    let tokens = self.tokens.of(rank);
                    part.extend_from_slice(&values[tokens.start * width..tokens.end * width]);
                }
            })?;
        }
        let row = |share: &HeadShare| -> usize { kinds.iter().map(|(of, _)| width(of, share)).sum() };
        let lengths = shares.iter().map(|share| own * row(share)).collect();
        let lists = self.exchange(key, parts, lengths)?;
        let mut all: Lists = Vec::with_capacity(T);
        for (of, _) in &kinds {
            let (heads, e) = of.sizes(spec);
            all.push(vec![0.0; own * heads * e]);
        }
        for (share, list) in shares.iter().zip(lists) {
            let mut rest = &list[..];
            for (values, (of, _)) in all.iter_mut().zip(&kinds) {
                let (heads, e) = of.sizes(spec);
                let (from, after) = rest.split_at(own * width(of, share));
                rest = after;
                let mut pieces = from.chunks_exact(e);
                for row in values.chunks_exact_mut(heads * e) {
                    for (head, piece) in of.heads(share).iter().zip(&mut pieces) {
                        let to = &mut row[head * e..(head + 1) * e];
                        match of {
                            ColumnsOf::Keys => to.iter_mut().zip(piece).for_each(|(sum, x)| *sum += x),
                            ColumnsOf::Queries | ColumnsOf::Sums => to.copy_from_slice(piece),
                        }
                    }
                }
            }
        }
        let tensor = |(values, (of, kind)): (Vec<f32>, &(ColumnsOf, Kind))| {
            let (heads, e) = of.sizes(spec);
            matrix(values, (own, heads * e), kind)
        };
        all.into_iter().zip(&kinds).map(tensor).collect()
    }

    /// Offsets of the own queries, and of the keys that they read.
    fn own_documents(&self, spec: &Heads) -> (Vec<usize>, Vec<usize>) {
        let keys = self.tokens.keys_of(self.index(), spec);
        (self.offsets(&self.own()), self.offsets(&keys))
    }

    /// Offsets of the documents of a range that ends with the own tokens.
    fn offsets(&self, range: &Range<usize>) -> Vec<usize> {
        let own = self.own();
        let ends = self.tokens.documents.iter();
        let ends = ends.filter(|at| own.start < **at && **at < own.end);
        let all = std::iter::once(range.start).chain(ends.copied()).chain([range.end]);
        all.map(|at| at - range.start).collect()
    }

    /// Rows `[n, W]` after those of earlier ranks that a convolution over `taps` tokens reads too, and the offsets of their
    /// documents.
    pub(super) fn with_earlier(&self, x: &Tensor, taps: usize) -> Result<(Tensor, Vec<usize>)> {
        let [rows] = self.gather([x], |rank| self.tokens.inputs_of(rank, taps))?;
        Ok((rows, self.offsets(&self.tokens.inputs_of(self.index(), taps))))
    }

    /// The gradient of the own rows, from that of the rows that `with_earlier` returned on each rank.
    pub(super) fn with_earlier_backward(&self, dx: Tensor, taps: usize) -> Result<Tensor> {
        let [dx] = self.sums([dx], |rank| self.tokens.inputs_of(rank, taps))?;
        Ok(dx)
    }

    /// k and v of the tokens that the own queries read.
    fn keys_values(&self, k: &Tensor, v: &Tensor, spec: &Heads) -> Result<(Tensor, Tensor)> {
        let [k, v] = self.gather([k, v], |rank| self.tokens.keys_of(rank, spec))?;
        Ok((k, v))
    }

    /// The gradients of the own keys and values: those of all ranks that read them, added in the order of the ranks.
    fn key_gradients(&self, dk: Tensor, dv: Tensor, spec: &Heads) -> Result<(Tensor, Tensor)> {
        let [dk, dv] = self.sums([dk, dv], |rank| self.tokens.keys_of(rank, spec))?;
        Ok((dk, dv))
    }

    /// The rows of tensors of one width that this rank reads; `reads`: of each rank.
    fn gather<const T: usize>(&self, own: [&Tensor; T], reads: impl Fn(usize) -> Range<usize>) -> Result<[Tensor; T]> {
        let (tokens, ranks) = (self.own(), self.config.ranks);
        let width = own[0].dim(1)?;
        let mut parts: Lists = vec![Vec::new(); ranks];
        for tensor in own {
            numbers(tensor, |values| {
                for (rank, part) in parts.iter_mut().enumerate() {
                    let rows = common(&tokens, &reads(rank), tokens.start);
                    part.extend_from_slice(&values[rows.start * width..rows.end * width]);
                }
            })?;
        }
        let read = reads(self.index());
        let of = |rank: usize| common(&self.tokens.of(rank), &read, 0).len() * width;
        let lists = self.exchange(FORWARD, parts, (0..ranks).map(|rank| T * of(rank)).collect())?;
        let mut all = [(); T].map(|()| Vec::with_capacity(read.len() * width));
        for list in lists {
            let length = list.len() / T;
            for (i, values) in all.iter_mut().enumerate() {
                values.extend_from_slice(&list[i * length..(i + 1) * length]);
            }
        }
        matrices(all, (read.len(), width), &Kind::of(own[0]))
    }

    /// The gradients of the own rows: those of all ranks that read them, added in the order of the ranks.
    fn sums<const T: usize>(&self, read: [Tensor; T], reads: impl Fn(usize) -> Range<usize>) -> Result<[Tensor; T]> {
        let (own, ranks) = (self.own(), self.config.ranks);
        let width = read[0].dim(1)?;
        let (tokens, kind) = (reads(self.index()), Kind::of(&read[0]));
        let mut parts: Lists = vec![Vec::new(); ranks];
        for tensor in read {
            numbers(&tensor, |values| {
                for (rank, part) in parts.iter_mut().enumerate() {
                    let rows = common(&self.tokens.of(rank), &tokens, tokens.start);
                    part.extend_from_slice(&values[rows.start * width..rows.end * width]);
                }
            })?;
        }
        let rows = |rank: usize| common(&own, &reads(rank), own.start);
        let lengths = (0..ranks).map(|rank| T * rows(rank).len() * width).collect();
        let lists = self.exchange(BACKWARD, parts, lengths)?;
        let mut all = [(); T].map(|()| vec![0f32; own.len() * width]);
        for (rank, list) in lists.into_iter().enumerate() {
            let (rows, length) = (rows(rank), list.len() / T);
            for (i, sum) in all.iter_mut().enumerate() {
                let more = &list[i * length..(i + 1) * length];
                let sum = &mut sum[rows.start * width..rows.end * width];
                sum.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
            }
        }
        matrices(all, (own.len(), width), &kind)
    }
}

/// Type and device of a tensor whose numbers travel as f32 of the host.
struct Kind(DType, Device);

impl Kind {
    fn of(tensor: &Tensor) -> Self {
        Self(tensor.dtype(), tensor.device().clone())
    }
}

/// Runs `f` on the numbers of a tensor.
fn numbers(tensor: &Tensor, f: impl FnOnce(&[f32])) -> Result<()> {
    if tensor.device().is_cpu() && tensor.dtype() == DType::F32 {
        return update::with_slice(&tensor.contiguous()?, f);
    }
    f(&update::to_f32_vec(&tensor.contiguous()?)?);
    Ok(())
}

/// The inverse of `numbers`.
fn matrix(values: Vec<f32>, shape: (usize, usize), Kind(dtype, device): &Kind) -> Result<Tensor> {
    if device.is_cpu() && *dtype == DType::F32 {
        return Ok(Tensor::from_vec(values, shape, device)?);
    }
    let tensor = update::zeros(shape, *dtype, device)?;
    update::set(&tensor, &values)?;
    Ok(tensor)
}

fn matrices<const T: usize>(all: [Vec<f32>; T], shape: (usize, usize), kind: &Kind) -> Result<[Tensor; T]> {
    let all = all.map(|values| matrix(values, shape, kind));
    let all = all.into_iter().collect::<Result<Vec<_>>>()?;
    all.try_into()
        .map_err(|_| Error::internal("a tensor that ranks share is missing"))
}

/// Keys of the exchanges.
const FORWARD: u64 = 0x5e9_0000;
const BACKWARD: u64 = FORWARD + 2;

/// The meaning of the columns of a tensor.
#[derive(Clone, Copy)]
enum ColumnsOf {
    /// E columns for each query head.
    Queries,
    /// E columns for each key head.
    Keys,
    /// One column for each query head.
    Sums,
}

impl ColumnsOf {
    /// All heads, and the columns of each.
    fn sizes(self, spec: &Heads) -> (usize, usize) {
        match self {
            ColumnsOf::Queries => (spec.heads, spec.head_dim),
            ColumnsOf::Keys => (spec.kv_heads, spec.head_dim),
            ColumnsOf::Sums => (spec.heads, 1),
        }
    }

    fn heads(self, share: &HeadShare) -> &[usize] {
        match self {
            ColumnsOf::Queries | ColumnsOf::Sums => &share.queries,
            ColumnsOf::Keys => &share.keys,
        }
    }
}

/// The intersection of two ranges, counted from `start`.
fn common(a: &Range<usize>, b: &Range<usize>, start: usize) -> Range<usize> {
    let (first, end) = (a.start.max(b.start), a.end.min(b.end));
    if first < end { first - start..end - start } else { 0..0 }
}

#[cfg(test)]
mod tests;
