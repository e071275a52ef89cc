//! Every format that ft parses, damaged in many ways: each file gives a value or an error, in time, and takes no more
//! memory than a multiple of its size.

use crate::counting::{LIMIT, LIVE, MOST};
use crate::{RESULT, case, passes};
use ft::base::rng::{Rng, Stream};
use ft::formats::{AdapterConfig, ChatTemplate, Tokenizer, Weights, gguf};
use ft::setup::ModelDir;
use ft::setup::rows::RecipeRows;
use ft::setup::vocabulary::TextChanges;
use ft::{checkpoint, history, recipe};
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Targets that need no file with a certain name.
#[path = "../../fuzz/src/lib.rs"]
mod fuzz;

/// The memory that a case may take beside a multiple of its bytes, and beside what its parser takes for the smallest good file.
const BASE_BYTES: usize = 256 << 10;
const PER_BYTE: usize = 256;
/// An allocation that exceeds the limit by more than this fails, and the process ends at the case.
const MOST_MORE: usize = 64 << 20;
/// Longer files need a smaller good one.
const SHORT: usize = 16 << 10;
const LONGEST: Duration = Duration::from_secs(10);

/// Damages `bytes`: bits, bytes, numbers, nesting, repetition, missing parts.
fn damage(bytes: &mut Vec<u8>, rng: &Rng) {
    let mut at = 0;
    let mut draw = |n: usize| {
        at += 1;
        rng.below(at, n.max(1) as u64) as usize
    };
    for _ in 0..1 + draw(3) {
        let place = draw(bytes.len());
        match draw(9) {
            0 => bytes.truncate(place),
            1 if place < bytes.len() => bytes[place] ^= 1 << draw(8),
            2 if place < bytes.len() => bytes[place] = draw(256) as u8,
            3 => drop(bytes.splice(place..place, vec![b"[{\"(<"[draw(5)]; 1 + draw(4000)])),
            4 => {
                let part = bytes[place..(place + 1 + draw(200)).min(bytes.len())].to_vec();
                bytes.splice(place..place, part.repeat(1 + draw(20)));
            }
            5 => drop(bytes.drain(place..(place + 1 + draw(40)).min(bytes.len()))),
            6 => {
                let number = [
                    "-1",
                    "1e999",
                    "18446744073709551616",
                    "0",
                    "4294967296",
                    "null",
                    "1e-400",
                ][draw(7)];
                if let Some(digit) = bytes[place..].iter().position(u8::is_ascii_digit) {
                    let from = place + digit;
                    let digits = bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
                    bytes.splice(from..from + digits, number.bytes());
                }
            }
            7 => drop(bytes.splice(
                place..place,
                [[0xff, 0xfe, 0x00], [0xed, 0xa0, 0x80], [0x1b, b'[', b'm']][draw(3)],
            )),
            _ => drop(bytes.splice(place..place, b"\"\n,:]}"[..1 + draw(6)].iter().copied())),
        }
    }
}

/// A manifest with one file, `state.json`.
fn sealed(step: u64, state: &Path) -> String {
    let bytes = fs::read(state).unwrap();
    let (size, hash) = (bytes.len().to_string(), blake3::hash(&bytes).to_hex().to_string());
    let mut seal = blake3::Hasher::new();
    for text in ["1", "0", &step.to_string(), "state.json", &size, &hash] {
        seal.update(&(text.len() as u64).to_le_bytes());
        seal.update(text.as_bytes());
    }
    let seal = seal.finalize().to_hex().to_string();
    let files = serde_json::json!([{"name": "state.json", "size": bytes.len(), "blake3": hash}]);
    serde_json::json!({"format": 1, "ft": "0", "step": step, "files": files, "seal": seal}).to_string()
}

/// A file, and what opens it.
type Target<'a> = (&'a str, &'a dyn Fn(&Path));

/// Names and good inputs of fuzz targets that no file of the list in `open_all` reaches.
const FUZZED: [(&str, &str); 13] = [
    (
        "special_tokens",
        "{\"eos_token\": {\"content\": \"<|im_end|>\", \"lstrip\": false}, \"pad_token\": \"<|endoftext|>\", \"<extra>\": 900}",
    ),
    (
        "kwargs",
        "{\"enable_thinking\": false, \"bos_token\": \"x\", \"list\": [1, {\"a\": null}]}",
    ),
    (
        "quantized",
        "{\"model_type\": \"llama\", \"quantization_config\": {\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 32, \
         \"desc_act\": false}}",
    ),
    (
        "preference",
        "{\"prompt\": \"q\", \"chosen\": \" yes\", \"rejected\": \" no\"}\n{\"prompt\": \"r\", \"chosen\": \"b\", \"rejected\": \"c\"}\n",
    ),
    (
        "prompts",
        "{\"prompt\": \"add 3 and 4\", \"answer\": 7}\n\
         {\"prompt\": [{\"role\": \"user\", \"content\": \"q\"}], \"answer\": [\"a\", \"b\"]}\n",
    ),
    (
        "argument",
        "tune.method=lora\ntune.lora.r=4\nmemory.budget=22GiB\nrlhf.rewards=[\"regex:[a]\", \"length:4\"]",
    ),
    (
        "run",
        "{\"format\": \"ft run 1\", \"processes\": [7, 8], \"final\": {\"config.json\": [2, 5, \"00\"]}}\n",
    ),
    ("lock", "process 1 since 2026-01-01 00:00:00 UTC\n"),
    (
        "token_cache",
        "{\"format\":\"ft token cache 3\",\"fingerprint\":\"aa\",\"stats\":{},\"readings\":[],\"chunks\":[{\"read\":2,\"rows\":2,\
         \"tokens\":9,\"hash\":\"00\",\"stats\":{},\"sources\":[[2,0]]}],\"screened\":null}",
    ),
    (
        "teacher_cache",
        "{\"format\": \"ft teacher outputs 1\", \"common\": 8, \"k\": 4, \"temperature\": 1.5, \"data\": \"aa\", \"teacher\": \"b:c\", \
         \"shards\": 0, \"documents\": 0, \"tokens\": 0}\n",
    ),
    (
        "hub",
        "[{\"type\": \"file\", \"path\": \"train.jsonl\", \"oid\": \"1111111111111111111111111111111111111111\", \"size\": 3}]",
    ),
    ("request", "GET /token/live?runs=0:5 HTTP/1.1\r\nHost: 127.0.0.1:8000"),
    ("score", "{\"score\": -1e-3, \"why\": \"short\"}"),
];

/// A good file that is short: the memory that its parser takes for it is allowed for every file.
fn smallest<'a>(name: &str, good: &'a [u8]) -> &'a [u8] {
    let short: &[u8] = match name {
        "one.safetensors" => {
            b"\x38\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}}\0\0\0\0\0\0\0\0"
        }
        "model/tokenizer.json" => {
            br#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}"#
        }
        _ => good,
    };
    assert!(
        short.len() <= SHORT,
        "{name} needs a smaller file: {} bytes",
        short.len()
    );
    short
}

/// The time and the memory that opening a file takes; beyond `limit` an allocation fails.
fn measured(open: &dyn Fn(&Path), path: &Path, limit: usize) -> (Duration, usize) {
    let (before, started) = (LIVE.load(Relaxed), Instant::now());
    MOST.store(before, Relaxed);
    LIMIT.store(before.saturating_add(limit), Relaxed);
    open(path);
    LIMIT.store(usize::MAX, Relaxed);
    (started.elapsed(), MOST.load(Relaxed).saturating_sub(before))
}

/// What a parser takes for any file: for the smallest good one, and for a long one beside the multiple of its bytes. The first time
/// counts too, because some tables are made only then.
fn taken_for_any(name: &str, open: &dyn Fn(&Path), path: &Path, good: &[u8]) -> usize {
    let mut most = 0;
    for bytes in [smallest(name, good), good] {
        for _ in 0..2 {
            fs::write(path, bytes).unwrap();
            let (_, taken) = measured(open, path, usize::MAX);
            let of_bytes = if bytes.len() > SHORT { PER_BYTE * bytes.len() } else { 0 };
            most = most.max(taken.saturating_sub(of_bytes));
        }
    }
    most
}

fn open_all(dir: &Path) -> usize {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tiny = root.join("assets/tiny");
    let goldens = root.join("tests/parity/goldens");
    let model = dir.join("model");
    for folder in [&model, &dir.join("adapter")] {
        fs::create_dir_all(folder).unwrap();
    }
    for entry in fs::read_dir(&tiny).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let index = "{\"metadata\": {\"total_size\": 9}, \"weight_map\": {\"model.norm.weight\": \"model.safetensors\"}}";
    fs::write(model.join("model.safetensors.index.json"), index).unwrap();
    fs::write(
        dir.join("adapter/adapter_config.json"),
        "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"q_proj\", \"v_proj\"], \
         \"rank_pattern\": {\"a.b\": 2}, \"lora_dropout\": 0.1, \"bias\": \"none\", \"use_rslora\": true}",
    )
    .unwrap();
    fs::copy(goldens.join("data/messages.jsonl"), dir.join("rows.jsonl")).unwrap();
    fs::write(
        dir.join("rows.csv"),
        "prompt,completion\n\"a, \"\"b\"\"\",c\n1,2\n".repeat(20),
    )
    .unwrap();
    fs::write(dir.join("rows.json"), "[{\"text\": \"one\"}, {\"text\": \"two\"}]").unwrap();
    fs::copy(goldens.join("arrow/types.arrow"), dir.join("rows.arrow")).unwrap();
    fs::copy(goldens.join("parquet/zstd.parquet"), dir.join("rows.parquet")).unwrap();
    fs::copy(root.join("recipes/quickstart.toml"), dir.join("r.toml")).unwrap();
    fs::write(
        dir.join("c.yaml"),
        "base_model: m\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\nlora_r: 8\nbetas: [0.9, 0.95]\nx: {a: [1, {b: 2}]}\n",
    )
    .unwrap();
    let keys = [
        (
            "general.architecture".to_string(),
            gguf::MetadataValue::Text("llama".into()),
        ),
        (
            "a.list".to_string(),
            gguf::MetadataValue::Texts(vec!["x".into(), "yz".into()]),
        ),
    ];
    let tensor = gguf::TensorEntry {
        name: "a".into(),
        shape: vec![2, 64],
        block: gguf::BlockType::F32,
    };
    gguf::write(&dir.join("one.gguf"), &keys, &[tensor], |t, put| {
        put(&vec![1; t.bytes() as usize])
    })
    .unwrap();
    for folder in ["checkpoint-1", "checkpoint-2", "run"] {
        fs::create_dir_all(dir.join(folder)).unwrap();
    }
    let state = dir.join("checkpoint-2/state.json");
    fs::write(
        &state,
        "{\"recipe\": {\"train.seed\": \"1\"}, \"data\": \"aa\", \"optimizer_steps\": {\"a\": 1}}",
    )
    .unwrap();
    fs::write(dir.join("checkpoint-1/manifest.json"), sealed(1, &state)).unwrap();
    checkpoint::load(&{
        fs::write(dir.join("checkpoint-2/manifest.json"), sealed(2, &state)).unwrap();
        dir.join("checkpoint-2")
    })
    .unwrap();
    fs::write(
        dir.join("run/metrics.jsonl"),
        "{\"step\":1,\"loss\":2.5,\"lr\":0.1}\n".repeat(20),
    )
    .unwrap();
    fs::write(
        dir.join("run/events.jsonl"),
        "{\"event\":\"start\",\"steps\":20,\"time\":1.5}\n{\"event\":\"stop\",\"step\":20,\"reason\":\"done\"}\n",
    )
    .unwrap();
    fs::write(
        dir.join("run/resolved.toml"),
        "[train]\nmax_steps = 20  # recipe\n[model]\npath = \"m\"\n",
    )
    .unwrap();
    fs::copy(tiny.join("model.safetensors"), dir.join("one.safetensors")).unwrap();

    let tokenizer = Tokenizer::load(&tiny).unwrap();
    let whole = ModelDir::open(&tiny.to_string_lossy(), "main", &TextChanges::default()).unwrap();
    let of_model = |_: &Path| {
        if let Ok(model) = ModelDir::open(&model.to_string_lossy(), "main", &TextChanges::default()) {
            let _ = model.check_weights(recipe::ModelInit::Pretrained);
        }
    };
    let of_rows = |path: &Path| {
        let text = format!(
            "[model]\npath = \"{}\"\n[data]\ntrain = \"{}\"\ncache = false\n",
            tiny.display(),
            path.display()
        );
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        let _ = RecipeRows::read(&recipe, &whole);
    };
    let of_recipe = |path: &Path| {
        let _ = recipe::load(path, &[]);
    };
    let of_yaml = |path: &Path| {
        if let Ok(text) = fs::read_to_string(path) {
            let _ = recipe::import::import(&text, "c.yaml", None);
        }
    };
    let of_template = |path: &Path| {
        if let Ok(text) = fs::read_to_string(path) {
            let _ = ChatTemplate::from_text(&text, "t", &tokenizer);
        }
    };
    let gguf = |path: &Path| {
        if let Ok(file) = gguf::GgufReader::open(path) {
            file.tensors.iter().for_each(|t| drop(file.bytes(&t.name)));
        }
    };
    let of_run = |path: &Path| drop(history::RunRecord::read(path.parent().unwrap()));
    let files: [Target; 21] = [
        ("one.safetensors", &|path| {
            if let Ok(weights) = Weights::open_file(path) {
                let _ = weights.read_f32("model.norm.weight");
            }
        }),
        ("model/model.safetensors.index.json", &|_| drop(Weights::open(&model))),
        ("model/config.json", &of_model),
        ("model/generation_config.json", &of_model),
        ("model/tokenizer.json", &of_model),
        ("model/tokenizer_config.json", &of_model),
        ("model/chat_template.jinja", &of_template),
        ("adapter/adapter_config.json", &|path| {
            drop(AdapterConfig::load(path.parent().unwrap()))
        }),
        ("rows.jsonl", &of_rows),
        ("rows.json", &of_rows),
        ("rows.csv", &of_rows),
        ("rows.arrow", &of_rows),
        ("rows.parquet", &of_rows),
        ("r.toml", &of_recipe),
        ("one.gguf", &gguf),
        ("checkpoint-1/manifest.json", &|path| {
            drop(checkpoint::verify(path.parent().unwrap()))
        }),
        ("checkpoint-2/state.json", &|path| {
            // The state is read if the manifest has its hash.
            let dir = path.parent().unwrap();
            fs::write(dir.join("manifest.json"), sealed(2, path)).unwrap();
            drop(checkpoint::load(dir))
        }),
        ("run/metrics.jsonl", &of_run),
        ("run/events.jsonl", &of_run),
        ("run/resolved.toml", &of_run),
        ("c.yaml", &of_yaml),
    ];
    fs::create_dir_all(dir.join("fuzz")).unwrap();
    let fuzzed = FUZZED.map(|(name, good)| {
        let file = format!("fuzz/{name}");
        fs::write(dir.join(&file), good).unwrap();
        let mut own = fuzz::TARGETS.iter().filter(|own| own.0 == name).map(|own| own.1);
        let target = own.next().unwrap_or_else(|| panic!("no target {name}"));
        (file, move |path: &Path| target(&fs::read(path).unwrap()))
    });
    let mut targets = files.to_vec();
    targets.extend(
        fuzzed
            .iter()
            .map(|(file, open)| (file.as_str(), open as &dyn Fn(&Path))),
    );
    let (mut cases, mut faults) = (0, Vec::new());
    for (n, (name, open)) in targets.iter().enumerate() {
        let path = dir.join(name);
        let good = fs::read(&path).unwrap();
        let fixed = taken_for_any(name, open, &path, &good);
        // The case that takes most of what it may.
        let mut worst = (0.0, String::new());
        // Large files are damaged where they have a structure.
        let most = std::env::var("FT_TEST_CASES")
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or(60);
        for case in 0..most {
            let rng = Rng::new(case, Stream::Sampling, &[n as u64]);
            let mut bytes = good.clone();
            if name.ends_with("safetensors") {
                let mut head = bytes[..8192].to_vec();
                damage(&mut head, &rng);
                bytes.splice(..8192, head);
            } else {
                damage(&mut bytes, &rng);
            }
            fs::write(&path, &bytes).unwrap();
            let most = fixed + BASE_BYTES + PER_BYTE * bytes.len();
            let what = format!("{name}, case {case}: a file of {} bytes may take {most}", bytes.len());
            println!("{what}");
            let (took, taken) = measured(open, &path, most + MOST_MORE);
            if took >= LONGEST || taken >= most {
                faults.push(format!("{what}, took {taken} and {took:?}"));
            }
            let part = taken as f64 / most as f64;
            if part > worst.0 {
                worst = (part, format!("{what}, took {taken}"));
            }
            cases += 1;
        }
        println!("{name}: {fixed} bytes for any file; nearest to the limit: {}", worst.1);
        fs::write(&path, &good).unwrap();
    }
    fs::remove_dir_all(fuzz::dir()).unwrap();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    cases
}

#[test]
#[ignore = "runs only as the child of the test below"]
fn all() {
    if case().is_some() {
        let dir = tempfile::tempdir().unwrap();
        println!("{RESULT}{} damaged files", open_all(dir.path()));
    }
}

/// Row F6.
/// Row F11. `FT_TEST_CASES=10000` damages each file so often.
#[test]
fn damaged_files_end_in_time_and_within_memory() {
    passes("parsers::all");
}
