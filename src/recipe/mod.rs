//! What the user wrote and what it means: one typed value with every default filled in.
//! Knows names, defaults and checks. Knows no tensors, opens no model.

pub mod types;

pub use types::*;
