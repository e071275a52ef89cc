//! What ft keeps in caches, and the positions and answers in a checkpoint: with the right hash, so that what is behind it is read.
//!
//! An input of a cache is the text of its file of settings; after a byte 0 come the bytes of its other files. Without them the files
//! are those that ft wrote.

use super::{dir, good_tokenizer, put, said, with_file};
use ft::base::Result;
use ft::data::preference::{self, PreferencePart};
use ft::data::prompts::{PromptLimits, PromptSpec, Prompts};
use ft::data::{Batch, Dataset, DatasetSpec, Example, Long, RowStream, RunLength, Source, StreamSpec, TokenCache};
use ft::distill::StoredOutputs;
use ft::setup::alignment;
use ft::train::stage::rollout_buffer::{self, RolloutBuffer, Trajectory};
use ft::train::teacher_cache as outputs;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What is before the first byte 0, and what is after it.
pub fn parts(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|byte| *byte == 0) {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, &bytes[bytes.len()..]),
    }
}

/// The next bytes of an input, then zeros.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }
}

/// The hash that the files of the token cache have.
fn short_hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_string()
}

/// A line of the token cache with its hash.
fn sealed(content: &str) -> String {
    format!(
        "{{\"seal\":\"{}\",\"content\":{content}}}\n",
        short_hash(content.as_bytes())
    )
}

/// Files of a dataset in the token cache, with the bytes of a token, of a row, and of what preferences have beside a row.
const TOKENS: [(&str, usize); 3] = [("tokens", 4), ("index", 32), ("pairs", 16)];
const LINES: &str = "chunks.jsonl";
const ROWS: &str = "rows.json";
const MADE: &str = "made";

/// A dataset of the token cache as ft wrote it.
struct CachedSet {
    place: PathBuf,
    set: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl CachedSet {
    /// `load` writes it.
    fn new(name: &str, load: &dyn Fn(&TokenCache) -> Result<()>) -> Self {
        let place = dir().join(name);
        // Of an earlier process with the same number.
        if place.exists() {
            fs::remove_dir_all(&place).unwrap();
        }
        load(&cache(&place)).unwrap_or_else(|e| panic!("{e}"));
        let set = fs::read_dir(&place).unwrap().next().unwrap().unwrap().path();
        let names = TOKENS.map(|(name, _)| name).into_iter().chain([LINES, ROWS, MADE]);
        let files = names
            .filter_map(|name| Some((name, fs::read(set.join(name)).ok()?)))
            .collect();
        Self { place, set, files }
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        fs::write(self.set.join(name), bytes).unwrap();
    }

    /// Every input finds the same files.
    fn restore(&self) {
        self.files.iter().for_each(|(name, bytes)| self.put(name, bytes));
    }

    fn has(&self, name: &str) -> bool {
        self.files.iter().any(|(own, _)| *own == name)
    }

    /// `rows.json` as it is, which changes no row; then with the right hashes.
    fn read(&self, bytes: &[u8], load: &dyn Fn(&TokenCache) -> Option<Dataset>) -> Option<Dataset> {
        let (text, numbers) = parts(bytes);
        let cache = cache(&self.place);
        self.restore();
        // Any other start is refused at once.
        if text.starts_with(b"{\"seal") {
            let before = load(&cache).unwrap().fingerprint;
            self.put(ROWS, text);
            assert_eq!(load(&cache).unwrap().fingerprint, before);
            self.restore();
        }
        let mut rest = Rest(numbers);
        if !numbers.is_empty() {
            let rows = usize::from(rest.byte());
            for (name, size) in &TOKENS[1..] {
                if self.has(name) {
                    self.put(name, &rest.take(rows * size));
                }
            }
            self.put(TOKENS[0].0, rest.0);
        }
        let content = match serde_json::from_slice::<Value>(text) {
            Ok(mut rows) => {
                let lines = self.hash_parts(&mut rows).unwrap_or_default();
                self.put(LINES, lines.as_bytes());
                rows.to_string()
            }
            Err(_) => String::from_utf8(text.to_vec()).ok()?,
        };
        self.put(ROWS, sealed(&content).as_bytes());
        load(&cache)
    }

    /// Gives the parts the hashes of their bytes, if the files have them. Returns the lines of these parts. `None`: there is no
    /// list of parts.
    fn hash_parts(&self, rows: &mut Value) -> Option<String> {
        let mut files = Vec::new();
        for (name, size) in TOKENS {
            if self.has(name) {
                files.push((fs::read(self.set.join(name)).unwrap(), size));
            }
        }
        let (mut from, mut lines) = ([0; 2], String::new());
        for part in rows.get_mut("chunks")?.as_array_mut()? {
            let number = |key: &str| part.get(key).and_then(Value::as_u64).map(|number| number as usize);
            let (Some(tokens), Some(rows)) = (number("tokens"), number("rows")) else {
                break;
            };
            let to = [tokens, rows];
            let mut hasher = blake3::Hasher::new();
            let mut is_there = true;
            for (n, (bytes, size)) in files.iter().enumerate() {
                let which = n.min(1);
                let end = to[which].checked_mul(*size);
                let of_part = end.and_then(|end| bytes.get(from[which] * size..end));
                is_there &= of_part.is_some();
                hasher.update(of_part.unwrap_or_default());
            }
            if !is_there {
                break;
            }
            part["hash"] = hasher.finalize().to_hex()[..32].to_string().into();
            let mut line = part.clone();
            // The counts of new rows are added to these, and a sum of any numbers can be too large.
            line["stats"] = json!({});
            line["sources"] = json!([]);
            lines += &sealed(&line.to_string());
            from = to;
        }
        Some(lines)
    }
}

fn cache(place: &Path) -> TokenCache<'_> {
    TokenCache {
        dir: place,
        least_bytes: 0,
        most_bytes: Some(1 << 30),
        required: true,
        note: &|_| {},
    }
}

/// All rows can be read, and have the sizes that the dataset names.
fn check(rows: &Dataset) {
    let measures = rows.examples.measures().unwrap();
    assert_eq!(measures.len(), rows.examples.len());
    for (row, measure) in measures.iter().enumerate() {
        let example = rows.examples.get(row).unwrap();
        assert_eq!(example.ids.len(), example.trained.len());
        assert_eq!(example.ids.len(), rows.examples.length(row));
        assert_eq!(example.ids.len(), measure.length as usize);
        rows.origin(row).unwrap();
        let documents = rows.parts(row).unwrap();
        let length: usize = documents.iter().map(|document| document.ids.len()).sum();
        assert_eq!(length, example.ids.len());
    }
}

/// The file is written once: the cache knows it by its time of change.
fn once(file: &'static OnceLock<PathBuf>, name: &str, rows: &str) -> &'static Path {
    file.get_or_init(|| put(name, rows.as_bytes()))
}

/// `rows.json` of tokenized rows; then the number of rows as a byte, the index, and the tokens.
pub fn token_cache(bytes: &[u8]) {
    const TEXT: &str = "{\"text\": \"a b c\"}\n{\"text\": \"d\"}\n";
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    static SET: OnceLock<CachedSet> = OnceLock::new();
    with_file(once(&FILE, "cached.jsonl", TEXT), |spec, _| {
        let load = |cache: &TokenCache| Dataset::load_cached(spec, good_tokenizer(), None, cache);
        let set = SET.get_or_init(|| CachedSet::new("tokens", &|cache| load(cache).map(drop)));
        if let Some(rows) = set.read(bytes, &|cache| said(load(cache))) {
            check(&rows);
        }
    });
}

/// As `token_cache`, for judged answers: after the index comes the file `pairs`.
pub fn pair_cache(bytes: &[u8]) {
    const TEXT: &str = "{\"prompt\": \"a b\", \"chosen\": \" c d\", \"rejected\": \" e\"}\n";
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    static SET: OnceLock<CachedSet> = OnceLock::new();
    with_file(once(&FILE, "judged.jsonl", TEXT), |spec, template| {
        let (want, tokenizer) = (PreferencePart::Judged, good_tokenizer());
        let load = |cache: &TokenCache| preference::load_cached(spec, want, tokenizer, Some(template), cache);
        let set = SET.get_or_init(|| CachedSet::new("judged", &|cache| load(cache).map(drop)));
        if let Some(rows) = set.read(bytes, &|cache| said(load(cache))) {
            check(&rows);
            if let Some(rows) = said(rows.mismatched(2, spec.max_length, Some(1))) {
                check(&rows);
            }
        }
    });
}

/// Prompts in the token cache: all bytes of their file.
pub fn prompt_cache(bytes: &[u8]) {
    const TEXT: &str = "{\"prompt\": \"add 3 and 4\", \"answer\": 7}\n";
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    static SET: OnceLock<CachedSet> = OnceLock::new();
    with_file(once(&FILE, "asked.jsonl", TEXT), |spec, template| {
        let encoder = spec.encoder(good_tokenizer(), Some(template));
        let asked = PromptSpec {
            sources: spec.sources,
            render: spec.render,
            encoder: &encoder,
            answer: "answer",
            limits: PromptLimits {
                window: spec.max_length,
                answer: 16,
                long: Long::Drop,
            },
            screen: None,
        };
        let load = |cache: &TokenCache| Prompts::load_cached(&asked, cache);
        let set = SET.get_or_init(|| CachedSet::new("asked", &|cache| load(cache).map(drop)));
        set.restore();
        set.put(MADE, bytes);
        set.put(LINES, json!(short_hash(bytes)).to_string().as_bytes());
        if let Some(found) = said(load(&cache(&set.place))) {
            assert_eq!(found.rows.len(), found.origins.len());
        }
    });
}

/// Which rows of a teacher belong to those of a student.
pub fn row_index(bytes: &[u8]) {
    if let Some(again) = alignment::index_again(bytes) {
        // A row that is there twice is written once.
        assert!(again.len() <= bytes.len());
        assert_eq!(alignment::index_again(&again), Some(again));
    }
}

/// The answers of a rollout in a checkpoint.
pub fn rollout(bytes: &[u8]) {
    const VOCABULARY: usize = 512;
    let Some(buffer) = said(RolloutBuffer::from_bytes(bytes)) else {
        return;
    };
    let again = buffer.to_bytes();
    if bytes.starts_with(b"fRP3") {
        assert_eq!(again, bytes);
    }
    assert_eq!(RolloutBuffer::from_bytes(&again).unwrap().to_bytes(), again);
    let answers: Vec<&Trajectory> = buffer.kept.iter().collect();
    for per_token in [true, false] {
        let batch = rollout_buffer::batch(&answers, per_token);
        assert_eq!(batch.documents.len(), answers.len() + 1);
        assert!(batch.columns.tokens.values().all(|column| column.len() == batch.len()));
        assert!(
            batch
                .columns
                .documents
                .values()
                .all(|column| column.len() == answers.len())
        );
        if said(buffer.check(VOCABULARY, per_token)).is_some() {
            assert!(batch.ids.iter().all(|id| (*id as usize) < VOCABULARY));
        }
    }
}

/// The position of rows that are read during a run: of one source, and of two with weights.
pub fn position(bytes: &[u8]) {
    static FILES: OnceLock<[PathBuf; 2]> = OnceLock::new();
    let files = FILES.get_or_init(|| {
        let text = |word: &str, rows: usize| format!("{{\"text\": \"{word}\"}}\n").repeat(rows);
        [("red.jsonl", text("red", 5)), ("blue.jsonl", text("blue", 2))].map(|(name, text)| put(name, text.as_bytes()))
    });
    with_file(&files[0], |spec, _| {
        let mut sources = files
            .clone()
            .map(|path| Source::new(vec![path.to_string_lossy().into_owned()]));
        for is_weighted in [false, true] {
            if is_weighted {
                sources[1].weight = Some(3.0);
            }
            let spec = DatasetSpec {
                sources: &sources,
                ..spec.clone()
            };
            let order = StreamSpec {
                batch_size: 2,
                accumulation: 1,
                max_length: spec.max_length,
                length: RunLength::Steps(9),
                ..StreamSpec::default()
            };
            let new = || RowStream::new(&spec, good_tokenizer(), None, order, 4).unwrap();
            let mut stream = new();
            if said(stream.restore(bytes)).is_none() {
                continue;
            }
            let state = stream.state(0).unwrap();
            let Some(step) = said(stream.step(0)) else { continue };
            let mut again = new();
            again.restore(&state).unwrap();
            assert_eq!(again.step(0).unwrap(), step);
        }
    });
}

const FORMAT: &str = "ft teacher outputs 1";

/// The hash of the settings in `cache.json`. They are read as ft reads them.
fn key(settings: &Value) -> String {
    let word = |key: &str| settings[key].as_str().unwrap_or_default();
    let number = |key: &str| settings[key].as_u64().unwrap_or(0);
    let own = json!({
        "format": FORMAT, "key": "", "common": number("common"), "k": number("k"),
        "temperature": settings["temperature"].as_f64().unwrap_or(0.0) as f32, "data": word("data"), "teacher": word("teacher"),
    });
    short_hash(own.to_string().as_bytes())
}

/// Bits of the first byte of a shard.
const WIDE: u8 = 1;
const OTHER_HASH: u8 = 2;
const OTHER_SHAPE: u8 = 4;
const OTHER_COUNT: u8 = 8;
const MORE: u8 = 16;

/// A shard, and the rows of which it has the outputs: bits, the number of rows, a byte for each of them, then the values.
struct Shard {
    bits: u8,
    rows: Vec<Example>,
    bytes: Vec<u8>,
    tokens: usize,
}

impl Shard {
    fn new(rest: &mut Rest, key: &str, k: usize) -> Self {
        let bits = rest.byte();
        let count = rest.byte() % 8;
        let row = |first: u8| {
            let length = 1 + u32::from(first % 8);
            Example {
                ids: (0..length).map(|n| if n == 0 { first.into() } else { n }).collect(),
                trained: (0..length).map(|n| n > 0).collect(),
            }
        };
        let rows: Vec<Example> = (0..count).map(|_| row(rest.byte())).collect();
        let tokens: usize = rows.iter().map(|row| row.ids.len() - 1).sum();
        let mut documents: Vec<u8> = Vec::new();
        for row in &rows {
            let mut text = b"ft teacher row 1".to_vec();
            text.extend(row.ids.iter().flat_map(|id| id.to_le_bytes()));
            text.extend(row.trained.iter().map(|trained| u8::from(*trained)));
            documents.extend_from_slice(&blake3::hash(&text).as_bytes()[..16]);
            let other = u32::from(bits & OTHER_COUNT != 0);
            documents.extend((row.ids.len() as u32 - 1 + other).to_le_bytes());
        }
        let width = if bits & WIDE != 0 { 4 } else { 2 };
        let columns = k + usize::from(bits & OTHER_SHAPE != 0);
        let log_probs = rest.take(2 * tokens * columns);
        let left = rest.take(4 * tokens);
        let ids = rest.take(width * tokens * columns);
        let id_type = if bits & WIDE != 0 { "U32" } else { "U16" };
        // In the order of the hash.
        let tensors = [
            ("documents", "U8", vec![rows.len(), 20], documents),
            ("ids", id_type, vec![tokens, columns], ids),
            ("log_probs", "F16", vec![tokens, columns], log_probs),
            ("rest", "F32", vec![tokens], left),
        ];
        let mut hasher = blake3::Hasher::new();
        for (name, dtype, shape, bytes) in &tensors {
            hasher.update(format!("{name} {dtype} {shape:?}\n").as_bytes());
            hasher.update(bytes);
        }
        if bits & OTHER_HASH != 0 {
            hasher.update(b"more");
        }
        let metadata = json!({"ft_key": key, "ft_hash": hasher.finalize().to_hex().to_string()});
        let mut head = Map::new();
        head.insert("__metadata__".to_string(), metadata);
        let mut data: Vec<u8> = Vec::new();
        // The widest numbers first.
        for at in [0, 3, 1, 2] {
            let (name, dtype, shape, bytes) = &tensors[at];
            let first = data.len();
            data.extend_from_slice(bytes);
            let place = json!({"dtype": dtype, "shape": shape, "data_offsets": [first, data.len()]});
            head.insert(name.to_string(), place);
        }
        let mut head = Value::Object(head).to_string();
        head += &" ".repeat(head.len().next_multiple_of(8) - head.len());
        let size = (head.len() as u64).to_le_bytes();
        Self {
            bits,
            rows,
            bytes: [&size[..], head.as_bytes(), &data].concat(),
            tokens,
        }
    }
}

/// `cache.json` of stored outputs of a teacher: as it is, then with the right hash of its settings, and with shards of them.
pub fn teacher_cache(bytes: &[u8]) {
    let (text, numbers) = parts(bytes);
    let path = put("outputs/cache.json", text);
    let dir = path.parent().unwrap();
    let shard = |n: usize| dir.join(format!("rows-{n:05}.safetensors"));
    for n in 0..2 {
        let _ = fs::remove_file(shard(n));
    }
    said(outputs::check(dir));
    let Ok(mut settings) = serde_json::from_slice::<Value>(text) else {
        return;
    };
    if !settings.is_object() {
        return;
    }
    let key = key(&settings);
    let [k, common] = ["k", "common"].map(|name| settings[name].as_u64().unwrap_or(0) as usize);
    settings["key"] = key.clone().into();
    let (mut rest, mut shards) = (Rest(numbers), Vec::<Shard>::new());
    while !numbers.is_empty() && shards.len() < 2 && shards.last().is_none_or(|last| last.bits & MORE != 0) {
        shards.push(Shard::new(&mut rest, &key, k.min(16)));
        fs::write(shard(shards.len() - 1), &shards[shards.len() - 1].bytes).unwrap();
    }
    if !shards.is_empty() {
        settings["shards"] = shards.len().into();
        settings["documents"] = shards.iter().map(|shard| shard.rows.len()).sum::<usize>().into();
        settings["tokens"] = shards.iter().map(|shard| shard.tokens).sum::<usize>().into();
    }
    fs::write(&path, settings.to_string()).unwrap();
    let opened = said(outputs::check(dir));
    let wrong = OTHER_HASH | OTHER_SHAPE | OTHER_COUNT;
    let is_good = |shard: &Shard| shard.bits & wrong == 0 && shard.tokens > 0;
    if settings["format"] == FORMAT
        && (1..=16).contains(&k)
        && k <= common
        && !shards.is_empty()
        && shards.iter().all(is_good)
    {
        assert!(opened.is_some(), "{settings}");
    }
    let Some(opened) = opened else { return };
    for shard in &shards {
        let batch = Batch::from_examples(&shard.rows);
        if let Some(top) = said(opened.of(&batch)) {
            assert_eq!((top.k, top.rest.len()), (k, batch.trained()));
            assert_eq!([top.ids.len(), top.log_probs.len()], [top.rest.len() * k; 2]);
        }
    }
}
