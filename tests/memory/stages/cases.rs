//! The runs of `stages`: every stage and every start of adapters.

const LORA: &str = "[tune]\nmethod = \"lora\"\n[tune.lora]\nr = 16\n";
const BLOCK: &str = "[tune]\nmethod = \"block\"\nblock.switch_every = 1\n";
const FULL: &str = "[tune]\nmethod = \"full\"\n";

/// A run.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// A file of `assets/world`, or one that `rows` writes.
    pub(super) rows: &'static str,
    pub(super) tables: &'static str,
    pub(super) stage: &'static str,
    pub(super) settings: &'static [&'static str],
}

const fn case(
    name: &'static str,
    stage: &'static str,
    rows: &'static str,
    tables: &'static str,
    settings: &'static [&'static str],
) -> Case {
    Case {
        name,
        rows,
        tables,
        stage,
        settings,
    }
}

pub(super) const PAIRS: &str = "preference-train.jsonl";
const SUMS: &str = "sums-train.jsonl";
pub(super) const ROWS: &str = "train.jsonl";
pub(super) const FEW: &str = "few.jsonl";
pub(super) const JUDGED: &str = "judged.jsonl";

/// Such a case has a large vocabulary, whose matrices are most of its memory.
pub(super) const NEW_TOKENS: &str = "data.new_tokens=[\"<a>\", \"<b>\"]";
pub(super) const LARGE_VOCABULARY: usize = 40_000;

pub(super) const CASES: [Case; 42] = [
    case("streams, all parameters", "sft", ROWS, FULL, &["train.batch_size=8"]),
    case(
        "streams, a layer at a time",
        "sft",
        ROWS,
        BLOCK,
        &["train.batch_size=8"],
    ),
    case("streams, adapters", "sft", ROWS, LORA, &["train.batch_size=8"]),
    case("latent, all parameters", "sft", ROWS, FULL, &["train.batch_size=16"]),
    case("latent, adapters", "sft", ROWS, LORA, &["train.batch_size=24"]),
    case("deltas, all parameters", "sft", ROWS, FULL, &["train.batch_size=8"]),
    case(
        "convolutions, all parameters",
        "sft",
        ROWS,
        FULL,
        &["train.batch_size=8"],
    ),
    case("convolutions, adapters", "sft", ROWS, LORA, &["train.batch_size=16"]),
    case("sinks, all parameters", "sft", ROWS, FULL, &["train.batch_size=8"]),
    case("experts, all parameters", "sft", ROWS, FULL, &["train.batch_size=8"]),
    case(
        "experts, blocks of them",
        "sft",
        ROWS,
        BLOCK,
        &[
            "train.batch_size=8",
            "tune.block.partition=experts",
            "tune.block.experts_per_block=4",
        ],
    ),
    case(
        "experts, adapters and losses of routers",
        "sft",
        ROWS,
        LORA,
        &["train.batch_size=8", "train.router_aux_loss_coef=0.01"],
    ),
    case(
        "experts, from the disk",
        "sft",
        ROWS,
        LORA,
        &["train.batch_size=8", "memory.tier=disk"],
    ),
    case(
        "experts, adapters on all of them",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=8",
            "tune.lora.target_parameters=[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]",
        ],
    ),
    // Two packed sequences: the micro-batch takes them again and again.
    case(
        "packed sequences of a small file",
        "sft",
        FEW,
        LORA,
        &["train.batch_size=5", "data.packing=true"],
    ),
    case(
        "a run of three blocks",
        "sft",
        ROWS,
        BLOCK,
        &["train.batch_size=16", "train.max_steps=3", "model.dtype=bf16"],
    ),
    case(
        "an evaluation larger than a step",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=2",
            "data.eval_fraction=0.9",
            "data.max_length=1024",
            "data.packing=false",
        ],
    ),
    case(
        "answers in an evaluation",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=2",
            "data.eval_fraction=0.4",
            "train.predict_with_generate=true",
            "data.packing=false",
        ],
    ),
    case("dpo", "dpo", PAIRS, LORA, &["train.batch_size=24"]),
    case("orpo", "orpo", PAIRS, LORA, &["train.batch_size=24"]),
    case("simpo", "simpo", PAIRS, FULL, &["train.batch_size=24"]),
    case("kto", "kto", JUDGED, LORA, &["train.batch_size=24"]),
    case("reward", "reward", PAIRS, FULL, &["train.batch_size=24"]),
    case(
        "grpo",
        "grpo",
        SUMS,
        FULL,
        &[
            "train.batch_size=64",
            "rlhf.rewards=exact",
            "rlhf.num_generations=8",
            "rlhf.max_completion_length=24",
            "rlhf.grpo.beta=0.1",
            "rlhf.temperature=2",
        ],
    ),
    case(
        "grpo, int8 rollout",
        "grpo",
        SUMS,
        LORA,
        &[
            "train.batch_size=64",
            "rlhf.rewards=exact",
            "rlhf.num_generations=8",
            "rlhf.max_completion_length=24",
            "rlhf.rollout_weights=int8",
            "rlhf.temperature=2",
        ],
    ),
    case(
        "grpo, a rollout larger than a step",
        "grpo",
        SUMS,
        LORA,
        &[
            "train.batch_size=8",
            "train.gradient_accumulation_steps=8",
            "rlhf.rewards=exact",
            "rlhf.num_generations=8",
            "rlhf.max_completion_length=24",
            "rlhf.temperature=2",
        ],
    ),
    case(
        "evaluation of grpo",
        "grpo",
        SUMS,
        LORA,
        &[
            "train.batch_size=8",
            "train.gradient_accumulation_steps=1",
            "data.eval_fraction=0.2",
            "rlhf.rewards=exact",
            "rlhf.num_generations=8",
            "rlhf.max_completion_length=24",
        ],
    ),
    case(
        "ppo",
        "ppo",
        SUMS,
        LORA,
        &[
            "train.batch_size=64",
            "rlhf.rewards=exact",
            "rlhf.max_completion_length=24",
            "rlhf.ppo.kl_coef=0.3",
            "rlhf.num_mini_batches=2",
            "rlhf.temperature=2",
        ],
    ),
    case(
        "ppo, full",
        "ppo",
        SUMS,
        FULL,
        &[
            "train.batch_size=64",
            "rlhf.rewards=exact",
            "rlhf.max_completion_length=24",
            "rlhf.ppo.kl_coef=0.3",
            "rlhf.temperature=2",
        ],
    ),
    case(
        "distillation",
        "distill",
        ROWS,
        FULL,
        &[
            "train.batch_size=24",
            "distill.teacher=model",
            "distill.lmbda=0.5",
            "distill.max_new_tokens=24",
            "data.packing=false",
        ],
    ),
    case(
        "distillation, teacher on the disk",
        "distill",
        ROWS,
        LORA,
        &[
            "train.batch_size=24",
            "distill.teacher=model",
            "distill.teacher_tier=disk",
            "data.packing=false",
        ],
    ),
    case(
        "distillation, hidden states",
        "distill",
        ROWS,
        LORA,
        &[
            "train.batch_size=24",
            "distill.teacher=model",
            "distill.hidden_weight=0.5",
            "data.packing=false",
        ],
    ),
    case(
        "distillation from a cache",
        "distill",
        ROWS,
        LORA,
        &[
            "train.batch_size=24",
            "distill.teacher_cache=cache",
            "data.packing=false",
        ],
    ),
    // The matrices with the new rows are in memory, the layers on the disk.
    case(
        "new tokens from the disk, head in pieces",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=2",
            "data.packing=false",
            NEW_TOKENS,
            "memory.tier=disk",
            "memory.head_chunk=4096",
        ],
    ),
    case(
        "new tokens alone from the disk, with an evaluation",
        "sft",
        ROWS,
        "[tune]\nmethod = \"freeze\"\nfreeze.trainable_layers = 0\n",
        &[
            "train.batch_size=2",
            "data.packing=false",
            NEW_TOKENS,
            "memory.tier=disk",
            "data.eval_fraction=0.2",
        ],
    ),
    // Steps of one row: what a start needs is more than a step does.
    case(
        "no start",
        "sft",
        ROWS,
        LORA,
        &["train.batch_size=1", "data.packing=false"],
    ),
    case(
        "CorDA",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=1",
            "data.packing=false",
            "tune.lora.init_lora_weights=corda",
            "tune.lora.corda.samples=64",
        ],
    ),
    case(
        "EVA",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=1",
            "data.packing=false",
            "tune.lora.init_lora_weights=eva",
        ],
    ),
    case(
        "PiSSA",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=1",
            "data.packing=false",
            "tune.lora.init_lora_weights=pissa",
        ],
    ),
    case(
        "OLoRA",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=1",
            "data.packing=false",
            "tune.lora.init_lora_weights=olora",
        ],
    ),
    case(
        "LoftQ",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=1",
            "data.packing=false",
            "tune.lora.init_lora_weights=loftq",
            "memory.frozen_weights=nf4",
        ],
    ),
    case(
        "LoRA-GA",
        "sft",
        ROWS,
        LORA,
        &[
            "train.batch_size=1",
            "data.packing=false",
            "tune.lora.init_lora_weights=lora_ga",
        ],
    ),
];
