//! Threads that compute masks.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::mask::MaskJob;
use crate::{Error, Result};

/// The most threads: a mask takes far less time than a step of the device.
const MAX_THREADS: usize = 4;

/// The stack of a thread: regular expressions are derived recursively.
const STACK: usize = 32 << 20;

/// A queue of masks to compute, and the threads that do so. They end with it.
pub(super) struct Workers {
    queue: Mutex<Sender<Arc<MaskJob>>>,
}

impl Workers {
    /// Starts the threads.
    pub(super) fn start() -> Result<Workers> {
        let (queue, jobs) = channel();
        let jobs = Arc::new(Mutex::new(jobs));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..cores.div_ceil(2).min(MAX_THREADS) {
            let jobs = Arc::clone(&jobs);
            let thread = std::thread::Builder::new().name("quadriga-masks".to_owned()).stack_size(STACK);
            thread.spawn(move || run(&jobs)).map_err(|error| Error::Thread { reason: error.to_string() })?;
        }
        Ok(Workers { queue: Mutex::new(queue) })
    }

    /// Has a job done.
    pub(super) fn submit(&self, job: &Arc<MaskJob>) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        // Without threads, which end only with the queue, the work is done here.
        if queue.send(Arc::clone(job)).is_err() {
            job.work();
        }
    }
}

fn run(jobs: &Mutex<Receiver<Arc<MaskJob>>>) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(job) => job.work(),
            Err(_) => return,
        }
    }
}
