//! Fine-tune large language models on little memory, one layer at a time.
//!
//! This crate is the program `ft` and the library below it (crate `ft-core`). The library opens Hugging Face model
//! directories, trains them in full or with adapters, decodes, and writes model and adapter directories. It has no
//! global state that a caller must set, no recipe keys and no command line.
//!
//! ```
//! use candle_core::Device;
//! use ft::base::Result;
//! use ft::data::{self, Batch, Dataset};
//! use ft::engine::{ActiveSet, Engine, StepStrategy};
//! use ft::generate::{GenerateSettings, generate};
//! use ft::optim::{Optimizer, OptimizerConfig, Schedule, ScheduleConfig};
//! use ft::{hf, ops::Dtype, peft::LoraConfig, sft::CausalLm};
//! use std::path::Path;
//!
//! # fn main() -> Result<()> {
//! // A model directory: config, tokenizer, chat template, weights.
//! let mut opened = hf::open(Path::new("assets/tiny"), Dtype::F32, &Device::Cpu)?;
//! let network = &mut opened.model.network;
//! let prompt = opened.tokenizer.encode("Two plus three is", true)?;
//!
//! // Rows of a file, as token ids with a loss mask.
//! let spec = data::DatasetSpec {
//!     sources: &[data::Source::new(vec!["assets/world/eval.jsonl".to_string()])],
//!     max_length: 128,
//!     embedding_rows: network.spec.vocab,
//!     ..data::DatasetSpec::default()
//! };
//! let template = opened.template.as_ref().map(|t| t as &dyn data::ChatRender);
//! let rows = Dataset::load(&spec, &opened.tokenizer, template)?;
//!
//! // A LoRA adapter on every linear. Only the adapters are trained.
//! let lora = LoraConfig { r: 8, lora_alpha: 16.0, ..LoraConfig::default() };
//! let mut adapters = hf::new_adapters(&lora, &network.spec, None, 0)?;
//! adapters.attach(network)?;
//! let active = ActiveSet::new(adapters.trained());
//!
//! // The loss is the cross-entropy of the next token; AdamW updates the weights.
//! let objective = CausalLm::new(network.spec.vocab);
//! let optimizer = Optimizer::new(OptimizerConfig::default());
//! // Strategies trade memory for speed; this one saves layer inputs only.
//! let strategy = StepStrategy::new(Dtype::F32);
//! let mut engine = Engine::new(opened.model, Box::new(objective), optimizer, strategy, &active)?;
//!
//! // Two steps of one micro-batch each.
//! let schedule = Schedule::new(&ScheduleConfig::default(), 2);
//! for (step, rows) in (1..=2).zip(rows.examples.head(8)?.chunks(4)) {
//!     let lr = 1e-3 * schedule.multiplier(step);
//!     let report = engine.step(step, &[Batch::from_examples(rows)], &active, lr)?;
//!     assert!(report.totals.loss() > 0.0);
//! }
//!
//! // Decode with the trained weights.
//! let settings = GenerateSettings { max_new_tokens: 8, ..GenerateSettings::default() };
//! let answers = generate(&engine.network, &[prompt], &settings, &mut |_, _| Ok(()))?;
//! println!("{}", opened.tokenizer.decode(&answers[0], true)?);
//! # Ok(())
//! # }
//! ```
//!
//! Larger examples: `examples/train_lora.rs`, `examples/generate.rs` and `examples/custom_objective.rs`.
//!
//! # Modules
//!
//! A module uses only modules further down in this table.
//!
//! | module | contents |
//! |---|---|
//! | [`gguf`] | writes models and LoRA adapters for llama.cpp |
//! | [`hf`] | opens model directories; reads and writes models and PEFT adapters |
//! | [`generate`] | decoding with a KV cache: batches, shared prefixes, sampling |
//! | [`engine`] | the optimizer step: forward, backward, accumulation, clipping, update |
//! | [`rlhf`], [`distill`], [`sft`] | objectives: loss and gradient at the last hidden states |
//! | [`optim`] | update rules, learning-rate schedules, block schedules |
//! | [`model`] | the decoder layer and its families; the traits `Layer`, `GradSink`, `Objective` |
//! | [`source`] | where the weights of a layer are: in memory, on disk, quantized |
//! | [`quant`] | int8, int4 and NF4 weights |
//! | [`peft`] | LoRA, DoRA and other adapters |
//! | [`data`] | rows, chat rendering, loss masks, packing, order |
//! | [`hub`] | downloads from a Hugging Face hub |
//! | [`formats`] | checked readers and writers: safetensors, config, tokenizer, template |
//! | [`ops`] | fused operations on CPU and GPU |
//! | [`base`] | [`base::Error`], files, random numbers |
//!
//! `ARCHITECTURE.md` describes how they work together.
//!
//! # Errors
//!
//! Every function that can fail returns [`base::Error`]. Its text is written for a user; [`base::Error::kind`] is for a
//! program: `NotFound`, `Format`, `Shape`, `NonFinite` and others.
//!
//! # Features
//!
//! - `cli` (default): the program, with recipes, plans and runs. A library user turns it off with
//!   `default-features = false`. Its modules are no stable interface.
//! - `hub` (default): downloads from a Hugging Face hub.
//! - `cuda`: NVIDIA GPUs.

#![warn(missing_docs)]
// Outside of tests only errors may end the program: clippy denies calls that panic. Only `cli` prints and reads the environment, and
// `report` writes to stderr; files are opened through `base::files` (`clippy.toml`).
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented,
        clippy::print_stdout,
        clippy::print_stderr,
        clippy::disallowed_methods,
        clippy::disallowed_types
    )
)]

// The program: needs the feature `cli`. The library below it has no recipe keys and no command line. The modules of the
// program are public for its binary and its tests.
#[cfg(feature = "cli")]
#[allow(missing_docs, clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]
pub mod cli; // one file per subcommand: text in, exit code out
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod commands; // evaluate, generate, merge, quantize, export, plan
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod train; // the training program, its stages, the run directory
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod plan; // memory forecast from shapes, and the choice of a strategy that fits
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod setup; // opens and checks what a recipe names
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod checkpoint; // save, verify, rotate and load a training state
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod recipe; // parses and checks recipes
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod look; // the page and the screen that show recorded runs
#[cfg(feature = "cli")]
#[allow(missing_docs, clippy::print_stderr)]
pub mod report; // metrics, events, progress
#[cfg(feature = "cli")]
#[allow(missing_docs)]
pub mod history; // reads recorded runs, draws their curves

// The library (crate `ft-core`), and the crates below it.
pub use ft_base as base; // errors with hints, atomic files, locks, random numbers, units
pub use ft_core::{comm, distill, engine, generate, gguf, hf, model, optim, peft, quant, rlhf, sft, source, trace};
pub use ft_data as data; // readers, chat rendering, loss mask, packing, order
pub use ft_formats as formats; // parses bytes into validated types
pub use ft_hub as hub; // resolves a hub id or a path to local files
pub use ft_ops as ops; // fused operations, forward and backward
