//! Collectives of graphs, executed by a communicator.

use std::sync::Arc;
use std::time::Duration;

use quadriga_graph::{CollectiveKind, Ranks};
use quadriga_runtime::{ExchangeCall, RankGroup};

use crate::communicator::Communicator;
use crate::error::ClusterError;
use crate::operation::{Operation, Reduction};

/// Executes the collectives of a rank's graphs with a communicator, in host memory: what a scheduler has for a group.
///
/// ```
/// use std::sync::Arc;
///
/// use quadriga_cluster::{Collectives, Communicator, Limits, in_process};
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::Scheduler;
///
/// std::thread::scope(|scope| {
///     for communicator in in_process(2, Limits::default()) {
///         scope.spawn(move || {
///             let collectives = Collectives::new(Arc::new(communicator));
///             let g = GraphBuilder::new();
///             let x = g.input("x", DType::F32, [2]);
///             g.output("sum", x.all_reduce(collectives.ranks(0)));
///
///             let cpu = quadriga_cpu::Backend::builder().threads(1).build()?;
///             let scheduler = Scheduler::new(cpu).ranks(0, Arc::new(collectives));
///             let mut session = scheduler.plan(g.finish()?)?.session()?;
///             session.run(&[("x", &[1.0f32, 2.0])])?;
///             assert_eq!(session.read::<f32>("sum")?, [2.0, 4.0]);
///             Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
///         });
///     }
/// });
/// ```
#[derive(Clone, Debug)]
pub struct Collectives {
    communicator: Arc<dyn Communicator>,
}

impl Collectives {
    /// Executes collectives with a communicator.
    pub fn new(communicator: Arc<dyn Communicator>) -> Collectives {
        Collectives { communicator }
    }

    /// The communicator.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// The ranks as collectives of a graph name them, under the number of a group.
    pub fn ranks(&self, group: u32) -> Ranks {
        Ranks { group, rank: self.communicator.rank(), count: self.communicator.size() }
    }

    fn execute(&self, call: ExchangeCall<'_>) -> Result<(), ClusterError> {
        let ExchangeCall { kind, dtype, rows, input, output } = call;
        let (ranks, element) = (&*self.communicator, dtype.block_bytes());
        match kind {
            CollectiveKind::AllReduce => with_floats(output, |values| {
                ranks.run(Operation::AllReduce { values, reduction: Reduction::Sum })
            }),
            CollectiveKind::Broadcast { root } => {
                ranks.run(Operation::Broadcast { bytes: output, root: *root })
            }
            CollectiveKind::Send { to, tag } => {
                ranks.run(Operation::Send { bytes: output, to: *to, tag: *tag })
            }
            CollectiveKind::Receive { from, tag, .. } => {
                ranks.run(Operation::Receive { bytes: output, from: *from, tag: *tag })
            }
            CollectiveKind::AllGather { columns } => {
                let lengths: Vec<usize> = columns.iter().map(|columns| columns * rows * element).collect();
                if rows <= 1 {
                    return ranks.run(Operation::AllGather { part: input, lengths: &lengths, whole: output });
                }
                let mut parts = vec![0; output.len()];
                ranks.run(Operation::AllGather { part: input, lengths: &lengths, whole: &mut parts })?;
                beside(&parts, columns, (rows, element), output);
                Ok(())
            }
            CollectiveKind::ReduceScatter { columns } => {
                let lengths: Vec<usize> = columns.iter().map(|columns| columns * rows).collect();
                let values = apart(input, columns);
                with_floats(output, |part| {
                    ranks.run(Operation::ReduceScatter { values: &values, lengths: &lengths, part })
                })
            }
        }
    }
}

impl RankGroup for Collectives {
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn size(&self) -> usize {
        self.communicator.size()
    }

    fn exchange(&self, call: ExchangeCall<'_>) -> Result<(), String> {
        self.execute(call).map_err(|error| error.to_string())
    }

    fn failure(&self) -> Option<String> {
        self.communicator.failure().map(|failure| failure.to_string())
    }

    fn step_limit(&self) -> Option<Duration> {
        self.communicator.limits().operation
    }
}

/// Lets work change bytes as F32 values: in their memory where that is aligned, as buffers of tensors are.
fn with_floats(
    bytes: &mut [u8],
    work: impl FnOnce(&mut [f32]) -> Result<(), ClusterError>,
) -> Result<(), ClusterError> {
    if let Ok(values) = bytemuck::try_cast_slice_mut(bytes) {
        return work(values);
    }
    let mut values = floats(bytes);
    work(&mut values)?;
    bytes.as_chunks_mut().0.iter_mut().zip(&values).for_each(|(to, value)| *to = value.to_ne_bytes());
    Ok(())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

/// The columns of each rank of an F32 matrix, one rank's after the other's.
fn apart(matrix: &[u8], columns: &[usize]) -> Vec<f32> {
    let values = floats(matrix);
    let all = columns.iter().sum::<usize>();
    let mut parts = Vec::with_capacity(values.len());
    let mut first = 0;
    for own in columns {
        for row in values.chunks(all.max(1)) {
            parts.extend_from_slice(row.get(first..first + own).unwrap_or_default());
        }
        first += own;
    }
    parts
}

/// Matrices `[rows, columns]`, one after the other, as one with all their columns.
fn beside(parts: &[u8], columns: &[usize], (rows, element): (usize, usize), whole: &mut [u8]) {
    let all = columns.iter().sum::<usize>() * element;
    let (mut rest, mut first) = (parts, 0);
    for bytes in columns.iter().map(|columns| columns * element).filter(|bytes| *bytes > 0) {
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
