//! Where the numbers of a parameter are: in the checkpoint, or, once it was trained, in the store.

use super::store::{LOW, STEP, Store, WEIGHT};
use crate::base::Result;
use crate::formats::weights::Weights;
use crate::ops::update;
use crate::recipe::Dtype;
use crate::source::{Numbers, NumbersSink};
use candle_core::{DType, Device, Tensor};
use half::bf16;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

pub(super) struct Files {
    weights: Weights,
    store: Store,
    dtype: Dtype,
}

impl Files {
    pub fn new(weights: Weights, dtype: Dtype, trained: &Path) -> Result<Self> {
        Ok(Self {
            weights: weights.streamed(),
            store: Store::create(trained)?,
            dtype,
        })
    }

    /// Runs `f` on the file that holds `name`, and the name under which it does.
    fn with<R>(&self, name: &str, f: impl FnOnce(&Weights, &str) -> Result<R>) -> Result<R> {
        match self.store.open(name)? {
            Some(file) => f(&file, WEIGHT),
            None => f(&self.weights, name),
        }
    }

    /// Numbers of `name` from number `first` on, as many as `to` has.
    pub fn fill(&self, name: &str, first: usize, to: &Tensor) -> Result<()> {
        self.with(name, |file, key| {
            write_to(
                to,
                |out| file.read_f32_at(key, first, out),
                |out| file.read_bf16_at(key, first, out),
            )
        })
    }

    /// Rows of a matrix of `width` columns, to the rows of `to`.
    pub fn fill_rows(&self, name: &str, width: usize, rows: &[usize], to: &Tensor) -> Result<()> {
        self.with(name, |file, key| {
            let each = |row: &usize| row * width;
            write_to(
                to,
                |out| {
                    let mut pairs = rows.iter().zip(out.chunks_exact_mut(width));
                    pairs.try_for_each(|(row, out)| file.read_f32_at(key, each(row), out))
                },
                |out| {
                    let mut pairs = rows.iter().zip(out.chunks_exact_mut(width));
                    pairs.try_for_each(|(row, out)| file.read_bf16_at(key, each(row), out))
                },
            )
        })
    }

    /// The lower half of a master, if there is one.
    pub fn low(&self, name: &str, count: usize, device: &Device) -> Result<Option<Tensor>> {
        let Some(file) = self.store.open(name)?.filter(|f| f.info(LOW).is_some()) else {
            return Ok(None);
        };
        let mut low = vec![0i16; count];
        file.read_i16_at(LOW, 0, &mut low)?;
        Ok(Some(Tensor::from_vec(low, count, device)?))
    }

    /// Keeps a weight and the lower half of its master.
    pub fn write(&self, name: &str, tensor: &Tensor, low: Option<&Tensor>) -> Result<()> {
        let low = low.map(|t| t.flatten_all()?.to_vec1::<i16>()).transpose()?;
        match tensor.dtype() {
            DType::BF16 => update::with_bf16(tensor, |v| self.store.write(name, Numbers::Bf16(v, low.as_deref())))?,
            _ => update::with_slice(tensor, |v| self.store.write(name, Numbers::F32(v)))?,
        }
    }

    pub fn restore(&self, name: &str, saved: &Weights) -> Result<()> {
        self.store.restore(name, self.dtype, saved)
    }

    /// All numbers, a few at a time.
    pub fn read(&self, name: &str, count: usize, sink: &mut NumbersSink) -> Result<()> {
        self.with(name, |file, key| {
            let has_low = key == WEIGHT && file.info(LOW).is_some();
            let mut first = 0;
            let (mut wide, mut narrow, mut low) = (Vec::new(), Vec::new(), Vec::new());
            while first < count {
                let n = STEP.min(count - first);
                match self.dtype {
                    Dtype::F32 => {
                        wide.resize(n, 0f32);
                        file.read_f32_at(key, first, &mut wide)?;
                        sink(Numbers::F32(&wide))?;
                    }
                    Dtype::Bf16 => {
                        narrow.resize(n, bf16::ZERO);
                        file.read_bf16_at(key, first, &mut narrow)?;
                        if has_low {
                            low.resize(n, 0i16);
                            file.read_i16_at(LOW, first, &mut low)?;
                        }
                        sink(Numbers::Bf16(&narrow, has_low.then_some(low.as_slice())))?;
                    }
                }
                first += n;
            }
            Ok(())
        })
    }
}

/// Lets one of two readers write the numbers of a tensor.
fn write_to(
    to: &Tensor,
    wide: impl Fn(&mut [f32]) -> Result<()> + Sync + Send,
    narrow: impl Fn(&mut [bf16]) -> Result<()> + Sync + Send,
) -> Result<()> {
    let result = Mutex::new(Ok(()));
    let done = |r: Result<()>| *result.lock().unwrap_or_else(PoisonError::into_inner) = r;
    match to.dtype() {
        DType::BF16 => update::store_bf16(to, |out| done(narrow(out)))?,
        _ => update::with_slice_mut(to, |out| done(wide(out)))?,
    }
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}
