//! Copies on the copy stream, next to computation: what arrives, what comes back, what is dropped on the way.

use crate::support::{assert_same_bits, flat, gpu};
use candle_core::{DType, Device, Tensor};
use ft::formats::weights::Weights;
use ft::ops::Dtype;
use ft::ops::cross_entropy::PIECE;
use ft::ops::oracle::random;
use ft::ops::transfer::{Copier, HostMemory};
use ft::ops::update;
use ft::source::disk::{DiskOptions, write_random};
use ft::source::{
    DiskWeights, Group, ParamInfo, ResidentWeights, StoragePolicy, Sublayer, UploadedWeights, WeightSource,
};
use std::sync::Arc;

/// Elements of a tensor that is page-locked, and of one that is too small for it.
const SIZES: [usize; 2] = [20_000, 1000];

fn host(n: usize, seed: u64) -> Tensor {
    random(n, seed)
}

/// Queues work on a tensor of the same size and frees it: its memory is used again while the work waits.
fn busy(device: &Device, n: usize) {
    let scratch = Tensor::zeros(n, DType::F32, device).unwrap();
    for _ in 0..3 {
        update::scale_assign(&scratch, 2.0).unwrap();
    }
}

#[test]
fn what_is_sent_arrives_before_it_is_used() {
    let Some(gpu) = gpu() else { return };
    for memory in [HostMemory::Stable, HostMemory::Temporary] {
        let copier = Copier::new(&gpu.device).unwrap();
        for n in SIZES {
            let sources: Vec<Tensor> = (0..6).map(|i| host(n, i)).collect();
            let total = Tensor::zeros(n, DType::F32, &gpu.device).unwrap();
            let want = Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
            // One copy ahead of the computation, as layers are uploaded; each is sent twice.
            let send = |i: usize| {
                busy(&gpu.device, n);
                copier.send(&sources[i % 6], memory).unwrap()
            };
            let mut next = Some(send(0));
            for i in 0..12 {
                let here = copier.receive(next.take().unwrap()).unwrap();
                next = (i < 11).then(|| send(i + 1));
                update::add_assign(&total, &here).unwrap();
                update::add_assign(&want, &sources[i % 6]).unwrap();
            }
            let times = copier.times().unwrap().unwrap();
            assert!(times.copying >= 0.0 && times.waiting <= times.copying, "{times:?}");
            assert_eq!(flat(&total), flat(&want));
        }
    }
}

#[test]
fn what_is_parked_comes_back() {
    let Some(gpu) = gpu() else { return };
    let copier = Copier::new(&gpu.device).unwrap();
    for n in SIZES {
        let mut parked = Vec::new();
        let mut want = Vec::new();
        for i in 0..4 {
            // Queued, not computed: the copy waits for it.
            let t = host(n, i).to_device(&gpu.device).unwrap();
            update::scale_assign(&t, 0.5).unwrap();
            want.push(t.copy().unwrap());
            parked.push(copier.offload(t).unwrap());
            if i > 0 {
                copier.release(&mut parked[i as usize - 1]).unwrap();
                busy(&gpu.device, n);
            }
        }
        while let (Some(away), Some(want)) = (parked.pop(), want.pop()) {
            let back = copier.fetch(away).unwrap();
            // The pinned memory of the last one is used again at once.
            let other = copier.offload(want.copy().unwrap()).unwrap();
            busy(&gpu.device, n);
            let back = copier.receive(back).unwrap();
            assert_same_bits(&back, &want);
            let other = copier.receive(copier.fetch(other).unwrap()).unwrap();
            assert_same_bits(&other, &want);
        }
    }
}

#[test]
fn what_is_dropped_on_the_way_harms_nothing() {
    let Some(gpu) = gpu() else { return };
    for n in SIZES {
        let copier = Copier::new(&gpu.device).unwrap();
        let source = host(n, 1);
        let kept = source.to_device(&gpu.device).unwrap();
        // Its memory is free again in the order of the computation, not before the copy has written it.
        drop(copier.send(&source, HostMemory::Stable).unwrap());
        let next = Tensor::zeros(n, DType::F32, &gpu.device).unwrap();
        update::add_assign(&next, &kept).unwrap();
        assert_eq!(flat(&next), flat(&source));
        drop(copier.offload(kept.copy().unwrap()).unwrap());
        let mut released = copier.offload(kept.copy().unwrap()).unwrap();
        copier.release(&mut released).unwrap();
        drop(released);
        assert_eq!(flat(&kept), flat(&source));
        // The copier itself, while the tensor is on its way: its memory is unlocked after that.
        let last = copier
            .receive(copier.send(&source, HostMemory::Stable).unwrap())
            .unwrap();
        drop(copier);
        assert_eq!(flat(&last), flat(&source));
    }
}

#[test]
fn memory_that_is_read_may_change() {
    let Some(gpu) = gpu() else { return };
    let copier = Copier::new(&gpu.device).unwrap();
    // More copies of temporary memory than there are staging buffers, of both sizes.
    for n in [SIZES[0], SIZES[1], 40_000] {
        for (memory, copies) in [(HostMemory::Temporary, 70), (HostMemory::Reused, 3)] {
            let source = host(n, 1);
            let mut sent = Vec::new();
            for i in 0..copies {
                update::set(&source, &vec![i as f32; n]).unwrap();
                busy(&gpu.device, n);
                let arriving = copier.send(&source, memory).unwrap();
                assert_eq!(arriving.read().is_some(), memory == HostMemory::Reused && n >= SIZES[0]);
                if let Some(read) = arriving.read() {
                    read.wait().unwrap();
                }
                sent.push(arriving);
            }
            update::set(&source, &vec![-1.0; n]).unwrap();
            for (i, arriving) in sent.into_iter().enumerate() {
                assert_eq!(flat(&copier.receive(arriving).unwrap()), vec![i as f32; n]);
            }
        }
    }
}

/// The buffers of a disk source are filled again while earlier copies of them are queued.
#[test]
fn layers_of_the_disk_arrive_whole() {
    const LAYERS: usize = 6;
    const D: usize = 160;
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let name = |l: usize| format!("model.layers.{l}.a.weight");
    let param = |name: String, shape: &[usize], group| ParamInfo {
        name: name.into(),
        shape: shape.to_vec(),
        group,
        sublayer: Sublayer::Other,
    };
    let mut params = vec![param("embed".into(), &[64, D], Group::Embedding)];
    params.extend((0..LAYERS).map(|l| param(name(l), &[D, D], Group::Layer(l))));
    // The last piece of the head is shorter than its buffer.
    params.push(param("head".into(), &[2 * PIECE + 100, D], Group::Head));
    let file = dir.path().join("model.safetensors");
    write_random(&file, &params, 7, 0.5, 1.0, Dtype::F32).unwrap();
    let options = DiskOptions {
        dtype: Dtype::F32,
        storage: StoragePolicy::dense(Dtype::F32),
        device: Device::Cpu,
        trained: dir.path().join("trained"),
        codes: dir.path().join("codes.safetensors"),
        head: "head".into(),
        head_rows: Some(PIECE),
    };
    let disk = DiskWeights::open(params.clone(), Weights::open_file(&file).unwrap(), options).unwrap();
    let there = UploadedWeights::new(Arc::new(disk), "head", HostMemory::Reused, &gpu.device).unwrap();
    let here = ResidentWeights::random(params, 7, 0.5, 1.0, Dtype::F32, &Device::Cpu).unwrap();
    let (mut layers, mut pieces) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        for l in (0..LAYERS).chain((0..LAYERS).rev()) {
            there.prefetch(Group::Layer((l + 1) % LAYERS));
            busy(&gpu.device, D * D);
            layers.push((l, there.fetch(Group::Layer(l)).unwrap().get(&name(l)).unwrap().1));
        }
        let head = there.streamed("head").unwrap();
        for first in [0, PIECE, 2 * PIECE] {
            busy(&gpu.device, D * D);
            pieces.push((first, head.piece(first).unwrap().get("head").unwrap().1));
        }
    }
    for (l, layer) in layers {
        let want = here.fetch(Group::Layer(l)).unwrap().get(&name(l)).unwrap().1;
        assert_eq!(flat(&layer), flat(&want), "layer {l}");
    }
    let whole = flat(&here.in_memory("head").unwrap());
    for (first, piece) in pieces {
        let piece = flat(&piece);
        assert_eq!(piece, whole[first * D..][..piece.len()], "rows from {first}");
    }
}

#[test]
fn a_forgotten_tensor_may_change() {
    let Some(gpu) = gpu() else { return };
    let copier = Copier::new(&gpu.device).unwrap();
    for n in SIZES {
        let source = host(n, 1);
        let before = flat(&source);
        let sent = copier.send(&source, HostMemory::Stable).unwrap();
        busy(&gpu.device, n);
        copier.forget(&source).unwrap();
        update::scale_assign(&source, 3.0).unwrap();
        assert_eq!(flat(&copier.receive(sent).unwrap()), before);
        // Page-locked again after that, with its new values.
        let again = copier
            .receive(copier.send(&source, HostMemory::Stable).unwrap())
            .unwrap();
        assert_eq!(flat(&again), flat(&source));
    }
}
