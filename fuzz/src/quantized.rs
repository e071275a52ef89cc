//! A model whose weights are in the layouts of several tools. The input is its `config.json`, which says how they are read.

use super::{dir, said};
use ft::formats::writer::{TensorPlan, Values, write_file};
use ft::formats::{StoredDtype, Weights};
use ft::source::{Group, ParamInfo, Sublayer, stored};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub(super) const ROWS: usize = 32;
pub(super) const COLUMNS: usize = 64;
/// Groups of columns.
const GROUPS: usize = 2;

/// The weights, without `.weight`; the numbers are bits.
const NAMES: [&str; 12] = [
    "gptq2", "gptq3", "gptq4", "gptq8", "awq", "packed4", "packed8", "int8", "block", "tensor", "integers", "nf4",
];

/// The tensors of all weights.
pub(super) fn tensors() -> Vec<(TensorPlan, Vec<u8>)> {
    use StoredDtype::{Bf16, F8E4M3, F16, F32, I8, I32, I64, U8};
    // The numbers 0.1 and 1.
    const F16_SCALE: [u8; 2] = [0x66, 0x2e];
    const BF16_SCALE: [u8; 2] = [0xcd, 0x3d];
    const F8_ONE: [u8; 1] = [0x38];
    let mut all = Vec::new();
    // A tensor of these bytes, again and again.
    let mut add = |name: String, dtype: StoredDtype, shape: &[usize], bytes: &[u8]| {
        let plan = TensorPlan {
            name,
            dtype,
            shape: shape.to_vec(),
        };
        let size = plan.bytes().unwrap() as usize;
        let bytes: Vec<u8> = bytes.iter().copied().cycle().take(size).collect();
        all.push((plan, bytes));
    };
    let codes: Vec<u8> = (0..251).map(|n| (n * 37 % 251) as u8).collect();
    let columns: Vec<u8> = (0..COLUMNS)
        .flat_map(|column| ((column * GROUPS / COLUMNS) as i32).to_le_bytes())
        .collect();
    let sides: Vec<u8> = [ROWS, COLUMNS].iter().flat_map(|n| (*n as i64).to_le_bytes()).collect();
    let scale = 0.1f32.to_le_bytes();
    for bits in [2, 3, 4, 8] {
        let part = |suffix: &str| format!("gptq{bits}.{suffix}");
        add(part("qweight"), I32, &[COLUMNS * bits / 32, ROWS], &codes);
        add(part("qzeros"), I32, &[GROUPS, ROWS * bits / 32], &codes);
        add(part("scales"), F16, &[GROUPS, ROWS], &F16_SCALE);
        add(part("g_idx"), I32, &[COLUMNS], &columns);
    }
    add("awq.qweight".into(), I32, &[COLUMNS, ROWS / 8], &codes);
    add("awq.qzeros".into(), I32, &[GROUPS, ROWS / 8], &codes);
    add("awq.scales".into(), F16, &[GROUPS, ROWS], &F16_SCALE);
    for bits in [4, 8] {
        let part = |suffix: &str| format!("packed{bits}.weight_{suffix}");
        add(part("packed"), I32, &[ROWS, COLUMNS * bits / 32], &codes);
        add(part("scale"), Bf16, &[ROWS, GROUPS], &BF16_SCALE);
        add(part("shape"), I64, &[2], &sides);
    }
    add("int8.weight".into(), I8, &[ROWS, COLUMNS], &codes);
    add("int8.SCB".into(), F32, &[ROWS], &scale);
    add("block.weight".into(), F8E4M3, &[ROWS, COLUMNS], &F8_ONE);
    add("block.weight_scale_inv".into(), F32, &[1, GROUPS], &scale);
    add("tensor.weight".into(), F8E4M3, &[ROWS, COLUMNS], &F8_ONE);
    add("tensor.weight_scale".into(), F32, &[1], &scale);
    add("integers.weight".into(), I8, &[ROWS, COLUMNS], &codes);
    add("integers.weight_scale".into(), Bf16, &[ROWS, 1], &BF16_SCALE);
    let state = format!(
        "{{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"float32\", \"shape\": [{ROWS}, {COLUMNS}]}}"
    );
    add("nf4.weight".into(), U8, &[ROWS * COLUMNS / 2, 1], &codes);
    add("nf4.weight.absmax".into(), F32, &[ROWS * COLUMNS / 64], &scale);
    add(
        "nf4.weight.quant_state.bitsandbytes__nf4".into(),
        U8,
        &[state.len()],
        state.as_bytes(),
    );
    all
}

/// The directory of the model; its weights are written once.
fn model() -> &'static Path {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    MODEL.get_or_init(|| {
        let to = dir().join("quantized");
        fs::create_dir_all(&to).unwrap();
        let tensors = tensors();
        let plans: Vec<TensorPlan> = tensors.iter().map(|(plan, _)| plan.clone()).collect();
        let mut data = tensors.iter();
        write_file(&to.join("model.safetensors"), &plans, &[], |_, put| {
            put(Values::Raw(&data.next().unwrap().1))
        })
        .unwrap();
        to
    })
}

pub fn target(bytes: &[u8]) {
    read(bytes);
}

/// The weights that can be read with this `config.json`.
pub fn read(bytes: &[u8]) -> Vec<&'static str> {
    fs::write(model().join("config.json"), bytes).unwrap();
    let Ok(config) = serde_json::from_slice::<Value>(bytes) else {
        return Vec::new();
    };
    let inner = config
        .get("text_config")
        .and_then(|inner| inner.get("quantization_config"));
    // The settings are checked before the weights are opened.
    let checked = |settings: &Value| said(stored::check_config(settings, "config.json")).is_some();
    if !config.get("quantization_config").or(inner).is_some_and(checked) {
        return Vec::new();
    }
    let Some(weights) = said(Weights::open(model())) else {
        return Vec::new();
    };
    let is_read = |name: &&str| {
        let param = ParamInfo {
            name: format!("{name}.weight").into(),
            shape: vec![ROWS, COLUMNS],
            group: Group::Layer(0),
            sublayer: Sublayer::Mlp,
        };
        if let Some(Some((layout, format))) = said(stored::find(&weights, &param.name)) {
            let parts = stored::names(&weights, layout, format, &param.name, (ROWS, COLUMNS));
            assert!(!parts.is_empty(), "{name}");
        }
        let Some(Some(values)) = said(stored::values(&weights, &param)) else {
            return false;
        };
        assert_eq!(values.len(), param.elements(), "{name}");
        true
    };
    NAMES.into_iter().filter(is_read).collect()
}
