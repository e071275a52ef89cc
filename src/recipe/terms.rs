//! The names and phrases of the library for a setting, and the terms of the program for it. An error of the library
//! names a setting by its Rust path (`LoraConfig::r`), or has a fixed phrase; the user of the program reads the recipe
//! key, the flag or the subcommand in its place. `tests/tidy.rs` compares the table with the texts of the library.

use super::table::KeyPath;
use super::table::adapters::LoraKeys as Lora;
use super::table::distill::DistillSection;
use super::table::distributed::DistributedSection;
use super::table::model::{Data, Memory, Model};
use super::table::preference::PreferenceSection;
use super::table::quality::{JudgeKeys, Quality};
use super::table::train::Train;
use super::table::tune::BlockKeys as Block;
use Term::{Key, Text, Value};
use std::borrow::Cow;

/// A term of the program.
#[derive(Debug, Clone, Copy)]
pub enum Term {
    Key(KeyPath),
    /// A key with this value, a text.
    Value(KeyPath, &'static str),
    Text(&'static str),
}

/// The words of a text of the library, and those of the program.
pub const TERMS: &[(&str, Term)] = &[
    ("data::Source::files", Key(Data::train)),
    ("data::Source::format", Key(Data::format)),
    ("data::Source::text_unit", Key(Data::text_unit)),
    ("Mapping::columns", Key(Data::columns)),
    ("Mapping::roles", Key(Data::roles)),
    ("Mapping::prompt_template", Key(Data::prompt_template)),
    ("Mapping::system_prompt", Key(Data::system_prompt)),
    ("DatasetPart::config", Key(Data::config)),
    ("DatasetPart::split", Key(Data::split)),
    ("data::DatasetSpec::max_length", Key(Data::max_length)),
    ("data::DatasetSpec::train_on", Key(Data::train_on)),
    ("Long::Drop", Value(Data::long, "drop")),
    ("TokenCache::dir", Key(Data::cache_dir)),
    ("RowFormat::PromptCompletion", Value(Data::format, "prompt-completion")),
    ("RowFormat::Sharegpt", Value(Data::format, "sharegpt")),
    ("RowFormat::Text", Value(Data::format, "text")),
    ("Render::Chat", Value(Data::render, "chat")),
    ("Render::Plain", Value(Data::render, "plain")),
    ("TrainOn::All", Value(Data::train_on, "all")),
    ("ChatTemplate::from_file", Key(Data::chat_template)),
    ("ChatTemplate::with_kwargs", Key(Data::template_kwargs)),
    ("Dataset::split", Key(Data::eval_fraction)),
    ("load evaluation rows from a file", Text("name a file in `data.eval`")),
    ("look at the encoded rows", Text("look at the rows with `ft data`")),
    ("StreamSpec::batch_size", Key(Train::batch_size)),
    ("StreamSpec::accumulation", Key(Train::gradient_accumulation_steps)),
    ("RunLength::Epochs", Key(Train::num_epochs)),
    ("RunLength::Steps", Key(Train::max_steps)),
    ("PreferencePart::Judged", Value(Train::stage, "kto")),
    (
        "JudgedLoss::ApoZeroUnpaired",
        Value(PreferenceSection::loss_type, "apo_zero_unpaired"),
    ),
    (
        "lower the limit of the answer",
        Text("lower `rlhf.max_completion_length`"),
    ),
    ("lower the learning rate", Text("lower `optimizer.learning_rate`")),
    ("Dtype::F32", Value(Model::dtype, "f32")),
    ("Dtype::Bf16", Value(Model::dtype, "bf16")),
    ("load them as f32", Text("use `--dtype f32`")),
    ("device::open", Key(Model::device)),
    ("device::gpus", Text("ft doctor")),
    ("shapes::config", Key(Model::path)),
    (
        "initialize new weights",
        Text("initialize new ones with `model.init = \"random\"`"),
    ),
    ("use the revision `main`", Text("set `model.revision = \"main\"`")),
    ("Placement::Device", Value(Memory::tier, "device")),
    ("StorageRules::overrides", Key(Memory::overrides)),
    ("Products::Dequantized", Value(Memory::frozen_products, "dequantized")),
    ("quantized::Products", Key(Memory::frozen_products)),
    ("disk::DiskOptions::head_rows", Key(Memory::head_chunk)),
    (
        "keep the layer inputs on the device",
        Text("set `memory.activations = \"recompute\"`"),
    ),
    ("SequenceBy::Keys", Value(DistributedSection::sequence_by, "gather")),
    ("Collective::set_timeout", Key(DistributedSection::timeout)),
    (
        "store all weights on every rank",
        Text("set `distributed.weights = \"replicated\"`"),
    ),
    ("RouterLosses::balance", Key(Train::router_aux_loss_coef)),
    ("RouterLosses::z", Key(Train::router_z_loss_coef)),
    ("LoraConfig::r", Key(Lora::r)),
    ("LoraConfig::rank_pattern", Key(Lora::rank_pattern)),
    ("LoraConfig::alpha_pattern", Key(Lora::alpha_pattern)),
    ("LoraConfig::target_modules", Key(Lora::target_modules)),
    ("LoraConfig::exclude_modules", Key(Lora::exclude_modules)),
    ("LoraConfig::target_parameters", Key(Lora::target_parameters)),
    ("LoraConfig::expert_rank", Key(Lora::expert_rank)),
    ("LoraConfig::layers_to_transform", Key(Lora::layers_to_transform)),
    ("LoraConfig::modules_to_save", Key(Lora::modules_to_save)),
    (
        "LoraConfig::trainable_token_indices",
        Key(Lora::trainable_token_indices),
    ),
    ("LoraConfig::oft_block_size", Key(Lora::oft_block_size)),
    (
        "train without adapters",
        Text("use `tune.method = \"full\"` or `\"freeze\"`"),
    ),
    (
        "use other rows for the covariance",
        Text("use other rows in `tune.lora.corda.data`"),
    ),
    ("BlockConfig::partition", Key(Block::partition)),
    ("BlockConfig::correction", Key(Block::correction)),
    ("BlockConfig::start_block", Key(Block::start_block)),
    ("BlockConfig::layers_per_block", Key(Block::layers_per_block)),
    ("BlockConfig::always_active", Key(Block::always_active)),
    ("BlockConfig::importance", Key(Block::importance)),
    ("Judges::columns", Key(JudgeKeys::columns)),
    ("ScreenSpec::threshold", Key(Quality::dedup_threshold)),
    ("ScreenSpec::ngram", Key(Quality::decontaminate_ngram)),
    ("Teacher::live", Key(DistillSection::teacher)),
    ("Teacher::Stored", Key(DistillSection::teacher_cache)),
    ("HiddenDistance::new", Key(DistillSection::hidden_weight)),
    ("hidden::check_map", Key(DistillSection::layer_map)),
    ("hidden::auto_map", Value(DistillSection::layer_map, "auto")),
    ("write to another disk", Text("set `train.output_dir` to another disk")),
    (
        "use another directory for the run",
        Text("set `train.output_dir` to another directory"),
    ),
    (
        "move it back, or continue the run there",
        Text("move it back, or set `train.output_dir` to this path, and use `--resume`"),
    ),
    (
        "the saved state is in the moved directory",
        Text("the saved state is in the moved directory; `--resume` continues from it"),
    ),
    (
        "`assets` is a directory of the source repository of ft",
        Text("`ft recipes copy NAME --with-data` writes the model and the rows of a shipped recipe into `assets`"),
    ),
    (
        "a training run creates it",
        Text("a training run creates it: run the recipe with this `train.output_dir` first"),
    ),
];

/// Replaces the names and phrases of the library in `text` by the terms of the program.
pub fn in_program_terms(text: &str) -> String {
    TERMS.iter().fold(text.to_string(), |text, (name, term)| {
        let term: Cow<str> = match term {
            Key(key) => key.0.into(),
            Value(key, value) => key.is(value).into(),
            Text(term) => (*term).into(),
        };
        replace(&text, name, &term)
    })
}

/// Replaces `name` where it is not a part of a longer path or word.
fn replace(text: &str, name: &str, term: &str) -> String {
    let continues = |c: char| c.is_alphanumeric() || c == '_';
    let (mut out, mut end) = (String::with_capacity(text.len()), 0);
    for (at, _) in text.match_indices(name) {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        let inside = before.ends_with(continues) || before.ends_with("::");
        if !inside && !after.starts_with(continues) && !after.starts_with("::") {
            out += &text[end..at];
            out += term;
            end = at + name.len();
        }
    }
    out + &text[end..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::table;
    use crate::recipe::value::ValueKind;

    #[test]
    fn terms_replace_whole_names() {
        let text = "LoraConfig::r: lower `LoraConfig::rank_pattern`, not My::LoraConfig::r; use `Render::Plain`";
        assert_eq!(
            in_program_terms(text),
            "tune.lora.r: lower `tune.lora.rank_pattern`, not My::LoraConfig::r; use `data.render = \"plain\"`"
        );
    }

    #[test]
    fn keys_and_values_of_the_terms_exist() {
        for &(name, term) in TERMS {
            match term {
                Key(key) => assert!(table::find(key.0).is_some(), "{name}"),
                Value(key, value) => {
                    let key = table::find(key.0).unwrap();
                    let named = matches!(key.kind, ValueKind::Name(names) if names.contains(&value));
                    let auto = value == "auto" && key.accepts_auto();
                    assert!(named || auto || matches!(key.kind, ValueKind::Text), "{name}");
                }
                Text(text) => {
                    for code in text.split('`').skip(1).step_by(2) {
                        let path = code.split(" = ").next().unwrap();
                        let other = path.starts_with(['-', '"']) || path.starts_with("ft ") || path == "assets";
                        assert!(other || table::find(path).is_some(), "{path}");
                    }
                }
            }
        }
    }
}
