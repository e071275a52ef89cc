//! `ft quantize`: writes a model directory with quantized projections, one weight in memory at a time.

use crate::base::units::bytes;
use crate::base::{Error, Result, files};
use crate::checkpoint;
use crate::commands::sensitivity::{self, FormatChoice, Sensitivity};
use crate::formats::StoredDtype;
use crate::formats::config::Config;
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::hf::{self, OutputModel};
use crate::model::families;
use crate::quant::{self, Format, QMatrix};
use crate::recipe::Dtype;
use crate::report;
use crate::setup::vocabulary::TextChanges;
use crate::setup::{ModelDir, locate};
use crate::source::ParamInfo;
use crate::source::policy::is_projection;
use crate::source::stored::{self, QuantizedLayout};
use crate::train::verify;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The report in the new directory, as Markdown.
const REPORT: &str = "quantization.md";
/// Why a directory with NF4 only is not one of bitsandbytes.
const EXPERTS: &str = "\nThe files have the layout of ft: transformers has the experts of a layer in one parameter, which bitsandbytes does \
                       not quantize.\n";
const NAMES: &str = "\nThe files have the layout of ft: `llm_int8_skip_modules` of bitsandbytes cannot name the linears that are not quantized, \
                     because the names of quantized ones begin or end in the same way.\n";

#[derive(Debug, Clone, Copy)]
pub struct QuantizeRequest<'a> {
    pub model: &'a Path,
    pub out: &'a Path,
    /// The format of every projection; with a budget the smallest format that can be chosen.
    pub to: Format,
    /// Budget in bytes for all weights, and the file of calibration rows.
    pub budget: Option<(u64, &'a Path)>,
    /// Largest number of tokens of the calibration rows.
    pub calibration_tokens: usize,
}

/// The result of a quantization.
#[derive(Debug, Clone)]
pub struct QuantizeReport {
    pub out: PathBuf,
    pub layout: QuantizedLayout,
    /// Number of weights in each format, by its name.
    pub counts: BTreeMap<String, usize>,
    /// Bytes of all weights before and after.
    pub before: u64,
    pub after: u64,
    /// Root mean square of the quantization error, relative to that of the weights.
    pub error: f64,
    pub text: String,
}

/// Quantizes the projections of the model and writes `out`; other tensors keep their bytes. If all formats are NF4 the
/// directory has the layout of bitsandbytes, otherwise ft's own. A model with experts always has ft's own.
///
/// Errors: `out` is not empty; a file of the `final/` of a run is not as the run wrote it; the model is quantized already, or is a
/// reward model; even the smallest choice exceeds the budget; a weight is missing, has another shape or is not finite; not enough
/// disk space. In these cases nothing is written.
pub fn quantize(request: &QuantizeRequest) -> Result<QuantizeReport> {
    crate::commands::merge::refuse_existing(request.out)?;
    verify::check_result(request.model)?;
    let config = locate::model_config(request.model, Config::load)?;
    let spec = families::read(&config)?;
    let weights = Weights::open(request.model)?;
    if weights.info(hf::SCORE).is_some() {
        return Err(Error::unsupported("a reward model is not quantized")
            .at_path(request.model)
            .found(format!("`{}` in the weights", hf::SCORE))
            .expected("a language model")
            .hint("give the model from which it was trained"));
    }
    crate::commands::merge::refuse_quantized(&spec, &weights)?;
    crate::commands::merge::refuse_strangers(&spec, &weights)?;
    let params = spec.params();
    for p in &params {
        weights.require(&p.name, &p.shape)?;
    }
    let is_bf16 = |p: &ParamInfo| weights.info(&p.name).is_some_and(|i| i.dtype == StoredDtype::Bf16);
    let dequantized_dtype = if params.iter().all(is_bf16) {
        Dtype::Bf16
    } else {
        Dtype::F32
    };
    let before = sensitivity::dense_bytes(&weights, &params);
    let (formats, measured) = match request.budget {
        None => {
            let all = params.iter().filter(|p| is_projection(p));
            (all.map(|p| (p.name.clone(), request.to)).collect(), None)
        }
        Some((budget, data)) => {
            let model = ModelDir::open(&request.model.to_string_lossy(), "main", &TextChanges::default())?;
            let sensitivity =
                sensitivity::measure(&model, data, request.to, dequantized_dtype, request.calibration_tokens)?;
            let choice = sensitivity.choose(&weights, &params, budget)?;
            (choice.formats.clone(), Some(MeasuredChoice { sensitivity, choice }))
        }
    };
    let work = QuantizedModel {
        config: &config,
        weights: &weights,
        params: &params,
        dequantized_dtype,
        formats: &formats,
        before,
        has_experts: spec.layers.iter().any(|layer| layer.experts.is_some()),
    };
    write(request, &work, measured)
}

type ChosenFormats = BTreeMap<Arc<str>, Format>;

/// The measured sensitivities, and the formats that they led to.
struct MeasuredChoice {
    sensitivity: Sensitivity,
    choice: FormatChoice,
}

/// The model that is quantized, and the formats that were chosen.
#[derive(Clone, Copy)]
struct QuantizedModel<'a> {
    config: &'a Config,
    weights: &'a Weights,
    params: &'a [ParamInfo],
    /// The type of dequantized values.
    dequantized_dtype: Dtype,
    formats: &'a ChosenFormats,
    /// Bytes of all weights.
    before: u64,
    /// True for a mixture of experts.
    has_experts: bool,
}

fn write(request: &QuantizeRequest, work: &QuantizedModel, measured: Option<MeasuredChoice>) -> Result<QuantizeReport> {
    let QuantizedModel {
        config,
        weights,
        params,
        dequantized_dtype,
        formats,
        before,
        has_experts,
    } = *work;
    let nf4 = |p: &&ParamInfo| matches!(formats.get(&p.name), Some(Format::Nf4 { .. }));
    let all_nf4 = params.iter().filter(|p| is_projection(p)).all(|p| nf4(&p));
    // transformers has the experts of a layer in one parameter, which bitsandbytes does not quantize.
    let kept = if all_nf4 && !has_experts {
        stored::kept_modules(weights, params)
    } else {
        None
    };
    let layout = match kept {
        Some(_) => QuantizedLayout::Bitsandbytes,
        None => QuantizedLayout::Ft,
    };
    // Each tensor with its parameter.
    let mut tensors: Vec<TensorPlan> = Vec::new();
    let mut owners: BTreeMap<String, &ParamInfo> = BTreeMap::new();
    for p in params {
        let of_param = match (formats.get(&p.name), p.shape.as_slice()) {
            (Some(format), &[rows, columns]) => stored::tensors(layout, *format, &p.name, (rows, columns)),
            _ => vec![TensorPlan {
                name: p.name.to_string(),
                dtype: weights.require(&p.name, &p.shape)?.dtype,
                shape: p.shape.clone(),
            }],
        };
        owners.extend(of_param.iter().map(|t| (t.name.clone(), p)));
        tensors.extend(of_param);
    }
    let after = tensors.iter().filter_map(TensorPlan::bytes).sum();

    let mut raw = config.raw.clone();
    let used: Vec<Format> = formats.values().copied().collect();
    if !used.is_empty() {
        raw.insert(
            "quantization_config".into(),
            stored::config(layout, &used, dequantized_dtype, kept.as_deref().unwrap_or_default()),
        );
    }
    let directory = OutputModel {
        out: request.out,
        base_dir: request.model,
        config: &raw,
        tensors: &tensors,
        shard_bytes: writer::SHARD_BYTES,
        chat_template: None,
    };
    checkpoint::check_space(request.out, directory.bytes()?)?;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for p in params.iter().filter(|p| is_projection(p)) {
        let format = formats
            .get(&p.name)
            .map_or_else(|| sensitivity::stored_type(weights, &p.name), |f| f.to_string());
        *counts.entry(format).or_default() += 1;
    }
    let errors = RefCell::new(QuantizationErrors::default());
    let text = || {
        let mut text = text(&counts, (before, after), errors.borrow().ratio(), measured.as_ref());
        if all_nf4 && layout == QuantizedLayout::Ft {
            text.push_str(if has_experts { EXPERTS } else { NAMES });
        }
        text
    };
    // Without it the directory would not say how its weights are stored.
    let more = |dir: &Path| files::write_atomic(&dir.join(REPORT), text().as_bytes());
    let mut now: Option<(Arc<str>, QMatrix)> = None;
    let mut fill = |plan: &TensorPlan, sink: &mut dyn FnMut(Values) -> Result<()>| {
        let owner = owners
            .get(&plan.name)
            .ok_or_else(|| Error::new("no such parameter").at(&plan.name))?;
        let (Some(format), &[rows, columns]) = (formats.get(&owner.name), owner.shape.as_slice()) else {
            return sink(Values::Raw(&weights.read_bytes(&plan.name)?));
        };
        if now.as_ref().is_none_or(|(name, _)| *name != owner.name) {
            // Frees the previous quantized data before it reads the next weight.
            now = None;
            let values = weights.read_f32(&owner.name)?;
            let quantized = quant::quantize(&values, (rows, columns), *format, dequantized_dtype)
                .map_err(|e| e.or_at(&*owner.name))?;
            errors.borrow_mut().add(&values, &quantized);
            now = Some((owner.name.clone(), quantized));
        }
        match &now {
            Some((name, quantized)) => sink(Values::Raw(&stored::bytes(layout, quantized, name, plan)?)),
            None => Ok(()),
        }
    };
    let out = directory.write_with(&mut fill, Some(&more))?;

    if let Some(note) = hf::config_note(&raw, request.model) {
        report::note(&note);
    }
    let (text, error) = (text(), errors.borrow().ratio());
    Ok(QuantizeReport {
        out,
        layout,
        counts,
        before,
        after,
        error,
        text,
    })
}

/// Sums of squares.
#[derive(Default)]
struct QuantizationErrors {
    weights: f64,
    change: f64,
}

impl QuantizationErrors {
    fn add(&mut self, values: &[f32], quantized: &QMatrix) {
        let (rows, columns) = quantized.dims();
        let mut row = vec![0f32; columns];
        for r in 0..rows {
            quantized.dequantize_row(r, &mut row);
            for (x, y) in values[r * columns..].iter().zip(&row) {
                self.weights += f64::from(*x).powi(2);
                self.change += f64::from(x - y).powi(2);
            }
        }
    }

    fn ratio(&self) -> f64 {
        if self.weights > 0.0 {
            (self.change / self.weights).sqrt()
        } else {
            0.0
        }
    }
}

/// The bytes of all weights are those before and after. `error`: RMS of the quantization error divided by RMS of the weights.
fn text(
    counts: &BTreeMap<String, usize>,
    (before, after): (u64, u64),
    error: f64,
    measured: Option<&MeasuredChoice>,
) -> String {
    let mut out = String::from("# How the weights are stored\n\n| storage | projections |\n|---|---|\n");
    for (format, n) in counts {
        out.push_str(&format!("| {format} | {n} |\n"));
    }
    out.push_str(&format!(
        "\nAll weights: {} before, {} after. Norms, biases, embedding and output head are not quantized.\n\
         The relative quantization error is {:.2} % (RMS of the error divided by RMS of the weights).\n",
        bytes(before),
        bytes(after),
        100.0 * error
    ));
    if let Some(found) = measured {
        out.push_str(&found.sensitivity.text(&found.choice));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Quantizes a golden model to NF4; returns its `quantization_config` too.
    fn quantized(family: &str) -> (QuantizeReport, Value) {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens/families");
        let dir = tempfile::tempdir().unwrap();
        let request = QuantizeRequest {
            model: &goldens.join(family),
            out: &dir.path().join("out"),
            to: Format::Nf4 { double: true },
            budget: None,
            calibration_tokens: 1,
        };
        let report = quantize(&request).unwrap();
        let config = files::read_text(&report.out.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        (report, config["quantization_config"].clone())
    }

    #[test]
    fn a_directory_of_bitsandbytes_lists_the_linears_that_stay() {
        for (family, listed) in [
            ("llama", &["lm_head"][..]),
            ("gemma3", &["vision_tower", "model.multi_modal_projector"]),
            ("qwen3_5", &["model.visual"]),
            (
                "gemma3n_text",
                &[
                    "model.per_layer_model_projection",
                    "model.altup_projections.1",
                    "model.layers.0.altup.modality_router",
                ],
            ),
        ] {
            let (report, config) = quantized(family);
            assert_eq!(report.layout, QuantizedLayout::Bitsandbytes, "{family}");
            let kept: Vec<String> = serde_json::from_value(config["llm_int8_skip_modules"].clone()).unwrap();
            assert!(
                listed.iter().all(|entry| kept.iter().any(|k| k == entry)),
                "{family}: {kept:?}"
            );
            assert_eq!(kept.len() == 1, family == "llama", "{kept:?}");
            assert!(!report.text.contains("bitsandbytes"));
        }
    }

    /// Published files of Gemma 3n and Gemma 4 have keys of layers that read those of another layer.
    #[test]
    fn keys_that_no_layer_uses_are_left_out() {
        const KEYS: &str = "model.layers.0.self_attn.k_proj.weight";
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens/families/gemma3n_text");
        let weights = Weights::open(&golden).unwrap();
        let with = |more: &str| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::copy(golden.join("config.json"), dir.path().join("config.json")).unwrap();
            let plan = |name: &str, from: &str| {
                let info = weights.info(from).unwrap();
                TensorPlan {
                    name: name.into(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                }
            };
            let mut plans: Vec<TensorPlan> = weights.names().map(|name| plan(name, name)).collect();
            plans.push(plan(more, KEYS));
            writer::write_file(&dir.path().join("model.safetensors"), &plans, &[], |plan, sink| {
                let from = if plan.name == more { KEYS } else { plan.name.as_str() };
                sink(Values::Raw(&weights.read_bytes(from)?))
            })
            .unwrap();
            let request = QuantizeRequest {
                model: dir.path(),
                out: &dir.path().join("out"),
                to: Format::Nf4 { double: true },
                budget: None,
                calibration_tokens: 1,
            };
            let report = quantize(&request)?;
            Ok::<_, Error>(Weights::open(&report.out)?.info(more).is_some())
        };
        for part in ["k_proj.weight", "v_proj.weight", "k_norm.weight"] {
            assert!(!with(&format!("model.layers.4.self_attn.{part}")).unwrap(), "{part}");
        }
        for name in [
            "model.layers.4.self_attn.x_proj.weight",
            "model.layers.0.self_attn.v_norm.weight",
            "model.layers.9.self_attn.k_proj.weight",
        ] {
            let e = with(name).unwrap_err().to_string();
            assert!(e.contains(name) && e.contains("does not have"), "{e}");
        }
    }

    /// transformers would look for one tensor of all experts, and for a quantized router.
    #[test]
    fn experts_in_nf4_have_the_layout_of_ft() {
        let (report, config) = quantized("qwen3_moe");
        assert_eq!(report.layout, QuantizedLayout::Ft);
        assert_eq!(config["quant_method"], "ft");
        assert!(report.text.contains("experts"), "{}", report.text);
    }
}
