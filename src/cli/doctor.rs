//! `ft doctor`: what this machine and this build can do; each line ok, warn or fail, with a fix.

use super::out::out;
use crate::base::{Result, files, memory, units};
use crate::hub::HubSettings;
use crate::ops::CpuPath;
use crate::ops::device::{self, Gpu};
use crate::report;
use serde_json::{Value, json};
use std::path::Path;

/// Check this machine: processor, memory, disk, cache
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft doctor
  ft doctor --json                                   one JSON object a line

Exit code 1 if a line says fail.")]
pub struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Ok,
    Warn,
    Fail,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        }
    }
}

#[derive(Debug)]
struct Line {
    level: Level,
    name: &'static str,
    value: String,
    fix: Option<String>,
}

fn ok(name: &'static str, value: impl Into<String>) -> Line {
    Line {
        level: Level::Ok,
        name,
        value: value.into(),
        fix: None,
    }
}

fn not_ok(level: Level, name: &'static str, value: impl Into<String>, fix: &str) -> Line {
    Line {
        level,
        name,
        value: value.into(),
        fix: Some(fix.into()),
    }
}

const GIB: u64 = 1 << 30;

pub fn run(args: Args) -> Result<i32> {
    let lines = examine();
    for line in &lines {
        if args.json {
            out(json!({"level": line.level.name(), "name": line.name, "value": line.value, "fix": line.fix}))?;
            continue;
        }
        out(format!("{:<4}  {:<9}  {}", line.level.name(), line.name, line.value))?;
        if let Some(fix) = &line.fix {
            out(format!("      hint: {fix}"))?;
        }
    }
    Ok(i32::from(lines.iter().any(|l| l.level == Level::Fail)))
}

fn examine() -> Vec<Line> {
    let (name, cores, features) = report::cpu();
    let environment = report::environment();
    let mut lines = vec![
        ok("version", version(&environment)),
        ok("system", environment["os"].as_str().unwrap_or_default()),
        ok(
            "cpu",
            format!(
                "{name}, {cores} cores, computing with {} threads and the {} operations",
                rayon::current_num_threads(),
                CpuPath::current().name()
            ),
        ),
    ];
    lines.push(features_line(&features));
    lines.extend(devices());
    lines.push(memory_line(memory::available(), memory::total()));
    lines.extend(disk(Path::new(".")));
    lines.push(open_files());
    let settings = HubSettings::from_env();
    lines.push(cache(&settings));
    lines.push(hub_settings(&settings));
    lines
}

fn version(environment: &Value) -> String {
    let features: Vec<&str> = environment["build"]["features"]
        .as_array()
        .map(|a| a.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    format!("ft {} ({})", env!("CARGO_PKG_VERSION"), features.join(", "))
}

fn features_line(features: &[&str]) -> Line {
    let list = match features {
        [] => "none of those that ft makes use of".to_string(),
        some => some.join(" "),
    };
    let vector = features.contains(&"asimd") || (features.contains(&"avx2") && features.contains(&"fma"));
    match vector {
        true => ok("features", list),
        false => not_ok(Level::Warn, "features", list, "training will be slow on this processor"),
    }
}

/// One line for each GPU that this build can use, or why it computes on the CPU.
fn devices() -> Vec<Line> {
    if !device::HAS_CUDA {
        let driver = Path::new("/proc/driver/nvidia/version").exists();
        return vec![match driver {
            true => not_ok(
                Level::Warn,
                "device",
                "cpu (an NVIDIA driver is there, this build does not use it)",
                "build with `cargo build --release --features cuda`",
            ),
            false => ok("device", "cpu"),
        }];
    }
    match device::gpus() {
        Err(e) => vec![not_ok(
            Level::Warn,
            "device",
            format!("cpu ({e})"),
            "check `nvidia-smi`",
        )],
        Ok(gpus) if gpus.is_empty() => vec![not_ok(
            Level::Warn,
            "device",
            "cpu (no GPU found)",
            "check `nvidia-smi`",
        )],
        Ok(gpus) => gpus.iter().enumerate().flat_map(|(n, gpu)| gpu_lines(n, gpu)).collect(),
    }
}

fn gpu_lines(ordinal: usize, gpu: &Gpu) -> Vec<Line> {
    let mut lines = vec![ok(
        "device",
        format!(
            "cuda:{ordinal}, {}, {} ({} free), compute capability {}.{}, driver for CUDA {}, cuBLAS {}",
            gpu.name,
            units::bytes(gpu.total),
            units::bytes(gpu.free),
            gpu.compute.0,
            gpu.compute.1,
            device::version(gpu.driver),
            gpu.cublas
        ),
    )];
    let problems = gpu.problems(device::toolkit());
    lines.extend(
        problems
            .iter()
            .map(|p| not_ok(Level::Fail, "device", format!("cuda:{ordinal}"), p)),
    );
    lines
}

fn memory_line(available: Option<u64>, total: Option<u64>) -> Line {
    let (Some(available), Some(total)) = (available, total) else {
        return not_ok(
            Level::Warn,
            "memory",
            "this system does not tell",
            "set `memory.budget` in the recipe",
        );
    };
    let value = format!("{} of {} available", units::bytes(available), units::bytes(total));
    match available {
        0..GIB => not_ok(Level::Warn, "memory", value, "close other programs before a run"),
        _ => ok("memory", value),
    }
}

fn disk(directory: &Path) -> Vec<Line> {
    let shown = std::path::absolute(directory).unwrap_or_else(|_| directory.to_path_buf());
    let shown = shown.display();
    let space = match files::free_space(directory) {
        Some(free @ ..GIB) => not_ok(
            Level::Warn,
            "disk",
            format!("{} free at {shown}", units::bytes(free)),
            "free some space, or set `train.output_dir` to another disk",
        ),
        Some(free) => ok("disk", format!("{} free at {shown}", units::bytes(free))),
        None => not_ok(
            Level::Warn,
            "disk",
            format!("free space at {shown} is unknown"),
            "look at it with `df`",
        ),
    };
    // Dropped before its commit: leaves nothing.
    let writable = match files::AtomicFile::create(&directory.join("ft-doctor")) {
        Ok(_) => ok("writable", shown.to_string()),
        Err(_) => not_ok(
            Level::Fail,
            "writable",
            format!("cannot write at {shown}"),
            "go to a directory of yours, or set `train.output_dir` to one",
        ),
    };
    vec![space, writable]
}

/// A sharded model has hundreds of files at most; a few hundred handles are enough.
fn open_files() -> Line {
    let limits = files::read_text(Path::new("/proc/self/limits")).unwrap_or_default();
    let soft = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max open files"))
        .and_then(|l| l.split_whitespace().next().map(str::to_string));
    match soft {
        None => ok("handles", "this system does not tell"),
        Some(n) if n.parse::<u64>().is_ok_and(|n| n < 256) => not_ok(
            Level::Warn,
            "handles",
            format!("{n} open files"),
            "raise it with `ulimit -n 4096`",
        ),
        Some(n) => ok("handles", format!("{n} open files")),
    }
}

fn cache(settings: &HubSettings) -> Line {
    let directory = &settings.cache;
    let models = files::list(directory).unwrap_or_default();
    let models = models
        .iter()
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("models--"))
        })
        .count();
    let free = files::free_space(directory).map_or("unknown".into(), units::bytes);
    ok(
        "cache",
        format!("{} ({models} models, {free} free)", directory.display()),
    )
}

fn hub_settings(settings: &HubSettings) -> Line {
    if !cfg!(feature = "hub") {
        return ok("hub", "not in this build: local model directories only");
    }
    let token = if settings.token.is_some() { "set" } else { "not set" };
    let mode = if settings.offline { "offline" } else { "online" };
    let endpoint = match settings.endpoint == HubSettings::default().endpoint {
        true => "",
        false => ", own endpoint",
    };
    ok("hub", format!("{mode}, token {token}{endpoint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_that_is_not_ok_has_a_fix() {
        let dir = tempfile::tempdir().unwrap();
        let mut lines = examine();
        lines.extend(disk(dir.path()));
        lines.extend(disk(&dir.path().join("not/there")));
        lines.push(features_line(&[]));
        lines.push(memory_line(None, None));
        lines.push(memory_line(Some(1), Some(2)));
        assert!(lines.iter().all(|l| (l.level == Level::Ok) == l.fix.is_none()));
        assert_eq!(lines.iter().filter(|l| l.level == Level::Fail).count(), 1);
        assert!(files::list(dir.path()).unwrap().is_empty(), "the check leaves nothing");
    }
}
