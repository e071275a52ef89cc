//! Fused LoRA linear: `y = x·Wᵀ + b + s · (x·Aᵀ)·Bᵀ` and `∂x`. x `[N, I]`, W `[O, I]`, A `[R, I]`, B `[O, R]`, y
//! `[N, O]`. Fused on the CPU; on other devices the methods of `LowRank` compute it step by step.

use super::cpu::product::{CInit, CpuBackend, FusedLora, Matrix, Operand, WeightRows, product_with};
use super::cpu::storage::{StoredElements, dims2, expect_dims, floats, tensor, unwritten};
use super::quantized::{QMatrixView, WeightView};
use super::update::with_slices;
use super::{linear, update};
use candle_core::Tensor;
use ft_base::Result;

/// The two LoRA matrices, f32, and their scale s.
#[derive(Debug, Clone, Copy)]
pub struct LowRank<'a> {
    /// `[R, I]`
    pub a: &'a Tensor,
    /// `[O, R]`
    pub b: &'a Tensor,
    /// s: the factor of the low-rank product.
    pub scale: f32,
}

/// The base weight `[O, I]` on the CPU; a dense one is f32 or bf16.
pub type BaseWeight<'a> = WeightView<&'a Tensor, QMatrixView<'a>>;

impl LowRank<'_> {
    /// Computes u = s · x·Aᵀ, `[N, R]`, from x `[N, I]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn down(&self, x: &Tensor) -> Result<Tensor> {
        let u = linear::forward(x, self.a, None)?;
        update::scale_assign(&u, self.scale)?;
        Ok(u)
    }

    /// Computes `y [N, O] += u·Bᵀ` from u `[N, R]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn up_add(&self, y: &Tensor, u: &Tensor) -> Result<()> {
        linear::forward_add(y, u, self.b)
    }

    /// Computes ∂u = s · ∂y·B, `[N, R]`, from ∂y `[N, O]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn up_backward(&self, dy: &Tensor) -> Result<Tensor> {
        let du = linear::backward_input(dy, self.b)?;
        update::scale_assign(&du, self.scale)?;
        Ok(du)
    }

    /// Computes `∂x [N, I] += ∂u·A` from ∂u `[N, R]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn down_backward_add(&self, dx: &Tensor, du: &Tensor) -> Result<()> {
        linear::backward_input_add(dx, du, self.a)
    }

    /// Returns (R, I, O). Errors: shapes that do not fit.
    fn sizes(&self) -> Result<(usize, usize, usize)> {
        let (rank, inputs) = dims2(self.a, "A of a LoRA pair")?;
        let (outputs, _) = dims2(self.b, "B of a LoRA pair")?;
        expect_dims(self.b, "B of a LoRA pair", &[outputs, rank])?;
        Ok((rank, inputs, outputs))
    }
}

impl BaseWeight<'_> {
    /// Runs `f` on the elements of the weight, which must be `[outputs, inputs]`.
    fn with<R>(&self, (outputs, inputs): (usize, usize), f: impl FnOnce(WeightRows<'_>) -> Result<R>) -> Result<R> {
        match self {
            BaseWeight::Dense(w) => {
                expect_dims(w, "the weight of a linear", &[outputs, inputs])?;
                linear::with_rows(w, "the weight of a linear", f)
            }
            BaseWeight::Quantized(view) if (view.rows, view.columns) != (outputs, inputs) => {
                Err(ft_base::Error::shape("the weight of a linear has the wrong shape")
                    .found(format!("[{}, {}]", view.rows, view.columns))
                    .expected(format!("[{outputs}, {inputs}]")))
            }
            BaseWeight::Quantized(view) => f(WeightRows::new(Operand::Quantized(*view), inputs)),
        }
    }
}

/// Computes y `[N, O]` and u = s · x·Aᵀ `[N, R]`, both f32, from `x [N, I]` and `bias [O]` f32 or bf16.
///
/// # Errors
/// Shapes that do not fit, tensors that are not contiguous or not on the CPU.
pub fn forward(x: &Tensor, w: BaseWeight<'_>, bias: Option<&Tensor>, low: LowRank<'_>) -> Result<(Tensor, Tensor)> {
    let (rank, inputs, outputs) = low.sizes()?;
    let rows = dims2(x, "x of a linear")?.0;
    expect_dims(x, "x of a linear", &[rows, inputs])?;
    let bias = linear::read_bias(bias, outputs)?;
    let (mut y, mut u) = (unwritten(rows * outputs), unwritten(rows * rank));
    floats(x, "x of a linear", |x| {
        w.with((outputs, inputs), |w| {
            with_pair(low, |a, b| {
                let fused_lora = FusedLora {
                    rank,
                    down: Matrix::k_inner(a, inputs),
                    up: Matrix::k_inner(b, rank),
                    scale: low.scale,
                    u: &mut u,
                };
                let start = bias.as_deref().map_or(CInit::Zero, CInit::Bias);
                let operands = (Matrix::k_inner(StoredElements::F32(x), inputs), w.forward());
                product_with(
                    CpuBackend::current(),
                    (rows, outputs, inputs),
                    &mut y,
                    start,
                    operands,
                    w.rounding(),
                    fused_lora,
                );
                Ok(())
            })
        })
    })?;
    Ok((tensor(y, (rows, outputs))?, tensor(u, (rows, rank))?))
}

/// Computes ∂x = dy·W + ∂u·A `[N, I]`, added to `sum` if given, and ∂u = s · dy·B `[N, R]`, both f32, from `dy [N, O]`.
///
/// # Errors
/// As `forward`. `sum` must not share storage with `dy`.
pub fn backward(dy: &Tensor, w: BaseWeight<'_>, sum: Option<&Tensor>, low: LowRank<'_>) -> Result<(Tensor, Tensor)> {
    let (rank, inputs, outputs) = low.sizes()?;
    let rows = dims2(dy, "dy of a linear")?.0;
    expect_dims(dy, "dy of a linear", &[rows, outputs])?;
    let mut du = unwritten(rows * rank);
    let mut run = |dx: &mut [f32], start: CInit<&[f32]>, dy: &[f32], w: WeightRows<'_>| {
        with_pair(low, |a, b| {
            let fused_lora = FusedLora {
                rank,
                down: Matrix::k_outer(b, rank),
                up: Matrix::k_outer(a, inputs),
                scale: low.scale,
                u: &mut du,
            };
            let operands = (Matrix::k_inner(StoredElements::F32(dy), outputs), w.backward());
            product_with(
                CpuBackend::current(),
                (rows, inputs, outputs),
                dx,
                start,
                operands,
                w.rounding(),
                fused_lora,
            );
            Ok(())
        })
    };
    let dx = match sum {
        Some(sum) => {
            expect_dims(sum, "dx of a linear", &[rows, inputs])?;
            w.with((outputs, inputs), |w| {
                let mut done = Ok(());
                with_slices(sum, dy, |dx, dy| done = run(dx, CInit::C, dy, w))?;
                done
            })?;
            sum.clone()
        }
        None => {
            let mut dx = unwritten(rows * inputs);
            floats(dy, "dy of a linear", |dy| {
                w.with((outputs, inputs), |w| run(&mut dx, CInit::Zero, dy, w))
            })?;
            tensor(dx, (rows, inputs))?
        }
    };
    Ok((dx, tensor(du, (rows, rank))?))
}

fn with_pair<R>(low: LowRank<'_>, f: impl FnOnce(StoredElements<'_>, StoredElements<'_>) -> Result<R>) -> Result<R> {
    floats(low.a, "A of a LoRA pair", |a| {
        floats(low.b, "B of a LoRA pair", |b| {
            f(StoredElements::F32(a), StoredElements::F32(b))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dequantize::tests::Random;
    use crate::oracle::{as_operand, assert_close, assert_same_on_any_threads, random};
    use candle_core::DType;

    /// Few rows, ragged edges, several chunks of k, a rank that is too large to fuse.
    const SHAPES: [(usize, usize, usize, usize); 8] = [
        (1, 40, 70, 4),
        (3, 513, 33, 8),
        (6, 130, 70, 4),
        (9, 300, 100, 1),
        (70, 16, 530, 16),
        (130, 600, 250, 16),
        (600, 300, 96, 33),
        (40, 90, 80, 100),
    ];

    #[test]
    fn it_rides_on_codes_as_on_their_values() {
        for (n, i, o, r) in SHAPES {
            let (x, dy) = (random((n, i), 1), random((n, o), 2));
            let (a, b) = (random((r, i), 3), random((o, r), 4));
            let low = LowRank {
                a: &a,
                b: &b,
                scale: 0.7,
            };
            let codes = Random::new(o, i);
            for view in codes.views() {
                let mut dequantized = vec![0f32; o * i];
                for (row, to) in dequantized.chunks_exact_mut(i).enumerate() {
                    view.dequantize(row, 0, to);
                }
                let dtype = if view.bf16 { DType::BF16 } else { DType::F32 };
                let w = tensor(dequantized, (o, i)).unwrap().to_dtype(dtype).unwrap();
                let (y, u) = forward(&x, BaseWeight::Quantized(view), None, low).unwrap();
                let (want, want_u) = forward(&x, BaseWeight::Dense(&w), None, low).unwrap();
                assert_close(&y, &want, 1e-5);
                assert_close(&u, &want_u, 1e-5);
                let (dx, du) = backward(&dy, BaseWeight::Quantized(view), None, low).unwrap();
                let (want, want_du) = backward(&dy, BaseWeight::Dense(&w), None, low).unwrap();
                assert_close(&dx, &want, 1e-5);
                assert_close(&du, &want_du, 1e-5);
            }
        }
    }

    #[test]
    fn the_same_on_any_number_of_threads() {
        let (n, i, o, r) = (600, 300, 330, 16);
        let (x, dy) = (random((n, i), 1), random((n, o), 2));
        let (a, b) = (random((r, i), 3), random((o, r), 4));
        let w = random((o, i), 6).to_dtype(DType::BF16).unwrap();
        assert_same_on_any_threads(|| {
            let low = LowRank {
                a: &a,
                b: &b,
                scale: 2.0,
            };
            let (y, u) = forward(&x, BaseWeight::Dense(&w), None, low).unwrap();
            let (dx, du) = backward(&dy, BaseWeight::Dense(&w), None, low).unwrap();
            vec![y, u, dx, du]
        });
    }

    #[test]
    fn one_product_is_as_good_as_three() {
        for (n, i, o, r) in SHAPES {
            let (x, dy) = (random((n, i), 1), random((n, o), 2));
            let (a, b, bias) = (random((r, i), 3), random((o, r), 4), random(o, 5));
            let low = LowRank {
                a: &a,
                b: &b,
                scale: 0.7,
            };
            for dtype in [DType::F32, DType::BF16] {
                let w = random((o, i), 6).to_dtype(dtype).unwrap();
                // With a bf16 weight the LoRA operands are rounded as the others are: A, B and u too.
                let narrow = |t: &Tensor| if dtype == DType::BF16 { as_operand(t) } else { t.clone() };
                let (narrow_a, narrow_b) = (narrow(&a), narrow(&b));
                let parts = LowRank {
                    a: &narrow_a,
                    b: &narrow_b,
                    scale: 0.7,
                };
                let (y, u) = forward(&x, BaseWeight::Dense(&w), Some(&bias), low).unwrap();
                let want = linear::forward(&x, &w, Some(&bias)).unwrap();
                assert_close(&u, &parts.down(&narrow(&x)).unwrap(), 1e-5);
                parts.up_add(&want, &narrow(&u)).unwrap();
                assert_close(&y, &want, 1e-5);

                for start in [None, Some(random((n, i), 7))] {
                    let want = match &start {
                        Some(start) => {
                            let want = start.copy().unwrap();
                            linear::backward_input_add(&want, &dy, &w).unwrap();
                            want
                        }
                        None => linear::backward_input(&dy, &w).unwrap(),
                    };
                    let (dx, du) = backward(&dy, BaseWeight::Dense(&w), start.as_ref(), low).unwrap();
                    assert_close(&du, &parts.up_backward(&narrow(&dy)).unwrap(), 1e-5);
                    parts.down_backward_add(&want, &narrow(&du)).unwrap();
                    assert_close(&dx, &want, 1e-5);
                }
            }
        }
    }
}
