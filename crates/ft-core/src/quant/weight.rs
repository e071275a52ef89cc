//! A weight of a linear layer, dense or quantized, and its products.

use super::device::DeviceQMatrix;
use super::format::Format;
use super::qmatrix::QMatrix;
use crate::base::{Error, Result};
use crate::ops::Dtype;
use crate::ops::grouped::GroupWeight;
use crate::ops::low_rank::{self, BaseWeight, LowRank};
use crate::ops::quantized::Products;
use crate::ops::{linear, quantized, update};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// The weight `[O, I]` of a linear layer, or another parameter (then always dense). Cloning shares the storage.
#[derive(Debug, Clone)]
pub enum Weight {
    /// A plain tensor; may be trained.
    Dense(Tensor),
    /// Quantized, on the CPU.
    Quantized(Arc<QMatrix>),
    /// Quantized, on a GPU.
    DeviceQuantized(Arc<DeviceQMatrix>),
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Weight::Dense(tensor)
    }
}

impl From<DeviceQMatrix> for Weight {
    fn from(placed: DeviceQMatrix) -> Self {
        Weight::DeviceQuantized(Arc::new(placed))
    }
}

impl From<Arc<QMatrix>> for Weight {
    fn from(quantized: Arc<QMatrix>) -> Self {
        Weight::Quantized(quantized)
    }
}

impl From<QMatrix> for Weight {
    fn from(quantized: QMatrix) -> Self {
        Weight::Quantized(Arc::new(quantized))
    }
}

impl Weight {
    /// Returns the quantized weight on the device of its products: unchanged on the CPU, else a copy on `device`.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn quantized_on(quantized: QMatrix, device: &Device) -> Result<Self> {
        if device.is_cpu() {
            Ok(quantized.into())
        } else {
            Ok(quantized.to_device(device)?.into())
        }
    }

    /// Returns the weight with other products, if it is quantized and on a GPU.
    pub fn with_products(self, products: Products) -> Self {
        match self {
            Weight::DeviceQuantized(placed) if products != Products::Dequantized => {
                placed.with_products(products).into()
            }
            _ => self,
        }
    }

    /// Returns the format of a quantized weight.
    pub fn format(&self) -> Option<Format> {
        match self {
            Weight::Dense(_) => None,
            Weight::Quantized(quantized) => Some(quantized.format()),
            Weight::DeviceQuantized(placed) => Some(placed.format()),
        }
    }

    /// True if products with a few rows may round them: `QMatrix::with_rounded_rows`, on the CPU.
    pub fn rounds_rows(&self) -> bool {
        matches!(self, Weight::Quantized(quantized) if quantized.rounds_rows())
    }

    /// Returns the tensor of a dense weight.
    ///
    /// # Errors
    /// A quantized weight, which cannot be trained, changed or written in this form.
    pub fn dense(&self) -> Result<&Tensor> {
        match (self, self.format()) {
            (Weight::Dense(tensor), _) => Ok(tensor),
            (_, format) => Err(Error::unsupported("this weight is frozen and quantized")
                .found(format.map(|f| f.to_string()).unwrap_or_default())
                .expected("a dense weight: only dense weights can be trained")),
        }
    }

    /// The weight as operand of a grouped product; `None` if it is quantized and on the CPU.
    pub fn grouped(&self) -> Option<GroupWeight<'_>> {
        match self {
            Weight::Dense(tensor) => Some(tensor.into()),
            Weight::Quantized(_) => None,
            Weight::DeviceQuantized(placed) => Some(placed.codes().into()),
        }
    }

    /// The shape: `[O, I]` for a linear.
    pub fn dims(&self) -> Vec<usize> {
        match self {
            Weight::Dense(tensor) => tensor.dims().to_vec(),
            Weight::Quantized(quantized) => vec![quantized.dims().0, quantized.dims().1],
            Weight::DeviceQuantized(placed) => vec![placed.dims().0, placed.dims().1],
        }
    }

    /// Returns rows `first..first + n` in f32, `[n, I]`.
    ///
    /// # Errors
    /// The rows are outside of the weight (`Shape`).
    pub fn rows(&self, first: usize, n: usize) -> Result<Vec<f32>> {
        match self {
            Weight::Dense(tensor) => update::to_f32_vec(&tensor.narrow(0, first, n)?),
            Weight::Quantized(quantized) => {
                let mut values = vec![0f32; n * quantized.dims().1];
                for (row, to) in values.chunks_exact_mut(quantized.dims().1.max(1)).enumerate() {
                    quantized.dequantize_row(first + row, to);
                }
                Ok(values)
            }
            Weight::DeviceQuantized(placed) => placed.codes().rows(first, n),
        }
    }

    /// The type in which the model with this weight computes: f16, else `product_type`.
    pub fn model_type(&self) -> DType {
        match self {
            Weight::Dense(tensor) if tensor.dtype() == DType::F16 => DType::F16,
            Weight::DeviceQuantized(placed) if placed.codes().dequantized_dtype == Dtype::F16 => DType::F16,
            _ => self.product_type(),
        }
    }

    /// True if the model with this weight computes in bf16.
    pub fn is_bf16(&self) -> bool {
        match self {
            Weight::Dense(tensor) => tensor.dtype() == DType::BF16,
            Weight::Quantized(quantized) => quantized.dequantized_dtype() == Dtype::Bf16,
            Weight::DeviceQuantized(placed) => placed.codes().dequantized_dtype == Dtype::Bf16,
        }
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Weight::Dense(tensor) => (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64,
            Weight::Quantized(quantized) => quantized.bytes(),
            Weight::DeviceQuantized(placed) => placed.bytes(),
        }
    }

    /// Computes `x·Wᵀ + bias`, `[N, O]` f32, from `x [N, I]` f32 and `bias [O]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Weight::Dense(tensor) => linear::forward(x, tensor, bias),
            Weight::Quantized(quantized) => forward(x, quantized, bias),
            Weight::DeviceQuantized(placed) => placed.codes().forward(x, bias),
        }
    }

    /// Computes `y [N, O] += x·Wᵀ` from `x [N, I]`. `y` must not share storage with `x`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn forward_add(&self, y: &Tensor, x: &Tensor) -> Result<()> {
        match self {
            Weight::Dense(tensor) => linear::forward_add(y, x, tensor),
            Weight::Quantized(quantized) => forward_add(y, x, quantized),
            Weight::DeviceQuantized(placed) => placed.codes().forward_add(y, x),
        }
    }

    /// Computes `dx = dy·W`, `[N, I]` f32, from `dy [N, O]` f32.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn backward_input(&self, dy: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Dense(tensor) => linear::backward_input(dy, tensor),
            Weight::Quantized(quantized) => backward_input(dy, quantized),
            Weight::DeviceQuantized(placed) => placed.codes().backward_input(dy),
        }
    }

    /// Computes `dx [N, I] += dy·W` from `dy [N, O]`. `dx` must not share storage with `dy`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn backward_input_add(&self, dx: &Tensor, dy: &Tensor) -> Result<()> {
        match self {
            Weight::Dense(tensor) => linear::backward_input_add(dx, dy, tensor),
            Weight::Quantized(quantized) => backward_input_add(dx, dy, quantized),
            Weight::DeviceQuantized(placed) => placed.codes().backward_input_add(dx, dy),
        }
    }

    /// Returns the base weight for a fused LoRA product, which exists on the CPU only.
    fn base(&self) -> Option<BaseWeight<'_>> {
        match self {
            Weight::Dense(tensor) => tensor.device().is_cpu().then_some(BaseWeight::Dense(tensor)),
            Weight::Quantized(quantized) => Some(BaseWeight::Quantized(quantized.view())),
            Weight::DeviceQuantized(_) => None,
        }
    }

    /// As `forward`, with a LoRA pair: `[N, O]`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn forward_with(&self, x: &Tensor, bias: Option<&Tensor>, low: LowRank<'_>) -> Result<Tensor> {
        if let Some(base) = self.base() {
            return Ok(low_rank::forward(x, base, bias, low)?.0);
        }
        // Both products write one buffer. Their order does not change the rounding: cuBLAS rounds a product to bf16
        // before it adds it to a bf16 result.
        let y = linear::forward(&low.down(x)?, low.b, bias)?;
        self.forward_add(&y, x)?;
        Ok(y)
    }

    /// Computes `dy·W` plus the gradient through the LoRA pair, `[N, I]`, added to `sum` if given, and `∂u` of the
    /// pair, `[N, R]`. `sum` must not share storage with `dy`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn backward_with(&self, dy: &Tensor, sum: Option<&Tensor>, low: LowRank<'_>) -> Result<(Tensor, Tensor)> {
        if let Some(base) = self.base() {
            return low_rank::backward(dy, base, sum, low);
        }
        let du = low.up_backward(dy)?;
        let dx = match sum {
            Some(sum) => {
                low.down_backward_add(sum, &du)?;
                sum.clone()
            }
            None => linear::backward_input(&du, low.a)?,
        };
        self.backward_input_add(&dx, dy)?;
        Ok((dx, du))
    }

    /// Computes `dW = dyᵀ·x`, `[O, I]` f32, from `dy [N, O]` and `x [N, I]`; for a quantized weight the gradient of its
    /// dequantized values.
    ///
    /// # Errors
    /// Tensors whose shapes do not fit.
    pub fn grad(&self, dy: &Tensor, x: &Tensor) -> Result<Tensor> {
        linear::grad_weight(dy, x, self.product_type())
    }

    /// The type to which products may round their operands.
    fn product_type(&self) -> DType {
        if self.is_bf16() { DType::BF16 } else { DType::F32 }
    }

    /// Computes `sum [O, I] += dyᵀ·x` from `dy [N, O]` and `x [N, I]`; otherwise as `grad`.
    ///
    /// # Errors
    /// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
    pub fn grad_add(&self, sum: &Tensor, dy: &Tensor, x: &Tensor) -> Result<()> {
        linear::grad_weight_add(sum, dy, x, self.product_type())
    }
}

/// Computes `x·wᵀ + bias`, `[N, O]` f32, from `x [N, I]` f32, `w [O, I]`, `bias [O]` f32 or bf16. W is dequantized
/// while it is packed: no full dequantized copy exists.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward(x: &Tensor, w: &QMatrix, bias: Option<&Tensor>) -> Result<Tensor> {
    quantized::forward(x, w.view(), bias)
}

/// Computes `y [N, O] += x·wᵀ` from `x [N, I]`, both f32. `y` must not share storage with `x`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn forward_add(y: &Tensor, x: &Tensor, w: &QMatrix) -> Result<()> {
    quantized::forward_add(y, x, w.view())
}

/// Computes `dx = dy·w`, `[N, I]` f32, from `dy [N, O]` f32 and `w [O, I]`, with the same dequantized values as
/// `forward`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_input(dy: &Tensor, w: &QMatrix) -> Result<Tensor> {
    quantized::backward_input(dy, w.view())
}

/// Computes `dx [N, I] += dy·w` from `dy [N, O]`. `dx` must not share storage with `dy`.
///
/// # Errors
/// Tensors of other shapes, types or devices than described (`Shape`); not enough memory on the device.
pub fn backward_input_add(dx: &Tensor, dy: &Tensor, w: &QMatrix) -> Result<()> {
    quantized::backward_input_add(dx, dy, w.view())
}
