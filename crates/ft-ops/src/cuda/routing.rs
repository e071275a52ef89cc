//! Routing on a GPU. The host waits once, for the number of tokens of each expert and the sums for the statistics.
//!
//! Letters as in `routing`: N tokens, E experts, K experts of a token.

use super::memory::{read, write};
use super::{Arg, Gpu, Grid, address, address_of};
use crate::routing::{ExpertAssignment, GroupScore, LogitLoss, RouterSpec, Score};
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

/// Same values as in `cuda/routing.cu`.
const THREADS: u32 = 128;
const WARPS: usize = 4;
const TOKENS: usize = 64;
const MOST_CHOSEN: usize = 32;
const MOST_GROUPS: usize = 32;
const NUMBERS: usize = 3;
const NAME: &str = "the routing of experts";

/// The experts of each token, on a GPU.
#[derive(Debug, Clone)]
pub(crate) struct DeviceRouting {
    spec: RouterSpec,
    /// N
    tokens: usize,
    /// Where an expert begins in the rows, `[E + 1]`.
    starts: Vec<usize>,
    /// The sums of scores `[E]`, of the squared logarithms, of the entropies, and of the groups of tokens.
    score_sums: Vec<f64>,
    numbers: [f64; NUMBERS],
    /// f32 `[N, E]`
    scores: Tensor,
    /// u32 `[N, K]`
    chosen: Tensor,
    /// f32 `[N]`
    log_sums: Tensor,
    /// The row of each choice, u32 `[N, K]`.
    rows: Tensor,
    /// The rows of each token, ascending, u32 `[N, K]`.
    places: Tensor,
    /// The token and the weight of each row, u32 and f32 `[N·K]`.
    row_tokens: Tensor,
    row_weights: Tensor,
}

/// True if the kernels know this rule.
pub(crate) fn fits(spec: &RouterSpec) -> bool {
    spec.score != Score::TwoLevel
        && spec.top_k <= MOST_CHOSEN
        && spec.groups.is_none_or(|groups| groups.count <= MOST_GROUPS)
}

/// The structure of `cuda/routing.cu`.
fn rule(spec: &RouterSpec, experts: usize) -> [u64; 4] {
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let sigmoid = u32::from(spec.score == Score::Sigmoid);
    let groups = spec.groups.map_or([0; 3], |groups| {
        let rating = match groups.score {
            GroupScore::Largest => 0,
            GroupScore::TwoLargest => 1,
            GroupScore::Sum => 2,
        };
        [groups.count as u32, groups.chosen as u32, rating]
    });
    [
        pair(experts as u32, spec.top_k as u32),
        pair(sigmoid, u32::from(spec.renormalize)),
        pair(spec.scale.to_bits(), groups[0]),
        pair(groups[1], groups[2]),
    ]
}

/// As `RouterSpec::route`. The scores replace the logits, f32 `[N, E]`.
pub(crate) fn route(spec: &RouterSpec, logits: &Tensor, correction: Option<&Tensor>) -> Result<DeviceRouting> {
    let gpu = Gpu::of(logits, NAME)?;
    let ((n, e), k) = (logits.dims2()?, spec.top_k);
    let parts = n.div_ceil(TOKENS);
    let place = |t: &Tensor| address(t, NAME);
    let scores = address_of(logits, NAME, DType::F32)?;
    let correction = match correction {
        Some(c) => Some(c.to_dtype(DType::F32)?.to_device(logits.device())?),
        None => None,
    };
    let by = correction.as_ref().map_or(Ok(0), |c| address_of(c, NAME, DType::F32))?;
    let (chosen, weights) = (gpu.empty((n, k), DType::U32)?, gpu.empty((n, k), DType::F32)?);
    let (log_sums, numbers) = (gpu.empty(n, DType::F32)?, gpu.empty((n, NUMBERS), DType::F32)?);
    let finite = gpu.upload_u32(&[1])?;
    let args = [
        Arg::Address(scores),
        Arg::Address(by),
        Arg::size(n),
        Arg::Address(place(&chosen)?),
        Arg::Address(place(&weights)?),
        Arg::Address(place(&log_sums)?),
        Arg::Address(place(&numbers)?),
        Arg::Address(place(&finite)?),
    ];
    let of_tokens = Grid::line(n.div_ceil(WARPS), THREADS);
    if n > 0 {
        // SAFETY: all tensors have the sizes of `cuda/routing.cu`.
        unsafe { gpu.launch_with("routing", "route_choose", of_tokens, &args, Some(&rule(spec, e)))? };
    }
    let (counts, sums) = (gpu.empty((parts, e), DType::U32)?, gpu.empty((parts, e), DType::F64)?);
    let number_sums = gpu.empty((parts, NUMBERS), DType::F64)?;
    let totals = gpu.empty(2 * e + 2 + NUMBERS, DType::F64)?;
    let sizes = [Arg::small(e, NAME)?, Arg::small(k, NAME)?];
    let args = [
        Arg::Address(scores),
        Arg::Address(place(&chosen)?),
        Arg::Address(place(&numbers)?),
        Arg::size(n),
        sizes[0],
        sizes[1],
        Arg::Address(place(&counts)?),
        Arg::Address(place(&sums)?),
        Arg::Address(place(&number_sums)?),
    ];
    let of_parts = Grid::line(parts, THREADS);
    if n > 0 {
        // SAFETY: as above.
        unsafe { gpu.launch("routing", "route_count", of_parts, &args)? };
    }
    let args = [
        Arg::Address(place(&counts)?),
        Arg::Address(place(&sums)?),
        Arg::Address(place(&number_sums)?),
        Arg::Address(place(&finite)?),
        Arg::small(parts, NAME)?,
        sizes[0],
        Arg::Address(place(&totals)?),
    ];
    // SAFETY: as above.
    unsafe { gpu.launch("routing", "route_starts", Grid::line(1, THREADS), &args)? };
    let (row_tokens, row_weights) = (gpu.empty(n * k, DType::U32)?, gpu.empty(n * k, DType::F32)?);
    let (rows, places) = (gpu.empty((n, k), DType::U32)?, gpu.empty((n, k), DType::U32)?);
    let args = [
        Arg::Address(place(&chosen)?),
        Arg::Address(place(&weights)?),
        Arg::Address(place(&counts)?),
        Arg::size(n),
        sizes[0],
        sizes[1],
        Arg::Address(place(&row_tokens)?),
        Arg::Address(place(&row_weights)?),
        Arg::Address(place(&rows)?),
        Arg::Address(place(&places)?),
    ];
    if n > 0 {
        // SAFETY: as above; the first rows of all parts and experts are those of all choices.
        unsafe { gpu.launch("routing", "route_rows", of_parts, &args)? };
    }
    let totals = read::<f64>(&totals, NAME, DType::F64)?;
    let (starts, rest) = totals.split_at(e + 1);
    let (score_sums, rest) = rest.split_at(e);
    let [numbers @ .., finite] = rest else {
        return Err(Error::internal("the totals of a routing are incomplete"));
    };
    if *finite != 1.0 {
        return Err(Error::non_finite("the logits of a router are not finite"));
    }
    Ok(DeviceRouting {
        spec: *spec,
        tokens: n,
        starts: starts.iter().map(|start| *start as usize).collect(),
        score_sums: score_sums.to_vec(),
        numbers: std::array::from_fn(|i| numbers.get(i).copied().unwrap_or(0.0)),
        scores: logits.clone(),
        chosen,
        log_sums,
        rows,
        places,
        row_tokens,
        row_weights,
    })
}

impl DeviceRouting {
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    pub(crate) fn counts(&self) -> Vec<usize> {
        self.starts.windows(2).map(|w| w[1] - w[0]).collect()
    }

    pub(crate) fn score_sums(&self) -> Vec<f64> {
        self.score_sums.clone()
    }

    pub(crate) fn log_sum_squares(&self) -> f64 {
        self.numbers[0]
    }

    pub(crate) fn entropy_sum(&self) -> f64 {
        self.numbers[1]
    }

    pub(crate) fn group_visits(&self) -> Option<u64> {
        self.spec.groups.filter(|g| g.count > 1)?;
        Some(self.numbers[2] as u64)
    }

    pub(crate) fn assign(&self, together: bool) -> ExpertAssignment {
        ExpertAssignment {
            rows: self.tokens,
            starts: self.starts.clone(),
            tokens: self.row_tokens.clone(),
            weights: self.row_weights.clone(),
            places: together.then(|| self.places.clone()),
        }
    }

    /// As `Routing::backward`. Waits for nothing.
    pub(crate) fn backward(&self, d_weights: &Tensor, extra: &LogitLoss) -> Result<Tensor> {
        let gpu = Gpu::of(&self.scores, NAME)?;
        let (n, e) = self.scores.dims2()?;
        if d_weights.elem_count() != n * self.spec.top_k {
            return Err(
                Error::shape("the gradient of the weights of experts has the wrong length")
                    .found(d_weights.elem_count())
                    .expected(n * self.spec.top_k),
            );
        }
        let balance = match &extra.balance[..] {
            [] => None,
            values => {
                let tensor = gpu.empty(values.len(), DType::F32)?;
                write(&tensor, NAME, DType::F32, values)?;
                Some(tensor)
            }
        };
        if balance.as_ref().is_some_and(|b| b.elem_count() != e) {
            return Err(Error::internal("the balance loss has another number of experts"));
        }
        let dz = gpu.empty((n, e), DType::F32)?;
        let args = [
            Arg::Address(address_of(d_weights, NAME, DType::F32)?),
            Arg::Address(address(&self.rows, NAME)?),
            Arg::Address(address(&self.chosen, NAME)?),
            Arg::Address(address(&self.scores, NAME)?),
            Arg::Address(address(&self.log_sums, NAME)?),
            Arg::Address(balance.as_ref().map_or(Ok(0), |b| address(b, NAME))?),
            Arg::F32(2.0 * extra.z),
            Arg::size(n),
            Arg::Address(address(&dz, NAME)?),
        ];
        if n > 0 {
            let grid = Grid::line(n.div_ceil(WARPS), THREADS);
            // SAFETY: the tensors have the sizes of `cuda/routing.cu`; rows and choices come from `route`.
            unsafe { gpu.launch_with("routing", "route_backward", grid, &args, Some(&rule(&self.spec, e)))? };
        }
        Ok(dz)
    }
}
