//! The files of an upload to a repository of a hub; `send` uploads them.

#[cfg(feature = "hub")]
mod recorded;
#[cfg(feature = "hub")]
mod send;

// For the fuzz targets.
#[cfg(feature = "hub")]
#[doc(hidden)]
pub use recorded::{RecordedRequest, uploaded};

use crate::HubSettings;
use ft_base::{Error, Result, files};
use std::path::PathBuf;

/// The bytes of a file to upload.
#[derive(Debug, Clone)]
pub enum UploadContent {
    /// A file on this machine.
    Path(PathBuf),
    /// These bytes.
    Bytes(Vec<u8>),
}

/// A file to upload.
#[derive(Debug, Clone)]
pub struct LocalFile {
    /// Its path in the repository, with `/`.
    pub name: String,
    /// Its bytes.
    pub content: UploadContent,
}

impl LocalFile {
    /// The number of bytes.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn size(&self) -> Result<u64> {
        match &self.content {
            UploadContent::Bytes(bytes) => Ok(bytes.len() as u64),
            UploadContent::Path(path) => files::size(path),
        }
    }
}

/// The files of an upload, and its repository.
#[derive(Debug, Clone)]
pub struct Upload<'a> {
    /// The repository, `owner/name`. It is made if it does not exist.
    pub id: &'a str,
    /// The branch.
    pub revision: &'a str,
    /// The first line of the commit's message.
    pub message: &'a str,
    /// A new repository is visible to its owner only.
    pub private: bool,
    /// The files; other files of the repository stay.
    pub files: &'a [LocalFile],
}

/// The result of an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadReport {
    /// The page of the repository.
    pub url: String,
    /// The hash of the commit; `None`: the repository has all files already.
    pub commit: Option<String>,
    /// Bytes of large files that were sent now.
    pub sent: u64,
    /// Files that the hub had already.
    pub kept: usize,
}

/// Checks the names of a repository and of its branch.
///
/// # Errors
/// One of them is not a name.
pub fn check_target(id: &str, revision: &str) -> Result<()> {
    if !crate::is_id(id) {
        return Err(Error::usage("this is not a repository of a hub")
            .found(format!("`{id}`"))
            .expected("`owner/name`, of letters, digits, `-`, `_` and `.`"));
    }
    crate::check_revision(revision)
}

/// Uploads files in one commit. Files that the hub has already are not sent again, so an upload that broke is repeated.
///
/// # Errors
/// No token, or one without write access; no network; a file cannot be read; the hub refuses a file.
pub fn upload(settings: &HubSettings, upload: &Upload) -> Result<UploadReport> {
    check_target(upload.id, upload.revision)?;
    if settings.offline {
        return Err(Error::usage("an upload needs the network").hint("unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"));
    }
    if settings.token.is_none() {
        return Err(Error::usage("an upload needs a token")
            .expected("HF_TOKEN, or the token that `hf auth login` stores")
            .hint("create a token with write access in the hub's settings"));
    }
    #[cfg(feature = "hub")]
    return send::send(settings, upload);
    #[cfg(not(feature = "hub"))]
    Err(Error::unsupported("this build of ft cannot upload").hint("build it with the feature `hub`"))
}
