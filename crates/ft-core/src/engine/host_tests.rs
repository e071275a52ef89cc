//! Ranks of a machine that read frozen weights from the same files: the bits of one rank, one file of each kind, and the error of
//! the rank that writes.

use super::ActiveSet;
use super::ranks_tests::{Case, FULL, batches, engine_of, spec_of};
use super::sharded_tests::train_blocks;
use super::step::Engine;
use crate::base::files;
use crate::comm::threads;
use crate::comm::{Collective, SingleRank};
use crate::formats::weights::Weights;
use crate::ops::Dtype;
use crate::ops::transfer::HostMemory;
use crate::quant::Format;
use crate::source::disk::{self, DiskWeights, SourceWriter};
use crate::source::{StoragePolicy, TrainableStore, UploadedWeights};
use candle_core::Device;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const BF16: Case = Case {
    dtype: Dtype::Bf16,
    ..FULL
};
const NF4: Case = Case {
    format: Some(Format::Nf4 { double: true }),
    ..BF16
};

/// The directory of a rank.
fn of_rank(dir: &Path, rank: usize) -> PathBuf {
    dir.join(format!("rank-{rank}"))
}

/// An engine whose weights are in the file `model` in `dir`, with other files in the directory of a rank.
fn on_disk(case: Case, comm: Arc<dyn Collective>, dir: &Path) -> (Engine, ActiveSet) {
    let spec = spec_of(case);
    let mut storage = StoragePolicy::dense(case.dtype);
    for p in spec.params().iter().filter(|p| p.name.contains("proj.weight")) {
        storage.set(p.name.clone(), case.format);
    }
    let own = of_rank(dir, comm.world().rank);
    let (writer, own) = if comm.world().size > 1 {
        SourceWriter::of_machine(comm.clone(), &own).unwrap()
    } else {
        (SourceWriter::default(), own)
    };
    writer.write(|| files::create_dir_all(&own)).unwrap();
    let options = disk::DiskOptions {
        dtype: case.dtype,
        storage,
        device: Device::Cpu,
        trained: own.join("trained"),
        codes: own.join("codes.safetensors"),
        head: spec.head_name().to_string(),
        head_rows: None,
    };
    let weights = Weights::open_file(&dir.join("model")).unwrap();
    let disk = DiskWeights::open_written(spec.params(), weights, options, writer).unwrap();
    let source: Arc<dyn TrainableStore> = if case.uploaded {
        Arc::new(UploadedWeights::new(Arc::new(disk), spec.head_name(), HostMemory::Reused, &Device::Cpu).unwrap())
    } else {
        Arc::new(disk)
    };
    engine_of(case, comm, source)
}

/// A new directory with the weights of a case.
fn model(case: Case) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let params = spec_of(case).params();
    disk::write_random(&dir.path().join("model"), &params, 1, 0.02, 1.0, case.dtype).unwrap();
    dir
}

fn names(dir: &Path) -> Vec<String> {
    let Ok(found) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut names: Vec<String> = found
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    names
}

/// Blocks with switches, and a block that was trained before.
#[test]
fn shared_files_have_the_bits_of_one_rank_and_are_written_once() {
    let int8 = Case {
        dtype: Dtype::F32,
        format: Some(Format::Int8 { group: 0 }),
        ..FULL
    };
    let uploaded = Case { uploaded: true, ..NF4 };
    let cases: [(Case, &[&[&str]]); 4] = [
        (BF16, &[&["a", "a", "a"]]),
        (NF4, &[&["a", "a"], &["a", "b", "b"]]),
        (int8, &[&["a", "a"]]),
        (uploaded, &[&["a", "a"]]),
    ];
    for (case, jobs) in cases {
        let alone = model(case);
        let want = train_blocks(on_disk(case, Arc::new(SingleRank::default()), alone.path()).0).unwrap();
        let params = spec_of(case).params();
        let trained = |name: &&str| name.contains("embed") || name.contains("layers.");
        let trained = params.iter().map(|p| &*p.name).filter(trained);
        let mut trained: Vec<String> = trained.map(|name| format!("{name}.safetensors")).collect();
        trained.sort();
        for hosts in jobs {
            let dir = model(case);
            let found = threads::run_on(hosts, |comm| train_blocks(on_disk(case, comm, dir.path()).0).unwrap());
            assert!(found[0] == want, "{:?} {:?} on {hosts:?}", case.dtype, case.format);
            for found in &found[1..] {
                assert!(want.starts_with(found) && found.len() > 8, "{hosts:?}");
            }
            for (rank, host) in hosts.iter().enumerate() {
                let own = of_rank(dir.path(), rank);
                if hosts.iter().position(|other| other == host) < Some(rank) {
                    assert!(!own.exists(), "rank {rank} of {hosts:?} writes");
                    continue;
                }
                let codes = ["codes.safetensors", "trained"];
                let expected = if case.format.is_some() { &codes[..] } else { &codes[1..] };
                assert_eq!(names(&own), expected, "rank {rank} of {hosts:?}");
                assert_eq!(names(&own.join("trained")), trained, "rank {rank} of {hosts:?}");
            }
        }
    }
}

#[test]
fn an_error_of_the_rank_that_writes_is_the_error_of_all() {
    let case = Case {
        part: "layers.1.",
        ..NF4
    };
    let dir = model(case);
    let found = threads::run(3, |comm| {
        let (mut engine, active) = on_disk(case, comm.clone(), dir.path());
        engine.switch(&active, |_| true).unwrap();
        engine.step(1, &batches(3, 1), &active, 1e-3).unwrap();
        if comm.world().is_root() {
            // A file in the place of its directory.
            fs::remove_dir_all(of_rank(dir.path(), 0)).unwrap();
            fs::write(of_rank(dir.path(), 0), "").unwrap();
        }
        let other = engine.store.params().iter().map(|p| p.name.to_string());
        let other = ActiveSet::new(other.filter(|name| name.contains("layers.2.")));
        let error = engine.switch(&other, |_| true).unwrap_err().to_string();
        comm.fail(1, error.clone());
        error
    });
    assert!(
        !found[0].contains("rank 0") && found[0].contains("trained"),
        "{}",
        found[0]
    );
    // The others get its first line.
    let first = found[0].lines().next().unwrap();
    for error in &found[1..] {
        assert!(error.contains(&format!("rank 0 (host here): {first}")), "{error}");
    }
}
