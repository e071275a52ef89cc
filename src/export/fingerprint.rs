//! Which weights an adapter belongs to, told from a few numbers of every tensor.

use crate::base::{Error, Result, files};
use crate::formats::StoredDtype;
use crate::formats::adapter;
use crate::formats::config::Config;
use crate::formats::weights::{TensorInfo, Weights};
use crate::model::{Spec, families};
use crate::source::stored;
use half::{bf16, f16};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The metadata key in `adapter_model.safetensors`.
pub(super) const KEY: &str = "ft_base_fingerprint";

/// Places read in each tensor, and numbers at each.
const PLACES: usize = 4;
const NUMBERS: usize = 16;

/// Says which base model is in `dir`, cheaply: a blake3 hash over what the model computes (not how its config
/// spells it), and the name, the shape and some numbers of every parameter. The numbers are taken as bf16, so
/// a copy of the same weights stored in f32 or bf16 has the same fingerprint.
///
/// Errors: an unsupported model; a parameter is missing or has another shape; a file cannot be read.
pub fn fingerprint(dir: &Path) -> Result<String> {
    let spec = families::read(&Config::load(dir)?)?;
    of(&spec, &Weights::open(dir)?)
}

/// As `fingerprint`, of a model that is open already.
pub(crate) fn of(spec: &Spec, weights: &Weights) -> Result<String> {
    let handles: Vec<File> = weights.files().iter().map(|p| files::open(p)).collect::<Result<_>>()?;
    let mut hasher = blake3::Hasher::new();
    let mut text = |t: &str| {
        hasher.update(&(t.len() as u64).to_le_bytes());
        hasher.update(t.as_bytes());
    };
    text("ft base 1");
    text(&computes(spec));
    for p in &spec.params() {
        if let Some((_, format)) = stored::find(weights, &p.name)? {
            // Codes are no numbers: what turns them into numbers stands for them.
            text(&format!("{} {:?} {}", p.name, p.shape, format.tag()));
            let scales = ["scales", "absmax"].map(|part| format!("{}.{part}", p.name));
            if let Some(scales) = scales.iter().find(|n| weights.info(n).is_some()) {
                text(&blake3::hash(&weights.read_bytes(scales)?).to_hex());
            }
            continue;
        }
        let info = weights.require(&p.name, &p.shape)?;
        text(&p.name);
        text(&format!("{:?}", p.shape));
        let path = &weights.files()[info.file];
        let numbers = sample(&handles[info.file], info).map_err(|e| {
            Error::new(format!("cannot read tensor `{}`", p.name))
                .at_path(path)
                .cause(e)
        })?;
        text(
            &numbers
                .iter()
                .map(|x| format!("{:04x}", x.to_bits()))
                .collect::<String>(),
        );
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

/// What the shapes do not say. Written out by hand: a field that is added to `Spec` must not make every
/// adapter a stranger.
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
    for layer in &s.layers {
        out.push_str(&format!(" layer {:?} {}", layer.window, layer.rope));
    }
    for rope in &s.ropes {
        // Powers may differ in their last bits from one machine to another.
        let frequencies: Vec<String> = rope.inv_freq.iter().map(|f| format!("{f:.3e}")).collect();
        out.push_str(&format!(
            " rope {:.3e} {}",
            rope.attention_factor,
            frequencies.join(" ")
        ));
    }
    out
}

/// Numbers at evenly spaced places, the first and the last ones among them.
fn sample(file: &File, info: &TensorInfo) -> std::io::Result<Vec<bf16>> {
    let (count, size) = (info.count(), info.dtype.size());
    let n = NUMBERS.min(count);
    let mut out = Vec::with_capacity(PLACES * n);
    let mut bytes = vec![0u8; n * size];
    for place in 0..PLACES {
        let first = (count - n) / (PLACES - 1) * place;
        let first = if place + 1 == PLACES { count - n } else { first };
        file.read_exact_at(&mut bytes, info.offset + (first * size) as u64)?;
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

/// The fingerprint of the base that an adapter's file names.
pub fn base_of(weights: &Weights) -> Option<String> {
    weights.metadata().get(KEY).filter(|p| !p.is_empty()).cloned()
}

/// Checks that the adapter in `dir` was trained on the base with this fingerprint. Adapters of other tools say
/// nothing of their base and pass.
///
/// Errors: it was trained on another base.
pub fn check_base(dir: &Path, fingerprint: &str) -> Result<()> {
    let path = dir.join(adapter::WEIGHTS);
    let weights = Weights::open_file(&path)?;
    match base_of(&weights) {
        Some(own) if own != fingerprint => Err(Error::new("adapter was trained on another base model")
            .at_path(&path)
            .found(format!("base {own}"))
            .expected(format!("base {fingerprint}, the given model"))
            .hint("give the model that the adapter was trained on; the same shapes are not the same weights")),
        _ => Ok(()),
    }
}
