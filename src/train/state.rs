//! Saves the training state to a checkpoint and restores it.
//!
//! `weights.safetensors` holds the exact f32 value of every weight trained so far, `optimizer.safetensors` the moments
//! of the active parameters, `state.json` the rest. Data order, block order and dropout are functions of (seed, step),
//! so the step is their only state.

use crate::base::{Error, Result};
use crate::checkpoint::{self, CheckpointFile, DividedFile, LoadedState, TensorSink};
use crate::comm::{Collective, Patience};
use crate::data::Dataset;
use crate::engine::{ActiveSet, Ema, Engine, MomentValues, SavedMoment};
use crate::formats::dtype::StoredDtype;
use crate::formats::writer::{TensorPlan, Values};
use crate::hf::Fingerprint;
use crate::recipe::LoadedRecipe;
use crate::report;
use crate::setup::active_schedule::ActiveSchedule;
use crate::train::ranks::of_program;
use crate::train::side_inputs::SideHashes;
use crate::train::trained_names::OF_OBJECTIVE;
use candle_core::{DType, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Importance scores of AdaLoRA ranks.
const RANKS: &str = "ranks.safetensors";
/// Moving averages of the active weights.
const AVERAGES: &str = "averages.safetensors";
/// State of the stage, as bytes.
const FEED: &str = "stage.safetensors";

/// Properties that a resumed run must match, and counters that continue.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunFingerprint {
    /// Recipe keys and values.
    pub recipe: BTreeMap<String, String>,
    pub data: String,
    /// `data` as earlier versions computed it, if that differs; not saved.
    pub data_before: String,
    pub eval_data: String,
    /// Hashes of an adapter, rewards and other content that the recipe names. Checkpoints of earlier versions do not have them.
    pub side_inputs: SideHashes,
    /// Hash of all base weights, or `RANDOM`.
    pub base: String,
    /// Hash of a part of the weights: checkpoints of older versions have only this one, in `base`.
    pub sampled: String,
    pub trained_tokens: u64,
    /// Number of steps of the whole run, on which learning rates depend. Checkpoints of earlier versions do not have it.
    pub total_steps: Option<u64>,
    /// What the plan chose of the settings that affect training, by their keys. Checkpoints of earlier versions do not have it.
    pub chosen: BTreeMap<String, String>,
    /// What computes the run: program, processor and device. Checkpoints of earlier versions do not have it.
    pub made_by: BTreeMap<String, String>,
}

/// Saves the state after `step` optimizer steps, on rank 0 within `Engine::by_root`; returns the checkpoint's directory.
/// `ranks`: all of them call it, and each one writes its part. `best`: the evaluations so far, from `BestModel::saved`.
pub fn save(
    run_dir: &Path,
    step: u64,
    engine: &Engine,
    schedule: &ActiveSchedule,
    (fingerprint, best): (&RunFingerprint, Value),
    stage_state: Option<Vec<u8>>,
    ranks: Option<&dyn Collective>,
) -> Result<PathBuf> {
    let plan = |name: String, n: usize| TensorPlan {
        name,
        dtype: StoredDtype::F32,
        shape: vec![n],
    };
    let of_moment = |moment: &SavedMoment| TensorPlan {
        dtype: match moment.dtype {
            DType::U8 => StoredDtype::U8,
            _ => StoredDtype::F32,
        },
        ..plan(format!("{}#{}", moment.name, moment.part), moment.elements)
    };
    let mut weights = Vec::new();
    for name in schedule.trained_until(step) {
        let n = engine.elements(&name)?;
        weights.push(plan(name, n));
    }
    // The subtracted initial pair is not trained, and only the initialization could compute it again.
    for lora in engine.network.adapters.values().filter_map(|a| a.lora()) {
        let start = lora.start_parts();
        weights.extend(start.iter().map(|p| plan(p.name.to_string(), p.tensor.elem_count())));
    }
    let saved: Vec<SavedMoment> = engine.saved_moments();
    let moments: Vec<TensorPlan> = saved.iter().map(of_moment).collect();
    let steps = engine.optimizer.saved().map(|s| (s.name.to_string(), json!(s.step)));
    let steps: serde_json::Map<String, Value> = steps.collect();
    let averages = || engine.ema.iter().flat_map(Ema::saved);
    let updates: serde_json::Map<String, Value> = averages().map(|(name, n)| (name.to_string(), json!(n))).collect();
    let of_average = |(name, _): (&str, u64)| Ok(plan(name.to_string(), engine.elements(name)?));
    let average_plans = averages().map(of_average).collect::<Result<Vec<TensorPlan>>>()?;
    let state = json!({
        "recipe": fingerprint.recipe,
        "data": fingerprint.data,
        "eval_data": fingerprint.eval_data,
        "side_inputs": fingerprint.side_inputs,
        "base": fingerprint.base,
        "trained_tokens": fingerprint.trained_tokens,
        "total_steps": fingerprint.total_steps,
        "made_by": fingerprint.made_by,
        "chosen": fingerprint.chosen,
        "active_block": schedule.label(step.max(1)),
        "optimizer_steps": steps,
        "averages": updates,
        "stage": stage_state.is_some(),
        "best": best,
        "loss_scale": engine.loss_scale.map(|s| json!({"scale": s.scale, "steps": s.steps, "skipped": s.skipped})),
    });
    let scores = engine.step_hook.as_ref().map(|hook| hook.state()).unwrap_or_default();
    let score_plans: Vec<TensorPlan> = scores
        .iter()
        .map(|(name, values)| plan(name.clone(), values.len()))
        .collect();
    let kept = [TensorPlan {
        dtype: StoredDtype::U8,
        ..plan("state".into(), stage_state.as_ref().map_or(0, Vec::len))
    }];
    let file = |name: &'static str, tensors| CheckpointFile { name, tensors };
    // What the ranks may divide, and what rank 0 writes.
    let mut large = vec![file(WEIGHTS, &weights), file(OPTIMIZER, &moments)];
    let mut small = Vec::new();
    if engine.ema.is_some() {
        large.push(file(AVERAGES, &average_plans));
    }
    if engine.step_hook.is_some() {
        small.push(file(RANKS, &score_plans));
    }
    if stage_state.is_some() {
        small.push(file(FEED, &kept));
    }
    let own = ranks.map(|_| engine.own_state());
    let by_name: BTreeMap<&str, &SavedMoment> = moments.iter().map(|plan| &*plan.name).zip(&saved).collect();
    let moment_of = |tensor: &TensorPlan| {
        let found = by_name.get(&*tensor.name).copied();
        found.ok_or_else(|| Error::new("optimizer state is missing").at(&tensor.name))
    };
    let mut fill = |file: &str, tensor: &TensorPlan, write: &mut TensorSink| match (file, &own) {
        (WEIGHTS, None) => engine.exact(&tensor.name, &mut |values| write(Values::F32(values))),
        (WEIGHTS, Some(own)) => own.exact(&tensor.name, &mut |values| write(Values::F32(values))),
        (RANKS, _) => write(Values::F32(scores.get(&tensor.name).map_or(&[], Vec::as_slice))),
        (AVERAGES, None) => engine.average_values(&tensor.name, &mut |values| write(Values::F32(values))),
        (AVERAGES, Some(own)) => own.average(&tensor.name, &mut |values| write(stored(&values))),
        (FEED, _) => write(Values::Raw(stage_state.as_deref().unwrap_or_default())),
        (_, None) => engine.moment(moment_of(tensor)?, &mut |values| write(stored(&values))),
        (_, Some(own)) => own.moment(moment_of(tensor)?, &mut |values| write(stored(&values))),
    };
    let (Some(comm), Some(part)) = (ranks, &own) else {
        return checkpoint::save(run_dir, step, &state, &[large, small].concat(), &mut fill);
    };
    let mut divided = Vec::new();
    for whole in large {
        let range = |tensor: &TensorPlan| match whole.name {
            OPTIMIZER => part.elements_of_moment(moment_of(tensor)?),
            _ => part.elements(&tensor.name),
        };
        let own = whole.tensors.iter().map(range).collect::<Result<_>>()?;
        divided.push(DividedFile { whole, own });
    }
    checkpoint::save_parts(comm, run_dir, step, &state, &small, &divided, &mut fill)
}

/// Values of a moment, for the file.
fn stored<'a>(values: &MomentValues<'a>) -> Values<'a> {
    match values {
        MomentValues::U8(codes) => Values::Raw(codes),
        MomentValues::F32(values) => Values::F32(values),
    }
}

/// Checks before the first step that the engine has every weight that a checkpoint of the run up to step `last` contains,
/// and reads the smallest one as a save does. Returns the bytes of all of them. On rank 0 within `Engine::by_root`.
pub fn rehearse(engine: &Engine, schedule: &ActiveSchedule, last: u64) -> Result<u64> {
    let mut sizes = Vec::new();
    for name in schedule.trained_until(last) {
        sizes.push((engine.elements(&name)?, name));
    }
    if let Some((elements, name)) = sizes.iter().min() {
        let mut found = 0;
        engine.exact(name, &mut |values| {
            found += values.len();
            Ok(())
        })?;
        if found != *elements {
            return Err(Error::internal("a weight has another number of values than its shape")
                .at(name)
                .found(found)
                .expected(elements));
        }
    }
    Ok(sizes.iter().map(|(elements, _)| 4 * *elements as u64).sum())
}

/// The values that `save` stored beside tensors.
pub fn fingerprint(loaded: &LoadedState) -> RunFingerprint {
    let text = |key: &str| {
        loaded
            .state
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_string()
    };
    let texts = |key: &str| {
        let all = loaded.state.get(key).and_then(Value::as_object);
        let all = all.into_iter().flatten();
        all.filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_string())))
            .collect()
    };
    RunFingerprint {
        recipe: texts("recipe"),
        made_by: texts("made_by"),
        chosen: texts("chosen"),
        data: text("data"),
        data_before: String::new(),
        side_inputs: texts("side_inputs"),
        eval_data: text("eval_data"),
        base: text("base"),
        sampled: String::new(),
        trained_tokens: loaded.state.get("trained_tokens").and_then(Value::as_u64).unwrap_or(0),
        total_steps: loaded.state.get("total_steps").and_then(Value::as_u64),
    }
}

/// What `BestModel::saved` gave; `null` in checkpoints of earlier versions.
pub fn best(loaded: &LoadedState) -> &Value {
    &loaded.state["best"]
}

/// The saved state of the stage.
pub fn stage_state(loaded: &LoadedState) -> Result<Option<Vec<u8>>> {
    match loaded.state.get("stage").and_then(Value::as_bool) {
        Some(true) => Ok(Some(loaded.open(FEED)?.read_bytes("state")?)),
        _ => Ok(None),
    }
}

/// Number of elements of each weight in the checkpoint.
pub fn sizes(loaded: &LoadedState) -> Result<BTreeMap<String, usize>> {
    let weights = loaded.open(WEIGHTS)?;
    let size = |n: &str| weights.info(n).map_or(0, |i| i.count());
    Ok(weights.names().map(|n| (n.to_string(), size(n))).collect())
}

/// Restores the weights, without those of another objective: enough to export them. Averages take the place of their weights.
pub fn restore_weights(loaded: &LoadedState, engine: &mut Engine) -> Result<()> {
    let mut files = vec![loaded.open(WEIGHTS)?];
    if !updates_of(loaded).is_empty() {
        files.push(loaded.open(AVERAGES)?);
    }
    for weights in files {
        let names: Vec<String> = weights.names().map(str::to_string).collect();
        for name in names {
            // The value head of PPO, for example, is not exported.
            if name.starts_with(OF_OBJECTIVE) && engine.elements(&name).is_err() {
                continue;
            }
            engine
                .restore(&name, &weights)
                .map_err(|e| e.or_at(loaded.path.display()))?;
        }
    }
    restore_step_hook(loaded, engine)
}

/// The number of updates of each average of a checkpoint.
fn updates_of(loaded: &LoadedState) -> BTreeMap<String, u64> {
    let saved = loaded.state.get("averages").and_then(Value::as_object);
    let updates = saved.into_iter().flatten();
    updates
        .filter_map(|(name, n)| Some((name.clone(), n.as_u64()?)))
        .collect()
}

fn restore_averages(loaded: &LoadedState, engine: &mut Engine) -> Result<()> {
    let updates = updates_of(loaded);
    if engine.ema.is_some() && !updates.is_empty() {
        let saved = loaded.open(AVERAGES)?;
        for (name, updates) in updates {
            engine.restore_average(&name, updates, saved.read_f32(&name)?)?;
        }
    }
    Ok(())
}

fn restore_step_hook(loaded: &LoadedState, engine: &mut Engine) -> Result<()> {
    if let Some(hook) = &mut engine.step_hook {
        let saved = loaded.open(RANKS)?;
        for name in saved.names() {
            hook.restore(name, saved.read_f32(name)?)
                .map_err(|e| e.or_at(loaded.path.display()))?;
        }
    }
    Ok(())
}

/// Restores weights and moments; the engine is then in the state after step `loaded.step`, in which `active` were active. All
/// ranks call it.
pub fn restore(loaded: &LoadedState, engine: &mut Engine, active: &ActiveSet) -> Result<()> {
    let device = engine.network.device.clone();
    let weights = loaded.open(WEIGHTS)?;
    let names: Vec<String> = weights.names().map(str::to_string).collect();
    for name in names {
        engine
            .restore(&name, &weights)
            .map_err(|e| e.or_at(loaded.path.display()))?;
    }
    let moments = loaded.open(OPTIMIZER)?;
    let mut parts: BTreeMap<String, BTreeMap<String, Tensor>> = BTreeMap::new();
    for key in moments.names() {
        let unknown = || Error::new("not an optimizer state").at(key);
        let (name, part) = key.rsplit_once('#').ok_or_else(unknown)?;
        let info = moments.info(key).ok_or_else(unknown)?;
        let tensor = match info.dtype {
            StoredDtype::U8 => Tensor::from_vec(moments.read_bytes(key)?, info.shape.as_slice(), &device)?,
            _ => Tensor::from_vec(moments.read_f32(key)?, info.shape.as_slice(), &device)?,
        };
        let Some(name) = engine.restore_apart(name, part, &tensor)? else {
            continue;
        };
        let tensor = engine.own_moment(name, engine.elements(name)?, part, tensor)?;
        parts
            .entry(name.to_string())
            .or_default()
            .insert(part.to_string(), tensor);
    }
    restore_step_hook(loaded, engine)?;
    restore_averages(loaded, engine)?;
    let steps = loaded.state.get("optimizer_steps").and_then(Value::as_object);
    let steps = steps.ok_or_else(|| Error::new("checkpoint has no `optimizer_steps`").at_path(&loaded.path))?;
    for (name, step) in steps {
        let step = step
            .as_u64()
            .ok_or_else(|| Error::new("optimizer step is not a number").at_path(&loaded.path))?;
        let parts = parts.remove(name).unwrap_or_default();
        let part_of = engine.is_divided().then(|| engine.elements(name)).transpose()?;
        engine
            .optimizer
            .restore_state(name, step, parts, part_of)
            .map_err(|e| e.within(loaded.path.display()))?;
    }
    if let Some(scale) = &mut engine.loss_scale {
        let saved = |key: &str| loaded.state.get("loss_scale").and_then(|saved| saved.get(key));
        let missing = || Error::new("checkpoint has no `loss_scale`").at_path(&loaded.path);
        scale.scale = saved("scale").and_then(Value::as_f64).ok_or_else(missing)? as f32;
        scale.steps = saved("steps").and_then(Value::as_u64).ok_or_else(missing)?;
        scale.skipped = saved("skipped").and_then(Value::as_u64).ok_or_else(missing)?;
    }
    if let Some(name) = parts.into_keys().next() {
        return Err(Error::new("optimizer state has no step number")
            .at(name)
            .within(loaded.path.display()));
    }
    // Each rank reads the checkpoint at its own speed; a switch exchanges values with the time limit of a step.
    engine.comm().all_gather_bytes(Vec::new(), Patience::Long)?;
    // A block is quantized again when the next one begins, not before: an evaluation that is missing sees exact weights.
    if loaded.step > 0 {
        engine.switch(active, |_| true)?;
    }
    Ok(())
}

/// Value of `base` for random weights.
pub const RANDOM: &str = "random";

/// The fingerprint of a run that starts. `ranks` and `device`: how many processes compute it, and on what.
pub fn of_run(
    loaded: &LoadedRecipe,
    print: Option<Fingerprint>,
    train: &Dataset,
    eval: Option<&Dataset>,
    (ranks, device): (usize, &str),
    total_steps: u64,
) -> RunFingerprint {
    let mut recipe: BTreeMap<String, String> = loaded.values.iter().cloned().collect();
    // Ranks that train alone have moments and rows of their own.
    if loaded.recipe.distributed.sync_every > 0 {
        recipe.insert("number of ranks".into(), ranks.to_string());
    }
    // A program whose file cannot be read is not compared.
    let mut made_by: BTreeMap<String, String> = of_program().unwrap_or_default().into_iter().collect();
    made_by.insert("processor".into(), report::cpu().name);
    made_by.insert("device".into(), device.into());
    RunFingerprint {
        recipe,
        made_by,
        chosen: BTreeMap::new(),
        data: train.fingerprint.clone(),
        data_before: train.fingerprint_before.clone(),
        side_inputs: SideHashes::new(),
        eval_data: eval.map(|e| e.fingerprint.clone()).unwrap_or_default(),
        base: print.as_ref().map_or(RANDOM.to_string(), |p| p.exact.clone()),
        sampled: print.map(|p| p.sampled).unwrap_or_default(),
        trained_tokens: 0,
        total_steps: Some(total_steps),
    }
}
