//! The trainers of TRL, which Unsloth uses too. Several of them are one stage of ft, and a key or a default may mean
//! something else in each. Defaults are those of TRL 1.16; for PPO those of the last version that had it.

use super::tools::{ToolConfig, TrainingTool};
use super::yaml::YamlNode;
use super::{Findings, number, rules};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trainer {
    Sft,
    Dpo,
    Kto,
    Orpo,
    Reward,
    Cpo,
    /// Of the repository of the SimPO paper, whose margin is a multiple of `beta`.
    SimPo,
    Gkd,
    /// All answers are of the student.
    Distillation,
    Grpo,
    Rloo,
    Ppo,
}

/// Keys that a trainer of distillation has and the other one has not.
const OF_GKD: [&str; 3] = ["lmbda", "seq_kd", "max_new_tokens"];
const OF_DISTILLATION: [&str; 13] = [
    "max_completion_length",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "cache_implementation",
    "generation_kwargs",
    "use_vllm",
    "max_tool_calling_iterations",
    "log_completions",
    "num_completions_to_print",
    "log_unique_prompts",
    "teacher_model_revision",
];
/// The same for the trainers of RLOO and GRPO.
const OF_RLOO: [&str; 2] = ["normalize_advantages", "reward_clip_range"];
const OF_GRPO: [&str; 4] = ["loss_type", "scale_rewards", "importance_sampling_level", "delta"];

/// `beta` of SimPO.
const SIMPO_BETA: f64 = 2.0;
/// Tokens of a prompt for which `data.max_length` has room in any case: these trainers do not cut prompts.
const PROMPT: u64 = 1024;

impl Trainer {
    /// `None`: the file is of another tool.
    fn of(file: &ToolConfig) -> Option<Self> {
        if !matches!(file.tool, TrainingTool::Trl | TrainingTool::Unsloth) {
            return None;
        }
        Some(match file.stage.unwrap_or("sft") {
            "dpo" => Self::Dpo,
            "kto" => Self::Kto,
            "orpo" => Self::Orpo,
            "reward" => Self::Reward,
            "simpo" if file.has(&["gamma_beta_ratio"]) => Self::SimPo,
            "simpo" => Self::Cpo,
            "distill" if !file.has(&OF_GKD) && (file.has(&OF_DISTILLATION) || has_vllm(file)) => Self::Distillation,
            "distill" => Self::Gkd,
            "grpo" if file.has(&OF_RLOO) && !file.has(&OF_GRPO) => Self::Rloo,
            "grpo" => Self::Grpo,
            "ppo" => Self::Ppo,
            _ => Self::Sft,
        })
    }

    fn distills(self) -> bool {
        matches!(self, Self::Gkd | Self::Distillation)
    }

    fn is_rl(self) -> bool {
        matches!(self, Self::Grpo | Self::Rloo | Self::Ppo)
    }

    /// True if it trains on answers that the model gives to prompts.
    fn is_online(self) -> bool {
        self.is_rl() || self == Self::Distillation
    }
}

fn has_vllm(file: &ToolConfig) -> bool {
    let YamlNode::Map(entries) = file.root else {
        return false;
    };
    entries.iter().any(|(name, _)| name.starts_with("vllm_"))
}

/// Where the stage comes from, if it is not only one trainer's.
pub fn origin(file: &ToolConfig) -> Option<&'static str> {
    Some(match Trainer::of(file)? {
        Trainer::Distillation => "the keys of DistillationTrainer",
        Trainer::Gkd if file.has(&OF_GKD) => "the keys of GKDTrainer",
        Trainer::Gkd => "a teacher: read as a configuration of GKDTrainer",
        Trainer::Rloo => "the keys of RLOOTrainer",
        Trainer::SimPo => "the keys of SimPO",
        _ => return None,
    })
}

/// Applies the rule that this trainer has for the key. Returns false if there is none.
pub fn apply(found: &mut Findings, file: &ToolConfig, shown: &str, name: &str, node: &YamlNode) -> bool {
    let Some(trainer) = Trainer::of(file) else { return false };
    let text = node.scalar().unwrap_or_default().to_lowercase();
    let is = |values: &[&str]| values.contains(&text.as_str());
    match name {
        // GKDTrainer only samples with it; the divergence has temperature 1 there.
        "temperature" if trainer.distills() && !node.is_off() => {
            found.take("distill.rollout_temperature", number(&text), shown);
            if trainer == Trainer::Distillation {
                found.take("distill.temperature", number(&text), shown);
            }
        }
        "max_completion_length" if trainer.distills() && !node.is_off() => {
            found.take("distill.max_new_tokens", text, shown);
        }
        "max_completion_length" if !trainer.is_rl() && !node.is_off() => {
            found.leave(
                shown,
                "ft has one length: prompt and answer together must fit in `data.max_length`",
            );
        }
        // `afterwards` adds it to the length of the answers.
        "max_prompt_length" if trainer.is_rl() && rules::is_count(node) => {}
        "top_k" | "top_p" | "min_p" | "repetition_penalty" if trainer.distills() && !node.is_off() => {
            let off = if ["top_k", "min_p"].contains(&name) { 0.0 } else { 1.0 };
            if text.parse::<f64>() != Ok(off) {
                found.leave(
                    shown,
                    "ft has no such option for the answers of the student: it samples from all tokens, with `distill.rollout_temperature`",
                );
            }
        }
        "packing" if trainer.distills() && node.is_on() => {
            found.leave(
                shown,
                "rows that the student answers are not packed: `data.packing = false`",
            );
        }
        "packing_strategy" if trainer == Trainer::Sft && is(&["bfd", "bfd_split", "bfd-requeue"]) => {}
        // `dropout` reads it.
        "disable_dropout" => {}
        // These trainers shuffle in each epoch too; the key is only for the time before.
        "shuffle_dataset" if !trainer.is_online() => {}
        "train_sampling_strategy" if is(&["sequential"]) => found.take("data.shuffle", "false", shown),
        "train_sampling_strategy" if is(&["random"]) => found.take("data.shuffle", "true", shown),
        "bf16" if is(&["false"]) && trains_in_f32(file) => found.take("model.dtype", "\"f32\"", shown),
        "alpha" if matches!(trainer, Trainer::Cpo | Trainer::SimPo | Trainer::Dpo) && shown == name => {
            if !node.is_off() && text.parse::<f64>() != Ok(0.0) {
                found.leave(
                    shown,
                    "ft has no AlphaPO: the rewards of `simpo` are log-probabilities, as with `alpha: 0`",
                );
            }
        }
        "loss_type" if trainer == Trainer::Sft && is(&["nll", "chunked_nll"]) => {}
        "loss_type" if trainer == Trainer::SimPo && is(&["sigmoid"]) => {}
        "loss_type" if trainer == Trainer::SimPo || (trainer == Trainer::Cpo && !is(&["simpo"])) => {
            found.leave(shown, LOSS_OF_CPO);
        }
        "sft_weight" if trainer == Trainer::SimPo => found.take("rlhf.cpo_alpha", number(&text), shown),
        "gamma_beta_ratio" if trainer == Trainer::SimPo => {
            let beta = file.number("beta").unwrap_or(SIMPO_BETA);
            let margin = text.parse::<f64>().ok().map(|ratio| ratio * beta);
            match margin.filter(|margin| margin.is_finite()) {
                Some(margin) => {
                    found.take(
                        "rlhf.simpo_gamma",
                        rules::rounded(margin),
                        "gamma_beta_ratio, times beta",
                    );
                }
                None => found.leave(shown, "write `rlhf.simpo_gamma`: this ratio, multiplied by `rlhf.beta`"),
            }
        }
        _ => return false,
    }
    true
}

const LOSS_OF_CPO: &str = "ft has only the loss that TRL names `simpo`, not the other losses of CPO; for a loss with a reference \
                           model, set `train.stage = \"dpo\"`";

/// True if the file turns half precision off and names no other type: TRL loads models in f32.
fn trains_in_f32(file: &ToolConfig) -> bool {
    let on = |name: &&str| file.root.get(name).is_some_and(YamlNode::is_on);
    file.tool == TrainingTool::Trl
        && !["fp16", "load_in_4bit", "load_in_8bit"].iter().any(on)
        && !file.has(&["torch_dtype", "dtype"])
}

/// The keys that follow from the trainer or from two keys together.
pub fn afterwards(found: &mut Findings, file: &ToolConfig) {
    let Some(trainer) = Trainer::of(file) else { return };
    if trainer == Trainer::Rloo {
        found.take("rlhf.grpo.loss_type", "\"rloo\"", "the keys of RLOOTrainer");
    }
    if trainer == Trainer::Cpo && !file.has(&["loss_type", "pref_loss"]) {
        found.leave("loss_type", format!("it is `sigmoid` in TRL: {LOSS_OF_CPO}"));
    }
    let prompt = file.text("max_prompt_length").and_then(|text| text.parse::<u64>().ok());
    if let Some(prompt) = prompt.filter(|prompt| *prompt > 0 && trainer.is_rl()) {
        let answer = answer_length(found, trainer);
        if found.value("data.max_length").is_some() {
            found.leave(
                "max_prompt_length",
                "ft has one length: prompt and answer together must fit in `data.max_length`",
            );
        } else {
            let from = "max_prompt_length, and the longest answer";
            found.take("data.max_length", prompt.saturating_add(answer).to_string(), from);
        }
    }
}

/// The longest answer of a trainer that makes answers, in tokens.
fn answer_length(found: &Findings, trainer: Trainer) -> u64 {
    let key = match trainer {
        Trainer::Distillation => "distill.max_new_tokens",
        _ => "rlhf.max_completion_length",
    };
    let own = found.value(key).and_then(|text| text.parse().ok());
    own.unwrap_or(if trainer == Trainer::Ppo { 53 } else { 512 })
}

/// Defaults of the trainer for keys that the file does not have, where ft has others.
pub fn defaults(found: &mut Findings, file: &ToolConfig) {
    let Some(trainer) = Trainer::of(file) else { return };
    let tool = match trainer {
        Trainer::SimPo => "SimPO",
        _ => file.tool.name(),
    };
    let from = format!("default of {tool}");
    let rate = match trainer {
        Trainer::Sft | Trainer::Gkd => "2e-5",
        Trainer::Reward => "1e-4",
        Trainer::Ppo => "3e-6",
        Trainer::SimPo => "5e-5",
        _ => "1e-6",
    };
    let rows: &[(&str, &str)] = match trainer {
        Trainer::Sft | Trainer::Dpo | Trainer::Orpo | Trainer::Reward => &[],
        // The answers of a micro-batch, of which the KL term is estimated, stay together.
        Trainer::Kto => &[("data.shuffle", "false")],
        Trainer::Cpo => &[("rlhf.cpo_alpha", "1.0")],
        Trainer::SimPo => &[("rlhf.beta", "2.0"), ("rlhf.cpo_alpha", "0.0")],
        // Its rows are conversations, and only the last message is trained.
        Trainer::Gkd => &[
            ("distill.lmbda", "0.5"),
            ("distill.rollout_temperature", "0.9"),
            ("data.train_on", "\"completion\""),
        ],
        Trainer::Distillation => &[
            ("distill.lmbda", "1.0"),
            ("distill.beta", "1.0"),
            ("distill.max_new_tokens", "512"),
        ],
        Trainer::Grpo => &[("rlhf.max_completion_length", "512")],
        Trainer::Rloo => &[
            ("rlhf.max_completion_length", "512"),
            ("rlhf.num_generations", "2"),
            ("rlhf.grpo.beta", "0.05"),
        ],
        Trainer::Ppo => &[
            ("rlhf.max_completion_length", "53"),
            ("rlhf.num_generations", "1"),
            ("rlhf.num_iterations", "4"),
            ("rlhf.temperature", "0.7"),
        ],
    };
    for (key, value) in [("optimizer.learning_rate", rate)].iter().chain(rows) {
        found.take_default(key, Some((*value).into()), &from);
    }
    if trainer == Trainer::Sft && file.stage != Some("pretrain") {
        // ft splits long rows of plain text, TRL only with some ways of packing.
        let packing = file.text("packing_strategy").unwrap_or_default();
        let splits = ["bfd_split", "bfd-requeue", "wrapped"].contains(&packing);
        let long = if splits && found.value("data.packing") == Some("true") {
            "\"split\""
        } else {
            "\"truncate\""
        };
        found.take_default("data.long", Some(long.into()), &from);
    }
    if trainer.is_online() {
        // Without a longer answer ft's own default has the room.
        let length = Some(answer_length(found, trainer)).filter(|answer| *answer > PROMPT);
        let length = length.map(|answer| answer.saturating_add(PROMPT).to_string());
        found.take_default("data.max_length", length, "room for prompts, which TRL does not cut");
    } else {
        let length = if trainer == Trainer::SimPo { "512" } else { "1024" };
        found.take_default("data.max_length", Some(length.into()), &from);
    }
}

/// The dropout of adapters: most trainers turn all dropout off, whatever an adapter has.
pub fn dropout(found: &mut Findings, file: &ToolConfig) {
    let Some(trainer) = Trainer::of(file) else {
        // The trainers of other tools for preferences are made of these; there an adapter has no dropout by default.
        let off: &[&str] = match file.tool {
            TrainingTool::LlamaFactory => &["dpo", "orpo", "simpo", "kto"],
            TrainingTool::Axolotl => &["dpo", "orpo", "simpo", "kto", "reward"],
            _ => &[],
        };
        let own = found.value("tune.lora.lora_dropout").map(str::parse::<f64>);
        if off.contains(&file.stage.unwrap_or("sft")) && own.is_some_and(|own| own != Ok(0.0)) {
            found.replace("tune.lora.lora_dropout", "0.0", "its trainer turns dropout off");
        }
        return;
    };
    let trains_with = matches!(
        trainer,
        Trainer::Sft | Trainer::Distillation | Trainer::Grpo | Trainer::Rloo
    );
    let (off, from) = match file.root.get("disable_dropout") {
        None | Some(YamlNode::Nothing) => (!trains_with, "disable_dropout, a default of its trainer"),
        Some(node) => (node.is_on(), "disable_dropout"),
    };
    let own = found.value("tune.lora.lora_dropout").map(str::parse::<f64>);
    // Adapters of Unsloth have none.
    let none = own.is_none() && file.tool == TrainingTool::Unsloth;
    if off && !none && own != Some(Ok(0.0)) {
        found.replace("tune.lora.lora_dropout", "0.0", from);
    }
}
