//! What the tests of the rewards need: a recipe, prompts, a small reward model.

use crate::data::RowPosition;
use crate::data::prompts::{Prompt, PromptContent};
use crate::formats::writer::{self, TensorPlan, Values};
use crate::formats::{StoredDtype, Weights};
use crate::recipe::{self, RlSection};
use serde_json::{Map, Value};
use std::fs;
use std::path::Path;

/// The settings of a recipe with these rewards.
pub(super) fn section(rewards: &[String]) -> RlSection {
    let text = format!(
        "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n[train]\nstage = \"grpo\"\n[rlhf]\nrewards = {rewards:?}\n"
    );
    recipe::parse(&text, "r.toml", &[]).unwrap().recipe.rl
}

/// A prompt of ten tokens at this line of `t.jsonl`; `null`: without a known answer.
pub(super) fn prompt(line: u64, answer: Value) -> Prompt {
    Prompt {
        ids: vec![5; 10],
        said: PromptContent::Text("how many?".into()),
        shown: "how many?".into(),
        answer: Some(answer).filter(|a| !a.is_null()),
        columns: Map::new(),
        place: RowPosition {
            file: "t.jsonl".into(),
            number: line,
            is_line: true,
        },
    }
}

/// A reward model: the weights of a small model, with a score head. `change` gets each tensor with its name.
pub(super) fn reward_model(dir: &Path, change: &dyn Fn(&str, &mut [f32])) {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens");
    fs::create_dir_all(dir).unwrap();
    for from in [
        "training/models/llama/config.json",
        "tokenizers/chat/tokenizer.json",
        "tokenizers/chat/tokenizer_config.json",
    ] {
        let from = goldens.join(from);
        fs::copy(&from, dir.join(from.file_name().unwrap())).unwrap();
    }
    let weights = Weights::open(&goldens.join("training/models/llama")).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = weights
        .names()
        .map(|name| {
            let shape = weights.info(name).unwrap().shape.clone();
            (name.to_string(), shape, weights.read_f32(name).unwrap())
        })
        .collect();
    tensors.push(("score.weight".into(), vec![1, 32], vec![0.5; 32]));
    for (name, _, values) in &mut tensors {
        change(name, values);
    }
    let plans: Vec<TensorPlan> = tensors
        .iter()
        .map(|(name, shape, _)| TensorPlan {
            name: name.clone(),
            dtype: StoredDtype::F32,
            shape: shape.clone(),
        })
        .collect();
    let mut values = tensors.iter().map(|(_, _, values)| values);
    writer::write_file(&dir.join("model.safetensors"), &plans, &[], |_, sink| {
        sink(Values::F32(values.next().unwrap()))
    })
    .unwrap();
}
