//! Tests of the token cache with preferences and dropped rows, and of its limit.

use super::tests::{Counting, Place, assert_same, rows};
use super::*;
use crate::prompts::{PromptLimits, PromptSpec, Prompts};
use crate::screen::{Dedup, Screen, ScreenSpec};
use crate::testing::{Files, files, real, short_rows};
use crate::{BatchStream, Long, RunLength, StreamSpec};

const ROWS: usize = 1400;

fn pairs(margin: &str) -> Files {
    let row = |i: usize| {
        let words = "and on ".repeat(i % 3);
        format!("{{\"prompt\": \"row {i} {words}\", \"chosen\": \" yes {i}\", \"rejected\": \" no\"{margin}}}\n")
    };
    files(&[("p.jsonl", &(0..ROWS).map(row).collect::<String>())])
}

/// Pairs, and answers with a label, in turn.
fn judged() -> Files {
    let row = |i: usize| match i % 3 {
        0 => format!("{{\"prompt\": \"ask {i}\", \"chosen\": \" yes\", \"rejected\": \" no\"}}\n"),
        _ => format!(
            "{{\"prompt\": \"ask {i}\", \"completion\": \" it is\", \"label\": {}}}\n",
            i.is_multiple_of(2)
        ),
    };
    files(&[("p.jsonl", &(0..ROWS).map(row).collect::<String>())])
}

fn spec(files: &Files) -> DatasetSpec<'_> {
    DatasetSpec {
        long: Long::Truncate,
        ..short_rows(files)
    }
}

#[test]
fn cached_preferences_are_those_in_memory_and_are_tokenized_once() {
    let wants = [
        PreferencePart::Pairs,
        PreferencePart::PairsAndPrompts,
        PreferencePart::WholePairs,
        PreferencePart::Judged,
    ];
    let cases = [pairs(""), pairs(", \"margin\": 0.5"), judged()];
    for (i, files) in cases.iter().enumerate() {
        let (place, codec) = (Place::new(), Counting::new(usize::MAX));
        for want in wants
            .into_iter()
            .filter(|want| i < 2 || *want == PreferencePart::Judged)
        {
            let memory = preference::load(&spec(files), want, &real(), None).unwrap();
            let first = place.within(u64::MAX, &spec(files), Some(want), &codec).unwrap();
            assert!(codec.texts() > ROWS);
            let second = place.within(u64::MAX, &spec(files), Some(want), &codec).unwrap();
            assert_eq!(codec.texts(), 0, "the rows are tokenized again");
            for cached in [&first, &second] {
                assert_same(cached, &memory);
            }
            let last = memory.examples.len() - 1;
            assert_eq!(second.parts(last).unwrap(), memory.parts(last).unwrap());
            assert_eq!(second.batch(&[last, 0]).unwrap(), memory.batch(&[last, 0]).unwrap());
            let order = StreamSpec {
                batch_size: 3,
                accumulation: 1,
                packing: false,
                max_length: 16,
                shuffle: true,
                seed: 5,
                length: RunLength::Epochs(1.0),
            };
            let window = |set| BatchStream::new(set, order).unwrap().window(7).unwrap();
            assert_eq!(window(&second), window(&memory));
            if want == PreferencePart::Judged {
                let joined = |set: &Dataset| [None, Some(9)].map(|seed| set.clone().mismatched(3, 12, seed).unwrap());
                for (cached, memory) in joined(&second).iter().zip(joined(&memory)) {
                    assert_same(cached, &memory);
                    for (row, measure) in memory.examples.measures().unwrap().into_iter().enumerate() {
                        assert_eq!(measure, RowMeasure::of(&memory.examples.get(row).unwrap()));
                    }
                }
            }
            let ((train, eval), (train_too, eval_too)) = (second.split(0.2, 3).unwrap(), memory.split(0.2, 3).unwrap());
            assert_same(&train, &train_too);
            assert_same(&eval, &eval_too);
        }
    }
}

#[test]
fn stopped_preferences_continue_after_their_last_complete_part() {
    for (files, want, texts) in [
        (judged(), PreferencePart::Judged, 2),
        (pairs(", \"margin\": 2"), PreferencePart::Pairs, 3),
    ] {
        let place = Place::new();
        let memory = preference::load(&spec(&files), want, &real(), None).unwrap();
        let stopped = place.within(u64::MAX, &spec(&files), Some(want), &Counting::new(texts * 1100));
        assert!(stopped.unwrap_err().to_string().contains("stopped by the test"));
        let done = chunks(&place.set()).last().unwrap().read as usize;
        assert!(done >= 512, "{done}");
        let codec = Counting::new(usize::MAX);
        let cached = place.within(u64::MAX, &spec(&files), Some(want), &codec).unwrap();
        assert_same(&cached, &memory);
        assert!(codec.texts() <= (ROWS - done) * 4);
    }
    // The rows before the stop have margins: rows after it must have them too.
    let text = |margin: &str| {
        let files = pairs(margin);
        ft_base::files::read_text(Path::new(&files.paths[0])).unwrap()
    };
    let mixed = files(&[("a.jsonl", &text(", \"margin\": 2")), ("b.jsonl", &text(""))]);
    let place = Place::new();
    for most in [4500, usize::MAX] {
        let failed = place.within(
            u64::MAX,
            &spec(&mixed),
            Some(PreferencePart::Pairs),
            &Counting::new(most),
        );
        let e = failed.unwrap_err().to_string();
        assert!(most == 4500 || e.contains("`margin`") && e.contains("b.jsonl:1"), "{e}");
    }
}

#[test]
fn dropped_rows_are_reported_at_every_start_without_reading_them_again() {
    let text: String = (0..900)
        .map(|i| format!("{{\"text\": \"one row {}\"}}\n", i % 700))
        .collect();
    let (files, place, codec) = (files(&[("a.jsonl", &text)]), Place::new(), Counting::new(usize::MAX));
    let screen = |dedup| {
        let spec = ScreenSpec {
            dedup,
            ..ScreenSpec::default()
        };
        Screen::new(spec).unwrap()
    };
    let load = |screen: &Option<Screen>| {
        let spec = DatasetSpec {
            screen: screen.as_ref(),
            ..spec(&files)
        };
        place.load(&spec, &codec).unwrap()
    };
    let [first, second] = [screen(Dedup::Exact), screen(Dedup::Exact)];
    let rows = load(&first);
    assert_eq!((rows.examples.len(), codec.texts()), (700, 700));
    let third = screen(Dedup::Exact);
    let again = DatasetSpec {
        screen: third.as_ref(),
        ..spec(&files)
    };
    assert_same(&load(&second), &Dataset::load(&again, &real(), None).unwrap());
    assert_eq!(codec.texts(), 0);
    let [first, second] = [first, second].map(|screen| screen.unwrap().report());
    assert_eq!(
        (first.rows, &first.dropped, first.lines()),
        (900, &second.dropped, second.lines())
    );
    assert_eq!(second.dropped.len(), 200);
    // Other settings are another set.
    assert_eq!(load(&None).examples.len(), 900);
    assert_eq!(files::list(place.dir.path()).unwrap().len(), 2);
}

#[test]
fn the_sets_that_were_not_used_for_the_longest_time_are_removed() {
    let (files, place) = (rows(), Place::new());
    let load = |limit: u64, max_length: usize| {
        let spec = DatasetSpec {
            max_length,
            ..short_rows(&files)
        };
        place.within(limit, &spec, None, &real()).unwrap()
    };
    let sets = || files::list(place.dir.path()).unwrap();
    let other = place.dir.path().join("notes");
    std::fs::create_dir_all(&other).unwrap();
    let used = load(u64::MAX, 16);
    drop(load(u64::MAX, 17));
    drop(load(u64::MAX, 18));
    assert_eq!(sets().len(), 4);
    let key = |max_length| {
        let spec = DatasetSpec {
            max_length,
            ..short_rows(&files)
        };
        let request = TokenRequest {
            spec: &spec,
            codec: &real(),
            template: None,
            want: None,
        };
        place.dir.path().join(key::of(&request).unwrap().unwrap())
    };
    // A start without writing removes nothing, and is a use.
    std::thread::sleep(std::time::Duration::from_millis(20));
    drop(load(1, 17));
    assert_eq!(sets().len(), 4);
    let size = |max_length| -> u64 {
        let files = files::list(&key(max_length)).unwrap().into_iter();
        files.map(|file| files::size(&file).unwrap()).sum()
    };
    // Enough for three sets: 18 is the oldest one that no process uses.
    drop(load(size(16) + size(17) + size(18) + size(18) / 2, 19));
    assert_eq!([16, 17, 18, 19].map(|n| key(n).exists()), [true, true, false, true]);
    drop(load(1, 20));
    assert_eq!([16, 17, 19, 20].map(|n| key(n).exists()), [true, false, false, true]);
    assert!(other.exists());
    assert!(
        place.notes.borrow().last().unwrap().contains("removed 2 datasets"),
        "{:?}",
        place.notes.borrow()
    );
    assert_eq!(used.examples.head(2).unwrap().len(), 2);
}

fn prompt_limits() -> PromptLimits {
    PromptLimits {
        window: 24,
        answer: 4,
        long: Long::Drop,
    }
}

#[test]
fn cached_prompts_are_those_in_memory_and_are_tokenized_once() {
    let row = |i: usize| {
        let (i, words) = (i % 700, "and on ".repeat(i % 700 % 9));
        format!("{{\"prompt\": \"row {i} {words}\", \"answer\": \"{i}\", \"weight\": 0.1, \"id\": {i}}}\n")
    };
    let files = files(&[("p.jsonl", &(0..ROWS).map(row).collect::<String>())]);
    for drops in [false, true] {
        let (place, codec) = (Place::new(), Counting::of_prompts(usize::MAX));
        let load = |codec: &Counting, cached: bool, answer: &str| {
            let screen = Screen::new(ScreenSpec {
                dedup: if drops { Dedup::Exact } else { Dedup::None },
                ..ScreenSpec::default()
            })
            .unwrap();
            let rows = spec(&files);
            let spec = PromptSpec {
                sources: rows.sources,
                render: rows.render,
                encoder: &rows.encoder(codec, None),
                answer,
                limits: prompt_limits(),
                screen: screen.as_ref(),
            };
            let note = |line: &str| place.notes.borrow_mut().push(line.to_string());
            let cache = TokenCache {
                note: &note,
                ..place.cache()
            };
            let out = if cached {
                Prompts::load_cached(&spec, &cache)
            } else {
                Prompts::load(&spec)
            };
            let report = screen.map(|s| s.report().lines());
            out.map(|out| (out, report))
        };
        let (memory, report) = load(&codec, false, "answer").unwrap();
        assert!(memory.dropped.0 > 0 && codec.prompts() >= memory.rows.len());
        for (time, most) in [("first", usize::MAX), ("second", 10)] {
            let (cached, said) = load(&codec, true, "answer").unwrap();
            assert!(codec.prompts() < most, "{time}");
            assert!(cached.rows == memory.rows && said == report, "{time}");
            assert_eq!((&cached.origins, &cached.readings), (&memory.origins, &memory.readings));
            assert_eq!(
                (&cached.fingerprint, &cached.shares),
                (&memory.fingerprint, &memory.shares)
            );
            assert_eq!(cached.dropped, memory.dropped);
        }
        // A damaged file is made again.
        let path = place.set().join(made::MADE);
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(load(&codec, true, "answer").unwrap().0.rows == memory.rows && codec.prompts() > 10);
        assert!(place.notes.borrow().iter().any(|note| note.contains("damaged")));
        // Another column of answers is another set; an error leaves no result.
        assert!(load(&codec, true, "id").unwrap().0.rows[0].answer == Some(0.into()) && codec.prompts() > 10);
        let e = load(&Counting::of_prompts(50), true, "weight").unwrap_err().to_string();
        assert!(e.contains("stopped by the test"), "{e}");
        assert_eq!(load(&codec, true, "weight").unwrap().0.rows[0].answer, Some(0.1.into()));
    }
}
