//! Collectives as operations of a graph.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quadriga_graph::{CustomCall, CustomError, CustomKernel, CustomOp, DType, Shape, Tensor};

use crate::communicator::Communicator;
use crate::operation::{Operation, Reduction};

/// The number of the next communicator, which distinguishes its operations from others'.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Makes operations of a graph that a communicator executes.
///
/// All ranks run graphs with the same collectives in the same order, so collectives of one graph must depend on each other:
/// nothing else orders independent nodes.
#[derive(Clone, Debug)]
pub struct Collectives {
    communicator: Arc<dyn Communicator>,
    number: u64,
}

/// What a node does with its input.
#[derive(Clone, Debug)]
enum Collective {
    AllReduce,
    AllGather { columns: Vec<usize> },
    ReduceScatter { columns: Vec<usize> },
    Broadcast { root: usize },
    Send { to: usize, tag: u16 },
    Receive { from: usize, tag: u16, shape: [usize; 2] },
}

struct CollectiveKernel {
    communicator: Arc<dyn Communicator>,
    number: u64,
    collective: Collective,
}

impl Collectives {
    /// The operations of a communicator.
    pub fn new(communicator: Arc<dyn Communicator>) -> Collectives {
        Collectives { communicator, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// The communicator.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// The sum of all ranks' F32 inputs, in place.
    pub fn all_reduce(&self) -> CustomOp {
        self.operation(Collective::AllReduce)
    }

    /// All ranks' F32 matrices `[m, columns of the rank]` beside each other: `[m, sum of columns]`.
    pub fn all_gather(&self, columns: Vec<usize>) -> CustomOp {
        self.operation(Collective::AllGather { columns })
    }

    /// The rank's columns of the sum of all ranks' F32 matrices `[m, sum of columns]`.
    pub fn reduce_scatter(&self, columns: Vec<usize>) -> CustomOp {
        self.operation(Collective::ReduceScatter { columns })
    }

    /// The input of rank `root`, in place.
    pub fn broadcast(&self, root: usize) -> CustomOp {
        self.operation(Collective::Broadcast { root })
    }

    /// Sends the input, of any type, to another rank, and does not wait until it is received; the result is the input, in place.
    /// Further inputs are only waited for.
    pub fn send(&self, to: usize, tag: u16) -> CustomOp {
        self.operation(Collective::Send { to, tag })
    }

    /// An F32 matrix that another rank sends. Its inputs are only waited for.
    pub fn receive(&self, from: usize, tag: u16, shape: [usize; 2]) -> CustomOp {
        self.operation(Collective::Receive { from, tag, shape })
    }

    fn operation(&self, collective: Collective) -> CustomOp {
        let (communicator, number) = (Arc::clone(&self.communicator), self.number);
        CustomOp::new(CollectiveKernel { communicator, number, collective })
    }
}

impl CollectiveKernel {
    /// The matrix with this rank's columns in place of all, or the reverse.
    fn columns_of(&self, columns: &[usize]) -> (usize, usize) {
        (columns.get(self.communicator.rank()).copied().unwrap_or(0), columns.iter().sum())
    }
}

impl CustomKernel for CollectiveKernel {
    fn name(&self) -> &'static str {
        match self.collective {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather { .. } => "all_gather",
            Collective::ReduceScatter { .. } => "reduce_scatter",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Send { .. } => "send",
            Collective::Receive { .. } => "receive",
        }
    }

    fn description(&self) -> &'static str {
        match self.collective {
            Collective::AllReduce => "sum of all ranks' tensors",
            Collective::AllGather { .. } => "all ranks' columns beside each other",
            Collective::ReduceScatter { .. } => "this rank's columns of the sum of all ranks' matrices",
            Collective::Broadcast { .. } => "one rank's tensor",
            Collective::Send { .. } => "sends a tensor to another rank",
            Collective::Receive { .. } => "receives a tensor of another rank",
        }
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        let Some(first) = inputs.first() else { return Err("an input is needed".into()) };
        if let Collective::Receive { shape, .. } = self.collective {
            return Ok((DType::F32, Shape::from(shape)));
        }
        if matches!(self.collective, Collective::Send { .. }) && first.is_contiguous() {
            return Ok((first.dtype(), *first.shape()));
        }
        if first.dtype() != DType::F32 || !first.is_contiguous() {
            return Err(
                format!("a contiguous F32 input is needed, not {} {}", first.dtype(), first.shape()).into()
            );
        }
        let (rows, found) = (first.shape().rows(), first.shape().cols());
        let (wanted, result) = match &self.collective {
            Collective::AllGather { columns } => self.columns_of(columns),
            Collective::ReduceScatter { columns } => {
                let (own, all) = self.columns_of(columns);
                (all, own)
            }
            _ => return Ok((DType::F32, *first.shape())),
        };
        if found != wanted {
            return Err(
                format!("{found} columns on rank {}, instead of {wanted}", self.communicator.rank()).into()
            );
        }
        Ok((DType::F32, Shape::from([rows, result])))
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        Some(format!("{} {:?}", self.number, self.collective).into_bytes())
    }

    fn in_place(&self) -> Option<usize> {
        match self.collective {
            Collective::AllReduce | Collective::Broadcast { .. } | Collective::Send { .. } => Some(0),
            Collective::AllGather { .. } | Collective::ReduceScatter { .. } | Collective::Receive { .. } => {
                None
            }
        }
    }

    /// One thread communicates.
    fn units(&self, _inputs: &[&Tensor], _output: &Tensor) -> usize {
        1
    }

    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let ranks = &*self.communicator;
        match &self.collective {
            Collective::AllReduce => {
                let (values, reduction) = (call.output.f32()?, Reduction::Sum);
                ranks.run(Operation::AllReduce { values, reduction })?;
            }
            Collective::Broadcast { root } => {
                ranks.run(Operation::Broadcast { bytes: call.output.bytes(), root: *root })?;
            }
            Collective::Send { to, tag } => {
                ranks.run(Operation::Send { bytes: call.output.bytes(), to: *to, tag: *tag })?;
            }
            Collective::Receive { from, tag, .. } => {
                ranks.run(Operation::Receive { bytes: call.output.bytes(), from: *from, tag: *tag })?;
            }
            Collective::AllGather { columns } => {
                let part = call.input(0)?.bytes()?;
                let rows = call.output.shape().rows();
                let lengths: Vec<usize> = columns.iter().map(|columns| columns * rows * 4).collect();
                let whole = call.output.bytes();
                if rows <= 1 {
                    ranks.run(Operation::AllGather { part, lengths: &lengths, whole })?;
                } else {
                    let mut parts = vec![0; whole.len()];
                    ranks.run(Operation::AllGather { part, lengths: &lengths, whole: &mut parts })?;
                    beside(&parts, columns, rows, whole);
                }
            }
            Collective::ReduceScatter { columns } => {
                let input = call.input(0)?;
                let (values, rows) = (input.f32()?, input.shape().rows());
                let lengths: Vec<usize> = columns.iter().map(|columns| columns * rows).collect();
                let part = call.output.f32()?;
                let all = columns.iter().sum::<usize>();
                let mut parts = Vec::with_capacity(values.len());
                let mut first = 0;
                for own in columns {
                    for row in values.chunks(all.max(1)) {
                        parts.extend_from_slice(row.get(first..first + own).unwrap_or_default());
                    }
                    first += own;
                }
                ranks.run(Operation::ReduceScatter { values: &parts, lengths: &lengths, part })?;
            }
        }
        Ok(())
    }
}

/// Matrices `[rows, columns]` of F32, one after the other, as one with all their columns.
fn beside(parts: &[u8], columns: &[usize], rows: usize, whole: &mut [u8]) {
    let all = columns.iter().sum::<usize>() * 4;
    let (mut rest, mut first) = (parts, 0);
    for bytes in columns.iter().map(|columns| columns * 4).filter(|bytes| *bytes > 0) {
        let (part, after) = rest.split_at_checked(bytes * rows).unwrap_or((rest, &[]));
        for (from, to) in part.chunks(bytes).zip(whole.chunks_mut(all)) {
            if let Some(to) = to.get_mut(first..first + bytes) {
                to.copy_from_slice(from);
            }
        }
        rest = after;
        first += bytes;
    }
}
