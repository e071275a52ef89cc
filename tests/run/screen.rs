//! Rows that are dropped before training, in runs of the program.

use crate::bench::{Bench, copy_all, number, said};
use ft::recipe;
use ft::setup::ModelDir;
use ft::setup::rows::{self, RecipeRows};
use serde_json::Value;
use std::fs;

/// The rows of the bench twice, and its first question in an evaluation file.
#[test]
fn dropped_rows_are_shown_counted_and_listed() {
    let bench = Bench::new();
    let row = |i: usize| {
        let question = format!("Which of the numbers from one to {i} is the largest one that anybody would ever say?");
        format!("{{\"prompt\": \"{question}\", \"completion\": \"It is {i}.\"}}\n")
    };
    let rows: String = [1, 2, 3, 1, 4].map(row).concat();
    fs::write(bench.path("rows.jsonl"), rows).unwrap();
    let question = "{\"q\": \"the numbers from one to 3 is the largest one that anybody would ever say\"}\n";
    fs::write(bench.path("test.jsonl"), question).unwrap();
    let settings = [
        "data.train=rows.jsonl",
        "data.dedup=exact",
        "data.decontaminate=test.jsonl",
    ];
    let data = bench.ft(&[&["data", "--recipe", "r.toml", "--stats", "--json"], &settings[..]].concat());
    assert!(data.status.success(), "{}", said(&data));
    let counts: Value = serde_json::from_slice(&data.stdout).unwrap();
    assert_eq!(counts["train"]["rows"], 3);
    let screened = &counts["screened"];
    assert_eq!(
        (
            &screened["rows"],
            &screened["exact_duplicates"],
            &screened["evaluation"]
        ),
        (&5.into(), &1.into(), &1.into())
    );
    let run = [
        &[
            "train",
            "--recipe",
            "r.toml",
            "train.max_steps=2",
            "train.output_dir=run",
        ],
        &settings[..],
    ]
    .concat();
    let out = bench.ft(&run);
    assert!(out.status.success(), "{}", said(&out));
    assert!(
        said(&out).contains("dropped 1 of 5 rows: exact duplicates"),
        "{}",
        said(&out)
    );
    let listed = fs::read_to_string(bench.path("run/dropped_rows.jsonl")).unwrap();
    let listed: Vec<Value> = listed.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(
        (&listed[0]["row"], &listed[0]["reason"], &listed[0]["other"]),
        (&"rows.jsonl:3".into(), &"evaluation".into(), &"test.jsonl:1".into())
    );
    assert_eq!(
        (&listed[1]["row"], &listed[1]["other"]),
        (&"rows.jsonl:4".into(), &"rows.jsonl:1".into())
    );
    // The run owns the file.
    let again = bench.ft(&[&run[..], &["--overwrite"]].concat());
    assert!(again.status.success(), "{}", said(&again));
    // Nothing is left.
    fs::write(bench.path("left.jsonl"), row(3)).unwrap();
    let e = bench.ft(&[
        "data",
        "--recipe",
        "r.toml",
        "data.train=left.jsonl",
        "data.decontaminate=test.jsonl",
    ]);
    assert!(
        !e.status.success() && said(&e).contains("no row is left to train"),
        "{}",
        said(&e)
    );
}

/// Rows that training dropped decide which rows it holds out, also if a flag of the evaluation reads rows in another
/// way.
#[test]
fn an_evaluation_by_the_recipe_reads_the_rows_that_the_run_held_out() {
    let bench = Bench::new();
    let row = |i: usize| {
        // A character is a token, so every fourth row is too long for the run.
        let answer = if i % 4 == 3 {
            "q7x0k9z2".repeat(40)
        } else {
            "x".repeat(i + 1)
        };
        format!("{{\"prompt\": \"Say {i}.\", \"completion\": \"{answer}\"}}\n").repeat(2)
    };
    fs::write(bench.path("rows.jsonl"), (0..12).map(row).collect::<String>()).unwrap();
    let settings = [
        "data.dedup=exact",
        "data.long=drop",
        "data.max_length=128",
        "data.eval_fraction=0.4",
        "tune.method=lora",
        "train.batch_size=1",
        "train.gradient_accumulation_steps=1",
        "train.max_steps=2",
        "train.eval_steps=2",
        "train.output_dir=run",
    ];
    bench.train(&settings);
    let lines = bench.lines("run/metrics.jsonl");
    let of_run = lines.iter().rfind(|line| line.get("eval_loss").is_some()).unwrap();
    let eval = |settings: &[&str], more: &[&str]| -> Value {
        let out = bench.ft(&[&["eval", "--recipe", "r.toml", "--json"][..], settings, more].concat());
        assert!(out.status.success(), "{more:?}\n{}", said(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    // 4 of the 9 rows that are left; 7 of the 18 short ones, or 5 of the 12 different ones, would be others.
    for more in [vec![], vec!["--max-length", "500"]] {
        let found = eval(&settings, &more);
        assert_eq!(
            (&found["rows"], &found["tokens"]),
            (&4.into(), &of_run["eval_tokens"]),
            "{more:?}: {found} {of_run}"
        );
        let (loss, expected) = (number(&found, "loss"), number(of_run, "eval_loss"));
        assert!(
            (loss - expected).abs() <= 1e-5 * expected,
            "{more:?}: {loss} {expected}"
        );
    }
}

/// As for rows; the length of answers in the evaluation does not change which prompts are left.
#[test]
fn an_evaluation_by_the_recipe_reads_the_prompts_that_the_run_held_out() {
    let bench = Bench::new();
    let prompt = |i: usize| {
        let long = if i < 4 { "q7x0k9z2".repeat(42) } else { String::new() };
        format!(
            "{{\"prompt\": \"Add {i} and {i}. {long}\", \"answer\": \"{}\"}}\n",
            2 * i
        )
        .repeat(2)
    };
    fs::write(bench.path("sums.jsonl"), (0..10).map(prompt).collect::<String>()).unwrap();
    let [model, data] = [("model.path", "model"), ("data.train", "sums.jsonl")]
        .map(|(key, name)| format!("{key}={}", bench.path(name).display()));
    let settings = [
        model.as_str(),
        data.as_str(),
        "data.dedup=exact",
        "data.long=drop",
        "data.max_length=400",
        "data.eval_fraction=0.5",
        "train.stage=grpo",
        "train.batch_size=2",
        "train.gradient_accumulation_steps=2",
        "rlhf.rewards=[\"exact\"]",
        "rlhf.num_generations=4",
        "rlhf.max_completion_length=8",
    ];
    let arguments = [
        "eval",
        "--recipe",
        "r.toml",
        "--model",
        "model",
        "--max-new-tokens",
        "100",
        "--json",
    ];
    let out = bench.ft(&[&arguments[..], &settings].concat());
    assert!(out.status.success(), "{}", said(&out));
    let found: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (&found["kind"], &found["rows"]),
        (&"prompts".into(), &5.into()),
        "{found}"
    );
    let settings = settings.map(str::to_string);
    let recipe = recipe::load(&bench.path("r.toml"), &settings).unwrap().recipe;
    let model = ModelDir::of_recipe(&recipe).unwrap();
    let read = RecipeRows::read(&recipe, &model).unwrap().questions.unwrap();
    let of_run: Vec<u64> = read.eval.iter().map(|prompt| prompt.place.number).collect();
    let places = rows::held_out_places(&recipe, &model).unwrap();
    let evaluated: Vec<u64> = places.iter().map(|place| place.number).collect();
    assert_eq!((of_run.len(), &evaluated), (5, &of_run));
}

/// The prompts of a run keep the room that the evaluation needs, whatever the longest answer of its stage is.
#[test]
fn held_out_prompts_need_room_for_the_answers_of_the_evaluation_only() {
    let bench = Bench::new();
    let rows = |long: Option<u64>| {
        let row = |i: u64| {
            let more = if long == Some(i) {
                "q7x0k9z2".repeat(20)
            } else {
                String::new()
            };
            format!(
                "{{\"prompt\": \"Add {i} and {i}. {more}\", \"answer\": \"{}\"}}\n",
                2 * i
            )
        };
        fs::write(bench.path("sums.jsonl"), (1..11).map(row).collect::<String>()).unwrap();
    };
    rows(None);
    let [model, data] = [("model.path", "model"), ("data.train", "sums.jsonl")]
        .map(|(key, name)| format!("{key}={}", bench.path(name).display()));
    let eval = |settings: &[&str]| {
        let fixed = [
            "eval", "--recipe", "r.toml", "--model", "model", "--json", &model, &data,
        ];
        bench.ft(&[&fixed[..], &["data.eval_fraction=0.5"], settings].concat())
    };
    let is_measured = |settings: &[&str]| {
        let out = eval(settings);
        assert!(out.status.success(), "{settings:?}\n{}", said(&out));
        let found: Value = serde_json::from_slice(&out.stdout).unwrap();
        let (kind, rows) = (&found["kind"], &found["rows"]);
        assert_eq!((kind, rows), (&"prompts".into(), &5.into()), "{settings:?}: {found}");
        assert!((0.0..=1.0).contains(&number(&found, "truncated")), "{found}");
    };
    let grpo = [
        "train.stage=grpo",
        "train.batch_size=2",
        "train.gradient_accumulation_steps=2",
        "rlhf.num_generations=4",
        "rlhf.rewards=[\"exact\"]",
        "rlhf.max_completion_length=200",
        "data.max_length=500",
    ];
    let short_answers = ["--max-new-tokens", "8"];
    // Rows of a supervised run; and a window as long as the longest answer of the run.
    is_measured(&["data.max_length=128", "--max-new-tokens", "8"]);
    is_measured(&[&grpo[..], &short_answers, &["--max-length", "200"]].concat());
    // A prompt that is too long for the evaluation is an error only if it is evaluated.
    let settings = [model.as_str(), data.as_str(), "data.eval_fraction=0.5"];
    let settings = settings.into_iter().chain(grpo);
    let settings: Vec<String> = settings.map(str::to_string).collect();
    let recipe = recipe::load(&bench.path("r.toml"), &settings).unwrap().recipe;
    let places = rows::held_out_places(&recipe, &ModelDir::of_recipe(&recipe).unwrap()).unwrap();
    let is_held_out = |line: &u64| places.iter().any(|place| place.number == *line);
    let short = [&grpo[..], &short_answers, &["--max-length", "120"]].concat();
    rows((1..11).find(|line| !is_held_out(line)));
    is_measured(&short);
    rows((1..11).find(is_held_out));
    let out = eval(&short);
    assert!(
        !out.status.success() && said(&out).contains("the prompt and its answer do not fit"),
        "{}",
        said(&out)
    );
    // Nothing is left.
    let out = eval(&[&grpo[..], &short_answers, &["data.long=drop", "--max-length", "12"]].concat());
    assert!(
        !out.status.success() && said(&out).contains("no held-out row is left"),
        "{}",
        said(&out)
    );
}

/// Another model may need other numbers of tokens for a row, but the run held out rows by its own.
#[test]
fn rows_that_the_run_held_out_do_not_depend_on_the_model_that_is_evaluated() {
    let bench = Bench::new();
    let row = |i: usize| {
        let answer = "q7x0k9z2".repeat(if i.is_multiple_of(2) { 1 } else { 7 });
        format!("{{\"prompt\": \"Say {i}.\", \"completion\": \"{answer}\"}}\n")
    };
    fs::write(bench.path("rows.jsonl"), (0..12).map(row).collect::<String>()).unwrap();
    copy_all(&bench.path("model"), &bench.path("other"));
    let template = fs::read_to_string(bench.path("other/chat_template.jinja")).unwrap();
    let template = format!("{}{template}", "q7x0k9z2".repeat(6));
    fs::write(bench.path("other/chat_template.jinja"), template).unwrap();
    let eval = |model: &str, run: &str| {
        let run = format!("model.path={}", bench.path(run).display());
        let out = bench.ft(&[
            "eval",
            "--recipe",
            "r.toml",
            "--json",
            "--max-length",
            "500",
            "--model",
            model,
            &run,
            "data.long=drop",
            "data.max_length=110",
            "data.eval_fraction=0.4",
        ]);
        assert!(out.status.success(), "{}", said(&out));
        let found: Value = serde_json::from_slice(&out.stdout).unwrap();
        (found["rows"].clone(), said(&out))
    };
    // 5 of 12 rows; with the template of the other model 6 rows would be left, 2 of them held out.
    for (model, run, rows) in [("model", "model", 5), ("other", "model", 5), ("model", "other", 2)] {
        let (found, text) = eval(model, run);
        assert_eq!(found, rows, "{model} {run}");
        assert!(!text.contains("the model of the run"), "{text}");
    }
    let (_, text) = eval("model", "missing");
    assert!(text.contains("the model of the run cannot be opened"), "{text}");
}
