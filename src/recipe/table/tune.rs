//! Keys of the trained parameters: the method, blocks, frozen layers.

use super::*;

const fn block(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("tune.block", name, kind, default, reason, doc),
        "tune.method",
        &["block"],
    )
}

pub(super) static KEYS: &[Key] = &[
    key(
        "tune",
        "method",
        Kind::Name(Method::NAMES),
        "\"block\"",
        "trains all layers with the memory of one",
        "`full`: all parameters at once; `block`: one block at a time; `lora`: adapters; `freeze`: the last layers.",
    ),
    block(
        "partition",
        Kind::Name(Partition::NAMES),
        "\"layer\"",
        "as in BAdam",
        "The unit of a block: a layer, a module (attention or mlp), a single matrix, or (`ratio`) a fraction of every parameter.",
    ),
    block(
        "layers_per_block",
        from(1),
        "1",
        "least memory",
        "Number of consecutive layers (modules, matrices) in a block; with `order = \"importance\"` the number of blocks that are drawn together (they need not be consecutive).",
    ),
    block(
        "order",
        Kind::Name(BlockOrder::NAMES),
        "\"random\"",
        "as in BAdam: a new order in each round, from the seed",
        "Order in which blocks become active; `fixed` stays on `start_block`; `importance` draws them at random at each switch (LISA).",
    ),
    when(
        key(
            "tune.block",
            "importance",
            Kind::Texts,
            "[]",
            "all blocks are drawn equally often",
            "How often a block is drawn, relative to a block of importance 1: a prefix of its name, `=`, a number, as in `lm_head=2`.",
        ),
        "tune.block.order",
        &["importance"],
    ),
    when(
        key(
            "tune.block",
            "update_ratio",
            Kind::Number(RATIO),
            "0.1",
            "as in BAdam",
            "Fraction of each parameter that is active at a time; parameters with fewer than 100 elements are fully active.",
        ),
        "tune.block.partition",
        &["ratio"],
    ),
    when(
        key(
            "tune.block",
            "mask",
            Kind::Name(MaskShape::NAMES),
            "\"adjacent\"",
            "as in BAdam",
            "Which elements are active together: adjacent elements, or elements scattered over the whole parameter.",
        ),
        "tune.block.partition",
        &["ratio"],
    ),
    when(
        key(
            "tune.block",
            "start_block",
            from(0),
            "0",
            "the first block",
            "The block that stays active with `order = \"fixed\"`.",
        ),
        "tune.block.order",
        &["fixed"],
    ),
    block(
        "switch_every",
        Kind::AutoInteger { min: 1, max: i64::MAX },
        "\"auto\"",
        "steps of the run / blocks, from 1 to 100: every block becomes active",
        "Number of optimizer steps for which a block stays active (K).",
    ),
    block(
        "include_embedding",
        Kind::Flag,
        "false",
        "it is large and learns little in fine-tuning",
        "The embedding is a block too.",
    ),
    block(
        "include_lm_head",
        Kind::Flag,
        "false",
        "it is large and learns little in fine-tuning",
        "The output head is a block too.",
    ),
    block(
        "always_active",
        Kind::Texts,
        "[]",
        "only the active block is trained",
        "Parameters whose names start with one of these are trained in every step.",
    ),
    block(
        "correction",
        Kind::Name(Correction::NAMES),
        "\"none\"",
        "plain BAdam",
        "BREAD: a cheap update of the inactive blocks: a step of SGD (`sgd`) or sign SGD (`signsgd`) as soon as each gradient is computed, or adapters (`lora`, `[tune.lora]`) that train together with the block and are merged at the end.",
    ),
    when(
        key(
            "tune.block",
            "correction_scope",
            Kind::Name(CorrectionScope::NAMES),
            "\"all\"",
            "as in BREAD",
            "Layers that the correction updates: all, or those above the active block (`partial`).",
        ),
        "tune.block.correction",
        &["sgd", "signsgd", "lora"],
    ),
    when(
        key(
            "tune.block",
            "correction_scale",
            Kind::Number(POSITIVE),
            "1.0",
            "as in BREAD",
            "Learning rate of the correction, as a multiple of that of the block; `sgd` and `signsgd` need very different values.",
        ),
        "tune.block.correction",
        &["sgd", "signsgd", "lora"],
    ),
    block(
        "warmup_after_switch",
        from(0),
        "0",
        "as in BAdam",
        "Number of warmup steps after each switch.",
    ),
    when(
        key(
            "tune.freeze",
            "trainable_layers",
            from(0),
            "2",
            "the last layers change most in fine-tuning",
            "The last N layers are trained.",
        ),
        "tune.method",
        &["freeze"],
    ),
    when(
        key(
            "tune.freeze",
            "trainable",
            Kind::Texts,
            "[]",
            "only the last layers",
            "Parameters whose names start with one of these are trained too.",
        ),
        "tune.method",
        &["freeze"],
    ),
];
