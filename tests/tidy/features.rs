//! What the default build contains: no MPI and no CUDA.

use super::root;
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
fn the_default_build_has_no_mpi() {
    let has = |tree: &str, name: &str| tree.lines().any(|line| line.starts_with(&format!("{name} v")));
    let default = crates(&[]);
    assert!(has(&default, "candle-core"));
    for name in ["mpi", "mpi-sys", "bindgen", "cudarc"] {
        assert!(!has(&default, name), "{name}");
    }
    assert!(has(&crates(&["--features", "mpi"]), "mpi"));
}
