//! Plans of every shipped recipe; a plan needs only a config. Also `ft data`, `ft eval`, `ft generate`.

use crate::bench::{Bench, said};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn config(
    kind: &str,
    vocab: usize,
    hidden: usize,
    layers: usize,
    heads: [usize; 3],
    middle: usize,
    tied: bool,
) -> Value {
    json!({"model_type": kind, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2],
        "intermediate_size": middle, "tie_word_embeddings": tied, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1000000.0})
}

#[test]
fn every_shipped_recipe_is_planned() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The published shapes of the models in the recipes.
    let shapes = [
        (
            "sft-qwen",
            config("qwen2", 151936, 896, 24, [14, 2, 64], 4864, true),
            494_032_768u64,
        ),
        (
            "block-llama3-8b-24gb",
            config("llama", 128256, 4096, 32, [32, 8, 128], 14336, false),
            8_030_261_248,
        ),
        (
            "lora-qwen3-4b",
            config("qwen3", 151936, 2560, 36, [32, 8, 128], 9728, true),
            4_022_468_096,
        ),
    ];
    let mut planned = Vec::new();
    let bench = Bench::new();
    for (name, config, parameters) in shapes {
        let model = bench.path(name);
        fs::create_dir_all(&model).unwrap();
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        let recipe = root.join("recipes").join(format!("{name}.toml"));
        let model = format!("model.path={}", model.display());
        // The choices of `auto` depend on free memory: with these settings the plan is the same on every machine.
        let (recompute, tier) = ("memory.activations=recompute", "memory.tier=device");
        let out = bench.ft(&[
            "plan",
            "--recipe",
            recipe.to_str().unwrap(),
            &model,
            recompute,
            tier,
            "--json",
        ]);
        assert!(out.status.success(), "{name}\n{}", said(&out));
        let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
        let peak = plan["peak_bytes"].as_u64().unwrap();
        // bf16 weights are the minimum; a full run adds optimizer state and gradients of all parameters.
        assert!(peak > 2 * parameters, "{name}: {peak}");
        // On a CPU the low 16 bits of deactivated masters count too: 4 bytes per element, plus the work of one layer.
        let ceiling = if name == "sft-qwen" {
            20 * parameters
        } else {
            5 * parameters
        };
        assert!(peak < ceiling, "{name}: {peak}");
        planned.push(name.to_string());
    }
    // These recipes start from the result of another recipe.
    let (start, reward) = ("model.path=assets/tiny", "rlhf.rewards=exact");
    let on_two = ["model.path=shape:llama-3.1-8b", "--ranks=2"];
    let on_four = ["model.path=shape:llama-3.1-70b", "--ranks=4"];
    for (name, more) in [
        ("quickstart", &[][..]),
        ("pretrain-tiny", &[]),
        ("moe-tiny", &[]),
        ("lora-qwen3-30b-a3b", &["model.path=shape:qwen3-30b-a3b"]),
        ("block-qwen3-30b-a3b", &["model.path=shape:qwen3-30b-a3b"]),
        ("grpo-start-tiny", &[]),
        ("dpo-tiny", &[]),
        ("reward-tiny", &[]),
        ("distill-tiny", &[]),
        ("distill-qwen3", &[start, "distill.teacher=assets/tiny"]),
        ("grpo-tiny", &[start]),
        ("ppo-tiny", &[start, reward]),
        ("block-llama3-8b-2x24gb", &on_two),
        ("block-llama3-70b-4x80gb", &on_four),
        ("block-qwen3-4b-16gb", &["model.path=shape:qwen3-4b"]),
        ("qlora-qwen3-4b-8gb", &["model.path=shape:qwen3-4b"]),
        ("qlora-qwen3-8b-16gb", &["model.path=shape:qwen3-8b"]),
    ] {
        let recipe = format!("recipes/{name}.toml");
        let out = bench
            .command(&[&["plan", "--recipe", &recipe, "--json"], more].concat())
            .current_dir(root)
            .output()
            .unwrap();
        assert!(out.status.success(), "{name}\n{}", said(&out));
        let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(plan["peak_bytes"].as_u64().unwrap() > 1 << 20);
        planned.push(name.to_string());
    }
    let mut shipped: Vec<String> = fs::read_dir(root.join("recipes"))
        .unwrap()
        .filter_map(|e| {
            e.unwrap()
                .file_name()
                .to_string_lossy()
                .strip_suffix(".toml")
                .map(str::to_string)
        })
        .collect();
    shipped.sort();
    planned.sort();
    assert_eq!(shipped, planned, "every recipe has a plan here");
}

#[test]
fn a_plan_above_the_budget_is_refused_before_anything_is_loaded() {
    let bench = Bench::new();
    for command in ["plan", "train"] {
        let out = bench.ft(&[command, "--recipe", "r.toml", "memory.budget=1MiB"]);
        assert_eq!(out.status.code(), Some(1), "{}", said(&out));
        assert!(said(&out).contains("budget"), "{}", said(&out));
    }
    assert!(!bench.path("runs").exists());
}

#[test]
fn a_trained_model_is_evaluated_and_written_with() {
    let bench = Bench::new();
    bench.train(&[
        "tune.method=block",
        "train.max_steps=30",
        "model.dtype=bf16",
        "train.output_dir=run",
        "train.save_steps=0",
    ]);
    let shown = bench.ft(&["data", "--recipe", "r.toml", "--rows", "2"]);
    assert!(shown.status.success() && !shown.stdout.is_empty(), "{}", said(&shown));
    let eval = |model: &str| -> f64 {
        let out = bench.ft(&["eval", "--model", model, "--data", "rows.jsonl", "--json"]);
        assert!(out.status.success(), "{}", said(&out));
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(report["tokens"].as_u64().unwrap() > 0);
        report["loss"].as_f64().unwrap()
    };
    assert!(eval("run/final") < eval("model") - 0.1, "thirty steps teach something");
    let out = bench.ft(&[
        "generate",
        "--model",
        "run/final",
        "--chat",
        "--prompt",
        "Add 17 and 25.",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]);
    assert!(out.status.success(), "{}", said(&out));
    let again = bench.ft(&[
        "generate",
        "--model",
        "run/final",
        "--chat",
        "--prompt",
        "Add 17 and 25.",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]);
    assert_eq!(out.stdout, again.stdout);
}

#[test]
fn zero_steps_save_the_initial_state() {
    let bench = Bench::new();
    bench.train(&["tune.method=full", "train.max_steps=0", "train.output_dir=run"]);
    let read = |path: std::path::PathBuf| ft::formats::weights::Weights::open_file(&path).unwrap();
    let (a, b) = (
        read(bench.path("model/model.safetensors")),
        read(bench.path("run/final/model.safetensors")),
    );
    for name in a.names() {
        assert_eq!(a.read_f32(name).unwrap(), b.read_f32(name).unwrap(), "{name}");
    }
}

/// Runs `ft plan` for a shape without any of its files on this machine.
fn shape_plan(bench: &Bench, name: &str, budget: &str, more: &[&str]) -> std::process::Output {
    fs::write(
        bench.path("s.toml"),
        "[model]\npath = \"shape:small\"\n[data]\nmax_length = 2048\n",
    )
    .unwrap();
    let model = format!("model.path=shape:{name}");
    let base = ["plan", "--recipe", "s.toml", &model, "--budget", budget, "--json"];
    let mut command = bench.command(&[&base[..], more].concat());
    // The plan and its estimate of seconds depend on the CPU.
    command.env("FT_CPU", "portable").output().unwrap()
}

fn chosen(out: &std::process::Output) -> (u64, impl Fn(&str) -> String + use<>) {
    assert!(out.status.success(), "{}", said(out));
    let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
    let peak = plan["peak_bytes"].as_u64().unwrap();
    let choice = move |key: &str| plan["chosen"][key]["value"].as_str().unwrap_or("").to_string();
    (peak, choice)
}

/// With decreasing memory, first saved activations are dropped, then MLP chunks or weights on the disk are used, and
/// only at the end lossy formats.
#[test]
fn open_settings_become_the_fastest_that_fit() {
    let bench = Bench::new();
    let mut seen = Vec::new();
    for budget in ["64GiB", "24GiB", "6GiB", "5GiB", "4600MiB", "4400MiB"] {
        let out = shape_plan(&bench, "llama-3.1-8b", budget, &["train.gradient_accumulation_steps=1"]);
        let (peak, choice) = chosen(&out);
        let bytes = ft::base::units::parse_bytes(budget).unwrap();
        assert!(peak <= bytes, "{budget}: {peak}");
        let keys = ["frozen_weights", "tier", "activations", "mlp_chunk", "head_chunk"];
        seen.push(keys.map(|key| choice(&format!("memory.{key}"))));
    }
    let kept = |i: usize| -> usize { seen[i][2].split(' ').nth(1).unwrap().parse().unwrap() };
    assert_eq!(seen[0], ["bf16", "device", "keep 32 of 32", "0", ""], "{seen:?}");
    // Disk is chosen before a lossy format, and fewer saved activations before both; then a head in chunks, which is read from the
    // disk in each micro-batch.
    assert!((1..4).all(|i| seen[i][..2] == ["bf16", "disk"]), "{seen:?}");
    assert!(kept(1) > kept(2) && kept(2) >= kept(3), "{seen:?}");
    assert!(
        seen[1][4] == "0" && seen[2..].iter().all(|s| s[4] == "4096"),
        "{seen:?}"
    );
    assert!(seen[4..].iter().all(|s| s[..2] == ["int8", "disk"]), "{seen:?}");
    assert!(seen[4][3] == "0" && seen[5][3] != "0", "{seen:?}");
    // Weights that must stay in memory are quantized if no other option is left.
    let tight = ["memory.tier=device", "tune.method=lora", "tune.lora.r=8"];
    let (_, choice) = chosen(&shape_plan(&bench, "qwen2.5-7b", "12GiB", &tight));
    assert_eq!(choice("memory.frozen_weights"), "int8");
    let (_, choice) = chosen(&shape_plan(&bench, "qwen2.5-7b", "9GiB", &tight));
    assert_eq!(choice("memory.frozen_weights"), "nf4");
}

/// Row S4.
/// If no strategy fits, the error suggests three changes, and each of them is sufficient.
#[test]
fn changes_that_are_named_fit() {
    let bench = Bench::new();
    let base = ["memory.tier=device", "memory.frozen_weights=bf16", "train.batch_size=4"];
    for (shape, budget, more) in [
        ("qwen2.5-1.5b", "7GiB", "tune.method=full"),
        ("qwen2.5-1.5b", "3GiB", "tune.method=block"),
        ("llama-3.1-8b", "16GiB", "tune.method=lora"),
    ] {
        let settings = [&base[..], &[more]].concat();
        let out = shape_plan(&bench, shape, budget, &settings);
        assert_eq!(out.status.code(), Some(1), "{shape} {more}");
        let text = said(&out);
        let lines = text
            .lines()
            .skip_while(|l| !l.contains("the cheapest changes that fit"));
        let changes: Vec<&str> = lines
            .skip(1)
            .take(3)
            .filter_map(|l| l.trim().split_once(": ").map(|(change, _)| change))
            .collect();
        assert_eq!(changes.len(), 3, "{text}");
        for change in changes {
            let with: Vec<&str> = settings.iter().copied().chain(change.split(' ')).collect();
            let out = shape_plan(&bench, shape, budget, &with);
            assert!(out.status.success(), "{change}\n{}", said(&out));
        }
    }
}

#[test]
fn a_plan_for_a_gpu_counts_its_memory_and_the_host_apart() {
    let bench = Bench::new();
    let roomy = "memory.host_budget=512GiB";
    let more = ["model.device=cuda:0", "train.gradient_accumulation_steps=1", roomy];
    let out = shape_plan(&bench, "llama-3.1-8b", "24GiB", &more);
    let (peak, _) = chosen(&out);
    let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
    let host = plan["peak_host_bytes"].as_u64().unwrap();
    // The low 16 bits of inactive masters stay on the host.
    assert!(peak > 16 << 30 && host > 10 << 30, "{peak} {host}");
    // Weights that must stay on the GPU are quantized if no other option is left; the plan counts the dequantization
    // buffer.
    let tight = [
        "model.device=cuda:0",
        "memory.tier=device",
        "tune.method=lora",
        "tune.lora.r=8",
        roomy,
    ];
    for (budget, storage) in [("17GiB", "bf16"), ("11GiB", "int8"), ("8GiB", "nf4")] {
        let (peak, choice) = chosen(&shape_plan(&bench, "qwen2.5-7b", budget, &tight));
        assert_eq!(choice("memory.frozen_weights"), storage, "{budget}");
        assert!(
            peak <= ft::base::units::parse_bytes(budget).unwrap(),
            "{budget}: {peak}"
        );
    }
    // If layers can be streamed, no lossy format is needed.
    let (_, choice) = chosen(&shape_plan(&bench, "qwen2.5-7b", "8GiB", &[tight[0], tight[2], roomy]));
    assert_eq!(choice("memory.frozen_weights"), "bf16");
}

#[test]
fn beside_a_gpu_the_host_has_to_have_room_too() {
    let bench = Bench::new();
    let plan = |host: &str| {
        let host = format!("memory.host_budget={host}");
        let more = ["model.device=cuda:0", "tune.method=lora", "tune.lora.r=8", &host];
        let out = shape_plan(&bench, "llama-3.1-70b", "24GiB", &more);
        let plan: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        let bytes = |key: &str| plan[key].as_u64().unwrap_or(0);
        let tier = plan["chosen"]["memory.tier"].clone();
        (
            tier["value"].clone(),
            tier["why"].to_string(),
            bytes("peak_host_bytes"),
            out,
        )
    };
    let (tier, _, host, _) = plan("512GiB");
    assert!(tier == "host" && host > 128 << 30, "{tier} {host}");
    let (tier, why, host, out) = plan("64GiB");
    assert!(tier == "disk" && host < 64 << 30, "{tier} {host}\n{}", said(&out));
    assert!(why.contains("of host memory"), "{why}");
    // Too small for any strategy, and the error names the right budget.
    let (.., out) = plan("64MiB");
    assert_eq!(out.status.code(), Some(1));
    assert!(said(&out).contains("the host's memory budget"), "{}", said(&out));
    // A CPU run has no host budget.
    let out = shape_plan(&bench, "small", "4GiB", &["memory.host_budget=1GiB"]);
    assert!(said(&out).contains("memory.host_budget"), "{}", said(&out));
    assert_eq!(out.status.code(), Some(2));
}

/// Row C4.
/// Verdict and disk space, as text and as JSON; `ft train` refuses if the plan reports too little disk space.
#[test]
fn a_plan_says_whether_it_fits_and_what_the_disk_has_to_hold() {
    let bench = Bench::new();
    let out = bench.ft(&["plan", "--recipe", "r.toml", "--budget", "2GiB"]);
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = |start: &str| text.lines().find(|l| l.starts_with(start)).map(str::to_string);
    assert!(
        line("fits: ").is_some_and(|l| l.ends_with("of a budget of 2.0 GiB")),
        "{text}"
    );
    assert!(line("disk: ").is_some_and(|l| l.contains(" free in ")), "{text}");
    let json = |more: &[&str]| -> Value {
        let out = bench.ft(&[&["plan", "--recipe", "r.toml", "--json"], more].concat());
        assert!(out.status.success(), "{}", said(&out));
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let plan = json(&[]);
    assert!(
        plan["fits"] == true && plan["verdict"].as_str().unwrap().ends_with(" free"),
        "{plan}"
    );
    assert!(plan["disk"]["fits"] == true && plan["disk"]["free_bytes"].as_u64().unwrap() > 0);
    // Each kept checkpoint needs its own space.
    let needed = |limit: &str| {
        let plan = json(&["train.save_steps=1", &format!("train.save_total_limit={limit}")]);
        plan["disk"]["needed_bytes"].as_u64().unwrap()
    };
    assert_eq!(needed("3") - needed("2"), needed("2") - needed("1"));
    let out = bench.ft(&[
        "plan",
        "--recipe",
        "r.toml",
        "train.save_steps=1",
        "train.save_total_limit=1000000000",
    ]);
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), said(&out));
    assert!(out.status.success() && text.contains("disk: does not fit: "), "{text}");
    let refused = bench.ft(&[
        "train",
        "--recipe",
        "r.toml",
        "train.save_steps=1",
        "train.save_total_limit=1000000000",
    ]);
    assert!(!refused.status.success() && said(&refused).contains("not enough disk space"));
}

/// Processor time of this thread in seconds.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The time of a plan is at most proportional to the number of layers (it was minutes for a thousand layers before).
#[test]
fn a_plan_of_a_thousand_layers_takes_no_time() {
    let bench = Bench::new();
    let seconds = |layers: usize, more: &[&str]| {
        let model = bench.path(&format!("layers-{layers}"));
        fs::create_dir_all(&model).unwrap();
        let config = config("qwen3", 4096, 64, layers, [2, 2, 32], 128, true);
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        let text = format!(
            "[model]\npath = \"{}\"\n[data]\ntrain = \"none.jsonl\"\nmax_length = 512\n",
            model.display()
        );
        let more: Vec<String> = more.iter().map(|s| s.to_string()).collect();
        let recipe = ft::recipe::parse(&text, "r.toml", &more).unwrap().recipe;
        // Processor time of this thread, the best of two runs: other tests use the processor too.
        let once = || {
            let started = processor_seconds();
            // If no strategy fits, changes are planned too.
            let planned = ft::commands::plan::plan(&recipe, None);
            assert_eq!(planned.is_err(), more.iter().any(|s| s == "memory.budget=40MiB"));
            processor_seconds() - started
        };
        once().min(once())
    };
    for more in [
        &["tune.method=block", "memory.budget=8GiB"][..],
        &["tune.method=block", "tune.block.correction=sgd", "memory.budget=8GiB"],
        &[
            "tune.method=block",
            "tune.block.partition=matrix",
            "train.max_steps=900",
            "memory.budget=8GiB",
        ],
        &["tune.method=lora", "memory.budget=8GiB"],
        &["tune.method=full", "memory.budget=8GiB"],
        &["tune.method=lora", "memory.budget=40MiB", "memory.tier=device"],
    ] {
        let (few, many) = (seconds(250, more), seconds(1000, more));
        println!("{more:?}: {few:.3} s for 250 layers, {many:.3} s for 1000");
        assert!(many < 20.0, "{more:?}: {many} s");
        assert!(
            many < 0.1 + 10.0 * few,
            "{more:?}: {few} s for 250 layers, {many} s for 1000"
        );
    }
}

/// Row S4.
#[test]
fn a_run_larger_than_the_memory_is_refused_before_it_loads_anything() {
    use std::os::unix::process::CommandExt;
    let bench = Bench::new();
    fs::write(bench.path("s.toml"), "[model]\npath = \"shape:qwen2.5-1.5b\"\n").unwrap();
    let mut command = bench.command(&["train", "--recipe", "s.toml", "memory.tier=device", "train.max_steps=1"]);
    let limit = libc::rlimit {
        rlim_cur: 2 << 30,
        rlim_max: 2 << 30,
    };
    // SAFETY: between fork and exec only one system call runs, on its own argument.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(libc::RLIMIT_DATA, &limit) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let out = command.output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    let text = said(&out);
    assert!(text.contains("does not fit the free memory"), "{text}");
    assert!(text.contains("memory.tier=disk"), "{text}");
    assert!(!bench.path("runs").exists());
}

/// MLP chunks give the same outputs; gradients differ at most in their last bits.
#[test]
fn tokens_in_pieces_learn_the_same() {
    let bench = Bench::new();
    let curve = |name: &str, settings: &[&str]| -> Vec<f64> {
        let out = format!("train.output_dir={name}");
        let base = [
            "train.max_steps=6",
            "train.save_steps=0",
            "train.batch_size=3",
            "train.gradient_accumulation_steps=2",
        ];
        bench.train(&[&base[..], settings, &[&out]].concat());
        bench
            .steps(name)
            .iter()
            .map(|l| crate::bench::number(l, "loss"))
            .collect()
    };
    for (name, settings) in [
        ("full", &["tune.method=full"][..]),
        (
            "block",
            &[
                "tune.method=block",
                "tune.block.switch_every=2",
                "memory.frozen_weights=nf4",
            ],
        ),
        ("lora", &["tune.method=lora", "memory.activations=keep"]),
        ("recomputed", &["tune.method=lora", "memory.activations=recompute"]),
    ] {
        let whole = curve(name, &[settings, &["memory.mlp_chunk=0"]].concat());
        for chunk in ["memory.mlp_chunk=17", "memory.mlp_chunk=64"] {
            let pieces = curve(&format!("{name}-{chunk}"), &[settings, &[chunk]].concat());
            assert_eq!(whole[0].to_bits(), pieces[0].to_bits(), "{name} {chunk}: outputs");
            for (a, b) in whole.iter().zip(&pieces) {
                assert!((a - b).abs() <= 1e-5 * a.abs(), "{name} {chunk}: {whole:?} {pieces:?}");
            }
        }
    }
}

/// The header of a checkpoint of bitsandbytes with the tensors of a model, and no data.
fn empty_nf4_checkpoint(model: &Path) {
    use ft::formats::StoredDtype;
    use ft::source::stored::{QuantizedLayout, tensors};
    let config = ft::formats::config::Config::read(model).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    let mut add = |name: &str, dtype: &str, element: usize, shape: &[usize]| {
        let start = end;
        end += element * shape.iter().product::<usize>();
        let tensor = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        header.insert(name.to_string(), tensor);
    };
    for p in ft::model::families::read(&config).unwrap().params() {
        if !ft::source::policy::is_projection(&p) {
            add(&p.name, "BF16", 2, &p.shape);
            continue;
        }
        let format = ft::quant::Format::Nf4 { double: true };
        for part in tensors(QuantizedLayout::Bitsandbytes, format, &p.name, (p.shape[0], p.shape[1])) {
            let (dtype, element) = if part.dtype == StoredDtype::U8 {
                ("U8", 1)
            } else {
                ("F32", 4)
            };
            add(&part.name, dtype, element, &part.shape);
        }
    }
    let text = serde_json::to_string(&header).unwrap();
    let file = fs::File::create(model.join("model.safetensors")).unwrap();
    let bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    std::io::Write::write_all(&mut &file, &bytes).unwrap();
    // A sparse file: only the header takes space.
    file.set_len((bytes.len() + end) as u64).unwrap();
}

#[test]
fn a_model_of_70b_in_4_bits_trains_beside_24_gib() {
    let bench = Bench::new();
    let model = bench.path("llama-70b-4bit");
    fs::create_dir_all(&model).unwrap();
    let mut shape = config("llama", 128256, 8192, 80, [64, 8, 128], 28672, false);
    shape["quantization_config"] =
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"});
    fs::write(model.join("config.json"), shape.to_string()).unwrap();
    empty_nf4_checkpoint(&model);
    let path = format!("model.path={}", model.display());
    let base = [
        &path,
        "tune.method=lora",
        "tune.lora.r=16",
        "model.device=cuda:0",
        "model.dtype=bf16",
    ];
    let plan = |host: &str| {
        let host = format!("memory.host_budget={host}");
        let more = ["plan", "--recipe", "s.toml", "--budget", "23GiB", "--json", &host];
        fs::write(
            bench.path("s.toml"),
            "[model]\npath = \"shape:small\"\n[data]\ntrain = \"none.jsonl\"\nmax_length = 2048\n",
        )
        .unwrap();
        chosen(&bench.ft(&[&more[..], &base].concat()))
    };
    let (peak, choice) = plan("64GiB");
    assert_eq!(choice("memory.tier"), "host");
    assert!(peak < 23 << 30, "{peak}");
    let (peak, choice) = plan("16GiB");
    assert_eq!(choice("memory.tier"), "disk");
    assert!(peak < 23 << 30, "{peak}");
    // Other methods train the dequantized values.
    let all = ["plan", "--recipe", "s.toml", &path, "tune.method=block"];
    let all = said(&bench.ft(&all));
    assert!(all.contains("trains their dequantized values"), "{all}");
}
