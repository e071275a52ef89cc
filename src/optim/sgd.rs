//! SGD with momentum, in the arithmetic of `torch.optim.SGD`: decay added to the gradient, no dampening.

#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub lr: f32,
    pub momentum: f32,
    pub weight_decay: f32,
    /// The first update starts the buffer with the gradient itself.
    pub first: bool,
    pub coefficient: f32,
}

impl Step {
    /// New value of one weight; `buffer` is updated where there is momentum.
    #[inline(always)]
    pub fn apply(&self, w: f32, g: f32, buffer: Option<&mut f32>) -> f32 {
        let g = g * self.coefficient + self.weight_decay * w;
        let direction = match buffer {
            Some(b) => {
                *b = if self.first { g } else { self.momentum * *b + g };
                *b
            }
            None => g,
        };
        w - self.lr * direction
    }
}
