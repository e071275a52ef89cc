//! The messages of `ft data`, `ft plan` and `ft train` about the columns of a file and the rendering of texts.

use crate::bench::{Bench, said};
use std::fs;

fn shown(bench: &Bench, command: &str, more: &[&str]) -> String {
    let arguments = [&[command, "--recipe", "r.toml", "data.train=q.csv"], more].concat();
    let out = bench.ft(&arguments);
    assert!(out.status.success(), "{}", said(&out));
    // The box of the header may wrap lines.
    let text = String::from_utf8_lossy(&out.stdout).to_string() + &said(&out);
    let words = text.split_whitespace().filter(|w| !["│", "|"].contains(w));
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn every_column_is_named() {
    let bench = Bench::new();
    fs::write(
        bench.path("q.csv"),
        "id,question,answer\n1,What is 2 + 2?,4\n2,What is 1 + 1?,2\n",
    )
    .unwrap();
    let line = "prompt-completion: prompt from question, completion from answer; not used: id; rendered with the chat template";
    let data = shown(&bench, "data", &[]);
    assert!(
        data.contains(&format!("format {line}")) && data.contains("<|im_start|>user What is 2 + 2?"),
        "{data}"
    );
    assert!(shown(&bench, "plan", &[]).contains(line));
    let train = shown(&bench, "train", &["train.max_steps=1", "train.output_dir=chat"]);
    assert!(train.contains(line) && !train.contains("no row is rendered"), "{train}");

    // The output states plain text, and warns that a chat would differ from the training.
    let more = ["data.render=plain", "train.max_steps=1", "train.output_dir=plain"];
    let train = shown(&bench, "train", &more);
    assert!(train.contains("plain text (data.render = \"plain\")"), "{train}");
    assert!(train.contains("no row is rendered with the chat template"), "{train}");
    assert!(
        train.contains("no space or line break between prompt and answer"),
        "{train}"
    );
    let data = shown(&bench, "data", &["data.render=plain"]);
    assert!(data.contains("What is 2 + 2?⟦4<|endoftext|>⟧"), "{data}");
}

#[test]
fn bad_rows_are_counted_and_rejected_answers_are_not_learned() {
    let bench = Bench::new();
    let good = r#"{"prompt": "a", "completion": "b", "label": true}"#;
    let rows = format!("{good}\n{{\"prompt\": \"cut \\ud83d\"}}\n{{\"prompt\": 1}}\nx\n");
    fs::write(bench.path("bad.jsonl"), rows).unwrap();
    let refused = |more: &[&str], words: &[&str]| {
        let arguments = [
            &[
                "train",
                "--recipe",
                "r.toml",
                "data.train=bad.jsonl",
                "train.output_dir=bad",
            ],
            more,
        ]
        .concat();
        let out = bench.ft(&arguments);
        assert_eq!(out.status.code(), Some(1), "{}", said(&out));
        for word in words {
            assert!(said(&out).contains(word), "no {word} in {}", said(&out));
        }
        assert!(!bench.path("bad").exists());
    };
    refused(&[], &["3 of 4 rows", "bad.jsonl:2", "bad.jsonl:3", "bad.jsonl:4"]);
    fs::write(
        bench.path("bad.jsonl"),
        format!("{good}\n{}\n", good.replace("true", "false")),
    )
    .unwrap();
    refused(&[], &["bad.jsonl:2", "marks this answer as bad", "kto"]);
    fs::write(
        bench.path("bad.jsonl"),
        "{\"question\": \"q\", \"chosen\": \"a\", \"rejected\": \"b\", \"system\": \"s\"}\n",
    )
    .unwrap();
    refused(&["train.stage=dpo", "data.render=plain"], &["cannot contain `system`"]);
}

/// Two sources with their own columns and weights.
fn weighted(bench: &Bench) {
    let rows = |name: &str, question: &str, answer: &str, n: usize| {
        let row = |i: usize| {
            format!("{{\"{question}\": \"Repeat {name} {i}\", \"{answer}\": {{\"all\": [\"{i} {name}\"]}}}}\n")
        };
        fs::write(
            bench.path(&format!("{name}.jsonl")),
            (0..n).map(row).collect::<String>(),
        )
        .unwrap();
    };
    rows("one", "ask", "reply", 30);
    rows("two", "body", "said", 12);
    bench.recipe("");
    let recipe = fs::read_to_string(bench.path("r.toml")).unwrap();
    let sources = "
[[data.sources]]
path = \"one.js*\"
columns = { prompt = \"ask\", completion = \"reply.all[0]\" }
weight = 1

[[data.sources]]
path = \"two.jsonl\"
columns = { prompt = \"body\", completion = \"said.all[-1]\" }
system_prompt = \"Be brief.\"
weight = 1
limit = 10
";
    let recipe = recipe
        .replace("train = \"rows.jsonl\"\n", "")
        .replace("[optimizer]", &format!("{sources}\n[optimizer]"));
    fs::write(bench.path("r.toml"), recipe).unwrap();
}

#[test]
fn weighted_sources_are_shown_and_resume_to_the_same_bits() {
    let bench = Bench::new();
    weighted(&bench);
    let out = bench.ft(&["data", "r.toml", "--json", "--rows", "31"]);
    assert!(out.status.success(), "{}", said(&out));
    let text = String::from_utf8(out.stdout).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        (rows.len(), rows[0]["file"].as_str(), rows[30]["line"].as_u64()),
        (31, Some("one.jsonl"), Some(1))
    );
    assert!(
        rows[30]["text"].as_str().unwrap().contains("Be brief.") && !text.lines().next().unwrap().contains("brief")
    );
    assert_eq!(
        rows[0]["ids"].as_array().unwrap().len(),
        rows[0]["mask"].as_array().unwrap().len()
    );
    let stats = bench.ft(&["data", "r.toml", "--stats", "--json"]);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).unwrap();
    let sources = stats["train"]["sources"].as_array().unwrap();
    let counts: Vec<_> = sources.iter().map(|s| s["rows"].as_u64().unwrap()).collect();
    assert_eq!((counts, sources[2]["source"].as_str()), (vec![30, 10, 40], Some("all")));
    let texts = stats["texts"].as_object().unwrap();
    assert!(texts.values().any(|role| role["texts"] == 40), "{texts:?}");
    let table = bench.ft(&["data", "r.toml", "--stats"]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(
        table.contains("two.jsonl") && table.contains("tokens per row"),
        "{table}"
    );

    let settings = [
        "data.packing=true",
        "tune.method=lora",
        "train.gradient_accumulation_steps=1",
        "train.save_steps=4",
        "schedule.name=constant",
    ];
    let run = |name: &str, steps: &str, more: &[&str]| {
        let (name, steps) = (format!("train.output_dir={name}"), format!("train.max_steps={steps}"));
        bench.train(&[&settings[..], &[&name, &steps], more].concat());
    };
    run("whole", "12", &[]);
    run("broken", "5", &[]);
    // The files may move: the rows are the same.
    fs::create_dir(bench.path("moved")).unwrap();
    fs::rename(bench.path("one.jsonl"), bench.path("moved/one.jsonl")).unwrap();
    let recipe = fs::read_to_string(bench.path("r.toml")).unwrap();
    fs::write(bench.path("r.toml"), recipe.replace("one.js*", "moved/one.jsonl")).unwrap();
    run("broken", "12", &["--resume"]);
    let losses = |run: &str| {
        bench
            .steps(run)
            .iter()
            .map(|s| s["loss"].to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(losses("whole"), losses("broken"));
    let resolved = fs::read_to_string(bench.path("whole/resolved.toml")).unwrap();
    assert!(
        resolved.contains("# prompt-completion: prompt from ask, completion from reply.all[0]"),
        "{resolved}"
    );
    assert!(resolved.contains("weight = 1.0"), "{resolved}");

    // One argument in place of the sources.
    let out = bench.ft(&[
        "data",
        "r.toml",
        "data.train=two.jsonl",
        "data.columns={prompt=\"body\", completion=\"said\"}",
    ]);
    let said = said(&out);
    assert!(
        !out.status.success() && said.contains("`said.all` names a field inside it"),
        "{said}"
    );
    let out = bench.ft(&["data", "r.toml", "data.train=two.jsonl", "data.columns.prompt=boody"]);
    let said = crate::bench::said(&out);
    assert!(
        said.contains("`data.columns`") && said.contains("columns body, said"),
        "{said}"
    );
}
