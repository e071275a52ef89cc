//! The columns of an Arrow file: names, types, dictionaries.

use super::super::MAX_DEPTH;
use super::flat::Table;
use ft_base::{Error, Result};

/// Largest number of columns with those inside others.
const MAX_FIELDS: usize = 1 << 16;

/// A type, by the way its values are stored. `wide`: positions have 8 bytes, not 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
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

impl Kind {
    /// Number of buffers, without those of the columns inside and the texts of views.
    pub(super) fn buffers(self) -> usize {
        match self {
            Kind::Null => 0,
            Kind::FixedList(_) | Kind::Struct => 1,
            Kind::Bytes { .. } | Kind::ListView { .. } => 3,
            _ => 2,
        }
    }
}

/// A column.
#[derive(Debug)]
pub(super) struct Field {
    pub name: String,
    pub kind: Kind,
    /// The values are numbers of entries in this dictionary, and how the numbers are stored.
    pub dictionary: Option<(i64, Kind)>,
    pub children: Vec<Field>,
}

/// The columns of a file. Errors: a type that is not supported, broken metadata.
pub(super) fn read(schema: Table) -> Result<Vec<Field>> {
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

fn fields(tables: Option<Vec<Table>>, depth: usize, left: &mut usize) -> Result<Vec<Field>> {
    let tables = tables.ok_or_else(|| broken("a column outside of the metadata"))?;
    if depth > MAX_DEPTH || tables.len() > *left {
        return Err(broken("too many columns inside others"));
    }
    *left -= tables.len();
    tables.into_iter().map(|table| field(table, depth, left)).collect()
}

fn field(table: Table, depth: usize, left: &mut usize) -> Result<Field> {
    let name = table.text(0).unwrap_or_default();
    let kind = kind(table).ok_or_else(|| {
        Error::unsupported("the type of a column is not supported")
            .found(format!("column `{name}`, type {} of Arrow", table.byte(2).unwrap_or(0)))
            .expected("texts, numbers, booleans, lists, structs, maps, dates, null")
            .hint("remove the column: `dataset.remove_columns([...])`")
    })?;
    let children = fields(table.tables(5), depth + 1, left)?;
    let wanted = match kind {
        Kind::List { .. } | Kind::ListView { .. } | Kind::FixedList(_) | Kind::Map => children.len() == 1,
        _ => true,
    };
    let entries = kind != Kind::Map || children[..].first().is_some_and(|entry| entry.children.len() == 2);
    if !wanted || !entries {
        return Err(broken(format!("column `{name}`")));
    }
    let dictionary = table.table(4).map(|of| {
        let index = of.table(1).and_then(int);
        let index = index.unwrap_or(Kind::Int { bytes: 4, signed: true });
        (of.i64(0).unwrap_or(0), index)
    });
    Ok(Field {
        name,
        kind,
        dictionary,
        children,
    })
}

fn int(table: Table) -> Option<Kind> {
    let bytes = match table.i32(0)? {
        8 => 1,
        16 => 2,
        32 => 4,
        64 => 8,
        _ => return None,
    };
    let signed = table.byte(1).unwrap_or(0) != 0;
    Some(Kind::Int { bytes, signed })
}

/// Dates, times and durations are numbers in the unit of the file.
fn kind(field: Table) -> Option<Kind> {
    let table = field.table(3)?;
    let size = |id| table.i32(id).and_then(|n| usize::try_from(n).ok());
    let signed = |bytes| Kind::Int { bytes, signed: true };
    Some(match field.byte(2)? {
        1 => Kind::Null,
        2 => int(table)?,
        3 => Kind::Float {
            bytes: match table.i16(0).unwrap_or(0) {
                0 => 2,
                1 => 4,
                2 => 8,
                _ => return None,
            },
        },
        4 | 5 => Kind::Bytes { wide: false },
        6 => Kind::Bool,
        7 => Kind::Decimal {
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
        12 => Kind::List { wide: false },
        13 => Kind::Struct,
        15 => Kind::FixedBytes(size(0)?),
        16 => Kind::FixedList(size(0)?),
        17 => Kind::Map,
        19 | 20 => Kind::Bytes { wide: true },
        21 => Kind::List { wide: true },
        23 | 24 => Kind::View,
        25 => Kind::ListView { wide: false },
        26 => Kind::ListView { wide: true },
        _ => return None,
    })
}
