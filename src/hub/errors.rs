//! What went wrong at the hub, in words; the token is in none of them.

use crate::base::Error;
use crate::hub::HubSettings;
use hf_hub::HFError;

/// What was asked for.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// `"model"` or `"data set"`.
    pub kind: &'static str,
    pub id: &'a str,
    pub revision: &'a str,
    pub file: Option<&'a str>,
}

/// The HTTP status behind an error, if a server answered.
pub(crate) fn status(e: &HFError) -> Option<u16> {
    match e {
        HFError::AuthRequired { .. } => Some(401),
        HFError::Forbidden { .. } => Some(403),
        HFError::RepoNotFound { .. } | HFError::RevisionNotFound { .. } | HFError::EntryNotFound { .. } => Some(404),
        HFError::RateLimited { .. } => Some(429),
        HFError::Http { context } => Some(context.status.as_u16()),
        _ => None,
    }
}

/// The network or the server failed in a way that another attempt may cure.
pub(crate) fn is_passing(e: &HFError) -> bool {
    match e {
        HFError::Request { .. } | HFError::CacheLockTimeout { .. } => true,
        _ => matches!(status(e), Some(408 | 429 | 500 | 502 | 503 | 504)),
    }
}

/// The hub's own word for what is missing (`RepoNotFound`, `GatedRepo`, ...).
fn code(e: &HFError) -> Option<&str> {
    let context = match e {
        HFError::AuthRequired { context } | HFError::Forbidden { context } | HFError::Http { context } => context,
        HFError::RepoNotFound { context: Some(c), .. } | HFError::RevisionNotFound { context: Some(c), .. } => c,
        _ => return None,
    };
    context.error_code.as_deref()
}

pub(crate) fn explain(e: &HFError, wanted: Wanted, settings: &HubSettings) -> Error {
    let Wanted {
        kind,
        id,
        revision,
        file,
    } = wanted;
    let at = match file {
        Some(file) => format!("{}/{id}, revision {revision}, {file}", settings.endpoint),
        None => format!("{}/{id}, revision {revision}", settings.endpoint),
    };
    let say = |what: String| Error::new(what).at(settings.scrub(&at));
    // The text of an error may quote the answer of the server, and that the request.
    let cause = || {
        let mut text = e.to_string();
        let mut source = std::error::Error::source(e);
        while let Some(inner) = source {
            let inner_text = inner.to_string();
            if !text.contains(&inner_text) {
                text.push_str(": ");
                text.push_str(&inner_text);
            }
            source = inner.source();
        }
        settings.scrub(text.chars().take(600).collect::<String>().trim())
    };
    let gated = code(e) == Some("GatedRepo");
    match (status(e), settings.token.is_some()) {
        (Some(401 | 403), true) if !gated => say(format!("the hub does not let this token read the {kind} `{id}`")).hint(
            "HF_TOKEN (or the stored token) may be wrong, expired or without read access: make a new one in the hub's \
             settings; check the id too, as the hub answers the same when it does not exist",
        ),
        (Some(401 | 403), _) if gated => say(format!("the {kind} `{id}` is gated"))
            .hint("accept its terms on its page on the hub, then set HF_TOKEN to a token of that account"),
        (Some(401 | 403), _) => say(format!("the {kind} `{id}` does not exist, or it is private or gated")).hint(
            "check the id; for a private or gated one set HF_TOKEN to a token that may read it",
        ),
        (Some(404), _) if code(e) == Some("RevisionNotFound") => say(format!("the {kind} `{id}` has no revision `{revision}`"))
            .hint("use a branch, a tag or a full commit hash of that repository; the default is `main`"),
        (Some(404), _) if matches!(e, HFError::EntryNotFound { .. }) && file.is_some() => {
            say(format!("the {kind} `{id}` has no file `{}`", file.unwrap_or_default()))
        }
        (Some(404), _) => say(format!("there is no {kind} `{id}` with a revision `{revision}` on the hub")).hint(
            "check the id and the revision; if a local directory was meant, its path does not exist",
        ),
        (Some(429), _) => say("the hub asks to slow down".into()).hint("wait some minutes, or set HF_TOKEN: accounts may ask more often"),
        (Some(_), _) => say("the hub failed".into()).cause(cause()).hint("try again later; what is downloaded is kept"),
        (None, _) => match e {
            HFError::Request { .. } => say("cannot reach the hub".into()).cause(cause()).hint(
                "check the network and HF_ENDPOINT; if the files are in the cache already, set HF_HUB_OFFLINE=1; \
                 what is downloaded is kept",
            ),
            HFError::LocalEntryNotFound { .. } => not_cached(wanted, settings),
            HFError::Io(_) => say("cannot write to the cache".into())
                .cause(cause())
                .hint(format!("check space and permissions of {}, or set HF_HUB_CACHE", settings.cache.display())),
            HFError::CacheLockTimeout { .. } => say("another process holds the cache".into()).hint("wait for it to end"),
            _ => say("the download failed".into()).cause(cause()),
        },
    }
}

/// Offline, and the cache does not have it.
pub(crate) fn not_cached(wanted: Wanted, settings: &HubSettings) -> Error {
    let what = match wanted.file {
        Some(file) => format!(
            "`{file}` of the {} `{}` is not in the local cache",
            wanted.kind, wanted.id
        ),
        None => format!("the {} `{}` is not in the local cache", wanted.kind, wanted.id),
    };
    let error = Error::new(what).at_path(&settings.cache);
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
