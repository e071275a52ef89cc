//! The one table of recipe keys: type, range, default, the reason for the default, what the key does.
//! Parsing, "did you mean", the resolved recipe and `docs/recipe.md` are all driven by it.

use super::types::*;

/// What may be written for a key.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Text,
    /// One of these names.
    Name(&'static [&'static str]),
    Flag,
    /// A whole number from `min` to `max`.
    Integer {
        min: i64,
        max: i64,
    },
    /// A whole number from `min` up, or `auto`.
    AutoInteger {
        min: i64,
    },
    Number(Range),
    /// Two numbers of this range.
    Pair(Range),
    /// A string or a list of strings.
    Texts,
    /// A list of whole numbers.
    Integers,
    /// A list of numbers.
    Numbers,
    /// `auto`, or a list of pairs of whole numbers.
    AutoPairs,
    /// Bytes as `24GiB`, or `auto`.
    Size,
    /// A table of texts of the user's own to one of these names.
    Map(&'static [&'static str]),
}

/// `min` to `max`; an open end is not part of it.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub min: f64,
    pub max: f64,
    pub min_open: bool,
    pub max_open: bool,
}

/// The key has a meaning only while the key `.0` has one of the values `.1`.
pub type When = Option<(&'static str, &'static [&'static str])>;

#[derive(Debug)]
pub struct Key {
    pub table: &'static str,
    pub name: &'static str,
    pub kind: Kind,
    /// TOML text; empty means the key has to be written.
    pub default: &'static str,
    pub reason: &'static str,
    pub doc: &'static str,
    pub when: When,
}

impl Key {
    pub fn path(&self) -> String {
        format!("{}.{}", self.table, self.name)
    }
}

pub fn find(path: &str) -> Option<&'static Key> {
    let (table, name) = path.rsplit_once('.')?;
    KEYS.iter().find(|k| k.table == table && k.name == name)
}

/// Tables in the order in which they are printed, each with what it is about.
pub const TABLES: &[(&str, &str)] = &[
    ("model", "Which model, and how it computes."),
    (
        "memory",
        "Where weights and activations live. `auto` lets the planner choose.",
    ),
    ("data", "Rows, how they are read and which tokens are trained."),
    ("tune", "Which parameters are trained."),
    (
        "tune.block",
        "Block training (BAdam): one block of parameters is active at a time.",
    ),
    ("tune.lora", "Adapters. Names and meaning as in PEFT."),
    (
        "tune.lora.corda",
        "CorDA: adapters that start from the directions in which the inputs of each linear vary.",
    ),
    (
        "tune.lora.adalora",
        "AdaLoRA: every pair starts with rank `r`, and while training goes on the singular values that matter least over the whole model are set to zero.",
    ),
    (
        "tune.lora.eva",
        "EVA: adapters that start from the main directions of the inputs.",
    ),
    ("tune.freeze", "Only the last layers, or parameters given by name."),
    ("optimizer", "The update rule. Names and meaning as in PyTorch."),
    ("schedule", "The learning rate over the steps, as in transformers."),
    (
        "rlhf",
        "Preferences (stages `reward`, `dpo`, `orpo`, `simpo`, `kto`) and reinforcement (`grpo`, `ppo`). Names and \
         meaning as in TRL.",
    ),
    (
        "rlhf.grpo",
        "The loss of GRPO and its kin. Names and meaning as in TRL.",
    ),
    ("rlhf.ppo", "The loss of PPO. Names and meaning as in TRL."),
    (
        "distill",
        "Distillation (`train.stage = \"distill\"`): the model of the recipe learns from a teacher. docs/distillation.md explains it.",
    ),
    ("train", "The run: stage, length, batch, saving."),
];

/// Tables of the design that this version does not know yet.
pub const TABLES_NOT_BUILT: &[&str] = &[];

/// Values that the design names and this version does not do yet: key, value.
pub const NOT_BUILT: &[(&str, &str)] = &[];

/// Names that other tools use for our keys.
pub const ALIASES: &[(&str, &str)] = &[
    ("alpha", "tune.lora.lora_alpha"),
    ("badam_mask_mode", "tune.block.mask"),
    ("badam_update_ratio", "tune.block.update_ratio"),
    ("base_model", "model.path"),
    ("bf16", "model.dtype"),
    ("cutoff_len", "data.max_length"),
    ("dataset", "data.train"),
    ("dropout", "tune.lora.lora_dropout"),
    ("epochs", "train.num_epochs"),
    ("finetuning_type", "tune.method"),
    ("grad_accum", "train.gradient_accumulation_steps"),
    ("grad_clip", "train.max_grad_norm"),
    ("init_r", "tune.lora.r"),
    ("iters", "train.max_steps"),
    ("lora_r", "tune.lora.r"),
    ("lora_rank", "tune.lora.r"),
    ("lr", "optimizer.learning_rate"),
    ("lr_scheduler_type", "schedule.name"),
    ("mask_mode", "tune.block.mask"),
    ("max_seq_len", "data.max_length"),
    ("max_seq_length", "data.max_length"),
    ("micro_batch_size", "train.batch_size"),
    ("model_name_or_path", "model.path"),
    ("num_train_epochs", "train.num_epochs"),
    ("optim", "optimizer.name"),
    ("per_device_train_batch_size", "train.batch_size"),
    ("rank", "tune.lora.r"),
    ("sequence_len", "data.max_length"),
    ("switch_block_every", "tune.block.switch_every"),
    ("switch_mode", "tune.block.order"),
    ("torch_dtype", "model.dtype"),
    ("train_file", "data.train"),
    ("validation_file", "data.eval"),
];

const fn key(
    table: &'static str,
    name: &'static str,
    kind: Kind,
    default: &'static str,
    reason: &'static str,
    doc: &'static str,
) -> Key {
    Key {
        table,
        name,
        kind,
        default,
        reason,
        doc,
        when: None,
    }
}

const fn when(key: Key, other: &'static str, values: &'static [&'static str]) -> Key {
    Key {
        when: Some((other, values)),
        ..key
    }
}

const fn block(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("tune.block", name, kind, default, reason, doc),
        "tune.method",
        &["block"],
    )
}

const fn lora(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("tune.lora", name, kind, default, reason, doc),
        "tune.method",
        &["lora"],
    )
}

const fn of_type(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    reason: &'static str,
    doc: &'static str,
    types: &'static [&'static str],
) -> Key {
    when(
        key("tune.lora", name, kind, default, reason, doc),
        "tune.lora.peft_type",
        types,
    )
}

const fn reinforce(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    reason: &'static str,
    doc: &'static str,
) -> Key {
    when(
        key("rlhf", name, kind, default, reason, doc),
        "train.stage",
        &["grpo", "ppo"],
    )
}

const fn grpo(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("rlhf.grpo", name, kind, default, reason, doc),
        "train.stage",
        &["grpo"],
    )
}

const fn ppo(name: &'static str, kind: Kind, default: &'static str, reason: &'static str, doc: &'static str) -> Key {
    when(
        key("rlhf.ppo", name, kind, default, reason, doc),
        "train.stage",
        &["ppo"],
    )
}

/// A key of preference stages.
const fn preference(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    reason: &'static str,
    doc: &'static str,
    stages: &'static [&'static str],
) -> Key {
    when(key("rlhf", name, kind, default, reason, doc), "train.stage", stages)
}

/// The names of `rlhf.loss_type`: each stage has its own.
const LOSSES: &[&str] = &[
    "auto",
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
    "kto",
    "apo_zero_unpaired",
];

const fn from(min: i64) -> Kind {
    Kind::Integer { min, max: i64::MAX }
}

/// More than zero, less than one.
const INSIDE_ONE: Range = Range {
    min: 0.0,
    max: 1.0,
    min_open: true,
    max_open: true,
};
/// One or more.
const ONE_OR_MORE: Range = Range {
    min: 1.0,
    max: f64::INFINITY,
    min_open: false,
    max_open: true,
};
/// Zero or more.
const POSITIVE_OR_ZERO: Range = Range {
    min: 0.0,
    max: f64::INFINITY,
    min_open: false,
    max_open: true,
};
/// More than zero.
const POSITIVE: Range = Range {
    min_open: true,
    ..POSITIVE_OR_ZERO
};
/// 0 to 1 with both ends.
const PART: Range = Range {
    min: 0.0,
    max: 1.0,
    min_open: false,
    max_open: false,
};
/// More than 0, up to 1.
const RATIO: Range = Range { min_open: true, ..PART };
/// 0 up to, but not, 1.
const BELOW_ONE: Range = Range { max_open: true, ..PART };

pub static KEYS: &[Key] = &[
    key(
        "model",
        "path",
        Kind::Text,
        "",
        "",
        "Hub id, local directory, or `shape:NAME` (seeded random weights of a built-in shape, for plans and benchmarks).",
    ),
    key(
        "model",
        "revision",
        Kind::Text,
        "\"main\"",
        "the branch every hub repository has",
        "Branch, tag or commit of a hub model.",
    ),
    key(
        "model",
        "dtype",
        Kind::Name(Dtype::NAMES),
        "\"bf16\"",
        "half the memory of f32; sums and optimizer states stay in f32",
        "Unquantized weights and matrix products. `final/` is stored in it.",
    ),
    key(
        "model",
        "device",
        Kind::Text,
        "\"auto\"",
        "the first GPU that this build can use, else the CPU",
        "`auto`, `cpu`, or `cuda:0` and so on.",
    ),
    key(
        "model",
        "init",
        Kind::Name(ModelInit::NAMES),
        "\"pretrained\"",
        "fine-tuning starts from the weights in the model directory",
        "`random` draws the first weights anew, to pre-train.",
    ),
    key(
        "memory",
        "budget",
        Kind::Size,
        "\"auto\"",
        "what the device has free at the start",
        "Most memory to use, such as `22GiB`.",
    ),
    key(
        "memory",
        "frozen_weights",
        Kind::Name(FrozenWeights::NAMES),
        "\"auto\"",
        "as `model.dtype`: nothing is lost",
        "Storage of the projections of the layers that are not trained: as codes they take a half (`int8`) to a quarter (`int4`, `nf4`) of bf16, and lose precision. Norms, biases, embedding and head stay as they are.",
    ),
    key(
        "memory",
        "overrides",
        Kind::Map(Storage::NAMES),
        "{}",
        "every projection alike",
        "Another storage for some projections: starts of parameter names (`\"layers.0.\"`), or names with `*` (`\"*.down_proj.*\"`). The longest that fits counts.",
    ),
    key(
        "memory",
        "group_size",
        Kind::AutoInteger { min: 1 },
        "\"auto\"",
        "a whole row for `int8`, 64 for `int4`",
        "Weights that share a scale: 64 or 128 for `int4`, 128 for `int8`. `nf4` has blocks of 64.",
    ),
    key(
        "memory",
        "double_quantization",
        Kind::Flag,
        "true",
        "0.4 bits a weight less, as in QLoRA",
        "`nf4`: the scales of the blocks are stored in 8 bits.",
    ),
    key(
        "memory",
        "tier",
        Kind::Name(Tier::NAMES),
        "\"auto\"",
        "on the device where they fit, else on the disk",
        "Where the weights live that are not trained now: on the `device`, in the `host`'s memory (the same thing on a CPU), or on the `disk`: then they are read layer by layer, and what was trained is kept in files of the run. The results are the same bits.",
    ),
    key(
        "memory",
        "head_chunk",
        Kind::AutoInteger { min: 0 },
        "\"auto\"",
        "held whole where it fits",
        "With `tier = \"disk\"`: how many rows of the output projection are here at a time (rounded up to a multiple of 4096); `0` holds it whole. The results are the same bits.",
    ),
    key(
        "memory",
        "activations",
        Kind::Name(Activations::NAMES),
        "\"auto\"",
        "as many layers keep theirs as the budget allows; the others recompute from their input",
        "What is kept of the forward pass for the backward pass: `keep` everything, `recompute` (only layer inputs), or `auto`. The results are the same bits.",
    ),
    key(
        "memory",
        "mlp_chunk",
        Kind::AutoInteger { min: 0 },
        "\"auto\"",
        "all at once where that fits",
        "How many tokens go through an MLP at a time: of its wide tensors only so much exists at once. `0` takes all. Outputs are the same bits; a gradient that is summed over the pieces can differ in its last bits.",
    ),
    key(
        "data",
        "train",
        Kind::Texts,
        "",
        "",
        "File or list of files (jsonl, json, csv, parquet), relative to the current directory.",
    ),
    key(
        "data",
        "eval",
        Kind::Texts,
        "[]",
        "no evaluation unless asked for",
        "File or list of files to evaluate on.",
    ),
    key(
        "data",
        "eval_fraction",
        Kind::Number(BELOW_ONE),
        "0.0",
        "every row is trained",
        "Part of the train rows to hold out for evaluation, in place of `eval`.",
    ),
    key(
        "data",
        "format",
        Kind::Name(RowFormat::NAMES),
        "\"auto\"",
        "told by the fields of the first row",
        "How a row is written.",
    ),
    key(
        "data",
        "max_length",
        Kind::Integer { min: 2, max: 1 << 31 },
        "2048",
        "long enough for most instruction rows; longer rows are cut, counted and reported",
        "Most tokens in a row.",
    ),
    key(
        "data",
        "packing",
        Kind::Flag,
        "true",
        "no time is spent on padding; documents never attend to each other",
        "Several rows in one sequence of `max_length`; positions restart at each row.",
    ),
    key(
        "data",
        "train_on",
        Kind::Name(TrainOn::NAMES),
        "\"assistant\"",
        "the model learns to answer, not to ask; text rows are trained whole",
        "`assistant`: every assistant turn; `completion`: the last answer only; `all`: every token.",
    ),
    key(
        "data",
        "shuffle",
        Kind::Flag,
        "true",
        "neighbouring rows of a file are often alike",
        "A new order each epoch, from (seed, epoch). `false` takes rows in the order of the file.",
    ),
    key(
        "data",
        "chat_template",
        Kind::Text,
        "\"auto\"",
        "the template that comes with the model",
        "`auto` or a path to a Jinja file.",
    ),
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
        Kind::AutoInteger { min: 1 },
        "\"auto\"",
        "clamp(rows / (batch rows * blocks), 50, 100) steps",
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
    lora(
        "peft_type",
        Kind::Name(PeftType::NAMES),
        "\"lora\"",
        "the best known, and every loader reads it",
        "What an adapter adds to a linear.",
    ),
    lora(
        "r",
        Kind::Integer { min: 1, max: 1 << 20 },
        "16",
        "a common choice",
        "Rank.",
    ),
    lora(
        "lora_alpha",
        Kind::Number(POSITIVE),
        "32",
        "twice the rank, a common choice",
        "Scale: the adapter is multiplied by `lora_alpha / r`.",
    ),
    lora(
        "lora_dropout",
        Kind::Number(BELOW_ONE),
        "0.0",
        "one pass over the data seldom overfits",
        "Dropout before the adapter.",
    ),
    lora(
        "target_modules",
        Kind::Texts,
        "\"all-linear\"",
        "adapters on every linear come closest to full training",
        "`all-linear`, names or name endings of modules, or one regular expression over whole module paths.",
    ),
    lora(
        "exclude_modules",
        Kind::Texts,
        "[]",
        "every target gets an adapter",
        "Targets that get none: names or name endings, or one regular expression.",
    ),
    lora(
        "layers_to_transform",
        Kind::Integers,
        "[]",
        "every layer",
        "Only these layers get adapters, counted from 0; empty is every layer.",
    ),
    lora(
        "rank_pattern",
        Kind::Texts,
        "[]",
        "one rank for all",
        "Ranks of single modules, each as `name=rank`; names as in PEFT, the first that matches counts.",
    ),
    lora(
        "alpha_pattern",
        Kind::Texts,
        "[]",
        "one scale for all",
        "`lora_alpha` of single modules, each as `name=alpha`.",
    ),
    lora(
        "modules_to_save",
        Kind::Texts,
        "[]",
        "only adapters train",
        "Modules that train whole beside the adapters and are saved with them, for example `lm_head`.",
    ),
    of_type(
        "trainable_token_indices",
        Kind::Integers,
        "[]",
        "only adapters train",
        "Tokens whose rows of the embedding train beside the adapters, for example new ones: not the whole matrix. A head of its own trains the same rows; PEFT does so where `lm_head` is named too.",
        &["lora"],
    ),
    lora(
        "init_lora_weights",
        Kind::Name(LoraInit::NAMES),
        "\"default\"",
        "as in PEFT: A uniform, B zero",
        "How adapters start.",
    ),
    lora(
        "init_samples",
        from(1),
        "64",
        "enough for the main directions",
        "Training rows that the starts `eva` and `lora_ga` look at, in order.",
    ),
    lora(
        "pissa_niter",
        Kind::Integer { min: 0, max: 1000 },
        "0",
        "exact",
        "Power iterations of a fast randomized SVD for `pissa`; 0 is the exact SVD. PEFT: `pissa_niter_N`.",
    ),
    lora(
        "loftq_iter",
        Kind::Integer { min: 1, max: 1000 },
        "1",
        "as in PEFT",
        "Iterations of `loftq`: with more than one the codes of the weights are made anew of what the pair does not say.",
    ),
    lora(
        "use_rslora",
        Kind::Flag,
        "false",
        "as in PEFT",
        "Scale by `lora_alpha / sqrt(r)`.",
    ),
    lora(
        "use_dora",
        Kind::Flag,
        "false",
        "as in PEFT",
        "Weight-decomposed adapters: size and direction of each row learn apart.",
    ),
    lora(
        "loraplus_lr_ratio",
        Kind::Number(POSITIVE),
        "1.0",
        "A and B learn at one rate",
        "Learning rate of B over that of A (LoRA+).",
    ),
    of_type(
        "feedforward_modules",
        Kind::Texts,
        "[\"down_proj\"]",
        "as in PEFT for these models",
        "`ia3`: targets whose input is scaled instead of their output.",
        &["ia3"],
    ),
    of_type(
        "oft_block_size",
        from(2),
        "32",
        "as in PEFT",
        "`oft`: size of the rotated blocks; it must divide the input features of every target.",
        &["oft"],
    ),
    of_type(
        "use_cayley_neumann",
        Kind::Flag,
        "true",
        "as in PEFT: faster, nearly orthogonal",
        "`oft`: rotations by five terms of a series instead of an inverse.",
        &["oft"],
    ),
    of_type(
        "decompose_factor",
        Kind::Integer { min: -1, max: 1 << 20 },
        "-1",
        "as in PEFT: as square as can be",
        "`lokr`: size of the first factor.",
        &["lokr"],
    ),
    of_type(
        "decompose_both",
        Kind::Flag,
        "false",
        "as in PEFT",
        "`lokr`: the first factor may be a low-rank product too.",
        &["lokr"],
    ),
    of_type(
        "d_initial",
        Kind::Number(POSITIVE),
        "0.1",
        "as in PEFT",
        "`vera`: what the vector between the shared matrices starts with.",
        &["vera"],
    ),
    lora(
        "save_residual",
        Kind::Flag,
        "false",
        "a plain LoRA fits the original weights everywhere",
        "Starts that move a part of the weights (`corda`, `pissa`, `olora`, `lora_ga`): save the adapter as trained and the changed weights as `final/base/`.",
    ),
    lora(
        "save_rank",
        Kind::Integer { min: 0, max: 1 << 20 },
        "0",
        "no loss",
        "Such starts are saved as plain LoRA of twice the rank; a number here compresses to that rank, and the error is told.",
    ),
    lora(
        "adapter",
        Kind::Text,
        "\"\"",
        "start fresh",
        "Start from this PEFT adapter directory; its config gives kind, rank, targets and flags.",
    ),
    when(
        key(
            "tune.lora.corda",
            "method",
            Kind::Name(CordaMethod::NAMES),
            "\"ipm\"",
            "as in PEFT: it needs no other rows than the task's",
            "`kpm`: train the components that matter least for `data`, which is what must be kept; `ipm`: those that matter most for `data`, which is the task.",
        ),
        "tune.method",
        &["lora"],
    ),
    when(
        key(
            "tune.lora.corda",
            "data",
            Kind::Texts,
            "[]",
            "the training rows",
            "Rows to look at, in the formats of `data.train`: for `kpm` questions of what must be kept, for `ipm` the task.",
        ),
        "tune.method",
        &["lora"],
    ),
    when(
        key(
            "tune.lora.corda",
            "samples",
            from(1),
            "256",
            "as in the paper",
            "Rows taken, in order.",
        ),
        "tune.method",
        &["lora"],
    ),
    when(
        key(
            "tune.lora.corda",
            "compatible",
            Kind::Name(CordaArithmetic::NAMES),
            "\"ft\"",
            "every token counts the same",
            "Whose arithmetic: `peft` divides the inputs of each row by their largest value, and damps and inverts in f32, as PEFT does.",
        ),
        "tune.method",
        &["lora"],
    ),
    when(
        key(
            "tune.lora.corda",
            "adaptive_rank",
            Kind::Flag,
            "false",
            "one rank for all",
            "Ranks by module under the same total (CorDA++): more where the inputs are further from even.",
        ),
        "tune.method",
        &["lora"],
    ),
    when(
        key(
            "tune.lora.eva",
            "rho",
            Kind::Number(ONE_OR_MORE),
            "2.0",
            "as in PEFT",
            "Ranks by module under the same total: at most `rho` times `r`, where directions explain most; 1 leaves every rank as it is.",
        ),
        "tune.method",
        &["lora"],
    ),
    when(
        key(
            "tune.lora.adalora",
            "target_r",
            Kind::Integer { min: 0, max: 1 << 20 },
            "0",
            "two thirds of `r`, as PEFT's 8 of 12; the ranks of a given `tune.lora.adapter` stay",
            "Mean rank of the linears in the end; `r` is PEFT's `init_r`.",
        ),
        "tune.lora.peft_type",
        &["adalora"],
    ),
    when(
        key(
            "tune.lora.adalora",
            "tinit",
            from(0),
            "0",
            "as in PEFT",
            "Steps before ranks begin to fall.",
        ),
        "tune.lora.peft_type",
        &["adalora"],
    ),
    when(
        key(
            "tune.lora.adalora",
            "tfinal",
            from(0),
            "0",
            "as in PEFT",
            "Last steps, in which the ranks that are left train on.",
        ),
        "tune.lora.peft_type",
        &["adalora"],
    ),
    when(
        key(
            "tune.lora.adalora",
            "deltaT",
            from(1),
            "1",
            "as in PEFT",
            "Steps from one allocation of ranks to the next.",
        ),
        "tune.lora.peft_type",
        &["adalora"],
    ),
    when(
        key(
            "tune.lora.adalora",
            "beta1",
            Kind::Number(INSIDE_ONE),
            "0.85",
            "as in PEFT",
            "Smoothing of the importance of each number.",
        ),
        "tune.lora.peft_type",
        &["adalora"],
    ),
    when(
        key(
            "tune.lora.adalora",
            "beta2",
            Kind::Number(INSIDE_ONE),
            "0.85",
            "as in PEFT",
            "Smoothing of the uncertainty of that importance.",
        ),
        "tune.lora.peft_type",
        &["adalora"],
    ),
    when(
        key(
            "tune.lora.adalora",
            "orth_reg_weight",
            Kind::Number(POSITIVE_OR_ZERO),
            "0.5",
            "as in PEFT",
            "Weight of the distance of A·Aᵀ and Bᵀ·B from the identity; it is part of the gradients, not of the reported loss.",
        ),
        "tune.lora.peft_type",
        &["adalora"],
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
    key(
        "optimizer",
        "name",
        Kind::Name(OptimizerName::NAMES),
        "\"adamw\"",
        "the usual choice for transformers",
        "The update rule. Adafactor keeps row and column means of the squared gradient, no momentum, and takes `learning_rate` as it is.",
    ),
    key(
        "optimizer",
        "learning_rate",
        Kind::Number(POSITIVE_OR_ZERO),
        "1e-5",
        "careful enough for full and block training; LoRA usually takes 1e-4 to 2e-4",
        "Highest learning rate.",
    ),
    when(
        key(
            "optimizer",
            "betas",
            Kind::Pair(BELOW_ONE),
            "[0.9, 0.999]",
            "as in PyTorch",
            "Decay of the two moments; Lion's authors use `[0.9, 0.99]`.",
        ),
        "optimizer.name",
        &["adamw", "lion"],
    ),
    when(
        key(
            "optimizer",
            "eps",
            Kind::Number(POSITIVE),
            "1e-8",
            "as in PyTorch",
            "Added to the root of the second moment.",
        ),
        "optimizer.name",
        &["adamw"],
    ),
    key(
        "optimizer",
        "weight_decay",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "short runs need none",
        "Weight decay, added to the gradient in SGD, decoupled in the others; never on norms and biases.",
    ),
    when(
        key(
            "optimizer",
            "momentum",
            Kind::Number(BELOW_ONE),
            "0.0",
            "as in PyTorch",
            "Momentum of SGD.",
        ),
        "optimizer.name",
        &["sgd"],
    ),
    when(
        key(
            "optimizer",
            "state",
            Kind::Name(StateDtype::NAMES),
            "\"f32\"",
            "exact",
            "Storage of moments; `int8`: the dynamic code in blocks of 256, a quarter of the memory; parameters with fewer than 4096 elements stay f32.",
        ),
        "optimizer.name",
        &["adamw", "sgd", "lion"],
    ),
    when(
        key(
            "optimizer",
            "master",
            Kind::Name(Master::NAMES),
            "\"f32\"",
            "exact",
            "What a bf16 weight knows beyond bf16: `f32` keeps it, in 2 more bytes an element; `stochastic` keeps nothing and rounds at random, right on average.",
        ),
        "model.dtype",
        &["bf16"],
    ),
    key(
        "schedule",
        "name",
        Kind::Name(ScheduleName::NAMES),
        "\"cosine\"",
        "the usual choice for fine-tuning",
        "Shape of the learning rate over the steps.",
    ),
    when(
        key(
            "schedule",
            "warmup_ratio",
            Kind::Number(PART),
            "0.03",
            "the first steps of AdamW are large without it",
            "Part of the steps over which the rate rises, rounded up.",
        ),
        "schedule.warmup_steps",
        &["auto"],
    ),
    key(
        "schedule",
        "warmup_steps",
        Kind::AutoInteger { min: 0 },
        "\"auto\"",
        "told by `warmup_ratio`",
        "Steps over which the rate rises, in place of `warmup_ratio`.",
    ),
    when(
        key(
            "schedule",
            "decay_ratio",
            Kind::Number(PART),
            "0.1",
            "a common choice",
            "Part of the steps that decays at the end of `wsd`.",
        ),
        "schedule.name",
        &["wsd"],
    ),
    when(
        key(
            "schedule",
            "min_lr_ratio",
            Kind::Number(PART),
            "0.0",
            "as in transformers",
            "Lowest multiplier of `wsd`.",
        ),
        "schedule.name",
        &["wsd"],
    ),
    preference(
        "loss_type",
        Kind::Name(LOSSES),
        "\"auto\"",
        "`sigmoid` for `dpo`, `kto` for `kto`",
        "The loss: for `dpo` any but the last two, for `kto` one of these.",
        &["dpo", "kto"],
    ),
    preference(
        "beta",
        Kind::Number(POSITIVE),
        "0.1",
        "as in TRL",
        "How strongly the policy is held to its reference: higher is nearer. In `ipo` it is τ, in `simpo` the scale of the rewards, in `orpo` the weight of the odds.",
        &["dpo", "orpo", "simpo", "kto"],
    ),
    preference(
        "label_smoothing",
        Kind::Number(BELOW_ONE),
        "0.0",
        "labels are taken as right",
        "Part of the labels that are wrong: for `robust`, `exo_pair`, `aot`, `aot_unpaired` and `simpo`.",
        &["dpo", "simpo"],
    ),
    preference(
        "ld_alpha",
        Kind::Number(PART),
        "1.0",
        "every token counts alike",
        "Weight of an answer's tokens beyond the length of the shorter answer (LD-DPO).",
        &["dpo"],
    ),
    preference(
        "f_divergence_type",
        Kind::Name(FDivergence::NAMES),
        "\"reverse_kl\"",
        "DPO as it was first written",
        "How the distance from the reference is measured (f-DPO).",
        &["dpo"],
    ),
    preference(
        "f_alpha_divergence_coef",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.5",
        "as in TRL",
        "α of `alpha_divergence`.",
        &["dpo"],
    ),
    preference(
        "discopop_tau",
        Kind::Number(POSITIVE),
        "0.05",
        "its paper's choice",
        "Temperature of `discopop`.",
        &["dpo"],
    ),
    preference(
        "simpo_gamma",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.5",
        "as in TRL",
        "Margin by which the chosen answer should win.",
        &["simpo"],
    ),
    preference(
        "cpo_alpha",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "SimPO as it was written; TRL's CPO has 1.0",
        "Weight of the cross-entropy of the chosen answers.",
        &["simpo"],
    ),
    preference(
        "desirable_weight",
        Kind::Number(POSITIVE_OR_ZERO),
        "1.0",
        "as in TRL",
        "Weight of desirable answers: to balance unequal numbers of them.",
        &["kto"],
    ),
    preference(
        "undesirable_weight",
        Kind::Number(POSITIVE_OR_ZERO),
        "1.0",
        "as in TRL",
        "Weight of undesirable answers.",
        &["kto"],
    ),
    preference(
        "center_rewards_coefficient",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "off; 0.01 is a common choice",
        "Pulls the mean reward of a pair to zero.",
        &["reward"],
    ),
    when(
        key(
            "distill",
            "teacher",
            Kind::Text,
            "\"\"",
            "stored outputs can take its place",
            "The teacher: hub id or local directory, of any family, with the same tokenizer. `ft distill cache` needs it; training too, unless `teacher_cache` is set.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "teacher_revision",
            Kind::Text,
            "\"main\"",
            "the branch every hub repository has",
            "Branch, tag or commit of a hub teacher.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "teacher_weights",
            Kind::Name(FrozenWeights::NAMES),
            "\"auto\"",
            "as `model.dtype`: nothing is lost",
            "Storage of the teacher's projections, as in `memory.frozen_weights`; `f32` and `bf16` are for all its weights.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "teacher_tier",
            Kind::Name(TeacherTier::NAMES),
            "\"device\"",
            "the fastest",
            "Where the teacher's weights live: with `host` and `disk` one layer after the other comes to the device in every forward pass.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "teacher_cache",
            Kind::Text,
            "\"\"",
            "the teacher runs beside the student",
            "Directory that `ft distill cache` has written: its stored outputs take the place of the teacher.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "top_k",
            Kind::Integer { min: 1, max: 65536 },
            "64",
            "most of the mass, in 260 to 390 bytes a token",
            "Likeliest ids of a token whose log-probabilities `ft distill cache` stores; all others share one number.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "beta",
            Kind::Number(PART),
            "0.5",
            "as in TRL",
            "The divergence: 0 is KL(teacher‖student), 1 is KL(student‖teacher), between them the generalized Jensen-Shannon divergence of GKD.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "temperature",
            Kind::Number(POSITIVE),
            "1.0",
            "the distributions as they are",
            "Both distributions of the divergence are softened by it.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "alpha",
            Kind::Number(PART),
            "0.0",
            "the teacher alone teaches",
            "Part of the cross-entropy with the rows' own tokens in the loss; the divergence has the rest.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "lmbda",
            Kind::Number(PART),
            "0.0",
            "rows as they are: no decoding",
            "Part of the rows that the student answers itself before the teacher scores them (GKD).",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "max_new_tokens",
            from(1),
            "128",
            "as in TRL",
            "Longest answer of the student, in tokens.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "rollout_temperature",
            Kind::Number(POSITIVE_OR_ZERO),
            "1.0",
            "the student's own distribution",
            "Temperature at which the student answers; 0 is greedy.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "hidden_weight",
            Kind::Number(POSITIVE_OR_ZERO),
            "0.0",
            "outputs teach most",
            "Weight of the distance between hidden states of student and teacher; 0 is off.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "hidden_loss",
            Kind::Name(HiddenLoss::NAMES),
            "\"mse\"",
            "as in TinyBERT",
            "The distance: mean square, or 1 - cosine.",
        ),
        "train.stage",
        &["distill"],
    ),
    when(
        key(
            "distill",
            "layer_map",
            Kind::AutoPairs,
            "\"auto\"",
            "every inner state, at the same part of the depth",
            "Pairs `[student, teacher]` of hidden states to compare: 0 is the output of the embedding, l that of layer l.",
        ),
        "train.stage",
        &["distill"],
    ),
    key(
        "train",
        "stage",
        Kind::Name(Stage::NAMES),
        "\"sft\"",
        "supervised fine-tuning",
        "The objective. `reward`, `dpo`, `orpo`, `simpo` and `kto` learn from preference rows.",
    ),
    key(
        "train",
        "num_epochs",
        Kind::Number(POSITIVE),
        "1",
        "more passes over little data overfit",
        "Passes over the data.",
    ),
    key(
        "train",
        "max_steps",
        from(-1),
        "-1",
        "`num_epochs` tells",
        "Optimizer steps; 0 saves the first state in `final/`; -1 leaves it to `num_epochs`.",
    ),
    key(
        "train",
        "batch_size",
        from(1),
        "1",
        "least memory",
        "Sequences in one forward pass.",
    ),
    key(
        "train",
        "gradient_accumulation_steps",
        from(1),
        "8",
        "a steady gradient from small batches",
        "Forward passes in one optimizer step; the loss is divided by the trained tokens of all of them.",
    ),
    key(
        "train",
        "max_grad_norm",
        Kind::Number(POSITIVE_OR_ZERO),
        "1.0",
        "as in transformers",
        "Global norm to which gradients are clipped; 0 is off.",
    ),
    key(
        "train",
        "seed",
        from(0),
        "42",
        "as in transformers",
        "Seed of every random choice.",
    ),
    key(
        "train",
        "logging_steps",
        from(1),
        "1",
        "every step is worth a line",
        "Steps between two report lines.",
    ),
    key(
        "train",
        "eval_steps",
        from(0),
        "0",
        "evaluate before and after only",
        "Steps between two evaluations; 0 is never in between.",
    ),
    key(
        "train",
        "save_steps",
        from(0),
        "100",
        "little work is lost if the run is stopped hard",
        "Steps between two checkpoints; 0 is never in between.",
    ),
    key(
        "train",
        "save_total_limit",
        from(1),
        "2",
        "the newest and the one before it",
        "Checkpoints to keep; an old one goes only after the new one verifies.",
    ),
    key(
        "train",
        "output_dir",
        Kind::Text,
        "\"runs/sft\"",
        "one folder for all runs",
        "The run directory.",
    ),
    key(
        "train",
        "sample_prompts",
        Kind::Texts,
        "[]",
        "no samples unless asked for",
        "Prompts that are answered before and after the run, to see the difference.",
    ),
    key(
        "train",
        "predict_with_generate",
        Kind::Flag,
        "false",
        "decoding takes longer than the loss",
        "Evaluations also answer the rows by greedy decoding and count exact matches.",
    ),
    reinforce(
        "rewards",
        Kind::Texts,
        "[]",
        "has to be written for these stages",
        "What an answer is worth, one text each: `exact` (the known answer), `numeric` (its last number is that of the known answer), `regex:PATTERN`, `json` or `json:SCHEMA-FILE`, `length:TOKENS` (falls from 0 to -1 between so many tokens and `max_completion_length`), `model:DIRECTORY` (a reward model), `program:COMMAND` (a local program; see docs/rlhf.md).",
    ),
    reinforce(
        "reward_weights",
        Kind::Numbers,
        "[]",
        "all rewards count the same",
        "A factor for each reward; empty is 1 for all.",
    ),
    reinforce(
        "answer_column",
        Kind::Text,
        "\"answer\"",
        "the name most data sets of this kind use",
        "The field with the known answer; rows without it have their last assistant message or completion as answer.",
    ),
    reinforce(
        "reward_timeout",
        Kind::Number(POSITIVE),
        "30.0",
        "a row that takes longer hangs",
        "Seconds a reward program has for one row.",
    ),
    reinforce(
        "reward_restarts",
        from(0),
        "3",
        "survives a rare crash, and shows a lasting one",
        "How often a reward program that died or hung is started again, over the whole run.",
    ),
    reinforce(
        "num_generations",
        from(1),
        "8",
        "as in TRL",
        "Answers to each prompt: the group of GRPO. PPO takes as many, each for itself.",
    ),
    reinforce(
        "max_completion_length",
        from(1),
        "256",
        "long enough for an answer with its reasons",
        "Longest answer in tokens; prompt and answer together fit in `data.max_length`.",
    ),
    reinforce(
        "temperature",
        Kind::Number(POSITIVE),
        "1.0",
        "the policy as it is",
        "Divides the logits, in the rollout and in the loss.",
    ),
    reinforce(
        "top_k",
        from(0),
        "0",
        "off: the loss knows nothing of it",
        "The rollout draws from the k most likely tokens; 0 is off.",
    ),
    reinforce(
        "top_p",
        Kind::Number(RATIO),
        "1.0",
        "off: the loss knows nothing of it",
        "The rollout draws from the most likely tokens that reach p; 1 is off.",
    ),
    reinforce(
        "num_iterations",
        from(1),
        "1",
        "on-policy as far as can be",
        "Times that the answers of a rollout are learned from.",
    ),
    reinforce(
        "num_mini_batches",
        from(1),
        "1",
        "on-policy as far as can be",
        "Optimizer steps that one time through the answers takes; a rollout has `batch_size × gradient_accumulation_steps × num_mini_batches` answers.",
    ),
    reinforce(
        "rollout_weights",
        Kind::Name(RolloutWeights::NAMES),
        "\"exact\"",
        "nothing to correct for",
        "Storage of the weights that sample; the weights that train stay as they are.",
    ),
    reinforce(
        "rollout_correction",
        Kind::Name(RolloutCorrection::NAMES),
        "\"sequence_mask\"",
        "as in TRL",
        "Importance weights between the exact weights and coded `rollout_weights`: a ratio for each token or for the whole answer, cut off at the bounds or 0 outside of them.",
    ),
    reinforce(
        "rollout_clip_max",
        Kind::Number(POSITIVE),
        "3.0",
        "as in TRL",
        "Upper bound of these ratios.",
    ),
    reinforce(
        "rollout_clip_min",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "as in TRL",
        "Lower bound of these ratios; 0 is none.",
    ),
    reinforce(
        "sample_steps",
        from(0),
        "10",
        "enough to read along",
        "Rollouts between two that leave samples in `samples.jsonl`; 0 is never.",
    ),
    reinforce(
        "samples",
        from(1),
        "4",
        "a few are read, many are not",
        "Answers that such a rollout leaves.",
    ),
    grpo(
        "loss_type",
        Kind::Name(GrpoLoss::NAMES),
        "\"dapo\"",
        "as in TRL: no answer counts less for being long",
        "`grpo`: mean over the tokens of an answer, then over answers; `dapo`: over all tokens of the rollout; `bnpo`: over those of the window; `dr_grpo`: divided by the longest answer allowed; `rloo`: one ratio and one loss for the whole answer, advantages against the other answers of the group, KL in the reward.",
    ),
    grpo(
        "importance_sampling_level",
        Kind::Name(ImportanceLevel::NAMES),
        "\"token\"",
        "as in TRL",
        "Whose probability ratio is clipped: each token's, or that of the whole answer, to the power of 1 / its length (GSPO).",
    ),
    grpo(
        "scale_rewards",
        Kind::Name(ScaleRewards::NAMES),
        "\"group\"",
        "as in TRL",
        "Advantages are divided by the standard deviation of the rewards of their group, of the whole rollout, or not.",
    ),
    grpo(
        "epsilon",
        Kind::Number(POSITIVE),
        "0.2",
        "as in TRL",
        "Probability ratios are clipped at 1 - epsilon, and at 1 + epsilon_high.",
    ),
    grpo(
        "epsilon_high",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "symmetric",
        "Upper distance of the clipping; 0 is `epsilon`.",
    ),
    grpo(
        "delta",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "as in TRL: off",
        "Upper bound of the ratio where clipping leaves it open (negative advantages); 0 is none.",
    ),
    grpo(
        "beta",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "as in TRL: no reference model, no memory for it",
        "Factor of the KL divergence from the start of the run (k3 estimator in the loss; in the reward, log-ratio, with `rloo`).",
    ),
    grpo(
        "use_bias_correction_kl",
        Kind::Flag,
        "true",
        "as in TRL",
        "The KL term is weighted with the probability ratio too.",
    ),
    grpo(
        "mask_truncated_completions",
        Kind::Flag,
        "false",
        "as in TRL",
        "Answers that did not end by themselves are not learned from.",
    ),
    grpo(
        "normalize_advantages",
        Kind::Flag,
        "false",
        "as in TRL",
        "With `rloo`: advantages of a rollout get mean 0 and standard deviation 1.",
    ),
    ppo(
        "kl_coef",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.05",
        "as in TRL",
        "Factor of the KL penalty in the reward of each token; 0 needs no reference model.",
    ),
    ppo(
        "kl_estimator",
        Kind::Name(KlEstimator::NAMES),
        "\"k1\"",
        "as in TRL",
        "How the KL divergence is estimated at a token: `k1` the log-ratio, `k3` never negative.",
    ),
    ppo(
        "kl_target",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "a fixed factor",
        "KL divergence per answer in nats that `kl_coef` is led to; 0 keeps it fixed.",
    ),
    ppo(
        "kl_horizon",
        Kind::Number(POSITIVE),
        "10000.0",
        "as in Ziegler et al. 2019",
        "Answers over which `kl_coef` is led to its target.",
    ),
    ppo(
        "gamma",
        Kind::Number(PART),
        "1.0",
        "as in TRL",
        "Discount from one token to the next.",
    ),
    ppo(
        "lam",
        Kind::Number(PART),
        "0.95",
        "as in TRL",
        "Lambda of the generalized advantage estimation.",
    ),
    ppo(
        "cliprange",
        Kind::Number(POSITIVE),
        "0.2",
        "as in TRL",
        "Probability ratios are clipped to 1 ± this.",
    ),
    ppo(
        "cliprange_value",
        Kind::Number(POSITIVE),
        "0.2",
        "as in TRL",
        "A value counts as moved by this much at most.",
    ),
    ppo(
        "vf_coef",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.1",
        "as in TRL",
        "Factor of the value loss.",
    ),
    ppo(
        "whiten_rewards",
        Kind::Flag,
        "false",
        "as in TRL",
        "Rewards of a rollout get standard deviation 1.",
    ),
    ppo(
        "missing_eos_penalty",
        Kind::Number(POSITIVE_OR_ZERO),
        "0.0",
        "off",
        "Taken from the reward of answers that did not end by themselves.",
    ),
];
