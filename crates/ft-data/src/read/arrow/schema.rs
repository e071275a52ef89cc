//! The columns of an Arrow file: names, types, dictionaries.

use super::super::MAX_DEPTH;
use super::flat::FlatTable;
use ft_base::{Error, Result};

/// Largest number of columns with those inside others.
const MAX_FIELDS: usize = 1 << 16;

/// A type, by the way its values are stored. `wide`: positions have 8 bytes, not 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoredType {
    Null,
    Bool,
    Int { bytes: usize, signed: bool },
    Float { bytes: usize },
    Decimal { bytes: usize, scale: i32 },
    Bytes { wide: bool },
    View,
    FixedBytes(usize),
    List { wide: bool },
    ListView { wide: bool },
    FixedList(usize),
    Struct,
    Map,
}

impl StoredType {
    /// Number of buffers, without those of the columns inside and the texts of views.
    pub(super) fn buffers(self) -> usize {
        match self {
            StoredType::Null => 0,
            StoredType::FixedList(_) | StoredType::Struct => 1,
            StoredType::Bytes { .. } | StoredType::ListView { .. } => 3,
            _ => 2,
        }
    }
}

/// A column.
#[derive(Debug)]
pub(super) struct Field {
    pub name: String,
    pub kind: StoredType,
    /// The values are numbers of entries in this dictionary, and how the numbers are stored.
    pub dictionary: Option<(i64, StoredType)>,
    pub children: Vec<Field>,
}

/// The columns of a file. Errors: a type that is not supported, broken metadata.
pub(super) fn read(schema: FlatTable) -> Result<Vec<Field>> {
    if schema.i16(0).unwrap_or(0) != 0 {
        return Err(
            Error::unsupported("the numbers of the file are big-endian").hint("save the rows again on this machine")
        );
    }
    let mut left = MAX_FIELDS;
    fields(schema.tables(1), 0, &mut left)
}

fn broken(found: impl std::fmt::Display) -> Error {
    Error::format("the list of columns is broken")
        .found(found)
        .hint("check that the file is complete, or save the rows again")
}

fn fields(tables: Option<Vec<FlatTable>>, depth: usize, left: &mut usize) -> Result<Vec<Field>> {
    let tables = tables.ok_or_else(|| broken("a column outside of the metadata"))?;
    if depth > MAX_DEPTH || tables.len() > *left {
        return Err(broken("too many columns inside others"));
    }
    *left -= tables.len();
    tables.into_iter().map(|table| field(table, depth, left)).collect()
}

fn field(table: FlatTable, depth: usize, left: &mut usize) -> Result<Field> {
    let name = table.text(0).unwrap_or_default();
    let kind = kind(table).ok_or_else(|| {
        Error::unsupported("the type of a column is not supported")
            .found(format!("column `{name}`, type {} of Arrow", table.byte(2).unwrap_or(0)))
            .expected("texts, numbers, booleans, lists, structs, maps, dates, null")
            .hint("remove the column: `dataset.remove_columns([...])`")
    })?;
    let children = fields(table.tables(5), depth + 1, left)?;
    let wanted = match kind {
        StoredType::List { .. } | StoredType::ListView { .. } | StoredType::FixedList(_) | StoredType::Map => {
            children.len() == 1
        }
        _ => true,
    };
    let entries = kind != StoredType::Map || children[..].first().is_some_and(|entry| entry.children.len() == 2);
    if !wanted || !entries {
        return Err(broken(format!("column `{name}`")));
    }
    let dictionary = table.table(4).map(|of| {
        let index = of.table(1).and_then(int);
        let index = index.unwrap_or(StoredType::Int { bytes: 4, signed: true });
        (of.i64(0).unwrap_or(0), index)
    });
    Ok(Field {
        name,
        kind,
        dictionary,
        children,
    })
}

fn int(table: FlatTable) -> Option<StoredType> {
    let bytes = match table.i32(0)? {
        8 => 1,
        16 => 2,
        32 => 4,
        64 => 8,
        _ => return None,
    };
    let signed = table.byte(1).unwrap_or(0) != 0;
    Some(StoredType::Int { bytes, signed })
}

/// Dates, times and durations are numbers in the unit of the file.
fn kind(field: FlatTable) -> Option<StoredType> {
    let table = field.table(3)?;
    let size = |id| table.i32(id).and_then(|n| usize::try_from(n).ok());
    let signed = |bytes| StoredType::Int { bytes, signed: true };
    Some(match field.byte(2)? {
        1 => StoredType::Null,
        2 => int(table)?,
        3 => StoredType::Float {
            bytes: match table.i16(0).unwrap_or(0) {
                0 => 2,
                1 => 4,
                2 => 8,
                _ => return None,
            },
        },
        4 | 5 => StoredType::Bytes { wide: false },
        6 => StoredType::Bool,
        7 => StoredType::Decimal {
            bytes: match table.i32(2).unwrap_or(128) {
                32 => 4,
                64 => 8,
                128 => 16,
                _ => return None,
            },
            scale: table.i32(1).unwrap_or(0),
        },
        8 => signed(if table.i16(0) == Some(0) { 4 } else { 8 }),
        9 => signed(if table.i32(1).unwrap_or(32) == 32 { 4 } else { 8 }),
        10 | 18 => signed(8),
        12 => StoredType::List { wide: false },
        13 => StoredType::Struct,
        15 => StoredType::FixedBytes(size(0)?),
        16 => StoredType::FixedList(size(0)?),
        17 => StoredType::Map,
        19 | 20 => StoredType::Bytes { wide: true },
        21 => StoredType::List { wide: true },
        23 | 24 => StoredType::View,
        25 => StoredType::ListView { wide: false },
        26 => StoredType::ListView { wide: true },
        _ => return None,
    })
}
