//! Rows longer than `max_length`: truncated, dropped, or split.
//!
//! A split row becomes pieces of `max_length` tokens. Each piece starts with the last `overlap` tokens of the piece
//! before it, as context: they are not trained again. So every token that the row trains is trained once, also the
//! first new token of a piece, because `overlap` is at least 1.

use super::{Encoder, MaskedIds};
use crate::Long;
use crate::batch::Example;
use crate::rows::Sample;
use ft_base::Result;

/// The rows that were made of one row, with counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FittedRows {
    /// One, or several of a split row; none if it was dropped.
    pub(crate) pieces: Vec<Example>,
    /// Tokens of the whole row.
    pub(crate) written: usize,
    /// Tokens removed by truncation.
    pub(crate) cut: usize,
    /// Trained tokens of the whole row.
    pub(crate) trained: usize,
    /// See `EncodedRow::open_turns`.
    pub(crate) open_turns: usize,
}

impl Long {
    /// The choice for one row: only plain text goes on in the next piece with all that it means.
    pub(crate) fn of(self, sample: &Sample) -> Self {
        match (self, sample) {
            (Long::Auto, Sample::Text(_)) => Long::Split,
            (Long::Auto, _) => Long::Truncate,
            (long, _) => long,
        }
    }
}

impl Encoder<'_> {
    /// Encodes a row and fits it into `max_length`.
    ///
    /// Errors: as in `encode`.
    pub(crate) fn fit(&self, sample: &Sample, long: Long, overlap: usize) -> Result<FittedRows> {
        let row = self.masked(sample)?;
        let (written, most) = (row.ids.len(), self.max_length);
        let mut out = FittedRows {
            pieces: Vec::new(),
            written,
            cut: 0,
            trained: row.trained.iter().filter(|&&t| t).count(),
            open_turns: row.open_turns,
        };
        match long.of(sample) {
            _ if written <= most => out.pieces.push(piece(&row, 0, written, 0)),
            Long::Drop => {}
            Long::Split => {
                let step = most.saturating_sub(overlap).max(1);
                let mut first = 0;
                loop {
                    let end = written.min(first + most);
                    let repeated = if first == 0 { 0 } else { overlap };
                    out.pieces.push(piece(&row, first, end, repeated));
                    if end == written {
                        break;
                    }
                    first += step;
                }
            }
            Long::Truncate | Long::Auto => {
                out.cut = written - most;
                out.pieces.push(piece(&row, 0, most, 0));
            }
        }
        Ok(out)
    }
}

/// Tokens `first..end`; the first `repeated` of them are not trained.
fn piece(row: &MaskedIds, first: usize, end: usize, repeated: usize) -> Example {
    let mut trained = row.trained[first..end].to_vec();
    let repeated = repeated.min(trained.len());
    trained[..repeated].fill(false);
    Example {
        ids: row.ids[first..end].to_vec(),
        trained,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainOn;
    use crate::testing::Words;

    fn fit(long: Long, overlap: usize, max_length: usize) -> FittedRows {
        let words = Words::chatml();
        let encoder = Encoder {
            codec: &words,
            template: None,
            train_on: TrainOn::Assistant,
            max_length,
            embedding_rows: 1 << 20,
        };
        // Ten words and the end of the text.
        let text = "a b c d e f g h i j".to_string();
        encoder.fit(&Sample::Text(text), long, overlap).unwrap()
    }

    #[test]
    fn a_split_row_trains_every_token_once_for_any_overlap() {
        let whole = fit(Long::Truncate, 1, 100).pieces.remove(0);
        assert_eq!(whole.ids.len(), 11);
        for max_length in 2..=12 {
            for overlap in 1..max_length {
                let found = fit(Long::Split, overlap, max_length);
                let mut trained = Vec::new();
                let mut new: Vec<u32> = Vec::new();
                for (i, piece) in found.pieces.iter().enumerate() {
                    assert!(piece.ids.len() <= max_length && !piece.trained[0]);
                    let again = if i == 0 { 0 } else { overlap };
                    assert_eq!(new.len().min(again), again);
                    assert_eq!(piece.ids[..again], new[new.len() - again..], "{max_length} {overlap}");
                    new.extend(&piece.ids[again..]);
                    let targets = piece.ids.iter().zip(&piece.trained).filter(|(_, t)| **t);
                    trained.extend(targets.map(|(id, _)| *id));
                }
                assert_eq!(new, whole.ids);
                assert_eq!(trained, whole.ids[1..], "{max_length} {overlap}");
                assert_eq!((found.cut, found.written, found.trained), (0, 11, 10));
            }
        }
    }

    #[test]
    fn a_long_row_is_split_truncated_or_dropped() {
        let pieces = |long| fit(long, 1, 4).pieces.iter().map(|p| p.ids.len()).collect::<Vec<_>>();
        assert_eq!(pieces(Long::Auto), [4, 4, 4, 2]);
        assert_eq!(pieces(Long::Truncate), [4]);
        assert_eq!(fit(Long::Truncate, 1, 4).cut, 7);
        assert_eq!(pieces(Long::Drop), [0; 0]);
        // Prompt and completion are truncated unless the setting says otherwise.
        let pair = Sample::PromptCompletion {
            prompt: "a".into(),
            completion: "b".into(),
        };
        assert_eq!(
            (Long::Auto.of(&pair), Long::Split.of(&pair)),
            (Long::Truncate, Long::Split)
        );
    }
}
