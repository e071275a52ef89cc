//! Products of uneven groups of rows with a matrix for each group, in one launch; quantized matrices are dequantized before.
//!
//! Letters: R rows of all groups, K and N columns of x and y.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned, quantized};
use crate::grouped::{DEVICE_COLUMNS as COLUMNS, GroupWeight, Groups};
use crate::quantized::{FEW, Products, QTensors, TILE};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Same values as in `cuda/grouped.cu`.
const ROWS: usize = 128;
const F32_ROWS: usize = 64;
const THREADS: u32 = 128;
const STAGES: usize = 3;
const ROWS_OF_EXPERTS: &str = "the rows of experts";
const WEIGHT: &str = "the weight of an expert";
/// Bytes of shared memory of the bf16 kernels: with W as it is, and transposed.
const SHARED: [u32; 2] = [
    (2 * STAGES * (ROWS * 40 + COLUMNS * 40)) as u32,
    (2 * STAGES * (ROWS * 40 + 32 * (COLUMNS + 8))) as u32,
];

/// True if the kernels can multiply by this weight `[O, I]`: one type with the rows, and in 16 bits whole packs.
pub(crate) fn fits(rows: DType, weight: GroupWeight) -> bool {
    let narrow = |dims: &[usize]| dims.iter().all(|n| n.is_multiple_of(8));
    let known = |dims: &[usize]| rows == DType::F32 || (matches!(rows, DType::BF16 | DType::F16) && narrow(dims));
    match weight {
        GroupWeight::Dense(weight) => {
            let place = || address(weight, WEIGHT).is_ok_and(|place| aligned(&[place]));
            weight.dtype() == rows && known(weight.dims()) && (rows == DType::F32 || place())
        }
        GroupWeight::Quantized(weight) => {
            let dims = [weight.rows, weight.columns];
            let small = dims[0] * dims[1] <= TILE;
            quantized::dequantized_type(weight).dtype() == rows
                && known(&dims)
                && small
                && weight.products == Products::Dequantized
        }
    }
}

/// `y [R, N] (+)= x [R, K] · Wᵀ` with W `[N, K]`, or `x · W` with W `[K, N]` if `back`, for groups of successive rows: their
/// weights, and the number of rows of each.
pub(crate) fn product(x: &Tensor, groups: &Groups, y: &Tensor, back: bool, add: bool) -> Result<()> {
    let (gpu, kind) = (Gpu::of(x, ROWS_OF_EXPERTS)?, FloatType::of(x, ROWS_OF_EXPERTS)?);
    let rows: usize = groups.iter().map(|(_, rows)| rows).sum();
    if groups.iter().any(|(weight, _)| !fits(x.dtype(), *weight)) {
        return Err(Error::internal(
            "the weight of an expert does not fit a grouped product",
        ));
    }
    if rows != x.dims2()?.0 || rows != y.dims2()?.0 {
        return Err(Error::internal("the groups of a product are not its rows"));
    }
    let (mut elements, mut rest) = (0, groups);
    while !rest.is_empty() {
        let (count, used) = bufferful(rest, back);
        (elements, rest) = (elements.max(used), &rest[count..]);
    }
    let buffer = match elements {
        0 => None,
        _ => Some(gpu.empty(elements, kind.dtype())?),
    };
    let (mut first, mut rest) = (0, groups);
    while !rest.is_empty() {
        let (part, left) = rest.split_at(bufferful(rest, back).0);
        let weights = decode(&gpu, part, buffer.as_ref(), back)?;
        let mut tiles = GroupedTiles::new(kind, first);
        for ((weight, rows), place) in part.iter().zip(weights) {
            match (weight, place) {
                (_, Some(place)) => tiles.add(place, *rows),
                (GroupWeight::Quantized(weight), None) if *rows > 0 => {
                    let [x, y] = [x.narrow(0, tiles.next, *rows)?, y.narrow(0, tiles.next, *rows)?];
                    quantized::forward_into(&gpu, &y, &x, weight, add)?;
                    tiles.next += rows;
                }
                _ => {}
            }
        }
        first = tiles.next;
        multiply(&gpu, kind, tiles, x, y, back, add)?;
        rest = left;
    }
    Ok(())
}

/// How many of the next groups have dequantized weights of at most `TILE` elements, and these elements.
fn bufferful(groups: &Groups, back: bool) -> (usize, usize) {
    let mut used = 0;
    for (count, group) in groups.iter().enumerate() {
        let more = dequantized_elements(group, back);
        // The first one fits (`fits`).
        if count > 0 && used + more > TILE {
            return (count, used);
        }
        used += more;
    }
    (groups.len(), used)
}

/// Elements of the dequantized weight of a group: none if its weight is dense, or dequantized in registers.
fn dequantized_elements((weight, rows): &(GroupWeight, usize), back: bool) -> usize {
    match weight {
        GroupWeight::Quantized(weight) if *rows > 0 && (back || *rows > FEW) => weight.rows * weight.columns,
        _ => 0,
    }
}

/// The addresses of the weights, dense or dequantized into `buffer`; `None` for those of no rows, or dequantized in registers.
fn decode(gpu: &Gpu, groups: &Groups, buffer: Option<&Tensor>, back: bool) -> Result<Vec<Option<u64>>> {
    let mut places = Vec::with_capacity(groups.len());
    // Those that one launch dequantizes, and where they begin.
    let (mut run, mut start): (Vec<&QTensors>, usize) = (Vec::new(), 0);
    let mut launch = |run: &mut Vec<&QTensors>, next: Option<&QTensors>| {
        let ends = |first: &&QTensors| next.is_none_or(|next| !quantized::alike(first, next));
        if let (Some(buffer), true) = (buffer, run.first().is_some_and(ends)) {
            let elements = run.iter().map(|w| w.rows * w.columns).sum::<usize>();
            let to = buffer.flatten_all()?.narrow(0, start, elements)?;
            quantized::dequantize_all(gpu, run, &to)?;
            start += elements;
            run.clear();
        }
        Ok::<_, Error>(())
    };
    let mut used = 0;
    for group in groups {
        let (weight, rows) = group;
        places.push(match weight {
            GroupWeight::Dense(weight) if *rows > 0 => Some(address(weight, WEIGHT)?),
            GroupWeight::Quantized(weight) if dequantized_elements(group, back) > 0 => {
                launch(&mut run, Some(weight))?;
                run.push(weight);
                let buffer = buffer.ok_or_else(|| Error::internal("a grouped product has no buffer"))?;
                let place = address(buffer, WEIGHT)? + (used * buffer.dtype().size_in_bytes()) as u64;
                used += dequantized_elements(group, back);
                Some(place)
            }
            _ => None,
        });
    }
    launch(&mut run, None)?;
    Ok(places)
}

/// The tiles of a launch: the structures of `cuda/grouped.cu`.
struct GroupedTiles {
    bytes: Vec<u8>,
    count: usize,
    /// Most rows of a tile.
    most: usize,
    /// The first row of the next group.
    next: usize,
}

impl GroupedTiles {
    fn new(kind: FloatType, first: usize) -> Self {
        Self {
            bytes: Vec::new(),
            count: 0,
            most: if kind == FloatType::F32 { F32_ROWS } else { ROWS },
            next: first,
        }
    }

    /// The tiles of the next `rows` rows, of a group whose weight or bias is at `place`.
    fn add(&mut self, place: u64, rows: usize) {
        for part in (0..rows).step_by(self.most) {
            self.bytes.extend(place.to_ne_bytes());
            self.bytes.extend(((self.next + part) as u32).to_ne_bytes());
            self.bytes.extend(((rows - part).min(self.most) as u32).to_ne_bytes());
            self.count += 1;
        }
        self.next += rows;
    }

    /// Those of biases, for all rows.
    fn of_biases(kind: FloatType, groups: &[(&Tensor, usize)]) -> Result<Self> {
        let mut tiles = Self::new(kind, 0);
        for (bias, rows) in groups {
            tiles.add(address_of(bias, "the bias of an expert", kind.dtype())?, *rows);
        }
        Ok(tiles)
    }
}

fn multiply(
    gpu: &Gpu,
    kind: FloatType,
    tiles: GroupedTiles,
    x: &Tensor,
    y: &Tensor,
    back: bool,
    add: bool,
) -> Result<()> {
    let ((_, k), (_, n)) = (x.dims2()?, y.dims2()?);
    let places = [
        address(x, ROWS_OF_EXPERTS)?,
        address_of(y, ROWS_OF_EXPERTS, kind.dtype())?,
    ];
    if !aligned(&places) && kind.is_short() {
        return Err(Error::internal("the rows of experts are not aligned"));
    }
    if tiles.count == 0 || n == 0 {
        return Ok(());
    }
    let table = gpu.upload_bytes(&tiles.bytes)?;
    let args = [
        Arg::Address(places[0]),
        Arg::Address(address(&table, "a table of groups")?),
        Arg::small(n, ROWS_OF_EXPERTS)?,
        Arg::small(k, ROWS_OF_EXPERTS)?,
        Arg::I32(i32::from(add)),
        Arg::Address(places[1]),
    ];
    let grid = Grid {
        blocks: (tiles.count, n.div_ceil(COLUMNS)),
        threads: (THREADS, 1),
        shared: match kind {
            FloatType::F32 => 0,
            _ => SHARED[usize::from(back)],
        },
    };
    let name = [if back { "grouped_input_" } else { "grouped_forward_" }, kind.name()];
    // SAFETY: the tiles are rows of x and y, and the caller checked the shapes of the weights.
    unsafe { gpu.launch("grouped", name, grid, &args) }
}

/// As `grouped::bias_rows`, into y `[R, O]`.
pub(crate) fn bias_rows(groups: &[(&Tensor, usize)], factors: Option<&Tensor>, y: &Tensor) -> Result<()> {
    const NAME: &str = "biases of experts";
    let (gpu, kind) = (Gpu::of(y, NAME)?, FloatType::of(y, NAME)?);
    let (tiles, n) = (GroupedTiles::of_biases(kind, groups)?, y.dims2()?.1);
    if tiles.count == 0 || n == 0 {
        return Ok(());
    }
    let table = gpu.upload_bytes(&tiles.bytes)?;
    let args = [
        Arg::Address(address(&table, "a table of groups")?),
        Arg::Address(match factors {
            Some(factors) => address_of(factors, "factors of rows", DType::F32)?,
            None => 0,
        }),
        Arg::size(n),
        Arg::Address(address(y, NAME)?),
    ];
    let mut grid = Grid::line(tiles.count, THREADS);
    grid.blocks.1 = n.div_ceil(THREADS as usize);
    // SAFETY: the tiles are the rows of y; the caller checked the shapes.
    unsafe { gpu.launch("grouped", ["bias_rows_", kind.name()], grid, &args) }
}

/// As `grouped::bias_products_add`.
pub(crate) fn bias_products(groups: &[(&Tensor, usize)], x: &Tensor, to: &Tensor) -> Result<()> {
    const NAME: &str = "biases of experts";
    let (gpu, kind) = (Gpu::of(x, NAME)?, FloatType::of(x, NAME)?);
    let tiles = GroupedTiles::of_biases(kind, groups)?;
    if tiles.count == 0 {
        return Ok(());
    }
    let table = gpu.upload_bytes(&tiles.bytes)?;
    let args = [
        Arg::Address(address(&table, "a table of groups")?),
        Arg::Address(address(x, NAME)?),
        Arg::size(x.dims2()?.1),
        Arg::Address(address_of(to, "products of rows", DType::F32)?),
    ];
    // SAFETY: the tiles are the rows of x; the caller checked the shapes.
    unsafe {
        gpu.launch(
            "grouped",
            ["bias_products_", kind.name()],
            Grid::line(tiles.count, 2 * THREADS),
            &args,
        )
    }
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
