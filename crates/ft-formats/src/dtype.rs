//! Number formats of safetensors files.

/// Number format of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoredDtype {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent bits.
    F8E4M3,
    /// 8-bit float, 5 exponent bits.
    F8E5M2,
    /// 8-bit power of two.
    F8E8M0,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

const NAMES: [(StoredDtype, &str, usize); 16] = [
    (StoredDtype::F64, "F64", 8),
    (StoredDtype::F32, "F32", 4),
    (StoredDtype::F16, "F16", 2),
    (StoredDtype::Bf16, "BF16", 2),
    (StoredDtype::F8E4M3, "F8_E4M3", 1),
    (StoredDtype::F8E5M2, "F8_E5M2", 1),
    (StoredDtype::F8E8M0, "F8_E8M0", 1),
    (StoredDtype::I64, "I64", 8),
    (StoredDtype::U64, "U64", 8),
    (StoredDtype::I32, "I32", 4),
    (StoredDtype::U32, "U32", 4),
    (StoredDtype::I16, "I16", 2),
    (StoredDtype::U16, "U16", 2),
    (StoredDtype::I8, "I8", 1),
    (StoredDtype::U8, "U8", 1),
    (StoredDtype::Bool, "BOOL", 1),
];

impl StoredDtype {
    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(d, ..)| *d == self).map_or("", |(_, n, _)| n)
    }

    /// The format with this safetensors name: `BF16`.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, n, _)| *n == name).map(|(d, ..)| *d)
    }

    /// Bytes of one number.
    pub fn size(self) -> usize {
        NAMES.iter().find(|(d, ..)| *d == self).map_or(1, |(.., s)| *s)
    }

    /// True if it can be read as weights: f64, f32, f16 or bf16.
    pub fn is_weight(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16)
    }
}

impl std::fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for (dtype, name, size) in NAMES {
            assert_eq!(StoredDtype::from_name(name), Some(dtype));
            assert_eq!((dtype.name(), dtype.size()), (name, size));
        }
        assert_eq!(StoredDtype::from_name("F4"), None);
    }
}
