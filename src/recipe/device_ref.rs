//! A device as a recipe or a flag names it.

use super::value::{AUTO, ByKind, KeyType, KeyValue, ValueKind};
use std::fmt;

/// The meanings of a device name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceRef {
    /// The first GPU that this build supports, else the CPU. Of several ranks each gets a GPU of its own.
    Auto,
    Cpu,
    /// `cuda:N`; `None` is `cuda`, which a plan accepts.
    Gpu(Option<usize>),
    /// A text that names no device.
    Unknown(String),
}

impl DeviceRef {
    pub fn new(text: &str) -> Self {
        let gpu = || match text.strip_prefix("cuda")? {
            "" => Some(Self::Gpu(None)),
            rest => {
                let ordinal = rest.strip_prefix(':').filter(|n| n.len() < 4)?;
                Some(Self::Gpu(Some(ordinal.parse().ok()?)))
            }
        };
        match text {
            AUTO => Self::Auto,
            "cpu" => Self::Cpu,
            _ => gpu().unwrap_or_else(|| Self::Unknown(text.into())),
        }
    }

    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpu(_))
    }

    /// N of `cuda:N`.
    pub fn ordinal(&self) -> Option<usize> {
        match self {
            Self::Gpu(ordinal) => *ordinal,
            _ => None,
        }
    }
}

impl fmt::Display for DeviceRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str(AUTO),
            Self::Cpu => f.write_str("cpu"),
            Self::Gpu(None) => f.write_str("cuda"),
            Self::Gpu(Some(ordinal)) => write!(f, "cuda:{ordinal}"),
            Self::Unknown(text) => f.write_str(text),
        }
    }
}

impl KeyType<ByKind> for DeviceRef {
    const KIND: ValueKind = ValueKind::Text;
    fn read(value: &KeyValue) -> Self {
        match value {
            KeyValue::Text(text) => Self::new(text),
            _ => Self::Auto,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_auto_the_cpu_a_gpu_or_unknown() {
        let named = [
            ("auto", DeviceRef::Auto),
            ("cpu", DeviceRef::Cpu),
            ("cuda", DeviceRef::Gpu(None)),
            ("cuda:0", DeviceRef::Gpu(Some(0))),
            ("cuda:12", DeviceRef::Gpu(Some(12))),
        ];
        for (text, device) in named {
            assert_eq!(DeviceRef::new(text), device);
            assert_eq!(device.to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda0", "cuda:1000", "CPU"] {
            assert_eq!(DeviceRef::new(text), DeviceRef::Unknown(text.into()));
            assert_eq!(DeviceRef::new(text).to_string(), text);
        }
    }
}
