//! Loads a model directory and answers a question: `cargo run --release --example generate -- assets/tiny "What is 2 + 3?"`

use candle_core::Device;
use ft::base::Result;
use ft::generate::{GenerateSettings, generate};
use ft::hf;
use ft::ops::Dtype;
use serde_json::json;
use std::path::Path;

fn main() -> Result<()> {
    // (Not the arguments of the test program.)
    let mut arguments = std::env::args().skip(if cfg!(test) { usize::MAX } else { 1 });
    let dir = arguments.next().unwrap_or_else(|| "assets/tiny".into());
    let question = arguments.next().unwrap_or_else(|| "What is 2 + 3?".into());

    let opened = hf::open(Path::new(&dir), Dtype::F32, &Device::Cpu)?;
    // A chat model expects its template; a base model continues the plain text.
    let prompt = match &opened.template {
        Some(template) => template.render(&[json!({"role": "user", "content": question})], None, true)?,
        None => question,
    };
    let ids = opened.tokenizer.encode(&prompt, opened.template.is_none())?;
    let settings = GenerateSettings {
        max_new_tokens: 40,
        temperature: 0.0,
        stop_ids: opened.tokenizer.stop_ids().to_vec(),
        ..GenerateSettings::default()
    };
    let answers = generate(&opened.model.network, &[ids], &settings, &mut |_, _| Ok(()))?;
    println!("{}", opened.tokenizer.decode(&answers[0], true)?);
    Ok(())
}

#[cfg(test)]
#[test]
fn runs() {
    main().unwrap();
}
