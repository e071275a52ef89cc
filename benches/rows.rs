//! Times the reading and tokenizing of many rows: `cargo bench --bench rows -- --help`.
//!
//! Makes rows of plain text from the words of the files in `docs/`, and reads them as a run does: first without token
//! cache files, then with them, then in a run's order. Prints one line of JSON: seconds and rows per second and core of
//! each, the rate of the `tokenizers` crate for the same texts, and the peak memory before that comparison.

use clap::Parser;
use ft::base::memory::peak_resident;
use ft::base::rng::{Rng, Stream};
use ft::data::order::{BatchStream, Length, StreamSpec};
use ft::data::{Dataset, Long, Render, Source, Spec, TokenCache, TrainOn};
use ft::formats::Tokenizer;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Parser)]
struct Options {
    /// Directory with a tokenizer.
    #[arg(long, default_value = "assets/tiny")]
    model: PathBuf,
    #[arg(long, default_value_t = 1_000_000)]
    rows: usize,
    /// Words of a row.
    #[arg(long, default_value_t = 90)]
    words: usize,
    /// Directory for the rows and the token cache.
    #[arg(long)]
    dir: PathBuf,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Keep all tokens in memory, without cache files.
    #[arg(long)]
    memory: bool,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

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

fn write_rows(o: &Options, path: &Path) -> Vec<String> {
    let mut files: Vec<PathBuf> = fs::read_dir("docs").unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "md"));
    files.sort();
    let all: String = files.iter().map(|f| fs::read_to_string(f).unwrap()).collect();
    let words: Vec<String> = all.split_whitespace().map(str::to_string).collect();
    let rng = Rng::new(1, Stream::Init, &[]);
    let mut out = std::io::BufWriter::new(fs::File::create(path).unwrap());
    let mut first = Vec::new();
    for row in 0..o.rows {
        let text = text(&words, &rng, row, o.words);
        writeln!(out, "{}", serde_json::json!({ "text": text })).unwrap();
        if first.len() < 20_000 {
            first.push(text);
        }
    }
    out.flush().unwrap();
    first
}

fn main() {
    let o = Options::parse();
    rayon::ThreadPoolBuilder::new()
        .num_threads(o.threads)
        .build_global()
        .unwrap();
    fs::create_dir_all(&o.dir).unwrap();
    let (rows, cache) = (o.dir.join("rows.jsonl"), o.dir.join("tokens"));
    let texts = write_rows(&o, &rows);
    let bytes: usize = texts.iter().map(String::len).sum();
    let sources = [Source::new(vec![rows.display().to_string()])];
    let spec = Spec {
        sources: &sources,
        render: Render::Auto,
        max_length: 2048,
        long: Long::Auto,
        overlap: 1,
        train_on: TrainOn::Assistant,
        embedding_rows: 1 << 20,
    };
    let load = || {
        let started = Instant::now();
        let tokenizer = Tokenizer::load(&o.model).unwrap();
        let cache = TokenCache {
            dir: &cache,
            least_bytes: 0,
            note: &|line| eprintln!("{line}"),
        };
        let rows = match o.memory {
            true => Dataset::load(&spec, &tokenizer, None).unwrap(),
            false => Dataset::load_cached(&spec, &tokenizer, None, &cache).unwrap(),
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
        batch_size: 1,
        accumulation: 8,
        packing: true,
        max_length: 2048,
        shuffle: true,
        seed: 42,
        length: Length::Epochs(1.0),
    };
    let stream = BatchStream::new(&rows, order).unwrap();
    let window = stream.window(0).unwrap();
    let ordered = started.elapsed().as_secs_f64();
    let peak = peak_resident();
    // The same texts with the library alone.
    let tokenizer = tokenizers::Tokenizer::from_file(o.model.join("tokenizer.json")).unwrap();
    let started = Instant::now();
    let threads = rayon::current_num_threads() as f64;
    let encoded = tokenizer.encode_batch_fast(texts.clone(), true).unwrap();
    let library = started.elapsed().as_secs_f64();
    let rate = |rows: usize, seconds: f64| rows as f64 / seconds / threads;
    println!(
        "{}",
        serde_json::json!({
            "rows": o.rows, "tokens": tokens, "bytes_per_row": bytes / texts.len(), "threads": threads,
            "first_seconds": first, "first_rows_per_second_and_core": rate(o.rows, first),
            "library_rows_per_second_and_core": rate(encoded.len(), library),
            "second_seconds": second, "order_and_first_step_seconds": ordered,
            "first_step_tokens": window.iter().map(|b| b.len()).sum::<usize>(), "density": stream.density(),
            "peak_mib_first": peak_first >> 20, "peak_mib": peak >> 20,
        })
    );
}
