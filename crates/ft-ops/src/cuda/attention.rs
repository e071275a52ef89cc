//! Attention on a GPU: launches the kernels in `cuda/attention_*.cu` on the work lists of `attention_schedule`.
//!
//! bf16 uses the tensor cores if the head size is a multiple of 8 up to 256. Other bf16 heads and f32 use the plain
//! f32 kernels, with heads of up to 512. Shapes and letters as in `ops::attention`.

use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned, elementwise, graph, narrow};
use crate::attention::{AttentionGradInputs, AttentionSpec};
use crate::attention_schedule::{AttentionTile, DocumentOffsets, VisitedRows};
use candle_core::cuda::DeviceId;
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Same layout as `attention::Form` in `cuda/attention.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    heads: i32,
    kv_heads: i32,
    size: i32,
    window: i32,
    scale: f32,
    cap: f32,
    pack: i32,
    parts: i32,
}

// SAFETY: only numbers, in the layout that the kernels read.
unsafe impl DeviceRepr for Form {}

impl Form {
    pub(super) fn new(spec: &AttentionSpec, pack: usize, parts: usize) -> Result<Self> {
        /// No document is longer, and twice this number still fits in 32 bits.
        const NO_WINDOW: usize = 1 << 30;
        Ok(Self {
            heads: narrow(spec.heads, "the number of heads")?,
            kv_heads: narrow(spec.kv_heads, "the number of heads")?,
            size: narrow(spec.head_dim, "an attention head")?,
            window: spec.window.unwrap_or(NO_WINDOW).min(NO_WINDOW) as i32,
            scale: spec.scale,
            cap: spec.softcap.unwrap_or(0.0),
            pack: narrow(pack, "the number of heads")?,
            parts: narrow(parts, "the number of heads")?,
        })
    }
}

/// The kernels of one head size, with the tile rows that were compiled in.
struct KernelSet {
    size: usize,
    /// Forward: queries per block, keys per step. On a KV cache a block has 64 rows of queries.
    queries: usize,
    keys: usize,
    /// Keys per step on a KV cache.
    cached_keys: usize,
    /// dk and dv: columns per block, and queries of all pipeline stages together. A block has 64 keys.
    columns: usize,
    staged_queries: usize,
    /// dq: keys of all pipeline stages together. A block has 64 queries.
    staged_keys: usize,
    /// Backward: the own rows of a block stay in registers, not in shared memory.
    in_registers: bool,
}

impl KernelSet {
    /// Shared memory of a backward kernel with `staged` rows in all stages together.
    fn backward_bytes(&self, staged: usize) -> usize {
        let own = if self.in_registers { 0 } else { ROWS };
        2 * self.size * 2 * (own + staged)
    }

    /// Shared memory of the kernel for dk and dv: the rows, and lse and delta of the staged queries.
    fn keys_bytes(&self) -> usize {
        self.backward_bytes(self.staged_queries) + 8 * self.staged_queries
    }

    /// Blocks of that kernel that run on a multiprocessor at the same time. Its registers allow two.
    fn keys_blocks(&self, shared: usize) -> usize {
        /// Shared memory that the system takes of each block.
        const RESERVED: usize = 1 << 10;
        (shared / (self.keys_bytes() + RESERVED)).clamp(1, 2)
    }
}

/// Same values as at the end of `attention_forward.cu` and `attention_backward.cu`.
#[rustfmt::skip]
const BF16: [KernelSet; 4] = [
    KernelSet { size: 64, queries: 128, keys: 64, cached_keys: 64, columns: 64, staged_queries: 64, staged_keys: 64, in_registers: true },
    KernelSet { size: 96, queries: 128, keys: 32, cached_keys: 64, columns: 96, staged_queries: 64, staged_keys: 64, in_registers: true },
    KernelSet { size: 128, queries: 128, keys: 32, cached_keys: 64, columns: 128, staged_queries: 64, staged_keys: 64, in_registers: true },
    KernelSet { size: 256, queries: 64, keys: 32, cached_keys: 32, columns: 128, staged_queries: 32, staged_keys: 32, in_registers: false },
];
/// Head size and rows of a tile, as at the end of `attention_f32.cu`.
const F32: [(usize, usize); 4] = [(64, 32), (128, 32), (256, 16), (512, 8)];
const LARGEST: usize = 512;
/// Largest head of the tensor-core kernels.
const LARGEST_BF16: usize = 256;

/// Rows of a tile unless `KernelSet` says otherwise, and threads of a block.
const ROWS: usize = 64;
pub(super) const THREADS: u32 = 128;

pub(super) const FORWARD: &str = "attention_forward";
const BACKWARD: &str = "attention_backward";
pub(super) const PLAIN: &str = "attention_f32";

fn too_large(spec: &AttentionSpec) -> Error {
    Error::unsupported("an attention head is too large for the GPU")
        .found(spec.head_dim)
        .expected(format!("at most {LARGEST}"))
}

fn compiled(spec: &AttentionSpec) -> Result<&'static KernelSet> {
    BF16.iter()
        .find(|c| spec.head_dim <= c.size)
        .ok_or_else(|| too_large(spec))
}

fn plain(spec: &AttentionSpec) -> Result<(usize, usize)> {
    F32.into_iter()
        .find(|(size, _)| spec.head_dim <= *size)
        .ok_or_else(|| too_large(spec))
}

/// The kernels of attention on a KV cache for a head size.
pub(super) struct CachedKernels {
    /// In their names.
    pub size: &'static str,
    /// Rows of a tile.
    pub rows: usize,
    pub threads: u32,
    pub shared: usize,
}

pub(super) fn cached_kernels(spec: &AttentionSpec, kind: FloatType) -> Result<CachedKernels> {
    Ok(match kind {
        FloatType::F32 => {
            let (size, rows) = plain(spec)?;
            CachedKernels {
                size: size_name(size),
                rows,
                threads: 8 * rows as u32,
                shared: plain_bytes(size, rows),
            }
        }
        FloatType::Bf16 | FloatType::F16 => {
            let compiled = compiled(spec)?;
            CachedKernels {
                size: size_name(compiled.size),
                rows: ROWS,
                threads: THREADS,
                shared: 2 * compiled.size * (ROWS + 2 * compiled.cached_keys),
            }
        }
    })
}

/// Shared memory of the f32 forward pass.
fn plain_bytes(size: usize, rows: usize) -> usize {
    4 * rows * (3 * (size + 4) + rows + 1)
}

/// True if the tensor-core kernels support these tensors. They move rows in units of 16 bytes.
pub(super) fn on_tensor_cores(spec: &AttentionSpec, kind: FloatType, addresses: &[u64]) -> bool {
    kind.is_short() && spec.head_dim.is_multiple_of(8) && spec.head_dim <= LARGEST_BF16 && aligned(addresses)
}

fn elements(t: &Tensor, name: &str, kind: FloatType) -> Result<u64> {
    address_of(t, name, kind.dtype())
}

/// Which work list of some documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    /// Tiles of queries: rows of a tile, rows of a query.
    Queries(usize, usize),
    /// Tiles of keys: rows of a tile.
    Keys(usize),
}

/// A work list on the device. It must live until the launch is queued; its memory is freed in stream order.
#[derive(Clone)]
struct WorkList {
    tiles: Tensor,
    count: usize,
    visited: VisitedRows,
}

impl WorkList {
    fn tiles(&self) -> Result<Arg> {
        Ok(Arg::Address(address(&self.tiles, "a list of tiles")?))
    }
}

fn upload<const N: usize>(gpu: &Gpu, rows: impl Iterator<Item = [i32; N]>) -> Result<Tensor> {
    gpu.upload_bytes(&rows.flatten().flat_map(i32::to_ne_bytes).collect::<Vec<u8>>())
}

impl DocumentOffsets<'_> {
    /// Every layer of a step uses the same few lists, so the last ones are cached.
    fn work(&self, gpu: &Gpu, list: List) -> Result<WorkList> {
        const KEPT: usize = 8;
        type Key = (DeviceId, List, Option<usize>, Vec<usize>, Vec<usize>);
        static LISTS: Mutex<VecDeque<(Key, WorkList)>> = Mutex::new(VecDeque::new());
        let device = gpu.device().id();
        let mut lists = LISTS
            .lock()
            .map_err(|_| Error::internal("another thread failed while it used the lists of attention"))?;
        let known = lists.iter().find(|((on, of, window, queries, keys), _)| {
            (*on, *of, *window) == (device, list, self.window) && queries == self.queries && keys == self.keys
        });
        if let Some((_, work)) = known {
            graph::keep(&work.tiles);
            return Ok(work.clone());
        }
        let tiles = match list {
            List::Queries(rows, pack) => self.query_tiles(rows, pack),
            List::Keys(rows) => self.key_tiles(rows),
        };
        let work = WorkList {
            count: tiles.0.len(),
            visited: tiles.visited(),
            tiles: upload(gpu, tiles.0.iter().map(AttentionTile::numbers))?,
        };
        if lists.len() == KEPT {
            lists.pop_front();
        }
        let key = (device, list, self.window, self.queries.to_vec(), self.keys.to_vec());
        lists.push_back((key, work.clone()));
        Ok(work)
    }
}

/// A head size in the names of kernels.
fn size_name(size: usize) -> &'static str {
    match size {
        64 => "64",
        96 => "96",
        128 => "128",
        256 => "256",
        _ => "512",
    }
}

pub(super) fn grid(blocks: usize, threads: u32, shared: usize) -> Grid {
    Grid {
        shared: shared as u32,
        ..Grid::line(blocks, threads)
    }
}

/// Returns o `[Nq, H·E]` of the type of q, lse f32 `[Nq, H]`. The caller checked shapes and offsets.
pub(crate) fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
    q_documents: &[usize],
    k_documents: &[usize],
) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::of(q, "the queries")?;
    let kind = FloatType::of(q, "the queries")?;
    let documents = DocumentOffsets {
        queries: q_documents,
        keys: k_documents,
        window: spec.window,
    };
    documents.check()?;
    let inputs = [
        elements(q, "the queries", kind)?,
        elements(k, "the keys", kind)?,
        elements(v, "the values", kind)?,
    ];
    if kind.is_short() && !on_tensor_cores(spec, kind, &inputs) {
        let [q, k, v] = [q, k, v].map(|t| elementwise::cast(t, FloatType::F32));
        let (o, lse) = forward(&q?, &k?, &v?, spec, q_documents, k_documents)?;
        return Ok((elementwise::cast(&o, kind)?, lse));
    }
    let n = q.dims()[0];
    let o = gpu.empty((n, spec.heads * spec.head_dim), q.dtype())?;
    let lse = gpu.empty((n, spec.heads), DType::F32)?;
    if n == 0 {
        return Ok((o, lse));
    }
    let outputs = [
        address(&o, "the output of attention")?,
        address(&lse, "the log-sum-exp of attention")?,
    ];
    let [q, k, v] = inputs.map(Arg::Address);
    let [to_o, to_lse] = outputs.map(Arg::Address);
    match kind {
        FloatType::F32 => {
            let (size, rows) = plain(spec)?;
            let work = documents.work(&gpu, List::Queries(rows, 1))?;
            let grid = grid(work.count * spec.heads, 8 * rows as u32, plain_bytes(size, rows));
            let args = [q, k, v, to_o, to_lse, work.tiles()?];
            let name = ["attention_f32_forward_", size_name(size)];
            // SAFETY: the tiles lie inside the tensors, whose shapes were checked.
            unsafe { gpu.launch_with(PLAIN, name, grid, &args, Some(&Form::new(spec, 1, 1)?))? };
        }
        FloatType::Bf16 | FloatType::F16 => {
            let compiled = compiled(spec)?;
            let work = documents.work(&gpu, List::Queries(compiled.queries, 1))?;
            let shared = 2 * compiled.size * (compiled.queries + 2 * compiled.keys);
            let grid = grid(work.count * spec.heads, THREADS, shared);
            let args = [q, k, v, to_o, to_lse, work.tiles()?];
            let name = ["attention_forward_", size_name(compiled.size), kind.module()];
            // SAFETY: as above.
            unsafe { gpu.launch_with(FORWARD, name, grid, &args, Some(&Form::new(spec, 1, 1)?))? };
        }
    }
    Ok((o, lse))
}

/// Returns dq, dk, dv of the types of q, k, v. Queries and keys are the same tokens; the caller checked shapes and
/// offsets.
pub(crate) fn backward(
    inputs: AttentionGradInputs<&Tensor>,
    spec: &AttentionSpec,
    documents: &[usize],
) -> Result<(Tensor, Tensor, Tensor)> {
    let AttentionGradInputs { q, k, v, o, lse, dout } = inputs;
    let gpu = Gpu::of(q, "the queries")?;
    let kind = FloatType::of(q, "the queries")?;
    let dout = &elementwise::cast(dout, kind)?;
    let inputs = [
        elements(q, "the queries", kind)?,
        elements(k, "the keys", kind)?,
        elements(v, "the values", kind)?,
        elements(dout, "the gradient of attention", kind)?,
        elements(o, "the output of attention", kind)?,
    ];
    if kind.is_short() && !on_tensor_cores(spec, kind, &inputs) {
        let [q, k, v, o, dout] = [q, k, v, o, dout].map(|t| elementwise::cast(t, FloatType::F32));
        let inputs = AttentionGradInputs {
            q: &q?,
            k: &k?,
            v: &v?,
            o: &o?,
            lse,
            dout: &dout?,
        };
        let (dq, dk, dv) = backward(inputs, spec, documents)?;
        let [dq, dk, dv] = [dq, dk, dv].map(|t| elementwise::cast(&t, kind));
        return Ok((dq?, dk?, dv?));
    }
    let lse = address_of(lse, "the log-sum-exp of attention", DType::F32)?;
    let documents = DocumentOffsets {
        queries: documents,
        keys: documents,
        window: spec.window,
    };
    documents.check()?;
    let n = q.dims()[0];
    let grads = [q, k, v].map(|t| gpu.empty(t.shape(), t.dtype()));
    let [dq, dk, dv] = grads;
    let (dq, dk, dv) = (dq?, dk?, dv?);
    if n == 0 {
        return Ok((dq, dk, dv));
    }
    // The kernels count rows of lse in 32 bits.
    narrow(n * spec.heads, "attention")?;
    let delta = gpu.empty((n, spec.heads), DType::F32)?;
    let delta_place = address(&delta, "the row sums of attention")?;
    let [q, k, v, dout, o] = inputs.map(Arg::Address);
    let read = [q, k, v, dout, Arg::Address(lse), Arg::Address(delta_place)];
    let to_dq = Arg::Address(address(&dq, "the gradient of the queries")?);
    let to_dkv = [
        Arg::Address(address(&dk, "the gradient of the keys")?),
        Arg::Address(address(&dv, "the gradient of the values")?),
    ];

    let (module, delta_name) = match kind {
        FloatType::F32 => (PLAIN, "attention_f32_delta"),
        FloatType::Bf16 | FloatType::F16 => (BACKWARD, "attention_delta"),
    };
    let args = [
        Arg::Address(delta_place),
        o,
        dout,
        Arg::size(n * spec.heads),
        Arg::small(spec.head_dim, "an attention head")?,
    ];
    // SAFETY: o and dout have n·H rows of E elements, delta has one number per row.
    unsafe {
        gpu.launch(
            module,
            [delta_name, kind.module()],
            Grid::line((n * spec.heads).div_ceil(4), THREADS),
            &args,
        )?
    };

    if kind == FloatType::F32 {
        let (size, rows) = plain(spec)?;
        let form = Form::new(spec, 1, 1)?;
        let shared = 4 * rows * (4 * (size + 4) + 2 * (rows + 1));
        let threads = 8 * rows as u32;
        let work = documents.work(&gpu, List::Queries(rows, 1))?;
        let args = [&read[..], &[to_dq, work.tiles()?]].concat();
        let name = ["attention_f32_queries_", size_name(size)];
        // SAFETY: the tiles lie inside the tensors, whose shapes were checked.
        unsafe {
            gpu.launch_with(
                PLAIN,
                name,
                grid(work.count * spec.heads, threads, shared),
                &args,
                Some(&form),
            )?
        };
        let work = documents.work(&gpu, List::Keys(rows))?;
        let args = [&read[..], &to_dkv[..], &[work.tiles()?]].concat();
        let name = ["attention_f32_keys_", size_name(size)];
        // SAFETY: as above.
        unsafe {
            gpu.launch_with(
                PLAIN,
                name,
                grid(work.count * spec.kv_heads, threads, shared),
                &args,
                Some(&form),
            )?
        };
        return Ok((dq, dk, dv));
    }

    let compiled = compiled(spec)?;
    let work = documents.work(&gpu, List::Queries(ROWS, 1))?;
    let args = [&read[..], &[to_dq, work.tiles()?]].concat();
    let shared = compiled.backward_bytes(compiled.staged_keys);
    let name = ["attention_queries_", size_name(compiled.size), kind.module()];
    let form = Form::new(spec, 1, 1)?;
    // SAFETY: as above.
    unsafe {
        gpu.launch_with(
            BACKWARD,
            name,
            grid(work.count * spec.heads, THREADS, shared),
            &args,
            Some(&form),
        )?
    };

    let work = documents.work(&gpu, List::Keys(ROWS))?;
    let blocks_of_tile = spec.kv_heads * (compiled.size / compiled.columns);
    let sms = gpu.multiprocessors()?;
    let slots = sms.count * compiled.keys_blocks(sms.shared);
    let parts = work.visited.parts(blocks_of_tile, spec.heads / spec.kv_heads, slots);
    let blocks = work.count * blocks_of_tile;
    let width = spec.kv_heads * spec.head_dim;
    let partial = match parts {
        1 => None,
        _ => Some((
            gpu.empty((parts, n, width), DType::F32)?,
            gpu.empty((parts, n, width), DType::F32)?,
        )),
    };
    let places = match &partial {
        Some((dk, dv)) => [
            address(dk, "parts of the gradient of the keys")?,
            address(dv, "parts of the gradient of the values")?,
        ],
        None => [0; 2],
    };
    let args = [
        &read[..],
        &to_dkv[..],
        &places.map(Arg::Address)[..],
        &[Arg::small(n, "the number of tokens")?, work.tiles()?],
    ]
    .concat();
    let shared = compiled.keys_bytes();
    let name = ["attention_keys_", size_name(compiled.size), kind.module()];
    let form = Form::new(spec, 1, parts)?;
    // SAFETY: as above; with several parts each has its own [n, K·E] of the partial sums.
    unsafe {
        gpu.launch_with(
            BACKWARD,
            name,
            grid(blocks * parts, THREADS, shared),
            &args,
            Some(&form),
        )?
    };
    if parts > 1 {
        for (to, from) in to_dkv.into_iter().zip(places) {
            let count = [Arg::size(n * width), Arg::small(parts, "the number of heads")?];
            let args = [to, Arg::Address(from), count[0], count[1]];
            // SAFETY: `parts` times n·K·E sums, n·K·E results.
            unsafe {
                gpu.launch(
                    BACKWARD,
                    ["attention_sum_parts", kind.module()],
                    Grid::line((n * width).div_ceil(256), 256),
                    &args,
                )?
            };
        }
    }
    Ok((dq, dk, dv))
}
