//! Copies between host memory and a GPU on a separate copy stream.
//!
//! GPU memory is allocated and freed in the order of the compute stream, so events tie each copy to that stream. A
//! copy to the GPU starts after its target memory is free, and the compute stream waits for it before use. The
//! memory of a tensor that is offloaded is freed after a wait for the copy.

use super::memory::failed;
use super::{Gpu, address};
use crate::transfer::{CopyTimes, HostMemory, STAGING};
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice, result, sys};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use ft_base::sync::lock;
use ft_base::{Error, Result};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

const TIMED: Option<sys::CUevent_flags> = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
/// Smaller tensors are not page-locked: the gain is too small.
const LEAST_LOCKED: usize = 1 << 16;
/// Largest number of copies with pending time measurements; later copies are not measured.
const MOST_TIMED: usize = 4096;

/// Pinned host memory.
type PinnedMemory = PinnedHostSlice<u8>;

/// Pinned buffers of one size, for memory that is not page-locked, with the end of the last copy that reads each. The
/// oldest is in front.
type PinnedRing = VecDeque<(PinnedMemory, CudaEvent)>;

/// A copy that reads host memory.
pub(crate) type GpuHostRead = Arc<CudaEvent>;

/// Waits for the copy.
pub(crate) fn wait(read: &GpuHostRead) -> Result<()> {
    read.synchronize().map_err(failed)
}

/// A tensor during its copy to the GPU.
pub(crate) struct GpuArriving {
    /// None after `receive`.
    tensor: Option<(Tensor, CudaEvent, Arc<CudaEvent>)>,
    computing: Arc<CudaStream>,
    /// True if the copy reads the memory of the host tensor.
    in_place: bool,
}

impl GpuArriving {
    /// The copy, if it reads the memory of the host tensor.
    pub(crate) fn read(&self) -> Option<GpuHostRead> {
        let tensor = self.tensor.as_ref().filter(|_| self.in_place);
        tensor.map(|(_, _, arrived)| arrived.clone())
    }
}

impl Drop for GpuArriving {
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
pub(crate) struct GpuOffloaded {
    host: Option<PinnedMemory>,
    shape: Vec<usize>,
    dtype: DType,
    /// The tensor on the GPU, until `release` releases it.
    leaving: Option<Tensor>,
    done: CudaEvent,
}

impl Drop for GpuOffloaded {
    fn drop(&mut self) {
        // The copy must not write to pinned memory that is freed.
        if self.host.is_some() {
            let _ = self.done.synchronize();
        }
    }
}

/// The copy stream of one GPU.
pub(crate) struct GpuCopier {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    /// Page-locked host tensors, by address; each is kept alive while it is locked.
    locked: Mutex<BTreeMap<usize, Tensor>>,
    /// Host tensors that the system refused to page-lock, and their bytes since the last call of `times`.
    refused: Mutex<(BTreeSet<usize>, u64)>,
    /// Free pinned memory, by size. All copies run on one stream, so a new write comes after the old read.
    free: Mutex<BTreeMap<usize, Vec<PinnedMemory>>>,
    /// Copies whose times are not read yet: start of the copy, its end, and the point where the compute stream
    /// waited for it.
    timed: Mutex<Vec<(CudaEvent, Arc<CudaEvent>, CudaEvent)>>,
    /// As `STAGING`.
    staging: [Mutex<PinnedRing>; 2],
}

impl Drop for GpuCopier {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        for address in std::mem::take(&mut *lock(&self.locked)).keys() {
            // SAFETY: it was page-locked by this copier, and its tensor still lives.
            let _ = unsafe { sys::cuMemHostUnregister(*address as *mut _) };
        }
    }
}

impl GpuCopier {
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
            staging: Default::default(),
        })
    }

    /// Starts the upload of a contiguous host tensor; see `ops::transfer`.
    pub(crate) fn send(&self, host: &Tensor, memory: HostMemory) -> Result<GpuArriving> {
        let (from, len) = host_bytes(host)?;
        let in_place = memory != HostMemory::Temporary && len >= LEAST_LOCKED && self.lock_in_memory(host)?;
        // SAFETY: the tensor holds this number of bytes. Page-locked memory stays alive and unchanged by the promise of
        // the caller; other memory is read before `send` returns.
        let bytes = unsafe { std::slice::from_raw_parts(from, len) };
        let tensor = self.gpu.empty(host.dims(), host.dtype())?;
        self.copy_to(tensor, bytes, in_place)
    }

    /// Starts the copy of the bytes to a new tensor. `locked`: they are page-locked.
    fn copy_to(&self, tensor: Tensor, bytes: &[u8], locked: bool) -> Result<GpuArriving> {
        let to = address(&tensor, "a tensor that is sent")?;
        let computing = self.gpu.device().cuda_stream();
        // Earlier work that is still queued may read the memory of this allocation.
        self.stream.join(&computing).map_err(failed)?;
        let started = self.stream.record_event(TIMED).map_err(failed)?;
        if !locked {
            self.stage(to, bytes)?;
        } else if !bytes.is_empty() {
            // SAFETY: the tensor has space for the bytes.
            unsafe { result::memcpy_htod_async(to, bytes, self.stream.cu_stream()) }.map_err(failed)?;
        }
        let arrived = self.stream.record_event(TIMED).map_err(failed)?;
        Ok(GpuArriving {
            tensor: Some((tensor, started, Arc::new(arrived))),
            computing,
            in_place: locked,
        })
    }

    /// Starts the copy of bytes that are not page-locked, through pinned buffers.
    fn stage(&self, to: u64, bytes: &[u8]) -> Result<()> {
        let large = usize::from(bytes.len() > STAGING[0].0);
        let (size, most) = STAGING[large];
        let mut ring = lock(&self.staging[large]);
        for (to, piece) in (to..).step_by(size).zip(bytes.chunks(size)) {
            let is_free = ring.front().is_some_and(|(_, read)| read.is_complete());
            let oldest = if is_free || ring.len() == most {
                ring.pop_front()
            } else {
                None
            };
            let mut buffer = match oldest {
                Some((buffer, read)) => {
                    read.synchronize().map_err(failed)?;
                    buffer
                }
                None => self.new_pinned(size)?,
            };
            buffer.as_mut_slice().map_err(failed)?[..piece.len()].copy_from_slice(piece);
            let from = &buffer.as_slice().map_err(failed)?[..piece.len()];
            // SAFETY: the target has space for the bytes; the buffer is used again after `read` only.
            unsafe { result::memcpy_htod_async(to, from, self.stream.cu_stream()) }.map_err(failed)?;
            let read = self.stream.record_event(None).map_err(failed)?;
            ring.push_back((buffer, read));
        }
        Ok(())
    }

    /// Page-locks the whole memory of which `host` is a part. If the system refuses, copies are slower but still correct.
    fn lock_in_memory(&self, host: &Tensor) -> Result<bool> {
        let (from, len) = host_storage(host)?;
        let from = from as usize;
        let mut locked = lock(&self.locked);
        if locked.contains_key(&from) {
            return Ok(true);
        }
        let mut refused = lock(&self.refused);
        if refused.0.contains(&from) {
            return Ok(false);
        }
        self.stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the memory belongs to the tensor, of which a clone is kept until it is unlocked.
        let code = unsafe { sys::cuMemHostRegister_v2(from as *mut _, len, 0) };
        let done = code == sys::CUresult::CUDA_SUCCESS;
        if done {
            locked.insert(from, host.clone());
        } else {
            refused.0.insert(from);
            refused.1 += len as u64;
        }
        Ok(done)
    }

    /// Unlocks the memory of a tensor, after all copies that read it are complete.
    pub(crate) fn forget(&self, host: &Tensor) -> Result<()> {
        let from = host_storage(host)?.0 as usize;
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
    pub(crate) fn receive(&self, mut arriving: GpuArriving) -> Result<Tensor> {
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
    pub(crate) fn offload(&self, tensor: Tensor) -> Result<GpuOffloaded> {
        let from = address(&tensor, "a tensor that is offloaded")?;
        let len = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let mut host = self.pinned(len)?;
        // The copy starts after the compute work that is queued now, which completes the tensor.
        self.stream.join(&self.gpu.device().cuda_stream()).map_err(failed)?;
        let to = host.as_mut_slice().map_err(failed)?;
        // SAFETY: `to` has space for the bytes of the tensor; both live until `done`.
        unsafe { result::memcpy_dtoh_async(&mut to[..len], from, self.stream.cu_stream()) }.map_err(failed)?;
        let done = self.stream.record_event(None).map_err(failed)?;
        Ok(GpuOffloaded {
            host: Some(host),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            leaving: Some(tensor),
            done,
        })
    }

    pub(crate) fn release(&self, offloaded: &mut GpuOffloaded) -> Result<()> {
        if let Some(tensor) = offloaded.leaving.take() {
            self.gpu.device().cuda_stream().wait(&offloaded.done).map_err(failed)?;
            drop(tensor);
        }
        Ok(())
    }

    /// Waits for an offloaded f32 tensor, and adds its elements to the list.
    pub(crate) fn read(&self, mut offloaded: GpuOffloaded, list: &mut Vec<f32>) -> Result<()> {
        offloaded.done.synchronize().map_err(failed)?;
        let len = offloaded.shape.iter().product::<usize>() * offloaded.dtype.size_in_bytes();
        if offloaded.dtype != DType::F32 {
            return Err(Error::internal("a tensor was read as another type").found(offloaded.dtype.as_str()));
        }
        let Some(host) = offloaded.host.take() else {
            return Err(Error::internal("an offloaded tensor was fetched twice"));
        };
        let (values, _) = host.as_slice().map_err(failed)?[..len].as_chunks();
        list.extend(values.iter().map(|value| f32::from_ne_bytes(*value)));
        lock(&self.free).entry(host.len()).or_default().push(host);
        Ok(())
    }

    /// Starts the copy of an offloaded tensor back to the GPU.
    pub(crate) fn fetch(&self, mut offloaded: GpuOffloaded) -> Result<GpuArriving> {
        self.release(&mut offloaded)?;
        let Some(host) = offloaded.host.take() else {
            return Err(Error::internal("an offloaded tensor was fetched twice"));
        };
        let tensor = self.gpu.empty(offloaded.shape.as_slice(), offloaded.dtype)?;
        let len = tensor.elem_count() * offloaded.dtype.size_in_bytes();
        let arriving = self.copy_to(tensor, &host.as_slice().map_err(failed)?[..len], true)?;
        lock(&self.free).entry(host.len()).or_default().push(host);
        Ok(arriving)
    }

    fn pinned(&self, len: usize) -> Result<PinnedMemory> {
        let len = len.max(1);
        if let Some(found) = lock(&self.free).get_mut(&len).and_then(Vec::pop) {
            return Ok(found);
        }
        self.new_pinned(len)
    }

    fn new_pinned(&self, len: usize) -> Result<PinnedMemory> {
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

/// Returns address and length in bytes of a contiguous host tensor. The address is valid as long as the tensor lives.
fn host_bytes(t: &Tensor) -> Result<(*const u8, usize)> {
    let (_, layout) = t.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::shape("a tensor that is sent is not contiguous"));
    };
    let size = t.dtype().size_in_bytes();
    let (first, _) = host_storage(t)?;
    Ok((first.wrapping_add(start * size), (end - start) * size))
}

/// Returns address and length in bytes of the memory of which a host tensor is a part.
fn host_storage(t: &Tensor) -> Result<(*const u8, usize)> {
    fn whole<T>(v: &[T]) -> (*const u8, usize) {
        (v.as_ptr().cast(), size_of_val(v))
    }
    let (storage, _) = t.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::shape("a tensor that is sent is not on the host"));
    };
    Ok(match storage {
        CpuStorage::F32(v) => whole(v),
        CpuStorage::BF16(v) => whole(v),
        CpuStorage::F16(v) => whole(v),
        CpuStorage::I16(v) => whole(v),
        CpuStorage::U8(v) => whole(v),
        CpuStorage::U32(v) => whole(v),
        _ => return Err(Error::shape("a tensor of this dtype cannot be sent to a GPU").found(t.dtype().as_str())),
    })
}
