//! The layout of each weight on each backend, and the buffers that hold them. Forecasts and allocations both come from
//! here, so that they agree.

use std::sync::Arc;

use quadriga_graph::{Graph, Op, TensorId, TensorKind};

use super::uses::WeightUses;
use crate::{Backend, Layout, MemoryFacts, WeightLayout};

/// A weight or constant, and a backend that holds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightRead {
    pub(crate) tensor: TensorId,
    pub(crate) backend: usize,
    /// Whether a view of it is read; then its layout must be plain.
    pub(crate) viewed: bool,
}

/// How a weight is held on a backend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Residency {
    pub(crate) layout: WeightLayout,
    /// Whether the backend may read the bytes where they are, in the file map.
    pub(crate) mapped: bool,
}

/// The bytes of weights on one backend.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightBytes {
    /// Bytes of the buffers that weights are loaded into, with the gaps between them.
    pub(crate) loaded: u64,
    /// Bytes that are read in the file map.
    pub(crate) mapped: u64,
}

/// Which of a backend's weights fit into a number of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fitting {
    /// Weights that would be loaded there.
    pub(crate) weights: usize,
    /// How many of them fit, in the order of their first use.
    pub(crate) fitting: usize,
    /// The bytes of those.
    pub(crate) bytes: u64,
}

/// How weights are spread over buffers.
pub(crate) struct BufferPlan {
    /// For each weight the number of its buffer and its offset there.
    pub(crate) places: Vec<(usize, usize)>,
    /// The bytes of each buffer.
    pub(crate) buffers: Vec<usize>,
}

/// How a backend holds a weight that is used like this. Constants, and weights that are read through views, are plain.
pub(crate) fn residency(
    graph: &Graph,
    backend: &dyn Backend,
    read: WeightRead,
    uses: &[(&Op, usize)],
) -> Residency {
    let plain = WeightLayout { layout: Layout::Plain, bytes: 0, mappable: true };
    let Some(tensor) = graph.get(read.tensor) else { return Residency { layout: plain, mapped: false } };
    let layout = if read.viewed || tensor.kind() == TensorKind::Constant {
        WeightLayout { bytes: backend.storage_bytes(tensor), ..plain }
    } else {
        backend.weight_layout(tensor, uses)
    };
    let mappable = layout.layout == Layout::Plain && layout.mappable && backend.memory().host;
    // A backend may refuse some data, such as misaligned bytes.
    let maps = || graph.data(read.tensor).is_some_and(|data| backend.map(data).is_some());
    Residency { layout, mapped: mappable && maps() }
}

/// The bytes of the weights of a graph, for each backend.
pub(crate) fn bytes_on(
    graph: &Graph,
    backends: &[Arc<dyn Backend>],
    reads: impl Iterator<Item = WeightRead>,
) -> Vec<WeightBytes> {
    let uses = WeightUses::of(graph);
    let mut bytes = vec![WeightBytes::default(); backends.len()];
    let mut loaded: Vec<Vec<usize>> = vec![Vec::new(); backends.len()];
    for read in reads {
        let (Some(backend), Some(bytes), Some(loaded)) =
            (backends.get(read.backend), bytes.get_mut(read.backend), loaded.get_mut(read.backend))
        else {
            continue;
        };
        let Residency { layout, mapped } =
            residency(graph, &**backend, read, &uses.of_tensor(graph, read.tensor));
        if mapped {
            bytes.mapped = bytes.mapped.saturating_add(layout.bytes as u64);
        } else {
            loaded.push(layout.bytes);
        }
    }
    for ((bytes, sizes), backend) in bytes.iter_mut().zip(loaded).zip(backends) {
        let plan = plan_buffers(sizes, backend.memory());
        bytes.loaded = plan.buffers.iter().fold(0, |sum, buffer| sum.saturating_add(*buffer as u64));
    }
    bytes
}

/// Of the weights that would be loaded to a backend, those that fit into so many bytes.
pub(crate) fn fitting(
    graph: &Graph,
    backend: &dyn Backend,
    reads: impl Iterator<Item = WeightRead>,
    bytes: u64,
) -> Fitting {
    let uses = WeightUses::of(graph);
    let alignment = backend.memory().alignment.max(1) as u64;
    let mut out = Fitting { weights: 0, fitting: 0, bytes: 0 };
    for read in reads {
        let held = residency(graph, backend, read, &uses.of_tensor(graph, read.tensor));
        if held.mapped {
            continue;
        }
        let start = out.bytes.checked_next_multiple_of(alignment);
        let end = start.map_or(u64::MAX, |start| start.saturating_add(held.layout.bytes as u64));
        // Once one does not fit, those after it do not count.
        if end <= bytes && out.fitting == out.weights {
            out.fitting += 1;
            out.bytes = end;
        }
        out.weights += 1;
    }
    out
}

/// The most bytes of a buffer with several weights. The memory of a buffer is freed with the last weight in it, so a
/// weight that is in use keeps no more than this.
const MAX_GROUP_BYTES: usize = 128 << 20;

/// Puts weights of these sizes one after another into buffers, as large as [`MAX_GROUP_BYTES`] and the backend's limit
/// allow.
pub(crate) fn plan_buffers(sizes: impl IntoIterator<Item = usize>, facts: MemoryFacts) -> BufferPlan {
    let (mut places, mut buffers) = (Vec::new(), Vec::<usize>::new());
    for size in sizes {
        let fits = |used: &usize| {
            let start = used.checked_next_multiple_of(facts.alignment.max(1))?;
            let end = start.checked_add(size)?;
            let max = facts.max_buffer.map_or(MAX_GROUP_BYTES, |max| max.min(MAX_GROUP_BYTES));
            (end <= max).then_some((start, end))
        };
        let number = buffers.len();
        match buffers.last_mut().and_then(|used| fits(used).map(|(start, end)| (used, start, end))) {
            Some((used, start, end)) => {
                *used = end;
                places.push((number - 1, start));
            }
            None => {
                buffers.push(size);
                places.push((number, 0));
            }
        }
    }
    BufferPlan { places, buffers }
}
