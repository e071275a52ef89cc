//! Opens a Hugging Face model directory as a network in memory.

use crate::base::Result;
use crate::formats::{ChatTemplate, Config, Tokenizer, Weights};
use crate::model::{TrainableNetwork, families};
use crate::ops::Dtype;
use crate::source::{ParamInfo, ResidentWeights, StoragePolicy};
use candle_core::Device;
use std::path::Path;
use std::sync::Arc;

/// A model directory with loaded weights.
pub struct OpenModel {
    /// The contents of `config.json`.
    pub config: Config,
    /// The network with all weights on its device, and the store of its weights for training.
    pub model: TrainableNetwork,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The model's own chat template, if it has one.
    pub template: Option<ChatTemplate>,
}

/// Reads config, tokenizer, chat template and all weights of `dir`, the weights in `dtype` on `device`. Quantized weights keep
/// their quantized values, so that only adapters train on them; `open_dequantized` dequantizes them.
///
/// # Errors
/// The kind is `NotFound` for a missing directory or file, `Format` for a damaged file, `Unsupported` for a family that
/// ft does not compute or for weights that are not safetensors, `Shape` for weights that do not fit the config, and
/// `NonFinite` for weights that are not finite.
///
/// ```
/// use candle_core::Device;
/// use ft_base::ErrorKind;
/// use ft_core::hf;
/// use ft_ops::Dtype;
/// use std::path::Path;
///
/// # fn main() -> ft_base::Result<()> {
/// let opened = hf::open(Path::new("../../assets/tiny"), Dtype::F32, &Device::Cpu)?;
/// println!("{} layers, {} tokens", opened.model.network.layers(), opened.tokenizer.vocab_size());
///
/// let missing = hf::open(Path::new("no/such/model"), Dtype::F32, &Device::Cpu);
/// assert!(missing.is_err_and(|e| e.kind() == ErrorKind::NotFound));
/// # Ok(())
/// # }
/// ```
pub fn open(dir: &Path, dtype: Dtype, device: &Device) -> Result<OpenModel> {
    dtype.runs_on(!device.is_cpu())?;
    let storage = StoragePolicy::dense(dtype);
    opened(dir, device, |params, weights| {
        ResidentWeights::load(params, weights, |p| storage.of(p), device)
    })
}

/// As `open`, with the weights of quantized files (GPTQ, FP8, MXFP4, ...) dequantized to `dtype`: every parameter can be
/// trained. A weight takes 2 or 4 bytes.
///
/// # Errors
/// As for `open`.
pub fn open_dequantized(dir: &Path, dtype: Dtype, device: &Device) -> Result<OpenModel> {
    dtype.runs_on(!device.is_cpu())?;
    opened(dir, device, |params, weights| {
        ResidentWeights::load_dequantized(params, weights, dtype, device)
    })
}

fn opened(
    dir: &Path,
    device: &Device,
    load: impl FnOnce(Vec<ParamInfo>, &Weights) -> Result<ResidentWeights>,
) -> Result<OpenModel> {
    let config = Config::load(dir)?;
    let spec = families::read(&config)?;
    spec.runs_on(!device.is_cpu())?;
    let tokenizer = Tokenizer::load(dir)?;
    let template = ChatTemplate::from_dir(dir, &tokenizer)?;
    let source = load(spec.params(), &Weights::open(dir)?)?;
    Ok(OpenModel {
        config,
        model: TrainableNetwork::new(spec, Arc::new(source), device.clone()),
        tokenizer,
        template,
    })
}
