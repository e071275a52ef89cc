//! The connection between the ranks of a run: how long the bytes of a step take at least.

use crate::base::{Error, Result};

/// A connection, by the bytes per second that one rank can send.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankLink {
    pub bytes_per_second: f64,
}

/// Units of a rate: networks count bits, memory and buses count bytes.
const UNITS: [(&str, f64); 4] = [("Gb", 1e9 / 8.0), ("Mb", 1e6 / 8.0), ("GB", 1e9), ("MB", 1e6)];

impl RankLink {
    /// Reads `100Gb`, `100Gb/s` or `12.5GB/s`.
    ///
    /// Errors: another form.
    pub fn parse(text: &str) -> Result<Self> {
        let rate = text.strip_suffix("/s").unwrap_or(text);
        let found = UNITS.iter().find_map(|(unit, factor)| {
            let number: f64 = rate.strip_suffix(unit)?.trim().parse().ok()?;
            (number.is_finite() && number > 0.0).then_some(number * factor)
        });
        match found {
            Some(bytes_per_second) => Ok(Self { bytes_per_second }),
            None => Err(Error::usage("this is not the rate of a connection")
                .found(format!("`{text}`"))
                .expected("bits or bytes per second, such as `100Gb` or `12.5GB`")),
        }
    }

    /// Seconds in which a rank sends `bytes`, if nothing else uses the connection. A lower bound: latency, and what a
    /// network takes for itself, are not in it.
    pub fn seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_bits_or_bytes() {
        for text in ["100Gb", "100Gb/s", "12.5GB/s", "12500 MB"] {
            assert_eq!(RankLink::parse(text).unwrap().seconds(25_000_000_000), 2.0, "{text}");
        }
        for text in ["", "100", "Gb", "-1Gb", "infGb", "1TB"] {
            assert!(RankLink::parse(text).is_err(), "{text}");
        }
    }
}
