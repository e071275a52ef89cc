//! The operations on a GPU. Activations are bf16, f16 or f32; the arithmetic is f32. Work is queued on candle's stream,
//! without synchronization except where a result goes to the host.
//!
//! Kernels get tensors as addresses. This is sound because one stream does all work on a device: earlier work is
//! complete before later work starts, and memory is freed in stream order too. Therefore a device must be created
//! by `Device::new_cuda_with_stream`, once, and cloned.

use candle_core::cuda::cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use candle_core::cuda::cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST_SHARED;
use candle_core::cuda::cudarc::driver::{
    CudaFunction, CudaModule, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg, result,
};
use candle_core::cuda::cudarc::nvrtc::Ptx;
use candle_core::cuda::{CudaStorageSlice, DeviceId};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Shape, Storage, Tensor};
use ft_base::{Error, Result};
use half::{bf16, f16};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

pub(crate) mod adafactor;
pub(crate) mod adapters;
pub(crate) mod altup;
pub(crate) mod attention;
pub(crate) mod attention_cached;
pub(crate) mod attention_sinks;
pub(crate) mod quantized;
mod columns;
pub(crate) mod cross_entropy;
pub(crate) mod cross_entropy_parts;
pub(crate) mod delta_rule;
pub(crate) mod device;
pub(crate) mod distill;
mod document_lists;
mod eight_bit;
mod distill_model;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod expert_pairs;
pub(crate) mod experts;
pub(crate) mod gemm;
pub(crate) mod glu;
pub(crate) mod graph;
pub(crate) mod grouped;
pub(crate) mod latent;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod memory;
mod name;
#[cfg(feature = "nccl")]
pub mod nccl;
pub(crate) mod pairs;
pub(crate) mod index_subset;
pub(crate) mod kv_block;
pub(crate) mod reduce;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod routing;
pub(crate) mod sample;
pub(crate) mod short_conv;
pub(crate) mod step;
pub(crate) mod transfer;

use name::{BF16, F16, IN_F16, KernelName};

/// Element type of an activation or weight on a GPU. It has the values of `Dtype`, and what a kernel launch needs beside
/// them: the parts of kernel names, and the check that a kernel has only one type of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatType {
    F32,
    Bf16,
    F16,
}

impl FloatType {
    /// Suffix of kernel names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "f32",
            FloatType::Bf16 => BF16,
            FloatType::F16 => F16,
        }
    }

    /// True for the types of 16 bits.
    pub(crate) fn is_short(self) -> bool {
        self != FloatType::F32
    }

    /// The part for a kernel name without a type: selects the module of f16.
    pub(crate) fn module(self) -> &'static str {
        match self {
            FloatType::F32 | FloatType::Bf16 => "",
            FloatType::F16 => IN_F16,
        }
    }

    /// As `module`, for operands whose types a kernel reads from a table.
    ///
    /// # Errors
    /// bf16 and f16: a kernel has one type of 16 bits.
    pub(crate) fn module_of(kinds: impl IntoIterator<Item = Self>) -> Result<&'static str> {
        let short = |kind: &Self| kind.is_short();
        let mut kinds = kinds.into_iter().filter(short);
        let first = kinds.next().unwrap_or(FloatType::F32);
        if kinds.any(|kind| kind != first) {
            return Err(name::mixed("the tensors of one launch"));
        }
        Ok(first.module())
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::Bf16 | FloatType::F16 => 2,
        }
    }

    /// Elements in 16 bytes, the unit of a vector load or store of one thread.
    pub(crate) fn pack(self) -> usize {
        16 / self.bytes()
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            FloatType::F32 => DType::F32,
            FloatType::Bf16 => DType::BF16,
            FloatType::F16 => DType::F16,
        }
    }

    /// Returns f32, bf16 or f16, else an error that calls the tensor `name`.
    pub(crate) fn of(t: &Tensor, name: &str) -> Result<Self> {
        match t.dtype() {
            DType::F32 => Ok(FloatType::F32),
            DType::BF16 => Ok(FloatType::Bf16),
            DType::F16 => Ok(FloatType::F16),
            _ => Err(wrong_type(t, name, "f32, bf16 or f16")),
        }
    }
}

fn wrong_type(t: &Tensor, name: &str, expected: &str) -> Error {
    Error::shape(format!("{name} has the wrong element type"))
        .found(t.dtype().as_str())
        .expected(expected)
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    Address(u64),
    I32(i32),
    I64(i64),
    U64(u64),
    F32(f32),
    F64(f64),
    /// Four f32 as one structure.
    Four([f32; 4]),
}

impl Arg {
    /// A count or a size as a 64-bit kernel argument.
    pub(crate) fn size(n: usize) -> Self {
        Arg::I64(n as i64)
    }

    /// A size as a 32-bit kernel argument.
    pub(crate) fn small(n: usize, name: &str) -> Result<Self> {
        Ok(Arg::I32(narrow(n, name)?))
    }
}

/// Converts `n` to a 32-bit number, for cuBLAS and for sizes inside a row.
pub(crate) fn narrow(n: usize, name: &str) -> Result<i32> {
    i32::try_from(n).map_err(|_| {
        Error::unsupported(format!("{name} is too large for the GPU"))
            .found(n)
            .expected(format!("at most {}", i32::MAX))
    })
}

/// Threads and blocks of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub blocks: (usize, usize),
    pub threads: (u32, u32),
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Grid {
    /// A one-dimensional grid of `blocks` blocks of `threads` threads.
    pub(crate) fn line(blocks: usize, threads: u32) -> Self {
        Self {
            blocks: (blocks, 1),
            threads: (threads, 1),
            shared: 0,
        }
    }

    /// A grid for a grid-stride loop over `items`: enough blocks to fill the GPU, not more.
    pub(crate) fn stride(items: usize) -> Self {
        const THREADS: usize = 256;
        const BLOCKS: usize = 4096;
        Self::line(items.div_ceil(THREADS).clamp(1, BLOCKS), THREADS as u32)
    }
}

/// The multiprocessors (SMs) of a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Multiprocessors {
    pub count: usize,
    /// Bytes of shared memory of each.
    pub shared: usize,
}

/// A device and its stream.
#[derive(Clone)]
pub(crate) struct Gpu {
    device: CudaDevice,
}

impl Gpu {
    /// Returns the GPU that holds `t`.
    pub(crate) fn of(t: &Tensor, name: &str) -> Result<Self> {
        match t.device() {
            Device::Cuda(device) => Ok(Self { device: device.clone() }),
            _ => Err(Error::shape(format!("{name} is not on the GPU")).found(format!("{:?}", t.device().location()))),
        }
    }

    /// Returns the GPU of `device`.
    pub(crate) fn on(device: &Device) -> Result<Self> {
        match device {
            Device::Cuda(device) => Ok(Self { device: device.clone() }),
            _ => Err(Error::shape("this device is not a GPU").found(format!("{:?}", device.location()))),
        }
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Returns the multiprocessors, whose numbers are queried once per device.
    pub(crate) fn multiprocessors(&self) -> Result<Multiprocessors> {
        let mut loaded = loaded()?;
        let place = match loaded.multiprocessors.entry(self.device.id()) {
            Entry::Occupied(found) => return Ok(*found.get()),
            Entry::Vacant(place) => place,
        };
        let stream = self.device.cuda_stream();
        let number = |attribute| match stream.context().attribute(attribute) {
            Ok(n) => Ok(n.max(1) as usize),
            Err(e) => Err(failed("reading the properties of the GPU", e)),
        };
        Ok(*place.insert(Multiprocessors {
            count: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        }))
    }

    /// Queues the kernel `name` of `cuda/MODULE.cu`.
    ///
    /// # Safety
    /// The arguments match the parameters of the kernel in order and type, and the kernel may access every address
    /// among them.
    pub(crate) unsafe fn launch(
        &self,
        module: &'static str,
        name: impl Into<KernelName>,
        grid: Grid,
        args: &[Arg],
    ) -> Result<()> {
        // SAFETY: promised by the caller; no structure is passed.
        unsafe { self.launch_with(module, name, grid, args, None::<&[u32; 1]>) }
    }

    /// As `launch`, with a last argument that is passed by value.
    ///
    /// # Safety
    /// As `launch`.
    pub(crate) unsafe fn launch_with<T: DeviceRepr>(
        &self,
        module: &'static str,
        name: impl Into<KernelName>,
        grid: Grid,
        args: &[Arg],
        last: Option<&T>,
    ) -> Result<()> {
        let name = name.into();
        const MOST: (usize, usize) = (i32::MAX as usize, 65_535);
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 {
            return Ok(());
        }
        if grid.blocks.0 > MOST.0 || grid.blocks.1 > MOST.1 {
            return Err(
                Error::unsupported(format!("a tensor is too large for the kernel `{name}`"))
                    .found(format!("{:?} blocks", grid.blocks)),
            );
        }
        let function = self.function(module, name, grid.shared)?;
        let stream = self.device.cuda_stream();
        let mut builder = stream.launch_builder(function);
        for arg in args {
            match arg {
                Arg::Address(x) | Arg::U64(x) => builder.arg(x),
                Arg::I32(x) => builder.arg(x),
                Arg::I64(x) => builder.arg(x),
                Arg::F32(x) => builder.arg(x),
                Arg::F64(x) => builder.arg(x),
                Arg::Four(x) => builder.arg(x),
            };
        }
        if let Some(last) = last {
            builder.arg(last);
        }
        let config = LaunchConfig {
            grid_dim: (grid.blocks.0 as u32, grid.blocks.1 as u32, 1),
            block_dim: (grid.threads.0, grid.threads.1, 1),
            shared_mem_bytes: grid.shared,
        };
        // SAFETY: promised by the caller.
        unsafe { builder.launch(config) }.map_err(|e| failed(name, e))?;
        self.check(name)
    }

    /// With `FT_CUDA_SYNC=1`: waits for the work that was queued, so that its error has the right name. Otherwise a
    /// later call reports it, under its own name.
    fn check(&self, what: impl fmt::Display) -> Result<()> {
        if waits_for_each() {
            self.device.cuda_stream().synchronize().map_err(|e| failed(what, e))
        } else {
            Ok(())
        }
    }

    /// Returns the kernel, loaded once per device, with permission for `shared` bytes of dynamic shared memory.
    fn function(&self, module: &'static str, name: KernelName, shared: u32) -> Result<&'static CudaFunction> {
        /// A launch can have as much without permission.
        const USUAL_SHARED: u32 = 48 << 10;
        let mut guard = loaded()?;
        let loaded = &mut *guard;
        let place = match loaded.kernels.entry((self.device.id(), module, name)) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => {
                let code = self.module(&mut loaded.modules, name.module(module)?)?;
                let text = name.kernel();
                let function = code.load_function(&text).map_err(|e| failed(&text, e))?;
                // Kernels live as long as the process.
                place.insert((Box::leak(Box::new(function)), USUAL_SHARED))
            }
        };
        let (function, permitted) = place;
        if shared > *permitted {
            function.set_attribute(MOST_SHARED, shared as i32).map_err(|e| {
                Error::unsupported(format!("the GPU has too little shared memory for `{name}`")).cause(e)
            })?;
            *permitted = shared;
        }
        Ok(function)
    }

    fn module(&self, loaded: &mut Modules, module: &'static str) -> Result<Arc<CudaModule>> {
        let place = match loaded.entry((self.device.id(), module)) {
            Entry::Occupied(found) => return Ok(found.get().clone()),
            Entry::Vacant(place) => place,
        };
        let binary = ft_kernels::module(module)
            .ok_or_else(|| Error::internal(format!("this build has no CUDA module `{module}`")))?;
        let context = self.device.cuda_stream().context().clone();
        let load = || {
            let code = context.load_module(Ptx::from_binary(binary.to_vec()));
            code.map_err(|e| failed(module, e))
        };
        let is_full = crate::device::out_of_memory;
        let code = match load() {
            Err(e) if is_full(&e) => {
                device::trim(&self.device)?;
                load()
            }
            code => code,
        };
        let code = code.map_err(|e| {
            if is_full(&e) {
                return e;
            }
            e.hint(
                "the GPU must have compute capability 8.0 or more, and the driver must be as new as the toolkit of \
                 this build: see `device::gpus`",
            )
        })?;
        Ok(place.insert(code).clone())
    }

    /// Returns an uninitialized tensor, which the caller must write before it is read. If there is no memory, the pool
    /// is trimmed first, then it is an error.
    pub(crate) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        // A tensor without elements still needs an address.
        let n = shape.elem_count().max(1);
        let slice = match self.allocate(n, dtype) {
            Err(e) if crate::device::out_of_memory(&e) => {
                device::trim(&self.device)?;
                self.allocate(n, dtype).map_err(|e| self.full(n, dtype, e))?
            }
            other => other?,
        };
        Ok(self.wrap(slice, shape))
    }

    fn allocate(&self, n: usize, dtype: DType) -> Result<CudaStorageSlice> {
        let device = &self.device;
        // SAFETY: every caller is an operation that fills the tensor.
        Ok(unsafe {
            match dtype {
                DType::F32 => CudaStorageSlice::F32(device.alloc::<f32>(n)?),
                DType::BF16 => CudaStorageSlice::BF16(device.alloc::<bf16>(n)?),
                DType::F16 => CudaStorageSlice::F16(device.alloc::<f16>(n)?),
                DType::F64 => CudaStorageSlice::F64(device.alloc::<f64>(n)?),
                DType::U32 => CudaStorageSlice::U32(device.alloc::<u32>(n)?),
                DType::I16 => CudaStorageSlice::I16(device.alloc::<i16>(n)?),
                DType::U8 => CudaStorageSlice::U8(device.alloc::<u8>(n)?),
                other => return Err(Error::unsupported("no GPU memory for this element type").found(other.as_str())),
            }
        })
    }

    /// An out-of-memory error with the state of the pool.
    fn full(&self, n: usize, dtype: DType, e: Error) -> Error {
        let wanted = ft_base::units::bytes((n * dtype.size_in_bytes()) as u64);
        let Ok(memory) = device::memory(&self.device) else {
            return e;
        };
        let [used, reserved, free] = [memory.used, memory.reserved, memory.free].map(ft_base::units::bytes);
        Error::out_of_memory(format!("the GPU has no memory for a tensor of {wanted}"))
            .found(format!(
                "tensors of {used}, {reserved} reserved for them, {free} of the GPU free"
            ))
            .cause(e)
    }

    /// Returns a tensor of zeros.
    pub(crate) fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let tensor = self.empty(shape, dtype)?;
        let (to, bytes) = (address(&tensor, "zeros")?, tensor.elem_count() * dtype.size_in_bytes());
        let stream = self.device.cuda_stream();
        stream.context().bind_to_thread().map_err(|e| failed("zeros", e))?;
        if bytes > 0 {
            // SAFETY: the tensor has this number of bytes, and zero bytes are zero in every type.
            unsafe { result::memset_d8_async(to, 0, bytes, stream.cu_stream()) }.map_err(|e| failed("zeros", e))?;
        }
        Ok(tensor)
    }

    /// Uploads u32 values to the device.
    pub(crate) fn upload_u32(&self, values: &[u32]) -> Result<Tensor> {
        if values.is_empty() {
            return self.empty(0, DType::U32);
        }
        graph::forbid_copy("numbers")?;
        // Past candle's copies for graphs (`graph::UploadCache`): these numbers do not come again.
        let slice = self.device.cuda_stream().clone_htod(values);
        let slice = slice.map_err(|e| failed("an upload", e))?;
        Ok(self.wrap(CudaStorageSlice::U32(slice), values.len().into()))
    }

    /// Uploads bytes (a table that a kernel reads) to the device.
    pub(crate) fn upload_bytes(&self, values: &[u8]) -> Result<Tensor> {
        if values.is_empty() {
            return self.empty(0, DType::U8);
        }
        graph::forbid_copy("a table")?;
        // As in `upload_u32`.
        let slice = self.device.cuda_stream().clone_htod(values);
        let slice = slice.map_err(|e| failed("an upload", e))?;
        Ok(self.wrap(CudaStorageSlice::U8(slice), values.len().into()))
    }

    fn wrap(&self, slice: CudaStorageSlice, shape: Shape) -> Tensor {
        let storage = CudaStorage {
            slice,
            device: self.device.clone(),
        };
        Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
    }
}

/// `FT_CUDA_SYNC=1`
#[allow(clippy::disallowed_methods)] // valid for every program that uses the operations
fn waits_for_each() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os("FT_CUDA_SYNC").is_some_and(|v| v == "1"))
}

/// Not `FT_CUDA_GRAPHS=0`, and no wait for each kernel.
#[allow(clippy::disallowed_methods)] // valid for every program that uses the operations
fn graphs_wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    !waits_for_each() && *WANTED.get_or_init(|| std::env::var_os("FT_CUDA_GRAPHS").is_none_or(|v| v != "0"))
}

type Modules = HashMap<(DeviceId, &'static str), Arc<CudaModule>>;

/// The modules that are loaded, by device and module.
#[derive(Default)]
struct LoadedModules {
    modules: Modules,
    multiprocessors: HashMap<DeviceId, Multiprocessors>,
    /// With the dynamic shared memory that a launch may have.
    kernels: HashMap<(DeviceId, &'static str, KernelName), (&'static CudaFunction, u32)>,
}

fn loaded() -> Result<MutexGuard<'static, LoadedModules>> {
    static LOADED: OnceLock<Mutex<LoadedModules>> = OnceLock::new();
    LOADED
        .get_or_init(Mutex::default)
        .lock()
        .map_err(|_| Error::internal("another thread failed while it used the list of CUDA kernels"))
}

fn failed(what: impl fmt::Display, e: impl fmt::Display) -> Error {
    let text = e.to_string();
    Error::device(format!("CUDA failed on `{what}`"), &text).cause(text)
}

/// Returns the address of the first element of a contiguous tensor on the GPU. It stays valid as long as the tensor
/// lives.
pub(crate) fn address(t: &Tensor, name: &str) -> Result<u64> {
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(Error::shape(format!("{name} is not on the GPU")).found(format!("{:?}", t.device().location())));
    };
    let (start, _) = layout
        .contiguous_offsets()
        .ok_or_else(|| Error::shape(format!("{name} is not contiguous")))?;
    let stream = storage.device.cuda_stream();
    let (first, bytes) = match &storage.slice {
        CudaStorageSlice::F32(s) => (s.device_ptr(&stream).0, 4),
        CudaStorageSlice::BF16(s) => (s.device_ptr(&stream).0, 2),
        CudaStorageSlice::F16(s) => (s.device_ptr(&stream).0, 2),
        CudaStorageSlice::F64(s) => (s.device_ptr(&stream).0, 8),
        CudaStorageSlice::U32(s) => (s.device_ptr(&stream).0, 4),
        CudaStorageSlice::I16(s) => (s.device_ptr(&stream).0, 2),
        CudaStorageSlice::U8(s) => (s.device_ptr(&stream).0, 1),
        _ => return Err(wrong_type(t, name, "f32, bf16, f16, f64, u32, i16 or u8")),
    };
    Ok(first + (start * bytes) as u64)
}

/// As `address`, for a tensor of type `dtype`.
pub(crate) fn address_of(t: &Tensor, name: &str, dtype: DType) -> Result<u64> {
    if t.dtype() != dtype {
        return Err(wrong_type(t, name, dtype.as_str()));
    }
    address(t, name)
}

/// True if all of these addresses are aligned to 16 bytes.
pub(crate) fn aligned(addresses: &[u64]) -> bool {
    addresses.iter().all(|a| a.is_multiple_of(16))
}
