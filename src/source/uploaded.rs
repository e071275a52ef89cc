//! Frozen layers in host memory or on the disk, computed on a GPU: wraps a host source and uploads its layers to the
//! device, two at a time. During each upload the host source prefetches the next layer. Active parameters stay on the
//! device and are copied back bit-exactly when they are deactivated.

mod order;

use super::resident::send;
use super::turns::Exact;
use super::{Group, GroupWeights, LayerSource, MasterLowBits, NumbersSink, ParamInfo, Recoded};
use crate::base::{Error, Result};
use crate::formats::weights::Weights;
use crate::ops::transfer::{Arriving, Copier, CopyTimes};
use crate::ops::update;
use crate::quant::{DeviceQMatrix, Weight};
use candle_core::{DType, Device, Tensor};
use order::Order;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Double buffer: layers on the device at a time, the current one and the next.
const SLOTS: usize = 2;

pub struct Uploaded {
    /// A source on the host.
    inner: Box<dyn LayerSource>,
    copier: Copier,
    /// True if the memory of its weights never moves: a GPU may read it directly.
    stays: bool,
    /// Parameters on the device: the active ones, and those that are always there.
    held: Mutex<BTreeMap<Arc<str>, Tensor>>,
    always: Vec<Arc<str>>,
    active: Mutex<Vec<Arc<str>>>,
    /// On the host: low 16 bits of the masters of inactive weights (i16 `[n]`), if `inner` does not store them.
    low: Mutex<BTreeMap<String, Tensor>>,
    places: Mutex<Vec<Slot>>,
    /// Order in which layers are fetched from `inner`.
    order: Mutex<Order>,
}

struct Slot {
    group: Group,
    content: Content,
    /// True if the slot was prefetched, and not fetched since.
    awaited: bool,
}

enum Content {
    Coming(Vec<(Arc<str>, Part)>),
    Here(Arc<GroupWeights>),
}

enum Part {
    Held(Tensor),
    Coming(Arriving),
    /// Function that rebuilds the quantized weight from its tensors, so that the host data need not be held meanwhile.
    Codes(Assemble, Vec<Arriving>),
}

type Assemble = Box<dyn FnOnce(Vec<Tensor>) -> Result<DeviceQMatrix> + Send>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uploaded {
    /// `inner` is a source on the host; `stays`: the memory of its frozen weights never changes. `head` is the name of
    /// the output projection (LM head): it is held on the device unless `inner` streams it in pieces.
    pub fn new(inner: Box<dyn LayerSource>, head: &str, stays: bool, device: &Device) -> Result<Self> {
        let always: Vec<Arc<str>> = inner
            .params()
            .iter()
            .filter(|p| {
                if &*p.name == head {
                    inner.piece_rows(head).is_none()
                } else {
                    p.group == Group::Head
                }
            })
            .map(|p| p.name.clone())
            .collect();
        let source = Self {
            inner,
            copier: Copier::new(device)?,
            stays,
            held: Mutex::default(),
            always,
            active: Mutex::default(),
            low: Mutex::default(),
            places: Mutex::default(),
            order: Mutex::default(),
        };
        for name in &source.always {
            let tensor = source.upload(name)?;
            lock(&source.held).insert(name.clone(), tensor);
        }
        Ok(source)
    }

    /// Uploads a parameter into newly allocated device memory.
    fn upload(&self, name: &str) -> Result<Tensor> {
        let host = match self.inner.held(name) {
            Some(tensor) => tensor,
            None => {
                let param = self.inner.params().iter().find(|p| &*p.name == name);
                let group = param.ok_or_else(|| super::resident::no_such(name))?.group;
                self.inner.fetch(group)?.get(name)?.1
            }
        };
        self.copier.receive(self.copier.send(&host, false)?)
    }

    fn start(&self, group: Group) -> Result<Content> {
        let held = lock(&self.held).clone();
        let host = self.inner.fetch(group)?;
        let mut parts = Vec::new();
        for (name, weight) in host.iter() {
            let part = match (held.get(name), weight) {
                (Some(tensor), _) => Part::Held(tensor.clone()),
                (None, Weight::Dense(tensor)) => Part::Coming(self.copier.send(tensor, self.stays)?),
                (None, Weight::Prepacked(w)) => Part::Coming(self.copier.send(w.tensor(), self.stays)?),
                (None, Weight::DeviceQuantized(codes)) => {
                    let sent = codes
                        .tensors()
                        .into_iter()
                        .map(|t| self.copier.send(t, self.stays))
                        .collect::<Result<_>>()?;
                    let codes = codes.clone();
                    Part::Codes(Box::new(move |here| codes.with_tensors(here)), sent)
                }
                (None, Weight::Quantized(codes)) => {
                    let sent = codes
                        .tensors(&Device::Cpu)?
                        .iter()
                        .map(|t| self.copier.send(t, false))
                        .collect::<Result<_>>()?;
                    let (format, dims) = (codes.format(), codes.dims());
                    let (decoded, offset) = (codes.decoded(), codes.nested_offset());
                    let assemble = move |here| DeviceQMatrix::new(format, dims, decoded, here, offset);
                    Part::Codes(Box::new(assemble), sent)
                }
            };
            parts.push((name.clone(), part));
        }
        // The host buffer is free again, so the source can read the next layer into it.
        drop(host);
        if let Group::Layer(layer) = group
            && let Some(next) = lock(&self.order).follow(layer)
        {
            self.inner.prefetch(Group::Layer(next));
        }
        Ok(Content::Coming(parts))
    }

    fn receive(&self, content: Content) -> Result<Arc<GroupWeights>> {
        let parts = match content {
            Content::Here(weights) => return Ok(weights),
            Content::Coming(parts) => parts,
        };
        let mut weights = GroupWeights::default();
        for (name, part) in parts {
            let weight: Weight = match part {
                Part::Held(tensor) => tensor.into(),
                Part::Coming(arriving) => self.copier.receive(arriving)?.into(),
                Part::Codes(assemble, sent) => {
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

    /// Takes the slot of `group`; if there is none, frees the oldest slot that is not prefetched.
    fn take(&self, group: Group) -> Option<Content> {
        let mut places = lock(&self.places);
        if let Some(at) = places.iter().position(|p| p.group == group) {
            return Some(places.remove(at).content);
        }
        while places.len() >= SLOTS {
            let oldest = places.iter().position(|p| !p.awaited).unwrap_or(0);
            places.remove(oldest);
        }
        None
    }

    fn put(&self, group: Group, content: Content, awaited: bool) {
        lock(&self.places).push(Slot {
            group,
            content,
            awaited,
        });
    }

    fn is_active(&self, name: &str) -> bool {
        lock(&self.active).iter().any(|n| &**n == name)
    }
}

/// The optimizer's low 16 bits for a source on the host: copies them between host and device.
struct Across<'a> {
    optimizer: &'a mut dyn MasterLowBits,
    device: &'a Device,
    failed: Option<Error>,
}

impl Across<'_> {
    fn moved(&mut self, low: Tensor, device: &Device) -> Option<Tensor> {
        match low.to_device(device) {
            Ok(low) => Some(low),
            Err(e) => {
                self.failed = Some(e.into());
                None
            }
        }
    }

    fn done(self) -> Result<()> {
        self.failed.map_or(Ok(()), Err)
    }
}

impl MasterLowBits for Across<'_> {
    fn put_low(&mut self, name: &str, low: Tensor) {
        if let Some(low) = self.moved(low, self.device) {
            self.optimizer.put_low(name, low);
        }
    }

    fn take_low(&mut self, name: &str) -> Option<Tensor> {
        let low = self.optimizer.take_low(name)?;
        self.moved(low, &Device::Cpu)
    }
}

impl LayerSource for Uploaded {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        if !matches!(group, Group::Layer(_)) {
            // The whole embedding, or a head whose parameters are all held except a streamed matrix.
            let mut weights = GroupWeights::default();
            for p in self.inner.params().iter().filter(|p| p.group == group) {
                let held = lock(&self.held).get(&p.name).cloned();
                match held {
                    Some(tensor) => weights.insert(p.name.clone(), tensor),
                    None if self.inner.piece_rows(&p.name).is_some() => {}
                    None => weights.insert(p.name.clone(), self.upload(&p.name)?),
                }
            }
            return Ok(Arc::new(weights));
        }
        let content = match self.take(group) {
            Some(content) => content,
            None => self.start(group)?,
        };
        let weights = self.receive(content)?;
        self.put(group, Content::Here(weights.clone()), false);
        Ok(weights)
    }

    fn prefetch(&self, group: Group) {
        if !matches!(group, Group::Layer(_)) {
            return;
        }
        // Ignores an error: the fetch of the group returns it again.
        if let Some(content) = self.take(group).or_else(|| self.start(group).ok()) {
            self.put(group, content, true);
        }
    }

    fn params(&self) -> &[ParamInfo] {
        self.inner.params()
    }

    fn resident_bytes(&self) -> u64 {
        let bytes = |t: &Tensor| (t.elem_count() * t.dtype().size_in_bytes()) as u64;
        lock(&self.held).values().map(bytes).sum()
    }

    fn held(&self, name: &str) -> Option<Tensor> {
        lock(&self.held).get(name).cloned()
    }

    fn master_is_out(&self, name: &str) -> bool {
        self.is_active(name)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        if let Some(whole) = self.held(name) {
            return Ok((whole, ids.to_vec()));
        }
        // Gathers each distinct row once, on the host.
        let (table, places) = self.inner.rows(name, ids)?;
        let mut distinct: BTreeMap<u32, u32> = places.iter().map(|p| (*p, 0)).collect();
        let rows: Vec<u32> = distinct.keys().copied().collect();
        if let Some(row) = rows.last().filter(|row| **row as usize >= table.dims()[0]) {
            return Err(Error::argument("a token id is outside the vocabulary")
                .found(row)
                .expected(format!("below {}", table.dims()[0])));
        }
        distinct.values_mut().zip(0..).for_each(|(at, i)| *at = i);
        let index = Tensor::from_vec(rows, distinct.len(), table.device())?;
        let picked = table.index_select(&index, 0)?;
        let picked = self.copier.receive(self.copier.send(&picked, false)?)?;
        Ok((picked, places.iter().map(|p| distinct[p]).collect()))
    }

    fn piece_rows(&self, name: &str) -> Option<usize> {
        match self.held(name) {
            Some(_) => None,
            None => self.inner.piece_rows(name),
        }
    }

    fn piece(&self, name: &str, first: usize) -> Result<Arc<GroupWeights>> {
        let host = self.inner.piece(name, first)?.get(name)?.1;
        let mut weights = GroupWeights::default();
        let piece = self.copier.receive(self.copier.send(&host.contiguous()?, false)?)?;
        weights.insert(name.into(), piece);
        Ok(Arc::new(weights))
    }

    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()> {
        let device = self.copier.device().clone();
        let mut across = Across {
            optimizer: low,
            device: &device,
            failed: None,
        };
        // Quantized data of active parameters is not needed; it is recomputed at deactivation.
        for param in self.inner.params().iter().filter(|p| names.contains(&&*p.name)) {
            if self.stays
                && let Ok((_, Weight::DeviceQuantized(codes))) = self.inner.fetch(param.group)?.weight(&param.name)
            {
                codes.tensors().into_iter().try_for_each(|t| self.copier.forget(t))?;
            }
        }
        self.inner.activate(names, &mut across)?;
        let params = self.inner.params();
        for param in params.iter().filter(|p| names.contains(&&*p.name)) {
            if self.is_active(&param.name) {
                continue;
            }
            if self.held(&param.name).is_none() {
                let tensor = self.upload(&param.name)?;
                lock(&self.held).insert(param.name.clone(), tensor);
            }
            let kept = lock(&self.low).remove(&*param.name);
            if let Some(half) = kept {
                across.put_low(&param.name, half);
            }
            lock(&self.active).push(param.name.clone());
        }
        lock(&self.places).clear();
        across.done()
    }

    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<Recoded>> {
        let leaving: Vec<Arc<str>> = lock(&self.active).iter().filter(|n| !keep(n)).cloned().collect();
        for name in &leaving {
            if let (Some(here), Some(host)) = (self.held(name), self.inner.held(name)) {
                write_back(&here, &host)?;
            }
        }
        let device = self.copier.device().clone();
        let mut across = Across {
            optimizer: low,
            device: &device,
            failed: None,
        };
        let recoded = self.inner.deactivate(keep, &mut across)?;
        for name in &leaving {
            // Left by a source that keeps its weights: there is no other copy.
            if let Some(half) = across.take_low(name) {
                lock(&self.low).insert(name.to_string(), half);
            }
            lock(&self.active).retain(|n| n != name);
            if !self.always.contains(name) {
                lock(&self.held).remove(name);
            }
        }
        lock(&self.places).clear();
        across.done()?;
        Ok(recoded)
    }

    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        if self.is_active(name)
            && let Some(tensor) = self.held(name)
        {
            return send(&tensor, sink);
        }
        let low = lock(&self.low).get(name).cloned();
        match (low, self.inner.held(name)) {
            (low @ Some(_), Some(weight)) => Exact { weight, low }.send(sink),
            _ => self.inner.read(name, sink),
        }
    }

    fn restore(&self, name: &str, saved: &Weights, _: &mut dyn MasterLowBits) -> Result<()> {
        let mut low = lock(&self.low);
        self.inner.restore(name, saved, &mut *low)?;
        drop(low);
        if lock(&self.held).contains_key(name) {
            let tensor = self.upload(name)?;
            lock(&self.held).insert(name.into(), tensor);
        }
        lock(&self.places).clear();
        Ok(())
    }

    fn copies(&self) -> Result<Option<CopyTimes>> {
        self.copier.times()
    }
}

/// Copies a device tensor into the memory of a host tensor.
fn write_back(here: &Tensor, host: &Tensor) -> Result<()> {
    let here = here.to_device(&Device::Cpu)?;
    match host.dtype() {
        DType::BF16 => update::with_bf16(&here, |from| update::store_bf16(host, |to| to.copy_from_slice(from)))?,
        _ => update::with_slice(&here, |from| {
            update::with_slice_mut(host, |to| to.copy_from_slice(from))
        })?,
    }
}

#[cfg(test)]
mod tests;
