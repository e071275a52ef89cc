//! The short convolution on a GPU.

use super::document_lists::{DocumentList, TableKind};
use super::{Arg, FloatType, Gpu, Grid, address, elementwise};
use crate::short_conv::DEVICE_TAPS as TAPS;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Tokens of a thread of a backward pass, as in `cuda/short_conv.cu`.
const RUN: usize = 16;
/// Threads of a block of a weight gradient, each with a channel; blocks that keep a large GPU busy; parts of the tokens.
const CHANNELS: usize = 128;
const BLOCKS: usize = 1024;
const MOST_PARTS: usize = 256;

/// The arguments of each launch.
struct ConvLaunch {
    gpu: Gpu,
    kinds: [FloatType; 2],
    places: DocumentList,
    tokens: usize,
    channels: usize,
    kernel: usize,
    silu: bool,
}

impl ConvLaunch {
    fn new(x: &Tensor, w: &Tensor, documents: &[usize], silu: bool) -> Result<Self> {
        let gpu = Gpu::of(x, "x of a convolution")?;
        let kinds = [
            FloatType::of(x, "x of a convolution")?,
            FloatType::of(w, "the weight of a convolution")?,
        ];
        let ((tokens, channels), kernel) = (x.dims2()?, w.dims3()?.2);
        if kernel > TAPS {
            return Err(Error::unsupported("a short convolution has too many taps for a GPU")
                .found(kernel)
                .expected(format!("at most {TAPS}")));
        }
        let places = DocumentList::new(&gpu, TableKind::Places, documents)?;
        Ok(Self {
            gpu,
            kinds,
            places,
            tokens,
            channels,
            kernel,
            silu,
        })
    }

    /// Queues a kernel that reads `inputs` and the places, and writes `output`.
    fn run(&self, name: &'static str, grid: Grid, inputs: &[&Tensor], output: &Tensor, last: &[Arg]) -> Result<()> {
        let mut args = Vec::with_capacity(10);
        for tensor in inputs {
            args.push(Arg::Address(address(tensor, "an operand of a convolution")?));
        }
        args.push(Arg::Address(self.places.address()?));
        args.push(Arg::Address(address(output, "the result of a convolution")?));
        args.push(Arg::size(self.tokens));
        args.push(Arg::small(self.channels, "the channels of a convolution")?);
        args.push(Arg::small(self.kernel, "the kernel of a convolution")?);
        args.push(Arg::small(usize::from(self.silu), "SiLU after a convolution")?);
        args.extend(last);
        let name = [name, self.kinds[0].name(), "_", self.kinds[1].name()];
        // SAFETY: x, dy and the results of the type of x are [tokens, channels], w is [channels, 1, kernel]; a partial
        // weight gradient has these elements for each part.
        unsafe { self.gpu.launch("short_conv", name, grid, &args) }
    }
}

/// Computes y of the type of x. The caller checked shapes and offsets.
pub(crate) fn forward(x: &Tensor, w: &Tensor, documents: &[usize], silu: bool) -> Result<Tensor> {
    let launch = ConvLaunch::new(x, w, documents, silu)?;
    let y = launch.gpu.empty(x.shape(), x.dtype())?;
    let grid = Grid::stride(x.elem_count());
    launch.run("short_conv_forward_", grid, &[x, w], &y, &[])?;
    Ok(y)
}

/// Computes dx of the type of x, and dw f32 if requested.
pub(crate) fn backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    documents: &[usize],
    silu: bool,
    need_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let launch = ConvLaunch::new(x, w, documents, silu)?;
    let dy = elementwise::cast(dy, launch.kinds[0])?;
    let dx = launch.gpu.empty(x.shape(), x.dtype())?;
    let grid = Grid::stride(launch.tokens.div_ceil(RUN) * launch.channels);
    launch.run("short_conv_backward_", grid, &[x, w, &dy], &dx, &[])?;
    if !need_dw {
        return Ok((dx, None));
    }
    let (tokens, columns) = (launch.tokens, launch.channels * launch.kernel);
    if tokens == 0 {
        return Ok((dx, Some(launch.gpu.zeros(w.shape(), DType::F32)?)));
    }
    let across = launch.channels.div_ceil(CHANNELS);
    let parts = (BLOCKS / across).clamp(1, MOST_PARTS).min(tokens);
    let part = tokens.div_ceil(parts);
    let parts = tokens.div_ceil(part);
    let partial = launch.gpu.empty((parts, columns), DType::F32)?;
    let grid = Grid {
        blocks: (across, parts),
        ..Grid::line(across, CHANNELS as u32)
    };
    launch.run("short_conv_weight_", grid, &[x, w, &dy], &partial, &[Arg::size(part)])?;
    let dw = super::columns::sums(&launch.gpu, &partial, None, (parts, columns))?;
    Ok((dx, Some(dw.reshape(w.shape())?)))
}
