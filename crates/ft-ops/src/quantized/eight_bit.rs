//! Products of 8-bit operands on the tensor cores of a GPU, for frozen weights that are stored as int8 with one scale per
//! row. W keeps its codes; x, or dy, is quantized to the same type for the call, with one scale per token:
//!
//! - `y = x·Wᵀ`: a sum of products of codes, times the scale of the token and the scale of the row of W.
//! - `dx = dy·W`: the sum goes over the rows of W, so their scales are multiplied into dy before it is quantized.
//!
//! `Fp8` converts the codes of W to e4m3 for each product. docs/quantization.md has the errors.

use candle_core::Device;
use ft_base::{Error, Result, named};

named!(
    /// How a GPU multiplies with a frozen weight that is stored as int8.
    Products {
        /// W is dequantized to the type of the activations.
        Dequantized = "dequantized",
        /// int8 operands, int32 sums.
        Int8 = "int8",
        /// e4m3 operands, f32 sums.
        Fp8 = "fp8",
    }
);

/// Rows and columns of W are multiples of this number: cuBLAS needs aligned rows.
const UNIT: usize = 16;
/// Largest number of sums, and of bytes of a part of W, at a time.
const SUMS: usize = 1 << 24;
const PART: usize = 1 << 26;
/// A part of the result has a multiple of this number of columns.
const STEP: usize = 128;
/// Up to this number of tokens W is dequantized in registers, which reads as few bytes: decoding uses the exact x.
pub const FEW: usize = 8;

impl Products {
    /// The smallest compute capability.
    pub fn least_compute(self) -> (i32, i32) {
        match self {
            Products::Dequantized | Products::Int8 => (8, 0),
            Products::Fp8 => (8, 9),
        }
    }

    /// # Errors
    /// A device that cannot compute these products.
    pub fn check(self, device: &Device) -> Result<()> {
        if self == Products::Dequantized {
            return Ok(());
        }
        let refused = |found: String| {
            let (major, minor) = self.least_compute();
            Error::unsupported(format!("products in {} are not available on this device", self.name()))
                .at("quantized::Products")
                .found(found)
                .expected(format!("a GPU of compute capability {major}.{minor} or more"))
                .hint("use `Products::Dequantized`")
        };
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let compute = crate::cuda::device::compute(device)?;
                if compute >= self.least_compute() {
                    Ok(())
                } else {
                    Err(refused(format!("compute capability {}.{}", compute.0, compute.1)))
                }
            }
            _ => Err(refused("the CPU".into())),
        }
    }

    /// True if this weight `[rows, columns]`, which is stored as int8 with one scale per row, has such products.
    pub fn fit(self, rows: usize, columns: usize) -> bool {
        let aligned = |n: usize| n > 0 && n.is_multiple_of(UNIT);
        self != Products::Dequantized && aligned(rows) && aligned(columns)
    }

    /// Returns the bytes that a product of `tokens` tokens with W `[rows, columns]` needs beside its operands and its
    /// result; 0 if W is dequantized.
    pub fn work_bytes(self, tokens: usize, rows: usize, columns: usize) -> u64 {
        if !self.fit(rows, columns) || tokens <= FEW {
            return 0;
        }
        // The backward pass has the parts of W transposed; the forward pass of int8 has none.
        let pass = |outputs: usize, inputs: usize| {
            let width = part(tokens, outputs, inputs);
            tokens * (inputs + 4) + 4 * tokens * width + inputs * width
        };
        pass(rows, columns).max(pass(columns, rows)) as u64
    }
}

/// Columns of the result `[tokens, outputs]` that are computed at a time.
pub(crate) fn part(tokens: usize, outputs: usize, inputs: usize) -> usize {
    let most = (SUMS / tokens.max(1)).min(PART / inputs.max(1));
    outputs.min((most / STEP * STEP).max(STEP))
}

#[cfg(feature = "cuda")]
impl super::QTensors {
    /// The scales of the rows, if products have 8-bit operands.
    pub(crate) fn eight_bit(&self) -> Option<&candle_core::Tensor> {
        let fits = self.products.fit(self.rows, self.columns);
        match &self.scales {
            super::ScaleTensors::Int8 { group, scales, .. } if fits && *group >= self.columns => Some(scales),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_bounded_and_aligned() {
        assert_eq!(part(2048, 4096, 4096), 4096);
        assert_eq!(part(2048, 14_336, 4096), 8192);
        assert_eq!(part(1 << 20, 14_336, 4096), STEP);
        assert_eq!(part(9, 48, 16), 48);
        let bytes = Products::Int8.work_bytes(2048, 14_336, 4096);
        assert_eq!(bytes, (2048 * (14_336 + 4) + 4 * 2048 * 4096 + 14_336 * 4096) as u64);
        assert_eq!(Products::Int8.work_bytes(8, 4096, 4096), 0);
        assert_eq!(Products::Dequantized.work_bytes(2048, 4096, 4096), 0);
    }

    #[test]
    fn the_cpu_is_refused() {
        assert!(Products::Dequantized.check(&Device::Cpu).is_ok());
        let text = Products::Fp8.check(&Device::Cpu).unwrap_err().to_string();
        assert!(text.contains("the CPU") && text.contains("8.9"), "{text}");
    }
}
