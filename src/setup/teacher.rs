//! The teacher of a distillation: opens its directory, checks that it fits the student, and loads its network.

use crate::base::{Error, Result, staging};
use crate::comm::{Collective, SingleRank};
use crate::data::Dataset;
use crate::distill::hidden;
use crate::engine::StepStrategy;
use crate::formats::Tokenizer;
use crate::model::{Network, Spec};
use crate::ops::cross_entropy::PIECE;
use crate::recipe::{
    Alignment, Auto, Data, DistillSection, Dtype, ModelInit, Recipe, Stage, TeacherTier, WeightStorage,
};
use crate::setup::vocabulary::TextChanges;
use crate::setup::{ModelDir, ModelFiles, StoredWeights};
use crate::source::Placement;
use crate::source::StoragePolicy;
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;

/// A teacher whose weights are not loaded.
pub struct TeacherModel {
    pub model: ModelDir,
    pub dtype: Dtype,
    pub storage: StoragePolicy,
}

/// Fingerprints of a teacher: `now` from all weights, `before` from a part of them, as in older versions.
pub struct TeacherFingerprint {
    pub now: String,
    pub before: String,
}

impl TeacherFingerprint {
    /// A source with only one fingerprint.
    pub fn only(name: &str) -> Self {
        Self {
            now: name.to_string(),
            before: name.to_string(),
        }
    }

    pub fn is(&self, name: &str) -> bool {
        name == self.now || name == self.before
    }
}

/// Texts that detect differences between tokenizers with the same vocabulary.
const PROBES: [&str; 3] = [
    "The quick brown fox, 1234567 times.\n\n\tnaïve café — 日本語, Привет! <b>x</b>",
    "def f(x):\n    return x**2 + 0.5e-3  # comment",
    "ﬁne   spaces \u{200d} and UPPER lower MiXeD",
];

/// Opens the teacher of a recipe for the student `model`.
///
/// Errors: an invalid directory; a different tokenizer; a storage type that its files do not allow.
pub fn open(recipe: &Recipe, model: &ModelDir) -> Result<TeacherModel> {
    let d = &recipe.distill;
    let Some(path) = &d.teacher else {
        return Err(Error::usage("no teacher is given").at(DistillSection::teacher));
    };
    if path.is_shape() {
        return Err(
            Error::usage("a built-in shape has random weights: it cannot be a teacher").at(DistillSection::teacher),
        );
    }
    let teacher = ModelDir::read(
        path,
        &d.teacher_revision,
        ModelInit::Pretrained,
        &TextChanges::default(),
    )
    .map_err(|e| e.or_at(DistillSection::teacher))?;
    if d.alignment == Alignment::None {
        check_tokenizers(&model.tokenizer, &teacher.tokenizer).map_err(|e| e.or_at(DistillSection::teacher))?;
    }
    teacher.check_weights(ModelInit::Pretrained)?;
    let stored = teacher.stored(ModelInit::Pretrained)?;
    let (dtype, storage) = storage(recipe, &teacher.spec, stored)?;
    if d.hidden_weight > 0.0 {
        layer_map(recipe, &model.spec, &teacher.spec)?;
    }
    Ok(TeacherModel {
        model: teacher,
        dtype,
        storage,
    })
}

/// Errors: the teacher has another tokenizer, so its outputs cannot be stored.
pub fn refuse_alignment(recipe: &Recipe) -> Result<()> {
    match recipe.distill.alignment {
        Alignment::None => Ok(()),
        other => Err(
            Error::usage("outputs of a teacher with another tokenizer cannot be stored")
                .at(DistillSection::alignment)
                .found(format!("`{}`", other.name()))
                .expected(
                    "`none`: stored outputs have only the most likely ids of each token; two tokenizers need all probabilities",
                )
                .hint("train with `distill.teacher`, without `distill.teacher_cache`"),
        ),
    }
}

/// Pairs of layers whose hidden states are compared.
pub fn layer_map(recipe: &Recipe, student: &Spec, teacher: &Spec) -> Result<Vec<(usize, usize)>> {
    let (s, t) = (student.layers.len(), teacher.layers.len());
    let pairs = match &recipe.distill.layer_map {
        Some(pairs) => pairs.clone(),
        None => hidden::auto_map(s, t),
    };
    hidden::check_map(&pairs, s, t)?;
    Ok(pairs)
}

impl TeacherModel {
    /// Number of ids that both student and teacher have.
    pub fn common(&self, student: &Spec) -> usize {
        self.model.spec.vocab.min(student.vocab)
    }

    /// Errors: rows that are too long for the teacher, or ids that it does not have.
    pub fn check_rows(&self, rows: &Dataset, student_vocab: usize) -> Result<()> {
        let longest = rows.lengths().iter().copied().max().unwrap_or(0) as usize;
        if longest > self.model.spec.max_positions {
            return Err(
                Error::new("rows are longer than the teacher's maximum number of positions")
                    .at(Data::max_length)
                    .found(format!("{longest} tokens"))
                    .expected(format!("at most {}", self.model.spec.max_positions)),
            );
        }
        let mut highest = 0;
        // The rows have only ids of the student.
        let is_smaller = self.model.spec.vocab < student_vocab;
        for row in rows.examples.iter().take_while(|_| is_smaller) {
            highest = highest.max(row?.ids.iter().copied().max().unwrap_or(0));
        }
        if highest as usize >= self.model.spec.vocab {
            return Err(
                Error::new("the rows contain a token for which the teacher has no embedding")
                    .at(DistillSection::teacher)
                    .found(format!("id {highest}"))
                    .expected(format!("below {}", self.model.spec.vocab)),
            );
        }
        Ok(())
    }

    pub fn load(&self, recipe: &Recipe, scratch: &Path, device: &Device) -> Result<Network> {
        let place = place(recipe, !device.is_cpu());
        if matches!(place, Placement::Disk { .. }) {
            staging::scratch(scratch)?;
        }
        let mut own = recipe.clone();
        own.model.init = ModelInit::Pretrained;
        own.model.dtype = self.dtype;
        let strategy = StepStrategy {
            placement: place,
            storage: self.storage.clone(),
            ..StepStrategy::new(self.dtype)
        };
        let loaded = {
            let alone: Arc<dyn Collective> = Arc::new(SingleRank::default());
            self.model.load_for(&strategy, &own, scratch, device, &alone)?
        };
        Ok(loaded.network)
    }

    /// Fingerprint of the teacher's weights and their storage types.
    pub fn fingerprint(&self) -> Result<TeacherFingerprint> {
        let print = self.model.fingerprint()?;
        let storage = self.storage.describe();
        Ok(TeacherFingerprint {
            now: format!("{} {storage}", print.exact),
            before: format!("{} {storage}", print.sampled),
        })
    }
}

/// The teacher of a distillation.
#[derive(Debug, Clone)]
pub struct TeacherSpec {
    pub spec: Spec,
    pub storage: StoragePolicy,
    pub place: Placement,
    /// Unquantized weights are bf16.
    pub bf16: bool,
    /// Hidden states of inner layers that are kept and compared.
    pub states: usize,
    /// Rows that the student answers together; 0: none.
    pub answers: usize,
    /// It has another tokenizer.
    pub aligned: bool,
}

/// Describes the teacher from its config alone, for the plan; `None` if there is no teacher.
pub fn spec(recipe: &Recipe, student: &Spec, on_gpu: bool) -> Result<Option<TeacherSpec>> {
    let d = &recipe.distill;
    let Some(path) = d.teacher.as_ref().filter(|_| recipe.train.stage == Stage::Distill) else {
        return Ok(None);
    };
    if d.teacher_cache.is_some() {
        return Ok(None);
    }
    let files = ModelFiles::of_config(path, &d.teacher_revision, ModelInit::Pretrained)
        .map_err(|e| e.or_at(DistillSection::teacher))?;
    let stored = files.stored_if_here(ModelInit::Pretrained)?.unwrap_or_default();
    let (dtype, storage) = storage(recipe, &files.spec, stored)?;
    let spec = files.spec;
    let states = if d.hidden_weight > 0.0 {
        layer_map(recipe, student, &spec)?.len()
    } else {
        0
    };
    Ok(Some(TeacherSpec {
        spec,
        storage,
        place: place(recipe, on_gpu),
        bf16: dtype == Dtype::Bf16,
        states,
        answers: if d.lmbda > 0.0 {
            recipe.train.batch_size * recipe.train.gradient_accumulation_steps
        } else {
            0
        },
        aligned: d.alignment != Alignment::None,
    }))
}

/// Type of the unquantized weights, and the storage type of each weight; a weight that its files store quantized stays so.
fn storage(recipe: &Recipe, spec: &Spec, stored: StoredWeights) -> Result<(Dtype, StoragePolicy)> {
    let wanted = recipe.distill.teacher_weights;
    let dtype = match wanted {
        Auto::Of(WeightStorage::F32) => Dtype::F32,
        Auto::Of(WeightStorage::Bf16) => Dtype::Bf16,
        _ => recipe.model.dtype,
    };
    let mut memory = recipe.memory.clone();
    memory.overrides.clear();
    memory.group_size = None;
    memory.frozen_weights = wanted;
    let mut policy = StoragePolicy::new(&memory.storage_rules(), dtype, &spec.params(), |_| false)?;
    for (name, format) in stored.codes {
        policy.set(name, Some(format));
    }
    Ok((dtype, policy))
}

fn place(recipe: &Recipe, on_gpu: bool) -> Placement {
    match recipe.distill.teacher_tier {
        TeacherTier::Device => Placement::Device,
        // On a CPU, host memory is device memory.
        TeacherTier::Host if !on_gpu => Placement::Device,
        TeacherTier::Host => Placement::Host,
        TeacherTier::Disk => Placement::Disk { head_rows: Some(PIECE) },
    }
}

/// Checks that both tokenizers produce the same ids.
fn check_tokenizers(student: &Tokenizer, teacher: &Tokenizer) -> Result<()> {
    let wrong = |found: String, expected: String| {
        Err(Error::new("the tokenizers of teacher and student differ")
            .found(found)
            .expected(expected)
            .hint(
                "`distill.alignment = \"gold\"` aligns the tokens by their text; token for token needs a teacher of the \
                 student's family; or train on the teacher's answers with `train.stage = \"sft\"`",
            ))
    };
    let show = |token: Option<String>| token.map_or("no token".to_string(), |t| format!("{t:?}"));
    // Tokens that only one of them has must come after all common ids.
    for id in 0..student.vocab_size().min(teacher.vocab_size()) as u32 {
        let (a, b) = (student.id_to_token(id), teacher.id_to_token(id));
        if a != b {
            return wrong(
                format!("{} for id {id}", show(b)),
                format!("{}, as in the student's tokenizer", show(a)),
            );
        }
    }
    for text in PROBES {
        if student.encode(text, false)? != teacher.encode(text, false)? {
            return wrong(
                format!("different tokens for {text:?}"),
                "the same tokens for every text".into(),
            );
        }
    }
    Ok(())
}
