//! The types of dense weights and activations.

use ft_base::named;

named!(
    /// Type of unquantized weights and of matrix products.
    Dtype { F32 = "f32", Bf16 = "bf16" }
);

impl Dtype {
    /// Bytes per number.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}
