//! Which elements of a weight share a scale: all, a row, a group of columns, or a block.

use super::settings::QuantizationSettings;
use crate::base::{Error, Result};
use crate::formats::StoredDtype;
use crate::formats::weights::{TensorInfo, Weights};
use crate::ops::quantized::ScaleType;

/// How the scales of a tensor are spread over its weight.
pub(super) struct ScaleGrid {
    pub scale: ScaleType,
    /// Columns that share a scale; 0: a whole row.
    pub group: usize,
    /// Rows that share a scale.
    rows: usize,
    /// Scales of a row of the grid.
    width: usize,
    /// Number of scales.
    pub len: usize,
}

impl ScaleGrid {
    /// The scale of a group of a row.
    pub(super) fn at(&self, row: usize, group: usize) -> usize {
        row / self.rows * self.width + group.min(self.width - 1)
    }
}

/// For errors.
pub(super) fn expected_grids((rows, columns): (usize, usize)) -> String {
    format!(
        "one scale, [{rows}, 1], [{rows}, groups] or a block grid of `quantization_config`, for [{rows}, {columns}]"
    )
}

/// `None`: the shape fits no grid.
pub(super) fn grid_of(
    shape: &[usize],
    (rows, columns): (usize, usize),
    block: Option<(usize, usize)>,
    scale: ScaleType,
) -> Option<ScaleGrid> {
    let grid = |group: usize, rows: usize, width: usize| {
        let len = shape.iter().product();
        Some(ScaleGrid {
            scale,
            group,
            rows: rows.max(1),
            width,
            len,
        })
    };
    let blocks = |(height, width): (usize, usize)| [rows.div_ceil(height), columns.div_ceil(width)];
    match (shape, block) {
        (_, Some(block)) if shape == blocks(block) => {
            grid(if block.1 < columns { block.1 } else { 0 }, block.0, shape[1])
        }
        ([] | [1] | [1, 1], _) => grid(0, rows, 1),
        (&[n] | &[n, 1], _) if n == rows => grid(0, 1, 1),
        (&[n, groups], _) if n == rows && groups > 0 && columns.is_multiple_of(groups) => {
            grid(columns / groups, 1, groups)
        }
        _ => None,
    }
}

/// The type of scales; `None`: one that ft does not read.
pub(super) fn scale_type(info: &TensorInfo) -> Option<ScaleType> {
    match info.dtype {
        StoredDtype::F32 => Some(ScaleType::F32),
        StoredDtype::F16 => Some(ScaleType::F16),
        StoredDtype::Bf16 => Some(ScaleType::Bf16),
        StoredDtype::F8E8M0 | StoredDtype::U8 => Some(ScaleType::E8m0),
        _ => None,
    }
}

/// The error for scales of another type.
pub(super) fn wrong_scale(weights: &Weights, info: &TensorInfo) -> Error {
    Error::unsupported(format!("the scales `{}` have a type that ft does not read", info.name))
        .at_path(&weights.files()[info.file])
        .found(info.dtype)
        .expected("F32, F16, BF16, F8_E8M0 or U8 (exponents)")
}

/// The tensor of this name.
pub(super) fn present<'a>(weights: &'a Weights, name: &str) -> Result<&'a TensorInfo> {
    weights.info(name).ok_or_else(|| {
        let error = Error::format(format!("tensor `{name}` of a quantized weight is missing"));
        let file = weights.files().first();
        file.map_or(Error::format(error.what()), |file| {
            Error::format(error.what()).at_path(file)
        })
        .hint("the file is not complete: download it again, or give the unquantized model")
    })
}

/// The grid of the scales `name` of the weight `info`.
pub(super) fn grid(
    weights: &Weights,
    info: &TensorInfo,
    name: &str,
    settings: &QuantizationSettings,
) -> Result<ScaleGrid> {
    let scales = present(weights, name)?;
    let scale = scale_type(scales).ok_or_else(|| wrong_scale(weights, scales))?;
    let &[rows, columns] = info.shape.as_slice() else {
        return Err(Error::shape("a quantized weight is not a matrix")
            .at(&*info.name)
            .found(format!("{:?}", info.shape)));
    };
    grid_of(&scales.shape, (rows, columns), settings.block(), scale).ok_or_else(|| {
        Error::shape(format!("`{name}` does not fit its quantized weight"))
            .at_path(&weights.files()[scales.file])
            .found(format!("{:?}", scales.shape))
            .expected(expected_grids((rows, columns)))
    })
}
