//! Times the reading and tokenizing of many rows: `cargo bench --bench rows -- MODEL DIR [ROWS [memory]]`.
//! MODEL: a directory with a tokenizer. DIR: for the rows and the token cache; each run starts with an empty cache.
//! `memory`: all tokens stay in memory.
//!
//! Makes rows of plain text from the words of the files in `docs/`, and reads them as a run does: first without token
//! cache files, then with them, then in a run's order. Prints one line of JSON: seconds and rows per second and core of
//! each, the rate of the `tokenizers` crate for the same texts, and the peak memory before that comparison.

use ft::base::memory::peak_resident;
use ft::base::rng::{Rng, Stream};
use ft::data::order::{BatchStream, RunLength, StreamSpec};
use ft::data::{Dataset, DatasetSpec, Source, TokenCache};
use ft::formats::Tokenizer;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Words of a row.
const WORDS: usize = 90;

fn text(words: &[String], rng: &Rng, row: usize, n: usize) -> String {
    // Passages of the documents, so that words follow each other as in a text.
    let mut out = String::new();
    for part in 0..3 {
        let first = rng.below((3 * row + part) as u64, (words.len() - n) as u64) as usize;
        out += &words[first..first + n / 3].join(" ");
        out += " ";
    }
    out + &row.to_string()
}

fn write_rows(rows: usize, path: &Path) -> Vec<String> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let mut files: Vec<PathBuf> = fs::read_dir(docs).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "md"));
    files.sort();
    let all: String = files.iter().map(|f| fs::read_to_string(f).unwrap()).collect();
    let words: Vec<String> = all.split_whitespace().map(str::to_string).collect();
    let rng = Rng::new(1, Stream::Init, &[]);
    let mut out = std::io::BufWriter::new(fs::File::create(path).unwrap());
    let mut first = Vec::new();
    for row in 0..rows {
        let text = text(&words, &rng, row, WORDS);
        writeln!(out, "{}", serde_json::json!({ "text": text })).unwrap();
        if first.len() < 20_000 {
            first.push(text);
        }
    }
    out.flush().unwrap();
    first
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let [model, dir, more @ ..] = &arguments[..] else {
        return eprintln!("usage: MODEL DIR [ROWS [memory]]");
    };
    let (model, dir) = (Path::new(model), Path::new(dir));
    let count = more.first().map_or(1_000_000, |n| n.parse().unwrap());
    let memory = more.get(1).is_some_and(|word| word == "memory");
    fs::create_dir_all(dir).unwrap();
    let (rows, cache) = (dir.join("rows.jsonl"), dir.join("tokens"));
    let _ = fs::remove_dir_all(&cache);
    let texts = write_rows(count, &rows);
    let bytes: usize = texts.iter().map(String::len).sum();
    let sources = [Source::new(vec![rows.display().to_string()])];
    let spec = DatasetSpec {
        sources: &sources,
        embedding_rows: 1 << 20,
        ..DatasetSpec::default()
    };
    let load = || {
        let started = Instant::now();
        let tokenizer = Tokenizer::load(model).unwrap();
        let cache = TokenCache {
            dir: &cache,
            least_bytes: 0,
            most_bytes: None,
            required: true,
            note: &|line| eprintln!("{line}"),
        };
        let rows = if memory {
            Dataset::load(&spec, &tokenizer, None).unwrap()
        } else {
            Dataset::load_cached(&spec, &tokenizer, None, &cache).unwrap()
        };
        (started.elapsed().as_secs_f64(), rows)
    };
    let (first, rows) = load();
    let peak_first = peak_resident();
    let tokens = rows.stats.tokens;
    drop(rows);
    let (second, rows) = load();
    let started = Instant::now();
    let order = StreamSpec {
        length: RunLength::Epochs(1.0),
        ..StreamSpec::default()
    };
    let stream = BatchStream::new(&rows, order).unwrap();
    let window = stream.window(0).unwrap();
    let ordered = started.elapsed().as_secs_f64();
    let peak = peak_resident();
    // The same texts with the library alone.
    let tokenizer = tokenizers::Tokenizer::from_file(model.join("tokenizer.json")).unwrap();
    let started = Instant::now();
    let threads = rayon::current_num_threads() as f64;
    let encoded = tokenizer.encode_batch_fast(texts.clone(), true).unwrap();
    let library = started.elapsed().as_secs_f64();
    let rate = |rows: usize, seconds: f64| rows as f64 / seconds / threads;
    println!(
        "{}",
        serde_json::json!({
            "rows": count, "tokens": tokens, "bytes_per_row": bytes / texts.len(), "threads": threads,
            "first_seconds": first, "first_rows_per_second_and_core": rate(count, first),
            "library_rows_per_second_and_core": rate(encoded.len(), library),
            "second_seconds": second, "order_and_first_step_seconds": ordered,
            "first_step_tokens": window.iter().map(|b| b.len()).sum::<usize>(), "density": stream.density(),
            "peak_mib_first": peak_first >> 20, "peak_mib": peak >> 20,
        })
    );
}
