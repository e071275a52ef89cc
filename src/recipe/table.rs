//! The table of recipe keys. A section of it is a struct: each field is a key with its type, default, the reason for
//! the default, range, and the effect of the key. The rules over several keys stand below the section.
//!
//! From a section come the typed values, parsing, "did you mean", the resolved recipe, `docs/recipe.md` and the JSON
//! schema.

use super::check::KeyValues;
use super::device_ref::DeviceRef;
use super::lower::KeyFaults;
use super::model_ref::ModelRef;
use super::types::*;
use super::value::{Auto, ChunkSize, KeyType, ValueKind};
use crate::base::Error;
use ft_base::named;
use std::fmt;
use std::sync::LazyLock;

/// The dotted path of a key: `train.batch_size`, written as `Train::batch_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyPath(pub &'static str);

impl KeyPath {
    /// True for a key of this table or of a table inside it.
    pub fn is_in(self, table: &str) -> bool {
        self.0.strip_prefix(table).is_some_and(|rest| rest.starts_with('.'))
    }

    /// `path = "text"`.
    pub fn is(self, text: &str) -> String {
        format!("{self} = \"{text}\"")
    }
}

impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}

/// The key has an effect only if the key `.0` has one of the values `.1`.
pub type KeyCondition = Option<(KeyPath, &'static [&'static str])>;

/// The allowed change of a key when a run is resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnResume {
    /// Nothing: it would be another run.
    Nothing,
    /// The value: what the run computes does not depend on it.
    Value,
    /// The path that it holds, if a hash proves that the content is the same.
    Path(PathContent),
}

/// The content of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathContent {
    BaseModel,
    TrainingRows,
    /// As `TrainingRows`, of a list of tables in which only the paths may change.
    Sources,
    EvaluationRows,
    /// The stage compares it: it saves the fingerprint of the teacher in its state.
    Teacher,
}

/// One row of the table.
#[derive(Debug)]
pub struct RecipeKey {
    pub path: KeyPath,
    pub table: &'static str,
    pub name: &'static str,
    pub kind: ValueKind,
    /// Range of a number.
    pub range: KeyRange,
    /// TOML text; empty means that the key is required.
    pub default: &'static str,
    pub reason: &'static str,
    pub doc: &'static str,
    pub when: KeyCondition,
    pub on_resume: OnResume,
}

impl RecipeKey {
    /// True if the key accepts `auto` in place of a value of its kind.
    pub fn accepts_auto(&self) -> bool {
        self.default == "\"auto\"" && !matches!(self.kind, ValueKind::Text | ValueKind::Name(_))
    }
}

/// `min` to `max`; an open end is excluded.
#[derive(Debug, Clone, Copy)]
pub struct KeyRange {
    pub min: f64,
    pub max: f64,
    pub min_open: bool,
    pub max_open: bool,
}

impl KeyRange {
    pub fn contains(&self, x: f64) -> bool {
        let above = if self.min_open { x > self.min } else { x >= self.min };
        let below = if self.max_open { x < self.max } else { x <= self.max };
        x.is_finite() && above && below
    }
}

/// `min` or more.
pub(super) const fn from(min: i64) -> KeyRange {
    KeyRange {
        max: f64::INFINITY,
        max_open: true,
        ..between(min, min)
    }
}

/// `min` to `max`, both included.
pub(super) const fn between(min: i64, max: i64) -> KeyRange {
    KeyRange {
        min: min as f64,
        max: max as f64,
        min_open: false,
        max_open: false,
    }
}

/// A count that is multiplied with other counts: the product of three fits in 64 bits.
const MANY: KeyRange = between(1, 1 << 20);
/// One or more.
const ONE_OR_MORE: KeyRange = from(1);
/// Zero or more.
const POSITIVE_OR_ZERO: KeyRange = from(0);
/// More than zero.
const POSITIVE: KeyRange = KeyRange {
    min_open: true,
    ..POSITIVE_OR_ZERO
};
/// 0 to 1 with both ends.
const PART: KeyRange = between(0, 1);
/// More than 0, up to 1.
const RATIO: KeyRange = KeyRange { min_open: true, ..PART };
/// 0 up to, but not, 1.
const BELOW_ONE: KeyRange = KeyRange { max_open: true, ..PART };
/// More than zero, less than one.
const INSIDE_ONE: KeyRange = KeyRange {
    min_open: true,
    ..BELOW_ONE
};

/// The results of a run do not depend on the key: rows are the same from a cache, bits on any number of ranks.
const FREE: OnResume = OnResume::Value;
const BASE_MODEL: OnResume = OnResume::Path(PathContent::BaseModel);
const TRAINING_ROWS: OnResume = OnResume::Path(PathContent::TrainingRows);
const EVALUATION_ROWS: OnResume = OnResume::Path(PathContent::EvaluationRows);
const TEACHER: OnResume = OnResume::Path(PathContent::Teacher);

/// A part of the recipe; `section!` declares it.
pub trait Section: Sized {
    /// The name of the table, and its subject.
    const TABLE: (&'static str, &'static str);
    /// When its keys have an effect; a key can have its own.
    const WHEN: KeyCondition;
    /// The keys of this section, without those of the sections inside it.
    const KEYS: &'static [RecipeKey];
    /// Adds the keys of this section, then those of the sections inside it.
    fn collect(out: &mut Vec<&'static RecipeKey>);
    /// The typed values.
    fn read(values: &KeyValues) -> Self;
}

/// Declares a section. A row is
///
/// `key: type = default, "reason for the default", in RANGE, when Section::key = ["value"], resume MARK;`
///
/// under the doc comment that describes the key to users. `default` is a TOML value; a key without it is required. `in`
/// is the range of a number. `when`: the key has an effect only with these values of another key; a row without it has
/// that of the section. `resume`: what may change when a run is resumed; nothing without it. `type as KIND` sets the
/// accepted values if the type does not (`value::KeyType`). `with` adds a section inside this one.
///
/// The result is the struct, a constant for each key (its `KeyPath`, `Self::key` inside the section), and `impl Section`.
macro_rules! section {
    (
        $(#[doc = $subject:literal])+
        pub struct $name:ident in $table:literal $(, when $cause:path = [$($causes:literal),+])? {
            $(
                $(#[doc = $doc:literal])+
                $key:ident: $type:ty $(as $kind:ident)? $(= $default:expr, $reason:literal)? $(, in $range:expr)?
                $(, when $other:path = [$($others:literal),+])? $(, resume $resume:expr)?;
            )*
            $(with $inner:ident: $inner_type:ty;)*
        }
    ) => {
        $(#[doc = $subject])+
        #[allow(non_snake_case, reason = "a key has its name in PEFT")]
        #[derive(Debug, Clone)]
        pub struct $name {
            $($(#[doc = $doc])+ pub $key: $type,)*
            $(#[doc = concat!("`", stringify!($inner), "`.")] pub $inner: $inner_type,)*
        }

        #[allow(non_upper_case_globals, reason = "the constant has the name of the key")]
        impl $name {
            $(
                #[doc = concat!("The key `", $table, ".", stringify!($key), "`.")]
                pub const $key: KeyPath = KeyPath(concat!($table, ".", stringify!($key)));
            )*
        }

        impl Section for $name {
            const TABLE: (&'static str, &'static str) = ($table, concat!($($subject),+).trim_ascii_start());
            const WHEN: KeyCondition = [$(Some(($cause, &[$($causes),+] as &[&str])),)? None][0];
            const KEYS: &'static [RecipeKey] = &[$(RecipeKey {
                path: Self::$key,
                table: $table,
                name: stringify!($key),
                // The first of the list: what the row says, else what holds without it.
                kind: [$($kind,)? <$type as KeyType<_>>::KIND][0],
                range: [$($range,)? from(i64::MIN)][0],
                default: concat!($(stringify!($default))?),
                reason: concat!($($reason)?),
                doc: concat!($($doc),+).trim_ascii_start(),
                when: [$(Some(($other, &[$($others),+] as &[&str])),)? Self::WHEN][0],
                on_resume: [$($resume,)? OnResume::Nothing][0],
            }),*];

            fn collect(out: &mut Vec<&'static RecipeKey>) {
                out.extend(Self::KEYS);
                $(<$inner_type>::collect(out);)*
            }

            fn read(values: &KeyValues) -> Self {
                Self {
                    $($key: values.get(Self::$key),)*
                    $($inner: Section::read(values),)*
                }
            }
        }
    };
}
#[cfg(test)]
pub(super) use section;

pub mod adapters;
pub mod distill;
pub mod distributed;
pub mod model;
pub mod preference;
pub mod quality;
pub mod rl;
pub mod sources;
pub mod train;
pub mod tune;

section! {
    /// Every key with its typed value, before `lower`. `auto` of a type that cannot be `None` is 0.
    pub struct RecipeSections in "" {
        with model: Model;
        with memory: Memory;
        with data: Data;
        with tune: TuneKeys;
        with optimizer: OptimizerKeys;
        with schedule: ScheduleKeys;
        with train: Train;
        with preference: PreferenceSection;
        with rl: RlSection;
        with distill: DistillSection;
        with distributed: DistributedSection;
    }
}

/// Every key.
pub fn keys() -> impl Iterator<Item = &'static RecipeKey> {
    static KEYS: LazyLock<Vec<&'static RecipeKey>> = LazyLock::new(|| {
        let mut keys = Vec::new();
        RecipeSections::collect(&mut keys);
        keys
    });
    KEYS.iter().copied()
}

pub fn find(path: &str) -> Option<&'static RecipeKey> {
    keys().find(|k| k.path.0 == path)
}

/// Contradictions between keys.
pub fn check(settings: &RecipeSections, faults: &mut KeyFaults) {
    model::check(settings, faults);
    sources::check(settings, faults);
    train::check(settings, faults);
    tune::check(settings, faults);
    adapters::check(settings, faults);
    preference::check(settings, faults);
    rl::check(settings, faults);
    distill::check(settings, faults);
    distributed::check(settings, faults);
}

/// The setting because of which a key has no effect.
pub fn unused(settings: &RecipeSections, key: KeyPath) -> Option<String> {
    preference::unused(settings, key)
        .or_else(|| rl::unused(settings, key))
        .or_else(|| model::unused(settings, key))
        .or_else(|| tune::unused(settings, key))
        .or_else(|| adapters::unused(settings, key))
        .or_else(|| train::unused(settings, key))
        .or_else(|| distill::unused(settings, key))
        .or_else(|| quality::unused(settings, key))
        .or_else(|| distributed::unused(settings, key))
}

/// Tables in the order in which they are printed, each with its subject.
pub const TABLES: &[(&str, &str)] = &[
    Model::TABLE,
    Memory::TABLE,
    Data::TABLE,
    JudgeKeys::TABLE,
    TuneKeys::TABLE,
    BlockKeys::TABLE,
    LoraKeys::TABLE,
    CordaKeys::TABLE,
    AdaloraKeys::TABLE,
    EvaKeys::TABLE,
    Freeze::TABLE,
    OptimizerKeys::TABLE,
    ScheduleKeys::TABLE,
    PreferenceSection::TABLE,
    GrpoSection::TABLE,
    PpoSection::TABLE,
    DistillSection::TABLE,
    Train::TABLE,
    DistributedSection::TABLE,
];
