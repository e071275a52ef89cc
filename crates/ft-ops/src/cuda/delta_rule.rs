//! The gated delta rule on a GPU: a kernel for each chunk that computes what does not depend on the state, a scan through
//! the chunks of each document, forward and back, and a kernel for each chunk that computes the gradients of keys and gates
//! from the states that both scans keep. Sizes as in `cuda/delta_rule.cuh`.

use super::document_lists::{DocumentList, TableKind};
use super::{Arg, FloatType, Gpu, Grid, address, address_of, elementwise};
use crate::delta_rule::{
    DEVICE_CHUNK as CHUNK, DEVICE_KEY as KEY, DEVICE_PREPARED as PREPARED, DeltaGradients, DeltaHeads, DeltaInputs,
};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Threads of a block, and columns of a state of a block of a scan, as in `cuda/delta_rule.cuh`.
const THREADS: u32 = 256;
const SLICE: usize = 32;

/// Distances of the rows of keys and of triangles in shared memory, as in `cuda/delta_rule.cuh`.
const WIDE: usize = KEY + 4;
const NARROW: usize = CHUNK + 8;
/// Bytes of shared memory of a scan, of the kernel before it,
const SCAN_BYTES: usize = 4 * (4 * CHUNK * WIDE + 6 * CHUNK * NARROW);
const PREPARE_BYTES: usize = 4 * (2 * CHUNK * WIDE + CHUNK * NARROW);
/// and of the kernel that computes the gradients of keys, with tiles of 16 columns.
const CHUNK_BYTES: usize = 4 * (2 * CHUNK * WIDE + (2 * KEY + 3 * CHUNK) * 20);

/// The inputs on the device, and what each launch needs.
struct DeltaLaunch<'a> {
    gpu: Gpu,
    kind: FloatType,
    x: &'a DeltaInputs<'a>,
    /// A_log and dt_bias, f32.
    a_log: Tensor,
    dt_bias: Tensor,
    heads: &'a DeltaHeads,
    documents: usize,
    spans: DocumentList,
    /// The chunks.
    pieces: DocumentList,
}

/// Value heads of a launch: the first one, and how many.
type ValueHeads = (usize, usize);

impl<'a> DeltaLaunch<'a> {
    fn new(x: &'a DeltaInputs<'a>, heads: &'a DeltaHeads, documents: &[usize]) -> Result<Self> {
        let gpu = Gpu::of(x.qkv, "qkv of the delta rule")?;
        if heads.key_dim > KEY {
            return Err(
                Error::unsupported("the keys of linear attention are too large for the GPU kernels")
                    .found(heads.key_dim)
                    .expected(format!("at most {KEY} elements")),
            );
        }
        Ok(Self {
            kind: FloatType::of(x.qkv, "qkv of the delta rule")?,
            a_log: elementwise::cast(x.a_log, FloatType::F32)?,
            dt_bias: elementwise::cast(x.dt_bias, FloatType::F32)?,
            x,
            heads,
            documents: documents.len().saturating_sub(1),
            spans: DocumentList::new(&gpu, TableKind::Spans(CHUNK), documents)?,
            pieces: DocumentList::new(&gpu, TableKind::Chunks(CHUNK), documents)?,
            gpu,
        })
    }

    fn tokens(&self) -> Result<usize> {
        Ok(self.x.qkv.dims2()?.0)
    }

    /// The address of a tensor in the type of the activations.
    fn activation(&self, t: &Tensor) -> Result<Arg> {
        address_of(t, "a tensor of the delta rule", self.kind.dtype()).map(Arg::Address)
    }

    /// The address of an f32 tensor, null without one.
    fn kept(t: Option<&Tensor>) -> Result<Arg> {
        let place = t.map_or(Ok(0), |t| address_of(t, "a state of the delta rule", DType::F32))?;
        Ok(Arg::Address(place))
    }

    /// a, b, A_log and dt_bias.
    fn gates(&self) -> Result<[Arg; 4]> {
        let vector = |t: &Tensor| address(t, "a vector of the delta rule").map(Arg::Address);
        Ok([
            self.activation(self.x.a)?,
            self.activation(self.x.b)?,
            vector(&self.a_log)?,
            vector(&self.dt_bias)?,
        ])
    }

    fn chunks(&self) -> usize {
        self.pieces.len / 2
    }

    /// Queues a kernel with qkv, `tensors` and the sizes.
    fn run(
        &self,
        (module, name): (&'static str, &'static str),
        grid: Grid,
        tensors: &[Arg],
        (first, count): ValueHeads,
    ) -> Result<()> {
        let mut args = Vec::with_capacity(24);
        args.push(self.activation(self.x.qkv)?);
        args.extend(tensors);
        let h = self.heads;
        for size in [h.key_heads, h.value_heads, h.key_dim, h.value_dim, first, count] {
            args.push(Arg::small(size, "a size of the delta rule")?);
        }
        // SAFETY: the caller of this module checked the shapes of the inputs; the other tensors have the shapes that
        // the kernel names, for these heads.
        unsafe { self.gpu.launch(module, [name, self.kind.name()], grid, &args) }
    }

    /// Returns what the scans need of each chunk for these heads.
    fn prepare(&self, part: ValueHeads) -> Result<Tensor> {
        let prepared = self.gpu.empty((self.chunks(), part.1 * PREPARED), DType::F32)?;
        let grid = Grid {
            blocks: (self.chunks(), part.1),
            threads: (THREADS, 1),
            shared: PREPARE_BYTES as u32,
        };
        let [a, b, a_log, dt_bias] = self.gates()?;
        let pieces = Arg::Address(self.pieces.address()?);
        let tensors = [a, b, a_log, dt_bias, pieces, Self::kept(Some(&prepared))?];
        self.run(("delta_rule", "delta_rule_prepare_"), grid, &tensors, part)?;
        Ok(prepared)
    }

    /// `tensors`: of the kernel, after the spans and `prepared`.
    fn scan(
        &self,
        kernel: (&'static str, &'static str),
        prepared: &Tensor,
        tensors: &[Arg],
        part: ValueHeads,
    ) -> Result<()> {
        let grid = Grid {
            blocks: (self.documents * part.1, self.heads.value_dim.div_ceil(SLICE)),
            threads: (THREADS, 1),
            shared: SCAN_BYTES as u32,
        };
        let spans = Arg::Address(self.spans.address()?);
        let tensors = [&[spans, Self::kept(Some(prepared))?], tensors].concat();
        self.run(kernel, grid, &tensors, part)
    }
}

const FORWARD: (&str, &str) = ("delta_rule", "delta_rule_forward_");

/// Computes o of the type of qkv, and with the states f32 `[documents, V·P·Q]` before the first tokens those after the
/// last ones. The caller checked shapes and offsets.
pub(crate) fn forward(
    x: &DeltaInputs,
    heads: &DeltaHeads,
    documents: &[usize],
    before: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    let launch = DeltaLaunch::new(x, heads, documents)?;
    let width = heads.value_heads * heads.value_dim;
    let o = launch.gpu.empty((launch.tokens()?, width), x.qkv.dtype())?;
    let after = before
        .map(|before| launch.gpu.empty(before.shape(), DType::F32))
        .transpose()?;
    let null = Arg::Address(0);
    let tensors = [
        DeltaLaunch::kept(before)?,
        DeltaLaunch::kept(after.as_ref())?,
        launch.activation(&o)?,
        null,
        null,
    ];
    let group = heads.value_heads / heads.key_heads;
    let at_once = group * heads.key_heads_prepared_at_once(launch.tokens()?, launch.documents);
    for first in (0..heads.value_heads).step_by(at_once) {
        let part = (first, at_once.min(heads.value_heads - first));
        launch.scan(FORWARD, &launch.prepare(part)?, &tensors, part)?;
    }
    Ok((o, after))
}

/// Computes the gradients: those of A_log and dt_bias in f32, the others in the type of qkv.
pub(crate) fn backward(
    x: &DeltaInputs,
    heads: &DeltaHeads,
    documents: &[usize],
    d_o: &Tensor,
) -> Result<DeltaGradients> {
    let launch = DeltaLaunch::new(x, heads, documents)?;
    let (gpu, tokens) = (&launch.gpu, launch.tokens()?);
    let d_o = elementwise::cast(d_o, launch.kind)?;
    let (chunks, group) = (launch.chunks(), heads.value_heads / heads.key_heads);
    let of = |t: &Tensor| gpu.empty(t.shape(), t.dtype());
    let (d_qkv, d_a, d_b) = (of(x.qkv)?, of(x.a)?, of(x.b)?);
    let d_g = gpu.empty(x.a.shape(), DType::F32)?;
    let at_once = heads.key_heads_at_once(tokens, launch.documents);
    for key_head in (0..heads.key_heads).step_by(at_once) {
        let key_heads = at_once.min(heads.key_heads - key_head);
        let part = (key_head * group, key_heads * group);
        let states = (chunks, part.1 * heads.key_dim * heads.value_dim);
        let rows = (tokens, part.1 * heads.value_dim);
        let kept = [
            gpu.empty(states, DType::F32)?,
            gpu.empty(states, DType::F32)?,
            gpu.empty(rows, DType::F32)?,
            gpu.empty(rows, DType::F32)?,
        ];
        let [states, d_states, deltas, d_right] = kept.each_ref().map(|t| DeltaLaunch::kept(Some(t)));
        let (states, d_states, deltas, d_right) = (states?, d_states?, deltas?, d_right?);
        let null = Arg::Address(0);
        let prepared = launch.prepare(part)?;
        launch.scan(FORWARD, &prepared, &[null, null, null, states, deltas], part)?;
        let (from, to) = (launch.activation(&d_o)?, launch.activation(&d_qkv)?);
        let name = ("delta_rule_backward", "delta_rule_scan_back_");
        launch.scan(name, &prepared, &[from, d_states, d_right, to], part)?;
        let grid = Grid {
            blocks: (chunks, key_heads),
            threads: (THREADS, 1),
            shared: CHUNK_BYTES as u32,
        };
        let (to_g, to_b) = (DeltaLaunch::kept(Some(&d_g))?, launch.activation(&d_b)?);
        let [a, b, a_log, dt_bias] = launch.gates()?;
        let pieces = Arg::Address(launch.pieces.address()?);
        let kept = [states, d_states, deltas, d_right];
        let tensors = [&[a, b, a_log, dt_bias, pieces, from][..], &kept, &[to, to_g, to_b]].concat();
        let name = ("delta_rule_backward", "delta_rule_chunk_back_");
        launch.run(name, grid, &tensors, part)?;
    }
    let (d_a_log, d_dt_bias) = (
        gpu.empty(heads.value_heads, DType::F32)?,
        gpu.empty(heads.value_heads, DType::F32)?,
    );
    let args = [
        launch.activation(x.a)?,
        DeltaLaunch::kept(Some(&launch.a_log))?,
        DeltaLaunch::kept(Some(&launch.dt_bias))?,
        DeltaLaunch::kept(Some(&d_g))?,
        launch.activation(&d_a)?,
        DeltaLaunch::kept(Some(&d_a_log))?,
        DeltaLaunch::kept(Some(&d_dt_bias))?,
        Arg::size(tokens),
        Arg::small(heads.value_heads, "the heads of the delta rule")?,
    ];
    let (name, grid) = (
        ["delta_rule_gates_back_", launch.kind.name()],
        Grid::line(heads.value_heads, THREADS),
    );
    // SAFETY: a, da and dg are [tokens, V], the vectors [V].
    unsafe { gpu.launch("delta_rule_backward", name, grid, &args)? };
    Ok(DeltaGradients {
        qkv: d_qkv,
        a: d_a,
        b: d_b,
        a_log: d_a_log,
        dt_bias: d_dt_bias,
    })
}
