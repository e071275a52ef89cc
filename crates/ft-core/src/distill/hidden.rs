//! Distillation of hidden states: pulls the student's states to those of the teacher through a learned projection,
//! which is dropped after training (as in FitNets, Romero et al. 2015, arXiv 1412.6550, and TinyBERT, Jiao et al. 2020,
//! arXiv 1909.10351).
//!
//! Letters: M trained tokens of a batch, D hidden size of the student, Dt of the teacher. For a pair (s, t), the
//! student's state x `[M, D]` at the input of layer s is projected to y = x·Pᵀ `[M, Dt]`; its loss is the sum over the
//! tokens of mean (y - t)² or 1 - cos(y, t), times weight / pairs. Sums are in f32.

use crate::base::rng::{Rng, Stream};
use crate::base::{Error, Result};
use crate::data::IGNORE;
use crate::model::{ObjectiveNeeds, Param, ParamGradient};
use crate::ops::{linear, update};
use candle_core::{D, DType, Device, Tensor};
use ft_base::named;
use std::collections::BTreeMap;

named!(
    /// The distance between hidden states of student and teacher.
    HiddenLoss {
        /// Mean squared error.
        Mse = "mse",
        /// 1 - cosine similarity.
        Cosine = "cosine",
    }
);

/// One pair of layers, and its projection `[Dt, D]`.
struct LayerPair {
    teacher: usize,
    student: usize,
    projection: Param,
}

/// Compares hidden states of inner layers of the student with those of the teacher, through trained projections.
pub struct HiddenDistance {
    pairs: Vec<LayerPair>,
    /// Student layers, ascending, without duplicates.
    layers: Vec<usize>,
    distance: HiddenLoss,
    weight: f64,
}

/// Result of a comparison.
#[derive(Debug)]
pub struct HiddenComparison {
    /// Sum over the trained tokens.
    pub loss: f64,
    /// `[N, D]`
    pub dx: Option<Tensor>,
    /// The projections and their gradients.
    pub objective_params: Vec<ParamGradient>,
}

/// Pairs for a student of `student` layers and a teacher of `teacher` layers: each inner state of the student with the
/// teacher's state at the same relative depth.
pub fn auto_map(student: usize, teacher: usize) -> Vec<(usize, usize)> {
    let at = |s: usize| (2 * s * teacher + student) / (2 * student.max(1));
    (1..student).map(|s| (s, at(s))).collect()
}

/// Checks the pairs of layers.
///
/// # Errors
/// No pairs, a duplicate, a layer that does not exist.
pub fn check_map(pairs: &[(usize, usize)], student: usize, teacher: usize) -> Result<()> {
    let wrong = |what: String| {
        Err(Error::usage(what)
            .at("hidden::check_map")
            .expected(format!(
                "pairs [student, teacher]: 0 is the embedding's output, l the output of layer l; the student's below \
                 {student}, the teacher's at most {teacher}"
            ))
            .hint("`hidden::auto_map` selects the pairs"))
    };
    if pairs.is_empty() {
        return wrong("no hidden states are compared".into());
    }
    for (i, (s, t)) in pairs.iter().enumerate() {
        if *s >= student || *t > teacher {
            return wrong(format!("the pair [{s}, {t}] has a layer number that does not exist"));
        }
        if pairs[..i].contains(&(*s, *t)) {
            return wrong(format!("the pair [{s}, {t}] is listed twice"));
        }
    }
    Ok(())
}

impl HiddenDistance {
    /// `pairs` (student, teacher) must have passed `check_map`; `sizes` are (D, Dt). Projections are initialized to the
    /// identity, or to normal numbers of variance 1/D if the sizes differ.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn new(
        pairs: &[(usize, usize)],
        d: usize,
        dt: usize,
        distance: HiddenLoss,
        weight: f64,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        let mut made = Vec::new();
        for (s, t) in pairs {
            let rng = Rng::new(seed, Stream::Init, &[0x6469_7374, *s as u64, *t as u64]);
            let std = 1.0 / (d as f32).sqrt();
            let value = |i: usize| {
                if d == dt {
                    f32::from(u8::from(i / d == i % d))
                } else {
                    std * rng.normal(i as u64)
                }
            };
            let values: Vec<f32> = (0..d * dt).map(value).collect();
            made.push(LayerPair {
                teacher: *t,
                student: *s,
                projection: Param {
                    name: format!("objective.projection.{s}.{t}").into(),
                    tensor: Tensor::from_vec(values, (dt, d), &Device::Cpu)?.to_device(device)?,
                },
            });
        }
        let mut layers: Vec<usize> = pairs.iter().map(|(s, _)| *s).collect();
        layers.sort_unstable();
        layers.dedup();
        Ok(Self {
            pairs: made,
            layers,
            distance,
            weight,
        })
    }

    /// Student layers with a comparison, ascending, without duplicates.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// The teacher's layer of each pair.
    pub fn teacher_layers(&self) -> Vec<usize> {
        self.pairs.iter().map(|p| p.teacher).collect()
    }

    /// The trained projections.
    pub fn params(&self) -> Vec<Param> {
        self.pairs.iter().map(|p| p.projection.clone()).collect()
    }

    /// Compares the student's states `x` `[N, D]` at the input of `layer` with the teacher's.
    ///
    /// # Errors
    /// `teacher` has not the states of the layer that is compared; states of another width (`Shape`).
    pub fn compare(
        &self,
        layer: usize,
        x: &Tensor,
        teacher: &BTreeMap<usize, Tensor>,
        targets: &[u32],
        need: ObjectiveNeeds,
    ) -> Result<HiddenComparison> {
        let (n, d) = x.dims2()?;
        let trained: Vec<u32> = (0..n as u32).filter(|i| targets[*i as usize] != IGNORE).collect();
        let mut out = HiddenComparison {
            loss: 0.0,
            dx: None,
            objective_params: Vec::new(),
        };
        let m = trained.len();
        if m == 0 {
            return Ok(out);
        }
        let device = x.device();
        let rows = Tensor::from_vec(trained.clone(), m, device)?;
        let chosen =
            |t: &Tensor| -> Result<Tensor> { Ok(t.index_select(&rows, 0)?.to_dtype(DType::F32)?.contiguous()?) };
        let own = chosen(x)?;
        let share = self.weight / self.pairs.len() as f64;
        let mut dx: Option<Tensor> = None;
        for pair in self.pairs.iter().filter(|p| p.student == layer) {
            let other = teacher.get(&pair.teacher).ok_or_else(|| {
                Error::internal("the teacher's hidden states were not saved").at(format!("layer {}", pair.teacher))
            })?;
            let other = chosen(other)?;
            let y = linear::forward(&own, &pair.projection.tensor, None)?;
            let (loss, dy) = match self.distance {
                HiddenLoss::Mse => squares(&y, &other)?,
                HiddenLoss::Cosine => cosine(&y, &other)?,
            };
            out.loss += share * loss;
            let dy = (dy * (share * need.scale))?.contiguous()?;
            let back = linear::backward_input(&dy, &pair.projection.tensor)?;
            dx = Some(match dx {
                Some(sum) => (sum + back)?,
                None => back,
            });
            let dw = linear::grad_weight(&dy, &own, DType::F32)?;
            out.objective_params.push(ParamGradient {
                param: pair.projection.clone(),
                gradient: dw,
            });
        }
        if let Some(dx) = dx.filter(|_| need.dh) {
            // Tokens that are not trained take the appended row of zeros.
            let rows = Tensor::cat(&[&dx, &update::zeros((1, d), DType::F32, device)?], 0)?;
            let mut from = vec![m as u32; n];
            trained.iter().zip(0..).for_each(|(n, i)| from[*n as usize] = i);
            let from = Tensor::from_vec(from, n, device)?;
            out.dx = Some(rows.index_select(&from, 0)?.to_dtype(x.dtype())?.contiguous()?);
        }
        Ok(out)
    }
}

fn total(rows: &Tensor) -> Result<f64> {
    Ok(update::to_f32_vec(&rows.flatten_all()?)?
        .iter()
        .map(|x| *x as f64)
        .sum())
}

/// Sum over the tokens of mean (y - t)², and its gradient with respect to y.
fn squares(y: &Tensor, t: &Tensor) -> Result<(f64, Tensor)> {
    let width = y.dim(1)? as f64;
    let difference = (y - t)?;
    let loss = total(&difference.sqr()?.sum(D::Minus1)?)? / width;
    Ok((loss, (difference * (2.0 / width))?))
}

/// Sum over the tokens of 1 - cos(y, t), and its gradient with respect to y. The cosine with a zero state is 0.
fn cosine(y: &Tensor, t: &Tensor) -> Result<(f64, Tensor)> {
    let norm =
        |x: &Tensor| -> Result<Tensor> { Ok(x.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.clamp(1e-8f32, f32::MAX)?) };
    let (ny, nt) = (norm(y)?, norm(t)?);
    let (y, t) = (y.broadcast_div(&ny)?, t.broadcast_div(&nt)?);
    let cos = (&y * &t)?.sum_keepdim(D::Minus1)?;
    let loss = total(&(1.0 - &cos)?)?;
    let dy = (y.broadcast_mul(&cos)? - t)?.broadcast_div(&ny)?;
    Ok((loss, dy))
}
