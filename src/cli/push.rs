//! `ft push`: uploads a model with its card to a hub.

use super::out::{out, out_raw};
use crate::base::units::bytes;
use crate::base::{Result, secrets};
use crate::commands::push::{self, PushRequest};
use crate::hub::{self, HubSettings, Upload};
use serde_json::json;
use std::path::PathBuf;

/// Upload the result of a run to a hub, with a model card
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft push runs/sft me/my-model --dry-run  only shows the files and the card
  ft push runs/sft me/my-model --private
  ft push merged me/my-model --license apache-2.0

It uploads `final/` of a run, or the directory, in one commit. The card is made of the run's files: base, recipe, command,
rows with their fingerprint, results. Files that the repository has are not sent again, so after a fault give the same
command. The token is HF_TOKEN or the one that `hf auth login` stores; it needs write access.")]
pub struct Args {
    /// A run, or a model or adapter directory
    #[arg(value_name = "FROM", add = super::completions::run_directory())]
    from: PathBuf,
    /// The repository, made if it does not exist
    #[arg(value_name = "OWNER/NAME")]
    repository: String,
    /// Show the files and the card, and send nothing
    #[arg(long)]
    dry_run: bool,
    /// A new repository is visible to its owner only
    #[arg(long)]
    private: bool,
    /// The license for the card, as the hub names it
    #[arg(long, value_name = "ID")]
    license: Option<String>,
    /// Upload the directory's own README.md in place of a card
    #[arg(long)]
    keep_readme: bool,
    /// The branch
    #[arg(long, value_name = "NAME", default_value = "main")]
    revision: String,
    /// The message of the commit
    #[arg(long, value_name = "TEXT", default_value = "Upload with ft")]
    message: String,
    /// Print one JSON object: url, commit, files, bytes, sent_bytes
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<i32> {
    hub::check_target(&args.repository, &args.revision)?;
    let prepared = push::prepare(&PushRequest {
        from: &args.from,
        id: &args.repository,
        license: args.license.as_deref(),
        keep_readme: args.keep_readme,
    })?;
    let settings = HubSettings::from_env();
    let number = prepared.files.len();
    prepared.notes.iter().for_each(|note| super::note(note));
    if prepared.card.as_ref().is_some_and(|card| card.contains(secrets::MASK)) {
        super::note(&format!(
            "texts of the run that look like secrets are `{}` in the card; read the card (`--dry-run`) before you publish it",
            secrets::MASK
        ));
    }
    if args.dry_run {
        let mut names = Vec::new();
        for file in &prepared.files {
            let size = file.size()?;
            names.push(json!({"path": file.name, "bytes": size}));
            if !args.json {
                out(format!("{:>10}  {}", bytes(size), file.name))?;
            }
        }
        if args.json {
            out(
                json!({"url": format!("{}/{}", settings.public_endpoint(), args.repository), "files": names,
                "bytes": prepared.bytes, "card": prepared.card}),
            )?;
        } else if let Some(card) = &prepared.card {
            out_raw(&format!("\nREADME.md:\n\n{card}"))?;
        }
        return Ok(0);
    }
    let uploaded = hub::upload(
        &settings,
        &Upload {
            id: &args.repository,
            revision: &args.revision,
            message: &args.message,
            private: args.private,
            files: &prepared.files,
        },
    )?;
    if args.json {
        out(
            json!({"url": uploaded.url, "commit": uploaded.commit, "files": number, "bytes": prepared.bytes,
            "sent_bytes": uploaded.sent}),
        )?;
        return Ok(0);
    }
    match &uploaded.commit {
        Some(_) => super::note(&format!(
            "{} files, {}, of which {} were sent as large files; {} files were there already",
            number,
            bytes(prepared.bytes),
            bytes(uploaded.sent),
            uploaded.kept
        )),
        None => super::note("the repository has all files already: no commit was made"),
    }
    out(&uploaded.url)?;
    Ok(0)
}
