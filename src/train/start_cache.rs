//! Disk cache of initial LoRA pairs: safetensors files named by a hash of all their inputs.

use crate::base::{Result, files};
use crate::data::Dataset;
use crate::formats::StoredDtype;
use crate::formats::weights::Weights;
use crate::formats::writer::{self, TensorPlan, Values};
use crate::model::Network;
use crate::model::linear::Linear;
use crate::peft::start::InitPair;
use crate::recipe::Recipe;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Hash of model, rows and settings.
pub fn key(recipe: &Recipe, base: &str, rows: &Dataset, network: &Network) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let lora = &recipe.tune.lora;
    let mut text = |t: &str| {
        hasher.update(&(t.len() as u64).to_le_bytes());
        hasher.update(t.as_bytes());
    };
    text("ft corda 3");
    text(base);
    text(recipe.model.dtype.name());
    text(&format!("{} {:?}", recipe.train.seed, recipe.model.init));
    text(&rows.fingerprint);
    // Adaptive ranks change the scale of a pair, by r or by √r.
    text(&format!("{:?} {}", lora.corda, lora.use_rslora));
    for layer in 0..network.linear_groups() {
        let mut format = |(module, linear): (String, Linear)| {
            if let Some(format) = linear.weight.format() {
                text(&format!("{module} {}", format.tag()));
            }
        };
        network.linears(layer)?.into_iter().for_each(&mut format);
        let experts = network
            .spec
            .layers
            .get(layer)
            .and_then(|l| l.experts)
            .map_or(0, |experts| experts.count);
        // Experts of other ranks are not here; a run stores all experts alike.
        let divided = network.source.expert_ranks().is_some();
        for expert in 0..if divided { 0 } else { experts } {
            network.expert_linears(layer, expert)?.into_iter().for_each(&mut format);
        }
    }
    for (module, adapter) in &network.adapters {
        let pair = adapter.lora();
        text(&format!("{module} {:?}", pair.map(|l| (l.rank(), l.scale.to_bits()))));
    }
    Ok(hasher.finalize().to_hex()[..32].to_string())
}

fn path(dir: &Path, key: &str) -> PathBuf {
    dir.join(format!("corda-{key}.safetensors"))
}

/// The metadata key for the hash of all pairs.
const HASH: &str = "ft_hash";

type Pairs = BTreeMap<String, (usize, InitPair)>;

fn hash(pairs: &Pairs) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = Vec::new();
    for (module, (r, pair)) in pairs {
        hasher.update(format!("{module} {r} {} {}\n", pair.a.len(), pair.b.len()).as_bytes());
        for numbers in pair.a.chunks(1 << 16).chain(pair.b.chunks(1 << 16)) {
            buffer.clear();
            buffer.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
            hasher.update(&buffer);
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// Returns the pairs by module with their ranks; `None` if the file does not exist or does not fit. A damaged file, or
/// an old one without a hash, is not used and `note` reports it.
pub fn read(dir: &Path, key: &str, network: &Network, note: &mut dyn FnMut(&str)) -> Result<Option<Pairs>> {
    let path = path(dir, key);
    if !path.is_file() {
        return Ok(None);
    }
    let mut unusable = |why: &str| note(&format!("{} {why}: its content is computed again", path.display()));
    let weights = match Weights::open_file(&path) {
        Ok(weights) => weights,
        Err(e) => {
            unusable(&format!("cannot be used ({})", e.what()));
            return Ok(None);
        }
    };
    let mut pairs = BTreeMap::new();
    for (module, adapter) in &network.adapters {
        let (Some(lora), Some(info)) = (adapter.lora(), weights.info(&format!("{module}.A"))) else {
            return Ok(None);
        };
        let r = info.shape.first().copied().unwrap_or(0);
        let (inputs, outputs) = (lora.a.dim(1)?, lora.b.dim(0)?);
        let a = weights.require(&format!("{module}.A"), &[r, inputs]);
        if a.and(weights.require(&format!("{module}.B"), &[outputs, r])).is_err() {
            unusable("does not fit the model");
            return Ok(None);
        }
        let pair = InitPair {
            a: weights.read_f32(&format!("{module}.A"))?,
            b: weights.read_f32(&format!("{module}.B"))?,
        };
        pairs.insert(module.clone(), (r, pair));
    }
    match weights.metadata().get(HASH) {
        Some(stored) if *stored == hash(&pairs) => Ok(Some(pairs)),
        Some(_) => {
            unusable("is damaged");
            Ok(None)
        }
        None => {
            unusable("has no hash of its values");
            Ok(None)
        }
    }
}

pub fn write(dir: &Path, key: &str, network: &Network, pairs: &Pairs) -> Result<()> {
    files::create_dir_all(dir)?;
    let mut plans = Vec::new();
    let mut values: Vec<&[f32]> = Vec::new();
    for (module, (r, pair)) in pairs {
        let Some(lora) = network.adapters.get(module).and_then(|a| a.lora()) else {
            continue;
        };
        let (inputs, outputs) = (lora.a.dim(1)?, lora.b.dim(0)?);
        for (side, shape, numbers) in [
            ("A", vec![*r, inputs], pair.a.as_slice()),
            ("B", vec![outputs, *r], pair.b.as_slice()),
        ] {
            plans.push(TensorPlan {
                name: format!("{module}.{side}"),
                dtype: StoredDtype::F32,
                shape,
            });
            values.push(numbers);
        }
    }
    let mut next = values.into_iter();
    let metadata = [(HASH.to_string(), hash(pairs))];
    writer::write_file(&path(dir, key), &plans, &metadata, |_, sink| {
        sink(Values::F32(next.next().unwrap_or_default()))
    })?;
    Ok(())
}
