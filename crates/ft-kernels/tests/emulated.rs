//! The kernels on the CPU: each `emulate/tests/NAME.cpp` is compiled with a C++ compiler (`CXX`, else c++, g++ or
//! clang++) and run for several seeds, plain or under the address and undefined-behavior sanitizers. See
//! `emulate/README.md`. A program is compiled again only if a source is newer. Without a C++ compiler the tests print a
//! message and pass.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};
use std::time::SystemTime;

/// Defines tests for each file of `emulate/tests`. `both`: a plain program for every seed, and a sanitized one for one.
/// `short`: runs so shortly that compiling a second program takes longer; the sanitized one takes every seed.
macro_rules! emulated {
    (both { $($both:ident)* } short { $($short:ident)* }) => {
        const NAMES: &[&str] = &[$(stringify!($both),)* $(stringify!($short)),*];
        $(
            mod $both {
                #[test]
                fn plain() {
                    super::check(stringify!($both), false, super::SEEDS);
                }
                #[test]
                fn sanitized() {
                    super::check(stringify!($both), true, &["1"]);
                }
            }
        )*
        $(
            #[test]
            fn $short() {
                check(stringify!($short), true, SEEDS);
            }
        )*
    };
}

emulated! {
    both {
        adafactor
        decode
        delta_rule
        delta_rule_backward
        distill
        eight_bit
        grouped
        optimizer
        rms_norm
        attention_forward
        attention_backward
        attention_f32
        attention_sinks
    }
    short {
        adapters
        altup
        columns
        copies
        cross_entropy
        cross_entropy_parts
        elementwise
        embedding
        expert_pairs
        experts
        glu
        kv_block
        latent
        layer_norm
        pairs
        part
        reduce
        rope
        routing
        sample
        selftest
        short_conv
    }
}

const SEEDS: &[&str] = &["0", "1", "2", "3", "4", "5"];

/// Little optimization: compiling takes longer than running.
const PLAIN: &[&str] = &["-O1"];
/// And lines without variables. Undefined behavior ends the program with a signal: its messages would make a fifth of the
/// time of a compilation.
const SANITIZED: &[&str] = &[
    "-Og",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fsanitize-undefined-trap-on-error",
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("emulate")
}

/// Returns the compiler in `CXX`, or the first usual one that runs.
fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let named = env::var("CXX").ok().filter(|name| !name.is_empty());
        let usual = ["c++", "g++", "clang++"].map(String::from);
        let answers = |name: &String| {
            let output = Command::new(name).arg("--version").output();
            output.is_ok_and(|o| o.status.success())
        };
        named.into_iter().chain(usual).find(answers)
    });
    found.as_deref()
}

fn compile(compiler: &str, source: &Path, flags: &[&str], program: &Path) -> Output {
    Command::new(compiler)
        .args([
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-Wno-unknown-pragmas",
            "-Wno-unused-function",
        ])
        .args(flags)
        .arg("-I")
        .arg(folder())
        .arg("-I")
        .arg(folder().join("include"))
        .arg(source)
        .arg("-o")
        .arg(program)
        .output()
        .unwrap()
}

/// Compiles `emulate/standard.h` once in this process for these flags. A file that includes the returned path first, with
/// the same flags, reads the compiled form that lies beside it.
fn precompiled(compiler: &str, flags: &[&str], scratch: &Path, kind: &str) -> PathBuf {
    static DONE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let header = scratch.join(format!("standard-{kind}.h"));
    let mut done = DONE.lock().unwrap();
    if done.insert(header.clone()) {
        fs::copy(folder().join("standard.h"), &header).unwrap();
        let unfinished = scratch.join(format!("standard-{kind}.new"));
        let built = compile(compiler, &header, &[flags, &["-x", "c++-header"]].concat(), &unfinished);
        assert!(built.status.success(), "standard.h does not compile:\n{}", said(&built));
        fs::rename(&unfinished, header.with_extension("h.gch")).unwrap();
    }
    header
}

/// True if the compiler takes these flags, and has the libraries for them.
fn takes(compiler: &str, flags: &[&str], scratch: &Path) -> bool {
    let source = scratch.join("empty.cpp");
    fs::write(&source, "int main() { return 0; }\n").unwrap();
    compile(compiler, &source, flags, &scratch.join("empty"))
        .status
        .success()
}

/// True if the compiler has the libraries of the sanitizers; some do not.
fn has_sanitizers(compiler: &str, scratch: &Path) -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| takes(compiler, SANITIZED, scratch))
}

/// A local variable without a value has the same wrong bits in every run: a test that reads one fails on every machine, not
/// on some. None for a compiler that cannot do so.
fn pattern(compiler: &str, scratch: &Path) -> Option<&'static str> {
    const FLAG: &str = "-ftrivial-auto-var-init=pattern";
    static FOUND: OnceLock<bool> = OnceLock::new();
    FOUND.get_or_init(|| takes(compiler, &[FLAG], scratch)).then_some(FLAG)
}

/// When a file, or the newest file in a folder, was changed.
fn changed(path: &Path) -> SystemTime {
    if !path.is_dir() {
        return fs::metadata(path).unwrap().modified().unwrap();
    }
    let inside = fs::read_dir(path).unwrap().map(|entry| changed(&entry.unwrap().path()));
    inside.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// With `sanitized` and a compiler without sanitizers: the plain program, if no other test runs it.
fn check(name: &str, sanitized: bool, seeds: &[&str]) {
    let Some(compiler) = compiler() else {
        eprintln!("skipped: no C++ compiler");
        return;
    };
    // Each compiler has its own programs.
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join(compiler.replace('/', "_"));
    fs::create_dir_all(&scratch).unwrap();
    let can_sanitize = has_sanitizers(compiler, &scratch);
    if sanitized && !can_sanitize && seeds != SEEDS {
        eprintln!("skipped: {compiler} has no sanitizers");
        return;
    }
    let (flags, kind) = if sanitized && can_sanitize {
        (SANITIZED, "sanitized")
    } else {
        (PLAIN, "plain")
    };
    let flags: Vec<&str> = flags.iter().copied().chain(pattern(compiler, &scratch)).collect();
    let source = folder().join("tests").join(format!("{name}.cpp"));
    let program = scratch.join(format!("{name}-{kind}"));
    // This program too: the flags are in it.
    let sources = [folder(), folder().join("../cuda"), env::current_exe().unwrap()];
    if !program.exists() || sources.iter().any(|source| changed(source) >= changed(&program)) {
        let unfinished = program.with_extension("new");
        let header = precompiled(compiler, &flags, &scratch, kind);
        let include = ["-include", header.to_str().unwrap()];
        let built = compile(compiler, &source, &[&flags[..], &include].concat(), &unfinished);
        assert!(built.status.success(), "{name} does not compile:\n{}", said(&built));
        fs::rename(&unfinished, &program).unwrap();
    }
    let ran = Command::new(&program)
        .args(seeds)
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .output()
        .unwrap();
    assert!(
        ran.status.success(),
        "{name} failed ({}; after a signal: emulate/README.md compiles it with messages):\n{}",
        ran.status,
        said(&ran)
    );
}

#[test]
fn every_file_is_listed() {
    let listed: BTreeSet<String> = NAMES.iter().map(|name| name.to_string()).collect();
    let files: BTreeSet<String> = fs::read_dir(folder().join("tests"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "cpp"))
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(listed, files);
}
