//! "Did you mean" hints: the nearest known name, the right table, the names of other tools.

use super::draft::WrittenValue;
use super::peers;
use super::table::{KeyPath, RecipeKey, TABLES, keys};
use super::types::{BlockKeys, Freeze, LoraKeys};
use super::value::ValueKind;
pub use crate::base::suggest::nearest;

/// The hint for the unknown key or table at `path`.
pub fn hint(path: &[String], is_table: bool) -> String {
    let (name, table) = match path.split_last() {
        Some((name, table)) => (name.as_str(), table.join(".")),
        None => return "`ft recipes schema` lists all keys (docs/recipe.md)".into(),
    };
    if is_table {
        return table_hint(name, &path.join("."));
    }
    let known = known_table(&table);
    let table = known.unwrap_or(&table);
    let here: Vec<&str> = keys().filter(|k| k.table == table).map(|k| k.name).collect();
    if known.is_some() && here.contains(&name) {
        return format!("did you mean `{table}.{name}`?");
    }
    let exact = peers::qualified(table, name).map(peers::shown);
    let own = || (!peers::is_shadowed(name)).then(|| elsewhere(table, name)).flatten();
    let theirs = || peers::anywhere(name).map(peers::shown);
    let near = || {
        let near = part_of(name, &here).or_else(|| nearest(name, here.iter().copied()))?;
        Some(format!("did you mean `{near}`?"))
    };
    let family = || peers::family(name).map(peers::shown);
    // A typo of one letter is more likely than a key of another table.
    let slip = || {
        let one = |key: &&&str| name.len() > 3 && strsim::damerau_levenshtein(key, name) == 1;
        here.iter().find(one).map(|near| format!("did you mean `{near}`?"))
    };
    let hint = exact
        .or_else(slip)
        .or_else(own)
        .or_else(theirs)
        .or_else(near)
        .or_else(family);
    if let Some(hint) = hint.or_else(|| near_anywhere(&path.join("."), name)) {
        return hint;
    }
    if here.is_empty() {
        format!("the tables are {}", names_of_tables())
    } else {
        format!("the keys of `[{table}]` are {}", here.join(", "))
    }
}

/// The hint for the value `typed`, which is not one of `names`.
pub fn value(path: &str, typed: &str, names: &[&str]) -> Option<String> {
    let start = typed.to_lowercase();
    if path == LoraKeys::init_lora_weights.0 && start.starts_with("pissa_niter") {
        return Some("write `pissa`, and set the number in `tune.lora.pissa_niter`".into());
    }
    match peers::value(path, typed) {
        Some(name) if names.contains(&name) => Some(format!("did you mean `{name}`?")),
        Some(sentence) => Some(sentence.to_string()),
        None => nearest(typed, names.iter().copied()).map(|near| format!("did you mean `{near}`?")),
    }
}

/// Keys whose items never contain a comma.
const NAMES: [KeyPath; 8] = [
    LoraKeys::target_modules,
    LoraKeys::exclude_modules,
    LoraKeys::modules_to_save,
    LoraKeys::rank_pattern,
    LoraKeys::alpha_pattern,
    Freeze::trainable,
    BlockKeys::always_active,
    BlockKeys::importance,
];

/// The hint for a single text that is not a valid list of names; `None` if it may be valid.
pub fn list_hint(path: &str, typed: &str) -> Option<String> {
    if let Some(answer) = peers::value(path, typed) {
        return Some(format!("did you mean `{answer}`?"));
    }
    let parts: Vec<&str> = typed
        .split([',', ' '])
        .map(str::trim)
        .filter(|p| !p.is_empty())
        .collect();
    let plain = |p: &&str| p.chars().all(|c| c.is_alphanumeric() || "_.-=".contains(c));
    let is_list = NAMES.iter().any(|key| key.0 == path) && parts.len() > 1 && parts.iter().all(plain);
    is_list.then(|| format!("write a list: `[\"{}\"]`", parts.join("\", \"")))
}

/// The hint for a value of the wrong type.
pub fn type_hint(key: &RecipeKey, typed: &WrittenValue) -> Option<String> {
    let text = match typed {
        WrittenValue::Text(t) => t.trim().to_lowercase(),
        WrittenValue::Flag(b) => b.to_string(),
        WrittenValue::Integer(i) => i.to_string(),
        _ => return None,
    };
    if ["none", "null", "nil", "~"].contains(&text.as_str()) {
        return Some("remove the key to get its default".into());
    }
    let is_text = matches!(typed, WrittenValue::Text(_));
    match key.kind {
        ValueKind::Flag => match text.as_str() {
            "true" | "false" if is_text => Some("write it without quotes".into()),
            "1" | "yes" | "on" | "y" => Some("write `true`".into()),
            "0" | "no" | "off" | "n" => Some("write `false`".into()),
            _ => None,
        },
        ValueKind::Name(names) => value(key.path.0, &text, names),
        ValueKind::Text | ValueKind::Texts => None,
        _ => (is_text && text.parse::<f64>().is_ok()).then(|| "write it without quotes".into()),
    }
}

fn names_of_tables() -> String {
    TABLES.iter().map(|(t, _)| *t).collect::<Vec<_>>().join(", ")
}

fn table_hint(name: &str, dotted: &str) -> String {
    let tables = || TABLES.iter().map(|(t, _)| *t);
    let inside = tables().find(|t| t.rsplit('.').next() == Some(name));
    let begins = || tables().find(|t| name.len() > 2 && t.starts_with(dotted));
    if let Some(meant) = inside.or_else(begins) {
        return format!("did you mean `[{meant}]`?");
    }
    if let Some(key) = keys().find(|k| k.name == name) {
        return format!("`{}` is a key, not a table", key.path.0);
    }
    match peers::of_table(name) {
        Some(hint) => hint,
        None => match nearest(dotted, tables()) {
            Some(meant) => format!("did you mean `[{meant}]`?"),
            None => format!("the tables are {}", names_of_tables()),
        },
    }
}

/// The table that `typed` stands for: `lora` is `tune.lora`. `None`: `typed` is a table, or no table matches.
fn known_table(typed: &str) -> Option<&'static str> {
    let is_table = |t: &&str| *t == typed;
    let mut tables = TABLES.iter().map(|(t, _)| *t);
    if typed.is_empty() || tables.clone().any(|t| is_table(&t)) {
        None
    } else {
        tables.find(|t| t.rsplit('.').next() == Some(typed))
    }
}

/// The tables that have a key with exactly this name; tables with the same root come first.
fn elsewhere(table: &str, name: &str) -> Option<String> {
    let mut homes: Vec<&str> = keys().filter(|k| k.name == name).map(|k| k.table).collect();
    let root = |t: &str| t.split('.').next().unwrap_or_default().to_string();
    if homes.iter().any(|t| root(t) == root(table)) {
        homes.retain(|t| root(t) == root(table));
    }
    let homes: Vec<String> = homes.iter().map(|t| format!("[{t}]")).collect();
    (!homes.is_empty()).then(|| format!("this key belongs in {}", homes.join(" or in ")))
}

/// The only key of a table that contains all words of `typed` and more: `alpha` is a part of `lora_alpha`.
fn part_of<'a>(typed: &str, here: &[&'a str]) -> Option<&'a str> {
    let words = |name: &str| -> Vec<String> {
        let name = name.to_lowercase().replace('-', "_");
        name.split('_').map(|w| w.trim_end_matches('s').to_string()).collect()
    };
    let wanted = words(typed);
    let long = wanted.iter().any(|w| w.len() > 2);
    let mut found = here.iter().filter(|key| {
        let has = words(key);
        long && wanted.iter().all(|w| has.contains(w))
    });
    match (found.next(), found.next()) {
        (Some(key), None) => Some(key),
        _ => None,
    }
}

/// A key of another table with nearly the same name or path. Short names are similar to too many others.
fn near_anywhere(dotted: &str, name: &str) -> Option<String> {
    let close = |typed: &str, known: &str| {
        let typed = typed.to_lowercase().replace('-', "_");
        let limit = typed.chars().count() / 4;
        let distance = strsim::damerau_levenshtein(&typed, known);
        (typed.chars().count() >= 6 && distance <= limit.min(3)).then_some(distance)
    };
    let by_path = keys().filter_map(|k| Some((close(dotted, k.path.0)?, k)));
    let by_name = keys().filter_map(|k| Some((close(name, k.name)?, k)));
    let key = by_path
        .min_by_key(|(d, _)| *d)
        .or_else(|| by_name.min_by_key(|(d, _)| *d));
    key.map(|(_, key)| format!("did you mean `{}`?", key.path.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint_of(path: &str) -> String {
        hint(&path.split('.').map(str::to_string).collect::<Vec<_>>(), false)
    }

    fn table_hint(name: &str) -> String {
        hint(&[name.to_string()], true)
    }

    #[test]
    fn hints_name_what_was_meant() {
        assert_eq!(hint_of("optimizer.learnin_rate"), "did you mean `learning_rate`?");
        assert_eq!(hint_of("model.max_steps"), "this key belongs in [train]");
        assert_eq!(hint_of("learning_rate"), "this key belongs in [optimizer]");
        assert_eq!(hint_of("optimizer.lr"), "did you mean `optimizer.learning_rate`?");
        assert_eq!(
            hint_of("train.per_device_train_batch_size"),
            "did you mean `train.batch_size`?"
        );
        assert_eq!(table_hint("lora"), "did you mean `[tune.lora]`?");
        assert_eq!(table_hint("optim"), "did you mean `[optimizer]`?");
        assert_eq!(table_hint("optimiser"), "did you mean `[optimizer]`?");
        assert!(table_hint("xyz").starts_with("the tables are model, memory"));
        assert_eq!(
            hint_of("train.target_module"),
            "did you mean `tune.lora.target_modules`?"
        );
        assert!(hint_of("memory.zzz").starts_with("the keys of `[memory]` are budget"));
    }

    /// Tests names of other tools and typos.
    #[test]
    fn hints_point_the_right_way() {
        for (typed, wanted) in [
            ("tune.lora.alpha", "`tune.lora.lora_alpha`"),
            ("tune.lora.targets", "`tune.lora.target_modules`"),
            ("tune.lora.dropout", "`tune.lora.lora_dropout`"),
            ("tune.lora.bias", "docs/adapters.md"),
            ("tune.type", "`tune.method`"),
            ("train.task", "`train.stage`"),
            ("train.method", "`tune.method`"),
            ("distill.teacher_model", "`distill.teacher`"),
            ("data.path", "`data.train`"),
            ("data.dataset", "`data.train`"),
            ("model.name", "`model.path`"),
            ("model_name_or_path", "`model.path`"),
            ("lora.r", "`tune.lora.r`"),
            ("lora.alpha", "`tune.lora.lora_alpha`"),
            ("lora.lora_alpha", "`tune.lora.lora_alpha`"),
            ("alpha", "`tune.lora.lora_alpha` (LoRA)"),
            ("modle.path", "[model]"),
            ("optimizer.decay", "`weight_decay`"),
            ("optimizer.type", "`optimizer.name`"),
            ("optimizer.beta1", "`optimizer.betas = [0.9, 0.999]`"),
            ("tune.lora.adalora.beta", "`beta1`"),
            ("schedule.type", "`schedule.name`"),
            ("schedule.warmup", "`schedule.warmup_steps`"),
            ("schedule.steps", "`schedule.warmup_steps`"),
            ("rlhf.grpo.temperature", "belongs in [rlhf]"),
            ("train.save_stepps", "`save_steps`"),
            ("train.learning_rat", "`optimizer.learning_rate`"),
            ("train.wandb_project", "metrics.jsonl"),
            ("wandb_something_new", "metrics.jsonl"),
            ("load_in_4bit", "memory.frozen_weights = \"nf4\""),
            ("memory.load_in_4bit", "memory.frozen_weights = \"nf4\""),
            ("gradient_checkpointing", "memory.activations"),
            ("train.use_tensorboard", "train.report_to = \"tensorboard\""),
            ("val_size", "`data.eval_fraction`"),
            ("save_strategy", "train.save_steps"),
            ("eval_strategy", "train.eval_steps"),
            ("reward_funcs", "`rlhf.rewards`"),
            ("push_to_hub", "ft push"),
            ("LoRA-Rank", "`tune.lora.r`"),
        ] {
            let hint = hint_of(typed);
            assert!(hint.contains(wanted), "{typed}: {hint}");
        }
        for (typed, wanted) in [
            ("datasets", "`[data]`"),
            ("training", "`[train]`"),
            ("lora_parameters", "`[tune.lora]`"),
            ("deepspeed", "mpirun"),
            ("bnb_config", "memory.frozen_weights"),
            ("grpo", "`[rlhf.grpo]`"),
            ("wandb", "metrics.jsonl"),
            ("batch_size", "`train.batch_size` is a key"),
        ] {
            let hint = table_hint(typed);
            assert!(hint.contains(wanted), "{typed}: {hint}");
        }
    }
}
