//! Memory readings of this process and this machine.

use std::path::Path;

fn proc_kib(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Peak resident memory of this process, bytes (0 if the system does not report it).
pub fn peak_resident() -> u64 {
    proc_kib("/proc/self/status", "VmHWM:").unwrap_or(0) * 1024
}

/// Current resident memory of this process, bytes (0 if the system does not report it).
pub fn resident() -> u64 {
    proc_kib("/proc/self/status", "VmRSS:").unwrap_or(0) * 1024
}

/// Memory that this process can still allocate without swapping, bytes: the minimum of the machine's free memory, the
/// headroom of its control groups and its own resource limits.
pub fn available() -> Option<u64> {
    let machine = proc_kib("/proc/meminfo", "MemAvailable:").map(|k| k * 1024);
    [machine, group_headroom(), limit_headroom()]
        .into_iter()
        .flatten()
        .min()
}

/// Headroom of the control groups of this process.
fn group_headroom() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    headroom_below(Path::new("/sys/fs/cgroup"), &own)
}

/// The names of one version of control groups.
struct Names {
    most: &'static str,
    used: &'static str,
    /// The line of `memory.stat` with page cache that can be reclaimed.
    inactive: &'static str,
}

const SECOND: Names = Names {
    most: "memory.max",
    used: "memory.current",
    inactive: "inactive_file ",
};
const FIRST: Names = Names {
    most: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    inactive: "total_inactive_file ",
};
/// Version 1 has a huge number where there is no limit.
const NO_LIMIT: u64 = 1 << 60;

/// `own` is the text of `/proc/self/cgroup`, `root` the directory of the groups.
fn headroom_below(root: &Path, own: &str) -> Option<u64> {
    let group = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.strip_prefix('/')?);
        match controllers {
            "" => Some((root.to_path_buf(), root.join(path), SECOND)),
            _ if controllers.split(',').any(|c| c == "memory") => {
                let root = root.join("memory");
                Some((root.clone(), root.join(path), FIRST))
            }
            _ => None,
        }
    };
    let all = own.lines().filter_map(group);
    all.filter_map(|(root, group, names)| {
        // The limits of all parent groups apply too.
        let groups = group.ancestors().take_while(|g| g.starts_with(&root));
        groups.filter_map(|g| headroom_of(g, &names)).min()
    })
    .min()
}

fn headroom_of(group: &Path, names: &Names) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(group.join(name)).ok()?;
        text.trim().parse().ok()
    };
    // Inactive page cache is reclaimable, so it does not count as used.
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let inactive = stat.lines().find_map(|l| l.strip_prefix(names.inactive));
    let inactive: u64 = inactive.and_then(|n| n.trim().parse().ok()).unwrap_or(0);
    let used = number(names.used)?.saturating_sub(inactive);
    let most = number(names.most).filter(|most| *most < NO_LIMIT)?;
    Some(most.saturating_sub(used))
}

/// Headroom under `ulimit -d` and `ulimit -v`.
#[cfg(target_os = "linux")]
fn limit_headroom() -> Option<u64> {
    let left = |resource, used: &str| {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: writes one local structure.
        let known = unsafe { libc::getrlimit(resource, &mut limit) } == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
        let used = proc_kib("/proc/self/status", used).unwrap_or(0) * 1024;
        known.then(|| limit.rlim_cur.saturating_sub(used))
    };
    let limits = [left(libc::RLIMIT_DATA, "VmData:"), left(libc::RLIMIT_AS, "VmSize:")];
    limits.into_iter().flatten().min()
}

#[cfg(not(target_os = "linux"))]
fn limit_headroom() -> Option<u64> {
    None
}

/// Total memory of the machine, bytes.
pub fn total() -> Option<u64> {
    proc_kib("/proc/meminfo", "MemTotal:").map(|k| k * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row S10.
    #[test]
    fn a_group_leaves_what_its_limit_and_its_use_say() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let headroom = || headroom_of(dir.path(), &SECOND);
        assert_eq!(headroom(), None);
        write("memory.current", "900\n");
        write("memory.max", "max\n");
        assert_eq!(headroom(), None);
        write("memory.max", "1000\n");
        assert_eq!(headroom(), Some(100));
        write("memory.stat", "anon 500\ninactive_file 300\nactive_file 100\n");
        assert_eq!(headroom(), Some(400));
        write("memory.max", "10\n");
        assert_eq!(headroom(), Some(0));
    }

    /// Row S10.
    #[test]
    fn groups_of_both_versions_and_their_parents_limit_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let headroom = |own: &str| headroom_below(dir.path(), own);
        assert_eq!(headroom("0::/a/b\n"), None);
        write("a/memory.max", "5000");
        write("a/memory.current", "1000");
        write("a/b/memory.max", "max");
        write("a/b/memory.current", "700");
        assert_eq!(headroom("0::/a/b\n"), Some(4000));
        assert_eq!(headroom("0::/\n"), None);
        write("memory/c/memory.limit_in_bytes", "9223372036854771712");
        write("memory/c/memory.usage_in_bytes", "10");
        let old = "9:name=systemd:/\n4:cpu,memory:/c\n0::/\n";
        assert_eq!(headroom(old), None);
        write("memory/c/memory.limit_in_bytes", "3000");
        write("memory/c/memory.usage_in_bytes", "2500");
        write("memory/c/memory.stat", "inactive_file 1\ntotal_inactive_file 1500\n");
        assert_eq!(headroom(old), Some(2000));
        assert_eq!(headroom("4:memory:/c\n0::/a/b\n"), Some(2000));
    }

    #[test]
    fn what_is_available_is_no_more_than_the_machine_has() {
        if let (Some(available), Some(total)) = (available(), total()) {
            assert!(available <= total);
        }
    }
}
