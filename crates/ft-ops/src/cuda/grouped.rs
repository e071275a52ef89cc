//! Products of uneven groups of rows with a matrix for each group, in one launch.
//!
//! Letters: R rows of all groups, K and N columns of x and y.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Same values as in `cuda/grouped.cu`.
const ROWS: usize = 128;
const F32_ROWS: usize = 64;
const COLUMNS: usize = 128;
const THREADS: u32 = 128;
const STAGES: usize = 3;
/// Bytes of shared memory of the bf16 kernels: with W as it is, and transposed.
const SHARED: [u32; 2] = [
    (2 * STAGES * (ROWS * 40 + COLUMNS * 40)) as u32,
    (2 * STAGES * (ROWS * 40 + 32 * (COLUMNS + 8))) as u32,
];

/// True if the kernels can multiply by these weights, `[O, I]` each: one type with the rows, and in 16 bits whole packs.
pub(crate) fn fits(rows: DType, weight: &Tensor) -> bool {
    let narrow = || weight.dims().iter().all(|n| n.is_multiple_of(8));
    let place = || address(weight, "the weight of an expert").is_ok_and(|place| aligned(&[place]));
    weight.dtype() == rows && (rows == DType::F32 || (matches!(rows, DType::BF16 | DType::F16) && narrow() && place()))
}

/// `y [R, N] (+)= x [R, K] · Wᵀ` with W `[N, K]`, or `x · W` with W `[K, N]` if `back`, for groups of successive rows: their
/// weights, and the number of rows of each.
pub(crate) fn product(x: &Tensor, groups: &[(&Tensor, usize)], y: &Tensor, back: bool, add: bool) -> Result<()> {
    const NAME: &str = "the rows of experts";
    let (gpu, kind) = (Gpu::of(x, NAME)?, FloatType::of(x, NAME)?);
    let ((_, k), (_, n)) = (x.dims2()?, y.dims2()?);
    let mut tiles: Vec<u8> = Vec::new();
    let (mut first, mut count) = (0usize, 0usize);
    let most = if kind == FloatType::F32 { F32_ROWS } else { ROWS };
    for (weight, rows) in groups {
        if !fits(x.dtype(), weight) {
            return Err(Error::internal(
                "the weight of an expert does not fit a grouped product",
            ));
        }
        let place = address(weight, "the weight of an expert")?;
        for part in (0..*rows).step_by(most) {
            tiles.extend(place.to_ne_bytes());
            tiles.extend(((first + part) as u32).to_ne_bytes());
            tiles.extend(((rows - part).min(most) as u32).to_ne_bytes());
            count += 1;
        }
        first += rows;
    }
    let places = [address(x, NAME)?, address_of(y, NAME, kind.dtype())?];
    if first != x.dims2()?.0 || first != y.dims2()?.0 || !aligned(&places) && kind.is_short() {
        return Err(Error::internal("the groups of a product are not its rows"));
    }
    if count == 0 || n == 0 {
        return Ok(());
    }
    let tiles = gpu.upload_bytes(&tiles)?;
    let args = [
        Arg::Address(places[0]),
        Arg::Address(address(&tiles, "a table of groups")?),
        Arg::small(n, NAME)?,
        Arg::small(k, NAME)?,
        Arg::I32(i32::from(add)),
        Arg::Address(places[1]),
    ];
    let grid = Grid {
        blocks: (count, n.div_ceil(COLUMNS)),
        threads: (THREADS, 1),
        shared: match kind {
            FloatType::F32 => 0,
            _ => SHARED[usize::from(back)],
        },
    };
    let name = [if back { "grouped_input_" } else { "grouped_forward_" }, kind.name()];
    // SAFETY: the tiles cover the rows of x and y, and the caller checked the shapes of the weights.
    unsafe { gpu.launch("grouped", name, grid, &args) }
}

/// Adds to each row of y `[N, D]` the rows of `part` `[R, D]` that belong to it: of `places` `[N, K]` u32, ascending in a row,
/// those from `first` on.
pub(crate) fn combine(y: &Tensor, part: &Tensor, places: &Tensor, first: usize) -> Result<()> {
    const NAME: &str = "the output of experts";
    let (gpu, kind) = (Gpu::of(y, NAME)?, FloatType::of(y, NAME)?);
    let ((tokens, d), (rows, _), k) = (y.dims2()?, part.dims2()?, places.dims2()?.1);
    let (from, to) = (
        address_of(part, "the output of an expert", y.dtype())?,
        address(y, NAME)?,
    );
    let (threads, packs) = super::experts::row(kind, d, &[from, to]);
    let args = [
        Arg::Address(from),
        Arg::Address(address_of(places, "the rows of tokens", DType::U32)?),
        Arg::small(k, "experts of a token")?,
        Arg::I32(first as i32),
        Arg::I32(rows as i32),
        Arg::size(d),
        packs,
        Arg::Address(to),
    ];
    // SAFETY: the caller checked the shapes.
    unsafe { gpu.launch("grouped", ["combine_", kind.name()], Grid::line(tokens, threads), &args) }
}
