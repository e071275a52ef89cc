//! The keys of `tune.lora`: checks of combinations, and the typed table.

use super::check::Values;
use super::types::*;
use crate::base::Error;

/// Parses `name=value` of a pattern key.
fn entry<T>(text: &str, value: impl Fn(&str) -> Option<T>) -> Option<(String, T)> {
    let (name, number) = text.rsplit_once('=')?;
    let name = name.trim();
    (!name.is_empty()).then_some(())?;
    Some((name.to_string(), value(number.trim())?))
}

fn rank(text: &str) -> Option<usize> {
    text.parse().ok().filter(|r| (1..=1 << 20).contains(r))
}

fn alpha(text: &str) -> Option<f64> {
    text.parse().ok().filter(|a: &f64| a.is_finite() && *a > 0.0)
}

/// Errors of the table, each with the keys involved.
pub fn faults(values: &Values) -> Vec<(&'static [&'static str], Error)> {
    let mut out: Vec<(&'static [&'static str], Error)> = Vec::new();
    for (path, key, what) in [
        (
            "tune.lora.rank_pattern",
            &["tune.lora.rank_pattern"][..],
            "a rank of at least 1",
        ),
        (
            "tune.lora.alpha_pattern",
            &["tune.lora.alpha_pattern"][..],
            "a number above 0",
        ),
    ] {
        for text in values.list(path) {
            let fits = if path.ends_with("rank_pattern") {
                entry(&text, rank).is_some()
            } else {
                entry(&text, alpha).is_some()
            };
            if !fits {
                out.push((
                    key,
                    Error::usage(format!("`{path}` has an item that is not `name=value`"))
                        .found(format!("{text:?}"))
                        .expected(format!("the name of a module or its ending, `=`, and {what}")),
                ));
            }
        }
    }
    let (kind, init) = (
        values.text("tune.lora.peft_type"),
        values.text("tune.lora.init_lora_weights"),
    );
    let dora = values.flag("tune.lora.use_dora");
    let residual = ["pissa", "olora", "corda", "lora_ga"].contains(&init);
    let kpm = values.text("tune.lora.corda.method") == "kpm";
    if kind == "lora" && init == "corda" && kpm && values.list("tune.lora.corda.data").is_empty() {
        out.push((
            &["tune.lora.corda.method", "tune.lora.corda.data"],
            Error::usage("`tune.lora.corda.method = \"kpm\"` needs rows of the knowledge to preserve")
                .hint("set `tune.lora.corda.data` to questions that the model must still answer"),
        ));
    }
    let frozen = values.text("memory.frozen_weights");
    if kind == "lora"
        && init == "loftq"
        && ["f32", "bf16"].contains(&frozen)
        && values.map("memory.overrides").is_empty()
    {
        out.push((
            &["tune.lora.init_lora_weights", "memory.frozen_weights"],
            Error::usage("`tune.lora.init_lora_weights = \"loftq\"` needs quantized weights")
                .found(format!("memory.frozen_weights = \"{frozen}\""))
                .hint("set `memory.frozen_weights` to `nf4`, `int4` or `int8`"),
        ));
    }
    if kind == "lora" && dora && residual {
        out.push((
            &["tune.lora.use_dora", "tune.lora.init_lora_weights"],
            Error::usage(format!(
                "`tune.lora.use_dora` and `tune.lora.init_lora_weights = \"{init}\"` contradict each other"
            ))
            .hint("DoRA needs unchanged base weights: use `default`, `gaussian` or `eva`"),
        ));
    }
    let corrects = values.text("tune.method") == "block" && values.text("tune.block.correction") == "lora";
    if corrects
        && (kind != "lora"
            || dora
            || !values.list("tune.lora.modules_to_save").is_empty()
            || !values.integers("tune.lora.trainable_token_indices").is_empty())
    {
        out.push((
            &[
                "tune.block.correction",
                "tune.lora.peft_type",
                "tune.lora.use_dora",
                "tune.lora.modules_to_save",
                "tune.lora.trainable_token_indices",
            ],
            Error::usage("`tune.block.correction = \"lora\"` supports only plain LoRA").hint(
                "remove `peft_type`, `use_dora`, `modules_to_save` and `trainable_token_indices` from `[tune.lora]`",
            ),
        ));
    }
    if init == "pissa" && values.number("tune.lora.lora_dropout") > 0.0 && kind == "lora" {
        out.push((
            &["tune.lora.lora_dropout", "tune.lora.init_lora_weights"],
            Error::usage(
                "`tune.lora.lora_dropout` and `tune.lora.init_lora_weights = \"pissa\"` contradict each other",
            )
            .hint("PiSSA trains the principal components of the weights: set `tune.lora.lora_dropout = 0.0`"),
        ));
    }
    if values.flag("tune.lora.save_residual") && values.integer("tune.lora.save_rank").is_some_and(|r| r > 0) {
        out.push((
            &["tune.lora.save_residual", "tune.lora.save_rank"],
            Error::usage("`tune.lora.save_residual` and `tune.lora.save_rank` contradict each other")
                .hint("the residual form does not change the rank: remove one of the keys"),
        ));
    }
    out
}

/// Returns the reason if a key of the table has no effect with the others.
pub fn unused(values: &Values, path: &str) -> Option<String> {
    let kind = values.text("tune.lora.peft_type");
    let init = values.text("tune.lora.init_lora_weights");
    let with_kind = || Some(format!("tune.lora.peft_type = \"{kind}\""));
    let with_init = || Some(format!("tune.lora.init_lora_weights = \"{init}\""));
    let residual = ["pissa", "olora", "corda", "lora_ga"].contains(&init);
    let name = path.strip_prefix("tune.lora.")?;
    let of_kind: &[&str] = match name {
        "r" => &["lora", "adalora", "vera", "loha", "lokr"],
        "lora_alpha" => &["lora", "adalora", "loha", "lokr"],
        "lora_dropout" => &["lora", "adalora", "vera"],
        "rank_pattern" | "alpha_pattern" => &["lora", "loha", "lokr"],
        "init_lora_weights" | "use_rslora" | "use_dora" | "loraplus_lr_ratio" | "save_residual" | "save_rank" => {
            &["lora"]
        }
        _ if name.starts_with("corda.")
            || name == "eva.rho"
            || ["pissa_niter", "loftq_iter", "init_samples"].contains(&name) =>
        {
            &["lora"]
        }
        _ => return None,
    };
    if !of_kind.contains(&kind) {
        return with_kind();
    }
    match name {
        "save_residual" | "save_rank" if !residual => with_init(),
        "corda.data" | "corda.samples" | "corda.compatible" | "corda.adaptive_rank" | "corda.method"
            if init != "corda" =>
        {
            with_init()
        }
        "pissa_niter" if init != "pissa" => with_init(),
        "eva.rho" if init != "eva" => with_init(),
        "loftq_iter" if init != "loftq" => with_init(),
        "init_samples" if init != "eva" && init != "lora_ga" => with_init(),
        _ => None,
    }
}

/// Builds the typed table. `values` has passed every check.
pub fn build(values: &Values) -> LoraConfig {
    let size = |path: &str| values.size(path).unwrap_or(0);
    let text = |path: &str| Some(values.text(path).to_string()).filter(|t| !t.is_empty());
    let list = |path: &str| values.list(path);
    let names = |path: &str| {
        Some(list(path))
            .filter(|l| l.iter().all(|t| t != "all-linear"))
            .unwrap_or_default()
    };
    LoraConfig {
        peft_type: values.name("tune.lora.peft_type"),
        r: size("tune.lora.r"),
        lora_alpha: values.number("tune.lora.lora_alpha"),
        lora_dropout: values.number("tune.lora.lora_dropout"),
        target_modules: names("tune.lora.target_modules"),
        exclude_modules: list("tune.lora.exclude_modules"),
        layers_to_transform: values.integers("tune.lora.layers_to_transform"),
        rank_pattern: list("tune.lora.rank_pattern")
            .iter()
            .filter_map(|t| entry(t, rank))
            .collect(),
        alpha_pattern: list("tune.lora.alpha_pattern")
            .iter()
            .filter_map(|t| entry(t, alpha))
            .collect(),
        modules_to_save: list("tune.lora.modules_to_save"),
        trainable_token_indices: values.integers("tune.lora.trainable_token_indices"),
        init_lora_weights: values.name("tune.lora.init_lora_weights"),
        init_samples: size("tune.lora.init_samples"),
        pissa_niter: size("tune.lora.pissa_niter"),
        loftq_iter: size("tune.lora.loftq_iter").max(1),
        use_rslora: values.flag("tune.lora.use_rslora"),
        use_dora: values.flag("tune.lora.use_dora"),
        loraplus_lr_ratio: values.number("tune.lora.loraplus_lr_ratio"),
        feedforward_modules: list("tune.lora.feedforward_modules"),
        oft_block_size: size("tune.lora.oft_block_size"),
        use_cayley_neumann: values.flag("tune.lora.use_cayley_neumann"),
        decompose_factor: values.integer("tune.lora.decompose_factor").unwrap_or(-1),
        decompose_both: values.flag("tune.lora.decompose_both"),
        d_initial: values.number("tune.lora.d_initial"),
        save_residual: values.flag("tune.lora.save_residual"),
        save_rank: size("tune.lora.save_rank"),
        adapter: text("tune.lora.adapter"),
        corda: CordaConfig {
            method: values.name("tune.lora.corda.method"),
            data: list("tune.lora.corda.data"),
            samples: size("tune.lora.corda.samples"),
            compatible: values.name("tune.lora.corda.compatible"),
            adaptive_rank: values.flag("tune.lora.corda.adaptive_rank"),
        },
        eva: EvaConfig {
            rho: values.number("tune.lora.eva.rho"),
        },
        adalora: AdaloraConfig {
            target_r: size("tune.lora.adalora.target_r"),
            tinit: size("tune.lora.adalora.tinit"),
            tfinal: size("tune.lora.adalora.tfinal"),
            delta_t: size("tune.lora.adalora.deltaT").max(1),
            beta1: values.number("tune.lora.adalora.beta1"),
            beta2: values.number("tune.lora.adalora.beta2"),
            orth_reg_weight: values.number("tune.lora.adalora.orth_reg_weight"),
        },
    }
}
