//! Files of one repository into the cache, resumed and checked.

use crate::base::partial::PartialFile;
use crate::base::{Error, Result, files};
use crate::hub::HubSettings;
use crate::hub::errors::{Wanted, explain, is_passing, not_cached, status};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFError, HFRepositorySync, RepoType};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Pieces under way at the same time.
const PARALLEL: u64 = 4;

/// Size and name of the blob of a file.
#[derive(Debug, Clone)]
struct Blob {
    size: u64,
    etag: String,
    /// The etag is the SHA-256 of the content (large files).
    hashed: bool,
}

/// One repository at one revision.
pub(crate) struct Repository<'a, T: RepoType> {
    handle: HFRepositorySync<T>,
    settings: &'a HubSettings,
    wanted: Wanted<'a>,
    folder: PathBuf,
    /// What the hub says is there; `None` offline, or when it does not tell.
    listing: Option<BTreeMap<String, Blob>>,
}

pub(crate) fn client(settings: &HubSettings) -> Result<hf_hub::HFClientSync> {
    let mut builder = HFClient::builder()
        .endpoint(settings.endpoint.clone())
        .cache_dir(settings.cache.clone())
        .user_agent(concat!("ft/", env!("CARGO_PKG_VERSION")))
        .retry_max_attempts(1)
        .retry_base_delay(settings.wait);
    if let Some(token) = &settings.token {
        builder = builder.token(token.clone());
    }
    builder.build_sync().map_err(|e| {
        Error::usage("the hub address cannot be used")
            .found(format!("`{}`", settings.endpoint))
            .cause(settings.scrub(&e.to_string()))
            .hint("HF_ENDPOINT must be a URL such as `https://huggingface.co`")
    })
}

impl<'a, T: RepoType> Repository<'a, T> {
    /// Opens a repository: asks the hub what is there, unless offline.
    ///
    /// Errors: no access or not found. Without a network and with a cached revision it goes on offline.
    pub(crate) fn open(handle: HFRepositorySync<T>, settings: &'a HubSettings, wanted: Wanted<'a>) -> Result<Self> {
        let plural = handle.repo_type().plural();
        let folder = settings
            .cache
            .join(format!("{plural}--{}", wanted.id.replace('/', "--")));
        let mut out = Self {
            handle,
            settings,
            wanted,
            folder,
            listing: None,
        };
        if settings.offline {
            if out.snapshot().is_none() {
                return Err(not_cached(wanted, settings));
            }
            return Ok(out);
        }
        match out.retry(|| out.handle.list_tree().revision(wanted.revision).recursive(true).send()) {
            Ok(entries) => out.listing = Some(entries.into_iter().filter_map(blob_of).collect()),
            // A mirror may serve files without listing them; then every file is asked for by name.
            Err(e) if matches!(status(&e), Some(404 | 405 | 501)) && !says_missing(&e) => {}
            Err(e) if is_passing(&e) && out.snapshot().is_some() => {}
            Err(e) => return Err(explain(&e, wanted, settings)),
        }
        Ok(out)
    }

    /// Files in the repository, when the hub told.
    pub(crate) fn names(&self) -> Option<Vec<String>> {
        self.listing.as_ref().map(|l| l.keys().cloned().collect())
    }

    /// The directory of this revision in the cache, if there is one.
    pub(crate) fn snapshot(&self) -> Option<PathBuf> {
        let revision = self.wanted.revision;
        let snapshots = self.folder.join("snapshots");
        let direct = snapshots.join(revision);
        if revision.len() == 40 && direct.is_dir() {
            return Some(direct);
        }
        let commit = files::read_text(&self.folder.join("refs").join(revision)).ok()?;
        let commit = commit.trim();
        let plain = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
        let directory = snapshots.join(commit);
        (plain && directory.is_dir()).then_some(directory)
    }

    /// A file of the repository in the cache; `None` when the repository does not have it.
    pub(crate) fn optional(&self, file: &str) -> Result<Option<PathBuf>> {
        let wanted = Wanted {
            file: Some(file),
            ..self.wanted
        };
        if self.settings.offline {
            return Ok(self.snapshot().map(|s| s.join(file)).filter(|p| p.exists()));
        }
        if let Some(listing) = &self.listing {
            let Some(blob) = listing.get(file) else {
                return Ok(None);
            };
            self.fill(file, blob, wanted)?;
        }
        let send = || {
            self.handle
                .download_file()
                .filename(file)
                .revision(self.wanted.revision)
                .send()
        };
        match self.retry(send) {
            Ok(path) => {
                if let Some(blob) = self.listing.as_ref().and_then(|l| l.get(file)) {
                    self.check_size(&path, blob, wanted)?;
                }
                Ok(Some(path))
            }
            Err(HFError::EntryNotFound { .. }) => Ok(None),
            Err(e) if is_passing(&e) => match self.snapshot().map(|s| s.join(file)).filter(|p| p.exists()) {
                Some(path) => Ok(Some(path)),
                None => Err(explain(&e, wanted, self.settings)),
            },
            Err(e) => Err(explain(&e, wanted, self.settings)),
        }
    }

    /// A file that must be there.
    pub(crate) fn required(&self, file: &str) -> Result<PathBuf> {
        let wanted = Wanted {
            file: Some(file),
            ..self.wanted
        };
        match self.optional(file)? {
            Some(path) => Ok(path),
            None if self.settings.offline => Err(not_cached(wanted, self.settings)),
            None => {
                let missing = HFError::EntryNotFound {
                    path: file.into(),
                    repo_id: self.wanted.id.into(),
                    context: None,
                };
                Err(explain(&missing, wanted, self.settings))
            }
        }
    }

    fn check_size(&self, path: &Path, blob: &Blob, wanted: Wanted) -> Result<()> {
        let size = files::size(path)?;
        if size == blob.size {
            return Ok(());
        }
        if let Ok(target) = path.canonicalize() {
            files::remove_file(&target)?;
        }
        Err(Error::new(format!(
            "`{}` was not downloaded whole",
            wanted.file.unwrap_or_default()
        ))
        .at_path(path)
        .found(format!("{size} bytes"))
        .expected(format!("{} bytes", blob.size))
        .hint("run the same command again: the damaged file was removed from the cache"))
    }

    /// Fetches the content of a file into the cache, from where an earlier attempt stopped.
    fn fill(&self, file: &str, blob: &Blob, wanted: Wanted) -> Result<()> {
        let path = self.folder.join("blobs").join(&blob.etag);
        if path.exists() || blob.size == 0 {
            return Ok(());
        }
        files::create_dir_all(&self.folder.join("blobs"))?;
        let mut partial = PartialFile::open(&self.folder.join("blobs").join(format!("{}.incomplete", blob.etag)))?;
        if path.exists() {
            return Ok(());
        }
        if partial.length() > blob.size {
            partial.clear()?;
        }
        let bar = self.bar(file, blob.size, partial.length());
        let mut failures = 0;
        while partial.length() < blob.size {
            let before = partial.length();
            match self.batch(file, blob, &mut partial, &bar)? {
                None => failures = 0,
                Some(e) => {
                    // A batch that brought something is no failure of the whole.
                    failures = if partial.length() > before { 1 } else { failures + 1 };
                    if !is_passing(&e) || failures >= self.settings.attempts {
                        bar.abandon();
                        return Err(explain(&e, wanted, self.settings));
                    }
                    std::thread::sleep(self.settings.wait * (1 << (failures - 1).min(6)));
                }
            }
        }
        bar.finish_and_clear();
        if blob.hashed {
            let mut hash = Sha256::new();
            partial.read(|piece| hash.update(piece))?;
            let found: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
            if found != blob.etag {
                partial.clear()?;
                return Err(Error::new(format!("`{file}` was damaged on the way"))
                    .at(format!("{}/{}", self.settings.endpoint, self.wanted.id))
                    .found(format!("SHA-256 {found}"))
                    .expected(&blob.etag)
                    .hint("run the same command again: the damaged part was removed"));
            }
        }
        partial.finish(&path)
    }

    /// Fetches the next pieces side by side and appends them in order; `Some` is the first failure.
    fn batch(&self, file: &str, blob: &Blob, partial: &mut PartialFile, bar: &ProgressBar) -> Result<Option<HFError>> {
        let piece = self.settings.piece.max(1);
        let start = partial.length();
        let ranges: Vec<std::ops::Range<u64>> = (0..PARALLEL)
            .map(|i| (start + i * piece).min(blob.size)..(start + (i + 1) * piece).min(blob.size))
            .filter(|r| !r.is_empty())
            .collect();
        let get = |range: std::ops::Range<u64>| {
            self.handle
                .download_file_to_bytes()
                .filename(file)
                .revision(self.wanted.revision)
                .range(range)
                .send()
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranges.iter().map(|r| scope.spawn(|| get(r.clone()))).collect();
            threads.into_iter().map(|t| t.join()).collect()
        });
        for (range, result) in ranges.into_iter().zip(results) {
            let bytes = match result {
                Ok(Ok(bytes)) => bytes,
                Ok(Err(e)) => return Ok(Some(e)),
                Err(_) => return Err(Error::new("the download ended in a fault of its library").at(file)),
            };
            if bytes.len() as u64 == range.end - range.start {
                partial.append(&bytes)?;
            } else if bytes.len() as u64 == blob.size {
                // The server does not know ranges and sent everything.
                partial.clear()?;
                partial.append(&bytes)?;
                bar.set_position(blob.size);
                return Ok(None);
            } else {
                return Ok(Some(HFError::malformed_response(format!(
                    "{} bytes for {range:?}",
                    bytes.len()
                ))));
            }
            bar.set_position(partial.length());
        }
        Ok(None)
    }

    fn bar(&self, file: &str, size: u64, done: u64) -> ProgressBar {
        if !self.settings.progress {
            return ProgressBar::hidden();
        }
        // On stderr, and hidden by indicatif where that is no terminal.
        let bar = ProgressBar::new(size);
        if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(file.to_string());
        bar.set_position(done);
        bar
    }

    /// Tries again after failures that may pass.
    fn retry<R>(&self, mut send: impl FnMut() -> std::result::Result<R, HFError>) -> std::result::Result<R, HFError> {
        let mut wait = self.settings.wait;
        for _ in 1..self.settings.attempts {
            match send() {
                Err(e) if is_passing(&e) && status(&e) != Some(429) => std::thread::sleep(wait),
                other => return other,
            }
            wait *= 2;
        }
        send()
    }
}

/// The hub itself says that the repository or the revision is not there.
fn says_missing(e: &HFError) -> bool {
    match e {
        HFError::RepoNotFound { .. } | HFError::RevisionNotFound { .. } => true,
        HFError::Http { context } => context.error_code.is_some(),
        _ => false,
    }
}

fn blob_of(entry: RepoTreeEntry) -> Option<(String, Blob)> {
    let RepoTreeEntry::File {
        oid, size, path, lfs, ..
    } = entry
    else {
        return None;
    };
    let hash = lfs.and_then(|l| l.sha256);
    let etag = hash.clone().unwrap_or(oid);
    // The etag becomes a file name.
    let good = !etag.is_empty() && etag.len() <= 128 && etag.chars().all(|c| c.is_ascii_alphanumeric());
    good.then(|| {
        let hashed = hash.is_some_and(|h| h.len() == 64);
        (path, Blob { size, etag, hashed })
    })
}
