//! Reads the header of a GGUF file, and its tensors on demand. The file is untrusted: every length is compared with the
//! size of the file before it is used.

use super::{ALIGNMENT, BlockType, DIMENSIONS, MAGIC, MetadataValue, TensorEntry, VERSION, code};
use ft_base::{Error, Result, files};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Largest header, bytes: a vocabulary has some megabytes.
const LARGEST_HEADER: u64 = 1 << 30;

/// An open file.
#[derive(Debug)]
pub struct GgufReader {
    path: PathBuf,
    file: File,
    /// The keys, sorted.
    pub keys: BTreeMap<String, MetadataValue>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<TensorEntry>,
    offsets: Vec<u64>,
    data: u64,
}

impl GgufReader {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// No GGUF file of version 3; a truncated file; a number format that ft does not know; a tensor outside of the file.
    pub fn open(path: &Path) -> Result<Self> {
        let size = files::size(path)?;
        let mut header = Header {
            input: BufReader::new(files::open(path)?),
            path,
            read: 0,
            size: size.min(LARGEST_HEADER),
        };
        if header.take(4)? != MAGIC {
            return Err(Error::format("no GGUF file").at_path(path));
        }
        let version = header.u32()?;
        if version != VERSION {
            return Err(Error::unsupported("this version of GGUF is not supported")
                .at_path(path)
                .found(version)
                .expected(VERSION));
        }
        let (tensor_count, key_count) = (header.length(24)?, header.length(13)?);
        let mut keys = BTreeMap::new();
        for _ in 0..key_count {
            let key = header.text()?;
            let kind = header.u32()?;
            let value = header.value(kind)?;
            keys.insert(key, value);
        }
        let (mut tensors, mut offsets) = (Vec::new(), Vec::new());
        for _ in 0..tensor_count {
            let name = header.text()?;
            let dimensions = header.u32()? as usize;
            if dimensions > DIMENSIONS {
                return Err(header.wrong("a tensor has too many dimensions").at(&name));
            }
            let mut shape = Vec::new();
            for _ in 0..dimensions {
                shape.insert(0, usize::try_from(header.u64()?).unwrap_or(usize::MAX));
            }
            let kind = header.u32()?;
            let block = BlockType::of(kind).ok_or_else(|| {
                Error::unsupported("number format of a tensor is not supported")
                    .at(&name)
                    .found(kind)
            })?;
            tensors.push(TensorEntry { name, shape, block });
            offsets.push(header.u64()?);
        }
        let data = header.read.next_multiple_of(ALIGNMENT);
        let room = size.saturating_sub(data);
        for (tensor, offset) in tensors.iter().zip(&offsets) {
            let count = tensor.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            let fits = count.is_some_and(|count| {
                count.is_multiple_of(tensor.block.elements())
                    && (count / tensor.block.elements()) as u64 <= room
                    && offset.is_multiple_of(ALIGNMENT)
                    && offset.checked_add(tensor.bytes()).is_some_and(|end| end <= room)
            });
            if !fits {
                return Err(Error::format("tensor lies outside of the file")
                    .at_path(path)
                    .found(format!("{} {:?} at {offset}", tensor.name, tensor.shape)));
            }
        }
        Ok(Self {
            path: path.to_path_buf(),
            file: files::open(path)?,
            keys,
            tensors,
            offsets,
            data,
        })
    }

    /// The stored bytes of a tensor.
    ///
    /// # Errors
    /// No tensor of this name (`NotFound`); a failed read (`Io`).
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let found = self.tensors.iter().position(|t| t.name == name);
        let index = found.ok_or_else(|| Error::not_found(format!("no tensor `{name}`")).at_path(&self.path))?;
        let mut out = vec![0; self.tensors[index].bytes() as usize];
        self.file
            .read_exact_at(&mut out, self.data + self.offsets[index])
            .map_err(|e| {
                Error::io(format!("cannot read the tensor `{name}`"))
                    .at_path(&self.path)
                    .cause(e)
            })?;
        Ok(out)
    }

    /// The values of a tensor, dequantized.
    ///
    /// # Errors
    /// As `bytes`.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let bytes = self.bytes(name)?;
        let block = self.tensors.iter().find(|t| t.name == name).map(|t| t.block);
        Ok(block.map(|block| block.decode(&bytes)).unwrap_or_default())
    }
}

struct Header<'a> {
    input: BufReader<File>,
    path: &'a Path,
    read: u64,
    size: u64,
}

impl Header<'_> {
    fn wrong(&self, what: &str) -> Error {
        Error::format(what).at_path(self.path)
    }

    fn take(&mut self, bytes: u64) -> Result<Vec<u8>> {
        if bytes > self.size - self.read {
            return Err(self.wrong("the file is truncated or damaged"));
        }
        let mut out = vec![0; bytes as usize];
        self.input
            .read_exact(&mut out)
            .map_err(|e| Error::io("cannot read the file").at_path(self.path).cause(e))?;
        self.read += bytes;
        Ok(out)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(&self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number of things that take at least `bytes` each.
    fn length(&mut self, bytes: u64) -> Result<u64> {
        let length = self.u64()?;
        if length.checked_mul(bytes).is_none_or(|all| all > self.size - self.read) {
            return Err(self.wrong("the file is truncated or damaged"));
        }
        Ok(length)
    }

    fn text(&mut self) -> Result<String> {
        let length = self.length(1)?;
        String::from_utf8(self.take(length)?).map_err(|_| self.wrong("a text is not UTF-8"))
    }

    fn value(&mut self, kind: u32) -> Result<MetadataValue> {
        Ok(match kind {
            code::U8 => MetadataValue::U32(u32::from(self.array::<1>()?[0])),
            code::U32 => MetadataValue::U32(self.u32()?),
            code::I32 => MetadataValue::I32(i32::from_le_bytes(self.array()?)),
            code::F32 => MetadataValue::F32(f32::from_le_bytes(self.array()?)),
            code::BOOL => MetadataValue::Bool(self.array::<1>()?[0] != 0),
            code::TEXT => MetadataValue::Text(self.text()?),
            code::U64 => MetadataValue::U32(
                u32::try_from(self.u64()?).map_err(|_| self.wrong("the value of a key is too large"))?,
            ),
            code::LIST => {
                let kind = self.u32()?;
                self.list(kind)?
            }
            other => return Err(self.wrong("type of a value is not supported").found(other)),
        })
    }

    fn list(&mut self, kind: u32) -> Result<MetadataValue> {
        Ok(match kind {
            code::TEXT => {
                let length = self.length(8)?;
                MetadataValue::Texts((0..length).map(|_| self.text()).collect::<Result<_>>()?)
            }
            code::BOOL => {
                let length = self.length(1)?;
                MetadataValue::Bools(self.take(length)?.iter().map(|x| *x != 0).collect())
            }
            code::U32 | code::I32 | code::F32 => {
                let length = self.length(4)?;
                let bytes = self.take(length * 4)?;
                let (words, _) = bytes.as_chunks::<4>();
                match kind {
                    code::U32 => MetadataValue::U32s(words.iter().map(|w| u32::from_le_bytes(*w)).collect()),
                    code::I32 => MetadataValue::I32s(words.iter().map(|w| i32::from_le_bytes(*w)).collect()),
                    _ => MetadataValue::F32s(words.iter().map(|w| f32::from_le_bytes(*w)).collect()),
                }
            }
            other => return Err(self.wrong("type of a list is not supported").found(other)),
        })
    }
}
