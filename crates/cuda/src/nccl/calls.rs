//! What NCCL is called with for a collective, as data: calls of one group, and copies between rows of matrices.
//!
//! NCCL gathers parts of equal lengths one after the other. Uneven parts are a group of broadcasts or reductions, one for each rank;
//! matrices of several rows are gathered in scratch memory and copied beside each other, or copied apart before they are scattered.

use quadriga_graph::{Collective, CollectiveKind};

/// A call of NCCL. Addresses are in device memory, lengths in bytes or, where values are summed, in F32 values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NcclCall {
    /// The sum of all ranks' values, in place.
    AllReduce {
        at: u64,
        count: usize,
    },
    /// The parts of all ranks, which are equally long.
    AllGather {
        from: u64,
        to: u64,
        bytes: usize,
    },
    /// The rank's part of the sum, of equally long ones.
    ReduceScatter {
        from: u64,
        to: u64,
        count: usize,
    },
    /// The bytes of one rank.
    Broadcast {
        from: u64,
        to: u64,
        bytes: usize,
        root: usize,
    },
    /// The sum of all ranks' values, on one.
    Reduce {
        from: u64,
        to: u64,
        count: usize,
        root: usize,
    },
    Send {
        from: u64,
        bytes: usize,
        to: usize,
    },
    Receive {
        to: u64,
        bytes: usize,
        from: usize,
    },
}

/// Rows that are copied within device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RowCopy {
    pub(crate) from: u64,
    /// Bytes from the start of a row to that of the next.
    pub(crate) from_pitch: usize,
    pub(crate) to: u64,
    pub(crate) to_pitch: usize,
    pub(crate) row_bytes: usize,
    pub(crate) rows: usize,
}

/// A collective on a stream: copies, then the calls of one group, then copies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct DeviceExchange {
    pub(crate) before: Vec<RowCopy>,
    pub(crate) calls: Vec<NcclCall>,
    pub(crate) after: Vec<RowCopy>,
}

/// Where a collective's tensors are; those without bytes have no address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExchangePlaces {
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// Bytes of the result.
    pub(crate) bytes: usize,
    /// Rows of the matrices that are gathered or scattered.
    pub(crate) rows: usize,
    /// Bytes of an element.
    pub(crate) element: usize,
    /// [`scratch_bytes`] bytes.
    pub(crate) scratch: u64,
}

/// Bytes of scratch memory that a collective with these columns needs: those of the whole matrix, where it has several rows.
pub(crate) fn scratch_bytes(kind: &CollectiveKind, rows: usize, element: usize) -> usize {
    match kind {
        CollectiveKind::AllGather { columns } | CollectiveKind::ReduceScatter { columns } if rows > 1 => {
            columns.iter().sum::<usize>().saturating_mul(rows).saturating_mul(element)
        }
        _ => 0,
    }
}

impl DeviceExchange {
    /// What a rank does for a collective.
    pub(crate) fn of(collective: &Collective, places: ExchangePlaces) -> DeviceExchange {
        let ExchangePlaces { input, output, bytes, rows, element, scratch } = places;
        let own = collective.ranks.rank;
        let mut exchange = DeviceExchange::default();
        if collective.kind.is_in_place() && input != output && bytes > 0 {
            let copy = RowCopy {
                from: input,
                from_pitch: bytes,
                to: output,
                to_pitch: bytes,
                row_bytes: bytes,
                rows: 1,
            };
            exchange.before.push(copy);
        }
        match &collective.kind {
            CollectiveKind::AllReduce => {
                exchange.calls.push(NcclCall::AllReduce { at: output, count: bytes / 4 });
            }
            CollectiveKind::Broadcast { root } => {
                exchange.calls.push(NcclCall::Broadcast { from: output, to: output, bytes, root: *root });
            }
            CollectiveKind::Send { to, .. } => {
                exchange.calls.push(NcclCall::Send { from: output, bytes, to: *to });
            }
            CollectiveKind::Receive { from, .. } => {
                exchange.calls.push(NcclCall::Receive { to: output, bytes, from: *from });
            }
            CollectiveKind::AllGather { columns } => {
                let whole = if rows > 1 { scratch } else { output };
                exchange.calls = match equal(columns) {
                    Some(each) => {
                        vec![NcclCall::AllGather { from: input, to: whole, bytes: each * rows * element }]
                    }
                    None => parts(columns, rows * element, whole)
                        .map(|(root, at, bytes)| {
                            let from = if root == own { input } else { at };
                            NcclCall::Broadcast { from, to: at, bytes, root }
                        })
                        .collect(),
                };
                if rows > 1 {
                    exchange.after = beside(columns, rows, element, scratch, output, false);
                }
            }
            CollectiveKind::ReduceScatter { columns } => {
                let whole = if rows > 1 { scratch } else { input };
                if rows > 1 {
                    exchange.before = beside(columns, rows, element, scratch, input, true);
                }
                exchange.calls = match equal(columns) {
                    Some(each) => {
                        vec![NcclCall::ReduceScatter { from: whole, to: output, count: each * rows }]
                    }
                    None => parts(columns, rows * element, whole)
                        .map(|(root, at, bytes)| {
                            let to = if root == own { output } else { at };
                            NcclCall::Reduce { from: at, to, count: bytes / 4, root }
                        })
                        .collect(),
                };
            }
        }
        exchange.calls.retain(|call| !call.is_empty());
        exchange
    }
}

impl NcclCall {
    /// Whether nothing is exchanged, on any rank.
    fn is_empty(&self) -> bool {
        match *self {
            NcclCall::AllReduce { count: length, .. }
            | NcclCall::AllGather { bytes: length, .. }
            | NcclCall::ReduceScatter { count: length, .. }
            | NcclCall::Broadcast { bytes: length, .. }
            | NcclCall::Reduce { count: length, .. }
            | NcclCall::Send { bytes: length, .. }
            | NcclCall::Receive { bytes: length, .. } => length == 0,
        }
    }
}

/// The columns of each rank, if all have as many.
fn equal(columns: &[usize]) -> Option<usize> {
    let first = columns.first().copied()?;
    columns.iter().all(|columns| *columns == first).then_some(first)
}

/// Each rank with the address and the bytes of its part, one after the other.
fn parts(columns: &[usize], column_bytes: usize, at: u64) -> impl Iterator<Item = (usize, u64, usize)> {
    let mut at = at;
    columns.iter().enumerate().map(move |(rank, columns)| {
        let (start, bytes) = (at, columns * column_bytes);
        at += bytes as u64;
        (rank, start, bytes)
    })
}

/// Copies between parts that lie one after the other and their columns of a matrix: into the matrix, or, if `apart`, out of it.
fn beside(
    columns: &[usize],
    rows: usize,
    element: usize,
    parts: u64,
    matrix: u64,
    apart: bool,
) -> Vec<RowCopy> {
    let pitch = columns.iter().sum::<usize>() * element;
    let (mut part, mut column) = (parts, matrix);
    let mut copies = Vec::new();
    for row_bytes in columns.iter().map(|columns| columns * element) {
        let copy = match apart {
            false => {
                RowCopy { from: part, from_pitch: row_bytes, to: column, to_pitch: pitch, row_bytes, rows }
            }
            true => {
                RowCopy { from: column, from_pitch: pitch, to: part, to_pitch: row_bytes, row_bytes, rows }
            }
        };
        if row_bytes > 0 && rows > 0 {
            copies.push(copy);
        }
        part += (row_bytes * rows) as u64;
        column += row_bytes as u64;
    }
    copies
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use quadriga_conformance::{Rng, Suite};
    use quadriga_graph::{Graph, NodeId, Op};

    use super::*;

    /// Device memory of a rank: the input, the result and scratch memory, at these addresses.
    const INPUT: u64 = 1 << 20;
    const OUTPUT: u64 = 2 << 20;
    const SCRATCH: u64 = 3 << 20;

    struct Memory([Vec<u8>; 3]);

    impl Memory {
        fn at(&mut self, address: u64, bytes: usize) -> &mut [u8] {
            let (area, offset) = ((address >> 20) as usize - 1, (address & ((1 << 20) - 1)) as usize);
            &mut self.0[area][offset..offset + bytes]
        }

        fn floats(&mut self, address: u64, count: usize) -> Vec<f32> {
            let bytes = self.at(address, count * 4);
            bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
        }

        fn copy(&mut self, copy: &RowCopy) {
            for row in 0..copy.rows {
                let from = copy.from + (row * copy.from_pitch) as u64;
                let bytes = self.at(from, copy.row_bytes).to_vec();
                let to = copy.to + (row * copy.to_pitch) as u64;
                self.at(to, copy.row_bytes).copy_from_slice(&bytes);
            }
        }
    }

    /// Executes one call of all ranks, as NCCL documents it.
    fn call(calls: &[NcclCall], ranks: &mut [Memory]) {
        let sum = |ranks: &mut [Memory], of: &dyn Fn(usize) -> u64, count: usize| {
            let all: Vec<Vec<f32>> =
                ranks.iter_mut().enumerate().map(|(rank, memory)| memory.floats(of(rank), count)).collect();
            let add = |at: usize| all.iter().map(|values| values[at]).sum::<f32>();
            (0..count).flat_map(|at| add(at).to_le_bytes()).collect::<Vec<u8>>()
        };
        match calls[0] {
            NcclCall::AllReduce { count, .. } => {
                let at = |rank: usize| match calls[rank] {
                    NcclCall::AllReduce { at, count: same } if same == count => at,
                    other => panic!("{other:?}"),
                };
                let sum = sum(ranks, &at, count);
                for (rank, memory) in ranks.iter_mut().enumerate() {
                    memory.at(at(rank), sum.len()).copy_from_slice(&sum);
                }
            }
            NcclCall::ReduceScatter { count, .. } => {
                let places = |rank: usize| match calls[rank] {
                    NcclCall::ReduceScatter { from, to, count: same } if same == count => (from, to),
                    other => panic!("{other:?}"),
                };
                let size = ranks.len();
                let sum = sum(ranks, &|rank| places(rank).0, count * size);
                for (rank, memory) in ranks.iter_mut().enumerate() {
                    memory
                        .at(places(rank).1, count * 4)
                        .copy_from_slice(&sum[rank * count * 4..][..count * 4]);
                }
            }
            NcclCall::Reduce { count, root, .. } => {
                let places = |rank: usize| match calls[rank] {
                    NcclCall::Reduce { from, to, count: same, root: also }
                        if (same, also) == (count, root) =>
                    {
                        (from, to)
                    }
                    other => panic!("{other:?}"),
                };
                let sum = sum(ranks, &|rank| places(rank).0, count);
                ranks[root].at(places(root).1, sum.len()).copy_from_slice(&sum);
            }
            NcclCall::AllGather { bytes, .. } => {
                let mut all = Vec::new();
                for (rank, memory) in ranks.iter_mut().enumerate() {
                    let NcclCall::AllGather { from, bytes: same, .. } = calls[rank] else { panic!() };
                    assert_eq!(same, bytes);
                    all.extend_from_slice(memory.at(from, bytes));
                }
                for (rank, memory) in ranks.iter_mut().enumerate() {
                    let NcclCall::AllGather { to, .. } = calls[rank] else { panic!() };
                    memory.at(to, all.len()).copy_from_slice(&all);
                }
            }
            NcclCall::Broadcast { bytes, root, .. } => {
                let NcclCall::Broadcast { from, .. } = calls[root] else { panic!() };
                let sent = ranks[root].at(from, bytes).to_vec();
                for (rank, memory) in ranks.iter_mut().enumerate() {
                    let NcclCall::Broadcast { to, bytes: same, root: also, .. } = calls[rank] else {
                        panic!()
                    };
                    assert_eq!((same, also), (bytes, root));
                    memory.at(to, bytes).copy_from_slice(&sent);
                }
            }
            other => panic!("{other:?}"),
        }
    }

    /// The one collective of a case's graph, if it has only that.
    fn only(graph: &Graph) -> Option<(NodeId, &Collective)> {
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        match (nodes.as_slice(), graph.get_node(*nodes.first()?)?.op()) {
            ([node], Op::Collective(collective)) => Some((*node, collective)),
            _ => None,
        }
    }

    #[test]
    fn calls_of_all_ranks_compute_the_cases_of_collectives() {
        let suite = Suite::new();
        let mut rng = Rng::new(5);
        let mut tested = 0;
        let wanted = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"];
        for index in (0..suite.len()).filter(|index| wanted.contains(&suite.operation(*index).unwrap())) {
            let case = suite.case(index).unwrap().unwrap();
            if only(&case.graph).is_none() {
                continue;
            }
            let (mut ranks, mut exchanges) = (Vec::new(), Vec::new());
            for part in case.parts() {
                let (node, collective) = only(part.graph).unwrap();
                let first = &part.graph[part.graph.inputs(node)[0]];
                let output = &part.graph[part.graph[node].output()];
                let (rows, element) = (first.dims4()[2], first.dtype().block_bytes());
                let scratch = scratch_bytes(&collective.kind, rows, element);
                let mut garbage =
                    |bytes: usize| (0..bytes).map(|_| rng.below(256) as u8).collect::<Vec<u8>>();
                ranks.push(Memory([part.inputs[0].1.clone(), garbage(output.bytes()), garbage(scratch)]));
                let places = ExchangePlaces {
                    input: INPUT,
                    output: OUTPUT,
                    bytes: output.bytes(),
                    rows,
                    element,
                    scratch: SCRATCH,
                };
                exchanges.push(DeviceExchange::of(collective, places));
            }
            for (memory, exchange) in ranks.iter_mut().zip(&exchanges) {
                exchange.before.iter().for_each(|copy| memory.copy(copy));
            }
            assert!(exchanges.iter().all(|exchange| exchange.calls.len() == exchanges[0].calls.len()));
            for at in 0..exchanges[0].calls.len() {
                let calls: Vec<NcclCall> = exchanges.iter().map(|exchange| exchange.calls[at]).collect();
                call(&calls, &mut ranks);
            }
            for (memory, exchange) in ranks.iter_mut().zip(&exchanges) {
                exchange.after.iter().for_each(|copy| memory.copy(copy));
            }
            let expected = case.expected().unwrap();
            for ((part, memory), expected) in case.parts().zip(&ranks).zip(&expected) {
                let output = &part.graph[part.graph.outputs()[0].1];
                let judged = quadriga_conformance::judge(output, expected, &memory.0[1], case.tolerance);
                assert!(judged.is_ok(), "{}: {judged:?}", case.name);
            }
            tested += 1;
        }
        assert!(tested > 200, "{tested}");
    }
}
