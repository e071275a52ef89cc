//! Files with rows: each format, the options with which rows are read, preferences and prompts.

use super::{CHATML, good_tokenizer, put, said};
use ft::data::preference::PreferencePart;
use ft::data::prompts::{PromptLimits, PromptSpec, Prompts};
use ft::data::screen::judges::Judges;
use ft::data::{
    self, Batch, ChatRender, ChatRole, ColumnRole, Dataset, DatasetSpec, Dedup, Long, Mapping, Render, RowFormat,
    RowStream, RunLength, Screen, ScreenSpec, Source, StreamSpec, TextUnit, TrainOn,
};
use ft::formats::ChatTemplate;
use std::path::Path;
use std::sync::OnceLock;

/// Rows of a longer file are not read a second time.
const SHORT: usize = 8192;

/// The template as the reader of rows takes it.
fn chatml() -> &'static dyn ChatRender {
    static TEMPLATE: OnceLock<ChatTemplate> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let text = ChatTemplate::from_text(CHATML, "chatml", good_tokenizer()).unwrap();
        text.trusted(|_| {})
    })
}

fn source_of(path: &Path) -> Source {
    Source::new(vec![path.to_string_lossy().into_owned()])
}

/// The settings of the targets without options.
fn usual(sources: &[Source]) -> DatasetSpec<'_> {
    DatasetSpec {
        sources,
        max_length: 128,
        embedding_rows: good_tokenizer().vocab_size(),
        ..DatasetSpec::default()
    }
}

/// Passes a file with rows to `load`, with the chat template.
pub(super) fn with_file(path: &Path, load: impl FnOnce(&DatasetSpec, &dyn ChatRender)) {
    load(&usual(&[source_of(path)]), chatml());
}

/// As `with_file`, with a file of these bytes.
fn with_rows(name: &str, bytes: &[u8], load: impl FnOnce(&DatasetSpec, &dyn ChatRender)) {
    with_file(&put(name, bytes), load);
}

/// The rows of a file, after the checks of what holds for all rows. `None`: the file is refused.
fn loaded(spec: &DatasetSpec, template: Option<&dyn ChatRender>) -> Option<Dataset> {
    let rows = said(Dataset::load(spec, good_tokenizer(), template))?;
    assert!(!rows.examples.is_empty());
    assert_eq!(rows.origins.len(), rows.examples.len());
    let (mut tokens, mut trained) = (0, 0);
    for row in rows.examples.iter() {
        let row = row.unwrap();
        assert_eq!(row.ids.len(), row.trained.len());
        assert!(row.ids.len() <= spec.max_length, "{} tokens", row.ids.len());
        assert!(row.ids.iter().all(|id| (*id as usize) < spec.embedding_rows));
        assert!(!row.trained[0] && row.trained.contains(&true));
        tokens += row.ids.len() as u64;
        trained += row.trained.iter().filter(|trained| **trained).count() as u64;
    }
    assert_eq!((rows.stats.tokens, rows.stats.trained_tokens), (tokens, trained));
    Some(rows)
}

/// Rows that are read during training, in windows of `window` rows, are the same; also if a run continues in the middle.
fn streamed(spec: &DatasetSpec, template: Option<&dyn ChatRender>, rows: &Dataset, window: usize) {
    let order = StreamSpec {
        batch_size: 1,
        accumulation: 1,
        packing: false,
        max_length: spec.max_length,
        shuffle: false,
        length: RunLength::Steps(1),
        ..StreamSpec::default()
    };
    let open = || RowStream::new(spec, good_tokenizer(), template, order, window).unwrap_or_else(|e| panic!("{e}"));
    let check = |stream: &mut RowStream, row: usize| {
        let found = stream.step(row as u64).unwrap_or_else(|e| panic!("row {row}: {e}"));
        let example = rows.examples.get(row).unwrap();
        assert_eq!(found, [Batch::from_examples([&*example])], "row {row}");
        assert_eq!(stream.used(row as u64), Some(&[vec![rows.origins[row]]][..]));
    };
    let middle = rows.examples.len() / 2;
    let (mut stream, mut state) = (open(), Vec::new());
    for row in 0..rows.examples.len() {
        if row == middle {
            state = stream.state(row as u64).unwrap();
        }
        check(&mut stream, row);
    }
    let mut resumed = open();
    resumed.restore(&state).unwrap_or_else(|e| panic!("{e}"));
    (middle..rows.examples.len()).for_each(|row| check(&mut resumed, row));
}

/// The fingerprint of the rows, if they are not refused.
fn fingerprint(name: &str, bytes: &[u8]) -> Option<String> {
    let sources = [source_of(&put(name, bytes))];
    Some(loaded(&usual(&sources), Some(chatml()))?.fingerprint)
}

/// As `fingerprint`; the rows of a short file are also read during training.
fn twice(name: &str, bytes: &[u8]) -> Option<String> {
    let sources = [source_of(&put(name, bytes))];
    let (spec, template) = (usual(&sources), Some(chatml()));
    let rows = loaded(&spec, template)?;
    if bytes.len() <= SHORT {
        streamed(&spec, template, &rows, 1 << 20);
    }
    Some(rows.fingerprint)
}

/// Pairs of answers, and answers with a label.
pub(super) fn preference(bytes: &[u8]) {
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
pub(super) fn prompts(bytes: &[u8]) {
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

/// The same objects in one array give the same rows.
pub(super) fn jsonl(bytes: &[u8]) {
    let found = twice("rows.jsonl", bytes);
    if found.is_none() || bytes.len() > SHORT {
        return;
    }
    // Every line is valid, because the file is.
    let text = std::str::from_utf8(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)).unwrap();
    let lines: Vec<&str> = text.split('\n').filter(|line| !line.trim().is_empty()).collect();
    let array = format!("[{}]", lines.join(","));
    // An array has one level more, which may be one too many.
    if let Some(of_array) = fingerprint("rows.json", array.as_bytes()) {
        assert_eq!(Some(of_array), found);
    }
}

pub(super) fn json(bytes: &[u8]) {
    twice("rows.json", bytes);
}

/// A table with tabs in the place of commas gives the same rows.
pub(super) fn csv(bytes: &[u8]) {
    let found = twice("rows.csv", bytes);
    let header = bytes.split(|b| *b == b'\n').next().unwrap_or_default();
    // Without quotes every comma separates two cells.
    if bytes.len() <= SHORT && header.contains(&b',') && !bytes.iter().any(|b| b"\"\t".contains(b)) {
        let tabs: Vec<u8> = bytes.iter().map(|b| if *b == b',' { b'\t' } else { *b }).collect();
        assert_eq!(fingerprint("rows.tsv", &tabs), found);
    }
}

pub(super) fn parquet(bytes: &[u8]) {
    twice("rows.parquet", bytes);
}

pub(super) fn arrow(bytes: &[u8]) {
    twice("rows.arrow", bytes);
}

/// The first byte chooses the kind of file and the part of a text that is a row. The file gives the same rows if it is
/// compressed; the compression is without effect, so the bytes of the input stay in place.
pub(super) fn text(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    let choice = usize::from(*choice);
    let name = ["rows.txt", "rows.md", "rows.tsv", "rows.ndjson"][choice % 4];
    let unit = [TextUnit::Auto, TextUnit::File, TextUnit::Line, TextUnit::Paragraph][choice / 4 % 4];
    let rows = |name: &str, bytes: &[u8]| {
        let sources = [Source {
            text_unit: unit,
            ..source_of(&put(name, bytes))
        }];
        Some(loaded(&usual(&sources), Some(chatml()))?.fingerprint)
    };
    let found = rows(name, rest);
    let (end, packed) = if choice / 16 % 2 == 0 {
        ("gz", gzip(rest))
    } else {
        ("zst", zstandard(rest))
    };
    assert_eq!(rows(&format!("{name}.{end}"), &packed), found);
}

/// A compressed file as it is; the first byte chooses its kind.
pub(super) fn packed(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else {
        return;
    };
    // 4 bytes may become 128 KiB in zstd, and a byte 1000 bytes in gzip: that is no fault, but takes long.
    let (end, most) = if choice % 2 == 0 { ("gz", 2048) } else { ("zst", 192) };
    let kind = ["jsonl", "txt", "csv", "json"][usize::from(choice / 2 % 4)];
    fingerprint(&format!("rows.{kind}.{end}"), &rest[..rest.len().min(most)]);
}

/// A gzip file with blocks that are stored as they are.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff];
    let mut blocks = bytes.chunks(0xffff).peekable();
    if bytes.is_empty() {
        out.extend([1, 0, 0, 0xff, 0xff]);
    }
    while let Some(block) = blocks.next() {
        let length = block.len() as u16;
        out.push(u8::from(blocks.peek().is_none()));
        out.extend(length.to_le_bytes());
        out.extend((!length).to_le_bytes());
        out.extend(block);
    }
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ (0xedb8_8320 * (sum & 1));
        }
    }
    out.extend((!sum).to_le_bytes());
    out.extend((bytes.len() as u32).to_le_bytes());
    out
}

/// A zstd file of one frame, with blocks that are stored as they are.
fn zstandard(bytes: &[u8]) -> Vec<u8> {
    // One segment, and 4 bytes with the size of its content.
    let mut out = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
    out.extend((bytes.len() as u32).to_le_bytes());
    let mut blocks = bytes.chunks(0xffff).peekable();
    if bytes.is_empty() {
        out.extend([1, 0, 0]);
    }
    while let Some(block) = blocks.next() {
        let head = 8 * block.len() as u32 + u32::from(blocks.peek().is_none());
        out.extend(&head.to_le_bytes()[..3]);
        out.extend(block);
    }
    out
}

/// The settings in the first line of the input of `options`, divided by `|`.
#[derive(Default)]
struct Asked {
    mapping: Mapping,
    judges: Vec<String>,
    limit: Option<usize>,
}

/// `prompt=q|completion=answers.text[0]|@bot=assistant|template={a}|system_prompt=s|judge=vote|limit=2`.
fn asked(line: &str) -> Asked {
    let mut out = Asked::default();
    for (key, value) in line.split('|').filter_map(|part| part.split_once('=')) {
        let text = value.to_string();
        match key {
            "template" => out.mapping.prompt_template = Some(text),
            "system_prompt" => out.mapping.system_prompt = Some(text),
            "judge" => out.judges.push(text),
            "limit" => out.limit = value.parse().ok(),
            _ => match (ColumnRole::parse(key), key.strip_prefix('@'), ChatRole::parse(value)) {
                (Some(role), ..) => out.mapping.columns.push((role, text)),
                (_, Some(name), Some(role)) => out.mapping.roles.push((name.to_string(), role)),
                _ => {}
            },
        }
    }
    out
}

/// Rows of an evaluation, for `ScreenSpec::evaluation`.
const EVALUATION: &[u8] = b"{\"text\": \"one two three four five six seven eight nine ten\"}\n";

/// Rows with every option: 4 bytes choose them, a line names columns, and the rest is the file.
pub(super) fn options(bytes: &[u8]) {
    let Some((choices, rest)) = bytes.split_first_chunk::<4>() else {
        return;
    };
    let mut left = u32::from_le_bytes(*choices) as usize;
    let mut choose = |n: usize| {
        let choice = left % n;
        left /= n;
        choice
    };
    let end = rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
    let Ok(line) = std::str::from_utf8(&rest[..end]) else {
        return;
    };
    let rows = rest.get(end + 1..).unwrap_or_default();
    let asked = asked(line);
    let render = [Render::Auto, Render::Chat, Render::Plain][choose(3)];
    let long = [Long::Auto, Long::Split, Long::Truncate, Long::Drop][choose(4)];
    let train_on = [TrainOn::Assistant, TrainOn::Completion, TrainOn::All][choose(3)];
    let max_length = [128, 32, 7, 2][choose(4)];
    let overlap = 1 + choose(4).min(max_length - 2);
    let dedup = [Dedup::None, Dedup::Exact, Dedup::Near][choose(3)];
    let format = RowFormat::parse(RowFormat::NAMES[choose(RowFormat::NAMES.len())]).unwrap();
    let template = [Some(chatml()), None][choose(2)];
    let window = [1, 3, 1 << 20][choose(3)];
    let evaluation = [Vec::new(), vec![put("evaluation.jsonl", EVALUATION)]][choose(2)].clone();
    let name = ["options.jsonl", "options.csv"][choose(2)];
    let screen = said(Screen::new(ScreenSpec {
        dedup,
        evaluation: evaluation
            .iter()
            .map(|path| path.to_string_lossy().into_owned())
            .collect(),
        ngram: 8,
        judges: (!asked.judges.is_empty()).then_some(Judges {
            columns: asked.judges,
            min_agreement: 0.6,
        }),
        ..ScreenSpec::default()
    }));
    let screen = screen.unwrap();
    let sources = [Source {
        format,
        mapping: asked.mapping,
        limit: asked.limit,
        ..source_of(&put(name, rows))
    }];
    let spec = DatasetSpec {
        render,
        max_length,
        long,
        overlap,
        train_on,
        screen: screen.as_ref(),
        ..usual(&sources)
    };
    let found = loaded(&spec, template);
    if let Some(screen) = &screen {
        let report = screen.report();
        assert!(report.dropped.len() <= report.rows);
        report.lines();
        report.warnings();
        report.dropped.iter().take(3).for_each(|row| drop(row.json()));
    }
    let Some(found) = found else { return };
    if bytes.len() <= SHORT {
        streamed(&spec, template, &found, window);
    }
    shown(&spec, template, found);
}

/// What is said of rows, and their parts.
fn shown(spec: &DatasetSpec, template: Option<&dyn ChatRender>, rows: Dataset) {
    use data::summary;
    let codec = good_tokenizer();
    if let Some(text) = said(data::describe::describe(&rows, spec, codec, 3, false)) {
        let is_shown = |c: char| !c.is_control() || "\n\t".contains(c);
        assert!(text.chars().all(is_shown), "{text:?}");
    }
    data::reading::lines(&rows.readings, "not used");
    rows.readings.iter().for_each(|reading| drop(reading.warnings()));
    let summaries = summary::summaries(&rows).unwrap();
    let last = summaries.last().unwrap();
    assert_eq!(
        (last.tokens(), last.trained_tokens),
        (rows.stats.tokens, rows.stats.trained_tokens)
    );
    last.json();
    summary::table(&summaries);
    said(summary::row(&rows, spec, codec, 0));
    if let Some(row) = said(summary::marked(&rows, codec, 0, 5)) {
        assert_eq!(row["tokens"], rows.examples.length(0));
    }
    said(rows.questions(spec, codec, template, 2));
    let whole = rows.examples.len();
    if let Some((train, held)) = said(rows.split(0.5, 1)) {
        assert_eq!(train.examples.len() + held.examples.len(), whole);
        assert!(!train.examples.is_empty() && !held.examples.is_empty());
    }
}
