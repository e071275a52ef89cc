//! Which tool a configuration is of, the stage that it means, and the defaults of that tool that are not those of ft.

use super::registry::Registry;
use super::yaml::YamlNode;
use super::{Findings, quoted, schedules, trl};
use crate::recipe::value::ValueKind;
use crate::recipe::{peers, table};

/// A training tool. Unsloth's trainers are those of TRL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainingTool {
    Axolotl,
    LlamaFactory,
    Mlx,
    Trl,
    Unsloth,
}

/// A configuration as a whole.
#[derive(Debug)]
pub struct ToolConfig<'a> {
    pub root: &'a YamlNode,
    pub tool: TrainingTool,
    /// The value of `train.stage`; `None`: supervised training.
    pub stage: Option<&'static str>,
    /// The meaning of the names of datasets.
    pub registry: Option<&'a Registry>,
}

impl TrainingTool {
    fn of(root: &YamlNode) -> Self {
        let any = |names: &[&str]| names.iter().any(|name| root.get(name).is_some());
        if any(&["base_model"]) {
            Self::Axolotl
        } else if any(&["finetuning_type", "cutoff_len", "dataset_dir"]) {
            Self::LlamaFactory
        } else if any(&["fine_tune_type", "lora_parameters", "iters", "hf_dataset"]) {
            Self::Mlx
        } else if any(&["model_name", "random_state", "use_gradient_checkpointing"]) {
            Self::Unsloth
        } else {
            Self::Trl
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Axolotl => "Axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Mlx => "mlx-lm",
            Self::Trl => "TRL",
            Self::Unsloth => "Unsloth",
        }
    }

    /// True for the arguments of a trainer of transformers.
    fn is_trainer(self) -> bool {
        matches!(self, Self::LlamaFactory | Self::Trl | Self::Unsloth)
    }
}

impl<'a> ToolConfig<'a> {
    pub fn new(root: &'a YamlNode, registry: Option<&'a Registry>) -> Self {
        let tool = TrainingTool::of(root);
        Self {
            root,
            tool,
            stage: stage(root, tool),
            registry,
        }
    }

    /// True if the file has one of these keys with a value, be it `false`.
    pub fn has(&self, names: &[&str]) -> bool {
        let has = |name: &&str| {
            self.root
                .get(name)
                .is_some_and(|node| !matches!(node, YamlNode::Nothing))
        };
        names.iter().any(has)
    }

    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.root
            .get(name)
            .filter(|node| !node.is_off())
            .and_then(YamlNode::scalar)
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        self.text(name)?.parse().ok()
    }

    /// The key that a name has in this stage, where several tables have one of this name.
    pub fn of_stage(&self, name: &str) -> Option<String> {
        let tables: &[&str] = match self.stage? {
            "grpo" => &["rlhf.grpo", "rlhf"],
            "ppo" => &["rlhf.ppo", "rlhf"],
            "distill" => &["distill"],
            "sft" | "pretrain" => &[],
            _ => &["rlhf"],
        };
        let keys = tables.iter().map(|table| format!("{table}.{name}"));
        keys.into_iter().find(|key| table::find(key).is_some())
    }
}

/// The value of `train.stage` with this name.
fn stage_named(name: &str) -> Option<&'static str> {
    let ValueKind::Name(stages) = table::find("train.stage")?.kind else {
        return None;
    };
    let lower = name.to_lowercase();
    let answer = peers::value("train.stage", &lower).unwrap_or(&lower);
    let ipo = if lower == "ipo" { "dpo" } else { answer };
    stages.iter().find(|stage| **stage == ipo).copied()
}

/// The trainers of TRL are classes that a program names, not the configuration: keys that only one of them has say which.
fn stage(root: &YamlNode, tool: TrainingTool) -> Option<&'static str> {
    let has = |name: &&str| root.get(name).is_some_and(|node| !matches!(node, YamlNode::Nothing));
    let any = |names: &[&str]| names.iter().any(has);
    let text = |name: &str| {
        let node = root.get(name);
        let one = match node {
            Some(YamlNode::List(items)) if items.len() == 1 => items.first(),
            node => node,
        };
        one.and_then(YamlNode::scalar).unwrap_or_default()
    };
    // DPO, ORPO and SimPO are one stage there.
    let loss = ["pref_loss", "loss_type"].map(text);
    let named = ["stage", "rl", "train_mode"].map(text);
    if let Some(loss) = loss.into_iter().find(|loss| ["orpo", "simpo"].contains(loss)) {
        return stage_named(loss);
    }
    if let Some(name) = named.into_iter().find(|name| !name.is_empty()) {
        return stage_named(name);
    }
    let dpo_losses = "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot apo_zero apo_down discopop";
    match tool {
        _ if any(&["pretraining_dataset"]) => Some("pretrain"),
        TrainingTool::Trl | TrainingTool::Unsloth => match () {
            () if any(&["teacher_model_name_or_path", "lmbda", "seq_kd"]) => Some("distill"),
            () if any(&["num_generations", "reward_funcs", "normalize_advantages"]) => Some("grpo"),
            () if any(&["cliprange", "kl_coef", "num_ppo_epochs"]) => Some("ppo"),
            () if any(&["center_rewards_coefficient"]) => Some("reward"),
            () if any(&["desirable_weight", "undesirable_weight"]) => Some("kto"),
            () if any(&["cpo_alpha", "simpo_gamma", "gamma_beta_ratio"]) => Some("simpo"),
            // Only DPO has mixtures.
            () if root.get("loss_type").is_some_and(YamlNode::is_several) => Some("dpo"),
            () if dpo_losses.split(' ').any(|name| name == loss[1]) || any(&["beta"]) => Some("dpo"),
            () => None,
        },
        _ => None,
    }
}

/// Defaults of the tool for keys that the file does not have, where ft has others: the same file means the same run.
pub fn defaults(found: &mut Findings, file: &ToolConfig) {
    let Some(tool) = Some(file.tool).filter(|_| !found.taken.is_empty()) else {
        return;
    };
    trl::defaults(found, file);
    if tool == TrainingTool::Mlx {
        schedules::mlx_optimizer(found, file);
    }
    let from = format!("default of {}", tool.name());
    let stage = file.stage.unwrap_or("sft");
    let has = |found: &Findings, key: &str| found.taken.iter().any(|taken| taken.key == key);
    let steps = found
        .taken
        .iter()
        .any(|t| t.key == "train.max_steps" && !t.value.starts_with('-'));
    let rate = match tool {
        TrainingTool::Mlx => Some("1e-5"),
        TrainingTool::LlamaFactory => Some("5e-5"),
        TrainingTool::Axolotl | TrainingTool::Trl | TrainingTool::Unsloth => None,
    };
    let rank = || {
        found
            .taken
            .iter()
            .find(|t| t.key == "tune.lora.r")
            .and_then(|t| t.value.parse::<f64>().ok())
    };
    let alpha = match tool {
        TrainingTool::LlamaFactory => Some(format!("{}", 2.0 * rank().unwrap_or(8.0))),
        TrainingTool::Mlx => Some(format!("{:?}", 20.0 * rank().unwrap_or(8.0))),
        TrainingTool::Trl => Some("32".into()),
        TrainingTool::Unsloth => Some("16".into()),
        TrainingTool::Axolotl => None,
    };
    let trainer = tool.is_trainer();
    let (packs, warms) = (
        tool == TrainingTool::LlamaFactory && stage == "pretrain",
        has(found, "schedule.warmup_steps") || has(found, "schedule.warmup_ratio"),
    );
    let rows: [(&str, Option<String>); 13] = [
        (
            "tune.method",
            Some(match tool {
                TrainingTool::Mlx | TrainingTool::LlamaFactory | TrainingTool::Unsloth => "\"lora\"".into(),
                TrainingTool::Axolotl | TrainingTool::Trl => "\"full\"".into(),
            }),
        ),
        ("optimizer.learning_rate", rate.map(str::to_string)),
        (
            "optimizer.weight_decay",
            (tool == TrainingTool::Mlx && file.text("optimizer") == Some("adamw")).then(|| "0.01".into()),
        ),
        (
            "schedule.name",
            match tool {
                TrainingTool::Mlx => Some("\"constant\"".into()),
                _ => trainer.then(|| "\"linear\"".into()),
            },
        ),
        (
            "schedule.warmup_ratio",
            ((trainer || tool == TrainingTool::Mlx) && !warms).then(|| "0.0".into()),
        ),
        (
            "train.batch_size",
            match tool {
                TrainingTool::Mlx => Some("4".into()),
                _ => trainer.then(|| "8".into()),
            },
        ),
        ("train.gradient_accumulation_steps", Some("1".into())),
        (
            "train.num_epochs",
            match tool {
                _ if steps => None,
                TrainingTool::Axolotl => Some("1".into()),
                _ => trainer.then(|| "3".into()),
            },
        ),
        (
            "train.max_steps",
            (tool == TrainingTool::Mlx && !has(found, "train.num_epochs")).then(|| "1000".into()),
        ),
        ("train.max_grad_norm", (tool == TrainingTool::Mlx).then(|| "0.0".into())),
        (
            "data.train_on",
            (tool == TrainingTool::Mlx && stage == "sft").then(|| "\"all\"".into()),
        ),
        // Its trainer is TRL's for CPO.
        (
            "rlhf.cpo_alpha",
            (tool == TrainingTool::Axolotl && stage == "simpo").then(|| "1.0".into()),
        ),
        (
            "data.packing",
            (!packs && stage != "grpo" && stage != "ppo").then(|| "false".into()),
        ),
    ];
    let adapters = [
        (
            "tune.lora.r",
            matches!(tool, TrainingTool::LlamaFactory | TrainingTool::Mlx).then(|| "8".into()),
        ),
        ("tune.lora.lora_alpha", alpha),
        (
            "tune.lora.lora_dropout",
            (tool == TrainingTool::Trl).then(|| "0.05".into()),
        ),
        // PEFT's own choice for nearly all models.
        (
            "tune.lora.target_modules",
            (tool == TrainingTool::Trl).then(|| "[\"q_proj\", \"v_proj\"]".into()),
        ),
    ];
    let answers = ["assistant_only_loss", "completion_only_loss", "train_on_responses_only"];
    if matches!(tool, TrainingTool::Trl | TrainingTool::Unsloth) && stage == "sft" && !has(found, "data.train_on") {
        let text = file.text("dataset_text_field").is_some();
        let asked = answers.iter().any(|name| file.text(name).is_some());
        if !text && !asked {
            found.leave(
                answers[0],
                "without it TRL trains every token of `messages` rows, ft the answers: `data.train_on = \"all\"` is the same",
            );
        }
    }
    for (key, value) in rows {
        found.take_default(key, value, &from);
    }
    if found
        .taken
        .iter()
        .any(|t| t.key == "tune.method" && t.value == "\"lora\"")
    {
        trl::dropout(found, file);
        for (key, value) in adapters {
            found.take_default(key, value, &from);
        }
        if tool == TrainingTool::Mlx && file.root.get("num_layers").or(file.root.get("lora_layers")).is_none() {
            found.leave(
                "num_layers",
                "mlx-lm trains the last 16 layers, ft all: `tune.lora.layers_to_transform` has indices of layers",
            );
        }
    }
}

/// The stage as a key of the recipe.
pub fn take_stage(found: &mut Findings, file: &ToolConfig) {
    let Some(stage) = file.stage else { return };
    let names = ["pref_loss", "stage", "rl", "train_mode", "pretraining_dataset"];
    let from = names.iter().find(|name| file.root.get(name).is_some());
    let from = match (from, trl::origin(file)) {
        (Some(name), _) => name.to_string(),
        (None, Some(origin)) => origin.into(),
        (None, None) if stage == "dpo" => "the keys of DPO; with ORPOTrainer: \"orpo\"".into(),
        (None, None) => "the keys of its trainer".into(),
    };
    found.take("train.stage", quoted(stage), &from);
}
