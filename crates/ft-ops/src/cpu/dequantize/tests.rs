//! Every instruction set, compared with the definition of the formats, element by element and bit by bit.

use super::super::product::CpuBackend;
use super::*;
use crate::quantized::{Absmax, QData};

/// Random quantized data and scales for a weight `[rows, columns]`.
pub(crate) struct Random {
    rows: usize,
    columns: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    words: Vec<u32>,
    table: [f32; 256],
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
        let scales = (0..n).map(|_| 0.01 + unit()).collect();
        let word = |scale: f32, minimum: f32| scale.to_bits() >> 16 | (minimum.to_bits() & 0xFFFF_0000);
        let words = (0..n).map(|_| word(0.01 + unit(), unit() - 0.5)).collect();
        let table = std::array::from_fn(|_| unit());
        Self {
            rows,
            columns,
            codes: (0..n).map(|_| (unit() * 256.0) as u8).collect(),
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
        let all = [
            int8(self.columns),
            int8(128),
            int4(64),
            int4(128),
            QData::Nf4 { codes, absmax },
            QData::Nf4 { codes, absmax: plain },
        ];
        let view = |codes, bf16| QMatrixView {
            rows: self.rows,
            columns: self.columns,
            codes,
            bf16,
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
        QData::Nf4 { codes, absmax } => {
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
            NF4_TABLE[half(codes, at)] * absmax
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
