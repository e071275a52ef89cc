//! Optimizer steps of many parameters in one launch.

use super::reduce::Shares;
use super::{Arg, Gpu, Grid, Kind, address, address_of, aligned};
use crate::base::{Error, Result};
use candle_core::cuda::DeviceId;
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

/// Groups of parameters that share their numbers in one launch, as in `cuda/optimizer.cu`.
const GROUPS: usize = 16;

/// What all parameters share.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule {
    Adamw { b1: f32, b2: f32, eps: f32 },
    Sgd { momentum: f32 },
    Lion { b1: f32, b2: f32 },
    /// Against the sign of the gradient.
    Sign,
}

/// How a weight takes updates that are smaller than its last bit.
#[derive(Clone, Copy)]
pub(crate) enum Precision<'a> {
    /// f32: it does.
    Whole,
    /// bf16: the lower halves of its f32 master, i16 `[n]`.
    Halves(&'a Tensor),
    /// bf16: rounded by the random numbers of this key.
    Stochastic(u64),
}

/// One parameter of n elements.
pub(crate) struct Item<'a> {
    /// f32 or bf16.
    pub weight: &'a Tensor,
    pub precision: Precision<'a>,
    /// f32 or bf16.
    pub gradient: &'a Tensor,
    /// f32.
    pub first: Option<&'a Tensor>,
    pub second: Option<&'a Tensor>,
    /// AdamW: 1 - lr · decay, step size, root of the second correction. SGD: lr, decay, 1 in the first step or without
    /// momentum, else 0. Lion: 1 - lr · decay, lr. Sign: lr.
    pub numbers: [f32; 3],
}

/// Factor of the gradients, and whether the step happens.
#[derive(Clone, Copy, Default)]
pub(crate) struct Gate<'a> {
    pub coefficient: f32,
    /// f32, one element: a further factor that the host does not know.
    pub device_coefficient: Option<&'a Tensor>,
    /// f64, one element: nothing is changed if it is not finite.
    pub finite: Option<&'a Tensor>,
}

/// Updates the parameters in place.
pub(crate) fn step(rule: Rule, items: &[Item], gate: Gate) -> Result<()> {
    let mut rest = items;
    while let Some(first) = rest.first() {
        // As many as share at most GROUPS triples of numbers.
        let mut groups: Vec<[f32; 3]> = Vec::new();
        let fits = rest.iter().take_while(|item| {
            let known = groups.contains(&item.numbers);
            if !known && groups.len() < GROUPS {
                groups.push(item.numbers);
            }
            known || groups.last() == Some(&item.numbers)
        });
        let (now, later) = rest.split_at(fits.count().max(1));
        launch(&Gpu::of(first.weight, "a weight")?, rule, now, &groups, gate)?;
        rest = later;
    }
    Ok(())
}

fn launch(gpu: &Gpu, rule: Rule, items: &[Item], groups: &[[f32; 3]], gate: Gate) -> Result<()> {
    let mut shares = Shares::default();
    let mut table = Vec::with_capacity(64 * items.len());
    let mut count = 0;
    for item in items.iter().filter(|item| item.weight.elem_count() > 0) {
        let group = groups.iter().position(|g| *g == item.numbers).unwrap_or(0);
        entry(rule, item, group, &mut shares, &mut table)?;
        count += 1;
    }
    let scalar = |t: Option<&Tensor>, dtype| t.map_or(Ok(0), |t| address_of(t, "a number of an optimizer step", dtype));
    let [b1, b2, eps] = match rule {
        Rule::Adamw { b1, b2, eps } => [b1, b2, eps],
        Rule::Sgd { momentum } => [momentum, 0.0, 0.0],
        Rule::Lion { b1, b2 } => [b1, b2, 0.0],
        Rule::Sign => [0.0; 3],
    };
    let kernel = match rule {
        Rule::Adamw { .. } => "adamw_step",
        Rule::Sgd { .. } => "sgd_step",
        Rule::Lion { .. } => "lion_step",
        Rule::Sign => "sign_step",
    };
    // `Common` and `Groups` of the kernel.
    let common = [b1, b2, eps, gate.coefficient];
    let mut numbers = [[0f32; 3]; GROUPS];
    numbers[..groups.len()].copy_from_slice(groups);
    with_table(gpu, table, |table| {
        let args = [
            Arg::Address(table),
            Arg::small(count, "a list of parameters")?,
            Arg::Address(scalar(gate.device_coefficient, DType::F32)?),
            Arg::Address(scalar(gate.finite, DType::F64)?),
            Arg::Four(common),
        ];
        let grid = Grid::line(shares.count(), 256);
        // SAFETY: the table describes tensors of these sizes, which live until the launch is queued.
        unsafe { gpu.launch_with("optimizer", kernel, grid, &args, Some(&numbers)) }
    })
}

/// Adds one `Entry` of the kernel to the table.
fn entry(rule: Rule, item: &Item, group: usize, shares: &mut Shares, table: &mut Vec<u8>) -> Result<()> {
    let n = item.weight.elem_count();
    let wrong = |what: &str| Error::new(format!("an optimizer step was given {what}"));
    let sized = |t: &Tensor, name: &str| match t.elem_count() == n {
        true => address(t, name),
        false => Err(wrong("tensors of different sizes").found(t.elem_count()).expected(n)),
    };
    let state = |t: Option<&Tensor>, name: &str, dtype| match t {
        Some(t) if t.elem_count() == n => address_of(t, name, dtype),
        Some(t) => Err(wrong("tensors of different sizes").found(t.elem_count()).expected(n)),
        None => Ok(0),
    };
    let kind = Kind::of(item.weight, "a weight")?;
    let (low, key, random) = match item.precision {
        Precision::Whole => (None, 0, false),
        Precision::Halves(low) => (Some(low), 0, false),
        Precision::Stochastic(key) => (None, key, true),
    };
    if (kind == Kind::F32) != matches!(item.precision, Precision::Whole) {
        return Err(wrong("a weight of another type than its precision says"));
    }
    let wanted = match rule {
        Rule::Adamw { .. } => (true, true),
        Rule::Sgd { momentum } => (momentum != 0.0, false),
        Rule::Lion { .. } => (true, false),
        Rule::Sign => (false, false),
    };
    if (item.first.is_some(), item.second.is_some()) != wanted {
        return Err(wrong("the wrong moments"));
    }
    let places = [
        sized(item.weight, "a weight")?,
        state(low, "the lower half of a weight", DType::I16)?,
        sized(item.gradient, "a gradient")?,
        state(item.first, "a first moment", DType::F32)?,
        state(item.second, "a second moment", DType::F32)?,
    ];
    let form = (kind == Kind::Bf16) as u32
        | ((Kind::of(item.gradient, "a gradient")? == Kind::Bf16) as u32) << 1
        | (aligned(&places) as u32) << 2
        | (random as u32) << 3
        | (group as u32) << 8;
    for place in places {
        table.extend(place.to_ne_bytes());
    }
    table.extend(key.to_ne_bytes());
    table.extend((n as i64).to_ne_bytes());
    table.extend(shares.next(n)?.to_ne_bytes());
    table.extend(form.to_ne_bytes());
    Ok(())
}

/// Runs `f` on the address of the table on the GPU. The table of the step before is used again if it is the same.
fn with_table(gpu: &Gpu, table: Vec<u8>, f: impl FnOnce(u64) -> Result<()>) -> Result<()> {
    type Kept = HashMap<DeviceId, (Vec<u8>, Tensor)>;
    static KEPT: OnceLock<Mutex<Kept>> = OnceLock::new();
    let mut kept = KEPT
        .get_or_init(Mutex::default)
        .lock()
        .map_err(|_| Error::new("the table of parameters was left locked"))?;
    let id = gpu.device().id();
    if kept.get(&id).is_none_or(|(old, _)| *old != table) {
        let there = gpu.upload_bytes(&table)?;
        kept.insert(id, (table, there));
    }
    match kept.get(&id) {
        Some((_, there)) => f(address(there, "a table of parameters")?),
        None => Err(Error::new("the table of parameters is lost")),
    }
}
