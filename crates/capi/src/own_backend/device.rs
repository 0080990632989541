//! A table of functions as a backend.

use std::sync::Arc;

use quadriga::graph::{Graph, NodeId, Tensor, TensorId};
use quadriga::runtime::{
    Backend, BackendError, Buffer, Device, DeviceKind, Event, MemoryFacts, Program, Queue, Refusal, Region,
    SplitSource, Usage,
};

use super::async_queue::{AsyncEvent, AsyncQueue};
use super::memory::OwnBuffer;
use super::node::{BufferPlace, NodeDescription, qd_node};
use super::program::{OwnProgram, OwnWork};
use super::queue::{OwnEvent, OwnQueue};
use super::shared::{Compute, Shared, functions};
use super::table::qd_backend_table;
use crate::backend::{QD_DEVICE_CPU, QD_DEVICE_GPU};
use crate::buffer::usage_code;
use crate::status::{Outcome, QD_STATUS_OK, QD_STATUS_OUT_OF_MEMORY, qd_error};
use crate::tensor::qd_tensor_info;

/// A backend of the caller's own.
pub(crate) struct OwnBackend {
    shared: Arc<Shared>,
}

impl OwnBackend {
    /// A backend of a table. Its `destroy` is called also if the table cannot be used.
    ///
    /// # Safety
    /// The addresses in the table obey the rules of the header.
    pub(crate) unsafe fn new(table: qd_backend_table) -> Outcome<OwnBackend> {
        // SAFETY: the caller's promise.
        let checked = unsafe { functions(&table) };
        let (functions, name, description) = match checked {
            Ok(checked) => checked,
            Err(failure) => {
                if let Some(destroy) = table.destroy {
                    destroy(table.context);
                }
                return Err(failure);
            }
        };
        Ok(OwnBackend { shared: Arc::new(Shared { table, functions, name, description }) })
    }

    fn own(&self, region: &Region) -> Option<BufferPlace> {
        let buffer = OwnBuffer::of(&self.shared, region)?;
        Some(BufferPlace { buffer: buffer.pointer, offset: region.offset })
    }
}

impl Backend for OwnBackend {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn device(&self) -> Device {
        let (mut total, mut free) = (0, 0);
        if let Some(memory) = self.shared.table.memory {
            memory(self.shared.table.context, &raw mut total, &raw mut free);
        }
        Device {
            description: self.shared.description.clone(),
            kind: match self.shared.table.kind {
                QD_DEVICE_CPU => DeviceKind::Cpu,
                QD_DEVICE_GPU => DeviceKind::Gpu,
                _ => DeviceKind::Simulated,
            },
            asynchronous: self.shared.functions.queues.is_some(),
            total_bytes: (total != 0).then_some(total),
            free_bytes: (free != 0).then_some(free),
        }
    }

    fn memory(&self) -> MemoryFacts {
        let table = &self.shared.table;
        let max_buffer = (table.max_buffer != 0).then_some(table.max_buffer);
        MemoryFacts { alignment: table.alignment, max_buffer, host: false }
    }

    fn storage_bytes(&self, tensor: &Tensor) -> usize {
        let Some(storage_bytes) = self.shared.table.storage_bytes else { return tensor.bytes() };
        let info = qd_tensor_info::of(tensor);
        storage_bytes(self.shared.table.context, &raw const info).max(tensor.bytes())
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        let shared = &self.shared;
        let most = shared.table.max_buffer;
        if most != 0 && bytes > most {
            return Err(BackendError::Failed {
                backend: shared.name.clone(),
                what: "allocating",
                reason: format!("a buffer of {bytes} bytes; max_buffer of the table is {most}"),
            });
        }
        let mut error = qd_error::empty();
        let pointer =
            (shared.functions.allocate)(shared.table.context, bytes, usage_code(usage), &raw mut error);
        if pointer.is_null() {
            let status = if error.code == QD_STATUS_OK { QD_STATUS_OUT_OF_MEMORY } else { error.code };
            return Err(shared.failed("allocating", status, &error, bytes));
        }
        Ok(Arc::new(OwnBuffer { shared: Arc::clone(shared), pointer, bytes, usage }))
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        self.allocate(bytes, Usage::Staging)
    }

    fn placed(&self, tensor: &Tensor, region: &Region) -> Result<(), BackendError> {
        let (Some(placed), Some(place)) = (self.shared.table.placed, self.own(region)) else { return Ok(()) };
        let info = qd_tensor_info::of(tensor);
        self.shared.call("placing a tensor", |context, error| {
            placed(context, place.buffer, place.offset, &raw const info, error)
        })
    }

    fn released(&self, tensor: &Tensor, region: &Region) {
        if let (Some(released), Some(place)) = (self.shared.table.released, self.own(region)) {
            let info = qd_tensor_info::of(tensor);
            released(self.shared.table.context, place.buffer, place.offset, &raw const info);
        }
    }

    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        let refuse = |reason: String| Err(Refusal(reason.into()));
        let Some(described) = NodeDescription::new(graph, node, false, &|_| None) else {
            return refuse("there is no such node".to_owned());
        };
        if described.node().is_view != 0 {
            return Ok(());
        }
        let mut error = qd_error::empty();
        let context = self.shared.table.context;
        match (self.shared.functions.supports)(context, described.node(), &raw mut error) {
            QD_STATUS_OK => Ok(()),
            _ => refuse(error.text("not supported")),
        }
    }

    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        let mut regions: Vec<Region> = Vec::new();
        let mut nodes = Vec::new();
        for id in split.nodes {
            let unplaced = || BackendError::Unsupported {
                backend: self.shared.name.clone(),
                node: split.graph.node_name(*id),
                reason: "a tensor is not in memory of this backend".to_owned(),
            };
            let Some(node) = split.graph.get_node(*id) else { return Err(unplaced()) };
            if node.op().is_view() {
                continue;
            }
            let place = |tensor: TensorId| (split.place)(tensor).and_then(|place| self.own(&place.region));
            let tensors = split.graph.inputs(*id).iter().copied().chain([node.output()]);
            for tensor in tensors {
                let place = (split.place)(tensor).filter(|place| self.own(&place.region).is_some());
                regions.push(place.ok_or_else(unplaced)?.region);
            }
            let kept = (split.kept)(node.output());
            nodes.push(NodeDescription::new(split.graph, *id, kept, &place).ok_or_else(unplaced)?);
        }
        let shared = &self.shared;
        let work = match shared.functions.compute {
            Compute::Nodes(_) => OwnWork::Nodes(nodes),
            Compute::Programs { compile, .. } => {
                let pointers: Vec<*const qd_node> =
                    nodes.iter().map(|node| &raw const *node.node()).collect();
                let mut error = qd_error::empty();
                let program =
                    compile(shared.table.context, pointers.as_ptr(), pointers.len(), &raw mut error);
                if program.is_null() {
                    return Err(shared.failed("compiling", error.code, &error, 0));
                }
                OwnWork::Program(program)
            }
        };
        Ok(Box::new(OwnProgram { shared: Arc::clone(shared), work, _regions: regions }))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(match self.shared.functions.queues {
            Some(functions) => Box::new(AsyncQueue::new(&self.shared, functions)?),
            None => Box::new(OwnQueue { shared: Arc::clone(&self.shared) }),
        })
    }

    fn event(&self, _timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(match self.shared.functions.queues {
            Some(functions) => Arc::new(AsyncEvent::new(&self.shared, functions)?),
            None => Arc::new(OwnEvent),
        })
    }
}
