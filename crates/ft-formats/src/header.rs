//! The header of one safetensors file, validated before any tensor is read.
//!
//! Layout: 8 bytes little-endian header length, the header (JSON), the data. Checks everything that a file may
//! misstate: lengths, offsets (no hole, no overlap, ending exactly at the end of the file), shapes, number formats,
//! duplicate names.

use crate::dtype::StoredDtype;
use ft_base::{Error, Result, files, units};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Largest accepted header of a safetensors file, bytes.
const HEADER_LIMIT: u64 = 100_000_000;

/// One tensor of one file; `offset` counts from the start of the file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FileTensor {
    /// Name of the tensor.
    pub name: String,
    /// Number format.
    pub dtype: StoredDtype,
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Stored bytes.
    pub bytes: u64,
}

/// The checked header of a safetensors file.
#[derive(Debug)]
pub(crate) struct SafetensorsHeader {
    /// In the order of the data.
    pub entries: Vec<FileTensor>,
    /// The texts under `__metadata__`.
    pub metadata: HashMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

struct RawHeader {
    entries: Vec<(String, RawEntry)>,
    metadata: HashMap<String, String>,
}

/// `Metadata` and the header itself refuse duplicate keys (a plain map would keep the last one).
struct Metadata(HashMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Metadata;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Metadata, A::Error> {
                let mut out = HashMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if out.insert(key.clone(), value).is_some() {
                        return Err(A::Error::custom(format!("metadata key `{key}` occurs twice")));
                    }
                }
                Ok(Metadata(out))
            }
        }
        d.deserialize_map(V)
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = RawHeader;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object with one entry per tensor")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawHeader, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut out = RawHeader {
                    entries: Vec::new(),
                    metadata: HashMap::new(),
                };
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("the name `{key}` occurs twice")));
                    }
                    if key == "__metadata__" {
                        out.metadata = map.next_value::<Metadata>()?.0;
                        continue;
                    }
                    match map.next_value::<RawEntry>() {
                        Ok(entry) => out.entries.push((key, entry)),
                        Err(e) => return Err(A::Error::custom(format!("tensor `{key}`: {e}"))),
                    }
                }
                Ok(out)
            }
        }
        d.deserialize_map(V)
    }
}

/// The error for a Git LFS pointer in place of a file.
pub(crate) fn lfs_pointer(path: &Path, bytes: u64) -> Error {
    Error::format("this is a Git LFS pointer, not the file itself")
        .at_path(path)
        .found(format!("{bytes} bytes that start with `version https://git-lfs`"))
        .hint("run `git lfs install && git lfs pull` in that directory, or give the hub id instead of the clone")
}

/// Reads and validates the header of `file`.
pub(crate) fn read(file: &File, path: &Path) -> Result<SafetensorsHeader> {
    let io = |e: std::io::Error| Error::io("cannot read the safetensors header").at_path(path).cause(e);
    let size = file.metadata().map_err(io)?.len();
    let mut start = [0u8; 64];
    let n = size.min(64) as usize;
    file.read_exact_at(&mut start[..n], 0).map_err(io)?;
    if start.starts_with(b"version https://git-lfs") {
        return Err(lfs_pointer(path, size));
    }
    let mut word = [0u8; 8];
    word.copy_from_slice(&start[..8]);
    let length = u64::from_le_bytes(word);
    // The length word of a header of 640 bytes begins as a pickle does.
    let has_header = start[8] == b'{' && length <= HEADER_LIMIT;
    if !has_header && (start.starts_with(b"PK\x03\x04") || start.starts_with(b"\x80\x02")) {
        return Err(pickle(path));
    }
    if size < 8 {
        return Err(Error::format("file is too short to be safetensors")
            .at_path(path)
            .found(format!("{size} bytes"))
            .expected("8 bytes of header length, a header and data")
            .hint("the download may have been cut off: download the file again"));
    }
    if length > HEADER_LIMIT {
        return Err(Error::format("safetensors header length is too large")
            .at_path(path)
            .found(format!("{length} bytes"))
            .expected(format!("at most {HEADER_LIMIT}"))
            .hint("this is not a safetensors file, or it is damaged"));
    }
    if length > size - 8 {
        return Err(Error::format("safetensors header is longer than the file")
            .at_path(path)
            .found(format!("a header of {length} bytes in a file of {size}"))
            .hint("the download may have been cut off: download the file again"));
    }
    let mut text = vec![0u8; length as usize];
    file.read_exact_at(&mut text, 8).map_err(io)?;
    parse(&text, size - 8 - length, path)
}

/// The error for a pickle: it is named and never opened.
pub fn pickle(path: &Path) -> Error {
    let name = path
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    Error::unsupported(format!(
        "`{name}` is a PyTorch pickle: loading one can run code, so ft never reads it"
    ))
    .at_path(path)
    .expected("safetensors")
    .hint(
        "convert it on a machine you trust: `python -c \"from transformers import AutoModelForCausalLM as M; \
         M.from_pretrained('DIR').save_pretrained('OUT', safe_serialization=True)\"`, or look for a \
         safetensors revision of the model on the hub",
    )
}

/// Validates the header text against a data part of `data` bytes.
fn parse(text: &[u8], data: u64, path: &Path) -> Result<SafetensorsHeader> {
    let bad = |what: String| Error::format(what).at_path(path);
    if text.first() != Some(&b'{') {
        return Err(bad("safetensors header does not start with `{`".into()).hint("this is not a safetensors file"));
    }
    let json = std::str::from_utf8(text).map_err(|e| {
        bad("safetensors header is not UTF-8".into()).found(format!("a bad byte at {}", e.valid_up_to()))
    })?;
    let raw: RawHeader =
        serde_json::from_str(json).map_err(|e| bad("safetensors header is not valid".into()).cause(e))?;
    let start = 8 + text.len() as u64;
    let mut entries = Vec::with_capacity(raw.entries.len());
    for (name, e) in raw.entries {
        let dtype = StoredDtype::from_name(&e.dtype).ok_or_else(|| {
            bad(format!("tensor `{name}` has a dtype that ft does not support")).found(format!("`{}`", e.dtype))
        })?;
        let [begin, end] = e.data_offsets;
        let too_large = || bad(format!("tensor `{name}` has a shape that overflows")).found(format!("{:?}", e.shape));
        let shape: Vec<usize> = e
            .shape
            .iter()
            .map(|&d| usize::try_from(d).map_err(|_| too_large()))
            .collect::<Result<_>>()?;
        let bytes = e
            .shape
            .iter()
            .try_fold(dtype.size() as u64, |n, &d| n.checked_mul(d))
            .ok_or_else(too_large)?;
        if end < begin || end - begin != bytes {
            return Err(bad(format!("tensor `{name}`: shape and stored bytes are inconsistent"))
                .found(format!("bytes {begin}..{end}"))
                .expected(format!("{bytes} bytes for {dtype} {shape:?}")));
        }
        entries.push((begin, end, name, dtype, shape));
    }
    entries.sort_by_key(|e| (e.0, e.1));
    let (mut at, mut before) = (0u64, String::new());
    for (begin, end, name, ..) in &entries {
        if *begin < at {
            return Err(bad(format!("tensors `{before}` and `{name}` overlap in the file"))
                .found(format!("bytes {begin}..{at}")));
        }
        if *begin > at {
            return Err(bad(format!("hole in the file before tensor `{name}`")).found(format!("bytes {at}..{begin}")));
        }
        if *end > data {
            return Err(bad(format!("file is truncated: tensor `{name}` is beyond its end"))
                .found(units::bytes(start + data))
                .expected(format!("at least {}", units::bytes(start.saturating_add(*end))))
                .hint("the download was cut off: download the file again"));
        }
        (at, before) = (*end, name.clone());
    }
    if at != data {
        return Err(bad("file has bytes after its last tensor".into())
            .found(format!("{} trailing bytes", data - at))
            .hint("the file is damaged: download it again"));
    }
    let entries = entries
        .into_iter()
        .map(|(begin, end, name, dtype, shape)| FileTensor {
            name,
            dtype,
            shape,
            offset: start + begin,
            bytes: end - begin,
        })
        .collect();
    Ok(SafetensorsHeader {
        entries,
        metadata: raw.metadata,
    })
}

/// Opens `path` and reads its header.
pub(crate) fn open(path: &Path) -> Result<(File, SafetensorsHeader)> {
    let file = files::open(path)?;
    let header = read(&file, path)?;
    Ok((file, header))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with this `header` text, `data` zero bytes, and a correct length word.
    fn file(header: &[u8], data: usize) -> Vec<u8> {
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend_from_slice(header);
        out.resize(out.len() + data, 0);
        out
    }

    fn check(bytes: &[u8]) -> Result<SafetensorsHeader> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        open(&path).map(|(_, h)| h)
    }

    #[track_caller]
    fn refuses(bytes: &[u8], words: &[&str]) {
        let before = std::time::Instant::now();
        let e = check(bytes).unwrap_err().to_string();
        assert!(before.elapsed().as_millis() < 1000, "slow refusal");
        assert!(e.contains("model.safetensors"), "no file name in: {e}");
        for word in words {
            assert!(e.contains(word), "no `{word}` in: {e}");
        }
    }

    const ONE: &[u8] = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;

    #[test]
    fn a_good_file_is_read() {
        let h = check(&file(ONE, 24)).unwrap();
        assert_eq!(h.entries[0].shape, [2, 3]);
        assert_eq!(h.entries[0].offset, 8 + ONE.len() as u64);
        // The order in the header is arbitrary, an empty tensor has no bytes, trailing spaces are allowed.
        let text = br#"{"b":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]},"e":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"__metadata__":{"format":"pt"}}   "#;
        let h = check(&file(text, 8)).unwrap();
        assert_eq!(
            h.entries.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(),
            ["a", "e", "b"]
        );
        assert_eq!(h.metadata["format"], "pt");
    }

    /// Row F1.
    #[test]
    fn an_empty_file() {
        refuses(b"", &["too short", "0 bytes"]);
    }

    /// Row F1.
    #[test]
    fn seven_bytes() {
        refuses(b"1234567", &["too short", "7 bytes"]);
    }

    /// Row F1.
    #[test]
    fn header_longer_than_the_file() {
        refuses(
            &[200, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'],
            &["longer than the file", "200"],
        );
    }

    /// Row F1.
    #[test]
    fn header_over_the_cap_and_at_the_largest_number() {
        refuses(
            &file(ONE, 24)
                .iter()
                .copied()
                .enumerate()
                .map(|(i, b)| if i == 4 { 1 } else { b })
                .collect::<Vec<_>>(),
            &["too large"],
        );
        refuses(&[0xff; 16], &["too large", "18446744073709551615"]);
    }

    /// Row F2.
    #[test]
    fn truncated_data() {
        refuses(&file(ONE, 20), &["truncated", "`a`"]);
    }

    /// Row F2.
    #[test]
    fn trailing_bytes() {
        refuses(&file(ONE, 30), &["6 trailing bytes"]);
    }

    /// Row F2.
    #[test]
    fn hole() {
        let t = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}"#;
        refuses(&file(t, 5), &["hole", "`b`"]);
        let t = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        refuses(&file(t, 3), &["hole", "`a`"]);
    }

    /// Row F2.
    #[test]
    fn overlap() {
        let t = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        refuses(&file(t, 3), &["`a` and `b` overlap"]);
    }

    /// Row F2.
    #[test]
    fn duplicate_keys() {
        let t = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;
        refuses(&file(t, 4), &["`a` occurs twice"]);
        refuses(
            &file(br#"{"__metadata__":{"k":"1","k":"2"}}"#, 0),
            &["`k` occurs twice"],
        );
        refuses(
            &file(
                br#"{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}"#,
                0,
            ),
            &["`a`", "duplicate field"],
        );
    }

    /// Row F2.
    #[test]
    fn shape_and_bytes_disagree() {
        let t = br#"{"w.x":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,24]}}"#;
        refuses(&file(t, 24), &["`w.x`", "are inconsistent", "12 bytes for BF16 [2, 3]"]);
        let t = br#"{"w":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#;
        refuses(&file(t, 2), &["`w`", "are inconsistent"]);
    }

    /// Row F2.
    #[test]
    fn shape_overflow() {
        let t = br#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
        refuses(&file(t, 0), &["`w`", "overflows"]);
        let t = br#"{"w":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,0]}}"#;
        refuses(&file(t, 0), &["`w`"]);
        let t = br#"{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}"#;
        refuses(&file(t, 0), &["`w`"]);
    }

    /// Row F2.
    #[test]
    fn not_utf8_not_json_not_an_object() {
        refuses(&file(b"{\"\xff\":1}", 0), &["not UTF-8"]);
        refuses(&file(b"{abc", 0), &["not valid"]);
        refuses(&file(b"[1]", 0), &["start with `{`"]);
        refuses(&file(b"", 0), &["start with `{`"]);
        refuses(&file(br#"{"a":5}"#, 0), &["`a`"]);
        refuses(
            &file(br#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}}"#, 0),
            &["`a`", "`x`"],
        );
        let deep = [b"{\"a\":".to_vec(), vec![b'['; 100_000]].concat();
        refuses(&file(&deep, 0), &["`a`"]);
    }

    #[test]
    fn unknown_number_format() {
        let t = br#"{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#;
        refuses(&file(t, 1), &["`w`", "`F4`"]);
    }

    /// Row F10.
    #[test]
    fn git_lfs_pointer() {
        let t = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";
        refuses(t, &["Git LFS pointer", &t.len().to_string(), "git lfs pull"]);
    }

    #[test]
    fn a_pickle_under_a_safetensors_name() {
        refuses(b"PK\x03\x04aaaaaaaaaaaaaaaaaaaaaaaa", &["pickle", "never reads"]);
        refuses(b"\x80\x02}q\x00(X\x01\x00\x00\x00", &["pickle"]);
        refuses(b"\x80\x02}q\x00(X\x01{\x00\x00\x00", &["pickle"]);
    }

    #[test]
    fn a_header_whose_length_begins_as_a_pickle_is_read() {
        for length in [0x280, 0x1_0280] {
            let mut text = ONE.to_vec();
            text.resize(length, b' ');
            let bytes = file(&text, 24);
            assert!(bytes.starts_with(b"\x80\x02"));
            assert_eq!(check(&bytes).unwrap().entries[0].shape, [2, 3]);
        }
    }

    /// Row F11.
    #[test]
    fn random_damage_never_panics() {
        use ft_base::rng::{Rng, Stream};
        let good = file(ONE, 24);
        for case in 0..4000u64 {
            let r = Rng::new(case, Stream::Split, &[]);
            let mut bytes = good.clone();
            for i in 0..1 + r.below(0, 4) {
                let at = r.below(1 + 2 * i, bytes.len() as u64) as usize;
                bytes[at] = r.bits(2 + 2 * i) as u8;
            }
            bytes.truncate(r.below(99, bytes.len() as u64 + 1) as usize);
            if let Ok(h) = check(&bytes) {
                assert!(h.entries.iter().all(|e| e.offset + e.bytes <= bytes.len() as u64));
            }
        }
    }
}
