//! The content of the default build: no MPI, no CUDA and no NCCL. Which kernels have a row of registers.

use super::{assert_none, root};
use std::fs;
use std::process::Command;

/// The crates of a build, one a line.
fn crates(more: &[&str]) -> String {
    let out = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--workspace",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
        ])
        .args(more)
        .current_dir(root())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn the_default_build_has_no_mpi_and_no_nccl() {
    let has = |tree: &str, name: &str| tree.lines().any(|line| line.starts_with(&format!("{name} v")));
    let default = crates(&[]);
    assert!(has(&default, "candle-core"));
    for name in ["mpi", "mpi-sys", "bindgen", "cudarc"] {
        assert!(!has(&default, name), "{name}");
    }
    assert!(has(&crates(&["--features", "mpi"]), "mpi"));
    // NCCL is loaded by the program: the feature brings CUDA, and no crate more.
    let nccl = crates(&["--features", "nccl"]);
    assert!(has(&nccl, "cudarc") && !has(&nccl, "mpi"));
    assert_eq!(nccl, crates(&["--features", "cuda"]));
}

/// The names of kernels that a macro makes are not in the sources.
#[test]
fn every_kernel_has_its_registers() {
    let kernels = root().join("crates/ft-kernels");
    let page = fs::read_to_string(kernels.join("REGISTERS.md")).unwrap();
    let (mut faults, mut count) = (Vec::new(), 0);
    for entry in fs::read_dir(kernels.join("cuda")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.ends_with(".cu") {
            continue;
        }
        if !page.contains(&format!("## {name}\n")) {
            faults.push(name.clone());
        }
        let text = fs::read_to_string(&path).unwrap();
        for rest in text.split("extern \"C\" __global__ void ").skip(1) {
            let kernel: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            count += 1;
            // A macro makes the name, or the rest of it.
            let is_parameter = kernel.chars().all(|c| c.is_uppercase()) || kernel == "__launch_bounds__";
            let row = if kernel.ends_with('_') {
                format!("| `{kernel}")
            } else {
                format!("| `{kernel}` |")
            };
            if !is_parameter && !page.contains(&row) {
                faults.push(format!("{name}: {kernel}"));
            }
        }
    }
    assert!(count > 100, "{count} kernels");
    assert_none(
        &faults,
        "crates/ft-kernels/REGISTERS.md lacks a kernel: run tools/registers.py",
    );
}
