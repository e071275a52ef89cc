//! Limits of the system, odd clocks and odd names: a run works, or is refused with a clear error and leaves nothing.

use crate::bench::{Bench, files, number, said};
use crate::disk::with_clock;
use crate::same::{assert_same, assert_same_lines};
use ft::base::staging::ScratchDirectory;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

const RUN: [&str; 5] = ["train", "--recipe", "r.toml", "train.max_steps=2", "train.save_steps=1"];

/// `ft train` after `limit`, a line of a shell.
fn under(bench: &Bench, limit: &str, run: &str) -> Output {
    let out = format!("train.output_dir={run}");
    let inner = bench.command(&[&RUN[..], &[&out]].concat());
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limit}\nexec \"$0\" \"$@\"")]);
    command.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        command.env(name, value.unwrap());
    }
    command.current_dir(bench.dir.path()).output().unwrap()
}

/// The names in a directory; none if it does not exist.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    id.stdout.trim_ascii() == b"0"
}

/// Rows C3, C12.
/// Row S7, and limits of the process.
#[test]
fn a_run_works_under_limits_or_is_refused() {
    let bench = Bench::new();
    bench.train(&[&RUN[3..], &["train.output_dir=whole"]].concat());
    for (limit, works) in [
        ("ulimit -n 32", true),
        // Too few for the process that renders templates.
        ("ulimit -n 6", false),
        ("ulimit -c 0; ulimit -s 512", true),
        ("ulimit -d 60000", true),
        ("ulimit -v 400000", true),
        ("umask 077", true),
        ("unset HOME XDG_CACHE_HOME FT_CACHE_DIR", true),
        ("export FT_CACHE_DIR=/proc/none", true),
        ("export FT_CACHE_DIR=\"$PWD/r.toml\"", true),
        ("export TMPDIR=/proc/none", true),
        ("export LANG=C LC_ALL=C TERM=", true),
        ("exec <&- >&-", true),
        // Files of at most 64 KiB (blocks of 512 bytes).
        ("trap '' XFSZ; ulimit -f 128", false),
        ("ulimit -f 128", false),
        // Only root can open its own files then.
        ("umask 0777", is_root()),
        ("export RAYON_NUM_THREADS=1; exec taskset -c 0 \"$0\" \"$@\"", true),
    ] {
        let _ = fs::remove_dir_all(bench.path("run"));
        let out = under(&bench, limit, "run");
        assert_eq!(out.status.success(), works, "{limit}\n{}", said(&out));
        if works {
            assert_same_lines(&bench, "whole", "run");
        } else {
            assert!(
                out.status.code() == Some(1) && said(&out).contains("error:"),
                "{limit}\n{}",
                said(&out)
            );
            assert!(!bench.path("run/final").exists(), "{limit}");
        }
    }
}

/// Row S7: with any number of open files a run has the same bits, or ends before its first step.
#[test]
fn any_number_of_open_files_works_or_is_refused_before_the_first_step() {
    let bench = Bench::new();
    bench.train(&[&RUN[3..], &["train.output_dir=whole"]].concat());
    let mut worked = Vec::new();
    for files in [3, 4, 5, 7, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 64] {
        let _ = fs::remove_dir_all(bench.path("run"));
        let out = under(&bench, &format!("ulimit -n {files}"), "run");
        if out.status.success() {
            assert_same_lines(&bench, "whole", "run");
            worked.push(files);
        } else {
            let (code, text) = (out.status.code(), said(&out));
            // With three open files (standard input, output and error) the system cannot load the libraries of the program.
            let is_refused = matches!(code, Some(1 | 2)) && text.contains("error:");
            let is_no_start = files == 3 && code == Some(127) && text.contains("shared libraries");
            assert!(is_refused || is_no_start, "{files}: exit code {code:?}\n{text}");
            let lines = fs::read_to_string(bench.path("run/metrics.jsonl")).unwrap_or_default();
            assert!(!lines.contains("\"loss\""), "{files}\n{text}\n{lines}");
            assert!(!bench.path("run/final").exists(), "{files}\n{text}");
            let left: Vec<String> = [".", "run"]
                .iter()
                .flat_map(|place| names(&bench.path(place)))
                .collect();
            assert!(
                left.iter().all(|name| !name.contains(".tmp-")),
                "{files}: {left:?}\n{text}"
            );
        }
    }
    assert!(worked.contains(&64) && !worked.contains(&4), "{worked:?}");
}

/// Row S7: the system gives the process no huge pages.
#[test]
fn a_run_without_huge_pages_has_the_same_bits() {
    let bench = Bench::new();
    bench.train(&[&RUN[3..], &["train.output_dir=whole"]].concat());
    let mut command = bench.command(&[&RUN[..], &["train.output_dir=run"]].concat());
    // SAFETY: one system call between fork and exec; the setting stays over exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{}", said(&ran));
    assert_same_lines(&bench, "whole", "run");
}

const DAY: f64 = 86_400.0;

/// Asserts that the times in the logs of a run, from these lines on, are at most two days from `seconds`. The clock of the tests jumps
/// by days.
fn assert_times(bench: &Bench, run: &str, from: [usize; 2], seconds: f64) {
    for (log, from) in ["metrics", "events"].iter().zip(from) {
        let lines = bench.lines(&format!("{run}/{log}.jsonl"));
        assert!(lines.len() > from, "{run}: {} lines in {log}", lines.len());
        for line in &lines[from..] {
            let time = number(line, "time");
            // No time is before 1970.
            let is_near = time >= (seconds - 2.0 * DAY).max(0.0) && time <= seconds + 2.0 * DAY;
            assert!(
                is_near,
                "{run}: {log} from {from} on: {line}, the clock shows {seconds}"
            );
        }
    }
}

/// Row S7: a clock in 1970, in 2100, and one that jumps back and forth by days. A resume with a clock that went back by 130 years.
#[test]
fn a_clock_that_jumps_changes_nothing() {
    let bench = Bench::new();
    let (first, later) = (0, 4_102_444_800);
    bench.train(&[&RUN[3..], &["train.output_dir=whole"]].concat());
    let run = |out: &str, seconds: i64, more: &[&str]| {
        let out = format!("train.output_dir={out}");
        let mut command = bench.command(&[&RUN[..], &[&out], more].concat());
        with_clock(&mut command, seconds)?;
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{seconds}\n{}", said(&ran));
        Some(())
    };
    for seconds in [first, later] {
        let name = format!("run-{seconds}");
        if run(&name, seconds, &[]).is_none() {
            return;
        }
        assert_same_lines(&bench, "whole", &name);
        assert_times(&bench, &name, [0, 0], seconds as f64);
    }
    // Equal rates in a longer run.
    let constant = [
        "schedule.name=constant",
        "schedule.warmup_ratio=0",
        "tune.block.switch_every=1",
    ];
    let with = |more: &[&'static str]| [&constant[..], more].concat();
    bench.train(&[&RUN[3..], &with(&["train.max_steps=4", "train.output_dir=longer"])].concat());
    run("back", later, &constant).unwrap();
    let logged = ["metrics", "events"].map(|log| bench.lines(&format!("back/{log}.jsonl")).len());
    run("back", first, &with(&["train.max_steps=4", "--resume"])).unwrap();
    assert_same(&bench, "longer", "back");
    assert_times(&bench, "back", logged, first as f64);
    for command in [
        &["runs", "show", "back"][..],
        &["runs", "list", ".", "--json"],
        &["runs", "verify", "back"],
    ] {
        let out = bench.ft(command);
        assert!(out.status.success(), "{command:?}\n{}", said(&out));
    }
}

/// Row S7: a directory for temporary files that looks a week old, because the clock was wrong, is not removed while its process lives.
#[test]
fn a_scratch_directory_that_looks_old_stays_while_it_is_used() {
    let bench = Bench::new();
    bench.train(&[&RUN[3..], &["train.output_dir=run"]].concat());
    let used = ScratchDirectory::beside(&bench.path("run/checkpoint-2")).unwrap();
    fs::create_dir(used.path().join("model")).unwrap();
    fs::write(used.path().join("model/weights"), "x").unwrap();
    let before = SystemTime::now() - Duration::from_secs(7 * 24 * 60 * 60);
    for name in ["model/weights", "model", "used", ".ft-temporary", "."] {
        let file = fs::File::open(used.path().join(name)).unwrap();
        file.set_modified(before).unwrap();
    }
    let resume = |steps: &str| bench.train(&["--resume", steps, "train.save_steps=1", "train.output_dir=run"]);
    resume("train.max_steps=3");
    assert!(used.path().join("model/weights").exists());
    // Its process has ended: `drop` would remove it.
    let left = used.path().to_path_buf();
    let copy = bench.path("run/checkpoint-1.tmp-7");
    copy_tree(&left, &copy);
    drop(used);
    assert!(!left.exists() && copy.exists());
    resume("train.max_steps=4");
    assert!(!copy.exists(), "{:?}", names(&bench.path("run")));
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for (name, bytes) in files(from) {
        fs::create_dir_all(to.join(&name).parent().unwrap()).unwrap();
        fs::write(to.join(&name), bytes).unwrap();
    }
}

/// Row W6: names of files and directories with spaces, quotes, line breaks, escapes and bytes that are not UTF-8.
#[test]
fn odd_names_work_or_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let bench = Bench::new();
    let not_utf8 = std::ffi::OsStr::from_bytes(b"odd\xff");
    fs::write(bench.path("model").join(not_utf8), "x").unwrap();
    fs::copy(bench.path("rows.jsonl"), bench.path("model/rows.jsonl")).unwrap();
    for name in [
        "a b",
        "a\nb",
        "'\"$(touch x)`touch x`",
        "-q",
        "\u{1b}[2J",
        "é\u{202e}",
        "...",
    ] {
        fs::rename(bench.path("model"), bench.path(name)).unwrap();
        let out = bench.ft(&[
            &RUN[..],
            &[
                &format!("model.path=./{name}"),
                &format!("data.train=./{name}/rows.jsonl"),
                &format!("train.output_dir=./{name}/run"),
            ],
        ]
        .concat());
        assert!(out.status.success(), "{name:?}\n{}", said(&out));
        assert!(!said(&out).contains('\u{1b}'), "{:?}", said(&out));
        assert!(bench.path(name).join("run/final").exists());
        let (run, copy) = (format!("./{name}/run"), format!("./{name}/copy"));
        let result = format!("{run}/final");
        for command in [
            &["runs", "list", &format!("./{name}")][..],
            &["runs", "show", &run],
            &["runs", "verify", &run],
            &["export", &run, "--out", &copy],
            &["generate", "--model", &result, "--prompt", "a", "--max-new-tokens", "1"],
        ] {
            let out = bench.ft(command);
            assert!(out.status.success(), "{name:?} {command:?}\n{}", said(&out));
        }
        assert!(bench.path(name).join("copy").exists() && !bench.path("x").exists());
        fs::remove_dir_all(bench.path(name).join("run")).unwrap();
        fs::remove_dir_all(bench.path(name).join("copy")).unwrap();
        fs::rename(bench.path(name), bench.path("model")).unwrap();
    }
    // Not UTF-8: as the place of the recipe and of all it names; refused as a word on the command line.
    let odd = bench.dir.path().join(std::ffi::OsStr::from_bytes(b"d\xff"));
    fs::create_dir(&odd).unwrap();
    for name in ["model", "rows.jsonl", "r.toml"] {
        fs::rename(bench.path(name), odd.join(name)).unwrap();
    }
    let out = bench
        .command(&RUN)
        .arg("train.output_dir=run")
        .current_dir(&odd)
        .output()
        .unwrap();
    assert!(out.status.success() && odd.join("run/final").exists(), "{}", said(&out));
    let word = std::ffi::OsStr::from_bytes(b"train.output_dir=\xff");
    let out = bench.command(&RUN).arg(word).current_dir(&odd).output().unwrap();
    assert_eq!(out.status.code(), Some(2), "{}", said(&out));
}
