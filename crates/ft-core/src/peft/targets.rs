//! Selects the linears that get an adapter (`target_modules`: names, ends of names, or one regular expression for the
//! whole path), and finds the entry of `rank_pattern` or `alpha_pattern` for a linear. Both match as in PEFT.

use crate::base::{Error, Result};
use crate::formats::adapter::Targets;
use fancy_regex::Regex;

/// A linear that can have an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct Site {
    /// `model.layers.0.self_attn.q_proj`
    pub module: String,
    /// I: input features.
    pub input: usize,
    /// O: output features.
    pub output: usize,
}

/// Selection of sites.
#[derive(Debug, Clone, Copy)]
pub struct TargetSelection<'a> {
    /// The linears with an adapter.
    pub targets: &'a Targets,
    /// The linears without one.
    pub exclude: Option<&'a Targets>,
    /// Only these layers; applies to ends of names only, as in PEFT: a whole path in the list is taken in any layer.
    pub layers: Option<&'a [usize]>,
}

/// Limit of backtracking steps: a malicious regular expression ends in an error.
const BACKTRACKS: usize = 100_000;

fn compile(pattern: &str) -> Result<Regex> {
    #[cfg(test)]
    tests::COMPILED.with(|n| n.set(n.get() + 1));
    fancy_regex::RegexBuilder::new(pattern)
        .backtrack_limit(BACKTRACKS)
        .build()
        .map_err(|e| {
            Error::argument("a pattern of module names is not a regular expression")
                .found(pattern)
                .cause(e)
        })
}

fn is_match(regex: &Regex, text: &str) -> Result<bool> {
    regex.is_match(text).map_err(|e| {
        Error::argument("a pattern of module names cannot be matched")
            .found(regex.as_str())
            .cause(e)
    })
}

/// True if `name` is the whole module name or its last components.
pub fn ends(module: &str, name: &str) -> bool {
    module == name || module.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
}

/// True if `name` in `modules_to_save` names this module. PEFT compares the end of the text there, not whole components:
/// `norm` names `model.norm`, and `q_norm` and `input_layernorm` of every layer too.
pub(crate) fn saves(module: &str, name: &str) -> bool {
    !name.is_empty() && module.ends_with(name)
}

/// True if IA3 scales the input of this module instead of its output. As in PEFT, names are compared with the end of its path,
/// a regular expression with the whole path.
///
/// # Errors
/// A pattern that is not a regular expression, or that cannot be matched in reasonable time.
pub(crate) fn scales_input(module: &str, feedforward: &Targets) -> Result<bool> {
    match feedforward {
        Targets::AllLinear => Ok(false),
        Targets::List(names) => Ok(names.iter().any(|name| saves(module, name))),
        Targets::Pattern(_) => Matcher::new(feedforward)?.matches(module),
    }
}

/// The layer index: `3` of `model.layers.3.mlp.up_proj`. A number at the end is not one (`model.altup_projections.0`), as in
/// PEFT.
pub fn layer_of(module: &str) -> Option<usize> {
    let above = module.rsplit_once('.').map_or("", |(above, _)| above);
    above.split('.').find_map(|part| part.parse().ok())
}

/// How a regular expression of modules selects layers, for an error that refuses a list of layers beside it.
pub fn layers_in_pattern(layers: &[usize]) -> String {
    let layers: Vec<String> = layers.iter().map(usize::to_string).collect();
    format!(
        r"write the layers into the regular expression: `.*\.layers\.(?:{})\..*_proj`",
        layers.join("|")
    )
}

/// True if `layers_pattern` names the list of the layers: PEFT looks for the number of a layer behind one of these names, which
/// begin a path or follow a point.
///
/// # Errors
/// A name is not a regular expression.
pub fn names_layers(patterns: &[String], sites: &[Site]) -> Result<bool> {
    for pattern in patterns {
        let regex = compile(&format!(r"^(?:(?:.*\.)?{pattern}\.[0-9]+\.)"))?;
        for site in sites {
            if is_match(&regex, &site.module)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Targets, compiled once.
enum Matcher<'a> {
    All,
    Names(&'a [String]),
    Whole(Regex),
}

impl<'a> Matcher<'a> {
    fn new(targets: &'a Targets) -> Result<Self> {
        Ok(match targets {
            Targets::AllLinear => Self::All,
            Targets::List(names) => Self::Names(names),
            Targets::Pattern(pattern) => Self::Whole(compile(&format!("^(?:{pattern})$"))?),
        })
    }

    fn matches(&self, module: &str) -> Result<bool> {
        match self {
            Self::All => Ok(true),
            Self::Names(names) => Ok(names.iter().any(|name| ends(module, name))),
            Self::Whole(regex) => is_match(regex, module),
        }
    }
}

/// Returns the sites that `choice` selects, in model order.
///
/// # Errors
/// A pattern that matches nothing (nearest names shown), a layer that does not exist, an empty selection.
pub fn select(sites: &[Site], choice: &TargetSelection) -> Result<Vec<Site>> {
    for (targets, field) in [
        (Some(choice.targets), "LoraConfig::target_modules"),
        (choice.exclude, "LoraConfig::exclude_modules"),
    ] {
        match targets {
            Some(Targets::List(names)) => {
                for name in names {
                    if !sites.iter().any(|s| ends(&s.module, name)) {
                        return Err(no_match(sites, name, field));
                    }
                }
            }
            Some(Targets::Pattern(pattern)) => {
                let whole = Matcher::Whole(compile(&format!("^(?:{pattern})$"))?);
                let mut any = false;
                for site in sites {
                    any |= whole.matches(&site.module)?;
                }
                if !any {
                    return Err(no_match(sites, pattern, field));
                }
            }
            _ => {}
        }
    }
    let there = sites
        .iter()
        .filter_map(|s| layer_of(&s.module))
        .max()
        .map_or(0, |l| l + 1);
    if let Some(layer) = choice.layers.into_iter().flatten().find(|&&l| l >= there) {
        return Err(Error::not_found(format!("the model has no layer {layer}"))
            .at("LoraConfig::layers_to_transform")
            .expected(format!("layers 0 to {}", there.saturating_sub(1))));
    }
    let chosen = matching(sites, choice)?;
    if chosen.is_empty() {
        return Err(Error::argument("no linear layer is left for an adapter")
            .at("LoraConfig::target_modules")
            .hint("`exclude_modules` or `layers_to_transform` excludes every target"));
    }
    Ok(chosen)
}

/// As `select`, without errors for patterns that match nothing.
///
/// # Errors
/// A pattern that is not a regular expression, or that cannot be matched in reasonable time.
pub fn matching(sites: &[Site], choice: &TargetSelection) -> Result<Vec<Site>> {
    let targets = Matcher::new(choice.targets)?;
    let exclude = choice.exclude.map(Matcher::new).transpose()?;
    let by_layer = choice.layers.filter(|_| !matches!(targets, Matcher::Whole(_)));
    let mut chosen = Vec::new();
    for site in sites {
        let module = &site.module;
        let whole_path = matches!(targets, Matcher::Names(names) if names.contains(module));
        let in_layers = whole_path || by_layer.is_none_or(|l| layer_of(module).is_some_and(|at| l.contains(&at)));
        let out = match &exclude {
            Some(e) => e.matches(module)?,
            None => false,
        };
        if in_layers && !out && targets.matches(module)? {
            chosen.push(site.clone());
        }
    }
    Ok(chosen)
}

/// The `rank_pattern` or `alpha_pattern` value of each of these modules: of the first key that matches the end of its path.
///
/// Each pattern is compiled once, and only one is in memory at a time: a config may have many, and one can take megabytes.
///
/// # Errors
/// A pattern that decides about a module is not a regular expression, or cannot be matched in reasonable time.
pub fn of_patterns<'a, T>(patterns: &'a [(String, T)], modules: &[String]) -> Result<Vec<Option<&'a T>>> {
    let mut values = vec![None; modules.len()];
    for (pattern, value) in patterns {
        // As for one module: a pattern behind the one that matches has no effect, also if it is not valid.
        if values.iter().all(Option::is_some) {
            break;
        }
        let key = PatternKey::new(pattern)?;
        for (module, found) in modules.iter().zip(&mut values) {
            if found.is_none() && key.matches(module)? {
                *found = Some(value);
            }
        }
    }
    Ok(values)
}

/// A key of `rank_pattern` or `alpha_pattern`. Allocated ranks have a key for every linear, which are plain paths: no
/// regular expression is compiled for them.
enum PatternKey {
    /// NUL characters stand for any character.
    Plain(String),
    Regex(Regex),
}

impl PatternKey {
    fn new(pattern: &str) -> Result<Self> {
        // `\.` is a literal dot, `.` is any character.
        let plain = pattern.replace('.', "\0").replace("\\\0", ".");
        if plain.is_ascii() && !is_regex(&plain.replace('\0', ".")) {
            Ok(Self::Plain(plain))
        } else {
            Ok(Self::Regex(compile(&format!("^(?:.*\\.)?(?:{pattern})$"))?))
        }
    }

    fn matches(&self, module: &str) -> Result<bool> {
        match self {
            Self::Plain(pattern) => {
                let Some(start) = module.len().checked_sub(pattern.len()) else {
                    return Ok(false);
                };
                let (before, end) = module.as_bytes().split_at(start);
                let same = |(p, m): (u8, &u8)| p == 0 || p == *m;
                Ok(before.last().is_none_or(|b| *b == b'.') && pattern.bytes().zip(end).all(same))
            }
            Self::Regex(regex) => is_match(regex, module),
        }
    }
}

/// Checks that each pattern has an effect.
///
/// # Errors
/// A key of `patterns` that matches none of `sites` (nearest names shown).
pub fn check_pattern<T>(patterns: &[(String, T)], sites: &[Site], field: &str) -> Result<()> {
    for (pattern, _) in patterns {
        let ending = PatternKey::new(pattern)?;
        let mut any = false;
        for site in sites {
            any |= ending.matches(&site.module)?;
        }
        if !any {
            return Err(no_match(sites, pattern, field));
        }
    }
    Ok(())
}

/// True if the text contains regular expression syntax.
pub fn is_regex(text: &str) -> bool {
    !text.chars().all(|c| c.is_alphanumeric() || "._-".contains(c))
}

fn no_match(sites: &[Site], target: &str, field: &str) -> Error {
    let mut names: Vec<&str> = sites.iter().filter_map(|s| s.module.rsplit('.').next()).collect();
    names.sort_unstable();
    names.dedup();
    names.sort_by(|a, b| {
        strsim::jaro_winkler(b, target)
            .partial_cmp(&strsim::jaro_winkler(a, target))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    Error::not_found(format!(
        "target module `{target}` matches no linear layer of this model"
    ))
    .at(field)
    .hint(format!("linear layers of this model: {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// Number of regular expressions that this thread compiled.
        pub(super) static COMPILED: Cell<usize> = const { Cell::new(0) };
    }

    fn sites() -> Vec<Site> {
        [
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.mlp.up_proj",
            "model.layers.1.self_attn.q_proj",
        ]
        .map(|m| Site {
            module: m.to_string(),
            input: 4,
            output: 4,
        })
        .to_vec()
    }

    fn count(targets: Targets, exclude: Option<Targets>, layers: Option<&[usize]>) -> Result<usize> {
        let choice = TargetSelection {
            targets: &targets,
            exclude: exclude.as_ref(),
            layers,
        };
        Ok(select(&sites(), &choice)?.len())
    }

    fn list(names: &[&str]) -> Targets {
        Targets::List(names.iter().map(|n| n.to_string()).collect())
    }

    #[test]
    fn modules_to_save_match_by_the_end_of_the_text() {
        for module in [
            "norm",
            "model.norm",
            "model.layers.0.self_attn.q_norm",
            "model.layers.1.input_layernorm",
        ] {
            assert!(saves(module, "norm"), "{module}");
            assert_eq!(
                ends(module, "norm"),
                module.rsplit('.').next() == Some("norm"),
                "{module}"
            );
        }
        for (module, name) in [("model.norms", "norm"), ("model.norm", ""), ("norm", "model.norm")] {
            assert!(!saves(module, name), "{module} {name}");
        }
    }

    #[test]
    fn names_and_endings_match_like_peft() {
        assert_eq!(count(Targets::AllLinear, None, None).unwrap(), 3);
        assert_eq!(count(list(&["q_proj"]), None, None).unwrap(), 2);
        assert_eq!(count(list(&["0.self_attn.q_proj"]), None, None).unwrap(), 1);
        let e = count(list(&["q_prj"]), None, None).unwrap_err().to_string();
        assert!(e.contains("`q_prj`") && e.contains("q_proj, up_proj"), "{e}");
        assert!(count(list(&["proj"]), None, None).is_err());
        assert_eq!(count(list(&["q_proj"]), None, Some(&[1])).unwrap(), 1);
        assert_eq!(count(Targets::AllLinear, Some(list(&["q_proj"])), None).unwrap(), 1);
        for (exclude, layers, part) in [
            (Some(list(&["down_proj"])), None, "exclude_modules"),
            (Some(list(&["q_proj", "up_proj"])), None, "no linear layer is left"),
            (None, Some(&[2usize][..]), "no layer 2"),
        ] {
            let e = count(Targets::AllLinear, exclude, layers).unwrap_err().to_string();
            assert!(e.contains(part), "{e}");
        }
    }

    #[test]
    fn a_list_of_layers_has_the_names_that_peft_finds() {
        let names = |patterns: &[&str]| {
            let patterns: Vec<String> = patterns.iter().map(|p| p.to_string()).collect();
            names_layers(&patterns, &sites()).unwrap()
        };
        assert!(names(&["layers"]) && names(&["h", "layers"]) && names(&["(?:h|layers)"]));
        // With the modules above the list too.
        assert!(names(&["model.layers"]) && names(&[r"model\.layers"]));
        assert!(!names(&["h"]) && !names(&["layer"]) && !names(&["odel.layers"]) && !names(&["model"]));
        assert!(names_layers(&["(".to_string()], &sites()).is_err());
    }

    #[test]
    fn a_whole_path_is_taken_in_any_layer_like_in_peft() {
        let path = "model.layers.0.self_attn.q_proj";
        assert_eq!(count(list(&[path]), None, Some(&[1])).unwrap(), 1);
        assert_eq!(count(list(&[path, "up_proj"]), None, Some(&[1])).unwrap(), 1);
        assert_eq!(count(list(&[path, "q_proj"]), None, Some(&[1])).unwrap(), 2);
        // The end of a path is in the layers only.
        assert!(count(list(&["layers.0.self_attn.q_proj"]), None, Some(&[1])).is_err());
        assert!(count(list(&[path]), Some(list(&["q_proj"])), Some(&[1])).is_err());
    }

    #[test]
    fn a_number_at_the_end_is_no_layer() {
        assert_eq!(layer_of("model.layers.12.altup.modality_router"), Some(12));
        assert_eq!(layer_of("model.altup_projections.0"), None);
    }

    #[test]
    fn regular_expressions_match_the_whole_path() {
        let pattern = |p: &str| Targets::Pattern(p.into());
        assert_eq!(count(pattern(r".*\.(q|k)_proj"), None, None).unwrap(), 2);
        assert_eq!(
            count(pattern(r".*layers\.[0-0]\..*(?<!up)_proj"), None, None).unwrap(),
            1
        );
        assert!(count(pattern("q_proj"), None, None).is_err());
        assert!(
            count(pattern("(q_proj"), None, None)
                .unwrap_err()
                .to_string()
                .contains("regular expression")
        );
        let hostile = pattern(r"(.*)*(.*)*(?=x)y");
        assert!(count(hostile, None, None).is_err());
    }

    #[test]
    fn the_first_pattern_that_matches_counts() {
        let patterns = vec![
            ("layers.0.self_attn.q_proj".to_string(), 1),
            (r"model\.layers\.1\.self_attn\.q_proj".to_string(), 4),
            (r"self_attn\.[qk]_proj".to_string(), 2),
            ("_proj".to_string(), 3),
        ];
        let of = |m: &str| of_patterns(&patterns, &[m.to_string()]).unwrap()[0].copied();
        assert_eq!(of("model.layers.0.self_attn.q_proj"), Some(1));
        assert_eq!(of("layers.0.self_attn.q_proj"), Some(1));
        assert_eq!(
            of("model.layers.00self_attn.q_proj"),
            Some(1),
            "a point is any character"
        );
        assert_eq!(
            of("model_layers.0.self_attn.q_proj"),
            Some(2),
            "the end of a path begins at a point"
        );
        assert_eq!(of("model.layers.1.self_attn.q_proj"), Some(4));
        assert_eq!(of("model.layers.11.self_attn.q_proj"), Some(2));
        assert_eq!(
            of("model.layers.1_self_attn.q_proj"),
            None,
            "a point that is written out"
        );
        assert_eq!(of("model.layers.0.mlp.up_proj"), None);
        let e = check_pattern(&patterns, &sites(), "rank_pattern")
            .unwrap_err()
            .to_string();
        assert!(e.contains("rank_pattern") && e.contains("`_proj`"), "{e}");
    }

    #[test]
    fn a_pattern_is_compiled_once_for_all_modules() {
        let modules: Vec<String> = (0..50).map(|i| format!("model.layers.{i}.mlp.up_proj")).collect();
        // A plain path needs no regular expression.
        let mut patterns = vec![("layers.7.mlp.up_proj".to_string(), 100)];
        patterns.extend((0..20).map(|i| (format!(r"layers\.[0-{i}]\.mlp\.(up|down)_proj"), i)));
        let compiled = || COMPILED.with(Cell::get);
        let before = compiled();
        let found = of_patterns(&patterns, &modules).unwrap();
        assert_eq!(compiled() - before, 20);
        for (i, value) in found.iter().enumerate() {
            let wanted = if i == 7 { Some(100) } else { Some(i).filter(|i| *i < 10) };
            assert_eq!(value.copied(), wanted, "layer {i}");
        }
        // The same as for each module alone.
        for (module, value) in modules.iter().zip(&found) {
            assert_eq!(of_patterns(&patterns, std::slice::from_ref(module)).unwrap(), [*value]);
        }
    }

    #[test]
    fn only_a_pattern_that_decides_about_a_module_must_be_valid() {
        let patterns = [("up_proj".to_string(), 1), ("(q_".to_string(), 2)];
        let of = |modules: &[&str]| {
            let modules: Vec<String> = modules.iter().map(|m| m.to_string()).collect();
            let values = of_patterns(&patterns, &modules)?;
            Ok::<_, Error>(values.into_iter().map(|v| v.copied()).collect::<Vec<Option<i32>>>())
        };
        assert_eq!(of(&["a.up_proj", "b.up_proj"]).unwrap(), [Some(1), Some(1)]);
        assert!(of(&[]).unwrap().is_empty());
        let e = of(&["a.up_proj", "b.q_proj"]).unwrap_err().to_string();
        assert!(e.contains("regular expression") && e.contains("(q_"), "{e}");
    }
}
