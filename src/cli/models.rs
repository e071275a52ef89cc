//! `ft models`: the model families that ft can train.

use super::out::out_raw;
use crate::base::Result;
use crate::model::families::{FAMILIES, table};
use serde_json::json;

/// Model families: supported ones, and what others would need
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft models
  ft models --json")]
pub struct Args {
    /// Print the supported families as JSON, one object per line
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<i32> {
    if !args.json {
        out_raw(&table())?;
        return Ok(0);
    }
    for f in FAMILIES {
        let line = json!({"model_type": f.model_type, "checkpoints": f.checkpoints, "options": f.options});
        out_raw(&format!("{line}\n"))?;
    }
    Ok(0)
}
