//! Threads and weights bound to the NUMA nodes of a machine that has several.
//!
//! A thread reads memory of its own node faster than that of another. Threads are divided among nodes in contiguous runs,
//! and each thread starts with one contiguous share of a matrix: so each node's threads read one contiguous part of
//! every weight, whose pages are bound to the node. Of weights that consist of many matrices, the experts of a mixture,
//! threads share every matrix; their pages are interleaved.

mod recorded;
mod system;
mod topology;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use recorded::{BoundPages, record_bound_pages};
pub use topology::{NumaNode, Topology};

use system::{PagePolicy, allowed_cpus, bind_pages, current_cpu};
#[cfg(not(loom))]
pub(crate) use system::{bind_this_thread, bind_thread};

/// Which nodes threads and weights are bound to; as llama.cpp's `--numa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumaMode {
    /// All nodes: each has as many threads as is its share of the CPUs, and the weights that they read.
    Distribute,
    /// The node that the program was started on: all threads and weights are there.
    Isolate,
    /// The CPUs that `numactl` or `taskset` left to the program, by node. Memory is where `numactl` says.
    Numactl,
}

impl NumaMode {
    /// Every mode.
    pub const ALL: [NumaMode; 3] = [NumaMode::Distribute, NumaMode::Isolate, NumaMode::Numactl];

    /// The name that [`NumaMode::from_str`] takes.
    pub const fn name(self) -> &'static str {
        match self {
            NumaMode::Distribute => "distribute",
            NumaMode::Isolate => "isolate",
            NumaMode::Numactl => "numactl",
        }
    }
}

impl fmt::Display for NumaMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// There is no such mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown NUMA mode {0:?}; the modes are distribute, isolate and numactl")]
pub struct UnknownNumaMode(String);

impl FromStr for NumaMode {
    type Err = UnknownNumaMode;

    fn from_str(name: &str) -> Result<NumaMode, UnknownNumaMode> {
        let found = NumaMode::ALL.into_iter().find(|mode| mode.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| UnknownNumaMode(name.to_owned()))
    }
}

/// What a process may use of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessCpus {
    /// The CPUs that it may run on; all of them if empty.
    pub(crate) allowed: Vec<usize>,
    /// The CPU that it runs on.
    pub(crate) current: usize,
}

impl ProcessCpus {
    pub(crate) fn detect() -> ProcessCpus {
        ProcessCpus { allowed: allowed_cpus(), current: current_cpu() }
    }
}

/// The nodes that threads and weights are bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaBinding {
    mode: NumaMode,
    nodes: Vec<NumaNode>,
}

/// Parts of a weight begin at such pages: large parts at huge ones, which would be split otherwise.
const PAGE: usize = 4 << 10;
const HUGE_PAGE: usize = 2 << 20;

impl NumaBinding {
    /// `None` on a machine with one node, where there is nothing to choose.
    pub(crate) fn new(mode: NumaMode, topology: &Topology, process: &ProcessCpus) -> Option<NumaBinding> {
        if topology.nodes().len() < 2 {
            return None;
        }
        let mut nodes = topology.nodes().to_vec();
        match mode {
            NumaMode::Distribute => {}
            NumaMode::Isolate => {
                let own = nodes.iter().position(|node| node.cpus.contains(&process.current)).unwrap_or(0);
                nodes = nodes.get(own).cloned().into_iter().collect();
            }
            NumaMode::Numactl if process.allowed.is_empty() => {}
            NumaMode::Numactl => {
                nodes.iter_mut().for_each(|node| node.cpus.retain(|cpu| process.allowed.contains(cpu)));
                nodes.retain(|node| !node.cpus.is_empty());
            }
        }
        (!nodes.is_empty()).then_some(NumaBinding { mode, nodes })
    }

    /// The mode.
    pub const fn mode(&self) -> NumaMode {
        self.mode
    }

    /// The nodes in use, each with the CPUs that its threads may run on.
    pub fn nodes(&self) -> &[NumaNode] {
        &self.nodes
    }

    /// CPUs of all nodes.
    pub fn cpus(&self) -> usize {
        self.nodes.iter().map(|node| node.cpus.len()).sum()
    }

    /// For each node the threads of a pool that are bound to it: contiguous, as many as is its share of the CPUs.
    pub fn threads(&self, threads: usize) -> Vec<(&NumaNode, Range<usize>)> {
        let (all, mut before, mut first) = (self.cpus().max(1), 0, 0);
        let of = |node: &'_ NumaNode| {
            before += node.cpus.len();
            let own = first..(threads * before + all / 2) / all;
            first = own.end;
            own
        };
        let shares: Vec<Range<usize>> = self.nodes.iter().map(of).collect();
        self.nodes.iter().zip(shares).collect()
    }

    /// The node of a thread.
    pub(crate) fn node_of(&self, thread: usize, threads: usize) -> Option<&NumaNode> {
        self.threads(threads).into_iter().find(|(_, own)| own.contains(&thread)).map(|(node, _)| node)
    }

    /// For each node the pages of a matrix at an address that its threads read first.
    fn pages(&self, address: usize, bytes: usize, threads: usize) -> Vec<(usize, Range<usize>)> {
        let page = if bytes / threads.max(1) >= 4 * HUGE_PAGE { HUGE_PAGE } else { PAGE };
        let border = |thread: usize| {
            let at = address + (bytes as u128 * thread as u128 / threads.max(1) as u128) as usize;
            at.next_multiple_of(page)
        };
        // Pages that the matrix shares with others at its ends are left out.
        let end = (address + bytes) / PAGE * PAGE;
        let part = |(node, own): (&NumaNode, Range<usize>)| {
            let first = if own.start == 0 { address.next_multiple_of(PAGE) } else { border(own.start) };
            let last = if own.end == threads { end } else { border(own.end).min(end) };
            (!own.is_empty() && first < last).then_some((node.number, first..last))
        };
        self.threads(threads).into_iter().filter_map(part).collect()
    }

    /// Binds the pages of a weight of so many matrices, before it is first written. Where the system refuses, they are where
    /// they are first written: the threads that pack a weight divide it in the same way.
    pub(crate) fn bind_weight(&self, address: usize, bytes: usize, matrices: usize, threads: usize) {
        if matrices > 1 && self.nodes.len() > 1 {
            return self.interleave(address, bytes);
        }
        if self.mode == NumaMode::Numactl {
            return;
        }
        for (node, pages) in self.pages(address, bytes, threads) {
            bind(pages, &[node], PagePolicy::Preferred);
        }
    }

    /// Binds the pages of a weight of which threads read any part, in turns to all nodes, before it is first written.
    pub(crate) fn interleave(&self, address: usize, bytes: usize) {
        if self.mode == NumaMode::Numactl {
            return;
        }
        let pages = address.next_multiple_of(PAGE)..(address + bytes) / PAGE * PAGE;
        let nodes: Vec<usize> = self.nodes.iter().map(|node| node.number).collect();
        if !pages.is_empty() {
            bind(pages, &nodes, PagePolicy::Interleaved);
        }
    }
}

/// Asks the system for pages of some nodes. Where it refuses, they are where they are first written.
fn bind(pages: Range<usize>, nodes: &[usize], policy: PagePolicy) {
    recorded::note(&pages, nodes, policy);
    bind_pages(pages, nodes, policy);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(cpus: &[usize]) -> Topology {
        let mut next = 0;
        let node = |(number, count): (usize, &usize)| {
            let cpus = (next..next + count).collect();
            next += count;
            NumaNode { number, cpus }
        };
        Topology::new(cpus.iter().enumerate().map(node).collect::<Vec<_>>())
    }

    fn process(allowed: Vec<usize>, current: usize) -> ProcessCpus {
        ProcessCpus { allowed, current }
    }

    fn shares(binding: &NumaBinding, threads: usize) -> Vec<(usize, Range<usize>)> {
        binding.threads(threads).into_iter().map(|(node, own)| (node.number, own)).collect()
    }

    #[test]
    fn modes_choose_nodes_as_in_llama_cpp() {
        let two = machine(&[4, 4]);
        let of = |mode, process: &ProcessCpus| NumaBinding::new(mode, &two, process).unwrap();
        let free = process((0..8).collect(), 5);
        assert_eq!(of(NumaMode::Distribute, &free).nodes(), two.nodes());
        assert_eq!(of(NumaMode::Isolate, &free).nodes(), &two.nodes()[1..]);
        assert_eq!(of(NumaMode::Numactl, &free).nodes(), two.nodes());
        let limited = process(vec![2, 3, 4], 2);
        let nodes = of(NumaMode::Numactl, &limited).nodes().to_vec();
        assert_eq!(nodes.iter().map(|node| node.cpus.clone()).collect::<Vec<_>>(), [vec![2, 3], vec![4]]);
        assert_eq!(of(NumaMode::Distribute, &limited).cpus(), 8, "all nodes, whatever was inherited");
        let outside = process(vec![6, 7], 6);
        assert_eq!(shares(&of(NumaMode::Numactl, &outside), 2), [(1, 0..2)]);
        for topology in [machine(&[8]), machine(&[8, 0]), Topology::default()] {
            for mode in NumaMode::ALL {
                assert_eq!(NumaBinding::new(mode, &topology, &free), None);
            }
        }
    }

    #[test]
    fn threads_follow_the_cpus_of_nodes() {
        let of = |cpus: &[usize]| {
            NumaBinding::new(NumaMode::Distribute, &machine(cpus), &process(Vec::new(), 0)).unwrap()
        };
        assert_eq!(shares(&of(&[8, 8]), 16), [(0, 0..8), (1, 8..16)]);
        assert_eq!(shares(&of(&[8, 8]), 5), [(0, 0..3), (1, 3..5)]);
        assert_eq!(shares(&of(&[8, 8]), 1), [(0, 0..1), (1, 1..1)]);
        assert_eq!(shares(&of(&[12, 4]), 8), [(0, 0..6), (1, 6..8)]);
        for threads in 1..40 {
            let binding = of(&[6, 2, 9, 1]);
            let all: Vec<usize> = shares(&binding, threads).into_iter().flat_map(|(_, own)| own).collect();
            assert_eq!(all, (0..threads).collect::<Vec<_>>(), "each thread has one node");
            for thread in 0..threads {
                assert!(binding.node_of(thread, threads).is_some());
            }
        }
    }

    #[test]
    fn every_page_of_a_weight_has_one_node_that_of_its_readers() {
        let mut seed = 7_u64;
        let mut next = |below: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % below
        };
        for round in 0..2000 {
            let nodes: Vec<usize> = (0..2 + next(3)).map(|_| 1 + next(9)).collect();
            let threads = 1 + next(24);
            let (address, bytes) = (64 * (1 + next(1 << 20)), 64 * next(1 << (6 + round % 16)));
            let context = format!("round {round}: nodes {nodes:?}, {threads} threads, {bytes} at {address}");
            let binding =
                NumaBinding::new(NumaMode::Distribute, &machine(&nodes), &process(Vec::new(), 0)).unwrap();
            let pages = binding.pages(address, bytes, threads);
            let mut at = address.next_multiple_of(PAGE);
            for (node, pages) in &pages {
                assert_eq!((pages.start, pages.start % PAGE, pages.end % PAGE), (at, 0, 0), "{context}");
                at = pages.end;
                let (_, own) =
                    binding.threads(threads).into_iter().find(|(of, _)| of.number == *node).unwrap();
                let middle = (pages.start + pages.end) / 2;
                let reader = (middle.max(address) - address) * threads / bytes;
                let near = own.start.saturating_sub(1)..=own.end;
                // Pages longer than a share are those of one of several readers.
                let fine = bytes / threads >= 2 * PAGE;
                assert!(
                    !fine || near.contains(&reader),
                    "{context}: thread {reader} reads pages of node {node}"
                );
            }
            assert!(at <= address.next_multiple_of(PAGE).max((address + bytes) / PAGE * PAGE), "{context}");
            assert!(at + PAGE > address + bytes || bytes < 2 * PAGE, "{context}: {pages:?}");
        }
    }

    #[test]
    fn names_are_those_of_llama_cpp() {
        for mode in NumaMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert_eq!("Isolate".parse(), Ok(NumaMode::Isolate));
        let error = "interleave".parse::<NumaMode>().unwrap_err().to_string();
        assert!(error.contains("distribute, isolate and numactl"), "{error}");
    }
}
