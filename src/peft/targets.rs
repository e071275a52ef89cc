//! Which linears an adapter is put on.

use crate::base::{Error, Result};

/// A linear that can carry an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct Site {
    /// `model.layers.0.self_attn.q_proj`
    pub module: String,
    pub input: usize,
    pub output: usize,
}

/// The sites that `targets` names, in model order, as PEFT matches a list: the whole module name or its
/// last parts. Empty is `all-linear`: every linear but the output layer.
///
/// Errors: a target that matches nothing (nearest names shown).
pub fn select(sites: &[Site], targets: &[String]) -> Result<Vec<Site>> {
    if targets.is_empty() {
        return Ok(sites.to_vec());
    }
    let matches = |site: &Site, t: &str| site.module == t || site.module.ends_with(&format!(".{t}"));
    for t in targets {
        if !sites.iter().any(|s| matches(s, t)) {
            return Err(no_match(sites, t));
        }
    }
    Ok(sites
        .iter()
        .filter(|s| targets.iter().any(|t| matches(s, t)))
        .cloned()
        .collect())
}

fn no_match(sites: &[Site], target: &str) -> Error {
    let mut names: Vec<&str> = sites.iter().filter_map(|s| s.module.rsplit('.').next()).collect();
    names.sort_unstable();
    names.dedup();
    names.sort_by(|a, b| {
        strsim::jaro_winkler(b, target)
            .partial_cmp(&strsim::jaro_winkler(a, target))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    Error::new(format!("target module `{target}` matches no linear of this model"))
        .at("tune.lora.target_modules")
        .hint(format!("linears of this model: {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn names_and_endings_match_like_peft() {
        assert_eq!(select(&sites(), &[]).unwrap().len(), 3);
        assert_eq!(select(&sites(), &["q_proj".into()]).unwrap().len(), 2);
        assert_eq!(select(&sites(), &["0.self_attn.q_proj".into()]).unwrap().len(), 1);
        let e = select(&sites(), &["q_prj".into()]).unwrap_err().to_string();
        assert!(e.contains("`q_prj`") && e.contains("q_proj, up_proj"), "{e}");
        assert!(select(&sites(), &["proj".into()]).is_err());
    }
}
