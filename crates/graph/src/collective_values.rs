//! Collectives as methods of a value.

use crate::dtype::DType;
use crate::ops::{Collective, CollectiveKind, Op, Ranks};
use crate::shape::Shape;
use crate::value::Value;

/// Operations that all ranks of a group execute together, in the order in which their graphs have them.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder, Ranks};
///
/// // The graph of the first of two ranks, which have three and one of four columns.
/// let ranks = Ranks { group: 0, rank: 0, count: 2 };
/// let g = GraphBuilder::new();
/// let part = g.input("part", DType::F32, [5, 3]);
/// let whole = part.all_gather(ranks, [3, 1]);
/// assert_eq!(whole.shape().dims(), [5, 4]);
/// g.output("sum", whole.all_reduce(ranks));
/// assert!(g.finish().is_ok());
/// ```
impl<'g> Value<'g> {
    /// The sum of this F32 tensor over all ranks.
    #[track_caller]
    pub fn all_reduce(self, ranks: Ranks) -> Value<'g> {
        self.collective(ranks, CollectiveKind::AllReduce, &[])
    }

    /// All ranks' matrices beside each other, of which each has so many columns.
    #[track_caller]
    pub fn all_gather(self, ranks: Ranks, columns: impl Into<Vec<usize>>) -> Value<'g> {
        self.collective(ranks, CollectiveKind::AllGather { columns: columns.into() }, &[])
    }

    /// This rank's columns of the sum of this F32 matrix over all ranks, of which each gets so many.
    #[track_caller]
    pub fn reduce_scatter(self, ranks: Ranks, columns: impl Into<Vec<usize>>) -> Value<'g> {
        self.collective(ranks, CollectiveKind::ReduceScatter { columns: columns.into() }, &[])
    }

    /// The tensor of rank `root`; the others' tensors have the same type and shape, and are replaced.
    #[track_caller]
    pub fn broadcast(self, ranks: Ranks, root: usize) -> Value<'g> {
        self.collective(ranks, CollectiveKind::Broadcast { root }, &[])
    }

    /// Sends this tensor to a rank that receives it with the same tag. The result is this tensor; `others` are only waited for.
    #[track_caller]
    pub fn send(self, ranks: Ranks, to: usize, tag: u16, others: &[Value<'g>]) -> Value<'g> {
        self.collective(ranks, CollectiveKind::Send { to, tag }, others)
    }

    /// The tensor of this type and shape that another rank sends with the same tag. This value is only waited for.
    #[track_caller]
    pub fn receive(
        self,
        ranks: Ranks,
        (from, tag): (usize, u16),
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Value<'g> {
        self.collective(ranks, CollectiveKind::Receive { from, tag, dtype, shape: shape.into() }, &[])
    }

    #[track_caller]
    fn collective(self, ranks: Ranks, kind: CollectiveKind, others: &[Value<'g>]) -> Value<'g> {
        let inputs: Vec<_> = std::iter::once(self).chain(others.iter().copied()).collect();
        self.op(Op::Collective(Collective { ranks, kind }), &inputs)
    }
}
