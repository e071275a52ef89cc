//! Distillation runs: stored outputs, resuming, refused inputs.

use crate::bench::{Bench, copy_all, files, goldens, number, said};
use serde_json::Value;
use std::fs;

const BASE: [&str; 5] = [
    "train.stage=distill",
    "train.max_steps=8",
    "train.batch_size=2",
    "train.gradient_accumulation_steps=2",
    "train.save_steps=0",
];

/// A test directory with a teacher of another family in `teacher/`.
fn bench() -> Bench {
    let bench = Bench::new();
    copy_all(&goldens().join("training/models/qwen3"), &bench.path("teacher"));
    copy_all(&goldens().join("tokenizers/chat"), &bench.path("teacher"));
    bench
}

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&BASE[..], &["distill.teacher=teacher"], more].concat()
}

fn refused(bench: &Bench, settings: &[&str]) -> String {
    let out = bench.ft(&[&["train", "--recipe", "r.toml"], settings].concat());
    assert!(!out.status.success(), "{settings:?}");
    said(&out)
}

fn cache(bench: &Bench, out: &str, more: &[&str]) -> Value {
    let settings = with(more);
    let arguments = [
        &["distill", "cache", "--json", "--recipe", "r.toml", "--out", out],
        &settings[..],
    ]
    .concat();
    let done = bench.ft(&arguments);
    assert!(done.status.success(), "{}", said(&done));
    serde_json::from_slice(&done.stdout).unwrap()
}

/// Row C8.
#[test]
fn stored_outputs_teach_like_the_teacher() {
    let bench = bench();
    let terms = ["distill.beta=0.3", "distill.temperature=1.5", "distill.alpha=0.2"];
    bench.train(&with(
        &[&terms[..], &["tune.method=full", "train.output_dir=live"]].concat(),
    ));
    // All ids are stored: only the rounding to f16 differs.
    let report = cache(&bench, "all", &[&terms[..], &["distill.top_k=400"]].concat());
    assert_eq!(
        (report["shards"].as_u64(), report["found"].as_u64()),
        (Some(1), Some(0))
    );
    assert!((number(&report, "covered") - 1.0).abs() < 1e-6);
    // A flipped bit is detected, and the same command repairs it.
    let shard = bench.path("all/rows-00000.safetensors");
    let whole = fs::read(&shard).unwrap();
    for at in [whole.len() - 1, whole.len() / 2] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&shard, bytes).unwrap();
        let e = refused(
            &bench,
            &[&BASE[..], &terms[..], &["distill.teacher_cache=all"]].concat(),
        );
        assert!(e.contains("damaged") && e.contains("rows-00000.safetensors"), "{e}");
        let report = cache(&bench, "all", &[&terms[..], &["distill.top_k=400"]].concat());
        assert_eq!(report["found"].as_u64(), Some(0));
        assert!(fs::read(&shard).unwrap() == whole);
    }
    let stored =
        |dir: &'static str, out: &'static str| [&BASE[..], &terms[..], &["tune.method=full", dir, out]].concat();
    bench.train(&stored("distill.teacher_cache=all", "train.output_dir=stored"));
    let (live, got) = (bench.steps("live"), bench.steps("stored"));
    assert_eq!((live.len(), got.len()), (8, 8));
    for (a, b) in live.iter().zip(&got) {
        for key in ["loss", "divergence", "cross_entropy", "grad_norm"] {
            let (a, b) = (number(a, key), number(b, key));
            assert!((a - b).abs() < 2e-3 * a, "{key}: {a} {b}");
        }
    }
    // With fewer ids the stored mass is below 1; the rows of packed sequences are still found.
    let report = cache(&bench, "few", &[&terms[..], &["distill.top_k=8"]].concat());
    assert!(number(&report, "covered") < 1.0);
    bench.train(
        &[
            &stored("distill.teacher_cache=few", "train.output_dir=few-run")[..],
            &["data.packing=true"],
        ]
        .concat(),
    );
    let few = bench.steps("few-run");
    assert!(number(&few[0], "divergence") > 0.0);
}

#[test]
fn a_stopped_cache_goes_on_and_another_one_is_not_touched() {
    let bench = bench();
    cache(&bench, "out", &[]);
    let shard = fs::read(bench.path("out/rows-00000.safetensors")).unwrap();
    fs::remove_file(bench.path("out/cache.json")).unwrap();
    let use_it = [&BASE[..], &["distill.teacher_cache=out"]].concat();
    let e = refused(&bench, &use_it);
    assert!(
        e.contains("missing or incomplete") && e.contains("ft distill cache"),
        "{e}"
    );
    assert!(!bench.path("runs").exists(), "nothing is written before");
    let again = cache(&bench, "out", &[]);
    assert_eq!(again["found"], 1);
    assert_eq!(fs::read(bench.path("out/rows-00000.safetensors")).unwrap(), shard);

    let other = with(&["distill.top_k=9"]);
    let out = bench.ft(&[&["distill", "cache", "--recipe", "r.toml", "--out", "out"], &other[..]].concat());
    assert!(
        !out.status.success() && said(&out).contains("or other settings"),
        "{}",
        said(&out)
    );
    let e = refused(&bench, &[&use_it[..], &["distill.temperature=2"]].concat());
    assert!(e.contains("at another temperature"), "{e}");
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    fs::write(
        bench.path("rows.jsonl"),
        rows.lines().skip(1).collect::<Vec<_>>().join("\n"),
    )
    .unwrap();
    let e = refused(&bench, &use_it);
    assert!(e.contains("for other rows"), "{e}");
    fs::write(bench.path("rows.jsonl"), rows).unwrap();
    // A truncated file is detected.
    fs::write(bench.path("out/rows-00000.safetensors"), &shard[..shard.len() - 9]).unwrap();
    assert!(refused(&bench, &use_it).contains("rows-00000.safetensors"));
}

#[test]
fn resumed_runs_are_bit_equal() {
    let bench = bench();
    cache(&bench, "out", &["distill.top_k=16"]);
    let rollouts = ["distill.lmbda=0.6", "distill.max_new_tokens=6", "data.packing=false"];
    let runs: [(&str, Vec<&str>); 4] = [
        (
            "hidden",
            vec![
                "distill.teacher=teacher",
                "tune.method=lora",
                "distill.hidden_weight=0.5",
            ],
        ),
        (
            "students",
            [
                &[
                    "distill.teacher=teacher",
                    "tune.method=block",
                    "tune.block.switch_every=2",
                ],
                &rollouts[..],
            ]
            .concat(),
        ),
        (
            "disk",
            vec![
                "distill.teacher=teacher",
                "distill.teacher_tier=disk",
                "distill.teacher_weights=nf4",
            ],
        ),
        ("stored", vec!["distill.teacher_cache=out", "tune.method=full"]),
    ];
    for (name, settings) in runs {
        let dirs = [
            format!("train.output_dir={name}"),
            format!("train.output_dir={name}-again"),
        ];
        let (save, from) = ("train.save_steps=3", format!("{name}/checkpoint-3"));
        let keep = "train.save_total_limit=9";
        bench.train(&[&BASE[..], &settings, &[save, keep, &dirs[0]]].concat());
        bench.train(&[&BASE[..], &settings, &[save, keep, &dirs[1], "--resume", &from]].concat());
        let (whole, again) = (bench.steps(name), bench.steps(&format!("{name}-again")));
        assert_eq!((whole.len(), again.len()), (8, 8), "{name}");
        for (a, b) in whole[3..].iter().zip(&again[3..]) {
            for key in [
                "step",
                "loss",
                "grad_norm",
                "divergence",
                "cross_entropy",
                "hidden_loss",
                "student_tokens",
            ] {
                assert_eq!(a.get(key), b.get(key), "{name}: {key}");
            }
        }
        assert_eq!(whole.iter().any(|s| s.get("hidden_loss").is_some()), name == "hidden");
        assert_eq!(
            whole.iter().any(|s| s.get("student_rows").is_some()),
            name == "students"
        );
        let all = |run: String| files(&bench.path(&run).join("final"));
        assert!(all(name.to_string()) == all(format!("{name}-again")), "{name}: final/");
        // Projections are not part of the result.
        let taken = fs::read_dir(bench.path(&format!("{name}/final"))).unwrap();
        for file in taken
            .map(|e| e.unwrap().path())
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        {
            let bytes = fs::read(&file).unwrap();
            assert!(!bytes.windows(10).any(|w| w == b"objective."), "{}", file.display());
        }
        assert!(!bench.path(&format!("{name}/teacher")).exists());
    }
    // A different teacher makes a different run.
    let weights = bench.path("teacher/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let n = bytes.len();
    bytes[n / 2..].chunks_exact_mut(4).for_each(|x| x[3] ^= 0x80);
    fs::write(&weights, bytes).unwrap();
    let from = "hidden/checkpoint-3";
    let settings = with(&[
        "tune.method=lora",
        "distill.hidden_weight=0.5",
        "train.output_dir=x",
        "--resume",
        from,
    ]);
    let e = refused(&bench, &settings);
    assert!(e.contains("not the teacher with which the run started"), "{e}");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let bench = bench();
    let e = refused(&bench, &BASE);
    assert!(
        e.contains("needs a teacher") && e.contains("distill.teacher_cache"),
        "{e}"
    );
    let e = refused(&bench, &with(&["distill.lmbda=0.5", "data.packing=true"]));
    assert!(e.contains("data.packing = false"), "{e}");
    let e = refused(
        &bench,
        &with(&[
            "distill.lmbda=0.5",
            "distill.teacher_cache=x",
            "distill.hidden_weight=1",
        ]),
    );
    assert!(e.contains("2 errors"), "{e}");
    let e = refused(
        &bench,
        &with(&["distill.hidden_weight=1", "distill.layer_map=[[1, 9]]"]),
    );
    assert!(e.contains("[1, 9]") && e.contains("distill.layer_map"), "{e}");
    let e = refused(&bench, &with(&["distill.hidden_weight=1", "distill.layer_map=[1, 9]"]));
    assert!(e.contains("list of pairs"), "{e}");
    let e = refused(&bench, &[&BASE[..], &["distill.teacher=nowhere/at-all"]].concat());
    assert!(e.contains("nowhere/at-all"), "{e}");
    let e = refused(&bench, &[&BASE[..], &["distill.teacher=shape:qwen3-0.6b"]].concat());
    assert!(e.contains("distill.teacher"), "{e}");

    // The same tokens in another order, then a different tokenizer.
    let file = bench.path("teacher/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    vocab.insert("a".into(), b);
    vocab.insert("b".into(), a);
    fs::write(&file, tokenizer.to_string()).unwrap();
    let e = refused(&bench, &with(&[]));
    assert!(
        e.contains("tokenizers of teacher and student differ") && e.contains("\"b\"") && e.contains("stage = \"sft\""),
        "{e}"
    );
    copy_all(&goldens().join("tokenizers/small"), &bench.path("teacher"));
    let e = refused(&bench, &with(&[]));
    assert!(e.contains("tokenizers of teacher and student differ"), "{e}");
    assert!(!bench.path("runs").exists());
}

#[test]
fn the_plan_counts_the_teacher() {
    let bench = bench();
    let plan = |settings: &[&str]| -> Value {
        let out = bench.ft(&[&["plan", "--json", "--recipe", "r.toml"], settings].concat());
        assert!(out.status.success(), "{}", said(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let line = |settings: &[&str]| plan(settings)["teacher"].as_u64();
    assert_eq!(line(&["train.stage=sft"]), None);
    let whole = line(&with(&[])).unwrap();
    let quantized = line(&with(&["distill.teacher_tier=disk", "distill.teacher_weights=nf4"])).unwrap();
    let weights = fs::metadata(bench.path("teacher/model.safetensors")).unwrap().len();
    assert!(
        whole > weights * 9 / 10 && quantized < whole,
        "{whole} {quantized} {weights}"
    );
    assert_eq!(line(&with(&["distill.teacher_cache=out"])), None);
}
