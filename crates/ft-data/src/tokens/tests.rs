//! Tests of the token cache: equal to memory, stopped, damaged, other settings.

use super::*;
use crate::codec::IdsAndOffsets;
use crate::mapping::Mapping;
use crate::source::Source;
use crate::testing::{Files, files, real, short_rows as spec};
use crate::{BatchStream, ColumnRole, Long, RunLength, StreamSpec};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A real tokenizer that counts its texts and fails, as if the process ended, when none are left.
pub(super) struct Counting {
    inner: ft_formats::Tokenizer,
    texts: AtomicUsize,
    most: usize,
    /// Prompts, which are encoded with offsets, and the most of them.
    prompts: AtomicUsize,
    most_prompts: usize,
}

impl Counting {
    pub(super) fn new(most: usize) -> Self {
        Self {
            inner: real(),
            texts: AtomicUsize::new(0),
            most,
            prompts: AtomicUsize::new(0),
            most_prompts: usize::MAX,
        }
    }

    /// Fails after so many prompts.
    pub(super) fn of_prompts(most: usize) -> Self {
        Self {
            most_prompts: most,
            ..Self::new(usize::MAX)
        }
    }

    pub(super) fn prompts(&self) -> usize {
        self.prompts.swap(0, Ordering::Relaxed)
    }

    pub(super) fn texts(&self) -> usize {
        self.texts.swap(0, Ordering::Relaxed)
    }
}

impl TextCodec for Counting {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        if self.texts.fetch_add(1, Ordering::Relaxed) >= self.most {
            return Err(Error::usage("stopped by the test"));
        }
        self.inner.encode(text, add_special)
    }
    fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<IdsAndOffsets> {
        if self.prompts.fetch_add(1, Ordering::Relaxed) >= self.most_prompts {
            return Err(Error::usage("stopped by the test"));
        }
        self.inner.encode_with_offsets(text, add_special)
    }
    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false)
    }
    fn bos_id(&self) -> Option<u32> {
        self.inner.bos_id()
    }
    fn eos_id(&self) -> Option<u32> {
        self.inner.eos_id()
    }
    fn is_special(&self, id: u32) -> bool {
        self.inner.is_special(id)
    }
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }
    fn stop_ids(&self) -> &[u32] {
        self.inner.stop_ids()
    }
    fn identity(&self) -> Option<String> {
        self.inner.identity()
    }
}

const ROWS: usize = 1800;

pub(super) fn rows() -> Files {
    let row = |i: usize| format!("{{\"text\": \"row {i} {}\", \"id\": {i}}}\n", "and on ".repeat(i % 9));
    let (first, second): (String, String) = ((0..ROWS / 3).map(row).collect(), (ROWS / 3..ROWS).map(row).collect());
    files(&[("a.jsonl", &first), ("b.jsonl", &second)])
}

pub(super) struct Place {
    pub(super) dir: tempfile::TempDir,
    pub(super) notes: RefCell<Vec<String>>,
}

impl Place {
    pub(super) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            notes: RefCell::default(),
        }
    }

    pub(super) fn load(&self, spec: &DatasetSpec, codec: &dyn TextCodec) -> Result<Dataset> {
        self.within(u64::MAX, spec, None, codec)
    }

    /// The cache, without a limit.
    pub(super) fn cache(&self) -> TokenCache<'_> {
        TokenCache {
            dir: self.dir.path(),
            least_bytes: 0,
            most_bytes: None,
            required: true,
            note: &|_| {},
        }
    }

    /// As `load`, with a limit of the cache, and for preferences.
    pub(super) fn within(
        &self,
        limit: u64,
        spec: &DatasetSpec,
        want: Option<PreferencePart>,
        codec: &dyn TextCodec,
    ) -> Result<Dataset> {
        let cache = TokenCache {
            dir: self.dir.path(),
            least_bytes: 0,
            most_bytes: Some(limit),
            required: true,
            note: &|line| self.notes.borrow_mut().push(line.to_string()),
        };
        match want {
            Some(want) => preference::load_cached(spec, want, codec, None, &cache),
            None => Dataset::load_cached(spec, codec, None, &cache),
        }
    }

    /// The only dataset in the cache.
    pub(super) fn set(&self) -> PathBuf {
        let sets = files::list(self.dir.path()).unwrap();
        assert_eq!(sets.len(), 1);
        sets[0].clone()
    }
}

/// Everything of the two sets is equal.
pub(super) fn assert_same(cached: &Dataset, memory: &Dataset) {
    assert!(cached.examples.file().is_some() && memory.examples.file().is_none());
    assert_eq!(cached.examples.len(), memory.examples.len());
    assert_eq!(cached.lengths(), memory.lengths());
    assert_eq!(
        (&cached.stats, &cached.fingerprint, &cached.readings),
        (&memory.stats, &memory.fingerprint, &memory.readings)
    );
    assert_eq!(cached.shares, memory.shares);
    assert_eq!(cached.preferences, memory.preferences);
    assert_eq!(cached.examples.measures().unwrap(), memory.examples.measures().unwrap());
    assert_eq!(cached.mixture().unwrap(), memory.mixture().unwrap());
    for row in 0..memory.examples.len() {
        assert_eq!(cached.examples.get(row).unwrap(), memory.examples.get(row).unwrap());
        assert_eq!(cached.origin(row).unwrap(), memory.origin(row).unwrap());
    }
}

#[test]
fn sources_with_columns_and_weights_are_cached() {
    let (mut files, place, codec) = (rows(), Place::new(), Counting::new(usize::MAX));
    let renamed = Mapping {
        columns: vec![(ColumnRole::Text, "text".into())],
        ..Mapping::default()
    };
    files.sources = (0..2).map(|i| Source::new(vec![files.paths[i].clone()])).collect();
    files.sources[0].weight = Some(3.0);
    files.sources[0].limit = Some(50);
    files.sources[1].mapping = renamed;
    let memory = Dataset::load(&spec(&files), &codec, None).unwrap();
    assert_same(&place.load(&spec(&files), &codec).unwrap(), &memory);
    assert!(memory.mixture().unwrap().is_some() && codec.texts() > 0);
    // Another weight is not another set.
    files.sources[0].weight = None;
    let cached = place.load(&spec(&files), &codec).unwrap();
    assert_eq!(codec.texts(), 0);
    assert_eq!(
        (cached.fingerprint, cached.shares[0].weight),
        (memory.fingerprint, None)
    );
}

#[test]
fn a_cached_set_is_the_set_in_memory_and_is_tokenized_once() {
    let (files, place, codec) = (rows(), Place::new(), Counting::new(usize::MAX));
    let memory = Dataset::load(&spec(&files), &codec, None).unwrap();
    assert!(memory.stats.split_rows > 0 && codec.texts() >= ROWS);
    let first = place.load(&spec(&files), &codec).unwrap();
    assert!(codec.texts() >= ROWS);
    assert_same(&first, &memory);
    assert!(chunks(&place.set()).len() > 2);
    let second = place.load(&spec(&files), &codec).unwrap();
    assert!(codec.texts() < 10, "the rows are tokenized again");
    assert_same(&second, &memory);

    // The order of a run, and its batches.
    let order = StreamSpec {
        batch_size: 3,
        accumulation: 2,
        packing: true,
        max_length: 16,
        shuffle: true,
        seed: 5,
        length: RunLength::Epochs(2.0),
    };
    let stream = |set| BatchStream::new(set, order).unwrap();
    let (a, b) = (stream(&second), stream(&memory));
    assert_eq!(a.steps(), b.steps());
    assert!((0..a.steps()).all(|step| a.window(step).unwrap() == b.window(step).unwrap()));

    // Held-out rows; the pieces of a row stay together.
    let ((train, eval), (train_too, eval_too)) = (second.split(0.2, 3).unwrap(), memory.split(0.2, 3).unwrap());
    assert_same(&train, &train_too);
    assert_same(&eval, &eval_too);
    let evals: Vec<RowOrigin> = (0..eval.examples.len()).map(|row| eval.origin(row).unwrap()).collect();
    assert!((0..train.examples.len()).all(|row| !evals.contains(&train.origin(row).unwrap())));
    assert!(place.notes.borrow().is_empty());
}

#[test]
fn a_stopped_cache_continues_after_its_last_complete_part() {
    let (files, place) = (rows(), Place::new());
    let memory = Dataset::load(&spec(&files), &real(), None).unwrap();
    let e = place.load(&spec(&files), &Counting::new(1100)).unwrap_err();
    assert!(e.to_string().contains("stopped by the test"), "{e}");
    let done = chunks(&place.set()).last().unwrap().read as usize;
    assert_eq!(done, 1024);
    // A process that ends during a write leaves a part of it.
    for name in [TOKENS, INDEX, CHUNKS] {
        let path = place.set().join(name);
        let mut bytes = files::read(&path).unwrap();
        bytes.extend(b"{\"re");
        files::write_atomic(&path, &bytes).unwrap();
    }
    let codec = Counting::new(usize::MAX);
    assert_same(&place.load(&spec(&files), &codec).unwrap(), &memory);
    let texts = codec.texts();
    assert!((ROWS - done..ROWS - done + 10).contains(&texts), "{texts}");
}

/// Row C8.
#[test]
fn a_damaged_file_is_found_and_written_again_with_one_note() {
    let (files, place) = (rows(), Place::new());
    let memory = Dataset::load(&spec(&files), &real(), None).unwrap();
    place.load(&spec(&files), &real()).unwrap();
    for (n, name) in [TOKENS, INDEX, TOKENS].into_iter().enumerate() {
        let path = place.set().join(name);
        let mut bytes = files::read(&path).unwrap();
        let middle = bytes.len() / 2;
        match n {
            2 => bytes.truncate(middle),
            _ => bytes[middle] ^= 4,
        }
        files::write_atomic(&path, &bytes).unwrap();
        let codec = Counting::new(usize::MAX);
        assert_same(&place.load(&spec(&files), &codec).unwrap(), &memory);
        // The parts before the damage are kept.
        assert!(codec.texts() < ROWS);
        assert_eq!(place.notes.borrow().len(), n + 1);
        assert!(place.notes.borrow()[n].contains("is damaged"));
    }
    // Without a note: a directory that was removed, or a manifest that was never written.
    files::remove_file(&place.set().join(super::ROWS)).unwrap();
    assert_same(&place.load(&spec(&files), &real()).unwrap(), &memory);
    files::remove_dir_all(&place.set()).unwrap();
    assert_same(&place.load(&spec(&files), &real()).unwrap(), &memory);
    assert_eq!(place.notes.borrow().len(), 3);
}

/// Pairs in two parts, so that each kind of file is there.
fn pairs_of_two_parts() -> Files {
    let row = |i: usize| format!("{{\"prompt\": \"row {i}\", \"chosen\": \" yes {i}\", \"rejected\": \" no\"}}\n");
    files(&[("p.jsonl", &(0..600).map(row).collect::<String>())])
}

/// How pairs are read, cut at the longest length, and their rows without a cache.
fn in_memory<'a>(files: &'a Files, want: PreferencePart, codec: &dyn TextCodec) -> (DatasetSpec<'a>, Dataset) {
    let spec = DatasetSpec {
        long: Long::Truncate,
        ..spec(files)
    };
    let memory = preference::load(&spec, want, codec, None).unwrap();
    (spec, memory)
}

const NAMES: [&str; 5] = [super::ROWS, CHUNKS, TOKENS, INDEX, PAIRS];

/// Row C8.
#[test]
fn a_flipped_bit_in_each_file_of_the_cache_is_found() {
    let (files, place, want) = (pairs_of_two_parts(), Place::new(), PreferencePart::Pairs);
    let spec = DatasetSpec {
        long: Long::Truncate,
        ..spec(&files)
    };
    place.within(u64::MAX, &spec, Some(want), &real()).unwrap();
    let dir = place.set();
    let (whole, file) = (chunks(&dir), TokenFile::open(&dir, true).unwrap());
    assert!(whole.len() > 1 && file.intact(&whole) == whole.len() && finished(&dir).is_some());
    for name in NAMES {
        let path = dir.join(name);
        let right = std::fs::read(&path).unwrap();
        // Each byte of what is read as text, and many of the numbers.
        let is_text = [super::ROWS, CHUNKS].contains(&name);
        for at in (0..right.len()).step_by(if is_text { 1 } else { 61 }) {
            let mut bytes = right.clone();
            bytes[at] ^= 1u8 << (at % 8);
            std::fs::write(&path, bytes).unwrap();
            let is_found = match name {
                super::ROWS => finished(&dir).is_none(),
                CHUNKS => {
                    let found = chunks(&dir);
                    found.len() < whole.len() && whole.starts_with(&found)
                }
                _ => file.intact(&whole) < whole.len(),
            };
            assert!(is_found, "{name}: byte {at}");
        }
        std::fs::write(&path, right).unwrap();
    }
}

/// Row C8.
#[test]
fn damage_in_each_file_of_the_cache_changes_no_row_and_no_fingerprint() {
    let (files, place, codec, want) = (pairs_of_two_parts(), Place::new(), real(), PreferencePart::Pairs);
    let (spec, memory) = in_memory(&files, want, &codec);
    let load = || place.within(u64::MAX, &spec, Some(want), &codec).unwrap();
    assert_same(&load(), &memory);
    let dir = place.set();
    let read = || NAMES.map(|name| std::fs::read(dir.join(name)).unwrap());
    let right = read();
    for (name, bytes) in NAMES.into_iter().zip(&right) {
        let (path, end) = (dir.join(name), bytes.len());
        // Whether `rows.json` is there: without it, as after a stop, the list of the parts is read.
        for is_finished in [true, false] {
            for how in ["flipped", "cut", "gone"] {
                let mut bytes = bytes.clone();
                match how {
                    "flipped" => bytes[end / 3] ^= 4,
                    _ => bytes.truncate(end - 2),
                }
                std::fs::write(&path, bytes).unwrap();
                if how == "gone" {
                    std::fs::remove_file(&path).unwrap();
                }
                if !is_finished && dir.join(super::ROWS).exists() {
                    std::fs::remove_file(dir.join(super::ROWS)).unwrap();
                }
                let is_known = dir.join(super::ROWS).exists();
                assert_same(&load(), &memory);
                // The list of the parts is not read if `rows.json` is whole.
                let says = is_known && name != CHUNKS;
                let notes = place.notes.take();
                assert_eq!(notes.len(), usize::from(says), "{name} {how}: {notes:?}");
                assert!(notes.iter().all(|note| note.contains("is damaged")), "{notes:?}");
                if is_known && name == CHUNKS {
                    std::fs::write(&path, &right[1]).unwrap();
                }
                assert!(read() == right, "{name} {how}: other files are written");
            }
        }
    }
}

/// Row C8. A wrong number with the right hash: only a program that writes files of the cache does this.
#[test]
fn numbers_of_a_row_that_do_not_fit_its_tokens_are_written_again_also_with_the_right_hash() {
    let (files, place, codec, want) = (pairs_of_two_parts(), Place::new(), real(), PreferencePart::Pairs);
    let (spec, memory) = in_memory(&files, want, &codec);
    let load = || place.within(u64::MAX, &spec, Some(want), &codec).unwrap();
    load();
    let dir = place.set();
    let read = || NAMES.map(|name| std::fs::read(dir.join(name)).unwrap());
    let (right, whole) = (read(), finished(&dir).unwrap());
    // Of the first row: its first token, length, trained tokens, last answer; the first document, the prompt.
    for (name, at) in [
        (INDEX, 7),
        (INDEX, 11),
        (INDEX, 15),
        (INDEX, 31),
        (PAIRS, 3),
        (PAIRS, 7),
    ] {
        // Without `rows.json` the list of the parts is read.
        for is_finished in [true, false] {
            let mut bytes = std::fs::read(dir.join(name)).unwrap();
            bytes[at] ^= 0x40;
            std::fs::write(dir.join(name), bytes).unwrap();
            let file = TokenFile::open(&dir, true).unwrap();
            let mut parts = whole.chunks.clone();
            parts[0].hash = hash(&file.part(&PartEnd::default(), &parts[0]).unwrap());
            let line = |part: &PartEnd| seal::sealed(&serde_json::to_string(part).unwrap());
            std::fs::write(dir.join(CHUNKS), parts.iter().map(line).collect::<String>()).unwrap();
            std::fs::remove_file(dir.join(super::ROWS)).unwrap();
            if is_finished {
                let rows = RowsFile {
                    chunks: parts,
                    ..copy_of(&whole)
                };
                let text = serde_json::to_string(&rows).unwrap();
                std::fs::write(dir.join(super::ROWS), seal::sealed(&text)).unwrap();
            }
            assert_same(&load(), &memory);
            let notes = place.notes.take();
            assert_eq!(notes.len(), usize::from(is_finished), "{name} {at}: {notes:?}");
            assert!(read() == right, "{name} {at}: other files are written");
        }
    }
}

fn copy_of(rows: &RowsFile) -> RowsFile {
    serde_json::from_str(&serde_json::to_string(rows).unwrap()).unwrap()
}

/// Row C8.
#[test]
fn a_flipped_bit_in_a_made_result_makes_it_again_with_a_note() {
    let (place, made, noted) = (Place::new(), Cell::new(0), Cell::new(0));
    let note = |line: &str| noted.set(noted.get() + usize::from(line.contains("is damaged")));
    let cache = TokenCache {
        note: &note,
        ..place.cache()
    };
    let make = || -> Result<Vec<u8>> {
        made.set(made.get() + 1);
        Ok(b"a result".to_vec())
    };
    let get = || cache.made(&["its", "names"], &make).unwrap().unwrap();
    assert_eq!(
        (get(), get(), made.get()),
        (b"a result".to_vec(), b"a result".to_vec(), 1)
    );
    let mut flipped = 0;
    for name in [made::MADE, CHUNKS] {
        let path = place.set().join(name);
        let right = std::fs::read(&path).unwrap();
        for at in 0..right.len() {
            let mut bytes = right.clone();
            bytes[at] ^= 1u8 << (at % 8);
            std::fs::write(&path, bytes).unwrap();
            flipped += 1;
            assert_eq!(get(), b"a result", "{name}: byte {at}");
            assert_eq!((made.get(), noted.get()), (1 + flipped, flipped), "{name}: byte {at}");
            assert!(std::fs::read(&path).unwrap() == right);
        }
    }
}

#[test]
fn another_setting_or_file_is_another_set_and_small_files_are_not_cached() {
    let (files, place) = (rows(), Place::new());
    let sets = || files::list(place.dir.path()).unwrap().len();
    place.load(&spec(&files), &real()).unwrap();
    let other = DatasetSpec {
        max_length: 17,
        ..spec(&files)
    };
    place.load(&other, &real()).unwrap();
    assert_eq!(sets(), 2);
    let text = files::read_text(Path::new(&files.paths[1])).unwrap() + "{\"text\": \"one more\"}\n";
    files::write_atomic(Path::new(&files.paths[1]), text.as_bytes()).unwrap();
    let more = place.load(&spec(&files), &real()).unwrap();
    assert_eq!((sets(), more.stats.rows), (3, ROWS + 1));
    let cache = TokenCache {
        dir: place.dir.path(),
        least_bytes: 1 << 20,
        most_bytes: None,
        required: true,
        note: &|_| (),
    };
    let small = Dataset::load_cached(&spec(&files), &real(), None, &cache).unwrap();
    assert!(small.examples.file().is_none() && sets() == 3);
    // A place where no directory can be made.
    let blocked = place.dir.path().join("file");
    ft_base::files::write_atomic(&blocked, b"").unwrap();
    let notes = RefCell::new(Vec::new());
    let mut cache = TokenCache {
        dir: &blocked,
        least_bytes: 0,
        most_bytes: None,
        required: false,
        note: &|line| notes.borrow_mut().push(line.to_string()),
    };
    let memory = Dataset::load_cached(&spec(&files), &real(), None, &cache).unwrap();
    assert!(memory.examples.file().is_none() && notes.borrow()[0].contains("no token cache"));
    cache.required = true;
    assert!(Dataset::load_cached(&spec(&files), &real(), None, &cache).is_err());
}

#[test]
fn bad_rows_are_reported_at_every_start() {
    let text: String = (0..1500)
        .map(|i| {
            if i == 1200 {
                "{}\n".into()
            } else {
                format!("{{\"text\": \"row {i}\"}}\n")
            }
        })
        .collect();
    let (files, place) = (files(&[("a.jsonl", &text)]), Place::new());
    for _ in 0..2 {
        let e = place.load(&spec(&files), &real()).unwrap_err().to_string();
        assert!(e.contains("a.jsonl:1201"), "{e}");
    }
    assert_eq!(chunks(&place.set()).last().unwrap().read, 1024);
}

#[test]
fn more_rows_than_their_places_can_count_are_refused() {
    assert_eq!(row_count(u32::MAX.into()).unwrap(), u32::MAX);
    for rows in [1 << 32, u64::MAX] {
        let e = row_count(rows).unwrap_err().to_string();
        assert!(e.contains("too many rows") && e.contains(&rows.to_string()), "{e}");
    }
}
