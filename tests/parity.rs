//! Parity with transformers, PEFT and torch on the CPU in f32. The Python scripts in `parity` made the goldens in
//! `parity/goldens` (`parity/README.md` describes each file).

#[path = "parity/adapters.rs"]
mod adapters;
#[path = "parity/distill.rs"]
mod distill;
#[path = "parity/expert_adapters.rs"]
mod expert_adapters;
#[path = "parity/families.rs"]
mod families;
#[path = "parity/int8.rs"]
mod int8;
#[path = "parity/loss_scale.rs"]
mod loss_scale;
#[path = "parity/outside_adapters.rs"]
mod outside_adapters;
#[path = "parity/preference.rs"]
mod preference;
#[path = "parity/quant.rs"]
mod quant;
#[path = "parity/quantfiles.rs"]
mod quantfiles;
#[path = "parity/rl.rs"]
mod rl;
#[path = "parity/rollouts.rs"]
mod rollouts;
#[path = "parity/ranks.rs"]
mod ranks;
#[path = "parity/routers.rs"]
mod routers;
#[path = "parity/smoothing.rs"]
mod smoothing;
#[path = "parity/support.rs"]
mod support;
#[path = "parity/tables.rs"]
mod tables;
#[path = "parity/training.rs"]
mod training;
#[path = "parity/wire.rs"]
mod wire;
#[path = "parity/wire_rl.rs"]
mod wire_rl;
#[path = "parity/wire_routers.rs"]
mod wire_routers;
