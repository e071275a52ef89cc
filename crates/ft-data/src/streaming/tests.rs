//! Tests of rows that are read during a run.

use super::*;
use crate::reading;
use crate::screen::{Dedup, ScreenSpec};
use crate::testing::{Files, files, real, short_rows as spec};

fn rows(n: usize) -> Files {
    let row = |i: usize| format!("{{\"text\": \"row {i} {}\"}}\n", "and on ".repeat(i % 6));
    let (a, b): (String, String) = ((0..n / 4).map(row).collect(), (n / 4..n).map(row).collect());
    files(&[("a.jsonl", &a), ("b.jsonl", &b)])
}

fn order(packing: bool, shuffle: bool) -> StreamSpec {
    StreamSpec {
        batch_size: 2,
        accumulation: 2,
        packing,
        max_length: 16,
        shuffle,
        seed: 3,
        length: RunLength::Steps(100),
    }
}

/// The documents of a batch.
fn documents(batch: &Batch) -> Vec<Vec<u32>> {
    let ends = batch.documents.windows(2);
    ends.map(|d| batch.ids[d[0]..d[1]].to_vec()).collect()
}

#[test]
fn an_epoch_has_every_row_once_and_without_shuffling_it_has_the_order_of_the_files() {
    let (files, codec) = (rows(57), real());
    let all = Dataset::load(&spec(&files), &codec, None).unwrap();
    let mut all: Vec<Vec<u32>> = all
        .examples
        .in_memory()
        .unwrap()
        .iter()
        .map(|e| e.ids.clone())
        .collect();
    for (packing, shuffle) in [(false, false), (true, true), (false, true)] {
        let mut stream = RowStream::new(&spec(&files), &codec, None, order(packing, shuffle), 10).unwrap();
        let mut seen = Vec::new();
        for epoch in 0..2 {
            let mut found = Vec::new();
            while found.len() < all.len() {
                found.extend(stream.unit().unwrap().into_iter().map(|(e, _)| e.ids));
            }
            assert_eq!(stream.epoch(), epoch);
            seen.push(found);
        }
        assert_eq!(seen[0] == all, !shuffle);
        assert_eq!(seen[0] == seen[1], !shuffle);
        for found in &mut seen {
            found.sort();
        }
        all.sort();
        assert_eq!((&seen[0], &seen[1]), (&all, &all));
        all = {
            let again = Dataset::load(&spec(&files), &codec, None).unwrap();
            again
                .examples
                .in_memory()
                .unwrap()
                .iter()
                .map(|e| e.ids.clone())
                .collect()
        };
        let counts = stream.take_counts();
        assert!(counts.rows >= 2 * 57 && counts.split_rows > 0);
    }
}

#[test]
fn a_resumed_stream_gives_the_same_batches_from_every_step() {
    let (files, codec) = (rows(57), real());
    for (packing, shuffle) in [(false, false), (true, true)] {
        let new = || RowStream::new(&spec(&files), &codec, None, order(packing, shuffle), 10).unwrap();
        let mut whole = new();
        let (mut steps, mut states, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..40 {
            states.push(whole.state(step).unwrap());
            steps.push(whole.step(step).unwrap());
            counts.push(whole.take_counts());
            // Also after the step was requested.
            assert_eq!(whole.state(step).unwrap(), states[step as usize]);
        }
        assert!(whole.epoch() >= 1);
        for step in [0, 1, 7, 20, 39] {
            let mut resumed = new();
            resumed.restore(&states[step]).unwrap();
            for (later, wanted) in steps.iter().enumerate().skip(step) {
                assert_eq!(&resumed.step(later as u64).unwrap(), wanted);
                assert_eq!(
                    resumed.take_counts(),
                    counts[later],
                    "step {later} after a resume at {step}"
                );
            }
        }
        assert_eq!(documents(&steps[0][0]).len() > 2, packing);
        assert!(whole.state(3).is_err());
    }
}

/// Rows of several columns, two of which are skipped, and rows that are cut.
#[test]
fn what_is_known_of_a_stream_is_that_of_rows_in_memory() {
    let squad = |i: usize| {
        let answers = if i.is_multiple_of(3) { "[]" } else { "[\"a\"]" };
        let more = if i == 4 { ", \"prompt_2\": \"x\"" } else { "" };
        let question = "q ".repeat(i);
        format!("{{\"context\": \"c\", \"question\": \"{question}\", \"answers\": {{\"text\": {answers}}}{more}}}\n")
    };
    let files = files(&[("a.jsonl", &(0..20).map(squad).collect::<String>())]);
    let (spec, codec) = (spec(&files), real());
    let memory = Dataset::load(&spec, &codec, None).unwrap();
    let stream = Dataset::sample(&spec, &codec, None, 100).unwrap();
    assert_eq!(stream.readings, memory.readings);
    assert_eq!(stream.stats, memory.stats);
    assert!(memory.stats.longest_written > 16, "{:?}", memory.stats);
    let text = memory.readings[0].describe("not used");
    assert!(text.contains("7 rows skipped") && text.contains("prompt_2"), "{text}");
    // The first rows alone have nothing to train.
    let skipped: String = (0..20).map(|i| if i < 10 { squad(0) } else { squad(1) }).collect();
    let files = crate::testing::files(&[("a.jsonl", &skipped)]);
    let stream = Dataset::sample(&crate::testing::short_rows(&files), &codec, None, 4).unwrap();
    assert_eq!(stream.examples.len(), 2);
}

/// A file behind the limit is not read, and may be broken.
#[test]
fn files_behind_a_limit_are_not_read() {
    let mut files = files(&[
        ("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n"),
        ("b.jsonl", "broken\n"),
    ]);
    files.sources[0].limit = Some(2);
    let stream = Dataset::sample(&spec(&files), &real(), None, 10).unwrap();
    assert_eq!(stream.readings.len(), 1);
    files.sources[0].limit = None;
    assert!(Dataset::sample(&spec(&files), &real(), None, 10).is_err());
}

/// Found by the fuzz target `options`: the columns of the row at which a run was resumed decided how the rest was read.
#[test]
fn a_stream_that_is_resumed_within_a_file_reads_it_as_its_first_row_says() {
    let codec = real();
    let texts: String = (0..20)
        .map(|i| {
            format!("{{\"text\": \"row {i}\", \"prompt\": \"p {i}\", \"completion\": \"c {i}\", \"images\": [{i}]}}\n")
        })
        .collect();
    let rows = format!("{{\"text\": \"first\"}}\n{texts}");
    let table = "text,prompt,completion\nfirst,,\n".to_string() + &"row,p,c\n".repeat(20);
    for (name, rows) in [("a.jsonl", rows), ("a.csv", table)] {
        let files = files(&[(name, &rows)]);
        let new = || RowStream::new(&spec(&files), &codec, None, order(false, false), 3).unwrap();
        let mut whole = new();
        let (mut steps, mut states) = (Vec::new(), Vec::new());
        for step in 0..5 {
            states.push(whole.state(step).unwrap());
            steps.push(whole.step(step).unwrap());
        }
        for step in 1..5 {
            let mut resumed = new();
            resumed.restore(&states[step]).unwrap();
            assert_eq!(resumed.step(step as u64).unwrap(), steps[step], "{name}, step {step}");
        }
    }
}

#[test]
fn a_position_that_no_run_reaches_is_refused() {
    let (files, codec, weighted) = (rows(57), real(), weighted());
    for files in [&files, &weighted] {
        let mut stream = RowStream::new(&spec(files), &codec, None, order(false, false), 10).unwrap();
        let start = stream.position.clone();
        for number in [u64::MAX, MOST + 1] {
            let mut positions = vec![
                Position {
                    epoch: number,
                    ..start.clone()
                },
                Position {
                    row: number,
                    ..start.clone()
                },
            ];
            if !start.sources.is_empty() {
                let sources = vec![(0, 0), (number, 0)];
                positions.push(Position {
                    sources,
                    ..start.clone()
                });
            }
            for position in positions {
                let e = stream
                    .restore(&serde_json::to_vec(&position).unwrap())
                    .unwrap_err()
                    .to_string();
                assert!(
                    e.contains("no valid data position") && e.contains(&number.to_string()),
                    "{e}"
                );
            }
        }
        // More rows than the files have: the next epoch begins.
        let position = Position {
            epoch: MOST,
            row: MOST,
            ..start.clone()
        };
        stream.restore(&serde_json::to_vec(&position).unwrap()).unwrap();
        assert_eq!(stream.step(0).unwrap().len(), 2);
    }
}

#[test]
fn a_stream_has_the_columns_and_the_limits_of_its_sources() {
    let (mut files, codec) = (rows(57), real());
    let both = files.paths.clone();
    files.sources = vec![Source::new(both.clone()), Source::new(both[..1].to_vec())];
    files.sources[0].limit = Some(20);
    files.sources[1].mapping.columns = vec![(crate::ColumnRole::Text, "text".into())];
    let all = Dataset::load(&spec(&files), &codec, None).unwrap();
    assert_eq!(all.stats.rows, 20 + 14);
    let mut all: Vec<Vec<u32>> = all.examples.iter().map(|e| e.unwrap().ids.clone()).collect();
    all.sort();
    let mut stream = RowStream::new(&spec(&files), &codec, None, order(true, true), 10).unwrap();
    for _ in 0..2 {
        let mut found = Vec::new();
        while found.len() < all.len() {
            found.extend(stream.unit().unwrap().into_iter().map(|(e, _)| e.ids));
        }
        found.sort();
        assert_eq!(found, all);
    }
}

#[test]
fn a_sample_has_the_first_rows_and_a_broken_row_is_named_when_it_is_read() {
    let (files, codec) = (rows(57), real());
    let sample = Dataset::sample(&spec(&files), &codec, None, 10).unwrap();
    assert_eq!((sample.stats.rows, sample.readings.len()), (10, 2));
    assert_eq!(sample.origin(0).unwrap().number, 1);
    assert!(sample.origins.len() == sample.examples.len() && sample.origins.len() > 10);
    let text = files.paths[1].clone();
    let broken = ft_base::files::read_text(Path::new(&text)).unwrap() + "{\"other\": 1}\n";
    ft_base::files::write_atomic(Path::new(&text), broken.as_bytes()).unwrap();
    let again = Dataset::sample(&spec(&files), &codec, None, 10).unwrap();
    assert_ne!(sample.fingerprint, again.fingerprint);
    let mut stream = RowStream::new(&spec(&files), &codec, None, order(false, false), 10).unwrap();
    let error = (0..40).find_map(|step| stream.step(step).err()).unwrap().to_string();
    assert!(error.contains("b.jsonl:44"), "{error}");
    let epochs = StreamSpec {
        length: RunLength::Epochs(1.0),
        ..order(false, false)
    };
    assert!(RowStream::new(&spec(&files), &codec, None, epochs, 10).is_err());
}

#[test]
fn the_rows_of_a_step_are_known_until_a_few_steps_later() {
    let (files, codec) = (rows(57), real());
    let all = Dataset::load(&spec(&files), &codec, None).unwrap();
    for (packing, shuffle) in [(false, false), (false, true), (true, true)] {
        let mut stream = RowStream::new(&spec(&files), &codec, None, order(packing, shuffle), 10).unwrap();
        for step in 0..6 {
            let batches = stream.step(step).unwrap();
            let used = stream.used(step).unwrap();
            assert_eq!(used.len(), batches.len());
            for (batch, rows) in batches.iter().zip(used) {
                let documents = documents(batch);
                assert_eq!(documents.len(), rows.len());
                // A long row has several pieces.
                let is_of = |i: usize, ids: &[u32], origin: &RowOrigin| {
                    all.origin(i).unwrap() == *origin && all.examples.get(i).unwrap().ids == ids
                };
                for (ids, origin) in documents.iter().zip(rows) {
                    assert!((0..all.examples.len()).any(|i| is_of(i, ids, origin)), "{origin:?}");
                }
            }
        }
        assert!(stream.used(2).is_some() && stream.used(1).is_none() && stream.used(6).is_none());
    }
}

/// Sources of 40 and 10 rows, the second with three times the weight of the first one.
fn weighted() -> Files {
    let row = |name: &str, i: usize| format!("{{\"text\": \"{name} {i}\"}}\n");
    let text = |name: &str, n: usize| (0..n).map(|i| row(name, i)).collect::<String>();
    let mut files = files(&[("a.jsonl", &text("red", 40)), ("b.jsonl", &text("blue", 10))]);
    files.sources = files.paths.iter().map(|path| Source::new(vec![path.clone()])).collect();
    files.sources[1].weight = Some(3.0);
    files
}

#[test]
fn weighted_sources_give_their_share_of_every_window_and_all_rows_before_they_repeat_one() {
    let (files, codec) = (weighted(), real());
    for shuffle in [false, true] {
        let mut stream = RowStream::new(&spec(&files), &codec, None, order(false, shuffle), 10).unwrap();
        let (mut seen, mut windows) = (Vec::new(), Vec::new());
        for _ in 0..16 {
            stream.position = stream.next.clone();
            stream.fill().unwrap();
            windows.push(stream.origins.iter().filter(|origin| origin.file == 1).count());
            seen.extend(stream.origins.iter().map(|origin| (origin.file, origin.number)));
        }
        // 7.5 of 10 rows.
        assert!(windows.iter().all(|n| [7, 8].contains(n)), "{windows:?}");
        assert_eq!(windows.iter().sum::<usize>(), 120);
        let times = |file, number| seen.iter().filter(|row| **row == (file, number)).count();
        assert!((1..=40).all(|row| times(0, row) == 1) && (1..=10).all(|row| times(1, row) == 12));
        assert_eq!(
            (stream.next.sources.clone(), stream.epoch()),
            (vec![(0, 40), (11, 10)], 0)
        );
    }
}

fn screen(dedup: Dedup) -> Screen {
    let spec = ScreenSpec {
        dedup,
        ..ScreenSpec::default()
    };
    Screen::new(spec).unwrap().unwrap()
}

#[test]
fn weighted_and_screened_streams_resume_to_the_same_batches() {
    let (mut weighted, codec) = (weighted(), real());
    // Each row of the first source three times.
    let path = Path::new(&weighted.paths[0]).to_path_buf();
    let text = ft_base::files::read_text(&path).unwrap();
    ft_base::files::write_atomic(&path, [&text[..], &text, &text].concat().as_bytes()).unwrap();
    let exact = screen(Dedup::Exact);
    for (weight, screened) in [(Some(3.0), false), (Some(3.0), true), (None, true)] {
        weighted.sources[1].weight = weight;
        let spec = DatasetSpec {
            screen: screened.then_some(&exact),
            ..spec(&weighted)
        };
        let new = || RowStream::new(&spec, &codec, None, order(true, true), 10).unwrap();
        let (mut whole, mut steps, mut states) = (new(), Vec::new(), Vec::new());
        for step in 0..40 {
            states.push(whole.state(step).unwrap());
            steps.push(whole.step(step).unwrap());
        }
        for step in [0, 1, 5, 20, 39] {
            let mut resumed = new();
            resumed.restore(&states[step]).unwrap();
            for (later, wanted) in steps.iter().enumerate().skip(step) {
                assert_eq!(
                    &resumed.step(later as u64).unwrap(),
                    wanted,
                    "{weight:?} {screened} {step}"
                );
            }
        }
    }
    weighted.sources[1].weight = Some(1.0);
    let mut stream = RowStream::new(&spec(&weighted), &codec, None, order(true, true), 10).unwrap();
    stream.step(0).unwrap();
    let bytes = stream.state(1).unwrap();
    weighted.sources[1].weight = None;
    let mut other = RowStream::new(&spec(&weighted), &codec, None, order(true, true), 10).unwrap();
    assert!(other.restore(&bytes).unwrap_err().to_string().contains("weight"));
}

#[test]
fn a_screened_stream_keeps_the_first_of_equal_rows_in_every_epoch() {
    let text: String = (0..60).map(|i| format!("{{\"text\": \"row {}\"}}\n", i % 20)).collect();
    let (files, codec) = (files(&[("a.jsonl", &text)]), real());
    let exact = screen(Dedup::Exact);
    let spec = DatasetSpec {
        screen: Some(&exact),
        ..spec(&files)
    };
    let mut stream = RowStream::new(&spec, &codec, None, order(false, true), 7).unwrap();
    let mut kept = Vec::new();
    while stream.epoch() < 3 {
        stream.position = stream.next.clone();
        stream.fill().unwrap();
        kept.extend(stream.origins.iter().map(|origin| origin.number));
    }
    kept.truncate(60);
    let wanted: Vec<u64> = (0..3).flat_map(|_| 1..=20).collect();
    assert_eq!(kept, wanted);
    // A file in two sources: the rows of the second one are duplicates.
    let mut twice = files.sources.clone();
    twice.push(twice[0].clone());
    for weight in [None, Some(1.0)] {
        twice.iter_mut().for_each(|source| source.weight = weight);
        let spec = DatasetSpec {
            sources: &twice[..],
            ..spec.clone()
        };
        let mut stream = RowStream::new(&spec, &codec, None, order(false, false), 7).unwrap();
        let mut seen: Vec<(u64, u32)> = Vec::new();
        for _ in 0..30 {
            stream.position = stream.next.clone();
            stream.fill().unwrap();
            seen.extend(stream.origins.iter().map(|origin| (origin.number, origin.file)));
        }
        seen.sort_unstable();
        seen.dedup();
        // Each row is that of one source: with weights of the source that comes to it first.
        assert_eq!(
            seen.iter().map(|(row, _)| *row).collect::<Vec<_>>(),
            (1..=20).collect::<Vec<_>>()
        );
        assert_eq!(seen.iter().all(|(_, file)| *file == 0), weight.is_none());
    }
    // A sample reports the rows of the first window, and the columns of the first row of each file.
    let sample = Dataset::sample(&spec, &codec, None, 25).unwrap();
    assert_eq!(reading::lines(&sample.readings, "not used"), ["text: text"]);
    assert_eq!((exact.report().rows, exact.report().dropped.len()), (25, 5));
}

/// Row R6.
#[test]
fn a_stream_is_known_by_the_content_of_its_files_and_not_by_their_names() {
    let codec = real();
    let of = |contents: &[(&str, &str)]| {
        let sample = Dataset::sample(&spec(&files(contents)), &codec, None, 10).unwrap();
        assert!(sample.fingerprint_before.is_empty());
        sample.fingerprint
    };
    let row = |i: usize| format!("{{\"text\": \"row {i:02}\"}}\n");
    let text: String = (0..40).map(row).collect();
    let print = of(&[("a.jsonl", &text), ("b.jsonl", "{\"text\": \"more\"}\n")]);
    assert!(print.starts_with("blake3-content:"), "{print}");
    // A row beyond the first window, in a file of the same size.
    let changed = text.replace("row 30", "row 99");
    let other = of(&[("a.jsonl", &changed), ("b.jsonl", "{\"text\": \"more\"}\n")]);
    assert_ne!(print, other);
    // Other names with the same rows in the same order.
    let moved = of(&[("part.1.jsonl", &text), ("part.2.jsonl", "{\"text\": \"more\"}\n")]);
    assert_eq!(print, moved);
    // Another order, and the same bytes as another kind of file.
    assert_ne!(print, of(&[("b.jsonl", "{\"text\": \"more\"}\n"), ("a.jsonl", &text)]));
    assert_ne!(print, of(&[("a.jsonl", &text), ("b.txt", "{\"text\": \"more\"}\n")]));
}

/// Other rules may give the same files other masks, which a resumed run must not get.
#[test]
fn a_stream_is_known_by_the_rules_by_which_its_rows_are_read() {
    let (files, codec) = (rows(20), real());
    let spec = spec(&files);
    let sample = Dataset::sample(&spec, &codec, None, 10).unwrap();
    let of = |rules| fingerprint(&spec, &codec, None, rules).unwrap();
    assert_eq!(sample.fingerprint, of(RULES));
    assert_ne!(of(RULES), of("rules 1"));
}

/// Row R6.
#[test]
fn a_stream_is_known_by_the_rows_with_which_it_is_compared_too() {
    let (files, codec) = (rows(20), real());
    let of = |text: &str| {
        let evaluation = crate::testing::files(&[("eval.jsonl", text)]);
        let screen = ScreenSpec {
            evaluation: evaluation.paths.clone(),
            ..ScreenSpec::default()
        };
        let screen = Screen::new(screen).unwrap().unwrap();
        let spec = DatasetSpec {
            screen: Some(&screen),
            ..spec(&files)
        };
        Dataset::sample(&spec, &codec, None, 10).unwrap().fingerprint
    };
    let text = "{\"text\": \"one two three four five six seven eight nine ten\"}\n";
    assert_eq!(of(text), of(text));
    assert_ne!(of(text), of(&text.replace("ten", "ton")));
    assert_ne!(
        of(text),
        Dataset::sample(&spec(&files), &codec, None, 10).unwrap().fingerprint
    );
}
