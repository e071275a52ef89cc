//! Error messages for hub failures; they never contain the token or a password.

use crate::HubSettings;
use crate::http::HttpFault;
use ft_base::{Error, ErrorKind};

/// The requested object.
#[derive(Clone, Copy)]
pub(crate) struct RequestedObject<'a> {
    /// `"model"` or `"dataset"`.
    pub kind: &'static str,
    pub id: &'a str,
    pub revision: &'a str,
    pub file: Option<&'a str>,
}

/// A text of a server for an error: without control characters and secrets, and not long.
pub(crate) fn quoted(settings: &HubSettings, text: &str) -> String {
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    // Scrub before truncation: otherwise a part of the token could remain.
    settings.scrub(text.trim()).chars().take(600).collect()
}

pub(crate) fn explain(e: &HttpFault, wanted: RequestedObject, settings: &HubSettings) -> Error {
    let RequestedObject {
        kind,
        id,
        revision,
        file,
    } = wanted;
    let at = match file {
        Some(file) => format!("{}/{id}, revision {revision}, {file}", settings.public_endpoint()),
        None => format!("{}/{id}, revision {revision}", settings.public_endpoint()),
    };
    let of = |kind: ErrorKind, what: String| Error::of(kind, what).at(settings.scrub(&at));
    let say = |what: String| of(ErrorKind::Network, what);
    let none = |what: String| of(ErrorKind::NotFound, what);
    // The error may quote the server's answer, which may quote the request.
    let cause = || {
        let text = match e {
            HttpFault::Status { status, text, .. } => format!("HTTP status {status}: {text}"),
            HttpFault::Unreachable(text) | HttpFault::Untrusted(text) => text.clone(),
        };
        quoted(settings, &text)
    };
    let gated = e.code() == Some("GatedRepo");
    match (e.status(), settings.token.is_some()) {
        (Some(401 | 403), true) if !gated => {
            say(format!("the hub does not allow this token to read the {kind} `{id}`")).hint(
                "HF_TOKEN (or the stored token) may be wrong, expired or without read access: create a new one in the \
                 hub's settings; check the id too, because the hub returns the same error if it does not exist",
            )
        }
        (Some(401 | 403), _) if gated => say(format!("the {kind} `{id}` is gated"))
            .hint("accept its terms on its page on the hub, then set HF_TOKEN to a token of that account"),
        (Some(401 | 403), _) => none(format!("the {kind} `{id}` does not exist, or it is private or gated"))
            .hint("check the id; for a private or gated repository set HF_TOKEN to a token with read access"),
        (Some(404), _) if e.code() == Some("RevisionNotFound") => {
            none(format!("the {kind} `{id}` has no revision `{revision}`"))
                .hint("use a branch, a tag or a full commit hash of that repository; the default is `main`")
        }
        (Some(404), _) if e.code() == Some("EntryNotFound") && file.is_some() => {
            none(format!("the {kind} `{id}` has no file `{}`", file.unwrap_or_default()))
        }
        (Some(404), _) => none(format!("the hub has no {kind} `{id}` with revision `{revision}`"))
            .hint("check the id and the revision; if this is a local directory, its path does not exist"),
        (Some(429), _) => say("the hub limits the request rate".into())
            .hint("wait some minutes, or set HF_TOKEN: the limit is higher for accounts"),
        (Some(_), _) => say("the hub failed".into())
            .cause(cause())
            .hint("try again later; downloaded data is kept"),
        (None, _) => match e {
            HttpFault::Untrusted(_) => say("the hub sent an invalid response".into())
                .cause(cause())
                .hint("a mirror (HF_ENDPOINT) or a proxy may change the responses of the hub: use another one"),
            _ => say("cannot reach the hub".into()).cause(cause()).hint(
                "check the network and HF_ENDPOINT; if the files are in the cache already, set HF_HUB_OFFLINE=1; \
                 downloaded data is kept",
            ),
        },
    }
}

/// The error if offline and not cached.
pub(crate) fn not_cached(wanted: RequestedObject, settings: &HubSettings) -> Error {
    let what = match wanted.file {
        Some(file) => format!(
            "`{file}` of the {} `{}` is not in the local cache",
            wanted.kind, wanted.id
        ),
        None => format!("the {} `{}` is not in the local cache", wanted.kind, wanted.id),
    };
    let error = Error::not_found(what).at_path(&settings.cache);
    if settings.offline {
        error
            .found(format!(
                "offline mode, and no complete copy of revision {}",
                wanted.revision
            ))
            .hint("unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to download it, or give a local path")
    } else {
        error.hint("connect to the network to download it, or give a local path")
    }
}
