//! Hub settings from the environment, read once: the variables of the Hugging Face tools.

use ft_base::{files, secrets};
use std::path::PathBuf;
use std::time::Duration;

/// Address of the hub, location of the cache, and credentials.
#[derive(Clone)]
pub struct HubSettings {
    /// The directory with `models--org--name/...`.
    pub cache: PathBuf,
    /// Address of the hub, without a slash at its end.
    pub endpoint: String,
    /// The access token; `None`: anonymous.
    pub token: Option<String>,
    /// Send the token over unencrypted `http://` too.
    pub insecure_token: bool,
    /// Use only the cache.
    pub offline: bool,
    /// Show a progress bar (on stderr, when it is a terminal).
    pub progress: bool,
    /// Number of consecutive failed attempts before a download is abandoned.
    pub attempts: usize,
    /// Delay after the first failed attempt; it doubles after each further one.
    pub wait: Duration,
    /// Bytes per request.
    pub piece: u64,
}

impl Default for HubSettings {
    fn default() -> Self {
        Self {
            cache: PathBuf::from(".cache/huggingface/hub"),
            endpoint: "https://huggingface.co".into(),
            token: None,
            insecure_token: false,
            offline: false,
            progress: true,
            attempts: 5,
            wait: Duration::from_millis(300),
            piece: 16 << 20,
        }
    }
}

impl std::fmt::Debug for HubSettings {
    /// The token is never printed.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubSettings")
            .field("cache", &self.cache)
            .field("endpoint", &self.public_endpoint())
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("offline", &self.offline)
            .finish()
    }
}

impl HubSettings {
    /// Reads HF_HUB_CACHE, HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE and related variables.
    #[allow(clippy::disallowed_methods)] // these variables are part of the hub's interface
    pub fn from_env() -> Self {
        Self::from_lookup(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
    }

    /// As `from_env`, with a custom lookup function.
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Self {
        let truthy = |name: &str| {
            get(name).is_some_and(|v| matches!(v.trim().to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"))
        };
        let user = PathBuf::from(get("HOME").unwrap_or_else(|| ".".into()));
        let expand = |path: String| match path.strip_prefix("~/") {
            Some(rest) => user.join(rest),
            None => PathBuf::from(path),
        };
        let home = get("HF_HOME").map(expand).unwrap_or_else(|| {
            get("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .unwrap_or_else(|| user.join(".cache"))
                .join("huggingface")
        });
        let cache = get("HF_HUB_CACHE")
            .or_else(|| get("HUGGINGFACE_HUB_CACHE"))
            .map(expand)
            .unwrap_or_else(|| home.join("hub"));
        let stored = || {
            let path = get("HF_TOKEN_PATH").map(expand).unwrap_or_else(|| home.join("token"));
            files::read_text(&path).ok()
        };
        let implicit = !truthy("HF_HUB_DISABLE_IMPLICIT_TOKEN");
        let token = get("HF_TOKEN").or_else(|| if implicit { stored() } else { None });
        let default = Self::default();
        Self {
            cache,
            endpoint: get("HF_ENDPOINT")
                .map(|e| e.trim_end_matches('/').to_string())
                .unwrap_or(default.endpoint),
            token: token.map(|t| t.trim().to_string()).filter(|t| !t.is_empty()),
            insecure_token: truthy("FT_HUB_HTTP_TOKEN"),
            offline: truthy("HF_HUB_OFFLINE") || truthy("TRANSFORMERS_OFFLINE"),
            progress: !truthy("HF_HUB_DISABLE_PROGRESS_BARS"),
            ..Self::default()
        }
    }

    /// The address of the hub for output: without a user name, a password and a query.
    pub fn public_endpoint(&self) -> String {
        secrets::bare_address(&self.endpoint)
    }

    /// Removes the token from `text`, for messages, and what looks like another secret, such as the password of a proxy.
    pub fn scrub(&self, text: &str) -> String {
        match &self.token {
            Some(token) => secrets::mask(&text.replace(token.as_str(), "<token>")),
            None => secrets::mask(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn from(pairs: &[(&str, &str)]) -> HubSettings {
        let pairs: Vec<(String, String)> = pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        HubSettings::from_lookup(move |name| pairs.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()))
    }

    #[test]
    fn the_names_of_the_hugging_face_tools_have_an_effect() {
        let s = from(&[("HOME", "/h")]);
        assert_eq!(s.cache, Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(
            (s.endpoint.as_str(), s.offline, s.token.is_some()),
            ("https://huggingface.co", false, false)
        );
        assert_eq!(
            from(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).cache,
            Path::new("/x/huggingface/hub")
        );
        assert_eq!(from(&[("HF_HOME", "/f")]).cache, Path::new("/f/hub"));
        assert_eq!(
            from(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]).cache,
            Path::new("/c")
        );
        assert_eq!(from(&[("HOME", "/h"), ("HF_HOME", "~/f")]).cache, Path::new("/h/f/hub"));
        assert_eq!(from(&[("HF_ENDPOINT", "http://m/")]).endpoint, "http://m");
        for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
            assert!(from(&[(name, "1")]).offline && from(&[(name, "True")]).offline && !from(&[(name, "0")]).offline);
        }
        assert!(!from(&[("HF_HUB_DISABLE_PROGRESS_BARS", "1")]).progress);
    }

    #[test]
    fn the_token_is_found_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hf_stored\n").unwrap();
        let home = dir.path().to_str().unwrap();
        assert_eq!(from(&[("HF_HOME", home)]).token.as_deref(), Some("hf_stored"));
        let s = from(&[("HF_HOME", home), ("HF_TOKEN", " hf_secret ")]);
        assert_eq!(s.token.as_deref(), Some("hf_secret"));
        assert!(
            from(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")])
                .token
                .is_none()
        );
        assert!(!format!("{s:?}").contains("hf_secret"));
        assert_eq!(s.scrub("Bearer hf_secret!"), "Bearer <token>!");
        assert_eq!(
            s.scrub("proxy http://me:pw@proxy:3128 failed"),
            "proxy http://<secret>@proxy:3128 failed"
        );
        let s = from(&[("HOME", "/h"), ("HF_ENDPOINT", "https://me:s3cretpw@m.example/x?key=q")]);
        assert_eq!(s.public_endpoint(), "https://m.example/x");
        assert!(!format!("{s:?}").contains("s3cretpw"));
    }
}
