//! Decoded copies of weights that are quantized in the model files.

use super::{DECODED, ModelFiles};
use crate::base::{Result, staging};
use crate::checkpoint;
use crate::formats::weights::Weights;
use crate::recipe::Dtype;
use crate::source::disk::Writer;
use crate::source::{StoragePolicy, resident, stored};
use std::path::Path;

impl ModelFiles {
    /// The weights of quantized files, those that `storage` does not keep in their format decoded, from a file in the
    /// directory of the run, which `writer` writes.
    pub(super) fn decode(
        &self,
        storage: &StoragePolicy,
        dtype: Dtype,
        run_dir: &Path,
        writer: &Writer,
    ) -> Result<Weights> {
        let (dir, weights, all) = (run_dir.join(DECODED), self.open_weights()?, self.spec.params());
        let (mut params, mut without) = (Vec::new(), Vec::new());
        for p in &all {
            let Some((layout, format)) = stored::find(&weights, &p.name)? else {
                continue;
            };
            if storage.keeps(&p.name, format) {
                continue;
            }
            if let &[rows, columns] = p.shape.as_slice() {
                without.extend(stored::names(&weights, layout, format, &p.name, (rows, columns)));
            }
            let bias = format!("{}.bias", p.name.trim_end_matches(".weight"));
            if !all.iter().any(|p| *p.name == *bias) && resident::is_beside_quantized(&weights, &bias) {
                without.push(bias);
            }
            params.push(p.clone());
        }
        if params.is_empty() {
            return Ok(weights);
        }
        let elements: u64 = params.iter().map(|p| p.elements() as u64).sum();
        let file = dir.join("model.safetensors");
        writer.write(|| {
            checkpoint::check_space(run_dir, dtype.bytes() * elements)?;
            staging::scratch(&dir)?;
            stored::write_decoded(&weights, &params, dtype, &file)
        })?;
        Ok(weights.with_tensors_of(Weights::open_file(&file)?, &without))
    }
}
