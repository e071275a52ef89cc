//! A bf16 and int8 KV cache: the stored values, and the error they cause.

use super::cache::{CacheLayout, CachedSequence, DecodeStep, StepTables};
use super::decode::{NewTokens, PassKind, on_host, step};
use super::tests::{furthest, many, network, prompts, settings, spec};
use super::*;
use crate::base::Result;
use crate::model::KvStore;
use crate::ops::Dtype;
use crate::ops::attention;
use crate::ops::oracle::read_back;
use candle_core::{DType, Device, Tensor};

/// An exact cache whose inputs are rounded as `stored` requires.
struct RoundedCache<'a> {
    cache: DecodeStep<'a>,
    stored: KvDtype,
}

impl KvStore for RoundedCache<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        new: Option<(&Tensor, &Tensor)>,
        spec: &attention::AttentionSpec,
    ) -> Result<(Tensor, Tensor)> {
        let rounded = |t| read_back(t, spec.head_dim, self.stored);
        let new = new.map(|(k, v)| (rounded(k), rounded(v)));
        self.cache.attend(layer, q, new.as_ref().map(|(k, v)| (k, v)), spec)
    }
}

/// A smaller cache only rounds: the logits are those of rounded keys and values in an exact cache, up to the order
/// of f32 sums.
#[test]
fn a_smaller_cache_only_rounds() {
    let network = network(spec(), Dtype::F32);
    for stored in [KvDtype::Bf16, KvDtype::Int8] {
        for prompt in prompts() {
            let layout = |stored| CacheLayout::new(&network.spec, stored, &Device::Cpu, DType::F32);
            let part = NewTokens {
                sequence: CachedSequence::new(&layout(Some(stored)), Vec::new(), 0, 64),
                tokens: &prompt,
                logits: true,
            };
            let got = step(&(&network).into(), &mut [part], PassKind::Answer, false, None).unwrap();
            let got = on_host(got.as_ref(), network.spec.logit_softcap).unwrap();

            let documents = [0, prompt.len()];
            let positions: Vec<u32> = (0..prompt.len() as u32).collect();
            let ctx = network.context(&positions, &documents, None).unwrap();
            let mut sequence = CachedSequence::new(&layout(None), Vec::new(), 0, 64);
            let cache = DecodeStep::new(
                vec![&mut sequence],
                &documents,
                PassKind::Answer,
                &Device::Cpu,
                StepTables::New,
            )
            .unwrap();
            let mut cache = RoundedCache { cache, stored };
            let mut x = network.embed(&prompt, &ctx).unwrap();
            for layer in 0..network.layers() {
                let block = network.block(layer).unwrap();
                x = block.forward_cached(&x, &ctx, &mut cache).unwrap();
            }
            let head = network.head().unwrap();
            let raw = head.logits(&network.normalize(&x, &ctx).unwrap()).unwrap();
            let last = raw.to_vec2::<f32>().unwrap().pop().unwrap();
            let cap = network.spec.logit_softcap.unwrap();
            let want: Vec<f32> = last.into_iter().map(|x| cap * (x / cap).tanh()).collect();
            let largest = want.iter().fold(1f32, |m, x| m.max(x.abs()));
            let error = furthest(&got, &want);
            assert!(error < 1e-5 * largest, "{stored:?}: {error} of {largest}");
        }
    }
}

/// The error of the rounding, compared with a theoretical bound for this network.
///
/// A number x is off by at most 2^-9 |x| (bf16: half of a step of 2^-8), or by absmax / 254 of its head (int8). The
/// errors are independent and uniform within their step, so the ratio η of their root mean square to that of the
/// numbers is 2^-8 / √24 for bf16 (the mean of 1/x² over a binade is 1/2), and 1.85 / (127 √12) for int8 (the
/// largest of 8 normal numbers is about 1.85 of their root mean square). To first order the attention of a layer is
/// off by √(1 + 0.4² · 8) η = 1.5 η: by its values, and by its keys through scores of deviation 0.4 √8. Three
/// layers: √3 times that, and a gated MLP may double it: 5 η of the hidden state. A logit has deviation 0.3
/// √24 = 1.5, and a log-probability is about the difference of two: 5 · 1.5 · √2 η = 11 η. The worst of six
/// prompts: twice that.
#[test]
fn a_smaller_cache_costs_little() {
    let network = network(spec(), Dtype::F32);
    let requests = many(6);
    let with = |stored| {
        let limits = GenerateLimits {
            kv_cache: Some(stored),
            ..GenerateLimits::default()
        };
        let settings = GenerateSettings { limits, ..settings(1) };
        let (answers, speed) = answer(&network, &requests, &settings, &mut |_, _| Ok(())).unwrap();
        (answers, speed.cache_bytes)
    };
    let (exact, most) = with(KvDtype::F32);
    let mut before = 0.0;
    for (stored, eta, found, bytes) in [
        (KvDtype::Bf16, 2f32.powi(-8) / 24f32.sqrt(), 0.02, most / 2),
        (KvDtype::Int8, 1.85 / (127.0 * 12f32.sqrt()), 0.06, most / 3),
    ] {
        let (answers, got) = with(stored);
        assert!(got <= bytes);
        let same = answers.iter().zip(&exact).filter(|(a, b)| a.ids == b.ids);
        let worst = same.clone().map(|(a, b)| furthest(&a.log_probs, &b.log_probs));
        let worst = worst.fold(0f32, f32::max);
        // Must not exceed the bound that was set at the first measurement.
        let (theory, same) = (22.0 * eta, same.count());
        println!(
            "{stored:?}: {worst:.5}, of {theory:.5} (and {found}); {same} of {} ids",
            exact.len()
        );
        assert!(
            same + 2 >= exact.len() && worst < theory.min(found),
            "{stored:?} {worst}"
        );
        assert!(worst > before, "int8 rounds more than bf16, and bf16 something");
        before = worst;
    }
}
