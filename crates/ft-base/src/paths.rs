//! Suggestions for a path that does not exist.

use super::{Error, secrets};
use std::path::{Component, Path, PathBuf};

/// The usual folders of models and of runs.
const SHIPPED: &str = "assets";
const RUNS: &str = "runs";

/// True if this text is meant as a path. A name such as `org/name` may also be a hub id: it is a path if its first
/// folder exists here, or is one of the usual ones.
pub fn is_meant(text: &str) -> bool {
    let first = text.split('/').next().unwrap_or_default();
    let own = [SHIPPED, RUNS].contains(&first) && text.contains('/');
    text.starts_with(['.', '/', '~'])
        || text.ends_with('/')
        || text.contains('\\')
        || text.matches('/').count() > 1
        || own
        || (text.contains('/') && Path::new(first).is_dir())
}

/// The error for a path that does not exist; `kind` is the expected kind: `directory`, `file`.
pub fn missing(kind: &str, path: &Path) -> Error {
    let here = std::env::current_dir().ok().filter(|_| path.is_relative());
    // It may be a URL with a password.
    let shown = secrets::mask_known(&path.display().to_string());
    let error = match &here {
        Some(here) => Error::not_found(format!("no {kind} `{shown}` here")).at_path(here),
        None => Error::not_found(format!("no {kind} `{shown}`")),
    };
    match hint(path) {
        Some(hint) => error.hint(hint),
        // The first error of a recipe that names rows of the user.
        None if path.extension().is_some_and(|ending| ending == "jsonl") => {
            error.hint("write the rows there, one JSON object in each line (docs/data.md), or name another file")
        }
        None => error,
    }
}

/// A text as one word of a shell: with quotes if it needs them.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_string()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// A suggestion for a path that does not exist.
pub fn hint(path: &Path) -> Option<String> {
    if path.starts_with("~") {
        return Some("`~` is not expanded here: write the full path".into());
    }
    let text = path.to_string_lossy();
    let parts: Vec<&str> = text
        .split([',', ' '])
        .map(str::trim)
        .filter(|p| !p.is_empty())
        .collect();
    if parts.len() > 1 && parts.iter().all(|p| Path::new(p).exists()) {
        return Some(format!("write a list: `[\"{}\"]`", parts.join("\", \"")));
    }
    if let Some(near) = near(path) {
        return Some(format!("did you mean `{}`?", near.display()));
    }
    let first = path
        .components()
        .next()
        .map(|c| c.as_os_str().to_string_lossy().into_owned());
    match first.as_deref() {
        Some(SHIPPED) => Some("`assets` is a directory of the source repository of ft".into()),
        Some(RUNS) => Some("a training run creates it".into()),
        _ => None,
    }
}

/// The path with its first missing component replaced by an existing entry of a similar name.
fn near(path: &Path) -> Option<PathBuf> {
    let mut found = PathBuf::new();
    let mut parts = path.components();
    for part in parts.by_ref() {
        let next = found.join(part);
        if next.exists() || !matches!(part, Component::Normal(_)) {
            found = next;
            continue;
        }
        let folder = if found.as_os_str().is_empty() {
            Path::new(".")
        } else {
            &found
        };
        let rest = parts.as_path();
        let whole = |name: String| {
            let near = found.join(name);
            if rest.as_os_str().is_empty() {
                near
            } else {
                near.join(rest)
            }
        };
        return nearest(folder, &part.as_os_str().to_string_lossy(), |name| {
            whole(name.to_string()).exists()
        })
        .map(whole);
    }
    None
}

/// The entry of a folder whose name is most similar to `typed`; ties go to one for which `leads` is true.
fn nearest(folder: &Path, typed: &str, leads: impl Fn(&str) -> bool) -> Option<String> {
    let plain = |s: &str| s.to_lowercase().replace('_', "-");
    let wanted = plain(typed);
    // The ending is seldom the mistake.
    let stem = Path::new(&wanted)
        .file_stem()
        .map_or(0, |stem| stem.to_string_lossy().chars().count());
    let limit = (stem / 3).max(1);
    let names = std::fs::read_dir(folder).ok()?.flatten();
    let names = names.filter_map(|e| e.file_name().into_string().ok());
    let mut near: Vec<(usize, bool, String)> = names
        .filter(|name| !name.starts_with('.'))
        .map(|name| (strsim::damerau_levenshtein(&plain(&name), &wanted), !leads(&name), name))
        .filter(|(distance, ..)| *distance <= limit)
        .collect();
    near.sort();
    near.into_iter()
        .next()
        .filter(|(_, dead, _)| !dead)
        .map(|(.., name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_near_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        std::fs::create_dir_all(at("assets/tiny")).unwrap();
        std::fs::write(at("assets/tiny/train.jsonl"), "").unwrap();
        for (typed, meant) in [
            ("assets/tinny", "assets/tiny"),
            ("asets/tiny", "assets/tiny"),
            ("assets/tiny/trian.jsonl", "assets/tiny/train.jsonl"),
            ("Assets/tiny/", "assets/tiny"),
        ] {
            let error = missing("directory", &at(typed)).to_string();
            assert!(
                error.contains(&format!("did you mean `{}`?", at(meant).display())),
                "{error}"
            );
        }
        for typed in ["assets/other", "nothing/tiny", "assets/tiny/x/y"] {
            let error = missing("directory", &at(typed)).to_string();
            assert!(
                error.starts_with("no directory `") && !error.contains("did you mean"),
                "{error}"
            );
        }
        let error = missing("file", &at("data/train.jsonl")).to_string();
        assert!(error.contains("one JSON object in each line"), "{error}");
        // Two letters of two differ.
        std::fs::write(at("e1.toml"), "").unwrap();
        assert!(hint(&at("my.toml")).is_none());
        let two = format!("{},{}", at("assets").display(), at("assets/tiny").display());
        assert!(hint(Path::new(&two)).unwrap().contains("write a list: `[\""));
    }

    #[test]
    fn paths_are_told_from_ids() {
        for path in [
            "./a",
            "../a/b",
            "/a",
            "~/a",
            "a/",
            "a/b/c",
            "a\\b",
            "src/nothing",
            "assets/tiny",
            "runs/x",
        ] {
            assert!(is_meant(path), "{path}");
        }
        for id in ["Qwen/Qwen3-4B", "a/b", "name", "data", "assets"] {
            assert!(!is_meant(id), "{id}");
        }
    }
}
