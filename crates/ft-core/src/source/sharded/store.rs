//! Training with matrices in parts: the owner of a part updates it. After the update it is sent to the peers on other machines, if
//! there are any. Other ranks need nothing, because a layer is collected before its next use.

use super::own::OwnPart;
use super::{ExactPart, MatrixDivision, ShardedWeights, WeightSource, lock};
use crate::base::{Error, Result};
use crate::comm::{Shard, WholeList};
use crate::formats::weights::Weights;
use crate::ops::Dtype;
use crate::ops::transfer::CopyTimes;
use crate::quant::{QMatrix, Weight};
use crate::source::requantize::{ExactParam, quantize, requantize};
use crate::source::resident::send;
use crate::source::{
    ExpertReads, MasterLowBits, NumbersSink, ParamInfo, RequantizedWeight, TrainableStore, no_such, not_quantized,
};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

impl ShardedWeights {
    /// The exact values of the own part of a parameter: as they are stored, and the low 16 bits of their masters unless
    /// the optimizer has them.
    ///
    /// # Errors
    /// The parameter is not in parts; the files cannot be read.
    pub fn exact_part(&self, name: &str) -> Result<ExactPart> {
        if let Some(exact) = lock(&self.trained).get(name) {
            return Ok(exact.clone());
        }
        if let Some(part) = self.own(name) {
            return Ok((part, None));
        }
        let p = self.param(name)?;
        let (_, dtype) = self.quantized.get(name).ok_or_else(|| not_quantized(name))?;
        Ok((self.origin.part(p, *dtype, &self.range(p))?, None))
    }

    fn set(&self, p: &ParamInfo, own: OwnPart) {
        lock(&self.own).insert(p.name.clone(), own);
        self.forget();
    }

    /// Moves an own part that is not quantized.
    fn move_own(&self, name: &str, device: &Device) -> Result<()> {
        if let Some(OwnPart::Dense { own, .. }) = lock(&self.own).get_mut(name) {
            *own = own.to_device(device)?;
        }
        Ok(())
    }

    fn set_quantized(&self, p: &ParamInfo, codes: QMatrix) -> Result<()> {
        let own = match self.division {
            MatrixDivision::Experts if self.range(p).is_empty() => {
                OwnPart::elsewhere(p, codes.format(), codes.dequantized_dtype())?
            }
            MatrixDivision::Experts => OwnPart::Whole(Arc::new(codes)),
            _ => OwnPart::cut(&codes, |n| self.machines.bytes_of(n, self.comm.world().rank))?,
        };
        self.set(p, own);
        Ok(())
    }

    /// The whole of exact values. All ranks call it.
    fn join(&self, p: &ParamInfo, (weight, low): &ExactPart) -> Result<ExactParam> {
        let ranges = self.ranges(p);
        let shard = |own: &Tensor| Shard::one(own.clone(), &ranges);
        let all = (0..self.comm.world().size).collect();
        let shards: Vec<Shard> = [Some(weight), low.as_ref()].into_iter().flatten().map(shard).collect();
        let mut lists = self
            .comm
            .gather_shards(p.elements() as u64, shards, all)
            .wait()?
            .into_iter();
        let weight = lists.next().ok_or_else(|| no_such(&p.name))?.into_tensor(&p.shape)?;
        let low = lists.next().map(|low: WholeList| low.into_tensor(&[p.elements()]));
        Ok(ExactParam {
            weight,
            low: low.transpose()?,
        })
    }
}

impl TrainableStore for ShardedWeights {
    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()> {
        let mut exact = BTreeSet::new();
        for name in names.iter().filter(|name| self.in_parts(name)) {
            let p = self.param(name)?;
            if !lock(&self.active).insert(p.name.clone()) {
                continue;
            }
            let Some((_, dtype)) = self.quantized.get(*name) else {
                self.move_own(name, &self.device)?;
                continue;
            };
            let kept = lock(&self.trained).remove(*name);
            let part = match kept {
                Some((part, half)) => {
                    if let Some(half) = half {
                        low.put_low(name, half);
                    }
                    part
                }
                None => self.origin.part(p, *dtype, &self.range(p))?,
            };
            let own = part.to_device(&self.device)?;
            self.set(p, OwnPart::Dense { own, copies: None });
            exact.insert(*name);
        }
        // Only the owners have exact values.
        self.renew(&|name| exact.contains(name))?;
        self.whole.activate(names, low)
    }

    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<RequantizedWeight>> {
        let leaving: Vec<Arc<str>> = lock(&self.active).iter().filter(|n| !keep(n)).cloned().collect();
        let mut requantized = Vec::new();
        for name in &leaving {
            lock(&self.active).remove(name);
            let Some(&(format, dtype)) = self.quantized.get(name) else {
                self.move_own(name, &Device::Cpu)?;
                continue;
            };
            let p = self.param(name)?;
            let part = self.own(name).ok_or_else(|| no_such(name))?;
            let exact = (part.to_device(&Device::Cpu)?, low.take_low(name));
            // One matrix at a time is whole, on every rank.
            let values = self.join(p, &exact)?.values()?;
            let (codes, error) = requantize(&values, p, format, dtype)?;
            self.set_quantized(p, codes)?;
            lock(&self.trained).insert(p.name.clone(), exact);
            requantized.push(error);
        }
        requantized.extend(self.whole.deactivate(keep, low)?);
        Ok(requantized)
    }

    fn master_in_optimizer(&self, name: &str) -> bool {
        if self.in_parts(name) {
            !self.quantized.contains_key(name) || lock(&self.active).contains(name)
        } else {
            self.whole.master_in_optimizer(name)
        }
    }

    /// All ranks read the same parameter, or rank 0 works alone.
    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        if !self.in_parts(name) {
            return self.whole.read(name, sink);
        }
        if lock(&self.trained).contains_key(name) {
            return Err(Error::internal("the exact values of a weight in parts are read from its owners").at(name));
        }
        if let (Some((_, dtype)), None) = (self.quantized.get(name), self.own(name)) {
            return send(&self.origin.values(self.param(name)?, *dtype)?, sink);
        }
        match self.collect(name)? {
            Weight::Dense(tensor) => send(&tensor, sink),
            _ => Err(not_quantized(name)),
        }
    }

    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn MasterLowBits) -> Result<()> {
        if !self.in_parts(name) {
            return self.whole.restore(name, saved, low);
        }
        let p = self.param(name)?;
        saved.require(name, &[p.elements()])?;
        let range = self.range(p);
        let exact = |range: &Range<usize>, dtype: Dtype| {
            let mut values = vec![0f32; range.len()];
            saved.read_f32_at(name, range.start, &mut values)?;
            ExactParam::new(values, &[range.len()], dtype, &Device::Cpu)
        };
        if let Some(&(format, dtype)) = self.quantized.get(name) {
            let codes = quantize(&saved.read_f32(name)?, p, format, dtype)?;
            self.set_quantized(p, codes)?;
            let exact = exact(&range, dtype)?;
            lock(&self.trained).insert(p.name.clone(), (exact.weight, exact.low));
            return Ok(());
        }
        let dtype = match self.own(name).map(|own| own.dtype()) {
            Some(DType::BF16) => Dtype::Bf16,
            Some(DType::F16) => Dtype::F16,
            _ => Dtype::F32,
        };
        let copies = self.copies(p, |range| Ok(exact(range, dtype)?.weight))?;
        let exact = exact(&range, dtype)?;
        let active = lock(&self.active).contains(name);
        let device = if active { &self.device } else { &Device::Cpu };
        let own = exact.weight.to_device(device)?;
        self.set(p, OwnPart::Dense { own, copies });
        if let Some(half) = exact.low {
            low.put_low(name, half);
        }
        Ok(())
    }

    fn requantize(&self, name: &str, values: &[f32]) -> Result<()> {
        if !self.in_parts(name) {
            return self.whole.requantize(name, values);
        }
        let p = self.param(name)?;
        let &(format, dtype) = self.quantized.get(name).ok_or_else(|| not_quantized(name))?;
        self.set_quantized(p, quantize(values, p, format, dtype)?)
    }

    fn sharded(&self) -> Option<&ShardedWeights> {
        Some(self)
    }

    fn updated(&self, trained: &dyn Fn(&str) -> bool) -> Result<()> {
        let changed = |layer: &usize| self.members(*layer).any(|p| trained(&p.name));
        lock(&self.slots).retain(|layer| !changed(layer));
        self.renew(trained)
    }

    fn drop_collected(&self) {
        lock(&self.slots).clear();
    }

    fn expert_reads(&self) -> Option<ExpertReads> {
        let sent = self.expert_ranks()?.take_sent();
        let none = ExpertReads::default();
        Some(ExpertReads { sent, ..none })
    }

    fn upload_times(&self) -> Result<Option<CopyTimes>> {
        Ok(None)
    }
}
