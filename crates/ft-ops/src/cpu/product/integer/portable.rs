//! The products in plain Rust.

use super::{Codes, FLUSH, IntegerKernel, PLANE, RowBlock, STEP, SUM_LANES, values_of};

pub(super) struct Portable;

impl IntegerKernel for Portable {
    const FOUR_BY_FOUR: bool = false;

    #[inline(always)]
    unsafe fn sums<C: Codes, const N: usize, const M: usize>(block: &RowBlock<'_, C>) -> [[[f32; SUM_LANES]; M]; N] {
        block.check(N, M);
        let mut all = [[[0f32; SUM_LANES]; M]; N];
        for (row, sums) in all.iter_mut().enumerate() {
            let codes = block.codes[row * block.stride..].as_chunks::<STEP>().0;
            for group in 0..block.groups {
                let scale = C::scale(block.scales[row * block.groups + group]);
                let (start, end) = block.steps_of(group);
                for start in (start..end).step_by(FLUSH) {
                    let steps = start..end.min(start + FLUSH);
                    for (sums, values) in sums.iter_mut().zip(block.values.chunks_exact(block.width)) {
                        let mut integers = [0i32; SUM_LANES];
                        for step in steps.clone() {
                            let values = &values[values_of::<C>(step)..];
                            for plane in 0..C::PLANES {
                                for (place, value) in values[plane * PLANE..][..16].iter().enumerate() {
                                    integers[place / 2] += C::code(&codes[step], plane, place) * i32::from(*value);
                                }
                            }
                        }
                        for (sum, integer) in sums.iter_mut().zip(integers) {
                            *sum += integer as f32 * scale;
                        }
                    }
                }
            }
        }
        all
    }
}
