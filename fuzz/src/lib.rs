//! The parsers of ft as functions of bytes. Each gives a value or an error; a panic, a hang or too much memory is a fault.
//!
//! Bytes that are read by path are put into a file of a directory in memory, beside good files that it belongs to.

mod caches;
mod checkpoints;
mod events;
mod models;
mod network;
mod others;
mod pages;
pub mod quantized;
mod ranks;
mod rows;
mod runs;
mod templates;
pub mod words;

use ft::base::Result;
use ft::formats::adapter::AdapterKind;
use ft::formats::tokenizer::NewToken;
use ft::formats::writer::{TensorPlan, Values, write_file};
use ft::formats::{AdapterConfig, ChatTemplate, Config, Tokenizer, Weights, gguf as ggufs};
use ft::recipe::import::{Registry, import, registry_folder};
use ft::{hf, model, recipe};
use rows::with_file;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A template that ft has.
const CHATML: &str = include_str!("../../crates/ft-formats/src/template/named/chatml.jinja");

pub type Target = fn(&[u8]);

/// Name and function of each target.
pub const TARGETS: &[(&str, Target)] = &[
    ("safetensors", safetensors),
    ("index", index),
    ("config", config),
    ("tokenizer", tokenizer),
    ("tokenizer_config", tokenizer_config),
    ("template", template),
    ("kwargs", kwargs),
    ("adapter", adapter),
    ("jsonl", rows::jsonl),
    ("json", rows::json),
    ("csv", rows::csv),
    ("parquet", rows::parquet),
    ("gguf", gguf),
    ("arrow", rows::arrow),
    ("recipe", recipe_text),
    ("argument", argument),
    ("manifest", checkpoints::manifest),
    ("state", checkpoints::state),
    ("metrics", runs::metrics),
    ("events", runs::event_lines),
    ("resolved", runs::resolved),
    ("special_tokens", special_tokens),
    ("generation_config", generation_config),
    ("quantized", quantized::target),
    ("preference", rows::preference),
    ("prompts", rows::prompts),
    ("text", rows::text),
    ("packed", rows::packed),
    ("options", rows::options),
    ("yaml", yaml),
    ("run", others::run),
    ("lock", others::lock),
    ("token_cache", caches::token_cache),
    ("teacher_cache", caches::teacher_cache),
    ("pair_cache", caches::pair_cache),
    ("prompt_cache", caches::prompt_cache),
    ("row_index", caches::row_index),
    ("rollout", caches::rollout),
    ("position", caches::position),
    ("checkpoint_tensors", checkpoints::checkpoint_tensors),
    ("restored", checkpoints::restored),
    ("best", checkpoints::best),
    ("hub", others::hub),
    ("request", others::request),
    ("score", others::score),
    ("adapter_weights", models::adapter_weights),
    ("quantized_weights", models::quantized_weights),
    ("shards", models::shards),
    ("template_dir", templates::template_dir),
    ("messages", templates::messages),
    ("dash", pages::dash),
    ("page", pages::page),
    ("card", pages::card),
    ("hub_address", network::hub_address),
    ("upload", network::upload),
    ("sums", ranks::sums),
    ("environment", network::environment),
    ("greeting", network::greeting),
    ("rendered", network::rendered),
    ("reward", network::reward),
];

/// A directory of the repository; this file is also a module of `tests/run`. `run.sh` names the repository, because the program
/// may run where the place of its build is gone.
fn of_repository(name: &str) -> PathBuf {
    if let Some(root) = std::env::var_os("FT_FUZZ_ROOT") {
        return Path::new(&root).join(name);
    }
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = own.ancestors().map(|dir| dir.join(name));
    found.take(2).find(|dir| dir.is_dir()).unwrap()
}

/// The tiny model.
fn tiny() -> PathBuf {
    of_repository("assets/tiny")
}

/// A tokenizer that is read fast: no regular expression of its own, 128 tokens.
fn small_tokenizer() -> PathBuf {
    of_repository("tests/parity/goldens/tokenizers/small")
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

/// A directory with these files.
fn with_files(name: &str, files: &[PathBuf]) -> PathBuf {
    let to = dir().join(name);
    if !to.is_dir() {
        fs::create_dir_all(&to).unwrap();
        for file in files {
            fs::copy(file, to.join(file.file_name().unwrap())).unwrap();
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
            let again = model::families::read(&config).unwrap();
            assert_eq!(format!("{again:?}"), format!("{spec:?}"));
        }
    }
}

/// True if the tokenizer of the directory chooses by chance.
fn is_random(dir: &Path) -> bool {
    let bytes = fs::read(dir.join("tokenizer.json")).unwrap();
    let file: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    ["dropout", "alpha"].iter().any(|key| !file["model"][key].is_null())
}

fn with_tokenizer(dir: &Path) -> Option<Tokenizer> {
    // Some of the white space has several bytes.
    const TEXT: &str = "Two plus three is\n<|im_end|>\u{3000}\u{e9}\u{1f600} \u{a0}<s> x";
    let tokenizer = said(Tokenizer::load(dir))?;
    if let Some(ids) = said(tokenizer.encode(TEXT, true)) {
        said(tokenizer.decode(&ids, false));
        if let Some((same, offsets)) = said(tokenizer.encode_with_offsets(TEXT, true)) {
            assert!(same == ids || is_random(dir), "{same:?}, {ids:?}");
            assert_eq!(offsets.len(), same.len());
            for (start, end) in offsets {
                assert!(TEXT.get(start..end).is_some(), "{start}..{end}");
            }
        }
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
    let dir = with_files("named", &[small_tokenizer().join("tokenizer.json")]);
    fs::write(dir.join("tokenizer_config.json"), bytes).unwrap();
    with_tokenizer(&dir);
}

/// The files that older tokenizers have beside the vocabulary, both with the same bytes.
fn special_tokens(bytes: &[u8]) {
    let dir = with_files("special", &[small_tokenizer().join("tokenizer.json")]);
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
    let small = small_tokenizer();
    let dir = with_files(
        "generation",
        &[
            small.join("tokenizer.json"),
            small.join("tokenizer_config.json"),
            tiny().join("config.json"),
        ],
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

/// A config that ft accepts is written, read again, and the same after that. (The first one may have keys that PEFT does not write
/// for this kind.)
fn adapter(bytes: &[u8]) {
    let path = put("adapter/adapter_config.json", bytes);
    let dir = path.parent().unwrap();
    // Before the weights are read there must be a file with them.
    put("adapter/adapter_model.safetensors", b"");
    let Some(first) = said(AdapterConfig::load(dir)) else {
        return;
    };
    first.name();
    let written = |config: &AdapterConfig| match config.to_json() {
        Value::Object(map) => AdapterConfig::from_map(&map, &path).unwrap_or_else(|e| panic!("{config:?}\n{e}")),
        other => panic!("{other}"),
    };
    let second = written(&first);
    // The names in it may have the end that is left out more than once.
    if !matches!(&second.kind, AdapterKind::Adalora(ranks) if !ranks.kept.is_empty()) {
        assert_eq!(written(&second), second);
    }
    first.save(dir).unwrap();
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

/// A configuration of another tool, as `ft import` reads it, and the list of datasets that LLaMA-Factory has. Without a separator the
/// text is both.
fn yaml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (text, registry) = text.split_once("\n\0\n").unwrap_or((text, text));
    let registry = registry_folder(text).and_then(|folder| said(Registry::read(registry, &folder)));
    let Some(imported) = said(import(text, "c.yaml", registry.as_ref())) else {
        return;
    };
    let least = ["model.path=m", "data.train=t"].map(String::from);
    for arguments in [&[] as &[String], &least] {
        match recipe::parse(&imported.text, "c.toml", arguments) {
            Ok(loaded) => starts_nothing(&loaded.values, &imported.text),
            // A recipe that is not complete is an answer, one that is no TOML is not.
            Err(e) => {
                let e = e.to_string();
                assert!(!e.contains("recipe is not valid TOML"), "{}\n{e}", imported.text);
            }
        }
    }
}

/// The file may come from somebody else.
fn starts_nothing(values: &[(String, String)], text: &str) {
    for (key, value) in values {
        match key.as_str() {
            "rlhf.reward_network" => assert_eq!(Some(value), recipe::default_value(key).as_ref(), "{text}"),
            "rlhf.rewards" => assert!(!value.contains("program:"), "{text}"),
            _ => {}
        }
    }
}

/// An argument `key=value`: it gives what the same key in the recipe gives.
fn argument(bytes: &[u8]) {
    const TEXT: &str = "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n";
    if let Ok(text) = std::str::from_utf8(bytes) {
        let words: Vec<String> = text.split('\n').map(str::to_string).collect();
        if let Some(loaded) = said(recipe::parse(TEXT, "r.toml", &words)) {
            match recipe::parse(&loaded.resolved, "resolved.toml", &[]) {
                Ok(again) => assert_eq!(again.values, loaded.values),
                Err(e) => panic!("{}\n{e}", loaded.resolved),
            }
        }
    }
}
