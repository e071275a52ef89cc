//! `ft watch`: a run on the whole terminal.

use crate::base::{Error, Result, signal};
use crate::look::{FrameStyle, WatchedRun, newest};
use crate::report::{self, FullScreen};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Watch a run on the whole terminal
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft watch                 the newest run in `runs`
  ft watch runs/sft

It reads the files of the run: q leaves the view, and the run goes on. The screen follows a run that is resumed.")]
pub struct Args {
    /// A run directory, or a directory with runs [default: runs]
    #[arg(add = super::completions::run_directory())]
    run: Option<PathBuf>,
}

/// Time between two looks at the files.
const TURN: Duration = Duration::from_millis(500);

pub fn run(args: Args) -> Result<i32> {
    let place = args.run.unwrap_or_else(|| PathBuf::from("runs"));
    let run = newest(std::slice::from_ref(&place))?.ok_or_else(|| {
        Error::usage("there is no run in this directory")
            .at_path(&place)
            .hint("`ft train` writes a run to `train.output_dir`")
    })?;
    let mut watched = WatchedRun::open(&run)?;
    signal::quit("");
    let mut screen = FullScreen::enter().map_err(|e| {
        e.hint("`ft runs show RUN` and `ft runs plot RUN` print the same numbers, `ft dash` shows a page")
    })?;
    let style = report::style();
    let mut seen = Instant::now();
    loop {
        let (width, height) = screen.size();
        let look = FrameStyle {
            width,
            height,
            color: style.color,
            unicode: style.unicode,
        };
        screen.draw(&watched.frame(look));
        match screen.key()? {
            Some(b'q') => return Ok(0),
            Some(b'm' | b'\t' | b' ') => watched.turn(false),
            Some(b'n') => watched.turn(true),
            Some(b'r') => watched.toggle_raw(),
            _ => {}
        }
        if seen.elapsed() >= TURN {
            watched.refresh();
            seen = Instant::now();
        }
    }
}
