//! Rotary position embeddings on the first R elements of a head (the rotary size); elements from R on are copied.

use super::cpu::rope as cpu;
use super::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten, wrong_shape};
use candle_core::Tensor;
use ft_base::{Error, Result};

/// Which elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// i with i + R/2, as in Llama.
    Halves,
    /// 2i with 2i + 1, as in GLM.
    Neighbors,
}

/// The direction of the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeDirection {
    /// The rotation of the model.
    Forward,
    /// The transpose of `Forward`: the negative angle, the same factor.
    Backward,
}

/// Rotates x `[N, heads·E]` with E = `head_dim`; cos and sin f32 `[N, R/2]`, R <= E. The result has the shape and
/// type of x. cos and sin may contain a common factor; `Backward` is the transpose of `Forward` in this case too.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn apply(
    x: &Tensor,
    (cos, sin): (&Tensor, &Tensor),
    head_dim: usize,
    pairing: RopePairing,
    direction: RopeDirection,
) -> Result<Tensor> {
    let (tokens, width) = dims2(x, "x of a rotation")?;
    let (_, half) = dims2(cos, "the cosines of a rotation")?;
    expect_dims(cos, "the cosines of a rotation", &[tokens, half])?;
    expect_dims(sin, "the sines of a rotation", &[tokens, half])?;
    if head_dim == 0 || width % head_dim != 0 {
        return Err(wrong_shape(
            x,
            "x of a rotation",
            &format!("heads of {head_dim} elements"),
        ));
    }
    if 2 * half > head_dim {
        return Err(Error::shape("the rotary dimension is larger than the head dimension")
            .found(2 * half)
            .expected(format!("at most {head_dim}")));
    }
    let sign = match direction {
        RopeDirection::Forward => 1.0,
        RopeDirection::Backward => -1.0,
    };
    let sizes = cpu::RotationSizes {
        width,
        head: head_dim,
        half,
    };
    on_gpu!(x, super::cuda::rope::apply(x, cos, sin, sign, tokens, sizes, pairing));
    let mut y = unwritten(tokens * width);
    floats(x, "x of a rotation", |x| {
        floats(cos, "the cosines of a rotation", |cos| {
            floats(sin, "the sines of a rotation", |sin| {
                cpu::apply(x, cos, sin, sign, sizes, pairing, &mut y);
                Ok(())
            })
        })
    })?;
    tensor(y, (tokens, width))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{assert_close, assert_same_on_any_threads, random};
    use candle_core::Var;

    /// The rotation of Hugging Face, over the first R elements.
    fn composed(x: &Tensor, cos: &Tensor, sin: &Tensor, e: usize, pairing: RopePairing) -> Tensor {
        let (n, width) = x.dims2().unwrap();
        let half = cos.dim(1).unwrap();
        let heads = x.reshape((n, width / e, e)).unwrap();
        let every_other = |first: usize| {
            let pairs = heads.narrow(2, 0, 2 * half).unwrap().contiguous().unwrap();
            let pairs = pairs.reshape((n, width / e, half, 2)).unwrap();
            pairs.narrow(3, first, 1).unwrap().squeeze(3).unwrap()
        };
        let (a, b) = match pairing {
            RopePairing::Halves => (heads.narrow(2, 0, half).unwrap(), heads.narrow(2, half, half).unwrap()),
            RopePairing::Neighbors => (every_other(0), every_other(1)),
        };
        let rest = heads.narrow(2, 2 * half, e - 2 * half).unwrap();
        let (cos, sin) = (cos.unsqueeze(1).unwrap(), sin.unsqueeze(1).unwrap());
        let mul = |x: &Tensor, y: &Tensor| x.broadcast_mul(y).unwrap();
        let first = (mul(&a, &cos) - mul(&b, &sin)).unwrap();
        let second = (mul(&b, &cos) + mul(&a, &sin)).unwrap();
        let (first, second) = match pairing {
            RopePairing::Halves => (first, second),
            RopePairing::Neighbors => {
                let turned = Tensor::stack(&[first, second], 3).unwrap();
                let turned = turned.reshape((n, width / e, 2 * half)).unwrap();
                (
                    turned.narrow(2, 0, half).unwrap(),
                    turned.narrow(2, half, half).unwrap(),
                )
            }
        };
        let parts = if e == 2 * half {
            vec![first, second]
        } else {
            vec![first, second, rest]
        };
        Tensor::cat(&parts, 2).unwrap().reshape((n, width)).unwrap()
    }

    #[test]
    fn matches_autograd() {
        for (n, heads, e, half) in [(5, 3, 8, 4), (9, 2, 10, 3), (300, 4, 64, 32), (2, 1, 6, 0)] {
            for pairing in [RopePairing::Halves, RopePairing::Neighbors] {
                let x = Var::from_tensor(&random((n, heads * e), 1)).unwrap();
                // Not on the unit circle: a common factor must be kept in both directions.
                let (cos, sin) = (random((n, half), 2), random((n, half), 3));
                let dy = random((n, heads * e), 4);
                let turn = |x: &Tensor, direction| apply(x, (&cos, &sin), e, pairing, direction).unwrap();
                if half == 0 {
                    assert_close(&turn(&x, RopeDirection::Forward), &x, 0.0);
                    continue;
                }
                let want = composed(&x, &cos, &sin, e, pairing);
                let grads = (&want * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                assert_close(&turn(&x, RopeDirection::Forward), &want, 1e-6);
                assert_close(&turn(&dy, RopeDirection::Backward), grads.get(&x).unwrap(), 1e-6);
                assert_same_on_any_threads(|| vec![turn(&x, RopeDirection::Forward)]);
            }
        }
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let (x, c) = (random((4, 12), 1), random((4, 3), 1));
        let turn = |cos: &Tensor, e| apply(&x, (cos, cos), e, RopePairing::Halves, RopeDirection::Forward);
        assert!(turn(&c, 5).is_err());
        assert!(turn(&c, 4).is_err());
        assert!(turn(&random((3, 3), 1), 6).is_err());
    }
}
