//! Encoding, parts, errors.
