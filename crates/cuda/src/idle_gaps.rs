//! Measures how long the GPU is idle between two programs; off by default.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use quadriga_runtime::{BackendError, Event};

use crate::context::Context;
use crate::event::CudaEvent;

/// The most programs that are recorded.
const MAX_PROGRAMS: usize = 8192;

/// Start and end events of programs; prints the gaps between them when it is dropped.
pub(crate) struct IdleGaps {
    context: Arc<Context>,
    /// Start and end of each program, in launch order.
    marks: Mutex<Vec<[CudaEvent; 2]>>,
}

impl IdleGaps {
    pub(crate) fn new(context: &Arc<Context>) -> IdleGaps {
        IdleGaps { context: Arc::clone(context), marks: Mutex::default() }
    }

    /// Records an event before and after a launch.
    pub(crate) fn record(
        &self,
        stream: sys::CUstream,
        launch: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mark = || -> Result<CudaEvent, BackendError> {
            let event = CudaEvent::new(&self.context, true)?;
            // SAFETY: event and stream are live.
            let code = unsafe { sys::cuEventRecord(event.handle(), stream) };
            self.context.check("cuEventRecord", code).map(|()| event)
        };
        let begin = mark()?;
        launch()?;
        let end = mark()?;
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if marks.len() < MAX_PROGRAMS {
            marks.push([begin, end]);
        }
        Ok(())
    }
}

impl Drop for IdleGaps {
    fn drop(&mut self) {
        let marks = self.marks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let pairs = marks.iter().zip(marks.iter().skip(1));
        let mut times: Vec<f64> =
            pairs.filter_map(|([_, end], [begin, _])| Some(begin.seconds_since(end)? * 1e6)).collect();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
        eprintln!(
            "{}: {} programs; idle µs between two: median {:.1}, 10th percentile {:.1}, 90th percentile {:.1}",
            self.context.name,
            marks.len(),
            at(0.5),
            at(0.1),
            at(0.9)
        );
    }
}
