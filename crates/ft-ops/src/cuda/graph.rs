//! CUDA graphs by the capture of candle's stream.
//!
//! The tensors that are made in a capture become nodes that allocate and free, at addresses of their own ("Stream Ordered
//! Memory Allocator" and "Graph Memory Nodes" in the CUDA programming guide). A launch is complete before the next one of the
//! same stream, so it finds their memory free. The device does not track uses by events (`device::open`), so nothing but the
//! work itself is recorded. cuBLAS may be captured with host factors, whose values are recorded; a workspace that it needs
//! becomes a node too ("CUDA Graphs Support" in its manual).

use super::memory::failed;
use super::{Gpu, Grid, address, device};
use crate::graph::refused;
use candle_core::cuda::cudarc::driver::{CudaGraph, CudaStream, DeviceRepr, result, sys};
use candle_core::{Device, Tensor};
use ft_base::{Error, Result};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use sys::CUgraphMem_attribute_enum as Attribute;

/// A graph, and its instance.
pub(crate) struct RecordedGraph {
    graph: CudaGraph,
    gpu: Gpu,
    /// Tensors that it reads, and that others may drop.
    _kept: Vec<Tensor>,
}

thread_local! {
    /// During a capture of this thread, tensors for `RecordedGraph`.
    static KEPT: RefCell<Option<Vec<Tensor>>> = const { RefCell::new(None) };
}

/// A tensor of a cache that is used now: a graph that is captured keeps it.
pub(crate) fn keep(tensor: &Tensor) {
    KEPT.with_borrow_mut(|kept| kept.iter_mut().for_each(|kept| kept.push(tensor.clone())));
}

/// candle's guard, whose type it does not export.
pub(crate) type KeptStrides = Box<dyn Any>;

pub(crate) fn keep_strides(device: &Device) -> Option<KeptStrides> {
    match device {
        Device::Cuda(device) => Some(Box::new(device.enable_cuda_graph_htod_cache())),
        _ => None,
    }
}

pub(crate) fn available(device: &Device) -> bool {
    match device {
        Device::Cuda(device) => super::graphs_wanted() && device.cuda_stream().context().has_async_alloc(),
        _ => false,
    }
}

/// See `crate::graph::Graph::capture`.
pub(crate) fn capture(device: &Device, f: impl FnOnce() -> Result<()>) -> Result<Option<RecordedGraph>> {
    let gpu = Gpu::on(device)?;
    let stream = gpu.device().cuda_stream();
    // Another thread may open a device or allocate meanwhile. Its work on this stream would be recorded, so one thread
    // at a time uses a device with graphs (`generate::GenerateLimits::graphs_after`).
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    if let Err(e) = stream.begin_capture(mode) {
        refused(format!("{e:?}"));
        return Ok(None);
    }
    KEPT.set(Some(Vec::new()));
    let capturing = CaptureGuard(&stream);
    let done = f();
    drop(capturing);
    let kept = KEPT.take().unwrap_or_default();
    // A tensor that is dropped in an invalid capture leaves an error behind, with which the next call would end at once.
    let left = stream.context().check_err();
    let ended = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    match (done, ended, left) {
        (Ok(()), Ok(Some(graph)), Ok(())) => {
            let (made, dropped) = allocations(&graph)?;
            if made != dropped {
                refused(format!(
                    "memory outlives the graph in which it was made: {made} made, {dropped} dropped"
                ));
                return Ok(None);
            }
            Ok(Some(RecordedGraph {
                graph,
                gpu,
                _kept: kept,
            }))
        }
        (Ok(()), ended, left) => {
            refused(format!("{:?}, {left:?}", ended.map(|_| ())));
            Ok(None)
        }
        // If the work itself is wrong, it fails again without a graph.
        (Err(e), ..) => {
            refused(e);
            Ok(None)
        }
    }
}

/// Ends the capture if the work panics: otherwise no call could use the stream again.
struct CaptureGuard<'a>(&'a Arc<CudaStream>);

impl Drop for CaptureGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            KEPT.take();
            let _ = self.0.context().check_err();
            let _ = self.0.end_capture(sys::CUgraphInstantiate_flags(0));
        }
    }
}

/// Refuses a copy between host and GPU in a capture: the driver may record it, with an address of the host that is not valid when
/// the graph runs.
///
/// # Errors
/// This thread captures.
pub(crate) fn forbid_copy(what: &str) -> Result<()> {
    if KEPT.with_borrow(Option::is_some) {
        return Err(Error::unsupported("a copy between host and GPU in the capture of a CUDA graph").found(what));
    }
    Ok(())
}

/// The numbers of nodes that allocate and that free.
fn allocations(graph: &CudaGraph) -> Result<(usize, usize)> {
    let mut count = 0;
    // SAFETY: the graph is alive; with a null pointer CUDA writes the number of nodes only.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), null_mut(), &mut count).result() }.map_err(failed)?;
    let mut nodes = vec![null_mut(); count];
    // SAFETY: `nodes` has an element for each node.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &mut count).result() }.map_err(failed)?;
    let (mut made, mut dropped) = (0, 0);
    for node in nodes {
        let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of a graph that lives, and a place for its type.
        unsafe { sys::cuGraphNodeGetType(node, &mut kind).result() }.map_err(failed)?;
        match kind {
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => made += 1,
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE => dropped += 1,
            _ => {}
        }
    }
    Ok((made, dropped))
}

impl RecordedGraph {
    pub(crate) fn launch(&self) -> Result<()> {
        let launched = match self.graph.launch() {
            // The pool of the tensors may have memory that it does not use.
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                device::trim(self.gpu.device())?;
                self.graph.launch()
            }
            other => other,
        };
        launched.map_err(|e| super::failed("a CUDA graph", e))
    }
}

/// The caller checked shapes and types.
pub(crate) fn overwrite(to: &Tensor, from: &Tensor) -> Result<()> {
    let bytes = to.elem_count() * to.dtype().size_in_bytes();
    let (target, source) = (address(to, "a tensor that stays")?, address(from, "its new elements")?);
    let stream = Gpu::of(to, "a tensor that stays")?.device().cuda_stream();
    stream.context().bind_to_thread().map_err(failed)?;
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: both are contiguous and have this number of bytes.
    unsafe { result::memcpy_dtod_async(target, source, bytes, stream.cu_stream()) }.map_err(failed)
}

/// Most copies of one launch, as in `cuda/copies.cu`.
const COPIES: usize = 64;

/// As in `cuda/copies.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TensorCopies {
    from: [u64; COPIES],
    to: [u64; COPIES],
    bytes: [u64; COPIES],
}

// SAFETY: numbers only, in the order of the structure of the kernel.
unsafe impl DeviceRepr for TensorCopies {}

/// As `overwrite`, for several tensors in one launch.
pub(crate) fn overwrite_all(pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    const THREADS: usize = 256;
    /// Blocks of one copy.
    const BLOCKS: usize = 128;
    for pairs in pairs.chunks(COPIES) {
        let Some((first, _)) = pairs.first() else { continue };
        let mut copies = TensorCopies {
            from: [0; COPIES],
            to: [0; COPIES],
            bytes: [0; COPIES],
        };
        for (i, (to, from)) in pairs.iter().enumerate() {
            copies.to[i] = address(to, "a tensor that stays")?;
            copies.from[i] = address(from, "its new elements")?;
            copies.bytes[i] = (to.elem_count() * to.dtype().size_in_bytes()) as u64;
        }
        let largest = copies.bytes.iter().max().map_or(0, |bytes| *bytes as usize);
        let grid = Grid {
            blocks: (largest.div_ceil(16 * THREADS).clamp(1, BLOCKS), pairs.len()),
            threads: (THREADS as u32, 1),
            shared: 0,
        };
        let gpu = Gpu::of(first, "a tensor that stays")?;
        // SAFETY: both tensors of each pair have this number of bytes, and live until the launch is queued.
        unsafe { gpu.launch_with("copies", "copy_tensors", grid, &[], Some(&copies)) }?;
    }
    Ok(())
}

pub(crate) fn release_memory(device: &Device) -> Result<()> {
    let gpu = Gpu::on(device)?;
    let stream = gpu.device().cuda_stream();
    stream.synchronize().map_err(failed)?;
    // SAFETY: the device is open; memory that a graph uses stays.
    unsafe { sys::cuDeviceGraphMemTrim(stream.context().cu_device()).result() }.map_err(failed)
}

pub(crate) fn memory(device: &Device) -> Result<(u64, u64)> {
    let of = Gpu::on(device)?.device().cuda_stream().context().cu_device();
    let read = |attribute| -> Result<u64> {
        let mut value = 0u64;
        let place = (&mut value as *mut u64).cast::<c_void>();
        // SAFETY: these attributes are 64-bit numbers, as `value` is.
        unsafe { sys::cuDeviceGetGraphMemAttribute(of, attribute, place).result() }.map_err(failed)?;
        Ok(value)
    };
    Ok((
        read(Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)?,
        read(Attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)?,
    ))
}
