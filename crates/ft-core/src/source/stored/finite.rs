//! Finds numbers of a quantized weight that are not finite in the bytes of its tensors, without making the weight.

use super::{QuantizedLayout, ToolLayout};
use crate::formats::StoredDtype;
use crate::ops::quantized::scale_and_minimum;
use crate::quant::{Format, QDATA, ScaledFormat, is_finite_pair};
use half::{bf16, f16};

/// The numbers in the bytes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum StoredNumbers {
    /// Of this type. Integers are always finite.
    Plain(StoredDtype),
    /// Scales: also their products with the codes are finite.
    Scales(ScaledFormat),
    /// A scale and a minimum in each word.
    Pairs,
}

impl StoredNumbers {
    /// The numbers of `tensor`, one of the tensors of the quantized parameter `name`. `None`: nothing that its values
    /// are computed from, or integers.
    pub(crate) fn of(
        layout: QuantizedLayout,
        format: Format,
        name: &str,
        (tensor, dtype): (&str, StoredDtype),
    ) -> Option<Self> {
        if let (QuantizedLayout::Other(tool), Format::Scaled(scaled)) = (layout, format) {
            let base = name.strip_suffix(".weight").unwrap_or(name);
            let suffix = tensor.strip_prefix(base).and_then(|rest| rest.strip_prefix('.'));
            let is_scale = match tool {
                ToolLayout::Gptq | ToolLayout::Awq => suffix == Some("scales"),
                ToolLayout::Packed => suffix == Some("weight_scale"),
                ToolLayout::Plain(own) => suffix == Some(own),
                ToolLayout::Bitsandbytes8 => suffix == Some("SCB"),
                ToolLayout::Mxfp4 => tensor.strip_prefix(name) == Some("_scales"),
                ToolLayout::Bitsandbytes4(_) => false,
            };
            return match suffix {
                _ if is_scale => Some(Self::Scales(scaled)),
                Some("weight") => Some(Self::Plain(dtype)),
                _ => None,
            };
        }
        match (tensor.strip_prefix(name)?.strip_prefix('.')?, format) {
            (QDATA, Format::Bf16) => Some(Self::Plain(StoredDtype::Bf16)),
            ("scales", Format::Int4 { .. }) => Some(Self::Pairs),
            ("scales" | "absmax" | "nested_absmax" | "nested_offset", _) => Some(Self::Plain(dtype)),
            _ => None,
        }
    }

    /// Bytes of a number.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.size(),
            Self::Scales(scaled) => scaled.kind.scale.bytes(),
            Self::Pairs => 4,
        }
    }

    /// Index of the first number in `raw` that must not be there.
    pub(crate) fn not_finite(self, raw: &[u8]) -> Option<usize> {
        match self {
            Self::Plain(dtype) => not_finite(dtype, raw),
            Self::Scales(scaled) => {
                let scale = scaled.kind.scale;
                (0..raw.len() / scale.bytes()).find(|at| !scaled.takes(scale.get(raw, *at)))
            }
            Self::Pairs => {
                let words = raw.as_chunks::<4>().0;
                words.iter().position(|word| !is_finite_pair(u32::from_le_bytes(*word)))
            }
        }
    }

    /// Number `at` of `raw`, for an error: of a pair the one that is not finite. Panics outside of `raw`.
    pub(crate) fn value(self, raw: &[u8], at: usize) -> f64 {
        let bytes = &raw[at * self.size()..(at + 1) * self.size()];
        match self {
            Self::Plain(dtype) => number(dtype, bytes),
            Self::Scales(scaled) => scaled.kind.scale.get(bytes, 0).into(),
            Self::Pairs => {
                let (scale, minimum) = scale_and_minimum(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
                let wrong = [scale, minimum].into_iter().find(|x| !x.is_finite());
                wrong.unwrap_or(scale).into()
            }
        }
    }
}

/// Index of the first non-finite value in `raw`: all exponent bits are set, or the pattern of an 8-bit float.
fn not_finite(dtype: StoredDtype, raw: &[u8]) -> Option<usize> {
    fn find<const N: usize>(raw: &[u8], bad: impl Fn([u8; N]) -> bool) -> Option<usize> {
        let (all, _) = raw.as_chunks::<N>();
        // No early exit in the inner loop, so that the compiler vectorizes it.
        let any = all
            .chunks(4096)
            .position(|some| some.iter().fold(false, |any, b| any | bad(*b)))?;
        all.iter()
            .skip(any * 4096)
            .position(|b| bad(*b))
            .map(|at| at + any * 4096)
    }
    match dtype {
        StoredDtype::F32 => find(raw, |b| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000),
        StoredDtype::F16 => find(raw, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
        StoredDtype::Bf16 => find(raw, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
        StoredDtype::F64 => find(raw, |b| u64::from_le_bytes(b) & (0x7ff << 52) == 0x7ff << 52),
        // It has no infinity: only all bits beside the sign are NaN.
        StoredDtype::F8E4M3 => find::<1>(raw, |[b]| b & 0x7f == 0x7f),
        StoredDtype::F8E5M2 => find::<1>(raw, |[b]| b & 0x7c == 0x7c),
        StoredDtype::F8E8M0 => find::<1>(raw, |[b]| b == 0xff),
        _ => None,
    }
}

/// A stored number. Of the types with 8 bits only NaN and infinity are distinguished.
fn number(dtype: StoredDtype, b: &[u8]) -> f64 {
    match (dtype, b) {
        (StoredDtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (StoredDtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (StoredDtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (StoredDtype::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        (StoredDtype::F8E5M2, [0x7c]) => f64::INFINITY,
        (StoredDtype::F8E5M2, [0xfc]) => f64::NEG_INFINITY,
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::formats::weights::Weights;
    use crate::formats::writer::{Values, write_file};
    use crate::ops::Dtype;
    use crate::quant;
    use crate::source::stored::{bytes, find, names, read, tensors};
    use crate::source::{Group, ParamInfo, Sublayer};
    use std::path::Path;

    fn param(shape: &[usize]) -> ParamInfo {
        ParamInfo {
            name: "a.weight".into(),
            shape: shape.to_vec(),
            group: Group::Layer(0),
            sublayer: Sublayer::Mlp,
        }
    }

    /// Sets all bits of the last number of each tensor of the weight in turn: `StoredNumbers` finds it if, and only if, the
    /// weight cannot be read for a number that is not finite. Returns how many were found.
    fn found_as_read(dir: &Path, shape: &[usize]) -> usize {
        let p = param(shape);
        let whole = Weights::open(dir).unwrap();
        let (layout, format) = find(&whole, &p.name).unwrap().unwrap();
        let file = std::fs::read(dir.join("model.safetensors")).unwrap();
        let copy = tempfile::tempdir().unwrap();
        if dir.join("config.json").is_file() {
            std::fs::copy(dir.join("config.json"), copy.path().join("config.json")).unwrap();
        }
        let mut found = 0;
        for tensor in names(&whole, layout, format, &p.name, (shape[0], shape[1])) {
            let info = whole.info(&tensor).unwrap();
            let numbers = StoredNumbers::of(layout, format, &p.name, (tensor.as_str(), info.dtype));
            let raw = whole.read_bytes(&tensor).unwrap();
            assert_eq!(numbers.and_then(|n| n.not_finite(&raw)), None, "{tensor} is whole");
            let size = numbers.map_or(info.dtype.size(), StoredNumbers::size);
            let mut bytes = file.clone();
            let end = (info.offset + info.bytes) as usize;
            bytes[end - size..end].fill(0xff);
            std::fs::write(copy.path().join("model.safetensors"), &bytes).unwrap();
            let weights = Weights::open(copy.path()).unwrap();
            // Another description of the weight is refused before its numbers are read.
            let refused = match find(&weights, &p.name) {
                Ok(Some((layout, format))) => read(&weights, &p, layout, format, Dtype::F32).err(),
                _ => None,
            };
            let refused = refused.is_some_and(|e| e.kind() == ErrorKind::NonFinite);
            let raw = weights.read_bytes(&tensor).unwrap();
            let at = numbers.and_then(|n| n.not_finite(&raw));
            assert_eq!(at.is_some(), refused, "{}: {tensor}", dir.display());
            if let (Some(numbers), Some(at)) = (numbers, at) {
                assert_eq!(at, raw.len() / size - 1, "{tensor}");
                assert!(!numbers.value(&raw, at).is_finite(), "{tensor}");
                found += 1;
            }
        }
        found
    }

    /// Row F4.
    #[test]
    fn numbers_that_are_not_finite_are_found_in_the_files_of_every_tool() {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/goldens/quantfiles");
        let mut cases = 0;
        for entry in std::fs::read_dir(goldens).unwrap() {
            let dir = entry.unwrap().path();
            let shape = Weights::open(&dir).unwrap().info("decoded").unwrap().shape.clone();
            assert!(found_as_read(&dir, &shape) >= 1, "{}", dir.display());
            cases += 1;
        }
        assert!(cases > 50, "{cases}");
    }

    /// Row F4.
    #[test]
    fn numbers_that_are_not_finite_are_found_in_files_of_ft() {
        let (rows, columns) = (6, 256);
        let values: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.37).sin()).collect();
        let p = param(&[rows, columns]);
        let mut cases: Vec<_> = Format::ALL.map(|format| (QuantizedLayout::Ft, format)).to_vec();
        cases.extend([false, true].map(|double| (QuantizedLayout::Bitsandbytes, Format::Nf4 { double })));
        for (layout, format) in cases {
            let dir = tempfile::tempdir().unwrap();
            let quantized = quant::quantize(&values, (rows, columns), format, Dtype::F32).unwrap();
            let plans = tensors(layout, format, &p.name, (rows, columns));
            write_file(&dir.path().join("model.safetensors"), &plans, &[], |plan, sink| {
                sink(Values::Raw(&bytes(layout, &quantized, &p.name, plan)?))
            })
            .unwrap();
            let found = found_as_read(dir.path(), &[rows, columns]);
            // Codes of the absmax have a scale and, in the layout of ft, an offset beside them.
            let expected = match (layout, format) {
                (QuantizedLayout::Ft, Format::Nf4 { double: true }) => 2,
                _ => 1,
            };
            assert_eq!(found, expected, "{layout:?} {format}");
        }
    }

    #[test]
    fn only_numbers_that_are_not_finite_are_found() {
        let cases: [(StoredDtype, &[u8]); 5] = [
            (StoredDtype::F8E4M3, &[0x7f, 0xff]),
            (StoredDtype::F8E5M2, &[0x7c, 0x7d, 0x7e, 0x7f, 0xfc, 0xfd, 0xfe, 0xff]),
            (StoredDtype::F8E8M0, &[0xff]),
            (StoredDtype::I8, &[]),
            (StoredDtype::U8, &[]),
        ];
        for (dtype, wrong) in cases {
            let found = (0..=255u8).filter(|byte| not_finite(dtype, &[0, *byte]) == Some(1));
            assert_eq!(found.collect::<Vec<u8>>(), wrong, "{dtype}");
        }
        assert_eq!(number(StoredDtype::F8E5M2, &[0xfc]), f64::NEG_INFINITY);
        // After more than one part of the search.
        let mut raw = vec![0u8; 9000];
        raw[8999] = 0x7f;
        assert_eq!(not_finite(StoredDtype::F8E4M3, &raw), Some(8999));
    }
}
