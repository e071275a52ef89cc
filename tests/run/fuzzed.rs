//! The fuzz targets (`fuzz/`) without coverage: every target gets its seeds, whole and damaged.

#[path = "../../fuzz/src/lib.rs"]
mod targets;

use crate::bench::goldens;
use ft::base::rng::{Rng, Stream};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Good inputs of a target.
fn seeds(name: &str) -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = |path: &str| fs::read(root.join(path)).unwrap();
    let golden = |path: &str| fs::read(goldens().join(path)).unwrap();
    let text = |text: &str| text.as_bytes().to_vec();
    match name {
        "safetensors" => vec![golden("training/models/llama/model.safetensors")[..4096].to_vec()],
        "index" => vec![text(
            "{\"metadata\": {\"total_size\": 9}, \"weight_map\": {\"model.norm.weight\": \"model.safetensors\"}}",
        )],
        "config" => vec![
            file("assets/tiny/config.json"),
            golden("families/gemma3/config.json"),
            golden("families/qwen3_moe/config.json"),
        ],
        "tokenizer" => vec![golden("tokenizers/chat/tokenizer.json")],
        "tokenizer_config" => vec![golden("tokenizers/chat/tokenizer_config.json")],
        "template" => ["chatml", "qwen3", "llama3.1"]
            .map(|name| file(&format!("crates/ft-formats/src/template/named/{name}.jinja")))
            .into(),
        "kwargs" => vec![text(
            "{\"enable_thinking\": false, \"bos_token\": \"x\", \"list\": [1, {\"a\": null}]}",
        )],
        "adapter" => vec![text(
            "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"q_proj\"], \
             \"rank_pattern\": {\"a.b\": 2}, \"bias\": \"none\"}",
        )],
        "jsonl" => vec![golden("data/messages.jsonl"), golden("preference/text.jsonl")],
        "json" => vec![text(
            "[{\"text\": \"one\"}, {\"prompt\": \"a\", \"completion\": \"b\"}]",
        )],
        "csv" => vec![text("prompt,completion\n\"a, \"\"b\"\"\",c\n1,2\n")],
        "arrow" => vec![golden("arrow/types.arrow")],
        "recipe" => vec![file("recipes/quickstart.toml"), file("recipes/sft-qwen.toml")],
        "argument" => vec![text(
            "tune.method=lora\ntune.lora.r=4\nmemory.budget=22GiB\nrlhf.rewards=[\"regex:[a]\", \"length:4\"]",
        )],
        "manifest" | "state" => vec![text(
            "{\"format\": 1, \"ft\": \"0.1.0\", \"step\": 1, \"files\": [{\"name\": \"a\", \"size\": 1, \"blake3\": \"00\"}], \
             \"seal\": \"00\"}",
        )],
        "metrics" => vec![text(
            "{\"step\":1,\"loss\":2.5,\"lr\":0.1}\n{\"step\":2,\"eval_loss\":2.0}\n",
        )],
        "events" => vec![text(
            "{\"event\":\"start\",\"steps\":2,\"time\":1.5}\n{\"event\":\"stop\",\"step\":2,\"reason\":\"done\"}\n",
        )],
        "resolved" => vec![text(
            "[train]\nmax_steps = 2  # recipe\n[model]\npath = \"m\"  # argument\n",
        )],
        "parquet" => vec![golden("parquet/plain.parquet"), golden("parquet/zstd.parquet")],
        "gguf" => vec![gguf_file()],
        other => panic!("{other} has no seed"),
    }
}

/// Inputs that fuzzing with coverage found (`fuzz/run.sh keep`), one a line in Rust's escapes.
fn kept(name: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fuzz/kept/{name}.txt"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().map(unescaped).collect()
}

fn unescaped(line: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut bytes = line.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'\\' => match bytes.next().unwrap() {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'x' => {
                    let mut digit = || char::from(bytes.next().unwrap()).to_digit(16).unwrap() as u8;
                    digit() << 4 | digit()
                }
                other => other,
            },
            byte => byte,
        });
    }
    out
}

fn gguf_file() -> Vec<u8> {
    use ft::formats::gguf::{BlockType, MetadataValue, TensorEntry, write};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("seed.gguf");
    let keys = [
        ("general.architecture".to_string(), MetadataValue::Text("llama".into())),
        ("a.count".to_string(), MetadataValue::U32(3)),
        (
            "a.list".to_string(),
            MetadataValue::Texts(vec!["x".into(), "yz".into()]),
        ),
    ];
    let tensor = |name: &str, shape: &[usize], block| TensorEntry {
        name: name.into(),
        shape: shape.to_vec(),
        block,
    };
    let tensors = [
        tensor("a", &[2, 3], BlockType::F32),
        tensor("b", &[1, 64], BlockType::of(8).unwrap()),
    ];
    write(&path, &keys, &tensors, |tensor, put| {
        put(&vec![1; tensor.bytes() as usize])
    })
    .unwrap();
    fs::read(&path).unwrap()
}

fn damaged(good: &[u8], rng: &Rng) -> Vec<u8> {
    let mut bytes = good.to_vec();
    let mut at = 0;
    let mut draw = |n: usize| {
        at += 1;
        rng.below(at, n.max(1) as u64) as usize
    };
    for _ in 0..1 + draw(4) {
        let place = draw(bytes.len());
        let end = (place + 1 + draw(60)).min(bytes.len());
        match draw(6) {
            0 => bytes.truncate(place),
            1 if place < bytes.len() => bytes[place] = draw(256) as u8,
            2 => drop(bytes.drain(place..end)),
            3 => {
                let part = bytes[place..end].to_vec();
                let to = draw(bytes.len());
                bytes.splice(to..to, part.repeat(1 + draw(8)));
            }
            4 => drop(bytes.splice(place..place, *b"[{\"(\n-9,:e}]")),
            _ => {
                let number: &[u8] = [&b"-1"[..], b"1e999", b"18446744073709551616", b"0", b"null"][draw(5)];
                bytes.splice(place..end, number.iter().copied());
            }
        }
    }
    bytes
}

/// Row F11. The seeds, and what fuzzing found: it reaches parts of the parsers that the seeds do not. `FT_TEST_CASES=100000` damages each seed so often.
#[test]
fn fuzz_targets_take_whole_and_damaged_seeds() {
    let most = std::env::var("FT_TEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(12u64);
    let only = std::env::var("FT_FUZZ").ok();
    assert_eq!(unescaped(r"a\\\n\x0fz"), b"a\\\n\x0fz");
    let mut files = 0;
    for (n, (name, target)) in targets::TARGETS.iter().enumerate() {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        for (k, good) in seeds(name).iter().enumerate() {
            target(good);
            for case in 0..most {
                let bytes = damaged(good, &Rng::new(case, Stream::Sampling, &[n as u64, k as u64]));
                let started = Instant::now();
                let ran = std::panic::catch_unwind(|| target(&bytes));
                assert!(
                    ran.is_ok() && started.elapsed() < Duration::from_secs(20),
                    "{name}, seed {k}, case {case}"
                );
            }
        }
        for bytes in kept(name) {
            let started = Instant::now();
            let ran = std::panic::catch_unwind(|| target(&bytes));
            let text = bytes.escape_ascii();
            assert!(
                ran.is_ok() && started.elapsed() < Duration::from_secs(20),
                "{name}: {text}"
            );
            files += 1;
        }
    }
    assert!(files > 200 || only.is_some(), "{files}");
    fs::remove_dir_all(targets::dir()).unwrap();
}
