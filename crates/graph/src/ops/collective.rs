//! Operations that the ranks of a group execute together: parameters, inference rules, and the bytes that a rank sends.

use super::checks::{Inferred, need, need_f32, shape_error};
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::fingerprint::Mixer;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// A group of ranks, seen from one of them: plain data. The scheduler has the communicator of a group by its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ranks {
    /// The number of the group in this rank's graphs.
    pub group: u32,
    /// This rank, from 0.
    pub rank: usize,
    /// How many ranks the group has.
    pub count: usize,
}

/// What ranks do together, as an operation of each rank's graph.
///
/// All ranks of a group run the same collectives in the same order. The nodes of one graph are ordered as they were built, on
/// whatever backends they are, so it is enough that all ranks build them in the same order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Collective {
    /// The group and this rank.
    pub ranks: Ranks,
    /// What they do.
    pub kind: CollectiveKind,
}

/// The kinds of collectives, and messages between two ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveKind {
    /// The sum of all ranks' F32 tensors, on each.
    AllReduce,
    /// All ranks' matrices `[m, columns of the rank]` beside each other, on each: `[m, sum of columns]`.
    AllGather {
        /// The columns of each rank, which may have none.
        columns: Vec<usize>,
    },
    /// This rank's columns of the sum of all ranks' F32 matrices `[m, sum of columns]`.
    ReduceScatter {
        /// The columns of each rank, which may have none.
        columns: Vec<usize>,
    },
    /// The tensor of one rank, on each.
    Broadcast {
        /// The rank whose tensor it is.
        root: usize,
    },
    /// Sends the first input to another rank; the result is that input. Further inputs are only waited for.
    Send {
        /// The receiver.
        to: usize,
        /// Distinguishes messages between the same two ranks.
        tag: u16,
    },
    /// The tensor that another rank sends. The inputs are only waited for.
    Receive {
        /// The sender.
        from: usize,
        /// The sender's tag.
        tag: u16,
        /// The type of the sender's tensor.
        dtype: DType,
        /// The shape of the sender's tensor.
        shape: Shape,
    },
}

impl CollectiveKind {
    /// The operation's name.
    pub fn name(&self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::AllGather { .. } => "all_gather",
            CollectiveKind::ReduceScatter { .. } => "reduce_scatter",
            CollectiveKind::Broadcast { .. } => "broadcast",
            CollectiveKind::Send { .. } => "send",
            CollectiveKind::Receive { .. } => "receive",
        }
    }

    pub(super) fn description(&self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "sum of all ranks' tensors",
            CollectiveKind::AllGather { .. } => "all ranks' columns beside each other",
            CollectiveKind::ReduceScatter { .. } => "the rank's columns of the sum over ranks",
            CollectiveKind::Broadcast { .. } => "one rank's tensor",
            CollectiveKind::Send { .. } => "sends a tensor to another rank",
            CollectiveKind::Receive { .. } => "receives a tensor of another rank",
        }
    }

    /// Whether the result replaces the elements of the first input: it starts as a copy of them, or in their memory.
    pub fn is_in_place(&self) -> bool {
        matches!(
            self,
            CollectiveKind::AllReduce | CollectiveKind::Broadcast { .. } | CollectiveKind::Send { .. }
        )
    }
}

impl Collective {
    /// The bytes that this rank sends to others, of a node with this first input and result: what ring algorithms send, whatever
    /// the communicator does. A sum is passed around once and its result once more; of a broadcast, each rank but one passes on all.
    pub fn sent_bytes(&self, input: &Tensor, output: &Tensor) -> u64 {
        let Ranks { rank, count, .. } = self.ranks;
        let count = count.max(1) as u64;
        // A share of the ranks' parts: all but one of them.
        let share = |bytes: usize| (u128::from(count - 1) * bytes as u128 / u128::from(count)) as u64;
        match self.kind {
            CollectiveKind::AllReduce => share(output.bytes()).saturating_mul(2),
            CollectiveKind::AllGather { .. } => share(output.bytes()),
            CollectiveKind::ReduceScatter { .. } => share(input.bytes()),
            CollectiveKind::Broadcast { root } => {
                let last = (root as u64 + count - 1) % count;
                if rank as u64 == last { 0 } else { output.bytes() as u64 }
            }
            CollectiveKind::Send { .. } => output.bytes() as u64,
            CollectiveKind::Receive { .. } => 0,
        }
    }

    pub(crate) fn mix(&self, mix: &mut Mixer) {
        let Ranks { group, rank, count } = self.ranks;
        mix.sizes(&[group as usize, rank, count]);
        match &self.kind {
            CollectiveKind::AllReduce => {}
            CollectiveKind::AllGather { columns } | CollectiveKind::ReduceScatter { columns } => {
                mix.sizes(columns);
            }
            CollectiveKind::Broadcast { root } => mix.size(*root),
            // The result has the type and shape of what is received.
            CollectiveKind::Send { to: peer, tag } | CollectiveKind::Receive { from: peer, tag, .. } => {
                mix.sizes(&[*peer, usize::from(*tag)]);
            }
        }
    }

    pub(super) fn infer(&self, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
        let Ranks { rank, count, .. } = self.ranks;
        if rank >= count {
            return shape_error(format!("there is no rank {rank} of {count}"));
        }
        let first = match (&self.kind, inputs) {
            (CollectiveKind::Send { .. } | CollectiveKind::Receive { .. }, [first, ..]) | (_, [first]) => {
                first
            }
            (CollectiveKind::Send { .. } | CollectiveKind::Receive { .. }, []) => {
                return Err(GraphErrorKind::Arity { expected: "1 or more", found: 0 });
            }
            (_, inputs) => return Err(GraphErrorKind::Arity { expected: "1", found: inputs.len() }),
        };
        match &self.kind {
            CollectiveKind::AllReduce => {
                need_f32(0, first)?;
                need_contiguous(first)?;
                Ok(Inferred::like(first))
            }
            CollectiveKind::AllGather { columns } => {
                need_elements(first)?;
                let all = self.columns(columns)?;
                self.matrix(first, columns.get(rank).copied().unwrap_or_default(), all)
            }
            CollectiveKind::ReduceScatter { columns } => {
                need_f32(0, first)?;
                let all = self.columns(columns)?;
                self.matrix(first, all, columns.get(rank).copied().unwrap_or_default())
            }
            CollectiveKind::Broadcast { root } => {
                need_elements(first)?;
                need_contiguous(first)?;
                if *root >= count {
                    return shape_error(format!("there is no rank {root} of {count}"));
                }
                Ok(Inferred::like(first))
            }
            CollectiveKind::Send { to, .. } => {
                need_elements(first)?;
                need_contiguous(first)?;
                self.peer(*to)?;
                Ok(Inferred::like(first))
            }
            CollectiveKind::Receive { from, dtype, shape, .. } => {
                self.peer(*from)?;
                if dtype.block_len() != 1 {
                    return shape_error(format!("{dtype} is made of blocks, which ranks do not exchange"));
                }
                Ok(Inferred::fresh(*dtype, *shape))
            }
        }
    }

    /// The sum of all ranks' columns.
    fn columns(&self, columns: &[usize]) -> Result<usize, GraphErrorKind> {
        if columns.len() != self.ranks.count {
            return shape_error(format!("columns of {} ranks for {}", columns.len(), self.ranks.count));
        }
        let sum = columns.iter().try_fold(0usize, |sum, columns| sum.checked_add(*columns));
        sum.ok_or(GraphErrorKind::Overflow)
    }

    /// A matrix with this many columns, and the result with as many rows.
    fn matrix(&self, first: &Tensor, columns: usize, result: usize) -> Result<Inferred, GraphErrorKind> {
        need_contiguous(first)?;
        let [.., found] = first.dims4();
        if first.shape().rank() != 2 || found != columns {
            let (rank, shape) = (self.ranks.rank, first.shape());
            return shape_error(format!("a matrix of {columns} columns on rank {rank}, not {shape}"));
        }
        let [_, _, rows, _] = first.dims4();
        Ok(Inferred::fresh(first.dtype(), Shape::from([rows, result])))
    }

    fn peer(&self, peer: usize) -> Result<(), GraphErrorKind> {
        let Ranks { rank, count, .. } = self.ranks;
        if peer >= count || peer == rank {
            return shape_error(format!("rank {rank} of {count} has no peer {peer}"));
        }
        Ok(())
    }
}

fn need_contiguous(first: &Tensor) -> Result<(), GraphErrorKind> {
    match first.is_contiguous() {
        true => Ok(()),
        false => shape_error("a contiguous tensor is exchanged; cont() makes one"),
    }
}

/// Data that is only moved may have any type without blocks.
fn need_elements(first: &Tensor) -> Result<(), GraphErrorKind> {
    need(0, first, "a type without blocks", |dtype| dtype.block_len() == 1)
}
