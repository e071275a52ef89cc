//! Tests of `joined`: the parts of joined tensors, read and written back.

use super::*;
use crate::dtype::StoredDtype;
use crate::weights::Weights;
use crate::writer::write_file;
use serde_json::json;

/// E, R and C.
const SIZES: (usize, usize, usize) = (3, 70, 5);

fn plan(name: &str, dtype: StoredDtype, shape: &[usize]) -> TensorPlan {
    TensorPlan {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
    }
}

fn directory(config: Value, tensors: &[TensorPlan]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write_file(&dir.path().join("model.safetensors"), tensors, &[], |plan, sink| {
        let bytes = plan.bytes().unwrap() as usize;
        match plan.dtype {
            StoredDtype::F32 => sink(Values::F32(&(0..bytes / 4).map(|i| i as f32).collect::<Vec<_>>())),
            _ => sink(Values::Raw(&(0..bytes).map(|i| (i % 251) as u8).collect::<Vec<_>>())),
        }
    })
    .unwrap();
    dir
}

/// The model type, the shape of gate and up together, and the place of element (e, p, r, c) in it.
type Case = (&'static str, [usize; 3], fn([usize; 4]) -> usize);

const CASES: [Case; 4] = [
    ("gpt_oss", [SIZES.0, SIZES.2, 2 * SIZES.1], |[e, p, r, c]| {
        (e * SIZES.2 + c) * 2 * SIZES.1 + 2 * r + p
    }),
    ("granitemoe", [SIZES.0, 2 * SIZES.1, SIZES.2], |[e, p, r, c]| {
        ((e * 2 + p) * SIZES.1 + r) * SIZES.2 + c
    }),
    ("qwen3_5_moe_text", [SIZES.0, 2 * SIZES.1, SIZES.2], |[e, p, r, c]| {
        ((e * 2 + p) * SIZES.1 + r) * SIZES.2 + c
    }),
    // As published.
    ("qwen3_vl_moe_text", [SIZES.0, SIZES.2, 2 * SIZES.1], |[e, p, r, c]| {
        (e * SIZES.2 + c) * 2 * SIZES.1 + p * SIZES.1 + r
    }),
];

fn names(model_type: &str) -> (&'static str, &'static str) {
    match model_type {
        "granitemoe" => ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts"),
        _ => ("mlp.experts.gate_up_proj", "mlp.experts"),
    }
}

#[test]
fn each_projection_is_read_and_written_back() {
    let (experts, rows, columns) = SIZES;
    for (model_type, shape, place) in CASES {
        let (stored, below) = names(model_type);
        let config = json!({"model_type": model_type, "hidden_size": columns});
        let tensors = [
            plan("model.layers.2.input_layernorm.weight", StoredDtype::F32, &[columns]),
            plan(&format!("model.layers.2.{stored}"), StoredDtype::F32, &shape),
        ];
        let dir = directory(config.clone(), &tensors);
        for weights in [
            Weights::open(dir.path()).unwrap(),
            Weights::open(dir.path()).unwrap().streamed(),
        ] {
            assert_eq!(weights.len(), 1 + 2 * experts, "{model_type}");
            let mut params = vec![tensors[0].clone()];
            for e in 0..experts {
                for (p, projection) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                    let name = format!("model.layers.2.{below}.{e}.{projection}.weight");
                    let wanted: Vec<f32> = (0..rows * columns)
                        .map(|i| place([e, p, i / columns, i % columns]) as f32)
                        .collect();
                    weights.require(&name, &[rows, columns]).unwrap();
                    assert_eq!(weights.read_f32(&name).unwrap(), wanted, "{model_type} {name}");
                    for (first, count) in [
                        (0, 1),
                        (3, 9),
                        (columns, 2 * columns),
                        (rows * columns - 2, 2),
                        (7, 200),
                    ] {
                        let mut got = vec![f32::NAN; count];
                        weights.read_f32_at(&name, first, &mut got).unwrap();
                        assert_eq!(got, wanted[first..first + count], "{model_type} {name} {first}");
                    }
                    params.push(plan(&name, StoredDtype::F32, &[rows, columns]));
                }
            }
            let raw = config.as_object().unwrap();
            let outputs = outputs(&params, weights.experts_layout(raw));
            let plans: Vec<TensorPlan> = outputs.iter().map(|o| o.plan.clone()).collect();
            assert_eq!(plans, tensors, "{model_type}");
            let copy = dir.path().join("copy.safetensors");
            let mut next = outputs.iter();
            write_file(&copy, &plans, &[], |_, sink| {
                let fill = &mut |plan: &TensorPlan, sink: &mut dyn FnMut(Values) -> Result<()>| {
                    let values = weights.read_f32(&plan.name)?;
                    // In pieces.
                    values.chunks(33).try_for_each(|piece| sink(Values::F32(piece)))
                };
                next.next().unwrap().write(&params, fill, sink)
            })
            .unwrap();
            let whole = |path: &std::path::Path| std::fs::read(path).unwrap();
            assert_eq!(
                whole(&copy),
                whole(&dir.path().join("model.safetensors")),
                "{model_type}"
            );
        }
    }
}

#[test]
fn blocks_scales_and_biases_of_gpt_oss() {
    let config = json!({"model_type": "gpt_oss", "hidden_size": 64});
    let at = |name: &str| format!("model.layers.0.mlp.experts.{name}");
    let dir = directory(
        config,
        &[
            plan(&at("gate_up_proj_blocks"), StoredDtype::U8, &[2, 6, 2, 16]),
            plan(&at("gate_up_proj_scales"), StoredDtype::U8, &[2, 6, 2]),
            plan(&at("gate_up_proj_bias"), StoredDtype::F32, &[2, 6]),
            plan(&at("down_proj_bias"), StoredDtype::F32, &[2, 64]),
        ],
    );
    let weights = Weights::open(dir.path()).unwrap();
    assert_eq!(weights.read_f32(&at("1.gate_proj.bias")).unwrap(), [6.0, 8.0, 10.0]);
    assert_eq!(weights.read_f32(&at("1.up_proj.bias")).unwrap(), [7.0, 9.0, 11.0]);
    assert_eq!(weights.read_f32(&at("1.down_proj.bias")).unwrap()[0], 64.0);
    let scales = weights.read_bytes(&at("0.up_proj.weight_scales")).unwrap();
    assert_eq!(scales, [2, 3, 6, 7, 10, 11]);
    let info = weights.info(&at("1.up_proj.weight_blocks")).unwrap();
    assert_eq!(info.shape, [3, 2, 16]);
    let blocks = weights.read_bytes(&at("1.up_proj.weight_blocks")).unwrap();
    let wanted: Vec<u8> = (0..96)
        .map(|i| ((192 + (i / 32) * 64 + 32 + i % 32) % 251) as u8)
        .collect();
    assert_eq!(blocks, wanted);
}

#[test]
fn shapes_without_parts_stay_as_they_are() {
    let config = json!({"model_type": "gpt_oss", "hidden_size": 4});
    for shape in [&[2, 3][..], &[2, 4, 5], &[0, 4, 6], &[1 << 20, 0, 2], &[6]] {
        let name = "model.layers.0.mlp.experts.gate_up_proj";
        let dir = directory(config.clone(), &[plan(name, StoredDtype::F32, shape)]);
        assert_eq!(Weights::open(dir.path()).unwrap().info(name).unwrap().shape, shape);
    }
    // The product of the last sizes does not fit into 64 bits.
    let (name, shape) = (
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        [1, 0, 1 << 40, 1 << 40],
    );
    let dir = directory(config, &[plan(name, StoredDtype::U8, &shape)]);
    assert_eq!(Weights::open(dir.path()).unwrap().info(name).unwrap().shape, shape);
}

/// A family that has both kinds of files keeps that of the base; an expert that is quantized is not joined.
#[test]
fn what_is_not_joined() {
    let config = json!({"model_type": "qwen3_5_moe_text", "hidden_size": 4});
    let raw = config.as_object().unwrap();
    let one = |e: usize, p: &str| format!("model.layers.0.mlp.experts.{e}.{p}.weight");
    let all = |count: usize| -> Vec<TensorPlan> {
        let each = |e| ["gate_proj", "up_proj", "down_proj"].map(|p| plan(&one(e, p), StoredDtype::F32, &[4, 4]));
        (0..count).flat_map(each).collect()
    };
    let dir = directory(config.clone(), &all(2));
    let weights = Weights::open(dir.path()).unwrap();
    assert_eq!(weights.experts_layout(raw), None);
    let layout = usual(raw);
    assert_eq!(outputs(&all(2), None).len(), 6);
    assert_eq!(outputs(&all(2), layout).len(), 2);
    let mut some = all(2);
    some[4].dtype = StoredDtype::U8;
    assert_eq!(outputs(&some, layout).len(), 5);
    // The next expert is quantized, in tensors of ft: the first one stays alone.
    let mut mixed = all(3);
    for p in &mut mixed {
        if p.name.contains(".1.") {
            p.name.push_str(".codes");
        }
    }
    assert_eq!(outputs(&mixed, layout).len(), 9);
    assert_eq!(usual(json!({"model_type": "llama"}).as_object().unwrap()), None);
    let inner = json!({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}});
    assert_eq!(usual(inner.as_object().unwrap()), layout);
}
