//! Keys whose value decides which key of ft is meant.

use super::rows;
use super::tools::{ToolConfig, TrainingTool};
use super::yaml::YamlNode;
use super::{Findings, quoted, schedules, trl};
use crate::formats::template::named;
use crate::recipe::peers;

/// Tables in which other tools have the keys of an adapter.
pub const LORA_TABLES: [&str; 4] = ["lora_parameters", "lora_config", "peft_config", "lora"];

/// Applies the rule of this key, if there is one. Returns false if there is none.
pub fn apply(found: &mut Findings, file: &ToolConfig, shown: &str, name: &str, node: &YamlNode) -> bool {
    if trl::apply(found, file, shown, name, node) {
        return true;
    }
    let text = node.scalar().unwrap_or_default().to_lowercase();
    let mut set = |pairs: &[(&str, &str)]| pairs.iter().for_each(|(key, value)| found.take(key, *value, shown));
    match name {
        "finetuning_type" | "fine_tune_type" | "train_type" | "adapter" | "peft_method" => match text.as_str() {
            "qlora" => set(&[("tune.method", "\"lora\""), ("memory.frozen_weights", "\"nf4\"")]),
            "dora" => set(&[("tune.method", "\"lora\""), ("tune.lora.use_dora", "true")]),
            "lora" => set(&[("tune.method", "\"lora\"")]),
            "freeze" => set(&[("tune.method", "\"freeze\"")]),
            "full" | "" => set(&[("tune.method", "\"full\"")]),
            _ => return false,
        },
        "use_peft" | "use_lora" if node.is_on() => set(&[("tune.method", "\"lora\"")]),
        "full_finetuning" if node.is_on() => set(&[("tune.method", "\"full\"")]),
        // `finetuning_type: full` stands before it.
        "use_badam" if node.is_on() => found.replace("tune.method", "\"block\"", shown),
        "load_in_4bit" if node.is_on() => set(&[("memory.frozen_weights", "\"nf4\"")]),
        "load_in_8bit" if node.is_on() => set(&[("memory.frozen_weights", "\"int8\"")]),
        "quantization_bit" => match text.as_str() {
            "4" => set(&[("memory.frozen_weights", "\"nf4\"")]),
            "8" => set(&[("memory.frozen_weights", "\"int8\"")]),
            _ => return false,
        },
        "quantization_method" if ["bnb", "bitsandbytes"].contains(&text.as_str()) => {}
        "bnb_4bit_quant_type" if text == "nf4" => {}
        "bf16" if text == "auto" => set(&[("model.dtype", "\"bf16\"")]),
        "disable_gradient_checkpointing" if node.is_on() => set(&[("memory.activations", "\"keep\"")]),
        "gradient_checkpointing" | "grad_checkpoint" | "activation_checkpointing" | "use_gradient_checkpointing" => {
            if !node.is_off() {
                set(&[("memory.activations", "\"recompute\"")]);
            }
        }
        "sample_packing" | "packing" | "neat_packing" => {
            set(&[("data.packing", if node.is_on() { "true" } else { "false" })]);
        }
        "train_on_inputs" | "train_on_prompt" => {
            if node.is_on() {
                set(&[("data.train_on", "\"all\"")]);
            }
        }
        "assistant_only_loss" if node.is_on() => set(&[("data.train_on", "\"assistant\"")]),
        "train_on_responses_only" if node.is_on() => set(&[("data.train_on", "\"assistant\"")]),
        "completion_only_loss" | "mask_prompt" if node.is_on() => {
            set(&[("data.train_on", "\"completion\"")]);
        }
        "mask_history" if node.is_on() => set(&[("data.train_on", "\"completion\"")]),
        // `tools::stage` has read them.
        "stage" | "rl" | "train_mode" if file.stage.is_some() => {
            if text == "ipo" {
                set(&[("rlhf.loss_type", "\"ipo\"")]);
            }
        }
        "pref_loss" | "loss_type" if ["orpo", "simpo"].contains(&text.as_str()) => {
            if text == "orpo" && file.tool == TrainingTool::LlamaFactory {
                found.leave(
                    shown,
                    "its cross-entropy is over the answers there; in ft, as in TRL, it is over the prompts too",
                );
            }
        }
        "loss_type" | "pref_loss" | "dpo_loss_type" if node.is_several() => {
            found.leave(
                shown,
                "ft trains with one loss: a mixture has no key; write one of them as `rlhf.loss_type`",
            );
        }
        // Where nothing is smoothed the key has no effect.
        "dpo_label_smoothing" if file.stage == Some("dpo") && pair_loss(file) == "sigmoid" => {
            if !node.is_off() && text.parse::<f64>() != Ok(0.0) {
                found.leave(
                    shown,
                    "with `sigmoid` it is conservative DPO there: `-(1 - e) logsigmoid(x) - e logsigmoid(-x)`; ft, as TRL, \
                     has `rlhf.loss_type = \"robust\"` instead, which subtracts the second term and divides by `1 - 2e`",
                );
            }
        }
        // The trainers of Axolotl take one of the two, the table first.
        "rl_beta" | "kl_beta" if has_beta(file.root.get("trl")) => {}
        // A KL term of RL, not the constraint of a preference loss.
        "rl_beta" | "kl_beta" if file.stage == Some("grpo") && !node.is_off() => {
            found.take("rlhf.grpo.beta", super::number(&text), shown);
        }
        "chat_template" | "template" => template(found, shown, node),
        "freeze_trainable_modules" if text == "all" => {}
        "badam_mode" if ["layer", "ratio"].contains(&text.as_str()) => {
            found.take("tune.block.partition", quoted(&text), shown);
        }
        "unfrozen_parameters" => unfrozen(found, shown, node),
        "max_new_tokens" if matches!(file.stage, Some("ppo" | "grpo")) => {
            found.take("rlhf.max_completion_length", text, shown);
        }
        "metric_for_best_model" if !text.is_empty() && !text.starts_with("eval_") => {
            found.take("train.metric_for_best_model", quoted(&format!("eval_{text}")), shown);
        }
        "dataset_text_field" if text == "text" => {}
        // Names for a tracker; in a file without `output_dir` they may be meant as one.
        "run_name" | "project_name" | "project" | "logging_dir" | "experiment_name"
            if file.tool == TrainingTool::Mlx || file.text("output_dir").is_some() =>
        {
            found.leave(shown, "a name for a tracker; the run directory is `train.output_dir`");
        }
        "pissa_init" if node.is_on() => set(&[("tune.lora.init_lora_weights", "\"pissa\"")]),
        "optim" | "optimizer" | "optimizer_name" if schedules::in_8_bits(&text).is_some() => {
            let own = schedules::in_8_bits(&text).unwrap_or_default();
            set(&[("optimizer.name", own), ("optimizer.state", "\"int8\"")]);
        }
        "optim" | "optimizer" if text.starts_with("paged_adamw") => set(&[("optimizer.name", "\"adamw\"")]),
        // A table of ft has the name `optimizer`.
        "optim" | "optimizer" | "optimizer_name" if !text.is_empty() => {
            match peers::value_for(name, "optimizer.name", &text) {
                Some(own) => found.take("optimizer.name", own, shown),
                None => {
                    let why = peers::value("optimizer.name", &text);
                    found.leave(shown, why.unwrap_or("ft has no such optimizer"));
                }
            }
        }
        "lr_scheduler_type" | "lr_scheduler" if text == "constant_with_warmup" => {
            set(&[("schedule.name", "\"constant\"")]);
        }
        "lr_scheduler_type" | "lr_scheduler" if text == "cosine_with_min_lr" => set(&[("schedule.name", "\"cosine\"")]),
        "lr_scheduler_kwargs" if matches!(node, YamlNode::Map(_)) => schedule(found, file, shown, node),
        "min_lr" | "lr_end" if !node.is_off() => lowest_rate(found, file, shown, node),
        "initial_scale_power" if exponent(node).is_some() => {
            let scale = exponent(node).map(|power| 2f64.powi(power));
            found.take("train.loss_scale", format!("{:?}", scale.unwrap_or_default()), shown);
        }
        "adam_beta1" | "adam_beta2" => {
            let beta = |name: &str, default: &str| super::number(file.text(name).unwrap_or(default));
            let both = format!("[{}, {}]", beta("adam_beta1", "0.9"), beta("adam_beta2", "0.999"));
            found.take("optimizer.betas", both, shown);
        }
        "save_every" | "save_interval" | "save_freq" if is_count(node) => found.take("train.save_steps", text, shown),
        "steps_per_eval" | "eval_every" | "eval_interval" if is_count(node) => {
            found.take("train.eval_steps", text, shown)
        }
        "steps_per_report" | "log_every" if is_count(node) => found.take("train.logging_steps", text, shown),
        "report_to" | "use_tensorboard" => report_to(found, shown, name, node),
        "save_strategy" | "eval_strategy" | "evaluation_strategy" | "logging_strategy" if text == "steps" => {}
        "save_strategy" if text == "no" => set(&[("train.save_steps", "0")]),
        "eval_strategy" | "evaluation_strategy" if text == "no" => {}
        // A part of the steps, as in transformers.
        "warmup_steps" if file.number("warmup_steps").is_some_and(|n| n > 0.0 && n < 1.0) => {
            found.take("schedule.warmup_ratio", text, shown);
        }
        "val_size" | "val_set_size" | "test_size" if file.number(name).is_some_and(|n| n >= 1.0) => {
            found.leave(
                shown,
                "a number of rows: write the part of the rows as `data.eval_fraction`",
            );
        }
        "num_layers" | "lora_layers" if text == "-1" => {}
        "adapter_path" if file.tool == TrainingTool::Mlx => {
            found.take("train.output_dir", quoted(node.scalar().unwrap_or("adapters")), shown)
        }
        "optimizer_config" if matches!(node, YamlNode::Map(_)) => optimizer(found, file, shown, node),
        "hf_dataset" => rows::hub(found, shown, node),
        "datasets" | "dataset" | "train_dataset" | "eval_dataset" | "test_datasets" | "pretraining_dataset" => {
            rows::datasets(found, file, shown, name, node);
        }
        // The tool runs the file for training: nothing else is meant.
        "train" | "do_train" | "do_eval" => {}
        "lr_schedule" if matches!(node, YamlNode::Map(_)) => mlx_schedule(found, shown, node),
        _ => return false,
    }
    true
}

/// The loss of pairs that the file names.
fn pair_loss(file: &ToolConfig) -> String {
    if ["rl", "stage"].iter().any(|name| file.text(name) == Some("ipo")) {
        return "ipo".into();
    }
    let names = ["pref_loss", "dpo_loss_type", "dpo_loss", "loss_type"];
    let nodes = names.iter().filter_map(|name| file.root.get(name));
    let one = |node: &YamlNode| match node {
        YamlNode::List(items) => items.first()?.scalar().map(str::to_lowercase),
        node => node.scalar().map(str::to_lowercase),
    };
    let loss = nodes.filter(|node| !node.is_off()).find_map(one);
    loss.unwrap_or_else(|| "sigmoid".into())
}

fn has_beta(table: Option<&YamlNode>) -> bool {
    let beta = table.and_then(|table| table.get("beta"));
    beta.is_some_and(|node| !matches!(node, YamlNode::Nothing))
}

/// Trackers by name, in a list or separated by commas. Only TensorBoard has a counterpart.
fn report_to(found: &mut Findings, shown: &str, name: &str, node: &YamlNode) {
    let texts: Vec<&str> = match node {
        YamlNode::List(items) => items.iter().filter_map(YamlNode::scalar).collect(),
        _ => node.scalar().into_iter().flat_map(|text| text.split(',')).collect(),
    };
    for text in texts.into_iter().map(|text| text.trim().to_lowercase()) {
        match text.as_str() {
            "none" | "" | "false" => {}
            "tensorboard" => found.take("train.report_to", quoted("tensorboard"), shown),
            "true" if name == "use_tensorboard" => found.take("train.report_to", quoted("tensorboard"), shown),
            other => {
                let why = peers::value("train.report_to", other).unwrap_or("ft has no such tracker");
                found.leave(&format!("{shown}: {other}"), why);
            }
        }
    }
}

pub fn is_count(node: &YamlNode) -> bool {
    node.scalar()
        .is_some_and(|text| text.parse::<u64>().is_ok_and(|n| n > 0))
}

/// The name of a chat template. That of the model is used unless ft has one of this name.
fn template(found: &mut Findings, shown: &str, node: &YamlNode) {
    match node.scalar() {
        None | Some("tokenizer_default" | "default" | "auto" | "") => {}
        Some(path) if path.ends_with(".jinja") => found.take("data.chat_template", quoted(path), shown),
        Some(name) => match named::find(name) {
            Some(own) => found.take("data.chat_template", quoted(own.name), shown),
            None => found.leave(
                shown,
                "the template of the model is used; `data.chat_template` names another one",
            ),
        },
    }
}

/// `lr_scheduler_kwargs` of transformers.
fn schedule(found: &mut Findings, file: &ToolConfig, shown: &str, node: &YamlNode) {
    let YamlNode::Map(entries) = node else { return };
    let decays = schedules::is(file, "warmup_stable_decay");
    for (name, value) in entries {
        let shown = format!("{shown}.{name}");
        let text = value.scalar().unwrap_or_default();
        match name.as_str() {
            "min_lr_rate" => found.take("schedule.min_lr_ratio", text, &shown),
            "min_lr" | "lr_end" => lowest_rate(found, file, &shown, value),
            "num_cycles" if schedules::is(file, "cosine_with_restarts") => {
                found.take("schedule.num_cycles", text, &shown);
            }
            "min_lr_ratio" if decays => found.take("schedule.min_lr_ratio", super::number(text), &shown),
            "num_decay_steps" if decays => schedules::decay(found, file, &shown, value),
            // As in ft.
            "warmup_type" if decays && text == "linear" => {}
            "decay_type" if decays && text == "cosine" => {}
            "power" => found.take("schedule.power", super::number(text), &shown),
            _ => found.leave(
                &shown,
                "ft has no such option: it supports only the keys of `[schedule]`",
            ),
        }
    }
}

/// The lowest rate itself, which is a part of the highest one in ft.
fn lowest_rate(found: &mut Findings, file: &ToolConfig, shown: &str, node: &YamlNode) {
    let highest = ["learning_rate", "lr", "max_lr", "peak_lr"]
        .iter()
        .find_map(|name| file.number(name))
        .filter(|rate| *rate > 0.0);
    let lowest = node.scalar().and_then(|text| text.parse::<f64>().ok());
    match (lowest, highest) {
        (Some(0.0), None) => found.take("schedule.min_lr_ratio", "0.0", shown),
        (Some(lowest), Some(highest)) => found.take("schedule.min_lr_ratio", ratio(lowest, highest), shown),
        (Some(_), None) => found.leave(
            shown,
            "a rate, and the file has no `learning_rate`: write `schedule.min_lr_ratio`, this rate divided by \
             `optimizer.learning_rate`",
        ),
        (None, _) => found.leave(shown, "no number: write `schedule.min_lr_ratio`"),
    }
}

/// A power of two that a scale of the loss can be.
fn exponent(node: &YamlNode) -> Option<i32> {
    let power = node.scalar()?.parse::<i32>().ok()?;
    (0..=1000).contains(&power).then_some(power)
}

/// `optimizer_config` of mlx-lm: the arguments of each optimizer.
fn optimizer(found: &mut Findings, file: &ToolConfig, shown: &str, node: &YamlNode) {
    let name = file.text("optimizer").unwrap_or("adam");
    let Some(YamlNode::Map(entries)) = node.get(name) else {
        return;
    };
    for (argument, value) in entries {
        let shown = format!("{shown}.{name}.{argument}");
        match (argument.as_str(), value) {
            ("betas", YamlNode::List(both)) => {
                let both: Vec<String> = both.iter().filter_map(YamlNode::scalar).map(super::number).collect();
                found.take("optimizer.betas", format!("[{}]", both.join(", ")), &shown);
            }
            ("eps" | "weight_decay" | "momentum", YamlNode::Scalar(text)) => {
                found.take(&format!("optimizer.{argument}"), super::number(text), &shown);
            }
            // ft always does this.
            ("bias_correction", YamlNode::Scalar(text)) if text == "true" => {}
            // And never this.
            ("relative_step" | "scale_parameter", YamlNode::Scalar(t)) if name == "adafactor" && t == "false" => {}
            _ => found.leave(
                &shown,
                "ft has no such option of an optimizer: see the keys of `[optimizer]`",
            ),
        }
    }
}

/// MLX: `{name: cosine_decay, warmup: 100, arguments: [rate, steps, end]}`; `linear_schedule` has `[rate, end, steps]`.
fn mlx_schedule(found: &mut Findings, shown: &str, node: &YamlNode) {
    let text = |name: &str| node.get(name).and_then(YamlNode::scalar);
    let name = text("name").unwrap_or_default();
    let numbers: Vec<f64> = match node.get("arguments") {
        Some(YamlNode::List(arguments)) => arguments.iter().filter_map(|n| n.scalar()?.parse().ok()).collect(),
        _ => Vec::new(),
    };
    let from = format!("{shown}: arguments");
    if let Some(rate) = numbers.first().filter(|rate| **rate > 0.0) {
        // The schedule has the rate, not `learning_rate`.
        found.replace("optimizer.learning_rate", format!("{rate:?}"), &from);
    }
    let end = match name {
        "linear_schedule" => 1,
        "cosine_decay" => 2,
        _ => {
            let why = peers::value("schedule.name", name).filter(|why| why.contains(' '));
            found.leave(shown, why.unwrap_or("ft has no such schedule"));
            return;
        }
    };
    let end = numbers.get(end).copied().filter(|end| *end > 0.0);
    // A line that does not end at 0 is a polynomial of the first degree.
    let own = match (name, end) {
        ("cosine_decay", _) => "cosine",
        (_, Some(_)) => "polynomial",
        (_, None) => "linear",
    };
    found.take("schedule.name", quoted(own), shown);
    if let Some(steps) = text("warmup") {
        found.take("schedule.warmup_steps", steps, &format!("{shown}: warmup"));
    }
    if text("warmup_init")
        .and_then(|rate| rate.parse::<f64>().ok())
        .is_some_and(|rate| rate > 0.0)
    {
        found.leave(&format!("{shown}: warmup_init"), "the warmup begins at 0");
    }
    if let (Some(rate), Some(end)) = (numbers.first().filter(|rate| **rate > 0.0), end) {
        found.take("schedule.min_lr_ratio", ratio(end, *rate), &from);
    }
}

/// A rate as a part of another one, without the digits that only the division makes.
fn ratio(part: f64, whole: f64) -> String {
    rounded(part / whole)
}

/// A computed number, without the digits that only the computation makes.
pub fn rounded(value: f64) -> String {
    format!("{:?}", (value * 1e9).round() / 1e9)
}

/// `unfrozen_parameters` of Axolotl: regular expressions. ft has beginnings of names.
fn unfrozen(found: &mut Findings, shown: &str, node: &YamlNode) {
    let YamlNode::List(items) = node else { return };
    let mut names = Vec::new();
    for text in items.iter().filter_map(YamlNode::scalar) {
        let plain = text.trim_start_matches('^').trim_end_matches('$').replace("\\.", ".");
        if plain.contains(|c| "[](){}*+?|\\^$".contains(c)) {
            found.leave(
                &format!("{shown}: {text}"),
                "`tune.freeze.trainable` has beginnings of names, no regular expressions",
            );
        } else {
            names.push(quoted(&plain));
        }
    }
    found.replace("tune.method", "\"freeze\"", shown);
    found.take("tune.freeze.trainable_layers", "0", shown);
    found.take("tune.freeze.trainable", format!("[{}]", names.join(", ")), shown);
}

/// The keys that depend on two keys together.
pub fn afterwards(found: &mut Findings, file: &ToolConfig) {
    let root = file.root;
    // The schedule of MLX stands before or after the rate.
    if let Some(node) = root.get("lr_schedule").filter(|node| matches!(node, YamlNode::Map(_))) {
        let mut again = Findings::default();
        mlx_schedule(&mut again, "lr_schedule", node);
        for taken in again.taken.into_iter().filter(|t| t.key == "optimizer.learning_rate") {
            found.replace(&taken.key, taken.value, &taken.from);
        }
    }
    // TRL evaluates on another split of the same dataset.
    let evaluates = ["eval_strategy", "evaluation_strategy"]
        .iter()
        .find_map(|name| file.text(name));
    let of = |key: &str| found.taken.iter().find(|t| t.key == key).map(|t| t.value.clone());
    if let (TrainingTool::Trl, Some("steps" | "epoch"), Some(train), None) = (
        file.tool,
        evaluates,
        of("data.train"),
        of("data.eval").or(of("data.eval_fraction")),
    ) {
        found.take("data.eval", train, "eval_strategy and dataset_name");
        found.take("data.eval_split", quoted("test"), "default of TRL");
    }
    // MLX reads `valid.jsonl` of the same folder.
    let of = |key: &str| found.taken.iter().find(|t| t.key == key).map(|t| t.value.clone());
    let has_evaluations = of("train.eval_steps").is_some() || of("data.eval").or(of("data.eval_fraction")).is_some();
    let folder = of("data.train").filter(|_| file.tool == TrainingTool::Mlx && file.text("data").is_some());
    if let (false, Some(folder)) = (has_evaluations, folder) {
        found.take("data.eval", folder, "data");
        found.take_default("train.eval_steps", Some("200".to_string()), "default of mlx-lm");
    }
    let of = |key: &str| found.taken.iter().find(|t| t.key == key).map(|t| t.value.clone());
    if let (Some(_), None) = (of("train.eval_steps"), of("data.eval").or(of("data.eval_fraction"))) {
        match of("data.train").filter(|_| file.tool == TrainingTool::Mlx) {
            Some(folder) => found.take("data.eval", folder, "steps_per_eval and data"),
            None => {
                found.taken.retain(|t| t.key != "train.eval_steps");
                found.leave(
                    "eval_steps",
                    "there are no rows to evaluate on: write `data.eval` or `data.eval_fraction`",
                );
            }
        }
    }
    // MLX: the adapter is scaled by `scale` itself.
    let lora = root.get("lora_parameters");
    let number = |name: &str| lora.and_then(|l| l.get(name))?.scalar()?.parse::<f64>().ok();
    if let (Some(scale), Some(rank)) = (number("scale"), number("rank")) {
        found.left.retain(|(from, _)| from != "lora_parameters.scale");
        found.take(
            "tune.lora.lora_alpha",
            format!("{:?}", scale * rank),
            "lora_parameters.scale and rank",
        );
    }
    // Weights of rewards that are left out.
    if !found.taken.iter().any(|t| t.key == "rlhf.rewards")
        && let Some(at) = found.taken.iter().position(|t| t.key == "rlhf.reward_weights")
    {
        let weights = found.taken.remove(at);
        found.leave(&weights.from, "write `rlhf.reward_weights` with `rlhf.rewards`");
    }
    schedules::afterwards(found, file);
    trl::afterwards(found, file);
    let adapter = found.taken.iter().any(|t| t.key.starts_with("tune.lora."));
    if adapter {
        found.take("tune.method", "\"lora\"", "the keys of an adapter");
    }
}
