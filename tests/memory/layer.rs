//! The memory of one layer as it is stated beside the layer, against the allocator: one more `[N, D]` tensor at a peak
//! of `model/block.rs` or `model/mlp.rs`, or one more saved activation, is an error here.

use crate::counting::{LIVE, MOST};
use crate::{RESULT, case, passes};
use candle_core::{DType, Device, Tensor};
use ft::base::Result;
use ft::base::ledger::{Allocation, Ledger, MemoryKind};
use ft::model::block::memory::{LayerMemory, LayerMemorySettings};
use ft::model::contracts::GradSinkMemory;
use ft::model::rope::Rope;
use ft::model::spec::{
    AltUpSpec, DeltaNetSpec, KeySource, LatentSpec, LayerNormParams, Mixer, NormNames, PerLayerSpec, QkNorm,
};
use ft::model::{GradSink, Layer, Network, Param, Spec, families, shapes};
use ft::ops::Dtype;
use ft::source::{ResidentWeights, StoragePolicy};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// N and D.
const TOKENS: usize = 768;
const HIDDEN: usize = 128;

/// Drops every gradient.
struct Drops(Spec);

impl GradSink for Drops {
    fn wants(&self, _: &str) -> bool {
        true
    }

    fn take(&mut self, _: &Param, _: Tensor) -> Result<()> {
        Ok(())
    }
}

impl GradSinkMemory for Drops {
    fn wants(&self, name: &str) -> bool {
        self.elements(name) > 0
    }

    fn elements(&self, name: &str) -> u64 {
        let params = self.0.params();
        let found = params.iter().find(|p| &*p.name == name);
        found.map_or(0, |p| p.elements() as u64)
    }

    fn take(&mut self, l: &mut Ledger, _: &str, gradient: Allocation) {
        l.free(gradient);
    }
}

/// The options of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Options {
    Plain,
    /// Norms everywhere, one matrix for q, k, v, shared key heads.
    Rich,
    /// Norms after each half, and over all heads together.
    After,
    /// Norms of rotated heads; a factor of what each half adds.
    Scaled,
    /// Gemma 4: the keys are the values, norms of v, a per-layer input, a factor.
    PerLayer,
    /// Attention with an output gate.
    Gated,
    /// Gated DeltaNet, with projections of its own or ordered by key head.
    Delta,
    DeltaByKeyHead,
    /// Latent attention: a projection of its own for the queries and heads of v of the size of those of q; low-rank queries and
    /// smaller heads of v.
    Latent,
    LatentQueries,
    /// A gated short convolution.
    Convolution,
    /// LayerNorms, parallel halves, an MLP without a gate.
    Parallel,
    /// Gemma 3n: three streams, Laurel, a sparse gate, a per-layer input.
    Streams,
}

fn spec(intermediate: usize, options: Options) -> Spec {
    let rich = options == Options::Rich;
    let mut spec = families::read(&shapes::config("shape:tiny").unwrap().unwrap()).unwrap();
    spec.layers.truncate(1);
    (spec.vocab, spec.hidden, spec.intermediate) = (16, HIDDEN, intermediate);
    (spec.heads, spec.kv_heads, spec.head_dim) = (4, if rich { 2 } else { 4 }, HIDDEN / 4);
    spec.fused_qkv = rich;
    spec.fused_gate_up = rich.then_some(["mlp.gate_up_proj", "mlp.down_proj"]);
    (spec.norms, spec.qk_norm) = match options {
        Options::Plain
        | Options::Gated
        | Options::Delta
        | Options::DeltaByKeyHead
        | Options::Latent
        | Options::LatentQueries
        | Options::Convolution => (NormNames::BEFORE, None),
        Options::Rich => (NormNames::SANDWICH, Some(QkNorm::HEADS)),
        Options::After => (NormNames::AFTER, Some(QkNorm::WHOLE)),
        Options::Scaled => (NormNames::BEFORE, Some(QkNorm::ROTATED)),
        Options::PerLayer | Options::Streams => (NormNames::SANDWICH, Some(QkNorm::HEADS)),
        Options::Parallel => (NormNames::SHARED, Some(QkNorm::OWN_WEIGHTS)),
    };
    spec.output_gate = options == Options::Gated;
    if matches!(options, Options::Delta | Options::DeltaByKeyHead) {
        spec.layers[0].mixer = Mixer::DeltaNet(DeltaNetSpec {
            key_heads: 2,
            value_heads: 4,
            key_dim: HIDDEN / 4,
            value_dim: HIDDEN / 4,
            kernel: 4,
            by_key_head: options == Options::DeltaByKeyHead,
        });
    }
    if options == Options::Convolution {
        spec.layers[0].mixer = Mixer::ShortConv { kernel: 3, bias: true };
    }
    if matches!(options, Options::Latent | Options::LatentQueries) {
        spec.layers[0].mixer = Mixer::Latent(LatentSpec {
            q_rank: (options == Options::LatentQueries).then_some(HIDDEN / 2),
            kv_rank: HIDDEN / 4,
            plain: HIDDEN / 8,
            rotary: HIDDEN / 8,
            value: if options == Options::Latent {
                HIDDEN / 4
            } else {
                HIDDEN / 8
            },
        });
    }
    if options == Options::PerLayer {
        (spec.value_norm, spec.layer_scalar) = (true, true);
        spec.per_layer = Some(PerLayerSpec { vocab: 16, width: 16 });
        spec.layers[0].keys = KeySource::KeysOnly;
    }
    if options == Options::Streams {
        (spec.value_norm, spec.laurel) = (true, Some(16));
        spec.per_layer = Some(PerLayerSpec { vocab: 16, width: 16 });
        spec.streams = Some(AltUpSpec {
            count: 3,
            active: 0,
            clip: Some(120.0),
        });
        spec.layers[0].sparsity = 0.5;
    }
    if options == Options::Parallel {
        spec.layer_norm = Some(LayerNormParams::BOTH);
        spec.parallel = true;
        spec.plain_mlp = Some(["mlp.up_proj", "mlp.down_proj"]);
    }
    if options == Options::Scaled {
        spec.residual_scale = 0.5;
    }
    // Latent attention rotates half a head.
    let rotated = match spec.layers[0].mixer {
        Mixer::Latent(sizes) => sizes.rotary / 2,
        _ => HIDDEN / 8,
    };
    spec.ropes = vec![Rope {
        inv_freq: vec![0.5; rotated],
        attention_factor: 1.0,
        ..Rope::default()
    }];
    spec
}

/// Bytes at the peak of `f` and after it, beyond those before it.
fn measured<R>(f: impl FnOnce() -> R) -> (R, u64, u64) {
    let before = LIVE.load(Relaxed);
    MOST.store(before, Relaxed);
    let result = f();
    let (peak, after) = (MOST.load(Relaxed), LIVE.load(Relaxed));
    (result, (peak - before) as u64, after.saturating_sub(before) as u64)
}

/// Measured and stated bytes: of the forward pass, the saving forward pass, the saved activations with the output, the
/// backward pass with saved activations, and the backward pass that recomputes them.
fn compare(spec: &Spec, mlp_tokens: Option<usize>) -> [(u64, u64); 5] {
    let source = ResidentWeights::random(spec.params(), 1, 0.02, 0.9, Dtype::F32, &Device::Cpu).unwrap();
    let mut network = Network::new(spec.clone(), Arc::new(source), Device::Cpu);
    network.mlp_tokens = mlp_tokens;
    let positions: Vec<u32> = (0..TOKENS as u32).map(|t| t % 256).collect();
    let documents = [0, 256, 512, TOKENS];
    let ctx = network.context(&positions, &documents, None).unwrap();
    let block = network.block(0).unwrap();
    network.embed(&[0; TOKENS], &ctx).unwrap();
    ctx.shared.start_backward(0, true).unwrap();
    let zeros = || Tensor::zeros((TOKENS, spec.row()), DType::F32, &Device::Cpu).unwrap();
    let (x, mut sink) = (zeros(), Drops(spec.clone()));
    let mut run = || {
        let forward = measured(|| block.forward(&x, &ctx).unwrap()).1;
        let ((y, saved), saving, stays) = measured(|| block.forward_saving(&x, &ctx).unwrap());
        drop(y);
        // The gradient of the output is allocated inside: the backward pass frees it.
        let kept = measured(|| block.vjp(&x, Some(saved), zeros(), &ctx, true, &mut sink).unwrap()).1;
        let recomputed = measured(|| block.vjp(&x, None, zeros(), &ctx, true, &mut sink).unwrap()).1;
        [forward, saving, stays, kept, recomputed]
    };
    // The first pass allocates the scratch memory of the thread.
    run();
    let measured = run();

    let storage = StoragePolicy::dense(Dtype::F32);
    let settings = LayerMemorySettings {
        spec,
        tokens: TOKENS,
        sequence: Default::default(),
        documents: documents.len() - 1,
        element: 4,
        on_gpu: false,
        experts_streamed: false,
        expert_ranks: 1,
        mlp_tokens,
        dropout: false,
        storage: &storage,
        adapters: &BTreeMap::new(),
        active: &|_| true,
    };
    let layer = LayerMemory::new(settings, 0);
    let width = 4 * (TOKENS * spec.row()) as u64;
    let stated = |saving: bool| {
        let mut l = Ledger::default();
        let (y, saved) = layer.forward(&mut l, saving);
        let (peak, stays) = (l.peak, l.total());
        l.free(y);
        (l, saved, peak, stays)
    };
    let forward = stated(false).2;
    let (mut l, saved, saving, stays) = stated(true);
    let mut backward = |l: &mut Ledger, saved| {
        let before = l.total();
        l.peak = 0;
        let dy = l.alloc(MemoryKind::LayerWork, width);
        let dx = layer.vjp(l, saved, dy, true, &mut sink);
        l.free_all(dx);
        assert_eq!(l.total(), 0);
        l.peak - before
    };
    let kept = backward(&mut l, saved);
    let recomputed = backward(&mut Ledger::default(), None);
    let stated = [forward, saving, stays, kept, recomputed];
    std::array::from_fn(|i| (measured[i], stated[i]))
}

#[test]
fn a_layer_allocates_what_is_stated_beside_it() {
    passes("layer::allocates");
}

#[test]
#[ignore = "a process of its own"]
fn allocates() {
    if case().is_none() {
        return;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let one = (4 * TOKENS * HIDDEN) as i64;
    let mut wrong = Vec::new();
    // With a narrow MLP the peak is in the attention half.
    for intermediate in [32, 512] {
        for options in [
            Options::Plain,
            Options::Rich,
            Options::After,
            Options::Scaled,
            Options::PerLayer,
            Options::Parallel,
            Options::Gated,
            Options::Delta,
            Options::DeltaByKeyHead,
            Options::Latent,
            Options::LatentQueries,
            Options::Convolution,
            Options::Streams,
        ] {
            for mlp_tokens in [None, Some(200)] {
                let found = pool.install(|| compare(&spec(intermediate, options), mlp_tokens));
                let tensors =
                    found.map(|(measured, stated)| (measured as f64 / one as f64, stated as f64 / one as f64));
                println!("I {intermediate}, {options:?}, {mlp_tokens:?}: {tensors:.2?} tensors of [N, D]");
                if found.iter().any(|(m, s)| (*m as i64 - *s as i64).abs() > one / 2) {
                    wrong.push(format!("I {intermediate}, {options:?}, {mlp_tokens:?}: {tensors:.2?}"));
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "measured and stated, in tensors of [N, D]:\n{}",
        wrong.join("\n")
    );
    println!("{RESULT}as stated");
}
