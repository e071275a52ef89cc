//! Rules over several keys: contradictions and keys without effect; then builds the typed recipe.

use super::check::{Entry, Origin, Value, Values, default_of};
use super::draft::{Draft, Place, Problem};
use super::types::*;
use super::{distill, lora, peers, preference, rl};
use crate::base::{Error, units};
use std::path::Path;

/// Pairs of keys that set the same thing in two ways.
const RIVALS: [(&str, &str); 2] = [
    ("data.eval", "data.eval_fraction"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
];

/// True if a key of such a pair is set to a value that has an effect.
fn is_set(values: &Values, path: &str) -> bool {
    values.entry(path).is_some_and(|e| {
        e.written()
            && match &e.value {
                Value::List(l) => !l.is_empty(),
                Value::Number(x) => *x > 0.0,
                Value::Integer(_) => true,
                _ => false,
            }
    })
}

/// For such a pair, an argument overrides the other key in the recipe.
pub fn settle(values: &mut Values, warnings: &mut Vec<String>) {
    for (a, b) in RIVALS {
        let origin = |path: &str| values.entry(path).map(|e| e.origin);
        let (loser, winner) = match (origin(a), origin(b)) {
            (Some(Origin::Argument), Some(Origin::Recipe)) => (b, a),
            (Some(Origin::Recipe), Some(Origin::Argument)) => (a, b),
            _ => continue,
        };
        if is_set(values, loser)
            && is_set(values, winner)
            && let Some(entry) = values.0.iter_mut().find(|e| e.key.path() == loser)
        {
            warnings.push(format!("`{winner}` on the command line overrides `{loser}`"));
            entry.value = default_of(entry.key);
            entry.origin = Origin::Default;
            entry.place = None;
        }
    }
}

/// Checks that need more than one key, or the meaning of a text.
pub fn cross_check(draft: &mut Draft, values: &Values) {
    let mut problems = Vec::new();
    // Reports nothing if a key involved is refused already: one error per mistake.
    let mut fault = |paths: &[&str], error: Error| {
        let entries: Vec<&Entry> = paths.iter().filter_map(|p| values.entry(p)).collect();
        if entries.iter().all(|e| e.sound) {
            let place = entries.iter().filter_map(|e| e.place.clone()).max();
            let place = place.unwrap_or(Place::File(0));
            problems.push(Problem::new(&place, error.at(draft.show(&place))));
        }
    };
    let shape = values.text("model.path").starts_with("shape:");
    if values.text("model.path").is_empty() {
        fault(
            &["model.path"],
            Error::usage("`model.path` is missing").hint("write a hub id or a directory: `[model] path = \"...\"`"),
        );
    }
    // A built-in shape is for plans and benchmarks, which need no data.
    if values.list("data.train").is_empty() && !shape {
        fault(
            &["data.train"],
            Error::usage("`data.train` is missing").hint("write a file: `[data] train = \"data/train.jsonl\"`"),
        );
    }
    let device = values.text("model.device");
    if !valid_device(device) {
        let error =
            Error::usage(format!("`{device}` is not a value of `model.device`")).expected("`auto`, `cpu`, or `cuda:0`");
        fault(
            &["model.device"],
            match peers::value("model.device", device) {
                Some(hint) => error.hint(hint),
                None => error,
            },
        );
    }
    for path in ["train.output_dir", "model.revision", "data.chat_template"] {
        if values.text(path).is_empty() {
            fault(
                &[path],
                Error::usage(format!("`{path}` is empty")).hint("remove the key to get its default"),
            );
        }
    }
    for (a, b) in RIVALS {
        if is_set(values, a) && is_set(values, b) {
            fault(
                &[a, b],
                Error::usage(format!("`{a}` and `{b}` contradict each other")).hint("keep one of them"),
            );
        }
    }
    if values.integer("train.eval_steps").is_some_and(|n| n > 0) && !evaluates(values) {
        fault(
            &["train.eval_steps", "data.eval", "data.eval_fraction"],
            Error::usage("`train.eval_steps` needs rows to evaluate on")
                .hint("set `data.eval` or `data.eval_fraction`, or `train.eval_steps = 0`"),
        );
    }
    let (dtype, frozen) = (values.text("model.dtype"), values.text("memory.frozen_weights"));
    let quantized = |name: &str| ["int8", "int4", "nf4"].contains(&name);
    let overrides = values.map("memory.overrides");
    let other = |name: &&str| *name != "auto" && *name != dtype && !quantized(name);
    let wanted = overrides.iter().map(|(_, v)| v.as_str());
    if let Some(name) = Some(frozen).filter(other) {
        fault(
            &["memory.frozen_weights", "model.dtype"],
            Error::usage(format!(
                "`memory.frozen_weights = \"{name}\"` with `model.dtype = \"{dtype}\"` is not supported yet"
            ))
            .hint("use `auto`, or the same type for both"),
        );
    }
    if let Some(name) = wanted.clone().find(other) {
        fault(
            &["memory.overrides", "model.dtype"],
            Error::usage(format!(
                "`{name}` in `memory.overrides` with `model.dtype = \"{dtype}\"` is not supported yet"
            ))
            .hint(format!("unquantized weights are `{dtype}` here")),
        );
    }
    let stored = || [frozen].into_iter().chain(wanted.clone());
    match values.integer("memory.group_size") {
        None | Some(128) => {}
        Some(64) if !stored().any(|s| s == "int8") => {}
        Some(64) => fault(
            &["memory.group_size", "memory.frozen_weights", "memory.overrides"],
            Error::usage("`int8` has no groups of 64")
                .expected("`memory.group_size = 128`, or `auto`: one scale per row"),
        ),
        Some(size) => fault(
            &["memory.group_size"],
            Error::usage("`memory.group_size` is out of range")
                .found(size)
                .expected("`auto`, 64 or 128"),
        ),
    }
    if values.text("tune.method") == "freeze"
        && values.integer("tune.freeze.trainable_layers") == Some(0)
        && values.list("tune.freeze.trainable").is_empty()
    {
        fault(
            &["tune.freeze.trainable_layers", "tune.freeze.trainable", "tune.method"],
            Error::usage("`tune.method = \"freeze\"` with nothing to train")
                .hint("set `tune.freeze.trainable_layers` or `tune.freeze.trainable`"),
        );
    }
    let (packed, most) = (values.integer("data.packing_length"), values.integer("data.max_length"));
    if let (Some(packed), Some(most)) = (packed, most)
        && packed > most
    {
        fault(
            &["data.packing_length", "data.max_length"],
            Error::usage("`data.packing_length` is above `data.max_length`")
                .found(packed)
                .expected(format!("at most {most}, or `auto`")),
        );
    }
    let correction = values.text("tune.block.correction");
    if values.text("tune.method") == "block" && values.text("tune.block.partition") == "ratio" && correction != "none" {
        fault(
            &["tune.block.partition", "tune.block.correction", "tune.method"],
            Error::usage(format!(
                "`tune.block.correction = \"{correction}\"` needs blocks of whole parameters"
            ))
            .hint("use `partition = \"layer\"`, `\"module\"` or `\"matrix\"`, or `correction = \"none\"`"),
        );
    }
    let init = values.text("tune.lora.init_lora_weights");
    if values.text("tune.method") == "block" && correction == "lora" && init != "default" && init != "gaussian" {
        fault(
            &["tune.lora.init_lora_weights", "tune.block.correction", "tune.method"],
            Error::usage(format!(
                "`tune.lora.init_lora_weights = \"{init}\"` changes the base, which the blocks train"
            ))
            .hint("use `default` or `gaussian` with `tune.block.correction = \"lora\"`"),
        );
    }
    let targets = values.list("tune.lora.target_modules");
    let all = targets.iter().any(|t| t == "all-linear");
    if targets.is_empty() || (all && targets.len() > 1) {
        fault(
            &["tune.lora.target_modules"],
            Error::usage(if all {
                "`all-linear` and module names contradict each other in `tune.lora.target_modules`"
            } else {
                "`tune.lora.target_modules` is empty"
            })
            .expected("`all-linear`, or names of modules"),
        );
    }
    let more = preference::faults(values).into_iter().chain(rl::faults(values));
    let more = more.chain(distill::faults(values));
    for (paths, error) in lora::faults(values).into_iter().chain(more) {
        fault(paths, error);
    }
    draft.problems.extend(problems);
}

/// True if the recipe has evaluation rows.
fn evaluates(values: &Values) -> bool {
    !values.list("data.eval").is_empty() || values.number("data.eval_fraction") > 0.0
}

fn valid_device(device: &str) -> bool {
    match device.strip_prefix("cuda") {
        Some(rest) => {
            rest.is_empty()
                || rest
                    .strip_prefix(':')
                    .is_some_and(|n| n.len() < 4 && n.parse::<u16>().is_ok())
        }
        None => device == "auto" || device == "cpu",
    }
}

/// Returns the setting because of which the key has no effect in this recipe.
pub fn unused(values: &Values, entry: &Entry) -> Option<String> {
    let path = entry.key.path();
    // `correction = "lora"` uses the adapter settings of `[tune.lora]`.
    let corrects = path.starts_with("tune.lora.")
        && values.text("tune.method") == "block"
        && values.text("tune.block.correction") == "lora";
    // A given adapter can be AdaLoRA; only its directory contains the kind.
    let given = path.starts_with("tune.lora.adalora.") && !values.text("tune.lora.adapter").is_empty();
    if given && values.text("tune.method") == "lora" {
        return None;
    }
    if let Some((other, accepted)) = entry.key.when.filter(|_| !corrects) {
        let cause = values.entry(other)?;
        if let Some(why) = unused(values, cause) {
            return Some(why);
        }
        let text = match &cause.value {
            Value::Text(t) => format!("\"{t}\""),
            Value::Integer(i) => i.to_string(),
            _ => String::new(),
        };
        if !accepted.contains(&text.trim_matches('"')) {
            return Some(format!("{other} = {text}"));
        }
    }
    if let Some(why) = preference::unused(values, &path).or_else(|| rl::unused(values, &path)) {
        return Some(why);
    }
    let text_rows = if values.text("train.stage") == "pretrain" {
        Some("train.stage = \"pretrain\"")
    } else if values.text("data.format") == "text" {
        Some("data.format = \"text\"")
    } else {
        None
    };
    let max_steps = values.integer("train.max_steps").unwrap_or(-1);
    let model = values.text("model.path");
    let adapter = values.text("tune.lora.adapter");
    let stored = |names: &[&str]| {
        let overrides = values.map("memory.overrides");
        let mut all = [values.text("memory.frozen_weights")]
            .into_iter()
            .chain(overrides.iter().map(|(_, v)| v.as_str()));
        all.any(|s| names.contains(&s))
    };
    let frozen = || format!("memory.frozen_weights = \"{}\"", values.text("memory.frozen_weights"));
    match path.as_str() {
        "model.revision" if model.starts_with("shape:") || Path::new(model).is_dir() => {
            Some(format!("model.path = {model:?}"))
        }
        "memory.head_chunk" if ["device", "host"].contains(&values.text("memory.tier")) => {
            Some(format!("memory.tier = \"{}\"", values.text("memory.tier")))
        }
        // Adapters are f32; modules that train in full are not.
        "optimizer.master"
            if values.text("tune.method") == "lora"
                && adapter.is_empty()
                && values.list("tune.lora.modules_to_save").is_empty() =>
        {
            Some("tune.method = \"lora\"".into())
        }
        "train.predict_with_generate" if !evaluates(values) => Some("data.eval = []".into()),
        "memory.frozen_weights" | "memory.overrides" if values.text("tune.method") == "full" => {
            Some("tune.method = \"full\"".into())
        }
        // With `auto` the planner may choose quantized weights; the teacher's weights use the same key.
        "memory.group_size" if !stored(&["auto", "int8", "int4"]) => Some(frozen()),
        "memory.double_quantization"
            if !stored(&["auto", "nf4"]) && values.text("distill.teacher_weights") != "nf4" =>
        {
            Some(frozen())
        }
        "data.packing_length" if !values.flag("data.packing") => Some("data.packing = false".into()),
        "train.num_epochs" if max_steps >= 0 => Some(format!("train.max_steps = {max_steps}")),
        "data.train_on" if values.text("data.train_on") != "all" => text_rows.map(str::to_string),
        // Conversations always use the template, text rows never.
        "data.render" if ["messages", "sharegpt", "text"].contains(&values.text("data.format")) => {
            Some(format!("data.format = \"{}\"", values.text("data.format")))
        }
        "tune.block.layers_per_block" if values.text("tune.block.partition") == "ratio" => {
            Some("tune.block.partition = \"ratio\"".to_string())
        }
        path if path.starts_with("tune.lora.")
            && ![
                "tune.lora.adapter",
                "tune.lora.lora_dropout",
                "tune.lora.loraplus_lr_ratio",
            ]
            .contains(&path)
            && !adapter.is_empty() =>
        {
            Some(format!("tune.lora.adapter = {adapter:?}"))
        }
        path if path.starts_with("distill.") => distill::unused(values, path),
        path => lora::unused(values, path),
    }
}

/// One line for each written key without effect. A key at its default value is not reported.
pub fn warnings(draft: &Draft, values: &Values) -> Vec<String> {
    let mut out = Vec::new();
    for entry in values.0.iter().filter(|e| e.written()) {
        if let (Some(why), Some(place)) = (unused(values, entry), &entry.place)
            && entry.value != default_of(entry.key)
        {
            out.push(format!(
                "`{}` has no effect with `{why}` ({})",
                entry.key.path(),
                draft.show(place)
            ));
        }
    }
    out
}

/// Builds the typed recipe. `values` has passed every check.
pub fn build(values: &Values) -> Recipe {
    let text = |path: &str| values.text(path).to_string();
    let number = |path: &str| values.size(path).unwrap_or(0);
    let unset = |path: &str, word: &str| Some(text(path)).filter(|t| t != word);
    let stage: Stage = values.name("train.stage");
    Recipe {
        model: Model {
            path: text("model.path"),
            revision: text("model.revision"),
            dtype: values.name("model.dtype"),
            device: text("model.device"),
            init: if text("model.path").starts_with("shape:") {
                ModelInit::Random
            } else {
                values.name("model.init")
            },
        },
        memory: Memory {
            budget: unset("memory.budget", "auto").and_then(|t| units::parse_bytes(&t).ok()),
            host_budget: unset("memory.host_budget", "auto").and_then(|t| units::parse_bytes(&t).ok()),
            frozen_weights: values.name("memory.frozen_weights"),
            overrides: values
                .map("memory.overrides")
                .into_iter()
                .filter_map(|(name, storage)| Some((name, WeightStorage::parse(&storage)?)))
                .collect(),
            group_size: values.size("memory.group_size"),
            double_quantization: values.flag("memory.double_quantization"),
            tier: values.name("memory.tier"),
            head_chunk: values.size("memory.head_chunk"),
            activations: values.name("memory.activations"),
            mlp_chunk: values.size("memory.mlp_chunk"),
            packed_weights: values.name("memory.packed_weights"),
        },
        data: Data {
            train: values.list("data.train"),
            eval: values.list("data.eval"),
            eval_fraction: values.number("data.eval_fraction"),
            format: values.name("data.format"),
            render: values.name("data.render"),
            max_length: number("data.max_length"),
            // Pairs and RL answers are never packed with others: they have no padding to save.
            packing: values.flag("data.packing") && !stage.is_preference() && !rl::applies(values),
            packing_length: values
                .size("data.packing_length")
                .unwrap_or(usize::MAX)
                .min(number("data.max_length")),
            train_on: values.name("data.train_on"),
            shuffle: values.flag("data.shuffle"),
            chat_template: unset("data.chat_template", "auto"),
        },
        tune: Tune {
            method: values.name("tune.method"),
            block: BlockConfig {
                partition: values.name("tune.block.partition"),
                layers_per_block: number("tune.block.layers_per_block"),
                order: values.name("tune.block.order"),
                start_block: number("tune.block.start_block"),
                importance: values.list("tune.block.importance"),
                update_ratio: values.number("tune.block.update_ratio"),
                mask: values.name("tune.block.mask"),
                switch_every: values.size("tune.block.switch_every"),
                include_embedding: values.flag("tune.block.include_embedding"),
                include_lm_head: values.flag("tune.block.include_lm_head"),
                always_active: values.list("tune.block.always_active"),
                correction: values.name("tune.block.correction"),
                correction_scope: values.name("tune.block.correction_scope"),
                correction_scale: values.number("tune.block.correction_scale"),
                warmup_after_switch: number("tune.block.warmup_after_switch"),
            },
            lora: lora::build(values),
            freeze: Freeze {
                trainable_layers: number("tune.freeze.trainable_layers"),
                trainable: values.list("tune.freeze.trainable"),
            },
        },
        optimizer: OptimizerConfig {
            name: values.name("optimizer.name"),
            learning_rate: if values.is_auto("optimizer.learning_rate") {
                1e-5
            } else {
                values.number("optimizer.learning_rate")
            },
            betas: values.pair("optimizer.betas"),
            eps: values.number("optimizer.eps"),
            weight_decay: values.number("optimizer.weight_decay"),
            momentum: values.number("optimizer.momentum"),
            state: values.name("optimizer.state"),
            master: values.name("optimizer.master"),
        },
        schedule: ScheduleConfig {
            name: values.name("schedule.name"),
            warmup_ratio: values.number("schedule.warmup_ratio"),
            warmup_steps: values.size("schedule.warmup_steps"),
            decay_ratio: values.number("schedule.decay_ratio"),
            min_lr_ratio: values.number("schedule.min_lr_ratio"),
        },
        preference: preference::build(values),
        distill: distill::build(values),
        train: Train {
            stage,
            num_epochs: if values.is_auto("train.num_epochs") {
                passes(stage)
            } else {
                values.number("train.num_epochs")
            },
            max_steps: values.integer("train.max_steps").unwrap_or(-1),
            batch_size: number("train.batch_size"),
            gradient_accumulation_steps: values.size("train.gradient_accumulation_steps").unwrap_or(ACCUMULATION),
            max_grad_norm: values.number("train.max_grad_norm"),
            seed: number("train.seed") as u64,
            logging_steps: number("train.logging_steps"),
            eval_steps: number("train.eval_steps"),
            save_steps: number("train.save_steps"),
            save_total_limit: number("train.save_total_limit"),
            output_dir: text("train.output_dir"),
            sample_prompts: values.list("train.sample_prompts"),
            predict_with_generate: values.flag("train.predict_with_generate") && !stage.is_preference(),
        },
        rl: rl::build(values),
        open: Open {
            num_epochs: values.is_auto("train.num_epochs"),
            learning_rate: values.is_auto("optimizer.learning_rate"),
            gradient_accumulation_steps: values.is_auto("train.gradient_accumulation_steps"),
            packing_length: values.is_auto("data.packing_length"),
        },
    }
}

/// Value of `train.num_epochs = "auto"`.
fn passes(stage: Stage) -> f64 {
    match stage {
        Stage::Sft | Stage::Distill => 3.0,
        _ => 1.0,
    }
}

/// Maximum for `train.gradient_accumulation_steps = "auto"`, and its value if the number of rows is unknown.
pub const ACCUMULATION: usize = 8;
