//! The recipes of `docs/cookbook.md`: each is planned, with the tiny model in the place of its own.

use super::{ft, text};
use std::path::Path;

/// Rows of each form that the page names.
fn rows(dir: &Path) {
    let data = dir.join("data");
    std::fs::create_dir(&data).unwrap();
    let write = |name: &str, line: &dyn Fn(usize) -> String, head: &str| {
        let lines: String = (0..40).map(|n| line(n) + "\n").collect();
        std::fs::write(data.join(name), format!("{head}{lines}")).unwrap();
    };
    let messages = |n| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is {n}?\"}}, {{\"role\": \"assistant\", \"content\": \
             \"It is {n}.\"}}]}}"
        )
    };
    write("train.jsonl", &messages, "");
    write("more.jsonl", &|n| messages(n + 100), "");
    write(
        "text.jsonl",
        &|n| format!("{{\"text\": \"The river {n} runs to the sea.\"}}"),
        "",
    );
    write(
        "labels.csv",
        &|n| format!("the lamp {n} is broken,lights"),
        "ticket,team\n",
    );
    let pair = |n| format!("{{\"prompt\": \"{n}?\", \"chosen\": \"{n}.\", \"rejected\": \"no {n}\"}}");
    write("pairs.jsonl", &pair, "");
    write(
        "prompts.jsonl",
        &|n| format!("{{\"prompt\": \"{n} + 0?\", \"answer\": \"{n}\"}}"),
        "",
    );
}

#[test]
fn every_recipe_of_the_cookbook_is_planned() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/cookbook.md")).unwrap();
    let recipes: Vec<&str> = page
        .split("```toml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect();
    assert_eq!(recipes.len(), 12);
    let dir = tempfile::tempdir().unwrap();
    rows(dir.path());
    let model = root.join("assets/tiny").display().to_string();
    let mut outputs = Vec::new();
    for (n, recipe) in recipes.iter().enumerate() {
        let name = format!("{n}.toml");
        std::fs::write(dir.path().join(&name), recipe).unwrap();
        let mut arguments = vec!["plan".to_string(), name, format!("model.path={model}")];
        if recipe.contains("[distill]") {
            arguments.push(format!("distill.teacher={model}"));
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let out = ft(dir.path(), &arguments);
        assert!(out.status.success(), "job {}\n{}", n + 1, text(&out.stderr));
        assert!(
            !text(&out.stderr).contains("no effect"),
            "job {}\n{}",
            n + 1,
            text(&out.stderr)
        );
        outputs.extend(
            recipe
                .lines()
                .filter(|l| l.starts_with("output_dir"))
                .map(str::to_string),
        );
    }
    outputs.sort();
    outputs.dedup();
    assert_eq!(outputs.len(), 12, "each job has a directory of its own");
}

/// The example of several sources in `docs/data.md`, with a file in the place of the dataset of the hub.
#[test]
fn the_sources_of_the_page_about_data_are_read() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/data.md")).unwrap();
    let part = page.split("## Several sources").nth(1).unwrap();
    let example = part.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let local = example.replace(
        "path = \"openai/gsm8k\"\nconfig = \"main\"",
        "path = \"data/train.jsonl\"",
    );
    assert_ne!(local, example);
    let dir = tempfile::tempdir().unwrap();
    rows(dir.path());
    for folder in ["notes", "more"] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        std::fs::write(dir.path().join(folder).join("a.md"), "The river runs to the sea.\n").unwrap();
    }
    let recipe = format!("[model]\npath = \"{}\"\n\n{local}", root.join("assets/tiny").display());
    std::fs::write(dir.path().join("sources.toml"), recipe).unwrap();
    let out = ft(dir.path(), &["data", "sources.toml", "--rows", "40"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("You are helpful."), "{}", text(&out.stdout));
}
