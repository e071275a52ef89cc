//! New tokens: their rows, how they train, and the directories that contain them. The numbers are those of transformers
//! and PEFT (`tests/parity/make_new_tokens.py`).

use crate::bench::{Bench, copy_all, goldens, number, said};
use ft::formats::weights::Weights;
use ft::formats::{Tokenizer, tokenizer::NewToken};
use serde_json::Value;
use std::fs;
use std::path::Path;

const NORMAL: &str = "data.new_tokens=[\"Δspan\", \"river-bank\"]";
const SPECIAL: &str = "data.new_special_tokens=[\"<tool>\", \"</tool>\"]";
const RUN: [&str; 11] = [
    NORMAL,
    SPECIAL,
    "data.train=tokens.jsonl",
    "data.shuffle=false",
    "optimizer.name=sgd",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "train.max_grad_norm=0.0",
    "train.batch_size=3",
    "train.gradient_accumulation_steps=1",
    "train.output_dir=run",
];
const METHODS: [(&str, &[&str]); 4] = [
    ("alone", &["tune.method=freeze", "tune.freeze.trainable_layers=0"]),
    ("full", &["tune.method=full"]),
    ("lora_rows", &["tune.method=lora", "tune.lora.r=2"]),
    (
        "lora_matrix",
        &["tune.method=lora", "tune.lora.r=2", "tune.new_tokens=matrix"],
    ),
];

fn bench(model: &str) -> Bench {
    let bench = Bench::new();
    fs::remove_dir_all(bench.path("model")).unwrap();
    copy_all(&goldens().join("training/models").join(model), &bench.path("model"));
    copy_all(&goldens().join("tokenizers/chat"), &bench.path("model"));
    fs::copy(goldens().join("new_tokens/rows.jsonl"), bench.path("tokens.jsonl")).unwrap();
    bench
}

fn eval(bench: &Bench, model: &str) -> f64 {
    let out = bench.ft(&[
        "eval",
        "--model",
        model,
        "--data",
        "tokens.jsonl",
        "--dtype",
        "f32",
        "--json",
    ]);
    assert!(out.status.success(), "{}", said(&out));
    number(&serde_json::from_slice::<Value>(&out.stdout).unwrap(), "loss")
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[track_caller]
fn near(got: f64, wanted: f64, most: f64, place: &str) {
    assert!(
        (got - wanted).abs() <= most * wanted.abs().max(1.0),
        "{place}: {got}, {wanted}"
    );
}

#[test]
fn losses_and_rows_are_those_of_transformers_and_peft() {
    let golden = json(&goldens().join("new_tokens/golden.json"));
    for model in ["llama", "qwen3"] {
        let bench = bench(model);
        let ids: Vec<u64> = golden["models"][model]["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|i| i.as_u64().unwrap())
            .collect();
        for (name, settings) in METHODS {
            let place = format!("{model} {name}");
            let wanted = &golden["models"][model][name];
            let losses: Vec<f64> = wanted["losses"]
                .as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_f64().unwrap())
                .collect();
            let steps = format!("train.max_steps={}", losses.len());
            let rate = format!("optimizer.learning_rate={}", golden["rates"][name]);
            bench.train(&[&RUN[..], settings, &[&*steps, &*rate, "--overwrite"]].concat());
            let own: Vec<f64> = bench.steps("run").iter().map(|s| number(s, "loss")).collect();
            assert_eq!(own.len(), losses.len(), "{place}");
            own.iter().zip(&losses).for_each(|(a, b)| near(*a, *b, 2e-5, &place));
            let adapter = name.starts_with("lora");
            let file = if adapter {
                "adapter_model.safetensors"
            } else {
                "model.safetensors"
            };
            let weights = Weights::open_file(&bench.path("run/final").join(file)).unwrap();
            for (table, rows) in wanted["rows"].as_object().unwrap() {
                let rows = rows.as_array().unwrap();
                let module = if table == "lm_head" {
                    "lm_head".to_string()
                } else {
                    format!("model.{table}")
                };
                let stored = match name {
                    "lora_rows" => format!("base_model.model.{module}.token_adapter.trainable_tokens_delta"),
                    "lora_matrix" => format!("base_model.model.{module}.weight"),
                    _ => format!("{module}.weight"),
                };
                let values = weights.read_f32(&stored).unwrap();
                let width = weights.info(&stored).unwrap().shape[1];
                let first = if name == "lora_rows" { 0 } else { ids[0] as usize };
                for (i, row) in rows.iter().enumerate() {
                    for (j, x) in row.as_array().unwrap().iter().enumerate() {
                        near(
                            f64::from(values[(first + i) * width + j]),
                            x.as_f64().unwrap(),
                            1e-5,
                            &place,
                        );
                    }
                }
            }
            // The saved model has the vocabulary, and gives the same loss again.
            let tokenizer = Tokenizer::load(&bench.path("run/final"));
            assert_eq!(tokenizer.unwrap().token_to_id("<tool>"), Some(ids[0] as u32), "{place}");
            let after = eval(&bench, "run/final");
            if let Some(wanted) = wanted["loss_after"].as_f64() {
                near(after, wanted, 2e-5, &place);
                assert_eq!(json(&bench.path("run/final/config.json"))["vocab_size"], 384);
            }
            if adapter {
                let out = bench.ft(&["merge", "--adapter", "run/final", "--out", "merged"]);
                assert!(out.status.success(), "{place}: {}", said(&out));
                near(eval(&bench, "merged"), after, 2e-5, &place);
                fs::remove_dir_all(bench.path("merged")).unwrap();
            }
        }
    }
}

const KINDS: [(&str, &[&str]); 6] = [
    ("adalora", &["tune.lora.peft_type=adalora"]),
    ("loha", &["tune.lora.peft_type=loha"]),
    ("lokr", &["tune.lora.peft_type=lokr"]),
    ("oft", &["tune.lora.peft_type=oft", "tune.lora.oft_block_size=8"]),
    ("ia3", &["tune.lora.peft_type=ia3"]),
    ("vera", &["tune.lora.peft_type=vera"]),
];

/// A fresh adapter of any type changes nothing, so the first step gives the matrices that it gives beside LoRA.
#[test]
fn every_adapter_type_trains_beside_embedding_and_head() {
    let golden = json(&goldens().join("new_tokens/golden.json"));
    for model in ["llama", "qwen3"] {
        let bench = bench(model);
        let first = golden["models"][model]["ids"][0].as_u64().unwrap() as usize;
        for (kind, settings) in KINDS {
            for mode in ["rows", "matrix"] {
                let place = format!("{model} {kind} {mode}");
                let rate = format!("optimizer.learning_rate={}", golden["rates"][format!("lora_{mode}")]);
                let usual = [
                    &RUN[..],
                    settings,
                    &[
                        "tune.method=lora",
                        "tune.lora.r=2",
                        "train.max_steps=1",
                        "--overwrite",
                        &rate,
                    ],
                    if mode == "matrix" {
                        &["tune.new_tokens=matrix"]
                    } else {
                        &[]
                    },
                ]
                .concat();
                if mode == "rows" && kind != "adalora" {
                    let out = bench.ft(&[&["train", "--recipe", "r.toml"], &usual[..]].concat());
                    assert_eq!(out.status.code(), Some(2), "{place}");
                    assert!(
                        said(&out).contains("for LoRA and AdaLoRA only"),
                        "{place}: {}",
                        said(&out)
                    );
                    continue;
                }
                bench.train(&usual);
                let weights = Weights::open_file(&bench.path("run/final/adapter_model.safetensors")).unwrap();
                let read = |module: &str| {
                    let below = if mode == "rows" {
                        "token_adapter.trainable_tokens_delta"
                    } else {
                        "weight"
                    };
                    weights.read_f32(&format!("base_model.model.{module}.{below}"))
                };
                for (table, rows) in golden["models"][model][format!("lora_{mode}")]["rows"]
                    .as_object()
                    .unwrap()
                {
                    let prefix = if table == "lm_head" { "" } else { "model." };
                    let values = read(&format!("{prefix}{table}")).unwrap();
                    let (rows, from) = (rows.as_array().unwrap(), if mode == "rows" { 0 } else { first });
                    let width = rows[0].as_array().unwrap().len();
                    for (i, x) in rows.iter().flat_map(|row| row.as_array().unwrap()).enumerate() {
                        near(f64::from(values[from * width + i]), x.as_f64().unwrap(), 1e-5, &place);
                    }
                }
                let config = json(&bench.path("run/final/adapter_config.json"));
                if mode == "matrix" {
                    // PEFT keeps the tie of LoRA and AdaLoRA; for the others both modules have the same matrix.
                    let tied = model == "qwen3";
                    assert_eq!(
                        config["ensure_weight_tying"] == true,
                        tied && kind == "adalora",
                        "{place}"
                    );
                    let same = read("model.embed_tokens").unwrap() == read("lm_head").unwrap();
                    assert_eq!(same, tied, "{place}");
                    let saved = config["modules_to_save"].as_array().unwrap();
                    assert_eq!(saved.len(), if tied && kind == "adalora" { 1 } else { 2 }, "{place}");
                }
                let after = eval(&bench, "run/final");
                let out = bench.ft(&["merge", "--adapter", "run/final", "--out", "merged"]);
                assert!(out.status.success(), "{place}: {}", said(&out));
                near(eval(&bench, "merged"), after, 2e-5, &place);
                fs::remove_dir_all(bench.path("merged")).unwrap();
                // Training continues where it ended.
                let again = ["tune.method=lora", "tune.lora.adapter=run/final", "train.max_steps=0"];
                bench.train(
                    &[
                        &again[..],
                        &["train.output_dir=again", "--overwrite", "data.train=tokens.jsonl"],
                    ]
                    .concat(),
                );
                near(eval(&bench, "again/final"), after, 2e-5, &place);
            }
        }
    }
}

/// A matrix with trained rows stays in memory, the others are read from the disk.
#[test]
fn new_tokens_learn_the_same_from_the_disk() {
    for model in ["llama", "qwen3"] {
        let bench = bench(model);
        for (name, settings) in METHODS.into_iter().chain([("block", &["tune.method=block"][..])]) {
            for dtype in ["model.dtype=f32", "model.dtype=bf16"] {
                let run = |more: &[&str]| {
                    let usual = [
                        "optimizer.learning_rate=1e-2",
                        "train.max_steps=4",
                        "--overwrite",
                        dtype,
                    ];
                    bench.train(&[&RUN[..], settings, &usual, more].concat());
                    let losses: Vec<f64> = bench.steps("run").iter().map(|s| number(s, "loss")).collect();
                    (losses, crate::bench::files(&bench.path("run/final")))
                };
                let here = run(&["memory.tier=device"]);
                for more in [
                    &["memory.tier=host"][..],
                    &["memory.tier=disk", "memory.head_chunk=0"],
                    &["memory.tier=disk", "memory.head_chunk=1"],
                ] {
                    assert!(run(more) == here, "{model} {name} {dtype} {more:?}");
                }
            }
        }
        // A stopped run continues from the disk.
        let usual = [&RUN[..], METHODS[2].1, &["train.max_steps=4", "train.save_steps=2"]].concat();
        bench.train(&[&usual[..], &["memory.tier=device", "--overwrite"]].concat());
        let whole = crate::bench::files(&bench.path("run/final"));
        let disk = [&usual[..], &["memory.tier=disk"]].concat();
        bench.train(&[&disk[..], &["--overwrite"]].concat());
        bench.train(&[&disk[..], &["--resume", "run/checkpoint-2"]].concat());
        assert!(whole == crate::bench::files(&bench.path("run/final")), "{model}");
    }
}

#[test]
fn a_plan_without_a_tokenizer_counts_the_new_rows() {
    let bench = bench("qwen3");
    fs::create_dir(bench.path("bare")).unwrap();
    fs::copy(bench.path("model/config.json"), bench.path("bare/config.json")).unwrap();
    for (_, settings) in METHODS {
        let plan = |model: &str, more: &[&str]| {
            let model = format!("model.path={model}");
            let usual = ["plan", "--recipe", "r.toml", "--json", "data.train=none.jsonl", &model];
            let fixed = ["memory.tier=device", "memory.activations=recompute"];
            let out = bench.ft(&[&usual[..], &fixed, settings, more].concat());
            assert!(out.status.success(), "{}", said(&out));
            let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
            (
                plan["trained_parameters"].clone(),
                plan["parameters"].clone(),
                plan["disk"]["needed_bytes"].clone(),
                said(&out),
            )
        };
        let (known, bare) = (plan("model", &[NORMAL, SPECIAL]), plan("bare", &[NORMAL, SPECIAL]));
        assert_eq!(
            (&known.0, &known.1, &known.2),
            (&bare.0, &bare.1, &bare.2),
            "{settings:?}"
        );
        assert!(
            bare.3.contains("the plan counts 4 new tokens") && !known.3.contains("new tokens"),
            "{}",
            bare.3
        );
        if !settings.contains(&"tune.new_tokens=matrix") && !settings.contains(&"tune.method=lora") {
            assert_ne!(plan("bare", &["tune.method=full"]).1, bare.1, "{settings:?}");
        }
    }
}

#[test]
fn a_resumed_run_has_the_same_rows() {
    let bench = bench("qwen3");
    for settings in [METHODS[0].1, METHODS[2].1, &["tune.method=block"]] {
        let usual = [&RUN[..], settings, &["optimizer.learning_rate=1e-2"]].concat();
        bench.train(&[&usual[..], &["train.max_steps=4", "train.save_steps=2", "--overwrite"]].concat());
        let whole = crate::bench::files(&bench.path("run/final"));
        bench.train(
            &[
                &usual[..],
                &[
                    "train.max_steps=4",
                    "train.save_steps=2",
                    "--resume",
                    "run/checkpoint-2",
                ],
            ]
            .concat(),
        );
        assert!(whole == crate::bench::files(&bench.path("run/final")), "{settings:?}");
        // The state after step 4 as a directory of its own.
        let out = bench.ft(&["export", "run/checkpoint-4", "--out", "exported"]);
        assert!(out.status.success(), "{}", said(&out));
        near(eval(&bench, "exported"), eval(&bench, "run/final"), 1e-6, "exported");
        fs::remove_dir_all(bench.path("exported")).unwrap();
    }
}

/// The vocabulary is in the part of the language model, and its tensors have other names in the files.
#[test]
fn multimodal_models_with_new_tokens_are_loaded_again() {
    for family in ["gemma3", "mistral3", "qwen2_5_vl"] {
        let bench = Bench::of_family(family);
        let row = "{\"text\": \"the mill<tool> grinds rye<tool> in spring\"}\n";
        fs::write(bench.path("tokens.jsonl"), row.repeat(4)).unwrap();
        let run = |name: &str, more: &[&str]| {
            let usual = [
                "data.new_special_tokens=[\"<tool>\"]",
                "data.train=tokens.jsonl",
                "data.max_length=64",
                "train.max_steps=2",
                "train.batch_size=2",
                "train.gradient_accumulation_steps=1",
            ];
            let out = format!("train.output_dir={name}");
            bench.train(&[&usual[..], more, &[&out]].concat());
        };
        let vocab = |dir: &str| {
            let config = json(&bench.path(dir).join("config.json"));
            assert_eq!(config.get("vocab_size"), None, "{family} {dir}");
            config["text_config"]["vocab_size"].as_u64().unwrap()
        };
        // Nothing is trained: the new row is the mean of the rows of its text.
        run("full", &["tune.method=full", "train.max_steps=0"]);
        assert_eq!(vocab("full/final"), 256, "{family}");
        let pieces = Tokenizer::load(&bench.path("model")).unwrap();
        let pieces = pieces.encode("<tool>", false).unwrap();
        let [before, after] = ["model", "full/final"].map(|dir| {
            let weights = Weights::open(&bench.path(dir)).unwrap();
            weights.read_f32("model.embed_tokens.weight").unwrap()
        });
        assert_eq!((before.len(), after.len()), (128 * 32, 256 * 32), "{family}");
        assert!(before == after[..128 * 32], "{family}");
        for column in 0..32 {
            let sum: f64 = pieces
                .iter()
                .map(|id| f64::from(before[*id as usize * 32 + column]))
                .sum();
            let (got, wanted) = (f64::from(after[128 * 32 + column]), sum / pieces.len() as f64);
            // The files of some of these models are bf16.
            assert!(
                (got - wanted).abs() <= 4e-3 * wanted.abs() + 1e-6,
                "{family}: {got}, {wanted}"
            );
        }
        assert!(eval(&bench, "full/final").is_finite(), "{family}");

        run("lora", &["tune.method=lora", "tune.lora.r=2"]);
        let out = bench.ft(&["merge", "--adapter", "lora/final", "--out", "merged", "--dtype", "f32"]);
        assert!(out.status.success(), "{family}: {}", said(&out));
        assert_eq!(vocab("merged"), 129, "{family}");
        near(eval(&bench, "merged"), eval(&bench, "lora/final"), 2e-5, family);
    }
}

/// Row D4.
#[test]
fn tokens_without_a_row_get_one_when_asked() {
    let bench = bench("llama");
    let mut tokenizer = Tokenizer::load(&bench.path("model")).unwrap();
    let tokens = ["<a>", "<b>"].map(|text| NewToken {
        text: text.into(),
        special: false,
    });
    tokenizer.add_tokens(&tokens).unwrap();
    let files = tokenizer.files_with_added(&bench.path("model")).unwrap();
    ft::formats::tokenizer::write_files(&bench.path("model"), &files).unwrap();
    let out = bench.ft(&["train", "--recipe", "r.toml", "train.max_steps=1"]);
    assert_eq!(out.status.code(), Some(1));
    let text = said(&out);
    assert!(
        text.contains("more tokens than the embedding has rows") && text.contains("`<a>`, `<b>` have no row"),
        "{text}"
    );
    assert!(text.contains("data.new_tokens = \"auto\""), "{text}");
    bench.train(&[
        "data.new_tokens=auto",
        "tune.method=full",
        "train.max_steps=1",
        "train.output_dir=run",
    ]);
    assert_eq!(json(&bench.path("run/final/config.json"))["vocab_size"], 384);
    // The same tokens by name; a known token gets no row.
    let arguments = [
        "data.new_tokens=[\"<b>\", \"<a>\", \"the\"]",
        "tune.method=lora",
        "train.max_steps=1",
        "train.output_dir=lora",
    ];
    let out = bench.ft(&[&["train", "--recipe", "r.toml"], &arguments[..]].concat());
    assert!(out.status.success(), "{}", said(&out));
    let ids = json(&bench.path("lora/final/adapter_config.json"))["trainable_token_indices"]["embed_tokens"].clone();
    assert_eq!(
        ids.as_array().unwrap().len(),
        if said(&out).contains("`the` is a token") { 2 } else { 3 }
    );
}

#[test]
fn variables_of_the_template_reach_training_and_generation() {
    let bench = bench("llama");
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' and tone is defined %}({{ tone }}) {% endif %}\
                    {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    fs::write(bench.path("model/chat_template.jinja"), template).unwrap();
    let kwargs = "data.template_kwargs={ tone = \"low\", unread = [1, 2] }";
    let out = bench.ft(&["data", "--recipe", "r.toml", "--rows", "1", kwargs]);
    assert!(
        String::from_utf8_lossy(&out.stdout).contains("(low) "),
        "{}",
        said(&out)
    );
    assert!(said(&out).contains("does not read `unread`"), "{}", said(&out));
    for method in ["tune.method=full", "tune.method=lora"] {
        bench.train(&[
            kwargs,
            method,
            "train.max_steps=1",
            "train.output_dir=run",
            "--overwrite",
        ]);
        let saved = fs::read_to_string(bench.path("run/final/chat_template.jinja")).unwrap();
        assert!(
            saved.ends_with(template) && saved.contains("set tone = \"low\"") && !saved.contains("set unread"),
            "{saved}"
        );
        let loss = |more: &[&str]| {
            let out = bench.ft(&[
                &["eval", "--model", "run/final", "--data", "rows.jsonl", "--json"],
                more,
            ]
            .concat());
            assert!(out.status.success(), "{}", said(&out));
            number(&serde_json::from_slice::<Value>(&out.stdout).unwrap(), "loss")
        };
        assert_eq!(loss(&[]), loss(&["--template-kwarg", "tone=low"]));
        assert_ne!(loss(&[]), loss(&["--template-kwarg", "tone=high"]));
        let chat = [
            "generate",
            "--model",
            "run/final",
            "--chat",
            "--prompt",
            "Hi",
            "--max-new-tokens",
            "2",
        ];
        let out = bench.ft(&[
            &chat[..],
            &["--template-kwarg", "tone=high", "--template-kwarg", "other=1"],
        ]
        .concat());
        assert!(
            out.status.success() && said(&out).contains("does not read `other`"),
            "{}",
            said(&out)
        );
    }
    // Another value is another run.
    let usual = ["tune.method=lora", "train.save_steps=1", "train.output_dir=run"];
    bench.train(&[&usual[..], &[kwargs, "train.max_steps=2", "--overwrite"]].concat());
    let more = [
        &["train", "--recipe", "r.toml"],
        &usual[..],
        &["train.max_steps=3", "--resume"],
    ]
    .concat();
    let out = bench.ft(&more);
    assert!(
        !out.status.success() && said(&out).contains("template_kwargs"),
        "{}",
        said(&out)
    );
    bench.train(&[&more[3..], &[kwargs]].concat());
}

#[test]
fn a_format_by_name_is_saved_with_the_end_of_its_turns() {
    let bench = bench("llama");
    for name in ["chat_template.jinja", "generation_config.json"] {
        fs::remove_file(bench.path("model").join(name)).ok();
    }
    let out = bench.ft(&["data", "--recipe", "r.toml", "--rows", "1", "data.chat_template=gemma"]);
    let text = said(&out);
    assert!(
        text.contains("splits `<end_of_turn>`, `<start_of_turn>` of the template `gemma` into pieces"),
        "{text}"
    );
    let new = "data.new_special_tokens=[\"<end_of_turn>\", \"<start_of_turn>\"]";
    for method in ["tune.method=full", "tune.method=lora"] {
        bench.train(&[
            "data.chat_template=gemma",
            new,
            method,
            "train.max_steps=1",
            "train.output_dir=run",
            "--overwrite",
        ]);
        let tokenizer = Tokenizer::load(&bench.path("run/final")).unwrap();
        let end = tokenizer.token_to_id("<end_of_turn>").unwrap();
        assert!(tokenizer.stop_ids().contains(&end), "{:?}", tokenizer.stop_ids());
        let saved = fs::read_to_string(bench.path("run/final/chat_template.jinja")).unwrap();
        assert!(saved.contains("<start_of_turn>"), "{saved}");
    }
    let out = bench.ft(&["data", "--recipe", "r.toml", "data.chat_template=gemmma"]);
    assert!(said(&out).contains("one of chatml, qwen2.5"), "{}", said(&out));
}
