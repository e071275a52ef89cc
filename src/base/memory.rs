//! What this process and this machine say about memory.

fn proc_kib(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Highest resident memory of this process so far, bytes (0 where the system does not tell).
pub fn peak_resident() -> u64 {
    proc_kib("/proc/self/status", "VmHWM:").unwrap_or(0) * 1024
}

/// Resident memory of this process now, bytes (0 where the system does not tell).
pub fn resident() -> u64 {
    proc_kib("/proc/self/status", "VmRSS:").unwrap_or(0) * 1024
}

/// Memory that could be used without swapping, bytes.
pub fn available() -> Option<u64> {
    proc_kib("/proc/meminfo", "MemAvailable:").map(|k| k * 1024)
}

/// Freed memory stays with the process for the next step, instead of going back to the system and coming again page
/// by page, each zeroed by the kernel. Call it once, before the large allocations.
pub fn reuse_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets numbers of the allocator.
    unsafe {
        // Larger blocks than this come from `mmap`; the largest value that is allowed.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

/// Memory of the machine, bytes.
pub fn total() -> Option<u64> {
    proc_kib("/proc/meminfo", "MemTotal:").map(|k| k * 1024)
}
