//! Compares every GPU operation with the CPU version: f32 to 1e-4, bf16 to 1e-2 of the largest magnitude.
//!
//! Without a GPU the tests print a message and pass; with `FT_REQUIRE_GPU=1` they fail. Needs the feature `cuda`:
//! `FT_REQUIRE_GPU=1 cargo test --release --features cuda --test gpu`.

#[cfg(feature = "cuda")]
#[path = "gpu/activations.rs"]
mod activations;
#[cfg(feature = "cuda")]
#[path = "gpu/adapters.rs"]
mod adapters;
#[cfg(feature = "cuda")]
#[path = "gpu/attention.rs"]
mod attention;
#[cfg(feature = "cuda")]
#[path = "gpu/delta_net.rs"]
mod delta_net;
#[cfg(feature = "cuda")]
#[path = "gpu/device.rs"]
mod device;
#[cfg(feature = "cuda")]
#[path = "gpu/distill.rs"]
mod distill;
#[cfg(feature = "cuda")]
#[path = "gpu/eight_bit.rs"]
mod eight_bit;
#[cfg(feature = "cuda")]
#[path = "gpu/engine.rs"]
mod engine;
#[cfg(feature = "cuda")]
#[path = "gpu/f16.rs"]
mod f16;
#[cfg(feature = "cuda")]
#[path = "gpu/f16_layers.rs"]
mod f16_layers;
#[cfg(feature = "cuda")]
#[path = "gpu/captures.rs"]
mod captures;
#[cfg(feature = "cuda")]
#[path = "gpu/families.rs"]
mod families;
#[cfg(feature = "cuda")]
#[path = "gpu/graphs.rs"]
mod graphs;
#[cfg(feature = "cuda")]
#[path = "gpu/layer_capture.rs"]
mod layer_capture;
#[cfg(feature = "cuda")]
#[path = "gpu/layers.rs"]
mod layers;
#[cfg(feature = "cuda")]
#[path = "gpu/generation.rs"]
mod generation;
#[cfg(feature = "cuda")]
#[path = "gpu/stages.rs"]
mod stages;
#[cfg(feature = "cuda")]
#[path = "gpu/quantized.rs"]
mod quantized;
#[cfg(feature = "cuda")]
#[path = "gpu/loss.rs"]
mod loss;
#[cfg(feature = "cuda")]
#[path = "gpu/products.rs"]
mod products;
#[cfg(feature = "cuda")]
#[path = "gpu/steps.rs"]
mod steps;
#[cfg(feature = "cuda")]
#[path = "gpu/support.rs"]
mod support;
#[cfg(feature = "cuda")]
#[path = "gpu/tiers.rs"]
mod tiers;
#[cfg(feature = "cuda")]
#[path = "gpu/train.rs"]
mod train;
#[cfg(feature = "cuda")]
#[path = "gpu/transfer.rs"]
mod transfer;
#[cfg(feature = "cuda")]
#[path = "gpu/updates.rs"]
mod updates;

#[cfg(not(feature = "cuda"))]
#[test]
fn this_build_has_no_cuda() {
    let required = std::env::var("FT_REQUIRE_GPU").is_ok_and(|v| v == "1");
    assert!(
        !required,
        "FT_REQUIRE_GPU=1, but the tests were built without `--features cuda`"
    );
    eprintln!("skipped: built without the feature `cuda`");
}
