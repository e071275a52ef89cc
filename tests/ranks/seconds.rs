//! Seconds of a step over a slow connection: those of `ft plan --link`, if the bytes take most of the time. Real jobs, whose messages
//! go over TCP at a rate that a library sets.

use crate::bench::said;
use crate::disk::{self, Library};
use crate::job;
use crate::memory;
use serde_json::Value;
use std::fs;
use std::sync::OnceLock;

/// Seconds of the bytes of a step.
const SECONDS: f64 = 3.0;
const STEPS: usize = 4;

#[test]
fn a_step_over_a_slow_connection_takes_the_seconds_of_its_plan() {
    static BUILT: Library = OnceLock::new();
    let Some(library) = disk::compiled(&BUILT, "tests/ranks/slow.c") else {
        return;
    };
    let cases: [(usize, &[&str]); 2] = [
        (2, &["distributed.weights=replicated", "tune.method=full"]),
        (
            2,
            &["distributed.weights=sharded", "tune.method=full", "model.dtype=bf16"],
        ),
    ];
    for (size, settings) in cases {
        let bench = memory::bench_of(256);
        let base = [
            "model.init=random",
            "train.max_steps=4",
            "train.save_steps=0",
            "train.batch_size=1",
            "train.gradient_accumulation_steps=4",
            "data.max_length=32",
            "train.output_dir=out",
        ];
        let arguments = [&base[..], settings].concat();
        let ranks = size.to_string();
        let plan = ["plan", "--recipe", "r.toml", "--json", "--ranks", &ranks];
        let planned = bench.ft(&[&plan[..], &arguments].concat());
        let plan: Value = serde_json::from_slice(&planned.stdout).unwrap_or_else(|e| panic!("{e}: {}", said(&planned)));
        // A rate at which the bytes take this long.
        let rate = plan["sent_bytes"].as_f64().unwrap() / SECONDS;
        let link = format!("--link={:.6}MB", rate / 1e6);
        let over = bench.ft(&[
            &["plan", "--recipe", "r.toml", "--ranks", &ranks, &link][..],
            &arguments,
        ]
        .concat());
        let want = seconds_in(&said(&over));
        let rate = rate.to_string();
        let step = || {
            let mut command = job::mpirun(&bench, &vec![arguments.clone(); size]);
            command
                .env("OMPI_MCA_btl", "self,tcp")
                .env("OMPI_MCA_btl_tcp_if_include", "lo")
                .env("LD_PRELOAD", library)
                .env("FT_SLOW_BYTES", &rate);
            let out = job::wait(job::begin(command));
            assert!(out.status.success(), "{}", said(&out));
            let steps = bench.steps("out");
            assert_eq!(steps.len(), STEPS);
            fs::remove_dir_all(bench.path("out")).unwrap();
            // The first step begins with other layers.
            let times = steps.iter().map(|step| step["time"].as_f64().unwrap());
            let times: Vec<f64> = times.collect();
            times[1..]
                .windows(2)
                .map(|two| two[1] - two[0])
                .fold(f64::MAX, f64::min)
        };
        // What else runs on the machine makes steps longer, never shorter.
        let mut found = step();
        for _ in 0..2 {
            if found > 1.1 * want {
                found = found.min(step());
            }
        }
        println!("{size} ranks, {settings:?}: {found:.3} s a step, {want:.3} s planned");
        let ratio = found / want;
        assert!((0.95..1.1).contains(&ratio), "{size} ranks, {settings:?}: {ratio:.3}");
    }
}

/// The seconds of a step in `over 10Gb: at least 1.500 s of a step`.
fn seconds_in(text: &str) -> f64 {
    let (_, rest) = text.split_once(": at least ").unwrap_or_else(|| panic!("{text}"));
    rest.split(' ').next().unwrap().parse().unwrap()
}
