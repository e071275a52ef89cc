//! The number of tokens whose logits exist at the same time.

use candle_core::DType;

/// Largest size of the f32 logits in memory, in bytes. Every chunk of tokens reads the whole head.
const LOGITS_BYTES: usize = 128 << 20;
/// The same limit on a GPU. There a streamed head has logits for `PIECE_TOKENS` tokens.
const LOGITS_BYTES_GPU: usize = 512 << 20;
/// Largest size of the exponentials that are kept on the CPU for the gradient of a head, in the type of the head. Every chunk of tokens
/// reads and writes the whole gradient.
const KEPT_BYTES: usize = 160 << 20;
/// Largest size of the logits of a streamed head on a GPU.
pub(super) const LOGITS_BYTES_STREAMED: usize = 48 << 20;
/// Rows of a tile of a matrix product on a GPU.
const GPU_TILE: usize = 128;

/// Returns the largest number of tokens per chunk.
pub fn most_tokens(on_gpu: bool) -> usize {
    if on_gpu { 1024 } else { 512 }
}

/// Returns the tokens per chunk of a loss with its gradients, or of log-probabilities, for a projection to `vocab` rows. `trained_head`:
/// the type of a projection that trains. On the CPU logits exist for one piece of the vocabulary only.
pub fn chunk_for_loss(vocab: usize, trained_head: Option<DType>, on_gpu: bool) -> usize {
    match trained_head {
        _ if on_gpu => chunk_for(vocab, true),
        None => most_tokens(false),
        Some(dtype) => (KEPT_BYTES / kept_bytes(vocab, dtype).max(1)).clamp(16, most_tokens(false)),
    }
}

/// Returns the bytes of a token's exponentials that are kept on the CPU for the gradient of a head of this type.
pub fn kept_bytes(vocab: usize, dtype: DType) -> usize {
    vocab * dtype.size_in_bytes()
}

/// Returns the tokens per chunk where logits exist for the whole vocabulary: a projection to `vocab` rows.
pub fn chunk_for(vocab: usize, on_gpu: bool) -> usize {
    let bytes = if on_gpu { LOGITS_BYTES_GPU } else { LOGITS_BYTES };
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
            assert_eq!(chunk_for(vocab, true), tokens, "{vocab}");
            for trained_head in [None, Some(DType::BF16), Some(DType::F32)] {
                assert_eq!(chunk_for_loss(vocab, trained_head, true), tokens, "{vocab}");
            }
        }
        for (vocab, tokens) in [(1_000, 512), (128_256, 261), (262_144, 128)] {
            assert_eq!(chunk_for(vocab, false), tokens, "{vocab}");
            assert_eq!(chunk_for_loss(vocab, None, false), 512, "{vocab}");
        }
        for (vocab, bf16, f32) in [(1_000, 512, 512), (151_936, 512, 276), (262_144, 320, 160)] {
            assert_eq!(chunk_for_loss(vocab, Some(DType::BF16), false), bf16, "{vocab}");
            assert_eq!(chunk_for_loss(vocab, Some(DType::F32), false), f32, "{vocab}");
        }
    }
}
