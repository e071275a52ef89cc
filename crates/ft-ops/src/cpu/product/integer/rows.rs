//! Rows of activations, rounded to integers.

use super::{Codes, Int4, Int8, LARGEST, PLANE, STEP, values_of, width};
use crate::cpu::math::ROUND;
use crate::quantized::{QData, QMatrixView};
use rayon::prelude::*;

/// Rows `[M, I]`, rounded for the products with a weight.
pub(in super::super) struct RoundedRows {
    /// The integers, `[M, width]`, in the order of the planes of each two steps (`values_of`).
    pub(super) values: Vec<i16>,
    /// Integers of a row.
    pub(super) width: usize,
    /// Value of the integer 1, `[M]`.
    pub(super) units: Vec<f32>,
    /// For int4: the sum of the integers of each group, `[M, groups]`.
    pub(super) sums: Vec<f32>,
}

impl RoundedRows {
    /// `m` rows of `view.columns` values, `stride` apart.
    pub(in super::super) fn new(view: &QMatrixView<'_>, m: usize, x: &[f32], stride: usize) -> Self {
        let (width, group) = shape(view);
        let groups = group.map_or(0, |group| view.columns.div_ceil(group));
        let mut rows = Self {
            values: vec![0; m * width],
            width,
            units: vec![0.0; m],
            // A part of each row also without groups, for the loop.
            sums: vec![0.0; m * groups.max(1)],
        };
        let parts = rows.values.par_chunks_exact_mut(width).zip(&mut rows.units);
        let parts = parts.zip(rows.sums.par_chunks_exact_mut(groups.max(1)));
        parts.enumerate().for_each(|(index, ((values, unit), sums))| {
            let x = &x[index * stride..][..view.columns];
            let factor;
            (factor, *unit) = factor_and_unit(x);
            if unit.is_nan() {
                return;
            }
            match group {
                Some(group) => {
                    arrange::<Int4>(x, factor, values);
                    for (sum, x) in sums.iter_mut().zip(x.chunks(group)) {
                        *sum = x.iter().map(|x| i64::from(rounded(*x, factor))).sum::<i64>() as f32;
                    }
                }
                None => arrange::<Int8>(x, factor, values),
            }
        });
        rows
    }

    /// True if the rows were rounded for weights of this shape.
    pub(super) fn fits(&self, view: &QMatrixView<'_>) -> bool {
        let (width, group) = shape(view);
        let groups = group.map_or(1, |group| view.columns.div_ceil(group));
        let m = self.units.len();
        self.width == width && self.values.len() == m * width && self.sums.len() == m * groups
    }
}

/// Integers of a row, and the columns of a group of int4 codes.
fn shape(view: &QMatrixView<'_>) -> (usize, Option<usize>) {
    match view.codes {
        QData::Int4 { group, .. } => (width::<Int4>(view.columns / Int4::COLUMNS), Some(group)),
        _ => (width::<Int8>(view.columns / Int8::COLUMNS), None),
    }
}

/// The integers for the value 1 of a row, and the value of the integer 1. A row that is not finite gives results that are not.
fn factor_and_unit(x: &[f32]) -> (f32, f32) {
    let largest = x.iter().fold(0f32, |most, x| most.max(x.abs()));
    let unit = if x.iter().all(|x| x.is_finite()) {
        largest / LARGEST
    } else {
        f32::NAN
    };
    (
        if unit >= f32::MIN_POSITIVE {
            LARGEST / largest
        } else {
            0.0
        },
        unit,
    )
}

/// The nearest integer to `x · factor`, which is within 15 bits: it stands in the low bits of the sum.
#[inline(always)]
fn rounded(x: f32, factor: f32) -> i16 {
    (x * factor + ROUND).to_bits() as i16
}

fn arrange<C: Codes>(x: &[f32], factor: f32, values: &mut [i16]) {
    let mut integers = [0i16; 4 * STEP];
    for (step, x) in x.chunks_exact(C::COLUMNS).enumerate() {
        for (integer, x) in integers.iter_mut().zip(x) {
            *integer = rounded(*x, factor);
        }
        let start = values_of::<C>(step);
        for plane in 0..C::PLANES {
            for (place, to) in values[start + plane * PLANE..][..16].iter_mut().enumerate() {
                *to = integers[C::column(plane, place)];
            }
        }
    }
}
