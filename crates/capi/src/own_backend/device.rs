//! A table of functions as a backend: its memory, its programs, and queues that do everything at once.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use quadriga::graph::{Graph, NodeId, Tensor, TensorId};
use quadriga::runtime::{
    Backend, BackendError, Buffer, Device, DeviceKind, Event, MemoryFacts, Program, Queue, Refusal, Region,
    SplitSource, Usage, check_range,
};

use super::node::{BufferPlace, NodeDescription, qd_node};
use super::table::qd_backend_table;
use crate::arguments::{optional_text, text};
use crate::backend::{QD_DEVICE_CPU, QD_DEVICE_GPU, QD_DEVICE_OTHER};
use crate::buffer::usage_code;
use crate::status::{
    Failure, Outcome, QD_STATUS_DEVICE_LOST, QD_STATUS_OK, QD_STATUS_OUT_OF_MEMORY, qd_error, qd_status,
};
use crate::tensor::qd_tensor_info;

/// The functions that every backend has.
struct Functions {
    allocate: extern "C" fn(*mut c_void, usize, i32, *mut qd_error) -> *mut c_void,
    free: extern "C" fn(*mut c_void, *mut c_void),
    write: extern "C" fn(*mut c_void, *mut c_void, usize, *const c_void, usize, *mut qd_error) -> qd_status,
    read: extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void, usize, *mut qd_error) -> qd_status,
    supports: extern "C" fn(*mut c_void, *const qd_node, *mut qd_error) -> qd_status,
    compute: Compute,
}

/// How nodes are computed.
#[derive(Clone, Copy)]
enum Compute {
    Programs {
        compile: extern "C" fn(*mut c_void, *const *const qd_node, usize, *mut qd_error) -> *mut c_void,
        run: extern "C" fn(*mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    },
    Nodes(extern "C" fn(*mut c_void, *const qd_node, *mut qd_error) -> qd_status),
}

/// What a backend, its buffers and its programs share; the context is destroyed with the last of them.
struct Shared {
    table: qd_backend_table,
    functions: Functions,
    name: String,
    description: String,
}

// SAFETY: the caller's functions may be called from any thread; the context is only given to them.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.destroy {
            destroy(self.table.context);
        }
    }
}

impl Shared {
    /// Calls a function that returns a status.
    fn call(
        &self,
        what: &'static str,
        function: impl FnOnce(*mut c_void, *mut qd_error) -> qd_status,
    ) -> Result<(), BackendError> {
        let mut error = qd_error::empty();
        match function(self.table.context, &raw mut error) {
            QD_STATUS_OK => Ok(()),
            status => Err(self.failed(what, status, &error, 0)),
        }
    }

    /// A failure of the caller's function.
    fn failed(
        &self,
        what: &'static str,
        status: qd_status,
        error: &qd_error,
        requested: usize,
    ) -> BackendError {
        let backend = self.name.clone();
        let reason = error.text(&format!("it returned {status}"));
        match status {
            QD_STATUS_OUT_OF_MEMORY => {
                BackendError::OutOfMemory { backend, requested: requested as u64, free: None }
            }
            QD_STATUS_DEVICE_LOST => BackendError::Lost { backend, reason },
            _ => BackendError::Failed { backend, what, reason },
        }
    }
}

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
        let buffer = region.buffer.as_any().downcast_ref::<OwnBuffer>()?;
        let is_own = Arc::ptr_eq(&buffer.shared, &self.shared);
        is_own.then_some(BufferPlace { buffer: buffer.pointer, offset: region.offset })
    }
}

/// # Safety
/// As of [`OwnBackend::new`].
unsafe fn functions(table: &qd_backend_table) -> Outcome<(Functions, String, String)> {
    // SAFETY: the caller's promise.
    let (name, description) =
        unsafe { (text(table.name, "name")?, optional_text(table.description, "description")?) };
    if name.is_empty() || name.eq_ignore_ascii_case("cpu") {
        return Err(Failure::argument(format!("a backend cannot be called \"{name}\"")));
    }
    if !table.alignment.is_power_of_two() {
        return Err(Failure::argument(format!("alignment {} is not a power of two", table.alignment)));
    }
    if ![QD_DEVICE_CPU, QD_DEVICE_GPU, QD_DEVICE_OTHER].contains(&table.kind) {
        return Err(Failure::argument(format!("there is no kind QD_DEVICE_… {}", table.kind)));
    }
    let compute = match (table.compile, table.run, table.run_node) {
        (Some(compile), Some(run), _) => Compute::Programs { compile, run },
        (None, None, Some(node)) => Compute::Nodes(node),
        _ => return Err(Failure::argument("a backend has both compile and run, or run_node")),
    };
    let functions = Functions {
        allocate: table.allocate.ok_or_else(|| Failure::null("allocate"))?,
        free: table.free.ok_or_else(|| Failure::null("free"))?,
        write: table.write.ok_or_else(|| Failure::null("write"))?,
        read: table.read.ok_or_else(|| Failure::null("read"))?,
        supports: table.supports.ok_or_else(|| Failure::null("supports"))?,
        compute,
    };
    Ok((functions, name.to_owned(), description.unwrap_or(name).to_owned()))
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
            asynchronous: false,
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
        Ok(Box::new(OwnQueue { shared: Arc::clone(&self.shared) }))
    }

    fn event(&self, _timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(Arc::new(OwnEvent))
    }
}

/// Memory of the caller's device.
struct OwnBuffer {
    shared: Arc<Shared>,
    pointer: *mut c_void,
    bytes: usize,
    usage: Usage,
}

// SAFETY: the address is only given back to the caller's functions, which may be called from any thread.
unsafe impl Send for OwnBuffer {}
// SAFETY: as above.
unsafe impl Sync for OwnBuffer {}

impl Drop for OwnBuffer {
    fn drop(&mut self) {
        (self.shared.functions.free)(self.shared.table.context, self.pointer);
    }
}

impl Buffer for OwnBuffer {
    fn backend(&self) -> &str {
        &self.shared.name
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_host(&self) -> bool {
        false
    }

    fn address(&self) -> u64 {
        self.shared.table.address.map_or(0, |address| address(self.shared.table.context, self.pointer))
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        self.shared.call("reading", |context, error| {
            let data = into.as_mut_ptr().cast();
            (self.shared.functions.read)(context, self.pointer, offset, data, into.len(), error)
        })
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        check_range(self, offset, from.len())?;
        self.shared.call("writing", |context, error| {
            let data = from.as_ptr().cast();
            (self.shared.functions.write)(context, self.pointer, offset, data, from.len(), error)
        })
    }

    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        check_range(self, offset, len)?;
        match self.shared.table.clear {
            Some(clear) => self
                .shared
                .call("clearing", |context, error| clear(context, self.pointer, offset, len, error)),
            None => self.write(offset, &vec![0; len]),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A compiled split.
struct OwnProgram {
    shared: Arc<Shared>,
    work: OwnWork,
    /// Keeps the buffers whose addresses the program has.
    _regions: Vec<Region>,
}

/// What a program does.
enum OwnWork {
    Program(*mut c_void),
    Nodes(Vec<NodeDescription>),
}

// SAFETY: the address is only given back to the caller's functions, which may be called from any thread.
unsafe impl Send for OwnProgram {}

impl Program for OwnProgram {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Drop for OwnProgram {
    fn drop(&mut self) {
        if let (OwnWork::Program(program), Some(free)) = (&self.work, self.shared.table.free_program) {
            free(self.shared.table.context, *program);
        }
    }
}

/// A queue that does everything at once.
struct OwnQueue {
    shared: Arc<Shared>,
}

impl OwnQueue {
    fn own<'r>(&self, region: &'r Region) -> Option<&'r OwnBuffer> {
        let buffer = region.buffer.as_any().downcast_ref::<OwnBuffer>()?;
        Arc::ptr_eq(&buffer.shared, &self.shared).then_some(buffer)
    }
}

impl Queue for OwnQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        to.buffer.write(to.offset, bytes)
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        from.buffer.read(from.offset, into)
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        if let (Some(source), Some(target), Some(copy)) =
            (self.own(from), self.own(to), self.shared.table.copy)
        {
            check_range(target, to.offset, from.bytes)?;
            let (source, target) = (source.pointer, target.pointer);
            self.shared.call("copying", |context, error| {
                copy(context, source, from.offset, target, to.offset, from.bytes, error)
            })?;
            return Ok(true);
        }
        let reachable = |region: &Region| self.own(region).is_some() || region.buffer.is_host();
        if !reachable(from) || !reachable(to) {
            return Ok(false);
        }
        let mut bytes = vec![0; from.bytes];
        from.buffer.read(from.offset, &mut bytes)?;
        to.buffer.write(to.offset, &bytes)?;
        Ok(true)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        let foreign = || BackendError::Foreign { backend: self.shared.name.clone(), what: "program" };
        let program = program.as_any().downcast_mut::<OwnProgram>().ok_or_else(foreign)?;
        if !Arc::ptr_eq(&program.shared, &self.shared) {
            return Err(foreign());
        }
        match (&program.work, self.shared.functions.compute) {
            (OwnWork::Program(program), Compute::Programs { run, .. }) => {
                self.shared.call("running", |context, error| run(context, *program, error))
            }
            (OwnWork::Nodes(nodes), Compute::Nodes(run)) => {
                for node in nodes {
                    self.shared.call("running", |context, error| run(context, node.node(), error))?;
                }
                Ok(())
            }
            _ => Err(foreign()),
        }
    }

    fn record(&mut self, _event: &dyn Event) -> Result<(), BackendError> {
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        event.wait()
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// All work is done when a call returns.
struct OwnEvent;

impl Event for OwnEvent {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn seconds_since(&self, _earlier: &dyn Event) -> Option<f64> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
