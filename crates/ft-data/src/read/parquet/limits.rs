//! Limits of the memory that a parquet file may ask for. The decoder believes the sizes and counts of pages and takes
//! memory for them, up to that of 2^31 values for a few bytes; here they are compared with the bytes that are there.

use super::budget::{Budget, Demand};
use super::thrift::{PageHeader, Thrift, is_footer};
use parquet::basic::{Encoding, Type as Physical};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, FileReader, RowGroupReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::{ColumnDescPtr, Type};
use std::fs::File;
use std::sync::Arc;

/// Bytes of a page that need no reason, and how many may come of each compressed byte.
const FEW_BYTES: u64 = 8 << 20;
const PER_BYTE: u64 = 256;
/// As above, for values of a page that are all decoded at once.
const FEW_VALUES: u64 = 1 << 17;
const VALUES_PER_BYTE: u64 = 64;
/// Rows that are decoded at once.
pub(super) const ROWS_AT_ONCE: usize = 2;
/// Longest header of a page (it can have the smallest and largest value).
const MAX_HEADER: u64 = 16 << 20;

fn too_much<T>(what: &str, asks: u64, has: u64) -> Result<T> {
    Err(ParquetError::General(format!(
        "a page of {has} bytes asks for {asks} {what}"
    )))
}

/// A file whose pages are checked before they are decoded.
pub(super) struct CheckedFile {
    inner: SerializedFileReader<File>,
    file: Arc<File>,
}

impl CheckedFile {
    pub(super) fn open(file: File) -> Result<Self> {
        footer(&file)?;
        let own = Arc::new(file.try_clone()?);
        let inner = SerializedFileReader::new(file)?;
        // Without columns the number of rows is a claim only.
        if inner.metadata().file_metadata().schema_descr().num_columns() == 0 {
            return Err(ParquetError::General("the file has no columns".into()));
        }
        Ok(Self { inner, file: own })
    }
}

impl FileReader for CheckedFile {
    fn metadata(&self) -> &ParquetMetaData {
        self.inner.metadata()
    }

    fn num_row_groups(&self) -> usize {
        self.inner.num_row_groups()
    }

    fn get_row_group(&self, i: usize) -> Result<Box<dyn RowGroupReader + '_>> {
        Ok(Box::new(CheckedGroup {
            inner: self.inner.get_row_group(i)?,
            budget: Budget::new(self.file.metadata()?.len()),
            file: Arc::clone(&self.file),
        }))
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        Ok(RowIter::from_file(projection, self)?.with_batch_size(ROWS_AT_ONCE))
    }
}

struct CheckedGroup<'a> {
    inner: Box<dyn RowGroupReader + 'a>,
    file: Arc<File>,
    budget: Arc<Budget>,
}

impl RowGroupReader for CheckedGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.inner.metadata()
    }

    fn num_columns(&self) -> usize {
        self.inner.num_columns()
    }

    fn get_column_page_reader(&self, i: usize) -> Result<Box<dyn PageReader>> {
        let column = self.metadata().column(i);
        let (start, bytes) = column.byte_range();
        let root = self.metadata().schema_descr().get_column_root(i);
        let mut demand = Demand::new(Arc::clone(&self.budget), root, column.column_descr());
        demand.page = headers(&self.file, start, bytes)?;
        demand.check()?;
        Ok(Box::new(Pages {
            inner: self.inner.get_column_page_reader(i)?,
            column: column.column_descr_ptr(),
            in_row: 0,
            demand,
        }))
    }

    fn get_column_bloom_filter(&self, i: usize) -> Option<&parquet::bloom_filter::Sbbf> {
        self.inner.get_column_bloom_filter(i)
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

/// Checks the footer: before the end of the file stand its length and the name of the format.
fn footer(file: &File) -> Result<()> {
    let size = file.metadata()?.len();
    let end = size.saturating_sub(8);
    let tail = file.get_bytes(end, (size - end) as usize)?;
    // The decoder says what is wrong with other files.
    let Some((length, b"PAR1")) = tail
        .split_first_chunk()
        .map(|(length, name)| (u32::from_le_bytes(*length), name))
    else {
        return Ok(());
    };
    match end.checked_sub(length.into()) {
        Some(start) if !is_footer(&file.get_bytes(start, length as usize)?) => {
            Err(ParquetError::General("the footer of the file is damaged".into()))
        }
        _ => Ok(()),
    }
}

/// Checks the sizes in the headers of the pages of a column chunk. The bytes of its largest page.
fn headers(file: &File, start: u64, bytes: u64) -> Result<u64> {
    let size = file.metadata()?.len();
    let end = start.checked_add(bytes).filter(|end| *end <= size);
    let end = end.ok_or_else(|| ParquetError::General("a column lies outside of the file".into()))?;
    let (mut at, mut window, mut largest) = (start, 4096, 0);
    while at < end {
        let piece = file.get_bytes(at, window.min(end - at) as usize)?;
        let Some(header) = PageHeader::read(&piece) else {
            if window < MAX_HEADER && at + window < end {
                window *= 16;
                continue;
            }
            return Err(ParquetError::General("the header of a page is damaged".into()));
        };
        // Sizes are integers of 32 bits.
        let (Ok(plain), Ok(packed)) = (u32::try_from(header.uncompressed), u32::try_from(header.compressed)) else {
            return Err(ParquetError::General("the size of a page is damaged".into()));
        };
        let (plain, packed) = (u64::from(plain), u64::from(packed));
        if plain > FEW_BYTES + PER_BYTE * packed {
            return too_much("bytes", plain, packed);
        }
        largest = largest.max(plain);
        at += header.bytes + packed;
        window = 4096;
    }
    Ok(largest)
}

/// Bytes of the longest text of a dictionary: each has its length before it.
fn longest_text(mut bytes: &[u8]) -> u64 {
    let mut longest = 0;
    while let Some(text) = prefixed(bytes) {
        longest = longest.max(text.len());
        bytes = &bytes[4 + text.len()..];
    }
    longest as u64
}

/// A part of a page with its length before it.
fn prefixed(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_first_chunk()?;
    rest.get(..u32::from_le_bytes(*length) as usize)
}

/// Pages whose counts are checked before their values are decoded.
struct Pages {
    inner: Box<dyn PageReader>,
    column: ColumnDescPtr,
    /// Values of the row in which the last page ended.
    in_row: u64,
    demand: Demand,
}

impl Pages {
    fn checked(&mut self, page: Option<Page>) -> Result<Option<Page>> {
        let Some(page) = page else { return Ok(None) };
        let (bytes, values) = (page.buffer().len() as u64, u64::from(page.num_values()));
        // A page may be of few bytes in the file.
        let most = FEW_VALUES + VALUES_PER_BYTE * bytes.min(self.demand.budget().file_bytes());
        if page.is_dictionary_page() {
            if values > bytes {
                return too_much("values", values, bytes);
            }
            self.demand.dictionary = self.demand.dictionary.max(values);
            let text = match self.column.physical_type() {
                Physical::BYTE_ARRAY => longest_text(page.buffer()),
                Physical::FIXED_LEN_BYTE_ARRAY => bytes.min(self.column.type_length().unsigned_abs().into()),
                _ => 0,
            };
            self.demand.text = self.demand.text.max(text);
            self.demand.check()?;
            return Ok(Some(page));
        }
        let longest = self.longest_row(&page);
        self.demand.longest = self.demand.longest.max(longest);
        if page.encoding() == Encoding::DELTA_BYTE_ARRAY {
            // A text may begin as the one before it.
            self.demand.text = self.demand.text.max(bytes);
        }
        let lengths = match page.encoding() {
            Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
            Encoding::DELTA_BYTE_ARRAY => 2,
            _ => 0,
        };
        if lengths > 0 {
            let buffer = page.buffer();
            let from = self.levels(&page).filter(|from| *from <= buffer.len());
            let mut delta = Thrift {
                bytes: &buffer[from.unwrap_or(buffer.len())..],
                at: 0,
            };
            for n in 0..lengths {
                // Bytes that cannot be read here cannot be decoded.
                let Some(part) = delta.part() else { break };
                if part.count > most {
                    return too_much("values", part.count, bytes);
                }
                self.demand.lengths = self.demand.lengths.max(part.count);
                if n + 1 < lengths && delta.pass(&part).is_none() {
                    break;
                }
            }
        }
        self.demand.check()?;
        Ok(Some(page))
    }

    /// Values of the longest row that the page has a part of.
    fn longest_row(&mut self, page: &Page) -> u64 {
        let most = self.column.max_rep_level();
        let buffer = page.buffer();
        let levels = match page {
            Page::DataPageV2 {
                rep_levels_byte_len, ..
            } => buffer.get(..*rep_levels_byte_len as usize),
            Page::DataPage {
                rep_level_encoding: Encoding::RLE,
                ..
            } => prefixed(buffer),
            // The levels of old files are not read here.
            _ => None,
        };
        if most == 0 {
            return 0;
        }
        let Some(bytes) = levels else {
            self.in_row += u64::from(page.num_values());
            return self.in_row;
        };
        let bits = u64::from(16 - most.leading_zeros());
        let mut left = u64::from(page.num_values());
        let mut runs = Thrift { bytes, at: 0 };
        let mut longest = 0;
        while left > 0 {
            // Bytes that cannot be read here cannot be decoded.
            let Some(start) = runs.unsigned() else { break };
            if start & 1 == 0 {
                let values = (start >> 1).min(left);
                let Some(level) = runs.byte() else { break };
                if runs.skip(bits.div_ceil(8) - 1).is_none() {
                    break;
                }
                // Level 0 begins a row.
                self.in_row = if level == 0 { 1 } else { self.in_row + values };
                longest = longest.max(self.in_row);
                left -= values;
                continue;
            }
            let from = runs.at;
            let Some(()) = (start >> 1).checked_mul(bits).and_then(|bytes| runs.skip(bytes)) else {
                break;
            };
            let packed = &runs.bytes[from..runs.at];
            for n in 0..((start >> 1) * 8).min(left) {
                let bit = |at: u64| packed[(at / 8) as usize] >> (at % 8) & 1 == 1;
                let inner = (n * bits..(n + 1) * bits).any(bit);
                self.in_row = if inner { self.in_row + 1 } else { 1 };
                longest = longest.max(self.in_row);
                left -= 1;
            }
        }
        longest
    }

    /// The bytes of the levels at the start of a page.
    fn levels(&self, page: &Page) -> Option<usize> {
        let (def, rep) = (self.column.max_def_level(), self.column.max_rep_level());
        match page {
            Page::DataPageV2 {
                def_levels_byte_len,
                rep_levels_byte_len,
                ..
            } => Some(*def_levels_byte_len as usize + *rep_levels_byte_len as usize),
            Page::DataPage {
                buf,
                num_values,
                def_level_encoding,
                rep_level_encoding,
                ..
            } => {
                let mut at = 0usize;
                for (most, encoding) in [(rep, rep_level_encoding), (def, def_level_encoding)] {
                    if most == 0 {
                        continue;
                    }
                    let bits = (16 - most.leading_zeros()) as usize;
                    at += match encoding {
                        Encoding::RLE => 4 + prefixed(buf.get(at..)?)?.len(),
                        _ => (*num_values as usize * bits).div_ceil(8),
                    };
                }
                Some(at)
            }
            Page::DictionaryPage { .. } => None,
        }
    }
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.inner.get_next_page()?;
        self.checked(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.inner.skip_next_page()
    }

    fn supports_deferred_dictionary(&self) -> bool {
        self.inner.supports_deferred_dictionary()
    }

    fn take_deferred_dictionary(&mut self) -> Result<Option<Page>> {
        let page = self.inner.take_deferred_dictionary()?;
        self.checked(page)
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.inner.at_record_boundary()
    }
}

#[cfg(test)]
mod tests;
