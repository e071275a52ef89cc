//! Keys and values of the tokens seen so far: per layer and row one buffer each, grown by doubling.
//!
//! Layers with a sliding window keep every token too: attention itself looks no further back than its window.

use crate::base::{Error, Result};
use crate::model::KvStore;
use candle_core::{DType, Device, Tensor};

/// Tokens a buffer has room for at least.
const FIRST: usize = 64;

pub struct Cache {
    /// W: K·E.
    width: usize,
    /// Offsets of the rows in the new tokens of this step, `[rows + 1]`.
    step: Vec<usize>,
    layers: Vec<Vec<Row>>,
}

/// One row in one layer.
struct Row {
    k: Buffer,
    v: Buffer,
}

/// `[capacity, W]`, of which the first `len` tokens are filled.
struct Buffer {
    tensor: Tensor,
    len: usize,
}

impl Buffer {
    fn new(width: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            tensor: Tensor::zeros((0, width), DType::F32, device)?,
            len: 0,
        })
    }

    /// The filled part, sharing the memory of the buffer.
    fn view(&self) -> Result<Tensor> {
        Ok(self.tensor.narrow(0, 0, self.len)?)
    }

    /// Adds the tokens of `new` `[n, W]`; the first ones decide the element type.
    fn push(&mut self, new: &Tensor) -> Result<()> {
        let (tokens, width) = new.dims2()?;
        let (len, capacity) = (self.len + tokens, self.tensor.dim(0)?);
        if len > capacity {
            let capacity = len.max(2 * capacity).max(FIRST);
            let grown = Tensor::zeros((capacity, width), new.dtype(), new.device())?;
            if self.len > 0 {
                grown.slice_set(&self.view()?, 0, 0)?;
            }
            self.tensor = grown;
        }
        if tokens > 0 {
            self.tensor.slice_set(new, 0, self.len)?;
        }
        self.len = len;
        Ok(())
    }
}

impl Cache {
    /// An empty cache for `rows` rows; `width` is W.
    pub fn new(layers: usize, rows: usize, width: usize, device: &Device) -> Result<Self> {
        let row = || -> Result<Row> {
            Ok(Row {
                k: Buffer::new(width, device)?,
                v: Buffer::new(width, device)?,
            })
        };
        let layer = || (0..rows).map(|_| row()).collect::<Result<Vec<_>>>();
        Ok(Self {
            width,
            step: vec![0],
            layers: (0..layers).map(|_| layer()).collect::<Result<_>>()?,
        })
    }

    pub fn rows(&self) -> usize {
        self.layers.first().map_or(0, Vec::len)
    }

    /// The next step brings these tokens: offsets `[rows + 1]` of the rows in them.
    pub fn begin(&mut self, documents: &[usize]) -> Result<()> {
        if documents.len() != self.rows() + 1 {
            return Err(Error::new("a decoding step has another number of rows than its cache")
                .found(documents.len().saturating_sub(1))
                .expected(self.rows()));
        }
        self.step = documents.to_vec();
        Ok(())
    }

    /// Drops the rows for which `keep(row)` is false; the others keep their order.
    pub fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        for rows in &mut self.layers {
            let mut index = 0;
            rows.retain(|_| {
                index += 1;
                keep(index - 1)
            });
        }
    }
}

impl KvStore for Cache {
    fn append(&mut self, layer: usize, k: Tensor, v: Tensor) -> Result<(Tensor, Tensor, Vec<usize>)> {
        let (width, step) = (self.width, &self.step);
        let tokens = step.last().copied().unwrap_or(0);
        for t in [&k, &v] {
            if t.dims() != [tokens, width] {
                return Err(Error::new("keys or values of a decoding step have the wrong shape")
                    .found(format!("{:?}", t.dims()))
                    .expected(format!("{:?}", [tokens, width])));
            }
        }
        let Some(rows) = self.layers.get_mut(layer) else {
            return Err(Error::new("the cache has no such layer").found(layer));
        };
        let first = rows.iter().all(|r| r.k.len == 0);
        for (new, pick) in [(&k, Row::keys as fn(&mut Row) -> &mut Buffer), (&v, Row::values)] {
            for (row, at) in rows.iter_mut().zip(step.windows(2)) {
                pick(row).push(&new.narrow(0, at[0], at[1] - at[0])?)?;
            }
        }
        if first {
            // Nothing came before: the new tokens are all there is.
            return Ok((k, v, step.clone()));
        }
        let mut documents = vec![0];
        for row in rows.iter() {
            documents.push(documents[documents.len() - 1] + row.k.len);
        }
        if let [row] = &rows[..] {
            return Ok((row.k.view()?, row.v.view()?, documents));
        }
        let gather = |pick: fn(&Row) -> &Buffer| -> Result<Tensor> {
            let rows: Vec<Tensor> = rows.iter().map(|r| pick(r).view()).collect::<Result<_>>()?;
            Ok(Tensor::cat(&rows, 0)?)
        };
        Ok((gather(|r| &r.k)?, gather(|r| &r.v)?, documents))
    }
}

impl Row {
    fn keys(&mut self) -> &mut Buffer {
        &mut self.k
    }

    fn values(&mut self) -> &mut Buffer {
        &mut self.v
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[f32]) -> Tensor {
        let values: Vec<f32> = ids.iter().flat_map(|&i| [i, -i]).collect();
        Tensor::from_vec(values, (ids.len(), 2), &Device::Cpu).unwrap()
    }

    fn check(cache: &mut Cache, documents: &[usize], ids: &[f32], want: &[f32], offsets: &[usize]) {
        cache.begin(documents).unwrap();
        let new = tokens(ids);
        let twice = (&new * 2.0).unwrap();
        let (k, v, got) = cache.append(1, new, twice).unwrap();
        assert_eq!(got, offsets);
        assert_eq!(k.to_vec2::<f32>().unwrap(), tokens(want).to_vec2::<f32>().unwrap());
        assert_eq!(
            v.to_vec2::<f32>().unwrap(),
            (tokens(want) * 2.0).unwrap().to_vec2::<f32>().unwrap()
        );
    }

    #[test]
    fn rows_grow_apart_and_leave() {
        let mut cache = Cache::new(2, 3, 2, &Device::Cpu).unwrap();
        check(
            &mut cache,
            &[0, 2, 3, 6],
            &[1., 2., 10., 20., 21., 22.],
            &[1., 2., 10., 20., 21., 22.],
            &[0, 2, 3, 6],
        );
        check(
            &mut cache,
            &[0, 1, 2, 3],
            &[3., 11., 23.],
            &[1., 2., 3., 10., 11., 20., 21., 22., 23.],
            &[0, 3, 5, 9],
        );
        cache.retain(|row| row != 1);
        check(
            &mut cache,
            &[0, 1, 2],
            &[4., 24.],
            &[1., 2., 3., 4., 20., 21., 22., 23., 24.],
            &[0, 4, 9],
        );
        cache.retain(|row| row == 1);
        check(&mut cache, &[0, 1], &[25.], &[20., 21., 22., 23., 24., 25.], &[0, 6]);
        assert!(cache.begin(&[0, 1, 2]).is_err());
        cache.begin(&[0, 2]).unwrap();
        assert!(cache.append(1, tokens(&[1.]), tokens(&[1.])).is_err());
    }

    #[test]
    fn a_single_row_keeps_its_tokens_through_every_growth() {
        let mut cache = Cache::new(2, 1, 2, &Device::Cpu).unwrap();
        let mut seen = Vec::new();
        for i in 0..3 * FIRST {
            seen.push(i as f32);
            check(&mut cache, &[0, 1], &[i as f32], &seen, &[0, i + 1]);
        }
    }
}
