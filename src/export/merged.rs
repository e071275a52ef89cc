//! One weight with its adapter folded in.

use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::model::Adapters;
use crate::ops::update;
use crate::source::ParamInfo;

/// W + s·B·A `[elements]` in f32 for a parameter that carries an adapter, else W in f32.
///
/// Errors: the tensor is missing or has another shape than the parameter or the adapter.
pub fn merged(weights: &Weights, param: &ParamInfo, adapters: &Adapters) -> Result<Vec<f32>> {
    weights.require(&param.name, &param.shape)?;
    let mut values = weights.read_f32(&param.name)?;
    let Some(lora) = param.name.strip_suffix(".weight").and_then(|m| adapters.get(m)) else {
        return Ok(values);
    };
    let delta = lora.delta()?; // [O, I]
    if delta.dims() != param.shape {
        return Err(Error::new("adapter has another shape than its weight")
            .at(&param.name)
            .found(format!("{:?}", delta.dims()))
            .expected(format!("{:?}", param.shape)));
    }
    for (w, d) in values.iter_mut().zip(update::to_f32_vec(&delta)?) {
        *w += d;
    }
    Ok(values)
}
