//! The machine and the build, for `environment.json` and `ft doctor`. No user names, no environment variables.

use crate::base::{Result, files, memory};
use serde_json::{Value, json};
use std::path::Path;

/// Processor features that affect speed, with the names of `/proc/cpuinfo`. Those of x86-64, then those of aarch64.
const FEATURES: [&str; 16] = [
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
    "asimdhp",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
];

/// Cores of aarch64 by implementer and part, as in the register MIDR_EL1; Linux has no names for them.
const CORES: [(&str, &str, &str); 12] = [
    ("0x41", "0xd03", "Cortex-A53"),
    ("0x41", "0xd07", "Cortex-A57"),
    ("0x41", "0xd08", "Cortex-A72"),
    ("0x41", "0xd0b", "Cortex-A76"),
    ("0x41", "0xd0c", "Neoverse N1"),
    ("0x41", "0xd40", "Neoverse V1"),
    ("0x41", "0xd49", "Neoverse N2"),
    ("0x41", "0xd4f", "Neoverse V2"),
    ("0x41", "0xd84", "Neoverse V3"),
    ("0x41", "0xd8e", "Neoverse N3"),
    ("0x46", "0x001", "A64FX"),
    ("0xc0", "0xac3", "Ampere-1"),
];

/// The processor of this machine.
pub struct Cpu {
    pub name: String,
    /// Logical cores.
    pub cores: usize,
    /// Those of the features above that it has.
    pub features: Vec<&'static str>,
}

/// Reads the name and the features of the processor.
pub fn cpu() -> Cpu {
    let text = files::read_text(Path::new("/proc/cpuinfo")).unwrap_or_default();
    let (name, mut features) = cpu_in(&text);
    add_detected(&mut features);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    Cpu {
        name: name.unwrap_or_else(|| std::env::consts::ARCH.to_string()),
        cores,
        features,
    }
}

/// Name and features in the text of `/proc/cpuinfo`.
fn cpu_in(text: &str) -> (Option<String>, Vec<&'static str>) {
    let field = |names: &[&str]| {
        text.lines()
            .filter_map(|l| l.split_once(':'))
            .find(|(k, _)| names.contains(&k.trim()))
            .map(|(_, v)| v.trim().to_string())
    };
    let core = || {
        let (implementer, part) = (field(&["CPU implementer"])?, field(&["CPU part"])?);
        let known = CORES.iter().find(|core| core.0 == implementer && core.1 == part);
        Some(known.map_or_else(
            || format!("aarch64, implementer {implementer}, part {part}"),
            |core| core.2.into(),
        ))
    };
    let name = field(&["model name", "Model", "Hardware"]).or_else(core);
    let flags = field(&["flags", "Features"]).unwrap_or_default();
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let has = FEATURES.into_iter().filter(|f| flags.contains(f)).collect();
    (name, has)
}

/// The bits that the kernel passes to the process (`AT_HWCAP`): they are there without `/proc`, and under an emulator.
#[cfg(target_arch = "aarch64")]
fn add_detected(features: &mut Vec<&'static str>) {
    use std::arch::is_aarch64_feature_detected as has;
    let detected = [
        ("asimd", has!("neon")),
        ("asimdhp", has!("fp16")),
        ("asimddp", has!("dotprod")),
        ("bf16", has!("bf16")),
        ("i8mm", has!("i8mm")),
        ("sve", has!("sve")),
        ("sve2", has!("sve2")),
    ];
    *features = detected.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
}

#[cfg(not(target_arch = "aarch64"))]
fn add_detected(_: &mut Vec<&'static str>) {}

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
    let Cpu { name, cores, features } = cpu();
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

#[cfg(test)]
mod tests {
    use super::cpu_in;

    #[test]
    fn processors_have_a_name_and_their_features() {
        let graviton = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd evtstrm aes asimdhp asimddp sve i8mm bf16\n\
                        CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\nCPU revision\t: 1\n";
        let (name, features) = cpu_in(graviton);
        assert_eq!(name.as_deref(), Some("Neoverse V1"));
        assert_eq!(features, ["asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"]);
        let (name, features) = cpu_in("CPU implementer\t: 0x61\nCPU part\t: 0x022\n");
        assert_eq!(name.as_deref(), Some("aarch64, implementer 0x61, part 0x022"));
        assert!(features.is_empty());
        let (name, features) = cpu_in("model name\t: A processor\nflags\t\t: fpu avx2 fma avx512_bf16\n");
        assert_eq!(name.as_deref(), Some("A processor"));
        assert_eq!(features, ["avx2", "fma", "avx512_bf16"]);
        assert_eq!(cpu_in(""), (None, Vec::new()));
    }
}
