//! Decoded copies of weights that are quantized in the model files, drawn weights, and who writes such files.

use super::{DEQUANTIZED, DRAWN, ModelFiles};
use crate::base::{Result, staging};
use crate::checkpoint;
use crate::comm::Collective;
use crate::formats::weights::Weights;
use crate::recipe::{Dtype, Recipe};
use crate::source::disk::{self, SourceWriter};
use crate::source::{ParamInfo, StoragePolicy, resident, stored};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The writer of the files that a run needs meanwhile, and their directory: with `distributed.weights = "host"` the first rank of
/// each machine, in its directory; else each rank in `run_dir`, its own.
pub(super) fn writer(recipe: &Recipe, run_dir: &Path, ranks: &Arc<dyn Collective>) -> Result<(SourceWriter, PathBuf)> {
    if recipe.distributed.shares_files() && ranks.world().size > 1 {
        SourceWriter::of_machine(ranks.clone(), run_dir)
    } else {
        Ok((SourceWriter::default(), run_dir.to_path_buf()))
    }
}

impl ModelFiles {
    /// Random weights, from a file in the directory of the run, which `writer` writes.
    pub(super) fn draw(
        &self,
        params: &[ParamInfo],
        seed: u64,
        dtype: Dtype,
        run_dir: &Path,
        writer: &SourceWriter,
    ) -> Result<Weights> {
        let (dir, resident::RandomWeights { seed, std, norm }) = (run_dir.join(DRAWN), self.random_weights(seed));
        let file = dir.join("model.safetensors");
        writer.write(|| {
            staging::scratch(&dir)?;
            disk::write_random(&file, params, seed, std, norm, dtype)
        })?;
        Weights::open_file(&file)
    }

    /// The weights of quantized files, those that `storage` does not keep in their format dequantized, from a file in
    /// the directory of the run, which `writer` writes.
    pub(super) fn decode(
        &self,
        storage: &StoragePolicy,
        dtype: Dtype,
        run_dir: &Path,
        writer: &SourceWriter,
    ) -> Result<Weights> {
        let (dir, weights, all) = (run_dir.join(DEQUANTIZED), self.open_weights()?, self.spec.params());
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
            stored::write_dequantized(&weights, &params, dtype, &file)
        })?;
        Ok(weights.with_tensors_of(Weights::open_file(&file)?, &without))
    }
}
