//! Compiled splits of a backend of the caller's own.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use quadriga::runtime::{BackendError, Program, Region};

use super::node::NodeDescription;
use super::shared::Shared;

/// A compiled split.
pub(super) struct OwnProgram {
    pub(super) shared: Arc<Shared>,
    pub(super) work: OwnWork,
    /// Keeps the buffers whose addresses the program has.
    pub(super) _regions: Vec<Region>,
}

/// What a program does.
pub(super) enum OwnWork {
    Program(*mut c_void),
    Nodes(Vec<NodeDescription>),
}

// SAFETY: the address is only given back to the caller's functions, which may be called from any thread.
unsafe impl Send for OwnProgram {}

impl OwnProgram {
    /// A program, if it is one of this backend.
    pub(super) fn of<'p>(
        shared: &Arc<Shared>,
        program: &'p mut dyn Program,
    ) -> Result<&'p mut OwnProgram, BackendError> {
        let foreign = || BackendError::Foreign { backend: shared.name.clone(), what: "program" };
        let program = program.as_any().downcast_mut::<OwnProgram>().ok_or_else(foreign)?;
        if Arc::ptr_eq(&program.shared, shared) { Ok(program) } else { Err(foreign()) }
    }
}

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
