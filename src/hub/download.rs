//! Files of one repository into the cache, resumed and checked.

use crate::base::partial::PartialFile;
use crate::base::progress::{self, Phase};
use crate::base::{Error, Result, files};
use crate::hub::errors::{Wanted, explain, is_passing, not_cached, status};
use crate::hub::{Answer, HubSettings};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{HFClient, HFError, HFRepositorySync, RepoType};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Pieces under way at the same time.
const PARALLEL: u64 = 4;

/// What the hub lists of a file.
#[derive(Debug, Clone)]
struct Blob {
    size: u64,
    /// Git's name of the content, or of the pointer that stands for a large file.
    oid: String,
    large: bool,
    /// SHA-256 of a large file, where the hub tells it under the name that `hf-hub` reads.
    sha256: Option<String>,
}

/// One repository at one revision.
pub(crate) struct Repository<'a, T: RepoType> {
    handle: HFRepositorySync<T>,
    settings: &'a HubSettings,
    wanted: Wanted<'a>,
    folder: PathBuf,
    /// What the hub says is there; `None` offline, or when it does not tell.
    listing: Option<BTreeMap<String, Blob>>,
    /// Only the cache: asked for, or the network is down.
    offline: bool,
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

/// A small public model that every hub has.
const PUBLIC: (&str, &str) = ("openai-community", "gpt2");

pub(super) fn ask(settings: &HubSettings) -> Answer {
    let begun = std::time::Instant::now();
    let client = match client(settings) {
        Ok(client) => client,
        Err(e) => return Answer::Failed(e.what().to_string()),
    };
    let listed = client.model(PUBLIC.0, PUBLIC.1).list_tree().revision("main").send();
    let Err(e) = listed else {
        return Answer::Reached(begun.elapsed());
    };
    match status(&e) {
        // A mirror may not have this model, or lists nothing.
        Some(404 | 405 | 501) => Answer::Reached(begun.elapsed()),
        Some(401 | 403) if settings.token.is_some() => Answer::Refused,
        Some(status) => Answer::Failed(format!("it answers with HTTP status {status}")),
        None => {
            // The innermost cause is what a person can act on.
            let mut cause: &dyn std::error::Error = &e;
            while let Some(inner) = cause.source() {
                cause = inner;
            }
            Answer::Failed(settings.scrub(&cause.to_string()))
        }
    }
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
            offline: settings.offline,
        };
        if settings.offline {
            if out.snapshot().is_none() {
                return Err(not_cached(wanted, settings));
            }
            return Ok(out);
        }
        let _asking = progress::phase(format!("asking the hub for {}", wanted.id), 0, "");
        match out.retry(|| out.handle.list_tree().revision(wanted.revision).recursive(true).send()) {
            Ok(entries) => out.listing = Some(entries.into_iter().filter_map(blob_of).collect()),
            // A mirror may serve files without listing them; then every file is asked for by name.
            Err(e) if matches!(status(&e), Some(404 | 405 | 501)) && !says_missing(&e) => {}
            Err(e) if is_passing(&e) && out.snapshot().is_some() => out.offline = true,
            Err(e) => return Err(explain(&e, wanted, settings)),
        }
        Ok(out)
    }

    pub(crate) fn is_offline(&self) -> bool {
        self.offline
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
        if self.offline {
            return Ok(self.snapshot().map(|s| s.join(file)).filter(|p| p.exists()));
        }
        let mut filled = None;
        if let Some(listing) = &self.listing {
            let Some(blob) = listing.get(file) else {
                return Ok(None);
            };
            filled = self.fill(file, blob, wanted)?;
        }
        let fresh = filled.is_some() || !self.snapshot().is_some_and(|s| s.join(file).exists());
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
                if fresh {
                    self.check_hash(&path, filled.as_deref(), file)?;
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
            None if self.offline => Err(not_cached(wanted, self.settings)),
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

    /// A blob that is named by a hash must have it; `filled` is the hash that was found while filling it.
    fn check_hash(&self, path: &Path, filled: Option<&str>, file: &str) -> Result<()> {
        let Ok(target) = path.canonicalize() else {
            return Ok(());
        };
        let name = target
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if !is_sha256(&name) || filled == Some(name.as_str()) {
            return Ok(());
        }
        let found = hash_of(|f| {
            let mut content = files::open(&target)?;
            let mut buffer = vec![0u8; 1 << 20];
            loop {
                match content.read(&mut buffer) {
                    Ok(0) => return Ok(()),
                    Ok(n) => f(&buffer[..n]),
                    Err(e) => return Err(Error::new("cannot read the download").at_path(&target).cause(e)),
                }
            }
        })?;
        if let Some(other) = filled.filter(|f| is_sha256(f)) {
            let stray = self.folder.join("blobs").join(other);
            if stray.exists() {
                files::remove_file(&stray)?;
            }
        }
        if found == name {
            return Ok(());
        }
        files::remove_file(&target)?;
        files::remove_file(path)?;
        Err(Error::new(format!("`{file}` was damaged on the way"))
            .at(format!("{}/{}", self.settings.endpoint, self.wanted.id))
            .found(format!("SHA-256 {found}"))
            .expected(name)
            .hint("run the same command again: the damaged file was removed"))
    }

    /// Whether the content is in the cache already, under any revision.
    fn is_cached(&self, blob: &Blob) -> bool {
        let blobs = self.folder.join("blobs");
        match (&blob.sha256, blob.large) {
            (Some(hash), _) => blobs.join(hash).exists(),
            (None, false) => blobs.join(&blob.oid).exists(),
            // The pointer of a large file is made of its hash and size, so its name tells whether they fit.
            (None, true) => files::list(&blobs).unwrap_or_default().iter().any(|path| {
                let name = path
                    .file_name()
                    .map(|n| n.to_string_lossy().into_owned())
                    .unwrap_or_default();
                is_sha256(&name) && pointer_oid(&name, blob.size) == blob.oid
            }),
        }
    }

    /// Fetches the content of a file into the cache, from where an earlier attempt stopped. Returns the name
    /// of the new blob; `None` when there was nothing to do.
    fn fill(&self, file: &str, blob: &Blob, wanted: Wanted) -> Result<Option<String>> {
        if blob.size == 0 || self.is_cached(blob) {
            return Ok(None);
        }
        let blobs = self.folder.join("blobs");
        files::create_dir_all(&blobs)?;
        let key = blob.sha256.as_ref().unwrap_or(&blob.oid);
        let mut partial = PartialFile::open(&blobs.join(format!("{key}.incomplete")))?;
        if self.is_cached(blob) {
            return Ok(None);
        }
        if partial.length() > blob.size {
            partial.clear()?;
        }
        let phase = self.phase(file, blob.size, partial.length());
        let mut failures = 0;
        while partial.length() < blob.size {
            let before = partial.length();
            match self.batch(file, blob, &mut partial, phase.as_ref())? {
                None => failures = 0,
                Some(e) => {
                    // A batch that brought something is no failure of the whole.
                    failures = if partial.length() > before { 1 } else { failures + 1 };
                    if !is_passing(&e) || failures >= self.settings.attempts {
                        return Err(explain(&e, wanted, self.settings));
                    }
                    std::thread::sleep(self.settings.wait * (1 << (failures - 1).min(6)));
                }
            }
        }
        drop(phase);
        let _checking = progress::phase(progress::about("checking", Path::new(file)), 0, "");
        let name = match blob.large {
            true => hash_of(|f| partial.read(f))?,
            false => blob.oid.clone(),
        };
        partial.finish(&blobs.join(&name))?;
        Ok(Some(name))
    }

    /// Fetches the next pieces side by side and appends them in order; `Some` is the first failure.
    fn batch(
        &self,
        file: &str,
        blob: &Blob,
        partial: &mut PartialFile,
        phase: Option<&Phase>,
    ) -> Result<Option<HFError>> {
        let show = |done| phase.iter().for_each(|phase| phase.set(done));
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
                show(blob.size);
                return Ok(None);
            } else {
                return Ok(Some(HFError::malformed_response(format!(
                    "{} bytes for {range:?}",
                    bytes.len()
                ))));
            }
            show(partial.length());
        }
        Ok(None)
    }

    /// Shows how much of a file is here, unless the settings ask for silence.
    fn phase(&self, file: &str, size: u64, done: u64) -> Option<Phase> {
        let name = file.rsplit('/').next().unwrap_or(file);
        let phase = self
            .settings
            .progress
            .then(|| progress::bytes(format!("downloading {name}"), size));
        phase.iter().for_each(|phase| phase.set(done));
        phase
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
    // Both become file names.
    let plain = |name: &str| !name.is_empty() && name.len() <= 128 && name.chars().all(|c| c.is_ascii_alphanumeric());
    let blob = Blob {
        size: lfs.as_ref().and_then(|l| l.size).unwrap_or(size),
        large: lfs.is_some(),
        sha256: lfs.and_then(|l| l.sha256).filter(|h| is_sha256(h)),
        oid,
    };
    plain(&blob.oid).then_some((path, blob))
}

fn is_sha256(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// SHA-256 of what `read` hands out.
fn hash_of(read: impl FnOnce(&mut dyn FnMut(&[u8])) -> Result<()>) -> Result<String> {
    let mut hash = Sha256::new();
    read(&mut |piece| hash.update(piece))?;
    Ok(hex(&hash.finalize()))
}

/// Git's name of the Git LFS pointer for this content.
fn pointer_oid(sha256: &str, size: u64) -> String {
    let text = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n");
    hex(&sha1::Sha1::digest(format!("blob {}\0{text}", text.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn git_names_a_pointer_like_this() {
        // From `git hash-object` on the pointer file of these values.
        let sha256 = "a".repeat(64);
        assert_eq!(pointer_oid(&sha256, 12345), "3f20b51a0a25d87c30cb636d2875b09456ec3b12");
        assert!(is_sha256(&sha256) && !is_sha256(&"A".repeat(64)) && !is_sha256("aa"));
    }
}
