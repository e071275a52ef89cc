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
/// directory has the layout of bitsandbytes, otherwise ft's own.
///
/// Errors: `out` is not empty; a file of the `final/` of a run is not as the run wrote it; the model is quantized already; even
/// the smallest choice exceeds the budget; a weight is missing, has another shape or is not finite; not enough disk space. In these
/// cases nothing is written.
pub fn quantize(request: &QuantizeRequest) -> Result<QuantizeReport> {
    crate::commands::merge::refuse_existing(request.out)?;
    verify::check_result(request.model)?;
    let config = locate::model_config(request.model, Config::load)?;
    let spec = families::read(&config)?;
    let weights = Weights::open(request.model)?;
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
}

fn write(request: &QuantizeRequest, work: &QuantizedModel, measured: Option<MeasuredChoice>) -> Result<QuantizeReport> {
    let QuantizedModel {
        config,
        weights,
        params,
        dequantized_dtype,
        formats,
        before,
    } = *work;
    let nf4 = |p: &&ParamInfo| matches!(formats.get(&p.name), Some(Format::Nf4 { .. }));
    let layout = if params.iter().filter(|p| is_projection(p)).all(|p| nf4(&p)) {
        QuantizedLayout::Bitsandbytes
    } else {
        QuantizedLayout::Ft
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
    checkpoint::check_space(request.out, after)?;

    let mut raw = config.raw.clone();
    let used: Vec<Format> = formats.values().copied().collect();
    if !used.is_empty() {
        raw.insert(
            "quantization_config".into(),
            stored::config(layout, &used, dequantized_dtype),
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
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for p in params.iter().filter(|p| is_projection(p)) {
        let format = formats
            .get(&p.name)
            .map_or(dequantized_dtype.name().to_string(), |f| f.to_string());
        *counts.entry(format).or_default() += 1;
    }
    let errors = RefCell::new(QuantizationErrors::default());
    let text = || text(&counts, (before, after), errors.borrow().ratio(), measured.as_ref());
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
