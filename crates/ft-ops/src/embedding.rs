//! Rows of the embedding table `[V, D]` by token id, and the scatter-add of their gradients.

use super::cpu::embedding as cpu;
use super::cpu::storage::{dims2, expect_dims, tensor, unwritten, values};
use super::update::{with_slice_mut, with_slices};
use candle_core::Tensor;
use ft_base::rng::Rng;
use ft_base::{Error, Result};

fn check(ids: &[u32], v: usize) -> Result<()> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= v) {
        None => Ok(()),
        Some((at, id)) => Err(Error::argument("a token id is outside the vocabulary")
            .at(format!("token {at}"))
            .found(id)
            .expected(format!("below {v}"))),
    }
}

/// Returns the rows `ids` of the table (f32 or bf16 `[V, D]`) times `scale`: `[N, D]` f32, on a GPU of the type of the
/// table.
///
/// # Errors
/// An id that is not below V.
pub fn gather(table: &Tensor, ids: &[u32], scale: f32) -> Result<Tensor> {
    let (v, d) = dims2(table, "the embedding table")?;
    check(ids, v)?;
    on_gpu!(table, super::cuda::embedding::gather(table, ids, scale, d));
    let mut y = unwritten(ids.len() * d);
    values(table, "the embedding table", |table| {
        cpu::gather(table, ids, scale, d, &mut y);
        Ok(())
    })?;
    tensor(y, (ids.len(), d))
}

/// The noise of one row of `add_noise`: the numbers of a stream from `position · D` on, in [-magnitude, magnitude).
#[derive(Debug, Clone, Copy)]
pub struct NoiseRow {
    /// The stream.
    pub rng: Rng,
    /// Which D numbers of the stream.
    pub position: u32,
    /// The largest absolute value.
    pub magnitude: f32,
}

/// Bytes of a row of noise while it is added, on the device of x.
pub const NOISE_BYTES: u64 = size_of::<NoiseRow>() as u64;

/// Adds uniform noise to x `[N, D]` (f32; on a GPU also bf16 and f16) in place; on a GPU the numbers are the same.
///
/// # Errors
/// The number of rows is not N.
pub fn add_noise(x: &Tensor, rows: &[NoiseRow]) -> Result<()> {
    let (n, d) = dims2(x, "the embeddings")?;
    if rows.len() != n {
        return Err(
            Error::shape("the number of rows of noise differs from the number of tokens")
                .found(rows.len())
                .expected(n),
        );
    }
    on_gpu!(x, super::cuda::embedding::add_noise(x, rows, d));
    with_slice_mut(x, |x| cpu::add_noise(x, rows, d))
}

/// Returns the rows `ids` of several f32 tables `[V, D]`: `[N, D]` each.
///
/// # Errors
/// An id that is not below V.
pub fn gather_each(tables: &[Tensor], ids: &[u32]) -> Result<Vec<Tensor>> {
    for table in tables {
        check(ids, dims2(table, "a table")?.0)?;
    }
    if let Some(first) = tables.first() {
        on_gpu!(first, super::cuda::embedding::gather_each(tables, ids));
    }
    tables.iter().map(|table| gather(table, ids, 1.0)).collect()
}

/// Adds `scale · dx[n]` to row `ids[n]` of dw, f32 `[V, D]`, in place, for each n in order; dx `[N, D]`.
///
/// # Errors
/// An id that is not below V (`Argument`); tensors of other shapes, types or devices than described (`Shape`).
pub fn scatter_add(dw: &Tensor, ids: &[u32], dx: &Tensor, scale: f32) -> Result<()> {
    let (v, d) = dims2(dw, "the gradient of the embedding")?;
    expect_dims(dx, "dx of the embedding", &[ids.len(), d])?;
    check(ids, v)?;
    on_gpu!(dw, super::cuda::embedding::scatter_add(dw, ids, dx, scale, d));
    with_slices(dw, dx, |dw, dx| cpu::scatter_add(dw, ids, dx, scale, d))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, bf16_pair, flat, random};
    use candle_core::{DType, Device, Var};
    use ft_base::rng::Stream;

    #[test]
    fn matches_autograd() {
        let ids = [3u32, 0, 3, 6, 3, 1, 0];
        let (n, v, d) = (ids.len(), 7, 300);
        let table = Var::from_tensor(&random((v, d), 1)).unwrap();
        let dy = random((n, d), 2);
        let index = Tensor::new(&ids, &Device::Cpu).unwrap();
        let want = (table.index_select(&index, 0).unwrap() * 1.5).unwrap();
        let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        assert_close(&gather(&table, &ids, 1.5).unwrap(), &want, 0.0);
        let before = random((v, d), 3);
        let dw = before.copy().unwrap();
        scatter_add(&dw, &ids, &dy, 1.5).unwrap();
        assert_close(&dw, &(before + grads.get(&table).unwrap()).unwrap(), 1e-6);
        assert_same_on_any_threads(|| {
            let dw = Tensor::zeros((v, d), DType::F32, &Device::Cpu).unwrap();
            scatter_add(&dw, &ids, &dy, 0.3).unwrap();
            vec![dw, gather(&table, &ids, 0.3).unwrap()]
        });
    }

    #[test]
    fn noise_is_that_of_its_stream_and_place() {
        let (n, d) = (40, 33);
        let rows: Vec<NoiseRow> = (0..n)
            .map(|i| NoiseRow {
                rng: Rng::new(7, Stream::Noise, &[3, i / 10]),
                position: i as u32 % 10,
                magnitude: 0.5 * (i / 10) as f32,
            })
            .collect();
        let before = random((n as usize, d), 1);
        let x = before.copy().unwrap();
        add_noise(&x, &rows).unwrap();
        let added = (&x - &before).unwrap().to_vec2::<f32>().unwrap();
        for (row, noise) in added.iter().zip(&rows) {
            assert!(row.iter().all(|x| x.abs() <= noise.magnitude + 1e-6));
        }
        // Moments of a uniform distribution over [-1.5, 1.5): mean 0, variance 0.75.
        let last: Vec<f32> = added[30..].concat();
        let mean = last.iter().sum::<f32>() / last.len() as f32;
        let square = last.iter().map(|x| x * x).sum::<f32>() / last.len() as f32;
        assert!(mean.abs() < 0.15 && (square - 0.75).abs() < 0.1, "{mean} {square}");
        let first = 0.5 * (2.0 * rows[12].rng.uniform(2 * d as u64) - 1.0);
        assert!((added[12][0] - first).abs() < 1e-6);
        assert_same_on_any_threads(|| {
            let x = before.copy().unwrap();
            add_noise(&x, &rows).unwrap();
            vec![x]
        });
        assert!(add_noise(&x, &rows[1..]).is_err());
    }

    #[test]
    fn bf16_table_and_ids_outside() {
        let (table, wide) = bf16_pair((5, 9), 1);
        let got = gather(&table, &[4, 2], 2.0).unwrap();
        assert_eq!(flat(&got), flat(&gather(&wide, &[4, 2], 2.0).unwrap()));
        assert!(gather(&table, &[4, 5], 1.0).is_err());
        assert!(scatter_add(&wide, &[5], &random((1, 9), 1), 1.0).is_err());
        assert_eq!(gather(&table, &[], 1.0).unwrap().dims(), [0, 9]);
    }
}
