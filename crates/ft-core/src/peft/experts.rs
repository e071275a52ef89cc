//! LoRA on a parameter that has one matrix for each expert, as PEFT trains it with `target_parameters`: each expert has a
//! pair of its own, and gate and up of an expert are one matrix with one pair: W_e + s · B_e·A_e.
//!
//! In memory the pairs of the experts follow each other, so that the pair of an expert is a view. In a file B is
//! `[O, R·E]`, and column r·E + e belongs to expert e; in gpt-oss the rows of gate and up alternate.
//!
//! Letters: E experts, R rank of an expert, I input features, O output features of the joined matrix.

use super::adapter::{AdapterCost, AdapterMethod, BackwardInput, BackwardOutput, DropoutKey, Param};
use super::frozen::FrozenLinear;
use super::lora::{self, Lora};
use super::small::DropoutMask;
use super::targets::Site;
use crate::base::{Error, Result};
use crate::ops::expert_pairs::JoinedPair;
use crate::ops::update;
use candle_core::{Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// A parameter with the matrices of all experts of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertSite {
    /// Its path, such as `model.layers.0.mlp.experts.gate_up_proj`, and the features of the matrix of one expert.
    pub site: Site,
    /// E
    pub experts: usize,
    /// The projections of an expert that are joined in it, as in `ExpertsSpec::linear_name`.
    pub projections: Range<usize>,
    /// The rows of the projections alternate.
    pub alternate: bool,
}

/// The pairs of all experts of a layer on one parameter.
#[derive(Debug, Clone)]
pub struct ExpertLora {
    /// A of the experts, `[E·R, I]`, f32.
    pub a: Param,
    /// B of the experts, `[E·O, R]`, f32; the rows of gate come before those of up.
    pub b: Param,
    /// E
    pub experts: usize,
    /// s
    pub scale: f32,
    /// In a file the rows of gate and up alternate.
    alternate: bool,
}

/// The parameter that a view with this name (`NAME#ROW`) belongs to, and the first row of the view.
pub fn part_of(name: &str) -> Option<(&str, usize)> {
    let (whole, row) = name.rsplit_once('#')?;
    Some((whole, row.parse().ok()?))
}

impl ExpertLora {
    /// The pairs of `site` with `a` `[E·R, I]` and `b` `[E·O, R]`.
    pub fn new(site: &ExpertSite, (a, b): (Tensor, Tensor), scale: f32) -> Self {
        let module = &site.site.module;
        Self {
            a: Param::new(module, "lora_A.weight", a),
            b: Param::new(module, "lora_B.weight", b),
            experts: site.experts,
            scale,
            alternate: site.alternate,
        }
    }

    /// New pairs of rank `r`: A of all experts is drawn as one matrix, as in PEFT; B is zero.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn fresh(site: &ExpertSite, r: usize, scale: f32, gaussian: bool, seed: u64, index: u64) -> Result<Self> {
        let (input, output) = (site.site.input, site.site.output);
        let (a, _) = lora::fresh(r * site.experts, input, 0, gaussian, seed, index)?;
        if gaussian {
            // The standard deviation is 1 / r, not 1 / (r · E).
            update::scale_assign(&a, site.experts as f32)?;
        }
        let b = Tensor::from_vec(
            vec![0f32; site.experts * output * r],
            (site.experts * output, r),
            &Device::Cpu,
        )?;
        Ok(Self::new(site, (a, b), scale))
    }

    /// As `fresh`, without memory of its own: see `lora::shapes`.
    ///
    /// # Errors
    /// None for these sizes.
    pub fn shapes(site: &ExpertSite, r: usize, scale: f32) -> Result<Self> {
        let (a, _) = lora::shapes(r * site.experts, site.site.input, 0)?;
        let (_, b) = lora::shapes(r, 0, site.experts * site.site.output)?;
        Ok(Self::new(site, (a, b), scale))
    }

    /// As `new`, with B as in a file, `[O, R·E]`.
    ///
    /// # Errors
    /// A matrix with other sizes (`Shape`).
    pub fn of_file(site: &ExpertSite, a: Tensor, b: &Tensor, scale: f32) -> Result<Self> {
        let (outputs, columns) = b.dims2()?;
        let r = columns / site.experts;
        let values = update::to_f32_vec(b)?;
        let mut own = vec![0f32; values.len()];
        for (file, memory) in places(site.experts, outputs, r, site.alternate) {
            own[memory] = values[file];
        }
        let b = Tensor::from_vec(own, (site.experts * outputs, r), &Device::Cpu)?;
        Ok(Self::new(site, (a, b), scale))
    }

    /// B as in a file, `[O, R·E]`.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn b_of_file(&self) -> Result<Tensor> {
        let (rows, r) = self.b.tensor.dims2()?;
        let outputs = rows / self.experts;
        let values = update::to_f32_vec(&self.b.tensor)?;
        let mut own = vec![0f32; values.len()];
        for (file, memory) in places(self.experts, outputs, r, self.alternate) {
            own[file] = values[memory];
        }
        Ok(Tensor::from_vec(own, (outputs, r * self.experts), &Device::Cpu)?)
    }

    /// The matrices, for experts that are computed together.
    pub fn joined(&self) -> JoinedPair<'_> {
        JoinedPair {
            matrices: (&self.a.tensor, &self.b.tensor),
            experts: self.experts,
            scale: self.scale,
        }
    }

    /// R
    pub fn rank(&self) -> usize {
        self.b.tensor.dims().get(1).copied().unwrap_or(0)
    }

    /// The pair of expert `expert` on part `part` of `parts` equal parts of its outputs: views of A `[R, I]` and of B
    /// `[O / parts, R]`. Their names have the first row of each view (`part_of`).
    ///
    /// # Errors
    /// An expert that the layer does not have.
    pub fn part(&self, expert: usize, part: usize, parts: usize) -> Result<Lora> {
        let r = self.rank();
        let outputs = self.b.tensor.dim(0)? / self.experts / parts;
        let (row_a, row_b) = (expert * r, (expert * parts + part) * outputs);
        let name = |of: &Param, row: usize| Arc::from(format!("{}#{row}", of.name));
        Ok(Lora {
            a: self.a.tensor.narrow(0, row_a, r)?,
            b: self.b.tensor.narrow(0, row_b, outputs)?,
            a_name: name(&self.a, row_a),
            b_name: name(&self.b, row_b),
            scale: self.scale,
            mask: DropoutMask::default(),
            start: None,
        })
    }
}

/// The elements of B: index in a file, and in memory.
fn places(experts: usize, outputs: usize, r: usize, alternate: bool) -> impl Iterator<Item = (usize, usize)> {
    let half = outputs / 2;
    (0..experts * outputs * r).map(move |memory| {
        let (row, rank) = (memory / r, memory % r);
        let (expert, output) = (row / outputs, row % outputs);
        let in_file = if alternate {
            2 * (output % half) + output / half
        } else {
            output
        };
        ((in_file * r + rank) * experts + expert, memory)
    })
}

fn no_linear(of: &Param) -> Error {
    Error::internal("an adapter of all experts is used as that of one linear").at(&*of.name)
}

/// The experts of a layer use the views (`ExpertLora::part`). These methods are those of every adapter.
impl AdapterMethod for ExpertLora {
    fn parts(&self) -> Vec<Param> {
        vec![self.a.clone(), self.b.clone()]
    }

    fn forward(&self, _: &dyn FrozenLinear, _: &Tensor, _: Option<DropoutKey>) -> Result<Tensor> {
        Err(no_linear(&self.a))
    }

    fn backward(&self, _: BackwardInput<'_>) -> Result<BackwardOutput> {
        Err(no_linear(&self.a))
    }

    fn merged(&self, _: &Tensor) -> Result<Tensor> {
        Err(no_linear(&self.a))
    }

    fn cost(&self) -> AdapterCost {
        AdapterCost {
            rank: self.rank(),
            ..AdapterCost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(alternate: bool) -> ExpertSite {
        let site = Site {
            module: "m.experts.gate_up_proj".into(),
            input: 3,
            output: 4,
        };
        ExpertSite {
            site,
            experts: 2,
            projections: 0..2,
            alternate,
        }
    }

    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| i as f32).collect()
    }

    /// PEFT: `weight_B.reshape(O, R, E)`, and the delta of expert e is `B[:, :, e] @ A[e]`.
    #[test]
    fn the_columns_of_a_file_belong_to_the_experts_in_turn() {
        let (e, o, r, i) = (2, 4, 3, 3);
        for alternate in [false, true] {
            let b = Tensor::from_vec(numbers(o * r * e), (o, r * e), &Device::Cpu).unwrap();
            let a = Tensor::from_vec(numbers(e * r * i), (e * r, i), &Device::Cpu).unwrap();
            let own = ExpertLora::of_file(&site(alternate), a, &b, 1.0).unwrap();
            assert_eq!(own.rank(), r);
            for expert in 0..e {
                for part in 0..2 {
                    let pair = own.part(expert, part, 2).unwrap();
                    assert_eq!(
                        part_of(&pair.a_name),
                        Some(("m.experts.gate_up_proj.lora_A.weight", expert * r))
                    );
                    let rows = pair.b.to_vec2::<f32>().unwrap();
                    for (row, found) in rows.iter().enumerate() {
                        let in_file = if alternate { 2 * row + part } else { part * 2 + row };
                        let wanted: Vec<f32> = (0..r).map(|k| (in_file * r * e + k * e + expert) as f32).collect();
                        assert_eq!(*found, wanted, "{alternate} {expert} {part} {row}");
                    }
                    let first = pair.a.to_vec2::<f32>().unwrap()[0][0];
                    assert_eq!(first, (expert * r * i) as f32);
                }
            }
            let again = own
                .b_of_file()
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap();
            assert_eq!(again, numbers(o * r * e));
        }
    }

    #[test]
    fn a_new_adapter_has_the_bounds_of_one_expert() {
        let own = ExpertLora::fresh(&site(false), 4, 2.0, false, 7, 1).unwrap();
        assert_eq!((own.a.tensor.dims(), own.b.tensor.dims()), (&[8, 3][..], &[8, 4][..]));
        let a = own.a.tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(a.iter().all(|x| x.abs() <= 1.0 / 3f32.sqrt()) && a.iter().any(|x| x.abs() > 0.4));
        let wide = Site {
            input: 2000,
            ..site(false).site
        };
        let wide = ExpertSite {
            site: wide,
            ..site(false)
        };
        let own = ExpertLora::fresh(&wide, 4, 2.0, true, 7, 1).unwrap();
        let a = own.a.tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let deviation = (a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32).sqrt();
        assert!((deviation - 0.25).abs() < 0.01, "{deviation}");
        assert_eq!(own.cost().rank, 4);
    }
}
