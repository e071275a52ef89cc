//! For the fuzzer: an upload whose answers are in memory. Nothing is sent.

use super::send::{UploadRequests, send_by};
use super::{Upload, UploadReport};
use crate::HubSettings;
use crate::http::{Client, HttpFault, HttpResult, answer_of};
use ft_base::Result;
use serde_json::Value;
use std::cell::{Cell, RefCell};
use std::io::{self, Read};
use ureq::http::header;

/// A request that an upload would have sent.
#[derive(Debug)]
pub struct RecordedRequest {
    /// Its address.
    pub url: String,
    /// True if ft added the token.
    pub has_token: bool,
    /// Bytes of a large file in it.
    pub sent: u64,
}

struct Recorded<'a> {
    client: Client,
    bearer: String,
    /// The answers that were not given yet.
    rest: Cell<Option<&'a [u8]>>,
    asked: RefCell<Vec<RecordedRequest>>,
}

impl Recorded<'_> {
    fn ask(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: impl Read,
        length: u64,
    ) -> HttpResult<Vec<u8>> {
        let mut request = self.client.with_body(method, url, headers, body, length)?;
        let copied = io::copy(request.body_mut(), &mut io::sink());
        let is_bearer = |value: &[u8]| value == self.bearer.as_bytes();
        let values = request.headers().get_all(header::AUTHORIZATION).iter();
        let all = values.filter(|value| is_bearer(value.as_bytes())).count();
        // A hub may name the same header.
        let named = headers
            .iter()
            .filter(|(name, value)| name.eq_ignore_ascii_case("authorization") && is_bearer(value.as_bytes()));
        self.asked.borrow_mut().push(RecordedRequest {
            url: request.uri().to_string(),
            has_token: all > named.count(),
            sent: copied.unwrap_or(0),
        });
        self.answer()
    }

    /// The next line. `!403 text` is an error of the server.
    fn answer(&self) -> HttpResult<Vec<u8>> {
        let Some(rest) = self.rest.get() else {
            return Err(HttpFault::Unreachable("there is no answer".into()));
        };
        let end = rest.iter().position(|byte| *byte == b'\n');
        self.rest.set(end.and_then(|end| rest.get(end + 1..)));
        let line = &rest[..end.unwrap_or(rest.len())];
        let Some(fault) = line.strip_prefix(b"!") else {
            return Ok(line.to_vec());
        };
        let fault = String::from_utf8_lossy(fault);
        let (status, text) = fault.split_once(' ').unwrap_or((&*fault, ""));
        Err(HttpFault::Status {
            status: status.parse().unwrap_or(500),
            code: None,
            text: text.to_string(),
        })
    }
}

impl UploadRequests for Recorded<'_> {
    fn post(&self, url: &str, kind: &str, _: &[u8]) -> HttpResult<Value> {
        answer_of(&self.ask("POST", url, &[("content-type", kind)], io::empty(), 0)?)
    }

    fn put(&self, url: &str, headers: &[(String, String)], body: impl Read, length: u64) -> HttpResult<Option<String>> {
        let headers: Vec<(&str, &str)> = headers.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let tag = String::from_utf8(self.ask("PUT", url, &headers, body, length)?);
        Ok(tag.ok().filter(|tag| !tag.is_empty()))
    }

    fn has(&self, _: &str) -> bool {
        self.answer().is_ok()
    }
}

/// What an upload would ask of a hub whose answers are these lines, and its result.
///
/// # Errors
/// The address of the hub cannot be used.
pub fn uploaded(
    settings: &HubSettings,
    upload: &Upload,
    answers: &[u8],
) -> Result<(Vec<RecordedRequest>, Result<UploadReport>)> {
    let recorded = Recorded {
        client: Client::new(settings)?,
        bearer: format!("Bearer {}", settings.token.as_deref().unwrap_or_default()),
        rest: Cell::new(Some(answers)),
        asked: RefCell::default(),
    };
    let said = send_by(&recorded, settings, upload);
    Ok((recorded.asked.into_inner(), said))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LocalFile, UploadContent};

    fn sent(answers: &[&str]) -> (Vec<RecordedRequest>, Result<UploadReport>) {
        let settings = HubSettings {
            endpoint: "https://hub.example".into(),
            token: Some("hf_planted".into()),
            attempts: 1,
            ..HubSettings::default()
        };
        let files = [LocalFile {
            name: "m.bin".into(),
            content: UploadContent::Bytes(b"0123456789".to_vec()),
        }];
        let upload = Upload {
            id: "me/model",
            revision: "main",
            message: "m",
            private: true,
            files: &files,
        };
        uploaded(&settings, &upload, answers.join("\n").as_bytes()).unwrap()
    }

    const LARGE: &str = r#"{"files": [{"path": "m.bin", "uploadMode": "lfs"}]}"#;
    const OID: &str = "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882";

    #[test]
    fn the_token_goes_to_the_hub_only() {
        let object = format!(
            r#"{{"objects": [{{"oid": "{OID}", "actions": {{"upload": {{"href": "https://store.example/1", "header": {{"x-a": "b"}}}}, "verify": {{"href": "/verify"}}}}}}]}}"#
        );
        let (asked, said) = sent(&["", LARGE, &object, "\"tag\"", "OK", r#"{"commitOid": "abc"}"#]);
        let said = said.unwrap();
        assert_eq!((said.commit.as_deref(), said.sent, said.kept), (Some("abc"), 10, 0));
        let asked: Vec<(&str, bool, u64)> = asked.iter().map(|a| (&*a.url, a.has_token, a.sent)).collect();
        assert_eq!(asked[3], ("https://store.example/1", false, 10));
        assert_eq!(asked[4], ("https://hub.example/verify", true, 0));
        assert_eq!(asked.len(), 6);
    }

    #[test]
    fn the_text_of_a_refused_file_has_no_control_characters_and_no_token() {
        let refused = format!(
            r#"{{"objects": [{{"oid": "{OID}", "error": {{"message": "no\u001b[2J hf_pla\u0007nted {}"}}}}]}}"#,
            "x".repeat(9000)
        );
        let text = sent(&["", LARGE, &refused]).1.unwrap_err().to_string();
        assert!(
            text.contains("the hub refuses a file") && text.contains("no[2J <token>"),
            "{text}"
        );
        assert!(
            text.len() < 1000 && !text.chars().any(|c| c.is_control() && c != '\n'),
            "{text}"
        );
    }
}
