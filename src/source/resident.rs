//! All weights on the device for the whole run.

use super::{Group, GroupWeights, LayerSource, ParamInfo};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::recipe::Dtype;
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

pub struct Resident {
    params: Vec<ParamInfo>,
    groups: BTreeMap<Group, Arc<GroupWeights>>,
    bytes: u64,
}

impl Resident {
    /// Reads every parameter from `weights`, one tensor at a time, into `dtype` on `device`.
    ///
    /// Errors: a parameter that is missing or has another shape; a parameter in the files that the model
    /// does not have (a wrong config must not train a part of the model in silence).
    pub fn load(params: Vec<ParamInfo>, weights: &Weights, dtype: Dtype, device: &Device) -> Result<Self> {
        check_names(&params, weights)?;
        Self::build(params, |p| match dtype {
            Dtype::F32 => Ok(Tensor::from_vec(
                weights.read_f32(&p.name)?,
                p.shape.as_slice(),
                device,
            )?),
            Dtype::Bf16 => Ok(Tensor::from_vec(
                weights.read_bf16(&p.name)?,
                p.shape.as_slice(),
                device,
            )?),
        })
    }

    /// Fresh weights: normal with standard deviation `std`, biases 0, norm weights `norm`.
    pub fn random(
        params: Vec<ParamInfo>,
        seed: u64,
        std: f32,
        norm: f32,
        dtype: Dtype,
        device: &Device,
    ) -> Result<Self> {
        let mut index = 0;
        Self::build(params, |p| {
            index += 1;
            let rng = Rng::new(seed, Stream::Init, &[index]);
            let n = p.elements();
            let values: Vec<f32> = match (p.is_vector(), p.name.ends_with(".bias")) {
                (_, true) => vec![0.0; n],
                (true, false) => vec![norm; n],
                (false, false) => (0..n as u64).into_par_iter().map(|i| std * rng.normal(i)).collect(),
            };
            let tensor = Tensor::from_vec(values, p.shape.as_slice(), device)?;
            Ok(match dtype {
                Dtype::F32 => tensor,
                Dtype::Bf16 => tensor.to_dtype(candle_core::DType::BF16)?,
            })
        })
    }

    fn build(params: Vec<ParamInfo>, mut make: impl FnMut(&ParamInfo) -> Result<Tensor>) -> Result<Self> {
        let mut groups: BTreeMap<Group, GroupWeights> = BTreeMap::new();
        let mut bytes = 0;
        for p in &params {
            let tensor = make(p)?;
            bytes += (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
            groups.entry(p.group).or_default().insert(p.name.clone(), tensor);
        }
        let groups = groups.into_iter().map(|(g, w)| (g, Arc::new(w))).collect();
        Ok(Self { params, groups, bytes })
    }
}

/// Errors: missing, misshapen and surplus tensors, all in one.
pub fn check_names(params: &[ParamInfo], weights: &Weights) -> Result<()> {
    let mut faults = Vec::new();
    for p in params {
        match weights.info(&p.name) {
            None => faults.push(format!("{}: missing", p.name)),
            Some(info) if info.shape != p.shape => {
                faults.push(format!("{}: found {:?}, expected {:?}", p.name, info.shape, p.shape));
            }
            Some(_) => {}
        }
    }
    let known: std::collections::HashSet<&str> = params.iter().map(|p| &*p.name).collect();
    for name in weights.names() {
        // Old Llama checkpoints carry the rope frequencies; tied ones may carry a copy of the embedding.
        let harmless = name.ends_with("rotary_emb.inv_freq") || name == "lm_head.weight";
        if !known.contains(name) && !harmless {
            faults.push(format!("{name}: not a weight of this model"));
        }
    }
    if faults.is_empty() {
        return Ok(());
    }
    let shown = faults.iter().take(8).cloned().collect::<Vec<_>>().join("\n      ");
    let more = if faults.len() > 8 {
        format!("\n      and {} more", faults.len() - 8)
    } else {
        String::new()
    };
    let place = weights
        .files()
        .first()
        .map(|f| f.display().to_string())
        .unwrap_or_default();
    Err(Error::new("config.json and the weights do not agree")
        .at(place)
        .found(format!("{} differences:\n      {shown}{more}", faults.len()))
        .hint("check that config.json belongs to these weights"))
}

impl LayerSource for Resident {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        self.groups
            .get(&group)
            .cloned()
            .ok_or_else(|| Error::new(format!("the model has no {group:?}")))
    }

    fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    fn resident_bytes(&self) -> u64 {
        self.bytes
    }
}
