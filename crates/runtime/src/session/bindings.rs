//! Memory of the caller for inputs, states and outputs.

use super::session::Session;
use crate::schedule::BoundStorage;
use crate::{BackendError, Region, RuntimeError};

/// Memory of the caller. It is used for every graph that is prepared afterwards; graphs that were prepared before and have
/// a tensor of the name are forgotten. (A plan that the caller made with [`Scheduler::plan`](crate::Scheduler::plan) has
/// memory of its own.)
///
/// Inputs of a graph may share bytes. What a run writes, a state or an output, must not overlap anything else that is
/// bound, and two outputs that are one tensor have one region: a graph that breaks this is refused.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::{Backend, Region, Scheduler, Session, Usage};
///
/// let cpu = std::sync::Arc::new(quadriga_cpu::Backend::new()?);
/// let region = Region::new(cpu.allocate(16, Usage::Compute)?, 0, 16)?;
/// let mut session = Session::new(&Scheduler::new(cpu))?;
/// session.bind_output("y", region.clone())?;
///
/// let g = GraphBuilder::new();
/// g.output("y", g.input("x", DType::F32, [4]).scale(2.0));
/// session.use_graph(g.finish()?)?;
/// session.run(&[("x", &[1.0f32; 4])])?;
/// let mut bytes = [0; 4];
/// region.buffer.read(region.offset, &mut bytes)?;
/// assert_eq!(f32::from_ne_bytes(bytes), 2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Session {
    /// Uses the caller's memory for the input or state of this name. Its nodes run on the backend that the memory belongs
    /// to.
    ///
    /// An input counts as set: every run reads the bytes that are there, and the caller writes them while no run is in
    /// flight. A state keeps the bytes that are there; it must be bound before the first graph that has it.
    pub fn bind_leaf(&mut self, name: &str, region: Region) -> Result<(), RuntimeError> {
        let place = self.bound(region)?;
        if self.memory.states.get(name).is_some() {
            return Err(RuntimeError::Conflict {
                what: "state",
                name: name.to_owned(),
                before: "in memory of the session".to_owned(),
                after: "bound to memory of the caller".to_owned(),
            });
        }
        while let Some(plan) = self.plans.position(|prepared| prepared.plan.graph().leaf(name).is_some()) {
            self.plans.remove(plan);
        }
        self.memory.bindings.leaves.insert(name.to_owned(), place);
        Ok(())
    }

    /// Uses the caller's memory for the output of this name, which must be computed; if it is a view, for the tensor that
    /// it views. The node runs on the backend that the memory belongs to.
    pub fn bind_output(&mut self, name: &str, region: Region) -> Result<(), RuntimeError> {
        let place = self.bound(region)?;
        while let Some(plan) = self.plans.position(|prepared| prepared.plan.graph().output(name).is_some()) {
            self.plans.remove(plan);
        }
        self.memory.bindings.outputs.insert(name.to_owned(), place);
        Ok(())
    }

    /// The place of a region; waits for runs in flight.
    fn bound(&mut self, region: Region) -> Result<BoundStorage, RuntimeError> {
        self.wait()?;
        let owner = region.buffer.backend().to_owned();
        let backends = self.backends();
        let number = backends.iter().position(|backend| backend.name() == owner);
        let Some((number, backend)) = number.and_then(|n| Some((n, backends.get(n)?))) else {
            let backend = owner;
            return Err(RuntimeError::device(BackendError::Foreign { backend, what: "buffer" }));
        };
        let facts = backend.memory();
        let address = region.buffer.address().wrapping_add(region.offset as u64);
        // On the host the elements must be aligned, which the backend checks.
        if !facts.host && !address.is_multiple_of(facts.alignment.max(1) as u64) {
            return Err(RuntimeError::device(BackendError::Failed {
                backend: owner,
                what: "placing a tensor in memory of the caller",
                reason: format!("it must start at a multiple of {} bytes", facts.alignment),
            }));
        }
        let backend = backend.clone();
        let region = Region::new(region.buffer, region.offset, region.bytes).map_err(RuntimeError::device)?;
        Ok(BoundStorage { number, backend, region })
    }
}
