//! Elementwise operations on a GPU.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use candle_core::Tensor;
use ft_base::Result;

/// Returns the kernel arguments: number of elements, and number of packs of `pack` elements (0 if an address is not
/// aligned).
pub(super) fn counts(n: usize, pack: usize, addresses: &[u64]) -> [Arg; 2] {
    let packs = if aligned(addresses) { n / pack } else { 0 };
    [Arg::size(n), Arg::size(packs)]
}

/// As `counts`, for a kernel with an operand by column: no pack crosses rows.
pub(super) fn row_counts((rows, columns): (usize, usize), pack: usize, addresses: &[u64]) -> [Arg; 2] {
    let n = rows * columns;
    if columns.is_multiple_of(pack) {
        counts(n, pack, addresses)
    } else {
        [Arg::size(n), Arg::size(0)]
    }
}

/// Returns the grid for a loop over n elements in packs.
pub(super) fn grid(n: usize, pack: usize) -> Grid {
    Grid::stride(n.div_ceil(pack))
}

/// Returns `t` as `kind`: `t` itself or a copy.
pub(crate) fn cast(t: &Tensor, kind: FloatType) -> Result<Tensor> {
    const NAME: &str = "a tensor whose type is changed";
    let from = FloatType::of(t, NAME)?;
    if from == kind {
        return Ok(t.clone());
    }
    if from.is_short() && kind.is_short() {
        // No kernel has both types of 16 bits.
        return cast(&cast(t, FloatType::F32)?, kind);
    }
    let gpu = Gpu::of(t, NAME)?;
    let y = gpu.empty(t.shape(), kind.dtype())?;
    let n = t.elem_count();
    let places = [address(t, NAME)?, address(&y, NAME)?];
    let [count, packs] = counts(n, 8, &places);
    let args = [Arg::Address(places[0]), Arg::Address(places[1]), count, packs];
    let name = ["cast_", from.name(), "_", kind.name()];
    // SAFETY: both have n elements of these types.
    unsafe { gpu.launch("elementwise", name, grid(n, 8), &args)? };
    Ok(y)
}

/// Computes `y = a + b` into `y`, which may be `a`. y has the type of a.
fn add_into(y: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    const NAME: &str = "a tensor that is added";
    let gpu = Gpu::of(a, NAME)?;
    let kinds = (FloatType::of(a, NAME)?, FloatType::of(b, NAME)?);
    let pack = kinds.0.pack().max(kinds.1.pack());
    let n = a.elem_count();
    let places = [address(a, NAME)?, address(b, NAME)?, address_of(y, NAME, a.dtype())?];
    let [count, packs] = counts(n, pack, &places);
    let args = [places[0], places[1], places[2]].map(Arg::Address);
    let name = ["add_", kinds.0.name(), "_", kinds.1.name()];
    // SAFETY: all have n elements (checked by the callers); a thread writes only positions that no other thread reads.
    unsafe {
        gpu.launch(
            "elementwise",
            name,
            grid(n, pack),
            &[args[0], args[1], args[2], count, packs],
        )
    }
}

/// Computes `a + b`, of the type of a.
pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(a, "a tensor that is added")?;
    let y = gpu.empty(a.shape(), a.dtype())?;
    add_into(&y, a, b)?;
    Ok(y)
}

/// Computes `acc += g`.
pub(crate) fn add_assign(acc: &Tensor, g: &Tensor) -> Result<()> {
    add_into(acc, acc, g)
}

/// Adds `row` `[C]` to every row of `t` `[N, C]`.
pub(crate) fn add_rows(t: &Tensor, row: &Tensor) -> Result<()> {
    const NAME: &str = "a tensor to which a row is added";
    let gpu = Gpu::of(t, NAME)?;
    let (kind, of) = (FloatType::of(t, NAME)?, FloatType::of(row, "a row that is added")?);
    let (rows, columns) = t.dims2()?;
    let pack = kind.pack().max(of.pack());
    let places = [address(row, "a row that is added")?, address(t, NAME)?];
    let [count, packs] = row_counts((rows, columns), pack, &places);
    let [row, to] = places.map(Arg::Address);
    let args = [row, to, count, Arg::size(columns), packs];
    let name = ["add_rows_", kind.name(), "_", of.name()];
    // SAFETY: `row` has `columns` elements, t is [rows, columns].
    unsafe { gpu.launch("elementwise", name, grid(rows * columns, pack), &args) }
}

/// Computes `t *= factor`.
pub(crate) fn scale_assign(t: &Tensor, factor: f32) -> Result<()> {
    const NAME: &str = "a tensor that is scaled";
    let gpu = Gpu::of(t, NAME)?;
    let kind = FloatType::of(t, NAME)?;
    let n = t.elem_count();
    let place = address(t, NAME)?;
    let [count, packs] = counts(n, kind.pack(), &[place]);
    let args = [Arg::Address(place), Arg::F32(factor), count, packs];
    // SAFETY: t has n elements of this type.
    unsafe { gpu.launch("elementwise", ["scale_", kind.name()], grid(n, kind.pack()), &args) }
}

/// Zeroes the elements of `t` whose random number is below `p`, and multiplies the others by `keep`.
pub(crate) fn dropout_assign(t: &Tensor, key: u64, p: f32, keep: f32) -> Result<()> {
    const NAME: &str = "a tensor with dropout";
    let gpu = Gpu::of(t, NAME)?;
    let kind = FloatType::of(t, NAME)?;
    let n = t.elem_count();
    let place = address(t, NAME)?;
    let [count, packs] = counts(n, kind.pack(), &[place]);
    let args = [
        Arg::Address(place),
        Arg::Address(place),
        Arg::U64(key),
        Arg::F32(p),
        Arg::F32(keep),
        count,
        packs,
    ];
    // SAFETY: t has n elements of this type.
    unsafe { gpu.launch("elementwise", ["dropout_", kind.name()], grid(n, kind.pack()), &args) }
}
