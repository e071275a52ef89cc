//! The fuzz targets (`fuzz/`) without coverage: every target gets its seeds, whole and damaged.

#[path = "../../fuzz/targets/mutate.rs"]
mod mutate;
#[path = "../../fuzz/targets/structure.rs"]
mod structure;
#[path = "../../fuzz/src/lib.rs"]
mod targets;

use crate::bench::goldens;
use ft::base::rng::{Rng, Stream};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Settings of quantized weights, and one that they are of in the model of the target.
const QUANTIZED: [(&str, &str); 7] = [
    (
        "\"gptq\", \"bits\": 4, \"group_size\": 32, \"desc_act\": false",
        "gptq4",
    ),
    (
        "\"gptq\", \"bits\": 3, \"group_size\": 32, \"checkpoint_format\": \"gptq_v2\"",
        "gptq3",
    ),
    ("\"awq\", \"bits\": 4, \"group_size\": 32, \"version\": \"gemm\"", "awq"),
    ("\"fp8\", \"weight_block_size\": [32, 32]", "block"),
    ("\"bitsandbytes\", \"load_in_8bit\": true", "int8"),
    (
        "\"bitsandbytes\", \"load_in_4bit\": true, \"bnb_4bit_quant_type\": \"nf4\"",
        "nf4",
    ),
    (
        "\"compressed-tensors\", \"format\": \"pack-quantized\", \"config_groups\": \
         {\"group_0\": {\"weights\": {\"num_bits\": 4, \"type\": \"int\"}}}",
        "packed4",
    ),
];

fn quantized(settings: &str) -> Vec<u8> {
    format!("{{\"model_type\": \"llama\", \"quantization_config\": {{\"quant_method\": {settings}}}}}").into_bytes()
}

/// Rows with votes; two of them are alike, and one has the words of an evaluation.
const VOTES: &str = "{\"text\": \"a b c d e f\", \"v\": \"good\"}\n{\"text\": \"a b c d e f\", \"v\": [1, 1, 0]}\n\
                     {\"text\": \"x one two three four five six seven eight nine\", \"v\": null}\n{\"text\": \"g\", \"v\": true}\n";
/// Rows with values inside of columns.
const PATHS: &str = "{\"q\": \"one\", \"a\": {\"text\": [\"x\", \"y\"]}}\n{\"q\": \"two\", \"a\": {\"text\": []}}\n\
                     {\"q\": \"three\", \"a\": {\"text\": [4]}}\n";

/// An input of the target `options`: its choices (render, long, trained part, longest row, overlap, duplicates, format, template,
/// window, evaluation, kind of file), the line with columns, and rows.
fn options(choices: [usize; 11], line: &str, rows: &str) -> Vec<u8> {
    const COUNTS: [usize; 11] = [3, 4, 3, 4, 4, 3, 8, 2, 3, 2, 2];
    let number = (0..11).rev().fold(0, |number, i| number * COUNTS[i] + choices[i]);
    let number = u32::try_from(number).unwrap();
    [&number.to_le_bytes()[..], line.as_bytes(), b"\n", rows.as_bytes()].concat()
}

/// Good inputs of a target.
fn seeds(name: &str) -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = |path: &str| fs::read(root.join(path)).unwrap();
    let golden = |path: &str| fs::read(goldens().join(path)).unwrap();
    let text = |text: &str| text.as_bytes().to_vec();
    match name {
        "safetensors" => vec![
            golden("training/models/llama/model.safetensors")[..4096].to_vec(),
            safetensors_file(),
        ],
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
        "special_tokens" => vec![text(
            "{\"eos_token\": {\"content\": \"<|im_end|>\", \"lstrip\": false}, \"pad_token\": \"<|endoftext|>\", \"<extra>\": 900}",
        )],
        "generation_config" => vec![file("assets/tiny/generation_config.json")],
        "quantized" => QUANTIZED.map(|(settings, _)| quantized(settings)).into(),
        "template" => ["chatml", "qwen3", "llama3.1"]
            .map(|name| file(&format!("crates/ft-formats/src/template/named/{name}.jinja")))
            .into(),
        "kwargs" => vec![text(
            "{\"enable_thinking\": false, \"bos_token\": \"x\", \"list\": [1, {\"a\": null}]}",
        )],
        "adapter" => vec![text(
            "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"q_proj\"], \
             \"rank_pattern\": {\"a.b\": 2}, \"bias\": \"none\", \"trainable_token_indices\": {\"lm_head\": [3, 1]}}",
        )],
        "jsonl" => vec![golden("data/messages.jsonl"), golden("preference/text.jsonl")],
        "json" => vec![text(
            "[{\"text\": \"one\"}, {\"prompt\": \"a\", \"completion\": \"b\"}]",
        )],
        "csv" => vec![text("prompt,completion\n\"a, \"\"b\"\"\",c\n1,2\n")],
        "preference" => ["text", "messages", "implicit", "margins", "judged"]
            .map(|name| golden(&format!("preference/{name}.jsonl")))
            .into(),
        "prompts" => vec![
            text(
                "{\"prompt\": \"add 3 and 4\", \"answer\": 7}\n\
                 {\"prompt\": [{\"role\": \"user\", \"content\": \"q\"}], \"answer\": [\"a\", \"b\"]}\n",
            ),
            golden("data/messages.jsonl"),
        ],
        "arrow" => vec![golden("arrow/types.arrow")],
        "recipe" => vec![file("recipes/quickstart.toml"), file("recipes/sft-qwen.toml")],
        "argument" => vec![text(
            "tune.method=lora\ntune.lora.r=4\nmemory.budget=22GiB\nrlhf.rewards=[\"regex:[a]\", \"length:4\"]",
        )],
        "yaml" => vec![
            text(
                "base_model: m\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\nadapter: lora\nlora_r: 8\n\
                 betas: [0.9, 0.95]\nx: |\n  one\n\n  two\n",
            ),
            text(
                "model_name_or_path: m\nfinetuning_type: lora\nstage: dpo\ndataset: own\nown:\n  file_name: o.json\n  \
                 columns: {prompt: q, response: r}\n",
            ),
            text(
                "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: own, other\n\n\0\n{\"own\": {\"hf_hub_url\": \"a/b\", \
                 \"split\": \"train\", \"num_samples\": 9}, \"other\": {\"file_name\": \"o.json\", \"formatting\": \"sharegpt\", \
                 \"columns\": {\"messages\": \"talk\"}, \"tags\": {\"role_tag\": \"who\", \"user_tag\": \"me\"}}}\n",
            ),
        ],
        "manifest" => {
            let hash = blake3::hash(b"{}").to_hex();
            let files = format!("[{{\"name\": \"state.json\", \"size\": 2, \"blake3\": \"{hash}\"}}]");
            let head = "{\"format\": 1, \"ft\": \"0.1.0\", \"step\": 1, \"files\":";
            vec![text(&format!("{head} {files}, \"seal\": \"00\"}}"))]
        }
        "state" => vec![text(
            "{\"recipe\": {\"train.seed\": \"1\"}, \"made_by\": {\"program\": \"a\"}, \"data\": \"aa\", \"base\": \"b:c\", \
             \"stage\": true, \"trained_tokens\": 3}",
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
        "run" => vec![text(&format!(
            "{{\"format\": \"ft run 1\", \"ft\": \"0.1.0\", \"processes\": [7, 8], \"final\": {{\"config.json\": [2, 5, \"{}\"]}}}}\n",
            blake3::hash(b"{}").to_hex()
        ))],
        "lock" => vec![
            text("process 1 since 2026-01-01 00:00:00 UTC\n"),
            text("process 4000000 since unix time 1767225600 on other.example (process namespace 4026531836)\n"),
        ],
        "token_cache" => vec![text(
            "{\"format\":\"ft token cache 3\",\"fingerprint\":\"aa\",\"stats\":{\"rows\":2},\"readings\":[{\"file\":0,\"columns\":[\"text\"],\
             \"skipped\":[]}],\"chunks\":[{\"read\":2,\"rows\":2,\"tokens\":9,\"hash\":\"00\",\"stats\":{},\"sources\":[[2,0]]}],\"screened\":null}",
        )],
        "teacher_cache" => vec![text(
            "{\"format\": \"ft teacher outputs 1\", \"key\": \"00\", \"common\": 8, \"k\": 4, \"temperature\": 1.5, \"data\": \"aa\", \
             \"teacher\": \"b:c\", \"shards\": 0, \"documents\": 0, \"tokens\": 0}\n",
        )],
        "hub" => {
            let (git, sha) = ("1".repeat(40), "2".repeat(64));
            vec![text(&format!(
                "[{{\"type\": \"file\", \"path\": \"data/train-0.jsonl\", \"oid\": \"{git}\", \"size\": 3}}, {{\"type\": \"file\", \
                 \"path\": \"m.safetensors\", \"oid\": \"{git}\", \"size\": 9, \"lfs\": {{\"oid\": \"{sha}\", \"size\": 9}}}}]"
            ))]
        }
        "request" => vec![text(
            "GET /token/live?runs=0:5 HTTP/1.1\r\nHost:  127.0.0.1:8000 \r\nAccept: */*",
        )],
        "score" => vec![
            text("0.5"),
            text("{\"score\": -1e-3, \"why\": \"short\"}"),
            text("null"),
        ],
        "text" => vec![
            text("\x00one line\ntwo\n"),
            text("\x19one\ntwo\n\nthree\n"),
            text("\x12prompt\tcompletion\nq\ta\nr\tb\n"),
        ],
        "options" => vec![
            options([0, 0, 0, 0, 2, 0, 0, 1, 1, 0, 0], "judge=v", VOTES),
            options(
                [1, 2, 1, 1, 1, 1, 1, 0, 2, 1, 0],
                "prompt=q|completion=a.text[0]|system_prompt=Be brief",
                PATHS,
            ),
            options(
                [2, 1, 2, 3, 0, 0, 0, 1, 1, 0, 0],
                "template=Say {q}|completion=a.text[-1]|limit=2",
                PATHS,
            ),
        ],
        // Its inputs are those of `fuzz/kept`.
        other => {
            assert!(!kept(other).is_empty(), "{other} has no seed");
            Vec::new()
        }
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

fn safetensors_file() -> Vec<u8> {
    let head = br#"{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"e":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}"#;
    [&(head.len() as u64).to_le_bytes()[..], &head[..], &[0u8; 9][..]].concat()
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

/// The longest input of a target.
const LONGEST: usize = 1 << 16;

/// A panic, or more than 20 s, is a fault.
fn run(target: targets::Target, bytes: &[u8], what: std::fmt::Arguments) {
    let started = Instant::now();
    let ran = std::panic::catch_unwind(|| target(bytes));
    assert!(
        ran.is_ok() && started.elapsed() < Duration::from_secs(20),
        "{what}: {} bytes: {}",
        bytes.len(),
        bytes[..bytes.len().min(2000)].escape_ascii()
    );
}

/// Row F11. The seeds, and what fuzzing found: it reaches parts of the parsers that the seeds do not. `FT_TEST_CASES=100000` damages
/// each seed so often, and each input of `fuzz/kept` a sixth of that.
#[test]
fn fuzz_targets_take_whole_and_damaged_seeds() {
    let most = std::env::var("FT_TEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(12u64);
    let only = std::env::var("FT_FUZZ").ok();
    assert_eq!(unescaped(r"a\\\n\x0fz"), b"a\\\n\x0fz");
    for (settings, weight) in QUANTIZED {
        let found = targets::quantized::read(&quantized(settings));
        assert!(found.contains(&weight), "{settings}: {found:?}");
    }
    let mut files = 0;
    for (n, (name, target)) in targets::TARGETS.iter().enumerate() {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let damage =
            |bytes: &[u8], k: usize, case| damaged(bytes, &Rng::new(case, Stream::Sampling, &[n as u64, k as u64]));
        for (k, good) in seeds(name).iter().enumerate() {
            run(*target, good, format_args!("{name}, seed {k}"));
            for case in 0..most {
                run(
                    *target,
                    &damage(good, k, case),
                    format_args!("{name}, seed {k}, case {case}"),
                );
            }
            for seed in 0..most as u32 / 3 {
                let by_structure = structure::mutated(good, LONGEST, seed);
                if let Some(new) = by_structure.or_else(|| mutate::mutated(good, LONGEST, seed, &[])) {
                    run(*target, &new, format_args!("{name}, seed {k}, mutation {seed}"));
                }
            }
        }
        for (k, bytes) in kept(name).iter().enumerate() {
            run(*target, bytes, format_args!("{name}, input {k} of fuzz/kept"));
            for case in 0..most / 6 {
                run(
                    *target,
                    &damage(bytes, 1000 + k, case),
                    format_args!("{name}, input {k} of fuzz/kept, case {case}"),
                );
            }
            files += 1;
        }
    }
    assert!(files > 200 || only.is_some(), "{files}");
    fs::remove_dir_all(targets::dir()).unwrap();
}

/// The words come from the source of the parsers: a file that was renamed is found here.
#[test]
fn every_fuzz_target_has_a_dictionary() {
    for (name, _) in targets::TARGETS {
        let words = targets::words::words(name);
        let fit = words.iter().all(|word| (1..=64).contains(&word.len()));
        assert!(words.len() > 3 && fit, "{name}: {words:?}");
    }
    for (name, word) in [
        ("config", "\"qwen3_moe\""),
        ("recipe", "\n[train]\n"),
        ("quantized", "\"gptq\""),
        ("template", "endfor"),
    ] {
        assert!(targets::words::words(name).iter().any(|w| w == word), "{name}: {word}");
    }
}

/// Mutations of a file by its structure: the places of bytes that changed in a mutation of the same length, and how many mutations have
/// another length.
fn mutations(file: &[u8], count: u32) -> (Vec<usize>, usize) {
    let (mut places, mut other) = (vec![false; file.len()], 0);
    for seed in 0..count {
        let new = structure::mutated(file, LONGEST, seed).unwrap();
        assert_eq!(
            structure::mutated(file, LONGEST, seed).as_ref(),
            Some(&new),
            "seed {seed}"
        );
        if new.len() == file.len() {
            let changed = file.iter().zip(&new).map(|(a, b)| a != b);
            places
                .iter_mut()
                .zip(changed)
                .for_each(|(place, changed)| *place |= changed);
        } else {
            other += 1;
        }
    }
    let places = (0..file.len()).filter(|place| places[*place]).collect();
    (places, other)
}

#[test]
fn a_mutation_of_parquet_changes_its_footer_and_its_pages_and_no_length_or_mark() {
    for name in ["plain", "zstd", "masks"] {
        let file = fs::read(goldens().join(format!("parquet/{name}.parquet"))).unwrap();
        let footer = structure::footer(&file).unwrap();
        let (places, longer) = mutations(&file, 1500);
        assert!(longer > 50, "{name}: {longer}");
        let in_pages = places.iter().filter(|place| **place < footer.start).count();
        let in_footer = places.len() - in_pages;
        assert!(in_pages > 50 && in_footer > 100, "{name}: {in_pages}, {in_footer}");
        assert!(places.iter().all(|place| (4..footer.end).contains(place)), "{name}");
        for seed in 0..300 {
            let new = structure::mutated(&file, LONGEST, seed).unwrap();
            let found = structure::footer(&new).unwrap();
            assert_eq!(
                (found.start, found.end),
                (footer.start, new.len() - 8),
                "{name}, seed {seed}"
            );
        }
        assert_eq!(structure::mutated(&file, file.len() / 2, 1), None);
    }
}

#[test]
fn a_mutation_of_arrow_changes_messages_and_buffers_and_no_length_or_mark() {
    for name in ["types.arrow", "types-stream.arrow"] {
        let file = fs::read(goldens().join(format!("arrow/{name}"))).unwrap();
        let messages = structure::messages(&file);
        // Schema, two dictionaries, two batches; a file also has its footer.
        assert_eq!(messages.len(), if name == "types.arrow" { 6 } else { 5 }, "{name}");
        let inside = |place: usize| {
            messages
                .iter()
                .any(|m| m.fields.contains(&place) || m.buffers.contains(&place))
        };
        let (places, other) = mutations(&file, 1500);
        if name == "types.arrow" {
            assert!(other == 0 && places.iter().all(|place| inside(*place)), "{other}");
        } else {
            // Messages of a stream are removed and repeated.
            assert!(other > 50, "{other}");
        }
        assert!(places.len() > file.len() / 8, "{name}: {}", places.len());
    }
    assert_eq!(structure::mutated(b"{\"text\": \"a\"}", LONGEST, 2), None);
}

#[test]
fn a_mutation_of_json_keeps_the_length_of_a_safetensors_header() {
    let file = safetensors_file();
    let mut different = 0;
    for seed in 0..500 {
        let new = mutate::mutated(&file, LONGEST, seed, &["\"F16\"".to_string()]).unwrap();
        let length = u64::from_le_bytes(*new.first_chunk().unwrap()) as usize;
        assert!(
            serde_json::from_slice::<serde_json::Value>(&new[8..8 + length]).is_ok(),
            "seed {seed}"
        );
        assert!(new.ends_with(&[0; 9]));
        different += u32::from(new != file);
    }
    assert!(different > 300, "{different}");
    assert_eq!(mutate::mutated(b"no JSON", LONGEST, 0, &[]), None);
}
