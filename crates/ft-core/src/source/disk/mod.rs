//! Disk offload: reads the weights from the checkpoint's own files, one layer at a time.
//!
//! In memory at any time: the active parameters, the parameters of the head group that are small or needed whole
//! (`in_memory`), at most two layers without their routed experts (the current one and the next, read by another thread),
//! two experts, and two pieces of a streamed head. Rows of the embedding are read one by one. Parameters that were trained and are inactive now come from files
//! of the run (`store`).

mod loaders;
mod param_files;
mod pool;
mod store;
mod writer;
#[cfg(test)]
mod tests;

use super::experts::{ExpectedExperts, ExpertReads, LayerPart};
use super::policy::is_projection;
use super::requantize::{ExactParam, quantize, requantize};
use super::resident::{RandomWeights, check_names, draw, send};
use super::{
    Group, GroupWeights, MasterLowBits, NumbersSink, ParamInfo, RequantizedWeight, StoragePolicy, StreamedMatrix,
    TrainableStore, WeightSource, distinct, lock, no_such, not_quantized, stays_on_device, stored, tensor_bytes,
};
use crate::base::{Error, Result, files, threads};
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::formats::writer::{TensorPlan, Values, write_file};
use crate::ops::Dtype;
use crate::ops::cross_entropy::PIECE;
use crate::ops::transfer::CopyTimes;
use crate::quant::{Format, Weight};
use candle_core::{DType, Device, Tensor};
use loaders::{HeadRows, PartLoader};
use param_files::ParamFiles;
use pool::{DoubleBuffer, ReaderJob};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use store::STEP;
pub use writer::SourceWriter;

/// Options of a disk source.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// Type of the weights on the device.
    pub dtype: Dtype,
    /// Storage type of each weight while it is frozen.
    pub storage: StoragePolicy,
    /// The device of the computation.
    pub device: Device,
    /// Directory for trained parameters; it is emptied.
    pub trained: PathBuf,
    /// File for the quantized weights.
    pub codes: PathBuf,
    /// Name of the output projection (LM head).
    pub head: String,
    /// Number of its rows read at a time, a multiple of `PIECE`; `None`: it is in memory as a whole.
    pub head_rows: Option<usize>,
}

/// Writes the weights of `ResidentWeights::random` to a model file, a few elements at a time.
///
/// # Errors
/// The file cannot be written.
pub fn write_random(path: &Path, params: &[ParamInfo], seed: u64, std: f32, norm: f32, dtype: Dtype) -> Result<()> {
    let dtype = match dtype {
        Dtype::F32 => StoredDtype::F32,
        Dtype::Bf16 => StoredDtype::Bf16,
        Dtype::F16 => StoredDtype::F16,
    };
    let plan = |p: &ParamInfo| TensorPlan {
        name: p.name.to_string(),
        dtype,
        shape: p.shape.clone(),
    };
    let plans: Vec<TensorPlan> = params.iter().map(plan).collect();
    let mut next = params.iter().zip(1..);
    write_file(path, &plans, &[], |_, sink| {
        let Some((p, index)) = next.next() else { return Ok(()) };
        (0..p.elements()).step_by(STEP).try_for_each(|first| {
            let range = first..(first + STEP).min(p.elements());
            sink(Values::F32(&draw(p, index, range, RandomWeights { seed, std, norm })))
        })
    })?;
    files::forget(&files::open(path)?, 0, 0);
    Ok(())
}

/// State shared with the reader thread.
struct ReaderState {
    params: Vec<ParamInfo>,
    /// Indices into `params`.
    groups: BTreeMap<Group, Vec<usize>>,
    /// As `groups`, of what is read at a time.
    parts: BTreeMap<LayerPart, Vec<usize>>,
    expected: ExpectedExperts,
    files: ParamFiles,
    /// Parameters that are quantized while they are frozen.
    quantized: BTreeMap<Arc<str>, Format>,
    dtype: DType,
    device: Device,
    /// Parameters in memory: the active ones, and those that always are.
    in_memory: Mutex<BTreeMap<Arc<str>, Tensor>>,
}

/// Reads the weights from the model files layer by layer, with double buffering.
pub struct DiskWeights {
    shared: Arc<ReaderState>,
    layers: DoubleBuffer<PartLoader>,
    experts: DoubleBuffer<PartLoader>,
    pieces: DoubleBuffer<HeadRows>,
    /// Parameters that are always in memory, active or not.
    always_in_memory: Mutex<Vec<Arc<str>>>,
    /// Active parameters; all of them are in `ReaderState::in_memory`.
    active: Mutex<BTreeSet<Arc<str>>>,
    options: DiskOptions,
    jobs: Option<mpsc::Sender<ReaderJob>>,
    reader: Option<JoinHandle<()>>,
}

impl DiskWeights {
    /// Reads the parameters that are always in memory, and nothing else.
    ///
    /// # Errors
    /// As `ResidentWeights::load`; a number of head rows that is not a multiple of `PIECE`.
    pub fn open(params: Vec<ParamInfo>, weights: Weights, options: DiskOptions) -> Result<Self> {
        Self::open_written(params, weights, options, SourceWriter::default())
    }

    /// As `open`, with files that `writer` writes. If ranks share them, all ranks open the source, and call every method of
    /// `TrainableStore` that changes weights in the same order.
    ///
    /// # Errors
    /// As `open`; another rank has failed.
    pub fn open_written(
        params: Vec<ParamInfo>,
        weights: Weights,
        options: DiskOptions,
        writer: SourceWriter,
    ) -> Result<Self> {
        check_names(&params, &weights)?;
        if options
            .head_rows
            .is_some_and(|rows| rows == 0 || !rows.is_multiple_of(PIECE))
        {
            return Err(Error::usage("the chunk size of the output head is not supported")
                .at("disk::DiskOptions::head_rows")
                .expected(format!("a multiple of {PIECE}")));
        }
        let mut groups: BTreeMap<Group, Vec<usize>> = BTreeMap::new();
        for (i, p) in params.iter().enumerate() {
            groups.entry(p.group).or_default().push(i);
        }
        let streamed = options.head_rows.is_some();
        let always = params.iter().filter(|p| stays_on_device(p, &options.head, streamed));
        let always_in_memory: Vec<Arc<str>> = always.map(|p| p.name.clone()).collect();
        let mut quantized = options.storage.quantized().clone();
        let formats = params.iter().filter_map(|p| Some((p, *quantized.get(&p.name)?)));
        let mut to_code: Vec<(&ParamInfo, Format)> = formats.collect();
        // Weights that are quantized in the files stay as they are.
        let mut in_files = BTreeMap::new();
        for p in &params {
            if let Some((layout, format)) = stored::find(&weights, &p.name)? {
                if !is_projection(p) {
                    return Err(Error::unsupported(
                        "an embedding or a head that is quantized in the files is not read from disk",
                    )
                    .at(&*p.name)
                    .found(format)
                    .hint("hold the weights in memory: `Placement::Device`"));
                }
                in_files.insert(p.name.clone(), stored::CheckedParam::new(&weights, p, layout, format)?);
                quantized.insert(p.name.clone(), format);
            }
        }
        to_code.retain(|(p, _)| !in_files.contains_key(&p.name));
        let mut files = ParamFiles::new(weights, in_files, options.dtype, &options.trained, writer)?;
        if !to_code.is_empty() {
            files.quantize_others(&to_code, &options.codes)?;
        }
        let shared = Arc::new(ReaderState {
            parts: LayerPart::all(&params),
            expected: ExpectedExperts::default(),
            params,
            groups,
            files,
            quantized,
            dtype: options.dtype.into(),
            device: options.device.clone(),
            in_memory: Mutex::default(),
        });
        for name in &always_in_memory {
            let tensor = shared.load(shared.param(name)?)?;
            shared.in_memory().insert(name.clone(), tensor);
        }
        let (jobs, queue) = mpsc::channel::<ReaderJob>();
        let reader = std::thread::Builder::new()
            .name("reader".into())
            .spawn(move || threads::background(|| queue.into_iter().for_each(|job| job())))
            .map_err(|e| Error::new("cannot start the thread that reads weights from the disk").cause(e))?;
        Ok(Self {
            layers: DoubleBuffer::new(PartLoader(shared.clone())),
            experts: DoubleBuffer::new(PartLoader(shared.clone())),
            pieces: DoubleBuffer::new(HeadRows {
                shared: shared.clone(),
                name: options.head.as_str().into(),
                rows: options.head_rows.unwrap_or(0),
            }),
            shared,
            always_in_memory: Mutex::new(always_in_memory),
            active: Mutex::new(BTreeSet::new()),
            options,
            jobs: Some(jobs),
            reader: Some(reader),
        })
    }

    fn send(&self, job: ReaderJob) {
        if let Some(Err(mpsc::SendError(job))) = self.jobs.as_ref().map(|jobs| jobs.send(job)) {
            // The reader thread has ended: read on the calling thread.
            job();
        }
    }

    fn active(&self) -> MutexGuard<'_, BTreeSet<Arc<str>>> {
        lock(&self.active)
    }

    /// The weights of a part; those that are not in memory are read.
    fn part(&self, part: LayerPart) -> Result<Arc<GroupWeights>> {
        if let Some(weights) = self.shared.all_in_memory(part)? {
            return Ok(Arc::new(weights));
        }
        self.buffer(part).get(part)
    }

    /// Starts to read a part that is not in memory.
    fn prefetch_part(&self, part: LayerPart) {
        if matches!(self.shared.all_in_memory(part), Ok(None)) {
            self.buffer(part).prefetch(part, |job| self.send(job));
        }
    }

    fn buffer(&self, part: LayerPart) -> &DoubleBuffer<PartLoader> {
        match part {
            LayerPart::Dense(_) => &self.layers,
            LayerPart::Expert(..) => &self.experts,
        }
    }

    /// The weights have changed.
    fn forget(&self) {
        self.layers.forget();
        self.experts.forget();
        self.pieces.forget();
    }

    fn is_streamed(&self, name: &str) -> bool {
        self.options.head_rows.is_some() && self.options.head == name && self.in_memory(name).is_none()
    }
}

impl Drop for DiskWeights {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl ReaderState {
    fn in_memory(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Tensor>> {
        lock(&self.in_memory)
    }

    fn param(&self, name: &str) -> Result<&ParamInfo> {
        self.params
            .iter()
            .find(|p| &*p.name == name)
            .ok_or_else(|| no_such(name))
    }

    fn zeros(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::zeros(shape, self.dtype, &self.device)?)
    }

    /// Reads a parameter into newly allocated memory.
    fn load(&self, param: &ParamInfo) -> Result<Tensor> {
        let tensor = self.zeros(&param.shape)?;
        self.files.fill(&param.name, 0, &tensor)?;
        Ok(tensor)
    }

    /// Reads a parameter as it is stored.
    fn read(&self, p: &ParamInfo) -> Result<Weight> {
        match self.quantized.get(&p.name) {
            Some(format) => Ok(self.files.quantized(p, *format)?.into()),
            None => Ok(self.load(p)?.into()),
        }
    }

    fn part(&self, part: LayerPart) -> Result<impl Iterator<Item = &ParamInfo>> {
        let members = self.parts.get(&part);
        let members = members.ok_or_else(|| Error::new(format!("the model has no {part:?}")))?;
        Ok(members.iter().map(|&i| &self.params[i]))
    }

    /// The weights of a part, if none of them must be read.
    fn all_in_memory(&self, part: LayerPart) -> Result<Option<GroupWeights>> {
        let in_memory = self.in_memory();
        let mut weights = GroupWeights::default();
        for p in self.part(part)? {
            match in_memory.get(&p.name) {
                Some(tensor) => weights.insert(p.name.clone(), tensor.clone()),
                None => return Ok(None),
            }
        }
        Ok(Some(weights))
    }

    fn members(&self, group: Group) -> Result<impl Iterator<Item = &ParamInfo>> {
        let members = match self.groups.get(&group) {
            Some(members) => members.as_slice(),
            // A tied head after a norm without parameters has none of its own.
            None if group == Group::Head => &[],
            None => return Err(Error::new(format!("the model has no {group:?}"))),
        };
        Ok(members.iter().map(|&i| &self.params[i]))
    }
}

impl WeightSource for DiskWeights {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        if let Group::Layer(layer) = group
            && self.shared.members(group)?.all(|p| p.expert().is_none())
        {
            return self.fetch_dense(layer);
        }
        // The whole embedding, a head whose parameters are all in memory except a streamed matrix, or a layer with all its
        // experts: in new memory.
        let in_memory = self.shared.in_memory().clone();
        let mut weights = GroupWeights::default();
        for p in self.shared.members(group)? {
            if let Some(tensor) = in_memory.get(&p.name) {
                weights.insert(p.name.clone(), tensor.clone());
            } else if !self.is_streamed(&p.name) {
                weights.insert(p.name.clone(), self.shared.read(p)?);
            }
        }
        Ok(Arc::new(weights))
    }

    fn prefetch(&self, group: Group) {
        if let Group::Layer(layer) = group {
            self.prefetch_part(LayerPart::Dense(layer));
        }
    }

    fn fetch_dense(&self, layer: usize) -> Result<Arc<GroupWeights>> {
        self.part(LayerPart::Dense(layer))
    }

    fn fetch_expert(&self, layer: usize, expert: usize) -> Result<Arc<GroupWeights>> {
        let part = LayerPart::Expert(layer, expert);
        let weights = self.part(part)?;
        if let Some(next) = self.shared.expected.after(part) {
            self.prefetch_part(next);
        }
        Ok(weights)
    }

    fn streams_experts(&self) -> bool {
        true
    }

    fn expect_experts(&self, layer: usize, experts: &[usize]) {
        let all = self
            .shared
            .parts
            .range(LayerPart::Expert(layer, 0)..=LayerPart::Expert(layer, usize::MAX));
        let parts = experts.iter().map(|&e| LayerPart::Expert(layer, e));
        if let Some(first) = self.shared.expected.set(parts, all.count()) {
            self.prefetch_part(first);
        }
    }

    fn params(&self) -> &[ParamInfo] {
        &self.shared.params
    }

    fn resident_bytes(&self) -> u64 {
        let in_memory: u64 = self.shared.in_memory().values().map(tensor_bytes).sum();
        in_memory + self.layers.bytes() + self.experts.bytes() + self.pieces.bytes()
    }

    fn in_memory(&self, name: &str) -> Option<Tensor> {
        self.shared.in_memory().get(name).cloned()
    }

    fn hold(&self, name: &str) -> Result<Tensor> {
        let param = self.shared.param(name)?;
        let mut always = lock(&self.always_in_memory);
        if !always.contains(&param.name) {
            always.push(param.name.clone());
        }
        drop(always);
        if let Some(tensor) = self.in_memory(name) {
            return Ok(tensor);
        }
        let tensor = self.shared.load(param)?;
        self.shared.in_memory().insert(param.name.clone(), tensor.clone());
        self.pieces.forget();
        Ok(tensor)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        if let Some(whole) = self.in_memory(name) {
            return Ok((whole, ids.to_vec()));
        }
        let param = self.shared.param(name)?;
        let (all, width) = (param.shape[0], param.elements() / param.shape[0].max(1));
        let (rows, indices) = distinct(ids, all)?;
        let rows: Vec<usize> = rows.into_iter().map(|row| row as usize).collect();
        let table = self.shared.zeros(&[rows.len(), width])?;
        self.shared.files.fill_rows(name, width, &rows, &table)?;
        Ok((table, indices))
    }

    fn streamed(&self, name: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        let rows = self.options.head_rows.filter(|_| self.is_streamed(name))?;
        Some(Box::new(HeadPieces { disk: self, rows }))
    }
}

struct HeadPieces<'a> {
    disk: &'a DiskWeights,
    rows: usize,
}

impl StreamedMatrix for HeadPieces<'_> {
    fn piece_rows(&self) -> usize {
        self.rows
    }

    fn piece(&self, first: usize) -> Result<Arc<GroupWeights>> {
        let disk = self.disk;
        let piece = disk.pieces.get(first)?;
        // The next pass over the head, for this batch or the next one, begins with the first piece.
        let all = disk.param(&disk.options.head)?.shape[0];
        let next = if first + self.rows < all { first + self.rows } else { 0 };
        if next != first {
            disk.pieces.prefetch(next, |job| disk.send(job));
        }
        Ok(piece)
    }
}

impl TrainableStore for DiskWeights {
    fn master_in_optimizer(&self, name: &str) -> bool {
        self.active().contains(name)
    }

    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()> {
        // Adapters are not parameters of this source.
        let params = |name: &&str| self.shared.param(name).ok();
        for param in names.iter().filter_map(params) {
            if self.in_memory(&param.name).is_none() {
                let tensor = self.shared.load(param)?;
                self.shared.in_memory().insert(param.name.clone(), tensor);
            }
            if !self.active().insert(param.name.clone()) {
                continue;
            }
            if let Some(half) = self
                .shared
                .files
                .low(&param.name, param.elements(), &self.shared.device)?
            {
                low.put_low(&param.name, half);
            }
        }
        self.forget();
        Ok(())
    }

    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<RequantizedWeight>> {
        let leaving: Vec<Arc<str>> = self.active().iter().filter(|name| !keep(name)).cloned().collect();
        let mut requantized = Vec::new();
        for name in leaving {
            if let Some(weight) = self.in_memory(&name) {
                let exact = ExactParam {
                    weight,
                    low: low.take_low(&name),
                };
                let codes = match self.shared.quantized.get(&name) {
                    Some(format) => {
                        let param = self.shared.param(&name)?;
                        let (codes, error) = requantize(&exact.values()?, param, *format, self.options.dtype)?;
                        requantized.push(error);
                        Some(codes)
                    }
                    None => None,
                };
                self.shared.files.write(&name, &exact, codes.as_ref())?;
            }
            self.active().remove(&name);
            if !lock(&self.always_in_memory).contains(&name) {
                self.shared.in_memory().remove(&name);
            }
        }
        self.forget();
        Ok(requantized)
    }

    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        let param = self.shared.param(name)?;
        match self.in_memory(name).filter(|_| self.master_in_optimizer(name)) {
            Some(tensor) => send(&tensor, sink),
            None => self.shared.files.read(param, sink),
        }
    }

    fn restore(&self, name: &str, saved: &Weights, _: &mut dyn MasterLowBits) -> Result<()> {
        let param = self.shared.param(name)?;
        saved.require(name, &[param.elements()])?;
        let format = self.shared.quantized.get(name).copied();
        self.shared.files.restore(param, format, saved, &self.shared.device)?;
        if let Some(tensor) = self.in_memory(name) {
            self.shared.files.fill(name, 0, &tensor)?;
        }
        self.forget();
        Ok(())
    }

    fn requantize(&self, name: &str, values: &[f32]) -> Result<()> {
        let format = *self.shared.quantized.get(name).ok_or_else(|| not_quantized(name))?;
        let codes = quantize(values, self.shared.param(name)?, format, self.options.dtype)?;
        self.shared.files.write_quantized(name, &codes)?;
        self.forget();
        Ok(())
    }

    fn upload_times(&self) -> Result<Option<CopyTimes>> {
        Ok(None)
    }

    fn expert_reads(&self) -> Option<ExpertReads> {
        Some(self.shared.expected.take())
    }
}
