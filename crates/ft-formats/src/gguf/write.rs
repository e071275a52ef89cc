//! Writes a GGUF file, one tensor in memory at a time.

use super::{ALIGNMENT, BlockType, MAGIC, MetadataValue, VERSION, code};
use ft_base::{Error, Result, files, progress};
use std::path::Path;

/// A tensor of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// The sizes of its dimensions, slowest first, as in safetensors.
    pub shape: Vec<usize>,
    /// Its number format.
    pub block: BlockType,
}

impl TensorEntry {
    /// Number of elements.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of its data, without padding.
    pub fn bytes(&self) -> u64 {
        self.block.bytes(self.count())
    }
}

/// Writes the file. `fill` passes the encoded data of each tensor, in order, to its second argument, in one or several
/// pieces. Returns the size of the file, which appears at `path` only if there was no error.
///
/// # Errors
/// Any error of `fill`; data that is shorter or longer than the tensor; a row that is no whole number of blocks; a file
/// that cannot be written.
pub fn write(
    path: &Path,
    keys: &[(String, MetadataValue)],
    tensors: &[TensorEntry],
    mut fill: impl FnMut(&TensorEntry, &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
) -> Result<u64> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        text(&mut head, key);
        put(&mut head, value);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        let row = tensor.shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(tensor.block.elements()) {
            return Err(Error::internal("rows of a tensor are no whole number of blocks")
                .at(&tensor.name)
                .found(format!("{row} elements, {}", tensor.block)));
        }
        text(&mut head, &tensor.name);
        head.extend((tensor.shape.len() as u32).to_le_bytes());
        for size in tensor.shape.iter().rev() {
            head.extend((*size as u64).to_le_bytes());
        }
        head.extend(tensor.block.code().to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
    let mut file = files::AtomicFile::create(path)?;
    let phase = progress::bytes(progress::about("writing", path), head.len() as u64 + offset);
    file.write(&head)?;
    for tensor in tensors {
        let before = file.written();
        fill(tensor, &mut |bytes| {
            file.write(bytes)?;
            phase.set(file.written());
            Ok(())
        })?;
        let written = file.written() - before;
        if written != tensor.bytes() {
            return Err(Error::internal("tensor was not written completely")
                .at(&tensor.name)
                .found(format!("{written} bytes"))
                .expected(format!("{} bytes", tensor.bytes())));
        }
        let padding = written.next_multiple_of(ALIGNMENT) - written;
        file.write(&[0; ALIGNMENT as usize][..padding as usize])?;
    }
    let written = file.written();
    file.commit()?;
    Ok(written)
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put(out: &mut Vec<u8>, value: &MetadataValue) {
    let mut kind = |code: u32| out.extend(code.to_le_bytes());
    match value {
        MetadataValue::U32(x) => {
            kind(code::U32);
            out.extend(x.to_le_bytes());
        }
        MetadataValue::I32(x) => {
            kind(code::I32);
            out.extend(x.to_le_bytes());
        }
        MetadataValue::F32(x) => {
            kind(code::F32);
            out.extend(x.to_le_bytes());
        }
        MetadataValue::Bool(x) => {
            kind(code::BOOL);
            out.push(u8::from(*x));
        }
        MetadataValue::Text(x) => {
            kind(code::TEXT);
            text(out, x);
        }
        MetadataValue::Texts(list) => {
            begin(out, code::TEXT, list.len());
            list.iter().for_each(|x| text(out, x));
        }
        MetadataValue::I32s(list) => {
            begin(out, code::I32, list.len());
            list.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        MetadataValue::U32s(list) => {
            begin(out, code::U32, list.len());
            list.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        MetadataValue::F32s(list) => {
            begin(out, code::F32, list.len());
            list.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        MetadataValue::Bools(list) => {
            begin(out, code::BOOL, list.len());
            list.iter().for_each(|x| out.push(u8::from(*x)));
        }
    }
}

fn begin(out: &mut Vec<u8>, kind: u32, length: usize) {
    out.extend(code::LIST.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((length as u64).to_le_bytes());
}
