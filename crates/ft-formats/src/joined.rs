//! Tensors that hold one projection, or several, of all experts of a layer. ft has a parameter for each projection of an
//! expert; the layouts here say where it is in the files of a family.
//!
//! Letters: E experts, P projections in a tensor, R rows (outputs) of a projection, C columns (inputs).

use crate::writer::{TensorPlan, Values, append};
use ft_base::{Error, Result};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Most experts of a layer.
const EXPERTS: usize = 1 << 14;

/// The order of the elements of a joined tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ElementOrder {
    /// `[E, P·R, ..]`: the rows of one projection after those of the other.
    Rows,
    /// `[E, P·R, ..]`: the rows of the projections alternate.
    AlternateRows,
    /// `[E, C, P·R]`: transposed, the columns of one projection after those of the other.
    Columns,
    /// `[E, C, P·R]`: transposed, the columns of the projections alternate.
    AlternateColumns,
}

/// A joined tensor.
#[derive(Debug, PartialEq, Eq)]
struct JoinedTensor {
    /// Name below the layer.
    name: &'static str,
    /// Names of its parts below an expert.
    parts: &'static [&'static str],
    order: ElementOrder,
}

/// Where the weights of experts are in the files of a family.
#[derive(Debug, PartialEq, Eq)]
pub struct JoinedLayout {
    /// Expert 3 is `{experts}.3`, below the layer.
    experts: &'static str,
    tensors: &'static [JoinedTensor],
    /// The family also has files in which each expert has tensors of its own.
    optional: bool,
}

const fn joined(name: &'static str, parts: &'static [&'static str], order: ElementOrder) -> JoinedTensor {
    JoinedTensor { name, parts, order }
}

const GATE_UP: &[&str] = &["gate_proj.weight", "up_proj.weight"];
const DOWN: &[&str] = &["down_proj.weight"];

const GPT_OSS: &[JoinedLayout] = &[JoinedLayout {
    experts: "mlp.experts",
    tensors: &[
        joined("mlp.experts.gate_up_proj", GATE_UP, ElementOrder::AlternateColumns),
        joined(
            "mlp.experts.gate_up_proj_bias",
            &["gate_proj.bias", "up_proj.bias"],
            ElementOrder::AlternateRows,
        ),
        joined("mlp.experts.down_proj", DOWN, ElementOrder::Columns),
        joined("mlp.experts.down_proj_bias", &["down_proj.bias"], ElementOrder::Rows),
        // MXFP4.
        joined(
            "mlp.experts.gate_up_proj_blocks",
            &["gate_proj.weight_blocks", "up_proj.weight_blocks"],
            ElementOrder::AlternateRows,
        ),
        joined(
            "mlp.experts.gate_up_proj_scales",
            &["gate_proj.weight_scales", "up_proj.weight_scales"],
            ElementOrder::AlternateRows,
        ),
        joined(
            "mlp.experts.down_proj_blocks",
            &["down_proj.weight_blocks"],
            ElementOrder::Rows,
        ),
        joined(
            "mlp.experts.down_proj_scales",
            &["down_proj.weight_scales"],
            ElementOrder::Rows,
        ),
    ],
    optional: false,
}];
const GRANITE: &[JoinedLayout] = &[JoinedLayout {
    experts: "block_sparse_moe.experts",
    tensors: &[
        joined("block_sparse_moe.input_linear.weight", GATE_UP, ElementOrder::Rows),
        joined("block_sparse_moe.output_linear.weight", DOWN, ElementOrder::Rows),
    ],
    optional: false,
}];
const QWEN_ROWS: JoinedLayout = JoinedLayout {
    experts: "mlp.experts",
    tensors: &[
        joined("mlp.experts.gate_up_proj", GATE_UP, ElementOrder::Rows),
        joined("mlp.experts.down_proj", DOWN, ElementOrder::Rows),
    ],
    optional: true,
};
const QWEN: &[JoinedLayout] = &[QWEN_ROWS];
/// Published files are transposed, those of transformers 5 are not.
const QWEN_VL: &[JoinedLayout] = &[
    QWEN_ROWS,
    JoinedLayout {
        experts: "mlp.experts",
        tensors: &[
            joined("mlp.experts.gate_up_proj", GATE_UP, ElementOrder::Columns),
            joined("mlp.experts.down_proj", DOWN, ElementOrder::Columns),
        ],
        optional: true,
    },
];

/// The layouts of the family of a config; the first one is the usual one.
fn layouts(config: &Map<String, Value>) -> &'static [JoinedLayout] {
    let inner = config.get("text_config").and_then(|text| text.get("model_type"));
    let types = [inner, config.get("model_type")].into_iter().flatten();
    for model_type in types.filter_map(Value::as_str) {
        let found: &[JoinedLayout] = match model_type {
            "gpt_oss" => GPT_OSS,
            "granitemoe" | "granitemoeshared" => GRANITE,
            "qwen3_5_moe" | "qwen3_5_moe_text" => QWEN,
            "qwen3_vl_moe" | "qwen3_vl_moe_text" => QWEN_VL,
            _ => &[],
        };
        if !found.is_empty() {
            return found;
        }
    }
    &[]
}

/// The layout in which a model with this config is written if there are no files of it.
pub fn usual(config: &Map<String, Value>) -> Option<&'static JoinedLayout> {
    layouts(config).first()
}

/// The layout of files with these tensors; `None`: no tensor is joined.
pub(crate) fn of_files<'a>(
    config: &Map<String, Value>,
    tensors: impl Iterator<Item = (&'a str, &'a [usize])>,
) -> Option<&'static JoinedLayout> {
    let all = layouts(config);
    let first = all.first()?;
    let hidden = config
        .get("text_config")
        .and_then(|text| text.get("hidden_size"))
        .or(config.get("hidden_size"))
        .and_then(Value::as_u64);
    let mut found = None;
    for (name, shape) in tensors {
        let Some((_, at)) = first.tensor(name) else { continue };
        found = Some(first);
        // The inputs of the gate are the hidden states: the shape shows which layout it is.
        let inputs = |layout: &JoinedLayout| layout.tensors[at].place(shape, 0, 0).map(|p| p.shape.last().copied());
        let fits = |layout: &&JoinedLayout| inputs(layout).flatten().map(|n| n as u64) == hidden;
        if at == 0 && all.len() > 1 {
            return all.iter().find(fits).or(found);
        }
    }
    found
}

/// The elements of a part of a joined tensor, relative to its first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinedView {
    /// R.
    pub rows: usize,
    /// C, of all dimensions after the first.
    pub columns: usize,
    /// Elements of the file from a row to the next.
    pub row_stride: usize,
    /// Elements of the file from a column to the next.
    pub column_stride: usize,
    /// The last part that shares its bytes with others.
    pub last: bool,
}

impl JoinedView {
    fn is_contiguous(&self) -> bool {
        self.column_stride == 1 && self.row_stride == self.columns
    }

    /// Elements of the file from the first to the last one.
    pub(crate) fn span(&self) -> usize {
        (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride + 1
    }
}

/// A part of a joined tensor.
struct ExpertPlace {
    shape: Vec<usize>,
    /// Its first element.
    first: usize,
    view: JoinedView,
}

/// A part of a joined tensor under the name of its parameter.
pub(crate) struct ExpertPart {
    /// Name of the parameter, or of a tensor of its quantized data.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its first element in the joined tensor.
    pub first: usize,
    /// `None`: its elements follow each other.
    pub view: Option<JoinedView>,
}

impl JoinedTensor {
    /// The place of a part in a tensor of this shape; `None`: the shape has no such parts.
    fn place(&self, shape: &[usize], expert: usize, part: usize) -> Option<ExpertPlace> {
        let count = self.parts.len();
        let (_, rest) = shape.split_first()?;
        let transposed = matches!(self.order, ElementOrder::Columns | ElementOrder::AlternateColumns);
        let (outputs, tail) = match (transposed, rest) {
            (false, [outputs, tail @ ..]) => (*outputs, tail.to_vec()),
            (true, [columns, outputs]) => (*outputs, vec![*columns]),
            _ => return None,
        };
        // Beside a dimension of zero the others can have any product.
        let columns = tail.iter().try_fold(1usize, |n, size| n.checked_mul(*size))?;
        let rows = outputs / count;
        if rows == 0 || columns == 0 || !outputs.is_multiple_of(count) {
            return None;
        }
        let (inside, row_stride, column_stride) = match self.order {
            ElementOrder::Rows => (part * rows * columns, columns, 1),
            ElementOrder::AlternateRows => (part * columns, count * columns, 1),
            ElementOrder::Columns => (part * rows, 1, outputs),
            ElementOrder::AlternateColumns => (part, count, outputs),
        };
        let mut of_part = vec![rows];
        of_part.extend(tail);
        Some(ExpertPlace {
            shape: of_part,
            first: expert * outputs * columns + inside,
            view: JoinedView {
                rows,
                columns,
                row_stride,
                column_stride,
                last: part + 1 == count,
            },
        })
    }

    /// The shape of the joined tensor of parts of this shape.
    fn shape(&self, experts: usize, part: &[usize]) -> Option<Vec<usize>> {
        let (rows, tail) = part.split_first()?;
        let outputs = rows * self.parts.len();
        match (self.order, tail) {
            (ElementOrder::Rows | ElementOrder::AlternateRows, _) => Some([&[experts, outputs], tail].concat()),
            (_, [columns]) => Some(vec![experts, *columns, outputs]),
            _ => None,
        }
    }
}

/// Cuts `model.layers.3.NAME` into `model.layers.3` and NAME.
fn below_layer(name: &str) -> Option<(&str, &str)> {
    const LAYERS: &str = "model.layers.";
    let dot = name.strip_prefix(LAYERS)?.find('.')? + LAYERS.len();
    Some((&name[..dot], &name[dot + 1..]))
}

impl JoinedLayout {
    /// The layer of a joined tensor, and its index.
    fn tensor<'a>(&self, name: &'a str) -> Option<(&'a str, usize)> {
        let (layer, below) = below_layer(name)?;
        let at = self.tensors.iter().position(|t| t.name == below)?;
        Some((layer, at))
    }

    /// True if the family also has files in which each expert has tensors of its own.
    pub(crate) fn is_optional(&self) -> bool {
        self.optional
    }

    /// True if a tensor of this name is a weight of one expert.
    pub(crate) fn is_of_one_expert(&self, name: &str) -> bool {
        let of_expert = |(_, below): (&str, &str)| {
            let (expert, part) = below.strip_prefix(self.experts)?.strip_prefix('.')?.split_once('.')?;
            Some(expert.parse::<usize>().is_ok() && self.tensors.iter().any(|t| t.parts.contains(&part)))
        };
        below_layer(name).and_then(of_expert).unwrap_or(false)
    }

    /// The parts of the tensor `name` of this shape; `None`: it is not a joined tensor.
    pub(crate) fn parts(&self, name: &str, shape: &[usize]) -> Option<Vec<ExpertPart>> {
        let (layer, at) = self.tensor(name)?;
        let tensor = &self.tensors[at];
        let experts = shape.first().copied().filter(|n| (1..=EXPERTS).contains(n))?;
        let mut out = Vec::with_capacity(experts * tensor.parts.len());
        for expert in 0..experts {
            for (at, part) in tensor.parts.iter().enumerate() {
                let place = tensor.place(shape, expert, at)?;
                out.push(ExpertPart {
                    name: format!("{layer}.{}.{expert}.{part}", self.experts),
                    shape: place.shape,
                    first: place.first,
                    view: (!place.view.is_contiguous()).then_some(place.view),
                });
            }
        }
        Some(out)
    }
}

/// A tensor to write: one parameter, or several that are joined.
#[derive(Debug)]
pub struct OutputTensor {
    /// Name, format and shape in the file.
    pub plan: TensorPlan,
    /// The parameters, by their index.
    parts: Vec<usize>,
    joined: Option<&'static JoinedTensor>,
}

/// Passes the values of one parameter to the sink.
pub type PartFill<'a> = dyn FnMut(&TensorPlan, &mut dyn FnMut(Values) -> Result<()>) -> Result<()> + 'a;

/// The tensors in which these parameters are written in this layout. Quantized weights are not joined.
pub fn outputs(params: &[TensorPlan], layout: Option<&'static JoinedLayout>) -> Vec<OutputTensor> {
    let single = |at: usize| OutputTensor {
        plan: params[at].clone(),
        parts: vec![at],
        joined: None,
    };
    let Some(layout) = layout else {
        return (0..params.len()).map(single).collect();
    };
    let known: BTreeMap<&str, usize> = params.iter().enumerate().map(|(i, p)| (p.name.as_str(), i)).collect();
    let mut done = BTreeSet::new();
    let mut out = Vec::new();
    for at in 0..params.len() {
        if done.contains(&at) {
            continue;
        }
        match begins(layout, params, &known, at) {
            Some(joined) => {
                done.extend(joined.parts.iter().copied());
                out.push(joined);
            }
            None => out.push(single(at)),
        }
    }
    out
}

/// The joined tensor whose first part is parameter `at`.
fn begins(
    layout: &JoinedLayout,
    params: &[TensorPlan],
    known: &BTreeMap<&str, usize>,
    at: usize,
) -> Option<OutputTensor> {
    let first = &params[at];
    let (layer, below) = below_layer(&first.name)?;
    let part = below.strip_prefix(layout.experts)?.strip_prefix(".0.")?;
    // The layout lives as long as the program.
    let tensors: &'static [JoinedTensor] = layout.tensors;
    let joined = tensors.iter().find(|t| t.parts[0] == part)?;
    let find = |expert: usize, part: &str| {
        let found = known.get(format!("{layer}.{}.{expert}.{part}", layout.experts).as_str())?;
        let plan = &params[*found];
        (plan.dtype == first.dtype && plan.shape == first.shape && plan.dtype.is_weight()).then_some(*found)
    };
    let mut parts = Vec::new();
    let mut experts = 0;
    while find(experts, part).is_some() {
        for part in joined.parts {
            parts.push(find(experts, part)?);
        }
        experts += 1;
    }
    // The tensors of the next expert, if there is one: of another type, or its quantized data.
    let next = format!("{layer}.{}.{experts}.{part}", layout.experts);
    let more = known.range(next.as_str()..).next();
    if experts == 0 || more.is_some_and(|(name, _)| name.starts_with(&next)) {
        return None;
    }
    Some(OutputTensor {
        plan: TensorPlan {
            name: format!("{layer}.{}", joined.name),
            dtype: first.dtype,
            shape: joined.shape(experts, &first.shape)?,
        },
        parts,
        joined: Some(joined),
    })
}

impl OutputTensor {
    /// Passes the elements to `sink`. `fill` delivers those of each of `params`; the calls are not in their order.
    ///
    /// # Errors
    /// Those of `fill` and `sink`; a parameter with too few or too many values.
    pub fn write(
        &self,
        params: &[TensorPlan],
        fill: &mut PartFill,
        sink: &mut dyn FnMut(Values) -> Result<()>,
    ) -> Result<()> {
        let Some(joined) = self.joined else {
            return self.parts.iter().try_for_each(|&at| fill(&params[at], sink));
        };
        let size = self.plan.dtype.size();
        let one_expert = self.plan.shape[1..].iter().product::<usize>() * size;
        for parts in self.parts.chunks(joined.parts.len()) {
            let mut block = vec![0u8; one_expert];
            for (part, &at) in parts.iter().enumerate() {
                let plan = &params[at];
                let mut bytes = Vec::with_capacity(one_expert / joined.parts.len());
                fill(plan, &mut |values| append(plan, values, &mut bytes))?;
                let place = joined
                    .place(&self.plan.shape, 0, part)
                    .filter(|p| p.shape == plan.shape && bytes.len() == p.shape.iter().product::<usize>() * size);
                let Some(place) = place else {
                    return Err(
                        Error::internal(format!("tensor `{}` was not written completely", plan.name))
                            .found(format!("{} bytes", bytes.len())),
                    );
                };
                scatter(&bytes, &place, size, &mut block);
            }
            sink(Values::Raw(&block))?;
        }
        Ok(())
    }
}

/// Copies the elements of a part to their places.
fn scatter(part: &[u8], place: &ExpertPlace, size: usize, block: &mut [u8]) {
    let JoinedView {
        columns,
        row_stride,
        column_stride,
        ..
    } = place.view;
    for (row, from) in part.chunks_exact(columns * size).enumerate() {
        let first = place.first + row * row_stride;
        if column_stride == 1 {
            block[first * size..][..from.len()].copy_from_slice(from);
            continue;
        }
        for (column, from) in from.chunks_exact(size).enumerate() {
            block[(first + column * column_stride) * size..][..size].copy_from_slice(from);
        }
    }
}

#[cfg(test)]
mod tests;
