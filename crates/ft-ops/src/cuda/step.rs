//! Optimizer steps of many parameters in one launch (multi-tensor kernels).

use super::memory::write;
use super::reduce::Shares;
use super::{Arg, FloatType, Gpu, Grid, address, address_of, aligned};
use crate::cpu::step::code::{SIGNED, UNSIGNED};
use crate::cpu::step::rules::Adamw;
use crate::master;
use crate::step::{BLOCK, FoundInf, Moment, ParameterStep, Precision, UpdateRule};
use candle_core::cuda::DeviceId;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};
use half::{bf16, f16};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, OnceLock};

/// Largest number of distinct hyperparameter triples in one launch, as in `cuda/optimizer.cu`.
const GROUPS: usize = 16;

/// Returns the numbers that differ between parameters. AdamW: 1 - lr · decay, step size, root of the second
/// correction. SGD: lr, decay, 1 in the first step or without momentum, else 0. Lion: 1 - lr · decay, lr. Sign: lr.
fn numbers(rule: UpdateRule, item: &ParameterStep) -> [f32; 3] {
    let (lr, decay) = (item.lr, item.weight_decay);
    match rule {
        UpdateRule::Adamw { betas, eps } => {
            let ready = Adamw::new(lr, betas, eps, decay, item.step, 1.0);
            [ready.keep, ready.step_size, ready.correction2_sqrt]
        }
        UpdateRule::Sgd { momentum } => {
            let first = item.step == 1 || momentum == 0.0;
            [lr as f32, decay as f32, if first { 1.0 } else { 0.0 }]
        }
        UpdateRule::Lion { .. } => [(1.0 - lr * decay) as f32, lr as f32, 0.0],
        UpdateRule::Sign | UpdateRule::Adafactor => [lr as f32, 0.0, 0.0],
    }
}

/// Returns the kernel name, the numbers that all parameters share, and which moments exist.
fn plan(rule: UpdateRule) -> Result<(&'static str, [f32; 3], (bool, bool))> {
    Ok(match rule {
        UpdateRule::Adamw { betas: [b1, b2], eps } => ("adamw_step", [b1 as f32, b2 as f32, eps as f32], (true, true)),
        UpdateRule::Sgd { momentum } => ("sgd_step", [momentum as f32, 0.0, 0.0], (momentum != 0.0, false)),
        UpdateRule::Lion { betas: [b1, b2] } => ("lion_step", [b1 as f32, b2 as f32, 0.0], (true, false)),
        UpdateRule::Sign => ("sign_step", [0.0; 3], (false, false)),
        UpdateRule::Adafactor => return Err(Error::unsupported("Adafactor has kernels of its own")),
    })
}

/// Updates the parameters in place.
pub(crate) fn run(rule: UpdateRule, items: &[ParameterStep], coefficient: f32, gate: FoundInf) -> Result<()> {
    if rule == UpdateRule::Adafactor {
        return super::adafactor::run(items, coefficient, gate);
    }
    // 8-bit states use separate kernels.
    let (quantized, plain): (Vec<ParameterStep>, Vec<ParameterStep>) = items.iter().copied().partition(is_quantized);
    run_alike(rule, &plain, coefficient, gate)?;
    run_alike(rule, &quantized, coefficient, gate)
}

fn is_quantized(item: &ParameterStep) -> bool {
    matches!(item.first, Some(Moment::Int8 { .. }))
}

/// Updates parameters that all have 8-bit states, or all none.
fn run_alike(rule: UpdateRule, items: &[ParameterStep], coefficient: f32, gate: FoundInf) -> Result<()> {
    let mut rest = items;
    while let Some(first) = rest.first() {
        // Takes as many parameters as share at most GROUPS triples of numbers.
        let mut groups: Vec<[f32; 3]> = Vec::new();
        let fits = rest.iter().take_while(|item| {
            let own = numbers(rule, item);
            let known = groups.contains(&own);
            if !known && groups.len() < GROUPS {
                groups.push(own);
            }
            known || groups.last() == Some(&own)
        });
        let (now, later) = rest.split_at(fits.count().max(1));
        launch(
            &Gpu::of(first.weight, "a weight")?,
            rule,
            now,
            &groups,
            coefficient,
            gate,
        )?;
        rest = later;
    }
    Ok(())
}

fn launch(
    gpu: &Gpu,
    rule: UpdateRule,
    items: &[ParameterStep],
    groups: &[[f32; 3]],
    coefficient: f32,
    gate: FoundInf,
) -> Result<()> {
    let (kernel, [b1, b2, eps], moments) = plan(rule)?;
    let mut shares = Shares::default();
    let mut table = Vec::with_capacity(88 * items.len());
    let mut count = 0;
    for item in items.iter().filter(|item| item.weight.elem_count() > 0) {
        let own = numbers(rule, item);
        let group = groups.iter().position(|g| *g == own).unwrap_or(0);
        entry(item, moments, group, &mut shares, &mut table)?;
        count += 1;
    }
    let scalar = |t: Option<&Tensor>, dtype| t.map_or(Ok(0), |t| address_of(t, "a number of an optimizer step", dtype));
    // The structures `Common` and `Groups` of the kernel.
    let common = [b1, b2, eps, coefficient];
    let mut numbers = [[0f32; 3]; GROUPS];
    numbers[..groups.len()].copy_from_slice(groups);
    let of = |item: &ParameterStep| {
        Ok([
            FloatType::of(item.weight, "a weight")?,
            FloatType::of(item.gradient, "a gradient")?,
        ])
    };
    let kinds = items.iter().map(of).collect::<Result<Vec<_>>>()?;
    let half = FloatType::module_of(kinds.into_iter().flatten())?;
    let (kernel, tables) = if items.iter().any(is_quantized) {
        ([kernel, "_codes", half], code_tables(gpu)?)
    } else {
        ([kernel, "", half], 0)
    };
    with_table(gpu, table, |table| {
        let args = [
            Arg::Address(table),
            Arg::small(count, "a list of parameters")?,
            Arg::Address(scalar(gate.coefficient, DType::F32)?),
            Arg::Address(scalar(gate.finite, DType::F64)?),
            Arg::small(
                gate.finite.map_or(0, Tensor::elem_count),
                "the numbers of a found_inf guard",
            )?,
            Arg::Address(tables),
            Arg::Four(common),
        ];
        let grid = Grid::line(shares.count(), 256);
        // SAFETY: the table describes tensors of these sizes, which live until the launch is queued.
        unsafe { gpu.launch_with("optimizer", kernel, grid, &args, Some(&numbers)) }
    })
}

/// Adds one `Entry` of the kernel to the table.
fn entry(
    item: &ParameterStep,
    moments: (bool, bool),
    group: usize,
    shares: &mut Shares,
    table: &mut Vec<u8>,
) -> Result<()> {
    let n = item.weight.elem_count();
    let wrong = |what: &str| Error::shape(format!("an optimizer step was given {what}"));
    let sized = |t: &Tensor, name: &str| {
        if t.elem_count() == n {
            address(t, name)
        } else {
            Err(wrong("tensors of different sizes").found(t.elem_count()).expected(n))
        }
    };
    // Address of the moment, and of its scales if it is quantized.
    let state = |moment: Option<&Moment>, name: &str| match moment {
        None => Ok((0, 0)),
        Some(Moment::F32(t)) => sized(t, name)
            .and_then(|_| address_of(t, name, DType::F32))
            .map(|t| (t, 0)),
        Some(Moment::Int8 { codes, scales }) if scales.elem_count() == n.div_ceil(BLOCK) => sized(codes, name)
            .and_then(|_| {
                Ok((
                    address_of(codes, name, DType::U8)?,
                    address_of(scales, name, DType::F32)?,
                ))
            }),
        Some(Moment::Int8 { scales, .. }) => Err(wrong("scales of another tensor").found(scales.elem_count())),
    };
    let kind = FloatType::of(item.weight, "a weight")?;
    let (low, key, random) = match item.precision {
        Precision::Whole => (None, 0, false),
        Precision::Master(low) => (Some(low), 0, false),
        Precision::Stochastic(rng) => (None, rng.key(), true),
    };
    if (kind == FloatType::F32) != matches!(item.precision, Precision::Whole) {
        return Err(wrong("a weight whose dtype differs from its precision setting"));
    }
    if (item.first.is_some(), item.second.is_some()) != moments {
        return Err(wrong("the wrong moments"));
    }
    let low = match low {
        Some(low) => sized(low, "the low 16 bits of a master weight")
            .and_then(|_| address_of(low, "the low 16 bits of a master weight", DType::I16))?,
        None => 0,
    };
    let (first, first_scales) = state(item.first, "a first moment")?;
    let (second, second_scales) = state(item.second, "a second moment")?;
    let quantized = is_quantized(item);
    if (first_scales != 0) != quantized || (second_scales != 0) != (quantized && second != 0) {
        return Err(wrong("moments of different types"));
    }
    let places = [
        sized(item.weight, "a weight")?,
        low,
        sized(item.gradient, "a gradient")?,
        first,
        second,
        first_scales,
        second_scales,
    ];
    let form = kind.is_short() as u32
        | (FloatType::of(item.gradient, "a gradient")?.is_short() as u32) << 1
        | (aligned(&places) as u32) << 2
        | (random as u32) << 3
        | (group as u32) << 8;
    for place in places {
        table.extend(place.to_ne_bytes());
    }
    table.extend(key.to_ne_bytes());
    table.extend((n as i64).to_ne_bytes());
    table.extend((item.begin as i64).to_ne_bytes());
    table.extend(shares.next(n)?.to_ne_bytes());
    table.extend(form.to_ne_bytes());
    Ok(())
}

/// Runs `f` on the address of the table on the GPU. The table of the previous step is reused if it is equal.
fn with_table(gpu: &Gpu, table: Vec<u8>, f: impl FnOnce(u64) -> Result<()>) -> Result<()> {
    type TableCache = HashMap<DeviceId, (Vec<u8>, Tensor)>;
    static KEPT: OnceLock<Mutex<TableCache>> = OnceLock::new();
    let mut kept = KEPT
        .get_or_init(Mutex::default)
        .lock()
        .map_err(|_| Error::internal("another thread failed while it used the table of parameters"))?;
    let id = gpu.device().id();
    if kept.get(&id).is_none_or(|(old, _)| *old != table) {
        let there = gpu.upload_bytes(&table)?;
        kept.insert(id, (table, there));
    }
    match kept.get(&id) {
        Some((_, there)) => f(address(there, "a table of parameters")?),
        None => Err(Error::internal("the table of parameters is lost")),
    }
}

/// Returns the address of `Table[2]` of the kernel: values and midpoints of the signed code, then of the unsigned
/// one. Uploaded once per device.
fn code_tables(gpu: &Gpu) -> Result<u64> {
    static KEPT: OnceLock<Mutex<HashMap<DeviceId, Tensor>>> = OnceLock::new();
    let mut kept = KEPT
        .get_or_init(Mutex::default)
        .lock()
        .map_err(|_| Error::internal("another thread failed while it used the quantization table"))?;
    let id = gpu.device().id();
    match kept.entry(id) {
        Entry::Occupied(known) => address(known.get(), "a quantization table"),
        Entry::Vacant(place) => {
            let numbers: Vec<f32> = [&*SIGNED, &*UNSIGNED]
                .into_iter()
                .flat_map(|code| code.values.into_iter().chain(code.middles))
                .collect();
            let there = gpu.empty(numbers.len(), DType::F32)?;
            write(&there, "a quantization table", DType::F32, &numbers)?;
            address(place.insert(there), "a quantization table")
        }
    }
}

/// Splits f32 values into a bf16 or f16 weight and its low 16 bits (i16), of the same length (`ops::step::split`).
pub(crate) fn split(values: &[f32], weight: &Tensor, low: &Tensor) -> Result<()> {
    const LOW: &str = "the low 16 bits of a master weight";
    if weight.dtype() == DType::F16 {
        let halves = values.iter().map(|x| master::split_f16(*x));
        let (high, lower): (Vec<f16>, Vec<i16>) = halves.map(|(high, low)| (high, low as i16)).unzip();
        write(weight, "a weight", DType::F16, &high)?;
        return write(low, LOW, DType::I16, &lower);
    }
    let (high, lower): (Vec<bf16>, Vec<i16>) = values
        .iter()
        .map(|x| {
            let (high, low) = master::split(*x);
            (high, low as i16)
        })
        .unzip();
    write(weight, "a weight", DType::BF16, &high)?;
    write(low, LOW, DType::I16, &lower)
}
