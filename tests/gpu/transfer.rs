//! Copies on the copy stream, next to computation: what arrives, what comes back, what is dropped on the way.

use crate::support::{assert_same_bits, flat, gpu};
use candle_core::{DType, Device, Tensor};
use ft::ops::oracle::random;
use ft::ops::transfer::Copier;
use ft::ops::update;

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
    for stays in [true, false] {
        let copier = Copier::new(&gpu.device).unwrap();
        for n in SIZES {
            let sources: Vec<Tensor> = (0..6).map(|i| host(n, i)).collect();
            let total = Tensor::zeros(n, DType::F32, &gpu.device).unwrap();
            let want = Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
            // One copy ahead of the computation, as layers are uploaded; each is sent twice.
            let send = |i: usize| {
                busy(&gpu.device, n);
                copier.send(&sources[i % 6], stays).unwrap()
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
        drop(copier.send(&source, true).unwrap());
        let next = Tensor::zeros(n, DType::F32, &gpu.device).unwrap();
        update::add_assign(&next, &kept).unwrap();
        assert_eq!(flat(&next), flat(&source));
        drop(copier.offload(kept.copy().unwrap()).unwrap());
        let mut released = copier.offload(kept.copy().unwrap()).unwrap();
        copier.release(&mut released).unwrap();
        drop(released);
        assert_eq!(flat(&kept), flat(&source));
        // The copier itself, while the tensor is on its way: its memory is unlocked after that.
        let last = copier.receive(copier.send(&source, true).unwrap()).unwrap();
        drop(copier);
        assert_eq!(flat(&last), flat(&source));
    }
}

#[test]
fn a_forgotten_tensor_may_change() {
    let Some(gpu) = gpu() else { return };
    let copier = Copier::new(&gpu.device).unwrap();
    for n in SIZES {
        let source = host(n, 1);
        let before = flat(&source);
        let sent = copier.send(&source, true).unwrap();
        busy(&gpu.device, n);
        copier.forget(&source).unwrap();
        update::scale_assign(&source, 3.0).unwrap();
        assert_eq!(flat(&copier.receive(sent).unwrap()), before);
        // Page-locked again after that, with its new values.
        let again = copier.receive(copier.send(&source, true).unwrap()).unwrap();
        assert_eq!(flat(&again), flat(&source));
    }
}
