//! The single table of recipe keys: type, range, default, the reason for the default, the effect of the key.
//! It drives parsing, "did you mean", the resolved recipe and `docs/recipe.md`.

mod adapters;
mod distill;
mod model;
mod preference;
mod rl;
mod train;
mod tune;

use super::types::*;

/// The values that a key accepts.
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
    /// As `Integer`, or `auto`.
    AutoInteger {
        min: i64,
        max: i64,
    },
    Number(Range),
    /// A number of this range, or `auto`.
    AutoNumber(Range),
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
    /// A table from user-defined texts to one of these names.
    Map(&'static [&'static str]),
}

/// `min` to `max`; an open end is excluded.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub min: f64,
    pub max: f64,
    pub min_open: bool,
    pub max_open: bool,
}

/// The key has an effect only if the key `.0` has one of the values `.1`.
pub type When = Option<(&'static str, &'static [&'static str])>;

#[derive(Debug)]
pub struct Key {
    pub table: &'static str,
    pub name: &'static str,
    pub kind: Kind,
    /// TOML text; empty means that the key is required.
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
    keys().find(|k| k.table == table && k.name == name)
}

/// Tables in the order in which they are printed, each with its subject.
pub const TABLES: &[(&str, &str)] = &[
    ("model", "The model and its computation."),
    (
        "memory",
        "Storage of weights and activations. With `auto` the planner chooses.",
    ),
    ("data", "The rows, their format, and the trained tokens."),
    ("tune", "Which parameters are trained."),
    (
        "tune.block",
        "Block training (BAdam): one block of parameters is active at a time.",
    ),
    ("tune.lora", "Adapters. Names and meaning as in PEFT."),
    (
        "tune.lora.corda",
        "CorDA: adapters are initialized from the covariance of the inputs of each linear.",
    ),
    (
        "tune.lora.adalora",
        "AdaLoRA: every adapter starts with rank `r`; during training the least important singular values of the whole model are set to zero.",
    ),
    (
        "tune.lora.eva",
        "EVA: adapters are initialized from the main directions of the inputs.",
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
        "The loss of GRPO and its variants. Names and meaning as in TRL.",
    ),
    ("rlhf.ppo", "The loss of PPO. Names and meaning as in TRL."),
    (
        "distill",
        "Distillation (`train.stage = \"distill\"`): a teacher trains the model of the recipe. See docs/distillation.md.",
    ),
    ("train", "The run: stage, length, batch, saving."),
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

const fn from(min: i64) -> Kind {
    Kind::Integer { min, max: i64::MAX }
}

/// A count that is multiplied with other counts: the product of three fits in 64 bits.
const MANY: Kind = Kind::Integer { min: 1, max: 1 << 20 };

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

/// Every key.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    let parts = [
        model::KEYS,
        tune::KEYS,
        adapters::KEYS,
        train::KEYS,
        preference::KEYS,
        rl::KEYS,
        distill::KEYS,
    ];
    parts.into_iter().flatten()
}
