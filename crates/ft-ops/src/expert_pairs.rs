//! The LoRA pairs of experts that are computed together: the products of all of them in one launch each (`grouped`), and their
//! gradients. On a GPU only.
//!
//! In 16 bits the products read copies of the type of the activations, where the rank is filled with zeros to a multiple of 8.
//!
//! Letters: E experts, R rank of an expert, P columns of a pair in u (R, in 16 bits the next multiple of 8), I inputs, O outputs of
//! the joined matrix, which has Q equal parts (gate and up), M rows of all members.

use super::cpu::storage::expect_dims;
use super::grouped::{self, GroupWeight};
use super::update;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

const NAME: &str = "the pair of an expert";

/// The pairs of all experts on one parameter.
#[derive(Debug, Clone, Copy)]
pub struct JoinedPair<'a> {
    /// A and B of the experts, one after the other, f32: `[E·R, I]` and `[E·O, R]`.
    pub matrices: (&'a Tensor, &'a Tensor),
    /// E
    pub experts: usize,
    /// s
    pub scale: f32,
}

/// The pairs of all experts on one parameter, in the type of the activations.
#[derive(Debug)]
pub struct ExpertPairs {
    /// `[E·P, I]`
    a: Tensor,
    /// `[E·O, P]`
    b: Tensor,
    experts: usize,
    rank: usize,
    scale: f32,
}

/// Successive experts whose rows follow each other.
#[derive(Debug, Clone, Copy)]
pub struct Members<'a> {
    /// The first of them.
    pub first: usize,
    /// The number of rows of each.
    pub counts: &'a [usize],
}

impl Members<'_> {
    /// M
    fn rows(&self) -> usize {
        self.counts.iter().sum()
    }
}

/// Which of the matrix's equal parts, of how many: Q.
pub type OutputPart = (usize, usize);

/// P of rank `rank` for activations with elements of `bytes` bytes.
pub fn columns(rank: usize, bytes: u64) -> usize {
    if bytes < 4 { rank.next_multiple_of(8) } else { rank }
}

/// Bytes of the copies of pairs of rank `rank` with `elements` elements, for activations with elements of `bytes` bytes.
pub fn copied_bytes(elements: usize, rank: usize, bytes: u64) -> u64 {
    if bytes < 4 && rank > 0 {
        bytes * (elements / rank * columns(rank, bytes)) as u64
    } else {
        0
    }
}

/// The pairs for activations of type `dtype`; what is copied is copied in one launch.
///
/// # Errors
/// Shapes that do not fit; not on a GPU.
pub fn new(all: &[JoinedPair<'_>], dtype: DType) -> Result<Vec<ExpertPairs>> {
    let mut made = Vec::with_capacity(all.len());
    for pair in all {
        let (a, b) = pair.matrices;
        let ((rows, _), (outputs, rank)) = (a.dims2()?, b.dims2()?);
        if rank == 0 || pair.experts * rank != rows || !outputs.is_multiple_of(pair.experts) {
            return Err(Error::shape("the pairs of the experts have the wrong shape")
                .found(format!("{:?} and {:?}", a.dims(), b.dims()))
                .expected(format!("pairs of {} experts", pair.experts)));
        }
        made.push(ExpertPairs {
            a: a.clone(),
            b: b.clone(),
            experts: pair.experts,
            rank,
            scale: pair.scale,
        });
    }
    if dtype != DType::F32 {
        copy(&mut made, dtype)?;
    }
    Ok(made)
}

/// Replaces the matrices by copies.
fn copy(pairs: &mut [ExpertPairs], dtype: DType) -> Result<()> {
    let Some(first) = pairs.first() else { return Ok(()) };
    on_gpu!(first.a, super::cuda::expert_pairs::copy(pairs, dtype));
    let _ = dtype;
    Err(refused())
}

fn refused() -> Error {
    Error::unsupported("the pairs of experts are computed together on a GPU only")
}

impl ExpertPairs {
    /// Both matrices, for their copies.
    #[cfg(feature = "cuda")]
    pub(crate) fn matrices_mut(&mut self) -> [&mut Tensor; 2] {
        [&mut self.a, &mut self.b]
    }

    /// E and R.
    #[cfg(feature = "cuda")]
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.experts, self.rank)
    }

    fn check(&self, of: Members<'_>) -> Result<()> {
        if of.first + of.counts.len() > self.experts {
            return Err(Error::argument("an expert does not exist").found(of.first + of.counts.len()));
        }
        Ok(())
    }

    /// A of the members, with their numbers of rows.
    fn each_a(&self, of: Members<'_>) -> Result<Vec<(Tensor, usize)>> {
        self.check(of)?;
        let wide = self.a.dim(0)? / self.experts;
        let one = |(i, rows): (usize, &usize)| Ok((self.a.narrow(0, (of.first + i) * wide, wide)?, *rows));
        of.counts.iter().enumerate().map(one).collect()
    }

    /// O / Q
    fn outputs(&self, (_, parts): OutputPart) -> Result<usize> {
        Ok(self.b.dim(0)? / self.experts / parts)
    }

    /// As `each_a`, of a part of B.
    fn each_b(&self, of: Members<'_>, part: OutputPart) -> Result<Vec<(Tensor, usize)>> {
        self.check(of)?;
        let outputs = self.outputs(part)?;
        let first = |i: usize| ((of.first + i) * part.1 + part.0) * outputs;
        let one = |(i, rows): (usize, &usize)| Ok((self.b.narrow(0, first(i), outputs)?, *rows));
        of.counts.iter().enumerate().map(one).collect()
    }

    /// u = s · x·Aᵀ, `[M, P]`; x `[M, I]`.
    ///
    /// # Errors
    /// Shapes that do not fit; not on a GPU.
    pub fn down(&self, x: &Tensor, of: Members<'_>) -> Result<Tensor> {
        let u = grouped::forward(x, &groups(&self.each_a(of)?))?;
        self.scaled(u)
    }

    /// y `[M, O / Q]` += u·Bᵀ of a part; u `[M, P]`.
    ///
    /// # Errors
    /// As `down`.
    pub fn up_add(&self, y: &Tensor, u: &Tensor, of: Members<'_>, part: OutputPart) -> Result<()> {
        grouped::forward_add(y, u, &groups(&self.each_b(of, part)?))
    }

    /// ∂u = s · Σ ∂y·B over the parts, `[M, P]`; dys `[M, O / Q]`, one for each part.
    ///
    /// # Errors
    /// As `down`.
    pub fn up_backward(&self, dys: &[Tensor], of: Members<'_>) -> Result<Tensor> {
        let mut du = None;
        for (part, dy) in dys.iter().enumerate() {
            let all = self.each_b(of, (part, dys.len()))?;
            match &du {
                Some(du) => grouped::backward_input_add(du, dy, &groups(&all))?,
                None => du = Some(grouped::backward_input(dy, &groups(&all))?),
            }
        }
        self.scaled(du.ok_or_else(|| Error::argument("the pairs of experts have no outputs"))?)
    }

    /// ∂x `[M, I]` += ∂u·A; du `[M, P]`.
    ///
    /// # Errors
    /// As `down`.
    pub fn down_backward_add(&self, dx: &Tensor, du: &Tensor, of: Members<'_>) -> Result<()> {
        grouped::backward_input_add(dx, du, &groups(&self.each_a(of)?))
    }

    fn scaled(&self, u: Tensor) -> Result<Tensor> {
        if self.scale != 1.0 {
            update::scale_assign(&u, self.scale)?;
        }
        Ok(u)
    }

    /// Adds the gradients of A of the members to `sum`, f32 `[E·R, I]`; du `[M, P]`, x `[M, I]`.
    ///
    /// # Errors
    /// As `down`.
    pub fn grad_a_add(&self, sum: &Tensor, du: &Tensor, x: &Tensor, of: Members<'_>) -> Result<()> {
        let inputs = self.a.dim(1)?;
        expect_dims(sum, "the gradient of A of experts", &[self.experts * self.rank, inputs])?;
        self.check(of)?;
        expect_dims(x, "the rows of experts", &[of.rows(), inputs])?;
        self.gradient(sum, true, x, du, of, |i| (of.first + i) * self.rank)
    }

    /// Adds the gradients of a part of B of the members to `sum`, f32 `[E·O, R]`; dy `[M, O / Q]`, u `[M, P]`.
    ///
    /// # Errors
    /// As `down`.
    pub fn grad_b_add(&self, sum: &Tensor, dy: &Tensor, u: &Tensor, of: Members<'_>, part: OutputPart) -> Result<()> {
        let outputs = self.outputs(part)?;
        expect_dims(sum, "the gradient of B of experts", &[self.b.dim(0)?, self.rank])?;
        let first = |i| ((of.first + i) * part.1 + part.0) * outputs;
        self.check(of)?;
        expect_dims(dy, "the rows of experts", &[of.rows(), outputs])?;
        self.gradient(sum, false, dy, u, of, first)
    }

    /// `row`: where the gradient of a member begins in `sum`, which is that of A if `of_a`, or else of B.
    fn gradient(
        &self,
        sum: &Tensor,
        of_a: bool,
        wide: &Tensor,
        low: &Tensor,
        of: Members<'_>,
        row: impl Fn(usize) -> usize,
    ) -> Result<()> {
        expect_dims(low, NAME, &[of.rows(), self.b.dim(1)?])?;
        let places: Vec<(usize, usize)> = (of.counts.iter().enumerate()).map(|(i, n)| (row(i), *n)).collect();
        on_gpu!(
            sum,
            super::cuda::expert_pairs::gradient(sum, of_a, &places, wide, low, self.rank)
        );
        let _ = (places, of_a, wide);
        Err(refused())
    }
}

fn groups(each: &[(Tensor, usize)]) -> Vec<(GroupWeight<'_>, usize)> {
    each.iter().map(|(weight, rows)| (weight.into(), *rows)).collect()
}
