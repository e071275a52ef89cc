//! A GPU: one stream, its own memory pool with a limit, and statistics of the pool. A GPU without memory pools (some
//! virtual GPUs) allocates synchronously, without a limit.

use crate::device::{DeviceMemory, GpuProperties};
use candle_core::cuda::cudarc::cublas::sys::cublasGetVersion_v2;
use candle_core::cuda::cudarc::driver::{CudaContext, result, sys};
use candle_core::{CudaDevice, Device};
use ft_base::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use sys::CUmemPool_attribute_enum as Attribute;

fn driver(what: &str) -> impl Fn(result::DriverError) -> Error + '_ {
    move |e| {
        let text = format!("{e:?}");
        Error::device(format!("{what} failed"), &text).found(text)
    }
}

/// Opens GPU `ordinal` with its own stream; freed memory stays in the pool. Every call returns the same device:
/// tensors of two devices cannot be mixed, and addresses are only valid in the order of one stream.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    static OPENED: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = opened.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = create(ordinal)?;
    opened.insert(ordinal, device.clone());
    Ok(device)
}

/// Number of GPUs; 0 if the driver does not respond.
pub(crate) fn count() -> usize {
    CudaContext::device_count().map_or(0, |count| count.max(0) as usize)
}

fn create(ordinal: usize) -> Result<Device> {
    let found = CudaContext::device_count().map_err(|e| {
        Error::new("the CUDA driver does not respond")
            .found(format!("{e:?}"))
            .hint("`nvidia-smi` must work; `device::gpus` lists the devices that ft detects")
    })?;
    if ordinal >= found.max(0) as usize {
        return Err(Error::not_found(format!("the GPU `cuda:{ordinal}` does not exist")).found(format!("{found} GPUs")));
    }
    let problems = describe(ordinal)?.problems(ft_kernels::toolkit());
    if !problems.is_empty() {
        return Err(
            Error::unsupported(format!("this build of ft cannot use the GPU `cuda:{ordinal}`"))
                .found(problems.join("; ")),
        );
    }
    let device = Device::new_cuda_with_stream(ordinal).map_err(|e| {
        let text = e.to_string();
        Error::device(format!("GPU `cuda:{ordinal}` cannot be used"), &text)
            .found(text)
            .hint("compare the versions of driver and libraries with `device::gpus`")
    })?;
    if let Device::Cuda(device) = &device {
        // SAFETY: no tensor exists yet, and every tensor of this device is used on its one stream only.
        unsafe { device.disable_event_tracking() };
        if has_pools(device)? {
            keep_freed_memory(device)?;
        }
    }
    Ok(device)
}

fn has_pools(device: &CudaDevice) -> Result<bool> {
    const POOLS: sys::CUdevice_attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    let context = device.cuda_stream().context().clone();
    Ok(context.attribute(POOLS).map_err(driver("querying the memory pools"))? > 0)
}

fn pool(device: &CudaDevice) -> Result<sys::CUmemoryPool> {
    let mut pool = std::ptr::null_mut();
    let cu_device = device.cuda_stream().context().cu_device();
    // SAFETY: `pool` is a valid output address, the device was opened.
    unsafe { sys::cuDeviceGetMemPool(&mut pool, cu_device).result() }.map_err(driver("getting the memory pool"))?;
    Ok(pool)
}

fn get(pool: sys::CUmemoryPool, attribute: Attribute) -> Result<u64> {
    let mut value = 0u64;
    let place = (&mut value as *mut u64).cast::<c_void>();
    // SAFETY: these attributes are 64-bit numbers, as `value` is.
    unsafe { result::mem_pool::get_attribute(pool, attribute, place) }.map_err(driver("reading the memory pool"))?;
    Ok(value)
}

fn set(pool: sys::CUmemoryPool, attribute: Attribute, mut value: u64) -> Result<()> {
    let place = (&mut value as *mut u64).cast::<c_void>();
    // SAFETY: as in `get`.
    unsafe { result::mem_pool::set_attribute(pool, attribute, place) }.map_err(driver("setting the memory pool"))
}

/// By default every synchronization may return freed memory to the driver, and the next step allocates it again.
fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
    set(pool(device)?, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
}

/// Returns current and peak usage of the pool; without pools that of the whole GPU, now.
pub(crate) fn memory(device: &CudaDevice) -> Result<DeviceMemory> {
    let context = device.cuda_stream().context().clone();
    let (free, total) = context.mem_get_info().map_err(driver("querying free memory"))?;
    if !has_pools(device)? {
        let used = total.saturating_sub(free) as u64;
        return Ok(DeviceMemory {
            used,
            peak_used: used,
            reserved: used,
            peak_reserved: used,
            free: free as u64,
            total: total as u64,
        });
    }
    let pool = pool(device)?;
    Ok(DeviceMemory {
        used: get(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        peak_used: get(pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        reserved: get(pool, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        peak_reserved: get(pool, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
        free: free as u64,
        total: total as u64,
    })
}

/// Returns memory that the pool reserves without a tensor in it to the GPU, and memory of graphs that do not run, after all queued
/// work. Memory of the pool can be free and still too fragmented for a large tensor.
pub(crate) fn trim(device: &CudaDevice) -> Result<()> {
    device
        .cuda_stream()
        .synchronize()
        .map_err(driver("waiting for the GPU"))?;
    if !has_pools(device)? {
        return Ok(());
    }
    // A driver without graphs has none of their memory.
    // SAFETY: the device is open; memory that a graph uses stays.
    let _ = unsafe { sys::cuDeviceGraphMemTrim(device.cuda_stream().context().cu_device()) };
    // SAFETY: the pool of an open device; only memory without allocations is released.
    unsafe { result::mem_pool::trim_to(pool(device)?, 0) }.map_err(driver("trimming the memory pool"))
}

/// Replaces the pool by one for tensors of `bytes`; the pool rounds up and fragments, so its own limit is a little
/// higher. Code, library workspaces and the context are not included.
pub(crate) fn limit(device: &CudaDevice, bytes: u64) -> Result<()> {
    const LEAST_ROOM: u64 = 64 << 20;
    if !has_pools(device)? {
        return Ok(());
    }
    let most = bytes.saturating_add((bytes / 100 * 3).max(LEAST_ROOM));
    let context = device.cuda_stream().context().clone();
    // SAFETY: all zeros is a valid description; the relevant fields are set below. In every version of the header a
    // location is two ints: its type and the device number.
    let pool = unsafe {
        let mut wanted: sys::CUmemPoolProps = std::mem::zeroed();
        wanted.allocType = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        let on_device = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE as i32;
        (&mut wanted.location as *mut sys::CUmemLocation)
            .cast::<[i32; 2]>()
            .write([on_device, context.ordinal() as i32]);
        wanted.maxSize = usize::try_from(most).unwrap_or(usize::MAX);
        let pool = result::mem_pool::create(&wanted).map_err(driver("making a memory pool"))?;
        sys::cuDeviceSetMemPool(context.cu_device(), pool)
            .result()
            .map_err(driver("using the new memory pool"))?;
        pool
    };
    set(pool, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
}

/// Returns the compute capability.
pub(crate) fn compute(device: &CudaDevice) -> Result<(i32, i32)> {
    let context = device.cuda_stream().context().clone();
    context
        .compute_capability()
        .map_err(driver("querying the GPU's capabilities"))
}

/// Returns the name that the driver reports.
pub(crate) fn name(device: &CudaDevice) -> Result<String> {
    let context = device.cuda_stream().context().clone();
    context.name().map_err(driver("querying the GPU name"))
}

/// Returns the identifiers of all GPUs, by ordinal, without a context on them.
pub(crate) fn identities() -> Result<Vec<String>> {
    let count = CudaContext::device_count().map_err(driver("counting the GPUs"))?;
    let of = |ordinal| {
        let uuid = result::device::get(ordinal).and_then(result::device::get_uuid);
        let uuid = uuid.map_err(driver("identifying a GPU"))?;
        Ok(uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect())
    };
    (0..count).map(of).collect()
}

/// Returns every GPU, by ordinal.
pub(crate) fn all() -> Result<Vec<GpuProperties>> {
    let count = CudaContext::device_count().map_err(driver("counting the GPUs"))?;
    (0..count.max(0) as usize).map(describe).collect()
}

fn describe(ordinal: usize) -> Result<GpuProperties> {
    let context = CudaContext::new(ordinal).map_err(driver("opening the GPU"))?;
    let (mut driver_version, mut cublas) = (0, 0);
    // SAFETY: both are valid output addresses; the version of cuBLAS needs no handle.
    unsafe {
        sys::cuDriverGetVersion(&mut driver_version)
            .result()
            .map_err(driver("querying the driver version"))?;
        let _ = cublasGetVersion_v2(std::ptr::null_mut(), &mut cublas);
    }
    let (free, total) = context.mem_get_info().map_err(driver("querying free memory"))?;
    Ok(GpuProperties {
        name: context.name().map_err(driver("querying the GPU name"))?,
        compute: context
            .compute_capability()
            .map_err(driver("querying the GPU's capabilities"))?,
        total: total as u64,
        free: free as u64,
        driver: driver_version,
        cublas,
    })
}
