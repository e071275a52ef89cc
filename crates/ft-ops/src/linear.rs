//! Linear layer `y = x Wᵀ + b` and its three derivatives. x `[N, I]`, W `[O, I]`, b `[O]`, y `[N, O]`. A bf16
//! weight is never widened as a whole on the CPU. On a GPU activations may be bf16; gradients of weights are f32.

use super::cpu::product::{CInit, Matrix, Rounding, WeightRows, product};
use super::cpu::storage::{StoredElements, dims2, expect_dims, floats, tensor, unwritten, values};
use super::cpu::update::sum_rows;
use super::update::with_slices;
use candle_core::{DType, Tensor};
use ft_base::{Error, Result};

pub use super::cpu::product::memory::{ProductSizes, can_fuse, free_packed_operands, gemm_bytes};
pub use super::cpu::product::{MANY_ROWS, many_rounded_rows};

/// Computes `x·wᵀ + bias`, `[N, O]` f32, from `x [N, I]` f32, `w [O, I]` f32 or bf16, `bias [O]` f32 or bf16.
///
/// # Errors
/// Shapes that do not fit, tensors that are not contiguous or not on the CPU.
pub fn forward(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (rows, inputs) = dims2(x, "x of a linear")?;
    let outputs = outputs_of(w, inputs)?;
    if let Some(bias) = bias {
        expect_dims(bias, "the bias of a linear", &[outputs])?;
    }
    on_gpu!(x, super::cuda::linear::forward(x, w, bias, (rows, outputs, inputs)));
    let bias = read_bias(bias, outputs)?;
    let mut y = unwritten(rows * outputs);
    floats(x, "x of a linear", |x| {
        with_rows(w, WEIGHT, |w| {
            let start = bias.as_deref().map_or(CInit::Zero, CInit::Bias);
            forward_slices((rows, outputs, inputs), &mut y, start, x, w);
            Ok(())
        })
    })?;
    tensor(y, (rows, outputs))
}

/// As `forward` (x `[N, I]`, w `[O, I]`, bias `[O]`), f32 on every device: logits of a router.
///
/// # Errors
/// As `forward`.
pub fn forward_f32(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (_, inputs) = dims2(x, "x of a linear")?;
    let outputs = outputs_of(w, inputs)?;
    if let Some(bias) = bias {
        expect_dims(bias, "the bias of a linear", &[outputs])?;
    }
    on_gpu!(x, {
        let y = super::cuda::linear::forward_f32(x, w)?;
        if let Some(bias) = bias {
            super::cuda::elementwise::add_rows(&y, bias)?;
        }
        Ok(y)
    });
    forward(x, w, bias)
}

const WEIGHT: &str = "the weight of a linear";

/// Runs `f` on the rows of a weight `[O, I]` while holding the read lock of its tensor.
pub(super) fn with_rows<R>(w: &Tensor, name: &str, f: impl FnOnce(WeightRows<'_>) -> Result<R>) -> Result<R> {
    let (_, columns) = dims2(w, name)?;
    values(w, name, |v| f(WeightRows::new(v, columns)))
}

/// Returns O of a weight `[O, inputs]`.
fn outputs_of(w: &Tensor, inputs: usize) -> Result<usize> {
    let (outputs, _) = dims2(w, WEIGHT)?;
    expect_dims(w, WEIGHT, &[outputs, inputs])?;
    Ok(outputs)
}

/// Returns I of a weight `[outputs, I]`.
fn inputs_of(w: &Tensor, outputs: usize) -> Result<usize> {
    let (_, inputs) = dims2(w, WEIGHT)?;
    expect_dims(w, WEIGHT, &[outputs, inputs])?;
    Ok(inputs)
}

/// Reads the bias of a linear layer, `[outputs]`, widened to f32.
pub(super) fn read_bias(bias: Option<&Tensor>, outputs: usize) -> Result<Option<Vec<f32>>> {
    let Some(bias) = bias else { return Ok(None) };
    expect_dims(bias, "the bias of a linear", &[outputs])?;
    values(bias, "the bias of a linear", |v| Ok(Some(v.to_f32())))
}

/// Computes `y [N, O] += x·wᵀ`, `x [N, I]` f32, `w [O, I]` f32 or bf16. `y` must not share storage with `x`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward_add(y: &Tensor, x: &Tensor, w: &Tensor) -> Result<()> {
    let (rows, inputs) = dims2(x, "x of a linear")?;
    let outputs = outputs_of(w, inputs)?;
    expect_dims(y, "y of a linear", &[rows, outputs])?;
    on_gpu!(x, super::cuda::linear::forward_add(y, x, w, (rows, outputs, inputs)));
    with_rows(w, WEIGHT, |w| {
        with_slices(y, x, |y, x| forward_slices((rows, outputs, inputs), y, CInit::C, x, w))
    })
}

/// Rows of x up to which a GPU computes the products of one input with two weights in one call. With few rows calls take the
/// time. With more the weights do, and one call is predicted to gain less than 2 % (docs/lab-book.md, "Joined products").
const JOINED_ROWS: usize = 1024;

/// True if `forward_two` is one call: two dense weights of one shape and of the type of `x [N, I]`, on a GPU, with few rows.
pub fn can_join(x: &Tensor, ws: [&Tensor; 2]) -> bool {
    if !x
        .dims2()
        .is_ok_and(|(rows, inputs)| rows <= JOINED_ROWS && ws[0].dims().ends_with(&[inputs]))
    {
        return false;
    }
    on_gpu!(x, super::cuda::linear::can_join(x, ws));
    false
}

/// Computes `x·wᵀ + bias`, `[N, O]` each, for two weights `[O, I]` of which `can_join` is true; `biases`: `[O]` each.
///
/// # Errors
/// As `forward`.
pub fn forward_two(x: &Tensor, ws: [&Tensor; 2], biases: Option<[&Tensor; 2]>) -> Result<[Tensor; 2]> {
    let (_, inputs) = dims2(x, "x of a linear")?;
    let outputs = outputs_of(ws[0], inputs)?;
    for bias in biases.iter().flatten() {
        expect_dims(bias, "the bias of a linear", &[outputs])?;
    }
    expect_dims(ws[1], WEIGHT, &[outputs, inputs])?;
    on_gpu!(
        x,
        super::cuda::linear::forward_two(x, ws, biases, (x.dims()[0], outputs, inputs))
    );
    let [first, second] = [0, 1].map(|i| forward(x, ws[i], biases.map(|both| both[i])));
    Ok([first?, second?])
}

/// Returns two uninitialized outputs `[N, O]` of the type of `x [N, I]` for `forward_add_two`, on a GPU, for two weights `[O, I]` of which
/// `can_join` is true.
///
/// # Errors
/// Not a GPU; not enough memory on it.
pub fn two_outputs(x: &Tensor, ws: [&Tensor; 2]) -> Result<[Tensor; 2]> {
    let (rows, inputs) = dims2(x, "x of a linear")?;
    let sizes = (rows, outputs_of(ws[0], inputs)?);
    on_gpu!(x, super::cuda::linear::two_outputs(x, ws, sizes));
    Err(Error::unsupported(format!(
        "two outputs of {sizes:?} in one allocation are not available on a CPU"
    )))
}

/// Computes `y [N, O] += x·wᵀ` for two weights `[O, I]` of which `can_join` is true, on a GPU in one call if `ys` are those of `two_outputs`.
///
/// # Errors
/// As `forward_add`.
pub fn forward_add_two(ys: [&Tensor; 2], x: &Tensor, ws: [&Tensor; 2]) -> Result<()> {
    let (rows, inputs) = dims2(x, "x of a linear")?;
    let outputs = outputs_of(ws[0], inputs)?;
    expect_dims(ws[1], WEIGHT, &[outputs, inputs])?;
    for y in ys {
        expect_dims(y, "y of a linear", &[rows, outputs])?;
    }
    on_gpu!(
        x,
        super::cuda::linear::forward_add_two(ys, x, ws, (rows, outputs, inputs))
    );
    forward_add(ys[0], x, ws[0])?;
    forward_add(ys[1], x, ws[1])
}

fn forward_slices(sizes: (usize, usize, usize), y: &mut [f32], start: CInit<&[f32]>, x: &[f32], w: WeightRows<'_>) {
    let x = Matrix::k_inner(StoredElements::F32(x), sizes.2);
    product(sizes, y, start, x, w.forward(), w.rounding());
}

/// Computes `dx = dy·w`, `[N, I]` f32, from `dy [N, O]` f32 and `w [O, I]` f32 or bf16.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_input(dy: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (rows, outputs) = dims2(dy, "dy of a linear")?;
    let inputs = inputs_of(w, outputs)?;
    on_gpu!(dy, super::cuda::linear::backward_input(dy, w, (rows, inputs, outputs)));
    let mut dx = unwritten(rows * inputs);
    floats(dy, "dy of a linear", |dy| {
        with_rows(w, WEIGHT, |w| {
            backward_slices((rows, inputs, outputs), &mut dx, CInit::Zero, dy, w);
            Ok(())
        })
    })?;
    tensor(dx, (rows, inputs))
}

/// Computes `dx [N, I] += dy·w`; as `backward_input`. `dx` must not share storage with `dy`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_input_add(dx: &Tensor, dy: &Tensor, w: &Tensor) -> Result<()> {
    let (rows, outputs) = dims2(dy, "dy of a linear")?;
    let inputs = inputs_of(w, outputs)?;
    expect_dims(dx, "dx of a linear", &[rows, inputs])?;
    on_gpu!(
        dy,
        super::cuda::linear::backward_input_add(dx, dy, w, (rows, inputs, outputs))
    );
    with_rows(w, WEIGHT, |w| {
        with_slices(dx, dy, |dx, dy| {
            backward_slices((rows, inputs, outputs), dx, CInit::C, dy, w)
        })
    })
}

fn backward_slices(sizes: (usize, usize, usize), dx: &mut [f32], start: CInit<&[f32]>, dy: &[f32], w: WeightRows<'_>) {
    let dy = Matrix::k_inner(StoredElements::F32(dy), sizes.2);
    product(sizes, dx, start, dy, w.backward(), w.rounding());
}

/// Computes `dW = dyᵀ·x`, `[O, I]` f32, from `dy [N, O]` and `x [N, I]`. `stored` is the type of the weight: with
/// bf16 the operands may be rounded to bf16.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn grad_weight(dy: &Tensor, x: &Tensor, stored: DType) -> Result<Tensor> {
    let (outputs, inputs, rows) = gradient_sizes(dy, x)?;
    on_gpu!(
        dy,
        super::cuda::linear::grad_weight(dy, x, (outputs, inputs, rows), None)
    );
    let mut dw = unwritten(outputs * inputs);
    floats(dy, "dy of a linear", |dy| {
        floats(x, "x of a linear", |x| {
            gradient_slices((outputs, inputs, rows), &mut dw, CInit::Zero, dy, x, stored);
            Ok(())
        })
    })?;
    tensor(dw, (outputs, inputs))
}

/// Computes `sum [O, I] += dyᵀ·x`, f32; as `grad_weight`. `sum` must not share storage with `dy` or `x`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn grad_weight_add(sum: &Tensor, dy: &Tensor, x: &Tensor, stored: DType) -> Result<()> {
    let (outputs, inputs, rows) = gradient_sizes(dy, x)?;
    expect_dims(sum, "the gradient of a weight", &[outputs, inputs])?;
    on_gpu!(
        dy,
        super::cuda::linear::grad_weight(dy, x, (outputs, inputs, rows), Some(sum)).map(|_| ())
    );
    floats(dy, "dy of a linear", |dy| {
        with_slices(sum, x, |sum, x| {
            gradient_slices((outputs, inputs, rows), sum, CInit::C, dy, x, stored)
        })
    })
}

/// Returns (O, I, N).
fn gradient_sizes(dy: &Tensor, x: &Tensor) -> Result<(usize, usize, usize)> {
    let (rows, outputs) = dims2(dy, "dy of a linear")?;
    let (_, inputs) = dims2(x, "x of a linear")?;
    expect_dims(x, "x of a linear", &[rows, inputs])?;
    Ok((outputs, inputs, rows))
}

fn gradient_slices(
    sizes: (usize, usize, usize),
    dw: &mut [f32],
    start: CInit<&[f32]>,
    dy: &[f32],
    x: &[f32],
    stored: DType,
) {
    let (outputs, inputs, _) = sizes;
    let rounding = if stored == DType::BF16 {
        Rounding::Bf16
    } else {
        Rounding::Exact
    };
    product(
        sizes,
        dw,
        start,
        Matrix::k_outer(StoredElements::F32(dy), outputs),
        Matrix::k_outer(StoredElements::F32(x), inputs),
        rounding,
    );
}

/// Sums `dy [N, O]` over the tokens: `[O]` f32.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn grad_bias(dy: &Tensor) -> Result<Tensor> {
    let (_, outputs) = dims2(dy, "dy of a linear")?;
    on_gpu!(dy, super::cuda::linear::grad_bias(dy));
    let sum = floats(dy, "dy of a linear", |dy| Ok(sum_rows(dy, outputs)))?;
    tensor(sum, outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{as_operand, assert_close, assert_same_on_any_threads, bf16_pair, random};
    use candle_core::Var;

    const SHAPES: [(usize, usize, usize); 6] = [
        (1, 40, 70),
        (3, 513, 33),
        (7, 1100, 16),
        (70, 16, 530),
        (130, 600, 250),
        (600, 96, 300),
    ];

    #[test]
    fn matches_autograd() {
        for (n, i, o) in SHAPES {
            let x = Var::from_tensor(&random((n, i), 1)).unwrap();
            let w_var = Var::from_tensor(&random((o, i), 2)).unwrap();
            let w = w_var.as_tensor();
            let b = Var::from_tensor(&random(o, 3)).unwrap();
            let dy = random((n, o), 4);
            let y = x.matmul(&w.t().unwrap()).unwrap().broadcast_add(&b).unwrap();
            let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            assert_close(&forward(&x, w, Some(&b)).unwrap(), &y, 1e-5);
            assert_close(&backward_input(&dy, w).unwrap(), grads.get(&x).unwrap(), 1e-5);
            assert_close(&grad_weight(&dy, &x, DType::F32).unwrap(), grads.get(w).unwrap(), 1e-5);
            let (more_y, more_dx) = (y.copy().unwrap(), random((n, i), 9));
            forward_add(&more_y, &x, w).unwrap();
            let want = (&y + x.matmul(&w.t().unwrap()).unwrap()).unwrap();
            assert_close(&more_y, &want, 1e-5);
            let want = (&more_dx + grads.get(&x).unwrap()).unwrap();
            backward_input_add(&more_dx, &dy, w).unwrap();
            assert_close(&more_dx, &want, 1e-5);
            assert_close(&grad_bias(&dy).unwrap(), grads.get(&b).unwrap(), 1e-5);
            let more_dw = random((o, i), 8);
            let want = (&more_dw + grads.get(w).unwrap()).unwrap();
            grad_weight_add(&more_dw, &dy, &x, DType::F32).unwrap();
            assert_close(&more_dw, &want, 1e-5);
        }
    }

    #[test]
    fn bf16_weights_are_used_as_they_are() {
        for (n, i, o) in SHAPES {
            let (x, dy) = (random((n, i), 1), random((n, o), 4));
            let (w, wide) = bf16_pair((o, i), 2);
            let (b, wide_b) = bf16_pair(o, 3);
            let (narrow_x, narrow_dy) = (as_operand(&x), as_operand(&dy));
            assert_close(
                &forward(&x, &w, Some(&b)).unwrap(),
                &forward(&narrow_x, &wide, Some(&wide_b)).unwrap(),
                2e-6,
            );
            assert_close(
                &backward_input(&dy, &w).unwrap(),
                &backward_input(&narrow_dy, &wide).unwrap(),
                2e-6,
            );
            assert_close(
                &grad_weight(&dy, &x, DType::BF16).unwrap(),
                &grad_weight(&narrow_dy, &narrow_x, DType::F32).unwrap(),
                2e-6,
            );
        }
    }

    /// A row alone, among few and among many: the order of its sums may differ, the operands never.
    #[test]
    fn a_row_means_the_same_among_few_and_many() {
        for (i, o) in [(40, 70), (1100, 16), (9, 33), (300, 1)] {
            let (x, dy) = (random((40, i), 1), random((40, o), 4));
            let w = bf16_pair((o, i), 2).0;
            let all = [forward(&x, &w, None).unwrap(), backward_input(&dy, &w).unwrap()];
            for rows in [1, 2, 4, 5, 8, 9, 15, 16, 17, 33] {
                let first = |t: &Tensor| t.narrow(0, 0, rows).unwrap();
                let few = [
                    forward(&first(&x), &w, None).unwrap(),
                    backward_input(&first(&dy), &w).unwrap(),
                ];
                for (few, all) in few.iter().zip(&all) {
                    assert_close(few, &first(all), 2e-6);
                }
            }
        }
    }

    #[test]
    fn bit_equal_on_any_number_of_threads() {
        for (n, i, o) in SHAPES {
            let (x, dy) = (random((n, i), 1), random((n, o), 4));
            for w in [random((o, i), 2), bf16_pair((o, i), 2).0] {
                assert_same_on_any_threads(|| {
                    vec![
                        forward(&x, &w, None).unwrap(),
                        backward_input(&dy, &w).unwrap(),
                        grad_weight(&dy, &x, DType::F32).unwrap(),
                        grad_bias(&dy).unwrap(),
                    ]
                });
            }
        }
    }

    #[test]
    fn empty_and_wrong_shapes() {
        let w = random((5, 4), 1);
        assert_eq!(forward(&random((0, 4), 1), &w, None).unwrap().dims(), [0, 5]);
        let dw = grad_weight(&random((0, 5), 1), &random((0, 4), 1), DType::F32).unwrap();
        assert_eq!(dw.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0; 20]);
        assert!(forward(&random((2, 3), 1), &w, None).is_err());
        assert!(forward(&random((2, 4), 1), &w, Some(&random(4, 1))).is_err());
        assert!(backward_input(&random((2, 4), 1), &w).is_err());
        let not_contiguous = random((4, 2), 1).t().unwrap();
        let e = forward(&not_contiguous, &w, None).unwrap_err();
        assert!(e.to_string().contains("not contiguous"), "{e}");
    }
}
