//! The results of a recipe with default settings, and the warnings of a run that learns little or nothing.

use crate::bench::{Bench, number, said};
use std::fs;
use std::process::Output;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const METHODS: [&str; 3] = ["block", "lora", "full"];

/// A recipe with two keys for the tiny model and `rows` rows of its data; the first 50 of them in `seen.jsonl`.
fn shortest(rows: usize) -> Bench {
    let bench = Bench::new();
    let all = fs::read_to_string(format!("{ROOT}/assets/world/train.jsonl")).unwrap();
    let first = |n: usize| all.lines().take(n).collect::<Vec<_>>().join("\n");
    fs::write(bench.path("rows.jsonl"), first(rows)).unwrap();
    fs::write(bench.path("seen.jsonl"), first(50)).unwrap();
    let recipe = format!("[model]\npath = \"{ROOT}/assets/tiny\"\n[data]\ntrain = \"rows.jsonl\"\n");
    fs::write(bench.path("r.toml"), recipe).unwrap();
    bench
}

/// (exact answers, loss) on rows of the training data, before and after.
fn answers(bench: &Bench, run: &str, more: &[&str]) -> [(f64, f64); 2] {
    let out = format!("train.output_dir={run}");
    let base = [
        "data.eval=seen.jsonl",
        "train.predict_with_generate=true",
        "train.save_steps=0",
    ];
    bench.train(&[&base[..], &[&out], more].concat());
    let lines = bench.lines(&format!("{run}/metrics.jsonl"));
    let evals = lines.iter().filter(|l| l.get("eval_accuracy").is_some());
    let evals: Vec<(f64, f64)> = evals
        .map(|l| (number(l, "eval_accuracy"), number(l, "eval_loss")))
        .collect();
    [evals[0], evals[evals.len() - 1]]
}

fn the_defaults_learn(rows: usize) {
    let bench = shortest(rows);
    for method in METHODS {
        let [before, after] = answers(&bench, method, &[&format!("tune.method={method}")]);
        println!("{rows} rows, {method}: {before:?} -> {after:?}");
        assert!(before.0 < 0.05 && after.0 > 0.85, "{method}: {before:?} -> {after:?}");
        let steps = bench.steps(method);
        assert!(steps.len() >= 70, "{method}: {} steps", steps.len());
        assert_eq!(number(&steps[steps.len() - 1], "epoch"), 3.0, "{method}");
    }
}

#[test]
fn two_keys_and_50_rows_learn() {
    the_defaults_learn(50);
}

#[test]
fn two_keys_and_200_rows_learn() {
    the_defaults_learn(200);
}

#[test]
fn two_keys_and_1000_rows_learn() {
    the_defaults_learn(1000);
}

/// TRL's defaults: 3 epochs in batches of 8 rows, 2e-5 (2e-4 with adapters), linear decay without a warmup.
#[test]
fn the_defaults_learn_what_trl_s_defaults_learn() {
    let bench = shortest(200);
    for (method, rate) in [("full", "2e-5"), ("lora", "2e-4")] {
        let method = format!("tune.method={method}");
        let rate = format!("optimizer.learning_rate={rate}");
        let trl = [
            &method,
            &rate,
            "schedule.name=linear",
            "schedule.warmup_steps=0",
            "data.packing=false",
            "train.batch_size=8",
            "train.gradient_accumulation_steps=1",
            "train.num_epochs=3",
        ];
        let [_, theirs] = answers(&bench, &format!("trl-{method}"), &trl);
        let [_, ours] = answers(&bench, &format!("ours-{method}"), &[&method]);
        println!("{method}: TRL's {theirs:?}, ours {ours:?}");
        assert!(
            ours.0 >= theirs.0 && ours.1 < theirs.1,
            "{method}: TRL's {theirs:?}, ours {ours:?}"
        );
    }
}

fn ft(bench: &Bench, more: &[&str]) -> Output {
    bench.ft(&[&["train", "--recipe", "r.toml", "train.output_dir=run"][..], more].concat())
}

#[test]
fn a_run_that_cannot_learn_is_refused_before_anything_is_written() {
    let bench = Bench::new();
    let refused: [&[&str]; 5] = [
        &["optimizer.learning_rate=0"],
        &["optimizer.learning_rate=1e-300"],
        &["train.max_steps=1", "schedule.warmup_steps=1"],
        &["train.max_steps=1", "schedule.warmup_ratio=1", "schedule.name=wsd"],
        &[
            "train.max_steps=1",
            "schedule.warmup_steps=5",
            "tune.method=lora",
            "--dry-run",
        ],
    ];
    for more in refused {
        let out = ft(&bench, more);
        assert_eq!(out.status.code(), Some(2), "{more:?}: {}", said(&out));
        assert!(said(&out).contains("hint:"), "{}", said(&out));
        assert!(!bench.path("run").exists(), "{more:?}");
    }
    // One step is enough if its learning rate is above 0; with zero steps the model is saved unchanged.
    let one = ft(&bench, &["train.max_steps=1"]);
    assert!(one.status.success(), "{}", said(&one));
    assert!(number(&bench.steps("run")[0], "learning_rate") > 0.0);
    let none = ft(
        &bench,
        &["train.max_steps=0", "optimizer.learning_rate=0", "--overwrite"],
    );
    assert!(none.status.success(), "{}", said(&none));
    assert!(bench.path("run/final/model.safetensors").is_file());
}

#[test]
fn a_run_that_learns_little_says_so() {
    let bench = Bench::new();
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap().lines().count();
    let warned = |more: &[&str], words: &str| {
        let out = ft(&bench, &[more, &["--overwrite", "train.save_steps=0"]].concat());
        assert!(out.status.success(), "{more:?}\n{}", said(&out));
        let said = said(&out);
        let found = said.lines().any(|l| l.starts_with("warning:") && l.contains(words));
        assert!(found, "{more:?}: no warning with `{words}`\n{said}");
        let events = bench.lines("run/events.jsonl");
        assert!(
            events
                .iter()
                .any(|e| e["message"].as_str().is_some_and(|m| m.contains(words)))
        );
        said
    };
    warned(
        &["train.gradient_accumulation_steps=64", "train.num_epochs=1"],
        "only 1 step,",
    );
    let large = format!("train.gradient_accumulation_steps={}", 5 * rows);
    let said = warned(
        &["train.batch_size=8", &large, "train.max_steps=2"],
        "one step uses rows more than once",
    );
    assert!(said.contains("each row is used 80 times"), "{said}");
    // One step with 40 times the data is 40 epochs.
    assert_eq!(number(&bench.steps("run")[0], "epoch"), 40.0);
    let said = warned(
        &["tune.method=block", "tune.block.switch_every=20", "train.max_steps=20"],
        "blocks will be trained",
    );
    assert!(said.contains("only 1 of "), "{said}");
    warned(&["schedule.warmup_steps=50", "train.max_steps=12"], "never reaches");
    let lora = ["tune.method=lora", "train.max_steps=2"];
    let wide = warned(
        &[&lora[..], &["tune.lora.rank_pattern=q_proj=100"]].concat(),
        "larger rank than their matrix",
    );
    assert!(wide.contains("rank 100,"), "{wide}");
    let out = ft(&bench, &[&lora[..], &["tune.lora.r=100000", "--overwrite"]].concat());
    assert_eq!(out.status.code(), Some(2), "{}", self::said(&out));
    assert!(
        self::said(&out).contains("the rank is larger than"),
        "{}",
        self::said(&out)
    );
    // A learning rate that is far too high.
    let high = [
        "tune.method=full",
        "train.max_steps=12",
        "optimizer.learning_rate=50",
        "train.max_grad_norm=0",
    ];
    warned(&high, "the loss diverges");
}

/// The warnings in the events of a run that contain these words.
fn warnings(bench: &Bench, words: &str) -> usize {
    let events = bench.lines("run/events.jsonl");
    let texts = events.iter().filter_map(|e| e["message"].as_str());
    texts.filter(|text| text.contains(words)).count()
}

/// A number of an evaluation is left out where it would not be what its name says.
#[test]
fn an_evaluation_has_a_perplexity_and_an_accuracy_only_where_there_are_any() {
    let bench = Bench::new();
    let evaluations = |more: &[&str]| {
        let base = [
            "--overwrite",
            "train.max_steps=2",
            "train.save_steps=0",
            "tune.method=full",
        ];
        let out = ft(&bench, &[&base[..], &["train.eval_steps=1"], more].concat());
        assert!(out.status.success(), "{more:?}\n{}", said(&out));
        let mut lines = bench.lines("run/metrics.jsonl");
        lines.retain(|line| line.get("eval_loss").is_some());
        assert!(lines.len() >= 2, "{more:?}: {lines:?}");
        lines
    };
    let texts = "{\"text\": \"The sun is up.\"}\n{\"text\": \"It rains in the north.\"}\n";
    fs::write(bench.path("texts.jsonl"), texts).unwrap();
    let of_texts = ["data.train=texts.jsonl", "data.eval=texts.jsonl"];
    let asked = "train.predict_with_generate=true";
    for line in evaluations(&[&of_texts[..], &[asked]].concat()) {
        assert!(line.get("eval_accuracy").is_none(), "{line}");
        let perplexity = number(&line, "eval_loss").exp();
        assert!(
            (number(&line, "eval_perplexity") / perplexity - 1.0).abs() < 1e-12,
            "{line}"
        );
    }
    assert_eq!(warnings(&bench, "`train.predict_with_generate` has no effect"), 1);
    // These rows have answers.
    for line in evaluations(&["data.eval=rows.jsonl", asked]) {
        assert!((0.0..=1.0).contains(&number(&line, "eval_accuracy")), "{line}");
    }
    assert_eq!(warnings(&bench, "predict_with_generate"), 0);
    let pairs = ["train.stage=dpo", "data.train=pairs.jsonl", "data.eval=pairs.jsonl"];
    let smooth = [&of_texts[..], &["train.label_smoothing_factor=0.1"]].concat();
    for more in [&pairs[..], &smooth[..]] {
        for line in evaluations(more) {
            assert!(line.get("eval_perplexity").is_none(), "{more:?}: {line}");
        }
    }
}

#[test]
fn a_run_warns_of_known_answers_that_numeric_may_read_otherwise() {
    let bench = Bench::new();
    let rows = "{\"prompt\": \"When?\", \"answer\": \"12:30\"}\n{\"prompt\": \"How many?\", \"answer\": 4}\n";
    fs::write(bench.path("sums.jsonl"), rows).unwrap();
    let out = ft(
        &bench,
        &[
            "train.stage=grpo",
            "tune.method=lora",
            "data.train=sums.jsonl",
            "rlhf.rewards=numeric",
            "rlhf.num_generations=2",
            "rlhf.max_completion_length=4",
            "train.batch_size=2",
            "train.gradient_accumulation_steps=1",
            "train.max_steps=1",
            "train.save_steps=0",
        ],
    );
    assert!(out.status.success(), "{}", said(&out));
    assert_eq!(warnings(&bench, "1 of 2 known answers have several numbers"), 1);
}

/// By default all blocks are active once, in a run of any length.
#[test]
fn every_block_has_a_turn_by_default() {
    let bench = Bench::new();
    for steps in ["6", "30", "70"] {
        let steps = format!("train.max_steps={steps}");
        let out = ft(
            &bench,
            &["tune.method=block", &steps, "--overwrite", "train.save_steps=0"],
        );
        assert!(out.status.success(), "{}", said(&out));
        let blocks: std::collections::BTreeSet<String> = bench
            .steps("run")
            .iter()
            .map(|s| s["active_block"].to_string())
            .collect();
        assert!(
            said(&out).contains(&format!("{0} of {0} blocks", blocks.len())),
            "{}",
            said(&out)
        );
        assert!(!said(&out).contains("blocks will be trained"), "{}", said(&out));
    }
}

/// Values chosen from the rows are saved, and a resumed run uses them.
#[test]
fn a_run_that_goes_on_keeps_what_was_decided() {
    let bench = Bench::new();
    let base = [
        "tune.method=full",
        "train.num_epochs=2",
        "train.save_steps=3",
        "data.packing=true",
    ];
    bench.train(&[&base[..], &["train.output_dir=whole"]].concat());
    let steps = bench.steps("whole").len();
    assert!(steps > 6, "{steps}");
    let text = fs::read_to_string(bench.path("whole/resolved.toml")).unwrap();
    for key in ["gradient_accumulation_steps", "packing_length"] {
        let line = text.lines().find(|l| l.starts_with(key)).unwrap();
        assert!(line.contains("# auto: about"), "{line}");
    }
    let plan = fs::read_to_string(bench.path("whole/plan.json")).unwrap();
    assert!(plan.contains("train.gradient_accumulation_steps"), "{plan}");

    // With another number of steps the choice would differ.
    bench.train(&[&base[..], &["train.output_dir=part", "train.max_steps=4"]].concat());
    let resumed = |run: &str| {
        let out = format!("train.output_dir={run}");
        bench.train(&[
            "tune.method=full",
            "train.max_steps=8",
            "data.packing=true",
            "--resume",
            &out,
        ]);
        let text = fs::read_to_string(bench.path(run).join("resolved.toml")).unwrap();
        let line = |key: &str| {
            text.lines()
                .find(|l| l.starts_with(key))
                .unwrap_or_default()
                .to_string()
        };
        assert_eq!(bench.steps(run).len(), 8);
        [line("gradient_accumulation_steps = "), line("packing_length = ")]
    };
    let of = |file: &str, key: &str| {
        let text = fs::read_to_string(bench.path(file)).unwrap();
        let line = text.lines().find(|l| l.starts_with(key)).unwrap().to_string();
        line.split("  #").next().unwrap().to_string()
    };
    let before = of("part/resolved.toml", "packing_length = ");
    let [_, after] = resumed("part");
    assert_eq!(after, format!("{before}  # auto: as in the first plan of the run"));

    // A run of an older version: a number for every key, and no length of packed sequences.
    let explicit = [
        "tune.method=full",
        "train.num_epochs=1",
        "train.gradient_accumulation_steps=8",
        "data.packing=true",
        "data.packing_length=512",
        "train.max_steps=4",
        "train.save_steps=2",
        "train.output_dir=old",
    ];
    bench.train(&explicit);
    let file = bench.path("old/resolved.toml");
    let text = fs::read_to_string(&file).unwrap();
    let older: Vec<&str> = text.lines().filter(|l| !l.starts_with("packing_length")).collect();
    fs::write(&file, older.join("\n")).unwrap();
    let [accumulation, length] = resumed("old");
    assert_eq!(
        accumulation,
        "gradient_accumulation_steps = 8  # auto: as in the first plan of the run"
    );
    assert_eq!(length, "packing_length = 512  # auto: as in the first plan of the run");
}

/// The printed loss is the mean since the last printed line; the file has the loss of each step.
#[test]
fn printed_losses_are_means() {
    let bench = Bench::new();
    let out = ft(
        &bench,
        &["tune.method=full", "train.max_steps=9", "train.logging_steps=4"],
    );
    assert!(out.status.success(), "{}", said(&out));
    let losses: Vec<f64> = bench.steps("run").iter().map(|s| number(s, "loss")).collect();
    let shown: Vec<String> = said(&out)
        .lines()
        .filter(|l| l.starts_with("step "))
        .map(|l| l.split_whitespace().nth(3).unwrap().to_string())
        .collect();
    let mean = |part: &[f64]| format!("{:.4}", part.iter().sum::<f64>() / part.len() as f64);
    assert_eq!(shown, [mean(&losses[..4]), mean(&losses[4..8]), mean(&losses[8..])]);
    assert!(
        said(&out).contains("next:\n  ft generate --model run/final --chat"),
        "{}",
        said(&out)
    );
}
