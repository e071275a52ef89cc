//! The memory that a row group takes while its rows are decoded, compared with the size of the file: a list of one value
//! takes nearly no bytes, however long it is, a text of a dictionary is copied to each row that has it, and columns may lie
//! in the same bytes.

use super::limits::ROWS_AT_ONCE;
use parquet::basic::{ConvertedType, Repetition, Type as Physical};
use parquet::errors::{ParquetError, Result};
use parquet::schema::types::{ColumnDescriptor, Type};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes that need no reason, and how many may come of each byte of the file.
const FEW_BYTES: u64 = 48 << 20;
const PER_BYTE: u64 = 768;
/// A vector that has grown: half empty, with its old half beside it.
const GROWN: u64 = 3;
/// A value of a list, as the decoder's `Field` and then as a JSON value.
const FIELD: u64 = 48;
/// A field of a structure, with its entry in a JSON object and without its name.
const NAMED_FIELD: u64 = 640;
/// A list in a list: the decoder takes room for four values.
const LIST: u64 = 256;
/// The two levels of a value.
const LEVELS: u64 = 4;
/// A text is in its page, in the row of the decoder and in that of JSON.
const COPIES: u64 = 3;

/// What the columns of a row group may take together.
pub(super) struct Budget {
    file_bytes: u64,
    most: u64,
    taken: AtomicU64,
}

impl Budget {
    pub(super) fn new(file_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            file_bytes,
            most: FEW_BYTES.saturating_add(file_bytes.saturating_mul(PER_BYTE)),
            taken: AtomicU64::new(0),
        })
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }
}

/// What one column takes: of each kind the most so far.
pub(super) struct Demand {
    budget: Arc<Budget>,
    /// Bytes of a value in a row.
    value: u64,
    /// Bytes of a value as the decoder stores it.
    decoded: u64,
    copies: u64,
    taken: u64,
    /// Bytes of the largest page.
    pub(super) page: u64,
    /// Values of the dictionary.
    pub(super) dictionary: u64,
    /// Lengths of texts that are decoded at once.
    pub(super) lengths: u64,
    /// Values of the longest row.
    pub(super) longest: u64,
    /// Bytes of the longest text that a few bytes may stand for.
    pub(super) text: u64,
}

impl Demand {
    /// `root`: the field of the file's schema that the column is in.
    pub(super) fn new(budget: Arc<Budget>, root: &Type, column: &ColumnDescriptor) -> Self {
        let decoded = match column.physical_type() {
            Physical::BOOLEAN => 1,
            Physical::INT32 | Physical::FLOAT => 4,
            Physical::INT64 | Physical::DOUBLE => 8,
            Physical::INT96 => 12,
            Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY => 32,
        };
        let is_text = decoded == 32;
        Self {
            budget,
            value: GROWN * (FIELD + ROWS_AT_ONCE as u64 * (decoded + LEVELS)) + structures(root, column),
            decoded,
            copies: if is_text { COPIES } else { 1 },
            taken: 0,
            page: 0,
            dictionary: 0,
            lengths: 0,
            longest: 0,
            text: 0,
        }
    }

    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Errors: the columns of the row group would take too much together.
    pub(super) fn check(&mut self) -> Result<()> {
        let value = self.value.saturating_add(self.text.saturating_mul(COPIES - 1));
        let needed = [
            self.page.saturating_mul(self.copies),
            self.dictionary.saturating_mul(self.decoded),
            self.lengths.saturating_mul(size_of::<i32>() as u64),
            self.longest.saturating_mul(value),
        ];
        let needed = needed.into_iter().fold(0, u64::saturating_add);
        let more = needed.saturating_sub(self.taken);
        self.taken += more;
        let Budget {
            most,
            file_bytes,
            taken,
        } = &*self.budget;
        let taken = taken.fetch_add(more, Relaxed).saturating_add(more);
        if taken > *most {
            return Err(ParquetError::General(format!(
                "a row of this file would take {} MiB of memory; {} MiB are the most for a file of {file_bytes} bytes",
                taken >> 20,
                most >> 20
            )));
        }
        Ok(())
    }
}

/// Bytes that a value of the column takes for the structures and lists around it, within the outermost list.
fn structures(root: &Type, column: &ColumnDescriptor) -> u64 {
    let is_repeated = |node: &Type| {
        let info = node.get_basic_info();
        info.has_repetition() && info.repetition() == Repetition::REPEATED
    };
    let mut bytes = LIST * u64::from(column.max_rep_level().unsigned_abs().saturating_sub(1));
    let (mut node, mut around): (&Type, Option<&Type>) = (root, None);
    let mut in_list = is_repeated(root);
    for name in column.path().parts().iter().skip(1) {
        let children = if node.is_group() { node.get_fields() } else { &[] };
        let Some(child) = children.iter().find(|child| child.name() == name) else {
            break;
        };
        if in_list && !is_list(node) && !is_between(around, node) {
            bytes += NAMED_FIELD + 2 * name.len() as u64;
        }
        in_list |= is_repeated(child);
        (around, node) = (Some(node), child);
    }
    bytes
}

fn is_list(node: &Type) -> bool {
    node.get_basic_info().converted_type() == ConvertedType::LIST
}

/// True for the group between a list and its values, which the decoder leaves out.
fn is_between(around: Option<&Type>, node: &Type) -> bool {
    let is_structure = node.name() == "array" || node.name().ends_with("_tuple");
    around.is_some_and(is_list) && node.get_fields().len() == 1 && !is_structure
}

#[cfg(test)]
mod tests;
