//! The device itself: its pool, failed kernels, page-locked memory. Settings of a driver hold for a process, so most
//! tests run in a process of their own.

use crate::support::{flat, gpu};
use candle_core::{DType, Device, Tensor};
use ft::ops::device::{self, limit, memory, open, out_of_memory};
use ft::ops::transfer::{Copier, HostMemory};
use ft::ops::update;
use std::env;
use std::process::Command;

const CHILD: &str = "FT_GPU_CHILD";

/// True in a process of its own with these environment variables; elsewhere starts that process. `soft`: only on the driver of
/// `tools/soft-cuda`, which has these settings.
fn in_child(name: &str, settings: &[(&str, &str)], soft: bool) -> bool {
    if env::var(CHILD).is_ok_and(|child| child == name) {
        return true;
    }
    if gpu().is_none() {
        return false;
    }
    if soft && device::gpus().unwrap()[0].name != "software CUDA driver" {
        eprintln!("skipped: on the software driver only");
        return false;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", &format!("device::{name}"), "--nocapture"]);
    let out = command
        .env(CHILD, name)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(String::from_utf8_lossy(&out.stdout).contains("1 passed"));
    false
}

/// As `in_child`; returns the device in that process.
fn alone(name: &str, settings: &[(&str, &str)], soft: bool) -> Option<Device> {
    in_child(name, settings, soft).then(|| open("cuda:0").unwrap().device)
}

/// A tensor of so many MiB.
fn tensor(mib: usize, device: &Device) -> ft::base::Result<Tensor> {
    update::zeros(mib << 18, DType::F32, device)
}

#[test]
fn a_process_has_one_device() {
    let Some(gpu) = gpu() else { return };
    assert!(open("cuda:0").unwrap().device.same_device(&gpu.device));
    assert!(open("cuda:99").is_err());
}

#[test]
fn a_gpu_that_is_too_old_is_refused_and_auto_uses_the_cpu() {
    let name = "a_gpu_that_is_too_old_is_refused_and_auto_uses_the_cpu";
    if !in_child(name, &[("SOFT_CUDA_SM", "75"), ("SOFT_CUDA_DEVICES", "2")], true) {
        return;
    }
    let old = "compute capability 7.5 is too old";
    let e = open("cuda:1").err().unwrap().to_string();
    assert!(e.contains("cuda:1") && e.contains(old), "{e}");
    let opened = open("auto").unwrap();
    let note = opened.note.unwrap();
    assert!(opened.device.is_cpu(), "{note}");
    assert!(
        note.contains("cuda:0") && note.contains("cuda:1") && note.contains(old),
        "{note}"
    );
}

#[test]
fn zeros_are_zeros() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::F32, DType::BF16, DType::U32] {
        let t = update::zeros((3, 5), dtype, &gpu.device).unwrap();
        assert_eq!((t.dims(), t.dtype()), (&[3, 5][..], dtype));
        assert!(flat(&t).iter().all(|x| *x == 0.0));
    }
    assert_eq!(update::zeros((0, 5), DType::F32, &gpu.device).unwrap().elem_count(), 0);
}

#[test]
fn a_fragmented_pool_is_trimmed_and_a_full_one_says_what_it_has() {
    let name = "a_fragmented_pool_is_trimmed_and_a_full_one_says_what_it_has";
    let Some(device) = alone(name, &[("SOFT_CUDA_FRAGMENTED", "1")], false) else {
        return;
    };
    // The pool has room for 128 MiB.
    limit(&device, 64 << 20).unwrap();
    drop(tensor(60, &device).unwrap());
    let (a, b) = (tensor(40, &device).unwrap(), tensor(44, &device).unwrap());
    assert_eq!(memory(&device).unwrap().unwrap().used, 84 << 20);
    let e = tensor(60, &device).unwrap_err();
    assert!(out_of_memory(&e), "{e:?}");
    let text = e.to_string();
    assert!(
        text.contains("60.0 MiB") && text.contains("84.0 MiB") && text.contains("reserved"),
        "{text}"
    );
    drop((a, b));
    assert!(tensor(60, &device).is_ok());
}

#[test]
fn a_failed_kernel_is_named() {
    let settings = [("SOFT_CUDA_FAIL", "scale_f32"), ("FT_CUDA_SYNC", "1")];
    let Some(device) = alone("a_failed_kernel_is_named", &settings, true) else {
        return;
    };
    let t = tensor(1, &device).unwrap();
    let e = update::scale_assign(&t, 2.0).unwrap_err().to_string();
    assert!(e.contains("`scale_f32`"), "{e}");
}

#[test]
fn without_the_setting_a_later_call_fails() {
    let Some(device) = alone(
        "without_the_setting_a_later_call_fails",
        &[("SOFT_CUDA_FAIL", "scale_f32")],
        true,
    ) else {
        return;
    };
    let t = tensor(1, &device).unwrap();
    update::scale_assign(&t, 2.0).unwrap();
    assert!(update::to_f32_vec(&t).is_err());
}

/// Settings of a short run on the GPU.
const RUN: &str = "train --recipe recipes/quickstart.toml model.device=cuda:0 train.batch_size=1 train.sample_prompts=[] data.eval=[] \
    train.predict_with_generate=false train.logging_steps=1";

/// `ft` with these settings and this variable.
fn ft_with(settings: &str, place: String, more: &[&str], variable: (&str, &str)) -> std::process::Output {
    let built = |name: &str, built: &str| std::env::var(name).unwrap_or_else(|_| built.to_string());
    let mut command = Command::new(built("FT_BIN", env!("CARGO_BIN_EXE_ft")));
    command.args(RUN.split_whitespace().chain(settings.split_whitespace()));
    command.arg(place).args(more).env("NO_COLOR", "1");
    command.current_dir(built("FT_ROOT", env!("CARGO_MANIFEST_DIR")));
    command.env(variable.0, variable.1).output().unwrap()
}

fn on_software_driver() -> bool {
    let soft = gpu().is_some() && device::gpus().unwrap()[0].name == "software CUDA driver";
    if !soft {
        eprintln!("skipped: on the software driver only");
    }
    soft
}

/// The system refuses to page-lock host memory: the run says so once, and goes on.
#[test]
fn memory_that_cannot_be_page_locked_is_a_warning() {
    if !on_software_driver() {
        return;
    }
    let said = |refuse: &str| {
        let dir = tempfile::tempdir().unwrap();
        let place = format!("train.output_dir={}", dir.path().join("run").display());
        let settings = "tune.method=lora memory.tier=host train.max_steps=2 train.save_steps=0";
        let out = ft_with(settings, place, &[], ("SOFT_CUDA_REFUSE_LOCK", refuse));
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{said}");
        said
    };
    let warned = said("1");
    assert_eq!(warned.matches("refuses to page-lock").count(), 1, "{warned}");
    assert!(!said("0").contains("page-lock"));
}

/// Row S6: from the N-th kernel launch on, the device returns an error. Nothing after it is saved, and the run resumes from its
/// last checkpoint.
#[test]
fn a_lost_device_ends_the_run_and_its_last_checkpoint_goes_on() {
    if !on_software_driver() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let count = dir.path().join("count");
    let train = |run: &str, more: &[&str], variable: (&str, &str)| {
        let place = format!("train.output_dir={}", dir.path().join(run).display());
        let settings = "tune.method=full train.max_steps=4 train.save_steps=1 train.save_total_limit=9";
        ft_with(settings, place, more, variable)
    };
    let said = |out: &std::process::Output| String::from_utf8_lossy(&out.stderr).into_owned();
    let whole = train("whole", &[], ("SOFT_CUDA_COUNT", count.to_str().unwrap()));
    assert!(whole.status.success(), "{}", said(&whole));
    let text = std::fs::read_to_string(&count).unwrap();
    let number = |line: &str| {
        let calls = line.strip_prefix("launch (blocks)\t")?.split('\t').nth(1)?;
        calls.parse::<usize>().ok()
    };
    let launches: usize = text.lines().filter_map(number).sum();
    let at = (launches * 7 / 10).to_string();
    let lost = train("run", &[], ("SOFT_CUDA_LOST", &at));
    let text = said(&lost);
    assert_eq!(lost.status.code(), Some(1), "{at} of {launches}\n{text}");
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let there = |step: usize| dir.path().join(format!("run/checkpoint-{step}")).exists();
    assert!(there(1) && !there(4) && !dir.path().join("run/final").exists());
    let last = (1..4).filter(|step| there(*step)).max().unwrap();
    for part in [
        "error: the GPU failed\n  --> cuda:0, software CUDA driver\n",
        "ILLEGAL_ADDRESS",
        &format!("run/recipe.toml --resume` continues after step {last}"),
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    for step in 1..=last {
        let name = format!("checkpoint-{step}/weights.safetensors");
        assert!(read(&format!("run/{name}")) == read(&format!("whole/{name}")), "{name}");
    }
    let resumed = train("run", &["--resume"], ("SOFT_CUDA_LOST", "0"));
    assert!(resumed.status.success(), "{}", said(&resumed));
    for name in ["final/model.safetensors", "checkpoint-4/weights.safetensors"] {
        assert!(read(&format!("run/{name}")) == read(&format!("whole/{name}")), "{name}");
    }
}

#[test]
fn memory_that_cannot_be_page_locked_is_counted_once() {
    let name = "memory_that_cannot_be_page_locked_is_counted_once";
    let Some(device) = alone(name, &[("SOFT_CUDA_REFUSE_LOCK", "1")], true) else {
        return;
    };
    let copier = Copier::new(&device).unwrap();
    let host = ft::ops::oracle::random(50_000, 1);
    for refused in [200_000, 0] {
        let there = copier.receive(copier.send(&host, HostMemory::Stable).unwrap()).unwrap();
        assert_eq!(flat(&there), flat(&host));
        assert_eq!(copier.times().unwrap().unwrap().refused, refused);
    }
    copier.forget(&host).unwrap();
    copier.receive(copier.send(&host, HostMemory::Stable).unwrap()).unwrap();
    assert_eq!(copier.times().unwrap().unwrap().refused, 200_000);
}

#[test]
fn a_gpu_without_memory_pools_is_used() {
    let name = "a_gpu_without_memory_pools_is_used";
    let Some(device) = alone(name, &[("SOFT_CUDA_POOLS", "0")], true) else {
        return;
    };
    limit(&device, 1 << 30).unwrap();
    let t = tensor(2, &device).unwrap();
    update::scale_assign(&t, 2.0).unwrap();
    assert!(flat(&t).iter().all(|x| *x == 0.0));
    assert!(memory(&device).unwrap().unwrap().used >= 2 << 20);
}
