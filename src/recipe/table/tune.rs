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
        "trains every layer at the memory of one",
        "`full`: everything at once; `block`: one block at a time; `lora`: adapters; `freeze`: the last layers.",
    ),
    block(
        "partition",
        Kind::Name(Partition::NAMES),
        "\"layer\"",
        "as in BAdam",
        "What one block is: a layer, a module (attention or mlp), a single matrix, or (`ratio`) a part of every parameter.",
    ),
    block(
        "layers_per_block",
        from(1),
        "1",
        "least memory",
        "Neighbouring layers (modules, matrices) that form one block; with `order = \"importance\"` the blocks that are drawn together, not neighbours.",
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
            "every block is drawn as often as any other",
            "How often a block is drawn over a block of importance 1: the start of its name, `=`, a number, as in `lm_head=2`.",
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
            "Part of each parameter that is active at a time; parameters with fewer than 100 elements are active whole.",
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
            "Which elements are active together: neighbours, or elements scattered over the whole parameter.",
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
        "steps of the run / blocks, from 1 to 100: every block has its turn",
        "Optimizer steps a block stays active (K).",
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
        "nothing beside the block",
        "Parameters whose names start with one of these are trained in every step.",
    ),
    block(
        "correction",
        Kind::Name(Correction::NAMES),
        "\"none\"",
        "plain BAdam",
        "BREAD: a cheap update of the blocks that are not active: against their gradient or its sign as it appears, or adapters (`[tune.lora]`) trained beside the block and merged at the end.",
    ),
    when(
        key(
            "tune.block",
            "correction_scope",
            Kind::Name(CorrectionScope::NAMES),
            "\"all\"",
            "as in BREAD",
            "Which layers the correction reaches: all, or those above the active block (`partial`).",
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
            "Learning rate of the correction over that of the block; gradients and their signs need very different ones.",
        ),
        "tune.block.correction",
        &["sgd", "signsgd", "lora"],
    ),
    block(
        "warmup_after_switch",
        from(0),
        "0",
        "as in BAdam",
        "Steps over which the learning rate rises after each switch.",
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
