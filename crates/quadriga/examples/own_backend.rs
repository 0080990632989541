//! A backend of one's own: it computes additions and multiplications of f32 tensors and leaves the rest to the CPU.
//!
//! ```sh
//! cargo run --release -p quadriga --example own_backend
//! ```
//!
//! Its memory is its own, so the scheduler copies tensors between it and the CPU. It is synchronous: every call returns
//! when the work is done, so events are always complete. crates/sim is a backend with asynchronous queues, and
//! `quadriga_conformance::BackendTarget` runs the conformance suite on any backend.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use quadriga::cpu;
use quadriga::graph::{Binary, DType, Graph, GraphBuilder, NodeId, Op};
use quadriga::runtime::{
    Backend, BackendError, Buffer, Device, DeviceKind, Event, MemoryFacts, Program, Queue, Refusal, Region,
    Scheduler, SplitSource, Usage, check_range,
};

const NAME: &str = "adder";

/// The device. A real one would hold a driver's handle.
struct Adder;

impl Backend for Adder {
    fn name(&self) -> &str {
        NAME
    }

    fn device(&self) -> Device {
        Device {
            description: "adds and multiplies".to_owned(),
            kind: DeviceKind::Simulated,
            asynchronous: false,
            total_bytes: None,
            free_bytes: None,
        }
    }

    fn memory(&self) -> MemoryFacts {
        // Not host memory: other backends reach it only through `Buffer::read` and `Buffer::write`.
        MemoryFacts { alignment: 64, max_buffer: None, host: false }
    }

    fn allocate(&self, bytes: usize, usage: Usage) -> Result<Arc<dyn Buffer>, BackendError> {
        Ok(Arc::new(AdderBuffer { bytes: Mutex::new(vec![0; bytes]), usage }))
    }

    fn staging(&self, bytes: usize) -> Result<Arc<dyn Buffer>, BackendError> {
        self.allocate(bytes, Usage::Staging)
    }

    /// The scheduler asks this for every node; a refusal sends the node to the next backend.
    fn supports(&self, graph: &Graph, node: NodeId) -> Result<(), Refusal> {
        let refuse = |reason: &'static str| Err(Refusal(reason.into()));
        let Some(n) = graph.get_node(node) else { return refuse("there is no such node") };
        if n.op().is_view() {
            return Ok(());
        }
        let Op::Binary(Binary::Add | Binary::Mul) = n.op() else {
            return refuse("only add and mul");
        };
        let plain = |id: &_| graph.get(*id).is_some_and(|t| t.dtype() == DType::F32 && t.is_contiguous());
        let same_shape =
            |id: &_| graph.get(*id).map(|t| t.shape()) == graph.get(n.output()).map(|t| t.shape());
        if !graph.inputs(node).iter().all(|id| plain(id) && same_shape(id)) {
            return refuse("only contiguous f32 tensors of equal shape");
        }
        Ok(())
    }

    /// A split is compiled once and run many times.
    fn compile(&self, split: &SplitSource<'_>) -> Result<Box<dyn Program>, BackendError> {
        let mut steps = Vec::new();
        for node in split.nodes {
            let Some(n) = split.graph.get_node(*node) else { continue };
            let operation: fn(f32, f32) -> f32 = match n.op() {
                Op::Binary(Binary::Add) => |a, b| a + b,
                Op::Binary(Binary::Mul) => |a, b| a * b,
                _ => continue,
            };
            let region = |id| {
                (split.place)(id).map(|place| place.region).ok_or_else(|| BackendError::Unsupported {
                    backend: NAME.to_owned(),
                    node: split.graph.node_name(*node),
                    reason: "a tensor has no place".to_owned(),
                })
            };
            let [a, b] = split.graph.inputs(*node) else { continue };
            steps.push(NodeStep {
                operation,
                inputs: [region(*a)?, region(*b)?],
                output: region(n.output())?,
            });
        }
        Ok(Box::new(AdderProgram { steps }))
    }

    fn queue(&self) -> Result<Box<dyn Queue>, BackendError> {
        Ok(Box::new(AdderQueue))
    }

    fn event(&self, _timing: bool) -> Result<Arc<dyn Event>, BackendError> {
        Ok(Arc::new(AdderEvent))
    }
}

/// Memory of the device.
struct AdderBuffer {
    bytes: Mutex<Vec<u8>>,
    usage: Usage,
}

impl AdderBuffer {
    /// Calls `access` with a range of the memory.
    fn with(&self, offset: usize, len: usize, access: impl FnOnce(&mut [u8])) -> Result<(), BackendError> {
        check_range(self, offset, len)?;
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(range) = bytes.get_mut(offset..offset + len) {
            access(range);
        }
        Ok(())
    }
}

impl Buffer for AdderBuffer {
    fn backend(&self) -> &str {
        NAME
    }

    fn bytes(&self) -> usize {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_host(&self) -> bool {
        false
    }

    fn address(&self) -> u64 {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).as_ptr().addr() as u64
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        self.with(offset, into.len(), |bytes| into.copy_from_slice(bytes))
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        self.with(offset, from.len(), |bytes| bytes.copy_from_slice(from))
    }

    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        self.with(offset, len, |bytes| bytes.fill(0))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// One node: an operation on two regions with a result in a third, which may be one of them.
struct NodeStep {
    operation: fn(f32, f32) -> f32,
    inputs: [Region; 2],
    output: Region,
}

struct AdderProgram {
    steps: Vec<NodeStep>,
}

impl Program for AdderProgram {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

fn read(region: &Region) -> Result<Vec<f32>, BackendError> {
    let mut bytes = vec![0; region.bytes];
    region.buffer.read(region.offset, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect())
}

/// Does everything at once.
struct AdderQueue;

impl Queue for AdderQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        to.buffer.write(to.offset, bytes)
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        from.buffer.read(from.offset, into)
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        let reachable = |region: &Region| region.buffer.backend() == NAME || region.buffer.is_host();
        if !reachable(from) || !reachable(to) {
            return Ok(false);
        }
        let mut bytes = vec![0; from.bytes];
        from.buffer.read(from.offset, &mut bytes)?;
        to.buffer.write(to.offset, &bytes)?;
        Ok(true)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        let Some(program) = program.as_any().downcast_mut::<AdderProgram>() else {
            return Err(BackendError::Foreign { backend: NAME.to_owned(), what: "program" });
        };
        for NodeStep { operation, inputs: [a, b], output } in &program.steps {
            let (a, b) = (read(a)?, read(b)?);
            let result: Vec<u8> =
                a.iter().zip(&b).flat_map(|(a, b)| operation(*a, *b).to_ne_bytes()).collect();
            output.buffer.write(output.offset, &result)?;
        }
        Ok(())
    }

    fn record(&mut self, _event: &dyn Event) -> Result<(), BackendError> {
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        // An event of another backend: the host waits for it.
        event.wait()
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// All work is done when a call returns.
struct AdderEvent;

impl Event for AdderEvent {
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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 4]);
    let squares = x * x; // adder
    let bent = squares.tanh(); // cpu
    g.output("y", bent + x); // adder
    let plan = Scheduler::new((Adder, cpu::Backend::new()?)).plan(g.finish()?)?;
    println!("{plan:#}");

    let x = [0.0f32, 0.5, 1.0, 1.5, -0.5, -1.0, -1.5, 2.0];
    let mut session = plan.session()?;
    session.run(&[("x", &x)])?;
    let y: Vec<f32> = session.read("y")?;
    println!("{y:?}");
    for (x, y) in x.iter().zip(&y) {
        assert!((y - ((x * x).tanh() + x)).abs() < 1e-4);
    }
    // The scheduler used both backends.
    assert_eq!(plan.splits().splits.iter().map(|split| split.backend).collect::<Vec<_>>(), [0, 1, 0]);
    Ok(())
}
