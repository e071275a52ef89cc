//! Rank allocation of AdaLoRA compared with PEFT's RankAllocator, on fixed weights and gradients.

use crate::support::{all_close, goldens, json, numbers};
use candle_core::{Device, Tensor};
use ft::peft::rank_allocation::{RankAllocator, RankSchedule, kept as kept_of};
use ft::peft::{Adalora, DropoutMask, fill};
use std::collections::BTreeMap;

/// Converts `m0.lora_A.default` to `m0.lora_A`.
fn own(name: &str) -> &str {
    name.trim_end_matches(".default")
}

#[test]
fn singular_values_live_and_die_as_in_peft() {
    let golden = json(&goldens().join("ranks.json"));
    let r = golden["r"].as_u64().unwrap() as usize;
    let values = |v: &serde_json::Value| numbers(v).into_iter().map(|x| x as f32).collect::<Vec<f32>>();
    let tensor = |v: &serde_json::Value, dims: (usize, usize)| Tensor::from_vec(values(v), dims, &Device::Cpu).unwrap();
    let mut adapters: BTreeMap<String, Adalora> = BTreeMap::new();
    for (i, size) in golden["sizes"].as_array().unwrap().iter().enumerate() {
        let (inputs, outputs) = (size[0].as_u64().unwrap() as usize, size[1].as_u64().unwrap() as usize);
        let start = |part: &str| &golden["start"][format!("m{i}.{part}.default")];
        let module = format!("m{i}");
        let adapter = Adalora::new(
            &module,
            tensor(start("lora_A"), (r, inputs)),
            tensor(start("lora_B"), (outputs, r)),
            tensor(start("lora_E"), (r, 1)),
            1.0,
            DropoutMask::default(),
        );
        adapters.insert(module, adapter);
    }
    let schedule = RankSchedule {
        target_r: 2,
        tinit: 2,
        tfinal: 3,
        delta_t: 2,
        beta1: 0.85,
        beta2: 0.6,
        orth_reg_weight: 0.5,
        total_steps: 12,
    };
    let mut ranks = RankAllocator::new(adapters.iter(), schedule.clone());
    let mut fallen = 0;
    for (n, step) in golden["steps"].as_array().unwrap().iter().enumerate() {
        let at = n as u64 + 1;
        if at == 6 {
            // As after a resume: only the saved state continues.
            let saved = ranks.saved();
            ranks = RankAllocator::new(adapters.iter(), schedule.clone());
            for (name, values) in saved {
                ranks.restore(&name, values).unwrap();
            }
        }
        let gradients: BTreeMap<&str, &serde_json::Value> = step["gradients"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, v)| (own(name), v))
            .collect();
        // The update step of the golden.
        let parts = adapters.values().flat_map(|k| [&k.a, &k.b, &k.e]);
        for part in parts {
            let before = part.tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let gradient = values(gradients[&*part.name]);
            let after: Vec<f32> = before.iter().zip(gradient).map(|(w, g)| w - 0.1 * g).collect();
            fill(&part.tensor, &after).unwrap();
        }
        let found = |name: &str| {
            let gradient = values(gradients.get(name)?);
            // Doubled gradients with a clip factor of one half: clipping is part of the score.
            Some(Tensor::from_vec(gradient.iter().map(|g| 2.0 * g).collect(), gradient.len(), &Device::Cpu).unwrap())
        };
        assert_eq!(
            ranks.budget(at).0 as u64,
            step["budget"].as_u64().unwrap(),
            "budget of step {at}"
        );
        ranks.after(at, &found, 0.5).unwrap();
        for part in adapters.values().flat_map(|k| [&k.a, &k.b, &k.e]) {
            let got = part.tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let got: Vec<f64> = got.into_iter().map(f64::from).collect();
            let want = numbers(&step["after"][format!("{}.default", part.name)]);
            all_close(&got, &want, 1e-5, &format!("{} after step {at}", part.name));
            fallen += usize::from(part.name.ends_with("lora_E")) * got.iter().filter(|x| **x == 0.0).count();
        }
        for (name, kept) in step["kept"].as_object().into_iter().flatten() {
            let module = own(name).trim_end_matches(".lora_E");
            let kept: Vec<bool> = kept.as_array().unwrap().iter().map(|k| k.as_bool().unwrap()).collect();
            assert_eq!(kept_of(&ranks.saved())[module], kept, "{module} after step {at}");
        }
    }
    assert!(fallen > 0);
}
