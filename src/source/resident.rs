//! All weights on the device for the whole run.

use super::{Group, GroupWeights, LayerSource, ParamInfo, stored};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::quant::{self, Format, Storage, Weight};
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
    /// Reads every parameter from `weights`, one tensor at a time, onto `device`, into the storage that `storage`
    /// names for it; frozen weights are coded on the way.
    ///
    /// Errors: a parameter that is missing or has another shape; a parameter in the files that the model
    /// does not have (a wrong config must not train a part of the model in silence).
    pub fn load(
        params: Vec<ParamInfo>,
        weights: &Weights,
        storage: impl Fn(&ParamInfo) -> Storage,
        device: &Device,
    ) -> Result<Self> {
        check_names(&params, weights)?;
        Self::build(params, |p| read(weights, p, storage(p), device))
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
        Self::random_stored(params, seed, std, norm, |_| Storage::Dense(dtype), device)
    }

    /// As `random`, each parameter in the storage that `storage` names for it.
    pub fn random_stored(
        params: Vec<ParamInfo>,
        seed: u64,
        std: f32,
        norm: f32,
        storage: impl Fn(&ParamInfo) -> Storage,
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
            let storage = storage(p);
            if let Storage::Coded(format, decoded) = storage {
                return code(&values, p, format, decoded, device);
            }
            let tensor = Tensor::from_vec(values, p.shape.as_slice(), device)?;
            Ok(match storage {
                Storage::Dense(Dtype::Bf16) => tensor.to_dtype(candle_core::DType::BF16)?,
                _ => tensor,
            }
            .into())
        })
    }

    fn build(params: Vec<ParamInfo>, mut make: impl FnMut(&ParamInfo) -> Result<Weight>) -> Result<Self> {
        let mut groups: BTreeMap<Group, GroupWeights> = BTreeMap::new();
        let mut bytes = 0;
        for p in &params {
            let weight = make(p)?;
            bytes += weight.bytes();
            groups.entry(p.group).or_default().insert(p.name.clone(), weight);
        }
        let groups = groups.into_iter().map(|(g, w)| (g, Arc::new(w))).collect();
        Ok(Self { params, groups, bytes })
    }
}

/// One parameter from the files, in its storage; what the files hold as codes stays in them.
/// Errors: as reading; codes of what is not a matrix.
pub fn read(weights: &Weights, p: &ParamInfo, storage: Storage, device: &Device) -> Result<Weight> {
    let shape = p.shape.as_slice();
    if let Some(found) = stored::find(weights, &p.name)? {
        let (Storage::Dense(decoded) | Storage::Coded(_, decoded)) = storage;
        on_cpu(device)?;
        return Ok(stored::read(weights, p, found, decoded)?.into());
    }
    match storage {
        Storage::Dense(Dtype::F32) => Ok(Tensor::from_vec(weights.read_f32(&p.name)?, shape, device)?.into()),
        Storage::Dense(Dtype::Bf16) => Ok(Tensor::from_vec(weights.read_bf16(&p.name)?, shape, device)?.into()),
        // Half the memory on the way, the same codes.
        Storage::Coded(format, decoded) if weights.info(&p.name).is_some_and(|i| i.dtype == StoredDtype::Bf16) => {
            code(&weights.read_bf16(&p.name)?, p, format, decoded, device)
        }
        Storage::Coded(format, decoded) => code(&weights.read_f32(&p.name)?, p, format, decoded, device),
    }
}

fn on_cpu(device: &Device) -> Result<()> {
    match device.is_cpu() {
        true => Ok(()),
        false => Err(Error::new("weights stored as codes are not built yet for a GPU")
            .at("memory.frozen_weights")
            .hint("set `memory.frozen_weights = \"auto\"`, or `model.device = \"cpu\"`")),
    }
}

fn code<V: quant::Value>(
    values: &[V],
    p: &ParamInfo,
    format: Format,
    decoded: Dtype,
    device: &Device,
) -> Result<Weight> {
    let &[rows, columns] = p.shape.as_slice() else {
        return Err(Error::new("only a matrix can be stored as codes")
            .at(&*p.name)
            .found(format!("shape {:?}, {format}", p.shape)));
    };
    on_cpu(device)?;
    let coded = quant::encode(values, (rows, columns), format, decoded);
    Ok(coded.map_err(|e| e.or_at(&*p.name))?.into())
}

/// Errors: missing, misshapen and surplus tensors, all in one.
pub fn check_names(params: &[ParamInfo], weights: &Weights) -> Result<()> {
    let mut faults = Vec::new();
    let mut parts = std::collections::HashSet::new();
    for p in params {
        if let (Some((layout, format)), &[rows, columns]) = (stored::find(weights, &p.name)?, p.shape.as_slice()) {
            for part in stored::tensors(layout, format, &p.name, (rows, columns)) {
                if weights.info(&part.name).is_none() {
                    faults.push(format!("{}: missing", part.name));
                }
                parts.insert(part.name);
            }
            continue;
        }
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
        if !known.contains(name) && !parts.contains(name) && !harmless {
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
