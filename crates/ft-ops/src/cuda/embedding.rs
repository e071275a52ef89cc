//! Gather and scatter of rows by index on a GPU.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use crate::embedding::NoiseRow;
use candle_core::{DType, Tensor};
use ft_base::Result;

/// Returns the number of threads for a row of `d` elements.
fn threads(d: usize, pack: usize) -> u32 {
    d.div_ceil(pack).div_ceil(32).clamp(1, 8) as u32 * 32
}

/// Returns the number of 16-byte packs in a row: 0 if a row may be unaligned.
fn packs(kind: FloatType, d: usize, from: u64, to: u64) -> usize {
    if d.is_multiple_of(kind.pack()) && aligned(&[from, to]) {
        d / kind.pack()
    } else {
        0
    }
}

/// Returns rows `ids` of a table with `d` columns, times `scale`, of the type of the table.
pub(crate) fn gather(table: &Tensor, ids: &[u32], scale: f32, d: usize) -> Result<Tensor> {
    let ids_there = Gpu::of(table, "the embedding table")?.upload_u32(ids)?;
    rows(table, &ids_there, scale, d)
}

/// Returns rows `ids` of each table. The ids are uploaded once.
pub(crate) fn gather_each(tables: &[Tensor], ids: &[u32]) -> Result<Vec<Tensor>> {
    let Some(first) = tables.first() else {
        return Ok(Vec::new());
    };
    let ids = Gpu::of(first, "a table")?.upload_u32(ids)?;
    let each = tables.iter().map(|table| rows(table, &ids, 1.0, table.dims()[1]));
    each.collect()
}

/// As `gather`, for ids that are there.
pub(super) fn rows(table: &Tensor, ids: &Tensor, scale: f32, d: usize) -> Result<Tensor> {
    let gpu = Gpu::of(table, "the embedding table")?;
    let count = ids.elem_count();
    let y = gpu.empty((count, d), table.dtype())?;
    let ids = RowNumbers {
        address: address(ids, "token ids")?,
        count,
    };
    let kind = FloatType::of(table, "the embedding table")?;
    let (from, to) = (address(table, "the embedding table")?, address(&y, "embeddings")?);
    // SAFETY: the caller checked that every id is a row.
    unsafe { gather_rows(&gpu, kind, from, ids, scale, d, to)? };
    Ok(y)
}

/// Row numbers (u32) in the memory of the GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowNumbers {
    pub address: u64,
    pub count: usize,
}

/// Computes `to[n] = scale · from[ids[n]]`.
///
/// # Safety
/// The addresses are matrices of `d` columns of this kind; every id is a row of the first.
pub(super) unsafe fn gather_rows(
    gpu: &Gpu,
    kind: FloatType,
    from: u64,
    ids: RowNumbers,
    scale: f32,
    d: usize,
    to: u64,
) -> Result<()> {
    let args = [
        Arg::Address(from),
        Arg::Address(ids.address),
        Arg::F32(scale),
        Arg::size(d),
        Arg::size(packs(kind, d, from, to)),
        Arg::Address(to),
    ];
    let grid = Grid::line(ids.count, threads(d, kind.pack()));
    // SAFETY: promised by the caller.
    unsafe { gpu.launch("embedding", ["gather_", kind.name()], grid, &args) }
}

/// Computes `to[rows[n]] = from[n]`.
///
/// # Safety
/// As `gather_rows`; no row occurs twice.
pub(super) unsafe fn put_rows(
    gpu: &Gpu,
    kind: FloatType,
    from: u64,
    rows: RowNumbers,
    d: usize,
    to: u64,
) -> Result<()> {
    let args = [
        Arg::Address(from),
        Arg::Address(rows.address),
        Arg::size(d),
        Arg::size(packs(kind, d, from, to)),
        Arg::Address(to),
    ];
    let grid = Grid::line(rows.count, threads(d, kind.pack()));
    // SAFETY: promised by the caller.
    unsafe { gpu.launch("embedding", ["put_rows_", kind.name()], grid, &args) }
}

/// Groups the positions in `ids` by id: returns the distinct ids, the start of the positions of each, and the
/// positions in order.
fn by_id(ids: &[u32]) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    // Stable: the positions of an id stay in order.
    order.sort_by_key(|n| ids[*n as usize]);
    let (mut distinct, mut starts) = (Vec::new(), Vec::new());
    for (place, n) in order.iter().enumerate() {
        let id = ids[*n as usize];
        if distinct.last() != Some(&id) {
            distinct.push(id);
            starts.push(place as u32);
        }
    }
    starts.push(ids.len() as u32);
    (distinct, starts, order)
}

/// Computes `dw[ids[n]] += scale · dx[n]`, each row in the order of n; dw f32 with `d` columns, dx f32 or bf16.
pub(crate) fn scatter_add(dw: &Tensor, ids: &[u32], dx: &Tensor, scale: f32, d: usize) -> Result<()> {
    if ids.is_empty() || d == 0 {
        return Ok(());
    }
    const PACK: usize = 4;
    let gpu = Gpu::of(dx, "dx of the embedding")?;
    let kind = FloatType::of(dx, "dx of the embedding")?;
    let (distinct, starts, order) = by_id(ids);
    let numbers = gpu.upload_u32(&[&distinct[..], &starts, &order].concat())?;
    let first = address(&numbers, "token ids")?;
    let at = |n: usize| Arg::Address(first + 4 * n as u64);
    let places = [
        address_of(dw, "the gradient of the embedding", DType::F32)?,
        address(dx, "dx of the embedding")?,
    ];
    let packed = d.is_multiple_of(PACK) && aligned(&places);
    let pack = if packed { PACK } else { 1 };
    let threads = threads(d, pack).min(128);
    let name = ["scatter_add_", kind.name(), if packed { "_packed" } else { "_single" }];
    let grid = Grid {
        blocks: (distinct.len(), d.div_ceil(pack * threads as usize)),
        threads: (threads, 1),
        shared: 0,
    };
    let args = [
        Arg::Address(places[0]),
        at(0),
        at(distinct.len()),
        at(distinct.len() + starts.len()),
        Arg::Address(places[1]),
        Arg::F32(scale),
        Arg::size(d),
    ];
    // SAFETY: the caller checked the ids and the shapes; each block owns its part of a row.
    unsafe { gpu.launch("embedding", name, grid, &args) }
}

/// Adds noise to x `[N, D]`, one of `rows` for each token.
pub(crate) fn add_noise(x: &Tensor, rows: &[NoiseRow], d: usize) -> Result<()> {
    if rows.is_empty() || d == 0 {
        return Ok(());
    }
    let gpu = Gpu::of(x, "the embeddings")?;
    let kind = FloatType::of(x, "the embeddings")?;
    let words = |row: &NoiseRow| {
        let key = row.rng.key();
        [key as u32, (key >> 32) as u32, row.position, row.magnitude.to_bits()]
    };
    let words: Vec<u32> = rows.iter().flat_map(words).collect();
    let words = gpu.upload_u32(&words)?;
    let args = [
        Arg::Address(address(x, "the embeddings")?),
        Arg::Address(address(&words, "rows of noise")?),
        Arg::size(d),
    ];
    let grid = Grid::line(rows.len(), threads(d, 1));
    // SAFETY: the caller checked that x has a row for each of `rows`.
    unsafe { gpu.launch("embedding", ["noise_", kind.name()], grid, &args) }
}
