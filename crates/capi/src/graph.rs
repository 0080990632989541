//! Finished graphs.

use std::ffi::c_char;

use quadriga::graph::{Graph, TensorId};

use crate::arguments::{give_text, required, text};
use crate::guard;
use crate::handle::{self, Handle};
use crate::status::{Failure, Outcome, QD_STATUS_NOT_FOUND, qd_error, qd_status};
use crate::tensor::{QD_NO_TENSOR, qd_tensor, qd_tensor_info};

/// A finished graph: immutable.
pub struct qd_graph {
    _opaque: (),
}

impl Handle for qd_graph {
    type Object = Graph;
    const NAME: &'static str = "qd_graph";
}

/// The tensor of a number.
pub(crate) fn tensor_id(graph: &Graph, tensor: qd_tensor) -> Outcome<TensorId> {
    let id = usize::try_from(tensor).ok().map(TensorId::from_index).filter(|id| graph.get(*id).is_some());
    id.ok_or_else(|| Failure::new(QD_STATUS_NOT_FOUND, format!("the graph has no tensor {tensor}")))
}

/// Frees a graph. Plans and sessions of it stay usable.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_graph_free(graph: *mut qd_graph) {
    guard::free(graph);
}

/// The graph as text: a line for each tensor.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_graph_text(
    graph: *const qd_graph,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&handle::get(graph)?.to_string(), buffer, capacity, needed) }
    })
}

/// The number of nodes of a graph; 0 without one.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_graph_node_count(graph: *const qd_graph) -> usize {
    guard::value(0, || Ok(handle::get(graph)?.nodes().len()))
}

/// The number of tensors of a graph; 0 without one.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_graph_tensor_count(graph: *const qd_graph) -> usize {
    guard::value(0, || Ok(handle::get(graph)?.tensors().len()))
}

/// The tensor of a name: a leaf, an output, or a labelled result; QD_NO_TENSOR if there is none.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_graph_find(graph: *const qd_graph, name: *const c_char) -> qd_tensor {
    guard::value(QD_NO_TENSOR, || {
        let graph = handle::get(graph)?;
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let id = graph.output(name).or_else(|| graph.tensor(name));
        Ok(id.and_then(|id| qd_tensor::try_from(id.index()).ok()).unwrap_or(QD_NO_TENSOR))
    })
}

/// Type and shape of a tensor of a graph.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_graph_tensor(
    graph: *const qd_graph,
    tensor: qd_tensor,
    info: Option<&mut qd_tensor_info>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let graph = handle::get(graph)?;
        let id = tensor_id(&graph, tensor)?;
        if let Some(tensor) = graph.get(id) {
            *required(info, "info")? = qd_tensor_info::of(tensor);
        }
        Ok(())
    })
}

/// The name of a tensor of a graph.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_graph_tensor_name(
    graph: *const qd_graph,
    tensor: qd_tensor,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let graph = handle::get(graph)?;
        let name = graph.name(tensor_id(&graph, tensor)?);
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&name, buffer, capacity, needed) }
    })
}
