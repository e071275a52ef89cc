//! Every instruction set, compared with the definition of the formats, element by element and bit by bit.

use super::super::product::CpuBackend;
use super::*;
use crate::quantized::{Absmax, CodeType, ProductType, QData, ScaleType, ScaledData, ScaledKind};

/// Random quantized data and scales for a weight `[rows, columns]`.
pub(crate) struct Random {
    rows: usize,
    columns: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    words: Vec<u32>,
    table: [f32; 256],
    /// Scales of two bytes, f16 or bf16.
    halves: [Vec<u8>; 2],
    bytes: Vec<u8>,
    exponents: Vec<u8>,
    order: Vec<u32>,
}

impl Random {
    pub(crate) fn new(rows: usize, columns: usize) -> Self {
        let n = rows * columns.next_multiple_of(16);
        // A linear congruential generator with full period; only its high bits are used.
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let mut unit = || next() as f32 / (1 << 24) as f32;
        let scales: Vec<f32> = (0..n).map(|_| 0.01 + unit()).collect();
        let word = |scale: f32, minimum: f32| scale.to_bits() >> 16 | (minimum.to_bits() & 0xFFFF_0000);
        let words = (0..n).map(|_| word(0.01 + unit(), unit() - 0.5)).collect();
        let table = std::array::from_fn(|_| unit());
        let small: Vec<f32> = (0..n).map(|_| 0.002 * (unit() - 0.5)).collect();
        let halves = [
            small
                .iter()
                .flat_map(|x| half::f16::from_f32(*x).to_le_bytes())
                .collect(),
            small
                .iter()
                .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())
                .collect(),
        ];
        let groups = columns.div_ceil(32) as f32;
        let order = (0..columns).map(|_| (unit() * groups) as u32).collect();
        Self {
            bytes: scales.iter().flat_map(|x| x.to_le_bytes()).collect(),
            exponents: (0..n).map(|_| 115 + (unit() * 10.0) as u8).collect(),
            halves,
            order,
            rows,
            columns,
            // Without the two NaN of E4M3.
            codes: (0..n)
                .map(|_| (unit() * 256.0) as u8)
                .map(|c| if c & 127 == 127 { c - 1 } else { c })
                .collect(),
            scales,
            words,
            table,
        }
    }

    /// Returns views in every format, with and without rounding.
    pub(crate) fn views(&self) -> Vec<QMatrixView<'_>> {
        let (codes, stride) = (self.codes.as_slice(), self.columns.next_multiple_of(16));
        let int4 = |group| QData::Int4 {
            codes,
            stride,
            group,
            scales: &self.words,
        };
        let int8 = |group| QData::Int8 {
            codes,
            stride,
            group,
            scales: &self.scales,
        };
        let absmax = Absmax::Double {
            codes,
            table: &self.table,
            scales: &self.scales,
            offset: 0.25,
        };
        let plain = Absmax::Plain(&self.scales);
        let scaled = |code, product, group, zeros: bool, order: bool| {
            let (scale, scales) = match product {
                ProductType::F16 => (ScaleType::F16, &self.halves[0]),
                ProductType::Bf16 => (ScaleType::Bf16, &self.halves[1]),
                _ if code == CodeType::E2m1 => (ScaleType::E8m0, &self.exponents),
                _ => (ScaleType::F32, &self.bytes),
            };
            QData::Scaled(ScaledData {
                kind: ScaledKind { code, scale, product },
                codes,
                stride,
                group,
                scales,
                zeros: if zeros { codes } else { &[] },
                order: if order { &self.order } else { &[] },
            })
        };
        use {CodeType::*, ProductType as By};
        let all = [
            scaled(U4, By::F16, 32, true, false),
            scaled(U4, By::F16, 32, true, true),
            scaled(U4, By::Bf16, 128, false, false),
            scaled(U4, By::F32, self.columns, false, false),
            scaled(E2m1, By::F32, 32, false, false),
            scaled(U8, By::F16, 64, true, false),
            scaled(U8, By::Bf16, 32, true, true),
            scaled(I8, By::Bf16, self.columns, false, false),
            scaled(I8, By::Absmax127, self.columns, false, false),
            scaled(E4m3, By::F32, 128, false, false),
            scaled(E4m3, By::Bf16, self.columns, false, false),
            QData::Nf4 {
                codes,
                levels: &FP4_TABLE,
                absmax,
            },
            QData::Bf16 {
                codes: &self.halves[1],
                stride: (2 * self.columns).next_multiple_of(16),
            },
            int8(self.columns),
            int8(128),
            int4(64),
            int4(128),
            QData::Nf4 {
                codes,
                levels: &NF4_TABLE,
                absmax,
            },
            QData::Nf4 {
                codes,
                levels: &NF4_TABLE,
                absmax: plain,
            },
        ];
        let view = |codes, bf16| QMatrixView {
            rows: self.rows,
            columns: self.columns,
            codes,
            bf16,
            rounds_rows: false,
        };
        all.into_iter().flat_map(|c| [view(c, false), view(c, true)]).collect()
    }
}

/// Dequantizes one element by the definition of the formats.
fn by_hand(view: &QMatrixView<'_>, row: usize, column: usize) -> f32 {
    let half = |codes: &[u8], at: usize| {
        (if at.is_multiple_of(2) {
            codes[at / 2] >> 4
        } else {
            codes[at / 2] & 15
        }) as usize
    };
    let value = match view.codes {
        QData::Int8 {
            codes,
            stride,
            group,
            scales,
        } => codes[row * stride + column] as i8 as f32 * scales[row * view.columns.div_ceil(group) + column / group],
        QData::Int4 {
            codes,
            stride,
            group,
            scales,
        } => {
            let word = scales[row * view.columns.div_ceil(group) + column / group];
            let (scale, minimum) = (f32::from_bits(word << 16), f32::from_bits(word >> 16 << 16));
            (half(&codes[row * stride..], column) as f64 * scale as f64 + minimum as f64) as f32
        }
        QData::Bf16 { codes, stride } => {
            let at = row * stride + 2 * column;
            half::bf16::from_le_bytes([codes[at], codes[at + 1]]).to_f32()
        }
        QData::Scaled(s) => {
            let code = if s.kind.code.is_nibble() {
                half(&s.codes[row * s.stride..], column) as u8
            } else {
                s.codes[row * s.stride + column]
            };
            let group = s.order.get(column).map_or(column / s.group, |g| *g as usize);
            let at = row * view.columns.div_ceil(s.group) + group;
            let zero = s.zeros.get(at).copied().unwrap_or(s.kind.code.middle());
            let (size, bytes) = (s.kind.scale.bytes(), s.scales);
            let two = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
            let scale = match s.kind.scale {
                ScaleType::F32 => f32::from_le_bytes(bytes[size * at..][..4].try_into().unwrap()),
                ScaleType::F16 => half::f16::from_bits(two(&bytes[size * at..])).to_f32(),
                ScaleType::Bf16 => half::bf16::from_bits(two(&bytes[size * at..])).to_f32(),
                ScaleType::E8m0 => 2f32.powi(i32::from(bytes[at]) - 127),
            };
            let level = match s.kind.code {
                CodeType::I8 => f32::from(code as i8),
                other => other.level(code) - f32::from(zero),
            };
            let product = level * scale;
            match s.kind.product {
                ProductType::F32 => product,
                ProductType::F16 => half::f16::from_f32(product).to_f32(),
                ProductType::Bf16 => half::bf16::from_f32(product).to_f32(),
                ProductType::Absmax127 => product * (1.0 / 127.0),
            }
        }
        QData::Nf4 { codes, levels, absmax } => {
            let at = row * view.columns + column;
            let absmax = match absmax {
                Absmax::Plain(values) => values[at / 64],
                Absmax::Double {
                    codes,
                    table,
                    scales,
                    offset,
                } => table[codes[at / 64] as usize] * scales[at / 64 / 256] + offset,
            };
            levels[half(codes, at)] * absmax
        }
    };
    if view.bf16 {
        half::bf16::from_f32(value).to_f32()
    } else {
        value
    }
}

#[test]
fn every_instruction_set_decodes_by_the_definition() {
    for (rows, columns) in [(3, 256), (5, 130), (2, 77), (1, 1), (7, 33)] {
        let random = Random::new(rows, columns);
        for (which, view) in random.views().iter().enumerate() {
            assert!(view.fits());
            for backend in CpuBackend::ALL.into_iter().filter(|p| p.available()) {
                for row in 0..rows {
                    for start in [0, 1, 2, 31, 64, 100].into_iter().filter(|s| *s < columns) {
                        for end in [start + 1, (start + 40).min(columns), columns] {
                            let mut to = vec![f32::NAN; end - start];
                            dequantize(backend.vector_isa(), view, row, start, &mut to);
                            for (i, x) in to.iter().enumerate() {
                                let want = by_hand(view, row, start + i);
                                assert!(
                                    x.to_bits() == want.to_bits() && view.element(row, start + i) == want,
                                    "{backend:?} view {which} [{rows}, {columns}] at {row}, {}: {x} {want}",
                                    start + i
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Also for weights whose f32 values are not rounded to bf16.
#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn steps_of_bf16_are_the_rounded_values() {
    use super::bf16;
    if !CpuBackend::Avx512Bf16.available() {
        eprintln!("no AVX512-BF16 here");
        return;
    }
    for (rows, columns) in [(3, 256), (5, 160), (2, 96), (1, 32), (2, 77)] {
        let random = Random::new(rows, columns);
        let mut fitting = 0;
        for (which, view) in random.views().iter().enumerate().filter(|(_, view)| bf16::fits(view)) {
            fitting += 1;
            for row in 0..rows {
                for start in (0..columns).step_by(bf16::STEP) {
                    for end in (start + bf16::STEP..=columns).step_by(bf16::STEP) {
                        let mut to = vec![half::bf16::NAN; end - start];
                        // SAFETY: the instructions were detected.
                        unsafe { bf16::dequantize(view, (row, start), (1, 64), &mut to) };
                        for (i, x) in to.iter().enumerate() {
                            let want = half::bf16::from_f32(by_hand(view, row, start + i));
                            assert!(
                                x.to_bits() == want.to_bits(),
                                "view {which} [{rows}, {columns}] at {row}, {}: {x} {want}",
                                start + i
                            );
                        }
                    }
                }
            }
        }
        // int8, int4, NF4 and FP4, and both forms of absmax, for weights of a bf16 model and of an f32 model.
        assert_eq!(fitting, if columns.is_multiple_of(bf16::STEP) { 14 } else { 0 });
    }
}

#[test]
fn views_that_do_not_fit_are_seen() {
    let random = Random::new(4, 64);
    for view in random.views() {
        assert!(!QMatrixView { rows: 4000, ..view }.fits());
        assert!(!QMatrixView { columns: 6400, ..view }.fits());
    }
}

#[test]
#[should_panic]
fn outside_is_refused() {
    let random = Random::new(4, 64);
    dequantize(None, &random.views()[0], 3, 60, &mut [0.0; 5]);
}
