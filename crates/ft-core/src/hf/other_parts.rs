//! The tensors of a base model outside its language model, as an export writes them: with the bytes of the files, or dequantized,
//! because the config of the export has no settings of quantized weights.

use crate::base::{Error, Result};
use crate::formats::StoredDtype;
use crate::formats::weights::{TensorInfo, Weights};
use crate::formats::writer::{TensorPlan, Values};
use crate::source::{Group, ParamInfo, Sublayer, stored};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Bytes of the other parts of this base model in an export with weights of type `dense`. 0 if they cannot be read: the export
/// reports it.
pub fn bytes_of_other_parts(base_dir: &Path, dense: StoredDtype) -> u64 {
    let parts = Weights::open(base_dir).and_then(|base| OtherParts::of(base, dense));
    parts.map_or(0, |parts| parts.plans().filter_map(|plan| plan.bytes()).sum())
}

/// The tensors, by name.
#[derive(Debug)]
pub(super) struct OtherParts {
    weights: Weights,
    parts: BTreeMap<String, OtherPart>,
}

#[derive(Debug)]
enum OtherPart {
    Same(TensorInfo),
    /// A quantized weight, and the format in which it is written.
    Dequantized(ParamInfo, StoredDtype),
}

impl OtherParts {
    /// Those of `base`; quantized weights become `dense`.
    ///
    /// # Errors
    /// A quantized tensor whose layout does not say its shape, or that ft does not read.
    pub(super) fn of(base: Weights, dense: StoredDtype) -> Result<Self> {
        let weights = base.into_other_parts();
        let mut parts = BTreeMap::new();
        let mut quantized: BTreeSet<String> = BTreeSet::new();
        for name in weights.names().filter(|name| name.ends_with(".weight")) {
            let Some((layout, format)) = stored::find(&weights, name)? else {
                continue;
            };
            let Some((rows, columns)) = stored::dims(&weights, name, layout)? else {
                return Err(refuse(&weights, name));
            };
            let names = stored::names(&weights, layout, format, name, (rows, columns));
            if let Some(missing) = names.iter().find(|part| weights.info(part).is_none()) {
                return Err(Error::format(format!("tensor `{missing}` is missing"))
                    .at(name)
                    .hint("the files are not complete: download them again, or give the model's unquantized weights"));
            }
            quantized.extend(names);
            let param = ParamInfo {
                name: name.into(),
                shape: vec![rows, columns],
                group: Group::Head,
                sublayer: Sublayer::Other,
            };
            parts.insert(name.to_string(), OtherPart::Dequantized(param, dense));
        }
        for name in weights.names().filter(|name| !quantized.contains(*name)) {
            let Some(info) = weights.info(name) else { continue };
            let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
            // A buffer of integers is no weight.
            let bytes = match info.dtype {
                StoredDtype::Bool => false,
                StoredDtype::U8 | StoredDtype::I8 => ends(&[".weight", "_blocks", "_scales"]),
                dtype => dtype.size() == 1,
            };
            if bytes || ends(&[".qweight", ".weight_packed"]) {
                return Err(refuse(&weights, name));
            }
            parts.insert(name.to_string(), OtherPart::Same(info.clone()));
        }
        Ok(Self { weights, parts })
    }

    /// Names, formats and shapes, in the order of `write`.
    pub(super) fn plans(&self) -> impl Iterator<Item = TensorPlan> + '_ {
        self.parts.iter().map(|(name, part)| {
            let (dtype, shape) = match part {
                OtherPart::Same(info) => (info.dtype, &info.shape),
                OtherPart::Dequantized(param, dense) => (*dense, &param.shape),
            };
            TensorPlan {
                name: name.clone(),
                dtype,
                shape: shape.clone(),
            }
        })
    }

    /// Passes the values of a tensor to the sink.
    ///
    /// # Errors
    /// No such tensor; a failed read; a quantized weight that is damaged; any error of `sink`.
    pub(super) fn write(&self, name: &str, sink: &mut dyn FnMut(Values) -> Result<()>) -> Result<()> {
        match self.parts.get(name) {
            Some(OtherPart::Same(_)) => sink(Values::Raw(&self.weights.read_bytes(name)?)),
            Some(OtherPart::Dequantized(param, _)) => match stored::values(&self.weights, param)? {
                Some(values) => sink(Values::F32(&values)),
                None => Err(Error::internal("a quantized weight is none").at(name)),
            },
            None => Err(Error::not_found("no such tensor").at(name)),
        }
    }
}

fn refuse(weights: &Weights, name: &str) -> Error {
    let error = Error::unsupported("a quantized tensor outside the language model cannot be dequantized")
        .at(name)
        .expected("16 or 32 bits; or FP8, int8 or 4 bits of bitsandbytes, with their scales")
        .hint("the written model is not quantized: give the model's unquantized weights");
    match weights.info(name) {
        Some(info) => error.found(format!("{} {:?}", info.dtype, info.shape)),
        None => error,
    }
}
