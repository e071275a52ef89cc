//! TEMP
use super::tuning::Tuning;
use crate::base::Result;
use crate::engine::Gradients;
use crate::model::*;
use crate::plan::Plan;
use crate::recipe::Recipe;
pub fn forecast(
    recipe: &Recipe,
    _s: &Spec,
    _a: &Adapters,
    t: &Tuning,
    _st: &crate::data::order::BatchStream,
) -> Result<(Plan, Gradients)> {
    let all = matches!(t, Tuning::Static(_)) && recipe.tune.method == crate::recipe::Method::Full;
    Ok((
        Plan { peak_bytes: 0 },
        Gradients::choose(
            recipe.train.gradient_accumulation_steps,
            recipe.train.max_grad_norm,
            all,
            true,
        ),
    ))
}
