//! `ft doctor`: checks the abilities of this machine and this build; each line is ok, warn or fail, with a fix.

use super::out::{out, out_text};
use crate::base::{Result, files, memory, progress, speed, units};
use crate::hub::{HubSettings, HubStatus};
use crate::ops::CpuBackend;
use crate::ops::device::{self, GpuProperties};
use crate::report;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Check this machine: processor, memory, disk, hub
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft doctor
  ft doctor --json                                   one JSON object per line

The last line is the verdict. Exit code 1 if a check fails. The hub is checked unless HF_HUB_OFFLINE is set, for at
most 3 seconds; the disk is measured with a file of at most 64 MiB that is removed.")]
pub struct Args {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckLevel {
    Ok,
    Warn,
    Fail,
}

impl CheckLevel {
    fn name(self) -> &'static str {
        match self {
            CheckLevel::Ok => "ok",
            CheckLevel::Warn => "warn",
            CheckLevel::Fail => "fail",
        }
    }
}

#[derive(Debug)]
struct CheckLine {
    level: CheckLevel,
    name: &'static str,
    value: String,
    fix: Option<String>,
    /// The numbers in `value`, for `--json`.
    data: Value,
}

impl CheckLine {
    fn data(mut self, data: Value) -> Self {
        self.data = data;
        self
    }
}

fn ok(name: &'static str, value: impl Into<String>) -> CheckLine {
    CheckLine {
        level: CheckLevel::Ok,
        name,
        value: value.into(),
        fix: None,
        data: Value::Null,
    }
}

fn not_ok(level: CheckLevel, name: &'static str, value: impl Into<String>, fix: &str) -> CheckLine {
    CheckLine {
        level,
        name,
        value: value.into(),
        fix: Some(fix.into()),
        data: Value::Null,
    }
}

const GIB: u64 = 1 << 30;

pub fn run(args: Args) -> Result<i32> {
    let mut lines = Vec::new();
    examine(&HubSettings::from_env(), &mut |line| {
        show(&line, args.json)?;
        lines.push(line);
        Ok(())
    })?;
    let verdict = verdict(&lines);
    show(&verdict, args.json)?;
    Ok(i32::from(verdict.level == CheckLevel::Fail))
}

fn show(line: &CheckLine, as_json: bool) -> Result<()> {
    if as_json {
        let mut object = json!({"level": line.level.name(), "name": line.name, "value": line.value, "fix": line.fix});
        if !line.data.is_null() {
            object["data"] = line.data.clone();
        }
        return out(object);
    }
    // Column of the value, for wrapped lines.
    const INDENT: usize = 17;
    let room = report::result_width().map_or(usize::MAX, |w| w.saturating_sub(INDENT));
    for (i, part) in report::wrapped(&line.value, room, 0, false).iter().enumerate() {
        match i {
            0 => out(format!("{:<4}  {:<9}  {part}", line.level.name(), line.name))?,
            _ => out(format!("{:INDENT$}{part}", ""))?,
        }
    }
    match &line.fix {
        Some(fix) => out_text(format!("      hint: {fix}")),
        None => Ok(()),
    }
}

/// Passes every line to `tell` as soon as it is known.
fn examine(settings: &HubSettings, tell: &mut dyn FnMut(CheckLine) -> Result<()>) -> Result<()> {
    let report::Cpu { name, cores, features } = report::cpu();
    let environment = report::environment();
    tell(ok("version", version(&environment)))?;
    tell(ok("system", environment["os"].as_str().unwrap_or_default()))?;
    tell(ok(
        "cpu",
        format!(
            "{name}, {cores} cores, computes with {} threads and the {} operations",
            rayon::current_num_threads(),
            CpuBackend::current().name()
        ),
    ))?;
    tell(features_line(&features))?;
    for line in devices() {
        tell(line)?;
    }
    tell(memory_line(memory::available(), memory::total()))?;
    tell(bandwidth())?;
    for line in disk(Path::new(".")) {
        tell(line)?;
    }
    tell(open_files())?;
    tell(ranks())?;
    tell(cache(settings))?;
    tell(hub(settings))
}

/// Summarizes the lines.
fn verdict(lines: &[CheckLine]) -> CheckLine {
    let named = |level| {
        let mut names: Vec<&str> = lines.iter().filter(|l| l.level == level).map(|l| l.name).collect();
        names.dedup();
        names.join(", ")
    };
    let device = lines
        .iter()
        .filter(|l| l.name == "device" && l.level != CheckLevel::Fail);
    let place = match device.filter(|l| l.value.starts_with("cuda:")).count() {
        0 => "on the CPU".to_string(),
        1 => "on the GPU".to_string(),
        n => format!("on one of {n} GPUs"),
    };
    match (named(CheckLevel::Fail), named(CheckLevel::Warn)) {
        (fails, _) if !fails.is_empty() => not_ok(
            CheckLevel::Fail,
            "verdict",
            format!("not ready: fix {fails} first"),
            "see the hints above",
        ),
        (_, warns) if !warns.is_empty() => not_ok(
            CheckLevel::Warn,
            "verdict",
            format!("ready to train {place}; check {warns}"),
            "see the hints above; `ft recipes` lists recipes to start from",
        ),
        _ => ok(
            "verdict",
            format!("ready to train {place}; `ft recipes` lists recipes to start from"),
        ),
    }
}

/// Whether a run can be divided over several ranks.
fn ranks() -> CheckLine {
    #[cfg(feature = "mpi")]
    let mpi = Some(crate::comm::mpi_version());
    #[cfg(not(feature = "mpi"))]
    let mpi = None::<String>;
    #[cfg(feature = "nccl")]
    let (nccl, missing) = match crate::comm::nccl_version() {
        Ok(version) => (Some(version), None),
        Err(e) => (None, Some(e.line())),
    };
    #[cfg(not(feature = "nccl"))]
    let (nccl, missing) = (None::<String>, None::<String>);
    let gpus = match device::identities().map_or(0, |gpus| gpus.len()) {
        0 => String::new(),
        n => format!(", each with a GPU of its own (here {n})"),
    };
    let over = "divides a run over N processes";
    let mut ways = Vec::new();
    ways.extend(
        mpi.as_ref()
            .map(|version| format!("{version}: `ft launch -n N train ...` {over}{gpus}")),
    );
    ways.extend(
        nccl.as_ref().map(|version| {
            format!("NCCL {version}: `torchrun --no-python --nproc-per-node N ft train ...` {over}{gpus}")
        }),
    );
    ways.extend(missing);
    if ways.is_empty() {
        ways.push("one process: this build has no MPI (`--features mpi`) and no NCCL (`--features cuda,nccl`)".into());
    }
    ok("ranks", ways.join("; ")).data(json!({ "mpi": mpi, "nccl": nccl }))
}

fn bandwidth() -> CheckLine {
    let phase = progress::phase("measuring memory", 0, "");
    let threads = rayon::current_num_threads();
    let speed = speed::memory(threads, memory::available().unwrap_or(1 << 30));
    drop(phase);
    let value = format!("reads {}/s with {threads} threads", units::bytes(speed as u64));
    ok("bandwidth", value).data(json!({"bytes_per_second": speed.round(), "threads": threads}))
}

fn version(environment: &Value) -> String {
    let features: Vec<&str> = environment["build"]["features"]
        .as_array()
        .map(|a| a.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    format!("ft {} ({})", env!("CARGO_PKG_VERSION"), features.join(", "))
}

fn features_line(features: &[&str]) -> CheckLine {
    let list = match features {
        [] => "none that ft uses".to_string(),
        some => some.join(" "),
    };
    let vector = features.contains(&"asimd") || (features.contains(&"avx2") && features.contains(&"fma"));
    if vector {
        ok("features", list)
    } else {
        not_ok(
            CheckLevel::Warn,
            "features",
            list,
            "training will be slow on this processor",
        )
    }
}

/// One line for each GPU that this build can use, or the reason for computing on the CPU.
fn devices() -> Vec<CheckLine> {
    let driver = installed_driver();
    if !device::HAS_CUDA {
        return vec![match driver {
            Some(driver) => not_ok(
                CheckLevel::Warn,
                "device",
                format!("cpu (the NVIDIA driver {driver} is installed, but this build does not use it)"),
                &match device::cuda_of(&driver).map(device::version) {
                    Some(cuda) => {
                        format!("build with `cargo build --release --features cuda` and CUDA {cuda} or older")
                    }
                    None => "build with `cargo build --release --features cuda`".into(),
                },
            ),
            None => ok("device", "cpu"),
        }];
    }
    let mut lines: Vec<CheckLine> = device::toolkit()
        .map(|cuda| cuda_line(cuda, driver))
        .into_iter()
        .collect();
    lines.extend(gpus());
    lines
}

/// The CUDA version of this build, and the driver that it needs.
fn cuda_line(cuda: i32, driver: Option<String>) -> CheckLine {
    let needed = device::driver_of(cuda).map_or(String::new(), |first| format!(": needs driver {first} or newer"));
    let here = driver.map_or(String::new(), |driver| format!("; driver {driver} is installed"));
    ok(
        "cuda",
        format!("built with CUDA {}{needed}{here}", device::version(cuda)),
    )
}

/// The version of the kernel module, such as `550.54.15`.
fn installed_driver() -> Option<String> {
    driver_in(&files::read_text(Path::new("/proc/driver/nvidia/version")).ok()?)
}

/// Finds `550.54.15` in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5 ...`.
fn driver_in(text: &str) -> Option<String> {
    let number = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(number).map(String::from)
}

/// The GPUs, or why there are none.
fn gpus() -> Vec<CheckLine> {
    match device::gpus() {
        Err(e) => vec![not_ok(
            CheckLevel::Warn,
            "device",
            format!("cpu ({e})"),
            "check `nvidia-smi`",
        )],
        Ok(gpus) if gpus.is_empty() => vec![not_ok(
            CheckLevel::Warn,
            "device",
            "cpu (no GPU found)",
            "check `nvidia-smi`",
        )],
        Ok(gpus) => gpus.iter().enumerate().flat_map(|(n, gpu)| gpu_lines(n, gpu)).collect(),
    }
}

fn gpu_lines(ordinal: usize, gpu: &GpuProperties) -> Vec<CheckLine> {
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
            .map(|p| not_ok(CheckLevel::Fail, "device", format!("cuda:{ordinal}"), p)),
    );
    lines
}

fn memory_line(available: Option<u64>, total: Option<u64>) -> CheckLine {
    let (Some(available), Some(total)) = (available, total) else {
        return not_ok(
            CheckLevel::Warn,
            "memory",
            "unknown on this system",
            "set `memory.budget` in the recipe",
        );
    };
    let value = format!("{} of {} available", units::bytes(available), units::bytes(total));
    match available {
        0..GIB => not_ok(CheckLevel::Warn, "memory", value, "close other programs before a run"),
        _ => ok("memory", value),
    }
}

fn disk(directory: &Path) -> Vec<CheckLine> {
    let shown = std::path::absolute(directory).unwrap_or_else(|_| directory.to_path_buf());
    let shown = shown.display();
    let space = match files::free_space(directory) {
        Some(free @ ..GIB) => not_ok(
            CheckLevel::Warn,
            "disk",
            format!("{} free at {shown}", units::bytes(free)),
            "free some space, or set `train.output_dir` to another disk",
        ),
        Some(free) => ok("disk", format!("{} free at {shown}", units::bytes(free))),
        None => not_ok(
            CheckLevel::Warn,
            "disk",
            format!("free space at {shown} is unknown"),
            "check it with `df`",
        ),
    };
    // Does not write to a disk that is almost full.
    if files::free_space(directory).is_some_and(|free| free < 256 << 20) {
        return vec![space];
    }
    let phase = progress::phase("measuring the disk", 0, "");
    let measured = speed::disk(directory);
    drop(phase);
    let speed = match measured {
        Ok(speed) => {
            let rate = |x: f64| format!("{}/s", units::bytes(x as u64));
            let value = format!("writes {}, reads {} at {shown}", rate(speed.write), rate(speed.read));
            let data = json!({
                "write_bytes_per_second": speed.write.round(), "read_bytes_per_second": speed.read.round(),
            });
            if speed.write < SLOW {
                not_ok(
                    CheckLevel::Warn,
                    "writable",
                    value,
                    "saving will be slow: set `train.output_dir` to a faster disk",
                )
            } else {
                ok("writable", value)
            }
            .data(data)
        }
        Err(e) => not_ok(
            CheckLevel::Fail,
            "writable",
            format!("cannot write at {shown}: {}", e.what()),
            "change to a writable directory, or set `train.output_dir` to one",
        ),
    };
    vec![space, speed]
}

/// A disk for checkpoints should write at least this many bytes per second.
const SLOW: f64 = 20e6;

/// A sharded model has hundreds of files at most; a few hundred handles are enough.
fn open_files() -> CheckLine {
    let limits = files::read_text(Path::new("/proc/self/limits")).unwrap_or_default();
    let soft = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max open files"))
        .and_then(|l| l.split_whitespace().next().map(str::to_string));
    match soft {
        None => ok("handles", "unknown on this system"),
        Some(n) if n.parse::<u64>().is_ok_and(|n| n < 256) => not_ok(
            CheckLevel::Warn,
            "handles",
            format!("{n} open files"),
            "raise the limit with `ulimit -n 4096`",
        ),
        Some(n) => ok("handles", format!("{n} open files")),
    }
}

fn cache(settings: &HubSettings) -> CheckLine {
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

/// Timeout for the answer of the hub.
const PATIENCE: Duration = Duration::from_secs(3);

fn hub(settings: &HubSettings) -> CheckLine {
    if !cfg!(feature = "hub") {
        return ok("hub", "not in this build: only local model directories");
    }
    let token = if settings.token.is_some() {
        "token set"
    } else {
        "no token"
    };
    let endpoint = if settings.endpoint == HubSettings::default().endpoint {
        ""
    } else {
        ", own endpoint"
    };
    if settings.offline {
        return ok("hub", format!("not checked: HF_HUB_OFFLINE is set; {token}{endpoint}"));
    }
    let phase = progress::phase("checking the hub", 0, "");
    let answer = ask(settings);
    drop(phase);
    match answer {
        HubStatus::Reached(time) => ok(
            "hub",
            format!("responds in {}; {token}{endpoint}", units::duration(time)),
        )
        .data(json!({"seconds": time.as_secs_f64()})),
        HubStatus::Refused => not_ok(
            CheckLevel::Warn,
            "hub",
            format!("rejects the token{endpoint}"),
            "check HF_TOKEN, or unset it for public models",
        ),
        HubStatus::Failed(why) => not_ok(
            CheckLevel::Warn,
            "hub",
            format!("cannot be reached: {why}; {token}{endpoint}"),
            "check the network and HF_ENDPOINT; local model directories work without it",
        ),
    }
}

fn ask(settings: &HubSettings) -> HubStatus {
    #[cfg(feature = "hub")]
    return crate::hub::ask(settings, PATIENCE);
    #[cfg(not(feature = "hub"))]
    {
        let _ = (settings, PATIENCE);
        HubStatus::Failed("not in this build".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_installed_driver_is_compared_with_the_build() {
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 12.2.0\n";
        assert_eq!(driver_in(text).unwrap(), "550.54.15");
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build";
        assert_eq!(driver_in(open).unwrap(), "580.95.05");
        assert_eq!(driver_in("\n580.1"), None);
        let line = cuda_line(12040, driver_in(text)).value;
        assert_eq!(
            line,
            "built with CUDA 12.4: needs driver 550.54.14 or newer; driver 550.54.15 is installed"
        );
        assert_eq!(cuda_line(14000, None).value, "built with CUDA 14.0");
    }

    #[test]
    fn every_line_that_is_not_ok_has_a_fix() {
        let dir = tempfile::tempdir().unwrap();
        let mut lines = Vec::new();
        let settings = HubSettings {
            endpoint: "http://127.0.0.1:9".into(),
            ..HubSettings::default()
        };
        examine(&settings, &mut |line| {
            lines.push(line);
            Ok(())
        })
        .unwrap();
        lines.extend(disk(dir.path()));
        lines.extend(disk(&dir.path().join("not/there")));
        lines.push(features_line(&[]));
        lines.push(memory_line(None, None));
        lines.push(memory_line(Some(1), Some(2)));
        assert!(lines.iter().all(|l| (l.level == CheckLevel::Ok) == l.fix.is_none()));
        assert_eq!(lines.iter().filter(|l| l.level == CheckLevel::Fail).count(), 1);
        let unreachable = lines.iter().find(|l| l.value.contains("cannot be reached"));
        assert!(unreachable.is_some_and(|l| l.level == CheckLevel::Warn), "{lines:#?}");
        assert_eq!(verdict(&lines).level, CheckLevel::Fail);
        lines.retain(|l| l.level != CheckLevel::Fail);
        assert_eq!(verdict(&lines).level, CheckLevel::Warn);
        lines.retain(|l| l.level == CheckLevel::Ok);
        let verdict = verdict(&lines);
        assert!(
            verdict.level == CheckLevel::Ok && verdict.value.starts_with("ready"),
            "{verdict:?}"
        );
        assert!(files::list(dir.path()).unwrap().is_empty(), "the check leaves nothing");
    }
}
