//! Writes a LoRA adapter as mlx-lm reads it (`load_adapters` of mlx_lm/tuner/utils.py): `adapters.safetensors` with
//! `MODULE.lora_a` `[in, r]` and `MODULE.lora_b` `[r, out]`, and `adapter_config.json`.

use super::load_adapter;
use crate::base::{Error, Result, files};
use crate::formats::StoredDtype;
use crate::formats::config::Config;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::model::families;
use crate::ops::update;
use crate::peft::Adapter;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;

/// Writes both files of the adapter in `dir` to `out`, an existing directory. `base`: the directory of its base model; only
/// its config is read.
///
/// mlx-lm has one rank and one scale for all modules: smaller ranks are filled with zeros, and other scales are in the values of
/// `lora_b`. The product of a module is the same.
///
/// # Errors
/// An adapter of another kind than LoRA on linears of layers or the output projection, one that also replaces whole
/// parameters or rows, or one on a multimodal model (`Unsupported`); a file that cannot be read or written.
pub fn mlx_adapter(dir: &Path, base: &Path, out: &Path) -> Result<()> {
    let spec = families::read(&Config::read(base)?)?;
    let merge = "merge the adapter into its base model: mlx-lm reads the result";
    // mlx-lm looks for tensors under its own names, and ignores all others without a message.
    if spec.multimodal {
        return Err(
            Error::unsupported(
                "mlx-lm uses other tensor names for the language model of a multimodal model, and would ignore this adapter",
            )
            .at_path(dir)
            .found(format!(
                "an adapter on a multimodal model with the text model `{}`",
                spec.model_type
            ))
            .expected("an adapter on a text-only model")
            .hint(merge),
        );
    }
    let loaded = load_adapter(dir, &spec)?;
    if !loaded.whole.is_empty() || !loaded.rows.is_empty() || loaded.score.is_some() {
        return Err(
            Error::unsupported("an adapter of mlx-lm cannot store whole parameters or rows of an embedding")
                .at_path(dir)
                .found("modules_to_save, trainable tokens or a score head")
                .hint(merge),
        );
    }
    let mut loras = Vec::new();
    for (module, adapter) in &loaded.adapters {
        let Adapter::Lora(lora) = &**adapter else {
            return Err(Error::unsupported("only LoRA is written for mlx-lm")
                .at_path(dir)
                .found(loaded.config.name())
                .hint(merge));
        };
        if module.contains(".experts.") || !loaded.of_experts.is_empty() {
            return Err(Error::unsupported("mlx-lm has the experts of a layer in one module")
                .at(module)
                .hint(merge));
        }
        loras.push((module, lora));
    }
    let rank = loras.iter().map(|(_, lora)| lora.rank()).max().unwrap_or(0);
    let scale = loras.first().map_or(1.0, |(_, lora)| lora.scale);
    let (mut plans, mut data, mut keys) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut first = spec.layers.len();
    for (module, lora) in loras {
        let in_layer = module
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split_once('.'));
        keys.insert(
            match in_layer.and_then(|(layer, below)| Some((layer.parse::<usize>().ok()?, below))) {
                Some((layer, below)) => {
                    first = first.min(layer);
                    below
                }
                None => module,
            },
        );
        let (inputs, outputs) = (lora.a.dim(1)?, lora.b.dim(0)?);
        let factor = if lora.scale == scale { 1.0 } else { lora.scale / scale };
        let (a, b) = (update::to_f32_vec(&lora.a)?, update::to_f32_vec(&lora.b)?);
        let mut b = transposed(&b, outputs, lora.rank(), rank);
        b.0.iter_mut().for_each(|x| *x *= factor);
        let mut a = transposed(&a, lora.rank(), inputs, inputs);
        a.fill_columns(lora.rank(), rank);
        for (side, shape, values) in [("lora_a", vec![inputs, rank], a), ("lora_b", vec![rank, outputs], b)] {
            plans.push(TensorPlan {
                name: format!("{module}.{side}"),
                dtype: StoredDtype::F32,
                shape,
            });
            data.push(values.0);
        }
    }
    let mut values = data.into_iter();
    let metadata = [("format".to_string(), "mlx".to_string())];
    writer::write_file(&out.join("adapters.safetensors"), &plans, &metadata, |_, sink| {
        sink(Values::F32(&values.next().unwrap_or_default()))
    })?;
    let config = json!({
        "fine_tune_type": "lora",
        // Counted from the last layer.
        "num_layers": spec.layers.len() - first,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": loaded.config.lora_dropout, "keys": keys},
    });
    files::write_atomic(&out.join("adapter_config.json"), format!("{config:#}\n").as_bytes())
}

/// A matrix, row by row.
struct MlxMatrix(Vec<f32>);

/// The transpose of `[rows, columns]`, with rows of zeros up to `[filled, rows]`.
fn transposed(values: &[f32], rows: usize, columns: usize, filled: usize) -> MlxMatrix {
    let mut out = vec![0.0; filled * rows];
    for (r, row) in values.chunks_exact(columns).enumerate() {
        for (c, x) in row.iter().enumerate() {
            out[c * rows + r] = *x;
        }
    }
    MlxMatrix(out)
}

impl MlxMatrix {
    /// Fills rows of `from` elements with zeros up to `to`.
    fn fill_columns(&mut self, from: usize, to: usize) {
        if from != to {
            let row = |row: &[f32]| [row, &vec![0.0; to - from]].concat();
            self.0 = self.0.chunks_exact(from).flat_map(row).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its names would be those of a text-only model: mlx-lm would answer with the base model.
    #[test]
    fn an_adapter_on_a_multimodal_model_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/families");
        for (family, text) in [("gemma3", "gemma3_text"), ("qwen2_5_vl", "qwen2_5_vl_text")] {
            let e = mlx_adapter(dir.path(), &goldens.join(family), dir.path()).unwrap_err();
            assert_eq!(e.kind(), crate::base::ErrorKind::Unsupported, "{family}: {e}");
            let e = e.to_string();
            assert!(
                e.contains("multimodal") && e.contains(text) && e.contains("merge"),
                "{e}"
            );
            assert!(files::list(dir.path()).unwrap().is_empty(), "{family}");
        }
    }
}
