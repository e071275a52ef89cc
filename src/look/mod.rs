//! Recorded runs for the eye: the page of `ft dash` and the screen of `ft watch`. Reads run directories, changes nothing.

mod http;
mod page;
mod server;
mod tail;
mod view;
mod watch;

// For the fuzz targets.
#[doc(hidden)]
pub use http::parse as parse_request;
pub use page::{MOST_RUNS, write_folder};
pub use server::Server;
#[doc(hidden)]
pub use server::answer_of_bytes;
pub use watch::{FrameStyle, WatchedRun, newest};
