//! Learning-rate schedules and optimizers whose meaning depends on several keys, or on a default of the tool.

use super::Findings;
use super::tools::{ToolConfig, TrainingTool};
use super::yaml::YamlNode;

const WARMUP: [&str; 2] = ["schedule.warmup_steps", "schedule.warmup_ratio"];
/// Optimizer steps of mlx-lm if the file has no `iters`.
const MLX_STEPS: f64 = 1000.0;

/// The optimizer that other tools have with 8-bit moments under this name. Other names with `8bit` are other optimizers,
/// such as GaLore.
pub fn in_8_bits(name: &str) -> Option<&'static str> {
    match name {
        "adamw_8bit" | "adamw_bnb_8bit" | "adamw_torch_8bit" | "ao_adamw_8bit" | "paged_adamw_8bit" | "adamw8bit"
        | "pagedadamw8bit" => Some("\"adamw\""),
        "lion_8bit" | "paged_lion_8bit" | "lion8bit" | "pagedlion8bit" => Some("\"lion\""),
        _ => None,
    }
}

/// The key of a trainer of transformers that names this schedule.
fn key_with(file: &ToolConfig, schedule: &str) -> Option<&'static str> {
    let is = |name: &str| file.text(name).is_some_and(|text| text.eq_ignore_ascii_case(schedule));
    ["lr_scheduler_type", "lr_scheduler"].into_iter().find(|name| is(name))
}

/// True if a trainer of transformers has this schedule.
pub fn is(file: &ToolConfig, schedule: &str) -> bool {
    key_with(file, schedule).is_some()
}

/// `num_decay_steps` of `warmup_stable_decay`: a part of the steps in ft.
pub fn decay(found: &mut Findings, file: &ToolConfig, shown: &str, node: &YamlNode) {
    let steps = node.scalar().and_then(|text| text.parse::<f64>().ok());
    let total = file.number("max_steps").filter(|total| *total > 0.0);
    match (steps, total) {
        (Some(steps), Some(total)) => {
            found.take(
                "schedule.decay_ratio",
                format!("{:?}", steps / total),
                &format!("{shown}, divided by max_steps"),
            );
        }
        _ => found.leave(
            shown,
            "write `schedule.decay_ratio`: these steps, divided by the steps of the run",
        ),
    }
}

/// The keys that depend on two keys together.
pub fn afterwards(found: &mut Findings, file: &ToolConfig) {
    if file.tool == TrainingTool::Mlx {
        mlx_decay(found, file);
    } else if let Some(key) = key_with(file, "constant") {
        found.taken.retain(|taken| !WARMUP.contains(&taken.key.as_str()));
        let from = format!("{key}: constant has no warmup in transformers");
        found.take(WARMUP[1], "0.0", &from);
    } else {
        one_warmup(found, file);
    }
}

/// Steps and ratio of a warmup together: ft takes one of them. Axolotl takes the steps, also 0 of them; for a trainer of
/// transformers 0 steps mean the ratio.
fn one_warmup(found: &mut Findings, file: &ToolConfig) {
    let [steps, ratio] = WARMUP.map(|key| found.value(key));
    if let (Some(steps), Some(_)) = (steps, ratio) {
        let none = steps.parse::<f64>().is_ok_and(|steps| steps == 0.0);
        let loser = usize::from(!none || file.tool == TrainingTool::Axolotl);
        found.taken.retain(|taken| taken.key != WARMUP[loser]);
    }
}

/// MLX: a decay has a number of steps, and the rate stays at its end.
fn mlx_decay(found: &mut Findings, file: &ToolConfig) {
    let number = |node: Option<&YamlNode>| node?.scalar()?.parse::<f64>().ok();
    let Some(schedule) = file.root.get("lr_schedule") else {
        return;
    };
    let place = match schedule.get("name").and_then(YamlNode::scalar) {
        Some("cosine_decay") => 1,
        Some("linear_schedule") => 2,
        _ => return,
    };
    let Some(YamlNode::List(arguments)) = schedule.get("arguments") else {
        return;
    };
    let warmup = number(schedule.get("warmup")).unwrap_or(0.0);
    let rest = file.number("iters").unwrap_or(MLX_STEPS) - warmup;
    if let Some(steps) = number(arguments.get(place)).filter(|steps| *steps != rest) {
        found.leave(
            "lr_schedule: arguments",
            format!("the decay has {steps} steps there; in ft it has the {rest} steps after the warmup"),
        );
    }
}

/// What the optimizers of MLX do by default, and those of ft do not.
pub fn mlx_optimizer(found: &mut Findings, file: &ToolConfig) {
    let name = file.text("optimizer").unwrap_or("adam").to_lowercase();
    let options = file.root.get("optimizer_config").and_then(|all| all.get(&name));
    let option = |key: &str| options.and_then(|options| options.get(key)).and_then(YamlNode::scalar);
    match name.as_str() {
        "adam" | "adamw" if option("bias_correction").is_none() => found.leave(
            "optimizer",
            "mlx-lm's Adam has no bias correction by default: its first updates are up to three times as large as in ft",
        ),
        "adafactor" if ["relative_step", "scale_parameter"].iter().any(|key| option(key) != Some("false")) => {
            found.leave(
                "optimizer",
                "mlx-lm's Adafactor multiplies the rate by the size of each weight (`scale_parameter`), and chooses the rate \
                 itself (`relative_step`); ft uses `optimizer.learning_rate`",
            );
        }
        _ => {}
    }
}
