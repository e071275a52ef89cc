// Where a KV cache keeps the keys and values of a layer: blocks of tokens, named by address in a table of the step.
#pragma once

/// Keys and values [room, K size] as f32, bf16 or int8; of int8 also their scales [room, K]. As `Tables` of
/// crates/ft-ops/src/cuda/kv_block.rs.
struct __align__(16) KvBlock {
    void *keys, *values;
    float *key_scales, *value_scales;
};

/// Where a new token goes.
struct KvPlace {
    int block, token;
};
