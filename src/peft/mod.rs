//! Adapters on a linear: shapes, init, forward, backward, merge; one small file per kind.
//! Depends on one matrix and its adapter only. Independent of layers, optimizers, files.

mod adalora;
pub mod adapter;
pub mod config;
mod dora;
mod frozen;
mod ia3;
mod loha;
mod lokr;
pub mod lora;
mod oft;
pub mod ranks;
mod small;
pub mod start;
pub mod targets;
mod vera;

pub use adalora::{Adalora, scaling as adalora_scaling};
pub use adapter::{Adapter, BackwardInput, BackwardOutput, Cost, Dropout, Gradient, Param};
pub use config::LoraConfig;
pub use dora::Dora;
pub use frozen::{Dx, Frozen};
pub use ia3::Ia3;
pub use loha::{Loha, NAMES as LOHA_NAMES};
pub use lokr::{Factor, Lokr};
pub use lora::{Lora, LoraGrads};
pub use oft::{Cayley, Oft};
pub use small::{Mask, fill, full};
pub use vera::{Projections, Vera};

#[cfg(test)]
pub(crate) mod tests;
