//! Fingerprint of the weights in a directory: a hash of all values, for resumed runs and for adapters.
//!
//! A `Fingerprint` has three hashes. `exact` covers every stored byte of every parameter; resumed runs compare it.
//! `weights` covers every value as bf16, so that f32 and bf16 copies are equal; adapters store it. `sampled` covers 64
//! values per tensor; older runs and adapters have only this one and are compared by it.
//!
//! Hashing a large model takes a while, so the result is stored in ft's cache, keyed by the file paths and the model's
//! computation. It is valid while size, inode and change times of every file are unchanged.

use crate::base::{Error, Result, cache, files, stalled};
use crate::formats::StoredDtype;
use crate::formats::adapter;
use crate::formats::config::Config;
use crate::formats::weights::{TensorInfo, Weights};
use crate::model::spec::{KeySource, Mixer};
use crate::model::{Spec, families};
use crate::ops::routing::RouterSpec;
use crate::source::stored::{self, StoredNumbers};
use half::{bf16, f16};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Keys in the metadata of `adapter_model.safetensors`.
pub(super) const SAMPLED: &str = "ft_base_fingerprint";
pub(super) const WEIGHTS: &str = "ft_base_weights";

/// Values hashed at a time.
const PIECE: usize = 1 << 20;
/// For `sampled`: positions per tensor.
const PLACES: usize = 4;
/// For `sampled`: values per position.
const NUMBERS: usize = 16;
/// Smaller models are always hashed: that is as fast as a cache lookup.
const WORTH_KEEPING: u64 = 64 << 20;

/// The format of a cached fingerprint. That of earlier versions (`ft weights 1`) does not say that the numbers of quantized
/// weights are finite.
const CACHED: &str = "ft weights 2";

/// Identifies a base model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// Hash of every byte of the weights.
    pub exact: String,
    /// Hash of the values of all weights.
    pub weights: String,
    /// Hash of a sample of the values.
    pub sampled: String,
}

/// The base model named in an adapter's file; unknown hashes are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BaseHashes {
    /// As `Fingerprint::weights`.
    pub weights: String,
    /// As `Fingerprint::sampled`.
    pub sampled: String,
}

impl Fingerprint {
    /// The part of the fingerprint that an adapter stores.
    pub fn base(&self) -> BaseHashes {
        BaseHashes {
            weights: self.weights.clone(),
            sampled: self.sampled.clone(),
        }
    }
}

impl BaseHashes {
    /// True if both may be the same weights: compares `weights` if both have it, else `sampled` if both have it.
    pub fn agrees(&self, other: &BaseHashes) -> bool {
        let both = |a: &str, b: &str| !a.is_empty() && !b.is_empty();
        if both(&self.weights, &other.weights) {
            return self.weights == other.weights;
        }
        !both(&self.sampled, &other.sampled) || self.sampled == other.sampled
    }

    /// The hash to show.
    pub fn name(&self) -> &str {
        if self.weights.is_empty() {
            &self.sampled
        } else {
            &self.weights
        }
    }
}

/// Computes the fingerprint of the base model in `dir`: hashes of the computation that the config defines (not of its
/// text), and of name, shape and values of every parameter.
///
/// # Errors
/// An unsupported model; a parameter is missing, has another shape, or contains a non-finite value; a file cannot be
/// read.
pub fn fingerprint(dir: &Path) -> Result<Fingerprint> {
    let spec = families::read(&Config::load(dir)?)?;
    of(&spec, &Weights::open(dir)?)
}

/// As `fingerprint`, for a model that is already open.
///
/// # Errors
/// As for `fingerprint`.
pub fn of(spec: &Spec, weights: &Weights) -> Result<Fingerprint> {
    let before = FileMetadata::look(weights);
    let kept = before.as_ref().filter(|_| weights.total_bytes() >= WORTH_KEEPING);
    let name = kept.map(|files| files.name(spec));
    if let (Some(files), Some(name)) = (kept, &name)
        && let Some(found) = cache::read(name).and_then(|text| files.found(&text))
    {
        return Ok(found);
    }
    let out = compute(spec, weights)?;
    if let (Some(files), Some(name)) = (kept, &name)
        && files.is_settled()
        && FileMetadata::look(weights).as_ref() == Some(files)
    {
        cache::write(name, &files.text(&out));
    }
    Ok(out)
}

/// Bytes to hash: values of a parameter, or a part of its quantized data.
struct HashJob<'a> {
    info: &'a TensorInfo,
    /// Number format of the values; `None`: raw bytes.
    dtype: Option<StoredDtype>,
    /// The numbers in the bytes that have to be finite.
    numbers: Option<StoredNumbers>,
    first: usize,
    count: usize,
}

fn compute(spec: &Spec, weights: &Weights) -> Result<Fingerprint> {
    let handles: Vec<File> = weights.files().iter().map(|p| files::open(p)).collect::<Result<_>>()?;
    // Reads the values in the file, also if rows of the tensor are replaced in memory.
    let read = |info: &TensorInfo, at: u64, out: &mut [u8]| match info.view {
        None => {
            let path = &weights.files()[info.file];
            stalled::reading(path, out.len(), || {
                handles[info.file].read_exact_at(out, info.offset + at)
            })
        }
        Some(_) => weights.read_part(info, at, out),
    };
    let params = spec.params();
    let mut jobs: Vec<HashJob> = Vec::new();
    let mut split = |info, dtype: Option<StoredDtype>, numbers: Option<StoredNumbers>, total: usize| {
        for first in (0..total.max(1)).step_by(PIECE) {
            let count = PIECE.min(total - first);
            jobs.push(HashJob {
                info,
                dtype,
                numbers,
                first,
                count,
            });
        }
    };
    let mut sampled = Texts::new("ft base 1", spec);
    // Per parameter: the text that is hashed beside its values, and its number of jobs.
    let mut parts: Vec<(String, usize)> = Vec::new();
    for p in &params {
        if let (Some((layout, format)), &[rows, columns]) = (stored::find(weights, &p.name)?, p.shape.as_slice()) {
            // Quantized data has no float values: its scales are hashed instead for `sampled`.
            let head = format!("{} {:?} {}", p.name, p.shape, format.tag());
            sampled.put(&head);
            let base = p.name.strip_suffix(".weight").unwrap_or(&p.name);
            let own = ["scales", "absmax"].map(|part| format!("{}.{part}", p.name));
            let others = ["scales", "weight_scale", "weight_scale_inv", "SCB"].map(|part| format!("{base}.{part}"));
            let scales = [&own[..], &others].concat();
            if let Some(scales) = scales.iter().find(|n| weights.info(n).is_some()) {
                sampled.put(&blake3::hash(&weights.read_bytes(scales)?).to_hex());
            }
            for part in stored::names(weights, layout, format, &p.name, (rows, columns)) {
                let info = weights.info(&part).ok_or_else(|| {
                    Error::not_found(format!("tensor `{part}` is missing")).at_path(&weights.files()[0])
                })?;
                let numbers = StoredNumbers::of(layout, format, &p.name, (part.as_str(), info.dtype));
                split(info, None, numbers, info.bytes as usize);
                parts.push((format!("{head} {part}"), (info.bytes as usize).max(1).div_ceil(PIECE)));
            }
            continue;
        }
        let info = weights.require(&p.name, &p.shape)?;
        let head = format!("{:?}", p.shape);
        let numbers = sample(&read, info).map_err(|e| unreadable(weights, info, e))?;
        sampled.put(&p.name);
        sampled.put(&head);
        sampled.put(
            &numbers
                .iter()
                .map(|x| format!("{:04x}", x.to_bits()))
                .collect::<String>(),
        );
        let numbers = StoredNumbers::Plain(info.dtype);
        split(info, Some(info.dtype), Some(numbers), info.count());
        parts.push((format!("{} {head}", p.name), info.count().max(1).div_ceil(PIECE)));
    }
    let hash = |(raw, rounded): &mut (Vec<u8>, Vec<u8>), job: &HashJob| -> Result<([u8; 32], [u8; 32])> {
        let size = job.dtype.map_or(1, StoredDtype::size);
        raw.resize(job.count * size, 0);
        read(job.info, (job.first * size) as u64, raw).map_err(|e| unreadable(weights, job.info, e))?;
        let exact = *blake3::hash(raw).as_bytes();
        if let Some(numbers) = job.numbers
            && let Some(at) = numbers.not_finite(raw)
        {
            let value = numbers.value(raw, at);
            let what = if value.is_finite() {
                "a scale whose products with the codes are not finite"
            } else {
                "a value that is not finite"
            };
            // Quantized data is counted in bytes: its pieces hold whole numbers.
            let before = job.first * size / numbers.size();
            return Err(Error::non_finite(format!("tensor `{}` has {what}", job.info.name))
                .at_path(&weights.files()[job.info.file])
                .found(format!("{value} as number {}", before + at))
                .hint("the file is corrupt, or the training that saved it diverged: download the model again"));
        }
        let Some(dtype) = job.dtype else {
            return Ok((exact, exact));
        };
        if dtype == StoredDtype::Bf16 {
            return Ok((exact, exact));
        }
        rounded.clear();
        rounded.extend(raw.chunks_exact(size).flat_map(|b| number(dtype, b).to_le_bytes()));
        Ok((exact, *blake3::hash(rounded).as_bytes()))
    };
    let found: Vec<Result<_>> = jobs.par_iter().map_init(Default::default, hash).collect();
    let mut found = found.into_iter();
    let (mut exact, mut whole) = (Texts::new("ft base 2 exact", spec), Texts::new("ft base 2", spec));
    for (head, pieces) in parts {
        exact.put(&head);
        whole.put(&head);
        for _ in 0..pieces {
            let Some(piece) = found.next() else { break };
            let (a, b) = piece?;
            exact.0.update(&a);
            whole.0.update(&b);
        }
    }
    Ok(Fingerprint {
        exact: exact.name("blake3-exact"),
        weights: whole.name("blake3-all"),
        sampled: sampled.name("blake3"),
    })
}

fn unreadable(weights: &Weights, info: &TensorInfo, e: std::io::Error) -> Error {
    Error::io(format!("cannot read tensor `{}`", info.name))
        .at_path(&weights.files()[info.file])
        .cause(e)
}

/// A hash of several texts, each with its length.
struct Texts(blake3::Hasher);

impl Texts {
    fn new(first: &str, spec: &Spec) -> Self {
        let mut out = Self(blake3::Hasher::new());
        out.put(first);
        out.put(&computes(spec));
        out
    }

    fn put(&mut self, text: &str) {
        self.0.update(&(text.len() as u64).to_le_bytes());
        self.0.update(text.as_bytes());
    }

    fn name(&self, kind: &str) -> String {
        format!("{kind}:{}", self.0.finalize().to_hex())
    }
}

/// The parts of the computation that shapes do not define. Written by hand: a new field of `Spec` must not change the
/// fingerprint of every base model.
fn computes(s: &Spec) -> String {
    let mut out = format!(
        "{} heads {} kv {} eps {:?} plus_one {} activation {:?} scale {:?} softcaps {:?} {:?} embedding {:?} tied {}",
        s.model_type,
        s.heads,
        s.kv_heads,
        s.norm_eps,
        s.norm_plus_one,
        s.activation,
        s.attention_scale,
        s.attention_softcap,
        s.logit_softcap,
        s.embedding_scale,
        s.tied,
    );
    if (s.logit_scale, s.residual_scale) != (1.0, 1.0) {
        out.push_str(&format!(" logits {:?} residual {:?}", s.logit_scale, s.residual_scale));
    }
    if s.attention_sinks {
        out.push_str(" sinks");
    }
    if let Some(unit) = s.clamped_glu {
        out.push_str(&format!(" {unit:?}"));
    }
    if let Some(params) = s.layer_norm {
        out.push_str(&format!(" layer_norm {params:?}"));
    }
    if s.parallel {
        out.push_str(" parallel");
    }
    for layer in &s.layers {
        out.push_str(&format!(" layer {:?} {}", layer.window, layer.rope));
        match layer.mixer {
            Mixer::Attention => {}
            Mixer::ShortConv { kernel, bias } => {
                let bias = if bias { " bias" } else { "" };
                out.push_str(&format!(" ShortConv {{ kernel: {kernel} }}{bias}"));
            }
            other => out.push_str(&format!(" {other:?}")),
        }
        if layer.keys != KeySource::Own {
            out.push_str(&format!(" keys {:?}", layer.keys));
        }
        if let Some(experts) = &layer.experts {
            let RouterSpec {
                score,
                top_k,
                renormalize,
                scale,
                groups,
            } = experts.router;
            out.push_str(&format!(" router {score:?} {top_k} {renormalize} {scale:?} {groups:?}"));
        }
    }
    if let Some(streams) = s.streams {
        let sparse = s.layers.iter().map(|l| l.sparsity);
        out.push_str(&format!(" {streams:?} sparsity {:?}", sparse.collect::<Vec<_>>()));
    }
    if s.output_gate {
        out.push_str(" gate");
    }
    for rope in &s.ropes {
        // The last bits of powers may differ between machines.
        let frequencies: Vec<String> = rope.inv_freq.iter().map(|f| format!("{f:.3e}")).collect();
        out.push_str(&format!(
            " rope {:.3e} {}",
            rope.attention_factor,
            frequencies.join(" ")
        ));
    }
    out
}

/// Reads stored bytes of a tensor.
type ReadPart<'a> = dyn Fn(&TensorInfo, u64, &mut [u8]) -> std::io::Result<()> + 'a;

/// Values at evenly spaced positions, including the first and the last ones.
fn sample(read: &ReadPart, info: &TensorInfo) -> std::io::Result<Vec<bf16>> {
    let (count, size) = (info.count(), info.dtype.size());
    let n = NUMBERS.min(count);
    let mut out = Vec::with_capacity(PLACES * n);
    let mut bytes = vec![0u8; n * size];
    for place in 0..PLACES {
        let first = (count - n) / (PLACES - 1) * place;
        let first = if place + 1 == PLACES { count - n } else { first };
        read(info, (first * size) as u64, &mut bytes)?;
        out.extend(bytes.chunks_exact(size).map(|b| number(info.dtype, b)));
    }
    Ok(out)
}

fn number(dtype: StoredDtype, b: &[u8]) -> bf16 {
    match (dtype, b) {
        (StoredDtype::F32, &[a, b, c, d]) => bf16::from_f32(f32::from_le_bytes([a, b, c, d])),
        (StoredDtype::F16, &[a, b]) => bf16::from_f32(f16::from_le_bytes([a, b]).to_f32()),
        (StoredDtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]),
        (_, &[a, b, c, d, e, f, g, h]) => bf16::from_f64(f64::from_le_bytes([a, b, c, d, e, f, g, h])),
        _ => bf16::ZERO,
    }
}

/// Metadata of the weight files from the file system.
#[derive(Debug, PartialEq)]
struct FileMetadata(Vec<Value>);

impl FileMetadata {
    fn look(weights: &Weights) -> Option<Self> {
        let time = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
        let one = |path: &std::path::PathBuf| {
            let path = path.canonicalize().ok()?;
            let m = path.metadata().ok()?;
            // A program cannot set the second time (ctime): it changes whenever the file is written.
            let times = [time(m.mtime(), m.mtime_nsec()), time(m.ctime(), m.ctime_nsec())];
            Some(json!([path.to_str()?, m.len(), m.ino(), times[0], times[1]]))
        };
        weights.files().iter().map(one).collect::<Option<_>>().map(Self)
    }

    /// True if all files are older than 2 s. A later change of a newer file could have the same timestamp.
    fn is_settled(&self) -> bool {
        let newest = self.0.iter().filter_map(|f| f[4].as_i64()).max().unwrap_or(i64::MAX);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(newest).is_ok_and(|t| Duration::from_nanos(t) + Duration::from_secs(2) < now)
    }

    fn name(&self, spec: &Spec) -> String {
        let mut texts = Texts::new("ft weights", spec);
        for p in spec.params() {
            texts.put(&format!("{} {:?}", p.name, p.shape));
        }
        self.0.iter().for_each(|f| texts.put(f[0].as_str().unwrap_or_default()));
        format!("weights-{}.json", &texts.0.finalize().to_hex()[..32])
    }

    fn text(&self, found: &Fingerprint) -> String {
        let body = json!([self.0, found.exact, found.weights, found.sampled]);
        let seal = blake3::hash(body.to_string().as_bytes()).to_hex().to_string();
        format!("{:#}\n", json!({"format": CACHED, "seal": seal, "weights": body}))
    }

    /// The cached fingerprint, if it is intact and belongs to exactly these files.
    fn found(&self, text: &str) -> Option<Fingerprint> {
        let value: Value = serde_json::from_str(text).ok()?;
        let body = &value["weights"];
        let seal = blake3::hash(body.to_string().as_bytes()).to_hex().to_string();
        let same = body[0].as_array().is_some_and(|files| *files == self.0);
        if value["format"] != CACHED || value["seal"] != seal.as_str() || !same {
            return None;
        }
        let text = |i: usize| body[i].as_str().map(str::to_string);
        Some(Fingerprint {
            exact: text(1)?,
            weights: text(2)?,
            sampled: text(3)?,
        })
    }
}

/// The base model named in an adapter's file.
pub fn base_of(weights: &Weights) -> Option<BaseHashes> {
    let text = |key: &str| weights.metadata().get(key).cloned().unwrap_or_default();
    let base = BaseHashes {
        weights: text(WEIGHTS),
        sampled: text(SAMPLED),
    };
    (base != BaseHashes::default()).then_some(base)
}

/// Checks that the adapter in `dir` was trained on this base model. Adapters without a fingerprint pass.
///
/// # Errors
/// The adapter was trained on another base model.
pub fn check_base(dir: &Path, base: &BaseHashes) -> Result<()> {
    let path = dir.join(adapter::WEIGHTS);
    let weights = Weights::open_file(&path)?;
    match base_of(&weights) {
        Some(own) if !own.agrees(base) => {
            let (found, expected) = if own.weights.is_empty() {
                (&own.sampled, &base.sampled)
            } else {
                (&own.weights, &base.weights)
            };
            Err(Error::new("adapter was trained on another base model")
                .at_path(&path)
                .found(format!("base {found}"))
                .expected(format!("base {expected}, the given model"))
                .hint("use the base model of the adapter; a model with the same shapes can have other weights"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An option that is off is not part of a fingerprint: adapters of such models stay valid.
    #[test]
    fn a_short_convolution_names_its_biases_only_if_it_has_them() {
        let of = |family: &str| {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/families");
            computes(&families::read(&Config::load(&dir.join(family)).unwrap()).unwrap())
        };
        let (plain, biased) = (of("lfm2"), of("lfm2_bias"));
        assert!(
            plain.contains(" ShortConv { kernel: ") && !plain.contains("bias"),
            "{plain}"
        );
        assert!(biased.contains(" } bias"), "{biased}");
    }
}
