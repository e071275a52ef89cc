//! Adapters by PEFT on the parameters of experts: logits, loss, the gradient of every tensor, merged weights; and saved again.

use crate::families::documents;
use crate::support::{Form, all_close, close, directories, family, ft, goldens, json, path, tensors};
use crate::wire::{self, values};
use candle_core::Tensor;
use ft::engine::{ActiveSet, GradientPass, sinks::CollectGradients};
use ft::formats::Weights;
use ft::model::{Adapters, Network};
use ft::ops::step_stats::StepStats;
use ft::peft::{Adapter, ExpertLora};
use ft::sft::CausalLm;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Loss and the gradients of all adapters in one window.
pub fn loss_and_grads(
    network: &Network,
    batch: &ft::data::Batch,
    saved_layers: usize,
) -> (f64, BTreeMap<String, Tensor>) {
    let parts = network.adapters.values().flat_map(|a| a.parts());
    let active = ActiveSet::new(parts.map(|p| p.name.to_string()));
    let mut sink = CollectGradients {
        active: &active,
        gradients: BTreeMap::new(),
    };
    let (step_stats, objective) = (
        StepStats::new(&network.device).unwrap(),
        CausalLm::new(network.spec.vocab),
    );
    let pass = GradientPass {
        saved_layers,
        ..GradientPass::new(network, &objective, &active, &step_stats)
    };
    let totals = pass.window(std::slice::from_ref(batch), &mut sink).unwrap();
    (totals.with(step_stats.read().unwrap()).loss(), sink.gradients)
}

/// The gradients as adapters: what is saved of them has the layout of PEFT.
fn as_adapters(network: &Network, gradients: &BTreeMap<String, Tensor>) -> Adapters {
    let of = |name: &str| {
        gradients
            .get(name)
            .unwrap_or_else(|| panic!("no gradient of {name}"))
            .clone()
    };
    let sites = network.spec.expert_sites();
    let all = network.adapters.iter().map(|(module, adapter)| {
        let own = match &**adapter {
            Adapter::Experts(e) => {
                let site = sites.iter().find(|s| s.site.module == *module).unwrap();
                Adapter::Experts(ExpertLora::new(site, (of(&e.a.name), of(&e.b.name)), e.scale))
            }
            Adapter::Lora(lora) => {
                let mut own = lora.clone();
                (own.a, own.b) = (of(&lora.a_name), of(&lora.b_name));
                Adapter::Lora(own)
            }
            other => panic!("{other:?}"),
        };
        (module.clone(), Arc::new(own))
    });
    all.collect()
}

fn save(out: &Path, dir: &Path, from: &Path, network: &Network, adapters: &Adapters) {
    let config = ft::hf::load_adapter(from, &network.spec).unwrap().config;
    let base = ft::hf::fingerprint(dir).unwrap().base();
    ft::hf::adapter(out, &config, adapters, &BTreeMap::new(), dir, &base).unwrap();
}

#[test]
fn adapters_on_experts_are_those_of_peft() {
    let all = directories(&goldens().join("expert_adapters"));
    assert_eq!(all.len(), 6);
    let mut merged_tensors = 0;
    for name in all {
        println!("{name}");
        let from = goldens().join("expert_adapters").join(&name);
        let of_family = goldens().join("families").join(&name);
        let golden = tensors(&from.join("golden.safetensors"));
        let count = json(&of_family.join("golden.json"))["documents"].as_u64().unwrap();
        let documents = documents(&tensors(&of_family.join("golden.safetensors")), count);
        let dir = family(&name, Form::V5);
        let network = wire::open(dir.path(), Some(&from));
        for (i, logits) in wire::logits(dir.path(), Some(&from), &documents).iter().enumerate() {
            all_close(
                logits,
                &golden[&format!("logits.{i}")],
                1e-4,
                &format!("{name}: logits of document {i}"),
            );
        }
        let batch = wire::batch(&documents);
        let (loss, gradients) = loss_and_grads(&network, &batch, 0);
        close(loss, golden["loss"][0], 1e-4, &format!("{name}: loss"));
        let (again, kept) = loss_and_grads(&network, &batch, network.layers());
        assert_eq!(loss, again, "{name}");
        for (parameter, gradient) in &gradients {
            assert_eq!(values(gradient), values(&kept[parameter]), "{name}: {parameter}");
        }

        // The saved file has the names and the values of the file of PEFT.
        let out = tempfile::tempdir().unwrap();
        save(&out.path().join("same"), dir.path(), &from, &network, &network.adapters);
        let file = "adapter_model.safetensors";
        assert_eq!(
            tensors(&out.path().join("same").join(file)),
            tensors(&from.join(file)),
            "{name}"
        );
        save(
            &out.path().join("gradients"),
            dir.path(),
            &from,
            &network,
            &as_adapters(&network, &gradients),
        );
        let got = tensors(&out.path().join("gradients").join(file));
        let wanted: Vec<&str> = golden.keys().filter_map(|k| k.strip_prefix("grad.")).collect();
        assert_eq!(got.keys().map(String::as_str).collect::<Vec<_>>(), wanted, "{name}");
        for (parameter, gradient) in &got {
            let what = format!("{name}: gradient of {parameter}");
            all_close(gradient, &golden[&format!("grad.{parameter}")], 1e-4, &what);
        }

        let merged = out.path().join("merged");
        ft(&[
            "merge",
            "--model",
            path(dir.path()),
            "--adapter",
            path(&from),
            "--dtype",
            "f32",
            "--out",
            path(&merged),
        ]);
        let [before, after] = [dir.path(), &merged].map(|d| Weights::open(d).unwrap());
        for parameter in before.names() {
            let after: Vec<f64> = after.read_f32(parameter).unwrap().into_iter().map(f64::from).collect();
            let in_peft = ft::formats::adapter::wrapped(parameter);
            let keys = [parameter, &in_peft].map(|name| format!("merged.{name}"));
            match keys.iter().find_map(|key| golden.get(key)) {
                Some(wanted) => {
                    all_close(&after, wanted, 1e-6, &format!("{name}: merged {parameter}"));
                    merged_tensors += 1;
                }
                None => {
                    let before: Vec<f64> = before.read_f32(parameter).unwrap().into_iter().map(f64::from).collect();
                    assert_eq!(after, before, "{name}: {parameter} has no adapter");
                }
            }
        }
    }
    println!("{merged_tensors} merged tensors");
    assert!(merged_tensors > 100);
}
