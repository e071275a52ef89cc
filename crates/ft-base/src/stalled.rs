//! Operations on files that a disk does not finish.

use crate::sync::lock;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Bytes of an operation for which a disk gets one more second.
const SLOWEST: u64 = 10_000_000;

/// A file or directory, with the operation on it that is under way.
struct State {
    path: PathBuf,
    /// Begin of the operation in milliseconds, from 1; 0: none is under way.
    since: AtomicU64,
    bytes: AtomicU64,
}

static ALL: Mutex<Vec<Arc<State>>> = Mutex::new(Vec::new());
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn all() -> MutexGuard<'static, Vec<Arc<State>>> {
    lock(&ALL)
}

fn now() -> u64 {
    START.elapsed().as_millis() as u64 + 1
}

/// A file whose operations are watched.
pub(crate) struct Watched(Arc<State>);

impl Watched {
    pub(crate) fn new(path: &Path) -> Self {
        let state = Arc::new(State {
            path: path.to_path_buf(),
            since: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        all().push(state.clone());
        Self(state)
    }

    /// An operation that moves at most this many bytes to the disk, or from it.
    pub(crate) fn run<T>(&self, bytes: u64, operation: impl FnOnce() -> T) -> T {
        self.0.bytes.store(bytes, SeqCst);
        self.0.since.store(now(), SeqCst);
        let done = operation();
        self.0.since.store(0, SeqCst);
        done
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        all().retain(|state| !Arc::ptr_eq(state, &self.0));
    }
}

/// One operation on a path.
pub(crate) fn watched<T>(path: &Path, operation: impl FnOnce() -> T) -> T {
    Watched::new(path).run(0, operation)
}

/// One read of at most this many bytes of a file.
pub fn reading<T>(path: &Path, bytes: usize, operation: impl FnOnce() -> T) -> T {
    Watched::new(path).run(bytes as u64, operation)
}

/// A file or directory on which an operation has taken longer than `limit`, and a second for each 10 MB that it moves; with its
/// duration.
pub fn stalled(limit: Duration) -> Option<(PathBuf, Duration)> {
    let now = now();
    all().iter().find_map(|state| {
        let (since, bytes) = (state.since.load(SeqCst), state.bytes.load(SeqCst));
        let lasted = Duration::from_millis(now.saturating_sub(since));
        let allowed = limit + Duration::from_secs(bytes / SLOWEST);
        (since > 0 && lasted > allowed).then(|| (state.path.clone(), lasted))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_named_if_it_takes_longer_than_its_bytes_allow() {
        let path = Path::new("/a/file");
        let of_this = || stalled(Duration::from_millis(5)).filter(|(found, _)| found == path);
        let file = Watched::new(path);
        let pause = || std::thread::sleep(Duration::from_millis(20));
        pause();
        assert_eq!(of_this(), None, "nothing is under way");
        let found = file.run(SLOWEST - 1, || {
            pause();
            of_this()
        });
        assert!(found.is_some_and(|(_, lasted)| lasted >= Duration::from_millis(19)));
        let found = file.run(SLOWEST, || {
            pause();
            of_this()
        });
        assert_eq!(found, None, "a second more");
        drop(file);
        let found = reading(path, 1, || {
            pause();
            of_this()
        });
        assert!(found.is_some());
        assert!(!all().iter().any(|state| state.path == path));
    }
}
