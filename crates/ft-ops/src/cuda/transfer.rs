//! Copies between host memory and a GPU on a separate copy stream.
//!
//! GPU memory is allocated and freed in the order of the compute stream, so events tie each copy to that stream. A
//! copy to the GPU starts after its target memory is free, and the compute stream waits for it before use. The
//! memory of a tensor that is offloaded is freed after a wait for the copy.

use super::{Gpu, address};
use crate::transfer::CopyTimes;
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice, result, sys};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use ft_base::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

fn failed(e: impl std::fmt::Debug) -> Error {
    let text = format!("{e:?}");
    Error::device("a copy between host and GPU failed", &text).found(text)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const TIMED: Option<sys::CUevent_flags> = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
/// Smaller tensors are not page-locked: the gain is too small.
const LEAST_LOCKED: usize = 1 << 16;
/// Largest number of copies with pending time measurements; later copies are not measured.
const MOST_TIMED: usize = 4096;

/// Pinned host memory.
type Pinned = PinnedHostSlice<u8>;

/// A tensor during its copy to the GPU.
pub(crate) struct Arriving {
    /// None after `receive`.
    tensor: Option<(Tensor, CudaEvent, CudaEvent)>,
    computing: Arc<CudaStream>,
}

impl Drop for Arriving {
    fn drop(&mut self) {
        // The tensor is not received, but its memory must not be reused while the copy writes to it.
        if let Some((_, _, arrived)) = &self.tensor
            && self.computing.wait(arrived).is_err()
        {
            let _ = arrived.synchronize();
        }
    }
}

/// A tensor that is offloaded to the host, or on the way there.
pub(crate) struct Offloaded {
    host: Option<Pinned>,
    shape: Vec<usize>,
    dtype: DType,
    /// The tensor on the GPU, until `release` releases it.
    leaving: Option<Tensor>,
    done: CudaEvent,
}

impl Drop for Offloaded {
    fn drop(&mut self) {
        // The copy must not write to pinned memory that is freed.
        if self.host.is_some() {
            let _ = self.done.synchronize();
        }
    }
}

/// The copy stream of one GPU.
pub(crate) struct Copier {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    /// Page-locked host tensors, by address; each is kept alive while it is locked.
    locked: Mutex<BTreeMap<usize, Tensor>>,
    /// Host tensors that the system refused to page-lock, and their bytes since the last call of `times`.
    refused: Mutex<(BTreeSet<usize>, u64)>,
    /// Free pinned memory, by size. All copies run on one stream, so a new write comes after the old read.
    free: Mutex<BTreeMap<usize, Vec<Pinned>>>,
    /// Copies whose times are not read yet: start of the copy, its end, and the point where the compute stream
    /// waited for it.
    timed: Mutex<Vec<(CudaEvent, CudaEvent, CudaEvent)>>,
}

impl Drop for Copier {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        for address in std::mem::take(&mut *lock(&self.locked)).keys() {
            // SAFETY: it was page-locked by this copier, and its tensor still lives.
            let _ = unsafe { sys::cuMemHostUnregister(*address as *mut _) };
        }
    }
}

impl Copier {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let gpu = Gpu::on(device)?;
        let stream = gpu.device().cuda_stream().context().new_stream().map_err(failed)?;
        Ok(Self {
            gpu,
            stream,
            locked: Mutex::default(),
            refused: Mutex::default(),
            free: Mutex::default(),
            timed: Mutex::default(),
        })
    }

    /// Starts the upload of a contiguous host tensor; see `ops::transfer`.
    pub(crate) fn send(&self, host: &Tensor, stable: bool) -> Result<Arriving> {
        let (from, len) = host_bytes(host)?;
        if stable && len >= LEAST_LOCKED {
            self.lock_in_memory(host, from as usize, len)?;
        }
        // SAFETY: the tensor holds this number of bytes. From memory that is not page-locked the driver copies
        // before it returns; page-locked memory stays alive by the promise of the caller.
        let bytes = unsafe { std::slice::from_raw_parts(from, len) };
        let tensor = self.gpu.empty(host.dims(), host.dtype())?;
        self.copy_to(tensor, bytes)
    }

    /// Starts the copy of the bytes to a new tensor.
    fn copy_to(&self, tensor: Tensor, bytes: &[u8]) -> Result<Arriving> {
        let to = address(&tensor, "a tensor that is sent")?;
        let computing = self.gpu.device().cuda_stream();
        // Earlier work that is still queued may read the memory of this allocation.
        self.stream.join(&computing).map_err(failed)?;
        let started = self.stream.record_event(TIMED).map_err(failed)?;
        if !bytes.is_empty() {
            // SAFETY: the tensor has space for the bytes.
            unsafe { result::memcpy_htod_async(to, bytes, self.stream.cu_stream()) }.map_err(failed)?;
        }
        let arrived = self.stream.record_event(TIMED).map_err(failed)?;
        Ok(Arriving {
            tensor: Some((tensor, started, arrived)),
            computing,
        })
    }

    /// Page-locks the memory of `host`. If the system refuses, copies are slower but still correct.
    fn lock_in_memory(&self, host: &Tensor, from: usize, len: usize) -> Result<()> {
        let mut locked = lock(&self.locked);
        let mut refused = lock(&self.refused);
        if locked.contains_key(&from) || refused.0.contains(&from) {
            return Ok(());
        }
        self.stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the memory belongs to the tensor, of which a clone is kept until it is unlocked.
        let code = unsafe { sys::cuMemHostRegister_v2(from as *mut _, len, 0) };
        if code == sys::CUresult::CUDA_SUCCESS {
            locked.insert(from, host.clone());
        } else {
            refused.0.insert(from);
            refused.1 += len as u64;
        }
        Ok(())
    }

    /// Unlocks the memory of a tensor, after all copies that read it are complete.
    pub(crate) fn forget(&self, host: &Tensor) -> Result<()> {
        let from = host_bytes(host)?.0 as usize;
        lock(&self.refused).0.remove(&from);
        if let Some(tensor) = lock(&self.locked).remove(&from) {
            self.stream.synchronize().map_err(failed)?;
            // SAFETY: it was page-locked by this copier, and its tensor still lives.
            let code = unsafe { sys::cuMemHostUnregister(from as *mut _) };
            drop(tensor);
            if code != sys::CUresult::CUDA_SUCCESS {
                return Err(failed(code));
            }
        }
        Ok(())
    }

    /// Returns the tensor, for work that is queued from now on.
    pub(crate) fn receive(&self, mut arriving: Arriving) -> Result<Tensor> {
        let stood = arriving.computing.record_event(TIMED).map_err(failed)?;
        if let Some((_, _, arrived)) = &arriving.tensor {
            arriving.computing.wait(arrived).map_err(failed)?;
        }
        let Some((tensor, started, arrived)) = arriving.tensor.take() else {
            return Err(Error::internal("a tensor was received twice"));
        };
        let mut timed = lock(&self.timed);
        if timed.len() < MOST_TIMED {
            timed.push((started, arrived, stood));
        }
        Ok(tensor)
    }

    /// Starts the offload of a tensor to the host.
    pub(crate) fn offload(&self, tensor: Tensor) -> Result<Offloaded> {
        let from = address(&tensor, "a tensor that is offloaded")?;
        let len = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let mut host = self.pinned(len)?;
        // The copy starts after the compute work that is queued now, which completes the tensor.
        self.stream.join(&self.gpu.device().cuda_stream()).map_err(failed)?;
        let to = host.as_mut_slice().map_err(failed)?;
        // SAFETY: `to` has space for the bytes of the tensor; both live until `done`.
        unsafe { result::memcpy_dtoh_async(&mut to[..len], from, self.stream.cu_stream()) }.map_err(failed)?;
        let done = self.stream.record_event(None).map_err(failed)?;
        Ok(Offloaded {
            host: Some(host),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            leaving: Some(tensor),
            done,
        })
    }

    pub(crate) fn release(&self, offloaded: &mut Offloaded) -> Result<()> {
        if let Some(tensor) = offloaded.leaving.take() {
            self.gpu.device().cuda_stream().wait(&offloaded.done).map_err(failed)?;
            drop(tensor);
        }
        Ok(())
    }

    /// Starts the copy of an offloaded tensor back to the GPU.
    pub(crate) fn fetch(&self, mut offloaded: Offloaded) -> Result<Arriving> {
        self.release(&mut offloaded)?;
        let Some(host) = offloaded.host.take() else {
            return Err(Error::internal("an offloaded tensor was fetched twice"));
        };
        let tensor = self.gpu.empty(offloaded.shape.as_slice(), offloaded.dtype)?;
        let len = tensor.elem_count() * offloaded.dtype.size_in_bytes();
        let arriving = self.copy_to(tensor, &host.as_slice().map_err(failed)?[..len])?;
        lock(&self.free).entry(host.len()).or_default().push(host);
        Ok(arriving)
    }

    fn pinned(&self, len: usize) -> Result<Pinned> {
        let len = len.max(1);
        if let Some(found) = lock(&self.free).get_mut(&len).and_then(Vec::pop) {
            return Ok(found);
        }
        // SAFETY: it is filled before it is read.
        unsafe { self.stream.context().alloc_pinned_with_flags::<u8>(len, 0) }.map_err(|e| {
            let text = format!("{e:?}");
            Error::device("the host has no more pinned memory", &text)
                .found(text)
                .expected(format!("{len} bytes"))
                .hint("keep the layer inputs on the device")
        })
    }

    pub(crate) fn times(&self) -> Result<CopyTimes> {
        let mut sum = CopyTimes {
            refused: std::mem::take(&mut lock(&self.refused).1),
            ..CopyTimes::default()
        };
        let mut timed = lock(&self.timed);
        // In order: those of a step that is queued are left for the next call.
        let complete = timed
            .iter()
            .take_while(|(_, arrived, stood)| arrived.is_complete() && stood.is_complete());
        let complete = complete.count();
        for (started, arrived, stood) in timed.drain(..complete) {
            let copying = f64::from(started.elapsed_ms(&arrived).map_err(failed)?);
            // Negative if the tensor arrived before the compute stream needed it.
            let waiting = f64::from(stood.elapsed_ms(&arrived).map_err(failed)?);
            sum.copying += copying;
            sum.waiting += waiting.clamp(0.0, copying);
        }
        Ok(sum)
    }
}

/// Returns address and length in bytes of a host tensor. The address is valid as long as the tensor lives.
fn host_bytes(t: &Tensor) -> Result<(*const u8, usize)> {
    let (storage, layout) = t.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::shape("a tensor that is sent is not contiguous"));
    };
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::shape("a tensor that is sent is not on the host"));
    };
    let first = match storage {
        CpuStorage::F32(v) => v[start..end].as_ptr().cast(),
        CpuStorage::BF16(v) => v[start..end].as_ptr().cast(),
        CpuStorage::I16(v) => v[start..end].as_ptr().cast(),
        CpuStorage::U8(v) => v[start..end].as_ptr().cast(),
        CpuStorage::U32(v) => v[start..end].as_ptr().cast(),
        _ => return Err(Error::shape("a tensor of this dtype cannot be sent to a GPU").found(t.dtype().as_str())),
    };
    Ok((first, (end - start) * t.dtype().size_in_bytes()))
}
