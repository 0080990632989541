//! The NUMA nodes of a machine, as Linux describes them in a folder.

use std::path::Path;

/// The folder in which Linux describes the nodes.
const FOLDER: &str = "/sys/devices/system/node";

/// A NUMA node that has CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// The system's number of the node.
    pub number: usize,
    /// The system's numbers of its CPUs, ascending.
    pub cpus: Vec<usize>,
}

/// The NUMA nodes of a machine.
///
/// ```
/// use quadriga_cpu::numa::{NumaNode, Topology};
///
/// let two = Topology::new([(0, 0..4), (1, 4..8)].map(|(number, cpus)| NumaNode { number, cpus: cpus.collect() }));
/// assert_eq!(two.nodes().len(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<NumaNode>,
}

impl Topology {
    /// A machine with these nodes; those without CPUs are left out.
    pub fn new(nodes: impl IntoIterator<Item = NumaNode>) -> Topology {
        let mut nodes: Vec<NumaNode> = nodes.into_iter().filter(|node| !node.cpus.is_empty()).collect();
        nodes.sort_by_key(|node| node.number);
        Topology { nodes }
    }

    /// This machine. Without nodes where the system describes none.
    pub fn detect() -> Topology {
        Topology::read(Path::new(FOLDER))
    }

    /// The nodes that a folder such as `/sys/devices/system/node` describes: `node0/cpulist` has the CPUs of node 0.
    /// Whatever is not readable is left out.
    pub fn read(folder: &Path) -> Topology {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let node = |entry: std::fs::DirEntry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let text = std::fs::read_to_string(entry.path().join("cpulist")).ok()?;
            Some(NumaNode { number, cpus: cpu_list(&text)? })
        };
        Topology::new(entries.filter_map(node))
    }

    /// The nodes, by number.
    pub fn nodes(&self) -> &[NumaNode] {
        &self.nodes
    }
}

/// Reads a list such as `0-3,8,10-11`; `None` if it is none, or has more CPUs than any machine.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    const MOST: usize = 1 << 16;
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last >= MOST {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read_and_nonsense_is_not() {
        assert_eq!(cpu_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(cpu_list("5,1-2,2-3"), Some(vec![1, 2, 3, 5]));
        assert_eq!(cpu_list("\n"), Some(Vec::new()));
        for text in ["x", "1-", "-1", "0-99999999999", "1-2-3", "0..3"] {
            assert_eq!(cpu_list(text), None, "{text}");
        }
    }
}
