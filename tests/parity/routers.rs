//! The losses of routers: their values, and the gradients of all parameters with them.

use crate::families::documents;
use crate::support::{Form, all_close, close, directories, family, goldens, json, tensors};
use crate::wire_routers;
use ft::model::RouterLosses;
use std::collections::BTreeMap;
use std::fs;

/// As in `make_routers.py`.
const BALANCE: f64 = 0.7;
const Z: f64 = 0.3;

fn compare(name: &str, golden: &BTreeMap<String, Vec<f64>>, case: &str, got: &BTreeMap<String, Vec<f64>>) {
    let prefix = format!("{case}.grad.");
    let wanted: Vec<&str> = golden.keys().filter_map(|k| k.strip_prefix(&prefix)).collect();
    assert_eq!(got.keys().map(String::as_str).collect::<Vec<_>>(), wanted, "{name}");
    for (parameter, gradient) in got {
        let what = format!("{name}, {case}: gradient of {parameter}");
        all_close(gradient, &golden[&format!("{prefix}{parameter}")], 1e-4, &what);
    }
}

#[test]
fn losses_of_routers_and_their_gradients_are_those_of_transformers() {
    let mut variants = 0;
    for entry in fs::read_dir(goldens().join("routers")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(directories(&goldens().join("families")).iter().any(|v| v == name));
        let golden = tensors(&path);
        let from = goldens().join("families").join(name);
        let count = json(&from.join("golden.json"))["documents"].as_u64().unwrap();
        let documents = documents(&tensors(&from.join("golden.safetensors")), count);
        let dir = family(name, Form::V5);
        let losses = RouterLosses {
            balance: BALANCE,
            z: 0.0,
        };
        let (loss, found, gradients) = wire_routers::router_losses_and_grads(dir.path(), &documents[..1], losses, 1);
        let aux = found["router_aux_loss"];
        close(aux, golden["one.aux_loss"][0], 1e-5, &format!("{name}: balance loss"));
        // The loss of transformers has the balance loss in it.
        close(
            loss + BALANCE * aux,
            golden["one.loss"][0],
            1e-4,
            &format!("{name}: loss"),
        );
        compare(name, &golden, "one", &gradients);

        let losses = RouterLosses { balance: BALANCE, z: Z };
        // Two equal micro-batches give the mean of both.
        let times = 1 + variants % 2;
        let (loss, found, gradients) = wire_routers::router_losses_and_grads(dir.path(), &documents, losses, times);
        close(
            loss,
            golden["all.loss"][0],
            1e-4,
            &format!("{name}: loss without the others"),
        );
        let values = ["router_aux_loss", "router_z_loss"].map(|key| found[key]);
        for (value, key) in values.into_iter().zip(["all.aux_loss", "all.z_loss"]) {
            close(value, golden[key][0], 1e-5, &format!("{name}: {key}"));
        }
        compare(name, &golden, "all", &gradients);
        variants += 1;
    }
    assert_eq!(variants, 6);
}
