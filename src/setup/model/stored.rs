//! How the files of a model store its weights.

use crate::base::Result;
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::model::Spec;
use crate::quant::Format;
use crate::recipe::{Dtype, Method};
use crate::source::{policy, stored};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How the files of a model store its weights.
#[derive(Debug, Default)]
pub struct StoredWeights {
    /// Weights that are quantized in the files, with their formats.
    pub codes: BTreeMap<Arc<str>, Format>,
    /// Bytes per value when a weight is read for quantization; `None` if the files are not available.
    pub number_bytes: Option<u64>,
}

impl StoredWeights {
    /// Random weights are f32.
    pub(super) fn random() -> Self {
        Self {
            number_bytes: Some(Dtype::F32.bytes()),
            ..Self::default()
        }
    }

    /// Reads headers only.
    pub(super) fn of(weights: &Weights, spec: &Spec) -> Result<Self> {
        let mut found = Self::default();
        let mut all_bf16 = true;
        for p in spec.params() {
            if let Some((_, format)) = stored::find(weights, &p.name)? {
                found.codes.insert(p.name.clone(), format);
            }
            let info = weights.info(&p.name).filter(|_| policy::is_projection(&p));
            all_bf16 &= info.is_none_or(|i| i.dtype == StoredDtype::Bf16);
        }
        found.number_bytes = Some(if found.codes.values().any(|format| format.is_read_only()) {
            // While the codes of other tools are reordered, they are in memory twice.
            1
        } else if !found.codes.is_empty() {
            0
        } else if all_bf16 {
            Dtype::Bf16.bytes()
        } else {
            Dtype::F32.bytes()
        });
        Ok(found)
    }

    /// True if a run with this method trains dequantized values of the files.
    pub fn is_dequantized(&self, method: Method) -> bool {
        method != Method::Lora && !self.codes.is_empty()
    }
}
