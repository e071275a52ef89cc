//! StarCoder2: LayerNorms, an MLP without a gate, biases on all linears, a sliding window in every layer.

use super::{Config, LayerNormParams, Result, Spec};

pub(super) fn apply(config: &Config, spec: &mut Spec) -> Result<()> {
    super::layer_norms(config, spec, "norm_epsilon", LayerNormParams::BOTH)?;
    spec.plain_mlp = Some(["mlp.c_fc", "mlp.c_proj"]);
    spec.activation = super::activation(config, "hidden_act", "gelu_pytorch_tanh")?;
    let bias = config.bool_or("use_bias", true)?;
    (spec.qkv_bias, spec.o_bias, spec.mlp_bias) = (bias, bias, bias);
    spec.tied = config.bool_or("tie_word_embeddings", true)?;
    if !config.raw.contains_key("num_key_value_heads") {
        spec.kv_heads = 2;
    }
    let window = config.opt_usize("sliding_window")?;
    for layer in &mut spec.layers {
        layer.window = window;
    }
    spec.ropes = vec![super::rope(config, spec, 10_000.0)?];
    Ok(())
}
