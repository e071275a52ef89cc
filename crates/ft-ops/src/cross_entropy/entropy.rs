//! The entropy of the next-token distribution of each token, for metrics; it computes the logits separately from
//! the loss.

use super::{CrossEntropyOptions, OutputPieces, PIECE, check};
use crate::cpu::storage::dims2;
use crate::{linear, update};
use candle_core::Tensor;
use ft_base::Result;
use rayon::prelude::*;

/// Returns the entropy of each token in nats, `[N]`; 0 if the target is `IGNORE`. h `[N, D]`, head `[V, D]`, targets
/// `[N]`. Logits are in memory for `chunk` tokens at a time; on a GPU for one piece of the vocabulary.
///
/// # Errors
/// A target outside the vocabulary.
pub fn token_entropies(
    h: &Tensor,
    head: &Tensor,
    targets: &[u32],
    softcap: Option<f32>,
    chunk: usize,
) -> Result<Vec<f32>> {
    let (rows, width) = dims2(head, "the head")?;
    let whole = OutputPieces {
        rows,
        width,
        rows_of_part: rows.next_multiple_of(PIECE).max(PIECE),
        part: &|_| Ok(head.clone()),
    };
    streamed_entropies(h, &whole, targets, softcap, chunk)
}

/// As `token_entropies`, with a streamed head.
///
/// # Errors
/// A target outside the vocabulary (`Argument`); tensors of other shapes, types or devices than described (`Shape`).
pub fn streamed_entropies(
    h: &Tensor,
    head: &OutputPieces,
    targets: &[u32],
    softcap: Option<f32>,
    chunk: usize,
) -> Result<Vec<f32>> {
    on_gpu!(h, {
        use super::streamed::gpu::{TokenQuantity, of_each_token};
        of_each_token(h, head, targets, softcap, TokenQuantity::Entropies)
    });
    let options = CrossEntropyOptions::losses(softcap, chunk);
    let trained = check(h, (head.rows, head.width), targets, options.softcap)?;
    let mut entropies = vec![0f32; targets.len()];
    for rows in trained.chunks(chunk.max(1)) {
        let index: Vec<u32> = rows.iter().map(|n| *n as u32).collect();
        let index = Tensor::from_vec(index, rows.len(), h.device())?;
        let some = h.index_select(&index, 0)?;
        let mut columns = Vec::new();
        head.each(|_, part| {
            columns.push(linear::forward(&some, part, None)?);
            Ok(())
        })?;
        let logits = match columns.len() {
            1 => columns.remove(0),
            _ => Tensor::cat(&columns, 1)?.contiguous()?,
        };
        let found = of_rows(&logits, softcap)?;
        rows.iter().zip(found).for_each(|(n, e)| entropies[*n] = e);
    }
    Ok(entropies)
}

/// Returns the entropy of each row of logits `[N, V]`, to which the softcap is not yet applied.
fn of_rows(logits: &Tensor, softcap: Option<f32>) -> Result<Vec<f32>> {
    let v = dims2(logits, "the logits")?.1;
    let mut logits = update::to_f32_vec(logits)?;
    let rows = logits.par_chunks_mut(v.max(1)).map(|row| {
        if let Some(cap) = softcap {
            row.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut sum, mut mean) = (0f64, 0f64);
        for x in row {
            let e = ((*x - max) as f64).exp();
            sum += e;
            mean += e * (*x - max) as f64;
        }
        (sum.ln() - mean / sum) as f32
    });
    Ok(rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::random;
    use candle_core::Device;
    use ft_base::IGNORE;

    #[test]
    fn entropies_are_those_of_the_softmax() {
        let logits = Tensor::new(&[[0f32, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]], &Device::Cpu).unwrap();
        let found = of_rows(&logits, None).unwrap();
        assert!(
            (found[0] - 4f32.ln()).abs() < 1e-6 && found[1].abs() < 1e-6,
            "{found:?}"
        );
        // A cap of 1 leaves a difference of at most 1 between the first and the others.
        let p = 1f64.exp() / (1f64.exp() + 3.0);
        let q = (1.0 - p) / 3.0;
        let want = -(p * p.ln() + 3.0 * q * q.ln());
        assert!((of_rows(&logits, Some(1.0)).unwrap()[1] as f64 - want).abs() < 1e-5);
    }

    #[test]
    fn parts_give_the_entropies_of_the_whole_head() {
        let (n, d, v) = (9, 16, PIECE + 300);
        let (h, head) = (random((n, d), 1), random((v, d), 2));
        let targets: Vec<u32> = (0..n as u32)
            .map(|i| if i % 4 == 1 { IGNORE } else { i * 500 })
            .collect();
        let parts = OutputPieces {
            rows: v,
            width: d,
            rows_of_part: PIECE,
            part: &|first| Ok(head.narrow(0, first, PIECE.min(v - first))?),
        };
        let all = of_rows(&linear::forward(&h, &head, None).unwrap(), Some(3.0)).unwrap();
        for chunk in [1, 4, 100] {
            let whole = token_entropies(&h, &head, &targets, Some(3.0), chunk).unwrap();
            let parts = streamed_entropies(&h, &parts, &targets, Some(3.0), chunk).unwrap();
            for (n, target) in targets.iter().enumerate() {
                let want = if *target == IGNORE { 0.0 } else { all[n] };
                assert!((whole[n] - want).abs() < 1e-5 && (parts[n] - want).abs() < 1e-5);
            }
        }
        assert!(token_entropies(&h, &head, &[v as u32; 9], None, 4).is_err());
    }
}
