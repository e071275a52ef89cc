//! Storage types of weights that are not trained: int8, int4, NF4; encode, decode, and products with codes.
//! Knows matrices and their codes. Knows no layers, no names of weights, no files.
//!
//! Letters: N tokens, I input features (columns), O output features (rows).

mod coded;
mod dynamic;
mod encode;
mod format;
mod placed;
#[cfg(test)]
mod tests;
mod weight;

pub use coded::{Coded, Part};
pub use encode::{Value, encode};
pub use format::{Format, Storage};
pub use placed::Placed;
/// The 16 levels of NF4, and the 256 values that its absmax are coded with.
pub fn tables() -> ([f32; 16], [f32; 256]) {
    (crate::ops::coded::NF4_TABLE, *dynamic::signed())
}

pub use weight::{Weight, backward_input, backward_input_add, forward, forward_add};
