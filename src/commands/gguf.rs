//! `ft export --to gguf`: a GGUF file of a model or of an adapter, and a Modelfile of Ollama beside it.

use crate::base::staging::Staging;
use crate::base::{Error, Result, files};
use crate::commands::{merge, named};
use crate::formats::gguf::BlockType;
use crate::formats::read_json_to_rewrite;
use crate::formats::tokenizer::Tokenizer;
use crate::gguf::{self, AdapterFile, Fidelity, FileType, ModelFile};
use crate::setup::locate::{NamedKind, locate};
use crate::train::verify;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The properties of the written file.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufReport {
    /// The GGUF file.
    pub file: PathBuf,
    pub adapter: bool,
    pub architecture: &'static str,
    pub bytes: u64,
    /// Errors by number format; of an adapter none.
    pub fidelity: Vec<Fidelity>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Writes the directory `out` with a GGUF file of `from`: a model, a run, a checkpoint, an adapter or a hub id. An adapter
/// stays an adapter.
///
/// Errors: `out` is not empty; there is nothing to export; the errors of `gguf::model` and `gguf::adapter`.
pub fn export(from: &str, out: &Path, file_type: Option<FileType>, pre_tokenizer: Option<&str>) -> Result<GgufReport> {
    merge::refuse_existing(out)?;
    let found = named::find(from, None)?;
    let base = match locate(&found.model)? {
        NamedKind::Model(dir) | NamedKind::Adapter(dir) | NamedKind::Checkpoint(dir) => dir,
    };
    verify::check_result(found.adapter.as_deref().unwrap_or(&base))?;
    let name = name_of(from);
    let staging = Staging::create(out)?;
    let dir = staging.path().to_path_buf();
    let (report, modelfile) = match &found.adapter {
        Some(adapter) => of_adapter(adapter, &base, &found.model, &dir, &name, file_type)?,
        None => of_model(&base, &dir, &name, file_type.unwrap_or(FileType::Q8), pre_tokenizer)?,
    };
    files::write_atomic(&dir.join("Modelfile"), modelfile.as_bytes())?;
    let out = staging.commit_new()?;
    let notes = found.notes.iter().cloned().chain(report.notes).collect();
    let file = report.file.file_name().map_or(out.clone(), |name| out.join(name));
    Ok(GgufReport { file, notes, ..report })
}

fn of_model(
    base: &Path,
    dir: &Path,
    name: &str,
    file_type: FileType,
    pre_tokenizer: Option<&str>,
) -> Result<(GgufReport, String)> {
    let file = dir.join(format!("{name}-{}.gguf", file_type.label()));
    let model = ModelFile {
        dir: base,
        file_type,
        name,
        pre_tokenizer,
    };
    let written = gguf::model(&model, &file)?;
    let modelfile = modelfile(&file, base)?;
    let report = GgufReport {
        file,
        adapter: false,
        architecture: written.architecture,
        bytes: written.bytes,
        fidelity: written.fidelity,
        notes: written.warnings,
    };
    Ok((report, modelfile))
}

fn of_adapter(
    adapter: &Path,
    base: &Path,
    base_name: &str,
    dir: &Path,
    name: &str,
    file_type: Option<FileType>,
) -> Result<(GgufReport, String)> {
    let file_type = file_type.unwrap_or(FileType::F16);
    let block = match file_type {
        FileType::F32 => BlockType::F32,
        FileType::F16 => BlockType::F16,
        FileType::Bf16 => BlockType::Bf16,
        other => {
            return Err(Error::usage("an adapter is not quantized")
                .found(other.name())
                .expected("f32, f16 or bf16"));
        }
    };
    let file = dir.join(format!("{name}-{}.gguf", file_type.label()));
    let adapter = AdapterFile {
        dir: adapter,
        base,
        name,
        block,
    };
    let (architecture, bytes) = gguf::adapter(&adapter, &file)?;
    let shown = file_name(&file);
    let base_name = if Path::new(base_name).exists() {
        "BASE.gguf"
    } else {
        base_name
    };
    let modelfile = format!("# BASE: the same base model as GGUF\nFROM {base_name}\nADAPTER ./{shown}\n");
    let report = GgufReport {
        file,
        adapter: true,
        architecture,
        bytes,
        fidelity: Vec::new(),
        notes: vec!["it needs its base model as GGUF: `llama-cli --model BASE.gguf --lora FILE`".into()],
    };
    Ok((report, modelfile))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A name for files: that of the run, of the directory, or of the repository.
fn name_of(from: &str) -> String {
    let mut parts = from
        .split(['/', '\\'])
        .filter(|part| !part.is_empty() && !part.starts_with('.'));
    let inner = |part: &&str| !(*part == "final" || part.starts_with("checkpoint-"));
    let last = parts.rfind(inner).unwrap_or("model");
    let kept = |c: char| {
        if c.is_ascii_alphanumeric() || "._-".contains(c) {
            c
        } else {
            '-'
        }
    };
    last.chars().map(kept).collect()
}

/// The Modelfile: the file, the tokens that end an answer, and the settings of sampling.
fn modelfile(file: &Path, base: &Path) -> Result<String> {
    let tokenizer = Tokenizer::load(base)?;
    let mut lines = vec![format!("FROM ./{}", file_name(file))];
    let stops = tokenizer.stop_ids().iter().filter_map(|id| tokenizer.id_to_token(*id));
    lines.extend(stops.map(|token| format!("PARAMETER stop {}", Value::String(token))));
    let settings = base.join("generation_config.json");
    if settings.is_file() {
        // A file that is no JSON is reported where its stop ids are read.
        let settings = read_json_to_rewrite(&settings).unwrap_or_default();
        for (key, name) in [
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("repetition_penalty", "repeat_penalty"),
        ] {
            if let Some(number) = settings.get(key).filter(|x| x.is_number()) {
                lines.push(format!("PARAMETER {name} {number}"));
            }
        }
    }
    Ok(lines.join("\n") + "\n")
}

/// The errors of the formats, as lines.
pub fn fidelity(list: &[Fidelity]) -> Vec<String> {
    let one = |f: &Fidelity| {
        format!(
            "{:<5} {:>5} tensors {:>10}  error {:.4}% of the values (root mean square), largest {:.2e}",
            f.block.to_string(),
            f.tensors,
            crate::base::units::bytes(f.bytes),
            100.0 * f.rms,
            f.largest
        )
    };
    list.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modelfile_has_the_sampling_settings_beside_numbers_that_only_python_reads() {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
        let settings = r#"{"temperature": 0.6, "top_p": NaN, "top_k": 20, "sequence_bias": [[[1], -Infinity]]}"#;
        std::fs::write(dir.path().join("generation_config.json"), settings).unwrap();
        let text = modelfile(Path::new("there/model-Q8_0.gguf"), dir.path()).unwrap();
        let expected = "FROM ./model-Q8_0.gguf\nPARAMETER temperature 0.6\nPARAMETER top_k 20\n";
        assert_eq!(text, expected);
    }
}
