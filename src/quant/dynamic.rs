//! The signed dynamic 8-bit code (Dettmers 2016, arXiv 1511.04561, section 2.1; bitsandbytes' `create_dynamic_map`):
//! a sign, an exponent of base 10 in unary, and a linear fraction in the bits that are left. It codes the absmax of
//! NF4 blocks. The sums and products are done in f32 in the order of bitsandbytes: the table has the same bits.

use std::sync::LazyLock;

const EXPONENTS: i32 = 7;

/// 256 values in ascending order, from about -0.993 to 1.
pub(crate) fn signed() -> &'static [f32; 256] {
    static TABLE: LazyLock<[f32; 256]> = LazyLock::new(build);
    &TABLE
}

fn build() -> [f32; 256] {
    // Two values are neither positive nor negative halves: 0, which is here already, and 1.
    let mut table = [0f32; 256];
    table[1] = 1.0;
    let mut n = 2;
    for i in 0..EXPONENTS {
        let scale = 10f64.powi(i - (EXPONENTS - 1)) as f32;
        let items = (1usize << i) + 1;
        let boundary = |at: usize| {
            let (start, end) = (0.1f32, 1.0f32);
            let step = (end - start) / (items - 1) as f32;
            // From both ends, as torch.linspace goes.
            if at < items / 2 {
                step.mul_add(at as f32, start)
            } else {
                (-step).mul_add((items - 1 - at) as f32, end)
            }
        };
        for at in 0..items - 1 {
            let mean = (boundary(at) + boundary(at + 1)) / 2.0;
            table[n] = scale * mean;
            table[n + 1] = -scale * mean;
            n += 2;
        }
    }
    table.sort_by(f32::total_cmp);
    table
}

/// Index of the value nearest to `x`; of two equally near the lower.
pub(crate) fn nearest(table: &[f32; 256], x: f32) -> u8 {
    let above = table.partition_point(|v| *v <= x);
    let below = above.saturating_sub(1);
    let (left, right) = ((x - table[below]).abs(), table.get(above).map(|v| (x - v).abs()));
    match right {
        Some(right) if right < left => above as u8,
        _ => below as u8,
    }
}
