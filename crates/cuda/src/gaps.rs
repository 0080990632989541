//! How long the device had nothing to do between two programs: a tool for measuring, off unless asked for.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use quadriga_runtime::{BackendError, Event};

use crate::context::Context;
use crate::event::CudaEvent;
use crate::faults::Faults;

/// Set to anything, programs mark their starts and ends, and the times between are printed when the backend goes.
pub(crate) const VARIABLE: &str = "QUADRIGA_CUDA_GAPS";

/// The most that are kept.
const MOST: usize = 8192;

pub(crate) struct Gaps {
    context: Arc<Context>,
    faults: Arc<Faults>,
    /// Start and end of each program, in the order of their launching.
    marks: Mutex<Vec<[CudaEvent; 2]>>,
}

impl Gaps {
    pub(crate) fn new(context: &Arc<Context>, faults: &Arc<Faults>) -> Gaps {
        Gaps { context: Arc::clone(context), faults: Arc::clone(faults), marks: Mutex::default() }
    }

    /// Launches something between two marks.
    pub(crate) fn around(
        &self,
        stream: sys::CUstream,
        launch: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mark = || -> Result<CudaEvent, BackendError> {
            let event = CudaEvent::new(&self.context, &self.faults, true)?;
            // SAFETY: event and stream are live.
            let code = unsafe { sys::cuEventRecord(event.handle(), stream) };
            self.context.check("cuEventRecord", code).map(|()| event)
        };
        let begin = mark()?;
        launch()?;
        let end = mark()?;
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if marks.len() < MOST {
            marks.push([begin, end]);
        }
        Ok(())
    }
}

impl Drop for Gaps {
    fn drop(&mut self) {
        let marks = self.marks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let neighbours = marks.iter().zip(marks.iter().skip(1));
        let mut times: Vec<f64> =
            neighbours.filter_map(|([_, end], [begin, _])| Some(begin.seconds_since(end)? * 1e6)).collect();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
        eprintln!(
            "{}: {} programs; µs between two: median {:.1}, a tenth below {:.1}, a tenth above {:.1}",
            self.context.name,
            marks.len(),
            at(0.5),
            at(0.1),
            at(0.9)
        );
    }
}
