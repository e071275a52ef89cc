//! LoftQ (Li et al. 2023, arXiv 2310.08659, algorithm 1). The LoRA pair starts with the best low-rank approximation of
//! the quantization error. With more than one iteration the rest, W minus the pair, is quantized again. Works with
//! every format: int8, int4 and nf4.
//!
//! The adapter belongs to the dequantized weights, not to the original ones: `finish` saves both.
//!
//! Letters: I input features, O output features, R rank.

use crate::base::{Error, Result};
use crate::model::Network;
use crate::model::linear::Linear;
use crate::peft::FrozenLinear;
use crate::peft::start::{self, InitPair, algebra};
use crate::quant::{self, Format};
use crate::recipe::{Dtype, LoraInit, LoraKeys};
use crate::source::{ParamElements, TrainableStore};
use crate::train::starts::{AdapterInitContext, InitProgress, InitTask, each, set, tasks};
use faer::{Mat, MatRef};

/// The result for one linear.
struct LoftqResult {
    pair: InitPair,
    /// New values to quantize, if they differ from the current quantized data.
    codes: Option<Vec<f32>>,
    /// ‖W - Q‖ / ‖W‖.
    error_before: f64,
    /// ‖W - Q - s·B·A‖ / ‖W‖.
    error_after: f64,
}

/// Errors: no weight is quantized, or the full-precision weights are not available.
pub(super) fn fill(s: &mut AdapterInitContext, network: &Network) -> Result<()> {
    let (iterations, dtype) = (s.recipe.tune.lora.loftq_iter, s.recipe.model.dtype);
    let progress = InitProgress::new(LoraInit::Loftq.name(), network);
    let (mut before, mut after, mut n) = (0.0, 0.0, 0usize);
    for layer in 0..network.linear_groups() {
        // A linear without quantization error keeps the default initialization.
        let quantized = |t: &InitTask| t.linear.weight.format().is_some_and(|f| f != Format::Bf16);
        let tasks: Vec<InitTask> = tasks(network, layer)?.into_iter().filter(quantized).collect();
        let mut originals = Vec::new();
        for task in &tasks {
            originals.push(original(s.store, &task.linear)?);
        }
        let jobs: Vec<(InitTask, Mat<f64>)> = tasks.into_iter().zip(originals).collect();
        let found = each(&jobs, |(t, _)| t, |(task, w)| one(task, w.as_ref(), iterations, dtype))?;
        for ((task, _), found) in jobs.iter().zip(&found) {
            if let Some(values) = &found.codes {
                s.store.requantize(&task.linear.name, values)?;
            }
            set(task.lora()?, &found.pair)?;
            before += found.error_before;
            after += found.error_after;
            n += 1;
        }
        progress.layer(layer + 1, s.note)?;
    }
    if n == 0 {
        return Err(Error::usage("LoftQ needs quantized weights, and this model has none")
            .at(LoraKeys::init_lora_weights)
            .hint("set `memory.frozen_weights` to `nf4`, `int4` or `int8`"));
    }
    (s.note)(&format!(
        "loftq: mean relative quantization error {:.3} %, with the adapters {:.3} %",
        100.0 * before / n as f64,
        100.0 * after / n as f64
    ));
    Ok(())
}

/// The full-precision values of a weight, `[O, I]`.
fn original(store: &dyn TrainableStore, linear: &Linear) -> Result<Mat<f64>> {
    let (outputs, inputs) = linear.dims();
    let mut values: Vec<f32> = Vec::with_capacity(outputs * inputs);
    store.read(&linear.name, &mut |numbers| {
        match numbers {
            ParamElements::F32(some) => values.extend_from_slice(some),
            ParamElements::Bf16(some, _) => values.extend(some.iter().map(|x| x.to_f32())),
            ParamElements::F16(some, _) => values.extend(some.iter().map(|x| x.to_f32())),
        }
        Ok(())
    })?;
    Ok(algebra::matrix(&values, outputs, inputs))
}

/// Q₁ = q(W); then (A, B) is the best rank-R approximation of W - Qₜ, and Qₜ₊₁ = q(W - s·B·A).
fn one(task: &InitTask, w: MatRef<'_, f64>, iterations: usize, dtype: Dtype) -> Result<LoftqResult> {
    let Some(format) = task.linear.weight.format() else {
        return Err(Error::new("LoftQ needs a quantized weight"));
    };
    let (lora, (rows, columns)) = (task.lora()?, task.linear.dims());
    let size = w.norm_l2().max(f64::MIN_POSITIVE);
    let mut q = algebra::matrix(&task.linear.rows(0, rows)?, rows, columns);
    let first = (w - &q).norm_l2() / size;
    let (mut target, mut pair) = (None, start::pissa((w - &q).as_ref(), lora.rank(), lora.scale, 0, 0, 0)?);
    for _ in 1..iterations {
        let rest = algebra::values((w - change(&pair, rows, columns, lora.scale)).as_ref());
        let codes = quant::quantize(&rest, (rows, columns), format, dtype)?;
        q = algebra::matrix(&codes.dequantize(), rows, columns);
        target = Some(rest);
        pair = start::pissa((w - &q).as_ref(), lora.rank(), lora.scale, 0, 0, 0)?;
    }
    let last = (w - &q - change(&pair, rows, columns, lora.scale)).norm_l2() / size;
    Ok(LoftqResult {
        pair,
        codes: target,
        error_before: first,
        error_after: last,
    })
}

/// s·B·A, `[O, I]`.
fn change(pair: &InitPair, outputs: usize, inputs: usize, scale: f32) -> Mat<f64> {
    let r = pair.a.len() / inputs.max(1);
    let b = algebra::matrix(&pair.b, outputs, r);
    let a = algebra::matrix(&pair.a, r, inputs);
    (b * a) * faer::Scale(f64::from(scale))
}
