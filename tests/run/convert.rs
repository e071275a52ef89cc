//! `ft convert`: a dense model as a mixture of experts has the loss of the dense one, and training heals a split; routers of two
//! levels, from random weights and from a mixture with flat routers.

use crate::bench::{Bench, copy_all, number, said};
use ft::formats::config::Config;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn loss(bench: &Bench, model: &str) -> f64 {
    let out = bench.ft(&[
        "eval",
        "--model",
        model,
        "--data",
        "rows.jsonl",
        "--dtype",
        "f32",
        "--json",
    ]);
    assert!(out.status.success(), "{}", said(&out));
    let line: Value = serde_json::from_slice(&out.stdout).unwrap();
    number(&line, "loss")
}

fn convert(bench: &Bench, out: &str, more: &[&str]) -> String {
    let arguments = [&["convert", "--model", "model", "--to", "moe", "--out", out], more].concat();
    let ran = bench.ft(&arguments);
    assert!(ran.status.success(), "{more:?}\n{}", said(&ran));
    said(&ran)
}

#[test]
fn copies_have_the_loss_of_the_dense_model() {
    for (family, model_type) in [
        ("qwen3", "qwen3_moe"),
        ("qwen2", "qwen2_moe"),
        ("llama", "mixtral"),
        ("llama_tied", "mixtral"),
        ("mistral", "mixtral"),
    ] {
        let bench = Bench::of_family(family);
        if family == "qwen2" {
            // transformers uses this class for `qwen2` whatever the files say, for `qwen2_moe` if they say so.
            let path = bench.path("model/tokenizer_config.json");
            let said = fs::read_to_string(&path).unwrap();
            fs::write(&path, said.replace("PreTrainedTokenizerFast", "Qwen2Tokenizer")).unwrap();
        }
        let dense = loss(&bench, "model");
        for (out, experts, top_k) in [("two", "4", "2"), ("one", "3", "1"), ("all", "2", "2")] {
            convert(&bench, out, &["--experts", experts, "--top-k", top_k]);
            let config = Config::load(&bench.path(out)).unwrap();
            assert_eq!(config.model_type().unwrap(), model_type);
            let mixture = loss(&bench, out);
            assert!(
                (mixture - dense).abs() < 1e-6 * dense,
                "{family} {out}: {dense} {mixture}"
            );
        }
        // The copies learn different things, because their tokens differ.
        bench.train(&[
            "model.path=two",
            "tune.method=full",
            "train.max_steps=6",
            "train.batch_size=2",
            "data.max_length=64",
            "train.output_dir=run",
        ]);
        let weights = ft::formats::weights::Weights::open(&bench.path("run/final")).unwrap();
        let names: Vec<&str> = weights
            .names()
            .filter(|n| n.contains("layers.1.") && n.contains(".experts."))
            .collect();
        let down: Vec<Vec<f32>> = names
            .iter()
            .filter(|n| n.contains("down_proj") || n.contains("w2"))
            .map(|n| weights.read_f32(n).unwrap())
            .collect();
        assert_eq!(down.len(), 4, "{names:?}");
        assert!(down.windows(2).any(|pair| pair[0] != pair[1]), "{family}");
    }
}

#[test]
fn a_split_with_all_experts_is_the_dense_model_and_training_heals_a_sparse_one() {
    for family in ["qwen3", "llama"] {
        let bench = Bench::of_family(family);
        let dense = loss(&bench, "model");
        let split = ["--split", "rows.jsonl", "--experts", "4", "--top-k"];
        convert(&bench, "all", &[&split[..], &["4"]].concat());
        let all = loss(&bench, "all");
        assert!((all - dense).abs() < 1e-5 * dense, "{family}: {dense} {all}");
        let told = convert(&bench, "half", &[&split[..], &["2"]].concat());
        let part: f64 = told
            .split("experts have ")
            .nth(1)
            .unwrap()
            .split(" %")
            .next()
            .unwrap()
            .parse()
            .unwrap();
        // Half of the experts have more than half of the activation, by the choice of the router.
        assert!((50.5..100.0).contains(&part), "{told}");
        let half = loss(&bench, "half");
        assert!(half != dense);
        bench.train(&[
            "model.path=half",
            "tune.method=full",
            "train.max_steps=40",
            "train.batch_size=4",
            "data.max_length=64",
            "train.router_aux_loss_coef=0.01",
            "train.output_dir=healed",
        ]);
        let healed = loss(&bench, "healed/final");
        assert!(healed < half, "{family}: {dense} dense, {half} split, {healed} healed");
        println!("{family}: {dense} dense, {half} split, {healed} healed");
    }
}

#[test]
fn a_model_without_such_a_mixture_is_refused_by_name() {
    let refused = |family: &str, more: &[&str], changes: Value, word: &str| {
        let bench = Bench::of_family(family);
        let path = bench.path("model/config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        fs::write(&path, config.to_string()).unwrap();
        let arguments = [&["convert", "--model", "model", "--to", "moe", "--out", "out"], more].concat();
        let ran = bench.ft(&arguments);
        assert!(!ran.status.success(), "{family} {more:?}");
        assert!(said(&ran).contains(word), "{word}: {}", said(&ran));
        assert!(!bench.path("out").exists());
    };
    let eight = ["--experts", "8"];
    refused("gemma2", &eight, json!({}), "gemma2");
    refused("qwen3_moe", &eight, json!({}), "qwen3_moe");
    refused("llama_attention_bias", &eight, json!({}), "attention_bias");
    refused("llama_mlp_bias", &eight, json!({}), "mlp_bias");
    refused("qwen3", &["--experts", "4", "--top-k", "5"], json!({}), "5 of 4");
    refused(
        "qwen3",
        &["--experts", "7", "--split", "rows.jsonl"],
        json!({}),
        "48 neurons, 7 experts",
    );
}

/// The tiny mixture with routers of two levels: four groups of two experts.
fn two_levels(bench: &Bench, name: &str, per_token: usize) -> String {
    let dir = bench.path(name);
    fs::create_dir_all(&dir).unwrap();
    copy_all(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/moe"), &dir);
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["model_type"] = json!("qwen3_moe_smile");
    config["router_groups"] = json!(4);
    config["router_groups_per_token"] = json!(per_token);
    fs::write(&path, config.to_string()).unwrap();
    format!("model.path={}", dir.display())
}

#[test]
fn routers_of_two_levels_train_from_random_weights_and_send_a_token_to_fewer_groups() {
    let bench = Bench::new();
    let mut visits = Vec::new();
    for (name, per_token) in [("one", 1), ("all", 4)] {
        let model = two_levels(&bench, &format!("{name}-model"), per_token);
        let settings = [
            &model,
            "train.max_steps=16",
            "train.logging_steps=1",
            "train.router_z_loss_coef=0",
            "train.router_aux_loss_coef=0.02",
            "data.max_length=64",
        ];
        bench.shipped("moe-tiny", name, &settings);
        let steps = bench.steps(name);
        let of = |key: &str| steps.iter().map(|line| number(line, key)).collect::<Vec<f64>>();
        let losses = of("loss");
        assert!(losses[15] < losses[0] - 0.5, "{losses:?}");
        // Each level has a balance loss; 1 is even for one expert of a token, 2 for the two experts of all groups.
        assert!(
            of("router_aux_loss").iter().all(|x| (1.9..8.0).contains(x)),
            "{:?}",
            of("router_aux_loss")
        );
        visits.push(of("router_groups").iter().sum::<f64>() / 16.0);
    }
    println!("groups of a token: {visits:?}");
    assert_eq!(visits[0], 1.0);
    assert!((1.2..=2.0).contains(&visits[1]), "{visits:?}");
    // The z-loss has one softmax.
    let model = two_levels(&bench, "refused-model", 1);
    let out = bench.ft(&[
        "train",
        "--recipe",
        "r.toml",
        &model,
        "model.init=random",
        "train.router_z_loss_coef=0.1",
    ]);
    assert!(
        !out.status.success() && said(&out).contains("two levels"),
        "{}",
        said(&out)
    );
}

#[test]
fn distillation_heals_a_mixture_whose_routers_got_two_levels() {
    let bench = Bench::of_family("qwen3");
    convert(
        &bench,
        "flat",
        &["--split", "rows.jsonl", "--experts", "4", "--top-k", "2"],
    );
    let smile = |out: &str, more: &[&str]| {
        let arguments = [&["convert", "--model", "flat", "--to", "smile", "--out", out], more].concat();
        bench.ft(&arguments)
    };
    let ran = smile("smile", &["--groups", "2"]);
    assert!(ran.status.success(), "{}", said(&ran));
    let (flat, before) = (loss(&bench, "flat"), loss(&bench, "smile"));
    assert!(flat != before);
    bench.train(&[
        "model.path=smile",
        "train.stage=distill",
        "distill.teacher=flat",
        "tune.method=full",
        "train.max_steps=40",
        "train.batch_size=4",
        "data.max_length=64",
        "train.router_aux_loss_coef=0.01",
        "train.output_dir=healed",
    ]);
    let steps = bench.steps("healed");
    assert!(steps.iter().all(|line| number(line, "router_groups") == 1.0));
    let mean = |lines: &[Value]| lines.iter().map(|l| number(l, "loss")).sum::<f64>() / lines.len() as f64;
    let (start, end) = (mean(&steps[..5]), mean(&steps[35..]));
    println!("divergence from the flat mixture: {start} to {end}");
    assert!(end < start / 2.0, "{start} {end}");
    let config = fs::read_to_string(bench.path("healed/final/config.json")).unwrap();
    assert!(config.contains("qwen3_moe_smile"), "{config}");
    for (more, word) in [
        (&["--groups", "3"][..], "num_experts_per_tok"),
        (&["--groups", "4"][..], "num_experts_per_tok"),
        (&["--groups", "2", "--experts", "4"][..], "--experts"),
    ] {
        let ran = smile("other", more);
        assert!(!ran.status.success() && said(&ran).contains(word), "{}", said(&ran));
    }
    let ran = bench.ft(&[
        "convert", "--model", "model", "--to", "smile", "--groups", "2", "--out", "other",
    ]);
    assert!(said(&ran).contains("qwen3_moe"), "{}", said(&ran));
}
