//! The cache that the Hugging Face tools share: `blobs/<hash>`, `snapshots/<commit>/<path>` (links to blobs) and
//! `refs/<revision>` below a directory per repository. Every name that comes from a hub is checked before it becomes
//! part of a path, and only files in `blobs` are ever removed.

use crate::is_inside;
use ft_base::partial::PartialFile;
use ft_base::{Error, Result, files};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// A hub's metadata of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blob {
    pub size: u64,
    pub hash: ContentHash,
}

/// Content hash: identifies and verifies a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ContentHash {
    /// SHA-256 of a large file.
    Sha256(String),
    /// Git's id of a small file: SHA-1 of a header and the content.
    Git(String),
}

impl ContentHash {
    /// Parses text from a hub; `None`: not a valid hash.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.len() {
            64 if is_hex(text) => Some(Self::Sha256(text.to_string())),
            40 if is_hex(text) => Some(Self::Git(text.to_string())),
            _ => None,
        }
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Sha256(name) | Self::Git(name) => name,
        }
    }
}

/// True for lower-case hex digits only: the hash is also a file name.
fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

pub(crate) fn is_commit(text: &str) -> bool {
    [40, 64].contains(&text.len()) && is_hex(text)
}

/// For an error of the file system in the cache.
pub(crate) const CACHE_HINT: &str = "give this user write access there and free some space, or set HF_HUB_CACHE (or HF_HOME) to \
                                     another directory; a download goes on where it stopped";

/// The directory of one repository.
#[derive(Debug, Clone)]
pub(crate) struct RepositoryStore {
    folder: PathBuf,
}

impl RepositoryStore {
    /// `kind`: `models` or `datasets`; `id` is a checked hub id.
    pub(crate) fn new(cache: &Path, kind: &str, id: &str) -> Self {
        Self {
            folder: cache.join(format!("{kind}--{}", id.replace('/', "--"))),
        }
    }

    /// The last known commit of this revision.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_string());
        }
        let text = files::read_text(&self.folder.join("refs").join(revision)).ok()?;
        Some(text.trim().to_string()).filter(|c| is_commit(c))
    }

    /// The directory of a commit, if it exists.
    pub(crate) fn snapshot(&self, commit: &str) -> Option<PathBuf> {
        Some(self.folder.join("snapshots").join(commit)).filter(|d| is_commit(commit) && d.is_dir())
    }

    pub(crate) fn blob(&self, hash: &ContentHash) -> PathBuf {
        self.folder.join("blobs").join(hash.name())
    }

    /// True if the content is in the cache, under any revision.
    pub(crate) fn has(&self, blob: &Blob) -> bool {
        let path = self.blob(&blob.hash);
        path.symlink_metadata()
            .is_ok_and(|m| m.is_file() && m.len() == blob.size)
    }

    /// The file for the partial download of this content. Errors: not enough free disk space.
    pub(crate) fn partial(&self, blob: &Blob) -> Result<PartialFile> {
        let blobs = self.folder.join("blobs");
        files::create_dir_all(&blobs)?;
        let partial = PartialFile::open(&blobs.join(format!("{}.incomplete", blob.hash.name())))?;
        let needed = blob.size.saturating_sub(partial.length());
        match files::free_space(&blobs) {
            Some(free) if free < needed => Err(Error::io("not enough disk space for the download")
                .at_path(&blobs)
                .found(format!("{free} bytes free"))
                .expected(format!("{needed} bytes"))),
            _ => Ok(partial),
        }
    }

    /// Verifies a complete content and gives it its name.
    ///
    /// Errors: the hash differs; then the content is discarded.
    pub(crate) fn finish(&self, mut partial: PartialFile, blob: &Blob, what: &str) -> Result<()> {
        let found = match &blob.hash {
            ContentHash::Sha256(_) => {
                let mut hash = Sha256::new();
                partial.read(&mut |piece| hash.update(piece))?;
                hex(&hash.finalize())
            }
            ContentHash::Git(_) => {
                let mut hash = sha1::Sha1::new();
                hash.update(format!("blob {}\0", blob.size));
                partial.read(&mut |piece| hash.update(piece))?;
                hex(&hash.finalize())
            }
        };
        if found == blob.hash.name() {
            return partial.finish(&self.blob(&blob.hash));
        }
        partial.clear()?;
        let kind = match blob.hash {
            ContentHash::Sha256(_) => "SHA-256",
            ContentHash::Git(_) => "Git hash",
        };
        Err(Error::network(format!("`{what}` was damaged during the download"))
            .found(format!("{kind} {found}"))
            .expected(blob.hash.name())
            .hint("run the same command again: the damaged download was removed"))
    }

    /// Links a content into the directory of a commit, and returns its path.
    pub(crate) fn place(&self, commit: &str, file: &str, blob: &Blob) -> Result<PathBuf> {
        if !is_commit(commit) || !is_inside(file) {
            return Err(
                Error::network("the hub sent a name that is not a valid path").found(format!("{commit:?}, {file:?}"))
            );
        }
        let path = self.folder.join("snapshots").join(commit).join(file);
        let up = "../".repeat(file.split('/').count() + 1);
        let target = format!("{up}blobs/{}", blob.hash.name());
        if path.read_link().is_ok_and(|now| now == Path::new(&target)) {
            return Ok(path);
        }
        if let Ok(metadata) = path.symlink_metadata()
            && !metadata.is_symlink()
        {
            // Some tools copy where they cannot link. An existing file is not changed.
            return if metadata.is_file() && metadata.len() == blob.size {
                Ok(path)
            } else {
                Err(
                    Error::format("the cache already contains a different file at this path")
                        .at_path(&path)
                        .found(format!("{} bytes", metadata.len()))
                        .expected(format!("a link to a file of {} bytes", blob.size))
                        .hint("remove the file, and run the same command again"),
                )
            };
        }
        if let Some(parent) = path.parent() {
            files::create_dir_all(parent)?;
        }
        files::link(Path::new(&target), &path)?;
        Ok(path)
    }

    fn list(&self, commit: &str) -> PathBuf {
        self.folder.join("lists").join(format!("{commit}.json"))
    }

    /// The names of all files of a commit. `None`: no list is stored, or it cannot be read.
    pub(crate) fn names(&self, commit: &str) -> Option<Vec<String>> {
        let names: Vec<String> = serde_json::from_slice(&files::read(&self.list(commit)).ok()?).ok()?;
        names.iter().all(|name| is_inside(name)).then_some(names)
    }

    /// Stores the names of all files of a commit: without a network, what is in the cache may be a part of them.
    pub(crate) fn keep_names<'a>(&self, commit: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
        let path = self.list(commit);
        if !is_commit(commit) || path.is_file() {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            files::create_dir_all(parent)?;
        }
        let names: Vec<&String> = names.collect();
        let text =
            serde_json::to_vec(&names).map_err(|e| Error::internal("a list of files cannot be written").cause(e))?;
        files::write_atomic(&path, &text)
    }

    /// Stores the commit of a revision.
    pub(crate) fn remember(&self, revision: &str, commit: &str) -> Result<()> {
        if is_commit(revision) || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        if let Some(parent) = path.parent() {
            files::create_dir_all(parent)?;
        }
        files::write_atomic(&path, commit.as_bytes())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hashes_become_names() {
        let git = "3f20b51a0a25d87c30cb636d2875b09456ec3b12";
        assert_eq!(ContentHash::parse(git), Some(ContentHash::Git(git.into())));
        assert_eq!(ContentHash::parse(&"a".repeat(64)).unwrap().name().len(), 64);
        let dots = format!("../../{}", "a".repeat(34));
        let nul = format!("\0{}", "a".repeat(39));
        for bad in [
            "",
            "..",
            "/etc/passwd",
            "ABCDEF",
            &"A".repeat(40),
            &"a".repeat(41),
            &dots,
            &nul,
            &"é".repeat(20),
        ] {
            assert_eq!(ContentHash::parse(bad), None, "{bad:?}");
            assert!(!is_commit(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_place_is_inside_the_cache_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        let store = RepositoryStore::new(dir.path(), "models", "a/b");
        let commit = "0".repeat(40);
        let blob = Blob {
            size: 3,
            hash: ContentHash::Git("1".repeat(40)),
        };
        for (commit, file) in [
            ("..", "x"),
            (commit.as_str(), "../x"),
            (&commit, "/x"),
            (&commit, "a/../../x"),
        ] {
            assert!(store.place(commit, file, &blob).is_err());
        }
        files::create_dir_all(&dir.path().join("models--a--b/blobs")).unwrap();
        std::fs::write(store.blob(&blob.hash), "abc").unwrap();
        let path = store.place(&commit, "sub/x.json", &blob).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abc");
        assert_eq!(store.place(&commit, "sub/x.json", &blob).unwrap(), path);
        // A link to another content is replaced, a file is not.
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("../../../blobs/old", &path).unwrap();
        store.place(&commit, "sub/x.json", &blob).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abc");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine!").unwrap();
        assert!(store.place(&commit, "sub/x.json", &blob).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"mine!");
    }
}
