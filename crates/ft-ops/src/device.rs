//! The devices of this machine: opens one by name, and reports its memory.

use candle_core::Device;
use ft_base::{Error, ErrorKind, Result};

/// A device that is ready for use, and a note for the user about the choice.
pub struct OpenedDevice {
    /// The device.
    pub device: Device,
    /// A note for the user, for example why `auto` chose the CPU.
    pub note: Option<String>,
}

/// Memory of a GPU in bytes. `used` is the memory of tensors, `reserved` the memory that the pool took from the GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of tensors now.
    pub used: u64,
    /// Highest value of `used`.
    pub peak_used: u64,
    /// Bytes of the pool now.
    pub reserved: u64,
    /// Highest value of `reserved`.
    pub peak_reserved: u64,
    /// Free bytes of the GPU.
    pub free: u64,
    /// All bytes of the GPU.
    pub total: u64,
}

/// The properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProperties {
    /// The name that the driver reports.
    pub name: String,
    /// Compute capability, for example (9, 0).
    pub compute: (i32, i32),
    /// Memory in bytes.
    pub total: u64,
    /// Free memory in bytes.
    pub free: u64,
    /// Highest CUDA version that the driver supports, as 1000 · major + 10 · minor.
    pub driver: i32,
    /// Version of cuBLAS, in the format of the library.
    pub cublas: i32,
}

impl GpuProperties {
    /// Returns the reasons why this build cannot use this GPU. `toolkit` is the CUDA version of the build, as in
    /// `driver`.
    pub fn problems(&self, toolkit: Option<i32>) -> Vec<String> {
        let mut problems = Vec::new();
        if self.compute < (8, 0) {
            problems.push(format!(
                "compute capability {}.{} is too old: 8.0 (Ampere) or newer is needed",
                self.compute.0, self.compute.1
            ));
        }
        // candle's kernels are PTX of the toolkit, which an older driver refuses, also within a major version.
        if let Some(toolkit) = toolkit.filter(|t| *t > self.driver) {
            let needed = driver_of(toolkit).map_or(String::new(), |n| format!(" to {n} or newer"));
            problems.push(format!(
                "the driver supports CUDA up to {0}, this build uses {1}: update the driver{needed}, or build with CUDA {0} \
                 or older",
                version(self.driver),
                version(toolkit)
            ));
        }
        problems
    }
}

/// Formats `13000` as `13.0`.
pub fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// CUDA versions, and the first Linux driver for each (table 3 of the release notes of the CUDA toolkit).
const DRIVERS: [(i32, &str); 10] = [
    (12_000, "525.60.13"),
    (12_010, "530.30.02"),
    (12_020, "535.54.03"),
    (12_030, "545.23.06"),
    (12_040, "550.54.14"),
    (12_050, "555.42.02"),
    (12_060, "560.28.03"),
    (12_080, "570.26"),
    (12_090, "575.51.03"),
    (13_000, "580.65.06"),
];

/// Returns the first driver for this CUDA version, if it is known.
pub fn driver_of(toolkit: i32) -> Option<&'static str> {
    DRIVERS
        .iter()
        .find(|(cuda, _)| *cuda == toolkit)
        .map(|(_, driver)| *driver)
}

/// Returns the highest known CUDA version that a driver such as `550.54.15` supports.
pub fn cuda_of(driver: &str) -> Option<i32> {
    let numbers = |text: &str| -> Option<Vec<u32>> { text.split('.').map(|n| n.parse().ok()).collect() };
    let installed = numbers(driver)?;
    let older = |(_, first): &&(i32, &str)| numbers(first).is_some_and(|first| first <= installed);
    DRIVERS.iter().rev().find(older).map(|(cuda, _)| *cuda)
}

/// True if this build can use NVIDIA GPUs.
pub const HAS_CUDA: bool = cfg!(feature = "cuda");

/// Returns the CUDA version of this build, as 1000 · major + 10 · minor, if it is known.
pub fn toolkit() -> Option<i32> {
    #[cfg(feature = "cuda")]
    return ft_kernels::toolkit();
    #[cfg(not(feature = "cuda"))]
    None
}

/// Opens `cpu`, `cuda:N`, or `auto`: the first usable GPU, else the CPU with a note that says why.
///
/// # Errors
/// A GPU requested by name that cannot be used; an unknown name.
pub fn open(name: &str) -> Result<OpenedDevice> {
    let cpu = |note| OpenedDevice {
        device: Device::Cpu,
        note,
    };
    if name == "cpu" || (name == "auto" && !HAS_CUDA) {
        return Ok(cpu(None));
    }
    if name != "auto" {
        let device = gpu(ordinal(name)?).map_err(|e| e.or_at("device::open"))?;
        return Ok(OpenedDevice { device, note: None });
    }
    let mut not_used = String::new();
    for ordinal in 0..count().max(1) {
        match gpu(ordinal) {
            Ok(device) if ordinal == 0 => return Ok(OpenedDevice { device, note: None }),
            Ok(device) => {
                let note = Some(format!(
                    "`cuda:{ordinal}` is used, the GPUs before it are not: {not_used}"
                ));
                return Ok(OpenedDevice { device, note });
            }
            Err(e) => {
                let separator = if not_used.is_empty() { "" } else { "; " };
                not_used.push_str(&format!("{separator}{e}"));
            }
        }
    }
    Ok(cpu(Some(format!("no GPU is used: {not_used}"))))
}

fn ordinal(name: &str) -> Result<usize> {
    name.strip_prefix("cuda:").and_then(|n| n.parse().ok()).ok_or_else(|| {
        Error::usage(format!("device `{name}` is not known"))
            .at("device::open")
            .expected("`auto`, `cpu` or `cuda:0`")
    })
}

#[cfg(not(feature = "cuda"))]
fn gpu(ordinal: usize) -> Result<Device> {
    Err(Error::unsupported(format!("device `cuda:{ordinal}` is not available"))
        .found("a build without CUDA")
        .hint("use `cpu` or `auto`, or build with `--features cuda`"))
}

#[cfg(not(feature = "cuda"))]
fn count() -> usize {
    0
}

#[cfg(feature = "cuda")]
use super::cuda::device::{count, open as gpu};

/// Returns the memory of `device`; `None` for the CPU.
///
/// # Errors
/// A driver that does not answer.
pub fn memory(device: &Device) -> Result<Option<DeviceMemory>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => Ok(Some(super::cuda::device::memory(device)?)),
        _ => Ok(None),
    }
}

/// Limits the tensors on the GPU to `bytes` from now on: a larger allocation fails as out of memory. Call it before
/// the first tensor. Does nothing on the CPU.
///
/// # Errors
/// A driver that does not answer.
pub fn limit(device: &Device, bytes: u64) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => super::cuda::device::limit(device, bytes),
        _ => {
            let _ = bytes;
            Ok(())
        }
    }
}

/// Returns every GPU of the machine; none in a build without CUDA.
///
/// # Errors
/// A driver that does not answer.
pub fn gpus() -> Result<Vec<GpuProperties>> {
    #[cfg(feature = "cuda")]
    return super::cuda::device::all();
    #[cfg(not(feature = "cuda"))]
    Ok(Vec::new())
}

/// Identifiers of the GPUs that this process sees, by ordinal: the same in every process of a machine. Opens none of them.
///
/// # Errors
/// A driver that does not answer.
pub fn identities() -> Result<Vec<String>> {
    #[cfg(feature = "cuda")]
    return super::cuda::device::identities();
    #[cfg(not(feature = "cuda"))]
    Ok(Vec::new())
}

/// The name of a GPU; `None` for the CPU.
///
/// # Errors
/// A driver that does not answer.
pub fn name(device: &Device) -> Result<Option<String>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => super::cuda::device::name(device).map(Some),
        _ => Ok(None),
    }
}

/// True if this error means that a GPU has no free memory.
pub fn out_of_memory(error: &Error) -> bool {
    error.kind() == ErrorKind::OutOfMemory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(open("cpu").unwrap().device.is_cpu());
        for bad in ["gpu", "cuda", "cuda:x", "cuda:-1", ""] {
            let e = open(bad).err().unwrap();
            assert!(e.to_string().contains("is not known"), "{bad}: {e}");
        }
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn without_cuda_auto_is_the_cpu_and_a_gpu_is_refused() {
        let opened = open("auto").unwrap();
        assert!(opened.device.is_cpu() && opened.note.is_none());
        let e = open("cuda:0").err().unwrap().to_string();
        assert!(e.contains("build without CUDA") && e.contains("device::open"), "{e}");
        assert_eq!(memory(&Device::Cpu).unwrap(), None);
        assert!(gpus().unwrap().is_empty());
        limit(&Device::Cpu, 1).unwrap();
    }

    #[test]
    fn what_does_not_match_is_named() {
        let mut gpu = GpuProperties {
            name: "test".into(),
            compute: (9, 0),
            total: 1,
            free: 1,
            driver: 12040,
            cublas: 0,
        };
        assert!(gpu.problems(None).is_empty() && gpu.problems(Some(12040)).is_empty());
        let text = &gpu.problems(Some(13000))[0];
        assert!(
            text.contains("up to 12.4, this build uses 13.0") && text.contains("580.65.06"),
            "{text}"
        );
        // A minor version is too much too.
        assert!(gpu.problems(Some(12080))[0].contains("570.26 or newer, or build with CUDA 12.4"));
        let cuda = ["550.54.15", "550.40", "580.159.04", "525.60.13", "470.82.01", "x"].map(cuda_of);
        assert_eq!(cuda, [Some(12040), Some(12030), Some(13000), Some(12000), None, None]);
        gpu.compute = (7, 5);
        assert!(gpu.problems(None)[0].contains("7.5 is too old"));
    }
}
