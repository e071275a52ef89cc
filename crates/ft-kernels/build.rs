//! Build script. With the feature `cuda`, it compiles every `cuda/*.cu` to a fat binary with machine code for each
//! architecture, and PTX of the lowest one, which the driver compiles for any newer GPU. Without the feature it
//! does nothing.
//!
//! A file whose text has the word `bf16` is compiled twice, the second time with `FT_F16` as the module `NAME_f16`
//! (`cuda/common.cuh`).
//!
//! `FT_CUDA_ARCHS` (such as `90` or `80,86`) replaces the architectures; the sources need 80 or higher.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::{env, fs, thread};

const ARCHS: &str = "80,86,89,90";
/// Files that have no module of f16: products of 8-bit operands.
const NO_F16: [&str; 1] = ["eight_bit"];
const SETTINGS: [&str; 6] = ["NVCC", "PATH", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "FT_CUDA_ARCHS"];

fn main() -> ExitCode {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    for name in SETTINGS {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo gave no OUT_DIR")?);
    let nvcc = nvcc()?;
    let archs = archs()?;
    let sources = sources()?;
    let mut modules = Vec::new();
    for source in &sources {
        modules.push(Module { source, f16: false });
        let text = fs::read_to_string(source).map_err(|e| format!("{}: {e}", source.display()))?;
        let halves = text
            .split(|c: char| !c.is_ascii_alphanumeric())
            .any(|word| word == "bf16");
        if halves && !NO_F16.contains(&stem(source).as_str()) {
            modules.push(Module { source, f16: true });
        }
    }
    // Compiles several files in parallel; cargo passes the number of jobs.
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let todo = Mutex::new(modules.iter());
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, modules.len().max(1)) {
            scope.spawn(|| {
                while let Some(module) = lock(&todo).next() {
                    if let Err(e) = compile(&nvcc, &archs, module, &out) {
                        lock(&failed).push(e);
                    }
                }
            });
        }
    });
    let failed = lock(&failed);
    if !failed.is_empty() {
        return Err(failed.join("\n"));
    }
    let mut list = String::from("/// Name and fat binary of each module.\npub static MODULES: &[(&str, &[u8])] = &[\n");
    for module in &modules {
        let name = module.name();
        list += &format!(
            "    ({name:?}, include_bytes!({:?})),\n",
            out.join(format!("{name}.fatbin"))
        );
    }
    list += "];\n/// Version of the toolkit, as 1000 major + 10 minor.\n";
    list += &format!("pub const TOOLKIT: Option<i32> = {:?};\n", toolkit(&nvcc));
    fs::write(out.join("modules.rs"), list).map_err(|e| format!("the list of modules: {e}"))
}

/// A source file and the type of its 16-bit numbers.
struct Module<'a> {
    source: &'a Path,
    f16: bool,
}

impl Module<'_> {
    fn name(&self) -> String {
        stem(self.source) + if self.f16 { "_f16" } else { "" }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn stem(source: &Path) -> String {
    source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn sources() -> Result<Vec<PathBuf>, String> {
    let folder = fs::read_dir("cuda").map_err(|e| format!("kernels/cuda: {e}"))?;
    let mut found: Vec<PathBuf> = folder
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .collect();
    found.sort();
    Ok(found)
}

fn archs() -> Result<Vec<u32>, String> {
    let text = env::var("FT_CUDA_ARCHS").unwrap_or_else(|_| ARCHS.into());
    let archs: Option<Vec<u32>> = text.split(',').map(|a| a.trim().parse().ok()).collect();
    match archs {
        Some(archs) if !archs.is_empty() && archs.iter().all(|a| *a >= 80) => Ok(archs),
        _ => Err(format!(
            "FT_CUDA_ARCHS: found {text:?}, expected numbers from 80 on, such as {ARCHS}"
        )),
    }
}

/// Finds nvcc in the places of candle's build script, in the same order, so that both use the same toolkit.
fn nvcc() -> Result<PathBuf, String> {
    let exe = if cfg!(windows) { "nvcc.exe" } else { "nvcc" };
    let named = env::var_os("NVCC").map(PathBuf::from);
    let in_path: Option<Vec<PathBuf>> =
        env::var_os("PATH").map(|p| env::split_paths(&p).map(|d| d.join(exe)).collect());
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(env::var_os)
        .map(PathBuf::from);
    let usual = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"].map(PathBuf::from);
    named
        .into_iter()
        .chain(in_path.unwrap_or_default())
        .chain(homes.chain(usual).map(|home| home.join("bin").join(exe)))
        .find(|path| path.is_file())
        .ok_or_else(|| {
            "the feature `cuda` needs nvcc of the CUDA toolkit: set CUDA_HOME, or build without the feature".into()
        })
}

/// Parses the line `Cuda compilation tools, release 13.0, ...`.
fn toolkit(nvcc: &Path) -> Option<i32> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (major, rest) = text.split_once("release ")?.1.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some(1000 * major.parse::<i32>().ok()? + 10 * minor.parse::<i32>().ok()?)
}

fn compile(nvcc: &Path, archs: &[u32], module: &Module, out: &Path) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3"]);
    for arch in archs {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    let lowest = archs.iter().min().copied().unwrap_or(80);
    command.arg(format!("-gencode=arch=compute_{lowest},code=compute_{lowest}"));
    if let Some(compiler) = env::var_os("NVCC_CCBIN") {
        command.arg("-allow-unsupported-compiler").arg("-ccbin").arg(compiler);
    }
    if module.f16 {
        command.arg("-DFT_F16");
    }
    command
        .arg("-o")
        .arg(out.join(format!("{}.fatbin", module.name())))
        .arg(module.source);
    let output = command.output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "nvcc failed on {} (module {})\n{}{}",
        module.source.display(),
        module.name(),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    ))
}
