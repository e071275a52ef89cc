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

/// Headroom of the control groups (version 2) of this process.
fn group_headroom() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|l| l.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    // The limits of all parent groups apply too.
    let groups = root.join(path).ancestors().map(Path::to_path_buf).collect::<Vec<_>>();
    let groups = groups.into_iter().take_while(|g| g.starts_with(root));
    groups.filter_map(|g| headroom_of(&g)).min()
}

fn headroom_of(group: &Path) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(group.join(name)).ok()?;
        text.trim().parse().ok()
    };
    // Inactive page cache is reclaimable, so it does not count as used.
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let inactive = stat.lines().find_map(|l| l.strip_prefix("inactive_file "));
    let inactive: u64 = inactive.and_then(|n| n.trim().parse().ok()).unwrap_or(0);
    let used = number("memory.current")?.saturating_sub(inactive);
    Some(number("memory.max")?.saturating_sub(used))
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

    #[test]
    fn a_group_leaves_what_its_limit_and_its_use_say() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        assert_eq!(headroom_of(dir.path()), None);
        write("memory.current", "900\n");
        write("memory.max", "max\n");
        assert_eq!(headroom_of(dir.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(headroom_of(dir.path()), Some(100));
        write("memory.stat", "anon 500\ninactive_file 300\nactive_file 100\n");
        assert_eq!(headroom_of(dir.path()), Some(400));
        write("memory.max", "10\n");
        assert_eq!(headroom_of(dir.path()), Some(0));
    }

    #[test]
    fn what_is_available_is_no_more_than_the_machine_has() {
        if let (Some(available), Some(total)) = (available(), total()) {
            assert!(available <= total);
        }
    }
}
