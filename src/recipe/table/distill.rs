//! Distillation.

use super::*;

named!(
    /// Placement of a teacher's weights.
    TeacherTier { Device = "device", Host = "host", Disk = "disk" }
);

named!(
    /// How the tokens of a teacher with another tokenizer are compared with those of the student.
    Alignment { None = "none", Uld = "uld", Gold = "gold" }
);

section! {
    /// Distillation (`train.stage = "distill"`): a teacher trains the model of the recipe. See docs/distillation.md.
    pub struct DistillSection in "distill", when Train::stage = ["distill"] {
        /// The teacher: hub id or local directory, of any family, with the same tokenizer, or with `alignment`. `ft distill cache` needs it;
        /// training too, unless `teacher_cache` is set.
        teacher: Option<ModelRef> = "", "stored outputs can replace it", resume TEACHER;
        /// Branch, tag or commit of a hub teacher.
        teacher_revision: String = "main", "the default branch of every hub repository", resume TEACHER;
        /// A teacher with another tokenizer: the tokens of both are grouped to spans of the same text. `uld` compares the
        /// probabilities after sorting; `gold` compares those of equal tokens, and the others after sorting. `none`: the tokenizer
        /// must be the same.
        alignment: Alignment = "none", "token for token, the most exact";
        /// Storage of the teacher's projections, as in `memory.frozen_weights`; `f32` and `bf16` apply to all its
        /// weights.
        teacher_weights: Auto<WeightStorage> = "auto", "as `model.dtype`: nothing is lost";
        /// Where the teacher's weights are stored: with `host` and `disk` each forward pass loads them to the device
        /// layer by layer.
        teacher_tier: TeacherTier = "device", "the fastest";
        /// Directory written by `ft distill cache`: its stored outputs replace the teacher.
        teacher_cache: Option<String> = "", "the teacher runs together with the student", resume TEACHER;
        /// Number of log-probabilities that `ft distill cache` stores per token, for the most likely ids; one number is
        /// stored for all other ids.
        top_k: usize = 64, "most of the probability mass, in 260 to 388 bytes per token", in between(1, 65536);
        /// The divergence: 0 is KL(teacher‖student), 1 is KL(student‖teacher), between them the generalized
        /// Jensen-Shannon divergence of GKD.
        beta: f64 = 0.5, "as in TRL", in PART;
        /// Temperature of both distributions of the divergence.
        temperature: f64 = 1.0, "distributions without scaling", in POSITIVE;
        /// Weight of the cross-entropy with the tokens of the rows; the divergence has weight `1 - alpha`.
        alpha: f64 = 0.0, "only the teacher's distribution", in PART;
        /// Fraction of the rows for which the student generates the answer that the teacher scores (GKD).
        lmbda: f64 = 0.0, "only the given rows: no decoding", in PART;
        /// Longest answer of the student, in tokens.
        max_new_tokens: usize = 128, "as in TRL", in from(1);
        /// Sampling temperature of the student's answers; 0 is greedy.
        rollout_temperature: f64 = 1.0, "the student's own distribution", in POSITIVE_OR_ZERO;
        /// Weight of the distance between hidden states of student and teacher; 0 is off.
        hidden_weight: f64 = 0.0, "the outputs carry most of the information", in POSITIVE_OR_ZERO;
        /// The distance: mean square, or 1 - cosine.
        hidden_loss: HiddenLoss = "mse", "as in TinyBERT";
        /// Pairs `[student, teacher]` of hidden states to compare: 0 is the output of the embedding, l the output of
        /// layer l.
        layer_map: Option<Vec<(usize, usize)>> = "auto", "every intermediate state, at the same relative depth";
    }
}

/// Contradictions.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let keys = &s.distill;
    if s.train.stage != Stage::Distill {
        return;
    }
    let stored = keys.teacher_cache.is_some();
    if keys.teacher.is_none() && !stored {
        faults.add(
            &[DistillSection::teacher, DistillSection::teacher_cache, Train::stage],
            Error::usage("`train.stage = \"distill\"` needs a teacher").hint(
                "set `distill.teacher` to a model, or `distill.teacher_cache` to a directory written by `ft distill cache`",
            ),
        );
    }
    if keys.lmbda > 0.0 && stored {
        faults.add(
            &[DistillSection::lmbda, DistillSection::teacher_cache],
            Error::usage("stored outputs of a teacher cannot score generated answers of the student")
                .hint("set `distill.lmbda = 0`, or give `distill.teacher` without `distill.teacher_cache`"),
        );
    }
    if keys.lmbda > 0.0 && s.data.packing {
        faults.add(
            &[DistillSection::lmbda, Data::packing],
            Error::usage("`distill.lmbda` above 0 needs `data.packing = false`")
                .cause("the lengths of generated answers are not known in advance")
                .hint("write `data.packing = false`"),
        );
    }
    if keys.alignment != Alignment::None && stored {
        faults.add(
            &[DistillSection::alignment, DistillSection::teacher_cache],
            Error::usage("stored outputs of a teacher cannot be aligned with another tokenizer")
                .cause("they have only the most likely ids of each token; comparing two tokenizers needs the probabilities of all")
                .hint("give `distill.teacher` without `distill.teacher_cache`"),
        );
    }
    if keys.alignment != Alignment::None && s.data.long == Long::Split {
        faults.add(
            &[DistillSection::alignment, Data::long],
            Error::usage("the pieces of a split row cannot be aligned with another tokenizer")
                .cause(
                    "with `data.long = \"split\"` student and teacher split a long row at different places of the text",
                )
                .hint("use `truncate` or `drop`"),
        );
    }
    if keys.alignment != Alignment::None && keys.hidden_weight > 0.0 {
        faults.add(
            &[DistillSection::alignment, DistillSection::hidden_weight],
            Error::usage("hidden states of a teacher with another tokenizer belong to other tokens")
                .hint("set `distill.hidden_weight = 0`"),
        );
    }
    if keys.hidden_weight > 0.0 && stored {
        faults.add(
            &[DistillSection::hidden_weight, DistillSection::teacher_cache],
            Error::usage("stored outputs of a teacher have no hidden states")
                .hint("set `distill.hidden_weight = 0`, or give `distill.teacher` without `distill.teacher_cache`"),
        );
    }
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    let keys = &s.distill;
    match key {
        DistillSection::hidden_loss | DistillSection::layer_map if keys.hidden_weight == 0.0 => {
            Some("distill.hidden_weight = 0".into())
        }
        DistillSection::max_new_tokens | DistillSection::rollout_temperature if keys.lmbda == 0.0 => {
            Some("distill.lmbda = 0".into())
        }
        DistillSection::teacher_weights | DistillSection::teacher_tier => keys
            .teacher_cache
            .as_ref()
            .map(|cache| format!("distill.teacher_cache = {cache:?}")),
        DistillSection::beta if keys.alignment == Alignment::Uld => Some(DistillSection::alignment.is("uld")),
        DistillSection::teacher_revision => {
            let local = keys.teacher.as_ref().filter(|t| t.is_local());
            local.map(|teacher| DistillSection::teacher.is(&teacher.to_string()))
        }
        _ => None,
    }
}
