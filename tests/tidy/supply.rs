//! The supply chain: where dependencies come from, their licenses, what is banned, `unsafe` code, programs that are started.

use super::{CRATES, load, product, root};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::Command;

/// Licenses of dependencies: each allows use in a program under MIT or Apache-2.0.
const LICENSES: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Packages that must not be there, and why.
const BANNED: [(&str, &str); 5] = [
    ("openssl-sys", "TLS is rustls"),
    ("native-tls", "TLS is rustls"),
    ("reqwest", "HTTP is ureq"),
    ("tokio", "ft has threads, no runtime"),
    ("pyo3", "no interpreter"),
];

/// Most packages with more than one version; seven of them come with the features `cuda` and `mpi` only.
const MOST_DOUBLED: usize = 15;

/// True if this license expression can be met by the list.
fn accepted(expression: &str) -> bool {
    let one = |license: &str| {
        let license = license.trim().trim_matches(['(', ')']).trim();
        LICENSES.contains(&license)
    };
    let plain = expression.replace('/', " OR ");
    // AND binds stronger than OR; deeper expressions do not occur.
    if plain.contains('(') {
        plain.split(" AND ").all(|part| part.split(" OR ").any(one))
    } else {
        plain.split(" OR ").any(|part| part.split(" AND ").all(one))
    }
}

/// The lists for `cargo deny` are those above.
#[test]
fn deny_toml_has_the_same_lists() {
    let text = std::fs::read_to_string(root().join("deny.toml")).unwrap();
    let list = |key: &str| -> BTreeSet<String> {
        let (_, rest) = text.split_once(&format!("\n{key} = [")).unwrap();
        let (list, _) = rest.split_once(']').unwrap();
        list.split('"').skip(1).step_by(2).map(str::to_string).collect()
    };
    assert_eq!(list("allow"), LICENSES.iter().map(|l| l.to_string()).collect());
    assert_eq!(list("deny"), BANNED.iter().map(|(name, _)| name.to_string()).collect());
}

/// The packages of a build for this machine with all features, as `cargo metadata` lists them; those of tests too.
fn metadata() -> Value {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let list = |more: &[&str]| {
        Command::new(env!("CARGO"))
            .args(["metadata", "--all-features", "--locked", "--format-version", "1"])
            .args(["--filter-platform", target.as_str()])
            .args(more)
            .current_dir(root())
            .output()
            .unwrap()
    };
    let mut out = list(&["--offline"]);
    if !out.status.success() {
        // A build without `cuda` and `mpi` has not downloaded the packages of these features.
        out = list(&[]);
    }
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.success(),
        "{errors}\n`cargo fetch --locked` downloads what is missing"
    );
    let metadata: Value = serde_json::from_slice(&out.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    for optional in ["bindgen", "candle-kernels", "cudarc", "mpi", "ureq"] {
        assert!(
            packages.iter().any(|p| p["name"] == optional),
            "{optional} is not listed"
        );
    }
    metadata
}

/// Row W7.
#[test]
fn every_dependency_is_accepted() {
    assert!(accepted("MIT OR Apache-2.0") && accepted("MIT/Apache-2.0") && accepted("GPL-3.0 OR MIT"));
    assert!(accepted("(MIT OR Apache-2.0) AND Unicode-3.0") && !accepted("MIT AND GPL-3.0") && !accepted("GPL-3.0"));
    assert!(!accepted("(MIT OR Apache-2.0) AND GPL-3.0") && !accepted(""));
    let metadata = metadata();
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let mut faults = Vec::new();
    let mut registries: BTreeSet<&str> = BTreeSet::new();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        let (name, version) = (text("name"), text("version"));
        versions.entry(name).or_default().insert(version);
        if !accepted(text("license")) {
            faults.push(format!("{name} {version}: license `{}`", text("license")));
        }
        if let Some((_, why)) = BANNED.iter().find(|(banned, _)| *banned == name) {
            faults.push(format!("{name}: {why}"));
        }
        if package["source"].is_null() {
            continue;
        }
        let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
        let entry = lock
            .split("[[package]]\n")
            .find(|e| e.starts_with(&entry))
            .unwrap_or_default();
        registries.extend(entry.lines().find(|line| line.starts_with("source = \"registry+")));
        if !entry.contains("source = \"registry+") || !entry.contains("checksum = \"") {
            faults.push(format!("{name} {version}: no checksum of a registry"));
        }
    }
    if registries.len() != 1 {
        faults.push(format!("packages come from several registries: {registries:?}"));
    }
    let doubled = versions.values().filter(|v| v.len() > 1).count();
    println!("{} packages, {doubled} in more than one version", versions.len());
    if doubled > MOST_DOUBLED {
        faults.push(format!(
            "{doubled} packages in more than one version, expected {MOST_DOUBLED} at most"
        ));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Name, version and criteria of each entry of a table of a file of `cargo vet`.
fn vetted(file: &str, table: &str) -> BTreeSet<(String, String, String)> {
    let text = std::fs::read_to_string(root().join("supply-chain").join(file)).unwrap();
    let doc: toml_edit::DocumentMut = text.parse().unwrap();
    let mut out = BTreeSet::new();
    for (name, entries) in doc[table].as_table().unwrap() {
        for entry in entries.as_array_of_tables().unwrap() {
            let text = |key: &str| entry[key].as_str().unwrap().to_string();
            out.insert((name.to_string(), text("version"), text("criteria")));
        }
    }
    out
}

/// The differences between the packages that are there and those with an entry, in both directions.
fn differ(what: &str, there: &BTreeSet<(String, String)>, entries: &BTreeSet<(String, String)>) -> Vec<String> {
    let text = |says: &str, (name, version): &(String, String)| format!("{name} {version}: {says} {what}");
    let missing = there.difference(entries).map(|p| text("is not in", p));
    let stale = entries
        .difference(there)
        .map(|p| text("is not a dependency any more, but in", p));
    missing.chain(stale).collect()
}

/// Row W7: a new package or version fails without an entry in `supply-chain/`, which `cargo vet` reads too. Code that
/// runs while ft is built (build scripts, procedural macros) has to be read.
#[test]
fn every_dependency_has_an_entry() {
    let of = |name: &str, version: &str| (name.to_string(), version.to_string());
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let locked: BTreeSet<_> = lock
        .split("[[package]]\n")
        .filter(|entry| entry.contains("\nsource = "))
        .map(|entry| {
            let value = |key: &str| {
                entry
                    .lines()
                    .find_map(|l| l.strip_prefix(key)?.strip_suffix('"'))
                    .unwrap()
            };
            of(value("name = \""), value("version = \""))
        })
        .collect();
    let pairs = |entries: BTreeSet<(String, String, String)>, criteria: &[&str]| -> BTreeSet<_> {
        let those = entries.into_iter().filter(|(_, _, c)| criteria.contains(&c.as_str()));
        those.map(|(name, version, _)| (name, version)).collect()
    };
    let mut entries = pairs(vetted("config.toml", "exemptions"), &["safe-to-deploy", "safe-to-run"]);
    entries.extend(pairs(
        vetted("audits.toml", "audits"),
        &["safe-to-deploy", "safe-to-run"],
    ));
    let mut faults = differ(
        "supply-chain/config.toml (`cargo vet regenerate exemptions`)",
        &locked,
        &entries,
    );

    let metadata = metadata();
    let with = |wanted: &str| -> BTreeSet<_> {
        let has = |package: &&Value| {
            let targets = package["targets"].as_array().unwrap();
            let mut kinds = targets.iter().flat_map(|t| t["kind"].as_array().unwrap());
            !package["source"].is_null() && kinds.any(|kind| kind == wanted)
        };
        let packages = metadata["packages"].as_array().unwrap().iter().filter(has);
        packages
            .map(|p| of(p["name"].as_str().unwrap(), p["version"].as_str().unwrap()))
            .collect()
    };
    let (scripts, macros) = (with("custom-build"), with("proc-macro"));
    let run: BTreeSet<_> = scripts.union(&macros).cloned().collect();
    assert!(
        run.len() > 50 && locked.len() > run.len(),
        "{} of {}",
        run.len(),
        locked.len()
    );
    let read = pairs(vetted("audits.toml", "audits"), &["build-time"]);
    // Other processors have other packages.
    if cfg!(target_arch = "x86_64") {
        let what = "supply-chain/audits.toml (build-time: read what it runs)";
        faults.extend(differ(what, &run, &read));
        let counted = format!("{} build scripts and {} procedural macros", scripts.len(), macros.len());
        let security = std::fs::read_to_string(root().join("SECURITY.md")).unwrap();
        if !security.contains(&counted) {
            faults.push(format!("SECURITY.md does not say: {counted}"));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Uses of the word `unsafe` in code: blocks, functions, and others (`impl`, `trait`, `extern`, types of functions).
fn uses_of_unsafe(code: &str) -> [usize; 3] {
    const WORD: &str = "unsafe";
    let mut found = [0; 3];
    for (at, _) in code.match_indices(WORD) {
        let rest = &code[at + WORD.len()..];
        let touches = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        if touches(code[..at].chars().next_back()) || touches(rest.chars().next()) {
            continue;
        }
        let rest = rest.trim_start();
        let of_c = rest.strip_prefix("extern").unwrap_or(rest).trim_start();
        let is_function = of_c.trim_start_matches('"').trim_start().starts_with("fn ");
        let is_block = rest.starts_with('{');
        found[if is_block { 0 } else { 2 - usize::from(is_function) }] += 1;
    }
    found
}

/// Row W7.
/// `unsafe` code by crate; clippy checks that each block has its `SAFETY` comment. A new use is a decision: it changes a number in
/// `SECURITY.md`.
#[test]
fn unsafe_code_is_counted() {
    let text = "unsafe { unsafe_op() } unsafe fn f(a: unsafe fn(u8)) unsafe extern \"\" fn g() unsafe extern \"\" { } \
                unsafe impl A for B {} unsafe trait C {} #[unsafe(no_mangle)] unsafe\n{ }";
    assert_eq!(uses_of_unsafe(text), [2, 2, 5]);
    let kernels = load(&["crates/ft-kernels"], "rs");
    let kernels = kernels.into_iter().filter(|source| !source.path.contains("/tests/"));
    let mut found: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    for source in product().into_iter().chain(kernels) {
        let name = source.path.strip_prefix("crates/").and_then(|p| p.split('/').next());
        let lines: Vec<String> = source.product().into_iter().map(|(_, line)| line).collect();
        let sums = found.entry(name.unwrap_or("ft").to_string()).or_default();
        for (sum, more) in sums.iter_mut().zip(uses_of_unsafe(&lines.join("\n"))) {
            *sum += more;
        }
    }
    let expected: BTreeSet<&str> = CRATES.iter().map(|(name, _)| *name).chain(["ft"]).collect();
    assert_eq!(found.keys().map(String::as_str).collect::<BTreeSet<_>>(), expected);
    let row = |(name, [blocks, functions, others]): (&String, &[usize; 3])| {
        format!("| {name} | {blocks} | {functions} | {others} |\n")
    };
    let rows: String = found.iter().map(row).collect();
    let security = std::fs::read_to_string(root().join("SECURITY.md")).unwrap();
    assert!(security.contains(&rows), "SECURITY.md does not say:\n{rows}");
}

/// Row W7: the bill of materials of a release (`tools/sbom.py`) has what is linked or runs in the build, with its checksum, and
/// nothing that only tests need.
#[test]
fn the_bill_of_materials_has_every_package() {
    let python = Command::new("python3").args(["-c", "import tomllib"]).output();
    if !python.is_ok_and(|out| out.status.success()) {
        // Not through `eprintln`: that is not shown for a test that passes.
        let _ = writeln!(std::io::stderr(), "skipped: tools/sbom.py, no Python 3.11");
        return;
    }
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let out = Command::new("python3")
        .arg("tools/sbom.py")
        .current_dir(root())
        .env("FT_SBOM_TARGET", target)
        .env("CARGO_NET_OFFLINE", "true")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let bill: Value = serde_json::from_slice(&out.stdout).unwrap();
    let listed: BTreeMap<String, &Value> = bill["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| {
            (
                format!("{} {}", c["name"].as_str().unwrap(), c["version"].as_str().unwrap()),
                c,
            )
        })
        .collect();
    // The lines of `cargo tree`: name, version, and the place of a package that is not of a registry.
    let tree = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--locked",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
        ])
        .args([
            "--target",
            &format!("{}-unknown-linux-gnu", std::env::consts::ARCH),
            "--package",
            "ft",
        ])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).unwrap();
    let mut wanted = BTreeSet::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let mut words = line.split(' ');
        let (name, version) = (words.next().unwrap(), words.next().unwrap());
        let own = line.contains(" (/");
        let name = format!("{name} {}", version.trim_start_matches('v'));
        if name.starts_with("ft ") {
            continue;
        }
        let component = listed.get(&name).unwrap_or_else(|| panic!("{name} is not in the bill"));
        let hash = component["hashes"][0]["content"].as_str().unwrap_or_default();
        assert_eq!(hash.len(), if own { 0 } else { 64 }, "{name}: {hash}");
        assert!(component["licenses"][0]["expression"].is_string(), "{name}");
        wanted.insert(name);
    }
    let more: Vec<&String> = listed.keys().filter(|name| !wanted.contains(*name)).collect();
    assert!(wanted.len() > 100 && more.is_empty(), "only in the bill: {more:?}");
}

/// True if a line of code can start a program, or gives what does so another name.
fn starts_a_program(line: &str) -> bool {
    // `execv`, `execvpe`, `execl`, `execveat`, `SYS_execve`, and `Command as Other` in a `use`.
    const STARTS: [&str; 9] = [
        "Command::new",
        "Command as ",
        "posix_spawn",
        "fork(",
        "execv",
        "execl",
        "SYS_clone",
        "libc::system",
        "popen(",
    ];
    STARTS.iter().any(|start| line.contains(start))
}

/// Row W4 of `docs/reliability.md`: only these files start programs, and none of them a shell.
#[test]
fn programs_are_started_in_three_places() {
    for line in [
        "std::process::Command::new(path)",
        "use std::process::{Child, Command as Program};",
        "libc::execvp(name, arguments)",
        "libc::posix_spawnp(id, name)",
        "let child = libc::fork();",
    ] {
        assert!(starts_a_program(line), "{line}");
    }
    assert!(!starts_a_program("fn run(command: Command) { execute(command) }"));
    let allowed = [
        "crates/ft-base/src/worker.rs",
        "src/setup/rewards/program.rs",
        "src/cli/spawn.rs",
    ];
    for source in product() {
        let lines = source.product();
        let starts = lines.iter().any(|(_, line)| starts_a_program(line));
        assert!(
            !starts || allowed.contains(&source.path.as_str()),
            "{} starts a program",
            source.path
        );
        let shell = source
            .text
            .lines()
            .any(|l| l.contains("\"/bin/sh\"") || l.contains("Command::new(\"sh\""));
        assert!(!shell, "{} names a shell", source.path);
    }
}
