//! Samples tokens from logits on a GPU, as `cuda/sample.cu`.

use super::memory::read;
use super::{Arg, FloatType, Gpu, Grid, address};
use crate::sample::{SampledToken, SamplingRule};
use candle_core::{DType, Tensor};
use ft_base::Result;

/// Same values as in `cuda/sample.cu`.
const TILE: usize = 1024;
const THREADS: u32 = 512;
const NONE: u32 = u32::MAX;

/// See `crate::sample::draw`; logits `[R, V]`.
pub(crate) fn draw(logits: &Tensor, rule: &SamplingRule) -> Result<Vec<Option<SampledToken>>> {
    const NAME: &str = "the logits";
    let (gpu, kind) = (Gpu::of(logits, NAME)?, FloatType::of(logits, NAME)?);
    let (rows, vocab) = logits.dims2()?;
    let (ids, log_probs) = (gpu.empty(rows, DType::U32)?, gpu.empty(rows, DType::F32)?);
    let uniform = rule.uniform.map(|numbers| {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
        gpu.upload_bytes(&bytes)
    });
    let uniform = uniform.transpose()?;
    let place = |t: &Tensor| address(t, "a token that is sampled").map(Arg::Address);
    let args = [
        Arg::Address(address(logits, NAME)?),
        Arg::size(vocab),
        Arg::F32(rule.cap.unwrap_or(0.0)),
        Arg::F32(rule.temperature),
        uniform.as_ref().map_or(Ok(Arg::Address(0)), place)?,
        place(&ids)?,
        place(&log_probs)?,
    ];
    let grid = Grid {
        blocks: (rows, 1),
        threads: (THREADS, 1),
        shared: (vocab.div_ceil(TILE) * size_of::<f64>()) as u32,
    };
    // SAFETY: the caller checked that there is a random number for each row.
    unsafe { gpu.launch("sample", ["sample_", kind.name()], grid, &args)? };
    let ids: Vec<u32> = read(&ids, "tokens", DType::U32)?;
    let log_probs: Vec<f32> = read(&log_probs, "log-probabilities", DType::F32)?;
    // All tokens can be sampled.
    let one = |(id, log_prob)| {
        (id != NONE).then_some(SampledToken {
            id,
            log_prob,
            full_log_prob: log_prob,
        })
    };
    Ok(ids.into_iter().zip(log_probs).map(one).collect())
}
