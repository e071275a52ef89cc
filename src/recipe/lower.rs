//! Rules over several keys: contradictions and keys without effect; then makes the recipe of the settings.

use super::check::{KeyEntry, KeyValues, ValueOrigin, default_of};
use super::draft::{Draft, Problem, TextPosition};
use super::table::{self, KeyPath, RecipeKey, RecipeSections, Section};
use super::types::*;
use super::value::KeyValue;
use crate::base::Error;

/// Pairs of keys that set the same thing in two ways.
const RIVALS: [(KeyPath, KeyPath); 3] = [
    (Data::train, Data::sources),
    (Data::eval, Data::eval_fraction),
    (ScheduleKeys::warmup_steps, ScheduleKeys::warmup_ratio),
];

/// True if a key of such a pair is set to a value that has an effect.
fn is_set(values: &KeyValues, key: KeyPath) -> bool {
    values.entry(key).is_some_and(|e| {
        e.written()
            && match &e.value {
                KeyValue::List(l) => !l.is_empty(),
                KeyValue::Tables(l) => !l.is_empty(),
                KeyValue::Number(x) => *x > 0.0,
                KeyValue::Integer(_) => true,
                _ => false,
            }
    })
}

/// For such a pair, an argument overrides the other key in the recipe.
pub fn resolve_rivals(values: &mut KeyValues, warnings: &mut Vec<String>) {
    for (a, b) in RIVALS {
        let origin = |key: KeyPath| values.entry(key).map(|e| e.origin);
        let (loser, winner) = match (origin(a), origin(b)) {
            (Some(ValueOrigin::Argument), Some(ValueOrigin::Recipe)) => (b, a),
            (Some(ValueOrigin::Recipe), Some(ValueOrigin::Argument)) => (a, b),
            _ => continue,
        };
        if is_set(values, loser)
            && is_set(values, winner)
            && let Some(entry) = values.0.iter_mut().find(|e| e.key.path == loser)
        {
            warnings.push(format!("`{winner}` on the command line overrides `{loser}`"));
            entry.value = default_of(entry.key);
            entry.origin = ValueOrigin::Default;
            entry.place = None;
        }
    }
}

/// Collects errors of several keys.
pub struct KeyFaults<'a> {
    draft: &'a Draft<'a>,
    values: &'a KeyValues,
    problems: Vec<Problem>,
}

impl KeyFaults<'_> {
    /// Adds an error with the keys involved; its place is that of the last one. Does nothing if one of them is refused
    /// already: one error per mistake.
    pub fn add(&mut self, keys: &[KeyPath], error: Error) {
        let entries: Vec<&KeyEntry> = keys.iter().filter_map(|key| self.values.entry(*key)).collect();
        if entries.iter().all(|e| e.sound) {
            let place = entries.iter().filter_map(|e| e.place.clone()).max();
            let place = place.unwrap_or(TextPosition::File(0));
            self.problems
                .push(Problem::new(&place, error.at(self.draft.show(&place))));
        }
    }

    pub fn is_written(&self, key: KeyPath) -> bool {
        self.values.entry(key).is_some_and(KeyEntry::written)
    }
}

/// Checks that need more than one key, or the meaning of a text.
pub fn cross_check(draft: &mut Draft, values: &KeyValues, settings: &RecipeSections) {
    let mut faults = KeyFaults {
        draft,
        values,
        problems: Vec::new(),
    };
    for (a, b) in RIVALS {
        if is_set(values, a) && is_set(values, b) {
            faults.add(
                &[a, b],
                Error::usage(format!("`{a}` and `{b}` contradict each other")).hint("keep one of them"),
            );
        }
    }
    table::check(settings, &mut faults);
    let problems = faults.problems;
    draft.problems.extend(problems);
}

/// Returns the setting because of which the key has no effect in this recipe.
pub fn unused(values: &KeyValues, settings: &RecipeSections, key: &RecipeKey) -> Option<String> {
    let tune = &settings.tune;
    // A given adapter can be AdaLoRA; only its directory contains the kind.
    if key.path.is_in(AdaloraKeys::TABLE.0) && tune.lora.adapter.is_some() && tune.method == Method::Lora {
        return None;
    }
    // `correction = "lora"` uses the adapter settings of `[tune.lora]`.
    let corrects = key.path.is_in(LoraKeys::TABLE.0) && tune.corrects_by_adapters();
    if let Some((other, accepted)) = key.when.filter(|_| !corrects) {
        let cause = values.entry(other)?;
        if let Some(why) = unused(values, settings, cause.key) {
            return Some(why);
        }
        let text = match &cause.value {
            KeyValue::Text(t) => format!("\"{t}\""),
            KeyValue::Integer(i) => i.to_string(),
            _ => String::new(),
        };
        if !accepted.contains(&text.trim_matches('"')) {
            return Some(format!("{other} = {text}"));
        }
    }
    table::unused(settings, key.path)
}

/// One line for each written key without effect. A key at its default value is not reported.
pub fn warnings(draft: &Draft, values: &KeyValues, settings: &RecipeSections) -> Vec<String> {
    let mut out = Vec::new();
    for entry in values.0.iter().filter(|e| e.written()) {
        if let (Some(why), Some(place)) = (unused(values, settings, entry.key), &entry.place)
            && entry.value != default_of(entry.key)
        {
            out.push(format!(
                "`{}` has no effect with `{why}` ({})",
                entry.key.path,
                draft.show(place)
            ));
        }
    }
    out
}

/// Makes the recipe of settings that passed every check.
pub fn lower(mut s: RecipeSections, values: &KeyValues) -> Recipe {
    let stage = s.train.stage;
    let open = OpenKeys {
        num_epochs: values.is_auto(Train::num_epochs),
        learning_rate: values.is_auto(OptimizerKeys::learning_rate),
        gradient_accumulation_steps: values.is_auto(Train::gradient_accumulation_steps),
        packing_length: values.is_auto(Data::packing_length),
        whole_steps: None,
    };
    if open.num_epochs {
        s.train.num_epochs = stage.num_epochs();
    }
    if open.learning_rate {
        s.optimizer.learning_rate = 1e-5;
    }
    if open.gradient_accumulation_steps {
        s.train.gradient_accumulation_steps = ACCUMULATION;
    }
    if open.packing_length {
        s.data.packing_length = s.data.max_length;
    }
    if let Some((id, revision)) = s.model.path.with_revision() {
        (s.model.path, s.model.revision) = (id, revision);
    }
    if let Some((id, revision)) = s.distill.teacher.as_ref().and_then(|t| t.with_revision()) {
        (s.distill.teacher, s.distill.teacher_revision) = (Some(id), revision);
    }
    if s.model.path.is_shape() {
        s.model.init = ModelInit::Random;
    }
    // Pairs and RL answers are never packed with others: they have no padding to save.
    s.data.packing &= !stage.is_preference() && !stage.is_rl();
    s.train.predict_with_generate &= !stage.is_preference();
    s.preference.loss_type = s.preference_loss();
    Recipe {
        model: s.model,
        memory: s.memory,
        data: s.data,
        tune: Tune {
            method: s.tune.method,
            block: s.tune.block.into(),
            lora: s.tune.lora.into(),
            freeze: s.tune.freeze,
            new_tokens: s.tune.new_tokens,
            train_router: s.tune.train_router,
            rows: Vec::new(),
        },
        optimizer: s.optimizer.into(),
        schedule: s.schedule.into(),
        preference: s.preference,
        distill: s.distill,
        train: s.train,
        rl: s.rl,
        distributed: s.distributed,
        open,
    }
}

/// Maximum for `train.gradient_accumulation_steps = "auto"`, and its value if the number of rows is unknown.
pub const ACCUMULATION: usize = 8;
