//! Samples a token from each row of logits on a GPU, so that the logits stay there.

use candle_core::Tensor;
use ft_base::{Error, Result};

/// A token, with the natural log of its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    /// The token id.
    pub id: u32,
    /// Natural log of its probability after the temperature.
    pub log_prob: f32,
}

/// How a token is sampled.
#[derive(Debug, Clone, Copy)]
pub struct Rule<'a> {
    /// Logits x become `cap · tanh(x / cap)` first.
    pub cap: Option<f32>,
    /// Divides the logits.
    pub temperature: f32,
    /// For each row a number in [0, 1): the first token is taken with which the sum of the probabilities exceeds it. `None`: the
    /// most likely token, the lowest of equals.
    pub uniform: Option<&'a [f64]>,
}

/// Samples a token from each row of `logits` `[R, V]`, f32, bf16 or f16; `None` for a row with logits that are NaN or infinite.
///
/// # Errors
/// Logits that are not on a GPU; another number of random numbers.
pub fn draw(logits: &Tensor, rule: &Rule) -> Result<Vec<Option<Drawn>>> {
    let rows = logits.dims2()?.0;
    if rule.uniform.is_some_and(|numbers| numbers.len() != rows) {
        return Err(Error::shape("sampling needs a random number for each row").expected(rows));
    }
    on_gpu!(logits, super::cuda::sample::draw(logits, rule));
    Err(Error::unsupported("logits on the CPU are sampled on the host"))
}
