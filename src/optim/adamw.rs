//! AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101, algorithm 2), in the arithmetic of
//! `torch.optim.AdamW`: decoupled decay, bias correction, eps outside the root.

/// The numbers of one step of one parameter.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub lr: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    /// Updates of this parameter, this one included.
    pub step: u64,
    /// Factor of the gradient (clipping).
    pub coefficient: f32,
}

/// `Step` with everything that does not depend on the element worked out.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    keep: f32,
    b1: f32,
    b2: f32,
    step_size: f32,
    correction2_sqrt: f32,
    eps: f32,
    coefficient: f32,
}

impl Step {
    pub fn ready(&self) -> Ready {
        let [b1, b2] = self.betas;
        Ready {
            keep: (1.0 - self.lr * self.weight_decay) as f32,
            b1: b1 as f32,
            b2: b2 as f32,
            step_size: (self.lr / (1.0 - b1.powf(self.step as f64))) as f32,
            correction2_sqrt: (1.0 - b2.powf(self.step as f64)).sqrt() as f32,
            eps: self.eps as f32,
            coefficient: self.coefficient,
        }
    }
}

impl Ready {
    /// New value of one weight; `m` and `v` are updated.
    #[inline(always)]
    pub fn apply(&self, w: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
        let g = g * self.coefficient;
        *m += (g - *m) * (1.0 - self.b1);
        *v = *v * self.b2 + g * g * (1.0 - self.b2);
        let denominator = v.sqrt() / self.correction2_sqrt + self.eps;
        w * self.keep - self.step_size * (*m / denominator)
    }
}
