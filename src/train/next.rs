//! Commands to suggest after a run.

use crate::base::paths::shell_word as word;
use crate::recipe::{Method, Recipe, Stage};
use std::path::Path;

/// Returns the commands for `final_dir`, the result of this recipe.
pub fn after_training(recipe: &Recipe, final_dir: &Path) -> Vec<String> {
    let dir = word(&final_dir.display().to_string());
    let adapter = recipe.tune.method == Method::Lora;
    let result = if adapter {
        format!("--model {} --adapter {dir}", word(&recipe.model.path.to_string()))
    } else {
        format!("--model {dir}")
    };
    let stage = recipe.train.stage;
    let mut all = Vec::new();
    all.push(match stage {
        Stage::Pretrain => format!("ft generate {result} --prompt \"...\""),
        _ => format!("ft generate {result} --chat"),
    });
    if stage == Stage::Reward {
        all.clear();
    }
    // Prompts without answers cannot be evaluated; pairs only with a reward model.
    if !matches!(stage, Stage::Grpo | Stage::Ppo) && (!stage.is_preference() || stage == Stage::Reward) {
        let rows = recipe
            .data
            .eval
            .first()
            .map_or("test.jsonl".to_string(), |file| word(file));
        all.push(format!("ft eval {result} --data {rows}"));
    }
    if adapter {
        let merged = final_dir.with_file_name("merged");
        all.push(format!(
            "ft merge {result} --out {}",
            word(&merged.display().to_string())
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    #[test]
    fn the_commands_fit_the_run() {
        let next = |more: &str| {
            let text = format!("[model]\npath = \"base\"\n[data]\ntrain = \"t.jsonl\"\n{more}");
            let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
            after_training(&recipe, Path::new("my runs/x/final"))
        };
        let whole = next("eval = \"e.jsonl\"");
        assert_eq!(
            whole,
            [
                "ft generate --model 'my runs/x/final' --chat",
                "ft eval --model 'my runs/x/final' --data e.jsonl"
            ]
        );
        let lora = next("[tune]\nmethod = \"lora\"");
        assert_eq!(lora.len(), 3);
        assert_eq!(lora[0], "ft generate --model base --adapter 'my runs/x/final' --chat");
        assert_eq!(
            lora[2],
            "ft merge --model base --adapter 'my runs/x/final' --out 'my runs/x/merged'"
        );
        let reward = next("[train]\nstage = \"reward\"");
        assert!(reward.len() == 1 && reward[0].starts_with("ft eval"));
        assert_eq!(next("[train]\nstage = \"dpo\"").len(), 1);
        assert!(next("[train]\nstage = \"pretrain\"")[0].ends_with("--prompt \"...\""));
    }
}
