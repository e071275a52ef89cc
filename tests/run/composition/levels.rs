//! The values of each axis of the table, with their settings. `DIR` is the test directory.

/// The name of a value in the table, and its settings.
pub type Level = (&'static str, &'static [&'static str]);

/// The name of an axis, and its values.
pub type Axis = (&'static str, &'static [Level]);

pub const METHODS: &[Level] = &[
    ("full", &["tune.method=full"]),
    ("freeze", &["tune.method=freeze"]),
    ("block, layers", &["tune.method=block"]),
    ("block, modules", &["tune.method=block", "tune.block.partition=module"]),
    ("block, matrices", &["tune.method=block", "tune.block.partition=matrix"]),
    ("block, ratio", &["tune.method=block", "tune.block.partition=ratio"]),
    ("block, ascending", &["tune.method=block", "tune.block.order=ascending"]),
    (
        "block, descending",
        &["tune.method=block", "tune.block.order=descending"],
    ),
    ("block, fixed", &["tune.method=block", "tune.block.order=fixed"]),
    (
        "block, importance",
        &["tune.method=block", "tune.block.order=importance"],
    ),
    (
        "block, corrected by SGD",
        &["tune.method=block", "tune.block.correction=sgd"],
    ),
    (
        "block, corrected by sign SGD",
        &["tune.method=block", "tune.block.correction=signsgd"],
    ),
    (
        "block, corrected by LoRA",
        &["tune.method=block", "tune.block.correction=lora"],
    ),
    ("LoRA", &["tune.method=lora"]),
    (
        "LoRA, gaussian",
        &["tune.method=lora", "tune.lora.init_lora_weights=gaussian"],
    ),
    (
        "LoRA, PiSSA",
        &["tune.method=lora", "tune.lora.init_lora_weights=pissa"],
    ),
    (
        "LoRA, OLoRA",
        &["tune.method=lora", "tune.lora.init_lora_weights=olora"],
    ),
    (
        "LoRA, CorDA",
        &[
            "tune.method=lora",
            "tune.lora.init_lora_weights=corda",
            "tune.lora.corda.samples=2",
        ],
    ),
    (
        "LoRA, EVA",
        &[
            "tune.method=lora",
            "tune.lora.init_lora_weights=eva",
            "tune.lora.init_samples=2",
        ],
    ),
    (
        "LoRA, LoRA-GA",
        &[
            "tune.method=lora",
            "tune.lora.init_lora_weights=lora_ga",
            "tune.lora.init_samples=2",
        ],
    ),
    (
        "LoRA, LoftQ",
        &["tune.method=lora", "tune.lora.init_lora_weights=loftq"],
    ),
    ("DoRA", &["tune.method=lora", "tune.lora.use_dora=true"]),
    ("AdaLoRA", &["tune.method=lora", "tune.lora.peft_type=adalora"]),
    ("IA3", &["tune.method=lora", "tune.lora.peft_type=ia3"]),
    ("VeRA", &["tune.method=lora", "tune.lora.peft_type=vera"]),
    ("LoHa", &["tune.method=lora", "tune.lora.peft_type=loha"]),
    ("LoKr", &["tune.method=lora", "tune.lora.peft_type=lokr"]),
    ("OFT", &["tune.method=lora", "tune.lora.peft_type=oft"]),
];

const TEACHER: &str = "distill.teacher=DIR/same";
const OTHER: &str = "distill.teacher=DIR/other";
const PAIRS: &str = "data.train=DIR/pairs.jsonl";
const SUMS: &str = "data.train=DIR/sums.jsonl";
const REWARD: &str = "rlhf.rewards=[\"length:1\"]";
const TWO: &str = "rlhf.num_generations=2";
const SHORT: &str = "rlhf.max_completion_length=4";

pub const STAGES: &[Level] = &[
    ("pretrain", &["train.stage=pretrain", "data.train=DIR/text.jsonl"]),
    ("sft", &["train.stage=sft"]),
    ("distill", &["train.stage=distill", TEACHER]),
    (
        "distill, hidden states",
        &["train.stage=distill", TEACHER, "distill.hidden_weight=0.5"],
    ),
    (
        "distill, on-policy",
        &[
            "train.stage=distill",
            TEACHER,
            "distill.lmbda=1.0",
            "data.packing=false",
            "distill.max_new_tokens=4",
        ],
    ),
    (
        "distill, stored outputs",
        &["train.stage=distill", "distill.teacher_cache=DIR/stored"],
    ),
    ("distill, ULD", &["train.stage=distill", OTHER, "distill.alignment=uld"]),
    (
        "distill, GOLD",
        &["train.stage=distill", OTHER, "distill.alignment=gold"],
    ),
    ("reward", &["train.stage=reward", PAIRS]),
    ("dpo", &["train.stage=dpo", PAIRS]),
    ("orpo", &["train.stage=orpo", PAIRS]),
    ("simpo", &["train.stage=simpo", PAIRS]),
    ("kto", &["train.stage=kto", PAIRS]),
    ("grpo", &["train.stage=grpo", SUMS, REWARD, TWO, SHORT]),
    (
        "grpo, with a reference",
        &["train.stage=grpo", SUMS, REWARD, TWO, SHORT, "rlhf.grpo.beta=0.1"],
    ),
    (
        "grpo, int8 rollouts",
        &[
            "train.stage=grpo",
            SUMS,
            REWARD,
            TWO,
            SHORT,
            "rlhf.rollout_weights=int8",
        ],
    ),
    ("ppo", &["train.stage=ppo", SUMS, REWARD, TWO, SHORT]),
];

pub const STORAGE: &[Level] = &[
    ("f32", &["model.dtype=f32", "memory.frozen_weights=f32"]),
    ("bf16", &["memory.frozen_weights=bf16"]),
    (
        "bf16 in an f32 model",
        &["model.dtype=f32", "memory.frozen_weights=bf16"],
    ),
    ("int8", &["memory.frozen_weights=int8"]),
    ("int4", &["memory.frozen_weights=int4"]),
    ("NF4", &["memory.frozen_weights=nf4"]),
    ("quantized files", &["model.path=DIR/quantized"]),
];

pub const TIERS: &[Level] = &[
    ("device", &["memory.tier=device"]),
    ("host", &["memory.tier=host"]),
    ("disk", &["memory.tier=disk"]),
];

pub const DEVICES: &[Level] = &[("CPU", &["model.device=cpu"]), ("CUDA", &["model.device=cuda:0"])];

pub const ALL: [Axis; 5] = [
    ("method", METHODS),
    ("stage", STAGES),
    ("storage", STORAGE),
    ("tier", TIERS),
    ("device", DEVICES),
];

/// Block training alone: every partition, order and correction.
pub const BLOCKS: [Axis; 6] = [
    (
        "partition",
        &[
            ("layers", &["tune.method=block"]),
            ("modules", &["tune.method=block", "tune.block.partition=module"]),
            ("matrices", &["tune.method=block", "tune.block.partition=matrix"]),
            ("ratio", &["tune.method=block", "tune.block.partition=ratio"]),
        ],
    ),
    (
        "order",
        &[
            ("random", &[]),
            ("ascending", &["tune.block.order=ascending"]),
            ("descending", &["tune.block.order=descending"]),
            ("fixed", &["tune.block.order=fixed"]),
            ("importance", &["tune.block.order=importance"]),
        ],
    ),
    (
        "correction",
        &[
            ("none", &[]),
            ("SGD", &["tune.block.correction=sgd"]),
            ("sign SGD", &["tune.block.correction=signsgd"]),
            ("LoRA", &["tune.block.correction=lora"]),
        ],
    ),
    ("storage", STORAGE),
    ("tier", TIERS),
    ("device", DEVICES),
];

/// Adapters alone: every type with every initialization.
pub const ADAPTERS: [Axis; 3] = [
    (
        "type",
        &[
            ("LoRA", &["tune.method=lora"]),
            ("DoRA", &["tune.method=lora", "tune.lora.use_dora=true"]),
            ("AdaLoRA", &["tune.method=lora", "tune.lora.peft_type=adalora"]),
            ("IA3", &["tune.method=lora", "tune.lora.peft_type=ia3"]),
            ("VeRA", &["tune.method=lora", "tune.lora.peft_type=vera"]),
            ("LoHa", &["tune.method=lora", "tune.lora.peft_type=loha"]),
            ("LoKr", &["tune.method=lora", "tune.lora.peft_type=lokr"]),
            ("OFT", &["tune.method=lora", "tune.lora.peft_type=oft"]),
        ],
    ),
    (
        "initialization",
        &[
            ("default", &[]),
            ("gaussian", &["tune.lora.init_lora_weights=gaussian"]),
            ("PiSSA", &["tune.lora.init_lora_weights=pissa"]),
            ("OLoRA", &["tune.lora.init_lora_weights=olora"]),
            ("CorDA", &["tune.lora.init_lora_weights=corda"]),
            ("EVA", &["tune.lora.init_lora_weights=eva"]),
            ("LoRA-GA", &["tune.lora.init_lora_weights=lora_ga"]),
            ("LoftQ", &["tune.lora.init_lora_weights=loftq"]),
        ],
    ),
    ("storage", STORAGE),
];

/// Settings of the loss and of the embeddings, with every stage.
pub const REGULARIZATION: [Axis; 2] = [
    (
        "setting",
        &[
            ("NEFTune", &["train.neftune_noise_alpha=5"]),
            ("label smoothing", &["train.label_smoothing_factor=0.1"]),
            ("average of weights", &["train.ema_decay=0.9"]),
        ],
    ),
    ("stage", STAGES),
];
