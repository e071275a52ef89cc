//! The entropy of the next-token distribution of each token, for metrics; it computes the logits separately from
//! the loss.

use super::{OutputPieces, PIECE, check, cpu};
use crate::cpu::storage::{dims2, floats};
use crate::linear;
use candle_core::Tensor;
use ft_base::Result;

/// Returns the entropy of each token in nats, `[N]`; 0 if the target is `IGNORE`. h `[N, D]`, head `[V, D]`, targets
/// `[N]`. Logits are in memory for `chunk` tokens and one piece of the vocabulary.
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
    entropies(h, &whole, targets, softcap, (chunk, chunk))
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
    entropies(h, head, targets, softcap, (targets.len(), chunk))
}

/// The head is read once for each `group` of tokens, whose hidden states are copied.
fn entropies(
    h: &Tensor,
    head: &OutputPieces,
    targets: &[u32],
    softcap: Option<f32>,
    (group, chunk): (usize, usize),
) -> Result<Vec<f32>> {
    on_gpu!(h, {
        use super::streamed::gpu::{TokenQuantity, of_each_token};
        of_each_token(h, head, targets, softcap, TokenQuantity::Entropies)
    });
    let trained = check(h, (head.rows, head.width), targets, softcap)?;
    let mut entropies = vec![0f32; targets.len()];
    for tokens in trained.chunks(group.max(1)) {
        let mut sums = floats(h, "the hidden states", |h| {
            let sizes = (head.width, head.rows);
            Ok(cpu::EntropySums::new(h, tokens, sizes, softcap.unwrap_or(0.0), chunk))
        })?;
        head.each(|_, part| {
            linear::with_rows(part, "a part of the head", |part| {
                sums.add(part);
                Ok(())
            })
        })?;
        tokens.iter().zip(sums.finish()).for_each(|(n, e)| entropies[*n] = e);
    }
    Ok(entropies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::random;
    use candle_core::Device;
    use ft_base::IGNORE;

    /// The entropy of the softmax of a row, in f64.
    fn reference(logits: &[f32], cap: Option<f32>) -> f64 {
        let capped = |x: f64| cap.map_or(x, |cap| cap as f64 * (x / cap as f64).tanh());
        let logits: Vec<f64> = logits.iter().map(|x| capped(*x as f64)).collect();
        let sum = logits.iter().map(|x| x.exp()).sum::<f64>();
        logits.iter().map(|x| x.exp() / sum * (sum.ln() - x)).sum()
    }

    #[test]
    fn known_entropies() {
        let h = Tensor::new(&[[0f32, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]], &Device::Cpu).unwrap();
        let head = Tensor::eye(4, candle_core::DType::F32, &Device::Cpu).unwrap();
        let found = token_entropies(&h, &head, &[0, 1], None, 2).unwrap();
        assert!(
            (found[0] - 4f32.ln()).abs() < 1e-6 && found[1].abs() < 1e-6,
            "{found:?}"
        );
        // A cap of 1 leaves a difference of at most 1 between the first and the others.
        let p = 1f64.exp() / (1f64.exp() + 3.0);
        let q = (1.0 - p) / 3.0;
        let want = -(p * p.ln() + 3.0 * q * q.ln());
        let found = token_entropies(&h, &head, &[0, 1], Some(1.0), 2).unwrap();
        assert!((found[1] as f64 - want).abs() < 1e-5);
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
        let logits = linear::forward(&h, &head, None).unwrap().to_vec2::<f32>().unwrap();
        for chunk in [1, 4, 100] {
            let whole = token_entropies(&h, &head, &targets, Some(3.0), chunk).unwrap();
            let parts = streamed_entropies(&h, &parts, &targets, Some(3.0), chunk).unwrap();
            for (n, target) in targets.iter().enumerate() {
                let want = match *target {
                    IGNORE => 0.0,
                    _ => reference(&logits[n], Some(3.0)),
                };
                assert!((whole[n] as f64 - want).abs() < 1e-5, "{} {want}", whole[n]);
                assert_eq!(whole[n], parts[n]);
            }
        }
        assert!(token_entropies(&h, &head, &[v as u32; 9], None, 4).is_err());
    }
}
