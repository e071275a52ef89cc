//! The library in a program that prepares nothing: no allocator, no thread pool, no signals, no settings of the
//! environment. Needs no feature: `cargo test --no-default-features --test library` (CI lints the library without the program, and runs this
//! test with it: other features would build all dependencies again).

use candle_core::{DType, Device, Tensor};
use ft::base::{ErrorKind, Result, files};
use ft::data::{Batch, Example};
use ft::engine::{ActiveSet, Engine, StepStrategy};
use ft::formats::{StoredDtype, TensorPlan, Values, Weights, writer};
use ft::generate::{GenerateSettings, generate};
use ft::hf::{self, OpenModel};
use ft::model::{Head, LossGradients, Objective, ObjectiveNeeds};
use ft::ops::{Dtype, rms_norm, step_stats::StepStats};
use ft::optim::{Optimizer, OptimizerConfig};
use ft::sft::CausalLm;
use serde_json::json;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const TINY: &str = "assets/tiny";

fn open(dir: &Path) -> Result<OpenModel> {
    hf::open(dir, Dtype::F32, &Device::Cpu)
}

#[track_caller]
fn kind<T>(result: Result<T>) -> ErrorKind {
    match result {
        Ok(_) => panic!("no error"),
        Err(e) => e.kind(),
    }
}

/// A copy of the tiny model, to damage.
fn copy() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(TINY).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// A batch with one document, and an engine that trains the last layer.
fn engine(objective: impl FnOnce(usize) -> Box<dyn Objective>) -> (Engine, ActiveSet, Batch) {
    let opened = open(Path::new(TINY)).unwrap();
    let network = &opened.model.network;
    let ids = opened.tokenizer.encode("Two plus three is five.", true).unwrap();
    let trained = vec![true; ids.len()];
    let last = format!("model.layers.{}.", network.layers() - 1);
    let names = network.source.params().iter().map(|p| p.name.to_string());
    let active = ActiveSet::new(names.filter(|name| name.starts_with(&last)));
    let objective = objective(network.spec.vocab);
    let optimizer = Optimizer::new(OptimizerConfig::default());
    let strategy = StepStrategy::new(Dtype::F32);
    (
        Engine::new(opened.model, objective, optimizer, strategy, &active).unwrap(),
        active,
        Batch::from_examples(&[Example { ids, trained }]),
    )
}

#[test]
fn a_step_and_a_generation_need_no_preparation() {
    let (mut engine, active, batch) = engine(|vocab| Box::new(CausalLm::new(vocab)));
    let losses: Vec<f64> = (1..=5)
        .map(|step| {
            let report = engine.step(step, std::slice::from_ref(&batch), &active, 1e-2).unwrap();
            report.totals.loss()
        })
        .collect();
    assert!(losses[4] < losses[0], "{losses:?}");

    let opened = open(Path::new(TINY)).unwrap();
    let chat = [json!({"role": "user", "content": "What is 2 + 3?"})];
    assert!(
        opened
            .template
            .unwrap()
            .render(&chat, None, true)
            .unwrap()
            .contains("2 + 3")
    );
    let settings = GenerateSettings {
        max_new_tokens: 4,
        temperature: 0.0,
        ..GenerateSettings::default()
    };
    let ids = opened.tokenizer.encode("Two plus", true).unwrap();
    let answers = generate(&engine.network, &[ids], &settings, &mut |_, _| Ok(())).unwrap();
    assert_eq!(answers[0].len(), 4);
}

/// A loss that is not a number.
struct Nan(CausalLm);

impl Objective for Nan {
    fn evaluate(
        &self,
        h: &Tensor,
        head: &Head,
        batch: &Batch,
        need: ObjectiveNeeds,
        stats: &StepStats,
    ) -> Result<LossGradients> {
        let h = (h * f64::NAN)?;
        self.0.evaluate(&h, head, batch, need, stats)
    }
}

#[test]
fn files_have_kinds_of_errors() {
    let dir = copy();
    assert_eq!(kind(open(&dir.path().join("none"))), ErrorKind::NotFound);
    assert_eq!(kind(files::read(dir.path())), ErrorKind::Io);

    let weights = dir.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(kind(open(dir.path())), ErrorKind::Format);
    fs::write(&weights, &bytes[..20]).unwrap();
    assert_eq!(kind(open(dir.path())), ErrorKind::Format);
    fs::rename(&weights, dir.path().join("pytorch_model.bin")).unwrap();
    assert_eq!(kind(open(dir.path())), ErrorKind::Unsupported);
    fs::remove_file(dir.path().join("pytorch_model.bin")).unwrap();
    assert_eq!(kind(open(dir.path())), ErrorKind::NotFound);
    fs::write(dir.path().join("config.json"), "{").unwrap();
    assert_eq!(kind(open(dir.path())), ErrorKind::Format);

    let plan = TensorPlan {
        name: "a".into(),
        dtype: StoredDtype::F32,
        shape: vec![2],
    };
    let path = dir.path().join("a.safetensors");
    let write = |values: &[f32]| {
        let plan = std::slice::from_ref(&plan);
        writer::write_file(&path, plan, &[], |_, sink| sink(Values::F32(values)))
    };
    assert_eq!(kind(write(&[1.0, f32::INFINITY])), ErrorKind::NonFinite);
    assert_eq!(kind(write(&[1.0, 2.0, 3.0])), ErrorKind::Shape);
    assert_eq!(kind(write(&[1.0])), ErrorKind::Internal);
    write(&[1.0, 2.0]).unwrap();
    assert_eq!(
        kind(Weights::open_file(&path).unwrap().require("a", &[3])),
        ErrorKind::Shape
    );
}

#[test]
fn computations_have_kinds_of_errors() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(
        kind(rms_norm::forward(&zeros(&[2, 8]), &zeros(&[3]), 1e-6, false)),
        ErrorKind::Shape
    );

    let (mut engine, active, batch) = engine(|vocab| Box::new(Nan(CausalLm::new(vocab))));
    let step = engine.step(1, std::slice::from_ref(&batch), &active, 1e-3);
    assert_eq!(kind(step), ErrorKind::NonFinite);

    let prompts = [Vec::new()];
    let answers = generate(&engine.network, &prompts, &GenerateSettings::default(), &mut |_, _| {
        Ok(())
    });
    assert_eq!(kind(answers), ErrorKind::Argument);
}

#[cfg(feature = "hub")]
#[test]
fn a_hub_has_kinds_of_errors() {
    use ft::hub::{HubSettings, resolve_with};
    let dir = tempfile::tempdir().unwrap();
    let mut settings = HubSettings {
        cache: dir.path().into(),
        endpoint: "http://127.0.0.1:1".into(),
        attempts: 1,
        ..HubSettings::default()
    };
    assert_eq!(kind(resolve_with(&settings, "a/b", "../main")), ErrorKind::Usage);
    assert_eq!(kind(resolve_with(&settings, "a/b", "main")), ErrorKind::Network);
    settings.offline = true;
    assert_eq!(kind(resolve_with(&settings, "a/b", "main")), ErrorKind::NotFound);
}

/// Files of gpt-oss with experts in MXFP4: as codes, which only adapters train on, or
/// dequantized, so that every parameter trains.
#[test]
fn quantized_files_open_as_codes_or_dequantized() {
    let dir = tempfile::tempdir().unwrap();
    let goldens = Path::new("tests/parity/goldens");
    for from in [goldens.join("mxfp4"), goldens.join("tokenizers/small")] {
        for entry in fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let name = "model.layers.0.mlp.experts.1.down_proj.weight";
    let codes = hf::open(dir.path(), Dtype::F32, &Device::Cpu).unwrap();
    let dequantized = hf::open_dequantized(dir.path(), Dtype::F32, &Device::Cpu).unwrap();
    assert!(codes.model.network.param(name).is_err(), "codes have no tensor");
    assert_eq!(dequantized.model.network.param(name).unwrap().tensor.dims().len(), 2);
    let ids = dequantized.tokenizer.encode("the mill by the river", true).unwrap();
    let trained = vec![true; ids.len()];
    let batch = Batch::from_examples(&[Example { ids, trained }]);
    let hidden = |opened: &OpenModel| {
        let network = &opened.model.network;
        let ctx = network.context(&batch.positions, &batch.documents, None).unwrap();
        network.hidden_states(&batch.ids, &ctx).unwrap()
    };
    let (a, b) = (hidden(&codes), hidden(&dequantized));
    let away = (&a - &b).unwrap().abs().unwrap().max_all().unwrap();
    let most = a.abs().unwrap().max_all().unwrap();
    let [away, most] = [away, most].map(|x| x.to_scalar::<f32>().unwrap());
    assert!(away < 1e-5 * most, "{away} of {most}");
    let active = ActiveSet::new([name.to_string()]);
    let vocab = dequantized.model.network.spec.vocab;
    let (objective, optimizer) = (
        Box::new(CausalLm::new(vocab)),
        Optimizer::new(OptimizerConfig::default()),
    );
    let strategy = StepStrategy::new(Dtype::F32);
    let mut engine = Engine::new(dequantized.model, objective, optimizer, strategy, &active).unwrap();
    let before = engine.network.param(name).unwrap().tensor.copy().unwrap();
    engine.step(1, std::slice::from_ref(&batch), &active, 1e-2).unwrap();
    let changed = (before - engine.network.param(name).unwrap().tensor).unwrap();
    let changed = changed.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(changed > 0.0);
}
