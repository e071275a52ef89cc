//! Tests of the checkpoint of another run from which a run goes on, until it is in the directory of that run; and of the forecast of
//! the disk space.

use super::*;
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::adapters;

/// A run with one checkpoint.
fn run_with(dir: &Path, name: &str, step: u64) -> PathBuf {
    let run = dir.join(name);
    std::fs::create_dir(&run).unwrap();
    save(&run, step)
}

fn save(run: &Path, step: u64) -> PathBuf {
    let path = checkpoint::save(run, step, &json!({}), &[], &mut |_, _, _| Ok(())).unwrap();
    path.canonicalize().unwrap()
}

fn opened(run: &Path, resume: &Resume, overwrite: bool) -> Result<RunDirectory> {
    let resume = resume_of(run, resume)?;
    let options = TrainOptions {
        resume,
        overwrite,
        ..TrainOptions::default()
    };
    open(run, &options, &|_| Ok(())).map(|(directory, _)| directory)
}

/// A run that begins with the checkpoint `from` of another one, in a process that is killed before it has that checkpoint.
fn begun(run: &Path, from: &Path) {
    let mut directory = opened(run, &Resume::From(from.into()), false).unwrap();
    directory.begin();
}

fn resume(run: &Path) -> Resume {
    resume_of(run, &Resume::Newest).unwrap()
}

/// Row C1.
#[test]
fn a_refused_resume_from_elsewhere_changes_no_later_resume() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (run_with(dir.path(), "a", 10), run_with(dir.path(), "b", 30));
    let run = dir.path().join("run");
    // Refused after the directory was opened.
    drop(opened(&run, &Resume::From(a.clone()), false).unwrap());
    assert!(!run.exists(), "a new directory has no trace");
    begun(&run, &a);
    assert_eq!(resume(&run), Resume::From(a.clone()));
    drop(opened(&run, &Resume::From(b.clone()), false).unwrap());
    assert_eq!(resume(&run), Resume::From(a.clone()));
    // A run that begins at its start is not turned into another one either.
    let plain = dir.path().join("plain");
    opened(&plain, &Resume::No, false).unwrap().begin();
    drop(opened(&plain, &Resume::From(b.clone()), false).unwrap());
    assert_eq!(resume(&plain), Resume::Newest);
    begun(&run, &b);
    assert_eq!(resume(&run), Resume::From(b));
}

/// Row C1.
#[test]
fn a_run_whose_removal_is_interrupted_does_not_go_on_from_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let a = run_with(dir.path(), "a", 10);
    let run = dir.path().join("run");
    begun(&run, &a);
    // The removal ends here: there is no other name for what ft did not write.
    std::fs::create_dir_all(run.join("final/mine")).unwrap();
    std::fs::write(run.join("final.left"), "").unwrap();
    (2..1000).for_each(|n| std::fs::write(run.join(format!("final.left-{n}")), "").unwrap());
    let e = opened(&run, &Resume::No, true).map(drop).unwrap_err().to_string();
    assert!(e.contains("too many earlier directories"), "{e}");
    assert_eq!(resume(&run), Resume::Newest);
}

/// Row C1.
#[test]
fn a_checkpoint_that_was_brought_for_one_run_does_not_count_for_another() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (run_with(dir.path(), "a", 20), run_with(dir.path(), "b", 30));
    let run = dir.path().join("run");
    let names = |run: &Path| -> Vec<u64> {
        checkpoint::list(run)
            .unwrap()
            .into_iter()
            .map(|(step, _)| step)
            .collect()
    };
    begun(&run, &a);
    // The one of the best evaluation of `a`.
    save(&run, 10);
    begun(&run, &a);
    assert_eq!(names(&run), [10], "the same run goes on");
    let mut directory = opened(&run, &Resume::From(b.clone()), false).unwrap();
    directory.begin();
    assert!(names(&run).is_empty() && run.join("checkpoint-10.left").exists());
    let said = directory.notes.join("\n");
    assert!(
        said.contains("checkpoints from another run were set aside: checkpoint-10.left"),
        "{said}"
    );
    drop(directory);
    assert_eq!(resume(&run), Resume::From(b.clone()));
    // One of the same step as the awaited one.
    begun(&run, &a);
    save(&run, 30);
    begun(&run, &b);
    assert_eq!(resume(&run), Resume::From(b));
}

/// The other parts of a multimodal model are in `final/` too.
#[test]
fn the_forecast_of_disk_space_counts_all_that_final_has() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/goldens/families/gemma3");
    let without_weights = tempfile::tempdir().unwrap();
    std::fs::copy(golden.join("config.json"), without_weights.path().join("config.json")).unwrap();
    let needed = |model: &Path, method: &str| {
        let text = format!(
            "[model]\npath = {model:?}\ndtype = \"f32\"\n[tune]\nmethod = \"{method}\"\n[data]\ntrain = \"rows.jsonl\"\n"
        );
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        let model = ModelFiles::of_recipe(&recipe).unwrap();
        let adapters = adapters::of(&recipe, &model.spec).unwrap();
        let params = model.spec.params();
        let schedule = ActiveSchedule::new(&recipe, &model.spec, &params, &adapters).unwrap();
        let size = CheckpointSize::new(&recipe, &schedule, 1, &params, &adapters.adapters);
        space_needed(&recipe, &model, &size, Placement::Device)
    };
    let others = hf::bytes_of_other_parts(&golden, StoredDtype::F32);
    assert!(others > 0);
    assert_eq!(needed(&golden, "full"), needed(without_weights.path(), "full") + others);
    assert_eq!(needed(&golden, "lora"), needed(without_weights.path(), "lora"));
}
