//! Compares a disk source with a resident source of the same weights, and checks the files that training writes.

use super::*;
use crate::formats::writer::write_model;
use crate::ops::{master, update};
use crate::source::{ParamElements, ResidentWeights, Sublayer};
use half::bf16;
use tempfile::TempDir;

const V: usize = 2 * PIECE + 100;
const D: usize = 8;
const LAYERS: usize = 5;
const SEED: (u64, f32, f32) = (7, 0.5, 1.0);

fn params(tied: bool) -> Vec<ParamInfo> {
    let param = |name: String, shape: &[usize], group| ParamInfo {
        name: name.into(),
        shape: shape.to_vec(),
        group,
        sublayer: Sublayer::Other,
    };
    let mut all = vec![param("embed".into(), &[V, D], Group::Embedding)];
    for l in 0..LAYERS {
        for (below, shape) in [("a.weight", &[D, 3 * D][..]), ("a.bias", &[D]), ("norm.weight", &[D])] {
            all.push(param(format!("model.layers.{l}.{below}"), shape, Group::Layer(l)));
        }
    }
    all.push(param("norm.weight".into(), &[D], Group::Head));
    if !tied {
        all.push(param("head".into(), &[V, D], Group::Head));
    }
    all
}

type Low = BTreeMap<String, Tensor>;

fn open(dir: &Path, dtype: Dtype, tied: bool, head_rows: Option<usize>) -> Result<DiskWeights> {
    let file = dir.join("model.safetensors");
    if !file.exists() {
        write_random(&file, &params(tied), SEED.0, SEED.1, SEED.2, dtype)?;
    }
    let options = DiskOptions {
        dtype,
        storage: StoragePolicy::dense(dtype),
        device: Device::Cpu,
        trained: dir.join("trained"),
        codes: dir.join("codes.safetensors"),
        head: if tied { "embed" } else { "head" }.into(),
        head_rows,
    };
    DiskWeights::open(params(tied), Weights::open_file(&file)?, options)
}

fn resident(dtype: Dtype, tied: bool) -> ResidentWeights {
    ResidentWeights::random(params(tied), SEED.0, SEED.1, SEED.2, dtype, &Device::Cpu).unwrap()
}

fn flat(t: &Tensor) -> Vec<f32> {
    update::to_f32_vec(t).unwrap()
}

fn assert_group(a: &GroupWeights, b: &GroupWeights) {
    let names = |g: &GroupWeights| g.iter().map(|(n, _)| n.to_string()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b));
    for name in names(a) {
        assert_eq!(flat(&a.get(&name).unwrap().1), flat(&b.get(&name).unwrap().1), "{name}");
    }
}

#[test]
fn every_group_row_and_piece_is_that_of_resident_weights() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for (tied, rows) in [
            (false, None),
            (false, Some(PIECE)),
            (true, Some(2 * PIECE)),
            (true, None),
        ] {
            let dir = TempDir::new().unwrap();
            let (disk, here) = (open(dir.path(), dtype, tied, rows).unwrap(), resident(dtype, tied));
            for _ in 0..2 {
                for l in (0..LAYERS).chain((0..LAYERS).rev()) {
                    disk.prefetch(Group::Layer((l + 1) % LAYERS));
                    let group = Group::Layer(l);
                    assert_group(&disk.fetch(group).unwrap(), &here.fetch(group).unwrap());
                }
            }
            let ids = [5, 0, V as u32 - 1, 5, 4096];
            let (table, at) = disk.rows("embed", &ids).unwrap();
            let (whole, _) = here.rows("embed", &ids).unwrap();
            for (id, at) in ids.iter().zip(&at) {
                let row = |t: &Tensor, i: u32| flat(&t.narrow(0, i as usize, 1).unwrap());
                assert_eq!(row(&table, *at), row(&whole, *id));
            }
            let embedding_is_whole = tied && rows.is_none();
            assert_eq!(table.dims()[0] == V, embedding_is_whole);
            assert!(embedding_is_whole || disk.rows("embed", &[V as u32]).is_err());
            let head = if tied { "embed" } else { "head" };
            assert_eq!(disk.streamed(head).map(|m| m.piece_rows()), rows);
            if let Some(rows) = rows {
                let (whole, streamed) = (here.in_memory(head).unwrap(), disk.streamed(head).unwrap());
                for first in (0..V).step_by(rows).chain((0..V).step_by(rows)) {
                    let count = rows.min(V - first);
                    let want = flat(&whole.narrow(0, first, count).unwrap());
                    assert_eq!(flat(&streamed.piece(first).unwrap().get(head).unwrap().1), want);
                }
            } else {
                assert_eq!(
                    flat(&disk.in_memory(head).unwrap()),
                    flat(&here.in_memory(head).unwrap())
                );
            }
            // Two layers, two pieces and the parameters in memory: nothing more was allocated.
            let size = dtype.bytes() as usize;
            let layer = (D * 3 * D + 2 * D) * size;
            let head = rows.map_or(V * D, |rows| 2 * rows.min(V) * D) * size;
            assert_eq!(disk.resident_bytes(), (2 * layer + head + D * size) as u64);
        }
    }
}

/// All elements of a parameter, exactly.
fn exact(source: &dyn TrainableStore, name: &str) -> Vec<u32> {
    let mut all = Vec::new();
    source
        .read(name, &mut |numbers| {
            match numbers {
                ParamElements::F32(v) => all.extend(v.iter().map(|x| x.to_bits())),
                ParamElements::Bf16(v, None) => all.extend(v.iter().map(|x| x.to_f32().to_bits())),
                ParamElements::Bf16(v, Some(low)) => {
                    all.extend(v.iter().zip(low).map(|(h, l)| master::join(*h, *l as u16).to_bits()))
                }
                ParamElements::F16(v, None) => all.extend(v.iter().map(|x| x.to_f32().to_bits())),
                ParamElements::F16(v, Some(low)) => all.extend(
                    v.iter()
                        .zip(low)
                        .map(|(h, l)| master::join_f16(*h, *l as u16).to_bits()),
                ),
            }
            Ok(())
        })
        .unwrap();
    all
}

#[test]
fn what_was_trained_is_kept_exactly_and_used_from_then_on() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let dir = TempDir::new().unwrap();
        let disk = open(dir.path(), dtype, false, Some(PIECE)).unwrap();
        let mut low = Low::new();
        let name = "model.layers.2.a.weight";
        let group = Group::Layer(2);
        disk.prefetch(group);
        disk.activate(&[name, "norm.weight", "an.adapter.lora_A.weight"], &mut low)
            .unwrap();
        assert!(low.is_empty(), "nothing was trained yet");
        assert!(disk.master_in_optimizer(name) && !disk.master_in_optimizer("model.layers.2.a.bias"));
        let before = exact(&disk, "model.layers.2.a.bias");

        // An update with values that bf16 cannot represent.
        let count = D * 3 * D;
        let values: Vec<f32> = (0..count).map(|i| 1.0 + i as f32 * 1e-4).collect();
        let tensor = disk.in_memory(name).unwrap();
        let fetched = disk.fetch(group).unwrap();
        let want = match dtype {
            Dtype::F32 => {
                update::with_slice_mut(&tensor, |w| w.copy_from_slice(&values)).unwrap();
                values.clone()
            }
            Dtype::Bf16 => {
                let (high, halves): (Vec<bf16>, Vec<i16>) = values
                    .iter()
                    .map(|x| master::split(*x))
                    .map(|(h, l)| (h, l as i16))
                    .unzip();
                update::store_bf16(&tensor, |w| w.copy_from_slice(&high)).unwrap();
                low.put_low(name, Tensor::from_vec(halves, count, &Device::Cpu).unwrap());
                high.iter().map(|h| h.to_f32()).collect()
            }
            Dtype::F16 => {
                let half = Tensor::zeros(count, DType::I16, &Device::Cpu).unwrap();
                crate::ops::step::split(&values, &tensor, &half).unwrap();
                low.put_low(name, half);
                values.iter().map(|x| master::split_f16(*x).0.to_f32()).collect()
            }
        };
        let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
        assert_eq!(
            flat(&fetched.get(name).unwrap().1),
            want,
            "an update is seen by who holds the group"
        );
        drop(fetched);

        disk.deactivate(&|n| n == "norm.weight", &mut low).unwrap();
        assert!(low.is_empty() && disk.in_memory(name).is_none() && disk.in_memory("norm.weight").is_some());
        assert_eq!(exact(&disk, name), bits);
        assert_eq!(flat(&disk.fetch(group).unwrap().get(name).unwrap().1), want);
        assert_eq!(exact(&disk, "model.layers.2.a.bias"), before);

        disk.activate(&[name], &mut low).unwrap();
        assert_eq!(flat(&disk.in_memory(name).unwrap()), want);
        assert_eq!(low.contains_key(name), dtype.is_short());
        disk.deactivate(&|_| false, &mut low).unwrap();
        assert_eq!(exact(&disk, name), bits, "nothing is lost by doing nothing");
        assert!(disk.in_memory("norm.weight").is_some() && !disk.master_in_optimizer("norm.weight"));
    }
}

#[test]
fn a_held_matrix_stays_in_memory() {
    for tied in [false, true] {
        let dir = TempDir::new().unwrap();
        let (disk, here) = (
            open(dir.path(), Dtype::F32, tied, Some(PIECE)).unwrap(),
            resident(Dtype::F32, tied),
        );
        let head = if tied { "embed" } else { "head" };
        let before = disk.resident_bytes();
        assert!(disk.in_memory("embed").is_none() && disk.streamed(head).is_some());
        disk.streamed(head).unwrap().piece(0).unwrap();
        let names: &[&str] = if tied { &["embed"] } else { &["embed", "head"] };
        for &name in names {
            let held = disk.hold(name).unwrap();
            assert_eq!(flat(&held), flat(&here.in_memory(name).unwrap()));
            // The caller changes a row: every reader sees it.
            update::set(&held.narrow(0, 3, 1).unwrap(), &[7.0; D]).unwrap();
            assert_eq!(flat(&disk.in_memory(name).unwrap())[3 * D], 7.0);
        }
        assert!(disk.streamed(head).is_none());
        let (table, at) = disk.rows("embed", &[3]).unwrap();
        assert_eq!(flat(&table.narrow(0, at[0] as usize, 1).unwrap()), [7.0; D]);
        assert!(disk.resident_bytes() >= before + (names.len() * V * D * 4) as u64);
        // A switch of blocks leaves it there.
        let mut low = Low::new();
        disk.activate(&["model.layers.1.a.weight"], &mut low).unwrap();
        disk.deactivate(&|_| false, &mut low).unwrap();
        assert_eq!(flat(&disk.in_memory("embed").unwrap())[3 * D], 7.0);
        assert!(disk.hold("nothing").is_err());
    }
}

#[test]
fn exact_values_are_taken_from_a_checkpoint() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let dir = TempDir::new().unwrap();
        let disk = open(dir.path(), dtype, true, Some(PIECE)).unwrap();
        let names = ["embed", "norm.weight", "model.layers.4.a.weight"];
        let plans: Vec<TensorPlan> = params(true)
            .iter()
            .filter(|p| names.contains(&&*p.name))
            .map(|p| TensorPlan {
                name: p.name.to_string(),
                dtype: StoredDtype::F32,
                shape: vec![p.elements()],
            })
            .collect();
        let values = |n: usize| (0..n).map(|i| 0.3 + i as f32 * 1.7e-5).collect::<Vec<f32>>();
        let saved = dir.path().join("saved");
        std::fs::create_dir(&saved).unwrap();
        write_model(&saved, &plans, 1 << 30, |plan, sink| {
            sink(Values::F32(&values(plan.shape[0])))
        })
        .unwrap();
        let saved = Weights::open(&saved).unwrap();
        let mut low = Low::new();
        disk.prefetch(Group::Layer(4));
        for plan in &plans {
            disk.restore(&plan.name, &saved, &mut low).unwrap();
            let bits: Vec<u32> = values(plan.shape[0]).iter().map(|x| x.to_bits()).collect();
            assert!(exact(&disk, &plan.name) == bits, "{}", plan.name);
        }
        let high = |x: f32| match dtype {
            Dtype::F32 => x,
            Dtype::Bf16 => master::split(x).0.to_f32(),
            Dtype::F16 => master::split_f16(x).0.to_f32(),
        };
        let piece = disk.streamed("embed").unwrap().piece(PIECE).unwrap();
        let want = high(values(PIECE * D + 1)[PIECE * D]);
        assert_eq!(flat(&piece.get("embed").unwrap().1)[0], want);
        assert_eq!(flat(&disk.in_memory("norm.weight").unwrap())[3], high(values(4)[3]));
        assert!(disk.restore("model.layers.0.a.bias", &saved, &mut low).is_err());
    }
}

#[test]
fn what_is_wrong_is_told() {
    let dir = TempDir::new().unwrap();
    assert!(open(dir.path(), Dtype::F32, false, Some(100)).is_err());
    let disk = open(dir.path(), Dtype::F32, false, None).unwrap();
    assert!(disk.fetch(Group::Layer(LAYERS)).is_err());
    assert!(disk.streamed("head").is_none());
    assert!(disk.rows("nothing", &[0]).is_err());
    disk.prefetch(Group::Layer(LAYERS));
    // After the file is truncated, `fetch` returns the reader's error.
    let file = dir.path().join("model.safetensors");
    let size = std::fs::metadata(&file).unwrap().len();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(size / 4)
        .unwrap();
    disk.prefetch(Group::Layer(4));
    let e = disk.fetch(Group::Layer(4)).unwrap_err().to_string();
    assert!(e.contains("model.layers.4") && e.contains("shorter"), "{e}");
}

/// A file with quantized projections, in either layout: nothing is quantized again, and LoftQ can replace the data.
#[test]
fn weights_that_are_quantized_in_the_files_come_as_they_are() {
    for layout in [stored::QuantizedLayout::Bitsandbytes, stored::QuantizedLayout::Ft] {
        let format = match layout {
            stored::QuantizedLayout::Bitsandbytes => Format::Nf4 { double: true },
            _ => Format::Int4 { group: 64 },
        };
        let dir = TempDir::new().unwrap();
        let all = params(true);
        let plain = resident(Dtype::Bf16, true);
        let is_coded = |p: &ParamInfo| crate::source::policy::is_projection(p);
        let quantized = |p: &ParamInfo| {
            let (_, values) = plain.fetch(p.group).unwrap().get(&p.name).unwrap();
            quantize(&flat(&values), p, format, Dtype::Bf16).unwrap()
        };
        let mut plans = Vec::new();
        let mut data: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for p in &all {
            if is_coded(p) {
                let codes = quantized(p);
                for plan in stored::tensors(layout, format, &p.name, codes.dims()) {
                    data.insert(
                        plan.name.clone(),
                        stored::bytes(layout, &codes, &p.name, &plan).unwrap(),
                    );
                    plans.push(plan);
                }
            } else {
                let (_, values) = plain.fetch(p.group).unwrap().get(&p.name).unwrap();
                let bytes = flat(&values)
                    .iter()
                    .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
                    .collect();
                data.insert(p.name.to_string(), bytes);
                plans.push(TensorPlan {
                    name: p.name.to_string(),
                    dtype: StoredDtype::Bf16,
                    shape: p.shape.clone(),
                });
            }
        }
        let file = dir.path().join("model.safetensors");
        write_file(&file, &plans, &[], |plan, sink| sink(Values::Raw(&data[&plan.name]))).unwrap();
        let disk = open(dir.path(), Dtype::Bf16, true, Some(PIECE)).unwrap();
        assert!(!dir.path().join("codes.safetensors").exists());
        for _ in 0..2 {
            for p in all.iter().filter(|p| is_coded(p)) {
                let (_, weight) = disk.fetch(p.group).unwrap().weight(&p.name).unwrap();
                assert_eq!(weight.format(), Some(format));
                assert_eq!(weight.rows(0, D).unwrap(), quantized(p).dequantize(), "{}", p.name);
            }
        }
        // New data for one weight; the others stay.
        let [first, second] = [&all[1], &all[4]];
        assert!(is_coded(first) && is_coded(second));
        let values: Vec<f32> = (0..first.elements()).map(|i| i as f32 / 50.0).collect();
        disk.requantize(&first.name, &values).unwrap();
        let rows = |p: &ParamInfo| {
            let (_, weight) = disk.fetch(p.group).unwrap().weight(&p.name).unwrap();
            weight.rows(0, D).unwrap()
        };
        let want = quantize(&values, first, format, Dtype::Bf16).unwrap().dequantize();
        assert_eq!(rows(first), want);
        assert_eq!(rows(second), quantized(second).dequantize());
        assert!(disk.requantize("norm.weight", &[0.0; D]).is_err());
    }
}

/// Requantization does not touch the exact values, which an export and LoftQ itself read.
#[test]
fn requantized_weights_keep_their_exact_values_in_the_checkpoint() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("model.safetensors");
    write_random(&file, &params(true), SEED.0, SEED.1, SEED.2, Dtype::Bf16).unwrap();
    let mut storage = StoragePolicy::dense(Dtype::Bf16);
    let name: Arc<str> = "model.layers.1.a.weight".into();
    storage.set(name.clone(), Some(Format::Int8 { group: 0 }));
    let options = DiskOptions {
        dtype: Dtype::Bf16,
        storage,
        device: Device::Cpu,
        trained: dir.path().join("trained"),
        codes: dir.path().join("codes.safetensors"),
        head: "embed".into(),
        head_rows: None,
    };
    let disk = DiskWeights::open(params(true), Weights::open_file(&file).unwrap(), options).unwrap();
    let read = || {
        let mut all = Vec::new();
        disk.read(&name, &mut |numbers| {
            if let ParamElements::Bf16(values, low) = numbers {
                assert!(low.is_none());
                all.extend(values.iter().map(|x| x.to_f32()));
            }
            Ok(())
        })
        .unwrap();
        all
    };
    let before = read();
    assert_eq!(before.len(), 3 * D * D);
    disk.requantize(&name, &vec![0.5; before.len()]).unwrap();
    let (_, weight) = disk.fetch(Group::Layer(1)).unwrap().weight(&name).unwrap();
    assert!(weight.rows(0, D).unwrap().iter().all(|x| (x - 0.5).abs() < 1e-2));
    assert_eq!(read(), before);
}

const EXPERTS: usize = 6;

/// Two layers, with six experts each.
fn mixture() -> Vec<ParamInfo> {
    let mut all = params(false);
    all.retain(|p| !matches!(p.group, Group::Layer(l) if l > 1));
    for l in 0..2 {
        for (e, below) in (0..EXPERTS).flat_map(|e| [(e, "up"), (e, "down")]) {
            all.push(ParamInfo {
                name: format!("model.layers.{l}.mlp.experts.{e}.{below}.weight").into(),
                shape: vec![D, 64],
                group: Group::Layer(l),
                sublayer: Sublayer::Mlp,
            });
        }
    }
    all
}

/// Visits experts as a pass does: the routed ones, in order.
fn visit(disk: &dyn TrainableStore, here: &ResidentWeights, layer: usize, experts: &[usize]) {
    let whole = here.fetch(Group::Layer(layer)).unwrap();
    disk.expect_experts(layer, experts);
    let dense = disk.fetch_dense(layer).unwrap();
    assert!(dense.iter().count() == 3 && dense.iter().all(|(name, _)| crate::source::expert_of(name).is_none()));
    for &e in experts {
        let expert = disk.fetch_expert(layer, e).unwrap();
        assert_eq!(expert.iter().count(), 2, "expert {e} alone");
        for (name, weight) in expert.iter() {
            assert_eq!(crate::source::expert_of(name), Some(e));
            assert_eq!(
                weight.rows(0, D).unwrap(),
                whole.weight(name).unwrap().1.rows(0, D).unwrap(),
                "{name}"
            );
        }
    }
}

#[test]
fn experts_are_read_alone_in_two_slots_and_counted() {
    // Codes are made of the exact values: a bf16 file would round them first.
    for (format, dtype) in [(None, Dtype::Bf16), (Some(Format::Nf4 { double: true }), Dtype::F32)] {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("model.safetensors");
        write_random(&file, &mixture(), SEED.0, SEED.1, SEED.2, dtype).unwrap();
        let mut storage = StoragePolicy::dense(dtype);
        for p in mixture().iter().filter(|p| p.expert().is_some()) {
            storage.set(p.name.clone(), format);
        }
        let options = DiskOptions {
            dtype,
            storage: storage.clone(),
            device: Device::Cpu,
            trained: dir.path().join("trained"),
            codes: dir.path().join("codes.safetensors"),
            head: "head".into(),
            head_rows: None,
        };
        let disk = DiskWeights::open(mixture(), Weights::open_file(&file).unwrap(), options).unwrap();
        let here =
            ResidentWeights::random_stored(mixture(), SEED.0, SEED.1, SEED.2, |p| storage.of(p), &Device::Cpu).unwrap();
        for layer in [0, 1, 1, 0] {
            visit(&disk, &here, layer, &[1, 2, 5]);
        }
        let one: u64 = (storage.of(&mixture()[7]).bytes(&[D, 64])) * 2;
        // The last two of a layer are still there when it is visited again at once.
        let reads = disk.expert_reads().unwrap();
        assert_eq!(reads.of, 4 * EXPERTS as u64);
        assert!((11..=12).contains(&reads.brought), "{reads:?}");
        if format.is_none() {
            assert_eq!(reads.bytes, reads.brought * one);
            let size = dtype.bytes() as usize;
            let dense = (D * 3 * D + 2 * D) * size;
            assert_eq!(
                disk.resident_bytes(),
                (2 * dense + V * D * size + D * size) as u64 + 2 * one
            );
        }
        assert_eq!(disk.expert_reads().unwrap().of, 0);
        // An expert that trains is in memory; a layer as a whole has all of them.
        let name = "model.layers.1.mlp.experts.2.up.weight";
        let mut low = Low::default();
        disk.activate(&[name], &mut low).unwrap();
        assert!(disk.in_memory(name).is_some());
        let trained = disk.in_memory(name).unwrap();
        update::set(&trained, &vec![0.5; D * 64]).unwrap();
        let expert = disk.fetch_expert(1, 2).unwrap();
        assert_eq!(flat(&expert.get(name).unwrap().1), vec![0.5; D * 64]);
        let whole = disk.fetch(Group::Layer(1)).unwrap();
        assert_eq!(whole.iter().count(), 3 + 2 * EXPERTS);
        assert_eq!(flat(&whole.get(name).unwrap().1), vec![0.5; D * 64]);
        assert!(disk.fetch_expert(1, EXPERTS).is_err());
    }
}
