//! Observers: intermediate results of a run.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;

use quadriga::graph::{Graph, NodeId};
use quadriga::runtime::{Observed, ObservedRun, Observer, Plan};

use crate::arguments::c_text;
use crate::guard;
use crate::session::{qd_session, with};
use crate::status::{Failure, QD_STATUS_END, QD_STATUS_OK, qd_error, qd_status};
use crate::tensor::{QD_NO_TENSOR, qd_tensor, qd_tensor_info};

/// The result of a node, right after it was computed.
#[repr(C)]
pub struct qd_observed {
    /// The tensor.
    pub tensor: qd_tensor,
    /// Its name.
    pub name: *const c_char,
    /// The operation.
    pub operation: *const c_char,
    /// The number of the backend that computed it.
    pub backend: usize,
    /// Its type and shape.
    pub info: qd_tensor_info,
    /// Its bytes, with its own strides; NULL when the observer is asked whether it wants them.
    pub data: *const c_void,
    /// How many.
    pub bytes: usize,
}

/// Is asked before a run whether the result of a node is wanted: 0 if not.
pub type qd_wants_callback =
    Option<extern "C" fn(user_data: *mut c_void, observed: *const qd_observed) -> i32>;

/// Sees a result. 0 to go on, anything else to end the run.
pub type qd_observe_callback =
    Option<extern "C" fn(user_data: *mut c_void, observed: *const qd_observed) -> i32>;

/// Runs the current plan with the inputs that are set, and shows the results of nodes to a callback, on the calling thread.
/// `wants` says which; NULL: all. QD_STATUS_END if the callback ended the run: outputs cannot be read then.
///
/// Threads: one at a time for each session.
#[unsafe(no_mangle)]
pub extern "C" fn qd_session_observe(
    session: *mut qd_session,
    wants: qd_wants_callback,
    observe: qd_observe_callback,
    user_data: *mut c_void,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::code(error, || {
        let observe = observe.ok_or_else(|| Failure::null("observe"))?;
        let mut observer = Callbacks { wants, observe, data: user_data };
        let run = with(session, |session| Ok(session.debug().observe(&mut observer)?))?;
        Ok(match run {
            ObservedRun::Finished => QD_STATUS_OK,
            ObservedRun::Stopped { .. } => QD_STATUS_END,
        })
    })
}

/// The caller's functions as an observer.
struct Callbacks {
    wants: qd_wants_callback,
    observe: extern "C" fn(*mut c_void, *const qd_observed) -> i32,
    data: *mut c_void,
}

impl Callbacks {
    /// Calls a function with the description of a node's result.
    fn call(
        &self,
        function: extern "C" fn(*mut c_void, *const qd_observed) -> i32,
        (plan, node): (&Plan, NodeId),
        bytes: Option<&[u8]>,
    ) -> i32 {
        let graph: &Graph = plan.graph();
        let Some((n, tensor)) = graph.get_node(node).and_then(|n| Some((n, graph.get(n.output())?))) else {
            return 0;
        };
        let (name, operation) = (c_text(&graph.node_name(node)), c_text(n.op().name()));
        let observed = qd_observed {
            tensor: qd_tensor::try_from(n.output().index()).unwrap_or(QD_NO_TENSOR),
            name: name.as_ptr(),
            operation: operation.as_ptr(),
            backend: plan.backend_of(node),
            info: qd_tensor_info::of(tensor),
            data: bytes.map_or(std::ptr::null(), |bytes| bytes.as_ptr().cast()),
            bytes: bytes.map_or(0, <[u8]>::len),
        };
        function(self.data, &raw const observed)
    }
}

impl Observer for Callbacks {
    fn wants(&mut self, plan: &Plan, node: NodeId) -> bool {
        self.wants.is_none_or(|wants| self.call(wants, (plan, node), None) != 0)
    }

    fn observe(&mut self, observed: Observed<'_>) -> ControlFlow<()> {
        match self.call(self.observe, (observed.plan, observed.node), Some(observed.bytes)) {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    }
}
