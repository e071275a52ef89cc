//! Uploads files in one commit: large files by Git LFS, the others inside the commit.
//!
//! The hub says for each file how it wants it, and whether it has it already: what arrived is not sent again, and a commit
//! that would change nothing is not made. The token goes to the hub's own address only; a server for large files gets the
//! headers that the hub names.

use super::{LocalFile, Upload, UploadContent, UploadReport};
use crate::HubSettings;
use crate::errors::{RequestedObject, explain, quoted};
use crate::http::{Client, HttpFault, HttpResult, encode};
use ft_base::progress::{self, Phase};
use ft_base::{Error, Result, files};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::io::{Cursor, Read, Seek, SeekFrom};

/// Bytes of a file that the hub sees to decide between text and large file.
const SAMPLE: usize = 512;
/// Files of one question.
const AT_ONCE: usize = 256;
/// The media type of Git LFS.
const LFS: &str = "application/vnd.git-lfs+json";
const JSON: &str = "application/json";

/// A file with what the hub and this machine know of it.
struct PlannedFile<'a> {
    file: &'a LocalFile,
    size: u64,
    large: bool,
    /// SHA-256 of a large file, else empty.
    sha256: String,
}

/// What an upload asks of a hub.
pub(super) trait UploadRequests {
    /// As `Client::post`.
    fn post(&self, url: &str, kind: &str, body: &[u8]) -> HttpResult<Value>;

    /// As `Client::put`.
    fn put(&self, url: &str, headers: &[(String, String)], body: impl Read, length: u64) -> HttpResult<Option<String>>;

    /// True if the token can read this repository.
    fn has(&self, id: &str) -> bool;
}

impl UploadRequests for Client {
    fn post(&self, url: &str, kind: &str, body: &[u8]) -> HttpResult<Value> {
        Client::post(self, url, kind, body)
    }

    fn put(&self, url: &str, headers: &[(String, String)], body: impl Read, length: u64) -> HttpResult<Option<String>> {
        Client::put(self, url, headers, body, length)
    }

    fn has(&self, id: &str) -> bool {
        self.json(&format!("/api/models/{id}")).is_ok()
    }
}

/// As `upload`, after its checks.
pub(super) fn send(settings: &HubSettings, upload: &Upload) -> Result<UploadReport> {
    send_by(&Client::new(settings)?, settings, upload)
}

/// As `send`, with another way to ask.
pub(super) fn send_by<C: UploadRequests>(client: &C, settings: &HubSettings, upload: &Upload) -> Result<UploadReport> {
    FileSender {
        settings,
        client,
        upload,
    }
    .run()
}

struct FileSender<'a, C> {
    settings: &'a HubSettings,
    client: &'a C,
    upload: &'a Upload<'a>,
}

impl<C: UploadRequests> FileSender<'_, C> {
    fn run(&self) -> Result<UploadReport> {
        let asking = progress::phase(format!("requesting {} from the hub", self.upload.id), 0, "");
        self.create()?;
        let mut planned = Vec::new();
        let mut kept = 0;
        let modes = self.modes()?;
        drop(asking);
        for (file, (large, known)) in self.upload.files.iter().zip(modes) {
            let (size, mut sha256) = (file.size()?, String::new());
            let own = if large {
                sha256 = self.sha256(file, size)?;
                sha256.clone()
            } else {
                blob_id(&file.bytes(u64::MAX)?)
            };
            if known.is_some_and(|known| known == own) {
                kept += 1;
                continue;
            }
            planned.push(PlannedFile {
                file,
                size,
                large,
                sha256,
            });
        }
        let url = format!("{}/{}", self.settings.public_endpoint(), self.upload.id);
        if planned.is_empty() {
            return Ok(UploadReport {
                url,
                commit: None,
                sent: 0,
                kept,
            });
        }
        let sent = self.send_large(&planned)?;
        let commit = self.commit(&planned)?;
        Ok(UploadReport {
            url,
            commit: Some(commit),
            sent,
            kept,
        })
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.settings.endpoint.trim_end_matches('/'))
    }

    fn revision(&self) -> String {
        encode(self.upload.revision).replace('/', "%2F")
    }

    fn fault(&self, e: &HttpFault, file: Option<&str>) -> Error {
        let wanted = RequestedObject {
            kind: "model",
            id: self.upload.id,
            revision: self.upload.revision,
            file,
        };
        match e.status() {
            Some(401 | 403) => Error::network(format!(
                "the hub does not allow this token to write `{}`",
                self.upload.id
            ))
            .at(self.settings.public_endpoint())
            .hint("HF_TOKEN needs write access to this owner: create such a token in the hub's settings"),
            None if matches!(e, HttpFault::Unreachable(_)) => explain(e, wanted, self.settings)
                .hint("check the network and HF_ENDPOINT, then upload again: what arrived is not sent again"),
            Some(500..) => explain(e, wanted, self.settings).hint("try again later: what arrived is not sent again"),
            _ => explain(e, wanted, self.settings),
        }
    }

    /// Repeats a request after faults that may pass.
    fn retry<T>(&self, file: Option<&str>, mut ask: impl FnMut() -> Result<HttpResult<T>>) -> Result<T> {
        let mut wait = self.settings.wait;
        for attempt in 1.. {
            match ask()? {
                Ok(answer) => return Ok(answer),
                Err(e) if e.is_passing() && attempt < self.settings.attempts => {
                    std::thread::sleep(wait);
                    wait *= 2;
                    progress::phase("waiting for the hub", 0, "").unless_stopped()?;
                }
                Err(e) => return Err(self.fault(&e, file)),
            }
        }
        Err(Error::internal("no attempt was made"))
    }

    fn post(&self, path: &str, kind: &str, body: &[u8]) -> Result<Value> {
        self.retry(None, || Ok(self.client.post(&self.url(path), kind, body)))
    }

    /// Makes the repository, unless it is there.
    fn create(&self) -> Result<()> {
        let (owner, name) = self.upload.id.split_once('/').ok_or_else(|| {
            Error::usage("the repository has no owner")
                .found(self.upload.id)
                .expected("`owner/name`")
        })?;
        let body = json!({"name": name, "organization": owner, "type": "model", "private": self.upload.private});
        let body = body.to_string();
        let url = self.url("/api/repos/create");
        self.retry(None, || {
            Ok(match self.client.post(&url, JSON, body.as_bytes()) {
                // It exists. A token for one repository may not create any, and need not.
                Err(e) if e.status() == Some(409) => Ok(()),
                Err(e) if e.status() == Some(403) && self.client.has(self.upload.id) => Ok(()),
                other => other.map(|_| ()),
            })
        })
    }

    /// For each file: whether the hub wants it as a large file, and the hash of the file that it has.
    fn modes(&self) -> Result<Vec<(bool, Option<String>)>> {
        let mut out = Vec::new();
        for chunk in self.upload.files.chunks(AT_ONCE) {
            let mut files = Vec::new();
            for file in chunk {
                let sample = base64(&file.bytes(SAMPLE as u64)?);
                files.push(json!({"path": file.name, "sample": sample, "size": file.size()?}));
            }
            let body = json!({ "files": files }).to_string();
            let path = format!("/api/models/{}/preupload/{}", self.upload.id, self.revision());
            let answer = self.post(&path, JSON, body.as_bytes())?;
            let said = answer["files"].as_array().cloned().unwrap_or_default();
            for file in chunk {
                let one = said.iter().find(|one| one["path"] == file.name.as_str());
                let mode = one.and_then(|one| one["uploadMode"].as_str());
                let mode = mode.filter(|mode| ["lfs", "regular"].contains(mode));
                let mode = mode.ok_or_else(|| self.odd(format!("it does not say how it wants `{}`", file.name)))?;
                // A server for large files refuses an empty one.
                let large = mode == "lfs" && file.size()? > 0;
                out.push((large, one.and_then(|one| Some(one["oid"].as_str()?.to_string()))));
            }
        }
        Ok(out)
    }

    fn odd(&self, text: String) -> Error {
        self.fault(&HttpFault::Untrusted(text), None)
    }

    fn sha256(&self, file: &LocalFile, size: u64) -> Result<String> {
        let phase = progress::bytes(format!("hashing {}", file.name), size);
        let mut reader = phase.reader(file.part(0, size)?);
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            phase.unless_stopped()?;
            let n = reader
                .read(&mut buffer)
                .map_err(|e| Error::io("cannot read the file").at(&file.name).cause(e))?;
            if n == 0 {
                return Ok(hex(&hash.finalize()));
            }
            hash.update(&buffer[..n]);
        }
    }

    /// Sends the large files that the hub does not have. Returns their bytes.
    fn send_large(&self, planned: &[PlannedFile]) -> Result<u64> {
        let large: Vec<&PlannedFile> = planned.iter().filter(|p| p.large).collect();
        if large.is_empty() {
            return Ok(0);
        }
        let objects: Vec<Value> = large.iter().map(|p| json!({"oid": p.sha256, "size": p.size})).collect();
        let body = json!({"operation": "upload", "transfers": ["basic", "multipart"], "objects": objects,
            "hash_algo": "sha256", "ref": {"name": self.upload.revision}});
        let path = format!("/{}.git/info/lfs/objects/batch", self.upload.id);
        let answer = self.post(&path, LFS, body.to_string().as_bytes())?;
        let mut sent = 0;
        for planned in large {
            let said = answer["objects"].as_array().into_iter().flatten();
            let object = said.into_iter().find(|o| o["oid"] == planned.sha256.as_str());
            let object = object.ok_or_else(|| self.odd(format!("it does not answer for `{}`", planned.file.name)))?;
            if let Some(text) = object["error"]["message"].as_str() {
                return Err(Error::network("the hub refuses a file")
                    .at(&planned.file.name)
                    .cause(quoted(self.settings, text)));
            }
            let upload = &object["actions"]["upload"];
            // Without an action the hub has the bytes: of another repository, or of an upload that broke.
            if upload.is_null() {
                continue;
            }
            let phase = progress::bytes(format!("uploading {}", planned.file.name), planned.size);
            match upload["header"]["chunk_size"].as_str().map(str::parse::<u64>) {
                None => self.send_whole(planned, upload, &phase)?,
                Some(Ok(piece @ 1..)) => self.send_parts(planned, upload, piece, &phase)?,
                Some(_) => return Err(self.odd("the size of its parts is not a number".into())),
            }
            sent += planned.size;
            let verify = &object["actions"]["verify"];
            if let Some(href) = verify["href"].as_str() {
                let body = json!({"oid": planned.sha256, "size": planned.size}).to_string();
                let name = Some(planned.file.name.as_str());
                self.retry(name, || Ok(self.client.post(href, LFS, body.as_bytes()).map(|_| ())))?;
            }
        }
        Ok(sent)
    }

    fn send_whole(&self, planned: &PlannedFile, action: &Value, phase: &Phase) -> Result<()> {
        let href = action["href"].as_str().unwrap_or_default();
        let headers: Vec<(String, String)> = action["header"]
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_string())))
            .collect();
        self.retry(Some(&planned.file.name), || {
            phase.set(0);
            phase.unless_stopped()?;
            let body = phase.reader(planned.file.part(0, planned.size)?);
            Ok(self.client.put(href, &headers, body, planned.size).map(|_| ()))
        })
    }

    /// Sends a file in parts, each to an address of its own, then says their tags.
    fn send_parts(&self, planned: &PlannedFile, action: &Value, piece: u64, phase: &Phase) -> Result<()> {
        let name = planned.file.name.as_str();
        let mut parts = Vec::new();
        for number in 1..=planned.size.div_ceil(piece) {
            let found = action["header"].as_object().into_iter().flatten().find(|(key, _)| {
                // The keys are numbers, some with zeros before them.
                key.parse::<u64>() == Ok(number)
            });
            let href = found.and_then(|(_, value)| value.as_str());
            let href = href.ok_or_else(|| self.odd(format!("part {number} of `{name}` has no address")))?;
            let from = (number - 1) * piece;
            let length = piece.min(planned.size - from);
            let tag = self.retry(Some(name), || {
                phase.set(from);
                phase.unless_stopped()?;
                let body = phase.reader(planned.file.part(from, length)?);
                Ok(self.client.put(href, &[], body, length))
            })?;
            let tag = tag.ok_or_else(|| self.odd(format!("part {number} of `{name}` has no tag")))?;
            parts.push(json!({"partNumber": number, "etag": tag}));
        }
        let href = action["href"].as_str().unwrap_or_default();
        let body = json!({"oid": planned.sha256, "parts": parts}).to_string();
        self.retry(Some(name), || {
            Ok(self.client.post(href, LFS, body.as_bytes()).map(|_| ()))
        })
    }

    /// Makes the commit. Returns its hash.
    fn commit(&self, planned: &[PlannedFile]) -> Result<String> {
        let mut lines = vec![json!({"key": "header", "value": {"summary": self.upload.message, "description": ""}})];
        for p in planned {
            let value = if p.large {
                json!({"key": "lfsFile", "value": {"path": p.file.name, "algo": "sha256", "oid": p.sha256, "size": p.size}})
            } else {
                let content = base64(&p.file.bytes(u64::MAX)?);
                json!({"key": "file", "value": {"content": content, "path": p.file.name, "encoding": "base64"}})
            };
            lines.push(value);
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let path = format!("/api/models/{}/commit/{}", self.upload.id, self.revision());
        let answer = self.post(&path, "application/x-ndjson", body.as_bytes())?;
        let commit = answer["commitOid"].as_str().unwrap_or_default();
        let valid = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_hexdigit());
        if !valid {
            return Err(self.odd("its answer names no commit".into()));
        }
        Ok(commit.to_string())
    }
}

/// The id of a file in Git.
fn blob_id(bytes: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()).as_bytes());
    hash.update(bytes);
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * i)) as usize & 63] as char;
            out.push(if i > three.len() { '=' } else { letter });
        }
    }
    out
}

impl LocalFile {
    /// Bytes `from..from + length` of the file.
    fn part(&self, from: u64, length: u64) -> Result<Box<dyn Read + Send>> {
        match &self.content {
            UploadContent::Bytes(bytes) => {
                let mut all = Cursor::new(bytes.clone());
                all.set_position(from);
                Ok(Box::new(all.take(length)))
            }
            UploadContent::Path(path) => {
                let mut file = files::open(path)?;
                let moved = file.seek(SeekFrom::Start(from));
                moved.map_err(|e| Error::io("cannot read the file").at_path(path).cause(e))?;
                Ok(Box::new(file.take(length)))
            }
        }
    }

    fn bytes(&self, most: u64) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        self.part(0, most)?
            .read_to_end(&mut out)
            .map_err(|e| Error::io("cannot read the file").at(&self.name).cause(e))?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        let known = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
        ];
        for (plain, encoded) in known {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
        // `git hash-object` of an empty file.
        assert_eq!(blob_id(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
    }
}
