//! Input and output types of the decoder, and one pass of new tokens through the network.

use super::cache::{CachedSequence, DecodeStep, StepTables};
use super::graphs::{GraphWork, Graphs};
use super::sampler::Sampler;
use super::schedule::{FinishedRequests, OnToken, RequestSchedule};
use crate::base::{Error, Result, progress};
use crate::model::{Context, Network};
use crate::ops::paged::KvDtype;
use crate::ops::{linear, update};
use crate::quant::Weight;
use crate::source::Group;
use candle_core::Tensor;

/// How answers are generated: their length, the sampling, the limits of the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateSettings {
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
    /// 0: greedy.
    pub temperature: f32,
    /// Samples only from the k most likely tokens.
    pub top_k: Option<usize>,
    /// Samples only from the most likely tokens whose probabilities reach p.
    pub top_p: Option<f32>,
    /// Seed of the sampling: equal seeds give equal answers.
    pub seed: u64,
    /// A row ends at any of these ids.
    pub stop_ids: Vec<u32>,
    /// Rows and memory of a batch.
    pub limits: GenerateLimits,
}

/// The limits of a batch. They do not change answers, except for the storage type of the KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateLimits {
    /// Largest number of requests in flight.
    pub rows: usize,
    /// Bytes of the KV cache; the largest possible need of a request is reserved when it joins.
    pub cache_bytes: u64,
    /// Prompt tokens per prefill batch.
    pub prefill_tokens: usize,
    /// The storage type of the KV cache; default: f32, on a GPU the type of the activations.
    pub kv_cache: Option<KvDtype>,
    /// Common prefixes of prompts are computed once.
    pub share_prefixes: bool,
    /// Log-probabilities too do not depend on the other rows of the batch, bit for bit (see `step`): this makes
    /// small batches slower.
    pub same_bits: bool,
    /// On a GPU, the layers of a decoding step become a CUDA graph after this many steps of the same shape, if nothing in them depends
    /// on the host; `None`: never. A capture takes as long as several steps (docs/benchmarks-gpu.md), and each row that ends
    /// changes the shape. While a generation with graphs runs, no other thread may use the device.
    pub graphs_after: Option<usize>,
    /// A signal ends the generation with an error. Several ranks that generate the same answers do not stop there: they would not
    /// all stop at the same token.
    pub may_stop: bool,
}

impl Default for GenerateLimits {
    fn default() -> Self {
        Self {
            rows: 64,
            cache_bytes: u64::MAX,
            prefill_tokens: 1024,
            kv_cache: None,
            share_prefixes: true,
            same_bits: false,
            graphs_after: Some(16),
            may_stop: true,
        }
    }
}

impl Default for GenerateSettings {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            temperature: 0.0,
            top_k: None,
            top_p: None,
            seed: 0,
            stop_ids: Vec::new(),
            limits: GenerateLimits::default(),
        }
    }
}

impl GenerateSettings {
    pub(super) fn sampler(&self) -> Sampler {
        Sampler {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
        }
    }
}

/// A prompt to continue.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// `[T]`: the token ids before the answer.
    pub prompt: Vec<u32>,
    /// Key of its random numbers: its tokens depend only on (weights, prompt, seed, number), not on the batch.
    /// Requests with the same prompt need different numbers, else they get the same answer.
    pub number: u64,
}

/// The continuation of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// New ids; if `finished`, the last one is the stop id.
    pub ids: Vec<u32>,
    /// Natural log-probability of each id in the distribution from which it was sampled: after temperature, top-k
    /// and top-p, renormalized. Greedy answers: that of the model itself (temperature 1, all tokens).
    pub log_probs: Vec<f32>,
    /// The same over all tokens, also those that top-k and top-p leave out: to compare with other weights.
    pub full_log_probs: Vec<f32>,
    /// True if the answer ends with a stop id; false if it was cut at `max_new_tokens` or at the model's last position.
    pub finished: bool,
}

/// Statistics of decoding.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GenerateStats {
    /// Prompt tokens that were computed.
    pub prefill_tokens: u64,
    /// Seconds of the passes over prompts, with the choice of each first token.
    pub prefill_seconds: f64,
    /// Tokens after the first of each answer.
    pub decode_tokens: u64,
    /// Seconds of these steps.
    pub decode_seconds: f64,
    /// Prompt tokens that were reused from the cache, summed over requests.
    pub shared_tokens: u64,
    /// Peak of the reserved bytes of the KV cache.
    pub cache_bytes: u64,
    /// Steps of decoding that were launched as a CUDA graph.
    pub graph_steps: u64,
}

/// The network that decodes, optionally with a quantized head.
#[derive(Clone, Copy)]
pub struct SampledModel<'a> {
    /// The network, with its adapters.
    pub network: &'a Network,
    /// A quantized copy of the output projection.
    pub head: Option<&'a Weight>,
    /// Its products with fewer rows than this may take another path than those with more rows.
    pub(super) many_rows: usize,
}

impl<'a> From<&'a Network> for SampledModel<'a> {
    fn from(network: &'a Network) -> Self {
        Self {
            network,
            head: None,
            many_rows: linear::MANY_ROWS,
        }
    }
}

/// Decodes prompts of different lengths together. A row ends at a stop id, after `max_new_tokens`, or at the model's
/// last position. `on_token(row, id)` is called for every token as it is sampled, except stop ids. Returns the new ids
/// of each row, without the stop id.
///
/// # Errors
/// An empty prompt, one longer than the context length of the model, an id beyond the embedding; logits that are not finite; any
/// error of `on_token`; a signal that requests a stop (`GenerateLimits::may_stop`); a KV cache too small for one request.
///
/// ```no_run
/// use ft_core::generate::{GenerateSettings, generate};
/// # use ft_core::hf;
/// # use ft_ops::Dtype;
///
/// # fn main() -> ft_base::Result<()> {
/// # let device = candle_core::Device::Cpu;
/// let opened = hf::open("model".as_ref(), Dtype::Bf16, &device)?;
/// let prompts = [opened.tokenizer.encode("Once upon a time", true)?];
/// let settings = GenerateSettings {
///     max_new_tokens: 64,
///     temperature: 0.7,
///     top_p: Some(0.9),
///     stop_ids: opened.tokenizer.stop_ids().to_vec(),
///     ..GenerateSettings::default()
/// };
/// // The callback gets each token as it is sampled.
/// let answers = generate(&opened.model.network, &prompts, &settings, &mut |_row, id| {
///     print!("{}", opened.tokenizer.decode(&[id], true)?);
///     Ok(())
/// })?;
/// assert!(answers[0].len() <= 64);
/// # Ok(())
/// # }
/// ```
pub fn generate<'a>(
    model: impl Into<SampledModel<'a>>,
    prompts: &[Vec<u32>],
    settings: &GenerateSettings,
    on_token: &mut OnToken,
) -> Result<Vec<Vec<u32>>> {
    let numbered = prompts.iter().zip(0..);
    let requests: Vec<Request> = numbered
        .map(|(prompt, number)| Request {
            prompt: prompt.clone(),
            number,
        })
        .collect();
    let (answers, _) = answer(model, &requests, settings, on_token)?;
    let without_stop = |mut answer: Answer| {
        if answer.finished {
            answer.ids.pop();
        }
        answer.ids
    };
    Ok(answers.into_iter().map(without_stop).collect())
}

/// Generates answers for reinforcement learning: with the stop id, which is trained too, and the log-probability of
/// each id.
///
/// # Errors
/// As `generate`.
pub fn rollout<'a>(
    model: impl Into<SampledModel<'a>>,
    requests: &[Request],
    settings: &GenerateSettings,
) -> Result<Vec<Answer>> {
    Ok(answer(model, requests, settings, &mut |_, _| Ok(()))?.0)
}

/// As `rollout`; also calls `on_token` for every token as it is sampled (except stop ids), and returns statistics.
///
/// # Errors
/// As `generate`.
pub fn answer<'a>(
    model: impl Into<SampledModel<'a>>,
    requests: &[Request],
    settings: &GenerateSettings,
    on_token: &mut OnToken,
) -> Result<(Vec<Answer>, GenerateStats)> {
    let model = model.into();
    check(model.network, requests, settings)?;
    // Progress in answers is more useful than in tokens, unless there is only one answer.
    let phase = match requests.len() {
        1 => progress::phase("generating", settings.max_new_tokens, "tokens"),
        n => progress::phase("generating", n, "answers"),
    };
    let finished = RequestSchedule::new(model, requests, settings)?
        .shown(&phase)
        .run(on_token)?;
    Ok((finished.answers, finished.stats))
}

/// One growing text, as in a chat: its KV cache is reused.
#[derive(Default)]
pub struct Session {
    ids: Vec<u32>,
    cache: Option<CachedSequence>,
}

impl Session {
    /// As `answer`, for one request. After an error the next call starts with an empty cache.
    ///
    /// # Errors
    /// As for `generate`.
    pub fn answer<'a>(
        &mut self,
        model: impl Into<SampledModel<'a>>,
        request: &Request,
        settings: &GenerateSettings,
        on_token: &mut OnToken,
    ) -> Result<(Answer, GenerateStats)> {
        let (model, requests) = (model.into(), std::slice::from_ref(request));
        check(model.network, requests, settings)?;
        let known = self.ids.iter().zip(&request.prompt).take_while(|(a, b)| a == b).count();
        // The last token is computed again, because its logits are needed.
        let known = known.min(request.prompt.len() - 1);
        let mut cache = self.cache.take().filter(|cache| known > 0 && cache.can_truncate(known));
        if let Some(cache) = &mut cache {
            cache.truncate(known);
        }
        let going_on = cache.is_some();
        let schedule = RequestSchedule::new(model, requests, settings)?.going_on(cache);
        let FinishedRequests {
            mut answers,
            mut stats,
            kept: cache,
        } = schedule.run(on_token)?;
        let answer = answers.pop().unwrap_or_default();
        if going_on {
            stats.shared_tokens += known as u64;
        }
        self.ids = request.prompt.iter().chain(&answer.ids).copied().collect();
        self.ids.truncate(cache.as_ref().map_or(0, CachedSequence::len));
        self.cache = cache;
        Ok((answer, stats))
    }
}

fn check(network: &Network, requests: &[Request], settings: &GenerateSettings) -> Result<()> {
    if !settings.temperature.is_finite() {
        return Err(Error::argument("the temperature is not finite").found(settings.temperature));
    }
    let spec = &network.spec;
    let most = spec.generated_positions();
    for (row, Request { prompt, .. }) in requests.iter().enumerate() {
        let place = format!("prompt {}", row + 1);
        if prompt.is_empty() {
            return Err(Error::argument("the prompt has no tokens")
                .at(place)
                .hint("give it some text to continue"));
        }
        if prompt.len() > most {
            return Err(
                Error::argument("the prompt is longer than the context length of the model")
                    .at(place)
                    .found(format!("{} tokens", prompt.len()))
                    .expected(format!("at most {most}")),
            );
        }
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= spec.vocab) {
            return Err(
                Error::argument("the prompt contains a token id for which the model has no embedding")
                    .at(place)
                    .found(format!("id {id}"))
                    .expected(format!("ids below {}", spec.vocab))
                    .hint("use the tokenizer that belongs to the model"),
            );
        }
    }
    Ok(())
}

/// New tokens of a sequence.
pub(super) struct NewTokens<'a> {
    pub sequence: CachedSequence,
    pub tokens: &'a [u32],
    /// True if the logits after the last token are requested.
    pub logits: bool,
}

/// The kind of the new tokens of a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum PassKind {
    /// Tokens of prompts: attention in blocks. The kind of a token decides, never the number of tokens: it does not depend on
    /// how prompts are cut into passes.
    Prompt,
    /// One token of each answer: attention reads the pages in place.
    Answer,
}

/// Runs new tokens through the network. Returns logits `[wanted, V]` of the parts that request them, before the cap of the
/// model; `None` if no part does. On the CPU the values of a row do not depend on the other rows as long as the products of all
/// steps take the same kernels: always from `many_rows` rows on, which padding rows ensure with `same_bits`.
pub(super) fn step(
    model: &SampledModel,
    parts: &mut [NewTokens],
    pass: PassKind,
    same_bits: bool,
    mut graphs: Option<&mut Graphs>,
) -> Result<Option<Tensor>> {
    let (network, many) = (model.network, model.many_rows);
    let (mut ids, mut positions, mut documents) = (Vec::new(), Vec::new(), vec![0]);
    for part in parts.iter() {
        let start = part.sequence.len();
        ids.extend_from_slice(part.tokens);
        positions.extend((start..start + part.tokens.len()).map(|p| p as u32));
        documents.push(ids.len());
    }
    let ends = parts.iter().zip(&documents[1..]);
    let wanted: Vec<usize> = ends.filter(|(part, _)| part.logits).map(|(_, end)| end - 1).collect();
    let mut padding = None;
    if same_bits
        && ids.len() < many
        && let Some(part) = parts.first()
    {
        padding = Some(part.sequence.empty(many));
        positions.extend(0..(many - ids.len()) as u32);
        ids.resize(many, 0);
        documents.push(many);
    }
    let sequences = parts.iter_mut().map(|p| &mut p.sequence).chain(padding.as_mut());
    let tables = match &mut graphs {
        Some(graphs) => StepTables::Staying(graphs.take_tables().map(Box::new)),
        None => StepTables::New,
    };
    let mut cache = DecodeStep::new(sequences.collect(), &documents, pass, &network.device, tables)?;
    let ctx = network.context(&positions, &documents, None)?;
    let x = network.embed(&ids, &ctx)?;
    if let Some(graphs) = graphs {
        let work: &GraphWork = &|x, ctx, cache| {
            let x = layers(network, x.clone(), ctx, cache)?;
            last_logits(model, &x, &wanted, ctx, same_bits)
        };
        let logits = graphs.run(&x, wanted.len(), &ctx, &mut cache, work)?;
        graphs.keep(cache.finish());
        return Ok(Some(logits));
    }
    let x = layers(network, x, &ctx, &mut cache)?;
    cache.finish();
    if wanted.is_empty() {
        return Ok(None);
    }
    last_logits(model, &x, &wanted, &ctx, same_bits).map(Some)
}

/// The output of the last layer, from the embedded tokens `x`.
fn layers(network: &Network, mut x: Tensor, ctx: &Context, cache: &mut DecodeStep) -> Result<Tensor> {
    for layer in 0..network.layers() {
        network.source.prefetch(Group::Layer((layer + 1) % network.layers()));
        x = network.block(layer)?.forward_cached(&x, ctx, cache)?;
    }
    Ok(x)
}

/// Logits `[wanted, V]` of some rows of the output of the last layer.
fn last_logits(model: &SampledModel, x: &Tensor, wanted: &[usize], ctx: &Context, same_bits: bool) -> Result<Tensor> {
    let network = model.network;
    let mut last: Vec<Tensor> = wanted
        .iter()
        .map(|&at| x.narrow(0, at, 1))
        .collect::<candle_core::Result<_>>()?;
    if same_bits && last.len() < model.many_rows {
        let (rows, width) = (model.many_rows - last.len(), network.spec.row());
        last.push(update::zeros((rows, width), x.dtype(), x.device())?);
    }
    let last = if wanted.len() == x.dims()[0] {
        x.clone()
    } else {
        Tensor::cat(&last, 0)?
    };
    let h = network.normalize(&last, ctx)?;
    let logits = match model.head {
        Some(head) => head.forward(&h, None)?,
        None => network.head()?.logits(&h)?,
    };
    Ok(logits.narrow(0, 0, wanted.len())?)
}

/// The logits of `step` on the host, after the cap of the model.
pub(super) fn on_host(logits: Option<&Tensor>, cap: Option<f32>) -> Result<Vec<f32>> {
    let mut logits = logits.map_or(Ok(Vec::new()), update::to_f32_vec)?;
    if let Some(cap) = cap {
        logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    }
    Ok(logits)
}
