//! Adapters on a linear: shapes, init, forward, backward, merge; one small file per kind.
//! Depends on one matrix and its adapter only. Independent of layers, optimizers, files.
//!
//! A fresh LoRA pair on every linear of a model:
//!
//! ```
//! use ft::formats::adapter::Targets;
//! use ft::peft::targets::{Choice, select};
//! use ft::peft::{Adapter, Lora, LoraConfig, Mask, lora};
//! use ft::{hf, ops::Dtype};
//! use std::sync::Arc;
//!
//! # fn main() -> ft::base::Result<()> {
//! # let device = candle_core::Device::Cpu;
//! let mut network = hf::open("assets/tiny".as_ref(), Dtype::F32, &device)?.model.network;
//! let config = LoraConfig { r: 8, lora_alpha: 16.0, ..LoraConfig::default() };
//! let choice = Choice { targets: &Targets::AllLinear, exclude: None, layers: None };
//! let sites = select(&network.spec.sites(), &choice)?;
//! for (index, site) in (0..).zip(&sites) {
//!     let pair = lora::fresh(config.r, site.input, site.output, false, 0, index)?;
//!     let scale = lora::scaling(config.lora_alpha, config.r, config.use_rslora);
//!     let lora = Lora::new(&site.module, pair, scale, Mask { p: 0.0, site: index });
//!     network.adapters.insert(site.module.clone(), Arc::new(Adapter::Lora(lora)));
//! }
//! // The names for `engine::Active::new`.
//! let trained = network.adapters.values().flat_map(|adapter| adapter.parts());
//! assert_eq!(trained.count(), 2 * sites.len());
//! # Ok(())
//! # }
//! ```

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
