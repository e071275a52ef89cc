//! The weights of a model directory or of one file: names, shapes, and tensors that are read on demand.
//!
//! All metadata is checked at open (see `header` and `index`). Tensors are then read with positioned reads in pieces
//! and converted directly into the target: no raw copy of a whole tensor, and no memory map, which a shrinking file
//! could turn into a crash.

use crate::config::quantization;
use crate::dtype::StoredDtype;
use crate::joined::{JoinedLayout, JoinedView};
use crate::{header, index, nearest};
use ft_base::{Error, Result, stalled};
use half::{bf16, f16};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes per read; the system caches this much of a file at once.
const PIECE: usize = 4 << 20;

/// Location of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Name of the tensor.
    pub name: String,
    /// Number format in the file.
    pub dtype: StoredDtype,
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// Index into `Weights::files`.
    pub file: usize,
    /// First byte in that file.
    pub offset: u64,
    /// Stored bytes.
    pub bytes: u64,
    /// `None`: its elements follow each other in the file.
    pub view: Option<JoinedView>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Element types that weights are converted to.
trait Number: Copy {
    fn of_f32(x: f32) -> Self;
    fn of_bf16(x: bf16) -> Self;
    fn of_f64(x: f64) -> Self;
}

impl Number for f32 {
    fn of_f32(x: f32) -> Self {
        x
    }
    fn of_bf16(x: bf16) -> Self {
        x.to_f32()
    }
    fn of_f64(x: f64) -> Self {
        x as f32
    }
}

impl Number for bf16 {
    fn of_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn of_bf16(x: bf16) -> Self {
        x
    }
    fn of_f64(x: f64) -> Self {
        bf16::from_f64(x)
    }
}

impl Number for f16 {
    fn of_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn of_bf16(x: bf16) -> Self {
        f16::from_f32(x.to_f32())
    }
    fn of_f64(x: f64) -> Self {
        f16::from_f64(x)
    }
}

/// Converts stored bytes of a weight format to as many elements as `out` has.
fn decode<T: Number>(dtype: StoredDtype, raw: &[u8], out: &mut [T]) {
    fn each<T, const N: usize>(raw: &[u8], out: &mut [T], f: impl Fn([u8; N]) -> T) {
        for (to, from) in out.iter_mut().zip(raw.as_chunks::<N>().0) {
            *to = f(*from);
        }
    }
    match dtype {
        StoredDtype::F32 => each(raw, out, |b| T::of_f32(f32::from_le_bytes(b))),
        StoredDtype::F16 => each(raw, out, |b| T::of_f32(f16::from_le_bytes(b).to_f32())),
        StoredDtype::Bf16 => each(raw, out, |b| T::of_bf16(bf16::from_le_bytes(b))),
        _ => each(raw, out, |b| T::of_f64(f64::from_le_bytes(b))),
    }
}

/// Prefixes of the language model and of its head in a multimodal checkpoint, of transformers 5 and of transformers 4.
pub(crate) const LANGUAGE_MODEL: [[&str; 2]; 2] = [
    ["model.language_model.", "lm_head."],
    ["language_model.model.", "language_model.lm_head."],
];
/// The same prefixes in a text-only checkpoint.
pub(crate) const TEXT_ONLY: [&str; 2] = ["model.", "lm_head."];
/// Prefixes of the other parts of a multimodal checkpoint, and of the layers for multi-token prediction.
const OTHER_PARTS: [&str; 10] = [
    "mtp.",
    "visual.",
    "model.visual.",
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
];

/// All tensors of one or several safetensors files.
#[derive(Debug)]
pub struct Weights {
    place: PathBuf,
    paths: Vec<PathBuf>,
    handles: Vec<File>,
    /// Data that is read in parts stays in the page cache.
    stays_cached: bool,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: HashMap<String, String>,
    /// By the stored name of the tensor.
    patches: BTreeMap<String, Patch>,
    /// Of tensors in several files, by name.
    pieces: BTreeMap<String, Vec<FilePiece>>,
    /// The pair of `TEXT_ONLY` that fits these files: the prefix of the language model here, and in a text-only model.
    prefixes: [&'static str; 2],
    /// Tensors of a multimodal checkpoint outside its language model, and of layers for multi-token prediction.
    other_parts: Vec<TensorInfo>,
    /// Where the weights of experts are, if several share a tensor.
    joined: Option<&'static JoinedLayout>,
    quantization: Option<Map<String, Value>>,
}

impl Weights {
    /// Opens `model.safetensors` of a directory, or its index and all shards.
    ///
    /// # Errors
    /// Missing, damaged or ambiguous files, or links elsewhere; pickles and Git LFS pointers by name.
    pub fn open(dir: &Path) -> Result<Self> {
        let shards = index::find(dir)?;
        let mut out = Self::open_all(dir, shards.files)?;
        // A config that cannot be read is reported where it is needed.
        let config = crate::read_json_object(&dir.join("config.json")).unwrap_or_default();
        out.quantization = quantization(&config).and_then(Value::as_object).cloned();
        if let Some(map) = shards.map {
            out.agrees_with(&map, &dir.join(index::INDEX))?;
        }
        Ok(out.language_model().without_prediction(&config).single_experts(&config))
    }

    /// Sets the layers for multi-token prediction of DeepSeek and GLM aside: `num_nextn_predict_layers` layers after the last.
    fn without_prediction(mut self, config: &Map<String, Value>) -> Self {
        let number = |key: &str| config.get(key).and_then(Value::as_u64);
        let (Some(layers), Some(more @ 1..)) = (number("num_hidden_layers"), number("num_nextn_predict_layers")) else {
            return self;
        };
        let after = layers..layers.saturating_add(more);
        let predicts = |name: &str| {
            let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            layer
                .and_then(|(layer, _)| layer.parse().ok())
                .is_some_and(|layer: u64| after.contains(&layer))
        };
        let (others, tensors) = std::mem::take(&mut self.tensors)
            .into_iter()
            .partition(|(name, _): &(String, TensorInfo)| predicts(name));
        let others: BTreeMap<String, TensorInfo> = others;
        self.other_parts.extend(others.into_values());
        self.tensors = tensors;
        self
    }

    /// Gives the tensors of a multimodal checkpoint the names of a text-only one; `TensorInfo::name` stays the stored
    /// name. Sets the tensors of other parts aside.
    fn language_model(mut self) -> Self {
        let is_other = |name: &str| OTHER_PARTS.iter().any(|prefix| name.starts_with(prefix));
        let all = std::mem::take(&mut self.tensors);
        let wrapped = |[prefix, _]: &[&str; 2]| all.keys().any(|name| name.starts_with(prefix));
        self.prefixes = LANGUAGE_MODEL.into_iter().find(wrapped).unwrap_or(TEXT_ONLY);
        for (name, info) in all {
            if is_other(&name) {
                self.other_parts.push(info);
                continue;
            }
            let mut pairs = self.prefixes.iter().zip(TEXT_ONLY);
            let renamed = pairs.find_map(|(prefix, text)| Some(format!("{text}{}", name.strip_prefix(prefix)?)));
            self.tensors.insert(renamed.unwrap_or(name), info);
        }
        self
    }

    /// The name in these files of a tensor with this name in a text-only checkpoint.
    pub fn stored_name(&self, name: &str) -> String {
        let mut pairs = self.prefixes.iter().zip(TEXT_ONLY);
        let stored = pairs.find_map(|(prefix, text)| Some(format!("{prefix}{}", name.strip_prefix(text)?)));
        stored.unwrap_or_else(|| name.to_string())
    }

    /// The tensors of a multimodal checkpoint outside its language model, and of layers for multi-token prediction.
    pub fn other_parts(&self) -> &[TensorInfo] {
        &self.other_parts
    }

    /// These files with `other_parts` as the only tensors, under their stored names.
    #[must_use]
    pub fn into_other_parts(mut self) -> Self {
        let others = std::mem::take(&mut self.other_parts);
        self.tensors = others.into_iter().map(|info| (info.name.clone(), info)).collect();
        (self.prefixes, self.joined) = (TEXT_ONLY, None);
        self
    }

    /// The stored bytes of one of `other_parts`.
    ///
    /// # Errors
    /// A failed read (`Io`).
    pub fn read_other(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(info.bytes as usize);
        self.pieces(info, |piece| out.extend_from_slice(piece))?;
        Ok(out)
    }

    /// `quantization_config` of the `config.json` beside the files.
    pub fn quantization(&self) -> Option<&Map<String, Value>> {
        self.quantization.as_ref()
    }

    /// Opens one safetensors file (an adapter, a training state).
    ///
    /// # Errors
    /// As for `open`.
    pub fn open_file(path: &Path) -> Result<Self> {
        let extension = path
            .extension()
            .map(|e| e.to_string_lossy().to_lowercase())
            .unwrap_or_default();
        if ["bin", "pt", "pth", "ckpt", "pkl"].contains(&extension.as_str()) {
            return Err(header::pickle(path));
        }
        index::stays_inside(path)?;
        Self::open_all(path, vec![path.to_path_buf()])
    }

    fn open_all(place: &Path, paths: Vec<PathBuf>) -> Result<Self> {
        let mut tensors: BTreeMap<String, TensorInfo> = BTreeMap::new();
        let mut metadata = HashMap::new();
        let mut handles = Vec::with_capacity(paths.len());
        for (i, path) in paths.iter().enumerate() {
            let (handle, header) = header::open(path)?;
            handles.push(handle);
            metadata.extend(header.metadata);
            for e in header.entries {
                if let Some(first) = tensors.get(&e.name) {
                    return Err(Error::format(format!("tensor `{}` is in two shards", e.name))
                        .at_path(path)
                        .found(format!("also in {}", paths[first.file].display()))
                        .hint("the shards belong to different versions: download the weights again"));
                }
                let info = TensorInfo {
                    name: e.name.clone(),
                    dtype: e.dtype,
                    shape: e.shape,
                    file: i,
                    offset: e.offset,
                    bytes: e.bytes,
                    view: None,
                };
                tensors.insert(e.name, info);
            }
        }
        Ok(Self {
            place: place.to_path_buf(),
            paths,
            handles,
            stays_cached: false,
            tensors,
            metadata,
            patches: BTreeMap::new(),
            pieces: BTreeMap::new(),
            prefixes: TEXT_ONLY,
            other_parts: Vec::new(),
            joined: None,
            quantization: None,
        })
    }

    /// Checks that the index and the shards are consistent.
    fn agrees_with(&self, map: &BTreeMap<String, String>, index: &Path) -> Result<()> {
        let disagree = |what: String| {
            Error::format(what)
                .at_path(index)
                .hint("index and shards are from different versions: download both again")
        };
        for (name, file) in map {
            let Some(info) = self.tensors.get(name) else {
                return Err(disagree(format!("tensor `{name}` is in the index but not in `{file}`")));
            };
            let real = self.paths[info.file].file_name().unwrap_or_default();
            if real != file.as_str() {
                return Err(
                    disagree(format!("tensor `{name}` is not in the shard that the index names"))
                        .found(format!("`{}`", real.to_string_lossy()))
                        .expected(format!("`{file}`")),
                );
            }
        }
        match self.tensors.values().find(|t| !map.contains_key(&t.name)) {
            Some(t) => Err(disagree(format!("tensor `{}` is not in the index", t.name))
                .found(format!("it in `{}`", self.paths[t.file].display()))),
            None => Ok(()),
        }
    }

    /// Tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor with this name, if there is one.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Makes tensor `of` readable under another name too. Returns true if it exists.
    pub fn alias(&mut self, name: &str, of: &str) -> bool {
        let info = self.tensors.get(of).cloned();
        let found = info.is_some();
        self.tensors.extend(info.map(|info| (name.to_string(), info)));
        found
    }

    /// Without the tensors `without`, and with those of `other` in place of tensors of the same names.
    #[must_use]
    pub fn with_tensors_of(mut self, other: Self, without: &[String]) -> Self {
        without.iter().for_each(|name| drop(self.tensors.remove(name)));
        let before = self.paths.len();
        self.paths.extend(other.paths);
        self.handles.extend(other.handles);
        self.tensors.extend(other.tensors.into_iter().map(|(name, info)| {
            let file = before + info.file;
            (name, TensorInfo { file, ..info })
        }));
        self
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// True if there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The tensor `name`, which must have this shape and be stored as f64, f32, f16 or bf16.
    ///
    /// # Errors
    /// No such tensor (`Format`); another shape (`Shape`); a number format that is not a weight (`Format`).
    pub fn require(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo> {
        let info = self.must(name)?;
        if info.shape != shape {
            return Err(Error::shape(format!("tensor `{name}` has the wrong shape"))
                .at_path(&self.paths[info.file])
                .found(format!("{:?}", info.shape))
                .expected(format!("{shape:?}"))
                .hint("`config.json` and the weights are not from the same model"));
        }
        self.readable(info)?;
        Ok(info)
    }

    fn must(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).ok_or_else(|| {
            let near = nearest(name, self.names());
            let error = Error::format(format!("tensor `{name}` is missing")).at_path(&self.place);
            if near.is_empty() {
                error.found(format!("{} tensors of other names", self.tensors.len()))
            } else {
                error.hint(format!("nearest names: {}", near.join(", ")))
            }
        })
    }

    fn readable(&self, info: &TensorInfo) -> Result<()> {
        if info.dtype.is_weight() {
            return Ok(());
        }
        let error = Error::format(format!("tensor `{}` cannot be read as weights", info.name))
            .at_path(&self.paths[info.file])
            .found(info.dtype)
            .expected("F32, F16, BF16 or F64");
        Err(if info.dtype.size() == 1 {
            error.hint("these weights are quantized: use the model's unquantized weights")
        } else {
            error
        })
    }

    /// All elements of a tensor as f32, in row-major order.
    ///
    /// # Errors
    /// No such tensor, or a number format that is not a weight (`Format`); a failed read (`Io`).
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        self.read_whole(name)
    }

    /// All elements of a tensor as bf16 (rounded to nearest, ties to even), in row-major order.
    ///
    /// # Errors
    /// As for `read_f32`.
    pub fn read_bf16(&self, name: &str) -> Result<Vec<bf16>> {
        self.read_whole(name)
    }

    /// All elements of a tensor as f16 (rounded to nearest, ties to even; infinite if f16 cannot hold them), in row-major
    /// order.
    ///
    /// # Errors
    /// As for `read_f32`.
    pub fn read_f16(&self, name: &str) -> Result<Vec<f16>> {
        self.read_whole(name)
    }

    /// The stored bytes of a tensor of any number format.
    ///
    /// # Errors
    /// No such tensor (`Format`); a failed read (`Io`).
    pub fn read_bytes(&self, name: &str) -> Result<Vec<u8>> {
        self.read_other(self.must(name)?)
    }

    fn read_whole<T: Number>(&self, name: &str) -> Result<Vec<T>> {
        let info = self.must(name)?;
        self.readable(info)?;
        let mut out = vec![T::of_f32(0.0); info.count()];
        let mut at = 0;
        self.pieces(info, |piece| {
            let n = piece.len() / info.dtype.size();
            decode(info.dtype, piece, &mut out[at..at + n]);
            at += n;
        })?;
        Ok(out)
    }

    /// Passes the bytes of a tensor to `f` in pieces; a piece contains whole elements.
    fn pieces(&self, info: &TensorInfo, mut f: impl FnMut(&[u8])) -> Result<()> {
        let mut buffer = vec![0u8; PIECE.min(info.bytes as usize)];
        let mut at = 0u64;
        while at < info.bytes {
            let n = (info.bytes - at).min(PIECE as u64) as usize;
            let piece = &mut buffer[..n];
            self.read_exact(info, at, piece)?;
            f(piece);
            at += n as u64;
        }
        Ok(())
    }

    /// Reads bytes of a tensor, starting at its byte `at`.
    fn read_exact(&self, info: &TensorInfo, at: u64, out: &mut [u8]) -> Result<()> {
        let failed = |file: usize, e: std::io::Error| {
            let error = Error::io(format!("cannot read tensor `{}`", info.name))
                .at_path(&self.paths[file])
                .cause(&e);
            match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    error.hint("the file became shorter while it was read: another program is writing to it")
                }
                _ => error,
            }
        };
        if let Some(runs) = self.runs(info, at, out.len()) {
            let mut rest = out;
            for run in runs {
                let (part, after) = rest.split_at_mut(run.bytes);
                let file = &self.handles[run.file];
                let read = stalled::reading(&self.paths[run.file], run.bytes, || {
                    file.read_exact_at(part, run.offset)
                });
                read.map_err(|e| failed(run.file, e))?;
                rest = after;
            }
            return Ok(());
        }
        let stored = self.stored_part(info, at, out.len());
        let part = &mut out[..stored];
        let read = stalled::reading(&self.paths[info.file], stored, || self.read_part(info, at, part));
        read.map_err(|e| failed(info.file, e))?;
        self.patch(info, at, out);
        Ok(())
    }

    /// Merged metadata of all files.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Total stored bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.bytes).sum()
    }

    /// The files, in order.
    pub fn files(&self) -> &[PathBuf] {
        &self.paths
    }
}

mod pieces;
mod rows;
mod stream;
mod views;
use pieces::FilePiece;
pub use pieces::piece_name;
use rows::Patch;

#[cfg(test)]
mod tests;
