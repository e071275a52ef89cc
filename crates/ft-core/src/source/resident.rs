//! A source that keeps all weights on the device for the whole run.

use super::requantize::{ExactParam, quantize, requantize};
use super::{
    Group, GroupWeights, InMemoryWeights, MasterLowBits, NumbersSink, ParamElements, ParamInfo, RequantizedWeight,
    StreamedMatrix, TrainableStore, WeightSource, lock, no_such, not_quantized, stored,
};
use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result, progress, units};
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::ops::Dtype;
use crate::ops::transfer::CopyTimes;
use crate::ops::{step, update};
use crate::quant::{self, Format, StorageDtype, Weight};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// Keeps all weights on the device.
pub struct ResidentWeights {
    device: Device,
    /// Updated when a weight changes between quantized and dense.
    weights: InMemoryWeights,
    /// Parameters that are quantized while they are frozen: format, and data type of the dequantized values.
    quantized: BTreeMap<Arc<str>, (Format, Dtype)>,
    original: Option<Original>,
    /// Exact values of parameters that were trained and are quantized again.
    trained: Mutex<BTreeMap<Arc<str>, ExactParam>>,
    /// Active parameters among the quantized ones.
    active: Mutex<BTreeSet<Arc<str>>>,
    /// Quantized data is held in tensors, ready for an upload.
    placed: bool,
}

/// Reads the original, not quantized values of a parameter in this type; on the CPU.
type Original = Box<dyn Fn(&ParamInfo, Dtype) -> Result<Tensor> + Send + Sync>;

impl ResidentWeights {
    /// Reads every parameter from `weights`, one tensor at a time, onto `device`, into the storage that `storage`
    /// returns for it; frozen weights are quantized while they are read.
    ///
    /// # Errors
    /// A missing parameter, or one of another shape; a tensor in the files that the model does not have (a wrong config
    /// must not silently train a part of the model).
    pub fn load(
        params: Vec<ParamInfo>,
        weights: &Weights,
        storage: impl Fn(&ParamInfo) -> StorageDtype,
        device: &Device,
    ) -> Result<Self> {
        check_names(&params, weights)?;
        Self::build(params, device, |p| read(weights, p, storage(p), device))
    }

    /// As `load`, with all weights in `dtype`: those of quantized files are dequantized, so that they can be trained.
    ///
    /// # Errors
    /// As `load`.
    pub fn load_dequantized(params: Vec<ParamInfo>, weights: &Weights, dtype: Dtype, device: &Device) -> Result<Self> {
        check_names(&params, weights)?;
        Self::build(params, device, |p| Ok(read_dense(weights, p, dtype, device)?.into()))
    }

    /// Random weights: normal with standard deviation `std`, biases 0, norm weights `norm`.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn random(
        params: Vec<ParamInfo>,
        seed: u64,
        std: f32,
        norm: f32,
        dtype: Dtype,
        device: &Device,
    ) -> Result<Self> {
        Self::random_stored(params, seed, std, norm, |_| StorageDtype::Dense(dtype), device)
    }

    /// As `random`, each parameter in the storage that `storage` returns for it.
    ///
    /// # Errors
    /// A shape that the format cannot store (`Shape`); not enough memory on the device.
    pub fn random_stored(
        params: Vec<ParamInfo>,
        seed: u64,
        std: f32,
        norm: f32,
        storage: impl Fn(&ParamInfo) -> StorageDtype,
        device: &Device,
    ) -> Result<Self> {
        let mut index = 0;
        Self::build(params, device, |p| {
            index += 1;
            let random = RandomWeights { seed, std, norm };
            match storage(p) {
                StorageDtype::Dense(dtype) => Ok(draw_tensor(p, index, dtype, random)?.to_device(device)?.into()),
                StorageDtype::Quantized(format, dequantized_dtype) => {
                    let values = draw(p, index, 0..p.elements(), random);
                    quantized_on_device(&values, p, format, dequantized_dtype, device)
                }
            }
        })
    }

    pub(super) fn build(
        params: Vec<ParamInfo>,
        device: &Device,
        mut make: impl FnMut(&ParamInfo) -> Result<Weight>,
    ) -> Result<Self> {
        let mut made: BTreeMap<Group, GroupWeights> = BTreeMap::new();
        let mut quantized = BTreeMap::new();
        let all: usize = params.iter().map(|p| p.elements()).sum();
        let phase = progress::phase("loading the model", all, "parameters");
        for p in &params {
            let weight = make(p)?;
            phase.add(p.elements() as u64);
            let form = match &weight {
                Weight::Quantized(c) => Some((c.format(), c.dequantized_dtype())),
                Weight::DeviceQuantized(c) => Some((c.format(), c.dequantized_dtype())),
                Weight::Dense(_) => None,
            };
            quantized.extend(form.map(|form| (p.name.clone(), form)));
            made.entry(p.group).or_default().insert(p.name.clone(), weight);
        }
        let weights = InMemoryWeights::new(params);
        made.into_iter()
            .for_each(|(group, of_group)| weights.set(group, of_group));
        Ok(Self {
            device: device.clone(),
            weights,
            quantized,
            original: None,
            trained: Mutex::default(),
            active: Mutex::default(),
            placed: false,
        })
    }

    /// Sets a reader for the original values of quantized weights, which training and exports need.
    pub fn with_originals(
        mut self,
        read: impl Fn(&ParamInfo, Dtype) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.original = Some(Box::new(read));
        self
    }

    /// Holds quantized data in tensors, ready for an upload; this source then does not compute with it.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn with_quantized_tensors(mut self) -> Result<Self> {
        self.placed = true;
        for p in self.params() {
            if let (_, codes @ Weight::Quantized(_)) = self.fetch(p.group)?.weight(&p.name)? {
                self.replace(p, codes)?;
            }
        }
        Ok(self)
    }

    /// Original values of a quantized weight that was never trained, on the CPU.
    fn original(&self, p: &ParamInfo) -> Result<Tensor> {
        match (&self.original, self.quantized.get(&p.name)) {
            (Some(read), Some((_, dtype))) => read(p, *dtype),
            _ => Err(Error::new("only the quantized form of this weight is available").at(&*p.name)),
        }
    }

    /// Replaces one weight; existing handles of the group keep the old one.
    fn replace(&self, p: &ParamInfo, weight: impl Into<Weight>) -> Result<()> {
        let weight = match weight.into() {
            Weight::Quantized(codes) if self.placed => codes.to_device(&self.device)?.into(),
            other => other,
        };
        let mut changed = GroupWeights::default();
        for (name, old) in self.fetch(p.group)?.iter() {
            changed.insert(name.clone(), old.clone());
        }
        changed.insert(p.name.clone(), weight);
        self.weights.set(p.group, changed);
        Ok(())
    }

    /// The parameters of `names` that are quantized while they are frozen.
    fn quantized_when_frozen<'a>(&'a self, names: impl Iterator<Item = &'a str>) -> Vec<&'a ParamInfo> {
        let quantized = names.filter(|name| self.quantized.contains_key(*name));
        quantized.filter_map(|name| self.param(name).ok()).collect()
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        self.in_memory(name).ok_or_else(|| no_such(name))
    }
}

/// The distribution of random weights.
#[derive(Debug, Clone, Copy)]
pub struct RandomWeights {
    /// Seed of the numbers.
    pub seed: u64,
    /// Standard deviation of the matrices; biases are 0.
    pub std: f32,
    /// Value of norm weights.
    pub norm: f32,
}

/// Draws elements `range` of parameter `p` of random weights. `index`: position of the parameter in the model, from 1 on.
pub fn draw(p: &ParamInfo, index: u64, range: std::ops::Range<usize>, random: RandomWeights) -> Vec<f32> {
    range.into_par_iter().map(element(p, index, random)).collect()
}

/// Returns the function of the elements of a parameter by position.
fn element(p: &ParamInfo, index: u64, random: RandomWeights) -> impl Fn(usize) -> f32 + Sync {
    let RandomWeights { seed, std, norm } = random;
    let rng = Rng::new(seed, Stream::Init, &[index]);
    let (vector, bias) = (p.is_vector(), p.name.ends_with(".bias"));
    // This norm multiplies by w in every family.
    let norm = if p.name.ends_with("linear_attn.norm.weight") {
        1.0
    } else {
        norm
    };
    move |i| match (vector, bias) {
        (_, true) => 0.0,
        (true, false) => norm,
        (false, false) => std * rng.normal(i as u64),
    }
}

/// As `draw`, for the whole parameter on the CPU; a bf16 or f16 parameter never exists as f32.
///
/// # Errors
/// None for these sizes.
pub fn draw_tensor(p: &ParamInfo, index: u64, dtype: Dtype, random: RandomWeights) -> Result<Tensor> {
    let (all, element) = (0..p.elements(), element(p, index, random));
    Ok(match dtype {
        Dtype::F32 => {
            let values: Vec<f32> = all.into_par_iter().map(element).collect();
            Tensor::from_vec(values, p.shape.as_slice(), &Device::Cpu)?
        }
        Dtype::Bf16 => {
            let values: Vec<bf16> = all.into_par_iter().map(|i| bf16::from_f32(element(i))).collect();
            Tensor::from_vec(values, p.shape.as_slice(), &Device::Cpu)?
        }
        Dtype::F16 => {
            let values: Vec<f16> = all.into_par_iter().map(|i| f16::from_f32(element(i))).collect();
            Tensor::from_vec(values, p.shape.as_slice(), &Device::Cpu)?
        }
    })
}

/// Passes all elements of a tensor to `sink`.
pub(super) fn send(tensor: &Tensor, sink: &mut NumbersSink) -> Result<()> {
    match tensor.dtype() {
        _ if !tensor.device().is_cpu() => sink(ParamElements::F32(&update::to_f32_vec(tensor)?)),
        DType::BF16 => update::with_bf16(tensor, |v| sink(ParamElements::Bf16(v, None)))?,
        DType::F16 => update::with_f16(tensor, |v| sink(ParamElements::F16(v, None)))?,
        _ => update::with_slice(tensor, |v| sink(ParamElements::F32(v)))?,
    }
}

/// Reads one parameter from the files into its storage; a weight that is quantized in the files stays quantized.
///
/// # Errors
/// As reading; quantized data of a parameter that is not a matrix.
pub fn read(weights: &Weights, p: &ParamInfo, storage: StorageDtype, device: &Device) -> Result<Weight> {
    if let Some((layout, format)) = stored::find(weights, &p.name)? {
        let (StorageDtype::Dense(dequantized_dtype) | StorageDtype::Quantized(_, dequantized_dtype)) = storage;
        return Weight::quantized_on(stored::read(weights, p, layout, format, dequantized_dtype)?, device);
    }
    match storage {
        StorageDtype::Dense(dtype) => Ok(read_dense(weights, p, dtype, device)?.into()),
        // Reading bf16 halves the temporary memory; the quantized data is the same.
        StorageDtype::Quantized(format, dequantized_dtype)
            if weights.info(&p.name).is_some_and(|i| i.dtype == StoredDtype::Bf16) =>
        {
            quantized_on_device(&bf16s(weights, p)?, p, format, dequantized_dtype, device)
        }
        StorageDtype::Quantized(format, dequantized_dtype) => {
            quantized_on_device(&f32s(weights, p)?, p, format, dequantized_dtype, device)
        }
    }
}

/// Reads one parameter from the files as a tensor; a quantized one is dequantized.
///
/// # Errors
/// As reading.
pub fn read_dense(weights: &Weights, p: &ParamInfo, dtype: Dtype, device: &Device) -> Result<Tensor> {
    let shape = p.shape.as_slice();
    if let Some(values) = stored::values(weights, p)? {
        let dequantized = Tensor::from_vec(values, shape, &Device::Cpu)?;
        return Ok(dequantized.to_dtype(dtype.into())?.to_device(device)?);
    }
    Ok(match dtype {
        Dtype::F32 => Tensor::from_vec(f32s(weights, p)?, shape, device)?,
        Dtype::Bf16 => Tensor::from_vec(bf16s(weights, p)?, shape, device)?,
        Dtype::F16 => Tensor::from_vec(f16s(weights, p)?, shape, device)?,
    })
}

fn f32s(weights: &Weights, p: &ParamInfo) -> Result<Vec<f32>> {
    check_finite(weights.read_f32(&p.name)?, |x| x.is_finite(), weights, p)
}

fn bf16s(weights: &Weights, p: &ParamInfo) -> Result<Vec<bf16>> {
    check_finite(weights.read_bf16(&p.name)?, |x| x.is_finite(), weights, p)
}

fn f16s(weights: &Weights, p: &ParamInfo) -> Result<Vec<f16>> {
    let values = weights.read_f16(&p.name)?;
    if values.iter().all(|x| x.is_finite()) {
        return Ok(values);
    }
    let values = f32s(weights, p)?;
    let most = values.iter().fold(0f32, |most, x| most.max(x.abs()));
    Err(
        Error::argument(format!("tensor `{}` has a number that f16 cannot hold", p.name))
            .found(most)
            .expected(format!("at most {}", f16::MAX))
            .hint("use `Dtype::Bf16` or `Dtype::F32`"),
    )
}

/// Errors: a value that is not finite, with the tensor's name; otherwise only the loss would become NaN later.
pub(super) fn check_finite<T>(
    values: Vec<T>,
    finite: impl Fn(&T) -> bool,
    weights: &Weights,
    p: &ParamInfo,
) -> Result<Vec<T>> {
    // No early exit in the inner loop, so that the compiler vectorizes it.
    let broken = |some: &[T]| some.iter().fold(false, |any, x| any | !finite(x));
    if values.chunks(4096).any(broken) {
        return Err(not_finite(weights, p));
    }
    Ok(values)
}

fn not_finite(weights: &Weights, p: &ParamInfo) -> Error {
    let error = Error::non_finite(format!("tensor `{}` has a number that is not finite", p.name));
    let file = weights.info(&p.name).map(|i| &weights.files()[i.file]);
    file.map_or(Error::non_finite(error.what()), |file| {
        Error::non_finite(error.what()).at_path(file)
    })
    .hint("the file is damaged, or it was saved by a diverged training run: download the model again")
}

fn quantized_on_device<V: quant::Quantizable>(
    values: &[V],
    p: &ParamInfo,
    format: Format,
    dequantized_dtype: Dtype,
    device: &Device,
) -> Result<Weight> {
    Weight::quantized_on(quantize(values, p, format, dequantized_dtype)?, device)
}

/// Checks that the files have exactly the parameters of the model.
///
/// # Errors
/// Missing, misshapen and surplus tensors, all in one error.
pub fn check_names(params: &[ParamInfo], weights: &Weights) -> Result<()> {
    let mut faults = Vec::new();
    let mut parts = std::collections::HashSet::new();
    for p in params {
        if let (Some((layout, format)), &[rows, columns]) = (stored::find(weights, &p.name)?, p.shape.as_slice()) {
            for part in stored::names(weights, layout, format, &p.name, (rows, columns)) {
                if weights.info(&part).is_none() {
                    faults.push(format!("{part}: missing"));
                }
                parts.insert(part);
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
        // Old Llama checkpoints contain the rope frequencies; tied ones may contain a copy of the embedding. The score
        // of a reward model is read separately; the program checks it before text generation.
        let harmless = name.ends_with("rotary_emb.inv_freq")
            || ["lm_head.weight", "score.weight"].contains(&name)
            || is_beside_quantized(weights, name);
        let harmless = harmless || is_of_unused_keys(&known, name);
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
    Err(Error::shape("config.json and the weights are inconsistent")
        .at(place)
        .found(format!(
            "{}:\n      {shown}{more}",
            units::counted(faults.len(), "difference")
        ))
        .hint("check that config.json belongs to these weights"))
}

/// True for the projections and norms of keys and values in a layer that reads those of another layer: the published files of
/// Gemma 3n and Gemma 4 have them, and no layer uses them. `known`: the names of all parameters.
pub fn is_of_unused_keys(known: &std::collections::HashSet<&str>, name: &str) -> bool {
    let Some((layer, rest)) = name.split_once(".self_attn.") else {
        return false;
    };
    let has = |part: &str| known.contains(format!("{layer}.{part}").as_str());
    let shared = !has("self_attn.k_proj.weight") && (has("layer_scalar") || has("altup.correct_output_scale"));
    let mut parts = ["k_proj.", "v_proj.", "k_norm.", "v_norm."].into_iter();
    shared && parts.any(|part| rest.starts_with(part))
}

/// True for tensors that tools write beside quantized weights, and that change nothing: scales of a quantized KV cache,
/// and zeros as the bias of a linear without one (old GPTQ files).
pub fn is_beside_quantized(weights: &Weights, name: &str) -> bool {
    let cache = name.ends_with(".k_scale") || name.ends_with(".v_scale");
    let zero = || {
        let base = name.strip_suffix(".bias");
        base.is_some_and(|base| weights.info(&format!("{base}.qweight")).is_some())
            && weights.read_f32(name).is_ok_and(|v| v.iter().all(|x| *x == 0.0))
    };
    weights.quantization().is_some() && (cache || zero())
}

impl WeightSource for ResidentWeights {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        self.weights.fetch(group)
    }

    fn stays_in_place(&self) -> bool {
        true
    }

    fn params(&self) -> &[ParamInfo] {
        self.weights.params()
    }

    fn resident_bytes(&self) -> u64 {
        self.weights.resident_bytes()
    }

    fn in_memory(&self, name: &str) -> Option<Tensor> {
        self.weights.in_memory(name)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        self.weights.rows(name, ids)
    }

    fn streamed(&self, _: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        None
    }
}

impl TrainableStore for ResidentWeights {
    fn master_in_optimizer(&self, name: &str) -> bool {
        !self.quantized.contains_key(name) || lock(&self.active).contains(name)
    }

    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()> {
        for p in self.quantized_when_frozen(names.iter().copied()) {
            if !lock(&self.active).insert(p.name.clone()) {
                continue;
            }
            let kept = lock(&self.trained).remove(&p.name);
            let weight = match kept {
                Some(exact) => {
                    if let Some(half) = exact.low {
                        low.put_low(&p.name, half);
                    }
                    exact.weight.to_device(&self.device)?
                }
                None => self.original(p)?.to_device(&self.device)?,
            };
            self.replace(p, weight)?;
        }
        Ok(())
    }

    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<RequantizedWeight>> {
        let leaving: Vec<Arc<str>> = lock(&self.active).iter().filter(|n| !keep(n)).cloned().collect();
        let mut requantized = Vec::new();
        for p in self.quantized_when_frozen(leaving.iter().map(|n| &**n)) {
            // Kept on the host, beside the quantized data.
            let low = low.take_low(&p.name).map(|low| low.to_device(&Device::Cpu));
            let exact = ExactParam {
                weight: self.tensor(&p.name)?.to_device(&Device::Cpu)?,
                low: low.transpose()?,
            };
            let (format, dtype) = self.quantized[&p.name];
            let (codes, error) = requantize(&exact.values()?, p, format, dtype)?;
            self.replace(p, Weight::quantized_on(codes, &self.device)?)?;
            lock(&self.trained).insert(p.name.clone(), exact);
            lock(&self.active).remove(&p.name);
            requantized.push(error);
        }
        Ok(requantized)
    }

    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        let p = self.param(name)?;
        if let Some(exact) = lock(&self.trained).get(name) {
            return exact.send(sink);
        }
        match self.in_memory(name) {
            Some(tensor) => send(&tensor, sink),
            None => send(&self.original(p)?, sink),
        }
    }

    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn MasterLowBits) -> Result<()> {
        let p = self.param(name)?;
        saved.require(name, &[p.elements()])?;
        let values = saved.read_f32(name)?;
        if let Some(&(format, dtype)) = self.quantized.get(name) {
            self.replace(p, quantized_on_device(&values, p, format, dtype, &self.device)?)?;
            let exact = ExactParam::new(values, &p.shape, dtype, &Device::Cpu)?;
            lock(&self.trained).insert(p.name.clone(), exact);
            return Ok(());
        }
        let tensor = self.tensor(name)?;
        match tensor.dtype() {
            DType::BF16 | DType::F16 => {
                let half = update::zeros(values.len(), DType::I16, tensor.device())?;
                step::split(&values, &tensor, &half)?;
                // Inactive parameters keep it on the host.
                low.put_low(name, half.to_device(&Device::Cpu)?);
                Ok(())
            }
            _ => update::set(&tensor, &values),
        }
    }

    fn requantize(&self, name: &str, values: &[f32]) -> Result<()> {
        let p = self.param(name)?;
        let &(format, dtype) = self.quantized.get(name).ok_or_else(|| not_quantized(name))?;
        self.replace(p, quantized_on_device(values, p, format, dtype, &self.device)?)
    }

    fn upload_times(&self) -> Result<Option<CopyTimes>> {
        Ok(None)
    }
}
