//! The parsers of ft as functions of bytes. Each gives a value or an error; a panic, a hang or too much memory is a fault.
//!
//! Bytes that are read by path are put into a file of a directory in memory, beside good files that it belongs to.

mod events;

use ft::base::Result;
use ft::data::{self, ChatRender, Dataset, Long, Render, TrainOn};
use ft::formats::{AdapterConfig, ChatTemplate, Config, Tokenizer, Weights, gguf as ggufs};
use ft::{checkpoint, history, model, recipe};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A template that ft has.
const CHATML: &str = include_str!("../../crates/ft-formats/src/template/named/chatml.jinja");

pub type Target = fn(&[u8]);

/// Name and function of each target.
pub const TARGETS: [(&str, Target); 21] = [
    ("safetensors", safetensors),
    ("index", index),
    ("config", config),
    ("tokenizer", tokenizer),
    ("tokenizer_config", tokenizer_config),
    ("template", template),
    ("kwargs", kwargs),
    ("adapter", adapter),
    ("jsonl", jsonl),
    ("json", json_rows),
    ("csv", csv),
    ("parquet", parquet),
    ("gguf", gguf),
    ("arrow", arrow),
    ("recipe", recipe_text),
    ("argument", argument),
    ("manifest", manifest),
    ("state", state),
    ("metrics", metrics),
    ("events", event_lines),
    ("resolved", resolved),
];

/// The tiny model of the repository; this file is also a module of `tests/run`. `run.sh` names the repository, because the program
/// may run where the place of its build is gone.
fn tiny() -> PathBuf {
    if let Some(root) = std::env::var_os("FT_FUZZ_ROOT") {
        return Path::new(&root).join("assets/tiny");
    }
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tiny = own.ancestors().map(|dir| dir.join("assets/tiny"));
    tiny.take(2).find(|dir| dir.is_dir()).unwrap()
}

/// A directory of this process in memory.
pub fn dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() {
            memory.to_path_buf()
        } else {
            std::env::temp_dir()
        };
        let dir = parent.join(format!("ft-fuzz-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    })
}

/// `bytes` in the file `name`; its directory.
fn put(name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

/// As `put`, in a copy of the tiny model that is made once.
fn beside_model(name: &str, bytes: &[u8]) -> PathBuf {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    let model = MODEL.get_or_init(|| {
        let to = dir().join("model");
        fs::create_dir_all(&to).unwrap();
        for entry in fs::read_dir(tiny()).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
        to
    });
    fs::write(model.join(name), bytes).unwrap();
    model.clone()
}

fn good_tokenizer() -> &'static Tokenizer {
    static GOOD: OnceLock<Tokenizer> = OnceLock::new();
    GOOD.get_or_init(|| Tokenizer::load(&tiny()).unwrap())
}

/// The text of an error is part of what is tested.
fn said<T>(result: Result<T>) -> Option<T> {
    result.map_err(|e| e.to_string().len()).ok()
}

fn safetensors(bytes: &[u8]) {
    let path = put("one.safetensors", bytes);
    if let Some(weights) = said(Weights::open_file(&path)) {
        let names: Vec<String> = weights.names().map(str::to_string).collect();
        for name in names {
            said(weights.read_f32(&name));
            said(weights.read_bytes(&name));
        }
    }
}

fn index(bytes: &[u8]) {
    said(Weights::open(&beside_model("model.safetensors.index.json", bytes)));
}

fn config(bytes: &[u8]) {
    let path = put("config/config.json", bytes);
    if let Some(config) = said(Config::load(path.parent().unwrap()))
        && let Some(spec) = said(model::families::read(&config))
    {
        // As a plan does it.
        if spec.layers.len() <= 64 {
            drop(spec.params());
        }
    }
}

fn with_tokenizer(dir: &Path) {
    if let Some(tokenizer) = said(Tokenizer::load(dir)) {
        if let Some(ids) = said(tokenizer.encode("Two plus three is\n<|im_end|> \u{e9}\u{1f600}", true)) {
            said(tokenizer.decode(&ids, false));
        }
        tokenizer.end_conflict();
        said(ChatTemplate::from_dir(dir, &tokenizer));
    }
}

fn tokenizer(bytes: &[u8]) {
    let path = put("tokenizer/tokenizer.json", bytes);
    with_tokenizer(path.parent().unwrap());
}

fn tokenizer_config(bytes: &[u8]) {
    static FIRST: OnceLock<()> = OnceLock::new();
    let path = put("named/tokenizer_config.json", bytes);
    let dir = path.parent().unwrap();
    FIRST.get_or_init(|| {
        fs::copy(tiny().join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    });
    with_tokenizer(dir);
}

fn messages() -> [Value; 4] {
    [
        json!({"role": "system", "content": "Be brief"}),
        json!({"role": "user", "content": "Hi {{ x }} \u{e9}"}),
        json!({"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, null]}}}]}),
        json!({"role": "tool", "content": "3", "name": "f"}),
    ]
}

fn render(template: ChatTemplate) {
    let template = template.trusted(|_| {});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    said(template.render(&messages(), Some(&tools), true));
    said(template.render_marked(&messages()[1..2], None, false));
    template.marks_generation(None);
    template.identity();
}

fn template(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(template) = said(ChatTemplate::from_text(text, "t", good_tokenizer()))
    {
        render(template);
    }
}

/// Variables for a template that ft has.
fn kwargs(bytes: &[u8]) {
    if let Ok(Value::Object(map)) = serde_json::from_slice(bytes)
        && let Some(template) = said(ChatTemplate::with_tokens(CHATML, "t", map))
    {
        render(template);
    }
}

fn adapter(bytes: &[u8]) {
    let path = put("adapter/adapter_config.json", bytes);
    said(AdapterConfig::load(path.parent().unwrap()));
}

fn rows(name: &str, bytes: &[u8]) {
    static TEMPLATE: OnceLock<ChatTemplate> = OnceLock::new();
    let template = TEMPLATE.get_or_init(|| {
        let text = ChatTemplate::from_text(CHATML, "chatml", good_tokenizer()).unwrap();
        text.trusted(|_| {})
    });
    let path = put(name, bytes);
    let spec = data::DatasetSpec {
        sources: &[data::Source::new(vec![path.to_string_lossy().into_owned()])],
        render: Render::Auto,
        max_length: 128,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 512,
        screen: None,
    };
    said(Dataset::load(
        &spec,
        good_tokenizer(),
        Some(template as &dyn ChatRender),
    ));
}

fn jsonl(bytes: &[u8]) {
    rows("rows.jsonl", bytes);
}

fn json_rows(bytes: &[u8]) {
    rows("rows.json", bytes);
}

fn csv(bytes: &[u8]) {
    rows("rows.csv", bytes);
}

fn parquet(bytes: &[u8]) {
    rows("rows.parquet", bytes);
}

fn arrow(bytes: &[u8]) {
    rows("rows.arrow", bytes);
}

/// A file that can be read is written again and read again.
fn gguf(bytes: &[u8]) {
    let path = put("one.gguf", bytes);
    let Some(first) = said(ggufs::GgufReader::open(&path)) else {
        return;
    };
    let names: BTreeSet<&str> = first.tensors.iter().map(|t| t.name.as_str()).collect();
    let read: Vec<Vec<u8>> = first
        .tensors
        .iter()
        .filter_map(|t| said(first.bytes(&t.name)))
        .collect();
    said(names.first().map_or(Ok(Vec::new()), |name| first.values(name)));
    if names.len() < first.tensors.len() || read.len() < first.tensors.len() {
        return;
    }
    let keys: Vec<(String, ggufs::MetadataValue)> = first.keys.clone().into_iter().collect();
    let again = dir().join("again.gguf");
    let mut data = read.iter();
    let written = ggufs::write(&again, &keys, &first.tensors, |_, put| put(data.next().unwrap()));
    if said(written).is_some() {
        let second = ggufs::GgufReader::open(&again).unwrap();
        assert_eq!(format!("{:?}", second.keys), format!("{:?}", first.keys));
        assert_eq!(second.tensors, first.tensors);
        let same = |(t, bytes): (&ggufs::TensorEntry, &Vec<u8>)| second.bytes(&t.name).unwrap() == *bytes;
        assert!(first.tensors.iter().zip(&read).all(same));
    }
}

fn recipe_text(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(loaded) = said(recipe::parse(text, "r.toml", &[]))
    {
        // The recipe that a run writes is read again.
        let again = recipe::parse(&loaded.resolved, "resolved.toml", &[]);
        assert!(
            again.is_ok(),
            "{}\n{}",
            loaded.resolved,
            again.err().map(|e| e.to_string()).unwrap_or_default()
        );
    }
}

/// An argument `key=value`.
fn argument(bytes: &[u8]) {
    const TEXT: &str = "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n";
    if let Ok(text) = std::str::from_utf8(bytes) {
        let words: Vec<String> = text.split('\n').map(str::to_string).collect();
        said(recipe::parse(TEXT, "r.toml", &words));
    }
}

fn manifest(bytes: &[u8]) {
    let path = put("checkpoint-1/manifest.json", bytes);
    said(checkpoint::verify(path.parent().unwrap()));
}

/// A checkpoint of which every file is the same bytes.
fn state(bytes: &[u8]) {
    let path = put("checkpoint-2/state.json", bytes);
    put("checkpoint-2/manifest.json", bytes);
    said(checkpoint::load(path.parent().unwrap()));
}

fn run_with(name: &str, bytes: &[u8]) {
    for (file, good) in [
        ("resolved.toml", "[train]\nmax_steps = 2\n"),
        ("events.jsonl", "{\"event\":\"start\",\"steps\":2,\"time\":1.0}\n"),
        (
            "metrics.jsonl",
            "{\"step\":1,\"loss\":2.0}\n{\"step\":2,\"loss\":1.0}\n",
        ),
        ("plan.json", "{}"),
    ] {
        put(&format!("run/{file}"), good.as_bytes());
    }
    let path = put(&format!("run/{name}"), bytes);
    if let Some(run) = said(history::RunRecord::read(path.parent().unwrap())) {
        for name in run.curves.names() {
            if let Some(curve) = run.curves.get(name) {
                curve.recent(3);
                curve.smoothed().thinned(7);
            }
        }
    }
}

/// A line of metrics as an event of TensorBoard.
fn numbers(line: &[u8]) -> Option<events::Event> {
    let line: Value = serde_json::from_slice(line).ok()?;
    let step = line.get("step")?.as_u64()?;
    let others = line
        .as_object()?
        .iter()
        .filter(|(name, _)| *name != "step" && *name != "time");
    let values = others.filter_map(|(name, value)| {
        let tag = match name.strip_prefix("eval_") {
            Some(rest) => format!("eval/{rest}"),
            None => format!("train/{name}"),
        };
        Some((tag, value.as_f64()? as f32))
    });
    Some((
        line.get("time").and_then(Value::as_f64).unwrap_or(10.0),
        step,
        values.collect(),
    ))
}

/// Also what is written of them for other tools.
fn metrics(bytes: &[u8]) {
    run_with("metrics.jsonl", bytes);
    let write = |form| {
        said(history::export(
            &dir().join("run"),
            form,
            10.0,
            &BTreeMap::new(),
            &dir().join("out"),
        ))
    };
    if let Some(files) = write(history::ExportFormat::TensorBoard) {
        let written = events::read(&fs::read(&files[0]).unwrap());
        let wanted: Vec<events::Event> = bytes.split(|b| *b == b'\n').filter_map(numbers).collect();
        assert_eq!(format!("{written:?}"), format!("{wanted:?}"));
    }
    write(history::ExportFormat::Csv);
    if let Some(files) = write(history::ExportFormat::Wandb) {
        let text = fs::read_to_string(&files[0]).unwrap();
        assert!(text.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    }
}

fn event_lines(bytes: &[u8]) {
    run_with("events.jsonl", bytes);
}

fn resolved(bytes: &[u8]) {
    run_with("resolved.toml", bytes);
}
