//! The model of the best evaluation, and runs that end early.

use crate::bench::{Bench, files, number, said};
use std::collections::BTreeMap;
use std::fs;

/// Values of `eval_loss` by step, without the evaluation before the run.
fn evaluations(bench: &Bench, run: &str) -> BTreeMap<u64, f64> {
    let lines = bench.lines(&format!("{run}/metrics.jsonl"));
    let evaluated = lines.iter().filter(|line| line.get("eval_loss").is_some());
    let all = evaluated.map(|line| (line["step"].as_u64().unwrap(), number(line, "eval_loss")));
    all.filter(|(step, _)| *step > 0).collect()
}

/// Rows C3, R6.
#[test]
fn a_run_ends_early_with_the_best_model_and_a_resumed_one_too() {
    let bench = Bench::new();
    // Other rows than those that are trained, so that the loss on them rises in the end.
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let rows: Vec<&str> = rows.lines().collect();
    let (train, eval) = rows.split_at(rows.len() / 2);
    fs::write(bench.path("train.jsonl"), train.join("\n")).unwrap();
    fs::write(bench.path("eval.jsonl"), eval.join("\n")).unwrap();
    bench.train(&[
        "tune.method=lora",
        "tune.lora.r=4",
        "train.max_steps=1",
        "train.output_dir=start",
    ]);
    fs::rename(bench.path("start/final"), bench.path("adapter")).unwrap();
    let template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}";
    fs::write(bench.path("template.jinja"), template).unwrap();
    // Blocks that are trained only after the best step have the weights of the base in `final/`.
    for (method, settings) in [
        ("block", &["tune.method=block", "tune.block.switch_every=3"][..]),
        (
            "lora",
            &[
                "tune.method=lora",
                "tune.lora.adapter=adapter",
                "data.chat_template=template.jinja",
            ][..],
        ),
    ] {
        let shared = [
            "data.train=train.jsonl",
            "data.eval=eval.jsonl",
            "optimizer.learning_rate=0.02",
            "schedule.name=constant",
            "train.max_steps=200",
            "train.eval_steps=2",
            "train.save_steps=3",
            "train.save_total_limit=1",
            "train.early_stopping_patience=3",
            "train.load_best_model_at_end=true",
        ];
        let run = format!("{method}/run");
        let out = format!("train.output_dir={run}");
        let all = [&shared[..], settings, &[&out]].concat();
        bench.train(&all);
        let found = evaluations(&bench, &run);
        let last = *found.keys().next_back().unwrap();
        let (best, _) = found.iter().min_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        assert_eq!(
            last,
            best + 6,
            "{method}: three evaluations after the best one, {found:?}"
        );
        assert!(last < 200, "{method}: {found:?}");
        assert_eq!(bench.steps(&run).len() as u64, last);
        let events = fs::read_to_string(bench.path(&run).join("events.jsonl")).unwrap();
        assert!(events.lines().last().unwrap().contains("early stopping"), "{events}");
        // The picture has all evaluations, and `ft runs` the state.
        let picture = fs::read_to_string(bench.path(&run).join("curves.svg")).unwrap();
        assert_eq!(
            picture.matches("<circle").count(),
            found.len() + 1,
            "and that before the run"
        );
        let ran = bench.ft(&["runs", "list", method, "--json"]);
        let listed: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
        assert_eq!(
            (&listed["state"], &listed["steps"]),
            (&"early stopping".into(), &last.into())
        );
        assert_eq!(listed["results"]["best_eval_loss"], found[best]);
        // The last state is saved before the best one is written to `final/`.
        for (step, kept) in [(*best, true), (last, true), (last / 3 * 3, last.is_multiple_of(3))] {
            let there = bench.path(&run).join(format!("checkpoint-{step}")).exists();
            assert_eq!(there, kept, "{method}: checkpoint-{step}, best {best}");
        }
        let exported = format!("{method}/exported");
        let checkpoint = format!("{run}/checkpoint-{best}");
        let ran = bench.ft(&["export", &checkpoint, "--out", &exported]);
        assert!(ran.status.success(), "{}", said(&ran));
        let whole = files(&bench.path(&run).join("final"));
        assert!(
            whole == files(&bench.path(&exported)),
            "{method}: final/ is not the export of the best checkpoint"
        );
        // In another directory, from the best step and from the last one, with all files in other places.
        let moved = [
            ("model", "moved"),
            ("adapter", "adapter-2"),
            ("template.jinja", "template-2.jinja"),
        ];
        for (from, to) in moved {
            fs::rename(bench.path(from), bench.path(to)).unwrap();
        }
        let mut places = vec!["model.path=moved"];
        if method == "lora" {
            places.extend(["tune.lora.adapter=adapter-2", "data.chat_template=template-2.jinja"]);
        }
        let weights = |run: &str| -> Vec<_> {
            let all = files(&bench.path(run).join("final")).into_iter();
            all.filter(|(name, _)| name.ends_with(".safetensors")).collect()
        };
        for (step, new) in [(*best, "other"), (last, "late")] {
            let (new, from) = (format!("{method}/{new}"), format!("{run}/checkpoint-{step}"));
            let out = format!("train.output_dir={new}");
            bench.train(&[&all[..], &places, &[&out, "--resume", &from]].concat());
            assert_eq!(evaluations(&bench, &new), found, "{method}, {new}");
            assert_eq!(bench.steps(&new).len() as u64, last, "{method}, {new}");
            assert!(weights(&new) == weights(&run), "{method}, {new}: not the best model");
            let copied = files(&bench.path(&new).join(format!("checkpoint-{best}")));
            assert!(
                copied == files(&bench.path(&format!("{run}/checkpoint-{best}"))),
                "{method}, {new}"
            );
            // Where the new run goes on if it is killed before it saves.
            assert!(
                bench
                    .path(&new)
                    .join(format!("checkpoint-{step}/manifest.json"))
                    .exists()
            );
        }
        // The lines of evaluations that a full disk kept out of the metrics: the checkpoint has their values.
        let metrics = bench.path(&run).join("metrics.jsonl");
        let text = fs::read_to_string(&metrics).unwrap();
        let left: Vec<&str> = text.lines().filter(|line| !line.contains("\"eval_loss\"")).collect();
        fs::write(&metrics, left.join("\n") + "\n").unwrap();
        let (lost, from) = (format!("{method}/lost"), format!("{run}/checkpoint-{last}"));
        let out = format!("train.output_dir={lost}");
        bench.train(&[&all[..], &places, &[&out, "--resume", &from]].concat());
        fs::write(&metrics, text).unwrap();
        assert_eq!(bench.steps(&lost).len() as u64, last, "{method}: another end");
        assert!(weights(&lost) == weights(&run), "{method}: not the best model");
        let kept = bench.path(&format!("{run}/checkpoint-{best}"));
        fs::rename(&kept, bench.path("aside")).unwrap();
        let late = format!("{run}/checkpoint-{last}");
        let refused = [
            &["train", "--recipe", "r.toml"][..],
            &all,
            &places,
            &["train.output_dir=none", "--resume", &late],
        ];
        let refused = bench.ft(&refused.concat());
        assert!(
            !refused.status.success() && said(&refused).contains(&format!("{run}/checkpoint-{best}")),
            "{}",
            said(&refused)
        );
        fs::rename(bench.path("aside"), &kept).unwrap();
        fs::remove_dir_all(bench.path("none")).unwrap();
        for (from, to) in moved {
            fs::rename(bench.path(to), bench.path(from)).unwrap();
        }
        // Again from the best step: the same end, and the same files.
        let losses = || -> Vec<f64> { bench.steps(&run).iter().map(|l| number(l, "loss")).collect() };
        let before = losses();
        bench.train(&[&all[..], &["--resume", &checkpoint]].concat());
        assert_eq!(evaluations(&bench, &run), found, "{method}");
        assert_eq!(losses(), before, "{method}");
        assert!(
            whole == files(&bench.path(&run).join("final")),
            "{method}: another model after a resume"
        );
    }
}

#[test]
fn an_unknown_metric_is_refused_before_the_first_step() {
    let bench = Bench::new();
    let ran = bench.ft(&[
        "train",
        "--recipe",
        "r.toml",
        "data.eval=rows.jsonl",
        "train.max_steps=4",
        "train.eval_steps=2",
        "train.early_stopping_patience=1",
        "train.metric_for_best_model=bleu",
    ]);
    assert_eq!(ran.status.code(), Some(2), "{}", said(&ran));
    assert!(
        said(&ran).contains("eval_loss") && said(&ran).contains("bleu"),
        "{}",
        said(&ran)
    );
}
