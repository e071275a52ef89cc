//! Measures disk and memory bandwidth of this machine with short, timed samples.

use super::files::{self, AtomicFile};
use crate::{Error, Result};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskSpeed {
    /// Of writes, synced.
    pub write: f64,
    /// Of reads, without the page cache.
    pub read: f64,
}

const PIECE: usize = 4 << 20;
/// Most bytes that the sample writes.
const MOST: usize = 64 << 20;
/// Time after which writing stops.
const PATIENCE: Duration = Duration::from_millis(250);

/// Writes a file of at most 64 MiB into `dir`, syncs it, reads it and removes it.
///
/// # Errors
/// The directory cannot be written, or is full.
pub fn disk(dir: &Path) -> Result<DiskSpeed> {
    let path = dir.join("ft-speed");
    // All pieces differ: some disks compress or deduplicate.
    let mut word = 0x9e37_79b9_7f4a_7c15u64;
    let mut piece = vec![0u8; PIECE];
    let mut fill = |piece: &mut [u8]| {
        for bytes in piece.as_chunks_mut::<8>().0 {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            *bytes = word.to_le_bytes();
        }
    };
    let mut file = AtomicFile::create(&path)?;
    let (mut written, mut time) = (0usize, Duration::ZERO);
    while written < MOST && time < PATIENCE {
        fill(&mut piece);
        let begun = Instant::now();
        file.write(&piece)?;
        written += PIECE;
        if written.is_multiple_of(4 * PIECE) || written == PIECE {
            file.sync()?;
        }
        time += begun.elapsed();
    }
    let begun = Instant::now();
    file.sync()?;
    time += begun.elapsed();
    let write = written as f64 / time.as_secs_f64().max(1e-9);

    let mut source = file.reopen()?;
    files::forget(&source, 0, 0);
    let begun = Instant::now();
    let mut read = 0;
    while begun.elapsed() < PATIENCE {
        match source.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(e) => {
                return Err(Error::io("cannot read the file that was just written")
                    .at_path(dir)
                    .cause(e));
            }
        }
    }
    // Dropped before `commit`: leaves no file.
    drop(file);
    Ok(DiskSpeed {
        write,
        read: read as f64 / begun.elapsed().as_secs_f64().max(1e-9),
    })
}

/// Total read bandwidth of memory with `threads` threads, bytes per second; `room` bounds the memory used.
pub fn memory(threads: usize, room: u64) -> f64 {
    let threads = threads.clamp(1, 256);
    // Larger than the shared caches, as far as `room` allows.
    let each = ((256u64 << 20).min(room / 4) as usize / threads).clamp(1 << 20, 64 << 20) / 8;
    let begun = std::sync::Barrier::new(threads);
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let one = || {
            let words = vec![1u64; each];
            begun.wait();
            let start = Instant::now();
            let (mut rounds, mut sum) = (0u64, 0u64);
            while start.elapsed() < Duration::from_millis(150) {
                sum = words.iter().fold(sum, |a, w| a.wrapping_add(*w));
                rounds += 1;
            }
            std::hint::black_box(sum);
            (rounds as f64 * each as f64 * 8.0) / start.elapsed().as_secs_f64()
        };
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        handles.into_iter().filter_map(|h| h.join().ok()).collect()
    });
    rates.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let speed = disk(dir.path()).unwrap();
        assert!(speed.write > 0.0 && speed.read > 0.0, "{speed:?}");
        assert!(files::list(dir.path()).unwrap().is_empty());
        assert!(disk(&dir.path().join("not/there")).is_err());
        assert!(memory(2, 64 << 20) > 1e6);
    }
}
