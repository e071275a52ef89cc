//! "Did you mean": the nearest known name, the right table, the names of other tools.

use super::table::{ALIASES, TABLES, keys};
use std::collections::BTreeSet;

/// The nearest of `names` to `typed`, if it is near enough to be meant.
pub fn nearest<'a>(typed: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |s: &str| s.to_lowercase().replace(['-', ' '], "_");
    let typed = plain(typed);
    let limit = (typed.chars().count() / 3).max(1);
    names
        .into_iter()
        .map(|name| {
            let plain = plain(name);
            let distance = if plain == typed {
                0
            } else {
                strsim::damerau_levenshtein(&plain, &typed)
            };
            (distance, name)
        })
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= limit)
        .map(|(_, name)| name)
}

/// What to write in place of the unknown key or table at `path`.
pub fn hint(path: &[String], is_table: bool) -> String {
    let (name, table) = match path.split_last() {
        Some((name, table)) => (name.as_str(), table.join(".")),
        None => return "write a key of `docs/recipe.md`".into(),
    };
    let tables: Vec<&str> = TABLES.iter().map(|(t, _)| *t).collect();
    if is_table {
        let dotted = path.join(".");
        let inside = tables.iter().find(|t| t.rsplit('.').next() == Some(name));
        let begins = tables.iter().find(|t| name.len() > 2 && t.starts_with(&dotted));
        return match inside.or(begins).copied().or(nearest(&dotted, tables.iter().copied())) {
            Some(meant) => format!("did you mean `[{meant}]`?"),
            None => format!("the tables are {}", tables.join(", ")),
        };
    }
    let here: Vec<&str> = keys().filter(|k| k.table == table).map(|k| k.name).collect();
    if let Some(near) = nearest(name, here.iter().copied()) {
        return format!("did you mean `{near}`?");
    }
    let homes: Vec<&str> = keys().filter(|k| k.name == name).map(|k| k.table).collect();
    if !homes.is_empty() {
        let homes: Vec<String> = homes.iter().map(|t| format!("[{t}]")).collect();
        return format!("this key belongs in {}", homes.join(" or in "));
    }
    if let Some((_, ours)) = ALIASES.iter().find(|(theirs, _)| *theirs == name.to_lowercase()) {
        return format!("did you mean `{ours}`?");
    }
    let all: BTreeSet<&str> = keys().map(|k| k.name).collect();
    if let Some(near) = nearest(name, all)
        && let Some(key) = keys().find(|k| k.name == near)
    {
        return format!("did you mean `{}`?", key.path());
    }
    if here.is_empty() {
        format!("the tables are {}", tables.join(", "))
    } else {
        format!("the keys of `[{table}]` are {}", here.join(", "))
    }
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
}
