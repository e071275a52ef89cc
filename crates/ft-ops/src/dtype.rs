//! The types of dense weights and activations.

use candle_core::DType;
use ft_base::{Error, Result, named};

named!(
    /// Type of unquantized weights and of matrix products: a setting, with a name in recipes and files. The kernels of a
    /// GPU have `FloatType`, which is read from a tensor and gives the names of kernels.
    Dtype { F32 = "f32", Bf16 = "bf16", F16 = "f16" }
);

impl From<Dtype> for DType {
    /// The type of a tensor with these numbers.
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::BF16,
            Dtype::F16 => DType::F16,
        }
    }
}

impl Dtype {
    /// True for the types of 16 bits.
    pub fn is_short(self) -> bool {
        self != Self::F32
    }

    /// True if its smallest numbers are larger than usual gradients.
    pub fn needs_loss_scale(self) -> bool {
        self == Self::F16
    }

    /// Checks that this kind of device computes with this type.
    ///
    /// # Errors
    /// f16 on a CPU.
    pub fn runs_on(self, gpu: bool) -> Result<()> {
        if gpu || self != Self::F16 {
            return Ok(());
        }
        Err(Error::unsupported("the operations of the CPU have no f16")
            .found("f16 on a CPU")
            .expected("a GPU, or another type")
            .hint("use `Dtype::Bf16` (the same memory, no loss scaling) or `Dtype::F32`"))
    }

    /// Bytes per number.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}
