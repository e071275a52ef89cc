//! `ft dash`: a page about runs, served to this machine or written to a directory.

use super::{note, out};
use crate::base::{Result, signal};
use crate::look::{self, Server};
use std::path::PathBuf;

/// Show runs on a local page, live
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft dash                           the runs in `runs`, and later ones
  ft dash runs/a runs/b
  ft dash runs/a runs/b --out page  page/index.html, which needs no server

The page is at 127.0.0.1, has a random token in its address, and can only read. Ctrl-C ends it.
From another machine: ssh -L 8787:127.0.0.1:8787 HOST ft dash --port 8787")]
pub struct Args {
    /// Run directories, or directories with runs [default: runs]
    #[arg(add = super::completions::run_directory())]
    runs: Vec<PathBuf>,
    /// The port [default: one that is free]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Write the page with at most eight runs to DIR/index.html instead
    #[arg(long, value_name = "DIR", conflicts_with = "port")]
    out: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<i32> {
    let places = if args.runs.is_empty() {
        vec![PathBuf::from("runs")]
    } else {
        args.runs
    };
    if let Some(folder) = args.out {
        out(look::write_folder(&places, &folder)?.display())?;
        return Ok(0);
    }
    let server = Server::open(&places, args.port)?;
    signal::quit("the page is closed");
    out(server.url())?;
    note("open this address in a browser on this machine; Ctrl-C ends it");
    server.serve();
    Ok(0)
}
