//! Adapters by PEFT on the linears of AltUp and on those outside of the layers (Gemma 3n, Gemma 4): logits, loss, the gradient of
//! every tensor, and the merged model.

use crate::expert_adapters::loss_and_grads;
use crate::families::documents;
use crate::support::{Form, all_close, close, directories, family, ft, goldens, json, path, tensors, text};
use crate::wire::{self, values};
use ft::formats::adapter::wrapped;
use ft::hf::fingerprint;
use std::collections::BTreeMap;

#[test]
fn adapters_outside_of_the_layers_are_those_of_peft() {
    let all = directories(&goldens().join("outside_adapters"));
    assert_eq!(all.len(), 11);
    let mut gradients_compared = 0;
    for name in all {
        let from = goldens().join("outside_adapters").join(&name);
        let model = text(&json(&from.join("golden.json")), "model");
        let of_family = goldens().join("families").join(&model);
        let golden = tensors(&from.join("golden.safetensors"));
        let count = json(&of_family.join("golden.json"))["documents"].as_u64().unwrap();
        let documents = documents(&tensors(&of_family.join("golden.safetensors")), count);
        let dir = family(&model, Form::V5);
        let logits = |model, adapter: Option<&std::path::Path>, what: &str| {
            for (i, logits) in wire::logits(model, adapter, &documents).iter().enumerate() {
                let what = format!("{name}: logits of document {i}{what}");
                all_close(logits, &golden[&format!("logits.{i}")], 1e-4, &what);
            }
        };
        logits(dir.path(), Some(&from), "");
        let network = wire::open(dir.path(), Some(&from));
        let batch = wire::batch(&documents);
        let (loss, gradients) = loss_and_grads(&network, &batch, 0);
        close(loss, golden["loss"][0], 1e-4, &format!("{name}: loss"));
        let (again, kept) = loss_and_grads(&network, &batch, network.layers());
        assert_eq!(loss, again, "{name}");
        let multimodal = network.spec.multimodal;
        let in_file = |parameter: &String| {
            let name = if multimodal {
                wrapped(parameter)
            } else {
                parameter.clone()
            };
            format!("grad.base_model.model.{name}")
        };
        let mut wanted: Vec<&String> = golden.keys().filter(|k| k.starts_with("grad.")).collect();
        for (parameter, gradient) in &gradients {
            assert_eq!(values(gradient), values(&kept[parameter]), "{name}: {parameter}");
            let key = in_file(parameter);
            let theirs = golden
                .get(&key)
                .unwrap_or_else(|| panic!("{name}: {key} is not in {wanted:?}"));
            all_close(
                &values(gradient),
                theirs,
                1e-4,
                &format!("{name}: gradient of {parameter}"),
            );
            wanted.retain(|k| **k != key);
            gradients_compared += 1;
        }
        assert!(wanted.is_empty(), "{name}: no gradient of {wanted:?}");

        // Saved again it has the names and the values of the file of PEFT.
        let out = tempfile::tempdir().unwrap();
        let config = ft::hf::load_adapter(&from, &network.spec).unwrap().config;
        let base = fingerprint(dir.path()).unwrap().base();
        let saved = out.path().join("saved");
        ft::hf::adapter(&saved, &config, &network.adapters, &BTreeMap::new(), dir.path(), &base).unwrap();
        let file = "adapter_model.safetensors";
        assert_eq!(tensors(&saved.join(file)), tensors(&from.join(file)), "{name}");

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
        logits(&merged, None, ", merged");
    }
    assert!(gradients_compared > 500, "{gradients_compared}");
}
