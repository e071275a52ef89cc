//! Writes a model directory as a GGUF file, some rows of a tensor in memory at a time.

use super::names::{self, PlannedTensor, RowOrder, TensorPart};
use super::{arch, keys};
use crate::base::{Error, Result};
use crate::formats::config::Config;
use crate::formats::gguf::{self, BlockType, EncodingErrors, GgufReader, MetadataValue, TensorEntry};
use crate::formats::tokenizer::Tokenizer;
use crate::formats::{ChatTemplate, Weights};
use crate::hf;
use crate::model::rope::Rope;
use crate::model::{Spec, families};
use crate::source::{ParamInfo, resident, stored};
use ft_base::named;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// Elements that are encoded at a time.
const PIECE: usize = 1 << 22;
/// Elements that one thread encodes at a time, a whole number of blocks.
const SHARE: usize = 1 << 16;
/// Number of the quantization of llama.cpp that the blocks belong to.
const QUANTIZATION_VERSION: u32 = 2;

named! {
    /// The number formats of a file.
    FileType {
        F32 = "f32",
        F16 = "f16",
        Bf16 = "bf16",
        Q8 = "q8_0",
        Q6 = "q6_k",
        Q4Mix = "q4_k_m",
        Q4 = "q4_0",
    }
}

impl FileType {
    /// Its number in `general.file_type`.
    fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 32,
            Self::Q8 => 7,
            Self::Q6 => 18,
            Self::Q4Mix => 15,
            Self::Q4 => 2,
        }
    }

    /// The name that people give such files: `Q4_K_M`.
    pub fn label(self) -> String {
        self.name().to_uppercase()
    }

    /// The format of a tensor. Mixes as in llama.cpp: the output projection has 6 bits, and in `q4_k_m` also half of the
    /// values and of the down projections.
    fn of(self, planned: &PlannedTensor, spec: &Spec) -> BlockType {
        let vector = planned.shape.len() < 2 || planned.exact;
        if vector {
            return BlockType::F32;
        }
        let head = planned.name == "output.weight" || (spec.tied && planned.name == "token_embd.weight");
        let layers = spec.layers.len();
        // The first and the last eighth of the layers, and every third of the others.
        let more = planned
            .layer
            .is_some_and(|l| l < layers / 8 || l >= 7 * layers / 8 || (l - layers / 8) % 3 == 2);
        let sensitive = ["attn_v.", "attn_qkv.", "attn_v_b.", "ffn_down"]
            .iter()
            .any(|n| planned.name.contains(n));
        let wanted = match self {
            Self::F32 => BlockType::F32,
            Self::F16 => BlockType::F16,
            Self::Bf16 => BlockType::Bf16,
            Self::Q8 => BlockType::Q8_0,
            Self::Q6 => BlockType::Q6K,
            Self::Q4Mix if head || (more && sensitive) => BlockType::Q6K,
            Self::Q4Mix => BlockType::Q4K,
            Self::Q4 if head => BlockType::Q6K,
            Self::Q4 => BlockType::Q4_0,
        };
        let row = planned.shape.last().copied().unwrap_or(1);
        let fits = |block: &BlockType| row.is_multiple_of(block.elements());
        [wanted, BlockType::Q8_0, BlockType::F16]
            .into_iter()
            .find(fits)
            .unwrap_or(BlockType::F16)
    }
}

/// The model to write, and the options of its file.
#[derive(Debug, Clone)]
pub struct ModelFile<'a> {
    /// The model directory.
    pub dir: &'a Path,
    /// The number formats.
    pub file_type: FileType,
    /// `general.name`.
    pub name: &'a str,
    /// The pre-tokenizer's name in llama.cpp; `None`: an equal or a near one, if ft has its name.
    pub pre_tokenizer: Option<&'a str>,
}

/// How far the values of the tensors of one format are from those of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fidelity {
    /// The format.
    pub block: BlockType,
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Root mean square of the errors / root mean square of the values.
    pub rms: f64,
    /// Largest error.
    pub largest: f64,
}

/// The properties of the written file.
#[derive(Debug, Clone, PartialEq)]
pub struct WrittenModel {
    /// Name of the architecture.
    pub architecture: &'static str,
    /// Size of the file.
    pub bytes: u64,
    /// By format.
    pub fidelity: Vec<Fidelity>,
    /// Where llama.cpp computes something else.
    pub warnings: Vec<String>,
}

/// A warning if matrices of a file with a K format have another one, because their rows are no multiple of its blocks.
fn without_k_format(file_type: FileType, entries: &[TensorEntry]) -> Option<String> {
    if !matches!(file_type, FileType::Q6 | FileType::Q4Mix) {
        return None;
    }
    let matrices = entries.iter().filter(|entry| entry.block != BlockType::F32);
    let all = matrices.clone().count();
    let others = matrices.filter(|entry| !matches!(entry.block, BlockType::Q6K | BlockType::Q4K));
    let others = others.count();
    (others > 0).then(|| {
        format!(
            "{others} of {all} matrices have rows that are no multiple of 256 elements: they are q8_0 or f16, so the file is \
             larger than others of {}",
            file_type.name()
        )
    })
}

/// Writes the model in `dir` to `out`, and reads the header of the file again.
///
/// # Errors
/// A family, an option or a pre-tokenizer that llama.cpp does not have, or a reward model (`Unsupported`); a weight that is
/// missing, not of this model, not finite, or too large for f16; a file that cannot be written.
pub fn model(file: &ModelFile<'_>, out: &Path) -> Result<WrittenModel> {
    let config = Config::load(file.dir)?;
    let spec = families::read(&config)?;
    let arch = arch::of(&spec)?;
    let weights = Weights::open(file.dir)?;
    // A tied reward model has all parameters of a language model.
    if weights.info(hf::SCORE).is_some() {
        return Err(Error::unsupported("a reward model returns scores, not text")
            .at_path(file.dir)
            .found(format!("`{}` in the weights", hf::SCORE))
            .expected("a language model")
            .hint("give the model from which it was trained"));
    }
    // A weight that the file would not have is an error, as in training.
    resident::check_names(&spec.params(), &weights)?;
    let tokenizer = Tokenizer::load(file.dir)?;
    let template = ChatTemplate::from_dir(file.dir, &tokenizer)?;
    let vocabulary = tokenizer.vocabulary(spec.vocab)?;
    let (query_factor, attention_scale) = scales(&spec, &arch)?;
    let (of_model, factors) = keys::of_model(&spec, &config, &arch, attention_scale)?;
    let template = template.as_ref().map(ChatTemplate::source);
    let (of_vocabulary, mut warnings) = keys::of_vocabulary(&vocabulary, &tokenizer, file.pre_tokenizer, template)?;
    warnings.extend(differences(&spec, &arch));
    let mut all: Vec<(String, MetadataValue)> = vec![
        ("general.architecture".into(), arch.name.into()),
        ("general.type".into(), "model".into()),
        ("general.name".into(), name_of(file.name, &tokenizer).into()),
        ("general.file_type".into(), MetadataValue::U32(file.file_type.code())),
        (
            "general.quantization_version".into(),
            MetadataValue::U32(QUANTIZATION_VERSION),
        ),
    ];
    all.extend(of_model);
    all.extend(of_vocabulary);
    let planned = names::tensors(&spec, &arch, query_factor)
        .map_err(|name| Error::unsupported("a parameter of this model has no name in GGUF files").at(name))?;
    let entry = |name: &str, shape: Vec<usize>, block| TensorEntry {
        name: name.into(),
        shape,
        block,
    };
    let mut entries: Vec<TensorEntry> = factors
        .iter()
        .map(|(name, values)| entry(name, vec![values.len()], BlockType::F32))
        .collect();
    let of_planned = |p: &PlannedTensor| entry(&p.name, p.shape.clone(), file.file_type.of(p, &spec));
    entries.extend(planned.iter().map(of_planned));
    warnings.extend(without_k_format(file.file_type, &entries));
    let by_name: BTreeMap<&str, &PlannedTensor> = planned.iter().map(|p| (p.name.as_str(), p)).collect();
    let mut errors: BTreeMap<BlockType, EncodingErrors> = BTreeMap::new();
    let bytes = gguf::write(out, &all, &entries, |entry, sink| {
        let Some(planned) = by_name.get(entry.name.as_str()) else {
            let values = factors
                .iter()
                .find(|(name, _)| *name == entry.name)
                .map(|(_, values)| values);
            return encode(entry, values.map_or(&[][..], Vec::as_slice), sink).map(drop);
        };
        let of_block = errors.entry(entry.block).or_default();
        for part in &planned.parts {
            each_piece(&weights, part, |mut values| {
                if (planned.factor, planned.plus) != (1.0, 0.0) {
                    values.iter_mut().for_each(|x| *x = planned.factor * *x + planned.plus);
                }
                *of_block = of_block.and(encode(entry, &values, sink)?);
                Ok(())
            })?;
        }
        Ok(())
    })?;
    let read = GgufReader::open(out)?;
    if read.tensors != entries || all.iter().any(|(key, value)| read.keys.get(key) != Some(value)) {
        return Err(Error::internal("the file that was written has another header").at_path(out));
    }
    let one = |(block, errors): (&BlockType, &EncodingErrors)| {
        let own = entries.iter().filter(|entry| entry.block == *block);
        Fidelity {
            block: *block,
            tensors: own.clone().count(),
            bytes: own.map(TensorEntry::bytes).sum(),
            rms: if errors.values > 0.0 {
                (errors.squares / errors.values).sqrt()
            } else {
                0.0
            },
            largest: errors.largest,
        }
    };
    Ok(WrittenModel {
        architecture: arch.name,
        bytes,
        fidelity: errors.iter().map(one).collect(),
        warnings,
    })
}

/// Warnings for the user: where llama.cpp computes something else.
pub(super) fn differences(spec: &Spec, arch: &arch::Arch) -> Vec<String> {
    let mut all = Vec::new();
    let window = spec.layers.iter().filter_map(|layer| layer.window).min();
    if let Some(window) = window.filter(|w| arch.windows == arch::WindowLayout::Ignored && *w < spec.max_positions) {
        all.push(format!(
            "llama.cpp does not apply the sliding window of this model: texts of more than {window} tokens get other answers"
        ));
    }
    if arch.name == "deepseek2" && spec.ropes.iter().any(|rope| rope.yarn.is_some()) {
        all.push("with YaRN some answers of small models of this family differed in llama.cpp: check them".into());
    }
    let long = |rope: &Rope| rope.long.as_ref().is_some_and(|long| long.inv_freq.is_some());
    if spec.ropes.iter().any(long) {
        all.push(
            "llama.cpp takes the long or the short factors of LongRoPE by the size of its context (`-c`), not by the length of the text"
                .into(),
        );
    }
    if spec
        .ropes
        .iter()
        .any(|rope| rope.yarn.is_some_and(|yarn| !yarn.truncate))
    {
        all.push(
            "llama.cpp rounds the limits of YaRN, which this model does not: some frequencies differ a little".into(),
        );
    }
    all
}

/// llama.cpp looks for these tokens if the name says that it is Phi-3, and fails without them.
fn name_of<'a>(name: &'a str, tokenizer: &Tokenizer) -> &'a str {
    let lower = name.to_lowercase();
    let phi = lower.contains("phi-3") || lower.contains("phi3");
    let tokens = ["<unk>", "<s>", "<|endoftext|>"];
    let missing = tokens.iter().any(|token| tokenizer.token_to_id(token).is_none());
    if phi && missing { "model" } else { name }
}

/// The factor with which the queries must be multiplied, and the factor of the scores that the file has.
pub(super) fn scales(spec: &Spec, arch: &arch::Arch) -> Result<(f32, f32)> {
    if arch.name.starts_with("granite") || arch.name == "deepseek2" {
        return Ok((1.0, spec.attention_scale));
    }
    // llama.cpp detects the largest Gemma 2 and 3 by the number of layers.
    let large = matches!((arch.name, spec.layers.len()), ("gemma2", 46) | ("gemma3", 62));
    let size = if large {
        spec.hidden as f32 / spec.heads as f32
    } else {
        spec.head_dim as f32
    };
    let own = 1.0 / size.sqrt();
    let factor = spec.attention_scale / own;
    let factor = if (factor - 1.0).abs() < 1e-6 { 1.0 } else { factor };
    if factor != 1.0 && spec.fused_qkv {
        return Err(
            Error::unsupported("llama.cpp cannot compute this model: another factor of the scores")
                .at(&spec.model_type)
                .found(spec.attention_scale)
                .expected(own),
        );
    }
    Ok((factor, own))
}

/// The values of a part in their order: rows that keep their order are read some at a time.
fn each_piece(weights: &Weights, part: &TensorPart, mut give: impl FnMut(Vec<f32>) -> Result<()>) -> Result<()> {
    let ParamInfo { name, shape, .. } = &part.param;
    let columns = shape.last().copied().unwrap_or(1);
    let dequantized = stored::values(weights, &part.param)?;
    if dequantized.is_some() || part.order != RowOrder::Same {
        let values = match dequantized {
            Some(values) => values,
            None => {
                weights.require(name, shape)?;
                weights.read_f32(name)?
            }
        };
        let columns = if shape.len() == 1 { 1 } else { columns };
        return give(part.order.apply(values, columns));
    }
    let count = weights.require(name, shape)?.count();
    let step = (PIECE / columns).max(1) * columns;
    for first in (0..count).step_by(step) {
        let mut values = vec![0.0; step.min(count - first)];
        weights.read_f32_at(name, first, &mut values)?;
        give(values)?;
    }
    Ok(())
}

/// Passes the encoded values to the sink, and measures what encoding lost.
///
/// Errors: a value that is not finite, or too large for the format.
pub(super) fn encode(
    entry: &TensorEntry,
    values: &[f32],
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<EncodingErrors> {
    let block = entry.block;
    let one = |share: &[f32]| {
        let mut bytes = Vec::with_capacity(block.bytes(share.len()) as usize);
        let errors = block.encode_measured(share, &mut bytes);
        (bytes, errors)
    };
    let mut sum = EncodingErrors::default();
    for piece in values.chunks(PIECE) {
        let shares: Vec<(Vec<u8>, EncodingErrors)> = piece.par_chunks(SHARE).map(one).collect();
        for (bytes, errors) in shares {
            if !errors.values.is_finite() {
                return Err(Error::non_finite("a weight is not finite").at(&entry.name));
            }
            if !errors.squares.is_finite() {
                return Err(Error::argument("a weight is too large for this format")
                    .at(&entry.name)
                    .found(block)
                    .hint("use bf16 or f32"));
            }
            sink(&bytes)?;
            sum = sum.and(errors);
        }
    }
    Ok(sum)
}
