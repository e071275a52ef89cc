//! Keys whose value decides which key of ft is meant.

use super::yaml::Node;
use super::{Findings, quoted};
use crate::recipe::{peers, table};

/// Tables in which other tools have the keys of an adapter.
pub const LORA_TABLES: [&str; 4] = ["lora_parameters", "lora_config", "peft_config", "lora"];

/// Applies the rule of this key, if there is one. Returns false if there is none.
pub fn apply(found: &mut Findings, root: &Node, shown: &str, name: &str, node: &Node) -> bool {
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
        "use_badam" if node.is_on() => set(&[("tune.method", "\"block\"")]),
        "load_in_4bit" if node.is_on() => set(&[("memory.frozen_weights", "\"nf4\"")]),
        "load_in_8bit" if node.is_on() => set(&[("memory.frozen_weights", "\"int8\"")]),
        "quantization_bit" => match text.as_str() {
            "4" => set(&[("memory.frozen_weights", "\"nf4\"")]),
            "8" => set(&[("memory.frozen_weights", "\"int8\"")]),
            _ => return false,
        },
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
        "completion_only_loss" | "mask_prompt" | "train_on_responses_only" if node.is_on() => {
            set(&[("data.train_on", "\"completion\"")]);
        }
        "rl" => match text.as_str() {
            "dpo" | "kto" | "orpo" | "simpo" | "grpo" => found.take("train.stage", quoted(&text), shown),
            "ipo" => set(&[("train.stage", "\"dpo\""), ("rlhf.loss_type", "\"ipo\"")]),
            "" => {}
            _ => return false,
        },
        "optim" | "optimizer" | "optimizer_name"
            if text.contains("8bit") && (text.contains("adamw") || text.contains("lion")) =>
        {
            let own = if text.contains("lion") { "\"lion\"" } else { "\"adamw\"" };
            set(&[("optimizer.name", own), ("optimizer.state", "\"int8\"")]);
        }
        "optim" | "optimizer" if text.starts_with("paged_adamw") => set(&[("optimizer.name", "\"adamw\"")]),
        "lr_scheduler_type" | "lr_scheduler" if text == "constant_with_warmup" => {
            set(&[("schedule.name", "\"constant\"")]);
        }
        "lr_scheduler_type" | "lr_scheduler" if text == "cosine_with_min_lr" => set(&[("schedule.name", "\"cosine\"")]),
        "adam_beta1" | "adam_beta2" => {
            let beta = |name: &str, default: &str| {
                let own = root.get(name).and_then(Node::scalar);
                own.unwrap_or(default).to_string()
            };
            let both = format!("[{}, {}]", beta("adam_beta1", "0.9"), beta("adam_beta2", "0.999"));
            found.take("optimizer.betas", both, shown);
        }
        "save_every" | "save_interval" | "save_freq" if is_count(node) => found.take("train.save_steps", text, shown),
        "steps_per_eval" | "eval_every" | "eval_interval" if is_count(node) => {
            found.take("train.eval_steps", text, shown)
        }
        "steps_per_report" | "log_every" if is_count(node) => found.take("train.logging_steps", text, shown),
        "datasets" | "dataset" | "train_dataset" | "test_datasets" => datasets(found, shown, name, node),
        // The tool runs the file for training: nothing else is meant.
        "train" | "do_train" | "do_eval" => {}
        "lr_schedule" if matches!(node, Node::Map(_)) => mlx_schedule(found, root, shown, node),
        _ => return false,
    }
    true
}

/// A list of data sets with their settings, a path, or names.
fn datasets(found: &mut Findings, shown: &str, name: &str, node: &Node) {
    let key = if name == "test_datasets" {
        "data.eval"
    } else {
        "data.train"
    };
    let items: Vec<Node> = match node {
        Node::List(items) => items.clone(),
        Node::Scalar(text) => text.split(',').map(|t| Node::Scalar(t.trim().into())).collect(),
        other => vec![other.clone()],
    };
    let mut paths = Vec::new();
    for item in &items {
        let path = item.scalar().or_else(|| item.get("path")?.scalar());
        paths.extend(path.map(quoted));
        let kind = item.get("type").and_then(Node::scalar).unwrap_or_default();
        let first = kind.split('.').next().unwrap_or_default();
        let accepted = peers::value_for("type", "data.format", first);
        let known = accepted.filter(|value| is_value("data.format", value));
        match known {
            Some(format) if key == "data.train" => found.take("data.format", format, &format!("{shown}: type")),
            None if !kind.is_empty() => found.leave(
                &format!("{shown}: type {kind}"),
                "the format of rows is detected; see docs/data.md",
            ),
            _ => {}
        }
        for (from, to) in [
            ("split", "data.split"),
            ("name", "data.config"),
            ("train_on_split", "data.split"),
        ] {
            if let Some(text) = item.get(from).and_then(Node::scalar).filter(|t| *t != "train") {
                found.take(to, quoted(text), &format!("{shown}: {from}"));
            }
        }
    }
    match paths.as_slice() {
        [] => found.leave(shown, "write `data.train`"),
        [one] => found.take(key, one.clone(), shown),
        many => found.take(key, format!("[{}]", many.join(", ")), shown),
    }
}

fn is_count(node: &Node) -> bool {
    node.scalar()
        .is_some_and(|text| text.parse::<u64>().is_ok_and(|n| n > 0))
}

fn is_value(key: &str, value: &str) -> bool {
    use crate::recipe::value::ValueKind;
    match table::find(key).map(|key| key.kind) {
        Some(ValueKind::Name(names)) => names.contains(&value.trim_matches('"')),
        _ => true,
    }
}

/// MLX: `{name: cosine_decay, warmup: 100, arguments: [rate, steps, end]}`.
fn mlx_schedule(found: &mut Findings, root: &Node, shown: &str, node: &Node) {
    let text = |name: &str| node.get(name).and_then(Node::scalar);
    if let Some(name) = text("name").and_then(|name| peers::value_for("schedule", "schedule.name", name)) {
        found.take("schedule.name", name, shown);
    }
    if let Some(steps) = text("warmup") {
        found.take("schedule.warmup_steps", steps, &format!("{shown}: warmup"));
    }
    if let Some(Node::List(arguments)) = node.get("arguments") {
        let number = |at: usize| arguments.get(at).and_then(Node::scalar)?.parse::<f64>().ok();
        if let (Some(rate), None) = (number(0), root.get("learning_rate")) {
            found.take(
                "optimizer.learning_rate",
                format!("{rate:?}"),
                &format!("{shown}: arguments"),
            );
        }
        if let (Some(rate), Some(end)) = (number(0).filter(|x| *x > 0.0), number(2).filter(|x| *x > 0.0)) {
            found.take(
                "schedule.min_lr_ratio",
                format!("{:?}", end / rate),
                &format!("{shown}: arguments"),
            );
        }
    }
}

/// What two keys decide together.
pub fn afterwards(found: &mut Findings, root: &Node) {
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
    let adapter = found.taken.iter().any(|t| t.key.starts_with("tune.lora."));
    if adapter {
        found.take("tune.method", "\"lora\"", "the keys of an adapter");
    }
}
