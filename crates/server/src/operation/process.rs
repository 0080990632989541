//! What the process takes of the machine, where the system says so.

use super::exposition::Exposition;

/// Bytes of a page of memory in `/proc/self/statm`.
const PAGE_BYTES: u64 = 4096;

/// Bytes of memory that the process has, without what it only mapped.
pub fn resident_bytes() -> Option<u64> {
    statm().map(|[resident, _]| resident)
}

/// Of [`resident_bytes`], those that are no parts of files: the system takes and brings back those of files as it likes.
pub fn anonymous_bytes() -> Option<u64> {
    statm().map(|[resident, shared]| resident.saturating_sub(shared))
}

/// Resident bytes, and those of them that are shared with files.
fn statm() -> Option<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut bytes = text.split(' ').skip(1).map(|pages| pages.parse::<u64>().ok().map(|n| n * PAGE_BYTES));
    Some([bytes.next()??, bytes.next()??])
}

/// Open files and sockets.
pub fn open_descriptors() -> Option<usize> {
    // The folder itself is open, too.
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1))
}

/// Threads of the process.
pub fn threads() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}

/// Writes them under the names that client libraries of Prometheus use.
pub(crate) fn write(out: &mut Exposition) {
    if let Some(bytes) = resident_bytes() {
        out.sample("process_resident_memory_bytes", "gauge", "Memory of the process", "", bytes);
    }
    if let Some(count) = open_descriptors() {
        out.sample("process_open_fds", "gauge", "Open files and sockets", "", count);
    }
    if let Some(count) = threads() {
        out.sample("process_threads", "gauge", "Threads of the process", "", count);
    }
}
