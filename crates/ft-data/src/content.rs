//! Hashes of the content of files at a bounded cost: all bytes of small files, evenly spaced pieces of large ones. They
//! do not depend on names and folders.

use ft_base::{Error, Result, files, progress};
use rayon::prelude::*;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How much of the files is read.
#[derive(Debug, Clone, Copy)]
struct ReadLimits {
    /// Files that have at most so many bytes together are read whole.
    whole: u64,
    /// Bytes of a piece.
    piece: u64,
    /// Pieces of a file: the first one, the last one, and others at equal distances.
    pieces: u64,
    /// Pieces of all files together, unless `FEWEST` of each are more.
    all_pieces: u64,
}

/// A large file costs 4 MiB, many of them 256 MiB: a second on a local disk.
const LIMITS: ReadLimits = ReadLimits {
    whole: 256 << 20,
    piece: 64 << 10,
    pieces: 64,
    all_pieces: 4096,
};
/// Fewest pieces of a file: its start, its middle and its end.
const FEWEST: u64 = 3;

/// The hash of the content of each file: of its size, and of all its bytes if the files have at most 256 MiB together,
/// else of pieces.
///
/// # Errors
/// A file does not exist or cannot be read.
pub fn hashes<P: AsRef<Path> + Sync>(paths: &[P]) -> Result<Vec<String>> {
    within(paths, LIMITS)
}

/// The hash of the content of a file, as `hashes`.
///
/// # Errors
/// As `hashes`.
pub fn hash(path: &Path) -> Result<String> {
    Ok(hashes(&[path])?.concat())
}

/// One hash of several texts, such as settings and hashes, behind its kind and a colon.
pub fn of_texts<T: AsRef<str>>(texts: &[T]) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in texts {
        put(&mut hasher, text.as_ref());
    }
    named(&hasher)
}

/// Adds a text with its length.
pub(super) fn put(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// The hash behind its kind: older fingerprints of files have none, and hold names and sizes only.
pub(super) fn named(hasher: &blake3::Hasher) -> String {
    format!("blake3-content:{}", hasher.finalize().to_hex())
}

fn within<P: AsRef<Path> + Sync>(paths: &[P], limits: ReadLimits) -> Result<Vec<String>> {
    let _phase = progress::phase("comparing the content of files", 0, "");
    let sizes = paths.iter().map(|path| files::size(path.as_ref()));
    let sizes = sizes.collect::<Result<Vec<u64>>>()?;
    let most = most_pieces(&sizes, limits);
    let one = |(path, size): (&P, &u64)| of_file(path.as_ref(), *size, limits.piece, most);
    paths.par_iter().zip(sizes.par_iter()).map(one).collect()
}

/// The number of pieces of a file that are hashed at most.
fn most_pieces(sizes: &[u64], limits: ReadLimits) -> u64 {
    if sizes.iter().sum::<u64>() <= limits.whole {
        return u64::MAX;
    }
    (limits.all_pieces / sizes.len().max(1) as u64).clamp(FEWEST, limits.pieces)
}

fn of_file(path: &Path, size: u64, piece: u64, most: u64) -> Result<String> {
    let file = files::open(path)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&size.to_le_bytes());
    let mut buffer = vec![0; piece as usize];
    for (first, length) in pieces(size, piece, most) {
        let part = &mut buffer[..length];
        file.read_exact_at(part, first)
            .map_err(|e| Error::io("cannot read the file").at_path(path).cause(e))?;
        hasher.update(part);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Start and length of the pieces of a file that are hashed: all, or `most` of them at equal distances.
fn pieces(size: u64, piece: u64, most: u64) -> impl Iterator<Item = (u64, usize)> {
    let all = size.div_ceil(piece);
    let count = all.min(most);
    let last = size.saturating_sub(piece);
    (0..count).map(move |i| {
        let first = if count == all {
            i * piece
        } else {
            (u128::from(last) * u128::from(i) / u128::from(count - 1)) as u64
        };
        (first, piece.min(size - first) as usize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::files;

    const SMALL: ReadLimits = ReadLimits {
        whole: 100,
        piece: 8,
        pieces: 5,
        all_pieces: 12,
    };

    #[test]
    fn small_files_are_read_whole_and_large_ones_in_pieces_with_both_ends() {
        let of = |size, most| pieces(size, 8, most).collect::<Vec<_>>();
        assert!(of(0, 5).is_empty());
        assert_eq!(of(20, u64::MAX), [(0, 8), (8, 8), (16, 4)]);
        // As many pieces as there are.
        assert_eq!(of(20, 3), of(20, u64::MAX));
        assert_eq!(of(48, 5), [(0, 8), (10, 8), (20, 8), (30, 8), (40, 8)]);
        assert_eq!(of(1 << 62, 3), [(0, 8), ((1u64 << 61) - 4, 8), ((1u64 << 62) - 8, 8)]);
    }

    #[test]
    fn the_pieces_of_all_files_have_a_bound() {
        let most = |sizes: &[u64]| most_pieces(sizes, SMALL);
        assert_eq!(most(&[40, 60]), u64::MAX);
        assert_eq!([most(&[101]), most(&[60; 3]), most(&[60; 9])], [5, 4, 3]);
        let large = 1u64 << 40;
        let read = pieces(large, LIMITS.piece, most_pieces(&[large], LIMITS));
        let read: usize = read.map(|(_, length)| length).sum();
        assert_eq!(read, 4 << 20);
    }

    #[test]
    fn each_byte_of_small_files_counts_and_each_hashed_byte_of_large_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let of = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            within(&[&path], SMALL).unwrap()
        };
        let text = "0123456789".repeat(12).into_bytes();
        let (large, small) = (of(&text), of(&text[..100]));
        let read = pieces(120, 8, 5).flat_map(|(first, n)| first as usize..first as usize + n);
        let read: Vec<usize> = read.collect();
        for at in 0..120 {
            let mut changed = text.clone();
            changed[at] = b'x';
            assert_eq!(of(&changed) != large, read.contains(&at), "{at}");
            assert_eq!(of(&changed[..100]) != small, at < 100, "{at}");
        }
        // A longer file whose hashed bytes are the same.
        assert_ne!(of(&[7; 120]), of(&[7; 121]));
    }

    #[test]
    fn names_do_not_count_and_a_missing_file_is_named() {
        let (a, b) = (files(&[("a.jsonl", "text"), ("c", "")]), files(&[("b.txt", "text")]));
        let (a, b) = (hashes(&a.paths).unwrap(), hashes(&b.paths).unwrap());
        assert_eq!((a.len(), &a[0]), (2, &b[0]));
        assert_ne!(a[0], a[1]);
        let e = hash(Path::new("/no/such/file")).unwrap_err().to_string();
        assert!(e.contains("/no/such/file"), "{e}");
    }

    #[test]
    fn texts_are_told_apart_by_their_lengths() {
        assert_ne!(of_texts(&["ab", "c"]), of_texts(&["a", "bc"]));
        assert!(of_texts(&["a"]).starts_with("blake3-content:"));
    }
}
