//! Downloads files of one repository into the cache; resumes and verifies them.

use crate::errors::{RequestedObject, explain, not_cached};
use crate::http::{Client, HttpFault, HttpResult, encode, next_page};
use crate::store::{Blob, CACHE_HINT, ContentHash, RepositoryStore, is_commit};
use crate::{HubSettings, HubStatus, is_inside};
use ft_base::partial::PartialFile;
use ft_base::progress::{self, Phase};
use ft_base::{Error, ErrorKind, Result, units};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Number of pieces downloaded in parallel.
const PARALLEL: u64 = 4;
/// Largest number of pages of a file list.
const PAGES: usize = 2000;
/// Most memory of a file list, bytes: about a million files with usual names.
const LIST: usize = 256 << 20;
/// Counted for a file of a list beside its name: hash, size, and the entry itself.
const ENTRY: usize = 200;

/// A small public model that every hub has.
const PUBLIC: &str = "openai-community/gpt2";

/// Sends the first request of every download and returns how the hub responds.
pub(super) fn ask(settings: &HubSettings) -> HubStatus {
    let begun = std::time::Instant::now();
    let client = match Client::new(settings) {
        Ok(client) => client,
        Err(e) => return HubStatus::Failed(e.what().to_string()),
    };
    let Err(e) = client.json(&format!("/api/models/{PUBLIC}/revision/main")) else {
        return HubStatus::Reached(begun.elapsed());
    };
    match (&e, e.status()) {
        // A mirror may not have this model, or may not list files.
        (_, Some(404 | 405 | 501)) => HubStatus::Reached(begun.elapsed()),
        (_, Some(401 | 403)) if settings.token.is_some() => HubStatus::Refused,
        (_, Some(status)) => HubStatus::Failed(format!("the server returned HTTP status {status}")),
        (HttpFault::Unreachable(text) | HttpFault::Untrusted(text), None) => HubStatus::Failed(settings.scrub(text)),
        (HttpFault::Status { text, .. }, None) => HubStatus::Failed(settings.scrub(text)),
    }
}

/// One repository at one revision.
pub(crate) struct Repository<'a> {
    client: Client,
    settings: &'a HubSettings,
    wanted: RequestedObject<'a>,
    store: RepositoryStore,
    /// `models` or `datasets`.
    plural: &'static str,
    /// The hub's file list; `None` if offline, or if the hub does not list files.
    listing: Option<BTreeMap<String, Blob>>,
    /// The commit of the revision, once the hub has sent it.
    commit: OnceLock<String>,
    /// Use only the cache: by request, or because the network is down.
    offline: bool,
}

impl<'a> Repository<'a> {
    /// Opens a repository: asks the hub for its file list, unless offline.
    ///
    /// Errors: no access, or not found. Without a network it continues offline if the revision is cached.
    pub(crate) fn open(settings: &'a HubSettings, plural: &'static str, wanted: RequestedObject<'a>) -> Result<Self> {
        let mut out = Self {
            client: Client::new(settings)?,
            settings,
            wanted,
            store: RepositoryStore::new(&settings.cache, plural, wanted.id),
            plural,
            listing: None,
            commit: OnceLock::new(),
            offline: settings.offline,
        };
        if settings.offline {
            if out.snapshot().is_none() {
                return Err(not_cached(wanted, settings));
            }
            return Ok(out);
        }
        let _asking = progress::phase(format!("requesting {} from the hub", wanted.id), 0, "");
        match out.retry(|| out.list()) {
            Ok((commit, listing)) => {
                let _ = out.commit.set(commit);
                out.listing = Some(listing);
            }
            // A mirror may serve files without listing them; then every file is requested by name.
            Err(e) if matches!(e.status(), Some(404 | 405 | 501)) && e.code().is_none() => {}
            Err(e) if e.is_passing() && out.snapshot().is_some() => out.offline = true,
            Err(e) => return Err(explain(&e, wanted, settings)),
        }
        Ok(out)
    }

    pub(crate) fn is_offline(&self) -> bool {
        self.offline
    }

    /// Files in the repository, if the hub lists them; offline as an earlier download stored them.
    pub(crate) fn names(&self) -> Option<Vec<String>> {
        match &self.listing {
            Some(listing) => Some(listing.keys().cloned().collect()),
            None if self.offline => self.store.names(&self.store.commit(self.wanted.revision)?),
            None => None,
        }
    }

    /// The cached directory of this revision, if it exists.
    pub(crate) fn snapshot(&self) -> Option<PathBuf> {
        self.store.snapshot(&self.store.commit(self.wanted.revision)?)
    }

    /// The commit of the revision, and its files.
    fn list(&self) -> HttpResult<(String, BTreeMap<String, Blob>)> {
        let api = format!("/api/{}/{}", self.plural, self.wanted.id);
        let revision = encode(self.wanted.revision).replace('/', "%2F");
        let (info, _) = self
            .client
            .json(&format!("{api}/revision/{revision}?expand%5B%5D=sha"))?;
        let commit = info["sha"].as_str().unwrap_or_default().to_string();
        if !is_commit(&commit) {
            return Err(HttpFault::Untrusted(format!("{commit:?} is not a valid commit name")));
        }
        let first = format!("{api}/tree/{commit}?recursive=true");
        let files = files_of(first, |page| {
            let (entries, headers) = self.client.json(page)?;
            Ok((entries, next_page(&headers, &self.client)?))
        })?;
        Ok((commit, files))
    }

    /// The URL path of a file at the commit, or at the revision while the commit is unknown.
    fn path_of(&self, file: &str) -> String {
        let kind = if self.plural == "datasets" { "datasets/" } else { "" };
        let revision = self.commit.get().map_or(self.wanted.revision, String::as_str);
        let revision = encode(revision).replace('/', "%2F");
        format!("/{kind}{}/resolve/{revision}/{}", self.wanted.id, encode(file))
    }

    /// Requests the metadata of a file that the hub does not list.
    fn ask(&self, file: &str) -> HttpResult<Blob> {
        let found = self.client.file(&self.path_of(file), None, true)?;
        let header = |name: &str| found.hub.get(name).and_then(|v| v.to_str().ok());
        let (commit, blob) = blob_of_headers(header, found.redirected)?;
        if *self.commit.get_or_init(|| commit.clone()) != commit {
            return Err(HttpFault::Untrusted("the commit changed between two responses".into()));
        }
        Ok(blob)
    }

    /// A file of the repository in the cache; `None` if the repository does not have it.
    pub(crate) fn optional(&self, file: &str) -> Result<Option<PathBuf>> {
        let wanted = RequestedObject {
            file: Some(file),
            ..self.wanted
        };
        let cached = || self.snapshot().map(|s| s.join(file)).filter(|p| p.exists());
        if self.offline {
            let found = cached();
            let was_listed = || self.names().is_some_and(|names| names.iter().any(|name| name == file));
            // An interrupted download is no repository without this file.
            return if found.is_none() && was_listed() {
                Err(not_cached(wanted, self.settings))
            } else {
                Ok(found)
            };
        }
        let blob = match &self.listing {
            Some(listing) => match listing.get(file) {
                Some(blob) => blob.clone(),
                None => return Ok(None),
            },
            None => match self.retry(|| self.ask(file)) {
                Ok(blob) => blob,
                Err(e) if e.status() == Some(404) && matches!(e.code(), None | Some("EntryNotFound")) => {
                    return Ok(None);
                }
                Err(e) if e.is_passing() && cached().is_some() => return Ok(cached()),
                Err(e) => return Err(explain(&e, wanted, self.settings)),
            },
        };
        match self.stored(file, &blob, wanted) {
            // Only the cache is read and written there.
            Err(e) if e.kind() == ErrorKind::Io => Err(e.hint(CACHE_HINT)),
            path => path.map(Some),
        }
    }

    /// Downloads a file if the cache does not have it, and gives it its name there.
    fn stored(&self, file: &str, blob: &Blob, wanted: RequestedObject) -> Result<PathBuf> {
        let is_there = self.store.has(blob);
        if !is_there && let (Some(commit), Some(listing)) = (self.commit.get(), &self.listing) {
            self.store.keep_names(commit, listing.keys())?;
        }
        if !is_there
            && let Err(e) = self.fill(file, blob, wanted)
            // Another process may have completed the file in the meantime.
            && (matches!(e.kind(), ErrorKind::Signal(_)) || !self.store.has(blob))
        {
            return Err(e);
        }
        let commit = self.commit.get().map_or("", String::as_str);
        let path = self.store.place(commit, file, blob)?;
        self.store.remember(self.wanted.revision, commit)?;
        Ok(path)
    }

    /// A file that must exist.
    pub(crate) fn required(&self, file: &str) -> Result<PathBuf> {
        let wanted = RequestedObject {
            file: Some(file),
            ..self.wanted
        };
        match self.optional(file)? {
            Some(path) => Ok(path),
            None if self.offline => Err(not_cached(wanted, self.settings)),
            None => {
                let missing = HttpFault::Status {
                    status: 404,
                    code: Some("EntryNotFound".into()),
                    text: String::new(),
                };
                Err(explain(&missing, wanted, self.settings))
            }
        }
    }

    /// Downloads the content of a file into the cache; continues an earlier attempt.
    fn fill(&self, file: &str, blob: &Blob, wanted: RequestedObject) -> Result<()> {
        let mut partial = self.store.partial(blob)?;
        if self.store.has(blob) {
            // Another process has completed it; this one may have made a new file.
            return partial.remove_if_empty();
        }
        if partial.length() > blob.size {
            partial.clear()?;
        }
        let phase = self.phase(file, blob.size, partial.length());
        let (mut failures, mut parallel) = (0, 1);
        while partial.length() < blob.size {
            let before = partial.length();
            match self.batch(file, blob, &mut partial, parallel, phase.as_ref())? {
                None => (failures, parallel) = (0, PARALLEL),
                Some(e) => {
                    // A batch that received some data resets the failure count.
                    failures = if partial.length() > before { 1 } else { failures + 1 };
                    if !e.is_passing() || failures >= self.settings.attempts {
                        return Err(explain(&e, wanted, self.settings));
                    }
                    std::thread::sleep(self.settings.wait * (1 << (failures - 1).min(6)));
                }
            }
        }
        drop(phase);
        let _checking = progress::phase(progress::about("checking", Path::new(file)), 0, "");
        let at = format!("{}/{}", self.settings.public_endpoint(), self.wanted.id);
        self.store.finish(partial, blob, file).map_err(|e| e.or_at(at))
    }

    /// Downloads the next pieces in parallel and appends them in order; returns the first failure, if any. A request
    /// for a single piece may be answered with the whole file, if the server does not support ranges.
    fn batch(
        &self,
        file: &str,
        blob: &Blob,
        partial: &mut PartialFile,
        parallel: u64,
        phase: Option<&Phase>,
    ) -> Result<Option<HttpFault>> {
        let piece = self.settings.piece.max(1);
        let start = partial.length();
        let ranges: Vec<Range<u64>> = (0..parallel)
            .map(|i| (start + i * piece).min(blob.size)..(start + (i + 1) * piece).min(blob.size))
            .filter(|r| !r.is_empty())
            .collect();
        let path = self.path_of(file);
        if let [range] = ranges.as_slice() {
            let found = match self.client.file(&path, Some(range.clone()), false) {
                Ok(found) => found,
                Err(e) => return Ok(Some(e)),
            };
            let whole = found.response.status().as_u16() == 200;
            let end = if whole { blob.size } else { range.end };
            if whole && start > 0 {
                partial.clear()?;
            }
            let mut body = found.response.into_body().into_reader();
            return append(&mut body, end, partial, phase);
        }
        let get = |range: &Range<u64>| -> HttpResult<Vec<u8>> {
            let found = self.client.file(&path, Some(range.clone()), false)?;
            if found.response.status().as_u16() != 206 {
                return Err(HttpFault::Untrusted(
                    "the full file instead of the requested range".into(),
                ));
            }
            let length = range.end - range.start;
            let mut bytes = Vec::new();
            // Reads at most the requested bytes, whatever length the server announces.
            let mut body = found.response.into_body().into_reader().take(length);
            body.read_to_end(&mut bytes)
                .map_err(|e| HttpFault::Unreachable(e.to_string()))?;
            if bytes.len() as u64 == length {
                Ok(bytes)
            } else {
                Err(HttpFault::Unreachable(format!(
                    "{} of {length} bytes received",
                    bytes.len()
                )))
            }
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranges.iter().map(|r| scope.spawn(|| get(r))).collect();
            threads.into_iter().map(|t| t.join()).collect()
        });
        for result in results {
            match result {
                Ok(Ok(bytes)) => partial.append(&bytes)?,
                Ok(Err(e)) => return Ok(Some(e)),
                Err(_) => return Err(Error::network("the download failed with an error inside its library").at(file)),
            }
            show(phase, partial.length());
        }
        Ok(None)
    }

    fn phase(&self, file: &str, size: u64, done: u64) -> Option<Phase> {
        let name = file.rsplit('/').next().unwrap_or(file);
        let phase = self
            .settings
            .progress
            .then(|| progress::bytes(format!("downloading {name}"), size));
        show(phase.as_ref(), done);
        phase
    }

    /// Retries after transient failures.
    fn retry<R>(&self, mut send: impl FnMut() -> HttpResult<R>) -> HttpResult<R> {
        let mut wait = self.settings.wait;
        for _ in 1..self.settings.attempts {
            match send() {
                Err(e) if e.is_passing() && e.status() != Some(429) => std::thread::sleep(wait),
                other => return other,
            }
            wait *= 2;
        }
        send()
    }
}

/// Appends received bytes until the file is `end` bytes long.
fn append(
    body: &mut dyn Read,
    end: u64,
    partial: &mut PartialFile,
    phase: Option<&Phase>,
) -> Result<Option<HttpFault>> {
    let mut buffer = vec![0u8; 1 << 18];
    while partial.length() < end {
        let most = (end - partial.length()).min(buffer.len() as u64) as usize;
        match body.read(&mut buffer[..most]) {
            Ok(0) => return Ok(Some(HttpFault::Unreachable("the connection ended early".into()))),
            Ok(n) => partial.append(&buffer[..n])?,
            Err(e) => return Ok(Some(HttpFault::Unreachable(e.to_string()))),
        }
        show(phase, partial.length());
    }
    Ok(None)
}

fn show(phase: Option<&Phase>, done: u64) {
    phase.iter().for_each(|phase| phase.set(done));
}

/// The files of a list in pages. `page` returns the entries of a page, and the path of the next page.
fn files_of(
    first: String,
    mut page: impl FnMut(&str) -> HttpResult<(Value, Option<String>)>,
) -> HttpResult<BTreeMap<String, Blob>> {
    let too_long = |found: String| HttpFault::Untrusted(format!("the file list is too long: {found}"));
    let (mut files, mut memory) = (BTreeMap::new(), 0);
    let mut visited = BTreeSet::new();
    let mut next = Some(first);
    while let Some(link) = next {
        if visited.len() == PAGES {
            return Err(too_long(format!("more than {PAGES} pages")));
        }
        let (entries, after) = page(&link)?;
        let entries = entries
            .as_array()
            .ok_or_else(|| HttpFault::Untrusted("the file list is not a JSON array".into()))?;
        for (path, blob) in entries.iter().filter_map(blob_of) {
            memory += path.len() + ENTRY;
            if memory > LIST {
                return Err(too_long(format!("more than {}", units::bytes(LIST as u64))));
            }
            files.insert(path, blob);
        }
        visited.insert(link);
        if after.as_ref().is_some_and(|link| visited.contains(link)) {
            return Err(HttpFault::Untrusted(
                "a page of the file list leads back to an earlier page".into(),
            ));
        }
        next = after;
    }
    Ok(files)
}

/// The names in the only page of a hub's list of files. `None`: it is not such a list. For the fuzz targets.
pub fn listed(page: &[u8]) -> Option<Vec<String>> {
    let entries: Value = serde_json::from_slice(page).ok()?;
    let files = files_of(String::new(), |_| Ok((entries.clone(), None))).ok()?;
    Some(files.into_keys().collect())
}

/// The commit and the file of a response to a request for metadata. `text` returns the value of a header.
fn blob_of_headers<'a>(text: impl Fn(&str) -> Option<&'a str>, redirected: bool) -> HttpResult<(String, Blob)> {
    let commit = text("x-repo-commit").unwrap_or_default();
    if !is_commit(commit) {
        return Err(HttpFault::Untrusted(format!("{commit:?} is not a valid commit name")));
    }
    let tag = text("x-linked-etag").or(text("etag")).unwrap_or_default();
    let tag = tag.strip_prefix("W/").unwrap_or(tag).trim_matches('"');
    let hash = ContentHash::parse(tag)
        .ok_or_else(|| HttpFault::Untrusted(format!("{:?} is not a valid file hash", shorten(tag))))?;
    // The content length of a redirect is that of its own body.
    let size = text("x-linked-size").or(text("content-length").filter(|_| !redirected));
    let size = size
        .and_then(|s| s.parse().ok())
        .ok_or_else(|| HttpFault::Untrusted("the file has no size".into()))?;
    Ok((commit.to_string(), Blob { size, hash }))
}

/// Commit, hash and size of a file by lines `name: value`. `None`: they do not describe a file. For the fuzz targets.
pub fn described(head: &str, redirected: bool) -> Option<(String, String, u64)> {
    let lines: BTreeMap<&str, &str> = head.lines().filter_map(|line| line.split_once(": ")).collect();
    let (commit, blob) = blob_of_headers(|name| lines.get(name).copied(), redirected).ok()?;
    Some((commit, blob.hash.name().to_string(), blob.size))
}

/// A file of the hub's list; `None`: a directory, a name outside the repository, or no hash.
fn blob_of(entry: &Value) -> Option<(String, Blob)> {
    let path = entry["path"].as_str().filter(|p| is_inside(p) && p.len() <= 1024)?;
    if entry["type"] != "file" {
        return None;
    }
    let lfs = &entry["lfs"];
    // The hub calls the hash of a large file `oid`; some mirrors call it `sha256`.
    let large = ["oid", "sha256"].iter().find_map(|key| lfs[*key].as_str());
    let (hash, size) = if lfs.is_object() {
        (large, lfs["size"].as_u64().or(entry["size"].as_u64()))
    } else {
        (entry["oid"].as_str(), entry["size"].as_u64())
    };
    let hash = ContentHash::parse(hash?)?;
    Some((path.to_string(), Blob { size: size?, hash }))
}

fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_list_gives_only_names_inside_and_whole_hashes() {
        let (git, sha) = ("1".repeat(40), "2".repeat(64));
        let small = json!({"type": "file", "path": "a/b.json", "oid": git, "size": 3});
        assert_eq!(blob_of(&small).unwrap().1.hash, ContentHash::Git(git.clone()));
        let large = json!({"type": "file", "path": "m", "oid": git, "size": 9, "lfs": {"oid": sha, "size": 9}});
        assert_eq!(blob_of(&large).unwrap().1.hash, ContentHash::Sha256(sha));
        for (key, bad) in [
            ("path", json!("../x")),
            ("path", json!("/etc/x")),
            ("path", json!("a\0b")),
            ("oid", json!("../../x")),
            ("oid", json!("/x")),
            ("oid", json!("a".repeat(100_000))),
            ("size", json!(-1)),
            ("type", json!("directory")),
        ] {
            let mut entry = small.clone();
            entry[key] = bad;
            assert!(blob_of(&entry).is_none(), "{key}");
        }
    }

    fn entry(path: String) -> Value {
        json!({"type": "file", "path": path, "oid": "1".repeat(40), "size": 3})
    }

    /// The text of the fault, and the number of pages that were requested.
    fn fault(page: impl Fn(usize) -> (Value, Option<String>)) -> (String, usize) {
        let mut pages = 0;
        let found = files_of("/0".into(), |_| {
            pages += 1;
            Ok(page(pages))
        });
        let Err(HttpFault::Untrusted(text)) = found else {
            panic!("accepted");
        };
        (text, pages)
    }

    #[test]
    fn a_list_has_an_end() {
        let mut asked = Vec::new();
        let files = files_of("/0".into(), |link| {
            asked.push(link.to_string());
            let next = (asked.len() < PAGES).then(|| format!("/{}", asked.len()));
            Ok((json!([entry(format!("{}.json", asked.len()))]), next))
        });
        assert_eq!(files.unwrap().len(), PAGES);
        assert_eq!(asked.len(), PAGES);
        assert_eq!(asked[..2], ["/0", "/1"]);
        // New links without an end.
        let (text, pages) = fault(|n| (json!([]), Some(format!("/{n}"))));
        assert!(text.contains("more than 2000 pages"), "{text}");
        assert_eq!(pages, PAGES);
        // A page that follows itself, and a circle of three.
        for (circle, expected) in [(1, 1), (3, 3)] {
            let (text, pages) = fault(|n| (json!([]), Some(format!("/{}", n % circle))));
            assert!(text.contains("an earlier page"), "{text}");
            assert_eq!(pages, expected);
        }
    }

    #[test]
    fn a_list_has_a_limit_of_memory() {
        let long = "a".repeat(1000);
        let (text, pages) = fault(|n| {
            let names = (0..10_000).map(|i| entry(format!("{long}/{n}/{i}")));
            (names.collect(), Some(format!("/{n}")))
        });
        assert!(text.contains("too long") && text.contains("more than 256"), "{text}");
        assert_eq!(pages, LIST / (10_000 * (1000 + ENTRY)) + 1);
    }
}
