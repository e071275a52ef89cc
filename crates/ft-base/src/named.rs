//! Enums whose values have names in text: in settings, files and metrics.

/// An enum whose values have names.
pub trait NamedEnum: Sized {
    /// All names, in the order of the values.
    const NAMES: &'static [&'static str];
    /// The value of this name; the first value for any other text. `parse` of the enum returns `None` for it.
    fn of(name: &str) -> Self;
}

/// Declares an enum whose values have the given names, with `NAMES`, `parse` and `name`.
#[macro_export]
macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* #[doc = concat!("(`", $text, "`)")] $variant),+ }
        impl $name {
            /// All names, in the order of the values.
            pub const NAMES: &'static [&'static str] = &[$($text),+];
            /// The value of this name.
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some(Self::$variant),)+ _ => None }
            }
            /// The name of this value.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }
        impl $crate::NamedEnum for $name {
            const NAMES: &'static [&'static str] = $name::NAMES;
            fn of(name: &str) -> Self {
                Self::parse(name).unwrap_or([$(Self::$variant),+][0])
            }
        }
    };
}
