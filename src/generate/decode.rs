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

/// A row that is still being continued.
struct Live {
    /// Index in `prompts`.
    row: usize,
    /// Tokens in the cache.
    len: usize,
    /// The token to feed next.
    last: u32,
}

/// Decodes a batch of prompts of different lengths together; finished rows leave the batch. A row ends at a
/// stop id, after `max_new_tokens`, or at the model's last position. `on_token(row, id)` sees every token
/// as it is chosen. Returns the new ids of each row, without the stop token.
///
/// Errors: an empty prompt, one longer than the model's positions, an id beyond the embedding; logits that
/// are not finite; whatever `on_token` returns; a signal that asks to stop.
pub fn generate(
    network: &Network,
    prompts: &[Vec<u32>],
    settings: &Settings,
    on_token: &mut dyn FnMut(usize, u32) -> Result<()>,
) -> Result<Vec<Vec<u32>>> {
    let spec = &network.spec;
    check(network, prompts)?;
    let mut answers = vec![Vec::new(); prompts.len()];
    if prompts.is_empty() || settings.max_new_tokens == 0 {
        return Ok(answers);
    }
    let sampler = Sampler {
        temperature: settings.temperature,
        top_k: settings.top_k,
        top_p: settings.top_p,
        seed: settings.seed,
    };
    let mut cache = Cache::new(network.layers(), prompts.len(), spec.kv_width(), &network.device)?;
    let rows = prompts.iter().enumerate();
    let mut live: Vec<Live> = rows
        .map(|(row, prompt)| Live {
            row,
            len: prompt.len(),
            last: 0,
        })
        .collect();
    let parts: Vec<(&[u32], usize)> = prompts.iter().map(|p| (&p[..], 0)).collect();
    let mut logits = step(network, &mut cache, &parts)?;
    loop {
        let chosen = choose(&logits, spec.vocab, &sampler, &live)?;
        let mut stays = vec![false; live.len()];
        for ((live, id), stays) in live.iter_mut().zip(chosen).zip(&mut stays) {
            if settings.stop_ids.contains(&id) {
                continue;
            }
            answers[live.row].push(id);
            on_token(live.row, id)?;
            live.last = id;
            *stays = answers[live.row].len() < settings.max_new_tokens && live.len < spec.max_positions;
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

fn check(network: &Network, prompts: &[Vec<u32>]) -> Result<()> {
    let spec = &network.spec;
    for (row, prompt) in prompts.iter().enumerate() {
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

fn choose(logits: &[f32], vocab: usize, sampler: &Sampler, live: &[Live]) -> Result<Vec<u32>> {
    let rows = logits.chunks_exact(vocab).zip(live);
    rows.map(|(logits, l)| sampler.next(logits, l.row, l.len)).collect()
}
