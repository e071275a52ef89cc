//! Files for trained parameters that are inactive now: one file per parameter, with its exact f32 value. LoftQ writes
//! files with new quantized data only.
//!
//! A bf16 weight and the low 16 bits of its fp32 master are two tensors of the file: later fetches read the weight
//! only, further training and checkpoints read both. The files are scratch files of the running process: a resumed run
//! writes them again from its checkpoint.

use super::writer::SourceWriter;
use crate::base::{Result, staging};
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::formats::writer::{TensorPlan, Values, write_file};
use crate::ops::Dtype;
use crate::ops::master;
use crate::quant::QMatrix;
use crate::source::{ParamElements, lock};
use half::{bf16, f16};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Names of the tensors in a file.
pub(super) const WEIGHT: &str = "weight";
pub(super) const LOW: &str = "low";

/// Name prefix of the tensors with quantized data.
pub(super) const CODES: &str = "codes";

/// Name of the tensor with one part of the quantized data of `name`.
pub(super) fn part_name(name: &str, part: &str) -> String {
    format!("{name}#{part}")
}

/// Elements read or written at a time.
pub(super) const STEP: usize = 1 << 19;

pub(super) struct FileStore {
    dir: PathBuf,
    names: Mutex<BTreeSet<String>>,
    writer: SourceWriter,
}

impl FileStore {
    /// Creates an empty store in `dir`; removes the files that another run of ft left there.
    pub(super) fn create(dir: &Path, writer: SourceWriter) -> Result<Self> {
        writer.write(|| staging::remove_scratch(dir).map(drop))?;
        Ok(Self {
            dir: dir.to_path_buf(),
            names: Mutex::new(BTreeSet::new()),
            writer,
        })
    }

    /// Opens the file of a parameter, if it was trained.
    pub(super) fn open(&self, name: &str) -> Result<Option<Weights>> {
        if lock(&self.names).contains(name) {
            Ok(Some(self.writer.to_read(Weights::open_file(&self.path(name))?)))
        } else {
            Ok(None)
        }
    }

    /// Stores all elements of a parameter if it was trained, and its quantized data if it is stored quantized.
    pub(super) fn write(&self, name: &str, numbers: Option<ParamElements>, codes: Option<&QMatrix>) -> Result<()> {
        let (mut plans, low) = match numbers {
            None => (Vec::new(), None),
            Some(ParamElements::F32(v)) => (plans(v.len(), StoredDtype::F32, false), None),
            Some(ParamElements::Bf16(v, low)) => (plans(v.len(), StoredDtype::Bf16, low.is_some()), low),
            Some(ParamElements::F16(v, low)) => (plans(v.len(), StoredDtype::F16, low.is_some()), low),
        };
        let parts = codes.map(QMatrix::parts).unwrap_or_default();
        plans.extend(parts.iter().map(|part| TensorPlan {
            name: part_name(CODES, part.name),
            dtype: StoredDtype::U8,
            shape: vec![part.bytes.len()],
        }));
        self.put(name, &plans, &mut |plan, sink| match (plan.name.as_str(), numbers) {
            (WEIGHT, Some(ParamElements::F32(v))) => sink(Values::F32(v)),
            (WEIGHT, Some(ParamElements::Bf16(v, _))) => sink(Values::Bf16(v)),
            (WEIGHT, Some(ParamElements::F16(v, _))) => sink(Values::F16(v)),
            (LOW, _) => low.unwrap_or_default().chunks(STEP).try_for_each(|part| {
                let bytes: Vec<u8> = part.iter().flat_map(|x| x.to_le_bytes()).collect();
                sink(Values::Raw(&bytes))
            }),
            (other, _) => {
                let part = parts.iter().find(|p| part_name(CODES, p.name) == other);
                sink(Values::Raw(part.map_or(&[][..], |p| &p.bytes)))
            }
        })
    }

    /// Stores the exact f32 values of tensor `name` of `saved` as a weight of `dtype` and the low bits of its master.
    pub(super) fn restore(&self, name: &str, dtype: Dtype, saved: &Weights) -> Result<()> {
        let count = saved.info(name).map_or(0, |i| i.count());
        let (stored, low) = match dtype {
            Dtype::F32 => (StoredDtype::F32, false),
            Dtype::Bf16 => (StoredDtype::Bf16, true),
            Dtype::F16 => (StoredDtype::F16, true),
        };
        let mut values = vec![0f32; STEP.min(count)];
        self.put(name, &plans(count, stored, low), &mut |plan, sink| {
            let mut first = 0;
            while first < count {
                let values = &mut values[..STEP.min(count - first)];
                saved.read_f32_at(name, first, values)?;
                first += values.len();
                match (plan.name.as_str(), dtype) {
                    (WEIGHT, Dtype::F32) => sink(Values::F32(values))?,
                    (WEIGHT, Dtype::Bf16) => {
                        let high: Vec<bf16> = values.iter().map(|x| master::split(*x).0).collect();
                        sink(Values::Bf16(&high))?
                    }
                    (WEIGHT, Dtype::F16) => {
                        let high: Vec<f16> = values.iter().map(|x| master::split_f16(*x).0).collect();
                        sink(Values::F16(&high))?
                    }
                    _ => {
                        let low_of = |x: &f32| match dtype {
                            Dtype::F16 => master::split_f16(*x).1,
                            Dtype::F32 | Dtype::Bf16 => master::split(*x).1,
                        };
                        let low = values.iter().flat_map(|x| low_of(x).to_le_bytes());
                        let low: Vec<u8> = low.collect();
                        sink(Values::Raw(&low))?
                    }
                }
            }
            Ok(())
        })
    }

    fn put(&self, name: &str, tensors: &[TensorPlan], fill: &mut Fill) -> Result<()> {
        self.writer.write(|| {
            staging::scratch(&self.dir)?;
            let path = self.path(name);
            write_file(&path, tensors, &[], fill)?;
            self.writer.written(&path)
        })?;
        let mut names = lock(&self.names);
        names.insert(name.to_string());
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.safetensors"))
    }
}

type Fill<'a> = dyn FnMut(&TensorPlan, &mut dyn FnMut(Values) -> Result<()>) -> Result<()> + 'a;

fn plans(count: usize, dtype: StoredDtype, low: bool) -> Vec<TensorPlan> {
    let plan = |name: &str, dtype| TensorPlan {
        name: name.into(),
        dtype,
        shape: vec![count],
    };
    let mut plans = vec![plan(WEIGHT, dtype)];
    if low {
        plans.push(plan(LOW, StoredDtype::I16));
    }
    plans
}
