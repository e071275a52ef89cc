//! A model as a recipe or a flag names it.

use super::value::{ByKind, KeyType, KeyValue, ValueKind};
use crate::base::paths;
use crate::hub;
use crate::model::shapes;
use std::fmt;
use std::path::{Path, PathBuf};

/// The three meanings of a model name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelRef {
    /// `shape:NAME`: random weights of a built-in shape. Holds the whole text.
    Shape(String),
    /// A path on this machine, which may not exist.
    Dir(PathBuf),
    /// A hub id: `owner/name`, or `owner/name@revision`.
    Hub(String),
}

impl ModelRef {
    /// An existing path wins over a hub id with the same name.
    pub fn new(text: &str) -> Self {
        let id = hub::split_revision(text).map_or(text, |(id, _)| id);
        let local = Path::new(text).exists() || paths::is_meant(id) || !hub::is_id(id);
        if text.starts_with(shapes::PREFIX) {
            Self::Shape(text.into())
        } else if local {
            Self::Dir(text.into())
        } else {
            Self::Hub(text.into())
        }
    }

    pub fn is_shape(&self) -> bool {
        matches!(self, Self::Shape(_))
    }

    /// True for names without a revision: shapes and existing directories.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Shape(_) => true,
            Self::Dir(dir) => dir.is_dir(),
            Self::Hub(_) => false,
        }
    }

    /// The id and the revision of a hub id that names its revision.
    pub fn with_revision(&self) -> Option<(Self, String)> {
        let Self::Hub(text) = self else { return None };
        let (id, revision) = hub::split_revision(text)?;
        Some((Self::Hub(id.into()), revision.into()))
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The empty name.
impl Default for ModelRef {
    fn default() -> Self {
        Self::Dir(PathBuf::new())
    }
}

impl From<&str> for ModelRef {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape(text) | Self::Hub(text) => f.write_str(text),
            Self::Dir(dir) => write!(f, "{}", dir.display()),
        }
    }
}

impl KeyType<ByKind> for ModelRef {
    const KIND: ValueKind = ValueKind::Text;
    fn read(value: &KeyValue) -> Self {
        match value {
            KeyValue::Text(text) => Self::new(text),
            _ => Self::default(),
        }
    }
}

/// `None` is the empty text.
impl KeyType<ByKind> for Option<ModelRef> {
    const KIND: ValueKind = ValueKind::Text;
    fn read(value: &KeyValue) -> Self {
        Some(ModelRef::read(value)).filter(|model| !model.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_shape_a_directory_or_a_hub_id() {
        let hub = ModelRef::Hub("Qwen/Qwen2.5-0.5B".into());
        assert_eq!(ModelRef::new("Qwen/Qwen2.5-0.5B"), hub);
        assert_eq!(ModelRef::new("shape:tiny"), ModelRef::Shape("shape:tiny".into()));
        for dir in ["assets/tiny", "./Qwen/model", "/models/qwen", "~/models/qwen", ""] {
            assert_eq!(ModelRef::new(dir), ModelRef::Dir(dir.into()), "{dir}");
        }
        let tagged = ModelRef::new("Qwen/Qwen2.5-0.5B@v1");
        assert_eq!(tagged.with_revision(), Some((hub.clone(), "v1".into())));
        assert_eq!(hub.with_revision(), None);
        for text in ["Qwen/Qwen2.5-0.5B", "shape:tiny", "assets/tiny", "Qwen/Qwen2.5-0.5B@v1"] {
            assert_eq!(ModelRef::new(text).to_string(), text);
        }
    }
}
