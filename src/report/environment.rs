//! The machine and the build, for `environment.json` and `ft doctor`. No user names, no environment variables.

use crate::base::{Result, files, memory};
use serde_json::{Value, json};
use std::path::Path;

/// Processor features that affect speed, with the names of `/proc/cpuinfo`.
const FEATURES: [&str; 10] = [
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
];

/// Name, logical cores, and the features above that this processor has.
pub fn cpu() -> (String, usize, Vec<&'static str>) {
    let text = files::read_text(Path::new("/proc/cpuinfo")).unwrap_or_default();
    let field = |names: &[&str]| {
        text.lines()
            .filter_map(|l| l.split_once(':'))
            .find(|(k, _)| names.contains(&k.trim()))
            .map(|(_, v)| v.trim().to_string())
    };
    let name = field(&["model name", "Model", "Hardware"]).unwrap_or_else(|| std::env::consts::ARCH.to_string());
    let flags = field(&["flags", "Features"]).unwrap_or_default();
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let has = FEATURES.into_iter().filter(|f| flags.contains(f)).collect();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (name, cores, has)
}

/// Features this binary was built with.
fn build_features() -> Vec<&'static str> {
    let mut out = Vec::new();
    if cfg!(feature = "hub") {
        out.push("hub");
    }
    if cfg!(feature = "cuda") {
        out.push("cuda");
    }
    if cfg!(debug_assertions) {
        out.push("debug");
    }
    out
}

fn os() -> String {
    let kernel = files::read_text(Path::new("/proc/sys/kernel/osrelease")).unwrap_or_default();
    format!("{} {} {}", std::env::consts::OS, kernel.trim(), std::env::consts::ARCH)
}

pub fn environment() -> Value {
    let (name, cores, features) = cpu();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "build": { "features": build_features() },
        "cpu": { "name": name, "cores": cores, "features": features },
        "memory": { "total_bytes": memory::total(), "available_bytes": memory::available() },
        "os": os(),
        "threads": rayon::current_num_threads(),
    })
}

/// Writes `environment.json`. `operations`: the instruction set of the CPU operations.
pub fn write_environment(dir: &Path, operations: &str) -> Result<()> {
    let mut all = environment();
    all["cpu"]["operations"] = json!(operations);
    let text = format!("{all:#}\n");
    files::write_atomic(&dir.join("environment.json"), text.as_bytes())
}
