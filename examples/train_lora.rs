//! Trains a LoRA adapter on rows of a file, and writes a PEFT adapter directory.
//!
//! `cargo run --release --example train_lora`

use candle_core::Device;
use ft::base::{Result, threads};
use ft::data::order::{BatchStream, RunLength, StreamSpec};
use ft::data::{self, ChatRender, Dataset, Source};
use ft::engine::{ActiveSet, Engine, StepStrategy};
use ft::optim::{Optimizer, OptimizerConfig, Schedule, ScheduleConfig};
use ft::{hf, ops::Dtype, peft::LoraConfig, sft::CausalLm};
use std::path::Path;

fn main() -> Result<()> {
    // This thread becomes one of the compute threads, of which there is one for each processor.
    threads::start(0)?;
    let base = Path::new("assets/tiny");
    let mut opened = hf::open(base, Dtype::F32, &Device::Cpu)?;
    let network = &mut opened.model.network;
    let spec = data::DatasetSpec {
        sources: &[Source::new(vec!["assets/world/train.jsonl".to_string()])],
        max_length: 128,
        embedding_rows: network.spec.vocab,
        ..data::DatasetSpec::default()
    };
    let template = opened.template.as_ref().map(|t| t as &dyn ChatRender);
    let rows = Dataset::load(&spec, &opened.tokenizer, template)?;

    // Rank 16 on every linear; only the adapters are trained.
    let lora = LoraConfig {
        lora_alpha: 32.0,
        ..LoraConfig::default()
    };
    let mut adapters = hf::new_adapters(&lora, &network.spec, Some(base.display().to_string()), 0)?;
    adapters.attach(network)?;
    let active = ActiveSet::new(adapters.trained());

    let objective = Box::new(CausalLm::new(network.spec.vocab));
    let optimizer = Optimizer::new(OptimizerConfig::default());
    let strategy = StepStrategy::new(Dtype::F32);
    let mut engine = Engine::new(opened.model, objective, optimizer, strategy, &active)?;
    let order = StreamSpec {
        batch_size: 8,
        accumulation: 1,
        packing: false,
        seed: 0,
        length: RunLength::Steps(20),
        ..StreamSpec::default()
    };
    let stream = BatchStream::new(&rows, order)?;
    let schedule = Schedule::new(&ScheduleConfig::default(), stream.steps());
    for step in 1..=stream.steps() {
        let lr = 1e-3 * schedule.multiplier(step);
        let report = engine.step(step, &stream.window(step - 1)?, &active, lr)?;
        println!("step {step}: loss {:.4}", report.totals.loss());
    }

    let out = std::env::temp_dir().join("ft-example-lora");
    let config = adapters.config.expect("new adapters have a config");
    let base_print = hf::fingerprint(base)?.base();
    let trained = &engine.network.adapters;
    let out = hf::adapter(&out, &config, trained, &Default::default(), base, &base_print)?;
    println!("wrote {}", out.display());
    Ok(())
}

#[cfg(test)]
#[test]
fn runs() {
    main().unwrap();
}
