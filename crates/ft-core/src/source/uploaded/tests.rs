//! Compares uploaded weights with resident ones; the host acts as the device.

use super::*;
use crate::ops::Dtype;
use crate::ops::master;
use crate::source::{ParamElements, ResidentWeights, SLOTS};

const V: usize = 11;
const D: usize = 4;
const LAYERS: usize = 5;

fn params() -> Vec<ParamInfo> {
    let param = |name: String, shape: &[usize], group| ParamInfo {
        name: name.into(),
        shape: shape.to_vec(),
        group,
        sublayer: crate::source::Sublayer::Other,
    };
    let mut all = vec![param("embed".into(), &[V, D], Group::Embedding)];
    for l in 0..LAYERS {
        all.push(param(
            format!("model.layers.{l}.a.weight"),
            &[D, 2 * D],
            Group::Layer(l),
        ));
        all.push(param(format!("model.layers.{l}.norm.weight"), &[D], Group::Layer(l)));
    }
    all.push(param("norm.weight".into(), &[D], Group::Head));
    all.push(param("head".into(), &[V, D], Group::Head));
    all
}

fn resident(dtype: Dtype) -> ResidentWeights {
    ResidentWeights::random(params(), 7, 0.5, 1.0, dtype, &Device::Cpu).unwrap()
}

fn uploaded(dtype: Dtype) -> UploadedWeights {
    UploadedWeights::new(Arc::new(resident(dtype)), "head", HostMemory::Stable, &Device::Cpu).unwrap()
}

fn flat(t: &Tensor) -> Vec<f32> {
    update::to_f32_vec(t).unwrap()
}

type Low = BTreeMap<String, Tensor>;

#[test]
fn groups_and_rows_are_those_of_the_host() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (there, here) = (uploaded(dtype), resident(dtype));
        for l in (0..LAYERS).chain((0..LAYERS).rev()) {
            there.prefetch(Group::Layer((l + 1) % LAYERS));
            let (a, b) = (
                there.fetch(Group::Layer(l)).unwrap(),
                here.fetch(Group::Layer(l)).unwrap(),
            );
            assert_eq!(a.iter().count(), 2);
            for (name, weight) in b.iter() {
                assert_eq!(flat(&a.get(name).unwrap().1), flat(weight.dense().unwrap()), "{name}");
            }
            assert!(lock(&there.slots).len() <= SLOTS + 1);
        }
        let (table, at) = there.rows("embed", &[5, 0, 5, V as u32 - 1]).unwrap();
        assert_eq!((table.dims()[0], &at[..]), (3, &[1, 0, 1, 2][..]));
        let whole = flat(&here.in_memory("embed").unwrap());
        assert_eq!(flat(&table)[D..2 * D], whole[5 * D..6 * D]);
        assert!(there.rows("embed", &[V as u32]).is_err());
        // The head stays on the device, layers do not.
        assert!(there.in_memory("head").is_some() && there.in_memory("model.layers.1.a.weight").is_none());
        assert_eq!(
            flat(&there.in_memory("head").unwrap()),
            flat(&here.in_memory("head").unwrap())
        );
        // A held matrix does from then on, with the changes that are made to it.
        update::set(&there.hold("embed").unwrap().narrow(0, 5, 1).unwrap(), &[7.0; D]).unwrap();
        let (table, at) = there.rows("embed", &[0, 5]).unwrap();
        assert_eq!((table.dims()[0], &at[..]), (V, &[0, 5][..]));
        assert_eq!(flat(&there.hold("embed").unwrap())[5 * D..6 * D], [7.0; D]);
        let fetched = there.fetch(Group::Embedding).unwrap();
        assert_eq!(flat(&fetched.get("embed").unwrap().1)[5 * D..6 * D], [7.0; D]);
    }
}

#[test]
fn what_was_asked_for_waits_until_it_is_fetched() {
    let there = uploaded(Dtype::F32);
    let waits = |l| lock(&there.slots).has(LayerPart::Dense(l));
    let fetch = |l| {
        assert!(waits(l), "layer {l} would be sent twice");
        drop(there.fetch(Group::Layer(l)).unwrap());
        assert!(lock(&there.slots).len() <= SLOTS);
    };
    // Forward and backward of a micro-batch, twice.
    there.prefetch(Group::Layer(0));
    for _ in 0..2 {
        for l in 0..LAYERS {
            if l + 1 < LAYERS {
                there.prefetch(Group::Layer(l + 1));
            }
            fetch(l);
        }
        for l in (0..LAYERS).rev() {
            there.prefetch(Group::Layer(l.saturating_sub(1)));
            fetch(l);
        }
    }
}

#[test]
fn what_was_trained_goes_home_exactly() {
    const NAME: &str = "model.layers.2.a.weight";
    let exact: Vec<f32> = (0..D * 2 * D).map(|i| 0.1 + i as f32 * 1.000_123e-3).collect();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let (there, mut low) = (uploaded(dtype), Low::default());
        let before = flat(&there.fetch(Group::Layer(2)).unwrap().get(NAME).unwrap().1);
        there.activate(&[NAME], &mut low).unwrap();
        let held = there.in_memory(NAME).unwrap();
        assert_eq!(flat(&held), before);
        assert!(there.master_in_optimizer(NAME) && !there.master_in_optimizer("head"));
        // The fetched layer uses the tensor that is trained.
        match dtype {
            Dtype::F32 => update::with_slice_mut(&held, |w| w.copy_from_slice(&exact)).unwrap(),
            Dtype::Bf16 | Dtype::F16 => {
                let half = Tensor::zeros(exact.len(), DType::I16, &Device::Cpu).unwrap();
                crate::ops::step::split(&exact, &held, &half).unwrap();
                low.put_low(NAME, half);
            }
        }
        let seen = flat(&there.fetch(Group::Layer(2)).unwrap().get(NAME).unwrap().1);
        assert_eq!(seen, flat(&held));
        there.deactivate(&|_| false, &mut low).unwrap();
        assert!(low.is_empty() && there.in_memory(NAME).is_none());
        assert_eq!(flat(&there.fetch(Group::Layer(2)).unwrap().get(NAME).unwrap().1), seen);
        let mut read = Vec::new();
        there
            .read(NAME, &mut |numbers| {
                match numbers {
                    ParamElements::F32(x) => read.extend_from_slice(x),
                    ParamElements::Bf16(h, Some(l)) => {
                        read.extend(h.iter().zip(l).map(|(h, l)| master::join(*h, *l as u16)))
                    }
                    ParamElements::F16(h, Some(l)) => {
                        read.extend(h.iter().zip(l).map(|(h, l)| master::join_f16(*h, *l as u16)));
                    }
                    ParamElements::Bf16(..) | ParamElements::F16(..) => panic!("the lower half is lost"),
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(read, exact);
        // Activation returns it with the low bits of its master.
        there.activate(&[NAME], &mut low).unwrap();
        assert_eq!(flat(&there.in_memory(NAME).unwrap()), seen);
        assert_eq!(low.contains_key(NAME), dtype.is_short());
    }
}

#[test]
fn codes_travel_as_they_are() {
    use crate::quant::{Format, StorageDtype};
    const NAME: &str = "model.layers.1.a.weight";
    for format in [
        Format::Int8 { group: 0 },
        Format::Int4 { group: 64 },
        Format::Nf4 { double: true },
    ] {
        let storage = move |p: &ParamInfo| match &*p.name {
            NAME => StorageDtype::Quantized(format, Dtype::F32),
            _ => StorageDtype::Dense(Dtype::F32),
        };
        let make = || {
            let host = ResidentWeights::random_stored(params(), 7, 0.5, 1.0, storage, &Device::Cpu).unwrap();
            let originals = resident(Dtype::F32);
            host.with_originals(move |p, _| Ok(originals.in_memory(&p.name).unwrap()))
        };
        let here = make();
        let there = UploadedWeights::new(
            Arc::new(make().with_quantized_tensors().unwrap()),
            "head",
            HostMemory::Stable,
            &Device::Cpu,
        )
        .unwrap();
        let rows = |s: &dyn WeightSource| {
            let (_, weight) = s.fetch(Group::Layer(1)).unwrap().weight(NAME).unwrap();
            assert_eq!(weight.format(), Some(format));
            weight.rows(0, D).unwrap()
        };
        assert_eq!(rows(&here), rows(&there));
        // After training, the new values are quantized again.
        let (mut a, mut b) = (Low::default(), Low::default());
        for (s, low) in [(&here as &dyn TrainableStore, &mut a), (&there, &mut b)] {
            s.activate(&[NAME], low).unwrap();
            let held = s.in_memory(NAME).unwrap();
            update::with_slice_mut(&held, |w| w.iter_mut().for_each(|x| *x *= 1.5)).unwrap();
            assert_eq!(s.deactivate(&|_| false, low).unwrap().len(), 1);
        }
        assert_eq!(rows(&here), rows(&there));
    }
}

/// A host source that records its requests.
struct RecordingSource(ResidentWeights, Arc<Mutex<Vec<(bool, usize)>>>);

impl WeightSource for RecordingSource {
    fn fetch(&self, group: Group) -> Result<Arc<GroupWeights>> {
        if let Group::Layer(l) = group {
            lock(&self.1).push((true, l));
        }
        self.0.fetch(group)
    }

    fn prefetch(&self, group: Group) {
        if let Group::Layer(l) = group {
            lock(&self.1).push((false, l));
        }
    }

    fn params(&self) -> &[ParamInfo] {
        self.0.params()
    }

    fn resident_bytes(&self) -> u64 {
        self.0.resident_bytes()
    }

    fn in_memory(&self, name: &str) -> Option<Tensor> {
        self.0.in_memory(name)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<(Tensor, Vec<u32>)> {
        self.0.rows(name, ids)
    }

    fn streamed(&self, name: &str) -> Option<Box<dyn StreamedMatrix + '_>> {
        self.0.streamed(name)
    }
}

impl TrainableStore for RecordingSource {
    fn activate(&self, names: &[&str], low: &mut dyn MasterLowBits) -> Result<()> {
        self.0.activate(names, low)
    }

    fn deactivate(&self, keep: &dyn Fn(&str) -> bool, low: &mut dyn MasterLowBits) -> Result<Vec<RequantizedWeight>> {
        self.0.deactivate(keep, low)
    }

    fn master_in_optimizer(&self, name: &str) -> bool {
        self.0.master_in_optimizer(name)
    }

    fn read(&self, name: &str, sink: &mut NumbersSink) -> Result<()> {
        self.0.read(name, sink)
    }

    fn restore(&self, name: &str, saved: &Weights, low: &mut dyn MasterLowBits) -> Result<()> {
        self.0.restore(name, saved, low)
    }

    fn requantize(&self, _: &str, _: &[f32]) -> Result<()> {
        Ok(())
    }

    fn upload_times(&self) -> Result<Option<CopyTimes>> {
        Ok(None)
    }
}

/// Forward through all layers, and backward down to the layer `lowest`.
fn up_and_down(source: &dyn WeightSource, lowest: usize) {
    source.prefetch(Group::Layer(0));
    for l in 0..LAYERS {
        if l + 1 < LAYERS {
            source.prefetch(Group::Layer(l + 1));
        }
        drop(source.fetch(Group::Layer(l)).unwrap());
    }
    for l in (lowest..LAYERS).rev() {
        source.prefetch(Group::Layer(if l > lowest { l - 1 } else { 0 }));
        drop(source.fetch(Group::Layer(l)).unwrap());
    }
}

#[test]
fn the_source_behind_reads_each_layer_ahead_and_none_for_nothing() {
    for lowest in [0, 2] {
        let asked: Arc<Mutex<Vec<(bool, usize)>>> = Arc::default();
        let watched = RecordingSource(resident(Dtype::F32), asked.clone());
        let there = UploadedWeights::new(Arc::new(watched), "head", HostMemory::Temporary, &Device::Cpu).unwrap();
        for _ in 0..2 {
            up_and_down(&there, lowest);
        }
        lock(&asked).clear();
        up_and_down(&there, lowest);
        let asked = lock(&asked).clone();
        let fetched: Vec<usize> = asked.iter().filter(|a| a.0).map(|a| a.1).collect();
        let ahead: Vec<usize> = asked.iter().filter(|a| !a.0).map(|a| a.1).collect();
        assert!(fetched.len() >= LAYERS - 1, "{fetched:?}");
        // Each fetch is followed by one prefetch, while no handle of the source is held, and the prediction is right.
        assert_eq!(
            asked.iter().map(|a| a.0).collect::<Vec<_>>(),
            [true, false].repeat(fetched.len())
        );
        assert_eq!(fetched[1..], ahead[..ahead.len() - 1], "lowest {lowest}");
    }
}

#[test]
fn weights_of_the_disk_pass_through_in_two_places_there_and_two_here() {
    use crate::source::{DiskWeights, StoragePolicy, disk};
    let (dir, dtype) = (tempfile::TempDir::new().unwrap(), Dtype::F32);
    let file = dir.path().join("model.safetensors");
    disk::write_random(&file, &params(), 7, 0.5, 1.0, dtype).unwrap();
    let options = disk::DiskOptions {
        dtype,
        storage: StoragePolicy::dense(dtype),
        device: Device::Cpu,
        trained: dir.path().join("trained"),
        codes: dir.path().join("codes.safetensors"),
        head: "head".into(),
        head_rows: None,
    };
    let there = DiskWeights::open(params(), Weights::open_file(&file).unwrap(), options).unwrap();
    let (there, here) = (
        UploadedWeights::new(Arc::new(there), "head", HostMemory::Temporary, &Device::Cpu).unwrap(),
        resident(dtype),
    );
    for lowest in [0, 3, 0] {
        up_and_down(&there, lowest);
        for l in 0..LAYERS {
            let (a, b) = (
                there.fetch(Group::Layer(l)).unwrap(),
                here.fetch(Group::Layer(l)).unwrap(),
            );
            for (name, weight) in b.iter() {
                assert_eq!(flat(&a.get(name).unwrap().1), flat(weight.dense().unwrap()), "{name}");
            }
        }
        let held = 4 * (D + V * D) as u64;
        let layer = 4 * (2 * D * D + D) as u64;
        assert_eq!(there.host.resident_bytes(), held + 2 * layer);
        assert!(lock(&there.slots).len() <= SLOTS);
    }
}

#[test]
fn experts_come_alone_from_memory_and_from_the_disk() {
    use crate::source::{DiskWeights, StoragePolicy, disk};
    const EXPERTS: usize = 4;
    let dtype = Dtype::F32;
    let mut all = params();
    for (l, e) in (0..LAYERS).flat_map(|l| (0..EXPERTS).map(move |e| (l, e))) {
        all.push(ParamInfo {
            name: format!("model.layers.{l}.mlp.experts.{e}.up.weight").into(),
            shape: vec![D, 2 * D],
            group: Group::Layer(l),
            sublayer: crate::source::Sublayer::Mlp,
        });
    }
    let host = || ResidentWeights::random(all.clone(), 7, 0.5, 1.0, dtype, &Device::Cpu).unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("model.safetensors");
    disk::write_random(&file, &all, 7, 0.5, 1.0, dtype).unwrap();
    let options = disk::DiskOptions {
        dtype,
        storage: StoragePolicy::dense(dtype),
        device: Device::Cpu,
        trained: dir.path().join("trained"),
        codes: dir.path().join("codes.safetensors"),
        head: "head".into(),
        head_rows: None,
    };
    let disk = DiskWeights::open(all.clone(), Weights::open_file(&file).unwrap(), options).unwrap();
    let hosts: [(Arc<dyn TrainableStore>, HostMemory); 2] = [
        (Arc::new(host()), HostMemory::Stable),
        (Arc::new(disk), HostMemory::Temporary),
    ];
    for (behind, memory) in hosts {
        let there = UploadedWeights::new(behind, "head", memory, &Device::Cpu).unwrap();
        let here = host();
        for layer in (0..LAYERS).chain((0..LAYERS).rev()) {
            there.expect_experts(layer, &[0, 2, 3]);
            assert_eq!(there.fetch_dense(layer).unwrap().iter().count(), 2);
            for e in [0, 2, 3] {
                let expert = there.fetch_expert(layer, e).unwrap();
                let name = format!("model.layers.{layer}.mlp.experts.{e}.up.weight");
                assert_eq!(expert.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), [&name]);
                let want = here.fetch(Group::Layer(layer)).unwrap().get(&name).unwrap().1;
                assert_eq!(flat(&expert.get(&name).unwrap().1), flat(&want), "{name}");
                assert!(lock(&there.experts).len() <= SLOTS && lock(&there.slots).len() <= SLOTS);
            }
        }
        let reads = there.expert_reads().unwrap();
        let visits = 2 * LAYERS as u64;
        assert_eq!(reads.of, visits * EXPERTS as u64);
        // Those of the uppermost layer are still there at the turn.
        assert!((3 * visits - 2..=3 * visits).contains(&reads.brought), "{reads:?}");
        assert_eq!(reads.bytes, reads.brought * (4 * 2 * D * D) as u64);
        assert_eq!(there.fetch(Group::Layer(1)).unwrap().iter().count(), 2 + EXPERTS);
    }
}
