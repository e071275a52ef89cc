//! Samples a token from each row of logits on a GPU, so that the logits stay there.

use candle_core::Tensor;
use ft_base::{Error, Result};

/// A sampled token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledToken {
    /// The token id.
    pub id: u32,
    /// Natural log of its probability in the distribution from which it was sampled; greedy: that of the model itself.
    pub log_prob: f32,
    /// The same over all tokens, also those that top-k and top-p leave out.
    pub full_log_prob: f32,
}

/// How a token is sampled.
#[derive(Debug, Clone, Copy)]
pub struct SamplingRule<'a> {
    /// Logits x become `cap · tanh(x / cap)` first.
    pub cap: Option<f32>,
    /// Divides the logits.
    pub temperature: f32,
    /// For each row a number in [0, 1): the first token whose cumulative probability exceeds it is taken. `None`: the most likely
    /// token; ties: the lowest id.
    pub uniform: Option<&'a [f64]>,
}

/// Samples a token from each row of `logits` `[R, V]`, f32, bf16 or f16; `None` for a row with a logit that is NaN or +infinity,
/// or whose logits are all -infinity.
///
/// # Errors
/// Logits that are not on a GPU; another number of random numbers; a temperature that is not finite.
pub fn draw(logits: &Tensor, rule: &SamplingRule) -> Result<Vec<Option<SampledToken>>> {
    let rows = logits.dims2()?.0;
    if rule.uniform.is_some_and(|numbers| numbers.len() != rows) {
        return Err(Error::shape("sampling needs a random number for each row").expected(rows));
    }
    if !rule.temperature.is_finite() {
        return Err(Error::argument("the temperature is not finite").found(rule.temperature));
    }
    on_gpu!(logits, super::cuda::sample::draw(logits, rule));
    Err(Error::unsupported("sampling here needs logits on a GPU"))
}
