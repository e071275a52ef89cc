//! The parsers of ft as functions of bytes. Each gives a value or an error; a panic, a hang or too much memory is a fault.
//!
//! Bytes that are read by path are put into a file of a directory in memory, beside good files that it belongs to.

mod checkpoints;
mod events;
mod others;
pub mod quantized;

use ft::base::Result;
use ft::data::preference::PreferencePart;
use ft::data::prompts::{PromptLimits, PromptSpec, Prompts};
use ft::data::{self, ChatRender, Dataset, Long, Render, TrainOn};
use ft::formats::tokenizer::NewToken;
use ft::formats::writer::{TensorPlan, Values, write_file};
use ft::formats::{AdapterConfig, ChatTemplate, Config, Tokenizer, Weights, gguf as ggufs};
use ft::recipe::import::{Registry, import, registry_folder};
use ft::{hf, history, model, recipe};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A template that ft has.
const CHATML: &str = include_str!("../../crates/ft-formats/src/template/named/chatml.jinja");

pub type Target = fn(&[u8]);

/// Name and function of each target.
pub const TARGETS: [(&str, Target); 34] = [
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
    ("manifest", checkpoints::manifest),
    ("state", checkpoints::state),
    ("metrics", metrics),
    ("events", event_lines),
    ("resolved", resolved),
    ("special_tokens", special_tokens),
    ("generation_config", generation_config),
    ("quantized", quantized::target),
    ("preference", preference),
    ("prompts", prompts),
    ("yaml", yaml),
    ("run", others::run),
    ("lock", others::lock),
    ("token_cache", others::token_cache),
    ("teacher_cache", others::teacher_cache),
    ("hub", others::hub),
    ("request", others::request),
    ("score", others::score),
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

/// A directory with these files of the tiny model.
fn with_files(name: &str, files: &[&str]) -> PathBuf {
    let to = dir().join(name);
    if !to.is_dir() {
        fs::create_dir_all(&to).unwrap();
        for file in files {
            fs::copy(tiny().join(file), to.join(file)).unwrap();
        }
    }
    to
}

fn good_tokenizer() -> &'static Tokenizer {
    static GOOD: OnceLock<Tokenizer> = OnceLock::new();
    GOOD.get_or_init(|| Tokenizer::load(&tiny()).unwrap())
}

/// The text of an error is part of what is tested.
fn said<T>(result: Result<T>) -> Option<T> {
    result.map_err(|e| e.to_string().len()).ok()
}

/// A file that can be read is written again and read again.
fn safetensors(bytes: &[u8]) {
    let path = put("one.safetensors", bytes);
    let Some(first) = said(Weights::open_file(&path)) else {
        return;
    };
    let names: Vec<&str> = first.names().collect();
    for name in &names {
        said(first.read_f32(name));
    }
    let read: Vec<Vec<u8>> = names.iter().filter_map(|name| said(first.read_bytes(name))).collect();
    if read.len() < names.len() || first.total_bytes() > 1 << 20 {
        return;
    }
    let plans: Vec<TensorPlan> = first
        .names()
        .filter_map(|name| first.info(name))
        .map(|info| TensorPlan {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
        })
        .collect();
    let metadata: Vec<(String, String)> = first.metadata().clone().into_iter().collect();
    let again = dir().join("again.safetensors");
    let mut data = read.iter();
    // Numbers that are not finite are not written.
    let written = write_file(&again, &plans, &metadata, |_, put| {
        put(Values::Raw(data.next().unwrap()))
    });
    if said(written).is_some() {
        let second = Weights::open_file(&again).unwrap();
        let mut wanted = first.metadata().clone();
        wanted.entry("format".into()).or_insert_with(|| "pt".into());
        assert_eq!(*second.metadata(), wanted);
        assert!(second.names().eq(first.names()));
        for (plan, bytes) in plans.iter().zip(&read) {
            let info = second.info(&plan.name).unwrap();
            assert_eq!((info.dtype, &info.shape), (plan.dtype, &plan.shape));
            assert_eq!(second.read_bytes(&plan.name).unwrap(), *bytes);
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

fn with_tokenizer(dir: &Path) -> Option<Tokenizer> {
    let tokenizer = said(Tokenizer::load(dir))?;
    if let Some(ids) = said(tokenizer.encode("Two plus three is\n<|im_end|> \u{e9}\u{1f600}", true)) {
        said(tokenizer.decode(&ids, false));
    }
    tokenizer.end_conflict();
    said(ChatTemplate::from_dir(dir, &tokenizer));
    Some(tokenizer)
}

fn tokenizer(bytes: &[u8]) {
    let path = put("tokenizer/tokenizer.json", bytes);
    with_tokenizer(path.parent().unwrap());
}

fn tokenizer_config(bytes: &[u8]) {
    let dir = with_files("named", &["tokenizer.json"]);
    fs::write(dir.join("tokenizer_config.json"), bytes).unwrap();
    with_tokenizer(&dir);
}

/// The files that older tokenizers have beside the vocabulary, both with the same bytes.
fn special_tokens(bytes: &[u8]) {
    let dir = with_files("special", &["tokenizer.json"]);
    for name in ["special_tokens_map.json", "added_tokens.json"] {
        fs::write(dir.join(name), bytes).unwrap();
    }
    let Some(mut tokenizer) = with_tokenizer(&dir) else {
        return;
    };
    // An export lists a new token in these files.
    let token = NewToken {
        text: "<new>".into(),
        special: true,
    };
    said(tokenizer.add_tokens(&[token]));
    for (name, text) in said(tokenizer.files_with_added(&dir)).unwrap_or_default() {
        assert!(serde_json::from_slice::<Value>(&text).is_ok(), "{name}");
    }
}

fn generation_config(bytes: &[u8]) {
    let dir = with_files(
        "generation",
        &["tokenizer.json", "tokenizer_config.json", "config.json"],
    );
    fs::write(dir.join("generation_config.json"), bytes).unwrap();
    with_tokenizer(&dir);
    said(Tokenizer::ends_of(&dir));
    // An export writes the tokens that end an answer into it.
    if said(hf::set_stop_ids(&dir, &Map::new(), &[2, 0])).is_some() {
        assert_eq!(Tokenizer::ends_of(&dir).unwrap(), [2, 0]);
    }
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

/// Passes the bytes to `load` as a file with rows, with the chat template.
fn with_rows(name: &str, bytes: &[u8], load: impl FnOnce(&data::DatasetSpec, &dyn ChatRender)) {
    with_file(&put(name, bytes), load);
}

fn with_file(path: &Path, load: impl FnOnce(&data::DatasetSpec, &dyn ChatRender)) {
    static TEMPLATE: OnceLock<ChatTemplate> = OnceLock::new();
    let template = TEMPLATE.get_or_init(|| {
        let text = ChatTemplate::from_text(CHATML, "chatml", good_tokenizer()).unwrap();
        text.trusted(|_| {})
    });
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
    load(&spec, template);
}

fn rows(name: &str, bytes: &[u8]) {
    with_rows(name, bytes, |spec, template| {
        said(Dataset::load(spec, good_tokenizer(), Some(template)));
    });
}

/// Pairs of answers, and answers with a label.
fn preference(bytes: &[u8]) {
    use PreferencePart::{Judged, Pairs, PairsAndPrompts, WholePairs};
    const LABEL: &[u8] = b"\"label\"";
    let parts: &[PreferencePart] = if bytes.windows(LABEL.len()).any(|part| part == LABEL) {
        &[Judged]
    } else {
        &[Pairs, PairsAndPrompts, WholePairs, Judged]
    };
    with_rows("preference.jsonl", bytes, |spec, template| {
        for part in parts {
            let Some(rows) = said(data::preference::load(spec, *part, good_tokenizer(), Some(template))) else {
                continue;
            };
            for row in 0..rows.examples.len() {
                let documents = rows.parts(row).unwrap();
                let length: usize = documents.iter().map(|document| document.ids.len()).sum();
                assert_eq!(length, rows.examples.length(row));
            }
            if *part == Judged
                && let Some(rows) = said(rows.mismatched(2, spec.max_length, Some(1)))
            {
                said(rows.flat());
            }
        }
    });
}

/// Prompts with known answers, as GRPO and PPO read them.
fn prompts(bytes: &[u8]) {
    with_rows("prompts.jsonl", bytes, |spec, template| {
        let encoder = spec.encoder(good_tokenizer(), Some(template));
        let limits = PromptLimits {
            window: spec.max_length,
            answer: 16,
            long: Long::Drop,
        };
        let asked = PromptSpec {
            sources: spec.sources,
            render: spec.render,
            encoder: &encoder,
            answer: "answer",
            limits,
            screen: None,
        };
        let Some(found) = said(Prompts::load(&asked)) else {
            return;
        };
        assert_eq!(found.rows.len(), found.origins.len());
        for prompt in &found.rows {
            assert!((1..=limits.window - limits.answer).contains(&prompt.ids.len()));
            said(encoder.encode(&prompt.answered("four")));
        }
    });
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

/// The recipe that a run writes is read again: its values are the same, and what is written of it does not change any more.
fn recipe_text(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(loaded) = said(recipe::parse(text, "r.toml", &[]))
    {
        let again = |text: &str| match recipe::parse(text, "resolved.toml", &[]) {
            Ok(again) => again,
            Err(e) => panic!("{text}\n{e}"),
        };
        let second = again(&loaded.resolved);
        assert_eq!(second.values, loaded.values);
        // The first text says which values are defaults; in the second all of them are written.
        let third = again(&second.resolved);
        assert_eq!(third.resolved, second.resolved);
        assert_eq!(third.values, second.values);
    }
}

/// A configuration of another tool, as `ft import` reads it. The same text is the list of datasets that LLaMA-Factory has.
fn yaml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let registry = registry_folder(text).and_then(|folder| said(Registry::read(text, &folder)));
    if let Some(imported) = said(import(text, "c.yaml", registry.as_ref()))
        && let Err(e) = recipe::parse(&imported.text, "c.toml", &[])
    {
        // A recipe that is not complete is an answer, one that is no TOML is not.
        let e = e.to_string();
        assert!(!e.contains("recipe is not valid TOML"), "{}\n{e}", imported.text);
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
