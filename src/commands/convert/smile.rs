//! Gives a mixture of experts with one router for all experts a router of two levels (SMILE, arXiv 2212.05191): first the groups
//! of experts for a token, then the experts inside them.
//!
//! The softmax over the experts of a group keeps the rows of the router. The score of a group was the sum of the scores of its
//! experts, whose logarithm is not linear in the input; the row of a group is the mean of the rows of its experts, which is its
//! first order. Distillation with the original model as the teacher reduces the difference.
//!
//! Letters: D hidden size, E experts, G groups.

use super::{ConvertReport, plans};
use crate::base::{Error, Result};
use crate::checkpoint;
use crate::commands::merge::{refuse_existing, refuse_quantized, refuse_strangers};
use crate::formats::config::Config;
use crate::formats::weights::Weights;
use crate::formats::writer::{self, Values};
use crate::hf::{self, OutputModel};
use crate::model::families;
use crate::report;
use crate::setup::locate;
use crate::train::verify;
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::path::Path;

#[derive(Debug, Clone, Copy)]
pub struct SmileRequest<'a> {
    pub model: &'a Path,
    pub out: &'a Path,
    /// G
    pub groups: usize,
    /// Groups of a token.
    pub chosen: usize,
}

/// Writes the model with routers of two levels to `out`.
///
/// Errors: another family; groups that do not divide the experts, or have too few of them; quantized weights; `out` is not
/// empty; not enough disk space. In these cases nothing is written.
pub fn convert(request: &SmileRequest) -> Result<ConvertReport> {
    refuse_existing(request.out)?;
    verify::check_result(request.model)?;
    let config = locate::model_config(request.model, Config::load)?;
    let flat = families::read(&config)?;
    if flat.model_type != "qwen3_moe" {
        return Err(
            Error::unsupported(format!("`{}` cannot get a router of two levels", flat.model_type))
                .at(config.path.display())
                .expected("qwen3_moe"),
        );
    }
    let mut raw = config.raw.clone();
    raw.insert("model_type".into(), json!("qwen3_moe_smile"));
    raw.insert("architectures".into(), json!(["Qwen3MoeSmileForCausalLM"]));
    raw.insert("router_groups".into(), json!(request.groups));
    raw.insert("router_groups_per_token".into(), json!(request.chosen));
    let after = families::read(&Config::from_map(raw.clone(), &config.path))?;
    let weights = Weights::open(request.model)?;
    refuse_quantized(&flat, &weights)?;
    refuse_strangers(&flat, &weights)?;
    let params = after.params();
    let routers: HashSet<String> = after.router_names().collect();
    for p in flat.params() {
        weights.require(&p.name, &p.shape)?;
    }
    let tensors = plans(&weights, &params, &HashMap::new())?;
    let directory = OutputModel {
        out: request.out,
        base_dir: request.model,
        config: &raw,
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: None,
    };
    checkpoint::check_space(request.out, directory.bytes()?)?;
    let hidden = flat.hidden;
    let out = directory.write(&mut |plan, sink| {
        if routers.contains(&plan.name) {
            return sink(Values::F32(&two_levels(
                weights.read_f32(&plan.name)?,
                hidden,
                request.groups,
            )));
        }
        sink(Values::Raw(&weights.read_bytes(&plan.name)?))
    })?;
    if let Some(note) = hf::config_note(&raw, request.model) {
        report::note(&note);
    }
    Ok(ConvertReport::new(out, &flat, &after, None))
}

/// Adds the rows of the groups to a router `[E, D]`: `[E+G, D]`.
fn two_levels(mut router: Vec<f32>, hidden: usize, groups: usize) -> Vec<f32> {
    let members = router.len() / hidden / groups;
    let of_group = |rows: &[f32]| -> Vec<f32> {
        let column = |d: usize| rows.iter().skip(d).step_by(hidden).sum::<f32>() / members as f32;
        (0..hidden).map(column).collect()
    };
    let means: Vec<f32> = router.chunks(members * hidden).flat_map(of_group).collect();
    router.extend(means);
    router
}
