//! Storage types of frozen weights: int8, int4, NF4; quantization, dequantization, and products with quantized
//! weights. Works on matrices, without layers, names of weights or files.
//!
//! Letters: N tokens, I input features (columns), O output features (rows).

mod device;
mod dynamic;
mod format;
mod qmatrix;
mod quantize;
mod weight;
#[cfg(test)]
mod tests;

pub use device::DeviceQMatrix;
pub use format::{Format, QDATA, ScaledFormat, StorageDtype};
pub(crate) use qmatrix::is_finite_pair;
pub use qmatrix::{MatrixPart, QMatrix};
pub use quantize::{Quantizable, quantize};
/// Returns the 16 levels of NF4, and the table of 256 values that quantizes its absmax.
pub fn tables() -> ([f32; 16], [f32; 256]) {
    (crate::ops::quantized::NF4_TABLE, *dynamic::signed())
}

pub use weight::{Weight, backward_input, backward_input_add, forward, forward_add};
