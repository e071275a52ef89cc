//! HTTP requests to a hub. A hub is not trusted: a mirror may be hostile, and a connection may be intercepted.
//! Redirects are followed here, so that the token is sent only to the hub's own address.

use crate::HubSettings;
use ft_base::{Error, Result};
use std::io::Read;
use std::time::Duration;
use ureq::http::uri::Authority;
use ureq::http::{HeaderMap, Request, Response, Uri, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

/// Largest number of redirects of a file.
const REDIRECTS: usize = 8;
/// Size limit of a response that is not a file, bytes.
const ANSWER: u64 = 64 << 20;
const ERROR_TEXT: u64 = 4 << 10;

/// Reason for a failed request.
#[derive(Debug)]
pub(crate) enum HttpFault {
    /// The server responded with this status; `code` is the hub's error code (`RepoNotFound`, `GatedRepo`, ...).
    Status {
        status: u16,
        code: Option<String>,
        text: String,
    },
    /// No response, or an incomplete one.
    Unreachable(String),
    /// A response that ft rejects.
    Untrusted(String),
}

impl HttpFault {
    pub(crate) fn status(&self) -> Option<u16> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::Status { code, .. } => code.as_deref(),
            _ => None,
        }
    }

    /// True if another attempt may succeed.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Untrusted(_) => false,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500 | 502 | 503 | 504),
        }
    }
}

pub(crate) type HttpResult<T> = std::result::Result<T, HttpFault>;

pub(crate) struct Client {
    agent: Agent,
    endpoint: Uri,
    address: String,
    bearer: Option<String>,
}

/// The response to a file request: headers of the hub, and the response of the server that has the file.
pub(crate) struct FileResponse {
    pub hub: HeaderMap,
    pub redirected: bool,
    pub response: Response<Body>,
}

impl Client {
    /// Errors: an invalid address; a token that would be sent over an unencrypted connection.
    pub(crate) fn new(settings: &HubSettings) -> Result<Self> {
        let wrong = |cause: String| {
            Error::usage("the hub address cannot be used")
                .found(format!("`{}`", settings.scrub(&settings.public_endpoint())))
                .cause(cause)
                .hint("HF_ENDPOINT must be a URL such as `https://huggingface.co`")
        };
        let endpoint: Uri = settings.endpoint.parse().map_err(|e| wrong(format!("{e}")))?;
        let scheme = endpoint.scheme_str().unwrap_or_default().to_string();
        let host = endpoint.host().unwrap_or_default();
        if !["http", "https"].contains(&scheme.as_str()) || host.is_empty() {
            return Err(wrong("it has no `https://` and host".into()));
        }
        if !endpoint.authority().is_some_and(is_host_and_port) || endpoint.query().is_some() {
            return Err(wrong("it has a user name or a query, or an invalid host".into()));
        }
        let open = scheme == "http" && !is_loopback(host);
        if open && settings.token.is_some() && !settings.insecure_token {
            return Err(Error::usage("the token would be sent unencrypted")
                .at(settings.public_endpoint())
                .found("a hub address with `http://`, and a token (HF_TOKEN, or a stored one)")
                .expected("`https://`")
                .hint(
                    "use an https address; without a token: unset HF_TOKEN and set HF_HUB_DISABLE_IMPLICIT_TOKEN=1; \
                     to send it anyway, set FT_HUB_HTTP_TOKEN=1",
                ));
        }
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_response_header_size(64 << 10)
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .accept_encoding("identity")
            .user_agent(concat!("ft/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls)
            .build()
            .new_agent();
        Ok(Self {
            agent,
            endpoint,
            address: settings.endpoint.trim_end_matches('/').to_string(),
            bearer: settings.token.as_ref().map(|t| format!("Bearer {t}")),
        })
    }

    /// A JSON response of the hub's API, and its headers. `path` is URL-encoded.
    pub(crate) fn json(&self, path: &str) -> HttpResult<(serde_json::Value, HeaderMap)> {
        let found = self.send("GET", &format!("{}{path}", self.address), None, true)?;
        let mut text = Vec::new();
        let mut body = found.response.into_body().into_reader().take(ANSWER + 1);
        body.read_to_end(&mut text)
            .map_err(|e| HttpFault::Unreachable(e.to_string()))?;
        if text.len() as u64 > ANSWER {
            return Err(HttpFault::Untrusted("the response is too long".into()));
        }
        let value = serde_json::from_slice(&text)
            .map_err(|e| HttpFault::Untrusted(format!("the response is not valid JSON: {e}")))?;
        Ok((value, found.hub))
    }

    /// A file, or bytes `range` of it. `path` is URL-encoded. With `head` only the hub's headers.
    pub(crate) fn file(&self, path: &str, range: Option<std::ops::Range<u64>>, head: bool) -> HttpResult<FileResponse> {
        let range = range.map(|r| format!("bytes={}-{}", r.start, r.end - 1));
        let method = if head { "HEAD" } else { "GET" };
        self.send(method, &format!("{}{path}", self.address), range, false)
    }

    /// `own`: the response must come from the hub's own address. A HEAD request follows only redirects within the hub,
    /// because the hub's headers are already complete.
    fn send(&self, method: &str, url: &str, range: Option<String>, own: bool) -> HttpResult<FileResponse> {
        let mut at: Uri = url.parse().map_err(|e| HttpFault::Untrusted(format!("{e}")))?;
        let mut hub: Option<HeaderMap> = None;
        for _ in 0..REDIRECTS {
            let (home, bearer) = (same_server(&at, &self.endpoint), self.bearer_at(&at));
            let mut request = Request::builder().method(method).uri(&at);
            if let Some(range) = &range {
                request = request.header(header::RANGE, range);
            }
            if let Some(bearer) = bearer {
                request = request.header(header::AUTHORIZATION, bearer);
            }
            let request = request.body(()).map_err(|e| HttpFault::Untrusted(e.to_string()))?;
            let response = self.agent.run(request).map_err(|e| match e {
                ureq::Error::Protocol(e) => HttpFault::Unreachable(format!("not an HTTP response: {e}")),
                e => HttpFault::Unreachable(e.to_string()),
            })?;
            let status = response.status().as_u16();
            let headers = response.headers().clone();
            let to = headers.get(header::LOCATION).and_then(|l| l.to_str().ok());
            if let (301 | 302 | 303 | 307 | 308, Some(to)) = (status, to) {
                let next = self.target(&at, to)?;
                let leaves = !same_server(&next, &self.endpoint);
                if leaves && own {
                    return Err(HttpFault::Untrusted("its API redirects to another address".into()));
                }
                // The hub's metadata of a file is in the response that redirects to another server.
                if leaves && home {
                    hub = Some(headers.clone());
                }
                if leaves && method == "HEAD" {
                    return Ok(FileResponse {
                        hub: headers,
                        redirected: true,
                        response,
                    });
                }
                at = next;
                continue;
            }
            if !response.status().is_success() {
                return Err(refused(response));
            }
            return Ok(FileResponse {
                redirected: hub.is_some(),
                hub: hub.unwrap_or(headers),
                response,
            });
        }
        Err(HttpFault::Untrusted(format!("more than {REDIRECTS} redirects")))
    }

    /// Posts a body of this media type, and returns the JSON answer (null if there is none). The token is sent if the
    /// address is the hub's own.
    pub(crate) fn post(&self, url: &str, kind: &str, body: &[u8]) -> HttpResult<serde_json::Value> {
        let accept = if kind.contains("lfs") { kind } else { "application/json" };
        let headers = [("content-type", kind), ("accept", accept)];
        let response = self.request(
            "POST",
            url,
            &headers,
            ureq::SendBody::from_reader(&mut &*body),
            body.len() as u64,
        )?;
        let mut text = Vec::new();
        let mut body = response.into_body().into_reader().take(ANSWER);
        body.read_to_end(&mut text)
            .map_err(|e| HttpFault::Unreachable(e.to_string()))?;
        answer_of(&text)
    }

    /// Puts `length` bytes at an address that the hub named, with the headers that it named. Returns the tag of the bytes.
    pub(crate) fn put(
        &self,
        url: &str,
        headers: &[(String, String)],
        mut body: impl Read,
        length: u64,
    ) -> HttpResult<Option<String>> {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let response = self.request("PUT", url, &headers, ureq::SendBody::from_reader(&mut body), length)?;
        let tag = response.headers().get(header::ETAG).and_then(|t| t.to_str().ok());
        Ok(tag.map(str::to_string))
    }

    /// Sends a body. A redirect is a fault: the body is gone.
    fn request(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: ureq::SendBody,
        length: u64,
    ) -> HttpResult<Response<Body>> {
        let request = self.with_body(method, url, headers, body, length)?;
        let response = self
            .agent
            .run(request)
            .map_err(|e| HttpFault::Unreachable(e.to_string()))?;
        let status = response.status().as_u16();
        match status {
            200..300 => Ok(response),
            300..400 => Err(HttpFault::Untrusted(format!(
                "it redirects an upload (HTTP status {status})"
            ))),
            _ => Err(refused(response)),
        }
    }

    /// A request with a body of `length` bytes.
    pub(crate) fn with_body<B>(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: B,
        length: u64,
    ) -> HttpResult<Request<B>> {
        let at = self.target(&self.endpoint, url)?;
        let mut request = Request::builder().method(method).uri(&at);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request = request.header(header::CONTENT_LENGTH, length);
        // A server for large files has its own credentials in the address or the headers.
        if let Some(bearer) = self.bearer_at(&at).filter(|_| method == "POST") {
            request = request.header(header::AUTHORIZATION, bearer);
        }
        request.body(body).map_err(|e| HttpFault::Untrusted(e.to_string()))
    }

    /// The token, if it may be sent to this address.
    fn bearer_at(&self, at: &Uri) -> Option<&String> {
        self.bearer.as_ref().filter(|_| same_server(at, &self.endpoint))
    }

    /// The target of a redirect. Errors: not an HTTP server, or a change from https to http.
    fn target(&self, from: &Uri, to: &str) -> HttpResult<Uri> {
        let scheme = from.scheme_str().unwrap_or("https");
        let authority = from.authority().map_or("", |a| a.as_str());
        let whole = match to {
            t if t.starts_with("//") => format!("{scheme}:{t}"),
            t if t.starts_with('/') => format!("{scheme}://{authority}{t}"),
            t => t.to_string(),
        };
        let next: Uri = whole
            .parse()
            .map_err(|_| HttpFault::Untrusted("a redirect to an invalid address".into()))?;
        let secure = next.scheme_str() == Some("https");
        let plain = next.scheme_str() == Some("http") && self.endpoint.scheme_str() == Some("http");
        if (secure || plain) && next.authority().is_some_and(is_host_and_port) {
            Ok(next)
        } else {
            Err(HttpFault::Untrusted(
                "a redirect that does not use https, or that has no host".into(),
            ))
        }
    }
}

/// The JSON of the answer to a post; null if there is none.
pub(crate) fn answer_of(text: &[u8]) -> HttpResult<serde_json::Value> {
    if text.is_empty() || text == b"OK" {
        return Ok(serde_json::Value::Null);
    }
    serde_json::from_slice(text).map_err(|e| HttpFault::Untrusted(format!("the response is not valid JSON: {e}")))
}

/// True if the server of an address is a host, with or without a port, and nothing else: no user name, and no text behind the bracket
/// of an IPv6 address, which the parser of addresses accepts.
fn is_host_and_port(server: &Authority) -> bool {
    let host = server.host();
    let port = server.port().map_or(String::new(), |port| format!(":{port}"));
    !host.is_empty() && server.as_str() == format!("{host}{port}")
}

fn same_server(a: &Uri, b: &Uri) -> bool {
    let port = |u: &Uri| {
        u.port_u16().or(match u.scheme_str() {
            Some("https") => Some(443),
            _ => Some(80),
        })
    };
    let host = |u: &Uri| u.host().unwrap_or_default().to_ascii_lowercase();
    a.scheme_str() == b.scheme_str() && host(a) == host(b) && port(a) == port(b)
}

/// True for the local machine.
fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// URL-encodes a path: everything except letters, digits and `-._~` is encoded, `/` stays.
pub(crate) fn encode(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for b in path.bytes() {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => out.push(b as char),
            _ => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

/// The next page of a list: the path of a link to the hub itself.
pub(crate) fn next_page(headers: &HeaderMap, client: &Client) -> HttpResult<Option<String>> {
    let links = headers
        .get(header::LINK)
        .and_then(|l| l.to_str().ok())
        .unwrap_or_default();
    let Some(next) = links.split(',').find(|l| l.contains("rel=\"next\"")) else {
        return Ok(None);
    };
    let address = next
        .trim()
        .strip_prefix('<')
        .and_then(|l| l.split_once('>'))
        .map_or("", |(a, _)| a);
    let here = client.endpoint.clone();
    let uri = client.target(&here, address)?;
    let path = uri.path_and_query().map_or("/", |p| p.as_str());
    let below = client.endpoint.path().trim_end_matches('/');
    match path.strip_prefix(below).filter(|_| same_server(&uri, &client.endpoint)) {
        Some(path) => Ok(Some(path.to_string())),
        None => Err(HttpFault::Untrusted(
            "the next page of a list is at another address".into(),
        )),
    }
}

/// For the fuzzer: where a redirect of the hub leads, and whether the token is sent there.
#[doc(hidden)]
pub fn redirected(settings: &HubSettings, from: &str, to: &str) -> Option<(String, bool)> {
    let client = Client::new(settings).ok()?;
    let next = client.target(&from.parse::<Uri>().ok()?, to).ok()?;
    let with_token = client.bearer_at(&next).is_some();
    Some((next.to_string(), with_token))
}

/// For the fuzzer: the address of the next page of a list by a `Link` header.
#[doc(hidden)]
pub fn paged(settings: &HubSettings, link: &str) -> Option<String> {
    let client = Client::new(settings).ok()?;
    let mut headers = HeaderMap::new();
    headers.insert(header::LINK, link.parse().ok()?);
    let path = next_page(&headers, &client).ok()??;
    Some(format!("{}{path}", client.address))
}

/// The status, the code and the text of an error that a server sent.
fn refused(response: Response<Body>) -> HttpFault {
    let status = response.status().as_u16();
    let code = response.headers().get("x-error-code").and_then(|c| c.to_str().ok());
    let code = code.map(str::to_string);
    let mut text = Vec::new();
    let _ = response
        .into_body()
        .into_reader()
        .take(ERROR_TEXT)
        .read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text).into_owned();
    HttpFault::Status { status, code, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(endpoint: &str, token: Option<&str>, insecure_token: bool) -> Result<Client> {
        Client::new(&HubSettings {
            endpoint: endpoint.into(),
            token: token.map(str::to_string),
            insecure_token,
            ..HubSettings::default()
        })
    }

    #[test]
    fn a_token_goes_over_https_or_stays_on_this_machine() {
        for good in [
            "https://hub.example",
            "http://localhost:8080",
            "http://127.0.0.1:1/sub",
            "http://[::1]:80",
        ] {
            assert!(client(good, Some("hf_x"), false).is_ok(), "{good}");
        }
        assert!(client("http://hub.example", None, false).is_ok());
        assert!(client("http://hub.example", Some("hf_x"), true).is_ok());
        for open in [
            "http://hub.example",
            "http://10.0.0.1",
            "http://localhost.example",
            "http://127.0.0.1.example",
        ] {
            let e = client(open, Some("hf_x"), false).err().unwrap().to_string();
            assert!(
                e.contains("unencrypted") && e.contains("FT_HUB_HTTP_TOKEN") && !e.contains("hf_x"),
                "{e}"
            );
        }
        for bad in [
            "no url",
            "ftp://hub.example",
            "https://",
            "https://me@hub.example",
            "file:///etc",
            "https://h/?q=1",
            "https://[::1]4",
        ] {
            assert!(
                client(bad, None, false)
                    .err()
                    .unwrap()
                    .to_string()
                    .contains("HF_ENDPOINT"),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_password_in_the_address_is_in_no_message() {
        for bad in [
            "https://me:s3cretpw@mirror.example",
            "https://me:s3cretpw@mirror.example/a b",
            "https://mirror.example/?token=s3cretpw",
            "ftp://me:s3cretpw@mirror.example",
            "me:s3cretpw@mirror.example",
        ] {
            let e = client(bad, Some("hf_x"), false).err().unwrap().to_string();
            assert!(e.contains("mirror.example") && !e.contains("s3cretpw"), "{e}");
        }
    }

    #[test]
    fn redirects_stay_on_web_servers_and_on_https() {
        let client = client("https://hub.example/base", None, false).unwrap();
        let from: Uri = "https://hub.example/a/b".parse().unwrap();
        let to = |t: &str| client.target(&from, t).map(|u| u.to_string());
        assert_eq!(to("/x?y=1").unwrap(), "https://hub.example/x?y=1");
        assert_eq!(to("//cdn.example/x").unwrap(), "https://cdn.example/x");
        assert_eq!(to("https://cdn.example/x").unwrap(), "https://cdn.example/x");
        assert_eq!(to("https://[::1]:80/x").unwrap(), "https://[::1]:80/x");
        for bad in [
            "http://hub.example/x",
            "file:///etc/passwd",
            "x",
            "",
            "https://a@b/x",
            "ftp://x/y",
            "https:///x",
            "https://[::1]4/x",
            "https://[::1]evil.example/x",
        ] {
            assert!(to(bad).is_err(), "{bad}");
        }
        let page = |link: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::LINK, link.parse().unwrap());
            next_page(&headers, &client)
        };
        let next = page("<https://hub.example/base/api/x?cursor=2>; rel=\"next\"").unwrap();
        assert_eq!(next.unwrap(), "/api/x?cursor=2");
        assert!(
            page("<https://hub.example/base/api/x>; rel=\"prev\"")
                .unwrap()
                .is_none()
        );
        assert!(page("<https://evil.example/base/api/x>; rel=\"next\"").is_err());
        assert!(page("<https://hub.example/other>; rel=\"next\"").is_err());
        assert_eq!(encode("a b/ü#?%.json"), "a%20b/%C3%BC%23%3F%25.json");
    }
}
