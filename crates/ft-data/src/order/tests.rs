//! Tests of the order of rows: steps, epochs, resuming, the largest micro-batch.

use super::*;

/// n rows; row i has i % 7 + 2 tokens with ids 100 i, 100 i + 1, ...
fn dataset(n: usize) -> Dataset {
    let row = |i: usize| {
        let t = i % 7 + 2;
        Example {
            ids: (0..t as u32).map(|j| 100 * i as u32 + j).collect(),
            trained: (0..t).map(|j| j > 0).collect(),
        }
    };
    Dataset::from_examples((0..n).map(row).collect())
}

fn spec(batch_size: usize, accumulation: usize, length: RunLength) -> StreamSpec {
    StreamSpec {
        batch_size,
        accumulation,
        packing: false,
        max_length: 16,
        shuffle: false,
        seed: 42,
        length,
    }
}

#[test]
fn unshuffled_steps_take_the_next_rows_of_the_file_and_wrap_around() {
    let data = dataset(5);
    let stream = BatchStream::new(&data, spec(2, 2, RunLength::Steps(3))).unwrap();
    let rows: Vec<_> = (0..6).map(|m| stream.rows(m)).collect();
    assert_eq!(rows, [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]);
    assert_eq!((stream.steps(), stream.micro_batches()), (3, 6));
    assert_eq!(stream.window(1).unwrap(), [2, 3].map(|m| stream.batch(m).unwrap()));
    assert_eq!(stream.batch(2).unwrap().documents, vec![0, 6, 8]);
    assert_eq!(stream.epoch_after(2), 1.6);
}

#[test]
fn a_run_by_epochs_sees_each_row_equally_often_and_its_last_window_is_short() {
    let data = dataset(7);
    for (batch_size, accumulation, epochs, steps, last) in [
        (2, 2, 1.0, 2, vec![2, 1]),
        (2, 2, 2.0, 4, vec![2]),
        (4, 1, 1.0, 2, vec![3]),
        (3, 8, 0.1, 1, vec![1]),
    ] {
        let stream = BatchStream::new(&data, spec(batch_size, accumulation, RunLength::Epochs(epochs))).unwrap();
        assert_eq!(stream.steps(), steps);
        let windows: Vec<_> = (0..steps).map(|s| stream.window(s).unwrap()).collect();
        let shape = |w: &Vec<Batch>| w.iter().map(|b| b.documents.len() - 1).collect::<Vec<_>>();
        assert_eq!(shape(windows.last().unwrap()), last);
        let rows: usize = windows.iter().flat_map(shape).sum();
        assert_eq!(rows, (7.0 * epochs).ceil() as usize);
        assert_eq!(stream.epoch_after(steps), rows as f64 / 7.0);
    }
    assert_eq!(
        BatchStream::new(&dataset(30), spec(1, 1, RunLength::Epochs(0.1)))
            .unwrap()
            .steps(),
        3
    );
}

#[test]
fn the_order_is_a_function_of_seed_epoch_and_index_only() {
    let data = dataset(23);
    for packing in [false, true] {
        let shuffled = StreamSpec {
            shuffle: true,
            packing,
            ..spec(3, 1, RunLength::Steps(100))
        };
        let a = BatchStream::new(&data, shuffled).unwrap();
        let b = BatchStream::new(&data, shuffled).unwrap();
        let forward: Vec<_> = (0..40).map(|m| a.rows(m)).collect();
        let backward: Vec<_> = (0..40).rev().map(|m| b.rows(m)).collect();
        assert_eq!(forward, backward.into_iter().rev().collect::<Vec<_>>());
        let c = BatchStream::new(&data, StreamSpec { seed: 43, ..shuffled }).unwrap();
        assert_ne!(forward, (0..40).map(|m| c.rows(m)).collect::<Vec<_>>());
        // Each epoch contains every row once, in its own order.
        let per_epoch = StreamSpec {
            batch_size: a.units_per_epoch() as usize,
            ..shuffled
        };
        let e = BatchStream::new(&data, per_epoch).unwrap();
        assert_ne!(e.rows(0), e.rows(1));
        for m in 0..3 {
            let mut rows = e.rows(m);
            rows.sort_unstable();
            assert_eq!(rows, (0..23).collect::<Vec<_>>());
        }
    }
}

#[test]
fn packed_and_unpacked_epochs_hold_the_same_tokens_targets_and_documents() {
    let data = dataset(50);
    let of = |packing: bool| {
        let s = StreamSpec {
            packing,
            shuffle: true,
            ..spec(1, 1, RunLength::Epochs(1.0))
        };
        let stream = BatchStream::new(&data, s).unwrap();
        let mut documents = Vec::new();
        for m in 0..stream.micro_batches() {
            let b = stream.batch(m).unwrap();
            assert!(!packing || b.len() <= 16);
            for d in b.documents.windows(2) {
                let range = d[0]..d[1];
                assert_eq!(b.positions[range.clone()], (0..range.len() as u32).collect::<Vec<_>>());
                documents.push((b.ids[range.clone()].to_vec(), b.targets[range].to_vec()));
            }
        }
        documents.sort();
        (documents, stream.micro_batches(), stream.density())
    };
    let ((unpacked, rows, _), (packed, bins, density)) = (of(false), of(true));
    assert_eq!(unpacked, packed);
    assert_eq!(rows, 50);
    assert!(bins < 25, "{bins} bins");
    assert!(density > 0.8 && density <= 1.0, "density {density}");
}

#[test]
fn evaluation_batches_keep_the_file_order_and_hold_each_row_once() {
    let data = dataset(20);
    let batches: Vec<Batch> = eval_batches(&data, 12).collect::<Result<_>>().unwrap();
    assert!(batches.iter().all(|b| b.len() <= 12) && batches.len() < 20);
    let ids: Vec<u32> = batches.iter().flat_map(|b| b.ids.clone()).collect();
    assert_eq!(
        ids,
        data.examples
            .in_memory()
            .unwrap()
            .iter()
            .flat_map(|e| e.ids.clone())
            .collect::<Vec<_>>()
    );
    assert_eq!(eval_batches(&data, 1).count(), 20);
    assert_eq!(eval_batches(&Dataset::default(), 1).count(), 0);
}

#[test]
fn the_largest_micro_batch_is_the_one_that_the_run_makes() {
    let data = dataset(50);
    let largest = |s: StreamSpec| BatchStream::new(&data, s).unwrap().largest();
    for (packing, shuffle, batch_size, length) in [
        (false, true, 3, RunLength::Steps(40)),
        (true, true, 2, RunLength::Epochs(3.0)),
        (false, false, 7, RunLength::Epochs(1.0)),
        // More than an epoch in one micro-batch.
        (true, false, 40, RunLength::Steps(2)),
        (false, false, 120, RunLength::Steps(1)),
    ] {
        let s = StreamSpec {
            packing,
            shuffle,
            ..spec(batch_size, 1, length)
        };
        let stream = BatchStream::new(&data, s).unwrap();
        let batches = (0..stream.micro_batches()).map(|m| stream.batch(m).unwrap());
        let tokens = batches.map(|b| b.len()).max().unwrap();
        let found = stream.largest();
        assert_eq!((found.tokens, found.longest), (tokens, 8), "{s:?}");
        assert!(
            found.documents >= batch_size.min(stream.units_per_epoch() as usize),
            "{s:?}"
        );
    }
    // A run that ends before the longest rows.
    let short = StreamSpec {
        shuffle: false,
        ..spec(1, 1, RunLength::Steps(3))
    };
    assert_eq!(largest(short).longest, 4);
    // Too long to enumerate: the sum of the largest units, which is never too small.
    let endless = spec(2, 1, RunLength::Steps(u64::MAX / 4));
    assert_eq!(largest(endless).tokens, 16);
    let packed = StreamSpec {
        packing: true,
        ..spec(500, 1, RunLength::Steps(1 << 40))
    };
    let stream = BatchStream::new(&data, packed).unwrap();
    let all = stream.lengths().iter().sum::<u32>() as usize;
    let (full, rest) = (
        500 / stream.units_per_epoch() as usize,
        500 % stream.units_per_epoch() as usize,
    );
    let found = stream.largest().tokens;
    assert!(found >= full * all && found <= full * all + rest * 16, "{found}");
    // An absurd batch size is not summed element by element.
    let absurd = spec(usize::MAX, 1, RunLength::Steps(1));
    assert_eq!(largest(absurd).tokens, usize::MAX);
}

#[test]
fn impossible_settings_are_refused() {
    let data = dataset(3);
    assert!(BatchStream::new(&Dataset::default(), spec(1, 1, RunLength::Steps(1))).is_err());
    assert!(BatchStream::new(&data, spec(0, 1, RunLength::Steps(1))).is_err());
    assert!(BatchStream::new(&data, spec(1, 0, RunLength::Steps(1))).is_err());
    for epochs in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(BatchStream::new(&data, spec(1, 1, RunLength::Epochs(epochs))).is_err());
    }
    assert_eq!(
        BatchStream::new(&data, spec(1, 1, RunLength::Steps(0)))
            .unwrap()
            .steps(),
        0
    );
    assert_eq!(RunLength::new(-1, 2.0), RunLength::Epochs(2.0));
}
