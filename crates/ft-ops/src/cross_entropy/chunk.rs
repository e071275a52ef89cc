//! The number of tokens whose logits exist at the same time.

/// Largest size of the f32 logits in memory, in bytes.
pub(super) const LOGITS_BYTES: usize = 48 << 20;
/// The same limit if the projection is trained: it is larger because every chunk reads and writes the whole gradient.
const LOGITS_BYTES_TRAINED: usize = 128 << 20;
/// The same limit on a GPU, trained or not: every chunk reads the whole head from memory, twice.
const LOGITS_BYTES_GPU: usize = 512 << 20;
/// Rows of a tile of a matrix product on a GPU.
const GPU_TILE: usize = 128;

/// Returns the largest number of tokens per chunk.
pub fn most_tokens(on_gpu: bool) -> usize {
    if on_gpu { 1024 } else { 512 }
}

/// Returns the tokens per chunk for a projection to `vocab` rows, which is `trained` or frozen.
pub fn chunk_for(vocab: usize, trained: bool, on_gpu: bool) -> usize {
    let bytes = match (on_gpu, trained) {
        (true, _) => LOGITS_BYTES_GPU,
        (false, true) => LOGITS_BYTES_TRAINED,
        (false, false) => LOGITS_BYTES,
    };
    let tokens = (bytes / (4 * vocab.max(1))).clamp(16, most_tokens(on_gpu));
    // Whole tiles: a part of a tile takes as long as a tile.
    if on_gpu && tokens > GPU_TILE {
        tokens / GPU_TILE * GPU_TILE
    } else {
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_a_gpu_are_larger_and_whole_tiles() {
        let cases = [
            (1_000, 1024),
            (128_256, 1024),
            (151_936, 768),
            (262_144, 512),
            (2_000_000, 67),
        ];
        for (vocab, tokens) in cases {
            assert_eq!(chunk_for(vocab, false, true), tokens, "{vocab}");
            assert_eq!(chunk_for(vocab, true, true), tokens, "{vocab}");
        }
        let cases = [(1_000, 512, 512), (128_256, 98, 261), (262_144, 48, 128)];
        for (vocab, frozen, trained) in cases {
            assert_eq!(chunk_for(vocab, false, false), frozen, "{vocab}");
            assert_eq!(chunk_for(vocab, true, false), trained, "{vocab}");
        }
    }
}
