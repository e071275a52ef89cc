//! All weights on the device for the whole run.

use super::{Group, GroupWeights, LayerSource, LowerHalves, Numbers, NumbersSink, ParamInfo};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::{master, update};
use crate::quant::{self, Format, Storage, Weight};
use crate::recipe::Dtype;
use candle_core::{DType, Device, Tensor};
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
            let values = draw(p, index, 0..p.elements(), (seed, std, norm));
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

    fn here(&self, name: &str) -> Result<Tensor> {
        self.held(name).ok_or_else(|| no_such(name))
    }
}

/// Numbers `range` of parameter `p`, the `index`-th of the model from 1 on, of random weights drawn from a seed with a
/// standard deviation, and the value of norm weights.
pub(super) fn draw(
    p: &ParamInfo,
    index: u64,
    range: std::ops::Range<usize>,
    (seed, std, norm): (u64, f32, f32),
) -> Vec<f32> {
    let rng = Rng::new(seed, Stream::Init, &[index]);
    match (p.is_vector(), p.name.ends_with(".bias")) {
        (_, true) => vec![0.0; range.len()],
        (true, false) => vec![norm; range.len()],
        (false, false) => range.into_par_iter().map(|i| std * rng.normal(i as u64)).collect(),
    }
}

pub(super) fn no_such(name: &str) -> Error {
    Error::new("the model has no such parameter").at(name)
}

/// The numbers of a tensor.
pub(super) fn send(tensor: &Tensor, sink: &mut NumbersSink) -> Result<()> {
    match tensor.dtype() {
        DType::BF16 => update::with_bf16(tensor, |v| sink(Numbers::Bf16(v, None)))?,
        _ => update::with_slice(tensor, |v| sink(Numbers::F32(v)))?,
    }
}

/// One parameter from the files, in its storage. Errors: as reading; codes of what is not a matrix.
pub fn read(weights: &Weights, p: &ParamInfo, storage: Storage, device: &Device) -> Result<Weight> {
    let shape = p.shape.as_slice();
    match storage {
        Storage::Dense(Dtype::F32) => Ok(Tensor::from_vec(weights.read_f32(&p.name)?, shape, device)?.into()),
        Storage::Dense(Dtype::Bf16) => Ok(Tensor::from_vec(weights.read_bf16(&p.name)?, shape, device)?.into()),
        Storage::Coded(format, decoded) => code(&weights.read_f32(&p.name)?, p, format, decoded, device),
    }
}

fn code(values: &[f32], p: &ParamInfo, format: Format, decoded: Dtype, device: &Device) -> Result<Weight> {
    let &[rows, columns] = p.shape.as_slice() else {
        return Err(Error::new("only a matrix can be stored as codes")
            .at(&*p.name)
            .found(format!("shape {:?}, {format}", p.shape)));
    };
    if !device.is_cpu() {
        return Err(Error::new("weights stored as codes are not built yet for a GPU")
            .at("memory.frozen_weights")
            .hint("set `memory.frozen_weights = \"auto\"`, or `model.device = \"cpu\"`"));
    }
    let coded = quant::encode(values, (rows, columns), format, decoded);
    Ok(coded.map_err(|e| e.or_at(&*p.name))?.into())
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

    fn held(&self, name: &str) -> Option<Tensor> {
        let group = self.params.iter().find(|p| &*p.name == name)?.group;
        Some(self.groups.get(&group)?.get(name).ok()?.1)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        Ok((self.here(name)?, ids.to_vec()))
    }

    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        send(&self.here(name)?, sink)
    }

    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn LowerHalves) -> Result<()> {
        let tensor = self.here(name)?;
        saved.require(name, &[tensor.elem_count()])?;
        let values = saved.read_f32(name)?;
        match tensor.dtype() {
            DType::BF16 => {
                let mut halves = vec![0i16; values.len()];
                update::store_bf16(&tensor, |weight| {
                    for ((w, l), x) in weight.iter_mut().zip(&mut halves).zip(&values) {
                        let (high, low) = master::split(*x);
                        (*w, *l) = (high, low as i16);
                    }
                })?;
                low.put_low(name, Tensor::from_vec(halves, values.len(), tensor.device())?);
                Ok(())
            }
            _ => update::with_slice_mut(&tensor, |weight| weight.copy_from_slice(&values)),
        }
    }
}
