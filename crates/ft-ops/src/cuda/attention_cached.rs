//! Attention on a KV cache: the kernels read keys and values where they are stored. The query heads of a key head share a
//! tile; the tokens of a text are split over blocks of threads, whose partial results a second kernel joins.

use super::attention::{self, FORWARD, PLAIN, on_tensor_cores};
use super::kv_block::{Tables, stored_name};
use super::{Arg, FloatType, address, address_of, elementwise};
use crate::attention::AttentionSpec;
use crate::cached_schedule::TileSizes;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Returns o `[N, H·E]` of the type of q and lse f32 `[N, H]`.
pub(crate) fn attend(tables: &Tables, layer: usize, q: &Tensor, spec: &AttentionSpec) -> Result<(Tensor, Tensor)> {
    attend_as(tables, layer, q, spec, FloatType::of(q, "the queries")?)
}

/// As `attend`; `model`: the type of the activations, which the cache depends on.
fn attend_as(
    tables: &Tables,
    layer: usize,
    q: &Tensor,
    spec: &AttentionSpec,
    model: FloatType,
) -> Result<(Tensor, Tensor)> {
    let (form, blocks) = tables.layer(layer)?;
    let kind = FloatType::of(q, "the queries")?;
    let want = [tables.tokens, spec.query_width()];
    if q.dims() != want || (form.kv_heads, form.head_dim) != (spec.kv_heads, spec.head_dim) {
        return Err(Error::shape("queries do not match the KV cache")
            .found(format!("{:?}", q.dims()))
            .expected(format!("{want:?}")));
    }
    let to_q = address_of(q, "the queries", kind.dtype())?;
    if kind.is_short() && !on_tensor_cores(spec, kind, &[to_q]) {
        let (o, lse) = attend_as(tables, layer, &elementwise::cast(q, FloatType::F32)?, spec, model)?;
        return Ok((elementwise::cast(&o, kind)?, lse));
    }
    let gpu = &tables.gpu;
    let o = gpu.empty((tables.tokens, spec.query_width()), q.dtype())?;
    let lse = gpu.empty((tables.tokens, spec.heads), DType::F32)?;
    if tables.tokens == 0 {
        return Ok((o, lse));
    }
    let kernels = attention::cached_kernels(spec, kind)?;
    let group = spec.heads / spec.kv_heads;
    let pack = if group <= kernels.rows { group } else { 1 };
    let groups = spec.heads / pack;
    let sizes = TileSizes {
        rows: kernels.rows,
        pack,
        groups,
    };
    let work = tables.work(spec.window, sizes)?;
    let partial = gpu.empty((groups, work.slots, spec.head_dim), DType::F32)?;
    let partial_lse = gpu.empty((groups, work.slots), DType::F32)?;
    let partial = [
        Arg::Address(address(&partial, "partial results of attention")?),
        Arg::Address(address(&partial_lse, "partial results of attention")?),
    ];
    let slots = Arg::small(work.slots, "the number of rows")?;
    let numbers = attention::Form::new(spec, pack, 1)?;
    let (module, prefix, join) = match kind {
        FloatType::F32 => (PLAIN, "attention_f32_cached_", "attention_f32_join"),
        FloatType::Bf16 | FloatType::F16 => (FORWARD, "attention_cached_", "attention_join"),
    };
    let args = [
        Arg::Address(to_q),
        partial[0],
        partial[1],
        blocks,
        Arg::Address(work.tiles),
        slots,
    ];
    let stored = stored_name(form.stored, model);
    let name = [prefix, stored, "_", kernels.size, model.module()];
    let grid = attention::grid(work.count * groups, kernels.threads, kernels.shared);
    // SAFETY: the tiles lie in the blocks, and every tile has its own slots of the partial results.
    unsafe { gpu.launch_with(module, name, grid, &args, Some(&numbers))? };
    let args = [
        Arg::Address(address(&o, "the output of attention")?),
        Arg::Address(address(&lse, "the log-sum-exp of attention")?),
        partial[0],
        partial[1],
        Arg::Address(work.joins),
        Arg::Address(work.starts),
        slots,
    ];
    let grid = attention::grid(tables.tokens * groups, attention::THREADS, 0);
    // SAFETY: the joins name the slots that the first kernel writes.
    unsafe { gpu.launch_with(module, [join, kind.module()], grid, &args, Some(&numbers))? };
    Ok((o, lse))
}
