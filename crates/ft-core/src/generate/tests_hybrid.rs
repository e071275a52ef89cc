//! Decoding with layers of Gated DeltaNet or short convolutions: the cache against recomputation, shared prefixes, and a chat that goes back.

use super::cache::{CacheLayout, CachedSequence, DecodeStep, StepTables};
use super::decode::PassKind;
use super::tests::{argmax, full_logits, network as of_spec, prompts, settings, spec};
use super::*;
use crate::model::spec::{DeltaNetSpec, Mixer, Spec};
use crate::model::{KvStore, Network, RecurrentState};
use crate::ops::{Dtype, update};
use candle_core::{CpuStorage, DType, Device, Storage};

fn delta_net(by_key_head: bool) -> Mixer {
    Mixer::DeltaNet(DeltaNetSpec {
        key_heads: 2,
        value_heads: 4,
        key_dim: 8,
        value_dim: 6,
        kernel: 4,
        by_key_head,
    })
}

fn network(mixer: Mixer) -> Network {
    let mut layers = spec().layers;
    layers.push(layers[2]);
    for l in [0, 1, 3] {
        layers[l].mixer = mixer;
    }
    let network = of_spec(
        Spec {
            layers,
            output_gate: true,
            ..spec()
        },
        Dtype::F32,
    );
    // A slow decay: the state matters.
    for p in network.spec.params().iter().filter(|p| p.name.ends_with("A_log")) {
        update::set(&network.source.in_memory(&p.name).unwrap(), &vec![-3.0; p.elements()]).unwrap();
    }
    network
}

fn run(network: &Network, prompts: &[Vec<u32>], settings: &GenerateSettings) -> Vec<Vec<u32>> {
    generate(network, prompts, settings, &mut |_, _| Ok(())).unwrap()
}

#[test]
fn rows_together_are_rows_alone_and_recomputed() {
    let convolution = |bias| Mixer::ShortConv { kernel: 3, bias };
    for mixer in [delta_net(false), delta_net(true), convolution(false), convolution(true)] {
        let network = network(mixer);
        let mut prompts = prompts();
        // Longer than a chunk, and with a common prefix.
        let long: Vec<u32> = (0..80).map(|i| (i * i * 3 % 61) as u32).collect();
        prompts.extend([long.clone(), [&long[..40], &[7, 8, 9]].concat()]);
        let together = run(&network, &prompts, &settings(20));
        let pieces = GenerateSettings {
            limits: GenerateLimits {
                prefill_tokens: 9,
                ..GenerateLimits::default()
            },
            ..settings(20)
        };
        assert_eq!(run(&network, &prompts, &pieces), together);
        for (prompt, got) in prompts.into_iter().zip(&together) {
            assert_eq!(run(&network, std::slice::from_ref(&prompt), &settings(20))[0], *got);
            let mut ids = prompt.clone();
            for _ in 0..20 {
                ids.push(argmax(&full_logits(&network, &ids)));
            }
            assert_eq!(ids[prompt.len()..], got[..]);
        }
    }
}

#[test]
fn a_session_goes_on_from_its_state_and_never_back() {
    let network = network(delta_net(false));
    let settings = settings(9);
    let mut session = Session::default();
    let mut ids = prompts()[2].clone();
    let mut shared = Vec::new();
    for turn in 0..4 {
        let request = Request {
            prompt: ids.clone(),
            number: 0,
        };
        let alone = rollout(&network, std::slice::from_ref(&request), &settings).unwrap();
        let (answer, speed) = session
            .answer(&network, &request, &settings, &mut |_, _| Ok(()))
            .unwrap();
        assert_eq!(answer.ids, alone[0].ids);
        shared.push(speed.shared_tokens);
        ids.extend(&answer.ids);
        ids.extend([turn, 5, 9]);
        if turn == 2 {
            ids = prompts()[2][..6].to_vec();
            ids.push(1);
        }
    }
    // As in a model with attention alone, except for the last turn: it begins anew.
    assert_eq!(shared, [0, 20, 32, 0]);
}

/// A state that is a view of the rows of all documents would keep them all.
#[test]
fn a_state_holds_the_elements_of_its_document_only() {
    let convolution = Mixer::ShortConv { kernel: 3, bias: false };
    for (mixer, tensors) in [(delta_net(false), 4), (convolution, 2)] {
        assert_eq!(held_by_states(&network(mixer)), tensors);
    }
}

/// Checks the states after two documents; returns the number of their tensors.
fn held_by_states(network: &Network) -> usize {
    let layout = CacheLayout::new(&network.spec, None, &Device::Cpu, DType::F32);
    let (ids, documents) = ([1u32; 30], [0, 20, 30]);
    let positions: Vec<u32> = (0..20).chain(0..10).collect();
    let mut sequences = [0; 2].map(|_| CachedSequence::new(&layout, Vec::new(), 0, 64));
    let mut cache = DecodeStep::new(
        sequences.iter_mut().collect(),
        &documents,
        PassKind::Prompt,
        &Device::Cpu,
        StepTables::New,
    )
    .unwrap();
    let ctx = network.context(&positions, &documents, None).unwrap();
    let x = network.embed(&ids, &ctx).unwrap();
    network.block(0).unwrap().forward_cached(&x, &ctx, &mut cache).unwrap();
    let mut tensors = 0;
    for state in cache.states(0).unwrap() {
        let RecurrentState { inputs, state } = state.unwrap();
        for t in [Some(inputs), state].into_iter().flatten() {
            tensors += 1;
            let (storage, _) = t.storage_and_layout();
            let Storage::Cpu(CpuStorage::F32(held)) = &*storage else {
                panic!("{:?}", t.dtype())
            };
            assert_eq!(held.len(), t.elem_count());
        }
    }
    tensors
}
