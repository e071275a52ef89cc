//! Continuous batching: requests wait until there is space, are prefilled in batches of bounded size, are decoded
//! together, and leave one by one. The answer to a request does not depend on the scheduling.

use super::cache::{CacheLayout, CachedSequence, TokenRun};
use super::decode::{
    Answer, GenerateSettings, GenerateStats, NewTokens, PassKind, Request, SampledModel, on_host, step,
};
use super::graphs::Graphs;
use super::prefix::PrefixTree;
use super::sampler::Sampler;
use crate::base::progress::Phase;
use crate::base::units::{bytes, count};
use crate::base::{Error, Result, signal};
use crate::ops::sample::SampledToken;
use candle_core::Tensor;
use rayon::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// The state of a shared prefix (a node of the tree).
enum PrefixState {
    /// Not in memory: no request in flight needs it yet, or all that needed it are finished.
    Out,
    /// Its memory is reserved; its parent is not computed yet.
    Planned,
    Reading(CachedSequence),
    /// Its runs and those of its ancestors.
    Read(Vec<Arc<TokenRun>>),
}

/// A request in flight.
struct RunningRequest {
    request: usize,
    /// None before prefill and during a step.
    sequence: Option<CachedSequence>,
    /// The next input token; None during prefill.
    last: Option<u32>,
    /// Bytes reserved for its own tokens.
    bytes: u64,
}

enum TokensOf {
    Node(usize),
    /// Index in `rows`.
    Row(usize),
}

pub(crate) struct RequestSchedule<'a> {
    model: SampledModel<'a>,
    requests: &'a [Request],
    settings: &'a GenerateSettings,
    sampler: Sampler,
    layout: CacheLayout,
    graphs: Option<Graphs>,
    tree: PrefixTree,
    nodes: Vec<PrefixState>,
    /// For each node, the number of requests that still need it.
    users: Vec<usize>,
    waiting: VecDeque<usize>,
    rows: Vec<RunningRequest>,
    /// Reserved bytes.
    used: u64,
    answers: Vec<Answer>,
    stats: GenerateStats,
    /// The KV cache of a text with which the (only) request may begin; it is returned at the end.
    pub kept: Option<CachedSequence>,
    keep: bool,
    /// Progress display.
    phase: Option<&'a Phase>,
}

/// The results of a schedule.
pub(crate) struct FinishedRequests {
    pub answers: Vec<Answer>,
    pub stats: GenerateStats,
    /// The KV cache of the text, of a schedule that goes on with one.
    pub kept: Option<CachedSequence>,
}

/// Callback for every token as it is sampled: index of the request, id.
pub(crate) type OnToken<'a> = dyn FnMut(usize, u32) -> Result<()> + 'a;

impl<'a> RequestSchedule<'a> {
    pub(crate) fn new(
        model: SampledModel<'a>,
        requests: &'a [Request],
        settings: &'a GenerateSettings,
    ) -> Result<Self> {
        let limits = &settings.limits;
        let prompts: Vec<&[u32]> = requests.iter().map(|r| &r.prompt[..]).collect();
        let tree = if limits.share_prefixes {
            PrefixTree::new(&prompts)
        } else {
            PrefixTree::apart(prompts.len())
        };
        let layout = if limits.same_bits {
            CacheLayout::expanded
        } else {
            CacheLayout::new
        };
        Ok(Self {
            model,
            requests,
            settings,
            sampler: settings.sampler(),
            graphs: limits.graphs_after.and_then(|after| Graphs::of(&model, after)),
            layout: layout(
                &model.network.spec,
                limits.kv_cache,
                &model.network.device,
                model.network.dtype()?,
            ),
            nodes: tree.nodes.iter().map(|_| PrefixState::Out).collect(),
            users: tree.nodes.iter().map(|n| n.users).collect(),
            waiting: tree.order.iter().copied().collect(),
            rows: Vec::new(),
            used: 0,
            answers: vec![Answer::default(); requests.len()],
            stats: GenerateStats::default(),
            kept: None,
            keep: false,
            phase: None,
            tree,
        })
    }

    /// Continues the first request from `kept`, which holds a prefix of its tokens; the KV cache is returned at the
    /// end.
    pub(crate) fn going_on(mut self, kept: Option<CachedSequence>) -> Self {
        (self.kept, self.keep) = (kept, true);
        self
    }

    pub(crate) fn shown(mut self, phase: &'a Phase) -> Self {
        self.phase = Some(phase);
        self
    }

    fn show(&self) {
        let Some(phase) = self.phase else { return };
        let tokens = self.stats.prefill_tokens + self.stats.decode_tokens;
        match self.requests.len() {
            1 => phase.set(self.stats.decode_tokens),
            n => {
                phase.set((n - self.waiting.len() - self.rows.len()) as u64);
                phase.note(format!("{} tokens", count(tokens)));
            }
        }
    }

    pub(crate) fn run(self, on_token: &mut OnToken) -> Result<FinishedRequests> {
        let network = self.model.network;
        network.with_fixed_adapters(|| self.run_all(on_token))
    }

    fn run_all(mut self, on_token: &mut OnToken) -> Result<FinishedRequests> {
        if self.settings.max_new_tokens == 0 {
            self.waiting.clear();
        }
        loop {
            self.admit()?;
            if self.rows.is_empty() {
                return Ok(FinishedRequests {
                    answers: self.answers,
                    stats: self.stats,
                    kept: self.kept,
                });
            }
            while self.read(on_token)? {
                self.show();
            }
            self.decode(on_token)?;
            self.show();
        }
    }

    /// Admits requests while there is space.
    fn admit(&mut self) -> Result<()> {
        let limits = &self.settings.limits;
        while self.rows.len() < limits.rows.max(1)
            && let Some(&request) = self.waiting.front()
        {
            let last = self.tree.of_request[request];
            let shared = last.map_or(0, |n| self.tree.nodes[n].end);
            let room = self.room(request);
            let own = self.layout.bytes(room) + self.layout.step_bytes(shared + room);
            let missing: Vec<usize> = self.tree.path(last).filter(|&n| self.is_out(n)).collect();
            let need = own + missing.iter().map(|&n| self.node_bytes(n)).sum::<u64>();
            if need > limits.cache_bytes.saturating_sub(self.used) {
                if self.rows.is_empty() {
                    return Err(Error::argument("the KV cache is too small for one request")
                        .found(format!("{} for {} tokens", bytes(self.used + need), shared + room))
                        .expected(format!("at most {}", bytes(limits.cache_bytes)))
                        .hint("allow fewer new tokens, more bytes, or store the cache as int8"));
                }
                break;
            }
            self.waiting.pop_front();
            self.used += need;
            self.stats.cache_bytes = self.stats.cache_bytes.max(self.used);
            missing.into_iter().for_each(|n| self.nodes[n] = PrefixState::Planned);
            self.stats.shared_tokens += shared as u64;
            self.rows.push(RunningRequest {
                request,
                sequence: self.kept.take(),
                last: None,
                bytes: own,
            });
        }
        Ok(())
    }

    /// Returns the largest number of own tokens of a request: the part of its prompt that is not shared, and its
    /// answer.
    fn room(&self, request: usize) -> usize {
        let shared = self.tree.of_request[request].map_or(0, |n| self.tree.nodes[n].end);
        let whole = self.requests[request]
            .prompt
            .len()
            .saturating_add(self.settings.max_new_tokens);
        whole.min(self.model.network.spec.generated_positions()) - shared
    }

    fn is_out(&self, node: usize) -> bool {
        matches!(self.nodes[node], PrefixState::Out)
    }

    fn node_bytes(&self, node: usize) -> u64 {
        let node = &self.tree.nodes[node];
        self.layout.bytes(node.end - node.start)
    }

    /// Returns a sequence that continues `parent`, if that node is computed.
    fn after(&self, parent: Option<usize>, room: usize) -> Option<CachedSequence> {
        match parent {
            None => Some(CachedSequence::new(&self.layout, Vec::new(), 0, room)),
            Some(n) => match &self.nodes[n] {
                PrefixState::Read(runs) => Some(CachedSequence::new(
                    &self.layout,
                    runs.clone(),
                    self.tree.nodes[n].end,
                    room,
                )),
                _ => None,
            },
        }
    }

    /// Computes one prefill batch. Returns false if no token is left to prefill.
    fn read(&mut self, on_token: &mut OnToken) -> Result<bool> {
        let started = Instant::now();
        let mut left = self.settings.limits.prefill_tokens.max(1);
        let (mut parts, mut who): (Vec<NewTokens<'a>>, Vec<TokensOf>) = (Vec::new(), Vec::new());
        for n in 0..self.nodes.len() {
            let node = &self.tree.nodes[n];
            if let PrefixState::Planned = self.nodes[n]
                && let Some(sequence) = self.after(node.parent, node.end - node.start)
            {
                self.nodes[n] = PrefixState::Reading(sequence);
            }
            if left > 0 && matches!(self.nodes[n], PrefixState::Reading(_)) {
                let PrefixState::Reading(sequence) = std::mem::replace(&mut self.nodes[n], PrefixState::Planned) else {
                    continue;
                };
                let end = node.end.min(sequence.len() + left);
                let tokens = &self.requests[node.request].prompt[sequence.len()..end];
                left -= tokens.len();
                parts.push(NewTokens {
                    sequence,
                    tokens,
                    logits: false,
                });
                who.push(TokensOf::Node(n));
            }
        }
        for r in 0..self.rows.len() {
            let request = self.rows[r].request;
            if self.rows[r].last.is_some() || left == 0 {
                continue;
            }
            let prompt = &self.requests[request].prompt;
            let sequence = match self.rows[r].sequence.take() {
                Some(sequence) => Some(sequence),
                None => self.after(self.tree.of_request[request], self.room(request)),
            };
            let Some(sequence) = sequence else { continue };
            let tokens = &prompt[sequence.len()..prompt.len().min(sequence.len() + left)];
            left -= tokens.len();
            parts.push(NewTokens {
                logits: sequence.len() + tokens.len() == prompt.len(),
                sequence,
                tokens,
            });
            who.push(TokensOf::Row(r));
        }
        if parts.is_empty() {
            return Ok(false);
        }
        let logits = step(
            &self.model,
            &mut parts,
            PassKind::Prompt,
            self.settings.limits.same_bits,
            None,
        )?;
        self.stats.prefill_tokens += parts.iter().map(|p| p.tokens.len() as u64).sum::<u64>();
        let mut ready = Vec::new();
        for (part, who) in parts.into_iter().zip(who) {
            match who {
                TokensOf::Node(n) => {
                    let done = part.sequence.len() == self.tree.nodes[n].end;
                    self.nodes[n] = if done {
                        PrefixState::Read(part.sequence.freeze())
                    } else {
                        PrefixState::Reading(part.sequence)
                    };
                }
                TokensOf::Row(r) => {
                    self.rows[r].sequence = Some(part.sequence);
                    if part.logits {
                        ready.push(r);
                    }
                }
            }
        }
        self.choose(&ready, logits.as_ref(), on_token)?;
        self.stats.prefill_seconds += started.elapsed().as_secs_f64();
        Ok(true)
    }

    /// Decodes one more token for every row.
    fn decode(&mut self, on_token: &mut OnToken) -> Result<()> {
        let started = Instant::now();
        let mut taken = Vec::new();
        for row in &mut self.rows {
            if let (Some(sequence), Some(last)) = (row.sequence.take(), row.last) {
                taken.push((sequence, [last]));
            }
        }
        if taken.is_empty() {
            return Ok(());
        }
        let tokens: Vec<[u32; 1]> = taken.iter().map(|t| t.1).collect();
        let mut parts: Vec<NewTokens> = taken
            .into_iter()
            .zip(&tokens)
            .map(|((sequence, _), token)| NewTokens {
                sequence,
                tokens: token,
                logits: true,
            })
            .collect();
        let same_bits = self.settings.limits.same_bits;
        let logits = step(
            &self.model,
            &mut parts,
            PassKind::Answer,
            same_bits,
            self.graphs.as_mut(),
        )?;
        self.stats.decode_tokens += parts.len() as u64;
        self.stats.graph_steps = self.graphs.as_ref().map_or(0, Graphs::steps);
        for (row, part) in self.rows.iter_mut().zip(parts) {
            row.sequence = Some(part.sequence);
        }
        let all: Vec<usize> = (0..self.rows.len()).collect();
        self.choose(&all, logits.as_ref(), on_token)?;
        self.stats.decode_seconds += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Samples the next token of the rows `ready` from their logits `[ready, V]`; finished rows leave.
    fn choose(&mut self, ready: &[usize], logits: Option<&Tensor>, on_token: &mut OnToken) -> Result<()> {
        let spec = &self.model.network.spec;
        let length = |&r: &usize| self.rows[r].sequence.as_ref().map_or(0, CachedSequence::len);
        let lengths: Vec<usize> = ready.iter().map(length).collect();
        let numbers = ready.iter().map(|&r| self.requests[self.rows[r].request].number);
        let places: Vec<(u64, usize)> = numbers.zip(lengths.iter().copied()).collect();
        let on_gpu = match logits {
            Some(logits) => self.sampler.next_on_gpu(logits, spec.logit_softcap, &places)?,
            None => None,
        };
        let drawn: Vec<SampledToken> = match on_gpu {
            Some(drawn) => drawn,
            None => {
                let rows = on_host(logits, spec.logit_softcap)?;
                let rows = rows.par_chunks_exact(spec.vocab).zip(&places);
                rows.map(|(logits, &(number, length))| self.sampler.next(logits, number, length))
                    .collect::<Result<_>>()?
            }
        };
        let mut leaving = vec![false; self.rows.len()];
        for ((&r, length), drawn) in ready.iter().zip(lengths).zip(drawn) {
            let request = self.rows[r].request;
            let answer = &mut self.answers[request];
            answer.ids.push(drawn.id);
            answer.log_probs.push(drawn.log_prob);
            answer.full_log_probs.push(drawn.full_log_prob);
            if self.settings.stop_ids.contains(&drawn.id) {
                answer.finished = true;
                leaving[r] = true;
                continue;
            }
            leaving[r] = answer.ids.len() >= self.settings.max_new_tokens || length >= spec.generated_positions();
            on_token(request, drawn.id)?;
            self.rows[r].last = Some(drawn.id);
        }
        if let Some(s) = signal::received().filter(|_| self.settings.limits.may_stop) {
            return Err(Error::signal(s, "stopped while generating"));
        }
        if leaving.contains(&true) {
            let rows = std::mem::take(&mut self.rows);
            for (row, leaves) in rows.into_iter().zip(leaving) {
                if leaves { self.leave(row) } else { self.rows.push(row) }
            }
        }
        Ok(())
    }

    fn leave(&mut self, row: RunningRequest) {
        self.used -= row.bytes;
        let path: Vec<usize> = self.tree.path(self.tree.of_request[row.request]).collect();
        for node in path {
            self.users[node] -= 1;
            if self.users[node] == 0 {
                self.nodes[node] = PrefixState::Out;
                self.used -= self.node_bytes(node);
            }
        }
        if self.keep {
            self.kept = row.sequence;
        }
    }
}
