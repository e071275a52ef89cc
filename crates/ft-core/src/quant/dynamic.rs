//! The signed dynamic 8-bit code, which quantizes the absmax of NF4 blocks: the table of 8-bit first moments,
//! bit-equal to bitsandbytes' `create_dynamic_map`.

use crate::ops::step;
use std::sync::LazyLock;

/// 256 values in ascending order, from about -0.993 to 1.
pub(crate) fn signed() -> &'static [f32; 256] {
    static TABLE: LazyLock<[f32; 256]> = LazyLock::new(|| step::code_table(true));
    &TABLE
}

/// Returns the index of the value nearest to `x`; the lower one in a tie.
pub(crate) fn nearest(table: &[f32; 256], x: f32) -> u8 {
    let above = table.partition_point(|v| *v <= x);
    let below = above.saturating_sub(1);
    let (left, right) = ((x - table[below]).abs(), table.get(above).map(|v| (x - v).abs()));
    match right {
        Some(right) if right < left => above as u8,
        _ => below as u8,
    }
}
