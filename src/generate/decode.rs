//! The decoding loop.

use super::cache::Cache;
use super::sampler::Sampler;
use crate::base::{Error, Result, signal};
use crate::model::Network;
use crate::ops::update;
use crate::source::Group;
use candle_core::Tensor;

#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: f32,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub seed: u64,
    /// A row ends at any of these; the token itself is not part of the answer.
    pub stop_ids: Vec<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            temperature: 0.0,
            top_k: None,
            top_p: None,
            seed: 0,
            stop_ids: Vec::new(),
        }
    }
}

/// A text to continue.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Key of its random numbers: its tokens follow from (weights, prompt, seed, number) alone, whoever shares the
    /// batch. Requests with the same prompt need different numbers, else they get the same answer.
    pub number: u64,
}

/// What a request was continued with.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// New ids; the last is the stop id if it is `finished`.
    pub ids: Vec<u32>,
    /// Of each id its natural log-probability in the distribution it was drawn from: after temperature, top-k and
    /// top-p, summed to 1 over what they left. Greedy answers: that of the model itself (temperature 1, all tokens).
    pub log_probs: Vec<f32>,
    /// A stop id came. Else the answer was cut at `max_new_tokens` or at the model's last position.
    pub finished: bool,
}

/// A row that is still being continued.
struct Live {
    /// Index in `requests`.
    row: usize,
    /// Tokens in the cache.
    len: usize,
    /// The token to feed next.
    last: u32,
}

/// Decodes prompts of different lengths together; finished rows leave the batch. A row ends at a
/// stop id, after `max_new_tokens`, or at the model's last position. `on_token(row, id)` sees every token
/// as it is chosen, but no stop id. Returns the new ids of each row, without the stop token.
///
/// Errors: an empty prompt, one longer than the model's positions, an id beyond the embedding; logits that
/// are not finite; whatever `on_token` returns; a signal that asks to stop.
pub fn generate(
    network: &Network,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_token: &mut dyn FnMut(usize, u32) -> Result<()>,
) -> Result<Vec<Vec<u32>>> {
    let requests: Vec<Request> = prompts
        .iter()
        .enumerate()
        .map(|(row, prompt)| Request {
            prompt: prompt.clone(),
            number: row as u64,
        })
        .collect();
    let answers = run(network, &requests, settings, on_token)?;
    Ok(answers
        .into_iter()
        .map(|mut answer| {
            if answer.finished {
                answer.ids.pop();
            }
            answer.ids
        })
        .collect())
}

/// Answers for reinforcement learning: with the stop id, which is trained too, and the log-probability of each id.
///
/// Errors: as `generate`.
pub fn rollout(network: &Network, requests: &[Request], settings: &Settings) -> Result<Vec<Answer>> {
    run(network, requests, settings, &mut |_, _| Ok(()))
}

fn run(
    network: &Network,
    requests: &[Request],
    settings: &Settings,
    on_token: &mut dyn FnMut(usize, u32) -> Result<()>,
) -> Result<Vec<Answer>> {
    let spec = &network.spec;
    check(network, requests)?;
    let mut answers = vec![Answer::default(); requests.len()];
    if requests.is_empty() || settings.max_new_tokens == 0 {
        return Ok(answers);
    }
    let sampler = Sampler {
        temperature: settings.temperature,
        top_k: settings.top_k,
        top_p: settings.top_p,
        seed: settings.seed,
    };
    let mut cache = Cache::new(network.layers(), requests.len(), spec.kv_width(), &network.device)?;
    let rows = requests.iter().enumerate();
    let mut live: Vec<Live> = rows
        .map(|(row, request)| Live {
            row,
            len: request.prompt.len(),
            last: 0,
        })
        .collect();
    let parts: Vec<(&[u32], usize)> = requests.iter().map(|r| (&r.prompt[..], 0)).collect();
    let mut logits = step(network, &mut cache, &parts)?;
    loop {
        let mut stays = vec![false; live.len()];
        let rows = logits.chunks_exact(spec.vocab);
        for ((live, logits), stays) in live.iter_mut().zip(rows).zip(&mut stays) {
            let drawn = sampler.next(logits, requests[live.row].number, live.len)?;
            let answer = &mut answers[live.row];
            answer.ids.push(drawn.id);
            answer.log_probs.push(drawn.log_prob);
            if settings.stop_ids.contains(&drawn.id) {
                answer.finished = true;
                continue;
            }
            on_token(live.row, drawn.id)?;
            live.last = drawn.id;
            *stays = answer.ids.len() < settings.max_new_tokens && live.len < spec.max_positions;
        }
        if let Some(s) = signal::received() {
            return Err(Error::signal(s, "stopped while generating"));
        }
        if stays.contains(&false) {
            cache.retain(|i| stays[i]);
            let mut index = 0;
            live.retain(|_| {
                index += 1;
                stays[index - 1]
            });
        }
        if live.is_empty() {
            return Ok(answers);
        }
        let parts: Vec<(&[u32], usize)> = live.iter().map(|l| (std::slice::from_ref(&l.last), l.len)).collect();
        logits = step(network, &mut cache, &parts)?;
        live.iter_mut().for_each(|l| l.len += 1);
    }
}

fn check(network: &Network, requests: &[Request]) -> Result<()> {
    let spec = &network.spec;
    for (row, Request { prompt, .. }) in requests.iter().enumerate() {
        let place = format!("prompt {}", row + 1);
        if prompt.is_empty() {
            return Err(Error::new("the prompt has no tokens")
                .at(place)
                .hint("give it some text to continue"));
        }
        if prompt.len() > spec.max_positions {
            return Err(Error::new("the prompt is longer than the model's positions")
                .at(place)
                .found(format!("{} tokens", prompt.len()))
                .expected(format!("at most {}", spec.max_positions)));
        }
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= spec.vocab) {
            return Err(Error::new("the prompt holds an id that the model has no embedding for")
                .at(place)
                .found(format!("id {id}"))
                .expected(format!("ids below {}", spec.vocab))
                .hint("use the tokenizer that belongs to the model"));
        }
    }
    Ok(())
}

/// Runs the new tokens of every row, given with the position of the first; logits `[rows, V]` after each
/// row's last token.
pub(super) fn step(network: &Network, cache: &mut Cache, parts: &[(&[u32], usize)]) -> Result<Vec<f32>> {
    let (mut ids, mut positions, mut documents) = (Vec::new(), Vec::new(), vec![0]);
    for &(tokens, start) in parts {
        ids.extend_from_slice(tokens);
        positions.extend((start..start + tokens.len()).map(|p| p as u32));
        documents.push(ids.len());
    }
    cache.begin(&documents)?;
    let ctx = network.context(&positions, &documents, None)?;
    let mut x = network.embed(&ids)?;
    for layer in 0..network.layers() {
        network.source.prefetch(Group::Layer((layer + 1) % network.layers()));
        x = network.block(layer)?.forward_cached(&x, &ctx, cache)?;
    }
    let last = if ids.len() == parts.len() {
        x
    } else {
        let rows = documents[1..].iter().map(|end| x.narrow(0, end - 1, 1));
        Tensor::cat(&rows.collect::<candle_core::Result<Vec<_>>>()?, 0)?
    };
    let head = network.head()?;
    let logits = head.logits(&network.normalize(&last)?)?;
    let mut logits = update::to_f32_vec(&logits)?;
    if let Some(cap) = head.softcap {
        logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    }
    Ok(logits)
}
