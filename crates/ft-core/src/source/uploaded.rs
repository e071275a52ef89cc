//! Frozen layers in host memory or on the disk, computed on a GPU: wraps a host source and uploads its layers to the
//! device, two at a time, and of their routed experts those that a micro-batch needs, two at a time. During each upload the host source prefetches the next layer. Active parameters stay on the
//! device and are copied back bit-exactly when they are deactivated.

mod low_bits;
mod order;

use super::experts::{ExpectedExperts, ExpertReads, LayerPart};
use super::requantize::ExactParam;
use super::resident::send;
use super::sharded::ShardedWeights;
use super::slots::Slots;
use super::{
    Group, GroupWeights, MasterLowBits, NumbersSink, ParamInfo, RequantizedWeight, StreamedMatrix, TrainableStore,
    WeightSource, distinct, lock, stays_on_device, tensor_bytes,
};
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::transfer::{ArrivingTensor, Copier, CopyTimes, HostMemory};
use crate::ops::update;
use crate::quant::{DeviceQMatrix, Weight};
use candle_core::{DType, Device, Tensor};
use low_bits::DeviceLowBits;
pub(super) use order::FetchOrder;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Wraps a source on the host for a GPU: holds two layers on the device and copies the next one during the computation.
pub struct UploadedWeights {
    /// A source on the host.
    host: Arc<dyn TrainableStore>,
    copier: Copier,
    /// The memory of its layers.
    memory: HostMemory,
    /// Parameters on the device: the active ones, and those that are always there.
    on_device: Mutex<BTreeMap<Arc<str>, Tensor>>,
    always_on_device: Mutex<Vec<Arc<str>>>,
    active: Mutex<Vec<Arc<str>>>,
    /// On the host: low 16 bits of the masters of inactive weights (i16 `[n]`), if `host` does not store them.
    low: Mutex<BTreeMap<String, Tensor>>,
    slots: Mutex<Slots<LayerPart, SlotContent>>,
    experts: Mutex<Slots<LayerPart, SlotContent>>,
    /// The last layer that rank 0 fetched while it worked alone.
    alone: Mutex<Option<(usize, Arc<GroupWeights>)>>,
    expected: ExpectedExperts,
    /// The names of the parameters of each part.
    parts: BTreeMap<LayerPart, Vec<Arc<str>>>,
    /// Order in which layers are fetched from `host`.
    order: Mutex<FetchOrder>,
}

enum SlotContent {
    InFlight(Vec<(Arc<str>, Transfer)>),
    Ready(Arc<GroupWeights>),
}

enum Transfer {
    OnDevice(Tensor),
    InFlight(ArrivingTensor),
    /// Function that rebuilds the quantized weight from its tensors, so that the host data need not be kept meanwhile.
    Quantized(Assemble, Vec<ArrivingTensor>),
}

type Assemble = Box<dyn FnOnce(Vec<Tensor>) -> Result<DeviceQMatrix> + Send>;

impl UploadedWeights {
    /// `host` is a source on the host; `memory` is that of its frozen weights (`Reused`: it waits for
    /// `GroupWeights::read_by`). `head` is the name of the output projection (LM head): it stays on the device unless
    /// `host` streams it in pieces.
    ///
    /// # Errors
    /// A weight that stays on the device cannot be read; not enough memory on the device.
    pub fn new(host: Arc<dyn TrainableStore>, head: &str, memory: HostMemory, device: &Device) -> Result<Self> {
        let streamed = host.streamed(head).is_some();
        let always = host.params().iter().filter(|p| stays_on_device(p, head, streamed));
        let always_on_device: Vec<Arc<str>> = always.map(|p| p.name.clone()).collect();
        let params = host.params();
        let names = |all: Vec<usize>| all.into_iter().map(|i| params[i].name.clone());
        let mut parts: BTreeMap<LayerPart, Vec<Arc<str>>> = BTreeMap::new();
        for (part, all) in LayerPart::all(params) {
            // Which experts a rank needs, the others do not know, so layers are collected as a whole.
            let part = match part {
                LayerPart::Expert(layer, _) if host.sharded().is_some() => LayerPart::Dense(layer),
                part => part,
            };
            parts.entry(part).or_default().extend(names(all));
        }
        let source = Self {
            parts,
            host,
            copier: Copier::new(device)?,
            memory,
            on_device: Mutex::default(),
            always_on_device: Mutex::new(always_on_device),
            active: Mutex::default(),
            low: Mutex::default(),
            slots: Mutex::default(),
            experts: Mutex::default(),
            alone: Mutex::default(),
            expected: ExpectedExperts::default(),
            order: Mutex::default(),
        };
        for name in lock(&source.always_on_device).iter() {
            let tensor = source.upload(name)?;
            lock(&source.on_device).insert(name.clone(), tensor);
        }
        Ok(source)
    }

    /// Uploads a parameter into newly allocated device memory.
    fn upload(&self, name: &str) -> Result<Tensor> {
        let host = match self.host.in_memory(name) {
            Some(tensor) => tensor,
            None => self.host.fetch_with(self.host.param(name)?)?.get(name)?.1,
        };
        self.copier.receive(self.copier.send(&host, HostMemory::Temporary)?)
    }

    fn start(&self, part: LayerPart) -> Result<SlotContent> {
        let names = self.parts.get(&part);
        let names = names.ok_or_else(|| Error::new(format!("the model has no {part:?}")))?;
        let host = match part {
            LayerPart::Dense(layer) => self.host.fetch_dense(layer)?,
            LayerPart::Expert(layer, expert) => self.host.fetch_expert(layer, expert)?,
        };
        let content = self.send_all(&host, names, self.memory)?;
        if matches!(part, LayerPart::Expert(..)) {
            let on_device = lock(&self.on_device);
            let sent = names.iter().filter(|name| !on_device.contains_key(*name));
            let bytes = sent.map(|name| Ok(host.weight(name)?.1.bytes())).sum::<Result<u64>>()?;
            self.expected.count(bytes);
        }
        // The source can read the next layer into the buffer when the copies no longer read it.
        drop(host);
        if let LayerPart::Dense(layer) = part
            && let Some(next) = lock(&self.order).follow(layer)
        {
            self.host.prefetch(Group::Layer(next));
        }
        Ok(content)
    }

    /// Starts the uploads of these weights of `host`, in `memory`, that are not on the device.
    fn send_all(&self, host: &GroupWeights, names: &[Arc<str>], memory: HostMemory) -> Result<SlotContent> {
        let on_device = lock(&self.on_device).clone();
        let mut parts = Vec::new();
        let send = |tensor: &Tensor| send_from(&self.copier, host, tensor, memory);
        for name in names {
            let (name, weight) = host.weight(name)?;
            let part = match (on_device.get(&name), &weight) {
                (Some(tensor), _) => Transfer::OnDevice(tensor.clone()),
                (None, Weight::Dense(tensor)) => Transfer::InFlight(send(tensor)?),
                (None, Weight::DeviceQuantized(codes)) => {
                    let sent = codes.tensors().into_iter().map(send).collect::<Result<_>>()?;
                    let codes = codes.clone();
                    Transfer::Quantized(Box::new(move |here| codes.with_tensors(here)), sent)
                }
                (None, Weight::Quantized(codes)) => {
                    let sent = codes
                        .tensors(&Device::Cpu)?
                        .iter()
                        .map(|t| self.copier.send(t, HostMemory::Temporary))
                        .collect::<Result<_>>()?;
                    let (format, dims) = (codes.format(), codes.dims());
                    let (dequantized_dtype, offset) = (codes.dequantized_dtype(), codes.nested_offset());
                    let assemble = move |here| DeviceQMatrix::new(format, dims, dequantized_dtype, here, offset);
                    Transfer::Quantized(Box::new(assemble), sent)
                }
            };
            parts.push((name, part));
        }
        Ok(SlotContent::InFlight(parts))
    }

    fn receive(&self, content: SlotContent) -> Result<Arc<GroupWeights>> {
        let parts = match content {
            SlotContent::Ready(weights) => return Ok(weights),
            SlotContent::InFlight(parts) => parts,
        };
        let mut weights = GroupWeights::default();
        for (name, part) in parts {
            let weight: Weight = match part {
                Transfer::OnDevice(tensor) => tensor.into(),
                Transfer::InFlight(arriving) => self.copier.receive(arriving)?.into(),
                Transfer::Quantized(assemble, sent) => {
                    let here = sent
                        .into_iter()
                        .map(|a| self.copier.receive(a))
                        .collect::<Result<_>>()?;
                    assemble(here)?.into()
                }
            };
            weights.insert(name, weight);
        }
        Ok(Arc::new(weights))
    }

    fn slots_of(&self, part: LayerPart) -> &Mutex<Slots<LayerPart, SlotContent>> {
        match part {
            LayerPart::Dense(_) => &self.slots,
            LayerPart::Expert(..) => &self.experts,
        }
    }

    /// The weights of all slots have changed.
    fn forget(&self) {
        lock(&self.alone).take();
        lock(&self.slots).clear();
        lock(&self.experts).clear();
    }

    /// The weights of a part: uploaded now, if that was not started before.
    fn part(&self, part: LayerPart) -> Result<Arc<GroupWeights>> {
        if let (true, LayerPart::Dense(layer)) = (self.works_alone(), part) {
            return self.layer_alone(layer);
        }
        lock(&self.alone).take();
        let content = match self.take(part) {
            Some(content) => content,
            None => self.start(part)?,
        };
        let weights = self.receive(content)?;
        self.put(part, SlotContent::Ready(weights.clone()), false);
        Ok(weights)
    }

    /// A layer for rank 0, which works alone.
    fn layer_alone(&self, layer: usize) -> Result<Arc<GroupWeights>> {
        if let Some((_, weights)) = lock(&self.alone).as_ref().filter(|(here, _)| *here == layer) {
            return Ok(weights.clone());
        }
        lock(&self.alone).take();
        let host = self.host.fetch_dense(layer)?;
        let names: Vec<Arc<str>> = host.iter().map(|(name, _)| name.clone()).collect();
        let weights = self.receive(self.send_all(&host, &names, self.memory)?)?;
        *lock(&self.alone) = Some((layer, weights.clone()));
        Ok(weights)
    }

    fn prefetch_part(&self, part: LayerPart) {
        if self.works_alone() {
            return;
        }
        // Ignores an error: the fetch of the part returns it again.
        if let Some(content) = self.take(part).or_else(|| self.start(part).ok()) {
            self.put(part, content, true);
        }
    }

    fn take(&self, part: LayerPart) -> Option<SlotContent> {
        lock(self.slots_of(part)).take(part)
    }

    fn put(&self, part: LayerPart, content: SlotContent, prefetched: bool) {
        lock(self.slots_of(part)).put(part, content, prefetched);
    }

    /// Releases the page-locked quantized data of a parameter, which is replaced next.
    fn forget_quantized(&self, param: &ParamInfo) -> Result<()> {
        if self.memory == HostMemory::Stable
            && let Ok((_, Weight::DeviceQuantized(codes))) = self.host.fetch(param.group)?.weight(&param.name)
        {
            codes.tensors().into_iter().try_for_each(|t| self.copier.forget(t))?;
        }
        Ok(())
    }

    /// True if each rank has a part of this matrix, which the host has even while it is active.
    fn is_in_parts(&self, name: &str) -> bool {
        self.host.sharded().is_some_and(|host| host.in_parts(name))
    }

    /// True on rank 0 while it works alone. The slots and the order of the layers stay as they are then: they must be the same on
    /// all ranks, which collect layers together.
    fn works_alone(&self) -> bool {
        self.host.sharded().is_some_and(ShardedWeights::works_alone)
    }

    fn is_active(&self, name: &str) -> bool {
        lock(&self.active).iter().any(|n| &**n == name)
    }
}

impl WeightSource for UploadedWeights {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        let Group::Layer(layer) = group else {
            // The whole embedding, or a head whose parameters are all on the device except a streamed matrix.
            let mut weights = GroupWeights::default();
            for p in self.host.params().iter().filter(|p| p.group == group) {
                let here = lock(&self.on_device).get(&p.name).cloned();
                match here {
                    Some(tensor) => weights.insert(p.name.clone(), tensor),
                    None if self.host.streamed(&p.name).is_some() => {}
                    None => weights.insert(p.name.clone(), self.upload(&p.name)?),
                }
            }
            return Ok(Arc::new(weights));
        };
        if !self.parts.contains_key(&LayerPart::Expert(layer, 0)) {
            return self.fetch_dense(layer);
        }
        // With all its experts: not in the slots, and a host that reads from the disk has it in new memory.
        let host = self.host.fetch(group)?;
        let names: Vec<Arc<str>> = host.iter().map(|(name, _)| name.clone()).collect();
        self.receive(self.send_all(&host, &names, HostMemory::Temporary)?)
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
        if !self.streams_experts() {
            return self.fetch_dense(layer);
        }
        let part = LayerPart::Expert(layer, expert);
        let weights = self.part(part)?;
        if let Some(next) = self.expected.after(part) {
            self.prefetch_part(next);
        }
        Ok(weights)
    }

    fn streams_experts(&self) -> bool {
        self.host.sharded().is_none()
    }

    fn expect_experts(&self, layer: usize, experts: &[usize]) {
        if !self.streams_experts() {
            return;
        }
        self.host.expect_experts(layer, experts);
        let all = self
            .parts
            .range(LayerPart::Expert(layer, 0)..=LayerPart::Expert(layer, usize::MAX));
        let parts = experts.iter().map(|&e| LayerPart::Expert(layer, e));
        if let Some(first) = self.expected.set(parts, all.count()) {
            self.prefetch_part(first);
        }
    }

    fn params(&self) -> &[ParamInfo] {
        self.host.params()
    }

    fn resident_bytes(&self) -> u64 {
        lock(&self.on_device).values().map(tensor_bytes).sum()
    }

    fn in_memory(&self, name: &str) -> Option<Tensor> {
        lock(&self.on_device).get(name).cloned()
    }

    fn hold(&self, name: &str) -> Result<Tensor> {
        let name = self.host.param(name)?.name.clone();
        let mut always = lock(&self.always_on_device);
        if !always.contains(&name) {
            always.push(name.clone());
        }
        drop(always);
        if let Some(tensor) = self.in_memory(&name) {
            return Ok(tensor);
        }
        let tensor = self.upload(&name)?;
        lock(&self.on_device).insert(name, tensor.clone());
        self.forget();
        Ok(tensor)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        if let Some(whole) = self.in_memory(name) {
            return Ok((whole, ids.to_vec()));
        }
        // Gathers each distinct row once, on the host.
        let (table, indices) = self.host.rows(name, ids)?;
        let (rows, indices) = distinct(&indices, table.dims()[0])?;
        let count = rows.len();
        let index = Tensor::from_vec(rows, count, table.device())?;
        let picked = table.index_select(&index, 0)?;
        let picked = self.copier.receive(self.copier.send(&picked, HostMemory::Temporary)?)?;
        Ok((picked, indices))
    }

    fn streamed(&self, name: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        let host = self.host.streamed(name).filter(|_| self.in_memory(name).is_none())?;
        Some(Box::new(UploadedPieces {
            host,
            name: name.into(),
            copier: &self.copier,
            memory: self.memory,
        }))
    }
}

/// Uploads each piece of a matrix that the host streams.
struct UploadedPieces<'a> {
    host: Box<dyn StreamedMatrix + 'a>,
    name: Arc<str>,
    copier: &'a Copier,
    memory: HostMemory,
}

impl StreamedMatrix for UploadedPieces<'_> {
    fn piece_rows(&self) -> usize {
        self.host.piece_rows()
    }

    fn piece(&self, first: usize) -> Result<Arc<GroupWeights>> {
        let host = self.host.piece(first)?;
        let mut weights = GroupWeights::default();
        let sent = send_from(self.copier, &host, &host.get(&self.name)?.1, self.memory)?;
        let piece = self.copier.receive(sent)?;
        weights.insert(self.name.clone(), piece);
        Ok(Arc::new(weights))
    }
}

impl TrainableStore for UploadedWeights {
    fn master_in_optimizer(&self, name: &str) -> bool {
        self.is_active(name) || self.is_in_parts(name) && self.host.master_in_optimizer(name)
    }

    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()> {
        let mut low_bits = DeviceLowBits::new(low, self.copier.device());
        // Quantized data of active parameters is not needed; it is recomputed at deactivation.
        for param in self.host.params().iter().filter(|p| names.contains(&&*p.name)) {
            self.forget_quantized(param)?;
        }
        self.host.activate(names, &mut low_bits)?;
        let params = self.host.params();
        for param in params.iter().filter(|p| names.contains(&&*p.name)) {
            if self.is_active(&param.name) || self.is_in_parts(&param.name) {
                continue;
            }
            if self.in_memory(&param.name).is_none() {
                let tensor = self.upload(&param.name)?;
                lock(&self.on_device).insert(param.name.clone(), tensor);
            }
            let kept = lock(&self.low).remove(&*param.name);
            if let Some(half) = kept {
                low_bits.put_low(&param.name, half);
            }
            lock(&self.active).push(param.name.clone());
        }
        self.forget();
        low_bits.done()
    }

    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<RequantizedWeight>> {
        let leaving: Vec<Arc<str>> = lock(&self.active).iter().filter(|n| !keep(n)).cloned().collect();
        for name in &leaving {
            if let (Some(here), Some(host)) = (self.in_memory(name), self.host.in_memory(name)) {
                write_back(&here, &host)?;
            }
        }
        let mut low_bits = DeviceLowBits::new(low, self.copier.device());
        let requantized = self.host.deactivate(keep, &mut low_bits)?;
        for name in &leaving {
            // Left by a source that keeps its weights: there is no other copy.
            if let Some(half) = low_bits.take_low(name) {
                lock(&self.low).insert(name.to_string(), half);
            }
            lock(&self.active).retain(|n| n != name);
            if !lock(&self.always_on_device).contains(name) {
                lock(&self.on_device).remove(name);
            }
        }
        self.forget();
        low_bits.done()?;
        Ok(requantized)
    }

    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        if self.is_active(name)
            && let Some(tensor) = self.in_memory(name)
        {
            return send(&tensor, sink);
        }
        let low = lock(&self.low).get(name).cloned();
        match (low, self.host.in_memory(name)) {
            (low @ Some(_), Some(weight)) => ExactParam { weight, low }.send(sink),
            _ => self.host.read(name, sink),
        }
    }

    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn MasterLowBits) -> Result<()> {
        if self.is_in_parts(name) {
            // The optimizer keeps the low bits of inactive weights on the host, and moves them when they are trained.
            self.host.restore(name, saved, low)?;
            self.forget();
            return Ok(());
        }
        let mut low = lock(&self.low);
        self.host.restore(name, saved, &mut *low)?;
        drop(low);
        if lock(&self.on_device).contains_key(name) {
            let tensor = self.upload(name)?;
            lock(&self.on_device).insert(name.into(), tensor);
        }
        self.forget();
        Ok(())
    }

    fn requantize(&self, name: &str, values: &[f32]) -> Result<()> {
        self.forget_quantized(self.host.param(name)?)?;
        self.host.requantize(name, values)?;
        self.forget();
        Ok(())
    }

    fn sharded(&self) -> Option<&ShardedWeights> {
        self.host.sharded()
    }

    fn updated(&self, trained: &dyn Fn(&str) -> bool) -> Result<()> {
        let changed = |name: &Arc<str>| trained(name) && self.is_in_parts(name);
        let changed = |part: &LayerPart| self.parts.get(part).is_some_and(|names| names.iter().any(changed));
        lock(&self.alone).take();
        lock(&self.slots).retain(|part| !changed(part));
        self.host.updated(trained)
    }

    fn drop_collected(&self) {
        lock(&self.alone).take();
        lock(&self.slots).retain(|part| {
            !self
                .parts
                .get(part)
                .is_some_and(|names| names.iter().any(|n| self.is_in_parts(n)))
        });
        self.host.drop_collected();
    }

    fn upload_times(&self) -> Result<Option<CopyTimes>> {
        self.copier.times()
    }

    fn expert_reads(&self) -> Option<ExpertReads> {
        // Those of the host are its own traffic.
        self.host.expert_reads();
        Some(self.expected.take())
    }
}

/// Starts the upload of a tensor of `group`.
fn send_from(copier: &Copier, group: &GroupWeights, tensor: &Tensor, memory: HostMemory) -> Result<ArrivingTensor> {
    let sent = copier.send(tensor, memory)?;
    if memory == HostMemory::Reused {
        group.read_by(sent.read());
    }
    Ok(sent)
}

/// Copies a device tensor into the memory of a host tensor.
fn write_back(here: &Tensor, host: &Tensor) -> Result<()> {
    let here = here.to_device(&Device::Cpu)?;
    match host.dtype() {
        DType::BF16 => update::with_bf16(&here, |from| update::store_bf16(host, |to| to.copy_from_slice(from)))?,
        DType::F16 => update::with_f16(&here, |from| update::store_f16(host, |to| to.copy_from_slice(from)))?,
        _ => update::with_slice(&here, |from| {
            update::with_slice_mut(host, |to| to.copy_from_slice(from))
        })?,
    }
}

#[cfg(test)]
mod tests;
