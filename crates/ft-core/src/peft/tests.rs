//! Tests of every kind: forward and merged weights agree, gradients equal central differences.

use super::*;
use crate::base::Result;
use crate::ops::low_rank::LowRank;
use crate::ops::oracle::{assert_close, differences, flat, random};
use crate::ops::{adapters, linear, update};
use candle_core::{DType, Tensor, Var};
use std::cell::Cell;

/// A linear with a dense weight.
struct PlainLinear {
    w: Tensor,
    bias: Tensor,
    calls: Cell<usize>,
}

impl FrozenLinear for PlainLinear {
    fn dims(&self) -> (usize, usize) {
        self.w.dims2().unwrap()
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.calls.set(self.calls.get() + 1);
        linear::forward(x, &self.w, Some(&self.bias))
    }

    fn product(&self, x: &Tensor) -> Result<Tensor> {
        linear::forward(x, &self.w, None)
    }

    fn forward_add(&self, y: &Tensor, x: &Tensor) -> Result<()> {
        update::add_assign(y, &self.forward(x)?)
    }

    fn backward(&self, dy: &Tensor, dx: Dx<'_>) -> Result<Option<Tensor>> {
        Ok(match dx {
            Dx::NotNeeded => None,
            Dx::New => Some(linear::backward_input(dy, &self.w)?),
            Dx::AddTo(sum) => {
                linear::backward_input_add(sum, dy, &self.w)?;
                Some(sum.clone())
            }
        })
    }

    fn forward_with(&self, x: &Tensor, low: LowRank<'_>) -> Result<Tensor> {
        let y = self.forward(x)?;
        low.up_add(&y, &low.down(x)?)?;
        Ok(y)
    }

    fn backward_with(&self, dy: &Tensor, dx: Dx<'_>, low: LowRank<'_>) -> Result<(Tensor, Tensor)> {
        let dx = self.backward(dy, dx)?.unwrap();
        let du = low.up_backward(dy)?;
        low.down_backward_add(&dx, &du)?;
        Ok((dx, du))
    }

    fn rows(&self, first: usize, n: usize) -> Result<Vec<f32>> {
        update::to_f32_vec(&self.w.narrow(0, first, n)?)
    }
}

pub(crate) const N: usize = 5;
pub(crate) const I: usize = 12;
pub(crate) const O: usize = 6;

fn base() -> PlainLinear {
    PlainLinear {
        w: random((O, I), 100),
        bias: random(O, 101),
        calls: Cell::new(0),
    }
}

fn mask(p: f32) -> DropoutMask {
    DropoutMask { p, site: 3 }
}

fn lora(p: f32, start: bool) -> Lora {
    let mut lora = Lora::new("m", (random((2, I), 1), random((O, 2), 2)), 0.7, mask(p));
    lora.start = start.then(|| (random((2, I), 3), random((O, 2), 4)));
    lora
}

pub(crate) fn dora(p: f32) -> Dora {
    let size = random(O, 5).abs().unwrap();
    Dora::new("m", lora(p, false), (size + 0.5).unwrap())
}

/// Small values, so that the series is close to a rotation.
fn triangles(block: usize) -> Tensor {
    (random((I / block, Oft::elements(block)), 11) * 0.2).unwrap()
}

/// Every kind, with parameters that change the output.
pub(crate) fn kinds(p: f32) -> Vec<(&'static str, Adapter)> {
    let projections = VeraProjections {
        a: random((3, I + 4), 6),
        b: random((O + 2, 3), 7),
    };
    let w1 = Factor::whole("m", "lokr_w1", random((2, 3), 20));
    let product = |name: &str, rows: usize, columns: usize| {
        Factor::product("m", name, random((rows, 2), 21), random((2, columns), 22))
    };
    let w2 = || Factor::whole("m", "lokr_w2", random((3, 4), 23));
    let lokr = |first, second| {
        Adapter::Lokr(Lokr {
            first,
            second,
            scale: 0.6,
        })
    };
    let oft = |block, cayley| Adapter::Oft(Oft::new("m", triangles(block), block, cayley));
    vec![
        ("lora", Adapter::Lora(lora(p, false))),
        ("lora with a start", Adapter::Lora(lora(p, true))),
        ("ia3", Adapter::Ia3(Ia3::new("m", random((O, 1), 8), false))),
        ("ia3 of inputs", Adapter::Ia3(Ia3::new("m", random((1, I), 9), true))),
        (
            "vera",
            Adapter::Vera(Vera::new("m", projections, random(O, 12), random(3, 13), I, mask(p))),
        ),
        (
            "loha",
            Adapter::Loha(Loha::new(
                "m",
                [
                    random((O, 2), 14),
                    random((2, I), 15),
                    random((O, 2), 16),
                    random((2, I), 17),
                ],
                0.4,
            )),
        ),
        ("lokr", lokr(w1, w2())),
        (
            "lokr of products",
            lokr(product("lokr_w1", 2, 3), product("lokr_w2", 3, 4)),
        ),
        ("oft by a series", oft(4, Cayley::Neumann(5))),
        ("oft by a short series", oft(6, Cayley::Neumann(3))),
        ("oft by a long series", oft(3, Cayley::Neumann(7))),
        ("oft by the inverse", oft(4, Cayley::Exact)),
        (
            "adalora",
            Adapter::Adalora(Adalora::new(
                "m",
                random((2, I), 18),
                random((O, 2), 19),
                random((2, 1), 24),
                0.8,
                mask(p),
            )),
        ),
    ]
}

pub(crate) const KEY: Option<DropoutKey> = Some(DropoutKey {
    seed: 1,
    step: 2,
    micro: 3,
});

/// Σ y ⊙ dy.
fn loss(adapter: &Adapter, x: &Tensor, dy: &Tensor, key: Option<DropoutKey>) -> Result<f64> {
    let y = adapter.forward(&base(), x, key)?;
    Ok(flat(&y)
        .iter()
        .zip(flat(dy))
        .map(|(a, b)| f64::from(*a) * f64::from(b))
        .sum())
}

fn backward(adapter: &Adapter, x: &Tensor, dy: &Tensor, key: Option<DropoutKey>) -> (Tensor, Vec<ParamGradient>) {
    let base = base();
    let (dx, gradients) = adapter
        .backward(BackwardInput {
            base: &base,
            x: Some(x),
            dy,
            dx: Dx::New,
            dropout: key,
        })
        .unwrap();
    (dx.unwrap(), gradients)
}

#[test]
fn the_merged_weight_gives_the_output_of_the_adapter() {
    let mut all = kinds(0.5);
    all.push(("dora", Adapter::Dora(dora(0.5))));
    for (name, adapter) in all {
        let (base, x) = (base(), random((N, I), 30));
        let y = adapter.forward(&base, &x, None).unwrap();
        let w = adapter.merged(&base.w).unwrap();
        let bias = adapter.merged_bias(&base.bias).unwrap();
        assert_close(
            &linear::forward(&x, &w.contiguous().unwrap(), Some(&bias)).unwrap(),
            &y,
            1e-5,
        );
        let plain = base.forward(&x).unwrap();
        let change: f32 = flat(&y).iter().zip(flat(&plain)).map(|(a, b)| (a - b).powi(2)).sum();
        assert!(change > 1e-2, "{name} does nothing");
    }
}

#[test]
fn gradients_are_those_of_central_differences() {
    for (p, key) in [(0.0, None), (0.5, KEY)] {
        for (name, adapter) in kinds(p) {
            let (x, dy) = (random((N, I), 31), random((N, O), 32));
            let (dx, gradients) = backward(&adapter, &x, &dy, key);
            assert_close(&dx, &differences(&x, 1e-2, |x| loss(&adapter, x, &dy, key)), 4e-3);
            assert_eq!(gradients.len(), adapter.parts().len(), "{name}");
            for g in gradients {
                let values = flat(&g.param.tensor);
                let want = differences(&g.param.tensor, 1e-2, |moved| {
                    fill(&g.param.tensor, &flat(moved))?;
                    let l = loss(&adapter, &x, &dy, key)?;
                    fill(&g.param.tensor, &values)?;
                    Ok(l)
                });
                assert_close(&g.gradient, &want, 4e-3);
            }
        }
    }
}

/// The norm is treated as a constant, so finite differences do not apply to DoRA: candle's autograd is the reference.
#[test]
fn dora_is_that_of_the_paper() {
    let (x, dy) = (random((N, I), 31), random((N, O), 32));
    let own = dora(0.0);
    let var = |t: &Tensor| Var::from_tensor(t).unwrap();
    let (a, b, m, input) = (var(&own.lora.a), var(&own.lora.b), var(&own.magnitude), var(&x));
    let w = base().w;
    let v = (&w + (b.matmul(&a).unwrap() * 0.7).unwrap()).unwrap();
    let norm = v.sqr().unwrap().sum(1).unwrap().sqrt().unwrap().detach();
    let scaled = v
        .broadcast_mul(&(m.as_tensor() / &norm).unwrap().unsqueeze(1).unwrap())
        .unwrap();
    let y = input
        .matmul(&scaled.t().unwrap())
        .unwrap()
        .broadcast_add(&base().bias)
        .unwrap();
    let grads = (&y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
    let adapter = Adapter::Dora(own);
    assert_close(&adapter.forward(&base(), &x, None).unwrap(), &y, 1e-5);
    let (dx, gradients) = backward(&adapter, &x, &dy, None);
    assert_close(&dx, grads.get(&input).unwrap(), 1e-5);
    for (g, var) in gradients.iter().zip([&a, &b, &m]) {
        assert_close(&g.gradient, grads.get(var).unwrap(), 1e-5);
    }
    // A key with almost no dropout: the other code path gives the same result.
    let (dx_key, gradients_key) = backward(&Adapter::Dora(dora(1e-12)), &x, &dy, KEY);
    assert_close(&dx_key, &dx, 1e-5);
    for (g, h) in gradients_key.iter().zip(&gradients) {
        assert_close(&g.gradient, &h.gradient, 1e-5);
    }
    let fresh = dora(0.0);
    fresh.begin(&base()).unwrap();
    let b_zero = vec![0f32; 2 * O];
    fill(&fresh.lora.b, &b_zero).unwrap();
    fresh.begin(&base()).unwrap();
    let unchanged = Adapter::Dora(fresh).forward(&base(), &x, None).unwrap();
    assert_close(&unchanged, &base().forward(&x).unwrap(), 1e-6);
}

#[test]
fn input_gradients_are_added_and_nothing_unwanted_is_computed() {
    let mut all = kinds(0.5);
    all.push(("dora", Adapter::Dora(dora(0.5))));
    for (name, adapter) in all {
        let (x, dy) = (random((N, I), 31), random((N, O), 32));
        let base = base();
        let call = |x, dx| {
            adapter
                .backward(BackwardInput {
                    base: &base,
                    x,
                    dy: &dy,
                    dx,
                    dropout: KEY,
                })
                .unwrap()
        };
        let (alone, gradients) = call(None, Dx::New);
        assert!(gradients.is_empty(), "{name}");
        let sum = random((N, I), 33);
        let before = sum.copy().unwrap();
        let added = call(Some(&x), Dx::AddTo(&sum)).0.unwrap();
        assert_close(&added, &(before + alone.unwrap()).unwrap(), 1e-5);
        assert_eq!(flat(&added), flat(&sum), "{name}: added in place");
        let (none, gradients) = call(Some(&x), Dx::NotNeeded);
        assert!(none.is_none() && gradients.len() == adapter.parts().len(), "{name}");
        let (none, gradients) = call(None, Dx::NotNeeded);
        assert!(none.is_none() && gradients.is_empty(), "{name}");
    }
}

#[test]
fn fresh_adapters_change_nothing() {
    let x = random((N, I), 30);
    let want = base().forward(&x).unwrap();
    let shared = VeraProjections::fresh(3, I, O, 7).unwrap();
    let (zero, small) = (full(&[O], 0.0).unwrap(), full(&[3], 0.1).unwrap());
    let shape = |rank| AdapterShape {
        rank,
        input: I,
        output: O,
    };
    for adapter in [
        Adapter::Lora(Lora::new(
            "m",
            lora::fresh(2, I, O, false, 7, 1).unwrap(),
            2.0,
            mask(0.0),
        )),
        Adapter::Ia3(Ia3::fresh("m", I, O, false).unwrap()),
        Adapter::Ia3(Ia3::fresh("m", I, O, true).unwrap()),
        Adapter::Vera(Vera::new("m", shared, zero, small, I, mask(0.0))),
        Adapter::Loha(Loha::fresh("m", shape(2), 1.0, 7, 1).unwrap()),
        Adapter::Lokr(Lokr::fresh("m", shape(1), -1, true, 1.0, 7, 1).unwrap()),
        Adapter::Lokr(Lokr::fresh("m", shape(8), 2, false, 1.0, 7, 1).unwrap()),
        Adapter::Oft(Oft::fresh("m", I, 4, Cayley::Neumann(5)).unwrap()),
        Adapter::Oft(Oft::fresh("m", I, 4, Cayley::Exact).unwrap()),
        Adapter::Adalora(Adalora::fresh("m", shape(2), 1.0, 7, mask(0.0)).unwrap()),
    ] {
        assert_close(&adapter.forward(&base(), &x, None).unwrap(), &want, 1e-6);
        let moved = adapter.on(&candle_core::Device::Cpu).unwrap();
        assert_eq!(moved.cost(), adapter.cost());
        assert!(adapter.parts().iter().all(|p| p.tensor.dtype() == DType::F32));
    }
}

/// On a GPU activations may be bf16, adapter parameters never are.
#[test]
fn activations_of_another_type_are_scaled_in_f32() {
    let (x, v) = (random((N, I), 30), random(I, 31));
    let x = x.to_dtype(DType::BF16).unwrap();
    let wide = x.to_dtype(DType::F32).unwrap();
    let scaled = adapters::scale_columns(&x, &v).unwrap();
    assert_eq!(scaled.dtype(), DType::BF16);
    let want = adapters::scale_columns(&wide, &v).unwrap();
    assert_close(&scaled.to_dtype(DType::F32).unwrap(), &want, 1.0 / 256.0);
    assert_close(
        &adapters::sum_products(&x, &x).unwrap(),
        &adapters::sum_products(&wide, &wide).unwrap(),
        1e-6,
    );
}

#[test]
fn a_start_becomes_a_plain_pair_of_twice_the_rank() {
    let own = lora(0.0, true);
    let (a, b) = own.plain().unwrap();
    assert_eq!((a.dims(), b.dims()), (&[4, I][..], &[O, 4][..]));
    let plain = Lora::new("m", (a, b), own.scale, own.mask);
    let x = random((N, I), 30);
    let one = Adapter::Lora(own).forward(&base(), &x, None).unwrap();
    let two = Adapter::Lora(plain).forward(&base(), &x, None).unwrap();
    assert_close(&one, &two, 1e-6);
}

/// The numbers are those of `adjust_oft_parameters` of PEFT 0.21.
#[test]
fn blocks_that_do_not_divide_the_inputs_become_the_nearest_that_do() {
    let sizes = [
        (32, 64),
        (32, 4),
        (32, 24),
        (7, 24),
        (5, 24),
        (10, 12),
        (9, 13),
        (16, 40),
    ];
    let fitting = sizes.map(|(block, input)| Oft::fitting(block, input));
    assert_eq!(fitting, [32, 4, 24, 6, 4, 12, 13, 20]);
}
