//! The CPUs of ranks: launchers bind processes to some of a machine's, and those that several ranks may use are divided.

use std::collections::BTreeSet;

/// Bytes of a set of CPUs.
const SET: usize = 256;

/// The CPUs that a process may use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct RankCpus {
    /// How many of them at once.
    available: usize,
    /// Those of its machine.
    machine: usize,
    /// Their numbers; empty where the system does not tell.
    allowed: BTreeSet<usize>,
}

impl RankCpus {
    /// Those of this process.
    pub(crate) fn of_process() -> RankCpus {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        // A container has some of the machine's.
        let sets = ["/sys/fs/cgroup/cpuset.cpus.effective", "/sys/devices/system/cpu/online"];
        let sets = sets.iter().filter_map(|path| std::fs::read_to_string(path).ok());
        let machine = sets.map(|set| cpus(&set).len()).find(|count| *count > 0).unwrap_or(available);
        RankCpus { available, machine, allowed: allowed.map(cpus).unwrap_or_default() }
    }

    /// As a message to other ranks.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let numbers = [self.available, self.machine].map(|number| number.min(u32::MAX as usize) as u32);
        let mut message: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
        let mut set = [0u8; SET];
        for cpu in &self.allowed {
            if let Some(byte) = set.get_mut(cpu / 8) {
                *byte |= 1 << (cpu % 8);
            }
        }
        message.extend(set);
        message
    }

    /// Those of a rank's message.
    pub(crate) fn decode(message: &[u8]) -> RankCpus {
        let (numbers, set) = message.split_at_checked(8).unwrap_or_default();
        let (numbers, _) = numbers.as_chunks::<4>();
        let number = |at: usize| numbers.get(at).copied().map_or(0, u32::from_le_bytes) as usize;
        let has = |cpu: &usize| set.get(cpu / 8).is_some_and(|byte| byte & 1 << (cpu % 8) != 0);
        let allowed = (0..8 * set.len()).filter(has).collect();
        RankCpus { available: number(0).max(1), machine: number(1), allowed }
    }
}

/// The numbers in a list such as `0-3,8`.
fn cpus(list: &str) -> BTreeSet<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        Some(first..last.min(8 * SET).saturating_add(1))
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

/// Threads for a rank of one machine, of which all ranks have these CPUs: each gets those that it has alone, and its part of those that it
/// shares; `None` if it shares none.
pub(crate) fn threads(own: &RankCpus, here: &[&RankCpus]) -> Option<usize> {
    if own.allowed.is_empty() {
        return (here.len() > 1).then(|| (own.available / here.len()).max(1));
    }
    let ranks_on = |cpu: &usize| here.iter().filter(|rank| rank.allowed.contains(cpu)).count().max(1);
    let part: f64 = own.allowed.iter().map(|cpu| 1.0 / ranks_on(cpu) as f64).sum();
    // A quota holds for all that it has.
    let usable = own.available as f64 / own.allowed.len() as f64;
    let threads = (part * usable.min(1.0) + 1e-6) as usize;
    (own.allowed.iter().any(|cpu| ranks_on(cpu) > 1)).then(|| threads.max(1))
}

/// The CPUs of a machine that its ranks have, and all of them, where most have none.
pub(crate) fn idle(here: &[&RankCpus]) -> Option<(usize, usize)> {
    let used: BTreeSet<usize> = here.iter().flat_map(|rank| rank.allowed.iter().copied()).collect();
    let machine = here.iter().map(|rank| rank.machine).max().unwrap_or(0);
    (!used.is_empty() && 2 * used.len() < machine).then_some((used.len(), machine))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn rank(allowed: &str, available: usize) -> RankCpus {
        RankCpus { available, machine: 64, allowed: cpus(allowed) }
    }

    fn threads_of(ranks: &[RankCpus]) -> Vec<Option<usize>> {
        let here: Vec<&RankCpus> = ranks.iter().collect();
        ranks.iter().map(|own| threads(own, &here)).collect()
    }

    #[test]
    fn cpus_that_ranks_share_are_divided_and_those_of_one_are_its_own() {
        let all = rank("0-63", 64);
        assert_eq!(threads_of(&vec![all.clone(); 4]), [Some(16); 4]);
        assert_eq!(threads_of(std::slice::from_ref(&all)), [None]);
        // Slurm's tasks, and packages of Open MPI: bound already.
        let bound = [rank("0-15", 16), rank("16-31", 16), rank("32-47", 16)];
        assert_eq!(threads_of(&bound), [None; 3]);
        assert_eq!(
            threads_of(&[rank("0-31", 32), rank("0-31", 32), rank("32-63", 32)]),
            [Some(16), Some(16), None]
        );
        assert_eq!(threads_of(&[rank("0-3", 4), rank("2-3", 2)]), [Some(3), Some(1)]);
        assert_eq!(threads_of(&vec![rank("5", 1); 3]), [Some(1); 3]);
        // A container's quota is that of all of its ranks.
        assert_eq!(threads_of(&vec![rank("0-63", 8); 2]), [Some(4); 2]);
        assert_eq!(threads_of(&vec![rank("", 9); 2]), [Some(4); 2], "the system does not tell");
    }

    #[test]
    fn a_machine_of_which_most_is_idle_is_named() {
        let idle_of = |ranks: &[RankCpus]| idle(&ranks.iter().collect::<Vec<_>>());
        assert_eq!(idle_of(&[rank("0", 1), rank("1", 1)]), Some((2, 64)));
        assert_eq!(idle_of(&[rank("0-31", 32)]), None);
        assert_eq!(idle_of(&[rank("", 4)]), None);
    }

    #[test]
    fn messages_have_what_was_written() {
        let own = rank("0,2-4,63,1000", 3);
        assert_eq!((own.encode().len(), RankCpus::decode(&own.encode())), (8 + SET, own));
        assert_eq!(cpus(" 1-2,7\n"), BTreeSet::from([1, 2, 7]));
        assert!(cpus("").is_empty() && cpus("x-1").is_empty());
        let here = RankCpus::of_process();
        assert!(here.available > 0 && here.machine >= here.allowed.len().min(1), "{here:?}");
    }
}
