//! Names of kernels, and the modules that have them.

use ft_base::{Error, Result};
use std::fmt;

/// The name of a kernel, in parts: a launch does not build a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KernelName([&'static str; KernelName::PARTS]);

/// The part of a kernel name for bf16.
pub(super) const BF16: &str = "bf16";

/// The part of a kernel name for f16. The kernel is in the module NAME_f16, where f16 is in the place of bf16.
pub(super) const F16: &str = "f16";

/// The same for a kernel whose name has no type.
pub(super) const IN_F16: &str = "@f16";

impl KernelName {
    const PARTS: usize = 6;

    /// The module that has the kernel; `module` is that of f32 and bf16.
    ///
    /// # Errors
    /// bf16 and f16 in one name: the kernel would read one of them as the other.
    pub(super) fn module(&self, module: &'static str) -> Result<&'static str> {
        let has = |part: &str| self.0.contains(&part);
        if !has(F16) && !has(IN_F16) {
            return Ok(module);
        }
        if has(BF16) {
            return Err(mixed(format_args!("`{self}`")));
        }
        let mut names = ft_kernels::MODULES.iter().map(|(name, _)| *name);
        names
            .find(|name| name.strip_suffix("_f16") == Some(module))
            .ok_or_else(|| {
                Error::unsupported(format!("`{self}` has no kernel for f16")).hint("use `Dtype::Bf16` or `Dtype::F32`")
            })
    }

    /// The name in its module.
    pub(super) fn kernel(&self) -> String {
        let parts = self.0.iter().map(|part| match *part {
            F16 => BF16,
            IN_F16 => "",
            other => other,
        });
        parts.collect()
    }
}

impl From<&'static str> for KernelName {
    fn from(whole: &'static str) -> Self {
        Self::from([whole])
    }
}

impl<const N: usize> From<[&'static str; N]> for KernelName {
    fn from(given: [&'static str; N]) -> Self {
        const { assert!(N <= KernelName::PARTS) };
        let mut parts = [""; KernelName::PARTS];
        parts[..N].copy_from_slice(&given);
        Self(parts)
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.iter().try_for_each(|part| f.write_str(part))
    }
}

/// Operands of two types of 16 bits.
pub(super) fn mixed(what: impl fmt::Display) -> Error {
    Error::shape(format!("{what}: bf16 and f16 together"))
        .expected("one type of 16 bits")
        .hint("convert one of the tensors first")
}
