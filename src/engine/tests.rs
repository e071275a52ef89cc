//! Logits, loss and every gradient of every family against transformers (goldens: `tests/parity/README.md`).

use super::active::Active;
use super::pass;
use super::sinks::Collect;
use crate::data::{Batch, Example, IGNORE};
use crate::formats::config::Config;
use crate::formats::weights::Weights;
use crate::model::{Network, families};
use crate::ops::{linear, update};
use crate::recipe::Dtype;
use crate::sft::CausalLm;
use crate::source::Resident;
use candle_core::Device;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens/families")
}

fn ids(w: &Weights, name: &str) -> Vec<i64> {
    let bytes = w.read_bytes(name).unwrap();
    bytes
        .chunks_exact(8)
        .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

/// |a - b| in units of the largest magnitude of b.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(0f32, |m, x| m.max(x.abs())).max(1e-6) as f64;
    a.iter().zip(b).map(|(x, y)| (x - y).abs() as f64).fold(0.0, f64::max) / scale
}

fn open(dir: &Path, config: &str) -> Network {
    let text = std::fs::read_to_string(dir.join(config)).unwrap();
    let config = Config::from_map(serde_json::from_str(&text).unwrap(), &dir.join(config));
    let spec = families::read(&config).unwrap();
    let weights = Weights::open(dir).unwrap();
    let source = Resident::load(spec.params(), &weights, Dtype::F32, &Device::Cpu).unwrap();
    Network::new(spec, Box::new(source), Device::Cpu)
}

/// The golden's documents as one batch; labels are already the targets of their own positions.
fn batch(golden: &Weights) -> Batch {
    let mut examples = Vec::new();
    for d in 0.. {
        let name = format!("input_ids.{d}");
        if golden.info(&name).is_none() {
            break;
        }
        let tokens: Vec<u32> = ids(golden, &name).into_iter().map(|i| i as u32).collect();
        let labels = ids(golden, &format!("labels.{d}"));
        let trained = labels.iter().enumerate().map(|(i, l)| i > 0 && *l >= 0).collect();
        examples.push(Example { ids: tokens, trained });
    }
    Batch::from_examples(&examples)
}

fn check(variant: &Path, config: &str) -> Vec<String> {
    let name = format!("{}/{config}", variant.file_name().unwrap().to_string_lossy());
    let golden = Weights::open_file(&variant.join("golden.safetensors")).unwrap();
    let network = open(variant, config);
    let batch = batch(&golden);
    let mut faults = Vec::new();

    let ctx = network.context(&batch.positions, &batch.documents, None).unwrap();
    let h = network.hidden_states(&batch.ids, &ctx).unwrap();
    let head = network.head().unwrap();
    let mut logits = update::to_f32_vec(&linear::forward(&h, &head.weight.tensor, None).unwrap()).unwrap();
    if let Some(cap) = head.softcap {
        logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    }
    let v = network.spec.vocab;
    for (d, range) in batch.documents.windows(2).enumerate() {
        let expected = golden.read_f32(&format!("logits.{d}")).unwrap();
        let off = distance(&logits[range[0] * v..range[1] * v], &expected);
        if off.is_nan() || off > 1e-4 {
            faults.push(format!("{name}: logits of document {d} differ by {off:.2e}"));
        }
    }

    let active = Active::new(network.source.params().iter().map(|p| p.name.to_string()));
    let mut sink = Collect {
        active: &active,
        gradients: BTreeMap::new(),
    };
    let objective = CausalLm { chunk: 7 };
    let totals = pass::window(
        &network,
        &objective,
        std::slice::from_ref(&batch),
        &active,
        |_| None,
        &mut sink,
    )
    .unwrap();
    let loss = golden.read_f32("loss").unwrap()[0] as f64;
    if (totals.loss() - loss).abs() > 1e-4 * loss.abs() {
        faults.push(format!("{name}: loss {} is not {loss}", totals.loss()));
    }
    assert_eq!(
        totals.trained as usize,
        batch.targets.iter().filter(|t| **t != IGNORE).count()
    );
    for p in network.source.params() {
        let expected = golden.read_f32(&format!("grad.{}", p.name)).unwrap();
        let found = update::to_f32_vec(&sink.gradients[&*p.name]).unwrap();
        let off = distance(&found, &expected);
        if off.is_nan() || off > 1e-4 {
            faults.push(format!("{name}: gradient of {} differs by {off:.2e}", p.name));
        }
    }
    faults
}

#[test]
fn logits_loss_and_gradients_of_every_family_are_those_of_transformers() {
    let mut faults = Vec::new();
    let mut variants = 0;
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(goldens())
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    dirs.sort();
    for dir in dirs.iter().filter(|d| d.join("golden.safetensors").exists()) {
        for config in ["config.json", "config.v4.json"] {
            if dir.join(config).exists() {
                faults.extend(check(dir, config));
                variants += 1;
            }
        }
    }
    assert!(variants >= 20, "only {variants} goldens found");
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}
