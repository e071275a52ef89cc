//! The structs of the parquet format, as far as the decoder reads them (parquet.thrift of apache/parquet-format 2.12).
//! The decoder reads a field by its number, whatever type the file gives for its value.

/// What the value of a field is.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Boolean,
    Byte,
    /// Of 16, 32 or 64 bits.
    Integer,
    Double,
    Bytes,
    List(&'static Kind),
    Struct(Fields),
}

/// The fields of a struct by number.
pub(super) type Fields = &'static [(i16, Kind)];

impl Kind {
    /// Whether `wire`, the type that the file gives, is of this kind.
    pub(super) fn is(self, wire: u8) -> bool {
        match self {
            Self::Boolean => matches!(wire, 1 | 2),
            Self::Byte => wire == 3,
            Self::Integer => matches!(wire, 4..=6),
            Self::Double => wire == 7,
            Self::Bytes => wire == 8,
            Self::List(_) => matches!(wire, 9 | 10),
            Self::Struct(_) => wire == 12,
        }
    }
}

use Kind::{Boolean, Byte, Bytes, Double, Integer, List, Struct};

/// `PageHeader`.
pub(super) const PAGE: Fields = &[
    (1, Integer),
    (2, Integer),
    (3, Integer),
    (4, Integer),
    (5, Struct(DATA_PAGE)),
    (6, Struct(&[])),
    (7, Struct(&[(1, Integer), (2, Integer), (3, Boolean)])),
    (8, Struct(DATA_PAGE_V2)),
];

const DATA_PAGE: Fields = &[
    (1, Integer),
    (2, Integer),
    (3, Integer),
    (4, Integer),
    (5, Struct(STATISTICS)),
];

const DATA_PAGE_V2: Fields = &[
    (1, Integer),
    (2, Integer),
    (3, Integer),
    (4, Integer),
    (5, Integer),
    (6, Integer),
    (7, Boolean),
    (8, Struct(STATISTICS)),
];

const STATISTICS: Fields = &[
    (1, Bytes),
    (2, Bytes),
    (3, Integer),
    (4, Integer),
    (5, Bytes),
    (6, Bytes),
    (7, Boolean),
    (8, Boolean),
    (9, Integer),
];

/// `FileMetaData`.
pub(super) const FOOTER: Fields = &[
    (1, Integer),
    (2, List(&Struct(SCHEMA_ELEMENT))),
    (3, Integer),
    (4, List(&Struct(ROW_GROUP))),
    (5, List(&Struct(KEY_VALUE))),
    (6, Bytes),
    (7, List(&Struct(EMPTY_VARIANTS))),
];

const KEY_VALUE: Fields = &[(1, Bytes), (2, Bytes)];

/// Unions whose variants have no fields: `ColumnOrder`, `TimeUnit`.
const EMPTY_VARIANTS: Fields = &[(1, Struct(&[])), (2, Struct(&[])), (3, Struct(&[]))];

const SCHEMA_ELEMENT: Fields = &[
    (1, Integer),
    (2, Integer),
    (3, Integer),
    (4, Bytes),
    (5, Integer),
    (6, Integer),
    (7, Integer),
    (8, Integer),
    (9, Integer),
    (10, Struct(LOGICAL_TYPE)),
];

const TIME: Kind = Struct(&[(1, Boolean), (2, Struct(EMPTY_VARIANTS))]);

const LOGICAL_TYPE: Fields = &[
    (1, Struct(&[])),
    (2, Struct(&[])),
    (3, Struct(&[])),
    (4, Struct(&[])),
    (5, Struct(&[(1, Integer), (2, Integer)])),
    (6, Struct(&[])),
    (7, TIME),
    (8, TIME),
    (10, Struct(&[(1, Byte), (2, Boolean)])),
    (11, Struct(&[])),
    (12, Struct(&[])),
    (13, Struct(&[])),
    (14, Struct(&[])),
    (15, Struct(&[])),
    (16, Struct(&[(1, Byte)])),
    (17, Struct(&[(1, Bytes)])),
    (18, Struct(&[(1, Bytes), (2, Integer)])),
    (19, Struct(&[])),
];

const ROW_GROUP: Fields = &[
    (1, List(&Struct(COLUMN_CHUNK))),
    (2, Integer),
    (3, Integer),
    (4, List(&Struct(&[(1, Integer), (2, Boolean), (3, Boolean)]))),
    (5, Integer),
    (6, Integer),
    (7, Integer),
];

const COLUMN_CHUNK: Fields = &[
    (1, Bytes),
    (2, Integer),
    (3, Struct(COLUMN)),
    (4, Integer),
    (5, Integer),
    (6, Integer),
    (7, Integer),
];

/// `ColumnMetaData`.
const COLUMN: Fields = &[
    (1, Integer),
    (2, List(&Integer)),
    (3, List(&Bytes)),
    (4, Integer),
    (5, Integer),
    (6, Integer),
    (7, Integer),
    (8, List(&Struct(KEY_VALUE))),
    (9, Integer),
    (10, Integer),
    (11, Integer),
    (12, Struct(STATISTICS)),
    (13, List(&Struct(&[(1, Integer), (2, Integer), (3, Integer)]))),
    (14, Integer),
    (15, Integer),
    (16, Struct(&[(1, Integer), (2, List(&Integer)), (3, List(&Integer))])),
    (17, Struct(&[(1, Struct(BOUNDING_BOX)), (2, List(&Integer))])),
];

const BOUNDING_BOX: Fields = &[
    (1, Double),
    (2, Double),
    (3, Double),
    (4, Double),
    (5, Double),
    (6, Double),
    (7, Double),
    (8, Double),
];
