//! Reads and writes parameters: in the checkpoint, or, after training, in the store.

use super::store::{CODES, FileStore, LOW, STEP, WEIGHT, part_name};
use super::writer::SourceWriter;
use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::formats::writer::{TensorPlan, Values, write_file};
use crate::ops::Dtype;
use crate::ops::update;
use crate::quant::{Format, QMatrix};
use crate::source::requantize::{ExactParam, quantize};
use crate::source::stored::CheckedParam;
use crate::source::{NumbersSink, ParamElements, ParamInfo};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

pub(super) struct ParamFiles {
    weights: Weights,
    store: FileStore,
    /// Weights that the checkpoint holds quantized.
    stored: BTreeMap<Arc<str>, CheckedParam>,
    /// Other weights of the checkpoint, quantized by `quantize_others`.
    codes: Option<Weights>,
    dtype: Dtype,
    writer: SourceWriter,
}

impl ParamFiles {
    pub(super) fn new(
        weights: Weights,
        stored: BTreeMap<Arc<str>, CheckedParam>,
        dtype: Dtype,
        trained: &Path,
        writer: SourceWriter,
    ) -> Result<Self> {
        Ok(Self {
            weights: writer.to_read(weights),
            stored,
            store: FileStore::create(trained, writer.clone())?,
            codes: None,
            dtype,
            writer,
        })
    }

    /// Quantizes these weights of the checkpoint, one at a time, into a separate file.
    pub(super) fn quantize_others(&mut self, params: &[(&ParamInfo, Format)], file: &Path) -> Result<()> {
        self.writer.write(|| self.write_others(params, file))?;
        self.codes = Some(self.writer.to_read(Weights::open_file(file)?));
        Ok(())
    }

    fn write_others(&self, params: &[(&ParamInfo, Format)], file: &Path) -> Result<()> {
        let mut plans = Vec::new();
        for (p, format) in params {
            let &[rows, columns] = p.shape.as_slice() else {
                return Err(Error::new("only a matrix can be quantized").at(&*p.name));
            };
            plans.extend(format.parts(rows, columns).into_iter().map(|(part, bytes)| TensorPlan {
                name: part_name(&p.name, part),
                dtype: StoredDtype::U8,
                shape: vec![bytes],
            }));
        }
        let mut params = params.iter();
        let mut now: Option<(String, QMatrix)> = None;
        write_file(file, &plans, &[], |plan, sink| {
            let (name, part) = plan.name.rsplit_once('#').unwrap_or((&plan.name, ""));
            if now.as_ref().is_none_or(|(n, _)| n != name) {
                now = None;
                if let Some((p, format)) = params.next() {
                    now = Some((name.to_string(), self.quantize(p, *format)?));
                }
            }
            let Some((_, quantized)) = &now else { return Ok(()) };
            match quantized.parts().iter().find(|p| p.name == part) {
                Some(part) => sink(Values::Raw(&part.bytes)),
                None => Ok(()),
            }
        })?;
        self.writer.written(file)
    }

    /// Quantizes one weight of the checkpoint.
    fn quantize(&self, p: &ParamInfo, format: Format) -> Result<QMatrix> {
        // Reading bf16 halves the temporary memory; the quantized data is the same.
        if self.weights.info(&p.name).is_some_and(|i| i.dtype == StoredDtype::Bf16) {
            let mut values = vec![bf16::ZERO; p.elements()];
            self.weights.read_bf16_at(&p.name, 0, &mut values)?;
            return quantize(&values, p, format, self.dtype);
        }
        let mut values = vec![0f32; p.elements()];
        self.weights.read_f32_at(&p.name, 0, &mut values)?;
        quantize(&values, p, format, self.dtype)
    }

    /// Reads a quantized weight.
    pub(super) fn quantized(&self, p: &ParamInfo, format: Format) -> Result<QMatrix> {
        let own = self.store.open(&p.name)?;
        let (file, first) = match (&own, self.stored.get(&p.name), &self.codes) {
            (Some(file), ..) => (file, CODES),
            (None, Some(stored), _) => return stored.read(&self.weights, p, self.dtype),
            (None, None, Some(file)) => (file, &*p.name),
            (None, None, None) => return Err(Error::new("there is no quantized data for this weight").at(&*p.name)),
        };
        let &[rows, columns] = p.shape.as_slice() else {
            return Err(Error::new("only a matrix can be quantized").at(&*p.name));
        };
        QMatrix::from_parts(format, (rows, columns), self.dtype, |part| {
            let name = part_name(first, part);
            let count = file.info(&name).map_or(0, |i| i.count());
            let mut bytes = vec![0u8; count];
            file.read_bytes_at(&name, 0, &mut bytes)?;
            Ok(bytes)
        })
        .map_err(|e| e.or_at(&*p.name))
    }

    /// Calls `f` with the file that contains `name`, and the tensor's name in that file.
    fn with<R>(&self, name: &str, f: impl FnOnce(&Weights, &str) -> Result<R>) -> Result<R> {
        // A weight that was only requantized has its exact values in the checkpoint.
        match self.store.open(name)?.filter(|file| file.info(WEIGHT).is_some()) {
            Some(file) => f(&file, WEIGHT),
            None => f(&self.weights, name),
        }
    }

    /// Fills `to` with elements of `name`, starting at element `first`.
    pub(super) fn fill(&self, name: &str, first: usize, to: &Tensor) -> Result<()> {
        self.with(name, |file, key| {
            write_to(
                to,
                |out| file.read_f32_at(key, first, out),
                |out| file.read_bf16_at(key, first, out),
                |out| file.read_f16_at(key, first, out),
            )
        })
    }

    /// Reads rows of a matrix with `width` columns into the rows of `to`.
    pub(super) fn fill_rows(&self, name: &str, width: usize, rows: &[usize], to: &Tensor) -> Result<()> {
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
                |out| {
                    let mut pairs = rows.iter().zip(out.chunks_exact_mut(width));
                    pairs.try_for_each(|(row, out)| file.read_f16_at(key, each(row), out))
                },
            )
        })
    }

    /// Reads the low 16 bits of the fp32 master, if they are stored.
    pub(super) fn low(&self, name: &str, count: usize, device: &Device) -> Result<Option<Tensor>> {
        let Some(file) = self.store.open(name)?.filter(|f| f.info(LOW).is_some()) else {
            return Ok(None);
        };
        let mut low = vec![0i16; count];
        file.read_i16_at(LOW, 0, &mut low)?;
        Ok(Some(Tensor::from_vec(low, count, device)?))
    }

    /// Stores a trained parameter.
    pub(super) fn write(&self, name: &str, exact: &ExactParam, codes: Option<&QMatrix>) -> Result<()> {
        exact.send(&mut |numbers| self.store.write(name, Some(numbers), codes))
    }

    /// Replaces the quantized data of a parameter that was not trained.
    pub(super) fn write_quantized(&self, name: &str, codes: &QMatrix) -> Result<()> {
        self.store.write(name, None, Some(codes))
    }

    /// Restores the exact values from tensor `name` of `saved`.
    pub(super) fn restore(
        &self,
        p: &ParamInfo,
        format: Option<Format>,
        saved: &Weights,
        device: &Device,
    ) -> Result<()> {
        let Some(format) = format else {
            return self.store.restore(&p.name, self.dtype, saved);
        };
        let mut values = vec![0f32; p.elements()];
        saved.read_f32_at(&p.name, 0, &mut values)?;
        let codes = quantize(&values, p, format, self.dtype)?;
        let exact = ExactParam::new(values, &p.shape, self.dtype, device)?;
        self.write(&p.name, &exact, Some(&codes))
    }

    /// Passes all elements to `sink`, in pieces.
    pub(super) fn read(&self, p: &ParamInfo, sink: &mut NumbersSink) -> Result<()> {
        let (name, count) = (&*p.name, p.elements());
        self.with(name, |file, key| {
            if let Some(stored) = self.stored.get(name).filter(|_| key != WEIGHT) {
                let values = stored.read(&self.weights, p, self.dtype)?.dequantize();
                return match self.dtype {
                    Dtype::F32 => sink(ParamElements::F32(&values)),
                    Dtype::Bf16 => {
                        let halves: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
                        sink(ParamElements::Bf16(&halves, None))
                    }
                    Dtype::F16 => {
                        let halves: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
                        sink(ParamElements::F16(&halves, None))
                    }
                };
            }
            let has_low = key == WEIGHT && file.info(LOW).is_some();
            let mut first = 0;
            let (mut wide, mut narrow, mut halves, mut low) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            while first < count {
                let n = STEP.min(count - first);
                if has_low {
                    low.resize(n, 0i16);
                    file.read_i16_at(LOW, first, &mut low)?;
                }
                match self.dtype {
                    Dtype::F32 => {
                        wide.resize(n, 0f32);
                        file.read_f32_at(key, first, &mut wide)?;
                        sink(ParamElements::F32(&wide))?;
                    }
                    Dtype::Bf16 => {
                        narrow.resize(n, bf16::ZERO);
                        file.read_bf16_at(key, first, &mut narrow)?;
                        sink(ParamElements::Bf16(&narrow, has_low.then_some(low.as_slice())))?;
                    }
                    Dtype::F16 => {
                        halves.resize(n, f16::ZERO);
                        file.read_f16_at(key, first, &mut halves)?;
                        sink(ParamElements::F16(&halves, has_low.then_some(low.as_slice())))?;
                    }
                }
                first += n;
            }
            Ok(())
        })
    }
}

/// Fills a tensor with the reader that fits its data type.
fn write_to(
    to: &Tensor,
    wide: impl Fn(&mut [f32]) -> Result<()> + Sync + Send,
    narrow: impl Fn(&mut [bf16]) -> Result<()> + Sync + Send,
    halves: impl Fn(&mut [f16]) -> Result<()> + Sync + Send,
) -> Result<()> {
    let result = Mutex::new(Ok(()));
    let done = |r: Result<()>| *lock(&result) = r;
    match to.dtype() {
        DType::BF16 => update::store_bf16(to, |out| done(narrow(out)))?,
        DType::F16 => update::store_f16(to, |out| done(halves(out)))?,
        _ => update::with_slice_mut(to, |out| done(wide(out)))?,
    }
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}
