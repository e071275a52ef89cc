//! Ways to train, and the comparison of two runs, bit for bit.

use crate::bench::{Bench, files};
use ft::history;
use std::fs;

/// Settings by method or stage.
pub const METHODS: [(&str, &[&str]); 13] = [
    (
        "block",
        &["tune.method=block", "tune.block.switch_every=4", "model.dtype=bf16"],
    ),
    (
        // A deactivated block is written to the disk; checkpoints contain it too.
        "block from the disk",
        &[
            "tune.method=block",
            "tune.block.partition=module",
            "tune.block.switch_every=2",
            "memory.tier=disk",
            "model.dtype=bf16",
        ],
    ),
    (
        "block of codes from the disk",
        &[
            "tune.method=block",
            "tune.block.switch_every=3",
            "memory.tier=disk",
            "memory.frozen_weights=nf4",
        ],
    ),
    (
        "full",
        &[
            "tune.method=full",
            "data.packing=true",
            "train.neftune_noise_alpha=5",
            "train.label_smoothing_factor=0.1",
            "data.eval_fraction=0.3",
            "train.eval_steps=3",
        ],
    ),
    // With an event file of TensorBoard beside the metrics.
    (
        "lora",
        &[
            "tune.method=lora",
            "tune.lora.r=4",
            "tune.lora.lora_dropout=0.1",
            "train.neftune_noise_alpha=5",
            "data.eval_fraction=0.3",
            "train.eval_steps=1",
            "train.report_to=tensorboard",
        ],
    ),
    // An initialization that is subtracted from the base, with a separate rank for each linear.
    (
        "corda",
        &[
            "tune.method=lora",
            "tune.lora.r=4",
            "tune.lora.init_lora_weights=corda",
            "tune.lora.corda.adaptive_rank=true",
        ],
    ),
    (
        "dora",
        &["tune.method=lora", "tune.lora.r=4", "tune.lora.use_dora=true"],
    ),
    // The reference's log-probabilities are computed once; checkpoints store them.
    (
        "dpo",
        &[
            "train.stage=dpo",
            "data.train=pairs.jsonl",
            "data.eval_fraction=0.3",
            "train.eval_steps=5",
            "tune.method=lora",
            "tune.lora.r=4",
        ],
    ),
    (
        "kto",
        &[
            "train.stage=kto",
            "data.train=pairs.jsonl",
            "tune.method=block",
            "tune.block.switch_every=4",
        ],
    ),
    // The score head trains together with the blocks.
    (
        "reward",
        &[
            "train.stage=reward",
            "data.train=pairs.jsonl",
            "tune.method=block",
            "tune.block.switch_every=3",
            "memory.tier=disk",
        ],
    ),
    // The active ranks depend on the gradients of all earlier steps.
    (
        "adalora",
        &[
            "tune.method=lora",
            "tune.lora.r=4",
            "tune.lora.peft_type=adalora",
            "tune.lora.adalora.target_r=1",
            "tune.lora.adalora.deltaT=5",
            "tune.lora.adalora.tfinal=8",
        ],
    ),
    // Weights requantized by the initialization, and trained rows of embedding and head.
    (
        "loftq",
        &[
            "tune.method=lora",
            "tune.lora.r=4",
            "tune.lora.init_lora_weights=loftq",
            "tune.lora.loftq_iter=2",
            "tune.lora.trainable_token_indices=[40, 7]",
            "memory.frozen_weights=nf4",
        ],
    ),
    // A separate rank for each linear, and some linears without an adapter.
    (
        "eva",
        &[
            "tune.method=lora",
            "tune.lora.r=2",
            "tune.lora.init_lora_weights=eva",
            "tune.lora.eva.rho=8",
            "model.dtype=bf16",
        ],
    ),
];

/// Metrics that depend on time, on the memory of the process or on the number of ranks.
const MEASURED: [&str; 7] = [
    "time",
    "rollout_tokens_per_second",
    "tokens_per_second",
    "peak_memory_bytes",
    "copy_ms",
    "copy_hidden",
    "sent_bytes",
];

/// Asserts bit-equal lines of metrics and evaluations, the same samples, and the same files in `final/`.
pub fn assert_same(bench: &Bench, whole: &str, broken: &str) {
    assert_same_lines(bench, whole, broken);
    assert_same_final(bench, whole, broken);
}

/// Asserts bit-equal lines of metrics and evaluations, the same samples, and event files with the numbers of the metrics.
pub fn assert_same_lines(bench: &Bench, whole: &str, broken: &str) {
    let lines = |run: &str, name: &str| {
        if bench.path(run).join(name).exists() {
            bench.lines(&format!("{run}/{name}"))
        } else {
            Vec::new()
        }
    };
    for name in ["metrics.jsonl", "samples.jsonl"] {
        let (a, b) = (lines(whole, name), lines(broken, name));
        let steps = |all: &[serde_json::Value]| all.iter().map(|l| l["step"].as_u64()).collect::<Vec<_>>();
        assert_eq!(steps(&a), steps(&b), "{broken}: steps in {name}");
        for (a, b) in a.iter().zip(&b) {
            let (a, b) = (a.as_object().unwrap(), b.as_object().unwrap());
            for key in a.keys().chain(b.keys()).filter(|k| !MEASURED.contains(&k.as_str())) {
                assert_eq!(a.get(key), b.get(key), "{broken}: {key} at step {}", a["step"]);
            }
        }
    }
    let has_events = !event_files(bench, whole).is_empty();
    for run in [whole, broken] {
        assert_eq!(
            assert_event_file(bench, run),
            has_events,
            "{run}: there is an event file, or none"
        );
    }
}

/// The event files of a run with their names, in the order in which TensorBoard reads them.
fn event_files(bench: &Bench, run: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(bench.path(run)).unwrap().map(|e| e.unwrap().path());
    let named = entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path));
    let mut found: Vec<_> = named
        .filter(|(name, _)| history::is_event_file(name))
        .map(|(name, path)| (name, fs::read(path).unwrap()))
        .collect();
    found.sort();
    found
}

/// The records of an event file: each a length of 8 bytes, a checksum, the event, a checksum.
fn event_records(name: &str, bytes: &[u8]) -> Vec<Vec<u8>> {
    let (mut rest, mut out) = (bytes, Vec::new());
    while !rest.is_empty() {
        let length = rest.first_chunk().map(|length| u64::from_le_bytes(*length) as usize);
        let end = length.and_then(|length| length.checked_add(16));
        let end = end.filter(|end| *end <= rest.len());
        let end = end.unwrap_or_else(|| panic!("{name}: a record is cut off at {}", bytes.len() - rest.len()));
        out.push(rest[..end].to_vec());
        rest = &rest[end..];
    }
    out
}

/// Asserts that the last event file has the numbers of each line of the metrics once, and those before it have none. False if
/// there is no such file.
fn assert_event_file(bench: &Bench, run: &str) -> bool {
    let mut all = event_files(bench, run);
    let Some((last, bytes)) = all.pop() else { return false };
    // A process that goes on writes another file.
    for (name, bytes) in &all {
        let records = event_records(name, bytes).len();
        assert_eq!(records, 1, "{run}: {name} has more than its header beside {last}");
    }
    let records = event_records(&last, &bytes);
    let lines = bench.lines(&format!("{run}/metrics.jsonl"));
    let numbers = lines.iter().map(|line| history::event(line.as_object().unwrap()));
    let numbers: Vec<Vec<u8>> = numbers.collect();
    // Behind a header and the start of the run.
    assert!(
        records.len() == numbers.len() + 2 && records[2..] == numbers,
        "{run}: {last} has {} records, and not the numbers of the {} lines of metrics.jsonl",
        records.len(),
        numbers.len()
    );
    true
}

/// Asserts the same files in `final/`.
pub fn assert_same_final(bench: &Bench, whole: &str, broken: &str) {
    let (a, b) = (
        files(&bench.path(whole).join("final")),
        files(&bench.path(broken).join("final")),
    );
    assert_eq!(
        a.iter().map(|f| &f.0).collect::<Vec<_>>(),
        b.iter().map(|f| &f.0).collect::<Vec<_>>()
    );
    // An adapter with its own base contains the directory of its run.
    let plain = |name: &str, bytes: &[u8], run: &str| {
        if name.ends_with("adapter_config.json") {
            String::from_utf8_lossy(bytes)
                .replace(&format!("{run}/final"), "final")
                .into_bytes()
        } else {
            bytes.to_vec()
        }
    };
    for (a, b) in a.iter().zip(&b) {
        let same = plain(&a.0, &a.1, whole) == plain(&b.0, &b.1, broken);
        assert!(same, "{broken}: final/{} differs", a.0);
    }
}
