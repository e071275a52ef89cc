//! Adapters on a linear: shapes, init, forward, backward, merge; one small file per kind.
//! Depends on one matrix and its adapter only. Independent of layers, optimizers, files.
//!
//! The settings have the names of PEFT. A rank-stabilized LoRA adapter on the attention of a model:
//!
//! ```
//! use ft_core::peft::LoraConfig;
//! use ft_core::hf;
//! use ft_ops::Dtype;
//!
//! # fn main() -> ft_base::Result<()> {
//! # let device = candle_core::Device::Cpu;
//! let config = LoraConfig {
//!     r: 4,
//!     lora_alpha: 8.0,
//!     use_rslora: true,
//!     target_modules: vec!["q_proj".into(), "v_proj".into()],
//!     rank_pattern: vec![("v_proj".into(), 8)],
//!     ..LoraConfig::default()
//! };
//! let mut network = hf::open("../../assets/tiny".as_ref(), Dtype::F32, &device)?.model.network;
//! let mut adapters = hf::new_adapters(&config, &network.spec, None, 0)?;
//! adapters.attach(&mut network)?;
//! assert_eq!(network.adapters.len(), 2 * network.layers());
//! # Ok(())
//! # }
//! ```

mod adalora;
pub mod adapter;
pub mod config;
mod dora;
pub mod experts;
mod frozen;
mod ia3;
mod loha;
mod lokr;
pub mod lora;
mod oft;
pub mod rank_allocation;
mod small;
pub mod start;
pub mod targets;
mod vera;

pub use adalora::{Adalora, scaling as adalora_scaling};
pub use adapter::{
    Adapter, AdapterCost, AdapterShape, BackwardInput, BackwardOutput, DropoutKey, Param, ParamGradient,
};
pub use config::LoraConfig;
pub use dora::Dora;
pub use experts::{ExpertLora, ExpertSite};
pub use frozen::{Dx, FrozenLinear};
pub use ia3::Ia3;
pub use loha::{Loha, NAMES as LOHA_NAMES};
pub use lokr::{Factor, Lokr};
pub use lora::{Lora, LoraGrads};
pub use oft::{Cayley, Oft};
pub use small::{DropoutMask, fill, full};
pub use vera::{Vera, VeraProjections};

#[cfg(test)]
pub(crate) mod tests;
