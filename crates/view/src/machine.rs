//! The machine as Linux describes it: cache sizes, free memory, and what other processes do. Unknown elsewhere.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Bytes of all last-level caches together; `None` if they are unknown.
///
/// In a virtual machine it is often the whole socket's, of which other guests use a part.
pub(crate) fn last_level_cache() -> Option<u64> {
    last_level_cache_in(Path::new("/sys/devices/system/cpu"))
}

fn last_level_cache_in(folder: &Path) -> Option<u64> {
    // By the CPUs that share it, so that each cache counts once.
    let mut caches: BTreeMap<String, (u32, u64)> = BTreeMap::new();
    for cpu in fs::read_dir(folder).ok()?.flatten() {
        let Ok(indices) = fs::read_dir(cpu.path().join("cache")) else { continue };
        let of = |index: fs::DirEntry| {
            let field = |name: &str| fs::read_to_string(index.path().join(name)).ok();
            let level: u32 = field("level")?.trim().parse().ok()?;
            Some((level, parse_size(field("size")?.trim())?, field("shared_cpu_list")?))
        };
        if let Some((level, size, cpus)) = indices.flatten().filter_map(of).max_by_key(|(level, ..)| *level) {
            caches.insert(cpus, (level, size));
        }
    }
    let last = caches.values().map(|(level, _)| *level).max()?;
    Some(caches.values().filter(|(level, _)| *level == last).map(|(_, size)| size).sum())
}

/// Parses a size such as `32768K`.
fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Bytes of memory that can be allocated without swapping.
pub(crate) fn free_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// CPU time of the machine and of this process, in clock ticks since an arbitrary start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuTimes {
    /// Ticks of all CPUs, idle or not.
    pub(crate) total: u64,
    /// Ticks in which a process of this machine ran.
    pub(crate) busy: u64,
    /// Ticks that the host of a virtual machine took for others.
    pub(crate) stolen: u64,
    /// Ticks in which this process ran.
    pub(crate) own: u64,
}

impl CpuTimes {
    /// The times until now.
    pub(crate) fn now() -> Option<CpuTimes> {
        let [machine, process] = ["/proc/stat", "/proc/self/stat"].map(|path| fs::read_to_string(path).ok());
        CpuTimes::parse(&machine?, &process?)
    }

    fn parse(machine: &str, process: &str) -> Option<CpuTimes> {
        let line = machine.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
        // Guest time, which would follow, is a part of user time.
        let [user, nice, system, idle, waiting, interrupts, soft_interrupts, stolen, ..] = *ticks else {
            return None;
        };
        let busy = user + nice + system + interrupts + soft_interrupts;
        // The name of the program is in parentheses and may contain anything.
        let (_, fields) = process.rsplit_once(')')?;
        let own = fields.split_whitespace().skip(11).take(2).map_while(|field| field.parse::<u64>().ok());
        Some(CpuTimes { total: busy + idle + waiting + stolen, busy, stolen, own: own.sum() })
    }

    /// The shares of all CPUs that other processes and other virtual machines used since `start`, 0 to 1.
    pub(crate) fn others_since(&self, start: CpuTimes) -> (f64, f64) {
        let total = self.total.saturating_sub(start.total).max(1) as f64;
        let busy = self.busy.saturating_sub(start.busy);
        let others = busy.saturating_sub(self.own.saturating_sub(start.own));
        (others as f64 / total, self.stolen.saturating_sub(start.stolen) as f64 / total)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn last_level_caches_are_added_up_once_each() {
        let folder = std::env::temp_dir().join(format!("quadriga-caches-{}", std::process::id()));
        for (cpu, shared) in [("cpu0", "0-1"), ("cpu1", "0-1"), ("cpu2", "2-3"), ("cpu3", "2-3")] {
            for (index, level, size, cpus) in
                [("index0", "1", "48K", cpu), ("index2", "2", "2048K", cpu), ("index3", "3", "32M", shared)]
            {
                let folder = folder.join(cpu).join("cache").join(index);
                fs::create_dir_all(&folder).unwrap();
                for (name, text) in [("level", level), ("size", size), ("shared_cpu_list", cpus)] {
                    fs::write(folder.join(name), format!("{text}\n")).unwrap();
                }
            }
        }
        assert_eq!(last_level_cache_in(&folder), Some(64 << 20));
        assert_eq!(last_level_cache_in(&folder.join("cpu0/cache")), None);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn sizes_have_units() {
        let sizes = ["48K", "2M", "1G", "512", "K", "7X"].map(parse_size);
        assert_eq!(sizes, [Some(48 << 10), Some(2 << 20), Some(1 << 30), Some(512), None, None]);
    }

    #[test]
    fn the_share_of_others_excludes_this_process_and_idle_time() {
        let process = |user: u64, system: u64| {
            format!("7 (a) b (c) R 1 2 3 4 5 6 7 8 9 10 {user} {system} 0 0 20 0 4 0\n")
        };
        let start = CpuTimes::parse("cpu  100 0 50 1000 10 1 2 5 0 0\ncpu0 1 2\n", &process(40, 10)).unwrap();
        assert_eq!(start, CpuTimes { total: 1168, busy: 153, stolen: 5, own: 50 });
        // Of 1,000 ticks this process had 300, others 200, the host 100.
        let end = CpuTimes::parse("cpu  500 0 150 1400 10 1 2 105 0 0\n", &process(320, 30)).unwrap();
        assert_eq!(end.others_since(start), (0.2, 0.1));
        assert_eq!(CpuTimes::parse("nothing", &process(1, 1)), None);
    }
}
